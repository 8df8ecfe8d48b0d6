"""What parties exchange in several messages: terms that all have to agree on, values of many rows, a seed of all."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError, LocalProtocolError, PeerProtocolError
from treaty.messaging.messages import Array, M, Message, clean, leaks, row_pieces, view
from treaty.messaging.party import Party

Plain = str | int | float | bool | None
Term = Plain | list[Plain | list[Plain]] | dict[str, Plain]
"""A public parameter's value."""

SEED_BYTES = 32
OF_ONE_JOB = "give all parties the same job file"
OF_ONE_MODEL = "give all parties their parts of one training, and files of the same rows"


@leaks("the options of the job, except the sampling seed; both ends must agree", "control")
class Terms(Message):
    """One party's public parameters."""

    values: dict[str, Term]


@leaks("the first option in which two parties differ, if there is one", "control")
class Verdict(Message):
    """The first difference between terms that a party found, empty for none."""

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

    Every party of the job calls it at the same place. Values are equal if type and value are (1 is not 1.0, and not
    True). `peers` are those to compare with (default: all), `timeout` is in seconds, for each.

    ConfigError for the first difference in alphabetical order, with both values, both parties and the `remedy`; this
    party has then left the job in good order, so `run_role` sends no abort. PeerError if a peer is lost, silent,
    malformed or has stopped, LocalProtocolError for a term of another type than `Term`.
    """
    try:
        own = msgspec.convert(dict(terms), dict[str, Term])
    except msgspec.ValidationError as error:
        raise LocalProtocolError(f"{error} of the terms") from error
    peers = party.peers if peers is None else peers
    # all send before any receives, so that no two parties wait for each other
    for peer in peers:
        party.send(peer, Terms(own))
    found = [
        _difference(party.name, own, peer, party.receive(peer, Terms, timeout=timeout).values, remedy) for peer in peers
    ]
    own_verdict = next(filter(None, found), "")
    # in a star two passive parties do not talk to each other: by verdicts they learn of a difference between them
    for peer in peers:
        party.send(peer, Verdict(own_verdict))
    reports = [clean(party.receive(peer, Verdict, timeout=timeout).difference, 500) for peer in peers]
    if any([own_verdict, *reports]):
        # the others know already, and must not take the error for a crash
        party.close()
        raise ConfigError(own_verdict or next(filter(None, reports)))


def differences(name: str, own: Mapping[str, str], peer: str, theirs: Mapping[str, str]) -> list[str]:
    """Describe differences between the terms that two parties both sent on connecting, alike at both parties."""
    (first, a), (second, b) = sorted([(name, own), (peer, theirs)])
    return [
        f"{clean(term, 60)} = {clean(a[term], 150)} at {first}, {clean(b[term], 150)} at {second}"
        for term in own
        if term in theirs and own[term] != theirs[term]
    ]


def _difference(name: str, own: Mapping[str, Term], peer: str, theirs: Mapping[str, Term], remedy: str) -> str:
    """Describe the first difference, alike at both parties; empty for none."""
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


def send_rows(party: Party, peer: str, n_rows: int, bits: int, message: Callable[[slice], Message]) -> None:
    """Send a peer what ``message(rows)`` makes of each of `row_pieces`."""
    for rows in row_pieces(n_rows, bits):
        party.send(peer, message(rows))


def take_rows(
    party: Party, peer: str, n_rows: int, bits: int, kind: type[M], first: M | None = None
) -> Iterator[tuple[slice, M]]:
    """Receive what `send_rows` sends; yield the rows and the message of each piece. `first` was received before."""
    for rows in row_pieces(n_rows, bits):
        yield rows, party.receive(peer, kind) if first is None or rows.start else first


def take_columns(
    party: Party, peer: str, n_rows: int, bits: int, first: M, columns: Callable[[M], Array], count: int, what: str
) -> NDArray[np.uint8]:
    """Return `count` columns of packed bits, uint8 (count, bytes), of which a peer's message `first` has some rows.

    The rest is received in `row_pieces` of `bits` each.
    """
    parts = [
        view(columns(message), np.uint8, (count, -(-(of.stop - of.start) // 8)), peer=peer, what=what)
        for of, message in take_rows(party, peer, n_rows, bits, type(first), first)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


@leaks("a commitment", "nothing")
class JointSeedCommitment(Message):
    """Commitment to a share of a joint seed."""

    commitment: bytes


@leaks("a random number", "nothing")
class JointSeedShare(Message):
    """The share committed to, a random number."""

    share: bytes


def exchange(party: Party, others: Sequence[str], own: M) -> dict[str, M]:
    """Send the same message to some parties and receive theirs; return all by name, the own one first."""
    for peer in others:
        party.send(peer, own)
    return {party.name: own, **{peer: party.receive(peer, type(own)) for peer in others}}


def joint_seed(party: Party, others: Sequence[str], purpose: str) -> bytes:
    """Make a seed with others: all commit before any reveals its share, so that it is uniform if one is honest."""
    share = secrets.token_bytes(SEED_BYTES)
    committed = exchange(party, others, JointSeedCommitment(_commit(purpose, party.name, share)))
    shares = exchange(party, others, JointSeedShare(share))
    for peer in others:
        theirs = shares[peer].share
        if len(theirs) != SEED_BYTES or _commit(purpose, peer, theirs) != committed[peer].commitment:
            raise PeerProtocolError(peer, "expected the share that was committed to", at="JointSeedShare")
    whole = b"".join(shares[name].share for name in sorted(shares))
    return hashlib.sha256(b"treaty joint seed" + purpose.encode() + whole).digest()


def _commit(purpose: str, name: str, share: bytes) -> bytes:
    return hashlib.sha256(repr(("treaty joint seed commitment", purpose, name, share)).encode()).digest()
