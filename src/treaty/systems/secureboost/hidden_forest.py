"""Margins of a finished model on shared rows: neither party learns a decision of the other (``membership="hidden"``).

Every row of every tree is a row of `hidden_rows.HiddenRows`, so that all trees are walked at once, level by level: each
party's sides at its own splits, then the weights of leaves, which the active party knows. A row's weights in all trees
add up to shares of its margin. At prediction the active party opens them; a training that goes on keeps them.

* *Active party*: learns rows' margins at prediction, and nothing in a training. By trying which leaves add up to a
  margin, it can find the decisions of small models, as anyone who sees a margin can. It is honest but curious: trees of
  its own making would read decisions one by one.
* *Passive party*: learns how many rows and trees there are, where its own splits are in them, and which levels have
  splits of the other party.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.hidden_rows import MOST_LEVELS, WEIGHT_BYTES, HiddenRows
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers
from treaty.data.table import Table
from treaty.errors import DataError, PeerProtocolError
from treaty.machine.arrays import Floats, Int32s, Integers, pieces
from treaty.messaging.exchanges import OF_ONE_MODEL, agree, take_rows
from treaty.messaging.messages import Array, Message, leaks, row_pieces, view
from treaty.messaging.party import Party
from treaty.models.trees import decide
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import RoleInput
from treaty.systems.vertical.prediction import Finish, RecordCount, check_present, decidable
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
    """Return the weights of complete trees' leaves in units, int64 (trees, 2^depth)."""
    weights = np.zeros((len(trees), 1 << depth), np.int64)
    for number, node, level, place in layout_of(trees, depth):
        if trees[number].left[node] < 0:
            # without a split all rows go left
            weights[number, place << depth - level] = round(trees[number].value[node] / unit)
    return weights


def margin_shares(
    transfers: Transfers, table: Table, splits: SplitTable, records: Int32s, others: Sequence[bool],
    weights: Integers | None, threads: int,
) -> Steps[NDArray[np.uint32]]:  # fmt: skip
    """Return shares modulo 2^24 of rows' sums of leaf weights, uint32 (n_rows,).

    `records` are own ones in complete trees; `others` says at which levels the other party has splits. The active party
    gives the `weights`, the other None.
    """
    trees, n_rows = len(records), table.n_rows
    used, place = np.unique(records[records >= 0], return_inverse=True)
    number = np.full(records.shape, -1)
    number[records >= 0] = place
    out = np.empty(n_rows, np.uint32)
    for of in pieces(n_rows, max(8, _WALKED_AT_ONCE // max(1, trees) // 8 * 8)):
        count = of.stop - of.start
        left = np.unpackbits(decide(splits, table, used.astype(np.int32), threads, of), axis=1, count=count)
        rows = HiddenRows(transfers, trees * count)
        for level, theirs in enumerate(others):
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


def show_forest(party: Party, trees: Sequence[Tree], own: int) -> tuple[Int32s, list[bool]]:
    """Tell the passive party where its splits are; return own records, and at which levels the other has splits."""
    (peer,), depth = party.peers, depth_of(trees)
    mine, theirs = records_of(trees, own, depth), records_of(trees, 1 - own, depth)
    party.send(peer, HiddenForest(Array.of(theirs), Array.of(np.array(_levels(mine)))))
    return mine, _levels(theirs)


def read_forest(came: HiddenForest, active: str, held: int) -> tuple[Int32s, list[bool]]:
    """Return what `show_forest` tells: own records, below `held`, and at which levels the active party has splits."""
    what = "HiddenForest"
    levels = view(came.active, np.bool_, (None,), peer=active, what=f"{what}.active")
    if not 1 <= len(levels) <= MOST_LEVELS:
        raise PeerProtocolError(active, f"expected 1 to {MOST_LEVELS} levels", at=f"{what}.active")
    shape = None, (1 << len(levels)) - 1
    records = view(came.records, np.int32, shape, peer=active, what=f"{what}.records")
    if not len(records) or records.min() < -1 or records.max() >= held:
        raise PeerProtocolError(active, f"expected records below {held}, of one tree at least", at=f"{what}.records")
    return records, levels.tolist()


def _levels(records: Int32s) -> list[bool]:
    """Return at which levels there are records."""
    depth = records.shape[1].bit_length()
    return [bool((records[:, (1 << level) - 1 : (2 << level) - 1] >= 0).any()) for level in range(depth)]


def predict_active(inputs: RoleInput[SecureBoost]) -> Floats:
    """Return margins, float64 (n_rows, 1), of the role's rows, exactly, without a decision of the other party."""
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    (peer,), objective = party.peers, part.grown.objective
    check_present(party, part, table)
    _agree(inputs)
    trees = decidable(party, part, {peer: party.receive(peer, RecordCount).records})
    margins = np.full((table.n_rows, 1), objective.base_margins)
    if trees:
        own = part.grown.sources.index(party.name)
        records, others = show_forest(party, trees, own)
        weights = leaf_weights(trees, depth_of(trees), objective.leaf_unit)
        transfers = compute(party, open_transfers(0))
        shares = compute(party, margin_shares(transfers, table, part.splits, records, others, weights, inputs.threads))
        for of, came in take_rows(party, peer, table.n_rows, _SHARE_BITS, MarginShares):
            shares[of] += view(came.shares, np.uint32, (of.stop - of.start,), peer=peer, what="MarginShares.shares")
        sums = (shares & np.uint32(_WHOLE)).astype(np.int64)
        sums -= (sums > _WHOLE >> 1) * (_WHOLE + 1)
        margins[:, 0] += sums * objective.leaf_unit
    party.send(peer, Finish())
    return margins


def predict_passive(inputs: RoleInput[SecureBoost]) -> None:
    """Take part in a prediction as the passive party."""
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    (active,) = party.peers
    check_present(party, part, table)
    _agree(inputs)
    party.send(active, RecordCount(len(part.splits)))
    if isinstance(came := party.receive(active, HiddenForest, Finish), HiddenForest):
        records, others = read_forest(came, active, len(part.splits))
        transfers = compute(party, open_transfers(1))
        shares = compute(party, margin_shares(transfers, table, part.splits, records, others, None, inputs.threads))
        for of in row_pieces(table.n_rows, _SHARE_BITS):
            party.send(active, MarginShares(Array.of(shares[of])))
        party.receive(active, Finish)


def _agree(inputs: RoleInput[SecureBoost]) -> None:
    terms: dict[str, Any] = {
        "model": inputs.part.model_id, "rows to predict": inputs.rows.table.n_rows, "membership": "hidden"
    }  # fmt: skip
    agree(inputs.party, terms, remedy=OF_ONE_MODEL)
