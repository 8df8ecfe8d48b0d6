"""Code that a file or a partner names: nothing is imported that this process does not trust, and nothing but losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import treaty
from runs.job_files import TREATY, one_line
from tables import real_table
from treaty.estimators.reporting import FORMAT, read_saved
from treaty.files import write_json
from treaty.machine import process
from treaty.machine.process import imported, is_code, trust
from treaty.runs.job_files import load_job
from treaty.trees.custom_losses import loss_at

PLANTED = """
from pathlib import Path
import numpy as np
import treaty
Path(__file__).with_suffix(".imported").touch()

def called(*given):
    Path(__file__).with_suffix(".called").touch()

class Squared(treaty.CustomLoss):
    link = "identity"
    def bounds(self, y): return 2.0 * float(np.max(np.abs(y))), 1.0
    def gradients(self, margins, y): return margins - y, np.ones_like(y)
    def loss(self, margins, y): return 0.5 * (margins - y) ** 2

class NoLoss:
    link = "identity"
    __init__ = bounds = gradients = loss = called
"""
OPTIONS = {"n_estimators": 2, "min_child_samples": 1, "max_bin": 8, "n_jobs": 1, "base_score": 0.5}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Put a module where Python finds it, which notes that it was imported; return its path."""
    monkeypatch.setattr(process, "_TRUSTED", set())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(treaty.__file__).parents[1]}")
    file = tmp_path / "planted.py"
    file.write_text(PLANTED)
    yield file
    sys.modules.pop("planted", None)


def was(file: Path, what: str) -> bool:
    return file.with_suffix(f".{what}").exists()


@pytest.mark.parametrize(
    ("name", "code"), [("os:abort", True), ("reg:squarederror", False), ("secureboost", False), (None, False)]
)
def test_names_of_code(name, code):
    assert is_code(name) is code


@pytest.mark.parametrize("field", ["protocol", "objective"])
@pytest.mark.parametrize("name", ["planted:Squared", "os:abort"])
def test_a_saved_model_imports_nothing(tmp_path, planted, field, name):
    X, y = real_table("regression", rows=100)
    treaty.GBDTRegressor(**OPTIONS).fit(X, y).save(tmp_path / "model")
    saved = read_saved(tmp_path / "model")
    changed = msgspec.structs.replace(saved, params={**saved.params, field: name})
    write_json(tmp_path / "model" / "model.json", changed, FORMAT, "")
    with pytest.raises(treaty.ConfigError, match=rf"names code, '{name}', .* load\(\.\.\., trusted=\['{name}'\]\)"):
        treaty.load(tmp_path / "model")
    assert not was(planted, "imported")
    if field == "objective":  # predicting needs no more than the model has
        np.testing.assert_array_equal(treaty.load(tmp_path / "model", trusted=[name]).predict(X)[:3].shape, (3,))
        assert not was(planted, "imported")


@pytest.mark.parametrize("name", ["planted:called", "planted:NoLoss", "planted:Path", "planted:np.zeros"])
def test_nothing_is_called_that_is_no_loss(planted, name):
    trust([name])
    with pytest.raises(treaty.ConfigError, match=r"it is no subclass of treaty\.CustomLoss"):
        loss_at(name)
    assert was(planted, "imported")
    assert not was(planted, "called")


def test_what_is_not_trusted_is_not_imported(planted):
    for call in (lambda: imported("planted:Squared", "the loss"), lambda: loss_at("planted:Squared")):
        with pytest.raises(treaty.ConfigError, match=r"the loss 'planted:Squared' is code, .*--trust planted:Squared"):
            call()
    assert not was(planted, "imported")


def job_file(folder: Path, protocol: str, objective: str) -> Path:
    X, y = real_table("regression", rows=100)
    X = X.select_dtypes("number")
    X.iloc[:, :2].assign(y=y).to_csv(folder / "a.csv", index=False)
    X.iloc[:, 2:4].to_csv(folder / "b.csv", index=False)
    path = folder / "job.toml"
    path.write_text(
        f'name = "n"\nprotocol = "{protocol}"\nactive = "a"\nlabel = "y"\ntask = "regression"\nn_jobs = 1\n'
        f'[boosting]\nobjective = "{objective}"\nn_estimators = 2\n'
        '[parties.a]\ntable = "a.csv"\n[parties.b]\ntable = "b.csv"\n'
        "[secureboost]\nallow_exact_sums = true\nallow_insecure = true\ninsecure_test_key_bits = 512\n"
    )
    return path


@pytest.mark.parametrize(
    ("protocol", "objective"),
    [("planted:SYSTEM", "squared_error"), ("secureboost", "planted:Squared"), ("secureboost", "os:abort")],
)
def test_a_job_file_imports_nothing(tmp_path, planted, protocol, objective):
    with pytest.raises(treaty.ConfigError, match=r"is code, which is imported only where its user trusts it"):
        load_job(job_file(tmp_path, protocol, objective))
    assert not was(planted, "imported")


def test_the_command_line_trusts_for_all_parties_processes(tmp_path, planted):
    path = job_file(tmp_path, "secureboost", "planted:Squared")
    refused = subprocess.run([*TREATY, "train", str(path)], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--trust planted:Squared" in one_line(refused.stderr)
    assert not was(planted, "imported")
    command = [*TREATY, "train", str(path), "--trust", "planted:Squared"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert was(planted, "imported")


def test_a_class_that_is_handed_over_needs_no_trust(planted):
    import planted as module

    X, y = real_table("regression", rows=100)
    own = treaty.GBDTRegressor(**OPTIONS).fit(X, y)
    for objective in (module.Squared, "planted:Squared"):  # an argument, and no file's
        np.testing.assert_array_equal(
            treaty.GBDTRegressor(objective=objective, **OPTIONS).fit(X, y).predict(X), own.predict(X)
        )
