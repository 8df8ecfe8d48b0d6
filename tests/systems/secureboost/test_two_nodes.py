"""Vectors of two nodes, which long tables and deep trees take: the pooled trees, kept hints, and the bytes expected."""

from __future__ import annotations

import pytest

import treaty
from systems.secureboost.test_lattice_privacy import LATTICE_TO_PASSIVE, train
from systems.secureboost.test_lossless import assert_lossless, lattice_both
from systems.secureboost.test_privacy import received
from systems.test_expected import by_column, compare
from systems.vertical.playing import tables_and_labels
from systems.vertical.test_audit import CIPHERS, findings_of, kept_training
from tables import cut, real_table, with_categories, with_gaps
from treaty.crypto.lattice.ring import packed_words
from treaty.crypto.parameters import WIDE_DEGREE
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums import lattice_sums
from treaty.crypto.sums.lattice_sums import sums_parameters
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical import cipher_choice

OPEN_LATTICE = SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True)


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch):
    """Have all vectors be about two nodes, as small tables' are not by themselves; return the queries' numbers."""
    asked, choosing, query = [], cipher_choice.best_nodes, lattice_sums.LatticeSumsClient.query

    def watched(client, positions, starts, *trees):
        asked.append((len(starts) - 1, client._nodes))
        return query(client, positions, starts, *trees)

    def two(job, offsets, links, store, counts=(1, 2)):
        return choosing(job, offsets, links, store, counts[-1:])

    monkeypatch.setattr(cipher_choice, "best_nodes", two)
    monkeypatch.setattr(lattice_sums.LatticeSumsClient, "query", watched)
    return asked


@pytest.mark.parametrize(
    ("task", "parties", "change"),
    [
        ("binary", 2, lambda X: with_categories(with_gaps(X))),
        ("multiclass", 3, with_gaps),
        pytest.param("regression", 5, with_categories, marks=pytest.mark.slow),
    ],
)
def test_vectors_of_two_nodes_give_the_pooled_trees_and_predictions(two_nodes, task, parties, change):
    X, y = real_table(task)
    tables = cut(change(X), parties)
    federated, pooled = lattice_both(task, tables, y, max_depth=5, n_estimators=3, subsample=0.8, random_state=1)
    assert_lossless(federated, pooled, tables)
    assert {nodes for _, nodes in two_nodes} == {2}
    assert {number % 2 for number, _ in two_nodes} == {0, 1}
    assert federated.parts_["p0"].choice.startswith("as the job says; each vector is about two nodes")


def test_hints_for_two_nodes_are_kept_and_serve_a_training_that_goes_on(tmp_path):
    X, y = real_table("binary", rows=300)
    tables, options = cut(X, 3), {"max_bin": 8, "n_jobs": 1, "max_depth": 4}
    whole = treaty.GBDTClassifier(OPEN_LATTICE, n_estimators=4, **options).fit(tables, y)
    treaty.GBDTClassifier(OPEN_LATTICE, n_estimators=4, **options).fit(tables, y, checkpoint=tmp_path)
    again = treaty.GBDTClassifier(OPEN_LATTICE, n_estimators=4, learning_rate=0.1, **options)
    again.fit(tables, y, checkpoint=tmp_path)
    pooled = treaty.GBDTClassifier("pooled", n_estimators=4, learning_rate=0.1, **options)
    assert_lossless(again, pooled.fit(tables, y), tables)
    sent = again.communication_["p1 -> p0"]["by_type"]["Hint"]
    assert sent < 0.01 * whole.communication_["p1 -> p0"]["by_type"]["Hint"]


def test_passive_parties_are_sent_vectors_of_half_as_many_nodes(two_nodes):
    tables, y = tables_and_labels()
    played = train(tables, y, max_depth=6, min_child_samples=1)
    parameters = sums_parameters(SumsBounds(len(y), 1 << 16, 1 << 14), nodes=2)
    shapes = [
        [array.shape for array in message.payload]
        for step, message, _ in received(played.transcripts["p1"], LATTICE_TO_PASSIVE)
        if step == "SumsRequest"
    ]
    assert [words[0] for words, _ in shapes] == [-(-number // 2) for number, _ in two_nodes]
    assert {1, 2} <= {number for number, _ in two_nodes}
    for words, own in shapes:
        assert words[1:] == (packed_words(parameters, len(y)),)
        assert own == (words[0], packed_words(parameters, WIDE_DEGREE))


def test_bytes_are_as_expected():
    compare(*by_column(OPEN_LATTICE, 3000, 4, 3, n_estimators=4, max_depth=6, max_bin=16))


def test_vectors_that_are_kept_for_an_audit_are_of_one_node(two_nodes, tmp_path):
    assert findings_of(kept_training(tmp_path, n_estimators=1, **CIPHERS["lattice"])) == []
    assert {nodes for _, nodes in two_nodes} == {1}


def test_sealed_sums_are_of_one_node(two_nodes):
    X, y = real_table("binary", rows=120)
    system = SecureBoost(sums="sealed")
    treaty.GBDTClassifier(system, n_estimators=1, max_depth=2, max_bin=4, n_jobs=1).fit(cut(X.iloc[:, :4], 2), y)
    assert {nodes for _, nodes in two_nodes} == {1}
