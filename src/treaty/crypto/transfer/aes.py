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

from treaty.compute import kernel

_PIECE = 1 << 12  # blocks at a time, 64 kB: what lies in a core's own cache
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
    return _permute(_permutation(key), rows)


def _permutation(key: bytes) -> Any:
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - a permutation of blocks, no cipher


def _permute(permutation: Any, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    data = np.ascontiguousarray(rows).astype("<u8", copy=False).reshape(-1).view(np.uint8)
    out = np.empty(data.nbytes + _SPARE, np.uint8)
    permutation.update_into(data.data, out.data)
    return out[: data.nbytes].view("<u8").astype(np.uint64, copy=False).reshape(rows.shape)


def hashed(rows: NDArray[np.uint64], first: int, blocks: int = 1) -> NDArray[np.uint64]:
    """Hash rows, uint64 (n, 2), to `blocks` blocks of 128 bits each, uint64 (n, 2 * blocks).

    Row k and block j have tweak (first + k, j). `first` is the number of the first row within the work of one Delta, so
    that no tweak comes twice where rows could be equal.
    """
    out = np.empty((len(rows), blocks, 2), np.uint64)
    permutation, at_a_time = _permutation(_FIXED), max(1, _PIECE // blocks)
    for start in range(0, len(rows), at_a_time):
        inner = _permute(permutation, rows[start : start + at_a_time])
        tweaked = np.empty((len(inner), blocks, 2), np.uint64)
        _tweak(inner, first + start, tweaked)
        _add(_permute(permutation, tweaked), inner, out[start : start + at_a_time])
    return out.reshape(len(rows), 2 * blocks)


@kernel
def _tweak(inner: NDArray[np.uint64], first: int, out: NDArray[np.uint64]) -> None:
    for row in range(out.shape[0]):
        for block in range(out.shape[1]):
            out[row, block, 0] = inner[row, 0] ^ np.uint64(first + row)
            out[row, block, 1] = inner[row, 1] ^ np.uint64(block)


@kernel
def _add(permuted: NDArray[np.uint64], inner: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    for row in range(out.shape[0]):
        for block in range(out.shape[1]):
            for word in range(2):
                out[row, block, word] = permuted[row, block, word] ^ inner[row, word]
