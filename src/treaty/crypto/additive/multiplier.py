"""Machine-level products behind `montgomery`: what numba's own integers cannot express, as LLVM code.

* `multiply_add` is the 64 x 64 + 64 + 64 -> 128 bit step of school-book arithmetic. It runs everywhere.
* `ifma_multiply_pair` is a whole Montgomery product, twice, in vectors of eight 52-bit digits (x86 AVX-512 IFMA).
  One product of up to 2000 bits waits on its own carries for most of its cycles, so two interleaved ones take hardly
  longer; longer ones follow each other. Twelve times as fast as the 64-bit form at 2048 bits, seven times at 4096.
* `fma_multiply_four` makes four products at a time in double-precision fused multiply-adds (x86 AVX2 and FMA): 2.5
  times as fast as the 64-bit form at 2048 bits on an AMD EPYC of 2017 (Zen 1, which halves vectors).

The latter two are emitted only for processors that have the instructions. The time of a product depends on its size,
not on values; memory accesses are not constant in time.

*Fused multiply-adds.* A vector holds one 52-bit digit of each of four numbers, as doubles, which have 53 bits. Both
halves of a product of two digits are exact, in the usual rounding to nearest:

    high = a b + 2^104            its last 52 bits, read as an integer, count a b / 2^52, rounded to the nearest
    low  = a b + (c - high)       with c = 2^104 - 1.5 2^52: what the rounding left, minus 1.5 2^52

All sums here are exact: c - high is a multiple of 2^51 below 2^104, and -low lies in [2^52, 2^53], where neighbouring
doubles differ by one. So the bits of `high` are _HIGH + (rounded a b / 2^52), those of `low` are _LOW - (the signed
rest); they are added as integers, and what _HIGH and _LOW add up to is known beforehand and taken off at the start.

References: Gueron and Krasnov, Software Implementation of Modular Exponentiation, Using Advanced Vector Instructions
Architectures, WAIFI 2012 (digits smaller than the word, deferred carries). Emmart, Zheng, Weems, Faster Modular
Exponentiation Using Double Precision Floating Point Arithmetic on the GPU, ARITH 2018 (the halves).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from treaty.machine.kernels import processor_has

DIGIT_BITS = 52
LANES = 8  # 64-bit lanes of one 512-bit vector
VECTOR_COUNTS = (1, 2, 3, 4, 5, 8, 10, 15, 20)  # lengths with code of their own; 20 hold a modulus of 8318 bits
_LONGEST_PAIR = 5  # vectors; of longer numbers, two at once do not fit the processor's 32 vector registers
HEADER = 8  # words in front of the modulus in the array of constants, a multiple of LANES: see montgomery.Modulus

_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_VECTOR = ir.VectorType(_I64, LANES)
_MASK = (1 << DIGIT_BITS) - 1
GROUP = 4  # numbers at a time of fused multiply-adds: 64-bit lanes of one 256-bit vector
SCRATCH = 4 * GROUP  # words of scratch for each word of a number: sums, both factors, the modulus

HAS_IFMA, HAS_FMA = processor_has("avx512ifma", "avx512f"), processor_has("avx2", "fma")


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Low and high word of a * b + c + d, all uint64; the sum cannot exceed 128 bits."""
    word = types.uint64
    signature = types.UniTuple(word, 2)(word, word, word, word)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        a, b, c, d = (builder.zext(x, wide) for x in args)
        total = builder.add(builder.add(builder.mul(a, b), c), d)
        words = [builder.trunc(total, _I64), builder.trunc(builder.lshr(total, wide(64)), _I64)]
        return context.make_tuple(builder, signature.return_type, words)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def load_word(typing_context: Any, raw: Any, offset: Any) -> Any:
    """Eight bytes of a uint8 array as one uint64, at any alignment (views of a received message have none)."""
    signature = types.uint64(raw, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature, args, 0)
        return builder.load(builder.bitcast(builder.gep(data, [args[1]]), _I64.as_pointer()), align=1)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def unpack_digits(typing_context: Any, raw: Any, offset: Any, out: Any, o: Any) -> Any:
    """Write the 13 words at `raw[offset:]` as sixteen 52-bit digits at `out[o:]`; word 14 is read but not used."""
    signature = types.void(raw, types.intp, out, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, target = (_data(context, builder, signature, args, k) for k in (0, 2))
        target = builder.bitcast(builder.gep(target, [args[3]]), _VECTOR.as_pointer())
        for v, (word, bit) in enumerate([(0, 0), (6, 32)]):
            source = builder.gep(data, [builder.add(args[1], _I64(8 * word))])
            words = builder.load(builder.bitcast(source, _VECTOR.as_pointer()), align=1)
            bits = [bit + DIGIT_BITS * lane for lane in range(LANES)]
            right = ir.Constant(_VECTOR, [_I64(b % 64) for b in bits])
            # a shift by 64 is undefined: 63 instead, whose bit the mask removes
            left = ir.Constant(_VECTOR, [_I64(64 - b % 64 if b % 64 else 63) for b in bits])
            own = builder.shuffle_vector(words, words, _indices([b // 64 for b in bits]))
            above = builder.shuffle_vector(words, words, _indices([min(b // 64 + 1, LANES - 1) for b in bits]))
            digits = builder.or_(builder.lshr(own, right), builder.shl(above, left))
            digits = builder.and_(digits, _constant(_MASK))
            builder.store(digits, builder.gep(target, [_I64(v)]), align=8)
        return context.get_dummy_value()

    return signature, generate


# Numba passes the first parameter, `montgomery_kernels._multiply` the rest as it takes them.
@intrinsic  # type: ignore[untyped-decorator]
def ifma_multiply_pair(
    typing_context: Any, out: Any, o1: Any, o2: Any, a: Any, a1: Any, a2: Any, b: Any, b1: Any, b2: Any, m: Any
) -> Any:
    """Write a * b / R mod n, below 2 n, at `out[o1:]` and `out[o2:]`; inputs at a1, b1 and a2, b2.

    Each of a, b holds normalised 52-bit digits (zero above `digits`), with a * b < R n. `m` is the array of constants
    of `montgomery.Modulus`. All inputs are read before anything is written.
    """
    at = types.intp
    signature = types.void(out, at, at, a, at, at, b, at, at, m)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_IFMA:
            return context.get_dummy_value()
        places = [(0, 1), (3, 4), (6, 7), (0, 2), (3, 5), (6, 8)]  # of out, a, b for each number: array and offset
        arrays = [_data(context, builder, signature, args, k) for k in (0, 3, 6, 9)]
        pointers = [builder.gep(arrays[array // 3], [args[offset]]) for array, offset in places]
        call_emitted(builder, "treaty_ifma_multiply_pair", _emit_pair, [*pointers, arrays[3]])
        return context.get_dummy_value()

    return signature, generate


def _data(context: Any, builder: Any, signature: Any, args: Any, k: int) -> Any:
    """Return the address of argument k's first element."""
    return context.make_array(signature.args[k])(context, builder, args[k]).data


def call_emitted(builder: Any, name: str, emit: Any, args: list[Any]) -> None:
    """Call a function that `emit` writes into the module at the first call: else its code would stand at every call."""
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    if not function.blocks:
        function.linkage = "internal"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        emit(inner, *function.args)
        inner.ret_void()
    builder.call(function, args)


def _emit_pair(builder: Any, *pointers: Any) -> None:
    lanes, constants = [pointers[:3], pointers[3:6]], pointers[6]
    digits = builder.load(builder.gep(constants, [_I64(1)]))
    vectors = builder.load(builder.gep(constants, [_I64(5)]))
    end = builder.append_basic_block("end")
    switch = builder.switch(vectors, end)
    # code for each length instead of a loop over vectors, so that sums stay in registers
    for count in VECTOR_COUNTS:
        block = builder.append_basic_block(f"vectors{count}")
        switch.add_case(_I64(count), block)
        builder.position_at_end(block)
        if count <= _LONGEST_PAIR:
            totals = _emit_products(builder, count, lanes, constants, digits)
        else:
            totals = [_emit_products(builder, count, [lane], constants, digits)[0] for lane in lanes]
        for lane, total in zip(lanes, totals, strict=True):
            target = builder.bitcast(lane[0], _VECTOR.as_pointer())
            for v, digit in enumerate(_normalise(builder, total)):
                builder.store(digit, builder.gep(target, [_I64(v)]), align=8)
        builder.branch(end)
    builder.position_at_end(end)


def _emit_products(builder: Any, count: int, lanes: Any, constants: Any, digits: Any) -> list[list[Any]]:
    """Emit interleaved Montgomery products of `count` vectors, one digit b_i of b per turn; return uncarried sums.

    Invariant at the head of the loop: sums = (a (b_0 + ... + b_{i-1}) + n (...)) / 2^{52 i} + low halves of a b_i. The
    multiple m of n that clears the lowest digit depends on one multiply-add alone; high halves and the next low halves
    are summed apart from it in `side`. A sum takes 4 halves a turn for at most 160 turns: < 2^62.
    """
    low, high = (
        cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.x86.avx512.vpmadd52{half}.uq.512"
        )
        for half in "lh"
    )
    each = range(count)
    zero, lane0 = _constant(0), ir.Constant(ir.VectorType(_I1, LANES), [1] + [0] * (LANES - 1))
    one_down = _indices(range(1, LANES + 1))
    modulus = builder.bitcast(builder.gep(constants, [_I64(HEADER)]), _VECTOR.as_pointer())
    n = [_read(builder, modulus, _I64(v)) for v in each]
    inverse = _splat(builder, builder.load(constants))
    a = [[_read(builder, builder.bitcast(lane[1], _VECTOR.as_pointer()), _I64(v)) for v in each] for lane in lanes]
    first = [_splat(builder, builder.load(lane[2])) for lane in lanes]
    start = [[builder.call(low, [zero, a[k][v], first[k]]) for v in each] for k in range(len(lanes))]

    entry, loop, done = builder.block, builder.append_basic_block("digit"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    i = builder.phi(_I64)
    i.add_incoming(_I64(0), entry)
    heads = [([builder.phi(_VECTOR) for _ in each], builder.phi(_VECTOR)) for _ in lanes]
    following = builder.add(i, _I64(1))
    more = builder.icmp_unsigned("<", following, digits)
    i.add_incoming(following, loop)
    results = []
    for k, (lane, (sums, b)) in enumerate(zip(lanes, heads, strict=True)):
        b.add_incoming(first[k], entry)
        lowest = builder.call(low, [zero, sums[0], inverse])
        m = builder.shuffle_vector(lowest, lowest, _indices([0] * LANES))
        word = builder.load(builder.gep(lane[2], [builder.select(more, following, _I64(0))]))
        b_next = _splat(builder, builder.select(more, word, _I64(0)))
        total = []
        cleared = builder.call(low, [sums[0], n[0], m])
        carry = builder.select(lane0, builder.lshr(cleared, _constant(DIGIT_BITS)), zero)
        # lowest vector first: the next turn's m waits for it
        for v in each:
            above = builder.call(low, [sums[v + 1], n[v + 1], m]) if v + 1 < count else zero
            side = builder.call(high, [zero, a[k][v], b])
            side = builder.call(low, [side, a[k][v], b_next])
            side = builder.call(high, [side, n[v], m])
            side = side if v else builder.add(side, carry)
            total.append(builder.add(builder.shuffle_vector(cleared, above, one_down), side))
            cleared = above
        b.add_incoming(b_next, loop)
        for v in each:
            sums[v].add_incoming(start[k][v], entry)
            sums[v].add_incoming(total[v], loop)
        results.append(total)
    builder.cbranch(more, loop, done)
    builder.position_at_end(done)
    return results


def _normalise(builder: Any, sums: Any) -> list[Any]:
    """Apply the deferred carries: digits below 2^52 again, the top one's carry being zero by the bound 2 n."""
    mask, zero = _constant(_MASK), _constant(0)
    carries = [builder.lshr(x, _constant(DIGIT_BITS)) for x in sums]
    below = [zero, *carries[:-1]]
    one_up = _indices(range(LANES - 1, 2 * LANES - 1))
    digits = [
        builder.add(builder.and_(x, mask), builder.shuffle_vector(prev, own, one_up))
        for x, prev, own in zip(sums, below, carries, strict=True)
    ]
    # What is left is at most a carry of one per digit, rippling through digits that are all ones: one addition of two
    # bit sets, digits that overflow and digits that pass a carry on, makes the whole ripple.
    wide = ir.IntType(max(64, LANES * len(digits)))

    def bit_set(relation: str) -> Any:
        bits = wide(0)
        for v, digit in enumerate(digits):
            byte = builder.bitcast(builder.icmp_unsigned(relation, digit, mask), _I8)
            bits = builder.or_(bits, builder.shl(builder.zext(byte, wide), wide(LANES * v)))
        return bits

    overflow, passing = bit_set(">"), bit_set("==")
    ripple = builder.xor(builder.add(builder.add(overflow, overflow), passing), passing)
    for v, digit in enumerate(digits):
        byte = builder.trunc(builder.lshr(ripple, wide(LANES * v)), _I8)
        ones = builder.zext(builder.bitcast(byte, ir.VectorType(_I1, LANES)), _VECTOR)
        digits[v] = builder.and_(builder.add(digit, ones), mask)
    return digits


def _constant(value: float, kind: Any = _VECTOR) -> Any:
    """Return a vector with the same number in every lane."""
    return ir.Constant(kind, [kind.element(value)] * kind.count)


def _indices(lanes: Any) -> Any:
    return ir.Constant(ir.VectorType(_I32, LANES), list(lanes))


def _splat(builder: Any, word: Any, lanes: int = LANES) -> Any:
    """Return a vector with the same word in every lane."""
    undefined = ir.Constant(ir.VectorType(_I64, lanes), ir.Undefined)
    one = builder.insert_element(undefined, word, _I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


_WORDS, _DOUBLES = ir.VectorType(_I64, GROUP), ir.VectorType(ir.DoubleType(), GROUP)
_HIGH, _LOW = 0x4670 << 48, 0xC338 << 48  # the bits of 2^104 and of -1.5 2^52
_WHOLE = 0x4330 << 48  # the bits of 2^52


@intrinsic  # type: ignore[untyped-decorator]
def fma_multiply_four(
    typing_context: Any, out: Any, at: Any, a: Any, of_a: Any, b: Any, of_b: Any, m: Any, scratch: Any
) -> Any:
    """Write a * b / R mod n, below 2 n, at out[at[k]:] for four k; inputs at a[of_a[k]:] and b[of_b[k]:].

    Numbers and `m` are as in `ifma_multiply_pair`; `scratch` has SCRATCH words for each of a number.
    """
    signature = types.void(out, at, a, of_a, b, of_b, m, scratch)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if HAS_FMA:
            arrays = [_data(context, builder, signature, args, k) for k in range(8)]
            numbers = [
                builder.gep(arrays[k], [builder.load(builder.gep(arrays[k + 1], [_I64(lane)]))])
                for k in (0, 2, 4)
                for lane in range(GROUP)
            ]
            call_emitted(builder, "treaty_fma_multiply_four", _emit, [*numbers, *arrays[6:]])
        return context.get_dummy_value()

    return signature, generate


def _emit(builder: Any, *pointers: Any) -> None:
    """Emit the whole product, for pointers to four numbers of out, a and b each, the constants and scratch."""
    constants, scratch = pointers[3 * GROUP :]
    digits = builder.load(builder.gep(constants, [_I64(1)]))
    width = builder.shl(builder.load(builder.gep(constants, [_I64(5)])), _I64(3))
    # scratch: one vector per digit of the sums, of a and b, and of n, whose digits stand four times
    sums = builder.bitcast(scratch, _WORDS.as_pointer())
    a = builder.bitcast(builder.gep(sums, [width]), _DOUBLES.as_pointer())
    b = builder.gep(a, [width])
    n = builder.gep(b, [width])
    inverse = _double(builder, _splat(builder, builder.and_(builder.load(constants), _I64(_MASK)), GROUP))
    count = builder.and_(builder.add(digits, _I64(1)), _I64(-2))  # digits of a turn: an even number

    with _loop(builder, _I64(0), width, 4) as j:
        for numbers, target in ((pointers[GROUP : 2 * GROUP], a), (pointers[2 * GROUP : 3 * GROUP], b)):
            rows = [builder.bitcast(builder.gep(number, [j]), _WORDS.as_pointer()) for number in numbers]
            for k, column in enumerate(_transposed(builder, [builder.load(row, align=8) for row in rows])):
                _store(builder, _double(builder, column), target, builder.add(j, _I64(k)))
        for k in range(4):
            p = builder.add(j, _I64(k))
            digit = builder.load(builder.gep(constants, [builder.add(p, _I64(HEADER))]))
            _store(builder, _double(builder, _splat(builder, digit, GROUP)), n, p)
            lows, highs = (
                builder.select(builder.icmp_unsigned("<", x, digits), x, digits) for x in (builder.add(p, _I64(1)), p)
            )
            _store(builder, _taken_off(builder, lows, highs), sums, p)
    _emit_turns(builder, sums, a, b, n, inverse, digits, count)
    # the deferred carries: digits below 2^52 again, the last carry being zero by the bound 2 n
    carried = cgutils.alloca_once_value(builder, _constant(0, _WORDS))
    with _loop(builder, _I64(0), count, 1) as j:
        total = builder.add(_read(builder, sums, j), builder.load(carried))
        _store(builder, builder.and_(total, _constant(_MASK, _WORDS)), sums, j)
        builder.store(_shifted(builder, total), carried)
    with _loop(builder, count, width, 1) as j:
        _store(builder, _constant(0, _WORDS), sums, j)
    with _loop(builder, _I64(0), width, 4) as j:
        columns = [_read(builder, sums, builder.add(j, _I64(k))) for k in range(4)]
        for row, words in zip(pointers[:GROUP], _transposed(builder, columns), strict=True):
            builder.store(words, builder.bitcast(builder.gep(row, [j]), _WORDS.as_pointer()), align=8)


def _emit_turns(builder: Any, sums: Any, a: Any, b: Any, n: Any, inverse: Any, digits: Any, count: Any) -> None:
    """Emit, for each digit b_i: sums = (sums + a b_i + n q) / 2^52, with the q that makes this a whole number.

    The next turn's q takes a chain of a dozen instructions from this turn's lowest digit; it starts as soon as that
    digit is known, while the products of the higher digits are made.
    """
    lowest, high, q, carried = (cgutils.alloca_once(builder, kind) for kind in (_WORDS, _WORDS, _DOUBLES, _WORDS))
    mask, low_bits = _constant(_MASK, _WORDS), _constant(_LOW, _WORDS)

    def prepare(i: Any, digit: Any) -> None:
        """Emit the lowest digit of turn i, with a b_i added and without, and its q."""
        high_a, low = _halves(builder, _read(builder, a, _I64(0)), _read(builder, b, i))
        total = builder.sub(digit, low)
        # without _LOW, which the half that is to come will take off
        known = builder.and_(builder.sub(total, low_bits), mask)
        _, low = _halves(builder, _double(builder, known), inverse)
        builder.store(_double(builder, builder.and_(builder.sub(low_bits, low), mask)), q)
        builder.store(total, lowest)
        builder.store(high_a, high)

    def step(j: Any, digit: Any, factor: Any) -> Any:
        """Emit digit j of a turn; return it, for what is now one digit lower."""
        high_a, low_a = _halves(builder, _read(builder, a, j), digit, _read(builder, a_again, j))
        high_n, low_n = _halves(builder, _read(builder, n, j), factor, _read(builder, n_again, j))
        total = builder.add(_read(builder, sums, j), builder.load(carried))
        builder.store(builder.add(high_a, high_n), carried)
        return builder.sub(builder.sub(total, low_a), low_n)

    # Both fused multiply-adds overwrite an operand. The second one reads its digit from memory, by a pointer that the
    # compiler takes for another one; else it would copy a register, and this loop costs as many instructions as it has.
    a_again, n_again = (builder.asm(ir.FunctionType(of.type, [of.type]), "", "=r,0", [of], False) for of in (a, n))
    prepare(_I64(0), _read(builder, sums, _I64(0)))
    with _loop(builder, _I64(0), digits, 1) as i:
        own, factor = _read(builder, b, i), builder.load(q)
        high_n, low = _halves(builder, _read(builder, n, _I64(0)), factor)
        carry = _shifted(builder, builder.sub(builder.load(lowest), low))
        builder.store(builder.add(builder.add(builder.load(high), high_n), carry), carried)
        digit = step(_I64(1), own, factor)
        _store(builder, digit, sums, _I64(0))
        prepare(builder.add(i, _I64(1)), digit)
        with _loop(builder, _I64(2), count, 2) as j:
            for k in (j, builder.add(j, _I64(1))):
                _store(builder, step(k, own, factor), sums, builder.sub(k, _I64(1)))
        left = builder.sub(digits, i)  # turns, this one with them, that add a high half to the new highest digit
        owed = _taken_off(builder, builder.sub(left, _I64(1)), left)
        _store(builder, builder.add(builder.load(carried), owed), sums, builder.sub(count, _I64(1)))


def _halves(builder: Any, a: Any, b: Any, again: Any = None) -> tuple[Any, Any]:
    """Return the bits of both halves of products of digits (module docstring); `again` is `a` once more."""
    kind = ir.FunctionType(_DOUBLES, [_DOUBLES] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{GROUP}f64")
    high = builder.call(fma, [a, b, _constant(2.0**104, _DOUBLES)])
    low = builder.call(fma, [again or a, b, builder.fsub(_constant(2.0**104 - 1.5 * 2.0**52, _DOUBLES), high)])
    return builder.bitcast(high, _WORDS), builder.bitcast(low, _WORDS)


def _taken_off(builder: Any, lows: Any, highs: Any) -> Any:
    """Return the initial value of a sum that so many `lows` and `highs` of both products are added to."""
    both = builder.sub(builder.mul(lows, _I64(2 * _LOW % 2**64)), builder.mul(highs, _I64(2 * _HIGH % 2**64)))
    return _splat(builder, both, GROUP)


def _shifted(builder: Any, total: Any) -> Any:
    """Return signed sums divided by 2^52, rounded down."""
    # 2^62 makes them positive, as AVX2 has no shift that keeps signs
    positive = builder.add(total, _constant(1 << 62, _WORDS))
    return builder.sub(builder.lshr(positive, _constant(DIGIT_BITS, _WORDS)), _constant(1 << 62 - DIGIT_BITS, _WORDS))


def _double(builder: Any, digits: Any) -> Any:
    """Return digits below 2^52 as doubles."""
    # a digit in the last bits of 2^52 is 2^52 + the digit
    whole = builder.bitcast(builder.or_(digits, _constant(_WHOLE, _WORDS)), _DOUBLES)
    return builder.fsub(whole, _constant(2.0**52, _DOUBLES))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Exchange rows and columns of four vectors of four words: single words first, then pairs of them."""
    quarters = ir.VectorType(_I32, GROUP)
    mix = [ir.Constant(quarters, x) for x in ([0, 4, 2, 6], [1, 5, 3, 7], [0, 1, 4, 5], [2, 3, 6, 7])]
    first, last = ([builder.shuffle_vector(*two, lanes) for lanes in mix[:2]] for two in (rows[:2], rows[2:]))
    return [builder.shuffle_vector(x, y, lanes) for lanes in mix[2:] for x, y in zip(first, last, strict=True)]


def _read(builder: Any, vectors: Any, j: Any) -> Any:
    return builder.load(builder.gep(vectors, [j]), align=8)


def _store(builder: Any, vector: Any, vectors: Any, j: Any) -> None:
    builder.store(vector, builder.gep(vectors, [j]), align=8)


@contextmanager
def _loop(builder: Any, start: Any, stop: Any, step: int) -> Iterator[Any]:
    with cgutils.for_range_slice(builder, start, stop, _I64(step), intp=_I64) as (index, _):
        yield index
