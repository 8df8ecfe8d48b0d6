"""What each message tells whom, as data: one line for each class of message on each way between two roles.

Every system has its lines in its `system.py`, or in a `leakage.py` beside it, and its record (`System.told`) puts them
together with those that it shares. Sentences for people, by party, are in each system's `disclosures`; these lines say
where what they tell comes from. A test plays small jobs and fails where a message goes a way that no line tells of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message
from treaty.messaging.party import Terms, Verdict

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
    """Options under which a message is sent.

    Attributes
    ----------
    words : str
        The options, as users give them.
    holds : callable
        ``holds(options, common) -> bool``: whether these options are such.
    """

    words: str
    holds: Callable[[Any, Any], bool]

    def __and__(self, other: When | None) -> When:
        """Return when both hold."""
        if other is None:
            return self
        first, second = self.holds, other.holds
        return When(
            f"{self.words}; {other.words}", lambda options, common: first(options, common) and second(options, common)
        )


@dataclass(frozen=True, slots=True)
class Route:
    """That one class of message goes from one role to another.

    Attributes
    ----------
    message : type of Message
    sender, receiver : tuple of str
        Roles by name, any of which may be at this end; `ANY`: all.
    variant : str
        Which of the message's statements holds on this route; empty where it has one.
    reference : str
        A section of a paper, or "docs/PAGE.md, HEADING".
    when : When or None
        Under which options it is sent; None: under all, or where data ask for it.
    guard : str
        The option that lessens what is told here, where it is not the statement's own.
    """

    message: type[Message]
    sender: tuple[str, ...]
    receiver: tuple[str, ...]
    variant: str = ""
    reference: str = ""
    when: When | None = None
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


def sent(table: Iterable[Route], options: Any, common: Any) -> Routes:
    """Return the lines of a table that hold under these options."""
    return tuple(one for one in table if one.when is None or one.when.holds(options, common))


AGREEMENT = routes(
    Route(Terms, ANY, ANY),
    Route(Verdict, ANY, ANY),
    reference="docs/jobs.md, Connections and exit codes",
)
"""What every training and every prediction begins with."""
