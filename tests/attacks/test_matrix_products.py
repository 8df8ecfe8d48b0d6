"""Published matrix products show labels and bins; the products of safe mode show neither."""

from __future__ import annotations

import pytest

from attacks.played import cancer, findings_of
from marks import slow
from treaty import FedXGBoostSMM, GBDTClassifier
from treaty.attacks.hidden_values import matrix_products

TREES = {"n_estimators": 2, "n_jobs": 1}


def found_by(options, **trees):
    model = GBDTClassifier(FedXGBoostSMM(**options), **{**TREES, **trees})
    return {finding.target: finding for finding in findings_of(matrix_products, model, *cancer())}


def published(version, **options):
    return {"mode": "paper", "allow_insecure": True, "version": version, **options}


@pytest.mark.parametrize(
    ("options", "trees"),
    [(published(2), {}), slow(published(2, null_vectors=300), {}), slow(published(2), {"subsample": 0.7})],
)
def test_gradients_that_come_back_show_a_passive_party_the_labels(options, trees):
    labels = found_by(options, **trees)["labels"]
    assert labels.party == "shop"
    assert labels.score > 0.9
    assert labels.finds


@pytest.mark.parametrize(
    ("options", "trees"), [(published(1), {}), slow(published(1, null_vectors=400), {"n_estimators": 5})]
)
def test_candidates_that_come_back_show_the_active_party_all_bins(options, trees):
    bins = found_by(options, **trees)["bins of shop"]
    assert bins.party == "bank"
    assert bins.score > 0.99
    assert bins.baseline < 0.1
    assert bins.finds


@pytest.mark.slow
def test_null_vectors_show_the_labels_where_they_leave_little_over():
    assert found_by(published(1, null_vectors=555))["labels"].score > 0.99
    assert not found_by(published(1))["labels"].finds


@pytest.mark.parametrize(
    "options",
    [{"backend": "dealer", "allow_exact_sums": True}, slow({"allow_exact_sums": True}), slow({"reveal": "argmax"})],
    ids=["dealer", "lattice", "argmax"],
)
def test_products_of_safe_mode_show_nothing(options):
    found = found_by(options)
    assert set(found) == {"labels", "bins of shop"}
    assert not any(finding.finds for finding in found.values())


def test_other_systems_have_no_such_products():
    tables, y = cancer()
    assert findings_of(matrix_products, GBDTClassifier("federboost-vertical", **TREES), tables, y) == []
