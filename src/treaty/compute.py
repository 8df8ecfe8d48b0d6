"""How kernels are compiled and shared among threads, and decoders built; short names of array types.

Kernels release the interpreter lock and run under ordinary threads; numba's own parallel layers are not used: the
"workqueue" layer aborts the process when two simulated parties call it at once, OpenMP's aborts after a fork.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import msgspec
import numba
import numpy as np
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Int32s = NDArray[np.int32]
Flags = NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., Any])
Item = TypeVar("Item")
Result = TypeVar("Result")


def kernel(function: F) -> F:
    """Compile `function` with numba, without the interpreter lock, cached on disk where that is possible.

    Kernels that call each other must share a module: the disk cache does not see changes in another file.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the home folder can be written to
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    compiled._cache._cache_file.__class__ = _SharedCacheFile
    return compiled  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Compile `function` into each kernel that calls it: a call counts the references to each array, for 0.1 us."""
    return numba.njit(inline="always", nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def processor_has(*features: str) -> bool:
    """Tell whether kernels are compiled for a processor with these features (numba's settings may hide the real one).

    By LLVM's names: "avx2".
    """
    known = str(cpu_target.target_context.codegen().magic_tuple())
    return all(f"+{feature}" in known for feature in features)


def is_compiled(compiled: Any) -> bool:
    """Tell whether the disk has code of a kernel for this processor, of any types of arguments."""
    caches = getattr(compiled._cache, "_cache_file", None)
    processor = cpu_target.target_context.codegen().magic_tuple()
    return caches is not None and any(key[1] == processor for key in caches._load_index())


def load_compiler() -> None:
    """Load what numba needs before its first kernel runs: a second's work, for while a party waits for others."""
    with global_compiler_lock:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


class _SharedCacheFile(IndexDataCacheFile):  # type: ignore[misc]
    """A kernel's cache that several processes may fill at once: every signature has a file of its own.

    Numba numbers the files of a kernel's signatures and writes the list of them first. Two processes that compile
    different signatures then give both the same number, and whoever loads one of them runs the code of the other: that
    crashes (numba issues 4807 and 10128 are of this kind). Here the name of a file follows from the signature, and from
    numba's version, for two environments may share a folder; a file is whole before it is listed. An entry that another
    process overwrites in the list is compiled again.
    """

    def save(self, key: Any, data: Any) -> None:
        told = hashlib.sha256(repr((numba.__version__, key)).encode())
        name = self._data_name(int.from_bytes(told.digest()[:6]))
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


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


def share(work: Callable[[int, int], None], total: int, threads: int, least: int = 1) -> None:
    """Run ``work(start, stop)`` over ``range(total)`` cut into at most `threads` even parts, and wait for all.

    Each part has at least `least` items, if there are several; the calling thread works on the first. Parts must not
    overlap in what they write. Not to be called from within `work`: the parts share one pool and would wait for each
    other.
    """
    parts = max(1, min(threads, total // max(least, 1)))
    edges = [total * part // parts for part in range(parts + 1)]
    waiting = [_pool(threads).submit(work, edges[part], edges[part + 1]) for part in range(1, parts)]
    work(edges[0], edges[1])
    for future in waiting:
        future.result()


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
