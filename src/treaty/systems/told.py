"""What each message tells whom, as data: one line for each class of message on each way between two roles.

Every system has its lines in its `system.py`, or in a `told.py` beside it, and its record (`System.told`) puts them
together with those that it shares. Sentences for people, by party, are in each system's `disclosures`; these lines say
where what they tell comes from. A test plays small jobs and fails where a message goes a way that no line tells of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from treaty.messaging.agreement import Terms, Verdict
from treaty.messaging.messages import Message

Form = Literal["nothing", "encrypted", "masked", "noisy", "aggregated", "exact", "control"]
"""In which form what is told arrives at the receiver.

========== =============================================================================================
nothing    random numbers, commitments, receipts: nothing that it did not know
encrypted  ciphertexts whose key it does not have
masked     numbers under masks or in shares that it cannot remove alone
noisy      under the noise of a differentially private mechanism
aggregated sums, counts, quantiles or a model: over many rows, or over several parties
exact      as it is, about single rows or single splits
control    what is settled about the job: sizes, keys, options, who takes part, progress; nothing of single rows
========== =============================================================================================
"""

Played = Literal["train", "predict", "explain", "online"]
PLAYED: dict[Played, str] = {
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
class Told:
    """What one class of message tells on its way from one role to another.

    Attributes
    ----------
    message : type of Message
    sender, receiver : tuple of str
        Roles, as casts name them, any of which may be at this end; `ANY`: all.
    tells : str
        What the receiver learns from it, in a few words. What parties that collude learn is in the sentences.
    form : str
        See `Form`.
    guard : str
        The option that lessens it; empty where there is none.
    reference : str
        A section of a paper, or "docs/PAGE.md, HEADING".
    when : When or None
        Under which options it is sent; None: under all, or where data ask for it.
    """

    message: type[Message]
    sender: tuple[str, ...]
    receiver: tuple[str, ...]
    tells: str
    form: Form
    guard: str = ""
    reference: str = ""
    when: When | None = None

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


Lines = tuple[Told, ...]


def lines(*parts: Told | Iterable[Told], reference: str = "", when: When | None = None, guard: str = "") -> Lines:
    """Put lines and tables of lines together; what they have in common is said once.

    `reference` and `guard` are for lines without their own, `when` is added to each one's own.
    """
    found = [one for part in parts for one in ([part] if isinstance(part, Told) else part)]
    return tuple(
        replace(
            one,
            reference=one.reference or reference,
            guard=one.guard or guard,
            when=one.when if when is None else when & one.when,
        )
        for one in found
    )


def sent(table: Iterable[Told], options: Any, common: Any) -> Lines:
    """Return the lines of a table that hold under these options."""
    return tuple(one for one in table if one.when is None or one.when.holds(options, common))


AGREEMENT = lines(
    Told(Terms, ANY, ANY, "the options of the job, but not the sampling seed; both ends must have the same", "control"),
    Told(Verdict, ANY, ANY, "the first option in which two parties differ, if any does", "control"),
    reference="docs/jobs.md, Connections and exit codes",
)
"""What every training and every prediction begins with."""
