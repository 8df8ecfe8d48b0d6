"""Who is who in a crowd: what the authority certifies, and what everybody refuses."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from treaty.errors import PeerLost, PeerProtocolError
from treaty.messaging.party import Party
from treaty.runs.threads import play
from treaty.systems.fedxgb.domain import Credentials, certify
from treaty.systems.fedxgb.messages import Call, Cohort, Domain, KeyCertificate, KeyRequest
from treaty.systems.fedxgb.secfind import UserSums

ROLES = {"a": "user", "b": "user", "e": "edge", "s": "server"}


def certified(job: str = "job", **programs):
    """Return what each party ends with: its credentials, unless another program is named."""
    links = {"authority": list(ROLES), **{name: ["authority"] for name in ROLES}}
    roles = {name: lambda party, role=role: Credentials(party, "authority", role) for name, role in ROLES.items()}
    roles = {"authority": lambda party: certify(party, ROLES, 60.0), **roles, **programs}
    return play(roles, links, job=job, protocol="p", timeout=10).results


@pytest.fixture(scope="module")
def known():
    return certified()


def test_everybodys_keys_are_accepted_by_everybody(known):
    for one in ROLES:
        for name, role in ROLES.items():
            known[one].check(name, role, known[name].certified, "e")


def test_two_share_a_secret_and_no_two_the_same(known):
    seeds = {(u, v): known[u].seed_with(v, known[v].certified) for u in ROLES for v in ROLES if u != v}
    assert all(seeds[u, v] == seeds[v, u] for u, v in seeds)
    assert len(set(seeds.values())) == 6


CHANGES = {
    "of another": lambda known: known["b"].certified,
    "key of another": lambda known: msgspec.structs.replace(known["a"].certified, key=known["b"].certified.key),
    "certificate of another": lambda known: msgspec.structs.replace(
        known["a"].certified, certificate=known["b"].certified.certificate
    ),
    "channel of another": lambda known: msgspec.structs.replace(
        known["a"].certified, channel=known["b"].certified.channel
    ),
    "channel of another with its signature": lambda known: msgspec.structs.replace(
        known["a"].certified, channel=known["b"].certified.channel, signature=known["b"].certified.signature
    ),
    "certified by itself": lambda known: msgspec.structs.replace(
        known["a"].certified, certificate=known["a"].signing_key.sign(b"a")
    ),
    "malformed": lambda known: msgspec.structs.replace(known["a"].certified, key=b"", certificate=b"x"),
    "of another authority": lambda known: certified()["a"].certified,
    "of another job": lambda known: certified("another")["a"].certified,
}


@pytest.mark.parametrize("change", CHANGES)
def test_keys_that_the_authority_has_not_certified_are_refused(known, change):
    keys = CHANGES[change](known)
    with pytest.raises(
        PeerProtocolError, match="expected keys of a as user that the authority certified, got others - from e"
    ) as caught:
        known["s"].check("a", "user", keys, "e")
    assert caught.value.peer == "e"


@pytest.mark.parametrize("role", ["edge", "server"])
def test_keys_certified_for_another_role_are_refused(known, role):
    with pytest.raises(PeerProtocolError, match=f"keys of a as {role}"):
        known["s"].check("a", role, known["a"].certified, "e")


def test_who_asks_for_another_role_or_not_at_all_is_not_certified(caplog):
    def ambitious(party: Party) -> str:
        party.send("authority", KeyRequest("edge", bytes(32)))
        with pytest.raises(PeerLost):
            party.receive("authority", KeyCertificate)
        return "refused"

    results = certified(a=ambitious, b=lambda party: party.channel.close())
    assert results["a"] == "refused"
    results["s"].check("e", "edge", results["e"].certified, "e")
    for name in "ab":
        assert f"authority does not certify {name}, which did not ask as user" in caplog.text


def test_authority_that_signs_another_key_is_noticed():
    key = Ed25519PrivateKey.generate()

    def wrong(party: Party) -> None:
        for name in ROLES:
            party.receive(name, KeyRequest)
        for name in ROLES:
            party.send(name, KeyCertificate(key.public_key().public_bytes_raw(), key.sign(b"another key")))

    with pytest.raises(PeerProtocolError, match="that the authority certified, got others - from authority"):
        certified(authority=wrong)


# ---------------------------------------------------------------- a domain as its users are told it


class Silent:
    """A party that says nothing."""

    name, job, protocol, round = "a", "job", "p", 0

    def send(self, to, message):
        raise AssertionError("nothing may be sent")


def sums_of(known):
    return UserSums(Silent(), "e", known["a"], bytes(32))


def test_domain_without_the_own_keys_or_with_uncertified_ones_is_refused(known):
    own, other = known["a"].certified, known["b"].certified
    sums_of(known).meet(Domain({"a": own, "b": other}, 3))
    for users in ({"b": other}, {"a": other, "b": other}):
        with pytest.raises(PeerProtocolError, match="the domain's users lack a"):
            sums_of(known).meet(Domain(users, 3))
    with pytest.raises(PeerProtocolError, match="expected keys of c as user"):
        sums_of(known).meet(Domain({"a": own, "c": other}, 3))
    with pytest.raises(PeerProtocolError, match="expected keys of e as user"):
        sums_of(known).meet(Domain({"a": own, "e": known["e"].certified}, 3))


def test_cohort_of_strangers_or_without_the_user_is_refused(known):
    sums = sums_of(known)
    sums.meet(Domain({"a": known["a"].certified, "b": known["b"].certified}, 3))
    sums.join(Cohort(["b", "a"]))
    for users in (["b"], ["a", "b", "c"]):
        with pytest.raises(PeerProtocolError, match="expected users of the domain, a among them"):
            sums.join(Cohort(users))


def test_least_change_below_three_is_no_message():
    with pytest.raises(msgspec.ValidationError, match=">= 3"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"users": {}, "least_change": 2}), type=Domain)
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"number": -1, "attempt": 0}), type=Call)
