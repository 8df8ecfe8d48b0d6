"""Steps that two parties take together: at each, both send arrays at the same time, and go on with the other's.

What the parties compute is a generator, the same at both ends: it yields what its party sends and is given what the
other has sent. `together` takes the steps of several at once, in one message each way.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.errors import CryptoError

Result = TypeVar("Result")
Arrays = list[NDArray[Any]]
Steps = Generator[Arrays, Arrays, Result]


def together(*protocols: Steps[Any]) -> Steps[list[Any]]:
    """Run protocols that do not depend on each other, each step of all of them in one message; return their results."""
    results: list[Any] = [None] * len(protocols)
    waiting: dict[int, Arrays] = {}
    given: dict[int, Arrays | None] = {k: None for k in range(len(protocols))}
    while given:
        for k, arrays in given.items():
            try:
                waiting[k] = next(protocols[k]) if arrays is None else protocols[k].send(arrays)
            except StopIteration as stop:
                results[k] = stop.value
        if not waiting:
            break
        sizes = np.array([len(waiting.get(k, ())) for k in range(len(protocols))], np.int64)
        came = yield [sizes, *(array for k in sorted(waiting) for array in waiting[k])]
        given, at = {}, 1
        fine = bool(came) and came[0].dtype == np.int64 and came[0].shape == (len(protocols),)
        counts = came[0].tolist() if fine else []
        if not fine or min(counts) < 0 or sum(counts) != len(came) - 1:
            raise CryptoError("expected a step of as many protocols as this end's")
        for k in sorted(waiting):
            given[k] = came[at : at + counts[k]]
            at += counts[k]
        waiting = {}
    return results


def take(came: Arrays, *expected: tuple[type[np.generic], tuple[int, ...]]) -> Arrays:
    """Return what the other party sent; CryptoError unless element types and shapes are those expected."""
    fine = len(came) == len(expected) and all(
        array.dtype == kind and array.shape == shape for array, (kind, shape) in zip(came, expected, strict=True)
    )
    if not fine:
        what = [(str(array.dtype), array.shape) for array in came]
        raise CryptoError(f"expected arrays {[(kind.__name__, shape) for kind, shape in expected]}, got {what}")
    return came
