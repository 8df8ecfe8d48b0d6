"""AES over whole arrays: key streams of many seeds, and a hash that keeps pairs of rows with a secret difference apart.

The hash is TMMO of Guo, Katz, Wang, Yu, "Efficient and Secure Multiparty Computation from Fixed-Key Block Ciphers",
IEEE S&P 2020: H(x, i) = pi(pi(x) xor i) xor pi(x), where pi is AES-128 under a fixed public key. With pi as a random
permutation it is tweakable circular correlation robust: for a secret Delta the values at x xor Delta cannot be told
from independent uniform ones by who knows x.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_PIECE = 1 << 12  # rows at a time, 64 kB: what lies in a core's own cache
_SPARE = 15  # bytes that `update_into` wants beyond what it writes
_FIXED = hashlib.sha256(b"treaty transfer: fixed key").digest()[:16]


def stream(seed: bytes) -> Any:
    """Return a generator of AES-128's key stream under a seed of 16 bytes, which must serve this stream alone."""
    return Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()


def next_words(streams: list[Any], words: int) -> NDArray[np.uint64]:
    """Return the next words of every stream, uint64 (len(streams), words)."""
    length = 8 * words
    zeros, out = bytes(length), np.empty(len(streams) * length + _SPARE, np.uint8)
    for number, each in enumerate(streams):
        each.update_into(zeros, out[number * length : (number + 1) * length + _SPARE])
    return out[: len(streams) * length].view("<u8").astype(np.uint64, copy=False).reshape(len(streams), words)


def permuted(key: bytes, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply AES under a key of 16 bytes to every row, uint64 (..., 2)."""
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - a permutation of blocks, no cipher
    data = np.ascontiguousarray(rows).astype("<u8", copy=False).reshape(-1).view(np.uint8)
    out = np.empty(data.nbytes + _SPARE, np.uint8)
    cipher.update_into(data.data, out.data)
    return out[: data.nbytes].view("<u8").astype(np.uint64, copy=False).reshape(rows.shape)


def hashed(rows: NDArray[np.uint64], first: int, blocks: int = 1) -> NDArray[np.uint64]:
    """Hash rows, uint64 (n, 2), to `blocks` blocks of 128 bits each, uint64 (n, 2 * blocks).

    Row k and block j have tweak (first + k, j). `first` is the number of the first row within the work of one Delta, so
    that no tweak comes twice where rows could be equal.
    """
    out = np.empty((len(rows), 2 * blocks), np.uint64)
    for start in range(0, len(rows), _PIECE):
        part = slice(start, start + _PIECE)
        inner = permuted(_FIXED, rows[part])
        number = np.arange(first + start, first + start + len(inner), dtype=np.uint64)
        for block in range(blocks):
            tweaked = inner.copy()
            tweaked[:, 0] ^= number
            tweaked[:, 1] ^= np.uint64(block)
            out[part, 2 * block : 2 * block + 2] = permuted(_FIXED, tweaked) ^ inner
    return out
