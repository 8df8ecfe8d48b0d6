"""Bin sums from a dealer's matrix triples (`matrix_triples`), behind the seam of `encrypted_sums`.

Every node of a level is a vector over all rows of the table, zero at those outside the node, its counting 1 included,
under a mask of its own; the server, who adds up masked words, cannot tell nodes, samples or gradients from others. Two
words hold the three numbers of a row, g and h 2^{b_c} + 1. The client checks that the bins of each feature add up to
what it knows of the node.

=================  =======================  =====================  ==============================================
call at client     call at server           once per               carries
=================  =======================  =====================  ==============================================
setup              constructor              job                    bounds
accept_hint        hint                     job                    F = M - B, some slots at a time
begin_tree         begin_tree               tree                   nothing
query              answer                   some nodes of a level  E = V - A and the number of the first vector;
                                                                   back: S = M E + D, of the tree's columns
=================  =======================  =====================  ==============================================

Seeds and D come from the dealer by other ways, which the two ends are given as functions (`protocols.smm_dealer`).
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.compute import pieces
from treaty.crypto.additive.packing import SumsBounds
from treaty.crypto.aggregation.masks import UsedNonces
from treaty.crypto.lattice.arrays import NewHint
from treaty.crypto.lattice.store import IN_MEMORY
from treaty.crypto.payload import Payload, check_payload
from treaty.crypto.sums.lattice_sums import slots_of
from treaty.crypto.vectors.matrix_triples import (
    VECTOR_WORDS,
    Words,
    count_bits,
    masked_product,
    pack_rows,
    product_mask,
    selected_sums,
    subtract_matrix_mask,
    unpack_sums,
    vector_mask,
    vector_nonce,
)
from treaty.errors import CryptoError

_HINT_BYTES = 32 << 20  # of F, in one message; a slot that takes more has a message of its own
_QUERY_BYTES = 64 << 20  # of a level, in one message; a node that takes more has a message of its own


class TripleSumsClient:
    """The active party's end.

    Parameters
    ----------
    bounds : SumsBounds
        Public bounds of the job; n_rows is the number of rows of the table.
    seed : bytes of length 32
        The dealer's, of all masks A and C.
    deal : callable
        ``deal(first, count)`` has the dealer give every server its shares for some vectors.
    threads : int

    Attributes
    ----------
    blind : bool
        Servers are told neither rows of nodes nor those of the tree's sample.
    nodes_at_a_time : int
        Most nodes of one query.

    Raises
    ------
    CryptoError
        When sums would not fit 63 bits.
    """

    blind = True

    def __init__(self, bounds: SumsBounds, seed: bytes, deal: Callable[[int, int], None], *, threads: int = 1) -> None:
        self._bounds, self._seed, self._deal, self._threads = bounds, seed, deal, threads
        self._bits = count_bits(bounds)
        self.nodes_at_a_time = max(1, _QUERY_BYTES // (8 * VECTOR_WORDS * bounds.n_rows))
        self._offsets: dict[str, NDArray[np.int32]] = {}
        self._held: dict[str, tuple[NewHint, int]] = {}
        self._asked: dict[str, deque[tuple[int, Words]]] = {}
        self._used, self._next = UsedNonces(), 0
        self._tree: Words | None = None

    def setup(self) -> Payload:
        """Return the bounds; see `SumsClient.setup`."""
        return [np.array([self._bounds.n_rows, self._bounds.grad_bound, self._bounds.hess_bound], np.int64)]

    def accept_hint(self, peer: str, hint: Payload, offsets: NDArray[np.int32]) -> int:
        """Take some slots of a server's F; see `SumsClient.accept_hint`."""
        what, slots, n_rows = f"the masked bins of {peer}", int(offsets[-1]), self._bounds.n_rows
        if peer not in self._held:
            shape = slots, n_rows
            large = 8 * slots * n_rows > IN_MEMORY
            file = tempfile.TemporaryFile(buffering=0) if large else None
            self._held[peer] = NewHint(shape, np.uint64, file, None), 0
            self._offsets[peer], self._asked[peer] = offsets.copy(), deque()
        made, done = self._held[peer]
        check_payload(hint, what, (np.uint64, (None, n_rows)))
        count = len(hint[0])
        if not (0 < count <= slots - done or count == slots == 0):
            raise CryptoError(f"expected at most {slots - done} slots more, and one at least, got {count} - in {what}")
        made.array[done : done + count] = hint[0]
        self._held[peer] = made, done + count
        return slots - done - count

    def begin_tree(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Payload:
        """Note the derivatives of all rows of the table; see `SumsClient.begin_tree`."""
        if len(grad) != self._bounds.n_rows:
            raise CryptoError(f"expected the derivatives of {self._bounds.n_rows} rows, got {len(grad)}")
        self._bounds.check(grad, hess, "a tree's start")
        self._tree = pack_rows(grad, hess, self._bits)
        return []

    def query(self, positions: NDArray[np.int32], starts: NDArray[np.int32]) -> Payload:
        """Mask a vector per node, and have the dealer deal for them; see `SumsClient.query`."""
        if self._tree is None:
            raise CryptoError("expected begin_tree before query")
        n_rows, first, nodes = self._bounds.n_rows, self._next, len(starts) - 1
        masks = np.empty((nodes, VECTOR_WORDS, n_rows), np.uint64)
        masked = np.zeros((nodes, VECTOR_WORDS, n_rows), np.uint64)
        for k, (begin, stop) in enumerate(pairwise(starts)):
            self._used.use(vector_nonce(first + k))  # of two vectors under one mask the server sees the difference
            masks[k] = vector_mask(self._seed, first + k, n_rows)
            rows = positions[begin:stop]
            masked[k][:, rows] = self._tree[:, rows]
        masked -= masks
        self._next = first + nodes
        self._deal(first, nodes)
        for waiting in self._asked.values():
            waiting.append((first, masks.reshape(-1, n_rows)))
        return [masked, np.array([first], np.int64)]

    def open(
        self, peer: str, answer: Payload, totals: NDArray[np.int64], features: NDArray[np.int32] | None = None
    ) -> NDArray[np.int64]:
        """Open a server's answer to the oldest query it has not answered; see `SumsClient.open`."""
        if peer not in self._held or not self._asked[peer]:
            raise CryptoError(f"expected the masked bins and a query before an answer of {peer}")
        offsets, (first, masks) = self._offsets[peer], self._asked[peer].popleft()
        nodes, slots, what = len(masks) // VECTOR_WORDS, int(offsets[-1]), f"the answer of {peer}"
        if totals.shape != (nodes, 3):
            raise CryptoError(f"expected totals of shape {(nodes, 3)}, got {totals.shape}")
        chosen = np.arange(len(offsets) - 1, dtype=np.int64) if features is None else features.astype(np.int64)
        rows = slots_of(offsets, chosen)
        check_payload(answer, what, (np.uint64, (nodes, VECTOR_WORDS, len(rows))))
        sums = np.zeros((nodes, slots, 3), np.int64)
        if not len(rows):  # none of its columns is in the tree's sample
            return sums
        words = answer[0] + masked_product(self._held[peer][0].array, rows, masks, self._threads).reshape(
            nodes, VECTOR_WORDS, -1
        )
        for k in range(nodes):
            words[k] += product_mask(self._seed, peer, first + k, slots)[:, rows]
        found = unpack_sums(words, self._bits)
        # which bin is wrong is not told: it would say something of the masks
        starts = np.concatenate([[0], np.cumsum(np.diff(offsets)[chosen])[:-1]])
        if not (self._bounds.allow(found) and (np.add.reduceat(found, starts, axis=1) == totals[:, np.newaxis]).all()):
            raise CryptoError(f"the bins of a feature do not add up to their node, the job cannot go on - in {what}")
        sums[:, rows] = found
        return sums


class TripleSumsServer:
    """A passive party's end.

    Parameters
    ----------
    bounds : SumsBounds
        What the client's `setup` states.
    codes : ndarray of uint8, shape (rows, features)
    offsets : ndarray of int32, shape (features + 1,)
    seed : bytes of length 32
        The dealer's, of the mask B.
    shares : callable
        ``shares(first, count)`` returns the dealer's shares D for some vectors, uint64 (count, 2, slots).
    threads : int

    Raises
    ------
    CryptoError
        When bounds or codes cannot be used.
    """

    def __init__(
        self,
        bounds: SumsBounds,
        codes: NDArray[np.uint8],
        offsets: NDArray[np.int32],
        seed: bytes,
        shares: Callable[[int, int], Words],
        *,
        threads: int = 1,
    ) -> None:
        if len(codes) != bounds.n_rows:
            raise CryptoError(f"expected {bounds.n_rows} rows, got {len(codes)} - in the set-up")
        self._offsets, self._bins = offsets.astype(np.int64), np.diff(offsets)
        if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != len(self._bins) or (self._bins < 1).any():
            raise CryptoError("expected uint8 codes (rows, features) and offsets with a slot for every feature")
        if len(codes) and (codes.max(axis=0, initial=0) >= self._bins).any():
            raise CryptoError("a bin code lies beyond its feature's slots")
        count_bits(bounds)
        self._columns = np.ascontiguousarray(codes.T)
        self._seed, self._shares, self._threads = seed, shares, threads
        self._features: NDArray[np.int64] | None = None
        self._next = 0

    def hint(self) -> Iterator[Payload]:
        """Return F = M - B, some slots at a time; see `SumsServer.hint`."""
        n_features, n_rows = self._columns.shape
        slots = int(self._offsets[-1])
        column = np.repeat(np.arange(n_features), self._bins)
        for part in pieces(slots, max(1, _HINT_BYTES // (8 * n_rows))) or [slice(0, 0)]:
            block = np.empty((part.stop - part.start, n_rows), np.uint64)
            for slot in range(part.start, part.stop):
                feature = column[slot]
                block[slot - part.start] = self._columns[feature] == slot - self._offsets[feature]
            subtract_matrix_mask(block, self._seed, part.start, self._threads)
            yield [block]

    def begin_tree(self, payload: Payload, rows: NDArray[np.int32], features: NDArray[np.int32] | None = None) -> None:
        """Note the tree's columns; see `SumsServer.begin_tree`. Its rows are always all of the table."""
        check_payload(payload, "the start of a tree")
        n_features, n_rows = self._columns.shape
        if len(rows) != n_rows:
            raise CryptoError(f"expected all {n_rows} rows, got {len(rows)} - at the start of a tree")
        self._features = np.arange(n_features, dtype=np.int64) if features is None else features.astype(np.int64)

    def end_tree(self) -> None:
        """See `SumsServer.end_tree`."""
        self._features = None

    def nodes_of(self, query: Payload) -> int:
        """Return how many nodes a query is about; see `SumsServer.nodes_of`."""
        check_payload(query, "a query", (np.uint64, (None, VECTOR_WORDS, self._columns.shape[1])), (np.int64, (1,)))
        if len(query[0]) == 0:
            raise CryptoError("expected one node at least - in a query")
        return len(query[0])

    def answer(self, query: Payload) -> Payload:
        """Add up masked words over every bin of the tree's columns; see `SumsServer.answer`."""
        if self._features is None:
            raise CryptoError("expected begin_tree before a query")
        nodes, first = self.nodes_of(query), int(query[1][0])
        if first != self._next:
            raise CryptoError(f"expected vector {self._next}, got {first}: masks serve once - in a query")
        self._next += nodes
        words = query[0].reshape(VECTOR_WORDS * nodes, -1)
        slots = slots_of(self._offsets, self._features)
        sizes = self._bins[self._features]
        places = (np.cumsum(sizes) - sizes).astype(np.int64)
        sums = selected_sums(self._columns, self._features, places, len(slots), words, self._threads)
        return [sums.reshape(nodes, VECTOR_WORDS, -1) + self._shares(first, nodes)[:, :, slots]]

    def close(self) -> None:
        """Nothing is kept; see `SumsServer.close`."""
