"""Compiling kernels, and keeping them so that each is compiled once on a machine.

`kernel` compiles a function with numba, `inner` and `inlined` functions that only kernels call. Compiled code lies in a
folder of the user's, under a digest of the module's text and of its imports; of several processes that need the same
kernel one compiles it and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, ClassVar, TypeVar

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.extending import intrinsic
from numba.misc.appdirs import AppDirs

from treaty.errors import NOTED

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

COMPILING = "compiling for this processor, which takes up to 25 seconds of its time, once"
# kernels are not called by their address
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_IMPORTS = re.compile(rb"^from (treaty\w*[.\w]*) import ([^(\n]+|\([^)]*\))", re.MULTILINE)
_NAMES = re.compile(rb"\w+")
# seconds after which kernels that were not loaded are deleted
_UNUSED = 90 * 24 * 3600
# seconds to wait for another process to compile a kernel, which may have been stopped
_LONGEST = 60.0


def kernel(function: F) -> F:
    """Compile `function` with numba, without the interpreter lock, cached on disk if possible.

    Kernels that call each other must share a module: of other files the caches that numba itself has see no change.
    """
    return _kept(numba.njit(**_OPTIONS)(function), function)


def inner(function: F) -> F:
    """Compile a function that only kernels call, as `kernel` does but without the wrapper for calls from Python."""
    return _kept(numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function), function)


def _kept(compiled: Any, function: F) -> F:
    # nowhere to be kept: neither the home folder nor the package's can be written to
    with suppress(RuntimeError):
        compiled._cache = KernelCache(function)
    return compiled  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Compile `function` into each kernel that calls it: a call counts the references to each array, for 0.1 us."""
    return numba.njit(inline="always", nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def new_array(typing_context: Any, count: Any, dtype: Any) -> Any:
    """In a kernel, return ``np.empty(count, dtype)``, of one dimension, or of the tuple `count`."""
    # numpy's is a function of its own to numba, which each process compiles for each type, in a twentieth of a second
    ndim = count.count if isinstance(count, types.BaseTuple) else 1

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        from numba.np.arrayobj import _empty_nd_impl

        shape = cgutils.unpack_tuple(builder, values[0], ndim) if ndim > 1 else values[:1]
        return _empty_nd_impl(context, builder, signature.return_type, shape)._getvalue()

    return types.Array(dtype.dtype, ndim, "C")(
        types.UniTuple(types.intp, ndim) if ndim > 1 else types.intp, dtype
    ), generate


def processor_has(*features: str) -> bool:
    """Whether kernels are compiled for a processor with these features, by LLVM's names ("avx2")."""
    # numba's settings may hide the real processor
    known = str(cpu_target.target_context.codegen().magic_tuple())
    return all(f"+{feature}" in known for feature in features)


class _SharedCacheFile(IndexDataCacheFile):  # type: ignore[misc]
    """A kernel's cache that several processes may fill at once: every signature has a file of its own.

    Numba numbers the files of a kernel's signatures and writes the list of them first. Two processes that compile
    different signatures then give both the same number, and a process that loads one of them runs the code of the
    other: that crashes (numba issues 4807 and 10128 are of this kind). Here the name of a file follows from the
    signature, and from numba's version, for two environments may share a folder; a file is whole before it is listed.
    An entry that another process overwrites in the list is compiled again.
    """

    def save(self, key: Any, data: Any) -> None:
        digest = hashlib.sha256(repr((numba.__version__, key)).encode()).digest()
        name = self._data_name(int.from_bytes(digest[:6]))
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


class _OfUser(_CacheLocator):  # type: ignore[misc]
    """A folder of the user's, for each module's text and the versions that compile it, shared by installations."""

    def __init__(self, function: Any, path: str) -> None:
        self._py_file = path  # named in numba's warnings
        self._line = function.__code__.co_firstlineno
        self._stamp = _digest_of(path)
        kernels = Path(AppDirs(appname="treaty", appauthor=False).user_cache_dir) / "kernels"
        self._folder = kernels / f"{Path(path).stem}-{self._stamp[:16]}"

    @classmethod
    def from_function(cls, function: Any, path: str) -> _OfUser | None:
        """Return the place for kernels of this file; None if it cannot be made, or is not the user's own."""
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
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError("code that others may have written is not loaded")
        if time.time() - found.st_mtime > _UNUSED / 10:
            os.utime(self._folder)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return str(self._line)


@cache
def _digest_of(path: str) -> str:
    """Return a digest of a module's text, of the modules of this package that it imports, and of the compilers."""
    digest = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, np.__version__)).encode())
    seen, waiting = {path}, [path]
    # follow imports within this package: a kernel is stale when what it calls has changed
    while waiting:
        text = Path(waiting.pop()).read_bytes()
        digest.update(text)
        for package, names in _IMPORTS.findall(text):
            for name in (package, *(package + b"." + one for one in _NAMES.findall(names))):
                file = getattr(sys.modules.get(name.decode()), "__file__", None)
                if file is not None and file not in seen:
                    seen.add(file)
                    waiting.append(file)
    return digest.hexdigest()


def _delete_unused(folder: Path) -> None:
    """Delete kernels that have not been loaded for long, mostly of older versions."""
    for one in folder.iterdir():
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > _UNUSED:
                shutil.rmtree(one)


_NUMBAS = CompileResultCacheImpl._locator_classes


class _Place(CompileResultCacheImpl):  # type: ignore[misc]
    """The place of a kernel: NUMBA_CACHE_DIR, the user's folder, or numba's own choice."""

    _locator_classes: ClassVar = [_NUMBAS[0], _OfUser, *_NUMBAS[1:]]


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The cache of one kernel's code, for any types of arguments; one process compiles, and others wait for it."""

    _impl_class = _Place
    # whether the log has that this process compiles
    announced: ClassVar[bool] = False
    # whether it is to be printed, where no command shows the log
    printed: ClassVar[bool] = False

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file.__class__ = _SharedCacheFile
        # a file that is locked while this process compiles the kernel
        self._turn: IO[bytes] | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for these types of arguments; None if this process has to compile and save it."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
            if found is None and self._take_turn():
                found = self._load_overload(sig, target_context)
                if found is not None:
                    self._end_turn()
        if found is None:
            if not KernelCache.announced:
                KernelCache.announced = True
                logger.log(NOTED, COMPILING)
                if KernelCache.printed:
                    print(COMPILING, flush=True)
            # all that numba can compile: a third of a second, which processes are spared that only load
            target_context.refresh()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save compiled code, if possible; processes that waited load it, or compile it themselves."""
        try:
            super().save_overload(sig, data)
        finally:
            self._end_turn()

    def _take_turn(self) -> bool:
        """Wait until no other process compiles this kernel; return whether there may have been one."""
        # a compilation of this process that failed
        if self._turn is not None:
            return False
        with suppress(OSError):
            self._turn = open(f"{self._cache_file._index_path}.lock", "ab")
            last = time.monotonic() + _LONGEST
            while time.monotonic() < last:
                try:
                    fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
        return self._turn is not None

    def _end_turn(self) -> None:
        if self._turn is not None:
            # closing is not enough if another process was forked off meanwhile
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._turn.close()
            self._turn = None


def is_compiled(compiled: Any) -> bool:
    """Whether the disk has code of a kernel for this processor, for any types of arguments."""
    caches = getattr(compiled._cache, "_cache_file", None)
    processor = cpu_target.target_context.codegen().magic_tuple()
    return caches is not None and any(key[1] == processor for key in caches._load_index())
