"""What an auditor finds in queries of the lattice map once their maker has shown the secrets.

With s at hand b_j - a_j s is e_j + round(q m_j / 2^bits): the auditor compares it with the number that should be in it,
and accepts errors up to 21, the largest that the protocol draws. So an entry that passes holds this very number, and
its error no more than answers are flooded for.

A maker cannot show another secret than it used: for another s' it would need a_0 (s - s') as small as errors are, a
short solution of ring-SIS for an a_0 that comes from a seed of all parties. By counting, such solutions hardly exist:
of the at most 5^N differences each invertible one gives a uniform product, small with probability (85 / q)^N.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.compute import Flags, Int32s, Integers
from treaty.crypto.lattice.map_client import LinearMapClient
from treaty.crypto.lattice.parameters import ERROR_BITS
from treaty.crypto.lattice.transform import Residues


class DisclosedQuery:
    """One vector of a query, words (primes, n) and own (primes, N), whose secret, int8 (N,), is shown.

    `fits` says whether the secret is ternary and the one that the query was made with.
    """

    def __init__(self, client: LinearMapClient, secret: NDArray[np.int8], words: Residues, own: Residues) -> None:
        self._primes = _column(client)
        self._left = np.zeros(words.shape, np.int64)
        self.fits = bool((np.abs(secret) <= 1).all() and (words < self._primes).all() and (own < self._primes).all())
        if self.fits:
            masks, masks_of_own = client.masks(secret[np.newaxis])
            self._left = (words.astype(np.int64) - masks[0]) % self._primes
            self.fits = bool(self._small((own.astype(np.int64) - masks_of_own[0]) % self._primes).all())

    def holds(self, encoded: Integers) -> Flags:
        """Tell which entries are encryptions of the numbers that `encode` made these residues of: bool (n,)."""
        return self._small((self._left - encoded) % self._primes)

    def _small(self, residues: Integers) -> Flags:
        """Tell which numbers, by their residues (primes, n), are errors: the same of at most 21 in all."""
        centred = np.where(residues > self._primes // 2, residues - self._primes, residues)
        small: Flags = (centred == centred[0]).all(axis=0) & (np.abs(centred[0]) <= ERROR_BITS)
        return small


def encode(client: LinearMapClient, fields: Int32s) -> Integers:
    """Return residues, int64 (primes, n), of what stands for entries' numbers, int32 (fields, n), without an error."""
    encoded = np.zeros((len(client.parameters.primes), fields.shape[1]), np.int64)
    for values, scale in zip(fields.astype(np.int64), client.scales, strict=True):
        for k, prime in enumerate(client.parameters.primes):  # numbers below 2^31 times residues below 2^31
            encoded[k] += values * (scale % prime) % prime
    return encoded % _column(client)


def _column(client: LinearMapClient) -> Integers:
    return np.array(client.parameters.primes, np.int64)[:, np.newaxis]
