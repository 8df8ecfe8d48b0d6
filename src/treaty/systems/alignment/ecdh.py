"""Private set intersection by commutative encryption (ECDH): steps 2 to 5 of an `alignment`.

Each party hashes its ids to points of ristretto255 and raises them to a secret exponent of this run. A list raised to
both exponents is the same in either order, so the active party finds the common ids by comparing two such lists. Lists
are padded with random points to a bucket of sizes and sent in a secret order. Long ones lie in files and are compared
part by part.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer import sodium
from treaty.data.ids import Ids
from treaty.data.large import WORDS, Scratch, SortedRecords, records
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Integers, pieces
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.messaging.party import Party

Result = TypeVar("Result")
Advance = Callable[[int], None]
"""Called with the number of ids or points done since the last call."""
Progress = Callable[[int, int], None]
"""Called with the number of points done, and of all points."""

SMALLEST, LARGEST = 1 << 10, 1 << 28
"""Sizes of lists, in points."""

# records: the 16 bytes that are kept of a double-encrypted point, with the number of the own id, and with the place in
# the peer's list
VALUE = np.dtype([("value", np.uint64, (2,))])
MINE = np.dtype([*VALUE.descr, ("number", np.int32)])
THEIRS = np.dtype([*VALUE.descr, ("place", np.int32)])
PAIR = np.dtype([*THEIRS.descr, ("number", np.int32)])

_DRAWN = np.dtype([("drawn", np.uint64), ("number", np.int32)])
_HASHED = np.dtype([*_DRAWN.descr, ("uniform", np.uint8, (64,))])
_LEAF = np.dtype([("node", np.int32), ("leaf", np.uint64, (2,))])


@leaks("points under the sender's key, of ids and of padding", "encrypted")
class BlindedPoints(Message):
    """Points of ids and of padding under the sender's key, uint8 (n, 32)."""

    points: Array


@leaks("its own points under both keys: which ids both have", "encrypted")
class RaisedPoints(Message):
    """The receiver's points, raised to the sender's key as well, in the order received."""

    points: Array


# ---------------------------------------------------------------- a party's own list


def bucket(count: int) -> int:
    """Round a set's size up to a multiple of an eighth of the power of two below it, at least 1024.

    Partners learn the size to within an eighth. The padding costs at most an eighth more work, a sixteenth on average.
    """
    # powers of two would hide little more, for up to twice the work
    step = max(SMALLEST, 1 << max(count - 1, 1).bit_length() - 1) // 8
    return max(SMALLEST, -(-count // step) * step)


class SecretList:
    """The numbers of ids, and of padding up to the bucket, in a secret order (`listed`).

    Numbers beyond the ids are padding. `more` computes further fields of a part of the list.
    """

    def __init__(
        self, n_ids: int, dtype: np.dtype[Any], scratch: Scratch, more: Callable[[slice], dict[str, Any]]
    ) -> None:
        self.size = bucket(n_ids)
        # sorting by random words is the secret order
        self.listed, stream = scratch.sorted(dtype, "drawn", WORDS, self.size), Keystream()
        for part in pieces(self.size, scratch.part):
            number = np.arange(part.start, part.stop)
            drawn = stream.bits(64, len(number))[:, 0]
            self.listed.add(records(dtype, drawn=drawn, number=number, **more(part)))

    def numbers(self, part: slice) -> Integers:
        """Return the numbers of the ids at some places, int64 (n,)."""
        return self.listed[part]["number"].astype(np.int64)


class OwnList(SecretList):
    """A party's ids as its partner sees them: under a key of this run, padded to the bucket, in a secret order."""

    def __init__(self, ids: Ids, domain: bytes, threads: int, scratch: Scratch | None = None) -> None:
        scratch = scratch or Scratch()
        self.threads, self._ids, self._domain, self._key = threads, ids, domain, sodium.random_scalar()
        # the ids of a batch lie all over the table: a list in a file is hashed now, in the order of the ids
        self._hashed = bucket(len(ids)) > scratch.in_memory
        if self._hashed:
            super().__init__(
                len(ids), _HASHED, scratch, lambda part: {"uniform": self._uniform(np.arange(part.start, part.stop))}
            )
        else:
            super().__init__(len(ids), _DRAWN, scratch, lambda part: {})

    def blinded(self, part: slice) -> NDArray[np.uint8]:
        """Return H(id)^key of some places, uint8 (n, 32); padding takes the same steps and time."""
        rows = self.listed[part]
        uniform = rows["uniform"].copy() if self._hashed else self._uniform(rows["number"].astype(np.int64))
        return sodium.multiply(sodium.from_uniform(uniform, self.threads), self._key, self.threads)

    def _uniform(self, number: Integers) -> NDArray[np.uint8]:
        """Hash ids to uniform bytes, uint8 (n, 64); padding gets random bytes."""
        real = number < len(self._ids)
        if self._hashed:  # numbers ascend, so only their strings are read
            kept = number[real] if real.any() else np.zeros(1, np.int64)
            data, offsets = self._ids.strings(int(kept[0]), int(kept[-1]) + 1)
            strings = np.where(real, number - kept[0], 0)
        else:
            data, offsets = self._ids.data, self._ids.offsets
            strings = np.where(real, number, 0)
        uniform = sodium.expand(data, offsets, strings, self._domain)
        # padding is hashed like an id above and then replaced, so that it takes as long
        padding = np.frombuffer(secrets.token_bytes(uniform[0].nbytes * len(uniform)), np.uint8)
        return np.where(real[:, None], uniform, padding.reshape(uniform.shape))

    def raised(self, points: Array, part: slice, peer: str) -> NDArray[np.uint8]:
        """Return a peer's points raised to the own key, uint8 (n, 32)."""
        shape = (part.stop - part.start, sodium.POINT)
        received = view(points, np.uint8, shape, peer=peer, what="BlindedPoints.points")
        return valid(peer, "BlindedPoints.points", lambda: sodium.multiply(received, self._key, self.threads))


def committed(ids: Ids, key: bytes, threads: int, scratch: Scratch) -> NDArray[np.uint8]:
    """Commit to the set of ids as `sodium.commit` does, uint8 (NODES, 32), with only some nodes in memory."""
    leaves = scratch.sorted(_LEAF, "node", sodium.NODES, len(ids))
    for part in pieces(len(ids), scratch.part):
        data, offsets = ids.strings(part.start, part.stop)
        leaf = sodium.digests(data, offsets, np.arange(len(offsets) - 1), key, threads)
        leaves.add(records(_LEAF, node=leaf[:, 0] % np.uint64(sodium.NODES), leaf=leaf))
    out = sodium.commit(np.zeros((0, 2), np.uint64), key)
    for some in leaves.parts():
        nodes = np.unique(some["node"])
        out[nodes] = sodium.commit(some["leaf"], key)[nodes]
    leaves.close()
    return out


# ---------------------------------------------------------------- the exchange, at both ends


def counting(progress: Progress | None, total: int) -> Advance:
    """Return a function that counts what is done, of ids and padding, and calls `progress`."""
    done = 0

    def advance(ids: int) -> None:
        nonlocal done
        done += ids
        if progress is not None:
            progress(done, total)

    return advance


def exchange(
    party: Party,
    peers: Sequence[str],
    own: OwnList,
    sizes: dict[str, int],
    batch: int,
    scratch: Scratch,
    advance: Advance,
) -> tuple[dict[str, SortedRecords], dict[str, SortedRecords]]:
    """Run steps 2 to 4 with some peers at once; return, by peer, both double-encrypted lists, its own and this party's.

    `sizes` are buckets of the peers' lists. The next batch is sent before the answer to the last is awaited, so that
    both sides compute at the same time. Raises PeerProtocolError if a peer sends something that is not a point.
    """
    # sorted by value, so that the lists can be compared part by part
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
            # step 3: own points come back in the order sent, so their ids are known
            if number < len(parts):
                shape, what = (parts[number].stop - parts[number].start, sodium.POINT), "RaisedPoints.points"
                raised = view(party.receive(peer, RaisedPoints).points, np.uint8, shape, peer=peer, what=what)
                valid(peer, what, partial(sodium.validate, raised, own.threads))
                mine[peer].add(records(MINE, value=from_bytes(raised[:, :16]), number=own.numbers(parts[number])))
            # step 4: the peer's points are raised here and stay here
            if number < len(their_parts[peer]):
                part = their_parts[peer][number]
                raised = own.raised(party.receive(peer, BlindedPoints).points, part, peer)
                place = np.arange(part.start, part.stop)
                theirs[peer].add(records(THEIRS, value=from_bytes(raised[:, :16]), place=place))
                advance(part.stop - part.start)
    return mine, theirs


def answer_points(
    party: Party, active: str, own: OwnList, size: int, batch: int, scratch: Scratch, advance: Advance
) -> SortedRecords:
    """Run steps 2 to 4 with the active party, whose list has `size` points; return their double-encrypted values."""
    made = scratch.sorted(VALUE, "value", WORDS, size)
    parts, own_parts = pieces(size, batch), pieces(own.size, batch)
    for number in range(max(len(parts), len(own_parts))):
        if number < len(parts):  # step 3: in the order received, by which the active party recognises its ids
            raised = own.raised(party.receive(active, BlindedPoints).points, parts[number], active)
            party.send(active, RaisedPoints(Array.of(raised)))
            made.add(records(VALUE, value=from_bytes(raised[:, :16])))
            advance(len(raised))
        if number < len(own_parts):  # step 4
            blinded = own.blinded(own_parts[number])
            party.send(active, BlindedPoints(Array.of(blinded)))
            advance(len(blinded))
    return made


# ---------------------------------------------------------------- common values of two double-encrypted lists


def in_both(left: NDArray[np.uint64], right: NDArray[np.uint64], peer: str) -> tuple[Integers, Integers]:
    """Return the places in both lists, uint64 (n, 2) and (m, 2), of the values that are in both."""
    both = np.concatenate([left, right])
    # a stable sort: of equal values, those of `left` come first
    order = np.lexsort((both[:, 1], both[:, 0]))
    both = both[order]
    equal = np.flatnonzero((both[1:] == both[:-1]).all(axis=1))
    first, second = order[equal], order[equal + 1]
    # equal neighbours from one list: that list has a point twice
    if np.any(first >= len(left)) or np.any(second < len(left)):
        raise PeerProtocolError(peer, f"expected a list of different points, got one twice - from {peer}")
    return first, second - len(left)


def matched(mine: SortedRecords, theirs: SortedRecords, n_ids: int, peer: str, scratch: Scratch) -> SortedRecords:
    """Step 5: return own ids that are also in a peer's list, of type `PAIR`, by number; both lists are closed.

    Raises PeerProtocolError if the peer sent a point twice.
    """
    pairs = scratch.sorted(PAIR, "number", n_ids, n_ids)
    for left, right in zip(mine.parts(), theirs.parts(), strict=True):
        at, other = in_both(left["value"], right["value"], peer)
        found, place = left[at], right["place"][other]
        if np.any(found["number"] >= n_ids):
            raise PeerProtocolError(peer, "expected no match of a random point", at="BlindedPoints")
        pairs.add(records(PAIR, number=found["number"], place=place, value=found["value"]))
    mine.close()
    theirs.close()
    return pairs


def held_by_all(pairs: dict[str, SortedRecords], n_ids: int, scratch: Scratch) -> dict[str, SortedRecords]:
    """Return each peer's matches of ids that all peers have."""
    if len(pairs) == 1:
        return pairs
    kept = {peer: scratch.sorted(PAIR, "number", n_ids, n_ids) for peer in pairs}
    for parts in zip(*(matches.parts() for matches in pairs.values()), strict=True):
        # parts hold the same range of numbers at every peer
        common = reduce(np.intersect1d, [part["number"] for part in parts])
        for matches, part in zip(kept.values(), parts, strict=True):
            matches.add(part[np.isin(part["number"], common)])
    for matches in pairs.values():
        matches.close()
    return kept


def check_made(named: SortedRecords, made: SortedRecords, size: int, active: str, scratch: Scratch) -> None:
    """Check that the values in `Matches`, `named` (`THEIRS`), are among the `size` made in step 3 (`VALUE`), each once.

    Only a party that has done step 5 knows these values; places alone could be guessed.
    """
    values = scratch.sorted(VALUE, "value", WORDS, size)
    for part in named.parts():
        values.add(records(VALUE, value=part["value"]))
    known = sum(
        len(in_both(left["value"], right["value"], active)[0])
        for left, right in zip(values.parts(), made.parts(), strict=True)
    )
    values.close()
    if known < len(named):
        raise PeerProtocolError(active, "expected values made in step 3, got others", at="Matches.values")


# ---------------------------------------------------------------- bytes and points


def valid(peer: str, what: str, work: Callable[[], Result]) -> Result:
    """Return the result of `work` on a peer's points; raise PeerProtocolError if one is not a point of the group."""
    try:
        return work()
    except CryptoError as error:
        raise PeerProtocolError(peer, str(error), at=what) from None


def array_of(data: bytes) -> Array:
    """Return bytes as an array of uint8."""
    return Array.of(np.frombuffer(data, np.uint8))


def bytes_of(array: Array, peer: str, what: str) -> bytes:
    """Return 32 bytes that a peer sent: a key, salt or digest."""
    return view(array, np.uint8, (32,), peer=peer, what=what).tobytes()


def from_bytes(values: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Read values uint8 (n, 16) as words uint64 (n, 2), which can be compared and sorted."""
    return np.ascontiguousarray(values).view("<u8").astype(np.uint64, copy=False)


def to_bytes(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Write values as bytes, uint8 (n, 16)."""
    return np.ascontiguousarray(values).astype("<u8", copy=False).view(np.uint8)
