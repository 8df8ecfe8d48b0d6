"""SipHash-2-4 of 128 bits over many byte strings at a time: a pseudorandom function under a secret key.

Aumasson and Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012, in the reference implementation's form of
128 bits.
"""

from __future__ import annotations

import numpy as np

from treaty.machine.arrays import Bytes, Integers, Words
from treaty.machine.kernels import inner, kernel

KEY = 16
"""Bytes of a key."""

_State = tuple[np.uint64, np.uint64, np.uint64, np.uint64]


def hashes(data: Bytes, offsets: Integers, key: bytes) -> Words:
    """Hash each string ``data[offsets[i]:offsets[i + 1]]``, uint64 (n, 2)."""
    out = np.empty((len(offsets) - 1, 2), np.uint64)
    data, offsets = data.view(), offsets.view()
    # or the kernel would be compiled for either kind
    data.flags.writeable = offsets.flags.writeable = False
    _hash_each(data, offsets, np.frombuffer(key, "<u8").astype(np.uint64), out)
    return out


@kernel
def _hash_each(data: Bytes, offsets: Integers, key: Words, out: Words) -> None:
    for row in range(out.shape[0]):
        start, stop = offsets[row], offsets[row + 1]
        v0, v1 = key[0] ^ np.uint64(0x736F6D6570736575), key[1] ^ np.uint64(0x646F72616E646F6D ^ 0xEE)
        v2, v3 = key[0] ^ np.uint64(0x6C7967656E657261), key[1] ^ np.uint64(0x7465646279746573)
        # eight bytes are one word; the last word also takes what is left of the string
        whole = start + (stop - start) // 8 * 8
        for at in range(start, whole + 8, 8):
            word = np.uint64(0)
            for k in range(min(8, stop - at)):
                word |= np.uint64(data[at + k]) << np.uint64(8 * k)
            if at == whole:  # the last word has the length on top
                word |= np.uint64(stop - start) << np.uint64(56)
            v3 ^= word
            for _ in range(2):
                v0, v1, v2, v3 = _mixed(v0, v1, v2, v3)
            v0 ^= word
        v2 ^= np.uint64(0xEE)
        for half in range(2):
            for _ in range(4):
                v0, v1, v2, v3 = _mixed(v0, v1, v2, v3)
            out[row, half] = v0 ^ v1 ^ v2 ^ v3
            v1 ^= np.uint64(0xDD)


@inner
def _mixed(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> _State:
    # rotations are written out: a function of their own is compiled again for each number of bits
    v0 += v1
    v2 += v3
    v1 = ((v1 << np.uint64(13)) | (v1 >> np.uint64(51))) ^ v0
    v3 = ((v3 << np.uint64(16)) | (v3 >> np.uint64(48))) ^ v2
    v0 = ((v0 << np.uint64(32)) | (v0 >> np.uint64(32))) + v3
    v2 += v1
    v3 = ((v3 << np.uint64(21)) | (v3 >> np.uint64(43))) ^ v0
    v1 = ((v1 << np.uint64(17)) | (v1 >> np.uint64(47))) ^ v2
    return v0, v1, (v2 << np.uint64(32)) | (v2 >> np.uint64(32)), v3
