"""The command itself: what it imports, lists and suggests."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from runs.job_files import TREATY
from treaty.cli import main
from treaty.cli.main import app

SLOW = ("numba", "pyarrow", "sklearn")


@pytest.mark.parametrize("words", [["--version"], ["demo", "--help"]], ids=" ".join)
def test_nothing_slow_is_imported_that_a_command_does_not_need(words):
    script = f"import sys\nfrom treaty.cli.main import main\nsys.argv = ['treaty', *{words}]\ntry: main()\n" + (
        f"finally: print(sorted(set({SLOW}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_every_command_is_listed_and_explains_itself():
    listed = CliRunner().invoke(app, ["--help"]).output
    for name in main._COMMANDS:
        assert f" {name} " in listed
        shown = CliRunner().invoke(app, [name, "--help"])
        assert shown.exit_code == 0, shown.output
        assert f"treaty {name} " in shown.output.replace("root", "treaty")


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("audit-gradient", "audit-gradients")])
def test_a_mistyped_command_gets_a_suggestion(typed, meant):
    done = subprocess.run([*TREATY, typed], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"Did you mean '{meant}'" in " ".join(done.stderr.replace("│", " ").split())
