"""What the guest tells at the end of an epoch of logistic regression, and how far others follow it.

========== ============= ==================================================  ====
message    from -> to    content
========== ============= ==================================================  ====
`EpochEnd` guest -> all  learning rate, whether training is over             TLS
========== ============= ==================================================  ====
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from treaty.errors import PeerProtocolError
from treaty.linear.training import Schedule
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.systems.linear_options import LinearOptions

Epochs = Callable[[list[float]], None]


class EpochEnd(Message):
    """The learning rate of the next epoch, or that there is none; whether the last is undone.

    Tells whether the loss rose by a tenth.
    """

    learning_rate: Annotated[float, msgspec.Meta(gt=0)]
    back: bool
    finished: bool


def end_epoch(party: Party, schedule: Schedule, loss: float, progress: Epochs | None) -> EpochEnd:
    """Decide at the guest, from the epoch's mean loss, how training goes on, and tell all."""
    back = schedule.end_epoch(loss)
    end = EpochEnd(schedule.learning_rate, back, schedule.finished)
    for peer in party.peers:
        party.send(peer, end)
    if progress is not None:
        progress(schedule.losses)
    return end


def receive_end(party: Party, guest: str, options: LinearOptions, schedule: Schedule) -> EpochEnd:
    """Hear from the guest how training goes on, and hold it to what was agreed; `schedule` keeps the learning rate.

    Raises
    ------
    PeerProtocolError
        When there are to be more epochs than `max_iter`, or larger steps than before: they are more equations about
        others' rows than these agreed to.
    """
    end, rate = party.receive(guest, EpochEnd), schedule.learning_rate
    if party.round >= options.max_iter and not end.finished:
        raise PeerProtocolError(
            guest,
            f"expected training to end after max_iter={options.max_iter} epochs - at EpochEnd from {guest}",
        )
    if end.learning_rate > rate:
        raise PeerProtocolError(
            guest, f"expected a learning rate of at most {rate}, got {end.learning_rate} - at EpochEnd from {guest}"
        )
    schedule.learning_rate = end.learning_rate
    return end
