"""Trees in numbered slots: what holders add up, and that the trees are the plain grower's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import all_but_first_slow
from treaty.trees.boosting import draw
from treaty.trees.objectives import make_objective
from treaty.trees.slots import Cells, SlotShard, SlotTree
from treaty.trees.splits import SplitRules
from trees.plain import Codes, random_codes, random_labels, train

KINDS = pytest.mark.parametrize(
    ("objective", "n_classes"), [("logistic", 2), ("softmax", 3), ("squared_error", 2)], ids=["two", "three", "number"]
)
RULES = {"max_depth": 3, "min_child_samples": 2, "min_child_weight": 0.5, "learning_rate": 0.3}


def cells_of(table: Codes, objective, may_miss=None) -> Cells:
    if may_miss is None:
        may_miss = (table.codes == table.n_bins).any(axis=0)
    return Cells.of(table.offsets, may_miss, len(table.codes), objective)


# ---------------------------------------------------------------- packing


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_sums_over_holders_are_what_is_unpacked(data):
    """Packed (hess above count) and unpacked, with and without cells for missing values, grad of either sign."""
    n_bins = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    may_miss = np.array(data.draw(st.lists(st.booleans(), min_size=len(n_bins), max_size=len(n_bins))))
    bits, n_rows = data.draw(st.sampled_from([4, 16, 40])), data.draw(st.sampled_from([1, 7, 8, 1000, 1 << 30]))
    objective = make_objective("logistic", np.zeros(1), None, fractional_bits=bits)
    offsets = np.cumsum([0, *(n + 1 for n in n_bins)]).astype(np.int32)
    cells = Cells.of(offsets, may_miss, n_rows, objective)
    assert (cells.count_bits > 0) == ((n_rows * objective.hess_bound).bit_length() + n_rows.bit_length() <= 62)
    columns = np.array(sorted(data.draw(st.sets(st.integers(0, len(n_bins) - 1), min_size=1))), np.int32)
    holders, n_slots = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 4]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = (holders, n_slots, int(offsets[-1]), 3)
    at_most = n_rows // holders
    sums = np.zeros(shape, np.int64)
    sums[..., 2] = rng.integers(0, at_most + 1, shape[:-1])
    if data.draw(st.booleans()):
        sums[..., 2] = at_most  # as many as there may be
    sums[..., 1] = sums[..., 2] * rng.integers(0, objective.hess_bound + 1)
    sums[..., 0] = rng.integers(-1, 2, shape[:-1]) * sums[..., 2] * objective.grad_bound
    packed = np.sum([cells.pack(one, columns) for one in sums], axis=0)
    assert packed.dtype == np.int64
    assert packed.shape == (cells.length(n_slots, columns),)
    expected = np.zeros(shape[1:], np.int64)
    for f in columns.tolist():
        kept = slice(offsets[f], offsets[f + 1] - (not may_miss[f]))
        expected[:, kept] = sums.sum(axis=0)[:, kept]
    np.testing.assert_array_equal(cells.unpack(packed, n_slots, columns), expected)


def test_numbers_that_would_not_fit_one_are_not_packed():
    objective = make_objective("squared_error", np.ones(2), None, fractional_bits=40)
    offsets = np.array([0, 3], np.int32)
    assert Cells.of(offsets, np.array([True]), 1 << 10, objective).numbers == 2
    assert Cells.of(offsets, np.array([True]), 1 << 12, objective).numbers == 3


# ---------------------------------------------------------------- trees


def grown(table: Codes, y, weight, parts, objective, *, rounds=3, depth_always=False, columns=None, samples=None):
    """Grow rounds of trees on the sums of shards of rows `parts`; return trees, splits, shards."""
    cells, splits = cells_of(table, objective), []
    shards = [
        SlotShard(table.codes[rows], y[rows], None if weight is None else weight[rows], objective, cells)
        for rows in parts
    ]
    rules = SplitRules(grad_unit=objective.grad_unit, hess_unit=objective.hess_unit, **RULES)
    every = np.arange(len(table.n_bins), dtype=np.int32)
    trees = []

    def record(feature, left_bins):
        splits.append((feature, left_bins.copy()))
        return len(splits) - 1

    for number in range(rounds):
        of_trees = [every if columns is None else columns[number]] * objective.n_outputs
        for k, shard in enumerate(shards):
            shard.start_round(of_trees, [None if samples is None else samples[number][k]] * objective.n_outputs)
        growing = [SlotTree(rules, cells, c, table.categorical, record) for c in of_trees]
        depth = 0
        while depth < rules.max_depth and (depth_always or any(tree.growing for tree in growing)):
            opened = np.sum([shard.level(depth) for shard in shards], axis=0)
            lengths = [cells.length(1 << depth, c) for c in of_trees]
            assert len(opened) == sum(lengths)
            pieces = np.split(opened, np.cumsum(lengths)[:-1])
            for output, (tree, piece) in enumerate(zip(growing, pieces, strict=True)):
                chosen = tree.split(piece, depth)
                for shard in shards:
                    shard.decide(output, chosen.features, chosen.left_bins)
                for shard in shards:  # where nothing is split, right
                    unsplit = chosen.features[shard.slots[output] >> 1] < 0
                    assert np.all(shard.slots[output][unsplit] & 1)
            depth += 1
        finished = [tree.finish(depth) for tree in growing]
        for shard in shards:
            shard.margins += np.stack([v[s] for (_, v), s in zip(finished, shard.slots, strict=True)])
        trees += [tree for tree, _ in finished]
    return trees, splits, shards


def shapes(trees, splits):
    return [
        (t.left.tolist(), t.value.tolist(), [splits[r][0] for r in t.record if r >= 0], t.count.tolist()) for t in trees
    ]


def rounded(trained):
    """The plain trees with values as slots have them."""
    for tree in trained.trees:
        tree.value[:] = np.rint(tree.value * 2.0**32) / 2.0**32
    features = trained.parts[0].splits.feature
    return [
        (t.left.tolist(), t.value.tolist(), [features[r] for r in t.record if r >= 0], t.count.tolist())
        for t in trained.trees
    ]


def dealt_rows(rng, n_rows, holders):
    """Holders of unequal size: one with a row, one with none."""
    order = rng.permutation(n_rows)
    cuts = np.sort(rng.integers(1, n_rows, holders - 2))
    return [np.sort(part) for part in np.split(order, [1, *np.maximum(cuts, 1)])] + [np.empty(0, np.intp)]


@KINDS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("depth_always", [False, True])
@pytest.mark.parametrize("seed", all_but_first_slow(*range(4)))
def test_trees_are_the_plain_growers(objective, n_classes, weighted, depth_always, seed):
    """With gaps, categories and a constant column, over holders of many rows, of one and of none."""
    rng = np.random.default_rng(seed)
    table = random_codes(rng, 120, [5, 4, 1, 6, 3], missing=0.15 * (seed % 2), categorical=[1, 4])
    y = random_labels(rng, table, objective, n_classes)
    weight = rng.uniform(0.2, 2.0, 120) if weighted else None
    loss = make_objective(objective, y, weight, n_classes=n_classes)
    trees, splits, shards = grown(table, y, weight, parts := dealt_rows(rng, 120, 6), loss, depth_always=depth_always)
    plain = train(table, y, weight, objective=objective, n_classes=n_classes, n_estimators=3, **RULES)
    assert shapes(trees, splits) == rounded(plain)
    assert any(len(tree.left) > 3 for tree in trees)
    for rows, shard in zip(parts, shards, strict=True):
        np.testing.assert_array_equal(shard.margins.T, plain.walk(table.matrix)[rows])


def test_columns_drawn_for_a_tree_are_the_plain_growers():
    rng = np.random.default_rng(7)
    table = random_codes(rng, 100, [5, 4, 3, 6], missing=0.1)
    y = random_labels(rng, table, "logistic")
    drawing = np.random.default_rng(5)
    columns = [draw(drawing, 4, 0.5) for _ in range(3)]
    plain = train(table, y, n_estimators=3, colsample_bytree=0.5, random_state=5, **RULES)
    trees, splits, _ = grown(
        table, y, None, dealt_rows(rng, 100, 4), make_objective("logistic", y, None), columns=columns
    )
    assert shapes(trees, splits) == rounded(plain)
    assert all(splits[r][0] in c for tree, c in zip(trees, columns, strict=True) for r in tree.record if r >= 0)


def test_rows_out_of_a_sample_count_nowhere_and_follow():
    rng = np.random.default_rng(8)
    table = random_codes(rng, 100, [5, 4, 3, 6])
    y = random_labels(rng, table, "logistic")
    drawing = np.random.default_rng(3)
    sampled = [draw(drawing, 100, 0.6) for _ in range(3)]
    plain = train(table, y, n_estimators=3, subsample=0.6, random_state=3, **RULES)
    parts = dealt_rows(rng, 100, 4)
    samples = [[np.flatnonzero(np.isin(rows, chosen)).astype(np.int32) for rows in parts] for chosen in sampled]
    trees, splits, shards = grown(table, y, None, parts, make_objective("logistic", y, None), samples=samples)
    assert shapes(trees, splits) == rounded(plain)
    for rows, shard in zip(parts, shards, strict=True):
        np.testing.assert_array_equal(shard.margins.T, plain.walk(table.matrix)[rows])


def test_leaves_above_the_last_level_are_in_the_rightmost_slot_below_them():
    """A tree of unequal branches: 24 rows left of a cut are not split again, the others are, down to level 4."""
    codes = np.repeat(np.arange(16), 3)[:, None]
    y = np.where(codes[:, 0] < 8, 0.0, codes[:, 0] % 2.0)
    table = Codes(codes, [16])
    objective = make_objective("logistic", y, None)
    cells, kept = cells_of(table, objective), []
    rules = SplitRules(
        grad_unit=objective.grad_unit, hess_unit=objective.hess_unit, max_depth=4, min_child_samples=3,
        min_child_weight=0.0, min_split_loss=1e-6,
    )  # fmt: skip
    shard = SlotShard(table.codes, y, None, objective, cells)
    shard.start_round([np.zeros(1, np.int32)], [None])

    def record(feature, left_bins):
        kept.append(left_bins.copy())
        return len(kept) - 1

    tree = SlotTree(rules, cells, np.zeros(1, np.int32), np.zeros(1, np.bool_), record)
    features = []
    for depth in range(4):
        chosen = tree.split(shard.level(depth), depth)
        features.append(chosen.features)
        shard.decide(0, chosen.features, chosen.left_bins)
    finished, values = tree.finish(4)
    assert values.shape == (16,)
    assert (features[1] < 0).any()
    assert (features[1] >= 0).any()  # one side ends above the last level
    node = np.zeros(len(codes), np.int64)
    for _ in range(4):
        inner = finished.left[node] >= 0
        left = np.array([kept[max(finished.record[k], 0)][c] for k, c in zip(node, table.codes[:, 0], strict=True)])
        node = np.where(inner, finished.left[node] + ~left, node)
    np.testing.assert_array_equal(values[shard.slots[0]], finished.value[node])
    early = shard.slots[0][codes[:, 0] < 8]
    assert set(early.tolist()) == {7}  # left, then right to the end
    assert np.count_nonzero(values) <= (finished.left < 0).sum()
    np.testing.assert_array_equal(values, np.rint(values * 2.0**32) / 2.0**32)


def test_nodes_are_split_on_what_is_left_where_holders_went_since_the_last_level():
    """Not on totals that the parents' splits told, with rows that are gone."""
    rng = np.random.default_rng(2)
    table = random_codes(rng, 400, [6, 5])
    y = random_labels(rng, table, "logistic")
    objective = make_objective("logistic", y, None)
    cells, columns = cells_of(table, objective), np.arange(2, dtype=np.int32)
    rules = SplitRules(grad_unit=objective.grad_unit, hess_unit=objective.hess_unit, **{**RULES, "max_depth": 2})
    shards = [SlotShard(table.codes[part], y[part], None, objective, cells) for part in (slice(200), slice(200, 400))]
    for shard in shards:
        shard.start_round([columns], [None])
    tree = SlotTree(rules, cells, columns, np.zeros(2, np.bool_), lambda feature, left: 0)
    for depth, there in ((0, shards), (1, shards[:1])):
        chosen = tree.split(np.sum([shard.level(depth) for shard in there], axis=0), depth)
        assert np.all(chosen.features >= 0)
        for shard in shards:
            shard.decide(0, chosen.features, chosen.left_bins)
    finished, values = tree.finish(2)
    leaves = np.flatnonzero(finished.left < 0)
    np.testing.assert_array_equal(finished.count[leaves], np.bincount(shards[0].slots[0], minlength=4))
    grad, hess, _ = objective.gradients(np.zeros((200, 1)), y[:200], None)
    sums = np.array([[part[0][shards[0].slots[0] == slot].sum() for part in (grad, hess)] for slot in range(4)])
    expected = -rules.learning_rate * sums[:, 0] / (sums[:, 1] + rules.reg_lambda / rules.hess_unit)
    np.testing.assert_allclose(values, expected, atol=1e-9)
