"""Residues side by side without the bits that are zero in all of them, as they are sent.

Of each block of N entries come the residues modulo the first prime, each in the prime's width, from the lowest bit of
the first word on; then those modulo the next prime, which begin with a word of their own. So pieces of whole blocks,
one after the other, are the same words as all in one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from treaty.compute import kernel, new_array
from treaty.crypto.lattice.parameters import Parameters
from treaty.crypto.lattice.transform import Residues
from treaty.errors import CryptoError
from treaty.parallel import pieces, share

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
