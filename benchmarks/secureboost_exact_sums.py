"""Bins of a passive party's rows worked out by an honest active party from the exact sums it opens.

`privacy.exact_sums.known_bins` is run on what is opened while trees grow: by rows, depth, trees, bins and other
options; beside it stands what is estimated before training. Every bin found is compared with the true one.

* Sums are those of the plain grower, and for one table those of real jobs under four ciphers, which are the same.
* `min_bin_samples` is tried in two forms, with trees as they are without: bins of fewer rows in the whole table joined
  with their neighbours, and bins of fewer rows in a node left out of the answer.

The active party has the first half of the columns, the passive one the second. Some minutes of two cores; `--quick`:
breast cancer alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

from data import Data, arguments, default_of_credit_card_clients, give_me_some_credit, report
from opened_sums import WatchedColumns, columns_of, grow, opened_by_job
from treaty import FedXGBoostSMM, SecureBoost
from treaty.machine.arrays import Integers
from treaty.machine.process import cores
from treaty.privacy.exact_sums import OpenedNode, known_bins
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical.exact_sums import expected_share
from treaty.trees.columns import ColumnSource
from treaty.trees.splits import complete_sums

OPTIONS: list[dict[str, object]] = [
    {"max_depth": 6},
    {"max_depth": 2},
    {"max_bin": 8},
    {"max_bin": 255},
    {"n_estimators": 5},
    {"n_estimators": 100},
    {"colsample_bytree": 0.3},
    {"subsample": 0.5},
    {"min_child_samples": 100},
]
CIPHERS: list[SystemOptions] = [
    SecureBoost(encryption="lattice", allow_exact_sums=True),
    SecureBoost(encryption="ou", allow_exact_sums=True),
    SecureBoost(encryption="paillier", insecure_test_key_bits=1024, allow_insecure=True, allow_exact_sums=True),
    FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
]
FEWEST = (5, 20, 50)
UNTOLD = -(1 << 40)  # rows of a slot left out; times 3 to the depth, so that no difference of two looks told


class GuardedColumns(WatchedColumns):
    """Columns whose owner leaves bins of less than `fewest` rows out of its answers; the grower has them still."""

    fewest: int

    def sums(self) -> Integers:
        """See `SumsSource`."""
        asked = self.columns.sums()
        told = asked.copy()
        told[(told[:, :, 2] > 0) & (told[:, :, 2] < self.fewest), 2] = UNTOLD * 3**self._level.depth
        self._parents = complete_sums(self._level, told, self._parents)
        for rows, sums in zip(self._rows, [*told, *self._parents[self._followed]], strict=True):
            self._note(OpenedNode(rows, *self._gradients, self._completed(sums.copy(), rows)))
        return asked

    def _completed(self, sums: Integers, rows: NDArray[np.int32]) -> Integers:
        """Fill in a column's only slot that was left out, from the node's totals."""
        sums[(sums[:, 2] < 0) | (sums[:, 2] > len(rows)), 2] = -1
        grad, hess = self._gradients
        total = np.array([grad[rows].sum(), hess[rows].sum(), len(rows)])
        for first, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            own = sums[first:stop]
            untold = np.flatnonzero(own[:, 2] < 0)
            if len(untold) == 1 and own[own[:, 2] >= 0, 2].any():
                own[untold[0]] = total - np.delete(own, untold[0], axis=0).sum(axis=0)
        return sums


def joined(columns: ColumnSource, fewest: int) -> ColumnSource:
    """Join bins of less than `fewest` rows in the table with those beside them."""
    codes = columns.codes.copy()
    for column in codes.T:
        counts = np.bincount(column)
        place, filled = np.zeros(len(counts), np.uint8), 0
        for number, count in enumerate(counts):
            place[number] = place[number - 1] + (filled >= fewest) if number else 0
            filled = count if filled >= fewest else filled + count
        if filled < fewest and place[-1] > 0:
            place[place == place[-1]] -= 1
        column[:] = place[column]
    return ColumnSource(codes, columns.offsets, columns.categorical, columns.record)


def row_of(
    data: Data,
    columns: ColumnSource,
    nodes: Sequence[OpenedNode],
    changes: dict[str, object],
    what: str = "one table",
    loss: str = "logistic",
) -> dict[str, object]:
    """Run the attack; return a row of the table."""
    options, n_rows = (
        BoostingOptions(**{"n_estimators": 20, "max_depth": 3, "max_bin": 32, **changes}).checked(SecureBoost()),
        len(data.y),
    )
    start = time.perf_counter()
    found = known_bins(nodes, columns.offsets, n_rows, cores())
    took = time.perf_counter() - start
    known = found >= 0
    if not (found == columns.codes)[known].all():
        raise SystemExit("a bin that was certain is wrong")
    usual = columns.codes == np.array([np.bincount(of_column).argmax() for of_column in columns.codes.T])
    classes = len(np.unique(data.y)) if loss == "softmax" else 1
    changed = ", ".join(f"{name}={value}" for name, value in changes.items())
    return {
        "data": data.title,
        "rows": n_rows,
        "passive columns": columns.codes.shape[1],
        "depth": options.max_depth,
        "max_bin": options.max_bin,
        "trees": options.n_estimators,
        "changed": changed,
        "loss": loss,
        "sums of": what,
        "bins known for certain": float(known.mean()),
        "estimated before": expected_share(columns.codes, options, classes, varied=loss == "squared_error"),
        "of those in other bins than their column's fullest": float(known[~usual].mean()),
        "rows known whole": float(known.all(axis=1).mean()),
        "in their column's fullest bin": float(usual.mean()),
        "least of a column": float(known.mean(axis=0).min()),
        "most of a column": float(known.mean(axis=0).max()),
        "seconds": took,
    }


def halves(data: Data, max_bin: int) -> tuple[ColumnSource, ColumnSource]:
    """Return the active and the passive party's columns."""
    half = data.x.shape[1] // 2
    return columns_of(data.x[:, :half], max_bin), columns_of(data.x[:, half:], max_bin)


def measure(data: Data, changes: dict[str, object], loss: str = "logistic") -> dict[str, object]:
    """Run the attack on the plain grower's sums."""
    active, passive = halves(data, int(str(changes.get("max_bin", 32))))
    return row_of(data, passive, grow(active, passive, data.y, changes, loss=loss), changes, loss=loss)


def under_ciphers(data: Data) -> list[dict[str, object]]:
    """Run the attack on the sums that jobs under each cipher opened."""
    half, passive = data.x.shape[1] // 2, halves(data, 32)[1]
    tables = {"active": data.x[:, :half], "passive": data.x[:, half:]}
    return [
        row_of(data, passive, opened_by_job(system, tables, data.y), {}, f"a job of {system!r}") for system in CIPHERS
    ]


def guarded(data: Data, changes: dict[str, object]) -> list[dict[str, object]]:
    """Run the attack against both forms of `min_bin_samples`."""
    rows = []
    active, passive = halves(data, 32)
    for fewest in FEWEST:
        few = joined(passive, fewest)
        nodes = grow(active, few, data.y, changes)
        rows.append(row_of(data, few, nodes, changes, f"bins of the table joined below {fewest} rows"))
        GuardedColumns.fewest = fewest
        nodes = grow(active, passive, data.y, changes, GuardedColumns)
        rows.append(row_of(data, passive, nodes, changes, f"bins of a node left out below {fewest} rows"))
    return rows


def drawn_rows(data: Data, n_rows: int) -> Data:
    """Draw so many rows of a table."""
    kept = np.random.default_rng(0).choice(len(data.y), n_rows, replace=False)
    return Data(data.title, data.x[kept], data.y[kept], data.names)


def drawn_table(n_rows: int) -> Data:
    """Draw ten independent columns, and labels that four of them tell."""
    rng = np.random.default_rng(0)
    x = rng.random((n_rows, 10))
    y = x[:, 0] + x[:, 5] + x[:, 6] * x[:, 1] + 0.5 * rng.normal(size=n_rows) > 1.25
    return Data("drawn columns", x, y.astype(np.int64), [])


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    bunch = load_breast_cancer()
    cancer = Data("breast cancer", bunch.data, bunch.target.astype(np.int64), list(bunch.feature_names))
    rows = [measure(cancer, changes) for changes in [{}, *OPTIONS]]
    rows += under_ciphers(cancer) + guarded(cancer, {})
    if not quick:
        clients, credit = default_of_credit_card_clients(), give_me_some_credit()
        for n_rows in (500, 1000, 3000, 10_000):
            rows += [measure(drawn_table(n_rows), changes) for changes in ({}, {"max_depth": 6})]
        for data, sizes in (
            (clients, (500, 1000, 3000, 10_000, 30_000)),
            (credit, (500, 1000, 3000, 10_000, 30_000, 150_000)),
        ):
            rows += [
                measure(drawn_rows(data, n_rows), changes) for n_rows in sizes for changes in ({}, {"max_depth": 6})
            ]
        rows += [measure(drawn_rows(clients, n_rows), changes) for n_rows in (1000, 10_000) for changes in OPTIONS[1:]]
        rows += [measure(credit, changes) for changes in ({"max_bin": 8}, {"n_estimators": 5})]
        for changes in ({}, {"subsample": 0.5}):
            rows += guarded(drawn_rows(clients, 3000), changes)
        for title, bunch, loss in (
            ("diabetes", load_diabetes(), "squared_error"),
            ("wine", load_wine(), "softmax"),
        ):
            data = Data(title, bunch.data, bunch.target.astype(np.int64), [])
            rows += [measure(data, changes, loss) for changes in ({}, {"n_estimators": 5}, {"n_estimators": 2})]
    report("secureboost_exact_sums", rows, quick=quick)


if __name__ == "__main__":
    main()
