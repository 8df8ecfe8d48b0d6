"""A served model: read from a part, with its trees prepared once, and asked for margins of a few rows at a time.

Fallback without partners: at a partner's split, this party does not know which way a row goes. The row's expected value
there is the mean of both children, weighted by their covers (sums of hess), as in path-dependent TreeSHAP
(`treaty.trees.shap`); the active party's part has these. A mean of two subtrees is a sum of two trees with smaller leaf
values, so every tree becomes a few trees of own splits. To send all rows to the heavier child is much worse, see
docs/serving.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.estimators.reporting import read_saved
from treaty.files import kind_of
from treaty.models.checkpoints import FORMAT as CHECKPOINT
from treaty.models.linear import FORMAT as LINEAR
from treaty.models.linear import LinearPart, load_linear_part
from treaty.models.trees import FORMAT as TREES
from treaty.models.trees import ModelPart, check_starts, load_part
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import Tree, Walk, join_splits
from treaty.trees.shap import node_weights


def forest_of_active(part: ModelPart) -> Forest:
    """Return the forest of an active party's part; ConfigError for one whose rows need margins of their own."""
    check_starts(part.grown, given=False)
    return part.grown


@dataclass(frozen=True, slots=True)
class _ExpectedNode:
    """A leaf with a value, or a split by an own record with its children."""

    value: float = 0.0
    record: int = -1
    children: tuple[_ExpectedNode, _ExpectedNode] | None = None

    def times(self, share: float) -> _ExpectedNode:
        """Return the tree with its leaf values multiplied."""
        if self.children is None:
            return _ExpectedNode(share * self.value)
        left, right = self.children
        return _ExpectedNode(record=self.record, children=(left.times(share), right.times(share)))


_NOTHING = _ExpectedNode()


def expected_walk(part: ModelPart) -> Walk:
    """Prepare trees for rows of which only the own columns are known.

    Raises ConfigError if the trees use no split of this party, so that all rows get one prediction, or if the part has
    no covers.
    """
    forest = forest_of_active(part)
    own, n_outputs = forest.sources.index(part.party), forest.objective.n_outputs
    if not any(np.any(tree.source == own) for tree in forest.trees):
        raise ConfigError(f"without partners, all rows get the same prediction: no split is on columns of {part.party}")
    if any(tree.count[0] <= 0 for tree in forest.trees):
        raise ConfigError("a fallback on own columns needs the covers of nodes, which the model lacks")
    expected = [_expected(tree, own, node_weights(tree), 0) for tree in forest.trees]
    trees = []
    # Tree i adds to output i % n_outputs.
    for start in range(0, len(expected), n_outputs):
        for side_by_side in zip_longest(*expected[start : start + n_outputs], fillvalue=_NOTHING):
            trees += [_flat(root) for root in side_by_side]
    return Walk(trees, join_splits([part.splits], [len(part.schema.names)]))


def _expected(tree: Tree, own: int, weights: NDArray[np.float64], node: int) -> list[_ExpectedNode]:
    """Return trees of own splits whose sum is the expected value of the subtree below a node."""
    left = int(tree.left[node])
    if left < 0:
        return [_ExpectedNode(float(tree.value[node]))]
    below = [_expected(tree, own, weights, child) for child in (left, left + 1)]
    if tree.source[node] == own:
        record = int(tree.record[node])
        return [_ExpectedNode(record=record, children=(l, r)) for l, r in zip_longest(*below, fillvalue=_NOTHING)]
    # A partner's split: mix the children's trees by their covers, and merge constant trees into one leaf.
    share = float(weights[left] / (weights[left] + weights[left + 1]))
    parts = [root.times(of) for roots, of in zip(below, (share, 1.0 - share), strict=True) for root in roots]
    splits, leaves = [root for root in parts if root.children], [root for root in parts if not root.children]
    return [*([_ExpectedNode(sum(leaf.value for leaf in leaves))] if leaves else []), *splits]


def _flat(root: _ExpectedNode) -> Tree:
    # `Tree` stores nodes by level, with siblings side by side: a left child's number is enough.
    nodes = [root]
    for node in nodes:
        nodes += node.children or ()
    # Of left children, in order.
    numbers = np.cumsum([1, *(2 for node in nodes if node.children)])[:-1].tolist()
    is_split = np.array([node.children is not None for node in nodes])
    left = np.full(len(nodes), -1, np.int32)
    left[is_split] = numbers
    zeros = np.zeros(len(nodes))
    return Tree(
        source=np.where(is_split, 0, -1).astype(np.int16), record=np.array([node.record for node in nodes], np.int32),
        left=left, value=np.array([node.value for node in nodes]), gain=zeros, cover=zeros,
        count=np.zeros(len(nodes), np.int64),
    )  # fmt: skip


Margins = NDArray[np.float64]


class ServedModel:
    """The active party's part of a model, or a whole model, prepared to predict rows of its own columns.

    `schema` has the columns of a row to predict, `classes` the labels that may be predicted (None for numbers), and
    `needs` the parties that are needed for predictions: owners of used splits, or of weights.
    """

    def __init__(self, part: ModelPart | LinearPart, needs: Sequence[str] | None = None) -> None:
        """`needs` are the other owners of a linear model, whose part does not name them; not needed for trees.

        Raises ConfigError if the part is a passive party's.
        """
        if not part.is_active:
            holds = "trees" if isinstance(part, ModelPart) else "intercept"
            raise ConfigError(
                f"expected the part of the active party, which has the {holds}, got that of {part.party}, "
                "a passive one: serve the model at the party with the labels"
            )
        self.part, self.schema = part, part.schema
        self._margins: Callable[[NDArray[Any], int], Margins] = self._linear
        if isinstance(part, LinearPart):
            self.classes: list[Category] | None = part.classes
            others = tuple(name for name in part.alone if name != part.party) or ("the other parties",)
            # A part that names a cipher was trained with others.
            self.needs = tuple(needs) if needs is not None else others if part.encryption else ()
            return
        forest = forest_of_active(part)
        self.classes = forest.classes
        used = {int(source) for tree in forest.trees for source in np.unique(tree.source) if source >= 0}
        owners = [name for source, name in enumerate(forest.sources) if source in used]
        self.needs = tuple(name for name in owners if name != part.party)
        if not self.needs:
            # All splits are the part's own: in the walk, it is the only owner.
            trees = [replace(tree, source=np.where(tree.source < 0, -1, 0).astype(np.int16)) for tree in forest.trees]
            walk = Walk(trees, join_splits([part.splits], [len(part.schema.names)]))
            self._margins = self._by_walk(part, walk)

    def margins(self, matrix: NDArray[Any], threads: int = 1) -> Margins:
        """Return the margins of rows (n_rows, n_features); only for a model that needs no partner."""
        assert not self.needs, "the model needs partners"
        return self._margins(matrix, threads)

    def fallback(self) -> Callable[[NDArray[Any], int], Margins]:
        """Return a function that computes margins from own columns alone.

        Partners' columns count with their average: for trees see `expected_walk`; in a linear model, prepared columns
        have mean zero.

        Raises ConfigError if the part lacks what this needs.
        """
        return self._by_walk(self.part, expected_walk(self.part)) if isinstance(self.part, ModelPart) else self._linear

    def predictions(self, margins: Margins) -> list[dict[str, Any]]:
        """Return the predictions for margins: for each row, the columns that ``treaty predict`` writes."""
        if isinstance(self.part, LinearPart) and not self.part.of_classes:
            # Partners give them as (n_rows, 1)
            margins = margins.reshape(-1)
        columns = self.part.predictions(margins)
        names = tuple(columns)
        by_row = zip(*(values.tolist() for values in columns.values()), strict=True)
        return [dict(zip(names, row, strict=True)) for row in by_row]

    def table(self, matrix: NDArray[Any]) -> Table:
        """Return rows as a table of the party's own columns."""
        return Table(self.schema, list(np.ascontiguousarray(matrix.T)), len(matrix))

    def described(self) -> dict[str, Any]:
        """Return what a caller must know: columns with kinds and categories, classes, needed partners."""
        names, kinds, categories = self.schema.names, self.schema.kinds, self.schema.categories
        of_kind = zip(names, kinds, categories, strict=True)
        columns = [
            {"name": name, "kind": kind} | ({} if values is None else {"categories": list(values)})
            for name, kind, values in of_kind
        ]
        return {
            "model": self.part.model_id, "party": self.part.party, "summary": self.part.summary(), "columns": columns,
            "classes": self.classes, "needs": list(self.needs),
        }  # fmt: skip

    def _by_walk(self, part: ModelPart, walk: Walk) -> Callable[[NDArray[Any], int], Margins]:
        objective = forest_of_active(part).objective
        base, n_outputs = np.asarray(objective.base_margins, np.float64), objective.n_outputs

        def margins(matrix: NDArray[Any], threads: int) -> Margins:
            found = np.full((len(matrix), n_outputs), base)
            walk.add_to(found, matrix, threads)
            return found

        return margins

    def _linear(self, matrix: NDArray[Any], threads: int) -> Margins:
        assert isinstance(self.part, LinearPart)
        return self.part.margins(self.table(matrix))


def load_model(path: Path) -> ServedModel:
    """Read a model to serve: a part of a job (NAME.part), or the folder of a whole model.

    Raises ConfigError if it is no part of a finished model, a passive party's part, or a folder with several parts.
    """
    if path.is_dir():
        folder, parts = path, sorted(path.glob("*.part"))
        if len(parts) != 1:
            named = f"{len(parts)} of them: name the active party's file" if parts else "none"
            raise ConfigError(f"expected a folder with one part of a model, got {named} - at {folder}")
        path = parts[0]
    kind = kind_of(path)
    if kind == TREES.kind:
        return ServedModel(load_part(path))
    if kind == LINEAR.kind:
        part, owners = load_linear_part(path), None
        # The file of a whole saved model, in the same folder, has the other owners.
        if path.with_name("model.json").is_file():
            owners = [name for name in read_saved(path.parent).parties if name != part.party]
        return ServedModel(part, owners)
    if kind == CHECKPOINT.kind:
        raise ConfigError(f"expected a finished model, got a checkpoint; end the training first - at {path}")
    raise ConfigError(f"expected a part of a model, got {kind or 'another kind of file'} - at {path}")
