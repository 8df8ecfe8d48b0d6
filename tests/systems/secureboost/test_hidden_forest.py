"""Margins of finished models on shared rows: sums of leaf weights, shares of which are uniform, and no pad twice."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest

import treaty
from crypto.sealed.test_sealed import play
from crypto.sealed.used import Used
from crypto.sealed.watching import uniform
from tables import cut, real_table, with_gaps
from treaty.crypto.transfer.hidden_rows import bytes_of
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers
from treaty.data.table import to_table
from treaty.models.trees import forest_of
from treaty.systems.secureboost import hidden_forest
from treaty.systems.secureboost.hidden_forest import (
    SharedForest,
    decide_rows,
    depth_of,
    leaf_weights,
    margin_shares,
    records_of,
)

UNIT = 2.0**-12


@cache
def model_of(depth: int) -> Model:
    return Model(depth)


class Model:
    """Trees of two parties, what either has of them, and each row's sum of leaf weights."""

    def __init__(self, depth: int) -> None:
        X, y = real_table("binary", rows=300)
        tables = cut(with_gaps(X.iloc[:, :6]), 2)
        options = {
            "objective": "logistic_pieces", "n_estimators": 4, "max_depth": depth, "max_bin": 8, "min_child_samples": 2
        }  # fmt: skip
        system = treaty.SecureBoost(membership="hidden")
        model = treaty.GBDTClassifier(system, n_jobs=1, **options).fit(tables, y)
        # the same trees, by another way to their margins
        p = treaty.GBDTClassifier("pooled", **options).fit(tables, y).predict_proba(tables)[:, 1]
        parts = [model.parts_[name] for name in ("p0", "p1")]
        self.trees, self.tables = forest_of(parts).trees, [to_table(tables[name], party=name) for name in ("p0", "p1")]
        self.splits = [of.splits for of in parts]
        start = float(forest_of(parts).objective.base_margins[0])
        self.sums = np.rint((np.log(p / (1.0 - p)) - start) / UNIT).astype(np.int64)[:, None]

    def shares(
        self, ends: tuple[Transfers, Transfers], weights: np.ndarray, **of_sums: int
    ) -> tuple[np.ndarray, np.ndarray]:
        depth = depth_of(self.trees)
        records = [records_of(self.trees, k, depth) for k in (0, 1)]
        levels = [[bool((of[:, (1 << at) - 1 : (2 << at) - 1] >= 0).any()) for at in range(depth)] for of in records]

        def end(k: int) -> Steps[np.ndarray]:
            own = partial(decide_rows, self.splits[k], self.tables[k], 1)
            forest, given = SharedForest(records[k], 1 << 20, levels[1 - k], **of_sums), weights if k == 0 else None
            return margin_shares(ends[k], self.tables[k].n_rows, own, forest, given)

        return play(end(0), end(1))


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_sums_of_weights_are_the_plain_ones(depth: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_forest, "_WALKED_AT_ONCE", at_once)
    model, ends = model_of(depth), play(open_transfers(0), open_transfers(1))
    one, other = model.shares(ends, leaf_weights(model.trees, depth, UNIT))
    assert np.array_equal((one + other) & 0xFFFFFF, model.sums & 0xFFFFFF)


def test_no_pad_of_a_walk_serves_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_forest, "_WALKED_AT_ONCE", 400)
    model, used = model_of(3), Used(monkeypatch)
    ends = play(open_transfers(0), open_transfers(1))
    for walk in (1, 2):
        model.shares(ends, leaf_weights(model.trees, 3, UNIT))
        # a key of its own for each of four pieces of a walk, in either direction, at either end
        assert len(used.hashed) == 4 * 4 * walk
    for parts in used.hashed.values():
        of = np.concatenate(parts)
        assert len(np.unique(of[:, [0, 3, 4]], axis=0)) == len(of) >= 96  # one pad, one use
        assert len(np.unique(of[:, :3], axis=0)) == len(np.unique(of[:, 0]))  # one tweak, one row


@pytest.mark.parametrize("nbytes", range(3, 9))
@pytest.mark.parametrize("outputs", [1, 2, 4])
def test_sums_of_each_output_wrap_around_at_their_bytes(nbytes: int, outputs: int) -> None:
    model, ends = model_of(3), play(open_transfers(0), open_transfers(1))
    weights = leaf_weights(model.trees, 3, UNIT)
    whole = (1 << 8 * nbytes) - 1
    large = weights + (1 << 8 * nbytes - 2)
    one, other = model.shares(ends, large, outputs=outputs, nbytes=nbytes)
    assert one.dtype == (np.uint32 if nbytes <= 4 else np.uint64)
    assert one.shape == (len(model.sums), outputs)
    # the trees of an output, one by one
    expected = np.zeros(one.shape, np.int64)
    for number in range(len(model.trees)):
        alone = np.where(np.arange(len(weights))[:, None] == number, weights, 0)
        first, second = model.shares(ends, alone, nbytes=8)
        expected[:, number % outputs] += (first + second)[:, 0].view(np.int64) + (1 << 8 * nbytes - 2)
    assert np.array_equal((one + other) & one.dtype.type(whole), expected.astype(np.uint64) & np.uint64(whole))


@pytest.mark.parametrize("weight", [0, -(1 << 14)])
@pytest.mark.parametrize("nbytes", [3, 6, 8])
def test_shares_of_sums_are_uniform_whatever_the_weights(weight: int, nbytes: int) -> None:
    model, ends = model_of(3), play(open_transfers(0), open_transfers(1))
    found = [model.shares(ends, np.full((len(model.trees), 8), weight), nbytes=nbytes) for _ in range(4)]
    for shares in zip(*found, strict=True):
        assert uniform(bytes_of(np.concatenate(shares).astype(np.uint64), nbytes))
