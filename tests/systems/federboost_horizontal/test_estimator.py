"""Whole fits between participants that hold rows: the pooled grower's model, at all of them, and what it leaves out."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pytest
import xgboost
from sklearn.base import clone
from sklearn.metrics import roc_auc_score

import treaty
from flat import flat, own_and_common
from marks import slow
from runs.test_resume import Interrupted
from tables import real_table, with_categories, with_gaps
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.errors import ConfigError, DataError
from treaty.models.checkpoints import Keeper, checkpoint_file, load_checkpoint
from treaty.models.trees import load_part, record_split
from treaty.runs import fit as runs
from treaty.systems.federboost_horizontal import federboost_horizontal as by_row
from treaty.systems.federboost_horizontal.system import SYSTEM
from treaty.systems.federboost_horizontal.trees import TreeMember
from treaty.systems.horizontal import quantiles
from treaty.systems.horizontal.quantiles import shown_by_search
from treaty.systems.horizontal.rows import RowsDescription, all_columns
from treaty.systems.options import SystemOptions, names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import objective_for
from treaty.systems.system import LabelledRows, PartySpec
from treaty.trees.boosting import Boosting, Forest
from treaty.trees.columns import ColumnSource, grow_trees
from treaty.trees.ensemble import SplitTable

PROTOCOL = "federboost-horizontal"
TREES = 4
OPTIONS = {"protocol": PROTOCOL, "n_estimators": TREES, "min_child_samples": 5, "max_bin": 12, "n_jobs": 1}
TASKS = ["binary", "multiclass", "regression"]
NAMES = ["north", "south", "east", "west", "centre"]
REPOSITORY = Path(__file__).parents[3]


def estimator(task, **options):
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    return flat(kind, **{**OPTIONS, "base_score": 150.0 if task == "regression" else 0.5, **options})


def share_out(X, y, participants=3, seed=0):
    """Deal rows to participants, unevenly."""
    weights = np.arange(participants, 0, -1.0)
    who = np.random.default_rng(seed).choice(participants, len(y), p=weights / weights.sum())
    return {name: (X[who == k], y[who == k]) for k, name in enumerate(NAMES[:participants])}


def pooled_rows(rows):
    """Return all participants' rows one below the other: X, y and weights."""
    tables = [given[0] for given in rows.values()]
    if isinstance(tables[0], np.ndarray):
        X = np.concatenate(tables)
    else:  # which makes text of categories that differ
        X = pd.concat(tables, ignore_index=True)
        X = X.astype({name: "category" for name in X if X[name].dtype == "str"})
    weights = [np.ones(len(given[1])) if len(given) == 2 else given[2] for given in rows.values()]
    weight = None if all(len(given) == 2 for given in rows.values()) else np.concatenate(weights)
    return X, np.concatenate([np.asarray(given[1]) for given in rows.values()]), weight


@pytest.fixture
def seen(monkeypatch):
    """Return what later fits leave behind: the bins that were found, and every participant's part."""
    kept = {}
    lead_search, train = quantiles.lead_search, runs.train_in_threads

    def searching(*arguments, **options):
        found = lead_search(*arguments, **options)
        kept["bins"] = found.bins
        return found

    def training(run, keepers):
        played = train(run, keepers)
        kept["parts"] = played.results
        return played

    monkeypatch.setattr(quantiles, "lead_search", searching)
    monkeypatch.setattr(runs, "train_in_threads", training)
    return kept


def grown_on_one_table(model, rows, bins=None):
    """Grow the trees of the pooled grower on its own cuts, or on these."""
    X, y, weight = pooled_rows(rows)
    table = to_table(X, schema=model.schemas_["pooled"])
    classes = model.classes_.tolist() if hasattr(model, "classes_") else None
    target = y.astype(float) if classes is None else np.searchsorted(model.classes_, y).astype(float)
    own = model.protocol if isinstance(model.protocol, SystemOptions) else treaty.FederBoostHorizontal()
    names = names_of(BoostingOptions)
    common = BoostingOptions(**{name: value for name, value in model.get_params().items() if name in names}).checked(
        own
    )
    objective = objective_for(LabelledRows(table, target, weight), classes, own, common)
    bins = bins or fit_bins(table, common.most_bins, 1, max_categories=common.most_categories)
    splits, forest = SplitTable(), Forest(objective, ("pooled",), classes, parallel=common.num_parallel_tree)
    categorical = np.array([kind is not None for kind in table.schema.categories], np.bool_)
    source = ColumnSource(
        bins.transform(table, 1), bins.offsets, categorical, lambda f, left: record_split(splits, bins, f, left), 1
    )
    rules = common.rules(objective)
    grow_trees(Boosting(target, weight, forest, rules, common.plan(len(categorical))), [source])
    return forest, splits


def same_trees(ours, theirs):
    """Compare trees bit for bit with the pooled grower's, whose gains are told to three digits, in all but covers."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("source", "left", "record", "value"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name, strict=True)
        np.testing.assert_allclose(one.gain, [float(f"{gain:.2e}") for gain in other.gain], rtol=1e-12)


def check_fit(seen, rows, task="binary", *, must_split=True, **options):
    """Fit; the model is the pooled grower's, bit for bit, and the same at all participants."""
    model = estimator(task, **options).fit(rows)
    part = model.parts_["pooled"]
    forest, splits = grown_on_one_table(model, rows, seen["bins"] if options.get("bins") == "approximate" else None)
    assert any(len(tree.left) > 1 for tree in forest.trees) == must_split
    same_trees(part.forest.trees, forest.trees)
    assert repr(part.splits) == repr(splits)  # NaN is not equal to itself
    assert part.forest.objective == forest.objective
    parties = set(rows) | ({model.active} if model.active else set())
    assert set(seen["parts"]) == parties
    for name, own in seen["parts"].items():
        assert own.party == name
        assert own.forest.sources == (name,)
        assert own.forest.classes == forest.classes
        assert own.schema == part.schema
        assert own.forest.trees == part.forest.trees
        assert repr(own.splits) == repr(splits)
    return model


# ---------------------------------------------------------------- the pooled grower's model


@pytest.mark.parametrize(("participants", "active"), [(3, "east"), slow(5, None), slow(3, "aggregator")])
@pytest.mark.parametrize("task", TASKS)
def test_trees_equal_the_pooled_growers_at_every_participant(seen, task, participants, active):
    X, y = real_table(task)
    model = check_fit(seen, share_out(X, y, participants), task, active=active)
    assert model.n_iter_ == TREES


@pytest.mark.parametrize("task", ["binary", slow("regression")])
def test_approximate_bins_are_others_and_trees_the_pooled_growers_on_them(seen, task):
    X, y = real_table(task)
    model = check_fit(seen, share_out(X, y), task, bins="approximate")
    exact = estimator(task).fit(share_out(X, y))
    assert repr(model.parts_["pooled"].splits) != repr(exact.parts_["pooled"].splits)
    assert any("two values next to every cut" in fact for fact in exact.disclosures_["north"])
    assert not any("two values next to every cut" in fact for fact in model.disclosures_["north"])


def awkward(n, seed):
    """Draw a table of all kinds of columns; as float64, whole numbers beyond float32, categories of two sizes."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame({
        "smooth": rng.normal(size=n),
        "zeros": np.where(rng.random(n) < 0.9, 0.0, rng.lognormal(8, 2, n)),
        "ties": rng.integers(0, 300, n) / 7,
        "few": rng.choice([-1.5, 0.1, 2.0], n),
        "gaps": np.where(rng.random(n) < 0.3, np.nan, rng.exponential(size=n)),
        "constant": 7.1,
        "nothing": np.nan,
        "time": 1_700_000_000_000 + rng.integers(0, 10**9, n),
        "offset": 1e9 + rng.random(n),
        "place": pd.Categorical(rng.choice([f"level{k}" for k in range(300)], n)),
        "kind": pd.Categorical(rng.choice(list("abc"), n)),
    })  # fmt: skip


@pytest.mark.parametrize(("task", "ends", "max_bin"), [
    ("binary", [300], 16), ("multiclass", [1, 150], 5), ("regression", [250, 251, 270, 400], 255),
])  # fmt: skip
@pytest.mark.parametrize("weighted", [False, slow(True)])
def test_models_are_those_of_one_table_by_public_names(task, ends, max_bin, weighted):
    """Participants have 1 row and more, categories of their own, and weights of different kinds."""
    n = 500
    X, new = awkward(n, 1), awkward(200, 2)
    new["place"] = new["place"].cat.set_categories(X["place"].cat.categories)  # others are missing
    score = X["smooth"] + (X["gaps"] > 1) + (X["kind"] == "a") + (X["place"].cat.codes % 7 == 0)
    y = score.to_numpy() if task == "regression" else (score > 3).to_numpy().astype(int)  # few are 1
    y = y + (score > 1.5).to_numpy() if task == "multiclass" else y
    rng = np.random.default_rng(3)
    weight = np.where(np.arange(n) < ends[0], rng.integers(0, 3, n), rng.gamma(2.0, 3.0, n))
    weight[ends[0] - 1] = 1.0  # not all of a participant's rows weigh nothing
    options = {
        "n_estimators": 4, "max_depth": 4, "learning_rate": 0.3, "min_child_samples": 4, "max_bin": max_bin,
        "n_jobs": 1,
    }  # fmt: skip
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    rows = {}
    for k, part in enumerate(np.split(np.arange(n), ends)):
        own = X.iloc[part].copy()
        own["place"] = own["place"].cat.remove_unused_categories()
        rows[NAMES[k]] = (own, y[part], weight[part]) if weighted else (own, y[part])
    together = kind(**options).fit(X, y, sample_weight=weight if weighted else None)
    protocol = treaty.FederBoostHorizontal(mode="paper" if len(rows) == 2 else "safe")
    apart = kind(protocol, **options).fit(rows)
    ours, theirs = apart.parts_["pooled"], together.parts_["pooled"]
    assert ours.schema == theirs.schema
    assert ours.forest.objective == theirs.forest.objective
    same_trees(ours.forest.trees, theirs.forest.trees)
    assert repr(ours.splits) == repr(theirs.splits)
    assert {0, 9} <= set(ours.splits.feature)
    predict = "predict" if task == "regression" else "predict_proba"
    np.testing.assert_array_equal(getattr(apart, predict)(new), getattr(together, predict)(new))


@pytest.mark.parametrize("task", ["binary", slow("multiclass")])
def test_forests_equal_the_pooled_growers(seen, task):
    X, y = real_table(task)
    options = {"num_parallel_tree": 2, "colsample_bytree": 0.5, "random_state": 4}
    model = check_fit(seen, share_out(with_gaps(X), y), task, **options)
    assert model.n_iter_ == TREES


@pytest.mark.parametrize(("task", "leaves"), [("binary", 9), slow("multiclass", 6)])
def test_trees_by_best_gain_equal_the_pooled_growers(seen, task, leaves):
    X, y = real_table(task)
    model = check_fit(seen, share_out(with_gaps(X), y), task, max_leaves=leaves, max_depth=None, min_child_samples=1)
    assert {int((tree.left < 0).sum()) for tree in model.parts_["pooled"].forest.trees} == {leaves}


@pytest.mark.slow
@pytest.mark.parametrize("change", [with_gaps, with_categories, lambda X: with_gaps(with_categories(X))])
@pytest.mark.parametrize("active", ["south", "aggregator"])
def test_trees_on_gaps_and_categories_equal_the_pooled_growers(seen, change, active):
    X, y = real_table("binary")
    check_fit(seen, share_out(change(X), y), active=active)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_trees_on_weighted_rows_equal_the_pooled_growers(seen, task):
    X, y = real_table(task)
    rows = share_out(X, y)
    rng = np.random.default_rng(1)
    weighted = {name: (*given, rng.gamma(2.0, k + 1.0, len(given[1]))) for k, (name, given) in enumerate(rows.items())}
    weighted["south"] = rows["south"]  # no weights: every row counts once
    check_fit(seen, weighted, task)
    assert seen["parts"]["north"].forest.trees != estimator(task).fit(rows).parts_["pooled"].forest.trees


@pytest.mark.parametrize("objective", ["poisson", "tweedie", None, slow("huber")])
@pytest.mark.parametrize("active", ["east", slow("aggregator")])
def test_a_regression_starts_from_the_mean_of_all_labels(seen, objective, active):
    X, y = real_table("regression")
    rows = share_out(X, y)
    rng = np.random.default_rng(1)
    rows["north"] = (*rows["north"], rng.gamma(2.0, 3.0, len(rows["north"][1])))  # the others' count once
    given = {"objective": objective, "active": active, "fractional_bits": 20}
    mean = np.average(pooled_rows(rows)[1], weights=pooled_rows(rows)[2])
    if objective == "huber":  # whose median no sums tell
        model = estimator("regression", base_score=None, **given).fit(rows)
        assert model.parts_["pooled"].forest.objective.base_score == pytest.approx(mean)
        return
    model = check_fit(seen, rows, "regression", base_score=None, **given)
    assert model.parts_["pooled"].forest.objective.base_score == pytest.approx(mean)
    assert model.clipped_rows_ == 0


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_classes_start_from_their_shares_of_all_rows(seen, task):
    """Where weights are uneven, and no participant has rows of all classes."""
    X, y = real_table(task)
    at = {name: np.flatnonzero(np.asarray(y) % 3 == k) for k, name in enumerate(NAMES[:3])}
    at = {name: of if len(of) else np.flatnonzero(y == 0)[:9] for name, of in at.items()}
    rows = {name: (X.iloc[of], np.asarray(y)[of]) for name, of in at.items()}
    assert all(len(set(labels)) < len(set(y)) for _, labels in rows.values())
    rows["south"] = (*rows["south"], np.random.default_rng(1).gamma(2.0, 3.0, len(rows["south"][1])))
    check_fit(seen, rows, task, base_score=None)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_columns_are_drawn_as_the_pooled_grower_draws_them(seen, task):
    X, y = real_table(task)
    check_fit(seen, share_out(X, y), task, colsample_bytree=0.4, random_state=3, max_depth=5)


def test_a_category_that_one_participant_alone_has_is_known_to_all(seen):
    X, y = real_table("binary")
    X = with_categories(X)
    name = X.columns[0]
    rows = share_out(X, y)
    of_south = rows["south"][0]
    of_south = of_south.assign(**{name: of_south[name].cat.rename_categories({"c": "moon"})})
    rows["south"] = of_south, rows["south"][1]
    model = check_fit(seen, rows)
    known = model.schemas_["pooled"].categories[0]
    assert list(known) == [*X[name].cat.categories, "moon"]  # in an order of its own
    assert all("moon" in part.schema.categories[0] for part in seen["parts"].values())
    assert 0 in model.parts_["pooled"].splits.feature


@pytest.mark.parametrize(
    ("of_each", "found"),
    [
        ([["a", "c"], ["b"]], ["a", "b", "c"]),
        ([["low", "mid", "high"], ["low", "high"]], ["low", "mid", "high"]),
        ([["low", "high"], ["mid", "low"]], ["low", "high", "mid"]),
        ([[3, 7], [5]], [3, 5, 7]),
        ([["a"], [1, 2]], ["a"]),
        ([["a"], [1, "b"]], ["a", "b"]),
        ([None, ["a"]], None),
        ([["a"], None], ["a"]),
        ([[], ["b"]], ["b"]),
    ],
    ids=str,
)
def test_categories_are_in_the_order_of_one_table(of_each, found):
    described = [RowsDescription(["place"], [of], [False], None) for of in of_each]
    assert all_columns(described) == (["place"], [found], {})


def test_a_column_that_a_participant_lacks_is_missing_there(seen):
    X, y = real_table("binary")
    rows = share_out(with_categories(X), y)
    lacked = [X.columns[0], X.columns[1]]  # one of categories, one of numbers
    rows["south"] = rows["south"][0].drop(columns=lacked), rows["south"][1]
    rows["east"] = rows["east"][0].iloc[:, ::-1], rows["east"][1]
    model = check_fit(seen, rows, active="south")  # columns are the first participant's, whoever leads
    assert model.n_features_in_ == X.shape[1]
    assert model.feature_names_in_.tolist() == X.columns.tolist()


def test_columns_without_values_are_never_split(seen):
    X, y = real_table("binary")
    X = X.assign(constant=7.0, nothing=np.nan)
    model = check_fit(seen, share_out(X, y))
    assert model.feature_importances_[-2:].tolist() == [0.0, 0.0]


def test_a_table_of_nothing_to_split_gives_the_mean(seen):
    y = np.array([0, 1, 1] * 20)
    model = check_fit(seen, share_out(np.full((60, 2), [3.0, np.nan]), y), must_split=False, n_estimators=60)
    np.testing.assert_allclose(model.predict_proba(np.zeros((1, 2)))[0, 1], 2 / 3, atol=0.01)


def test_participants_may_have_one_class_or_one_row(seen):
    X, y = real_table("multiclass")
    rows = {f"clinic {label}": (X[y == label], y[y == label]) for label in (0, 1)}
    rows["lab"] = X[y == 2].iloc[:-1], y[y == 2][:-1]
    rows["home"] = X[y == 2].iloc[-1:], y[y == 2][-1:]
    model = check_fit(seen, rows, "multiclass", active="home")
    assert model.classes_.tolist() == [0, 1, 2]
    assert model.score(X, y) > 0.9


def test_rare_positives_of_one_participant_are_found(seen):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 3))
    y = (X[:, 1] > 2.2).astype(int)
    who = rng.integers(0, 3, len(y))
    who[y == 1] = 2
    rows = {name: (X[who == k], y[who == k]) for k, name in enumerate("abc")}
    assert 20 < y.sum() < 60
    assert not rows["a"][1].any()
    model = check_fit(seen, rows, max_bin=100)
    assert roc_auc_score(y, model.predict_proba(X)[:, 1]) > 0.99


@pytest.mark.parametrize("labels", [["no", "yes"], [False, True], [7, -1]], ids=str)
def test_classes_are_those_of_all_participants(labels):
    X, y = real_table("binary")
    named = np.array(labels)[y]
    rows = {"a": (X[y == 0], named[y == 0]), "b": (X[y == 1][:100], named[y == 1][:100])}
    rows["c"] = X[y == 1][100:], pd.Series(named[y == 1][100:]).astype(object).tolist()
    model = estimator("binary").fit(rows)
    assert model.classes_.tolist() == sorted(labels)
    assert np.mean(model.predict(X) == named) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["polars", "numpy", "mixed"])
def test_any_table_gives_the_same_model(kind):
    X, y = real_table("binary")
    rows = share_out(X, y)
    convert = {"polars": pl.from_pandas, "numpy": lambda X: X.to_numpy(), "mixed": lambda X: X}[kind]
    given = {name: (convert(own), y.tolist()) for name, (own, y) in rows.items()}
    if kind == "mixed":
        given["south"] = pl.from_pandas(rows["south"][0]), pl.Series(rows["south"][1])
    expected = estimator("binary").fit(rows)
    model = estimator("binary").fit(given)
    np.testing.assert_array_equal(model.predict_proba(convert(X)), expected.predict_proba(X))
    assert hasattr(model, "feature_names_in_") == (kind != "numpy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "label", "bins"),
    [("credit2.parquet", "default.payment.next.month", 24), ("credit1.parquet", "SeriousDlqin2yrs", 26)],
    ids=["credit cards", "give me some credit"],
)
def test_auc_on_real_credit_data_is_that_of_pooled_training(file, label, bins):
    folders = [folder for folder in (os.environ.get("TREATY_DATA"), REPOSITORY.parent / "shared" / "data") if folder]
    path = next((Path(folder) / file for folder in folders if (Path(folder) / file).is_file()), None)
    if path is None:
        pytest.skip(f"real data set {file} is not here; set TREATY_DATA to the folder that has it")
    X = pd.read_parquet(path)
    y = X.pop(label).to_numpy()
    X = X.drop(columns="ID", errors="ignore")
    options = {"n_estimators": 20, "max_depth": 3, "max_bin": bins}
    aucs = []
    for seed in range(2):  # one cut of the rows alone may tell models of other bins apart by 0.003
        held_out = np.random.default_rng(seed).random(len(y)) < 1 / 3
        together = treaty.GBDTClassifier(**options).fit(X[~held_out], y[~held_out])
        apart = treaty.GBDTClassifier(PROTOCOL, **options).fit(share_out(X[~held_out], y[~held_out]))
        aucs.append([roc_auc_score(y[held_out], m.predict_proba(X[held_out])[:, 1]) for m in (together, apart)])
    pooled, federated = np.mean(aucs, axis=0)
    assert pooled > 0.75
    assert abs(federated - pooled) < 0.002


# ---------------------------------------------------------------- what a fitted model is good for


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_fitted_model_serves_as_a_pooled_one_does(task, tmp_path):
    X, y = real_table(task)
    X = with_gaps(with_categories(X))
    model = estimator(task).fit(share_out(X, y), eval_set=(X, y))
    assert list(model.parts_) == list(model.schemas_) == ["pooled"]
    assert model.parts_["pooled"].forest.sources == ("pooled",)
    assert model.feature_names_in_.tolist() == X.columns.tolist()
    predict = model.predict if task == "regression" else model.predict_proba
    staged = model.staged_predict if task == "regression" else model.staged_predict_proba
    stages = list(staged(X))
    assert len(stages) == TREES == model.n_iter_
    np.testing.assert_allclose(stages[-1], predict(X), rtol=1e-12)
    per_round = 3 if task == "multiclass" else 1
    assert model.predict_leaf(X).shape == (len(y), TREES * per_round)
    (losses,) = model.evals_result_["eval_0"].values()
    assert len(losses) == TREES
    assert losses[-1] < losses[0]
    assert model.feature_importances_.sum() == pytest.approx(1.0)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    assert again.get_params() == model.get_params()
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(again.feature_importances_, model.feature_importances_)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_to_xgboost_predicts_the_same_and_tells_nothing_of_covers(task, tmp_path):
    X, y = real_table(task)
    X = with_gaps(with_categories(X))
    model = estimator(task).fit(share_out(X, y))
    booster = model.to_xgboost()
    margins = booster.predict(xgboost.DMatrix(X, enable_categorical=True), output_margin=True)
    np.testing.assert_allclose(
        margins, model.predict(X) if task == "regression" else model.decision_function(X), rtol=1e-5, atol=1e-5
    )
    trees = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    assert sum(len(tree["sum_hessian"]) for tree in trees) > len(trees)
    assert not any(any(tree["sum_hessian"]) for tree in trees)
    model.save(tmp_path)
    for tree in load_part(tmp_path / "pooled.part").forest.trees:
        assert not tree.cover.any()
        assert not tree.count.any()


def test_what_needs_covers_says_that_they_are_left_out():
    X, y = real_table("binary")
    model = estimator("binary").fit(share_out(X, y))
    for ask in (lambda: model.predict_contributions(X), lambda: model.importances("cover")):
        with pytest.raises(ConfigError, match=r"covers .* leaves these out: from them a participant could reconstruct"):
            ask()
    assert sum(model.importances("count")["pooled"].values()) > TREES


@pytest.mark.slow
def test_early_stopping_watches_the_leaders_rows():
    X, y = real_table("binary", rows=400)
    rows = share_out(X.iloc[:250], y[:250])
    for active in ("north", "aggregator"):
        model = estimator("binary", n_estimators=80, learning_rate=1.0, active=active)
        model.fit(rows, eval_set=[(X, y), (X.iloc[250:], y[250:])], early_stopping_rounds=2)
        assert model.n_iter_ == model.best_iteration_ + 1 < 80
        assert len(model.evals_result_["eval_1"]["logloss"]) > model.n_iter_
        np.testing.assert_array_equal(
            model.predict_proba(X),
            clone(model).set_params(n_estimators=model.n_iter_).fit(rows).predict_proba(X),
        )


def test_fitted_attributes_tell_what_happened():
    X, y = real_table("binary")
    rows = share_out(X, y)
    for active, others in (("south", {"north", "east"}), ("aggregator", {"north", "south", "east"})):
        model = estimator("binary", active=active).fit(rows)
        assert set(model.communication_) == {f"{active} -> {o}" for o in others} | {f"{o} -> {active}" for o in others}
        for pair in model.communication_.values():
            assert pair["bytes"] == sum(pair["by_type"].values()) > 0
        assert all(model.communication_[f"{o} -> {active}"]["by_type"]["MaskedInput"] > 0 for o in others)
        assert model.timings_["total"] >= model.timings_["boosting"] > 0
        assert set(model.disclosures_) == {*others, active}


def test_parameters_are_cloned_and_a_refit_forgets():
    X, y = real_table("binary")
    model = estimator("binary", dropout=None, random_state=1, subsample=0.5, active="aggregator").fit(share_out(X, y))
    again = clone(model)
    assert again.get_params() == model.get_params()
    np.testing.assert_array_equal(again.fit(share_out(X, y)).predict(X), model.predict(X))
    model.set_params(active=None).fit(share_out(X.iloc[:, :5].to_numpy(), y))
    assert model.n_features_in_ == 5
    assert not hasattr(model, "feature_names_in_")
    plain = model.set_params(**treaty.GBDTClassifier().get_params()).fit(X, y)
    assert plain.communication_ == {}


@pytest.mark.slow
def test_threads_are_shared_among_those_that_work_at_once(monkeypatch):
    X, y = real_table("binary")
    given = {}
    for role, program in list(SYSTEM.train.items()):

        def noting(inputs, program=program):
            given[inputs.party.name] = inputs.threads
            return program(inputs)

        monkeypatch.setitem(SYSTEM.train, role, noting)
    estimator("binary", n_jobs=7).fit(share_out(X, y))
    assert given == {"north": 2, "south": 2, "east": 2}
    estimator("binary", n_jobs=7, active="aggregator").fit(share_out(X, y))
    assert given == {"north": 2, "south": 2, "east": 2, "aggregator": 7}
    estimator("binary", n_jobs=2, active="aggregator").fit(share_out(X, y, 5))
    assert given["west"] == 1


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def rows():
    return share_out(*real_table("binary"))


def test_labels_come_with_each_participants_rows_alone(rows):
    _, y = real_table("binary")
    for given in ({"y": y}, {"sample_weight": np.ones(len(y))}):
        with pytest.raises(ConfigError, match="takes labels and weights in X, with each participant's rows"):
            estimator("binary").fit(rows, **given)


def test_labels_may_not_be_left_out_elsewhere():
    with pytest.raises(DataError, match="requires y to be passed"):
        treaty.GBDTClassifier().fit(real_table("binary")[0])


@pytest.mark.parametrize("protocol", ["pooled", "secureboost", "federboost-vertical"])
def test_labelled_rows_are_for_horizontal_protocols(rows, protocol):
    with pytest.raises(DataError, match=r"labels as fit\(X, y\), got \(X, y\) by party, .* 'federboost-horizontal'"):
        treaty.GBDTClassifier(protocol).fit(rows)


def replaced(name, change):
    """Return what replaces a participant's table, labels and weights by what `change` makes of table and labels."""
    return lambda rows: {**rows, name: change(*rows[name])}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda rows: rows["north"][0], "got DataFrame"),
        (lambda rows: {name: own[0] for name, own in rows.items()}, "got DataFrame - at north"),
        (lambda rows: {}, "got no party"),
        (lambda rows: {1: rows["north"]}, "not named by text"),
        (replaced("south", lambda X, y: (X, y, None, None)), "got a tuple of 4 - at south"),
        (replaced("south", lambda X, y: (X,)), "got a tuple of 1 - at south"),
        (replaced("east", lambda X, y: (X, y[:-2])), r"east: expected \d+ labels, .* got \d+"),
        (replaced("east", lambda X, y: (X, None)), "east: requires y to be passed"),
        (replaced("east", lambda X, y: (X, y, [1.0])), r"east: expected \d+ sample weights, .* got 1"),
        (replaced("east", lambda X, y: (X, y, -np.ones(len(y)))), "east: expected sample weights"),
        (replaced("south", lambda X, y: (X.iloc[:0], y[:0])), "south: Found array with 0 sample"),
        (replaced("south", lambda X, y: (X, y.astype(str))), "int at north, str at south"),
        (replaced("south", lambda X, y: (X, y * 1.0)), "int at north, float at south"),
        (lambda rows: {n: (X, np.ones(len(y))) for n, (X, y) in rows.items()}, "one class in all 240 rows"),
        (replaced("south", lambda X, y: (X.assign(shoe=1.0), y)), "south: .*'shoe'"),
        (
            lambda rows: {n: (X.to_numpy()[:, : 12 - (n == "east")], y) for n, (X, y) in rows.items()},
            "of columns at all participants, got north 12, south 12, east 11",
        ),
        (replaced("north", lambda X, y: (X.to_numpy(), y)), "got arrays at north and dataframes at south, east"),
        (replaced("south", lambda X, y: (X.to_numpy().tolist(), y)), "arrays at south and dataframes at north, east"),
    ],
)
def test_wrong_data_is_named(rows, given, message):
    with pytest.raises(DataError, match=message):
        estimator("binary").fit(given(rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goss": True}, "goss"),
        ({"encryption": "ou"}, "FederBoostHorizontal has no option 'encryption'"),
        ({"dropout": "accept"}, "expected 4 participants or more, got 3"),
        ({"dropout": "ignore"}, "dropout='ignore'"),
        ({"delta": 1e-5}, "delta goes with epsilon_total"),
        ({"bins": "exact", "epsilon_total": 1.0}, "counts have noise: leave bins out"),
        ({"bins": "equal"}, "bins='equal'"),
        ({"early_stopping_rounds": 2}, "eval_set"),
        ({"active": ""}, "active"),
        ({"active": 3}, "active"),
    ],
    ids=str,
)
def test_wrong_options_are_named(rows, options, message):
    with pytest.raises(ConfigError, match=message):
        estimator("binary", **options).fit(rows)


def test_two_participants_need_consent():
    rows = share_out(*real_table("binary"), 2)
    for active in (None, "aggregator"):
        with pytest.raises(ConfigError, match="expected 3 participants with data or more, got 2"):
            estimator("binary", active=active).fit(rows)
    model = estimator("binary", mode="paper").fit(rows)
    assert any("of a sum" in fact or "a sum of two" in fact for fact in model.disclosures_["north"])


def test_going_on_without_lost_participants_changes_nothing_while_none_is_lost(seen):
    check_fit(seen, share_out(*real_table("binary"), 4), dropout="accept")


def test_prediction_and_eval_sets_take_plain_tables(rows):
    X, y = real_table("binary")
    model = estimator("binary").fit(rows)
    with pytest.raises(DataError, match="predicts one table, got a mapping"):
        model.predict({"north": X})
    with pytest.raises(DataError, match="predicts one table, got a mapping"):
        estimator("binary").fit(rows, eval_set=({"north": X}, y))
    with pytest.raises(DataError, match="in an eval set"):
        estimator("binary").fit(rows, eval_set=(X, y + 1))


# ---------------------------------------------------------------- checkpoints


def stop_leader(monkeypatch, round_):
    """Stop the leader when it starts a round."""
    grow, count = by_row.grow_round, itertools.count()

    def stopping(*arguments):
        if next(count) == round_:
            raise Interrupted
        return grow(*arguments)

    monkeypatch.setattr(by_row, "grow_round", stopping)


def stop_member(monkeypatch, round_):
    """Stop a participant in the midst of a round."""
    take = TreeMember.take

    def stopping(self, step):
        rounds = self._forest.rounds
        asked = take(self, step)
        if rounds == round_ and step.nodes.shape[0]:
            raise Interrupted
        return asked

    monkeypatch.setattr(TreeMember, "take", stopping)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("active", "task", "round_"),
    [
        *(("south", "binary", round_) for round_ in range(TREES)),
        ("south", "multiclass", 2),
        ("south", "regression", 1),
        ("aggregator", "binary", 2),
    ],
)
@pytest.mark.parametrize("stop", [stop_leader, stop_member], ids=["leader", "participant"])
def test_an_interrupted_fit_goes_on_to_the_same_model(monkeypatch, tmp_path, active, task, stop, round_):
    X, y = real_table(task, rows=150)
    rows = share_out(with_gaps(with_categories(X)), y)
    options = {"active": active, "subsample": 0.7, "colsample_bytree": 0.6, "random_state": 4}

    def fit(folder=None, **more):
        return estimator(task, **{**options, **more}).fit(rows, eval_set=rows["north"], checkpoint=folder)

    whole = fit()
    monkeypatch.setattr(Keeper, "due", True)  # however little time has passed
    with monkeypatch.context() as patch:
        stop(patch, round_)
        with pytest.raises(Interrupted):
            fit(tmp_path)
    kept = {path.name for path in tmp_path.glob("*.checkpoint")}
    assert kept == ({f"{name}.checkpoint" for name in {*rows, active}} if round_ else set())
    for name in {*rows, active} if round_ else ():
        assert load_checkpoint(checkpoint_file(tmp_path, name)).rounds == round_
    resumed = fit(tmp_path)
    ours, theirs = resumed.parts_["pooled"], whole.parts_["pooled"]
    assert ours.forest.trees == theirs.forest.trees
    assert repr(ours.splits) == repr(theirs.splits)
    assert resumed.evals_result_ == whole.evals_result_
    assert list(tmp_path.glob("*.checkpoint")) == []


def test_a_resumed_fit_grows_no_finished_round_again_and_searches_no_bins(monkeypatch, tmp_path, rows):
    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop_leader(patch, 3)
        with pytest.raises(Interrupted):
            estimator("binary").fit(rows, checkpoint=tmp_path)
    grown, grow = [], by_row.grow_round
    monkeypatch.setattr(by_row, "grow_round", lambda *arguments: (grown.append(1), grow(*arguments))[1])
    monkeypatch.delattr(quantiles, "lead_search")
    model = estimator("binary", n_estimators=6).fit(rows, checkpoint=tmp_path)
    assert len(grown) == 3
    assert model.n_iter_ == 6


@pytest.mark.parametrize("who", ["north", "south"])
def test_other_rows_are_refused_when_resuming(monkeypatch, tmp_path, rows, who):
    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop_leader(patch, 2)
        with pytest.raises(Interrupted):
            estimator("binary").fit(rows, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match=f"{who}: cannot resume: the training rows"):
        estimator("binary").fit({**rows, who: (rows[who][0] + 1.0, rows[who][1])}, checkpoint=tmp_path)
    checkpoint_file(tmp_path, who).unlink()
    if who == "south":
        with pytest.raises(ConfigError, match=r"expected a checkpoint of model .{8} with 2 rounds, got none"):
            estimator("binary").fit(rows, checkpoint=tmp_path)


@pytest.mark.slow
def test_processes_go_on_from_what_threads_left(monkeypatch, tmp_path, rows):
    rows = {name: (X, np.where(y == 1, "ill", "well")) for name, (X, y) in rows.items()}
    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop_leader(patch, 2)
        with pytest.raises(Interrupted):
            estimator("binary").fit(rows, checkpoint=tmp_path)
    begun = load_checkpoint(checkpoint_file(tmp_path, "north")).part.model_id
    resumed = estimator("binary", transport="tls").fit(rows, checkpoint=tmp_path).parts_["pooled"]
    assert resumed.model_id == begun
    assert resumed.forest.classes == ["ill", "well"]
    assert resumed.forest.trees == estimator("binary").fit(rows).parts_["pooled"].forest.trees


@pytest.mark.slow
@pytest.mark.parametrize("first", [None, "aggregator"])
def test_resuming_under_another_leader_is_refused(monkeypatch, tmp_path, rows, first):
    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop_leader(patch, 2)
        with pytest.raises(Interrupted):
            estimator("binary", active=first).fit(rows, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match=r"^south: cannot resume as the leader: .* set active back to that party"):
        estimator("binary", active="south").fit(rows, checkpoint=tmp_path)
    assert estimator("binary", active=first).fit(rows, checkpoint=tmp_path).n_iter_ == TREES


def test_finished_rounds_survive_a_participant_that_fails_later(monkeypatch, rows):
    X, _ = real_table("binary")
    model = estimator("binary")
    with monkeypatch.context() as patch:
        stop_leader(patch, 2)
        with pytest.raises(Interrupted):
            model.fit(rows)
    shorter = estimator("binary", n_estimators=2).fit(rows)
    np.testing.assert_array_equal(model.predict_proba(X), shorter.predict_proba(X))


# ---------------------------------------------------------------- what is disclosed


def said(lead="north", members=("north", "south", "east"), spent="", **options):
    own, common = own_and_common(PROTOCOL, **options)
    roles = SYSTEM.assign(
        {name: PartySpec(has_rows=name in members) for name in dict.fromkeys([lead, *members])}, lead, own
    )
    learned = SYSTEM.disclosures(roles, own, common, SimpleNamespace(spent=spent))
    return {name: " | ".join(facts) for name, facts in learned.items()}


def test_the_leader_learns_sums_and_participants_the_model():
    learned = said()
    assert list(learned) == ["north", "south", "east"]
    assert "sum of gradients" in learned["north"]
    assert learned["south"] == learned["east"]
    assert "sum of gradients" not in learned["south"]
    assert "the model: splits" in learned["south"]


def test_a_leader_without_data_cannot_take_its_own_rows_off():
    assert "the total minus" in said()["north"]
    learned = said("aggregator")
    assert list(learned) == ["aggregator", "north", "south", "east"]
    assert "the total minus" not in learned["aggregator"]


@pytest.mark.parametrize(
    ("options", "words", "who"),
    [
        ({"min_child_samples": 3}, "leaves of as few as 3 training rows", NAMES[:4]),
        ({"mode": "paper"}, "leaves of as few as 1 training rows", NAMES[:4]),
        ({"dropout": "accept"}, "if a participant is lost and training continues", ["north"]),
        ({"epsilon_total": 2.0}, "than (2, 1e-06) differential privacy", NAMES[:4]),
        ({"epsilon_total": 2.0, "delta": 0.01}, "than (2, 0.01) differential privacy", NAMES[:4]),
        ({"epsilon_total": 2.0}, "under noise, nothing alone; with all others", ["north"]),
        ({"spent": shown_by_search(2)}, "groups of as few as 2 rows, whose values", ["north"]),
    ],
    ids=str,
)
def test_options_that_tell_more_or_less_are_disclosed(options, words, who):
    members = NAMES[:4]
    assert [name for name, facts in said(members=members, **options).items() if words in facts] == who
    assert not any(words in facts for facts in said(members=members).values())


@pytest.mark.slow
def test_noise_is_added_and_its_cost_disclosed(rows):
    quiet, noisy = (estimator("binary", epsilon_total=epsilon).fit(rows) for epsilon in (None, 100.0))
    assert noisy.parts_["pooled"].forest.trees != quiet.parts_["pooled"].forest.trees
    assert any(noisy.parts_["pooled"].spent in fact for fact in noisy.disclosures_["north"])
    assert "epsilon" in noisy.parts_["pooled"].spent


def test_how_small_groups_the_search_parted_is_disclosed(rows):
    model = estimator("binary").fit(rows)
    assert model.parts_["pooled"].spent
    (fact,) = [fact for fact in model.disclosures_["north"] if "between two trial values" in fact]
    assert model.parts_["pooled"].spent in fact


def test_an_empty_column_takes_the_kind_it_has_elsewhere():
    X, y = real_table("binary", rows=300)
    X = X.iloc[:, :3].assign(place=pd.Categorical(np.where(X.iloc[:, 0] > X.iloc[:, 0].median(), "a", "b")))
    parts = {name: (X.iloc[k::3], y[k::3]) for k, name in enumerate(("p0", "p1", "p2"))}
    parts["p0"] = (parts["p0"][0].assign(place=np.full(100, np.nan)), parts["p0"][1])
    model = treaty.GBDTClassifier("federboost-horizontal", n_estimators=2).fit(parts)
    assert model.schemas_["pooled"].categories[3] == ("a", "b")
    assert model.predict(X).shape == (300,)


def test_what_counts_as_missing_is_said(caplog):
    X, y = real_table("binary", rows=300)
    X = X.iloc[:, :3]
    parts = {name: (X.iloc[k::3], y[k::3]) for k, name in enumerate(("p0", "p1", "p2"))}
    parts["p2"] = (parts["p2"][0].iloc[:, 1:], parts["p2"][1])
    treaty.GBDTClassifier("federboost-horizontal", n_estimators=1).fit(parts)
    assert f"p2: column {X.columns[0]!r} is missing in all rows" in caplog.text


def test_targets_beyond_measure_are_refused_where_they_are():
    X, y = real_table("regression", rows=120)
    parts = {name: (X.iloc[k::3], np.asarray(y[k::3]) * 1e35) for k, name in enumerate(("p0", "p1", "p2"))}
    with pytest.raises(treaty.DataError, match="scale them down"):
        treaty.GBDTRegressor("federboost-horizontal", n_estimators=1).fit(parts)


def test_a_model_without_splits_does_not_blame_noise_that_there_is_not(caplog):
    y = np.tile([0, 1], 40)
    tables = {name: (np.zeros((80, 1)), y) for name in ("a", "b", "c")}
    model = treaty.GBDTClassifier("federboost-horizontal", n_estimators=1, n_jobs=1).fit(tables)
    assert len(set(model.predict_proba(np.zeros((4, 1)))[:, 1])) == 1
    assert "noise" not in caplog.text
