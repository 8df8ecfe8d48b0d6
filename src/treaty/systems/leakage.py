"""What each party of a job learns, as data: which class of message goes from which role to which, and what follows.

What one message tells is stated at its class (`leaks`). A system lists its routes (`System.routes`), and what
a role can work out from messages taken together (`System.conclusions`). Tables, sentences by party and the expectations
of audits are made from these. A test plays small jobs and fails where a message goes a way that no route states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from treaty.messaging.exchanges import Terms, Verdict
from treaty.messaging.messages import Form, Message, MessageLeakage

if TYPE_CHECKING:
    from treaty.systems.system import Roles

Stage = Literal["train", "predict", "explain", "online"]
STAGES: dict[Stage, str] = {
    "train": "training",
    "predict": "prediction",
    "explain": "contributions of columns",
    "online": "prediction row by row",
}
"""What is played, by the field of `System` that has its programs; in words."""

ACTIVE, PASSIVE = ("active",), ("passive",)
ANY: tuple[str, ...] = ()
"""Sender or receiver of any role."""


@dataclass(frozen=True, slots=True)
class When:
    """Options under which a message is sent."""

    # the options, as users give them
    words: str
    # ``holds(options, common) -> bool``: whether these options are such
    holds: Callable[[Any, Any], bool]

    def __and__(self, other: When | None) -> When:
        """Return when both hold."""
        if other is None:
            return self
        first, second = self.holds, other.holds
        return When(
            f"{self.words}; {other.words}", lambda options, common: first(options, common) and second(options, common)
        )


SAFE = When('mode="safe"', lambda options, common: options.mode != "paper")
PAPER = When('mode="paper"', lambda options, common: options.mode == "paper")


@dataclass(frozen=True, slots=True)
class Route:
    """That one class of message goes from one role to another."""

    message: type[Message]
    # roles by name, any of which may be at this end; `ANY`: all
    sender: tuple[str, ...]
    receiver: tuple[str, ...]
    # which of the message's statements holds on this route; empty where it has one
    variant: str = ""
    # a section of a paper, or "docs/PAGE.md, HEADING"
    reference: str = ""
    # under which options it is sent; None: under all, or where data ask for it
    when: When | None = None
    # the option that lessens what is told here, where it is not the statement's own
    guard: str = ""

    @property
    def leakage(self) -> MessageLeakage:
        """What the receiver learns on this route."""
        stated = self.message.leakage
        found = stated if isinstance(stated, MessageLeakage) else stated[self.variant]
        return replace(found, guard=self.guard or found.guard)

    def goes(self, step: str, sender: str, receiver: str) -> bool:
        """Tell whether this is the line of a message: its class by name, and the roles of both ends."""
        return (
            step == self.message.__name__
            and (not self.sender or sender in self.sender)
            and (not self.receiver or receiver in self.receiver)
        )

    @property
    def way(self) -> str:
        """The roles at both ends, in words."""
        return f"{' or '.join(self.sender) or 'any'} → {' or '.join(self.receiver) or 'any'}"


Routes = tuple[Route, ...]


def routes(*parts: Route | Iterable[Route], reference: str = "", when: When | None = None, guard: str = "") -> Routes:
    """Put lines and tables of lines together; what they have in common is said once.

    `reference` and `guard` are for lines without their own, `when` is added to each one's own.
    """
    found = [one for part in parts for one in ([part] if isinstance(part, Route) else part)]
    return tuple(
        replace(
            one,
            reference=one.reference or reference,
            guard=one.leakage.guard or guard,
            when=one.when if when is None else when & one.when,
        )
        for one in found
    )


def between(sender: tuple[str, ...], receiver: tuple[str, ...], *messages: type[Message]) -> Routes:
    """Return the lines of messages that go from the same roles to the same roles."""
    return tuple(Route(message, sender, receiver) for message in messages)


def sent(table: Iterable[Route], options: Any, common: Any) -> Routes:
    """Return the lines of a table that hold under these options."""
    return tuple(one for one in table if one.when is None or one.when.holds(options, common))


_TELLING: tuple[Form, ...] = ("exact", "aggregated", "noisy")  # the most telling first


def learned(
    by_stage: Mapping[Stage, Routes],
    roles: Roles,
    options: Any,
    common: Any,
    conclusions: Mapping[str, Sequence[str]],
    *,
    by_role: bool = False,
) -> dict[str, list[str]]:
    """Return in sentences what each party learns beyond its own data.

    A party's `conclusions` come first, what follows from messages taken together; then what single messages tell, the
    most telling form first, with names and senders of the messages; what it cannot read and what is settled about the
    job are one sentence each. With `by_role`, conclusions and result are by role: for systems with many parties of the
    same role.
    """
    found = {}
    for name, role in roles.of.items():
        who = role if by_role else name
        if who in found:
            continue
        told: dict[tuple[Form, str], tuple[dict[str, None], dict[str, None]]] = {}
        for stage, table in by_stage.items():
            for route in sent(table, options, common):
                senders = [other for other in roles.having(*route.sender) if other != name]
                if senders and (role in route.receiver or not route.receiver):
                    leakage = route.leakage
                    when = "" if stage == "train" else f"in {STAGES[stage]}, "
                    if when and (leakage.form, leakage.tells) in told:  # as in training
                        continue
                    messages, given_by = told.setdefault((leakage.form, when + leakage.tells), ({}, {}))
                    messages[route.message.__name__] = None
                    given_by.update(dict.fromkeys(roles.of[other] if by_role else other for other in senders))
        statements = [
            f"{'under noise, ' if form == 'noisy' else ''}{tells} ({', '.join(messages)} from {' and '.join(given_by)})"
            for form in _TELLING
            for (of, tells), (messages, given_by) in told.items()
            if of == form
        ]
        hidden = [tells for form, tells in told if form in ("masked", "encrypted")]
        settled = [tells for form, tells in told if form == "control"]
        found[who] = [
            *conclusions.get(who, ()),
            *statements,
            *(["received encrypted or masked: " + "; ".join(hidden)] if hidden else []),
            *(["about the job: " + "; ".join(settled)] if settled else []),
        ]
    # roles stand in the order in which the system's conclusions name them, parties in the job's
    in_order = [*conclusions, *found] if by_role else [*found, *conclusions]
    return {who: found[who] if who in found else list(conclusions[who]) for who in in_order}


AGREEMENT = routes(between(ANY, ANY, Terms, Verdict), reference="docs/jobs.md, Connections and exit codes")
"""What every training and every prediction begins with."""
