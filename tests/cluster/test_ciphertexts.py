"""Sums under an additive cipher over a cluster's workers are those of one machine."""

from itertools import pairwise

import numpy as np
import pytest

from cluster.local_shards import LocalShards
from treaty.cluster.shards import STRIPE
from treaty.cluster.sums import ClusterBlindServer, ClusterSumsServer
from treaty.crypto.additive.ciphers import generate_key, generate_paillier_key
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.additive_sums import AdditiveSumsClient, BlindSumsClient


@pytest.mark.parametrize("rerandomise", [True, False])
@pytest.mark.parametrize("kind", ["ou", "paillier", "blind"])
def test_opened_sums_are_exact(monkeypatch, kind, rerandomise):
    n = 2 * STRIPE + 100
    rng = np.random.default_rng(1)
    bins = np.array([3, 1, 6, 2])
    codes = rng.integers(0, bins, (n, 4)).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(bins)]).astype(np.int32)
    bounds = SumsBounds(n, 1000, 500)
    key = (generate_paillier_key if kind == "paillier" else generate_key)(2048, insecure_test_key_bits=512)
    client = (BlindSumsClient if kind == "blind" else AdditiveSumsClient)(key, bounds)
    shards = LocalShards(3)
    server = (ClusterBlindServer if kind == "blind" else ClusterSumsServer)(
        shards, key.public, bounds, codes, offsets, rerandomise=rerandomise
    )
    client.accept_hint("lab", next(server.hint()), offsets)
    grad, hess = rng.integers(-1000, 1000, n), rng.integers(0, 500, n)
    rows = None if kind == "blind" else np.sort(rng.choice(n, n - 50, replace=False)).astype(np.int32)
    features = np.array([0, 2], np.int32)
    sampled = np.arange(n) if rows is None else rows
    for tree in range(2):
        for number, piece in enumerate(client.begin_tree(grad[sampled], hess[sampled])):
            server.add_rows(piece) if number else server.begin_tree(piece, rows, features)
        positions = rng.permutation(len(sampled)).astype(np.int32)
        for starts in (np.array([0, 400, 400, 900]), np.array([0, len(positions)])):
            if kind == "blind":
                starts = np.minimum(starts, 300)
            for piece in client.query(positions, starts.astype(np.int32)):
                server.add(piece)
            held = [sampled[positions[a:b]] for a, b in pairwise(starts)]
            totals = np.array([[grad[of].sum(), hess[of].sum(), len(of)] for of in held])
            found = client.open("lab", server.answer(), totals, features)
            for of, sums in zip(held, found, strict=True):
                for f in features:
                    for code in range(bins[f]):
                        rows_of = of[codes[of, f] == code]
                        expected = [grad[rows_of].sum(), hess[rows_of].sum(), len(rows_of)]
                        assert sums[offsets[f] + code].tolist() == expected
            shards.lose(tree)
        server.end_tree()
