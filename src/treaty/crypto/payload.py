"""What all ciphers of sums share: payloads, bounds, packing, and ends whose queries are over all rows.

A *payload* is a list of arrays that only the two ends of one cipher interpret.

References: Chen et al., SecureBoost+, arXiv 2110.10927, sections on GH packing and cipher compressing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from treaty.errors import CryptoError
from treaty.machine.arrays import Codes, Int32s, Integers, Words

Payload = list[NDArray[Any]]


def check_payload(payload: Payload, what: str, *expected: tuple[DTypeLike, tuple[int | None, ...]]) -> None:
    """Raise CryptoError unless a payload has arrays of these dtypes and shapes (None: any length), in C order.

    `what` names the payload in the error.
    """
    if len(payload) != len(expected):
        raise CryptoError(f"expected {len(expected)} arrays, got {len(payload)} - in {what}")
    for number, (array, (dtype, shape)) in enumerate(zip(payload, expected, strict=True)):
        fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
        if array.dtype != np.dtype(dtype) or not fits or not array.flags.c_contiguous:
            raise CryptoError(
                f"expected {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape} - in array {number} of {what}"
            )


def to_words(values: Sequence[int], words: int) -> Words:
    """Convert non-negative integers to uint64 (rows, words), little-endian; OverflowError if one does not fit."""
    raw = b"".join(int(x).to_bytes(8 * words, "little") for x in values)
    return np.frombuffer(raw, np.dtype("<u8")).astype(np.uint64).reshape(len(values), words)


def from_words(rows: Words) -> list[int]:
    """Convert uint64 (rows, words), little-endian, to integers."""
    return [int.from_bytes(row.astype("<u8").tobytes(), "little") for row in rows]


# fewest rows of a piece that is not the last, if ciphertexts leave room: each piece has a cost of its own
LEAST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class SumsBounds:
    """Public bounds of a job's sums, in fixed-point integers; CryptoError if negative or if sums may exceed 62 bits."""

    n_rows: int  # most rows a sum may hold, at least 1
    grad_bound: int  # |grad_i| <= grad_bound
    hess_bound: int  # 0 <= hess_i <= hess_bound

    def __post_init__(self) -> None:
        if self.n_rows < 1 or self.grad_bound < 0 or self.hess_bound < 0:
            raise CryptoError("expected n_rows >= 1 and bounds >= 0 - in the bounds of the sums")
        if max(2 * self.n_rows * self.grad_bound, self.n_rows * self.hess_bound, self.n_rows) >= 1 << 62:
            raise CryptoError("sums would exceed 62 bits - lower fractional_bits, or the bound of the gradients")

    def check(self, grad: Integers, hess: Integers, where: str) -> None:
        """Raise CryptoError for derivatives (rows,) beyond their bounds."""
        if len(grad) and not (-self.grad_bound <= grad.min() <= grad.max() <= self.grad_bound):
            raise CryptoError(f"a gradient exceeds its declared bound - at {where}")
        if len(hess) and not (0 <= hess.min() <= hess.max() <= self.hess_bound):
            raise CryptoError(f"a hessian is negative or exceeds its declared bound - at {where}")

    def allow(self, sums: Integers) -> bool:
        """Return whether sums (..., 3) of grad, hess and count are possible for rows within the bounds."""
        grad, hess, count = np.moveaxis(sums, -1, 0)
        most_grad, most_hess = self.grad_bound * count, self.hess_bound * count
        fits = (count >= 0) & (-most_grad <= grad) & (grad <= most_grad) & (0 <= hess) & (hess <= most_hess)
        return bool(fits.all())


class Packing:
    """Packing of several small sums into one plaintext of P = `plaintext_bits`; CryptoError if not even one fits.

    P is |n| // 3 under Okamoto-Uchiyama, |n| under Paillier.
    """

    def __init__(self, bounds: SumsBounds, plaintext_bits: int) -> None:
        # With n rows at most and integers |g_i| <= g_max, 0 <= h_i <= h_max (fixed point already), a row is
        #     gh_i = ((g_i + g_max) 2^{b_h} + h_i) 2^{b_c} + 1        so that one product of ciphertexts adds all three
        # and a sum of rows has its count in the low b_c bits, sum h in the next b_h, sum g + g_max count in the rest.
        # All fields are non-negative and bounded by the public n, so no carry passes from one to the next; widths
        # follow from public bounds and reveal nothing of the data. k sums stand side by side, the first one highest.
        self.bounds = bounds
        self.count_bits = bounds.n_rows.bit_length() + 1
        self.hess_bits = (bounds.n_rows * bounds.hess_bound).bit_length() + 1
        self.grad_bits = (2 * bounds.n_rows * bounds.grad_bound).bit_length() + 1
        self.sum_bits = self.grad_bits + self.hess_bits + self.count_bits
        self.per_plaintext = (plaintext_bits - 2) // self.sum_bits
        if self.per_plaintext < 1:
            raise CryptoError(
                f"a packed sum of {self.sum_bits} bits exceeds the plaintext of {plaintext_bits - 2} - lower"
                " fractional_bits, or take a longer key"
            )

    def pack_rows(self, grad: Integers, hess: Integers) -> Words:
        """Pack the fixed-point derivatives (rows,) of each row as gh_i: little-endian words (rows, ceil(b / 64)).

        CryptoError for more rows than n_rows, or a value beyond its bound.
        """
        bounds = self.bounds
        if len(grad) > bounds.n_rows:
            raise CryptoError(f"expected at most {bounds.n_rows} rows, got {len(grad)} - at packing")
        bounds.check(grad, hess, "packing")
        out = np.zeros((len(grad), -(-self.sum_bits // 64)), np.uint64)
        out[:, 0] = 1
        shifted = (grad + bounds.grad_bound).astype(np.uint64)
        for bit, values in ((self.count_bits, hess.astype(np.uint64)), (self.count_bits + self.hess_bits, shifted)):
            put_field(out, bit, values)
        return out

    def unpack_sums(self, plaintexts: Words, sums: int) -> Integers:
        """Split decrypted plaintexts, words (ceil(sums / k), limbs), into sums of grad and hess and counts, (sums, 3).

        CryptoError if the number of plaintexts does not fit `sums`, or a field exceeds its bound.
        """
        starts = group_starts(sums, self.per_plaintext)
        if len(plaintexts) != len(starts) - 1:
            raise CryptoError(f"expected {len(starts) - 1} plaintexts for {sums} sums, got {len(plaintexts)}")
        group = np.repeat(np.arange(len(plaintexts)), np.diff(starts))
        out = np.empty((sums, 3), np.int64)
        # the first sum of a plaintext is its highest
        base = (starts[group + 1] - 1 - np.arange(sums)) * self.sum_bits
        count = _take(plaintexts, group, base, self.count_bits)
        hess = _take(plaintexts, group, base + self.count_bits, self.hess_bits)
        # shifted by grad_bound for each row that was added
        grad = _take(plaintexts, group, base + self.count_bits + self.hess_bits, self.grad_bits)
        bounds, n = self.bounds, np.uint64(self.bounds.n_rows)
        one_hess, one_grad = np.uint64(bounds.hess_bound), np.uint64(2 * bounds.grad_bound)
        # honest sums fit; what does not would come out as another number of another field
        if (count > n).any() or (hess > one_hess * count).any() or (grad > one_grad * count).any():
            raise CryptoError("a decrypted sum exceeds what its rows can hold - the other side did not only add")
        out[:, 2], out[:, 1] = count, hess
        out[:, 0] = grad.astype(np.int64) - bounds.grad_bound * out[:, 2]
        return out


def group_starts(numbers: int, per_plaintext: int) -> Integers:
    """Return the bounds of groups of numbers that share a plaintext, int64 (groups + 1,); the last may be shorter."""
    return np.minimum(np.arange(-(-numbers // per_plaintext) + 1) * per_plaintext, numbers).astype(np.int64)


def put_field(rows: Words, bit: int, values: Words) -> None:
    """Write numbers (rows,) at a bit of each row, (rows, limbs), that is zero from there on."""
    word, shift = divmod(bit, 64)
    rows[:, word] |= values << np.uint64(shift)
    # a field may straddle two words
    if shift and word + 1 < rows.shape[1]:
        rows[:, word + 1] |= values >> np.uint64(64 - shift)


def _take(rows: Words, row: Integers, bit: Integers, width: int) -> Words:
    """Read the field of `width` <= 64 bits at `bit` of the number in each named row; zero beyond the row's end."""
    padded = np.concatenate([rows, np.zeros((len(rows), 2), np.uint64)], axis=1)
    word, shift = bit // 64, (bit % 64).astype(np.uint64)
    low = padded[row, word] >> shift
    # 64 - shift would be 64 at shift 0, which numpy leaves undefined: shift twice
    high = (padded[row, word + 1] << np.uint64(1)) << (np.uint64(63) - shift)
    taken: Words = (low | high) & np.uint64((1 << width) - 1)
    return taken


def nodes_of_rows(positions: Int32s, starts: Int32s, n_rows: int) -> Int32s:
    """Return the number of each row's node in a query, -1 for none, int32 (n_rows,); as of `SumsClient.query`."""
    nodes = np.full(n_rows, -1, np.int32)
    nodes[positions[starts[0] : starts[-1]]] = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
    return nodes


def slots_of(offsets: Int32s | Integers, features: Integers) -> Integers:
    """Return the slots of some features, in order."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(offsets[f], offsets[f + 1]) for f in features)])


def bins_of(codes: Codes, offsets: Int32s) -> Integers:
    """Return the number of slots of each feature; CryptoError for codes (rows, features) beyond them."""
    bins = np.diff(offsets).astype(np.int64)
    if codes.ndim != 2 or codes.dtype.kind != "u" or len(bins) != codes.shape[1] or (bins < 1).any():
        raise CryptoError("expected unsigned codes (rows, features) and offsets with a slot for every feature")
    if len(codes) and (codes.max(axis=0, initial=0) >= bins).any():
        raise CryptoError("a bin code is beyond its feature's slots")
    return bins


class WholeTableClient:
    """The active party's end of `lattice_sums` and `triple_sums`: servers learn no rows of nodes or samples."""

    blind = True

    def __init__(self, bounds: SumsBounds) -> None:
        self._bounds = bounds  # n_rows is the number of rows of the table
        self._offsets: dict[str, Int32s] = {}

    def setup(self) -> Payload:
        return [np.array([self._bounds.n_rows, self._bounds.grad_bound, self._bounds.hess_bound], np.int64)]

    def _check_start(self, grad: Integers, hess: Integers) -> None:
        n_rows = self._bounds.n_rows
        if grad.shape[-1] != n_rows or grad.shape != hess.shape:
            raise CryptoError(f"expected the derivatives of {n_rows} rows, got {grad.shape[-1]} - at a tree's start")
        self._bounds.check(grad, hess, "a tree's start")

    def _sampled_slots(self, peer: str, features: Int32s | None) -> tuple[Integers, Integers]:
        """Return a server's slots in the tree's sample of columns, and the place of each column's first among them."""
        offsets = self._offsets[peer]
        chosen = np.arange(len(offsets) - 1) if features is None else features.astype(np.int64)
        sizes = np.diff(offsets)[chosen]
        return slots_of(offsets, chosen), (np.cumsum(sizes) - sizes).astype(np.int64)

    def _adds_up(self, sums: Integers, starts: Integers, totals: Integers) -> bool:
        """Return whether sums (nodes, slots, 3) are possible, and each column's add up to the totals (nodes, 3)."""
        per_column = np.add.reduceat(sums, starts, axis=1)
        return self._bounds.allow(sums) and bool((per_column == totals[:, np.newaxis]).all())


class WholeTableServer:
    """A passive party's end of `lattice_sums` and `triple_sums`: codes (rows, features) of all rows."""

    def __init__(self, bounds: SumsBounds, codes: Codes, offsets: Int32s) -> None:
        if len(codes) != bounds.n_rows:
            raise CryptoError(f"expected {bounds.n_rows} rows, got {len(codes)} - in the set-up")
        self._bounds, self._offsets, self._bins = bounds, offsets.astype(np.int64), bins_of(codes, offsets)
        self._columns = np.ascontiguousarray(codes.T)
        self._features: Integers | None = None  # of the tree that is being grown

    def begin_tree(
        self, payload: Payload, rows: Int32s | None, features: Int32s | None = None, n_rows: int | None = None
    ) -> None:
        check_payload(payload, "the start of a tree")
        if rows is not None:
            raise CryptoError(f"expected all {self._bounds.n_rows} rows, got {len(rows)} - at the start of a tree")
        self._features = np.arange(len(self._bins)) if features is None else features.astype(np.int64)

    def add_rows(self, payload: Payload, rows: Int32s | None = None) -> None:
        raise CryptoError("expected nothing more - at the start of a tree")

    def end_tree(self) -> None:
        self._features = None

    def close(self) -> None:
        pass  # nothing outlives the job

    def _growing(self) -> Integers:
        """Return the tree's columns; CryptoError between trees."""
        if self._features is None:
            raise CryptoError("expected begin_tree before a query")
        return self._features
