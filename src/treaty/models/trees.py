"""A party's part of a trained model, the file of it, and predictions from all parts.

A pooled model has one part. A vertical one has a part at every party: the active party's holds the trees (the owner and
record number of each split) and all leaf weights; every party's holds its own splits. A part is saved and loaded alone,
but only all of them together decide rows.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.data.columns import Category
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError
from treaty.files import Format, read_file, write_file
from treaty.machine.arrays import Bytes, Flags, Floats, Int32s, Integers, pieces
from treaty.machine.database import Mark
from treaty.privacy.randomised_response import KnownRows, RandomisedRows
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import BitWalk, JoinedSplits, SplitTable, Tree, Walk, join_splits
from treaty.trees.objectives import Objective

FORMAT = Format("model-part", 4)
# Lowest bits of margins, in units of 2^-12 or of numbers of 2^-12 of `grad_clip`: without them whole numbers are left,
# or eighths of `grad_clip`
DROPPED, DROPPED_OF_NUMBERS = 12, 9
LEAF_LEVELS, LEAF_BITS = 6, 24  # of trees whose leaves are shared, and of a share
# rows, and cells, of which a prediction copies the columns at a time
_ROWS_AT_ONCE, _CELLS_AT_ONCE = 1 << 16, 1 << 24


class HeldOut(msgspec.Struct, kw_only=True):
    """Metrics of held-out rows of participants, by group ("all": of all rows), as their counts by score give them.

    `calibration` has the mean score, the share of the second class and the rows of up to ten parts of all rows, by
    score; it is empty but for two classes.
    """

    groups: dict[str, dict[str, float]]
    calibration: list[tuple[float, float, int]] = []


class ModelPart(msgspec.Struct, kw_only=True):
    """One party's part of a trained model, with its own columns and splits.

    `exact_sums` and `sides` have, at the active party, a number for each passive one, at a passive party its own.
    """

    # the same in all parts of a model
    model_id: str
    party: str
    schema: Schema
    splits: SplitTable
    # at the active party, and in a pooled model
    forest: Forest | None = None
    # different trees of a round, which all parties agreed on: how many outputs a prediction may ask for
    trees_a_round: int = 1
    # the cipher it was trained under, empty for a pooled model; at the active party, the reason for the choice, or the
    # expected cost of sealing sums
    encryption: str = ""
    choice: str = ""
    # whether it was trained with hidden rows: sides of these would show in which nodes they were
    hides_rows: bool = False
    # of such a model, the rows that it was trained on: their margins would show the same
    trained: KnownRows | None = None
    # the lowest bits of their margins, in units of leaves, that are left out if these rows are predicted nevertheless
    dropped: int = DROPPED
    # with leaves="shared", at both parties that compute, own shares of the weights of complete trees' leaves, modulo
    # 2^24 and in units of the loss, 2^`LEAF_LEVELS` of each tree; the trees' weights are then no numbers
    leaves: NDArray[np.uint32] | None = None
    # at a passive party, the cost of its noise in words
    spent: str = ""
    # the estimated share of bins that exact sums revealed to the active party
    exact_sums: dict[str, float] = {}
    # the share of bins that sides of splits certainly revealed to the active party, counted over all jobs on the table
    sides: dict[str, float] = {}
    # at a passive party whose training rows were released under noise: the noisy rows, which predictions use
    randomised: RandomisedRows | None = None
    # at a leader, of held-out rows of participants
    held_out: HeldOut | None = None
    # of a FedXGB model, the bins that all users know, encoded: users of hidden trees share bins, not values
    bins: bytes = b""
    # in a file, the ledgers that the party had, by folder, and their numbers of changes, see `check_ledgers`
    kept: dict[str, Mark] = {}

    def __repr__(self) -> str:
        """Return a line without values of rows, keys and thresholds, for notebooks and logs."""
        return f"<ModelPart of {self.party}: {len(self.schema.names)} columns, {self.summary()}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the part to a file, readable by its owner alone; an old file is replaced only by a whole new one."""
        write_file(path, self, FORMAT, self.party)

    @property
    def is_active(self) -> bool:
        """Whether the part has the trees."""
        return self.forest is not None

    @property
    def shared_leaves(self) -> NDArray[np.uint32]:
        """`leaves` by tree, (trees, 2^`LEAF_LEVELS`), none if no weight is shared."""
        leaves = np.zeros(0, np.uint32) if self.leaves is None else self.leaves
        return leaves.reshape(-1, 1 << LEAF_LEVELS)

    @property
    def grown(self) -> Forest:
        """`forest`, of a part that must have it."""
        assert self.forest is not None
        return self.forest

    def summary(self) -> str:
        """Describe the part in a few words."""
        splits = f"{len(self.splits)} splits"
        if self.forest is None:
            return f"{splits} of its own"
        return f"{len(self.forest.trees)} trees, {splits}{' of its own' if len(self.forest.sources) > 1 else ''}"

    def caution(self, margins: Floats) -> str | None:
        """Return a warning about these margins; there is none for trees."""
        return None

    def predictions(self, margins: Floats) -> dict[str, NDArray[Any]]:
        """Return predictions for margins (n_rows, n_outputs) as columns of a file."""
        return RowPredictions(margins, self.grown.objective, self.grown.classes).columns()


@dataclass(frozen=True, slots=True)
class RowPredictions:
    """Rows' margins, float64 (n_rows, n_outputs), with the model's loss and its labels by class number."""

    margins: Floats
    objective: Objective
    classes: list[Category] | None

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return predictions, and probabilities of classes, as columns of a file."""
        predicted = self.objective.predictions(self.margins)
        if self.classes is None:
            return {"prediction": predicted[:, 0]}
        p = of_classes(predicted)
        columns = {"prediction": np.array(self.classes)[np.argmax(p, axis=1)]}
        return columns | {f"probability_{name}": p[:, k] for k, name in enumerate(self.classes)}


def of_classes(p: Floats) -> Floats:
    """Return probabilities (n_rows, n_classes) from those of the second class alone, or of all."""
    return np.hstack([1.0 - p, p]) if p.shape[1] == 1 else p


def load_part(path: str | os.PathLike[str], party: str | None = None) -> ModelPart:
    """Read a part that `ModelPart.save` wrote, of a party (None: of any).

    Raises ConfigError if there is no such file, or it is damaged, no part of a Treaty model, or another party's.
    """
    part = read_file(path, ModelPart, FORMAT, party)
    try:
        check_part(part)
    except ValueError as error:
        raise ConfigError(f"expected a Treaty model, got {error} - at {path}") from None
    return part


def check_part(part: ModelPart) -> None:
    """Raise ValueError for a part whose numbers point outside it: kernels do not check them."""
    n_features, splits = len(part.schema.names), part.splits
    columns = (splits.feature, splits.threshold, splits.missing_left, splits.category_left)
    if len({len(column) for column in columns}) > 1 or any(not 0 <= f < n_features for f in splits.feature):
        raise ValueError("a split names a column the party does not have")
    if any(going is not None and len(going) == 0 for going in splits.category_left):
        raise ValueError("a split on no category")
    if part.leaves is not None and len(part.leaves) % (1 << LEAF_LEVELS):
        raise ValueError("shares of some of a tree's leaves")
    if (forest := part.forest) is None:
        return
    if part.leaves is not None and len(part.shared_leaves) < len(forest.trees):
        raise ValueError("a tree without shares of its leaves")
    n_sources, n_outputs = len(forest.sources), forest.objective.n_outputs
    if part.party not in forest.sources:
        raise ValueError("trees of other parties")
    expected = n_outputs if forest.classes is None else len(forest.classes) if len(forest.classes) > 2 else 1
    if {n_outputs, len(forest.objective.start)} != {max(1, expected)}:
        raise ValueError("a loss that is not of its classes")
    if forest.parallel < 1 or len(forest.trees) % forest.trees_a_round:
        raise ValueError("a round without some of its trees")
    for tree in forest.trees:
        n_nodes, inner = len(tree.left), tree.left >= 0
        if n_nodes == 0 or any(len(getattr(tree, name)) != n_nodes for name in Tree.__slots__):
            raise ValueError("a tree of uneven arrays")
        if part.leaves is None and not np.isfinite(tree.value).all():
            raise ValueError("a leaf weight that is no number")
        below = np.flatnonzero(inner)
        if np.any(tree.left[inner] <= below) or np.any(tree.left[inner] + 1 >= n_nodes):
            raise ValueError("a tree whose children do not follow their parents")
        if not np.array_equal(np.sort(np.concatenate([tree.left[inner], tree.left[inner] + 1])), np.arange(1, n_nodes)):
            raise ValueError("a tree with nodes of several parents or none")
        if np.any((tree.source >= 0) != inner) or np.any(tree.source >= n_sources) or np.any(tree.record[inner] < 0):
            raise ValueError("a tree with a split without an owner")
        own = tree.source == forest.sources.index(part.party)
        if np.any(tree.record[own] >= len(splits)):
            raise ValueError("a tree with a split that is not in the table")


def check_shown(part: ModelPart) -> None:
    """Raise ConfigError for a model whose rows' sides at splits are not to be shown."""
    if part.hides_rows:
        raise ConfigError(
            'this model was trained with hidden rows: expected membership="hidden", or inference="shared", which tell '
            "no sides"
        )


def record_split(splits: SplitTable, bins: Bins, feature: int, left_bins: Flags) -> int:
    """Write a chosen split into the owner's lookup table, in terms of values; return its record number.

    `left_bins`, bool (width,), are the bins going left; entry ``bins.n_bins[feature]`` is for missing values.
    """
    n_bins = int(bins.n_bins[feature])
    missing_left = bool(left_bins[n_bins])
    of_category = bins.category_bins[feature]
    if of_category is not None:
        return splits.add(feature, float("nan"), missing_left, left_bins[of_category].astype(np.uint8).tobytes())
    cuts = bins.cuts[feature]
    below = int(np.count_nonzero(left_bins[:n_bins]))
    threshold = float(cuts[below - 1]) if cuts is not None and below < n_bins else float("inf")
    return splits.add(feature, threshold, missing_left)


def records_used(trees: Sequence[Tree], n_sources: int) -> list[int]:
    """Return how many records of each source the trees use; they are numbered in the order of the trees."""
    return [int(records.max(initial=-1)) + 1 for records in used_records(trees, n_sources)]


def cut_to_records(parts: Sequence[ModelPart]) -> None:
    """Drop the last rounds of an interrupted training, whose splits not every owner has recorded yet."""
    (forest,) = [part.forest for part in parts if part.forest is not None]
    there = [len(part.splits) for name in forest.sources for part in parts if part.party == name]
    of_round = forest.trees_a_round
    for rounds in range(forest.rounds):
        used = records_used(forest.trees[rounds * of_round : (rounds + 1) * of_round], len(there))
        if any(number > held for number, held in zip(used, there, strict=True)):
            return forest.cut(rounds)


def keep_records(splits: SplitTable, n_records: int) -> None:
    """Drop all records but the first `n_records`."""
    for column in (splits.feature, splits.threshold, splits.missing_left, splits.category_left):
        del column[n_records:]


def predict_pooled(parts: Sequence[ModelPart], tables: Sequence[Table], threads: int = 1) -> Floats:
    """Return margins (n_rows, n_outputs) with all parts and tables at hand, in the order of the forest's sources."""
    forest = forest_of(parts)
    splits = join_splits([part.splits for part in parts], [len(part.schema.names) for part in parts])
    margins = np.full((tables[0].n_rows, forest.objective.n_outputs), forest.objective.base_margins)
    walk_tables(Walk(forest.trees, splits), tables, margins, threads)
    return margins


def walk_tables(walk: Walk, tables: Sequence[Table], margins: Floats, threads: int = 1) -> None:
    """Add to margins as `Walk.add_to` does, without a copy of whole tables; these lie side by side."""
    for rows in _row_pieces(len(margins), sum(len(table.columns) for table in tables)):
        parts = [table.matrix(rows) for table in tables]
        matrix = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        walk.add_to(margins[rows], matrix, threads)


def decide(
    splits: SplitTable | JoinedSplits, table: Table, records: Int32s | None = None, threads: int = 1,
    rows: slice | None = None,
) -> Bytes:  # fmt: skip
    """Return what `splits.decide` does, of a table's rows (None: all), without a copy of the whole table."""
    first, stop, _ = (rows or slice(None)).indices(table.n_rows)
    found = [
        splits.decide(table.matrix(slice(first + some.start, first + some.stop)), records, threads)
        for some in _row_pieces(stop - first, len(table.columns))
    ]
    return found[0] if len(found) == 1 else np.concatenate(found, axis=1)


def _row_pieces(n_rows: int, n_columns: int) -> list[slice]:
    """Return slices of rows that start at multiples of 8, since eight decisions share a byte."""
    return pieces(n_rows, max(8, min(_ROWS_AT_ONCE, _CELLS_AT_ONCE // max(1, n_columns)) // 8 * 8))


def forest_of(parts: Sequence[ModelPart]) -> Forest:
    """Return the forest among `parts`; raise DataError unless they are all parts of one model."""
    forests = [part.forest for part in parts if part.forest is not None]
    if len(forests) != 1 or len({part.model_id for part in parts}) != 1:
        raise DataError(f"expected the parts of one model, got {', '.join(part.party for part in parts)}")
    missing = [name for name in forests[0].sources if name not in {part.party for part in parts}]
    if missing:
        raise DataError(f"expected a part of every party, got none of {', '.join(missing)}")
    return with_weights(forests[0], parts)


def with_weights(forest: Forest, parts: Sequence[ModelPart]) -> Forest:
    """Return the forest of some parts with the weights of leaves, of which two may have shares."""
    shares = [part.shared_leaves[: len(forest.trees)] for part in parts if part.leaves is not None]
    if not shares:
        return forest
    if len(shares) != 2 or len(shares[0]) != len(shares[1]):
        raise DataError("expected shares of leaf weights of two parties, of as many trees")
    top = 1 << LEAF_BITS - 1
    whole = ((shares[0] + shares[1]) & np.uint32(2 * top - 1)).astype(np.int64)
    weights, trees = (whole ^ top) - top, []
    unit = forest.objective.leaf_unit * forest.objective.grad_clip
    for tree, of_tree in zip(forest.trees, weights, strict=True):
        value = np.zeros_like(tree.value)
        for _, node, level, place in layout_of([tree]):
            if tree.left[node] < 0:
                value[node] = of_tree[place << LEAF_LEVELS - level] * unit
        trees.append(replace(tree, value=value))
    joined = copy.copy(forest)
    joined.trees = trees
    return joined


def layout_of(trees: Sequence[Tree]) -> Iterator[tuple[int, int, int, int]]:
    """Yield of every node its tree, its number there, and its level and place in a complete tree."""
    for number, tree in enumerate(trees):
        waiting = [(0, 0, 0)]
        while waiting:
            node, level, place = waiting.pop()
            yield number, node, level, place
            if (left := int(tree.left[node])) >= 0:
                waiting += [(left, level + 1, 2 * place), (left + 1, level + 1, 2 * place + 1)]


def check_starts(forest: Forest, *, given: bool) -> None:
    """Raise ConfigError unless rows to predict have margins of their own exactly where those of training had."""
    if given != forest.base_margin:
        raise ConfigError(
            "the model's training rows started from margins of their own: give base_margin of the rows to predict (0 "
            "for what trees add)"
            if forest.base_margin
            else "the model was trained without base_margin: leave it out"
        )


@dataclass(frozen=True, slots=True)
class RowDecisions:
    """Trees, and the decisions of all rows at every split they use.

    The trees' records are lines of `packed`, uint8 (n_records, ceil(n_rows / 8)) as of `numpy.packbits`, 1 for left;
    `base`, (n_sources + 1,), is the line of each source's record 0. `used` has the original record numbers of each
    source, in the order of its lines.
    """

    trees: list[Tree]
    base: Integers
    packed: Bytes
    used: list[Int32s]
    n_rows: int


def row_decisions(part: ModelPart, table: Table, threads: int = 1) -> RowDecisions:
    """Decide rows at all splits of a model that is whole in one part."""
    return RowDecisions(
        trees=part.grown.trees, base=np.array([0, len(part.splits)]),
        packed=decide(part.splits, table, threads=threads), used=[np.arange(len(part.splits), dtype=np.int32)],
        n_rows=table.n_rows,
    )  # fmt: skip


def used_records(trees: Sequence[Tree], n_sources: int) -> list[Int32s]:
    """Return the record numbers of each source that `trees` use, ascending."""
    source = np.concatenate([tree.source for tree in trees] or [np.zeros(0, np.int16)])
    record = np.concatenate([tree.record for tree in trees] or [np.zeros(0, np.int32)])
    return [np.unique(record[source == number]).astype(np.int32) for number in range(n_sources)]


def renumber(tree: Tree, used: Sequence[Int32s]) -> Tree:
    """Renumber a tree's records by their place among those used."""
    record = tree.record.copy()
    for source, records in enumerate(used):
        mine = tree.source == source
        record[mine] = np.searchsorted(records, record[mine])
    return replace(tree, record=record)


def margins(decisions: RowDecisions, objective: Objective, threads: int = 1) -> Floats:
    """Return margins, float64 (n_rows, n_outputs)."""
    total = np.full((decisions.n_rows, objective.n_outputs), objective.base_margins)
    BitWalk(decisions.trees, decisions.base).add_to(total, decisions.packed, threads)
    return total


def leaves(decisions: RowDecisions, threads: int = 1) -> Int32s:
    """Return the leaf each row ends in, int32 (n_rows, n_trees): its number among the tree's nodes."""
    return BitWalk(decisions.trees, decisions.base).leaves(decisions.packed, decisions.n_rows, threads)


def staged_margins(decisions: RowDecisions, forest: Forest, threads: int = 1) -> Iterator[Floats]:
    """Yield margins, float64 (n_rows, n_outputs), after each round; the last are those of `margins`, bit for bit."""
    total = np.full((decisions.n_rows, forest.objective.n_outputs), forest.objective.base_margins)
    for start in range(0, len(decisions.trees), forest.trees_a_round):
        trees = decisions.trees[start : start + forest.trees_a_round]
        BitWalk(trees, decisions.base).add_to(total, decisions.packed, threads)
        yield total.copy()
