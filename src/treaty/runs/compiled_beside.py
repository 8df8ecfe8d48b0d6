"""A second process that compiles what trees are grown by, while the first compiles the rest; `warm_up` says what.

Few modules are imported here, so that this process begins before a command has imported what it needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from treaty.kernel_cache import is_compiled
from treaty.trees.scanning import scan_splits


@contextmanager
def trees_compiled_beside(*, wanted: bool = True) -> Iterator[bool]:
    """Let a process of its own compile what grows trees, if nothing is compiled yet; give whether that is so.

    If it is not `wanted`, there is no such process.
    """
    first_time = not is_compiled(scan_splits)
    if not (first_time and wanted):
        yield first_time
        return
    script = (
        "import gc; from treaty.runs.warm_up import compile_trees; compile_trees(); gc.freeze()"  # frozen, it ends soon
    )
    words = [sys.executable, "-c", script]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet) as process:  # noqa: S603 - our own interpreter
        try:
            yield True
        except BaseException:
            process.terminate()
            raise
