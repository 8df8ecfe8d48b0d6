"""A party's tables of a training job, read as its role needs them: split by column, or by row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import joined_categories
from treaty.data.table import Table
from treaty.errors import ConfigError, DataError
from treaty.messaging.certificates import check_certificate, load_certificate, load_identity
from treaty.messaging.party import Party
from treaty.models.checkpoints import noise_folder
from treaty.privacy.ledger import Ledger
from treaty.runs.job import Job, store_of
from treaty.runs.rows import FileRead, labelled, open_rows, read_rows, text_columns, with_noisy_labels
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import LabelledRows, Phase, Roles, Signer


@dataclass(frozen=True, slots=True)
class TrainingTables:
    """What a party has read for a training; the fields are those of `RoleInput`, `seconds` what aligning took."""

    data: LabelledRows | None = None
    classes: list[Any] | None = None
    eval_sets: list[LabelledRows] = field(default_factory=list)
    row_numbers: NDArray[np.int64] | None = None
    rows_digest: bytes | None = None
    n_rows: int | None = None  # of the party's own file, where its rows were aligned
    seconds: dict[str, float] = field(default_factory=dict)


def joined_in(job: Job, table: Table) -> list[str]:
    """Return a sentence for every column of a party's training table of which categories share a bin."""
    common = job.settings()[1]
    return joined_categories(table, common.most_bins) if isinstance(common, BoostingOptions) else []


def order_file(job: Job, name: str) -> Path:
    """Return where the common order of a party's rows is kept, for a training that goes on."""
    return Path(job.output) / f"{name}.rows"


def read_by_column(
    party: Party, job: Job, roles: Roles, read: FileRead, *, threads: int, resume: bool, phase: Phase | None
) -> TrainingTables:
    """Align a connected owner's columns, which it has `read`, with the others' rows where the job says so."""
    began = time.perf_counter()
    name, system, (own, _) = party.name, job.system, job.settings()
    member, path = job.parties[name], str(job.parties[name].table)
    with among_owners(party, roles):
        rows = open_rows(
            party, job, path, None, threads=threads, kept=None if "resume" in system.cannot else order_file(job, name),
            again=resume, in_order=system.orders_by_id, phase=phase, read=read,
        )  # fmt: skip
    seconds = {} if job.align is None else {"alignment": time.perf_counter() - began}
    data, classes = labelled(rows, job, name, path, None, training=True)
    classifies = system.common.table == "regression" and job.task == "classification"
    if name == job.active and classifies and len(classes or ()) != job.classes:
        expected = "two" if job.classes == 2 else job.classes
        raise DataError(
            f"{name}: expected labels of {expected} classes in column {job.label!r}, got {len(classes or ())} "
            f"different ones in {len(data.y)} rows"
        )
    if name == job.active and own.label_epsilon is not None:
        noisy = member.noisy_labels or f"{path}.noisy_labels"
        store = store_of(job, name)
        assert store is not None
        ledger = Ledger(noise_folder(store, name), member.epsilon_limits)
        data, classes = with_noisy_labels(data, rows, job, noisy, own, ledger)
    evals = []
    for number, of_set in enumerate(member.eval_tables):
        with among_owners(party, roles):
            watched = open_rows(party, job, of_set, data.table.schema, threads=threads, phase=phase)
        evals.append(replace(labelled(watched, job, name, of_set, classes, training=False)[0], name=f"eval_{number}"))
    n_rows = None if job.align is None else int(rows.whole.num_rows)
    return TrainingTables(data, classes, evals, rows.order, rows.digest, n_rows, seconds)


@contextmanager
def among_owners(party: Party, roles: Roles) -> Iterator[None]:
    """Let the active party speak with every other owner, and these with it alone, as alignment has it."""
    everyone = party.peers
    for peer in everyone:
        if peer not in roles.owners or roles.active not in (party.name, peer):
            party.set_aside(peer)
    yield
    party.peers = everyone


def read_by_row(job: Job, name: str, roles: Roles) -> TrainingTables:
    """Read a party's labelled rows, and its eval sets; classes are those of all its tables.

    A server without training rows has example rows, its table or else the first eval set, that say which columns and
    classes there are.
    """
    member, trains = job.parties[name], name in roles.owners
    examples = roles.of[name] in job.system.shows_columns
    watched = member.eval_tables if name == job.active else []
    paths = [*([] if member.table is None else [member.table]), *watched]
    if not paths:
        return TrainingTables()
    first = read_labelled(job, name, paths[0], training=trains)
    tables = [first, *(read_labelled(job, name, path, like=first[0]) for path in paths[1:])]
    if member.table is None and not examples:  # sets of a leader without rows need not have the same columns
        tables = [read_labelled(job, name, path) for path in paths]
    classes = united([own for _, own in tables], name)
    if examples and classes is not None and len(classes) < 2:
        raise DataError(f"{name}: expected labels of at least two classes in its tables, got one, {classes[0]!r}")
    numbered = [renumbered(rows, own, classes) for rows, own in tables]
    evals = numbered[len(numbered) - len(watched) :]
    data = numbered[0] if member.table is not None or examples else None
    return TrainingTables(data, classes, [replace(rows, name=f"eval_{k}") for k, rows in enumerate(evals)])


def read_labelled(
    job: Job, name: str, path: str, *, training: bool = False, like: LabelledRows | None = None
) -> tuple[LabelledRows, list[Any] | None]:
    """Read a table with labels; return it with the classes it has, text being text where it is in the table `like`."""
    rows = read_rows(job, name, path, text=() if like is None else text_columns(like.table.schema))
    return labelled(rows, job, name, path, None, training=training)


def united(kinds: list[list[Any] | None], name: str) -> list[Any] | None:
    """Return the classes of a party's tables, which need not all be in each of them; None for a regression."""
    found = {label for classes in kinds for label in classes or ()}
    if len({isinstance(label, str) for label in found}) > 1:
        raise DataError(f"{name}: expected labels of one kind in all tables (numbers, or text), got both")
    return sorted(found) or None


def renumbered(data: LabelledRows, own: list[Any] | None, classes: list[Any] | None) -> LabelledRows:
    """Return a table whose labels are numbers of all classes, not of its own."""
    if own is None or classes is None or own == classes:
        return data
    return replace(data, y=np.searchsorted(classes, own).astype(np.float64)[data.y.astype(np.intp)])


def pinned_vouching(job: Job, name: str, members: list[str]) -> Signer:
    """Return the pinned certificates of these parties, and what a party vouches for its own keys with."""
    own = job.parties[name]
    pinned = {who: load_certificate(str(job.parties[who].certificate)) for who in members}
    for who, certificate in pinned.items():
        check_certificate(certificate, who)
    if own.key is None or own.certificate is None:
        raise ConfigError(f"to run as {name} the job must name parties.{name}.key and parties.{name}.certificate")
    return Signer(load_identity(own.key, own.certificate, name), pinned)
