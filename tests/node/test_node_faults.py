"""The benchmark of faults between nodes, shortened: whole, it takes an hour."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "node_faults.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_cells_end_well():
    done = subprocess.run([sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
