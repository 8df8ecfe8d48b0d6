"""Bits packed into words, the first lowest, and kernels on planes of them: bit i of word w is transfer 64 w + i's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.machine.kernels import kernel

WORDS = 8
"""Planes are a multiple of so many words long: they are turned in blocks of 64 planes by 8 words, 4 kB."""

_MASKS = np.array(
    [
        0x00000000FFFFFFFF,
        0x0000FFFF0000FFFF,
        0x00FF00FF00FF00FF,
        0x0F0F0F0F0F0F0F0F,
        0x3333333333333333,
        0x5555555555555555,
    ],
    np.uint64,
)


def packed(bits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Pack bits (n,) into words, the first lowest, uint64 (ceil(n / 64),)."""
    padded = np.zeros(-(-len(bits) // 64) * 64, np.uint8)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def unpacked(words: NDArray[np.uint64], count: int) -> NDArray[np.uint8]:
    """Return the first `count` bits of words, uint8 (count,)."""
    return np.unpackbits(words.astype("<u8", copy=False).view(np.uint8), count=count, bitorder="little")


@kernel
def transpose(planes: NDArray[np.uint64], rows: NDArray[np.uint64], start: int, stop: int) -> None:
    """Write bit i of plane p, uint64 (64 p, w), as bit p of row i, (64 w, p), for blocks [start, stop) of 8 words.

    Six rounds exchange blocks of 32, 16, ... 1 bits (Warren, Hacker's Delight, 7-3), eight words side by side.
    """
    block = np.empty((64, WORDS), np.uint64)
    for word in range(start * WORDS, stop * WORDS, WORDS):
        for group in range(planes.shape[0] // 64):
            for k in range(64):
                for lane in range(WORDS):
                    block[k, lane] = planes[64 * group + k, word + lane]
            for level in range(6):
                step, shift, mask = 32 >> level, np.uint64(32 >> level), _MASKS[level]
                for base in range(0, 64, 2 * step):
                    for k in range(base, base + step):
                        for lane in range(WORDS):
                            low, high = block[k, lane], block[k + step, lane]
                            swapped = ((low >> shift) ^ high) & mask
                            block[k, lane] = low ^ (swapped << shift)
                            block[k + step, lane] = high ^ swapped
            for lane in range(WORDS):
                for k in range(64):
                    rows[64 * (word + lane) + k, group] = block[k, lane]


@kernel
def fold(leaves: NDArray[np.uint64], planes: NDArray[np.uint64]) -> None:
    """Sum each tree's leaves, uint64 (trees, 2^k, w).

    Into plane j, (trees, k, w), those whose number has bit j, into leaf 0 all of them. The other leaves hold partial
    sums afterwards.
    """
    for tree in range(leaves.shape[0]):
        half = leaves.shape[1]
        for plane in range(planes.shape[1] - 1, -1, -1):
            half //= 2
            for word in range(leaves.shape[2]):
                planes[tree, plane, word] = 0
            for number in range(half):
                for word in range(leaves.shape[2]):
                    upper = leaves[tree, number + half, word]
                    planes[tree, plane, word] ^= upper
                    leaves[tree, number, word] ^= upper


@kernel
def correct(planes: NDArray[np.uint64], masks: NDArray[np.uint64], corrections: NDArray[np.uint64]) -> None:
    """Add each tree's correction, uint64 (trees, w), to its planes, (trees, k, w), by masks of all ones or zero.

    Masks are uint64 (trees, k).
    """
    for tree in range(planes.shape[0]):
        for plane in range(planes.shape[1]):
            for word in range(planes.shape[2]):
                planes[tree, plane, word] ^= masks[tree, plane] & corrections[tree, word]


@kernel
def shift(
    rows: NDArray[np.uint64], bits: NDArray[np.uint64], delta: NDArray[np.uint64], out: NDArray[np.uint64]
) -> None:
    """Add `delta`, uint64 (2,), to the rows, (n, 2), whose bit is 1; bits are packed, (ceil(n / 64),)."""
    for row in range(rows.shape[0]):
        mask = np.uint64(0) - ((bits[row >> 6] >> np.uint64(row & 63)) & np.uint64(1))
        out[row, 0] = rows[row, 0] ^ (mask & delta[0])
        out[row, 1] = rows[row, 1] ^ (mask & delta[1])


@kernel
def combine(rows: NDArray[np.uint64], count: int, out: NDArray[np.uint64]) -> None:
    """Sum `count` rows each, times 1, x, x^2, ... in GF(2^128): (n * count, 2) to (n, 2).

    The field is that of polynomials modulo x^128 + x^7 + x^2 + x + 1, lowest coefficient first.
    """
    one, top = np.uint64(1), np.uint64(63)
    for row in range(out.shape[0]):
        low, high = np.uint64(0), np.uint64(0)
        for k in range(count - 1, -1, -1):
            carry = np.uint64(0) - (high >> top)
            high = (high << one) | (low >> top)
            low = (low << one) ^ (carry & np.uint64(0x87))
            low ^= rows[row * count + k, 0]
            high ^= rows[row * count + k, 1]
        out[row, 0] = low
        out[row, 1] = high
