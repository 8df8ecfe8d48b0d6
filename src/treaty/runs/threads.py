"""All roles of a run on this machine, in threads over the in-memory channel.

Within `in_turns` only one role runs at a time, until it waits for a message: use it with a debugger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.errors import ConfigError, PeerAborted, PeerError, PeerTimeout
from treaty.machine.process import cores
from treaty.messaging.channel import Arrival, LinkSpeed, MemoryChannel, memory_channels
from treaty.messaging.party import Party, run_role
from treaty.messaging.transcript import Timeline, Transcript, timeline_of
from treaty.models.checkpoints import Keeper
from treaty.systems.observers import Observers, ProgressCalls, play_role
from treaty.systems.options import SystemOptions
from treaty.systems.system import LabelledRows, Phase, Program, Progress, RoleInput, Roles, System, roles_of

_MOST_OWNERS = 32
Role = Callable[[Party], Any]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Each role's result, and each party's transcript."""

    results: dict[str, Any]
    transcripts: dict[str, Transcript]


def play(
    roles: Mapping[str, Role],
    links: Mapping[str, Sequence[str]],
    *,
    job: str,
    protocol: str,
    timeout: float = 3600.0,
    record_content: bool = False,
    link: LinkSpeed | None = None,
    one_at_a_time: bool | None = None,
) -> RunRecord:
    """Run every role, a function of its `Party`, in a thread of its own; raise the error of the first that fails.

    `links` are each party's peers; `job` and `protocol` are part of every message. A party waits `timeout` seconds for
    a message. With `record_content`, transcripts keep the content of messages, for audits and tests. `link` says how
    slow each party's line is. With `one_at_a_time`, the roles take turns, in their order, each until it waits for a
    message; None: only within `in_turns`.
    """
    channels: Mapping[str, MemoryChannel | _ChannelInTurns] = memory_channels(roles, link)
    turns = _Turns(roles) if (_in_turns.get() if one_at_a_time is None else one_at_a_time) else None
    if turns is not None:
        channels = {name: _ChannelInTurns(channel, turns) for name, channel in memory_channels(roles, link).items()}
    parties = {
        name: Party(
            name, job, protocol, channels[name], links[name],
            Transcript(name, record_content=record_content), timeout,
        )
        for name in roles
    }  # fmt: skip
    results: dict[str, Any] = {}
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            if turns is not None:
                turns.wait(name)
            results[name] = run_role(parties[name], lambda: roles[name](parties[name]))
        except BaseException as error:
            failures.append(error)
        finally:
            channels[name].close()
            if turns is not None:
                turns.end(name)

    threads = [
        threading.Thread(target=copy_context().run, args=(run, name), name=f"treaty-{name}", daemon=True)
        for name in roles
    ]
    # daemons: an interrupted main thread does not wait for roles that wait for each other
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            # with a limit, so that an interrupt is noticed between waits
            for thread in threads:
                thread.join(0.1)
    except BaseException:
        for party in parties.values():
            party.abort("interrupted")
        raise
    if failures:
        raise root_cause(failures)
    return RunRecord(results, {name: party.transcript for name, party in parties.items()})


_in_turns: ContextVar[bool] = ContextVar("roles take turns", default=False)


@contextmanager
def in_turns() -> Iterator[None]:
    """Let the roles that this process plays within the block take turns, so that a debugger stops all of them.

    Examples
    --------
    >>> from treaty.runs.threads import in_turns
    >>> with in_turns():
    ...     pass  # model.fit(tables, labels), with a breakpoint() in a role
    """
    token = _in_turns.set(True)
    try:
        yield
    finally:
        _in_turns.reset(token)


class _Turns:
    """Whose turn it is: one role runs, in the order of `names`, until it waits for a message or ends."""

    def __init__(self, names: Iterable[str]) -> None:
        # the first one runs
        self._waiting = list(names)
        self._changed = threading.Condition()
        # turns in a row that brought no message to any role
        self.idle = 0

    def wait(self, name: str) -> None:
        """Block until it is this role's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == name)

    def pass_on(self, name: str) -> None:
        """Give all others a turn, then return."""
        with self._changed:
            self.idle += 1
            # all roles wait: for a slow line, or for each other until one's time is up
            if self.idle > len(self._waiting):
                self._changed.wait(0.001)
            self._waiting.append(self._waiting.pop(0))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting[0] == name)

    def end(self, name: str) -> None:
        """Remove a role that has ended in its turn."""
        with self._changed:
            self.idle = 0
            self._waiting.remove(name)
            self._changed.notify_all()


class _ChannelInTurns:
    """A channel whose party passes its turn on instead of waiting."""

    def __init__(self, channel: MemoryChannel, turns: _Turns) -> None:
        self._channel, self._turns = channel, turns
        self.name, self.waits, self.frame_bytes = channel.name, channel.waits, channel.frame_bytes
        self.refusal, self.is_up, self.mark_read = channel.refusal, channel.is_up, channel.mark_read
        self.close = channel.close

    def send(self, to: str, frame: bytes, timeout: float, *, receipt: bool = False) -> None:
        """Deliver a frame, as `Channel.send` does."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._channel.send(to, frame, 0.0)
            except PeerTimeout:  # the peer's inbox is full
                if time.monotonic() >= deadline:
                    raise
                self._turns.pass_on(self.name)

    def receive(self, timeout: float) -> Arrival | None:
        """Take the next frame or notice, as `Channel.receive` does."""
        deadline = time.monotonic() + timeout
        while (arrival := self._channel.receive(0.0)) is None and time.monotonic() < deadline:
            self._turns.pass_on(self.name)
        if arrival is not None:
            self._turns.idle = 0
        return arrival


def root_cause(failures: Sequence[BaseException]) -> BaseException:
    """Return the error that caused the others: one that is not about a peer, or else one that is not an echo."""
    for echo in (PeerError, PeerAborted):
        for error in failures:
            if not isinstance(error, echo):
                return error
    return failures[0]


def star(active: str, parties: Iterable[str]) -> dict[str, list[str]]:
    """Link the active party with every other, but passive parties not with each other."""
    others = [name for name in parties if name != active]
    return {active: others, **{name: [active] for name in others}}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages and times of a run."""

    # by ordered pair of parties ("clinic -> lab"): messages, bytes, and bytes by message type
    totals: dict[str, dict[str, Any]] = field(default_factory=dict)
    # of the active party's phases, if it noted them itself
    seconds: dict[str, float] = field(default_factory=dict)
    # bytes sent over time; None if nothing was sent
    timeline: Timeline | None = None


def traffic_of(transcripts: Iterable[Transcript]) -> Traffic:
    """Add up the messages that parties sent."""
    transcripts = list(transcripts)
    totals: dict[str, dict[str, Any]] = {}
    for transcript in transcripts:
        for entry in transcript.entries:
            if entry.direction == "sent":
                pair = totals.setdefault(
                    f"{transcript.party} -> {entry.peer}", {"messages": 0, "bytes": 0, "by_type": {}}
                )
                pair["messages"] += 1
                pair["bytes"] += entry.nbytes
                pair["by_type"][entry.step] = pair["by_type"].get(entry.step, 0) + entry.nbytes
    return Traffic(totals, timeline=timeline_of(transcripts, "sent"))


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What all parties of a run have in common; every runner makes the inputs of its roles from it."""

    system: System
    options: Any
    common: Any
    roles: Roles

    def inputs(
        self, party: Party, threads: int, *, progress: Progress | None = None, phase: Phase | None = None
    ) -> RoleInput[Any, Any]:
        """Return a role's input without the party's own values: rows, a part of the model, folders."""
        return RoleInput(
            party=party, options=self.options, common=self.common, roles=self.roles, threads=threads,
            observers=Observers([ProgressCalls(progress, phase)]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Watched:
    """An eval set: tables by owner if columns are split, else the active party's alone; labels, weights and margins."""

    tables: Mapping[str, Table]
    y: NDArray[np.float64]
    weight: NDArray[np.float64] | None = None
    base_margin: NDArray[np.float64] | None = None

    def rows(self, table: Table, number: int, *, labelled: bool = True) -> LabelledRows:
        """Return the rows of eval set `number`; at the active party with labels, weights and margins."""
        rows = LabelledRows(table, np.zeros(0), name=f"eval_{number}")
        return replace(rows, y=self.y, weight=self.weight, base_margin=self.base_margin) if labelled else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunTerms):
    """A training on this machine, in threads, in processes or in one place."""

    # of every owner, with labels (class numbers) if the party has some
    data: Mapping[str, LabelledRows]
    # labels by class number; None for regression
    classes: list[Any] | None
    eval_sets: Sequence[Watched] = ()
    # of an earlier model, by owner, from which training goes on
    earlier: Mapping[str, Any] = field(default_factory=dict)
    # directions of monotone constraints, by owner of columns and column
    directions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    n_jobs: int | None = None
    # called after every round of every role, see `Observer.round_finished`
    progress: Progress | None = None
    phase: Phase | None = None
    # folder of files that later fits on the same rows need
    store: Path | None = None

    def evals_of(self, name: str) -> list[LabelledRows]:
        """Return the eval sets as a party has them: its own columns; labels and weights at the active party."""
        return [
            of.rows(of.tables[name], number, labelled=name == self.roles.active)
            for number, of in enumerate(self.eval_sets)
            if name in of.tables
        ]


def train_in_threads(run: Run, keepers: Mapping[str, Keeper], *, link: LinkSpeed | None = None) -> RunRecord:
    """Train with every party in a thread of its own; return the results of its roles."""
    system, roles, every = run.system, run.roles, cores(run.n_jobs)
    # if rows are split, all owners compute at the same time, while a party without rows waits
    shared = max(1, every // len(roles.owners)) if system.split == "rows" else every
    absences = {} if system.absences is None else system.absences(roles, run.options, run.common)
    varied = run.classes is None or any(
        data.weight is not None or data.base_margin is not None for data in run.data.values()
    )

    def inputs(party: Party) -> RoleInput:
        name = party.name
        # parties share this machine; only the active one reports phases, or the bar would show all of them
        threads, phase = shared if name in roles.owners else every, run.phase if name == roles.active else None
        return replace(
            run.inputs(party, threads, progress=run.progress, phase=phase), data=run.data.get(name),
            classes=run.classes if system.split == "rows" or name == roles.active else None,
            n_classes=len(run.classes or ()), varied=varied, eval_sets=run.evals_of(name), keeper=keepers.get(name),
            store=run.store, alone=False, absence=absences.get(name), part=run.earlier.get(name),
            directions=run.directions.get(name, {}),
        )  # fmt: skip

    programs_of: dict[str, Role] = {
        name: lambda party: play_role(system.train[roles.of[party.name]], inputs(party)) for name in roles.of
    }
    links = system.links(roles, run.options)
    return play(programs_of, links, job="fit", protocol=system.name, link=link)


def predict_in_threads(
    system: System,
    programs: Mapping[str, Program],
    parts: Mapping[str, Any],
    tables: Mapping[str, Table],
    settings: tuple[Any, Any],
    n_jobs: int | None = None,
    phase: Phase | None = None,
) -> dict[str, Any]:
    """Play programs of prediction with every owner of the model in a thread; return their results by party."""
    roles, threads = predicting_roles(active_of(parts), list(parts)), cores(n_jobs)
    terms = RunTerms(system, *settings, roles)

    def role(party: Party) -> Any:
        rows = LabelledRows(tables[party.name], np.zeros(0))
        inputs = replace(terms.inputs(party, threads, phase=phase), data=rows, part=parts[party.name], alone=False)
        return play_role(programs[roles.of[party.name]], inputs)

    programs_of: dict[str, Role] = dict.fromkeys(parts, role)
    links = system.links(roles, settings[0])
    return play(programs_of, links, job="predict", protocol=system.name).results


def predicting_roles(active: str, owners: list[str]) -> Roles:
    """Return who plays which role in a prediction by columns: helpers of the training take no part."""
    return Roles(active, {name: "active" if name == active else "passive" for name in owners}, owners)


def fewest_roles(system: System, options: SystemOptions) -> Roles:
    """Return the roles of as few owners as a system takes: party1, party2, and so on."""
    names = ["party1"]
    while True:
        names.append(f"party{len(names) + 1}")
        try:
            return roles_of(system, names, None, options)
        except ConfigError:  # too few
            if len(names) == _MOST_OWNERS:
                raise


def active_of(parts: Mapping[str, Any]) -> str:
    """Return the party that holds the trees, or the intercept."""
    return next(name for name, part in parts.items() if part.is_active)
