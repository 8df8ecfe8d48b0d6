"""How kernels are compiled, and decoders built; short names of array types.

Where kernels are kept once they are compiled is in `kernel_cache`, how threads share their work in `parallel`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import msgspec
import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

from treaty.kernel_cache import KernelCache

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Int32s = NDArray[np.int32]
Flags = NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}  # nobody calls a kernel by its address


def kernel(function: F) -> F:
    """Compile `function` with numba, without the interpreter lock, cached on disk where that is possible.

    Kernels that call each other must share a module: of other files the caches that numba itself has see no change.
    """
    return _kept(numba.njit(**_OPTIONS)(function), function)


def inner(function: F) -> F:
    """Compile what only kernels call, as `kernel` does but without the wrapper by which Python would call it."""
    return _kept(numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function), function)


def _kept(compiled: Any, function: F) -> F:
    with suppress(RuntimeError):  # nowhere to be kept: neither the home folder nor the package's can be written to
        compiled._cache = KernelCache(function)
    return compiled  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Compile `function` into each kernel that calls it: a call counts the references to each array, for 0.1 us."""
    return numba.njit(inline="always", nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def new_array(typing_context: Any, count: Any, dtype: Any) -> Any:
    """In a kernel what `np.empty(count, dtype)` is, of one dimension, or of as many as the tuple `count` has numbers.

    Numpy's is a function of its own to numba, which each process compiles for each type, in a twentieth of a second.
    """
    ndim = count.count if isinstance(count, types.BaseTuple) else 1

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        from numba.np.arrayobj import _empty_nd_impl

        shape = cgutils.unpack_tuple(builder, values[0], ndim) if ndim > 1 else values[:1]
        return _empty_nd_impl(context, builder, signature.return_type, shape)._getvalue()

    return types.Array(dtype.dtype, ndim, "C")(
        types.UniTuple(types.intp, ndim) if ndim > 1 else types.intp, dtype
    ), generate


def processor_has(*features: str) -> bool:
    """Tell whether kernels are compiled for a processor with these features (numba's settings may hide the real one).

    By LLVM's names: "avx2".
    """
    known = str(cpu_target.target_context.codegen().magic_tuple())
    return all(f"+{feature}" in known for feature in features)


_BUILDING = threading.Lock()


@cache
def decoder_of(kind: Hashable, dec_hook: Callable[[Any, Any], Any] | None = None) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of a type; built one at a time, for msgspec crashes where threads first decode one together."""
    with _BUILDING:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)


@cache
def json_decoder_of(kind: Hashable) -> msgspec.json.Decoder[Any]:
    """Return a decoder of a type from JSON, built as those of `decoder_of` are."""
    with _BUILDING:
        return msgspec.json.Decoder(kind)
