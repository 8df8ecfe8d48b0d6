"""What parties tell at the end of an epoch of logistic regression: margins of eval sets, and how training goes on.

============ ======================= ==================================================  =================
message      from -> to              content
============ ======================= ==================================================  =================
`MarginPart` passive -> active party its parts of the margins of an eval set's rows      masks that cancel
`EpochEnd`   active party -> all     learning rate, whether training is over             TLS
============ ======================= ==================================================  =================

There are eval sets only if every party consents (`show_eval_margins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from treaty.compute import Floats
from treaty.errors import PeerProtocolError
from treaty.linear.losses import TAYLOR
from treaty.linear.preparation import Preparation
from treaty.linear.training import EpochState, EvalLosses, Schedule
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.systems.logistic.prediction import collect_margins, send_margins
from treaty.systems.logistic.setup import Setting
from treaty.systems.system import LabelledRows, Progress, Seat


class EpochEnd(Message):
    """The learning rate of the next epoch, or that there is none; whether the last is undone, or best by eval rows.

    Tells whether the loss rose by a tenth, and whether that of eval rows is the lowest so far.
    """

    learning_rate: Annotated[float, msgspec.Meta(gt=0)]
    back: bool
    finished: bool
    best: bool


def prepared(rows: LabelledRows, preparation: Preparation, *, intercept: bool) -> tuple[Floats, Floats]:
    """Return an eval set's prepared columns, with one of ones for an intercept, and its labels as -1 and 1."""
    n_rows = rows.table.n_rows
    matrix = preparation.matrix(rows.table.columns, n_rows)
    return np.hstack([matrix, np.ones((n_rows, int(intercept)))]), np.where(rows.y > 0.5, 1.0, -1.0)


@dataclass(slots=True)
class EvalSets:
    """A data party's columns of eval sets; the losses, which the active party alone has; the best weights so far."""

    party: Party
    setting: Setting
    sets: dict[str, tuple[Floats, Floats]]
    found: EvalLosses
    best: Floats | None = None

    @classmethod
    def of(cls, seat: Seat, setting: Setting, preparation: Preparation) -> EvalSets:
        leads = seat.party.name == setting.active
        sets = {rows.name: prepared(rows, preparation, intercept=leads) for rows in seat.eval_sets}
        return cls(
            seat.party, setting, sets, EvalLosses({name: [] for name in sets}, seat.common.early_stopping_rounds)
        )

    def resume(self, state: EpochState) -> None:
        """Go on from the state after an epoch."""
        self.best = state.best
        for name, losses in state.eval_losses.items():
            self.found.losses[name] = list(losses)

    def look(self, weights: Floats, seeds: Mapping[str, bytes]) -> None:
        """Have the active party compute the losses after an epoch, from all parties' own weights (n_columns,).

        `seeds` are those shared with every other party with data.
        """
        party, setting = self.party, self.setting
        others = {peer: seed for peer, seed in seeds.items() if peer != setting.active}
        for name, (matrix, labels) in self.sets.items():
            own = matrix @ weights
            if party.name == setting.active:
                margins = collect_margins(party, setting.passives, own)
                self.found.losses[name].append(float(np.mean(TAYLOR.values(margins, labels))))
            else:
                send_margins(party, setting.active, own, others, party.round, f"margins of {name}")

    def keep(self, end: EpochEnd, weights: Floats) -> None:
        """Keep the weights after the epoch that has ended, if it was the best by eval rows, and these decide.

        Raises PeerProtocolError where they do not: no party may choose the epoch whose weights a model has.
        """
        if end.best and (self.found.patience is None or not self.sets):
            active = self.setting.active
            raise PeerProtocolError(active, f"expected no epoch to be best by eval rows - at EpochEnd from {active}")
        if end.best:
            self.best = weights.copy()

    def chosen(self, weights: Floats) -> Floats:
        """Return the weights that training ends with: the best by eval rows where these decide, else the last."""
        return weights if self.best is None else self.best


def end_epoch(
    party: Party, schedule: Schedule, loss: float, progress: Progress | None, evals: EvalLosses | None = None
) -> EpochEnd:
    """Decide at the active party, from the epoch's mean loss and eval sets, how training goes on, and tell all."""
    evals = evals or EvalLosses({}, None)
    back = schedule.end_epoch(loss)
    end = EpochEnd(schedule.learning_rate, back, schedule.finished or evals.over, evals.best)
    for peer in party.peers:
        party.send(peer, end)
    if progress is not None:
        progress(len(schedule.losses), {"train": schedule.losses, **evals.losses})
    return end


def receive_end(party: Party, active: str, schedule: Schedule, progress: Progress | None) -> EpochEnd:
    """Receive how training goes on, and update the schedule's rate.

    Raises PeerProtocolError for more epochs than `max_iter`, or a higher rate than before: both would give others more
    equations about own rows than agreed.
    """
    end, rate = party.receive(active, EpochEnd), schedule.learning_rate
    if party.round >= schedule.max_iter and not end.finished:
        raise PeerProtocolError(
            active, f"expected training to end after max_iter={schedule.max_iter} epochs - at EpochEnd from {active}"
        )
    if end.learning_rate > rate:
        raise PeerProtocolError(
            active, f"expected a learning rate of at most {rate}, got {end.learning_rate} - at EpochEnd from {active}"
        )
    schedule.learning_rate = end.learning_rate
    if progress is not None:
        progress(party.round, None)
    return end
