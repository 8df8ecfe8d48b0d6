"""Files as tables of estimators: models of tables on disk are those of tables in memory, bit for bit."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest

import treaty
from large_tables import all_large, random_table, write  # noqa: F401
from tables import assert_same_trees
from treaty.data.arrow_tables import FileTable
from treaty.data.reading import open_table
from treaty.data.table import Table
from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import folder_of
from treaty.models import trees
from treaty.trees.columns import ColumnSource

OPTIONS = {"n_estimators": 2, "max_depth": 3, "max_bin": 12, "min_child_samples": 5, "n_jobs": 1, "random_state": 1}
TABLE = random_table(400)
Y = (np.nan_to_num(TABLE["gaps"].to_numpy()) + TABLE["whole"].to_numpy() / 9 > 0.1).astype(int)
WEIGHT = np.random.default_rng(4).integers(0, 3, 400)
SPLIT = {"a": ["plain", "gaps", "of one value", "truth"], "b": [], "c": ["large", "town", "of none"]}
SPLIT["b"] = [name for name in TABLE.column_names if name not in SPLIT["a"] + SPLIT["c"]]
VERTICAL = {
    "pooled": "pooled",
    "lattice": treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
    "sealed": treaty.SecureBoost(),
    "ou": treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True),
    "federboost": treaty.FederBoostVertical(mode="paper", epsilon=float("inf")),
}


def named(folder: Path, table: pa.Table, name: str, kind: str) -> Any:
    """Write a table; return what names it: a path, as text or not, or a data set."""
    path = write(table, folder / {"folder": name, "dataset": f"{name}.parquet"}.get(kind, f"{name}.{kind}"))
    return pyarrow.dataset.dataset(str(path)) if kind == "dataset" else str(path) if kind == "folder" else path


def noting_sources(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note where the binned columns of histograms lie."""
    seen = []
    before = ColumnSource.__init__

    def begun(self: ColumnSource, codes: Any, *rest: Any) -> None:
        seen.append(codes)
        before(self, codes, *rest)

    monkeypatch.setattr(ColumnSource, "__init__", begun)
    return seen


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("system", VERTICAL)
def test_models_of_columns_on_disk_equal_those_in_memory(tmp_path, system, monkeypatch):
    kinds = {"a": "arrow", "b": "parquet", "c": "folder"}
    if system == "pooled":
        kinds = {"a": "parquet", "b": "folder", "c": "dataset"}
    files = {name: named(tmp_path, TABLE.select(SPLIT[name]), name, kind) for name, kind in kinds.items()}
    tables = {
        name: treaty.read_table(write(TABLE.select(SPLIT[name]), tmp_path / f"{name}2.parquet")) for name in kinds
    }
    watched = {name: named(tmp_path, TABLE.select(SPLIT[name])[:90], f"{name}3", "parquet") for name in kinds}
    few = OPTIONS | ({"n_estimators": 1, "max_bin": 4} if system == "sealed" else {})
    rest = {} if system == "sealed" else {"sample_weight": WEIGHT}
    with pytest.warns(UserWarning, match="joins the tables") if system == "pooled" else nullcontext():
        one = treaty.GBDTClassifier(VERTICAL[system], **few).fit(tables, Y, **rest)
        seen = noting_sources(monkeypatch)
        other = treaty.GBDTClassifier(VERTICAL[system], **few).fit(files, Y, eval_set=(watched, Y[:90]), **rest)
    assert_same_trees(one, other)
    assert one.schemas_ == other.schemas_
    assert one.feature_names_in_.tolist() == other.feature_names_in_.tolist()
    assert any(folder_of(codes) is not None for codes in seen)
    assert one.predict_proba(tables).tobytes() == other.predict_proba(files).tobytes()
    assert one.predict_proba(files).tobytes() == other.predict_proba(watched | files).tobytes()
    assert len(other.evals_result_) == 1


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("parties", [None, SPLIT])
def test_one_file_is_one_table(tmp_path, parties):
    path = write(TABLE, tmp_path / "t.parquet")
    system = "pooled" if parties is None else VERTICAL["federboost"]
    one, other = (
        treaty.GBDTClassifier(system, parties=parties, **OPTIONS).fit(X, Y) for X in (treaty.read_table(path), path)
    )
    assert_same_trees(one, other)
    assert one.feature_names_in_.tolist() == other.feature_names_in_.tolist() == TABLE.column_names
    assert one.n_features_in_ == other.n_features_in_ == len(TABLE.column_names)
    assert one.predict_proba(path).tobytes() == other.predict_proba(treaty.read_table(path)).tobytes()
    if parties is None:  # rows of weight 0 are left out
        one, other = (
            treaty.GBDTClassifier("pooled", **OPTIONS).fit(X, Y, sample_weight=WEIGHT)
            for X in (treaty.read_table(path), path)
        )
        assert_same_trees(one, other)
        assert one.predict_leaf(path).tolist() == other.predict_leaf(path).tolist()


@pytest.mark.usefixtures("all_large")
def test_models_of_rows_on_disk_equal_those_in_memory(tmp_path):
    parts = {name: TABLE.take(np.arange(k, 400, 3)) for k, name in enumerate("abc")}
    parts["b"] = parts["b"].drop_columns(["large"])
    labels = {name: Y[k::3] for k, name in enumerate("abc")}
    kinds = {"a": "parquet", "b": "dataset", "c": "folder"}
    models = []
    for on_disk in (False, True):
        rows = {
            name: (
                named(tmp_path, part, name, kinds[name])
                if on_disk
                else treaty.read_table(write(part, tmp_path / f"{name}2.parquet")),
                labels[name],
            )
            for name, part in parts.items()
        }
        models.append(treaty.GBDTClassifier("federboost-horizontal", **OPTIONS).fit(rows))
    assert_same_trees(*models)
    path = write(TABLE, tmp_path / "t.arrow")
    assert models[0].predict_proba(treaty.read_table(path)).tobytes() == models[1].predict_proba(path).tobytes()


@pytest.mark.usefixtures("all_large")
def test_processes_of_tables_on_disk_train_the_same_model(tmp_path, monkeypatch):
    files = {name: named(tmp_path, TABLE.select(SPLIT[name]), name, "parquet") for name in "ac"}
    one, other = (
        treaty.GBDTClassifier(VERTICAL["lattice"], transport=transport, **OPTIONS).fit(files, Y)
        for transport in ("memory", "tls")
    )
    assert_same_trees(one, other)


@pytest.mark.usefixtures("all_large")
def test_what_is_not_of_the_table_is_left_out(tmp_path):
    path = write(
        TABLE.append_column("label", pa.array(Y)).append_column("zip", pa.array(Y % 7 + 100)), tmp_path / "t.parquet"
    )
    rules = {"drop": ["label"], "categorical": ["zip"]}
    table = treaty.open_table(path, folder=tmp_path / "scratch", **rules)
    assert isinstance(table, FileTable)
    one = treaty.GBDTClassifier("pooled", **OPTIONS).fit(table, Y)
    other = treaty.GBDTClassifier("pooled", **OPTIONS).fit(treaty.read_table(path, **rules), Y)
    assert_same_trees(one, other)
    assert one.schemas_ == other.schemas_
    assert one.schemas_["pooled"].categories[-1] == ("100", "101")
    assert treaty.open_table(path, columns=["zip", "town"]).column_names == ["zip", "town"]
    with pytest.raises(ValueError, match=r"unseen at fit time:\n- label"):  # scikit-learn's words
        one.predict(path)


@pytest.mark.parametrize("large", [False, True])
def test_files_that_cannot_be_used_are_named(tmp_path, large, monkeypatch):
    if large:
        monkeypatch.setattr("treaty.data.reading.ON_DISK", 0)
    model = treaty.GBDTClassifier("pooled", **OPTIONS)
    strays = pa.array([*map(str, range(398)), "none", "two"])
    path = write(TABLE.append_column("stray", strays), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"the table: column 'stray' has .*'none' in row 398.* - at .*t\.parquet"):
        model.fit(path, Y)
    with pytest.raises(DataError, match=r"shop: expected a file at .*nowhere\.parquet, got none"):
        model.fit({"bank": TABLE, "shop": tmp_path / "nowhere.parquet"}, Y)
    with pytest.raises(DataError, match=r"a: expected a file ending in \.csv, .*, got 'label'"):
        treaty.GBDTClassifier("federboost-horizontal").fit({"a": ("label", Y)})
    dates = write(TABLE.append_column("day", pa.array([0] * 400, pa.date32())), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"column 'day': date32\[day\], a date or time"):
        model.fit(pyarrow.dataset.dataset(str(dates)), Y)


def test_a_linear_model_takes_files(tmp_path, monkeypatch):
    monkeypatch.setattr("treaty.data.reading.ON_DISK", 0)
    path = write(TABLE.select(["plain", "whole", "town", "truth"]), tmp_path / "t.arrow")
    one, other = (
        treaty.LogisticRegression(n_jobs=1, tol=0.01, random_state=3).fit(X, Y) for X in (treaty.read_table(path), path)
    )
    assert one.predict_proba(path).tobytes() == other.predict_proba(treaty.read_table(path)).tobytes()


def test_a_file_where_parties_are_meant_is_refused_unread(tmp_path):
    with pytest.raises(DataError, match=r"'secureboost' expects a mapping of party to table, got str: pass a dict"):
        treaty.GBDTClassifier("secureboost").fit(str(tmp_path / "t.parquet"), Y)


@pytest.mark.parametrize("kind", ["parquet", "csv", "dataset"])
@pytest.mark.parametrize("text", [False, True])
def test_files_are_brought_into_common_order(tmp_path, kind, text, monkeypatch):
    ids = [f"0{k:04d}" if text else k for k in range(400)]
    bank = TABLE.select(SPLIT["a"]).append_column("id", pa.array(ids)).append_column("label", pa.array(Y))
    shop = TABLE.select(SPLIT["c"]).append_column("key", pa.array(ids)).take(np.arange(399, 40, -1))
    on = {"bank": "id", "shop": "key"}
    found = []
    for limit in (0, 1 << 40):
        monkeypatch.setattr("treaty.data.reading.ON_DISK", limit)
        folder = tmp_path / str(limit)
        folder.mkdir()
        files = {"bank": named(folder, bank, "bank", kind), "shop": named(folder, shop, "shop", kind)}
        files["shop"] = treaty.open_table(files["shop"], id="key", drop=["large"])
        aligned = treaty.align(files, on, drop_id=False)
        order = [aligned[name][column].to_pylist() for name, column in on.items()]
        assert order[0] == order[1]
        assert sorted(order[0]) == ids[41:]
        assert isinstance(aligned["shop"], FileTable) == (limit == 0)
        labels = aligned["bank"]["label"].to_pylist()
        assert labels == [Y[int(id)] for id in order[0]]
        tables = {name: table.drop_columns(["label"] if name == "bank" else []) for name, table in aligned.items()}
        tables = {name: table.drop_columns([on[name]]) for name, table in tables.items()}
        with pytest.warns(UserWarning, match="joins the tables"):
            found.append(treaty.GBDTClassifier("pooled", base_score=0.5, **OPTIONS).fit(tables, labels))
    assert_same_trees(*found)
    if not text:
        with pytest.raises(DataError, match="bank: expected a column of ids, 'key', got a file without it"):
            treaty.align(files, "key")


def test_a_full_disk_is_told_before_a_column_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("treaty.data.reading.ON_DISK", 0)
    path = write(TABLE, tmp_path / "t.parquet")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(
        ConfigError, match=r"cannot keep a table .* No space left on device; make room, or name another"
    ):
        treaty.GBDTClassifier("pooled").fit(path, Y)


def test_small_files_are_read_at_once(tmp_path):
    assert isinstance(open_table(write(TABLE, tmp_path / "t.parquet")), pa.Table)
    model = treaty.GBDTClassifier("pooled", **OPTIONS)
    path = write(TABLE, tmp_path / "t.csv")
    assert_same_trees(model.fit(treaty.read_table(path), Y), treaty.GBDTClassifier("pooled", **OPTIONS).fit(path, Y))


def test_the_lines_of_the_page_run(tmp_path, monkeypatch):
    """docs/jobs.md: a folder, a file with labels, and a place for what is made of them."""
    page = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "open_table" in block)
    few = TABLE.select(SPLIT["b"]).append_column("name", TABLE["town"]).append_column("zip", pa.array(Y + 100))
    write(few, tmp_path / "shop")
    write(TABLE.select(SPLIT["a"]).append_column("label", pa.array(Y)), tmp_path / "bank.parquet")
    monkeypatch.chdir(tmp_path)
    for limit in (0, 1 << 40):
        monkeypatch.setattr("treaty.data.reading.ON_DISK", limit)
        found: dict[str, Any] = {}
        exec(
            code.replace("/large/disk", "scratch").replace("Boost())", "Boost(), n_estimators=1, max_bin=4)"),
            {"treaty": treaty},
            found,
        )
        assert found["model"].schemas_["shop"].categories[-1] == ("100", "101")
        assert isinstance(found["shop"], FileTable) == (limit == 0)


@pytest.mark.parametrize("place", ["memory", "all_large"])
@pytest.mark.parametrize("labels", [[0, 1], ["no", "yes"], [0.5, 2.5]], ids=["numbers", "text", "target"])
def test_a_files_column_that_equals_the_labels_is_refused_by_name(tmp_path, request, place, labels):
    if place == "all_large":
        request.getfixturevalue(place)
    rng = np.random.default_rng(0)
    y = np.array(labels)[rng.integers(0, 2, 60)]
    near = y.copy()
    near[-1] = labels[0] if y[-1] == labels[1] else labels[1]
    columns = {"a": rng.normal(size=60), "near": near, "y": y}
    path = tmp_path / "t.parquet"
    write(pa.table({name: pa.array(values) for name, values in columns.items()}), path)
    trees, linear = treaty.GBDTClassifier(), treaty.LogisticRegression()
    if labels == [0.5, 2.5]:
        trees, linear = treaty.GBDTRegressor(), treaty.LinearRegression()
    for model in (trees, linear):
        for X in (path, {"bank": path}):
            with pytest.raises(treaty.DataError, match=r"column 'y' of the file equals .* all 60 rows.*drop=\['y'\]"):
                model.fit(X, y)
    trees.fit(treaty.open_table(path, drop=["y"]), y)  # one that differs in a row is taken
    rows = {name: (path, y) for name in ("north", "south", "east")}
    with pytest.raises(treaty.DataError, match="north: column 'y'"):
        treaty.GBDTClassifier("federboost-horizontal").fit(rows)


@pytest.mark.parametrize("place", ["memory", "all_large"])
def test_a_prediction_copies_a_few_rows_at_a_time_and_is_the_same(tmp_path, monkeypatch, request, place):
    if place == "all_large":
        request.getfixturevalue(place)
    X = named(tmp_path, TABLE, "t", "parquet")
    model = treaty.GBDTClassifier(**OPTIONS).fit(X, Y)
    expected, sizes, copied = model.predict_proba(X), [], Table.matrix

    def noted(table: Table, rows: slice | None = None) -> np.ndarray:
        sizes.append(len(copied(table, rows)))
        return copied(table, rows)

    monkeypatch.setattr(trees, "_ROWS_AT_ONCE", 64)
    monkeypatch.setattr(Table, "matrix", noted)
    np.testing.assert_array_equal(model.predict_proba(X), expected)
    assert sizes == [64] * 6 + [16]
