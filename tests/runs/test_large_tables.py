"""Jobs whose tables lie on disk: aligned or not, their models and predictions are those of tables in memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from large_tables import random_table, write
from pace import within
from runs.small_jobs import model, played
from treaty.data import reading
from treaty.data.arrow_tables import FileTable
from treaty.errors import ConfigError, DataError
from treaty.node.identity import make_keys
from treaty.runs import table_files
from treaty.runs.job import Job, Member
from treaty.runs.job_files import load_job
from treaty.runs.local_checks import CELL, expect
from treaty.runs.prediction import predict_party
from treaty.runs.processes import free_ports
from treaty.runs.table_files import read_alone, read_rows

LATTICE = 'protocol = "secureboost"\n[secureboost]\nencryption = "lattice"\nallow_exact_sums = true'
FEDERBOOST = 'protocol = "federboost-vertical"\n[federboost-vertical]\nmode = "paper"\nepsilon = inf'
BY_ROW = 'protocol = "federboost-horizontal"\n[federboost-horizontal]\nmode = "paper"'


def write_job(folder: Path, system: str, kind: str, *, align: bool) -> Job:
    """Write tables, keys and job of two parties."""
    table = random_table(400)
    y = (np.nan_to_num(table["gaps"].to_numpy()) + table["whole"].to_numpy() / 9 > 0.1).astype(int)
    table = table.append_column("y", pa.array(np.where(y, "yes", "no")))
    table = table.append_column("w", pa.array(np.random.default_rng(2).random(400)))
    table = table.append_column("id", pa.array([f"{k:05d}" for k in range(400)]))
    own = {
        "a": ["plain", "gaps", "truth", "town", "y", "w"],
        "b": ["whole", "large", "of none", "town.2", "of one value"],
    }
    rng = np.random.default_rng(5)
    lines = ['name = "test"', 'active = "a"', 'label = "y"', 'weight = "w"', "timeout = 600", 'store = "store"']
    protocol, _, options = system.partition("\n")
    ends = ["[boosting]", "n_estimators = 2", "max_depth = 3", "max_bin = 16", "min_child_samples = 5", options]
    lines += [protocol, "n_jobs = 1", *(["[align]", 'on = "id"'] if align else [])]
    for number, (name, port) in enumerate(zip(own, free_ports(2), strict=True)):
        make_keys(folder, name)
        columns = table.column_names if system == BY_ROW else own[name]
        if align:
            of = table.take(np.sort(rng.permutation(400)[:370]) if name == "a" else rng.permutation(400)[:380])
        else:
            of = table.take(np.arange(number, 400, 2)) if system == BY_ROW else table
        of = of.select([*columns, *(["id"] if align and "id" not in columns else [])])
        if system == BY_ROW:
            of = of.drop_columns(["id"])
        paths = [f"{name}.{kind}" if kind != "folder" else name for name in (name, f"{name} eval")]
        for path, part in zip(paths, (of, of[:150]), strict=True):
            write(part, folder / path)
        declared = "[]" if name == "a" and system != BY_ROW else '["whole"]'
        lines += [f"[parties.{name}]", f'address = "127.0.0.1:{port}"', f'certificate = "{name}.cert.pem"']
        lines += [f'key = "{name}.key.pem"', f'table = "{paths[0]}"', f'predict_table = "{paths[1]}"']
        lines += [f"categorical = {declared}"]
        if name == "a" or system != BY_ROW:
            lines += [f'eval_tables = ["{paths[1]}"]']
    (folder / "job.toml").write_text("\n".join([*lines, *ends]))
    return load_job(folder / "job.toml")


def predicted(job: Job) -> dict[str, Any]:
    """Return what parties predict, by id where there are some."""
    found: dict[str, Any] = {}

    def predict(name: str) -> None:
        ids, margins = predict_party(job, name)
        if margins is not None:
            names = range(len(margins)) if ids is None else ids.to_pylist()
            found[name] = dict(zip(names, margins.tolist(), strict=True))

    threads = [threading.Thread(target=predict, args=(name,), daemon=True) for name in job.parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within(100))
    return found


@pytest.mark.parametrize(
    ("system", "align", "kind"),
    [(LATTICE, True, "parquet"), (LATTICE, False, "folder"), (FEDERBOOST, True, "arrow"), (BY_ROW, False, "parquet")],
    ids=["lattice aligned", "lattice", "federboost aligned", "by row"],
)
def test_a_job_of_tables_on_disk_makes_the_model_of_those_in_memory(tmp_path, system, align, kind, monkeypatch):
    ends = []
    seen: list[Any] = []
    before = table_files.open_table

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(before(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(table_files, "open_table", noting)
    for limit in (1 << 40, 0):
        monkeypatch.setattr(reading, "ON_DISK", limit)
        folder = tmp_path / str(limit)
        folder.mkdir()
        job = write_job(folder, system, kind, align=align)
        assert played({name: job for name in job.parties}) == {}
        ends.append((repr(model(job)), predicted(job)))
    assert ends[0] == ends[1]
    half = len(seen) // 2
    assert all(isinstance(table, pa.Table) for table in seen[:half])
    assert all(isinstance(table, FileTable) for table in seen[half:])
    assert list((folder / "store" / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "member", "labels"),
    [
        ({}, {"drop": ["nothing"]}, {}),
        ({}, {"categorical": ["tawn"]}, {}),
        ({}, {"columns": ["plain", "plane"]}, {}),
        ({}, {}, {"label": "z"}),
        ({}, {}, {"weight": "z"}),
        ({"town": ["1"] * 399 + ["Rome"]}, {}, {}),
        ({"town": ["1"] * 400}, {}, {}),
        ({"y": [None] * 400}, {}, {}),
        ({"y": [1] * 400}, {}, {}),
        ({"plain": [float("inf")] * 400, "gaps": [[1]] * 400}, {}, {}),
        ({"w": [-1.0] * 400}, {}, {"weight": "w"}),
    ],
    ids=repr,
)
def test_what_is_wrong_is_told_in_the_same_words(tmp_path, changed, member, labels, monkeypatch):
    table = random_table(400).append_column("y", pa.array(np.arange(400) % 2))
    for name, values in changed.items():
        place = table.schema.get_field_index(name)
        table = table.append_column(name, pa.array(values)) if place < 0 else table.set_column(place, name, [values])
    path = str(write(table, tmp_path / "t.parquet"))
    said = []
    for limit in (1 << 40, 0):
        monkeypatch.setattr(reading, "ON_DISK", limit)
        job = Job(name="t", active="a", parties={"a": Member(table=path, **member)}, **({"label": "y"} | labels))
        with pytest.raises(DataError, match=r"^a: ") as caught:
            read_alone(job.table_rules("a"), path, training=True)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_store_without_room_ends_the_job_before_it_meets_others(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "ON_DISK", 0)
    monkeypatch.setattr("treaty.machine.arrays.shutil.disk_usage", lambda folder: type("Usage", (), {"free": 0})())
    path = str(write(random_table(), tmp_path / "t.parquet"))
    job = Job(name="t", active="a", label="y", parties={"a": Member(table=path)}, store=str(tmp_path / "store"))
    with pytest.raises(
        ConfigError, match=r"in .*store.scratch, which needs 0\.0 GB there: 0\.0 GB are free; make room"
    ):
        read_rows(job.table_rules("a"), path)


def test_a_table_on_disk_is_expected_to_take_memory_by_rows_alone(tmp_path, monkeypatch):
    job = write_job(tmp_path, LATTICE, "parquet", align=False)
    table = read_alone(job.table_rules("b"), str(job.parties["b"].table), training=True)[0].features
    monkeypatch.setattr(reading, "ON_DISK", 0)
    on_disk = read_alone(job.table_rules("b"), str(job.parties["b"].table), training=True)[0].features
    most, least = (expect(job, job.roles(), "b", of).memory for of in (table, on_disk))
    assert most - least == CELL * 400 * 5
