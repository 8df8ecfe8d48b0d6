"""Products of secret columns with another party's vectors, as shares, against plain integers."""

from __future__ import annotations

import numpy as np
import pytest

from crypto.sums.test_sealed_answers import uniform
from treaty.crypto.sums.hidden_vectors import VectorClient, VectorServer, signed, vectors_parameters
from treaty.errors import CryptoError

WEIGHT, VECTOR, ROWS = 10 << 24, 44, 300
SEED = bytes(range(32))


def both(rng, columns=4, batch=40, vector_bits=VECTOR):
    parameters = vectors_parameters(ROWS, WEIGHT, vector_bits, batch)
    matrix = rng.integers(-WEIGHT, WEIGHT + 1, (columns, ROWS))
    matrix[0, :10] = WEIGHT
    server = VectorServer(parameters, matrix, SEED)
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


def test_what_a_client_opens_is_uniform_in_every_digit_and_alike_in_no_two_answers():
    """For the largest products as for zeros: of columns and answers each has a mask of its own, over the whole ring."""
    _, matrix, server, client = both(np.random.default_rng(0), columns=60)
    rows = np.arange(len(matrix))
    for vector in (np.zeros(40, np.int64), np.full(40, 1 << 42)):
        query = client.query(np.arange(40), vector)
        answers = [server.answer(query)[0][0] for _ in range(50)]
        hint, secrets = client._hints["server", 0], np.repeat(client._secrets, 50, axis=0)
        digits = client._map.open(hint, rows, secrets, np.concatenate(answers)).astype(np.int64)
        for of in (digits, digits[1:] - digits[:-1], digits[:, 1:] - digits[:, :-1]):
            assert uniform(of & 0xFFFF)


def test_every_query_has_a_secret_of_its_own():
    _, _, _, client = both(np.random.default_rng(1))
    first, second = (client.query(np.arange(40), np.ones(40, np.int64)) for _ in range(2))
    assert (first[0] != second[0]).mean() > 0.99


def test_bad_sizes_and_garbage_are_refused():
    rng = np.random.default_rng(3)
    parameters, _, server, client = both(rng)
    with pytest.raises(CryptoError, match="before an answer"):
        client.open("server", 0, [])
    with pytest.raises(CryptoError, match="below 2"):
        client.query(np.arange(2), np.array([0, 1 << 43]))
    words, own = client.query(np.arange(2), np.array([1, 2]))
    with pytest.raises(CryptoError, match="expected uint32"):
        server.answer([words[:, 1:], own])
    with pytest.raises(CryptoError, match="not below its prime"):
        server.answer([np.full_like(words, 2**32 - 1), own])
    with pytest.raises(CryptoError, match="expected uint16"):
        client.open("server", 0, [np.zeros((1, 3, 2), np.uint16)])
    with pytest.raises(CryptoError, match="the hint of"):
        client.accept_hint("server", 0, [np.zeros((4, 1, 8), np.int16)], 4)
    with pytest.raises(CryptoError, match="exceeds the bound of the parameters"):
        VectorServer(parameters, np.full((1, ROWS), 2**30), SEED)
    with pytest.raises(CryptoError, match="exceeds the bound of the parameters"):
        VectorServer(parameters, np.full((1, 1), max(parameters.primes)), SEED)
    with pytest.raises(CryptoError, match="too large"):
        vectors_parameters(1 << 40, WEIGHT, 56, 1 << 60)
