"""SecureBoost at its limits, in small: hundreds of columns, 255 bins, many parties, messages of many megabytes."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import treaty
from systems.vertical.playing import play_training
from tables import assert_same_trees
from treaty.data.table import to_table
from treaty.messaging.certificates import make_identity
from treaty.messaging.tls_channel import Peer, TlsChannel
from treaty.runs import threads as simulation
from treaty.systems.secureboost.options import SecureBoost
from treaty.trees import columns
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import ColumnSource, SplitSearch, grow_tree
from treaty.trees.splits import SplitRules

pytestmark = pytest.mark.slow


def wide_table(rows: int, features: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw columns of many different values, some missing, and labels that hang on a few of the last ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    y = (x[:, -3:].sum(axis=1) + rng.normal(size=rows) > 0).astype(int)
    x[rng.random(x.shape) < 0.02] = np.nan
    return x, y


def assert_lossless(tables: dict[str, np.ndarray], y: np.ndarray, **options) -> treaty.GBDTClassifier:
    federated = treaty.GBDTClassifier(
        SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True), n_jobs=1, **options
    ).fit(tables, y)
    pooled = treaty.GBDTClassifier("pooled", **options).fit(tables, y)
    assert_same_trees(federated, pooled)
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))
    return federated


def tls_channels(names, _link):
    """Connect two parties over TLS instead of in memory."""
    identities = {name: make_identity(name) for name in names}
    channels = {
        name: TlsChannel(
            name, "127.0.0.1:0", key=identities[name].key, certificate=identities[name].certificate,
            peers={peer: Peer(None, identities[peer].certificate) for peer in names if peer != name},
        )
        for name in names
    }  # fmt: skip
    addresses = {name: channel.address for name, channel in channels.items()}
    with ThreadPoolExecutor(len(channels)) as pool:
        list(pool.map(lambda name: channels[name].connect(10, addresses), names))
    return channels


def test_hundreds_of_columns_in_255_bins_give_the_pooled_trees_in_messages_of_many_megabytes(monkeypatch):
    x, y = wide_table(320, 720)
    monkeypatch.setattr(simulation, "memory_channels", tls_channels)
    options = {"n_estimators": 1, "max_depth": 2, "max_bin": 255, "min_child_samples": 1}
    model = assert_lossless({"bank": x[:, :2], "shop": x[:, 2:]}, y, **options)
    answers = model.communication_["shop -> bank"]["by_type"]["Sums"]
    assert answers > 2 * (4 << 20)  # two of them: each frame in a piece


def test_twelve_parties_give_the_pooled_trees():
    x, y = wide_table(300, 25)
    tables = {f"p{k}": x[:, 2 * k : 2 * k + (3 if k == 11 else 2)] for k in range(12)}
    model = assert_lossless(tables, y, n_estimators=3, max_bin=64, min_child_samples=1)
    owners = {int(k) for tree in model.parts_["p0"].forest.trees for k in tree.source[tree.left >= 0]}
    assert len(owners) > 3


def test_columns_and_rows_sampled_from_a_wide_table_give_the_pooled_trees():
    x, y = wide_table(200, 300)
    options = {"n_estimators": 2, "max_depth": 2, "max_bin": 255, "goss": True, "colsample_bytree": 0.1}
    assert_lossless({"bank": x[:, :5], "shop": x[:, 5:]}, y, random_state=1, **options)


def test_the_largest_messages_grow_with_columns_not_with_parties():
    x, y = wide_table(120, 48)
    largest = {}
    for parties in (2, 12):
        tables = {f"p{k}": to_table(x[:, 4 * k : 4 * k + 4], party=f"p{k}") for k in range(parties)}
        played = play_training(tables, y.astype(float), n_estimators=1, max_depth=2)
        largest[parties] = {
            step: max(e.nbytes for e in played.transcripts["p0"].entries if e.step == step)
            for step in ("TreeStart", "SumsRequest", "Sums")
        }
    for step, nbytes in largest[2].items():
        assert largest[12][step] == pytest.approx(nbytes, rel=0.2), step


ROWS, FEATURES, SLOTS, DEPTH = 3000, 80, 256, 6
NODE = FEATURES * SLOTS * 3 * 8


def grow_wide_tree(monkeypatch, nodes_at_a_time: int):
    """Grow one deep tree on own columns; return it and the most bytes that were held at one time."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, SLOTS - 1, (ROWS, FEATURES)).astype(np.uint8)
    grad = rng.integers(-1000, 1000, ROWS)
    hess = np.full(ROWS, 500)
    records: list[tuple[int, bytes]] = []

    def record(feature, left_bins):
        records.append((feature, left_bins.tobytes()))
        return len(records) - 1

    monkeypatch.setattr(columns, "_SCANNED_BYTES", nodes_at_a_time * NODE)
    offsets = (SLOTS * np.arange(FEATURES + 1)).astype(np.int32)
    source = ColumnSource(codes, offsets, np.zeros(FEATURES, np.bool_), record)
    rules = SplitRules(grad_unit=1e-3, hess_unit=1e-3, max_depth=DEPTH)
    sample = TreeSample(grad, hess, None, np.arange(FEATURES, dtype=np.int32))
    margins = np.zeros(ROWS)
    tracemalloc.start()
    search = SplitSearch([source], sample, rules)
    tree, rows = grow_tree(search, sample, rules)
    leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
    rows.add_to(margins, leaves, tree.value[leaves])
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (tree.left.tolist(), tree.value.tolist(), records, margins.tolist()), held, peak


def test_the_last_levels_sums_are_held_by_halves_and_let_go(monkeypatch):
    whole, _, peak_whole = grow_wide_tree(monkeypatch, 1 << 10)
    parts, held, peak = grow_wide_tree(monkeypatch, 3)
    assert parts == whole
    depth = {0: 0}
    for node, left in enumerate(whole[0]):
        depth |= {child: depth[node] + 1 for child in (left, left + 1) if left >= 0}
    widest = list(depth.values()).count(DEPTH - 1)
    assert widest > 24, "the tree is not wide: the bound would prove nothing"
    assert peak < (widest + 8) * NODE < peak_whole
    assert held < NODE
