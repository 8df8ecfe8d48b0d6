"""Alignment by commutative encryption (ECDH), steps 2 to 5: the table is in `alignment.roles`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from treaty.crypto.psi import ristretto
from treaty.data.large import WORDS, Scratch, SortedRecords, records
from treaty.machine.arrays import pieces
from treaty.messaging.messages import Array, Message
from treaty.messaging.party import Party
from treaty.systems.alignment.blinded_lists import OwnList, points_of, valid, values_of
from treaty.systems.alignment.matches import MINE, THEIRS, VALUE, matched

Advance = Callable[[int], None]
"""Told how many points more are done."""


class BlindedPoints(Message):
    """Points uint8 (n, 32): own ids under the own key, and padding. Tell nothing without the key."""

    points: Array


class RaisedPoints(Message):
    """The receiver's points, raised to the sender's key as well, in the order they came."""

    points: Array


def find_by_points(
    party: Party,
    peers: Sequence[str],
    own: OwnList,
    sizes: dict[str, int],
    n_ids: int,
    batch: int,
    scratch: Scratch,
    advance: Advance,
) -> dict[str, SortedRecords]:
    """Go through steps 2 to 5 with some peers; return the ids that each of them has too, of type `PAIR`, by number.

    `sizes` are buckets of the peers' lists; the own one is closed. Raises PeerProtocolError where a peer sends what is
    no point, or a point twice.
    """
    mine, theirs = exchange(party, peers, own, sizes, batch, scratch, advance)
    own.close()
    return {peer: matched(mine[peer], theirs[peer], n_ids, peer, scratch) for peer in peers}


def exchange(
    party: Party,
    peers: Sequence[str],
    own: OwnList,
    sizes: dict[str, int],
    batch: int,
    scratch: Scratch,
    advance: Advance,
) -> tuple[dict[str, SortedRecords], dict[str, SortedRecords]]:
    """Go through steps 2 to 4 with some peers at once; return, by peer, the own and its list double-encrypted.

    The next batch is sent before answers to the last are awaited, so that both sides compute at the same time.
    """
    mine, theirs = (
        {peer: scratch.sorted(kind, "value", WORDS, max(own.size, sizes[peer])) for peer in peers}
        for kind in (MINE, THEIRS)
    )
    parts = pieces(own.size, batch)
    their_parts = {peer: pieces(sizes[peer], batch) for peer in peers}

    def send(number: int) -> None:
        if number < len(parts):
            blinded = BlindedPoints(Array.of(own.blinded(parts[number])))
            for peer in peers:
                party.send(peer, blinded)
            advance(parts[number].stop - parts[number].start)

    send(0)
    for number in range(max(len(parts), *map(len, their_parts.values()))):
        send(number + 1)
        for peer in peers:
            if number < len(parts):
                raised = points_of(party.receive(peer, RaisedPoints).points, parts[number], peer, "RaisedPoints")
                valid(
                    peer,
                    "RaisedPoints.points",
                    lambda raised=raised: ristretto.validate(raised, own.threads),  # type: ignore[misc]
                )
                mine[peer].add(records(MINE, value=values_of(raised), number=own.numbers(parts[number])))
            if number < len(their_parts[peer]):
                part = their_parts[peer][number]
                raised = own.raised(party.receive(peer, BlindedPoints).points, part, peer)
                theirs[peer].add(records(THEIRS, value=values_of(raised), place=np.arange(part.start, part.stop)))
                advance(part.stop - part.start)
    return mine, theirs


def answer_points(
    party: Party,
    active: str,
    own: OwnList,
    size: int,
    batch: int,
    scratch: Scratch,
    advance: Advance,
) -> SortedRecords:
    """Go through steps 2 to 4 with the active party, whose list has `size` points; return the values made of them."""
    made = scratch.sorted(VALUE, "value", WORDS, size)
    parts, own_parts = pieces(size, batch), pieces(own.size, batch)
    for number in range(max(len(parts), len(own_parts))):
        if number < len(parts):  # step 3: the order is what links the answer with the active party's ids
            raised = own.raised(party.receive(active, BlindedPoints).points, parts[number], active)
            party.send(active, RaisedPoints(Array.of(raised)))
            made.add(records(VALUE, value=values_of(raised)))
            advance(len(raised))
        if number < len(own_parts):  # step 4
            blinded = own.blinded(own_parts[number])
            party.send(active, BlindedPoints(Array.of(blinded)))
            advance(len(blinded))
    return made
