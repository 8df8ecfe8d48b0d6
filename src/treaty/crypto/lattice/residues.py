"""Kernels of ring products (`transfer.ring_products`): residues modulo primes below 2^31, element by element.

No step branches, divides or looks up by what is secret. Factors that are known ahead come with their Shoup quotients
(`ring`); two that are not are multiplied after Montgomery, which divides by 2^32: one of them is held times 2^32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Words
from treaty.machine.kernels import inlined, kernel, new_array

Residues = NDArray[np.uint32]
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
# V / T is below 7/8, so that an eighth more, which is more than fractions are off, does not carry
FRACTION_BITS, _CUT = 62, 8
_EIGHTH = np.uint64(1 << FRACTION_BITS - _CUT - 3)


@inlined
def _times(y: np.uint64, factor: np.uint64, quotient: np.uint64, q: np.uint64) -> np.uint64:
    """Return y factor modulo q, of y below 2^32."""
    rest = y * factor - ((y * quotient) >> _HALF) * q
    return min(rest, rest - q)


@inlined
def _divided(product: np.uint64, q: np.uint64, inverse: np.uint64) -> np.uint64:
    """Return a product below 2^32 q, divided by 2^32 modulo q; `inverse` is -1 / q modulo 2^32."""
    total = (product + (((product & _LOW) * inverse) & _LOW) * q) >> _HALF
    return min(total, total - q)


@kernel
def add_product(a: Residues, b: Residues, q: np.uint64, inverse: np.uint64, out: Residues) -> None:
    """Add a b / 2^32 modulo q."""
    for i in range(len(out)):
        total = np.uint64(out[i]) + _divided(np.uint64(a[i]) * np.uint64(b[i]), q, inverse)
        out[i] = np.uint32(min(total, total - q))


@kernel
def add_small(numbers: NDArray[np.int8], scale: np.int64, q: np.int64, out: Residues) -> None:
    """Add numbers times a scale modulo q; products are below q in size."""
    for i in range(len(out)):
        value = np.int64(numbers[i]) * scale
        total = np.uint64(out[i]) + np.uint64(value + (q & (value >> np.int64(63))))
        out[i] = np.uint32(min(total, total - np.uint64(q)))


@kernel
def sum_limbs(limbs: Residues, factors: Words, quotients: Words, start: np.uint64, q: np.uint64, out: Residues) -> None:
    """Write start plus the sum of limbs[j] factors[j] modulo q, of limbs (L, n)."""
    for i in range(len(out)):
        out[i] = np.uint32(start)
    for j in range(len(factors)):
        factor, quotient = factors[j], quotients[j]
        for i in range(len(out)):
            total = np.uint64(out[i]) + _times(np.uint64(limbs[j, i]), factor, quotient, q)
            out[i] = np.uint32(min(total, total - q))


@kernel
def drop(last: Residues, p: np.uint64, q: np.uint64, factor: np.uint64, quotients: Words, out: Residues) -> None:
    """Write round(x / p) modulo q of x by its residues `last` modulo p and `out` modulo q.

    `factor` is 1 / p modulo q, `quotients` are the Shoup quotients of 1 and of it.
    """
    half, one = p >> np.uint64(1), np.uint64(1)
    half_q = half % q
    for i in range(len(out)):
        # x + half, less what is left of it modulo p, is a multiple of p
        shifted = np.uint64(last[i]) + half
        left = _times(min(shifted, shifted - p), one, quotients[0], q)
        total = np.uint64(out[i]) + half_q
        total = min(total, total - q) + q - left
        out[i] = np.uint32(_times(total, factor, quotients[1], q))


@kernel
def joined(residues: Residues, constants: Words, limbs: Words, out: Words) -> None:
    """Write V modulo 2^(64 words), of 0 <= V < 7/8 T by residues (k, n) modulo primes t whose product is T.

    `constants` are (4, k): t, (T / t)^-1 modulo t, its Shoup quotient, and floor(2^62 / t). `limbs`, (k + 1, 2 words),
    are those of 32 bits of T / t, and of -T.
    """
    k, size = limbs.shape[0] - 1, limbs.shape[1]
    sums = new_array(size + 1, np.uint64)
    for i in range(len(out)):
        for w in range(size + 1):
            sums[w] = np.uint64(0)
        fraction = _EIGHTH
        for j in range(k):
            z = _times(np.uint64(residues[j, i]), constants[1, j], constants[2, j], constants[0, j])
            # V / T is the sum of z / t but for a whole number
            fraction += (z * constants[3, j]) >> np.uint64(_CUT)
            for w in range(size):
                product = z * limbs[j, w]
                sums[w] += product & _LOW
                sums[w + 1] += product >> _HALF
        whole = fraction >> np.uint64(FRACTION_BITS - _CUT)
        for w in range(size):
            product = whole * limbs[k, w]
            sums[w] += product & _LOW
            sums[w + 1] += product >> _HALF
        for w in range(size):
            sums[w + 1] += sums[w] >> _HALF
        for w in range(out.shape[1]):
            out[i, w] = (sums[2 * w] & _LOW) | ((sums[2 * w + 1] & _LOW) << _HALF)
