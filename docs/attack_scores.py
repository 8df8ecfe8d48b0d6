"""Write the kept results of `benchmarks/attack_scores.py` into `docs/audit.md`; part of `make docs`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "audit.md"


def written() -> str:
    """Return the page as it should be."""
    script = ROOT / "benchmarks" / "attack_scores.py"
    words = [sys.executable, script, "--page"]
    table = subprocess.run(words, capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own script
    marks = re.compile(r"(<!-- attack scores -->\n).*(<!-- end of attack scores -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}\n{table.strip()}\n\n{found[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(written())
