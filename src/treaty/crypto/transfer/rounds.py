"""AES-128 by the processor's own instructions, as LLVM code in the kernels that call it.

Thirty-two blocks at a time, so that the rounds of one do not wait for each other: in vectors of four blocks, or of two
without AVX-512, where the processor has VAES, one by one where it has AES-NI alone. What is encrypted, and the keys,
change neither the instructions that run nor the memory they read. Without these instructions `HAS_AES` is False, and
nothing is emitted.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from treaty.compute import processor_has

BLOCKS = 32
"""Blocks of 16 bytes that `encrypt` takes at once."""

KEY_WORDS = 22
"""Words of 64 bits of a key, expanded: eleven round keys."""

_ROUNDS, _AT_ONCE = 10, 8  # vectors in flight
_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_BLOCK, _QUARTERS = ir.VectorType(_I64, 2), ir.VectorType(_I32, 4)


HAS_AES = processor_has("aes")
_LANES = 2 if not processor_has("vaes", "avx2") else 8 if processor_has("avx512f") else 4


@intrinsic  # type: ignore[untyped-decorator]
def encrypt(typing_context: Any, keys: Any, k: Any, blocks: Any, at: Any) -> Any:
    """Encrypt the 64 words at `blocks[at:]` in place under the expanded key at `keys[k:]`; both uint64 arrays."""
    signature = types.void(keys, types.intp, blocks, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_AES:
            return context.get_dummy_value()
        vector = ir.VectorType(_I64, _LANES)
        whole = ir.FunctionType(vector, [vector, vector])
        suffix = {2: "", 4: ".256", 8: ".512"}[_LANES]
        middle, last = (
            builder.module.declare_intrinsic(f"llvm.x86.aesni.{name}{suffix}", (), whole)
            for name in ("aesenc", "aesenclast")
        )
        lanes = ir.Constant(ir.VectorType(_I32, _LANES), [lane % 2 for lane in range(_LANES)])
        round_keys = []
        for number in range(_ROUNDS + 1):
            one = builder.load(_pointer(context, builder, signature, args, 0, 2 * number, _BLOCK), align=8)
            round_keys.append(builder.shuffle_vector(one, one, lanes))
        for first in range(0, 2 * BLOCKS, _AT_ONCE * _LANES):
            places = [
                _pointer(context, builder, signature, args, 2, first + _LANES * k, vector) for k in range(_AT_ONCE)
            ]
            states = [builder.xor(builder.load(place, align=8), round_keys[0]) for place in places]
            for number in range(1, _ROUNDS + 1):
                function = last if number == _ROUNDS else middle
                states = [builder.call(function, [state, round_keys[number]]) for state in states]
            for state, place in zip(states, places, strict=True):
                builder.store(state, place, align=8)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def expand(typing_context: Any, key: Any, at: Any, out: Any, o: Any) -> Any:
    """Write the round keys of the key of two words at `key[at:]` to `out[o:]`, 22 words; FIPS 197, section 5.2."""
    signature = types.void(key, types.intp, out, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_AES:
            return context.get_dummy_value()
        assist = builder.module.declare_intrinsic(
            "llvm.x86.aesni.aeskeygenassist", (), ir.FunctionType(_BLOCK, [_BLOCK, _I8])
        )
        zero = ir.Constant(_QUARTERS, [0] * 4)
        state = builder.load(_pointer(context, builder, signature, args, 0, 0, _BLOCK), align=8)
        constant = 1
        for number in range(_ROUNDS + 1):
            builder.store(state, _pointer(context, builder, signature, args, 2, 2 * number, _BLOCK), align=8)
            word = builder.bitcast(builder.call(assist, [state, _I8(constant)]), _QUARTERS)
            word = builder.shuffle_vector(word, word, ir.Constant(_QUARTERS, [3] * 4))
            parts = builder.bitcast(state, _QUARTERS)
            for _ in range(3):  # each word and all those below it
                moved = builder.shuffle_vector(zero, parts, ir.Constant(_QUARTERS, [0, 4, 5, 6]))
                parts = builder.xor(builder.bitcast(state, _QUARTERS), moved)
            state = builder.bitcast(builder.xor(parts, word), _BLOCK)
            constant = (constant << 1) ^ (0x11B if constant & 0x80 else 0)
        return context.get_dummy_value()

    return signature, generate


def _pointer(context: Any, builder: Any, signature: Any, args: Any, array: int, offset: int, kind: Any) -> Any:
    """Return where an array argument, its offset in the next argument, has a value of this kind."""
    data = context.make_array(signature.args[array])(context, builder, args[array]).data
    place = builder.gep(data, [builder.add(args[array + 1], _I64(offset))])
    return builder.bitcast(place, kind.as_pointer())
