"""Jobs whose parties hold rows of the same columns: training once connected, prediction with nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.compute import cores
from treaty.errors import ConfigError, DataError
from treaty.messaging.certificates import Identity, check_certificate, load_certificate
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart, predict_pooled
from treaty.runs.job import Job
from treaty.runs.rows import labelled, read_rows, text_columns
from treaty.systems.federboost_horizontal.noise import noise_ledger
from treaty.systems.federboost_horizontal.roles import check_members, lead, participate
from treaty.systems.horizontal.members import Vouching
from treaty.systems.pooled.training import Labelled, Progress


def participants(job: Job) -> list[str]:
    """Return who brings training rows, in the job's order.

    Raises
    ------
    ConfigError
        When a party other than the leader brings none, or they are too few for sums to hide anything.
    """
    without = [name for name, member in job.parties.items() if member.table is None and name != job.active]
    if without:
        raise ConfigError(
            f"expected a table of every party but the active one, got none of {', '.join(without)}: in a horizontal "
            "job parties.NAME.table says who brings rows, in everybody's copy of the file (only one's own is read)"
        )
    members = [name for name, member in job.parties.items() if member.table is not None]
    check_members(job.tree_options(), members)
    return members


def train_on_rows(party: Party, job: Job, *, threads: int, progress: Progress | None, keeper: Keeper) -> ModelPart:
    """Read a connected party's tables and play its role; return the whole model."""
    name, members, own = party.name, participants(job), job.parties[party.name]
    data, classes = (None, None) if own.table is None else read_labelled(job, name, own.table, training=True)
    vouching = pinned_vouching(job, name, members)
    store = job.store or (None if own.table is None else Path(own.table).parent)
    ledger = None if store is None else noise_ledger(job.tree_options(), Path(store), name)
    if name != job.active:
        assert data is not None
        return participate(
            party, data, job.tree_options(), members=members, classes=classes, threads=threads,
            progress=progress, keeper=keeper, vouching=vouching, ledger=ledger,
        )  # fmt: skip
    evals = []
    for number, path in enumerate(own.eval_tables):
        rows, found = read_labelled(job, name, path, like=data)
        evals.append((replace(rows, name=f"eval_{number}"), found))
    every = united([classes, *(found for _, found in evals)], name)
    return lead(
        party, None if data is None else renumbered(data, classes, every), job.tree_options(),
        members=members, classes=every, eval_sets=[renumbered(rows, found, every) for rows, found in evals],
        threads=threads, progress=progress, keeper=keeper, vouching=vouching, ledger=ledger,
    )  # fmt: skip


def predict_rows(job: Job, name: str, part: ModelPart, path: str) -> NDArray[np.float64]:
    """Predict a party's own rows with the whole model; return margins (n_rows, n_outputs)."""
    return predict_pooled([part], [read_rows(job, name, path, part.schema).features], cores(job.n_jobs))


def read_labelled(
    job: Job, name: str, path: str, *, training: bool = False, like: Labelled | None = None
) -> tuple[Labelled, list[Any] | None]:
    """Read a table with labels; return it with the classes it has, text being text where it is in the table `like`."""
    rows = read_rows(job, name, path, text=() if like is None else text_columns(like.table.schema))
    return labelled(rows, job, name, path, None, training=training)


def united(kinds: list[list[Any] | None], name: str) -> list[Any] | None:
    """Return the classes of a party's tables, which need not all be in each of them; None for a regression."""
    found = {label for classes in kinds for label in classes or ()}
    if len({isinstance(label, str) for label in found}) > 1:
        raise DataError(f"{name}: expected labels of one kind in all tables (numbers, or text), got both")
    return sorted(found) or None


def renumbered(data: Labelled, own: list[Any] | None, classes: list[Any] | None) -> Labelled:
    """Return a table whose labels are numbers of all classes, not of its own."""
    if own is None or classes is None or own == classes:
        return data
    return replace(data, y=np.searchsorted(classes, own).astype(np.float64)[data.y.astype(np.intp)])


def pinned_vouching(job: Job, name: str, members: list[str]) -> Vouching:
    """Return the pinned certificates of all members of sums, and what a party vouches for its own keys with."""
    own = job.parties[name]
    pinned = {who: load_certificate(str(job.parties[who].certificate)) for who in members}
    for who, certificate in pinned.items():
        check_certificate(certificate, who)
    if own.key is None or own.certificate is None:
        raise ConfigError(f"to run as {name} the job must name parties.{name}.key and parties.{name}.certificate")
    return Vouching(Identity(Path(own.key).read_bytes(), load_certificate(own.certificate)), pinned)
