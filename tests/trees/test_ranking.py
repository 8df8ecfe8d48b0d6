"""LambdaMART's derivatives by its formula, pair by pair, and NDCG beside scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sklearn.metrics import ndcg_score

from treaty.errors import ConfigError, DataError
from treaty.trees.objectives import LOSSES, make_objective
from treaty.trees.ranking_losses import PAIRED

KINDS = ["pairwise", "ndcg"]


def rows(n_groups, seed, *, most=50, levels=4, tied=False):
    """Margins, relevance and groups of rows in no order."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(n_groups), rng.integers(1, most, n_groups)).astype(float)
    rng.shuffle(group)
    margins = rng.integers(-2, 3, len(group)) / 2.0 if tied else rng.normal(0, 2, len(group))
    return margins[:, None], np.column_stack([rng.integers(0, levels, len(group)), group]).astype(float)


def slowly(margins, y, by_ndcg):
    """The derivatives of all rows, group by group and pair by pair."""
    grad, hess = np.zeros(len(y)), np.zeros(len(y))
    for group in np.unique(y[:, 1]):
        of_group = np.flatnonzero(y[:, 1] == group)
        ranked = of_group[np.argsort(-margins[of_group, 0], kind="stable")]
        m, relevance, gain = margins[ranked, 0], y[ranked, 0], 2.0 ** y[ranked, 0] - 1
        discount = 1 / np.log2(np.arange(len(ranked)) + 2.0)
        ideal = (np.sort(gain)[::-1] * discount)[:PAIRED].sum()
        if by_ndcg and ideal == 0:
            continue
        g, h, total = np.zeros(len(ranked)), np.zeros(len(ranked)), 0.0
        for i in range(min(PAIRED, len(ranked))):
            for j in range(i + 1, len(ranked)):
                if relevance[i] == relevance[j]:
                    continue
                a, b = (i, j) if relevance[i] > relevance[j] else (j, i)
                weight = abs((gain[i] - gain[j]) * (discount[i] - discount[j])) / ideal if by_ndcg else 1.0
                if m[0] != m[-1]:
                    weight /= abs(m[i] - m[j]) + 0.01
                pull = weight / (1 + np.exp(m[a] - m[b]))
                g[a], g[b], total = g[a] - pull, g[b] + pull, total + 2 * pull
                for k in (a, b):
                    h[k] += 2 * pull / (1 + np.exp(m[b] - m[a]))
        norm = np.log2(1 + total) / total if total else 1.0
        grad[ranked], hess[ranked] = g * norm, h * norm
    return grad, hess


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_derivatives_are_those_of_all_pairs(name, tied):
    margins, y = rows(8, 1, tied=tied)
    objective = make_objective(name, y, None, fractional_bits=30)
    grad, hess, clipped = objective.gradients(margins, y, None)
    expected = slowly(margins, y, name == "ndcg")
    assert clipped == 0
    np.testing.assert_allclose(grad[0] * objective.grad_unit, expected[0], atol=1e-7)
    np.testing.assert_allclose(hess[0] * objective.hess_unit, expected[1], atol=1e-7)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(KINDS),
    n_groups=st.integers(1, 6),
    most=st.integers(2, 80),
    scale=st.sampled_from([0, 1, 1e-3, 50]),
    seed=st.integers(0, 2**32),
)
def test_gradients_of_groups_stay_within_the_public_bounds(name, n_groups, most, scale, seed):
    margins, y = rows(n_groups, seed, most=most, levels=31)
    objective = make_objective(name, y, None)
    grad, hess, _ = objective.gradients(margins * scale, y, None)
    assert np.abs(grad).max() <= objective.grad_bound
    assert 0 <= hess.min() <= hess.max() <= objective.hess_bound
    bound = np.log2(1 + 100.0 * most**2) / 2
    free = replace(objective, grad_clip=2.0**20, fractional_bits=40)  # in which nothing can be clipped
    assert np.abs(free.gradients(margins * scale, y, None)[0]).max() * free.grad_unit <= min(bound, objective.grad_clip)


@pytest.mark.parametrize("name", KINDS)
def test_groups_are_the_same_for_any_threads_and_order_of_rows(name):
    margins, y = rows(300, 2)
    objective = make_objective(name, y, None)
    one, four = (objective.gradients(margins, y, None, threads)[:2] for threads in (1, 4))
    np.testing.assert_array_equal(one, four)
    order = np.random.default_rng(0).permutation(len(y))
    np.testing.assert_array_equal(objective.gradients(margins[order], y[order], None)[0], one[0][:, order])


@pytest.mark.parametrize("name", KINDS)
def test_a_group_of_one_row_or_of_equal_labels_pulls_nowhere(name):
    y = np.array([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0], [2.0, 2.0], [2.0, 2.0]])
    grad, hess, _ = make_objective(name, y, None).gradients(np.arange(5.0)[:, None], y, None)
    assert not grad.any()
    assert not hess.any()


def test_the_metric_is_the_mean_ndcg_of_groups():
    margins, y = rows(20, 3, most=30)
    objective, found = make_objective("ndcg", y, None), []
    for group in np.unique(y[:, 1]):
        of = y[:, 1] == group
        gains = 2.0 ** y[of, 0] - 1
        alone = 1.0 if not gains.any() or of.sum() == 1 else ndcg_score([gains], [margins[of, 0]], k=PAIRED)
        found.append(alone)
    assert objective.loss(margins, y, None) == pytest.approx(np.mean(found), rel=1e-9)
    assert objective.loss(y[:, :1], y, None) == 1.0
    assert objective.higher_is_better


def test_weights_are_those_of_groups():
    margins, y = rows(5, 4)
    weight = np.random.default_rng(1).gamma(2.0, 1.0, 5)[y[:, 1].astype(int)]
    plain, weighted = (
        make_objective("ndcg", y, None, fractional_bits=30),
        make_objective("ndcg", y, weight, fractional_bits=30),
    )
    (g, _, _), (w, _, _) = plain.gradients(margins, y, None), weighted.gradients(margins, y, weight)
    np.testing.assert_allclose(w[0] * weighted.grad_unit, g[0] * plain.grad_unit * weight, atol=1e-7)
    weight[0] += 1.0
    with pytest.raises(DataError, match="expected one sample weight for all rows of a group, got several in 1 groups"):
        make_objective("ndcg", y, weight)


@pytest.mark.parametrize("wrong", [-1.0, 0.5, 32.0])
def test_relevance_is_a_whole_number_up_to_31(wrong):
    with pytest.raises(DataError, match="bank: expected relevance as whole numbers from 0 to 31, got 1 others of 2"):
        LOSSES["ndcg"].check_labels(np.array([[wrong, 0.0], [31.0, 0.0]]), "bank")


def test_label_noise_of_a_ranking_is_refused():
    with pytest.raises(ConfigError, match="label_rr"):
        make_objective("ndcg", np.zeros((2, 2)), None, epsilon=1.0)
