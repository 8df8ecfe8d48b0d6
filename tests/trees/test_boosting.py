from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.errors import ConfigError
from treaty.trees.boosting import Boosting, BoostingPlan, EvalSet, Forest, OneSide, draw
from treaty.trees.columns import SplitSearch, grow_tree, grow_trees
from treaty.trees.ensemble import Walk, join_splits
from treaty.trees.objectives import SquaredError, make_objective
from treaty.trees.splits import SplitRules
from trees.plain import random_codes, random_labels, train


def _problem(objective="logistic", n_classes=2, n_rows=300, seed=0):
    rng = np.random.default_rng(seed)
    table = random_codes(rng, n_rows, [6, 9, 4, 12], missing=0.1)
    return table, random_labels(rng, table, objective, n_classes)


def _watch(table, matrix, y, weight=None, name="valid"):
    """An eval set walked by the splits of one table."""

    def add_trees(trees, margins):
        Walk(trees, join_splits([table.splits], [len(table.n_bins)])).add_to(margins, matrix)

    return EvalSet(name, y, weight, add_trees)


@pytest.mark.parametrize(("objective", "n_outputs"), [("logistic", 1), ("softmax", 3), ("squared_error", 1)])
def test_boost_grows_one_tree_per_output_and_round_and_the_loss_falls(objective, n_outputs):
    table, y = _problem(objective, 3 if objective == "softmax" else 2)
    watched = _watch(table, table.matrix, y)
    trained = train(table, y, objective=objective, n_classes=3, n_estimators=7, eval_sets=[watched])
    assert len(trained.trees) == 7 * n_outputs
    losses = trained.forest.history["valid"][trained.forest.objective.metric]
    assert len(losses) == 7
    assert all(after < before for before, after in itertools.pairwise(losses))
    assert losses[-1] == trained.objective.loss(trained.margins, y, None)


def test_the_loss_of_training_rows_is_kept_after_some_rounds():
    table, y = _problem()
    trained = train(table, y, n_estimators=7, eval_sets=[_watch(table, table.matrix, y)])
    watched = trained.forest.history["valid"]["logloss"]
    assert trained.forest.losses == {after: watched[after - 1] for after in (1, 2, 4, 7)}
    trained.forest.cut(3)
    assert list(trained.forest.losses) == [1, 2]


def test_boost_records_the_weighted_loss_of_every_eval_set():
    table, y = _problem()
    weight = np.random.default_rng(1).gamma(1, 1, len(y))
    other = random_codes(np.random.default_rng(2), 50, table.n_bins, missing=0.3)
    other_y = np.arange(50.0) % 2
    sets = [_watch(table, table.matrix, y, weight, "train"), _watch(table, other.matrix, other_y)]
    trained = train(table, y, weight, n_estimators=3, eval_sets=sets)
    loss = trained.objective.loss
    assert trained.forest.history["train"][trained.forest.objective.metric][-1] == loss(trained.margins, y, weight)
    assert trained.forest.history["valid"][trained.forest.objective.metric][-1] == loss(
        trained.walk(other.matrix), other_y, None
    )


def test_boost_stops_early_and_keeps_the_best_rounds():
    table, y = _problem(n_rows=120)
    noise = np.random.default_rng(3).integers(0, 2, len(y)).astype(float)
    other, _ = _problem(n_rows=200, seed=9)
    watched = _watch(table, other.matrix, np.random.default_rng(4).integers(0, 2, 200).astype(float))
    trained = train(table, noise, n_estimators=60, max_depth=4, eval_sets=[watched], early_stopping_rounds=3)
    losses = trained.forest.history["valid"][trained.forest.objective.metric]
    assert trained.forest.best_round == int(np.argmin(losses)) + 1
    assert len(losses) == trained.forest.best_round + 3
    assert len(trained.trees) == trained.forest.best_round


def test_boost_stops_early_by_the_last_eval_set_with_all_outputs_of_a_round():
    table, y = _problem("softmax", 3, n_rows=90)
    last = _watch(table, table.matrix[::-1], y, name="shuffled")
    trained = train(
        table, y, objective="softmax", n_classes=3, n_estimators=40, learning_rate=1.0, max_depth=5,
        eval_sets=[_watch(table, table.matrix, y, name="train"), last], early_stopping_rounds=2,
    )  # fmt: skip
    assert trained.forest.best_round < 38
    assert len(trained.trees) == 3 * trained.forest.best_round
    assert (
        trained.forest.best_round
        == int(np.argmin(trained.forest.history["shuffled"][trained.forest.objective.metric])) + 1
    )


def test_boost_drops_trees_after_the_best_round_even_when_it_does_not_stop():
    table, y = _problem(n_rows=100)
    watched = _watch(table, table.matrix, 1.0 - y)  # the loss on turned labels only rises
    trained = train(table, y, n_estimators=4, eval_sets=[watched], early_stopping_rounds=10)
    assert trained.forest.best_round == 1
    assert len(trained.trees) == 1


def test_boost_without_early_stopping_keeps_every_tree():
    table, y = _problem(n_rows=100)
    trained = train(table, y, n_estimators=4, eval_sets=[_watch(table, table.matrix, 1.0 - y)])
    assert trained.forest.best_round is None
    assert len(trained.trees) == 4


def _draws(n_rounds=6, fail_at=None, **options):
    table, y = _problem("softmax", 3)
    objective = make_objective("softmax", y, None, n_classes=3)
    rules = SplitRules(grad_unit=objective.grad_unit, hess_unit=objective.hess_unit)
    draws, source = [], table.source()
    forest = Forest(objective, ("one",))

    def on_round(progressed):
        assert len(forest.trees) == 3 * progressed.rounds
        if progressed.rounds == fail_at:
            raise KeyboardInterrupt

    try:
        plan = BoostingPlan(n_columns=4, n_estimators=n_rounds, **options)
        for a_round in Boosting(y, None, forest, rules, plan, on_round=on_round):
            for sample in a_round.trees():
                draws.append((sample.rows, sample.columns))
                a_round.add(*grow_tree(SplitSearch([source], sample, rules), sample, rules))
    except KeyboardInterrupt:
        assert fail_at is not None
    return draws, forest


def test_boost_draws_rows_and_columns_anew_for_each_tree():
    draws, _ = _draws(subsample=0.5, colsample_bytree=0.5, random_state=0)
    assert len(draws) == 18
    for rows, columns in draws:
        assert len(rows) == 150
        assert len(columns) == 2
        assert np.all(np.diff(rows) > 0)
        assert np.all(np.diff(columns) > 0)
    assert len({rows.tobytes() for rows, _ in draws}) == 18
    assert len({columns.tobytes() for _, columns in draws}) > 3


def test_boost_draws_nothing_when_all_is_used():
    draws, _ = _draws(1)
    for rows, columns in draws:
        assert rows is None
        assert columns.tolist() == [0, 1, 2, 3]


def test_boost_draws_the_same_from_the_same_seed():
    one, other, third = (_draws(2, subsample=0.5, random_state=seed)[0] for seed in (7, 7, 8))
    assert [rows.tolist() for rows, _ in one] == [rows.tolist() for rows, _ in other]
    assert [rows.tolist() for rows, _ in one] != [rows.tolist() for rows, _ in third]


@pytest.mark.parametrize(("total", "share", "size"), [(10, 0.01, 1), (10, 0.26, 3), (1, 0.5, 1), (0, 0.5, 0)])
def test_draw_takes_the_nearest_number_and_at_least_one(total, share, size):
    assert len(draw(np.random.default_rng(0), total, share)) == size


def test_boost_keeps_finished_trees_when_stopped_by_an_error():
    _, forest = _draws(6, fail_at=2)
    assert len(forest.trees) == 6


def test_boost_reports_the_most_clipped_rows_of_a_round():
    table, _ = _problem()
    y = np.where(np.arange(300) < 5, 100.0, 0.0)
    objective = SquaredError(base_score=0.0, grad_clip=1.0)
    rules = SplitRules(grad_unit=objective.grad_unit, hess_unit=objective.hess_unit)
    forest = Forest(objective, ("one",))
    plan = BoostingPlan(n_columns=4, n_estimators=3)
    grow_trees(Boosting(y, None, forest, rules, plan), [table.source()])
    assert forest.clipped_rows == 5


def test_boost_refuses_sums_that_could_overflow():
    table, y = _problem()
    with pytest.raises(ConfigError, match="do not fit 62 bits"):
        train(table, y, fractional_bits=56)


def test_boost_without_columns_gives_leaves():
    table, y = _problem()
    trained = train(table.columns(0, 0), y, n_estimators=2)
    assert [tree.left.tolist() for tree in trained.trees] == [[-1], [-1]]
    assert len(np.unique(trained.margins)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subsample": 0.6, "colsample_bytree": 0.5},
        {"one_side": OneSide(0.2, 0.3)},
        {"early_stopping_rounds": 2, "learning_rate": 1.0},
    ],
    ids=["plain", "sampled", "one-side", "early-stopping"],
)
@pytest.mark.parametrize("objective", ["logistic", "softmax"])
def test_boosting_resumed_after_any_round_gives_the_same_forest(objective, options):
    table, y = _problem(objective, 3 if objective == "softmax" else 2, n_rows=120)
    loss = make_objective(objective, y, None, n_classes=3)
    rules = SplitRules(
        grad_unit=loss.grad_unit, hess_unit=loss.hess_unit, learning_rate=options.get("learning_rate", 0.3)
    )
    options = {name: value for name, value in options.items() if name != "learning_rate"}

    def go(stopped=None):
        """Train, from the start or from where `stopped` was; return the forest and the states after each round."""
        own = table.take(np.arange(len(y)))  # a lookup table of its own
        forest, resume, states = Forest(loss, ("one",)), None, []
        if stopped is not None:
            resume, forest.trees, forest.history, forest.losses, own.splits = copy.deepcopy(stopped)
        watched = _watch(own, own.matrix[::-1], y)

        def on_round(progressed):
            states.append(copy.deepcopy((progressed, forest.trees, forest.history, forest.losses, own.splits)))

        boosting = Boosting(
            y, None, forest, rules, BoostingPlan(n_columns=4, n_estimators=5, random_state=3, **options),
            eval_sets=[watched], resume=resume, on_round=on_round,
        )  # fmt: skip
        grow_trees(boosting, [own.source()])
        return forest, states

    whole, states = go()
    assert len(states) >= 3
    for k, state in enumerate(states):
        resumed, later = go(state)
        assert resumed.trees == whole.trees
        assert resumed.history == whole.history
        assert resumed.losses == whole.losses
        assert resumed.best_round == whole.best_round
        for ours, theirs in zip(later, states[k + 1 :], strict=True):
            assert ours[0].random_state == theirs[0].random_state
            np.testing.assert_array_equal(ours[0].margins, theirs[0].margins)


@given(
    n_rows=st.integers(1, 60),
    top_rate=st.floats(0.0, 0.7),
    other_rate=st.floats(0.01, 0.3),
    seed=st.integers(0, 2**32),
)
def test_one_side_sampling_keeps_the_largest_and_weighs_the_drawn(n_rows, top_rate, other_rate, seed):
    rng = np.random.default_rng(seed)
    grad, hess = rng.integers(-50, 51, n_rows), rng.integers(0, 30, n_rows)
    one_side = OneSide(top_rate, other_rate)
    rows, g, h = one_side.draw(np.random.default_rng(1), grad, hess)
    n_top = round(top_rate * n_rows)
    assert len(rows) == n_top + min(max(1, round(other_rate * n_rows)), n_rows - n_top)
    assert np.all(np.diff(rows) > 0)
    smallest_kept = np.sort(np.abs(grad))[::-1][:n_top].min(initial=101)
    assert set(np.flatnonzero(np.abs(grad) > smallest_kept)) <= set(rows)
    weighed = [row for row in rows if g[row] != grad[row] or h[row] != hess[row]]
    assert len(weighed) <= len(rows) - n_top
    assert all(abs(grad[row]) <= smallest_kept for row in weighed)
    assert all(g[row] == np.rint(grad[row] * one_side.factor) for row in weighed)
    assert all(h[row] == np.rint(hess[row] * one_side.factor) for row in weighed)


def test_one_side_sampling_is_right_on_average():
    rng = np.random.default_rng(0)
    grad, hess = rng.integers(-1000, 1001, 500), rng.integers(0, 300, 500)
    one_side = OneSide(0.2, 0.1)
    sums = []
    for _ in range(2000):
        rows, g, _ = one_side.draw(rng, grad, hess)
        sums.append(g[rows].sum())
    assert abs(np.mean(sums) - grad.sum()) < 4 * np.std(sums) / np.sqrt(len(sums))  # wrong once in 16,000 seeds
