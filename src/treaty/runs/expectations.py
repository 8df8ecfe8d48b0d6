"""What a job is expected to take, as `treaty check` says it: time, bytes, memory, and room in the store."""

from __future__ import annotations

import os
import re
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
from treaty.systems.alignment.leakage import add_alignment
from treaty.systems.expected import Expected, Shape, slowness
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles
from treaty.systems.vertical.cipher_choice import in_words, rounded

ROWS, COLUMNS = 10_000, 10
"""Taken for what a party cannot know alone: rows, where it has no table, and columns of each other party."""
LEAST, MOST = (3, 16), (30, 256)
"""Columns, and bins of each at most, between which each other party's are taken to be for a range of bytes."""
START = 5.0
"""Seconds in which processes start, load what is compiled, and write what there is in the end."""
PROCESS = 370e6
"""Bytes of a process with its libraries."""
CELL = 26.0
"""Bytes of a value of a table while it is read, checked and binned."""
MEGABIT = 1e6 / 8
LINK = 100 * MEGABIT
"""Bytes a second of the network that the time of transfer is stated for."""


Sizes = Mapping[str, tuple[int, int]]
"""By party, as far as they have stated them: columns as they are trained on, and bins of all of them."""
_STATED = re.compile(r"about (\d{1,6}) columns in (\d{1,8}) bins")


def stated_sizes(text: str) -> tuple[int, int] | None:
    """Return the size of another party's table from its statement (`Expectation.in_public`); None if it has none."""
    found = _STATED.search(text)
    return None if found is None else (int(found[1]), int(found[2]))


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
    own: tuple[int, int] | None = None
    span: tuple[float, float] | None = None

    @property
    def in_public(self) -> str:
        """What the other parties are sent, to one digit: more would reveal the number of rows. Of bins, two digits."""
        seconds, nbytes, memory = (float(f"{of:.0e}") for of in (self.seconds, self.sent + self.received, self.memory))
        text = f"expects about {in_words(seconds)}, {_mb(nbytes)} sent and received, {_gb(memory)} of memory"
        columns, slots = self.own or (0, 0)
        if not columns:
            return text
        return f"{text}, for about {float(f'{columns:.0e}'):.0f} columns in {float(f'{slots:.1e}'):.0f} bins"

    @property
    def bytes_in_words(self) -> str:
        """What is sent."""
        text = f"{_mb(self.sent)} sent and {_mb(self.received)} received here, {_mb(self.in_all)} in all"
        if self.span is None:
            return text
        least, most = map(_mb, self.span)
        return (
            f"{text}; from {least}, where each other party has {LEAST[0]} columns of {LEAST[1]} bins, to {most} for "
            f"{MOST[0]} columns of as many bins as there may be"
        )

    @property
    def time_in_words(self) -> str:
        """How long it takes."""
        network = (self.sent + self.received) / LINK
        return (
            f"about {in_words(self.seconds)} within a factor of 3, if all machines are like this one; what is sent "
            f"takes {in_words(network)} more at 100 Mbit/s"
        )


def expect(job: Job, roles: Roles, name: str, table: Table | None, stated: Sizes | None = None) -> Expectation:
    """Return what a training is expected to take at a party with this training table (None: it has none).

    `stated` are sizes of other parties' tables; those of the rest are taken to be usual ones.

    Raises ConfigError, or CryptoError, where there is no formula, or the job is too large for its cipher.
    """
    stated = stated or {}
    own, common = job.settings()
    shape, taken = _shape(job, roles, name, table, common, stated)
    found = _expected(job, roles, own, common, shape)
    sent, received = _traffic(found, name)
    span: tuple[float, float] | None = None
    if not job.by_row and table is not None:
        ends = [_expected(job, roles, own, common, _sized(shape, name, stated, size, common)) for size in (LEAST, MOST)]
        here = [sum(_traffic(end, name)) for end in ends]
        span = (sum(ends[0].sent.values()), sum(ends[1].sent.values())) if here[1] > 1.01 * here[0] else None
    values = 0 if table is None else table.n_rows * (2 + (len(table.schema.names) if table.folder is None else 0))
    return Expectation(
        taken,
        START + found.seconds * slowness(),
        sent,
        received,
        sum(found.sent.values()),
        PROCESS + CELL * values + found.memory.get(name, 0.0),
        found.kept.get(name, 0.0),
        None if job.by_row or table is None or name not in shape.slots else (shape.columns[name], shape.slots[name]),
        span,
    )


def check_memory(expected: Expectation) -> str:
    """Return how much memory a job takes; raise ConfigError where there is less."""
    free, text = free_memory(), f"about {_gb(expected.memory)} here"
    if free is None:
        return text
    if expected.memory > free:
        raise ConfigError(
            f"{text}, and {_gb(free)} are free: end other programs, take a machine with more, or fewer rows, columns "
            "or bins (max_bin)"
        )
    return f"{text}, of {_gb(free)} free"


def check_store(job: Job, name: str, expected: Expectation) -> str:
    """Return how much of its store a job takes; raise ConfigError where there is less room."""
    store = store_of(job, name)
    text = f"{_mb(expected.kept)} kept for later jobs in {store}"
    folder = next((of for of in (Path(str(store)), *Path(str(store)).absolute().parents) if of.exists()), None)
    if store is None or folder is None:
        return "nothing is kept for later jobs"
    free = shutil.disk_usage(folder).free
    if expected.kept > free:
        raise ConfigError(f"{text}, and {_mb(free)} are free: make room, or name another folder as store")
    return text


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


def _expected(job: Job, roles: Roles, own: Any, common: Any, shape: Shape) -> Expected:
    found = job.system.expected(roles, own, common, shape)
    if job.align is not None:
        add_alignment(found, roles, job.align.psi, shape)
    return found


def _shape(job: Job, roles: Roles, name: str, table: Table | None, common: Any, stated: Sizes) -> tuple[Shape, str]:
    """Return the sizes of a job's tables as far as a party knows them, and in words what it takes for the rest."""
    rows, columns, slots = (ROWS, COLUMNS, _slots(COLUMNS, common)) if table is None else _sizes(table, common)
    threads = job.n_jobs or len(os.sched_getaffinity(0))
    alike = job.by_row or table is None
    others = (columns, slots) if alike else (COLUMNS, _slots(COLUMNS, common))
    sizes = {owner: (columns, slots) if owner == name else stated.get(owner, others) for owner in roles.owners}
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
    text = [f"{rows:,} rows and {columns} columns here"]
    text += [f"as {owner} says, about {of[0]} columns in {of[1]} bins there" for owner, of in stated.items()]
    if not stated.keys() >= sizes.keys() - {name}:
        text.append(f"taken for each {'further' if stated else 'other'} party: {COLUMNS} columns")
    return shape, "; ".join(text) + common_rows


def _sizes(table: Table, common: Any) -> tuple[int, int, int]:
    """Return a table's rows, columns as they are trained on, and slots in a histogram."""
    names = table.schema.names
    if isinstance(common, BoostingOptions):
        return table.n_rows, len(names), int(fit_bins(table, common.most_bins, 1).offsets[-1])
    prepared = len(preparation_of(table).names(names, table.schema.categories))
    return table.n_rows, prepared, prepared


def _slots(columns: int, common: Any, bins: int = 256) -> int:
    return columns * (min(bins, common.most_bins) + 1) if isinstance(common, BoostingOptions) else columns


def _sized(shape: Shape, name: str, stated: Sizes, size: tuple[int, int], common: Any) -> Shape:
    """Return the sizes with so many columns, of so many bins, at each other party that has not stated its own."""
    unknown = [owner for owner in shape.columns if owner != name and owner not in stated]
    columns, slots = dict.fromkeys(unknown, size[0]), dict.fromkeys(unknown, _slots(size[0], common, size[1]))
    return replace(shape, columns={**shape.columns, **columns}, slots={**shape.slots, **slots})


def _traffic(found: Expected, name: str) -> tuple[float, float]:
    """Return the bytes that a party sends and receives."""
    sent = sum(nbytes for (sender, _), nbytes in found.sent.items() if sender == name)
    return sent, sum(nbytes for (_, receiver), nbytes in found.sent.items() if receiver == name)


def _mb(nbytes: float) -> str:
    return f"{rounded(nbytes / 1e6)} MB" if nbytes >= 1e5 else f"{rounded(nbytes / 1e3)} kB"


def _gb(nbytes: float) -> str:
    return f"{rounded(nbytes / 1e9)} GB"
