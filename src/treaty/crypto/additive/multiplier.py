"""Machine-level products behind `montgomery`: what numba's own integers cannot express.

Two numba intrinsics, both emitted as LLVM code into the kernel that calls them:

* `multiply_add` is the 64 x 64 + 64 + 64 -> 128 bit step of school-book arithmetic. It runs everywhere.
* `ifma_multiply_pair` is a whole Montgomery product, twice, in vectors of eight 52-bit digits (x86 AVX-512 IFMA).
  One product of up to 2000 bits waits on its own carries for most of its cycles, so that two interleaved ones take
  hardly longer than one; longer ones are busy enough and follow each other. About twelve times as fast as the 64-bit
  form at 2048 bits, seven times at 4096. It is emitted only when numba compiles for a processor that has the
  instructions.

Memory accesses are not constant in time. Products of one size take the same time whatever the values are.

References: Montgomery, Modular Multiplication Without Trial Division, Math. Comp. 44, 1985. Gueron and Krasnov,
Software Implementation of Modular Exponentiation, Using Advanced Vector Instructions Architectures, WAIFI 2012 (digits
smaller than the word, carries deferred to the end).
"""

from __future__ import annotations

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


HAS_IFMA = processor_has("avx512ifma", "avx512f")


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
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.bitcast(builder.gep(data, [args[1]]), _I64.as_pointer()), align=1)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def unpack_digits(typing_context: Any, raw: Any, offset: Any, out: Any, o: Any) -> Any:
    """Write the 13 words at `raw[offset:]` as sixteen 52-bit digits at `out[o:]`; word 14 is read but not used."""
    signature = types.void(raw, types.intp, out, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        target = context.make_array(signature.args[2])(context, builder, args[2]).data
        target = builder.bitcast(builder.gep(target, [args[3]]), _VECTOR.as_pointer())
        for v, (word, bit) in enumerate([(0, 0), (6, 32)]):
            source = builder.gep(data, [builder.add(args[1], _I64(8 * word))])
            words = builder.load(builder.bitcast(source, _VECTOR.as_pointer()), align=1)
            bits = [bit + DIGIT_BITS * lane for lane in range(LANES)]
            right = ir.Constant(_VECTOR, [_I64(b % 64) for b in bits])
            left = ir.Constant(_VECTOR, [_I64(64 - b % 64 if b % 64 else 63) for b in bits])  # 63: masked away
            own = builder.shuffle_vector(words, words, _indices([b // 64 for b in bits]))
            above = builder.shuffle_vector(words, words, _indices([min(b // 64 + 1, LANES - 1) for b in bits]))
            digits = builder.or_(builder.lshr(own, right), builder.shl(above, left))
            digits = builder.and_(digits, _constant((1 << DIGIT_BITS) - 1))
            builder.store(digits, builder.gep(target, [_I64(v)]), align=8)
        return context.get_dummy_value()

    return signature, generate


# Eleven parameters: numba passes the first, and `montgomery_kernels._multiply_pair` the rest as it takes them.
@intrinsic  # type: ignore[untyped-decorator]
def ifma_multiply_pair(
    typing_context: Any, out: Any, o1: Any, o2: Any, a: Any, a1: Any, a2: Any, b: Any, b1: Any, b2: Any, m: Any
) -> Any:
    """Write a * b / R mod n, below 2 n, at `out[o1:]` and `out[o2:]`; inputs at a1, b1 and a2, b2.

    Each of a, b holds normalised 52-bit digits (zero above `digits`), with a * b < R n. `m` is the array
    of constants of `montgomery.Modulus`. All inputs are read before anything is written.
    """
    at = types.intp
    signature = types.void(out, at, at, a, at, at, b, at, at, m)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_IFMA:
            return context.get_dummy_value()

        places = [(0, 1), (3, 4), (6, 7), (0, 2), (3, 5), (6, 8)]  # of out, a, b for each number: array and offset
        arrays = [pointer_to(context, builder, signature, args, k) for k in (0, 3, 6, 9)]
        pointers = [builder.gep(arrays[array // 3], [args[offset]]) for array, offset in places]
        call_emitted(builder, "treaty_ifma_multiply_pair", _emit_pair, [*pointers, arrays[3]])
        return context.get_dummy_value()

    return signature, generate


def pointer_to(context: Any, builder: Any, signature: Any, args: Any, k: int) -> Any:
    """Return the pointer to the first item of argument k, an array."""
    return context.make_array(signature.args[k])(context, builder, args[k]).data


def call_emitted(builder: Any, name: str, emit: Any, args: list[Any]) -> None:
    """Call a function of machine code that `emit` writes into the module when it is first called.

    What is called so often is long, and would else stand, and be compiled, wherever it is called.
    """
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
    for count in VECTOR_COUNTS:  # not a loop over vectors, so that sums stay in registers
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
    gather beside it in `side`. A sum takes 4 halves a turn for at most 160 turns: < 2^62.
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
    n = [_load(builder, builder.gep(constants, [_I64(HEADER)]), v) for v in each]
    inverse = _splat(builder, builder.load(constants))
    a = [[_load(builder, lane[1], v) for v in each] for lane in lanes]
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
        for v in each:  # lowest first: the next turn's m waits for it
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
    mask, zero = _constant((1 << DIGIT_BITS) - 1), _constant(0)
    carries = [builder.lshr(x, _constant(DIGIT_BITS)) for x in sums]
    below = [zero, *carries[:-1]]
    one_up = _indices(range(LANES - 1, 2 * LANES - 1))
    digits = [
        builder.add(builder.and_(x, mask), builder.shuffle_vector(prev, own, one_up))
        for x, prev, own in zip(sums, below, carries, strict=True)
    ]
    # What is left is at most a one per digit, rippling through digits that are all ones: an addition of the
    # two bit sets does the whole ripple (digits that overflow, digits that pass a carry on).
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


def _constant(value: int) -> Any:
    return ir.Constant(_VECTOR, [_I64(value)] * LANES)


def _indices(lanes: Any) -> Any:
    return ir.Constant(ir.VectorType(_I32, LANES), list(lanes))


def _splat(builder: Any, word: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, word, _I32(0)), undefined, _indices([0] * LANES))


def _load(builder: Any, pointer: Any, v: int) -> Any:
    return builder.load(builder.gep(builder.bitcast(pointer, _VECTOR.as_pointer()), [_I64(v)]), align=8)
