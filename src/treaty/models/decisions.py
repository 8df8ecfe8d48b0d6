"""Rows walked down trees by decisions already made at every split: margins, those of each round, and leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.models.trees import ModelPart
from treaty.trees.ensemble import Tree, leaves_from_bits, margins_from_bits
from treaty.trees.objectives import Objective


@dataclass(frozen=True, slots=True)
class RowDecisions:
    """Trees, and which way each row goes at every split they use."""

    trees: list[Tree]  # their records are lines of `packed`, counted from the source's `base`
    base: NDArray[np.int64]  # (n_sources + 1,) line of `packed` of each source's record 0
    packed: NDArray[np.uint8]  # (n_records, ceil(n_rows / 8)) a bit per row, 1 for left, as `numpy.packbits` packs them
    used: list[NDArray[np.int32]]  # of each source, the original record numbers, in the order of its lines
    n_rows: int


def row_decisions(part: ModelPart, table: Table, threads: int = 1) -> RowDecisions:
    """Decide rows at all splits of a model that is whole in one part."""
    assert part.forest is not None
    return RowDecisions(
        trees=part.forest.trees,
        base=np.array([0, len(part.splits)]),
        packed=part.splits.decide(table.matrix(), threads=threads),
        used=[np.arange(len(part.splits), dtype=np.int32)],
        n_rows=table.n_rows,
    )


def used_records(trees: Sequence[Tree], n_sources: int) -> list[NDArray[np.int32]]:
    """Return, of each source, the record numbers that `trees` use, ascending."""
    source = np.concatenate([tree.source for tree in trees] or [np.zeros(0, np.int16)])
    record = np.concatenate([tree.record for tree in trees] or [np.zeros(0, np.int32)])
    return [np.unique(record[source == number]).astype(np.int32) for number in range(n_sources)]


def renumber(tree: Tree, used: Sequence[NDArray[np.int32]]) -> Tree:
    """Renumber a tree's records by their place among those used."""
    record = tree.record.copy()
    for source, records in enumerate(used):
        mine = tree.source == source
        record[mine] = np.searchsorted(records, record[mine])
    return replace(tree, record=record)


def margins(decisions: RowDecisions, objective: Objective, threads: int = 1) -> NDArray[np.float64]:
    """Return margins, float64 (n_rows, n_outputs)."""
    total = np.full((decisions.n_rows, objective.n_outputs), objective.base_margins)
    margins_from_bits(decisions.trees, decisions.base, decisions.packed, total, threads)
    return total


def leaves(decisions: RowDecisions, threads: int = 1) -> NDArray[np.int32]:
    """Return the leaf each row ends in, int32 (n_rows, n_trees): its number among the tree's nodes."""
    return leaves_from_bits(decisions.trees, decisions.base, decisions.packed, decisions.n_rows, threads)


def staged_margins(decisions: RowDecisions, objective: Objective, threads: int = 1) -> Iterator[NDArray[np.float64]]:
    """Yield margins, float64 (n_rows, n_outputs), after each round; the last are those of `margins`, bit for bit."""
    total = np.full((decisions.n_rows, objective.n_outputs), objective.base_margins)
    for start in range(0, len(decisions.trees), objective.n_outputs):
        trees = decisions.trees[start : start + objective.n_outputs]
        margins_from_bits(trees, decisions.base, decisions.packed, total, threads)
        yield total.copy()
