"""What a user of scikit-learn or XGBoost writes by habit: it works, or the error says what works here."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.metrics import brier_score_loss, f1_score, log_loss, mean_absolute_error

import treaty
from tables import real_table
from treaty.runs.job_files import load_job

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
    [("tree_method", "histograms"), ("grow_policy", "max_leaves"), ("num_class", "what the labels are")],
)
def test_what_needs_no_choice_is_refused_with_the_reason(theirs, why):
    with pytest.raises(treaty.ConfigError, match=f"'{theirs}'; leave it out: .*{why}"):
        treaty.GBDTClassifier(**{theirs: "hist"})


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("monotonic_cst", "it is called 'monotone_constraints' here"),
        ("interaction_cst", "it is called 'interaction_constraints' here"),
        ("monotone_constraints_method", "leave it out: bounds are computed as in XGBoost"),
        ("feature_weights", "leave it out: .*colsample_bytree"),
        ("min_delta", "it is called 'early_stopping_min_delta' here"),
        ("sample_weight", r"it belongs to fit: GBDTClassifier\(\)\.fit\(X, y, sample_weight=\.\.\.\)"),
        ("eval_sample_weight", r"it belongs to fit: .*\.fit\(X, y, sample_weight_eval_set=\.\.\.\)"),
        ("xgb_model", r"it belongs to fit: GBDTClassifier\(\)\.fit\(X, y, xgb_model=\.\.\.\)"),
        ("warm_start", r"leave it out: fit\(\.\.\., xgb_model=MODEL\)"),
        ("groups", "leave it out: only GBDTRanker.fit takes groups, as qid"),
        ("loss", "it is called 'objective' here"),  # an option of Pooled, of which it is for linear models
        ("num_trees", "it is called 'n_estimators' here"),
        ("boost_from_average", "it is called 'base_score' here"),
        ("cat_smooth", "leave it out: category_sets says how categories are split"),
        ("rate_drop", "leave it out: no tree is dropped"),  # was "did you mean 'top_rate'?"
        ("first_metric_only", "leave it out: the last eval_metric decides"),
        ("force_row_wise", "leave it out: there is no choice of it"),
        ("tree_method", "leave it out: all trees are grown from histograms"),
        ("booster", "leave it out: boosters are of trees"),
        ("device", "leave it out: training runs on the processor, n_jobs threads"),
        ("missing", "leave it out: None, NaN and null are missing: replace others"),
        ("num_class", "leave it out: classes are what the labels are"),
        ("colour", "docs/options.md lists all options$"),
        ("max_dept", "did you mean 'max_depth'"),
    ],
)
def test_what_other_libraries_have_is_one_sentence(theirs, said):
    with pytest.raises(treaty.ConfigError, match=f"^GBDTClassifier has no parameter '{theirs}'; {said}") as error:
        treaty.GBDTClassifier(**{theirs: 1})
    assert len(str(error.value)) < 160


@pytest.mark.parametrize("kind", [treaty.GBDTClassifier, treaty.GBDTRanker, treaty.LogisticRegression])
@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("init_score", "it is called 'base_margin' here|leave it out: all rows start from the same margin"),
        ("init_model", "it is called 'xgb_model' here|leave it out: only models of trees"),
        ("feature_weights", "leave it out: "),
        ("eval_sample_weight", "it is called 'sample_weight_eval_set' here|.*eval sets all weigh the same"),
        ("eval_names", "leave it out: eval sets are called eval_0"),
        ("X_val", "it is called 'eval_set' here"),
        ("verbos", "did you mean 'verbose'|it belongs|it has X, y"),
        ("n_jobs", r"it belongs to the estimator: \w+\(n_jobs=\.\.\.\)"),
        ("colour", "it has X, y, sample_weight"),
    ],
)
def test_keywords_of_fit_that_there_are_not_are_refused_in_words(kind, theirs, said):
    X, y = real_table("binary")
    more = {"qid": np.zeros(len(y))} if kind is treaty.GBDTRanker else {}
    with pytest.raises(treaty.ConfigError, match=rf"^{kind.__name__}\.fit has no parameter '{theirs}'; {said}"):
        kind().fit(X, y, **more, **{theirs: None})


def test_groups_of_other_libraries_are_called_qid():
    with pytest.raises(treaty.ConfigError, match=r"GBDTRanker\.fit has no parameter 'group'; it is called 'qid' here"):
        treaty.GBDTRanker().fit(*real_table("binary"), qid=np.zeros(500), group=[500])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("reg:squarederror", {}),
        ("reg:linear", {}),
        ("count:poisson", {"objective": "poisson"}),
        ("reg:tweedie", {"objective": "tweedie"}),
        ("reg:gamma", {"objective": "gamma"}),
        ("reg:pseudohubererror", {"objective": "huber"}),
        ("reg:quantileerror", {"objective": "quantile"}),
        ("reg:absoluteerror", {"objective": "quantile", "quantile_alpha": 0.5}),
        ("absolute_error", {"objective": "quantile", "quantile_alpha": 0.5}),
    ],
)
def test_objectives_go_by_xgboosts_names(theirs, ours):
    X, y = real_table("regression", rows=100)
    given, own = (treaty.GBDTRegressor(n_estimators=2, n_jobs=1, **o).fit(X, y) for o in ({"objective": theirs}, ours))
    np.testing.assert_array_equal(given.predict(X), own.predict(X))
    assert given.objective == theirs


@pytest.mark.parametrize(
    "objective", ["binary:logistic", "reg:logistic", "log_loss", "multi:softprob", "multi:softmax"]
)
def test_objectives_of_classes_go_by_xgboosts_names(objective):
    X, y = real_table("binary", rows=100)
    given, own = (treaty.GBDTClassifier(n_estimators=2, n_jobs=1, objective=o).fit(X, y) for o in (objective, None))
    np.testing.assert_array_equal(given.predict_proba(X), own.predict_proba(X))
    with pytest.raises(treaty.ConfigError, match=f"objective='{objective}' needs classes: use GBDTClassifier"):
        treaty.GBDTRegressor(objective=objective).fit(X, y)


def test_rankings_go_by_xgboosts_names():
    X, y = real_table("binary", rows=100)
    for theirs, ours in (("rank:ndcg", "ndcg"), ("rank:pairwise", "pairwise"), ("lambdarank", None)):
        given, own = (
            treaty.GBDTRanker(n_estimators=2, n_jobs=1, objective=o).fit(X, y, qid=np.arange(100) // 10)
            for o in (theirs, ours)
        )
        np.testing.assert_array_equal(given.predict(X), own.predict(X))


@pytest.mark.parametrize("objective", ["reg:gama", "gama", "survival:cox", "binary:hinge", "rank:map"])
def test_an_objective_that_is_not_there_is_never_imported(tmp_path, monkeypatch, objective):
    for name in ("reg", "survival", "binary", "rank", "gama"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(treaty.ConfigError, match=f"one of squared_error, poisson, .* got '{objective}'"):
        treaty.GBDTRegressor(objective=objective).fit(*real_table("regression", rows=100))


def test_an_option_of_one_objective_goes_with_its_other_names():
    X, y = real_table("regression", rows=100)
    treaty.GBDTRegressor(n_estimators=1, objective="reg:quantileerror", quantile_alpha=0.9).fit(X, y)
    with pytest.raises(treaty.ConfigError, match="quantile_alpha needs objective='quantile', got objective='mae'"):
        treaty.GBDTRegressor(n_estimators=1, objective="mae", quantile_alpha=0.9).fit(X, y)


def test_a_job_file_has_xgboosts_names(tmp_path):
    path = tmp_path / "job.toml"
    job = 'name = "n"\nactive = "a"\nlabel = "y"\ntask = "regression"\n[boosting]\nobjective = "reg:squarederror"\n'
    path.write_text(job + '[parties.a]\ntable = "a.csv"\n[parties.b]\ntable = "b.csv"\n')
    assert load_job(path).settings()[1].objective == "squared_error"


@pytest.mark.parametrize("system", ["pooled", treaty.SecureBoost(allow_exact_sums=True)], ids=["pooled", "secureboost"])
def test_functions_are_metrics_of_eval_sets(system):
    X, y = real_table("binary", rows=200)
    parties = None if system == "pooled" else {"bank": list(X.columns[:5]), "shop": list(X.columns[5:])}
    model = treaty.GBDTClassifier(
        system, parties=parties, n_estimators=3, n_jobs=1, eval_metric=[brier_score_loss, "auc"]
    )
    model.fit(X, y, eval_set=(X, y))
    found = model.evals_result_["eval_0"]
    stages = [brier_score_loss(y == model.classes_[1], p[:, 1]) for p in model.staged_predict_proba(X)]
    np.testing.assert_allclose(found["brier_score_loss"], stages, rtol=1e-12)
    assert list(found) == ["brier_score_loss", "auc"]


def test_functions_of_several_classes_and_numbers_are_given_what_xgboost_gives(tmp_path):
    X, y = real_table("multiclass", rows=200)
    given = {"n_estimators": 2, "n_jobs": 1}
    model = treaty.GBDTClassifier(eval_metric=log_loss, **given).fit(X, y, eval_set=(X, y))
    plain = treaty.GBDTClassifier(**given).fit(X, y, eval_set=(X, y))
    np.testing.assert_allclose(model.evals_result_["eval_0"]["log_loss"], plain.evals_result_["eval_0"]["mlogloss"])
    model.save(tmp_path / "model")
    assert treaty.load(tmp_path / "model").eval_metric is None
    X, y = real_table("regression", rows=200)
    model = treaty.GBDTRegressor(eval_metric=mean_absolute_error, **given).fit(X, y, eval_set=(X, y))
    assert model.evals_result_["eval_0"]["mean_absolute_error"][-1] == pytest.approx(
        np.abs(model.predict(X) - y).mean()
    )


def test_a_function_that_is_no_metric_of_probabilities_is_named():
    X, y = real_table("binary", rows=100)

    def auc(labels, predicted):
        return 1.0

    for metric, said in (
        (f1_score, "eval_metric f1_score, given class numbers and probabilities, raised ValueError: Classification"),
        (auc, "with a name that is no metric's here, got 'auc'"),
    ):
        with pytest.raises(treaty.ConfigError, match=said):
            treaty.GBDTClassifier(n_estimators=1, eval_metric=metric).fit(X, y, eval_set=(X, y))
    parties = {"bank": list(X.columns[:5]), "shop": list(X.columns[5:])}
    apart = treaty.GBDTClassifier("secureboost", parties=parties, transport="tls", eval_metric=brier_score_loss)
    with pytest.raises(treaty.ConfigError, match="cannot go to other processes: take transport='memory'"):
        apart.fit(X, y, eval_set=(X, y))


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


def test_with_parties_columns_of_a_dataframe_go_by_name():
    X, y = real_table("binary", rows=100)
    parties = {"bank": list(X.columns[:5]), "shop": list(X.columns[5:])}
    model = treaty.GBDTClassifier(treaty.SecureBoost(allow_exact_sums=True), parties=parties, n_estimators=2, n_jobs=1)
    model.fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X[X.columns[::-1]]), model.predict_proba(X))
    with pytest.raises((ValueError, treaty.ConfigError), match="column"):
        model.predict_proba(X.rename(columns={X.columns[0]: "other"}))


def test_a_folder_may_be_named_by_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    X, y = real_table("binary", rows=100)
    X.select_dtypes("number").to_csv(tmp_path / "t.csv", index=False)
    for table in ("~/t.csv", treaty.read_table("~/t.csv"), treaty.open_table("~/t.csv")):
        treaty.GBDTClassifier(n_estimators=1, n_jobs=1).fit(table, y, checkpoint="~/kept").save("~/model")
    assert (tmp_path / "model" / "model.json").exists()
    assert treaty.load("~/model").n_estimators == 1


def test_advice_is_in_the_words_of_the_library_that_the_table_is_of():
    frame = pl.DataFrame({"x": ["a", "b"] * 20})
    with pytest.raises(treaty.DataError, match=r"convert with \.cast\(pl\.Categorical\)"):
        treaty.GBDTClassifier().fit(frame, [0, 1] * 20)
    with pytest.raises(treaty.DataError, match=r'convert with \.astype\("category"\)'):
        treaty.GBDTClassifier().fit(frame.to_pandas(), [0, 1] * 20)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_estimators": np.array([1, 2])}, "option n_estimators=.*: expected `int \\| None`"),
        ({"objective": np.array(["a"])}, "option objective="),
        ({"class_weight": [1, 2]}, "class_weight to be {label: weight} or 'balanced', got"),
        ({"class_weight": np.array([1, 2])}, "class_weight to be {label: weight}"),
        ({"protocol": "secureboost", "active": ["p"], "parties": {"p": [0, 1], "q": [2]}}, "active to be one of p, q"),
    ],
)
def test_a_value_of_another_type_names_its_parameter(given, said):
    X = np.random.default_rng(0).normal(size=(60, 3))
    with pytest.raises(treaty.ConfigError, match=said):
        treaty.GBDTClassifier(**{"n_jobs": 1, "n_estimators": 1, **given}).fit(X, [0, 1] * 30)


@pytest.mark.parametrize("rows", [[], None, 3], ids=str)
def test_what_is_no_table_to_predict_is_refused_as_to_fit(rows):
    model = treaty.GBDTClassifier(n_estimators=1, n_jobs=1).fit(np.zeros((60, 2)) + np.arange(60)[:, None], [0, 1] * 30)
    for call in (model.predict, lambda X: model.fit(X, [])):
        with pytest.raises(treaty.DataError, match="Expected 2D array"):
            call(rows)


def test_what_fit_has_is_named_and_nothing_else():
    with pytest.raises(treaty.ConfigError, match=r"it has X, y, sample_weight, checkpoint, eval_set$"):
        treaty.PoissonRegressor().fit([[1.0]], [1], exposure=[2])


def test_the_loss_of_a_linear_model_is_of_its_system():
    with pytest.raises(treaty.ConfigError, match=r"LogisticRegression\(Pooled\(loss=\.\.\.\)\)"):
        treaty.LogisticRegression(loss="log_loss")
    with pytest.raises(treaty.ConfigError, match="'scale_pos_weight'; it is called 'class_weight' here"):
        treaty.LogisticRegression(scale_pos_weight=2)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("AUC", "auc"),
        ("roc_auc", "auc"),
        ("binary_logloss", "logloss"),
        ("accuracy", "error"),
        ("neg_log_loss", "logloss"),
    ],
)
def test_metrics_of_other_libraries_are_answered_by_ours(theirs, ours):
    with pytest.raises(treaty.ConfigError, match=f"^expected eval_metric '{ours}' in place of '{theirs}'$"):
        treaty.GBDTClassifier(eval_metric=theirs).fit(*real_table("binary", rows=60))


def test_a_metric_that_needs_classes_is_told_what_it_gets():
    X, y = real_table("binary", rows=60)
    model = treaty.GBDTClassifier(eval_metric=f1_score, n_estimators=2, n_jobs=1)
    with pytest.raises(treaty.ConfigError, match=r"given class numbers and probabilities, .* wrap it in a function"):
        model.fit(X, y, eval_set=(X, y))

    def one_less_f1(labels, p):
        return 1.0 - f1_score(labels, p > 0.5)

    model.set_params(eval_metric=one_less_f1).fit(X, y, eval_set=(X, y))
    assert model.evals_result_["eval_0"]["one_less_f1"][-1] == 1.0 - f1_score(y, model.predict(X))
