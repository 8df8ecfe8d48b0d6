"""Bin sums of hidden gradients under an additive cipher: both ends of `encrypted_sums`, in two forms.

A server multiplies ciphertexts per bin, packs k sums into each answer ciphertext, and re-randomises every one.

* *Assumption*: honest-but-curious parties and the security of the cipher (`crypto.additive.ciphers`).
* *Server learns*: which sampled rows are in which node; nothing about gradients beyond their public bounds.
* *Client learns*: sums and count of every bin in every node it asked about, the fullest bin of each column over
  the whole table, and no more: answers are multiplied by n-th powers that the server draws, which hide what went into a
  bin except for its sum, whatever the client built into its key, whose form it proves (`key_proofs`), or into its
  ciphertexts, which must be units. Crafted gradients can still make sums reveal single rows, which no additive cipher
  prevents; an auditor with the key detects them (`encrypted_sums.DisclosedKey`).
* *Both* see how many sums an answer holds and how long it took.

Not sent: each column's fullest bin over the table (the node's total less the others), bins empty in a node (a bit map
says which are sent; the counts say the same). Payloads, by call:

============  ==========================================================================================
setup         the key's numbers, uint64 (numbers, words); int64 n_rows, grad_bound, hess_bound and the key's statements
hint          int32 (features,) the left-out slot of each feature
begin_tree    uint8 (m, 8 words) packed Montgomery forms, one per sampled row; bytes, which may be used unaligned
query         uint8 or uint16 (m,) node of each row, the largest value in no node; int32 (1,) nodes
answer        uint8 (nodes, ceil(slots / 8)) bit map of slots sent; uint64 (ciphertexts, words)
============  ==========================================================================================

*The blind form* shows no rows of nodes: every row of the table is encrypted afresh for each *node*, as grad, hess and
the 1 that counts it if it is in the node, else as 0. The server multiplies the ciphertexts of all rows of a bin. It
cannot tell nodes, samples or gradients from others while the cipher is semantically secure. `begin_tree` carries
nothing, `query` uint8 (nodes, rows, 8 words). A node costs as much as a whole tree does in the other form: 384 bytes a
row under 3072 bits.

Memory beyond the payloads, however many columns there are: a server makes 64 MB of products at a time (up to three
copies while they are sorted), and per thread those of joint cells, fewer than the level's rows. Powers of the factors'
bases take 18 MB under a 3072-bit Okamoto-Uchiyama key (34 MB under Paillier). It keeps a label of one to four bytes per
row and top group of columns.

References: Cheng et al., SecureBoost, arXiv 1901.08755, algorithm 1. Chen et al., SecureBoost+, arXiv 2110.10927.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.ciphers import PrivateKey, PublicKey
from treaty.crypto.additive.key_proofs import Randomiser, merged
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.payload import (
    LEAST_ROWS,
    Packing,
    Payload,
    SumsBounds,
    bins_of,
    check_payload,
    group_starts,
    nodes_of_rows,
)
from treaty.crypto.sums.bin_products import Block, Items, bin_products, keep_features, level_pieces, plan_blocks
from treaty.errors import CryptoError
from treaty.machine.arrays import PIECE_BYTES, Codes, Int32s, Integers, Words, pieces

_MOST_NODES_UINT8 = 254
_MOST_NODES = 65534
_OPENED_AT_A_TIME = 4096  # ciphertexts decrypted and split at a time
PRODUCT_BYTES = 64 << 20  # products made at a time, so that memory does not grow with the number of columns


class AdditiveSumsClient:
    """The active party's end; the key serves this job only. CryptoError if the sums do not fit a plaintext."""

    blind = False
    nodes_at_a_time = _MOST_NODES

    def __init__(self, key: PrivateKey, bounds: SumsBounds, *, threads: int = 1) -> None:
        self._packing = Packing(bounds, key.public.plaintext_bits)
        self._key, self._threads = key, threads
        self.secret_numbers: tuple[int, ...] = key.secret_numbers  # shown to an auditor
        self._left_out: dict[str, Int32s] = {}
        self._offsets: dict[str, Int32s] = {}
        self._rows = self._nodes = -1

    def setup(self) -> Payload:
        (numbers, statements), bounds = self._key.public.to_payload(), self._packing.bounds
        return [numbers, np.array([bounds.n_rows, bounds.grad_bound, bounds.hess_bound, *statements], np.int64)]

    def accept_hint(self, peer: str, hint: Payload, offsets: Int32s) -> int:
        check_payload(hint, f"the hint of {peer}", (np.int32, (len(offsets) - 1,)))
        left_out = hint[0]
        if (left_out < offsets[:-1]).any() or (left_out >= offsets[1:]).any():
            raise CryptoError(f"expected one left-out slot within each feature - in the hint of {peer}")
        self._left_out[peer], self._offsets[peer] = left_out.copy(), offsets.copy()
        return 0

    def begin_tree(self, grad: Integers, hess: Integers) -> Iterator[Payload]:
        if grad.ndim != 1 or grad.shape != hess.shape or grad.dtype != np.int64 or hess.dtype != np.int64:
            raise CryptoError("expected grad and hess as int64 of one length - at the start of a tree")
        self._rows, self._nodes = len(grad), -1
        at_a_time = max(1, PIECE_BYTES // (8 * self._key.public.modulus.words))

        def piece(of: slice) -> Payload:
            return [self._key.encrypt(self._packing.pack_rows(grad[of], hess[of]), self._threads).view(np.uint8)]

        return map(piece, pieces(self._rows, at_a_time) or [slice(0, 0)])

    def query(self, positions: Int32s, starts: Int32s) -> Iterator[Payload]:
        nodes = len(starts) - 1
        if self._rows < 0:
            raise CryptoError("expected begin_tree before query")
        if not 0 <= nodes <= _MOST_NODES:
            raise CryptoError(f"expected at most {_MOST_NODES} nodes in a level, got {nodes}")
        if len(positions) and not 0 <= positions.min() <= positions.max() < self._rows:
            raise CryptoError("a node holds a row that was not sampled - at query")
        # one byte a row if the numbers fit; the largest is for rows in no node
        dtype = np.uint8 if nodes <= _MOST_NODES_UINT8 else np.uint16
        slots = nodes_of_rows(positions, starts, self._rows).astype(dtype)
        self._nodes = nodes
        number = np.array([nodes], np.int32)
        parts = pieces(self._rows, PIECE_BYTES // slots.itemsize) or [slice(0, 0)]
        return ([slots[part], number] for part in parts)

    def open(self, peer: str, answer: Payload, totals: Integers, features: Int32s | None = None) -> Integers:
        if peer not in self._offsets or self._nodes < 0:
            raise CryptoError(f"expected a hint and a query before an answer of {peer}")
        if totals.shape != (self._nodes, 3):
            raise CryptoError(f"expected totals of shape {(self._nodes, 3)}, got {totals.shape}")
        offsets, left_out, modulus = self._offsets[peer], self._left_out[peer], self._key.public.modulus
        slots, what = int(offsets[-1]), f"the answer of {peer}"
        check_payload(answer, what, (np.uint8, (self._nodes, -(-slots // 8))), (np.uint64, (None, modulus.words)))
        sent = np.unpackbits(answer[0], axis=1, bitorder="little")
        # the server never sends left-out slots, and the bit map's last bits are padding
        if sent[:, slots:].any() or sent[:, left_out].any():
            raise CryptoError(f"a left-out or unknown slot is marked as sent - in {what}")
        taken = np.flatnonzero(sent[:, :slots])
        starts = group_starts(len(taken), self._packing.per_plaintext)
        if len(answer[1]) != len(starts) - 1:
            raise CryptoError(f"the number of ciphertexts does not fit the slots marked as sent - in {what}")
        if not modulus.in_range(answer[1]):
            raise CryptoError(f"a ciphertext is not in range - in {what}")
        sums = np.zeros((self._nodes, slots, 3), np.int64)
        # a slot's place among the ones of the bit map is its place among the sums of the plaintexts
        for part in pieces(len(answer[1]), _OPENED_AT_A_TIME):
            plaintexts = self._key.decrypt(answer[1][part], self._threads)
            places = taken[starts[part.start] : starts[part.stop]]
            sums.reshape(-1, 3)[places] = self._packing.unpack_sums(plaintexts, len(places))
        if slots:
            # the left-out slot of a feature has what its other slots lack of the node's total
            per_feature = np.add.reduceat(sums, offsets[:-1], axis=1)
            sums[:, left_out] = totals[:, None] - per_feature
            if (sums[:, left_out, 2] < 0).any():
                raise CryptoError(f"the bins of a feature hold more rows than their node - in {what}")
        return sums


class AdditiveSumsServer:
    """A passive party's end; CryptoError if the bounds do not fit the key, or codes exceed their slots."""

    spare = 0

    def __init__(
        self, key: PublicKey, bounds: SumsBounds, codes: Codes, offsets: Int32s, *, threads: int = 1,
        rerandomise: bool = True,
    ) -> None:  # fmt: skip
        self._packing = Packing(bounds, key.plaintext_bits)
        self._modulus: Modulus = key.modulus
        self._offsets, self._threads = offsets.astype(np.int64), threads
        self._bins = bins = bins_of(codes, offsets)
        counts = [np.bincount(codes[:, f], minlength=bins[f]) for f in range(len(bins))]
        # a column's fullest bin is never multiplied: its sum is what the others lack of the node's
        self._left_out = np.array([int(np.argmax(count)) for count in counts], np.int64)
        self._all_blocks = self._blocks = self._plan(codes)
        self._table_rows = len(codes)
        self._ciphertexts: Words | None = None
        self._rows, self._sampled = np.empty(0, np.int32), False  # rows of the tree; whether they were named
        self._rows_there = 0
        self._slots: NDArray[Any] = np.empty(0, np.uint8)  # of a query: the node of each row
        self._slots_there = self._asked = 0  # rows whose nodes have come; nodes asked about
        self._randomiser = Randomiser(key, threads) if rerandomise else None

    def _plan(self, codes: Codes) -> list[Block]:
        """Return the groups of columns along which ciphertexts are multiplied; a cluster's workers make their own."""
        return plan_blocks(codes, self._left_out, self._bins, self._threads)

    def hint(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Payload]:
        yield [(self._offsets[:-1] + self._left_out).astype(np.int32)]

    def begin_tree(
        self, payload: Payload, rows: Int32s | None, features: Int32s | None = None, n_rows: int | None = None
    ) -> None:
        sampled = rows is not None
        count = self._table_rows if rows is None else len(rows) if n_rows is None else n_rows
        if count > min(self._packing.bounds.n_rows, self._table_rows):
            raise CryptoError(f"expected at most {self._packing.bounds.n_rows} rows, got {count}")
        self._rows = np.empty(count, np.int32) if sampled else np.arange(count, dtype=np.int32)
        self._ciphertexts, self._sampled, self._rows_there = None, sampled, 0
        self._slots_there = 0
        self.add_rows(payload, rows)
        self._begin(features)

    def add_rows(self, payload: Payload, rows: Int32s | None = None) -> None:
        check_payload(payload, "the ciphertexts of a tree", (np.uint8, (None, 8 * self._modulus.words)))
        found = payload[0].view(np.uint64)  # perhaps unaligned: kernels read bytes
        count, there = len(self._rows), self._rows_there + len(found)
        # each piece has a cost of its own: only the last one may be short
        least = min(LEAST_ROWS, PIECE_BYTES // (8 * self._modulus.words), count)
        if there > count or len(found) < (least if there < count else min(1, count)):
            raise CryptoError(f"expected ciphertexts of {count} rows, got {there} - at the start of a tree")
        if (None if rows is None else len(rows)) != (len(found) if self._sampled else None):
            raise CryptoError("expected the row of each ciphertext, where rows are sampled - at the start of a tree")
        if rows is not None and len(rows):
            if not 0 <= rows.min() <= rows.max() < self._table_rows:
                raise CryptoError("a sampled row is beyond the table - at the start of a tree")
            self._rows[self._rows_there : there] = rows
        # no factor hides a number that shares one with n: it would mark its row in every sum
        if not self._modulus.are_units(found, self._threads):
            raise CryptoError("a ciphertext is not in range or not prime to n - at the start of a tree")
        # a message with all rows is used as it came; pieces are joined in memory taken once
        if len(found) == count:
            self._ciphertexts = found
        else:
            if self._ciphertexts is None:
                self._ciphertexts = np.empty((count, self._modulus.words), np.uint64)
            self._ciphertexts[self._rows_there : there] = found
        self._rows_there = there

    def _begin(self, features: Int32s | None) -> None:
        self._blocks = self._all_blocks
        if features is not None:
            kept = set(features.tolist())
            self._blocks = [Block(block.columns, keep_features(block.groups, kept)) for block in self._all_blocks]

    def end_tree(self) -> None:
        self._ciphertexts, self._slots_there = None, 0

    def add(self, piece: Payload) -> int:
        if self._ciphertexts is None:
            raise CryptoError("expected begin_tree before a query")
        dtype = np.uint16 if len(piece) == 2 and piece[0].dtype == np.uint16 else np.uint8
        check_payload(piece, "a query", (dtype, (None,)), (np.int32, (1,)))
        rows, nodes, there = len(self._rows), int(piece[1][0]), self._slots_there + len(piece[0])
        if not self._slots_there:
            self._slots, self._asked = np.empty(rows, dtype), nodes
        same = self._slots.dtype == dtype and self._asked == nodes
        if not same or there > rows or len(piece[0]) < (LEAST_ROWS if there < rows else min(1, rows)):
            raise CryptoError(f"expected the nodes of {rows} rows, got {there} - in a query")
        self._slots[self._slots_there : there] = piece[0]
        self._slots_there = there
        return nodes

    def answer(self) -> Payload:
        there, self._slots_there = self._slots_there, 0
        if self._ciphertexts is None or self._rows_there != len(self._rows):
            raise CryptoError(f"expected ciphertexts of {len(self._rows)} rows, got {self._rows_there} - at a query")
        if there != len(self._rows):
            raise CryptoError(f"expected the nodes of {len(self._rows)} rows, got {there} - in a query")
        slots, nodes, nowhere = self._slots, self._asked, int(np.iinfo(self._slots.dtype).max)
        if not 0 <= nodes <= nowhere - 1 or ((slots >= nodes) & (slots != nowhere)).any():
            raise CryptoError(f"a row is in a node beyond the {nodes} of the query - in a query")
        # a stable sort keeps the rows of a node in order
        counts = np.bincount(slots, minlength=nowhere + 1)[:nodes]
        positions = np.argsort(slots, kind="stable")[: int(counts.sum())].astype(np.int32)
        return self._answer(positions, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    def _answer(self, positions: Int32s, node_starts: Integers) -> Payload:
        """Multiply the ciphertexts at these positions, node after node."""
        sent = np.zeros((len(node_starts) - 1, int(self._offsets[-1])), np.uint8)
        made, pending = [], np.empty((0, self._modulus.words), np.uint64)
        for places, products in self._products(positions, node_starts):
            sent.reshape(-1)[places] = 1
            pending = np.concatenate([pending, products]) if len(pending) else products
            # the rest that does not fill a plaintext waits for the next products
            whole = len(pending) - len(pending) % self._packing.per_plaintext
            made.append(self._compress(pending[:whole]))
            pending = pending[whole:].copy()
        made.append(self._compress(pending))
        return [np.packbits(sent, axis=1, bitorder="little"), np.concatenate(made)]

    def _products(self, positions: Int32s, node_starts: Integers) -> Iterator[tuple[Integers, Words]]:
        """Return products of ciphertexts, some at a time, with their places node * slots + slot, ascending."""
        assert self._ciphertexts is not None
        rows = Items(self._ciphertexts, positions, self._rows[positions], node_starts, np.arange(len(node_starts) - 1))
        most = PRODUCT_BYTES // (8 * self._modulus.words)
        for piece in level_pieces(self._blocks, self._bins, np.diff(node_starts), most):
            groups = [group for block in self._blocks[piece.blocks] for group in block.groups]
            held = rows.of_range(piece.first, piece.stop)
            yield bin_products(self._modulus, groups, self._offsets, held, self._threads)

    def close(self) -> None:
        pass  # nothing outlives the job

    def _compress(self, products: Words) -> Words:
        together, bits = self._packing.per_plaintext, self._packing.sum_bits
        return merged(self._modulus, products, together, bits, self._randomiser, self._threads)


_MOST_BLIND_NODES = 254  # so that a node's number fits a byte
_NOTHING = np.empty((0, 0, 0), np.uint8)


class BlindSumsClient(AdditiveSumsClient):
    """The active party's end of the blind form; the bounds' n_rows is the number of rows of the table."""

    blind = True

    def __init__(self, key: PrivateKey, bounds: SumsBounds, *, threads: int = 1) -> None:
        super().__init__(key, bounds, threads=threads)
        one_node = 8 * key.public.modulus.words * bounds.n_rows
        self.nodes_at_a_time = max(1, min(_MOST_BLIND_NODES, PIECE_BYTES // one_node))

    def begin_tree(self, grad: Integers, hess: Integers) -> Iterator[Payload]:
        if len(grad) != self._packing.bounds.n_rows or grad.shape != hess.shape:
            raise CryptoError(f"expected the derivatives of {self._packing.bounds.n_rows} rows, got {len(grad)}")
        self._plaintexts = self._packing.pack_rows(grad, hess)
        self._rows = len(grad)
        return iter([[]])

    def query(self, positions: Int32s, starts: Int32s) -> Iterator[Payload]:
        if self._rows < 0:
            raise CryptoError("expected begin_tree before query")
        nodes, plaintexts = len(starts) - 1, self._plaintexts
        node_of_row = nodes_of_rows(positions, starts, self._rows)

        def piece(rows: slice) -> Payload:
            held = node_of_row[rows] == np.arange(nodes)[:, np.newaxis]
            # zeros outside the node, encrypted afresh like the rest: the server cannot tell them apart
            vectors = plaintexts[rows] * held[:, :, np.newaxis].astype(np.uint64)
            made = self._key.encrypt(vectors.reshape(-1, plaintexts.shape[1]), self._threads)
            return [made.view(np.uint8).reshape(*held.shape, -1)]

        of_a_row = 8 * self._key.public.modulus.words * max(1, nodes)
        return map(piece, pieces(self._rows, max(1, PIECE_BYTES // of_a_row)) or [slice(0, 0)])

    def open(self, peer: str, answer: Payload, totals: Integers, features: Int32s | None = None) -> Integers:
        self._nodes = len(totals)  # the next query may be on its way already
        return super().open(peer, answer, totals, features)


class BlindSumsServer(AdditiveSumsServer):
    """A passive party's end of the blind form."""

    _growing = False
    _there = 0  # rows of a query that have come, of those that `_held` has room for
    _held = _NOTHING

    def begin_tree(
        self, payload: Payload, rows: Int32s | None, features: Int32s | None = None, n_rows: int | None = None
    ) -> None:
        check_payload(payload, "the start of a tree")
        if rows is not None or self._table_rows != self._packing.bounds.n_rows:
            raise CryptoError(
                f"expected all {self._table_rows} rows of the table, and no sample - at the start of a tree"
            )
        self._growing = True
        self._begin(features)

    def end_tree(self) -> None:
        self._growing, self._there, self._held = False, 0, _NOTHING

    def add_rows(self, payload: Payload, rows: Int32s | None = None) -> None:
        raise CryptoError("expected nothing more - at the start of a tree")

    def add(self, piece: Payload) -> int:
        if not self._growing:
            raise CryptoError("expected begin_tree before a query")
        nodes = len(self._held) if self._there else None
        check_payload(piece, "a query", (np.uint8, (nodes, None, 8 * self._modulus.words)))
        found, rows = piece[0], self._table_rows
        if not 0 < len(found) <= _MOST_BLIND_NODES:
            raise CryptoError(f"expected 1 to {_MOST_BLIND_NODES} nodes in a query, got {len(found)}")
        there, least = self._there + found.shape[1], min(LEAST_ROWS, PIECE_BYTES // found[:, 0:1].nbytes or 1)
        if there > rows or found.shape[1] < (least if there < rows else min(1, rows)):
            raise CryptoError(f"expected ciphertexts of {rows} rows, got {there} - in a query")
        if not self._modulus.are_units(found.reshape(-1, found.shape[2]).view(np.uint64), self._threads):
            raise CryptoError("a ciphertext is not in range or not prime to n - in a query")
        if found.shape[1] == rows:
            self._held = found  # not copied
        else:
            if not self._there:
                self._held = np.empty((len(found), rows, found.shape[2]), np.uint8)
            self._held[:, self._there : there] = found
        self._there = there
        return len(found)

    def answer(self) -> Payload:
        (there, self._there), (found, self._held) = (self._there, 0), (self._held, _NOTHING)
        if there != self._table_rows:
            raise CryptoError(f"expected ciphertexts of {self._table_rows} rows, got {there} - in a query")
        # row r of node k is ciphertext k n + r: each node has its own of all rows
        nodes, n_rows = found.shape[:2]
        self._ciphertexts = found.reshape(nodes * n_rows, -1).view(np.uint64)
        self._rows = np.tile(np.arange(n_rows, dtype=np.int32), nodes)
        try:
            positions = np.arange(nodes * n_rows, dtype=np.int32)
            return self._answer(positions, n_rows * np.arange(nodes + 1, dtype=np.int64))
        finally:
            self._ciphertexts = None
