"""What small commands must not import: numba takes longer than all else that they do."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ["treaty.files", "treaty.messaging.messages", "treaty.messaging.certificates", "treaty.messaging.party"]


def _imported_by(program: str, *arguments: str) -> set[str]:
    """Run a program in a process of its own; return the modules that it has imported."""
    program += "\nimport sys\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("MODULES")[2].split())


@pytest.mark.parametrize("module", MODULES)
def test_files_and_messages_import_no_numba(module):
    imported = _imported_by(f"import {module}")
    assert module in imported
    assert not imported & {"numba", "llvmlite"}


COMMANDS = """
import os, sys
from typer.testing import CliRunner
from treaty.cli.main import app
os.chdir(sys.argv[1])
for command in (["new", "bank"], ["new", "shop", "--folder", "others"], ["show"], ["trust", "others/shop.card"],
    ["rotate"], ["revoke", "shop"], ["endorse", "no.pem", "no.pem"]):
    CliRunner().invoke(app, ["keys", *command])
"""


def test_commands_about_keys_import_no_numba(tmp_path):
    imported = _imported_by(COMMANDS, str(tmp_path))
    assert "treaty.cli.keys" in imported
    assert (tmp_path / "keys" / "bank.card").exists()
    assert not imported & {"numba", "llvmlite"}
