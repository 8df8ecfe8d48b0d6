"""FedXGBoost-SMM as published: the pooled trees where the product can be had, consent of everybody, faults."""

from __future__ import annotations

import logging
import time

import numpy as np
import pandas as pd
import pytest

import treaty
from marks import slow
from pace import within
from systems.fedxgboost_smm.playing_published import (
    CONSENT,
    paper_seat,
    play_training,
    tables_and_labels,
    to_tables,
)
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.errors import ConfigError, PeerAborted, PeerError, PeerProtocolError
from treaty.messaging.messages import Array
from treaty.models.checkpoints import Keeper, checkpoint_file
from treaty.systems.fedxgboost_smm import node_products
from treaty.systems.fedxgboost_smm import published as smm
from treaty.systems.fedxgboost_smm.node_products import (
    BestGains,
    CandidateVectors,
    MaskedCandidates,
    MaskedGradients,
    NodeRows,
    NullVectors,
    PaperSetup,
    PaperTree,
    WonNodes,
    widths_of_nodes,
)
from treaty.systems.fedxgboost_smm.options import PAPER_LEAKS, FedXGBoostSMM
from treaty.systems.options import converted
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical.messages import NamedRows, SplitAnswer, SplitRequest
from treaty.systems.vertical.prediction import DecideRequest

ESTIMATORS = {"binary": treaty.GBDTClassifier, "multiclass": treaty.GBDTClassifier, "regression": treaty.GBDTRegressor}
PLAIN = {"n_estimators": 3, "max_depth": 3, "min_child_samples": 1, "max_bin": 16}
CHANGES = {"plain": lambda X: X, "missing": with_gaps, "categories": with_categories}
ROOMY = {**PLAIN, "min_child_samples": 25}
"""Nodes with more rows than any column has candidates, which version 2 needs; all columns have more than rows."""


def fit_both(task, tables, y, version, *, weight=None, eval_set=None, **options):
    options = {**(PLAIN if version == 1 else ROOMY), "n_jobs": 1, **options}
    pooled = ESTIMATORS[task]("pooled", **options).fit(tables, y, sample_weight=weight, eval_set=eval_set)
    federated = ESTIMATORS[task](FedXGBoostSMM(version=version, **CONSENT), **options)
    return federated.fit(tables, y, sample_weight=weight, eval_set=eval_set), pooled


def assert_lossless(federated, pooled, tables):
    assert_same_trees(federated, pooled)
    predict = "predict_proba" if hasattr(pooled, "predict_proba") else "predict"
    np.testing.assert_array_equal(getattr(federated, predict)(tables), getattr(pooled, predict)(tables))


# ---------------------------------------------------------------- equal to the pooled grower


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("parties", "change"),
    [(3, "plain"), (3, "missing"), (3, "categories"), slow(2, "missing"), slow(5, "categories")],
)
def test_trees_and_predictions_equal_the_pooled_growers(version, parties, change):
    X, y = real_table("binary")
    tables = cut(CHANGES[change](X), parties)
    federated, pooled = fit_both("binary", tables, y, version)
    assert {*federated.parts_["p0"].forest.sources} == {*tables}
    assert any(len(federated.parts_[name].splits) for name in tables if name != "p0")
    assert_lossless(federated, pooled, tables)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("task", ["multiclass", "regression"])
def test_other_losses_with_weights_give_the_pooled_trees(version, task):
    X, y = real_table(task)
    weight = np.random.default_rng(5).exponential(size=len(y)) * 3
    weight[:10] = 0.0
    tables = cut(with_categories(with_gaps(X)), 3)
    options = {} if version == 1 else {"max_bin": 3, "max_categories": 3, "min_child_samples": 20}
    assert_lossless(*fit_both(task, tables, y, version, weight=weight, **options), tables)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"subsample": 0.7, "colsample_bytree": 0.5, "random_state": 3},
        {"goss": True, "top_rate": 0.4, "other_rate": 0.5, "random_state": 4},
        {"min_split_loss": 0.5, "reg_lambda": 0.1, "reg_alpha": 0.2, "fractional_bits": 30},
    ],
    ids=lambda o: "-".join(o),
)
def test_growth_options_give_the_pooled_trees(version, options):
    X, y = real_table("binary")
    tables = cut(with_gaps(X), 3)
    assert_lossless(*fit_both("binary", tables, y, version, **options), tables)


@pytest.mark.parametrize("version", [1, 2])
def test_eval_losses_and_early_stopping_equal_the_pooled_ones(version):
    X, y = real_table("binary", rows=300)
    tables, held = cut(X.iloc[:200], 2), cut(X.iloc[200:], 2)
    options = {"n_estimators": 30, "early_stopping_rounds": 2, "learning_rate": 1.0, "active": "p1"}
    federated, pooled = fit_both("binary", tables, y[:200], version, eval_set=[(held, y[200:])], **options)
    assert federated.evals_result_ == pooled.evals_result_
    assert federated.best_iteration_ < 29
    assert_lossless(federated, pooled, held)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["no features", "one column", "constant and missing"])
def test_unusual_tables_give_the_pooled_trees(version, case):
    X, y = real_table("binary")
    X = X.assign(constant=1.0, nothing=np.nan, half=np.where(np.arange(len(X)) % 2, 1.0, np.nan))
    names = list(X.columns)
    tables = {
        "no features": {"bank": X[names[:0]], "shop": X[names[:5]], "telco": X[names[5:8]]},
        "one column": {"bank": X[names[2:4]], "shop": X[names[:1]]},
        "constant and missing": {
            "bank": X[["mean radius", "nothing"]], "shop": X[["constant"]], "telco": X[["nothing"]],
            "post": X[["mean texture", "half", "nothing", "constant"]],
        },
    }[case]  # fmt: skip
    assert_lossless(*fit_both("binary", tables, y, version), tables)


def test_sums_are_within_1e_9_of_the_truth_before_they_are_rounded(monkeypatch):
    seen = []

    def watching(sums):
        seen.append(np.abs(sums - np.rint(sums)).max(initial=0.0) / max(1.0, np.abs(sums).max(initial=0.0)))
        return np.rint(sums).astype(np.int64)

    tables, y = tables_and_labels()
    for version, module in ((1, node_products), (2, smm)):
        monkeypatch.setattr(module, "whole_numbers", watching)
        play_training(tables, y, version=version)
    assert len(seen) > 10
    assert max(seen) < 1e-9


@pytest.mark.parametrize("version", [1, 2])
def test_all_nodes_of_a_level_travel_in_one_message(version):
    tables, y = tables_and_labels()
    played = play_training(tables, y, version=version, max_depth=4, n_estimators=3)
    steps = [entry.step for entry in played.transcripts["p1"].entries]
    asked, answered = ("NodeRows", ("MaskedCandidates", "BestGains")[version - 1])
    assert 3 * 2 <= steps.count(asked) == steps.count(answered) <= 3 * 4
    deepest = max(len(tree.left) for tree in played.results["p0"].forest.trees)
    assert deepest > 2 * 4 + 1, "no level of several nodes: the test would prove nothing"


# ---------------------------------------------------------------- nodes with too few rows


def test_version_1_leaves_alone_only_nodes_of_two_rows(caplog):
    rng = np.random.default_rng(0)
    X, y = pd.DataFrame(rng.normal(size=(40, 3)), columns=list("abc")), rng.integers(0, 2, 40)
    options = {"max_depth": 8, "min_child_weight": 0.0, "reg_lambda": 0.0}
    tables = {"bank": X.iloc[:, :0], "shop": X}
    with caplog.at_level(logging.INFO, "treaty.systems.fedxgboost_smm.published"):
        federated, pooled = fit_both("binary", tables, y, 1, **options)
    assert "have too few rows for null vectors" in caplog.text
    forest = federated.parts_["bank"].forest
    assert min(tree.count[tree.left >= 0].min() for tree in forest.trees) == 3
    assert min(tree.count[tree.left >= 0].min() for tree in pooled.parts_["pooled"].forest.trees) == 2
    first, of_pooled = forest.trees[0], pooled.parts_["pooled"].forest.trees[0]
    assert sorted(first.count[first.left >= 0]) == sorted(
        of_pooled.count[(of_pooled.left >= 0) & (of_pooled.count > 2)]
    )


def test_version_2_shrinks_and_then_makes_a_leaf(caplog):
    X, y = real_table("binary", rows=200)
    tables = to_tables({"p0": X.iloc[:, :0], "p1": X.iloc[:, :8]})
    with caplog.at_level(logging.INFO, "treaty.systems.fedxgboost_smm.published"):
        played = play_training(tables, y.astype(float), version=2, max_depth=4, max_bin=8)
    assert "columns of nodes have too many candidates for their rows, and get no split here" in caplog.text
    entries = [entry for entry in played.transcripts["p1"].entries if entry.step == "CandidateVectors"]
    widths = np.concatenate([
        np.frombuffer(entry.message(CandidateVectors).widths.data, np.int32) for entry in entries
    ])  # fmt: skip
    assert {0, 32} < {*widths.tolist()}
    assert np.any((widths > 0) & (widths < 32))


@pytest.mark.parametrize("unlucky", [1, 8])
def test_null_vectors_that_single_a_row_out_are_drawn_again(monkeypatch, unlucky):
    """By chance no random column of a small node has a row; an active party would refuse what is sent."""
    tables, y = tables_and_labels(2)
    plain = play_training(tables, y, version=2).results["p0"].forest
    calls, single = [], node_products.single_entries

    def at_first(vectors):
        calls.append(len(vectors))
        return np.ones(len(vectors), np.bool_) if len(calls) <= unlucky else single(vectors)

    monkeypatch.setattr(node_products, "single_entries", at_first)
    again = play_training(tables, y, version=2).results["p0"].forest
    # after eight draws a column of a node gets no split
    assert (repr(again.trees) == repr(plain.trees)) or unlucky == 8
    assert calls[:unlucky] == [len(y)] * unlucky


def test_all_rows_on_one_side_is_no_split():
    y = np.repeat([0.0, 1.0], 30)
    frame = pd.DataFrame({"constant": np.ones(60), "one": (np.arange(60) == 0).astype(float)})
    tables = to_tables({"p0": frame.iloc[:, :0], "p1": frame})
    for version in (1, 2):
        played = play_training(tables, y, version=version, min_child_samples=2)
        assert [len(tree.left) for tree in played.results["p0"].forest.trees] == [1, 1]


# ---------------------------------------------------------------- whole fits


@pytest.mark.parametrize("version", [1, 2])
def test_a_fit_saves_loads_and_says_what_was_learned(version, tmp_path):
    X, y = real_table("binary", rows=150)
    tables = cut(with_categories(X), 3)
    model = treaty.GBDTClassifier(FedXGBoostSMM(version=version, **CONSENT), n_estimators=2, max_bin=6).fit(tables, y)
    model.save(tmp_path / "model")
    loaded = treaty.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict_proba(tables), model.predict_proba(tables))
    assert loaded.protocol.version == version
    assert set(model.disclosures_) == {"p0", "p1", "p2"}
    exactly = " ".join(model.disclosures_["p0" if version == 1 else "p1"][:4])
    assert "exactly" in exactly
    assert all(PAPER_LEAKS in facts for facts in model.disclosures_.values())
    sent = model.communication_["p0 -> p1"]["by_type"]
    assert ("NullVectors", "MaskedGradients")[version - 1] in sent
    assert ("NullVectors", "MaskedGradients")[2 - version] not in sent


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tree", [0, 2])
def test_an_interrupted_fit_goes_on_to_the_same_model(monkeypatch, tmp_path, version, tree):
    X, y = real_table("binary", rows=150)
    tables, options = cut(with_gaps(X), 3), {"subsample": 0.8, "random_state": 4, "n_estimators": 4, "max_bin": 4}

    def fit(folder=None):
        model = treaty.GBDTClassifier(
            FedXGBoostSMM(version=version, **CONSENT), min_child_samples=20, n_jobs=1, **options
        )
        return model.fit(tables, y, checkpoint=folder)

    class Interrupted(Exception):
        pass

    whole, search, started = fit(), smm.SplitSearch, []

    def stopping(*args):
        started.append(1)
        if len(started) == tree + 1:
            raise Interrupted
        return search(*args)

    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        patch.setattr(smm, "SplitSearch", stopping)
        with pytest.raises(Interrupted):
            fit(tmp_path)
    assert checkpoint_file(tmp_path, "p1").exists() == (tree > 0)
    resumed = fit(tmp_path)
    assert_same_trees(resumed, whole)
    np.testing.assert_array_equal(resumed.predict_proba(tables), whole.predict_proba(tables))


@pytest.mark.slow
def test_parties_in_processes_give_the_same_trees():
    X, y = real_table("binary", rows=120)
    tables, options = cut(X, 2), {"n_estimators": 1, "max_depth": 2, "n_jobs": 1, "min_child_samples": 5, "max_bin": 8}
    federated = treaty.GBDTClassifier(FedXGBoostSMM(**CONSENT), transport="tls", **options).fit(tables, y)
    assert_lossless(federated, treaty.GBDTClassifier(**options).fit(tables, y), tables)


# ---------------------------------------------------------------- consent


def test_the_estimator_refuses_without_consent_and_says_what_leaks():
    X, y = real_table("binary", rows=60)
    model = treaty.GBDTClassifier(FedXGBoostSMM(mode="paper"))
    with pytest.raises(ConfigError, match=r"AUC 1.000 .* bins .* exactly .*allow_insecure=True of every party"):
        model.fit(cut(X, 2), y)


@pytest.mark.parametrize("refusing", ["p0", "p1", "p2"])
@pytest.mark.parametrize("missing", [{"allow_insecure": False}, {"mode": "safe"}], ids=["consent", "mode"])
def test_every_party_refuses_by_itself(refusing, missing):
    tables, y = tables_and_labels()
    said = {}

    def role(party):
        options = missing if party.name == refusing else {}
        program = smm.active if party.name == "p0" else smm.passive
        return program(paper_seat(party, tables, y, options=options))

    def noting(name, role):
        def run(party):
            try:
                return role(party)
            except Exception as error:
                said[name] = error
                raise

        return run

    roles = {name: noting(name, role) for name in tables}
    with pytest.raises(ConfigError, match="needs allow_insecure=True of every party"):
        play_training(tables, y, replace=roles)
    assert isinstance(said[refusing], ConfigError)
    assert "exactly" in str(said[refusing])
    assert all(isinstance(error, PeerError) for name, error in said.items() if name != refusing)


@pytest.mark.parametrize("kind", [Pooled, SecureBoost])
def test_other_systems_have_no_version(kind):
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no option 'version'"):
        kind(version=1)


def test_a_third_version_is_refused():
    with pytest.raises(ConfigError, match="version"):
        converted({**CONSENT, "version": 3}, FedXGBoostSMM, "FedXGBoostSMM")


@pytest.mark.parametrize("version", [None, 1])
@pytest.mark.parametrize("name", ["bit_columns", "normal_columns"])
def test_random_columns_are_of_version_2_alone(version, name):
    with pytest.raises(ConfigError, match=f"option {name} is about what version 2 mixes candidates with"):
        FedXGBoostSMM(**CONSENT, version=version, **{name: 5}).check(BoostingOptions())
    FedXGBoostSMM(**CONSENT, version=2, **{name: 5}).check(BoostingOptions())


@pytest.mark.parametrize("version", [1, 2])
def test_named_sizes_are_what_is_sent_and_more_vectors_are_refused(version):
    tables, y = tables_and_labels(parties=2)
    played = play_training(tables, y, version=version, null_vectors=6, n_estimators=1)
    sender, peer, kind = ("p0", "p1", NullVectors) if version == 1 else ("p1", "p0", CandidateVectors)
    seen = [e.message(kind) for e in played.transcripts[peer].entries if e.peer == sender and e.step == kind.__name__]
    assert max(np.frombuffer(message.widths.data, np.int32).max() for message in seen) == 6
    message = seen[0]
    rows = [np.arange(200)] * message.widths.shape[0]  # of version 2 for each column
    with pytest.raises(PeerProtocolError, match=r"expected at most 5 vectors of a node \(null_vectors\)"):
        widths_of_nodes(message.widths, rows, 5, sender, kind.__name__)


def test_sums_that_float64_does_not_hold_are_refused_before_anything_is_sent():
    X, y = real_table("binary", rows=100)
    model = treaty.GBDTClassifier(FedXGBoostSMM(**CONSENT), fractional_bits=40)
    with pytest.raises(ConfigError, match="exact up to 46; lower fractional_bits"):
        model.fit(cut(X, 2), y)


# ---------------------------------------------------------------- faults


def hostile(tables, y, version, **bad):
    """Play a party that sends `bad` in place of the message of that name."""

    def run(party):
        honest = party.send
        party.send = lambda to, message: honest(to, bad.get(type(message).__name__, lambda m: m)(message))
        program = smm.active if party.name == "p0" else smm.passive
        return program(paper_seat(party, tables, y, options={"version": version}))

    return run


def changed(array, kind, change):
    values = np.frombuffer(array.data, kind).reshape(array.shape).copy()
    return Array.of(change(values))


def unit_vectors(message):
    """Null vectors of the first node, the first of them a single entry: rows left out would be shown."""
    width = int(np.frombuffer(message.widths.data, np.int32)[0])
    vectors = np.frombuffer(message.vectors.data).copy()
    first = vectors[: 200 * width].reshape(200, width)
    first[:, 0], first[7] = 0.0, 0.0
    first[7, 0] = 1.0
    first[:, 1:] = np.linalg.qr(first[:, 1:])[0]
    return CandidateVectors(message.widths, Array.of(vectors))


FROM_PASSIVE = [
    (1, "BinLayout", lambda m: MaskedCandidates(m.offsets, m.offsets), "MaskedCandidates"),
    (1, "MaskedCandidates", lambda m: MaskedCandidates(m.counts, Array.of(np.zeros(3))), "masked"),
    (1, "MaskedCandidates", lambda m: MaskedCandidates(m.counts, changed(m.masked, "f8", lambda v: v + 1e-3)), "whole"),
    (1, "MaskedCandidates", lambda m: MaskedCandidates(m.counts, changed(m.masked, "f8", lambda v: v * np.nan)), "fin"),
    (1, "MaskedCandidates", lambda m: MaskedCandidates(changed(m.counts, "i4", lambda c: c + 1), m.masked), "one slot"),
    (1, "MaskedCandidates", lambda m: MaskedCandidates(changed(m.counts, "i4", lambda c: -c), m.masked), "one slot"),
    (1, "SplitAnswer", lambda m: SplitAnswer(m.records, Array.of(np.zeros(1, np.uint8))), "left"),
    (2, "CandidateVectors", lambda m: CandidateVectors(m.widths, changed(m.vectors, "f8", lambda v: 2 * v)), "orthon"),
    (2, "CandidateVectors", lambda m: CandidateVectors(changed(m.widths, "i4", lambda w: w * 99), m.vectors), "fewer"),
    (2, "CandidateVectors", lambda m: CandidateVectors(changed(m.widths, "i4", lambda w: -w), m.vectors), "fewer"),
    (2, "CandidateVectors", unit_vectors, r"no row of U U\^T with a single non-zero"),
    (2, "BestGains", lambda m: BestGains(changed(m.gains, "f8", lambda g: g - 1e9)), "finite gains of 0 or more"),
    (2, "BestGains", lambda m: BestGains(changed(m.gains, "f8", lambda g: g * np.inf)), "finite gains of 0 or more"),
    (2, "BestGains", lambda m: BestGains(changed(m.gains, "f8", lambda g: g + 5.0)), "gain it sent"),
    (2, "SplitAnswer", lambda m: SplitAnswer(m.records, changed(m.left, "u1", lambda b: b[::-1])), "gain it sent"),
]


@pytest.mark.parametrize(("version", "name", "change", "words"), FROM_PASSIVE, ids=lambda v: v if v in (1, 2) else "")
def test_malformed_answers_end_the_job_and_name_the_sender(version, name, change, words):
    tables, y = tables_and_labels(rows=200)
    role = hostile(tables, y, version, **{name: change})
    started = time.monotonic()
    with pytest.raises(PeerProtocolError, match=words) as caught:
        play_training(tables, y, version=version, replace={"p1": role})
    assert caught.value.peer == "p1"
    assert time.monotonic() - started < within(15)


def all_of(node):
    return lambda rows: np.full_like(rows, node)


FROM_ACTIVE = [
    (1, "PaperSetup", lambda m: PaperSetup(m.model_id, m.resumed, m.records, m.rounds, 0.0, m.hess_unit), "grad_unit"),
    (1, "PaperTree", lambda m: PaperTree(Array.of(np.array([99], np.int32))), "ascending numbers below"),
    (1, "NamedRows", lambda m: NamedRows(changed(m.nodes, "u1", all_of(5))), "below 1"),
    (1, "NamedRows", lambda m: NamedRows(changed(m.nodes, "u1", all_of(255))), "rows in"),
    (1, "NullVectors", lambda m: NullVectors(Array.of(np.int32(3)), m.vectors), "NullVectors.widths"),
    (1, "NullVectors", lambda m: NullVectors(m.widths, changed(m.vectors, "f8", np.ones_like)), "ortho"),
    (1, "NullVectors", lambda m: NullVectors(m.widths, Array.of(np.ones(7))), "NullVectors.vectors"),
    (1, "SplitRequest", lambda m: SplitRequest(Array.of(np.array([99], np.int32)), m.left_bins), "colu"),
    (1, "TreeEnd", lambda m: WonNodes(Array.of(np.zeros(1, np.int32))), "WonNodes"),
    (2, "NodeRows", lambda m: NodeRows(3), "nodes of this level"),
    (2, "NodeRows", lambda m: NodeRows(-1), "nodes of this level"),
    (2, "NamedRows", lambda m: NamedRows(Array.of(np.zeros(7, np.uint8))), "NamedRows.nodes"),
    (2, "MaskedGradients", lambda m: MaskedGradients(m.totals, changed(m.masked, "f8", lambda v: v + 0.01)), "whole"),
    (2, "MaskedGradients", lambda m: MaskedGradients(Array.of(np.zeros(2, np.int64)), m.masked), "totals"),
    (2, "WonNodes", lambda m: WonNodes(changed(m.nodes, "i4", lambda n: n + 40)), "nodes of the level"),
    (2, "Finish", lambda m: DecideRequest(5, Array.of(np.zeros(1, np.int32))), "row sets"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name", "change", "words"), FROM_ACTIVE, ids=lambda v: v if v in (1, 2) else "")
def test_malformed_requests_end_the_job_at_the_passive_party(version, name, change, words):
    tables, y = tables_and_labels(rows=200)
    role = hostile(tables, y, version, **{name: change})
    with pytest.raises(PeerProtocolError, match=words) as caught:
        play_training(tables, y, version=version, replace={"p0": role})
    assert caught.value.peer == "p0"


@pytest.mark.parametrize("version", [1, 2])
def test_a_passive_party_that_dies_ends_the_training(version):
    tables, y = tables_and_labels()
    seen = {}

    def dying(party):
        def stop(done, part):
            if done == 1:
                raise KeyboardInterrupt

        return smm.passive(paper_seat(party, tables, y, options={"version": version}, progress=stop))

    def watched(party):
        try:
            return smm.passive(paper_seat(party, tables, y, options={"version": version}))
        except PeerAborted as error:
            seen["p2"] = error
            raise

    with pytest.raises(KeyboardInterrupt):
        play_training(tables, y, version=version, replace={"p1": dying, "p2": watched})
    assert "p2" in seen
