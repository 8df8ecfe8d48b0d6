"""Answers that are products of known ciphertexts name their rows; re-randomised ones name nobody."""

from __future__ import annotations

import pytest

from attacks.played import OU, cancer, digits, findings_of, views_of
from marks import slow
from treaty import GBDTClassifier, SecureBoost
from treaty.attacks.ciphertexts import keyed_cipher, recognised, recognised_ciphertexts

TREES = {"n_estimators": 1, "n_jobs": 1}


def model(encryption, *, rerandomise, **trees):
    options = {**OU, "encryption": encryption, "mode": "paper", "rerandomise": rerandomise}
    return GBDTClassifier(SecureBoost(**options), **{**TREES, **trees})


@pytest.mark.parametrize(
    ("table", "encryption", "trees", "least"),
    [
        (cancer, "ou", {}, 0.6),
        slow(cancer, "ou", {"subsample": 0.7}, 0.6),
        slow(digits, "ou", {}, 0.3),
        slow(
            cancer, "paillier", {"n_estimators": 3}, 0.15
        ),  # whose keys of this size have seven bins in a ciphertext, not two
    ],
)
def test_rows_of_bins_are_named_by_ciphertexts_that_are_not_rerandomised(table, encryption, trees, least):
    (found,) = findings_of(recognised_ciphertexts, model(encryption, rerandomise=False, **trees), *table())
    assert (found.party, found.target) == ("bank", "bins of shop")
    assert found.score > least
    assert found.finds


@pytest.mark.parametrize("encryption", ["ou", slow("paillier")])
def test_rerandomised_answers_leave_the_guess_that_sums_allow(encryption):
    (found,) = findings_of(recognised_ciphertexts, model(encryption, rerandomise=True), *cancer())
    assert found.score == found.baseline
    assert 0.0 < found.baseline < 0.1


@pytest.mark.slow
def test_named_rows_are_never_wrong():
    views, truth = views_of(model("ou", rerandomise=False), *cancer())
    codes, offsets = truth.codes("shop")
    view = views["bank"]
    entries = [entry for entry in view.transcript.entries if entry.peer == "shop"]
    cipher = keyed_cipher(view, entries)
    nodes, named = view.recording.nodes["shop"], 0
    for bins, rows in recognised(entries, nodes, cipher):
        for one, found in zip(bins, rows, strict=True):
            if found is not None:
                named += len(found)
                assert len(found) == one.count
                assert all(one.slot in codes[row] + offsets[:-1] for row in found)
    assert named > 100


def test_ciphers_without_keys_have_nothing_to_know_again():
    lattice = SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True)
    assert findings_of(recognised_ciphertexts, GBDTClassifier(lattice, **TREES), *cancer()) == []
