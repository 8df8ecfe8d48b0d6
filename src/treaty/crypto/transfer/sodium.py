"""Hashes and the group ristretto255 on many elements at a time, by libsodium, without the interpreter lock.

Kernels call the library's functions by address; the `rbcl` wheel contains it. A Python loop over `ctypes` would be
nearly as fast on one thread, but takes the interpreter lock after each call.

Strings are one array of bytes and the offsets between them, as in Arrow: string i is ``data[offsets[i]:offsets[i+1]]``.
Points and scalars (RFC 9496) are rows of 32 bytes in their standard encoding. The group has prime order, so a point
that decodes and is not the identity generates all of it: there are no points of small order to refuse.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from treaty.errors import CryptoError
from treaty.machine.arrays import Integers
from treaty.machine.kernels import kernel
from treaty.machine.shared_work import share

Strings = tuple[NDArray[np.uint8], Integers, Integers]  # bytes, offsets, and the rows that count

POINT, SCALAR, UNIFORM, DIGEST = 32, 32, 64, 16
_BLOCK = 128  # bytes that SHA-512 takes in at a time


@cache
def address(function: str) -> int:
    """Return the address of a function of libsodium."""
    return int(ctypes.cast(getattr(_library(), function), ctypes.c_void_p).value or 0)


@cache
def _library() -> ctypes.CDLL:
    from rbcl._sodium import _sodium as library  # type: ignore[import-untyped]  # initialises libsodium, too

    # the wheel unpacks its library into a temporary file at every import and leaves three megabytes a process there;
    # once loaded the file is not needed (Windows keeps it locked)
    if Path(library._name).parent == Path(tempfile.gettempdir()):
        with suppress(OSError):
            os.unlink(library._name)
    return library  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing_context: Any, function: Any, arguments: Any) -> Any:
    """Call the C function at an address with a tuple of integers and pointers; return its int."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(32), [word] * signature.args[1].count)
        pointer = builder.inttoptr(values[0], kind.as_pointer())
        return builder.call(pointer, cgutils.unpack_tuple(builder, values[1]))

    return types.int32(types.int64, types.UniTuple(types.int64, arguments.count)), generate


@kernel
def combine_each(
    function: int, left: NDArray[np.uint8], right: NDArray[np.uint8], out: NDArray[np.uint8], start: int, stop: int
) -> int:
    """Combine rows [start, stop) of two arrays, (n, 32) or one for all, (1, 32); return how many were refused."""
    of_left, of_right = 32 * (left.shape[0] > 1), 32 * (right.shape[0] > 1)
    # libsodium refuses products that are the identity, and invalid points
    refused = 0
    for row in range(start, stop):
        one, other = left.ctypes.data + of_left * row, right.ctypes.data + of_right * row
        if _call(function, (out.ctypes.data + 32 * row, one, other)) != 0:
            refused += 1
    return refused


@kernel
def validate_each(function: int, points: NDArray[np.uint8], start: int, stop: int) -> int:
    refused = 0
    for row in range(start, stop):
        # libsodium accepts the identity, whose encoding is all zeros
        identity = True
        for k in range(32):
            identity = identity and points[row, k] == 0
        if identity or _call(function, (points.ctypes.data + 32 * row,)) != 1:
            refused += 1
    return refused


@kernel
def map_each(function: int, uniform: NDArray[np.uint8], out: NDArray[np.uint8], start: int, stop: int) -> None:
    for row in range(start, stop):
        _call(function, (out.ctypes.data + 32 * row, uniform.ctypes.data + 64 * row))


@kernel
def digest_each(
    function: int, strings: Strings, key: NDArray[np.uint8], out: NDArray[np.uint8], start: int, stop: int
) -> None:
    (data, offsets, rows), size = strings, out.shape[1]
    for k in range(start, stop):
        begin = offsets[rows[k]]
        found, length = out.ctypes.data + size * k, offsets[rows[k] + 1] - begin
        _call(function, (found, size, data.ctypes.data + begin, length, key.ctypes.data, key.shape[0]))


NODES = 256  # parts of a set with a commitment each: after a change, one of them differs

_LEAST_STRINGS = 1024  # strings worth a thread of their own


def expand(data: NDArray[np.uint8], offsets: Integers, rows: Integers, domain: bytes) -> NDArray[np.uint8]:
    """Expand strings `rows` to 64 uniform bytes each, uint8 (n, 64): expand_message_xmd with SHA-512 (RFC 9380, 5.3.1).

    `domain` is the domain separation tag, 1 to 255 bytes.
    """
    if not 1 <= len(domain) <= 255:
        raise CryptoError(f"expected a domain separation tag of 1 to 255 bytes, got {len(domain)}")
    # of points, which take some forty times as long, there are as many: one thread hashes for all
    prime, padding = domain + bytes([len(domain)]), hashlib.sha512(bytes(_BLOCK))
    strings, uniform = data.data, []
    for start, stop in zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True):
        # b_0 = H(Z_pad || msg || l_i_b_str || 0 || DST_prime), and b_1 = H(b_0 || 1 || DST_prime)
        first = padding.copy()
        first.update(strings[start:stop])
        first.update(UNIFORM.to_bytes(2, "big") + b"\0" + prime)
        uniform.append(hashlib.sha512(first.digest() + b"\1" + prime).digest())
    return np.frombuffer(b"".join(uniform), np.uint8).reshape(-1, UNIFORM)


def digests(
    data: NDArray[np.uint8], offsets: Integers, rows: Integers, key: bytes, threads: int = 1
) -> NDArray[np.uint64]:
    """Hash strings `rows` with BLAKE2b under a 32-byte key (RFC 7693), a pseudorandom function: uint64 (n, 2)."""
    if len(key) != 32:
        raise CryptoError(f"expected a key of 32 bytes, got {len(key)}")
    return _digests((data, offsets, rows), np.frombuffer(key, np.uint8).copy(), DIGEST, threads)


def row_digests(rows: NDArray[np.uint64], words: int, threads: int = 1) -> NDArray[np.uint64]:
    """Hash rows, uint64 (n, w), with BLAKE2b (RFC 7693) to so many words each, uint64 (n, words)."""
    data, numbers = np.ascontiguousarray(rows, "<u8").view(np.uint8), np.arange(len(rows) + 1)
    strings = data.reshape(-1), data.shape[1] * numbers, numbers[:-1]
    return _digests(strings, np.empty(0, np.uint8), 8 * words, threads)


def _digests(strings: Strings, key: NDArray[np.uint8], size: int, threads: int) -> NDArray[np.uint64]:
    out, function = np.empty((len(strings[2]), size), np.uint8), address("crypto_generichash")
    share(lambda a, b: digest_each(function, strings, key, out, a, b), len(out), threads, _LEAST_STRINGS)
    return out.view("<u8").astype(np.uint64, copy=False)


def commit(leaves: NDArray[np.uint64], key: bytes) -> NDArray[np.uint8]:
    """Commit to a set of members with these `digests`, (n, 2): a Merkle tree's nodes over them, uint8 (NODES, 32).

    The key, the same as of the digests, stays secret and is kept: commitments under different keys cannot be compared.
    Under one key, equal nodes mean equal members. Without the key a commitment reveals nothing else, except how many
    nodes are empty in two small sets. The key and the members open it.
    """
    # a member belongs to node leaf[0] % NODES; a node is HMAC-SHA256 of its number and its sorted leaves
    node = (leaves[:, 0] % np.uint64(NODES)).astype(np.int64)
    order = np.lexsort((leaves[:, 1], leaves[:, 0], node))
    ends = np.cumsum(np.bincount(node, minlength=NODES))
    out = np.empty((NODES, 32), np.uint8)
    start = 0
    for number, end in enumerate(ends):
        members = leaves[order[start:end]].astype("<u8").tobytes()
        mac = hmac.digest(key, b"treaty set node" + bytes([number]) + members, hashlib.sha256)
        out[number] = np.frombuffer(mac, np.uint8)
        start = end
    return out


GENERATOR = np.frombuffer(bytes.fromhex("e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76"), np.uint8)
ORDER = 2**252 + 27742317777372353535851937790883648493
_LEAST_POINTS = 64  # points worth a thread of their own


def random_scalar() -> NDArray[np.uint8]:
    """Draw a secret key: uniform in [1, ORDER), uint8 (32,), little-endian."""
    number = 1 + secrets.randbelow(ORDER - 1)
    return np.frombuffer(number.to_bytes(SCALAR, "little"), np.uint8)


def multiply(points: NDArray[np.uint8], scalar: NDArray[np.uint8], threads: int = 1) -> NDArray[np.uint8]:
    """Multiply every point, uint8 (n, 32), by one scalar (in the notation of the papers: raise it to that power).

    The scalar is little-endian, in [1, ORDER); running time does not depend on it. CryptoError counts points that are
    the identity or no canonical encoding of a point of the group.
    """
    return _combined("crypto_scalarmult_ristretto255", scalar[None], points, threads)


def multiples(point: NDArray[np.uint8], scalars: NDArray[np.uint8], threads: int = 1) -> NDArray[np.uint8]:
    """Multiply one point, uint8 (32,), by every scalar, (n, 32); scalars and errors as of `multiply`."""
    return _combined("crypto_scalarmult_ristretto255", scalars, point[None], threads)


def shifted(points: NDArray[np.uint8], point: NDArray[np.uint8], *, back: bool = False) -> NDArray[np.uint8]:
    """Add one point, uint8 (32,), to every point, (n, 32), or subtract it (`back`); CryptoError where one is none."""
    return _combined(f"crypto_core_ristretto255_{'sub' if back else 'add'}", points, point[None], 1)


def validate(points: NDArray[np.uint8], threads: int = 1) -> None:
    """Check points that are only compared, not multiplied; errors as of `multiply`."""
    points = _rows(points, POINT)
    function = address("crypto_core_ristretto255_is_valid_point")
    _refuse(lambda a, b: validate_each(function, points, a, b), len(points), threads)


def from_uniform(uniform: NDArray[np.uint8], threads: int = 1) -> NDArray[np.uint8]:
    """Map uniform bytes, uint8 (n, 64), to points whose logarithms are unknown, (n, 32) (RFC 9496, 4.3.4).

    After `expand` this is hash_to_ristretto255 of RFC 9380, appendix B.
    """
    uniform = _rows(uniform, UNIFORM)
    out = np.empty((len(uniform), POINT), np.uint8)
    function = address("crypto_core_ristretto255_from_hash")
    share(lambda start, stop: map_each(function, uniform, out, start, stop), len(uniform), threads, _LEAST_POINTS)
    return out


def _combined(name: str, left: NDArray[np.uint8], right: NDArray[np.uint8], threads: int) -> NDArray[np.uint8]:
    """Apply a function of two elements row by row; one array may have a single row for all of the other."""
    left, right = _rows(left, POINT), _rows(right, POINT)  # scalars have as many bytes
    total = min(len(left), len(right)) and max(len(left), len(right))
    out = np.empty((total, POINT), np.uint8)
    function = address(name)
    _refuse(lambda a, b: combine_each(function, left, right, out, a, b), total, threads)
    return out


def _rows(values: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Check the shape of what kernels read by address."""
    if values.dtype != np.uint8 or values.ndim != 2 or values.shape[1] != width:
        raise CryptoError(f"expected uint8 (n, {width}), got {values.dtype} {values.shape} - at ristretto255")
    # a copy of read-only rows, or kernels would be compiled twice
    return np.require(values, requirements=["C", "W"])


def _refuse(invalid: Callable[[int, int], int], total: int, threads: int) -> None:
    """Raise CryptoError if `invalid` counts any among the points from one number to another."""
    counts: list[int] = []
    share(lambda start, stop: counts.append(invalid(start, stop)), total, threads, _LEAST_POINTS)
    count = sum(counts)
    if count:
        raise CryptoError(f"expected points of ristretto255 other than the identity, got {count} others of {total}")
