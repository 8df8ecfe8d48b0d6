"""A pseudorandom function for each of many bins: one party has its keys, the other one value of each, nobody sees both.

Kolesnikov, Kumaresan, Rosulek and Trieu, "Efficient Batched Oblivious PRF with Applications to Private Set
Intersection", CCS 2016 (KKRT). With C a pseudorandom code of 512 bits, s a secret of as many, and rows q and t of
transfer extension, q = t xor (C(x) and s): the value of bin b at y is H(q xor (C(y) and s), b), which the receiver, who
put x into the bin, knows for y = x, as it is H(t, b) then.

====  =========================  ==============================================================
step  who                        what
====  =========================  ==============================================================
1     receiver                   makes `Receiver`, sends its `offer`
2     sender                     makes ``Sender(offer)``, sends its `points`
3     receiver                   takes them in ``accept``; ``extend(codes)`` returns a message and
                                 its values, as often as wanted
4     sender                     ``extend(message)`` returns the rows of these bins, with which
                                 ``values`` takes any inputs
====  =========================  ==============================================================

C(x) is AES-128 of x, of 128 bits, under four public keys; H is BLAKE2b. The values at other inputs are pseudorandom
to the receiver where the code words differ in 128 places or more, which two random ones of 512 bits fail with a
probability of 2^-102: over all pairs of an input and its bin's item, 3 * 2^28 at most, of 2^-72.

Assumptions: those of `treaty.crypto.transfer.base`; AES-128 as a pseudorandom generator and function; BLAKE2b
correlation robust under code words; parties that are honest but curious. A receiver that sends other messages than
`extend` returns may learn s, and with it every value.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.psi.hashing import row_digests
from treaty.crypto.transfer import base, bits
from treaty.crypto.transfer.aes import Streams, permuted
from treaty.machine.arrays import Integers
from treaty.machine.kernels import kernel
from treaty.machine.shared_work import share

WIDTH = 512
"""Base transfers, and bits of a code word."""

WORDS = WIDTH // 64
VALUE = 3
"""Words of a value: 192 bits."""

STEP = 64 * bits.WORDS
"""Bins are taken by multiples of this number."""

_CODES = 4
_LEAST = 8  # blocks of planes worth a thread of their own

Words = NDArray[np.uint64]


def codes(key: bytes, inputs: Words) -> Words:
    """Return the code words, uint64 (n, 8), of inputs, (n, 2), under a public key."""
    out = np.empty((len(inputs), WORDS), np.uint64)
    for number in range(_CODES):
        own = hashlib.sha256(b"treaty code\0" + bytes([number]) + key).digest()[:16]
        out[:, 2 * number : 2 * number + 2] = permuted(own, inputs)
    return out


class Receiver:
    """The end that puts one input into each bin. `offer`, uint8 (32,), goes to the sender first."""

    def __init__(self) -> None:
        self._secret, self.offer = base.offer()
        self._streams: list[Streams] = []

    def accept(self, points: NDArray[np.uint8]) -> None:
        """Take the sender's points, uint8 (512, 32); CryptoError where one is the identity or no point."""
        pairs = base.pairs(self._secret, self.offer, points)
        self._streams = [Streams(pairs[:, 0]), Streams(pairs[:, 1])]

    def extend(self, codes: Words, first: int, threads: int = 1) -> tuple[Words, Words]:
        """Put inputs into the next bins: return the message, uint64 (n, 8), and the values of the bins, (n, 3).

        `codes`, (n, 8), are the inputs' code words, random ones for empty bins; n is a multiple of `STEP`. `first` is
        the number of the first bin.
        """
        rows, message = (_rows(streams, len(codes), threads) for streams in self._streams)
        message ^= rows
        message ^= codes
        numbered = np.column_stack([rows, np.arange(first, first + len(rows), dtype=np.uint64)])
        return message, row_digests(numbered, VALUE, threads)


class Sender:
    """The end that takes the function of any input. `points`, uint8 (512, 32), go to the receiver.

    Raises CryptoError where the receiver's `offer` is the identity or no point.
    """

    def __init__(self, offer: NDArray[np.uint8]) -> None:
        drawn = np.frombuffer(secrets.token_bytes(WIDTH // 8), np.uint8)
        self._secret: Words = drawn.view("<u8").astype(np.uint64)
        keys, self.points = base.choose(offer, np.unpackbits(drawn, bitorder="little").astype(np.bool_))
        self._streams = Streams(keys)

    def extend(self, message: Words, threads: int = 1) -> Words:
        """Return the rows of the next bins, uint64 (n, 8), by the receiver's message, of the same shape."""
        return _rows(self._streams, len(message), threads) ^ (message & self._secret)

    def values(self, rows: Words, first: int, bins: Integers, codes: Words, threads: int = 1) -> Words:
        """Return the values, uint64 (n, 3), of inputs with these code words, (n, 8), in these bins, int64 (n,).

        `rows` are those of `extend` of the bins from number `first` on.
        """
        numbered = np.empty((len(codes), WORDS + 1), np.uint64)
        _mask(rows, first, bins, codes, self._secret, numbered)
        return row_digests(numbered, VALUE, threads)


def _rows(streams: Streams, count: int, threads: int) -> Words:
    """Return the next bits of every stream as rows, uint64 (count, 8)."""
    assert count % STEP == 0
    planes = streams.next_words(count // 64, threads)
    rows = np.empty((count, WORDS), np.uint64)
    share(lambda a, b: bits.transpose(planes, rows, a, b), count // STEP, threads, _LEAST)
    return rows


@kernel
def _mask(rows: Words, first: int, bins: Integers, codes: Words, secret: Words, out: Words) -> None:
    """Write, of each code word, its bin's row less what the secret takes of the word, and the bin's number."""
    for k in range(codes.shape[0]):
        for word in range(codes.shape[1]):
            out[k, word] = rows[bins[k] - first, word] ^ (codes[k, word] & secret[word])
        out[k, codes.shape[1]] = bins[k]
