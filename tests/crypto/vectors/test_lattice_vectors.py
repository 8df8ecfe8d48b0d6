"""Products of secret columns with another party's vectors, as shares, against plain integers."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from treaty.crypto.lattice.store import HintStore
from treaty.crypto.vectors.lattice_vectors import VectorClient, VectorServer, signed, vectors_parameters
from treaty.errors import CryptoError

WEIGHT, VECTOR, ROWS = 10 << 24, 44, 300
SEED = bytes(range(32))


def both(rng, columns=4, batch=40, vector_bits=VECTOR):
    parameters = vectors_parameters(ROWS, WEIGHT, vector_bits, batch)
    matrix = rng.integers(-WEIGHT, WEIGHT + 1, (columns, ROWS))
    matrix[0, :10] = WEIGHT
    server = VectorServer(parameters, matrix, [f"c{k}" for k in range(columns)], SEED, HintStore(None))
    client = VectorClient(parameters, vector_bits, SEED, ROWS)
    client.accept_hint("server", 0, server.hint(), columns)
    return parameters, matrix, server, client


@pytest.mark.parametrize("vector_bits", [20, 27, 44, 56])
def test_shares_add_up_to_the_products_of_several_batches(vector_bits):
    rng = np.random.default_rng(vector_bits)
    parameters, matrix, server, client = both(rng, vector_bits=vector_bits)
    half = 1 << (vector_bits - 1)
    for _ in range(3):
        rows = rng.permutation(ROWS)[:40]
        vector = rng.integers(-half, half, 40)
        vector[:2] = [-half, half - 1]
        answer, own = server.answer(client.query(rows, vector))
        theirs = client.open("server", 0, answer)
        found = [signed(a + b, parameters.message_bits) for a, b in zip(own, theirs, strict=True)]
        assert found == [sum(int(x) * int(v) for x, v in zip(of, vector, strict=True)) for of in matrix[:, rows]]


@pytest.mark.slow
def test_what_a_client_opens_is_uniform_whatever_the_products():
    parameters, _, server, client = both(np.random.default_rng(0), columns=1)
    rows, vector = np.arange(40), np.full(40, 1 << 40)
    opened = [
        client.open("server", 0, server.answer(client.query(rows, vector))[0])[0] >> (parameters.message_bits - 3)
        for _ in range(400)
    ]
    counts = np.bincount(opened, minlength=8)
    assert ((counts - 50) ** 2 / 50).sum() < 33.7  # chi-squared, 7 degrees: false alarm 2e-5


def test_every_query_has_a_secret_of_its_own():
    _, _, _, client = both(np.random.default_rng(1))
    first, second = (client.query(np.arange(40), np.ones(40, np.int64)) for _ in range(2))
    assert (first[0] != second[0]).mean() > 0.99


def test_a_query_is_answered_once():
    _, _, server, client = both(np.random.default_rng(4))
    query = client.query(np.arange(40), np.ones(40, np.int64))
    server.answer(query)
    with pytest.raises(CryptoError, match="a new query"):
        server.answer(query)


def test_answers_are_entered_in_the_ledger_and_unused_ones_given_back():
    store, rng = HintStore(None), np.random.default_rng(2)
    parameters = vectors_parameters(ROWS, WEIGHT, VECTOR, 40)
    server = VectorServer(parameters, rng.integers(-9, 9, (1, ROWS)), ["age"], SEED, store)
    client = VectorClient(parameters, VECTOR, SEED, ROWS)
    query = client.query(np.arange(40), np.ones(40, np.int64))
    server.answer(query)
    one = parameters.leak(float((server._map.matrix.columns.astype(float) ** 2).sum()))
    assert store.spent(["age"]) > one > 0
    server.close()
    assert store.spent(["age"]) == pytest.approx(one)


def test_columns_of_equal_names_are_entered_both():
    store, columns = HintStore(None), np.stack([np.full(ROWS, 3), np.full(ROWS, 5)])
    parameters = vectors_parameters(ROWS, WEIGHT, VECTOR, 40)
    client = VectorClient(parameters, VECTOR, SEED, ROWS)
    with closing(VectorServer(parameters, columns, ["age", "age"], SEED, store)) as server:
        server.answer(client.query(np.arange(40), np.ones(40, np.int64)))
    assert store.spent(["age"]) == pytest.approx(parameters.leak(9.0 * ROWS) + parameters.leak(25.0 * ROWS))


def test_bad_sizes_and_garbage_are_refused():
    rng = np.random.default_rng(3)
    parameters, _, server, client = both(rng)
    with pytest.raises(CryptoError, match="before an answer"):
        client.open("server", 0, [])
    with pytest.raises(CryptoError, match="below 2"):
        client.query(np.arange(2), np.array([0, 1 << 43]))
    words, own = client.query(np.arange(2), np.array([1, 2]))
    with pytest.raises(CryptoError, match="expected uint32"):
        server.answer([words[:, :, 1:], own])
    with pytest.raises(CryptoError, match="not below its prime"):
        server.answer([np.full_like(words, 2**32 - 1), own])
    with pytest.raises(CryptoError, match="expected uint16"):
        client.open("server", 0, [np.zeros((1, 3, 2), np.uint16)])
    with pytest.raises(CryptoError, match="the hint of"):
        client.accept_hint("server", 0, [np.zeros((4, 1, 8), np.int16)], 4)
    with pytest.raises(CryptoError, match="exceeds the bound of the parameters"):
        VectorServer(parameters, np.full((1, ROWS), 2**30), ["c"], SEED, HintStore(None))
    with pytest.raises(CryptoError, match="too large"):
        vectors_parameters(1 << 40, WEIGHT, 56, 1 << 60)
