"""Factors of the negacyclic number-theoretic transform modulo primes below 2^31; `kernels` transforms with them.

References: Longa and Naehrig, Speeding up the Number Theoretic Transform for Faster Ideal Lattice-Based Cryptography,
2016.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Residues = NDArray[np.uint32]


class Tables(NamedTuple):
    """Factors of the transforms modulo one prime, for all strides, and their Shoup quotients: uint32 (2 N,) each.

    N factors for strides from 16, then N / 2 for each of 8, 4, 2 and 1, one for every butterfly.
    """

    prime: np.uint32
    forward: Residues
    forward_shoup: Residues
    inverse: Residues
    inverse_shoup: Residues


@cache
def tables(prime: int, degree: int) -> Tables:
    """Make the factors: powers of a 2 N-th root of unity."""
    base = next(x for x in range(2, prime) if pow(x, (prime - 1) // 2, prime) == prime - 1)
    root = pow(base, (prime - 1) // (2 * degree), prime)
    reversed_bits = np.zeros(1, np.intp)
    while len(reversed_bits) < degree:
        reversed_bits = np.concatenate([2 * reversed_bits, 2 * reversed_bits + 1])

    def powers(of: int) -> tuple[Residues, Residues]:
        values = np.ones(1, np.uint64)
        while len(values) < degree:  # products of numbers below 2^31 fit
            values = np.concatenate([values, values * np.uint64(pow(of, len(values), prime)) % np.uint64(prime)])
        block = values[reversed_bits]
        index = np.arange(degree // 2)
        near = [block[degree // (2 * stride) + index // stride] for stride in (8, 4, 2, 1)]
        factors = np.concatenate([block, *near])
        words = factors.astype(np.uint32)
        return words, shoup_quotients(words, prime)

    return Tables(np.uint32(prime), *powers(root), *powers(pow(root, -1, prime)))


def shoup_quotients(values: Residues, prime: int) -> Residues:
    """floor(values 2^32 / prime)."""
    return ((values.astype(np.uint64) << np.uint64(32)) // np.uint64(prime)).astype(np.uint32)
