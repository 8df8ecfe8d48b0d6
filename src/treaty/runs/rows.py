"""A party's rows of a job: read from its file, aligned with the others', checked."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from treaty.data.arrow_tables import as_text, changed, has_values, numbers
from treaty.data.columns import check_labels, check_weights, quoted
from treaty.data.ids import by_id, canonical_ids, read_ids
from treaty.data.number_text import typed_ids, widths
from treaty.data.reading import checked_columns, file_without, is_csv, open_table, refuse_absent, refuse_strays
from treaty.data.run_log import RunLog
from treaty.data.table import Schema, Table, check_names, to_table
from treaty.errors import NOTED, ConfigError, DataError
from treaty.files import Format, read_file, write_file
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.privacy.ledger import Ledger
from treaty.runs.job import Job, Member, id_column, store_of
from treaty.systems.alignment.alignment import AlignmentOptions, align_active, align_passive
from treaty.systems.alignment.leakage import report_shared
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.training import check_numbers, check_relevance, noisy_labels
from treaty.systems.system import LabelledRows, Phase

FORMAT = Format("rows", 2)
LISTED = 5  # columns of categories that a line about a table names


class RowOrder(Message):
    """The number of the common row order: a new one that alignment makes now, or (`again`) one that all have kept."""

    leakage: ClassVar = MessageLeakage("which common order of rows is used, by a number", "control")

    number: str
    again: bool


class KeptRows(msgspec.Struct):
    """Own rows in a common order that all parties know by its number; `ids` is SHA-256 of the file's column of ids."""

    number: str
    ids: bytes
    rows: NDArray[np.int64]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rows:
    """A file's rows in the common order.

    `arrow`, a table of arrow or `FileTable`, has all columns but those dropped and the ids, `whole` the file in its own
    order, of which `order`, int64 (n_rows,), are these rows (None: all, in the same order). `ids` and their `digest`
    are there where rows were aligned, and `canonical` then returns the ids in canonical form.
    """

    arrow: Any
    features: Table
    whole: Any
    order: NDArray[np.int64] | None = None
    ids: Any = None
    digest: bytes | None = None
    canonical: Callable[[], list[str]] | None = None


class FileRead(NamedTuple):
    """A file's columns, and the table of features that was checked when it was written, if it was."""

    arrow: Any
    checked: Table | None


def open_rows(
    party: Party,
    job: Job,
    path: str,
    schema: Schema | None,
    *,
    threads: int = 1,
    kept: Path | None = None,
    again: bool = False,
    in_order: bool = False,
    phase: Phase | None = None,
    read: FileRead | None = None,
) -> Rows:
    """Read a party's file, unless it is `read` already; where the job says so, align its rows with the others' first.

    The other parties open the same rows at the same time. `schema` is that of training, None at training. `kept` is
    where the common order is kept for a later run; the active party may take that order `again` instead of aligning
    anew. `in_order` puts aligned rows in the order of their ids, the same in every job on them.
    """
    name, column = party.name, None if job.align is None else id_column(job, party.name)
    arrow, checked = read or _read_columns(job, name, path, schema)
    if checked is not None:
        return Rows(arrow, checked, arrow)
    whole, order, ids, digest, canonical = arrow, None, None, None, None
    if column is not None:
        order = _common_rows(party, job, path, arrow[column], threads, kept, again, phase)
        if in_order and job.align is not None:
            place, digest = by_id(arrow[column].take(pa.array(order)), party=name, normalise=job.align.normalise)
            order = order[place]
        ids = arrow[column].take(pa.array(order))
        canonical = partial(canonical_ids, ids, party=name, normalise=job.align.normalise if job.align else ())
        arrow = arrow.drop_columns([column]).take(pa.array(order))
    return Rows(arrow, _features(arrow, job, name, path, schema), whole, order, ids, digest, canonical)


def read_alone(job: Job, name: str, path: str, *, training: bool) -> tuple[Rows, list[Any] | None]:
    """Read and check a party's file without the others, for a check: rows in its own order, ids and labels checked.

    Labels are looked for in a training table alone; returns the classes, too.
    """
    if job.by_row:
        rows = read_rows(job, name, path)
    else:
        rows = _checked_alone(_read_columns(job, name, path, None), job, name, path)
    return rows, labelled(rows, job, name, path, None, training=True)[1] if training else None


def read_ahead(job: Job, name: str, path: str) -> FileRead:
    """Read a party's training table of a job split by column before it meets the others; errors are as of a check.

    Of rows that are still to be aligned, those that not all have may lack labels.
    """
    read = _read_columns(job, name, path, None)
    rows = _checked_alone(read, job, name, path)
    if job.align is None:
        labelled(rows, job, name, path, None, training=True)
    else:
        _refuse_absent_labels(rows.arrow, job, name, path, weighted=job.weight is not None)
    return read


def read_to_predict(job: Job, name: str, path: str, schema: Schema) -> FileRead:
    """Read a party's rows to predict of a job split by column before it meets the others.

    Columns are checked by name; `schema` is that of training.
    """
    read = _read_columns(job, name, path, schema)
    if read.checked is None:
        check_names(schema, _feature_names(read.arrow, job, name, path), name, path)
    return read


def _checked_alone(read: FileRead, job: Job, name: str, path: str) -> Rows:
    """Check ids and columns of a file in its own order."""
    arrow, checked = read
    if checked is None and job.align is not None:
        column = id_column(job, name)
        read_ids(arrow[column], party=name, normalise=job.align.normalise, on_duplicate=job.align.on_duplicate)
        arrow = arrow.drop_columns([column])
    return Rows(arrow, _features(arrow, job, name, path, None) if checked is None else checked, arrow)


def _read_columns(job: Job, name: str, path: str, schema: Schema | None) -> FileRead:
    """Read a party's file of a job split by column; return its columns, or those that were checked when written."""
    member, column = job.parties[name], None if job.align is None else id_column(job, name)
    text = [*([] if schema is None else text_columns(schema)), *([] if column is None else [column])]
    text = [*text, *(of for of in member.categorical if of not in text)]
    arrow = open_table(
        path, folder=_scratch_of(job), drop=[other for other in member.drop if other != column],
        drop_all=_says_columns(member, path), text=text, party=name,
    )  # fmt: skip
    checked = checked_columns(arrow)
    if checked is not None:
        return FileRead(arrow, checked)
    arrow = _kinds_checked(arrow, job, name, path, schema, without=column)
    if column is not None and column not in arrow.column_names:
        raise DataError(
            f"{name}: expected a column {column!r} of ids, {file_without([column], arrow.column_names)} - at {path}"
        )
    if column is not None and job.align is not None:
        arrow = _with_ids(arrow, column, name, path, text=job.align.text)
    if schema is None:
        _note_columns(arrow, job, name, path, column)
    return FileRead(arrow, None)


def read_rows(job: Job, name: str, path: str, schema: Schema | None = None, *, text: Sequence[str] = ()) -> Rows:
    """Read a party's file of a job split by row: nothing is aligned, and nobody else needed.

    `schema` is the model's, if there is one: of its columns those that the file lacks are missing in all rows. `text`
    are columns that are text even where they look like numbers.
    """
    known = () if schema is None else schema.names
    text = text if schema is None else text_columns(schema)
    member = job.parties[name]
    text = [*text, *(of for of in member.categorical if of not in text)]
    arrow = open_table(
        path, folder=_scratch_of(job), drop=member.drop, drop_all=_says_columns(member, path), text=text, party=name
    )
    checked = checked_columns(arrow)
    if checked is not None:
        return Rows(arrow, checked, arrow)
    arrow = _kinds_checked(arrow, job, name, path, schema)
    if schema is None:
        _note_columns(arrow, job, name, path)
    for column in known:
        if column not in arrow.column_names:
            logger.warning("%s: column %r is missing in all rows, for %s lacks it", name, column, path)
            arrow = arrow.append_column(column, pa.nulls(arrow.num_rows, pa.float32()))
    return Rows(arrow, _features(arrow, job, name, path, schema), arrow)


def _scratch_of(job: Job) -> Path | None:
    """Return where a table goes that is too large for memory: a folder of the store; None: the system's."""
    return None if job.store is None else Path(job.store) / "scratch"


def _kinds_checked(
    arrow: Any, job: Job, name: str, path: str, schema: Schema | None, *, without: str | None = None
) -> Any:
    """Refuse columns of numbers with cells that are none; return the table, its declared categories as text.

    `without` is the column of ids.
    """
    member = job.parties[name]
    extra = labels_of(job, name) if str(path) in (member.table, *member.eval_tables) else []  # not of rows to predict
    if _says_columns(member, path):
        refuse_absent(member.categorical, f"the columns of parties.{name}.categorical", arrow.column_names, path, name)
    arrow = as_text(arrow, member.categorical)
    for of in set(member.categorical) & set(arrow.column_names):
        kind = arrow.schema.field(of).type
        if not (_is_text(kind) or pa.types.is_dictionary(kind)):
            raise DataError(
                f"{name}: expected text, numbers or truth values as categories in {of!r}, got {kind} - at {path}"
            )
    features = [of for of in member.columns or arrow.column_names if of not in (without, *extra, *member.categorical)]
    numeric = [of for of in extra if of == job.weight or (of == job.label and job.task != "classification")]
    if schema is not None:
        numeric += [of for of, kind in zip(schema.names, schema.kinds, strict=True) if kind == "numeric"]
        features = []
    if job.label in extra and job.label not in (*numeric, *member.categorical):
        features = [*features, job.label]  # of classes
    there = set(arrow.column_names)
    refuse_strays(
        arrow, path, name, features=[of for of in features if of in there],
        numeric=[of for of in numeric if of in there], remedy=f"name it in parties.{name}.categorical of the job",
    )  # fmt: skip
    return arrow


def _says_columns(member: Member, path: str) -> bool:
    """Whether a party's columns are this file's; others may lack some that are dropped."""
    return path == (member.table or next(iter(member.eval_tables), None))


def text_columns(schema: Schema) -> list[str]:
    """Return the columns whose cells are text in a file."""
    return [column for column, kind in zip(schema.names, schema.kinds, strict=True) if kind == "categorical"]


def _features(arrow: Any, job: Job, name: str, path: str, schema: Schema | None) -> Table:
    """Check the columns that trees may split on."""
    only_labels = name == job.active and not job.by_row
    table = to_table(
        arrow.select(_feature_names(arrow, job, name, path)),
        party=name,
        schema=schema,
        text_as_categories=True,
        allow_no_features=only_labels,
        on_unseen=logger.warning,
        place=str(path),
    )
    logger.info("%s: %s: %s", name, Path(path).name, describe(table.schema, table.n_rows))
    return table


def _feature_names(arrow: Any, job: Job, name: str, path: str) -> list[str]:
    """Return the columns that trees may split on."""
    without = [*labels_of(job, name), *([] if job.align is None else [id_column(job, name)])]
    wanted = [column for column in job.parties[name].columns or arrow.column_names if column not in without]
    absent = [column for column in wanted if column not in arrow.column_names]
    if job.label in wanted and job.parties[name].columns is None:
        raise DataError(
            f"{name}: column {job.label!r} is called like the label of {job.active}: drop it (parties.{name}.drop) or, "
            f"if it is no label, name all columns to use (parties.{name}.columns) - at {path}"
        )
    if absent:
        raise DataError(
            f"{name}: expected columns {quoted(absent)}, {file_without(absent, arrow.column_names)} - at {path}"
        )
    return wanted


def describe(schema: Schema, n_rows: int) -> str:
    """Say which columns a party's table has numbers in, and which categories, for the party itself."""
    numeric = [name for name, kind in zip(schema.names, schema.kinds, strict=True) if kind == "numeric"]
    categorical = [
        f"{name} ({len(values)} categories)"
        for name, values in zip(schema.names, schema.categories, strict=True)
        if values is not None
    ]
    parts = [f"{what}: {', '.join(names)}" for what, names in (("numbers", numeric), ("text", categorical)) if names]
    return "; ".join([f"{n_rows} rows", *parts])


def counted(n_rows: int, n_numeric: int, categorical: Sequence[str]) -> str:
    """Say in one line how many rows and columns of each kind a table has, and which hold categories."""
    kinds = [f"{n_numeric:,} numeric"] if n_numeric else []
    kinds += [f"{len(categorical):,} categorical"] if categorical else []
    more = f" and {len(categorical) - LISTED} more" if len(categorical) > LISTED else ""
    which = f" ({', '.join(categorical[:LISTED])}{more})" if categorical else ""
    columns = "column" if n_numeric + len(categorical) == 1 else "columns"
    return f"{n_rows:,} rows, {', '.join(kinds) or 'no'} {columns}{which}"


def _note_columns(arrow: Any, job: Job, name: str, path: str, column: str | None = None) -> None:
    """Say what a party's columns, but that of ids, are taken for, and which of them have no value."""
    without = (column, *labels_of(job, name))
    features = [of for of in job.parties[name].columns or arrow.column_names if of not in without]
    there = {of: arrow.schema.field(of).type for of in features if of in arrow.column_names}
    categorical = [of for of, kind in there.items() if _is_text(kind) or pa.types.is_dictionary(kind)]
    found = counted(arrow.num_rows, len(there) - len(categorical), categorical)
    logger.log(NOTED, "%s: %s: %s", name, Path(path).name, found)
    if empty := [of for of in there if not has_values(arrow, of)]:
        logger.warning("%s: %s has no value in any row of %s and cannot help", name, quoted(empty), Path(path).name)


def _with_ids(arrow: Any, column: str, name: str, path: str, *, text: bool) -> Any:
    """Return a table whose ids, text where the file is CSV, are of a kind that keeps what the file says; note which."""
    ids = arrow[column]
    if text:
        ids = ids.cast(pa.string()) if pa.types.is_integer(ids.type) else ids
    elif is_csv(path):
        ids = typed_ids(ids)
    logger.log(NOTED, "%s: %s: ids in %r: %s", name, Path(path).name, column, widths(ids))
    return changed(arrow, column, ids.type, lambda _: ids)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def labels_of(job: Job, name: str) -> list[str]:
    """Return a party's columns that are no features: label, weight and groups, at whoever has labels."""
    if name != job.active and not job.by_row:
        return []
    return [job.label, *([job.weight] if job.weight else []), *([job.group] if job.group else [])]


def _common_rows(
    party: Party,
    job: Job,
    path: str,
    column: Any,
    threads: int,
    kept: Path | None,
    again: bool,
    phase: Phase | None,
) -> NDArray[np.int64]:
    """Return own rows in the common order: that of an earlier run, if the active party says so, or a new one.

    `column` has the ids of the file at `path`.
    """
    digest = _digest(column)
    found = read_file(kept, KeptRows, FORMAT, party.name) if kept is not None and kept.exists() else None
    if found is not None and found.ids != digest:  # the file's rows are others now
        found = None
    if party.name == job.active:
        again = again and found is not None
        order = RowOrder(found.number if again and found is not None else secrets.token_hex(16), again)
        for peer in party.peers:
            party.send(peer, order)
    else:
        order = party.receive(job.active, RowOrder)
    if order.again:
        if found is None or found.number != order.number:
            raise ConfigError(
                f"{party.name}: cannot resume: expected alignment {order.number[:8]}, made with the ids the table has "
                f"now - at {kept}; bring the table back or begin anew",
                public="it cannot resume: it has not kept the alignment, or its ids have changed",
            )
        return found.rows
    assert job.align is not None
    settings = job.align
    ids = read_ids(column, party=party.name, normalise=settings.normalise, on_duplicate=settings.on_duplicate)
    # runs are limited where no log compares ids, too: they are counted beside what serves later jobs
    counted = (store_of(job, party.name) or Path(path).parent) / f"{party.name}.runs"
    file = Path(settings.log) / f"{party.name}.runs" if settings.log else counted
    options = AlignmentOptions(
        psi=settings.psi, log=RunLog(file, max_runs=settings.max_runs), commits=settings.log is not None,
        threads=threads, progress=None if phase is None else partial(phase, f"aligning {len(ids)} ids in padded lists"),
    )  # fmt: skip
    align = align_active if party.name == job.active else align_passive
    aligned = align(party, ids, options)
    report_shared(party.name, aligned, logger.warning, partial(logger.log, NOTED))
    rows = aligned.rows
    if kept is not None:
        write_file(kept, KeptRows(order.number, digest, rows), FORMAT, party.name)
    return rows


def _digest(column: Any) -> bytes:
    """Return SHA-256 of a column of ids, in their order."""
    table = pa.table({"ids": column}).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return hashlib.sha256(sink.getvalue()).digest()


def labelled(
    rows: Rows, job: Job, name: str, path: str, classes: list[Any] | None, *, training: bool
) -> tuple[LabelledRows, list[Any] | None]:
    """Check labels and (for training) weights of whoever has some; return them with the classes.

    Without `classes` those found are taken: all there are, but in a horizontal job, where a party may have rows of one
    class alone.
    """
    arrow, n_rows = rows.arrow, rows.features.n_rows
    if not labels_of(job, name):
        return LabelledRows(rows.features, np.zeros(0), ids=rows.canonical), None
    weighted = job.weight is not None and training  # eval rows all weigh the same
    _refuse_absent_labels(arrow, job, name, path, weighted=weighted)
    weight = check_weights(arrow[job.weight], n_rows, f"{name}: column {job.weight!r}") if weighted else None
    whose = f"{name}: column {job.label!r}"
    objective = job.common.get("objective")
    if job.task == "ranking":
        target = check_relevance(arrow[job.label], numbers(arrow[job.group]), whose, n_rows, objective)
        return LabelledRows(rows.features, target, weight), None
    if job.task == "regression":
        return LabelledRows(rows.features, check_numbers(arrow[job.label], whose, n_rows, objective), weight), None
    y = check_labels(numbers(arrow[job.label]), whose, n_rows)
    if classes is None:
        classes = np.unique(y).tolist()
        if len(classes) < 2 and not job.by_row:
            raise DataError(f"{name}: expected labels of at least two classes, got one class in all {len(y)} rows")
    unseen = set(np.unique(y).tolist()) - set(classes)
    if unseen:
        raise DataError(f"{name}: expected the labels seen in training, got {len(unseen)} others - at {path}")
    return LabelledRows(rows.features, np.searchsorted(np.array(classes), y).astype(np.float64), weight), classes


def _refuse_absent_labels(arrow: Any, job: Job, name: str, path: str, *, weighted: bool) -> None:
    """Raise DataError where a file lacks a column of labels, groups or (`weighted`) weights."""
    for column in [of for of in labels_of(job, name) if weighted or of != job.weight]:
        if column not in arrow.column_names:
            raise DataError(
                f"{name}: expected a column {column!r}, {file_without([column], arrow.column_names)} - at {path}"
            )


def with_noisy_labels(
    data: LabelledRows, rows: Rows, job: Job, path: str, options: SystemOptions, ledger: Ledger
) -> tuple[LabelledRows, list[Any]]:
    """Put noisy labels in the place of true ones, drawn for the file's rows in its own order.

    Rows come in another order with every alignment; labels must not be drawn again with it.
    """
    whose = f"{job.active}: column {job.label!r}"
    y = check_labels(rows.whole[job.label].to_numpy(zero_copy_only=False), whose, rows.whole.num_rows)
    classes = np.unique(y)
    noisy = noisy_labels(
        path, np.searchsorted(classes, y).astype(np.float64), classes.tolist(), options, ledger, job.name
    )
    return replace(data, y=noisy if rows.order is None else noisy[rows.order]), classes.tolist()
