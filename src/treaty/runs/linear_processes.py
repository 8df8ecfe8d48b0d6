"""Every party of a logistic regression on this machine, each in a process of its own, for `transport="grpc"`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.sources import write_columns
from treaty.data.table import Table
from treaty.messaging.certificates import check_names
from treaty.models.linear import LinearPart, label_holder
from treaty.runs.job import Job, Member
from treaty.runs.linear_jobs import find_linear_part
from treaty.runs.linear_threads import coordinator_name
from treaty.runs.processes import LABEL, predict_margins, run_all, traffic_of
from treaty.runs.threads import Traffic
from treaty.systems.linear_options import LinearOptions
from treaty.systems.pooled.training import Labelled


def train_linear_in_processes(
    tables: Mapping[str, Table],
    data: Labelled,
    active: str,
    classes: list[Any],
    options: LinearOptions,
    n_jobs: int | None,
    progress: Callable[[list[float]], None],
    kept: Path | None,
) -> tuple[dict[str, LinearPart], Traffic]:
    """Train with every party in a process of its own; return their parts and the traffic."""
    check_names(tables)  # which those of files are made of
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        parties = {}
        for party, table in tables.items():
            write_columns(folder / f"{party}.arrow", table, {LABEL: data.y} if party == active else {})
            parties[party] = Member(table=str(folder / f"{party}.arrow"))
        lead = coordinator_name(tables, options)
        if lead is not None:
            parties[lead] = Member(role="coordinator")
        job = Job(
            name="fit", active=active, label=LABEL, parties=parties, options=msgspec.structs.asdict(options),
            output=str(folder / "model"), store=None if kept is None else str(kept.resolve()), n_jobs=n_jobs,
        )  # fmt: skip
        run_all(job, "train", progress=True)
        parts = {party: find_linear_part(job, party) for party in tables}
        parts[active].classes = classes  # the processes saw numbers
        progress(parts[active].losses)
        return parts, traffic_of(job)


def predict_linear_in_processes(
    parts: Mapping[str, LinearPart], tables: Mapping[str, Table], options: LinearOptions, n_jobs: int | None
) -> NDArray[np.float64]:
    """Predict with every party in a process of its own; return the margins (n_rows,)."""
    active = label_holder(parts.values()).party
    return predict_margins(parts, tables, active, msgspec.structs.asdict(options), n_jobs)
