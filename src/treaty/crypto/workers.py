"""Compiled kernels and the threads that run them.

Kernels release the interpreter's lock, so plain threads use all cores. numba's own `parallel=True` is never
used: two simulated parties calling it at once abort the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])
Item = TypeVar("Item")
Result = TypeVar("Result")


def kernel(function: Function) -> Function:
    """Compile a function with numba, without the interpreter's lock; kept on disk where that is possible.

    Kernels that call each other must share a module: the disk cache does not see changes in another file.
    """
    try:
        return cast(Function, njit(nogil=True, cache=True)(function))
    except RuntimeError:  # neither the package folder nor the home can be written
        return cast(Function, njit(nogil=True)(function))


def run_threads(threads: int, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Apply `function` to every item on up to `threads` threads; results in the order of the items.

    Parameters
    ----------
    threads : int
        At least 1; 1 runs everything in the calling thread.
    function : callable
        Spends its time in kernels (otherwise threads gain nothing).
    items : sequence
        One call each.

    Returns
    -------
    list
        What the calls returned. The first error of a call is raised.
    """
    if threads <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(function, items))


def pieces(count: int, length: int) -> list[slice]:
    """Cut range(count) into slices of at most `length`."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]
