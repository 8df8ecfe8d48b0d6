"""Attacks on secure sums: they succeed where a defence is switched off, and fail with it."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crypto.aggregation.summing import Sum, advertise, agree_all, make_round, signing_key
from treaty.crypto.keystream import add_masks, mask_key, pair_keys
from treaty.crypto.sharing.key_agreement import agree
from treaty.crypto.sharing.secure_aggregation import Participant, survival
from treaty.crypto.sharing.shamir import open_bytes
from treaty.errors import CryptoError

MODES = pytest.mark.parametrize("dropout", ["share", "reveal"])


def inputs_of(this_round):
    rng = np.random.default_rng(4)
    return {u: rng.integers(-100, 100, this_round.length) for u in this_round.roster}


def rebuilt(this_round, shares):
    """The secret behind shares, by holder."""
    holders = sorted(shares)
    return open_bytes(this_round.points(holders), [[shares[holder]] for holder in holders], 32)[0]


def unmasked(masked, added, subtracted, self_seed, nonce):
    """A masked input less its pair masks and the mask of its own."""
    out = masked.copy()
    add_masks(out, subtracted, [*added, mask_key(self_seed, nonce)])
    return out.view(np.int64)


@pytest.mark.parametrize("reused", [True, False], ids=["mask key reused", "fresh keys"])
def test_key_of_a_later_dropout_opens_its_earlier_input_only_where_keys_are_reused(reused):
    """The aggregator keeps p3's self-mask seed of round 0, which p3 survived, and rebuilds its key in round 1."""
    first, second = (make_round(5, round_id=i) for i in range(2))
    values = inputs_of(first)
    keys, advertised = advertise(first)
    one = Sum(first, values, keys=({u: keys[u].agree(advertised, first.roster) for u in keys}, advertised))
    self_seed = rebuilt(first, {u: answer.survivors["p3"] for u, answer in one.answers().items()})

    later, _ = advertise(second)
    if reused:
        later["p3"]._mask = keys["p3"]._mask
    told = {u: key.advertise(signing_key(u)) for u, key in later.items()}
    two = Sum(second, values, lost=["p3"], keys=({u: later[u].agree(told, second.roster) for u in later}, told))
    secret = rebuilt(second, {u: answer.lost["p3"] for u, answer in two.answers().items()})

    own = X25519PrivateKey.from_private_bytes(secret)
    seeds = {u: agree(own, advertised[u].mask, "job", *sorted([u, "p3"])) for u in advertised if u != "p3"}
    added, subtracted = pair_keys("p3", seeds, seeds, first.nonce)
    opened = unmasked(one.inputs["p3"], added, subtracted, self_seed, first.nonce)
    assert np.array_equal(opened, values["p3"]) == reused


@MODES
def test_late_input_of_a_member_counted_as_lost_stays_masked(dropout):
    """All that is told to make up for p3 removes its pair masks; its self-mask alone keeps its late input hidden."""
    this_round = make_round(5, dropout=dropout)
    values = inputs_of(this_round)
    keys, advertised = advertise(this_round)
    seeds = {u: keys[u].agree(advertised, this_round.roster) for u in keys}
    played = Sum(this_round, values, lost=["p3"], keys=(seeds, advertised))
    answers = played.answers()
    if dropout == "share":
        own = X25519PrivateKey.from_private_bytes(rebuilt(this_round, {u: a.lost["p3"] for u, a in answers.items()}))
        pairs = {u: agree(own, advertised[u].mask, "job", *sorted([u, "p3"])) for u in answers}
        told = {u: mask_key(seed, this_round.nonce) for u, seed in pairs.items()}
    else:
        told = {u: answer.lost["p3"] for u, answer in answers.items()}
    late = played.inputs["p3"].copy()
    add_masks(late, [key for u, key in told.items() if u < "p3"], [key for u, key in told.items() if u > "p3"])
    assert not np.array_equal(late.view(np.int64), values["p3"])
    assert all("p3" not in answer.survivors for answer in answers.values())
    self_mask = mask_key(played.members["p3"]._self_seed, this_round.nonce)
    add_masks(late, [], [self_mask])
    assert np.array_equal(late.view(np.int64), values["p3"])  # the attack itself is right


def lying_aggregator(dropout, told_less, colluders, told=None):
    """An aggregator with colluders, who sign anything, tells some honest members that p0 was lost, others that not.

    Returns how many shares of p0's self-mask seed it has, and how many pair masks of p0 or shares of its mask key.
    """
    this_round = make_round(9, dropout=dropout)
    played = Sum(this_round, inputs_of(this_round))
    everybody = played.survivors
    lists = {u: [v for v in everybody if v != "p0"] if u in told_less else everybody for u in everybody}
    signed = {u: played.members[u].sign_survivors(lists[u]) for u in everybody if u not in colluders}
    kept = {}
    for u in signed:
        content = survival(played.members[u]._session, lists[u])
        bought = {c: signing_key(c).sign(content) for c in colluders}
        try:
            kept[u] = played.members[u].unmask(signed | bought)
        except CryptoError:  # too few signed the list it was told
            continue
    of_seed = {u for u, answer in kept.items() if "p0" in answer.survivors} | set(colluders)
    of_masks = {u for u, answer in kept.items() if "p0" in answer.lost} | set(colluders)
    return this_round.threshold, len(of_seed), len(of_masks)


HONEST = [f"p{i}" for i in range(1, 9)]  # p0 is honest too; colluders are the last ones


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["share", "reveal"]), st.sets(st.sampled_from(HONEST)), st.integers(0, 2))
def test_aggregator_that_lies_about_survivors_opens_no_input(dropout, told_less, count):
    """With fewer than n/3 of nine colluding, whoever is told what: never both of p0's masks."""
    threshold, of_seed, of_masks = lying_aggregator(dropout, told_less, HONEST[8 - count :])
    if dropout == "share":
        assert of_seed < threshold or of_masks < threshold
    else:  # every pair mask counts: honest members must have told all of theirs
        assert of_seed < threshold or of_masks < len(HONEST)


def test_aggregator_that_lies_succeeds_with_a_third_of_the_members():
    """The bound of the claim is sharp: three colluders of nine get both masks of p0."""
    threshold, of_seed, of_masks = lying_aggregator("share", HONEST[:3], HONEST[5:])
    assert of_seed >= threshold
    assert of_masks >= threshold


OTHER_VERSIONS = {"threshold": 5, "min_cohort": 4, "vector_id": "other", "length": 5, "attempt": 1}


@pytest.mark.parametrize("detail", OTHER_VERSIONS)
def test_aggregator_cannot_tell_members_different_rounds(detail):
    this_round, other = make_round(9), make_round(9, **{detail: OTHER_VERSIONS[detail]})
    keys, advertised = advertise(this_round)
    _, elsewhere = advertise(other)
    with pytest.raises(CryptoError, match="keys of p8"):
        keys["p0"].agree(advertised | {"p8": elsewhere["p8"]}, this_round.roster)


def test_aggregator_cannot_lower_the_threshold_by_leaving_members_out():
    this_round = make_round(9)
    seeds, _ = agree_all(this_round, absent=[f"p{i}" for i in range(3, 9)])
    with pytest.raises(CryptoError, match="expected keys of 6 members or more, got 3"):
        Participant(this_round, seeds["p0"], signing_key("p0"))


def test_members_told_different_keys_open_nothing():
    this_round = make_round(6)
    keys, advertised = advertise(this_round)
    fewer = {u: advertised[u] for u in list(advertised)[:5]}
    seeds = {
        u: keys[u].agree(advertised if u in ("p0", "p1", "p5") else fewer, this_round.roster) for u in keys if u != "p5"
    }
    members = {u: Participant(this_round, seeds[u], signing_key(u)) for u in seeds}
    boxes = {u: member.share() for u, member in members.items()}
    with pytest.raises(CryptoError, match="cannot decrypt p2's share for p0"):
        members["p0"].masked_input(np.zeros(4, np.int64), {u: boxes[u]["p0"] for u in boxes if u != "p0"})


@MODES
def test_masked_inputs_look_uniform(dropout):
    """Chi-squared on bytes of every input and of the sum before unmasking: false alarm 4e-9 in all."""
    this_round = make_round(3, 20_000, dropout=dropout)
    played = Sum(this_round, {u: np.full(20_000, 7, np.int64) for u in this_round.roster})
    for seen in [*played.inputs.values(), np.sum(list(played.inputs.values()), axis=0)]:
        counts = np.bincount(seen.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-9
