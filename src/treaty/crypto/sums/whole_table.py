"""What `lattice_sums` and `triple_sums` share: ends of a cipher whose queries are vectors over all rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload, SumsBounds, check_payload
from treaty.crypto.sums.bin_products import Index
from treaty.errors import CryptoError


def slots_of(offsets: NDArray[np.int32] | Index, features: Index) -> Index:
    """Slots of some features, in order."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(offsets[f], offsets[f + 1]) for f in features)])


def bins_of(codes: NDArray[np.uint8], offsets: NDArray[np.int32]) -> Index:
    """Return the number of slots of each feature; CryptoError unless codes (rows, features) lie within them."""
    bins = np.diff(offsets).astype(np.int64)
    if codes.ndim != 2 or codes.dtype != np.uint8 or len(bins) != codes.shape[1] or (bins < 1).any():
        raise CryptoError("expected uint8 codes (rows, features) and offsets with a slot for every feature")
    if len(codes) and (codes.max(axis=0, initial=0) >= bins).any():
        raise CryptoError("a bin code lies beyond its feature's slots")
    return bins


def _sampled(features: NDArray[np.int32] | None, count: int) -> Index:
    return np.arange(count, dtype=np.int64) if features is None else features.astype(np.int64)


class WholeTableClient:
    """The active party's end: servers are told neither rows of nodes nor those of the tree's sample."""

    blind = True

    def __init__(self, bounds: SumsBounds) -> None:
        self._bounds = bounds  # n_rows is the number of rows of the table
        self._offsets: dict[str, NDArray[np.int32]] = {}

    def setup(self) -> Payload:
        """Return the bounds; see `SumsClient.setup`."""
        return [np.array([self._bounds.n_rows, self._bounds.grad_bound, self._bounds.hess_bound], np.int64)]

    def _check_start(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> None:
        n_rows = self._bounds.n_rows
        if len(grad) != n_rows or grad.shape != hess.shape:
            raise CryptoError(f"expected the derivatives of {n_rows} rows, got {len(grad)} - at a tree's start")
        self._bounds.check(grad, hess, "a tree's start")

    def _sampled_slots(self, peer: str, features: NDArray[np.int32] | None) -> tuple[Index, Index]:
        """Return a server's slots in the tree's sample of columns, and where each column begins among them."""
        offsets = self._offsets[peer]
        chosen = _sampled(features, len(offsets) - 1)
        sizes = np.diff(offsets)[chosen]
        return slots_of(offsets, chosen), (np.cumsum(sizes) - sizes).astype(np.int64)

    def _adds_up(self, sums: NDArray[np.int64], starts: Index, totals: NDArray[np.int64]) -> bool:
        """Tell whether sums (nodes, slots, 3) are possible, and each column's add up to the totals (nodes, 3)."""
        per_column = np.add.reduceat(sums, starts, axis=1)
        return self._bounds.allow(sums) and bool((per_column == totals[:, np.newaxis]).all())


class WholeTableServer:
    """A passive party's end: codes (rows, features) of all rows, and the slots of its columns; see `make_server`."""

    def __init__(self, bounds: SumsBounds, codes: NDArray[np.uint8], offsets: NDArray[np.int32]) -> None:
        if len(codes) != bounds.n_rows:
            raise CryptoError(f"expected {bounds.n_rows} rows, got {len(codes)} - in the set-up")
        self._bounds, self._offsets, self._bins = bounds, offsets.astype(np.int64), bins_of(codes, offsets)
        self._columns = np.ascontiguousarray(codes.T)
        self._features: Index | None = None  # of the tree that is being grown

    def begin_tree(
        self,
        payload: Payload,
        rows: NDArray[np.int32] | None,
        features: NDArray[np.int32] | None = None,
        n_rows: int | None = None,
    ) -> None:
        """Note the tree's columns; see `SumsServer.begin_tree`. Its rows are always all of the table."""
        check_payload(payload, "the start of a tree")
        if rows is not None:
            raise CryptoError(f"expected all {self._bounds.n_rows} rows, got {len(rows)} - at the start of a tree")
        self._features = _sampled(features, len(self._bins))

    def add_rows(self, payload: Payload, rows: NDArray[np.int32] | None = None) -> None:
        """Refuse more of a tree, which has no rows of its own; see `SumsServer.add_rows`."""
        raise CryptoError("expected nothing more - at the start of a tree")

    def end_tree(self) -> None:
        self._features = None

    def _growing(self) -> Index:
        """Return the tree's columns; CryptoError between trees."""
        if self._features is None:
            raise CryptoError("expected begin_tree before a query")
        return self._features
