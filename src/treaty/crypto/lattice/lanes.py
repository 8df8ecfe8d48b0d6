"""Vector steps of the number-theoretic transform, as LLVM code: what numba's own loops would not vectorise.

Numbers are residues modulo a prime q < 2^31 in 32-bit words, sixteen to a vector; LLVM cuts vectors to what the
processor has, and integer arithmetic gives the same bits on all. A factor w comes with its Shoup quotient
w' = floor(w 2^32 / q), so that y w - floor(y w' / 2^32) q lies in [0, 2 q) for any y < 2^32.

References: Harvey, Faster arithmetic for number-theoretic transforms, J. Symb. Comput. 60, 2014.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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
