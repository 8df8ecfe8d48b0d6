"""Masked vectors tell what members gave where masks serve twice, and nothing where each serves once."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from attacks.played import cancer, findings_of, views_of
from marks import slow
from treaty import FederBoostHorizontal, FedXGB, GBDTClassifier
from treaty.attacks.ciphertexts import masked_from, repeated_masks
from treaty.crypto.keystream import PairStreams

TREES = {"n_estimators": 2, "n_jobs": 1}
CHANCE = 5.0  # standard errors: masks are drawn anew, and one test in two million may be as far off
CROWD = {"edges": 2, "expose": "model"}


def by_row(parties):
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    return {f"p{k}": (X[k::parties], y[k::parties]) for k in range(parties)}


def found_by(protocol, parties):
    return findings_of(repeated_masks, GBDTClassifier(protocol, **TREES), by_row(parties), None)


@pytest.mark.parametrize(
    ("protocol", "parties", "attackers"),
    [
        (FederBoostHorizontal(), 3, {"p0"}),
        (FederBoostHorizontal(dropout="accept"), 4, {"p0"}),
        slow(FedXGB(**CROWD), 8, {"edge0", "edge1", "server"}),
    ],
    ids=["single-masks", "double-masks", "crowd"],
)
def test_masks_that_serve_once_leave_nothing_of_what_members_gave(protocol, parties, attackers):
    found = found_by(protocol, parties)
    assert {finding.party for finding in found} == attackers
    assert all(finding.score < CHANCE * finding.error for finding in found)
    assert all(finding.error < 0.02 for finding in found)


def test_masks_that_serve_again_cancel_in_differences_of_successive_vectors(monkeypatch):
    add = PairStreams.add
    monkeypatch.setattr(PairStreams, "add", lambda streams, values, nonce: add(streams, values, bytes(32)))
    found = found_by(FederBoostHorizontal(), 3)
    assert {finding.target for finding in found} == {"sums of p1", "sums of p2"}
    assert all(finding.score > 0.99 and finding.finds for finding in found)


def test_one_mask_for_all_numbers_shows_edge_servers_each_user():
    found = found_by(FedXGB(mode="paper", allow_insecure=True, **CROWD), 8)
    by_attacker = {name: [one for one in found if one.party == name] for name in ("edge0", "edge1", "server")}
    assert sorted(map(len, by_attacker.values())) == [2, 4, 4]
    assert all(finding.score > 0.99 and finding.finds for finding in found)


def test_what_members_gave_is_noted_as_often_as_it_was_sent():
    views, truth = views_of(GBDTClassifier(FederBoostHorizontal(), **TREES), by_row(3), None)
    seen = masked_from(views["p0"], "p1")
    assert len(seen) > 4
    assert [len(vector) for vector in truth.given["p1"]] == [len(vector) for vector in seen]
    assert truth.given["p0"] == []  # it opens sums, and masks in place
    assert all(np.abs(vector).max() < 2**50 for vector in truth.given["p1"])


def test_tables_split_by_column_have_no_masked_sums():
    assert findings_of(repeated_masks, GBDTClassifier("federboost-vertical", **TREES), *cancer()) == []
