"""What two double-encrypted lists have in common, found part by part: steps 5 and 6 of `alignment.roles`."""

from __future__ import annotations

from functools import reduce
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.data.large import WORDS, Scratch, SortedRecords, records
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers

VALUE = np.dtype([("value", np.uint64, (2,))])  # what is kept of a double-encrypted point
MINE = np.dtype([*VALUE.descr, ("number", np.int32)])  # with the number of the own id
THEIRS = np.dtype([*VALUE.descr, ("place", np.int32)])  # with the place in the list of the party whose id it is
PAIR = np.dtype([*THEIRS.descr, ("number", np.int32)])


class Listed(Protocol):
    """A party's ids and padding in a secret order."""

    size: int

    def numbers(self, part: slice) -> Integers:
        """Return the numbers of the ids at some places, int64 (n,); a number beyond the ids is padding."""


def in_both(left: NDArray[np.uint64], right: NDArray[np.uint64], peer: str) -> tuple[Integers, Integers]:
    """Return the places in both lists, uint64 (n, 2) and (m, 2), of the values that are in both."""
    both = np.concatenate([left, right])
    order = np.lexsort((both[:, 1], both[:, 0]))  # keeps equal values in order, those of `left` first
    both = both[order]
    equal = np.flatnonzero((both[1:] == both[:-1]).all(axis=1))
    first, second = order[equal], order[equal + 1]
    if np.any(first >= len(left)) or np.any(second < len(left)):
        raise PeerProtocolError(peer, f"expected a list of different points, got one twice - from {peer}")
    return first, second - len(left)


def matched(mine: SortedRecords, theirs: SortedRecords, n_ids: int, peer: str, scratch: Scratch) -> SortedRecords:
    """Return the own ids that are also in a peer's list, of type `PAIR`, by number.

    `mine` and `theirs` are the double-encrypted lists, of types `MINE` and `THEIRS`, by value, in the same parts; both
    are closed.
    """
    pairs = scratch.sorted(PAIR, "number", n_ids, n_ids)
    for left, right in zip(mine.parts(), theirs.parts(), strict=True):
        at, other = in_both(left["value"], right["value"], peer)
        found, place = left[at], right["place"][other]
        if np.any(found["number"] >= n_ids):
            raise PeerProtocolError(peer, f"expected no match of a random point - at BlindedPoints from {peer}")
        pairs.add(records(PAIR, number=found["number"], place=place, value=found["value"]))
    mine.close()
    theirs.close()
    return pairs


def held_by_all(pairs: dict[str, SortedRecords], n_ids: int, scratch: Scratch) -> dict[str, SortedRecords]:
    """Keep each peer's matches of ids that all peers have; the others are closed."""
    if len(pairs) == 1:
        return pairs
    kept = {peer: scratch.sorted(PAIR, "number", n_ids, n_ids) for peer in pairs}
    for parts in zip(*(matches.parts() for matches in pairs.values()), strict=True):
        common = reduce(np.intersect1d, [part["number"] for part in parts])
        for matches, part in zip(kept.values(), parts, strict=True):
            matches.add(part[np.isin(part["number"], common)])
    for matches in pairs.values():
        matches.close()
    return kept


def confirmed(told: SortedRecords, own: Listed, n_ids: int, active: str, scratch: Scratch) -> SortedRecords:
    """Return the own ids that the active party says are common, of type `PAIR`, by number.

    `told` are places in the own list with values (`THEIRS`, by place). Raises PeerProtocolError where a place is told
    twice or is padding.
    """
    pairs = scratch.sorted(PAIR, "number", n_ids, n_ids)
    twice = padding = False
    for part in told.parts():
        if len(part):
            place = part["place"]
            number = own.numbers(slice(int(place[0]), int(place[-1]) + 1))[place - place[0]]
            twice |= bool(np.any(place[1:] == place[:-1]))
            padding |= bool(np.any(number >= n_ids))
            pairs.add(records(PAIR, value=part["value"], place=place, number=np.minimum(number, n_ids - 1)))
    if twice:
        raise PeerProtocolError(active, f"expected different places below {own.size} - at Matches.places from {active}")
    if padding:
        raise PeerProtocolError(active, f"expected no match of a random point - at Matches.places from {active}")
    return pairs


def check_made(told: SortedRecords, made: SortedRecords, size: int, active: str, scratch: Scratch) -> None:
    """Check that the values told, of type `THEIRS`, are among the `size` made in step 3, of type `VALUE` and by value.

    Raises PeerProtocolError where one was not made then, or is told twice.
    """
    values = scratch.sorted(VALUE, "value", WORDS, size)
    for part in told.parts():
        values.add(records(VALUE, value=part["value"]))
    known = sum(
        len(in_both(left["value"], right["value"], active)[0])
        for left, right in zip(values.parts(), made.parts(), strict=True)
    )
    values.close()
    if known < len(told):
        raise PeerProtocolError(active, f"expected values made in step 3, got others - at Matches.values from {active}")
