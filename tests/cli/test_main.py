"""The command itself: what it imports, lists and suggests."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
import typer
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


def commands(group, *path):
    """Yield each command with the words that name it, and those of groups."""
    yield path, group
    for name in getattr(group, "commands", None) or getattr(group, "list_commands", lambda _: [])(None):
        yield from commands(group.get_command(None, name), *path, name)


EVERY = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", EVERY, ids=lambda path: " ".join(path) or "treaty")
def test_help_ends_with_examples_whose_options_exist(path):
    title, *examples = EVERY[path].epilog.split("\n\n")
    assert title == "Examples:"
    assert 1 <= len(examples) <= 2
    shown = " ".join(CliRunner().invoke(app, [*path, "--help"]).output.split())
    for example in examples:
        assert example in shown
        assert shown.index("--help") < shown.index(example)
        program, *words = shlex.split(example.partition(" > ")[0])
        assert program == "treaty"
        named = max((of for of in EVERY if list(of) == words[: len(of)]), key=len)
        assert path == () or named[: len(path)] == path
        if words[len(named) :] != ["--help"]:
            EVERY[named].make_context(
                " ".join(named), words[len(named) :]
            )  # an unknown option or a missing argument raises


def test_a_wrong_example_would_be_found():
    with pytest.raises(Exception, match="No such option: --resum"):
        EVERY["train",].make_context("train", ["job.toml", "--resum"])
    with pytest.raises(Exception, match="Missing parameter: name"):
        EVERY["keys", "new"].make_context("new", [])


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("audit-gradient", "audit-gradients")])
def test_a_mistyped_command_gets_a_suggestion(typed, meant):
    done = subprocess.run([*TREATY, typed], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"Did you mean '{meant}'" in " ".join(done.stderr.replace("│", " ").split())
