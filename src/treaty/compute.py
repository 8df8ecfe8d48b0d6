"""How kernels are compiled and shared among threads, and decoders built; short names of array types.

Kernels release the interpreter lock and run under ordinary threads; numba's own parallel layers are not used: the
"workqueue" layer aborts the process when two simulated parties call it at once, OpenMP's aborts after a fork.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import llvmlite
import msgspec
import numba
import numpy as np
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.misc.appdirs import AppDirs
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Int32s = NDArray[np.int32]
Flags = NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., Any])
Item = TypeVar("Item")
Result = TypeVar("Result")

_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}  # nobody calls a kernel by its address
_IMPORTS = re.compile(rb"^from (treaty\w*[.\w]*) import ([^(\n]+|\([^)]*\))", re.MULTILINE)
_NAMES = re.compile(rb"\w+")
_UNUSED = 90 * 24 * 3600  # seconds after which kernels that nobody loads are deleted


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
        compiled._cache = _KernelCache(function)
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


class _OfUser(_CacheLocator):  # type: ignore[misc]
    """A folder of the user's, for each module's text and the versions that compile it.

    So an installation compiles nothing that another one has compiled.
    """

    def __init__(self, function: Any, path: str) -> None:
        self._py_file = path  # named in numba's warnings
        self._line = function.__code__.co_firstlineno
        self._stamp = _digest_of(path)
        self._folder = _folder_of_user() / f"{Path(path).stem}-{self._stamp[:16]}"

    @classmethod
    def from_function(cls, function: Any, path: str) -> _OfUser | None:
        """Return where kernels of this file are kept; None where that cannot be, or is not the user's own."""
        try:
            locator = cls(function, path)
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator

    def ensure_cache_path(self) -> None:
        if not self._folder.is_dir():
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _delete_unused(self._folder.parent)
            self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.stat()
        if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            raise PermissionError("code that others may have written is not loaded")
        if time.time() - found.st_mtime > _UNUSED / 10:
            os.utime(self._folder)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return str(self._line)


def _folder_of_user() -> Path:
    return Path(AppDirs(appname="treaty", appauthor=False).user_cache_dir) / "kernels"


@cache
def _digest_of(path: str) -> str:
    """Return a digest of a module's text, of those of this package that it imports, and of what compiles them."""
    told = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, np.__version__)).encode())
    seen, waiting = {path}, [path]
    while waiting:
        text = Path(waiting.pop()).read_bytes()
        told.update(text)
        for package, names in _IMPORTS.findall(text):
            for name in (package, *(package + b"." + one for one in _NAMES.findall(names))):
                file = getattr(sys.modules.get(name.decode()), "__file__", None)
                if file is not None and file not in seen:
                    seen.add(file)
                    waiting.append(file)
    return told.hexdigest()


def _delete_unused(folder: Path) -> None:
    """Delete kernels that have not been loaded for long: of older versions, mostly."""
    for one in folder.iterdir():
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > _UNUSED:
                shutil.rmtree(one)


_NUMBAS = CompileResultCacheImpl._locator_classes


class _Place(CompileResultCacheImpl):  # type: ignore[misc]
    """Where a kernel is kept: in NUMBA_CACHE_DIR, among the user's, or where numba itself would keep it."""

    _locator_classes: ClassVar = [_NUMBAS[0], _OfUser, *_NUMBAS[1:]]


class _KernelCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Place


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
