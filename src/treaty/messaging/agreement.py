"""Comparing terms: the public parameters that every protocol starts with, and what parties exchange on connecting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from treaty.errors import ConfigError, LocalProtocolError
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message, clean
from treaty.messaging.party import Party

Plain = str | int | float | bool | None
Term = Plain | list[Plain]
"""A public parameter's value."""

OF_ONE_JOB = "give all parties the same job file"
OF_ONE_MODEL = "give all parties their parts of one training, and files of the same rows"


class Terms(Message):
    """One party's public parameters; they hold nothing that another party must not know."""

    leakage: ClassVar = MessageLeakage(
        "the options of the job, but not the sampling seed; both ends must have the same", "control"
    )

    values: dict[str, Term]


class Verdict(Message):
    """One party's finding: the first difference between terms, empty for none."""

    leakage: ClassVar = MessageLeakage("the first option in which two parties differ, if any does", "control")

    difference: str


def agree(
    party: Party,
    terms: Mapping[str, Term],
    timeout: float | None = None,
    *,
    peers: Sequence[str] | None = None,
    remedy: str = OF_ONE_JOB,
) -> None:
    """Compare public parameters with every peer; raise the same error everywhere when they differ.

    Every party of the job calls it at the same place. All send, then all receive; then all exchange what they found,
    so that in a star a passive party learns of a difference between two others. Values are equal when type and value
    are (1 is not 1.0, and not True). `peers` are those to compare with (default: all), `timeout` the seconds to wait
    for each.

    Raises ConfigError for the first difference in alphabetical order, with both values, both parties and the `remedy`;
    this party has then left the job in good order, so `run_role` sends no abort after it. Raises PeerError when a peer
    is lost, silent, malformed or has stopped, and LocalProtocolError for a term of another type than `Term`.
    """
    try:
        own = msgspec.convert(dict(terms), dict[str, Term])
    except msgspec.ValidationError as error:
        raise LocalProtocolError(f"{error} of the terms") from error
    peers = party.peers if peers is None else peers
    # all send before any receives: no order of parties can make two wait for each other
    for peer in peers:
        party.send(peer, Terms(own))
    differences = [
        _difference(party.name, own, peer, party.receive(peer, Terms, timeout=timeout).values, remedy) for peer in peers
    ]
    found = next(filter(None, differences), "")
    # in a star two passive parties do not talk to each other: the verdict tells them of a difference between them
    for peer in peers:
        party.send(peer, Verdict(found))
    reports = [clean(party.receive(peer, Verdict, timeout=timeout).difference, 500) for peer in peers]
    # leave in good order first: the others know already, and must not take the error for a crash
    if any([found, *reports]):
        party.close()
        raise ConfigError(found or next(filter(None, reports)))


def differences(name: str, own: Mapping[str, str], peer: str, theirs: Mapping[str, str]) -> list[str]:
    """Describe each difference between terms that two parties sent each other on connecting, of those that both have.

    Texts are cut where they are long, and are the same at both parties.
    """
    (first, a), (second, b) = sorted([(name, own), (peer, theirs)])
    return [
        f"{clean(term, 60)} = {clean(a[term], 150)} at {first}, {clean(b[term], 150)} at {second}"
        for term in own
        if term in theirs and own[term] != theirs[term]
    ]


def _difference(name: str, own: Mapping[str, Term], peer: str, theirs: Mapping[str, Term], remedy: str) -> str:
    """Describe the first difference in words that are the same at both parties; empty when there is none."""
    sides = sorted([(name, own), (peer, theirs)])
    for key in sorted(own.keys() | theirs.keys()):
        # equal texts mean equal types and values
        (first, a), (second, b) = [
            (party, repr(values[key]) if key in values else "nothing") for party, values in sides
        ]
        if a != b:
            return (
                f"expected the same {clean(key, 60)} everywhere, got {clean(a, 150)} at {first} and "
                f"{clean(b, 150)} at {second}; {remedy}"
            )
    return ""
