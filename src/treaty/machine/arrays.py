"""Short names of arrays' types, arrays in mapped files, which need not fit into memory, and unnamed temporary files.

A mapped or temporary file has no name: only its own process can open it, and it is gone with its last user, also after
a crash. An array made of an array on disk lies on disk, too, in the same folder (`contiguous`, `side_by_side`). So the
code between reading a table and growing trees need not know where the table is.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from treaty.errors import ConfigError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Codes = NDArray[np.unsignedinteger[Any]]  # bins: uint8, or uint16 where a column has more than 255

Kind = TypeVar("Kind", bound=np.generic)

PIECE_BYTES = 60_000_000
"""Most bytes of arrays in a message; larger ones are sent in several."""

# cells that are transposed at a time
_AT_ONCE = 1 << 22


def pieces(count: int, length: int) -> list[slice]:
    """Cut ``range(count)`` into slices of at most `length`."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


class _Mapping(mmap.mmap):
    """A mapped file that knows the folder it was made in."""

    folder: Path


def new(shape: tuple[int, ...], dtype: DTypeLike, folder: Path) -> NDArray[Any]:
    """Return an array of zeros in C order that lies in a file of `folder`; its room is taken at once.

    Raises ConfigError where the folder cannot be used or has not enough room.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    try:
        with tempfile.TemporaryFile(buffering=0, prefix="treaty-", dir=folder) as file:
            # writing to a mapped hole of a full disk would kill the process
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                block = bytes(1 << 20)
                for start in range(0, size, len(block)):
                    os.write(file.fileno(), block[: size - start])
            mapping = _Mapping(file.fileno(), size)
    except OSError as error:
        raise unusable(folder, size, error.strerror or str(error)) from None
    mapping.folder = folder
    return np.ndarray(shape, dtype, buffer=mapping)


def check_room(folder: Path, size: int) -> None:
    """Raise ConfigError unless `folder` is there and has room for so many bytes."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise unusable(folder, size, error.strerror or str(error)) from None
    if free < size:
        raise unusable(folder, size, f"{free / 1e9:,.1f} GB are free")


def folder_of(array: Any) -> Path | None:
    """Return the folder of the file that holds an array, or a part of it; None for one in memory."""
    mapping = _mapping_of(array)
    return mapping.folder if isinstance(mapping, _Mapping) else None


def contiguous(array: NDArray[Kind]) -> NDArray[Kind]:
    """Return a table (rows, columns) in C order, as it is or copied; the copy lies on disk if the table does."""
    folder = folder_of(array)
    if array.flags.c_contiguous or folder is None:
        return np.ascontiguousarray(array)
    out: NDArray[Kind] = new(array.shape, array.dtype, folder)
    long = int(np.argmax(array.shape))
    # transpose a bounded block at a time, and release its pages: the table need not fit into memory
    step = max(1, _AT_ONCE // max(1, array.size // array.shape[long]))
    for start in range(0, array.shape[long], step):
        block = (slice(None),) * long + (slice(start, start + step),)
        out[block] = array[block]
        forget(out)
        forget(array)
    return out


def copied(array: NDArray[Kind], large: int = 1 << 28) -> NDArray[Kind]:
    """Return a copy to keep for a while: on disk, if it has `large` bytes or more and there is room."""
    if array.nbytes < large:
        return array.copy()
    try:
        out: NDArray[Kind] = new(array.shape, array.dtype, Path(tempfile.gettempdir()))
    except ConfigError:
        return array.copy()
    out[...] = array
    forget(out)
    return out


def side_by_side(tables: Sequence[NDArray[Kind]]) -> NDArray[Kind]:
    """Return the columns of tables of the same rows as one table, on disk, column by column, if one of them is."""
    folder = next((folder for table in tables if (folder := folder_of(table)) is not None), None)
    if folder is None:
        return np.concatenate(tables, axis=1)
    ends = np.cumsum([table.shape[1] for table in tables])
    out: NDArray[Kind] = new((int(ends[-1]), len(tables[0])), np.result_type(*tables), folder)
    for table, end in zip(tables, ends.tolist(), strict=True):
        for column in range(table.shape[1]):
            out[end - table.shape[1] + column] = table[:, column]
            forget(out)
    return out.T


def forget(array: NDArray[Any]) -> None:
    """Release the memory of a mapped file's pages until they are next used; do nothing for an array in memory."""
    mapping = _mapping_of(array)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def _mapping_of(array: Any) -> mmap.mmap | None:
    while isinstance(array, np.ndarray):
        array = array.base
    if isinstance(array, memoryview):
        array = array.obj
    return array if isinstance(array, mmap.mmap) else None


def unusable(folder: Path, size: int, why: str) -> ConfigError:
    """Return the error of a folder that cannot take so many bytes."""
    return ConfigError(
        f"cannot keep a table that is too large for memory in {folder}, which needs {size / 1e9:,.1f} GB there: {why}; "
        "make room, or name another folder: TMPDIR, or store in a job file",
        public="its folder for tables that are too large for memory cannot be used",
    )


class FileColumn:
    """An array that is written to a file piece by piece and mapped into memory when complete."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._file = open_unnamed()

    def append(self, values: NDArray[Any]) -> None:
        """Append values, (n,)."""
        write_all(self._file, np.ascontiguousarray(values, self._dtype))
        self.length += len(values)

    def mapped(self) -> NDArray[Any]:
        """Return the file's content, read-only; a closed file exists as long as an array of it does."""
        content = mmap.mmap(self._file.fileno(), self.length * self._dtype.itemsize, access=mmap.ACCESS_READ)
        return np.frombuffer(content, self._dtype)

    def close(self) -> None:
        self._file.close()


def open_unnamed() -> IO[bytes]:
    """Open a temporary file that no other process can open."""
    try:
        return tempfile.TemporaryFile(buffering=0, prefix="treaty-")
    except OSError as error:
        raise _no_temporary_files(error) from None


def write_all(file: IO[bytes], values: NDArray[Any]) -> None:
    left = values.reshape(-1).view(np.uint8).data
    try:
        file.seek(0, 2)
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise _no_temporary_files(error) from None


def read_all(file: IO[bytes], at: int, into: NDArray[Any]) -> None:
    """Fill an array from a place in a file."""
    left = into.view(np.uint8).data
    file.seek(at)
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        assert count, "a temporary file is shorter than what was written to it"
        left = left[count:]


def _no_temporary_files(error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use the folder of temporary files, {tempfile.gettempdir()}: {error.strerror}; long lists of ids need "
        "some 210 bytes of it per id - set TMPDIR to a folder with room",
        public="its folder of temporary files cannot be used",
    )
