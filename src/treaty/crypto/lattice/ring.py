"""Elements of the ring of the lattice map: factors of its transform, random elements, and residues as they are sent.

*Transform*: the negacyclic number-theoretic one modulo primes q below 2^31; `kernels` makes it of the vector steps and
`Tables` here. The steps are LLVM code, as numba would not vectorise its own loops: residues in 32-bit words, sixteen
to a vector, which LLVM cuts to what the processor has, with the same bits on all. A factor w comes with its Shoup
quotient w' = floor(w 2^32 / q), so that y w - floor(y w' / 2^32) q lies in [0, 2 q) for any y < 2^32.

*Random numbers* come from streams of bytes: secret ones from `Keystream`, public ones from a seed. Which bytes are
rejected depends only on the rejected bytes, so the time taken reveals nothing of those kept.

*Packed residues* lie side by side without the bits that are zero in all of them. Of each block of N entries come the
residues modulo the first prime, each in the prime's width, from the lowest bit of the first word on; then those modulo
the next prime, which begin with a word of their own. So pieces of whole blocks, one after the other, are the same words
as all in one.

References: Longa and Naehrig, Speeding up the Number Theoretic Transform for Faster Ideal Lattice-Based Cryptography,
2016. Harvey, Faster arithmetic for number-theoretic transforms, J. Symb. Comput. 60, 2014.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.parameters import ERROR_BITS, Digits, Parameters
from treaty.errors import CryptoError
from treaty.machine.arrays import Integers, pieces
from treaty.machine.kernels import kernel, new_array
from treaty.machine.shared_work import share

Residues = NDArray[np.uint32]


class Tables(NamedTuple):
    """Factors of the transforms modulo one prime and their Shoup quotients, uint32 (2 N,) each.

    N are for strides from 16 on, then N / 2 for each of 8, 4, 2 and 1, one for every butterfly.
    """

    prime: np.uint32
    forward: Residues
    forward_shoup: Residues
    inverse: Residues
    inverse_shoup: Residues


@cache
def tables(prime: int, degree: int) -> Tables:
    """Return the powers of a 2 N-th root of unity."""
    # any non-residue gives a root of -1, whose powers are those of the negacyclic transform
    base = next(x for x in range(2, prime) if pow(x, (prime - 1) // 2, prime) == prime - 1)
    root = pow(base, (prime - 1) // (2 * degree), prime)
    # factors in bit-reversed order, as the transform visits them
    reversed_bits = np.zeros(1, np.intp)
    while len(reversed_bits) < degree:
        reversed_bits = np.concatenate([2 * reversed_bits, 2 * reversed_bits + 1])

    def powers(of: int) -> tuple[Residues, Residues]:
        values = np.ones(1, np.uint64)
        while len(values) < degree:  # products of numbers below 2^31 fit
            values = np.concatenate([values, values * np.uint64(pow(of, len(values), prime)) % np.uint64(prime)])
        block = values[reversed_bits]
        index = np.arange(degree // 2)
        near = [block[degree // (2 * stride) + index // stride] for stride in (8, 4, 2, 1)]
        factors = np.concatenate([block, *near])
        words = factors.astype(np.uint32)
        return words, shoup_quotients(words, prime)

    return Tables(np.uint32(prime), *powers(root), *powers(pow(root, -1, prime)))


def shoup_quotients(values: Residues, prime: int) -> Residues:
    """Return floor(values 2^32 / prime)."""
    return ((values.astype(np.uint64) << np.uint64(32)) // np.uint64(prime)).astype(np.uint32)


Bytes = Callable[[int], bytes]  # ``draw(count)`` gives that many bytes of a stream

_TRITS = np.array([[byte // 3**k % 3 - 1 for k in range(5)] for byte in range(243)], np.int8)


def uniform(draw: Bytes, bound: int, count: int) -> NDArray[np.uint32]:
    """Return uniform numbers below `bound` <= 2^31, uint32 (count,): the low bits of words, too large ones rejected."""
    kept, mask = np.empty(0, np.uint32), np.uint32((1 << (bound - 1).bit_length()) - 1)
    while len(kept) < count:
        words = np.frombuffer(draw(4 * (count - len(kept))), np.dtype("<u4")) & mask
        kept = np.concatenate([kept, words[words < bound]])
    return kept


def ternary(draw: Bytes, count: int) -> NDArray[np.int8]:
    """Return uniform numbers of {-1, 0, 1}, int8 (count,), five to a byte."""
    kept = np.empty(0, np.uint8)
    needed = -(-count // 5)
    while len(kept) < needed:
        # 243 = 3^5: the other 13 values of a byte are rejected
        drawn = np.frombuffer(draw((needed - len(kept)) * 256 // 243 + 32), np.uint8)
        kept = np.concatenate([kept, drawn[drawn < 243]])
    return _TRITS[kept[:needed]].reshape(-1)[:count].copy()


def errors(draw: Bytes, count: int) -> NDArray[np.int8]:
    """Return centred binomial numbers, int8 (count,): the difference of the sums of 21 bits each."""
    # counting bits takes no branch and no table
    words = np.frombuffer(draw(8 * count), np.dtype("<u4")) & np.uint32((1 << ERROR_BITS) - 1)
    ones = np.bitwise_count(words).view(np.int8)
    out: NDArray[np.int8] = ones[:count] - ones[count:]
    return out


def flood(draw: Bytes, bits: int, primes: tuple[int, ...], count: int) -> Integers:
    """Return residues int64 (count, primes) of integers uniform on [-2^(bits-1), 2^(bits-1))."""
    words = -(-bits // 32)
    drawn = np.frombuffer(draw(4 * words * count), np.dtype("<u4")).reshape(count, words).astype(np.int64)
    if bits % 32:
        drawn[:, -1] &= (1 << bits % 32) - 1
    modulus = np.array(primes, np.int64)
    # residues of numbers of many words: Horner's rule, modulo each prime
    rest = np.zeros((count, len(primes)), np.int64)
    for word in range(words - 1, -1, -1):
        rest = ((rest << 32) + drawn[:, word, np.newaxis]) % modulus
    half = np.array([(1 << (bits - 1)) % prime for prime in primes], np.int64)
    out: Integers = (rest - half) % modulus
    return out


def uniform_digits(draw: Bytes, shape: tuple[int, int, int]) -> Digits:
    """Return numbers uniform modulo q' = 2^(16 D), uint16 (vectors, rows, D)."""
    return np.frombuffer(draw(2 * math.prod(shape)), np.dtype("<u2")).astype(np.uint16).reshape(shape)


def public_ring_elements(seed: bytes, number: int, primes: tuple[int, ...], degree: int) -> NDArray[np.uint32]:
    """Expand public element `number` of the ring from a seed, transformed: uint32 (primes, degree), uniform."""
    out = np.empty((len(primes), degree), np.uint32)
    for k, prime in enumerate(primes):
        # a stream for each element and prime
        label = b"treaty lattice public element" + number.to_bytes(8, "little") + prime.to_bytes(8, "little")
        out[k] = uniform(Keystream(hashlib.sha256(label + seed).digest()).raw, prime, degree)
    return out


def public_transforms(parameters: Parameters, seed: bytes, numbers: Sequence[int], threads: int) -> Residues:
    """Return the transforms of some of a~_0, a~_1, ...: uint32 (primes, numbers, N)."""
    out = np.empty((len(parameters.primes), len(numbers), parameters.degree), np.uint32)

    def expand(first: int, stop: int) -> None:
        for place in range(first, stop):
            out[:, place] = public_ring_elements(seed, numbers[place], parameters.primes, parameters.degree)

    share(expand, len(numbers), threads)
    return out


WORD_BITS = 32
Packed = NDArray[np.uint32]

_WORD, _LOW = np.uint64(WORD_BITS), np.uint64((1 << WORD_BITS) - 1)


class ResidueLayout(Protocol):
    """What says how residues are packed."""

    @property
    def degree(self) -> int: ...
    @property
    def primes(self) -> tuple[int, ...]: ...
    @property
    def widths(self) -> list[int]: ...


def packed_words(parameters: ResidueLayout, count: int) -> int:
    """Return the number of words that the residues of some entries take."""
    blocks, rest = divmod(count, parameters.degree)
    sizes = [(-(-parameters.degree * width // WORD_BITS), -(-rest * width // WORD_BITS)) for width in parameters.widths]
    return sum(blocks * whole + last for whole, last in sizes)


_Plane = Callable[[tuple[int, int, slice], int, tuple[int, slice]], None]


def _each_plane(parameters: ResidueLayout, vectors: int, count: int, threads: int, work: _Plane) -> None:
    """Call ``work`` with the place of the residues of a vector's block modulo each prime, their width, and words."""
    blocks = pieces(count, parameters.degree)

    def some(first: int, stop: int) -> None:
        for v, block in ((v, blocks[j]) for v, j in (divmod(task, len(blocks)) for task in range(first, stop))):
            start = packed_words(parameters, block.start)
            for p, width in enumerate(parameters.widths):
                end = start + -(-(block.stop - block.start) * width // WORD_BITS)
                work((v, p, block), width, (v, slice(start, end)))
                start = end

    share(some, vectors * len(blocks), threads)


def pack(parameters: ResidueLayout, residues: Residues, threads: int = 1) -> Packed:
    """Pack residues, uint32 (vectors, primes, m), to uint32 (vectors, words)."""
    vectors, _, count = residues.shape
    out = np.empty((vectors, packed_words(parameters, count)), np.uint32)
    _each_plane(parameters, vectors, count, threads, lambda of, width, at: pack_plane(residues[of], width, out[at]))
    return out


def unpack(parameters: ResidueLayout, packed: Packed, most: int, threads: int = 1) -> Residues:
    """Return the residues, uint32 (vectors, primes, m), of `most` entries or, of fewer, of whole blocks.

    They may exceed their primes. CryptoError for a number of words that no such entries take.
    """
    # read-only as those of a message are, or the kernel would be compiled for either kind
    packed = packed.view()
    packed.flags.writeable = False
    vectors, given = packed.shape
    whole = given // packed_words(parameters, parameters.degree) * parameters.degree
    count = most if given == packed_words(parameters, most) else whole
    if count > most or given != packed_words(parameters, count):
        raise CryptoError(
            f"expected words of {most} entries, or of fewer in whole blocks of {parameters.degree}, got {given} words "
            "- in a query"
        )
    out = np.empty((vectors, len(parameters.primes), count), np.uint32)
    _each_plane(parameters, vectors, count, threads, lambda of, width, at: unpack_plane(packed[at], width, out[of]))
    return out


@kernel
def pack_plane(residues: Residues, width: int, out: Packed) -> None:
    """Write the low `width` bits, 16 to 31, of each number one after the other."""
    # 32 numbers take `width` words, of which each holds bits of three numbers at most: of number at[k] all but gone[k]
    at, gone, wide = new_array((3, width), np.uint32), new_array(width, np.uint64), np.uint64(width)
    for k in range(width):
        for part in range(3):
            at[part, k] = min(k * WORD_BITS // width + part, WORD_BITS - 1)
        gone[k] = k * WORD_BITS % width
    for first in range(0, len(residues), WORD_BITS):
        numbers, start = residues[first : first + WORD_BITS], first // WORD_BITS * width
        if len(numbers) < WORD_BITS:
            rest, numbers = numbers, new_array(WORD_BITS, np.uint32)
            # not by slices, which would take seconds to compile
            for i in range(WORD_BITS):
                numbers[i] = rest[i] if i < len(rest) else np.uint32(0)
        words = out[start : start + width]
        for k in range(len(words)):
            held = np.uint64(numbers[at[0, k]]) >> gone[k] | np.uint64(numbers[at[1, k]]) << wide - gone[k]
            held |= np.uint64(numbers[at[2, k]]) << wide + wide - gone[k]
            words[k] = np.uint32(held & _LOW)


@kernel
def unpack_plane(packed: Packed, width: int, out: Residues) -> None:
    # unsigned indices: numba checks no signs
    wide, last = np.uint64(width), np.uint64(len(packed) - 1)
    mask = (np.uint64(1) << wide) - np.uint64(1)
    for i in range(np.uint64(len(out))):
        bit = np.uint64(i) * wide
        word, shift = bit >> np.uint64(5), bit & np.uint64(31)
        # a number lies in one word or in two
        pair = np.uint64(packed[word]) | np.uint64(packed[min(word + np.uint64(1), last)]) << _WORD
        out[i] = np.uint32(pair >> shift & mask)


LANES = 16
WORDS = 8  # residues of a number, side by side: one for each prime, the rest zero

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_VECTOR, _WIDE = ir.VectorType(_I32, LANES), ir.VectorType(_I64, LANES)


def _at(context: Any, builder: Any, kind: Any, array: Any, index: Any, vector: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _load(context: Any, builder: Any, kind: Any, array: Any, index: Any, vector: Any = _VECTOR) -> Any:
    return builder.load(_at(context, builder, kind, array, index, vector), align=vector.element.width // 8)


def _store(context: Any, builder: Any, value: Any, kind: Any, array: Any, index: Any) -> None:
    builder.store(value, _at(context, builder, kind, array, index, value.type), align=value.type.element.width // 8)


def _splat(builder: Any, word: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    return _shuffle(builder, builder.insert_element(undefined, word, _I32(0)), undefined, [0] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _times(builder: Any, y: Any, w: Any, quotient: Any, q: Any) -> Any:
    """Y w modulo q, in [0, 2 q)."""
    product = builder.mul(builder.zext(y, _WIDE), builder.zext(quotient, _WIDE))
    high = builder.trunc(builder.lshr(product, ir.Constant(_WIDE, [32] * LANES)), _VECTOR)
    return builder.sub(builder.mul(y, w), builder.mul(high, q))


def _reduce(builder: Any, x: Any, q: Any) -> Any:
    """X below 2 q to x below q: the smaller of x and x - q modulo 2^32."""
    less = builder.sub(x, q)
    return builder.select(builder.icmp_unsigned("<", x, less), x, less)


def _forward(builder: Any, x: Any, y: Any, w: Any, quotient: Any, q: Any) -> tuple[Any, Any]:
    """X + y w and x - y w (Cooley and Tukey)."""
    t = _reduce(builder, _times(builder, y, w, quotient, q), q)
    return _reduce(builder, builder.add(x, t), q), _reduce(builder, builder.sub(builder.add(x, q), t), q)


def _inverse(builder: Any, x: Any, y: Any, w: Any, quotient: Any, q: Any) -> tuple[Any, Any]:
    """X + y and (x - y) w (Gentleman and Sande)."""
    difference = builder.sub(builder.add(x, q), y)
    return (_reduce(builder, builder.add(x, y), q), _reduce(builder, _times(builder, difference, w, quotient, q), q))


def _far(butterfly: Callable[..., tuple[Any, Any]]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def step(typing_context: Any, a: Any, i: Any, j: Any, w: Any, quotient: Any, q: Any) -> Any:
        """Sixteen butterflies of a[i:] and a[j:], one factor."""
        signature = types.void(a, types.intp, types.intp, types.uint32, types.uint32, types.uint32)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind, (a, i, j, w, quotient, q) = signature.args[0], args
            x, y = _load(context, builder, kind, a, i), _load(context, builder, kind, a, j)
            u, v = butterfly(builder, x, y, *(_splat(builder, word) for word in (w, quotient, q)))
            _store(context, builder, u, kind, a, i)
            _store(context, builder, v, kind, a, j)
            return context.get_dummy_value()

        return signature, generate

    return step


def _near(butterfly: Callable[..., tuple[Any, Any]], stride: int) -> Any:
    # two vectors are shuffled into the lower and the upper halves of butterflies, and back
    lower = [lane for lane in range(2 * LANES) if not lane & stride]
    upper = [lane + stride for lane in lower]
    place = [0] * (2 * LANES)
    for k in range(LANES):
        place[lower[k]], place[upper[k]] = k, LANES + k

    @intrinsic  # type: ignore[untyped-decorator]
    def step(typing_context: Any, a: Any, i: Any, w: Any, quotient: Any, k: Any, q: Any) -> Any:
        """Sixteen butterflies within a[i:i + 32] at a distance below 16, with the factors w[k:k + 16]."""
        signature = types.void(a, types.intp, w, quotient, types.intp, types.uint32)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind, (a, i, _, _, k, q) = signature.args[0], args
            first = _load(context, builder, kind, a, i)
            second = _load(context, builder, kind, a, builder.add(i, _I64(LANES)))
            x, y = (_shuffle(builder, first, second, lanes) for lanes in (lower, upper))
            factors = (_load(context, builder, signature.args[n], args[n], k) for n in (2, 3))
            u, v = butterfly(builder, x, y, *factors, _splat(builder, q))
            _store(context, builder, _shuffle(builder, u, v, place[:LANES]), kind, a, i)
            _store(context, builder, _shuffle(builder, u, v, place[LANES:]), kind, a, builder.add(i, _I64(LANES)))
            return context.get_dummy_value()

        return signature, generate

    return step


forward_far, inverse_far = _far(_forward), _far(_inverse)
forward_8, forward_4, forward_2, forward_1 = (_near(_forward, stride) for stride in (8, 4, 2, 1))
inverse_8, inverse_4, inverse_2, inverse_1 = (_near(_inverse, stride) for stride in (8, 4, 2, 1))


@intrinsic  # type: ignore[untyped-decorator]
def multiply_lanes(typing_context: Any, out: Any, o: Any, a: Any, i: Any, w: Any, quotient: Any, k: Any, q: Any) -> Any:
    """out[o:o + 16] = a[i:i + 16] * w[k:k + 16] modulo q."""
    at = types.intp
    signature = types.void(out, at, a, at, w, quotient, at, types.uint32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, o, a, i, w, quotient, k, q = args
        x = _load(context, builder, signature.args[2], a, i)
        factor = _load(context, builder, signature.args[4], w, k)
        shoup = _load(context, builder, signature.args[5], quotient, k)
        q = _splat(builder, q)
        product = _reduce(builder, _times(builder, x, factor, shoup, q), q)
        _store(context, builder, product, signature.args[0], out, o)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def add_words(typing_context: Any, sums: Any, o: Any, words: Any, i: Any) -> Any:
    """sums[o:o + 8] += words[i:i + 8], 64-bit and 32-bit words."""
    signature = types.void(sums, types.intp, words, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, o, words, i = args
        narrow, wide = ir.VectorType(_I32, WORDS), ir.VectorType(_I64, WORDS)
        total = _load(context, builder, signature.args[0], sums, o, wide)
        term = builder.zext(_load(context, builder, signature.args[2], words, i, narrow), wide)
        _store(context, builder, builder.add(total, term), signature.args[0], sums, o)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def dot(typing_context: Any, a: Any, i: Any, b: Any, j: Any, count: Any) -> Any:
    """Sum of a[i + k] * b[j + k] over `count` k, a multiple of 128; int16 to int32, the caller sees to overflow.

    Written so that LLVM takes the processor's multiply-and-add of pairs where there is one, and sums stay in registers.
    """
    signature = types.int32(a, types.intp, b, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, i, b, j, count = args
        narrow, wide, each = ir.VectorType(_I16, 2 * LANES), ir.VectorType(_I32, 2 * LANES), range(4)
        entry, loop, done = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_I64)
        k.add_incoming(_I64(0), entry)
        sums = [builder.phi(_VECTOR) for _ in each]
        for part, total in enumerate(sums):
            at = builder.add(k, _I64(2 * LANES * part))
            x = builder.sext(_load(context, builder, signature.args[0], a, builder.add(i, at), narrow), wide)
            y = builder.sext(_load(context, builder, signature.args[2], b, builder.add(j, at), narrow), wide)
            products = builder.mul(x, y)
            # neighbours are added, which LLVM recognises as one instruction with the products
            even = _shuffle(builder, products, products, list(range(0, 2 * LANES, 2)))
            odd = _shuffle(builder, products, products, list(range(1, 2 * LANES, 2)))
            total.add_incoming(ir.Constant(_VECTOR, [0] * LANES), entry)
            total.add_incoming(builder.add(total, builder.add(even, odd)), loop)
        following = builder.add(k, _I64(8 * LANES))
        k.add_incoming(following, loop)
        results = [total.incomings[1][0] for total in sums]
        builder.cbranch(builder.icmp_unsigned("<", following, count), loop, done)
        builder.position_at_end(done)
        vector = builder.add(builder.add(results[0], results[1]), builder.add(results[2], results[3]))
        lanes = [builder.extract_element(vector, _I32(lane)) for lane in range(LANES)]
        total = lanes[0]
        for lane in lanes[1:]:
            total = builder.add(total, lane)
        return total

    return signature, generate
