"""Residues side by side without the bits that are zero in all of them, as they are sent.

Of each block of N entries come the residues modulo the first prime, each in the prime's width, from the lowest bit of
the first word on; then those modulo the next prime, which begin with a word of their own. So pieces of whole blocks,
one after the other, are the same words as all in one.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import weakref
from collections.abc import Iterator
from io import FileIO
from mmap import ACCESS_READ, ACCESS_WRITE, mmap
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.lattice.parameters import Parameters
from treaty.crypto.lattice.transform import Residues
from treaty.errors import ConfigError, CryptoError
from treaty.machine.arrays import pieces
from treaty.machine.kernels import kernel, new_array
from treaty.machine.shared_work import share

WORD = 32
Packed = NDArray[np.uint32]

_WORD, _LOW = np.uint64(WORD), np.uint64((1 << WORD) - 1)


def packed_words(parameters: Parameters, count: int) -> int:
    """Return how many words the residues of so many entries take."""
    blocks, rest = divmod(count, parameters.degree)
    return blocks * _words_of(parameters, parameters.degree) + _words_of(parameters, rest)


def _words_of(parameters: Parameters, count: int) -> int:
    return sum(-(-count * width // WORD) for width in parameters.widths)


def _planes(parameters: Parameters, first: int, stop: int) -> Iterator[tuple[int, int, slice]]:
    """Return number, width and words of each prime's plane, of the entries first to stop of a block."""
    start = packed_words(parameters, first)
    for p, width in enumerate(parameters.widths):
        end = start + -(-(stop - first) * width // WORD)
        yield p, width, slice(start, end)
        start = end


def pack(parameters: Parameters, residues: Residues, threads: int = 1) -> Packed:
    """Pack residues, uint32 (vectors, primes, m), to uint32 (vectors, words)."""
    vectors, _, count = residues.shape
    blocks = pieces(count, parameters.degree)
    out = np.empty((vectors, packed_words(parameters, count)), np.uint32)

    def work(first: int, stop: int) -> None:
        for v, block in ((v, blocks[j]) for v, j in (divmod(task, len(blocks)) for task in range(first, stop))):
            for p, width, words in _planes(parameters, block.start, block.stop):
                pack_plane(residues[v, p, block], width, out[v, words])

    share(work, vectors * len(blocks), threads)
    return out


def unpack(parameters: Parameters, packed: Packed, most: int, threads: int = 1) -> Residues:
    """Return the residues, uint32 (vectors, primes, m), of `most` entries or, of fewer, of whole blocks.

    They may exceed their primes. CryptoError for a number of words that no such entries take.
    """
    packed = packed.view()
    packed.flags.writeable = False  # as those of a message are, or the kernel would be compiled for either kind
    vectors, given = packed.shape
    whole = given // packed_words(parameters, parameters.degree) * parameters.degree
    count = most if given == packed_words(parameters, most) else whole
    if count > most or given != packed_words(parameters, count):
        raise CryptoError(
            f"expected words of {most} entries, or of fewer in whole blocks of {parameters.degree}, got {given} words "
            "- in a query"
        )
    blocks = pieces(count, parameters.degree)
    out = np.empty((vectors, len(parameters.primes), count), np.uint32)

    def work(first: int, stop: int) -> None:
        for v, block in ((v, blocks[j]) for v, j in (divmod(task, len(blocks)) for task in range(first, stop))):
            for p, width, words in _planes(parameters, block.start, block.stop):
                unpack_plane(packed[v, words], width, out[v, p, block])

    share(work, vectors * len(blocks), threads)
    return out


@kernel
def pack_plane(residues: Residues, width: int, out: Packed) -> None:
    """Write the low `width` bits, 16 to 31, of each number one after the other.

    32 numbers take `width` words, of which each holds bits of three numbers at most: of number at[k] all but gone[k].
    """
    at, gone, wide = new_array((3, width), np.uint32), new_array(width, np.uint64), np.uint64(width)
    for k in range(width):
        for part in range(3):
            at[part, k] = min(k * WORD // width + part, WORD - 1)
        gone[k] = k * WORD % width
    for first in range(0, len(residues), WORD):
        numbers, start = residues[first : first + WORD], first // WORD * width
        if len(numbers) < WORD:
            rest, numbers = numbers, new_array(WORD, np.uint32)
            for i in range(WORD):  # a slice assigned to a slice would take seconds to compile
                numbers[i] = rest[i] if i < len(rest) else np.uint32(0)
        words = out[start : start + width]
        for k in range(len(words)):
            held = np.uint64(numbers[at[0, k]]) >> gone[k] | np.uint64(numbers[at[1, k]]) << wide - gone[k]
            held |= np.uint64(numbers[at[2, k]]) << wide + wide - gone[k]
            words[k] = np.uint32(held & _LOW)


@kernel
def unpack_plane(packed: Packed, width: int, out: Residues) -> None:
    wide, last = np.uint64(width), np.uint64(len(packed) - 1)  # unsigned places need no look for negative ones
    mask = (np.uint64(1) << wide) - np.uint64(1)
    for i in range(np.uint64(len(out))):
        bit = np.uint64(i) * wide
        word, shift = bit >> np.uint64(5), bit & np.uint64(31)
        pair = np.uint64(packed[word]) | np.uint64(packed[min(word + np.uint64(1), last)]) << _WORD
        out[i] = np.uint32(pair >> shift & mask)


# ----------------------------------------------------------------
# Arrays of a hint store: files that are written through memory as rows arrive, and kept only once they are whole.


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
