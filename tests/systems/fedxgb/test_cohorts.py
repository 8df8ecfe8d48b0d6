"""Which users take part in trees and sums: rules of selection, and cohorts that differ by enough or not at all."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.systems.fedxgb.cohorts import Rules, Standing, cohort_of, permitted, select, without_some

NAMES = [f"u{k}" for k in range(12)]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_opened_cohort_equals_or_differs_enough_from_every_earlier_one(data):
    """Over trees in which users drop at will and of which the steadiest are chosen."""
    least_change, most = data.draw(st.integers(3, 5)), data.draw(st.sampled_from([None, 3, 6, 9]))
    rules, rng = Rules(most=most, least_change=least_change), np.random.default_rng(data.draw(st.integers(0, 2**32)))
    standings = {name: Standing() for name in NAMES}
    opened: list[frozenset[str]] = []
    running: list[str] = []
    for _ in range(data.draw(st.integers(1, 8))):
        there = data.draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=3))
        ordered = select({name: standings[name] for name in there}, running, rules, rng)
        cohort = cohort_of(ordered, opened, 3, rules, rng)
        if cohort is None:
            continue
        assert cohort == sorted(set(cohort))
        assert set(cohort) <= set(there)
        assert 3 <= len(cohort) <= (most or len(NAMES))
        came = [name for name in cohort if data.draw(st.integers(0, 5))]
        kept = without_some(came, opened, 3, least_change, rng) if len(came) >= 3 else None
        if kept is None:
            continue
        assert set(kept) <= set(came)
        assert len(kept) >= 3
        for past in opened:
            assert past == set(kept) or len(past ^ set(kept)) >= least_change
        opened.append(frozenset(kept))
        running = kept
    if opened:
        assert_no_combination_is_of_one_or_two(opened)


def assert_no_combination_is_of_one_or_two(opened: list[frozenset[str]]) -> None:
    """With any two users' own sums added to what is known, two more are known."""
    rows = np.array([[name in cohort for name in NAMES] for cohort in opened], np.float64)
    rank, units = np.linalg.matrix_rank(rows), np.eye(len(NAMES))
    for i, j in combinations(range(len(NAMES)), 2):
        assert np.linalg.matrix_rank(np.vstack([rows, units[[i, j]]])) == rank + 2


@pytest.mark.parametrize(("least_change", "left"), [(3, 6), (4, 5)])
def test_further_users_are_left_out_where_one_is_lost(least_change, left):
    earlier = [frozenset(NAMES[:9])]
    kept = without_some(NAMES[:8], earlier, 3, least_change, np.random.default_rng(0))
    assert len(kept) == left
    assert len(earlier[0] ^ set(kept)) == least_change
    assert without_some(NAMES[:9], earlier, 3, least_change, np.random.default_rng(0)) == sorted(NAMES[:9])


def test_who_is_left_out_is_drawn_by_lot():
    earlier = [frozenset(NAMES[:9])]
    drawn = {tuple(without_some(NAMES[:8], earlier, 3, 3, np.random.default_rng(seed))) for seed in range(30)}
    assert len(drawn) > 10


def test_no_cohort_is_better_than_one_that_tells_too_much():
    assert without_some(NAMES[:3], [frozenset(NAMES[:4])], 3, 3, np.random.default_rng(0)) is None
    assert without_some(NAMES[:5], [frozenset(NAMES[:6])], 5, 3, np.random.default_rng(0)) is None
    assert without_some(NAMES[:2], [], 3, 3, np.random.default_rng(0)) is None


def test_permitted_counts_who_came_and_who_went():
    past = [frozenset("abcd")]
    assert permitted("abcd", past, 3)
    assert permitted("dcba", past, 3)
    assert not permitted("abc", past, 3)
    assert not permitted("abcde", past, 3)
    assert not permitted("abce", past, 3)  # one went, one came
    assert permitted("abcefg"[:3] + "efg", past, 3)
    assert permitted("abef", past, 3)
    assert not permitted("abef", [*past, frozenset("abefg")], 3)


def test_spare_users_take_the_place_of_the_last_taken():
    """Rather than fewer users than there might be."""
    rules, earlier = Rules(most=6), [frozenset(NAMES[:7])]
    cohort = cohort_of(NAMES, earlier, 3, rules, np.random.default_rng(0))
    assert len(cohort) == 6
    assert cohort == ["u0", "u1", "u2", "u3", "u6", "u7"]
    assert permitted(cohort, earlier, 3)


def chosen(standings, running=(), rules=None, seed=0):
    return select(standings, running, rules or Rules(), np.random.default_rng(seed))


def test_who_is_not_active_or_steady_enough_is_not_taken():
    standings = {"a": Standing(0.5, 0.9), "b": Standing(0.4, 0.9), "c": Standing(0.9, 0.5), "d": Standing(0.9, 0.4)}
    assert set(chosen(standings, rules=Rules(min_activity=0.5, min_stability=0.5))) == {"a", "c"}
    assert set(chosen(standings)) == set("abcd")


def test_running_users_go_first_then_the_steadiest():
    standings = {
        "lost often": Standing(1.0, 1.0, called=4, lost=3),
        "lost once": Standing(1.0, 1.0, called=4, lost=1),
        "never called": Standing(1.0, 1.0),
        "idle": Standing(0.1, 1.0),
        "shaky": Standing(1.0, 0.5),
        "running": Standing(0.01, 0.01, called=9, lost=9),
    }
    wanted = ["running", "never called", "lost once", "shaky", "lost often", "idle"]
    for seed in range(5):
        assert chosen(standings, ["running"], seed=seed) == wanted
        assert chosen(standings, seed=seed)[0] == "never called"


def test_ties_are_broken_by_lot():
    standings = {name: Standing() for name in NAMES}
    assert len({tuple(chosen(standings, seed=seed)) for seed in range(5)}) == 5


def test_most_users_are_the_first_of_the_order():
    rules = Rules(most=4)
    assert cohort_of(NAMES, [], 3, rules, np.random.default_rng(0)) == sorted(NAMES[:4])
    assert cohort_of(NAMES[:3], [], 3, rules, np.random.default_rng(0)) == NAMES[:3]


# ---------------------------------------------------------------- combinations of many sums


def singled_out(cohorts: list[frozenset[str]]) -> bool:
    """Whether a combination of these cohorts' sums is of one user or two, by rank over the integers modulo a prime."""
    users = sorted(frozenset().union(*cohorts))
    rows = [[int(name in cohort) for name in users] for cohort in cohorts]
    whole = rank(rows)
    pairs = [*combinations(range(len(users)), 2), *((k, k) for k in range(len(users)))]
    return any(rank([[x for k, x in enumerate(row) if k not in pair] for row in rows]) < whole for pair in pairs)


def rank(rows: list[list[int]], prime: int = 2**31 - 1) -> int:
    rows, found = [row[:] for row in rows], 0
    for column in range(len(rows[0])):
        pivot = next((k for k in range(found, len(rows)) if rows[k][column] % prime), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        inverse = pow(rows[found][column], -1, prime)
        for k in range(found + 1, len(rows)):
            factor = rows[k][column] * inverse
            rows[k] = [(a - factor * b) % prime for a, b in zip(rows[k], rows[found], strict=True)]
        found += 1
    return found


def test_cohorts_that_differ_by_three_and_give_one_user_away_together_are_refused():
    without = [frozenset(NAMES) - {NAMES[k] for k in out} for out in ((), (0, 1, 2), (2, 3, 4), (0, 1, 3, 4))]
    assert all(len(a ^ b) >= 3 for a, b in combinations(without, 2))
    assert singled_out(without)  # the sum of all but the last, less that one: twice user 2
    assert permitted(without[2], without[:2], 3)
    assert not permitted(without[3], without[:3], 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.sampled_from(NAMES[:8]), min_size=3), min_size=1, max_size=12))
def test_cohorts_are_permitted_just_where_no_combination_is_of_one_user_or_two(wanted):
    opened: list[frozenset[str]] = []
    for cohort in map(frozenset, wanted):
        allowed = permitted(cohort, opened, 3)
        assert allowed == (cohort in opened or not singled_out([*opened, cohort]))
        if allowed and cohort not in opened:
            opened.append(cohort)
