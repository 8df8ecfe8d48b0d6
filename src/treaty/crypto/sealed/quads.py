"""Products of random shared bits, made before they are needed, by which four digits are joined in one step.

Of two digits the upper decides unless it is equal: with shared bits g (greater) and e (equal) of four digits, the third
the uppermost,

    g = g3 + e3 g2 + e3 e2 g1 + e3 e2 e1 g0,    e = e3 e2 e1 e0    (modulo 2).

Each of e0, ..., e3, g0, g1, g2 is opened under a random bit, of which both parties have a share, as they have of every
product of these bits that occurs when the sums are multiplied out (Beaver, "Efficient Multiparty Protocols Using
Circuit Randomization", CRYPTO 1991, for more than two factors). A *quad* has own shares of the 7 bits and 22 products
in one word: what is opened says which of them count, and the result is their parity.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer.bits import packed, unpacked
from treaty.crypto.transfer.extension import random_pairs
from treaty.errors import CryptoError
from treaty.machine.kernels import kernel

if TYPE_CHECKING:
    from treaty.crypto.sealed.transfers import Drawn, Transfers


# -------- steps that two parties take together: at each, both send arrays at the same time, and go on with the other's
#
# What the parties compute is a generator, the same at both ends: it yields what its party sends and is given what the
# other has sent. `together` takes the steps of several at once, in one message each way.

Result = TypeVar("Result")
Arrays = list[NDArray[Any]]
Steps = Generator[Arrays, Arrays, Result]


def together(*protocols: Steps[Any]) -> Steps[list[Any]]:
    """Run protocols that do not depend on each other, each step of all of them in one message; return their results."""
    results: list[Any] = [None] * len(protocols)
    waiting: dict[int, Arrays] = {}
    given: dict[int, Arrays | None] = {k: None for k in range(len(protocols))}
    while given:
        for k, arrays in given.items():
            try:
                waiting[k] = next(protocols[k]) if arrays is None else protocols[k].send(arrays)
            except StopIteration as stop:
                results[k] = stop.value
        if not waiting:
            break
        sizes = np.array([len(waiting.get(k, ())) for k in range(len(protocols))], np.int64)
        came = yield [sizes, *(array for k in sorted(waiting) for array in waiting[k])]
        given, at = {}, 1
        fine = bool(came) and came[0].dtype == np.int64 and came[0].shape == (len(protocols),)
        counts = came[0].tolist() if fine else []
        if not fine or min(counts) < 0 or sum(counts) != len(came) - 1:
            raise CryptoError("expected a step of as many protocols as this end's")
        for k in sorted(waiting):
            given[k] = came[at : at + counts[k]]
            at += counts[k]
        waiting = {}
    return results


def take(came: Arrays, *expected: tuple[type[np.generic], tuple[int, ...]]) -> Arrays:
    """Return what the other party sent; CryptoError unless element types and shapes are those expected."""
    fine = len(came) == len(expected) and all(
        array.dtype == kind and array.shape == shape for array, (kind, shape) in zip(came, expected, strict=True)
    )
    if not fine:
        what = [(str(array.dtype), array.shape) for array in came]
        raise CryptoError(f"expected arrays {[(kind.__name__, shape) for kind, shape in expected]}, got {what}")
    return came


# ---------------------------------------------------------------- quads


_E0, _E1, _E2, _E3, _G0, _G1, _G2 = range(7)
_Product = tuple[int, ...]

_GREATER: list[_Product] = [(_E3, _G2), (_E3, _E2, _G1), (_E3, _E2, _E1, _G0)]
_EQUAL: list[_Product] = [(_E3, _E2, _E1, _E0)]

_FIRST: dict[_Product, list[_Product]] = {
    (_E3,): [(_E2,), (_E1,), (_E0,), (_G0,), (_G1,), (_G2,)],
    (_E2,): [(_E1,), (_E0,), (_G0,), (_G1,)],
    (_E1,): [(_E0,), (_G0,)],
}
_SECOND: dict[_Product, list[_Product]] = {
    (_E3, _E2): [(_E1,), (_E0,), (_G0,), (_G1,), (_E1, _E0), (_E1, _G0)],
    (_E3, _E1): [(_E0,), (_G0,)],
    (_E2, _E1): [(_E0,), (_G0,)],
}
"""What each product is multiplied by in the first and in the second step of making quads."""

_PRODUCTS: list[frozenset[int]] = [
    frozenset(),
    *sorted(
        {frozenset(part) for term in _GREATER + _EQUAL for n in range(1, 5) for part in combinations(term, n)},
        key=lambda part: (len(part), sorted(part)),
    ),
]
"""What the bits of a quad's word are shares of, the lowest first; the first, which is empty, is 1."""

_FEW, _MANY = 1 << 12, 1 << 17  # quads that are made when there are none, twice as many each time

Bits = NDArray[np.uint8]
Words = NDArray[np.uint32]


@cache
def _counting() -> Words:
    """Return which products count in whether four digits are greater, and equal, by the opened bits, (2, 128)."""
    out = np.zeros((2, 128), np.uint32)
    for result, terms in enumerate((_GREATER, _EQUAL)):
        for opened, term in product(range(128), terms):
            for place, part in enumerate(_PRODUCTS):
                if part <= set(term) and all(opened >> bit & 1 for bit in set(term) - part):
                    out[result, opened] ^= np.uint32(1 << place)
    return out


class Quads:
    """A stock of quads; both parties draw the same at once."""

    def __init__(self) -> None:
        self._stock, self._next, self._promised = np.empty(0, np.uint32), _FEW, 0

    def draw(self, transfers: Transfers, count: int) -> Steps[Words]:
        """Draw quads, uint32 (count,); where fewer are left, more are made of transfers first, in some steps."""
        if len(self._stock) - self._promised < count:
            self._promised += count  # what others draw meanwhile is theirs
            more = max(count, self._next)
            self._next = min(2 * self._next, _MANY)
            made = yield from _made(transfers, more)
            self._stock = np.concatenate([self._stock, made])
            self._promised -= count
        drawn, self._stock = self._stock[:count], self._stock[count:]
        return drawn


def join(transfers: Transfers, greater: Bits, equal: Bits, role: int) -> Steps[Bits]:
    """Return shares of whether numbers are greater, (n,), from those of their digits, (digits, n), the lowest first."""
    n = greater.shape[1]
    while len(greater) > 1:
        missing = -len(greater) % 4  # digits that are equal, below all others
        greater = np.concatenate([np.zeros((missing, n), np.uint8), greater]).reshape(-1, 4, n)
        equal = np.concatenate([np.full((missing, n), 1 - role, np.uint8), equal]).reshape(-1, 4, n)
        quads = yield from transfers.quads.draw(transfers, greater.shape[0] * n)
        masked = np.empty((len(greater), n), np.uint8)
        _mask(quads, greater, equal, masked)
        (came,) = take((yield [masked]), (np.uint8, masked.shape))
        found = np.empty((2, len(greater), n), np.uint8)
        _open(quads, masked ^ came, greater, _counting(), 1 - role, found)
        greater, equal = found
    carry: Bits = greater[0]
    return carry


@kernel
def _mask(quads: Words, greater: Bits, equal: Bits, masked: Bits) -> None:
    """Write the seven bits of each four digits under those of a quad."""
    for group in range(masked.shape[0]):
        for k in range(masked.shape[1]):
            word = np.uint8((quads[group * masked.shape[1] + k] >> np.uint32(1)) & np.uint32(127))
            for digit in range(4):
                word ^= equal[group, digit, k] << np.uint8(digit)
            for digit in range(3):
                word ^= greater[group, digit, k] << np.uint8(4 + digit)
            masked[group, k] = word


@kernel
def _open(quads: Words, opened: Bits, greater: Bits, counting: Words, one: int, found: Bits) -> None:
    """Write shares of whether four digits are greater, and equal; `one` is this party's share of 1."""
    for group in range(opened.shape[0]):
        for k in range(opened.shape[1]):
            quad = quads[group * opened.shape[1] + k] | np.uint32(one)
            for result in range(2):
                word = quad & counting[result, opened[group, k] & np.uint8(127)]
                word ^= word >> np.uint32(16)
                word ^= word >> np.uint32(8)
                word ^= word >> np.uint32(4)
                word ^= word >> np.uint32(2)
                found[result, group, k] = np.uint8((word ^ (word >> np.uint32(1))) & np.uint32(1))
            found[0, group, k] ^= greater[group, 3, k]


def _made(transfers: Transfers, count: int) -> Steps[Words]:
    """Make quads, uint32 (count,), of six transfers each: e1, e2 and e3 are random bits of the first three."""
    yield from transfers.reserve(3 * count)
    drawn = transfers.drawn(3 * count)
    noise = np.frombuffer(Keystream().raw(count), np.uint8)
    shares: dict[frozenset[int], Bits] = {
        frozenset([bit]): noise >> np.uint8(place) & np.uint8(1) for place, bit in enumerate((_E0, _G0, _G1, _G2))
    }
    shares |= {frozenset(factor): bits for factor, bits in zip(_FIRST, np.split(drawn.random, 3), strict=True)}
    yield from _multiply(shares, _FIRST, drawn, turned=False)
    chosen = np.concatenate([shares[frozenset(factor)] for factor in _SECOND])
    yield from _multiply(shares, _SECOND, (yield from transfers.draw_for(chosen)), turned=True)
    out = np.zeros(count, np.uint32)
    for place, part in enumerate(_PRODUCTS[1:], 1):
        out |= shares[part].astype(np.uint32) << np.uint32(place)
    return out


def _multiply(
    shares: dict[frozenset[int], Bits],
    plan: dict[_Product, list[_Product]],
    drawn: Drawn,
    *,
    turned: bool,
) -> Steps[None]:
    """Add shares of the products that the plan has; the first factors are the drawn choices, (len(plan) * n,).

    The other party's choices times own others is a transfer, and the reverse. Choices that are not the transfers'
    random bits are `turned`: their differences are sent as well.
    """
    offered = np.concatenate(
        [_side_by_side([shares[frozenset(other)] for other in others]) for others in plan.values()]
    )
    first, length = drawn.first, len(offered)
    zero, one = (pad[:, 0].astype(np.uint8) for pad in random_pairs(drawn.sender, drawn.q, first))
    message, flips = zero ^ one ^ offered, packed(drawn.flips)
    if turned:
        told, came = take((yield [flips, message]), (np.uint64, flips.shape), (np.uint8, message.shape))
        zero ^= _only(unpacked(told, length), offered)
    else:
        (came,) = take((yield [message]), (np.uint8, message.shape))
    received = drawn.receiver.hash.rows(drawn.t, first)[:, 0].astype(np.uint8) ^ _only(drawn.random, came)
    found = np.split(_only(drawn.random ^ drawn.flips, offered) ^ zero ^ received, len(plan))
    for (factor, others), products in zip(plan.items(), found, strict=True):
        for place, other in enumerate(others):
            shares[frozenset(factor) | frozenset(other)] = products >> np.uint8(place) & np.uint8(1)


def _side_by_side(bits: list[Bits]) -> Bits:
    out = np.zeros_like(bits[0])
    for place, each in enumerate(bits):
        out |= each << np.uint8(place)
    return out


def _only(bits: Bits, values: Bits) -> Bits:
    """Return values where the bit is 1, else 0, without a branch."""
    return values & (np.uint8(0) - bits)
