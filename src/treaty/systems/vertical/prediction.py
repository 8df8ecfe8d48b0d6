"""Deciding rows at splits whose owners keep them: eval sets during training, and federated prediction.

The active party holds the trees, each owner the meaning of its splits. In one round per owner the active party names
all the records it needs of that owner, not those on some row's path, and gets every row's side at each; then it walks
the trees alone (the batch form of SecureBoost's federated inference, Cheng et al. 2019, section 5).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.machine.arrays import Bytes, Flags, Floats, Int32s
from treaty.messaging.exchanges import OF_ONE_MODEL, agree, take_columns
from treaty.messaging.messages import Array, Message, column_pieces, leaks, row_pieces, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, RowDecisions, check_shown, decide, margins, renumber, used_records
from treaty.privacy.randomised_response import KnownRows, RandomisedRows
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.ensemble import BitWalk, JoinedSplits, SplitTable, Tree, join_splits

logger = logging.getLogger(__name__)

# ------------------------------------ rows that were trained on under noise are decided by their noisy values, for good


def check_unknown(inputs: RoleInput, known: KnownRows, rows: LabelledRows) -> None:
    """Refuse rows that cannot be told apart from training rows: they have the values of some, and no ids.

    Raises DataError in safe mode where other organisations play the other parties; elsewhere it warns.
    """
    if rows.ids is not None and known.recognise(rows.ids_of):
        return
    found, name = int(known.with_equal_values(rows.table.matrix()).sum()), inputs.party.name
    if not found:
        return
    text = (
        f"{name}: {found} of {rows.table.n_rows} rows have the values of rows trained on, in all of its columns, and "
        "no ids: if they are the same persons, their true side at each split undoes the noise on their values"
    )
    if inputs.apart and inputs.options.mode == "safe":
        raise DataError(
            f"{text}; align by ids ([align]), by which the same persons are recognised, or leave such rows out",
            public="rows to decide have the values of rows trained on, and no ids; align by ids, or leave them out",
        )
    logger.warning("%s", text)


# Rows to decide: a table, or with noisy values a matrix, float32 (n_rows, n_features)
Shown = Table | NDArray[np.float32]


def shown_rows(noisy: RandomisedRows | None, rows: LabelledRows) -> Shown:
    """Return the rows as an owner decides them: training rows by their noisy values."""
    if noisy is None or rows.ids is None or not noisy.known.recognise(rows.ids_of):
        return rows.table
    return noisy.in_place_of_values(rows.table.matrix(), rows.ids())


def known_by_ids(inputs: RoleInput) -> bool:
    """Return whether a model's training rows are known by ids, which all parties have, or else by values, if at all."""
    known, rows = inputs.part.trained, inputs.rows
    return known is not None and rows.ids is not None and known.recognise(rows.ids_of)


def withheld_rows(inputs: RoleInput) -> Flags:
    """Return which rows a model with hidden rows was trained on: margins of these are not told, bool (n_rows,).

    They are known by ids, or if either rows had none, a passive party knows them by their values in all its columns.
    It only warns where one process, or one file's keys, play all parties.
    """
    part, rows, name = inputs.part, inputs.rows, inputs.party.name
    none = np.zeros(rows.table.n_rows, np.bool_)
    if not isinstance(part, ModelPart) or not part.hides_rows or inputs.options.rounds_margins:
        return none
    if (known := part.trained) is None:
        raise ConfigError(f"{name}: this model does not know the rows that it was trained on: train it again")
    if rows.ids is not None and known_by_ids(inputs):
        found = known.places(rows.ids()) >= 0
    elif name == inputs.roles.active:
        # whose sides are no secret of its own: other persons may have its few values
        return none
    else:
        found = known.with_equal_values(rows.table.matrix())
    if inputs.apart or not found.any():
        return found
    text = "%s: %d rows were trained on: their margins tell leaves that were hidden; between organisations, refused"
    logger.warning(text, name, found.sum())
    return none


def check_not_trained(inputs: RoleInput) -> None:
    """Refuse a prediction of rows that are withheld."""
    if count := int(withheld_rows(inputs).sum()):
        text = (
            "rows to predict were trained on with hidden rows, and their margins would tell the leaves that they were "
            'in: leave them out, or set training_rows="rounded" at every party'
        )
        raise DataError(f"{inputs.party.name}: {count} of {inputs.rows.table.n_rows} {text}", public=text)


# ---------------------------------------------------------------- sides of rows at records


@leaks("how many splits the sender keeps, which the active party chose", "control")
class RecordCount(Message):
    """How many records the owner has; an unfinished training may have left it fewer than the trees name."""

    records: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


@leaks("which of its own splits the trees use", "exact")
class DecideRequest(Message):
    """Records int32 at which to decide row set `rows`: an eval set's number.

    Training rows come last: with `refit`, or at the splits of an earlier model, from which training goes on.
    """

    rows: int
    records: Array


@leaks(
    "for each requested row, its side at each split of the sender; several splits of one column show the order of rows",
    "exact",
    guard='inference="shared" of SecureBoost, at prediction',
)
class Decisions(Message):
    """Packed bits (n_records, n_rows/8): each row's side at each of the records.

    Many records take several messages, each about the next records; if one has too many rows, each about its next rows.
    """

    left: Array


@leaks("that no more requests follow", "control")
class Finish(Message):
    """Training, or prediction, is over; nothing more will be asked."""


def decided_by_all(
    party: Party, part: ModelPart, table: Table, number: int, threads: int
) -> Callable[[Sequence[Tree], Floats], None]:
    """Return a function that walks eval rows down new trees, asking every owner for its decisions.

    It adds the same to margins, bit for bit, whether it gets trees one round at a time or all at once.
    """

    def add_trees(trees: Sequence[Tree], margins: Floats) -> None:
        found = ask_all(party, part, trees, table, number, threads)
        BitWalk(found.trees, found.base).add_to(margins, found.packed, threads)

    return add_trees


def ask_all(
    party: Party, part: ModelPart, trees: Sequence[Tree], table: Table, number: int, threads: int
) -> RowDecisions:
    """Decide `table`, row set `number` at all other parties, at every record that the trees use, in one round."""
    owners = _Owners(party, part, trees)
    owners.ask(number)
    packed = owners.decided(table, threads)
    return RowDecisions(owners.trees, owners.base, packed, list(owners.used.values()), table.n_rows)


class _Owners:
    """The owners of the records that some trees use, `used` by each, and the trees with these records alone.

    `trees` and `base` are as in `RowDecisions`.
    """

    def __init__(self, party: Party, part: ModelPart, trees: Sequence[Tree]) -> None:
        self._party, self._splits = party, join_splits([part.splits], [len(part.schema.names)])
        sources = part.grown.sources
        used = used_records(trees, len(sources))
        self.used = dict(zip(sources, used, strict=True))
        self.trees = [renumber(tree, used) for tree in trees]
        self.base = np.cumsum([0, *map(len, used)])
        self._others = [name for name, records in self.used.items() if name != party.name and len(records)]

    def ask(self, number: int) -> None:
        """Ask the others for their decisions of row set `number`."""
        for name in self._others:
            self._party.send(name, DecideRequest(number, Array.of(self.used[name])))

    def decided(self, table: Table, threads: int) -> Bytes:
        """Return all owners' decisions, packed: own ones of `table`, made while the others make theirs."""
        own = self._party.name
        packed = {own: decide(self._splits, table, self.used[own], threads)}
        for name in self._others:
            packed[name] = take_decisions(self._party, name, Decisions, len(self.used[name]), table.n_rows)
        return np.concatenate([packed[name] for name in self.used if name in packed])


def take_decisions(party: Party, peer: str, kind: type[Any], count: int, n_rows: int) -> Bytes:
    """Receive packed bits of rows at `count` records, uint8 (count, bytes), in messages like `Decisions`."""
    found = []
    for of in column_pieces(count, n_rows):
        first, lines = party.receive(peer, kind), of.stop - of.start
        what = f"{kind.__name__}.left"
        found.append(take_columns(party, peer, n_rows, lines, first, lambda m: m.left, lines, what))
    return found[0] if len(found) == 1 else np.concatenate(found)


class RowSets:
    """An owner's rows that the active party may have decided, by number: every record once for each of them.

    `shown` are those of eval sets, of training rows (`refit`) or to predict.
    """

    def __init__(self, active: str, shown: Sequence[Shown]) -> None:
        self._active, self._shown = active, shown
        self._decided: list[set[int]] = [set() for _ in shown]

    def decide(
        self, request: DecideRequest, splits: SplitTable | JoinedSplits, threads: int, known: int | None = None
    ) -> Iterator[Decisions]:
        """Answer the active party as the owner of `splits`; PeerProtocolError for what a walk down trees needs not.

        It may ask about the first `known` splits (None: all).
        """
        known = len(splits) if known is None else known
        active, n_sets, expected = self._active, len(self._shown), ""
        records = view(request.records, np.int32, (None,), peer=active, what="DecideRequest.records")
        asked = set(records.tolist())
        if not 0 <= request.rows < n_sets:
            expected = f"one of {n_sets} row sets"
        elif np.any(records < 0) or np.any(records >= known):
            expected = f"records below {known}"
        elif not asked or len(asked) < len(records) or asked & self._decided[request.rows]:
            expected = "each record once for every row, got one again"
        if expected:
            raise PeerProtocolError(active, f"expected {expected}", at="DecideRequest")
        self._decided[request.rows] |= asked
        shown = self._shown[request.rows]
        n_rows = shown.n_rows if isinstance(shown, Table) else len(shown)

        def sides(part: slice, of: slice) -> Bytes:
            if not isinstance(shown, Table):
                return splits.decide(shown[of], records[part], threads)
            return decide(splits, shown, records[part], threads, of)

        return (
            Decisions(Array.of(sides(part, of)))
            for part in column_pieces(len(records), n_rows)
            for of in row_pieces(n_rows, part.stop - part.start)
        )


def decidable(party: Party, part: ModelPart, held: Mapping[str, int]) -> list[Tree]:
    """Return the trees of the first rounds, as far as owners still have the records; warn where rounds are left out.

    `held` is how many records each peer has.
    """
    forest = part.grown
    of_round = forest.trees_a_round
    known = np.array([len(part.splits) if name == party.name else held.get(name, 0) for name in forest.sources])
    # the first tree with a lost record ends what can be predicted: rounds are used as a whole
    for number, tree in enumerate(forest.trees):
        inner = tree.source >= 0
        lost = tree.source[inner][tree.record[inner] >= known[tree.source[inner]]]
        if len(lost):
            rounds = number // of_round
            names = ", ".join(forest.sources[source] for source in np.unique(lost))
            logger.warning("predicting with %d of %d rounds: %s lost later splits", rounds, forest.rounds, names)
            return forest.trees[: rounds * of_round]
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
    # of each absent owner, the first tree in which it has a split
    using = {
        source: next((k for k, tree in enumerate(forest.trees) if np.any(tree.source == source)), None)
        for source in absent
    }
    first = [number for number in using.values() if number is not None]
    if first:
        names = ", ".join(forest.sources[source] for source in absent if using[source] is not None)
        text = f"expected every owner of splits to take part in the prediction, got none of {names}"
        raise DataError(
            f"{text}; the first {min(first) // forest.trees_a_round} of {forest.rounds} rounds do without", public=text
        )


# ---------------------------------------------------------------- prediction of a table


def _open_active(inputs: RoleInput, rows: str) -> list[Tree]:
    """Agree on the model and the number of `rows`; return the trees whose records all owners still have."""
    party, part = inputs.party, inputs.part
    assert part.forest is not None, "the active party's part holds the trees"
    check_present(party, part, inputs.rows.table)
    check_shown(part)
    agree(party, {"model": part.model_id, rows: inputs.rows.table.n_rows}, remedy=OF_ONE_MODEL)
    return decidable(party, part, {peer: party.receive(peer, RecordCount).records for peer in party.peers})


def _open_passive(inputs: RoleInput, rows: str) -> Shown:
    """Agree likewise; return the rows to decide: those that the model was trained on under noise by noisy values."""
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    (active,) = party.peers
    check_present(party, part, table)
    check_shown(part)
    agree(party, {"model": part.model_id, rows: table.n_rows}, remedy=OF_ONE_MODEL)
    if part.randomised is not None and inputs.apart:
        check_unknown(inputs, part.randomised.known, inputs.rows)
    shown = shown_rows(part.randomised, inputs.rows)
    party.send(active, RecordCount(len(part.splits)))
    return shown


def collect(inputs: RoleInput) -> RowDecisions:
    """Get every owner's decisions as the active party, in one round; passive parties play `predict_passive`.

    Raises DataError when an owner of splits is not among the peers.
    """
    party, trees = inputs.party, _open_active(inputs, "rows to predict")
    found = ask_all(party, inputs.part, trees, inputs.rows.table, 0, inputs.threads)
    for peer in party.peers:
        party.send(peer, Finish())
    return found


def predict_active(inputs: RoleInput) -> Floats:
    """Return margins (n_rows, n_outputs) as the party with the trees: ask every owner once, then walk alone."""
    return margins(collect(inputs), inputs.part.forest.objective, inputs.threads)


def predict_passive(inputs: RoleInput) -> None:
    """Decide the role's rows at own splits for the active party, which plays `predict_active` or `collect`."""
    party, (active,) = inputs.party, inputs.party.peers
    rows = RowSets(active, [_open_passive(inputs, "rows to predict")])
    while isinstance(request := party.receive(active, DecideRequest, Finish), DecideRequest):
        for decisions in rows.decide(request, inputs.part.splits, inputs.threads):
            party.send(active, decisions)


# -------- prediction row by row, for as long as it is wanted: parties that have aligned their rows once stay connected
#
# The active party names rows by their numbers among those that all parties have, and gets their sides at all records in
# use, told at the beginning, in one round for each request; its own columns of these rows may be newer than those of
# its table.

# Rows of one request, at most
MOST_ROWS = 1 << 20
# Seconds without a request after which the active party sends a message, so that peers know it is there
SAYS_SO = 20.0


@leaks("which of the common rows are requested, and when", "exact")
class OnlineRows(Message):
    """Numbers, int32, of the common rows that are asked for next; none: nothing is asked just now."""

    rows: Array


class Asked(msgspec.Struct, frozen=True):
    """A request: numbers of common rows, int32, the active party's columns of them, and where margins go."""

    rows: Int32s
    table: Table
    tell: Callable[[Floats], None]


# What the active party is asked, one after the other; None now and then, where nothing is
Requests = Iterator[Asked | None]


def online_active(inputs: RoleInput) -> None:
    """Predict what `inputs.requests` asks for, until it ends."""
    objective = inputs.part.forest.objective
    owners = _Owners(inputs.party, inputs.part, _open_active(inputs, "rows"))
    owners.ask(0)
    walk = BitWalk(owners.trees, owners.base)

    def answer(asked: Asked) -> Floats:
        found = np.full((asked.table.n_rows, objective.n_outputs), objective.base_margins)
        walk.add_to(found, owners.decided(asked.table, inputs.threads), inputs.threads)
        return found

    answer_requests(inputs, answer)


def answer_requests(inputs: RoleInput[Any, Any], answer: Callable[[Asked], Floats]) -> None:
    """Name each request's rows to all peers, and return what `answer` makes of it, until there are no more."""
    party = inputs.party
    assert inputs.requests is not None
    spoken, often = time.monotonic(), min(SAYS_SO, party.timeout / 4)
    for asked in inputs.requests:
        # or it would grow for as long as the service lasts
        party.transcript.clear()
        if asked is None:
            party.heed()
            if time.monotonic() - spoken < often:
                continue
        spoken, rows = time.monotonic(), np.zeros(0, np.int32) if asked is None else asked.rows
        for peer in party.peers:
            party.send(peer, OnlineRows(Array.of(rows)))
        if asked is not None:
            asked.tell(answer(asked))
    for peer in party.peers:
        party.send(peer, Finish())


def asked_rows(asked: OnlineRows, active: str, n_rows: int) -> Int32s:
    """Return the rows that the active party asks a passive one for, all below `n_rows`."""
    rows = view(asked.rows, np.int32, (None,), peer=active, what="OnlineRows.rows")
    if len(rows) > MOST_ROWS or np.any(rows < 0) or np.any(rows >= n_rows):
        raise PeerProtocolError(active, f"expected at most {MOST_ROWS} rows below {n_rows}", at="OnlineRows")
    return rows


def online_passive(inputs: RoleInput) -> None:
    """Decide the common rows that the active party asks for at own splits, until it has finished."""
    party, (active,), shown = inputs.party, inputs.party.peers, _open_passive(inputs, "rows")
    # by row, as single rows are asked for
    matrix = shown.matrix() if isinstance(shown, Table) else shown
    splits = join_splits([inputs.part.splits], [matrix.shape[1]])
    # the active party asks for no records if its trees use none
    request: DecideRequest | None = None
    while not isinstance(asked := party.receive(active, OnlineRows, DecideRequest, Finish), Finish):
        if isinstance(asked, DecideRequest):
            request = asked
            continue
        assert isinstance(asked, OnlineRows)
        party.transcript.clear()
        rows = asked_rows(asked, active, len(matrix))
        if request is not None and len(rows):
            for decisions in RowSets(active, [matrix[rows]]).decide(request, splits, inputs.threads):
                party.send(active, decisions)
