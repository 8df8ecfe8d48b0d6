"""Secret random numbers in bulk: an AES-256-CTR keystream under a key from the operating system.

A stream is made for one batch and thrown away, so neither a fork nor a restored snapshot of the process makes two
batches alike. Distinguishing it from uniform bytes breaks AES (at the few gigabytes drawn from one key the birthday
bound of the 128-bit block leaves an advantage below 2^-70).
"""

from __future__ import annotations

import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from treaty.crypto.additive.montgomery import to_words


class Keystream:
    """A generator of secret random numbers, by default under a fresh key of the operating system's generator.

    A given key of 32 bytes must be as secret, and serve this stream alone; or streams of different numbers, from 0 to
    2^64, each of less than 2^68 bytes.
    """

    def __init__(self, key: bytes | None = None, number: int = 0) -> None:
        key = secrets.token_bytes(32) if key is None else key
        counter = number.to_bytes(8, "big") + bytes(8)
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()

    def raw(self, count: int) -> bytes:
        """Return uniform bytes."""
        return self._cipher.update(bytes(count))

    def bits(self, bits: int, rows: int) -> NDArray[np.uint64]:
        """Return uniform numbers below 2^bits, uint64 (rows, ceil(bits / 64)), little-endian words."""
        words = -(-bits // 64)
        raw = self._cipher.update(bytes(8 * rows * words))
        out = np.frombuffer(raw, np.dtype("<u8")).astype(np.uint64).reshape(rows, words)
        if bits % 64:
            out[:, -1] &= np.uint64((1 << (bits % 64)) - 1)
        return out

    def below(self, bound: int, rows: int) -> NDArray[np.uint64]:
        """Return exactly uniform numbers below `bound`, uint64 (rows, words), by rejection."""
        limit = to_words([bound], -(-bound.bit_length() // 64))[0]
        out = self.bits(bound.bit_length(), rows)
        again = np.flatnonzero(~_less(out, limit))
        while len(again):
            out[again] = self.bits(bound.bit_length(), len(again))
            again = again[~_less(out[again], limit)]
        return out


def _less(rows: NDArray[np.uint64], limit: NDArray[np.uint64]) -> NDArray[np.bool_]:
    less = np.zeros(len(rows), np.bool_)
    for word in range(len(limit)):  # upwards: a higher word overrules the lower ones
        equal = rows[:, word] == limit[word]
        less = np.where(equal, less, rows[:, word] < limit[word])
    return less
