"""What sides of splits tell an honest active party of a partner's bins, counted by the partner over all jobs.

Cuts of a column are nested. So who sees the sides of common rows at many splits tells which are of one column, orders
them, and knows a row's bin for certain once every other bin of the column is on the other side of some split that it
saw the row at (`attacks.opened_sums`). The owner of the columns knows its splits. Where sides are of a node's own rows
alone it does not know the rows, but about how many of them go left and right: that share of its rows on either side of
the cut, and in the bins that earlier splits of the same column leave, was seen there. A second node with the same cut
is taken to have mostly rows that were seen there before (`_NEW`), and the rows that were seen below a bin and above it
to be the same as far as there are so many. On 20,000 rows of a real table the count is within a tenth of what the
attack finds; on few rows, whose nodes the attack cannot always tell apart, it may be a third more.

What was told is kept by the values of thresholds and not by bins, so that other bins in a later job count it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.files import Format
from treaty.machine.arrays import Flags, Floats
from treaty.machine.database import SealedDatabase
from treaty.trees.ensemble import SplitTable

_NEW = 0.25  # of the rows that another node with the same cut would add, if nodes of trees were independent
_SKEW = (0.2, 0.6, 2.2)  # times the mean: how often columns are split, each a third of them
_FORM = Format("sides", 1)
_TABLE = """CREATE TABLE sides (name TEXT NOT NULL, threshold TEXT NOT NULL, missing INTEGER NOT NULL,
    categories BLOB NOT NULL, below REAL NOT NULL, above REAL NOT NULL,
    PRIMARY KEY (name, threshold, missing, categories))"""


class ToldSides:
    """The count of an owner's columns; `share` is that of rows times columns whose bin is known for certain.

    `codes`, uint8 (n_rows, n_features), are its columns in `bins`; what was told is kept in `folder`, for all jobs that
    have it (None: for this object).
    """

    def __init__(self, folder: Path | None, bins: Bins, codes: NDArray[np.uint8]) -> None:
        self._bins, self._size = bins, max(1, codes.size)
        self.counts = [np.bincount(codes[:, feature], minlength=int(of) + 1) for feature, of in enumerate(bins.n_bins)]
        self._apart: dict[int, Floats] = {}
        self._known: dict[int, float] = {}
        self._db = SealedDatabase(
            folder, "sides", _FORM, {"sides": _TABLE}, what="count of what splits tell",
            lost="which bins of the table's rows earlier splits have told",
        )  # fmt: skip
        features = {name: feature for feature, name in enumerate(bins.schema.names)}
        with self._db.transaction() as db:
            for name, threshold, missing, categories, below, above in db.execute("SELECT * FROM sides"):
                if name in features:
                    self._add(features[name], float(threshold), bool(missing), categories, below, above)

    @property
    def share(self) -> float:
        """The share of bins that is known for certain."""
        return sum(self._known.values()) / self._size

    def tell(self, splits: SplitTable, told: Iterable[tuple[int, float, float]]) -> None:
        """Count sides of recorded splits: (record, the share told of rows that go left, that of those going right)."""
        with self._db.transaction() as db:
            for record, below, above in told:
                feature, categories = splits.feature[record], splits.category_left[record] or b""
                what = float(splits.threshold[record]), bool(splits.missing_left[record]), categories
                key = (self._bins.schema.names[feature], repr(what[0]), int(what[1]), categories)
                of_key = "name = ? AND threshold = ? AND missing = ? AND categories = ?"
                was = db.execute(f"SELECT below, above FROM sides WHERE {of_key}", key).fetchone()  # noqa: S608
                if was != (1.0, 1.0):
                    both = [float(_together(a, b)) for a, b in zip(was or (0.0, 0.0), (below, above), strict=True)]
                    db.execute("INSERT OR REPLACE INTO sides VALUES (?, ?, ?, ?, ?, ?)", (*key, *both))
                    self._add(feature, *what, below, above)

    def _add(
        self, feature: int, threshold: float, missing: bool, categories: bytes, below: float, above: float
    ) -> None:
        counts = self.counts[feature]
        apart = self._apart.setdefault(feature, np.eye(len(counts)))
        for left in self._left(feature, threshold, categories):
            left[-1] = missing
            seen = np.where(left, below, above)[:, None] * (left[:, None] != left[None, :])
            apart[:] = _together(apart, seen)
        least = np.where(counts > 0, apart, 1.0).min(axis=1)
        self._known[feature] = float(counts @ least) if np.count_nonzero(counts) > 1 else 0.0

    def _left(self, feature: int, threshold: float, categories: bytes) -> list[Flags]:
        """Return which slots go left at a split by values; two ways where its threshold is within one of the bins."""
        n_bins, cuts = int(self._bins.n_bins[feature]), self._bins.cuts[feature]
        of_category = self._bins.category_bins[feature]
        if of_category is not None:
            left = np.zeros(n_bins + 1, np.bool_)
            if len(categories) == len(of_category):
                left[of_category[np.frombuffer(categories, np.uint8) == 1]] = True
            return [left]
        at = int(np.searchsorted(cuts, threshold)) if cuts is not None else 0
        exact = cuts is None or at == len(cuts) or cuts[at] == threshold
        return [np.arange(n_bins + 1) < below for below in ([at + 1] if exact else [at, at + 1])]


def _together(seen: Floats | float, more: Floats | float) -> Floats:
    """Return the share of rows seen at one of two nodes with the same cut."""
    most = np.maximum(seen, more)
    return np.asarray(most + _NEW * (seen + more - seen * more - most))


def estimated_sides(
    counts: Sequence[NDArray[np.number]], depth: int, trees: float, owners: int, *, whole: bool
) -> float:
    """Return the share of bins that sides of splits will tell, roughly, before anything is known of the splits.

    `counts` has the rows of each bin, by column; all owners are taken to win as many splits. With `whole` sides are
    told of all rows of the table.
    """
    visits = trees * (2**depth - 1 if whole else depth) / owners / max(1, len(counts))
    found = 0.0
    for of_column in counts:
        shares = of_column[of_column > 0] / max(1, of_column.sum())
        for skew in _SKEW if len(shares) > 1 else ():
            cut = 1.0 - np.exp(-skew * visits / (len(shares) - 1))
            ends = shares[0] + shares[-1]
            found += (ends * cut + (1.0 - ends) * cut**2) / len(_SKEW)
    return float(found / max(1, len(counts)))
