"""FedXGBoost-LDP: what is sent, what splits are chosen by, what is paid, and what is refused."""

from __future__ import annotations

import logging
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from marks import all_but_first_slow
from systems.secureboost.test_privacy import leaks, received, secrets_of_active, secrets_of_party
from systems.vertical.lossless import assert_lossless, train_both, unusual_tables
from systems.vertical.playing import role_input, star_of, tables_and_labels
from tables import cut, real_table, with_categories, with_gaps
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, PeerLost, PeerProtocolError, TreatyError
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.exchanges import Terms, Verdict
from treaty.messaging.messages import Array
from treaty.models.checkpoints import Keeper, load_checkpoint
from treaty.privacy.ledger import EpsilonLimits, Ledger, per_person, read_ledger
from treaty.privacy.mechanisms import MECHANISMS, STEPS, keystream, randomise
from treaty.privacy.randomised_response import randomise_labels
from treaty.runs.threads import RunRecord, play
from treaty.systems.fedxgboost_ldp import fedxgboost_ldp, scoring
from treaty.systems.fedxgboost_ldp import noise as noisy_gradients
from treaty.systems.fedxgboost_ldp.noise import SENT_STEPS, NoisyGradients
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.systems.fedxgboost_ldp.scoring import CONVERSATION, LevelDivision, NoisyTree, ScoredSplitRequest
from treaty.systems.fedxgboost_ldp.system import SYSTEM
from treaty.systems.observers import Observers, ProgressCalls
from treaty.systems.options import converted
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import side_by_side, train
from treaty.systems.system import LabelledRows, Roles
from treaty.systems.vertical import prediction
from treaty.systems.vertical import training as leading
from treaty.trees.boosting import TreeSample
from treaty.trees.objectives import Logistic, Softmax
from treaty.trees.splits import SplitRules, scan

GROWTH = {
    "mechanism": "piecewise", "base_score": 0.5, "n_estimators": 3, "max_depth": 3, "min_child_samples": 1,
    "max_bin": 16, "reg_lambda": 1.0,
}  # fmt: skip
TO_PASSIVE = {
    "Terms": Terms,
    "Verdict": Verdict,
    "NoiseSetup": scoring.NoiseSetup,
    "NoisyTree": NoisyTree,
    "ScoredSplitRequest": ScoredSplitRequest,
    "LevelDivision": LevelDivision,
    "CheckpointRequest": leading.CheckpointRequest,
    "DecideRequest": prediction.DecideRequest,
    "Finish": prediction.Finish,
}
BASE = 0.31370  # sums of gradients are no round numbers, which messages hold for other reasons
PAPER = {"mode": "paper", "allow_insecure": True}
FIRST = {"split_score": "first_order"}


def tree_of(grad: np.ndarray, hess: np.ndarray) -> TreeSample:
    """Return a tree of all rows, without columns."""
    return TreeSample(grad, hess, None, np.empty(0, np.int32))


def one_tree(noise: NoisyGradients, grad: np.ndarray, hess: np.ndarray) -> Any:
    """Return the next tree under noise, at margins of 0, or None."""
    return noise.of(tree_of(grad, hess), np.zeros((noise._objective.n_outputs, len(grad))))


def checked(**given: Any) -> FedXGBoostLDP:
    """Return options of the system, from plain values, that go together with the common ones among `given`."""
    common = {name: value for name, value in given.items() if name in BoostingOptions.__struct_fields__}
    own = {name: value for name, value in given.items() if name not in common}
    options = converted(own, FedXGBoostLDP, "FedXGBoostLDP")
    options.check(BoostingOptions(**common).checked(options))
    return options


def play_training(
    tables: dict[str, Table],
    y: np.ndarray,
    *,
    own: dict[str, dict[str, Any]] | None = None,
    weight: np.ndarray | None = None,
    change: dict[str, Any] | None = None,
    fields: dict[str, dict[str, Any]] | None = None,
    seen: dict[str, BaseException] | None = None,
    **options: Any,
) -> RunRecord:
    """Train with p0 active.

    `own` are options of one party alone, `change` maps messages by name to what is sent in their place, `fields` are
    those of a party's inputs, `seen` takes every party's error.
    """
    checked(**{**GROWTH, **options})

    def role(party):
        send, name = party.send, party.name
        party.send = lambda to, m: send(to, (change or {}).get(type(m).__name__, lambda m: m)(m))
        given = dict((fields or {}).get(name, {}))
        if name == "p0":
            given = {"data": LabelledRows(tables[name], y, weight), **given}
        options_of = {**GROWTH, **options, **(own or {}).get(name, {})}
        program = fedxgboost_ldp.active if name == "p0" else fedxgboost_ldp.passive
        try:
            return program(role_input(party, tables, y, options_of, FedXGBoostLDP, **given))
        except BaseException as error:
            if seen is not None:
                seen[name] = error
            raise

    return play(
        dict.fromkeys(tables, role), star_of(tables),
        job="test", protocol="fedxgboost-ldp", timeout=30.0, record_content=True,
    )  # fmt: skip


def sent_to(played: RunRecord, name: str, kind: type) -> list[Any]:
    """Return the messages of a kind that a passive party was sent."""
    return [message for _, message, _ in received(played.transcripts[name], TO_PASSIVE) if isinstance(message, kind)]


def numbers(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


@pytest.fixture
def quiet(monkeypatch):
    """Take the noise away: every mechanism returns what it is given, on its grid, and no coarser one is sent."""
    monkeypatch.setattr(noisy_gradients, "SENT_STEPS", STEPS)
    for kind in MECHANISMS:
        monkeypatch.setitem(MECHANISMS, kind, lambda steps, epsilon, draw: steps / STEPS)


# ---------------------------------------------------------------- without noise: the pooled grower's trees


def both(frames: dict, y: np.ndarray, weight: np.ndarray | None = None, **options: Any) -> Any:
    return train_both(SYSTEM, frames, y, weight, **{**GROWTH, **options})


@pytest.mark.parametrize("parties", all_but_first_slow(3, 2, 5))
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_without_noise_trees_of_the_second_order_equal_the_pooled_growers(quiet, parties, task):
    X, y = real_table(task)
    parts, pooled, tables = both(cut(with_categories(with_gaps(X)), parties), y, task=task)
    assert len(parts) == parties
    assert_lossless(parts, pooled, tables)


@pytest.mark.parametrize(
    "options",
    [
        {"subsample": 0.6, "colsample_bytree": 0.5, "random_state": 1},
        {"max_depth": 6, "max_bin": 255, "min_child_samples": 7},
        {"reg_alpha": 0.2, "reg_lambda": 0.1, "min_split_loss": 0.5},
        {"refit": True},
    ],
    ids="-".join,
)
def test_without_noise_growth_options_give_the_pooled_trees(quiet, options):
    X, y = real_table("binary")
    assert_lossless(*both(cut(with_categories(with_gaps(X)), 3), y, **options))


def test_without_noise_a_regression_gives_the_pooled_trees(quiet):
    X, y = real_table("regression")
    assert_lossless(*both(cut(X, 2), y, task="regression", base_score=150.0))


def test_without_noise_weights_that_keep_hessians_on_the_grid_give_the_pooled_trees(quiet):
    X, y = real_table("binary")
    weight = np.where(np.arange(len(y)) % 3 == 0, 4.0, 1.0)
    # of the first tree: later ones have ranges of hessians that are no multiples of the grid's steps
    assert_lossless(*both(cut(with_gaps(X), 3), y, weight, n_estimators=1))


@pytest.mark.parametrize("case", unusual_tables())
def test_without_noise_unusual_tables_give_the_pooled_trees(quiet, case):
    _, y = real_table("binary")
    assert_lossless(*both(unusual_tables()[case], y))


def test_the_active_party_may_stand_anywhere_in_the_order(quiet):
    X, y = real_table("binary")
    parts, pooled, tables = both(cut(X, 3), y, active="p1")
    assert parts["p1"].forest is not None
    assert_lossless(parts, pooled, tables)


def test_noisy_labels_give_the_pooled_trees_on_noisy_labels():
    tables, y = tables_and_labels()
    noisy = randomise_labels(y, 2, 1.0).astype(float)
    label = {"mechanism": "label_rr", "epsilon": 1.0}
    played = play_training(tables, noisy, **label)
    whole = {"p0": side_by_side(tables)}
    alone = role_input(SimpleNamespace(name="p0"), whole, noisy, {**GROWTH, **label}, FedXGBoostLDP)
    expected = train(alone)
    for tree, other in zip(played.results["p0"].forest.trees, expected.forest.trees, strict=True):
        np.testing.assert_array_equal(tree.value, other.value)
        np.testing.assert_array_equal(tree.left, other.left)


# ---------------------------------------------------------------- scores


def sums_of(codes: np.ndarray, grad: np.ndarray, hess: np.ndarray) -> np.ndarray:
    """Return sums of one column of two bins, none missing: int64 (1, 3, 3)."""
    found = np.zeros((1, 3, 3), np.int64)
    for k in (0, 1):
        rows = codes == k
        found[0, k] = grad[rows].sum(), hess[rows].sum(), rows.sum()
    return found


def score(grad: np.ndarray, left: np.ndarray, total: int) -> float:
    """Return twice the first-order score -G_L G_R / lambda, unrounded, of a split with these rows to the left."""
    unit, g_left = 1.0 / STEPS, grad[left].sum() / STEPS
    return -2.0 * g_left * (total * unit - g_left)


def test_the_first_order_score_is_right_on_average_and_the_printed_one_is_not():
    """4.3.2: E[-G*_L G*_R] is -G_L G_R with the right rows' own sum, and more by Var(G*_L) with the exact total."""
    rng = np.random.default_rng(0)
    rows, repeats, epsilon = 400, 3_000, 1.0
    t = np.clip(rng.normal(0.1, 0.4, rows), -1, 1)
    left = np.arange(rows) < 350
    exact = np.rint(t * STEPS).astype(np.int64)
    truth = score(exact, left, exact.sum())
    draw = keystream(bytes(32))
    corrected, printed = np.empty(repeats), np.empty(repeats)
    for k in range(repeats):
        noisy = np.rint(randomise("duchi", t, epsilon, draw) * STEPS).astype(np.int64)
        corrected[k] = score(noisy, left, noisy.sum())
        printed[k] = score(noisy, left, exact.sum())

    def errors(found):
        return abs(found.mean() - truth) / (found.std() / math.sqrt(repeats))

    assert errors(corrected) < 3.0  # false alarm: 0.3 % of keys
    assert errors(printed) > 20.0
    variance = sum(1 / math.tanh(0.5) ** 2 - t[left] ** 2)
    assert printed.mean() - truth == pytest.approx(2.0 * variance, rel=0.1)


def test_the_kernels_gain_is_twice_the_first_order_score_when_hess_is_left_out():
    rng = np.random.default_rng(1)
    grad = rng.integers(-STEPS, STEPS, 200)
    codes = (rng.random(200) < 0.3).astype(int)
    sums = sums_of(codes, grad, np.zeros(200, np.int64))
    for reg_lambda in (0.5, 1.0, 7.0):
        rules = SplitRules(
            grad_unit=1 / STEPS, hess_unit=1.0, reg_lambda=reg_lambda, min_child_weight=0.0, hess_floor=reg_lambda / 2
        )
        offsets, features = np.array([0, 3], np.int32), np.zeros(1, np.int32)
        found = scan(sums, sums.sum(axis=1), features, offsets, np.zeros(1, np.bool_), rules)
        expected = score(grad, codes == 0, grad.sum()) / reg_lambda
        assert found.gain[0] == pytest.approx(max(expected, 0.0), rel=1e-9)


@pytest.mark.parametrize("hess", [(-40, 10), (-5, -5), (0, 0), (30, -100)])
def test_sums_of_hess_at_or_below_zero_are_floored(hess):
    """4.3.6: no denominator below lambda / 2, whatever noise made of a sum."""
    sums = np.array([[[30, hess[0], 9], [-50, hess[1], 9], [0, 0, 0]]], np.int64)
    rules = SplitRules(grad_unit=1.0, hess_unit=0.1, reg_lambda=2.0, min_child_weight=-math.inf, hess_floor=1.0)
    totals = sums.sum(axis=1)
    found = scan(sums, totals, np.zeros(1, np.int32), np.array([0, 3], np.int32), np.zeros(1, np.bool_), rules)
    left, right, whole = (max(0.1 * h + 2.0, 1.0) for h in (*hess, sum(hess)))
    assert found.gain[0] == pytest.approx(30**2 / left + 50**2 / right - 20**2 / whole)
    np.testing.assert_allclose(rules.gain(totals, found.left_totals), found.gain)


@pytest.mark.parametrize("rows", [6, 11])
@pytest.mark.parametrize("options", [{}, FIRST])
def test_nodes_with_fewer_rows_than_columns_and_rows_all_on_one_side(rows, options):
    X, y = real_table("binary", rows=rows)
    X = X.assign(constant=1.0)
    y[:2] = 0, 1
    tables = {name: to_table(part, party=name) for name, part in cut(X, 3).items()}
    played = play_training(tables, y.astype(float), epsilon=3.0, min_child_weight=0.0, **options)
    for tree in played.results["p0"].forest.trees:
        assert tree.count[0] == rows
        assert np.all(np.isfinite(tree.value))
    same = {name: to_table(X[["constant"]], party=name) for name in ("p0", "p1")}
    played = play_training(same, y.astype(float), epsilon=3.0)
    assert [len(tree.left) for tree in played.results["p0"].forest.trees] == [1, 1, 1]


# ---------------------------------------------------------------- what is sent


@pytest.fixture(scope="module")
def varied() -> tuple[dict[str, Table], np.ndarray]:
    X, y = real_table("binary")
    X = with_categories(with_gaps(X))
    return {name: to_table(part, party=name) for name, part in cut(X, 3).items()}, y.astype(float)


def exact_sums(played: RunRecord, y: np.ndarray) -> tuple[list[int], list[int]]:
    """Return exact sums of gradients in the first tree's first levels as multiples of 2^-20.

    Those of the root and of left children, and those of right children, which follow from them.
    """
    grad = np.rint((BASE - y) * 2**16) * 2**-16 * STEPS
    nodes, lefts, rights = [np.arange(len(y))], [int(grad.sum())], []
    for message in sent_to(played, "p1", LevelDivision)[:2]:
        bits, below, at = np.unpackbits(numbers(message.left)).astype(bool), [], 0
        for k, rows in enumerate(nodes):
            if numbers(message.nodes)[k]:
                left = bits[at : at + len(rows)]
                at += len(rows)
                below += [rows[left], rows[~left]]
        nodes = [rows for rows in below if len(rows) >= 2 * GROWTH["min_child_samples"]]  # the next level
        lefts += [int(grad[rows].sum()) for rows in below[::2]]
        rights += [int(grad[rows].sum()) for rows in below[1::2]]
    return lefts, rights


@pytest.mark.parametrize("order", ["first_order", "second_order"])
def test_no_message_holds_an_exact_sum_and_the_published_form_does(varied, order):
    for options, found in (({}, False), (PAPER, True)):
        played = play_training(*varied, epsilon=1.0, split_score=order, n_estimators=1, base_score=BASE, **options)
        lefts, rights = exact_sums(played, varied[1])
        assert len(lefts) > 2
        contents = [content for _, _, content in received(played.transcripts["p1"], TO_PASSIVE)]
        shown = [
            any(np.int64(value).tobytes() in content for content in contents)
            for value in (lefts if found else lefts + rights)
            if value
        ]
        assert all(shown) if found else sum(shown) <= 1  # one in 3,000 runs has a noisy gradient of such a value


@pytest.mark.parametrize("options", [{}, FIRST, {"mechanism": "laplace"}, {"subsample": 0.5, "random_state": 0}])
def test_transcripts_hold_declared_messages_alone_without_values_names_or_labels(varied, options):
    tables, y = varied
    played = play_training(tables, y, epsilon=3.0, **options)
    for name in ("p1", "p2"):
        contents = [content for _, _, content in received(played.transcripts[name], TO_PASSIVE)]
        for trees in (0, 2):
            secrets = secrets_of_active(tables, y, trees, played.results)
            del secrets["hessians"]  # those of public margins are sent as they are
            assert not leaks(contents, secrets)
        assert not leaks(contents, secrets_of_party(tables, "p0", played.results["p0"]))
        assert not leaks(contents, secrets_of_party(tables, "p2" if name == "p1" else "p1", played.results[name]))


def test_messages_carry_the_number_of_their_tree(quiet, varied):
    played = play_training(*varied, n_estimators=2)
    for name in ("p0", "p1"):
        rounds: dict[str, set[int]] = {}
        for entry in played.transcripts[name].entries:
            rounds.setdefault(entry.step, set()).add(entry.round)
        assert rounds["NoiseSetup"] == rounds["ColumnCount"] == {0}
        assert rounds["NoisyTree"] == {0, 1}  # with which the next begins
        assert rounds["Scores"] == rounds["ScoredSplitAnswer"] == rounds["LevelDivision"] == {1, 2}
        assert rounds["Finish"] == {2}


def test_gradients_are_sent_once_a_tree_and_levels_in_one_message(varied):
    played = play_training(*varied, max_depth=4, n_estimators=2)
    for name in ("p1", "p2"):
        steps = [e.step for e in played.transcripts[name].entries if e.direction == "received"]
        assert steps.count("NoisyTree") == 2
        assert steps.count("LevelDivision") <= 2 * 3
        scores = [e.step for e in played.transcripts["p0"].entries if e.peer == name and e.direction == "received"]
        assert scores.count("Scores") <= 2 * 4
        assert all(tree.hess is not None for tree in sent_to(played, name, NoisyTree))
        assert all(tree.hess is None for tree in sent_to(play_training(*varied, **FIRST), name, NoisyTree))


def test_what_is_sent_is_made_of_noisy_gradients_alone(varied):
    """The public track: leaf values, and so all later gradients, follow from what was sent; hessians are p (1 - p)."""
    tables, y = varied
    played = play_training(tables, y, n_estimators=2, epsilon=2.0)
    forest, (first, second) = played.results["p0"].forest, sent_to(played, "p1", NoisyTree)
    tree = forest.trees[0]
    assert numbers(first.grad).sum() / SENT_STEPS != pytest.approx(np.where(y == 1, -0.5, 0.5).sum())
    leaf = tree.left < 0
    assert tree.cover[leaf].sum() == pytest.approx(numbers(first.hess).sum() * 2.0**-16)
    # leaf value = -eta G* / (H + lambda): the noisy sum over all rows comes back from the leaves
    g_star = -(tree.value[leaf] / 0.3) * (tree.cover[leaf] + 1.0)
    assert g_star.sum() == pytest.approx(numbers(first.grad).sum() / SENT_STEPS)
    hess = numbers(second.hess) * 2.0**-16
    margins = np.unique(tree.value[leaf])
    p = 1 / (1 + np.exp(-margins))
    assert np.abs(hess[:, None] - (p * (1 - p))[None, :]).min(axis=1).max() < 1e-4


def test_gradients_are_clipped_before_noise_and_hessians_of_weighted_rows_carry_noise(varied, monkeypatch):
    tables, y = varied
    given = []

    def watched(steps, epsilon, draw):
        given.append((steps / STEPS, epsilon))
        return steps / STEPS

    monkeypatch.setitem(MECHANISMS, "duchi", watched)
    weight = np.where(y == 1, 3.0, 0.5)
    common = {"mechanism": "duchi", "epsilon": 2.0, "n_estimators": 1}
    play_training(tables, y, clip=0.25, **common)
    play_training(tables, y, weight=weight, **common)
    play_training(tables, y, weight=weight, clip_hess=0.5, split_score="first_order", **common)
    (clipped, whole), (grad, half), (hess, other), _, (lower, _) = given
    # from -0.25 to 0.25, which gradients of -0.5 and 0.5 are clipped to
    assert set(clipped.tolist()) == {-1.0, 1.0}
    assert (whole, half, other) == (2.0, 1.0, 1.0)
    # the bound of weights is 4: gradients may be from -2 to 2, hessians from 0 to 1
    np.testing.assert_allclose(grad, np.where(y == 1, -0.5 * 3, 0.5 * 0.5) / 2.0)
    np.testing.assert_allclose(hess, 2 * 0.25 * weight / 1.0 - 1)
    np.testing.assert_allclose(lower, 2 * np.clip(0.25 * weight, 0, 0.5) / 0.5 - 1)


# ---------------------------------------------------------------- what is paid


@pytest.mark.parametrize("options", [{}, {"mechanism": "laplace", "epsilon": 0.5}])
def test_the_ledger_is_the_sum_of_epsilon(varied, tmp_path, options):
    play_training(*varied, fields={"p0": {"store": tmp_path}}, **options)
    entries = read_ledger(tmp_path / "p0.noise")
    epsilon = options.get("epsilon", 1.0)
    assert [e.epsilon for e in entries] == [epsilon] * 3
    assert [e.what for e in entries] == [f"gradients of tree {k}" for k in (1, 2, 3)]
    assert per_person(entries) == 3 * epsilon
    again = play_training(*varied, fields={"p0": {"store": tmp_path}}, **options)
    assert per_person(read_ledger(tmp_path / "p0.noise")) == 6 * epsilon  # another model, other noise
    spent = again.results["p0"].spent
    assert spent.startswith(f"epsilon {epsilon:g} per value; {3 * epsilon:g} per person over 3 releases. In the ledger")
    assert f"{6 * epsilon:g} per person over 6 releases" in spent


def test_a_round_that_was_paid_in_part_is_finished_at_the_cost_of_the_rest():
    """Of two rounds of three trees four trees are paid; training goes on from the first round's end."""
    ledger, grad = Ledger(None), np.full(50, 2**14)
    given = {"weighted": False, "model_id": "m", "job": "j"}

    def tree(noise):
        return one_tree(noise, grad, np.full(50, 2**14))[0].grad

    def noisy(total, first_tree=0):
        options = FedXGBoostLDP(mechanism="piecewise", epsilon_total=total)
        return NoisyGradients(ledger, options, Softmax(3), 50, first_tree=first_tree, **given)

    first = noisy(6.0)
    sent = [tree(first) for _ in range(4)]
    assert one_tree(noisy(5.0, first_tree=3), grad, grad) is None
    assert len(ledger.entries()) == 4
    resumed = noisy(6.0, first_tree=3)
    np.testing.assert_array_equal(tree(resumed), sent[3])
    assert [len(ledger.entries()) for _ in range(2) if len(tree(resumed))] == [5, 6]
    for _ in range(2):  # all paid: whatever the limit is now
        again = noisy(1.0, first_tree=3)
        np.testing.assert_array_equal(tree(again), sent[3])
    assert len(ledger.entries()) == 6
    assert one_tree(noisy(6.0, first_tree=6), grad, grad) is None


def test_a_spent_budget_ends_training_with_a_usable_model(varied, tmp_path, caplog):
    tables, y = varied
    ledger = {"p0": {"store": tmp_path}}
    with caplog.at_level(logging.WARNING):
        played = play_training(tables, y, n_estimators=9, epsilon=0.5, epsilon_total=2.0, fields=ledger)
    part = played.results["p0"]
    assert len(part.forest.trees) == 4
    assert per_person(read_ledger(tmp_path / "p0.noise")) == 2.0
    assert "training ended after 4 rounds: a person may pay epsilon 2, has paid 2" in part.spent
    assert "training ended after 4 rounds" in caplog.text
    assert len(sent_to(played, "p1", NoisyTree)) == 4
    seen = {}
    with pytest.raises(ConfigError, match="no round can be paid for"):
        play_training(tables, y, epsilon=0.5, epsilon_total=2.0, fields=ledger, seen=seen)
    assert "its privacy budget is spent" in str(seen["p1"])


def test_a_training_that_goes_on_sends_the_same_noise_and_pays_once(varied, tmp_path):
    tables, y = varied

    def kept(resume):
        found = {name: {"keeper": Keeper(tmp_path / name, resume=resume, share=math.inf)} for name in tables}
        found["p0"]["store"] = tmp_path
        return found

    def stop(rounds, part):
        if rounds == 3:
            raise KeyboardInterrupt

    whole = kept(False)
    whole["p0"]["observers"] = Observers([ProgressCalls(stop)])
    with pytest.raises(KeyboardInterrupt):
        play_training(tables, y, n_estimators=5, fields=whole)
    assert len(read_ledger(tmp_path / "p0.noise")) == 3
    model_id = load_checkpoint(tmp_path / "p0").part.model_id
    checkpoints = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    first = play_training(tables, y, n_estimators=5, fields=kept(True))
    assert first.results["p0"].model_id == model_id
    assert len(read_ledger(tmp_path / "p0.noise")) == 5
    for name, content in checkpoints.items():
        (tmp_path / name).write_bytes(content)
    second = play_training(tables, y, n_estimators=5, fields=kept(True))
    assert len(read_ledger(tmp_path / "p0.noise")) == 5
    for played in (first, second):
        assert len(sent_to(played, "p1", NoisyTree)) == 2
        assert played.results["p0"].spent.startswith("epsilon 1 per value; 5 per person over 5 releases. In the ledger")
    for one, other in zip(*(sent_to(played, "p1", NoisyTree) for played in (first, second)), strict=True):
        np.testing.assert_array_equal(numbers(one.grad), numbers(other.grad))
    for one, other in zip(*(played.results["p0"].forest.trees for played in (first, second)), strict=True):
        np.testing.assert_array_equal(one.value, other.value)


def test_other_gradients_get_other_noise_and_pay_again():
    ledger, options = Ledger(None), FedXGBoostLDP(mechanism="duchi", epsilon=3.0)

    def noise(grad, **changes):
        given = {"weighted": False, "model_id": "m", "job": "j"} | changes
        made = NoisyGradients(ledger, options, Logistic(), len(grad), **given)
        return one_tree(made, grad, np.full(len(grad), 2**14))[0].grad

    grad = np.full(3_000, 2**14)
    first = noise(grad)
    np.testing.assert_array_equal(noise(grad), first)
    assert len(ledger.entries()) == 1
    changed = grad.copy()
    changed[7] *= -1
    others = [noise(changed), noise(grad, model_id="n"), noise(grad, first_tree=1)]
    assert len(ledger.entries()) == 4
    for other in others:
        alike = np.mean(other == first)
        p = 0.5 + 0.5 * math.tanh(1.5) / 2
        assert abs(alike - (p * p + (1 - p) ** 2)) < 6.5 * 0.5 / math.sqrt(3_000)  # false alarm: 10^-10


def test_a_first_tree_that_attempts_repeat_under_new_models_is_paid_within_the_partys_limits():
    """An attempt that ended before its first checkpoint has left nothing to go on from: the next draws new noise."""
    ledger, options = Ledger(None, EpsilonLimits(job=1.0)), FedXGBoostLDP(mechanism="duchi", epsilon=0.4)
    grad, hess = np.full(50, 2**14), np.full(50, 2**14)
    released = 0
    for attempt in range(5):
        noise = NoisyGradients(ledger, options, Logistic(), 50, weighted=False, model_id=f"{attempt:032x}", job="a job")
        if one_tree(noise, grad, hess) is None:
            assert "in one job" in noise.stopped
        else:
            released += 1
    assert released == len(ledger.entries()) == 2


def test_noise_of_many_rows_is_the_same_on_any_number_of_threads_and_repeats_nowhere():
    grad, hess = np.full(70_001, 2**14), np.full(70_001, 2**14)
    ledger, options = Ledger(None), FedXGBoostLDP(mechanism="laplace", epsilon=1.0)
    given = {"weighted": True, "model_id": "m", "job": "j"}
    one, three = (
        one_tree(NoisyGradients(ledger, options, Logistic(), len(grad), threads=threads, **given), grad, hess)[0]
        for threads in (1, 3)
    )
    assert len(ledger.entries()) == 1
    for noisy, same in ((one.grad, three.grad), (one.hess, three.hess)):
        np.testing.assert_array_equal(noisy, same)
        blocks = noisy[: len(noisy) // 2**14 * 2**14].reshape(-1, 2**14)
        for k in range(1, len(blocks)):
            assert np.mean(blocks[0] == blocks[k]) < 0.01  # two draws of 2^13 likely outcomes: 0.0001 of them
    assert np.mean(one.grad == one.hess - SENT_STEPS) < 0.01


# ---------------------------------------------------------------- options, and what is refused


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan, 2.0**-30])
def test_an_epsilon_that_is_none_is_refused(varied, epsilon):
    with pytest.raises(ConfigError, match="epsilon"):
        play_training(*varied, epsilon=epsilon)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reg_lambda": 0.0}, "expected reg_lambda above 0"),
        ({"goss": True}, "goss draws rows by their true gradients"),
        ({"mode": "paper"}, "it needs allow_insecure=True"),
        ({**PAPER, "epsilon_total": 9.0}, "no epsilon that epsilon_total could limit"),
        ({"clip": 0.5}, "clip and clip_hess are for noise on gradients, and mechanism='label_rr' randomises labels"),
        ({"refit": True}, "refit uses true labels, and mechanism='label_rr' randomises labels once: name one"),
        ({"mechanism": "target"}, r"needs target_range=\(least, most\)"),
        ({"mechanism": "duchi", "target_range": [0.0, 1.0]}, "target_range is for mechanism='target', got 'duchi'"),
        ({"target_range": [1.0, 1.0]}, r"expected target_range of two finite numbers, the lower first, got \[1\.0"),
        ({"target_range": [math.nan, 1.0]}, "expected target_range of two finite numbers"),
        ({"target_range": [0.0, math.inf]}, "expected target_range of two finite numbers"),
        ({"target_range": [0.0]}, "option target_range"),
        ({"target_range": [0.0, 9.0], "objective": "poisson"}, "'poisson' does not average noise on labels out"),
        ({"target_range": [0.0, 9.0], **PAPER}, "target_range is for mechanism='target', got 'duchi'"),
        ({"mechanism": "label_rr", "epsilon": 1.0, **PAPER}, "label_rr' is none of its mechanisms"),
        ({"mechanism": "gaussian"}, "expected one of label_rr, target, laplace, duchi, piecewise"),
        ({"split_score": "third_order"}, "expected one of first_order, second_order"),
        ({"delta": 1e-6}, "delta goes with epsilon_total"),
        ({"encryption": "ou"}, "has no option 'encryption'"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        checked(**options)


@pytest.mark.parametrize("party", ["p0", "p1"])
def test_the_published_form_needs_the_consent_of_every_party(varied, party):
    with pytest.raises(ConfigError, match="allow_insecure"):
        play_training(*varied, **PAPER, own={party: {"allow_insecure": False}})


def test_noisy_labels_are_refused_for_weighted_rows(varied):
    weight = np.where(varied[1] > 0, 4.0, 1.0)
    with pytest.raises(ConfigError, match="adds noise to labels alone"):
        play_training(*varied, weight=weight, mechanism="label_rr", epsilon=0.5)


def test_the_published_form_is_entered_as_what_has_no_epsilon(varied, tmp_path):
    fields = {"p0": {"store": tmp_path}}
    spent = play_training(*varied, fields=fields, **PAPER).results["p0"].spent
    assert spent.startswith("epsilon inf per value; inf per person")
    assert [entry.epsilon for entry in read_ledger(tmp_path / "p0.noise")] == [math.inf] * 3
    with pytest.raises(ConfigError, match="no round can be paid for"):
        play_training(*varied, fields=fields, epsilon_total=100.0)


@pytest.mark.parametrize(("order", "share"), [("first_order", 1.0), ("second_order", 0.5)])
def test_as_published_gradients_have_the_whole_epsilon_unless_hessians_are_sent_too(order, share):
    options = FedXGBoostLDP(**PAPER, mechanism="laplace", epsilon=2.0, split_score=order)
    objective, n_rows = Logistic(), 20_000
    noise = NoisyGradients(Ledger(None), options, objective, n_rows, weighted=False, model_id="", job="")
    grad, hess = np.zeros(n_rows, np.int64), np.full(n_rows, 1000, np.int64)
    found, counted = one_tree(noise, grad, hess)
    assert found.grad.std() * noise.units[0] == pytest.approx(math.sqrt(8) / (2.0 * share), rel=0.05)
    assert (len(np.unique(found.hess)) == 1) == (order == "first_order")
    assert len(np.unique(counted.hess)) == 1
    np.testing.assert_array_equal(counted.grad, grad)


def test_noise_that_fits_no_integers_is_refused():
    options = FedXGBoostLDP(mechanism="laplace", epsilon=2.0**-20)
    with pytest.raises(ConfigError, match="do not fit 62 bits: raise it"):
        NoisyGradients(Ledger(None), options, Logistic(), 10**9, weighted=False, model_id="", job="")


def edited(**fields: Any) -> Any:
    """Return a function that puts other arrays into a message."""

    def change(message):
        values = {name: getattr(message, name) for name in message.__struct_fields__}
        for name, edit in fields.items():
            value = values[name]
            found = edit(numbers(value).copy() if isinstance(value, Array) else value)
            values[name] = Array.of(found) if isinstance(found, np.ndarray) else found
        return type(message)(**values)

    return change


def nothing(array):
    return array[:0]


def put(value: float) -> Any:
    def edit(array):
        array[0] = value
        return array

    return edit


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"Scores": edited(best=put(math.nan))}, "expected finite gains of 0 or more - at Scores.best from p1"),
        ({"Scores": edited(best=put(-1.0))}, "expected finite gains of 0 or more - at Scores.best from p1"),
        ({"Scores": edited(best=lambda a: a[:0])}, r"expected float64 \(1,\), got float64 \(0,\) - at Scores.best"),
        ({"Scores": edited(best=lambda a: a + 1e9)}, "expected a split as good as its score"),
        ({"ScoredSplitAnswer": edited(records=lambda a: a + 1)}, "expected records from 0 on - at ScoredSplitAnswer"),
        ({"ScoredSplitAnswer": edited(left=lambda a: a[:-1])}, "at ScoredSplitAnswer.left from p1"),
        ({"ScoredSplitAnswer": edited(left=lambda a: a ^ 1)}, "expected a split as good as its score"),
        ({"ScoredSplitAnswer": edited(left=np.zeros_like)}, "expected a split as good as its score"),
        ({"ColumnCount": edited(count=lambda n: n + 99)}, "ascending numbers below|from p"),
    ],
)  # fmt: skip
def test_garbage_from_a_passive_party_is_its_fault(change, text):
    tables, y = tables_and_labels(parties=2)
    strong = {"p0": to_table(real_table("binary")[0].iloc[:, :1] * 0, party="p0"), "p1": tables["p1"]}
    with pytest.raises(PeerProtocolError, match=text):
        play_training(strong, y, epsilon=8.0, change=change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"NoisyTree": edited(grad=lambda a: a[:-1])}, "at NoisyTree.grad from p0"),
        ({"NoisyTree": edited(grad=lambda a: a * np.int64(2**60))}, r"sums below 2\^62 - at NoisyTree.grad from p0"),
        ({"NoisyTree": edited(columns=lambda a: a[::-1])}, "expected ascending numbers below .* NoisyTree.columns"),
        ({"NoisyTree": edited(columns=put(-1))}, "expected ascending numbers below"),
        ({"NoisyTree": edited(hess=lambda _: None)}, "hessians sent or not as agreed"),
        ({"NoisyTree": edited(totals=lambda a: a + 1)}, "expected the tree's rows - at NoisyTree.totals"),
        ({"NoisyTree": edited(totals=put(2**62))}, r"expected sums below 2\^62 - at NoisyTree.totals from p0"),
        ({"ScoredSplitRequest": edited(nodes=lambda a: a + 8)}, "expected nodes with a score, once, in their order"),
        ({"LevelDivision": edited(nodes=lambda a: a[:0])}, "at LevelDivision.nodes from p0"),
        ({"LevelDivision": edited(nodes=np.zeros_like, left=nothing, totals=nothing)}, "with a level below it"),
        ({"LevelDivision": edited(left=lambda a: a[:-1])}, "at LevelDivision.left from p0"),
        ({"LevelDivision": edited(totals=lambda a: a + 1)}, "rows as go left - at LevelDivision.totals from p0"),
        ({"LevelDivision": edited(totals=lambda a: a * 2**60)}, r"sums below 2\^62 - at LevelDivision.totals from p0"),
        ({"NoiseSetup": edited(grad_unit=lambda _: math.inf)}, "expected finite units - at NoiseSetup from p0"),
    ],
)  # fmt: skip
def test_garbage_from_the_active_party_is_its_fault(change, text):
    tables, y = tables_and_labels(parties=2)
    strong = {"p0": to_table(real_table("binary")[0].iloc[:, :1] * 0, party="p0"), "p1": tables["p1"]}
    seen: dict[str, BaseException] = {}
    with pytest.raises(TreatyError):
        play_training(strong, y, epsilon=8.0, change=change, seen=seen)
    assert isinstance(seen["p1"], PeerProtocolError)
    assert re.search(text, str(seen["p1"]))


def test_what_belongs_to_a_level_may_come_only_after_a_tree_and_a_split_once_a_level():
    order = MessageOrder(CONVERSATION, "between trees")
    assert not {ScoredSplitRequest, LevelDivision} & set(order.allowed)
    order.state = "scored"
    assert {ScoredSplitRequest, LevelDivision, NoisyTree} <= set(order.allowed)
    order.take(ScoredSplitRequest(Array.of(np.zeros(1, np.int32))))
    assert ScoredSplitRequest not in order.allowed
    assert {LevelDivision, NoisyTree} <= set(order.allowed)
    order.take(leading.CheckpointRequest(1))
    assert not {ScoredSplitRequest, LevelDivision} & set(order.allowed)


@pytest.mark.parametrize("message", ["ScoredSplitRequest", "LevelDivision"])
def test_a_split_or_a_division_before_its_tree_is_refused(message):
    tables, y = tables_and_labels(parties=2)
    none = Array.of(np.zeros(1, np.int32))
    early = {"ScoredSplitRequest": ScoredSplitRequest(none), "LevelDivision": LevelDivision(none, none, none)}[message]
    seen: dict[str, BaseException] = {}
    with pytest.raises(TreatyError):
        play_training(tables, y, change={"NoisyTree": lambda _: early}, seen=seen)
    assert re.search(f"expected NoisyTree.* got {message}", str(seen["p1"]))


def test_after_a_tree_without_a_split_nothing_of_a_level_may_come():
    tables, y = tables_and_labels(parties=2)
    none = Array.of(np.zeros(1, np.int32))
    late = {"Finish": lambda _: LevelDivision(none, none, none)}
    seen: dict[str, BaseException] = {}
    with pytest.raises(TreatyError):
        play_training(tables, y, change=late, seen=seen, min_child_samples=200)
    assert re.search("expected NoisyTree.* got LevelDivision", str(seen["p1"]))


def test_a_peer_that_dies_is_an_error_at_the_others(varied):
    def die(message):
        raise SystemExit

    seen: dict[str, BaseException] = {}
    with pytest.raises(SystemExit):
        play_training(*varied, change={"Scores": die}, seen=seen)
    assert isinstance(seen["p0"], TreatyError)
    assert not isinstance(seen["p0"], PeerProtocolError) or isinstance(seen["p0"], PeerLost)


def test_other_options_at_a_party_are_refused(varied):
    with pytest.raises(ConfigError, match="epsilon"):
        play_training(*varied, own={"p1": {"epsilon": 2.0}, "p2": {"epsilon": 2.0}})


@pytest.mark.parametrize(
    "options", [{}, PAPER, {"mechanism": "duchi"}, {"target_range": [0.0, 9.0]}, {"mechanism": "duchi", "refit": True}]
)
def test_what_was_learned_says_what_it_costs_a_value_and_a_person(options):
    roles = Roles("bank", {"bank": "active", "shop": "passive"}, ["bank", "shop"])
    told = SYSTEM.disclosures(roles, checked(**options), BoostingOptions(), None)
    assert set(told) == {"bank", "shop"}
    shop = " ".join(told["shop"])
    assert "person" in shop
    assert ("no epsilon holds" in shop) == (options == PAPER)
    assert any("refit" in line for line in told["bank"]) == ("refit" in options)
    assert ("range from 0 to 9" in shop) == ("target_range" in options)
