"""``leaves="shared"``: trees and predictions are the pooled grower's, and no party alone has the weight of a leaf."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

import treaty
from crypto.sealed.test_sealed import play
from systems.secureboost.test_hidden_rows import OPTIONS, Interrupted, assert_lossless, stop_at_the_third_round
from tables import cut, real_table, with_gaps
from treaty.crypto.transfer.hidden_best import opened_reach, reach_of
from treaty.crypto.transfer.stock import open_transfers
from treaty.models.checkpoints import Keeper
from treaty.models.trees import LEAF_BITS, check_part, forest_of
from treaty.systems.secureboost import hidden_partner

SHARED = treaty.SecureBoost(membership="hidden", leaves="shared")
NUMBERS = {**OPTIONS, "objective": "squared_error_steps"}


def fit_both(tables, y, evals=None, **options):
    options = {**OPTIONS, **options}
    pooled = treaty.GBDTClassifier("pooled", **options).fit(tables, y, eval_set=evals)
    return treaty.GBDTClassifier(SHARED, n_jobs=1, **options).fit(tables, y, eval_set=evals), pooled


@pytest.mark.parametrize("parties", [2, 3])
def test_trees_and_predictions_equal_the_pooled_growers(parties):
    X, y = real_table("binary")
    tables = cut(with_gaps(X.iloc[:, :9]), parties)
    federated, pooled = fit_both(tables, y, (tables, y), subsample=0.8, random_state=3)
    assert_lossless(federated, pooled, tables)
    assert federated.evals_result_ == pooled.evals_result_
    shares = [part.leaves for part in federated.parts_.values()]
    assert [of is not None for of in shares] == [True, True, False][:parties]  # the two that compute


def test_several_classes_and_numbers():
    X, y = real_table("multiclass")
    tables = cut(X.iloc[:, :6], 2)
    assert_lossless(*fit_both(tables, y), tables)
    values = X.iloc[:, 0].to_numpy() + 3.0 * y
    pooled = treaty.GBDTRegressor("pooled", **NUMBERS).fit(tables, values)
    shared = treaty.GBDTRegressor(SHARED, n_jobs=1, **NUMBERS).fit(tables, values)
    np.testing.assert_array_equal(shared.predict(tables), pooled.predict(tables))


def test_a_part_alone_has_no_weight():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    rows = []
    for _ in range(12):
        model = treaty.GBDTClassifier(SHARED, n_jobs=1, **OPTIONS).fit(tables, y)
        active, passive = model.parts_.values()
        assert all(np.isnan(tree.value[tree.left < 0]).all() for tree in active.grown.trees)
        check_part(active)
        step = active.shared_leaves.shape[1] >> OPTIONS["max_depth"]
        assert not np.delete(active.shared_leaves, slice(None, None, step), axis=1).any()
        rows.append([of.shared_leaves[:, ::step].ravel() for of in (active, passive)])
    for shares in np.swapaxes(rows, 0, 1):
        # drawn anew in each training, and uniform
        assert all((shares[0] != other).any() for other in shares[1:])
        found = np.bincount(
            np.ascontiguousarray(shares).view(np.uint8).reshape(-1, 4)[:, :3].ravel() >> 4, minlength=16
        )
        expected = found.sum() / 16
        assert chi2.sf(((found - expected) ** 2).sum() / expected, 15) > 1e-6


def test_nothing_of_a_leaf_is_sent(monkeypatch):
    def refuse(*given):
        raise AssertionError(given)

    monkeypatch.setattr(hidden_partner, "WeightShares", refuse)
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    treaty.GBDTClassifier(SHARED, n_jobs=1, **OPTIONS).fit(tables, y)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_training_that_was_stopped_resumes_to_the_same_model(monkeypatch, tmp_path, stopped):
    X, y = real_table("binary", rows=150)
    tables = cut(X.iloc[:, :6], 2)
    whole, pooled = fit_both(tables, y, n_estimators=4)
    monkeypatch.setattr(Keeper, "due", True)
    options = {**OPTIONS, "n_estimators": 4, "n_jobs": 1}
    with monkeypatch.context() as patch:
        stop_at_the_third_round(patch, stopped)
        with pytest.raises(Interrupted):
            treaty.GBDTClassifier(SHARED, **options).fit(tables, y, checkpoint=tmp_path)
    resumed = treaty.GBDTClassifier(SHARED, **options).fit(tables, y, checkpoint=tmp_path)
    assert_lossless(resumed, pooled, tables)
    assert_lossless(whole, pooled, tables)


def test_a_model_goes_on_with_shared_leaves_alone():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    first, pooled = fit_both(tables, y)
    options = {**OPTIONS, "n_estimators": 5, "max_depth": 2}
    more = treaty.GBDTClassifier(SHARED, n_jobs=1, **options).fit(tables, y, xgb_model=first)
    both = treaty.GBDTClassifier("pooled", **options).fit(tables, y, xgb_model=pooled)
    assert_lossless(more, both, tables)
    opened = treaty.SecureBoost(membership="hidden")
    with pytest.raises(treaty.ConfigError, match="cannot continue a model with leaves"):
        treaty.GBDTClassifier(opened, n_jobs=1, **options).fit(tables, y, xgb_model=first)


def test_shares_of_other_models_are_no_weights():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    model, _ = fit_both(tables, y)
    active, passive = model.parts_.values()
    passive.leaves = passive.leaves[:64]
    with pytest.raises(treaty.DataError, match="shares of leaf weights of two parties"):
        forest_of([active, passive])


@pytest.mark.parametrize("least", [1, 1000])  # or trees without a split
def test_a_model_without_splits_of_others_predicts_with_the_partners_shares(least):
    X, y = real_table("binary")
    tables = {"a": X.iloc[:, :4], "b": X.iloc[:, 4:5] * 0.0, "c": X.iloc[:, 5:6] * 0.0}
    federated, pooled = fit_both(tables, y, min_child_samples=least)
    assert [len(part.splits) > 0 for part in federated.parts_.values()] == [least == 1, False, False]
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))
    federated.parts_ = {name: federated.parts_[name] for name in "acb"}
    with pytest.raises(treaty.DataError, match="expected b, which shares the weights of leaves"):
        federated.predict_proba(tables)


def test_a_joined_model_has_the_weights_of_both_parties_shares():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :6], 2)
    tables["p1"] = tables["p1"] * 0.0
    federated, pooled = fit_both(tables, y)
    with pytest.raises(treaty.ConfigError, match="consent and part of p1"):
        federated.to_xgboost()
    with pytest.warns(UserWarning, match="would be made from zeros"):
        joined = federated.to_xgboost(["p1"])
    found, expected = (re.findall(r"leaf=([^,]*)", "".join(of.get_dump())) for of in (joined, pooled.to_xgboost()))
    assert found == expected
    assert len({*found}) > 3


def test_labels_that_change_the_unit_of_weights_are_refused():
    X, y = real_table("binary")
    tables, values = cut(X.iloc[:, :6], 2), X.iloc[:, 0].to_numpy() + 3.0 * y
    first = treaty.GBDTRegressor(SHARED, n_jobs=1, **NUMBERS).fit(tables, values)
    more = treaty.GBDTRegressor(SHARED, n_jobs=1, **{**NUMBERS, "n_estimators": 5})
    for scale in (0.1, 10.0):
        with pytest.raises(treaty.ConfigError, match="expected labels as far from the start"):
            more.fit(tables, values.mean() + scale * (values - values.mean()), xgb_model=first)


def test_it_is_for_hidden_rows():
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match='leaves are for membership="hidden"'):
        treaty.GBDTClassifier(treaty.SecureBoost(leaves="shared"), **OPTIONS).fit(cut(X.iloc[:, :4], 2), y)


def test_margins_that_may_leave_their_range_are_refused():
    X, y = real_table("binary")
    tables = cut(X.iloc[:, :4], 2)
    options = {**OPTIONS, "n_estimators": 60, "max_depth": 2, "learning_rate": 8.0}
    with pytest.raises(treaty.ConfigError, match="margins may pass 120"):
        treaty.GBDTClassifier(SHARED, n_jobs=1, **options).fit(tables, y)


@pytest.fixture(scope="module")
def ends():
    return play(open_transfers(0), open_transfers(1))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_reach_is_the_next_power_of_two_above_all_weights(ends, data):
    near = [0, 1, 15, 16, 17, 31, 32, 255, 256, 4095, 4096, 8191, 8192, (1 << 14) - 1]
    weight = st.sampled_from([*near, *(-of for of in near), -(1 << 14)]) | st.integers(-(1 << 14), (1 << 14) - 1)
    weights = np.array(data.draw(st.lists(st.lists(weight, min_size=4, max_size=4), min_size=1, max_size=3)))
    masks = np.random.default_rng().integers(0, 1 << LEAF_BITS, weights.shape)
    shares = [masks, (weights - masks) % (1 << LEAF_BITS)]
    found = play(*(reach_of(ends[k], shares[k].astype(np.uint64), k) for k in (0, 1)))
    reach = (found[0] + found[1]) & np.uint64((1 << 32) - 1)
    # the least weight, -2^14, counts as the one above it
    tops = np.minimum(np.abs(weights).max(axis=1), (1 << 14) - 1)
    assert reach.tolist() == [1 << (int(of) >> 4).bit_length() for of in tops]
    for limit in (int(reach.max()), int(reach.max()) + 1):
        limits = np.full(len(weights), limit, np.uint64)
        steps = [opened_reach(ends[k], found[k], limits * np.uint64(1 - k), k) for k in (0, 1)]
        assert list(play(*steps)) == [limit <= reach.max()] * 2
