"""How kernels are compiled and shared among threads, and decoders built; short names of array types.

Where they are kept once they are compiled is in `kernel_cache`.

Kernels release the interpreter lock and run under ordinary threads; numba's own parallel layers are not used: the
"workqueue" layer aborts the process when two simulated parties call it at once, OpenMP's aborts after a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
Item = TypeVar("Item")
Result = TypeVar("Result")

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


def cores(n_jobs: int | None = None) -> int:
    """Return the number of threads to use: `n_jobs`, or, for None, every core of this process; -2 is all but one."""
    if n_jobs is not None and n_jobs > 0:
        return n_jobs
    every = len(usable_cores())
    return every if n_jobs is None else max(1, every + 1 + n_jobs)


def usable_cores() -> list[int]:
    """Return the numbers of the cores that the calling thread may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def keep_to(numbers: Sequence[int]) -> None:
    """Keep the calling thread, and those it starts, to these cores, where the system lets us."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, numbers)


def stay_on_one_core() -> None:
    """Keep the calling thread on one core, the same for all that ask, where the system lets us.

    Threads that mostly hold the interpreter lock hinder each other on several cores: 32 participants took 19 s on
    two cores and 9 s on one, three with little to do 2.3 s and 1.35 s. Threads of the pool, which work without the
    lock, stay free.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(_every_core())})


def _every_core() -> set[int]:
    return set(os.sched_getaffinity(os.getpid()))  # of the main thread, which is never restricted


def _set_free() -> None:
    """Undo, in a new thread, what its maker was restricted to: a thread inherits its maker's cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _every_core())


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="treaty", initializer=_set_free)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of these threads


def share(work: Callable[[int, int], None], total: int, threads: int, least: int = 1) -> None:
    """Run ``work(start, stop)`` over ``range(total)`` cut into at most `threads` even parts, and wait for all.

    Each part has at least `least` items, if there are several; the calling thread works on the first. Parts must not
    overlap in what they write. Not to be called from within `work`: the parts share one pool and would wait for each
    other.
    """
    parts = max(1, min(threads, total // max(least, 1)))
    if parts == 1:
        return work(0, total)
    edges = [total * part // parts for part in range(parts + 1)]
    others = [_pool(threads).submit(work, edges[part], edges[part + 1]) for part in range(1, parts)]
    try:
        work(0, edges[1])
    finally:
        wait(others)  # they may still read and write what the caller would take back
    for other in others:
        other.result()
    return None


def concurrently(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Apply `work` to every item on at most `threads` threads; return the results in order.

    Unlike `share`, items may differ in size: a thread that is done takes the next one.
    """
    items = list(items)
    if threads <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="treaty", initializer=_set_free) as pool:
        return list(pool.map(work, items))


def pieces(count: int, length: int) -> list[slice]:
    """Cut ``range(count)`` into slices of at most `length`."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]
