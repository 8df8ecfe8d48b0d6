"""A party's own table files, read and checked as the job's `TableRules` say, without the other parties."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treaty.data.arrow_tables import as_text, changed, has_values, numbers, typed_ids, widths
from treaty.data.columns import check_labels, check_weights, quoted
from treaty.data.ids import read_ids
from treaty.data.reading import checked_columns, is_csv, open_table, refuse_strays
from treaty.data.table import Schema, Table, check_names, file_without, refuse_absent, to_table
from treaty.errors import NOTED, DataError
from treaty.privacy.ledger import Ledger
from treaty.runs.job import TableRules
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.system import check_margins, check_numbers, check_relevance, noisy_labels
from treaty.systems.system import LabelledRows

# most columns of categories that a line about a table names
LISTED = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileRows:
    """A file's rows in the common order.

    `arrow`, a table of arrow or `FileTable`, has all columns but the ids and those dropped. `whole` is the file in its
    own order, of which these rows are `order`, int64 (n_rows,) (None: all, in the same order). If rows were aligned,
    there are `ids`, their `digest`, and `canonical`, which returns the ids in canonical form; `ids_of` is as in
    `LabelledRows`.
    """

    arrow: Any
    features: Table
    whole: Any
    order: NDArray[np.int64] | None = None
    ids: Any = None
    digest: bytes | None = None
    canonical: Callable[[], list[str]] | None = None
    ids_of: str = ""


class FileRead(NamedTuple):
    """A file's columns; and its features, if they were checked when the file was written."""

    arrow: Any
    checked: Table | None


def read_alone(rules: TableRules, path: str, *, training: bool) -> tuple[FileRows, list[Any] | None]:
    """Read and check a file's rows in their own order, with ids and, in training, labels; return the classes, too."""
    rows = read_rows(rules, path) if rules.job.by_row else _checked_alone(read_file(rules, path, None), rules, path)
    return rows, labelled(rows, rules, path, None, rules.job.weight)[1] if training else None


def read_ahead(rules: TableRules, path: str) -> FileRead:
    """Read and check a training table split by column, before the parties connect.

    Rows that are still to be aligned may lack labels: not all of them are used.
    """
    read = read_file(rules, path, None)
    rows = _checked_alone(read, rules, path)
    if rules.id is None:
        labelled(rows, rules, path, None, rules.job.weight)
    else:
        _refuse_absent_labels(rows.arrow, rules, path, rules.job.weight)
    return read


def read_to_predict(rules: TableRules, path: str, schema: Schema) -> FileRead:
    """Read rows to predict, split by column, before the parties connect; `schema` is that of training."""
    read = read_file(rules, path, schema)
    if read.checked is None:
        check_names(schema, _feature_names(read.arrow, rules, path), rules.party, path)
    return read


def _checked_alone(read: FileRead, rules: TableRules, path: str) -> FileRows:
    """Check ids and columns of a file, whose rows stay in their own order."""
    arrow, checked = read
    if checked is None and rules.id is not None:
        how = rules.align
        read_ids(arrow[rules.id], party=rules.party, normalise=how.normalise, on_duplicate=how.on_duplicate)
        arrow = arrow.drop_columns([rules.id])
    return FileRows(arrow, features_of(arrow, rules, path, None) if checked is None else checked, arrow)


def read_file(rules: TableRules, path: str, schema: Schema | None, text: Sequence[str] = ()) -> FileRead:
    """Read a file's columns, with the ids; `schema` is that of training, None in training.

    Without a schema, the columns `text` are text even if they look like numbers.
    """
    ids = [] if rules.id is None else [rules.id]
    text = [*(text if schema is None else text_columns(schema)), *ids, *rules.member.categorical]
    # for a table that is too large for memory
    scratch = None if rules.job.store is None else Path(rules.job.store) / "scratch"
    arrow = open_table(
        path, folder=scratch, drop=[column for column in rules.member.drop if column not in ids],
        drop_all=path == next(iter(rules.own_tables), None), text=list(dict.fromkeys(text)), party=rules.party,
    )  # fmt: skip
    checked = checked_columns(arrow)
    if checked is not None:
        return FileRead(arrow, checked)
    arrow = _kinds_checked(arrow, rules, path, schema)
    if rules.id is not None:
        if rules.id not in arrow.column_names:
            raise DataError(
                f"{rules.party}: expected a column {rules.id!r} of ids, "
                f"{file_without(ids, arrow.column_names)} - at {path}"
            )
        arrow = _with_ids(arrow, rules.id, rules, path)
    if schema is None:
        _note_columns(arrow, rules, path)
    return FileRead(arrow, None)


def read_rows(rules: TableRules, path: str, schema: Schema | None = None, *, text: Sequence[str] = ()) -> FileRows:
    """Read a file of a job split by row: no rows are aligned, and no other party is needed.

    `schema` is the model's, if there is one: columns that the file lacks are missing in all rows. `text` as in
    `read_file`.
    """
    arrow, checked = read_file(rules, path, schema, text)
    if checked is not None:
        return FileRows(arrow, checked, arrow)
    for column in () if schema is None else schema.names:
        if column not in arrow.column_names:
            logger.warning("%s: column %r is missing in all rows, for %s lacks it", rules.party, column, path)
            arrow = arrow.append_column(column, pa.nulls(arrow.num_rows, pa.float32()))
    return FileRows(arrow, features_of(arrow, rules, path, schema), arrow)


def _kinds_checked(arrow: Any, rules: TableRules, path: str, schema: Schema | None) -> Any:
    """Refuse cells that are no numbers in columns of numbers; return the table, its declared categories as text."""
    name, categorical, there = rules.party, rules.member.categorical, set(arrow.column_names)
    # rows to predict have none
    labels = rules.labels if str(path) in rules.own_tables else []
    # the first table must have all columns that the job names, others may lack some
    if path == next(iter(rules.own_tables), None):
        refuse_absent(categorical, f"the columns of parties.{name}.categorical", arrow.column_names, path, name)
    arrow = as_text(arrow, categorical)
    for column in set(categorical) & there:
        kind = arrow.schema.field(column).type
        if not _is_categorical(kind):
            raise DataError(
                f"{name}: expected text, numbers or truth values as categories in {column!r}, got {kind} - at {path}"
            )
    not_numeric = {rules.job.group, *([rules.job.label] if rules.job.task == "classification" else [])}
    numeric = [of for of in labels if of not in not_numeric]
    if schema is None:
        others = (rules.id, *labels, *categorical)
        features = [of for of in rules.member.columns or arrow.column_names if of not in others]
    else:
        features = []
        numeric += [of for of, kind in zip(schema.names, schema.kinds, strict=True) if kind == "numeric"]
    if rules.job.label in labels and rules.job.label not in (*numeric, *categorical):
        # a label of classes may be text, but not a mixture of numbers and stray text
        features = [*features, rules.job.label]
    refuse_strays(
        arrow, path, name, features=[of for of in features if of in there],
        numeric=[of for of in numeric if of in there], remedy=f"name it in parties.{name}.categorical of the job",
    )  # fmt: skip
    return arrow


def text_columns(schema: Schema) -> list[str]:
    """Return the columns whose cells are text in a file."""
    return [column for column, kind in zip(schema.names, schema.kinds, strict=True) if kind == "categorical"]


def features_of(arrow: Any, rules: TableRules, path: str, schema: Schema | None) -> Table:
    """Return the columns that trees may split on, checked."""
    table = to_table(
        arrow.select(_feature_names(arrow, rules, path)),
        party=rules.party,
        schema=schema,
        text_as_categories=True,
        # the active party may have labels and nothing else
        allow_no_features=rules.party == rules.job.active and not rules.job.by_row,
        on_unseen=logger.warning,
        place=str(path),
        doubles=rules.job.by_row,
    )
    logger.info("%s: %s: %s", rules.party, Path(path).name, describe(table.schema, table.n_rows))
    return table


def _feature_names(arrow: Any, rules: TableRules, path: str) -> list[str]:
    name, without = rules.party, (rules.id, *rules.labels)
    wanted = [column for column in rules.member.columns or arrow.column_names if column not in without]
    absent = [column for column in wanted if column not in arrow.column_names]
    if rules.job.label in wanted and rules.member.columns is None:
        raise DataError(
            f"{name}: column {rules.job.label!r} has the name of the label of {rules.job.active}: drop it "
            f"(parties.{name}.drop) or, if it is not the label, name all columns to use (parties.{name}.columns) "
            f"- at {path}"
        )
    if absent:
        raise DataError(
            f"{name}: expected columns {quoted(absent)}, {file_without(absent, arrow.column_names)} - at {path}"
        )
    return wanted


def describe(schema: Schema, n_rows: int) -> str:
    """Describe a table to its own party: its columns of numbers, and those of categories."""
    numeric = [name for name, kind in zip(schema.names, schema.kinds, strict=True) if kind == "numeric"]
    categorical = [
        f"{name} ({len(values)} categories)"
        for name, values in zip(schema.names, schema.categories, strict=True)
        if values is not None
    ]
    parts = [f"{what}: {', '.join(names)}" for what, names in (("numbers", numeric), ("text", categorical)) if names]
    return "; ".join([f"{n_rows} rows", *parts])


def _note_columns(arrow: Any, rules: TableRules, path: str) -> None:
    """Log how many columns are numbers or categories, and warn of those without any value."""
    features = [of for of in rules.member.columns or arrow.column_names if of not in (rules.id, *rules.labels)]
    there = {of: arrow.schema.field(of).type for of in features if of in arrow.column_names}
    categorical = [of for of, kind in there.items() if _is_categorical(kind)]
    found = counted(arrow.num_rows, len(there) - len(categorical), categorical)
    logger.log(NOTED, "%s: %s: %s", rules.party, Path(path).name, found)
    if empty := [of for of in there if not has_values(arrow, of)]:
        file = Path(path).name
        logger.warning("%s: %s has no value in any row of %s and cannot help", rules.party, quoted(empty), file)


def counted(n_rows: int, n_numeric: int, categorical: Sequence[str]) -> str:
    """Describe a table in words: its rows, its columns of each kind, and the names of those with categories."""
    kinds = [f"{n_numeric:,} numeric"] if n_numeric else []
    kinds += [f"{len(categorical):,} categorical"] if categorical else []
    more = f" and {len(categorical) - LISTED} more" if len(categorical) > LISTED else ""
    which = f" ({', '.join(categorical[:LISTED])}{more})" if categorical else ""
    columns = "column" if n_numeric + len(categorical) == 1 else "columns"
    return f"{n_rows:,} rows, {', '.join(kinds) or 'no'} {columns}{which}"


def _with_ids(arrow: Any, column: str, rules: TableRules, path: str) -> Any:
    """Return a table whose ids keep every digit of the file: as text, if numbers would lose one."""
    ids = arrow[column]
    if rules.align.text:
        ids = ids.cast(pa.string()) if pa.types.is_integer(ids.type) else ids
    elif is_csv(path):
        ids = typed_ids(ids)
    logger.log(NOTED, "%s: %s: ids in %r: %s", rules.party, Path(path).name, column, widths(ids))
    return changed(arrow, column, ids.type, lambda _: ids)


def _is_categorical(kind: Any) -> bool:
    return any(is_a(kind) for is_a in (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary))


def labelled(
    rows: FileRows, rules: TableRules, path: str, classes: list[Any] | None, weight_column: str | None
) -> tuple[LabelledRows, list[Any] | None]:
    """Check labels and weights at a party that has some; return them with the classes.

    Without a `weight_column`, all rows weigh the same. Without `classes`, those of the labels are taken: at least two,
    unless tables are split by row, where all rows of a party may be of one class.
    """
    name, job, arrow, n_rows = rules.party, rules.job, rows.arrow, rows.features.n_rows
    if not rules.labels:
        return LabelledRows(rows.features, np.zeros(0)), None
    _refuse_absent_labels(arrow, rules, path, weight_column)
    weight = None
    if weight_column is not None:
        weight = check_weights(arrow[weight_column], n_rows, f"{name}: column {weight_column!r}")
    margins, whose = margins_of(rows, rules, path), f"{name}: column {job.label!r}"
    if job.task == "ranking":
        groups = numbers(arrow[job.group])
        target = check_relevance(arrow[job.label], groups, whose, n_rows, rules.objective)
        return LabelledRows(rows.features, target, weight, base_margin=margins), None
    if job.task == "regression":
        target = check_numbers(arrow[job.label], whose, n_rows, rules.objective)
        return LabelledRows(rows.features, target, weight, base_margin=margins), None
    y = check_labels(numbers(arrow[job.label]), whose, n_rows)
    if classes is None:
        if y.dtype.kind == "f" and (y != np.floor(y)).any():
            remedy = 'to predict numbers, write task = "regression" into every party\'s job file'
            raise DataError(f"{whose}: expected labels of classes, got numbers with fractions; {remedy} - at {path}")
        classes = np.unique(y).tolist()
        if len(classes) < 2 and not job.by_row:
            raise DataError(f"{name}: expected labels of at least two classes, got one class in all {len(y)} rows")
    unseen = set(np.unique(y).tolist()) - set(classes)
    if unseen:
        raise DataError(f"{name}: expected the labels seen in training, got {len(unseen)} others - at {path}")
    target = np.searchsorted(np.array(classes), y).astype(np.float64)
    return LabelledRows(rows.features, target, weight, base_margin=margins), classes


def margins_of(rows: FileRows, rules: TableRules, path: str) -> NDArray[np.float64] | None:
    """Return the margins that a file's rows start from, float64 (n_rows, n_outputs); None if the job names none."""
    if not rules.base_margin:
        return None
    _refuse_absent(rules.base_margin, rows.arrow, rules, path)
    columns = [numbers(rows.arrow[column]) for column in rules.base_margin]
    whose = f"{rules.party}: column {', '.join(map(repr, rules.base_margin))}"
    return check_margins(np.column_stack(columns), whose, rows.features.n_rows, len(columns))


def _refuse_absent_labels(arrow: Any, rules: TableRules, path: str, weight_column: str | None) -> None:
    """Raise DataError if the file of a party with labels lacks a column of labels, groups, weights or margins."""
    wanted = (rules.job.label, rules.job.group, weight_column, *rules.base_margin) if rules.labels else ()
    _refuse_absent([column for column in wanted if column is not None], arrow, rules, path)


def _refuse_absent(columns: Sequence[str], arrow: Any, rules: TableRules, path: str) -> None:
    for column in columns:
        if column not in arrow.column_names:
            lacks = file_without([column], arrow.column_names)
            raise DataError(f"{rules.party}: expected a column {column!r}, {lacks} - at {path}")


def with_noisy_labels(
    data: LabelledRows, rows: FileRows, rules: TableRules, path: str, options: SystemOptions, ledger: Ledger, job: str
) -> tuple[LabelledRows, list[Any] | None]:
    """Replace labels by noisy ones, which a file at `path` keeps; the ledger notes them under the name of the `job`.

    They are drawn for the file's rows in its own order. The order after an alignment differs each time, but labels must
    not be drawn twice: the noise of two draws would average out.
    """
    whose, column = f"{rules.job.active}: column {rules.job.label!r}", rows.whole[rules.job.label]
    classes: list[Any] | None = None
    if rules.job.task == "regression":
        y = check_numbers(column, whose, rows.whole.num_rows, rules.objective)
    else:
        labels = check_labels(column.to_numpy(zero_copy_only=False), whose, rows.whole.num_rows)
        known, places = np.unique(labels, return_inverse=True)
        y, classes = places.astype(np.float64), known.tolist()
    noisy = noisy_labels(path, y, classes, options, ledger, job)
    return replace(data, y=noisy if rows.order is None else noisy[rows.order]), classes
