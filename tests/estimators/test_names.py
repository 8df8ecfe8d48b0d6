"""What a user of scikit-learn or XGBoost writes by habit: it works, or the error says what works here."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone

import treaty
from tables import real_table
from treaty.runs.job import load_job

LINEAR = [treaty.LogisticRegression, treaty.LinearRegression, treaty.PoissonRegressor]
TREES = [treaty.GBDTClassifier, treaty.GBDTRegressor, treaty.GBDTRanker]


@pytest.mark.parametrize("kind", TREES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("eta", "learning_rate"),
        ("gamma", "min_split_loss"),
        ("lambda", "reg_lambda"),
        ("alpha", "reg_alpha"),
        ("num_boost_round", "n_estimators"),
        ("nthread", "n_jobs"),
        ("seed", "random_state"),
        ("max_bins", "max_bin"),
        ("min_samples_leaf", "min_child_samples"),
    ],
)
def test_other_names_of_a_parameter_are_refused_with_ours(kind, theirs, ours):
    with pytest.raises(
        treaty.ConfigError, match=f"{kind.__name__} has no parameter '{theirs}'; .* called '{ours}' here"
    ):
        kind(**{theirs: 1})
    with pytest.raises(treaty.ConfigError, match=f"called '{ours}' here"):
        kind().set_params(**{theirs: 1})


@pytest.mark.parametrize(
    ("theirs", "said"), [("eta", "'learning_rate'"), ("alpha", "'l2'"), ("fit_intercept", "always an intercept")]
)
def test_other_names_of_a_linear_models_parameters_are_refused_with_ours(theirs, said):
    with pytest.raises(treaty.ConfigError, match=f"LogisticRegression has no parameter '{theirs}'; .*{said}"):
        treaty.LogisticRegression(**{theirs: 1})


@pytest.mark.parametrize(
    ("theirs", "why"),
    [("tree_method", "histograms"), ("grow_policy", "max_depth"), ("num_class", "what the labels are")],
)
def test_what_needs_no_choice_is_refused_with_the_reason(theirs, why):
    with pytest.raises(treaty.ConfigError, match=f"'{theirs}'; leave it out: .*{why}"):
        treaty.GBDTClassifier(**{theirs: "hist"})


def test_a_job_file_with_another_name_is_told_ours(tmp_path):
    path = tmp_path / "job.toml"
    job = 'name = "n"\nprotocol = "secureboost"\nactive = "a"\nlabel = "y"\n[parties.a]\ntable = "a.csv"\n'
    path.write_text(job + '[parties.b]\ntable = "b.csv"\n[boosting]\neta = 0.1\n')
    with pytest.raises(treaty.ConfigError, match="called 'learning_rate' here"):
        load_job(path)


@pytest.mark.parametrize("kind", TREES + LINEAR, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("given", [(100,), ("pooled", 100), (np.int64(100),)], ids=str)
def test_a_number_without_a_name_is_refused_with_a_name(kind, given):
    rounds = "n_estimators" if kind in TREES else "max_iter"
    with pytest.raises(treaty.ConfigError, match=rf"expected {kind.__name__}\({rounds}=100\), got"):
        kind(*given)


def test_a_random_state_of_numpy_seeds_as_often_as_it_is_used():
    X, y = real_table("binary")

    def fitted(random_state):
        model = treaty.GBDTClassifier(n_estimators=3, subsample=0.5, random_state=random_state)
        return model.fit(X, y), model.predict_proba(X)

    state = np.random.RandomState(7)
    _, first = fitted(state)
    _, second = fitted(state)
    _, again = fitted(np.random.RandomState(7))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - second).max() > 0.0
    fitted(None)
    fitted(np.random)
    with pytest.raises(treaty.ConfigError, match="random_state"):
        fitted("7")


def test_a_linear_model_takes_a_random_state_of_numpy():
    X, y = real_table("binary")

    def fitted():
        model = treaty.LogisticRegression(batch_size=50, max_iter=2, tol=0.0, random_state=np.random.RandomState(7))
        return clone(model).fit(X, y).coef_

    np.testing.assert_array_equal(fitted(), fitted())


@pytest.mark.parametrize("protocol", ["pooled", "federboost-vertical"])
def test_a_notebook_shows_parameters_fitted_attributes_and_no_partys_values(protocol):
    X, y = real_table("binary")
    given = X if protocol == "pooled" else {"bank": X.iloc[:, :5], "shop": X.iloc[:, 5:]}
    model = treaty.GBDTClassifier(protocol, n_estimators=2)
    assert repr(model) == ("GBDTClassifier(n_estimators=2)" if protocol == "pooled" else repr(clone(model)))
    assert "Not fitted" in model._repr_html_()
    page = model.fit(given, y)._repr_html_()
    assert "Not fitted" not in page
    assert "Fitted" in page
    for name, part in model.parts_.items():
        assert repr(part).startswith(f"<ModelPart of {name}: ")
        assert len(repr(part)) < 100
        assert "key=" not in page


@pytest.mark.filterwarnings("ignore:.*rows have a margin beyond 4", "ignore:training ended after max_iter")
def test_a_part_of_a_linear_model_is_shown_in_a_line():
    X, y = real_table("binary")
    model = treaty.LogisticRegression(max_iter=2).fit(X, y)
    assert repr(model.parts_["pooled"]).startswith("<LinearPart of pooled: 12 columns, ")
    assert "Not fitted" not in model._repr_html_()


def test_save_says_that_it_makes_a_folder(tmp_path):
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(n_estimators=2, random_state=np.random.RandomState(1)).fit(X, y)
    for name in ("model.json", "model.ubj", "model.pkl"):
        with pytest.raises(treaty.ConfigError, match=r"save makes a folder.*as in save\('model'\), got .*" + name):
            model.save(tmp_path / name)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.random_state is None


@pytest.mark.parametrize("state", ["x", 1.5, np.random.default_rng(0)], ids=lambda state: type(state).__name__)
@pytest.mark.parametrize("kind", [treaty.GBDTClassifier, treaty.LogisticRegression], ids=lambda kind: kind.__name__)
def test_a_random_state_of_another_kind_is_refused_in_words(kind, state):
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match="random_state to be a whole number, a numpy RandomState or None, got"):
        kind(random_state=state).fit(X, y)
