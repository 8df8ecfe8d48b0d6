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
from treaty.job_file import Job, Member
from treaty.jobs import load_reports, part_file
from treaty.linear_jobs import find_linear_part
from treaty.linear_models import LinearPart, label_holder
from treaty.linear_options import LinearOptions
from treaty.linear_simulation import coordinator_name
from treaty.processes import run_all
from treaty.protocols.pooled import Labelled
from treaty.simulation import Traffic

_LABEL = "__label__"


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
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        parties = {}
        for party, table in tables.items():
            write_columns(folder / f"{party}.arrow", table, {_LABEL: data.y} if party == active else {})
            parties[party] = Member(table=str(folder / f"{party}.arrow"))
        lead = coordinator_name(tables, options)
        if lead is not None:
            parties[lead] = Member(role="coordinator")
        job = Job(
            name="fit", active=active, label=_LABEL, parties=parties, options=msgspec.structs.asdict(options),
            output=str(folder / "model"), store=None if kept is None else str(kept.resolve()), n_jobs=n_jobs,
        )  # fmt: skip
        run_all(job, "train", progress=True)
        parts = {party: find_linear_part(job, party) for party in tables}
        parts[active].classes = classes  # the processes saw numbers
        progress(parts[active].losses)
        reports = load_reports(job)
        sent = {f"{party} -> {peer}": of for party, report in reports.items() for peer, of in report.sent.items()}
        return parts, Traffic(sent, reports[active].seconds)


def predict_linear_in_processes(
    parts: Mapping[str, LinearPart], tables: Mapping[str, Table], options: LinearOptions, n_jobs: int | None
) -> NDArray[np.float64]:
    """Predict with every party in a process of its own; return the margins (n_rows,)."""
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        for party, part in parts.items():
            write_columns(folder / f"{party}.arrow", tables[party], {})
            part.save(part_file(folder, party))
        members = {party: Member(predict_table=str(folder / f"{party}.arrow")) for party in parts}
        job = Job(
            name="predict", active=label_holder(parts.values()).party, label=_LABEL, parties=members,
            options=msgspec.structs.asdict(options), output=str(folder), n_jobs=n_jobs,
        )  # fmt: skip
        margins = folder / "margins.npy"
        run_all(job, "predict", arguments=["--margins", str(margins)])
        return np.asarray(np.load(margins, allow_pickle=False))
