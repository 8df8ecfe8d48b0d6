"""`treaty.read_table`: what estimators get of a file is what job files make of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treaty
from tables import real_table
from treaty.runs.job import Job, Member
from treaty.runs.rows import read_rows


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
    job = Job(name="t", active="a", label="y", parties={"a": member}, protocol="federboost-horizontal")
    rows = read_rows(job, "a", str(path)).features
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
