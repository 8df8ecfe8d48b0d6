"""Pseudorandom masks over the integers modulo 2^64, one keystream per pair of participants and message.

The mask of a message under a seed is AES-256-CTR from counter 0, read as little-endian uint64, with::

    key   = HKDF-Expand-SHA256(seed, info = nonce)
    nonce = SHA-256(job_id, protocol, round_id, attempt, vector_id)        each part length-prefixed

A nonce serves once: anybody sees the difference of two vectors under one mask. Where nobody else has the seed a masked
vector is indistinguishable from a uniform one (HKDF and AES as pseudorandom functions). The key of one message reveals
nothing of the seed or of other messages' masks.

Masks are added 128 KB at a time, whatever the vector's length. AES-NI makes them at several GB/s, so that for vectors
of a few thousand numbers most of a mask's cost is the derivation of its key and the set-up of its cipher. Where the key
of a single mask is never told to anybody, `PairStreams` saves that: one cipher per pair for all messages, set to each
by its nonce.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from treaty.errors import CryptoError
from treaty.machine.arrays import pieces

KEY_BYTES = 32
_CHUNK = 1 << 14  # numbers at a time: keystream and sum stay in the cache
_OPEN = 64  # ciphers at a time
_STREAM = b"treaty stream of a pair"


def length_prefixed(*parts: str | int | bytes) -> bytes:
    """Join parts so that no other list of parts gives the same bytes; integers are written in decimal."""
    raw = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in raw)


def mask_nonce(job_id: str, protocol: str, round_id: int, attempt: int, vector_id: str) -> bytes:
    """Name one masked vector of a job, 32 bytes."""
    return hashlib.sha256(length_prefixed(job_id, protocol, round_id, attempt, vector_id)).digest()


def mask_key(seed: bytes, nonce: bytes) -> bytes:
    """Derive the key of one message's mask, 32 bytes."""
    return HKDFExpand(SHA256(), KEY_BYTES, info=nonce).derive(seed)


class UsedNonces:
    """The nonces for which masks were made."""

    def __init__(self) -> None:
        self._used: set[bytes] = set()

    def use(self, nonce: bytes) -> None:
        """Note a nonce; CryptoError if it was used before."""
        if nonce in self._used:
            raise CryptoError("expected a new nonce for every masked vector, got one again; nothing was masked")
        self._used.add(nonce)


def pair_keys(
    name: str, seeds: Mapping[str, bytes], peers: Iterable[str], nonce: bytes
) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of the masks that `name` adds, and of those it subtracts: added for peers that sort after it.

    CryptoError if `name` has no seed with one of the peers.
    """
    peers = set(peers)
    if not peers <= seeds.keys():
        raise CryptoError(f"expected peers that {name} has a seed with, got {len(peers - seeds.keys())} others")
    ordered = sorted(peers)
    added = [mask_key(seeds[peer], nonce) for peer in ordered if peer > name]
    return added, [mask_key(seeds[peer], nonce) for peer in ordered if peer < name]


class PairStreams:
    """Masks between a participant and its peers, of which none is ever removed by revealing its key.

    Masks are added for peers that sort after `name`, and subtracted for the others. The mask of a message is
    AES-256-CTR from the counter given by the nonce's first 16 bytes, under HKDF-Expand-SHA256(seed, info = "treaty
    stream of a pair"). Nonces are hashes: that two of 2^20 messages of 2^14 blocks meet has a chance of 2^-75.
    """

    def __init__(self, name: str, seeds: Mapping[str, bytes]) -> None:
        start = modes.CTR(bytes(16))
        self._streams = [
            (Cipher(algorithms.AES(mask_key(seed, _STREAM)), start).encryptor(), np.add if peer > name else np.subtract)
            for peer, seed in sorted(seeds.items())
        ]

    def add(self, values: NDArray[np.uint64], nonce: bytes) -> None:
        """Add and subtract all peers' masks to values (n,), in place, modulo 2^64; a new `mask_nonce` per vector."""
        for cipher, _ in self._streams:
            cipher.reset_nonce(nonce[:16])
        _add_streams(values, self._streams)


def add_masks(values: NDArray[np.uint64], added: Sequence[bytes], subtracted: Sequence[bytes]) -> None:
    """Add and subtract the masks of some keys, as from `mask_key`, to values (n,), in place, modulo 2^64."""
    signed = [(key, np.add) for key in added] + [(key, np.subtract) for key in subtracted]
    from_zero = modes.CTR(bytes(16))
    for some in pieces(len(signed), _OPEN):
        _add_streams(values, [(Cipher(algorithms.AES(key), from_zero).encryptor(), put) for key, put in signed[some]])


def _add_streams(values: NDArray[np.uint64], streams: Sequence[tuple[CipherContext, np.ufunc]]) -> None:
    """Add or subtract the ciphers' next keystream, in place."""
    most = min(len(values), _CHUNK)
    zeros = memoryview(bytes(8 * most))
    buffer = np.empty(most + 2, np.dtype("<u8"))  # the cipher needs room for another block
    room = buffer.view(np.uint8).data
    for part in pieces(len(values), _CHUNK):
        chunk = values[part]
        plain, mask = zeros[: 8 * len(chunk)], buffer[: len(chunk)]
        for cipher, put in streams:
            cipher.update_into(plain, room)
            put(chunk, mask, chunk)
