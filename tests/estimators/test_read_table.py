"""`treaty.read_table`: what estimators get of a file is what job files make of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treaty
from tables import real_table
from treaty.runs.job import Job, Member
from treaty.runs.table_files import read_rows


def written(folder: Path) -> Path:
    X, y = real_table("binary")
    town = np.where(X["mean radius"] > 14, "Rome", "Oslo").astype(object)
    town[3] = None
    X.assign(town=town, zip=["01234", "98765", "00001"] * 80, y=y).to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


def test_a_file_is_read_as_jobs_read_it(tmp_path: Path) -> None:
    path = written(tmp_path)
    table = treaty.read_table(path, categorical=["zip"], drop=["y"])
    fitted = treaty.GBDTClassifier("pooled", n_estimators=2).fit(table, real_table("binary")[1])
    member = Member(table=str(path), categorical=["zip"])
    # split by column: by row, participants judge together which columns need float64
    job = Job(name="t", active="a", label="y", parties={"a": member, "b": Member()}, protocol="secureboost")
    rows = read_rows(job.table_rules("a"), str(path)).features
    (part,) = fitted.parts_.values()
    assert part.schema == rows.schema
    assert part.schema.categories[-2:] == (("Oslo", "Rome"), ("00001", "01234", "98765"))
    assert table["town"].null_count == 1


def test_a_stray_cell_is_named_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace("01234", "-").replace(",Rome,", ",2,"))
    with pytest.raises(treaty.DataError, match=r"'town' has .*'Oslo' in line 10,.*; column 'zip' has .*'-' in line 2"):
        treaty.read_table(path)
    with pytest.raises(treaty.DataError, match=r"columns, 'zap', got a file without it, .*; did you mean 'zip'"):
        treaty.read_table(path, categorical=["zap"])


@pytest.mark.parametrize("read", [treaty.read_table, treaty.open_table])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drop": "y"}, "expected drop to be a list of columns' names, got 'y'"),
        ({"drop": None}, "expected drop to be a list"),
        ({"columns": "y"}, "expected columns to be a list"),
        ({"columns": [0]}, "expected columns to be a list"),
        ({"columns": ["y", "y"]}, "expected every column once"),
        ({"categorical": "zip"}, "expected categorical to be a list"),
        ({"drop": ["Y"]}, "expected the columns to drop, 'Y', got a file without it, with 'x', 'yy', 'y'"),
    ],
)
def test_columns_are_a_list_of_names_that_the_file_has(tmp_path: Path, read, given, said) -> None:
    """Of drop="y", and of a misspelt name, nothing was dropped, so that the label stayed among the columns."""
    path = tmp_path / "t.csv"
    path.write_text("x,yy,y\n1,2,0\n2,3,1\n")
    with pytest.raises(treaty.TreatyError, match=said):
        read(path, **given)


@pytest.mark.parametrize("path", [None, 3, b"t.csv", ["a.csv", "b.csv"], "https://example.org/t.csv", np.zeros((2, 2))])
def test_what_is_no_path_names_its_argument(tmp_path: Path, path) -> None:
    model = treaty.GBDTRegressor(n_estimators=1, n_jobs=1)
    X, y = np.arange(60.0)[:, None], np.arange(60.0)
    for call, argument in ((treaty.read_table, "path"), (treaty.open_table, "source"), (treaty.load, "folder")):
        with pytest.raises(treaty.ConfigError, match=f"expected {argument} to be a path on this machine"):
            call(path)
    if path is not None:
        with pytest.raises(treaty.ConfigError, match="expected checkpoint to be a path"):
            model.fit(X, y, checkpoint=path)
    model.fit(X, y)
    with pytest.raises(treaty.ConfigError, match="expected folder to be a path"):
        model.save(path)
    with pytest.raises(treaty.ConfigError, match="expected path to be a path"):
        model.report(path)


@pytest.mark.parametrize(("id", "said"), [("costumer", "a column of ids, 'costumer'.*'customer'"), (3, "id to be the")])
def test_a_column_of_ids_that_is_not_there_is_refused(tmp_path: Path, id, said) -> None:
    (tmp_path / "t.csv").write_text("customer,x\n1,2\n")
    with pytest.raises(treaty.TreatyError, match=said):
        treaty.open_table(tmp_path / "t.csv", id=id)
