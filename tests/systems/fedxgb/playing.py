"""Crowds for tests: small FedXGB trainings with every role in a thread, and notes of what was summed."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from systems.federboost_horizontal.playing import dealt
from treaty.errors import TreatyError
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.messaging.transcript import Transcript
from treaty.models.trees import ModelPart
from treaty.runs.threads import play
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.roles import Leaves
from treaty.systems.fedxgb.secboost import user
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, UserSums
from treaty.systems.fedxgb.system import SYSTEM
from treaty.systems.options import names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import LabelledRows, RoleInput, Roles

STAGES = ("call", "setup", "shared", "masked", "prediction")
PATIENCE = 20.0  # seconds: what must not be waited for in full
Heard = TypeVar("Heard", bound=Message)


class Options(NamedTuple):
    """The system's own options, and common ones."""

    own: FedXGB
    common: BoostingOptions


def options_of(**chosen: Any) -> Options:
    own = FedXGB(**{name: chosen.pop(name) for name in names_of(FedXGB) if name in chosen})
    common = BoostingOptions(**{"n_estimators": 2, "max_depth": 2, "min_child_samples": 3, "max_bin": 6} | chosen)
    own.check(common)
    return Options(own, common.checked(own))


def crowd_rows(
    task: str = "binary", users: int = 8, rows: int = 120
) -> tuple[dict[str, LabelledRows], LabelledRows, Any]:
    return dealt(task, users, rows)


def roles_with(domains: Mapping[str, Sequence[str]]) -> Roles:
    """Return who is who, given every edge server's users; they may be too few."""
    edge_of = {user: edge for edge, users in domains.items() for user in users}
    roles = {"server": "server", **dict.fromkeys(domains, "edge"), **dict.fromkeys(edge_of, "user")}
    return Roles("server", {**roles, "authority": "authority"}, list(edge_of), edge_of)


def laid_out(users: Sequence[str], edges: int = 2) -> Roles:
    return roles_with({f"edge{k}": list(users[k::edges]) for k in range(edges)})


def one_large(users: Sequence[str], edges: int = 2) -> Roles:
    """Nine users in one domain, of which one may be lost and two left out with it; three in each other."""
    return roles_with({f"edge{k}": users[slice(9) if k == 0 else slice(6 + 3 * k, 9 + 3 * k)] for k in range(edges)})


def role_input(party: Party, options: Options, roles: Roles, **fields: Any) -> RoleInput:
    given: dict[str, Any] = {"patience": PATIENCE, "alone": False, **fields}
    return RoleInput(party=party, options=options.own, common=options.common, roles=roles, **given)


@dataclass
class Sums:
    """One sum that the server opened."""

    round: int
    number: int
    total: NDArray[np.int64]
    cohort: list[str]


@dataclass
class Crowded:
    """A crowd's training: results, what was recorded, who failed, what users gave and the server opened."""

    results: dict[str, Any] = field(default_factory=dict)
    transcripts: dict[str, Transcript] = field(default_factory=dict)
    failures: dict[str, TreatyError] = field(default_factory=dict)
    given: dict[int, dict[str, NDArray[np.int64]]] = field(default_factory=lambda: defaultdict(dict))
    opened: list[Sums] = field(default_factory=list)
    of_domains: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def model(self) -> ModelPart:
        return self.results["server"]

    def expected(self, sums: Sums) -> NDArray[np.int64]:
        """Return the plain sum of what the cohort's users gave."""
        return np.sum([self.given[sums.number][name] for name in sums.cohort], axis=0)

    def of_tree(self, tree: int) -> list[Sums]:
        """Return the sums of a tree, from 1, or of the search for bins, 0."""
        return [sums for sums in self.opened if sums.round == round_of(tree)]

    def received(self, name: str, kind: type[Heard]) -> list[Heard]:
        """Return messages of one class that reached somebody; needs recorded contents."""
        entries = self.transcripts[name].entries
        return [e.message(kind) for e in entries if e.direction == "received" and e.step == kind.__name__]  # type: ignore[misc]

    def steps(self, name: str) -> set[str]:
        return {e.step for e in self.transcripts[name].entries if e.direction == "received"}


def play_crowd(
    parts: Mapping[str, LabelledRows],
    options: Options,
    classes: list | None,
    *,
    edges: int = 2,
    layout: Roles | None = None,
    leaves: Mapping[str, Leaves] | None = None,
    roles: Mapping[str, Callable[[Party], object]] | None = None,
    patience: float = PATIENCE,
    timeout: float = PATIENCE,
    record_content: bool = False,
    tolerate: Sequence[str] = (),
) -> Crowded:
    """Train in threads; `roles` replaces some programs. Failures of users and of `tolerate` are noted, not raised."""
    assigned = layout or laid_out(list(parts), edges)
    crowded = Crowded()
    data = {"server": next(iter(parts.values())), **parts}  # the server's says which columns there are

    def program(name: str, role: str) -> Callable[[Party], object]:
        return lambda party: SYSTEM.train[role](
            role_input(
                party, options, assigned, data=data.get(name), classes=classes, patience=patience,
                absence=(leaves or {}).get(name),
            )
        )  # fmt: skip

    programs = {name: program(name, role) for name, role in assigned.of.items()} | dict(roles or {})

    def tolerated(name: str, program: Callable[[Party], object]) -> Callable[[Party], object]:
        def run(party: Party) -> object:
            try:
                return program(party)
            except TreatyError as error:
                crowded.failures[name] = error
                party.abort("failed")
                party.channel.close()
                return None

        return run

    with ExitStack() as patched:
        _note(crowded, patched)
        programs |= {name: tolerated(name, programs[name]) for name in (*assigned.owners, *tolerate)}
        played = play(
            programs, SYSTEM.links(assigned, options.own), job="job", protocol="fedxgb", record_content=record_content,
            timeout=timeout,
        )  # fmt: skip
    crowded.results, crowded.transcripts = played.results, played.transcripts
    return crowded


def _note(crowded: Crowded, patched: ExitStack) -> None:
    total, give, of_domain = Crowd.total, UserSums.give, DomainSums.total

    def note_total(self: Crowd, length: int, own: None = None) -> NDArray[np.int64]:
        opened = total(self, length, own)
        crowded.opened.append(Sums(self._party.round, self._number, opened, list(self.cohort)))
        return opened

    def note_given(self: UserSums, call: Any, values: NDArray[np.int64], *others: Any) -> Any:
        crowded.given[call.number][self._party.name] = values
        return give(self, call, values, *others)

    def note_domain(self: DomainSums, number: int, length: int) -> Any:
        found = of_domain(self, number, length)
        crowded.of_domains.append(found[0])
        return found

    patched.enter_context(patch.object(Crowd, "total", note_total))
    patched.enter_context(patch.object(UserSums, "give", note_given))
    patched.enter_context(patch.object(DomainSums, "total", note_domain))


def user_program(
    parts: Mapping[str, LabelledRows],
    options: Options,
    classes: list | None,
    layout: Roles,
    name: str,
    leaves: Leaves | None = None,
) -> Callable[[Party], object]:
    """Return the program of a user."""
    return lambda party: user(role_input(party, options, layout, data=parts[name], classes=classes, absence=leaves))


class Died(Exception):
    """A user's program dies."""


def dying(program: Callable[[Leaves], Callable[[Party], object]], when: Leaves) -> Callable[[Party], object]:
    """Return a program whose party's channel closes at ``when(tree, stage)``; `program` makes it, with its leaves."""

    def leaves(tree: int, stage: Any) -> bool:
        if when(tree, stage):
            raise Died
        return False

    def run(party: Party) -> None:
        try:
            program(leaves)(party)
        except Died:
            party.channel.close()

    return run


def round_of(tree: int) -> int:
    """Return the party's round of a tree, from 1, or of the search for bins, 0: there is one more between them."""
    return tree + (tree > 0)


def once(tree: int, stage: str, time: int = 1) -> Leaves:
    """Return leaves that say yes at the given time that they are asked for a stage of a tree."""
    asked = itertools.count(1)
    return lambda n, s: (n, s) == (tree, stage) and next(asked) == time


def spoiling(
    program: Callable[[Party], object],
    kind: type[Message],
    change: Callable[[Party, Any], Message | None],
    tree: int | None = 1,
) -> Callable[[Party], object]:
    """Return a program that sends something else in place of one class of message, in one tree or always (None)."""

    def run(party: Party) -> object:
        send = party.send

        def spoiled(to: str, message: Message) -> None:
            now = tree is None or party.round == round_of(tree)
            other = change(party, message) if isinstance(message, kind) and now else message
            if other is not None:
                send(to, other)

        party.send = spoiled  # type: ignore[method-assign]
        return program(party)

    return run


def uniform(*vectors: NDArray[np.uint64]) -> bool:
    """Chi-squared on the lowest 6 bytes of all numbers, false alarms once in a million."""
    bytes_of = np.concatenate([np.ascontiguousarray(v).ravel() for v in vectors]).view(np.uint8).reshape(-1, 8)[:, :6]
    counts = np.bincount(bytes_of.ravel(), minlength=256)
    expected = counts.sum() / 256
    return bool(abs(((counts - expected) ** 2 / expected).sum() - 255) < 4.9 * np.sqrt(2 * 255))
