"""Held-out rows of participants under noise: their counts, what these cost, how often they are opened."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn import metrics

from systems.federboost_horizontal.playing import dealt, options_of, train
from tables import real_table
from treaty.data.table import to_table
from treaty.errors import PeerProtocolError
from treaty.models.trees import predict_pooled
from treaty.runs.report import losses_of
from treaty.systems.federboost_horizontal import setup
from treaty.systems.horizontal import held_out
from treaty.systems.horizontal import sum_noise as planning
from treaty.systems.horizontal.held_out import NOISY_ODDS, HeldBack, HeldOutRequest, ScoreCells, divided, plausible
from treaty.systems.horizontal.members import Collector
from treaty.systems.horizontal.rows import Opening
from treaty.systems.horizontal.sum_noise import looks, pay, plan_noise
from treaty.systems.system import LabelledRows

QUICK = {"n_estimators": 12, "num_parallel_tree": 5, "learning_rate": 0.6, "max_depth": 2}
LOOKS = [1, 3, 6, 9, 12]


def noisy(epsilon=2.0, **chosen):
    return options_of(**{"epsilon_total": epsilon, "validation_fraction": 0.3, **QUICK, **chosen})


@pytest.fixture(scope="module")
def binary():
    return dealt("binary", 3)


@pytest.mark.parametrize("search", [True, False])
def test_counts_cost_a_row_what_the_trees_do_and_a_training_what_it_costs_without_them(binary, search):
    _, whole, classes = binary
    plain = plan_noise(*options_of(epsilon_total=1.0, **QUICK), whole.table.schema, classes, honest=3, search=search)
    plan = plan_noise(*noisy(1.0), whole.table.schema, classes, honest=3, search=search)
    assert (plan.budget, plan.leaves) == (plain.budget, plain.leaves)
    # a row changes one count of each look by one
    assert len(LOOKS) / (2 * plan.scores**2) == pytest.approx(plan.budget.releases[-1].rho, rel=1e-6)
    assert len(LOOKS) / (2 * plan.scores**2) <= plan.budget.releases[-1].rho
    assert plain.scores == 0.0


@pytest.mark.parametrize("unit", [1, 1 << 16])
def test_what_is_paid_states_the_noise_on_counts_in_rows(tmp_path, binary, unit):
    _, whole, classes = binary
    plan = plan_noise(*noisy(1.0), whole.table.schema, classes, honest=3, unit=unit)
    # a row changes one count of each look by one, whatever counts are multiplied by
    deviation = np.sqrt(len(LOOKS) / (2 * plan.budget.releases[-1].rho))
    stated = "; held-out rows cost no more, with noise of a standard deviation of "
    assert pay(plan, None, "p0", "a job", None) == f"{plan.budget}{stated}{deviation:.3g} on counts"
    entered = pay(plan, tmp_path, "p0", "a job", None)
    assert entered.startswith(f"{plan.budget}{stated}{deviation:.3g} on counts. In the ledger: rho ")
    plain = plan_noise(*options_of(epsilon_total=1.0, **QUICK), whole.table.schema, classes, honest=3, unit=unit)
    assert pay(plain, None, "p0", "a job", None) == str(plain.budget)


def test_rounds_with_counts_are_five_and_the_last_is_among_them():
    for rounds, expected in ((1, [1]), (3, [1, 2, 3]), (12, LOOKS), (50, [1, 13, 25, 37, 50])):
        options = options_of(epsilon_total=1.0, validation_fraction=0.3, n_estimators=rounds)
        assert sorted(looks(*options)) == expected
    options = options_of(validation_fraction=0.3, n_estimators=4)
    assert list(looks(*options)) == [1, 2, 3, 4]


def test_whether_a_row_is_kept_back_depends_on_no_other_row():
    one = LabelledRows(to_table(np.ones((1, 2))), np.ones(1))
    # without noise a participant would train on its only row
    assert max(len(divided(one, 0.9, "north", noisy=True)[1].y) for _ in range(40)) == 1
    many = LabelledRows(to_table(np.arange(4000.0).reshape(-1, 1)), np.arange(4000.0))
    (kept, back), (_, other) = (divided(many, 0.25, "north", noisy=True) for _ in range(2))
    assert sorted([*kept.y, *back.y]) == many.y.tolist()
    assert len(back.y) == pytest.approx(1000, abs=6 * np.sqrt(750))
    # draws of one training say nothing of those of another
    assert len(np.intersect1d(back.y, other.y)) == pytest.approx(250, abs=6 * np.sqrt(4000 / 16))


def counted(monkeypatch, parts, options, classes):
    """Train; return by member the counts of its rows and those that it gave, and those that were opened."""
    exact, given, opened = {}, {}, []
    count, with_noise, total = ScoreCells.count, HeldBack.counts, Collector.total

    def member():
        return threading.current_thread().name

    def note(self, rows, predicted):
        found = count(self, rows, predicted)
        exact.setdefault(member(), []).append(found)
        return found

    def give(self):
        found = with_noise(self)
        given.setdefault(member(), []).append(found)
        return found

    def open_(self, length, own=None):
        found = total(self, length, own)
        if length % (2 * NOISY_ODDS[0]) == 0 and member() in given and len(opened) < len(given[member()]):
            opened.append(found)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(ScoreCells, "count", note)
        patched.setattr(HeldBack, "counts", give)
        patched.setattr(Collector, "total", open_)
        train(parts, options, classes)
    return {name: (np.array(exact[name]), np.array(of)) for name, of in given.items()}, np.array(opened)


def wrong_noise(of_members, opened, plan):
    """Return what is wrong with the noise of members' counts, and of their sum."""
    share, noise = plan.scores / np.sqrt(plan.honest), {name: b - a for name, (a, b) in of_members.items()}
    noise["sum"] = opened - sum(exact for exact, _ in of_members.values())
    wrong = []
    for name, drawn in noise.items():
        expected = share * (np.sqrt(len(of_members)) if name == "sum" else 1.0)
        ratio = np.sqrt((drawn**2).mean()) / expected
        # 6 standard errors of a standard deviation
        wrong += [name] if abs(ratio - 1) > 6 / np.sqrt(2 * drawn.size) else []
    return wrong


def test_every_member_adds_its_share_of_noise_to_its_counts(monkeypatch):
    X, y = real_table("binary", rows=500)
    codes = np.arange(len(y)) % 6
    table = to_table(_with_group(X, codes))
    who = np.arange(len(y)) % 3
    parts = {f"p{k}": LabelledRows(table.rows(who == k), y[who == k].astype(float)) for k in range(3)}
    options = noisy(validation_group="group")
    plan = plan_noise(*options, table.schema, [0, 1], honest=2)
    of_members, opened = counted(monkeypatch, parts, options, [0, 1])
    # six categories, others and missing ones
    assert opened.shape == (len(LOOKS), 8 * 2 * NOISY_ODDS[0])
    assert opened.dtype == np.int64
    assert not wrong_noise(of_members, opened, plan)
    drawn = np.array([b - a for a, b in of_members.values()]).reshape(-1, opened.shape[1])
    assert np.abs(np.corrcoef(drawn) - np.eye(len(drawn))).max() < 6 / np.sqrt(opened.shape[1])
    share = planning.noise_share

    def of_others(sigma, honest):
        return share(sigma, honest) * ("p1" not in threading.current_thread().name)

    monkeypatch.setattr(planning, "noise_share", of_others)
    found = wrong_noise(*counted(monkeypatch, parts, options, [0, 1]), plan)
    assert len(found) == 2
    assert "sum" in found
    assert any("p1" in name for name in found)


def _with_group(X, codes):
    import pandas as pd

    frame = pd.DataFrame(X, columns=[f"c{k}" for k in range(X.shape[1])])
    frame["group"] = pd.Categorical([f"g{code}" for code in codes])
    return frame


def large(monkeypatch, task):
    """Train on 6,000 rows with little noise; return the leader's part, the held-out rows, and how many bins are of."""
    rng, seen, searched = np.random.default_rng(5), {}, []
    X = rng.normal(size=(6000, 4))
    y = X.sum(axis=1) + 2 * rng.normal(size=len(X))
    given, classes = {"objective": "squared_error", "target_range": [-16.0, 16.0]}, None
    if task == "binary":
        y, given, classes = (y > 1).astype(float), {}, [0, 1]
    divide, of = setup.divided, Opening.of

    def divided_(rows, share, name, *, noisy):
        assert noisy
        seen[name] = divide(rows, share, name, noisy=noisy)
        return seen[name]

    def counting(self, table, bounds):
        searched.append(table.n_rows)
        return of(self, table, bounds)

    monkeypatch.setattr(setup, "divided", divided_)
    monkeypatch.setattr(Opening, "of", counting)
    parts = {f"p{k}": LabelledRows(to_table(X[k::3]), y[k::3]) for k in range(3)}
    part = train(parts, noisy(200.0, **given), classes).results["p0"]
    # held-out rows are in no sum of the search
    assert sorted(searched) == sorted(len(kept.y) for kept, _ in seen.values())
    y = np.concatenate([back.y for _, back in seen.values()])
    return part, y, np.concatenate([predict_pooled([part], [back.table])[:, 0] for _, back in seen.values()])


def test_metrics_are_near_those_of_the_rows_kept_back_which_are_in_no_other_sum(monkeypatch):
    part, y, margins = large(monkeypatch, "binary")
    found, p = part.held_out.groups["all"], 1 / (1 + np.exp(-margins))
    assert found["rows"] == pytest.approx(len(y), abs=0.03 * len(y))
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(y, p), abs=0.02)
    assert found["logloss"] == pytest.approx(metrics.log_loss(y, p), abs=0.03)
    assert found["error"] == pytest.approx(np.mean((p > 0.5) != y), abs=0.02)
    history = part.forest.history["validation"]["logloss"]
    # the last counts stand until the next ones
    assert [k + 1 for k in range(12) if k == 0 or history[k] != history[k - 1]] == LOOKS


def test_errors_of_numbers_are_counted_within_the_declared_range(monkeypatch):
    part, y, predicted = large(monkeypatch, "regression")
    found = part.held_out.groups["all"]
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(y, predicted), rel=0.08)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(y, predicted), rel=0.08)


def test_counts_below_zero_become_the_nearest_ones_that_are_not_and_small_ones_none():
    assert plausible(np.array([[5, -3], [0, 4]]), 0.0).tolist() == [[3.5, 0.0], [0.0, 2.5]]
    assert plausible(np.array([[5, 1], [0, 4]]), 0.0).tolist() == [[5.0, 1.0], [0.0, 4.0]]
    assert plausible(np.array([[5, 1], [0, 4]]), 2.0).tolist() == [[5 * 10 / 9, 0.0], [0.0, 4 * 10 / 9]]
    assert plausible(np.array([[2, -3]]), 2.0).tolist() == [[0.0, 0.0]]
    assert plausible(np.array([[2, 3]]), 9.0).tolist() == [[2.0, 3.0]]


@given(arrays(np.int64, (2, 6), elements=st.integers(-50, 200)), st.integers(0, 2**32 - 1))
def test_no_other_counts_of_the_same_total_are_nearer(counts, seed):
    found, rng = plausible(counts, 0.0), np.random.default_rng(seed)
    assert found.min() >= 0
    if counts.sum() <= 0:
        return
    assert found.sum() == pytest.approx(counts.sum())
    for _ in range(20):
        other = counts.sum() * rng.dirichlet(np.ones(12)).reshape(2, 6)
        nearby = found + rng.random() * (other - found)
        assert np.sum((nearby - counts) ** 2) >= np.sum((found - counts) ** 2) * (1 - 1e-9)


def test_groups_that_noise_hides_are_left_out(monkeypatch):
    X, y = real_table("binary", rows=1200)
    table = to_table(_with_group(X, np.where(np.arange(len(y)) % 40 == 0, 1, 0)))
    who = np.arange(len(y)) % 3
    parts = {f"p{k}": LabelledRows(table.rows(who == k), y[who == k].astype(float)) for k in range(3)}
    part = train(parts, noisy(20.0, validation_group="group"), [0, 1]).results["p0"]
    assert list(part.held_out.groups) == ["all", "g0"]


def test_counts_are_opened_as_often_as_planned_and_after_early_stopping_less_often(monkeypatch):
    parts, _, classes = dealt("binary", 3)
    broadcast, asked = Collector.broadcast, []

    def note(self, message):
        asked.extend([message.rounds] if isinstance(message, HeldOutRequest) else [])
        broadcast(self, message)

    monkeypatch.setattr(Collector, "broadcast", note)
    train(parts, noisy(), classes)
    assert asked == LOOKS
    # in the first rounds noise may hide all rows
    for losses, stopped, best in (([0.6, 0.4, 0.5], [1, 3, 6], 3), ([np.nan, 0.6, 0.4, 0.5], [1, 3, 6, 9], 6)):
        asked.clear()
        found = dict(zip(LOOKS, losses, strict=False))
        monkeypatch.setattr(held_out, "metric", lambda name, cells, counts, found=found: found[asked[-1]])
        part = train(parts, noisy(early_stopping_rounds=3), classes).results["p0"]
        assert asked == stopped
        assert part.forest.rounds == best
        assert part.held_out.groups["all"]["logloss"] == losses[-1]
        assert bool(losses_of(part)) == (not np.isnan(losses[0]))


def test_a_leader_may_ask_after_planned_rounds_once(monkeypatch):
    parts, _, classes = dealt("binary", 3)

    def again(self, forest):
        self._sums.broadcast(HeldOutRequest(forest.rounds))
        self._sums.total(2 * NOISY_ODDS[0], self._own.counts())

    def twice(self, forest):
        again(self, forest)
        again(self, forest)

    def between(self, forest):
        if forest.rounds in (1, 2):
            again(self, forest)

    for ask in (twice, between):

        def measure(self, forest, new, ask=ask):
            self._flush()
            ask(self, forest)
            return dict.fromkeys(("auc", "error", "logloss"), 0.5)

        with monkeypatch.context() as patched:
            patched.setattr(held_out.SummedMetrics, "measure", measure)
            with pytest.raises(PeerProtocolError, match="once"):
                train(parts, noisy(), classes)


@pytest.mark.parametrize(("chosen", "leader"), [({"dropout": "accept"}, "p0"), ({}, "apart")])
def test_counts_go_with_lost_members_and_a_leader_without_rows(chosen, leader):
    parts, _, classes = dealt("binary", 4)
    part = train(parts, noisy(50.0, **chosen), classes, leader=leader).results[leader]
    assert part.held_out.groups["all"]["rows"] == pytest.approx(120, abs=60)


def test_a_participant_may_train_on_no_row(binary):
    parts, _, classes = binary
    one = {**parts, "p2": LabelledRows(parts["p2"].table.rows(np.arange(1)), parts["p2"].y[:1])}
    for _ in range(2):
        part = train(one, noisy(50.0, validation_fraction=0.95, n_estimators=2), classes).results["p0"]
        assert part.forest.rounds == 2
