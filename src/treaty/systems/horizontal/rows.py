"""A participant's rows in a horizontal job: brought to what all have in common, binned, kept in checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.data.columns import Category
from treaty.data.table import Schema, Table, to_table
from treaty.errors import ConfigError, DataError
from treaty.messaging.messages import Message, decode_body, encode_body
from treaty.models.checkpoints import Checkpoint, Keeper, checkpoint_of, fingerprint
from treaty.models.trees import ModelPart, keep_records, records_used
from treaty.systems.horizontal.quantiles import Agreed, unpack_bins
from treaty.systems.pooled.training import TRAIN, Labelled
from treaty.systems.tree_options import TreeOptions
from treaty.trees.boosting import Forest, RoundState, draw
from treaty.trees.ensemble import join_splits, margins_from_values
from treaty.trees.shard import RowShard

logger = logging.getLogger(__name__)

Categories = list[list[Category] | None]


class Described(Message):
    """A participant's columns and classes. Tells the leader which classes it has rows of, and which columns are empty.

    An empty column, missing in all rows, is of any kind.
    """

    names: list[str]
    categories: Categories
    empty: list[bool]
    classes: list[Category] | None


class Begin(Message):
    """Columns as the first participant has them, everybody's classes, the model, and kept rounds to go on from."""

    model_id: str
    names: list[str]
    categories: Categories
    classes: list[Category] | None
    rounds: Annotated[int, msgspec.Meta(ge=0)] | None


@dataclass(frozen=True, slots=True)
class TakenUp:
    """What a training goes on from, at one party.

    Attributes
    ----------
    part : ModelPart
    bins : Bins
    rng : numpy.random.Generator or None
        Draws columns, at the leader.
    seed : int
        Of the party's own draws of rows.
    """

    part: ModelPart
    bins: Bins
    rng: np.random.Generator | None
    seed: int


def conform(table: Table, schema: Schema, party: str) -> Table:
    """Bring a participant's table to the schema of all: a feature it lacks is missing in all its rows.

    Raises
    ------
    DataError
        When it has columns that the schema lacks, or of another kind.
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
    whole = Table(Schema(schema.names, categories), columns, table.n_rows)
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


def describe(data: Labelled, classes: list[Category] | None) -> Described:
    """Say what columns and classes a participant has."""
    schema = data.table.schema
    empty = [bool(np.isnan(column).all()) for column in data.table.columns]
    return Described(list(schema.names), [None if c is None else list(c) for c in schema.categories], empty, classes)


def schema_of(names: Sequence[str], categories: Categories) -> Schema:
    """Return the columns that a message names."""
    return Schema(tuple(names), tuple(None if c is None else tuple(c) for c in categories))


def all_columns(described: Sequence[Described]) -> tuple[list[str], Categories]:
    """Return names and categories of all columns: the first participant's, of the first kind that is not empty."""
    kinds = []
    for place, name in enumerate(described[0].names):
        filled = [
            one.categories[one.names.index(name)]
            for one in described
            if name in one.names and not one.empty[one.names.index(name)]
        ]
        kinds.append(filled[0] if filled else described[0].categories[place])
    return described[0].names, kinds


def all_classes(described: Mapping[str, Described]) -> list[Category] | None:
    """Return the classes that participants have among them, in order."""
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
    data: Labelled, schema: Schema, own: list[Category] | None, classes: list[Category] | None, party: str
) -> Labelled:
    """Bring rows to everybody's columns and class numbers; errors and warnings name an eval set beside its party."""
    y, whose = data.y, party if data.name == TRAIN else f"{party}: {data.name}"
    if own is not None and classes is not None and own != classes:
        number = {label: k for k, label in enumerate(classes)}
        unknown = [label for label in own if label not in number]
        if unknown:
            raise DataError(f"{whose}: expected the labels of training, got {unknown[0]!r}")
        y = np.array([number[label] for label in own], np.float64)[data.y.astype(np.intp)]
    return replace(data, table=conform(data.table, schema, whose), y=y)


def printed_rows(rows: Sequence[Labelled], classes: list[Category] | None) -> bytes:
    """Return what tells a party's training rows and eval sets, in checkpoints."""
    return fingerprint([(of.table, (of.y, of.weight)) for of in rows], classes or ())


def own_seed(options: TreeOptions, name: str) -> int:
    """Seed of a participant's own draws of rows."""
    if options.random_state is None:
        return secrets.randbits(62)
    return int.from_bytes(hashlib.sha256(f"{options.random_state} {name}".encode()).digest()[:7], "big")


def sampler(
    shard: RowShard, forest: Forest, options: TreeOptions, seed: int
) -> Callable[[], list[NDArray[np.int32] | None]]:
    """Return what draws a participant's rows for each tree of the next round."""
    n_outputs, n_rows = shard.margins.shape

    def sample() -> list[NDArray[np.int32] | None]:
        if options.subsample >= 1.0 or n_rows == 0:
            return [None] * n_outputs
        return [
            draw(np.random.default_rng([seed, forest.rounds, output]), n_rows, options.subsample)
            for output in range(n_outputs)
        ]

    return sample


def shard_of(rows: Labelled, bins: Bins, part: ModelPart, threads: int) -> RowShard:
    """Bin rows, and take them down the trees there are."""
    assert part.forest is not None
    shard = RowShard(
        bins.transform(rows.table, threads), bins.offsets, rows.y, rows.weight, part.forest.objective, threads
    )
    if part.forest.trees:
        matrix = rows.table.matrix()
        margins = np.ascontiguousarray(shard.margins.T)
        margins_from_values(part.forest.trees, join_splits([part.splits], [matrix.shape[1]]), matrix, margins, threads)
        shard.margins[:] = margins.T
    return shard


def checkpoint_with(
    part: ModelPart, options: TreeOptions, printed: bytes, kept: RoundState, agreed: Agreed
) -> Checkpoint:
    """Return a checkpoint that holds the bins."""
    checkpoint = checkpoint_of(part, options, printed, kept)
    checkpoint.bins = encode_body(agreed)
    return checkpoint


def kept_here(keeper: Keeper | None, model_id: str, rounds: int) -> Checkpoint:
    """Return the own checkpoint of a model that the leader goes on with.

    Raises
    ------
    ConfigError
        When there is none with as many rounds.
    """
    found = None if keeper is None else keeper.found()
    if found is None or found.part.model_id != model_id or found.part.forest is None or found.rounds < rounds:
        raise ConfigError(
            f"cannot resume: expected a checkpoint of model {model_id[:8]} with {rounds} rounds, got "
            + ("none" if found is None else f"one of model {found.part.model_id[:8]} with {found.rounds}")
            + f" - at {keeper.path if keeper else 'this party, which keeps none'}",
            public="it has no checkpoint of the training to resume",
        )
    return found


def led(found: Checkpoint) -> bool:
    """Whether the party of a checkpoint led its training: only the leader draws columns."""
    state, _ = json.loads(found.random_state or "[null, 0]")
    return state is not None


def taken_up(found: Checkpoint, rounds: int, options: TreeOptions, printed: bytes, party: str) -> TakenUp:
    """Return what a training goes on from that has so many rounds; what the checkpoint has of later ones is dropped.

    Raises
    ------
    ConfigError
        When the checkpoint is of other options, parties or rows.
    """
    found.check(options, (party,), printed)
    part = found.part
    assert part.forest is not None
    part.forest.cut(rounds)
    keep_records(part.splits, records_used(part.forest.trees, 1)[0])
    bins = unpack_bins(decode_body(found.bins, Agreed, peer=party), part.schema, options.max_bin, party)
    state, seed = json.loads(found.random_state or "")
    if state is None:
        return TakenUp(part, bins, None, seed)
    rng = np.random.default_rng()
    rng.bit_generator.state = state
    return TakenUp(part, bins, rng, seed)
