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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.errors import DataError, PeerProtocolError
from treaty.messaging.agreement import OF_ONE_MODEL, agree
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import SplitTable, Tree, leaves_from_bits, margins_from_bits
from treaty.trees.objectives import Objective

logger = logging.getLogger(__name__)


class Held(Message):
    """How many records the owner has; an unfinished training may have left it fewer than the trees name."""

    records: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class DecideRequest(Message):
    """Records int32 to decide for the rows of eval set `rows`. Tells a passive party how many trees use it."""

    rows: int
    records: Array


class Decisions(Message):
    """Packed bits (n_records, n_rows/8). Tell the active party each row's side of each of the splits."""

    left: Array


class Finish(Message):
    """Training is over; nothing more will be asked."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What the active party holds after one round with every owner: all it needs to walk its trees alone.

    Attributes
    ----------
    trees : list of Tree
        With records renumbered into lines of `packed`.
    base : int64 (n_sources + 1,)
        Line of `packed` of each source's record 0.
    packed : uint8 (n_records, ceil(n_rows / 8))
        A bit per row, 1 for left, as `numpy.packbits` packs them.
    used : list of int32 (k,)
        Of each source, the original record numbers, in the order of its lines.
    n_rows : int
    """

    trees: list[Tree]
    base: NDArray[np.int64]
    packed: NDArray[np.uint8]
    used: list[NDArray[np.int32]]
    n_rows: int


def decided_by_all(
    party: Party, part: ModelPart, table: Table, number: int, threads: int
) -> Callable[[Sequence[Tree], NDArray[np.float64]], None]:
    """Return a function that walks eval rows down new trees, asking every owner for its decisions.

    It adds the same to margins, bit for bit, whether it gets trees one round at a time or all at once.
    """
    matrix = table.matrix()

    def add_trees(trees: Sequence[Tree], margins: NDArray[np.float64]) -> None:
        decided = ask_all(party, part, trees, matrix, number, threads)
        margins_from_bits(decided.trees, decided.base, decided.packed, margins, threads)

    return add_trees


def ask_all(
    party: Party, part: ModelPart, trees: Sequence[Tree], matrix: NDArray[np.float32], number: int, threads: int
) -> Decided:
    """Decide the rows of a set, of that number at everyone else's, at all records that trees use; in one round."""
    assert part.forest is not None
    n_rows = len(matrix)
    used = used_records(trees, len(part.forest.sources))
    theirs = [(name, records) for name, records in zip(part.forest.sources, used, strict=True) if name != party.name]
    for name, records in theirs:
        if len(records):
            party.send(name, DecideRequest(number, Array.of(records)))
    packed = {party.name: part.splits.decide(matrix, used[part.forest.sources.index(party.name)], threads)}
    for name, records in theirs:
        if len(records):
            answer = party.receive(name, Decisions).left
            packed[name] = view(answer, np.uint8, (len(records), -(-n_rows // 8)), peer=name, what="Decisions.left")
    return Decided(
        trees=[renumber(tree, used) for tree in trees],
        base=np.cumsum([0, *(len(records) for records in used)]),
        packed=np.concatenate([packed[name] for name in part.forest.sources if name in packed]),
        used=used,
        n_rows=n_rows,
    )


def used_records(trees: Sequence[Tree], n_sources: int) -> list[NDArray[np.int32]]:
    """Return, of each source, the record numbers that `trees` use, ascending."""
    source = np.concatenate([tree.source for tree in trees] or [np.zeros(0, np.int16)])
    record = np.concatenate([tree.record for tree in trees] or [np.zeros(0, np.int32)])
    return [np.unique(record[source == number]).astype(np.int32) for number in range(n_sources)]


def renumber(tree: Tree, used: Sequence[NDArray[np.int32]]) -> Tree:
    """Renumber a tree's records by their place among those used."""
    record = tree.record.copy()
    for source, records in enumerate(used):
        mine = tree.source == source
        record[mine] = np.searchsorted(records, record[mine])
    return replace(tree, record=record)


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


def decidable(party: Party, part: ModelPart, held: Mapping[str, int]) -> list[Tree]:
    """Return the trees of the leading rounds whose records all owners still have; say whose are missing.

    Parameters
    ----------
    held : mapping of party name to int
        How many records each peer has.
    """
    forest = part.forest
    assert forest is not None
    n_outputs = forest.objective.n_outputs
    known = np.array([len(part.splits) if name == party.name else held.get(name, 0) for name in forest.sources])
    for number, tree in enumerate(forest.trees):
        inner = tree.source >= 0
        lost = tree.source[inner][tree.record[inner] >= known[tree.source[inner]]]
        if len(lost):
            rounds = number // n_outputs
            names = ", ".join(forest.sources[source] for source in np.unique(lost))
            logger.warning(
                "predicting with %d of %d rounds: %s lost later splits", rounds, len(forest.trees) // n_outputs, names
            )
            return forest.trees[: rounds * n_outputs]
    return forest.trees


def check_present(party: Party, part: ModelPart, table: Table) -> None:
    """Refuse to predict where an owner of splits takes no part, or the part or table is not this party's.

    Raises
    ------
    DataError
        Names who is missing, and how many leading rounds do without.
    """
    if part.party != party.name:
        raise DataError(f"expected the model part of {party.name}, got that of {part.party} - at prediction")
    if len(table.schema.names) != len(part.schema.names):
        raise DataError(
            f"expected the {len(part.schema.names)} columns the model of {party.name} was trained on, got "
            f"{len(table.schema.names)} - at prediction"
        )
    if part.forest is None:
        return
    forest = part.forest
    absent = [source for source, name in enumerate(forest.sources) if name not in (party.name, *party.peers)]
    first = {source: _first_round(forest, source) for source in absent}
    missing = [forest.sources[source] for source in absent if first[source] is not None]
    if missing:
        names = ", ".join(missing)
        without = min(number for number in first.values() if number is not None)
        text = f"expected every owner of splits to take part in the prediction, got none of {names}"
        raise DataError(
            f"{text}; the first {without} of {len(forest.trees) // forest.objective.n_outputs} rounds do without",
            public=text,
        )


def _first_round(forest: Forest, source: int) -> int | None:
    """Return the first round, from 0, in which `source` owns a split."""
    using = (number for number, tree in enumerate(forest.trees) if np.any(tree.source == source))
    number = next(using, None)
    return None if number is None else number // forest.objective.n_outputs


def collect(party: Party, part: ModelPart, table: Table, threads: int = 1) -> Decided:
    """Get every owner's decisions as the active party, in one round with every passive party that owns a split.

    Parameters
    ----------
    party : Party
        Its peers play `predict_passive`.
    part : ModelPart
        The active party's own.
    table : Table
        The rows to predict, own columns.
    threads : int, default 1

    Returns
    -------
    Decided
        For `margins`, `leaves` and `staged_margins`: a batch is asked for once, whatever is made of it.

    Raises
    ------
    DataError
        When an owner of splits is not among the peers.
    PeerError
        When a peer is lost or sends something else.

    Notes
    -----
    The active party learns each row's side of every split of every owner; passive parties learn how many rows are
    predicted, and which of their records are still in use.
    """
    assert part.forest is not None, "the active party's part holds the trees"
    check_present(party, part, table)
    agree(party, {"model": part.model_id, "rows to predict": table.n_rows}, remedy=OF_ONE_MODEL)
    held = {peer: party.receive(peer, Held).records for peer in party.peers}
    decided = ask_all(party, part, decidable(party, part, held), table.matrix(), 0, threads)
    for peer in party.peers:
        party.send(peer, Finish())
    return decided


def margins(decided: Decided, objective: Objective, threads: int = 1) -> NDArray[np.float64]:
    """Return margins, float64 (n_rows, n_outputs)."""
    total = np.full((decided.n_rows, objective.n_outputs), objective.base_margin)
    margins_from_bits(decided.trees, decided.base, decided.packed, total, threads)
    return total


def leaves(decided: Decided, threads: int = 1) -> NDArray[np.int32]:
    """Return the leaf each row ends in, int32 (n_rows, n_trees): its number among the tree's nodes."""
    return leaves_from_bits(decided.trees, decided.base, decided.packed, decided.n_rows, threads)


def staged_margins(decided: Decided, objective: Objective, threads: int = 1) -> Iterator[NDArray[np.float64]]:
    """Yield margins, float64 (n_rows, n_outputs), after each round; the last are those of `margins`, bit for bit."""
    total = np.full((decided.n_rows, objective.n_outputs), objective.base_margin)
    for start in range(0, len(decided.trees), objective.n_outputs):
        trees = decided.trees[start : start + objective.n_outputs]
        margins_from_bits(trees, decided.base, decided.packed, total, threads)
        yield total.copy()


def predict_active(party: Party, part: ModelPart, table: Table, threads: int = 1) -> NDArray[np.float64]:
    """Predict as the active party: `collect`, then `margins`, float64 (n_rows, n_outputs)."""
    decided = collect(party, part, table, threads)
    assert part.forest is not None
    return margins(decided, part.forest.objective, threads)


def predict_passive(party: Party, part: ModelPart, table: Table, threads: int = 1) -> None:
    """Decide rows at own splits for the active party, `party.peers[0]`, which plays `collect`."""
    (lead,) = party.peers
    check_present(party, part, table)
    agree(party, {"model": part.model_id, "rows to predict": table.n_rows}, remedy=OF_ONE_MODEL)
    party.send(lead, Held(len(part.splits)))
    matrix = table.matrix()
    while True:
        match party.receive(lead, DecideRequest, Finish):
            case DecideRequest() as request:
                party.send(lead, decide(request, lead, [matrix], part.splits, threads))
            case Finish():
                return
