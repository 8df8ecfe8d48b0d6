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

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload, SumsBounds, check_payload
from treaty.crypto.sums.additive_sums import AdditivePrivateKey, AdditiveSumsClient, AdditiveSumsServer
from treaty.errors import CryptoError

_QUERY_BYTES = 64 << 20  # of a level's nodes in one message; a larger node has a message of its own
_MOST_NODES = 254  # so that a node's number fits a byte


class BlindSumsClient(AdditiveSumsClient):
    """The active party's end, as `AdditiveSumsClient`, where n_rows is the number of rows of the table."""

    blind = True

    def __init__(self, key: AdditivePrivateKey, bounds: SumsBounds, *, threads: int = 1) -> None:
        super().__init__(key, bounds, threads=threads)
        one_node = 8 * key.public.modulus.words * bounds.n_rows
        self.nodes_at_a_time = max(1, min(_MOST_NODES, _QUERY_BYTES // one_node))

    def begin_tree(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Payload:
        """Note the derivatives of all rows of the table; see `SumsClient.begin_tree`."""
        if len(grad) != self._packing.bounds.n_rows or grad.shape != hess.shape:
            raise CryptoError(f"expected the derivatives of {self._packing.bounds.n_rows} rows, got {len(grad)}")
        self._plaintexts = self._packing.pack_rows(grad, hess)
        self._rows = len(grad)
        return []

    def query(self, positions: NDArray[np.int32], starts: NDArray[np.int32]) -> Payload:
        """Encrypt all rows once for each node; see `SumsClient.query`."""
        if self._rows < 0:
            raise CryptoError("expected begin_tree before query")
        nodes, plaintexts = len(starts) - 1, self._plaintexts
        vectors = np.zeros((nodes, *plaintexts.shape), np.uint64)
        node = np.repeat(np.arange(nodes), np.diff(starts))
        held = positions[starts[0] : starts[-1]]
        vectors[node, held] = plaintexts[held]
        made = self._key.encrypt(vectors.reshape(-1, plaintexts.shape[1]), self._threads)
        return [made.view(np.uint8).reshape(nodes, self._rows, -1)]

    def open(
        self, peer: str, answer: Payload, totals: NDArray[np.int64], features: NDArray[np.int32] | None = None
    ) -> NDArray[np.int64]:
        """Decrypt the sums of the oldest query that a server has not answered; see `SumsClient.open`."""
        self._nodes = len(totals)  # the next query may be on its way already
        return super().open(peer, answer, totals, features)


class BlindSumsServer(AdditiveSumsServer):
    """A passive party's end, as `AdditiveSumsServer`."""

    _growing = False

    def begin_tree(self, payload: Payload, rows: NDArray[np.int32], features: NDArray[np.int32] | None = None) -> None:
        """Note the tree's columns; see `SumsServer.begin_tree`. Its rows are always all of the table."""
        check_payload(payload, "the start of a tree")
        if not len(rows) == self._table_rows == self._packing.bounds.n_rows:
            raise CryptoError(f"expected all {self._table_rows} rows, got {len(rows)} - at the start of a tree")
        self._growing = True
        self._begin(features)

    def end_tree(self) -> None:
        """See `SumsServer.end_tree`."""
        self._growing = False

    def nodes_of(self, query: Payload) -> int:
        """Return how many nodes a query is about; see `SumsServer.nodes_of`."""
        check_payload(query, "a query", (np.uint8, (None, self._table_rows, 8 * self._modulus.words)))
        if not 0 < len(query[0]) <= _MOST_NODES:
            raise CryptoError(f"expected 1 to {_MOST_NODES} nodes in a query, got {len(query[0])}")
        return len(query[0])

    def answer(self, query: Payload) -> Payload:
        """Return the encrypted sums of every bin over all rows, node by node; see `SumsServer.answer`."""
        if not self._growing:
            raise CryptoError("expected begin_tree before a query")
        nodes, n_rows = self.nodes_of(query), self._table_rows
        self._ciphertexts = query[0].reshape(nodes * n_rows, -1).view(np.uint64)
        if not self._modulus.are_units(self._ciphertexts, self._threads):
            raise CryptoError("a ciphertext is not in range or not prime to n - in a query")
        self._rows = np.tile(np.arange(n_rows, dtype=np.int32), nodes)
        try:
            return super().answer([np.repeat(np.arange(nodes, dtype=np.uint8), n_rows), np.array([nodes], np.int32)])
        finally:
            self._ciphertexts = None
