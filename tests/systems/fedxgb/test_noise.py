"""FedXGB with `epsilon_total`: how much noise is in each sum, whoever is lost, returns or comes late."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from systems.fedxgb.playing import (
    Options,
    crowd_rows,
    laid_out,
    once,
    options_of,
    play_crowd,
    role_input,
    roles_with,
    spoiling,
)
from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.errors import ConfigError, TreatyError
from treaty.messaging.messages import Array
from treaty.models.checkpoints import ledger_folder
from treaty.models.trees import walk_tables
from treaty.privacy.ledger import Ledger
from treaty.systems.fedxgb import noisy
from treaty.systems.fedxgb.cohorts import AnyCohorts, Rules
from treaty.systems.fedxgb.messages import CertifiedKeys, SurvivorReport, Task, UserOffer, Users
from treaty.systems.fedxgb.noisy import CrowdNoise, NoisyDomainSums
from treaty.systems.fedxgb.secfind import UserSums
from treaty.systems.fedxgb.system import SYSTEM
from treaty.systems.horizontal import noisy_rounds, own_rows
from treaty.systems.horizontal.quantiles import Count, ProbeRequest
from treaty.systems.horizontal.random_trees import RandomTrees
from treaty.systems.horizontal.rows import describe
from treaty.systems.horizontal.sum_noise import plan_noise
from treaty.systems.observers import Observer, Observers
from treaty.trees.ensemble import Walk, join_splits
from treaty.trees.histograms import width_of

QUICK = {"n_estimators": 3, "num_parallel_tree": 80, "max_depth": 2}


@pytest.fixture(scope="module")
def binary():
    return crowd_rows("binary", 12, 600)


def noisy_options(**chosen) -> Options:
    return options_of(**{"epsilon_total": 4.0, **QUICK, **chosen})


def noise_of(parts, options, classes, layout):
    """Return the planned noise, as every party plans it."""
    described = describe(next(iter(parts.values())), classes)
    task = Task("m", described.names, described.categories, classes, b"", None, origins=described.origins)
    return CrowdNoise.plan(role_input(None, options, layout, classes=classes), task)


def noise_in(crowded, noise, layout):
    """Return the noise in each sum of leaves, over what is planned for its cohort."""
    found = []
    for sums in crowded.opened[-QUICK["n_estimators"] :]:
        exact = crowded.expected(sums) if sums.cohort else 0
        of_edges = [sum(layout.edges[name] == edge for name in sums.cohort) for edge in layout.having("edge")]
        # of six users, of whom the server may know the noise of one, each number of survivors is a step
        planned = np.mean([1.0 if count == 0 else count / (count - 1) for count in of_edges])
        sigma = noise.whole.leaves.deviations(len(sums.total), noise.objective) * np.sqrt(planned)
        found.append((sums.total - exact) / sigma)
    return np.array(found)


def as_planned(found):
    """Tell whether numbers have a deviation of 1, but for six standard errors."""
    return abs(np.sqrt((found**2).mean()) - 1) < 6 / np.sqrt(2 * found.size)


def test_sums_have_the_noise_that_is_planned_whoever_is_lost(binary):
    parts, _, classes = binary
    options, layout = noisy_options(n_estimators=3), laid_out(list(parts))
    noise = noise_of(parts, options, classes, layout)
    all_there = play_crowd(parts, options, classes, layout=layout)
    assert not all_there.failures
    assert all(len(sums.cohort) == 12 for sums in all_there.opened)
    assert as_planned(noise_in(all_there, noise, layout))
    # two of six users of each domain are lost in the second round, after they have sent their vectors and before
    leaves = {name: once(2, stage) for name, stage in zip(parts, ("masked", "shared", "shared", "setup"), strict=False)}
    lost = play_crowd(parts, options, classes, layout=layout, leaves=leaves)
    assert not lost.failures
    sizes = [len(sums.cohort) for sums in lost.opened[-3:]]
    assert sizes[0] == sizes[2] == 12  # back at once
    assert 8 <= sizes[1] < 12
    assert as_planned(noise_in(lost, noise, layout))


@pytest.mark.parametrize("plant", ["noise of survivors kept", "too much removed", "no noise", "noise of half"])
def test_planted_faults_of_noise_are_found(monkeypatch, binary, plant):
    parts, _, classes = binary
    options, layout = noisy_options(), laid_out(list(parts))
    noise = noise_of(parts, options, classes, layout)
    removable, draw = noisy.removable_noise, noisy.draw_noise
    match plant:
        case "noise of survivors kept":
            monkeypatch.setattr(noisy, "removable_noise", lambda sigma, *of: np.zeros(len(sigma), np.int64))
        case "too much removed":
            monkeypatch.setattr(noisy, "removable_noise", lambda *of: 3 * removable(*of))
        case "no noise":
            monkeypatch.setattr(noisy, "draw_noise", lambda sigma, *of: (0, draw(sigma, *of)[1]))
        case "noise of half":
            planned = CrowdNoise.deviations
            monkeypatch.setattr(CrowdNoise, "deviations", lambda *of: planned(*of) / 2)
    assert not as_planned(noise_in(play_crowd(parts, options, classes, layout=layout), noise, layout))


def test_an_edge_server_without_a_sum_sends_its_domains_noise(monkeypatch, binary):
    parts, _, classes = binary
    options, layout = noisy_options(), laid_out(list(parts))
    noise = noise_of(parts, options, classes, layout)

    def play():
        # all users of one domain leave in the second round
        gone = {name: once(2, "shared") for name, edge in layout.edges.items() if edge == "edge1"}
        return play_crowd(parts, options, classes, layout=layout, leaves=gone)

    crowded = play()
    assert [len(sums.cohort) for sums in crowded.opened[-3:]] == [12, 6, 12]
    assert as_planned(noise_in(crowded, noise, layout))
    monkeypatch.setattr(noisy, "discrete_gaussian", lambda sigma: np.zeros(len(sigma), np.int64))
    assert noise_in(play(), noise, layout)[1].std() < 0.9


def test_training_ends_with_the_rounds_so_far_when_nobody_is_left(binary, caplog):
    parts, _, classes = binary
    crowded = play_crowd(parts, noisy_options(), classes, leaves={name: once(2, "shared") for name in parts})
    assert crowded.model.forest.rounds == 1
    assert "training ends after 1 of 3 rounds" in caplog.text


class Waiting(Observer):
    """After the first round, waits until somebody has come."""

    def __init__(self):
        self.begun, self.came = threading.Event(), threading.Event()

    def round_finished(self, done, part):
        if done == 1:
            self.begun.set()
            assert self.came.wait(60)


def test_users_who_come_late_take_part_and_have_the_same_model(binary):
    parts, _, classes = binary
    options, layout = noisy_options(), laid_out(list(parts))
    name, waiting = list(parts)[3], Waiting()
    begun, came = waiting.begun, waiting.came

    def late(party):
        send = party.send

        def sent(to, message):
            send(to, message)
            if isinstance(message, UserOffer):
                came.set()

        party.send = sent
        assert begun.wait(60)
        return SYSTEM.train["user"](role_input(party, options, layout, data=parts[name], classes=classes))

    def lead(party):
        watched = {"observers": Observers([waiting])}
        return SYSTEM.train["server"](role_input(party, options, layout, data=parts["p0"], classes=classes, **watched))

    crowded = play_crowd(parts, options, classes, layout=layout, roles={name: late, "server": lead}, patience=1.0)
    assert not crowded.failures
    assert [name in sums.cohort for sums in crowded.opened[-3:]] == [False, True, True]
    # it has seen the first round, too
    model, table = crowded.model, parts[name].table
    margins = np.repeat(np.array([model.forest.objective.base_margins]), table.n_rows, axis=0)
    walk_tables(Walk(model.forest.trees, join_splits([model.splits], [len(table.columns)])), [table], margins, 1)
    np.testing.assert_array_equal(crowded.results[name].T, margins)


def test_a_whole_users_part_of_a_sum_is_limited(binary):
    parts, _, classes = binary
    options, layout = noisy_options(user_rows=3), laid_out(list(parts))
    noise, of_rows = (noise_of(parts, of, classes, layout) for of in (options, noisy_options()))
    # as many times the noise as rows
    assert noise.whole.leaves.sigma == pytest.approx(3 * of_rows.whole.leaves.sigma, rel=1e-3)
    assert noise.whole.search == pytest.approx(3 * of_rows.whole.search, rel=1e-3)
    assert noise.norm == pytest.approx(3 * np.sqrt(80), rel=1e-3)
    crowded = play_crowd(parts, options, classes, layout=layout)
    units = noise.whole.leaves.units(noise.objective)
    for sums in crowded.opened[-3:]:
        for given in crowded.given[sums.number].values():
            assert np.linalg.norm(given.reshape(-1, 2) / units) <= noise.norm
    # of all rows, at most three of each user are counted
    counts = crowded.given[crowded.opened[0].number]
    assert {name: of[0] >> 16 for name, of in counts.items()} == dict.fromkeys(parts, 3)
    long = np.full(80, 10**9)
    assert np.linalg.norm(noise.limited(long).reshape(-1, 2) / units) == pytest.approx(noise.norm, rel=1e-4)
    assert noise.limited(np.array([5, -5])).tolist() == [5, -5]
    assert of_rows.limited(long) is long


def test_noise_is_drawn_anew_for_each_attempt_at_a_sum(monkeypatch, binary):
    # two sums under the same noise would show their difference
    parts, _, classes = binary
    attempt, hide, hidden = NoisyDomainSums._attempt, UserSums.hide, {}

    def void_once(self, this_round, call):
        found = attempt(self, this_round, call)
        if call.attempt == 0:
            raise RoundVoid("again")
        return found

    def note(self, call, values):
        hidden.setdefault((self._party.name, call.number), []).append(values)
        return hide(self, call, values)

    monkeypatch.setattr(NoisyDomainSums, "_attempt", void_once)
    monkeypatch.setattr(UserSums, "hide", note)
    options, layout = noisy_options(n_estimators=1), laid_out(list(parts))
    crowded = play_crowd(parts, options, classes, layout=layout)
    assert not crowded.failures
    last = crowded.opened[-1].number
    for name in parts:
        first, second = (given - crowded.given[last][name] for given in hidden[name, last])
        assert np.mean(first != second) > 0.99
        assert np.abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(len(first))


def test_noise_of_counts_and_accounts_are_for_all_domains(binary):
    parts, whole, classes = binary
    users = list(parts)
    options, layout = noisy_options(), roles_with({"edge0": users[:3], "edge1": users[3:]})
    noise = noise_of(parts, options, classes, layout)
    # nine users, as many parts of noise as may be drawn for one, and none finer than so many of them
    assert noise.whole.honest == 2 * 9 * 9
    one = plan_noise(*options, whole.table.schema, classes, honest=1)
    # counts are sent in units
    assert noise.whole.opening / 2**16 == pytest.approx(one.opening, rel=1e-6)
    assert noise.whole.search / 2**16 == pytest.approx(one.search, rel=1e-6)
    none = Array.of(np.empty(0, np.uint32))
    for asked, sigma in ((Count(), noise.whole.opening), (ProbeRequest(none, none), noise.whole.search)):
        assert noise.deviations(asked, 2).tolist() == [sigma / np.sqrt(2)] * 2
    # of each domain the server may know the noise of one user
    crowded = play_crowd(parts, options, classes, layout=layout)
    spread = [(sums.total - crowded.expected(sums)) / noise.whole.search for sums in crowded.opened[1:-3]]
    assert as_planned(np.concatenate(spread) / np.sqrt(np.mean([3 / 2, 9 / 8])))


def test_a_user_whose_rows_are_beyond_what_is_declared_takes_no_part(binary):
    parts, _, classes = binary
    weighted = {**parts, "p0": replace(parts["p0"], weight=np.full(len(parts["p0"].y), 5.0))}
    crowded = play_crowd(weighted, noisy_options(n_estimators=1), classes)
    assert list(crowded.failures) == ["p0"]
    assert "give weight_bound" in str(crowded.failures["p0"])
    assert [len(sums.cohort) for sums in crowded.opened] == [11] * len(crowded.opened)
    bounded = play_crowd(weighted, noisy_options(n_estimators=1, weight_bound=2.0), classes)
    assert not bounded.failures


def test_each_user_pays_before_its_vectors_go_out(binary, tmp_path):
    parts, _, classes = binary
    options, layout = noisy_options(), laid_out(list(parts))

    def paying(party):
        return SYSTEM.train["user"](
            role_input(party, options, layout, data=parts["p0"], classes=classes, store=tmp_path)
        )

    play_crowd(parts, options, classes, layout=layout, roles={"p0": paying})
    entries = Ledger(ledger_folder(tmp_path, "p0", "noise")).entries()
    assert {entry.mechanism for entry in entries} == {"discrete Gaussian"}
    noise = noise_of(parts, options, classes, layout)
    assert sum(entry.rho for entry in entries) == pytest.approx(noise.whole.budget.rho)
    assert noise.whole.budget.epsilon <= 4.0


def test_a_whole_users_sums_may_be_in_all_leaves(binary):
    # scaled down, they are no longer those of a few rows, of which each is in one leaf of a tree
    parts, _, classes = binary
    options, layout = noisy_options(user_rows=1, max_depth=4), laid_out(list(parts))
    trees = noise_of(parts, options, classes, layout).whole.budget.releases[-1]
    assert trees.coordinates >= 80 * 2**4 * 2


def test_trees_without_a_column_to_draw_are_leaves(monkeypatch, binary):
    # of tables that are empty, or whose noise says so
    parts, _, classes = binary
    monkeypatch.setattr(noisy_rounds, "draw_trees", lambda rng, bins, depth, allowed: all_in_one(bins, len(allowed)))
    crowded = play_crowd(parts, noisy_options(num_parallel_tree=2), classes)
    assert not crowded.failures
    assert [len(sums.cohort) for sums in crowded.opened[-3:]] == [12, 12, 12]
    assert [len(tree.left) for tree in crowded.model.forest.trees] == [1] * 6


def all_in_one(bins, n_trees):
    """Return trees that keep all rows together."""
    width = width_of(bins.offsets)
    return RandomTrees(np.zeros((n_trees, 0), np.int32), np.ones((n_trees, 0, width), np.bool_))


def test_each_tree_is_drawn_among_a_sample_of_columns(binary):
    parts, _, classes = binary
    options = noisy_options(epsilon_total=1e4, feature_sample=1, num_parallel_tree=10)
    model = play_crowd(parts, options, classes).model
    assert any(len(tree.left) > 3 for tree in model.forest.trees)
    of_records = [model.splits.feature[record] for tree in model.forest.trees for record in tree.record if record >= 0]
    assert len(set(of_records)) > 1
    for tree in model.forest.trees:
        assert len({model.splits.feature[record] for record in tree.record if record >= 0}) == 1


@pytest.mark.parametrize("whose", ["another domain's", "there already", "nobody's", "false keys"])
def test_an_edge_server_lets_in_nobody_else(binary, whose):
    parts, _, classes = binary
    options, layout = noisy_options(), laid_out(list(parts))

    def change(party, message):
        # keys that the server knows, as p2 has sent them
        keys = party.known["p2"]
        name = {"another domain's": "p1", "there already": "p2", "nobody's": "eve", "false keys": "late"}[whose]
        return SurvivorReport(message.users, message.attempt, {name: keys})

    def edge(party):
        send = party.send

        def sent(to, message):
            if isinstance(message, Users):
                party.known = message.of
            send(to, message)

        party.send = sent
        return SYSTEM.train["edge"](role_input(party, options, layout, classes=classes))

    if whose == "false keys":  # the job has this user, who is away
        layout = laid_out([*parts, "late"])
        assert layout.edges["late"] == "edge0"
    roles = {"edge0": spoiling(edge, SurvivorReport, change, tree=None)}
    if whose == "false keys":
        roles["late"] = lambda party: party.channel.close()
    crowded = play_crowd(parts, options, classes, layout=layout, roles=roles, tolerate=[*layout.of], patience=2.0)
    expected = (
        "as user that the authority certified" if whose == "false keys" else "expected users of edge0 who came late"
    )
    assert expected in str(crowded.failures["server"])


def test_a_late_user_with_false_keys_is_left_out(binary):
    parts, _, classes = binary
    options, layout = noisy_options(), laid_out(list(parts))
    name, waiting = list(parts)[3], Waiting()
    edge, begun, came = layout.edges[name], waiting.begun, waiting.came

    def late(party):
        assert begun.wait(60)
        party.send(edge, UserOffer(CertifiedKeys(bytes(32), bytes(64), bytes(32), bytes(64))))
        came.set()
        with pytest.raises(TreatyError):
            party.receive(edge, Task)

    def lead(party):
        watched = {"observers": Observers([waiting])}
        return SYSTEM.train["server"](role_input(party, options, layout, data=parts["p0"], classes=classes, **watched))

    crowded = play_crowd(parts, options, classes, layout=layout, roles={name: late, "server": lead}, patience=1.0)
    assert not crowded.failures
    assert [len(sums.cohort) for sums in crowded.opened[-3:]] == [11, 11, 11]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"expose": "nothing"}, "all users get it"),
        ({"mode": "paper", "allow_insecure": True}, "has no noise"),
        ({"group_size": 4}, "there are no groups"),
        ({"user_rows": 3, "validation_fraction": 0.2}, "would not hold for whole users"),
        ({"bins": "exact"}, "counts have noise"),
        ({"epsilon_total": None, "num_parallel_tree": 1, "delta": 1e-5}, "delta goes with epsilon_total"),
        ({"epsilon_total": None, "num_parallel_tree": 1, "user_rows": 3}, "user_rows goes with epsilon_total"),
    ],
)
def test_options_that_do_not_fit_noise_are_refused(chosen, message):
    with pytest.raises(ConfigError, match=message):
        noisy_options(**chosen)


def test_a_user_answers_no_more_rounds_than_are_paid_for(binary):
    parts, _, classes = binary

    def greedy(party):
        with pytest.MonkeyPatch.context() as patched:
            rounds = own_rows.Rounds
            patched.setattr(own_rows, "Rounds", lambda forest, most, **given: rounds(forest, most + 1, **given))
            first = next(iter(parts.values()))
            return SYSTEM.train["server"](role_input(party, options, layout, data=first, classes=classes))

    options, layout = noisy_options(), laid_out(list(parts))
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"server": greedy}, tolerate=list(layout.of))
    assert any("3 rounds at most" in str(error) for error in crowded.failures.values())
    assert len({sums.number for sums in crowded.opened}) == len(crowded.opened)
    assert sum(sums.round > 1 for sums in crowded.opened) == 3


def test_cohorts_under_noise_are_any_that_are_large_enough():
    cohorts = AnyCohorts(Rules(most=5), np.random.default_rng(0))
    users = [f"u{k}" for k in range(7)]
    assert cohorts.begin(users) == users[:5]
    assert cohorts.begin(users[:2]) is None
    assert cohorts.keep(users[:4]) == users[:4]
    assert cohorts.keep(users[:2]) is None
    assert cohorts.may_come(users) == set(users)
    assert not cohorts.open(users)


def test_rows_kept_back_are_counted_under_noise(binary):
    parts, _, classes = binary
    options = noisy_options(n_estimators=5, validation_fraction=0.3, epsilon_total=200.0)
    layout = laid_out(list(parts))
    noise = noise_of(parts, options, classes, layout)
    crowded = play_crowd(parts, options, classes, layout=layout)
    assert not crowded.failures
    held_out = crowded.model.held_out
    n_rows = sum(len(rows.y) for rows in parts.values())
    # 24 bins by label, each with noise
    assert held_out.groups["all"]["rows"] == pytest.approx(0.3 * n_rows, abs=60)
    assert held_out.groups["all"]["auc"] > 0.6
    counted = [sums for sums in crowded.opened if len(sums.total) == 48]
    assert [sorted(sums.cohort) for sums in counted] == [sorted(parts)] * 5
    spread = [(sums.total - crowded.expected(sums)) / noise.whole.scores / np.sqrt(6 / 5) for sums in counted]
    assert as_planned(np.array(spread))
    # a row is trained on or counted: the whole costs no more
    without = noise_of(parts, noisy_options(n_estimators=5, epsilon_total=200.0), classes, layout)
    assert noise.whole.budget.epsilon == without.whole.budget.epsilon
    first = crowded.given[crowded.opened[0].number]
    assert sum(of[0] for of in first.values()) >> 16 == pytest.approx(0.7 * n_rows, abs=60)
