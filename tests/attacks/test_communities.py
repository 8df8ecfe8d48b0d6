"""ID2Graph finds labels where rows of nodes are seen, and is no better than the own columns where they are not."""

from __future__ import annotations

import numpy as np
import pytest

from attacks.played import OU, cancer, digits, findings_of
from marks import slow
from treaty import GBDTClassifier, SecureBoost
from treaty.attacks.nodes import communities, row_communities

TREES = {"n_estimators": 5, "n_jobs": 1}


@pytest.mark.parametrize("table", [cancer, slow(digits)])
def test_communities_find_labels_in_the_rows_of_nodes(table):
    (found,) = findings_of(row_communities, GBDTClassifier(SecureBoost(**OU), **TREES), *table())
    assert found.party == "shop"
    assert found.baseline < 0.55
    assert found.score > 0.75
    assert found.finds


@pytest.mark.parametrize(
    "guard",
    [
        {**OU, "purity_guard": 0.2},
        slow({"encryption": "lattice", "sums": "open", "allow_exact_sums": True}),
        slow({"sums": "sealed"}),
    ],
    ids=["purity_guard", "lattice", "sealed"],
)
def test_communities_tell_no_more_than_own_columns_where_rows_are_hidden(guard):
    (found,) = findings_of(row_communities, GBDTClassifier(SecureBoost(**guard), **TREES), *cancer())
    assert found.score < 0.6
    assert not found.finds


def test_active_party_and_other_systems_have_no_communities():
    tables, y = cancer()
    assert findings_of(row_communities, GBDTClassifier("federboost-vertical", **TREES), tables, y) == []


def test_communities_are_the_halves_of_which_nodes_are_parts():
    rng = np.random.default_rng(0)
    half = np.arange(200) % 2
    trees = [
        [np.where(rng.random(200) < 0.1, -1, half * 2 + rng.integers(0, 2, 200)).astype(np.int32)] for _ in "12345"
    ]
    found = communities(trees, np.arange(200))
    assert found.shape == (200, 2)
    assert abs(np.corrcoef(found[:, 0], half)[0, 1]) == pytest.approx(1.0)
    assert communities([[]], np.arange(200)).shape == (200, 0)
