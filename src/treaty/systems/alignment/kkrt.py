"""Private set intersection of long lists by an oblivious pseudorandom function (KKRT): steps 2 to 5 of an `alignment`.

The function and its transfers are in `treaty.crypto.transfer.oprf`. The active party puts its ids into the bins of a
cuckoo table and gets, obliviously, the value of each bin's own function at its id. A passive party computes the
function of each of its ids at that id's three bins.

2. The active party sends the key of ids' digests and an offer of 512 base transfers (`OprfOffer`, `OprfChoices`).
3. It sends, for each bin, a masked code word: of the bin's id, or a random one (`MaskedCodes`).
4. The passive party sends three values of each id and of padding, sorted: 96 bits to compare, and 96 bits that hide the
   id's place in a secret order and a token (`OprfValues`). In steps 3 and 4, `OprfUsed` confirms that a message has
   been used, and at most `AHEAD` are unconfirmed.
5. The active party compares; where values are equal, it opens the rest.

In steps 6 and 7 the token replaces the double-encrypted value. It is the same for all three values of an id: `Matches`
must not show by which of them the active party found it, as that depends on its other ids. Padding is hashed, put into
bins and sent like ids, so all lists of a bucket take the same time.

Failures of a pair of parties, each with probability at most 2^-40 for the largest lists: values of different ids agree
in 96 bits (2^25 times 3 * 2^28 pairs), ids do not fit into the table (`oprf.placed`; the alignment then ends and has to
be started again), code words are too close (`oprf`), different ids have one digest.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer import aes, oprf, sodium
from treaty.data.ids import Ids
from treaty.data.large import WORDS, Scratch, SortedRecords, records
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Int32s, pieces
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.systems.alignment.ecdh import PAIR, Advance, SecretList, array_of, bucket, bytes_of, valid

BINS = 1 << 15
"""Bins per message, 2 MB."""

VALUES = 1 << 15
"""Values per message, 786 kB."""

AHEAD = 8
"""Messages of steps 3 and 4 that are sent before the first is confirmed: they lie in the receiver's memory."""

_LOW = np.uint64((1 << 32) - 1)

_LISTED = np.dtype([("drawn", np.uint64), ("number", np.int32), ("digest", np.uint64, (2,))])
_ASKED = np.dtype([("bin", np.int32), ("digest", np.uint64, (2,)), ("place", np.int32)])
# a value, by the 64 bits that are compared first
_TAGGED = np.dtype([("tag", np.uint64), ("rest", np.uint64, (2,))])
_OWN = np.dtype([*_TAGGED.descr, ("number", np.int32)])

Words = NDArray[np.uint64]


@leaks("keys and an offer of transfers", "nothing")
class OprfOffer(Message):
    """The key of ids' digests, uint8 (32,), and an offer of base transfers, uint8 (32,)."""

    key: Array
    point: Array


@leaks("answers to the offer", "nothing")
class OprfChoices(Message):
    """Answers to the offer, uint8 (512, 32)."""

    points: Array


@leaks("masked code words of ids, and random ones", "masked")
class MaskedCodes(Message):
    """Masked code words of some bins' ids, uint64 (n, 8)."""

    rows: Array


@leaks("values of the sender's ids, to compare: which ids both have", "encrypted")
class OprfValues(Message):
    """Values of the sender's ids, uint64 (n, 3), sorted."""

    values: Array


@leaks("that a message has been used", "nothing")
class OprfUsed(Message):
    """The sender has used another message of bins or values."""


# ---------------------------------------------------------------- active party


def find_by_values(
    party: Party,
    peers: Sequence[str],
    ids: Ids,
    sizes: dict[str, int],
    threads: int,
    scratch: Scratch,
    advance: Advance,
) -> tuple[dict[str, SortedRecords], list[PeerProtocolError]]:
    """Run steps 2 to 5 with some peers; return the common ids with each, of type `PAIR`, by number, and errors.

    `sizes` are buckets of the peers' lists. Raises PeerProtocolError if a peer sends something that is not a point, or
    values that are not sorted. Errors in values of ids that this party has are returned, not raised: raising them now
    would show the peer that this party has these ids.
    """
    key, ends = secrets.token_bytes(32), {peer: oprf.OprfReceiver() for peer in peers}
    # first, so that peers hash their ids while this party places its own
    for peer, end in ends.items():
        party.send(peer, OprfOffer(array_of(key), Array.of(end.offer)))
    size, stream = bucket(len(ids)), Keystream()
    digests = np.empty((size, 2), np.uint64)  # of ids and padding
    for part in pieces(size, scratch.part):
        digests[part] = _digests(ids, part, key, threads)
    # every id lies in one of its three bins
    table = oprf.placed(digests, oprf.bins_for(size, oprf.STEP))
    if table is None:
        raise CryptoError(f"{size} ids do not fit into a cuckoo table, which happens by chance: start the job again")
    for peer, end in ends.items():
        answer = party.receive(peer, OprfChoices)
        points = view(answer.points, np.uint8, (oprf.WIDTH, 32), peer=peer, what="OprfChoices.points")
        valid(peer, "OprfChoices.points", partial(end.accept, points))
    own = {peer: scratch.sorted(_OWN, "tag", WORDS, size) for peer in peers}
    for sent, part in enumerate(pieces(len(table), BINS)):
        number = table[part]
        full = number >= 0
        # an empty bin gets a random code word and takes as long as a full one: the message shows no difference
        codes = oprf.codes(key, digests[np.maximum(number, 0)])
        codes[~full] = stream.bits(oprf.WIDTH, int(np.count_nonzero(~full)))
        for peer, end in ends.items():
            if sent >= AHEAD:
                party.receive(peer, OprfUsed)
            message, values = end.extend(codes, part.start, threads)
            party.send(peer, MaskedCodes(Array.of(message)))
            mine = values[full]
            own[peer].add(records(_OWN, tag=mine[:, 0], rest=mine[:, 1:], number=number[full]))
        advance(size * part.stop // len(table) - size * part.start // len(table))
    for peer in peers:
        for _ in pieces(min(len(table), AHEAD * BINS), BINS):
            party.receive(peer, OprfUsed)
    # the largest arrays of the run
    del digests, table
    found = {peer: _found(party, peer, own[peer], sizes[peer], len(ids), scratch, advance) for peer in peers}
    faults = [
        PeerProtocolError(
            peer, f"expected values of different ids, at places below {sizes[peer]}", at="OprfValues.values"
        )
        for peer, (_, fine) in found.items()
        if not fine
    ]
    return {peer: pairs for peer, (pairs, _) in found.items()}, faults


def _found(
    party: Party, peer: str, own: SortedRecords, size: int, n_ids: int, scratch: Scratch, advance: Advance
) -> tuple[SortedRecords, bool]:
    """Step 5: compare own values with a peer's, both sorted; return pairs, and whether all are valid."""
    pairs, fine = scratch.sorted(PAIR, "number", n_ids, n_ids), True
    waiting, held, last = own.parts(), np.empty(0, _OWN), np.uint64(0)
    for part in pieces(oprf.TABLES * size, VALUES):
        shape = (part.stop - part.start, oprf.VALUE)
        theirs = view(party.receive(peer, OprfValues).values, np.uint64, shape, peer=peer, what="OprfValues.values")
        tags = theirs[:, 0]
        if tags[0] < last or np.any(tags[1:] < tags[:-1]):
            raise PeerProtocolError(peer, "expected sorted values", at="OprfValues.values")
        last = tags[-1]
        # both lists are sorted, so own values up to this message's last one are all that it can match
        while not len(held) or held["tag"][-1] <= last:
            following = next(waiting, None)
            if following is None:
                break
            held = np.concatenate([held, following])
        found = _matching(held, theirs)
        known = found[(found["number"] < n_ids) & (found["place"] >= 0) & (found["place"] < size)]
        # an id that is sent many times must not fill the memory
        pairs.add(known[_changes(known["number"])])
        fine &= len(known) == len(found) and bool(np.all(_changes(known["number"])))
        held = held[np.searchsorted(held["tag"], last) :]
        party.send(peer, OprfUsed())
        advance(part.stop // oprf.TABLES - part.start // oprf.TABLES)
    own.close()
    return pairs, fine and all(np.all(_changes(some["number"])) for some in pairs.parts())


def _matching(own: NDArray[np.void], theirs: Words) -> NDArray[np.void]:
    """Return the ids of own values, `_OWN`, that are among a peer's, uint64 (n, 3), both sorted, as `PAIR`."""
    # tags are 64 of the bits to compare; `rest` has the other 32, then place and token, hidden by the function
    tags, out = own["tag"].copy(), [np.empty(0, PAIR)]
    at, other = np.searchsorted(tags, theirs[:, 0]), np.arange(len(theirs))
    # one pass, unless 64 bits agree by chance
    while len(at):
        at, other = at[at < len(tags)], other[at < len(tags)]
        same = tags[at] == theirs[other, 0]
        at, other = at[same], other[same]
        mine = own[at]
        rest = mine["rest"] ^ theirs[other, 1:]
        equal = (rest[:, 0] & _LOW) == 0
        place, token = rest[equal, 0] >> np.uint64(32), rest[equal, 1]
        value = np.column_stack([token, place])
        out.append(records(PAIR, number=mine["number"][equal], place=place.astype(np.int32), value=value))
        at = at + 1
    return np.concatenate(out)


def _changes(numbers: Int32s) -> NDArray[np.bool_]:
    """Return whether each number differs from the one before."""
    return np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]


# ---------------------------------------------------------------- passive party


class SecretOrder(SecretList):
    """A passive party's ids and padding up to the bucket, in a secret order, with a token of each place."""

    def __init__(self, ids: Ids, key: bytes, threads: int, scratch: Scratch) -> None:
        self._tokens = secrets.token_bytes(16)
        super().__init__(len(ids), _LISTED, scratch, lambda part: {"digest": _digests(ids, part, key, threads)})

    def values(self, places: Int32s) -> Words:
        """Return the proof that an id is common, uint64 (n, 2): the token of its place, and the place."""
        # the token is a block cipher of the place under a key of this run
        numbered = np.column_stack([places.astype(np.uint64), np.zeros(len(places), np.uint64)])
        return np.column_stack([aes.permuted(self._tokens, numbered)[:, 0], numbered[:, 0]])


def answer_values(
    party: Party, active: str, ids: Ids, size: int, threads: int, scratch: Scratch, advance: Advance
) -> SecretOrder:
    """Run steps 2 to 4 with the active party, whose list's bucket is `size`; return the own list."""
    offer = party.receive(active, OprfOffer)
    key = bytes_of(offer.key, active, "OprfOffer.key")
    point = view(offer.point, np.uint8, (32,), peer=active, what="OprfOffer.point")
    end = valid(active, "OprfOffer.point", lambda: oprf.OprfSender(point))
    party.send(active, OprfChoices(Array.of(end.points)))
    # a fresh secret order in each run: places show nothing of the table's order
    own, bins = SecretOrder(ids, key, threads, scratch), oprf.bins_for(size, oprf.STEP)
    # each place's digest at its three bins, by bin, and how many fall to each message of bins
    asked, counts = scratch.sorted(_ASKED, "bin", bins, oprf.TABLES * own.size), np.zeros(-(-bins // BINS), np.int64)
    for part in pieces(own.size, scratch.part):
        digest, place = own.listed[part]["digest"], np.arange(part.start, part.stop)
        for bin in oprf.places(digest, bins).T:
            counts += np.bincount(bin // BINS, minlength=len(counts))
            asked.add(records(_ASKED, bin=bin, digest=digest, place=place))
    edges = np.append(0, np.cumsum(counts))
    made = scratch.sorted(_TAGGED, "tag", WORDS, oprf.TABLES * own.size)
    for number, part in enumerate(pieces(bins, BINS)):
        shape = (part.stop - part.start, oprf.WORDS)
        sent = view(party.receive(active, MaskedCodes).rows, np.uint64, shape, peer=active, what="MaskedCodes.rows")
        rows = end.extend(sent, threads)
        for start in range(int(edges[number]), int(edges[number + 1]), VALUES):
            some = asked[start : min(start + VALUES, int(edges[number + 1]))]
            codes = oprf.codes(key, some["digest"])
            values = end.values(rows, part.start, some["bin"].astype(np.int64), codes, threads)
            # the active party can open these only if its value of this bin is the same
            token, place = own.values(some["place"]).T
            values[:, 1] ^= place << np.uint64(32)
            values[:, 2] ^= token
            made.add(records(_TAGGED, tag=values[:, 0], rest=values[:, 1:]))
        party.send(active, OprfUsed())
        advance(size * part.stop // bins - size * part.start // bins)
    asked.close()
    for number, (part, tagged) in enumerate(zip(pieces(len(made), VALUES), made.pieces(VALUES), strict=True)):
        if number >= AHEAD:
            party.receive(active, OprfUsed)
        party.send(active, OprfValues(Array.of(np.column_stack([tagged["tag"], tagged["rest"]]))))
        advance(part.stop // oprf.TABLES - part.start // oprf.TABLES)
    for _ in pieces(min(len(made), AHEAD * VALUES), VALUES):
        party.receive(active, OprfUsed)
    made.close()
    return own


def confirm(named: SortedRecords, own: SecretOrder, active: str) -> None:
    """Check that the active party knows the tokens of the places in `Matches`, which it learns in step 5."""
    for part in named.parts():
        if np.any(part["value"] != own.values(part["place"])):
            raise PeerProtocolError(active, "expected tokens of step 4, got others", at="Matches.values")


# ---------------------------------------------------------------- both parties


def _digests(ids: Ids, part: slice, key: bytes, threads: int) -> Words:
    """Return the digests of consecutive ids, uint64 (n, 2); padding takes the same steps and gets random digests."""
    number = np.arange(part.start, part.stop)
    real = number < len(ids)
    first = min(part.start, len(ids) - 1)
    data, offsets = ids.strings(first, max(min(part.stop, len(ids)), first + 1))
    found = sodium.digests(data, offsets, np.where(real, number - first, 0), key, threads)
    return np.where(real[:, None], found, Keystream().bits(128, len(number)))
