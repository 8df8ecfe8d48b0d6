"""A party's rows in a job: aligned with the other parties' rows, and put together with labels and eval sets.

The order that an alignment finds is kept, so that a resumed training has the same rows in the same order.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from treaty.data.binning import joined_categories
from treaty.data.ids import by_id, canonical_ids, kind_of_ids, read_ids
from treaty.data.table import Schema, Table
from treaty.errors import NOTED, ConfigError, DataError
from treaty.files import Format, read_file, write_file
from treaty.machine.process import cores
from treaty.messaging.messages import Message, leaks
from treaty.messaging.party import Party
from treaty.models.checkpoints import ledger_folder
from treaty.models.trees import ModelPart, load_part
from treaty.privacy.ledger import EpsilonLimits, Ledger, RunLog
from treaty.runs.job import Job, TableRules, store_of
from treaty.runs.table_files import (
    FileRead,
    FileRows,
    features_of,
    labelled,
    read_rows,
    text_columns,
    with_noisy_labels,
)
from treaty.runs.table_files import read_file as read_table_file
from treaty.systems.alignment.alignment import AlignmentOptions, align_active, align_passive
from treaty.systems.alignment.leakage import report_shared
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import LabelledRows, Phase, Roles

FORMAT = Format("rows", 2)
logger = getLogger(__name__)


@leaks("the number of the common row order", "control")
class RowOrder(Message):
    """The number of the common row order: a new one that alignment makes now, or (`again`) one that all have kept."""

    number: str
    again: bool


class KeptRows(msgspec.Struct):
    """Own rows in the common order with this number; `ids` is the SHA-256 of the file's column of ids."""

    number: str
    ids: bytes
    rows: NDArray[np.int64]


def alignment_of(job: Job, name: str, path: str) -> AlignmentOptions | None:
    """Return how the rows of a party's file are aligned; None: they are in the same order in all tables."""
    align = job.align
    if align is None:
        return None
    # without a log, runs are counted, and so limited, in the folder of files for later jobs
    counted = (store_of(job, name) or Path(path).parent) / f"{name}.runs"
    file = Path(align.log) / f"{name}.runs" if align.log else counted
    log = RunLog(file, max_runs=align.max_runs)
    return AlignmentOptions(psi=align.psi, log=log, commits=align.log is not None, threads=cores(job.n_jobs))


def open_rows(
    party: Party,
    job: Job,
    roles: Roles,
    path: str,
    schema: Schema | None,
    *,
    kept: Path | None = None,
    again: bool = False,
    in_order: bool = False,
    phase: Phase | None = None,
    read: FileRead | None = None,
) -> FileRows:
    """Read a party's file, unless it is `read` already, and align its rows with the other owners' rows.

    The other owners do the same at the same time. `schema` is that of training; None in training. `kept` is the file
    of the common order, for a later run: if the active party has `again` set, all take that order instead of aligning
    once more. With `in_order`, aligned rows are sorted by their ids, so that every job on them has the same order.
    """
    rules, alignment = job.table_rules(party.name), alignment_of(job, party.name, path)
    arrow, checked = read or read_table_file(rules, path, schema)
    if checked is not None:
        return FileRows(arrow, checked, arrow)
    if alignment is None or rules.id is None:
        return FileRows(arrow, features_of(arrow, rules, path, schema), arrow)
    column, whole, digest = arrow[rules.id], arrow, None
    everyone = party.peers
    # rows are aligned by the active party and the other owners, in pairs with it
    for peer in everyone:
        if peer not in roles.owners or roles.active not in (party.name, peer):
            party.set_aside(peer)
    order = _common_rows(party, rules, column, alignment, kept, again, phase)
    party.peers = everyone
    if in_order:
        place, digest = by_id(column.take(pa.array(order)), party=party.name, normalise=rules.align.normalise)
        order = order[place]
    ids = column.take(pa.array(order))
    canonical = partial(canonical_ids, ids, party=party.name, normalise=rules.align.normalise)
    ids_of = repr((rules.id, kind_of_ids(ids), sorted(rules.align.normalise)))
    arrow = arrow.drop_columns([rules.id]).take(pa.array(order))
    return FileRows(arrow, features_of(arrow, rules, path, schema), whole, order, ids, digest, canonical, ids_of)


def _common_rows(
    party: Party,
    rules: TableRules,
    column: Any,
    alignment: AlignmentOptions,
    kept: Path | None,
    again: bool,
    phase: Phase | None,
) -> NDArray[np.int64]:
    """Return own rows in the common order: the kept one, if the active party decides so, or a new one."""
    # SHA-256 of the ids in the file's order: a kept order belongs to a file with just these
    sink, table = pa.BufferOutputStream(), pa.table({"ids": column}).combine_chunks()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    digest, leads = hashlib.sha256(sink.getvalue()).digest(), party.name == rules.job.active
    found = read_file(kept, KeptRows, FORMAT, party.name) if kept is not None and kept.exists() else None
    if found is not None and found.ids != digest:
        found = None
    if leads:
        again = again and found is not None
        order = RowOrder(found.number if again and found is not None else secrets.token_hex(16), again)
        for peer in party.peers:
            party.send(peer, order)
    else:
        order = party.receive(rules.job.active, RowOrder)
    if order.again:
        if found is None or found.number != order.number:
            raise ConfigError(
                f"{party.name}: cannot resume: expected alignment {order.number[:8]}, made with the ids the table has "
                f"now - at {kept}; restore the table, or start again without --resume",
                public="it cannot resume: it has not kept the alignment, or its ids have changed",
            )
        return found.rows
    ids = read_ids(column, party=party.name, normalise=rules.align.normalise, on_duplicate=rules.align.on_duplicate)
    if phase is not None:
        alignment = replace(alignment, progress=partial(phase, f"aligning {len(ids)} ids in padded lists"))
    aligned = (align_active if leads else align_passive)(party, ids, alignment)
    report_shared(party.name, aligned, logger.warning, partial(logger.log, NOTED))
    if kept is not None:
        write_file(kept, KeptRows(order.number, digest, aligned.rows), FORMAT, party.name)
    return aligned.rows


@dataclass(frozen=True, slots=True)
class TrainingTables:
    """A party's tables in a training: rows, classes and eval sets as of `RoleInput`."""

    data: LabelledRows | None = None
    classes: list[Any] | None = None
    eval_sets: list[LabelledRows] = field(default_factory=list)
    # in the party's own file, if its rows were aligned
    n_rows: int | None = None
    # that aligning took
    seconds: dict[str, float] = field(default_factory=dict)


def joined_in(common: Any, table: Table) -> list[str]:
    """Return a sentence for every column of a training table of which categories share a bin."""
    return joined_categories(table, common.most_categories) if isinstance(common, BoostingOptions) else []


def order_file(job: Job, name: str) -> Path:
    """Return the file of the common order of a party's rows, for a training that is resumed."""
    return Path(job.output) / f"{name}.rows"


def earlier_part(job: Job, name: str) -> ModelPart | None:
    """Return a party's part of the model that training goes on from; None for a new model."""
    return None if job.from_model is None else load_part(Path(job.from_model) / f"{name}.part", name)


def read_by_column(
    party: Party, job: Job, roles: Roles, read: FileRead, *, resume: bool, phase: Phase | None
) -> TrainingTables:
    """Align the rows of a connected owner, which has `read` its table, as the job says; add labels and eval sets."""
    began, name, system, earlier = time.perf_counter(), party.name, job.system, earlier_part(job, party.name)
    own, member, rules = job.settings()[0], job.parties[name], job.table_rules(name)
    path = str(member.table)
    rows = open_rows(
        party, job, roles, path, None if earlier is None else earlier.schema,
        kept=None if "resume" in system.cannot else order_file(job, name),
        again=resume, in_order=system.orders_by_id, phase=phase, read=read,
    )  # fmt: skip
    known = None if earlier is None or earlier.forest is None else earlier.forest.classes
    seconds = {} if job.align is None else {"alignment": time.perf_counter() - began}
    data, classes = labelled(rows, rules, path, known, job.weight)
    classifies = system.common.table in ("regression", "columns") and job.task == "classification"
    if name == job.active and classifies and len(classes or ()) != job.classes:
        expected = "two" if job.classes == 2 else job.classes
        raise DataError(
            f"{name}: expected labels of {expected} classes in column {job.label!r}, got {len(classes or ())} "
            f"different ones in {len(data.y)} rows"
        )
    if name == job.active and own.label_epsilon is not None:
        noisy, store = member.noisy_labels or f"{path}.noisy_labels", store_of(job, name)
        assert store is not None, "a party with labels has a table"
        limits = EpsilonLimits(member.most_epsilon, member.most_epsilon_total)
        ledger = Ledger(ledger_folder(store, name, "noise"), limits)
        data, classes = with_noisy_labels(data, rows, rules, noisy, own, ledger, job.name)
    data = replace(data, ids=rows.canonical, ids_of=rows.ids_of, numbers=rows.order, digest=rows.digest)
    evals = []
    for number, of_set in enumerate(member.eval_tables):
        watched = open_rows(party, job, roles, of_set, data.table.schema, phase=phase)
        of_eval = labelled(watched, rules, of_set, classes, job.eval_weight)[0]
        evals.append(replace(of_eval, name=f"eval_{number}", ids=watched.canonical, ids_of=watched.ids_of))
    n_rows = None if job.align is None else int(rows.whole.num_rows)
    return TrainingTables(data, classes, evals, n_rows, seconds)


def read_by_row(job: Job, name: str, roles: Roles) -> TrainingTables:
    """Read a party's labelled rows, and its eval sets; classes are those of all its tables.

    A server without training rows has example rows, in its table or else the first eval set, that define the columns
    and classes.
    """
    member, rules, trains = job.parties[name], job.table_rules(name), name in roles.owners
    examples = roles.of[name] in job.system.shows_columns
    watched = member.eval_tables if name == job.active else []
    paths = [*([] if member.table is None else [member.table]), *watched]
    if not paths:
        return TrainingTables()

    def read(path: str, text: list[str] | None = None) -> tuple[LabelledRows, Any]:
        examples_only = path == member.table and not trains
        weight = None if examples_only else job.weight if path == member.table else job.eval_weight
        return labelled(read_rows(rules, path, text=text or ()), rules, path, None, weight)

    # the first table defines which columns are text, so that categories of all tables are of one kind
    first = read(paths[0])
    as_first = text_columns(first[0].table.schema)
    tables = [first, *(read(path, text=as_first) for path in paths[1:])]
    # eval sets of a leader without rows need not have the same columns
    if member.table is None and not examples:
        tables = [read(path) for path in paths]
    # a table may lack some of the classes
    found = {label for _, own in tables for label in own or ()}
    if len({isinstance(label, str) for label in found}) > 1:
        raise DataError(f"{name}: expected labels of one kind in all tables (numbers, or text), got both")
    classes = sorted(found) or None
    if examples and classes is not None and len(classes) < 2:
        raise DataError(f"{name}: expected labels of at least two classes in its tables, got one, {classes[0]!r}")
    numbered = []
    for rows, own in tables:
        if own is not None and classes is not None and own != classes:
            # labels number the classes of one table so far; now those of all tables
            rows = replace(rows, y=np.searchsorted(classes, own).astype(np.float64)[rows.y.astype(np.intp)])
        numbered.append(rows)
    evals = numbered[len(numbered) - len(watched) :]
    data = numbered[0] if member.table is not None or examples else None
    return TrainingTables(data, classes, [replace(rows, name=f"eval_{k}") for k, rows in enumerate(evals)])
