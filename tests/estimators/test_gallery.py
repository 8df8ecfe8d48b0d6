"""The page "From XGBoost and scikit-learn": its example runs, also on a real credit table, and its names exist."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import treaty
from treaty.runs.job import Job

REPOSITORY = Path(__file__).parent.parent.parent
PAGE = (REPOSITORY / "docs/from_xgboost.md").read_text()


@pytest.fixture(scope="module")
def example():
    """Return the names that the page's example leaves."""
    code = re.search(r"```python\n(.*?)```", PAGE, flags=re.S).group(1)
    left = {}
    exec(compile(code, "from_xgboost.md", "exec"), left)
    return left


def test_the_example_gives_what_the_page_says(example):
    model, found = example["model"], example["found"]
    assert found["cross-validated AUC"] > 0.97
    assert found["AUC"] > 0.97
    assert found["Brier score"] < 0.06
    assert list(model.evals_result()["eval_0"]) == ["logloss", "auc"]
    assert found["contributions"].columns[-1] == "bias"
    best, gains = max(found["gains"], key=found["gains"].get), found["losses of AUC"].importances_mean
    assert gains[list(model.feature_names_in_).index(best)] > 0.0
    assert set(found["learned"]) == {"bank", "shop"}


def test_the_example_makes_a_credit_model_of_two_parties(example):
    for folder in (os.environ.get("TREATY_DATA"), REPOSITORY.parent / "shared" / "data"):
        if folder and (Path(folder) / "credit2.parquet").is_file():
            table = pd.read_parquet(Path(folder) / "credit2.parquet")
            break
    else:
        pytest.skip("real data set credit2.parquet is not here; set TREATY_DATA to the folder that has it")
    rows = np.random.default_rng(0).permutation(len(table))[:4000]
    table = table.iloc[rows].reset_index(drop=True)
    repaid = 1 - table.pop("default.payment.next.month")
    table = table.drop(columns="ID")
    parties = {"bank": list(table.columns[:11]), "shop": list(table.columns[11:])}
    _, found = example["credit_model"](table, repaid, parties)
    assert found["cross-validated AUC"] > 0.72
    assert found["AUC"] > 0.72
    assert found["Brier score"] < 0.16


def test_names_of_the_page_are_parameters_methods_or_attributes():
    kinds = (treaty.GBDTClassifier, treaty.LogisticRegression)
    signatures = [inspect.signature(of) for kind in kinds for of in (kind, kind.fit)]
    known = {name for of in signatures for name in of.parameters} | {name for kind in kinds for name in dir(kind)}
    known |= {*treaty.__all__, *Job.__struct_fields__, "party"}
    fitted = {"evals_result_", "best_iteration_", "best_score_"}
    rows = re.findall(r"^\|.*\|.*\|(.*)\|$", PAGE.partition("## Names")[2], flags=re.M)[2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert named - known - fitted <= {"treaty", "after_iteration", "eval_0", "eval_1", "metric"}
