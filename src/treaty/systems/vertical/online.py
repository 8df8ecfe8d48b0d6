"""Prediction row by row, for as long as it is wanted: parties that have aligned their rows once stay connected.

The active party names rows by their numbers among those that all parties have, and gets their sides at all records in
use, in one round for each request; its own columns of these rows may be newer than those of its table.

What each message tells is in `vertical.leakage`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.errors import PeerProtocolError
from treaty.messaging.agreement import OF_ONE_MODEL, agree
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, view
from treaty.models.trees import margins
from treaty.systems.system import RoleInput
from treaty.systems.vertical.decisions import (
    DecideRequest,
    Finish,
    RecordCount,
    RowSets,
    ask_all,
    check_present,
    check_unknown,
    decidable,
    shown_matrix,
)

MOST_ROWS = 1 << 20
"""Rows of one request, at most."""
SAYS_SO = 20.0
"""Seconds after which an active party that is asked nothing says that it is still there."""


class OnlineRows(Message):
    """Numbers, int32, of the common rows that are asked for next; none: nothing is asked just now."""

    leakage: ClassVar = MessageLeakage("which of the common rows are asked for, and when", "exact")

    rows: Array


class Asked(msgspec.Struct, frozen=True):
    """A request: numbers of common rows, int32, the active party's columns of them, and where margins go."""

    rows: NDArray[np.int32]
    table: Table
    tell: Callable[[NDArray[np.float64]], None]


Requests = Iterator[Asked | None]
"""What the active party is asked, one after the other; None now and then, where nothing is."""


def online_active(inputs: RoleInput) -> None:
    """Predict what `inputs.requests` asks for, until it ends."""
    party, part = inputs.party, inputs.part
    assert part.forest is not None
    check_present(party, part, inputs.rows.table)
    agree(party, {"model": part.model_id, "rows": inputs.rows.table.n_rows}, remedy=OF_ONE_MODEL)
    held = {peer: party.receive(peer, RecordCount).records for peer in party.peers}
    trees, objective = decidable(party, part, held), part.forest.objective

    def answer(asked: Asked) -> NDArray[np.float64]:
        found = ask_all(party, part, trees, asked.table.matrix(), 0, inputs.threads)
        return margins(found, objective, inputs.threads)

    answer_requests(inputs, answer)


def answer_requests(inputs: RoleInput[Any, Any], answer: Callable[[Asked], NDArray[np.float64]]) -> None:
    """Name each request's rows to all peers, and tell what `answer` makes of it, until there are no more."""
    party = inputs.party
    assert inputs.requests is not None
    spoken, often = time.monotonic(), min(SAYS_SO, party.timeout / 4)
    for asked in inputs.requests:
        if asked is None:
            party.heed()
            party.transcript.clear()  # or it would grow for as long as the service lasts
            if time.monotonic() - spoken < often:
                continue
        spoken, rows = time.monotonic(), np.zeros(0, np.int32) if asked is None else asked.rows
        for peer in party.peers:
            party.send(peer, OnlineRows(Array.of(rows)))
        if asked is not None:
            asked.tell(answer(asked))
    for peer in party.peers:
        party.send(peer, Finish())


def asked_rows(asked: OnlineRows, active: str, n_rows: int) -> NDArray[np.int32]:
    """Return the rows that the active party asks a passive one for, all below `n_rows`."""
    rows = view(asked.rows, np.int32, (None,), peer=active, what="OnlineRows.rows")
    if len(rows) > MOST_ROWS or np.any(rows < 0) or np.any(rows >= n_rows):
        raise PeerProtocolError(
            active, f"expected at most {MOST_ROWS} rows below {n_rows} - at OnlineRows from {active}"
        )
    return rows


def online_passive(inputs: RoleInput) -> None:
    """Decide the common rows that the active party asks for at own splits, until it has finished."""
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    (active,) = party.peers
    check_present(party, part, table)
    agree(party, {"model": part.model_id, "rows": table.n_rows}, remedy=OF_ONE_MODEL)
    if part.randomised is not None and inputs.apart:
        check_unknown(inputs, part.randomised.known, inputs.rows)
    matrix = shown_matrix(part.randomised, inputs.rows)
    party.send(active, RecordCount(len(part.splits)))
    sets = RowSets(active, [])
    while not isinstance(asked := party.receive(active, OnlineRows, DecideRequest, Finish), Finish):
        if isinstance(asked, DecideRequest):
            for decisions in sets.decide(asked, part.splits, inputs.threads):
                party.send(active, decisions)
            continue
        assert isinstance(asked, OnlineRows)
        party.transcript.clear()
        rows = asked_rows(asked, active, len(matrix))
        sets = RowSets(active, [matrix[rows]] if len(rows) else [])
