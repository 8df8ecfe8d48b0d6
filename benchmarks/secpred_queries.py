"""What a user learns of a hidden FedXGB model from the rows it has predicted (`max_queries`).

A user is told a row's margin exactly, as a sum over all trees, and knows the bins of all columns. Two attacks:

*Imitation*: boosted trees of the user's own are fitted to the margins of n rows, real ones (without labels) or rows
made up of columns drawn independently and evenly from their bins, for which nobody needs data. Measured on other real
rows: R2 of the margins (1 is a perfect copy) and the AUC for the labels, beside that of the model and that of a model
of the same n real rows with their true labels, which needs no queries but labels.

*Sweeps*: from real rows, one column after another goes through all its bins; where the margin changes, there is a
split. Measured: the share of the model's splits (column and cut, each once) that n rows find.

The hidden model's predictions are the plain model's bit for bit, so no shares are computed here. Trained on two thirds
of the table, means over splits. About 2 minutes; `--quick`: one split, small models.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import r2_score, roc_auc_score

from data import Data, adult, arguments, flat, give_me_some_credit, report, splits
from treaty import GBDTClassifier, GBDTRegressor
from treaty.data.binning import Bins, fit_bins
from treaty.data.table import to_table

ASKED = (100, 300, 1000, 3000, 10_000)
MODELS = ({"n_estimators": 20, "max_depth": 3}, {"n_estimators": 100, "max_depth": 6})
COPY = {"n_estimators": 200, "max_depth": 4, "learning_rate": 0.1, "min_child_samples": 2, "random_state": 0}
TESTED = 5000  # real rows on which copies are compared
SPLITS = 3


def evenly(bins: Bins, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return made-up rows: each column's bin drawn evenly, the missing ones' among them."""
    return np.column_stack([rng.choice(values_of(bins, f), count) for f in range(len(bins.n_bins))])


def values_of(bins: Bins, feature: int) -> NDArray[np.float64]:
    """Return a value in each bin of a numeric column, and a missing one."""
    cuts = bins.cuts[feature]
    assert cuts is not None
    below = cuts[0] - 1.0 if len(cuts) else 0.0
    return np.concatenate([[below], cuts, [np.nan]]).astype(np.float64)


def swept(model: GBDTClassifier, bins: Bins, real: NDArray[np.float64], most: int) -> list[float]:
    """Return the share of the model's splits that sweeps of so many rows find, for each number in `ASKED`."""
    (part,) = model.parts_.values()
    there = {(f, np.float32(t)) for f, t in zip(part.splits.feature, part.splits.threshold, strict=True)}
    there = {(f, t) for f, t in there if np.isfinite(t)}  # others divide missing values from the rest
    rng, found, asked, shares = np.random.default_rng(1), set(), 0, []
    orders = (int(f) for _ in range(most) for f in rng.permutation(len(bins.n_bins)))
    due = list(ASKED)
    while due:
        f, row = next(orders), real[rng.integers(len(real))]
        values = values_of(bins, f)[:-1]
        while due and asked + len(values) > due[0]:
            shares.append(len(found & there) / len(there))
            due.pop(0)
        rows = np.repeat(row[None], len(values), axis=0)
        rows[:, f] = values
        changes = np.flatnonzero(np.diff(model.decision_function(rows)))
        found |= {(f, np.float32(values[k + 1])) for k in changes.tolist()}
        asked += len(values)
    return shares


def attacked(
    data: Data, own: dict[str, int], train: NDArray[np.intp], test: NDArray[np.intp]
) -> list[dict[str, float]]:
    """Return what each number of rows tells, on one split."""
    model = flat(GBDTClassifier, **own).fit(data.x[train], data.y[train])
    bins = fit_bins(to_table(data.x[train]), 32, 1)
    rng = np.random.default_rng(0)
    drawn = rng.permutation(test)
    judged, spare = drawn[:TESTED], drawn[TESTED:]
    x, y, true = data.x[judged], data.y[judged], model.decision_function(data.x[judged])
    shares = swept(model, bins, data.x[spare], max(ASKED))
    lines = []
    for asked, share in zip(ASKED, shares, strict=True):
        line: dict[str, float] = {}
        for kind, rows in (("real", data.x[spare[:asked]]), ("made up", evenly(bins, asked, rng))):
            copy = flat(GBDTRegressor, **COPY).fit(rows, model.decision_function(rows))
            found = copy.predict(x)
            line |= {f"R2, {kind}": r2_score(true, found), f"AUC, {kind}": roc_auc_score(y, found)}
        labelled = spare[:asked]
        alone = flat(GBDTClassifier, **own).fit(data.x[labelled], data.y[labelled])
        line |= {
            "AUC with labels": roc_auc_score(y, alone.decision_function(x)),
            "AUC of the model": roc_auc_score(y, true),
        }
        lines.append({**line, "splits found": share})
    return lines


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    lines: list[dict[str, object]] = []
    for load in (give_me_some_credit, adult):
        data = load()
        for own in MODELS[: 1 if quick else None]:
            found = [attacked(data, own, *of) for of in splits(data, 1 if quick else SPLITS)]
            for k, asked in enumerate(ASKED):
                means = {name: float(np.mean([of[k][name] for of in found])) for name in found[0][k]}
                lines.append({"data": data.title, **own, "rows asked for": asked, **means})
    report("secpred_queries", lines, quick=quick)


if __name__ == "__main__":
    main()
