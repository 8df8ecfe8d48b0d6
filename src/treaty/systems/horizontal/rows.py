"""A participant's rows in a horizontal job: brought to common columns and classes, binned, sampled, fingerprinted."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from treaty.data.columns import Category
from treaty.data.table import Schema, Table, to_table
from treaty.errors import ConfigError, DataError
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message, ModelId, encode_body
from treaty.models.checkpoints import Checkpoint, checkpoint_of, fingerprint
from treaty.models.trees import ModelPart
from treaty.systems.system import TRAIN, LabelledRows
from treaty.trees.boosting import RoundState

logger = logging.getLogger(__name__)

Categories = list[list[Category] | None]
Origins = dict[str, int]


class RowsDescription(Message):
    """A participant's columns and classes. Tells the leader which classes it has rows of, and which columns are empty.

    A column that is missing in all rows is empty, and fits numbers and categories alike. `bins` are SHA-256 of common
    bins that it has kept of earlier trainings on these very rows, one after the other. `origins` are those of a
    `Schema`: columns whose numbers need float64, and which multiple of 2^53 the largest of whole numbers has passed.
    """

    leakage: ClassVar = MessageLeakage(
        "names of its columns, their categories, which are empty or have numbers beyond float32, which classes "
        "its rows have, and whether it has bins of an earlier training on these rows",
        "exact",
    )

    names: list[str]
    categories: Categories
    empty: list[bool]
    classes: list[Category] | None
    bins: bytes = b""
    origins: Origins = msgspec.field(default_factory=dict)


class ModelBegin(Message):
    """The model's id, the first participant's columns, everybody's classes; after how many rounds training resumes.

    `bins` is SHA-256 of kept ones that all have named; empty where bins are searched for, or are a checkpoint's.
    """

    leakage: ClassVar = MessageLeakage(
        "the model's number, names and categories of the first participant's columns, everybody's classes, and "
        "whether all have kept bins",
        "control",
    )

    model_id: ModelId
    names: list[str]
    categories: Categories
    classes: list[Category] | None
    rounds: Annotated[int, msgspec.Meta(ge=0)] | None
    bins: bytes = b""
    origins: Origins = msgspec.field(default_factory=dict)


def conform(table: Table, schema: Schema, party: str) -> Table:
    """Bring a participant's table to the schema of all: a feature it lacks is missing in all its rows.

    Raises DataError when it has columns that the schema lacks, or of another kind.
    """
    if table.schema == schema:
        return table
    unknown = [name for name in table.schema.names if name not in schema.names]
    if unknown:
        raise DataError(
            f"{party}: expected the columns of the first participant, got {', '.join(map(repr, unknown))} besides; "
            "drop or rename them",
            public="its table has columns that the others' lack",
        )
    missing = np.full(table.n_rows, np.nan, np.float32)
    own = {name: k for k, name in enumerate(table.schema.names)}
    for name in (name for name in schema.names if name not in own):
        logger.warning("%s: column %r is missing in all rows, for the table lacks it", party, name)
    categories = tuple(
        table.schema.categories[own[name]] if name in own else known
        for name, known in zip(schema.names, schema.categories, strict=True)
    )
    columns = [table.columns[own[name]] if name in own else missing for name in schema.names]
    whole = Table(Schema(schema.names, categories, table.schema.origins), columns, table.n_rows)
    try:
        matched = to_table(whole, party=party, schema=schema)
    except DataError as error:
        raise DataError(f"{error}; columns are of the kinds that the first participant's have") from None
    for name, known, column in zip(schema.names, schema.categories, matched.columns, strict=True):
        others = 0 if known is None else int(np.count_nonzero(column == len(known)))
        if others:
            logger.warning(
                "%s: column %r: %d of %d rows have categories that the first participant does not know; they count as "
                "one, other", party, name, others, table.n_rows,
            )  # fmt: skip
    return matched


def describe(data: LabelledRows, classes: list[Category] | None, bins: bytes = b"") -> RowsDescription:
    """Return the description of a participant's rows; `bins` are those of `RowsDescription`."""
    schema = data.table.schema
    empty = [bool(np.isnan(column).all()) for column in data.table.columns]
    return RowsDescription(
        list(schema.names), [None if c is None else list(c) for c in schema.categories], empty, classes, bins,
        schema.origins,
    )  # fmt: skip


def schema_of(names: Sequence[str], categories: Categories, origins: Origins) -> Schema:
    return Schema(tuple(names), tuple(None if c is None else tuple(c) for c in categories), origins)


def all_columns(described: Sequence[RowsDescription]) -> tuple[list[str], Categories, Origins]:
    """Return names and categories of the first participant's columns, as told by the first that has values in each.

    Origins are those of the pooled rows: the largest.
    """
    filled_at = [{name for name, empty in zip(one.names, one.empty, strict=True) if not empty} for one in described]
    origins = {
        name: max(one.origins.get(name, 0) for one, filled in zip(described, filled_at, strict=True) if name in filled)
        for name in sorted({name for one in described for name in one.origins})
    }
    kinds = []
    for place, name in enumerate(described[0].names):
        filled = [
            one.categories[one.names.index(name)]
            for one in described
            if name in one.names and not one.empty[one.names.index(name)]
        ]
        kinds.append(filled[0] if filled else described[0].categories[place])
    return described[0].names, kinds, origins


def all_classes(described: Mapping[str, RowsDescription]) -> list[Category] | None:
    """Return the classes that participants have between them, sorted; None for a regression."""
    with_classes = [one.classes for one in described.values() if one.classes is not None]
    if not with_classes:
        return None
    kinds = {name: sorted({type(c).__name__ for c in one.classes or ()}) for name, one in described.items()}
    if len(with_classes) < len(described) or len({kind for own in kinds.values() for kind in own}) > 1:
        listed = ", ".join(f"{' and '.join(kind) or 'none'} at {name}" for name, kind in kinds.items())
        raise ConfigError(
            f"expected labels of one kind at all participants (numbers, or text), got {listed}",
            public="participants' labels are of different kinds",
        )
    classes = sorted({c for own in with_classes for c in own})
    if len(classes) < 2:
        raise DataError(f"expected labels of at least two classes among all participants, got {len(classes)}")
    return classes


def common_rows(
    data: LabelledRows, schema: Schema, own: list[Category] | None, classes: list[Category] | None, party: str
) -> LabelledRows:
    """Bring rows to everybody's columns and class numbers; errors and warnings name the party, and an eval set."""
    y, whose = data.y, party if data.name == TRAIN else f"{party}: {data.name}"
    if own is not None and classes is not None and own != classes:
        number = {label: k for k, label in enumerate(classes)}
        unknown = [label for label in own if label not in number]
        if unknown:
            raise DataError(f"{whose}: expected the labels of training, got {unknown[0]!r}")
        y = np.array([number[label] for label in own], np.float64)[data.y.astype(np.intp)]
    return replace(data, table=conform(data.table, schema, whose), y=y)


def printed_rows(rows: Sequence[LabelledRows], classes: list[Category] | None) -> bytes:
    """Return the `fingerprint` of a party's training rows and eval sets."""
    return fingerprint([(of.table, (of.y, of.weight)) for of in rows], classes or ())


def own_seed(random_state: int | None, name: str) -> int:
    """Return the seed of a participant's own draws of rows."""
    if random_state is None:
        return secrets.randbits(62)
    return int.from_bytes(hashlib.sha256(f"{random_state} {name}".encode()).digest()[:7], "big")


def checkpoint_with(part: ModelPart, given: dict[str, Any], rows: bytes, kept: RoundState, told: Message) -> Checkpoint:
    """Return a checkpoint that holds what all were told of the rows, as the bins; `rows` is their `fingerprint`."""
    checkpoint = checkpoint_of(part, given, rows, kept)
    checkpoint.bins = encode_body(told)
    return checkpoint


# ---------------------------------------------------------------- checks of options that every system split by row has


def refuse_goss(common: Any) -> None:
    if common.goss:
        raise ConfigError("goss ranks rows by gradient, which participants cannot do together; use subsample")


def refuse_objectives(common: Any) -> None:
    """Refuse objectives whose gradients, bounds or leaf values participants cannot know."""
    if common.loss_class.takes == "groups":
        raise ConfigError(
            f"objective={common.objective!r} ranks rows within groups, and rows of a group may be with several "
            "participants: take a system split by column"
        )
    if common.loss_class.refreshes_leaves:
        raise ConfigError(
            f"objective={common.objective!r} has leaf values that are quantiles of the residuals of all participants' "
            'rows, and sums of gradients do not tell them: take "huber", or a system split by column'
        )
