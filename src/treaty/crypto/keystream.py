"""Keystreams of AES-256-CTR: secret random numbers in bulk, and masks that cancel.

*Random numbers* (`Keystream`). A stream is made for one batch and thrown away, so neither a fork nor a restored
snapshot of the process makes two batches alike. Distinguishing it from uniform bytes breaks AES (at the few gigabytes
drawn from one key the birthday bound of the 128-bit block leaves an advantage below 2^-70).

*Masks of vectors* modulo 2^64, one keystream per pair of participants and message, read as little-endian uint64::

    key   = HKDF-Expand-SHA256(seed, info = nonce)
    nonce = SHA-256(job_id, protocol, round_id, attempt, vector_id)        each part length-prefixed

A nonce serves once: two vectors under one mask reveal their difference. To all without the seed a masked vector is
indistinguishable from a uniform one (HKDF and AES as pseudorandom functions). The key of one message reveals nothing of
the seed or of other messages' masks. Masks are added 128 KB at a time, at several GB/s, so that vectors of a few
thousand numbers cost mostly the derivation of a key and the set-up of its cipher. `PairStreams` saves that if the key
of a single mask is never revealed: one cipher per pair for all messages, set to each by its nonce.

*Masks of single numbers* (`CancellingMasks`) for sums over givers, of whom every pair has a seed. The sum of all masked
numbers is that of the numbers; without a giver's own numbers, or one of all its seeds, each masked number is uniform.
From the sum of two givers each would learn the other's part, so its receiver must be neither of them.

*Re-randomised shares* (`FreshShares`) of two servers, before they are opened: their sum stays, and nothing else can be
inferred from them. Shares consist of a dealer's random numbers and of what the servers keep; a receiver with the
dealer's help could subtract the former and would be left with equations about the rest. So the servers have a seed that
the dealer never sees: one adds the keystream under it, the other subtracts it. To all without the seed, shares are then
uniform among all shares of the same numbers.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from treaty.crypto.payload import check_payload, from_words, to_words
from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Floats, Words, pieces

KEY_BYTES = 32
RING_BITS, FRACTION_BITS = 128, 64  # of fixed-point numbers: from -2^63 to 2^63, with 64 bits behind the point
_RING_WORDS = RING_BITS // 64
_CHUNK = 1 << 14  # numbers at a time: keystream and sum stay in the cache
_OPEN = 64  # ciphers at a time
_STREAM = b"treaty stream of a pair"


class Keystream:
    """A generator of secret random numbers, by default under a fresh key of the operating system's generator.

    A given key of 32 bytes must be as secret, and serve this stream alone, or streams of different numbers below 2^64,
    each of less than 2^68 bytes.
    """

    def __init__(self, key: bytes | None = None, number: int = 0) -> None:
        key = secrets.token_bytes(32) if key is None else key
        # the number is the upper half of the counter, so that streams never overlap
        counter = number.to_bytes(8, "big") + bytes(8)
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()

    def raw(self, count: int) -> bytes:
        """Return uniform bytes."""
        return self._cipher.update(bytes(count))

    def bits(self, bits: int, rows: int) -> Words:
        """Return uniform numbers below 2^bits, uint64 (rows, ceil(bits / 64)), little-endian words."""
        words = -(-bits // 64)
        raw = self._cipher.update(bytes(8 * rows * words))
        out = np.frombuffer(raw, np.dtype("<u8")).astype(np.uint64).reshape(rows, words)
        if bits % 64:  # the highest word has fewer bits
            out[:, -1] &= np.uint64((1 << (bits % 64)) - 1)
        return out

    def below(self, bound: int, rows: int) -> Words:
        """Return exactly uniform numbers below `bound`, uint64 (rows, words)."""
        limit = to_words([bound], -(-bound.bit_length() // 64))[0]
        out = self.bits(bound.bit_length(), rows)
        # rejection, as a remainder would favour small numbers
        again = np.flatnonzero(~_less(out, limit))
        while len(again):
            out[again] = self.bits(bound.bit_length(), len(again))
            again = again[~_less(out[again], limit)]
        return out


def _less(rows: Words, limit: Words) -> Flags:
    """Return which numbers are below the limit; time does not depend on them, as all words are read."""
    less = np.zeros(len(rows), np.bool_)
    # upwards: a higher word overrules the lower ones
    for word in range(len(limit)):
        equal = rows[:, word] == limit[word]
        less = np.where(equal, less, rows[:, word] < limit[word])
    return less


def length_prefixed(*parts: str | int | bytes) -> bytes:
    """Join parts so that no other list of parts gives the same bytes; integers are in decimal."""
    raw = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in raw)


def mask_nonce(job_id: str, protocol: str, round_id: int, attempt: int, vector_id: str) -> bytes:
    """Name one masked vector of a job, 32 bytes."""
    return hashlib.sha256(length_prefixed(job_id, protocol, round_id, attempt, vector_id)).digest()


def mask_key(seed: bytes, nonce: bytes) -> bytes:
    """Derive the key of one message's mask, 32 bytes."""
    return HKDFExpand(SHA256(), KEY_BYTES, info=nonce).derive(seed)


class UsedNonces:
    """Nonces that have served: two vectors under one mask show their difference."""

    def __init__(self) -> None:
        self._used: set[bytes] = set()

    def use(self, nonce: bytes) -> None:
        """Record a nonce; CryptoError if it was used before."""
        if nonce in self._used:
            raise CryptoError("expected a new nonce for every masked vector, got one again; nothing was masked")
        self._used.add(nonce)


def pair_keys(
    name: str, seeds: Mapping[str, bytes], peers: Iterable[str], nonce: bytes
) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of the masks that `name` adds, and of those it subtracts; CryptoError if a peer has no seed."""
    peers = set(peers)
    if not peers <= seeds.keys():
        raise CryptoError(f"expected peers that {name} has a seed with, got {len(peers - seeds.keys())} others")
    # added for peers that sort after it, subtracted for the others: so masks of a pair cancel
    ordered = sorted(peers)
    added = [mask_key(seeds[peer], nonce) for peer in ordered if peer > name]
    return added, [mask_key(seeds[peer], nonce) for peer in ordered if peer < name]


class PairStreams:
    """Masks between a participant and its peers, if no mask is removed by revealing its key.

    The mask of a message is AES-256-CTR from the counter given by the nonce's first 16 bytes, under
    HKDF-Expand-SHA256(seed, info = "treaty stream of a pair"). Nonces are hashes: that streams of two of 2^20 messages
    of 2^14 blocks overlap has a probability of 2^-75.
    """

    def __init__(self, name: str, seeds: Mapping[str, bytes]) -> None:
        start = modes.CTR(bytes(16))
        # added for peers that sort after `name`, subtracted for the others, so that masks of a pair cancel
        self._streams = [
            (Cipher(algorithms.AES(mask_key(seed, _STREAM)), start).encryptor(), np.add if peer > name else np.subtract)
            for peer, seed in sorted(seeds.items())
        ]

    def add(self, values: Words, nonce: bytes) -> None:
        """Add and subtract all peers' masks to values (n,), in place, modulo 2^64; a new `mask_nonce` per vector."""
        for cipher, _ in self._streams:
            cipher.reset_nonce(nonce[:16])
        _add_streams(values, self._streams)


def add_masks(values: Words, added: Sequence[bytes], subtracted: Sequence[bytes]) -> None:
    """Add and subtract the masks of some keys, as from `mask_key`, to values (n,), in place, modulo 2^64."""
    signed = [(key, np.add) for key in added] + [(key, np.subtract) for key in subtracted]
    from_zero = modes.CTR(bytes(16))
    # some ciphers at a time: each has a context in memory
    for some in pieces(len(signed), _OPEN):
        _add_streams(values, [(Cipher(algorithms.AES(key), from_zero).encryptor(), put) for key, put in signed[some]])


def _add_streams(values: Words, streams: Sequence[tuple[CipherContext, np.ufunc]]) -> None:
    # encrypting zeros writes the keystream itself, into one buffer for all masks
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


class CancellingMasks:
    """A giver's masks; its 32-byte seeds are shared with each other giver (without any, numbers go unmasked)."""

    def __init__(self, job: str, protocol: str, name: str, seeds: Mapping[str, bytes]) -> None:
        self._job, self._protocol, self._name, self._seeds = job, protocol, name, seeds
        self._used = UsedNonces()

    def draw(self, count: int, bits: int, place: int, purpose: str, givers: Sequence[str] | None = None) -> list[int]:
        """Return this giver's masks of `count` numbers: sums and differences of numbers below 2^bits.

        `place` and `purpose` identify the sum, alike at all givers: they make the nonce. `givers` are the other givers
        of this sum, by default all.
        """
        others = list(self._seeds if givers is None else givers)
        nonce = mask_nonce(self._job, self._protocol, place, 0, purpose)
        self._used.use(nonce)
        masks = [0] * count
        added, subtracted = pair_keys(self._name, self._seeds, others, nonce)
        # of each pair one giver adds what the other subtracts
        for keys, sign in ((added, 1), (subtracted, -1)):
            for key in keys:
                for k, drawn in enumerate(from_words(Keystream(key).bits(bits, count))):
                    masks[k] += sign * drawn
        return masks

    def cover(self, numbers: Sequence[int], place: int, purpose: str) -> Words:
        """Mask the numbers of a sum modulo 2^128, uint64 (n, 2); see `draw`."""
        masks = self.draw(len(numbers), RING_BITS, place, purpose)
        return to_words([(x + m) % (1 << RING_BITS) for x, m in zip(numbers, masks, strict=True)], _RING_WORDS)


def total(parts: Sequence[Words]) -> list[int]:
    """Add up masked numbers modulo 2^128, uint64 (n, 2) each; return signed sums. CryptoError if shapes differ."""
    for part in parts:
        check_payload([part], "masked numbers", (np.uint64, (len(parts[0]), _RING_WORDS)))
    sums = [sum(column) for column in zip(*(from_words(part) for part in parts), strict=True)]
    # the upper half of the ring are the negative numbers
    half = 1 << (RING_BITS - 1)
    return [(x + half) % (1 << RING_BITS) - half for x in sums]


def to_fixed(values: Floats) -> list[int]:
    """Convert real numbers (n,) to x 2^64 rounded; CryptoError if one is not finite, or of size 2^62 or more."""
    if not np.all(np.abs(values) < 2.0**62):
        raise CryptoError("expected numbers below 2^62 in size - before they are masked: training has diverged")
    # exact: floats are scaled by a power of two
    return [round(math.ldexp(value, FRACTION_BITS)) for value in values.tolist()]


def from_fixed(numbers: Sequence[int]) -> Floats:
    """Convert signed fixed-point numbers to float64 (n,)."""
    return np.array([number / (1 << FRACTION_BITS) for number in numbers], np.float64)


class FreshShares:
    """Re-randomises the shares of server `own`, 0 or 1; no one but the other server has the seed of this use."""

    def __init__(self, own: int, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise CryptoError(f"expected a seed of {KEY_BYTES} bytes, got {len(seed)} - at shares for users")
        self._own, self._seed, self._last = own, seed, -1

    def numbers(self, message: int, shares: Words) -> Words:
        """Re-randomise additive shares modulo 2^64, uint64 (...).

        `message` is the same at both servers, and larger than in every call before, of numbers or bits (CryptoError).
        """
        # one server adds what the other subtracts
        mask = self._stream(message).bits(64, shares.size).reshape(shares.shape)
        fresh: Words = shares - mask if self._own else shares + mask
        return fresh

    def bits(self, message: int, shares: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Re-randomise XOR shares of bits, uint8 (...) of 0 and 1; see `numbers`."""
        drawn = np.frombuffer(self._stream(message).raw(-(-shares.size // 8)), np.uint8)
        return shares ^ np.unpackbits(drawn, count=shares.size).reshape(shares.shape)

    def _stream(self, message: int) -> Keystream:
        if message <= self._last:
            raise CryptoError(
                f"expected a message after number {self._last}, got {message}, whose keystream may have been used - at"
                " shares for users"
            )
        # two messages under one keystream would show the difference of the original shares
        self._last = message
        return Keystream(mask_key(self._seed, b"treaty fresh shares" + message.to_bytes(8, "big")))
