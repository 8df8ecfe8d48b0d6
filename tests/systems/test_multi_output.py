"""Multi-output trees (`multi_strategy`): the same on one table and between parties, and in whatever reads a model."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import treaty
from runs.small_jobs import write_job
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.errors import ConfigError
from treaty.runs.job_files import check_training, load_job
from treaty.systems.expected import Trees
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Shape
from treaty.systems.vertical.exact_sums import expected_sides

SMALL = {"n_estimators": 3, "max_depth": 3, "max_bin": 16, "min_child_samples": 3, "n_jobs": 1}
OPTIONS = {**SMALL, "multi_strategy": "multi_output_tree"}
OPEN = treaty.SecureBoost(allow_exact_sums=True)
SYSTEMS = {
    "lattice": OPEN,
    "node": treaty.SecureBoost(encryption="lattice", reveal="node", allow_exact_sums=True),
    "smm": treaty.FedXGBoostSMM(allow_exact_sums=True),
    "dealer": treaty.FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
}


def table(rows=150, categories=True):
    X, y = real_table("multiclass", rows=rows)
    X = with_gaps(X)
    return (with_categories(X) if categories else X), np.array(["low", "mid", "top"])[y]


def trees_of(model):
    return treaty.models.trees.forest_of(list(model.parts_.values())).trees


@pytest.mark.parametrize(
    ("system", "parties", "more"),
    [
        ("lattice", 2, {"max_cat_to_onehot": 4}),
        ("node", 3, {"max_leaves": 6, "max_depth": None}),
        ("dealer", 2, {"num_parallel_tree": 2, "subsample": 0.8, "colsample_bytree": 0.5, "random_state": 0}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            ("lattice", 5, {"reg_alpha": 0.1, "max_delta_step": 0.5}), ("smm", 2, {"max_leaves": 5}),
            ("lattice", 2, {"interaction_constraints": [["p0.alcohol", "p1.ash"], ["p1.hue", "p1.flavanoids"]]}),
        ]),
    ],
)  # fmt: skip
def test_parties_grow_the_trees_of_one_table(system, parties, more):
    X, y = table()
    X["constant"], X["missing"] = 1.0, np.nan
    tables = cut(X, parties)
    if parties == 3:  # an active party without columns
        tables = {"p0": X.iloc[:, :0], "p1": X.iloc[:, :13], "p2": X.iloc[:, 13:]}
    weight = np.random.default_rng(0).exponential(size=len(y))
    fitted = [
        treaty.GBDTClassifier(of, **{**OPTIONS, **more}).fit(tables, y, weight, eval_set=(tables, y))
        for of in (SYSTEMS[system], "pooled")
    ]
    assert_same_trees(*fitted)
    assert fitted[0].evals_result_ == fitted[1].evals_result_
    np.testing.assert_array_equal(fitted[0].predict_proba(tables), fitted[1].predict_proba(tables))
    trees = trees_of(fitted[0])
    assert len(trees) == 9 * more.get("num_parallel_tree", 1)
    assert any(len(tree.left) > 3 for tree in trees)
    for first in range(0, len(trees), 3):
        for other in trees[first : first + 3]:
            np.testing.assert_array_equal(other.left, trees[first].left)
            np.testing.assert_array_equal(other.record, trees[first].record)
    assert len({tuple(tree.value) for tree in trees[:3]}) == 3


def test_two_classes_and_numbers_have_the_trees_that_they_have_anyway():
    for task, kind in (("binary", treaty.GBDTClassifier), ("regression", treaty.GBDTRegressor)):
        X, y = real_table(task, rows=100)
        assert_same_trees(kind(**OPTIONS).fit(X, y), kind(**SMALL).fit(X, y))


def test_gains_are_sums_over_outputs_of_the_best_split():
    X, y = table(categories=False)
    X = X.iloc[:, :3].fillna(0.0)
    model = treaty.GBDTClassifier(
        n_estimators=1, max_depth=1, multi_strategy="multi_output_tree", max_bin=255, min_child_samples=1,
        base_score=0.5, fractional_bits=24, learning_rate=1.0, n_jobs=1,
    ).fit(X, y)  # fmt: skip
    labels = np.unique(y, return_inverse=True)[1]
    grad = 1 / 3 - np.eye(3)[labels]
    hess = np.full(grad.shape, 2 * (1 / 3) * (2 / 3))

    def terms(rows):
        return (grad[rows].sum(0) ** 2 / (hess[rows].sum(0) + 1.0)).sum()

    whole = np.ones(len(X), bool)
    best = max(
        terms(left) + terms(~left) - terms(whole)
        for name in X
        for cut_at in np.unique(X[name])[1:]
        for left in [(X[name] < cut_at).to_numpy()]
        # a weight needs a hess of min_child_weight
        if min(hess[left].sum(0).min(), hess[~left].sum(0).min()) >= 1.0
    )
    trees = trees_of(model)
    assert sum(tree.gain[0] for tree in trees) == pytest.approx(best, rel=1e-5)
    assert trees[0].cover[0] == pytest.approx(hess.sum(), rel=1e-5)
    rows = model.apply(X)[:, 0]
    for leaf in (1, 2):
        mine = rows == leaf
        expected = -grad[mine].sum(0) / (hess[mine].sum(0) + 1.0)
        np.testing.assert_allclose([tree.value[leaf] for tree in trees], expected, rtol=1e-4)


def test_many_categories_are_parted_by_the_mean_of_each_class():
    rng = np.random.default_rng(0)
    code = rng.integers(0, 90, 3000)
    y = (code * 7919 % 90) % 3
    X = pd.DataFrame({"code": pd.Categorical(code.astype(str)), "noise": rng.normal(size=3000)})
    options = {**OPTIONS, "n_estimators": 4, "max_depth": 2, "min_child_samples": 20}
    model = treaty.GBDTClassifier(**options).fit(X[:2000], y[:2000])
    assert model.score(X[2000:], y[2000:]) > 0.99
    with pytest.raises(ConfigError, match="category_sets='sorted' sorts categories by the gradients of one class"):
        treaty.GBDTClassifier(**options, category_sets="sorted").fit(X, y)


def test_whatever_reads_a_model_reads_multi_output_trees(tmp_path):
    X, y = table(categories=False)
    model = treaty.GBDTClassifier(**OPTIONS).fit(X, y)
    model.save(tmp_path / "model")
    margins = model.decision_function(X)
    np.testing.assert_array_equal(treaty.load(tmp_path / "model").decision_function(X), margins)
    stages = list(model.staged_predict_proba(X))
    assert len(stages) == model.n_iter_ == 3
    np.testing.assert_array_equal(stages[-1], model.predict_proba(X))
    added = model.predict_contributions(X)
    np.testing.assert_allclose(added.sum(axis=2), margins, atol=1e-10)
    assert 3 <= min(tree.count.min() for tree in trees_of(model)) < 6
    of_columns = [gain for party in model.importances("gain").values() for gain in party.values()]
    assert sum(of_columns) == pytest.approx(sum(tree.gain.sum() for tree in trees_of(model)))
    xgboost = pytest.importorskip("xgboost")
    exported = model.to_xgboost().predict(xgboost.DMatrix(X), output_margin=True)
    np.testing.assert_allclose(exported, margins, atol=1e-5)


def test_training_resumes_between_rounds_and_goes_on_from_a_finished_model(tmp_path):
    X, y = table()
    tables = cut(X, 2)

    class Stopping:
        def after_iteration(self, model, epoch, evals_log):
            if epoch == 1:
                raise KeyboardInterrupt

    for system in ("pooled", OPEN):
        folder = tmp_path / str(system)[:6]
        once = treaty.GBDTClassifier(system, **OPTIONS).fit(tables, y)
        with pytest.raises(KeyboardInterrupt):
            treaty.GBDTClassifier(system, **OPTIONS, callbacks=[Stopping()]).fit(tables, y, checkpoint=folder)
        assert_same_trees(treaty.GBDTClassifier(system, **OPTIONS).fit(tables, y, checkpoint=folder), once)
        first = treaty.GBDTClassifier(system, **{**OPTIONS, "n_estimators": 1}).fit(tables, y)
        more = treaty.GBDTClassifier(system, **{**OPTIONS, "n_estimators": 2}).fit(tables, y, xgb_model=first)
        assert_same_trees(more, once)


@pytest.mark.parametrize(
    ("protocol", "more", "why"),
    [
        (treaty.SecureBoost(sums="sealed"), {}, "needs multi_strategy to be left out, got multi_output_tree"),
        (treaty.SecureBoost(encryption="ou"), {}, "under 'ou' each row has one encrypted gradient a tree"),
        (treaty.SecureBoost(mechanism="label_rr", epsilon=1.0), {}, "every leaf would have the noise of all classes"),
        (treaty.FedXGBoostSMM(backend="ou"), {}, "under 'ou' each row has one encrypted gradient a tree"),
        (treaty.FedXGBoostSMM(reveal="argmax"), {}, "multi_strategy to be left out"),
        (treaty.FedXGBoostLDP(), {}, "noise of every class would be in every gain"),
        (treaty.FederBoostVertical(), {}, "with one tree for each class alone"),
        ("pooled", {"goss": True}, "goss draws the rows of a tree by the gradients of one class"),
        ("pooled", {"monotone_constraints": {"ash": 1}}, "monotone_constraints bound leaves of one weight"),
        ("pooled", {"multi_strategy": "multi"}, "multi_strategy"),
    ],
)  # fmt: skip
def test_what_cannot_grow_them_says_why(protocol, more, why):
    X, y = table(rows=60, categories=False)
    with pytest.raises(ConfigError, match=why):
        treaty.GBDTClassifier(protocol, **{**OPTIONS, **more}).fit(X if protocol == "pooled" else cut(X, 2), y)


@pytest.mark.parametrize("protocol", [treaty.FederBoostHorizontal(), treaty.FedXGB()])
def test_systems_by_row_say_why(protocol):
    X, y = table(rows=90, categories=False)
    rows = {f"p{k}": (X[k::3].reset_index(drop=True), y[k::3]) for k in range(3)}
    with pytest.raises(ConfigError, match="grow one tree for each class in a round; leave multi_strategy out"):
        treaty.GBDTClassifier(protocol, **OPTIONS).fit(rows)


def test_default_sums_are_open_and_say_so():
    X, y = table(rows=60, categories=False)
    with pytest.raises(ConfigError, match=r"cannot be sealed with multi_strategy=multi_output_tree\); allow"):
        treaty.GBDTClassifier("secureboost", **OPTIONS).fit(cut(X, 2), y)


def test_estimates_count_sums_of_all_classes_and_splits_once():
    shape = Shape(rows=5000, columns={"a": 2}, slots={"a": 64}, classes=10)
    for more in ({}, {"max_leaves": 8}):
        each, together = (
            Trees.of(BoostingOptions(**{**more, **of}).checked(OPEN), shape, 5000)
            for of in ({}, {"multi_strategy": "multi_output_tree"})
        )
        assert together.count * together.asked == each.count * each.asked
        assert together.splits < each.splits / 5
    codes, shown = np.random.default_rng(0).integers(0, 32, (5000, 4)).astype(np.uint8), []
    for more in ({}, {"multi_strategy": "multi_output_tree"}):
        shown.append(expected_sides(codes, OPEN.ciphers, BoostingOptions(n_estimators=2, **more).checked(OPEN), 10, 2))
    assert shown[1] < shown[0] / 2


def test_no_record_is_kept_for_an_audit(tmp_path):
    write_job(tmp_path, "secureboost")
    file = tmp_path / "job.toml"
    text = file.read_text().replace("[boosting]", '[boosting]\nmulti_strategy = "multi_output_tree"')
    file.write_text(text.replace("[parties.a]", '[parties.a]\nkeep_for_audit = "kept"'))
    with pytest.raises(ConfigError, match="audits replay trees of one output: expected no keep_for_audit at a"):
        check_training(load_job(file))
