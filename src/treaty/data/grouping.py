"""Grouping the rows of a column by id: in memory, or in temporary files where it is too long to hold.

In files, repeated ids are found by a keyed hash of 16 bytes under a fresh key: among 2^28 different ids two collide
with a probability below 2^-72, no matter who chose the ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treaty.data.large import WORDS, FileColumn, Scratch, SortedRecords, records
from treaty.machine.arrays import forget, pieces
from treaty.machine.kernels import inner, kernel

# ------------------------------------------------------------ SipHash-2-4 of 128 bits over many byte strings at a time
#
# Aumasson and Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012, in the reference implementation's form of
# 128 bits: a pseudorandom function under a secret key, for hashes that stay in this process.

KEY = 16
"""Bytes of a key."""

Words = tuple[np.uint64, np.uint64, np.uint64, np.uint64]


def hashes(data: NDArray[np.uint8], offsets: NDArray[np.int64], key: bytes) -> NDArray[np.uint64]:
    """Hash each string ``data[offsets[i]:offsets[i + 1]]``, uint64 (n, 2)."""
    out = np.empty((len(offsets) - 1, 2), np.uint64)
    data, offsets = data.view(), offsets.view()
    # or the kernel would be compiled for either kind
    data.flags.writeable = offsets.flags.writeable = False
    _hash_each(data, offsets, np.frombuffer(key, "<u8").astype(np.uint64), out)
    return out


@kernel
def _hash_each(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], key: NDArray[np.uint64], out: NDArray[np.uint64]
) -> None:
    for row in range(out.shape[0]):
        start, stop = offsets[row], offsets[row + 1]
        v0, v1 = key[0] ^ np.uint64(0x736F6D6570736575), key[1] ^ np.uint64(0x646F72616E646F6D ^ 0xEE)
        v2, v3 = key[0] ^ np.uint64(0x6C7967656E657261), key[1] ^ np.uint64(0x7465646279746573)
        # eight bytes are one word; the last word also takes what is left of the string
        whole = start + (stop - start) // 8 * 8
        for at in range(start, whole + 8, 8):
            word = np.uint64(0)
            for k in range(min(8, stop - at)):
                word |= np.uint64(data[at + k]) << np.uint64(8 * k)
            if at == whole:  # the last word has the length on top
                word |= np.uint64(stop - start) << np.uint64(56)
            v3 ^= word
            for _ in range(2):
                v0, v1, v2, v3 = _mixed(v0, v1, v2, v3)
            v0 ^= word
        v2 ^= np.uint64(0xEE)
        for half in range(2):
            for _ in range(4):
                v0, v1, v2, v3 = _mixed(v0, v1, v2, v3)
            out[row, half] = v0 ^ v1 ^ v2 ^ v3
            v1 ^= np.uint64(0xDD)


@inner
def _mixed(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> Words:
    # rotations are written out: a function of their own is compiled anew for each number of bits
    v0 += v1
    v2 += v3
    v1 = ((v1 << np.uint64(13)) | (v1 >> np.uint64(51))) ^ v0
    v3 = ((v3 << np.uint64(16)) | (v3 >> np.uint64(48))) ^ v2
    v0 = ((v0 << np.uint64(32)) | (v0 >> np.uint64(32))) + v3
    v2 += v1
    v3 = ((v3 << np.uint64(21)) | (v3 >> np.uint64(43))) ^ v0
    v1 = ((v1 << np.uint64(17)) | (v1 >> np.uint64(47))) ^ v2
    return v0, v1, (v2 << np.uint64(32)) | (v2 >> np.uint64(32)), v3


# ---------------------------------------------------------------- grouping


_SEEN = np.dtype([("hash", np.uint64, (2,)), ("place", np.int64), ("row", np.int64)])
_FOUND = np.dtype([("first", np.int64), ("row", np.int64)])


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Distinct ids and their rows: fields as in `Ids`; `n_present` is the number of rows with an id."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    n_present: int


def group_rows(
    rows: NDArray[np.int64], texts: Any, tag: bytes, refuse: Callable[[int], None], *, every: bool
) -> RowGroups | None:
    """Group rows by id, ids in the order of first appearance; None without any id.

    `texts`, an arrow array of strings or bytes, are the ids of `rows`; `tag` is put before each. `refuse`, which may
    raise, is called with the number of rows whose id an earlier row has, if any. `every` keeps all rows of an id, not
    the first.
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
        else:  # numbers are given in order of first appearance
            kept = rows[np.unique(number, return_index=True)[1]]
    return RowGroups(data.copy(), offsets.copy(), kept, starts, len(rows))


def group_rows_in_files(
    chunks: Iterable[tuple[NDArray[np.int64], Any]],
    tag: bytes,
    n_rows: int,
    in_memory: int,
    refuse: Callable[[int], None],
    *,
    every: bool,
) -> RowGroups | None:
    """Do as `group_rows`, for `n_rows` rows that come as chunks (rows, texts), holding one chunk at a time."""
    with ExitStack() as stack:
        scratch = stack.enter_context(Scratch(in_memory))
        data, offsets, rows, starts = _columns(stack)
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
            return _distinct(first, data.mapped(), offsets.mapped(), rows.length, every, stack)
        for part in pieces(rows.length, scratch.part):
            starts.append(np.arange(part.start + 1, part.stop + 1))
        return RowGroups(data.mapped(), offsets.mapped(), rows.mapped(), starts.mapped(), rows.length)


def _columns(stack: ExitStack) -> tuple[FileColumn, FileColumn, FileColumn, FileColumn]:
    """Open files for data, offsets, rows and starts."""
    data, offsets, rows, starts = (
        stack.enter_context(closing(FileColumn(kind))) for kind in (np.uint8, np.int64, np.int64, np.int64)
    )
    offsets.append(np.zeros(1, np.int64))
    starts.append(np.zeros(1, np.int64))
    return data, offsets, rows, starts


def _tagged(texts: Any, tag: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Prepend a tag to each string; return bytes and offsets."""
    kind = pa.large_binary()
    tagged = pc.binary_join_element_wise(pa.scalar(tag, kind), texts.cast(kind), pa.scalar(b"", kind))
    _, offsets, data = tagged.buffers()
    return (
        np.frombuffer(data, np.uint8),
        np.frombuffer(offsets, np.int64)[tagged.offset : tagged.offset + len(tagged) + 1],
    )


def _new(values: NDArray[np.uint64] | NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark which of some sorted values, (n,) or (n, 2), differ from the one before."""
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
    found: SortedRecords,
    texts: NDArray[np.uint8],
    ends: NDArray[np.int64],
    n_present: int,
    every: bool,
    stack: ExitStack,
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
            bounds = ends[first[0] : first[-1] + 2]
            buffers = [None, pa.py_buffer(bounds - bounds[0]), pa.py_buffer(texts[bounds[0] : bounds[-1]])]
            piece = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)
            content, stops = _tagged(piece.take(pa.array(first - first[0])), b"")
            offsets.append(data.length + stops[1:])
            data.append(content)
            forget(texts)
            forget(ends)
    return RowGroups(data.mapped(), offsets.mapped(), rows.mapped(), starts.mapped(), n_present)
