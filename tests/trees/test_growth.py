from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.trees.growth import Growth
from treaty.trees.splits import Level, SplitRules, Splits, complete_sums, kept_sums

RULES = SplitRules(grad_unit=0.5, hess_unit=0.25, min_child_weight=0.0, max_depth=6, learning_rate=0.1)


class ScriptedSplits:
    """Holds no rows: splits the nodes whose totals `script` names, into the left totals it gives."""

    def __init__(self, root, script) -> None:
        self.root = np.array(root)
        self._script = script
        self.levels: list[Level] = []
        self.divided: list[tuple[list[int], list[int], list[int]]] = []

    def best(self, level):
        self.levels.append(level)
        script = [self._script.get(tuple(total)) for total in level.totals.tolist()]
        return Splits(
            gain=np.array([0.0 if s is None else 10.0 + s[0] for s in script]),
            source=np.array([0 if s is None else s[0] for s in script], np.int32),
            feature=np.array([-1 if s is None else 3 for s in script], np.int32),
            left_bins=np.zeros((len(script), 256), np.bool_),
            left_totals=np.array([(0, 0, 0) if s is None else s[1] for s in script]),
            direction=np.zeros(len(script), np.int8),
        )


def _grow(scripted, rules=RULES):
    growth = Growth(scripted.root, rules)
    while growth.level is not None:
        chosen = growth.take(scripted.best(growth.level))
        if chosen is not None:
            nodes, children, splits = chosen
            scripted.divided.append((nodes.tolist(), children.tolist(), splits.source.tolist()))
            growth.divided(100 + nodes)
    return growth.tree()


def test_growth_writes_splits_and_leaf_weights_from_totals_alone():
    scripted = ScriptedSplits((6, 40, 10), {(6, 40, 10): (2, (-4, 16, 4)), (10, 24, 6): (1, (9, 12, 5))})
    tree = _grow(scripted)
    assert tree.left.tolist() == [1, -1, 3, -1, -1]
    assert tree.source.tolist() == [2, -1, 1, -1, -1]
    assert tree.record.tolist() == [100, -1, 102, -1, -1]
    assert tree.gain.tolist() == [12.0, 0.0, 11.0, 0.0, 0.0]
    assert tree.count.tolist() == [10, 4, 6, 5, 1]
    assert tree.cover.tolist() == [10.0, 4.0, 6.0, 3.0, 3.0]
    expected = [0.0, 0.1 * (2.0 / 5.0), 0.0, 0.1 * (-4.5 / 4.0), 0.1 * (-0.5 / 4.0)]
    np.testing.assert_allclose(tree.value, expected, rtol=1e-15)


def test_growth_asks_a_whole_level_at_once_and_names_the_smaller_child():
    scripted = ScriptedSplits(
        (0, 8, 20),
        {(0, 8, 20): (0, (1, 5, 13)), (1, 5, 13): (0, (3, 2, 6)), (-1, 3, 7): (1, (-3, 1, 3))},
    )
    _grow(scripted)
    assert [level.depth for level in scripted.levels] == [0, 1, 2]
    root, first, second = scripted.levels
    assert (root.nodes.tolist(), root.asked.tolist(), root.parent_index.tolist()) == ([0], [0], [-1])
    assert (first.nodes.tolist(), first.asked.tolist()) == ([1, 2], [2])
    assert (first.asked_index.tolist(), first.parent_index.tolist()) == ([0, 0], [0, -1])
    assert first.asked_totals.tolist() == [[-1, 3, 7]]
    assert (second.nodes.tolist(), second.asked.tolist()) == ([3, 4, 5, 6], [3, 5])
    assert second.asked_index.tolist() == [0, 0, 1, 1]
    assert second.parent_index.tolist() == [-1, 0, -1, 1]
    assert scripted.divided == [([0], [1], [0]), ([1, 2], [3, 5], [0, 1])]


def test_growth_counts_parents_among_the_last_level_not_among_those_split():
    scripted = ScriptedSplits((0, 8, 20), {(0, 8, 20): (0, (1, 5, 13)), (-1, 3, 7): (0, (-3, 1, 3))})
    _grow(scripted)
    last = scripted.levels[2]
    assert last.nodes.tolist() == [3, 4]
    assert last.parent_index.tolist() == [-1, 1]


def test_growth_asks_for_the_left_child_of_equal_ones():
    scripted = ScriptedSplits((0, 8, 20), {(0, 8, 20): (0, (1, 5, 10))})
    _grow(scripted)
    assert scripted.levels[1].asked.tolist() == [1]


def test_growth_subtracts_from_a_child_too_small_to_split():
    scripted = ScriptedSplits((0, 8, 20), {(0, 8, 20): (0, (1, 5, 4))})
    _grow(scripted, SplitRules(grad_unit=1, hess_unit=1, min_child_samples=3))
    level = scripted.levels[1]
    assert (level.nodes.tolist(), level.asked.tolist()) == ([2], [1])
    assert level.asked_totals.tolist() == [[1, 5, 4]]
    assert (level.asked_index.tolist(), level.parent_index.tolist()) == ([0], [0])


@pytest.mark.parametrize(
    ("rules", "n_levels"),
    [
        pytest.param({"max_depth": 0}, 0, id="no-depth"),
        pytest.param({"max_depth": 1}, 1, id="stump"),
        pytest.param({"max_depth": 2}, 2, id="depth-two"),
        pytest.param({"min_child_samples": 10}, 1, id="children-too-small"),
        pytest.param({"min_child_samples": 11}, 0, id="root-too-small"),
        pytest.param({"max_depth": 9}, 3, id="until-nothing-is-found"),
    ],
)
def test_growth_stops(rules, n_levels):
    script = {(0, 8, 20): (0, (1, 5, 10)), (1, 5, 10): (0, (1, 1, 5))}
    scripted = ScriptedSplits((0, 8, 20), script)
    tree = _grow(scripted, SplitRules(grad_unit=1, hess_unit=1, **rules))
    assert len(scripted.levels) == n_levels
    assert len(tree.left) == {0: 1, 1: 3, 2: 5, 3: 5}[n_levels]


def test_growth_of_no_rows_is_one_leaf_of_nothing():
    tree = _grow(ScriptedSplits((0, 0, 0), {}))
    assert tree.left.tolist() == [-1]
    assert tree.value.tolist() == [0.0]


# ---------------------------------------------------------------- by best gain


class RandomSplits:
    """Splits of random gains and sizes, the same for a node however it is reached: nodes are their paths."""

    def __init__(self, seed: int, n_rows: int, share_without: float) -> None:
        self._seed, self._share = seed, share_without
        self.paths, self.rows = [()], {(): n_rows}

    def of(self, path):
        """Return gain and left rows, (0, 0) where there is no split."""
        rng = np.random.default_rng([self._seed, *path, len(path)])
        n = self.rows[path]
        left = int(rng.integers(1, n)) if n > 1 else 0
        return (0.0, 0) if n < 2 or rng.random() < self._share else (1.0 + rng.random(), left)

    def best(self, level):
        found = Splits.none(len(level.nodes))
        for k, node in enumerate(level.nodes.tolist()):
            gain, left = self.of(self.paths[node])
            if gain:
                found.gain[k], found.feature[k], found.left_totals[k] = gain, 0, (0, left, left)
        return found

    def divide(self, nodes):
        for path in (self.paths[node] for node in nodes):
            left = self.of(path)[1]
            for side, n in ((1, left), (2, self.rows[path] - left)):
                self.paths.append((*path, side))
                self.rows[(*path, side)] = n


@given(st.integers(0, 1 << 30), st.integers(1, 200), st.integers(2, 40), st.integers(1, 9), st.integers(1, 4))
@settings(deadline=None)
def test_growth_by_gain_divides_the_leaves_that_a_queue_would_and_sums_follow_from_kept_ones(
    seed, n_rows, max_leaves, max_depth, fewest
):
    rules = SplitRules(
        grad_unit=1.0, hess_unit=1.0, min_child_samples=fewest, max_depth=max_depth, max_leaves=max_leaves
    )
    script = RandomSplits(seed, n_rows, 0.2)
    growth = Growth(np.array([0, n_rows, n_rows]), rules)
    kept, levels, divided = None, 0, set()
    while growth.level is not None:
        level, levels = growth.level, levels + 1
        rows = np.array([script.rows[script.paths[node]] for node in level.asked.tolist()])
        sums = complete_sums(level, np.repeat(rows, 6).reshape(-1, 2, 3), kept).copy()
        assert sums[:, 0, 0].tolist() == level.totals[:, 2].tolist()
        kept = kept_sums(level, kept, sums)
        splits = script.best(level)
        children = splits.left_totals[:, 2], level.totals[:, 2] - splits.left_totals[:, 2]
        splits.feature[np.minimum(*children) < fewest] = -1
        if (taken := growth.take(splits)) is not None:
            divided |= {script.paths[node] for node in taken[0].tolist()}
            script.divide(taken[0].tolist())
            growth.divided(taken[0])

    # one leaf after another, as a queue has them
    queue, expected, leaves = [()], set(), 1

    def gain(path):
        gain, left = script_of_all.of(path)
        n = script_of_all.rows[path]
        allowed = len(path) < max_depth and n >= 2 * fewest and min(left, n - left) >= fewest
        return gain if allowed else 0.0

    script_of_all, number = RandomSplits(seed, n_rows, 0.2), {(): 0}
    while leaves < max_leaves and queue and max(map(gain, queue)) > 0.0:
        best = max(queue, key=lambda path: (gain(path), -number[path]))
        queue.remove(best)
        expected.add(best)
        left = script_of_all.of(best)[1]
        for side, n in ((1, left), (2, script_of_all.rows[best] - left)):
            script_of_all.rows[(*best, side)] = n
            number[(*best, side)] = len(number)
            queue.append((*best, side))
        leaves += 1
    assert divided == expected
    assert levels <= max(1, max_leaves - 1)
    tree = growth.tree()
    assert (tree.left < 0).sum() == len(divided) + 1
