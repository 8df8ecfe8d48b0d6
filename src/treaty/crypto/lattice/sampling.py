"""Random numbers of the lattice map from streams of bytes: secret ones from `Keystream`, public ones from a seed.

Which bytes are rejected depends only on the rejected bytes, so the time taken tells nothing of those kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.parameters import ERROR_BITS, Digits, Parameters
from treaty.crypto.lattice.transform import Residues
from treaty.machine.shared_work import share

Bytes = Callable[[int], bytes]  # ``draw(count)`` gives that many bytes of a stream

_TRITS = np.array([[byte // 3**k % 3 - 1 for k in range(5)] for byte in range(243)], np.int8)


def uniform(draw: Bytes, bound: int, count: int) -> NDArray[np.uint32]:
    """Return uniform numbers below `bound` <= 2^31, uint32 (count,): the low bits of words, too large ones rejected."""
    kept, mask = np.empty(0, np.uint32), np.uint32((1 << (bound - 1).bit_length()) - 1)
    while len(kept) < count:
        words = np.frombuffer(draw(4 * (count - len(kept))), np.dtype("<u4")) & mask
        kept = np.concatenate([kept, words[words < bound]])
    return kept


def ternary(draw: Bytes, count: int) -> NDArray[np.int8]:
    """Return uniform numbers of {-1, 0, 1}, int8 (count,): five to a byte, bytes from 243 rejected."""
    kept = np.empty(0, np.uint8)
    needed = -(-count // 5)
    while len(kept) < needed:
        drawn = np.frombuffer(draw((needed - len(kept)) * 256 // 243 + 32), np.uint8)
        kept = np.concatenate([kept, drawn[drawn < 243]])
    return _TRITS[kept[:needed]].reshape(-1)[:count].copy()


def errors(draw: Bytes, count: int) -> NDArray[np.int8]:
    """Return centred binomial numbers, int8 (count,): the difference of the sums of 21 bits each."""
    words = np.frombuffer(draw(8 * count), np.dtype("<u4")) & np.uint32((1 << ERROR_BITS) - 1)
    ones = np.bitwise_count(words).view(np.int8)
    out: NDArray[np.int8] = ones[:count] - ones[count:]
    return out


def flood(draw: Bytes, bits: int, primes: tuple[int, ...], count: int) -> NDArray[np.int64]:
    """Return residues int64 (count, primes) of integers uniform on [-2^(bits-1), 2^(bits-1))."""
    words = -(-bits // 32)
    drawn = np.frombuffer(draw(4 * words * count), np.dtype("<u4")).reshape(count, words).astype(np.int64)
    if bits % 32:
        drawn[:, -1] &= (1 << bits % 32) - 1
    modulus = np.array(primes, np.int64)
    rest = np.zeros((count, len(primes)), np.int64)
    for word in range(words - 1, -1, -1):
        rest = ((rest << 32) + drawn[:, word, np.newaxis]) % modulus
    half = np.array([(1 << (bits - 1)) % prime for prime in primes], np.int64)
    out: NDArray[np.int64] = (rest - half) % modulus
    return out


def uniform_digits(draw: Bytes, shape: tuple[int, int, int]) -> Digits:
    """Return numbers uniform modulo q' = 2^(16 D), uint16 (vectors, rows, D)."""
    return np.frombuffer(draw(2 * math.prod(shape)), np.dtype("<u2")).astype(np.uint16).reshape(shape)


def public_ring_elements(seed: bytes, number: int, primes: tuple[int, ...], degree: int) -> NDArray[np.uint32]:
    """Expand public element `number` of the ring from a seed, transformed: uint32 (primes, degree), uniform."""
    out = np.empty((len(primes), degree), np.uint32)
    for k, prime in enumerate(primes):
        label = b"treaty lattice public element" + number.to_bytes(8, "little") + prime.to_bytes(8, "little")
        out[k] = uniform(Keystream(hashlib.sha256(label + seed).digest()).raw, prime, degree)
    return out


def public_transforms(parameters: Parameters, seed: bytes, numbers: Sequence[int], threads: int) -> Residues:
    """Return the transforms of some of a~_0, a~_1, ...: uint32 (primes, numbers, N)."""
    out = np.empty((len(parameters.primes), len(numbers), parameters.degree), np.uint32)

    def expand(first: int, stop: int) -> None:
        for place in range(first, stop):
            out[:, place] = public_ring_elements(seed, numbers[place], parameters.primes, parameters.degree)

    share(expand, len(numbers), threads)
    return out
