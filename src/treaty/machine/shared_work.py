"""Work of kernels shared among threads: `share`.

Kernels release the interpreter lock and run under ordinary threads; numba's own parallel layers are not used: the
"workqueue" layer aborts the process when two simulated parties call it at once, OpenMP's aborts after a fork.

Waking a sleeping thread takes 50 to 100 microseconds, as long as many kernels run. So a helper that has ended its part
polls for the next one for a while, without the interpreter lock, before it sleeps. The caller, once its own part is
done, does the parts that no helper has begun. That costs processor time: one pooled training on two cores takes 0.85
times as long as with threads that sleep at once, two at the same time 1.4 times.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from treaty.machine.kernels import kernel
from treaty.machine.process import cores, set_free

Work = Callable[[int, int], None]


# places of a helper's cells, too far apart to lie in one cache line
_OFFERED, _ENDED = 0, 16
_PAUSE = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}.get(platform.machine())
# polls in a microsecond: about 40, or 400 without a pause between them
_IN_A_MICROSECOND = 40 if _PAUSE else 400
# how often a helper polls for its next part
_LONG, _SHORT = 500 * _IN_A_MICROSECOND, 20 * _IN_A_MICROSECOND
# seconds between two parts of a helper, below which it polls for long
_SOON = 5e-4
# for a caller to begin its own part, which releases the interpreter lock
_HEAD_START = 3 * _IN_A_MICROSECOND
# how often a caller polls for the end of a part; then it sleeps for `_NAP` seconds at a time
_END = 200 * _IN_A_MICROSECOND
_NAP = 2e-4
# callers that share work at the same time and have helpers of their own
_CALLERS = 3


def _cell(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])


@intrinsic  # type: ignore[untyped-decorator]
def _load(_: Any, cells: Any, at: Any) -> Any:
    """Read ``cells[at]`` from memory, with all that was written before it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_cell(context, builder, signature, args), "acquire", 8)

    return types.int64(cells, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store(_: Any, cells: Any, at: Any, value: Any) -> Any:
    """Write ``cells[at] = value`` after all earlier writes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _cell(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(cells, at, value), generate


@intrinsic  # type: ignore[untyped-decorator]
def _swap(_: Any, cells: Any, at: Any, old: Any, new: Any) -> Any:
    """Write `new` to ``cells[at]`` if that is `old`; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _cell(context, builder, signature, args)
        return builder.extract_value(builder.cmpxchg(at, args[2], args[3], "acq_rel", "acquire"), 1)

    return types.boolean(cells, at, old, new), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(_: Any) -> Any:
    """Let the processor's other thread of the same core go ahead."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, _PAUSE), [])
        return context.get_dummy_value()

    return types.void(), generate


_AT_WORK, _TAKEN_BACK, _HAS_ENDED = 0, 1, 2


@kernel
def _await(cells: Any, helps: bool, number: int, looks: int, head_start: int) -> int:
    """Poll `cells`, which a caller and a helper share, so many times.

    A helper reports the end of part `number`, and returns the number of the part it takes, 0 for none. A caller tries
    to take part `number` back, and returns its state. A part has an even number while it is offered, the next odd one
    once the helper has taken it, and its negative one once it is taken back: after an interrupt the caller may ask
    again.
    """
    if helps:
        _store(cells, _ENDED, np.int64(number))
    elif _swap(cells, _OFFERED, np.int64(number), np.int64(-number)) or _load(cells, _OFFERED) == -number:
        return _TAKEN_BACK
    for _ in range(looks):
        if helps:
            offered = _load(cells, _OFFERED)
            if offered > number and offered % 2 == 0:
                for _ in range(head_start):
                    _pause()
                if _swap(cells, _OFFERED, offered, offered + 1):
                    return int(offered)
        elif _load(cells, _ENDED) == number:
            return _HAS_ENDED
        _pause()
    return _AT_WORK  # or 0: no part


class _Helper:
    """A thread that works off the parts that it is offered, one at a time."""

    def __init__(self) -> None:
        self._cells = np.zeros(32, np.int64)
        self._number = 0
        self._part: tuple[Work, int, int] | None = None
        self._error: BaseException | None = None
        # for its caller: offered, and neither taken back nor known to have ended
        self._open = False
        self._asleep = self._dismissed = False
        # a semaphore that no interrupt can leave locked
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="treaty-helper", daemon=True)
        self._thread.start()

    def offer(self, work: Work, first: int, last: int) -> None:
        self._part, self._open = (work, first, last), True
        self._number += 2
        self._cells[_OFFERED] = self._number
        if self._asleep:
            self._wake.put(None)

    def take_back(self) -> tuple[Work, int, int] | None:
        """Return the part if the helper has not begun it; then the helper never does."""
        if not self._open or _await(self._cells, False, self._number, 0, 0) != _TAKEN_BACK:
            return None
        self._open = False
        part, self._part = self._part, None
        return part

    def wait(self) -> None:
        """Wait for the end of the part, if it has been begun."""
        if self._open and _await(self._cells, False, self._number, _END, 0) == _AT_WORK:
            while self._cells[_ENDED] != self._number:
                time.sleep(_NAP)
        self._open = False

    def error(self) -> BaseException | None:
        """Return what the part has raised, once."""
        error, self._error = self._error, None
        return error

    def dismiss(self) -> None:
        """Let the thread end with the part that it may be at."""
        self._dismissed = True
        self._wake.put(None)

    def _attempt(self) -> None:
        part, self._part = self._part, None
        assert part is not None
        work, first, last = part
        try:
            work(first, last)
        except BaseException as error:
            self._error = error

    def _run(self) -> None:
        set_free()
        number, looks, ended = 0, 0, 0.0
        while not self._dismissed:
            taken = _await(self._cells, True, number, looks, _HEAD_START)
            if taken:
                # parts come in quick succession: poll longer for the next one
                soon = time.perf_counter() - ended < _SOON
                self._attempt()
                number, looks, ended = taken, _LONG if soon else _SHORT, time.perf_counter()
                continue
            self._asleep = True
            while (self._cells[_OFFERED] % 2 or self._cells[_OFFERED] <= number) and not self._dismissed:
                self._wake.get()
            self._asleep = False
            looks = 1


_FREE: list[_Helper] = []
_MADE: list[_Helper] = []


def _forget_helpers() -> None:
    _FREE.clear()
    _MADE.clear()


# a child has none of these threads
os.register_at_fork(after_in_child=_forget_helpers)


def _call(found: list[_Helper], count: int) -> None:
    """Add free helpers, or new ones; fewer than asked for where many share work, or there are too many threads."""
    while len(found) < count:
        try:
            found.append(_FREE.pop())
        except IndexError:
            if len(_MADE) >= _CALLERS * max(count, cores() - 1):
                break
            try:
                found.append(_Helper())
            except RuntimeError:
                # the system has no more threads for us
                break
            _MADE.append(found[-1])


def _settle(helpers: list[_Helper]) -> list[BaseException]:
    """Take back all parts not begun, wait for the others and free the helpers; return what they raised."""
    try:
        for helper in helpers:
            helper.take_back()
        for helper in helpers:
            helper.wait()
        errors = [error for helper in helpers if (error := helper.error()) is not None]
        _FREE.extend(helpers)
    except BaseException:
        # interrupted: these may be at work for long
        for helper in helpers:
            if helper in _MADE:
                _MADE.remove(helper)
        for helper in helpers:
            helper.dismiss()
        raise
    return errors


def share(work: Work, total: int, threads: int, least: int = 1) -> None:
    """Run ``work(start, stop)`` over ``range(total)`` cut into at most `threads` even parts, and wait for all.

    Each part has at least `least` items, if there are several; the calling thread works on the first, and on others
    that no helper has begun by then. Parts must not overlap in what they write. What a part raises is raised here;
    parts that have not been begun by then are left out.
    """
    # fewer parts than threads where each would have too little to do
    parts = max(1, min(threads, total // max(least, 1)))
    helpers: list[_Helper] = []
    try:
        _call(helpers, parts - 1)
        # even parts: the first for this thread, the others for helpers
        edges = [total * part // (len(helpers) + 1) for part in range(len(helpers) + 2)]
        for helper, first, last in zip(helpers, edges[1:-1], edges[2:], strict=True):
            helper.offer(work, first, last)
        work(0, edges[1])
        # parts that no helper has begun are done here
        for helper in helpers:
            part = helper.take_back()
            if part is not None:
                work(*part[1:])
    finally:
        # they may use what the caller would take back
        errors = _settle(helpers)
    if errors:
        try:
            raise errors[0]
        finally:
            # an error that its own traceback holds would be kept, with all that its work uses
            del errors
