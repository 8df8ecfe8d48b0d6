"""Mask keys of one round, and what members vouch for, under channels that last."""

import numpy as np
import pytest

from crypto.aggregation.summing import make_round
from treaty.crypto.sharing.aggregator import Aggregator
from treaty.crypto.sharing.key_agreement import RoundKeys, unsigned
from treaty.crypto.sharing.secure_aggregation import Participant, Unmasking
from treaty.errors import CryptoError

NAMES = ["p0", "p1", "p2", "p3"]
SCOPE = b"round 1"


def channels_of(names=NAMES):
    """A secret for each pair, as it lasts a job."""
    return {u: {v: "-".join(sorted([u, v])).ljust(32).encode() for v in names if v != u} for u in names}


def made(scope=SCOPE, names=NAMES):
    return {u: RoundKeys("job", u, scope, channels) for u, channels in channels_of(names).items()}


def told(keys, to):
    """Keys by member, and the tags made for one of them."""
    return {u: k.public for u, k in keys.items()}, {u: k.tags()[to] for u, k in keys.items() if u != to}


def test_members_share_the_same_seeds_and_nobody_elses():
    keys = made()
    seeds = {u: k.agree(*told(keys, u)) for u, k in keys.items()}
    for u in NAMES:
        assert seeds[u].scope == SCOPE
        assert seeds[u].mask.keys() == seeds[u].channel.keys() == set(NAMES) - {u}
        assert all(seeds[u].mask[v] == seeds[v].mask[u] for v in seeds[u].mask)
        assert seeds[u].transcript == seeds["p0"].transcript
    assert len({seeds[u].mask[v] for u in NAMES for v in NAMES if u < v}) == 6


def test_keys_and_seeds_are_new_whenever_they_are_made():
    first, second = made(), made()
    assert first["p0"].public != second["p0"].public
    assert first["p0"].agree(*told(first, "p0")).mask["p1"] != second["p0"].agree(*told(second, "p0")).mask["p1"]


FAULTS = {
    "no tag": lambda keys, tags: (keys, {u: t for u, t in tags.items() if u != "p1"}),
    "another tag": lambda keys, tags: (keys, tags | {"p1": bytes(32)}),
    "part of a tag": lambda keys, tags: (keys, tags | {"p1": tags["p1"][:16]}),
    "a tag of another member": lambda keys, tags: (keys, tags | {"p1": tags["p2"]}),
    "another key": lambda keys, tags: (keys | {"p1": keys["p2"]}, tags),
    "a tag for somebody else": lambda keys, tags: (keys, tags | {"p1": KEYS["p1"].tags()["p2"]}),
    "its own tag sent back": lambda keys, tags: (keys | {"p1": keys["p0"]}, tags | {"p1": KEYS["p0"].tags()["p1"]}),
    "a stranger": lambda keys, tags: (keys | {"eve": keys["p1"]}, tags | {"eve": tags["p1"]}),
    "a key of another scope": lambda keys, tags: (
        keys | {"p1": OTHER["p1"].public}, tags | {"p1": OTHER["p1"].tags()["p0"]}
    ),
    "a vouching for the key": lambda keys, tags: (keys, tags | {"p1": KEYS["p1"].vouch(keys["p1"])["p0"]}),
}  # fmt: skip
KEYS, OTHER = made(), made(b"round 2")


@pytest.mark.parametrize("fault", FAULTS)
def test_key_that_its_owner_did_not_tag_for_this_member_and_scope_is_refused(fault):
    keys, tags = FAULTS[fault](*told(KEYS, "p0"))
    with pytest.raises(CryptoError, match=r"expected keys by members of this round, got .* keys of (p1|eve)"):
        KEYS["p0"].agree(keys, tags)


@pytest.mark.parametrize("change", [lambda keys: keys.pop("p0"), lambda keys: keys.update(p0=keys["p1"])])
def test_own_key_missing_or_changed_is_refused(change):
    keys, tags = told(KEYS, "p0")
    change(keys)
    with pytest.raises(CryptoError, match="expected the own key of p0 unchanged"):
        KEYS["p0"].agree(keys, tags)


def test_who_is_left_out_shares_nothing():
    keys, tags = told({u: KEYS[u] for u in ("p0", "p1")}, "p0")
    assert KEYS["p0"].agree(keys, tags).mask.keys() == {"p1"}


def test_vouching_counts_for_the_very_content_scope_and_receiver():
    tags = {u: k.vouch(b"list") for u, k in KEYS.items()}
    to = {u: tags[u]["p0"] for u in NAMES if u != "p0"}
    assert KEYS["p0"].vouched(b"list", to) == NAMES
    assert KEYS["p0"].vouched(b"another", to) == ["p0"]
    assert KEYS["p1"].vouched(b"list", {u: t for u, t in to.items() if u != "p1"}) == ["p1"]
    assert KEYS["p0"].vouched(b"list", to | {"p1": to["p2"], "eve": to["p3"]}) == ["p0", "p2", "p3"]
    assert OTHER["p0"].vouched(b"list", to) == ["p0"]
    assert KEYS["p0"].vouched(b"list", {}) == ["p0"]
    assert KEYS["p0"].vouched(KEYS["p1"].public, {"p1": KEYS["p1"].tags()["p0"]}) == ["p0"]


@pytest.mark.parametrize("lost", [(), ("p3",)])
def test_sums_open_with_keys_and_lists_that_are_tagged(lost):
    this_round = make_round(4)
    keys = made(this_round.key_scope)
    members = {u: Participant(this_round, k.agree(*told(keys, u)), None) for u, k in keys.items()}
    aggregator = Aggregator(this_round, unsigned({u: k.public for u, k in keys.items()}), signed=False)
    boxes = aggregator.pass_shares({u: m.share() for u, m in members.items()})
    values = np.arange(16).reshape(4, 4)
    for u, own in zip(NAMES, values, strict=True):
        masked = members[u].masked_input(own, boxes[u])
        if u not in lost:
            aggregator.add_input(u, masked)
    remaining = aggregator.survivors()
    agreed = {u: members[u].take_survivors(remaining) for u in remaining}
    tags = {u: keys[u].vouch(agreed[u]) for u in remaining}
    answers = {
        u: Unmasking(
            *members[u].unmask_for(keys[u].vouched(agreed[u], {v: tags[v][u] for v in remaining if v != u}))
        )
        for u in remaining
    }  # fmt: skip
    np.testing.assert_array_equal(aggregator.open(answers), values[: 4 - len(lost)].sum(axis=0))


def test_lists_that_differ_get_no_answer():
    """Two were told one list and two another: nobody has the three that it takes."""
    this_round = make_round(4)
    keys = made(this_round.key_scope)
    members = {u: Participant(this_round, k.agree(*told(keys, u)), None) for u, k in keys.items()}
    boxes = {u: m.share() for u, m in members.items()}
    for u, m in members.items():
        m.masked_input(np.zeros(4, np.int64), {v: boxes[v][u] for v in NAMES if v != u})
    lists = {u: NAMES if u in ("p0", "p1") else ["p0", "p2", "p3"] for u in ("p0", "p1", "p2")}
    agreed = {u: members[u].take_survivors(lists[u]) for u in lists}
    tags = {u: keys[u].vouch(agreed[u]) for u in lists}
    for u in lists:
        vouched = keys[u].vouched(agreed[u], {v: tags[v][u] for v in lists if v != u})
        with pytest.raises(CryptoError, match="expected 3 signatures or more"):
            members[u].unmask_for(vouched)
