"""Packing of several small sums into one plaintext: rows before encryption, bin sums after decryption.

With n rows at most and integers |g_i| <= g_max, 0 <= h_i <= h_max (fixed point already):

    b_g = bitlen(2 n g_max) + 1,  b_h = bitlen(n h_max) + 1,  b_c = bitlen(n) + 1,  b = b_g + b_h + b_c
    gh_i = ((g_i + g_max) 2^{b_h} + h_i) 2^{b_c} + 1            one product of ciphertexts adds all three
    sum of rows: count = low b_c bits, sum h = next b_h, the rest = sum g + g_max count
    k = floor((P - 2) / b) sums side by side in one plaintext of P bits, the first one highest

All fields are non-negative and bounded by the public n, so no carry passes from one to the next. The widths follow from
public bounds alone and reveal nothing of the data.

References: Chen et al., SecureBoost+, arXiv 2110.10927, sections on GH packing and cipher compressing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import SumsBounds
from treaty.errors import CryptoError

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Packing:
    """Places of the three fields, and how many sums share a plaintext; CryptoError if not even one sum fits."""

    bounds: SumsBounds
    plaintext_bits: int  # P: Okamoto-Uchiyama |n| // 3, Paillier |n|

    def __post_init__(self) -> None:
        if self.per_plaintext < 1:
            raise CryptoError(
                f"a packed sum of {self.sum_bits} bits exceeds the plaintext of {self.plaintext_bits - 2} - lower"
                " fractional_bits, or take a longer key"
            )

    @property
    def count_bits(self) -> int:
        """Width of the count, b_c."""
        return self.bounds.n_rows.bit_length() + 1

    @property
    def hess_bits(self) -> int:
        """Width of the sum of hessians, b_h."""
        return (self.bounds.n_rows * self.bounds.hess_bound).bit_length() + 1

    @property
    def grad_bits(self) -> int:
        """Width of the shifted sum of gradients, b_g."""
        return (2 * self.bounds.n_rows * self.bounds.grad_bound).bit_length() + 1

    @property
    def sum_bits(self) -> int:
        """Width of all three, b: the distance between neighbouring sums of a plaintext."""
        return self.grad_bits + self.hess_bits + self.count_bits

    @property
    def per_plaintext(self) -> int:
        """Sums per plaintext, k."""
        return (self.plaintext_bits - 2) // self.sum_bits

    def pack_rows(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Words:
        """Pack the fixed-point derivatives (rows,) of one row each as gh_i: little-endian words (rows, ceil(b / 64)).

        CryptoError if there are more rows than n_rows, or a value exceeds its bound.
        """
        bounds = self.bounds
        if len(grad) > bounds.n_rows:
            raise CryptoError(f"expected at most {bounds.n_rows} rows, got {len(grad)} - at packing")
        bounds.check(grad, hess, "packing")
        out = np.zeros((len(grad), -(-self.sum_bits // 64)), np.uint64)
        out[:, 0] = 1
        _put(out, self.count_bits, hess.astype(np.uint64))
        _put(out, self.count_bits + self.hess_bits, (grad + bounds.grad_bound).astype(np.uint64))
        return out

    def group_starts(self, sums: int) -> NDArray[np.int64]:
        """Cut into the groups of k sums that share a plaintext, int64 (groups + 1,); the last may be shorter."""
        return np.minimum(np.arange(-(-sums // self.per_plaintext) + 1) * self.per_plaintext, sums).astype(np.int64)

    def unpack_sums(self, plaintexts: Words, sums: int) -> NDArray[np.int64]:
        """Split decrypted plaintexts, words (ceil(sums / k), limbs), into sums of grad and hess and counts, (sums, 3).

        CryptoError if the number of plaintexts does not fit `sums`, or a field exceeds its bound.
        """
        starts = self.group_starts(sums)
        if len(plaintexts) != len(starts) - 1:
            raise CryptoError(f"expected {len(starts) - 1} plaintexts for {sums} sums, got {len(plaintexts)}")
        group = np.repeat(np.arange(len(plaintexts)), np.diff(starts))
        out = np.empty((sums, 3), np.int64)
        base = (starts[group + 1] - 1 - np.arange(sums)) * self.sum_bits
        count = _take(plaintexts, group, base, self.count_bits)
        hess = _take(plaintexts, group, base + self.count_bits, self.hess_bits)
        grad = _take(plaintexts, group, base + self.count_bits + self.hess_bits, self.grad_bits)
        bounds, n = self.bounds, np.uint64(self.bounds.n_rows)
        one_hess, one_grad = np.uint64(bounds.hess_bound), np.uint64(2 * bounds.grad_bound)
        if (count > n).any() or (hess > one_hess * count).any() or (grad > one_grad * count).any():
            raise CryptoError("a decrypted sum exceeds what its rows can hold - the other side did not only add")
        out[:, 2], out[:, 1] = count, hess
        out[:, 0] = grad.astype(np.int64) - bounds.grad_bound * out[:, 2]
        return out


def _put(out: Words, bit: int, values: Words) -> None:
    """Add values (below 2^63) to the number in each row, at a bit position where it is still zero."""
    word, shift = divmod(bit, 64)
    out[:, word] |= values << np.uint64(shift)
    if shift and word + 1 < out.shape[1]:
        out[:, word + 1] |= values >> np.uint64(64 - shift)


def _take(rows: Words, row: NDArray[np.int64], bit: NDArray[np.int64], width: int) -> Words:
    """Read the field of `width` <= 64 bits at `bit` of the number in each named row; zero beyond the row's end."""
    padded = np.concatenate([rows, np.zeros((len(rows), 2), np.uint64)], axis=1)
    word, shift = bit // 64, (bit % 64).astype(np.uint64)
    low = padded[row, word] >> shift
    # 64 - shift would be 64 at shift 0, which numpy leaves undefined: shift twice
    high = (padded[row, word + 1] << np.uint64(1)) << (np.uint64(63) - shift)
    taken: Words = (low | high) & np.uint64((1 << width) - 1)
    return taken
