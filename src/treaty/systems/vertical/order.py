"""What every passive party of a system split by column may be sent between trees."""

from __future__ import annotations

from treaty.messaging.messages import Message
from treaty.systems.pooled.rounds import Keep
from treaty.systems.vertical.decisions import DecideRequest, Finish


def between_trees(state: str) -> dict[type[Message], str | tuple[str, str]]:
    """Return the part of a table that all systems have: in `state`, rows are decided and checkpoints kept."""
    return {DecideRequest: state, Keep: state, Finish: "finished"}
