"""What `treaty train` and `treaty predict` do for a job of logistic regression."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from treaty.compute import keep_to
from treaty.data.sources import write_predictions
from treaty.errors import ConfigError
from treaty.linear.losses import beyond_taylor, probabilities
from treaty.runs.job import Job, id_column
from treaty.runs.linear_jobs import (
    check_identities,
    find_linear_part,
    predict_linear_party,
    train_linear_party,
)
from treaty.runs.party import part_file
from treaty.runs.processes import run_all
from treaty.runs.progress import steps_bar
from treaty.runs.report import load_reports
from treaty.systems.logistic.setup import check_roles


def train_linear(console: Console, job: Job, party: str | None, *, resume: bool, cores: str | None) -> None:
    """Train: all parties in processes on this machine, or one of them, kept to some cores."""
    options = job.linear_options()
    if resume:
        raise ConfigError("a logistic regression is begun anew, and takes the batches of before; leave --resume out")
    check_roles(options, job.active, job.owners, job.coordinator)
    check_identities(job)
    if party is None:
        run_all(job, "train", progress=True)
        for name, report in load_reports(job).items():
            sent = sum(totals["bytes"] for totals in report.sent.values()) / 1e6
            took = f"{sum(report.seconds.values()):.1f} s, {sent:.1f} MB sent"
            made = "took part" if name == job.coordinator else part_file(job.output, name)
            console.print(f"{name}: {made}  ({took})", soft_wrap=True)
        console.print("What each party learned is in the .report.json files beside them.")
        return
    if cores is not None:
        keep_to([int(number) for number in cores.split(",")])
    with steps_bar(party, shown=party == job.active) as steps:
        part = train_linear_party(job, party, lambda losses: steps(len(losses), options.max_iter))
    if part is None:
        console.print(f"{party}: took part, and has no part of the model")
        return
    losses = f", loss {part.losses[-1]:.6f} after {len(part.losses)} epochs" if part.losses else ""
    console.print(f"{party}: {len(part.coef)} weights in {part_file(job.output, party)}{losses}", soft_wrap=True)


def predict_linear(console: Console, job: Job, party: str | None, path: Path, margins: Path | None) -> None:
    """Predict: all data parties in processes on this machine, or one of them."""
    if party is None:
        run_all(job, "predict", arguments=["--output", str(path.resolve())])
        console.print(f"predictions: {path}", soft_wrap=True)
        return
    ids, found = predict_linear_party(job, party)
    if found is None:
        return
    if margins is not None:
        np.save(margins, found)
        return
    classes = find_linear_part(job, party).classes or []
    columns = {} if ids is None else {id_column(job, party): ids}
    p = probabilities(found)
    columns |= {"prediction": np.array(classes)[(found > 0.0).astype(np.intp)]}
    columns |= {f"probability_{name}": of for name, of in zip(classes, (1.0 - p, p), strict=True)}
    write_predictions(path, columns)
    said = beyond_taylor(found)
    if said is not None:
        print(f"treaty: {said}", file=sys.stderr)
