"""Kernels compiled before parties need them, by playing a small training of a system on made-up rows.

Compiling takes most of the time of a first training on a new machine, and Numba uses one core for it. So, if nothing is
compiled yet, `trees_compiled_beside` has a second process compile the kernels that grow trees, which most systems
share. Neither process compiles a kernel that the other is compiling; it waits for that (`machine.kernels`).
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from treaty.crypto.transfer import oprf, sodium
from treaty.data.ids import Psi, read_ids
from treaty.data.table import Schema, Table
from treaty.machine.kernels import is_compiled
from treaty.machine.keyed_hash import KEY, hashes
from treaty.machine.shared_work import share
from treaty.runs.threads import Run, Watched, fewest_roles, train_in_threads
from treaty.systems import SYSTEMS, find_system
from treaty.systems.alignment.ecdh import OwnList
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.observers import observing
from treaty.systems.options import SystemOptions
from treaty.systems.system import LabelledRows, System
from treaty.trees.ensemble import BitWalk, SplitTable, Walk, join_splits
from treaty.trees.scanning import scan_splits

_SMALL: dict[str, dict[str, Any]] = {
    "boosting": {"n_estimators": 1, "max_bin": 6, "min_child_samples": 1},
    "regression": {"max_iter": 1, "period": 1, "batch_size": 40, "tol": 0.0, "memory": 1},
    "columns": {},
}


def compile_kernels(
    system: System | None = None, options: SystemOptions | None = None, *, aligns: Psi | None = "auto"
) -> None:
    """Compile the kernels of a training, so that the parties' processes find them cached.

    Without a `system`, those of every system; without `options`, those of any. Rows are first aligned by the protocol
    `aligns`; None: they are not.
    """
    systems = [system] if system else [find_system(name, model) for model, named in SYSTEMS.items() for name in named]
    with _without_collecting():
        # by two threads, for trainings here have one
        share(lambda first, last: None, 2, 2)
        if aligns and any(of.split == "columns" for of in systems):
            _compile_alignment(aligns)
        for of in systems:
            for small in of.warm_up(options):
                _train(of, small)


def compile_trees() -> None:
    """Compile what grows trees, by the system with the fewest other kernels, and what predicts with them."""
    with _without_collecting():
        share(lambda first, last: None, 2, 2)
        _train(find_system("federboost-vertical"), FederBoostVertical())
        Walk([], join_splits([], [])).add_to(np.zeros((1, 1)), np.zeros((1, 1), np.float32))


def compile_walks() -> None:
    """Compile what walks down trees whose nodes are decided by several parties."""
    with _without_collecting():
        decided = SplitTable().decide(np.zeros((1, 1), np.float32))
        BitWalk([], np.zeros(1, np.int64)).add_to(np.zeros((1, 1)), decided)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Suspend garbage collection: numba makes millions of objects, and scanning them takes 5 % of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _compile_alignment(psi: Psi) -> None:
    ids = read_ids(["a"])
    hashes(ids.data, ids.offsets, bytes(KEY))
    sodium.digests(ids.data, ids.offsets, np.arange(1), bytes(32))
    if psi != "kkrt":
        OwnList(ids, b"compile", 1).blinded(slice(0, 1))
        sodium.validate(sodium.from_uniform(np.ones((1, 64), np.uint8)))
    if psi != "ecdh":
        _compile_oblivious()


def _compile_oblivious() -> None:
    receiver = oprf.OprfReceiver()
    sender = oprf.OprfSender(receiver.offer)
    receiver.accept(sender.points)
    inputs = np.zeros((oprf.STEP, 2), np.uint64)
    oprf.places(inputs[:1], oprf.bins_for(1, 1))
    oprf.placed(inputs[:1], oprf.bins_for(1, 1))
    codes = oprf.codes(bytes(32), inputs)
    rows = sender.extend(receiver.extend(codes, 0)[0])
    sender.values(rows, 0, np.zeros(len(codes), np.int64), codes)


def _train(system: System, options: SystemOptions) -> None:
    """Play a training of two columns (one of a regression) and a few rows."""
    rng = np.random.default_rng(0)
    regression = system.common.table != "boosting"
    n_rows, names = (40, ("x",)) if regression else (64, ("a", "b"))
    table, others = (
        Table(Schema(names, (None,) * len(names)), [rng.normal(size=n_rows).astype(np.float32) for _ in names], n_rows)
        for _ in range(2)
    )
    labels = np.arange(n_rows) % 2 if regression else rng.integers(0, 2, n_rows)
    data = LabelledRows(table, labels.astype(np.float64))
    roles = fewest_roles(system, options)
    owners = roles.owners
    evals = {name: others for name in (owners if system.split == "columns" else [roles.active])}
    # hidden rows have one objective, and no eval sets of so few rows
    needed = {"objective": "logistic_pieces"} if options.hides_rows else {}
    common = msgspec.convert({**_SMALL[system.common.table], **needed}, system.common).checked(options)
    unlabelled = LabelledRows(table, np.zeros(0))
    rows = {name: data if system.split == "rows" or name == roles.active else unlabelled for name in owners}
    shown = {name: unlabelled for name in roles.having(*system.shows_columns)}
    run = Run(
        system=system, options=options, common=common, roles=roles, data={**rows, **shown}, classes=[0, 1],
        eval_sets=[] if regression or options.hides_rows else [Watched(evals, data.y)], n_jobs=1,
    )  # fmt: skip
    # this training is no user's job: observers of this process must not see it
    with observing(lambda inputs: ()):
        train_in_threads(run, {})


@contextmanager
def trees_compiled_beside(*, wanted: bool = True) -> Iterator[bool]:
    """If no kernel is compiled yet, let a second process compile what grows trees; yield whether none is compiled.

    There is no such process unless it is `wanted`.
    """
    first_time = not is_compiled(scan_splits)
    if not (first_time and wanted):
        yield first_time
        return
    # freezing lets the process end without a last scan of all objects
    script = "import gc; from treaty.runs.warm_up import compile_trees; compile_trees(); gc.freeze()"
    words = [sys.executable, "-c", script]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet) as process:  # noqa: S603 - our own interpreter
        try:
            yield True
        except BaseException:
            process.terminate()
            raise
