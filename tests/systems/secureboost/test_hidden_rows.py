"""``membership="hidden"`` gives the pooled grower's trees and predictions, and refuses what it cannot share."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

import treaty
from marks import slow
from tables import cut, real_table, with_categories, with_gaps
from treaty.crypto.transfer.ahead import Ahead
from treaty.crypto.transfer.hidden_rows import WEIGHT_BYTES
from treaty.data.table import Table, to_table
from treaty.models.checkpoints import Keeper
from treaty.models.trees import forest_of
from treaty.runs.threads import play
from treaty.systems import find_system
from treaty.systems.secureboost import hidden_evaluation, hidden_forest, hidden_partner, hidden_training, hidden_tree
from treaty.systems.secureboost.secureboost import follow_online, predict_online
from treaty.systems.system import LabelledRows, RoleInput, roles_of, star
from treaty.systems.vertical.prediction import Asked
from treaty.trees.ensemble import join_splits

HIDDEN = treaty.SecureBoost(membership="hidden")
OPTIONS = {
    "n_estimators": 3, "max_depth": 3, "min_child_samples": 1, "max_bin": 16, "objective": "logistic_pieces",
    "max_cat_to_onehot": 300,
}  # fmt: skip


class Interrupted(Exception):
    """What a test stops a party with."""


def stop_at_the_third_round(patch: pytest.MonkeyPatch, role: int) -> None:
    """Have the active party (role 0), or its partner, raise Interrupted."""
    grow, rounds = hidden_tree.grow_together, itertools.count()

    def stopping(ends, *given):
        if ends[0].role == role and next(rounds) == 2:
            raise Interrupted
        return (yield from grow(ends, *given))

    patch.setattr(hidden_tree, "grow_together", stopping)


def fit_both(tables: dict, y: np.ndarray, **options):
    options = {**OPTIONS, **options}
    pooled = treaty.GBDTClassifier("pooled", **options).fit(tables, y)
    return treaty.GBDTClassifier(HIDDEN, n_jobs=1, **options).fit(tables, y), pooled


def described(model) -> list[tuple]:
    """Return trees in terms of joined columns, without gains, hess and rows of nodes, which nobody knows here."""
    parts = list(model.parts_.values())
    splits = join_splits([part.splits for part in parts], [len(part.schema.names) for part in parts])
    found = []
    for tree in forest_of(parts).trees:
        inner = tree.left >= 0
        split = splits.base[tree.source[inner]] + tree.record[inner]
        of = [getattr(splits, name)[split].tolist() for name in ("feature", "threshold", "missing_left")]
        found.append((tree.left.tolist(), tree.value.tolist(), *of))
    return found


def assert_lossless(federated, pooled, tables: dict) -> None:
    np.testing.assert_equal(described(federated), described(pooled))
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))


@pytest.mark.parametrize("change", [lambda X: X, with_gaps, with_categories], ids=["plain", "missing", "categories"])
def test_trees_and_predictions_equal_the_pooled_growers(change):
    X, y = real_table("binary")
    tables = cut(change(X), 2)
    assert_lossless(*fit_both(tables, y), tables)


@pytest.mark.parametrize("depth", [1, slow(2), slow(5), 6])
def test_trees_of_every_depth(depth):
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    assert_lossless(*fit_both(tables, y, max_depth=depth, min_child_samples=5), tables)


@pytest.mark.parametrize("owners", ["p0 p1", slow("p1 p0")])
def test_trees_on_samples_of_rows_and_columns(owners):
    X, y = real_table("binary")
    tables = cut(with_gaps(X.iloc[:, :8]), 2)
    tables = {name: tables[name] for name in owners.split()}
    options = {"subsample": 0.6, "colsample_bytree": 0.3, "random_state": 5, "n_estimators": 5}
    assert_lossless(*fit_both(tables, y, **options), tables)


@pytest.mark.parametrize("least", [1e-7, 2.0, slow(0.3), slow(1e9)])
def test_trees_whose_splits_gain_enough(least):
    X, y = real_table("binary")
    tables = cut(with_gaps(X.iloc[:, :8]), 2)
    federated, pooled = fit_both(tables, y, min_split_loss=least, max_depth=5)
    assert_lossless(federated, pooled, tables)
    leaves = [sum(len(tree[0]) for tree in described(fit_both(tables, y, max_depth=5)[1])), *(
        sum(len(tree[0]) for tree in described(of)) for of in (federated, pooled))]  # fmt: skip
    assert (leaves[0] > leaves[1]) == (least > 1e-6)


def with_evals(protocol, tables, y, **options):
    rest = [{name: table.iloc[k::2] for name, table in tables.items()} for k in (0, 1)]
    model = treaty.GBDTClassifier(protocol, n_jobs=1, **{**OPTIONS, **options})
    return model.fit(rest[0], y[::2], eval_set=[(rest[1], y[1::2]), (rest[0], y[::2])])


@pytest.mark.parametrize("options", [
    {}, {"n_estimators": 30, "early_stopping_rounds": 2, "learning_rate": 1.5, "eval_metric": "logloss"},
    {"scale_pos_weight": 3.0, "subsample": 0.5, "random_state": 1, "max_depth": 1},
], ids=["losses", "early stopping", "weights"])  # fmt: skip
def test_losses_of_eval_sets_are_the_pooled_growers(options):
    X, y = real_table("binary", rows=300)
    tables = cut(with_gaps(X.iloc[:, :8]), 2)
    federated, pooled = (with_evals(protocol, tables, y, **options) for protocol in (HIDDEN, "pooled"))
    assert_lossless(federated, pooled, tables)
    assert federated.evals_result_ == pooled.evals_result_
    assert list(federated.evals_result_["eval_0"]) == ["logloss"]
    if "early_stopping_rounds" in options:
        assert federated.best_iteration_ == pooled.best_iteration_ < 28


def test_a_loss_beyond_all_rows_is_refused(monkeypatch):
    X, y = real_table("binary", rows=200)
    honest = hidden_evaluation.loss_of_rows

    def wrong(transfers, margins, labels, fraction, role):
        share = yield from honest(transfers, margins, labels, fraction, role)
        return share + np.uint64(role << 40)

    monkeypatch.setattr(hidden_evaluation, "loss_of_rows", wrong)
    with pytest.raises(treaty.TreatyError, match="expected a share of a loss below 8"):
        with_evals(HIDDEN, cut(X.iloc[:, :4], 2), y)


NUMBERS = {**OPTIONS, "objective": "squared_error_steps"}


@pytest.mark.parametrize(
    ("options", "weighted"),
    [
        ({}, True),
        slow({"n_estimators": 12, "max_depth": 6, "base_score": 100.0}, False),
        slow({"subsample": 0.6, "colsample_bytree": 0.5, "random_state": 3, "learning_rate": 1.0}, True),
        ({"min_split_loss": 5e4, "n_estimators": 2}, False),
    ],
    ids=["weights", "deep", "samples", "least gain"],
)
def test_trees_of_numbers_equal_the_pooled_growers(options, weighted):
    X, y = real_table("regression", rows=300)
    tables, weight = cut(with_gaps(X.iloc[:, :8]), 2), np.arange(len(y)) % 7 + 1 if weighted else None
    pooled = treaty.GBDTRegressor("pooled", **{**NUMBERS, **options}).fit(tables, y, weight)
    federated = treaty.GBDTRegressor(HIDDEN, n_jobs=1, **{**NUMBERS, **options}).fit(tables, y, weight)
    np.testing.assert_equal(described(federated), described(pooled))
    np.testing.assert_array_equal(federated.predict(tables), pooled.predict(tables))
    assert pooled.score(tables, y) > 0.3
    more = {**NUMBERS, **options, "n_estimators": 1}
    further = treaty.GBDTRegressor(HIDDEN, n_jobs=1, **more).fit(tables, y, weight, xgb_model=federated)
    both = treaty.GBDTRegressor("pooled", **more).fit(tables, y, weight, xgb_model=pooled)
    np.testing.assert_equal(described(further), described(both))


def test_numbers_whose_margins_may_leave_their_range_are_refused():
    X, y = real_table("regression", rows=150)
    tables = cut(X.iloc[:, :4], 2)
    model = treaty.GBDTRegressor(HIDDEN, **NUMBERS)
    with pytest.raises(treaty.ConfigError, match="at most 2 eval sets, without weights"):
        model.fit(tables, y, eval_set=[(tables, y)] * 3)
    first = treaty.GBDTRegressor(HIDDEN, **NUMBERS).fit(tables, y)
    with pytest.raises(treaty.ConfigError, match="expected labels as far from the start as the earlier model's"):
        model.fit(tables, y * 1000.0, xgb_model=first)
    model.set_params(learning_rate=20.0, n_estimators=30)
    with pytest.raises(treaty.ConfigError, match="margins may pass"):
        model.fit(tables, y)


@pytest.mark.parametrize("at_once", [8, 2])
def test_several_classes_are_each_against_the_rest(monkeypatch, at_once):
    X, y = real_table("multiclass")
    tables = cut(with_gaps(X.iloc[:, :6]), 2)
    for end in (hidden_training, hidden_partner):
        monkeypatch.setattr(end, "CLASSES_AT_ONCE", at_once)
    monkeypatch.setattr(hidden_training, "FAR", -1.0 if at_once == 2 else 1.0)
    options = {"subsample": 0.8, "colsample_bytree": 0.6, "random_state": 2, "class_weight": {0: 1, 1: 3, 2: 2}}
    federated, pooled = fit_both(tables, y, **options)
    assert len(pooled.classes_) == 3
    assert_lossless(federated, pooled, tables)
    # and from there on
    more = {**OPTIONS, **options, "n_estimators": 1}
    further = treaty.GBDTClassifier(HIDDEN, n_jobs=1, **more).fit(tables, y, xgb_model=federated)
    assert len(described(further)) == 12
    assert_lossless(further, treaty.GBDTClassifier("pooled", **more).fit(tables, y, xgb_model=pooled), tables)


@pytest.mark.parametrize("most", [2, slow(3), 255])
def test_trees_on_rows_of_different_weights(most):
    X, y = real_table("binary")
    tables, weight = cut(with_gaps(X.iloc[:, :8]), 2), np.random.default_rng(most).integers(1, most + 1, len(y))
    weight[:2] = 1, most
    options = {**OPTIONS, "subsample": 0.8, "random_state": 3}
    pooled = treaty.GBDTClassifier("pooled", **options).fit(tables, y, sample_weight=weight)
    federated = treaty.GBDTClassifier(HIDDEN, n_jobs=1, **options).fit(tables, y, sample_weight=weight)
    assert_lossless(federated, pooled, tables)
    assert described(pooled) != described(treaty.GBDTClassifier("pooled", **options).fit(tables, y))
    told = f"that the largest weight of a row is above half of {most + most % 2} and at most {most + most % 2}"
    assert told in federated.disclosures_["p1"]


def test_classes_may_have_whole_weights():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :4], 2)
    assert_lossless(*fit_both(tables, y, scale_pos_weight=5.0, n_estimators=1), tables)
    assert_lossless(*fit_both(tables, y, class_weight={0: 2.0, 1: 7.0}, n_estimators=1), tables)


@pytest.mark.parametrize("weight", [0.5, 1.5, 256.0, 1e-3])
def test_weights_that_are_not_whole_or_stand_out_are_refused(weight):
    X, y = real_table("binary")
    given = np.where(np.arange(len(y)) == 3, weight, 1.0)
    with pytest.raises(
        treaty.ConfigError, match=rf"whole weights from 1 to 255, got {weight:g} and 0 others: multiply"
    ):
        treaty.GBDTClassifier(HIDDEN, **OPTIONS).fit(cut(X.iloc[:, :4], 2), y, sample_weight=given)


def test_the_active_party_may_have_no_columns_and_come_last():
    X, y = real_table("binary")
    tables = {"shop": X.iloc[:, :5], "bank": X.iloc[:, :0]}
    federated = treaty.GBDTClassifier(HIDDEN, n_jobs=1, active="bank", **OPTIONS).fit(tables, y)
    pooled = treaty.GBDTClassifier("pooled", **OPTIONS).fit(tables["shop"], y)
    np.testing.assert_equal(described(federated), described(pooled))
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables["shop"]))


def test_constant_missing_and_single_valued_columns():
    X, y = real_table("binary")
    odd = pd.DataFrame({"same": np.ones(len(y)), "none": np.full(len(y), np.nan), "few": np.arange(len(y)) % 2})
    tables = {"bank": X.iloc[:, :2], "shop": odd}
    assert_lossless(*fit_both(tables, y), tables)


def test_a_table_without_a_split_is_one_leaf():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :4], 2)
    federated, pooled = fit_both(tables, y, min_child_samples=len(y))
    assert_lossless(federated, pooled, tables)
    same = {name: pd.DataFrame({"same": np.ones(len(y))}) for name in ("bank", "shop")}
    without, pooled = fit_both(same, y)
    assert_lossless(without, pooled, same)
    assert all(len(tree.left) == 1 for tree in forest_of(list(federated.parts_.values())).trees)


def test_on_a_far_link_what_later_trees_need_is_made_ahead(monkeypatch):
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    made = []

    class Watched(Ahead):
        def begin_tree(self):
            super().begin_tree()
            made.append(sum(stock.left for stock in self.transfers.products.values()))

    for end in (hidden_training, hidden_partner):
        monkeypatch.setattr(end, "Ahead", Watched)
    monkeypatch.setattr(hidden_training, "FAR", -1.0)
    assert_lossless(*fit_both(tables, y, n_estimators=5, max_depth=2, scale_pos_weight=3.0), tables)
    # of two ends, by tree: the first cannot know, and nothing is made in the last
    assert made[:4] == [0, 0, 0, 0]
    assert min(made[4:10]) > 0


def test_rows_asked_for_one_by_one_have_the_margins_of_a_batch():
    X, y = real_table("binary")
    tables = cut(with_gaps(X.iloc[:, :6]), 2)
    model, _ = fit_both(tables, y)
    whole, expected = {name: to_table(x, party=name) for name, x in tables.items()}, model.decision_function(tables)
    roles, common = roles_of(find_system("secureboost"), list(tables), None, HIDDEN), model._settings()[1]
    rows, told = [[7], [0, 199, 7, 7], [3], list(range(100))], []

    def requests():
        for some in rows:
            yield None  # nothing just now
            own = whole["p0"]
            yield Asked(
                np.array(some, np.int32), Table(own.schema, [c[some] for c in own.columns], len(some)), told.append
            )

    def run(party):
        inputs = RoleInput(
            party=party, options=HIDDEN, common=common, roles=roles,
            data=LabelledRows(whole[party.name], np.empty(0)), part=model.parts_[party.name],
            requests=requests() if party.name == "p0" else None,
        )  # fmt: skip
        return predict_online(inputs) if party.name == "p0" else follow_online(inputs)

    play(dict.fromkeys(tables, run), star(roles, HIDDEN), job="test", protocol="secureboost", timeout=20.0)
    for some, found in zip(rows, told, strict=True):
        np.testing.assert_array_equal(found[:, 0], expected[some])


@pytest.mark.parametrize(("stopped", "task"), [(0, "binary"), (1, "binary"), (1, "multiclass")])
def test_a_training_that_was_stopped_resumes_to_the_same_model(monkeypatch, tmp_path, stopped, task):
    X, y = real_table(task, rows=150)
    tables = cut(with_gaps(X.iloc[:, :6]), 2)
    options = {**OPTIONS, "subsample": 0.7, "colsample_bytree": 0.5, "random_state": 4, "n_jobs": 1}
    options |= {} if task == "multiclass" else {"early_stopping_rounds": 2}
    evals = {} if task == "multiclass" else {"eval_set": (tables, y)}
    whole = treaty.GBDTClassifier(HIDDEN, **options).fit(tables, y, **evals)
    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop_at_the_third_round(patch, stopped)
        with pytest.raises(Interrupted):
            treaty.GBDTClassifier(HIDDEN, **options).fit(tables, y, checkpoint=tmp_path, **evals)
    # sides would show which rows were in a node
    with pytest.raises(treaty.ConfigError, match="cannot resume with other options: membership=None"):
        treaty.GBDTClassifier(treaty.SecureBoost(), **options).fit(tables, y, checkpoint=tmp_path, **evals)
    resumed = treaty.GBDTClassifier(HIDDEN, **options).fit(tables, y, checkpoint=tmp_path, **evals)
    assert_lossless(resumed, whole, tables)
    assert resumed.evals_result_ == whole.evals_result_


def test_a_training_goes_on_from_a_finished_model():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    first, pooled = fit_both(tables, y)
    options = {**OPTIONS, "n_estimators": 2}
    more = treaty.GBDTClassifier(HIDDEN, n_jobs=1, **options).fit(tables, y, xgb_model=first, eval_set=(tables, y))
    both = treaty.GBDTClassifier("pooled", **options).fit(tables, y, xgb_model=pooled, eval_set=(tables, y))
    assert len(described(more)) == 5
    assert more.evals_result_ == both.evals_result_
    assert_lossless(more, both, tables)


@pytest.mark.parametrize("form", [(3, WEIGHT_BYTES), (1, 8)])
def test_earlier_trees_of_another_form_are_refused(monkeypatch, form):
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    first, _ = fit_both(tables, y)
    forest = hidden_forest.HiddenForest
    monkeypatch.setattr(hidden_forest, "HiddenForest", lambda *given: forest(*given[:2], *form))
    with pytest.raises(treaty.TreatyError, match=r"expected trees of (at most )?1 outputs"):
        treaty.GBDTClassifier(HIDDEN, n_jobs=1, **OPTIONS).fit(tables, y, xgb_model=first)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"objective": None}, "objective to be 'logistic_pieces' or 'squared_error_steps', got None: others sort"),
        ({"eval_metric": "auc"}, "eval_metric to be left out, got 'auc': others sort all rows"),
        ({"max_depth": 7}, "max_depth"),
        ({"goss": True}, "goss"),
        ({"fractional_bits": 15}, "fractional_bits"),
        (
            {"interaction_constraints": [["p0.mean radius", "p0.mean texture"]]},
            "interaction_constraints .*: which columns",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(changed, named):
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match=rf'membership="hidden" needs {named}'):
        treaty.GBDTClassifier(HIDDEN, **{**OPTIONS, **changed}).fit(cut(X.iloc[:, :4], 2), y)


@pytest.mark.parametrize("objective", ["quantile", "huber", "mae"])
def test_other_losses_of_numbers_are_refused_with_the_reason(objective):
    X, y = real_table("regression", rows=60)
    model = treaty.GBDTRegressor(HIDDEN, **{**OPTIONS, "objective": objective})
    with pytest.raises(treaty.ConfigError, match=r"'squared_error_steps', got '\w+': others sort residuals, divide or"):
        model.fit(cut(X.iloc[:, :4], 2), y)


def test_decisions_of_hidden_rows_are_not_shown():
    own = treaty.SecureBoost(membership="hidden", inference="plain")
    with pytest.raises(treaty.ConfigError, match="membership=\"hidden\" needs inference to be 'shared', got 'plain'"):
        treaty.GBDTClassifier(own, **OPTIONS).fit(cut(real_table("binary")[0].iloc[:, :4], 2), real_table("binary")[1])


def test_eval_sets_and_many_categories_are_refused():
    X, y = real_table("binary")
    tables, model = cut(X.iloc[:, :4], 2), treaty.GBDTClassifier(HIDDEN, **OPTIONS)
    few = {name: table.iloc[:99] for name, table in tables.items()}
    for eval_sets in ([(few, y[:99])], [(tables, y, np.ones(len(y)))], [(tables, y)] * 3):
        with pytest.raises(
            treaty.ConfigError, match=r"at most 2 eval sets, without weights, and of at least 100 rows for each"
        ):
            model.fit(tables, y, eval_set=eval_sets)
    many = {"p0": X.iloc[:, :2], "p1": pd.DataFrame({"c": pd.Categorical(np.arange(len(y)) % 5)})}
    with pytest.raises(treaty.ConfigError, match="max_cat_to_onehot"):
        treaty.GBDTClassifier(HIDDEN, **{**OPTIONS, "max_cat_to_onehot": 4}).fit(many, y)


def test_numbers_that_do_not_fit_are_refused_before_anything_is_shared():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :4], 2)
    with pytest.raises(treaty.ConfigError, match="cannot hold these sums: weights of leaves take"):
        treaty.GBDTClassifier(HIDDEN, **OPTIONS, reg_lambda=1e12).fit(tables, y)


def test_margins_that_may_leave_their_range_are_refused():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :4], 2)
    options = {**OPTIONS, "n_estimators": 60, "max_depth": 2, "learning_rate": 8.0}
    with pytest.raises(treaty.ConfigError, match="margins may pass 120"):
        treaty.GBDTClassifier(HIDDEN, **options).fit(tables, y)
