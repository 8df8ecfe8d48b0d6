"""Bin sums under an additive cipher that show no rows of nodes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from crypto.asking import answered, asked, begun
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.encrypted_sums import make_client, make_server
from treaty.errors import CryptoError

BOUNDS = SumsBounds(60, 1 << 16, 1 << 14)
CODES = np.random.default_rng(0).integers(0, 3, (60, 3)).astype(np.uint8)
OFFSETS = np.array([0, 3, 7, 10], np.int32)
GRAD = np.random.default_rng(1).integers(-BOUNDS.grad_bound, BOUNDS.grad_bound + 1, 60)
HESS = np.random.default_rng(2).integers(0, BOUNDS.hess_bound + 1, 60)
CIPHERS = pytest.mark.parametrize("cipher", ["ou", "paillier"])
EVERY = np.arange(60, dtype=np.int32)


def both_ends(cipher="ou"):
    options = {"threads": 1, "insecure_test_key_bits": 400, "blind": True}
    client = make_client(cipher, BOUNDS, **options)
    server = make_server(cipher, client.setup(), CODES, OFFSETS, **options)
    client.accept_hint("shop", next(server.hint()), OFFSETS)
    return client, server


def query(client, nodes):
    starts = np.cumsum([0, *map(len, nodes)]).astype(np.int32)
    return asked(client, np.concatenate(nodes).astype(np.int32), starts)


def totals(nodes):
    return np.array([[GRAD[node].sum(), HESS[node].sum(), len(node)] for node in nodes])


def histogram(rows):
    sums = np.zeros((OFFSETS[-1], 3), np.int64)
    for f, (first, last) in enumerate(pairwise(OFFSETS)):
        for k, values in enumerate((GRAD[rows], HESS[rows], np.ones(len(rows), np.int64))):
            np.add.at(sums[first:last, k], CODES[rows, f], values)
    return sums


@CIPHERS
def test_sums_of_nodes_are_exact(cipher):
    client, server = both_ends(cipher)
    for features in (None, np.array([0, 2], np.int32)):
        server.begin_tree(begun(client, GRAD, HESS), None, features)
        nodes = [np.arange(0, 60, 2), np.array([7]), np.arange(0)]
        found = client.open("shop", answered(server, query(client, nodes)), totals(nodes), features)
        for node, sums in zip(nodes, found, strict=True):
            expected = histogram(node)
            for f in range(3) if features is None else features:
                part = slice(OFFSETS[f], OFFSETS[f + 1])
                np.testing.assert_array_equal(sums[part], expected[part])
        server.end_tree()


def test_two_queries_may_be_on_their_way():
    client, server = both_ends()
    server.begin_tree(begun(client, GRAD, HESS), None)
    first, second = [np.arange(30)], [np.arange(30, 50), np.arange(50, 60)]
    asked = [query(client, first), query(client, second)]
    answers = [answered(server, one) for one in asked]
    for nodes, answer in zip((first, second), answers, strict=True):
        found = client.open("shop", answer, totals(nodes))
        np.testing.assert_array_equal(found, [histogram(node) for node in nodes])


def test_nothing_in_a_query_depends_on_the_node_but_ciphertexts():
    client, _ = both_ends()
    assert begun(client, GRAD, HESS) == []
    some, none = query(client, [np.arange(30)]), query(client, [np.arange(0)])
    again = query(client, [np.arange(30)])
    assert [array.shape for array in some] == [array.shape for array in none] == [(1, 60, some[0].shape[2])]
    assert not (some[0] == again[0]).all(axis=2).any()  # fresh encryptions of every row, zeros among them


def test_answers_are_re_randomised():
    client, server = both_ends()
    server.begin_tree(begun(client, GRAD, HESS), None)
    asked = query(client, [np.arange(30)])
    assert not (answered(server, asked)[1] == answered(server, asked)[1]).all(axis=1).any()


def test_a_level_of_many_rows_goes_node_by_node(monkeypatch):
    monkeypatch.setattr("treaty.crypto.sums.additive_sums.PIECE_BYTES", 1)
    assert both_ends()[0].nodes_at_a_time == 1


def test_rows_that_come_in_pieces_are_added_up_as_a_whole(monkeypatch):
    monkeypatch.setattr("treaty.crypto.sums.additive_sums.PIECE_BYTES", 25 * 2 * 8 * 7)
    client, server = both_ends()
    nodes = [np.arange(30), np.arange(40, 60)]
    server.begin_tree(begun(client, GRAD, HESS), None)
    starts = np.cumsum([0, *map(len, nodes)]).astype(np.int32)
    pieces = list(client.query(np.concatenate(nodes).astype(np.int32), starts))
    assert len(pieces) > 1
    for piece in pieces[:-1]:
        assert server.add(piece) == 2
    with pytest.raises(CryptoError, match="ciphertexts of 60 rows"):
        server.answer()
    for piece in pieces:
        server.add(piece)
    found = client.open("shop", server.answer(), totals(nodes))
    np.testing.assert_array_equal(found, np.stack([histogram(node) for node in nodes]))


def test_misuse_is_refused():
    client, server = both_ends()
    with pytest.raises(CryptoError, match="expected begin_tree before query"):
        query(client, [np.arange(3)])
    with pytest.raises(CryptoError, match="the derivatives of 60 rows, got 59"):
        begun(client, GRAD[:-1], HESS[:-1])
    with pytest.raises(CryptoError, match="a gradient exceeds"):
        begun(client, GRAD + 2 * BOUNDS.grad_bound, HESS)
    begun(client, GRAD, HESS)
    asked = query(client, [np.arange(30)])
    with pytest.raises(CryptoError, match="expected begin_tree before a query"):
        answered(server, asked)
    with pytest.raises(CryptoError, match="expected all 60 rows"):
        server.begin_tree([], EVERY[:-1])
    server.begin_tree([], None)
    with pytest.raises(CryptoError, match="1 to 254 nodes in a query, got 0"):
        answered(server, [asked[0][:0]])
    with pytest.raises(CryptoError, match="ciphertexts of 60 rows"):
        answered(server, [asked[0][:, :-1].copy()])
    with pytest.raises(CryptoError, match="nothing more"):
        server.add_rows([])
    with pytest.raises(CryptoError, match="not in range"):
        answered(server, [np.full_like(asked[0], 255)])
