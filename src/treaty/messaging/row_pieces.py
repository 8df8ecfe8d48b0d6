"""Values of rows in messages of bounded size: cut alike at both ends, sent and taken one after the other.

A message that has something of every row would grow with the table. It is sent once for each of `row_pieces` instead,
as the same class with the values of some rows, in the order of the rows. Both ends know how many rows there are, so the
receiver knows how long each piece must be, and puts it where it belongs or adds it up before the next one comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from treaty.machine import arrays
from treaty.machine.arrays import pieces
from treaty.messaging.messages import Array, M, Message, Scalar, view
from treaty.messaging.party import Party


def row_pieces(n_rows: int, bits: int) -> list[slice]:
    """Cut rows, of each of which a message has `bits`, for messages of at most `arrays.PIECE_BYTES`; one at least.

    All but the last have a multiple of 8 rows, so that packed bits of their rows fill whole bytes.
    """
    at_a_time = max(1, arrays.PIECE_BYTES // max(1, bits)) * 8
    return pieces(n_rows, at_a_time) or [slice(0, 0)]


def send_rows(party: Party, peer: str, n_rows: int, bits: int, message: Callable[[slice], Message]) -> None:
    """Send a peer what ``message(rows)`` makes of each of `row_pieces`."""
    for rows in row_pieces(n_rows, bits):
        party.send(peer, message(rows))


def take_rows(
    party: Party, peer: str, n_rows: int, bits: int, kind: type[M], first: M | None = None
) -> Iterator[tuple[slice, M]]:
    """Receive what `send_rows` sends; yield the rows and the message of each piece. `first` has come already."""
    for rows in row_pieces(n_rows, bits):
        yield rows, party.receive(peer, kind) if first is None or rows.start else first


def column_pieces(count: int, n_rows: int) -> list[slice]:
    """Cut columns of packed bits of all rows for messages; where one alone is too long, its rows go in `row_pieces`."""
    return pieces(count, max(1, arrays.PIECE_BYTES // max(1, -(-n_rows // 8))))


def take_columns(
    party: Party, peer: str, n_rows: int, bits: int, first: M, columns: Callable[[M], Array], count: int, what: str
) -> NDArray[np.uint8]:
    """Return `count` columns of packed bits, uint8 (count, bytes), of which a peer's message `first` has some rows.

    The rest comes in `row_pieces` of `bits` each. Of a single message the result is a view.
    """
    parts = [
        view(columns(message), np.uint8, (count, -(-(of.stop - of.start) // 8)), peer=peer, what=what)
        for of, message in take_rows(party, peer, n_rows, bits, type(first), first)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def put_together(parts: list[NDArray[Scalar]]) -> NDArray[Scalar]:
    """Return arrays of some rows each as one, along the first axis, and empty the list: what is copied is let go.

    For what a peer's own numbers say the size of: no room is made before the rows have come.
    """
    if len(parts) == 1:
        return parts.pop()
    whole, filled = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype), 0
    while parts:
        part = parts.pop(0)
        whole[filled : filled + len(part)] = part
        filled += len(part)
    return whole


def bits_of(packed: Array, n_rows: int, peer: str, what: str) -> NDArray[np.bool_]:
    """Return a peer's packed bits of rows, bool (n_rows,); `what` is their field, for the error."""
    content = view(packed, np.uint8, (-(-n_rows // 8),), peer=peer, what=what)
    return np.unpackbits(content, count=n_rows).view(np.bool_)
