"""What an owner of columns lets the active party ask, and when."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array
from treaty.systems.vertical.column_owner import SplitOwner, TreeOrder
from treaty.systems.vertical.encrypted_columns import SplitRequest, SumsRequest
from treaty.trees.ensemble import SplitTable


def split_of(*sizes: int) -> SplitRequest:
    nodes = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    none = Array.of(np.zeros(0, np.int32))
    return SplitRequest(none, none, Array.of(np.append(nodes, np.int32(-1))))


@pytest.fixture
def order() -> TreeOrder:
    """Return the order of a tree of depth 2 with leaves of 3 rows or more, begun."""
    begun = TreeOrder("bank", 2, 3, by_column=False)
    begun.start(COLUMNS)
    return begun


COLUMNS = np.array([0, 2], np.int32)
LEVEL = SumsRequest([], True)
PIECE = SumsRequest([], False)


def test_a_tree_goes_from_sums_to_split_level_by_level(order):
    order.sums(LEVEL, 1)
    order.split(split_of(12))
    order.sums(LEVEL, 1)
    order.split(split_of(6, 6))
    order.end()
    order.start(COLUMNS)
    order.sums(LEVEL, 1)  # of a level where another party won
    order.sums(LEVEL, 1)
    order.end()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["start"], "expected TreeEnd before the next TreeStart"),
        (["end", "end"], "expected TreeStart before TreeEnd"),
        (["end", "sums"], "2 levels in a tree at most"),
        (["sums", "sums", "sums"], "2 levels in a tree at most"),
        (["split"], "expected SumsRequest before SplitRequest"),
        (["sums", "split", "split"], "expected SumsRequest before SplitRequest, and one of it"),
        (["sums", "end", "split"], "expected SumsRequest before SplitRequest"),
        (["sums", "end", "start", "split"], "expected SumsRequest before SplitRequest"),
        (["sums", "small"], "expected nodes of 6 rows at least"),
        (["sums", "empty"], "expected nodes of 6 rows at least"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else "",
)
def test_anything_else_is_refused_naming_the_asker(order, steps, expected):
    requests = {"split": split_of(6), "small": split_of(9, 5), "empty": split_of(9, 0, 9)}
    do = {"start": lambda: order.start(COLUMNS), "end": order.end, "sums": lambda: order.sums(LEVEL, 1)}
    do |= {name: lambda request=request: order.split(request) for name, request in requests.items()}
    *before, last = steps
    for step in before:
        do[step]()
    with pytest.raises(PeerProtocolError, match=rf"{expected}.* - from bank"):
        do[last]()


def test_a_level_may_be_asked_for_in_as_many_pieces_as_it_may_have_nodes(order):
    order.sums(LEVEL, 1)
    order.sums(PIECE, 1)
    order.sums(LEVEL, 1)
    order.split(split_of(6, 6))
    order.end()
    for pieces in ([PIECE], [LEVEL, PIECE, PIECE]):
        order.start(COLUMNS)
        for piece in pieces:
            order.sums(piece, 1)
        with pytest.raises(PeerProtocolError, match=r"expected 1 to [12] nodes of this level"):
            order.sums(LEVEL, 1)
        order.end()


@pytest.mark.parametrize(("levels", "nodes"), [(0, 0), (0, 2), (1, 3)])
def test_a_level_is_asked_about_its_nodes_alone(order, levels, nodes):
    for _ in range(levels):
        order.sums(LEVEL, 1)
    with pytest.raises(PeerProtocolError, match="nodes of this level"):
        order.sums(LEVEL, nodes)


@pytest.mark.parametrize(
    ("features", "expected"),
    [([0, 0], "no more splits than the level may have nodes"), ([1], "splits of the tree's columns")],
)
def test_splits_are_of_the_levels_nodes_and_the_trees_columns(features, expected):
    order = TreeOrder("bank", 2, 3, by_column=True)
    order.start(COLUMNS)
    order.sums(LEVEL, 1)
    bins = Array.of(np.zeros((len(features), 32), np.uint8))
    with pytest.raises(PeerProtocolError, match=expected):
        order.split(SplitRequest(Array.of(np.array(features, np.int32)), bins, None))


def test_a_split_between_pieces_is_refused(order):
    order.sums(LEVEL, 1)
    order.split(split_of(12))
    order.sums(PIECE, 1)
    with pytest.raises(PeerProtocolError, match="expected SumsRequest before SplitRequest"):
        order.split(split_of(6))


@pytest.mark.parametrize("by_column", [False, True])
def test_rows_of_nodes_are_named_just_where_that_was_agreed(by_column):
    none = Array.of(np.zeros(0, np.int32))
    unnamed = SplitRequest(none, none, None)
    for named, request in ((True, split_of(6)), (False, unnamed)):
        order = TreeOrder("bank", 2, 3, by_column=by_column)
        order.start(COLUMNS)
        order.sums(LEVEL, 1)
        if named is by_column:
            with pytest.raises(PeerProtocolError, match="expected rows of nodes named or not as agreed - from bank"):
                order.split(request)
        else:
            order.split(request)


# ---------------------------------------------------------------- who goes left


CUTS = [0.5, 1.5]
VALUES = np.array([0.0, 1.0, 2.0, np.nan, 1.0, 0.0, 2.0, 2.0, 1.0], np.float32)


@pytest.fixture
def owner() -> tuple[SplitOwner, np.ndarray, SplitTable]:
    """Return the owner of a column of three values and gaps and of a category, its codes and its records."""
    frame = pd.DataFrame({"x": VALUES, "c": pd.Categorical(list("aabbccabc"))})
    bins = fit_bins(to_table(frame, party="shop"), 8)
    codes = bins.transform(to_table(frame, party="shop"))
    splits = SplitTable()
    return SplitOwner("bank", codes, bins, splits), codes, splits


def request_of(*splits: tuple[int, set[int]], rows: np.ndarray | None = None) -> SplitRequest:
    """Ask for splits: feature and slots going left."""
    going = np.zeros((len(splits), 256), np.bool_)
    for k, (_, slots) in enumerate(splits):
        going[k, list(slots)] = True
    features = Array.of(np.array([feature for feature, _ in splits], np.int32))
    return SplitRequest(features, Array.of(np.packbits(going, axis=1)), None if rows is None else Array.of(rows))


def column(array: Array, count: int) -> np.ndarray:
    bits = np.frombuffer(array.data, np.uint8).reshape(array.shape)
    return np.unpackbits(bits, axis=1, count=count).astype(bool)


def test_columns_decide_all_rows_and_equal_ones_are_sent_once(owner):
    end, codes, splits = owner
    asked = [(0, {0}), (0, {0, 1, 3}), (0, {0}), (1, {0, 2})]
    first = end.divide(request_of(*asked))
    left = column(first.new, len(codes))
    expected = [np.isin(codes[:, feature], list(slots)) for feature, slots in asked]
    np.testing.assert_array_equal(left, [expected[0], expected[1], expected[3]])
    assert np.frombuffer(first.columns.data, np.int32).tolist() == [0, 1, 0, 2]
    assert np.frombuffer(first.records.data, np.int32).tolist() == [0, 1, 2, 3]  # each split has a record all the same
    later = end.divide(request_of((1, {0, 2}), (0, {0, 1}), (0, {0})))
    assert np.frombuffer(later.columns.data, np.int32).tolist() == [2, 3, 0]
    np.testing.assert_array_equal(column(later.new, len(codes)), [np.isin(codes[:, 0], [0, 1])])
    assert len(splits) == 7


def test_slots_beyond_a_feature_do_not_make_a_column_a_new_one(owner):
    end, _, _ = owner
    end.divide(request_of((0, {0})))
    again = end.divide(request_of((0, {0, 77, 255})))
    assert again.new.shape == (0, 2)
    assert np.frombuffer(again.columns.data, np.int32).tolist() == [0]


def test_named_rows_alone_are_decided(owner):
    end, codes, _ = owner
    rows = np.array([0, -1, 0, 1, 1, -1, 0, 1, 0], np.int32)
    answer = end.divide(request_of((0, {0, 1}), (1, {1}), rows=rows))
    bits = np.unpackbits(np.frombuffer(answer.left.data, np.uint8), count=7).astype(bool)
    expected = [*np.isin(codes[rows == 0, 0], [0, 1]), *(codes[rows == 1, 1] == 1)]
    assert bits.tolist() == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((2, {0}), "expected features below 2"),
        ((-1, {0}), "expected features below 2"),
        ((0, {1}), "expected the lowest bins to go left"),
        ((0, {3}), "expected the lowest bins to go left"),
        ((0, set()), "expected the lowest bins to go left"),
    ],
)
@pytest.mark.parametrize("named", [False, True], ids=["column", "node"])
def test_what_is_no_split_is_refused_and_not_recorded(owner, asked, expected, named):
    end, codes, splits = owner
    rows = np.zeros(len(codes), np.int32) if named else None
    with pytest.raises(PeerProtocolError, match=f"{expected}.* from bank"):
        end.divide(request_of(asked, rows=rows))
    assert len(splits) == 0
