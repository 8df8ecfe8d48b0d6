"""All parties make one public seed; whoever cheats, an honest party ends the job and names it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from systems.vertical.playing import star_of
from treaty.errors import PeerProtocolError
from treaty.runs.threads import play
from treaty.systems.vertical import setup
from treaty.systems.vertical.setup import (
    SHARE_BYTES,
    SeedCommitment,
    SeedCommitments,
    SeedOffer,
    SeedShare,
    SeedShares,
    agree_on_seed,
    follow_seed,
)

KEPT = bytes(range(32))
BINDINGS = {"p1": b"binding of p1", "p2": b"binding of p2", "p3": b"binding of p3"}


class Client:
    """Stand in for a lattice client: note what it is told."""

    def __init__(self, kept=False):
        self.kept, self.settled = kept, None

    def offer(self, offsets):
        return (KEPT, {peer: BINDINGS[peer] for peer in offsets}) if self.kept else None

    def settle(self, seed, kept=None):
        self.settled = seed, kept


class Server:
    """Stand in for a lattice server: note what it is told."""

    def __init__(self, held=()):
        self.held, self.settled = held, None

    def holds(self, binding):
        return binding in self.held

    def settle(self, seed, kept=None):
        self.settled = seed, kept


def agree(parties, *, kept=False, held=(), cheat=None, cheating="", replace=None):
    """Let so many parties, p0 active, agree; `cheat` changes the messages of `cheating`, `replace` whole roles.

    Returns
    -------
    what each was told, the errors of those that raised, and the transcripts if none did
    """
    names = [f"p{k}" for k in range(parties)]
    ends = {"p0": Client(kept), **{name: Server(held) for name in names[1:]}}
    errors = {}

    def run(party):
        if party.name == cheating:
            send = party.send
            party.send = lambda to, message: send(to, cheat(to, message))
        try:
            if party.name == "p0":
                return agree_on_seed(party, ends["p0"], {name: np.zeros(1, np.int32) for name in names[1:]})
            return follow_seed(party, ends[party.name])
        except BaseException as error:
            errors[party.name] = error
            raise

    played = None
    try:
        played = play(
            dict.fromkeys(names, run) | (replace or {}), star_of(dict.fromkeys(names)),
            job="test", protocol="secureboost", timeout=10, record_content=True,
        )  # fmt: skip
    except PeerProtocolError:
        assert errors
    return {name: end.settled for name, end in ends.items()}, errors, played


@pytest.mark.parametrize("passive", [1, 2, 3])
def test_all_parties_make_the_same_seed_afresh_each_time(passive):
    seeds = set()
    for _ in range(3):
        settled, _, played = agree(passive + 1)
        assert played.results["p0"] is False
        (told,) = set(settled.values())
        assert told[1] is None
        assert len(told[0]) == 32
        seeds.add(told[0])
    assert len(seeds) == 3


def test_the_seed_depends_on_every_share_and_commitment():
    commitments, shares = [b"a", b"b", b"c"], [b"d", b"e", b"f"]
    seeds = {setup._seed(commitments, replaced(shares, place, b"x")) for place in range(4)}
    seeds |= {setup._seed(replaced(commitments, place, b"x"), shares) for place in range(3)}
    assert len(seeds) == 7


def test_no_share_is_told_before_all_have_committed():
    _, _, played = agree(4)
    entries = played.transcripts["p0"].entries
    steps = [(entry.direction, entry.step) for entry in entries]
    committed = max(k for k, step in enumerate(steps) if step == ("received", "SeedCommitment"))
    told = min(k for k, step in enumerate(steps) if step in {("received", "SeedShare"), ("sent", "SeedShares")})
    own = max(k for k, step in enumerate(steps) if step == ("sent", "SeedCommitments"))
    assert committed < min(k for k, step in enumerate(steps) if step == ("sent", "SeedCommitments"))
    assert own < told
    for entry in entries[: own + 1]:  # and nothing before has a share in it
        for share in next(e for e in entries if e.step == "SeedShares").message(SeedShares).shares:
            assert share not in bytes(entry.content)


def test_kept_hints_serve_where_all_still_hold_them():
    settled, _, played = agree(4, kept=True, held=BINDINGS.values())
    assert played.results["p0"] is True
    assert settled["p0"] == (KEPT, BINDINGS)
    assert {name: settled[name] for name in BINDINGS} == {name: (b"", BINDINGS[name]) for name in BINDINGS}
    assert not {"SeedShare", "SeedShares"} & {entry.step for entry in played.transcripts["p0"].entries}


def test_one_hint_that_is_not_held_any_more_makes_all_anew():
    settled, _, played = agree(4, kept=True, held=[BINDINGS["p1"], BINDINGS["p3"]])
    assert played.results["p0"] is False
    (told,) = set(settled.values())
    assert told[0] != KEPT
    assert told[1] is None


def test_nothing_is_held_that_was_not_offered():
    _, _, played = agree(2, held=[b""])  # an empty binding is none
    assert played.results["p0"] is False
    (answer,) = [e.message(SeedCommitment) for e in played.transcripts["p1"].entries if e.step == "SeedCommitment"]
    assert answer.holds is False


def replaced(values, place, value):
    return [value if k == place else old for k, old in enumerate(values)]


OTHER = bytes(SHARE_BYTES)


def commitment_to(share):
    return hashlib.sha256(b"treaty public seed commitment" + share).digest()


def altered(kind, change):
    """Change messages of one type that go to p1."""
    return lambda to, message: change(message) if to == "p1" and type(message) is kind else message


ACTIVE = {
    "own share changed": altered(SeedShares, lambda m: SeedShares(replaced(m.shares, 0, OTHER))),
    "this party's share changed": altered(SeedShares, lambda m: SeedShares(replaced(m.shares, 1, OTHER))),
    "another's share changed": altered(SeedShares, lambda m: SeedShares(replaced(m.shares, 2, OTHER))),
    "share too long": altered(SeedShares, lambda m: SeedShares(replaced(m.shares, 0, m.shares[0] + b"0"))),
    "share missing": altered(SeedShares, lambda m: SeedShares(m.shares[:-1])),
    "share too many": altered(SeedShares, lambda m: SeedShares([*m.shares, OTHER])),
    "shares in another order": altered(SeedShares, lambda m: SeedShares(m.shares[::-1])),
    "own commitment replaced": altered(
        SeedCommitments, lambda m: SeedCommitments(replaced(m.commitments, 0, commitment_to(OTHER)), m.kept)
    ),
    "another's commitment replaced": altered(
        SeedCommitments, lambda m: SeedCommitments(replaced(m.commitments, 2, commitment_to(OTHER)), m.kept)
    ),
    "this party's commitment replaced": altered(
        SeedCommitments, lambda m: SeedCommitments(replaced(m.commitments, 1, commitment_to(OTHER)), m.kept)
    ),
    "this party's commitment copied": altered(
        SeedCommitments, lambda m: SeedCommitments(replaced(m.commitments, 0, m.commitments[1]), m.kept)
    ),
    "this party's commitment and share copied": lambda to, m: (
        SeedCommitments(replaced(m.commitments, 0, m.commitments[1]), m.kept)
        if to == "p1" and type(m) is SeedCommitments
        else SeedShares(replaced(m.shares, 0, m.shares[1]))
        if to == "p1" and type(m) is SeedShares
        else m
    ),
    "commitment dropped": altered(SeedCommitments, lambda m: SeedCommitments(m.commitments[:-1], m.kept)),
    "this party's dropped": altered(SeedCommitments, lambda m: SeedCommitments(m.commitments[:1], m.kept)),
    "none": altered(SeedCommitments, lambda m: SeedCommitments([], False)),
    "kept when nothing was offered": altered(SeedCommitments, lambda m: SeedCommitments([], True)),
}


@pytest.mark.parametrize("cheat", ACTIVE)
def test_a_cheating_active_party_is_named_by_the_passive_party(cheat):
    settled, errors, _ = agree(3, cheat=ACTIVE[cheat], cheating="p0")
    assert isinstance(errors["p1"], PeerProtocolError)
    assert errors["p1"].peer == "p0"
    assert settled["p1"] is None


def test_kept_hints_that_are_not_held_are_refused():
    """The active party offers one of another table and takes no for yes."""
    cheat = altered(SeedCommitments, lambda m: SeedCommitments([], True))
    settled, errors, _ = agree(3, kept=True, held=[BINDINGS["p2"]], cheat=cheat, cheating="p0")
    assert "expected a hint that is kept here - at SeedCommitments from p0" in str(errors["p1"])
    assert settled["p1"] is None


def committing(commitment, share):
    """Commit to one thing and tell another."""

    def run(party):
        party.receive("p0", SeedOffer)
        party.send("p0", SeedCommitment(commitment, False))
        party.receive("p0", SeedCommitments)
        party.send("p0", SeedShare(share))
        party.receive("p0", SeedShares)

    return run


@pytest.mark.parametrize(
    ("commitment", "share"),
    [
        (commitment_to(OTHER), bytes([1]) * SHARE_BYTES),
        (bytes(32), OTHER),
        (b"", OTHER),
        (commitment_to(OTHER)[:-1], OTHER),
        (commitment_to(b""), b""),
        (commitment_to(OTHER[1:]), OTHER[1:]),
        (commitment_to(OTHER + b"0"), OTHER + b"0"),
    ],
    ids=["another share", "another commitment", "none", "cut", "no share", "too short", "too long"],
)
def test_a_cheating_passive_party_is_named_by_the_active_party(commitment, share):
    settled, errors, _ = agree(3, replace={"p2": committing(commitment, share)})
    assert isinstance(errors["p0"], PeerProtocolError)
    assert errors["p0"].peer == "p2"
    assert settled == dict.fromkeys(settled)
    _, errors, _ = agree(3, replace={"p2": committing(commitment_to(OTHER), OTHER)})  # and an honest one is not
    assert not errors
