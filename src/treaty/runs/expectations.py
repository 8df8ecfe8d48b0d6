"""What a job is expected to take, as `treaty check` says it: time, bytes, memory, and room in the store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treaty.data.binning import fit_bins
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.models.linear import preparation_of
from treaty.runs.job import Job, store_of
from treaty.systems.alignment.expected import add_alignment
from treaty.systems.expected import Expected, Shape, slowness
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast
from treaty.systems.vertical.cipher_choice import in_words, rounded

ROWS, COLUMNS = 10_000, 10
"""Taken for what a party cannot know alone: rows, where it has no table, and columns of each other party."""
START = 5.0
"""Seconds in which processes start, load what is compiled, and write what there is in the end."""
PROCESS = 370e6
"""Bytes of a process with its libraries."""
CELL = 26.0
"""Bytes of a value of a table while it is read, checked and binned."""
MEGABIT = 1e6 / 8
LINK = 100 * MEGABIT
"""Bytes a second of the network for which a time is told."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of a job at one party; bytes, seconds, and for what sizes."""

    taken: str
    seconds: float
    sent: float
    received: float
    in_all: float
    memory: float
    kept: float
    more: float = 0.0

    @property
    def in_public(self) -> str:
        """What others are told, to one digit: more of them would tell how many rows and columns there are."""
        seconds, nbytes, memory = (float(f"{of:.0e}") for of in (self.seconds, self.sent + self.received, self.memory))
        return f"expects about {in_words(seconds)}, {_mb(nbytes)} sent and received, {_gb(memory)} of memory"

    @property
    def bytes_in_words(self) -> str:
        """What is sent."""
        more = f"; {_mb(self.more)} more here for each {COLUMNS} columns more at each other party" if self.more else ""
        return f"{_mb(self.sent)} sent and {_mb(self.received)} received here, {_mb(self.in_all)} in all{more}"

    @property
    def time_in_words(self) -> str:
        """How long it takes."""
        network = (self.sent + self.received) / LINK
        return (
            f"about {in_words(self.seconds)} within a factor of 3, if all machines are like this one; what is sent "
            f"takes {in_words(network)} more at 100 Mbit/s"
        )


def expect(job: Job, cast: Cast, name: str, table: Table | None) -> Expectation:
    """Return what a training is expected to take at a party with this training table (None: it has none).

    Raises ConfigError, or CryptoError, where there is no formula, or the job is too large for its cipher.
    """
    own, common = job.settings()
    shape, taken = _shape(job, cast, name, table, common)
    found = _expected(job, cast, own, common, shape)
    sent, received = _traffic(found, name)
    more = 0.0
    if not job.by_row and table is not None:
        wider = _expected(job, cast, own, common, _wider(shape, name))
        more = sum(_traffic(wider, name)) - sent - received
    values = 0 if table is None else table.n_rows * (2 + (len(table.schema.names) if table.folder is None else 0))
    return Expectation(
        taken,
        START + found.seconds * slowness(),
        sent,
        received,
        sum(found.sent.values()),
        PROCESS + CELL * values + found.memory.get(name, 0.0),
        found.kept.get(name, 0.0),
        more if more > 0.01 * (sent + received) else 0.0,
    )


def check_memory(expected: Expectation) -> str:
    """Return how much memory a job takes; raise ConfigError where there is less."""
    free, said = free_memory(), f"about {_gb(expected.memory)} here"
    if free is None:
        return said
    if expected.memory > free:
        raise ConfigError(
            f"{said}, and {_gb(free)} are free: end other programs, take a machine with more, or fewer rows, columns "
            "or bins (max_bin)"
        )
    return f"{said}, of {_gb(free)} free"


def check_store(job: Job, name: str, expected: Expectation) -> str:
    """Return how much of its store a job takes; raise ConfigError where there is less room."""
    store = store_of(job, name)
    said = f"{_mb(expected.kept)} kept for later jobs in {store}"
    folder = next((of for of in (Path(str(store)), *Path(str(store)).absolute().parents) if of.exists()), None)
    if store is None or folder is None:
        return "nothing is kept for later jobs"
    free = shutil.disk_usage(folder).free
    if expected.kept > free:
        raise ConfigError(f"{said}, and {_mb(free)} are free: make room, or name another folder as store")
    return said


def free_memory() -> float | None:
    """Return bytes of memory that a process may still take; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    try:  # of a container
        most, used = (Path(f"/sys/fs/cgroup/memory.{what}").read_text().strip() for what in ("max", "current"))
        return free if most == "max" else min(free, float(most) - float(used))
    except (OSError, ValueError):
        return free


def _expected(job: Job, cast: Cast, own: Any, common: Any, shape: Shape) -> Expected:
    found = job.system.expected(cast, own, common, shape)
    if job.align is not None:
        add_alignment(found, cast, job.align.psi, shape)
    return found


def _shape(job: Job, cast: Cast, name: str, table: Table | None, common: Any) -> tuple[Shape, str]:
    """Return the sizes of a job's tables as far as a party knows them, and in words what it takes for the rest."""
    rows, columns, slots = (ROWS, COLUMNS, _slots(COLUMNS, common)) if table is None else _sizes(table, common)
    threads = job.n_jobs or len(os.sched_getaffinity(0))
    alike = job.by_row or table is None
    others = (columns, slots) if alike else (COLUMNS, _slots(COLUMNS, common))
    sizes = {owner: (columns, slots) if owner == name else others for owner in cast.owners}
    shape = Shape(
        rows=rows,
        columns={owner: size[0] for owner, size in sizes.items()},
        slots={owner: size[1] for owner, size in sizes.items()},
        classes=job.classes,
        threads=threads,
    )
    if table is None:
        return shape, f"taken for all who have a table: {rows:,} rows, {columns} columns"
    if job.by_row:
        return shape, f"{rows:,} rows and {columns} columns here; taken for each other party: as many rows"
    common_rows = ", all of its rows in common" if job.align is not None else ""
    here = f"{rows:,} rows and {columns} columns here"
    return shape, f"{here}; taken for each other party: {COLUMNS} columns{common_rows}"


def _sizes(table: Table, common: Any) -> tuple[int, int, int]:
    """Return a table's rows, columns as they are trained on, and slots in a histogram."""
    names = table.schema.names
    if isinstance(common, BoostingOptions):
        return table.n_rows, len(names), int(fit_bins(table, common.most_bins, 1).offsets[-1])
    prepared = len(preparation_of(table).names(names, table.schema.categories))
    return table.n_rows, prepared, prepared


def _slots(columns: int, common: Any) -> int:
    return columns * (common.most_bins + 1) if isinstance(common, BoostingOptions) else columns


def _wider(shape: Shape, name: str) -> Shape:
    """Return the sizes with as many columns more as were taken for each other party."""

    def doubled(of: Mapping[str, int]) -> dict[str, int]:
        return {owner: size if owner == name else 2 * size for owner, size in of.items()}

    return replace(shape, columns=doubled(shape.columns), slots=doubled(shape.slots))


def _traffic(found: Expected, name: str) -> tuple[float, float]:
    """Return the bytes that a party sends and receives."""
    sent = sum(nbytes for (sender, _), nbytes in found.sent.items() if sender == name)
    return sent, sum(nbytes for (_, receiver), nbytes in found.sent.items() if receiver == name)


def _mb(nbytes: float) -> str:
    return f"{rounded(nbytes / 1e6)} MB" if nbytes >= 1e5 else f"{rounded(nbytes / 1e3)} kB"


def _gb(nbytes: float) -> str:
    return f"{rounded(nbytes / 1e9)} GB"
