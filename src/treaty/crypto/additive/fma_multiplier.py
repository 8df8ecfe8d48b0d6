"""Montgomery products of four numbers at a time in double-precision fused multiply-adds: x86 without AVX-512 IFMA.

A vector holds one 52-bit digit of each of four numbers, as doubles, which have 53 bits. Two fused multiply-adds give
both halves of a product of two digits, exactly, in the usual rounding to nearest:

    high = a b + 2^104            its last 52 bits, read as an integer, count a b / 2^52, rounded to the nearest
    low  = a b + (c - high)       with c = 2^104 - 1.5 2^52: what the rounding left, minus 1.5 2^52

All sums here are exact: c - high is a multiple of 2^51 below 2^104, and -low lies in [2^52, 2^53], where neighbouring
doubles differ by one. So the bits of `high` are _HIGH + (rounded a b / 2^52), those of `low` are _LOW - (the signed
rest); they are added as integers, and what _HIGH and _LOW add up to is known beforehand and taken off at the start.

On an AMD EPYC of 2017 (Zen 1, which halves vectors) 2.5 times as fast as the 64-bit form at 2048 bits. Emitted only
when numba compiles for a processor with AVX2 and FMA.

References: Emmart, Zheng, Weems, Faster Modular Exponentiation Using Double Precision Floating Point Arithmetic on the
GPU, ARITH 2018 (the halves, there with rounding towards zero). Gueron and Krasnov as in `multiplier`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from treaty.crypto.additive.multiplier import DIGIT_BITS, HEADER, call_emitted, pointer_to
from treaty.machine.kernels import processor_has

GROUP = 4  # numbers at a time: 64-bit lanes of one 256-bit vector
SCRATCH = 4 * GROUP  # words of scratch for each word of a number: sums, both factors, the modulus
HAS_FMA = processor_has("avx2", "fma")

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WORDS, _DOUBLES = ir.VectorType(_I64, GROUP), ir.VectorType(ir.DoubleType(), GROUP)
_MASK = (1 << DIGIT_BITS) - 1
_HIGH, _LOW = 0x4670 << 48, 0xC338 << 48  # the bits of 2^104 and of -1.5 2^52
_WHOLE = 0x4330 << 48  # the bits of 2^52: with a digit in its last bits, 2^52 + the digit
_POSITIVE = 62  # bits: 2^62 makes a signed sum positive, for AVX2 shifts no signs


# Numba passes the first parameter, `montgomery_kernels._multiply` the rest as it takes them.
@intrinsic  # type: ignore[untyped-decorator]
def fma_multiply_four(
    typing_context: Any, out: Any, at: Any, a: Any, of_a: Any, b: Any, of_b: Any, m: Any, scratch: Any
) -> Any:
    """Write a * b / R mod n, below 2 n, at out[at[k]:] for four k; inputs at a[of_a[k]:] and b[of_b[k]:].

    Each of a, b holds normalised 52-bit digits (zero above `digits`), with a * b < R n. `m` is the array of constants
    of `montgomery.Modulus`; `scratch` has SCRATCH words for each of a number. All inputs are read before anything
    is written.
    """
    signature = types.void(out, at, a, of_a, b, of_b, m, scratch)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if HAS_FMA:
            arrays = [pointer_to(context, builder, signature, args, k) for k in range(8)]
            numbers = [
                builder.gep(arrays[k], [builder.load(builder.gep(arrays[k + 1], [_I64(lane)]))])
                for k in (0, 2, 4)
                for lane in range(GROUP)
            ]
            call_emitted(builder, "treaty_fma_multiply_four", _emit, [*numbers, *arrays[6:]])
        return context.get_dummy_value()

    return signature, generate


class _Places(NamedTuple):
    """Where the emitted code finds things: pointers, and numbers of digits."""

    sums: Any  # one vector per digit
    a: Any  # vectors of doubles
    b: Any
    n: Any  # each digit four times
    inverse: Any  # -1/n modulo 2^52, a vector of doubles
    digits: Any
    count: Any  # digits, up to an even number: what a turn goes over


def _emit(builder: Any, *pointers: Any) -> None:
    """Emit the whole: read, multiply, carry, write. Pointers: to four numbers of out, a and b, constants, scratch."""
    out, a, b = pointers[:GROUP], pointers[GROUP : 2 * GROUP], pointers[2 * GROUP : 3 * GROUP]
    constants, scratch = pointers[3 * GROUP :]
    digits = builder.load(builder.gep(constants, [_I64(1)]))
    width = builder.shl(builder.load(builder.gep(constants, [_I64(5)])), _I64(3))
    sums = builder.bitcast(scratch, _WORDS.as_pointer())
    factors = builder.bitcast(builder.gep(sums, [width]), _DOUBLES.as_pointer())
    others = builder.gep(factors, [width])
    n = builder.gep(others, [width])
    inverse = _double(builder, _splat(builder, builder.and_(builder.load(constants), _I64(_MASK))))
    count = builder.and_(builder.add(digits, _I64(1)), _I64(-2))
    places = _Places(sums, factors, others, n, inverse, digits, count)

    with _loop(builder, _I64(0), width, 4) as j:
        for source, target in ((a, factors), (b, others)):
            for k, column in enumerate(_transposed(builder, [_load(builder, row, j) for row in source])):
                _store(builder, _double(builder, column), target, builder.add(j, _I64(k)))
        for k in range(4):
            p = builder.add(j, _I64(k))
            digit = builder.load(builder.gep(constants, [builder.add(p, _I64(HEADER))]))
            _store(builder, _double(builder, _splat(builder, digit)), n, p)
            _store(
                builder,
                _taken_off(builder, _least(builder, builder.add(p, _I64(1)), digits), _least(builder, p, digits)),
                sums,
                p,
            )
    _emit_turns(builder, places)
    _emit_carries(builder, places)
    with _loop(builder, count, width, 1) as j:
        _store(builder, _words(0), sums, j)
    with _loop(builder, _I64(0), width, 4) as j:
        columns = [_read(builder, sums, builder.add(j, _I64(k))) for k in range(4)]
        for row, words in zip(out, _transposed(builder, columns), strict=True):
            builder.store(words, builder.bitcast(builder.gep(row, [j]), _WORDS.as_pointer()), align=8)


def _emit_turns(builder: Any, places: _Places) -> None:
    """Emit, for each digit b_i: sums = (sums + a b_i + n q) / 2^52, with the q that makes this a whole number.

    The next turn's q follows from this turn's lowest digit by a chain of a dozen instructions; it is begun as soon as
    that digit is known, and goes on beside the products of the higher digits.
    """
    lowest, high, q, carried = (cgutils.alloca_once(builder, kind) for kind in (_WORDS, _WORDS, _DOUBLES, _WORDS))

    def prepare(i: Any, digit: Any) -> None:
        """Emit the lowest digit of turn i, with a b_i added and without, and its q."""
        high_a, low = _halves(builder, _read(builder, places.a, _I64(0)), _read(builder, places.b, i))
        total = builder.sub(digit, low)
        known = builder.and_(builder.sub(total, _words(_LOW)), _words(_MASK))  # _LOW: of the half that is to come
        _, low = _halves(builder, _double(builder, known), places.inverse)
        builder.store(_double(builder, builder.and_(builder.sub(_words(_LOW), low), _words(_MASK))), q)
        builder.store(total, lowest)
        builder.store(high_a, high)

    def step(j: Any, b: Any, factor: Any) -> Any:
        """Emit digit j of a turn; return it, for what is now one digit lower."""
        high_a, low_a = _halves(builder, _read(builder, places.a, j), b, _read(builder, a_again, j))
        high_n, low_n = _halves(builder, _read(builder, places.n, j), factor, _read(builder, n_again, j))
        total = builder.add(_read(builder, places.sums, j), builder.load(carried))
        builder.store(builder.add(high_a, high_n), carried)
        return builder.sub(builder.sub(total, low_a), low_n)

    # Both fused multiply-adds overwrite an operand. The second one reads its digit from memory, by a pointer that the
    # compiler takes for another; else it would copy a register, and the number of instructions is what this loop costs.
    a_again, n_again = _other_pointer(builder, places.a), _other_pointer(builder, places.n)
    prepare(_I64(0), _read(builder, places.sums, _I64(0)))
    with _loop(builder, _I64(0), places.digits, 1) as i:
        b, factor = _read(builder, places.b, i), builder.load(q)
        high_n, low = _halves(builder, _read(builder, places.n, _I64(0)), factor)
        carry = _shifted(builder, builder.sub(builder.load(lowest), low))
        builder.store(builder.add(builder.add(builder.load(high), high_n), carry), carried)
        digit = step(_I64(1), b, factor)
        _store(builder, digit, places.sums, _I64(0))
        prepare(builder.add(i, _I64(1)), digit)
        with _loop(builder, _I64(2), places.count, 2) as j:
            for k in (j, builder.add(j, _I64(1))):
                _store(builder, step(k, b, factor), places.sums, builder.sub(k, _I64(1)))
        left = builder.sub(places.digits, i)  # turns, this one with them, that add a high half to the new highest digit
        owed = _taken_off(builder, builder.sub(left, _I64(1)), left)
        _store(builder, builder.add(builder.load(carried), owed), places.sums, builder.sub(places.count, _I64(1)))


def _emit_carries(builder: Any, places: _Places) -> None:
    """Emit the deferred carries: digits below 2^52 again, the last carry being zero by the bound 2 n."""
    carried = cgutils.alloca_once_value(builder, _words(0))
    with _loop(builder, _I64(0), places.count, 1) as j:
        total = builder.add(_read(builder, places.sums, j), builder.load(carried))
        _store(builder, builder.and_(total, _words(_MASK)), places.sums, j)
        builder.store(_shifted(builder, total), carried)


def _halves(builder: Any, a: Any, b: Any, again: Any = None) -> tuple[Any, Any]:
    """Return the bits of both halves of products of digits, as the module explains them; `again` is `a` once more."""
    kind = ir.FunctionType(_DOUBLES, [_DOUBLES] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{GROUP}f64")
    high = builder.call(fma, [a, b, _doubles(2.0**104)])
    low = builder.call(fma, [again or a, b, builder.fsub(_doubles(2.0**104 - 1.5 * 2.0**52), high)])
    return builder.bitcast(high, _WORDS), builder.bitcast(low, _WORDS)


def _other_pointer(builder: Any, pointer: Any) -> Any:
    return builder.asm(ir.FunctionType(pointer.type, [pointer.type]), "", "=r,0", [pointer], False)


def _taken_off(builder: Any, lows: Any, highs: Any) -> Any:
    """Return what a sum begins with so that it ends right: `lows` and `highs` halves of both products will be added."""
    both = builder.sub(builder.mul(lows, _I64(2 * _LOW % 2**64)), builder.mul(highs, _I64(2 * _HIGH % 2**64)))
    return _splat(builder, both)


def _shifted(builder: Any, total: Any) -> Any:
    """Return signed sums divided by 2^52, rounded down."""
    positive = builder.add(total, _words(1 << _POSITIVE))
    return builder.sub(builder.lshr(positive, _words(DIGIT_BITS)), _words(1 << _POSITIVE - DIGIT_BITS))


def _double(builder: Any, digits: Any) -> Any:
    """Return digits below 2^52 as doubles."""
    return builder.fsub(builder.bitcast(builder.or_(digits, _words(_WHOLE)), _DOUBLES), _doubles(2.0**52))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    def pairs(x: Any, y: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, GROUP), lanes))

    even, odd = [0, 4, 2, 6], [1, 5, 3, 7]
    first = [pairs(rows[0], rows[1], lanes) for lanes in (even, odd)]
    last = [pairs(rows[2], rows[3], lanes) for lanes in (even, odd)]
    return [pairs(x, y, lanes) for lanes in ([0, 1, 4, 5], [2, 3, 6, 7]) for x, y in zip(first, last, strict=True)]


def _least(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_unsigned("<", x, y), x, y)


def _read(builder: Any, vectors: Any, j: Any) -> Any:
    return builder.load(builder.gep(vectors, [j]), align=8)


def _store(builder: Any, vector: Any, vectors: Any, j: Any) -> None:
    builder.store(vector, builder.gep(vectors, [j]), align=8)


def _load(builder: Any, words: Any, j: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(words, [j]), _WORDS.as_pointer()), align=8)


@contextmanager
def _loop(builder: Any, start: Any, stop: Any, step: int) -> Iterator[Any]:
    with cgutils.for_range_slice(builder, start, stop, _I64(step), intp=_I64) as (index, _):
        yield index


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [_I64(value)] * GROUP)


def _doubles(value: float) -> Any:
    return ir.Constant(_DOUBLES, [ir.DoubleType()(value)] * GROUP)


def _splat(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, GROUP)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(
        one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_I32, GROUP), [0] * GROUP)
    )
