"""Predictions over HTTP are those of `treaty predict` for the same rows, bit for bit, for each kind of model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import treaty
from flat import option_lines
from runs.small_jobs import played
from tables import real_table, with_categories, with_gaps
from treaty.cli.main import app
from treaty.data.table import to_table
from treaty.models.linear import LinearPart, pooled_margins
from treaty.models.trees import ModelPart, predict_pooled
from treaty.node.identity import make_keys
from treaty.runs.job import Job
from treaty.runs.job_files import load_job
from treaty.runs.party import part_file
from treaty.runs.processes import free_ports
from treaty.serving.app import make_app
from treaty.serving.models import ServedModel, load_model
from treaty.serving.service import PredictionService


def as_json(X: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows as JSON has them: missing cells are null."""
    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in X.astype(object).to_dict("records")
    ]


def asked(model: ServedModel, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return what a server says, as the columns of a file."""
    service = PredictionService(model)
    answer = TestClient(make_app(service)).post("/predict", json={"rows": rows})
    assert answer.status_code == 200, answer.text
    assert answer.json()["fallback"] is False
    return pd.DataFrame(answer.json()["predictions"])


def assert_same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    assert list(found) == list(expected)
    for name in found:
        assert found[name].tolist() == expected[name].tolist(), name


def job_of(folder: Any, protocol: str, tables: dict[str, pd.DataFrame], *lines: str, **options: Any) -> Job:
    """Write tables and a job of an active party "a" and others; they predict the rows that they were trained on."""
    line, of_options = option_lines(protocol, n_estimators=6, max_depth=3, min_child_samples=5, **options)
    written = ['name = "test"', line, 'active = "a"', 'label = "y"', "n_jobs = 1", "timeout = 600", *lines]
    for (name, table), port in zip(tables.items(), free_ports(len(tables)), strict=True):
        make_keys(folder, name)
        table.to_csv(folder / f"{name}.csv", index=False)
        table.drop(columns="y", errors="ignore").to_csv(folder / f"{name}.rows.csv", index=False)
        written += [f"[parties.{name}]", f'address = "127.0.0.1:{port}"', f'certificate = "{name}.cert.pem"']
        written += [f'key = "{name}.key.pem"', f'table = "{name}.csv"', f'predict_table = "{name}.rows.csv"']
    (folder / "job.toml").write_text("\n".join([*written, *of_options]))
    job = load_job(folder / "job.toml")
    assert played(dict.fromkeys(job.parties, job)) == {}
    return job


def predicted(job: Job, folder: Any, party: str) -> pd.DataFrame:
    """Return what `treaty predict` writes, of a party that predicts alone."""
    done = CliRunner().invoke(
        app, ["predict", str(folder / "job.toml"), "--as", party, "--output", str(folder / "out.parquet")]
    )
    assert done.exit_code == 0, done.output
    return pd.read_parquet(folder / "out.parquet")


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_a_whole_model_of_rows_with_categories_and_missing_values(task, tmp_path):
    X, y = real_table(task, rows=170)
    X = with_categories(with_gaps(X))
    names = np.array(["low", "middle", "high"])
    table = X.assign(y=y if task == "regression" else names[y])
    thirds = {name: table.iloc[k::3] for k, name in enumerate("abc")}
    lines = ['task = "regression"'] if task == "regression" else [f"classes = {len(set(y))}"]
    job = job_of(tmp_path, "federboost-horizontal", thirds, *lines)
    rows = pd.read_csv(tmp_path / "b.rows.csv")
    rows.iloc[:3, 0] = ["never seen before", None, "a"]
    rows.to_csv(tmp_path / "b.rows.csv", index=False)
    expected = predicted(job, tmp_path, "b")
    served = load_model(part_file(job.output, "b"))
    assert_same(asked(served, as_json(rows)), expected)
    singly = pd.concat([asked(served, [row]) for row in as_json(rows)[:20]], ignore_index=True)
    assert_same(singly, expected.iloc[:20])


def test_an_active_part_whose_splits_are_all_its_own(tmp_path):
    X, y = real_table("binary", rows=200)
    X = with_categories(with_gaps(X))
    idle = pd.DataFrame({"nothing": np.ones(len(X))})
    job = job_of(tmp_path, "secureboost", {"a": X.assign(y=y), "b": idle}, encryption="lattice")
    written = tmp_path / "out.parquet"
    command = [sys.executable, "-m", "treaty", "predict", str(tmp_path / "job.toml"), "--output", str(written)]
    subprocess.run(command, check=True, capture_output=True)
    served = load_model(part_file(job.output, "a"))
    assert served.needs == ()
    assert_same(asked(served, as_json(pd.read_csv(tmp_path / "a.rows.csv"))), pd.read_parquet(written))


POOLED = {
    "classifier": (treaty.GBDTClassifier("pooled", n_estimators=8), "binary"),
    "several classes": (treaty.GBDTClassifier("pooled", n_estimators=5), "multiclass"),
    "regressor": (treaty.GBDTRegressor("pooled", n_estimators=8), "regression"),
    "counts": (treaty.GBDTRegressor("pooled", n_estimators=8, objective="poisson"), "regression"),
    "logistic": (treaty.LogisticRegression("pooled"), "binary"),
    "several logistic": (treaty.LogisticRegression("pooled"), "multiclass"),
    "linear": (treaty.LinearRegression("pooled"), "regression"),
    "poisson": (treaty.PoissonRegressor("pooled"), "regression"),
}


@pytest.mark.filterwarnings("ignore:training ended", "ignore:.*beyond 4")
@pytest.mark.parametrize("kind", POOLED)
def test_a_pooled_model(kind, tmp_path):
    estimator, task = POOLED[kind]
    X, y = real_table(task, rows=170)
    X = with_categories(with_gaps(X))
    fitted = estimator.fit(X, y)
    fitted.save(tmp_path / "model")
    served = load_model(tmp_path / "model")
    part = served.part
    table = to_table(X, schema=part.schema)  # as files are read, and then as `treaty predict` does
    if isinstance(part, ModelPart):
        margins = predict_pooled([part], [table])
    else:
        assert isinstance(part, LinearPart)
        margins = pooled_margins({part.party: part}, {part.party: table})
    found = asked(served, as_json(X))
    assert_same(found, pd.DataFrame(part.predictions(margins)))
    if hasattr(fitted, "predict_proba"):
        probabilities = found[[name for name in found if name.startswith("probability")]].to_numpy()
        assert np.array_equal(probabilities, fitted.predict_proba(X))
    else:
        assert np.array_equal(found["prediction"], fitted.predict(X))


def test_trees_say_the_same_of_rows_however_they_are_put_together():
    X, y = real_table("multiclass", rows=170)
    X = with_categories(with_gaps(X))
    part = treaty.GBDTClassifier("pooled", n_estimators=30).fit(X, y).parts_["pooled"]
    served, matrix = ServedModel(part), to_table(X, schema=part.schema).matrix()
    whole = served.margins(matrix, threads=2)
    assert np.array_equal(whole, predict_pooled([part], [to_table(X, schema=part.schema)]))
    rng, at, said = np.random.default_rng(0), 0, []
    while at < len(matrix):
        step = int(rng.integers(1, 9))
        said += served.predictions(served.margins(matrix[at : at + step]))
        at += step
    assert said == served.predictions(whole)


def test_linear_models_say_the_same_of_rows_however_they_are_put_together_but_for_the_last_bit():
    X, y = real_table("binary", rows=170)
    part = treaty.LogisticRegression("pooled", max_iter=300).fit(X, y).parts_["pooled"]
    served, matrix = ServedModel(part), to_table(X, schema=part.schema).matrix()
    singly = np.concatenate([served.margins(matrix[k : k + 1]) for k in range(len(matrix))])
    np.testing.assert_allclose(singly, served.margins(matrix), rtol=0, atol=1e-13)


def test_numbers_are_those_of_a_file(tmp_path):
    """Whole numbers, truth values, and numbers of more digits than float32 has."""
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.integers(-(2**62), 2**62, 60), [2**53 + 1, 2**24 + 1, 2**31, 0, -1, 2**63 - 1]])
    X = pd.DataFrame({"whole": values, "digits": rng.normal(size=len(values)) * 1e-30, "truth": rng.random(66) < 0.5})
    served = ServedModel(treaty.GBDTRegressor("pooled").fit(X, values / 2.0**62).parts_["pooled"])
    read = PredictionService(served)._reader.read(json.dumps({"rows": as_json(X)}).encode())
    X.to_csv(tmp_path / "x.csv", index=False)
    assert np.array_equal(read.matrix, to_table(treaty.read_table(tmp_path / "x.csv"), schema=served.schema).matrix())
