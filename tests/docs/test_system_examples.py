"""The program of each system in examples/systems runs, predicts well, and says what a partner could learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(ROOT.glob("examples/systems/*.py"))
CLASSES = {
    "federboost_by_column": {"FederBoostVertical"},
    "federboost_by_row": {"FederBoostHorizontal"},
    "fedxgb": {"FedXGB"},
    "fedxgboost": {"FedXGBoostSMM", "FedXGBoostLDP"},
    "quasi_newton": {"QuasiNewton"},
    "secureboost": {"SecureBoost"},
}


def test_each_system_has_a_short_program_that_the_page_lists():
    assert {path.stem for path in PROGRAMS} == set(CLASSES)
    page = (ROOT / "docs/howto/choose.md").read_text()
    for path in PROGRAMS:
        text = path.read_text()
        assert f"(../../examples/systems/{path.name})" in page
        assert all(f"treaty.{name}(" in text for name in CLASSES[path.stem])
        assert "# What a partner could learn." in text
        assert text.count("\n") <= 30


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_and_prints_what_each_party_learned(path, tmp_path):
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    found = [float(number) for number in re.findall(r"AUC (\d\.\d+)", done.stdout)]
    assert found
    assert min(found) > 0.9
    assert len(re.findall(r"^ *\w+ learned: \w", done.stdout, flags=re.MULTILINE)) >= 2
    assert "False" not in done.stdout  # of SecureBoost: the same predictions as one table
