"""Candidates for splits of a passive party's columns, and their sums as shares; the same at both ends.

Candidates are in the order in which the plain grower breaks ties (`trees.scanning.scan_splits`): column by column,
missing values right before left, cuts ascending among the former and descending among the latter. Of a numeric column
the bins up to a cut go left, of a categorical one a single category, against the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.crypto.keystream import Keystream, length_prefixed
from treaty.crypto.sharing.key_agreement import agree_with
from treaty.crypto.transfer.arithmetic import Wide, add, prefix_sums, subtract
from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Int32s
from treaty.messaging.certificates import Signer
from treaty.messaging.party import Party


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
