"""The benchmarks of faults and of changed messages, shortened: whole, they take an hour each."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["faults.py", "mutations.py"])
def test_a_few_cells_end_well(script):
    done = subprocess.run([sys.executable, str(BENCHMARKS / script), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
