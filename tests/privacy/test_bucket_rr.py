"""The channel's statistical tests fix key and seed; false-alarm rates are what they would be with others."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from noise_keys import keep_key
from treaty.errors import ConfigError
from treaty.privacy import randomised_response
from treaty.privacy.randomised_response import BucketCost, BucketLedger, RandomisedColumn, randomise_buckets

SIZES = pytest.mark.parametrize("size", [2, 3, 17, 256])


def chances(size, epsilon):
    """p and r of the channel."""
    total = math.exp(epsilon) + size - 1
    return math.exp(epsilon) / total, 1 / total


def words(*pairs):
    return np.array(pairs, np.uint64)


def likelihood(codes, noisy, size, epsilon):
    """Return how likely counts as far from randomised response's are."""
    p, r = chances(size, epsilon)
    counts = np.bincount(codes.astype(np.intp) * size + noisy, minlength=size * size).reshape(size, size)
    expected = np.bincount(codes, minlength=size)[:, None] * np.where(np.eye(size, dtype=bool), p, r)
    assert expected.min() > 5
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), size * (size - 1))


def test_chances_add_up_and_are_those_of_no_noise_where_there_is_none():
    for size, epsilon in [(2, 1e-12), (3, 0.1), (256, 4.0), (16, 800.0)]:
        r, excess = randomised_response.chances(size, epsilon)
        assert size * r + excess == pytest.approx(1.0, rel=1e-12)
        assert excess == pytest.approx(r * math.expm1(epsilon) if epsilon < 700 else 1.0, rel=1e-12)
    assert randomised_response.chances(16, math.inf) == randomised_response.chances(1, 0.5) == (0.0, 1.0)


@SIZES
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_channel_has_the_chances_of_randomised_response(size, epsilon):
    codes = np.repeat(np.arange(size, dtype=np.uint8), max(4_000, 100_000 // size))
    drawn = np.random.default_rng(size).integers(0, 2**64, (len(codes), 2), np.uint64)
    noisy = randomise_buckets(codes, size, epsilon, drawn)
    assert noisy.dtype == np.uint8
    assert likelihood(codes, noisy, size, epsilon) > 1e-6  # false alarm: one seed in a million


@SIZES
def test_the_ledgers_own_noise_has_the_chances_of_randomised_response(tmp_path, size):
    keep_key(tmp_path / "a.noise", bytes(range(32)))
    codes = np.repeat(np.arange(size, dtype=np.uint8), max(4_000, 50_000 // size))
    noisy, _ = BucketLedger(tmp_path / "a.noise").noisy(
        np.stack([codes, codes], axis=1),
        [RandomisedColumn("a", size, 4.0, b""), RandomisedColumn("b", size, 1.0, b"")],
        rows_of(codes),
    )
    for column, epsilon in zip(noisy.T, (4.0, 1.0), strict=True):
        assert likelihood(codes, column, size, epsilon) > 1e-6  # false alarm: one key in a million


# ---------------------------------------------------------------- the integers compared


def limit_of(size, epsilon):
    """Find the least first word at which a bucket stays."""
    low, high = 0, 2**64 - 1
    while low < high:
        middle = (low + high) // 2
        stays = randomise_buckets(np.zeros(1, np.uint8), size, epsilon, words((middle, 0)))[0] == 0
        low, high = (low, middle) if stays else (middle + 1, high)
    return low


@SIZES
@pytest.mark.parametrize("epsilon", [1e-6, 1.0, 4.0, 40.0])
def test_words_below_the_limit_change_and_others_do_not(size, epsilon):
    limit, code = limit_of(size, epsilon), size // 2
    with localcontext(prec=60):
        odds = (size - 1) * (-Decimal(epsilon)).exp()
        exact = odds / (1 + odds) * 2**64
    assert exact <= limit <= exact * (1 + Decimal(2) ** -48) + 1
    drawn = words((0, 7), (limit - 1, 7), (limit, 7), (2**64 - 1, 7))
    noisy = randomise_buckets(np.full(4, code, np.uint8), size, epsilon, drawn)
    assert [*(noisy == code)] == [False, False, True, True]


@SIZES
def test_the_second_word_tells_which_of_the_other_buckets(size):
    others = size - 1
    residues = np.array([*range(others), 2**64 - 1], np.uint64)
    for code in {0, size // 2, size - 1}:
        drawn = np.stack([np.zeros(len(residues), np.uint64), residues], axis=1)
        noisy = randomise_buckets(np.full(len(residues), code, np.uint8), size, 1.0, drawn)
        expected = [bucket for bucket in range(size) if bucket != code]
        assert noisy.tolist() == [*expected, expected[(2**64 - 1) % others]]


@settings(deadline=None, max_examples=150)
@given(epsilon=st.floats(1e-6, 40.0), size=st.integers(2, 256))
@example(epsilon=60.0, size=2)
@example(epsilon=1000.0, size=17)
def test_no_value_costs_more_than_epsilon(epsilon, size):
    limit, others = limit_of(size, epsilon), size - 1
    stays = Fraction(2**64 - limit, 2**64)
    fewest, most = 2**64 // others, -(-(2**64) // others)  # second words that lead to one of the other buckets
    rarest, commonest = (Fraction(limit * count, 2**128) for count in (fewest, most))
    assert rarest > 0
    with localcontext(prec=60):
        bound = Fraction(Decimal(epsilon).exp())
    for one, other in ((stays, rarest), (commonest, stays), (commonest, rarest)):
        assert one <= bound * other


@pytest.mark.parametrize(("size", "epsilon"), [(1, 1.0), (1, math.inf), (2, math.inf), (256, math.inf)])
def test_one_bucket_and_no_noise_leave_buckets_as_they_are(size, epsilon):
    codes = np.arange(size, dtype=np.uint8)
    np.testing.assert_array_equal(randomise_buckets(codes, size, epsilon, np.zeros((size, 2), np.uint64)), codes)


# ---------------------------------------------------------------- the ledger

AGE = RandomisedColumn("age", 9, 1.5, b"edges")
INCOME = RandomisedColumn("income", 4, 2.5, b"others")


def rows_of(codes):
    return np.arange(len(codes))


def table(rows=3_000):
    rng = np.random.default_rng(0)
    return np.stack([rng.integers(0, AGE.size, rows), rng.integers(0, INCOME.size, rows)], axis=1).astype(np.uint8)


def drawn(folder, *columns, codes=None):
    codes = table()[:, [0] * len(columns)] if codes is None else codes
    return BucketLedger(folder).noisy(codes, columns, rows_of(codes))


def independent(first, second, rows, column, other=None):
    """Whether noisy buckets agree as often as two draws of equal values do; false alarm: 10^-10."""
    (p, r), (q, s) = (chances(c.size, c.epsilon) for c in (column, other or column))
    both = p * q + (column.size - 1) * r * s
    return abs(np.count_nonzero(first == second) - rows * both) < 6.5 * math.sqrt(rows * both * (1 - both))


@pytest.mark.parametrize("folder", [True, False])
def test_the_same_rows_have_the_same_noise_and_are_paid_once(tmp_path, folder):
    ledger, codes = BucketLedger(tmp_path if folder else None), table()
    first, cost = ledger.noisy(codes, [AGE, INCOME], rows_of(codes))
    assert 0.1 < np.mean(first == codes) < 0.9
    for numbers in (rows_of(codes), rows_of(codes)[::-1] + 7):  # wherever they are in the party's own file
        again = BucketLedger(tmp_path) if folder else ledger
        noisy, ever = again.noisy(codes, [AGE, INCOME], numbers)
        np.testing.assert_array_equal(noisy, first)
        assert ever == cost


def test_a_row_that_is_there_several_times_is_randomised_once(tmp_path):
    codes, rows = table(), np.tile(np.arange(1_500), 2)
    noisy, _ = BucketLedger(tmp_path).noisy(codes[rows], [AGE, INCOME], rows)
    np.testing.assert_array_equal(noisy[:1_500], noisy[1_500:])
    assert np.mean(noisy[:, 0] != codes[rows, 0]) > 0.1


@pytest.mark.parametrize("change", ["order", "one-value", "fewer-rows", "copies", "persons"])
def test_other_rows_or_values_are_paid_anew_and_all_of_them_drawn_anew(tmp_path, change):
    n, ledger = 40_000, BucketLedger(tmp_path)
    codes = np.full((n, 1), 3, np.uint8)
    codes[:2] = [[1], [2]]
    first, _ = ledger.noisy(codes, [AGE], np.arange(n))
    numbers, changed = np.arange(n), codes.copy()
    if change == "order":
        changed[:2] = codes[1::-1]
    elif change == "one-value":
        changed[7] = 4
    elif change == "fewer-rows":
        changed, numbers = changed[:-1], numbers[:-1]
    elif change == "copies":
        numbers = numbers.copy()
        numbers[-1] = n - 2  # as many rows of the same values, of which two are one
    second, cost = ledger.noisy(changed, [AGE], numbers, persons=b"others" if change == "persons" else b"")
    assert cost.ever == {"age": 3.0}
    rows = slice(8, n - 8)  # of these nothing has changed
    assert independent(first[rows], second[rows], n - 16, AGE)
    back, cost = ledger.noisy(codes, [AGE], np.arange(n))
    np.testing.assert_array_equal(back, first)
    assert cost.ever == {"age": 3.0}


def test_what_many_orders_of_a_table_tell_together_is_in_the_ledger(tmp_path):
    ledger, codes = BucketLedger(tmp_path), table(300)[:, :1]
    rng, tally = np.random.default_rng(0), np.zeros((300, AGE.size), int)
    for _ in range(40):
        order = rng.permutation(300)
        noisy, cost = ledger.noisy(codes[order], [AGE], rows_of(codes))
        tally[order, noisy[:, 0]] += 1
    assert np.mean(tally.argmax(axis=1) == codes[:, 0]) > 0.8  # noise does average out: it has to be paid for
    assert cost.ever == {"age": 40 * AGE.epsilon}


def test_noise_does_not_depend_on_the_columns_beside_it(tmp_path):
    codes = table()
    both, _ = drawn(tmp_path, AGE, INCOME, codes=codes)
    swapped, _ = drawn(tmp_path, INCOME, AGE, codes=codes[:, ::-1])
    np.testing.assert_array_equal(swapped[:, ::-1], both)
    np.testing.assert_array_equal(drawn(tmp_path, INCOME, codes=codes[:, 1:])[0], both[:, 1:])


@pytest.mark.parametrize(
    "other",
    [
        replace(AGE, name="height"),
        replace(AGE, epsilon=1.25),
        replace(AGE, edges=b"moved"),
        replace(AGE, size=10),
        None,
    ],
    ids=["column", "epsilon", "edges", "size", "key"],
)
def test_noise_of_anything_else_is_independent(tmp_path, other):
    codes = np.full((40_000, 1), 3, np.uint8)
    first, _ = drawn(tmp_path / "one", AGE, codes=codes)
    second, _ = drawn(tmp_path / ("other" if other is None else "one"), other or AGE, codes=codes)
    assert independent(first, second, len(codes), AGE, other)


def test_no_rows_have_no_noise_and_are_entered_all_the_same(tmp_path):
    noisy, spent = drawn(tmp_path, AGE, codes=np.zeros((0, 1), np.uint8))
    assert noisy.shape == (0, 1)
    assert spent.ever == {"age": 1.5}


def test_draws_of_a_column_add_up_and_stay(tmp_path):
    assert drawn(tmp_path, AGE, INCOME)[1] == BucketCost({"age": 1.5, "income": 2.5}, {"age": 1.5, "income": 2.5})
    assert drawn(tmp_path, AGE, INCOME)[1].ever == {"age": 1.5, "income": 2.5}  # the same draw
    moved = replace(AGE, edges=b"moved")
    assert drawn(tmp_path, moved)[1] == BucketCost({"age": 1.5}, {"age": 3.0})
    dearer = replace(AGE, epsilon=4.0)
    ledger = BucketLedger(tmp_path)
    codes = table()[:, :1]
    assert ledger.noisy(codes, [dearer], rows_of(codes))[1] == BucketCost({"age": 4.0}, {"age": 7.0})
    assert ledger.noisy(codes, [AGE], rows_of(codes))[1] == BucketCost({"age": 1.5}, {"age": 7.0})
    spent = drawn(tmp_path, AGE, INCOME)[1]
    assert (sum(spent.now.values()), sum(spent.ever.values())) == (4.0, 9.5)


def test_no_noise_costs_infinitely_for_ever(tmp_path):
    plain = replace(AGE, epsilon=math.inf)
    codes = table()[:, :1]
    noisy, spent = drawn(tmp_path, plain, codes=codes)
    np.testing.assert_array_equal(noisy, codes)
    assert sum(spent.now.values()) == math.inf
    assert drawn(tmp_path, AGE)[1].ever == {"age": math.inf}


def test_a_ledger_without_folder_lasts_as_long_as_its_object():
    codes = table()
    ledgers = [BucketLedger(None), BucketLedger(None)]
    first, second = (ledger.noisy(codes, [AGE, INCOME], rows_of(codes))[0] for ledger in ledgers)
    assert 0.1 < np.mean(first != second) < 0.9
    np.testing.assert_array_equal(ledgers[0].noisy(codes, [AGE, INCOME], rows_of(codes))[0], first)


def test_ledgers_opened_together_share_a_key(tmp_path):
    codes = table()
    one, other = BucketLedger(tmp_path), BucketLedger(tmp_path)
    noisy, _ = one.noisy(codes, [AGE, INCOME], rows_of(codes))
    np.testing.assert_array_equal(other.noisy(codes, [AGE, INCOME], rows_of(codes))[0], noisy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "ledger"]
    assert len(one.entries()) == len(other.entries()) == 2


def test_key_and_draws_are_readable_by_their_owner_alone(tmp_path):
    drawn(tmp_path / "shop.noise", AGE, INCOME)
    assert (tmp_path / "shop.noise").stat().st_mode & 0o777 == 0o700
    files = [*(tmp_path / "shop.noise").iterdir()]
    assert sorted(file.name for file in files) == ["key", "ledger"]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda folder: (folder / "key").write_bytes(bytes(31)),
            "expected a noise key of Treaty, got a file of another kind",
        ),
        (lambda folder: keep_key(folder, bytes(31)), "the key of the noise, key, is of another ledger"),
        (lambda folder: (folder / "key").unlink(), "the key of the noise, key, is missing"),
        (lambda folder: (folder / "ledger").write_bytes(b"no ledger" * 999), "privacy ledger is damaged"),
        (lambda folder: cut_off(folder / "ledger"), "privacy ledger is damaged"),
    ],
    ids=["no-key-file", "short-key", "no-key", "garbage", "cut-off"],
)
def test_a_damaged_ledger_is_refused(tmp_path, damage, text):
    folder = tmp_path / "shop.noise"
    drawn(folder, AGE)
    damage(folder)
    with pytest.raises(ConfigError, match=text):
        BucketLedger(folder)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:4096])


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot use the privacy ledger"):
        BucketLedger(tmp_path / "file" / "noise")


# ---------------------------------------------------------------- what it cost, in words


@pytest.mark.parametrize(
    ("now", "ever", "text"),
    [
        ({"a": 4.0, "b": 4.0}, {"a": 4.0, "b": 9.0}, "epsilon 4 per value and 8 per person over 2 columns; 13 per"),
        ({"a": 1.0, "b": 2.5}, {"a": 1.0, "b": 2.5}, "epsilon 1 to 2.5 per value and 3.5 per person over 2 columns;"),
        ({"a": math.inf}, {"a": math.inf}, "epsilon inf per value and inf per person over 1 columns; inf per person"),
        ({}, {}, "epsilon 0 per value and 0 per person over 0 columns; 0 per person with all draws of these columns"),
    ],
)  # fmt: skip
def test_the_cost_is_printed_per_value_and_per_person(now, ever, text):
    assert str(BucketCost(now, ever)).startswith(text)
