"""Bin sums from a dealer's matrix triples (`matrix_triples`), behind the seam of `encrypted_sums`.

Every node of a level is a vector over all rows of the table, zero at those outside the node, the 1 that counts a row
included, under a mask of its own; the server, who adds up masked words, cannot tell nodes, samples or gradients from
others. Two words hold the three numbers of a row, g and h 2^{b_c} + 1. The client checks that the bins of each feature
add up to its own totals of the node.

=================  =======================  =====================  ==============================================
call at client     call at server           once per               carries
=================  =======================  =====================  ==============================================
setup              constructor              job                    bounds
accept_hint        hint                     job                    F = M - B, some slots at a time
begin_tree         begin_tree               tree                   nothing
query              add, answer              some nodes of a level  E = V - A and the number of the first vector;
                                                                   back: S = M E + D, of the tree's columns
=================  =======================  =====================  ==============================================

Seeds and D come from the dealer by other ways, which the two ends are given as functions
(`systems.fedxgboost_smm.dealer`).
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.masks import UsedNonces
from treaty.crypto.lattice.packed import NewHint
from treaty.crypto.lattice.store import IN_MEMORY
from treaty.crypto.payload import Payload, SumsBounds, check_payload
from treaty.crypto.sums.whole_table import WholeTableClient, WholeTableServer, slots_of
from treaty.crypto.vectors import matrix_triples as triples
from treaty.crypto.vectors.matrix_triples import VECTOR_WORDS, Words
from treaty.errors import CryptoError
from treaty.machine.arrays import pieces

_HINT_BYTES = 32 << 20  # of F in one message; a larger slot has a message of its own
_QUERY_BYTES = 60_000_000  # of a level's nodes in one message; a larger node has a message of its own


class TripleSumsClient(WholeTableClient):
    """The active party's end, with the dealer's 32-byte seed of all masks A and C; CryptoError if sums exceed 63 bits.

    ``deal(first, count)`` has the dealer give every server its shares for some vectors.
    """

    def __init__(self, bounds: SumsBounds, seed: bytes, deal: Callable[[int, int], None], *, threads: int = 1) -> None:
        super().__init__(bounds)
        self._seed, self._deal, self._threads = seed, deal, threads
        self._bits = triples.count_bits(bounds)
        self.nodes_at_a_time = max(1, _QUERY_BYTES // (8 * VECTOR_WORDS * bounds.n_rows))
        self._held: dict[str, tuple[NewHint, int]] = {}
        self._asked: dict[str, deque[tuple[int, Words]]] = {}
        self._used, self._next = UsedNonces(), 0
        self._tree: Words | None = None

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
        made.write(done, hint[0])
        self._held[peer] = made, done + count
        return slots - done - count

    def begin_tree(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Iterator[Payload]:
        """Note the derivatives of all rows of the table; see `SumsClient.begin_tree`."""
        self._check_start(grad, hess)
        self._tree = triples.pack_rows(grad, hess, self._bits)
        return iter([[]])

    def query(self, positions: NDArray[np.int32], starts: NDArray[np.int32]) -> Iterator[Payload]:
        """Mask a vector per node, and have the dealer deal for them; see `SumsClient.query`."""
        if self._tree is None:
            raise CryptoError("expected begin_tree before query")
        n_rows, first, nodes = self._bounds.n_rows, self._next, len(starts) - 1
        masks = np.empty((nodes, VECTOR_WORDS, n_rows), np.uint64)
        masked = np.zeros((nodes, VECTOR_WORDS, n_rows), np.uint64)
        for k, (begin, stop) in enumerate(pairwise(starts)):
            self._used.use(triples.vector_nonce(first + k))  # two vectors under one mask show their difference
            masks[k] = triples.vector_mask(self._seed, first + k, n_rows)
            rows = positions[begin:stop]
            masked[k][:, rows] = self._tree[:, rows]
        masked -= masks
        self._next = first + nodes
        self._deal(first, nodes)
        for waiting in self._asked.values():
            waiting.append((first, masks.reshape(-1, n_rows)))
        return iter([[masked, np.array([first], np.int64)]])

    def open(
        self, peer: str, answer: Payload, totals: NDArray[np.int64], features: NDArray[np.int32] | None = None
    ) -> NDArray[np.int64]:
        """Open a server's answer to the oldest query it has not answered; see `SumsClient.open`."""
        if peer not in self._held or not self._asked[peer]:
            raise CryptoError(f"expected the masked bins and a query before an answer of {peer}")
        first, masks = self._asked[peer].popleft()
        nodes, slots, what = len(masks) // VECTOR_WORDS, int(self._offsets[peer][-1]), f"the answer of {peer}"
        if totals.shape != (nodes, 3):
            raise CryptoError(f"expected totals of shape {(nodes, 3)}, got {totals.shape}")
        rows, starts = self._sampled_slots(peer, features)
        check_payload(answer, what, (np.uint64, (nodes, VECTOR_WORDS, len(rows))))
        sums = np.zeros((nodes, slots, 3), np.int64)
        if not len(rows):  # none of its columns is in the tree's sample
            return sums
        words = answer[0] + triples.masked_product(self._held[peer][0].array, rows, masks, self._threads).reshape(
            nodes, VECTOR_WORDS, -1
        )
        for k in range(nodes):
            words[k] += triples.product_mask(self._seed, peer, first + k, slots)[:, rows]
        found = triples.unpack_sums(words, self._bits)
        # do not report which bin is wrong: that would reveal something of the masks
        if not self._adds_up(found, starts, totals):
            raise CryptoError(f"the bins of a feature do not add up to their node, the job cannot go on - in {what}")
        sums[:, rows] = found
        return sums


class TripleSumsServer(WholeTableServer):
    """A passive party's end, with the dealer's 32-byte seed of the mask B.

    ``shares(first, count)`` returns the dealer's shares D for some vectors, uint64 (count, 2, slots).
    """

    spare = 0

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
        super().__init__(bounds, codes, offsets)
        triples.count_bits(bounds)  # refuses sums that would not fit
        self._seed, self._shares, self._threads = seed, shares, threads
        self._next = 0
        self._query: Payload | None = None

    def hint(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Payload]:
        """Return F = M - B, some slots at a time; see `SumsServer.hint`."""
        n_features, n_rows = self._columns.shape
        slots = int(self._offsets[-1])
        column = np.repeat(np.arange(n_features), self._bins)
        for part in pieces(slots, max(1, _HINT_BYTES // (8 * n_rows))) or [slice(0, 0)]:
            block = np.empty((part.stop - part.start, n_rows), np.uint64)
            for slot in range(part.start, part.stop):
                feature = column[slot]
                block[slot - part.start] = self._columns[feature] == slot - self._offsets[feature]
            triples.subtract_matrix_mask(block, self._seed, part.start, self._threads)
            yield [block]

    def add(self, piece: Payload) -> int:
        """Take a query, which comes in one piece; see `SumsServer.add`."""
        if self._query is not None:
            raise CryptoError("expected a query in one piece, got another one - in a query")
        self._growing()
        check_payload(piece, "a query", (np.uint64, (None, VECTOR_WORDS, self._columns.shape[1])), (np.int64, (1,)))
        if len(piece[0]) == 0:
            raise CryptoError("expected one node at least - in a query")
        self._query = piece
        return len(piece[0])

    def end_tree(self) -> None:
        super().end_tree()
        self._query = None

    def answer(self) -> Payload:
        """Add up masked words over every bin of the tree's columns; see `SumsServer.answer`."""
        if self._query is None:
            raise CryptoError("expected a query before its answer")
        features, query, self._query = self._growing(), self._query, None
        nodes, first = len(query[0]), int(query[1][0])
        if first != self._next:
            raise CryptoError(f"expected vector {self._next}, got {first}: a mask may be used only once - in a query")
        self._next += nodes
        words = query[0].reshape(VECTOR_WORDS * nodes, -1)
        slots, sizes = slots_of(self._offsets, features), self._bins[features]
        places = np.cumsum(sizes) - sizes
        sums = triples.selected_sums(self._columns, features, places, len(slots), words, self._threads)
        return [sums.reshape(nodes, VECTOR_WORDS, -1) + self._shares(first, nodes)[:, :, slots]]

    def close(self) -> None:
        """Nothing is kept; see `SumsServer.close`."""
