"""Alignment between threads, and the plain join that it is to equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from treaty.data.ids import read_ids
from treaty.messaging.party import Party
from treaty.privacy.ledger import RunLog
from treaty.runs.threads import RunRecord, play, star
from treaty.systems.alignment.alignment import Alignment, AlignmentOptions, align_active, align_passive

BATCH = 16
Columns = dict[str, list[Any]]


def run(columns: Columns, *, logs: Path | None = None, max_runs: int = 20, **options: Any) -> RunRecord:
    """Align; the first party is the active one. Options `read_*` go to reading the ids."""
    lead = next(iter(columns))
    reading = {name: options.pop(name) for name in ("normalise", "on_duplicate") if name in options}
    per_party = options.pop("per_party", {})

    def role(name: str) -> Callable[[Party], Alignment]:
        log = None if logs is None else RunLog(logs / f"{name}.runs", max_runs=max_runs)
        own = {"batch": BATCH, "log": log, **options, **per_party.get(name, {})}
        align = align_active if name == lead else align_passive
        return lambda party: align(party, read_ids(columns[name], party=name, **reading), AlignmentOptions(**own))

    return play(
        {name: role(name) for name in columns}, star(lead, columns),
        job="test", protocol="alignment", timeout=20, record_content=True,
    )  # fmt: skip


def joined(columns: Columns, **options: Any) -> list[tuple[Any, ...]]:
    """Rows of the joined table as tuples of row numbers, in the common order."""
    results = run(columns, **options).results
    return list(zip(*(results[name].rows.tolist() for name in columns), strict=True))


def plain_join(columns: Columns, key: Callable[[Any], Any] = lambda value: value) -> list[tuple[int, ...]]:
    rows: list[tuple[Any, tuple[int, ...]]] = [
        (key(value), (row,)) for row, value in enumerate(next(iter(columns.values()))) if value is not None
    ]
    for column in list(columns.values())[1:]:
        rows = [
            (value, (*before, row)) for value, before in rows for row, other in enumerate(column) if key(other) == value
        ]
    return sorted(row for _, row in rows)
