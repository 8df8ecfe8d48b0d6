"""Which users take part in trees and sums: rules of selection, and cohorts that differ by enough or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import slow
from treaty.models.checkpoints import Keeper
from treaty.systems.fedxgb.cohorts import Cohorts, DomainFile, Rules, UserStanding, permitted, select

NAMES = [f"u{k}" for k in range(12)]


def playing(
    count: int, trees: int, lost: float, seed: int, most: int | None = None, gone: int = 0, folder: Path | None = None,
    group_size: int | None = None,
) -> list[frozenset[str]]:  # fmt: skip
    """Play a domain's cohorts over a job; return all that were opened, in order, at least one a tree.

    Before every tree others are lost for it, a share of the domain; in it, one user after another of its cohort may be,
    too. `gone` users leave for good, one after every ten trees. With a folder, training goes on from the file there
    at every seventh tree.
    """
    rng = np.random.default_rng(seed)
    names = [f"u{k}" for k in range(count)]
    rules = Rules(most=most, least_change=group_size or 3, whole=group_size is not None)
    cohorts, opened, running = Cohorts(rules, rng), [frozenset(names)], names
    assert cohorts.keep(names) == sorted(names)
    cohorts.open(names)
    cohorts.users = frozenset(names)
    for tree in range(trees):
        if folder is not None and tree % 7 == 6:
            cohorts, running = through_file(folder, cohorts, rules, rng), sorted(cohorts.running)
        alive = names[min(gone, tree // 10) :]
        away = set(rng.choice(alive, int(lost * len(alive)), replace=False).tolist())
        there = [name for name in alive if name not in away]
        ordered = select({name: UserStanding() for name in there}, running, rng)
        running = cohorts.begin(ordered, sorted(away))
        while running:
            came = [name for name in running if rng.random() < 0.95]
            kept = cohorts.keep(came)
            if kept is None:
                break
            assert set(kept) <= set(came)
            cohorts.open(kept)
            opened.append(frozenset(kept))
            if kept == running:
                break
            running = kept
        running = running or []
    return opened


def through_file(folder: Path, cohorts: Cohorts, rules: Rules, rng: np.random.Generator) -> Cohorts:
    """Keep cohorts in a file, and return what it has of them."""
    keeper = Keeper(folder / "edge.checkpoint", party="edge")
    DomainFile(keeper, "edge", "0" * 32, {}).write(cohorts)
    known = DomainFile(keeper, "edge", "0" * 32, {}).read(rules, rng)
    assert (known.users, known.groups, known.running) == (cohorts.users, cohorts.groups, cohorts.running)
    return known


@pytest.mark.parametrize("lost", [0.1, 0.3])
def test_no_combination_of_all_sums_shows_fewer_than_three_users_where_training_goes_on_from_files(lost, tmp_path):
    for seed, count in enumerate((6, 9, 15, 22)):
        opened = playing(count, 60, lost, seed, folder=tmp_path)
        assert not singled_out(opened)


def test_standings_go_on_from_the_file(tmp_path):
    keeper, cohorts = Keeper(tmp_path / "edge.checkpoint", party="edge"), begun()
    DomainFile(keeper, "edge", "0" * 32, {"u1": UserStanding(called=5, lost=2)}).write(cohorts)
    standings = {"u1": UserStanding(), "u2": UserStanding()}
    DomainFile(keeper, "edge", "0" * 32, standings).read(Rules(), np.random.default_rng(0))
    assert standings == {"u1": UserStanding(called=5, lost=2), "u2": UserStanding()}


@pytest.mark.parametrize("gone", [0, 8])
@pytest.mark.parametrize("lost", [0.1, 0.3])
def test_no_combination_of_all_sums_of_a_long_job_shows_fewer_than_three_users(lost, gone):
    """The server, with all sums of a domain: numbers of users that never change follow for no user, and no two."""
    for seed, count in enumerate((6, 9, 15, 22)):
        opened = playing(count, 100, lost, seed, gone=gone if count > 10 else 0)
        assert min(map(len, opened)) >= 3
        assert not singled_out(opened)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(3, 14), lost=st.floats(0, 0.5), seed=st.integers(0, 2**32), most=st.sampled_from([None, 3, 6, 9]),
    gone=st.integers(0, 6),
)  # fmt: skip
def test_cohorts_isolate_nobody_however_users_come_and_go(count, lost, seed, most, gone):
    opened = playing(count, 60, lost, seed, most, min(gone, count - 3))
    assert not singled_out(opened)


def found_with(colluding: Iterable[str], opened: Iterable[frozenset[str]]) -> bool:
    """Whether the server finds another user's sums with those who tell it their own vectors."""
    rest = [cohort - frozenset(colluding) for cohort in opened]
    users = sorted(frozenset().union(*rest))
    rows = reduced([[int(name in cohort) for name in users] for cohort in set(rest)])
    return any(len(reduced([row[:k] + row[k + 1 :] for row in rows])) < len(rows) for k in range(len(users)))


@pytest.mark.parametrize(("group_size", "count"), [(4, 13), (5, 12), (6, 14)])
def test_with_groups_of_some_size_two_users_fewer_find_nobody_and_all_but_one_find_the_last(group_size, count):
    opened = playing(count, 40, 0.2, 0, group_size=group_size)
    names = sorted(opened[0])
    groups = min((c for c in opened), key=len)
    assert len(groups) >= group_size
    rng = np.random.default_rng(0)
    for _ in range(40):
        assert not found_with(rng.choice(names, group_size - 2, replace=False).tolist(), opened)
    assert found_with(sorted(groups)[:-1], opened)


def test_by_default_one_user_finds_nobody_and_two_may():
    opened = playing(9, 40, 0.2, 0)
    names = sorted(opened[0])
    assert not any(found_with([name], opened) for name in names)
    assert any(found_with(pair, opened) for pair in combinations(names, 2))


def test_the_attack_finds_users_where_cohorts_are_those_who_came():
    """What sums of all who are there would show: single users, after some trees with others lost in each."""
    rng = np.random.default_rng(0)
    names = [f"u{k}" for k in range(15)]
    whole = [frozenset(names)]
    for _ in range(16):
        whole.append(whole[0] - set(rng.choice(names, 4, replace=False).tolist()))
    assert singled_out(whole)


@pytest.mark.parametrize(("count", "lost"), [(15, 0.3), (15, 0.1), (30, 0.3), slow(100, 0.2)])
def test_a_domain_gives_sums_in_every_tree_however_long_the_job(count, lost):
    """Others are lost in each of 200 trees; fewer users than there are groups, so that one is whole."""
    rng = np.random.default_rng(1)
    names = [f"u{k}" for k in range(count)]
    cohorts, running, sizes = Cohorts(Rules(), rng), names, []
    cohorts.open(names)
    for _ in range(200):
        away = set(rng.choice(names, int(lost * count), replace=False).tolist())
        ordered = select({n: UserStanding() for n in names if n not in away}, running, rng)
        running = cohorts.keep(cohorts.begin(ordered, sorted(away)) or []) or []
        sizes.append(len(running))
        if running:
            cohorts.open(running)
    assert min(sizes) >= 3
    assert np.mean(sizes) >= 0.9 * (1 - lost) ** 3 * count


def begun(count=12, most=None, seed=0):
    cohorts = Cohorts(Rules(most=most), np.random.default_rng(seed))
    cohorts.open(NAMES[:count])
    return cohorts


def test_groups_are_of_three_or_more_and_have_everybody_of_the_first_sum():
    for count in range(3, 13):
        groups = begun(count).groups
        assert min(map(len, groups)) >= 3
        assert sorted(name for group in groups for name in group) == sorted(NAMES[:count])


def test_groups_are_dealt_by_lot():
    assert len({frozenset(begun(seed=seed).groups) for seed in range(10)}) == 10


def test_a_tree_goes_on_with_the_whole_groups_of_those_left():
    cohorts = begun()
    broken, *whole = cohorts.groups
    came = set(NAMES) - {min(broken)}
    assert cohorts.keep(sorted(came)) == sorted(name for group in whole for name in group)
    assert cohorts.keep(sorted(broken)[:2]) is None
    assert cohorts.keep(NAMES) == sorted(NAMES)


def test_a_tree_begins_with_all_who_are_there_while_that_may_be():
    cohorts = begun()
    away = {min(group) for group in cohorts.groups[:3]}
    there = [name for name in NAMES if name not in away]
    assert cohorts.begin(there, sorted(away)) == sorted(
        there
    )  # one of two such cohorts; three users are in whole groups


def test_a_domain_is_dealt_anew_once_no_group_is_whole():
    cohorts = begun(12)
    for tree in range(2):  # then no room is left for cohorts of other users
        away = {sorted(group)[tree] for group in cohorts.groups}
        cohorts.open(cohorts.begin([name for name in NAMES if name not in away], sorted(away)))
    lost = {sorted(group)[k] for k, group in zip((0, 1, 2, 0), cohorts.groups, strict=True)}
    cohort = cohorts.begin([name for name in NAMES if name not in lost])
    assert len(cohort) == 8
    assert cohorts.epochs == 1
    assert not singled_out([*cohorts.opened.independent, *cohorts.groups])


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


def test_spare_users_take_the_place_of_lost_ones():
    """Rather than fewer users than there might be."""
    cohorts = begun(12, most=6)
    first = cohorts.begin(NAMES)
    cohorts.open(first)
    away = [first[0]]
    cohort = cohorts.begin([*first[1:], *sorted(set(NAMES) - set(first))], away)
    assert len(cohort) == 6
    assert first[0] not in cohort


def chosen(standings, running=(), seed=0):
    return select(standings, running, np.random.default_rng(seed))


def test_running_users_go_first_then_those_who_were_lost_least():
    standings = {
        "lost often": UserStanding(called=4, lost=3),
        "lost once": UserStanding(called=4, lost=1),
        "never called": UserStanding(),
        "running": UserStanding(called=9, lost=9),
    }
    for seed in range(5):
        assert chosen(standings, ["running"], seed=seed) == ["running", "never called", "lost once", "lost often"]
        assert chosen(standings, seed=seed)[0] == "never called"


def test_ties_are_broken_by_lot():
    standings = {name: UserStanding() for name in NAMES}
    assert len({tuple(chosen(standings, seed=seed)) for seed in range(5)}) == 5


def test_most_users_are_the_first_of_the_order():
    rules = Rules(most=4)
    assert Cohorts(rules, np.random.default_rng(0)).begin(NAMES) == sorted(NAMES[:4])
    assert Cohorts(rules, np.random.default_rng(0)).begin(NAMES[:3]) == NAMES[:3]
    assert Cohorts(rules, np.random.default_rng(0)).begin(NAMES[:2]) is None


# ---------------------------------------------------------------- combinations of many sums


def singled_out(cohorts: Iterable[frozenset[str]]) -> bool:
    """Whether a combination of these cohorts' sums is of one user or two, by rank over the integers modulo a prime."""
    users = sorted(frozenset().union(*cohorts))
    rows = reduced([[int(name in cohort) for name in users] for cohort in set(cohorts)])
    pairs = [*combinations(range(len(users)), 2), *((k, k) for k in range(len(users)))]
    return any(len(reduced([[x for k, x in enumerate(row) if k not in p] for row in rows])) < len(rows) for p in pairs)


def reduced(rows: list[list[int]], prime: int = 2**31 - 1) -> list[list[int]]:
    """Return independent rows with the same combinations."""
    rows, found = [row[:] for row in rows], 0
    for column in range(len(rows[0])):
        pivot = next((k for k in range(found, len(rows)) if rows[k][column] % prime), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        inverse = pow(rows[found][column], -1, prime)
        for k in range(found + 1, len(rows)):
            factor = rows[k][column] * inverse
            if factor:
                rows[k] = [(a - factor * b) % prime for a, b in zip(rows[k], rows[found], strict=True)]
        found += 1
    return rows[:found]


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
