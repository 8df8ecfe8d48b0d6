"""A job with a dealer between processes over TLS: aligned, trained, predicted and explained without its help."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import treaty
from flat import option_lines
from runs.job_files import TREATY, one_line
from tables import real_table
from treaty.cli.main import app
from treaty.runs.job_files import load_job
from treaty.runs.party import train_party


def write_job(folder: Path) -> tuple[Path, dict[str, pd.DataFrame]]:
    """Write tables in orders of their own, with ids, and the job of a bank, a shop and a dealer."""
    X, y = real_table("binary", rows=200)
    tables = {"bank": X.iloc[:, :4].assign(y=y), "shop": X.iloc[:, 4:8]}
    protocol, options = option_lines("fedxgboost-smm", backend="dealer", n_estimators=2, min_child_samples=5)
    lines = ['name = "test"', protocol, 'active = "bank"', 'label = "y"', "timeout = 60", "reconnect = 2", "n_jobs = 1"]
    for seed, (name, table) in enumerate(tables.items()):
        table.assign(id=[f"person {k}" for k in range(len(table))]).sample(frac=0.9, random_state=seed).to_csv(
            folder / f"{name}.csv", index=False
        )
        lines += [f"[parties.{name}]", f'table = "{name}.csv"', f'predict_table = "{name}.csv"']
    lines += ["[parties.helper]", 'role = "dealer"', *options, "[align]", 'on = "id"']
    (folder / "job.toml").write_text("\n".join(lines))
    return folder / "job.toml", tables


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, pd.DataFrame], str]:
    """Return the job of a finished training of three processes, the owners' tables and what the command printed."""
    job, tables = write_job(tmp_path_factory.mktemp("trained"))
    done = subprocess.run([*TREATY, "train", str(job)], capture_output=True, text=True, check=True)
    return job, tables, done.stdout


@pytest.mark.slow
def test_a_dealer_helps_to_train_and_learns_nothing(trained):
    job, own, printed = trained
    assert "helper: took part" in printed
    assert "encryption: dealer, as the job says" in printed
    model = job.parent / "model"
    reports = {name: json.loads((model / f"{name}.report.json").read_text()) for name in (*own, "helper")}
    assert all(set(report["learned"]) == {"bank", "shop", "helper"} for report in reports.values())
    assert "nothing about any party's data" in reports["shop"]["learned"]["helper"][0]
    assert set(reports["helper"]["sent"]) == {"bank", "shop"}
    assert not (model / "helper.part").exists()
    with pytest.raises(treaty.ConfigError, match=r"helper, the dealer, has no part of the model: .* --as bank or shop"):
        CliRunner().invoke(app, ["predict", str(job), "--as", "helper"], catch_exceptions=False)


@pytest.mark.slow
def test_predictions_without_the_dealer_are_those_of_pooled_training(trained):
    job, tables, _ = trained
    subprocess.run([*TREATY, "predict", str(job)], check=True, capture_output=True)
    predicted = pd.read_csv(job.parent / "model" / "predictions.csv")
    rows = predicted["id"].str.removeprefix("person ").astype(int)
    own = {name: table.drop(columns="y", errors="ignore").iloc[rows] for name, table in tables.items()}
    pooled = treaty.GBDTClassifier(n_estimators=2, min_child_samples=5, max_bin=64).fit(
        own, tables["bank"]["y"].iloc[rows]
    )
    np.testing.assert_array_equal(predicted["probability_1"], pooled.predict_proba(own)[:, 1])


@pytest.mark.slow
def test_a_job_that_lacks_its_dealer_is_refused_before_anybody_connects(tmp_path):
    path, _ = write_job(tmp_path)
    path.write_text(path.read_text().replace('[parties.helper]\nrole = "dealer"\n', ""))
    with pytest.raises(treaty.ConfigError, match="needs a party without data: add"):
        train_party(load_job(path), "bank")
    asked = subprocess.run([*TREATY, "train", str(path)], capture_output=True, text=True, check=False)
    assert one_line(asked.stderr).count("needs a party without data: add") == 1
    assert asked.returncode == 2
