"""What encrypted prediction adds up: trees as sums of terms, and a passive party's work on their ciphertexts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.additive.ciphers import OUPublicKey
from treaty.crypto.additive.key_proofs import KeyRandomness, Randomiser, merged
from treaty.crypto.sharing.key_agreement import agree, seal, unseal
from treaty.errors import CryptoError
from treaty.machine.arrays import pieces
from treaty.machine.process import concurrently
from treaty.trees.ensemble import Tree

# -------------------- trees as sums of terms, one for each split of a passive party: what encrypted prediction adds up
#
# Let c(x) be the leaf value reached from node x when the active party's splits decide as they do and every passive
# party's split sends right. Then a row's leaf value in a tree is
#
#     c(root) + sum over passive splits v of  d(v) [row meets v's conditions]
#     d(v) = c(left child of v) - c(right child of v) where the active party's splits lead to v, else 0
#     v's conditions: left at v, and the side towards v at every passive split above it
#
# so that the active party knows c(root) and all d(v), and passive parties know which conditions are met. Fed-EINI sends
# one weight per leaf instead; a tree has one leaf more than it has splits, the active party's among them.
#
# Values are integers in fixed point and sums exact. A plaintext has a field of 64 bits for each output; a term that
# gains nothing is not 0 but `NO_GAIN` in every field, so that fields never go below zero, and the sum of n terms is n
# times `NO_GAIN` too high whichever terms are kept.

# Leaf values are rounded to this many bits below the largest. More would only make the sums easier to take apart.
PRECISION_BITS = 40

# Room for the sum of one output's terms
FIELD_BITS = 64

# Encodes a gain of 0: gains are differences of two values, so each one plus this is in [0, 2 NO_GAIN]
NO_GAIN = 1 << (PRECISION_BITS + 1)

# Most terms whose sum is sure to fit a field
MOST_TERMS = 1 << (FIELD_BITS - PRECISION_BITS - 3)


@dataclass(frozen=True, slots=True)
class TreeTerms:
    """The nodes of some trees, one tree after the other, and the terms of their sum; all numbers are int64."""

    roots: NDArray[np.int64]  # (n_trees,) node number of each root
    levels: list[NDArray[np.int64]]  # inner nodes of each depth, the roots' first
    left: NDArray[np.int64]  # (n_nodes,) left child, the right one being the next; -1 in a leaf
    parent: NDArray[np.int64]  # (n_nodes,) -1 at a root
    source: NDArray[np.int64]  # (n_nodes,) as in `Tree`, -1 in a leaf; likewise `record`
    record: NDArray[np.int64]
    line: NDArray[np.int64]  # (n_nodes,) row of the active party's own decisions; -1 where the split is not its own
    value: NDArray[np.int64]  # (n_nodes,) fixed-point leaf value
    node: NDArray[np.int64]  # (n_terms,) each term's split, in random order, which hides where in the trees it is
    tree: NDArray[np.int64]  # (n_terms,) the tree of each term


def fixed_point(trees: Sequence[Tree]) -> int:
    """Return the exponent e with which every leaf value times 2^e is at most 2^PRECISION_BITS in size."""
    largest = max((float(np.abs(tree.value).max()) for tree in trees), default=0.0)
    return PRECISION_BITS - int(np.frexp(largest)[1])


def make_terms(trees: Sequence[Tree], own: int, own_records: NDArray[np.int32], exponent: int) -> TreeTerms:
    """Stack trees and find the terms; leaf values are rounded to multiples of 2^-exponent.

    `own` is the active party's source number, `own_records` (k,) are its records with decisions at hand, ascending.
    """
    sizes = [len(tree.left) for tree in trees]
    roots = np.cumsum([0, *sizes])[:-1]
    tree_of, first = np.repeat(np.arange(len(trees)), sizes), np.repeat(roots, sizes)
    left = np.concatenate([tree.left for tree in trees]).astype(np.int64)
    left = np.where(left < 0, -1, left + first)
    inner = np.flatnonzero(left >= 0)
    parent = np.full(len(left), -1)
    parent[left[inner]] = parent[left[inner] + 1] = inner
    source = np.concatenate([tree.source for tree in trees]).astype(np.int64)
    record = np.concatenate([tree.record for tree in trees]).astype(np.int64)
    levels, nodes = [], roots[left[roots] >= 0]
    while len(nodes):
        levels.append(nodes)
        below = np.concatenate([left[nodes], left[nodes] + 1])
        nodes = below[left[below] >= 0]
    node = np.flatnonzero((source >= 0) & (source != own)).tolist()
    secrets.SystemRandom().shuffle(node)
    value = np.ldexp(np.concatenate([tree.value for tree in trees]), exponent)
    return TreeTerms(
        roots=roots,
        levels=levels,
        left=left,
        parent=parent,
        source=source,
        record=record,
        line=np.where(source == own, np.searchsorted(own_records, record), -1),
        value=np.rint(value).astype(np.int64),
        node=np.array(node, np.int64),
        tree=tree_of[np.array(node, np.int64)],
    )


def values_and_gains(terms: TreeTerms, sides: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return c(root) (n_trees, n_rows) and d(v) (n_terms, n_rows) of some rows.

    `sides` (n_own_records, n_rows) are the active party's decisions, True for left.
    """
    n_rows = sides.shape[1]
    sides = np.concatenate([sides, np.zeros((1, n_rows), np.bool_)])  # line -1: passive parties' splits send right
    value = np.repeat(terms.value[:, None], n_rows, axis=1)
    for nodes in reversed(terms.levels):
        left = terms.left[nodes]
        value[nodes] = np.where(sides[terms.line[nodes]], value[left], value[left + 1])
    reached = np.zeros(value.shape, np.bool_)
    reached[terms.roots] = True
    for nodes in terms.levels:
        left, goes_left, anyway = terms.left[nodes], sides[terms.line[nodes]], terms.line[nodes, None] < 0
        reached[left] = reached[nodes] & (goes_left | anyway)
        reached[left + 1] = reached[nodes] & (~goes_left | anyway)
    left = terms.left[terms.node]
    return value[terms.roots], np.where(reached[terms.node], value[left] - value[left + 1], 0)


def pack_gains(gains: NDArray[np.int64], fields: NDArray[np.int64], n_fields: int) -> NDArray[np.uint64]:
    """Write gains (n_terms, n_rows) into plaintexts, uint64 (n_rows, n_terms, n_fields), term t's in ``fields[t]``."""
    plaintexts = np.full((gains.shape[1], len(gains), n_fields), NO_GAIN, np.uint64)
    plaintexts[:, np.arange(len(gains)), fields] = (gains.T + NO_GAIN).astype(np.uint64)
    return plaintexts


def unpack_sums(
    plaintexts: NDArray[np.uint64], n_rows: int, rows_each: int, n_fields: int, n_terms: int
) -> NDArray[np.int64]:
    """Take sums of `n_terms` gains apart, int64 (n_rows, n_fields); raise ValueError if one cannot be such a sum.

    `plaintexts` are uint64 (ceil(n_rows / rows_each), limbs), with `rows_each` rows in each, the first one highest.
    """
    used = rows_each * n_fields
    rows = plaintexts[:, :used].reshape(-1, rows_each, n_fields)[:, ::-1]
    # the last plaintext may have fewer rows: its highest places stay empty
    lacking = len(plaintexts) * rows_each - n_rows
    full, last = rows[:-1].reshape(-1, n_fields), rows[-1]
    sums = np.concatenate([full, last[lacking:]])
    if plaintexts[:, used:].any() or last[:lacking].any() or (sums > np.uint64(2 * NO_GAIN * n_terms)).any():
        raise ValueError(f"expected sums of {n_terms} terms")
    return sums.astype(np.int64) - NO_GAIN * n_terms


@dataclass(frozen=True, slots=True)
class Conditions:
    """What terms need of passive parties: a row's side at a record. Sorted by source, then term, then record."""

    term: NDArray[np.int64]  # (n_conditions,), and so are the others
    source: NDArray[np.int64]
    record: NDArray[np.int64]
    left: NDArray[np.bool_]  # the side


def find_conditions(terms: TreeTerms) -> Conditions:
    """Return every term's conditions, found on the way from its node to the root."""
    term, node, side = np.arange(len(terms.node)), terms.node, np.ones(len(terms.node), np.bool_)
    found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]] = []
    while not found or len(term):
        passive = terms.line[node] < 0
        found.append((term[passive], node[passive], side[passive]))
        above = terms.parent[node]
        side, term = (terms.left[above] == node)[above >= 0], term[above >= 0]
        node = above[above >= 0]
    terms_, nodes, sides = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort([terms.record[nodes], terms_, terms.source[nodes]])
    return Conditions(terms_[order], terms.source[nodes[order]], terms.record[nodes[order]], sides[order])


@dataclass(frozen=True, slots=True)
class Stop:
    """One passive party's share of the work on the terms."""

    source: int
    passed: NDArray[np.int64]  # terms it gets from the party before it
    fresh: NDArray[np.int64]  # those it is the first to see
    onwards: NDArray[np.bool_]  # (n_passed + n_fresh,) which of all these a later party needs; the others end here


def make_route(conditions: Conditions, n_terms: int) -> list[Stop]:
    """Send every term through the parties it has conditions at, in the order of the sources."""
    stops = np.unique(conditions.source)
    place = np.searchsorted(stops, conditions.source)
    first, last = np.full(n_terms, len(stops)), np.full(n_terms, -1)
    np.minimum.at(first, conditions.term, place)
    np.maximum.at(last, conditions.term, place)
    route: list[Stop] = []
    passed = np.zeros(0, np.int64)
    for number, source in enumerate(stops.tolist()):
        fresh = np.flatnonzero(first == number)
        here = np.concatenate([passed, fresh])
        route.append(Stop(source, passed, fresh, last[here] > number))
        passed = here[last[here] > number]
    return route


Words = NDArray[np.uint64]

EXCHANGE_BYTES = 32
_ROWS = 64  # how many a thread takes at a time


class Adder:
    """Sums of encrypted terms under the active party's key.

    `words` are those of a ciphertext, `fields` how many outputs' sums a plaintext holds; `one`, uint64 (1, words), is
    the empty product, an encryption of 0.
    """

    def __init__(self, key: OUPublicKey, threads: int) -> None:
        self._key, self.threads = key, threads
        self.words, self.fields = key.modulus.words, fields_of(key)
        self._randomiser, self._key_randomness = Randomiser(key, threads), KeyRandomness(key)
        self.one = self._packed(1)

    def valid(self, ciphertexts: Words) -> bool:
        """Return whether all of them, uint64 (..., words), are in [1, n) and prime to n."""
        return self._key.modulus.are_units(ciphertexts.reshape(-1, self.words), self.threads)

    def select(
        self, sums: Words, terms: Words, kept: NDArray[np.bool_], onwards: NDArray[np.bool_], n_outputs: int
    ) -> tuple[Words, Words]:
        """Replace the terms that rows do not keep by "no gain", and add those that go no further to the sums.

        `sums` are uint64 (n_rows, 1, words), `terms` uint64 (n_rows, n_terms, words), `kept` bool (n_terms, n_rows),
        `onwards` bool (n_terms,). Return the sums (n_rows, words) and the terms that go on (n_rows, n_onwards, words);
        neither is blinded yet.
        """
        n_rows, n_terms = terms.shape[:2]
        stacked = np.empty((1 + n_rows * (1 + n_terms), self.words), np.uint64)
        no_gain = sum(NO_GAIN << FIELD_BITS * output for output in range(n_outputs))
        stacked[:1] = self._packed(pow(self._key.g, no_gain, self._key.n))
        by_row = stacked[1:].reshape(n_rows, 1 + n_terms, self.words)
        by_row[:, :1], by_row[:, 1:] = sums, terms
        first = 1 + np.arange(n_rows, dtype=np.int32)[:, None] * np.int32(1 + n_terms)
        # a product by index, whether a term is kept or replaced by "no gain": time does not depend on it
        chosen = np.where(kept.T, first + np.arange(1, 1 + n_terms, dtype=np.int32), np.int32(0))
        added = np.concatenate([first, chosen[:, ~onwards]], axis=1)
        products = np.empty((n_rows, self.words), np.uint64)

        def multiply(rows: slice) -> None:
            index = np.ascontiguousarray(added[rows])
            starts = np.arange(len(index) + 1) * index.shape[1]
            self._key.modulus.segment_products(stacked, index.reshape(-1), starts, products[rows])

        concurrently(multiply, pieces(n_rows, _ROWS), self.threads)
        return products, stacked[chosen[:, onwards]]

    def blind(self, ciphertexts: Words, together: int = 1, *, bits: int = 1, full: bool = False) -> Words:
        """Merge every `together` ciphertexts into one, each times a random n-th power.

        Takes uint64 (n, words), returns uint64 (ceil(n / together), words); the merged plaintexts lie `bits` apart, the
        first highest. `full` is for parties without the key: by full h^r, if h is drawn well.
        """
        randomness = self._key_randomness if full else self._randomiser
        return merged(self._key.modulus, ciphertexts, together, bits, randomness, self.threads)

    def _packed(self, residue: int) -> Words:
        modulus = self._key.modulus
        return modulus.pack(modulus.montgomery([residue]))


def fields_of(key: OUPublicKey) -> int:
    """Return how many outputs' sums a plaintext holds; raise CryptoError if not even one fits."""
    fields = (key.plaintext_bits - 2) // FIELD_BITS
    if fields < 1:
        raise CryptoError(f"expected a key with plaintexts of {FIELD_BITS + 2} bits, got {key.plaintext_bits}")
    return fields


class Box:
    """Encrypts what one party sends another by way of a third, under a key that both derive from ephemeral ones.

    Each direction has its own key: `sending` says whether this end seals or opens. Raises CryptoError if `other`, the
    other end's 32 bytes, is no usable public key.
    """

    def __init__(self, own: X25519PrivateKey, other: bytes, *, sending: bool) -> None:
        mine = own.public_key().public_bytes_raw()
        ends = (mine, other) if sending else (other, mine)
        self._seed = agree(own, other, "treaty hidden inference", *(end.hex() for end in ends))

    def seal(self, content: bytes, place: str) -> bytes:
        """Encrypt content with `place` as associated data, so that no box can take another's place."""
        return seal(self._seed, content, place.encode())

    def open(self, box: bytes, place: str) -> bytes:
        """Decrypt a box; raise CryptoError if it is not what the other end sealed for this place."""
        content = unseal(self._seed, box, place.encode())
        if content is None:
            raise CryptoError("cannot decrypt what the party before sealed: wrong key, place or content")
        return content
