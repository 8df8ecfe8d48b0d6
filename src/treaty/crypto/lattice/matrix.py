"""The server's secret matrix of a linear map, and the layout of numbers in a vector's entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.lattice.parameters import LEAST_PRIME, Parameters
from treaty.errors import CryptoError


@dataclass(frozen=True, slots=True)
class Field:
    """A part of a message: entries of vectors are sums of fields of size at most `bound`, shifted by `shift` bits.

    Only the topmost field of a `node` may be signed. Where there are several nodes, an entry is of one of them: the
    fields of the others are 0.
    """

    shift: int
    bound: int
    signed: bool = False
    node: int = 0


def check_fields(fields: Sequence[Field], parameters: Parameters) -> None:
    """Raise CryptoError for fields too wide for the arithmetic of `kernels.encrypt_block`."""
    top, sizes, bounds = 1 << 31, Counter[int](), Counter[int]()
    for field in fields:
        sizes[field.node] += top if field.signed else field.bound
        bounds[field.node] += field.bound
    if max(sizes.values()) > 2 * top:
        raise CryptoError("vectors of such large numbers do not fit the lattice map - lower fractional_bits or weights")
    largest = max(bounds.values()) if parameters.masked else max(field.bound for field in fields)
    if largest >= min(parameters.primes):
        raise CryptoError("expected numbers below the primes in a vector - in the lattice map; lower weights")


class SecretMatrix:
    """The server's matrix: indicators of the codes of columns, or columns themselves.

    Row s is the indicator of code_of_row[s] in columns[column_of_row[s]], or that column where the code is -1.
    `columns` is uint8 or int32 (columns, n) in C order; the others are int64 (rows,).
    """

    def __init__(self, columns: NDArray[Any], column_of_row: NDArray[np.int64], code_of_row: NDArray[np.int64]) -> None:
        self.columns, self.column_of_row, self.code_of_row = columns, column_of_row, code_of_row

    @classmethod
    def of_bins(cls, codes: NDArray[np.uint8], offsets: NDArray[np.int64]) -> SecretMatrix:
        """Take the bins of all features as rows: bin c of feature f, of codes (features, n), is row offsets[f] + c.

        CryptoError if a feature has no bins, or a code is not among them.
        """
        sizes = np.diff(offsets)
        if len(sizes) != len(codes) or (sizes < 1).any() or (codes.max(axis=1, initial=0) >= sizes).any():
            raise CryptoError("expected codes within the bins of their feature - in the matrix of the lattice map")
        feature = np.repeat(np.arange(len(sizes)), sizes)
        return cls(codes, feature, np.arange(int(offsets[-1])) - offsets[feature])

    @classmethod
    def of_integers(cls, values: NDArray[np.int32]) -> SecretMatrix:
        """Take these rows, int32 (rows, n); CryptoError if an entry is not below the smallest prime in size."""
        if len(values) and np.abs(values.astype(np.int64)).max(initial=0) >= LEAST_PRIME:
            raise CryptoError(f"expected entries below {LEAST_PRIME} in size - in the matrix of the lattice map")
        rows = np.arange(len(values))
        return cls(np.ascontiguousarray(values), rows, np.full(len(values), -1))

    @property
    def rows(self) -> int:
        return len(self.column_of_row)

    @property
    def length(self) -> int:
        """Entries of a row, n."""
        return int(self.columns.shape[1])

    @cached_property
    def is_bins(self) -> bool:
        """Whether every row is an indicator."""
        return bool((self.code_of_row >= 0).all())
