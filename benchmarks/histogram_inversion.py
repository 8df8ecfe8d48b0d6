"""Rows rebuilt from opened histogram sums, with and without what may prevent it (`privacy/leaks.py`).

Whoever opens the sums of a job split by row sees, for every node, column and bin, the sums of grad and hess and the
number of rows of all users together; how many users they are changes nothing. So the attack is given the plain grower's
own sums. Baseline: the true columns of each class, each shuffled on its own. Rows of a rebuilt table are matched one to
one to true rows as agrees best, the baseline's too, which flatters both. Rows put together with at least 90 % of the
columns known are those an attacker would bet on ("confident"); one is right when 90 % of what is known of it is that of
one true row with the same label.

Trained on two thirds of a table, AUC on the rest; means over splits. About 2 minutes; `--quick`: breast
cancer alone, one split.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from data import Data, arguments, give_me_some_credit, report
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.models.trees import record_split
from treaty.privacy.leaks import OpenedTree, RebuiltRows, agreement, invert, rebuild
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.pooled.options import BoostingOptions
from treaty.trees.boosting import Boosting, Forest
from treaty.trees.columns import ColumnSource, grow_trees
from treaty.trees.ensemble import SplitTable, Walk, join_splits
from treaty.trees.growth import RowPartition
from treaty.trees.objectives import make_objective
from treaty.trees.splits import Level

BASE = BoostingOptions(n_estimators=20, max_depth=3, learning_rate=0.3, max_bin=32, min_child_samples=1, random_state=0)
ON_CANCER = [
    {},
    *({"min_child_samples": least} for least in (5, 20, 50, 100)),
    {"n_estimators": 5},
    {"n_estimators": 50},
    *({"min_child_samples": least, "max_depth": 6} for least in (1, 20)),
    *({"min_child_samples": 20, "fractional_bits": bits} for bits in (10, 8, 6, 4)),
    *({"min_child_samples": 20, "max_bin": bins} for bins in (16, 8)),
    {"max_bin": 8},
    {"min_child_samples": 20, "max_bin": 8, "max_depth": 6, "n_estimators": 50},
    {"min_child_samples": 20, "colsample_bytree": 0.3},
]
ON_CREDIT = [
    {},
    {"min_child_samples": 20},
    {"min_child_samples": 20, "fractional_bits": 6},
    {"min_child_samples": 20, "max_bin": 8},
]


class OpenedSums(ColumnSource):
    """Columns whose sums are kept as the one that opens them sees them."""

    def watch(self) -> None:
        self.opened: list[dict[int, NDArray[np.int64]]] = []

    def start_tree(self, *tree) -> None:
        super().start_tree(*tree)
        self.opened.append({})

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        super().ask_sums(level, rows)
        self.opened[-1].update(zip(level.asked.tolist(), self._sums.copy(), strict=True))


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """What training showed, and how good it was."""

    trees: list[OpenedTree]
    offsets: NDArray[np.int32]
    codes: NDArray[np.uint8]
    auc: float


def train(data: Data, options: BoostingOptions, rows: NDArray[np.intp], rest: NDArray[np.intp]) -> TrainingOutcome:
    table, y = to_table(data.x[rows]), data.y[rows].astype(np.float64)
    bins, splits = fit_bins(table, options.max_bin), SplitTable()
    objective = make_objective("logistic", y, None, fractional_bits=options.fractional_bits)
    n_columns = data.x.shape[1]
    source = OpenedSums(
        bins.transform(table),
        bins.offsets,
        np.zeros(n_columns, np.bool_),
        lambda feature, left_bins: record_split(splits, bins, feature, left_bins),
    )
    source.watch()
    forest = Forest(objective, ("all",))
    grow_trees(Boosting(y, None, forest, options.rules(objective), options.plan(n_columns)), [source])
    margins = np.zeros((len(rest), 1))
    Walk(forest.trees, join_splits([splits], [n_columns])).add_to(margins, data.x[rest].astype(np.float32))
    trees = [OpenedTree(asked, tree.left) for asked, tree in zip(source.opened, forest.trees, strict=True)]
    return TrainingOutcome(trees, bins.offsets, source.codes, float(roc_auc_score(data.y[rest], margins[:, 0])))


def confident(found: RebuiltRows, trained: TrainingOutcome, y: NDArray[np.int64]) -> tuple[int, int]:
    """Count the rows that are mostly known, and those of them that are right."""
    offsets, known = trained.offsets, found.known(trained.offsets)
    rows = np.flatnonzero(known >= 0.9 * (len(offsets) - 1))
    alike = np.zeros((len(rows), len(y)))
    for (first, stop), codes in zip(pairwise(offsets), trained.codes.T, strict=True):
        bins = found.possible[rows, first:stop]
        alike += np.where((bins.sum(axis=1) == 1)[:, None], bins[:, codes], False)
    alike[found.labels[rows][:, None] != y] = 0.0
    return len(rows), int((alike.max(axis=1, initial=0.0) >= 0.9 * known[rows]).sum())


def attack(data: Data, options: BoostingOptions, seed: int) -> dict[str, float]:
    rows, rest = train_test_split(np.arange(len(data.y)), test_size=1 / 3, stratify=data.y, random_state=seed)
    trained, y = train(data, options, rows, rest), data.y[rows]
    slots = trained.codes + trained.offsets[:-1]
    by_class = np.stack([np.bincount(slots[y == k].ravel(), minlength=trained.offsets[-1]) for k in (0, 1)])
    start = time.perf_counter()
    found = invert(trained.trees, trained.offsets)
    took = time.perf_counter() - start
    nothing = RebuiltRows(found.possible[:0], found.labels[:0])
    base, got = (agreement(*rebuild(f, by_class, trained.offsets), trained.codes, y) for f in (nothing, found))
    sure, right = confident(found, trained, y)
    return {
        "AUC": trained.auc,
        "baseline: right bins": base.mean,
        "right bins": got.mean,
        "baseline: rows 90 % right": base.mostly,
        "rows 90 % right": got.mostly,
        "baseline: labels": base.labels,
        "labels": got.labels,
        "confident rows": float(sure),
        "of them right": float(right),
        "seconds": took,
    }


def measure(data: Data, changes: dict[str, object], n_splits: int) -> dict[str, object]:
    options = msgspec.structs.replace(BASE, **changes).checked(FederBoostHorizontal())
    runs = [attack(data, options, seed) for seed in range(n_splits)]
    return {
        "data": data.title,
        "rows": len(data.y) - -(-len(data.y) // 3),
        "columns": data.x.shape[1],
        "splits": n_splits,
        "min_child_samples": options.min_child_samples,
        "max_bin": options.max_bin,
        "fractional_bits": options.fractional_bits,
        "trees": options.n_estimators,
        "max_depth": options.max_depth,
        "colsample_bytree": options.colsample_bytree,
        **{name: float(np.mean([run[name] for run in runs])) for name in runs[0]},
    }


def breast_cancer() -> Data:
    """569 rows, 30 features."""
    bunch = load_breast_cancer()
    return Data("breast cancer", bunch.data, bunch.target.astype(np.int64), list(bunch.feature_names))


def drawn_rows(data: Data, n_rows: int) -> Data:
    """Draw so many rows of a table."""
    kept = np.random.default_rng(0).choice(len(data.y), n_rows, replace=False)
    return Data(f"{data.title}, {n_rows} rows", data.x[kept], data.y[kept], data.names)


def main() -> None:
    options = arguments(__doc__).parse_args()
    n_splits = 1 if options.quick else 3
    rows = [measure(breast_cancer(), changes, n_splits) for changes in ON_CANCER]
    if not options.quick:
        credit = give_me_some_credit()
        for n_rows in (750, 3000):
            rows += [measure(drawn_rows(credit, n_rows), changes, n_splits) for changes in ON_CREDIT]
    report("histogram_inversion", rows, quick=options.quick)


if __name__ == "__main__":
    main()
