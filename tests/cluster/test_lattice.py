"""The lattice map over a cluster's workers gives what one machine does."""

from itertools import pairwise

import numpy as np
import pytest

from cluster.local_shards import LocalShards
from treaty.cluster.shards import STRIPE
from treaty.cluster.sums import ClusterMapClient, ClusterMapServer
from treaty.crypto.lattice import linear_map
from treaty.crypto.lattice.linear_map import LinearMapClient, LinearMapServer
from treaty.crypto.parameters import DEGREE, Field, SecretMatrix, choose

SEED = bytes(range(32))


@pytest.mark.parametrize("at", [0, 4 * STRIPE])
@pytest.mark.parametrize("kind", ["bins", "integers"])
@pytest.mark.parametrize(("n", "count"), [(3 * STRIPE + 500, 2), (3 * STRIPE, 4), (700, 2)])
def test_products_are_right_whichever_workers_add_them_up(monkeypatch, n, count, kind, at):
    monkeypatch.setattr(linear_map, "_FOR_HINTS", 1)  # a block at a time
    rng = np.random.default_rng(n)
    if kind == "bins":
        codes, offsets = rng.integers(0, [[3], [7]], (2, n)).astype(np.uint8), np.array([0, 3, 10])
        matrix = SecretMatrix.of_bins(codes, offsets)
        dense = np.concatenate([codes[f] == np.arange(k)[:, None] for f, k in enumerate([3, 7])]).astype(np.int64)
        parameters = choose(60, weight=n, slack=n * 600, squares=n)
    else:
        dense = rng.integers(-50, 50, (4, n))
        matrix = SecretMatrix.of_integers(dense.astype(np.int32))
        parameters = choose(60, weight=50 * n, slack=n * 600 * 50, squares=2500 * n)
    fields = [Field(0, 1), Field(20, 500, signed=True)]
    shards = LocalShards(count)
    server = ClusterMapServer(shards, "map", at, parameters, matrix, SEED)
    client = LinearMapClient(parameters, fields, SEED, n)
    hint = np.concatenate(list(server.hint(3)))
    vectors = [np.stack([rng.integers(0, 2, n), rng.integers(-500, 500, n)]).astype(np.int32) for _ in range(2)]
    query, rows = client.begin(2), np.arange(matrix.rows)
    features = np.arange(len(matrix.columns))
    sums = None
    for start in range(0, n, 3 * DEGREE):  # not a multiple of a stripe
        words = query.encrypt([vector[:, start : start + 3 * DEGREE] for vector in vectors])
        sums = sums or server.begin(query.own, features)
        sums.add(words)
        shards.lose(1)
    opened = client.open(hint, rows, query.secrets, sums.answer())
    for vector, found in zip(vectors, opened, strict=True):
        entries = vector[0].astype(object) + (vector[1].astype(object) << 20)
        expected = [int(row.astype(object) @ entries) % (1 << 60) for row in dense]
        assert [sum(int(word) << 16 * k for k, word in enumerate(row)) % (1 << 60) for row in found] == expected


def test_a_hint_of_a_cluster_is_that_of_one_machine():
    n, rng = 2 * STRIPE + 9000, np.random.default_rng(0)
    matrix = SecretMatrix.of_bins(rng.integers(0, 5, (1, n)).astype(np.uint8), np.array([0, 5]))
    parameters = choose(60, weight=n, slack=n * 600, squares=n)
    alone = LinearMapServer(parameters, matrix, SEED).partial_hints(1, 4)
    assert np.array_equal(
        ClusterMapServer(LocalShards(3), "map", STRIPE, parameters, matrix, SEED).partial_hints(1, 4), alone
    )


@pytest.mark.parametrize("pieces", [1, 3])
def test_workers_encrypt_what_one_machine_does_and_so_does_one_in_anothers_place(pieces):
    n, rng = 2 * STRIPE + 900, np.random.default_rng(4)
    parameters, fields = choose(60, weight=n, slack=n * 600, squares=n), [Field(0, 1), Field(20, 500, signed=True)]
    vectors = [np.stack([rng.integers(0, 2, n), rng.integers(-500, 500, n)]).astype(np.int32) for _ in range(2)]
    shards, alone = LocalShards(3), LinearMapClient(parameters, fields, SEED, n)
    there = ClusterMapClient(shards, parameters, fields, SEED, n, threads=1)
    drawn = alone.begin(2)
    found, key = [], bytes(range(32))
    for client in (alone, there):
        query = client.query_of(drawn.secrets, key)
        step = DEGREE if pieces == 3 else n
        cuts = [0, step, 3 * step, n] if pieces == 3 else [0, n]
        words = [query.encrypt([vector[:, a:b] for vector in vectors]) for a, b in pairwise(cuts)]
        found.append((np.concatenate(words, axis=2), query.own))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])
