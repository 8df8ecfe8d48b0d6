"""Whole numbers of several words, modulo 2^(64 words): uint64 (..., words), lowest word first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.machine.kernels import kernel

Wide = NDArray[np.uint64]
Bits = NDArray[np.uint8]


def wide(numbers: NDArray[np.integer], words: int) -> Wide:
    """Return whole numbers of 64 bits as wide ones, signed ones by their two's complement."""
    out = np.zeros((*numbers.shape, words), np.uint64)
    out[..., 0] = numbers.astype(np.uint64)
    if numbers.dtype.kind == "i":
        out[..., 1:] = np.where(numbers < 0, ~np.uint64(0), np.uint64(0))[..., None]
    return out


def resized(a: Wide, words: int) -> Wide:
    """Return numbers with more words, of zeros, or fewer: modulo 2^(64 words)."""
    out = np.zeros((*a.shape[:-1], words), np.uint64)
    kept = min(words, a.shape[-1])
    out[..., :kept] = a[..., :kept]
    return out


def from_ints(numbers: Sequence[int], words: int) -> Wide:
    """Return Python integers as wide ones, (n, words)."""
    raw = b"".join((x % (1 << 64 * words)).to_bytes(8 * words, "little") for x in numbers)
    return np.frombuffer(raw, "<u8").astype(np.uint64).reshape(-1, words)


def add(a: Wide, b: Wide) -> Wide:
    return _with(_add, a, b)


def subtract(a: Wide, b: Wide) -> Wide:
    return _with(_subtract, a, b)


def negative(a: Wide) -> Wide:
    return subtract(np.zeros_like(a), a)


def _with(kernel: Callable[[Wide, Wide], None], a: Wide, b: Wide) -> Wide:
    """Return what the kernel makes of a copy of a, and b, (n, words) both."""
    if a.shape == b.shape:
        out, other = np.array(a, order="C"), np.ascontiguousarray(b)
    else:
        shape: tuple[int, ...] = np.broadcast_shapes(a.shape, b.shape)
        out, other = (np.array(np.broadcast_to(each, shape), order="C") for each in (a, b))
    words = out.shape[-1]
    kernel(out.reshape(-1, words), other.reshape(-1, words))
    return out


@kernel
def _add(a: Wide, b: Wide) -> None:
    for n in range(a.shape[0]):
        carry = np.uint64(0)
        for word in range(a.shape[1]):
            total = a[n, word] + b[n, word]
            over = np.uint64(total < b[n, word])
            a[n, word] = total + carry
            carry = over | np.uint64(a[n, word] < carry)


@kernel
def _subtract(a: Wide, b: Wide) -> None:
    for n in range(a.shape[0]):
        borrow = np.uint64(0)
        for word in range(a.shape[1]):
            less = a[n, word] - b[n, word]
            under = np.uint64(a[n, word] < b[n, word])
            a[n, word] = less - borrow
            borrow = under | np.uint64(less < borrow)


def prefix_sums(a: Wide) -> Wide:
    """Return sums of the first 1, 2, ... numbers along the last axis but one, of at most 2^32 numbers."""
    parts = np.cumsum(_halves(a).astype(np.uint64), axis=-2)
    out, carry = np.empty(parts.shape, np.uint32), np.zeros(parts.shape[:-1], np.uint64)
    for half in range(parts.shape[-1]):
        total = parts[..., half] + carry
        out[..., half] = total.astype(np.uint32)
        carry = total >> np.uint64(32)
    return out.view(np.uint64)


def times(a: Wide, b: Wide) -> Wide:
    shape: tuple[int, ...] = np.broadcast_shapes(a.shape, b.shape)
    a, b, out = np.broadcast_to(a, shape).copy(), np.broadcast_to(b, shape).copy(), np.zeros(shape, np.uint64)
    digits = 2 * a.shape[-1]
    _times(_halves(a).reshape(-1, digits), _halves(b).reshape(-1, digits), out.view(np.uint32).reshape(-1, digits))
    return out


def _halves(a: Wide) -> NDArray[np.uint32]:
    return np.ascontiguousarray(a).view(np.uint32)


@kernel
def _times(a: NDArray[np.uint32], b: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for n in range(a.shape[0]):
        for i in range(a.shape[1]):
            carry, digit = np.uint64(0), np.uint64(a[n, i])
            for j in range(a.shape[1] - i):
                total = digit * np.uint64(b[n, j]) + np.uint64(out[n, i + j]) + carry
                out[n, i + j] = total & low
                carry = total >> half


def shifted(a: Wide, bits: int) -> Wide:
    """Return a 2^bits."""
    out = np.zeros_like(a)
    words, rest = divmod(bits, 64)
    for word in range(words, a.shape[-1]):
        out[..., word] = a[..., word - words] << np.uint64(rest)
        if rest and word > words:
            out[..., word] |= a[..., word - words - 1] >> np.uint64(64 - rest)
    return out


def cut(a: Wide, bits: int) -> Wide:
    """Return a modulo 2^bits."""
    out = a.copy()
    for word in range(a.shape[-1]):
        kept = min(max(bits - 64 * word, 0), 64)
        out[..., word] &= np.uint64((1 << kept) - 1)
    return out


def bit(a: Wide, number: int) -> Bits:
    """Return one bit of each number."""
    return ((a[..., number // 64] >> np.uint64(number % 64)) & np.uint64(1)).astype(np.uint8)


def bits_of(a: Wide, count: int) -> Bits:
    """Return the lowest bits of each number, (..., count)."""
    raw = np.ascontiguousarray(a.astype("<u8", copy=False)).view(np.uint8)
    return np.unpackbits(raw, axis=-1, count=count, bitorder="little")


def only(bits: Bits, a: Wide) -> Wide:
    """Return a where the bit is 1, else 0, without a branch."""
    return a & (np.uint64(0) - bits.astype(np.uint64))[..., None]


def signed(bits: Bits, a: Wide) -> Wide:
    """Return -a where the bit is 1, else a, without a branch."""
    flip = (np.uint64(0) - bits.astype(np.uint64))[..., None]
    one = np.zeros((*bits.shape, a.shape[-1]), np.uint64)
    one[..., 0] = bits
    return add(a ^ flip, one)
