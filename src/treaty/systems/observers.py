"""Observers watch a role from outside: progress bars, clocks, checkpoints, recordings for attacks, audit records.

A role runs its protocol and reports what happens to `RoleInput.observers`; it does not know who listens. The runner
attaches the observers, and `play_role` has the party report every message to them. An observer may read what it is
given and may raise an error, which ends the training. It must not send messages or change arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from treaty.data.binning import Bins
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.messages import Message
from treaty.messaging.transcript import Room
from treaty.models.checkpoints import Checkpoint, Keeper
from treaty.privacy.exact_sums import OpenedNode
from treaty.trees.constraints import Directions
from treaty.trees.ensemble import Tree
from treaty.trees.growth import RowPartition, RowsOfNodes
from treaty.trees.outputs import of_output
from treaty.trees.splits import Level, complete_sums, kept_sums

if TYPE_CHECKING:
    from treaty.systems.system import Phase, Progress, RoleInput


class Observer:
    """The interface: override what you need, everything else does nothing."""

    def started(self, inputs: RoleInput) -> None:
        """Take what the role is given, before it sends anything."""

    def set_up(self, title: str, done: int, total: int) -> None:
        """Note how much of some long work before the first round is done, in steps."""

    def message_sent(self, peer: str, message: Message) -> None:
        """Take a message that was sent to a peer."""

    def message_received(self, peer: str, message: Message) -> None:
        """Take a checked message from a peer, before the role has it."""

    def event(self, event: object) -> None:
        """Take one of the events below, or one of the system's own; ignore all others."""

    def round_finished(self, rounds: int, state: Any) -> None:
        """Take the number of finished rounds or epochs, and what the party has so far.

        Also called once when training begins, with the rounds that there are. `state` is the part of the model, the
        epochs' losses by set of rows, or None at parties without either.
        """

    def finished(self) -> None:
        """Release files and folders: the role has ended, well or by an error."""


class Evidence:
    """What a party adds to its messages so that it can be held to them later; this one adds nothing.

    `number` is that of the record that an observer keeps for an audit, empty without one.
    """

    number: bytes = b""

    def signature(self, peer: str) -> bytes:
        """Sign all that a peer was sent so far in this training."""
        return b""


class Observers(Observer):
    """Several observers as one; each call goes to all of them, in order."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer, *, first: bool = False) -> None:
        """Attach one more observer: after the others, or as the `first`."""
        self._observers.insert(0 if first else len(self._observers), observer)

    def started(self, inputs: RoleInput) -> None:
        for observer in self._observers:
            observer.started(inputs)

    def set_up(self, title: str, done: int, total: int) -> None:
        for observer in self._observers:
            observer.set_up(title, done, total)

    def message_sent(self, peer: str, message: Message) -> None:
        for observer in self._observers:
            observer.message_sent(peer, message)

    def message_received(self, peer: str, message: Message) -> None:
        for observer in self._observers:
            observer.message_received(peer, message)

    def event(self, event: object) -> None:
        for observer in self._observers:
            observer.event(event)

    def round_finished(self, rounds: int, state: Any) -> None:
        for observer in self._observers:
            observer.round_finished(rounds, state)

    def finished(self) -> None:
        for observer in self._observers:
            observer.finished()


MakeObservers = Callable[["RoleInput"], Iterable[Observer]]

_more: ContextVar[MakeObservers] = ContextVar("more observers", default=lambda inputs: ())


@contextmanager
def observing(make: MakeObservers) -> Iterator[None]:
    """Attach more observers to every role that this process plays within the block.

    Examples
    --------
    >>> from treaty.systems.observers import Observer, observing
    >>> class Printer(Observer):
    ...     def message_sent(self, peer, message):
    ...         print(type(message).__name__, "to", peer)
    >>> with observing(lambda inputs: [Printer()]):
    ...     pass  # model.fit(tables, labels)
    """
    token = _more.set(make)
    try:
        yield
    finally:
        _more.reset(token)


def play_role(program: Callable[[RoleInput], Any], inputs: RoleInput) -> Any:
    """Run a role's program with its observers attached to its party; return what the program returns."""
    observers = inputs.observers
    if inputs.keeper is not None:
        # the first, so that no error of another observer comes before a checkpoint is written
        observers.add(CheckpointWriter(inputs.keeper), first=True)
    for observer in _more.get()(inputs):
        observers.add(observer)
    try:
        observers.started(inputs)
        if inputs.party is not None:  # training in one place has no party
            inputs.party.watcher = observers
        return program(inputs)
    finally:
        observers.finished()


class CheckpointWriter(Observer):
    """Writes a party's checkpoint each time that all parties keep theirs."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def event(self, event: object) -> None:
        if isinstance(event, CheckpointReached):
            self._keeper.keep(event.current, event.began)


# Events. They hold the role's own arrays: copy what you keep, for the next level or round may change them.


@dataclass(frozen=True, slots=True)
class CheckpointReached:
    """All parties keep what they have after a round; `current` and `began` are as in `Keeper.keep`."""

    current: Callable[[], Checkpoint]
    began: float | None = None


@dataclass(frozen=True, slots=True)
class TreeStarted:
    """A tree begins, with these gradients int64 (n_rows,) and sampled rows (None: all); many together: (k, n_rows)."""

    grad: Integers
    hess: Integers
    rows: Int32s | None


@dataclass(frozen=True, slots=True)
class TreeFinished:
    """A tree is grown; `rows` says which node each row is in, `directions` (n_nodes,) are those of `Growth`."""

    tree: Tree
    rows: RowPartition
    directions: Directions


@dataclass(frozen=True, slots=True)
class ColumnsLearned:
    """Another party's columns will have their sums opened here: its features' first slots, int32 (n_features + 1,)."""

    owner: str
    offsets: Int32s


@dataclass(frozen=True, slots=True)
class SumsOpened:
    """Sums of another party's columns were opened: int64 (n_asked, slots, 3) of ``level.asked``."""

    owner: str
    level: Level
    rows: RowsOfNodes
    sums: Integers


@dataclass(frozen=True, slots=True)
class SidesLearned:
    """Which of a node's rows go left at a split of `owner`, who may be this party: int32 and bool (n,)."""

    owner: str
    rows: Int32s
    left: Flags


@dataclass(frozen=True, slots=True)
class TreeOpened:
    """Of tables split by row: a tree's opened sums by node, its left children int32 (n_nodes,), and the bins."""

    asked: dict[int, Integers]
    left: Int32s
    bins: Bins


@dataclass(frozen=True, slots=True)
class VectorGiven:
    """A vector that is about to be masked."""

    values: Integers


class ProgressCalls(Observer):
    """Calls functions with the progress of a training."""

    def __init__(self, progress: Progress | None = None, phase: Phase | None = None) -> None:
        self._progress, self._phase = progress, phase

    def set_up(self, title: str, done: int, total: int) -> None:
        if self._phase is not None:
            self._phase(title, done, total)

    def round_finished(self, rounds: int, state: Any) -> None:
        if self._progress is not None:
            self._progress(rounds, state)


@dataclass(slots=True)
class Recording(Observer):
    """What a party of a training has seen in the clear, the input of `treaty.attacks`; messages: in its transcript."""

    # at the active party of tables split by column: sums of each other party's columns, tree after tree
    nodes: dict[str, list[OpenedNode]] = field(default_factory=dict)
    # first slots of these columns; dict of str to int32 (n_columns + 1,)
    offsets: dict[str, Int32s] = field(default_factory=dict)
    # at the leader of tables split by row, of each tree: the opened sums by node, and each node's left child; list of
    # (dict of int to int64 (slots, 3), int32 (n_nodes,))
    trees: list[tuple[dict[int, Integers], Int32s]] = field(default_factory=list)
    # those of the columns there
    bins: Bins | None = None
    # at a party that contributes to sums under masks: its vectors without the masks, in the order it gave them; list of
    # int64 (n,)
    given: list[Integers] = field(default_factory=list)
    # at each other party's splits: the rows whose sides were shown, and which of them go left; at a party whose own
    # sides were transferred, at its own; dict of str to list of (int32 (n,), bool (n,))
    sides: dict[str, list[tuple[Int32s, Flags]]] = field(default_factory=dict)
    # without room for more, everything is dropped and nothing more is noted
    room: Room = field(default_factory=Room)

    _gradients: tuple[Integers, Integers] = field(default_factory=lambda: (np.empty(0, np.int64),) * 2)
    _parents: dict[str, Integers] = field(default_factory=dict)  # complete sums of each owner's last level

    def event(self, event: object) -> None:
        match event:
            case TreeStarted(grad, hess):
                self._gradients, self._parents = (grad.copy(), hess.copy()), {}
            case ColumnsLearned(owner, offsets):
                self.offsets[owner], self.nodes[owner] = offsets, []
            case SumsOpened():
                self._note_sums(event)
            case SidesLearned(owner, rows, left):
                if self._fits(rows.nbytes + left.nbytes):
                    self.sides.setdefault(owner, []).append((rows.copy(), left.copy()))
            case TreeOpened(asked, left, bins):
                self.bins = bins
                if self._fits(left.nbytes + sum(sums.nbytes for sums in asked.values())):
                    self.trees.append((asked, left))
            case VectorGiven(values):
                if self._fits(8 * values.size):
                    self.given.append(values.astype(np.int64))

    def _note_sums(self, opened: SumsOpened) -> None:
        """Note the nodes asked about, and their siblings, whose sums are their parents' less these."""
        level, owner = opened.level, opened.owner
        followed = level.parent_index >= 0
        parents = self._parents.get(owner)
        complete = complete_sums(level, opened.sums, parents)
        self._parents[owner] = kept_sums(level, parents, complete)
        # all nodes of a tree share the root's gradients
        self._fits(0 if followed.any() else sum(of.nbytes for of in self._gradients))
        grads, hesses = map(np.atleast_2d, self._gradients)
        for nodes, opened_of in ((level.asked, opened.sums), (level.nodes[followed], complete[followed])):
            left = iter(opened_of)
            for outputs, (rows, starts, firsts) in opened.rows.parts(nodes):
                for first, size, sums in zip(firsts.tolist(), np.diff(starts).tolist(), left, strict=False):
                    for k, of in enumerate(zip(grads[outputs], hesses[outputs], strict=True)):
                        node = OpenedNode(rows[first : first + size].copy(), *of, of_output(sums, k))
                        if self._fits(node.rows.nbytes + node.sums.nbytes):
                            self.nodes[owner].append(node)

    def _fits(self, nbytes: int) -> bool:
        fits = self.room.take(nbytes)
        if not fits:
            self.trees, self.given, self.nodes, self.sides = [], [], {name: [] for name in self.nodes}, {}
        return fits
