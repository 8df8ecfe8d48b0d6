"""Bins of a passive party's rows worked out by an honest active party from the exact sums it opens.

Under every cipher of SecureBoost and FedXGBoost-SMM the active party gets, for each node, column and bin, the exact sum
of grad, sum of hess and number of rows. It knows the rows of each node and their gradients. So for each column on its
own it asks which rows can be in a bin: those that belong to one, two or three rows (at most `MOST`) whose gradients add
up to the bin's sums, less the rows already known. Nothing is guessed: a bin that is found is certain, which is checked.
Leaf values, chosen splits and bins of four rows or more are not used, so the shares are lower bounds.

The active party has the first half of the columns, the passive one the second. Sums are the plain grower's, which
SecureBoost's equal bit for bit. Half a minute of one core; `--quick`: breast cancer alone.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer

from data import Data, arguments, default_of_credit_card_clients, give_me_some_credit, report
from treaty import SecureBoost
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.models.trees import record_split
from treaty.systems.pooled.options import BoostingOptions
from treaty.trees.boosting import Forest, boost
from treaty.trees.columns import ColumnSource, SumsFinder
from treaty.trees.ensemble import SplitTable
from treaty.trees.objectives import make_objective
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level

MOST = 100  # candidates for a bin of three rows; of more, triples are not tried
SETTINGS = [{}, {"max_bin": 8}, {"n_estimators": 5}, {"colsample_bytree": 0.3}, {"min_child_samples": 100}]

Node = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Rows (n,), the key of each (n,), and the sums of all slots as key and count (slots, 2)."""


def keys(grad: NDArray[np.int64], hess: NDArray[np.int64]) -> NDArray[np.int64]:
    """Combine grad and hess into one number that adds up as they do (sums of hess are below 2^32 here)."""
    return (grad << 32) + hess


class PassiveColumns(ColumnSource):
    """A passive party's columns; `nodes` is what the active party knows of each node whose sums it has."""

    def watch(self) -> None:
        self.nodes: list[Node] = []

    def start_tree(self, grad, hess, rows, columns) -> None:
        super().start_tree(grad, hess, rows, columns)
        self._keys, self._of_node = keys(grad, hess), {}

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        """Note the nodes asked about; siblings follow from their parents and tell nothing more."""
        super().ask_sums(level, rows)
        members, starts = rows.rows(level.asked, sampled=True)
        for first, last, sums in zip(starts[:-1], starts[1:], self._sums, strict=True):
            own = members[first:last].astype(np.int64)
            self.nodes.append((own, self._keys[own], np.stack([keys(sums[:, 0], sums[:, 1]), sums[:, 2]], axis=1)))


def train(data: Data, options: BoostingOptions) -> PassiveColumns:
    """Grow the trees with the columns in halves; return the passive half with what was opened of it."""
    y, half = data.y.astype(np.float64), data.x.shape[1] // 2
    objective = make_objective("logistic", y, None, fractional_bits=options.fractional_bits)
    sources = []
    for kind, x in ((ColumnSource, data.x[:, :half]), (PassiveColumns, data.x[:, half:])):
        table, splits = to_table(x), SplitTable()
        bins = fit_bins(table, options.max_bin)
        record = lambda feature, left, bins=bins, splits=splits: record_split(splits, bins, feature, left)  # noqa: E731
        sources.append(kind(bins.transform(table), bins.offsets, np.zeros(x.shape[1], np.bool_), record))
        sources[-1].offsets = bins.offsets
        sources[-1].true_codes = bins.transform(table)
    sources[1].watch()
    rules = options.rules(objective)
    forest = Forest(objective, ("active", "passive"))
    boost(SumsFinder(sources, len(y), rules), y, None, forest, rules, options.plan(data.x.shape[1]))
    return sources[1]


def fitting(own: NDArray[np.int64], total: int, count: int) -> NDArray[np.bool_]:
    """Mark the keys that belong to some `count` (1 to 3) of these keys that add up to `total`, or perhaps more."""
    if count == 1:
        return own == total
    if count == 2:
        return np.isin(total - own, own)
    first, second = np.triu_indices(len(own), 1)
    return np.isin(total - own, own[first] + own[second])


def deduce(nodes: list[Node], column: slice, n_rows: int) -> NDArray[np.int64]:
    """Return the bin of each row (n_rows,), -1 where it is not known for certain."""
    possible = np.ones((n_rows, column.stop - column.start), np.bool_)
    known = np.full(n_rows, -1)
    changed = True
    while changed:
        changed = False
        for rows, of_rows, sums in nodes:
            bins, (totals, counts) = known[rows], sums[column].T.copy()
            np.subtract.at(totals, bins[bins >= 0], of_rows[bins >= 0])
            np.subtract.at(counts, bins[bins >= 0], 1)
            if not counts.any():
                continue
            unknown, own = rows[bins < 0], of_rows[bins < 0]
            for number, (total, count) in enumerate(zip(totals.tolist(), counts.tolist(), strict=True)):
                may = np.flatnonzero(possible[unknown, number])
                if len(may) == 0:
                    continue
                if len(may) == count:  # all that may be there are
                    possible[unknown[may]] = np.arange(possible.shape[1]) == number
                    changed = True
                elif count == 0 or count < 3 or (count == 3 and len(may) <= MOST):
                    fits = fitting(own[may], total, count) if count else np.zeros(len(may), np.bool_)
                    possible[unknown[may[~fits]], number] = False
                    changed |= not fits.all()
        single = possible.sum(axis=1) == 1
        known[single] = possible[single].argmax(axis=1)
    return known


def measure(data: Data, changes: dict[str, object]) -> dict[str, object]:
    options = BoostingOptions(**{"random_state": 0, **changes}).checked(SecureBoost())
    passive, n_rows = train(data, options), len(data.y)
    start = time.perf_counter()
    found = np.stack(
        [
            deduce(passive.nodes, slice(int(first), int(last)), n_rows)
            for first, last in zip(passive.offsets[:-1], passive.offsets[1:], strict=True)
        ],
        axis=1,
    )
    took = time.perf_counter() - start
    if not (found == passive.true_codes)[found >= 0].all():
        raise SystemExit("a bin that was certain is wrong")
    usual = passive.true_codes == np.array([np.bincount(codes).argmax() for codes in passive.true_codes.T])
    return {
        "data": data.title,
        "rows": n_rows,
        "passive columns": found.shape[1],
        "min_child_samples": options.min_child_samples,
        "max_bin": options.max_bin,
        "trees": options.n_estimators,
        "colsample_bytree": options.colsample_bytree,
        "bins known for certain": float((found >= 0).mean()),
        "of those in other bins than their column's fullest": float((found >= 0)[~usual].mean()),
        "rows known whole": float((found >= 0).all(axis=1).mean()),
        "in their column's fullest bin": float(usual.mean()),
        "seconds": took,
    }


def drawn_rows(data: Data, n_rows: int) -> Data:
    """Draw so many rows of a table."""
    kept = np.random.default_rng(0).choice(len(data.y), n_rows, replace=False)
    return Data(data.title, data.x[kept], data.y[kept], data.names)


def main() -> None:
    options = arguments(__doc__).parse_args()
    bunch = load_breast_cancer()
    cancer = Data("breast cancer", bunch.data, bunch.target.astype(np.int64), list(bunch.feature_names))
    rows = [measure(cancer, changes) for changes in SETTINGS]
    if not options.quick:
        for data in (default_of_credit_card_clients(), give_me_some_credit()):
            rows += [measure(drawn_rows(data, n_rows), {}) for n_rows in (500, 1000, 3000, 10_000)]
        rows += [measure(drawn_rows(default_of_credit_card_clients(), 1000), changes) for changes in SETTINGS[1:]]
    report("secureboost_exact_sums", rows, quick=options.quick)


if __name__ == "__main__":
    main()
