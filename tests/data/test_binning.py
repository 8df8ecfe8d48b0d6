import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.data.binning import Bins, fit_bins
from treaty.data.table import Schema, Table, to_table
from treaty.errors import ConfigError, DataError

REPOSITORY = Path(__file__).parents[2]


def plain(bins: Bins) -> list:
    """Everything bins hold, as values that compare."""
    parts = [*bins.cuts, *bins.category_bins, bins.n_bins]
    return [bins.schema, bins.has_other, *(None if part is None else part.tolist() for part in parts)]


def real_data(name: str) -> Path:
    for folder in (os.environ.get("TREATY_DATA"), REPOSITORY.parent / "shared" / "data"):
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    pytest.skip(f"real data set {name} is not here; set TREATY_DATA to the folder that has it")


def numeric(*columns: object) -> Table:
    arrays = [np.array(column, dtype=np.float32) for column in columns]
    names = tuple(f"f{i}" for i in range(len(arrays)))
    return Table(Schema(names, (None,) * len(arrays)), arrays, len(arrays[0]))


def categorical(codes: list[float], categories: tuple[str, ...]) -> Table:
    return Table(Schema(("c",), (categories,)), [np.array(codes, dtype=np.float32)], len(codes))


def codes_of(bins: Bins, table: Table) -> list[int]:
    return bins.transform(table)[:, 0].tolist()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.just(np.nan), st.floats(width=32, allow_infinity=False), st.integers(-5, 5)), min_size=1),
    st.integers(2, 12),
)
def test_code_counts_the_cuts_not_above_the_value_and_missing_is_last(values: list[float], max_bin: int) -> None:
    table = numeric(values)
    bins = fit_bins(table, max_bin)
    cuts = bins.cuts[0]
    assert cuts is not None
    n_bins = int(bins.n_bins[0])
    assert n_bins == (0 if np.isnan(values).all() else len(cuts) + 1) <= max_bin
    expected = [n_bins if np.isnan(x) else int((cuts <= np.float32(x)).sum()) for x in values]
    assert codes_of(bins, table) == expected


def test_every_value_is_a_bin_while_there_are_enough_bins() -> None:
    values = np.random.default_rng(0).permutation(np.repeat(np.arange(255), 3))
    bins = fit_bins(numeric(values), 255)
    assert bins.n_bins.tolist() == [255]
    assert codes_of(bins, numeric(values)) == values.tolist()


def test_255_bins_leave_a_code_for_missing() -> None:
    table = numeric([*range(1000), np.nan])
    bins = fit_bins(table, 255)
    assert bins.n_bins.tolist() == [255]
    assert bins.transform(table)[-1, 0] == 255
    assert bins.transform(table)[:-1, 0].max() == 254


def test_constant_column_is_one_bin_and_all_missing_column_none() -> None:
    bins = fit_bins(numeric([3, 3, 3], [np.nan] * 3))
    assert bins.n_bins.tolist() == [1, 0]
    assert bins.offsets.tolist() == [0, 2, 3]
    assert bins.offsets.dtype == np.int32
    assert bins.transform(numeric([3, -9, np.nan], [1, 2, np.nan])).tolist() == [[0, 0], [0, 0], [1, 0]]


def test_codes_are_rows_of_bytes() -> None:
    codes = fit_bins(numeric([1, 2], [3, 4])).transform(numeric([1, 2], [3, 4]))
    assert codes.dtype == np.uint8
    assert codes.flags.c_contiguous
    assert codes.shape == (2, 2)


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(1)
    table = numeric(*(rng.normal(size=30_000) for _ in range(4)), rng.integers(0, 9, 30_000))
    alone, many = fit_bins(table, 64, threads=1), fit_bins(table, 64, threads=7)
    assert plain(alone) == plain(many) == plain(fit_bins(table, 64))
    assert np.array_equal(alone.transform(table, threads=1), many.transform(table, threads=7))


def test_order_of_rows_changes_no_bin() -> None:
    rng = np.random.default_rng(2)
    values = rng.choice(rng.normal(size=300), 2000)
    assert plain(fit_bins(numeric(values))) == plain(fit_bins(numeric(rng.permutation(values))))


def test_categories_that_occur_have_a_bin_each_and_others_are_missing() -> None:
    bins = fit_bins(categorical([2, 0, 2, np.nan], ("a", "b", "c", "d")))
    assert bins.n_bins.tolist() == [2]
    assert bins.has_other == (False,)
    assert bins.cuts == (None,)
    unseen = 4
    assert codes_of(bins, categorical([0, 1, 2, 3, unseen, np.nan], ("a", "b", "c", "d"))) == [
        0,
        2,
        1,
        2,
        2,
        2,
    ]


def test_rare_undeclared_and_unseen_categories_share_the_last_bin() -> None:
    names = ("a", "b", "c", "d", "never")
    training = categorical([3, 3, 3, 1, 1, 0, 2, np.nan], names)  # a and c tie for the last place
    bins = fit_bins(training, max_categories=3)
    assert bins.n_bins.tolist() == [3]
    assert bins.has_other == (True,)
    b, d, other, missing = 0, 1, 2, 3
    assert codes_of(bins, categorical([0, 1, 2, 3, 4, 5, np.nan], names)) == [
        other,
        b,
        other,
        d,
        other,
        other,
        missing,
    ]


def test_among_equally_frequent_categories_the_lower_code_keeps_its_bin() -> None:
    counts = [1 + code * 7 % 3 for code in range(300)]  # 1, 2 or 3 rows each: nearly all of them tie
    table = categorical([code for code in range(300) for _ in range(counts[code])], tuple(f"c{i}" for i in range(300)))
    kept = sorted(sorted(range(300), key=lambda code: (-counts[code], code))[:149])
    category_bins = fit_bins(table, max_categories=150).category_bins[0]
    assert category_bins is not None
    assert np.flatnonzero(category_bins < 149).tolist() == kept


def test_as_many_categories_as_bins_need_no_other() -> None:
    bins = fit_bins(categorical([0, 1, 2], ("a", "b", "c")), max_categories=3)
    assert bins.has_other == (False,)
    assert bins.n_bins.tolist() == [3]


@pytest.mark.parametrize("n_categories", [254, 255, 256, 32_767, 40_000])
def test_every_category_has_a_bin_whatever_max_bin_is(n_categories: int) -> None:
    table = categorical([*range(n_categories), np.nan], tuple(f"c{i}" for i in range(n_categories)))
    bins, most = fit_bins(table, 2), min(n_categories, 32_767)
    assert bins.n_bins[0] == most
    assert bins.has_other == (n_categories > most,)
    codes = bins.transform(table)
    # one byte a code wherever it suffices, with the one for missing values
    assert codes.dtype == (np.uint8 if n_categories <= 255 else np.uint16)
    assert codes[: most - 1, 0].tolist() == list(range(most - 1))
    assert codes[-2:, 0].tolist() == [most - 1, most]


def test_all_missing_categorical_column_has_no_bins() -> None:
    table = categorical([np.nan, np.nan], ("a",))
    bins = fit_bins(table)
    assert bins.n_bins.tolist() == [0]
    assert bins.transform(table).tolist() == [[0], [0]]


def test_table_without_features_has_no_codes() -> None:
    table = Table(Schema((), ()), [], 5)
    bins = fit_bins(table)
    assert bins.transform(table).shape == (5, 0)
    assert bins.offsets.tolist() == [0]


@pytest.mark.parametrize("max_bin", [1, 256, 0, -3, 2.5, True, "32", None])
def test_max_bin_out_of_range_is_refused(max_bin: object) -> None:
    with pytest.raises(ConfigError, match=r"max_bin between 2 and 255"):
        fit_bins(numeric([1, 2]), max_bin)  # type: ignore[arg-type]


def test_table_of_another_schema_is_refused() -> None:
    with pytest.raises(DataError, match=r"schema of training"):
        fit_bins(numeric([1, 2])).transform(categorical([0, 1], ("a", "b")))


def test_give_me_some_credit_keeps_its_zero_inflated_features() -> None:
    frame = pd.read_parquet(real_data("credit1.parquet")).drop(columns=["id", "SeriousDlqin2yrs"])
    table = to_table(frame)
    bins = fit_bins(table, max_bin=16)
    codes = bins.transform(table)
    sizes = {name: np.bincount(codes[:, f], minlength=bins.n_bins[f] + 1) for f, name in enumerate(frame)}
    for name, size in sizes.items():
        assert 10 <= len(size) - 1 <= 16, name
        assert size[-1] == frame[name].isna().sum()
        assert (size[:-1] > 0).all()
    # 84 % of the rows are 0 here, and 1, 2, 3, ... late payments still have bins of their own
    late = sizes["NumberOfTime30-59DaysPastDueNotWorse"]
    assert late[:4].tolist() == frame["NumberOfTime30-59DaysPastDueNotWorse"].value_counts().sort_index()[:4].tolist()
    # a feature without heavy ties is spread evenly
    assert sizes["DebtRatio"][:-1].max() < 1.1 * len(frame) / 16
