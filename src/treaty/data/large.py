"""Sorting more records than memory holds: by parts, in temporary files that have no name.

Only its own process can open a file: it is made with mode 0600 and unlinked at once (or never linked,
where the system can), so it is gone when closed, also after a crash. Files lie in the folder of `tempfile`, which
``TMPDIR`` names.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from treaty.errors import ConfigError
from treaty.machine.kernels import kernel, new_array

IN_MEMORY = 1 << 18
"""Records that are kept in memory; longer lists lie in files. Work is done on half of that at a time."""

WORDS = 1 << 64
"""The span of a key of words, which are compared as such and should be hashes."""


def part_of(in_memory: int) -> int:
    """Return the number of records to work on at a time."""
    return max(1, in_memory // 2)


def records(dtype: np.dtype[Any], **columns: Any) -> NDArray[Any]:
    """Join columns of one length into a structured array (n,); the first column must be an array."""
    out = np.empty(len(columns[next(iter(columns))]), dtype)
    for name, values in columns.items():
        out[name] = values
    return out


class SortedRecords:
    """Records that come back in the order of a key; of equal keys those added first come first.

    Records are dealt to parts by ranges of the key, and each part is sorted when it is read. The field `key` holds
    numbers below `span` (at most `WORDS`), or uint64 words, shape (n,) or (n, 2); keys should be spread evenly over
    the span, or parts grow too large. `rows` is about how many records will come; two of the same span and number have
    the same parts. At most `in_memory` records lie in memory.
    """

    def __init__(self, dtype: DTypeLike, key: str, span: int, rows: int, in_memory: int) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._key = key
        # so that a key times the number of parts fits a word
        self._shift = 32 if span > 1 << 32 else 0
        self._span = -(-span >> self._shift)
        self._length = part_of(in_memory)
        self._parts = max(1, -(-rows // self._length))
        self._file = open_unnamed() if rows > in_memory else None
        # each sorted by part; in the file, one after another
        self._blocks: list[NDArray[Any]] = []
        # of each block: where its parts begin and end
        self._edges: list[NDArray[np.int32]] = []
        self._counts = np.zeros(self._parts, np.int64)
        self._waiting: list[NDArray[Any]] = []
        self._last: tuple[int, NDArray[Any]] | None = None

    def __len__(self) -> int:
        return int(self._counts.sum()) + sum(map(len, self._waiting))

    def add(self, rows: NDArray[Any]) -> None:
        """Add records, (n,)."""
        self._last = None
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= self._length:
            self._flush()

    def parts(self) -> Iterator[NDArray[Any]]:
        """Yield all records in order, in pieces; some may be empty."""
        for number in range(self._parts):
            yield self._part(number)

    def pieces(self, length: int) -> Iterator[NDArray[Any]]:
        """Yield all records in order, `length` at a time; the last piece may be shorter."""
        for start in range(0, len(self), length):
            yield self[start : start + length]

    def __getitem__(self, place: slice) -> NDArray[Any]:
        """Return a range of the sorted records; cheap if the ranges asked for follow each other."""
        self._flush()
        start, stop, _ = place.indices(len(self))
        # only the parts that the range touches are read and sorted; the last one is kept for the next range
        ends = np.cumsum(self._counts)
        found = [np.empty(0, self.dtype)]
        for number in range(int(np.searchsorted(ends, start, "right")), self._parts):
            before = int(ends[number] - self._counts[number])
            if before >= stop:
                break
            if self._last is None or self._last[0] != number:
                self._last = None  # free the memory for the next
                self._last = number, self._part(number)
            found.append(self._last[1][max(0, start - before) : stop - before])
        return np.concatenate(found)

    def column(self, name: str) -> NDArray[Any]:
        """Return one field of all records, in order."""
        out = np.empty(len(self), self.dtype[name])
        done = 0
        for part in self.parts():
            out[done : done + len(part)] = part[name]
            done += len(part)
        return out

    def close(self) -> None:
        """Release memory and file."""
        self._blocks, self._waiting, self._last = [], [], None
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        if not self._waiting:
            return
        block = np.concatenate(self._waiting)
        self._waiting = []
        key = block[self._key]
        high = (key[:, 0] if key.ndim == 2 else key).astype(np.uint64)
        if int(high.max(initial=0)) >> self._shift >= self._span:
            raise ValueError(f"expected keys below {self._span << self._shift}")
        dealt, edges = np.empty_like(block), np.zeros(self._parts + 1, np.int32)
        _deal(high, self._shift, self._parts, self._span, _words(block), edges, _words(dealt))
        block = dealt
        self._edges.append(edges)
        self._counts += np.diff(edges)
        if self._file is None:
            self._blocks.append(block)
        else:
            write_all(self._file, block)

    def _part(self, number: int) -> NDArray[Any]:
        self._flush()
        out = np.empty(self._counts[number], self.dtype)
        done = before = 0
        for at, edges in enumerate(self._edges):
            start, stop = edges[number : number + 2].tolist()
            into = out[done : done + stop - start]
            if self._file is None:
                into[:] = self._blocks[at][start:stop]
            else:
                read_all(self._file, (before + start) * self.dtype.itemsize, into)
            done += stop - start
            before += int(edges[-1])
        return np.take(out, _stable_order(out[self._key]))


def _words(rows: NDArray[Any]) -> NDArray[Any]:
    """Return records as whole numbers of 32 bits, or bytes, (n, words)."""
    width = np.dtype(np.uint8 if rows.dtype.itemsize % 4 else np.uint32)
    return rows.view(width).reshape(len(rows), rows.dtype.itemsize // width.itemsize)


@kernel
def _deal(
    key: NDArray[np.uint64],
    shift: int,
    parts: int,
    span: int,
    rows: NDArray[Any],
    edges: NDArray[np.int32],
    out: NDArray[Any],
) -> None:
    """Write rows to `out` part by part, in their order within each, and where parts begin and end to `edges`."""
    part = new_array(key.shape[0], np.int32)
    for k in range(key.shape[0]):
        # a key's share of the span, times the number of parts: parts are even where keys are
        part[k] = (key[k] >> np.uint64(shift)) * np.uint64(parts) // np.uint64(span)
        edges[part[k] + 1] += 1
    for number in range(parts):
        edges[number + 1] += edges[number]
    # counting sort by part: rows keep their order within a part
    following = new_array(parts, np.int32)
    for number in range(parts):
        following[number] = edges[number]
    for k in range(key.shape[0]):
        at = following[part[k]]
        following[part[k]] += 1
        for word in range(rows.shape[1]):
            out[at, word] = rows[k, word]


def _stable_order(key: NDArray[Any]) -> NDArray[np.int64]:
    """Return where the rows of a key go, equal ones as they came."""
    # a sort of numbers with their places below takes a fifth of the time
    if key.dtype == np.int32:
        placed = key.astype(np.uint64) << np.uint64(32) | np.arange(len(key), dtype=np.uint64)
        placed.sort()
        return (placed & np.uint64((1 << 32) - 1)).astype(np.int64)
    # a hash: a sort that need not be stable takes a fifth of the time, if no two are equal
    if key.dtype == np.uint64:
        first = np.ascontiguousarray(key[:, 0] if key.ndim == 2 else key)
        order = np.argsort(first)
        in_order = first[order]
        if np.all(in_order[1:] > in_order[:-1]):
            return order
    return np.lexsort((key[:, 1], key[:, 0])) if key.ndim == 2 else np.argsort(key, kind="stable")


class Scratch:
    """The sorted lists of one piece of work, all closed at its end, also after an error."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        if in_memory < 1:
            raise ConfigError(f"expected in_memory of at least 1 record, got {in_memory}")
        self.in_memory = in_memory
        self.part = part_of(in_memory)
        self._made: list[SortedRecords] = []

    def sorted(self, dtype: DTypeLike, key: str, span: int, rows: int) -> SortedRecords:
        """Make a list; parameters as of `SortedRecords`."""
        made = SortedRecords(dtype, key, span, rows, self.in_memory)
        self._made.append(made)
        return made

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for made in self._made:
            made.close()


# ---------------------------------------------------------------- files


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
    """Open a temporary file that nobody else can open."""
    try:
        return tempfile.TemporaryFile(buffering=0, prefix="treaty-")
    except OSError as error:
        raise _unusable(error) from None


def write_all(file: IO[bytes], values: NDArray[Any]) -> None:
    left = values.reshape(-1).view(np.uint8).data
    try:
        file.seek(0, 2)
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise _unusable(error) from None


def read_all(file: IO[bytes], at: int, into: NDArray[Any]) -> None:
    """Fill an array from a place in a file."""
    left = into.view(np.uint8).data
    file.seek(at)
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        assert count, "a temporary file is shorter than what was written to it"
        left = left[count:]


def _unusable(error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use the folder of temporary files, {tempfile.gettempdir()}: {error.strerror}; long lists of ids need "
        "some 210 bytes of it per id - set TMPDIR to a folder with room",
        public="its folder of temporary files cannot be used",
    )
