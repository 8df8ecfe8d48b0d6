"""Metrics on held-out rows of participants, in jobs where no party has labelled rows of all to watch.

Every participant keeps a share of its own rows out of training. After a round it counts them by score and label, and
by the category of one column if the job names one. The counts of all are added up under the masks of training, and the
leader computes metrics from the sum.

Scores are counted in bins. With two classes these are of the log odds of the second class, in steps of 1/16 from -8
to 8, by label. With several they are of the log odds of the row's own class, by whether that class was predicted.
Errors of predicted numbers have four bins an octave. A metric takes all scores of a bin as its middle, and pairs of one
bin as ties: on credit data AUC and log loss differ by less than 0.002 from those of the rows themselves.

With noise counts have noise of their own. A row is trained on or counted, so that its counts may cost as much of a
budget as its training does, and the whole costs no more. Bins are wider then, and counts are opened a few times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
import numpy as np

from treaty.data.table import Schema
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.machine.arrays import Flags, Floats, Integers
from treaty.messaging.messages import Message, leaks
from treaty.models.trees import HeldOut
from treaty.systems.horizontal.rows import SumOpener, own_seed
from treaty.systems.pooled.system import watched
from treaty.systems.system import LabelledRows
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.objectives import Objective

VALIDATION = "validation"
"""Name of these rows among eval sets."""

Kind = Literal["two classes", "classes", "numbers"]
# the last of a kind decides about early stopping
METRICS: Mapping[Kind, tuple[str, ...]] = {
    "two classes": ("auc", "error", "logloss"), "classes": ("merror", "mlogloss"), "numbers": ("mae", "rmse"),
}  # fmt: skip
# bins, and the largest score: log odds, or an error
_ODDS, _ERRORS = (256, 8.0), (320, 2.0**40)
NOISY_ODDS, NOISY_ERRORS = (24, 6.0), 32
_AN_OCTAVE = 4
# deviations of a number of rows' noise that it must exceed
_CLEAR = 4.0
_ALL, _OTHER, _MISSING = "all", "other", "missing"


@leaks("how many rounds are finished", "control")
class HeldOutRequest(Message):
    """Count the held-out rows by their scores after so many rounds."""

    rounds: Annotated[int, msgspec.Meta(ge=1)]


def divided(
    rows: LabelledRows, share: float | None, name: str, *, noisy: bool = False
) -> tuple[LabelledRows, LabelledRows | None]:
    """Return a participant's rows to train on, and held-out ones (None: the job keeps none), the same ones each time.

    A participant that would keep all of its few rows back keeps none. In a `noisy` job, others are drawn each time, and
    a row's place depends on no other row.
    """
    if share is None:
        return rows, None
    back = drawn_back(rows.table.n_rows, share, name, noisy=noisy)
    return chosen(rows, ~back), chosen(rows, back)


def drawn_back(n_rows: int, share: float, name: str, *, noisy: bool = False) -> Flags:
    """Return which of its rows a participant keeps back, as `divided` does."""
    # fixed draws would give a row's coin to the next one where a row is removed, and so change many rows' places
    seed = None if noisy else own_seed(0, f"{name} keeps back")
    back = np.random.default_rng(seed).random(n_rows) < share
    back &= noisy or not back.all()
    return back


def chosen(rows: LabelledRows, which: Flags) -> LabelledRows:
    weight = None if rows.weight is None else rows.weight[which]
    return replace(rows, table=rows.table.rows(which), y=rows.y[which], weight=weight)


@dataclass(frozen=True, slots=True)
class ScoreCells:
    """How rows are counted: by `groups`, the categories of the column at `column`, and by the kind of target.

    Scores are in `n_bins` bins, up to the log odds or the error `most`; the last one has all beyond.
    """

    kind: Kind
    groups: tuple[str, ...] = ("",)
    column: int | None = None
    n_bins: int = _ODDS[0]
    most: float = _ODDS[1]

    @classmethod
    def of(
        cls, objective: Objective, schema: Schema, group: str | None, noisy: tuple[int, float] | None = None
    ) -> ScoreCells:
        """Return the cells of a job; ConfigError unless `group` names a column of categories.

        With noise `noisy` has `n_bins` and `most` of the cells.
        """
        two: Kind = "two classes" if objective.n_outputs == 1 else "classes"
        kind: Kind = two if objective.takes == "classes" else "numbers"
        of_scores = noisy or (_ERRORS if kind == "numbers" else _ODDS)
        if group is None:
            return cls(kind, ("",), None, *of_scores)
        at = schema.names.index(group) if group in schema.names else -1
        categories = schema.categories[at] if at >= 0 else None
        if categories is None:
            known = [name for name, of in zip(schema.names, schema.categories, strict=True) if of is not None]
            raise ConfigError(
                f"expected validation_group to be a column of categories ({', '.join(known) or 'there is none'}), got "
                f"{group!r}"
            )
        names = [f"{name} (category)" if name in (_ALL, _OTHER, _MISSING) else str(name) for name in categories]
        return cls(kind, (*names, _OTHER, _MISSING), at, *of_scores)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Groups, labels or outcomes, and bins of scores."""
        return len(self.groups), 1 if self.kind == "numbers" else 2, self.n_bins

    @property
    def middles(self) -> Floats:
        """The probability in the middle of each bin."""
        odds = (np.arange(self.n_bins) + 0.5) * (2 * self.most / self.n_bins) - self.most
        return np.asarray(1 / (1 + np.exp(-odds)), np.float64)

    def count(self, rows: LabelledRows, predicted: Floats) -> Integers:
        """Count rows, int64 (groups * outcomes * bins,), by their predictions (n_rows, n_outputs)."""
        n_rows, group, outcome = len(rows.y), np.zeros(len(rows.y), np.int64), np.zeros(len(rows.y), np.int64)
        if self.column is not None:
            codes = rows.table.columns[self.column]
            group = np.where(np.isnan(codes), len(self.groups) - 1, codes).astype(np.int64)
        if self.kind == "numbers":
            error = np.abs(rows.y - predicted[:, 0])
            octaves = np.log2(np.maximum(error, np.finfo(np.float64).tiny) / self.most)
            bins = np.floor(octaves * _AN_OCTAVE + self.n_bins)
        else:
            own = rows.y.astype(np.int64)
            if self.kind == "two classes":
                p, outcome = predicted[:, 0], own
            else:
                p, outcome = predicted[np.arange(n_rows), own], (predicted.argmax(axis=1) == own).astype(np.int64)
            with np.errstate(divide="ignore"):
                odds = np.log(p) - np.log1p(-p)
            bins = np.floor((odds + self.most) * self.n_bins / (2 * self.most))
        cell = (group * self.shape[1] + outcome) * self.n_bins + np.clip(bins, 0, self.n_bins - 1).astype(np.int64)
        return np.bincount(cell, minlength=int(np.prod(self.shape)))


def metric(name: str, cells: ScoreCells, counts: Floats | Integers) -> float:
    """Return a metric of counts (outcomes, bins); NaN where rows, or those of a class, are missing."""
    total, n_bins = counts.sum(), cells.n_bins
    if total <= 0:
        return float("nan")
    if cells.kind == "numbers":
        # means of an error and of its square over a bin whose logarithms are evenly filled
        low, ratio = cells.most * 2.0 ** (np.arange(-n_bins, 0) / _AN_OCTAVE), 2.0 ** (1 / _AN_OCTAVE)
        if name == "mae":
            return float(counts[0] @ (low * (ratio - 1) / np.log(ratio)) / total)
        return float(np.sqrt(counts[0] @ (low**2 * (ratio**2 - 1) / np.log(ratio) / 2) / total))
    p = cells.middles
    match name:
        case "auc":
            # rows of the first class below a bin, and half of those in it: equal scores are ties
            below = np.cumsum(counts[0]) - counts[0] / 2
            pairs = float(np.prod(counts.sum(axis=1)))
            return float(counts[1] @ below) / pairs if pairs > 0 else float("nan")
        case "error":
            return float((counts[0, n_bins // 2 :].sum() + counts[1, : n_bins // 2].sum()) / total)
        case "logloss":
            return float(-(counts[0] @ np.log1p(-p) + counts[1] @ np.log(p)) / total)
        case "merror":
            return float(counts[0].sum() / total)
    return float(-(counts.sum(axis=0) @ np.log(p)) / total)


def plausible(counts: Integers, sigma: float) -> Floats:
    """Return noisy counts without what is likely to be noise of the deviation `sigma`, with the same total.

    Of all numbers none of which is below 0 the nearest are taken, then those above `sigma`: noise alone would fill
    bins without rows. Exact counts stay as they are.
    """
    total, falling = counts.sum(), np.sort(counts.ravel())[::-1]
    if total <= 0:
        return np.zeros(counts.shape)
    excess = (np.cumsum(falling) - total) / np.arange(1, len(falling) + 1)
    nearest = np.maximum(counts - excess[falling > excess][-1], 0.0)
    clear = np.where(nearest > sigma, nearest, 0.0)
    return np.asarray(clear * (total / clear.sum()) if clear.any() else nearest, np.float64)


class HeldBack:
    """A participant's held-out rows, perhaps none, and their margins under the trees so far.

    They are counted after the rounds `looks`; `on_counts` adds the own share of noise to the counts.
    """

    def __init__(
        self, rows: LabelledRows, cells: ScoreCells, forest: Forest, splits: SplitTable, looks: Collection[int],
        threads: int, on_counts: Callable[[Integers], Integers] = lambda counts: counts,
    ) -> None:  # fmt: skip
        self.cells, self.looks, self._rows, self._forest, self._on_counts = cells, looks, rows, forest, on_counts
        self._walk, self._seen = watched(rows, splits, threads).add_trees, 0
        self._margins = np.full((len(rows.y), forest.objective.n_outputs), forest.objective.base_margins)

    def counts(self) -> Integers:
        """Count the rows by their scores under all finished rounds."""
        if new := self._forest.trees[self._seen :]:
            self._walk(new, self._margins)
            self._seen += len(new)
        return self._on_counts(self.cells.count(self._rows, self._forest.objective.predictions(self._margins)))

    def answer(self, asked: HeldOutRequest, leader: str) -> Integers:
        """Count the rows after the round that the leader names, the last one and one of the looks, not counted yet."""
        done = self._forest.rounds
        if asked.rounds != done or done not in self.looks or len(self._forest.trees) == self._seen:
            raise PeerProtocolError(leader, f"expected round {done}, once, got {asked.rounds}", at="HeldOutRequest")
        return self.counts()


class SummedMetrics:
    """The held-out rows as the leader watches them: an eval set whose metrics come from sums over all participants.

    `own` are the leader's own rows, if it has any. Between two of the `looks`, the metrics are those of the last one.
    `flush` sends participants the trees that they do not have yet; `sigma` is the standard deviation of the noise of a
    count.
    """

    name = VALIDATION

    def __init__(
        self, sums: SumOpener, cells: ScoreCells, looks: Collection[int], own: HeldBack | None = None,
        flush: Callable[[], None] = lambda: None, sigma: float = 0.0,
    ) -> None:  # fmt: skip
        self._sums, self._cells, self._looks, self._own = sums, cells, looks, own
        self._flush, self._sigma = flush, sigma
        self._counts: dict[int, Integers] = {}
        # whichever decides about early stopping
        self._decides = METRICS[cells.kind][-1]
        self._known = dict.fromkeys(METRICS[cells.kind], float("nan"))

    def begin(self, forest: Forest, metrics: Sequence[str]) -> Sequence[str]:
        """Return the metrics of each round; ConfigError for one that counts do not give."""
        known = METRICS[self._cells.kind]
        if unknown := [name for name in metrics if name not in known]:
            raise ConfigError(
                f"expected eval_metric of {', '.join(known)} with validation_fraction, got {unknown[0]!r}"
            )
        self._decides = (metrics or known)[-1]
        return metrics or known

    def measure(self, forest: Forest, new: Sequence[Tree]) -> dict[str, float]:
        """Have all participants count their rows, if it is time; return the metrics."""
        if forest.rounds not in self._looks:
            return self._known
        self._flush()
        self._sums.broadcast(HeldOutRequest(forest.rounds))
        cells, own = self._cells, None if self._own is None else self._own.counts()
        counts = self._sums.total(int(np.prod(cells.shape)), own).reshape(cells.shape)
        self._counts[forest.rounds] = counts
        self._known = {name: metric(name, cells, self._of_all(counts)) for name in METRICS[cells.kind]}
        # noise may hide all rows for a while
        if np.isnan(self._known[self._decides]) and not self._sigma:
            wanted = f"held-out rows{' of both classes' if counts.any() else ''}"
            raise DataError(
                f"{self._decides} needs {wanted}, and there are none: raise validation_fraction",
                public="there are too few held-out rows",
            )
        return self._known

    def result(self, rounds: int) -> HeldOut | None:
        """Return what is known of the rows after so many rounds, by group; None if they were not counted then.

        Groups are left out whose rows the noise hides.
        """
        counts, cells = self._counts.get(rounds), self._cells
        if counts is None:
            return None
        groups = {} if cells.column is None else dict(zip(cells.groups, counts, strict=True))
        clear = {
            name: plausible(of, self._sigma)
            for name, of in groups.items()
            if of.sum() > _CLEAR * self._sigma * np.sqrt(of.size)
        }
        of_all = self._of_all(counts)
        return HeldOut(
            groups={name: of_group(cells, of) for name, of in {_ALL: of_all, **clear}.items()},
            calibration=tenths(cells, of_all) if cells.kind == "two classes" else [],
        )

    def _of_all(self, counts: Integers) -> Floats:
        """Return the counts of all groups together."""
        return plausible(counts.sum(axis=0), self._sigma * np.sqrt(len(counts)))


def of_group(cells: ScoreCells, counts: Floats) -> dict[str, float]:
    """Return what counts (outcomes, bins) of a group say, as far as it has such rows."""
    found, n_rows = {name: metric(name, cells, counts) for name in METRICS[cells.kind]}, counts.sum()
    if cells.kind == "two classes":
        above, of_class = counts[:, cells.n_bins // 2 :].sum(axis=1), counts.sum(axis=1)
        shares = {
            "share of second class": (of_class[1], n_rows), "mean score": (counts.sum(axis=0) @ cells.middles, n_rows),
            "predicted as second": (above.sum(), n_rows), "true positive rate": (above[1], of_class[1]),
            "false positive rate": (above[0], of_class[0]),
        }  # fmt: skip
        found |= {name: float(part / whole) for name, (part, whole) in shares.items() if whole > 0}
    return {"rows": float(n_rows), **{name: value for name, value in found.items() if not np.isnan(value)}}


def tenths(cells: ScoreCells, counts: Floats) -> list[tuple[float, float, int]]:
    """Return mean score, share of the second class and rows of ten parts by score, as equal as bins allow."""
    of_bins = counts.sum(axis=0)
    if of_bins.sum() == 0:
        return []
    part = np.minimum((np.cumsum(of_bins) - of_bins / 2) * 10 // of_bins.sum(), 9).astype(np.int64)
    rows, scores, second = (np.bincount(part, of, 10) for of in (of_bins, of_bins * cells.middles, counts[1]))
    return [(float(scores[k] / rows[k]), float(second[k] / rows[k]), round(rows[k])) for k in np.flatnonzero(rows)]
