"""Through which files a gradient and its sums pass, as `docs/architecture.md` lists them."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import msgspec
import numpy as np
from numba.core.dispatcher import Dispatcher

import treaty
from tables import cut, real_table

OTHER = {
    "trees/partition", "systems/vertical/column_owner", "crypto/lattice/sampling", "crypto/lattice/transform",
    "crypto/additive/montgomery", "scratch", "systems/vertical/told_sides",
}  # fmt: skip
"""Files that have as much of something else: numbers, margins and bins of rows, noise, secrets, random bytes."""
PACKAGE = Path(treaty.__file__).parent
ROWS = 569


def is_bulk(value: Any) -> bool:
    """Whether a value has as many numbers or bytes as there are rows, itself or in what it holds."""
    if isinstance(value, np.ndarray):
        return value.size >= ROWS
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value) >= ROWS
    if isinstance(value, list | tuple):
        return any(map(is_bulk, value))
    if isinstance(value, dict):
        return any(map(is_bulk, value.values()))
    return isinstance(value, msgspec.Struct) and any(is_bulk(getattr(value, name)) for name in value.__struct_fields__)


def kernels_named(frame: FrameType) -> Iterator[Dispatcher]:
    """Yield the compiled kernels that a function may call: it names them, alone or after their module's name."""
    names, known = set(frame.f_code.co_names), frame.f_globals
    for name in names & known.keys():
        found = known[name]
        several = [getattr(found, other, None) for other in names] if isinstance(found, ModuleType) else [found]
        yield from (kernel for kernel in several if isinstance(kernel, Dispatcher))


def files_with_gradients() -> set[str]:
    """Train a tree; return the files of functions and kernels that have bulk data from the loss to the tree's end."""
    X, y = real_table("binary", rows=ROWS)
    found: set[str] = set()
    growing = [False]

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        growing[0] = (growing[0] and code.co_name != "on_round") or code.co_name == "gradients"
        if growing[0] and any(is_bulk(value) for name, value in frame.f_locals.items() if name != "self"):
            for one in (code, *(kernel.py_func.__code__ for kernel in kernels_named(frame))):
                found.add(Path(one.co_filename).relative_to(PACKAGE).with_suffix("").as_posix())

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        system = treaty.SecureBoost(encryption="lattice", sums="open")
        treaty.GBDTClassifier(system, n_estimators=1, n_jobs=1).fit(cut(X, 2), y)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    return found


def test_a_gradient_and_its_sums_pass_through_the_files_that_the_documentation_lists():
    text = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    table = text[text.index("The way of a gradient") :].partition("\n\n## ")[0]
    listed = set()
    for room, files in re.findall(r"^\| `(\S+)` \| (.*) \|$", table, re.MULTILINE):
        listed |= {f"{room}/{file}" for file in re.findall(r"`(\S+)`", files)}
    assert files_with_gradients() - OTHER == listed
    assert len(listed) <= 22
