"""Time limits that follow the machine: on a slow or busy one, parties take longer than on the one they were set on."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time

REFERENCE = 0.6
"""Seconds in which the command starts on the machine that the tests' limits were set on, two cores, otherwise idle."""


def within(seconds: float) -> float:
    """Return a limit of so many seconds at the reference, longer by as much as this machine is slower or busier."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, start_up() / REFERENCE, load)


@functools.cache
def start_up() -> float:
    """Return the seconds in which a process with the command's imports starts; the first may still compile bytecode."""
    took = []
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "treaty", "--version"], check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    return min(took)
