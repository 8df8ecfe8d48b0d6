"""What both ends of sealed sums do at a level, and the messages of it.

=====================  =============  =======================================================  =========================
message                from -> to     content                                                  protection
=====================  =============  =======================================================  =========================
`SealedColumns`        passive ->     which columns have missing values; a key                 TLS; signature
`TournamentTerms`          active ->      reg_lambda in units of hess, how long a step takes;      TLS; signatures
                                      keys of other passive parties
`SealedSumsRequest`    active ->      as `SumsRequest`, and whose children nodes are; who      lattice map
                                      comes before and after in a level's last comparisons
`Sums`                 passive ->     bin sums under masks                                     uniform masks
`SealedStep`           both ways      a step of computing on shares                            oblivious transfer
`MovedShares`          passive ->     its shares of the best so far, under a mask that the     uniform masks
                                      next passive party knows, too
`OwnerShares`          passive ->     its shares of whose split is best                        told to the active party
`WonCandidates`             active ->      nodes that the receiver won; shares of its candidate     told to the receiver
`SideChoices`          active ->      which child of its parent each row is in                 oblivious transfer
`SplitSides`           passive ->     which rows go left at each node won                      pads; its own rows' told
=====================  =============  =======================================================  =========================

With ``reveal="column"`` `SplitColumns` takes the place of the last two, as under open sums. Nodes of a level are in an
order that both ends share: those asked about, then the sibling of each. Which of two siblings is the left one is not
told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.crypto.keystream import Keystream, length_prefixed
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sharing.key_agreement import agree_with
from treaty.crypto.sums.lattice_sums import sealed_places
from treaty.crypto.transfer.arithmetic import Wide, add, prefix_sums, subtract
from treaty.crypto.transfer.sealed_sums import Known, Places, Widths, best_of_shared, integer_shares
from treaty.crypto.transfer.stock import Arrays as StepArrays
from treaty.crypto.transfer.stock import Steps, Transfers
from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Int32s, pieces
from treaty.messaging.certificates import Signer
from treaty.messaging.messages import Array, Arrays, Leakages, Message, MessageLeakage, pack, unpack
from treaty.messaging.party import Party
from treaty.systems.vertical.encrypted_columns import SumsRequest
from treaty.systems.vertical.preparation import Link

# ----------------- candidates for splits of a passive party's columns, and their sums as shares; the same at both ends
#
# Candidates are in the order in which the plain grower breaks ties (`trees.scanning.scan_splits`): column by column,
# missing values right before left, cuts ascending among the former and descending among the latter. Of a numeric column
# the bins up to a cut go left, of a categorical one a single category, against the rest.


class Candidates:
    """Candidates of a tree's columns.

    `offsets`, int32 (features + 1,), has the first slot of each of the party's features, whose last slot is missing
    values; `categorical` and `missing`, bool (features,), say which are categories, and have missing values at all.
    `columns`, ascending, are the tree's.
    """

    def __init__(self, offsets: Int32s, categorical: Flags, missing: Flags, columns: Int32s) -> None:
        self._columns, self._categorical, self._missing = columns, categorical, missing
        self._bins = (np.diff(offsets) - 1)[columns]
        self._numbers = [_numbers(int(bins), *has) for bins, *has in zip(
            self._bins, categorical[columns], missing[columns], strict=True)]  # fmt: skip
        self._first = np.cumsum([0, *map(len, self._numbers)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def sums(self, slots: Wide) -> Wide:
        """Return shares of left children's sums, (nodes, candidates, 3, 2), from those of slots, (nodes, slots, 3, 2).

        Slots are those of the tree's columns alone.
        """
        found, first = [np.zeros((len(slots), 0, *slots.shape[2:]), np.uint64)], 0
        for column, bins, numbers in zip(self._columns, self._bins, self._numbers, strict=True):
            present = slots[:, first : first + bins]
            if not self._categorical[column]:
                present = prefix_sums(present.swapaxes(1, 2)).swapaxes(1, 2)
            with_missing = add(present, slots[:, first + bins : first + bins + 1])
            right = np.array([k for k, side in numbers if not side], np.intp)
            left = np.array([k for k, side in numbers if side], np.intp)
            found += [present[:, right], with_missing[:, left]]
            first += int(bins) + 1
        return np.concatenate(found, axis=1)

    def splits(self, numbers: Int32s) -> tuple[Int32s, Flags]:
        """Return columns, int32 (k,), and bins that go left, bool (k, 256), of candidates."""
        place = np.searchsorted(self._first, numbers, side="right") - 1
        left_bins = np.zeros((len(numbers), 256), np.bool_)
        for row, (at, number) in enumerate(zip(place, numbers, strict=True)):
            k, side = self._numbers[at][number - self._first[at]]
            bins = int(self._bins[at])
            left_bins[row, (k if self._categorical[self._columns[at]] else 0) : k + 1] = True
            left_bins[row, bins] = side
        return self._columns[place].astype(np.int32), left_bins


def _numbers(bins: int, categorical: bool, missing: bool) -> list[tuple[int, bool]]:
    """Return a column's candidates: the last bin, or the category, that goes left, and whether missing values do."""
    last = bins if categorical or missing else bins - 1  # else nothing would go right
    right = [(k, False) for k in range(last)]
    left = [(k, True) for k in reversed(range(bins if categorical else bins - 1))]
    return right + left if missing else right


# ------------------ shares that pass from one passive party to the next, by way of the active party and hidden from it
#
# Two passive parties share a seed from which each draws the same masks: one subtracts a mask from its shares and sends
# the rest to the active party, which adds it to its own; the mask is then the other passive party's share. An active
# party and a passive one that collude learn what passes between them: the best fraction so far, at every node.
#
# The active party carries the public keys that seeds are made from, too. Each is signed with the key of its owner's
# certificate, for this job and system, so that the active party cannot put its own in their place; it can bring one of
# an earlier run, whose secret nobody has any more. Between threads of one process there are no certificates, and nobody
# to deceive.


class MovingKey:
    """A passive party's key for moving shares, new for every training."""

    def __init__(self, party: Party, vouching: Signer) -> None:
        self._party, self._vouching, self._secret = party, vouching, X25519PrivateKey.generate()
        self._seeds: dict[str, bytes] = {}
        self._drawn: dict[str, int] = {}

    def signed(self) -> tuple[bytes, bytes]:
        """Return what the other passive parties need: the public key, and a signature on it."""
        key = self._secret.public_key().public_bytes_raw()
        return key, self._vouching.vouch(self._content(self._party.name, key))

    def meet(self, signed: Mapping[str, tuple[bytes, bytes]]) -> None:
        """Derive a seed with each owner of these public keys; CryptoError for what is none, or not its owner's."""
        for name, (key, signature) in signed.items():
            if not self._vouching.check(name, signature, self._content(name, key)):
                raise CryptoError(
                    f"expected a key signed by {name} with the key of its certificate, got no such signature"
                )
        keys = {name: key for name, (key, _) in signed.items()}
        self._seeds = agree_with(self._secret, keys, "sealed sums", self._party.name)
        self._drawn = dict.fromkeys(keys, 0)

    @property
    def others(self) -> frozenset[str]:
        """The passive parties met."""
        return frozenset(self._seeds)

    def _content(self, name: str, key: bytes) -> bytes:
        return length_prefixed("treaty key for moved shares", self._party.job, self._party.protocol, name, key)

    def mask(self, other: str, shape: tuple[int, int, int]) -> Wide:
        """Return the next mask of what another passive party moves to this one, uniform uint64 of this shape."""
        return self._next(other, self._party.name, shape)

    def without_mask(self, other: str, shares: Wide) -> Wide:
        """Return shares, which move to another passive party, less the next mask."""
        return subtract(shares, self._next(other, other, (len(shares), *shares.shape[1:])))

    def _next(self, other: str, receiver: str, shape: tuple[int, int, int]) -> Wide:
        # the active party says who moves shares to whom: two that move theirs to each other must not have one mask
        number, self._drawn[other] = self._drawn[other], self._drawn[other] + 1
        key = hashlib.sha256(self._seeds[other] + number.to_bytes(8, "little") + receiver.encode()).digest()
        return np.frombuffer(Keystream(key).raw(8 * int(np.prod(shape))), "<u8").astype(np.uint64).reshape(shape)


# ---------------------------------------------------------------- level


MOST_STEP = 1 << 13
CHOICE_BITS = 32
"""Bits of a row in `SideChoices`."""

TO_MAKE_A_STEP, TO_MAKE_A_BYTE = 0.25e-3, 11e-9
"""Seconds of computing: of a step, however little it compares, and for each byte sent."""
_OF_PRODUCTS = 1.2  # bytes of a comparison by those of its products
_AT_A_TIME = 1 << 14
"""Candidates of a level that are compared at once: some 3 kB each are in memory."""

_SignedKey = tuple[Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)], bytes]


class SealedColumns(Message):
    """Which columns have missing values, bool (features,), and a signed public key for moving shares.

    Tells just that.
    """

    leakage: ClassVar = MessageLeakage("which columns have missing values", "control")

    missing: Array
    key: _SignedKey


class TournamentTerms(Message):
    """reg_lambda in units of hess; how many comparisons take as long as a step; other passive parties' signed keys."""

    leakage: ClassVar = MessageLeakage("reg_lambda, how long a step takes, others' public keys", "control")

    ridge: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    step: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEP)]
    keys: dict[str, _SignedKey]


class SealedSumsRequest(SumsRequest):
    """Asks for the bin sums of nodes of a level, under masks.

    `parents`, int32 (nodes,): the place of each node's parent among the last level's nodes, -1 at the root. `before`
    and `after` are passive parties, empty for none: whose best so far the receiver's is compared with, and who goes on.
    `own_after` says that the active party's own best comes after the receiver's columns, before those of others. Tells
    how many nodes there are, which pairs have the same parent, and which passive parties have columns in the tree.
    """

    leakage: ClassVar[Leakages] = MessageLeakage(
        "how many nodes there are, which are siblings and whose splits are compared, in the clear; rows are encrypted",
        "encrypted",
    )

    parents: Array
    before: str
    after: str
    own_after: bool


class SealedStep(Message):
    """A step of computing on shares. Tells nothing: what is in it is masked, or was chosen by a masked bit."""

    leakage: ClassVar = MessageLeakage("numbers under masks, or chosen by masked bits", "masked")

    payload: Arrays


class MovedShares(Message):
    """Shares of the best so far, under a mask of two passive parties, uint64 (nodes, 4, words). Tells nothing."""

    leakage: ClassVar = MessageLeakage("shares of the best split so far, for the next passive party", "masked")

    shares: Array


class OwnerShares(Message):
    """Shares of whose split is best, uint64 (nodes,). Tells the active party that."""

    leakage: ClassVar = MessageLeakage("whose split is best at each node", "exact")

    shares: Array


class WonCandidates(Message):
    """Nodes whose best split is the receiver's, int32 (k,) ascending; the active party's shares of its number.

    `numbers` is uint64 (k,). `SideChoices` follow, unless whole columns are answered. Tells the receiver its split at
    these nodes.
    """

    leakage: ClassVar = MessageLeakage("which of its own splits were chosen, and at which nodes", "exact")

    nodes: Array
    numbers: Array


class SideChoices(Message):
    """Transfers of a bit of each of some rows, for every level that had none so far. Tells nothing (`transfer.stock`).

    The bit says whether the row is in the node asked about or in its sibling: `message`, uint64 (31, words), extends
    the transfers, and `flips`, uint64 (words,), are the bits under a mask.
    """

    leakage: ClassVar = MessageLeakage("bits under masks, and what transfers are made of", "masked")

    message: Array
    flips: Array


class SplitSides(Message):
    """Record numbers int32 (k,), and packed bits uint8 (nodes, bytes): rows' sides at the nodes won, under pads.

    Tells which of a node's own rows go left. Of many nodes there are several, each about the next of them; where one
    has too many rows, about its next rows.
    """

    leakage: ClassVar = MessageLeakage(
        "which of a node's own rows go left at a split of the sender; many splits together narrow down a row's value",
        "exact",
        guard="min_child_samples, most_recoverable",
    )

    records: Array
    left: Array


@dataclass(frozen=True, slots=True)
class SealedEnd:
    """One end of computing on shares with one other party, for a whole job; `role` is 0 at the active party."""

    role: int
    transfers: Transfers
    places: Places
    widths: Widths
    step: int


@dataclass(frozen=True, slots=True)
class LevelResult:
    """Shares of a level's nodes: of all slots, (nodes, slots, 3, 2), and of the best entry, (nodes, 4, words)."""

    slots: Wide
    best: Wide


def bytes_of_a_comparison(widths: Widths) -> float:
    """Return what an end sends for a comparison, most of it for two products."""
    return _OF_PRODUCTS * 2 * 8 * widths.below * widths.words


def comparisons_of_a_step(link: Link, widths: Widths) -> int:
    """Return how many comparisons take as long as a step.

    What a comparison takes besides its steps is to compute and to move its bytes.
    """
    of_one = bytes_of_a_comparison(widths) * (link.byte + TO_MAKE_A_BYTE)
    return int(np.clip((link.step + TO_MAKE_A_STEP) / of_one, 1, MOST_STEP))


def places_of(bounds: SumsBounds) -> Places:
    """Return the widths of sealed sums' fields."""
    return Places(*(last - first for first, last in pairwise(sealed_places(bounds))))


def find_best(
    end: SealedEnd, parts: Wide, parents: Int32s, before: Wide | None, candidates: Candidates, known: Known
) -> Steps[LevelResult]:
    """Find each node's best entry among the candidates and those that the active party knows.

    `parts`, uint64 (asked, slots, 4), are fields' shares of the nodes asked about, `before` those of the last level's
    nodes, whole; `parents` says which of these are the parents of the nodes asked about.
    """
    slots = yield from integer_shares(end.transfers, parts, end.places, end.role)
    if before is not None:
        slots = np.concatenate([slots, subtract(before[parents], slots)])
    found = []
    for part in pieces(len(slots), max(1, _AT_A_TIME // max(1, len(candidates)))):
        sums = candidates.sums(slots[part])
        best = best_of_shared(end.transfers, sums, known.only(part), end.widths, end.role, end.step)
        found.append((yield from best))
    return LevelResult(slots, np.concatenate(found))


def take_steps(party: Party, ends: Mapping[str, Steps[Any]]) -> dict[str, Any]:
    """Compute with several parties at once, one step with each after another; return what each computation gives."""
    results: dict[str, Any] = {}
    given: dict[str, StepArrays | None] = dict.fromkeys(ends)
    while given:
        waiting = []
        for peer, came in given.items():
            sent = _next(ends[peer], came, results, peer)
            if sent is not None:
                party.send(peer, SealedStep(pack(sent)))
                waiting.append(peer)
        given = {peer: unpack(party.receive(peer, SealedStep).payload, peer, "SealedStep") for peer in waiting}
    return results


def _next(
    end: Generator[StepArrays, StepArrays, Any], came: StepArrays | None, results: dict[str, Any], peer: str
) -> StepArrays | None:
    try:
        return next(end) if came is None else end.send(came)
    except StopIteration as stop:
        results[peer] = stop.value
        return None
