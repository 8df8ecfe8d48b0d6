"""Margins of a finished model on shared rows: neither of two parties learns a decision of the other.

Every row of every tree is a row of `hidden_rows.SharedNodes`, so that all trees are walked at once, level by level:
each party's sides at its own splits, then the weights of leaves, which the active party knows. Sides at splits of
further parties are shared: both parties have a line of bits for each, and act as if the split was their own, since what
a row reads in either is added up (xor). A row's weights in all trees add up to shares of its margin. At prediction
(`shared_prediction`) the active party opens them; a training under ``membership="hidden"`` that goes on keeps them.

Weights are whole numbers: of the objective's unit, if its leaves have one, else of a unit 2^-40 of the largest weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.hidden_best import WEIGHT_BITS, opened_reach, reach_of
from treaty.crypto.transfer.hidden_rows import MOST_LEVELS, WEIGHT_BYTES, SharedNodes, word_of
from treaty.crypto.transfer.stock import Steps, Transfers
from treaty.data.table import Table
from treaty.errors import DataError, PeerProtocolError
from treaty.machine.arrays import Bytes, Int32s, Integers, Words, pieces
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.models.trees import LEAF_BITS, LEAF_LEVELS, ModelPart, decide, layout_of
from treaty.systems.vertical.messages import SignedKey
from treaty.systems.vertical.sealed import compute
from treaty.trees.ensemble import SplitTable, Tree

# Weights without a unit of their own have this many bits below the largest: more would only make sums easier to take
# apart
PRECISION_BITS = 40
_WALKED_AT_ONCE = 1 << 20  # rows of all trees together
# Rows of which shared sides are in memory at once, and these sides of all lines together
_ROWS_OF_LINES, _SIDES_OF_LINES = 1 << 16, 1 << 29
_WHOLE = np.int64((1 << LEAF_BITS) - 1)
_MOST_TREES = 1 << 20  # as at least eight rows are walked at once, however many trees there are


@leaks(
    "as the job's first passive party, how many trees there are, and at which nodes its own splits and other passive "
    "parties' splits are",
    "exact",
)
class HiddenForest(Message):
    """The receiver's records, int32 (trees, 2^depth - 1), level by level, -1 at nodes that it does not decide.

    Numbers from its number of records on are lines of bits that it shares with further passive parties
    (`FurtherLines`). `active`, bool (depth,), says at which levels the sender decides nodes. Trees of
    `outputs` outputs alternate, and shares of weights have `nbytes` bytes.
    """

    records: Array
    active: Array
    outputs: Annotated[int, msgspec.Meta(ge=1)] = 1
    nbytes: Annotated[int, msgspec.Meta(ge=WEIGHT_BYTES, le=8)] = WEIGHT_BYTES


@leaks("as the job's first passive party, how many splits of each further passive party the trees use", "exact")
class FurtherLines(Message):
    """How many lines of bits the partner shares with each further passive party, in order, and by whose keys."""

    further: dict[str, tuple[Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)], SignedKey]]


@leaks("as a further passive party, which of its own splits the trees use", "exact")
class SidesRequest(Message):
    """Records, ascending int32, at which a further party is to share its sides with the partner, by whose key."""

    records: Array
    key: SignedKey


# ---------------------------------------------------------------- what both ends compute


@dataclass(frozen=True, slots=True)
class SharedForest:
    """What a party knows of the trees: the `records` that it decides in complete trees, and of how many `outputs`.

    Records from `held` on are lines of bits that it shares. `others` says at which levels the other party decides
    nodes; shares of weights have `nbytes` bytes.
    """

    records: Int32s
    held: int
    others: Sequence[bool]
    outputs: int = 1
    nbytes: int = WEIGHT_BYTES


def depth_of(trees: Sequence[Tree]) -> int:
    """Return the levels of splits of the deepest tree, at least 1; DataError for more than are walked."""
    depth = max((level for _, _, level, _ in layout_of(trees)), default=0)
    if depth > MOST_LEVELS:
        raise DataError(
            f"expected trees of at most {MOST_LEVELS} levels of splits, got {depth}: on shares a row has a bit for "
            'every node of a level; inference="plain" takes deeper ones, and shows decisions'
        )
    return max(1, depth)


def records_of(trees: Sequence[Tree], source: int, depth: int) -> Int32s:
    """Return one owner's records in complete trees, int32 (trees, 2^depth - 1), -1 at others' splits and none."""
    records = np.full((len(trees), (1 << depth) - 1), -1, np.int32)
    for number, node, level, place in layout_of(trees):
        if trees[number].source[node] == source:
            records[number, (1 << level) - 1 + place] = trees[number].record[node]
    return records


def unit_of(trees: Sequence[Tree], unit: float) -> float:
    """Return the objective's unit of leaf weights; if it has none, 2^-40 of the next power of 2 above the largest."""
    largest = max((float(np.abs(tree.value).max()) for tree in trees), default=0.0)
    return unit or 2.0 ** max(-1074, int(np.frexp(largest)[1]) - PRECISION_BITS)


def leaf_weights(trees: Sequence[Tree], depth: int, unit: float) -> Integers:
    """Return the weights of complete trees' leaves, rounded to whole units, int64 (trees, 2^depth)."""
    weights = np.zeros((len(trees), 1 << depth), np.int64)
    for number, node, level, place in layout_of(trees):
        if trees[number].left[node] < 0:
            # without a split all rows go left
            weights[number, place << depth - level] = round(trees[number].value[node] / unit)
    return weights


def stored(shares: Integers) -> NDArray[np.uint32]:
    """Return shares of weights of trees of one depth, (trees, 2^depth), as a part of a model has them."""
    out = np.zeros((len(shares), 1 << LEAF_LEVELS), np.uint32)
    out[:, :: out.shape[1] // shares.shape[1]] = shares & _WHOLE
    return out


def leaf_shares(leaves: NDArray[np.uint32], trees: int, depth: int) -> Integers:
    """Return own shares of the first trees' weights, of complete trees of this depth, int64 (trees, 2^depth)."""
    return leaves[:trees, :: 1 << LEAF_LEVELS - depth].astype(np.int64)


Decide = Callable[[Int32s, slice], Bytes]
"""``decide(records, rows)`` returns which of some rows go left at own records, packed bits (n_records, bytes)."""


def margin_shares(
    transfers: Transfers, n_rows: int, decide_own: Decide, forest: SharedForest, weights: Integers | None,
    shared: bool = False,
    done: Callable[[int, int], None] = lambda rows, total: None,
) -> Steps[NDArray[np.unsignedinteger]]:  # fmt: skip
    """Return shares modulo 2^(8 nbytes) of rows' sums of leaf weights, (n_rows, outputs).

    The active party gives the `weights`, int64 (trees, leaves), the other None; if they are `shared`, each gives its
    shares. `done` is called with how many rows are done, and their number, now and then.
    """
    trees, word = len(forest.records), word_of(forest.nbytes)
    out, whole = np.empty((n_rows, forest.outputs), word), word((1 << 8 * forest.nbytes) - 1)
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
        found = yield from rows.weight_of_rows(weights, forest.nbytes, shared=shared)
        out[of] = found.reshape(-1, forest.outputs, count).sum(axis=0, dtype=word).T & whole
        done(of.stop, n_rows)
    return out


def _sides(left: NDArray[np.uint8], numbers: Integers) -> NDArray[np.uint32]:
    """Return which rows of each tree go right at own splits of a level, bit u at node u, (trees * rows,)."""
    sides = np.zeros((len(numbers), left.shape[1]), np.uint32)
    for of_tree, own in zip(sides, numbers, strict=True):
        for node in np.flatnonzero(own >= 0):
            of_tree |= (left[own[node]] ^ 1).astype(np.uint32) << np.uint32(node)
    return sides.reshape(-1)


Lines = tuple[int, Callable[[int], Bytes]]
"""How many lines of shared sides, and what makes those of the next rows, given how many rows: packed bits."""


def blocks_of_lines(n_rows: int, lines: int) -> list[slice]:
    """Return the blocks of rows of which so many lines of shared sides are made, and in memory, at once."""
    return pieces(n_rows, max(8, min(_ROWS_OF_LINES, _SIDES_OF_LINES // max(1, lines)) // 8 * 8))


def with_lines(own: Decide, held: int, n_rows: int, sources: Sequence[Lines]) -> Decide:
    """Return what decides at own records, below `held`, and from there on reads lines of shared bits."""
    readers = [_reader(make, blocks_of_lines(n_rows, lines)) for lines, make in sources]

    def decide(records: Int32s, rows: slice) -> Bytes:
        mine, theirs = np.split(records, [np.searchsorted(records, held)])
        shared = np.concatenate([read(rows) for read in readers])
        return np.concatenate([own(mine, rows), shared[theirs - held]])

    return decide if sources else own


def _reader(make: Callable[[int], Bytes], blocks: Sequence[slice]) -> Callable[[slice], Bytes]:
    """Return what reads lines of some rows, which are read in order.

    A block of rows is made when it is first read: lines of all rows would not fit in memory.
    """
    parts, made = list[Bytes](), 0

    def read(rows: slice) -> Bytes:
        nonlocal made
        # of earlier blocks, the last may have some of these rows
        del parts[: max(0, len(parts) - 1)]
        first = made - len(parts)
        while made < len(blocks) and blocks[made].start < rows.stop:
            parts.append(make(blocks[made].stop - blocks[made].start))
            made += 1
        start = (rows.start - blocks[first].start) // 8
        return np.concatenate(parts, axis=1)[:, start : start + -(-(rows.stop - rows.start) // 8)]

    return read


def in_blocks(lines: Sequence[Bytes]) -> list[Lines]:
    """Return a source of `with_lines` for lines of all rows, none if there are none."""
    if not lines:
        return []
    whole, done = np.concatenate(lines), 0

    def next_rows(count: int) -> Bytes:
        nonlocal done
        done += -(-count // 8)
        return whole[:, done - -(-count // 8) : done]

    return [(len(whole), next_rows)]


def decide_rows(splits: SplitTable, table: Table, threads: int, records: Int32s, rows: slice) -> Bytes:
    """Return a `Decide` of a table's rows, but for its first arguments."""
    return decide(splits, table, records, threads, rows)


class SharedLeaves:
    """A party's shares of leaf weights (``leaves="shared"``), and of how far margins may reach, by class.

    They are kept in its `part` of the model, whose first `kept` trees are earlier ones. `limits`, of the active party,
    are what margins must not reach, in units of 2^4.
    """

    def __init__(
        self, party: Party, part: ModelPart, outputs: int, kept: int, role: int, limits: NDArray[np.int64]
    ) -> None:
        self._party, self._part, self._role, self._limits = party, part, role, limits.astype(np.uint64)
        self._reach = np.zeros(outputs, np.uint64)
        if part.leaves is not None:
            part.leaves = part.shared_leaves[:kept].reshape(-1)
        self._partner = party.peers[0]

    def of_trees(self, shares: Sequence[Words]) -> list[Integers]:
        """Keep shares of new trees' weights, given plus 2^14; return them, int64 (leaves,) each."""
        middle = np.uint64((1 - self._role) << WEIGHT_BITS - 1)
        found = [(of - middle).view(np.int64) for of in shares]
        self._last = np.stack(found)
        self._part.leaves = np.concatenate([self._part.shared_leaves, stored(self._last)]).reshape(-1)
        return found

    def reach_too_far(self, transfers: Transfers, of: slice) -> bool:
        """Add the reach of the trees kept last, of these classes; open whether margins may become too large."""
        self._reach[of] += self._reach_of(transfers, self._last)
        steps = opened_reach(transfers, self._reach[of], self._limits[of], self._role)
        return bool(compute(self._party, steps, partner=self._partner))

    def of_earlier(self, transfers: Transfers, trees: int, depth: int) -> Integers:
        """Add the reach of all earlier trees; return shares of these trees' weights (`leaf_shares`)."""
        weights = leaf_shares(self._part.shared_leaves, trees, depth)
        # trees of the classes alternate
        self._reach += self._reach_of(transfers, weights).reshape(-1, len(self._reach)).sum(axis=0, dtype=np.uint64)
        return weights

    def _reach_of(self, transfers: Transfers, weights: Integers) -> Words:
        steps = reach_of(transfers, weights.view(np.uint64), self._role)
        found: Words = compute(self._party, steps, partner=self._partner)
        return found


# ---------------------------------------------------------------- what the active party tells the other


def show_forest(
    party: Party, trees: Sequence[Tree], sources: Sequence[str], held: Mapping[str, int],
    further: Mapping[str, Int32s], keys: Mapping[str, SignedKey], outputs: int, nbytes: int = WEIGHT_BYTES,
) -> SharedForest:  # fmt: skip
    """Tell the partner and `further` passive parties where their splits are; return what this one knows.

    `sources` are owners by number, `held` the records of the active party and of the partner, in this order; the trees
    use the records of further parties. If there are any, passive parties are given each other's `keys`.
    """
    own, partner = held
    depth, used = depth_of(trees), {name: of for name, of in further.items() if len(of)}
    lines = _lines_of(trees, depth, {sources.index(name): of for name, of in used.items()})
    mine, theirs = (
        np.where(lines < 0, records_of(trees, sources.index(name), depth), np.int32(held[name]) + lines)
        for name in (own, partner)
    )
    party.send(partner, HiddenForest(Array.of(theirs), Array.of(np.array(levels_of(mine))), outputs, nbytes))
    if keys:
        party.send(partner, FurtherLines({name: (len(of), keys[name]) for name, of in used.items()}))
    for name, of in further.items():
        party.send(name, SidesRequest(Array.of(of), keys[partner]))
    return SharedForest(mine, held[own], levels_of(theirs), outputs, nbytes)


def _lines_of(trees: Sequence[Tree], depth: int, further: Mapping[int, Int32s]) -> Int32s:
    """Return the lines of further owners' `records` in complete trees, int32 (trees, 2^depth - 1), -1 elsewhere."""
    lines, first = np.full((len(trees), (1 << depth) - 1), -1, np.int32), 0
    for source, records in further.items():
        at = records_of(trees, source, depth)
        lines = np.where(at < 0, lines, first + np.searchsorted(records, at)).astype(np.int32)
        first += len(records)
    return lines


def read_forest(came: HiddenForest, active: str, held: int, most_outputs: int = 1, lines: int = 0) -> SharedForest:
    """Return what the active party tells; own records are below `held`, and from there on are shared lines."""
    known = held + lines
    what = "HiddenForest"
    levels = view(came.active, np.bool_, (None,), peer=active, what=f"{what}.active")
    if not 1 <= len(levels) <= MOST_LEVELS:
        raise PeerProtocolError(active, f"expected 1 to {MOST_LEVELS} levels", at=f"{what}.active")
    shape = None, (1 << len(levels)) - 1
    records = view(came.records, np.int32, shape, peer=active, what=f"{what}.records")
    if not 0 < len(records) <= _MOST_TREES or records.min() < -1 or records.max() >= known:
        raise PeerProtocolError(
            active,
            f"expected records below {known}, of one tree at least and {_MOST_TREES} at most",
            at=f"{what}.records",
        )
    if came.outputs > most_outputs or len(records) % came.outputs:
        raise PeerProtocolError(active, f"expected trees of at most {most_outputs} outputs", at=f"{what}.outputs")
    return SharedForest(records, held, levels.tolist(), came.outputs, came.nbytes)


def levels_of(records: Int32s) -> list[bool]:
    """Return at which levels there are records."""
    depth = records.shape[1].bit_length()
    return [bool((records[:, (1 << level) - 1 : (2 << level) - 1] >= 0).any()) for level in range(depth)]
