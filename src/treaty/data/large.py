"""Sorting more records than memory holds, and grouping rows by id with it: by parts, in temporary files without a name.

Short lists are sorted and grouped in memory. In files, repeated ids are found by a keyed hash of 16 bytes under a fresh
key: among 2^28 different ids two collide with a probability below 2^-72, no matter who chose the ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import DTypeLike, NDArray

from treaty.errors import ConfigError
from treaty.machine import arrays
from treaty.machine.kernels import kernel, new_array
from treaty.machine.keyed_hash import KEY, hashes

IN_MEMORY = 1 << 18
"""Records that are kept in memory; longer lists lie in files. Work is done on half of that at a time."""

WORDS = 1 << 64
"""The span of a key of words, which are compared as such and should be hashes."""


def part_of(in_memory: int) -> int:
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
    numbers below `span` (at most `WORDS`), or uint64 words, shape (n,) or (n, 2), spread evenly over the span. `rows`
    is about how many records will come; two lists of the same span and number have the same parts. At most `in_memory`
    records lie in memory.
    """

    def __init__(self, dtype: DTypeLike, key: str, span: int, rows: int, in_memory: int) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._key = key
        # a key times the number of parts must fit a word
        self._shift = 32 if span > 1 << 32 else 0
        self._span = -(-span >> self._shift)
        self._length = part_of(in_memory)
        self._parts = max(1, -(-rows // self._length))
        self._file = arrays.open_unnamed() if rows > in_memory else None
        # each sorted by part; in the file, one after another
        self._blocks: list[NDArray[Any]] = []
        # where the parts of each block begin and end
        self._edges: list[arrays.Int32s] = []
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
        """Return a range of the sorted records; ranges that follow each other are cheap."""
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
            arrays.write_all(self._file, block)

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
                arrays.read_all(self._file, (before + start) * self.dtype.itemsize, into)
            done += stop - start
            before += int(edges[-1])
        return np.take(out, _stable_order(out[self._key]))


def _words(rows: NDArray[Any]) -> NDArray[Any]:
    width = np.dtype(np.uint8 if rows.dtype.itemsize % 4 else np.uint32)
    return rows.view(width).reshape(len(rows), rows.dtype.itemsize // width.itemsize)


@kernel
def _deal(
    key: arrays.Words, shift: int, parts: int, span: int, rows: NDArray[Any], edges: arrays.Int32s, out: NDArray[Any]
) -> None:
    """Write rows to `out` part by part, keeping their order, and where parts begin and end to `edges`."""
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


def _stable_order(key: NDArray[Any]) -> arrays.Integers:
    # sorting numbers with their places in the lower half takes a fifth of the time
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


class Scratch(ExitStack):
    """The sorted lists of one piece of work, all closed at its end, also after an error."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        super().__init__()
        if in_memory < 1:
            raise ConfigError(f"expected in_memory of at least 1 record, got {in_memory}")
        self.in_memory = in_memory
        self.part = part_of(in_memory)

    def sorted(self, dtype: DTypeLike, key: str, span: int, rows: int) -> SortedRecords:
        return self.enter_context(closing(SortedRecords(dtype, key, span, rows, self.in_memory)))


_SEEN = np.dtype([("hash", np.uint64, (2,)), ("place", np.int64), ("row", np.int64)])
_FOUND = np.dtype([("first", np.int64), ("row", np.int64)])


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Distinct ids and their rows: fields as in `Ids`; `n_present` is the number of rows with an id."""

    data: arrays.Bytes
    offsets: arrays.Integers
    rows: arrays.Integers
    starts: arrays.Integers
    n_present: int


def group_rows(
    rows: arrays.Integers, texts: Any, tag: bytes, refuse: Callable[[int], None], *, every: bool
) -> RowGroups | None:
    """Group rows by id, ids in the order of first appearance; return None if there are none.

    `texts`, an arrow array of strings or bytes, are the ids of `rows`; each gets the prefix `tag`. If ids are repeated,
    `refuse`, which may raise, is called with the number of rows whose id an earlier row has. `every` keeps all rows of
    an id, not the first alone.
    """
    if len(rows) == 0:
        return None
    encoded = texts.dictionary_encode()
    number, n_ids = encoded.indices.to_numpy(), len(encoded.dictionary)
    data, offsets = _tagged(encoded.dictionary, tag)
    starts, kept = np.arange(n_ids + 1, dtype=np.int64), rows
    if len(rows) > n_ids:
        refuse(len(rows) - n_ids)
        if every:
            kept = rows[np.argsort(number, kind="stable")]
            starts[1:] = np.cumsum(np.bincount(number, minlength=n_ids))
        else:
            # ids are numbered in order of first appearance
            kept = rows[np.unique(number, return_index=True)[1]]
    return RowGroups(data.copy(), offsets.copy(), kept, starts, len(rows))


def group_rows_in_files(
    chunks: Iterable[tuple[arrays.Integers, Any]],
    tag: bytes,
    n_rows: int,
    in_memory: int,
    refuse: Callable[[int], None],
    *,
    every: bool,
) -> RowGroups | None:
    """Group as `group_rows` does `n_rows` rows that come as chunks (rows, texts), holding one chunk at a time."""
    with Scratch(in_memory) as scratch:
        data, offsets, rows, starts = _columns(scratch)
        seen = scratch.sorted(_SEEN, "hash", WORDS, n_rows)
        key = secrets.token_bytes(KEY)
        for row, texts in chunks:
            if len(row):
                content, ends = _tagged(texts, tag)
                place = rows.length + np.arange(len(row))
                seen.add(records(_SEEN, hash=hashes(content, ends, key), place=place, row=row))
                offsets.append(data.length + ends[1:])
                data.append(content)
                rows.append(row)
        if rows.length == 0:
            return None
        # an id that occurs twice has neighbours of one hash in the sorted list
        repeated = rows.length - sum(int(np.count_nonzero(_new(part["hash"]))) for part in seen.parts())
        if repeated:
            refuse(repeated)
            first = _by_first(seen, rows.length, scratch)
            return _distinct(first, data.mapped(), offsets.mapped(), rows.length, every, scratch)
        for part in arrays.pieces(rows.length, scratch.part):
            starts.append(np.arange(part.start + 1, part.stop + 1))
        return RowGroups(data.mapped(), offsets.mapped(), rows.mapped(), starts.mapped(), rows.length)


def _columns(stack: ExitStack) -> tuple[arrays.FileColumn, arrays.FileColumn, arrays.FileColumn, arrays.FileColumn]:
    data, offsets, rows, starts = (
        stack.enter_context(closing(arrays.FileColumn(kind))) for kind in (np.uint8, np.int64, np.int64, np.int64)
    )
    offsets.append(np.zeros(1, np.int64))
    starts.append(np.zeros(1, np.int64))
    return data, offsets, rows, starts


def _tagged(texts: Any, tag: bytes) -> tuple[arrays.Bytes, arrays.Integers]:
    """Prepend a tag to each string; return bytes and offsets."""
    kind = pa.large_binary()
    tagged = pc.binary_join_element_wise(pa.scalar(tag, kind), texts.cast(kind), pa.scalar(b"", kind))
    _, offsets, data = tagged.buffers()
    ends = np.frombuffer(offsets, np.int64)[tagged.offset : tagged.offset + len(tagged) + 1]
    return np.frombuffer(data, np.uint8), ends


def _new(values: arrays.Words | arrays.Integers) -> arrays.Flags:
    """Mark the sorted values, (n,) or (n, 2), that differ from the one before."""
    new = np.ones(len(values), np.bool_)
    differ = values[1:] != values[:-1]
    new[1:] = differ.any(axis=1) if differ.ndim == 2 else differ
    return new


def _by_first(seen: SortedRecords, count: int, scratch: Scratch) -> SortedRecords:
    """Sort rows by the place where their id first appeared, then ascending."""
    found = scratch.sorted(_FOUND, "first", count, count)
    for part in seen.parts():
        new = _new(part["hash"])
        # every row of an id gets the place of its first row
        first = part["place"][new][np.cumsum(new) - 1]
        found.add(records(_FOUND, first=first, row=part["row"]))
    seen.close()
    return found


def _distinct(
    found: SortedRecords, texts: arrays.Bytes, ends: arrays.Integers, n_present: int, every: bool, stack: ExitStack
) -> RowGroups:
    """Write each string once, in the order of first places, with its rows."""
    data, offsets, rows, starts = _columns(stack)
    for part in found.parts():
        if len(part):
            new = _new(part["first"])
            kept = part if every else part[new]
            ends_of_groups = np.append(np.flatnonzero(_new(kept["first"]))[1:], len(kept))
            starts.append(rows.length + ends_of_groups)
            rows.append(kept["row"])
            first = part["first"][new]
            # an arrow array over the mapped texts, without a copy, of which the part's ids are taken
            bounds = ends[first[0] : first[-1] + 2]
            buffers = [None, pa.py_buffer(bounds - bounds[0]), pa.py_buffer(texts[bounds[0] : bounds[-1]])]
            piece = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)
            content, stops = _tagged(piece.take(pa.array(first - first[0])), b"")
            offsets.append(data.length + stops[1:])
            data.append(content)
            arrays.forget(texts)
            arrays.forget(ends)
    return RowGroups(data.mapped(), offsets.mapped(), rows.mapped(), starts.mapped(), n_present)
