"""Constraints under sealed sums: the pooled trees, bit for bit, and nothing shown of groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import treaty
from marks import slow
from systems.secureboost.test_lossless import assert_lossless
from systems.secureboost.test_sealed import HALVES, SEALED, SMALL_JOB, sealed_both, small_job, uniform
from systems.test_constraints import NAMES, paths
from systems.vertical.playing import play_training, role_input, tables_and_labels
from tables import cut, real_table, with_categories, with_gaps
from treaty.crypto.transfer import sealed_sums
from treaty.crypto.transfer.comparison import conjunctions, negatives
from treaty.errors import ConfigError, PeerProtocolError, TreatyError
from treaty.messaging.messages import Array
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical import messages, sealed, sealed_candidates
from treaty.systems.vertical.sealed import MovingKey
from treaty.systems.vertical.sealed_candidates import Candidates, GroupsLeft

DEEP = {"max_depth": 3, "min_child_samples": 3, "n_estimators": 2, "max_bin": 4}


def names_of(tables):
    return [f"{party}.{name}" for party, table in tables.items() for name in table.columns]


def groups_of(names):
    """Groups that overlap, and columns of none."""
    return [[names[0], names[2]], [names[2], names[3], names[4]]]


@pytest.mark.parametrize(
    ("parties", "system", "options"),
    [
        (2, SEALED, {"max_depth": 4}),
        (4, SEALED, {"active": "p1", "colsample_bytree": 0.7, "random_state": 2}),
        slow(5, SEALED, {"active": "p4"}),
        slow(3, SecureBoost(sums="sealed", reveal="column"), {}),
        slow(3, FedXGBoostSMM(reveal="argmax"), {"active": "p2"}),
    ],
)
def test_groups_are_kept_as_on_the_pooled_table(parties, system, options):
    X, y = real_table("binary")
    tables = cut(with_gaps(X[NAMES]), parties)
    given = {**DEEP, **options, "interaction_constraints": groups_of(names_of(tables))}
    federated, pooled = sealed_both("binary", tables, y, system=system, **given)
    assert_lossless(federated, pooled, tables)
    kept = [{0, 2}, {2, 3, 4}, {1}, {5}]
    assert all(any(path <= group for group in kept) for path in paths(federated))
    free, _ = sealed_both("binary", tables, y, system=system, **{**given, "interaction_constraints": None})
    assert not all(any(path <= group for group in kept) for path in paths(free))


@pytest.mark.parametrize("at_a_time", [1 << 12, 1])
def test_groups_of_unusual_columns_are_kept(monkeypatch, at_a_time):
    """An active party without columns, one with one column, categories by halves, constant and missing columns.

    Also where the nodes of a level are searched one after another.
    """
    monkeypatch.setattr(sealed, "_AT_A_TIME", at_a_time)
    X, y = real_table("binary")
    X = with_categories(with_gaps(X.iloc[:, :6]))
    tables = {"p0": X.iloc[:, :0], "p1": X.iloc[:, :1], "p2": X.iloc[:, 1:].assign(same=1.0, none=np.nan)}
    names = names_of(tables)
    given = {**DEEP, **HALVES, "interaction_constraints": [[*names[:2], names[-1]], [names[1], *names[4:]]]}
    assert_lossless(*sealed_both("binary", tables, y, **given), tables)


def test_equal_splits_of_own_columns_in_other_groups_are_the_lower_columns():
    X, y = real_table("binary")
    X = pd.concat([X.iloc[:, :3], X.iloc[:, [2, 0]].add_suffix(" again"), X.iloc[:, :2].add_suffix(" too")], axis=1)
    tables = {"p0": X.iloc[:, 5:], "p1": X.iloc[:, :5]}
    names = names_of(tables)
    for active in tables:
        groups = [[names[2], names[6], names[0]], [names[4], names[5], names[0]], [names[3], names[1]]]
        given = {**DEEP, "active": active, "interaction_constraints": groups}
        assert_lossless(*sealed_both("binary", tables, y, **given), tables)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_groups_give_the_pooled_trees(data: Any):
    task, tables, y, weight, options = small_job(data)
    names = names_of(tables)
    some = st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)
    options |= {"interaction_constraints": data.draw(st.lists(some, min_size=1, max_size=4)), "max_depth": 3}
    federated, pooled = sealed_both(task, tables, y, weight, **options)
    if any(len(tree.left) > 1 for tree in pooled.parts_["pooled"].forest.trees):
        assert_lossless(federated, pooled, tables)


STUMPS = {"max_depth": 1, "n_estimators": 12, "max_bin": 6, "min_child_samples": 3}


@pytest.mark.parametrize(
    ("parties", "options"),
    [
        (2, {}),
        (3, {"active": "p2", "learning_rate": 1.0}),
        slow(5, {"active": "p4", "learning_rate": 1.0}),
    ],
)
def test_trees_of_depth_one_keep_to_directions_as_on_the_pooled_table(parties, options):
    X, y = real_table("binary")
    tables = cut(with_gaps(X[NAMES]), parties)
    names = names_of(tables)
    given = {**STUMPS, **options, "monotone_constraints": {names[0]: -1, names[1]: 1, names[4]: 1, names[5]: -1}}
    federated, pooled = sealed_both("binary", tables, y, **given)
    assert_lossless(federated, pooled, tables)
    free, _ = sealed_both("binary", tables, y, **{**given, "monotone_constraints": None})
    assert not np.array_equal(free.predict_proba(tables), federated.predict_proba(tables))


def test_a_missing_value_has_no_order_under_seal():
    """Present values left and missing ones right is a split in either direction."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 4, 200).astype(float)
    y = np.where(values < 1, 5.0, -values) + rng.normal(size=200)
    tables = {
        "p0": pd.DataFrame({"a": rng.normal(size=200)}),
        "p1": pd.DataFrame({"b": np.where(values < 1, np.nan, values)}),
    }
    for direction in (1, -1):
        given = {**STUMPS, "n_estimators": 2, "monotone_constraints": {"p1.b": direction}}
        federated, pooled = sealed_both("regression", tables, y, **given)
        assert_lossless(federated, pooled, tables)


@pytest.mark.parametrize("what", ["has", "falling", "a sign"])
def test_a_fault_in_a_direction_shows_in_the_trees(monkeypatch, what):
    X, y = real_table("binary")
    tables = cut(X[NAMES], 2)
    names, honest = names_of(tables), Candidates.directions.fget

    def wrong(candidates):
        has, falling = honest(candidates)
        return np.array([has * (what != "has"), falling * (what != "falling")], np.uint8)

    def flipped(transfers, z, bits, role):
        found = yield from negatives(transfers, z, bits, role)
        return found ^ np.uint8((1 - role) * (40 < bits < 80))  # of the signs of V

    if what == "a sign":
        monkeypatch.setattr(sealed_sums, "negatives", flipped)
    else:
        monkeypatch.setattr(Candidates, "directions", property(wrong))
    given = {**STUMPS, "learning_rate": 1.0, "monotone_constraints": {names[3]: 1, names[4]: -1, names[5]: 1}}
    with pytest.raises((AssertionError, TreatyError)):
        assert_lossless(*sealed_both("binary", tables, y, **given), tables)


FAULTS = {
    "bits of a party": lambda left: setattr(left, "within", np.ones_like(left.within)),
    "groups of columns": lambda left: setattr(left, "of_columns", np.ones_like(left.of_columns)),
    "used above": lambda left: setattr(left, "_only", np.zeros_like(left._only)),
    "a mask": None,
    "a conjunction": None,
}


@pytest.mark.parametrize("what", [slow(what) if "a " not in what else what for what in FAULTS])
def test_a_fault_in_what_a_party_gives_shows_in_the_trees(monkeypatch, what):
    X, y = real_table("binary")
    tables = cut(X[NAMES], 3)
    given = {**DEEP, "n_estimators": 4, "interaction_constraints": groups_of(names_of(tables))}
    honest, masks = GroupsLeft.descend, MovingKey.bit_masks

    def descend(left, parents):
        honest(left, parents)
        FAULTS[what](left)

    def flipped(*given):
        (bits,) = yield from conjunctions(*given)
        return [bits ^ np.uint8(1 - given[-1])]

    if what == "a mask":
        monkeypatch.setattr(MovingKey, "bit_masks", lambda key, *given: (masks(key, *given)[0], masks(key, *given)[1]))
    elif what == "a conjunction":
        monkeypatch.setattr(sealed_candidates, "conjunctions", flipped)
    else:
        monkeypatch.setattr(GroupsLeft, "descend", descend)
    with pytest.raises((AssertionError, TreatyError)):
        assert_lossless(*sealed_both("binary", tables, y, **given), tables)


def test_groups_pass_between_parties_under_masks_alone():
    tables, y = tables_and_labels(parties=3)
    first = {name: table.schema.names[0] for name, table in tables.items()}
    groups = [[f"p1.{first['p1']}", f"p2.{first['p2']}"], [f"p0.{first['p0']}", f"p2.{first['p2']}"]] * 8
    given = {**SMALL_JOB, "max_depth": 3, "n_estimators": 4, "interaction_constraints": groups}
    played = play_training(tables, y, **given)
    entries = [entry for entry in played.transcripts["p0"].entries if entry.direction == "received"]
    moved = [
        np.frombuffer(e.message(messages.MovedGroups).bits.data, np.uint8) for e in entries if e.step == "MovedGroups"
    ]
    assert sum(map(len, moved)) > 250
    assert uniform(np.concatenate(moved), 2) > 1e-6
    for entry in entries:
        if entry.step == "ColumnConstraints":
            stated = entry.message(messages.ColumnConstraints)
            assert np.frombuffer(stated.groups.data, np.bool_).all()
            assert not np.frombuffer(stated.directions.data, np.int8).any()


@pytest.mark.parametrize(
    ("faulty", "kind", "change", "message"),
    [
        ("p1", "MovedGroups", lambda m: replace(m, bits=Array.of(np.zeros((1, 9, 9), np.uint8))), "MovedGroups.bits"),
        ("p0", "SealedSumsRequest", lambda m: replace(m, own_before=m.own_before + 1), "expected"),
        ("p0", "SealedSumsRequest", lambda m: replace(m, own_after=1 << 20), "own_after"),
        ("p0", "SealedSumsRequest", lambda m: replace(m, chain="p2\0p2\0p1"), "parties of the job"),
    ],
)
def test_garbage_ends_the_job_with_one_clear_error(faulty, kind, change, message):
    tables, y = tables_and_labels(parties=3)
    first = {name: f"{name}.{table.schema.names[0]}" for name, table in tables.items()}
    options = {**SMALL_JOB, "max_bin": 6, "interaction_constraints": [[*first.values()]]}
    honest = {"p0": secureboost.active, "p1": secureboost.passive}

    def role(party):
        send = party.send
        party.send = lambda to, sent: send(to, change(sent) if type(sent).__name__ == kind else sent)
        return honest[party.name](role_input(party, tables, y, options))

    with pytest.raises((PeerProtocolError, TreatyError), match=message):
        play_training(tables, y, replace={faulty: role}, **options)


def test_a_guard_of_pure_nodes_and_groups_are_refused_together():
    X, y = real_table("binary")
    tables = cut(X[NAMES], 2)
    options = {"interaction_constraints": [names_of(tables)[:2]], "n_estimators": 1}
    with pytest.raises(ConfigError, match="cannot be sealed with purity_guard and interaction_constraints"):
        treaty.GBDTClassifier(SecureBoost(sums="sealed", purity_guard=0.2), **options).fit(tables, y)
    opened = treaty.GBDTClassifier(SecureBoost(purity_guard=0.2, allow_exact_sums=True), **options).fit(tables, y)
    assert "SealedStep" not in opened.communication_["p1 -> p0"]["by_type"]
