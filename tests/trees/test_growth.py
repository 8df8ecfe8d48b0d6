from __future__ import annotations

import numpy as np
import pytest

from treaty.trees.growth import Growth
from treaty.trees.splits import Level, SplitRules, Splits

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
