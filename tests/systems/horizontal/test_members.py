"""Members of masked sums: whose masks cancel, who may come back, and whose keys they take."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from systems.horizontal.uniform import looks_uniform
from treaty.errors import PeerProtocolError
from treaty.messaging.certificates import make_identity
from treaty.systems.horizontal.members import MaskKeyPairs, Member, Roster, SumRules, ToldDigest
from treaty.systems.pooled.rounds import CheckpointRequest
from treaty.systems.system import Vouching


def members_told(told):
    """Members of a cohort of three of whom each was told what `told` says, ready to mask."""
    made = {name: member_of(name, b"begun") for name in told}
    roster = Roster({n: m.key.key for n, m in made.items()}, dict.fromkeys(made, b""))
    pairs = MaskKeyPairs({n: m.advertise(roster, "p0") for n, m in made.items()})
    for name, one in made.items():
        one.agree(pairs)
        for message in told[name]:
            one.told.hear(message)
    return made


def member_of(name, begun=b"", vouching=None, job="job"):
    """A member of sums, of no party in particular."""
    party = SimpleNamespace(name=name, job=job, protocol="test")
    return Member(party, vouching or Vouching(), ToldDigest(begun), SumRules())


def test_masks_cancel_only_between_members_that_were_told_the_same():
    """Else a leader could have all but one of them sum other nodes, where they have no rows."""
    values = np.arange(500)
    for others, cancel in (
        ([CheckpointRequest(1)], True),
        ([CheckpointRequest(2)], False),
        ([], False),
        ([CheckpointRequest(1), CheckpointRequest(1)], False),
    ):
        made = members_told({"p0": [CheckpointRequest(1)], "p1": [CheckpointRequest(1)], "p2": others})
        total = sum(one.masked(values) for one in made.values())
        assert np.array_equal(total, 3 * values.astype(np.uint64)) is cancel
        assert cancel or looks_uniform([total])


def test_whoever_was_lost_is_not_let_in_again():
    """Else two attempts at one sum, with and without a member, would differ by its vector."""
    one = members_told({"p0": [], "p1": [], "p2": []})["p0"]
    one.without_lost(["p1", "p2"], "p0")
    one.without_lost(["p1"], "p0")
    with pytest.raises(PeerProtocolError, match="lost before"):
        one.without_lost(["p1", "p2"], "p0")


def test_rosters_of_others_and_keys_nobody_vouches_for_are_refused():
    identities = {name: make_identity(name) for name in ("p0", "p1", "p2")}
    pinned = {name: one.certificate for name, one in identities.items()}
    made = {name: member_of(name, vouching=Vouching(one, pinned)) for name, one in identities.items()}
    honest = Roster({n: m.key.key for n, m in made.items()}, {n: m.key.vouched for n, m in made.items()})
    made["p1"].advertise(honest, "p0")
    between = member_of("p2", vouching=Vouching(identities["p0"], pinned)).key
    replaced = Roster({**honest.keys, "p2": between.key}, {**honest.vouched, "p2": between.vouched})
    with pytest.raises(PeerProtocolError, match="p2 signed with the key of its certificate"):
        made["p1"].advertise(replaced, "p0")
    older = member_of("p2", vouching=Vouching(identities["p2"], pinned), job="another job").key
    with pytest.raises(PeerProtocolError, match="p2 signed"):
        made["p1"].advertise(Roster({**honest.keys, "p2": older.key}, {**honest.vouched, "p2": older.vouched}), "p0")
    narrow = Vouching(identities["p1"], {name: pinned[name] for name in ("p0", "p1")})
    unpinned = member_of("p1", vouching=narrow)
    own = Roster({**honest.keys, "p1": unpinned.key.key}, {**honest.vouched, "p1": unpinned.key.vouched})
    with pytest.raises(PeerProtocolError, match="a key of p2"):
        unpinned.advertise(own, "p0")


@pytest.mark.parametrize("kept", ["another key", "nobody"])
def test_a_member_takes_no_roster_without_its_own_key(kept):
    """Else a collector could have the others mask with a key of its own in this member's name."""
    made = {name: member_of(name) for name in ("p0", "p1", "p2")}
    keys = {name: one.key.key for name, one in made.items()}
    if kept == "another key":
        keys["p1"] = member_of("p1").key.key
    else:
        del keys["p1"]
    roster = Roster(keys, dict.fromkeys(keys, b""))
    with pytest.raises(PeerProtocolError, match="expected the own key of p1 among the members' - at Roster"):
        made["p1"].advertise(roster, "p0")


def test_a_roster_has_a_voucher_for_every_key():
    made = {name: member_of(name) for name in ("p0", "p1", "p2")}
    keys = {name: one.key.key for name, one in made.items()}
    with pytest.raises(PeerProtocolError, match="at Roster"):
        made["p1"].advertise(Roster(keys, {"p0": b"", "p1": b""}), "p0")
