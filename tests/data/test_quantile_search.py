import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from treaty.data.binning import fit_bins, tie_aware_cuts
from treaty.data.quantile_search import Probes, QuantileSearch, count_below, floats_of, keys_of, sorted_keys
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, LocalProtocolError

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
LARGEST = float(np.finfo(np.float32).max)
AWKWARD = [0.0, -0.0, SMALLEST, -SMALLEST, 1.0, float(np.nextafter(np.float32(1), np.float32(2))), -1.0, 0.7]
EXACT = {"exact": True, "most_rounds": 10_000}

REPOSITORY = Path(__file__).parents[2]

any_value = st.floats(width=32, allow_nan=False)


@st.composite
def columns(draw: st.DrawFn) -> np.ndarray:
    """Runs of equal values, so that heavy ties are common; shuffled, -0.0 beside 0.0, infinities too."""
    value = st.one_of(st.sampled_from([*AWKWARD, LARGEST, -LARGEST]), any_value, st.integers(-20, 20).map(float))
    runs = draw(st.lists(st.tuples(value, st.integers(1, 30)), min_size=1, max_size=60))
    column = np.repeat([v for v, _ in runs], [n for _, n in runs]).astype(np.float32)
    return draw(st.randoms(use_true_random=False).map(lambda r: r.sample(list(column), len(column))).map(np.array))


def numeric(*columns: object) -> Table:
    arrays = [np.array(column, dtype=np.float32) for column in columns]
    return Table(Schema(tuple(f"f{i}" for i in range(len(arrays))), (None,) * len(arrays)), arrays, len(arrays[0]))


def real_data(name: str) -> Path:
    for folder in (os.environ.get("TREATY_DATA"), REPOSITORY.parent / "shared" / "data"):
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    pytest.skip(f"real data set {name} is not here; set TREATY_DATA to the folder that has it")


class Run:
    """A search on the given columns with all that was asked on the way."""

    def __init__(self, columns: list[np.ndarray], max_bin: int, noise: float = 0.0, seed: int = 0, **options) -> None:
        ordered = sorted_keys(columns)
        rng = np.random.default_rng(seed)

        def noisy(counts: np.ndarray) -> np.ndarray:
            return counts + np.rint(noise * rng.normal(size=len(counts))).astype(np.int64)

        self.search = QuantileSearch(len(columns), max_bin, **{"least_rows": 20, **options})
        self.search.present(noisy(np.array([len(keys) for keys in ordered])))
        self.asked: list[Probes] = []
        while (probes := self.search.probes()) is not None:
            self.asked.append(probes)
            self.search.take(noisy(count_below(ordered, probes)))
        self.cuts = self.search.cuts()

    def opened(self, feature: int) -> np.ndarray:
        return np.sort(np.concatenate([keys[o[feature] : o[feature + 1]] for keys, o in self.asked]))


def bins_of(cuts: np.ndarray, column: np.ndarray) -> list[int]:
    return np.searchsorted(cuts, column, side="right").tolist()


def masses(cuts: np.ndarray, column: np.ndarray) -> np.ndarray:
    return np.bincount(bins_of(cuts, column), minlength=len(cuts) + 1)


@given(st.lists(any_value, min_size=1))
def test_keys_keep_the_order_of_values_and_lead_back_to_them(values: list[float]) -> None:
    ordered = np.sort(np.array(values, dtype=np.float32))
    keys = keys_of(ordered)
    assert keys.dtype == np.uint32
    assert (np.diff(keys.astype(np.int64)) > 0).tolist() == (ordered[:-1] < ordered[1:]).tolist()
    assert floats_of(keys).tolist() == ordered.tolist()
    assert not np.signbit(floats_of(keys)[ordered == 0]).any()


@given(any_value.filter(lambda x: x < LARGEST))
def test_neighbouring_values_have_neighbouring_keys(value: float) -> None:
    value = np.float32(value) + np.float32(0)
    upper = np.nextafter(value, np.float32(np.inf))
    assert keys_of(np.array([upper])) - keys_of(np.array([value])) == 1


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(columns(), st.integers(2, 40))
def test_an_exact_search_ends_with_the_cuts_of_the_pooled_kernel(column: np.ndarray, q: int) -> None:
    with np.errstate(invalid="ignore"):
        pooled = tie_aware_cuts(np.sort(column), q)
    assert_equal_cuts(Run([column], q, **EXACT).cuts[0], pooled)


@pytest.mark.parametrize("q", [2, 16, 32, 255])
def test_an_exact_search_agrees_with_fit_bins_on_many_rows_of_many_features(q: int) -> None:
    """Columns of float32, and one of float64; no probe parts what no cut needs."""
    rng = np.random.default_rng(q)
    table = numeric(
        rng.normal(size=4000),
        np.where(rng.random(4000) < 0.9, 0, rng.lognormal(8, 2, 4000)),
        rng.integers(0, 300, 4000),
        np.where(rng.random(4000) < 0.3, 0.7, rng.exponential(size=4000)),
        np.where(rng.random(4000) < 0.3, np.nan, rng.integers(-5, 5, 4000)),
        np.full(4000, 7.7),
        np.full(4000, np.nan),
    )
    columns = [*table.columns, 1e9 + rng.random(4000)]
    run = Run(columns, q, wide=np.arange(len(columns)) == 7, **EXACT)
    pooled = [*fit_bins(table, q).cuts, tie_aware_cuts(np.sort(columns[-1]), q)]
    for feature, (ours, theirs) in enumerate(zip(run.cuts, pooled, strict=True)):
        assert_equal_cuts(ours, theirs)
        if feature in (5, 6):  # no cut: nothing but the first halvings
            assert len(run.opened(feature)) <= 64


def assert_equal_cuts(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Bit for bit, so that a negative zero is another number."""
    assert ours.dtype == theirs.dtype
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("q", [4, 24, 32, 255])
@pytest.mark.parametrize("kind", ["normal", "lognormal", "uniform", "far"])
def test_bins_of_a_smooth_feature_hold_equal_rows_within_the_tolerance(kind: str, q: int) -> None:
    rng = np.random.default_rng(q)
    n = 100_000
    column = {
        "normal": rng.normal(size=n),
        "lognormal": rng.lognormal(0, 4, n),
        "uniform": rng.random(n),
        "far": rng.uniform(-1e20, -1e10, n),
    }[kind].astype(np.float32)
    run = Run([column], q)
    held = masses(run.cuts[0], column)
    assert len(held) == q
    assert np.abs(held - n / q).max() <= 2 * min(0.002 * n, n / q / 8)  # a bin's start and its end may be off
    assert len(run.asked) <= 20


def test_rare_values_beside_very_many_zeros_get_bins_of_their_own() -> None:
    rng = np.random.default_rng(0)
    tail = np.repeat([1, 2, 3], [3000, 1000, 400])
    column = np.concatenate([np.zeros(94_000), tail, rng.uniform(4, 1000, 1600)]).astype(np.float32)
    run = Run([rng.permutation(column)], 24)
    assert masses(run.cuts[0], column)[:4].tolist() == [94_000, 3000, 1000, 400]
    assert len(run.cuts[0]) == 23


def test_while_values_are_few_each_has_its_own_bin_and_the_cuts_are_those_of_fit_bins() -> None:
    values = np.array([-7.5, -0.3, 0, 1, 2, 3, 98, 4e9], dtype=np.float32)
    table = numeric(np.repeat(values, np.arange(20, 28)))
    assert Run(table.columns, 24).cuts[0].tolist() == fit_bins(table, 24).cuts[0].tolist()


def test_whole_numbers_are_told_apart_in_few_rounds() -> None:
    column = np.repeat(np.arange(18, 30), 100).astype(np.float32)
    run = Run([column], 24)
    assert masses(run.cuts[0], column).tolist() == [100] * 12
    assert len(run.asked) <= 20


def test_a_cut_lies_at_the_point_where_two_bins_touch() -> None:
    column = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    run = Run([column], 8)
    assert set(keys_of(run.cuts[0]).tolist()) <= set(run.opened(0).tolist())


@pytest.mark.parametrize(
    ("column", "cuts"),
    [
        ([3, 3, 3], []),
        ([np.nan, np.nan], []),
        ([], []),
        ([0.0, -0.0, 0.0], []),
        ([0.0, 1.0, np.nan], [0.5]),
        ([-0.0, SMALLEST, 0.0], [SMALLEST]),
        ([-SMALLEST, 0.0], [0.0]),
        ([LARGEST, -LARGEST], [0.0]),
        ([np.inf, -np.inf], [np.inf]),
        ([np.inf, LARGEST], [np.inf]),
    ],
    ids=str,
)
def test_odd_columns_have_the_cuts_they_should(column: list[float], cuts: list[float]) -> None:
    found = Run([np.array(column, dtype=np.float32)], 8, **EXACT).cuts[0]
    assert found.dtype == np.float32
    assert found.tolist() == cuts
    assert not np.signbit(found[found == 0]).any()


def assert_only_large_intervals_are_probed(run: Run, column: np.ndarray, least: int) -> None:
    keys = np.sort(keys_of(column))
    opened = [int(keys_of(np.float32([-np.inf]))[0]), int(keys_of(np.float32([np.inf]))[0]) + 1]
    for probes in run.asked:
        ascending = probes.keys.tolist()
        assert ascending == sorted(set(ascending))
        for probe in ascending:
            place = int(np.searchsorted(opened, probe))
            low, high = opened[place - 1], opened[place]
            assert low < probe < high
            assert np.searchsorted(keys, high) - np.searchsorted(keys, low) >= max(least, 2)
        opened = sorted([*opened, *ascending])
    below = np.searchsorted(keys, opened)
    assert run.search.smallest_interval().tolist() == [min(rows for rows in np.diff(below) if rows)]


@settings(max_examples=60, deadline=None)
@given(columns(), st.integers(2, 40), st.integers(1, 60), st.sampled_from([0.0, 0.002, 0.1]))
def test_only_intervals_with_rows_enough_are_probed(column: np.ndarray, q: int, least: int, tolerance: float) -> None:
    """Also: probes ascend and lie strictly between opened points."""
    run = Run([column], q, least_rows=least, tolerance=tolerance)
    assert_only_large_intervals_are_probed(run, column, least)


def test_an_interval_that_may_hold_a_heavy_value_is_not_probed_either_when_it_has_few_rows() -> None:
    outliers = [-1e9, -5, -1, -0.01, 1e-9, 0.001, 0.1, 0.3, 3, 9, 1e4, 1e9]
    column = np.concatenate([np.random.default_rng(0).uniform(1, 2, 100), outliers]).astype(np.float32)
    assert_only_large_intervals_are_probed(Run([column], 4, least_rows=45), column, 45)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(columns(), st.integers(2, 40), st.sampled_from([1.0, 10.0, 1e4]), st.integers(0, 9))
def test_noise_neither_prolongs_the_search_nor_disorders_the_cuts(
    column: np.ndarray, q: int, noise: float, seed: int
) -> None:
    run = Run([column, column], q, noise, seed, least_rows=1, tolerance=0.0)
    assert len(run.asked) <= 34
    for cuts in run.cuts:
        assert len(cuts) < q
        assert (cuts[:-1] < cuts[1:]).all()
    assert (run.search.smallest_interval() >= 0).all()


def test_a_little_noise_moves_the_bins_a_little() -> None:
    column = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    run = Run([column], 16, noise=50)
    assert np.abs(masses(run.cuts[0], column) - 100_000 / 16).max() < 800
    assert len(run.asked) <= 24


def test_counts_out_of_order_are_moved_between_what_is_known() -> None:
    search = QuantileSearch(1, 2, least_rows=1)
    search.present(np.array([100]))
    for wrong in ([-30], [170], [40, -5]):  # at 0, at 2, and between them
        search.probes()
        search.take(np.array(wrong))
    assert search.smallest_interval().tolist() == [40]
    probes = search.probes()
    assert probes is not None
    search.take(np.full(len(probes.keys), 99))
    assert search.smallest_interval().tolist() == [1]


def test_rounds_end_where_the_caller_says_with_the_cuts_of_what_is_known() -> None:
    column = np.random.default_rng(0).lognormal(size=10_000).astype(np.float32)
    run = Run([column], 32, most_rounds=11)
    assert len(run.asked) == 11
    assert 16 <= len(run.cuts[0]) < 32
    assert Run([column], 32, most_rounds=0).cuts[0].size == 0


def test_features_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(5)
    columns = [rng.normal(size=3000), rng.integers(0, 4, 3000), np.full(3000, np.nan), rng.lognormal(size=3000)]
    columns = [column.astype(np.float32) for column in columns]
    together = Run(columns, 16)
    alone = [Run([column], 16) for column in columns]
    assert [cuts.tolist() for cuts in together.cuts] == [run.cuts[0].tolist() for run in alone]
    smallest = together.search.smallest_interval().tolist()
    assert smallest == [run.search.smallest_interval()[0] for run in alone]
    assert smallest[2] == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_counts_of_parts_add_up_to_those_of_all_rows(threads: int) -> None:
    rng = np.random.default_rng(3)
    column = np.where(rng.random(900) < 0.2, np.nan, rng.normal(size=900).round(1)).astype(np.float32)
    points = np.unique(keys_of(rng.normal(size=40).round(1).astype(np.float32)))
    probes = Probes(np.concatenate([points, points[:5]]), np.array([0, len(points), len(points), len(points) + 5]))
    parts = [column[:100], column[100:100], column[100:]]
    counted = [count_below(sorted_keys([part, part, part], threads), probes, threads) for part in parts]
    expected = [(column < value).sum() for value in floats_of(probes.keys)]
    assert sum(counted).tolist() == expected
    assert counted[0].dtype == np.int64


def test_planning_a_round_for_5000_features_takes_less_than_two_seconds() -> None:
    rng = np.random.default_rng(0)
    columns = [rng.normal(size=500).astype(np.float32) for _ in range(20)] * 250
    ordered = sorted_keys(columns)
    search = QuantileSearch(5000, 32, least_rows=2, most_rounds=16)
    search.present(np.full(5000, 500))
    longest = 0.0
    while True:
        start = time.process_time()
        probes = search.probes()
        longest = max(longest, time.process_time() - start)
        if probes is None:
            break
        search.take(count_below(ordered, probes))
    assert longest < 2


def test_calls_out_of_turn_and_counts_of_another_shape_are_refused() -> None:
    search = QuantileSearch(2, 4, least_rows=1)
    with pytest.raises(LocalProtocolError, match="at probes"):
        search.probes()
    with pytest.raises(LocalProtocolError, match="at present"):
        search.present(np.array([5]))
    search.present(np.array([5, 5]))
    with pytest.raises(LocalProtocolError, match="at present"):
        search.present(np.array([5, 5]))
    with pytest.raises(LocalProtocolError, match="at take"):
        search.take(np.array([1]))
    probes = search.probes()
    assert probes is not None
    with pytest.raises(LocalProtocolError, match="at probes"):
        search.probes()
    with pytest.raises(LocalProtocolError, match="at take"):
        search.take(np.zeros(len(probes.keys) + 1, dtype=np.int64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_bin": 1},
        {"max_bin": 256},
        {"least_rows": 0},
        {"tolerance": -0.1},
        {"tolerance": float("nan")},
        {"most_rounds": -1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="expected"):
        QuantileSearch(**{"n_features": 2, "max_bin": 4, "least_rows": 1, **wrong})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label", "key"),
    [("credit1.parquet", "SeriousDlqin2yrs", "id"), ("credit2.parquet", "default.payment.next.month", "ID")],
)
def test_trees_on_the_cuts_found_rank_as_well_as_on_those_of_the_pooled_table(name: str, label: str, key: str) -> None:
    xgboost = pytest.importorskip("xgboost")
    frame = pd.read_parquet(real_data(name))
    train = np.random.default_rng(0).random(len(frame)) < 0.7
    y = frame[label].to_numpy()
    columns = [frame[c].to_numpy(np.float32) for c in frame.columns if c not in (label, key)]
    own = [column[train] for column in columns]

    def auc(cuts: list[np.ndarray]) -> float:
        parts = zip(cuts, columns, strict=True)
        codes = np.stack([np.where(np.isnan(x), np.nan, np.searchsorted(c, x, side="right")) for c, x in parts], axis=1)
        options = {"max_depth": 3, "eta": 0.3, "objective": "binary:logistic", "base_score": 0.5, "nthread": 1}
        model = xgboost.train(options, xgboost.DMatrix(codes[train], y[train]), 20)
        return float(roc_auc_score(y[~train], model.predict(xgboost.DMatrix(codes[~train]))))

    run = Run(own, 26)
    assert len(run.asked) <= 34
    assert abs(auc(run.cuts) - auc(list(fit_bins(numeric(*own), 26).cuts))) < 0.003
