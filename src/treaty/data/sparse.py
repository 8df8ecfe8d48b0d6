"""Columns of a scipy sparse matrix, which become dense one at a time, while they are used.

An absent cell is the number 0, as in scikit-learn and LightGBM, so that a party's sparse and dense tables give the same
model. Missing values are stored as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import Origin, column_from_array, number_columns
from treaty.machine.arrays import Flags


class SparseColumns(Sequence[NDArray[Any]]):
    """The columns of a matrix in scipy's CSC format, float32, or float64 where they have an origin.

    Every access makes a new array (n_rows,), which the caller should not keep. `origins` has an entry for each column.
    """

    def __init__(self, matrix: Any, origins: Sequence[Origin]) -> None:
        self.by_column, self.origins = matrix, origins

    def __len__(self) -> int:
        return len(self.origins)

    @overload
    def __getitem__(self, place: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[NDArray[Any]]: ...
    def __getitem__(self, place: int | slice) -> NDArray[Any] | Sequence[NDArray[Any]]:
        if isinstance(place, slice):
            return SparseColumns(self.by_column[:, place], self.origins[place])
        # raises IndexError behind the last, which ends an iteration
        origin = self.origins[place]
        return column_from_array(dense_column(self.by_column, place), origin=origin).values

    @cached_property
    def _by_row(self) -> Any:
        return self.by_column.tocsr()

    def block(self, rows: slice) -> NDArray[Any]:
        """Return some rows of all columns, dense, (n_rows, n_columns): float64 if a column has an origin."""
        dense = self._by_row[rows].toarray()
        if all(origin is None for origin in self.origins):
            return np.asarray(dense, np.float32)
        column = number_columns(dense, self.origins)
        return np.stack([column(place).values for place in range(len(self))], axis=1)

    def rows(self, chosen: Flags) -> SparseColumns:
        """Return the columns of some rows, bool (n_rows,)."""
        return SparseColumns(self.by_column[np.flatnonzero(chosen)], self.origins)


def joined_columns(tables: Sequence[Sequence[NDArray[Any]]]) -> Sequence[NDArray[Any]]:
    """Return the columns of several tables of the same rows, sparse if all of them are."""
    sparse = [columns for columns in tables if isinstance(columns, SparseColumns)]
    if len(sparse) < len(tables):
        return [column for columns in tables for column in columns]
    # imported here, as importing scipy takes long
    from scipy.sparse import hstack  # type: ignore[import-untyped]

    joined = hstack([columns.by_column for columns in sparse], format="csc")
    return SparseColumns(joined, [origin for columns in sparse for origin in columns.origins])


def is_sparse(data: Any) -> bool:
    """Return whether data is a scipy sparse matrix or array, of any format."""
    # by its methods, as importing scipy takes long
    return hasattr(data, "tocsc") and hasattr(data, "nnz")


def canonical(data: Any) -> Any:
    """Return a copy in CSC format with one entry a cell; float32 where that changes no number.

    Raises ValueError for a matrix whose indices are out of range.
    """
    if hasattr(data, "check_format"):
        # scipy believes what a matrix says of its indices, and would read or write elsewhere
        data.check_format(full_check=True)
    matrix = data.tocsc(copy=True)
    matrix.sum_duplicates()
    if matrix.dtype.kind == "f":
        with np.errstate(over="ignore"):
            narrow = matrix.data.astype(np.float32)
        if np.array_equal(narrow, matrix.data, equal_nan=True):
            matrix.data = narrow
    return matrix


def dense_column(matrix: Any, place: int) -> NDArray[Any]:
    """Return a column of a matrix in CSC format, (n_rows,)."""
    stored = slice(*matrix.indptr[place : place + 2])
    column = np.zeros(matrix.shape[0], matrix.data.dtype)
    column[matrix.indices[stored]] = matrix.data[stored]
    return column
