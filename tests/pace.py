"""Time limits that follow the machine, and waits for a condition: on a slow or busy machine all takes longer."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

REFERENCE = 0.6
"""Seconds in which the command starts on the machine that the tests' limits were set on, two cores, otherwise idle."""


def within(seconds: float) -> float:
    """Return a limit of so many seconds at the reference, longer by as much as this machine is slower or busier."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, start_up() / REFERENCE, load)


@functools.cache
def start_up() -> float:
    """Return the seconds in which a process with the command's imports starts."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "treaty", "--version"], check=True, capture_output=True)
    return time.perf_counter() - began


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, what: str = "what was waited for") -> Any:
    """Wait until a call returns something true, and return that; fail after so many seconds, idle machine or not."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} in {seconds:g} s"
        time.sleep(0.01)
    return found
