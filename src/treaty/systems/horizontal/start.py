"""Where a training by row starts if `base_score` is left out: from sums over all participants' labels.

A party that has all labels estimates it from them: see `tallies` and `start_of` of a loss. Where several have them,
they add up the same whole numbers: once the number of rows, the largest label and the largest weight are known, the
leader tells units (`LabelUnits`), and participants answer with their sums of weights and of weighted labels, or of each
class's weights; then the leader tells where training starts (`TrainingStart`), and they answer with bounds of their
gradients from there. Each row's part is rounded by itself, so that the start is that of one table, bit for bit.

The leader learns these sums, and in unary the orders of magnitude of participants' largest labels; participants learn
the start. Under noise nothing is estimated, as sums of labels would have to be paid for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np

from treaty.data.columns import Category
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.messages import Array, Message, view
from treaty.systems.horizontal.quantiles import EXPONENTS, Opening, Total, in_unary, largest_in
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.training import loss_of, objective_for
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.losses.fixed_point import TallyUnits, bound_of_weights
from treaty.trees.objectives import Objective

SUMS_OF_LABELS = (
    "the sums of labels and of weights over all rows, or of the weights of each class's rows, from which follows where "
    "training starts (base_score=None)"
)
START = "where training starts: the mean of all labels, or how frequent each class is (base_score=None)"


class LabelUnits(Message):
    """Contribute sums of labels in these units: powers of two no less than any label and weight; bits of a row's part.

    They tell participants the order of magnitude of the largest label and weight.
    """

    label: float
    weight: float
    bits: Annotated[int, msgspec.Meta(ge=0, le=60)]


class TrainingStart(Message):
    """Contribute the bound of gradients, where training starts from `start`, float64, a number or one of each class.

    It tells participants the mean of all labels, or the classes' shares.
    """

    start: Array


def starts_from_sums(options: SystemOptions, common: BoostingOptions) -> bool:
    """Whether where a training starts is estimated from sums of labels."""
    return common.base_score is None and options.estimates_base_score


class OwnLabels:
    """One party's labels, perhaps none, and what it does with them when the `leader`, named in errors, asks."""

    def __init__(self, inputs: RoleInput, rows: LabelledRows, classes: list[Category] | None, leader: str) -> None:
        self._inputs, self._rows, self._classes, self._leader = inputs, rows, classes, leader
        self.loss = loss_of(np.empty(0), None, None if classes is None else len(classes), None, inputs.common)
        self.summed = starts_from_sums(inputs.options, inputs.common)
        self.n_bounds = 2 if self.summed else len(self.loss.clips) + 1
        """How many `bounds` there are."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """What the opening says: bounds of labels, or else of derivatives; and of weights."""
        if not self.summed:
            given = self.given
            return *given.clips, given.weight_bound
        y, weight = self._rows.y, self._rows.weight
        label = self.loss.label_bound(y) if self._classes is not None or np.any(y) else 2.0 ** EXPONENTS[0]
        return label, bound_of_weights(weight)

    @property
    def given(self) -> Objective:
        """The loss with bounds of own gradients, where nothing is estimated."""
        return objective_for(self._rows, self._classes, self._inputs.options, self._inputs.common)

    def sums(self, units: TallyUnits) -> Integers:
        """Return the own part of the sums of labels."""
        return self.loss.tallies(self._rows.y, self._rows.weight, units)

    def answer(self, told: LabelUnits | TrainingStart) -> Integers:
        """Return what the leader asks for; PeerProtocolError where it fits no training that both agreed to."""
        if isinstance(told, TrainingStart):
            return clips_in_unary(self.starting(told.start, "TrainingStart"))
        allowed, n_rows = [2.0**exponent for exponent in EXPONENTS], len(self._rows.y)
        fits = all(u in allowed and u >= own for u, own in zip((told.label, told.weight), self.bounds, strict=True))
        if not self.summed or not fits or told.bits > TallyUnits.of(n_rows, told.label, told.weight).bits:
            raise self._wrong("units that everybody's labels fit, where base_score is left out", "LabelUnits")
        return self.sums(TallyUnits(told.label, told.weight, told.bits))

    def starting(self, start: Array, where: str) -> Objective:
        """Return the loss that starts where it was told in `where`, with bounds of own gradients."""
        shape = (len(self.loss.start),)
        told = view(start, np.float64, shape, peer=self._leader, what=f"{where}.start").tolist()
        if not self.summed:
            if tuple(told) != self.given.start:
                raise self._wrong("the start of the job's base_score", where)
            return self.given
        try:
            self.loss.starting(told).check()
        except ConfigError:
            raise self._wrong("a start that the loss can have", where) from None
        return objective_for(self._rows, self._classes, self._inputs.options, self._inputs.common, told)

    def _wrong(self, expected: str, where: str) -> PeerProtocolError:
        leader = self._leader
        return PeerProtocolError(leader, f"expected {expected}, got another - at {where} from {leader}")


def agreed_start(
    own: OwnLabels, opening: Opening, opened: Integers, total: Total, tell: Callable[[Message], None], *, has_rows: bool
) -> Objective:
    """Return, as the leader, the loss with a start and bounds that hold for all participants' labels.

    `opened` is the sum of all `opening` vectors. ``tell(message)`` tells participants what to sum next, and
    ``total(vector, length)`` adds what they answer to the leader's own vector (None: it has no rows).
    """
    if not own.summed:
        return opening.bounded(opened, own.given)
    label, weight = opening.bounds(opened)
    units = TallyUnits.of(opening.rows(opened), label, weight)
    mine = own.sums(units)
    tell(LabelUnits(units.label, units.weight, units.bits))
    sums = total(mine if has_rows else None, len(mine))
    told = Array.of(np.array(own.loss.start_of(sums.tolist(), units.label)))
    objective = own.starting(told, "TrainingStart")
    tell(TrainingStart(told))
    n_clips = len(objective.clips)
    clips = total(clips_in_unary(objective) if has_rows else None, n_clips * len(EXPONENTS))
    return objective.agreed([largest_in(of) for of in np.split(clips, n_clips)], weight)


def clips_in_unary(objective: Objective) -> Integers:
    """Return the loss's `clips`, one `in_unary` after the other."""
    return np.concatenate([in_unary(clip) for clip in objective.clips])
