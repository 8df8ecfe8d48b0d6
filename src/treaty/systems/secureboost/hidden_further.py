"""Further parties of a training with hidden rows: they have columns, hold no shares, and are linked to the active one.

The active party and its *partner*, the job's first passive party, compute on shares (`hidden_tree`). A further party
answers both ends' encrypted shares (`crypto.sums.shared_sums`). Its candidates meet the others' in the tournament.
Where one wins, both ends send their share of its number, and the further party gives each row's side as two shares.

All that passes between a further party and the partner goes through the active party, under pads that it does not know:
both draw them from a seed (`vertical.sealed.MovingKey`), under the tree, the level and what they are for. The partner's
share of sides, and of a number, is the pad itself.

Active party and partner must not collude: together they can open everything. A further party that colludes with one of
them learns what that one does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.kernels import reduced
from treaty.crypto.lattice.ring import uniform_digits
from treaty.crypto.parameters import Digits
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.shared_sums import FurtherSums, ServedColumns, shared_parameters
from treaty.crypto.transfer.sealed_sums import NUMBER, opened
from treaty.crypto.transfer.stock import Arrays, Steps, take
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Bytes, Integers, Words
from treaty.messaging.conversation import MessageOrder, Table
from treaty.messaging.messages import Array, Message, leaks, pack, unpack
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, decide, record_split
from treaty.systems.pooled.continuing import CheckpointRequest
from treaty.systems.secureboost.hidden_forest import SidesRequest, decide_rows
from treaty.systems.secureboost.hidden_setup import Columns, HiddenStart, note_rows, terms_of
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.shared_prediction import meet, share_sides
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import ascending
from treaty.systems.vertical.messages import OpenedStep, SealedStep, Step
from treaty.systems.vertical.prediction import Finish
from treaty.systems.vertical.sealed import MovingKey
from treaty.systems.vertical.sealed_candidates import Candidates
from treaty.systems.vertical.training import Follower, Handlers, agree_on_terms
from treaty.trees.ensemble import SplitTable


@leaks("the tree's sample of its columns", "control")
class FurtherTree(Message):
    """A tree begins at a further party: its columns, ascending int32."""

    columns: Array


@contextmanager
def errors_of(peer: str, what: str) -> Iterator[None]:
    """Raise errors of arrays as those of the peer that has sent them."""
    try:
        yield
    except CryptoError as error:
        raise PeerProtocolError(peer, str(error), at=what) from None


def about_tree(sent: Step, peer: str, trees: Collection[int]) -> tuple[int, Arrays]:
    """Return the number of one of these trees, and what was sent about it."""
    what = type(sent).__name__
    number, *came = unpack(sent.payload, peer, what) or [np.zeros(0)]
    if number.dtype != np.int64 or number.shape or int(number) not in trees:
        raise PeerProtocolError(peer, "expected the number of a tree that grows", at=what)
    return int(number), came


# ---------------------------------------------------------------- the active party and its partner


class Answers:
    """What further parties have answered the active one about `trees` that grow at once, each in steps of its own."""

    def __init__(self, party: Party, trees: Collection[int]) -> None:
        self.party, self._trees = party, trees
        self._waiting: dict[tuple[str, int], Arrays] = {}

    def next(self, name: str, tree: int, *expected: Any) -> Arrays:
        """Return a party's next answer about a tree."""
        while (name, tree) not in self._waiting:
            of, came = about_tree(self.party.receive(name, SealedStep), name, self._trees)
            if (name, of) in self._waiting:
                raise PeerProtocolError(name, "expected one answer about a tree at a time", at="SealedStep")
            self._waiting[name, of] = came
        with errors_of(name, "SealedStep"):
            return take(self._waiting.pop((name, tree)), *expected)


@dataclass
class Relaying:
    """The active party's end of a tree.

    `sets` are the numbers of rows of training rows and eval sets, `candidates` those of each further party.
    """

    answers_of: Answers
    names: Sequence[str]
    tree: int
    sets: Sequence[int]
    candidates: Sequence[int]
    relays = True

    def _send(self, name: str, kind: type[Step], arrays: Sequence[NDArray[Any]]) -> None:
        self.answers_of.party.send(name, kind(pack([np.array(self.tree), *arrays])))

    def ask(self, slots: Sequence[int], vectors: Arrays) -> None:
        for name, count in zip(self.names, slots, strict=True):
            if count:
                self._send(name, SealedStep, vectors)

    def answers(self, shapes: Sequence[tuple[int, int, int]]) -> Steps[list[Digits]]:
        found = [
            self.answers_of.next(name, self.tree, *[(np.uint16, shape)] * 2)
            for name, shape in zip(self.names, shapes, strict=True)
            if shape[1]
        ]
        take((yield [theirs for _, theirs in found]))
        return [own for own, _ in found]

    def win(self, numbers: Sequence[Words]) -> Steps[tuple[Sequence[Integers], Sequence[Sequence[Bytes]]]]:
        came = take((yield []), *[(np.uint64, own.shape) for own in numbers])
        for name, own, others in zip(self.names, numbers, came, strict=True):
            if len(own):
                self._send(name, OpenedStep, [own, others])
        of_numbers, sides = list[Integers](), list[Sequence[Bytes]]()
        for name, own, most in zip(self.names, numbers, self.candidates, strict=True):
            expected = [(np.int64, own.shape), *[(np.uint8, (len(own), -(-rows // 8))) for rows in self.sets]]
            none: Arrays = [np.zeros(shape, kind) for kind, shape in expected]
            number, *lines = self.answers_of.next(name, self.tree, *expected) if len(own) else none
            if np.any(number >> _bits_of_numbers(most)):
                raise PeerProtocolError(name, "expected numbers of own candidates, under a pad", at="SealedStep")
            of_numbers.append(number)
            sides.append(lines)
        return of_numbers, sides


@dataclass
class Padded:
    """The partner's end of a tree; `key` has a seed with each further party."""

    key: MovingKey
    names: Sequence[str]
    tree: int
    sets: Sequence[int]
    candidates: Sequence[int]
    level: int = 0
    relays = False

    def ask(self, slots: Sequence[int], vectors: Arrays) -> None:
        """Do nothing: the active party passes vectors on."""

    def answers(self, shapes: Sequence[tuple[int, int, int]]) -> Steps[list[Digits]]:
        asked = [(name, shape) for name, shape in zip(self.names, shapes, strict=True) if shape[1]]
        came = take((yield []), *[(np.uint16, shape) for _, shape in asked])
        pads = [Pads(self.key, name, self.tree, self.level).digits(shape) for name, shape in asked]
        self.level += 1
        return [reduced(of.astype(np.int64) - pad) for of, pad in zip(came, pads, strict=True)]

    def win(self, numbers: Sequence[Words]) -> Steps[tuple[Sequence[Integers], Sequence[Sequence[Bytes]]]]:
        pads = [Pads(self.key, name, self.tree, self.level - 1) for name in self.names]
        take((yield [own + of.words(len(own)) for of, own in zip(pads, numbers, strict=True)]))
        return (
            [of.numbers(len(own), most) for of, own, most in zip(pads, numbers, self.candidates, strict=True)],
            [of.lines(len(own), self.sets) for of, own in zip(pads, numbers, strict=True)],
        )


@dataclass(frozen=True)
class Pads:
    """What a further party and the partner alone know, of a level: each is drawn once at either."""

    key: MovingKey
    other: str
    tree: int
    level: int

    def _stream(self, what: str) -> Keystream:
        return self.key.stream(self.other, f"{self.tree} {self.level} {what}")

    def digits(self, shape: tuple[int, int, int]) -> Digits:
        """Return pads of an answer."""
        return uniform_digits(self._stream("sums").raw, shape)

    def words(self, count: int) -> Words:
        """Return pads of shares of the numbers of candidates that won."""
        return self._stream("numbers").bits(64, count)[:, 0]

    def numbers(self, count: int, candidates: int) -> Integers:
        """Return pads of these numbers, of as many bits as numbers of `candidates` have."""
        return self._stream("index").bits(_bits_of_numbers(candidates), count)[:, 0].astype(np.int64)

    def lines(self, count: int, sets: Sequence[int]) -> list[Bytes]:
        """Return pads of rows' sides at so many splits, of each set of rows, uint8 (count, bytes)."""
        stream = self._stream("sides")
        return [
            np.frombuffer(stream.raw(count * -(-rows // 8)), np.uint8).reshape(count, -(-rows // 8)) for rows in sets
        ]


def _bits_of_numbers(candidates: int) -> int:
    return max(1, (candidates - 1).bit_length())


def hints_of(party: Party, slots: Mapping[str, int], bounds: SumsBounds) -> Iterator[Arrays]:
    """Receive further parties' hints piece by piece, as the active party, of so many `slots` of each."""
    parameters = shared_parameters(bounds, further=True)
    shape = parameters.digits, parameters.degree
    for name, left in slots.items():
        while left:
            came = unpack(party.receive(name, SealedStep).payload, name, "SealedStep")
            fits = len(came) == 1 and came[0].dtype == np.int16 and came[0].shape[1:] == shape
            if not fits or not 0 < len(came[0]) <= left:
                raise PeerProtocolError(name, f"expected at most {left} rows more of a hint", at="SealedStep")
            yield came
            left -= len(came[0])


# ---------------------------------------------------------------- a further party


class _Growing:
    """A tree that grows: its candidates, and which of them won so far."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates, self.level, self.vectors = candidates, 0, 1
        self.asked: FurtherSums | None = None
        self.open = False  # whether winners of the level may come
        self.won: list[tuple[int, NDArray[np.bool_]]] = []


class _FurtherTrees:
    """A further party's trees."""

    def __init__(self, inputs: RoleInput[SecureBoost], columns: Columns, table: ServedColumns, key: MovingKey) -> None:
        self._inputs, self._columns, self._table, self._key = inputs, columns, table, key
        (self._active,), self._partner = inputs.party.peers, inputs.others[0]
        self._trees: dict[int, _Growing] = {}
        self._number = 0
        self._sets = [of.table.n_rows for of in (inputs.rows, *inputs.eval_sets)]

    def begin(self, sent: FurtherTree) -> None:
        columns = ascending(sent.columns, len(self._columns.own.categorical), self._active, "FurtherTree.columns")
        self._number += 1
        self._trees[self._number] = _Growing(self._columns.own.candidates(columns))

    def answer(self, sent: SealedStep) -> SealedStep | None:
        """Add a piece of vectors; after the last one, answer them."""
        number, came = about_tree(sent, self._active, self._trees)
        tree = self._trees[number]
        if tree.asked is None:
            if tree.level == self._inputs.common.depth or not len(tree.candidates.features):
                raise PeerProtocolError(self._active, "expected levels of a tree with own columns", at="SealedStep")
            tree.asked = FurtherSums(self._table, tree.vectors, tree.candidates.features)
        with errors_of(self._active, "SealedStep"):
            if not tree.asked.add(came):
                return None
        pads = Pads(self._key, self._partner, number, tree.level)
        answers = tree.asked.answers(pads.digits(tree.asked.shape))
        # of the next level only right children's sums are asked for
        tree.asked, tree.vectors, tree.open = None, 1 << tree.level, True
        tree.level += 1
        return SealedStep(pack([np.array(number), *answers]))

    def win(self, sent: OpenedStep) -> SealedStep:
        """Take the numbers of candidates that won at a level; share rows' sides at them."""
        number, came = about_tree(sent, self._active, self._trees)
        tree = self._trees[number]
        pads, count = Pads(self._key, self._partner, number, tree.level - 1), len(tree.candidates)
        with errors_of(self._active, "OpenedStep"):
            own, others = take(came, *[(np.uint64, came[0].shape if came else ())] * 2)
        if not tree.open or own.ndim != 1 or not 0 < len(own) <= 1 << tree.level - 1:
            raise PeerProtocolError(self._active, "expected winners of a level, once", at="OpenedStep")
        won = opened(own, others - pads.words(len(own)), NUMBER)
        if np.any(won >= count):
            raise PeerProtocolError(self._active, "expected shares of numbers of own candidates", at="OpenedStep")
        tree.open = False
        columns, left_bins = tree.candidates.splits(won.astype(np.int32), np.zeros((len(won), 0), np.bool_))
        splits = list(zip(columns.tolist(), left_bins, strict=True))
        tree.won += splits
        self._columns.note_splits(self._inputs, splits)
        index = won.astype(np.int64) ^ pads.numbers(len(won), count)
        lines = [np.packbits([~left[self._columns.codes[:, column]] for column, left in splits], axis=1)]
        for rows in self._inputs.eval_sets:
            lines.append(~decide(self._recorded(splits, SplitTable()), rows.table, None, self._inputs.threads))
        masked = [of ^ pad for of, pad in zip(lines, pads.lines(len(won), self._sets), strict=True)]
        return SealedStep(pack([np.array(number), index, *masked]))

    def record(self, part: ModelPart) -> None:
        """Record the splits of trees that are grown, in the order of the trees."""
        for tree in self._trees.values():
            self._recorded(tree.won, part.splits)
        self._trees.clear()

    def _recorded(self, won: Sequence[tuple[int, NDArray[np.bool_]]], splits: SplitTable) -> SplitTable:
        for column, left in won:
            record_split(splits, self._columns.bins, column, left)
        return splits


def train_further(inputs: RoleInput[SecureBoost]) -> ModelPart:
    """Train as a further party: answer vectors, and share the sides of rows at own splits."""
    party, (active,), partner = inputs.party, inputs.party.peers, inputs.others[0]
    columns, key = Columns(inputs), MovingKey(inputs.party, inputs.vouching, "hidden rows")
    agree_on_terms(inputs)
    columns.exchange(inputs, key)
    start = party.receive(active, HiddenStart)
    if start.key is None:
        raise PeerProtocolError(active, f"expected a key of {partner}", at="HiddenStart")
    meet(inputs, key, {partner: start.key}, "HiddenStart.key")
    follower = Follower(inputs, start)
    note_rows(inputs, follower.part)
    _, bounds, _ = terms_of(inputs, start)
    with errors_of(active, "SealedStep"):
        came = unpack(party.receive(active, SealedStep).payload, active, "SealedStep")
        (seed,) = take(came, (np.uint8, (32,)))
    table = ServedColumns(bounds, columns.codes, columns.own.offsets, seed.tobytes(), inputs.threads, further=True)
    for piece in table.hint():
        party.send(active, SealedStep(pack([piece])))
    grower, outputs = _FurtherTrees(inputs, columns, table, key), inputs.trees_a_round
    if start.rounds:
        splits = follower.part.splits
        share = share_sides(inputs, party.receive(active, SidesRequest), key, len(splits))
        for rows in (inputs.rows, *inputs.eval_sets):
            share(rows.table.n_rows, partial(decide_rows, splits, rows.table, inputs.threads))
    grown = 0

    def begin(sent: FurtherTree) -> None:
        nonlocal grown
        if grown % outputs == 0:
            grower.record(follower.part)
        grown += 1
        follower.limits.tree()
        follower.next_tree()
        grower.begin(sent)

    def keep(request: CheckpointRequest) -> Message:
        grower.record(follower.part)
        return follower.keep(request)

    def end(_: Finish) -> None:
        grower.record(follower.part)
        follower.report()

    handlers: Handlers = {
        FurtherTree: begin, SealedStep: grower.answer, OpenedStep: grower.win, CheckpointRequest: keep, Finish: end,
    }  # fmt: skip
    return follower.follow(MessageOrder(_TABLE, "open"), handlers)


_TABLE: Table = {
    "open": {
        FurtherTree: "open",
        SealedStep: "open",
        OpenedStep: "open",
        CheckpointRequest: "open",
        Finish: "finished",
    },
    "finished": {},
}
