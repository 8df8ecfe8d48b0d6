import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.aggregation.summing import ROSTER, agree_all, make_round
from treaty.crypto.sharing.secure_aggregation import RoundVoid, open_pairwise, pairwise_input
from treaty.errors import CryptoError


@pytest.mark.parametrize(("members", "threshold"), [(3, 2), (4, 3), (5, 4), (6, 4), (7, 5), (9, 6), (10, 7)])
def test_threshold_is_two_thirds_rounded_up(members, threshold):
    assert make_round(members).threshold == threshold


BAD = {
    "two members": (2, {}),
    "two members and a cohort of two": (2, {"min_cohort": 2}),
    "cohort of one": (3, {"min_cohort": 1, "allow_two": True}),
    "fewer members than the cohort": (4, {"min_cohort": 5}),
    "threshold of half": (4, {"threshold": 2}),
    "threshold above all": (4, {"threshold": 5}),
}


@pytest.mark.parametrize("fault", BAD)
def test_round_that_protects_nobody_is_refused(fault):
    members, options = BAD[fault]
    with pytest.raises(CryptoError, match="expected"):
        make_round(members, **options)


def test_two_members_may_sum_where_it_is_allowed():
    assert make_round(2, min_cohort=2, allow_two=True).least == 2


CHANGES = {
    "job_id": "other", "protocol": "other", "round_id": 1, "attempt": 1, "vector_id": "other", "length": 5,
    "threshold": 4, "min_cohort": 4, "dropout": "reveal", "roster": dict(list(ROSTER.items())[1:6]),
}  # fmt: skip


def test_every_agreed_detail_makes_another_round():
    rounds = [
        make_round(5),
        *(make_round(5, **{name: value}) for name, value in CHANGES.items() if name != "threshold"),
    ]
    rounds.append(make_round(5, threshold=3))
    assert len({one.context for one in rounds}) == len(CHANGES) + 1
    assert len({one.session(b"keys") for one in rounds} | {rounds[0].session(b"other")}) == len(CHANGES) + 2


def test_keys_for_shares_are_of_one_round_and_others_of_the_job():
    rounds = [make_round(5, dropout=kind, attempt=i) for kind in ("share", "reveal", "none") for i in range(2)]
    assert [one.key_scope == one.context for one in rounds] == [True, True, False, False, False, False]
    assert len({one.key_scope for one in rounds}) == 3
    assert make_round(4, dropout="none").key_scope != rounds[-1].key_scope


@pytest.mark.parametrize("dropout", ["share", "reveal", "none"])
def test_another_round_of_the_same_members_is_the_one_made_anew(dropout):
    first = make_round(5, length=9, dropout=dropout, min_cohort=4, threshold=3)
    before = first.nonce, first.length, first.context, first.key_scope
    other = first.another(2, 7, "vector", attempt=1)
    anew = make_round(
        5, length=7, dropout=dropout, min_cohort=4, threshold=3, round_id=2, attempt=1, vector_id="vector"
    )
    names = ("nonce", "length", "context", "key_scope", "roster", "threshold", "least", "dropout", "job_id")
    assert [getattr(other, name) for name in names] == [getattr(anew, name) for name in names]
    assert other.points(["p3", "p0"]) == anew.points(["p3", "p0"])
    assert (first.nonce, first.length, first.context, first.key_scope) == before


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 6), st.integers(0, 50), st.integers(0, 2**32))
def test_pairwise_sum_is_exact_and_inputs_are_masked(members, length, seed):
    rng = np.random.default_rng(seed)
    this_round = make_round(members, length, dropout="none")
    seeds, _ = agree_all(this_round)
    values = {u: rng.integers(-(2**63), 2**63, length, np.int64) for u in seeds}
    inputs = {u: pairwise_input(this_round, seeds[u], values[u]) for u in seeds}
    total = open_pairwise(this_round, inputs)
    assert total.dtype == np.int64
    assert np.array_equal(total, np.sum(list(values.values()), axis=0, dtype=np.int64))
    if length:
        assert not any(np.array_equal(inputs[u].view(np.int64), values[u]) for u in seeds)


def test_missing_member_voids_a_pairwise_sum():
    this_round = make_round(4, dropout="none")
    seeds, _ = agree_all(this_round)
    inputs = {u: pairwise_input(this_round, seeds[u], np.zeros(4, np.int64)) for u in seeds}
    for gone in inputs:
        with pytest.raises(RoundVoid, match="inputs of 4 members"):
            open_pairwise(this_round, {u: masked for u, masked in inputs.items() if u != gone} | {"eve": inputs[gone]})


def test_pairwise_input_needs_keys_of_all_members():
    this_round = make_round(4, dropout="none")
    seeds, _ = agree_all(this_round, absent=["p3"])
    with pytest.raises(CryptoError, match="none with 1 - at p0"):
        pairwise_input(this_round, seeds["p0"], np.zeros(4, np.int64))


def test_second_vector_under_a_used_nonce_is_refused():
    seeds, _ = agree_all(make_round(3, dropout="none"))
    first, second = (make_round(3, dropout="none", vector_id=name) for name in ("grad", "hess"))
    one, other = (pairwise_input(r, seeds["p0"], np.zeros(4, np.int64)) for r in (first, second))
    assert not np.array_equal(one, other)
    with pytest.raises(CryptoError, match="new nonce"):
        pairwise_input(first, seeds["p0"], np.ones(4, np.int64))


def test_seeds_of_another_job_or_roster_are_refused():
    this_round = make_round(4, dropout="none")
    for other in (make_round(5, dropout="none"), make_round(4, dropout="none", job_id="other"), make_round(4)):
        with pytest.raises(CryptoError, match="made for this round"):
            pairwise_input(this_round, agree_all(other)[0]["p0"], np.zeros(4, np.int64))


@pytest.mark.parametrize(
    "values", [np.zeros(3, np.int64), np.zeros((2, 2), np.int64), np.zeros(4), np.zeros(4, np.uint64)]
)
def test_vector_of_another_type_or_length_is_refused(values):
    this_round = make_round(3, dropout="none")
    seeds, _ = agree_all(this_round)
    with pytest.raises(CryptoError, match=r"int64 \(4,\)"):
        pairwise_input(this_round, seeds["p0"], values)
    with pytest.raises(CryptoError, match=r"uint64 \(4,\)"):
        open_pairwise(this_round, {u: values.astype(np.int64) for u in seeds})
