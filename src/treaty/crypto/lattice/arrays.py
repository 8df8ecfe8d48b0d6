"""Arrays of a hint store: files that are written through memory as rows arrive, and kept only once they are whole."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import weakref
from io import FileIO
from mmap import ACCESS_READ, ACCESS_WRITE, mmap
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError


class NewHint:
    """An array for a store, written in pieces; gone with this object, or at the end of a ``with``, unless it was kept.

    Memory and disk are taken as rows are written, not for all that a peer says will come. Its file is opened without a
    buffer, which would not see what is written through the mapping.
    """

    def __init__(self, shape: tuple[int, ...], dtype: type[np.integer[Any]], file: FileIO | None, path: Path | None):
        self.array: NDArray[Any] = np.empty(shape if file is None else 0, dtype)
        self._file, self.path = file, path
        self._discard = weakref.finalize(self, _discard, file, path)
        if file is not None:
            header = {"descr": self.array.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            self._start = file.tell()
            file.truncate(self._start + math.prod(shape) * self.array.itemsize)  # takes no room yet
            self.array = map_array(file, ACCESS_WRITE)

    def write(self, first: int, rows: NDArray[Any]) -> None:
        """Write rows from the one numbered `first` on; ConfigError if the disk has no room for them."""
        if self._file is not None:
            row = math.prod(self.array.shape[1:]) * self.array.itemsize
            try:
                _make_room(self._file, self._start + first * row, len(rows) * row)
            except OSError as error:
                raise ConfigError(
                    f"cannot keep a hint: {error.strerror} - at {self.path or tempfile.gettempdir()}",
                    public="it has no room for a hint of the lattice map, or for masked bins",
                ) from None
        self.array[first : first + len(rows)] = rows

    def drop(self) -> None:
        """Discard the array, unless it was kept."""
        self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def finish(self) -> tuple[NDArray[Any], bytes]:
        """Return the array, read-only and on the disk, and its file's digest."""
        self.array.flags.writeable = False
        if self._file is None:
            return self.array, b""
        os.fsync(self._file.fileno())
        return map_array(self._file, ACCESS_READ), digest_of(self._file)


def _make_room(file: FileIO, start: int, size: int) -> None:
    """Allocate the disk's space first: on a full disk, writing to a mapped file would end the process."""
    if size and hasattr(os, "posix_fallocate"):  # macOS has none
        os.posix_fallocate(file.fileno(), start, size)


def _discard(file: FileIO | None, path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)  # no such file once the array was kept, which renames it
    if file is not None:
        file.close()


def map_array(file: FileIO, access: int = ACCESS_READ) -> NDArray[Any]:
    """Map the array of a .npy file into memory; the file may be closed then."""
    file.seek(0)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    start = file.tell()
    return np.frombuffer(mmap(file.fileno(), 0, access=access), dtype, math.prod(shape), start).reshape(shape)


def digest_of(file: FileIO) -> bytes:
    """Return the SHA-256 of a whole file."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").digest()
