"""Trees that grow together are those that grow one after another."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.trees.boosting import TreeSample
from treaty.trees.columns import ColumnSource, SplitSearch, grow_tree
from treaty.trees.lockstep import Lockstep, LockstepRows, joined_sample
from treaty.trees.splits import SplitRules


def columns(rng: np.random.Generator, n_rows: int, n_columns: int) -> ColumnSource:
    codes = rng.integers(0, 5, (n_rows, n_columns)).astype(np.uint8)
    offsets = np.arange(0, 6 * n_columns + 1, 6, dtype=np.int32)
    return ColumnSource(codes, offsets, np.zeros(n_columns, np.bool_), lambda feature, left: feature)


def samples(rng: np.random.Generator, n_rows: int, n_columns: int, trees: int, *, sampled: bool) -> list[TreeSample]:
    of_all = np.arange(n_columns, dtype=np.int32)
    found = []
    for number in range(trees):
        # trees of different depths: the first has hardly a split
        grad = rng.integers(-1000, 1000, n_rows) * (rng.random(n_rows) < 0.02 if number == 0 else 1)
        rows = np.flatnonzero(rng.random(n_rows) < 0.6).astype(np.int32) if sampled else None
        found.append(TreeSample(grad, rng.integers(1, 250, n_rows), rows, of_all))
    return found


def grow_together(sources: list[ColumnSource], of: list[TreeSample], rules: SplitRules):
    rows, growth = LockstepRows(of), Lockstep(of, rules)
    search = SplitSearch(sources, joined_sample(of), rules)
    levels = 0
    while growth.level is not None:
        search.ask(growth.level, rows)
        levels += 1
        chosen = growth.take(search.choose(growth.level))
        if chosen is not None:
            nodes, children, splits = chosen
            records, left = search.decide(nodes, splits, rows)
            rows.divide(nodes, children, left)
            growth.divided(records)
    search.end()
    return growth.trees(), rows, levels


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), trees=st.integers(1, 5), n_rows=st.integers(2, 400), depth=st.integers(0, 4),
    sampled=st.booleans(),
)  # fmt: skip
def test_trees_grow_together_as_they_do_alone(seed, trees, n_rows, depth, sampled):
    rng = np.random.default_rng(seed)
    sources = [columns(rng, n_rows, 2), columns(rng, n_rows, 1)]
    rules = SplitRules(
        grad_unit=1 / 1000, hess_unit=1 / 1000, max_depth=depth, min_child_samples=5, reg_lambda=1.0,
        learning_rate=0.3,
    )  # fmt: skip
    of = samples(rng, n_rows, 3, trees, sampled=sampled)
    together, rows, levels = grow_together(sources, of, rules)
    alone = [grow_tree(SplitSearch(sources, sample, rules), sample, rules) for sample in of]
    for (tree, _), partition, (expected, of_expected) in zip(together, rows.of_trees, alone, strict=True):
        for name in ("source", "record", "left", "value", "gain", "cover", "count"):
            np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name))
        nodes = np.arange(len(tree.left), dtype=np.int32)
        leaves = nodes[tree.left < 0]
        for mine, theirs in zip(
            partition.rows(leaves, sampled=False), of_expected.rows(leaves, sampled=False), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
    assert levels <= depth


def test_rows_and_totals_of_nodes_in_any_order():
    rng = np.random.default_rng(1)
    of = samples(rng, 60, 1, 3, sampled=True)
    rows = LockstepRows(of)
    roots = (np.arange(3) * ((1 << 30) // 3)).astype(np.int32)
    left = rng.random(180) < 0.5
    rows.divide(roots, roots + 1, left)
    nodes = np.array([roots[2] + 2, roots[0] + 1, roots[2] + 1, roots[0] + 2], np.int32)
    np.testing.assert_array_equal(rows.trees(nodes), [2, 0, 2, 0])
    found, starts = rows.rows(nodes, sampled=False)
    apart, _ = rows.rows_of_trees(nodes, sampled=False)
    for k, (tree, goes) in enumerate([(2, False), (0, True), (2, True), (0, False)]):
        whole = of[tree].partition().rows(np.zeros(1, np.int32), sampled=False)[0]
        mine = found[starts[k] : starts[k + 1]]
        np.testing.assert_array_equal(np.sort(mine), np.sort(whole[left[60 * tree : 60 * tree + 60] == goes]))
        np.testing.assert_array_equal(apart[starts[k] : starts[k + 1]], mine + 60 * tree)
    grad, hess = np.stack([s.grad for s in of]), np.stack([s.hess for s in of])
    going = rng.random(len(found)) < 0.5
    totals = rows.left_totals(grad, hess, nodes, going)
    for k, tree in enumerate([2, 0, 2, 0]):
        mine = found[starts[k] : starts[k + 1]][going[starts[k] : starts[k + 1]]]
        mine = mine[np.isin(mine, of[tree].rows)]
        assert totals[k].tolist() == [grad[tree][mine].sum(), hess[tree][mine].sum(), len(mine)]
