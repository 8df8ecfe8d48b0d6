from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.trees.splits import MIN_GAIN, Level, SplitRules, Splits, best_of, complete_sums, scan
from trees.oracle import add, best_split, node_slots

RULES = SplitRules(grad_unit=1.0, hess_unit=1.0, min_child_weight=0.0)


def _scan(nodes, rules=RULES, *, categorical=(), features=None, threads=1, source=0) -> Splits:
    """Scan nodes given as, for every feature, the slots of its bins and, last, of its missing values."""
    n_bins = [len(slots) - 1 for slots in nodes[0]]
    offsets = np.concatenate([[0], np.cumsum(np.array(n_bins, int) + 1)]).astype(np.int32)
    sums = np.array([[slot for slots in node for slot in slots] for node in nodes], np.int64).reshape(len(nodes), -1, 3)
    totals = np.array([add(node[0]) for node in nodes], np.int64)
    features = range(len(n_bins)) if features is None else features
    return scan(
        sums, totals, np.array(features, np.int32), offsets, np.isin(np.arange(len(n_bins)), categorical), rules,
        source=source, threads=threads,
    )  # fmt: skip


def _left(splits: Splits, node: int = 0) -> list[int]:
    return np.flatnonzero(splits.left_bins[node]).tolist()


@st.composite
def nodes_with_rules(draw):
    """Nodes of few rows with small whole gradients, so that ties and empty bins abound, and rules of every kind."""
    n_bins = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    n_nodes = draw(st.integers(1, 3))
    n_rows = draw(st.integers(0, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.integers(1, 4))
    heaviest = draw(st.sampled_from([None, 1, 3]))
    nodes = []
    for _ in range(n_nodes):
        codes = rng.integers(0, np.array(n_bins) + draw(st.integers(0, 1)), (n_rows, len(n_bins)))
        grad = rng.integers(-spread, spread + 1, n_rows)
        hess = np.ones(n_rows, int) if heaviest is None else rng.integers(0, heaviest + 1, n_rows)
        slots = node_slots(codes, np.array(n_bins), grad, hess, range(n_rows))
        nodes.append(slots)
    if len(n_bins) > 1 and n_bins[0] <= n_bins[-1] and draw(st.booleans()):
        for slots in nodes:  # the last feature says what the first says
            slots[-1] = [*slots[0][:-1], *[(0, 0, 0)] * (n_bins[-1] - n_bins[0]), slots[0][-1]]
    rules = SplitRules(
        grad_unit=draw(st.sampled_from([1.0, 0.25, 2.0**-16])),
        hess_unit=draw(st.sampled_from([1.0, 0.25])),
        reg_lambda=draw(st.sampled_from([0.0, 1.0, 0.3])),
        reg_alpha=draw(st.sampled_from([0.0, 0.0, 0.5, 2.0])),
        min_split_loss=draw(st.sampled_from([0.0, 0.0, 0.5, 1.5])),
        min_child_weight=draw(st.sampled_from([0.0, 1.0, 2.5])),
        min_child_samples=draw(st.sampled_from([1, 1, 2, 5])),
        max_delta_step=draw(st.sampled_from([0.0, 0.0, 0.3, 0.01])),
    )
    categorical = [f for f in range(len(n_bins)) if draw(st.booleans())]
    features = [f for f in range(len(n_bins)) if draw(st.integers(0, 5))]
    return nodes, rules, categorical, features


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(case=nodes_with_rules(), threads=st.integers(1, 3))
def test_scan_finds_what_the_specification_says(case, threads):
    nodes, rules, categorical, features = case
    found = _scan(nodes, rules, categorical=categorical, features=features, threads=threads)
    is_categorical = [f in categorical for f in range(len(nodes[0]))]
    for node, slots in enumerate(nodes):
        expected = best_split(slots, add(slots[0]), features, is_categorical, rules)
        if expected is None:
            assert found.feature[node] == -1
            assert found.gain[node] == 0.0
            assert _left(found, node) == []
            assert found.left_totals[node].tolist() == [0, 0, 0]
        else:
            assert found.gain[node] == expected.gain
            assert found.feature[node] == expected.feature
            assert set(_left(found, node)) == expected.left
            assert tuple(found.left_totals[node]) == expected.left_totals


NONE = (0, 0, 0)
UP, DOWN = (2, 1, 1), (-2, 1, 1)


@pytest.mark.parametrize(
    ("nodes", "feature", "left"),
    [
        pytest.param([[[UP, DOWN, NONE], [UP, DOWN, NONE]]], 0, [0], id="equal-features-take-the-lower"),
        pytest.param([[[UP, NONE, NONE, DOWN, NONE]]], 0, [0], id="empty-bins-take-the-lowest-cut"),
        pytest.param([[[NONE, UP, NONE, DOWN, NONE]]], 0, [0, 1], id="empty-first-bin-stays-left"),
        pytest.param([[[UP, NONE, DOWN]]], 0, [0], id="missing-right-before-missing-left"),
        pytest.param([[[UP, NONE, NONE, DOWN, DOWN]]], 0, [0], id="missing-right-takes-the-lowest-cut"),
        pytest.param([[[UP, NONE, NONE, DOWN, UP]]], 0, [0, 1, 2, 4], id="missing-left-takes-the-highest-cut"),
        pytest.param([[[UP, UP, DOWN]]], 0, [0, 1], id="all-present-left-missing-right"),
        pytest.param([[[UP, DOWN, UP, NONE], [DOWN, UP, UP, NONE]]], 1, [0], id="larger-gain-of-a-later-feature"),
    ],
)
def test_scan_breaks_ties_as_specified(nodes, feature, left):
    found = _scan(nodes)
    assert found.feature[0] == feature
    assert _left(found) == left


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param([[UP, NONE]], id="single-bin"),
        pytest.param([[NONE, NONE, (3, 2, 2)]], id="all-missing"),
        pytest.param([[NONE, NONE, NONE]], id="no-rows"),
        pytest.param([[UP, UP, UP, NONE]], id="equal-gradients"),
        pytest.param([[(2, 0, 1), (-2, 0, 1), NONE]], id="no-hessian"),
    ],
)
def test_scan_finds_nothing_where_nothing_can_be_gained(slots):
    assert _scan([slots]).feature.tolist() == [-1]


def test_scan_of_no_features_finds_nothing():
    found = _scan([[[UP, DOWN, NONE]]], features=[])
    assert found.feature.tolist() == [-1]
    assert found.gain.tolist() == [0.0]


@pytest.mark.parametrize(
    ("rule", "passing", "failing"),
    [
        # gain of the only cut: 16/5 + 16/5 - 0; four rows and a hessian of 4 on each side
        pytest.param("min_split_loss", 6.4, np.nextafter(6.4, 7), id="gain-at-least-min-split-loss"),
        pytest.param("min_child_weight", 4.0, np.nextafter(4.0, 5), id="hessian-at-least-min-child-weight"),
        pytest.param("min_child_samples", 4, 5, id="rows-at-least-min-child-samples"),
        pytest.param("reg_alpha", 3.99, 4.0, id="reg-alpha-shrinks-to-nothing"),
    ],
)
def test_scan_limits_hold_at_the_boundary(rule, passing, failing):
    slots = [[(4, 4, 4), (-4, 4, 4), NONE]]
    units = {"grad_unit": 1.0, "hess_unit": 1.0, "min_child_weight": 0.0}
    assert _scan([slots], SplitRules(**{**units, rule: passing})).feature[0] == 0
    assert _scan([slots], SplitRules(**{**units, rule: failing})).feature[0] == -1


@pytest.mark.parametrize(("step", "found"), [(1.1e-3, True), (0.9e-3, False)], ids=["above", "below"])
def test_scan_needs_a_gain_above_the_smallest(step, found):
    rules = SplitRules(grad_unit=step, hess_unit=1.0, min_child_weight=0.0)
    splits = _scan([[[(1, 1, 1), (-1, 1, 1), NONE]]], rules)  # gain = step² / 2 + step² / 2
    assert (step**2 > MIN_GAIN) == found
    assert (splits.feature[0] >= 0) == found
    small = replace(rules, min_gain=1e-20)
    assert _scan([[[(1, 1, 1), (-1, 1, 1), NONE]]], small).feature[0] == 0


@pytest.mark.parametrize(
    ("slots", "left"),
    [
        pytest.param([(5, 1, 1), (-5, 1, 1), (4, 1, 1), (-4, 1, 1), NONE], [1, 3], id="sorted-by-ratio"),
        pytest.param([(90, 150, 1), (-50, 90, 1), (-40, 1, 1), NONE], [2], id="ratio-and-not-gradient"),
        pytest.param([(2, 1, 1), NONE, (-2, 1, 1), NONE, NONE], [2], id="categories-without-rows-go-right"),
        pytest.param([(2, 1, 1), (-2, 1, 1), (-2, 1, 1)], [1, 2], id="missing-with-the-left-categories"),
        pytest.param([(-2, 1, 1), (-2, 1, 1), (2, 1, 1)], [0, 1], id="all-categories-left-missing-right"),
    ],
)
def test_scan_sends_a_prefix_of_sorted_categories_left(slots, left):
    assert _left(_scan([[slots]], categorical=[0])) == left


def test_scan_uses_every_one_of_255_bins():
    slots = [[(1, 1, 1)] * 254 + [(-300, 1, 1)] + [NONE]]
    assert _left(_scan([slots])) == list(range(254))
    assert _left(_scan([slots], categorical=[0])) == [254]


@pytest.mark.parametrize("threads", [2, 3, 8], ids=lambda n: f"{n}-threads")
def test_scan_is_the_same_with_any_number_of_threads(threads):
    rng = np.random.default_rng(0)
    n_bins = np.array([31, 255, 2, 7, 1])
    nodes = []
    for _ in range(16):
        codes = rng.integers(0, n_bins + 1, (60, 5))
        nodes.append(node_slots(codes, n_bins, rng.integers(-9, 9, 60), rng.integers(0, 9, 60), range(60)))
    one, many = (_scan(nodes, categorical=[1, 3], threads=n) for n in (1, threads))
    for name in Splits.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(many, name))


def test_best_of_takes_the_higher_gain_and_the_earlier_source_of_equal_ones():
    even, strong = [[UP, DOWN, NONE]], [[(5, 1, 1), (-5, 1, 1), NONE]]
    nothing = [[UP, UP, NONE]]
    sources = [
        _scan([even, even, nothing, nothing], source=0),
        _scan([even, strong, nothing, even], source=1),
        _scan([even, strong, nothing, even], source=2),
    ]
    best = best_of(sources)
    assert best.source.tolist() == [0, 1, 0, 1]
    assert best.feature.tolist() == [0, 0, -1, 0]
    assert best.gain.tolist() == [4.0, 25.0, 0.0, 4.0]
    assert best.left_totals.tolist() == [[2, 1, 1], [5, 1, 1], [0, 0, 0], [2, 1, 1]]


def test_take_keeps_the_fields_of_a_node_together():
    splits = _scan([[[UP, DOWN, NONE]], [[UP, UP, NONE]], [[DOWN, (4, 1, 1), NONE]]])
    taken = splits.take(np.array([2, 0]))
    for name in Splits.__slots__:
        np.testing.assert_array_equal(getattr(taken, name), getattr(splits, name)[[2, 0]])


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        pytest.param([(1, 1, -1), (2, 1, 1), (3, 4, 2), (4, 4, -1)], [1, 4], id="all-children"),
        pytest.param([(1, 1, -1), (2, 1, 1), (4, 3, 2)], [1, 3], id="only-the-larger-of-a-pair"),
        pytest.param([(2, 1, 1)], [1], id="one-child-by-subtraction"),
        pytest.param([(1, 1, -1), (3, 3, -1)], [1, 3], id="asked-ones-alone"),
    ],
)
def test_complete_sums_gives_each_node_its_own_sums(wanted, asked):
    rng = np.random.default_rng(3)
    truth = {node: rng.integers(-99, 99, (4, 3)) for node in (1, 2, 3, 4)}
    parents = np.stack([rng.integers(0, 9, (4, 3)), truth[1] + truth[2], truth[3] + truth[4]])
    nodes = np.array([node for node, _, _ in wanted], np.int32)
    level = Level(
        depth=1,
        nodes=nodes,
        totals=np.zeros((len(nodes), 3), np.int64),
        asked=np.array(asked, np.int32),
        asked_totals=np.zeros((len(asked), 3), np.int64),
        asked_index=np.array([asked.index(answer) for _, answer, _ in wanted], np.int32),
        parent_index=np.array([parent for _, _, parent in wanted], np.int32),
    )
    sums = complete_sums(level, np.stack([truth[node] for node in asked]), parents)
    np.testing.assert_array_equal(sums, np.stack([truth[node] for node in nodes]))


@pytest.mark.parametrize(
    ("total", "rules", "weight"),
    [
        pytest.param((-3, 2, 5), {}, 1.0, id="minus-g-over-h-plus-lambda"),
        pytest.param((-3, 2, 5), {"reg_lambda": 0.0}, 1.5, id="without-lambda"),
        pytest.param((-3, 2, 5), {"reg_alpha": 1.5}, 0.5, id="alpha-shrinks-the-gradient"),
        pytest.param((3, 2, 5), {"reg_alpha": 1.5}, -0.5, id="alpha-shrinks-towards-zero-on-both-sides"),
        pytest.param((3, 2, 5), {"reg_alpha": 4.0}, 0.0, id="alpha-larger-than-the-gradient"),
        pytest.param((3, 2, 5), {"min_child_weight": 2.0}, -1.0, id="min-child-weight-just-reached"),
        pytest.param((3, 2, 5), {"min_child_weight": 2.5}, 0.0, id="min-child-weight-not-reached"),
        pytest.param((3, 0, 5), {"reg_lambda": 1.0}, 0.0, id="no-hessian"),
        pytest.param((3, 0, 5), {"reg_lambda": 0.0}, 0.0, id="no-hessian-and-no-lambda"),
        pytest.param((-6, 8, 5), {"grad_unit": 0.5, "hess_unit": 0.25}, 1.0, id="units"),
        pytest.param((-3, 2, 5), {"max_delta_step": 0.75}, 0.75, id="max-delta-step"),
        pytest.param((3, 2, 5), {"max_delta_step": 0.75}, -0.75, id="max-delta-step-below-zero"),
        pytest.param((-3, 2, 5), {"max_delta_step": 2.0}, 1.0, id="max-delta-step-not-reached"),
        pytest.param((-4, 2, 5), {"leaf_unit": 0.25}, 1.25, id="leaf-unit"),
        pytest.param((-4, 2, 5), {"leaf_unit": 0.25, "learning_rate": 0.3}, 0.5, id="leaf-unit-after-the-rate"),
    ],
)
def test_leaf_weight_follows_the_formula(total, rules, weight):
    settings_ = {"grad_unit": 1.0, "hess_unit": 1.0, "learning_rate": 1.0, "min_child_weight": 0.0, **rules}
    assert SplitRules(**settings_).leaf_value(np.array([total])).tolist() == [weight]
