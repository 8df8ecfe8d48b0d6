"""libsodium's functions on many elements at once: kernels that call them by address, without the interpreter lock.

The library comes with the `rbcl` wheel. A Python loop over `ctypes` would be nearly as fast on one thread, but must
take the interpreter lock back after each call.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
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

from treaty.machine.kernels import kernel, new_array

Strings = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]  # bytes, offsets, and the rows that count

POINT, SCALAR, UNIFORM, DIGEST = 32, 32, 64, 16
_BLOCK = 128  # bytes that SHA-512 takes in at a time


@cache
def address(function: str) -> int:
    """Return where a function of libsodium lies in memory."""
    return int(ctypes.cast(getattr(_library(), function), ctypes.c_void_p).value or 0)


@cache
def _library() -> ctypes.CDLL:
    from rbcl._sodium import _sodium as library  # type: ignore[import-untyped]  # initialises libsodium, too

    # The wheel unpacks its library into a temporary file at every import and leaves it there, three megabytes a
    # process. Once loaded the file is not needed (Windows keeps it locked).
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
    """Combine rows [start, stop) of two arrays, (n, 32) or one for all, (1, 32); return how many were refused.

    A product refuses invalid points and those that it makes the identity; a sum or difference refuses invalid ones.
    """
    of_left, of_right = 32 * (left.shape[0] > 1), 32 * (right.shape[0] > 1)
    refused = 0
    for row in range(start, stop):
        one, other = left.ctypes.data + of_left * row, right.ctypes.data + of_right * row
        if _call(function, (out.ctypes.data + 32 * row, one, other)) != 0:
            refused += 1
    return refused


@kernel
def validate_each(function: int, points: NDArray[np.uint8], start: int, stop: int) -> int:
    """Return how many of points [start, stop) are invalid, or the identity."""
    refused = 0
    for row in range(start, stop):
        identity = True
        for k in range(32):
            identity = identity and points[row, k] == 0
        if identity or _call(function, (points.ctypes.data + 32 * row,)) != 1:
            refused += 1
    return refused


@kernel
def map_each(function: int, uniform: NDArray[np.uint8], out: NDArray[np.uint8], start: int, stop: int) -> None:
    """Map rows [start, stop) of 64 uniform bytes to points."""
    for row in range(start, stop):
        _call(function, (out.ctypes.data + 32 * row, uniform.ctypes.data + 64 * row))


@kernel
def expand_each(
    function: int, strings: Strings, domain: NDArray[np.uint8], out: NDArray[np.uint8], start: int, stop: int
) -> None:
    """Expand strings `rows[start:stop]` to 64 bytes each (RFC 9380, 5.3.1); `domain` is DST_prime."""
    data, offsets, rows = strings
    longest = 0
    for k in range(start, stop):
        longest = max(longest, offsets[rows[k] + 1] - offsets[rows[k]])
    first = new_array(_BLOCK + longest + 3 + domain.shape[0], np.uint8)  # Z_pad || msg || l_i_b_str || 0 || DST_prime
    second = new_array(64 + 1 + domain.shape[0], np.uint8)  # b_0 || 1 || DST_prime
    for at in range(_BLOCK):
        first[at] = 0
    second[64] = 1
    for at in range(domain.shape[0]):  # a slice assigned to a slice would take seconds to compile
        second[65 + at] = domain[at]
    for k in range(start, stop):
        end = _BLOCK
        for at in range(offsets[rows[k]], offsets[rows[k] + 1]):
            first[end] = data[at]
            end += 1
        first[end] = 0
        first[end + 1] = 64
        first[end + 2] = 0
        for at in range(domain.shape[0]):
            first[end + 3 + at] = domain[at]
        _call(function, (second.ctypes.data, first.ctypes.data, end + 3 + domain.shape[0]))
        _call(function, (out.ctypes.data + 64 * k, second.ctypes.data, second.shape[0]))


@kernel
def digest_each(
    function: int, strings: Strings, key: NDArray[np.uint8], out: NDArray[np.uint8], start: int, stop: int
) -> None:
    """Hash strings `rows[start:stop]` with keyed BLAKE2b to 16 bytes each."""
    data, offsets, rows = strings
    for k in range(start, stop):
        begin = offsets[rows[k]]
        length = offsets[rows[k] + 1] - begin
        _call(function, (out.ctypes.data + 16 * k, 16, data.ctypes.data + begin, length, key.ctypes.data, key.shape[0]))


@kernel
def hash_rows(function: int, rows: NDArray[np.uint8], out: NDArray[np.uint8], start: int, stop: int) -> None:
    """Hash rows [start, stop), (n, w), with BLAKE2b without a key to rows of `out`, (n, bytes)."""
    for row in range(start, stop):
        at = rows.ctypes.data + rows.shape[1] * row
        _call(function, (out.ctypes.data + out.shape[1] * row, out.shape[1], at, rows.shape[1], 0, 0))
