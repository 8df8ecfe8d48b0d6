"""A participant's rows and labels in a job split by row.

Rows are brought to the columns and classes of all participants. If `base_score` is left out, training starts from an
estimate over all labels (`agreed_start`): participants add up the same whole numbers as a party with all labels would.

1. Once the number of rows, the largest label and the largest weight are known, the leader sends units (`LabelUnits`).
   Participants answer with their sums of weights and of weighted labels, or of each class's weights.
2. The leader sends where training starts (`TrainingStart`), and participants answer with bounds of their gradients.

Each row's part is rounded on its own, so that the start is that of one table, bit for bit. Under noise nothing is
estimated: sums of labels would cost budget.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from treaty.data.columns import Category, Column, needs_doubles
from treaty.data.table import Schema, Table, to_table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.messages import Array, Message, ModelId, encode, leaks, view
from treaty.models.checkpoints import Checkpoint, checkpoint_of, fingerprint
from treaty.models.trees import ModelPart
from treaty.systems.horizontal.sum_noise import EXPONENTS, declared
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import loss_of, objective_for
from treaty.systems.system import TRAIN, LabelledRows, RoleInput
from treaty.trees.boosting import RoundState
from treaty.trees.losses import TallyUnits, bound_of_weights
from treaty.trees.objectives import Objective

logger = logging.getLogger(__name__)

Categories = list[list[Category] | None]
Origins = dict[str, int]


@leaks(
    "names of the sender's columns, their categories, which are empty or have numbers beyond float32, which "
    "classes its rows have, and whether it has bins of an earlier training on these rows",
    "exact",
)
class RowsDescription(Message):
    """A participant's columns and classes.

    A column that is missing in all rows is empty, and fits numbers and categories alike. `bins` are SHA-256 of common
    bins that it has kept of earlier trainings on these very rows, one after the other. `origins` are those of a
    `Schema`: columns whose numbers need float64.
    """

    names: list[str]
    categories: Categories
    empty: list[bool]
    classes: list[Category] | None
    bins: bytes = b""
    origins: Origins = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        filled = {name for name, empty in zip(self.names, self.empty, strict=False) if not empty}
        alike = len(set(self.names)) == len(self.names) == len(self.categories) == len(self.empty)
        if not alike or not self.origins.keys() <= filled:
            raise ValueError("expected the kind of each column, and origins of columns with values")


@leaks(
    "the model's number, names of the first participant's columns, all participants' categories and classes, and "
    "whether all have kept bins",
    "control",
)
class ModelBegin(Message):
    """The model's id, the first participant's columns, all categories and classes; the rounds that training resumes.

    `bins` is SHA-256 of kept ones that all have named; empty where bins are searched for, or are a checkpoint's.
    """

    model_id: ModelId
    names: list[str]
    categories: Categories
    classes: list[Category] | None
    rounds: Annotated[int, msgspec.Meta(ge=0)] | None
    bins: bytes = b""
    origins: Origins = msgspec.field(default_factory=dict)


def conform(table: Table, schema: Schema, party: str) -> Table:
    """Bring a participant's table to the schema of all; DataError when it has other columns, or of another kind."""
    if table.schema == schema:
        return table
    unknown = [name for name in table.schema.names if name not in schema.names]
    if unknown:
        raise DataError(
            f"{party}: expected the columns of the first participant, got {', '.join(map(repr, unknown))} as well; "
            "drop or rename them",
            public="its table has columns that the others' lack",
        )
    # a column that the table lacks is missing in all rows
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
                "%s: column %r: %d of %d rows have categories that no participant has in training; they count as one, "
                "other", party, name, others, table.n_rows,
            )  # fmt: skip
    return matched


def describe(data: LabelledRows, classes: list[Category] | None, bins: bytes = b"") -> RowsDescription:
    """Return the description of a participant's rows; `bins` are those of `RowsDescription`."""
    schema, columns = data.table.schema, data.table.columns
    empty = [bool(np.isnan(column).all()) for column in columns]
    origins = {
        name: origin
        for name, origin in schema.origins.items()
        if needs_doubles(Column(columns[schema.names.index(name)], None, origin))
    }
    return RowsDescription(
        list(schema.names), [None if c is None else list(c) for c in schema.categories], empty, classes, bins,
        origins,
    )  # fmt: skip


def schema_of(names: Sequence[str], categories: Categories, origins: Origins) -> Schema:
    return Schema(tuple(names), tuple(None if c is None else tuple(c) for c in categories), origins)


def all_columns(described: Sequence[RowsDescription]) -> tuple[list[str], Categories, Origins]:
    """Return names of the first participant's columns; categories and origins of the pooled rows."""
    # an empty column fits any kind: the first participant with values in it decides
    filled_at = [
        {name: kind for name, kind, empty in zip(one.names, one.categories, one.empty, strict=True) if not empty}
        for one in described
    ]
    origins = {
        name: max(one.origins.get(name, 0) for one, filled in zip(described, filled_at, strict=True) if name in filled)
        for name in sorted({name for one in described for name in one.origins})
    }
    kinds = []
    for place, name in enumerate(described[0].names):
        filled = [of[name] for of in filled_at if name in of]
        kinds.append(_all_categories(filled) if filled else described[0].categories[place])
    return described[0].names, kinds, origins


def _all_categories(of_each: Sequence[list[Category] | None]) -> list[Category] | None:
    """Return the categories that participants have between them, in the order that they have on one table."""
    if of_each[0] is None:
        return None
    # of the first one's kind: a participant with others is refused as it puts its rows into the columns of all
    text = isinstance(of_each[0][0], str) if of_each[0] else True
    alike = [[c for c in of or () if isinstance(c, str) == text] for of in of_each]
    found = list(dict.fromkeys(c for of in alike for c in of))
    # text is sorted on one table; categories in an order of their own follow as they come
    return sorted(found) if all(of == sorted(of) for of in alike) else found


def all_classes(described: Mapping[str, RowsDescription]) -> list[Category] | None:
    """Return the classes that participants have between them, sorted; None for a regression."""
    with_classes = [one.classes for one in described.values() if one.classes is not None]
    if not with_classes:
        return None
    # numbers and text cannot be sorted together
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
    """Bring rows to the columns and class numbers of all; errors and warnings name the party, and an eval set."""
    y, whose = data.y, party if data.name == TRAIN else f"{party}: {data.name}"
    if own is not None and classes is not None and own != classes:
        number = {label: k for k, label in enumerate(classes)}
        unknown = [label for label in own if label not in number]
        if unknown:
            raise DataError(f"{whose}: expected the labels of training, got {unknown[0]!r}")
        # own class numbers become those of all
        y = np.array([number[label] for label in own], np.float64)[data.y.astype(np.intp)]
    return replace(data, table=conform(data.table, schema, whose), y=y)


def no_rows(schema: Schema) -> LabelledRows:
    return LabelledRows(Table(schema, [np.empty(0, np.float32)] * len(schema.names), 0), np.empty(0))


def printed_rows(rows: Sequence[LabelledRows], classes: list[Category] | None) -> bytes:
    """Return the `fingerprint` of a party's training rows and eval sets."""
    return fingerprint([(of.table, (of.y, of.weight)) for of in rows], classes or ())


def own_seed(random_state: int | None, name: str) -> int:
    # a participant's draws must not follow from another one's
    if random_state is None:
        return secrets.randbits(62)
    return int.from_bytes(hashlib.sha256(f"{random_state} {name}".encode()).digest()[:7], "big")


def checkpoint_with(part: ModelPart, given: dict[str, Any], rows: bytes, kept: RoundState, bins: Message) -> Checkpoint:
    """Return a checkpoint with the message `bins`; `rows` is the fingerprint of own rows."""
    checkpoint = checkpoint_of(part, given, rows, kept)
    checkpoint.bins = encode(bins)
    return checkpoint


# ---------------------------------------------------------------- the first sum, and where training starts


class SumOpener(Protocol):
    """Opens sums over all participants."""

    summed: list[str]

    def broadcast(self, message: Message) -> None:
        """Send a message to all participants."""

    def total(self, length: int, own: Integers | None = None) -> Integers:
        """Open the sum of participants' next vectors and `own`, int64 (length,)."""


def in_unary(bound: float) -> Integers:
    """Return a power of two as a vector int64 (len(EXPONENTS),), whose sum counts participants by their power."""
    # zero has no logarithm, and very small bounds need no smaller power
    exponent = max(round(math.log2(bound)), EXPONENTS[0])
    if exponent > EXPONENTS[-1]:
        raise DataError(f"expected targets and weights below 2^{EXPONENTS[-1]}; scale them down")
    return np.array([int(exponent == e) for e in EXPONENTS])


def largest_in(total: Integers) -> float:
    """Return the largest power of two in a sum of `in_unary`."""
    return 2.0 ** EXPONENTS[int(np.flatnonzero(total)[-1])]


class OpenedCounts(NamedTuple):
    """The first sum: rows, rows with a value of each numeric feature, rows of each category, unknown ones last."""

    rows: int
    present: Integers
    categories: dict[int, Integers]
    # The largest bounds among all participants
    bounds: list[float]


class Opening:
    """The first vector that is summed: the counts of `OpenedCounts`, and `bounds` powers of two in unary."""

    def __init__(self, schema: Schema, *, bounds: int) -> None:
        self.numeric = [f for f, categories in enumerate(schema.categories) if categories is None]
        self._categorical = [(f, len(c) + 1) for f, c in enumerate(schema.categories) if c is not None]
        sizes = [1, len(self.numeric), *(size for _, size in self._categorical), *[len(EXPONENTS)] * bounds]
        self._ends = np.cumsum(sizes)
        self._bounds, self.length = bounds, sum(sizes)

    def of(self, table: Table, bounds: Sequence[float]) -> Integers:
        """Return a participant's vector; `bounds` are of derivatives, or labels, and of weights."""
        columns = table.columns
        parts = [[table.n_rows], [int(np.count_nonzero(~np.isnan(columns[f]))) for f in self.numeric]]
        for f, size in self._categorical:
            # codes of categories are whole numbers; missing ones are NaN
            codes = columns[f][~np.isnan(columns[f])].astype(np.intp)
            parts.append(np.bincount(codes, minlength=size).tolist())
        unary = [in_unary(bound) for bound in bounds] if self._bounds else []
        return np.concatenate([*(np.array(part, np.int64) for part in parts), *unary])

    def read(self, total: Integers) -> OpenedCounts:
        """Read the sum of all participants' vectors; noise may have made counts negative."""
        (rows,), present, *rest = np.split(total, self._ends[:-1])
        categories = {f: np.maximum(of, 0) for (f, _), of in zip(self._categorical, rest, strict=False)}
        bounds = [largest_in(of) for of in rest[len(categories) :]]
        return OpenedCounts(max(int(rows), 0), present, categories, bounds)


@leaks("the size of the largest label and weight, roughly", "aggregated", guard="base_score")
class LabelUnits(Message):
    """Contribute sums of labels in units, powers of two no less than any label and weight; bits of a row's part."""

    label: float
    weight: float
    bits: Annotated[int, msgspec.Meta(ge=0, le=60)]


@leaks("the mean of all labels, or classes' shares", "aggregated", guard="base_score")
class TrainingStart(Message):
    """Contribute the bound of gradients if training starts from `start`, float64, a number or one of each class."""

    start: Array


def starts_from_sums(options: SystemOptions, common: BoostingOptions) -> bool:
    """Say whether the start of a training is estimated from sums of labels."""
    return common.base_score is None and not options.adds_noise


class OwnLabels:
    """One party's labels, perhaps none, and its answers when the `leader`, named in errors, asks about them."""

    def __init__(self, inputs: RoleInput, rows: LabelledRows, classes: list[Category] | None, leader: str) -> None:
        self._inputs, self._rows, self._classes, self._leader = inputs, rows, classes, leader
        self.loss = loss_of(np.empty(0), None, None if classes is None else len(classes), None, inputs.common)
        self.summed = starts_from_sums(inputs.options, inputs.common)
        # how many `bounds` there are
        self.n_bounds = 2 if self.summed else len(self.loss.clips) + 1

    @property
    def bounds(self) -> tuple[float, ...]:
        """Bounds of labels, or else of derivatives; and of weights."""
        if not self.summed:
            given = self.given
            return *given.clips, given.weight_bound
        y, weight = self._rows.y, self._rows.weight
        label = self.loss.label_bound(y) if self._classes is not None or np.any(y) else 2.0 ** EXPONENTS[0]
        return label, bound_of_weights(weight)

    @property
    def given(self) -> Objective:
        """The loss with bounds of own gradients, if nothing is estimated; under noise with those that are declared."""
        options, common = self._inputs.options, self._inputs.common
        if options.adds_noise:
            y, weight, common = declared(options, common)
            return loss_of(y, weight, None if self._classes is None else len(self._classes), None, common)
        return objective_for(self._rows, self._classes, options, common)

    def tallies(self, units: TallyUnits) -> Integers:
        """Return the own part of the sums of labels."""
        return self.loss.tallies(self._rows.y, self._rows.weight, units)

    def answer(self, asked: LabelUnits | TrainingStart) -> Integers:
        """Return the vector that the leader asks for; PeerProtocolError if it fits no training that both agreed to."""
        if isinstance(asked, TrainingStart):
            return clips_in_unary(self.starting(asked.start, "TrainingStart"))
        # units below the own bounds would cut the own labels off; more bits would overflow the sum
        allowed, n_rows = [2.0**exponent for exponent in EXPONENTS], len(self._rows.y)
        fits = all(u in allowed and u >= own for u, own in zip((asked.label, asked.weight), self.bounds, strict=True))
        if not self.summed or not fits or asked.bits > TallyUnits.of(n_rows, asked.label, asked.weight).bits:
            raise self._wrong("units that all labels fit, with base_score left out", "LabelUnits")
        return self.tallies(TallyUnits(asked.label, asked.weight, asked.bits))

    def starting(self, start: Array, where: str) -> Objective:
        """Return the loss that starts as the leader's message `where` says, with bounds of own gradients."""
        shape = (len(self.loss.start),)
        values = view(start, np.float64, shape, peer=self._leader, what=f"{where}.start").tolist()
        if not self.summed:
            if tuple(values) != self.given.start:
                raise self._wrong("the start of the job's base_score", where)
            return self.given
        try:
            # a start from which no gradient can be computed, such as infinity, is refused here
            self.loss.starting(values).check()
        except ConfigError:
            raise self._wrong("a start that the loss can have", where) from None
        return objective_for(self._rows, self._classes, self._inputs.options, self._inputs.common, values)

    def _wrong(self, expected: str, where: str) -> PeerProtocolError:
        leader = self._leader
        return PeerProtocolError(leader, f"expected {expected}, got another", at=where)


def agreed_start(sums: SumOpener, own: OwnLabels, opened: OpenedCounts, *, has_rows: bool) -> Objective:
    """Return, as the leader, the loss with a start and bounds that hold for all participants' labels.

    A leader without rows adds nothing to the sums.
    """
    if not own.summed:
        # none under noise, where they are known beforehand
        bounds = opened.bounds
        return own.given.agreed(bounds[:-1], bounds[-1]) if bounds else own.given
    label, weight = opened.bounds
    # in these units all rows' labels add up without overflow
    units = TallyUnits.of(opened.rows, label, weight)
    mine = own.tallies(units)
    sums.broadcast(LabelUnits(units.label, units.weight, units.bits))
    tallies = sums.total(len(mine), mine if has_rows else None)
    start = TrainingStart(Array.of(np.array(own.loss.start_of(tallies.tolist(), units.label))))
    objective = own.starting(start.start, "TrainingStart")
    sums.broadcast(start)
    n_clips = len(objective.clips)
    clips = sums.total(n_clips * len(EXPONENTS), clips_in_unary(objective) if has_rows else None)
    return objective.agreed([largest_in(of) for of in np.split(clips, n_clips)], weight)


def clips_in_unary(objective: Objective) -> Integers:
    """Return the loss's `clips`, one `in_unary` after the other."""
    return np.concatenate([in_unary(clip) for clip in objective.clips])
