"""`align`: tables of any kind, in common order, ready to train on."""

from __future__ import annotations

import logging
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treaty
from treaty.data import file_formats, reading
from treaty.data.reading import read_table as source_table
from treaty.data.table import to_table
from treaty.errors import ConfigError, DataError
from treaty.estimators.files import align
from treaty.estimators.trees import GBDTClassifier

BANK = {"id": [f"c{k}" for k in range(90)], "x": np.arange(90)}
SHOP = {"id": [f"c{k}" for k in range(89, 29, -1)], "y": np.arange(89, 29, -1)}
CLUB = {"id": [f" c{k} " for k in range(20, 70)], "z": np.arange(20, 70)}
ALL: dict[str, Any] = {
    "bank": pd.DataFrame(BANK, index=range(1000, 1090)),
    "shop": pl.DataFrame(SHOP),
    "club": pa.table(CLUB),
}


TABLE = pd.DataFrame({"id": ["a", "b"], "day": [1, 2]})


def test_tables_come_back_as_they_came_in_one_order() -> None:
    aligned = align(ALL)
    assert [type(table) for table in aligned.values()] == [type(table) for table in ALL.values()]
    x, y, z = aligned["bank"]["x"], aligned["shop"]["y"].to_numpy(), aligned["club"]["z"].to_numpy()
    assert sorted(x) == list(range(30, 70))
    assert list(x) != sorted(x)
    assert np.array_equal(x, y)
    assert np.array_equal(x, z)
    assert list(aligned["bank"].index) == list(range(40))
    assert [list(aligned["bank"].columns), aligned["shop"].columns, aligned["club"].column_names] == [
        ["x"],
        ["y"],
        ["z"],
    ]


def test_ids_are_kept_on_request_and_columns_may_differ() -> None:
    shop = ALL["shop"].rename({"id": "customer"})
    on = {"bank": "id", "shop": "customer"}
    aligned = align({"bank": ALL["bank"], "shop": shop}, on, active="shop", drop_id=False, n_jobs=1)
    assert aligned["bank"]["id"].tolist() == aligned["shop"]["customer"].to_list()


def test_kept_ids_of_text_can_be_sorted(tmp_path: Path) -> None:
    tables = {}
    for name in ("bank", "shop"):
        path = tmp_path / f"{name}.csv"
        path.write_text("id,device\n" + "".join(f"P-{k},phone\n" for k in range(40)))
        tables[name] = treaty.read_table(path)
    aligned = treaty.align(tables, drop_id=False)
    assert aligned["shop"].sort_by("id")["id"].to_pylist() == sorted(f"P-{k}" for k in range(40))
    assert pa.types.is_dictionary(aligned["shop"]["device"].type)


def test_aligned_tables_train() -> None:
    rng = np.random.default_rng(0)
    ids = rng.permutation(200)
    bank = pd.DataFrame({"id": ids, "a": rng.normal(size=200), "label": ids % 2})
    shop = pd.DataFrame({"id": np.arange(50, 250), "b": np.arange(50, 250) % 2 + rng.normal(scale=0.1, size=200)})
    aligned = align({"bank": bank, "shop": shop})
    y = aligned["bank"].pop("label")
    model = GBDTClassifier(n_estimators=3).fit(aligned, y)
    assert model.score(aligned, y) > 0.99  # b tells the label, if rows of both belong together


NULL = st.none()
IDS: dict[str, tuple[Any, Any]] = {
    "numbers": (st.one_of(NULL, st.integers(-(2**53), 2**53), st.integers(0, 9)), 7),
    "unicode": (st.one_of(NULL, st.text("aA\u00e9e\u0301 \u00dfIi\u4e2d\U0001f600", max_size=3)), "x"),
    "dates": (st.one_of(NULL, st.dates()), pd.Timestamp("2026-01-31").date()),
    "bytes": (st.one_of(NULL, st.binary(max_size=2)), b"x"),
}


@pytest.mark.filterwarnings("ignore:.*common to all parties")
@pytest.mark.parametrize(("values", "shared"), IDS.values(), ids=IDS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_kkrt_gives_the_rows_of_a_plain_join(values: Any, shared: Any, data: st.DataObject) -> None:
    """Random ids, some repeated or null, at three parties; numbers are floats at one of them, for its nulls."""
    columns = {name: [*data.draw(st.lists(values, max_size=30)), shared] for name in ("bank", "shop", "club")}
    tables: dict[str, Any] = {
        name: pa.table({"id": column, name: np.arange(len(column))}) for name, column in columns.items()
    }
    if shared == 7:
        floats = np.array([np.nan if value is None else value for value in columns["shop"]])
        tables["shop"] = pd.DataFrame({"id": floats, "shop": np.arange(len(floats))})
    aligned = treaty.align(tables, psi="kkrt", on_duplicate="expand", progress=lambda done, total: None)
    plain = [
        pd.DataFrame({"id": pd.Series(map(canonical, column), dtype=object), name: np.arange(len(column))}).dropna()
        for name, column in columns.items()
    ]
    joined = plain[0].merge(plain[1], on="id").merge(plain[2], on="id")
    found = zip(*(np.asarray(aligned[name][name]).tolist() for name in columns), strict=True)
    assert sorted(found) == sorted(joined[list(columns)].itertuples(index=False, name=None))


def canonical(value: Any) -> Any:
    if isinstance(value, str):
        value = unicodedata.normalize("NFC", value).strip()
    return value if value not in ("", b"") else None


@pytest.mark.slow
def test_repeated_ids_give_the_rows_of_a_join() -> None:
    left = pd.DataFrame({"id": [1, 1, 2, None, 4], "x": range(5)})
    right = pd.DataFrame({"id": [2, 1, 1, 1, 7], "y": range(5)})
    aligned = align({"left": left, "right": right}, on_duplicate="expand")
    joined = left.dropna().merge(right, on="id")
    found = sorted(zip(aligned["left"]["x"], aligned["right"]["y"], strict=True))
    assert found == sorted(zip(joined["x"], joined["y"], strict=True))


@pytest.mark.slow
def test_only_the_active_table_comes_back_when_only_it_learns() -> None:
    aligned = align(ALL, result_to="active", active="shop")
    assert list(aligned) == ["shop"]
    assert sorted(aligned["shop"]["y"]) == list(range(30, 70))


@pytest.mark.slow
def test_logs_are_kept_per_party_and_show_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    tables = {"bank": ALL["bank"], "shop": ALL["shop"]}
    align(tables, log=tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == 2048
    assert {path.name for path in tmp_path.glob("*.runs")} == {"bank.runs", "shop.runs"}
    with pytest.raises(ConfigError, match="has started 1 alignments"):
        align(tables, log=tmp_path, max_runs=1)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "one table": ({"bank": ALL["bank"]}, {}, ConfigError, "at least two"),
    "unknown active": (ALL, {"active": "club2"}, ConfigError, "expected active"),
    "column for some": (ALL, {"on": {"bank": "id"}}, ConfigError, "expected `on`"),
    "no such column": (ALL, {"on": "key"}, DataError, "bank: expected a column 'key' of ids, got .*on={'bank': NAME"),
    "an array": ({**ALL, "bank": np.zeros((3, 2))}, {}, DataError, "bank: expected a dataframe in memory, got ndarray"),
    "lazy": ({**ALL, "shop": ALL["shop"].lazy()}, {}, DataError, "shop: expected a dataframe in memory"),
    "unknown option": (ALL, {"normalise": ["upper"]}, ConfigError, "expected normalise"),
}


@pytest.mark.parametrize(("tables", "options", "error", "message"), BAD.values(), ids=BAD)
def test_unusable_input_is_named(
    tables: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        align(tables, **options)


def test_each_party_is_told_how_many_of_its_ids_are_common(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.simplefilter("error")
        align({"bank": ALL["bank"], "shop": pd.DataFrame({"id": [*SHOP["id"], None]})})
    assert "bank: 60 of its 90 ids are common to all parties (66.7%)" in caplog.text
    assert "shop: 60 of its 60 ids are common to all parties (100.0%); 1 rows without an id" in caplog.text


def test_who_has_few_common_ids_is_warned_with_the_usual_causes() -> None:
    """Ids of which one party's file has lost the padding zeros: those of four digits alone are common."""
    numbers = np.arange(1, 1100)
    bank = pd.DataFrame({"id": [f"{n:04}" for n in numbers], "x": numbers})
    shop = pd.DataFrame({"id": [str(n) for n in numbers[500:]], "y": numbers[500:]})
    with pytest.warns(UserWarning, match=r"^bank: 100 of its 1099 ids .* \(9\.1%\)\. .*padding zeros .*case") as told:
        align({"bank": bank, "shop": shop})
    assert len(told) == 1  # the shop shares 100 of 599
    with pytest.raises(DataError, match=r"got none .*padding zeros"):
        align({"bank": bank, "shop": shop.iloc[:300]})


WAYS = {
    "path": lambda path: str(path),
    "read_table": treaty.read_table,
    "open_table": treaty.open_table,
    "open_table with id": lambda path: treaty.open_table(path, id="key"),
    "categorical": lambda path: treaty.read_table(path, categorical=["key"]),
}


@pytest.mark.filterwarnings("ignore:.*common to all parties")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("bank", "shop"),
    [
        (["007", "12", "013"], ["7", "0012", "013"]),
        (["1e3", "12", "013"], ["1000", "12.0", "013"]),
        (["+7", "-0", "013", ""], [" 7", "0", "013", "-7"]),
        (["1234567890123456789", "013"], ["1234567890123456788", "013"]),
    ],
)
def test_ids_are_what_the_file_says_however_it_is_read(tmp_path, monkeypatch, way, on_disk, bank, shop) -> None:
    """Read as numbers 007 was 7, so that a table of `read_table` had other common rows than its path."""
    monkeypatch.setattr(file_formats, "PIECE", 16)
    monkeypatch.setattr(reading, "ON_DISK", 0 if on_disk else 1 << 30)
    tables = {}
    for name, ids in {"bank": bank, "shop": shop}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["key,x", *(f"{key},{k}.5" for k, key in enumerate(ids))]))
        tables[name] = way(tmp_path / f"{name}.csv")
    for aligned in treaty.align(tables, on="key", drop_id=False).values():
        assert aligned["key"].to_pylist() == ["013"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_text_that_is_kept_for_ids_is_numbers_as_a_feature(tmp_path, monkeypatch, on_disk) -> None:
    monkeypatch.setattr(reading, "ON_DISK", 0 if on_disk else 1 << 30)
    (tmp_path / "t.csv").write_text("id,month,x\n" + "".join(f"{k},{1 + k % 12:02},{k}e1\n" for k in range(40)))
    read = treaty.read_table if not on_disk else treaty.open_table
    table = read(tmp_path / "t.csv", drop=["id"])
    assert table["month"].to_pylist()[:2] == ["01", "02"]
    assert table["x"].to_pylist()[:2] == ["0e1", "1e1"]
    for of in (table, table.take(list(range(40))), table.select(["month", "x"])):
        made, plain = to_table(of), to_table(source_table(tmp_path / "t.csv", drop=["id"]))
        assert made.schema == plain.schema
        assert np.array_equal(made.matrix(), plain.matrix())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"on": ["id", "day"]},
            "on to be one column, or a mapping of party to column; first join .* got list",
        ),
        ({"tables": [TABLE, TABLE]}, "tables to be a mapping of party to table, got list"),
        ({"tables": TABLE}, "tables to be a mapping of party to table, got DataFrame"),
        ({"tables": {1: TABLE, 2: TABLE}}, "names of parties as text, got 1, 2"),
        ({"active": ["a"]}, "active to be the name of a party, got list"),
        ({"normalise": None}, 'normalise to be a list of "nfc", "strip", "lower", got NoneType'),
        ({"n_jobs": "2"}, "n_jobs to be a whole number or None, got str"),
        ({"log": 5}, "log to be the path of a folder, got int"),
        ({"max_runs": "5"}, "max_runs to be a whole number, got str"),
        ({"progress": 5}, "progress to be a function of two numbers, got int"),
    ],
)
def test_an_argument_of_another_type_is_named(given, said):
    with pytest.raises(treaty.ConfigError, match=f"expected {said}"):
        treaty.align(**{"tables": {"a": TABLE, "b": TABLE}, **given})


def test_repeated_names_and_lazy_tables_are_refused_by_party() -> None:
    twice = pd.DataFrame([["a", 1, 2]], columns=["id", "x", "x"])
    with pytest.raises(DataError, match=r"^shop: expected unique column names, got more than one of 'x'"):
        align({"bank": TABLE, "shop": twice})
    with pytest.raises(DataError, match=r"^shop: .*got LazyFrame; call \.collect\(\) first"):
        align({"bank": TABLE, "shop": pl.from_pandas(TABLE).lazy()})
