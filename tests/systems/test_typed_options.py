"""mypy finds an option that a role misspells, of every system, since a role's input says whose options it has."""

import subprocess
import sys
from pathlib import Path

import pytest

from treaty.systems import OPTIONS, option_class
from treaty.systems.options import names_of

pytest.importorskip("mypy", reason="mypy is installed by `make`, not with the lowest versions")
SRC = Path(__file__).resolve().parents[2] / "src"

# Whole modules of roles, and all they import, would take mypy half a minute: only options are looked at.
SETTINGS = f"""
[mypy]
strict = true
mypy_path = {SRC}
[mypy-treaty.*,numpy.*,cryptography.*]
follow_imports = skip
[mypy-treaty.systems.*]
follow_imports = normal
ignore_errors = true
"""
REGRESSIONS = ("QuasiNewton", "SGD")
COMMON = {True: ("regression", "max_iter", "max_depth"), False: ("boosting", "max_depth", "max_iter")}


def _role(name: str, *, wrong: bool) -> str:
    """Return a role that reads one option of its system and a common one, each in a line of its own."""
    _, common, of_others = COMMON[name in REGRESSIONS]
    own = names_of(option_class(name))[-1]
    kinds = f"{name}, RegressionOptions" if name in REGRESSIONS else name
    lines = [
        f"def role_{name}(inputs: RoleInput[{kinds}]) -> None:",
        f"    print(inputs.options.{own}{'s' if wrong else ''})",
        f"    print(inputs.common.{of_others if wrong else common})",
    ]
    return "\n".join(lines)


def test_mypy_finds_an_option_that_a_role_misspells(tmp_path: Path) -> None:
    imports = "\n".join(f"from {module} import {name}" for name, module in OPTIONS.items())
    imports += "\nfrom treaty.systems.logistic.options import RegressionOptions"
    imports += "\nfrom treaty.systems.system import RoleInput\n"
    for file, wrong in (("right.py", False), ("wrong.py", True)):
        text = "\n\n".join([imports, *(_role(name, wrong=wrong) for name in OPTIONS)])
        (tmp_path / file).write_text(text)
    (tmp_path / "settings.ini").write_text(SETTINGS)
    words = ["-m", "mypy", "--config-file", "settings.ini", "--cache-dir", str(tmp_path), "right.py", "wrong.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    lines = (tmp_path / "wrong.py").read_text().splitlines()
    expected = [f"wrong.py:{number}: " for number, line in enumerate(lines, 1) if line.startswith("    print")]
    assert [line[: len(start)] for line, start in zip(errors, expected, strict=True)] == expected, done.stdout
    assert all("[attr-defined]" in line for line in errors)
