"""Whole numbers of several words, and products of shared ones and a choice between them, by transfers.

Numbers are modulo 2^(64 words): uint64 (..., words), lowest word first.

A *guarded* sharing of x in m bits is x0 + x1 = x + w 2^m with 0 <= x < 2^(m-1): then w, whether the shares wrap around,
is the disjunction of their top bits. Products of guarded numbers are sums of one party's bits times the other's
numbers, each a correlated transfer (`correlations`).

Every function of `Steps` here is one step, but for those that fill the stock of transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import to_words
from treaty.crypto.transfer.correlations import Correlated, draw, narrowed, widened
from treaty.crypto.transfer.extension import chosen, packed, random_pairs, unpacked
from treaty.crypto.transfer.stock import Arrays, Bits, Correlation, Steps, Transfers, take, together
from treaty.machine.arrays import Words
from treaty.machine.kernels import kernel

Wide = NDArray[np.uint64]


def wide(numbers: NDArray[np.integer], words: int) -> Wide:
    """Return whole numbers of 64 bits as wide ones, signed ones by their two's complement."""
    out = np.zeros((*numbers.shape, words), np.uint64)
    out[..., 0] = numbers.astype(np.uint64)
    if numbers.dtype.kind == "i":
        out[..., 1:] = np.where(numbers < 0, ~np.uint64(0), np.uint64(0))[..., None]
    return out


def resized(a: Wide, words: int) -> Wide:
    """Return numbers with more words, of zeros, or fewer: modulo 2^(64 words)."""
    out = np.zeros((*a.shape[:-1], words), np.uint64)
    kept = min(words, a.shape[-1])
    out[..., :kept] = a[..., :kept]
    return out


def from_ints(numbers: Sequence[int], words: int) -> Wide:
    """Return Python integers as wide ones, (n, words)."""
    return to_words([x % (1 << 64 * words) for x in numbers], words)


def add(a: Wide, b: Wide) -> Wide:
    return _with(_add, a, b)


def subtract(a: Wide, b: Wide) -> Wide:
    return _with(_subtract, a, b)


def negative(a: Wide) -> Wide:
    return subtract(np.zeros_like(a), a)


def _with(kernel: Callable[[Wide, Wide], None], a: Wide, b: Wide) -> Wide:
    """Apply a kernel that changes its first number to a copy of a, and b, of any shapes that fit."""
    shape: tuple[int, ...] = np.broadcast_shapes(a.shape, b.shape)
    out = np.array(np.broadcast_to(a, shape), order="C")
    # a copy of what is repeated, which may not be written to
    other = np.ascontiguousarray(b) if b.shape == shape else np.array(np.broadcast_to(b, shape), order="C")
    words = shape[-1]
    kernel(out.reshape(-1, words), other.reshape(-1, words))
    return out


@kernel
def _add(a: Wide, b: Wide) -> None:
    for n in range(a.shape[0]):
        carry = np.uint64(0)
        for word in range(a.shape[1]):
            total = a[n, word] + b[n, word]
            over = np.uint64(total < b[n, word])
            a[n, word] = total + carry
            # at most one of the two additions carries
            carry = over | np.uint64(a[n, word] < carry)


@kernel
def _subtract(a: Wide, b: Wide) -> None:
    for n in range(a.shape[0]):
        borrow = np.uint64(0)
        for word in range(a.shape[1]):
            less = a[n, word] - b[n, word]
            under = np.uint64(a[n, word] < b[n, word])
            a[n, word] = less - borrow
            borrow = under | np.uint64(less < borrow)


def prefix_sums(a: Wide) -> Wide:
    """Return sums of the first 1, 2, ... numbers along the last axis but one, of at most 2^32 numbers."""
    # 32-bit halves add up without overflow; carries are passed on afterwards
    parts = np.cumsum(np.ascontiguousarray(a).view(np.uint32).astype(np.uint64), axis=-2)
    out, carry = np.empty(parts.shape, np.uint32), np.zeros(parts.shape[:-1], np.uint64)
    for half in range(parts.shape[-1]):
        total = parts[..., half] + carry
        out[..., half] = total.astype(np.uint32)
        carry = total >> np.uint64(32)
    return out.view(np.uint64)


def times(a: Wide, b: Wide) -> Wide:
    shape: tuple[int, ...] = np.broadcast_shapes(a.shape, b.shape)
    a, b, out = np.broadcast_to(a, shape).copy(), np.broadcast_to(b, shape).copy(), np.zeros(shape, np.uint64)
    _times(*(x.view(np.uint32).reshape(-1, 2 * x.shape[-1]) for x in (a, b, out)))
    return out


@kernel
def _times(a: NDArray[np.uint32], b: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    # school-book products of 32-bit digits, whose sums with two carries fit 64 bits
    for n in range(a.shape[0]):
        for i in range(a.shape[1]):
            carry, digit = np.uint64(0), np.uint64(a[n, i])
            for j in range(a.shape[1] - i):
                total = digit * np.uint64(b[n, j]) + np.uint64(out[n, i + j]) + carry
                out[n, i + j] = total & low
                carry = total >> half


def shifted(a: Wide, bits: int) -> Wide:
    """Return a 2^bits."""
    out = np.zeros_like(a)
    words, rest = divmod(bits, 64)
    for word in range(words, a.shape[-1]):
        out[..., word] = a[..., word - words] << np.uint64(rest)
        if rest and word > words:
            out[..., word] |= a[..., word - words - 1] >> np.uint64(64 - rest)
    return out


def cut(a: Wide, bits: int) -> Wide:
    """Return a modulo 2^bits."""
    out = a.copy()
    for word in range(a.shape[-1]):
        kept = min(max(bits - 64 * word, 0), 64)
        out[..., word] &= np.uint64((1 << kept) - 1)
    return out


def bit(a: Wide, number: int) -> Bits:
    """Return one bit of each number."""
    return ((a[..., number // 64] >> np.uint64(number % 64)) & np.uint64(1)).astype(np.uint8)


def bits_of(a: Wide, count: int) -> Bits:
    """Return the lowest bits of each number, (..., count)."""
    raw = np.ascontiguousarray(a.astype("<u8", copy=False)).view(np.uint8)
    return np.unpackbits(raw, axis=-1, count=count, bitorder="little")


def from_bits(bits: Bits) -> Wide:
    """Return the numbers that have these bits, (n, count), the lowest first."""
    whole = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 64)))
    return np.packbits(whole, axis=1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def only(bits: Bits, a: Wide) -> Wide:
    """Return a where the bit is 1, else 0, without a branch."""
    return a & (np.uint64(0) - bits.astype(np.uint64))[..., None]


def signed(bits: Bits, a: Wide) -> Wide:
    """Return -a where the bit is 1, else a, without a branch."""
    flip = (np.uint64(0) - bits.astype(np.uint64))[..., None]
    one = np.zeros((*bits.shape, a.shape[-1]), np.uint64)
    one[..., 0] = bits
    return add(a ^ flip, one)


def products(transfers: Transfers, x: Wide, y: Wide, x_bits: int, y_bits: int, bits: int) -> Steps[Wide]:
    """Return shares modulo 2^bits of x y_v, (n, v, words), from guarded shares of x (n, words) and y (n, v, words).

    A product takes m + 1 transfers in each direction for an x of m bits; bits <= x_bits + y_bits.
    """
    # x y = (x0 + x1) (y0 + y1) - v 2^n (x0 + x1) - w 2^m (y0 + y1), where w (s0 + s1) = w0 s0 + w1 s1 +
    # w0 (1 - w1) s1 + w1 (1 - w0) s0 for shares s0 + s1 of any number and the top bits w0 and w1.
    n, v, words = y.shape
    top, wraps = bit(x, x_bits - 1), bit(y, y_bits - 1)
    low = yield from draw(transfers, Correlation(x_bits, v, words, bits), n)
    # Those of w share the transfer of a factor's top bit, which offers minus 2^(m-1) y and 2^m (1 - w) y at once.
    of_all = np.broadcast_to(x[:, None], y.shape)
    other = only(1 - wraps, of_all).reshape(n * v, 1, words)
    ((received, given),), of_wraps = yield from together(
        multiplied((low, x, y, 1 - top)), bits_times(transfers, wraps.reshape(-1), other, [bits - y_bits])
    )
    # own shares' product, and what wraps around
    out = add(times(x[:, None], y), add(received, given))
    out = subtract(out, shifted(only(np.broadcast_to(top[:, None], wraps.shape), y), x_bits))
    both = add(of_wraps.received, of_wraps.given).reshape(y.shape)
    return cut(subtract(out, shifted(add(both, only(wraps, of_all)), y_bits)), bits)


@dataclass(frozen=True, slots=True)
class BitsTimes:
    """Shares (n, v, words) of own bits times the other's numbers, and of the other's bits times own numbers.

    With the transfers' rows (n, 2): the sender's under the other's bits, and the receiver's.
    """

    received: Wide
    given: Wide
    sent_rows: Words
    own_rows: Words


def bits_times(
    transfers: Transfers, bits: Bits, numbers: Wide, widths: Sequence[int], chooses: Sequence[bool] = (True, True)
) -> Steps[BitsTimes]:
    """Multiply own bits, (n,), by the other's numbers, (n, v, words), and its bits by own ones: a transfer each.

    The v products of a bit are shared modulo 2^width, of `widths`. `chooses` says whether this party's bits and the
    other's may be 1.
    """
    drawn = yield from transfers.draw_for(bits)
    flips, sizes = packed(drawn.flips), [max(0, -(-width // 8)) for width in widths]
    mine, theirs = (numbers.size > 0 and of for of in chooses)
    count = numbers.shape[1] * numbers.shape[2]  # words of a row, of which a block of its pad has two
    blocks, (received, given, zero) = -(-count // 2), np.zeros((3, *numbers.shape), np.uint64)
    sent: list[NDArray[Any]] = [flips]
    if theirs:
        pads = random_pairs(drawn.sender, drawn.q, drawn.first, blocks)
        zero, one = (pad[:, :count].reshape(numbers.shape) for pad in pads)
        sent.append(narrowed(subtract(add(zero, numbers), one), sizes))
    came = take((yield sent), (np.uint64, flips.shape), *[(np.uint8, (len(bits), sum(sizes)))] * mine)
    if theirs:
        # by its random bit the other has the pad of 0, or this pad plus the number; by its chosen bit, where they
        # differ, the number less that
        flipped = _of_all(unpacked(came[0], len(bits)), numbers)
        given = add(negative(zero), only(flipped, add(add(zero, zero), numbers)))
    if mine:
        own = drawn.receiver.hash.rows(drawn.t, drawn.first, blocks)[:, :count].reshape(numbers.shape)
        read = add(own, only(_of_all(drawn.random, numbers), widened(came[1], sizes, numbers.shape[2])))
        received = signed(_of_all(drawn.flips, numbers), read)
    return BitsTimes(received, given, chosen(drawn.q, drawn.sender.delta, came[0]), drawn.t)


def _of_all(bits: Bits, values: Wide) -> Bits:
    return np.broadcast_to(bits[:, None], values.shape[:2])


def selected(transfers: Transfers, bits: Bits, values: Wide, widths: Sequence[int]) -> Steps[Wide]:
    """Return shares of values (n, v, words) where the bit is 1, of 0 where it is 0, modulo 2^width for each v.

    Shares of bits, (n,), are exclusive: their sum modulo 2 is the bit.
    """
    return (yield from selected_with_rows(transfers, bits, values, widths))[0]


def selected_with_rows(
    transfers: Transfers, bits: Bits, values: Wide, widths: Sequence[int], chooses: Sequence[bool] = (True, True)
) -> Steps[tuple[Wide, Words, Words]]:
    """Return what `selected` does, and rows of transfers, (n, 2), on the other's bits and on own ones.

    `chooses` says whether this party's shares of the bits and the other's may be 1.
    """
    # (own xor other's bit) value = own bit value + other's bit (1 - 2 own bit) value
    of_all = _of_all(bits, values)
    found = yield from bits_times(transfers, bits, signed(of_all, values), widths, chooses)
    return add(only(of_all, values), add(found.received, found.given)), found.sent_rows, found.own_rows


def both_of(transfers: Transfers, bits: Bits, words: int, width: int, role: int) -> Steps[Wide]:
    """Return shares modulo 2^width, (n, words), of the conjunction of one party's bit, (n,), and the other's."""
    numbers = wide(bits.astype(np.uint64), words)
    return (yield from _by_halves(transfers, bits, numbers, width, role))[0]


def as_numbers(transfers: Transfers, bits: Bits, width: int, role: int) -> Steps[Words]:
    """Return shares modulo 2^width, uint64 (n,), of bits that are shared by exclusive or."""
    # a xor b = b + a (1 - 2 b)
    own = bits.astype(np.uint64)
    shares, offered = yield from _by_halves(
        transfers, bits, (np.uint64(1) - (own << np.uint64(1)))[:, None], width, role
    )
    out = shares[:, 0]
    out[offered] += own[offered]
    return out & np.uint64((1 << width) - 1)


def _by_halves(transfers: Transfers, bits: Bits, numbers: Wide, width: int, role: int) -> Steps[tuple[Wide, slice]]:
    """Multiply one party's bit, (n,), by the other's number, (n, words): own bits of one half, numbers of the other.

    Return shares modulo 2^width, (n, words), and of which half own numbers were offered.
    """
    halves = slice(0, len(bits) // 2), slice(len(bits) // 2, len(bits))
    mine, theirs = halves if role == 0 else halves[::-1]
    longest, out = halves[1].stop - halves[1].start, np.empty_like(numbers)
    chosen_bits, offered = np.zeros(longest, np.uint8), np.zeros((longest, 1, numbers.shape[1]), np.uint64)
    chosen_bits[: mine.stop - mine.start], offered[: theirs.stop - theirs.start, 0] = bits[mine], numbers[theirs]
    found = yield from bits_times(transfers, chosen_bits, offered, [width])
    for of, shares in ((mine, found.received), (theirs, found.given)):
        out[of] = shares[: of.stop - of.start, 0]
    return out, theirs


_COLUMNS = 16  # numbers times one that is known, in one product: so many take little more than one


def times_known(transfers: Transfers, known: Sequence[int], bits: int, y: Wide, width: int, role: int) -> Steps[Wide]:
    """Return shares modulo 2^width of x y_v from shares of y, (n, v, words), and x, (n,), that role 0 knows.

    `known` are the x, |x| < 2^(bits - 1); role 1 gives zeros.
    """
    n, v, words = y.shape
    # of a number that one party knows in full, only products with the other's shares need transfers
    groups = -(-v // _COLUMNS)
    kind = Correlation(bits, _COLUMNS, words, width, one_way=True)
    x = np.repeat(from_ints(known, max(words, -(-bits // 64))), groups, axis=0)
    padded = np.zeros((n, groups * _COLUMNS, words), np.uint64)
    padded[:, :v] = y
    in_groups = padded.reshape(n * groups, _COLUMNS, words)
    # the top bit of a number that may be negative counts with a minus
    found = yield from times_wide(transfers, kind, x, in_groups, role, minus=1)
    return found.reshape(padded.shape)[:, :v]


def times_wide(transfers: Transfers, kind: Correlation, x: Wide, y: Wide, role: int, *, minus: int = 0) -> Steps[Wide]:
    """Return shares of x y_v from shares of y, (n, v, words), and x, (n, words), that role 0 knows, of a one-way kind.

    If `minus` is 1, the top bit of x counts with a minus; role 1 gives zeros.
    """
    drawn = yield from draw(transfers, kind, len(x))
    top = np.full(len(x), minus, np.uint8)
    ((received, given),) = yield from multiplied((drawn, x, y, top), sends=role == 1, receives=role == 0)
    return given if role == 1 else add(times(x[:, None, : y.shape[2]], y), received)


_Product = tuple[Correlated, Wide, Wide, Bits]


def multiplied(*given: _Product, sends: bool = True, receives: bool = True) -> Steps[list[tuple[Wide, Wide]]]:
    """Return shares of own numbers times the other's, and of the other's times own ones, (n, v, words) each.

    Of each product `given` are what was drawn for it, own numbers by whose bits the other's are multiplied, (n, words),
    own numbers that the other multiplies, (n, v, words), and where, (n,), the top bit of the other's number counts with
    a minus.
    """
    flips = [bits_of(x, of.kind.bits).reshape(-1) ^ of.random for of, x, _, _ in given]
    of_bits, begun = packed(np.concatenate(flips)), [of.begun for of, *_ in given if of.begun is not None]
    differences = [array for product in given for array in _differences(*product)] if sends else []
    came = yield [*(of.sent for of in begun), *([of_bits] if receives else []), *differences]
    shapes = [(len(of), sum(sizes)) for of, *_ in given for sizes in _sizes(of)] if receives else []
    of_each = iter(take(
        came, *((np.uint8, of.expected) for of in begun), *([(np.uint64, of_bits.shape)] * sends),
        *((np.uint8, shape) for shape in shapes),
    ))  # fmt: skip
    # what was not made ahead is correlated in this very step
    held = [of if of.begun is None else replace(of, held=of.begun.held(next(of_each))) for of, *_ in given]
    lengths = [len(each) for each in flips]
    theirs = iter(np.split(unpacked(next(of_each), sum(lengths)), np.cumsum(lengths)) if sends else ())
    out = []
    for of, (_, x, _, _), own in zip(held, given, flips, strict=True):
        received = sent = np.zeros(of.numbers.shape, np.uint64)
        if receives:
            numbers = [widened(next(of_each), sizes, of.numbers.shape[2]) for sizes in _sizes(of)]
            received = _share(of, of.held, own, x, numbers)
        if sends:
            # of each bit this end has minus its pad or, where it is flipped, its random number and its pad
            turned = next(theirs)
            numbers = [of.last, of.numbers]
            sent = _share(of, of.pads, 1 - turned, from_bits(turned.reshape(-1, of.kind.bits)), numbers)
        out.append((received, sent))
    return out


def _sizes(of: Correlated) -> tuple[Sequence[int], Sequence[int]]:
    """Return the bytes of a product's numbers for the top bit, which counts modulo the least, and for other bits."""
    values = of.kind.values
    return of.kind.sizes[-values:], of.kind.sizes[:values]


def _differences(of: Correlated, _: Wide, y: Wide, minus: Bits) -> Arrays:
    """Return own numbers less the random ones: those that the other's top bit multiplies, then those of other bits."""
    top = subtract(signed(_of_all(minus, y), y), of.last)
    return [narrowed(each, sizes) for each, sizes in zip((top, subtract(y, of.numbers)), _sizes(of), strict=True)]


def _share(of: Correlated, shares: Wide, flips: Bits, x: Wide, numbers: Arrays) -> Wide:
    """Return what an end has of bits' products, and numbers x times others, whose first are for the top bit."""
    shape, below = of.numbers.shape, of.kind.bits - 1
    top = only(_of_all(bit(x, below), numbers[0]), numbers[0])
    out = add(of.added_up(shares, flips), shifted(top, below))
    lower_bits = resized(cut(x, below), shape[2])
    return add(out, times(lower_bits[:, None], numbers[1]))
