from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.privacy.leaks import attack_auc, cluster_scores, known_label_scores


def planted(n_rows=400, n_trees=8, share=0.3, noise=0.25, unknown=0.1, seed=0):
    """Trees whose two levels follow the labels but for some rows: node 0 or 1, then 0 to 3."""
    rng = np.random.default_rng(seed)
    y = (rng.random(n_rows) < share).astype(int)
    trees = []
    for _ in range(n_trees):
        first = np.where(rng.random(n_rows) < noise, 1 - y, y)
        second = 2 * first + rng.integers(0, 2, n_rows)
        trees.append([np.where(rng.random(n_rows) < unknown, -1, cells).astype(np.int32) for cells in (first, second)])
    return trees, y


def singular_scores(trees, n_rows):
    """The dense oracle: second singular vector of the memberships, scaled by the roots of their margins."""
    columns = [cells == node for tree in trees for cells in tree for node in range(cells.max() + 1)]
    members = np.stack(columns, axis=1).astype(float)
    of_row, of_node = members.sum(1), members.sum(0)
    vectors, _, _ = np.linalg.svd(members / np.sqrt(of_row)[:, None] / np.sqrt(of_node))
    return vectors[:, 1] / np.sqrt(of_row)


def test_scores_are_the_second_singular_vector_of_the_memberships():
    trees, y = planted(unknown=0.05)
    found, expected = cluster_scores(trees, len(y)), singular_scores(trees, len(y))
    assert abs(np.corrcoef(found, expected)[0, 1]) > 1 - 1e-6
    assert found.mean() == pytest.approx(0.0, abs=1e-12)
    assert found.std() == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_attack_finds_planted_labels_without_any_label(share):
    trees, y = planted(share=share)
    scores = cluster_scores(trees, len(y))
    assert attack_auc(scores, y) > 0.95


def test_scores_are_high_for_the_smaller_group():
    trees, y = planted(share=0.2)
    scores = cluster_scores(trees, len(y))
    assert scores[y == 1].mean() > 0 > scores[y == 0].mean()
    trees, y = planted(share=0.8)
    scores = cluster_scores(trees, len(y))
    assert scores[y == 1].mean() < 0 < scores[y == 0].mean()


def test_attack_finds_nothing_where_nodes_do_not_follow_labels():
    trees, _ = planted()
    y = np.random.default_rng(1).integers(0, 2, 400)
    assert attack_auc(cluster_scores(trees, 400), y) < 0.6


def test_known_labels_find_the_others():
    trees, y = planted()
    known = np.concatenate([np.flatnonzero(y == 0)[:10], np.flatnonzero(y == 1)[:10]])
    rest = np.setdiff1d(np.arange(len(y)), known)
    scores = known_label_scores(trees, len(y), known, y[known])
    assert scores[y == 1].mean() > scores[y == 0].mean()
    assert attack_auc(scores[rest], y[rest]) > 0.9


def test_known_label_scores_are_mean_log_odds_of_the_nodes():
    trees = [[np.array([0, 0, 1, 1, -1], np.int32)], [np.array([0, 0, 0, -1, -1], np.int32)]]
    scores = known_label_scores(trees, 5, np.array([0, 2]), np.array([1, 0]))
    both = np.log(2 / 2)  # of the second tree's node: one known row of either label
    np.testing.assert_allclose(scores, [(np.log(2) + both) / 2, (np.log(2) + both) / 2, -np.log(2) / 2, -np.log(2), 0])


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_scores_do_not_depend_on_the_order_of_trees_or_the_numbers_of_nodes(seed):
    trees, y = planted(seed=1)
    rng = np.random.default_rng(seed)
    other = []
    for number in rng.permutation(len(trees)):
        other.append([np.append(rng.permutation(9), -1)[cells].astype(np.int32) for cells in trees[number]])
    np.testing.assert_allclose(cluster_scores(other, len(y)), cluster_scores(trees, len(y)), atol=1e-4)


@pytest.mark.parametrize(
    "trees",
    [[], [[], []], [[np.full(20, -1, np.int32)]], [[np.zeros(20, np.int32)]]],
    ids=["no-trees", "no-levels", "nothing-known", "one-node"],
)
def test_who_saw_nothing_learns_nothing(trees):
    y = np.arange(20) % 2
    assert attack_auc(cluster_scores(trees, 20), y) == 0.5
    assert attack_auc(known_label_scores(trees, 20, np.array([0, 1]), y[:2]), y) == 0.5


def test_rows_never_seen_are_in_the_middle():
    trees, y = planted(unknown=0.0)
    for cells in (cells for tree in trees for cells in tree):
        cells[:30] = -1
    scores = cluster_scores(trees, len(y))
    np.testing.assert_array_equal(scores[:30], 0.0)
    assert attack_auc(scores[30:], y[30:]) > 0.95


def test_auc_counts_either_direction():
    y = np.array([0, 0, 1, 1])
    assert attack_auc(np.array([0.1, 0.2, 0.3, 0.4]), y) == attack_auc(np.array([0.4, 0.3, 0.2, 0.1]), y) == 1.0
