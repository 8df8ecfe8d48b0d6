"""Numbers that float32 would change: bins are found and applied on them as they are, wherever that is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import treaty
from treaty.data import reading
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.models.trees import predict_pooled

STEPS = np.random.default_rng(5).integers(0, 1000, 400)
COLUMNS = {
    "milliseconds": STEPS + 1_700_000_000_000,
    "ids": STEPS + 10**15,
    "near 2^53": STEPS + 2**53 - 500,
    "beyond 2^63": STEPS.astype(np.uint64) + np.uint64(2**63),
    "least": STEPS + np.iinfo(np.int64).min,
    "32 bits": (STEPS + 2**30).astype(np.int32),
    "amounts": STEPS / 100 + 1e8,
    "small": STEPS * 1e-60,
    "seconds": STEPS / 1000 + 1.7e9,
}
LABELS = (STEPS > 500).astype(int)


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_fine_step_at_a_large_offset_is_learnt(kind: str, tmp_path: Path) -> None:
    """Every column was constant, or of a few steps."""
    X = COLUMNS[kind][:, None]
    model = treaty.GBDTClassifier(n_estimators=5, n_jobs=1).fit(X, LABELS)
    assert model.score(X, LABELS) == 1.0
    model.save(tmp_path / "m")
    loaded = treaty.load(tmp_path / "m")
    assert np.array_equal(loaded.predict_proba(X), model.predict_proba(X))
    shap = model.predict_contributions(X)
    assert np.allclose(shap.sum(axis=1), model.decision_function(X))
    with pytest.raises(treaty.ConfigError, match="XGBoost rounds numbers to float32"):
        model.to_xgboost()


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_linear_model_takes_such_columns_by_their_steps(kind: str) -> None:
    X = COLUMNS[kind][:, None]
    model = treaty.LinearRegression().fit(X, STEPS.astype(float))
    assert np.abs(model.predict(X) - STEPS).max() < 2


def frames(values: np.ndarray, gaps: np.ndarray) -> dict[str, Any]:
    column = pa.array(values, mask=gaps)
    return {
        "arrow": pa.table({"x": column}),
        "pandas": pd.DataFrame({"x": pd.array(column.to_pylist(), "UInt64" if values.min() >= 0 else "Int64")}),
        "polars": pl.from_arrow(pa.table({"x": column})),
        "objects": pd.DataFrame({"x": pd.Series(column.to_pylist(), dtype=object)}),  # as databases hand them over
    }


@pytest.mark.parametrize("kind", ["milliseconds", "beyond 2^63", "least", "near 2^53"])
def test_gaps_change_no_number(kind: str) -> None:
    """A missing value makes numpy's column float64, in which whole numbers from 2^53 on are rounded."""
    values, gaps = COLUMNS[kind], STEPS % 7 == 0
    whole = to_table(pa.table({"x": values}))
    for frame in frames(values, gaps).values():
        table = to_table(frame)
        assert table.schema == whole.schema
        assert np.array_equal(table.columns[0], np.where(gaps, np.nan, whole.columns[0]), equal_nan=True)
        assert np.array_equal(np.isnan(table.columns[0]), gaps)


def test_ordinary_numbers_stay_float32() -> None:
    rng = np.random.default_rng(0)
    X = np.stack([rng.normal(size=50_000), rng.random(50_000), rng.integers(0, 100, 50_000) / 10], axis=1)
    table = to_table(np.column_stack([X, rng.integers(0, 1 << 24, 50_000)]))
    assert table.schema.origins == {}
    assert {column.dtype for column in table.columns} == {np.dtype(np.float32)}


WHOLE = st.integers(-(2**63), 2**63 - 1)
CLOSE = st.integers(0, 40)


@settings(max_examples=60, deadline=None)
@given(base=WHOLE | st.sampled_from([0, 2**24, 2**53, 10**15]), steps=st.lists(CLOSE, min_size=1, max_size=60))
@example(base=-(2**53), steps=[0, 1])
def test_rows_lie_in_the_bins_of_training_when_they_are_predicted(base: int, steps: list[int]) -> None:
    """Each different whole number of a small column has a bin, and new rows with it lie there, too."""
    values = np.array([min(base + step, 2**63 - 1) for step in steps], np.int64)
    table = to_table(pa.table({"x": values}))
    bins = fit_bins(table, 255)
    codes = bins.transform(table)[:, 0]
    assert len(set(codes.tolist())) == len(set(values.tolist()))
    assert np.array_equal(np.argsort(codes, kind="stable"), np.argsort(values, kind="stable"))
    again = to_table(pa.table({"x": values[::-1]}), schema=table.schema)
    assert np.array_equal(bins.transform(again)[::-1, 0], codes)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e30, 1e30), min_size=20, max_size=60),
    offset=st.sampled_from([0.0, 1e6, 1e9, 1e15]),
    seed=st.integers(0, 9),
)
def test_the_sides_of_training_are_those_of_prediction(values: list[float], offset: float, seed: int) -> None:
    X = np.array(values)[:, None] + offset
    y = np.random.default_rng(seed).integers(0, 2, len(X))
    y[:2] = 0, 1
    model = treaty.GBDTClassifier(n_estimators=3, max_bin=255, min_child_samples=1, n_jobs=1).fit(X, y)
    (part,) = model.parts_.values()
    table = to_table(X, schema=part.schema)
    margins = predict_pooled([part], [table])[:, 0]
    bins = fit_bins(table, 255)
    codes = bins.transform(table)[:, 0]
    for code in np.unique(codes):  # rows of one bin are on one side of every split
        assert len(np.unique(margins[codes == code])) == 1
    assert (len(np.unique(X)) > 1) == (bins.n_bins[0] > 1)


def test_tables_on_disk_make_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({name: pa.array(values, mask=STEPS % 11 == 3) for name, values in COLUMNS.items()})
    pq.write_table(table, tmp_path / "t.parquet")
    made = []
    for limit in (1 << 30, 0):
        monkeypatch.setattr(reading, "ON_DISK", limit)
        model = treaty.GBDTClassifier(n_estimators=3, n_jobs=1).fit(tmp_path / "t.parquet", LABELS)
        (part,) = model.parts_.values()
        made.append((part.schema, part.splits, part.forest.trees, model.predict_proba(tmp_path / "t.parquet")))
    assert made[0][:3] == made[1][:3]
    assert np.array_equal(made[0][3], made[1][3])


@pytest.mark.parametrize("protocol", [treaty.SecureBoost(allow_exact_sums=True), treaty.SecureBoost()])
def test_parties_train_the_pooled_model(protocol: Any) -> None:
    frame = pd.DataFrame(COLUMNS)
    tables = {"a": frame.iloc[:, ::2], "b": frame.iloc[:, 1::2]}
    y = (STEPS * 7 % 13 > 6).astype(int)
    pooled = treaty.GBDTClassifier(n_estimators=3, max_bin=32, n_jobs=1).fit(tables, y)
    apart = treaty.GBDTClassifier(protocol, n_estimators=3, max_bin=32, n_jobs=1).fit(tables, y)
    assert np.array_equal(pooled.predict_proba(tables), apart.predict_proba(tables))


def played_by_row(frames: dict[str, pd.DataFrame], y: dict[str, np.ndarray]) -> Any:
    model = treaty.GBDTClassifier(
        treaty.FederBoostHorizontal(mode="paper"), n_estimators=3, max_bin=255, min_child_samples=1, n_jobs=1
    )
    return model.fit({name: (frames[name], y[name]) for name in frames})


def test_participants_of_rows_find_the_pooled_bins() -> None:
    """All values of a column are few, so that each has a bin; of one participant they need no float64."""
    steps = STEPS % 60
    frame = pd.DataFrame({
        "milliseconds": steps + 1_700_000_000_000, "ids": steps + 10**15, "amounts": steps / 100 + 1e8,
        "some large": np.where(np.arange(400) % 2, steps, steps + 2**30),
        "beyond 2^63": steps.astype(np.uint64) + np.uint64(2**63), "ordinary": steps / 10,
    })  # fmt: skip
    y = (steps * 7 % 13 > 6).astype(int)
    rows = {"north": np.arange(0, 400, 2), "south": np.arange(1, 400, 2)}
    model = played_by_row({of: frame.iloc[at] for of, at in rows.items()}, {of: y[at] for of, at in rows.items()})
    pooled = treaty.GBDTClassifier(n_estimators=3, max_bin=255, min_child_samples=1, n_jobs=1).fit(frame, y)
    (part,) = pooled.parts_.values()
    assert model.schemas_["pooled"] == part.schema
    assert set(part.schema.origins) == {"milliseconds", "ids", "amounts", "some large", "beyond 2^63"}
    assert np.array_equal(model.predict_proba(frame), pooled.predict_proba(frame))
    assert model.score(frame, y) == pooled.score(frame, y)
