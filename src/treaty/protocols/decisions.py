"""Deciding rows at splits whose owners keep them: eval sets during training, and federated prediction.

The active party holds the trees, each owner the meaning of its splits. In one round per owner the active party names
all the records it needs of that owner, not those on some row's path, and gets every row's side at each; then it walks
the trees alone (the batch form of SecureBoost's federated inference, Cheng et al. 2019, section 5).

==================  ===========  ==============================================================================
message             from -> to   what it tells
==================  ===========  ==============================================================================
`Held`              owner ->     (prediction) how many records it has
`DecideRequest`     active ->    which of the owner's records are in use
`Decisions`         owner ->     each row's side at every one of them; bits of one feature are nested, so they
                                 order the rows by it
`Finish`            active ->    nothing more will be asked
==================  ===========  ==============================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.errors import PeerProtocolError
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models import ModelPart
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import SplitTable, Tree, margins_from_bits

logger = logging.getLogger(__name__)


class Held(Message):
    """How many records the owner has; an unfinished training may have left it fewer than the trees name."""

    records: int


class DecideRequest(Message):
    """Records int32 to decide for the rows of eval set `rows`. Tells a passive party how many trees use it."""

    rows: int
    records: Array


class Decisions(Message):
    """Packed bits (n_records, n_rows/8). Tell the active party each row's side of each of the splits."""

    left: Array


class Finish(Message):
    """Training is over; nothing more will be asked."""


def decided_by_all(
    party: Party, part: ModelPart, table: Table, number: int, threads: int
) -> Callable[[Sequence[Tree], NDArray[np.float64]], None]:
    """Return a function that walks eval rows down new trees, asking every owner for its decisions."""
    matrix = table.matrix()

    def add_trees(trees: Sequence[Tree], margins: NDArray[np.float64]) -> None:
        _add_decided(party, part, trees, matrix, number, margins, threads)

    return add_trees


def _add_decided(
    party: Party,
    part: ModelPart,
    trees: Sequence[Tree],
    matrix: NDArray[np.float32],
    number: int,
    margins: NDArray[np.float64],
    threads: int,
) -> None:
    """Add the leaf values of `trees` to margins, from own decisions and, in one round, everyone else's."""
    n_rows = len(matrix)
    assert part.forest is not None
    used = {  # of each owner, the records these trees use
        name: np.unique(np.concatenate([tree.record[tree.source == source] for tree in trees])).astype(np.int32)
        for source, name in enumerate(part.forest.sources)
    }
    asked = [peer for peer in party.peers if len(used[peer])]
    for peer in asked:
        party.send(peer, DecideRequest(number, Array.of(used[peer])))
    packed = []
    for name, records in used.items():
        if name == party.name:
            packed.append(part.splits.decide(matrix, records, threads))
        elif name in asked:
            answer = party.receive(name, Decisions).left
            packed.append(view(answer, np.uint8, (len(records), -(-n_rows // 8)), peer=name, what="Decisions.left"))
    base = np.cumsum([0, *(len(records) for records in used.values())])
    renumbered = [_renumber(tree, list(used.values())) for tree in trees]
    margins_from_bits(renumbered, base, np.concatenate(packed), margins, threads)


def _renumber(tree: Tree, used: Sequence[NDArray[np.int32]]) -> Tree:
    """Renumber a tree's records by their place among those asked for."""
    record = tree.record.copy()
    for source, records in enumerate(used):
        mine = tree.source == source
        record[mine] = np.searchsorted(records, record[mine])
    return Tree(tree.source, record, tree.left, tree.value, tree.gain, tree.cover, tree.count)


def decide(
    request: DecideRequest, lead: str, matrices: Sequence[NDArray[np.float32]], splits: SplitTable, threads: int
) -> Decisions:
    """Answer a request of `lead` as the owner of `splits`; `matrices` are the rows of each eval set."""
    records = view(request.records, np.int32, (None,), peer=lead, what="DecideRequest.records")
    if not 0 <= request.rows < len(matrices):
        raise PeerProtocolError(lead, f"expected one of {len(matrices)} row sets - at DecideRequest from {lead}")
    if np.any(records < 0) or np.any(records >= len(splits)):
        raise PeerProtocolError(lead, f"expected records below {len(splits)} - at DecideRequest from {lead}")
    return Decisions(Array.of(splits.decide(matrices[request.rows], records, threads)))


def _decidable(forest: Forest, held: dict[str, int]) -> list[Tree]:
    """Return the trees of the leading rounds whose records all owners still have."""
    n_outputs = forest.objective.n_outputs
    known = np.array([held[name] for name in forest.sources])
    for number, tree in enumerate(forest.trees):
        inner = tree.source >= 0
        if np.any(tree.record[inner] >= known[tree.source[inner]]):
            rounds = number // n_outputs
            logger.warning(
                "predicting with %d of %d rounds: a party lost later splits", rounds, len(forest.trees) // n_outputs
            )
            return forest.trees[: rounds * n_outputs]
    return forest.trees


def predict_active(party: Party, part: ModelPart, table: Table, threads: int = 1) -> NDArray[np.float64]:
    """Predict as the active party, in one round with every passive party that owns a split.

    Returns
    -------
    float64 (n_rows, n_outputs)
        Margins.

    Notes
    -----
    The active party learns each row's side of every split of every owner; passive parties learn how many rows are
    predicted, and which of their records are still in use.
    """
    forest = part.forest
    assert forest is not None, "the active party's part holds the trees"
    agree(party, {"model": part.model_id, "rows to predict": table.n_rows})
    margins = np.full((table.n_rows, forest.objective.n_outputs), forest.objective.base_margin)
    held = {peer: party.receive(peer, Held).records for peer in party.peers}
    trees = _decidable(forest, {**held, party.name: len(part.splits)})
    if trees:
        _add_decided(party, part, trees, table.matrix(), 0, margins, threads)
    for peer in party.peers:
        party.send(peer, Finish())
    return margins


def predict_passive(party: Party, part: ModelPart, table: Table, threads: int = 1) -> None:
    """Decide rows at own splits for the active party, `party.peers[0]`."""
    (lead,) = party.peers
    agree(party, {"model": part.model_id, "rows to predict": table.n_rows})
    party.send(lead, Held(len(part.splits)))
    matrix = table.matrix()
    while True:
        match party.receive(lead, DecideRequest, Finish):
            case DecideRequest() as request:
                party.send(lead, decide(request, lead, [matrix], part.splits, threads))
            case Finish():
                return
