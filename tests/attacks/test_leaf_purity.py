"""Sets of rows are pure where they are seen; hidden sets tell no more than own columns with others' labels."""

from __future__ import annotations

import pytest

from attacks.played import OU, cancer, digits, findings_of
from marks import slow
from treaty import GBDTClassifier, SecureBoost
from treaty.attacks.nodes import set_purity

TREES = {"n_estimators": 5, "n_jobs": 1}
LATTICE = {"encryption": "lattice", "sums": "open", "allow_exact_sums": True}


@pytest.mark.parametrize(("table", "least"), [(cancer, 0.9), slow(digits, 0.75)])
def test_sets_of_rows_are_pure_where_they_are_seen(table, least):
    (found,) = findings_of(set_purity, GBDTClassifier(SecureBoost(**OU), **TREES), *table())
    assert found.party == "shop"
    assert found.score > least
    assert found.finds


@pytest.mark.parametrize(
    ("table", "guard"),
    [
        (cancer, {**OU, "purity_guard": 0.2}),
        slow(cancer, LATTICE),
        slow(cancer, {"sums": "sealed"}),
        slow(digits, LATTICE),
    ],
    ids=["purity_guard", "lattice", "sealed", "lattice-digits"],
)
def test_hidden_sets_tell_no_more_than_own_columns_with_the_labels_of_others(table, guard):
    (found,) = findings_of(set_purity, GBDTClassifier(SecureBoost(**guard), **TREES), *table())
    assert not found.finds
    assert found.baseline >= 0.5
