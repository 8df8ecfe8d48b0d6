"""Which messages a party may receive when: a table of states, the messages allowed in each, and the state that follows.

In use::

    order = Order(TABLE, "between trees")
    message = party.receive(active, *order.allowed)  # refuses every other message
    order.take(message)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treaty.messaging.messages import Message

Table = Mapping[str, Mapping[type[Message], str | tuple[str, str]]]
"""State -> message -> next state. A pair is for messages that come in pieces: the state after a piece whose `last` is
false, and after the last one."""


class Order:
    """Where a conversation stands in its table."""

    def __init__(self, table: Table, state: str) -> None:
        self._table, self.state = table, state

    @property
    def allowed(self) -> tuple[type[Message], ...]:
        """Messages that may come now; none when the conversation is over."""
        return tuple(self._table[self.state])

    def take(self, message: Any) -> None:
        """Move to the state after `message`, one of those `allowed`."""
        following = self._table[self.state][type(message)]
        self.state = following if isinstance(following, str) else following[message.last]
