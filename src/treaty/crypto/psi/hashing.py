"""Hashes of many byte strings at a time, and a commitment to a set of them.

Strings are one array of bytes and the offsets between them, as in Arrow: string i is ``data[offsets[i]:offsets[i+1]]``.
"""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.psi import sodium
from treaty.errors import CryptoError
from treaty.machine.shared_work import share

NODES = 256  # parts of a set with a commitment each: a change shows in which part it is

_LEAST = 1024  # strings worth a thread of their own


def expand(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], rows: NDArray[np.int64], domain: bytes, threads: int = 1
) -> NDArray[np.uint8]:
    """Expand strings `rows` to 64 uniform bytes each, uint8 (n, 64): expand_message_xmd with SHA-512 (RFC 9380, 5.3.1).

    `domain` is the domain separation tag, 1 to 255 bytes.
    """
    if not 1 <= len(domain) <= 255:
        raise CryptoError(f"expected a domain separation tag of 1 to 255 bytes, got {len(domain)}")
    out = np.empty((len(rows), sodium.UNIFORM), np.uint8)
    prime = np.frombuffer(domain + bytes([len(domain)]), np.uint8).copy()
    function = sodium.address("crypto_hash_sha512")
    strings = data, offsets, rows
    share(lambda a, b: sodium.expand_each(function, strings, prime, out, a, b), len(rows), threads, _LEAST)
    return out


def digests(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], rows: NDArray[np.int64], key: bytes, threads: int = 1
) -> NDArray[np.uint64]:
    """Hash strings `rows` with BLAKE2b under a 32-byte key (RFC 7693), a pseudorandom function: uint64 (n, 2)."""
    if len(key) != 32:
        raise CryptoError(f"expected a key of 32 bytes, got {len(key)}")
    out = np.empty((len(rows), sodium.DIGEST), np.uint8)
    secret = np.frombuffer(key, np.uint8).copy()
    function = sodium.address("crypto_generichash")
    strings = data, offsets, rows
    share(lambda a, b: sodium.digest_each(function, strings, secret, out, a, b), len(rows), threads, _LEAST)
    return out.view("<u8").astype(np.uint64, copy=False)


def row_digests(rows: NDArray[np.uint64], words: int, threads: int = 1) -> NDArray[np.uint64]:
    """Hash rows, uint64 (n, w), with BLAKE2b (RFC 7693) to so many words each, uint64 (n, words)."""
    data = np.ascontiguousarray(rows, "<u8").view(np.uint8)
    out = np.empty((len(rows), 8 * words), np.uint8)
    function = sodium.address("crypto_generichash")
    share(lambda a, b: sodium.hash_rows(function, data, out, a, b), len(rows), threads, _LEAST)
    return out.view("<u8").astype(np.uint64, copy=False)


def commit(leaves: NDArray[np.uint64], key: bytes) -> NDArray[np.uint8]:
    """Commit to a set of members with these `digests`, (n, 2): a Merkle tree's nodes over them, uint8 (NODES, 32).

    A member belongs to node ``leaf[0] % NODES``; a node is HMAC-SHA256 of its number and its sorted leaves. The key,
    the same as of the digests, stays secret and is kept: commitments under different keys cannot be compared. Under one
    key, equal nodes mean equal members. Without the key one commitment reveals nothing else; two of different small
    sets tell how many nodes are empty in both. The key and the members open it.
    """
    node = (leaves[:, 0] % np.uint64(NODES)).astype(np.int64)
    order = np.lexsort((leaves[:, 1], leaves[:, 0], node))
    ends = np.cumsum(np.bincount(node, minlength=NODES))
    out = np.empty((NODES, 32), np.uint8)
    start = 0
    for number, end in enumerate(ends):
        members = leaves[order[start:end]].astype("<u8").tobytes()
        mac = hmac.digest(key, b"treaty set node" + bytes([number]) + members, hashlib.sha256)
        out[number] = np.frombuffer(mac, np.uint8)
        start = end
    return out
