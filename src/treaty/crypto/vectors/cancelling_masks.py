"""Numbers modulo a power of two under pairwise masks that cancel in the sum over all givers.

Every pair (a, b) of givers with a before b has a seed; in each sum a adds its keystream and b subtracts it. Whoever
adds up everybody's masked numbers gets their sum; without a giver's own numbers, or one of all its seeds, each masked
number is uniform. From the sum of two givers each would learn the other's part, so its receiver must be neither of
them.

Real numbers are in fixed point, x 2^64 rounded, modulo 2^128: from -2^63 to 2^63, with 64 bits behind the point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.montgomery import from_words, to_words
from treaty.crypto.aggregation.masks import UsedNonces, mask_nonce, pair_keys
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import check_payload
from treaty.errors import CryptoError

RING_BITS = 128
FRACTION_BITS = 64
_WORDS = RING_BITS // 64


class CancellingMasks:
    """A giver's masks; its 32-byte seeds are shared with each other giver (without any, numbers go unmasked)."""

    def __init__(self, job: str, protocol: str, name: str, seeds: Mapping[str, bytes]) -> None:
        self._job, self._protocol, self._name, self._seeds = job, protocol, name, seeds
        self._used = UsedNonces()

    def draw(self, count: int, bits: int, place: int, purpose: str, givers: Sequence[str] | None = None) -> list[int]:
        """Return this giver's masks of `count` numbers: sums and differences of numbers below 2^bits.

        `place` and `purpose` name the sum, alike at all givers and different from every other sum: they make the nonce.
        `givers` are the other givers of this sum, by default all.
        """
        others = list(self._seeds if givers is None else givers)
        nonce = mask_nonce(self._job, self._protocol, place, 0, purpose)
        self._used.use(nonce)
        masks = [0] * count
        added, subtracted = pair_keys(self._name, self._seeds, others, nonce)
        for keys, sign in ((added, 1), (subtracted, -1)):
            for key in keys:
                for k, drawn in enumerate(from_words(Keystream(key).bits(bits, count))):
                    masks[k] += sign * drawn
        return masks

    def cover(self, numbers: Sequence[int], place: int, purpose: str) -> NDArray[np.uint64]:
        """Mask the numbers of a sum modulo 2^128, uint64 (n, 2); see `draw`."""
        masks = self.draw(len(numbers), RING_BITS, place, purpose)
        return to_words([(x + m) % (1 << RING_BITS) for x, m in zip(numbers, masks, strict=True)], _WORDS)


def total(parts: Sequence[NDArray[np.uint64]]) -> list[int]:
    """Add up numbers modulo 2^128, of uint64 (n, 2) each; return signed ones. CryptoError if shapes differ."""
    for part in parts:
        check_payload([part], "masked numbers", (np.uint64, (len(parts[0]), _WORDS)))
    sums = [sum(column) for column in zip(*(from_words(part) for part in parts), strict=True)]
    half = 1 << (RING_BITS - 1)
    return [(x + half) % (1 << RING_BITS) - half for x in sums]


def to_fixed(values: NDArray[np.float64]) -> list[int]:
    """Convert real numbers (n,) to x 2^64 rounded; CryptoError if one is not finite, or of size 2^62 or more."""
    if not np.all(np.abs(values) < 2.0**62):
        raise CryptoError("expected numbers below 2^62 in size - before they are masked: training has diverged")
    fixed = []
    for value in values.tolist():
        mantissa, exponent = math.frexp(value)
        shift = exponent - 53 + FRACTION_BITS
        whole = int(mantissa * 2.0**53)
        fixed.append(whole << shift if shift >= 0 else (whole + (1 << (-shift - 1))) >> -shift)
    return fixed


def from_fixed(numbers: Sequence[int]) -> NDArray[np.float64]:
    """Convert signed fixed-point numbers to float64 (n,)."""
    return np.array([number / (1 << FRACTION_BITS) for number in numbers], np.float64)
