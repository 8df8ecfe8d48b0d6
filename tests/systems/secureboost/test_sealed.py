"""Sealed sums give the pooled grower's trees, bit for bit, and show the active party nothing but the splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.stats import chi2

import treaty
from marks import slow
from systems.secureboost.test_lattice_privacy import LATTICE_TO_ACTIVE, LATTICE_TO_PASSIVE
from systems.secureboost.test_lossless import assert_lossless, fit_both
from systems.secureboost.test_privacy import arrays, received
from systems.vertical.lossless import unusual_tables
from systems.vertical.playing import OPTIONS, play_training, role_input, tables_and_labels
from tables import cut, real_table, with_categories, with_gaps
from treaty.crypto.parameters import DEGREE
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.lattice_sums import LatticeSumsClient
from treaty.crypto.transfer import stock
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.errors import ConfigError, CryptoError, PeerProtocolError, TreatyError
from treaty.messaging.messages import Array
from treaty.privacy.exact_sums import OpenedNode, known_bins
from treaty.privacy.leaks import OpenedTree, RebuiltRows, agreement, invert, rebuild
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical import exact_sums, messages, sealed, sealed_active
from treaty.systems.vertical.messages import LinkEcho, LinkProbe
from treaty.systems.vertical.sealed import places_of
from treaty.systems.vertical.sealed_active import SealedSearch


def filled(array: Array, value: int) -> Array:
    """Return an array of the same form that has one value everywhere."""
    return Array.of(np.full(array.shape, value, array.dtype))


def alike(array: Array) -> Array:
    """Return an array whose values are all its last one."""
    return filled(array, int(np.frombuffer(array.data, np.int32)[-1]))


SEALED = SecureBoost(sums="sealed")
SMALL = {"max_bin": 6, "max_cat_to_onehot": 32_768}  # a bin of a hint takes a millisecond or two


SORTED = {"max_cat_to_onehot": 4, "category_sets": "sorted"}
HALVES = {"max_cat_to_onehot": 4}  # `with_categories` has six


def sealed_both(task: str, tables: dict, y: np.ndarray, weight=None, eval_set=None, system=SEALED, **options):
    return fit_both(task, tables, y, weight, eval_set, system, **{**SMALL, **options})


@pytest.mark.parametrize(
    ("task", "parties", "change"),
    [
        ("binary", 2, lambda X: with_categories(with_gaps(X))),
        ("multiclass", 3, with_gaps),
        slow("regression", 3, with_categories),
        slow("binary", 5, with_gaps),
        slow("binary", 3, lambda X: X),
    ],
)
def test_sealed_sums_give_the_pooled_trees_and_predictions(task, parties, change):
    X, y = real_table(task)
    tables = cut(change(X), parties)
    federated, pooled = sealed_both(task, tables, y)
    assert_lossless(federated, pooled, tables)
    sent = federated.communication_["p1 -> p0"]["by_type"]
    assert sent["SealedStep"] > 10 * sent["Sums"]  # bytes


@pytest.mark.parametrize(
    ("parties", "system", "options"),
    [
        (2, SEALED, {"min_child_samples": 1}),
        (3, SEALED, {"max_depth": 4, "active": "p1"}),
        slow(5, SEALED, {"colsample_bytree": 0.5, "random_state": 3, "n_estimators": 6}),
        slow(3, SecureBoost(sums="sealed", reveal="column"), {"max_depth": 5, "subsample": 0.7, "random_state": 1}),
        slow(2, FedXGBoostSMM(reveal="argmax"), {}),
    ],
)
def test_sealed_sets_of_categories_are_those_of_the_pooled_table(parties, system, options):
    X, y = real_table("binary")
    tables = cut(with_categories(with_gaps(X)), parties)
    federated, pooled = sealed_both("binary", tables, y, system=system, **{**HALVES, **options})
    assert_lossless(federated, pooled, tables)
    # some split has a set: "z", the first category, has no row, and goes where missing values go
    sizes = {sum(left[1:7]) for left in pooled.parts_["pooled"].splits.category_left if left is not None}
    assert sizes & {2, 3, 4}


def test_categories_of_few_rows_and_constant_columns_are_in_no_half():
    """Categories of a row each, all missing, one category alone; all give the pooled trees."""
    X, y = real_table("binary")
    n = len(X)
    codes = {
        "single rows": [f"k{row}" if row < 60 else None for row in range(n)],
        "missing": [None] * n,
        "one": ["a"] * n,
        "many": [f"k{row % 4 + 4 * (y[row] ^ (row % 5 == 0))}" for row in range(n)],
        "mixed": [f"k{row % 3 if row < n // 2 else row}" for row in range(n)],
    }
    tables = {
        "p0": X.iloc[:, :1],
        "p1": pd.DataFrame({name: pd.Categorical(of, categories=sorted({*of} - {None})) for name, of in codes.items()}),
    }
    options = {"max_cat_to_onehot": 1, "max_bin": 64, "max_depth": 4, "min_child_samples": 20}
    federated, pooled = sealed_both("binary", tables, y, **options)
    assert_lossless(federated, pooled, tables)
    found = federated.parts_["p1"].splits
    assert 3 in found.feature
    for feature, left in zip(found.feature, found.category_left, strict=True):
        assert left is not None
        assert feature != 0 or not any(left[:60])


@pytest.mark.parametrize("active", ["p0", slow("p1"), "p2"])
def test_the_active_party_may_stand_anywhere_in_the_order(active):
    X, y = real_table("binary")
    twice = pd.concat([X.iloc[:, :4], X.iloc[:, :4].add_suffix(" again")], axis=1)  # ties between parties
    tables = {"p0": twice.iloc[:, 4:7], "p1": twice.iloc[:, :3], "p2": twice.iloc[:, 3:5], "p3": twice.iloc[:, [0, 7]]}
    assert_lossless(*sealed_both("binary", tables, y, active=active), tables)


def test_far_links_carry_products_at_every_step_and_trees_are_the_pooled_ones(monkeypatch):
    """Also while the best so far passes from party to party, and while halves are opened."""
    monkeypatch.setattr("treaty.systems.vertical.setup.FAR", -1.0)
    X, y = real_table("binary")
    tables, options = cut(with_categories(with_gaps(X)), 3), {**HALVES, "min_child_samples": 1, "n_estimators": 4}
    assert_lossless(*sealed_both("binary", tables, y, **options), tables)


@pytest.mark.parametrize("case", ["no own features", slow("one column"), slow("constant and missing")])
def test_sealed_sums_give_the_pooled_trees_of_unusual_tables(case):
    tables, (_, y) = unusual_tables()[case], real_table("binary")
    assert_lossless(*sealed_both("binary", tables, y), tables)


@pytest.mark.parametrize(
    "options",
    [
        {"subsample": 0.6, "colsample_bytree": 0.3, "random_state": 1, "n_estimators": 5},
        slow({"goss": True, "colsample_bytree": 0.6, "random_state": 5}),
        slow({"max_depth": 6, "min_split_loss": 0.5, "reg_lambda": 0.1}),
        slow({"min_child_samples": 20, "min_child_weight": 3.0}),
        slow({"fractional_bits": 20, "n_estimators": 2}),
        slow({"fractional_bits": 4}),
        slow({"max_depth": 1, "learning_rate": 1.0}),
        slow({"reg_lambda": 1e4}),
    ],
    ids="-".join,
)
def test_sealed_sums_give_the_pooled_trees_under_every_growth_option(options):
    X, y = real_table("binary")
    weight = np.random.default_rng(5).exponential(size=len(y)) * 3
    weight[:10] = 0.0
    tables = cut(with_categories(with_gaps(X)), 3)
    assert_lossless(*sealed_both("binary", tables, y, weight, **options), tables)


@pytest.mark.parametrize(
    ("system", "answer"),
    [
        (SEALED, "SplitSides"),
        (SecureBoost(sums="sealed", reveal="column"), "SplitColumns"),
        slow(SecureBoost(sums="sealed", reveal="node"), "SplitSides"),
        slow(FedXGBoostSMM(reveal="argmax"), "SplitSides"),
    ],
)
def test_whole_columns_and_matrix_products_go_the_same_way(system, answer):
    X, y = real_table("binary")
    tables = cut(with_gaps(X), 3)
    federated, pooled = sealed_both("binary", tables, y, system=system)
    assert_lossless(federated, pooled, tables)
    sent = federated.communication_["p1 -> p0"]["by_type"], federated.communication_["p0 -> p1"]["by_type"]
    assert {"SplitAnswer", "SplitColumns", "SplitSides"} & set(sent[0]) == {answer}
    assert "NamedRows" not in sent[1]
    assert ("SideChoices" in sent[1]) == (answer == "SplitSides")


def test_deep_trees_with_more_nodes_than_pads_are_made_of_at_once_in_pieces_of_rows(monkeypatch):
    monkeypatch.setattr(stock, "_AT_ONCE", 2)
    monkeypatch.setattr("treaty.machine.arrays.PIECE_BYTES", 48)
    X, y = real_table("binary")
    tables = {"p0": X.iloc[:, :1], "p1": X.iloc[:, 1:]}
    options = {"max_depth": 7, "min_child_samples": 1, "min_child_weight": 1e-3, "n_estimators": 2}
    assert_lossless(*sealed_both("binary", tables, y, **options), tables)


def test_a_passive_party_receives_uniform_choices_and_answers_alike_for_every_node():
    """Of the rows of nodes it sees nothing: sides that it gives are of all rows, and bits that choose are masked."""
    tables, y = tables_and_labels(parties=2)
    tables = {"p0": tables["p1"], "p1": tables["p0"]}  # the better columns, so that p1 splits below the root
    played = play_training(tables, y, **{**SMALL_JOB, "n_estimators": 8, "max_depth": 3})
    assert not {entry.step for entry in played.transcripts["p1"].entries} & {"NamedRows", "SplitRequest"}
    entries = {name: played.transcripts[name].entries for name in ("p0", "p1")}
    came = [entry.message(messages.SideChoices) for entry in entries["p1"] if entry.step == "SideChoices"]
    content = [np.frombuffer(message.message.data, np.uint8) for message in came]
    assert uniform(np.concatenate(content)) > 1e-6
    flips = [
        np.unpackbits(np.frombuffer(message.flips.data, np.uint8), bitorder="little")[: len(y)] for message in came
    ]
    ones, of = int(np.sum(flips)), sum(map(len, flips))
    assert abs(ones - of / 2) < 5 * np.sqrt(of / 4)
    answers = [entry.message(messages.SplitSides).left.shape for entry in entries["p0"] if entry.step == "SplitSides"]
    assert {width for _, width in answers} == {-(-len(y) // 8)}


def small_job(data: Any) -> tuple[str, dict, np.ndarray, np.ndarray | None, dict]:
    """Draw a task, tables of 2 to 5 parties, labels, weights and options."""
    n, seed = data.draw(st.integers(8, 60)), data.draw(st.integers(0, 2**32 - 1))
    rng, parties = np.random.default_rng(seed), data.draw(st.integers(2, 5))
    values = data.draw(st.integers(2, 9))  # few, so that many candidates tie
    X = pd.DataFrame({f"x{k}": rng.integers(0, values, n).astype(float) for k in range(parties + rng.integers(0, 4))})
    X = with_gaps(X, data.draw(st.sampled_from([0.0, 0.3])), seed)
    X.iloc[0] = 1.0
    if data.draw(st.booleans()):
        X = with_categories(X, seed) if n >= 20 else X
    score = X.iloc[:, -1].map(hash) % 7 + rng.normal(size=n)
    task = data.draw(st.sampled_from(["binary", "multiclass", "regression"]))
    y = score.to_numpy().copy()
    if task != "regression":
        y = np.digitize(y, [2.5] if task == "binary" else [1.5, 4.0])
    y[:3] = [0, 1, 2 if task == "multiclass" else 0]
    weight = rng.integers(0, 4, n).astype(float) + (np.arange(n) < 3) if data.draw(st.booleans()) else None
    options = {
        "max_depth": data.draw(st.integers(1, 4)),
        "n_estimators": data.draw(st.sampled_from([2, 4])),  # from the third on, what was made ahead is used
        "min_child_weight": data.draw(st.sampled_from([1e-3, 1.0])),
        "min_child_samples": data.draw(st.sampled_from([1, 3])),
        "min_split_loss": data.draw(st.sampled_from([0.0, 0.1])),
        "reg_lambda": data.draw(st.sampled_from([0.3, 1.0])),
        "subsample": data.draw(st.sampled_from([1.0, 0.7])),
        "colsample_bytree": data.draw(st.sampled_from([1.0, 0.5])),
        "random_state": 0,
        "max_cat_to_onehot": data.draw(st.sampled_from([2, 256])),
    }
    tables = cut(X, parties)
    return task, tables, y, weight, {**options, "active": data.draw(st.sampled_from(list(tables)))}


def assert_lossless_job(data: Any) -> None:
    task, tables, y, weight, options = small_job(data)
    federated, pooled = sealed_both(task, tables, y, weight, **options)
    if any(len(tree.left) > 1 for tree in pooled.parts_["pooled"].forest.trees):
        assert_lossless(federated, pooled, tables)
    else:
        assert all(len(tree.left) == 1 for tree in federated.parts_[options["active"]].forest.trees)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_jobs_give_the_pooled_trees(data):
    assert_lossless_job(data)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # of minutes on an idle machine
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_two_hundred_random_jobs_give_the_pooled_trees(data):
    assert_lossless_job(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "options"),
    [({"purity_guard": 0.35}, {"max_depth": 5, "n_estimators": 5}), ({"rl_trees": 1}, {})],
    ids=["purity_guard", "rl_trees"],
)
def test_sealed_sums_give_the_trees_of_open_ones_under_guards(guard, options):
    X, y = real_table("binary")
    tables, options = cut(with_gaps(X), 3), {**SMALL, **options, "n_jobs": 1}
    opened = treaty.GBDTClassifier(SecureBoost(encryption="lattice", allow_exact_sums=True, **guard), **options)
    sealed = treaty.GBDTClassifier(SecureBoost(sums="sealed", **guard), **options)
    assert_lossless(sealed.fit(tables, y), opened.fit(tables, y), tables)
    unguarded = treaty.GBDTClassifier("pooled", **options).fit(tables, y)
    assert not np.array_equal(sealed.predict_proba(tables), unguarded.predict_proba(tables))


@pytest.mark.slow
def test_eval_losses_and_early_stopping_equal_the_pooled_ones():
    X, y = real_table("binary", rows=400)
    tables, held = cut(X.iloc[:200], 3), cut(X.iloc[200:300], 3)
    options = {"n_estimators": 40, "early_stopping_rounds": 3, "learning_rate": 1.0}
    federated, pooled = sealed_both("binary", tables, y[:200], eval_set=[(held, y[200:300])], **options)
    assert federated.evals_result_ == pooled.evals_result_
    assert_lossless(federated, pooled, held)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3])
def test_levels_asked_for_in_several_messages_give_the_pooled_trees(monkeypatch, nodes):
    X, y = real_table("regression")
    tables = cut(X, 3)
    monkeypatch.setattr("treaty.crypto.sums.lattice_sums.PIECE_BYTES", nodes * 4 * 5 * (len(X) + DEGREE))
    monkeypatch.setattr(sealed, "_AT_A_TIME", 40)  # and a few nodes' candidates at a time
    assert_lossless(*sealed_both("regression", tables, y, max_depth=5, n_estimators=2), tables)


def test_an_interrupted_training_goes_on_to_the_same_model(tmp_path: Path):
    X, y = real_table("binary")
    tables, options = cut(X, 3), {**SMALL, "n_estimators": 4, "n_jobs": 1, "max_depth": 2}
    whole = treaty.GBDTClassifier(SEALED, **options).fit(tables, y)
    with pytest.raises(Stopped):
        treaty.GBDTClassifier(SEALED, callbacks=[StopAfter(2)], **options).fit(tables, y, checkpoint=tmp_path)
    accepted = SecureBoost(allow_exact_sums=True)
    with pytest.raises(ConfigError, match=r"sums='open' \(was 'sealed'\).* or name sums"):
        treaty.GBDTClassifier(accepted, **options).fit(tables, y, checkpoint=tmp_path)
    rounds = StopAfter(99)
    resumed = treaty.GBDTClassifier("secureboost", callbacks=[rounds], **options)
    assert_lossless(resumed.fit(tables, y, checkpoint=tmp_path), whole, tables)
    assert rounds.seen in ([1, 2, 3], [2, 3])  # the first round was kept, or both


class Stopped(Exception):
    pass


class StopAfter:
    """A callback that ends a training when so many rounds are done."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.seen = rounds, []

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> None:
        self.seen.append(epoch)
        if epoch + 1 == self.rounds:
            raise Stopped


def test_processes_over_tls_give_the_same_trees():
    X, y = real_table("binary")
    tables, options = cut(with_gaps(X), 3), {**SMALL, "n_estimators": 2, "n_jobs": 1, "max_depth": 2}
    whole = treaty.GBDTClassifier("pooled", **options).fit(tables, y)
    sealed = treaty.GBDTClassifier("secureboost", transport="tls", **options).fit(tables, y)
    assert "SealedStep" in sealed.communication_["p1 -> p0"]["by_type"]
    assert_lossless(sealed, whole, tables)


# ---------------------------------------------------------------- faults that must show


@pytest.mark.parametrize("what", ["a comparison", "a product", "a carry", "a set's bits", "a set's sums"])
def test_a_failure_of_a_comparison_product_carry_or_set_shows_in_the_trees(monkeypatch, what):
    X, y = real_table("binary")
    sets = HALVES if what.startswith("a set") else {}
    tables = cut(with_categories(with_gaps(X)) if sets else with_gaps(X), 2)

    def broken(module: str, name: str, change: Any) -> None:
        honest = getattr(__import__(module, fromlist=[name]), name)

        def wrong(*given, **named):
            return change((yield from honest(*given, **named)), given)

        monkeypatch.setattr(f"{module}.{name}", wrong)

    def flipped(bits, given):
        return bits ^ np.uint8(1 - given[-1])  # at one end: the shared bit

    def doubled(shares, given):
        return shares * np.uint64(2 - given[-1])  # at one end

    match what:
        case "a comparison":
            broken("treaty.crypto.transfer.sealed_sums", "negatives", flipped)
        case "a product":
            broken("treaty.crypto.transfer.sealed_sums", "squares", doubled)
        case "a carry":
            broken("treaty.crypto.transfer.sealed_sums", "both_of", lambda shares, _: shares * np.uint64(0))
        case "a set's bits":
            broken("treaty.systems.vertical.sealed", "half_that_won", lambda bits, _: bits ^ np.uint8(1))
        case "a set's sums":
            broken(
                "treaty.crypto.transfer.category_sets",
                "conjunctions",
                lambda bits, given: [b * (1 - given[-1]) for b in bits],
            )
    with pytest.raises((AssertionError, TreatyError)):
        assert_lossless(*sealed_both("binary", tables, y, n_estimators=5, **sets), tables)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("system", "options", "message"),
    [
        (SecureBoost(sums="sealed", encryption="ou"), {}, r'sums="sealed" needs the lattice map, got \'ou\''),
        (SecureBoost(sums="sealed", encryption="paillier"), {}, r'sums="sealed" needs the lattice map'),
        (FedXGBoostSMM(reveal="argmax", backend="dealer"), {}, r'reveal="argmax" needs the lattice map'),
        (SEALED, {"reg_alpha": 0.5}, "needs reg_alpha to be 0, got 0.5"),
        (SEALED, {"max_delta_step": 1.0}, "needs max_delta_step to be 0, got 1.0"),
        (SEALED, {"reg_lambda": 0.0}, "needs reg_lambda to be at least 1.52588e-05"),
        (SEALED, {"reg_lambda": 1e15}, "needs reg_lambda to be less, got 1e\\+15"),
        (SEALED, {"min_child_weight": 0.0}, "needs min_child_weight to be above 0"),
        (SEALED, SORTED, "needs category_sets to be left out, got sorted"),
        (SEALED, {"fractional_bits": 24}, "expected fractional_bits of at most 20 under the lattice map"),
    ],
)
def test_what_does_not_go_with_sealed_sums_is_refused(system, options, message):
    X, y = real_table("binary")
    with pytest.raises(ConfigError, match=message):
        treaty.GBDTClassifier(system, **options).fit(cut(X, 2), y)


def test_sealed_sums_need_no_consent_to_exact_ones(monkeypatch):
    monkeypatch.setattr(exact_sums, "MOST_SHARE", 0.1)
    X, y = real_table("binary")
    tables = cut(X, 2)
    with pytest.raises(ConfigError, match="exact sums would show"):
        treaty.GBDTClassifier(SecureBoost(encryption="lattice", sums="open"), n_estimators=20).fit(tables, y)
    for system in (SEALED, SecureBoost(), "secureboost"):
        model = treaty.GBDTClassifier(system, n_estimators=1, max_depth=1, **SMALL).fit(tables, y)
        assert model.parts_["p0"].exact_sums == {"p1": 0.0}
        assert "SealedStep" in model.communication_["p1 -> p0"]["by_type"]
    accepted = SecureBoost(encryption="lattice", allow_exact_sums=True)
    model = treaty.GBDTClassifier(accepted, n_estimators=1, max_depth=1, **SMALL).fit(tables, y)
    assert "SealedStep" not in model.communication_["p1 -> p0"]["by_type"]


# ---------------------------------------------------------------- what the active party receives

TO_PASSIVE_SEALED = (
    LinkProbe, messages.SealedStep, messages.TournamentTerms, messages.SealedSumsRequest,
    messages.WonCandidates, messages.SideChoices,
)  # fmt: skip
KINDS = {
    **LATTICE_TO_ACTIVE,
    **{
        kind.__name__: kind
        for kind in (
            LinkEcho, messages.SealedStep, messages.SealedColumns, messages.MovedShares, messages.OwnerShares,
            messages.SplitSides,
        )
    },
}  # fmt: skip
SMALL_JOB = {
    "insecure_test_key_bits": None, "allow_insecure": False, "sums": "sealed", "max_bin": 16, "n_estimators": 2,
    "max_depth": 2, "min_child_samples": 5,
}  # fmt: skip


def received_by_active(tables: dict, y: np.ndarray, **options: Any) -> list[tuple[str, np.ndarray]]:
    """Train; return the arrays that p0 received, with the kinds of their messages."""
    played = play_training(tables, y, **{**SMALL_JOB, **options})
    return [
        (step, np.frombuffer(array.data, array.dtype).reshape(array.shape))
        for step, message, _ in received(played.transcripts["p0"], KINDS)
        for array in arrays(message)
    ]


def other_table(tables: dict, seed: int = 7) -> dict:
    """Return the same tables, but for p1's columns, each in a random order of rows."""
    rng, own = np.random.default_rng(seed), cut(real_table("binary")[0], 2)["p1"]
    return {**tables, "p1": to_table(own.apply(lambda column: rng.permutation(column)), party="p1")}


def test_the_active_party_receives_as_much_whatever_the_passive_table_holds(monkeypatch):
    # as on two equally quick links
    monkeypatch.setattr(sealed_active, "best_step", lambda *given: 2)
    tables, y = tables_and_labels(parties=2)
    forms = []
    for seed in (7, 8):  # p1 has nothing but noise: p0 splits the root
        came = received_by_active(other_table(tables, seed), y, max_depth=1)
        forms.append([(step, array.dtype.str, array.shape) for step, array in came])
    assert forms[0] == forms[1]
    assert not any(step == "SplitSides" for step, _, _ in forms[0])


def test_what_the_active_party_receives_and_opens_is_uniform_whatever_the_table(monkeypatch):
    """A simulator that knows the splits alone draws uniform bytes of these shapes: no test tells the two apart."""
    tables, y = tables_and_labels(parties=2)
    opened, honest = [], LatticeSumsClient.open_shares

    def watched(client, *given):
        opened.append(honest(client, *given))
        return opened[-1]

    monkeypatch.setattr(LatticeSumsClient, "open_shares", watched)
    for of in (tables, other_table(tables)):
        opened.clear()
        came = received_by_active(of, y, max_depth=3, min_child_samples=2, n_estimators=3)  # the third's ahead, too
        steps = [array for step, array in came if step == "SealedStep" and array.dtype.kind == "u" and array.size > 64]
        # but for residues modulo primes (tests/crypto/transfer/test_ring_products.py), of numbers that no table is in
        content = [array.reshape(-1)[:-1].view(np.uint8) for array in steps if array.itemsize in (2, 8)]
        assert uniform(np.concatenate(content)) > 1e-6
        fields = np.concatenate([shares.reshape(-1, 4) for shares in opened])
        places = places_of(SumsBounds(len(y), 1 << 16, 1 << 14))
        for column, bits in enumerate((places.grad, places.hess, places.count, places.noise)):
            top = (fields[:, column] >> np.uint64(bits - 4)).astype(np.uint8)
            assert uniform(top, 16) > 1e-6
            assert uniform((fields[:, column] & np.uint64(15)).astype(np.uint8), 16) > 1e-6


@pytest.mark.parametrize("far", [False, True])
def test_a_far_link_alone_carries_what_is_made_ahead_but_for_the_last_tree(monkeypatch, far):
    monkeypatch.setattr("treaty.systems.vertical.setup.FAR", -1.0 if far else 1e9)
    tables, y = tables_and_labels(parties=2)
    played = play_training(tables, y, **{**SMALL_JOB, "n_estimators": 4})
    entries = [entry for entry in played.transcripts["p1"].entries if entry.step in ("TreeStart", "SealedSumsRequest")]
    trees: list[list[int]] = []
    for entry in entries:
        if entry.step == "TreeStart":
            trees.append([])
        else:
            trees[-1].append(entry.message(messages.SealedSumsRequest).ahead)
    assert len(trees) == 4
    assert set(trees[3]) == {0}
    assert set(trees[0]) == {int(far)}  # nobody knows what a tree takes yet
    for tree in trees[1:3]:
        (nbytes,) = set(tree)
        assert 1000 < nbytes < messages.MOST_AHEAD if far else nbytes == 0


def test_passive_parties_are_not_told_which_siblings_are_left_ones():
    """Nodes come in the order of their parents' places, whatever their order in the tree."""
    tables, y = tables_and_labels(parties=2)
    played = play_training(tables, y, **{**SMALL_JOB, "max_depth": 5, "min_child_samples": 1})
    kinds = {**LATTICE_TO_PASSIVE, **{kind.__name__: kind for kind in TO_PASSIVE_SEALED}}
    levels = []
    for step, message, _ in received(played.transcripts["p1"], kinds):
        if step == "SealedSumsRequest":
            levels.append(np.frombuffer(message.parents.data, np.int32))
        elif step == "WonCandidates":
            levels.append(np.frombuffer(message.nodes.data, np.int32))
    assert max(map(len, levels)) > 2
    assert all(np.all(np.diff(places) > 0) for places in levels)


def uniform(values: np.ndarray, kinds: int = 256) -> float:
    """Return the probability of counts as uneven as these, if all values are alike probable (chi-squared)."""
    counts = np.bincount(values.reshape(-1), minlength=kinds)
    expected = counts.sum() / kinds
    assert expected > 5
    return float(chi2.sf(((counts - expected) ** 2).sum() / expected, kinds - 1))


def test_the_attack_on_exact_sums_finds_nothing_in_what_is_opened_under_seal(monkeypatch):
    nodes: list[OpenedNode] = []
    honest = SealedSearch._tournament

    def watching(finder, shown, level, own):
        found = honest(finder, shown, level, own)
        order = finder._order
        for node, shares in zip(order.nodes, finder._peers[1].slots, strict=True):
            rows, _ = finder._rows.rows(np.array([node], np.int32), sampled=True)
            nodes.append(
                OpenedNode(rows.copy(), finder.sample.grad, finder.sample.hess, shares[..., 0].astype(np.int64))
            )
        return found

    monkeypatch.setattr(SealedSearch, "_tournament", watching)
    X, y = real_table("binary")
    tables = cut(X, 2)
    treaty.GBDTClassifier(SEALED, n_jobs=1, n_estimators=5, max_bin=16).fit(tables, y)
    table = to_table(tables["p1"])
    bins = fit_bins(table, 16)
    codes = bins.transform(table)
    found = known_bins(nodes, bins.offsets, len(y))
    fullest = [np.bincount(column).max() / len(y) for column in codes.T]
    assert nodes
    assert np.mean(found == codes) <= np.mean(fullest)  # no more than who says the same bin for all rows


def test_the_inversion_of_histograms_finds_nothing_in_what_is_opened_under_seal(monkeypatch):
    X, y = real_table("binary")
    tables = cut(X, 2)
    bins = fit_bins(to_table(tables["p1"]), 16)
    codes, offsets = bins.transform(to_table(tables["p1"])), bins.offsets
    sealed: list[dict[int, np.ndarray]] = []
    opened: list[dict[int, np.ndarray]] = []
    lefts: list[dict[int, int]] = []
    orders = []
    honest = SealedSearch._tournament

    def watching(finder, shown, level, own):
        found = honest(finder, shown, level, own)
        order, (grad, hess) = finder._order, (finder.sample.grad, finder.sample.hess)
        if order.parents[0] < 0:
            for of in (sealed, opened, lefts):
                of.append({})
        else:
            pairs = zip(order.parents, order.nodes, order.nodes[len(order.parents) :], strict=False)
            lefts[-1].update({int(orders[-1].nodes[parent]): int(min(pair)) for parent, *pair in pairs})
        for node, shares in zip(order.nodes.tolist(), finder._peers[1].slots, strict=True):
            rows, _ = finder._rows.rows(np.array([node], np.int32), sampled=True)
            sealed[-1][node], opened[-1][node] = shares[..., 0].astype(np.int64), np.zeros((offsets[-1], 3), np.int64)
            each = np.stack([grad[rows], hess[rows], np.ones(len(rows), np.int64)], axis=1)
            for feature, column in enumerate(codes[rows].T):
                np.add.at(opened[-1][node], offsets[feature] + column, each)
        orders.append(order)
        return found

    monkeypatch.setattr(SealedSearch, "_tournament", watching)
    treaty.GBDTClassifier(SEALED, n_jobs=1, n_estimators=5, max_bin=16).fit(tables, y)
    by_class = np.zeros((2, offsets[-1]), np.int64)  # which the attacker does not have either
    for feature, column in enumerate(codes.T):
        np.add.at(by_class, (np.asarray(y), offsets[feature] + column), 1)

    def right(of_trees: list[dict[int, np.ndarray]]) -> float:
        trees = []
        for of_nodes, left in zip(of_trees, lefts, strict=False):
            children = np.full(max(of_nodes) + 1, -1, np.int32)
            children[list(left)] = list(left.values())
            trees.append(OpenedTree(of_nodes, children))
        nothing = RebuiltRows(np.zeros((0, offsets[-1]), np.bool_), np.zeros(0, np.int64))
        found = invert(trees, offsets) if trees else nothing
        tries = [agreement(*rebuild(found, by_class, offsets, seed), codes, np.asarray(y)) for seed in range(3)]
        return float(np.mean([of.mean for of in tries]))

    baseline = right([])
    assert right(sealed) <= baseline + 0.01
    assert right(opened) >= baseline + 0.02  # the attack itself works on these trees, if their sums are open


# ---------------------------------------------------------------- garbage


@pytest.mark.parametrize(
    ("faulty", "kind", "change", "message"),
    [
        ("p1", "OwnerShares", lambda m: replace(m, shares=filled(m.shares, 77)), "whose splits are best"),
        ("p1", "SealedStep", lambda m: replace(m, payload=[]), "expected"),
        ("p1", "SealedStep", lambda m: replace(m, payload=[Array.of(np.zeros(3))]), "expected"),
        ("p1", "SealedColumns", lambda m: replace(m, missing=Array.of(np.zeros(99, np.bool_))), "Columns.missing"),
        ("p1", "SplitSides", lambda m: replace(m, left=filled(m.left, 255)), "enough rows and weight in each child"),
        ("p1", "SplitSides", lambda m: replace(m, left=Array.of(np.zeros((1, 3), np.uint8))), "SplitSides.left"),
        ("p0", "SideChoices", lambda m: replace(m, flips=Array.of(np.zeros(99, np.uint64))), "SideChoices.flips"),
        ("p0", "SideChoices", lambda m: replace(m, message=Array.of(np.zeros((9, 8), np.uint64))), "of an extension"),
        ("p0", "WonCandidates", lambda m: replace(m, numbers=filled(m.numbers, 1 << 60)), "candidates' numbers"),
        ("p0", "WonCandidates", lambda m: replace(m, nodes=filled(m.nodes, 99)), "ascending nodes"),
        ("p0", "SealedSumsRequest", lambda m: replace(m, parents=filled(m.parents, 5)), "nodes of the last level"),
        ("p0", "SealedSumsRequest", lambda m: replace(m, parents=alike(m.parents)), "each once"),
        ("p0", "SealedSumsRequest", lambda m: replace(m, chain="nobody\0p1"), "parties of the job"),
        ("p0", "SealedSumsRequest", lambda m: replace(m, ahead=1 << 40), "SealedSumsRequest"),
        ("p0", "SealedSumsRequest", lambda m: replace(m, ahead=77), "expected"),
        ("p1", "SealedStep", lambda m: replace(m, payload=m.payload[::-1]), "expected"),
        ("p0", "SealedStep", lambda m: replace(m, payload=[*m.payload, *m.payload]), "expected"),
        ("p0", "TournamentTerms", lambda m: replace(m, keys={"nobody": (bytes(32), b"")}), "keys of the job's other"),
    ],
)  # fmt: skip
def test_garbage_ends_the_job_with_one_clear_error(faulty, kind, change, message):
    tables, y = tables_and_labels(parties=2)
    options = {**OPTIONS, **SMALL_JOB, "max_bin": 6, "max_depth": 3, "n_estimators": 3}
    honest = {"p0": secureboost.active, "p1": secureboost.passive}

    def role(party):
        send = party.send
        party.send = lambda to, sent: send(to, change(sent) if type(sent).__name__ == kind else sent)
        return honest[party.name](role_input(party, tables, y, options))

    with pytest.raises((PeerProtocolError, CryptoError), match=message):
        play_training(tables, y, replace={faulty: role}, **options)
