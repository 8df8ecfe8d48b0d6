"""A pseudorandom function for each of many bins: one party has its keys, the other one value of each, neither has both.

Kolesnikov, Kumaresan, Rosulek and Trieu, "Efficient Batched Oblivious PRF with Applications to Private Set
Intersection", CCS 2016 (KKRT). With C a pseudorandom code of 512 bits, s a secret of as many, and rows q and t of
transfer extension, q = t xor (C(x) and s): the value of bin b at y is H(q xor (C(y) and s), b), which the receiver, who
put x into the bin, knows for y = x, as it is H(t, b) then.

====  =========================  ==============================================================
step  who                        what
====  =========================  ==============================================================
1     receiver                   makes `OprfReceiver`, sends its `offer`
2     sender                     makes ``OprfSender(offer)``, sends its `points`
3     receiver                   takes them in ``accept``; ``extend(codes)`` returns a message and
                                 its values, as often as wanted
4     sender                     ``extend(message)`` returns the rows of these bins, with which
                                 ``values`` takes any inputs
====  =========================  ==============================================================

C(x) is AES-128 of x, of 128 bits, under four public keys; H is BLAKE2b. The values at other inputs are pseudorandom
to the receiver where the code words differ in 128 places or more, which two random ones of 512 bits fail with a
probability of 2^-102: over all pairs of an input and its bin's item, 3 * 2^28 at most, of 2^-72.

Assumptions: those of `extension`'s base transfers; AES-128 as a pseudorandom generator and function; BLAKE2b
correlation robust under code words; parties that are honest but curious. A receiver that sends other messages than
`extend` returns may learn s, and with it every value.

*Bins* come from cuckoo hashing: every item is in one of its three bins, no bin has two items. The bins are three
tables, and an item's place in each is its own hash, so that its three bins differ. Without a stash 1.27 bins an item
fail with a probability of 2^-40 at most (Pinkas, Schneider, Zohner, "Scalable Private Set Intersection Based on OT
Extension", ACM TOPS 2018, by experiments from 2^10 items on); there are 1.3 here. What fails in the shortest lists, of
1024, are four items with the same three bins: 77 n^-5 = 2^-43.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.aes import Streams, permuted
from treaty.crypto.transfer.extension import PLANE_WORDS, base_choose, base_offer, base_pairs, transpose
from treaty.crypto.transfer.sodium import row_digests
from treaty.machine.arrays import Int32s, Integers, Words
from treaty.machine.kernels import kernel, new_array
from treaty.machine.shared_work import share

TABLES = 3
MOST = 1 << 25  # items: for more, a table would take half a gigabyte, and hashes of 40 bits would not reach all bins

_STEPS = 5000  # items that one insertion may push out: some tens are usual


def bins_for(items: int, multiple: int) -> int:
    """Return the bins of all three tables for some items, each table's a multiple of `multiple`."""
    return TABLES * multiple * -(-13 * items // (10 * TABLES * multiple))


def placed(digests: Words, bins: int) -> Int32s | None:
    """Return the number of each bin's item, -1 for none, int32 (bins,); None if the items do not fit."""
    table = np.full(bins, -1, np.int32)
    return table if _insert(digests, bins // TABLES, secrets.randbits(62) | 1, table) else None


@kernel
def _place(low: Any, high: Any, which: Any, length: int) -> Any:
    """Return an item's bin in one table."""
    if which == 0:
        part = low
    elif which == 1:
        part = (low >> np.uint64(40)) | (high << np.uint64(24))
    else:
        part = high >> np.uint64(16)
    # 40 bits of its digest, scaled to the table's length, and the table's first bin
    scaled = (part & np.uint64((1 << 40) - 1)) * np.uint64(length) >> np.uint64(40)
    return np.int64(scaled) + which * length


@kernel
def places(digests: Words, bins: int) -> Int32s:
    """Return the three bins of every item, int32 (n, 3), by its uniform digest, uint64 (n, 2)."""
    out: Int32s = new_array((digests.shape[0], TABLES), np.int32)
    for row in range(out.shape[0]):
        for which in range(TABLES):
            out[row, which] = _place(digests[row, 0], digests[row, 1], which, bins // TABLES)
    return out


@kernel
def _insert(digests: Words, length: int, seed: int, table: Int32s) -> bool:
    """Insert all items by a random walk; return False if one is left without a bin."""
    state = np.uint64(seed)
    for number in range(digests.shape[0]):
        item, came_from = np.int64(number), np.int64(-1)
        # an item without a free bin pushes out that of one of its other two bins
        for _ in range(_STEPS):
            low, high = digests[item, 0], digests[item, 1]
            at = -1
            for table_number in range(3):
                place = _place(low, high, table_number, length)
                if table[place] < 0:
                    at = place
                    break
            if at >= 0:
                table[at] = item
                item = np.int64(-1)
                break
            # xorshift: which item is pushed out is random, and stays at this party
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            which = np.int64(state >> np.uint64(33)) % 3
            at = _place(low, high, which, length)
            if at == came_from:
                at = _place(low, high, (which + 1) % 3, length)
            item, table[at], came_from = table[at], item, at
        if item >= 0:
            return False
    return True


WIDTH = 512  # base transfers, and bits of a code word
WORDS = WIDTH // 64
VALUE = 3  # words of a value: 192 bits
STEP = 64 * PLANE_WORDS  # bins are taken by multiples of this number
_CODES = 4
_LEAST_BLOCKS = 8  # blocks of planes worth a thread of their own


def codes(key: bytes, inputs: Words) -> Words:
    """Return the code words, uint64 (n, 8), of inputs, (n, 2), under a public key."""
    out = np.empty((len(inputs), WORDS), np.uint64)
    # 128 bits under each of four keys
    for number in range(_CODES):
        own = hashlib.sha256(b"treaty code\0" + bytes([number]) + key).digest()[:16]
        out[:, 2 * number : 2 * number + 2] = permuted(own, inputs)
    return out


class OprfReceiver:
    """The end that puts one input into each bin. `offer`, uint8 (32,), goes to the sender first."""

    def __init__(self) -> None:
        self._secret, self.offer = base_offer()
        self._streams: list[Streams] = []

    def accept(self, points: NDArray[np.uint8]) -> None:
        """Take the sender's points, uint8 (512, 32); CryptoError if one is the identity or no point."""
        pairs = base_pairs(self._secret, self.offer, points)
        self._streams = [Streams(pairs[:, 0]), Streams(pairs[:, 1])]

    def extend(self, codes: Words, first: int, threads: int = 1) -> tuple[Words, Words]:
        """Put inputs into the next bins: return the message, uint64 (n, 8), and the values of the bins, (n, 3).

        `codes`, (n, 8), are the inputs' code words, random ones for empty bins; n is a multiple of `STEP`. `first` is
        the number of the first bin.
        """
        rows, message = (_rows(streams, len(codes), threads) for streams in self._streams)
        # t_0 xor t_1 xor C(x): the sender's q is t_0 xor (C(x) and s)
        message ^= rows
        message ^= codes
        numbered = np.column_stack([rows, np.arange(first, first + len(rows), dtype=np.uint64)])
        return message, row_digests(numbered, VALUE, threads)


class OprfSender:
    """The end that takes the function of any input. `points`, uint8 (512, 32), go to the receiver.

    CryptoError if the receiver's `offer` is the identity or no point.
    """

    def __init__(self, offer: NDArray[np.uint8]) -> None:
        drawn = np.frombuffer(secrets.token_bytes(WIDTH // 8), np.uint8)
        self._secret: Words = drawn.view("<u8").astype(np.uint64)
        keys, self.points = base_choose(offer, np.unpackbits(drawn, bitorder="little").astype(np.bool_))
        self._streams = Streams(keys)

    def extend(self, message: Words, threads: int = 1) -> Words:
        """Return the rows of the next bins, uint64 (n, 8), from the receiver's message, of the same shape."""
        return _rows(self._streams, len(message), threads) ^ (message & self._secret)

    def values(self, rows: Words, first: int, bins: Integers, codes: Words, threads: int = 1) -> Words:
        """Return the values, uint64 (n, 3), of inputs with these code words, (n, 8), in these bins, int64 (n,).

        `rows` are those of `extend` of the bins from number `first` on.
        """
        # the row of each code word's bin xor the secret's part of the word, and the bin's number
        numbered = np.column_stack([rows[bins - first] ^ (codes & self._secret), bins.astype(np.uint64)])
        return row_digests(numbered, VALUE, threads)


def _rows(streams: Streams, count: int, threads: int) -> Words:
    assert count % STEP == 0
    planes = streams.next_words(count // 64, threads)
    rows = np.empty((count, WORDS), np.uint64)
    share(lambda a, b: transpose(planes, rows, a, b), count // STEP, threads, _LEAST_BLOCKS)
    return rows
