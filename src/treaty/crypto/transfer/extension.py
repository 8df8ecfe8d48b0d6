"""Oblivious transfers: base transfers on a curve, and from 128 of them millions more with symmetric ciphers alone.

*Base transfers* (`base_offer`, `base_choose`, `base_pairs`): a sender gets pairs of keys, a receiver one key of each
pair, by choices that the sender never sees. Chou and Orlandi, "The Simplest Protocol for Oblivious Transfer",
LATINCRYPT 2015, over ristretto255, whose order is prime. The receiver's choices are hidden whatever the sender
computes: its points are uniform either way.

*Extension*: Roy, "SoftSpokenOT", CRYPTO 2022, semi-honest, with small fields, GF(2^6) or GF(2^8); with GF(2) it is the
protocol of Ishai, Kilian, Nissim and Petrank, CRYPTO 2003, as improved by Asharov, Lindell, Schneider and Zohner, CCS
2013. Of each transfer the sender has a row q, the receiver a random bit r and a row t with q = t xor r Delta (128 bits
each); Delta, which the sender alone knows, is the same for all. A bit is sent for each field but one.

====  =========================  ==============================================================
step  who                        what
====  =========================  ==============================================================
1     receiver                   makes `Receiver`, sends its `offer`
2     sender                     makes ``Sender(offer)``, sends its `points`
3     receiver                   sends what ``prepare(points)`` returns
4     sender                     takes it in ``prepare``
5     receiver, then sender      ``extend(count)`` returns a message, too; the sender takes it in
                                 ``extend``; as often as wanted, in the same pieces
6     both                       make of their rows what they need: `random_pairs` and so on, below
====  =========================  ==============================================================

Rows must be hashed before anything of them is sent, no two with the same tweak, by the `hash` of either end (`aes`):
its key is a digest of offer and points, so that it differs in each session, and neither end chooses it.

Assumptions: computational Diffie-Hellman in ristretto255; SHA-256 as a random oracle, and as a pseudorandom generator
in the trees of seeds; AES-128 as a pseudorandom generator and, under the public key, as a random permutation; parties
that are honest but curious (nothing here checks that a receiver uses the same bits in all columns). Security is
computational, about 128 bits; nothing fails by chance.

Bits are packed into words, the first lowest: bit i of word w of a plane is transfer 64 w + i's.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.aes import Hash, Streams
from treaty.crypto.transfer.sodium import GENERATOR, multiples, multiply, random_scalar, shifted
from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Words, pieces
from treaty.machine.kernels import kernel, new_array

PLANE_WORDS = 8  # planes are a multiple of it long: they are turned in blocks of 64 planes by 8 words, 4 kB
KAPPA = 128  # base transfers, and bits of a row
STEP = 64 * PLANE_WORDS  # transfers are made by multiples of this number
KEY = 16  # bytes of a base transfer's key
_PIECE = 1 << 13  # transfers at a time: 1.3 MB of leaves
# bits that stay when blocks of 32, 16, ... 1 bits are exchanged: ones and zeros in turn
_MASKS = np.array([(2**64 - 1) // (2**width + 1) for width in (32, 16, 8, 4, 2, 1)], np.uint64)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SeedTrees:
    """Groups of seed trees, numbers of trees and of their levels: a level for each of the 128 bits of a row."""

    groups: tuple[tuple[int, int], ...]

    @property
    def levels(self) -> list[int]:
        """The levels of each tree."""
        return [levels for trees, levels in self.groups for _ in range(trees)]

    @property
    def sent(self) -> int:
        """The bits sent for each transfer."""
        return len(self.levels) - 1

    def bits(self) -> Iterator[tuple[int, int]]:
        """Yield of each tree its first bit of a row, and the one after its last."""
        return pairwise(np.cumsum([0, *self.levels]).tolist())


# With more levels fewer bits are sent, and more leaves are made: a transfer takes 13 ns at 4 levels, where 31 bits are
# sent, 25 at `QUICK` (21 bits), and 50 at `SHORT` (15 bits), of which the last pays below some 250 Mbit/s
QUICK, SHORT = SeedTrees(((20, 6), (2, 4))), SeedTrees(((16, 8),))


def packed(bits: Bytes) -> Words:
    """Pack bits (n,) into words, the first lowest, uint64 (ceil(n / 64),)."""
    padded = np.zeros(-(-len(bits) // 64) * 64, np.uint8)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def unpacked(words: Words, count: int) -> Bytes:
    """Return the first `count` bits of words, uint8 (count,)."""
    return np.unpackbits(words.astype("<u8", copy=False).view(np.uint8), count=count, bitorder="little")


@kernel
def transpose(planes: Words, rows: Words, start: int, stop: int) -> None:
    """Write bit i of plane p, uint64 (64 p, w), as bit p of row i, (64 w, p), for blocks [start, stop) of 8 words."""
    block = np.empty((64, PLANE_WORDS), np.uint64)
    for word in range(start * PLANE_WORDS, stop * PLANE_WORDS, PLANE_WORDS):
        for group in range(planes.shape[0] // 64):
            for k in range(64):
                for lane in range(PLANE_WORDS):
                    block[k, lane] = planes[64 * group + k, word + lane]
            # six rounds exchange blocks of 32, 16, ... 1 bits (Warren, Hacker's Delight, 7-3), of eight words at once
            for level in range(6):
                step, shift, mask = 32 >> level, np.uint64(32 >> level), _MASKS[level]
                for base in range(0, 64, 2 * step):
                    for k in range(base, base + step):
                        for lane in range(PLANE_WORDS):
                            low, high = block[k, lane], block[k + step, lane]
                            swapped = ((low >> shift) ^ high) & mask
                            block[k, lane] = low ^ (swapped << shift)
                            block[k + step, lane] = high ^ swapped
            for lane in range(PLANE_WORDS):
                for k in range(64):
                    rows[64 * (word + lane) + k, group] = block[k, lane]


@kernel
def fold_trees(leaves: Words, planes: Words) -> None:
    """Sum each tree's leaves, uint64 (trees, 2^k, w): into plane j those whose number has bit j, into leaf 0 all.

    Planes are (trees, k, w). The other leaves hold partial sums afterwards.
    """
    for tree in range(leaves.shape[0]):
        half = leaves.shape[1]
        for plane in range(planes.shape[1] - 1, -1, -1):
            half //= 2
            for word in range(leaves.shape[2]):
                planes[tree, plane, word] = 0
            for number in range(half):
                for word in range(leaves.shape[2]):
                    upper = leaves[tree, number + half, word]
                    planes[tree, plane, word] ^= upper
                    leaves[tree, number, word] ^= upper


@kernel
def add_where(rows: Words, bits: Words, delta: Words, out: Words) -> None:
    """Add `delta`, uint64 (2,), to the rows, (n, 2), whose bit is 1; bits are packed, (ceil(n / 64),)."""
    for row in range(rows.shape[0]):
        mask = np.uint64(0) - ((bits[row >> 6] >> np.uint64(row & 63)) & np.uint64(1))
        out[row, 0] = rows[row, 0] ^ (mask & delta[0])
        out[row, 1] = rows[row, 1] ^ (mask & delta[1])


def base_offer() -> tuple[Bytes, Bytes]:
    """Draw the sender's secret scalar, uint8 (32,), to keep, and its point, (32,), to send."""
    secret = random_scalar()
    return secret, multiples(GENERATOR, secret[None])[0]


def base_choose(offered: Bytes, choices: Flags) -> tuple[Bytes, Bytes]:
    """Choose one key of each of n pairs: return the keys, uint8 (n, 16), to keep, and points, (n, 32), to send.

    `offered` is the sender's point, (32,); CryptoError if it is the identity or no point. Neither instructions nor
    their order depend on the choices, (n,).
    """
    scalars = np.stack([random_scalar() for _ in choices])
    shared = multiples(offered, scalars)
    points = multiples(GENERATOR, scalars)
    # point r G, or r G + offer where the choice is 1: uniform either way
    mask = -choices.astype(np.uint8)[:, None]
    points ^= mask & (points ^ shifted(points, offered))
    return _keys(offered, points, shared), points


def base_pairs(secret: Bytes, offered: Bytes, points: Bytes) -> Bytes:
    """Return both keys of each pair, uint8 (n, 2, 16), after the receiver's points, (n, 32), have come.

    CryptoError if one of these is the identity or no point.
    """
    shared = multiply(points, secret)
    # the key of choice 1: secret (point - offer)
    other = shifted(shared, multiples(offered, secret[None])[0], back=True)
    return np.stack([_keys(offered, points, shared), _keys(offered, points, other)], axis=1)


def _keys(offered: Bytes, points: Bytes, shared: Bytes) -> Bytes:
    # number, offer and answer are hashed, too, or keys of two runs could be equal
    domain = b"treaty base transfer\0" + offered.tobytes()
    rows = zip(points, shared, strict=True)
    hashed = (
        hashlib.sha256(domain + number.to_bytes(4, "little") + point.tobytes() + common.tobytes()).digest()[:KEY]
        for number, (point, common) in enumerate(rows)
    )
    return np.frombuffer(b"".join(hashed), np.uint8).reshape(-1, KEY)


class Receiver:
    """The end with a random bit for each transfer. `offer`, uint8 (32,), goes to the sender first."""

    hash: Hash  # once the sender's points have come
    session: bytes

    def __init__(self, shape: SeedTrees = QUICK) -> None:
        self.shape = shape
        self._secret, self.offer = base_offer()
        self._streams: list[list[Streams]] = []

    def prepare(self, points: Bytes) -> Bytes:
        """Take the sender's points, uint8 (128, 32); return the corrections of its seeds, (128, 2, 16).

        CryptoError if one is the identity or no point.
        """
        pads = base_pairs(self._secret, self.offer, points)
        self.session = _session(self.offer, points)
        self.hash = hash_of(self.session)
        out, seeds = np.empty_like(pads), []
        for first, last in self.shape.bits():
            nodes = np.frombuffer(secrets.token_bytes(KEY), np.uint8)[None]
            # a sender with bit d has pad d, and gets the sum of all nodes of the other side
            for bit in range(first, last):
                nodes = _children(nodes)
                for side in (0, 1):
                    out[bit, 1 - side] = np.bitwise_xor.reduce(nodes[1 - side :: 2]) ^ pads[bit, side]
            seeds.append(nodes)
        self._streams = _lanes(self.shape, seeds)
        return out

    def extend(self, count: int, lane: int = 0) -> tuple[Words, Words, Words]:
        """Make transfers, `count` a multiple of `STEP`: return the message, the bits and the rows.

        The sender takes messages of one lane, of two, in the order in which they were made.
        The message is uint64 (`SeedTrees.sent`, count / 64); bits are packed, (count / 64,); rows are (count, 2).
        """
        words = _whole(count) // 64
        message, chosen = np.empty((self.shape.sent, words), np.uint64), np.empty(words, np.uint64)
        rows = np.empty((count, 2), np.uint64)
        for part in pieces(count, _PIECE):
            at, planes, bits = _planes(self.shape, self._streams[lane], part)
            chosen[at] = bits[0]
            # all trees are to have the bits of the first: the message has the differences
            np.bitwise_xor(bits[1:], bits[0], out=message[:, at])
            transpose(planes, rows[part], 0, planes.shape[1] // PLANE_WORDS)
        return message, chosen, rows


class Sender:
    """The end with `delta`, uint64 (2,), which it keeps. `points`, uint8 (128, 32), go to the receiver.

    CryptoError if the receiver's `offer` is the identity or no point.
    """

    def __init__(self, offer: Bytes, shape: SeedTrees = QUICK) -> None:
        self.shape = shape
        drawn = np.frombuffer(secrets.token_bytes(KAPPA // 8), np.uint8)
        self.delta: Words = drawn.view("<u8").astype(np.uint64)
        # a tree's part of delta has the choices at its levels, the last level's first
        self._bits = np.unpackbits(drawn, bitorder="little")
        self._choices = np.concatenate([self._bits[first:last][::-1] for first, last in shape.bits()])
        self._pads, self.points = base_choose(offer, self._choices.astype(np.bool_))
        self.session = _session(offer, self.points)
        self.hash = hash_of(self.session)
        self._streams: list[list[Streams]] = []

    def prepare(self, corrections: Bytes) -> None:
        """Take what the receiver's `prepare` has returned, uint8 (128, 2, 16)."""
        seeds = []
        for first, last in self.shape.bits():
            nodes, gap = np.zeros((1, KEY), np.uint8), 0  # all nodes of a level but the one at `gap`
            for bit, choice in enumerate(self._choices[first:last].tolist(), first):
                nodes = _children(nodes)
                nodes[2 * gap : 2 * gap + 2] = 0
                side = 1 - choice
                known = np.bitwise_xor.reduce(nodes[side::2])
                # the correction has the sum of the sibling's side; less the others of that side it is the sibling
                nodes[2 * gap + side] = corrections[bit, side] ^ self._pads[bit] ^ known
                gap = 2 * gap + choice
            # slot s has leaf s xor gap; the unknown one is the first, which counts in no plane
            seeds.append(nodes[np.arange(len(nodes)) ^ gap])
        self._streams = _lanes(self.shape, seeds)

    def extend(self, count: int, message: Words, lane: int = 0) -> Words:
        """Make the transfers of a receiver's message, uint64 (`SeedTrees.sent`, count / 64); return rows (count, 2).

        CryptoError for a message of another shape.
        """
        levels, sent = self.shape.levels, self.shape.sent
        if message.shape != (sent, _whole(count) // 64):
            raise CryptoError(f"expected columns {(sent, count // 64)}, got {message.shape} - of an extension")
        rows, others = np.empty((count, 2), np.uint64), slice(levels[0], None)  # planes of all trees but the first
        # masks of all ones where delta has a 1, and the line of the message of each plane's tree
        masks = np.uint64(0) - self._bits[others, None].astype(np.uint64)
        lines = np.repeat(np.arange(sent), levels[1:])
        for part in pieces(count, _PIECE):
            at, planes, _ = _planes(self.shape, self._streams[lane], part)
            # with slots shifted by the gap, a plane is the receiver's plus delta's bit times the tree's random bits
            planes[others] ^= masks & message[lines, at]
            transpose(planes, rows[part], 0, planes.shape[1] // PLANE_WORDS)
        return rows


def _lanes(shape: SeedTrees, seeds: list[Bytes]) -> list[list[Streams]]:
    """Return the streams of two lanes, of the trees of each group together."""
    lanes: list[list[Streams]] = [[], []]
    first = 0
    for trees, _ in shape.groups:
        of_group = np.concatenate(seeds[first : first + trees])
        lanes[0].append(Streams(of_group))
        lanes[1].append(Streams(of_group, 1 << 60))
        first += trees
    return lanes


def _planes(shape: SeedTrees, streams: list[Streams], part: slice) -> tuple[slice, Words, Words]:
    """Return the words of some transfers, their planes, uint64 (128, words), and each tree's random bits."""
    at = slice(part.start // 64, part.stop // 64)
    words, tree, plane = at.stop - at.start, 0, 0
    planes, bits = np.empty((KAPPA, words), np.uint64), np.empty((shape.sent + 1, words), np.uint64)
    for (trees, levels), stream in zip(shape.groups, streams, strict=True):
        leaves = stream.next_words(words).reshape(trees, -1, words)
        fold_trees(leaves, planes[plane : plane + trees * levels].reshape(trees, levels, words))
        # leaf 0 is the sum of all now, the tree's random bits
        bits[tree : tree + trees] = leaves[:, 0]
        tree, plane = tree + trees, plane + trees * levels
    return at, planes, bits


def _session(offer: Bytes, points: Bytes) -> bytes:
    return hashlib.sha256(b"treaty transfer hash\0" + offer.tobytes() + points.tobytes()).digest()


def hash_of(session: bytes, number: int = 0) -> Hash:
    """Return the hash of a session's rows from that tweak on; the more hashes one key has, the less each is worth."""
    return Hash(hashlib.sha256(session + number.to_bytes(8, "little")).digest()[:16])


def _children(nodes: Bytes) -> Bytes:
    """Double a level of seeds, uint8 (n, 16): the children of node k are 2 k and 2 k + 1."""
    doubled = b"".join(hashlib.sha256(b"treaty seed tree\0" + node.tobytes()).digest() for node in nodes)
    return np.frombuffer(doubled, np.uint8).reshape(-1, KEY).copy()


def _whole(count: int) -> int:
    if count < 0 or count % STEP:
        raise CryptoError(f"expected a multiple of {STEP} transfers, got {count}")
    return count


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
    add_where(q, flips, delta, out)
    return out


@kernel
def joined(rows: Words, count: int) -> Words:
    """Join `count` rows each to one of a transfer of 1 of 2^count, either end's: uint64 (n * count, 2) to (n, 2).

    The receiver's number has its `count` bits, the first lowest. Its row, hashed, is the sender's message of that
    number: see `message_words`.
    """
    # with weights 1, x, x^2, ... in GF(2^128) a sender's row less the receiver's is the number, as an element of the
    # field, times Delta
    out: Words = new_array((rows.shape[0] // count, 2), np.uint64)
    one, top = np.uint64(1), np.uint64(63)
    # Horner's rule. The field is that of polynomials modulo x^128 + x^7 + x^2 + x + 1, lowest coefficient first.
    for row in range(out.shape[0]):
        low, high = np.uint64(0), np.uint64(0)
        for k in range(count - 1, -1, -1):
            carry = np.uint64(0) - (high >> top)
            high = (high << one) | (low >> top)
            low = (low << one) ^ (carry & np.uint64(0x87))
            low ^= rows[row * count + k, 0]
            high ^= rows[row * count + k, 1]
        out[row, 0] = low
        out[row, 1] = high
    return out


@kernel
def entry_of(tables: Bytes, numbers: Bytes, first: int) -> Bytes:
    """Return one entry of each table, uint8 (rows, entries, bytes), all of which are looked at.

    A table has the entries from number `first` on; those before are zeros.
    """
    out: Bytes = new_array((len(numbers), tables.shape[2]), np.uint8)
    for row in range(len(numbers)):
        for byte in range(tables.shape[2]):
            found = np.uint8(0)
            for at in range(tables.shape[1]):
                found |= tables[row, at, byte] & (np.uint8(0) - np.uint8(at + first == numbers[row]))
            out[row, byte] = found
    return out


def message_words(sender: Sender, q: Words, first: int, count: int) -> NDArray[np.uint16]:
    """Return the sender's random messages of transfers of 1 of 2^count, 16 bits each: uint16 (n, 2^count).

    `q` are `joined` rows, (n, 2). The receiver has the lowest bits of ``hash.rows(t, first)[:, 0]`` of its joined rows.
    """
    numbers = np.arange(1 << count, dtype=np.uint64)[:, None]
    choices = (numbers >> np.arange(count, dtype=np.uint64)) & np.uint64(1)  # (2^count, count)
    deltas = joined((choices[:, :, None] * sender.delta).reshape(-1, 2), count)
    # of two numbers at a time, the first the lowest
    found = [sender.hash.low_bits(q, first, deltas[k : k + 2], 16) for k in range(0, 1 << count, 2)]
    return np.stack(found, axis=1).astype("<u4").view("<u2").astype(np.uint16, copy=False)
