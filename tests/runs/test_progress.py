from __future__ import annotations

import pytest
from rich.console import Console

from treaty.runs import progress
from treaty.runs.progress import TrainingBar, steps_bar


@pytest.fixture
def terminal(monkeypatch):
    """Make standard error look like a terminal, and return what is written to it."""
    console = Console(force_terminal=True, width=100, record=True, file=open("/dev/null", "w"))
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    yield console
    console.file.close()


def test_steps_are_shown_on_a_terminal(terminal):
    with steps_bar("aligning") as step:
        step(1, 4)
        step(4, 4)
    assert "aligning" in terminal.export_text()


def test_nothing_is_shown_where_there_is_no_terminal(capsys):
    with steps_bar("aligning") as step:
        step(1, 4)
    with TrainingBar("fit", 3) as bar:
        bar.phase("aligning", 1, 2)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_nothing_is_shown_before_the_first_step(terminal):
    with steps_bar("predicting"):
        pass
    assert "predicting" not in terminal.export_text()


def test_a_training_shows_its_alignment_too(terminal):
    with TrainingBar("secureboost", 3) as bar:
        bar.phase("aligning", 1, 2)
    shown = terminal.export_text()
    assert "secureboost" in shown
    assert "aligning" in shown
