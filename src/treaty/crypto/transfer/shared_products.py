"""Products of shared numbers from those of `ring_products`: how these are made in bulk, drawn, and used in one step.

Of a product of x, which one party has, and y of the other's, the holder of x sends d = x - r modulo 2^m, and the holder
of y sends e = y - y' modulo 2^k, both of them uniform. With the bits u and w that say where these wrap around, which
the own end alone knows, x = d + r - u 2^m and y = e + y' - w 2^k, so

    x y = d y + r e + r y' - w 2^k r - u 2^m y,     where w 2^k r = w 2^k (x - d) modulo 2^(m + k).

So but for u y and w x, products of a bit, which are made of transfers, shares follow from the one step.

Whole ciphertexts are made, as soon as so many products of a kind were made of transfers as cost as much: then no more
than twice the bytes are sent that the better choice would have taken, however many products are to come.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.ring import Packed, Residues, pack
from treaty.crypto.parameters import DEGREE
from treaty.crypto.transfer import arithmetic
from treaty.crypto.transfer.arithmetic import (
    Wide,
    add,
    bit,
    bits_times,
    cut,
    negative,
    only,
    resized,
    shifted,
    subtract,
    times,
)
from treaty.crypto.transfer.ring_products import Giver, Holder, RingKind, plan_of
from treaty.crypto.transfer.stock import Bits, Correlation, Steps, Transfers, take, together

MOST = 1 << 28  # products of a job in a direction, by which `ring_products` bounds what they tell


@dataclass(frozen=True, slots=True)
class RingProducts:
    """One end's part of n products as holder and n as giver, wide numbers (n, words) each: r, y' and two shares."""

    r: Wide
    y: Wide
    received: Wide
    given: Wide

    def __len__(self) -> int:
        return len(self.r)

    def __getitem__(self, part: slice) -> RingProducts:
        return RingProducts(self.r[part], self.y[part], self.received[part], self.given[part])


def products(transfers: Transfers, x: Wide, y: Wide, x_bits: int, y_bits: int, bits: int) -> Steps[Wide]:
    """Return shares of products as `arithmetic.products` does: one step, if enough were made ahead."""
    kind, (n, v, words) = RingKind(x_bits, y_bits, bits), y.shape
    if not pays(transfers, kind, n * v):
        return (yield from arithmetic.products(transfers, x, y, x_bits, y_bits, bits))
    xs, ys = np.ascontiguousarray(np.broadcast_to(x[:, None], y.shape)).reshape(-1, words), y.reshape(-1, words)
    made = yield from draw_products(transfers, kind, len(xs))
    (d, x_wraps), (e, y_wraps) = _apart(xs, made.r, x_bits), _apart(ys, made.y, y_bits)
    x_top, y_top = bit(xs, x_bits - 1), bit(ys, y_bits - 1)
    # what is to be taken off is modulo less: of x y' times 2^m, say, the bits below `bits` - m
    both, off_x, off_y = yield from together(
        crossed(made, ys, d, e, y_wraps, kind),
        _taken_off(transfers, y_wraps, y_top, xs, bits - y_bits),
        _taken_off(transfers, x_wraps, x_top, ys, bits - x_bits),
    )
    out = add(times(xs, ys), resized(both, words))
    for off, shift in ((off_x, y_bits), (off_y, x_bits)):
        out = subtract(out, shifted(resized(off, words), shift))
    return cut(out, bits).reshape(y.shape)


def _taken_off(transfers: Transfers, wrapped: Bits, top: Bits, numbers: Wide, width: int) -> Steps[Wide]:
    """Return shares of the bits that say where masks wrap around times the other's numbers, and of w (s0 + s1).

    With the factor's top bits, w = w0 + w1 - w0 w1; own numbers s0 are offered to the other's bit if the own one is 0.
    """
    numbers = np.ascontiguousarray(numbers[:, : max(1, -(-width // 64))])
    offered = np.concatenate([numbers, only(1 - top, numbers)])[:, None]
    found = yield from bits_times(transfers, np.concatenate([wrapped, top]), offered, [width])
    shares = add(found.received, found.given)[:, 0]
    return add(add(shares[: len(top)], shares[len(top) :]), only(top, numbers))


def squares(transfers: Transfers, u: Wide, u_bits: int, bits: int, role: int) -> Steps[Wide]:
    """Return shares modulo 2^bits of u^2 from shares modulo 2^u_bits of u (n, words), |u| < 2^(u_bits - 2).

    `bits` is at most 2 u_bits - 1. `role` is 0 at one party and 1 at the other.
    """
    words = u.shape[-1]
    half = shifted(np.eye(1, words, dtype=np.uint64), u_bits - 2)[0]
    # u + half is not negative: u^2 = (u + half)^2 - 2 half (u + half) + half^2
    positive = cut(add(u, half), u_bits) if role == 0 else u
    (square,) = (yield from products(transfers, positive, positive[:, None], u_bits, u_bits, bits)).transpose(1, 0, 2)
    out = subtract(square, shifted(positive, u_bits - 1))
    return cut(add(out, shifted(half, u_bits - 2)) if role == 0 else out, bits)


def pays(transfers: Transfers, kind: RingKind, count: int) -> bool:
    """Whether `count` products more are to be of this kind, rather than of transfers."""
    end, words = transfers.rings[kind], -(-kind.bits // 64)
    end.asked += count
    by_transfers = Correlation(kind.x_bits, 1, words, kind.bits).nbytes
    return end.asked * by_transfers >= DEGREE * plan_of(kind).nbytes and end.made < MOST


def draw_products(transfers: Transfers, kind: RingKind, count: int) -> Steps[RingProducts]:
    """Draw products; if too few were made ahead, two steps more."""
    stock = transfers.rings[kind].stock
    yield from stock.reserve(count, partial(make, transfers, kind))
    parts = stock.draw(count)
    return RingProducts(*(np.concatenate([getattr(part, name) for part in parts]) for name in RingProducts.__slots__))


def make(transfers: Transfers, kind: RingKind, count: int, apart: bool = False) -> Steps[None]:
    """Make products for the stock, `count` a multiple of N: two steps, or if `apart` two for each ring."""
    end, plan, blocks = transfers.rings[kind], plan_of(kind), count // DEGREE
    first = 1 + end.made // DEGREE
    numbers, new = range(first, first + blocks), not end.made
    end.made += blocks * DEGREE
    if new:
        end.holders = [Holder(ring, _seed(transfers.receiver.session, kind, k)) for k, ring in enumerate(plan.rings)]
    draw = Keystream()
    r, y = (draw.bits(bits, blocks * DEGREE) for bits in (kind.x_bits, kind.y_bits))
    masks = draw.below(plan.bound, blocks * DEGREE)
    parts = [slice(at, at + DEGREE) for at in range(0, len(r), DEGREE)]
    held, sent = [plan.residues(r[part], held=True) for part in parts], []
    for k, of in enumerate(end.holders):
        elements = [of.encrypt(number, m[k]) for number, m in zip(numbers, held, strict=True)]
        sent.append(pack(of.ring.sent, np.stack(([of.encrypt(0)] if new else []) + elements)))
    came = yield from _exchanged(sent, apart)
    theirs = [ring.sent.unpacked(row) for ring, row in zip(plan.rings, came, strict=True)]
    if new:
        session = transfers.sender.session
        end.givers = [Giver(plan.rings[k], _seed(session, kind, k), each[0]) for k, each in enumerate(theirs)]
    own = [(plan.residues(y[part], given=True), plan.residues(masks[part])) for part in parts]
    answers = []
    for k, (giver, cs) in enumerate(zip(end.givers, theirs, strict=True)):
        of_blocks = zip(numbers, cs[-blocks:], own, strict=True)
        rows = [giver.answer(number, c, ys[k], rs[k]) for number, c, (ys, rs) in of_blocks]
        answers.append(pack(giver.ring.returned, np.concatenate(rows)))
    came = yield from _exchanged(answers, apart)
    opened = [_opened(of, row) for of, row in zip(end.holders, came, strict=True)]
    received = [plan.opened(list(of_block)) for of_block in zip(*opened, strict=True)]
    end.stock.add(RingProducts(r, y, np.concatenate(received), negative(resized(masks, plan.words))))


def _seed(session: bytes, kind: RingKind, ring: int) -> bytes:
    return hashlib.sha256(b"treaty ring products" + repr((session, *kind, ring)).encode()).digest()


def _opened(holder: Holder, came: Packed) -> list[Residues]:
    answers = holder.ring.returned.unpacked(came)
    return [holder.open(answers[at : at + 2]) for at in range(0, len(answers), 2)]


def _exchanged(sent: list[Packed], apart: bool) -> Steps[list[Packed]]:
    """Send arrays, all in one step, or if `apart` each in its own; return the other end's."""
    came = []
    for arrays in [[each] for each in sent] if apart else [sent]:
        came += take((yield arrays), *((np.uint32, each.shape) for each in arrays))
    return came


def _apart(a: Wide, b: Wide, bits: int) -> tuple[Wide, Bits]:
    """Return a - b modulo 2^bits, and whether a is below b."""
    words = bits // 64 + 1
    apart = subtract(resized(a, words), resized(b, words))
    return cut(apart, bits), bit(apart, bits)


def crossed(of: RingProducts, y: Wide, d: Wide, e: Wide, wrapped: Bits, kind: RingKind) -> Steps[Wide]:
    """Return shares of own x times the other's y plus own y times the other's x, (n, words): one step.

    d and e are x - r and y - y', of which the latter is `wrapped` where it wraps around. But for products of bits that
    say so with the other's numbers.
    """
    words = of.received.shape[-1]
    sent = [_bytes(d, kind.x_bits), _bytes(e, kind.y_bits)]
    came = take((yield sent), *((np.uint8, each.shape) for each in sent))
    other_d, other_e = (_numbers(each, words) for each in came)
    as_holder = add(times(resized(of.r, words), other_e), of.received)
    as_giver = add(times(resized(y, words), other_d), of.given)
    return add(add(as_holder, as_giver), shifted(only(wrapped, other_d), kind.y_bits))


def _bytes(numbers: Wide, bits: int) -> NDArray[np.uint8]:
    """Return the bytes that count."""
    raw = np.ascontiguousarray(numbers).astype("<u8", copy=False).view(np.uint8)
    return np.ascontiguousarray(raw[:, : -(-bits // 8)])


def _numbers(came: NDArray[np.uint8], words: int) -> Wide:
    raw = np.zeros((len(came), 8 * words), np.uint8)
    kept = min(came.shape[1], 8 * words)
    raw[:, :kept] = came[:, :kept]
    return raw.view("<u8").astype(np.uint64, copy=False)
