"""The process as a whole: the cores and threads it may use, the signals that end it, and the code it may import.

Code is named by text, ``package.module:NAME``. A name may come from a partner's proposal, a job file or a saved model,
and importing a module runs it. So only names are imported that this process was given as trusted: by an argument, on
the command line, or by the policy of the party's own node.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from treaty.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

_TRUSTED: set[str] = set()
# before the colon in XGBoost's names of objectives
_XGBOOST = ("binary", "count", "multi", "rank", "reg", "survival")


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
    """Restrict the calling thread, and those it starts, to these cores, if the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, numbers)


def stay_on_one_core() -> None:
    """Restrict the calling thread to one core, the same for all callers, if the system can."""
    # Threads that mostly hold the interpreter lock hinder each other on several cores: 32 participants took 19 s on
    # two cores and 9 s on one. Helpers of `share`, which work without the lock, are not restricted.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(os.getpid()))})


def set_free() -> None:
    """Lift, in a new thread, the restriction to cores that it inherits from its maker."""
    # to the cores of the main thread, which is never restricted
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


def concurrently(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Apply `work` to every item on at most `threads` threads; return the results in order.

    Unlike those of `shared_work.share`, items may differ in size: a thread that is done takes the next one.
    """
    items = list(items)
    if threads <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="treaty", initializer=set_free) as pool:
        return list(pool.map(work, items))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit, so that partners get an abort and child processes are ended.

    Signals that the program handles or ignores, and threads other than the main one, are left alone.
    """
    numbers = [signal.SIGTERM, signal.SIGHUP]
    here = threading.current_thread() is threading.main_thread()
    changed = [number for number in numbers if here and signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def trust(names: Iterable[Any]) -> None:
    """Let this process import these names, ``package.module:NAME``; other names are ignored."""
    _TRUSTED.update(name for name in names if is_code(name))


def is_code(name: Any) -> bool:
    """Whether this is a name of code, not XGBoost's name of an objective such as "reg:squarederror"."""
    return isinstance(name, str) and ":" in name and name.partition(":")[0] not in _XGBOOST


def check_trusted(name: str, what: str) -> None:
    """Raise ConfigError for a name of code that is not trusted here; `what` names it: "the loss"."""
    if name not in _TRUSTED:
        raise ConfigError(
            f"{what} {name!r} is code, which is imported only where its user trusts it: give `--trust {name}` to the "
            f"command, trusted=[{name!r}] to treaty.load, or name it in the policy of a node's data set"
        )


def imported(name: str, what: str) -> Any:
    """Import a trusted name; raise ConfigError as `check_trusted` does, and what importing raises."""
    check_trusted(name, what)
    module, _, attribute = name.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
