"""Convergence of SecureBoost beside plain GBDT and XGBoost on the pooled table, in boosting rounds.

Claim (Cheng et al. 2021, section 6): SecureBoost converges as its counterparts on the pooled table do; test AUC
differs from XGBoost's by at most 0.002 on average. GBDT is Friedman's, by scikit-learn: exact thresholds, splits by
squared error of the gradients; it takes no missing values, so it gets the training rows' medians. All: depth 3, rate
0.3, `subsample=0.8`, start at probability 0.5; SecureBoost and XGBoost 32 bins. Ten fixed splits, two thirds training.
Split 0 of each data set trains between two parties, which hold half of the columns each, and checks that the pooled
grower's losses and probabilities are the same bit for bit; other splits use the pooled grower. About 10 minutes;
`--quick`: the smaller data set, one split, 10 rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import xgboost
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.metrics import log_loss, roc_auc_score

import figures
from data import Data, arguments, default_of_credit_card_clients, give_me_some_credit, report, splits, verdict, write
from treaty import GBDTClassifier, SecureBoost

BAR = 0.002
COMMON = {"max_depth": 3, "learning_rate": 0.3, "subsample": 0.8}
BINNED = {**COMMON, "max_bin": 32, "base_score": 0.5}
MODELS = ("SecureBoost", "XGBoost", "GBDT")


def halves(x: np.ndarray) -> dict[str, np.ndarray]:
    middle = x.shape[1] // 2
    return {"active": x[:, :middle], "passive": x[:, middle:]}


def ours(
    system: str | SecureBoost, data: Data, train: np.ndarray, test: np.ndarray, rounds: int, seed: int
) -> np.ndarray:
    """Return the losses on training and test rows and the test AUC after each round (3, rounds)."""
    model = GBDTClassifier(system, n_estimators=rounds, random_state=seed, **BINNED)
    tables = [(halves(data.x[rows]), data.y[rows]) for rows in (train, test)]
    model.fit(*tables[0], eval_set=tables)
    losses = [model.evals_result_[name]["logloss"] for name in ("eval_0", "eval_1")]
    return np.array([*losses, aucs(model.staged_predict_proba(tables[1][0]), data.y[test])])


def xgb(data: Data, train: np.ndarray, test: np.ndarray, rounds: int, seed: int) -> np.ndarray:
    model = xgboost.XGBClassifier(
        n_estimators=rounds, tree_method="hist", eval_metric=["logloss", "auc"], random_state=seed, n_jobs=2, **BINNED
    )
    tables = [(data.x[rows], data.y[rows]) for rows in (train, test)]
    found = model.fit(*tables[0], eval_set=tables, verbose=False).evals_result()
    return np.array([*(found[name]["logloss"] for name in found), found["validation_1"]["auc"]])


def gbdt(data: Data, train: np.ndarray, test: np.ndarray, rounds: int, seed: int) -> np.ndarray:
    x = SimpleImputer(strategy="median").fit(data.x[train]).transform(data.x)
    model = GradientBoostingClassifier(n_estimators=rounds, init="zero", random_state=seed, **COMMON)
    model.fit(x[train], data.y[train])
    losses = [[log_loss(data.y[rows], p) for p in model.staged_predict_proba(x[rows])] for rows in (train, test)]
    return np.array([*losses, aucs(model.staged_predict_proba(x[test]), data.y[test])])


def aucs(stages: Iterable[np.ndarray], y: np.ndarray) -> list[float]:
    return [float(roc_auc_score(y, p[:, 1])) for p in stages]


def curves(data: Data, rounds: int, n_splits: int) -> np.ndarray:
    """Return every model's losses and AUC (n_models, n_splits, 3, rounds)."""
    found = np.empty((len(MODELS), n_splits, 3, rounds))
    for seed, (train, test) in enumerate(splits(data, n_splits)):
        task = (data, train, test, rounds, seed)
        found[:, seed] = ours("pooled", *task), xgb(*task), gbdt(*task)
        if seed == 0 and not np.array_equal(ours(SecureBoost(allow_exact_sums=True), *task), found[0, 0]):
            raise AssertionError(f"{data.title}: secureboost and pooled differ")
    return found


def summary(data: Data, found: np.ndarray) -> list[dict[str, object]]:
    """Say how far each model is after some of the rounds."""
    n_splits, rounds = found.shape[1], found.shape[3]
    result = []
    for k in (k for k in (1, 5, 10, 20, 50, 100) if k <= rounds):
        for model, (train, test, auc) in zip(MODELS, found[..., k - 1].transpose(0, 2, 1), strict=True):
            difference = auc - found[MODELS.index("XGBoost"), :, 2, k - 1]
            is_ours = model == "SecureBoost"
            result.append(
                {
                    "data": data.title,
                    "round": k,
                    "model": model,
                    "splits": n_splits,
                    "training loss": spread(train),
                    "test loss": spread(test),
                    "test AUC": spread(auc),
                    "AUC - XGBoost's": spread(difference) if model != "XGBoost" else "",
                    f"|mean| <= {BAR}": verdict(abs(difference.mean()), BAR) if is_ours else "",
                    "splits within": int((np.abs(difference) <= BAR).sum()) if is_ours else "",
                    "equals pooled, split 0": "bit for bit" if is_ours else "",
                }
            )
    return result


def spread(values: np.ndarray) -> str:
    """Mean and standard deviation."""
    return f"{values.mean():.4f} ({values.std(ddof=1):.4f})" if len(values) > 1 else f"{values[0]:.4f}"


def main() -> None:
    options = arguments(__doc__).parse_args()
    rounds, n_splits = (10, 1) if options.quick else (100, 10)
    sets = [default_of_credit_card_clients()] + ([] if options.quick else [give_me_some_credit()])
    found = {data.title: curves(data, rounds, n_splits) for data in sets}
    report(
        "secureboost_convergence",
        [row for data in sets for row in summary(data, found[data.title])],
        quick=options.quick,
    )
    curve_rows = list(every_round(found))
    draw(curve_rows, quick=options.quick)
    if not options.quick:
        write("secureboost_convergence_curves", curve_rows)


def draw(rows: list[dict[str, str]], *, quick: bool) -> None:
    titles = list(dict.fromkeys(row["data"] for row in rows))
    figure, axes = figures.panels(titles)
    for panel, title in zip(axes, titles, strict=True):
        for width, model in enumerate(MODELS[::-1]):  # curves lie on one another: ours thin, above the others
            shown = [row for row in rows if (row["data"], row["model"]) == (title, model)]
            for name, line in (("test loss", "-"), ("training loss", ":")):
                keys = ("round", name, f"sd of {name}")
                number, mean, sd = np.array([[float(row[key]) for key in keys] for row in shown]).T
                style = {"color": figures.COLOURS[model], "linestyle": line, "linewidth": 3.4 - 1.2 * width}
                figures.band(panel, number, mean, sd, f"{model}, {name}", **style)
        panel.set(xlabel="boosting round", ylabel="log-loss", xscale="log")
    axes[0].legend(fontsize=7)
    figures.save(figure, "secureboost_convergence", quick=quick)


def every_round(found: dict[str, np.ndarray]) -> Iterator[dict[str, str]]:
    """Yield what the figure shows, means and standard deviations."""
    for title, runs in found.items():
        for model, per_split in zip(MODELS, runs, strict=True):
            means = per_split.mean(axis=0)
            sds = per_split.std(axis=0, ddof=1) if len(per_split) > 1 else np.zeros_like(means)
            for k in range(per_split.shape[2]):
                row = {"data": title, "model": model, "round": str(k + 1), "splits": str(len(per_split))}
                for name, mean, sd in zip(("training loss", "test loss", "test AUC"), means, sds, strict=True):
                    row |= {name: f"{mean[k]:.5f}", f"sd of {name}": f"{sd[k]:.5f}"}
                yield row


if __name__ == "__main__":
    main()
