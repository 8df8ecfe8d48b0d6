"""FederBoost on columns, sums corrected for the noise: right on average, for gains alone, and only where that holds."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.federboost_vertical.test_roles import (
    NO_NOISE,
    bools,
    buckets,
    columns_of,
    messages,
    play_training,
)
from systems.vertical.lossless import train_both
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.data.table import to_table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.privacy.randomised_response import chances, randomise_buckets, unbiased
from treaty.systems.federboost_vertical.buckets import Buckets, NoisyColumns, UsedColumns
from treaty.systems.federboost_vertical.system import SYSTEM
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import ColumnSource, SplitSearch
from treaty.trees.growth import Growth
from treaty.trees.objectives import SquaredError
from treaty.trees.splits import SplitRules, Splits, settle

OBJECTIVE = SquaredError(fractional_bits=16)
RULES = SplitRules(grad_unit=OBJECTIVE.grad_unit, hess_unit=OBJECTIVE.hess_unit, max_depth=1)


def randomised(rng: np.random.Generator, codes: np.ndarray, size: int, epsilon: float) -> np.ndarray:
    return randomise_buckets(
        codes.astype(np.uint8), size, epsilon, rng.integers(0, 2**64, (len(codes), 2), np.uint64)
    )  # fmt: skip


def histogram(codes: np.ndarray, size: int, *numbers: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(codes, number, size) for number in numbers], axis=-1).astype(np.int64)


def correcting(columns: list[np.ndarray], present: list[int], missing: list[bool], **given: Any) -> NoisyColumns:
    """Return a source of these noisy columns that corrects what can be corrected."""
    source = columns_of(buckets(columns, present, missing, **given), len(columns[0]))
    source.correct(OBJECTIVE, len(columns[0]), resumed=False)
    return source


def sums_of(source: NoisyColumns, grad: np.ndarray, hess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sums of all rows, and totals."""
    source.start_tree(grad, hess, None, np.arange(len(source.categorical), dtype=np.int32))
    sums = source._histograms.sums(np.arange(len(grad), dtype=np.int32), np.array([0, len(grad)]))
    source.end_tree()
    return sums, np.array([[grad.sum(), hess.sum(), len(grad)]])


# ---------------------------------------------------------------- the estimate


@given(sums=st.lists(st.integers(-(2**30), 2**30), min_size=2, max_size=256), odds=st.integers(2, 60))
@settings(deadline=None)
def test_the_estimate_inverts_the_expectation(sums, odds):
    true, size = np.array(sums)[:, None], len(sums)
    scale = odds + size - 1  # e^epsilon = odds: p = odds / scale, r = 1 / scale
    expected = odds * true + (true.sum() - true)
    found = unbiased(expected, scale * true.sum(axis=0), size, math.log(odds))
    np.testing.assert_allclose(found, scale * true, rtol=1e-9, atol=1e-9 * scale * np.abs(true).sum())


@pytest.mark.parametrize(("size", "epsilon"), [(2, 0.5), (5, 4.0), (17, 1.0)])
def test_the_estimate_is_right_on_average_over_the_channels_noise(size, epsilon):
    rng = np.random.default_rng(7)
    codes = np.minimum(rng.integers(0, 2 * size, 2_000), size - 1)  # half of the rows in the last bucket
    grad = rng.integers(-1_000, 1_000, len(codes)) + 300 * (codes - size // 2)
    hess = rng.integers(0, 500, len(codes))
    true, totals, draws = histogram(codes, size, grad, hess), np.array([grad.sum(), hess.sum()]), 400
    noisy = [histogram(randomised(rng, codes, size, epsilon), size, grad, hess) for _ in range(draws)]
    found = np.mean([unbiased(sums, totals, size, epsilon) for sums in noisy], axis=0)
    r, excess = chances(size, epsilon)
    squares = histogram(codes, size, grad**2, hess**2)
    p = excess + r
    variance = p * (1 - p) * squares + r * (1 - r) * (squares.sum(axis=0) - squares)
    deviation = np.sqrt(variance / draws)
    assert (np.abs(found - true) < 6.5 * deviation / excess).all()  # false alarm: one seed in 10^8
    assert (np.abs(np.mean(noisy, axis=0) - true) > 6.5 * deviation).any()  # uncorrected sums would be noticed


def test_chances_add_up_and_are_those_of_no_noise_where_there_is_none():
    for size, epsilon in [(2, 1e-12), (3, 0.1), (256, 4.0), (16, 800.0)]:
        r, excess = chances(size, epsilon)
        assert size * r + excess == pytest.approx(1.0, rel=1e-12)
        assert excess == pytest.approx(r * math.expm1(epsilon) if epsilon < 700 else 1.0, rel=1e-12)
    assert chances(16, math.inf) == chances(1, 0.5) == (0.0, 1.0)


# ---------------------------------------------------------------- what a source corrects


def test_grad_and_hess_are_corrected_hess_not_below_0_and_counts_are_left():
    rng = np.random.default_rng(0)
    sizes, epsilon = [6, 4], 0.7
    columns = [rng.integers(0, 6, 300), rng.integers(0, 4, 300)]
    columns[0][columns[0] == 2] = 3  # nobody in it: below what noise alone would bring
    source = correcting(columns, [5, 4], [True, False], epsilon=epsilon)
    grad, hess = rng.integers(-900, 900, 300), rng.integers(1, 900, 300)
    sums, totals = sums_of(source, grad, hess)
    before = sums.copy()
    seen = source.for_gains(sums, totals)
    np.testing.assert_array_equal(sums, before)
    np.testing.assert_array_equal(seen[..., 2], sums[..., 2])
    for first, size, column in zip([0, 6], sizes, columns, strict=True):
        p, r = math.exp(epsilon), 1.0
        p, r = p / (p + size - 1), r / (p + size - 1)
        noisy = histogram(column, size, grad, hess)
        expected = (noisy - r * totals[0, :2]) / (p - r)
        expected[:, 1] = np.maximum(expected[:, 1], 0)
        np.testing.assert_allclose(seen[0, first : first + size, :2], expected, atol=0.5 + 1e-6)
    assert seen[0, 2, 1] == 0
    assert seen[0, 2, 0] != 0
    assert (seen[0, 10] == 0).all()  # missing values, of which the second column has none


def test_columns_without_noise_are_left_alone():
    codes = np.arange(40) % 3
    constant, missing_alone = np.zeros(40, int), np.zeros(40, int)
    for columns, present, missing, epsilon in [
        ([codes], [3], [False], math.inf),
        ([constant, missing_alone], [1, 0], [False, True], 0.5),
    ]:
        source = correcting(columns, present, missing, epsilon=epsilon)
        sums, totals = sums_of(source, np.arange(40), np.ones(40, np.int64))
        assert source.for_gains(sums, totals) is sums


def test_a_column_that_was_split_on_is_left_alone_from_then_on():
    rng = np.random.default_rng(1)
    columns = [rng.integers(0, 4, 100) for _ in range(2)]
    source = correcting(columns, [4, 4], [False, False])
    sums, totals = sums_of(source, rng.integers(-9, 9, 100), np.ones(100, np.int64))
    source._choose(0, np.arange(256) < 2)
    seen = source.for_gains(sums, totals)
    np.testing.assert_array_equal(seen[:, :5], sums[:, :5])
    assert (seen[:, 5:9] != sums[:, 5:9]).any()
    source._choose(1, np.arange(256) < 2)
    assert source.for_gains(sums, totals) is sums


def test_without_the_option_sums_are_these_themselves():
    source = columns_of(buckets([np.arange(6) % 3], [3], [False]), 6)
    sums, totals = sums_of(source, np.arange(6), np.ones(6, np.int64))
    assert source.for_gains(sums, totals) is sums


def test_sums_that_would_not_fit_are_refused():
    source = columns_of(buckets([np.arange(100) % 3], [3], [False], epsilon=1e-13), 100)
    with pytest.raises(ConfigError, match=r"of 100 gradients, .* 3 buckets at epsilon=1e-13, do not fit 64 bits"):
        source.correct(OBJECTIVE, 100, resumed=False)


def test_used_columns_of_kept_rounds_are_left_alone_and_malformed_ones_refused():
    rng = np.random.default_rng(1)
    columns = [rng.integers(0, 4, 100) for _ in range(2)]
    source = columns_of(buckets(columns, [4, 4], [False, False]), 100)
    source._party.message = UsedColumns(bools(1, 0))
    source.correct(OBJECTIVE, 100, resumed=True)
    sums, totals = sums_of(source, rng.integers(-9, 9, 100), np.ones(100, np.int64))
    seen = source.for_gains(sums, totals)
    np.testing.assert_array_equal((seen != sums).any(axis=(0, 2)).nonzero()[0] >= 5, [True] * 4)
    source._party.message = UsedColumns(bools(1, 0, 0))
    with pytest.raises(PeerProtocolError, match=r"at UsedColumns\.columns from shop"):
        source.correct(OBJECTIVE, 100, resumed=True)


# ---------------------------------------------------------------- what is chosen on them


def grown(
    source: NoisyColumns, grad: np.ndarray, hess: np.ndarray, rules: SplitRules, *others: ColumnSource
) -> tuple[Any, np.ndarray]:
    """Grow a tree; return it and what it adds to each row's margin."""
    columns = np.arange(sum(len(s.categorical) for s in (source, *others)), dtype=np.int32)
    sample = TreeSample(grad, hess, None, columns)
    rows, growth, margins = sample.partition(), Growth(sample.totals, rules), np.zeros(len(grad))
    search = SplitSearch([source, *others], sample, rules)
    while growth.level is not None:
        search.ask(growth.level, rows)
        chosen = growth.take(search.choose(growth.level))
        if chosen is not None:
            nodes, children, splits = chosen
            records, left = search.decide(nodes, splits, rows)
            rows.divide(nodes, children, left)
            growth.divided(records)
    search.end()
    tree = growth.tree()
    leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
    rows.add_to(margins, leaves, tree.value[leaves])
    return tree, margins


def best_prefix(sums: np.ndarray, totals: np.ndarray, order: np.ndarray) -> set[int]:
    """Return the buckets left of the best cut in this order, as slowly as can be."""

    def term(part: np.ndarray) -> float:
        grad, hess = part[0] * RULES.grad_unit, part[1] * RULES.hess_unit
        return grad**2 / (hess + 1.0) if hess >= 1.0 else -math.inf

    cuts = range(1, len(order))
    gains = [term(sums[order[:k]].sum(axis=0)) + term(totals - sums[order[:k]].sum(axis=0)) for k in cuts]
    return {*order[: 1 + int(np.argmax(gains))].tolist()}


@pytest.mark.parametrize("categorical", [False, True], ids=["number", "category"])
def test_splits_are_the_best_on_corrected_sums(categorical):
    differing = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        true = rng.integers(0, 9, 3_000)
        grad = np.rint((rng.normal(size=9)[true] + rng.normal(size=3_000)) * 2**13).astype(np.int64)
        hess = np.full(3_000, 2**16)
        noisy = randomised(rng, true, 9, 0.5)
        source = correcting([noisy], [9], [False], epsilon=0.5, categorical=[categorical])
        grown(source, grad, hess, RULES)
        ((feature, left),) = [(int(f), {*np.flatnonzero(bins).tolist()}) for f, bins in chosen_of(source)]
        raw, totals = histogram(noisy, 9, grad, hess), np.array([grad.sum(), hess.sum()])
        corrected = np.rint(unbiased(raw, totals, 9, 0.5))
        corrected[:, 1] = np.maximum(corrected[:, 1], 0.0)
        found = {}
        for name, sums in (("raw", raw), ("corrected", corrected)):
            hess_sums = sums[:, 1] * RULES.hess_unit
            # a category below min_child_weight counts as average
            ratio = np.where(hess_sums >= RULES.min_child_weight, sums[:, 0] * RULES.grad_unit / (hess_sums + 1.0), 0.0)
            order = np.argsort(ratio, kind="stable") if categorical else np.arange(9)
            found[name] = best_prefix(sums, totals, order)
        assert feature == 0
        assert left == found["corrected"]
        differing += found["raw"] != found["corrected"]
    assert differing >= 3  # or nothing was tested


def chosen_of(source: NoisyColumns) -> list[tuple[int, np.ndarray]]:
    """Return the splits a source tells its owner of."""
    source.send_splits(0, now=True)
    return [
        (int(feature), np.unpackbits(np.frombuffer(left, np.uint8)).astype(bool))
        for message in source._party.sent
        for feature, left in zip(
            np.frombuffer(message.features.data, np.int32),
            np.frombuffer(message.left_bins.data, np.uint8).reshape(-1, 32),
            strict=True,
        )
    ]


def test_a_noisy_column_wins_over_a_clear_one_that_tells_less():
    rng = np.random.default_rng(3)
    strong, weak = rng.integers(0, 2, 4_000), rng.integers(0, 2, 4_000)
    grad = ((2 * strong - 1) * 2**14 + (2 * weak - 1) * 2**13).astype(np.int64)
    hess = np.full(4_000, 2**16)
    noisy = randomised(rng, strong, 2, 0.5)
    winners = []
    for on in (False, True):
        source = columns_of(buckets([noisy], [2], [False], epsilon=0.5), 4_000)
        if on:
            source.correct(OBJECTIVE, 4_000, resumed=False)
        clear = ColumnSource(
            weak[:, None].astype(np.uint8), np.array([0, 3], np.int32), np.zeros(1, np.bool_), lambda f, b: 0
        )
        tree, _ = grown(source, grad, hess, RULES, clear)
        winners.append(int(tree.source[0]))
    assert winners == [1, 0]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_leaves_have_the_sums_and_counts_of_their_rows(depth):
    rng = np.random.default_rng(depth)
    codes = [rng.integers(0, 7, 2_000) for _ in range(4)]
    codes[3][:] = 0
    grad = np.rint(((codes[0] > 3) + (codes[1] % 2) + rng.normal(size=2_000) - 1) * 2**13).astype(np.int64)
    hess = rng.integers(1, 2**16, 2_000)
    noisy = [*(randomised(rng, column, 7, 1.0) for column in codes[:3]), codes[3]]
    rules = SplitRules(
        grad_unit=OBJECTIVE.grad_unit, hess_unit=OBJECTIVE.hess_unit, max_depth=depth,
        min_child_samples=25, min_child_weight=12.0, learning_rate=1.0,
    )  # fmt: skip
    source = correcting(noisy, [6, 7, 7, 1], [True, False, False, False], epsilon=1.0, categorical=[0, 1, 0, 0])
    tree, margins = grown(source, grad, hess, rules)
    leaves = np.flatnonzero(tree.left < 0)
    assert len(leaves) > 1
    values, of_row = np.unique(margins, return_inverse=True)
    assert len(values) == len(leaves)  # so that a row's margin names its leaf
    for leaf in leaves:
        rows = of_row == np.searchsorted(values, tree.value[leaf])
        grad_sum, hess_sum = grad[rows].sum() * rules.grad_unit, hess[rows].sum() * rules.hess_unit
        assert tree.count[leaf] == rows.sum() >= 25
        assert tree.cover[leaf] == hess_sum >= 12.0
        assert tree.value[leaf] == pytest.approx(-grad_sum / (hess_sum + 1.0), rel=1e-12)
    for node in np.flatnonzero(tree.left >= 0):
        children = [tree.left[node], tree.left[node] + 1]
        assert tree.count[children].sum() == tree.count[node]


@pytest.mark.parametrize(("hess", "kept"), [(9, False), (10, True), (90, True), (91, False)])
def test_a_split_with_a_child_of_too_little_true_hess_is_none(hess, kept):
    sums, totals = np.zeros((2, 5, 3), np.int64), np.array([[7, 100, 50]] * 2)
    sums[1, 2:] = [[3, hess, 20], [4, 100 - hess, 30], [0, 0, 0]]
    found = Splits.none(2)
    found.gain[1], found.feature[1] = 5.0, 1
    found.left_bins[1, 0] = True
    rules = SplitRules(grad_unit=0.1, hess_unit=0.1, min_child_weight=1.0)
    settle(found, sums, totals, np.array([0, 2, 5], np.int32), rules)
    assert found.left_totals.tolist() == [[0, 0, 0], [3, hess, 20]]
    assert found.feature.tolist() == [-1, 1 if kept else -1]
    assert found.gain.tolist() == [0.0, 5.0 if kept else 0.0]


# ---------------------------------------------------------------- whole trainings


def test_without_noise_the_option_changes_nothing():
    X, y = real_table("binary")
    tables = cut(with_categories(with_gaps(X)), 3)
    options = {**NO_NOISE, "n_estimators": 3, "min_child_samples": 1}
    off, on = (
        SimpleNamespace(parts_=train_both(SYSTEM, tables, y, unbiased=value, **options)[0]) for value in (None, True)
    )
    assert_same_trees(on, off)


def test_with_noise_trees_differ_and_the_messages_do_not():
    X, y = real_table("binary")
    X = with_categories(with_gaps(X)).assign(constant=1.0, nothing=np.nan)
    tables = {name: to_table(part, party=name) for name, part in cut(X, 3).items()}
    played = [
        play_training(tables, y.astype(float), unbiased=value, epsilon=1.0, min_child_samples=20)
        for value in (None, True)
    ]
    off, on = (p.results["p0"].forest.trees for p in played)
    assert off != on
    for name in ("p1", "p2"):
        (without,), (given,) = (messages(p, Buckets, name) for p in played)
        assert bytes(without.packed.data) == bytes(given.packed.data)
        np.testing.assert_array_equal(np.frombuffer(given.epsilon.data), 1.0)
        sent = [e.step for e in played[1].transcripts[name].entries if e.direction == "sent"]
        assert sent == ["Terms", "Verdict", "Buckets", "RecordCount"]
    for tree in on:
        assert (tree.count[tree.left < 0] >= 20).all()


def test_every_column_has_the_epsilon_that_it_was_randomised_with():
    X, y = real_table("binary")
    tables = {name: to_table(part, party=name) for name, part in cut(X, 3).items()}
    played = play_training(tables, y.astype(float), epsilon_person=6.0, n_estimators=1)
    for name in ("p1", "p2"):
        (message,) = messages(played, Buckets, name)
        columns = len(tables[name].schema.names)
        assert np.frombuffer(message.epsilon.data).tolist() == [6.0 / columns] * columns
