"""The tables of docs/audit.md are those of the kept results."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_kept_scores() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "attack_scores.py"))
    assert script["written"]() == (ROOT / "docs" / "audit.md").read_text(), "run make docs"
    assert (ROOT / "docs" / "audit.md").read_text().count("\n| `secureboost:sums=sealed` |") == 3
