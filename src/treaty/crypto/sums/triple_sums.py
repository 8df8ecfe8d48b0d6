"""Bin sums from a dealer's matrix triples, behind the seam of `encrypted_sums`.

A *holder* (passive party) has a 0/1 matrix M (slots x rows) that never changes: M_si = 1 when row i is in bin s, so one
1 per column and feature. An *asker* (active party) has vectors V_t (rows x 2), t = 0, 1, ..., one for each node: two
words hold the numbers of a row in the node, g and h 2^{b_c} + 1, other rows are zero. It is to learn M V_t, and no
more. A *dealer*, which has no data, knows neither. After Beaver (1991), with the fixed operand masked once as Mohassel
and Zhang (2017) do:

    dealer -> holder        seed of B, uniform (slots x rows)                           once (per job)
    dealer -> asker         seed of all A_t, uniform (rows x 2), and all C_t (slots x 2)  once
    holder -> asker         F = M - B                                                   once: `hint`, in pieces
    dealer -> holder        D_t = B A_t - C_t                                           per vector
    asker  -> holder        E_t = V_t - A_t                                             per vector: `query`
    holder -> asker         S_t = M E_t + D_t                                           per vector: `answer`
    asker                   S_t + F A_t + C_t = M E_t + (B + F) A_t = M V_t

Everything is modulo 2^64, hence exact: nothing is rounded, and only masks wrap around. `begin_tree` carries nothing;
seeds and D come from the dealer in other messages, which the two ends call functions for (`systems.fedxgboost_smm`).
The client checks that the bins of each feature add up to its own totals of the node.

* *Assumption*: semi-honest parties, the dealer colluding with neither; HKDF and AES-256-CTR as pseudorandom functions.
* *Holder learns* how many vectors there are: E_t and D_t are uniform to it, whatever V_t is.
* *Asker learns* M V_t: F is uniform to it, and S_t follows from M V_t and what it has.
* *Dealer learns* slots, rows and how many vectors.
* *Dealer and holder* together know all E_t and A_t, so every V_t; *dealer and asker* B and F, so M.

A_t must serve once: from two vectors under one mask the holder sees the difference. All three keep count and refuse.

Cost, with n rows and l slots: F has 8 l n bytes, sent once (20 columns of 32 bins and a million rows: 5.3 GB; it is
kept in a temporary file beyond 256 MB). A vector costs 16 n bytes up and 16 l down, and 16 l from the dealer; 2 l n
multiplications each at asker and dealer, 0.12 ns apiece where the processor has AVX-512, and at the dealer l n words of
keystream for a batch of vectors. The holder only adds: 2 n for each column. Nobody holds more than 16 MB of B at a
time.

References: Beaver, Efficient Multiparty Protocols Using Circuit Randomization, CRYPTO 1991. Mohassel, Zhang, SecureML:
A System for Scalable Privacy-Preserving Machine Learning, IEEE S&P 2017, section 4.2 (masks of a matrix used many
times).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from treaty.crypto.keystream import UsedNonces, add_masks, mask_key, mask_nonce
from treaty.crypto.lattice.store import NewHint, temporary_hint
from treaty.crypto.payload import Payload, SumsBounds, WholeTableClient, WholeTableServer, check_payload, slots_of
from treaty.errors import CryptoError
from treaty.machine.arrays import Codes, Int32s, Integers, Words, pieces
from treaty.machine.kernels import kernel
from treaty.machine.process import concurrently
from treaty.machine.shared_work import share

SEED_BYTES = 32
VECTOR_WORDS = 2  # columns of a vector: one for gradients, one for hessians and the count of rows

_BLOCK_BYTES = 16 << 20  # most of B in memory at a time
_AHEAD = 16  # vectors per batch of a dealer's shares: B is expanded again for each batch
_MASK_BYTES = 64 << 20  # most of all A_t of a batch
_SMALL = 1 << 18  # fewer products or sums than this are not worth a second thread


def count_bits(bounds: SumsBounds) -> int:
    """Return the width of the count in the second word, bitlen(n) + 1; CryptoError if sums would not fit 63 bits."""
    bits = bounds.n_rows.bit_length() + 1
    if max(bounds.n_rows * bounds.grad_bound, (bounds.n_rows * bounds.hess_bound + 1) << bits) >= 1 << 63:
        raise CryptoError("sums would exceed 63 bits - lower fractional_bits, or the bound of the gradients")
    return bits


def pack_rows(grad: Integers, hess: Integers, bits: int) -> Words:
    """Return the two words of each row, uint64 (2, rows): g, and h 2^b_c + 1."""
    return np.stack([grad.astype(np.uint64), (hess.astype(np.uint64) << np.uint64(bits)) + np.uint64(1)])


def unpack_sums(words: Words, bits: int) -> Integers:
    """Split sums (nodes, 2, slots) into sum of grad, sum of hess and count: int64 (nodes, slots, 3)."""
    grad, rest = words[:, 0], words[:, 1]
    low = np.uint64((1 << bits) - 1)
    return np.stack(
        [grad.astype(np.int64), (rest >> np.uint64(bits)).astype(np.int64), (rest & low).astype(np.int64)], 2
    )


def subtract_matrix_mask(block: Words, seed: bytes, first: int, threads: int = 1) -> None:
    """Subtract B, from slot `first` on, from some slots of a matrix, uint64 (k, rows), in place."""

    def one(slot: int) -> None:
        add_masks(block[slot], [], [mask_key(seed, mask_nonce("", "smm_secure", first + slot, 0, "B"))])

    concurrently(one, range(len(block)), threads)


def vector_nonce(number: int) -> bytes:
    """Return the nonce of the mask A_t, which may be used once."""
    return mask_nonce("", "smm_secure", number, 0, "A")


def vector_mask(seed: bytes, number: int, n_rows: int) -> Words:
    """Return A_t, uint64 (2, rows)."""
    return _mask(seed, vector_nonce(number), n_rows)


def product_mask(seed: bytes, holder: str, number: int, slots: int) -> Words:
    """Return C_t of one holder, uint64 (2, slots)."""
    return _mask(seed, mask_nonce("", "smm_secure", number, 0, f"C of {holder}"), slots)


def _mask(seed: bytes, nonce: bytes, length: int) -> Words:
    mask = np.zeros(VECTOR_WORDS * length, np.uint64)
    add_masks(mask, [mask_key(seed, nonce)], [])
    return mask.reshape(VECTOR_WORDS, length)


def masked_product(matrix: Words, slots: Integers, vectors: Words, threads: int = 1) -> Words:
    """Multiply rows `slots` (m,) of a dense matrix (l, rows) with vectors (k, rows), modulo 2^64: uint64 (k, m)."""
    out = np.zeros((len(vectors), len(slots)), np.uint64)
    least = 1 + _SMALL // (vectors.size + 1)
    share(lambda a, b: _add_products(matrix, slots, vectors, a, b, out), len(slots), threads, least)
    return out


def selected_sums(
    columns: Codes, features: Integers, places: Integers, slots: int, words: Words, threads: int = 1
) -> Words:
    """Multiply the 0/1 matrix of some features' bins with vectors (k, rows), modulo 2^64: word sums (k, slots).

    `columns` (features, rows) are all bin codes, C order as the words; `places` (m,) is the first slot of each chosen
    feature in the result.
    """
    out = np.zeros((len(words), slots), np.uint64)
    least = 1 + _SMALL // (words.size + 1)
    width = int(np.diff(places, append=slots).max(initial=1))
    share(lambda a, b: _add_selected(columns, features, places, words, width, a, b, out), len(features), threads, least)
    return out


@kernel
def _add_products(matrix: Any, slots: Any, vectors: Any, first: int, last: int, out: Any) -> None:
    n_rows = matrix.shape[1]
    # 2048 rows at a time, whose words stay in the second cache
    for begin in range(0, n_rows, 2048):
        end = min(n_rows, begin + 2048)
        for k in range(first, last):
            factors = matrix[slots[k]]
            for j in range(vectors.shape[0]):
                vector = vectors[j]
                total = np.uint64(0)
                for i in range(np.uint64(begin), np.uint64(end)):
                    total += factors[i] * vector[i]
                out[j, k] += total


@kernel
def _add_selected(
    columns: Any, features: Any, places: Any, words: Any, width: int, first: int, last: int, out: Any
) -> None:
    table = np.zeros((width, 2), np.uint64)
    for k in range(first, last):
        column, place = columns[features[k]], np.uint64(places[k])
        end = np.uint64(places[k + 1] if k + 1 < places.shape[0] else out.shape[1])
        for j in range(0, words.shape[0], 2):
            grad, rest = words[j], words[j + 1]
            table[:] = 0
            # every row is added, whatever it holds, so that time reveals nothing of nodes
            for i in range(np.uint64(column.shape[0])):
                code = np.uint64(column[i])
                table[code, 0] += grad[i]
                table[code, 1] += rest[i]
            for slot in range(place, end):
                out[j, slot] = table[slot - place, 0]
                out[j + 1, slot] = table[slot - place, 1]


class TripleDealer:
    """Makes the correlated randomness of holders (holder -> slots of its matrix) and asker.

    `asker_seed` is for the asker alone, each of `holder_seeds` for its holder alone.
    """

    def __init__(self, n_rows: int, slots: Mapping[str, int], threads: int = 1) -> None:
        self._n_rows, self._slots, self._threads = n_rows, dict(slots), threads
        self.asker_seed = secrets.token_bytes(SEED_BYTES)
        self.holder_seeds = {holder: secrets.token_bytes(SEED_BYTES) for holder in slots}
        self._ahead = max(1, min(_AHEAD, _MASK_BYTES // (8 * VECTOR_WORDS * max(1, n_rows))))
        self._next = 0
        self._made: dict[str, list[Words]] = {holder: [] for holder in slots}

    def prepare(self) -> None:
        """Make shares ahead if none are left, while the others compute."""
        if not any(self._made.values()):
            self._make(self._ahead)

    def deal(self, first: int, count: int) -> dict[str, Words]:
        """Return D_t of each holder for the next vectors, uint64 (count, 2, slots).

        CryptoError for other vectors than the next ones: shares dealt a second time would undo their mask.
        """
        if first != self._next or count < 1:
            raise CryptoError(
                f"expected to deal for vector {self._next}, and one at least, got {first} and {count}: "
                "a mask may be used only once"
            )
        # made in batches, as B is expanded again for each
        lacking = count - min(map(len, self._made.values()), default=count)
        if lacking > 0:
            self._make(max(lacking, self._ahead))
        self._next += count
        dealt = {holder: np.stack(made[:count]) for holder, made in self._made.items()}
        self._made = {holder: made[count:] for holder, made in self._made.items()}
        return dealt

    def _make(self, count: int) -> None:
        begin = self._next + min(map(len, self._made.values()), default=0)
        vectors = np.concatenate([vector_mask(self.asker_seed, begin + k, self._n_rows) for k in range(count)])
        at_a_time = max(1, _BLOCK_BYTES // (8 * max(1, self._n_rows)))
        for holder, slots in self._slots.items():
            made = np.zeros((VECTOR_WORDS * count, slots), np.uint64)
            for part in pieces(slots, at_a_time):
                block = np.zeros((part.stop - part.start, self._n_rows), np.uint64)
                # B is expanded again for each batch, some slots at a time
                subtract_matrix_mask(block, self.holder_seeds[holder], part.start, self._threads)  # -B
                made[:, part] -= masked_product(block, np.arange(len(block)), vectors, self._threads)
            shares = made.reshape(count, VECTOR_WORDS, slots)
            for k in range(count):
                shares[k] -= product_mask(self.asker_seed, holder, begin + k, slots)
            self._made[holder].extend(shares)


_HINT_BYTES = 32 << 20  # of F in one message; a larger slot has a message of its own
_QUERY_BYTES = 60_000_000  # of a level's nodes in one message; a larger node has a message of its own


class TripleSumsClient(WholeTableClient):
    """The active party's end, with the dealer's 32-byte seed of all masks A and C; CryptoError if sums exceed 63 bits.

    ``deal(first, count)`` makes the dealer send every server its shares for some vectors.
    """

    def __init__(self, bounds: SumsBounds, seed: bytes, deal: Callable[[int, int], None], *, threads: int = 1) -> None:
        super().__init__(bounds)
        self._seed, self._deal, self._threads = seed, deal, threads
        self._bits = count_bits(bounds)
        self.nodes_at_a_time = max(1, _QUERY_BYTES // (8 * VECTOR_WORDS * bounds.n_rows))
        self._held: dict[str, tuple[NewHint, int]] = {}
        self._asked: dict[str, deque[tuple[int, Words]]] = {}
        self._used, self._next = UsedNonces(), 0
        self._tree: Words | None = None

    def accept_hint(self, peer: str, hint: Payload, offsets: Int32s) -> int:
        what, slots, n_rows = f"the masked bins of {peer}", int(offsets[-1]), self._bounds.n_rows
        if peer not in self._held:
            self._held[peer] = temporary_hint((slots, n_rows), np.uint64), 0
            self._offsets[peer], self._asked[peer] = offsets.copy(), deque()
        made, done = self._held[peer]
        check_payload(hint, what, (np.uint64, (None, n_rows)))
        count = len(hint[0])
        if not (0 < count <= slots - done or count == slots == 0):
            raise CryptoError(f"expected at most {slots - done} slots more, and one at least, got {count} - in {what}")
        made.write(done, hint[0])
        self._held[peer] = made, done + count
        return slots - done - count

    def begin_tree(self, grad: Integers, hess: Integers) -> Iterator[Payload]:
        self._check_start(grad, hess)
        self._tree = pack_rows(grad, hess, self._bits)
        return iter([[]])

    def query(self, positions: Int32s, starts: Int32s) -> Iterator[Payload]:
        if self._tree is None:
            raise CryptoError("expected begin_tree before query")
        n_rows, first, nodes = self._bounds.n_rows, self._next, len(starts) - 1
        masks = np.empty((nodes, VECTOR_WORDS, n_rows), np.uint64)
        masked = np.zeros((nodes, VECTOR_WORDS, n_rows), np.uint64)
        for k, (begin, stop) in enumerate(pairwise(starts)):
            # the holder sees the difference of two vectors under one mask
            self._used.use(vector_nonce(first + k))
            masks[k] = vector_mask(self._seed, first + k, n_rows)
            rows = positions[begin:stop]
            masked[k][:, rows] = self._tree[:, rows]
        # E_t = V_t - A_t
        masked -= masks
        self._next = first + nodes
        self._deal(first, nodes)
        # kept for each server's answer: A_t opens it
        for waiting in self._asked.values():
            waiting.append((first, masks.reshape(-1, n_rows)))
        return iter([[masked, np.array([first], np.int64)]])

    def open(self, peer: str, answer: Payload, totals: Integers, features: Int32s | None = None) -> Integers:
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
        # S_t + F A_t + C_t
        masked = masked_product(self._held[peer][0].array, rows, masks, self._threads)
        words = answer[0] + masked.reshape(nodes, VECTOR_WORDS, -1)
        for k in range(nodes):
            words[k] += product_mask(self._seed, peer, first + k, slots)[:, rows]
        found = unpack_sums(words, self._bits)
        # the error does not say which bin is wrong, which would reveal something of the masks
        if not self._adds_up(found, starts, totals):
            raise CryptoError(f"the bins of a feature do not add up to their node, the job cannot continue - in {what}")
        sums[:, rows] = found
        return sums


class TripleSumsServer(WholeTableServer):
    """A passive party's end, with the dealer's 32-byte seed of the mask B.

    ``shares(first, count)`` returns the dealer's shares D for some vectors, uint64 (count, 2, slots).
    """

    spare = 0

    def __init__(
        self, bounds: SumsBounds, codes: Codes, offsets: Int32s, seed: bytes,
        shares: Callable[[int, int], Words], *, threads: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(bounds, codes, offsets)
        count_bits(bounds)  # raises for sums that would not fit
        self._seed, self._shares, self._threads = seed, shares, threads
        self._next = 0
        self._query: Payload | None = None

    def hint(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Payload]:
        n_features, n_rows = self._columns.shape
        slots = int(self._offsets[-1])
        column = np.repeat(np.arange(n_features), self._bins)
        for part in pieces(slots, max(1, _HINT_BYTES // (8 * n_rows))) or [slice(0, 0)]:
            block = np.empty((part.stop - part.start, n_rows), np.uint64)
            # the slot's row of M: 1 where the row is in the bin
            for slot in range(part.start, part.stop):
                feature = column[slot]
                block[slot - part.start] = self._columns[feature] == slot - self._offsets[feature]
            subtract_matrix_mask(block, self._seed, part.start, self._threads)
            yield [block]

    def add(self, piece: Payload) -> int:
        if self._query is not None:
            raise CryptoError("expected a query in one piece, got a second piece - in a query")
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
        if self._query is None:
            raise CryptoError("expected a query before its answer")
        features, query, self._query = self._growing(), self._query, None
        nodes, first = len(query[0]), int(query[1][0])
        # the client must not choose which shares are added: D_t belongs to the mask of vector t alone
        if first != self._next:
            raise CryptoError(f"expected vector {self._next}, got {first}: a mask may be used only once - in a query")
        self._next += nodes
        words = query[0].reshape(VECTOR_WORDS * nodes, -1)
        slots, sizes = slots_of(self._offsets, features), self._bins[features]
        places = np.cumsum(sizes) - sizes
        # M E_t of the tree's columns, and D_t from the dealer
        sums = selected_sums(self._columns, features, places, len(slots), words, self._threads)
        return [sums.reshape(nodes, VECTOR_WORDS, -1) + self._shares(first, nodes)[:, :, slots]]
