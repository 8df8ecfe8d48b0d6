from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.data.binning import pad_cuts, tie_aware_cuts, write_codes

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
LARGEST = float(np.finfo(np.float32).max)
AWKWARD = [
    0.0,
    -0.0,
    SMALLEST,
    -SMALLEST,
    2 * SMALLEST,
    1.0,
    float(np.nextafter(np.float32(1), np.float32(2))),
    -1.0,
]

values_of_any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
few_distinct = st.sampled_from([*AWKWARD, LARGEST, -LARGEST])


@st.composite
def columns(draw: st.DrawFn) -> np.ndarray:
    """Runs of equal values, so that heavy ties are common; shuffled, -0.0 beside 0.0."""
    value = st.one_of(few_distinct, values_of_any_size, st.integers(-20, 20).map(float))
    runs = draw(st.lists(st.tuples(value, st.integers(1, 30)), min_size=1, max_size=60))
    column = np.repeat([v for v, _ in runs], [n for _, n in runs]).astype(np.float32)
    return draw(st.randoms(use_true_random=False).map(lambda r: r.sample(list(column), len(column))).map(np.array))


def literal_bins(column: np.ndarray, q: int) -> list[list[float]]:
    """The rule, word by word: the distinct values of each bin, ascending."""
    counts: dict[float, int] = {}
    for value in map(float, column):
        counts[value] = counts.get(value, 0) + 1  # -0.0 and 0.0 are one key
    distinct, n = sorted(counts), len(column)
    if len(distinct) <= q:
        return [[value] for value in distinct]
    heavy = {value for value in distinct if counts[value] > Fraction(n, q)}
    bins: list[list[float]] = []
    bins_left = q - len(heavy)
    placed = 0
    rows_of_others = sum(counts[value] for value in distinct if value not in heavy)
    target = held = Fraction(0)
    is_open = False
    for value in distinct:
        if value in heavy:
            bins.append([value])
            is_open = False
            continue
        if is_open:
            bins[-1].append(value)
        elif bins_left > 0:
            target = Fraction(rows_of_others - placed, bins_left)
            bins_left -= 1
            held = Fraction(0)
            bins.append([value])
            is_open = True
        else:
            bins[-1].append(value)
        held += counts[value]
        placed += counts[value]
        if held >= target:
            is_open = False
    return bins


def literal_cuts(bins: list[list[float]]) -> np.ndarray:
    cuts = []
    for before, after in pairwise(bins):
        lower, upper = before[-1], after[0]
        middle = np.float32((lower + upper) / 2)
        cuts.append(middle if middle > lower else np.float32(upper))
    return np.array(cuts, dtype=np.float32)


def cuts_of(column: np.ndarray, q: int) -> np.ndarray:
    return tie_aware_cuts(np.sort(column), q)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(columns(), st.integers(2, 40))
def test_cuts_equal_the_literal_rule(column: np.ndarray, q: int) -> None:
    assert cuts_of(column, q).tolist() == literal_cuts(literal_bins(column, q)).tolist()


@pytest.mark.parametrize("q", [2, 3, 16, 32, 254, 255])
def test_cuts_equal_the_literal_rule_on_many_rows(q: int) -> None:
    rng = np.random.default_rng(q)
    column = np.concatenate([rng.exponential(size=3000), np.zeros(1500), np.full(400, 0.7), rng.integers(0, 300, 2000)])
    column = column.astype(np.float32)
    assert cuts_of(column, q).tolist() == literal_cuts(literal_bins(column, q)).tolist()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(columns(), st.integers(2, 40))
def test_cuts_ascend_and_are_fewer_than_max_bin(column: np.ndarray, q: int) -> None:
    cuts = cuts_of(column, q)
    assert len(cuts) < q
    assert (cuts[:-1] < cuts[1:]).all()
    assert not np.signbit(cuts[cuts == 0]).any()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(columns(), st.integers(2, 40))
def test_no_bin_is_empty_and_every_cut_lies_above_the_lower_value(column: np.ndarray, q: int) -> None:
    cuts = cuts_of(column, q)
    assert len(np.unique(np.searchsorted(cuts, column, side="right"))) == len(cuts) + 1


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(columns(), st.integers(2, 40))
def test_a_value_of_more_than_its_share_of_rows_has_a_bin_of_its_own_while_bins_last(
    column: np.ndarray, q: int
) -> None:
    heavy = {v for v in set(map(float, column)) if np.count_nonzero(column == v) * q > len(column)}
    opened_as_heavy = [values[0] for values in literal_bins(column, q) if values[0] in heavy]
    assert sorted(heavy) == opened_as_heavy
    codes = np.searchsorted(cuts_of(column, q), column, side="right")
    for value in heavy:  # nothing below shares its bin; above, only what came when no bin was left
        assert not (column[codes == codes[column == value][0]] < value).any()


def test_heavy_zero_does_not_swallow_the_bins_of_the_rest() -> None:
    column = np.concatenate([np.zeros(9000), np.arange(1, 1001)]).astype(np.float32)
    codes = np.searchsorted(cuts_of(column, 11), column, side="right")
    assert np.bincount(codes).tolist() == [9000] + [100] * 10


def test_a_value_of_exactly_its_share_of_rows_is_not_heavy() -> None:
    assert cuts_of(np.array([1, 2, 2, 3], dtype=np.float32), 2).tolist() == [2.5]


def test_last_values_join_the_bin_before_when_no_bin_is_left() -> None:
    # q = 2, n = 10: 5 holds 6 rows and is heavy, so one bin is left for 1, 2 and 8, 9; 5 closes it.
    column = np.array([1, 2, 5, 5, 5, 5, 5, 5, 8, 9], dtype=np.float32)
    assert cuts_of(column, 2).tolist() == [3.5]


def test_cut_between_adjacent_floats_is_the_upper_one_where_the_midpoint_rounds_down() -> None:
    even = np.float32(1)
    odd = np.nextafter(even, np.float32(2))
    assert cuts_of(np.array([even, odd]), 2)[0] == odd
    next_even = np.nextafter(odd, np.float32(2))
    assert cuts_of(np.array([odd, next_even]), 2)[0] == next_even


def test_cut_between_the_largest_floats_does_not_overflow() -> None:
    largest = np.float32(LARGEST)
    below = np.nextafter(largest, np.float32(0))
    assert cuts_of(np.array([below, largest]), 2)[0] in (below, largest)
    assert cuts_of(np.array([-largest, largest]), 2)[0] == 0


def test_order_of_rows_does_not_show_in_the_bits_of_the_cuts() -> None:
    rng = np.random.default_rng(3)
    column = rng.choice(np.array([-0.0, 0.0, SMALLEST, -SMALLEST, 3, 4], dtype=np.float32), 500)
    expected = cuts_of(column, 3).tobytes()
    for _ in range(20):
        assert cuts_of(rng.permutation(column), 3).tobytes() == expected


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(columns(), st.lists(values_of_any_size, max_size=255, unique=True))
def test_code_is_the_number_of_cuts_not_above_the_value(column: np.ndarray, cuts: list[float]) -> None:
    ascending = np.unique(np.array(cuts, dtype=np.float32))
    with_missing = np.append(column, np.float32(np.nan))
    codes = np.full((len(with_missing), 3), 77, dtype=np.uint8)
    write_codes(with_missing, pad_cuts(ascending), 255, codes, 1, 0, len(with_missing))
    assert codes[:-1, 1].tolist() == [int(np.count_nonzero(ascending <= value)) for value in column]
    assert codes[-1, 1] == 255
    assert (codes[:, [0, 2]] == 77).all()


def test_codes_are_written_only_in_the_range_asked_for() -> None:
    codes = np.full((10, 1), 77, dtype=np.uint8)
    write_codes(np.arange(10, dtype=np.float32), pad_cuts(np.array([4.5], np.float32)), 2, codes, 0, 3, 6)
    assert codes[:, 0].tolist() == [77, 77, 77, 0, 0, 1, 77, 77, 77, 77]


@pytest.mark.parametrize(("n_cuts", "length"), [(0, 0), (1, 1), (2, 3), (3, 3), (4, 7), (254, 255), (255, 255)])
def test_padding_reaches_the_next_full_search_tree(n_cuts: int, length: int) -> None:
    cuts = np.arange(n_cuts, dtype=np.float32)
    padded = pad_cuts(cuts)
    assert len(padded) == length
    assert padded[:n_cuts].tolist() == cuts.tolist()
    assert np.isposinf(padded[n_cuts:]).all()
