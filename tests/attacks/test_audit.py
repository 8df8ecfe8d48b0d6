"""What attacks find in trainings of whole systems: above a guess without a guard, and no more than it with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from attacks.played import views_of
from treaty import (
    FederBoostHorizontal,
    FederBoostVertical,
    FedXGBoostLDP,
    FedXGBoostSMM,
    GBDTClassifier,
    LogisticRegression,
    SecureBoost,
)
from treaty.attacks.auditing import audit, findings
from treaty.attacks.membership import extraction, membership
from treaty.attacks.views import Finding, auc_error, recorded_views
from treaty.errors import ConfigError
from treaty.runs.records import READ
from treaty.systems import find_system
from treaty.systems.vertical.messages import Sums

WEAK = ["mean fractal dimension", "texture error", "smoothness error", "symmetry error"]
OU = {"encryption": "ou", "insecure_test_key_bits": 512, "allow_insecure": True, "allow_exact_sums": True}
LABELS, SUMS = "rows that were together (Kang 2024)", "exact sums"


def breast_cancer() -> tuple[dict[str, Any], np.ndarray]:
    """The passive party's columns tell little of the label themselves: what it finds comes from what it is sent."""
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    return {"bank": X.drop(columns=WEAK), "shop": X[WEAK]}, y.to_numpy()


def by_row(parts: int = 3) -> dict[str, Any]:
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    return {f"p{k}": (X[k::parts], y[k::parts]) for k in range(parts)}


def found(system: Any, attack: str, given: Any, **options: Any) -> Finding:
    """Return what an attack finds in a training; there is exactly one such finding."""
    chosen = {"n_estimators": 5, "random_state": 0, "n_jobs": 1, **options}
    (finding,) = [one for one in audit(GBDTClassifier(system, **chosen), *given).findings if one.attack == attack]
    return finding


def test_rows_of_nodes_tell_labels_and_hidden_nodes_do_not() -> None:
    told = found(SecureBoost(**OU), LABELS, breast_cancer())
    assert (told.party, told.target, told.measure) == ("shop", "labels", "AUC")
    assert told.finds
    assert told.score > 0.95 > 0.8 > told.baseline  # measured 0.986 beside 0.738
    for guarded in (SecureBoost(encryption="lattice", allow_exact_sums=True), SecureBoost(**OU, purity_guard=0.4)):
        assert not found(guarded, LABELS, breast_cancer()).finds


def test_exact_sums_tell_bins_and_sealed_sums_none() -> None:
    told = found(SecureBoost(encryption="lattice", allow_exact_sums=True), SUMS, breast_cancer(), n_estimators=20)
    assert (told.party, told.target, told.measure) == ("bank", "bins of shop", "share known")
    assert told.finds
    assert told.score > 0.5  # measured 0.84
    assert found(SecureBoost(sums="sealed"), SUMS, breast_cancer(), n_estimators=2).score == 0.0


@pytest.mark.parametrize("parties", [2, 3])
def test_with_hidden_rows_no_attack_finds_more_than_its_guess(parties: int) -> None:
    """A passive party's columns are weak here: strong ones, and which of them are chosen, hint at labels anywhere."""
    tables, y = breast_cancer()
    if parties == 3:
        tables = {**tables, "lab": tables["shop"].iloc[:, ::2], "shop": tables["shop"].iloc[:, 1::2]}
    options = {"objective": "logistic_pieces", "n_estimators": 4, "max_depth": 4, "random_state": 0, "n_jobs": 1}
    done = audit(GBDTClassifier(SecureBoost(membership="hidden"), **options), tables, y)
    assert not [finding for finding in done.findings if finding.finds]
    tried = {(finding.attack, finding.party) for finding in done.findings}
    for name in [*tables][1:]:
        assert {(LABELS, name), ("purity of the finest row sets (Cheng 2021)", name)} <= tried
    of_bins = [finding for finding in done.findings if finding.party == "bank"]
    assert {finding.attack for finding in of_bins} == {SUMS, "nested sides"}
    assert all(finding.score == 0.0 for finding in of_bins)


def test_noisy_gradients_tell_labels_as_far_as_noise_lets_them() -> None:
    attack = "mean of noisy gradients"
    assert found(FedXGBoostLDP(epsilon=20.0), attack, breast_cancer()).finds
    assert not found(FedXGBoostLDP(epsilon=0.005), attack, breast_cancer()).finds


def test_scores_are_about_true_labels_where_the_party_that_has_them_randomised_them() -> None:
    attack = "first noisy gradients"  # which are the randomised labels' own, without noise
    told = found(FedXGBoostLDP(mechanism="label_rr", epsilon=1.0), attack, breast_cancer())
    kept = np.e / (1.0 + np.e)  # of labels, the mechanism keeps as many
    assert abs(told.score - kept) < 0.05


def test_buckets_are_as_secret_as_their_noise() -> None:
    attack = "likeliest buckets"
    tables, y = breast_cancer()
    weak = found(FederBoostVertical(epsilon=40.0), attack, (tables, y))
    assert weak.finds
    assert weak.score > 0.9
    assert not found(FederBoostVertical(epsilon=0.2), attack, (tables, y)).finds


def test_opened_histograms_are_inverted_and_noise_stops_it() -> None:
    attack = "histogram inversion"
    assert found(FederBoostHorizontal(), attack, (by_row(),), n_estimators=10).finds
    noisy = audit(GBDTClassifier(FederBoostHorizontal(epsilon_total=2.0), n_estimators=5, random_state=0), by_row())
    assert not any(one.finds for one in noisy.findings if one.attack == attack)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_regression_is_audited_too_and_the_model_given_is_not_changed() -> None:
    tables, y = breast_cancer()
    model = LogisticRegression("quasi-newton", max_iter=1, random_state=0)
    done = audit(model, tables, y)
    assert not hasattr(model, "classes_")
    assert done.model.predict_proba(tables).shape == (len(y), 2)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (GBDTClassifier("pooled"), "protocol 'pooled' sends nothing that could be attacked"),
        (GBDTClassifier("secureboost", transport="tls"), 'set transport="memory"'),
    ],
    ids=["pooled", "tls"],
)
def test_what_cannot_be_recorded_is_refused(model: Any, text: str) -> None:
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    given = X if model.protocol == "pooled" else {"bank": X[WEAK], "shop": X.drop(columns=WEAK)}
    with pytest.raises(ConfigError, match=text):
        audit(model, given, y)


@pytest.mark.parametrize(
    "system",
    [
        SecureBoost(encryption="lattice", allow_exact_sums=True, reveal="node"),
        FedXGBoostSMM(mode="paper", version=1, allow_insecure=True),
        FedXGBoostSMM(mode="paper", version=2, allow_insecure=True),
        FedXGBoostLDP(epsilon=8.0),
        FederBoostVertical(epsilon=8.0),
    ],
    ids=["node", "candidates", "gradients", "noise", "buckets"],
)
def test_attacks_find_the_same_in_what_an_audit_keeps_of_messages(system: Any) -> None:
    tables, y = breast_cancer()
    model = GBDTClassifier(system, n_estimators=1, max_depth=2, random_state=0, n_jobs=1)
    views, _ = views_of(model, tables, y)
    found = audit(model, tables, y).findings, findings(views, by_row=False)
    one, other = (sorted((of.attack, of.party, of.target) for of in each) for each in found)
    assert one == other


def test_shares_of_sealed_sums_are_not_kept() -> None:
    tables, y = breast_cancer()
    with recorded_views(kinds=READ) as views:
        GBDTClassifier(SecureBoost(), n_estimators=1, max_depth=2, n_jobs=1).fit(tables, y)
    entries = [entry for view in views.values() for entry in view.transcript.entries]
    kept = sum(len(entry.content) for entry in entries if entry.content is not None)
    assert 0 < kept < sum(entry.nbytes for entry in entries) / 20
    assert next(entry for entry in entries if entry.step == "SealedStep").content is None
    assert list(views) == list(tables)


def test_a_training_that_shows_more_than_fits_ends() -> None:
    tables, y = breast_cancer()
    model = GBDTClassifier(SecureBoost(encryption="lattice", allow_exact_sums=True), n_estimators=50, n_jobs=1)
    with pytest.raises(ConfigError, match="parties see more than 2 MB: audit fewer rounds or rows"):
        audit(model, tables, y, megabytes=2)


# ---------------------------------------------------------------- findings


def test_members_are_found_by_an_overfitted_model_alone() -> None:
    rng = np.random.default_rng(0)
    sure, unsure = np.full(300, 0.99), rng.uniform(0.2, 0.99, 300)
    ones = np.ones(300, np.bool_)
    assert membership(sure, ones, unsure, ones).finds
    assert not membership(unsure, ones, rng.uniform(0.2, 0.99, 300), ones).finds


def test_a_copy_follows_the_model_and_not_the_labels() -> None:
    rng = np.random.default_rng(0)
    x, test = rng.normal(size=(1000, 3)), rng.normal(size=(500, 3))
    labels = x[:, 0] + rng.normal(size=1000) > 0
    answers = (x[:, 1] > 0).astype(float)  # a model that is about something else
    finding = extraction(x, answers, test, (test[:, 1] > 0).astype(float), labels)
    assert finding.finds
    assert finding.score > 0.95 > 0.7 > finding.baseline


@pytest.mark.parametrize("auc", [0.5, 0.7, 0.95])
def test_the_standard_error_is_that_of_drawn_samples(auc: float) -> None:
    """Of scores of two normal classes; the formula is for exponential ones, and off by a third at most."""
    from scipy.stats import norm
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    labels = np.repeat([False, True], [60, 40])
    apart = np.sqrt(2.0) * norm.ppf(auc)
    drawn = [roc_auc_score(labels, rng.normal(size=100) + apart * labels) for _ in range(400)]
    assert auc_error(labels, auc) == pytest.approx(np.std(drawn), rel=0.35)


def test_a_verdict_needs_more_than_chance_and_more_than_little() -> None:
    def finding(score: float, error: float) -> Finding:
        return Finding(attack="a", party="p", target="t", measure="AUC", score=score, baseline=0.5, error=error)

    assert finding(0.6, 0.02).finds
    assert not finding(0.6, 0.05).finds
    assert not finding(0.51, 0.0).finds
    assert finding(0.75, 0.0).advantage == 0.5
    assert finding(0.5, 0.0).verdict == "no better than a guess"


def test_what_messages_are_stated_to_show_stands_beside_what_attacks_find(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, y = breast_cancer()
    model = GBDTClassifier(SecureBoost(encryption="lattice", allow_exact_sums=True), n_estimators=1, n_jobs=1)
    done = audit(model, tables, y)
    assert done.unstated == []
    assert any(
        "sum of gradients" in shown for shown in done.in_clear["bank"]
    )  # which the attack on exact sums starts from
    assert done.in_clear["shop"] == []
    system = find_system("secureboost")
    fewer = tuple(line for line in system.routes["train"] if line.message is not Sums)
    monkeypatch.setitem(system.routes, "train", fewer)
    assert audit(model, tables, y).unstated == ["bank received Sums from shop, which no statement covers"]
