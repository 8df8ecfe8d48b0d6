"""Which node of a tree each row is in, shared by two parties: neither learns it.

A row's node is a number of as many bits as the tree has levels so far, the newest bit the lowest, shared exclusively.
On each bit of a share there is one correlated transfer in either direction, q = t xor bit Delta. The rows of a row's
bits are joined as x J + new in GF(2^128), so that the sender's joined row less the receiver's is the receiver's share,
as an element of the field, times Delta: the sender has the pad H(q + u Delta) of every number u, the receiver that of
its own share alone (`stock.Paths` has the same where one party knows the node). These rows serve all that a tree does
with its rows:

* *Routing* (`side_of_rows`): the owner of a node's split knows which rows of the table would go right there. It sends,
  for each row, the sides at all of its nodes, in the order of the other party's share, under the pads of all numbers
  and one mask bit: the other reads the side at the row's node alone, and only as a share.
* *Multiplexing* (`multiplied`): shares of values of rows that go right, and of 0 for others. The transfers of the new
  bit do it, and join the index afterwards.
* *Lookup* (`weight_of_rows`): shares of a leaf's weight, which one party knows, at the row's leaf.

Each row of transfers is hashed once under each tweak: those of a new bit under the numbers of its transfers, those of
the joined rows under numbers that no transfer has (`Transfers.tweaks`), new for every use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer.arithmetic import Wide, selected_with_rows
from treaty.crypto.transfer.extension import joined
from treaty.crypto.transfer.stock import Bits, Steps, Transfers, take, together
from treaty.machine.arrays import Integers, Words, pieces
from treaty.machine.kernels import kernel

MOST_LEVELS = 6  # a table of sides has a bit for each node of the last level, 32 of them
_WORDS = 2  # of a value
WEIGHT_BYTES = 3  # of a share of a leaf's weight in a training
_ROWS_AT_ONCE = 1 << 17  # rows of which one step is about, which bounds its message and memory

Sides = NDArray[np.uint32]


class SharedNodes:
    """Own share of the node of each of `n_rows` rows, in a tree of `levels` levels so far."""

    def __init__(self, transfers: Transfers, n_rows: int) -> None:
        self.transfers, self.n_rows, self.levels = transfers, n_rows, 0
        self.share = np.zeros(n_rows, np.uint32)
        # joined rows of transfers on the other party's share, and on the own one
        self._sent, self._got = np.zeros((2, n_rows, 2), np.uint64)

    def side_of_rows(self, sides: Sides, owns: Sequence[bool]) -> Steps[Bits]:
        """Return shares of whether rows go right at their nodes, (n_rows,): a step for each piece of the rows.

        Bit u of `sides`, (n_rows,), says whether a row goes right at node u of the level, where that node's split is
        own, else it is 0. `owns` says whether this party and the other have a split of the level.
        """
        if not self.levels:
            # all rows are in the root, of which one party knows the sides
            return (sides & np.uint32(1)).astype(np.uint8)
        own, first = np.zeros(self.n_rows, np.uint8), self.transfers.tweaks(self.n_rows)
        for of in pieces(self.n_rows, _ROWS_AT_ONCE):
            own[of] = yield from self._side_of(of, sides[of], owns, first + of.start)
        return own

    def _side_of(self, of: slice, sides: Sides, owns: Sequence[bool], first: int) -> Steps[Bits]:
        share, transfers, count = self.share[of], self.transfers, of.stop - of.start
        mine, theirs = owns
        side, sent = np.zeros(count, np.uint8), []
        if mine:
            mask = np.frombuffer(Keystream().raw(count), np.uint8) & np.uint8(1)
            table = np.empty(count, np.uint32)
            _permute(sides, share, mask, self.levels, table)
            numbers = bit_patterns(transfers.sender.delta, self.levels)
            table ^= transfers.sender.hash.low_bits(self._sent[of], first, numbers, 1)
            side, sent = mask, [_packed_tables(table, self.levels)]
        came = yield sent
        expected = [(np.uint8, _packed_tables(np.zeros(count, np.uint32), self.levels).shape)] if theirs else []
        take(came, *expected)
        if theirs:
            pads = transfers.receiver.hash.low_bits(self._got[of], first, np.zeros((1, 2), np.uint64), 1)
            read = (_whole_tables(came[0], self.levels, count) >> share) ^ pads
            side = side ^ (read & np.uint32(1)).astype(np.uint8)
        return side

    def multiplied(self, bits: Bits, values: Wide | None, width: int, chooses: Sequence[bool]) -> Steps[Wide]:
        """Append shared bits, (n_rows,), to the index; return shares of each row's bit times its values, if any.

        `values`, (n_rows, v, 2), are shares modulo 2^`width`. `chooses` says whether this party's share of the bit and
        the other's may be 1. A step for each piece of the rows, and those that fill the stock.
        """
        v = 0 if values is None else values.shape[1]
        out = np.empty((self.n_rows, v, _WORDS), np.uint64)
        sent, got = np.empty_like(self._sent), np.empty_like(self._got)
        for of in pieces(self.n_rows, _ROWS_AT_ONCE):
            part = out[of] if values is None else values[of]
            out[of], sent[of], got[of] = yield from selected_with_rows(
                self.transfers, bits[of], part, [width] * v, chooses
            )
        _join(self._sent, sent)
        _join(self._got, got)
        self.share = (self.share << np.uint32(1)) | bits
        self.levels += 1
        return out

    def weight_of_rows(
        self, weights: NDArray[np.integer] | None, nbytes: int = WEIGHT_BYTES, *, shared: bool = False
    ) -> Steps[NDArray[np.unsignedinteger]]:
        """Return shares of the weight of each row's leaf, (n_rows,), of `nbytes`: a step for each piece of the rows.

        They are uint32 up to 4 bytes, else uint64. The party that knows the `weights` of all leaves, whole numbers
        (trees, leaves), gives them; the other gives None. If they are `shared`, each gives its shares. Rows are of one
        tree after the other, as many of each.
        """
        if shared:
            role = self.transfers.role
            of_both = (self.weight_of_rows(weights if role == giver else None, nbytes) for giver in (0, 1))
            found = yield from together(*of_both)
            return np.asarray((found[0] + found[1]) & word_of(nbytes)((1 << 8 * nbytes) - 1))
        out, first = np.empty(self.n_rows, word_of(nbytes)), self.transfers.tweaks(self.n_rows)
        for of in pieces(self.n_rows, _ROWS_AT_ONCE >> max(0, self.levels - 3)):
            out[of] = yield from self._weight_of(of, weights, nbytes, first + of.start)
        return out

    def _weight_of(
        self, of: slice, weights: NDArray[np.integer] | None, nbytes: int, first: int
    ) -> Steps[NDArray[np.unsignedinteger]]:
        share, transfers, leaves, word = self.share[of], self.transfers, 1 << self.levels, word_of(nbytes)
        whole = word((1 << 8 * nbytes) - 1)
        if weights is not None:
            numbers = bit_patterns(transfers.sender.delta, self.levels)
            table = np.empty((len(share), leaves), word)
            tree_of_row = np.arange(of.start, of.stop) // (self.n_rows // len(weights))
            _permute_words(weights.astype(word), tree_of_row, share, self.levels, table)
            # under a mask that the first entry's pad gives, its ciphertext is 0: it is not sent
            mask = table[:, 0] - self._pads(of, first, numbers[0], word)
            for number, offset in enumerate(numbers[1:], 1):
                table[:, number] = (table[:, number] - mask) ^ self._pads(of, first, offset, word)
            sent = table[:, 1:]
            take((yield [bytes_of(sent if word is np.uint32 else sent[..., None], nbytes)]))
            return np.asarray(mask & whole)
        (came,) = take((yield []), (np.uint8, (len(share), leaves - 1, nbytes)))
        read = np.zeros(len(share), word)
        for number in range(1, leaves):
            # one of them, without a branch
            here = word(0) - (share == number).astype(word)
            read |= wide_of(came[:, number - 1], 1)[:, 0].astype(word) & here
        pads = transfers.receiver.hash.rows(self._got[of], first)[:, 0].astype(word)
        return np.asarray((read ^ pads) & whole)

    def _pads(self, of: slice, first: int, offset: Words, word: Any) -> Any:
        """Return the sender's pads of one number."""
        return self.transfers.sender.hash.rows(self._sent[of], first, offset=offset)[:, 0].astype(word)


def word_of(nbytes: int) -> Any:
    """Return the type of shares of so many bytes."""
    return np.uint32 if nbytes <= 4 else np.uint64


def bytes_of(numbers: NDArray[np.unsignedinteger], nbytes: int) -> NDArray[np.uint8]:
    """Return the lowest bytes of numbers: of words, (..., words), or of single ones of 32 bits, (...)."""
    whole = numbers if numbers.dtype == np.uint64 else numbers[..., None]
    raw = np.ascontiguousarray(whole).astype(whole.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    return np.ascontiguousarray(raw[..., :nbytes])


def wide_of(raw: NDArray[np.uint8], words: int) -> Wide:
    out = np.zeros((*raw.shape[:-1], 8 * words), np.uint8)
    out[..., : raw.shape[-1]] = raw
    whole: Wide = out.view("<u8").astype(np.uint64, copy=False)
    return whole


def bit_patterns(delta: Words, count: int) -> Words:
    """Return the joined bits of each number below 2^count, times Delta, (2^count, 2): its pads are that far apart."""
    numbers = np.arange(1 << count, dtype=np.uint64)[:, None]
    bits = (numbers >> np.arange(count, dtype=np.uint64)) & np.uint64(1)
    return joined((bits[:, :, None] * delta).reshape(-1, 2), count)


def _packed_tables(tables: Sides, levels: int) -> NDArray[np.uint8]:
    """Pack tables of 2^levels bits each, (n,)."""
    width = 1 << levels
    bits = np.unpackbits(tables.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, count=width, bitorder="little")
    return np.packbits(bits, bitorder="little")


def _whole_tables(raw: NDArray[np.uint8], levels: int, count: int) -> Sides:
    width = 1 << levels
    bits = np.unpackbits(raw, count=count * width, bitorder="little").reshape(count, width)
    out = np.zeros((count, 4), np.uint8)
    out[:, : -(-width // 8)] = np.packbits(bits, axis=1, bitorder="little")
    return out.view("<u4")[:, 0].astype(np.uint32)


_LOWER = np.array([0x55555555, 0x33333333, 0x0F0F0F0F, 0x00FF00FF, 0x0000FFFF], np.uint32)


@kernel
def _permute(sides: Sides, share: Sides, mask: Bits, levels: int, out: Sides) -> None:
    """Write tables whose bit u is the bit u xor share of sides, all bits xor the mask; without a branch on any."""
    for row in range(out.size):
        table = sides[row]
        for level in range(levels):
            # exchange neighbours of 2^level bits where the share has the bit
            low, step = _LOWER[level], np.uint32(1 << level)
            turned = ((table & low) << step) | ((table >> step) & low)
            turn = np.uint32(0) - ((share[row] >> np.uint32(level)) & np.uint32(1))
            table = (table & ~turn) | (turned & turn)
        out[row] = table ^ (np.uint32(0) - np.uint32(mask[row]))


@kernel
def _permute_words(weights: Any, tree: Integers, share: Sides, levels: int, out: Any) -> None:
    """Write rows whose entry u is the tree's weight u xor share, without a branch on it."""
    for row in range(out.shape[0]):
        for leaf in range(out.shape[1]):
            out[row, leaf] = weights[tree[row], leaf]
        for level in range(levels):
            step = 1 << level
            # all bits of a word, of either type, or none
            turn = np.uint64(0) - np.uint64((share[row] >> np.uint32(level)) & np.uint32(1))
            for leaf in range(out.shape[1]):
                if leaf & step == 0:
                    differ = (out[row, leaf] ^ out[row, leaf + step]) & turn
                    out[row, leaf] ^= differ
                    out[row, leaf + step] ^= differ


@kernel
def _join(rows: Words, new: Words) -> None:
    """Write x rows + new, in GF(2^128) as in `extension.joined`."""
    one, top = np.uint64(1), np.uint64(63)
    for row in range(rows.shape[0]):
        low, high = rows[row, 0], rows[row, 1]
        carry = np.uint64(0) - (high >> top)
        rows[row, 1] = ((high << one) | (low >> top)) ^ new[row, 1]
        rows[row, 0] = (low << one) ^ (carry & np.uint64(0x87)) ^ new[row, 0]
