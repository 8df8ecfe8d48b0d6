"""What an owner of columns remembers of rows whose buckets it randomised, so that nothing it says later is truer.

A row's noisy buckets were drawn once (`bucket_rr`). Were the same row's true side told at the splits of a model, as
that of eval rows and of rows to predict is, thresholds of many splits would give its true bucket. So the owner
recognises its training rows, and decides them by their noisy buckets: a function of what was sent already, which costs
nothing more.

Rows are recognised by their ids, where both tables have some. Without, a row can only be seen to have the same values
as a training row; it may be another person's. What is kept of ids and values are digests under a key of the model:
without the key they can be compared with nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32
_DIGEST_BYTES = 8  # two of 2^20 rows have the same once in 2^24 tables; nobody can seek such rows without the key


class KnownRows(msgspec.Struct):
    """Which rows were trained on: digests uint64 (n_rows,) of values and, where there are some, of ids."""

    key: bytes
    values: NDArray[np.uint64]
    ids: NDArray[np.uint64]

    @classmethod
    def of(cls, matrix: NDArray[Any], ids: Sequence[str] | None) -> KnownRows:
        """Take note of rows (n_rows, n_features), NaN where missing, and their canonical ids."""
        key = secrets.token_bytes(KEY_BYTES)
        none = np.zeros(0, np.uint64)
        return cls(key, _of_values(key, matrix), none if ids is None else _of_ids(key, ids))

    @property
    def have_ids(self) -> bool:
        """Whether rows can be recognised by their ids."""
        return len(self.ids) > 0

    def places(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return each id's first place among the training rows, int64 (n,); -1 where it has none."""
        known, first = np.unique(self.ids, return_index=True)
        asked = _of_ids(self.key, ids)
        at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        return np.where(known[at] == asked, first[at], -1).astype(np.int64)

    def with_equal_values(self, matrix: NDArray[Any]) -> int:
        """Return how many rows have the values of a training row in all columns."""
        if matrix.shape[1] == 0:
            return 0
        return int(np.isin(_of_values(self.key, matrix), self.values).sum())


class RandomisedRows(msgspec.Struct):
    """Training rows with their noisy `buckets`, uint8 (n_rows * n_features,), row by row.

    ``stand_ins[f]`` has for each bucket of column f a value that every split of the model sends where it
    sends the bucket; the last is that of missing values.
    """

    known: KnownRows
    buckets: NDArray[np.uint8]
    stand_ins: list[NDArray[np.float64]]

    def in_place_of_values(self, matrix: NDArray[Any], ids: Sequence[str]) -> NDArray[Any]:
        """Return rows (n, n_features), those trained on with stand-ins for their noisy buckets; `ids` are the rows'."""
        places = self.known.places(ids)
        here = np.flatnonzero(places >= 0)
        if not len(here) or not self.stand_ins:
            return matrix
        shown, noisy = matrix.copy(), self.buckets.reshape(-1, len(self.stand_ins))[places[here]]
        for feature, values in enumerate(self.stand_ins):
            shown[here, feature] = values[noisy[:, feature]]
        return shown


def _of_values(key: bytes, matrix: NDArray[Any]) -> NDArray[np.uint64]:
    """Digest rows; all missing values are the same, and so are zero and minus zero."""
    rows = np.ascontiguousarray(np.where(np.isnan(matrix), matrix.dtype.type(np.nan), matrix + np.float32(0.0)))
    return _digests(key, b"values", map(bytes, rows))


def _of_ids(key: bytes, ids: Sequence[str]) -> NDArray[np.uint64]:
    return _digests(key, b"ids", (text.encode() for text in ids))


def _digests(key: bytes, kind: bytes, contents: Iterable[bytes]) -> NDArray[np.uint64]:
    keyed = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=key, person=kind)

    def digest(content: bytes) -> bytes:
        hashed = keyed.copy()
        hashed.update(content)
        return hashed.digest()

    return np.frombuffer(b"".join(map(digest, contents)), "<u8").astype(np.uint64)
