"""What an owner of columns lets the active party ask, and when."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.errors import PeerProtocolError
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import Array
from treaty.runs.threads import play
from treaty.systems.pooled.continuing import CheckpointReceipt, CheckpointRequest
from treaty.systems.vertical.column_owner import SplitOwner, tree_table
from treaty.systems.vertical.messages import SplitRequest, SumsRequest, TreeEnd, TreeStart
from treaty.systems.vertical.prediction import DecideRequest, Finish
from treaty.systems.vertical.training import TreeLimits
from treaty.trees.ensemble import SplitTable
from treaty.trees.splits import SplitRules


def split_of(*features: int) -> SplitRequest:
    bins = np.zeros((len(features), 32), np.uint8)
    return SplitRequest(Array.of(np.array(features, np.int32)), Array.of(bins))


COLUMNS = np.array([0, 2], np.int32)
NONE = Array.of(np.zeros(0, np.int32))
MESSAGES = {
    "start": TreeStart(None, 0, NONE, b"", []),
    "level": SumsRequest([], True),
    "piece": SumsRequest([], False),
    "split": SplitRequest(NONE, NONE),
    "end": TreeEnd(),
    "decide": DecideRequest(0, NONE),
    "keep": CheckpointRequest(1),
    "finish": Finish(),
}


def order_after(*steps: str) -> MessageOrder:
    """Return where a training stands after these messages, each of which is allowed when it comes."""
    order = MessageOrder(tree_table(TreeStart, SumsRequest, SplitRequest), "between trees")
    for step in steps:
        assert type(MESSAGES[step]) in order.allowed
        order.take(MESSAGES[step])
    return order


def allowed_after(*steps: str) -> set[str]:
    allowed = order_after(*steps).allowed
    return {name for name, message in MESSAGES.items() if type(message) in allowed}


BETWEEN_TREES = {"start", "decide", "keep", "finish"}
SUMS = {"level", "piece", "end"}


@pytest.mark.parametrize(
    ("steps", "allowed"),
    [
        ("", BETWEEN_TREES),
        ("decide keep", BETWEEN_TREES),
        ("start", SUMS),
        ("start level", {*SUMS, "split"}),
        ("start piece", SUMS),
        ("start piece level", {*SUMS, "split"}),
        ("start level level", {*SUMS, "split"}),  # of a level where another party won
        ("start level split", SUMS),
        ("start level split piece", SUMS),  # no split between pieces
        ("start level split level", {*SUMS, "split"}),
        ("start end", BETWEEN_TREES),
        ("start level end", BETWEEN_TREES),
        ("start level end start", SUMS),
        ("finish", set()),
    ],
)
def test_within_a_tree_sums_and_then_at_most_one_split_are_asked_for_level_by_level(steps, allowed):
    assert allowed_after(*steps.split()) == allowed


def test_what_is_not_allowed_is_refused_naming_the_sender():
    def active(party):
        party.send("p1", MESSAGES["split"])
        party.receive("p1", CheckpointReceipt)

    def passive(party):
        party.receive("p0", *order_after("start").allowed)

    with pytest.raises(PeerProtocolError, match="expected SumsRequest or TreeEnd of round 0, got SplitRequest"):
        play(
            {"p0": active, "p1": passive}, {"p0": ["p1"], "p1": ["p0"]}, job="test", protocol="secureboost", timeout=5
        )  # fmt: skip


def rules(**limits) -> SplitRules:
    return SplitRules(grad_unit=1.0, hess_unit=1.0, min_child_samples=3, **limits)


def test_a_tree_by_best_gain_has_as_many_nodes_and_splits_as_leaves_allow():
    limits = TreeLimits("bank", rules(max_depth=4, max_leaves=5))
    for _ in range(2):  # trees
        limits.start(COLUMNS)
        limits.sums(1, last=True)
        limits.split(split_of(0))
        with pytest.raises(PeerProtocolError, match="1 to 3 nodes of this level"):
            limits.asked(4)
        limits.sums(2, last=True)
        limits.split(split_of(0, 2))
        with pytest.raises(PeerProtocolError, match="no more splits than the level may have nodes"):
            limits.split(split_of(0, 2))
        limits.sums(1, last=True)
        with pytest.raises(PeerProtocolError, match="1 to 0 nodes of this level"):
            limits.sums(1, last=True)


@pytest.fixture
def limits() -> TreeLimits:
    """Return the limits of a tree of depth 2 with leaves of 3 rows or more, begun."""
    begun = TreeLimits("bank", rules(max_depth=2))
    begun.start(COLUMNS)
    return begun


def test_a_tree_has_no_more_levels_than_agreed(limits):
    for _ in range(2):  # trees
        limits.sums(1, last=True)
        limits.sums(1, last=True)
        with pytest.raises(PeerProtocolError, match="2 levels in a tree at most - from bank"):
            limits.sums(1, last=True)
        limits.start(COLUMNS)


def test_a_piece_about_more_nodes_than_the_level_may_have_is_refused(limits):
    limits.asked(1)
    with pytest.raises(PeerProtocolError, match="1 to 1 nodes of this level - from bank"):
        limits.asked(2)
    limits.sums(1, last=True)
    limits.sums(1, last=False)
    limits.asked(1)
    with pytest.raises(PeerProtocolError, match="1 to 2 nodes of this level - from bank"):
        limits.asked(2)
    limits.sums(1, last=True)
    with pytest.raises(PeerProtocolError, match="2 levels in a tree at most - from bank"):
        limits.asked(0)


@pytest.mark.parametrize("sizes", [(9, 5), (9, 0)], ids=["small", "empty"])
def test_nodes_with_too_few_rows_are_not_split(limits, sizes):
    limits.node_sizes(np.array([6, 6]))
    with pytest.raises(PeerProtocolError, match="expected nodes of 6 rows at least - from bank"):
        limits.node_sizes(np.array(sizes))


def test_a_level_may_be_asked_for_in_as_many_pieces_as_it_may_have_nodes(limits):
    limits.sums(1, last=True)
    limits.sums(1, last=False)
    limits.sums(1, last=True)
    limits.split(split_of(0, 2))
    for pieces in ([False], [True, False, False]):
        limits.start(COLUMNS)
        for last in pieces:
            limits.sums(1, last=last)
        with pytest.raises(PeerProtocolError, match=r"expected 1 to [12] nodes of this level"):
            limits.sums(1, last=True)


@pytest.mark.parametrize(("levels", "nodes"), [(0, 0), (0, 2), (1, 3)])
def test_a_level_is_asked_about_its_nodes_alone(limits, levels, nodes):
    for _ in range(levels):
        limits.sums(1, last=True)
    with pytest.raises(PeerProtocolError, match="nodes of this level"):
        limits.sums(nodes, last=True)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ([0, 0], "no more splits than the level may have nodes"),
        ([1], "splits of the tree's columns"),
        ([], "nodes that are split"),
    ],
)
def test_splits_are_of_the_levels_nodes_and_the_trees_columns(features, expected):
    limits = TreeLimits("bank", rules(max_depth=2))
    limits.start(COLUMNS)
    limits.sums(1, last=True)
    with pytest.raises(PeerProtocolError, match=expected):
        limits.split(split_of(*features))


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


def request_of(*splits: tuple[int, set[int]]) -> SplitRequest:
    """Ask for splits: feature and slots going left."""
    going = np.zeros((len(splits), 256), np.bool_)
    for k, (_, slots) in enumerate(splits):
        going[k, list(slots)] = True
    features = Array.of(np.array([feature for feature, _ in splits], np.int32))
    return SplitRequest(features, Array.of(np.packbits(going, axis=1)))


def column(array: Array, count: int) -> np.ndarray:
    bits = np.frombuffer(array.data, np.uint8).reshape(array.shape)
    return np.unpackbits(bits, axis=1, count=count).astype(bool)


def test_columns_decide_all_rows_and_equal_ones_are_sent_once(owner):
    end, codes, splits = owner
    asked = [(0, {0}), (0, {0, 1, 3}), (0, {0}), (1, {0, 2})]
    (first,) = end.divide_table(request_of(*asked))
    left = column(first.new, len(codes))
    expected = [np.isin(codes[:, feature], list(slots)) for feature, slots in asked]
    np.testing.assert_array_equal(left, [expected[0], expected[1], expected[3]])
    assert np.frombuffer(first.columns.data, np.int32).tolist() == [0, 1, 0, 2]
    assert np.frombuffer(first.records.data, np.int32).tolist() == [0, 1, 2, 3]  # each split has a record all the same
    (later,) = end.divide_table(request_of((1, {0, 2}), (0, {0, 1}), (0, {0})))
    assert np.frombuffer(later.columns.data, np.int32).tolist() == [2, 3, 0]
    np.testing.assert_array_equal(column(later.new, len(codes)), [np.isin(codes[:, 0], [0, 1])])
    assert len(splits) == 7


def test_slots_beyond_a_feature_do_not_make_a_column_a_new_one(owner):
    end, _, _ = owner
    list(end.divide_table(request_of((0, {0}))))
    (again,) = end.divide_table(request_of((0, {0, 77, 255})))
    assert again.new.shape == (0, 2)
    assert np.frombuffer(again.columns.data, np.int32).tolist() == [0]


def test_named_rows_alone_are_decided(owner):
    end, codes, _ = owner
    node = np.array([0, -1, 0, 1, 1, -1, 0, 1, 0])
    rows, sizes = np.flatnonzero(node >= 0), []
    named = [(part, node[part]) for part in (rows[:3], rows[3:])]  # in two pieces
    (answer,) = end.divide_nodes(request_of((0, {0, 1}), (1, {1})), named, sizes.append)
    bits = np.unpackbits(np.frombuffer(answer.left.data, np.uint8), count=7).astype(bool)
    left = np.where(node == 0, np.isin(codes[:, 0], [0, 1]), codes[:, 1] == 1)
    assert bits.tolist() == left[rows].tolist()
    assert sizes[0].tolist() == [4, 3]


def test_nothing_is_answered_or_recorded_before_the_nodes_are_checked(owner):
    end, _, splits = owner

    def refuse(_):
        raise PeerProtocolError("bank", "too few")

    with pytest.raises(PeerProtocolError, match="too few"):
        next(end.divide_nodes(request_of((0, {0})), [(np.array([1]), np.array([0]))], refuse))
    assert len(splits) == 0


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((2, {0}), "expected features below 2"),
        ((-1, {0}), "expected features below 2"),
        ((0, {1}), "expected the lowest bins to go left"),
        ((0, {3}), "expected the lowest bins to go left"),
        ((0, set()), "expected the lowest bins to go left"),
        ((1, set()), "expected the lowest bins to go left"),
        ((1, {4}), "expected the lowest bins to go left"),
    ],
)
@pytest.mark.parametrize("named", [False, True], ids=["column", "node"])
def test_what_is_no_split_is_refused_and_not_recorded(owner, asked, expected, named):
    end, _, splits = owner
    request = request_of(asked)
    with pytest.raises(PeerProtocolError, match=f"{expected}.* from bank"):
        next(end.divide_nodes(request, [], print) if named else end.divide_table(request))
    assert len(splits) == 0
