"""How signals end a program: in order, so that partners are told and child processes ended."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit, in which others are told and child processes ended.

    Not where the program handles or ignores such a signal itself, nor in threads other than the main one.
    """
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    here = threading.current_thread() is threading.main_thread()
    changed = [number for number in numbers if here and signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
