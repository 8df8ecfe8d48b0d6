import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.sums import bin_products
from treaty.crypto.sums.bin_products import plan_blocks, sort_cells


def plan_groups(codes, left_out, bins):
    """Top groups of all blocks."""
    return [group for block in plan_blocks(codes, left_out, bins, 1) for group in block.groups]


def columns_of(group):
    return [group.feature] if not group.parts else [f for part in group.parts for f in columns_of(part)]


def labels_of(group, labels):
    """Label of every table row in each column of a group, by following the groups inside."""
    if not group.parts:
        return {group.feature: labels}
    found = {}
    for part in group.parts:
        found |= labels_of(part, np.where(labels >= 0, part.labels[np.maximum(labels, 0)], -1))
    return found


def products(group, items):
    """Products a group costs by way of its cells, `items` per cell of the group around."""
    own = len(np.unique(group.labels[group.labels >= 0]))
    return (group.labels >= 0).sum() - own + sum(products(part, own) for part in group.parts)


@st.composite
def tables(draw):
    rows, columns = draw(st.integers(0, 60)), draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bins = rng.integers(1, 6, columns)
    codes = np.floor(rng.random((rows, columns)) ** draw(st.sampled_from([1, 3])) * bins).astype(np.uint8)
    for column in range(1, columns):  # some columns follow another one
        if draw(st.booleans()):
            codes[:, column] = np.minimum(codes[:, column - 1], bins[column] - 1)
    left_out = np.array([np.argmax(np.bincount(codes[:, f], minlength=1)) for f in range(columns)], np.int64)
    return codes, left_out, bins.astype(np.int64)


@settings(deadline=None, max_examples=80)
@given(tables())
def test_groups_keep_every_column_and_its_labels(table):
    codes, left_out, bins = table
    groups = plan_groups(codes, left_out, bins)
    assert sorted(f for group in groups for f in columns_of(group)) == list(range(codes.shape[1]))
    for group in groups:
        for feature, labels in labels_of(group, group.labels).items():
            wanted = np.where(codes[:, feature] == left_out[feature], -1, codes[:, feature].astype(int))
            assert np.array_equal(labels, wanted)


@settings(deadline=None, max_examples=80)
@given(tables())
def test_groups_never_cost_more_products_than_columns_alone(table):
    codes, left_out, bins = table
    alone = 0
    for f in range(codes.shape[1]):
        wanted = codes[:, f][codes[:, f] != left_out[f]]
        alone += len(wanted) - len(np.unique(wanted))
    assert sum(products(group, len(codes)) for group in plan_groups(codes, left_out, bins)) <= alone


@settings(deadline=None, max_examples=40)
@given(tables(), st.integers(1, 4), st.integers(1, 3))
def test_blocks_hold_neighbouring_columns_in_order(table, width, threads):
    codes, left_out, bins = table
    before, bin_products._BLOCK_COLUMNS = bin_products._BLOCK_COLUMNS, width
    try:
        blocks = plan_blocks(codes, left_out, bins, threads)
    finally:
        bin_products._BLOCK_COLUMNS = before
    covered = []
    for block in blocks:
        inside = sorted(f for group in block.groups for f in columns_of(group))
        assert inside == list(range(block.columns.start, block.columns.stop))
        assert len(inside) <= width
        covered += inside
        for group in block.groups:
            for feature, labels in labels_of(group, group.labels).items():
                wanted = np.where(codes[:, feature] == left_out[feature], -1, codes[:, feature].astype(int))
                assert np.array_equal(labels, wanted)
    assert covered == list(range(codes.shape[1]))


def test_labels_are_as_short_as_their_cells_allow():
    codes = np.random.default_rng(1).integers(0, 250, (70_000, 1)).astype(np.uint8)
    narrow = np.random.default_rng(2).integers(0, 33, (70_000, 1)).astype(np.uint8)
    for table, bins, dtype in ((codes, 250, np.int16), (narrow, 33, np.int8)):
        (group,) = plan_groups(table, np.zeros(1, np.int64), np.array([bins]))
        assert group.labels.dtype == dtype
        assert np.array_equal(group.labels, np.where(table[:, 0] == 0, -1, table[:, 0].astype(int)))


def test_equal_columns_share_one_group():
    column = np.random.default_rng(0).integers(0, 8, 500).astype(np.uint8)
    groups = plan_groups(np.stack([column] * 4, axis=1), np.zeros(4, np.int64), np.full(4, 8, np.int64))
    assert len(groups) == 1
    assert products(groups[0], 500) == np.count_nonzero(column) - 7


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(st.integers(-1, 5), max_size=12), max_size=6))
def test_cells_are_sorted_by_node_and_label(nodes):
    labels = np.array([x for node in nodes for x in node], np.int32)
    starts = np.cumsum([0, *(len(node) for node in nodes)]).astype(np.int64)
    cells = sort_cells(labels, starts, 6)
    for node, (first, stop) in enumerate(zip(cells.node_starts[:-1], cells.node_starts[1:], strict=True)):
        found = {}
        for k in range(first, stop):
            found[int(cells.labels[k])] = cells.items[cells.starts[k] : cells.starts[k + 1]].tolist()
        wanted = {}
        for i in range(starts[node], starts[node + 1]):
            if labels[i] >= 0:
                wanted.setdefault(int(labels[i]), []).append(i)
        assert found == wanted
