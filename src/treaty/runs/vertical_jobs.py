"""Jobs whose parties hold columns of the same rows: training once connected, the rows aligned first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper, noise_folder
from treaty.models.trees import ModelPart
from treaty.privacy.ledger import Ledger
from treaty.runs.job import Job
from treaty.runs.rows import labelled, open_rows, with_noisy_labels
from treaty.systems.pooled.training import Progress
from treaty.systems.vertical.by_name import train_active, train_passive

Phase = Callable[[str, int, int], None]
"""Called with what is being done, steps done and steps in all."""


def order_file(job: Job, name: str) -> Path:
    """Return where the common order of a party's rows is kept, for a training that goes on."""
    return Path(job.output) / f"{name}.rows"


def train_on_columns(
    party: Party,
    job: Job,
    *,
    threads: int,
    progress: Progress | None,
    keeper: Keeper,
    resume: bool,
    phase: Phase | None,
) -> tuple[ModelPart, dict[str, float]]:
    """Read a connected party's tables, align them with the others', and play its role.

    Returns
    -------
    part : ModelPart
    seconds : dict
        That aligning took, where rows were aligned.
    """
    begun = time.perf_counter()
    name, options = party.name, job.tree_options()
    member, training = job.parties[name], str(job.parties[name].table)
    store = Path(job.store or Path(training).parent)
    aligning, hinting = (None, None) if phase is None else (partial(phase, "aligning"), partial(phase, "hints"))
    kept = order_file(job, name)
    rows = open_rows(party, job, training, None, threads=threads, kept=kept, again=resume, progress=aligning)
    seconds = {} if job.align is None else {"alignment": time.perf_counter() - begun}
    data, classes = labelled(rows, job, name, training, None, training=True)
    if name == job.active and options.mechanism == "label_rr":
        noisy = member.noisy_labels or f"{training}.noisy_labels"
        data, classes = with_noisy_labels(data, rows, job, noisy, options, Ledger(noise_folder(store, name)))
    evals = []
    for number, path in enumerate(member.eval_tables):
        watched = open_rows(party, job, path, data.table.schema, threads=threads, progress=aligning)
        evals.append(replace(labelled(watched, job, name, path, classes, training=False)[0], name=f"eval_{number}"))
    if name == job.active:
        part = train_active(
            party, data, options, parties=job.owners, classes=classes, eval_sets=evals, threads=threads,
            progress=progress, keeper=keeper, kept=store, hinting=hinting, dealer=job.dealer,
        )  # fmt: skip
    else:
        part = train_passive(
            party, data.table, options, eval_tables=[e.table for e in evals], row_numbers=rows.order,
            threads=threads, progress=progress, keeper=keeper, kept=store, hinting=hinting, dealer=job.dealer,
        )  # fmt: skip
    return part, seconds
