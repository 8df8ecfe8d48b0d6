"""What the active party tells at the end of an epoch of logistic regression, and how far the others follow it.

========== ==================== ==============================================  ====
message    from -> to           content
========== ==================== ==============================================  ====
`EpochEnd` active party -> all  learning rate, whether training is over         TLS
========== ==================== ==============================================  ====
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from treaty.errors import PeerProtocolError
from treaty.linear.training import Schedule
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.systems.system import Progress


class EpochEnd(Message):
    """The learning rate of the next epoch, or that there is none; whether the last is undone.

    Tells whether the loss rose by a tenth.
    """

    learning_rate: Annotated[float, msgspec.Meta(gt=0)]
    back: bool
    finished: bool


def end_epoch(party: Party, schedule: Schedule, loss: float, progress: Progress | None) -> EpochEnd:
    """Decide at the active party, from the epoch's mean loss, how training goes on, and tell all."""
    back = schedule.end_epoch(loss)
    end = EpochEnd(schedule.learning_rate, back, schedule.finished)
    for peer in party.peers:
        party.send(peer, end)
    if progress is not None:
        progress(len(schedule.losses), schedule.losses)
    return end


def receive_end(party: Party, active: str, schedule: Schedule) -> EpochEnd:
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
    return end
