"""What a passive party does in every system split by column: keep its part and checkpoints, and answer to the end.

A system's role program uses it like this::

    agree_on_terms(seat)
    ...  # tell the active party about own columns, and receive the system's `Start`
    follower = Follower(seat, start)
    ...  # make the owner of the columns, which records splits in follower.part.splits
    return follower.follow(Order(TABLE, "between trees"), {MyRequest: owner.answer})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treaty.errors import ConfigError
from treaty.messaging.conversation import Order
from treaty.messaging.messages import Message
from treaty.models.checkpoints import checkpoint_of, fingerprint
from treaty.models.trees import ModelPart, keep_records
from treaty.privacy.remembered_rows import RandomisedRows
from treaty.systems.pooled.rounds import CheckpointReceipt, CheckpointRequest
from treaty.systems.system import Seat
from treaty.systems.vertical.active import Start
from treaty.systems.vertical.decisions import DecideRequest, Decisions, Finish, RowSets
from treaty.systems.vertical.limits import TrainingLimits
from treaty.systems.vertical.shown_rows import shown_matrix
from treaty.trees.ensemble import SplitTable

Answer = Message | Iterable[Message] | None
Handlers = Mapping[type[Message], Callable[[Any], Answer]]
"""The function for each class of message: it takes the message and returns the answer to send, or None for none."""


def between_trees(state: str) -> dict[type[Message], str | tuple[str, str]]:
    """Return what every order of messages allows between trees: to decide rows and keep checkpoints, or to finish."""
    return {DecideRequest: state, CheckpointRequest: state, Finish: "finished"}


class Follower:
    """A passive party once it has the active one's `start`; raises ConfigError where its checkpoint is another's.

    `part` is new, or resumed and then cut to the records of the rounds that the active party kept. `limits` count what
    the active party asks for. `told` are training rows as the active party was told them under noise.
    """

    def __init__(self, seat: Seat, start: Start, told: RandomisedRows | None = None) -> None:
        (self._active,) = seat.party.peers
        self._seat, table = seat, seat.rows.table
        alone = getattr(seat.options, "rl_trees", None) or 0
        self.limits = TrainingLimits(self._active, seat, start.rounds, alone)
        tables = [table, *(rows.table for rows in seat.eval_sets)]
        self._fingerprint = b"" if seat.keeper is None else fingerprint([(rows, ()) for rows in tables])
        self.part = self._resumed(start) if start.resumed else self._new(start)
        # row sets that `DecideRequest` numbers: eval sets, and with refit the training rows after them
        asked = [*seat.eval_sets, *([seat.rows] if getattr(seat.options, "refit", None) else [])]
        self._row_sets = RowSets(self._active, [shown_matrix(told, rows) for rows in asked])
        self._first, self._trees = start.rounds, 0  # rounds that were there, trees since

    def report(self, rounds: int) -> None:
        """Tell the seat's progress function how many rounds are done."""
        if self._seat.progress is not None:
            self._seat.progress(rounds, self.part)

    def next_tree(self) -> None:
        """Report the rounds so far; from here on the party's round is the new tree's number, from 1."""
        self.report(self._rounds)
        self._trees += 1
        self._seat.party.round = self._trees

    def follow(self, order: Order, handlers: Handlers) -> ModelPart:
        """Answer the active party until `Finish`; it, `DecideRequest` and `CheckpointRequest` have handlers already."""
        handlers = {DecideRequest: self.decide, CheckpointRequest: self.keep, Finish: self._finish, **handlers}
        while order.allowed:
            self._answer(order, handlers)
        return self.part

    def decide(self, request: DecideRequest) -> Iterable[Decisions]:
        """Tell the active party which rows of an eval set go left."""
        return self._row_sets.decide(request, self.part.splits, self._seat.threads)

    def keep(self, request: CheckpointRequest) -> CheckpointReceipt:
        """Write a checkpoint, where this party keeps them."""
        self.limits.checkpoint(request.rounds)
        keeper, given = self._seat.keeper, self._seat.given
        if keeper is not None:
            keeper.keep(lambda: checkpoint_of(self.part, given, self._fingerprint))
        return CheckpointReceipt()

    @property
    def _rounds(self) -> int:
        return self._first + self._trees // self._seat.trees_a_round

    def _finish(self, _: Finish) -> None:
        self.report(self._rounds)

    def _answer(self, order: Order, handlers: Handlers) -> None:
        # a method, so that no message, of many ciphertexts perhaps, is held while the next is waited for
        party, active = self._seat.party, self._active
        message = party.receive(active, *order.allowed)
        order.take(message)
        answer = handlers[type(message)](message)
        for part in [answer] if isinstance(answer, Message) else answer or []:
            party.send(active, part)

    def _new(self, start: Start) -> ModelPart:
        seat = self._seat
        return ModelPart(
            model_id=start.model_id, party=seat.party.name, schema=seat.rows.table.schema, splits=SplitTable(),
            trees_a_round=seat.trees_a_round,
        )  # fmt: skip

    def _resumed(self, start: Start) -> ModelPart:
        seat, keeper = self._seat, self._seat.keeper
        found = None if keeper is None else keeper.found()
        if found is None or found.part.model_id != start.model_id or len(found.part.splits) < start.records:
            raise ConfigError(
                f"cannot resume: expected a checkpoint of model {start.model_id[:8]} with {start.records} splits, got "
                + ("none" if found is None else f"one of model {found.part.model_id[:8]} with {len(found.part.splits)}")
                + f" - at {keeper.path if keeper else 'this party, which keeps none'}",
                public="it has no checkpoint of the training to resume",
            )
        found.check(seat.given, seat.may_change, (), self._fingerprint)
        keep_records(found.part.splits, start.records)
        return found.part
