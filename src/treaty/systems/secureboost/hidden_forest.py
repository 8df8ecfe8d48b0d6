"""Margins of a finished model on shared rows: neither party learns a decision of the other (``membership="hidden"``).

Every row of every tree is a row of `hidden_rows.SharedNodes`, so that all trees are walked at once, level by level:
each party's sides at its own splits, then the weights of leaves, which the active party knows. A row's weights in all
trees add up to shares of its margin. At prediction the active party opens them; a training that goes on keeps them.

* *Active party*: learns rows' margins at prediction, and nothing in a training. By trying which leaves add up to a
  margin, it can find the decisions of small models, as anyone who sees a margin can. It is honest but curious: trees of
  its own making would read decisions one by one.
* *Passive party*: learns how many rows and trees there are, where its own splits are in them, and which levels have
  splits of the other party.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.hidden_rows import MOST_LEVELS, WEIGHT_BYTES, SharedNodes
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers
from treaty.data.table import Table
from treaty.errors import DataError, PeerProtocolError
from treaty.machine.arrays import Bytes, Floats, Int32s, Integers, pieces
from treaty.messaging.exchanges import OF_ONE_MODEL, agree, take_rows
from treaty.messaging.messages import Array, Message, leaks, row_pieces, view
from treaty.messaging.party import Party
from treaty.models.trees import decide
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import RoleInput
from treaty.systems.vertical.prediction import (
    Finish,
    OnlineRows,
    RecordCount,
    answer_requests,
    asked_rows,
    check_present,
    decidable,
)
from treaty.systems.vertical.sealed import compute
from treaty.trees.ensemble import SplitTable, Tree

_WALKED_AT_ONCE = 1 << 20  # rows of all trees together
_SHARE_BITS = 32  # of a row, as shares of its margin are sent
_WHOLE = (1 << 8 * WEIGHT_BYTES) - 1


@leaks("how many trees there are, and where its own splits are in them", "exact")
class HiddenForest(Message):
    """The receiver's records, int32 (trees, 2^depth - 1), level by level, -1 at nodes without a split of its own.

    `active`, bool (depth,), says at which levels the sender has splits.
    """

    records: Array
    active: Array


@leaks("each row's sum of leaf weights, from which decisions of small models follow", "exact")
class MarginShares(Message):
    """Shares of the next rows' sums of leaf weights, uint32 (n,), which the active party opens."""

    shares: Array


# ---------------------------------------------------------------- what both ends compute


@dataclass(frozen=True, slots=True)
class SharedForest:
    """What a party knows of the trees: own `records` in complete trees, and at which levels `others` have splits."""

    records: Int32s
    others: Sequence[bool]


def layout_of(trees: Sequence[Tree], depth: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield of every node its tree, its number there, and its level and place in a complete tree."""
    for number, tree in enumerate(trees):
        waiting = [(0, 0, 0)]
        while waiting:
            node, level, place = waiting.pop()
            yield number, node, level, place
            if (left := int(tree.left[node])) >= 0:
                waiting += [(left, level + 1, 2 * place), (left + 1, level + 1, 2 * place + 1)]


def depth_of(trees: Sequence[Tree]) -> int:
    """Return the levels of splits of the deepest tree, at least 1; DataError for more than are walked."""
    depth = max((level for _, _, level, _ in layout_of(trees, 0)), default=0)
    if depth > MOST_LEVELS:
        raise DataError(f"expected trees of at most {MOST_LEVELS} levels of splits, got {depth} - under hidden rows")
    return max(1, depth)


def records_of(trees: Sequence[Tree], source: int, depth: int) -> Int32s:
    """Return one owner's records in complete trees, int32 (trees, 2^depth - 1), -1 at others' splits and none."""
    records = np.full((len(trees), (1 << depth) - 1), -1, np.int32)
    for number, node, level, place in layout_of(trees, depth):
        if trees[number].source[node] == source:
            records[number, (1 << level) - 1 + place] = trees[number].record[node]
    return records


def leaf_weights(trees: Sequence[Tree], depth: int, unit: float) -> Integers:
    """Return the weights of complete trees' leaves in units, int64 (trees, 2^depth).

    DataError for leaves that are no whole units, or margins beyond those that are shared.
    """
    if not unit:
        raise DataError('expected a model with objective="logistic_pieces" - under hidden rows')
    weights = np.zeros((len(trees), 1 << depth), np.int64)
    for number, node, level, place in layout_of(trees, depth):
        if trees[number].left[node] < 0:
            # without a split all rows go left
            weights[number, place << depth - level] = round(trees[number].value[node] / unit)
    if np.abs(weights).max(axis=1).sum() > _WHOLE >> 1:
        most = unit * (_WHOLE + 1) / 2
        raise DataError(f"expected trees that add less than {most:g} to a margin - under hidden rows")
    return weights


Decide = Callable[[Int32s, slice], Bytes]
"""``decide(records, rows)`` returns which of some rows go left at own records, packed bits (n_records, bytes)."""


def margin_shares(
    transfers: Transfers, n_rows: int, decide_own: Decide, forest: SharedForest, weights: Integers | None
) -> Steps[NDArray[np.uint32]]:
    """Return shares modulo 2^24 of rows' sums of leaf weights, uint32 (n_rows,).

    The active party gives the `weights`, int64 (trees, leaves), the other None.
    """
    trees, out = len(forest.records), np.empty(n_rows, np.uint32)
    own = forest.records >= 0
    used, place = np.unique(forest.records[own], return_inverse=True)
    number = np.full(own.shape, -1)
    number[own] = place
    for of in pieces(n_rows, max(8, _WALKED_AT_ONCE // max(1, trees) // 8 * 8)):
        transfers.rekey()
        count = of.stop - of.start
        left = np.unpackbits(decide_own(used.astype(np.int32), of), axis=1, count=count)
        rows = SharedNodes(transfers, trees * count)
        for level, theirs in enumerate(forest.others):
            at = number[:, (1 << level) - 1 : (2 << level) - 1]
            owns = bool((at >= 0).any()), theirs
            bits = yield from rows.side_of_rows(_sides(left, at), owns)
            # of the root's sides each party knows its own, and the other's share is 0
            yield from rows.multiplied(bits, None, 0, owns if level == 0 else (True, True))
        found = yield from rows.weight_of_rows(weights)
        out[of] = found.reshape(trees, count).sum(axis=0, dtype=np.uint32) & np.uint32(_WHOLE)
    return out


def _sides(left: NDArray[np.uint8], numbers: Integers) -> NDArray[np.uint32]:
    """Return which rows of each tree go right at own splits of a level, bit u at node u, (trees * rows,)."""
    sides = np.zeros((len(numbers), left.shape[1]), np.uint32)
    for of_tree, own in zip(sides, numbers, strict=True):
        for node in np.flatnonzero(own >= 0):
            of_tree |= (left[own[node]] ^ 1).astype(np.uint32) << np.uint32(node)
    return sides.reshape(-1)


# ---------------------------------------------------------------- prediction


def show_forest(party: Party, trees: Sequence[Tree], own: int) -> SharedForest:
    """Tell the passive party where its splits are; return what this one knows."""
    (peer,), depth = party.peers, depth_of(trees)
    mine, theirs = records_of(trees, own, depth), records_of(trees, 1 - own, depth)
    party.send(peer, HiddenForest(Array.of(theirs), Array.of(np.array(_levels(mine)))))
    return SharedForest(mine, _levels(theirs))


def read_forest(came: HiddenForest, active: str, held: int) -> SharedForest:
    """Return what `show_forest` tells; own records are below `held`."""
    what = "HiddenForest"
    levels = view(came.active, np.bool_, (None,), peer=active, what=f"{what}.active")
    if not 1 <= len(levels) <= MOST_LEVELS:
        raise PeerProtocolError(active, f"expected 1 to {MOST_LEVELS} levels", at=f"{what}.active")
    shape = None, (1 << len(levels)) - 1
    records = view(came.records, np.int32, shape, peer=active, what=f"{what}.records")
    if not len(records) or records.min() < -1 or records.max() >= held:
        raise PeerProtocolError(active, f"expected records below {held}, of one tree at least", at=f"{what}.records")
    return SharedForest(records, levels.tolist())


def _levels(records: Int32s) -> list[bool]:
    """Return at which levels there are records."""
    depth = records.shape[1].bit_length()
    return [bool((records[:, (1 << level) - 1 : (2 << level) - 1] >= 0).any()) for level in range(depth)]


@dataclass(frozen=True, slots=True)
class _Walk:
    """The active party's end of predictions by a model, for as many rows and as often as wanted."""

    inputs: RoleInput[SecureBoost]
    forest: SharedForest
    weights: Integers
    transfers: Transfers

    @classmethod
    def begin(cls, inputs: RoleInput[SecureBoost], rows: str) -> _Walk | None:
        """Agree on the model and the number of `rows`; return None for a model without a tree."""
        party, part = inputs.party, inputs.part
        (peer,) = party.peers
        check_present(party, part, inputs.rows.table)
        _agree(inputs, rows)
        trees = decidable(party, part, {peer: party.receive(peer, RecordCount).records})
        if not trees:
            return None
        forest = show_forest(party, trees, part.grown.sources.index(party.name))
        weights = leaf_weights(trees, depth_of(trees), part.grown.objective.leaf_unit)
        return cls(inputs, forest, weights, compute(party, open_transfers(0)))

    def margins(self, table: Table) -> Floats:
        """Return margins of rows, float64 (n_rows, 1)."""
        party, part, threads, n_rows = self.inputs.party, self.inputs.part, self.inputs.threads, table.n_rows
        (peer,), objective = party.peers, part.grown.objective
        own = partial(decide_rows, part.splits, table, threads)
        shares = compute(party, margin_shares(self.transfers, n_rows, own, self.forest, self.weights))
        for of, came in take_rows(party, peer, n_rows, _SHARE_BITS, MarginShares):
            shares[of] += view(came.shares, np.uint32, (of.stop - of.start,), peer=peer, what="MarginShares.shares")
        sums = (shares & np.uint32(_WHOLE)).astype(np.int64)
        sums -= (sums > _WHOLE >> 1) * (_WHOLE + 1)
        return np.asarray(objective.base_margins + sums[:, None] * objective.leaf_unit)


def decide_rows(splits: SplitTable, table: Table, threads: int, records: Int32s, rows: slice) -> Bytes:
    """Return a `Decide` of a table's rows, but for its first arguments."""
    return decide(splits, table, records, threads, rows)


def _decide_matrix(splits: SplitTable, rows: NDArray[np.float32], records: Int32s, of: slice) -> Bytes:
    return splits.decide(rows[of], records)


def predict_active(inputs: RoleInput[SecureBoost]) -> Floats:
    """Return margins, float64 (n_rows, 1), of the role's rows, exactly, without a decision of the other party."""
    table, objective = inputs.rows.table, inputs.part.grown.objective
    walk = _Walk.begin(inputs, "rows to predict")
    margins = np.full((table.n_rows, 1), objective.base_margins) if walk is None else walk.margins(table)
    for peer in inputs.party.peers:
        inputs.party.send(peer, Finish())
    return margins


def online_active(inputs: RoleInput[SecureBoost]) -> None:
    """Predict what `inputs.requests` asks for, until it ends, without a decision of the other party."""
    walk, base = _Walk.begin(inputs, "rows"), inputs.part.grown.objective.base_margins
    alone = lambda asked: np.full((asked.table.n_rows, 1), base)  # noqa: E731 - a model without a tree
    answer_requests(inputs, alone if walk is None else lambda asked: walk.margins(asked.table))


def follow(inputs: RoleInput[SecureBoost], rows: str) -> None:
    """Take part in predictions as the passive party: of all its rows, or of those that are asked for, by number."""
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    (active,), splits = party.peers, part.splits
    check_present(party, part, table)
    _agree(inputs, rows)
    party.send(active, RecordCount(len(splits)))
    online = rows == "rows"
    if isinstance(came := party.receive(active, HiddenForest, *([OnlineRows] if online else []), Finish), Finish):
        return
    assert isinstance(came, HiddenForest)
    forest, transfers = read_forest(came, active, len(splits)), compute(party, open_transfers(1))
    if not online:
        own = partial(decide_rows, splits, table, inputs.threads)
        _answer(party, transfers, table.n_rows, own, forest)
        party.receive(active, Finish)
        return
    # by row, as single rows are asked for
    matrix = table.matrix()
    while isinstance(asked := party.receive(active, OnlineRows, Finish), OnlineRows):
        party.transcript.clear()
        some = matrix[asked_rows(asked, active, len(matrix))]
        if len(some):
            _answer(party, transfers, len(some), partial(_decide_matrix, splits, some), forest)


def _answer(party: Party, transfers: Transfers, n_rows: int, own: Decide, forest: SharedForest) -> None:
    (active,) = party.peers
    shares = compute(party, margin_shares(transfers, n_rows, own, forest, None))
    for of in row_pieces(n_rows, _SHARE_BITS):
        party.send(active, MarginShares(Array.of(shares[of])))


def _agree(inputs: RoleInput[SecureBoost], rows: str) -> None:
    terms: dict[str, Any] = {
        "model": inputs.part.model_id, rows: inputs.rows.table.n_rows, "membership": "hidden"
    }  # fmt: skip
    agree(inputs.party, terms, remedy=OF_ONE_MODEL)
