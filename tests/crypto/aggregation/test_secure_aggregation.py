import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.aggregation.summing import Sum, agree_all, make_round, signing_key
from treaty.crypto.sharing.aggregator import Aggregator
from treaty.crypto.sharing.secure_aggregation import Participant, RoundVoid, survival
from treaty.crypto.sharing.shamir import open_bytes, share_length
from treaty.errors import CryptoError

MODES = pytest.mark.parametrize("dropout", ["share", "reveal"])


def inputs_of(this_round, seed=0):
    rng = np.random.default_rng(seed)
    return {u: rng.integers(-(2**63), 2**63, this_round.length, np.int64) for u in this_round.roster}


def plain(values, names):
    return np.sum([values[u] for u in names], axis=0, dtype=np.int64)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_opened_sum_is_numpys_or_the_round_is_void(data):
    members = data.draw(st.integers(3, 8))
    dropout = data.draw(st.sampled_from(["share", "reveal"]))
    threshold = data.draw(st.sampled_from([None, *range(members // 2 + 1, members + 1)]))
    min_cohort = data.draw(st.integers(3, members))
    length = data.draw(st.integers(0, 20))
    this_round = make_round(members, length, dropout=dropout, threshold=threshold, min_cohort=min_cohort)
    values = inputs_of(this_round, data.draw(st.integers(0, 2**32)))
    left, gone = set(this_round.roster), []
    for _ in range(5):  # before keys, shares, inputs, signatures, answers
        gone.append(data.draw(st.sets(st.sampled_from(sorted(left)), max_size=2)) if left else set())
        left -= gone[-1]
    stages = [members - sum(map(len, gone[: i + 1])) for i in range(5)]
    needed = [this_round.threshold, this_round.least, this_round.least, this_round.threshold, this_round.threshold]
    if dropout == "reveal" and gone[2]:
        needed[4] = stages[2]
    void = any(stage < need for stage, need in zip(stages, needed, strict=True))
    try:
        played = Sum(this_round, values, gone[0], gone[1], gone[2])
        total = played.aggregator.open(played.answers(gone[3], gone[4]))
    except CryptoError:  # RoundVoid but below the threshold of keys, which a participant is the first to notice
        assert void
    else:
        assert not void
        assert total.dtype == np.int64
        assert np.array_equal(total, plain(values, played.survivors))
        assert set(played.survivors) == set(this_round.roster) - gone[0] - gone[1] - gone[2]


@MODES
def test_void_round_is_repeated_with_the_next_attempt(dropout):
    rounds = [make_round(4, dropout=dropout, attempt=attempt) for attempt in range(2)]
    values = inputs_of(rounds[0])
    keys = agree_all(rounds[0]) if dropout == "reveal" else None
    first = Sum(rounds[0], values, keys=keys)
    with pytest.raises(RoundVoid, match="void"):
        first.aggregator.open(first.answers(silent=["p1", "p2"]))
    second = Sum(rounds[1], values, keys=keys)
    assert np.array_equal(second.aggregator.open(second.answers()), plain(values, values))
    assert not np.array_equal(first.inputs["p0"], second.inputs["p0"])


def test_every_participant_draws_a_new_self_mask_every_round():
    rounds = [make_round(4, dropout="reveal", attempt=attempt) for attempt in range(2)]
    keys = agree_all(rounds[0])
    told = {}
    for number, one in enumerate(rounds):
        answers = Sum(one, inputs_of(one), keys=keys).answers()
        for u in one.roster:
            shares = [[answers[v].survivors[u]] for v in ("p0", "p1", "p2")]
            told[number, u] = open_bytes([1, 2, 3], shares, 32)[0]
    assert len(set(told.values())) == 8


def test_survivor_lost_at_the_last_step_voids_a_round_that_reveals():
    this_round = make_round(6, dropout="reveal")
    values = inputs_of(this_round)
    for lost, silent, opens in [((), ("p0", "p1"), True), (("p5",), (), True), (("p5",), ("p0",), False)]:
        played = Sum(this_round, values, lost=lost)
        answers = played.answers(silent=silent)
        if opens:
            assert np.array_equal(played.aggregator.open(answers), plain(values, played.survivors))
        else:
            with pytest.raises(RoundVoid, match="answers of 5 members"):
                played.aggregator.open(answers)


@MODES
def test_participant_never_answers_twice_nor_out_of_order(dropout):
    played = Sum(make_round(4, dropout=dropout), inputs_of(make_round(4)))
    member, box = played.members["p0"], played.boxes["p0"]
    steps = {
        "share": member.share,
        "masked_input": lambda: member.masked_input(np.zeros(4, np.int64), box),
        "unmask": lambda: member.unmask({}),
    }
    fresh = Participant(
        make_round(4, dropout=dropout), agree_all(make_round(4, dropout=dropout))[0]["p0"], signing_key("p0")
    )
    with pytest.raises(CryptoError, match="expected share in this round"):
        fresh.unmask({})
    signatures = played.signatures()
    member.unmask(signatures)
    steps |= {
        "unmask": lambda: member.unmask(signatures),
        "sign_survivors": lambda: member.sign_survivors(played.survivors),
    }
    for step, again in steps.items():
        with pytest.raises(CryptoError, match=f"expected nothing more in this round, got {step}"):
            again()


def test_second_list_of_survivors_is_not_signed():
    played = Sum(make_round(6), inputs_of(make_round(6)))
    played.members["p0"].sign_survivors(played.survivors)
    with pytest.raises(CryptoError, match="expected unmask"):
        played.members["p0"].sign_survivors(played.survivors[:-1])


LISTS = {
    "too few": ["p0", "p1", "p2"],
    "without the participant": ["p1", "p2", "p3", "p4"],
    "with somebody who did not share": ["p0", "p1", "p2", "p3", "p5"],
    "with a stranger": ["eve", "p0", "p1", "p2", "p3"],
    "unsorted": ["p1", "p0", "p2", "p3", "p4"],
    "padded": ["p0", "p0", "p1", "p2"],
}


@MODES
@pytest.mark.parametrize("fault", LISTS)
def test_list_of_survivors_is_refused(fault, dropout):
    this_round = make_round(6, dropout=dropout)
    played = Sum(this_round, inputs_of(this_round), mute=["p5"])
    with pytest.raises(CryptoError, match="survivors"):
        played.members["p0"].sign_survivors(LISTS[fault])
    with pytest.raises(CryptoError, match="nothing more"):  # the refusal ends the round for it
        played.members["p0"].unmask({})


def test_cohort_minimum_binds_beyond_the_threshold():
    this_round = make_round(4, threshold=3, min_cohort=4)
    with pytest.raises(RoundVoid, match="inputs of 4"):
        Sum(this_round, inputs_of(this_round), lost=["p3"])
    played = Sum(this_round, inputs_of(this_round))
    with pytest.raises(CryptoError, match="expected 4 survivors"):
        played.members["p0"].sign_survivors(["p0", "p1", "p2"])
    seeds, _ = agree_all(this_round)
    member = Participant(this_round, seeds["p0"], signing_key("p0"))
    member.share()
    with pytest.raises(CryptoError, match="expected shares of 4"):
        member.masked_input(np.zeros(4, np.int64), {"p1": b"", "p2": b""})


SIGNATURES = {
    "too few": lambda s, old, other: {u: s[u] for u in ("p0", "p1", "p2")},
    "of another attempt": lambda s, old, other: {"p0": s["p0"]} | {u: old[u] for u in old if u != "p0"},
    "of another run of this attempt": lambda s, old, other: {"p0": s["p0"]} | {u: other[u] for u in other if u != "p0"},
    "one for all": lambda s, old, other: dict.fromkeys(s, s["p1"]),
    "malformed": lambda s, old, other: dict.fromkeys(s, b"x"),
    "none": lambda s, old, other: {},
}


@MODES
@pytest.mark.parametrize("fault", SIGNATURES)
def test_answer_needs_enough_signatures_on_the_very_list(fault, dropout):
    """Signatures of the same list from another attempt, or from before the job was resumed, do not count."""
    this_round = make_round(6, dropout=dropout)
    runs = [this_round, make_round(6, dropout=dropout, attempt=1), this_round]
    played, old, other = (Sum(one, inputs_of(this_round)) for one in runs)
    signatures = SIGNATURES[fault](played.signatures(), old.signatures(), other.signatures())
    with pytest.raises(CryptoError, match="expected 4 signatures or more"):
        played.members["p0"].unmask(signatures)


def test_signatures_of_members_who_did_not_survive_do_not_count():
    played = Sum(make_round(6), inputs_of(make_round(6)), lost=["p4", "p5"])
    member = played.members["p0"]
    content = survival(member._session, played.survivors)
    signatures = {u: signing_key(u).sign(content) for u in ("p0", "p1", "p2", "p4", "p5")}
    member.sign_survivors(played.survivors)
    with pytest.raises(CryptoError, match="got 3"):
        member.unmask(signatures)


def swapped(boxes):
    return boxes | {"p1": boxes["p2"], "p2": boxes["p1"]}


BOXES = {
    "tampered": lambda p: p.boxes["p0"] | {"p1": p.boxes["p0"]["p1"][:-1] + bytes([p.boxes["p0"]["p1"][-1] ^ 1])},
    "cut": lambda p: p.boxes["p0"] | {"p1": p.boxes["p0"]["p1"][:-1]},
    "empty": lambda p: p.boxes["p0"] | {"p1": b""},
    "of each other": lambda p: swapped(p.boxes["p0"]),
    "for somebody else": lambda p: p.boxes["p0"] | {"p1": p.boxes["p2"]["p1"]},
    "sent back": lambda p: p.boxes["p0"] | {"p1": p.boxes["p1"]["p0"]},
}


@MODES
@pytest.mark.parametrize("fault", [*BOXES, "of another attempt"])
def test_sealed_share_from_elsewhere_is_refused(fault, dropout):
    this_round = make_round(4, dropout=dropout)
    keys = agree_all(this_round)
    members = {u: Participant(this_round, keys[0][u], signing_key(u)) for u in keys[0]}
    aggregator = Aggregator(this_round, keys[1])

    class RunRecord:
        boxes = aggregator.pass_shares({u: p.share() for u, p in members.items()})

    if fault == "of another attempt":
        later = make_round(4, dropout=dropout, attempt=1)
        again = Sum(later, inputs_of(later), keys=keys if dropout == "reveal" else None)
        boxes = RunRecord.boxes["p0"] | {"p1": again.boxes["p0"]["p1"]}
    else:
        boxes = BOXES[fault](RunRecord)
    with pytest.raises(CryptoError, match="cannot decrypt p1's share for p0"):
        members["p0"].masked_input(np.zeros(4, np.int64), boxes)


def test_share_of_a_stranger_is_refused():
    this_round = make_round(4)
    member = Participant(this_round, agree_all(this_round)[0]["p0"], signing_key("p0"))
    member.share()
    with pytest.raises(CryptoError, match="seed with"):
        member.masked_input(np.zeros(4, np.int64), {"p1": b"", "p2": b"", "eve": b""})


def test_keys_of_one_round_do_not_serve_in_another():
    keys = agree_all(make_round(4))
    with pytest.raises(CryptoError, match="made for this round"):
        Participant(make_round(4, round_id=1), keys[0]["p0"], signing_key("p0"))
    with pytest.raises(CryptoError, match="keys of p0"):
        Aggregator(make_round(4, round_id=1), keys[1])


@MODES
def test_second_participant_with_the_same_seeds_cannot_mask(dropout):
    this_round = make_round(4, dropout=dropout)
    keys = agree_all(this_round)
    Sum(this_round, inputs_of(this_round), keys=keys)
    with pytest.raises(CryptoError, match="new nonce"):
        Sum(this_round, inputs_of(this_round, 1), keys=keys)


def test_input_is_left_as_it_was_and_may_be_strided():
    this_round = make_round(3)
    wide = np.arange(8, dtype=np.int64)
    played = Sum(this_round, dict.fromkeys(this_round.roster, wide[::2]))
    assert np.array_equal(played.aggregator.open(played.answers()), 3 * np.arange(0, 8, 2))
    assert np.array_equal(wide, np.arange(8))


def test_aggregator_refuses_what_is_not_of_a_member_or_comes_late():
    this_round = make_round(4)
    seeds, advertised = agree_all(this_round)
    aggregator = Aggregator(this_round, advertised)
    shares = {u: Participant(this_round, seeds[u], signing_key(u)).share() for u in seeds}
    for bad in (shares | {"eve": shares["p0"]}, shares | {"p0": {"p1": b""}}):
        with pytest.raises(CryptoError, match="in the shares of"):
            aggregator.pass_shares(bad)
    with pytest.raises(CryptoError, match="closed first"):
        aggregator.pass_signatures({})
    aggregator.pass_shares(shares)
    aggregator.add_input("p0", np.zeros(4, np.uint64))
    with pytest.raises(CryptoError, match="one input per member"):
        aggregator.add_input("p0", np.zeros(4, np.uint64))
    with pytest.raises(CryptoError, match=r"uint64 \(4,\), got uint64 \(5,\)"):
        aggregator.add_input("p1", np.zeros(5, np.uint64))
    larger = make_round(6)
    played = Sum(larger, inputs_of(larger), mute=["p5"], lost=["p4"])
    for late in ("p5", "p4", "p0", "eve"):
        with pytest.raises(CryptoError, match="one input per member"):
            played.aggregator.add_input(late, np.zeros(4, np.uint64))


@MODES
def test_input_taken_back_is_in_no_sum_and_its_member_counts_as_lost(dropout):
    this_round = make_round(6, dropout=dropout)
    values = inputs_of(this_round)
    played = Sum(this_round, values)
    again = Aggregator(this_round, played.aggregator._advertised)
    again.pass_shares({u: {v: played.boxes[v][u] for v in this_round.roster if v != u} for u in this_round.roster})
    for u, masked in played.inputs.items():
        again.add_input(u, masked)
    for u in ("p1", "p4"):
        again.take_back(u, played.inputs[u])
    played.aggregator, played.survivors = again, again.survivors()
    assert played.survivors == ["p0", "p2", "p3", "p5"]
    assert np.array_equal(again.open(played.answers()), plain(values, played.survivors))


def test_only_inputs_that_are_in_the_sum_are_taken_back_and_in_time():
    this_round = make_round(6)
    played = Sum(this_round, inputs_of(this_round))
    again = Aggregator(this_round, played.aggregator._advertised)
    again.pass_shares({u: {v: played.boxes[v][u] for v in this_round.roster if v != u} for u in this_round.roster})
    for u in ("p0", "p1", "p2", "p3", "p4"):
        again.add_input(u, played.inputs[u])
    again.take_back("p4", played.inputs["p4"])
    for u in ("p4", "p5", "eve"):  # twice, never, nobody
        with pytest.raises(CryptoError, match=f"expected an input that is in the sum, .* - of {u}"):
            again.take_back(u, played.inputs["p4"])
    with pytest.raises(CryptoError, match=r"uint64 \(4,\), got int64 \(4,\) - at the input of p0"):
        again.take_back("p0", played.inputs["p0"].view(np.int64))
    again.survivors()
    with pytest.raises(CryptoError, match="before survivors are listed - of p0"):
        again.take_back("p0", played.inputs["p0"])


def test_advertisements_are_checked_unless_members_do_so_among_themselves():
    this_round = make_round(4)
    _, advertised = agree_all(this_round)
    unsigned = {u: a._replace(channel=b"", signature=b"") for u, a in advertised.items()}
    with pytest.raises(CryptoError, match="keys of p0"):
        Aggregator(this_round, unsigned)
    Aggregator(this_round, unsigned, signed=False)
    with pytest.raises(RoundVoid, match="expected keys of 3 members"):
        Aggregator(this_round, dict(list(unsigned.items())[:2]), signed=False)


def test_vouching_counts_among_survivors_alone_and_each_once():
    """In whatever way they vouch: strangers, and one of them many times, are not t survivors."""
    played = Sum(make_round(6), inputs_of(make_round(6)), lost=["p4", "p5"])
    for u, vouched in {"p0": ["p0", "p1", "p2", "p4", "p5", "eve"], "p1": ["p1"] * 4}.items():
        member = played.members[u]
        assert member.take_survivors(played.survivors) == survival(member._session, played.survivors)
        with pytest.raises(CryptoError, match="expected 4 signatures or more"):
            member.unmask_for(vouched)
    member = played.members["p2"]
    member.take_survivors(played.survivors)
    answer = member.unmask_for(["p0", "p1", "p2", "p3"])
    assert (answer.survivors.keys(), answer.lost.keys()) == ({"p0", "p1", "p2", "p3"}, {"p4", "p5"})
    with pytest.raises(CryptoError, match="nothing more"):
        member.unmask_for(["p0", "p1", "p2", "p3"])


def test_answers_for_other_lists_are_refused():
    this_round = make_round(4)
    played = Sum(this_round, inputs_of(this_round), lost=["p3"])
    answers = played.answers()
    answer = answers["p0"]
    for bad in (
        answer._replace(lost={}),
        answer._replace(survivors=answer.survivors | {"p3": answer.lost["p3"]}),
        answer._replace(survivors={}),
    ):
        with pytest.raises(CryptoError, match="in the answer of p0"):
            played.aggregator.open(answers | {"p0": bad})
    with pytest.raises(CryptoError, match="in the answer of p3"):
        played.aggregator.open(answers | {"p3": answer})


def test_wrong_share_of_a_mask_key_is_noticed():
    this_round = make_round(4)
    played = Sum(this_round, inputs_of(this_round), lost=["p3"])
    answers = played.answers()
    wrong = answers["p0"].lost["p3"]
    answers["p0"].lost["p3"] = wrong[:5] + bytes([wrong[5] ^ 1]) + wrong[6:]  # X25519 ignores the lowest bits
    with pytest.raises(CryptoError, match=r"mask key of p3|belong together"):
        played.aggregator.open(answers)


def test_key_of_another_length_is_refused_where_masks_are_revealed():
    this_round = make_round(4, dropout="reveal")
    played = Sum(this_round, inputs_of(this_round), lost=["p3"])
    answers = played.answers()
    answers["p1"].lost["p3"] = b""
    with pytest.raises(CryptoError, match="in the answer of p1"):
        played.aggregator.open(answers)


@MODES
def test_two_members_are_refused_unless_allowed(dropout):
    with pytest.raises(CryptoError, match="min_cohort of 3 or more"):
        make_round(2, dropout=dropout, min_cohort=2)
    this_round = make_round(2, dropout=dropout, min_cohort=2, allow_two=True)
    values = inputs_of(this_round)
    played = Sum(this_round, values)
    assert np.array_equal(played.aggregator.open(played.answers()), plain(values, values))


def test_rounds_without_dropout_have_no_double_masks():
    this_round = make_round(3, dropout="none")
    seeds, advertised = agree_all(this_round)
    with pytest.raises(CryptoError, match="use pairwise_input"):
        Participant(this_round, seeds["p0"], signing_key("p0"))
    with pytest.raises(CryptoError, match="use open_pairwise"):
        Aggregator(this_round, advertised)


# ---------------------------------------------------------------- secrets of surplus noise


def surplus_of(this_round):
    return {u: [bytes([k, int(u[1:])]) * 16 for k in range(len(this_round.counts) - 1)] for u in this_round.roster}


@MODES
@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_of_each_survivor_the_one_secret_for_so_many_survivors_is_opened(dropout, lost):
    this_round = make_round(9, dropout=dropout, surplus_parts=8)
    assert this_round.counts == (6, 7, 8, 9)
    values, gone = inputs_of(this_round), sorted(this_round.roster)[:lost]
    secrets = surplus_of(this_round)
    # a survivor that is lost before it answers is missed only where each must answer
    silent = sorted(this_round.roster)[-1:] if dropout == "share" and lost < 3 else ()
    played = Sum(this_round, values, lost=gone, surplus=secrets)
    answers = played.answers(silent=silent)
    assert np.array_equal(played.aggregator.open(answers), plain(values, played.survivors))
    removed = 3 - lost
    expected = {u: secrets[u][removed - 1] for u in played.survivors} if removed else {}
    assert played.aggregator.surplus == expected
    # shares of no other secret go out, and of lost members none
    for answer in answers.values():
        assert {len(share) for share in answer.survivors.values()} == {share_length(32) * (1 + bool(removed))}
        assert len({len(share) for share in answer.lost.values()}) <= 1


def test_members_with_another_number_of_secrets_or_steps_do_not_fit():
    this_round = make_round(6, surplus_parts=8)
    seeds, _ = agree_all(this_round)
    for wrong in ((), (bytes(32),) * 3):
        with pytest.raises(CryptoError, match="secrets of noise"):
            Participant(this_round, seeds["p0"], signing_key("p0"), wrong)
    # what is sealed in a round without parts is not read in one with them
    assert make_round(6).context != this_round.context
