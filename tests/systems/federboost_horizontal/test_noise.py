"""FederBoost on rows under noise: what is opened, how much noise is in it, and what is refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import combinations

import msgspec
import numpy as np
import pytest
import xgboost
from sklearn.metrics import roc_auc_score

import treaty
from flat import flat
from marks import slow
from systems.federboost_horizontal.playing import dealt, member, options_of, train
from tables import real_table, with_categories, with_gaps
from treaty.data import noisy_quantiles
from treaty.errors import ConfigError, PeerProtocolError, TreatyError
from treaty.messaging.messages import Array
from treaty.models.checkpoints import Keeper
from treaty.models.trees import predict_pooled
from treaty.privacy.discrete_gaussian import epsilon_of, rho_for
from treaty.systems.federboost_horizontal.options import honest_members
from treaty.systems.federboost_horizontal.trees import StepSender, TreeStep
from treaty.systems.horizontal import noisy_rounds, own_rows, random_trees
from treaty.systems.horizontal.members import Collector
from treaty.systems.horizontal.noisy_rounds import LeafMember, RandomStep
from treaty.systems.horizontal.quantiles import CommonBins, Count, ProbeRequest
from treaty.systems.horizontal.random_trees import LeafNoise, LeafShard
from treaty.systems.horizontal.sum_noise import OF_OPENING, OF_SEARCH, SumNoise, declared, plan_noise, within_declared
from treaty.systems.pooled.system import loss_of
from treaty.trees.objectives import make_objective

QUICK = {"n_estimators": 12, "num_parallel_tree": 5, "learning_rate": 0.6, "max_depth": 2}


def margins(part, rows):
    return predict_pooled([part], [rows.table])


# ---------------------------------------------------------------- the plan


def test_the_plan_spends_the_budget_and_no_more():
    _, whole, classes = dealt("binary", 3)
    options = options_of(epsilon_total=1.0, **QUICK)
    plan = plan_noise(*options, whole.table.schema, classes, honest=3)
    rho = rho_for(1.0, 1e-6)
    assert plan.budget.epsilon <= 1.0 < 1.001 * plan.budget.epsilon
    assert [each.count for each in plan.budget.releases] == [1, 4, 12]
    # a row changes the number of rows and a count of each column; a cell of each column; grad and hess of a leaf
    assert [each.coordinates for each in plan.budget.releases] == [1 + 12, 12, 2 * 5]
    parts = [each.rho / rho for each in plan.budget.releases]
    assert parts == pytest.approx([OF_OPENING, OF_SEARCH, 1.0 - OF_OPENING - OF_SEARCH], rel=1e-3)
    again = plan_noise(*options, whole.table.schema, classes, honest=3, search=False)
    assert again.leaves == plan.leaves
    assert again.budget.epsilon == pytest.approx(epsilon_of(0.9 * rho, 1e-6), rel=1e-3)
    assert plan_noise(*options_of(), whole.table.schema, classes, honest=3).budget is None


@pytest.mark.parametrize(
    ("classes", "given"),
    [
        ([0, 1], {"fractional_bits": 4}),
        ([0, 1, 2], {"weight_bound": 3.0}),
        (None, {"target_range": [-3.0, 3.0]}),
        # a start far from all targets, given or by rounding to float32: half of the range has few steps
        (None, {"target_range": [-3.0, 3.0], "base_score": 1e5}),
        (None, {"target_range": [1e9 + 30.0, 1e9 + 31.0]}),
    ],
)
def test_shares_are_accounted_for_at_the_deviation_that_they_are_drawn_with(classes, given):
    """Of little noise, on the sums with the fewest steps, where a sum of shares is farthest from its distribution."""
    _, whole, _ = dealt("regression", 3)
    options = options_of(epsilon_total=1e4, **QUICK | given)
    plan = plan_noise(*options, whole.table.schema, classes, honest=2)
    ends, weight, common = declared(*options)
    objective = loss_of(ends, weight, None if classes is None else len(classes), None, common)
    trees = plan.budget.releases[-1]
    assert (plan.leaves.units(objective) * plan.leaves.sigma).min() == pytest.approx(trees.sigma, rel=1e-9)
    assert trees.norm >= np.sqrt(QUICK["num_parallel_tree"]) * plan.leaves.units(objective).min()


def test_shares_are_enough_without_the_leaders_and_those_that_may_be_lost():
    _, whole, classes = dealt("binary", 3)
    for dropout, members, honest in ((None, 2, 1), (None, 5, 4), ("accept", 6, 3), ("accept", 4, 2)):
        options = options_of(epsilon_total=1.0, dropout=dropout, **QUICK)
        assert (
            plan_noise(*options, whole.table.schema, classes, honest=honest_members(options[0], members)).honest
            == honest
        )


def test_rounds_trees_and_rate_are_chosen_unless_they_are_given():
    common = options_of(epsilon_total=1.0, n_estimators=None).common
    assert (common.n_estimators, common.num_parallel_tree, common.max_depth, common.learning_rate) == (50, 10, 3, 0.6)
    common = options_of(epsilon_total=1.0, n_estimators=7).common
    assert (common.n_estimators, common.num_parallel_tree) == (7, 1)
    common = options_of(epsilon_total=1.0, n_estimators=None, num_parallel_tree=3, max_depth=4).common
    assert (common.n_estimators, common.num_parallel_tree, common.max_depth) == (50, 10, 4)
    assert options_of(n_estimators=None).common.num_parallel_tree == 1


# ---------------------------------------------------------------- noise in what is sent


def sent(monkeypatch, parts, options, classes):
    """Train, and return by member the exact leaf sums of each round, and what was given in their place."""
    exact, given, on = {}, {}, LeafNoise.on

    def note(self, sums, objective):
        found = on(self, sums, objective)
        name = next(name for name in parts if name in threading.current_thread().name)
        exact.setdefault(name, []).append(sums)
        given.setdefault(name, []).append(found)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(LeafNoise, "on", note)
        train(parts, options, classes)
    return {name: (exact[name], of) for name, of in given.items()}


def wrong_noise(seen, plan, objective):
    """Return what is wrong with members' noise: too little of it in a kind of sums, or used twice."""
    wrong, drawn = [], []
    for name, (exact, given) in seen.items():
        noise = np.concatenate([b - a for a, b in zip(exact, given, strict=True)]).reshape(-1, 2)
        share = plan.leaves.units(objective) * plan.leaves.sigma / np.sqrt(plan.honest)
        ratio = np.sqrt((noise**2).mean(axis=0)) / share
        # 6 standard errors of a standard deviation
        far = 6 / np.sqrt(2 * len(noise))
        wrong += [f"{name}: {what}" for what, r in zip("gh", ratio, strict=True) if abs(r - 1) > far]
        drawn += [b - a for a, b in zip(exact, given, strict=True)]
    # of numbers in the millions hardly one comes up twice
    alike = any(np.count_nonzero(one == other) > 1 for one, other in combinations(drawn, 2))
    return wrong + ["used twice"] * alike


@pytest.fixture(scope="module")
def binary():
    return dealt("binary", 3)


def test_every_share_has_its_noise_and_no_two_are_alike(monkeypatch, binary):
    parts, whole, classes = binary
    options = options_of(epsilon_total=2.0, **QUICK)
    plan = plan_noise(*options, whole.table.schema, classes, honest=2)
    objective, share, once = make_objective("logistic", whole.y, None), random_trees.noise_share, {}
    assert len({len(rows.y) for rows in parts.values()}) == 3
    assert not wrong_noise(sent(monkeypatch, parts, options, classes), plan, objective)

    def without(kind):
        return lambda sigma, honest: share(sigma, honest) * np.tile(np.arange(2) != kind, len(sigma) // 2)

    def of_one_member(sigma, honest):
        return share(sigma, honest) * ("p1" not in threading.current_thread().name)

    def reused(sigma, honest):
        return once.setdefault(len(sigma), share(sigma, honest))

    for fault, words in ((without(0), "g"), (without(1), "h"), (of_one_member, "p1"), (reused, "used twice")):
        with monkeypatch.context() as patched:
            patched.setattr(random_trees, "noise_share", fault)
            found = wrong_noise(sent(patched, parts, options, classes), plan, objective)
        assert any(words in of for of in found), words


def test_all_that_is_opened_has_the_noise_of_every_member(monkeypatch, binary):
    """Opening, counts and leaves. A member that sees a sum knows its own noise, and so relies on the leader's."""
    parts, whole, classes = binary
    options = options_of(epsilon_total=2.0, **QUICK)
    plan = plan_noise(*options, whole.table.schema, classes, honest=honest_members(options.own, 3))
    units = plan.leaves.units(make_objective("logistic", whole.y, None))
    given, sigmas, opened, seen, total = [], [], [], [], Collector.total
    on_counts, on_leaves, depth = SumNoise._on, LeafNoise.on, LeafNoise.depth

    def counts(self, values, sigma):
        found = on_counts(self, values, sigma)
        sigmas.append(sigma)
        given.append((found, (found - values) / sigma))
        return found

    def leaves(self, sums, objective):
        found = on_leaves(self, sums, objective)
        given.append((found, (found - sums.ravel()) / np.tile(units * plan.leaves.sigma, found.size // 2)))
        return found

    def open_(self, length, own=None):
        opened.append(total(self, length, own))
        return opened[-1]

    monkeypatch.setattr(
        LeafNoise, "depth", lambda self, n_rows, *of: (seen.append(n_rows), depth(self, n_rows, *of))[1]
    )
    monkeypatch.setattr(SumNoise, "_on", counts)
    monkeypatch.setattr(LeafNoise, "on", leaves)
    monkeypatch.setattr(Collector, "total", open_)
    train(parts, options, classes)
    assert len(opened) == 1 + 4 + 12
    kinds = [], [], []
    for k, found in enumerate(opened):
        of_members, given = given[:3], given[3:]
        np.testing.assert_array_equal(found, sum(vector for vector, _ in of_members))
        kinds[(k > 0) + (k > 4)].extend(noise for _, noise in of_members)
    assert not given
    assert sigmas == [plan.opening] * 3 + [plan.search] * 12
    # trees are as deep as the noisy number of rows allows
    assert set(seen) == {opened[0][0]}
    for kind in map(np.concatenate, kinds):
        # of the noise planned for the sum, each share has half of the variance; 6 standard errors
        assert np.sqrt(2 * (kind**2).mean()) == pytest.approx(1.0, abs=6 / np.sqrt(2 * len(kind)))


# ---------------------------------------------------------------- models


def rows_of(X, y, n, weight=None):
    given = [(X.iloc[k::n], y[k::n]) + (() if weight is None else (weight[k::n],)) for k in range(n)]
    return {f"p{k}": of for k, of in enumerate(given)}


@pytest.mark.parametrize(("members", "leader"), [(3, "p0"), (2, "p1"), slow(5, "server")])
def test_all_have_one_model_whose_margins_are_those_of_training(monkeypatch, members, leader):
    parts, whole, classes = dealt("multiclass", members)
    shards = []
    add = LeafShard.add
    monkeypatch.setattr(LeafShard, "add", lambda self, grown: (add(self, grown), shards.append(self))[0])
    played = train(parts, options_of(epsilon_total=50.0, **QUICK), classes, leader=leader)
    first = played.results[leader]
    assert first.forest.rounds == 12
    assert len(first.forest.trees) == 12 * 5 * len(classes)
    for part in played.results.values():
        np.testing.assert_array_equal(margins(part, whole), margins(first, whole))
        assert part.forest.trees == first.forest.trees
    for rows in parts.values():
        alike = [shard.margins.T for shard in shards if shard.margins.shape[1] == len(rows.y)]
        assert any(np.allclose(of, margins(first, rows), atol=1e-9) for of in alike)


def test_with_little_noise_it_learns_gaps_categories_and_classes_that_are_rare():
    X, y = real_table("binary", rows=569)
    X = with_gaps(with_categories(X)).assign(constant=1.0, nothing=np.nan)
    kept = (y == 0) | (np.arange(len(y)) % 4 == 0)
    X, y = X[kept], y[kept]
    parts = {**rows_of(X.iloc[1:], y[1:], 3), "one": (X.iloc[:1], y[:1])}
    model = treaty.GBDTClassifier(treaty.FederBoostHorizontal(epsilon_total=100.0), random_state=0, n_jobs=1).fit(parts)
    assert roc_auc_score(y, model.predict_proba(X)[:, 1]) > 0.97
    part = model.parts_["pooled"]
    assert (len(part.forest.trees), part.forest.parallel) == (500, 10)
    assert "epsilon = 100" in part.spent
    booster = xgboost.Booster()
    booster.load_model(bytearray(model.to_xgboost().save_raw("json")))
    assert len(booster.get_dump()) == 500


def test_a_regression_and_weights_need_bounds_and_are_kept_within_them(caplog):
    X, y = real_table("regression", rows=440)
    rng = np.random.default_rng(0)
    weight = rng.choice([0.5, 1.0, 2.0], len(y))
    system = treaty.FederBoostHorizontal(epsilon_total=300.0, target_range=[20.0, 350.0], weight_bound=2.0)
    model = treaty.GBDTRegressor(system, n_jobs=1, random_state=0).fit(rows_of(X, y, 3, weight))
    objective = model.parts_["pooled"].forest.objective
    assert (objective.base_score, objective.weight_bound) == (185.0, 2.0)
    error = np.average((model.predict(X) - y) ** 2, weights=weight)
    assert error < 0.75 * np.average((y - np.average(y, weights=weight)) ** 2, weights=weight)
    assert "outside the declared bounds" not in caplog.text
    assert model.parts_["pooled"].forest.clipped_rows == 0
    narrow = treaty.FederBoostHorizontal(epsilon_total=300.0, target_range=(100, 200), weight_bound=1.0)
    model = treaty.GBDTRegressor(narrow, n_jobs=1, random_state=0, n_estimators=5).fit(rows_of(X, y, 3, weight))
    assert "targets or weights are outside the declared bounds, and count as these" in caplog.text
    assert 70.0 < model.predict(X).min() < model.predict(X).max() < 230.0


class Gone(Exception):
    """A participant's program dies."""


def test_rows_without_weights_are_within_a_bound_below_their_weight_of_one():
    parts, _, classes = dealt("binary", 3)
    options = options_of(epsilon_total=1.0, weight_bound=0.25, **QUICK)
    seen = within_declared(options.own, parts["p0"], classes, "p0")
    assert set(seen.weight) == {0.25}
    assert within_declared(options_of(epsilon_total=1.0).own, parts["p0"], classes, "p0").weight is None
    train(parts, options, classes)


def test_with_consent_training_goes_on_without_the_lost(monkeypatch):
    parts, whole, classes = dealt("binary", 5)
    options, ended, take = options_of(epsilon_total=20.0, dropout="accept", **QUICK), {}, LeafMember.take

    def dying(self, step):
        if self._own.part.party == "p2" and self._own.forest.rounds == 4:
            raise Gone
        return take(self, step)

    def kept(party):
        try:
            ended[party.name] = member(party, parts, options, classes)
        except Gone:
            party.channel.close()
            raise

    monkeypatch.setattr(LeafMember, "take", dying)
    with pytest.raises(Gone):
        train(parts, options, classes, roles=dict.fromkeys(("p1", "p2", "p3", "p4"), kept))
    assert ended.keys() == {"p1", "p3", "p4"}
    assert all(part.forest.rounds == 12 for part in ended.values())
    np.testing.assert_array_equal(margins(ended["p1"], whole), margins(ended["p4"], whole))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("task", "weighted", "chosen", "words"),
    [
        ("regression", False, {"epsilon_total": 1.0}, r"give target_range=\[least, largest\]"),
        ("binary", True, {"epsilon_total": 1.0}, "give weight_bound, or leave weights out"),
        ("binary", False, {"epsilon_total": 1.0, "subsample": 0.5}, "leave subsample at 1"),
        ("binary", False, {"epsilon_total": 1.0, "max_leaves": 3}, "max_leaves grows trees by best gain"),
        ("binary", False, {"epsilon_total": 1.0, "max_depth": 9}, "max_depth of at most 8, got 9"),
        ("binary", False, {"epsilon_total": 0.1, "fractional_bits": 40}, "more noise than fits"),
        ("regression", False, {"epsilon_total": 1.0, "target_range": [3.0, 1.0]}, "the least and the largest target"),
        ("regression", False, {"epsilon_total": 1.0, "target_range": [1.0]}, "the least and the largest target"),
        ("regression", False, {"epsilon_total": 1.0, "target_range": [0.0, float("nan")]}, "least and the largest"),
        ("regression", False, {"epsilon_total": 1.0, "target_range": [-1e40, 1e40]}, "between 2\\^-128 and 2\\^95"),
        ("regression", False, {"epsilon_total": 1.0, "target_range": [0.0, 1e-50]}, "between 2\\^-128 and 2\\^95"),
        ("binary", False, {"epsilon_total": 1.0, "weight_bound": 1e-60}, "between 2\\^-128 and 2\\^95"),
        ("regression", False, {"epsilon_total": 1.0, "objective": "poisson"}, "needs the squared error, or classes"),
        ("regression", False, {"target_range": [0.0, 1.0]}, "target_range goes with epsilon_total"),
        ("binary", False, {"weight_bound": 2.0}, "weight_bound goes with epsilon_total"),
    ],
)
def test_noise_that_could_not_be_accounted_for_is_refused(task, weighted, chosen, words):
    parts, _, classes = dealt(task, 4)
    if weighted:
        parts = {name: replace(rows, weight=np.ones(len(rows.y))) for name, rows in parts.items()}
    with pytest.raises(ConfigError, match=words):
        train(parts, options_of(**chosen), classes)


def test_a_training_with_noise_is_not_gone_on_with(tmp_path, binary):
    parts, _, classes = binary
    options = options_of(epsilon_total=1.0, n_estimators=2)
    train(parts, options, classes, keeper=Keeper(tmp_path / "p0.checkpoint"))
    with pytest.raises(ConfigError, match="cannot resume with epsilon_total"):
        train(parts, options, classes, keeper=Keeper(tmp_path / "p0.checkpoint", resume=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": np.full((5, 3), 99, np.int32)}, "trees that the job permits"),
        ({"features": np.zeros((5, 2), np.int32)}, "trees that the job permits"),
        ({"features": np.zeros((5, 7), np.int32)}, "trees that the job permits"),
        ({"features": np.zeros((4, 3), np.int32)}, "trees that the job permits"),
        ({"left_bins": np.zeros((5, 3, 1), np.uint8)}, "left_bins"),
        ({"sums": np.zeros((5, 4, 2), np.int64)}, "sums of shape"),
        ({"sums": np.zeros((5, 4, 3), np.int64)}, "sums"),
    ],
    ids=lambda of: next(iter(of)) if isinstance(of, dict) else "",
)
def test_steps_that_do_not_fit_are_refused(monkeypatch, binary, change, words):
    parts, _, classes = binary

    def lie(self, message, broadcast=Collector.broadcast):
        if isinstance(message, RandomStep):
            fields = {name: getattr(message, name) for name in RandomStep.__struct_fields__}
            if "features" in change and "left_bins" not in change:
                shape = (*change["features"].shape, message.left_bins.shape[2])
                fields["left_bins"] = Array.of(np.zeros(shape, np.uint8))
            message = RandomStep(**fields | {name: Array.of(of) for name, of in change.items()})
        broadcast(self, message)

    monkeypatch.setattr(Collector, "broadcast", lie)
    with pytest.raises(PeerProtocolError, match=words):
        train(parts, options_of(epsilon_total=5.0, **QUICK), classes)


def test_a_member_takes_no_bounds_but_those_of_the_job(monkeypatch, binary):
    """Larger ones hold for all rows, too, but noise was planned for these."""
    parts, _, classes = binary

    def lie(self, message, broadcast=Collector.broadcast):
        broadcast(
            self, msgspec.structs.replace(message, weight_bound=2.0) if isinstance(message, CommonBins) else message
        )

    monkeypatch.setattr(Collector, "broadcast", lie)
    with pytest.raises(PeerProtocolError, match="bounds of gradients"):
        train(parts, options_of(epsilon_total=5.0, **QUICK), classes)


def test_a_member_answers_no_round_that_is_not_paid_for(monkeypatch, binary):
    parts, _, classes = binary
    longer = own_rows.Rounds
    monkeypatch.setattr(own_rows, "Rounds", lambda forest, most, **given: longer(forest, most + 1, **given))
    with pytest.raises(PeerProtocolError, match="expected 12 rounds at most"):
        train(parts, options_of(epsilon_total=5.0, **QUICK), classes)


@pytest.mark.parametrize("chosen", [{}, {"epsilon_total": 5.0}])
def test_a_model_ends_with_no_round_that_a_member_does_not_have(monkeypatch, binary, chosen):
    """A leader that keeps the last round back would leave members with another model."""
    parts, _, classes = binary
    for sender in (noisy_rounds.LeafSender, StepSender):
        monkeypatch.setattr(sender, "flush", lambda self: None)
    with pytest.raises(PeerProtocolError, match="expected 2 rounds at most"):
        train(parts, options_of(n_estimators=3, **chosen), classes)


def test_a_member_answers_no_second_search_and_no_sums_of_nodes(monkeypatch, binary):
    parts, _, classes = binary
    broadcast = Collector.broadcast

    def twice(self, message):
        broadcast(self, message)
        if isinstance(message, Count):
            self.total(1)
            broadcast(self, message)

    for lie in (twice, lambda self, message: broadcast(self, TreeStep(*[Array.of(np.empty(0))] * 11))):
        with monkeypatch.context() as patched:
            patched.setattr(Collector, "broadcast", lie)
            with pytest.raises(TreatyError):
                train(parts, options_of(epsilon_total=5.0, **QUICK), classes)


def test_a_member_answers_no_probes_that_are_not_paid_for(monkeypatch, binary):
    parts, _, classes = binary
    monkeypatch.setattr(noisy_quantiles, "ROUNDS", 6)
    with pytest.raises(PeerProtocolError, match="expected the bins instead of more probes"):
        train(parts, options_of(epsilon_total=5.0, **QUICK), classes)


def test_a_lost_member_is_no_reason_for_a_second_search(monkeypatch):
    parts, _, classes = dealt("binary", 5)
    broadcast, probed, errors = Collector.broadcast, [], {}

    def again(self, message):
        if isinstance(message, ProbeRequest):
            probed.append(message)
            # the others learn of the loss with the first sum, and the second one begins a search
            if len(probed) == 1:
                self._leave_out("p2")
            elif len(probed) == 2:
                message = Count()
        broadcast(self, message)

    def kept(party):
        try:
            member(party, parts, options_of(epsilon_total=5.0, dropout="accept", **QUICK), classes)
        except TreatyError as error:
            errors[party.name] = str(error)
            raise

    monkeypatch.setattr(Collector, "broadcast", again)
    with pytest.raises(TreatyError):
        train(
            parts, options_of(epsilon_total=5.0, dropout="accept", **QUICK), classes, timeout=4.0,
            roles=dict.fromkeys(("p1", "p2", "p3", "p4"), kept),
        )  # fmt: skip
    assert all("the search restarts although noise is for one search" in errors[name] for name in ("p1", "p3", "p4"))


def test_options_of_a_job_reach_the_system():
    X, y = real_table("regression", rows=90)
    chosen = {"epsilon_total": 50.0, "target_range": [25, 346], "n_estimators": 2, "n_jobs": 1}
    model = flat(treaty.GBDTRegressor, "federboost-horizontal", **chosen).fit(rows_of(X, y, 3))
    assert model.parts_["pooled"].forest.objective.base_score == 185.5
