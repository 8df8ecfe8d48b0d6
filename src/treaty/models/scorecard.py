"""A scorecard: the points of every bin of a party's columns.

A regression on weights of evidence (WOE) gives log-odds z of the second class, the event ("bad"). A score is a straight
line of them, offset - factor z, with factor = pdo / ln 2 and offset = base_score - factor ln(base_odds): at
`base_score` there are `base_odds` good rows for a bad one, and `pdo` points more double the odds (Siddiqi, "Credit Risk
Scorecards", 2006, chapter 6). With z = alpha + sum of beta_j WOE_j, bin k of column j has -factor beta_j WOE_jk points,
and every row gets offset - factor alpha, the base points. Once points are rounded, they are the model: probabilities
follow from the score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.machine.arrays import Floats
from treaty.statistics import ColumnBins

Against = Literal["best", "neutral"]


class ScorecardPart(msgspec.Struct, kw_only=True):
    """One party's part of a scorecard.

    `bins` has the bins of each own column, `points` those of each bin (n_bins,). A value in no bin has none. The active
    party alone has `base`, the points that every row gets. `inexact` is the most by which rounding changes the party's
    sum of points. `made` is the date of training, on `n_rows` rows.
    """

    pdo: float
    base_score: float
    base_odds: float
    rounded: bool
    made: str
    n_rows: int
    bins: list[ColumnBins]
    points: list[list[float]] = []
    base: float | None = None
    inexact: float = 0.0

    @property
    def factor(self) -> float:
        """Points per unit of log-odds."""
        return self.pdo / math.log(2.0)

    @property
    def offset(self) -> float:
        """Points at even odds."""
        return self.base_score - self.factor * math.log(self.base_odds)

    def assign(self, betas: Floats, alpha: float | None) -> None:
        """Set points by the log-odds' weights of WOE (n_columns,), and base points by their intercept."""
        exact = [-self.factor * beta * of.woe for of, beta in zip(self.bins, betas.tolist(), strict=True)]
        base = 0.0 if alpha is None else self.offset - self.factor * alpha
        points, shown = exact, base
        if self.rounded:
            # + 0 makes a negative zero positive
            points, shown = [np.rint(of) + 0.0 for of in exact], float(np.rint(base))
        self.points, self.base = [of.tolist() for of in points], None if alpha is None else shown
        off = [float(np.abs(of - was).max(initial=0.0)) for of, was in zip(points, exact, strict=True)]
        self.inexact = sum(off) + abs(shown - base)

    @property
    def caution(self) -> str:
        """A sentence if columns have points against their WOE; empty otherwise."""
        # a high WOE means few events, so that points rise with it
        each = zip(self.bins, self.points, strict=True)
        against = [of.column for of, points in each if np.array(points) @ of.woe < 0.0]
        if not against:
            return ""
        return (
            f"points of {', '.join(map(repr, against))} run against their weight of evidence: other columns repeat "
            "these; leave one of them out, or merge its bins (max_bin)"
        )

    def of_columns(self, table: Table) -> Floats:
        """Return the points of each row and own column, float64 (n_rows, n_columns)."""
        found = np.zeros((table.n_rows, len(self.bins)))
        for k, (of, points) in enumerate(zip(self.bins, self.points, strict=True)):
            found[:, k] = np.append(points, 0.0)[of.assign(table)]
        return found

    def log_odds(self, table: Table) -> Floats:
        """Return the part's summand of the log-odds that the score of each row stands for."""
        own = self.of_columns(table).sum(axis=1)
        log_odds: Floats = (-own if self.base is None else self.offset - self.base - own) / self.factor
        return log_odds

    def score(self, log_odds: Floats) -> Floats:
        """Return the points (n_rows,) that stand for log-odds summed over all parts; whole ones if points are."""
        score: Floats = self.offset - self.factor * log_odds
        return np.rint(score) if self.rounded else score

    def losses(self, table: Table, against: Against = "best") -> Floats:
        """Return the points that each own column loses, float64 (n_rows, n_columns); negative where it gains.

        They are lost against the column's best bin, or against "neutral" points: 0, those of WOE 0, where the odds are
        those of all rows.
        """
        if against not in ("best", "neutral"):
            raise ConfigError(f"expected against 'best' or 'neutral', got {against!r}")
        best = [max(points, default=0.0) if against == "best" else 0.0 for points in self.points]
        return np.array(best) - self.of_columns(table)

    def check_sizes(self) -> None:
        """Raise ValueError for points that are not finite, or not those of the bins."""
        sizes = [(len(points), len(points)) for points in self.points]
        if [(len(of.n_rows or ()), len(of.n_bads or ())) for of in self.bins] != sizes:
            raise ValueError("another number of points than of bins")
        if not np.all(np.isfinite(np.concatenate([[self.factor, self.offset, self.base or 0.0], *self.points]))):
            raise ValueError("points that are not finite")


def as_woe(bins: Sequence[ColumnBins], table: Table) -> Table:
    """Return a party's table with the weight of evidence of each value in its place."""
    schema = Schema(table.schema.names, (None,) * len(table.schema.names))
    return Table(schema, [of.transform(table) for of in bins], table.n_rows)


def reasons_of(losses: Floats, names: Sequence[str], k: int) -> dict[str, NDArray[Any]]:
    """Return the columns that cost each row most points, as columns "reason_1", "lost_1" and so on, each (n_rows,).

    `losses` (n_rows, n_columns), of columns with these `names`, are as from `ScorecardPart.losses`. At most `k` that
    lose points are named, and an empty text, with 0 points, stands where there are fewer.
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"expected a number of reasons, 1 or more, got {k!r}")
    # stable: among equal losses the first column comes first
    order = np.argsort(-losses, axis=1, kind="stable")[:, :k]
    lost = np.maximum(np.take_along_axis(losses, order, axis=1), 0.0)
    called = np.array([*names, ""], dtype=object)[np.where(lost > 0.0, order, -1)]
    found: dict[str, NDArray[Any]] = {}
    for place in range(order.shape[1]):
        found |= {f"reason_{place + 1}": called[:, place], f"lost_{place + 1}": lost[:, place]}
    return found
