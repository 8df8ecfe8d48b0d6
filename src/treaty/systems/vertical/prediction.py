"""Deciding rows at splits whose owners keep them: eval sets during training, and federated prediction.

The active party holds the trees, each owner the meaning of its splits. In one round per owner the active party names
all the records it needs of that owner, not those on some row's path, and gets every row's side at each; then it walks
the trees alone (the batch form of SecureBoost's federated inference, Cheng et al. 2019, section 5).

Prediction row by row, for as long as it is wanted, is at the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.errors import DataError, PeerProtocolError
from treaty.messaging.conversation import OF_ONE_MODEL, agree
from treaty.messaging.messages import Array, Message, MessageLeakage, column_pieces, row_pieces, take_columns, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, RowDecisions, margins, renumber, used_records
from treaty.privacy.randomised_response import KnownRows, RandomisedRows
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import SplitTable, Tree, margins_from_bits

# -------- which values an owner of columns decides rows by: its own, and of rows told under noise what it told of them

logger = logging.getLogger(__name__)


def check_unknown(inputs: RoleInput, known: KnownRows, rows: LabelledRows) -> None:
    """Refuse rows that cannot be told from training rows, as they have the values of some and no ids.

    Raises DataError in safe mode where other organisations play the other parties; elsewhere it warns.
    """
    if known.have_ids and rows.ids is not None:
        return
    found, name = known.with_equal_values(rows.table.matrix()), inputs.party.name
    if not found:
        return
    text = (
        f"{name}: {found} of {rows.table.n_rows} rows have the values of rows trained on, in all of its columns, and "
        "no ids: if they are the same persons, their true side at each split undoes the noise on what was told of them"
    )
    if inputs.apart and inputs.options.mode == "safe":
        raise DataError(
            f"{text}; align by ids ([align]), by which the same persons are recognised, or leave such rows out",
            public="rows to decide have the values of rows trained on, and no ids; align by ids, or leave them out",
        )
    logger.warning("%s", text)


def shown_matrix(told: RandomisedRows | None, rows: LabelledRows) -> NDArray[np.float32]:
    """Return the rows, float32 (n_rows, n_features), as an owner decides them: training rows as `told` under noise."""
    matrix = rows.table.matrix()
    if told is None or rows.ids is None or not told.known.have_ids:
        return matrix
    return told.in_place_of_values(matrix, rows.ids())


class RecordCount(Message):
    """How many records the owner has; an unfinished training may have left it fewer than the trees name."""

    leakage: ClassVar = MessageLeakage("how many splits the sender keeps, which the active party chose", "control")

    records: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class DecideRequest(Message):
    """Records int32 at which to decide row set `rows`: an eval set's number; with `refit`, training rows come last.

    Tells a passive party which of its records are in use.
    """

    leakage: ClassVar = MessageLeakage("which of its own splits the trees use", "exact")

    rows: int
    records: Array


class Decisions(Message):
    """Packed bits (n_records, n_rows/8). Tell the active party each row's side of each of the splits.

    Of many records there are several, each about the next of them; where one has too many rows, about its next rows.
    """

    leakage: ClassVar = MessageLeakage(
        "of each row asked about, which side it takes at each split of the sender; several splits of one "
        "column show the order of rows",
        "exact",
        guard="he_inference=True of SecureBoost, at prediction",
    )

    left: Array


class Finish(Message):
    """Training, or prediction, is over; nothing more will be asked."""

    leakage: ClassVar = MessageLeakage("that nothing more is asked", "control")


def decided_by_all(
    party: Party, part: ModelPart, table: Table, number: int, threads: int
) -> Callable[[Sequence[Tree], NDArray[np.float64]], None]:
    """Return a function that walks eval rows down new trees, asking every owner for its decisions.

    It adds the same to margins, bit for bit, whether it gets trees one round at a time or all at once.
    """
    matrix = table.matrix()

    def add_trees(trees: Sequence[Tree], margins: NDArray[np.float64]) -> None:
        found = ask_all(party, part, trees, matrix, number, threads)
        margins_from_bits(found.trees, found.base, found.packed, margins, threads)

    return add_trees


def ask_all(
    party: Party, part: ModelPart, trees: Sequence[Tree], matrix: NDArray[np.float32], number: int, threads: int
) -> RowDecisions:
    """Decide `matrix`, row set `number` at all other parties, at every record that the trees use, in one round."""
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
            packed[name] = _decisions(party, name, len(records), n_rows)
    return RowDecisions(
        trees=[renumber(tree, used) for tree in trees],
        base=np.cumsum([0, *(len(records) for records in used)]),
        packed=np.concatenate([packed[name] for name in part.forest.sources if name in packed]),
        used=used,
        n_rows=n_rows,
    )


def _decisions(party: Party, owner: str, n_records: int, n_rows: int) -> NDArray[np.uint8]:
    """Receive an owner's decisions at all records, packed bits (n_records, n_rows/8)."""
    found = []
    for part in column_pieces(n_records, n_rows):
        first, count = party.receive(owner, Decisions), part.stop - part.start
        found.append(take_columns(party, owner, n_rows, count, first, lambda m: m.left, count, "Decisions.left"))
    return found[0] if len(found) == 1 else np.concatenate(found)


class RowSets:
    """An owner's rows that the active party may have decided, by number: every record once for each of them.

    `matrices`, float32 (n_rows, n_features), are those of eval sets, of training rows (`refit`) or to predict.
    """

    def __init__(self, active: str, matrices: Sequence[NDArray[np.float32]]) -> None:
        self._active, self._matrices = active, matrices
        self._decided: list[set[int]] = [set() for _ in matrices]

    def decide(self, request: DecideRequest, splits: SplitTable, threads: int) -> Iterator[Decisions]:
        """Answer the active party as the owner of `splits`; PeerProtocolError for what a walk down trees needs not."""
        active, n_sets = self._active, len(self._matrices)
        records = view(request.records, np.int32, (None,), peer=active, what="DecideRequest.records")
        if not 0 <= request.rows < n_sets:
            raise PeerProtocolError(active, f"expected one of {n_sets} row sets - at DecideRequest from {active}")
        if np.any(records < 0) or np.any(records >= len(splits)):
            raise PeerProtocolError(active, f"expected records below {len(splits)} - at DecideRequest from {active}")
        asked, decided = set(records.tolist()), self._decided[request.rows]
        if not asked or len(asked) < len(records) or asked & decided:
            raise PeerProtocolError(
                active, f"expected each record once for every row, got one again - at DecideRequest from {active}"
            )
        decided |= asked
        matrix = self._matrices[request.rows]
        return (
            Decisions(Array.of(splits.decide(matrix[of], records[part], threads)))
            for part in column_pieces(len(records), len(matrix))
            for of in row_pieces(len(matrix), part.stop - part.start)
        )


def decidable(party: Party, part: ModelPart, held: Mapping[str, int]) -> list[Tree]:
    """Return the trees of the first rounds, as far as owners still have the records; warn where rounds are left out.

    `held` is how many records each peer has.
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
    """Raise DataError where an owner of splits takes no part, or the model part or table is not this party's.

    The error names who is missing, and how many of the first rounds use none of their splits.
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


def collect(inputs: RoleInput) -> RowDecisions:
    """Get every owner's decisions as the active party, in one round; passive parties play `predict_passive`.

    The active party learns each row's side of every split of every owner; passive parties learn how many rows are
    predicted, and which of their records are still in use. Raises DataError when an owner of splits is not among the
    peers.
    """
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    assert part.forest is not None, "the active party's part holds the trees"
    check_present(party, part, table)
    agree(party, {"model": part.model_id, "rows to predict": table.n_rows}, remedy=OF_ONE_MODEL)
    held = {peer: party.receive(peer, RecordCount).records for peer in party.peers}
    found = ask_all(party, part, decidable(party, part, held), table.matrix(), 0, inputs.threads)
    for peer in party.peers:
        party.send(peer, Finish())
    return found


def predict_active(inputs: RoleInput) -> NDArray[np.float64]:
    """Predict as the party with the trees: ask every owner of splits once, then walk the trees alone.

    Parameters
    ----------
    inputs : RoleInput
        Its `data` are the rows to predict, its `part` what training left at this party.

    Returns
    -------
    float64 (n_rows, n_outputs)
        Margins.

    Raises
    ------
    DataError
        When an owner of splits is not among the peers; see `check_present`.
    PeerError
        When a peer is lost or sends something else.
    """
    return margins(collect(inputs), inputs.part.forest.objective, inputs.threads)


def predict_passive(inputs: RoleInput) -> None:
    """Decide the role's rows at own splits for the active party, which plays `predict_active` or `collect`.

    Rows that the model was trained on under noise are decided by what was told of them then (`shown_rows`).
    """
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    (active,) = party.peers
    check_present(party, part, table)
    agree(party, {"model": part.model_id, "rows to predict": table.n_rows}, remedy=OF_ONE_MODEL)
    if part.randomised is not None and inputs.apart:
        check_unknown(inputs, part.randomised.known, inputs.rows)
    rows = RowSets(active, [shown_matrix(part.randomised, inputs.rows)])
    party.send(active, RecordCount(len(part.splits)))
    while isinstance(request := party.receive(active, DecideRequest, Finish), DecideRequest):
        for decisions in rows.decide(request, part.splits, inputs.threads):
            party.send(active, decisions)


# -------- prediction row by row, for as long as it is wanted: parties that have aligned their rows once stay connected
#
# The active party names rows by their numbers among those that all parties have, and gets their sides at all records in
# use, in one round for each request; its own columns of these rows may be newer than those of its table.

MOST_ROWS = 1 << 20
"""Rows of one request, at most."""
SAYS_SO = 20.0
"""Seconds after which an active party that is asked nothing says that it is still there."""


class OnlineRows(Message):
    """Numbers, int32, of the common rows that are asked for next; none: nothing is asked just now."""

    leakage: ClassVar = MessageLeakage("which of the common rows are asked for, and when", "exact")

    rows: Array


class Asked(msgspec.Struct, frozen=True):
    """A request: numbers of common rows, int32, the active party's columns of them, and where margins go."""

    rows: NDArray[np.int32]
    table: Table
    tell: Callable[[NDArray[np.float64]], None]


Requests = Iterator[Asked | None]
"""What the active party is asked, one after the other; None now and then, where nothing is."""


def online_active(inputs: RoleInput) -> None:
    """Predict what `inputs.requests` asks for, until it ends."""
    party, part = inputs.party, inputs.part
    assert part.forest is not None
    check_present(party, part, inputs.rows.table)
    agree(party, {"model": part.model_id, "rows": inputs.rows.table.n_rows}, remedy=OF_ONE_MODEL)
    held = {peer: party.receive(peer, RecordCount).records for peer in party.peers}
    trees, objective = decidable(party, part, held), part.forest.objective

    def answer(asked: Asked) -> NDArray[np.float64]:
        found = ask_all(party, part, trees, asked.table.matrix(), 0, inputs.threads)
        return margins(found, objective, inputs.threads)

    answer_requests(inputs, answer)


def answer_requests(inputs: RoleInput[Any, Any], answer: Callable[[Asked], NDArray[np.float64]]) -> None:
    """Name each request's rows to all peers, and tell what `answer` makes of it, until there are no more."""
    party = inputs.party
    assert inputs.requests is not None
    spoken, often = time.monotonic(), min(SAYS_SO, party.timeout / 4)
    for asked in inputs.requests:
        if asked is None:
            party.heed()
            party.transcript.clear()  # or it would grow for as long as the service lasts
            if time.monotonic() - spoken < often:
                continue
        spoken, rows = time.monotonic(), np.zeros(0, np.int32) if asked is None else asked.rows
        for peer in party.peers:
            party.send(peer, OnlineRows(Array.of(rows)))
        if asked is not None:
            asked.tell(answer(asked))
    for peer in party.peers:
        party.send(peer, Finish())


def asked_rows(asked: OnlineRows, active: str, n_rows: int) -> NDArray[np.int32]:
    """Return the rows that the active party asks a passive one for, all below `n_rows`."""
    rows = view(asked.rows, np.int32, (None,), peer=active, what="OnlineRows.rows")
    if len(rows) > MOST_ROWS or np.any(rows < 0) or np.any(rows >= n_rows):
        raise PeerProtocolError(
            active, f"expected at most {MOST_ROWS} rows below {n_rows} - at OnlineRows from {active}"
        )
    return rows


def online_passive(inputs: RoleInput) -> None:
    """Decide the common rows that the active party asks for at own splits, until it has finished."""
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    (active,) = party.peers
    check_present(party, part, table)
    agree(party, {"model": part.model_id, "rows": table.n_rows}, remedy=OF_ONE_MODEL)
    if part.randomised is not None and inputs.apart:
        check_unknown(inputs, part.randomised.known, inputs.rows)
    matrix = shown_matrix(part.randomised, inputs.rows)
    party.send(active, RecordCount(len(part.splits)))
    sets = RowSets(active, [])
    while not isinstance(asked := party.receive(active, OnlineRows, DecideRequest, Finish), Finish):
        if isinstance(asked, DecideRequest):
            for decisions in sets.decide(asked, part.splits, inputs.threads):
                party.send(active, decisions)
            continue
        assert isinstance(asked, OnlineRows)
        party.transcript.clear()
        rows = asked_rows(asked, active, len(matrix))
        sets = RowSets(active, [matrix[rows]] if len(rows) else [])
