"""Products of random numbers in bulk, by ring-LWE: of a *holder*'s r and a *giver*'s y' both get shares, ahead of use.

*Numbers.* r is below 2^x_bits, y' below 2^y_bits. The holder opens V = r y' + mask alone, where the giver's mask is
uniform below 3/4 T, at least 2^69 times a product. V is below T, the product of primes t, and follows from its residues
(`residues.joined`). So both ends have shares of r y' modulo any power of 2.

*One ciphertext* is of N numbers modulo two of the primes, t1 t2 = t, one in each slot of the ring: elements are
multiplied slot by slot. Its modulus is q = t P, P = p0 p1 .. p4, and numbers m are held as P m. With a public, s the
holder's secret, and Y and R the giver's y' and mask modulo t::

    holder -> giver    c = a s + e + P m                                                  (transformed)
    giver -> holder    c0 = c Y + b v + f + P R,   c1 = a Y + a' v + e1,  divided by p1 .. p4 and rounded

where b = a' s + e' is public, and v, e1 and f are new for each answer. c0 - c1 s = P (m Y + R) + noise modulo q: the
holder divides by p0, too, rounds, and has m Y + R modulo t. P x modulo q depends on x modulo t alone: no product
wraps around into the noise, and Y may be any number that is y' modulo t.

*What the holder learns* beyond V. (c1, a') is a ring-LWE sample under v, also to who has s: without b v and a' v, a Y
would show y'. c0 follows from c1, s, V and the noise e Y + e' v - e1 s + f, of which the *flood* f is uniform on 2^F
numbers. Y = z1 t2 + z2 t1 with z uniform below t1 and t2 has an average square of 7/6 t^2, so a coefficient of e Y one
of N 21/2 7/6 t^2, the square of 2^8.4 t; the other terms are below 2^19. So a coefficient tells at most 2^8.4 t / 2^F
(total variation), which is to be at most 2^-72, and a product E(r y') / (3/4 T) <= 2^-71 by its mask. With at most 2^28
products of a direction in a job, of at most 8 ciphertexts each, that is 2^-41 + 2^-43. Any more are made of transfers.

*Noise* is bounded for the worst case: |e Y| <= 21 N 2 t, |e' v| and |e1 s| <= 21 N; rounding moves c0 and c1 by half,
so c0 - c1 s by (N + 1) / 2. Nothing fails by chance.

*Public elements* are expanded from the digest of the base transfers (`extension`), which neither end chooses, by kind,
ring and number; none serves twice under one s, and each job and ring has secrets of its own.

Honest but curious: a holder that sends no encryption reads more. 128 bits by `parameters.LIMITS`. Reference:
Brakerski, "Fully Homomorphic Encryption without Modulus Switching from Classical GapSVP", CRYPTO 2012.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.kernels import forward_transform, inverse_transform
from treaty.crypto.lattice.residues import FRACTION_BITS, add_product, add_small, drop, joined, sum_limbs
from treaty.crypto.lattice.ring import (
    Packed,
    Residues,
    errors,
    pack,
    public_ring_elements,
    tables,
    ternary,
    unpack,
)
from treaty.crypto.parameters import DEGREE, ERROR_BITS, LIMITS, SECURITY_BITS, narrow_primes
from treaty.crypto.payload import to_words
from treaty.errors import CryptoError
from treaty.machine.arrays import Words

MASK_BITS = 69  # by which masks are longer than products, at least
_FLOOD = 72  # a coefficient of the noise tells 2^-72 at most
_NOISE = math.sqrt(DEGREE * ERROR_BITS / 2 * 7 / 6)  # of e Y, in t
KEPT = 786433  # p0: 20 bits, of which rounding takes 13
_OTHERS = 4  # primes by which an answer is divided before it is sent
_WIDEST, _NARROWEST = 62, 20  # bits of t1 t2, and of a prime
_MONTGOMERY = 1 << 32


class RingKind(NamedTuple):
    """A kind of products: of numbers of some bits each, shared modulo 2^bits."""

    x_bits: int
    y_bits: int
    bits: int


class Factor:
    """What is done modulo one prime, of elements (N,)."""

    def __init__(self, prime: int) -> None:
        self.prime, self.q = prime, np.uint64(prime)
        self._inverse = np.uint64(-pow(prime, -1, _MONTGOMERY) % _MONTGOMERY)
        self.of_degree = pow(DEGREE, -1, prime)

    def forward(self, a: Residues) -> Residues:
        """Transform an element in place."""
        of = tables(self.prime, DEGREE)
        forward_transform(a, 0, DEGREE, of.forward, of.forward_shoup, of.prime)
        return a

    def back(self, a: Residues) -> Residues:
        """Undo `forward` but for a factor N."""
        of = tables(self.prime, DEGREE)
        inverse_transform(a, 0, DEGREE, of.inverse, of.inverse_shoup, of.prime)
        return a

    def add_product(self, a: Residues, b: Residues, to: Residues) -> Residues:
        """Add a b / 2^32 in place."""
        add_product(a, b, self.q, self._inverse, to)
        return to

    def add_small(self, numbers: NDArray[np.int8], to: Residues, scale: int = 1) -> Residues:
        """Add numbers times a scale in place: ternary ones, unless the scale is 1."""
        add_small(numbers, np.int64(scale % self.prime), np.int64(self.prime), to)
        return to

    def sum_of(self, limbs: Residues, factors: list[int], start: int = 0) -> Residues:
        """Return start plus the sum of limbs (L, n), 32 bits each, times factors."""
        out, given = np.empty(limbs.shape[1], np.uint32), [f % self.prime for f in factors]
        numbers, quotients = (np.array(row, np.uint64) for row in (given, [(f << 32) // self.prime for f in given]))
        sum_limbs(limbs, numbers, quotients, np.uint64(start % self.prime), self.q, out)
        return out


class RingLayout(NamedTuple):
    """Elements as they are sent: by their residues modulo these primes (`lattice.ring.pack`)."""

    primes: tuple[int, ...]
    widths: list[int]
    degree: int = DEGREE

    def unpacked(self, came: Packed) -> Residues:
        """Return residues (vectors, primes, N); CryptoError if one is not below its prime."""
        out = unpack(self, came, DEGREE)
        if (out >= np.array(self.primes, np.uint32)[:, None]).any():
            raise CryptoError("expected residues below their primes - in products by ring-LWE")
        return out


class Ring:
    """The ring of one ciphertext, with plain numbers modulo t1 t2; CryptoError below 128 bits, or for unfit primes."""

    def __init__(self, plain: tuple[int, int], others: tuple[int, ...]) -> None:
        self.plain, primes = plain, (*plain, KEPT, *others)
        if any(p >= 1 << 31 or p % (2 * DEGREE) != 1 or not gmpy2.is_prime(p) for p in primes):
            raise CryptoError("expected primes below 2^31 that are 1 modulo 2 N - in a ring of products")
        if len(set(primes)) != len(primes):
            raise CryptoError("a prime is repeated - in a ring of products")
        self.primes, self.scale = primes, math.prod(primes[2:])  # the latter is P
        t, bits = math.prod(plain), math.prod(primes).bit_length()
        if bits > LIMITS[DEGREE]:
            raise CryptoError(
                f"parameters below {SECURITY_BITS} bits: N = {DEGREE} takes a modulus of at most {LIMITS[DEGREE]} bits,"
                f" got {bits} - in a ring of products"
            )
        self.flood_bits = flood_bits(t, self.scale)
        if not hides(self.flood_bits, t):
            raise CryptoError(f"a flood of {self.flood_bits} bits hides too little - in a ring of products")
        self.factors = [Factor(p) for p in primes]
        widths = [p.bit_length() for p in primes]
        self.sent, self.returned = RingLayout(primes, widths), RingLayout(primes[:3], widths[:3])


def flood_bits(t: int, scale: int) -> int:
    """Return F of the widest flood that never spoils a number modulo t, of those held times `scale`."""
    # the noise over P / p0 and what rounding adds stay below p0 / 2
    noise = ERROR_BITS * DEGREE * (2 * t + 2)
    return max(0, (KEPT // 2 - (DEGREE + 1) // 2 - _OTHERS) * scale // KEPT - noise).bit_length()


def hides(flood: int, t: int) -> bool:
    """Whether a flood of so many bits hides the noise of products modulo t."""
    return flood - math.log2(_NOISE * t) >= _FLOOD


class Plan:
    """The rings of a kind's products, and the constants of their numbers."""

    def __init__(self, kind: RingKind) -> None:
        least = kind.x_bits + kind.y_bits + MASK_BITS
        count = -(-(least + 1) // _WIDEST)
        plain, self.bound = _plain(least, count)  # masks are below the latter
        pairs = [(plain[k], plain[-1 - k]) for k in range(count)]
        others = _others(plain, max(math.prod(pair) for pair in pairs))
        self.rings = [Ring(pair, others) for pair in pairs]
        self.words = -(-kind.bits // 64)
        of_all, whole = [t for ring in self.rings for t in ring.plain], math.prod(plain)
        inverses = [pow(whole // t, -1, t) for t in of_all]
        quotients = [(inverse << 32) // t for inverse, t in zip(inverses, of_all, strict=True)]
        fractions = [(1 << FRACTION_BITS) // t for t in of_all]
        self._constants = np.array([of_all, inverses, quotients, fractions], np.uint64)
        parts = [x % (1 << 64 * self.words) for x in (*(whole // t for t in of_all), -whole)]
        self._parts = np.ascontiguousarray(_limbs(to_words(parts, self.words)).T).astype(np.uint64)
        # bytes that an end sends for each product
        self.nbytes = sum(sum(ring.sent.widths) + 2 * sum(ring.returned.widths) for ring in self.rings) // 8

    def residues(self, numbers: Words, *, held: bool = False, given: bool = False) -> list[Residues]:
        """Return numbers (N, words) for each ring modulo t1 and t2, (2, N).

        As `Holder.encrypt` takes them if `held`, as `Giver.answer` takes y if `given`, and otherwise masks.
        """
        limbs, out = _limbs(numbers), []
        for ring in self.rings:
            rows = []
            for of in ring.factors[:2]:
                scale = ring.scale if held else (_MONTGOMERY if given else ring.scale) * of.of_degree
                rows.append(of.sum_of(limbs, [scale << 32 * j for j in range(len(limbs))]))
            out.append(np.stack(rows))
        return out

    def opened(self, residues: list[Residues]) -> Words:
        """Return numbers modulo 2^(64 words) by what was opened in each ring."""
        out = np.empty((DEGREE, self.words), np.uint64)
        joined(np.concatenate(residues), self._constants, self._parts, out)
        return out


@cache
def plan_of(kind: RingKind) -> Plan:
    return Plan(kind)


def _plain(least: int, count: int) -> tuple[tuple[int, ...], int]:
    """Return primes for so many rings, and the bound of masks."""
    for bits in range(max(least, 2 * _NARROWEST * count), _WIDEST * count + 1):
        primes = narrow_primes(bits, 2 * count)
        bound = 3 * math.prod(primes) // 4
        if len(primes) == 2 * count and bound >= 1 << least and KEPT not in primes:
            return primes, bound
    raise CryptoError(f"found no primes for products of {least - MASK_BITS} bits - in products by ring-LWE")


def _others(plain: tuple[int, ...], t: int) -> tuple[int, ...]:
    """Return p1 .. p4, as narrow as a flood allows that hides noise of products modulo t."""
    for width in range(_NARROWEST, 32):
        # some more, in place of those that are taken
        count = _OTHERS + len(plain) + 1
        primes = [p for p in narrow_primes(width * count, count) if p not in plain and p != KEPT][:_OTHERS]
        if hides(flood_bits(t, math.prod(primes) * KEPT), t):
            return tuple(primes)
    raise CryptoError("found no primes below 2^31 - in products by ring-LWE")


def _limbs(numbers: Words) -> Residues:
    """Return limbs of 32 bits of numbers (n, words), the lowest first, (2 words, n)."""
    return np.ascontiguousarray(numbers.astype("<u8", copy=False).view("<u4").astype(np.uint32, copy=False).T)


class Holder:
    """The holder's end of one ring, with a new secret; `seed` is that of public elements."""

    def __init__(self, ring: Ring, seed: bytes) -> None:
        self.ring, self._seed, secret = ring, seed, ternary(Keystream().raw, DEGREE)
        # s 2^32, so that products are those with s
        self._secret = [of.forward(of.add_small(secret, _zeros(), _MONTGOMERY)) for of in ring.factors]

    def encrypt(self, number: int, plain: Residues | None = None) -> Residues:
        """Return c, transformed, (primes, N), of slots that hold P m; each `number` names a public element, once.

        Without `plain` it is b, of number 0.
        """
        public = public_ring_elements(self._seed, number, self.ring.primes, DEGREE)
        error, out = errors(Keystream().raw, DEGREE), np.zeros_like(public)
        for k, of in enumerate(self.ring.factors):
            of.add_product(public[k], self._secret[k], of.forward(of.add_small(error, out[k])))
            if plain is not None and k < len(plain):
                out[k] = of.sum_of(np.stack([out[k], plain[k]]), [1, 1])
        return out

    def open(self, answer: Residues) -> Residues:
        """Return the slots of m Y + R modulo t1 and t2, (2, N), by c0 and c1, (2, 3, N)."""
        rest = np.empty_like(answer[0])
        for k, of in enumerate(self.ring.factors[:3]):
            product = of.back(of.add_product(of.forward(answer[1, k]), self._secret[k], _zeros()))
            rest[k] = of.sum_of(np.stack([answer[0, k], product]), [1, -of.of_degree])
        _divide(rest, self.ring.factors[:3])
        return np.stack([self.ring.factors[k].forward(rest[k]) for k in range(2)])


class Giver:
    """The giver's end of one ring, with the holder's b."""

    def __init__(self, ring: Ring, seed: bytes, b: Residues) -> None:
        self.ring, self._seed, self._b = ring, seed, b
        self._a = public_ring_elements(seed, 0, ring.primes, DEGREE)

    def answer(self, number: int, c: Residues, y: Residues, mask: Residues) -> Residues:
        """Return c0 and c1, (2, 3, N); `number` is that of c, `y` and `mask` are as from `Plan.residues`."""
        ring, draw = self.ring, Keystream()
        public, lifted = public_ring_elements(self._seed, number, ring.primes, DEGREE), self._lifted(y)
        v, error = ternary(draw.raw, DEGREE), errors(draw.raw, DEGREE)
        flood, out = _limbs(draw.bits(ring.flood_bits, DEGREE)), np.zeros((2, *c.shape), np.uint32)
        out[0, :2] = mask
        for k, of in enumerate(ring.factors):
            # factors are times 2^32 / N
            zero = of.forward(of.add_small(v, _zeros(), _MONTGOMERY * of.of_degree))
            for element, key, to in ((c, self._b, out[0]), (public, self._a, out[1])):
                of.back(of.add_product(key[k], zero, of.add_product(element[k], lifted[k], to[k])))
            # the flood is from -2^(F-1) on
            powers = [1, *(1 << 32 * j for j in range(len(flood)))]
            out[0, k] = of.sum_of(np.concatenate([out[0, k : k + 1], flood]), powers, -(1 << ring.flood_bits - 1))
            of.add_small(error, out[1, k])
        for element in out:
            for left in range(len(ring.factors), 3, -1):
                _divide(element, ring.factors[:left])
        return out[:, :3].copy()

    def _lifted(self, y: Residues) -> list[Residues]:
        """Return the transforms of Y 2^32 / N modulo all primes, of Y = z1 t2 + z2 t1 that is y modulo t1 and t2."""
        factors, (t1, t2) = self.ring.factors, self.ring.plain
        z = np.empty_like(y)
        for k, (of, other) in enumerate(((factors[0], t2), (factors[1], t1))):
            # back from slots, which leaves 2^32
            z[k] = of.sum_of(of.back(y[k].copy())[None], [pow(other * _MONTGOMERY, -1, of.prime)])
        scaled = ([of_one * _MONTGOMERY * of.of_degree for of_one in (t2, t1)] for of in factors[2:])
        return [*y, *(of.forward(of.sum_of(z, by)) for of, by in zip(factors[2:], scaled, strict=True))]


def _zeros() -> Residues:
    return np.zeros(DEGREE, np.uint32)


def _divide(element: Residues, factors: list[Factor]) -> None:
    """Divide an element, by its residues modulo primes, by the last of these, and round."""
    p = factors[-1]
    for residues, of in zip(element, factors[:-1], strict=False):
        inverse = pow(p.prime, -1, of.prime)
        quotients = np.array([(1 << 32) // of.prime, (inverse << 32) // of.prime], np.uint64)
        drop(element[len(factors) - 1], p.q, of.q, np.uint64(inverse), quotients, residues)


def compile_kernels() -> None:
    """Make products of zeros, so that all that this takes is compiled."""
    plan, zeros = plan_of(RingKind(1, 1, 1)), np.zeros((2, DEGREE), np.uint32)
    holder, packed = Holder(plan.rings[0], bytes(32)), pack(plan.rings[0].sent, np.zeros((1, 7, DEGREE), np.uint32))
    giver = Giver(holder.ring, bytes(32), holder.ring.sent.unpacked(packed)[0])
    plan.opened([holder.open(giver.answer(1, holder.encrypt(1, zeros), zeros, zeros)) for _ in plan.rings])
