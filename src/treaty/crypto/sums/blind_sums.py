"""Bin sums under an additive cipher that show no rows of nodes: a ciphertext per row and *node*, zeros outside it.

What `additive_sums` does once per tree is done once per node: every row of the table is encrypted afresh, as grad, hess
and the 1 that counts it if it is in the node, else as 0. The server multiplies the ciphertexts of all rows of a bin and
re-randomises its answers. It cannot tell nodes, samples or gradients from others while the cipher is semantically
secure; the client learns what it learns in `additive_sums`.

Payloads differ from those of `additive_sums` in two calls:

============  ==========================================================================================
begin_tree    nothing
query         uint8 (nodes, rows, 8 words) packed Montgomery forms
============  ==========================================================================================

A node costs as much as a whole tree does there, in time and in bytes: 384 bytes a row under 3072 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import LEAST_ROWS, Payload, SumsBounds, check_payload
from treaty.crypto.sums.additive_sums import AdditivePrivateKey, AdditiveSumsClient, AdditiveSumsServer
from treaty.errors import CryptoError
from treaty.machine.arrays import PIECE_BYTES, pieces

_MOST_NODES = 254  # so that a node's number fits a byte


_NOTHING = np.empty((0, 0, 0), np.uint8)


class BlindSumsClient(AdditiveSumsClient):
    """The active party's end, as `AdditiveSumsClient`, where n_rows is the number of rows of the table."""

    blind = True

    def __init__(self, key: AdditivePrivateKey, bounds: SumsBounds, *, threads: int = 1) -> None:
        super().__init__(key, bounds, threads=threads)
        one_node = 8 * key.public.modulus.words * bounds.n_rows
        self.nodes_at_a_time = max(1, min(_MOST_NODES, PIECE_BYTES // one_node))

    def begin_tree(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Iterator[Payload]:
        """Note the derivatives of all rows of the table; see `SumsClient.begin_tree`."""
        if len(grad) != self._packing.bounds.n_rows or grad.shape != hess.shape:
            raise CryptoError(f"expected the derivatives of {self._packing.bounds.n_rows} rows, got {len(grad)}")
        self._plaintexts = self._packing.pack_rows(grad, hess)
        self._rows = len(grad)
        return iter([[]])

    def query(self, positions: NDArray[np.int32], starts: NDArray[np.int32]) -> Iterator[Payload]:
        """Encrypt all rows once for each node, some rows after the others; see `SumsClient.query`."""
        if self._rows < 0:
            raise CryptoError("expected begin_tree before query")
        nodes, plaintexts = len(starts) - 1, self._plaintexts
        node_of_row = np.full(self._rows, -1, np.int16)
        node_of_row[positions[starts[0] : starts[-1]]] = np.repeat(np.arange(nodes, dtype=np.int16), np.diff(starts))

        def piece(rows: slice) -> Payload:
            held = node_of_row[rows] == np.arange(nodes, dtype=np.int16)[:, np.newaxis]
            vectors = plaintexts[rows] * held[:, :, np.newaxis].astype(np.uint64)
            made = self._key.encrypt(vectors.reshape(-1, plaintexts.shape[1]), self._threads)
            return [made.view(np.uint8).reshape(*held.shape, -1)]

        of_a_row = 8 * self._key.public.modulus.words * max(1, nodes)
        return map(piece, pieces(self._rows, max(1, PIECE_BYTES // of_a_row)) or [slice(0, 0)])

    def open(
        self, peer: str, answer: Payload, totals: NDArray[np.int64], features: NDArray[np.int32] | None = None
    ) -> NDArray[np.int64]:
        """Decrypt the sums of the oldest query that a server has not answered; see `SumsClient.open`."""
        self._nodes = len(totals)  # the next query may be on its way already
        return super().open(peer, answer, totals, features)


class BlindSumsServer(AdditiveSumsServer):
    """A passive party's end, as `AdditiveSumsServer`."""

    _growing = False
    _there = 0  # rows of a query that have come, of those that `_held` has room for
    _held = _NOTHING

    def begin_tree(
        self,
        payload: Payload,
        rows: NDArray[np.int32] | None,
        features: NDArray[np.int32] | None = None,
        n_rows: int | None = None,
    ) -> None:
        """Note the tree's columns; see `SumsServer.begin_tree`. Its rows are always all of the table."""
        check_payload(payload, "the start of a tree")
        if rows is not None or self._table_rows != self._packing.bounds.n_rows:
            raise CryptoError(f"expected all {self._table_rows} rows, got others - at the start of a tree")
        self._growing = True
        self._begin(features)

    def end_tree(self) -> None:
        self._growing, self._there, self._held = False, 0, _NOTHING

    def add_rows(self, payload: Payload, rows: NDArray[np.int32] | None = None) -> None:
        """Refuse more of a tree, which has no rows of its own; see `SumsServer.add_rows`."""
        raise CryptoError("expected nothing more - at the start of a tree")

    def add(self, piece: Payload) -> int:
        """Keep the ciphertexts of some more rows, which the answer needs all; see `SumsServer.add`."""
        if not self._growing:
            raise CryptoError("expected begin_tree before a query")
        nodes = len(self._held) if self._there else None
        check_payload(piece, "a query", (np.uint8, (nodes, None, 8 * self._modulus.words)))
        found, rows = piece[0], self._table_rows
        if not 0 < len(found) <= _MOST_NODES:
            raise CryptoError(f"expected 1 to {_MOST_NODES} nodes in a query, got {len(found)}")
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
        """Return the encrypted sums of every bin over all rows, node by node; see `SumsServer.answer`."""
        (there, self._there), (found, self._held) = (self._there, 0), (self._held, _NOTHING)
        if there != self._table_rows:
            raise CryptoError(f"expected ciphertexts of {self._table_rows} rows, got {there} - in a query")
        nodes, n_rows = found.shape[:2]
        self._ciphertexts = found.reshape(nodes * n_rows, -1).view(np.uint64)
        self._rows = np.tile(np.arange(n_rows, dtype=np.int32), nodes)
        if self._factors:
            self._factors.stop()
        try:
            positions = np.arange(nodes * n_rows, dtype=np.int32)
            return self._answer(positions, n_rows * np.arange(nodes + 1, dtype=np.int64))
        finally:
            self._ciphertexts = None
