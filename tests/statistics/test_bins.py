"""Bins of columns with weight of evidence: against pandas, on a table with gaps, categories and ties."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.data.table import to_table
from treaty.errors import DataError
from treaty.statistics import ColumnBins, bins_as_columns, bins_of_columns, iv_of, with_labels, woe_bins, woe_of


def credit_like(n: int = 3000, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a table of numbers with gaps, whole numbers, large ids, categories of any number, and labels."""
    rng = np.random.default_rng(seed)
    income, age = rng.lognormal(8, 0.6, n), rng.integers(18, 80, n)
    X = pd.DataFrame(
        {
            "income": np.where(rng.random(n) < 0.1, np.nan, income),
            "age": age,
            "late": np.where(rng.random(n) < 0.002, np.nan, rng.poisson(0.3, n)),
            "account": 2**60 + rng.integers(0, 5000, n) * 2**12,
            "city": pd.Categorical(rng.choice(list("abcdefgh"), n, p=[0.4, 0.3, 0.2, 0.05, 0.03, 0.01, 0.006, 0.004])),
            "constant": 1.0,
            "nothing": np.nan,
        }
    )
    bad = rng.random(n) < 1 / (1 + np.exp(0.03 * age - 0.5 + (np.log(income) - 8)))
    return X, bad.astype(float)


def in_pandas(bins: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    """Count labels by bin, and compute WOE and IV as textbooks do."""
    counts = pd.crosstab(bins, y)
    counts = counts.replace(0, 0.5)
    shares = counts / [np.sum(y == 0), np.sum(y == 1)]
    woe = np.log(shares[0.0] / shares[1.0])
    return pd.DataFrame({"woe": woe, "part": (shares[0.0] - shares[1.0]) * woe})


@pytest.mark.parametrize("monotone", ["auto", "increasing", "decreasing", "none"])
def test_woe_and_iv_are_those_of_pandas(monotone):
    X, y = credit_like()
    table = to_table(X)
    for made in woe_bins({"p": table}, y, monotone=monotone)["p"]:
        assigned = made.assign(table)
        expected = in_pandas(assigned, y)
        np.testing.assert_allclose(made.woe[expected.index], expected.woe, rtol=1e-12)
        assert made.iv == pytest.approx(expected.part.sum(), rel=1e-12)
        assert np.bincount(assigned, minlength=len(made.n_rows)).tolist() == list(made.n_rows)
        np.testing.assert_array_equal(made.transform(table), made.woe[assigned])
        assert len(made.labels) == len(made.n_rows) == len(made.n_bads)


@pytest.mark.parametrize(("monotone", "signs"), [("auto", {1, -1}), ("increasing", {1}), ("decreasing", {-1})])
def test_woe_of_numbers_is_monotone(monotone, signs):
    X, y = credit_like()
    for made in woe_bins({"p": to_table(X)}, y, monotone=monotone)["p"]:
        if made.kind == "numeric":
            steps = np.sign(np.diff(made.woe[: len(made.cuts) + 1]))
            assert len(set(steps)) <= 1, made.column
            assert set(steps) <= signs, made.column
    age = next(made for made in woe_bins({"p": to_table(X)}, y)["p"] if made.column == "age")
    assert np.all(np.diff(age.woe) > 0)  # risk falls with age: "auto" finds the direction


def test_no_bin_has_fewer_rows_than_asked():
    X, _ = credit_like()
    made = {of.column: of for of in bins_of_columns(to_table(X), "p", max_bin=30, min_bin_rows=70)}
    assert all(min(of.n_rows) >= 70 and sum(of.n_rows) == len(X) for of in made.values())
    assert made["income"].alone
    assert made["income"].labels[-1] == "missing"
    late = made["late"]  # few are missing: they are in the fullest bin, which says so
    assert not late.alone
    assert late.n_rows[late.missing] == max(late.n_rows)
    assert late.labels[late.missing].endswith("), missing")
    assert made["city"].groups[made["city"].other] == ("f", "g", "h") or len(made["city"].groups[-1]) > 1
    assert made["constant"].n_rows == (len(X),)
    assert made["nothing"].labels == ["missing"]


def test_rare_categories_that_are_few_together_join_the_rarest_frequent_one():
    X = pd.DataFrame({"c": pd.Categorical(["a"] * 50 + ["b"] * 30 + ["z"] * 2)})
    (made,) = bins_of_columns(to_table(X), "p", min_bin_rows=20)
    assert made.groups == (("a",), ("b", "z"))
    assert made.other == 1


def test_new_rows_unseen_categories_and_missing_values():
    X, y = credit_like()
    made = {of.column: of for of in woe_bins({"p": to_table(X)}, y)["p"]}
    new = to_table(pd.DataFrame({"age": [np.nan, 5, 500], "city": pd.Categorical(["new", None, "a"])}))
    assert made["age"].transform(new).tolist() == [0.0, made["age"].woe[0], made["age"].woe[-1]]  # none was missing
    city = made["city"]
    assert city.transform(new).tolist() == [city.woe[city.other], 0.0, city.woe[0]]
    with pytest.raises(DataError, match="expected a table with column 'income'"):
        made["income"].assign(new)
    with pytest.raises(DataError, match="expected column 'city' to be categorical, got another kind"):
        city.assign(to_table(pd.DataFrame({"city": [1.0]})))


def test_bins_without_labels_have_no_woe():
    X, _ = credit_like()
    with pytest.raises(DataError, match="p: the labels in the bins of column 'income' are not known here"):
        _ = bins_of_columns(to_table(X), "p")[0].woe


@pytest.mark.parametrize("y", [np.zeros(40), np.r_[np.zeros(20), np.full(20, 2.0)], np.full(40, np.nan)])
def test_labels_of_two_classes_are_needed(y):
    with pytest.raises(DataError, match="expected labels 0 \\(good\\) and 1"):
        woe_bins({"p": to_table(pd.DataFrame({"x": np.arange(40.0)}))}, y)


def test_as_columns_has_a_row_for_each_bin():
    X, y = credit_like()
    frame = pd.DataFrame(bins_as_columns(woe_bins({"p": to_table(X)}, y)))
    assert (frame.goods + frame.bads == frame.rows).all()
    assert (frame.groupby("column").rows.sum() == len(X)).all()
    assert frame.column.nunique() == X.shape[1]


counts = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).filter(any), min_size=1, max_size=12)


@given(counts, st.sampled_from(["auto", "increasing", "decreasing"]))
def test_merging_keeps_counts_and_orders_woe(pairs, monotone):
    rows, bads = np.array(pairs).sum(axis=1), np.array(pairs)[:, 1]
    totals = int(rows.sum() - bads.sum()) + 1, int(bads.sum()) + 1
    made = ColumnBins(
        party="p", column="x", kind="numeric", cuts=tuple(map(float, range(1, len(rows)))), n_rows=tuple(rows.tolist())
    )
    merged = with_labels(made, bads, totals, monotone)
    assert sum(merged.n_rows) == rows.sum()
    assert sum(merged.n_bads) == bads.sum()
    assert len(merged.cuts) + 1 == len(merged.n_rows)
    steps = np.diff(merged.woe)
    assert np.all(steps > 0) or np.all(steps < 0)
    if monotone != "auto":
        assert len(steps) == 0 or (steps[0] > 0) == (monotone == "increasing")
    goods = np.array(merged.n_rows) - merged.n_bads
    assert merged.iv == iv_of(goods, np.array(merged.n_bads), totals)
    np.testing.assert_array_equal(merged.woe, woe_of(goods, np.array(merged.n_bads), totals))
