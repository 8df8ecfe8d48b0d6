"""Transfer extension: from 128 base transfers to millions of random ones, with symmetric ciphers alone.

Roy, "SoftSpokenOT", CRYPTO 2022, semi-honest, with small fields GF(2^fold); at ``fold=1`` it is the protocol of
Ishai, Kilian, Nissim and Petrank, CRYPTO 2003, as improved by Asharov, Lindell, Schneider and Zohner, CCS 2013. Of each
transfer the sender has a row q, the receiver a random bit r and a row t with q = t xor r Delta (128 bits each); Delta,
which the sender alone knows, is the same for all. 128 / fold - 1 bits travel for each, from the receiver to the sender.

====  =========================  ==============================================================
step  who                        what
====  =========================  ==============================================================
1     receiver                   makes `Receiver`, sends its `offer`
2     sender                     makes ``Sender(offer)``, sends its `points`
3     receiver                   sends what ``prepare(points)`` returns
4     sender                     takes it in ``prepare``
5     receiver, then sender      ``extend(count)`` returns a message besides; the sender takes it in
                                 ``extend``; as often as wanted, in the same pieces
6     both                       make of their rows what they need: `random_pairs` and so on, below
====  =========================  ==============================================================

Rows must be hashed before anything of them is shown, no two with the same tweak, by the `hash` of either end
(`treaty.crypto.transfer.aes`): its key is a digest of offer and points, so that it is another in each session, and
neither end chooses it.

Assumptions: those of the base transfers; AES-128 as a pseudorandom generator and, under the public key, as a random
permutation; SHA-256 as a pseudorandom generator in the trees of seeds; parties that are honest but curious (nothing
here checks that a receiver uses the same bits in all columns). Security is computational, 128 bits; nothing fails by
chance.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer import base, bits
from treaty.crypto.transfer.aes import Hash, Streams
from treaty.errors import CryptoError
from treaty.machine.arrays import pieces

KAPPA = 128
"""Base transfers, and bits of a row."""

STEP = 64 * bits.WORDS
"""Transfers are made by multiples of this number."""

_PIECE = 1 << 13  # transfers at a time: 512 kB of leaves at a fold of 4, which lie in a core's cache

Words = NDArray[np.uint64]


class Receiver:
    """The end with a random bit for each transfer. `offer`, uint8 (32,), goes to the sender first.

    It has its `hash` once the sender's points have come.
    """

    hash: Hash

    def __init__(self, fold: int = 4) -> None:
        assert fold in (1, 2, 4, 8)
        self._fold = fold
        self._secret, self.offer = base.offer()
        self._streams = Streams(np.empty((0, base.KEY), np.uint8))

    def prepare(self, points: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Take the sender's points, uint8 (128, 32); return what it makes its seeds of, (128, 2, 16).

        Raises CryptoError where one is the identity or no point.
        """
        pads = base.pairs(self._secret, self.offer, points).reshape(-1, self._fold, 2, base.KEY)
        self.hash = _hash_of(self.offer, points)
        out, seeds = np.empty_like(pads), []
        for tree, pad in enumerate(pads):
            nodes = np.frombuffer(secrets.token_bytes(base.KEY), np.uint8)[None]
            for level in range(self._fold):  # whoever chose bit d has pad d, and gets the sum of all other nodes
                nodes = _children(nodes)
                for side in (0, 1):
                    out[tree, level, 1 - side] = np.bitwise_xor.reduce(nodes[1 - side :: 2]) ^ pad[level, side]
            seeds.append(nodes)
        self._streams = Streams(np.concatenate(seeds))
        return out.reshape(KAPPA, 2, base.KEY)

    def extend(self, count: int) -> tuple[Words, Words, Words]:
        """Make transfers, `count` a multiple of `STEP`: return the message, the bits and the rows.

        The message is uint64 (128 / fold - 1, count / 64); bits are packed, (count / 64,); rows are (count, 2).
        """
        trees, words = KAPPA // self._fold, _whole(count) // 64
        message, chosen = np.empty((trees - 1, words), np.uint64), np.empty(words, np.uint64)
        rows = np.empty((count, 2), np.uint64)
        for part in pieces(count, _PIECE):
            at = slice(part.start // 64, part.stop // 64)
            planes = np.empty((trees, self._fold, at.stop - at.start), np.uint64)
            leaves = self._streams.next_words(planes.shape[2]).reshape(trees, -1, planes.shape[2])
            bits.fold(leaves, planes)
            chosen[at] = leaves[0, 0]
            np.bitwise_xor(leaves[1:, 0], leaves[0, 0], out=message[:, at])
            bits.transpose(planes.reshape(KAPPA, -1), rows[part], 0, planes.shape[2] // bits.WORDS)
        return message, chosen, rows


class Sender:
    """The end with `delta`, uint64 (2,), which it keeps. `points`, uint8 (128, 32), go to the receiver.

    Raises CryptoError where the receiver's `offer` is the identity or no point.
    """

    def __init__(self, offer: NDArray[np.uint8], fold: int = 4) -> None:
        assert fold in (1, 2, 4, 8)
        self._fold = fold
        drawn = np.frombuffer(secrets.token_bytes(KAPPA // 8), np.uint8)
        self.delta: Words = drawn.view("<u8").astype(np.uint64)
        # bit j of a tree's part of delta is the choice at the tree's level fold - 1 - j, whose nodes have it last
        self._bits = np.unpackbits(drawn, bitorder="little").reshape(-1, fold)
        choices = self._bits[:, ::-1]
        self._pads, self.points = base.choose(offer, choices.reshape(-1).astype(np.bool_))
        self.hash = _hash_of(offer, self.points)
        self._streams = Streams(np.empty((0, base.KEY), np.uint8))

    def prepare(self, corrections: NDArray[np.uint8]) -> None:
        """Take what the receiver's `prepare` has returned, uint8 (128, 2, 16)."""
        corrections = corrections.reshape(-1, self._fold, 2, base.KEY)
        pads = self._pads.reshape(-1, self._fold, base.KEY)
        seeds = []
        for tree, choices in enumerate(self._bits[:, ::-1]):
            nodes, gap = np.zeros((1, base.KEY), np.uint8), 0  # all nodes of a level but the one at `gap`
            for level, choice in enumerate(choices.tolist()):
                nodes = _children(nodes)
                nodes[2 * gap : 2 * gap + 2] = 0
                side = 1 - choice
                known = np.bitwise_xor.reduce(nodes[side::2])
                nodes[2 * gap + side] = corrections[tree, level, side] ^ pads[tree, level] ^ known
                gap = 2 * gap + choice
            # slot s has leaf s xor gap; the first, which is not known, counts in no plane, whatever is in its place
            seeds += [nodes[slot ^ gap] for slot in range(len(nodes))]
        self._streams = Streams(np.stack(seeds))

    def extend(self, count: int, message: Words) -> Words:
        """Make the transfers of a receiver's message, uint64 (128 / fold - 1, count / 64); return rows (count, 2).

        Raises CryptoError for a message of another shape.
        """
        trees = KAPPA // self._fold
        if message.shape != (trees - 1, _whole(count) // 64):
            raise CryptoError(f"expected columns {(trees - 1, count // 64)}, got {message.shape} - of an extension")
        rows, masks = np.empty((count, 2), np.uint64), np.uint64(0) - self._bits.astype(np.uint64)
        for part in pieces(count, _PIECE):
            at = slice(part.start // 64, part.stop // 64)
            planes = np.empty((trees, self._fold, at.stop - at.start), np.uint64)
            leaves = self._streams.next_words(planes.shape[2]).reshape(trees, -1, planes.shape[2])
            bits.fold(leaves, planes)
            bits.correct(planes[1:], masks[1:], np.ascontiguousarray(message[:, at]))
            bits.transpose(planes.reshape(KAPPA, -1), rows[part], 0, planes.shape[2] // bits.WORDS)
        return rows


def _hash_of(offer: NDArray[np.uint8], points: NDArray[np.uint8]) -> Hash:
    return Hash(hashlib.sha256(b"treaty transfer hash\0" + offer.tobytes() + points.tobytes()).digest()[:16])


def _children(nodes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Double a level of seeds, uint8 (n, 16): the children of node k are 2 k and 2 k + 1."""
    doubled = b"".join(hashlib.sha256(b"treaty seed tree\0" + node.tobytes()).digest() for node in nodes)
    return np.frombuffer(doubled, np.uint8).reshape(-1, base.KEY).copy()


def _whole(count: int) -> int:
    if count < 0 or count % STEP:
        raise CryptoError(f"expected a multiple of {STEP} transfers, got {count}")
    return count


# ---------------------------------------------------------------- what is made of rows


def random_pairs(sender: Sender, q: Words, first: int, blocks: int = 1) -> tuple[Words, Words]:
    """Return the sender's two random messages of each transfer, uint64 (n, 2 * blocks) each.

    The receiver has ``hash.rows(t, first, blocks)``, the second where its bit is 1. `first` is the number of the first
    row among all that this extension has made.
    """
    return sender.hash.rows(q, first, blocks), sender.hash.rows(q, first, blocks, sender.delta)


def chosen(q: Words, delta: Words, flips: Words) -> Words:
    """Return the sender's rows of transfers by chosen bits, uint64 (n, 2), instead of the receiver's random ones.

    `flips` are the chosen bits xor the random ones, packed, (ceil(n / 64),): the receiver sends them.
    """
    out = np.empty_like(q)
    bits.shift(q, flips, delta, out)
    return out


def joined(rows: Words, count: int) -> Words:
    """Join `count` rows each to one of a transfer of 1 of 2^count, either end's: uint64 (n * count, 2) to (n, 2).

    The receiver's number has its `count` bits, the first lowest. Its row, hashed, is the sender's message of that
    number: see `message_bits`. Rows are summed with weights 1, x, x^2, ... in GF(2^128), so that a sender's row less
    the receiver's is its number, as an element of the field, times Delta.
    """
    out = np.empty((len(rows) // count, 2), np.uint64)
    bits.combine(rows, count, out)
    return out


def message_bits(sender: Sender, q: Words, first: int, count: int, width: int) -> NDArray[np.uint32]:
    """Return the sender's random messages of transfers of 1 of 2^count: of each transfer all of them, uint32 (n,).

    A message has `width` bits, and that of number 0 is the lowest; 2^count * width is at most 32. `q` are `joined`
    rows, (n, 2). The receiver has the lowest bits of ``hash.rows(t, first)[:, 0]`` of its joined rows.
    """
    numbers = np.arange(1 << count, dtype=np.uint64)[:, None]
    choices = (numbers >> np.arange(count, dtype=np.uint64)) & np.uint64(1)  # (2^count, count)
    deltas = joined((choices[:, :, None] * sender.delta).reshape(-1, 2), count)
    return sender.hash.low_bits(q, first, deltas, width)
