"""Under sealed sums, independent trees of a round grow together: the same trees in the messages of one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

import treaty
from marks import slow
from systems.secureboost.test_lossless import assert_lossless
from systems.secureboost.test_sealed import HALVES, SEALED, SMALL, sealed_both
from systems.vertical.playing import OPTIONS, role_input, tables_and_labels
from systems.vertical.playing import play_training as play
from tables import cut, real_table, with_categories, with_gaps
from treaty.errors import TreatyError
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical import cipher_choice, messages, sealed_active
from treaty.trees.boosting import BoostingRound


def sent(model: treaty.GBDTClassifier) -> int:
    """Return how many messages p0 sent p1."""
    return model.communication_["p0 -> p1"]["messages"]


def many_classes(count: int) -> np.ndarray:
    X, y = real_table("binary")
    return (y + 2 * (pd.qcut(X.iloc[:, 0], count // 2, labels=False, duplicates="drop").to_numpy())).astype(int)


def test_three_classes_take_the_messages_of_one():
    X, y = real_table("multiclass")
    tables, options = cut(with_gaps(X), 2), {"n_estimators": 3, "max_depth": 3, "min_child_samples": 5}
    three, pooled = sealed_both("multiclass", tables, y, **options)
    assert_lossless(three, pooled, tables)
    assert len(three.parts_["p0"].forest.trees) == 9
    one, _ = sealed_both("binary", tables, (y == 0).astype(int), **options)
    # one class's tree may end a level before those of others
    assert sent(one) <= sent(three) <= 1.3 * sent(one)


@pytest.mark.parametrize(
    ("classes", "parties", "system", "options"),
    [
        (2, 2, SEALED, {"num_parallel_tree": 3, "subsample": 0.5, "n_estimators": 2}),
        (6, 3, SEALED, {"max_depth": 4, "min_child_samples": 2, "n_estimators": 2, "active": "p1"}),
        (4, 2, SecureBoost(sums="sealed", reveal="column"), {"goss": True, "n_estimators": 2}),
        slow(4, 2, SEALED, {"colsample_bytree": 0.5, "n_estimators": 3}),
        slow(4, 2, SEALED, {"interaction_constraints": [["p0.a"]], "n_estimators": 2}),
        slow(4, 3, FedXGBoostSMM(reveal="argmax"), {"n_estimators": 2}),
        slow(20, 5, SEALED, {"n_estimators": 2, "max_depth": 2}),
    ],
)
def test_trees_that_grow_together_are_those_of_the_pooled_grower(classes, parties, system, options):
    X, _ = real_table("binary")
    tables, y = cut(with_categories(with_gaps(X)), parties), many_classes(classes)
    if "interaction_constraints" in options:
        named = [f"p0.{column}" for column in tables["p0"].columns]
        options = {**options, "interaction_constraints": [named]}
    given = {**HALVES, "random_state": 3, **options}
    federated, pooled = sealed_both("multiclass" if classes > 2 else "binary", tables, y, system=system, **given)
    assert_lossless(federated, pooled, tables)


def test_as_many_trees_grow_together_as_memory_allows(monkeypatch):
    X, y = real_table("multiclass")
    tables, options, begun = cut(X, 2), {"n_estimators": 2, "max_depth": 2}, []
    begin = sealed_active.SealedSearch._begin

    def counted(search):
        begun.append(np.atleast_2d(search.sample.grad).shape[0])
        begin(search)

    monkeypatch.setattr(sealed_active.SealedSearch, "_begin", counted)
    monkeypatch.setattr(cipher_choice, "_ROWS_TOGETHER", 2 * len(X))
    model, pooled = sealed_both("multiclass", tables, y, **options)
    assert_lossless(model, pooled, tables)
    assert begun == [2, 1, 2, 1]
    begun.clear()
    monkeypatch.setattr(cipher_choice, "_SUMS_TOGETHER", 1)
    model, pooled = sealed_both("multiclass", tables, y, **options)
    assert_lossless(model, pooled, tables)
    assert begun == [1] * 6


def assert_refuses_trees(tables, y, trees, options, message):
    """Play an active party that states so many trees of a round, and expect the error."""

    def role(party):
        send = party.send

        def lying(to, sent):
            send(to, replace(sent, trees=trees) if isinstance(sent, messages.TreeStart) else sent)

        party.send = lying
        return secureboost.active(role_input(party, tables, y, options))

    with pytest.raises(TreatyError, match=message):
        play(tables, y, replace={"p0": role}, **options)


@pytest.mark.parametrize(
    ("sums", "trees", "message"),
    # a round of two classes has one tree, though the job has two
    [("sealed", 2, "at most 1 trees together"), ("sealed", 17, "trees"), ("open", 2, "at most 1 trees together")],
)
def test_more_trees_together_than_a_round_has_are_refused(sums, trees, message):
    tables, y = tables_and_labels(parties=2)
    options = {
        **OPTIONS, **SMALL, "insecure_test_key_bits": None, "allow_insecure": False, "sums": sums,
        "encryption": "lattice", "allow_exact_sums": True,
    }  # fmt: skip

    assert_refuses_trees(tables, y, trees, options, message)


def test_fewer_roots_than_trees_are_refused(monkeypatch):
    tables, y = tables_and_labels(parties=2)
    options = {
        **OPTIONS, **SMALL, "insecure_test_key_bits": None, "allow_insecure": False, "sums": "sealed",
        "num_parallel_tree": 2,
    }  # fmt: skip
    batches = BoostingRound.batches
    monkeypatch.setattr(BoostingRound, "batches", lambda a_round, most: batches(a_round, 1))

    def role(party):
        send = party.send

        def lying(to, sent):
            if isinstance(sent, messages.TreeStart):
                send(to, replace(sent, trees=2))
                party.round += 1
            else:
                send(to, sent)

        party.send = lying
        return secureboost.active(role_input(party, tables, y, options))

    with pytest.raises(TreatyError, match="the roots of all trees"):
        play(tables, y, replace={"p0": role}, **options)
