"""What the default options reach: pooled models with several candidate defaults beside XGBoost, LightGBM, scikit-learn.

Every table is cut in two thirds to train on and a third to test on; the score is AUC (two classes), accuracy (more) or
R^2 (numbers). Peers have their own default options, on one thread as ours, and take categories as categories. The
trees of every exact system are, bit for bit, those of "pooled", so its accuracy is theirs. `--federated` has the
shipped options alone, and beside them SecureBoost between two parties with half of the columns each, and FederBoost
between three with a third of the rows.

Claims: with the shipped defaults, the mean score over the splits is less than 0.005 below the best peer's on each
table. FederBoost by row, whose default is 32 bins, has the very scores of the pooled model with 32 bins; the run fails
if it has others.
About an hour, and minutes more for each table with `--federated`; `--quick`: one split of the tables of fewer than
20,000 rows. Set OMP_NUM_THREADS=1, which scikit-learn needs for one thread.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import lightgbm
import numpy as np
import pandas as pd
import xgboost
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score
from sklearn.model_selection import train_test_split

import category_accuracy
import treaty
from data import FLIGHTS, arguments, find, report
from treaty import GBDTClassifier, GBDTRegressor

OURS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "20 x 3 x 0.3": {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3},
    "100 x 4 x 0.1": {"n_estimators": 100, "max_depth": 4, "learning_rate": 0.1},
    "100 x 6 x 0.1": {"n_estimators": 100, "max_depth": 6, "learning_rate": 0.1},
    "100 x 31 leaves x 0.1": {"n_estimators": 100, "max_leaves": 31, "learning_rate": 0.1},
    "shipped, 64 bins": {"max_bin": 64},
    "shipped, 32 bins": {"max_bin": 32},
}
FEDERATED: dict[str, Any] = {
    "SecureBoost, open": treaty.SecureBoost(allow_exact_sums=True),
    "SecureBoost, sealed": treaty.SecureBoost(),
    "FederBoost by row": treaty.FederBoostHorizontal(),
}
SMALL = 20_000  # rows of the tables of a quick run, at most
ADULT = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain "
    "capital-loss hours-per-week native-country income"
).split()


class Task(NamedTuple):
    """A table, its target and what is predicted: "two classes", "classes" or "numbers"."""

    title: str
    X: pd.DataFrame
    y: NDArray[Any]
    kind: str


def tables(most: float) -> Iterator[Task]:
    """Yield the tables of at most so many rows that are at hand."""
    for title, load, kind in (
        ("breast cancer", load_breast_cancer, "two classes"), ("wine", load_wine, "classes"),
        ("digits", load_digits, "classes"), ("diabetes", load_diabetes, "numbers"),
    ):  # fmt: skip
        X, y = load(return_X_y=True, as_frame=True)
        yield Task(title, X.set_axis([str(name).replace(" ", "_") for name in X], axis=1), y.to_numpy(), kind)
    for title, file, label, dropped, kind, rows in (
        ("HIGGS", "higgs_15k.parquet", "label", ["split"], "two classes", 15_000),
        ("SUSY", "susy_11k_8feat.parquet", "label", ["split"], "two classes", 11_000),
        ("credit default", "credit2.parquet", "default.payment.next.month", ["ID"], "two classes", 30_000),
        ("Give Me Some Credit", "credit1.parquet", "SeriousDlqin2yrs", ["id"], "two classes", 150_000),
        ("flights, late", "flights.parquet", "arr_late15", None, "two classes", 327_346),
        ("flights, minutes", "flights.parquet", "arr_delay", None, "numbers", 327_346),
    ):
        if rows <= most and (path := find(file)) is not None:
            frame = pd.read_parquet(path)
            X = (
                frame[[*FLIGHTS, "carrier", "origin", "dest"]]
                if dropped is None
                else frame.drop(columns=[label, *dropped])
            )
            yield Task(title, with_categories(X), frame[label].to_numpy(), kind)
    for title, name, label, kind in (
        ("vehicle", "vehicle_scale", "y", "classes"), ("ionosphere", "ionosphere_scale", "label", "two classes"),
        ("motor", "motor", "motor_speed", "numbers"), ("student", "student", "y", "numbers"),
        ("doctor visits", "dvisits", "doctorco", "numbers"),
    ):  # fmt: skip
        guest, host = (find(f"fate_examples/{name}_hetero_{side}.csv.gz") for side in ("guest", "host"))
        if guest is not None and host is not None:
            one, other = (pd.read_csv(path) for path in (guest, host))
            joined = one.merge(other, left_on=one.columns[0], right_on=other.columns[0]).drop(
                columns=list({one.columns[0], other.columns[0]})
            )
            varying = joined.columns[joined.nunique() > 1]  # scikit-learn fails on a column without values
            yield Task(title, joined[varying].drop(columns=label), joined[label].to_numpy(), kind)
    if most >= 48_842 and (path := find("adult.data.gz")) is not None:
        frame = pd.read_csv(path, names=ADULT, skipinitialspace=True, na_values="?")
        y = frame["income"].str.startswith(">").to_numpy().astype(int)
        yield Task("Adult", with_categories(frame.drop(columns="income")), y, "two classes")
    yield ames_like()
    for name, X, y, _ in category_accuracy.tables():
        yield Task(name, X, y, "two classes")


def as_known(X: pd.DataFrame, library: str) -> pd.DataFrame:
    """Return a table as a library takes it: scikit-learn has no more than 255 categories, the others become numbers."""
    many = [name for name in X.select_dtypes("category") if len(X[name].cat.categories) > 255]
    return X.assign(**{name: X[name].cat.codes for name in many}) if library == "scikit-learn" else X


def with_categories(X: pd.DataFrame) -> pd.DataFrame:
    text = X.select_dtypes(exclude="number").columns
    return X.astype(dict.fromkeys(text, "category"))


def ames_like(rows: int = 1460, text: int = 43, numbers: int = 36, seed: int = 0) -> Task:
    """Draw a table like Ames housing: few rows, 43 text columns of 3 to 25 levels, 36 of numbers, some missing."""
    rng = np.random.default_rng(seed)
    quality = rng.normal(size=rows)  # what most columns of a house have in common
    columns: dict[str, Any] = {}
    price = 12 + 0.25 * quality
    for k in range(text):
        levels = int(rng.integers(3, 26))
        effect, lean = rng.normal(size=levels), rng.dirichlet(np.ones(levels))
        code = np.where(
            rng.random(rows) < 0.4,
            np.clip(((quality + 2.5) / 5 * levels).astype(int), 0, levels - 1),
            rng.choice(levels, rows, p=lean),
        )
        columns[f"text{k}"] = pd.Categorical([f"level{c}" for c in code])
        price = price + 0.02 * effect[code] * (k < 20)
    for k in range(numbers):
        value = quality * (k < 15) + rng.normal(size=rows)
        price = price + 0.03 * np.tanh(value) * (k < 12)
        columns[f"number{k}"] = np.where(rng.random(rows) < 0.03, np.nan, np.round(np.exp(value / 2) * 1000))
    return Task("Ames-like", pd.DataFrame(columns), np.exp(price + 0.08 * rng.normal(size=rows)), "numbers")


def peers(kind: str) -> dict[str, Callable[[], Any]]:
    """Return the makers of the peers' models with their defaults, on one thread."""
    if kind == "numbers":
        return {
            "XGBoost": partial(xgboost.XGBRegressor, n_jobs=1, enable_categorical=True),
            "LightGBM": partial(lightgbm.LGBMRegressor, n_jobs=1, verbose=-1),
            "scikit-learn": partial(HistGradientBoostingRegressor, categorical_features="from_dtype"),
        }
    return {
        "XGBoost": partial(xgboost.XGBClassifier, n_jobs=1, enable_categorical=True),
        "LightGBM": partial(lightgbm.LGBMClassifier, n_jobs=1, verbose=-1),
        "scikit-learn": partial(HistGradientBoostingClassifier, categorical_features="from_dtype"),
    }


def ours(kind: str, federated: list[str], columns: list[str]) -> dict[str, Callable[[], Any]]:
    """Return the makers of our models: on one table, and between parties for the systems named."""
    estimator = GBDTRegressor if kind == "numbers" else GBDTClassifier
    # FederBoost by row has at most 32 bins, and is compared with one table that has
    named = ["shipped", *(["shipped, 32 bins"] if "FederBoost by row" in federated else [])]
    chosen = {name: OURS[name] for name in named} if federated else OURS
    found = {name: partial(estimator, n_jobs=1, random_state=0, **options) for name, options in chosen.items()}
    parties = {"a": columns[::2], "b": columns[1::2]}
    for name in federated:
        cut = {} if name == "FederBoost by row" else {"parties": parties, "active": "a"}
        found[name] = partial(estimator, FEDERATED[name], n_jobs=1, random_state=0, **cut)
    return found


def trained(model: Any, X: pd.DataFrame, y: NDArray[Any]) -> Any:
    """Fit a model; one of parties with rows of their own takes a third of the rows each."""
    if isinstance(getattr(model, "protocol", None), treaty.FederBoostHorizontal):
        return model.fit({f"p{k}": (X.iloc[k::3], y[k::3]) for k in range(3)})
    return model.fit(X, y)


def score(model: Any, X: pd.DataFrame, y: NDArray[Any], kind: str) -> float:
    if kind == "two classes":
        return float(roc_auc_score(y, model.predict_proba(X)[:, 1]))
    if kind == "classes":
        return float(accuracy_score(y, model.predict(X)))
    return float(r2_score(y, model.predict(X)))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--splits", type=int, default=3, help="splits of each table in train and test rows")
    parser.add_argument("--only", nargs="*", help="titles of tables, instead of all")
    parser.add_argument("--federated", nargs="*", choices=FEDERATED, default=[], help="systems between parties, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows: list[dict[str, object]] = []
    for task in tables(SMALL if options.quick else np.inf):
        if options.only and task.title not in options.only:
            continue
        found: dict[str, list[tuple[float, float]]] = {}
        for seed in range(1 if options.quick else options.splits):
            stratify = None if task.kind == "numbers" else task.y
            codes = pd.factorize(task.y, sort=True)[0] if task.kind != "numbers" else task.y
            X, X_test, y, y_test = train_test_split(
                task.X, codes, test_size=1 / 3, random_state=seed, stratify=stratify
            )
            for name, make in {**ours(task.kind, options.federated, list(task.X)), **peers(task.kind)}.items():
                known, known_test = as_known(X, name), as_known(X_test, name)
                start = time.perf_counter()
                model = trained(make(), known, y)
                taken = time.perf_counter() - start
                found.setdefault(name, []).append((score(model, known_test, y_test, task.kind), taken))
        of_rows = found.get("FederBoost by row", [])
        if of_rows and [of[0] for of in of_rows] != [of[0] for of in found["shipped, 32 bins"]]:
            raise SystemExit(f"{task.title}: FederBoost by row has other scores than one table with as many bins")
        means = {name: np.mean(values, axis=0) for name, values in found.items()}
        best = max(means[name][0] for name in peers(task.kind))
        rows += [
            {
                "data": task.title, "rows": len(task.y), "columns": task.X.shape[1], "model": name,
                "score": float(mean[0]), "below the best peer": float(best - mean[0]), "seconds": float(mean[1]),
            }
            for name, mean in means.items()
        ]  # fmt: skip
        print(
            task.title, {name: (round(float(m[0]), 4), round(float(m[1]), 2)) for name, m in means.items()}, flush=True
        )
    if options.federated:
        report("default_options_federated", rows, quick=options.quick, keys=("data", "model"))
    else:
        report("default_options", rows, quick=options.quick)


if __name__ == "__main__":
    main()
