"""Rows of a plain join when ids are repeated: step 8 of `alignment.roles`, with ``on_duplicate="expand"``.

An id in m rows of one party and n of another has m * n rows in the joined table. The active party is told how often
every party has each common id, and tells each party where its own rows go: one after another, each `repeats` times, and
all of them over again until there are `totals`.
"""

from __future__ import annotations

import numpy as np

from treaty.data.ids import Ids
from treaty.errors import DataError, PeerProtocolError
from treaty.machine.arrays import Integers, pieces
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party

_MOST_ROWS = 1 << 27  # of the joined table: a party is told their number, and has a few bytes of each


class Copies(Message):
    """How many rows the sender has of each common id, int64 (n,)."""

    counts: Array


class JoinLayout(Message):
    """Of each common id: rows in the joined table, and how often each row of the receiver repeats, int64 (n,)."""

    totals: Array
    repeats: Array


def arrange(party: Party, own: Integers, batch: int) -> tuple[Integers, Integers]:
    """Step 8: lay out the joined rows of each id; own rows change slowest, then those of each peer in turn.

    `own` is how many rows each common id has here. Return totals and own repeats, int64 (n,).
    """
    counts = [own]
    for peer in party.peers:
        copies = np.empty(len(own), np.int64)
        for part in pieces(len(own), batch):
            sent, length = party.receive(peer, Copies).counts, part.stop - part.start
            copies[part] = view(sent, np.int64, (length,), peer=peer, what="Copies.counts")
        if np.any(copies < 1) or np.any(copies >= _MOST_ROWS):
            raise PeerProtocolError(peer, f"expected at least one row of a common id - at Copies.counts from {peer}")
        counts.append(copies)
    rows = float(np.prod(np.array(counts, np.float64), axis=0).sum())
    if rows >= _MOST_ROWS:
        raise DataError(
            f"expected fewer than {_MOST_ROWS} joined rows, got about {rows:,.0f}: ids are repeated at several parties",
            public="joining all repeated ids gives too many rows",
        )
    totals = np.prod(counts, axis=0, dtype=np.int64)
    repeats = totals // np.cumprod(counts, axis=0, dtype=np.int64)
    for peer, own_repeats in zip(party.peers, repeats[1:], strict=True):
        for part in pieces(len(own), batch):
            party.send(peer, JoinLayout(Array.of(totals[part]), Array.of(own_repeats[part])))
    return totals, repeats[0]


def arranged(party: Party, active: str, own: Integers, batch: int) -> tuple[Integers, Integers]:
    """Step 8: tell how many rows each common id has here; return the totals and repeats received."""
    totals, repeats = np.empty(len(own), np.int64), np.empty(len(own), np.int64)
    for part in pieces(len(own), batch):
        party.send(active, Copies(Array.of(own[part])))
    for part in pieces(len(own), batch):
        layout = party.receive(active, JoinLayout)
        length = part.stop - part.start
        totals[part] = view(layout.totals, np.int64, (length,), peer=active, what="JoinLayout.totals")
        repeats[part] = view(layout.repeats, np.int64, (length,), peer=active, what="JoinLayout.repeats")
    wrong = np.any(repeats < 1) or np.any(repeats >= _MOST_ROWS) or np.any(totals < 1) or np.any(totals >= _MOST_ROWS)
    if wrong or np.any(totals % (repeats * own)) or totals.sum() >= _MOST_ROWS:
        raise PeerProtocolError(active, f"expected whole blocks of joined rows - at JoinLayout from {active}")
    return totals, repeats


def joined(ids: Ids, common: Integers, totals: Integers, repeats: Integers) -> Integers:
    """Return the own row in each row of the joined table: see `JoinLayout`."""
    number = np.repeat(np.arange(len(common)), totals)
    place = np.arange(len(number)) - np.repeat(np.cumsum(totals) - totals, totals)
    copies = np.diff(ids.starts)[common]
    return ids.rows[ids.starts[common[number]] + place // repeats[number] % copies[number]]
