"""AES over whole arrays: key streams of many seeds, and a hash that keeps pairs of rows with a secret difference apart.

The hash is TMMO of Guo, Katz, Wang, Yu, "Efficient and Secure Multiparty Computation from Fixed-Key Block Ciphers",
IEEE S&P 2020: H(x, i) = pi(pi(x) xor i) xor pi(x), where pi is AES-128 under a public key. With pi as a random
permutation it is tweakable circular correlation robust: for a secret Delta the values at x xor Delta look independent
and uniform to a party that knows x.

An attacker that computes pi of p blocks finds Delta among q hashes under one key with a probability of about p q /
2^128: a guess of z = pi(x) xor i is compared with all of them, as H(x, i) xor i = z xor pi(z). So 128 - k bits are left
after 2^k hashes, and each extension has a key of its own, or one computation would serve against all.

If the processor has instructions for AES, kernels use them, without the interpreter lock; else OpenSSL encrypts, with
the same result. Thirty-two blocks are encrypted at a time, so that the rounds of one do not wait for each other: in
vectors of four blocks, or of two without AVX-512, if the processor has VAES, one by one with AES-NI alone. Neither
instructions nor memory accesses depend on what is encrypted or on keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from treaty.machine.arrays import Words
from treaty.machine.kernels import kernel, processor_has
from treaty.machine.shared_work import share

BLOCKS = 32  # of 16 bytes, that `encrypt` takes at once
KEY_WORDS = 22  # of 64 bits, of a key expanded: eleven round keys

_ROUNDS, _AT_ONCE = 10, 8  # vectors in flight
_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_BLOCK, _QUARTERS = ir.VectorType(_I64, 2), ir.VectorType(_I32, 4)


# ARM's processors have a feature of this name, too, and other instructions
HAS_AES = processor_has("aes", "sse2")
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
        # the same round key in every lane of two words
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
            # each word becomes the xor of itself and all below it, and of the schedule's word
            for _ in range(3):
                moved = builder.shuffle_vector(zero, parts, ir.Constant(_QUARTERS, [0, 4, 5, 6]))
                parts = builder.xor(builder.bitcast(state, _QUARTERS), moved)
            state = builder.bitcast(builder.xor(parts, word), _BLOCK)
            constant = (constant << 1) ^ (0x11B if constant & 0x80 else 0)
        return context.get_dummy_value()

    return signature, generate


def _pointer(context: Any, builder: Any, signature: Any, args: Any, array: int, offset: int, kind: Any) -> Any:
    data = context.make_array(signature.args[array])(context, builder, args[array]).data
    place = builder.gep(data, [builder.add(args[array + 1], _I64(offset))])
    return builder.bitcast(place, kind.as_pointer())


_PIECE = 1 << 12  # blocks at a time, 64 kB, which fit a core's own cache
_SPARE = 15  # bytes that `update_into` needs beyond what it writes
_LEAST = 16  # streams worth a thread of their own


class Streams:
    """Key streams of AES-128 under seeds, uint8 (n, 16), from block `first` on; a seed makes no block twice."""

    def __init__(self, seeds: NDArray[np.uint8], first: int = 0) -> None:
        self._count, self._blocks = len(seeds), first
        self._keys = _expanded(seeds) if HAS_AES else np.empty(0, np.uint64)
        self._portable = [] if HAS_AES else [
            Cipher(algorithms.AES(seed.tobytes()), modes.CTR(first.to_bytes(16, "big"))).encryptor() for seed in seeds
        ]  # fmt: skip

    def next_words(self, words: int, threads: int = 1) -> Words:
        """Return the next words of every stream, an even number of them, uint64 (n, words)."""
        assert words % 2 == 0
        if HAS_AES:
            out, first = np.empty((self._count, words), np.uint64), self._blocks
            share(lambda a, b: _count(self._keys, first, a, b, out), self._count, threads, _LEAST)
            self._blocks += words // 2
            return out
        # zeros encrypted in OpenSSL's counter mode are the same blocks
        length = 8 * words
        zeros, raw = bytes(length), np.empty(self._count * length + _SPARE, np.uint8)
        for number, each in enumerate(self._portable):
            each.update_into(zeros, raw[number * length : (number + 1) * length + _SPARE].data)
        return raw[: self._count * length].view("<u8").astype(np.uint64, copy=False).reshape(self._count, words)


def permuted(key: bytes, rows: Words) -> Words:
    """Apply AES under a key of 16 bytes to every row, uint64 (..., 2)."""
    return _permute(_permutation(key), rows)


class Hash:
    """The hash under a key of 16 bytes, which may be public; rows are uint64 (n, 2).

    Row k and block j have tweak (first + k, j). `first` is the number of the first row under one Delta: no tweak may
    come twice, as rows could be equal.
    """

    def __init__(self, key: bytes) -> None:
        self._keys = _expanded(np.frombuffer(key, np.uint8)[None]) if HAS_AES else np.empty(0, np.uint64)
        self._permutation = _permutation(key)

    def rows(self, rows: Words, first: int, blocks: int = 1, offset: Words | None = None) -> Words:
        """Hash rows, each xor the `offset`, (2,), to `blocks` blocks of 128 bits, uint64 (n, 2 * blocks)."""
        out, moved = np.empty((len(rows), blocks, 2), np.uint64), np.zeros(2, np.uint64) if offset is None else offset
        if HAS_AES:
            _hash(self._keys, np.ascontiguousarray(rows), moved, first, out)
            return out.reshape(len(rows), 2 * blocks)
        at_a_time = max(1, _PIECE // blocks)
        for start in range(0, len(rows), at_a_time):
            inner = _permute(self._permutation, rows[start : start + at_a_time] ^ moved)
            tweaks = np.empty((len(inner), blocks, 2), np.uint64)
            tweaks[..., 0] = np.arange(first + start, first + start + len(inner), dtype=np.uint64)[:, None]
            tweaks[..., 1] = np.arange(blocks, dtype=np.uint64)
            out[start : start + at_a_time] = _permute(self._permutation, inner[:, None] ^ tweaks) ^ inner[:, None]
        return out.reshape(len(rows), 2 * blocks)

    def low_bits(self, rows: Words, first: int, offsets: Words, width: int) -> NDArray[np.uint32]:
        """Return the lowest bits of each row's hashes under several offsets, uint32 (n,).

        Each hash gives `width` bits; those of the first offset are the lowest. `offsets` are uint64 (k, 2), with
        k * width at most 32.
        """
        out = np.zeros(len(rows), np.uint32)
        if HAS_AES:
            _hash_bits(self._keys, np.ascontiguousarray(rows), offsets, first, width, out)
            return out
        for number, offset in enumerate(offsets):
            low = self.rows(rows, first, offset=offset)[:, 0].astype(np.uint32) & np.uint32((1 << width) - 1)
            out |= low << np.uint32(width * number)
        return out


@kernel
def _expand_all(seeds: Words, keys: Words) -> None:
    for number in range(seeds.size // 2):
        expand(seeds, 2 * number, keys, KEY_WORDS * number)


def _expanded(seeds: NDArray[np.uint8]) -> Words:
    """Return the round keys of keys, uint8 (n, 16), uint64 (n * KEY_WORDS,)."""
    keys = np.empty(len(seeds) * KEY_WORDS, np.uint64)
    _expand_all(np.frombuffer(seeds.tobytes(), np.uint64), keys)
    return keys


@kernel
def _count(keys: Words, first: int, start: int, stop: int, out: Words) -> None:
    """Write blocks from number `first` on of streams [start, stop): the number, big-endian, encrypted."""
    words, flat = out.shape[1], out.reshape(out.size)
    whole = words - words % (2 * BLOCKS)
    # the same numbers for every stream: made once, and encrypted in place
    numbers, rest = np.zeros(whole + 2 * BLOCKS, np.uint64), np.empty(2 * BLOCKS, np.uint64)
    eight, sixteen, half = np.uint64(8), np.uint64(16), np.uint64(32)
    bytes_, pairs = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
    for k in range(numbers.size // 2):
        number = np.uint64(first + k)
        # reverse the bytes, by halves
        number = ((number & bytes_) << eight) | ((number >> eight) & bytes_)
        number = ((number & pairs) << sixteen) | ((number >> sixteen) & pairs)
        numbers[2 * k + 1] = (number << half) | (number >> half)
    for stream in range(start, stop):
        for at in range(whole):
            flat[stream * words + at] = numbers[at]
        for at in range(0, whole, 2 * BLOCKS):
            encrypt(keys, KEY_WORDS * stream, flat, stream * words + at)
        if whole < words:
            for k in range(2 * BLOCKS):
                rest[k] = numbers[whole + k]
            encrypt(keys, KEY_WORDS * stream, rest, 0)
            for at in range(whole, words):
                flat[stream * words + at] = rest[at - whole]


@kernel
def _hash(keys: Words, rows: Words, offset: Words, first: int, out: Words) -> None:
    inner, outer = np.zeros(2 * BLOCKS, np.uint64), np.zeros(2 * BLOCKS, np.uint64)
    for start in range(0, rows.shape[0], BLOCKS):
        count = min(BLOCKS, rows.shape[0] - start)
        for k in range(count):
            inner[2 * k], inner[2 * k + 1] = rows[start + k, 0] ^ offset[0], rows[start + k, 1] ^ offset[1]
        # pi(x), which all blocks of a row share
        encrypt(keys, 0, inner, 0)
        for block in range(out.shape[1]):
            for k in range(count):
                outer[2 * k] = inner[2 * k] ^ np.uint64(first + start + k)
                outer[2 * k + 1] = inner[2 * k + 1] ^ np.uint64(block)
            # H(x, i) = pi(pi(x) xor i) xor pi(x)
            encrypt(keys, 0, outer, 0)
            for k in range(count):
                out[start + k, block, 0] = outer[2 * k] ^ inner[2 * k]
                out[start + k, block, 1] = outer[2 * k + 1] ^ inner[2 * k + 1]


@kernel
def _hash_bits(keys: Words, rows: Words, offsets: Words, first: int, width: int, out: NDArray[np.uint32]) -> None:
    inner, outer = np.zeros(2 * BLOCKS, np.uint64), np.zeros(2 * BLOCKS, np.uint64)
    low = np.uint64((1 << width) - 1)
    for start in range(0, rows.shape[0], BLOCKS):
        count = min(BLOCKS, rows.shape[0] - start)
        for number in range(offsets.shape[0]):
            for k in range(count):
                inner[2 * k] = rows[start + k, 0] ^ offsets[number, 0]
                inner[2 * k + 1] = rows[start + k, 1] ^ offsets[number, 1]
            encrypt(keys, 0, inner, 0)
            for k in range(count):
                outer[2 * k], outer[2 * k + 1] = inner[2 * k] ^ np.uint64(first + start + k), inner[2 * k + 1]
            encrypt(keys, 0, outer, 0)
            for k in range(count):
                out[start + k] |= np.uint32(((outer[2 * k] ^ inner[2 * k]) & low) << np.uint64(width * number))


def _permutation(key: bytes) -> Any:
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - a permutation of blocks, no cipher


def _permute(permutation: Any, rows: Words) -> Words:
    data = np.ascontiguousarray(rows).astype("<u8", copy=False).reshape(-1).view(np.uint8)
    out = np.empty(data.nbytes + _SPARE, np.uint8)
    permutation.update_into(data.data, out.data)
    return out[: data.nbytes].view("<u8").astype(np.uint64, copy=False).reshape(rows.shape)
