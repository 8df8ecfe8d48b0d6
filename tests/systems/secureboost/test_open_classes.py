"""Under open lattice sums, too, independent trees of a round grow together: the same trees in the messages of one."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

import treaty
from marks import slow
from systems.secureboost.test_lossless import assert_lossless, fit_both, lattice_both
from systems.secureboost.test_sealed import StopAfter, Stopped
from systems.secureboost.test_sealed_classes import assert_refuses_trees, many_classes, sent
from systems.vertical.playing import OPTIONS, role_input, tables_and_labels
from systems.vertical.playing import play_training as play
from tables import cut, real_table, with_categories, with_gaps
from treaty.crypto.sums import lattice_sums
from treaty.errors import PeerProtocolError, TreatyError
from treaty.messaging.messages import pack
from treaty.systems.fedxgboost_smm import fedxgboost_smm
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.observers import Recording, observing
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical import cipher_choice, messages, setup
from treaty.systems.vertical.column_owner import ColumnOwner
from treaty.systems.vertical.training import TreeLimits
from treaty.trees.splits import SplitRules

OPEN = SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True)
SMM = FedXGBoostSMM(backend="lattice", allow_exact_sums=True)


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """Return a list of how many trees grew together each time."""
    found: list[int] = []
    for module in (secureboost, fedxgboost_smm):
        join = module.joined_sample
        monkeypatch.setattr(module, "joined_sample", lambda of, join=join: [found.append(len(of)), join(of)][1])
    return found


def of_two_nodes(monkeypatch) -> None:
    """Have all vectors be about two nodes, as small tables' are not by themselves."""
    choosing = cipher_choice.best_nodes
    monkeypatch.setattr(cipher_choice, "best_nodes", lambda *of: choosing(*of[:4], [2]))


def labels(classes: int) -> np.ndarray:
    return np.minimum(many_classes(classes + classes % 2), classes - 1)


def test_three_classes_take_the_messages_of_one():
    X, y = real_table("multiclass")
    tables, options = cut(with_gaps(X), 2), {"n_estimators": 3, "max_depth": 3, "min_child_samples": 5}
    three, pooled = lattice_both("multiclass", tables, y, **options)
    assert_lossless(three, pooled, tables)
    assert len(three.parts_["p0"].forest.trees) == 9
    one, _ = lattice_both("binary", tables, (y == 0).astype(int), **options)
    # one class's tree may end a level before those of others
    assert sent(one) <= sent(three) <= 1.3 * sent(one)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("classes", "parties", "options"),
    [
        (3, 2, {"max_depth": 4, "min_child_samples": 2}),
        (5, 3, {"subsample": 0.6, "active": "p1"}),
        (2, 2, {"num_parallel_tree": 3, "goss": True, "max_depth": 5, "min_child_samples": 2}),
        slow(3, 5, {"num_parallel_tree": 2, "subsample": 0.5}),
        slow(5, 5, {"max_depth": 6, "min_child_samples": 1}),
    ],
)
def test_trees_that_grow_together_are_those_of_the_pooled_grower(
    monkeypatch, batches, nodes, classes, parties, options
):
    if nodes == 2:
        of_two_nodes(monkeypatch)
    X, _ = real_table("binary")
    tables, task = cut(with_categories(with_gaps(X)), parties), "binary" if classes == 2 else "multiclass"
    given = {"n_estimators": 2, "random_state": 3, **options}
    federated, pooled = lattice_both(task, tables, labels(classes), **given)
    assert_lossless(federated, pooled, tables)
    assert batches == [(1 if classes == 2 else classes) * options.get("num_parallel_tree", 1)] * 2


@pytest.mark.parametrize(
    ("system", "options", "together"),
    [
        (SMM, {}, 4),
        (OPEN, {"colsample_bytree": 0.5}, 1),
        (OPEN, {"max_leaves": 5}, 1),
        (OPEN, {"interaction_constraints": [["p0.mean radius", "p1.mean area"]]}, 1),
        (SecureBoost(encryption="lattice", reveal="node", sums="open", allow_exact_sums=True), {}, 1),
        (SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True, purity_guard=0.4), {}, 1),
        slow(SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True), {}, 1),
        slow(FedXGBoostSMM(backend="dealer", allow_exact_sums=True), {}, 1),
        slow(OPEN, {"multi_strategy": "multi_output_tree", "num_parallel_tree": 2, "subsample": 0.7}, 1),
    ],
    ids=str,
)
def test_systems_and_options_under_which_trees_grow_together(batches, system, options, together):
    X, _ = real_table("binary")
    tables = cut(with_gaps(X), 2)
    given = {"n_estimators": 2, "max_depth": 3, "random_state": 3, **options}
    federated, pooled = fit_both("multiclass", tables, many_classes(4), cipher=system, **given)
    if getattr(system, "purity_guard", None) is None:
        assert_lossless(federated, pooled, tables)
    assert {*batches} == {together}


def test_levels_that_take_several_queries(monkeypatch, batches):
    of_two_nodes(monkeypatch)
    # two vectors at a time, so that the roots of three trees take two queries
    monkeypatch.setattr(lattice_sums, "_MOST_NODES", 4)
    X, y = real_table("multiclass")
    tables = cut(with_gaps(X), 2)
    federated, pooled = lattice_both("multiclass", tables, y, n_estimators=2, max_depth=5, min_child_samples=1)
    assert_lossless(federated, pooled, tables)
    assert batches == [3, 3]


def test_a_training_that_was_stopped_resumes_with_trees_that_grow_together(tmp_path, batches):
    X, y = real_table("multiclass")
    tables, options = cut(X, 3), {"n_estimators": 4, "max_depth": 3, "min_child_samples": 5, "n_jobs": 1, "max_bin": 6}
    whole = treaty.GBDTClassifier("pooled", **options).fit(tables, y)
    with pytest.raises(Stopped):
        treaty.GBDTClassifier(OPEN, callbacks=[StopAfter(2)], **options).fit(tables, y, checkpoint=tmp_path)
    begun = len(batches)
    rounds = StopAfter(99)
    resumed = treaty.GBDTClassifier(OPEN, callbacks=[rounds], **options).fit(tables, y, checkpoint=tmp_path)
    assert_lossless(resumed, whole, tables)
    assert {*batches} == {3}
    assert len(batches) - begun == len(rounds.seen) < 4


@pytest.mark.parametrize("nodes", [1, 2])
def test_opened_sums_are_recorded_with_the_gradients_of_their_tree(monkeypatch, nodes):
    if nodes == 2:
        of_two_nodes(monkeypatch)
    X, y = real_table("multiclass")
    recording = Recording()
    with observing(lambda inputs: [recording] if inputs.party.name == "p0" else []):
        treaty.GBDTClassifier(OPEN, n_estimators=2, max_depth=3, n_jobs=1).fit(cut(with_gaps(X), 2), y)
    nodes_seen, offsets = recording.nodes["p1"], recording.offsets["p1"]
    assert len({node.grad.tobytes() for node in nodes_seen}) == 6
    for node in nodes_seen:
        of_node = [node.grad[node.rows].sum(), node.hess[node.rows].sum(), len(node.rows)]
        for first, last in pairwise(offsets):
            assert node.sums[first:last].sum(axis=0).tolist() == of_node


# ---------------------------------------------------------------- more than the options allow


@pytest.mark.parametrize(
    ("options", "trees", "most"),
    [
        ({"num_parallel_tree": 2}, 3, 2),
        ({"num_parallel_tree": 2, "reveal": "node"}, 2, 1),
        ({"num_parallel_tree": 2, "max_leaves": 4, "max_depth": None}, 2, 1),
    ],
)
def test_more_trees_together_than_the_options_allow_are_refused(options, trees, most):
    tables, y = tables_and_labels(parties=2)
    given = {
        **OPTIONS, "insecure_test_key_bits": None, "allow_insecure": False, "sums": "open", "encryption": "lattice",
        "allow_exact_sums": True, **options,
    }  # fmt: skip

    assert_refuses_trees(tables, y, trees, given, f"at most {most} trees together")


def test_trees_that_grow_together_are_refused_where_a_record_is_kept(monkeypatch):
    tables, y = tables_and_labels(parties=2)
    given = {
        **OPTIONS, "insecure_test_key_bits": None, "allow_insecure": False, "sums": "open", "encryption": "lattice",
        "allow_exact_sums": True, "num_parallel_tree": 2,
    }  # fmt: skip

    def role(party):
        send = party.send
        party.send = lambda to, sent: send(
            to, replace(sent, audit=bytes(16)) if isinstance(sent, setup.Setup) else sent
        )
        return secureboost.active(role_input(party, tables, y, given))

    with pytest.raises(TreatyError, match="at most 1 trees together"):
        play(tables, y, replace={"p0": role}, **given)


def test_a_level_has_a_spare_node_for_each_tree_where_vectors_are_about_two():
    worked = []

    def add(query):
        worked.append(len(query[0]))
        return 2 * len(query[0])

    limits = TreeLimits("bank", SplitRules(grad_unit=1.0, hess_unit=1.0, max_depth=3))
    limits.start(np.arange(2, dtype=np.int32), trees=3, spare=1)
    owner = ColumnOwner.__new__(ColumnOwner)  # with what it answers by alone
    owner._server, owner._limits, owner._active = SimpleNamespace(spare=1, add=add, answer=list), limits, "bank"

    def ask(vectors, last):
        return owner.sums(messages.SumsRequest(pack([np.zeros((vectors, 1), np.uint32)]), last))

    ask(2, False)  # the roots
    with pytest.raises(PeerProtocolError, match="1 to 3 nodes of this level"):
        ask(2, True)
    ask(1, True)
    ask(4, True)
    assert worked == [2, 1, 4]
