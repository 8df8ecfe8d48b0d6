"""Members of masked sums: whose masks cancel, who may come back, and whose keys they take."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from systems.horizontal.uniform import looks_uniform
from treaty.errors import PeerProtocolError
from treaty.messaging.certificates import Signer, make_identity
from treaty.systems.horizontal.members import MaskKeyPairs, Roster, SumMember, SumRules, TranscriptDigest
from treaty.systems.pooled.continuing import CheckpointRequest


def members_told(told):
    """Members of a cohort of three of whom each was told what `told` says, ready to mask."""
    made = {name: member_of(name, b"begun") for name in told}
    pairs = pairs_told(made, roster_of(made))
    for name, one in made.items():
        one.agree(pairs)
        for message in told[name]:
            one.received.update(message)
    return made


def member_of(name, begun=b"", vouching=None, job="job"):
    """A member of sums, of no party in particular."""
    party = SimpleNamespace(name=name, job=job, protocol="test")
    return SumMember(party, vouching or Signer(), TranscriptDigest(begun), SumRules())


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
    with pytest.raises(PeerProtocolError, match="were reported lost: p2"):
        one.without_lost(["p1", "p2"], "p0")


def vouching_members():
    """Three members of a run, each with an identity that the others pinned; returns them by name, and identities."""
    identities = {name: make_identity(name) for name in ("p0", "p1", "p2")}
    pinned = {name: one.certificate for name, one in identities.items()}
    return {name: member_of(name, vouching=Signer(one, pinned)) for name, one in identities.items()}, identities


def roster_of(made, nonce=bytes(32), **others):
    return Roster(nonce, {**{name: one.key.key for name, one in made.items()}, **others})


def pairs_told(made, roster, **others):
    """What the collector passes on: everybody's keys and signature on the roster, but for `others`."""
    return MaskKeyPairs({**{name: one.advertise(roster, "p0") for name, one in made.items()}, **others})


def test_members_whose_keys_nobody_vouches_for_are_refused():
    made, identities = vouching_members()
    roster = roster_of(made)
    told = pairs_told(made, roster)
    for one in made.values():
        one.agree(told)
    pinned = {name: one.certificate for name, one in identities.items()}
    between = member_of("p2", vouching=Signer(identities["p0"], pinned))  # the collector's, in p2's name
    fooled = roster_of(made, p2=between.key.key)
    with pytest.raises(PeerProtocolError, match="signed by p2 with the key of its certificate"):
        made["p1"].agree(pairs_told({"p0": made["p0"], "p1": made["p1"], "p2": between}, fooled))
    narrow = Signer(identities["p1"], {name: pinned[name] for name in ("p0", "p1")})
    unpinned = {**made, "p1": member_of("p1", vouching=narrow)}
    with pytest.raises(PeerProtocolError, match="signed by p2"):
        unpinned["p1"].agree(pairs_told(unpinned, roster_of(unpinned)))
    with pytest.raises(PeerProtocolError, match="and a nonce"):
        made["p1"].advertise(roster_of(made, nonce=b""), "p0")


def test_what_was_vouched_for_in_another_run_is_refused():
    """Keys of an earlier run of the same job, stolen since, with what their owner signed then."""
    made, identities = vouching_members()
    pinned = {name: one.certificate for name, one in identities.items()}
    earlier = {name: member_of(name, vouching=Signer(one, pinned)) for name, one in identities.items()}
    stolen = earlier["p2"]
    before = pairs_told(earlier, roster_of(earlier)).of["p2"]
    roster = roster_of(made, p2=stolen.key.key)
    replayed = {"p0": made["p0"], "p1": made["p1"], "p2": stolen}
    with pytest.raises(PeerProtocolError, match="signed by p2"):
        made["p1"].agree(pairs_told(replayed, roster, p2=before))
    for nonce in (bytes(32), bytes([1]) * 32):  # nor under the earlier run's very members
        again = roster_of(earlier, nonce=nonce)
        told = pairs_told(earlier, again, p2=before)
        if nonce == bytes(32):
            earlier["p1"].agree(told)
        else:
            with pytest.raises(PeerProtocolError, match="signed by p2"):
                earlier["p1"].agree(told)


@pytest.mark.parametrize("kept", ["another key", "nobody"])
def test_a_member_takes_no_roster_without_its_own_key(kept):
    """Else a collector could have the others mask with a key of its own in this member's name."""
    made = {name: member_of(name) for name in ("p0", "p1", "p2")}
    keys = {name: one.key.key for name, one in made.items()}
    if kept == "another key":
        keys["p1"] = member_of("p1").key.key
    else:
        del keys["p1"]
    with pytest.raises(PeerProtocolError, match="expected the own key of p1 and a nonce - at Roster"):
        made["p1"].advertise(Roster(bytes(32), keys), "p0")


def test_a_roster_has_a_voucher_for_every_key():
    made = {name: member_of(name) for name in ("p0", "p1", "p2")}
    told = pairs_told(made, roster_of(made)).of
    with pytest.raises(PeerProtocolError, match="signed by p2"):
        made["p1"].agree(MaskKeyPairs({name: told[name] for name in ("p0", "p1")}))
