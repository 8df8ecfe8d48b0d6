"""FedXGBoost-LDP from the estimator: what many fits pay together, and what ends them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import treaty
from runs.job_files import train_in_threads
from systems.role_inputs import split_options
from tables import cut, real_table
from treaty.errors import ConfigError, DataError, TreatyError
from treaty.models.checkpoints import Keeper
from treaty.privacy.ledger import Ledger, per_person, read_ledger
from treaty.privacy.mechanisms import best_for_numbers, stored_noisy_target, variance
from treaty.runs import processes
from treaty.runs.job import Job, Member
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP


def model_of(**given: Any) -> treaty.GBDTClassifier:
    """Return a classifier; options `given` are the system's, common ones and the estimator's, by name."""
    own, others = split_options({"mechanism": "piecewise", **given}, FedXGBoostLDP)
    return treaty.GBDTClassifier(own, n_jobs=1, **others)


def test_every_class_has_a_tree_and_pays_for_it():
    X, y = real_table("multiclass", rows=90)
    model = model_of(n_estimators=2, epsilon_total=7.0).fit(cut(X, 2), y)
    assert "6 per person over 6 releases" in model.parts_["p0"].spent
    short = model_of(n_estimators=9, epsilon_total=7.0).fit(cut(X, 2), y)
    assert short.n_iter_ == 2
    assert len(short.predict(cut(X, 2))) == len(y)
    assert "6 per person over 6 releases. In the ledger" in short.parts_["p0"].spent


def test_nothing_is_paid_for_a_round_that_the_budget_cannot_finish(tmp_path):
    X, y = real_table("multiclass", rows=90)

    def fit(total):
        model = model_of(n_estimators=9, epsilon_total=total)
        return model.fit(cut(X, 2), y, checkpoint=tmp_path)

    model = fit(5.0)
    assert model.n_iter_ == 1
    assert "would pay 6 with gradients of tree 4 to gradients of tree 6" in model.parts_["p0"].spent
    with pytest.raises(ConfigError, match="no round can be paid for"):
        fit(5.9)
    assert len(read_ledger(tmp_path / "p0.noise")) == 3
    assert fit(6.0).n_iter_ == 1


def test_a_spent_budget_keeps_early_stopping_and_prediction():
    X, y = real_table("binary", rows=300)
    tables, held = cut(X[:200], 2), cut(X[200:], 2)
    model = model_of(n_estimators=30, epsilon=3.0, epsilon_total=12.0)
    model.fit(tables, y[:200], eval_set=(held, y[200:]), early_stopping_rounds=20)
    assert len(model.evals_result_["eval_0"]["logloss"]) == 4
    assert 1 <= model.n_iter_ <= 4
    assert model.predict_proba(held).shape == (100, 2)


def test_labels_randomised_once_pay_once_whatever_the_trees(tmp_path):
    X, y = real_table("binary")
    label = {"mechanism": "label_rr", "epsilon": 1.5, "random_state": 0}
    for trees in (2, 4):
        model = model_of(**label, n_estimators=trees).fit(cut(X, 2), y, checkpoint=tmp_path)
        assert model.parts_["p0"].spent.startswith("epsilon 1.5 per label and per person, once. In the ledger: epsilon")
    assert [(e.mechanism, e.epsilon) for e in read_ledger(tmp_path / "p0.noise")] == [("label_rr", 1.5)]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "tls"])
def test_labels_that_cost_too_much_are_not_drawn(tmp_path, transport):
    X, y = real_table("binary")
    options = {"mechanism": "label_rr", "epsilon_total": 1.0, "n_estimators": 1}
    with pytest.raises(TreatyError, match="may pay epsilon 1, has paid 0 and would pay 3 with labels"):
        model_of(**options, epsilon=3.0, transport=transport).fit(cut(X, 2), y, checkpoint=tmp_path)
    assert not (tmp_path / "noisy_labels").exists()
    assert read_ledger(tmp_path / "p0.noise") == []
    model_of(**options, epsilon=1.0).fit(cut(X, 2), y, checkpoint=tmp_path)
    model_of(**{**options, "epsilon_total": 0.5}, epsilon=1.0).fit(cut(X, 2), y, checkpoint=tmp_path)
    assert len(read_ledger(tmp_path / "p0.noise")) == 1


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """Return a function that goes on with a fit whose third tree was not paid any more: two of five are."""
    X, y = real_table("binary", rows=150)

    def fit(**options):
        model = model_of(**{"n_estimators": 5, "epsilon_total": 4.0, **options})
        return model.fit(cut(X, 2), y, checkpoint=tmp_path)

    with monkeypatch.context() as patch:
        spend = Ledger.spend

        def stop(ledger, entries, **limit):
            if entries[0].what == "gradients of tree 3":
                raise KeyboardInterrupt
            return spend(ledger, entries, **limit)

        patch.setattr(Ledger, "spend", stop)
        patch.setattr(Keeper, "due", True)
        with pytest.raises(KeyboardInterrupt):
            fit()
    assert len(read_ledger(tmp_path / "p0.noise")) == 2
    return fit


@pytest.mark.parametrize(
    ("limit", "trees"), [({"epsilon_total": 5.0}, 5), ({"epsilon_total": 3.0}, 3), ({"epsilon_total": None}, 5)]
)
def test_a_training_goes_on_under_another_limit(stopped, tmp_path, limit, trees):
    assert stopped(**limit).n_iter_ == trees == len(read_ledger(tmp_path / "p0.noise"))


def test_who_begins_anew_keeps_the_ledger(stopped, tmp_path):
    with pytest.raises(
        ConfigError, match=r"epsilon=0\.5 \(was None\), reg_lambda=.*; set them back, or start again: remove the \.chec"
    ):
        stopped(epsilon=0.5)
    for file in tmp_path.glob("*.checkpoint"):
        file.unlink()
    assert stopped(epsilon=0.5).n_iter_ == 4
    assert per_person(read_ledger(tmp_path / "p0.noise")) == 4.0


def test_noisy_labels_of_other_rows_are_moved_away_and_drawn_anew_at_a_cost(tmp_path):
    X, y = real_table("binary", rows=150)
    model = model_of(mechanism="label_rr", epsilon=1.0, n_estimators=1)
    model.fit(cut(X[:100], 2), y[:100], checkpoint=tmp_path)
    with pytest.raises(ConfigError, match=r"noisy_labels; .* move this file away .* keep the ledger and its key"):
        model.fit(cut(X[50:], 2), y[50:], checkpoint=tmp_path)
    (tmp_path / "noisy_labels").rename(tmp_path / "first_labels")
    assert "2 per person over 2 releases" in model.fit(cut(X[50:], 2), y[50:], checkpoint=tmp_path).parts_["p0"].spent


@pytest.mark.slow
def test_a_spent_budget_is_what_processes_say_first(monkeypatch):
    wait = processes._wait
    monkeypatch.setattr(processes, "_wait", lambda *started: sorted(wait(*started)))  # whoever is seen to end first
    X, y = real_table("binary", rows=150)
    model = model_of(epsilon_total=0.5, active="p1", transport="tls")
    with pytest.raises(TreatyError, match=r"^p1: no round can be paid for: .*\np0: p1 stopped"):
        model.fit(cut(X, 2), y)


@pytest.mark.slow
def test_processes_over_tls_train_predict_and_keep_the_ledger(tmp_path):
    X, y = real_table("binary", rows=150)
    model = model_of(n_estimators=2, epsilon=4.0, transport="tls")
    model.fit(cut(X, 2), y, checkpoint=tmp_path)
    assert "8 per person over 2 releases" in model.parts_["p0"].spent
    assert len(read_ledger(tmp_path / "p0.noise")) == 2
    assert model.predict(cut(X, 2)).shape == (150,)


# ---------------------------------------------------------------- numbers that are randomised once


def numbers_of(**given: Any) -> treaty.GBDTRegressor:
    own = {"target_range": (0.0, 400.0), "epsilon": 2.0} | given
    return treaty.GBDTRegressor(FedXGBoostLDP(**own), n_estimators=3, n_jobs=1)


def test_numbers_randomised_once_pay_once_whatever_the_trees_and_are_kept(tmp_path, caplog):
    X, y = real_table("regression", rows=150)
    y = y.astype(float)
    y[0] = 900.0
    for _ in range(2):
        model = numbers_of(epsilon=20.0).fit(cut(X, 2), y, checkpoint=tmp_path)
        assert model.parts_["p0"].spent.startswith("epsilon 20 per label and per person, once. In the ledger: epsilon")
    assert [(e.mechanism, e.epsilon) for e in read_ledger(tmp_path / "p0.noise")] == [("target", 20.0)]
    assert "1 of 150 labels lie outside target_range" in caplog.text
    assert np.mean((model.predict(cut(X, 2)) - y)[1:] ** 2) < np.var(y[1:])
    with pytest.raises(ConfigError, match="expected noisy labels of this table, got noisy labels of another"):
        numbers_of(epsilon=20.0, target_range=(0.0, 401.0)).fit(cut(X, 2), y, checkpoint=tmp_path)


def test_noisy_numbers_are_right_on_average_and_drawn_once(tmp_path):
    y, ends = np.repeat([-5.0, 0.0, 3.0, 15.0, 40.0], 4_000), (-5.0, 15.0)
    for epsilon in (0.5, 2.0):
        path = tmp_path / f"{epsilon}"
        noisy = stored_noisy_target(path, y, ends, epsilon)
        np.testing.assert_array_equal(stored_noisy_target(path, y, ends, epsilon), noisy)
        for label in np.unique(y):
            of = noisy[y == label]
            expected = min(max(label, ends[0]), ends[1])
            assert abs(of.mean() - expected) < 6.5 * of.std() / math.sqrt(len(of))  # false alarm: 10^-10
            # the noise of this epsilon, and no less; with twice as much it would be half or less
            noise = variance(best_for_numbers(epsilon), np.array([(expected - 5.0) / 10.0]), epsilon)[0]
            assert of.std() == pytest.approx(10.0 * math.sqrt(noise), rel=0.1)


def test_what_does_not_suit_the_labels_is_refused_with_what_to_do(tmp_path):
    X, y = real_table("regression", rows=60)
    with pytest.raises(ConfigError, match=r"take mechanism='target' with target_range=\(least, most\)"):
        treaty.GBDTRegressor("fedxgboost-ldp").fit(cut(X, 2), y)
    with pytest.raises(ConfigError, match="the labels are classes: leave target_range out"):
        treaty.GBDTClassifier(FedXGBoostLDP(target_range=(0, 1))).fit(cut(X, 2), y > np.median(y))
    with pytest.raises(ConfigError, match="would be sent without noise"):
        numbers_of().fit(cut(X, 2), y, sample_weight=np.ones(60))
    with pytest.raises(DataError, match="expected a label in every row, got 1 of 60 rows without"):
        numbers_of().fit(cut(X, 2), np.where(np.arange(60) == 3, np.nan, y))


def test_a_job_randomises_the_files_numbers_once(tmp_path, monkeypatch):
    X, y = real_table("regression", rows=80)
    X.iloc[:, :5].assign(y=y).to_csv(tmp_path / "bank.csv", index=False)
    X.iloc[:, 5:].to_csv(tmp_path / "shop.csv", index=False)
    members = {name: Member(table=str(tmp_path / f"{name}.csv")) for name in ("bank", "shop")}
    job = Job(
        name="test", active="bank", label="y", task="regression", parties=members, protocol="fedxgboost-ldp",
        own={"target_range": [0, 400]}, common={"n_estimators": 1}, output=str(tmp_path / "model"),
        store=str(tmp_path / "store"), n_jobs=1,
    )  # fmt: skip
    assert train_in_threads(monkeypatch, dict.fromkeys(members, job)) == {}
    (entry,) = read_ledger(tmp_path / "store" / "bank.noise")
    assert (entry.mechanism, entry.epsilon) == ("target", 1.0)
    assert len(stored_noisy_target(f"{tmp_path}/bank.csv.noisy_labels", y.astype(float), (0.0, 400.0), 1.0)) == 80


# ---------------------------------------------------------------- what follows from the noise, and is kept where named


@pytest.mark.parametrize(
    ("own", "named", "found"),
    [
        ({}, {}, 237.0),
        ({"mechanism": "duchi"}, {}, 237.0),
        ({"epsilon": 3.0}, {}, 15.1),
        ({}, {"reg_lambda": 2.5}, 2.5),
        ({"mode": "paper", "allow_insecure": True}, {}, 1.0),
    ],
    ids=str,
)
def test_the_penalty_follows_from_the_noise_unless_it_is_named(own, named, found):
    X, y = real_table("binary", rows=120)
    model = treaty.GBDTClassifier(FedXGBoostLDP(**own), n_estimators=1, n_jobs=1, **named)
    assert model._settings()[2].reg_lambda == pytest.approx(found, rel=0.01)
    said = model.fit(cut(X, 2), y).parts_["p0"].spent
    assert ("follows from the noise" in said) == (found > 3.0)
