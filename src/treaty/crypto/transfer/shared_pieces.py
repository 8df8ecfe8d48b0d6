"""A function in 16 linear pieces of a shared number: neither party learns the number, its piece or the value.

Numbers are shared modulo 2^20, whole multiples of 2^-12: a piece is 1 wide, from -8 to 8, and outside the function has
its values at -8 and 8. A number plus 8 has four digits of four bits below those that say whether it is in range.

1. Carries out of the digits of both parties' shares, digit by digit: a transfer of 1 of 16, then of 1 of 32, whose
   fifth choice bit is the share of the carry below. Of one half of the numbers each party chooses.
2. Whether the number is in range, and whether it is above, from the bits above and the last carry: 1 of 32.
3. The number of the piece, modulo 16, and the place in it, modulo the ring of the values: the digits plus the carries
   into them, as numbers (`arithmetic.as_numbers`).
4. The value, base + slope place: 1 of 16 in both directions, each party's tables in the order of its own share of the
   piece. As the place is shared additively and tables are linear in it, both results add up to the value, exactly.

The four lowest bits of a number do not count, but for their carry, so that values are whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer.arithmetic import as_numbers, selected
from treaty.crypto.transfer.extension import entry_of, joined
from treaty.crypto.transfer.hidden_rows import bit_patterns, bytes_of, wide_of
from treaty.crypto.transfer.stock import Bits, Steps, Transfers, take, together
from treaty.machine.arrays import Words
from treaty.machine.kernels import kernel

NUMBER_BITS, PIECES, FRACTION, DROPPED = 20, 16, 12, 4
_DIGIT = 4
_LOW = FRACTION - DROPPED  # bits of the place in a piece
_FIFTEEN = np.uint8(15)

Numbers = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Values ``base[j] + slope[j] * place``, modulo 2^`bits`, of piece j; both are uint64 (16,)."""

    base: Words
    slope: Words
    bits: int


def values_of(transfers: Transfers, numbers: Numbers, pieces: Pieces, role: int) -> Steps[Words]:
    """Return shares modulo 2^bits of the pieces' values at shared numbers, uint32 (n,): 13 steps.

    Numbers are -128 or above, and below 120. `role` is 0 at one party and 1 at the other.
    """
    x = (numbers + np.uint32((8 << FRACTION) * (1 - role))) & np.uint32((1 << NUMBER_BITS) - 1)
    digits = [((x >> np.uint32(_DIGIT * k)) & np.uint32(15)).astype(np.uint8) for k in range(5)]
    carry_4 = yield from _carry(transfers, digits[0], None, role)
    carry_8, lowest = yield from together(
        _carry(transfers, digits[1], carry_4, role), as_numbers(transfers, carry_4, pieces.bits, role)
    )
    carry_12 = yield from _carry(transfers, digits[2], carry_8, role)
    carry_16, above = yield from together(
        _carry(transfers, digits[3], carry_12, role), as_numbers(transfers, carry_12, pieces.bits, role)
    )
    inside, over = yield from _range(transfers, digits[4], carry_16, role)
    piece = digits[3] + above.astype(np.uint8)
    # 15 above the range, and 0 below it
    piece = (over + (yield from _nibble_where(transfers, inside, piece))) & _FIFTEEN
    # a carry into the piece is no part of the place
    place = ((x >> np.uint32(DROPPED)) & np.uint32((1 << _LOW) - 1)).astype(np.uint64) + lowest
    place -= above << np.uint64(_LOW)
    return (yield from _look_up(transfers, piece, place, pieces, role))


def _halves(n: int, role: int) -> tuple[slice, slice, int]:
    """Return the rows of which this party chooses, those of which the other does, and how many at most."""
    first, second = slice(0, n // 2), slice(n // 2, n)
    return (first, second, n - n // 2) if role == 0 else (second, first, n - n // 2)


def _choices(transfers: Transfers, digits: Bits, carry: Bits | None, longest: int) -> Steps[tuple[int, Words, Words]]:
    """Choose by the bits of digits and carries: return the first tweak, and the joined rows at both ends."""
    count = _DIGIT + (carry is not None)
    bits = np.zeros((longest, count), np.uint8)
    bits[: len(digits), :_DIGIT] = (digits[:, None] >> np.arange(_DIGIT, dtype=np.uint8)) & np.uint8(1)
    if carry is not None:
        bits[: len(digits), _DIGIT] = carry
    first, q, t = yield from transfers.choose(bits.reshape(-1))
    return first, joined(q, count), joined(t, count)


def _padded(values: Bits, count: int) -> Bits:
    return np.pad(values, (0, count - len(values)))


def _carry(transfers: Transfers, digits: Bits, carry: Bits | None, role: int) -> Steps[Bits]:
    """Return shares of the carry out of digits, uint8 (n,), by shares of the carry into them, if any: two steps."""
    n, count = len(digits), _DIGIT + (carry is not None)
    mine, theirs, longest = _halves(n, role)
    own = None if carry is None else carry[mine]
    first, q, t = yield from _choices(transfers, digits[mine], own, longest)
    mask, table = np.frombuffer(Keystream().raw(longest), np.uint8) & np.uint8(1), np.empty(longest, np.uint32)
    others = np.zeros_like(digits) if carry is None else carry
    offered = _padded(digits[theirs], longest), _padded(others[theirs], longest)
    _carry_tables(*offered, mask, 1 << count, table)
    table ^= transfers.sender.hash.low_bits(q, first, bit_patterns(transfers.sender.delta, count), 1)
    kind = np.uint32 if carry is not None else np.uint16
    (came,) = take((yield [table.astype(kind)]), (kind, table.shape))
    number = digits[mine].astype(np.uint32)
    if own is not None:
        number |= own.astype(np.uint32) << np.uint32(_DIGIT)
    pads = transfers.receiver.hash.rows(t, first)[: len(number), 0].astype(np.uint32)
    read = ((came[: len(number)].astype(np.uint32) >> number) ^ pads) & np.uint32(1)
    out = np.empty(n, np.uint8)
    out[mine], out[theirs] = read.astype(np.uint8), mask[: n - len(number)]
    return out


def _range(transfers: Transfers, tops: Bits, carry: Bits, role: int) -> Steps[tuple[Bits, Bits]]:
    """Return shares of whether numbers are in range, by xor, and of 15 above it, 0 elsewhere, modulo 16: two steps."""
    n = len(tops)
    mine, theirs, longest = _halves(n, role)
    first, q, t = yield from _choices(transfers, tops[mine], carry[mine], longest)
    drawn = np.frombuffer(Keystream().raw(longest), np.uint8)
    mask, shift = drawn & np.uint8(1), drawn >> np.uint8(4)
    table = np.empty((longest, 32), np.uint8)
    _range_tables(_padded(tops[theirs], longest), _padded(carry[theirs], longest), mask, shift, table)
    for number, offset in enumerate(bit_patterns(transfers.sender.delta, _DIGIT + 1)):
        table[:, number] ^= transfers.sender.hash.rows(q, first, offset=offset)[:, 0].astype(np.uint8) & np.uint8(31)
    # 5 bits of each entry
    bits = (table[:, :, None] >> np.arange(5, dtype=np.uint8)) & np.uint8(1)
    sent = np.packbits(bits.reshape(-1), bitorder="little")
    (came,) = take((yield [sent]), (np.uint8, sent.shape))
    raw = np.unpackbits(came, count=longest * 160, bitorder="little").reshape(longest, 32, 5)
    entries = np.packbits(raw, axis=2, bitorder="little")
    read = entry_of(entries, tops[mine] | carry[mine] << np.uint8(_DIGIT), 0)[:, 0]
    read ^= transfers.receiver.hash.rows(t, first)[: len(read), 0].astype(np.uint8) & np.uint8(31)
    inside, over = np.empty((2, n), np.uint8)
    inside[mine], over[mine] = read & np.uint8(1), read >> np.uint8(1)
    inside[theirs], over[theirs] = mask[: n - len(read)], shift[: n - len(read)]
    return inside, over


def _nibble_where(transfers: Transfers, bits: Bits, values: Bits) -> Steps[Bits]:
    """Return shares modulo 16 of values where the shared bit is 1, of 0 where it is 0: one step."""
    found = yield from selected(transfers, bits, values.astype(np.uint64)[:, None, None], [_DIGIT])
    return found[:, 0, 0].astype(np.uint8) & _FIFTEEN


def _look_up(transfers: Transfers, piece: Bits, place: Words, pieces: Pieces, role: int) -> Steps[Words]:
    """Return shares of the pieces' values, by shares of piece and place: two steps."""
    nbytes, n, whole = -(-pieces.bits // 8), len(piece), np.uint64((1 << pieces.bits) - 1)
    first, q, t = yield from _choices(transfers, piece, None, n)
    table = np.empty((n, PIECES - 1, nbytes), np.uint8)
    of_pieces = pieces.base if role == 0 else np.zeros_like(pieces.base), pieces.slope
    offsets = bit_patterns(transfers.sender.delta, _DIGIT)

    def entries(number: int) -> Words:
        out = np.empty(n, np.uint64)
        _values_at(*of_pieces, piece, number, place, out)
        padded: Words = out + transfers.sender.hash.rows(q, first, offset=offsets[number])[:, 0]
        return padded

    # under this mask the ciphertext of the first entry is 0: it is not sent
    mask = entries(0)
    for number in range(1, PIECES):
        table[:, number - 1] = bytes_of((entries(number) - mask)[:, None], nbytes)
    (came,) = take((yield [table]), (np.uint8, table.shape))
    read = wide_of(entry_of(came, piece, 1), 1)[:, 0]
    found: Words = mask + read - transfers.receiver.hash.rows(t, first)[:, 0]
    return found & whole


@kernel
def _carry_tables(digits: Bits, carry: Bits, mask: Bits, numbers: int, out: Numbers) -> None:
    """Write for each of the other's numbers a bit: whether the digits and carries reach 16, xor the mask."""
    for row in range(out.size):
        table = np.uint32(0)
        for number in range(numbers):
            total = (number & 15) + np.int64(digits[row]) + ((number >> 4) ^ np.int64(carry[row]))
            table |= (np.uint32(total >> 4) ^ np.uint32(mask[row])) << np.uint32(number)
        out[row] = table


@kernel
def _range_tables(tops: Bits, carry: Bits, mask: Bits, shift: Bits, out: NDArray[np.uint8]) -> None:
    """Write for each of the other's numbers whether the top is 0, xor the mask, and 15 if 0 < top < 8, less a shift."""
    for row in range(out.shape[0]):
        for number in range(32):
            top = ((number & 15) + np.int64(tops[row]) + ((number >> 4) ^ np.int64(carry[row]))) & 15
            inside = np.int64(top == 0)
            over = (np.int64(0) - (np.int64(top < 8) - inside) - np.int64(shift[row])) & 15
            out[row, number] = np.uint8(over << 1 | (inside ^ np.int64(mask[row])))


@kernel
def _values_at(base: Words, slope: Words, piece: Bits, number: int, place: Words, out: Words) -> None:
    """Write values of piece + number, modulo 16, all of which are looked at."""
    for row in range(out.size):
        wanted, found_base, found_slope = (np.int64(piece[row]) + number) & 15, np.uint64(0), np.uint64(0)
        for at in range(16):
            here = np.uint64(0) - np.uint64(at == wanted)
            found_base |= base[at] & here
            found_slope |= slope[at] & here
        out[row] = found_base + found_slope * place[row]
