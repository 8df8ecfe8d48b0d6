"""What each side of safe mode sees: uniform words and counts, of which the attacks on the published form make nothing.

A test of uniformity has one number for its false alarms, `NEVER`. The attacks are those of `attacks`, each
of which succeeds against paper mode (test_attacks.py) and here does no better than by guessing.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from systems.fedxgboost_smm.playing import OPTIONS, play_secure, received, words
from systems.vertical.playing import tables_and_labels
from treaty.attacks.hidden_values import (
    NodeExchange,
    left_over,
    rounded,
    solved,
    two_valued,
)
from treaty.crypto.lattice.ring import unpack
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.lattice_sums import sums_parameters
from treaty.data.binning import fit_bins
from treaty.messaging.messages import Message
from treaty.runs.threads import RunRecord
from treaty.systems.fedxgboost_smm.fedxgboost_smm import (
    AskerSeed,
    DealEnd,
    DealOrder,
    DealRequest,
    DealtShares,
    HolderSeed,
)
from treaty.systems.vertical.exact_sums import node_sets_from_transcript
from treaty.systems.vertical.messages import Hint, NamedRows, SplitRequest, Sums, SumsRequest, TreeStart

ROWS = 240
NEVER = 1e-9
BACKENDS = ["dealer", "lattice", "ou"]
BY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def played() -> dict[str, RunRecord]:
    return {backend: play_secure(backend=backend, n_estimators=4, max_depth=4) for backend in BACKENDS}


def uniform(values: np.ndarray) -> bool:
    counts = np.bincount(np.ascontiguousarray(values).view(np.uint8).ravel(), minlength=256)
    return bool(stats.chisquare(counts).pvalue > NEVER)


def queries(run: RunRecord, name: str = "p1") -> list[np.ndarray]:
    """What a passive party was asked: of each vector (node) an array whose last axis but words is rows."""
    asked = [words(message.payload[0]) for message in received(run.transcripts[name], SumsRequest)]
    return [vector for query in asked for vector in query]


def of_rows(vector: np.ndarray) -> np.ndarray:
    """A number of each row in [0, 1) from a vector of any backend, float64 (rows, 1)."""
    if vector.dtype == np.uint8:  # ciphertexts
        return vector[:, 8:16].copy().view(np.uint64)[:, :1] / 2.0**64
    if vector.dtype == np.uint64:
        return vector[0][:, None] / 2.0**64
    parameters = sums_parameters(SumsBounds(ROWS, 1 << 16, 1 << 14))
    return unpack(parameters, vector[None], ROWS)[0, 0][:, None] / parameters.primes[0]


def test_messages_are_those_of_the_protocol_and_no_others(played):
    steps = {entry.step for transcript in played["dealer"].transcripts.values() for entry in transcript.entries}
    kinds: list[type[Message]] = [TreeStart, SumsRequest, Sums, SplitRequest, Hint]
    kinds += [DealOrder, AskerSeed, HolderSeed, DealRequest, DealtShares, DealEnd]
    others = {"Terms", "Verdict", "BinLayout", "Setup", "HintReceipt", "SplitColumns", "TreeEnd", "Finish"}
    others.add("RevealedShare")
    assert steps == {kind.__name__ for kind in kinds} | others


# ---------------------------------------------------------------- the passive party


@BY_BACKEND
def test_a_passive_party_is_told_no_rows(played, backend):
    transcript = played[backend].transcripts["p1"]
    assert all(start.rows is None for start in received(transcript, TreeStart))
    assert len(received(transcript, SplitRequest)) > 2
    assert not received(transcript, NamedRows)


@BY_BACKEND
def test_a_passive_party_has_nothing_to_cluster_rows_by(played, backend):
    trees = node_sets_from_transcript(played[backend].transcripts["p1"], ROWS)
    assert trees == [[], [], [], []]


def test_what_a_passive_party_is_sent_is_uniform(played):
    transcript = played["dealer"].transcripts["p1"]
    vectors = queries(played["dealer"])
    assert len(vectors) >= 12
    assert all(uniform(vector) for vector in vectors)
    assert uniform(np.stack(vectors))
    for one, other in pairwise(vectors):
        assert uniform(one - other)  # masks of their own: differences show no more
    assert uniform(np.concatenate([words(dealt.shares).ravel() for dealt in received(transcript, DealtShares)]))


@BY_BACKEND
def test_queries_have_one_shape_whatever_the_node(played, backend):
    assert len({(vector.dtype, vector.shape) for vector in queries(played[backend])}) == 1


def test_two_passive_parties_together_see_the_same_vectors_and_shares_of_their_own(played):
    first, second = (queries(played["dealer"], name) for name in ("p1", "p2"))
    assert all((one == other).all() for one, other in zip(first, second, strict=True))
    seeds = [received(played["dealer"].transcripts[name], HolderSeed)[0].seed for name in ("p1", "p2")]
    assert len({*seeds, received(played["dealer"].transcripts["p0"], AskerSeed)[0].seed}) == 3


# ---------------------------------------------------------------- the active party


def test_masked_bins_are_uniform_to_the_active_party(played):
    for peer in ("p1", "p2"):
        masked = np.concatenate(
            [words(hint.payload[0]) for hint in received(played["dealer"].transcripts["p0"], Hint, peer)]
        )
        assert masked.shape[1] == ROWS
        assert uniform(masked)
        assert all(uniform(one - other) for one, other in pairwise(masked[::2]))


def test_answers_are_uniform_to_whoever_has_no_masks(played):
    answers = received(played["dealer"].transcripts["p0"], Sums, "p1")
    assert uniform(np.concatenate([words(answer.payload[0]).ravel() for answer in answers]))


# ---------------------------------------------------------------- the dealer


def test_the_dealer_sees_counts_alone(played):
    entries = [e for e in played["dealer"].transcripts["dealer"].entries if e.direction == "received"]
    assert {e.step for e in entries} == {"Terms", "Verdict", "DealOrder", "DealRequest", "DealEnd"}
    (wanted,) = received(played["dealer"].transcripts["dealer"], DealOrder)
    tables, _ = tables_and_labels()
    bins = {name: int(fit_bins(tables[name], OPTIONS["max_bin"], 1).offsets[-1]) for name in ("p1", "p2")}
    assert (wanted.rows, wanted.slots) == (ROWS, bins)
    requests = received(played["dealer"].transcripts["dealer"], DealRequest)
    counts = [request.count for request in requests]
    assert [request.first for request in requests] == np.cumsum([0, *counts])[:-1].tolist()
    assert sum(counts) == len(queries(played["dealer"]))


# ---------------------------------------------------------------- the attacks of the published form


def labels() -> np.ndarray:
    return tables_and_labels()[1]


def guessed(found: np.ndarray, truth: np.ndarray) -> float:
    """How far from guessing: 0.5 at best for chance, 1 for labels found, up to their sign."""
    auc = roc_auc_score(truth, found)
    return max(auc, 1.0 - auc)


CHANCE = 0.72
"""An AUC by chance on 240 rows has a standard error of 0.039: one attack in a hundred million succeeds by chance."""


@BY_BACKEND
def test_rounding_finds_no_labels_in_queries(played, backend):
    nothing = np.zeros((ROWS, 0))
    for vector in queries(played[backend])[:4]:
        found = rounded(NodeExchange(np.arange(ROWS), nothing, of_rows(vector)))[:, 0]
        assert guessed(found, labels()) < CHANCE


def test_rounding_finds_no_bins_in_masked_ones(played):
    masked = words(received(played["dealer"].transcripts["p0"], Hint, "p1")[0].payload[0]).T / 2.0**64
    found = rounded(NodeExchange(np.arange(ROWS), np.zeros((ROWS, 0)), masked))
    tables, _ = tables_and_labels()
    bins = fit_bins(tables["p1"], OPTIONS["max_bin"], 1)
    codes = bins.transform(tables["p1"], 1)
    column = np.repeat(np.arange(codes.shape[1]), np.diff(bins.offsets))
    truth = codes[:, column] == np.arange(len(column)) - bins.offsets[column]
    held = truth[:, truth.any(axis=0)]
    agreement = abs(np.corrcoef(found[:, truth.any(axis=0)].ravel(), held.ravel())[0, 1])
    assert agreement < 5.0 / np.sqrt(held.size)


@BY_BACKEND
def test_no_vector_is_orthogonal_to_what_comes_back(played, backend):
    """Subset identification: u'W = 0 says that u was used. Here nothing was projected on anything."""
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(ROWS, 32))).Q
    for vector in queries(played[backend])[:4]:
        assert not NodeExchange(np.arange(ROWS), vectors, of_rows(vector)).used.size


@BY_BACKEND
def test_levels_together_solve_for_no_gradients(played, backend):
    """The equations of SMM-2 over levels: exact after two of them in paper mode."""
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(ROWS, ROWS // 2))).Q
    answers = [NodeExchange(np.arange(ROWS), vectors, of_rows(vector)) for vector in queries(played[backend])[:8]]
    found, _ = solved(answers, ROWS)
    assert guessed(found[:, 0], labels()) < CHANCE


def test_trees_together_solve_for_no_bins(played):
    """The equations of SMM-1 over trees: here M is masked once, and what comes back later are sums alone."""
    assert len(received(played["dealer"].transcripts["p0"], Hint, "p1")) == 1
    sizes = {words(answer.payload[0]).shape[2] for answer in received(played["dealer"].transcripts["p0"], Sums, "p1")}
    tables, _ = tables_and_labels()
    assert sizes == {int(fit_bins(tables["p1"], OPTIONS["max_bin"], 1).offsets[-1])}  # slots, not rows


def test_no_column_of_two_values_is_left_over(played):
    """Large r in SMM-1: labels are among the few columns orthogonal to what was sent. Here labels are in none."""
    sent = np.concatenate([of_rows(vector) for vector in queries(played["dealer"])], axis=1)
    sent = np.concatenate([sent, np.random.default_rng(1).normal(size=(ROWS, ROWS - 20 - sent.shape[1]))], axis=1)
    basis = left_over(np.linalg.qr(sent - sent.mean(axis=0)).Q)
    assert guessed(two_valued(basis, tries=20, steps=50), labels()) < CHANCE
