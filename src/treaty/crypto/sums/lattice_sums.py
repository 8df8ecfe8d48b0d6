"""Bin sums under the lattice map (`crypto.lattice`), behind the seam of `encrypted_sums`.

Every node of a level is a vector over all rows of the table, zero at those outside the node, which the server cannot
tell from others: it learns no node, no sample and no gradient. An entry holds three numbers,

    m_i = (g_i 2^{b_h} + h_i) 2^{b_c} + 1,    b_c = bitlen(n),  b_h = bitlen(n h_max),  b_g = bitlen(n g_max) + 1,

so that one product gives the sums of gradients and hessians and the count of every bin. The client checks that the bins
of each feature add up to its own totals of the node. See docs/lattice.md for what each side learns.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import payload
from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.kernels import reduced
from treaty.crypto.lattice.linear_map import LinearMapClient, LinearMapServer, PartialSums
from treaty.crypto.lattice.ring import Residues, pack, packed_words, uniform_digits, unpack
from treaty.crypto.lattice.store import HintStore, NewHint, Reservation
from treaty.crypto.parameters import (
    DEGREE,
    DIGIT_BITS,
    WIDE_DEGREE,
    Digits,
    Field,
    Parameters,
    SecretMatrix,
    check_fields,
    choose,
    choose_masked,
)
from treaty.errors import ConfigError, CryptoError
from treaty.machine.arrays import PIECE_BYTES, Codes, Flags, Floats, Int32s, Integers, pieces

_HINT_BYTES = 32 << 20  # of a hint, in one message
_UNPACKED_BYTES = 16 << 20  # of a piece of a query, at a time
_MOST_NODES = 1 << 14  # of one query, so that a node's number fits 16 bits
_RESERVED_AT_A_TIME = 512  # vectors whose leak is entered in the ledger before the first of them is answered
BINDING_BYTES = 32
# Of the format of hints, from the expansion of the seed to the digits; hints of other versions are not used.
VERSION = 3


def lattice_fields(bounds: payload.SumsBounds, sealed: bool = False, nodes: int = 1) -> tuple[list[Field], int]:
    """Return the fields of count, hessian and gradient of each node in a message, and its length."""
    # sealed sums are opened under masks: their fields have a guard bit, and room for 1 more row and hess
    hess_at = (bounds.n_rows + sealed).bit_length() + sealed
    grad_at = hess_at + (bounds.n_rows * bounds.hess_bound + sealed).bit_length() + sealed
    fields = [Field(0, 1), Field(hess_at, bounds.hess_bound), Field(grad_at, bounds.grad_bound, signed=True)]
    length = grad_at + (bounds.n_rows * bounds.grad_bound).bit_length() + 1 + sealed
    shifted = [replace(of, shift=node * length + of.shift, node=node) for node in range(nodes) for of in fields]
    return shifted, nodes * length


def sums_parameters(bounds: payload.SumsBounds, sealed: bool = False, nodes: int = 1) -> Parameters:
    """Return the parameters for bin sums of `nodes` nodes in a vector; CryptoError if the sums are too large."""
    fields, bits = lattice_fields(bounds, sealed, nodes)
    n, of_a_row = bounds.n_rows, bounds.grad_bound + bounds.hess_bound + 1  # a row is in one node
    if sealed:
        parameters = choose_masked(bits, n, of_a_row)
    else:
        entries = max(field.bound for field in fields)
        degree = DEGREE if nodes == 1 else WIDE_DEGREE
        parameters = choose(bits, n, n * of_a_row // 2 + 1, squares=n, entries=entries, degree=degree)
    check_fields(fields, parameters)
    return parameters


def sealed_places(bounds: payload.SumsBounds) -> list[int]:
    """Return the first bits of noise, count, hessian and gradient in a sealed sum, and the length of all."""
    parameters, (fields, _) = sums_parameters(bounds, sealed=True), lattice_fields(bounds, sealed=True)
    return [0, *(parameters.below + field.shift for field in fields), DIGIT_BITS * parameters.digits]


def vector_bytes(parameters: Parameters, n_rows: int) -> int:
    """Return the bytes in which a vector over so many rows is sent, with its b_0."""
    return 4 * (packed_words(parameters, n_rows) + packed_words(parameters, parameters.degree))


def _rows_within(nbytes: int, parameters: Parameters, vectors: int) -> int:
    # whole blocks of either degree, one at least
    return max(1, nbytes // (4 * packed_words(parameters, WIDE_DEGREE) * vectors)) * WIDE_DEGREE


def leak_of(parameters: Parameters, bounds: payload.SumsBounds, bins: NDArray[np.signedinteger]) -> Floats:
    """Bound what an answer about one vector reveals beyond the sums, by column of so many bins: total variation."""
    # by Jensen's inequality, n rows in B bins leak at most as much as in equal bins, which is a public number
    return np.array([int(count) * parameters.leak(bounds.n_rows / int(count)) for count in bins], np.float64)


class LatticeSumsClient(payload.WholeTableClient):
    """The active party's end; the store keeps hints, perhaps for later jobs.

    Each vector is about `nodes` nodes, 1 or 2. Where sums are `sealed`, it is 1, and this end opens shares alone.
    """

    def __init__(
        self, bounds: payload.SumsBounds, store: HintStore, *, threads: int = 1, sealed: bool = False, nodes: int = 1
    ) -> None:
        super().__init__(bounds)
        self._store, self._threads, self._nodes = store, threads, nodes
        self._parameters = sums_parameters(bounds, sealed, nodes)
        self._fields, bits = lattice_fields(bounds, sealed, nodes)
        self._places = [field.shift for field in self._fields[:3]] + [bits // nodes]
        self._kept: Mapping[str, bytes] = {}
        self._unfinished: dict[str, tuple[NewHint, int]] = {}  # with the rows still to come
        self._hints: dict[str, NDArray[np.int16]] = {}
        self._bindings: dict[str, bytes] = {}
        self._asked: dict[str, deque[tuple[NDArray[np.int8], Integers]]] = {}  # secrets, and places of the nodes
        self.keep_secrets: Callable[[NDArray[np.int8]], None] | None = None  # for an audit
        self._tree: tuple[Integers, Integers] | None = None
        vectors = max(1, min(_MOST_NODES // nodes, PIECE_BYTES // vector_bytes(self._parameters, bounds.n_rows)))
        self.nodes_at_a_time = nodes * vectors

    def setup(self) -> payload.Payload:
        return [np.append(super().setup()[0], self._nodes)]

    def offer(self, offsets: Mapping[str, Int32s]) -> tuple[bytes, Mapping[str, bytes]] | None:
        """Return (seed, bindings) of kept hints to ask the servers for, by their offsets; None if one is missing."""
        return self._store.offer({peer: self._terms(of_peer) for peer, of_peer in offsets.items()})

    def _terms(self, offsets: Int32s) -> bytes:
        # all that a hint depends on and this end knows
        return hashlib.sha256(repr((VERSION, self._parameters, self._bounds, offsets.tolist())).encode()).digest()

    def settle(self, seed: bytes, kept: Mapping[str, bytes] | None = None) -> None:
        """Start under a 32-byte public seed that all parties made, or under that of kept hints, by their bindings."""
        self.seed, self._kept = seed, kept or {}
        self._map = LinearMapClient(self._parameters, self._fields, seed, self._bounds.n_rows, threads=self._threads)

    def accept_hint(self, peer: str, hint: payload.Payload, offsets: Int32s) -> int:
        what = f"the hint of {peer}"
        if peer not in self._bindings:
            payload.check_payload(hint, what, (np.uint8, (BINDING_BYTES,)))
            self._bindings[peer], self._offsets[peer] = hint[0].tobytes(), offsets.copy()
            self._asked[peer] = deque()
            # a kept hint is not sent again; the binding proves that it is of the same table and terms
            if peer in self._kept:
                if self._kept[peer] != self._bindings[peer]:
                    raise CryptoError(f"the hint is not the one that was kept - in {what}")
                self._hints[peer] = self._store.hint(peer, self._bindings[peer])
                return 0
            shape = int(offsets[-1]), self._parameters.digits, self._parameters.degree
            self._unfinished[peer] = made, left = self._store.new_hint(shape), shape[0]
        else:
            made, left = self._unfinished[peer]
            payload.check_payload(hint, what, (np.int16, (None, self._parameters.digits, self._parameters.degree)))
            count = len(hint[0])
            if not 0 < count <= left:
                raise CryptoError(f"expected at most {left} rows more, and one at least, got {count} - in {what}")
            made.write(int(offsets[-1]) - left, hint[0])
            left -= count
            self._unfinished[peer] = made, left
        if left == 0:
            del self._unfinished[peer]
            terms = self._terms(self._offsets[peer])
            self._hints[peer] = self._store.keep_hint(peer, self._bindings[peer], self.seed, terms, made)
        return left

    def begin_tree(self, grad: Integers, hess: Integers) -> Iterator[payload.Payload]:
        """See `SumsClient.begin_tree`; of trees that grow together, gradients are (trees, n_rows)."""
        self._check_start(grad, hess)
        self._tree = np.atleast_2d(grad), np.atleast_2d(hess)
        return iter([[]])

    def parts(self, trees: Int32s) -> list[slice]:
        """Cut the nodes of `trees` that grow together into queries."""
        firsts = np.flatnonzero(_places(trees, self._nodes) % self._nodes == 0)[:: self.nodes_at_a_time // self._nodes]
        return [slice(first, last) for first, last in pairwise([*firsts.tolist(), len(trees)])]

    def query(self, positions: Int32s, starts: Int32s, trees: Int32s | None = None) -> Iterator[payload.Payload]:
        """See `SumsClient.query`; `trees` are those of the nodes, where several grow: a row is in a node of each."""
        if self._tree is None:
            raise CryptoError("expected begin_tree before query")
        n_rows, (grad, hess) = self._bounds.n_rows, self._tree
        if trees is None:
            trees = np.zeros(len(starts) - 1, np.int32)
        node_of_row, numbers_in_trees = _nodes_of_trees(positions, starts, trees, n_rows)
        places = _places(trees, self._nodes)
        vectors = int(places[-1]) // self._nodes + 1
        parameters, threads = self._parameters, self._threads
        own = 4 * packed_words(parameters, parameters.degree)
        # a piece has some rows' residues, packed, uint32 (vectors, words); the first one those of the b_0, too
        rows = _rows_within(PIECE_BYTES - vectors * own, parameters, vectors)
        query = self._map.begin(vectors)
        # kept for each server's answer, and never used for another query
        for waiting in self._asked.values():
            waiting.append((query.secrets, places))
        if self.keep_secrets is not None:
            self.keep_secrets(query.secrets)

        def encrypt(at: slice) -> Residues:
            numbers = {tree: (hess[tree][at].astype(np.int32), grad[tree][at].astype(np.int32)) for tree in node_of_row}
            # one indicator for each node; the last vector of a tree may have a node less
            fields = [np.zeros((3, at.stop - at.start), np.int32)] * (vectors * self._nodes)
            for place, (tree, number) in zip(places.tolist(), numbers_in_trees, strict=True):
                held = node_of_row[tree][at] == number
                fields[place] = np.stack([held.astype(np.int32), *(values * held for values in numbers[tree])])
            return query.encrypt([np.concatenate(fields[part]) for part in pieces(len(fields), self._nodes)])

        def piece(first: int) -> payload.Payload:
            count = min(rows, n_rows - first)
            words = np.empty((vectors, packed_words(parameters, count)), np.uint32)
            for part in pieces(count, _rows_within(_UNPACKED_BYTES, parameters, vectors)):
                to = slice(packed_words(parameters, part.start), packed_words(parameters, part.stop))
                words[:, to] = pack(parameters, encrypt(slice(first + part.start, first + part.stop)), threads)
            return [words, *([pack(parameters, query.own, threads)] if first == 0 else [])]

        return map(piece, range(0, n_rows, rows))

    def open(self, peer: str, answer: payload.Payload, totals: Integers, features: Int32s | None = None) -> Integers:
        opened, rows, starts, places = self._opened(peer, answer, features)
        if totals.shape != (len(places), 3):
            raise CryptoError(f"expected totals of shape {(len(places), 3)}, got {totals.shape}")
        sums = np.zeros((len(totals), int(self._offsets[peer][-1]), 3), np.int64)
        if not len(rows):  # none of its columns is in the tree's sample
            return sums
        sums[:, rows] = self._split(opened)[places]
        # neither report which bin is wrong nor ask again: either would reveal something of the secret
        if not self._adds_up(sums[:, rows], starts, totals):
            # a kept hint would make the next job fail in the same way
            self._store.forget_hint(peer, self._bindings[peer])
            raise CryptoError(
                f"the bins of a feature do not add up to their node, the job cannot continue - in the answer of {peer}"
            )
        return sums

    def _split(self, messages: Digits) -> Integers:
        """Split messages into the sums of grad, hess and count of their nodes: (nodes, slots, 3)."""
        places, of_nodes = self._places, []
        top, back = np.int64(1) << places[3] - places[2] - 1, np.zeros(messages.shape[:-1], np.int64)
        # a field below zero has borrowed 1 from the field above: `back` returns it, from the lowest field up
        for start in range(0, self._parameters.message_bits, places[3]):
            sums = split_fields(messages, [start + place for place in places]).astype(np.int64)
            for field, (first, last) in zip((2, 1, 0), pairwise(places), strict=True):
                sums[..., field] += back
                back = sums[..., field] >> last - first
                sums[..., field] -= back << last - first
            sums[..., 0] = (sums[..., 0] ^ top) - top
            back += sums[..., 0] < 0
            of_nodes.append(sums)
        return np.stack(of_nodes, axis=1).reshape(-1, messages.shape[1], 3)

    def open_shares(self, peer: str, answer: payload.Payload, features: Int32s | None = None) -> NDArray[np.uint64]:
        """Open a server's answer to the oldest query it has not answered, where sums are sealed.

        Returns this end's shares of the sampled columns' slots, uint64 (nodes, slots, 4), see `crypto.sealed.sums`.
        """
        return split_fields(self._opened(peer, answer, features)[0], sealed_places(self._bounds))

    def _opened(
        self, peer: str, answer: payload.Payload, features: Int32s | None
    ) -> tuple[Digits, Integers, Integers, Integers]:
        """Open the answer to the oldest query: messages of the sampled slots, uint16 (vectors, slots, words).

        Return also the slots' numbers, the place of each column's first among them, and the nodes' places in vectors.
        """
        if peer not in self._hints or not self._asked[peer]:
            raise CryptoError(f"expected a hint and a query before an answer of {peer}")
        (keys, places), what = self._asked[peer].popleft(), f"the answer of {peer}"
        rows, starts = self._sampled_slots(peer, features)
        shape = (len(keys), len(rows), self._parameters.digits)
        payload.check_payload(answer, what, (np.uint8, (BINDING_BYTES,)), (np.uint16, shape))
        # under another hint the opening would give noise, from which the secret could be inferred
        if answer[0].tobytes() != self._bindings[peer]:
            raise CryptoError(f"the answer belongs to another table or hint than this job's - in {what}")
        if not len(rows):
            return np.zeros((len(keys), 0, 1), np.uint16), rows, starts, places
        return self._map.open(self._hints[peer], rows, keys, answer[1]), rows, starts, places


def _places(trees: Int32s, nodes: int) -> Integers:
    """Return each node's place in vectors of so many `nodes`, counted from the first place of the first vector.

    A row in two nodes of one vector would pass the vector's bounds, so each has nodes of one tree.
    """
    firsts = np.flatnonzero(np.diff(trees, prepend=-1))
    within = (np.arange(len(trees)) - np.repeat(firsts, np.diff(firsts, append=len(trees)))) % nodes
    return nodes * (np.cumsum(within == 0) - 1) + within


def _nodes_of_trees(
    positions: Int32s, starts: Int32s, trees: Int32s, n_rows: int
) -> tuple[dict[int, Int32s], list[tuple[int, int]]]:
    """Return `payload.nodes_of_rows` of each tree's own nodes, and each node's tree and number there."""
    node_of_row, places = {}, [(0, 0)] * len(trees)
    for tree in dict.fromkeys(trees.tolist()):
        own = np.flatnonzero(trees == tree)
        rows, bounds = positions, starts
        if len(own) < len(trees):
            rows = np.concatenate([positions[starts[node] : starts[node + 1]] for node in own])
            bounds = np.cumsum([0, *(starts[own + 1] - starts[own])])
        node_of_row[tree] = payload.nodes_of_rows(rows, bounds, n_rows)
        for place, node in enumerate(own.tolist()):
            places[node] = tree, place
    return node_of_row, places


def split_fields(messages: Digits, places: Sequence[int]) -> NDArray[np.uint64]:
    """Split messages, little-endian in 16-bit words (..., words), into fields, the topmost first: uint64 (..., fields).

    `places` are the bits at which fields begin, and the length of all; each has 64 bits at most.
    """
    parts = []
    for bit, end in pairwise(places):
        first, shift = divmod(bit, DIGIT_BITS)
        value = np.zeros(messages.shape[:-1], np.uint64)
        for k, word in enumerate(range(first, min(messages.shape[-1], -(-end // DIGIT_BITS)))):
            part = messages[..., word].astype(np.uint64)
            value |= part >> np.uint64(shift) if k == 0 else part << np.uint64(DIGIT_BITS * k - shift)
        parts.append(value & np.uint64((1 << end - bit) - 1))
    return np.stack(parts[::-1], axis=-1)


class LatticeSumsServer(payload.WholeTableServer):
    """A passive party's end; leaks enter the store's ledger under the features' names, which stay here.

    Where sums are `sealed`, it adds masks to them, which leak nothing, and keeps its own shares in `shares`.
    """

    def __init__(
        self, bounds: payload.SumsBounds, codes: Codes, offsets: Int32s, names: Sequence[str], store: HintStore, *,
        threads: int = 1, sealed: bool = False, nodes: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(bounds, codes, offsets)
        if nodes not in (1, 2) or (sealed and nodes != 1):
            raise CryptoError(f"expected vectors of one node, or of two where sums are open, got {nodes}")
        self._store, self._threads, self._nodes = store, threads, nodes
        self._parameters = sums_parameters(bounds, sealed, nodes)
        self._sealed = sealed
        self.bounds, self.spare = bounds, nodes - 1  # as the active party stated them; see `SumsServer.spare`
        self._adding: PartialSums | None = None
        if not sealed:
            leaks = leak_of(self._parameters, bounds, self._bins)
            leaks_by_name = dict(zip(names, leaks.tolist(), strict=True))
            self._reservation = Reservation(store, leaks_by_name, _RESERVED_AT_A_TIME)

    @property
    def have_missing(self) -> Flags:
        """Which columns have missing values, bool (features,)."""
        # column by column: a table of comparisons would be as large as the codes
        ends = zip(self._columns, self._bins - 1, strict=True)
        return np.array([(column == missing).any() for column, missing in ends], np.bool_)

    def holds(self, binding: bytes) -> bool:
        """Return whether a kept hint was made of this very table."""
        try:
            own = self._store.own(binding)
        except ConfigError:
            # its file is missing or damaged, and forgotten now: a new hint is made
            return False
        return own is not None and self._binding(own[0], own[1]) == binding

    def _binding(self, nonce: bytes, seed: bytes) -> bytes:
        # all that a hint depends on: parameters, bounds, bins, cuts and the order of rows, through codes
        digest = hashlib.sha256(repr((VERSION, self._parameters, self._bounds, self._offsets.tolist())).encode())
        for part in (nonce, seed, self._columns.data):
            digest.update(part)
        return digest.digest()

    def settle(self, seed: bytes, kept: bytes | None = None) -> None:
        """Start under a public seed that all parties made, or with the hint kept under a binding (`holds`)."""
        matrix, random = SecretMatrix.of_bins(self._columns, self._offsets), None
        self._kept = kept is not None
        if kept is not None:
            own = self._store.own(kept)
            if own is None or self._binding(own[0], own[1]) != kept:
                raise CryptoError("the hint that was offered is not of this table - at the set-up")
            self.binding, seed, random = kept, own[1], own[2]
        else:
            self._nonce = secrets.token_bytes(32)
            self.binding = self._binding(self._nonce, seed)
        self.seed = seed
        self._map = LinearMapServer(self._parameters, matrix, seed, threads=self._threads, random=random)

    def hint(self, progress: Callable[[int, int], None] | None = None) -> Iterator[payload.Payload]:
        yield [np.frombuffer(self.binding, np.uint8)]
        if self._kept:
            return
        rows, done = int(self._offsets[-1]), 0
        # a table without slots has no piece that could be the last
        if rows == 0:
            self._store.keep_own(self.binding, self._nonce, self.seed, self._map.random)
        piece = max(self._threads, _HINT_BYTES // (2 * self._parameters.digits * self._parameters.degree))
        for digits in self._map.hint(piece):
            done += len(digits)
            if progress is not None:
                progress(done, rows)
            # kept before the last piece is sent, so that a client never has a hint that this end lost
            if done == rows:
                self._store.keep_own(self.binding, self._nonce, self.seed, self._map.random)
            yield [digits]

    def add(self, piece: payload.Payload) -> int:
        features, parameters = self._growing(), self._parameters
        if self._adding is None:
            own = packed_words(parameters, parameters.degree)
            payload.check_payload(piece, "a query", (np.uint32, (None, None)), (np.uint32, (None, own)))
            if not 0 < len(piece[0]) == len(piece[1]):
                raise CryptoError("expected as many b as b_0, and one at least - in a query")
            self._adding = self._map.begin(unpack(parameters, piece[1], parameters.degree, self._threads), features)
            self._left = self._bounds.n_rows
        else:
            payload.check_payload(piece, "a query", (np.uint32, (self._adding.vectors, None)))
        rows = _rows_within(_UNPACKED_BYTES, parameters, self._adding.vectors)
        for part in pieces(max(1, piece[0].shape[1]), packed_words(parameters, rows)):
            words = unpack(parameters, piece[0][:, part], self._left, self._threads)
            self._adding.add(words)
            self._left -= words.shape[2]
        return self._nodes * self._adding.vectors

    def end_tree(self) -> None:
        super().end_tree()
        self._adding = None

    def answer(self) -> payload.Payload:
        if self._adding is None:
            raise CryptoError("expected a query before its answer")
        sums, self._adding = self._adding, None
        if not self._sealed:
            # again for a query that is repeated: the leaks of two floods add up
            self._reservation.use(sums.vectors)
        masks = self._masks(sums.vectors) if self._sealed else None
        return [np.frombuffer(self.binding, np.uint8), sums.answer(masks)]

    def _masks(self, vectors: int) -> Digits:
        """Draw masks of sealed sums, uniform over the whole ring, and set this end's shares."""
        slots, places = len(payload.slots_of(self._offsets, self._growing())), sealed_places(self._bounds)
        masks = uniform_digits(Keystream().raw, (vectors, slots, self._parameters.digits))
        # the mask's negative and what `transfer.sealed_sums` has added to count, hess and grad
        share = -masks.astype(np.int64)
        for place in (places[1], places[2], places[4] - 2):
            share[..., place // DIGIT_BITS] += 1 << place % DIGIT_BITS
        self.shares = split_fields(reduced(share), places)
        return masks

    def close(self) -> None:
        if not self._sealed:
            self._reservation.close()
