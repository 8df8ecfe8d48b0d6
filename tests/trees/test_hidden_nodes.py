"""Nodes that only the own source may see: reduced leakage and the purity guard."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from treaty.trees.columns import SplitSearch, grow_tree
from treaty.trees.splits import Level, SplitRules
from trees.plain import random_codes, random_labels, sampled, train

RULES = SplitRules(grad_unit=0.5, hess_unit=0.25, max_depth=4, min_child_weight=0.0)


class _Spied:
    """A source that notes the rows of every node it is asked about."""

    def __init__(self, source):
        self._source = source
        self.trees = 0
        self.seen = []

    def __getattr__(self, name):
        return getattr(self._source, name)

    def start_tree(self, grad, hess, rows, columns):
        self.trees += 1
        self._source.start_tree(grad, hess, rows, columns)

    def ask_sums(self, level, rows):
        members, starts = rows.rows(level.asked, sampled=True)
        self.seen += [frozenset(members[a:b].tolist()) for a, b in itertools.pairwise(starts)]
        self._source.ask_sums(level, rows)


def _grow(seed, may_show=None, alone_trees=0, trees=1, n_rows=80, rules=RULES, rows=None):
    rng = np.random.default_rng(seed)
    table = random_codes(rng, n_rows, [5, 7, 4, 6, 3], missing=0.1, categorical=[3])
    y = random_labels(rng, table, "logistic")
    grad, hess = rng.integers(-4, 5, n_rows) + (8 * y).astype(np.int64) - 4, rng.integers(1, 4, n_rows)
    parts = table.cut(1, 3)
    sources = [_Spied(part.source()) for part in parts]
    sample, grown = sampled(grad, hess, 5, rows), []
    for number in range(trees):
        search = SplitSearch(sources, sample, rules, own=1, alone=number < alone_trees, may_show=may_show)
        grown.append(grow_tree(search, sample, rules)[0])
    return parts, sources, grown, grad, hess, y


def _rows_of(tree, parts):
    """Return the rows of every node, walked by the owners' lookup tables."""
    n_rows = len(parts[0].codes)
    rows = [np.arange(n_rows)] + [None] * (len(tree.left) - 1)
    for node, child in enumerate(tree.left.tolist()):
        if child >= 0:
            part = parts[tree.source[node]]
            bits = part.splits.decide(part.matrix, tree.record[node : node + 1])[0]
            left = np.unpackbits(bits, count=n_rows).astype(bool)[rows[node]]
            rows[child], rows[child + 1] = rows[node][left], rows[node][~left]
    return rows


def _pure(y, limit):
    def may_show(rows, starts):
        return np.array([abs(y[rows[a:b]].mean() - y.mean()) <= limit for a, b in itertools.pairwise(starts)])

    return may_show


def test_first_trees_grow_on_the_own_columns_alone():
    _parts, sources, grown, *_ = _grow(0, alone_trees=2, trees=3)
    assert [source.trees for source in sources] == [1, 3, 1]
    for tree in grown[:2]:
        assert set(tree.source[tree.left >= 0]) == {1}
    assert set(grown[2].source[grown[2].left >= 0]) > {1}


def test_first_trees_equal_those_of_the_own_table():
    rng = np.random.default_rng(1)
    table = random_codes(rng, 200, [5, 7, 4], missing=0.1)
    y = random_labels(rng, table, "logistic")
    alone = train(table.columns(0, 2), y, n_estimators=1, max_depth=3)
    parts = table.cut(2)
    grad, hess, _ = alone.objective.gradients(alone.start(200), y, None)
    sample = sampled(grad[0], hess[0], 3)
    search = SplitSearch([part.source() for part in parts], sample, alone.rules, own=0, alone=True)
    tree, _ = grow_tree(search, sample, alone.rules)
    assert tree == alone.trees[0]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.floats(0.05, 0.5))
def test_others_never_see_nor_can_infer_a_node_beyond_the_limit(seed, limit):
    *_, y = _grow(seed)
    parts, sources, (tree,), _, _, y = _grow(seed, may_show=_pure(y, limit))
    rows = _rows_of(tree, parts)
    for source in (sources[0], sources[2]):
        seen = set(source.seen)
        # a shown pair shows both: the one asked, and its parent less that
        for child in tree.left[tree.left >= 0].tolist():
            pair = [frozenset(rows[child].tolist()), frozenset(rows[child + 1].tolist())]
            if seen & set(pair):
                assert all(abs(y[list(node)].mean() - y.mean()) <= limit for node in pair)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.floats(0.1, 0.4))
def test_what_is_shown_of_a_sample_is_within_the_limit_too(seed, limit):
    rows = np.sort(np.random.default_rng(seed).choice(200, 50, replace=False)).astype(np.int32)
    *_, y = _grow(seed, n_rows=200)
    _, sources, _, _, _, y = _grow(seed, may_show=_pure(y, limit), n_rows=200, rows=rows)
    for node in sources[0].seen[1:]:  # the sample itself says nothing of labels
        assert node <= set(rows.tolist())
        assert abs(y[list(node)].mean() - y.mean()) <= limit


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.floats(0.05, 0.5), least=st.sampled_from([1, 3, 5]))
@example(seed=12, limit=0.4, least=3)  # hidden nodes that end as leaves: all of the next level is shown again
@example(seed=17, limit=0.4, least=5)
def test_every_split_is_the_best_of_those_who_may_see_the_node(seed, limit, least):
    rules = replace(RULES, min_child_samples=least, max_depth=6)
    *_, y = _grow(seed, n_rows=60)
    parts, _, (tree,), grad, hess, y = _grow(seed, may_show=_pure(y, limit), rules=rules, n_rows=60)
    rows = _rows_of(tree, parts)
    shown, depth = [True] + [False] * (len(tree.left) - 1), [0] * len(tree.left)
    for node, child in enumerate(tree.left.tolist()):
        if depth[node] < rules.max_depth and len(rows[node]) >= 2 * least:
            allowed = [0, 1, 2] if shown[node] else [1]
            gain, source = _best_alone(parts, allowed, grad, hess, rows[node], rules)
            assert tree.gain[node] == gain
            assert tree.source[node] == source
        if child >= 0:
            fit = shown[node] and all(abs(y[rows[c]].mean() - y.mean()) <= limit for c in (child, child + 1))
            shown[child] = shown[child + 1] = fit
            depth[child] = depth[child + 1] = depth[node] + 1


def _best_alone(parts, allowed, grad, hess, rows, rules):
    """Return the gain and owner of the best split of a node that is the root of a tree of its own."""
    n_columns = sum(len(parts[k].n_bins) for k in allowed)
    sample = sampled(grad, hess, n_columns, np.sort(rows).astype(np.int32))
    search = SplitSearch([parts[k].source() for k in allowed], sample, rules)
    root, total = np.zeros(1, np.int32), sample.totals
    level = Level(0, root, total[None], root, total[None], root, root - 1)
    search.ask(level, sample.partition())
    best = search.choose(level)
    return (best.gain[0], allowed[best.source[0]]) if best.feature[0] >= 0 else (0.0, -1)


def test_a_guard_that_hides_everything_leaves_the_own_columns():
    def hide(rows, starts):
        return np.zeros(len(starts) - 1, bool)

    _, sources, (tree,), *_ = _grow(3, may_show=hide)
    assert len(sources[0].seen) == 1  # the root
    inner = tree.left >= 0
    assert set(tree.source[1:][inner[1:]]) == {1}


@pytest.mark.parametrize("kept", [[True, False, True], [False, False, True], [True, True, True]])
def test_level_without_some_nodes_counts_its_parents_anew(kept):
    index = np.array([0, 1, 2], np.int32)
    level = Level(2, index + 3, np.arange(9).reshape(3, 3), index + 3, np.arange(9).reshape(3, 3), index, index)
    part = level.only(np.array(kept), np.array([True, False, True]) if kept[1] is False else np.ones(3, bool))
    assert part.nodes.tolist() == [node for node, keep in zip([3, 4, 5], kept, strict=True) if keep]
    assert part.asked[part.asked_index].tolist() == part.nodes.tolist()
    assert part.parent_index[-1] == (1 if kept[1] is False else 2)
