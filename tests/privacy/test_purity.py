from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaf_purity import leaf_purity, shares_from_weights
from tables import real_table
from treaty import GBDTClassifier
from treaty.errors import DataError
from treaty.privacy.leaks import held_out_purity


def plain_purity(leaf, y, row_weight):
    """The definition, leaf by leaf: weight of each leaf's largest class, over the weight of all rows."""
    classes = np.unique(y)
    largest = [max(row_weight[(leaf == one) & (y == k)].sum() for k in classes) for one in np.unique(leaf)]
    return sum(largest) / row_weight.sum()


@settings(deadline=None, max_examples=100)
@given(
    n_rows=st.integers(1, 60),
    n_classes=st.integers(2, 5),
    n_trees=st.integers(0, 3),
    scale=st.sampled_from([1, 1000]),
    seed=st.integers(0, 2**32),
)
def test_purity_equals_the_definition_leaf_by_leaf(n_rows, n_classes, n_trees, scale, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, n_classes, n_rows)
    leaves = (scale * rng.integers(0, 6, (n_rows, n_trees))).astype(np.int32)
    found = leaf_purity(leaves, y, n_classes)
    present = np.unique(y)
    prior = np.bincount(y, minlength=n_classes) / n_rows
    for tree in range(n_trees):
        raw = plain_purity(leaves[:, tree], y, np.ones(n_rows))
        balanced = plain_purity(leaves[:, tree], y, 1.0 / (len(present) * prior[y]))
        majority = prior.max()
        assert found.raw[tree] == pytest.approx(raw)
        assert found.balanced[tree] == pytest.approx(balanced)
        assert found.adjusted[tree] == pytest.approx(0.0 if majority == 1 else (raw - majority) / (1 - majority))


def test_purity_of_two_classes_weighs_rows_by_half_the_inverse_prior():
    y = np.repeat([0, 1], [80, 20])
    leaf = np.repeat([0, 1, 0, 1], [70, 10, 5, 15])[:, None].astype(np.int32)
    weights = np.where(y == 1, 1 / (2 * 0.2), 1 / (2 * 0.8))
    found = leaf_purity(leaf, y, 2)
    assert found.raw[0] == pytest.approx(0.85)  # 70 of 75, and 15 of 25
    assert found.balanced[0] == pytest.approx((70 * weights[0] + 15 * weights[-1]) / 100)
    assert found.adjusted[0] == pytest.approx((0.85 - 0.8) / 0.2)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_purity_of_a_single_leaf_says_nothing(n_classes):
    y = np.arange(60) % n_classes
    y[:20] = 0
    found = leaf_purity(np.zeros((60, 1), np.int32), y, n_classes)
    assert found.raw[0] == pytest.approx(np.bincount(y).max() / 60)
    assert found.balanced[0] == pytest.approx(1 / n_classes)
    assert found.adjusted[0] == pytest.approx(0.0)


def test_purity_of_leaves_that_are_classes_is_one_in_every_form():
    y = np.arange(60) % 3
    found = leaf_purity(np.stack([y, 7 * y + 1], axis=1).astype(np.int32), y, 3)
    for form in (found.raw, found.balanced, found.adjusted):
        assert form.dtype == np.float64
        np.testing.assert_allclose(form, [1.0, 1.0])


@pytest.mark.parametrize(
    ("leaves", "y"),
    [
        (np.zeros((3, 1), np.int32), np.zeros(2, np.int64)),
        (np.zeros(3, np.int32), np.zeros(3, np.int64)),
        (np.zeros((0, 1), np.int32), np.zeros(0, np.int64)),
        (np.zeros((3, 1), np.int32), np.array([0, 1, 2])),
        (np.zeros((3, 1), np.int32), np.array([0, 1, -1])),
        (np.full((3, 1), -1, np.int32), np.array([0, 1, 1])),
    ],
    ids=["other-length", "one-axis", "no-rows", "unknown-class", "negative-class", "negative-leaf"],
)
def test_purity_of_unfit_input_is_refused(leaves, y):
    with pytest.raises(DataError):
        leaf_purity(leaves, y, 2)


def test_held_out_purity_counts_the_other_rows_of_a_leaf():
    y = np.array([1, 1, 1, 0, 0, 1, 0])
    # three ones are right by each other; of a pair of different labels neither is; the last row, alone, is no one
    leaves = np.array([[0, 0], [0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 2]], np.int32)
    assert held_out_purity(leaves[:, :1], y, 2)[0] == pytest.approx(5 / 7)
    assert held_out_purity(leaves[:, 1:], y, 2)[0] == pytest.approx(4 / 7)


def test_leaves_of_one_row_tell_nothing_that_is_held_out():
    y = np.array([0, 1, 0, 0, 1])
    assert held_out_purity(np.arange(5, dtype=np.int32)[:, None], y, 2)[0] == pytest.approx(0.6)
    assert leaf_purity(np.arange(5, dtype=np.int32)[:, None], y, 2).raw[0] == 1.0


def test_purity_of_a_fitted_model_is_what_its_leaves_hold():
    X, y = real_table("binary")
    model = GBDTClassifier(protocol="pooled", n_estimators=3, max_depth=2, min_child_samples=5, n_jobs=1).fit(X, y)
    leaves = model.predict_leaf(X)
    found = leaf_purity(leaves, y, 2)
    assert found.raw[0] == pytest.approx(plain_purity(leaves[:, 0], y, np.ones(len(y))))
    assert found.raw[0] > 0.9 > np.bincount(y).max() / len(y)
    assert found.adjusted[0] > 0.7


@pytest.mark.parametrize("base", [0.5, 0.3])
@pytest.mark.parametrize("reg_lambda", [0.0, 1.0, 5.0])
def test_leaf_weights_of_the_first_tree_give_its_purity(base, reg_lambda):
    X, y = real_table("binary")
    given = {"base_score": base, "reg_lambda": reg_lambda, "learning_rate": 0.3, "fractional_bits": 30, "n_jobs": 1}
    model = GBDTClassifier(n_estimators=1, **given).fit(X, y)
    (tree,) = model.parts_["pooled"].forest.trees
    ends = tree.left < 0
    shares = shares_from_weights(tree.value[ends] / 0.3, tree.cover[ends], base=base, reg_lambda=reg_lambda)
    leaves = model.predict_leaf(X)
    expected = [y[leaves[:, 0] == leaf].mean() for leaf in np.flatnonzero(ends)]
    np.testing.assert_allclose(shares, expected, atol=1e-8)
    assert len(expected) > 2
    purity = (tree.count[ends] * np.maximum(shares, 1 - shares)).sum() / len(y)
    assert purity == pytest.approx(leaf_purity(leaves, y, 2).raw[0], abs=1e-8)
    as_printed = base - base * (1 - base) * tree.value[ends] / 0.3
    assert np.abs(as_printed - expected).max() > 0.3
