"""Randomised response on buckets: every bucket is randomised once, and whatever is computed from it costs no more.

A value in one of k buckets stays with probability p = e^epsilon / (e^epsilon + k - 1) and goes to each other bucket
with r = (1 - p) / (k - 1): epsilon-local differential privacy of the value, given the buckets' edges, which are not
themselves randomised. A person has a value in every column: the columns' epsilons add up, most of all where
columns are copies of each other.

Noise drawn again for the same value would average out. So it is not stored but computed, from a secret key, the row's
number in the party's own table, its bucket and the column's edges: the same value gets the same noise in every later
job, whatever rows it is aligned with and in whichever order. Other edges or another epsilon give independent noise,
which is entered in a ledger.

References
----------
Kairouz, Oh, Viswanath, "Extremal Mechanisms for Local Differential Privacy", NeurIPS 2014; Tian et al., FederBoost,
arXiv 2011.02796, section 4.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from treaty.compute import Floats, Integers
from treaty.privacy.label_rr import change_limit
from treaty.privacy.ledger import Entry, Ledger

MECHANISM = "bucket_rr"


@dataclass(frozen=True, slots=True)
class Column:
    """How a column of `size` buckets (k) is randomised, with `epsilon` per value (infinite: no noise).

    `name` is for the ledger, which does not leave the party. `edges` identify the buckets: other edges get independent
    noise.
    """

    name: str
    size: int
    epsilon: float
    edges: bytes

    def digest(self) -> str:
        """Return the name of a draw of this column's noise."""
        content = msgspec.msgpack.encode([self.name, self.size, self.epsilon, self.edges])
        return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class BucketCost:
    """The epsilon of each column by name: of this draw (`now`), and summed over the ledger's draws (`ever`)."""

    now: dict[str, float]
    ever: dict[str, float]

    @property
    def person(self) -> float:
        """Epsilon of a person in this draw: the sum over columns."""
        return sum(self.now.values())

    @property
    def person_ever(self) -> float:
        """Epsilon of a person over all draws of these columns."""
        return sum(self.ever.values())

    def __str__(self) -> str:
        values = sorted(set(self.now.values())) or [0.0]
        each = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
        return (
            f"epsilon {each} per value and {self.person:g} per person over {len(self.now)} columns; "
            f"{self.person_ever:g} per person with all draws of these columns so far"
        )


def randomise_buckets(
    codes: NDArray[np.uint8], size: int, epsilon: float, words: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """Randomise the buckets (rows,) of one column, all below `size`, with uniform `words`, uint64 (rows, 2).

    The first word of a row decides whether its bucket changes, the second to what. It is compared with the probability
    of a change, rounded up by more than the error of floats and the bias of the remainder: no value costs more than
    `epsilon`. From epsilon 44 on the rounding shows: a value changes with 2^-64 at least.
    """
    if size < 2 or epsilon == math.inf:
        return codes
    others = size - 1
    other = (words[:, 1] % np.uint64(others)).astype(np.uint8)
    return np.where(words[:, 0] < change_limit(others, epsilon), other + (other >= codes), codes).astype(np.uint8)


def chances(size: int, epsilon: float) -> tuple[float, float]:
    """Return r and p - r of k-ary randomised response: 0 and 1 without noise or with one bucket."""
    if size < 2:
        return 0.0, 1.0
    fade = math.exp(-epsilon)
    total = 1.0 + (size - 1) * fade
    return fade / total, -math.expm1(-epsilon) / total


def unbiased(sums: Integers, totals: Integers, size: int, epsilon: float) -> Floats:
    """Return unbiased sums over true buckets, float64 (..., size, parts), from sums over noisy ones of that shape.

    `totals` (..., parts) are of the same rows, which were not chosen by the noise and whose numbers do not depend on
    it. E[noisy sum of b] = p sum_b + r (total - sum_b), so the estimate of sum_b is (noisy sum - r total) / (p - r),
    whose deviation is 1 / (p - r) times that of the noisy sum.
    """
    r, excess = chances(size, epsilon)
    return (sums - r * totals[..., np.newaxis, :]) / excess


class BucketLedger(Ledger):
    """A party's privacy ledger, which also draws its noisy buckets."""

    def noisy(
        self, codes: NDArray[np.uint8], columns: Sequence[Column], row_numbers: Integers, job: str = ""
    ) -> tuple[NDArray[np.uint8], BucketCost]:
        """Return noisy buckets, uint8 (rows, columns), and what they and all earlier ones cost.

        `row_numbers` are the rows' places in the party's own table.
        """
        digests = [column.digest() for column in columns]
        self.spend([
            Entry(digest, job, MECHANISM, column.name, column.epsilon)
            for digest, column in zip(digests, columns, strict=True)
        ])  # fmt: skip
        noisy = np.empty_like(codes)
        for f, (digest, column) in enumerate(zip(digests, columns, strict=True)):
            noisy[:, f] = randomise_buckets(
                codes[:, f], column.size, column.epsilon, self._words(digest, row_numbers, codes[:, f])
            )
        now = {column.name: column.epsilon for column in columns}
        ever = dict.fromkeys(now, 0.0)
        for entry in self.entries():
            if entry.mechanism == MECHANISM and entry.what in ever:
                ever[entry.what] += entry.epsilon
        return noisy, BucketCost(now, ever)

    def _words(self, digest: str, row_numbers: Integers, codes: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Return two words for every row and bucket: the block (row, bucket) encrypted under a key of this draw.

        The row's number alone would not do: the words would stay the same when a value changes, which would show.
        """
        key = hashlib.sha256(b"treaty noisy buckets" + self.key + digest.encode()).digest()
        blocks = np.stack([row_numbers.astype("<u8"), codes.astype("<u8")], axis=1)
        encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - a permutation of distinct blocks
        return np.frombuffer(encryptor.update(blocks.tobytes()), "<u8").reshape(-1, 2).astype(np.uint64)
