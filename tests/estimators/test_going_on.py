"""More rounds for a finished model: on the same rows, on others, in one place and between parties."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import treaty
from runs.job_files import train_in_threads
from runs.small_jobs import write_job
from tables import FAST_KEY, assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array
from treaty.models.trees import load_part
from treaty.runs.job_files import load_job
from treaty.runs.party import part_file
from treaty.runs.report import learned_by
from treaty.systems.vertical import setup
from treaty.systems.vertical.prediction import DecideRequest, RowSets
from treaty.trees.ensemble import SplitTable

SMALL = {"max_bin": 16, "min_child_samples": 5, "n_jobs": 1}
OWN = {name: of for name, of in FAST_KEY.items() if name not in ("protocol", "n_jobs")}
SYSTEMS = {
    "open": treaty.SecureBoost(**OWN),
    "lattice": treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
    "sealed": treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, sums="sealed"),
    "smm": treaty.FedXGBoostSMM(allow_exact_sums=True),
}
LOSSES = {
    "binary": (treaty.GBDTClassifier, {}),
    "multiclass": (treaty.GBDTClassifier, {}),
    "regression": (treaty.GBDTRegressor, {}),
    "poisson": (treaty.GBDTRegressor, {"objective": "poisson"}),
    "median": (treaty.GBDTRegressor, {"objective": "absolute_error"}),
}


def of_loss(name, rows=200):
    kind, options = LOSSES[name]
    X, y = real_table(name if name in ("binary", "multiclass") else "regression", rows=rows)
    return kind, {**SMALL, **options}, with_categories(with_gaps(X)), y


def test_more_rounds_on_the_same_rows_are_those_of_one_fit():
    for name in LOSSES:
        kind, options, X, y = of_loss(name)
        weight = np.random.default_rng(0).exponential(size=len(y))
        first = kind(n_estimators=3, **options).fit(X, y, weight)
        kept = [tree.value.copy() for tree in first.parts_["pooled"].forest.trees]
        more = kind(n_estimators=2, **options).fit(X, y, weight, eval_set=(X, y), xgb_model=first)
        once = kind(n_estimators=5, **options).fit(X, y, weight, eval_set=(X, y))
        assert_same_trees(more, once)
        np.testing.assert_array_equal(more.predict(X), once.predict(X))
        assert more.n_iter_ == 5
        ((metric, values),) = more.evals_result_["eval_0"].items()
        assert values == once.evals_result_["eval_0"][metric][3:]
        # the model from which it went on is as it was
        assert first.n_iter_ == 3
        for tree, before in zip(first.parts_["pooled"].forest.trees, kept, strict=True):
            np.testing.assert_array_equal(tree.value, before)


@pytest.mark.parametrize(
    ("system", "parties", "loss"),
    [
        ("open", 3, "multiclass"),
        ("lattice", 2, "binary"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            ("open", 5, "binary"), ("open", 2, "median"), ("sealed", 2, "binary"), ("sealed", 3, "regression"),
            ("smm", 2, "binary"), ("lattice", 3, "poisson"),
        ]),
    ],
)  # fmt: skip
def test_parties_go_on_to_the_trees_of_one_table(system, parties, loss):
    kind, options, X, y = of_loss(loss, rows=120)
    tables = cut(X, parties)
    first = kind(SYSTEMS[system], n_estimators=2, **options).fit(tables, y)
    more = kind(SYSTEMS[system], n_estimators=2, **options).fit(tables, y, eval_set=(tables, y), xgb_model=first)
    once = kind(n_estimators=4, **options).fit(tables, y, eval_set=(tables, y))
    assert_same_trees(more, once)
    ((metric, values),) = more.evals_result_["eval_0"].items()
    assert values == once.evals_result_["eval_0"][metric][2:]
    new, whole = (treaty.models.trees.forest_of(list(of.parts_.values())) for of in (more, once))
    assert new.before == 2
    assert new.rounds == whole.rounds
    shares = more.parts_["p0"].sides
    if system == "lattice":
        assert all(share > 0.0 for share in shares.values())


@pytest.mark.parametrize("more", [{"max_leaves": 5, "max_depth": None}, {"num_parallel_tree": 2}, {"directed": True}])
def test_parties_go_on_under_every_growth_option(more):
    kind, options, X, y = of_loss("binary", rows=120)
    tables = cut(X, 2)
    if more.pop("directed", False):
        numbers = [f"{name}.{of}" for name, table in tables.items() for of in table.select_dtypes("number").columns]
        more = {"monotone_constraints": dict.fromkeys(numbers[:2], -1), "interaction_constraints": [numbers]}
    options |= more
    first = kind(SYSTEMS["open"], n_estimators=1, **options).fit(tables, y)
    again = kind(SYSTEMS["open"], n_estimators=2, **options).fit(tables, y, xgb_model=first)
    once = kind(n_estimators=3, **options).fit(tables, y)
    assert_same_trees(again, once)
    assert len(once.parts_["pooled"].forest.trees) == 3 * options.get("num_parallel_tree", 1)


def test_new_rows_start_from_the_predictions_of_the_earlier_model():
    kind, options, X, y = of_loss("binary", rows=400)
    old, new = slice(0, 200), slice(200, 400)
    first = kind(n_estimators=3, **options).fit(X[old], y[old])
    more = kind(n_estimators=3, **options).fit(X[new], y[new], xgb_model=first)
    margins = first.decision_function(X[new])
    corrected = kind(n_estimators=3, **options).fit(X[new], y[new], base_margin=margins)
    for ours, theirs in zip(
        more.parts_["pooled"].forest.trees[3:], corrected.parts_["pooled"].forest.trees, strict=True
    ):
        np.testing.assert_array_equal(ours.value, theirs.value)
        np.testing.assert_array_equal(ours.left, theirs.left)
    np.testing.assert_allclose(
        more.decision_function(X[new]), corrected.decision_function(X[new], base_margin=margins), atol=1e-12
    )
    np.testing.assert_array_equal(list(more.staged_predict_proba(X[new]))[2], first.predict_proba(X[new]))


def test_new_rows_between_parties_are_walked_down_the_earlier_trees():
    kind, options, X, y = of_loss("binary", rows=240)
    tables, later = cut(X[:120], 2), cut(X[120:], 2)
    federated, pooled = (
        kind(system, n_estimators=2, **options).fit(
            later, y[120:], xgb_model=kind(system, n_estimators=2, **options).fit(tables, y[:120])
        )
        for system in (SYSTEMS["open"], "pooled")
    )
    assert_same_trees(federated, pooled)


def test_categories_that_the_earlier_model_does_not_know_are_said():
    kind, options, X, y = of_loss("binary")
    X = X.assign(kind=pd.Categorical(np.where(np.arange(200) % 2, "a", "b")))
    first = kind(n_estimators=2, **options).fit(X, y)
    other = X.assign(kind=pd.Categorical(np.where(np.arange(200) % 3, "a", "c")))
    with pytest.warns(UserWarning, match="column 'kind': .* categories that training did not have, 'c'"):
        more = kind(n_estimators=2, **options).fit(other, y, xgb_model=first)
    # rows of the unknown category are in training where predictions put them: else a third fit would start elsewhere
    with pytest.warns(UserWarning, match="kind"):
        again = kind(n_estimators=2, **options).fit(other, y, xgb_model=more)
    with pytest.warns(UserWarning, match="kind"):
        assert_same_trees(again, kind(n_estimators=4, **options).fit(other, y, xgb_model=first))


def test_a_saved_model_goes_on(tmp_path):
    kind, options, X, y = of_loss("multiclass")
    first = kind(n_estimators=2, **options).fit(X, y)
    first.save(tmp_path / "model")
    ours = kind(n_estimators=2, **options).fit(X, y, xgb_model=tmp_path / "model")
    assert_same_trees(ours, kind(n_estimators=2, **options).fit(X, y, xgb_model=first))
    ours.save(tmp_path / "more")
    again = treaty.load(tmp_path / "more")
    assert again.n_iter_ == 4
    # and once more, also with the estimator itself
    assert again.set_params(n_estimators=1).fit(X, y, xgb_model=again).n_iter_ == 5


def test_early_stopping_counts_new_rounds():
    X, y = real_table("binary", rows=400)
    options = {"n_jobs": 1, "learning_rate": 1.0}
    first = treaty.GBDTClassifier(n_estimators=5, **options).fit(X[:200], y[:200])
    more = treaty.GBDTClassifier(n_estimators=60, early_stopping_rounds=3, **options)
    more.fit(X[:200], y[:200], eval_set=(X[200:], y[200:]), xgb_model=first)
    values = more.evals_result_["eval_0"]["logloss"]
    assert more.best_iteration_ == 5 + int(np.argmin(values))
    assert more.best_score_ == min(values)
    assert more.n_iter_ == more.best_iteration_ + 1 > 5
    assert more.parts_["pooled"].forest.best_watched == int(np.argmin(values)) + 1


def test_samples_of_new_rounds_are_drawn_anew_and_follow_from_the_seed():
    kind, options, X, y = of_loss("binary")
    drawn = {"subsample": 0.5, "colsample_bytree": 0.5, "random_state": 3, **options}
    first = kind(n_estimators=2, **drawn).fit(X, y)
    more = [kind(n_estimators=2, **drawn).fit(X, y, xgb_model=first) for _ in range(2)]
    assert_same_trees(*more)
    values = [tree.value for tree in more[0].parts_["pooled"].forest.trees]
    assert not np.array_equal(values[0], values[2])


def test_an_interrupted_training_after_a_model_resumes(tmp_path):
    kind, options, X, y = of_loss("binary")

    class Stopping:
        def after_iteration(self, model, epoch, evals_log):
            if epoch == 3:
                raise KeyboardInterrupt

    first = kind(n_estimators=2, **options).fit(X, y)
    with pytest.raises(KeyboardInterrupt):
        kind(n_estimators=4, callbacks=[Stopping()], **options).fit(X, y, xgb_model=first, checkpoint=tmp_path)
    with pytest.raises(treaty.ConfigError, match="differ from the checkpoint's"):
        kind(n_estimators=6, **options).fit(X, y, checkpoint=tmp_path)  # without the model
    more = kind(n_estimators=4, **options).fit(X, y, xgb_model=first, checkpoint=tmp_path)
    assert_same_trees(more, kind(n_estimators=6, **options).fit(X, y))
    assert more.parts_["pooled"].forest.before == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"xgb_model": "nowhere"}, "nowhere"),
        ({"xgb_model": treaty.GBDTClassifier()}, "a fitted GBDTClassifier, or its folder"),
        ({"xgb_model": treaty.LogisticRegression()}, "a fitted GBDTClassifier, or its folder"),
        ({"init_model": None}, "it is called 'xgb_model' here"),
        ({"base_margin": np.zeros(200)}, "a model with base_margin, or without"),
    ],
)
def test_models_that_cannot_go_on_are_refused(change, text):
    kind, options, X, y = of_loss("binary")
    first = kind(n_estimators=1, **options).fit(X, y)
    with pytest.raises(treaty.ConfigError, match=text):
        kind(n_estimators=1, **options).fit(X, y, **{"xgb_model": first, **change})


def test_other_columns_labels_and_losses_than_the_models_are_refused():
    kind, options, X, y = of_loss("binary")
    first = kind(n_estimators=1, **options).fit(X, y)
    with pytest.raises((treaty.DataError, ValueError), match=r"mean radius|feature"):
        kind(n_estimators=1, **options).fit(X.drop(columns="mean radius"), y, xgb_model=first)
    with pytest.raises(treaty.DataError, match="expected the labels seen in training"):
        kind(n_estimators=1, **options).fit(X, y + 1, xgb_model=first)
    with pytest.raises(treaty.ConfigError, match="a model with another base_score"):
        kind(n_estimators=1, base_score=0.9, **options).fit(X, y, xgb_model=first)
    kind, options, X, y = of_loss("regression")
    first = kind(n_estimators=1, objective="poisson", **options).fit(X, y)
    with pytest.raises(treaty.ConfigError, match="a model with another loss"):
        kind(n_estimators=1, **options).fit(X, y, xgb_model=first)


@pytest.mark.parametrize(
    ("protocol", "why"),
    [
        (treaty.FedXGBoostLDP(), "without the noise"),
        (treaty.FederBoostVertical(), "without the noise"),
        (treaty.SecureBoost(inference="shared"), 'inference="shared" hides sides'),
        ("federboost-horizontal", "participants know only the margins"),
    ],
)
def test_systems_that_cannot_go_on_say_why(protocol, why):
    X, y = real_table("binary", rows=100)
    first = treaty.GBDTClassifier(n_estimators=1, n_jobs=1).fit(X, y)
    with pytest.raises(treaty.ConfigError, match=f"cannot continue a finished model with protocol '.*': .*{why}"):
        treaty.GBDTClassifier(protocol).fit(cut(X, 2), y, xgb_model=first)


def test_an_owner_decides_training_rows_at_the_earlier_splits_alone():
    splits = SplitTable()
    for threshold in (0.0, 1.0):
        splits.add(0, threshold, False)
    rows = RowSets("bank", [np.zeros((4, 1), np.float32)])
    ask = DecideRequest(0, Array.of(np.array([0, 1], np.int32)))
    with pytest.raises(PeerProtocolError, match="expected records below 1"):
        rows.decide(ask, splits, 1, known=1)
    assert len(list(rows.decide(DecideRequest(0, Array.of(np.array([0], np.int32))), splits, 1, known=1))) == 1


def test_a_job_goes_on_from_the_parts_in_a_folder(tmp_path, monkeypatch):
    write_job(tmp_path, "secureboost")
    text = (tmp_path / "job.toml").read_text()
    first = load_job(tmp_path / "job.toml")
    assert train_in_threads(monkeypatch, dict.fromkeys(first.parties, first)) == {}
    rounds = first.common["n_estimators"]

    def job(n_estimators, *more, folder="more"):
        changed = text.replace(f"n_estimators = {rounds}", f"n_estimators = {n_estimators}")
        (tmp_path / "job.toml").write_text("\n".join([f'output = "{folder}"', *more, changed]))
        return load_job(tmp_path / "job.toml")

    more, checked = job(rounds + 2, 'from_model = "model"'), []
    with monkeypatch.context() as patch:  # what the sides of all rows at earlier splits show is limited
        patch.setattr(setup, "check_sides", lambda inputs, *_: checked.append(inputs.party.name))
        assert train_in_threads(monkeypatch, dict.fromkeys(more.parties, more)) == {}
    assert sorted(checked) == ["b", "c"]
    once = job(rounds + 2, folder="once")
    assert train_in_threads(monkeypatch, dict.fromkeys(once.parties, once)) == {}
    ours, theirs = (load_part(part_file(tmp_path / folder, "a"), "a").forest for folder in ("more", "once"))
    assert ours.before == rounds
    for mine, other in zip(ours.trees, theirs.trees, strict=True):
        np.testing.assert_array_equal(mine.value, other.value)
        np.testing.assert_array_equal(mine.source, other.source)
    again = job(rounds, 'from_model = "model"')
    assert f"above {rounds}" in train_in_threads(monkeypatch, dict.fromkeys(again.parties, again))["a"]
    copies = {**dict.fromkeys(more.parties, more), "b": once}
    said = train_in_threads(monkeypatch, copies)
    assert any("earlier model" in of for of in said.values())


def test_a_dealer_has_no_part_of_a_model_to_go_on_from(tmp_path, monkeypatch):
    write_job(tmp_path, "fedxgboost-smm")
    text = (tmp_path / "job.toml").read_text()
    first = load_job(tmp_path / "job.toml")
    assert train_in_threads(monkeypatch, dict.fromkeys(first.parties, first)) == {}
    more = text.replace("n_estimators = 2", "n_estimators = 3")
    (tmp_path / "job.toml").write_text(f'output = "more"\nfrom_model = "model"\n{more}')
    job = load_job(tmp_path / "job.toml")
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    assert load_part(part_file(tmp_path / "more", "a"), "a").forest.rounds == 3
    assert not any("earlier model" in of for of in learned_by(job, job.roles())["c"])
