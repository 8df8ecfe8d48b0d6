"""Every attack on FedXGBoost-SMM as published succeeds on messages that parties of a real training recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from smm_attacks import from_totals
from systems.fedxgboost_smm.playing_published import OPTIONS, play_training, to_tables
from tables import cut, real_table
from treaty.attacks import hidden_values as attacks
from treaty.attacks.hidden_values import products_from_transcript
from treaty.crypto.keystream import Keystream
from treaty.data.binning import fit_bins
from treaty.errors import ConfigError
from treaty.messaging.transcript import Transcript
from treaty.systems.fedxgboost_smm import node_products, published
from treaty.systems.fedxgboost_smm.node_products import null_vectors
from treaty.trees.histograms import candidate_columns

pytestmark = pytest.mark.slow

ROWS = 300


@pytest.fixture
def table():
    X, y = real_table("binary", rows=ROWS)
    return to_tables(cut(X.iloc[:, :6], 2)), y.astype(float)


@pytest.fixture
def gradients(monkeypatch):
    """Return a list of each tree's true gradients, float64 (rows, 2)."""
    seen, search = [], published.SplitSearch

    def watching(sources, sample, *args):
        seen.append(np.stack([sample.grad, sample.hess], axis=1).astype(float))
        return search(sources, sample, *args)

    monkeypatch.setattr(published, "SplitSearch", watching)
    return seen


@pytest.fixture
def picked(monkeypatch):
    """Return a list of the null vectors that answers were made with."""
    seen, chosen = [], published.chosen

    def watching(vectors, random):
        seen.append(chosen(vectors, random))
        return seen[-1]

    monkeypatch.setattr(published, "chosen", watching)
    return seen


def train(table, version, **options):
    tables, y = table
    played = play_training(tables, y, version=version, **options)
    who, peer = (("p0", "p1"), ("p1", "p0"))[version - 1]  # who sent null vectors, and attacks the answers
    return products_from_transcript(played.transcripts[who], peer, len(y)), played


def candidates(table, node):
    """Return the passive party's secret: the columns that came back masked."""
    bins = fit_bins(table[0]["p1"], OPTIONS["max_bin"])
    codes = bins.transform(table[0]["p1"])
    kinds = np.zeros(codes.shape[1], np.bool_)
    return candidate_columns(codes[node.answered.rows], node.slots, bins.offsets, kinds)


@pytest.mark.parametrize("version", [1, 2])
def test_the_vectors_picked_at_random_are_told_from_the_others(table, picked, version):
    trees, _ = train(table, version)
    nodes = [node.answered for levels in trees for level in levels for node in level]
    assert len(nodes) == len(picked) > 6
    for node, used in zip(nodes, picked, strict=True):
        np.testing.assert_array_equal(node.used, used)
    assert any(node.used.shape != node.vectors.shape for node in nodes)


def test_rounding_gives_the_active_party_all_bins_of_the_first_tree(table):
    trees, _ = train(table, 1)
    for levels in trees:
        (root,) = levels[0]
        truth = candidates(table, root)
        assert truth.shape[1] > 10
        assert np.mean(attacks.rounded(root.answered, steps=0) == truth) > 0.97  # 32 vectors of 300 rows at most
        np.testing.assert_array_equal(attacks.rounded(root.answered, steps=5), truth)


def test_rounding_gives_passive_parties_the_labels_of_the_first_tree(table):
    trees, _ = train(table, 2)
    root, *_ = trees[0][0]  # a product for each column
    half = 2.0**15  # of 2^16 steps
    guess = attacks.rounded(root.answered, (-half, half), steps=5)[:, 0]
    np.testing.assert_array_equal(guess < 0, table[1] == 1)
    assert roc_auc_score(table[1], -root.answered.masked[:, 0]) > 0.99


def test_trees_add_up_to_the_exact_bins_whatever_vectors_there_are(table):
    trees, _ = train(table, 1, n_estimators=5, null_vectors=240)  # at most 4/5 of the rows
    roots = [levels[0][0] for levels in trees]
    truth = candidates(table, roots[0])
    assert all(np.array_equal(root.slots, roots[0].slots) for root in roots)
    found, known = attacks.solved([root.answered for root in roots], ROWS)
    assert known.all()
    np.testing.assert_allclose(found, truth, atol=1e-6)
    one, known = attacks.solved([roots[0].answered], ROWS)
    assert not known.any()
    assert np.abs(one - truth).max() > 0.01


@pytest.mark.parametrize("tree", [0, 1])
def test_levels_of_one_tree_add_up_to_the_exact_gradients(table, gradients, tree):
    trees, _ = train(table, 2, null_vectors=60)
    nodes = [node.answered for level in trees[tree] for node in level]
    assert len(nodes) > 2
    found, known = attacks.solved(nodes, ROWS)
    both = np.isin(np.arange(ROWS), np.concatenate([node.rows for node in nodes[1:]]))
    assert np.mean(known) > 0.8
    assert known[both].all()
    np.testing.assert_allclose(found[known] / 2**16, gradients[tree][known] / 2**16, atol=1e-6)
    grad, classes = found[known, 0], table[1][known] == 1
    assert grad[classes].max() < grad[~classes].min()
    assert not attacks.solved(nodes[:1], ROWS)[1].any()


def test_many_vectors_leave_the_passive_party_the_labels_by_their_kurtosis(table):
    _, played = train(table, 1, n_estimators=1, max_depth=1, null_vectors=ROWS - 15)
    seen = products_from_transcript(played.transcripts["p1"], "p0", ROWS)
    vectors = seen[0][0][0].answered.vectors
    assert vectors.shape == (ROWS, ROWS - 15)
    found = attacks.two_valued(attacks.left_over(vectors))
    assert abs(np.corrcoef(found, table[1])[0, 1]) == pytest.approx(1.0, abs=1e-9)


def test_few_vectors_do_not_leave_the_passive_party_the_labels(table):
    _, played = train(table, 1, n_estimators=1, max_depth=1)
    seen = products_from_transcript(played.transcripts["p1"], "p0", ROWS)
    found = attacks.two_valued(attacks.left_over(seen[0][0][0].answered.vectors), tries=10, steps=50)
    assert abs(np.corrcoef(found, table[1])[0, 1]) < 0.7


def test_many_columns_leave_one_unknown_that_the_totals_give(table, gradients):
    trees, _ = train(table, 2, null_vectors=1, bit_columns=10**6)
    for levels, truth in zip(trees, gradients, strict=True):
        for node in (node for level in levels for node in level):
            assert node.answered.vectors.shape[1] == 1
            found = from_totals(node.answered, node.totals)
            np.testing.assert_allclose(found, truth[node.answered.rows], atol=1e-3)  # of 2^15 steps


def test_rows_that_two_candidates_differ_in_are_shown_as_they_are(table, gradients):
    trees, _ = train(table, 2)
    shown = 0
    for levels, truth in zip(trees, gradients, strict=True):
        for node in (node.answered for level in levels for node in level):
            rows = node_products.empty_rows(node.vectors)
            np.testing.assert_allclose(node.masked[rows], truth[node.rows[rows]], rtol=1e-12)
            shown += rows.sum()
    assert shown > 0


def test_what_the_equations_do_not_settle_is_not_called_known():
    rng, random = np.random.default_rng(0), Keystream()
    matrix, own = rng.normal(size=(40, 2)), rng.normal(size=(40, 1))
    answers = []
    for _ in range(3):
        vectors = null_vectors(own, 12, random)
        masked = matrix - vectors @ (vectors.T @ matrix)
        answers.append(attacks.NodeExchange(np.arange(40), vectors, masked))
    upper = replace(answers[2], rows=np.arange(40) + 20)
    found, known = attacks.solved(answers[:2], 60)
    assert known.tolist() == [True] * 40 + [False] * 20
    np.testing.assert_allclose(found[:40], matrix, atol=1e-8)
    assert not attacks.solved([upper], 60)[1].any()


def test_a_transcript_without_contents_is_refused():
    transcript = Transcript("bank")
    transcript.record("received", "shop", "BinLayout", 0, 10, b"dropped")
    with pytest.raises(ConfigError, match="with contents"):
        products_from_transcript(transcript, "shop", 10)
