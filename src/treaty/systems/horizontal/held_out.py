"""Metrics on rows that participants keep back, in jobs where no party has labelled rows of all to watch.

Every participant keeps a share of its own rows out of training. After a round it counts them by score and label, and
by the category of one column if the job names one. The counts of all are added up under the masks of training, and the
leader computes metrics from the sum.

Scores are counted in bins. With two classes these are of the log odds of the second class, in steps of 1/16 from -8
to 8, by label. With several they are of the log odds of the row's own class, by whether that class was predicted.
Errors of predicted numbers have four bins an octave. A metric takes all scores of a bin as its middle, and pairs of one
bin as ties: on credit data AUC and log loss differ by less than 0.002 from those of the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
# of log odds, and of errors between 2^-40 and 2^40
_SCORES, _MOST_ODDS = 256, 8.0
_AN_OCTAVE, _OCTAVES = 4, 40
_ALL, _OTHER, _MISSING = "all", "other", "missing"


@leaks("how many rounds are finished", "control")
class HeldOutRequest(Message):
    """Count the rows kept back by their scores after so many rounds."""

    rounds: Annotated[int, msgspec.Meta(ge=1)]


def divided(rows: LabelledRows, share: float | None, name: str) -> tuple[LabelledRows, LabelledRows | None]:
    """Return a participant's rows to train on, and those kept back (None: the job keeps none), the same ones each time.

    A participant that would keep all of its few rows back keeps none.
    """
    if share is None:
        return rows, None
    back = np.random.default_rng(own_seed(0, f"{name} keeps back")).random(rows.table.n_rows) < share
    back &= not back.all()
    return _chosen(rows, ~back), _chosen(rows, back)


def _chosen(rows: LabelledRows, which: Flags) -> LabelledRows:
    weight = None if rows.weight is None else rows.weight[which]
    return replace(rows, table=rows.table.rows(which), y=rows.y[which], weight=weight)


@dataclass(frozen=True, slots=True)
class ScoreCells:
    """How rows are counted: by `groups`, the categories of the column at `column`, and by the kind of target."""

    kind: Kind
    groups: tuple[str, ...] = ("",)
    column: int | None = None

    @classmethod
    def of(
        cls, objective: Objective, classes: Sequence[object] | None, schema: Schema, group: str | None
    ) -> ScoreCells:
        """Return the cells of a job; ConfigError unless `group` names a column of categories."""
        kind: Kind = "numbers" if classes is None else "two classes" if objective.n_outputs == 1 else "classes"
        if group is None:
            return cls(kind)
        at = schema.names.index(group) if group in schema.names else -1
        categories = schema.categories[at] if at >= 0 else None
        if categories is None:
            known = [name for name, of in zip(schema.names, schema.categories, strict=True) if of is not None]
            raise ConfigError(
                f"expected validation_group to be a column of categories ({', '.join(known) or 'there is none'}), got "
                f"{group!r}"
            )
        names = [f"{name} (category)" if name in (_ALL, _OTHER, _MISSING) else str(name) for name in categories]
        return cls(kind, (*names, _OTHER, _MISSING), at)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Groups, labels or outcomes, and bins of scores."""
        numbers = self.kind == "numbers"
        return len(self.groups), 1 if numbers else 2, 2 * _OCTAVES * _AN_OCTAVE if numbers else _SCORES

    def count(self, rows: LabelledRows, predicted: Floats) -> Integers:
        """Count rows, int64 (groups * outcomes * bins,), by their predictions (n_rows, n_outputs)."""
        n_rows, group, outcome = len(rows.y), np.zeros(len(rows.y), np.int64), np.zeros(len(rows.y), np.int64)
        if self.column is not None:
            codes = rows.table.columns[self.column]
            group = np.where(np.isnan(codes), len(self.groups) - 1, codes).astype(np.int64)
        if self.kind == "numbers":
            error = np.abs(rows.y - predicted[:, 0])
            octaves = np.log2(np.maximum(error, 2.0**-_OCTAVES))
            bins = np.floor((octaves + _OCTAVES) * _AN_OCTAVE)
        else:
            own = rows.y.astype(np.int64)
            if self.kind == "two classes":
                p, outcome = predicted[:, 0], own
            else:
                p, outcome = predicted[np.arange(n_rows), own], (predicted.argmax(axis=1) == own).astype(np.int64)
            with np.errstate(divide="ignore"):
                odds = np.log(p) - np.log1p(-p)
            bins = np.floor((odds + _MOST_ODDS) * _SCORES / (2 * _MOST_ODDS))
        _, n_outcomes, n_bins = self.shape
        cell = (group * n_outcomes + outcome) * n_bins + np.clip(bins, 0, n_bins - 1).astype(np.int64)
        return np.bincount(cell, minlength=int(np.prod(self.shape)))


def metric(name: str, kind: Kind, counts: Integers) -> float:
    """Return a metric of counts (outcomes, bins); NaN where rows, or those of a class, are missing."""
    total, n_bins = counts.sum(), counts.shape[1]
    if total <= 0:
        return float("nan")
    if kind == "numbers":
        # means of an error and of its square over a bin whose logarithms are evenly filled
        low, ratio = 2.0 ** (np.arange(n_bins) / _AN_OCTAVE - _OCTAVES), 2.0 ** (1 / _AN_OCTAVE)
        if name == "mae":
            return float(counts[0] @ (low * (ratio - 1) / np.log(ratio)) / total)
        return float(np.sqrt(counts[0] @ (low**2 * (ratio**2 - 1) / np.log(ratio) / 2) / total))
    p = 1 / (1 + np.exp(-middle_odds(n_bins)))
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


def middle_odds(n_bins: int) -> Floats:
    """Return the log odds in the middle of each bin."""
    return np.asarray((np.arange(n_bins) + 0.5) * (2 * _MOST_ODDS / n_bins) - _MOST_ODDS, np.float64)


class HeldBack:
    """A participant's rows that were kept back, perhaps none, and their margins under the trees so far."""

    def __init__(self, rows: LabelledRows, cells: ScoreCells, forest: Forest, splits: SplitTable, threads: int) -> None:
        self.cells, self._rows, self._forest = cells, rows, forest
        self._walk, self._seen = watched(rows, splits, threads).add_trees, 0
        self._margins = np.full((len(rows.y), forest.objective.n_outputs), forest.objective.base_margins)

    def counts(self) -> Integers:
        """Count the rows by their scores under all finished rounds."""
        if new := self._forest.trees[self._seen :]:
            self._walk(new, self._margins)
            self._seen += len(new)
        return self.cells.count(self._rows, self._forest.objective.predictions(self._margins))

    def answer(self, asked: HeldOutRequest, leader: str) -> Integers:
        """Count the rows after the round that the leader names, which has to be the last one, and not counted yet."""
        done = self._forest.rounds
        if asked.rounds != done or len(self._forest.trees) == self._seen:
            raise PeerProtocolError(leader, f"expected round {done}, once, got {asked.rounds}", at="HeldOutRequest")
        return self.counts()


class SummedMetrics:
    """The rows kept back as the leader watches them: an eval set whose metrics come from sums over all participants.

    `flush` sends participants the trees that they do not have yet.
    """

    name = VALIDATION

    def __init__(self, sums: SumOpener, own: HeldBack, flush: Callable[[], None], *, has_rows: bool) -> None:
        self._sums, self._own, self._flush, self._has_rows = sums, own, flush, has_rows
        self._counts: dict[int, Integers] = {}
        # whichever decides about early stopping
        self._last = METRICS[own.cells.kind][-1]

    def begin(self, forest: Forest, metrics: Sequence[str]) -> Sequence[str]:
        """Return the metrics of each round; ConfigError for one that counts do not give."""
        known = METRICS[self._own.cells.kind]
        if unknown := [name for name in metrics if name not in known]:
            raise ConfigError(
                f"expected eval_metric of {', '.join(known)} with validation_fraction, got {unknown[0]!r}"
            )
        self._last = (metrics or known)[-1]
        return metrics or known

    def measure(self, forest: Forest, new: Sequence[Tree]) -> dict[str, float]:
        """Have all participants count their rows; return the metrics."""
        self._flush()
        self._sums.broadcast(HeldOutRequest(forest.rounds))
        cells = self._own.cells
        own = self._own.counts() if self._has_rows else None
        counts = self._sums.total(int(np.prod(cells.shape)), own).reshape(cells.shape)
        self._counts[forest.rounds] = counts
        found = {name: metric(name, cells.kind, counts.sum(axis=0)) for name in METRICS[cells.kind]}
        if np.isnan(found[self._last]):
            raise DataError(
                f"{self._last} needs rows kept back{' of both classes' if counts.any() else ''}, and there are none: "
                "raise validation_fraction",
                public="too few rows are kept back",
            )
        return found

    def result(self, rounds: int) -> HeldOut | None:
        """Return what is known of the rows after so many rounds, by group; None if they were not counted then."""
        counts, cells = self._counts.get(rounds), self._own.cells
        if counts is None:
            return None
        groups = {} if cells.column is None else dict(zip(cells.groups, counts, strict=True))
        found = {name: of_group(cells.kind, of) for name, of in groups.items() if of.any()}
        return HeldOut(
            groups={_ALL: of_group(cells.kind, counts.sum(axis=0)), **found},
            calibration=tenths(counts.sum(axis=0)) if cells.kind == "two classes" else [],
        )


def of_group(kind: Kind, counts: Integers) -> dict[str, float]:
    """Return what counts (outcomes, bins) of a group say, as far as it has such rows."""
    found, (n_rows, n_bins) = (
        {name: metric(name, kind, counts) for name in METRICS[kind]},
        (counts.sum(), counts.shape[1]),
    )
    if kind == "two classes":
        above, of_class = counts[:, n_bins // 2 :].sum(axis=1), counts.sum(axis=1)
        scores = float(counts.sum(axis=0) @ (1 / (1 + np.exp(-middle_odds(n_bins)))))
        shares = {
            "share of second class": (of_class[1], n_rows), "mean score": (scores, n_rows),
            "predicted as second": (above.sum(), n_rows), "true positive rate": (above[1], of_class[1]),
            "false positive rate": (above[0], of_class[0]),
        }  # fmt: skip
        found |= {name: float(part / whole) for name, (part, whole) in shares.items() if whole > 0}
    return {"rows": float(n_rows), **{name: value for name, value in found.items() if not np.isnan(value)}}


def tenths(counts: Integers) -> list[tuple[float, float, int]]:
    """Return mean score, share of the second class and rows of ten parts by score, as equal as bins allow."""
    of_bins = np.maximum(counts.sum(axis=0), 0)
    if of_bins.sum() == 0:
        return []
    part = np.minimum((np.cumsum(of_bins) - of_bins / 2) * 10 // of_bins.sum(), 9).astype(np.int64)
    rows = np.bincount(part, of_bins, 10)
    scores = np.bincount(part, of_bins / (1 + np.exp(-middle_odds(len(of_bins)))), 10)
    second = np.bincount(part, counts[1], 10)
    return [(float(scores[k] / rows[k]), float(second[k] / rows[k]), int(rows[k])) for k in np.flatnonzero(rows)]
