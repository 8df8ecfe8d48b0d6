"""Rows of a plain join when ids are repeated: the last step of `alignment` under "expand".

An id in m rows of one party and n of another has m * n rows in the joined table. The active party is told how often
every party has each common id, lays the rows out, and tells each party where its own go: its rows one after another,
each `repeats` times, and that again until there are `totals`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.compute import pieces
from treaty.data.ids import Ids
from treaty.errors import DataError, PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party

_MOST_ROWS = 1 << 31


class Copies(Message):
    """How many rows the sender has of each common id, int64 (n,)."""

    counts: Array


class Layout(Message):
    """Of each common id: rows in the joined table, and how often each row of the receiver is repeated, int64 (n,)."""

    totals: Array
    repeats: Array


def arrange(party: Party, own: NDArray[np.int64], batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Step 8: lay out the joined rows of each id, own rows first and slowest, then those of the peers in turn."""
    counts = [own]
    for peer in party.peers:
        copies = np.empty(len(own), np.int64)
        for part in pieces(len(own), batch):
            length = part.stop - part.start
            copies[part] = view(
                party.receive(peer, Copies).counts, np.int64, (length,), peer=peer, what="Copies.counts"
            )
        if np.any(copies < 1) or np.any(copies >= _MOST_ROWS):
            raise PeerProtocolError(peer, f"expected at least one row of a common id - at Copies.counts from {peer}")
        counts.append(copies)
    rows = float(np.prod(np.array(counts, np.float64), axis=0).sum())
    if rows >= _MOST_ROWS:
        raise DataError(
            f"expected fewer than {_MOST_ROWS} joined rows, got about {rows:.3g}: ids are repeated at several parties",
            public="joining all repeated ids gives too many rows",
        )
    totals = np.prod(counts, axis=0, dtype=np.int64)
    repeats = totals // np.cumprod(counts, axis=0, dtype=np.int64)
    for peer, own_repeats in zip(party.peers, repeats[1:], strict=True):
        for part in pieces(len(own), batch):
            party.send(peer, Layout(Array.of(totals[part]), Array.of(own_repeats[part])))
    return totals, repeats[0]


def arranged(
    party: Party, lead: str, own: NDArray[np.int64], batch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Step 8: say how many rows each common id has here, and be told where they go."""
    totals, repeats = np.empty(len(own), np.int64), np.empty(len(own), np.int64)
    for part in pieces(len(own), batch):
        party.send(lead, Copies(Array.of(own[part])))
    for part in pieces(len(own), batch):
        layout = party.receive(lead, Layout)
        length = part.stop - part.start
        totals[part] = view(layout.totals, np.int64, (length,), peer=lead, what="Layout.totals")
        repeats[part] = view(layout.repeats, np.int64, (length,), peer=lead, what="Layout.repeats")
    wrong = np.any(repeats < 1) or np.any(repeats >= _MOST_ROWS) or np.any(totals < 1) or np.any(totals >= _MOST_ROWS)
    if wrong or np.any(totals % (repeats * own)) or totals.sum() >= _MOST_ROWS:
        raise PeerProtocolError(lead, f"expected whole blocks of joined rows - at Layout from {lead}")
    return totals, repeats


def joined(
    ids: Ids, common: NDArray[np.int64], totals: NDArray[np.int64], repeats: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return own rows of the joined table: of each id `totals` rows, each own row `repeats` times, round and round."""
    number = np.repeat(np.arange(len(common)), totals)
    place = np.arange(len(number)) - np.repeat(np.cumsum(totals) - totals, totals)
    copies = np.diff(ids.starts)[common]
    return ids.rows[ids.starts[common[number]] + place // repeats[number] % copies[number]]
