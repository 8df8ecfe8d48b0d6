from __future__ import annotations

import threading
from collections import defaultdict

import msgspec
import pytest
from rich.console import Console

from pace import within
from runs.small_jobs import SYSTEMS, write_job
from treaty.runs import progress
from treaty.runs.party import train_party
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


def heard_in(job) -> tuple[dict[str, list[int]], dict[str, dict[str, list[tuple[int, int]]]]]:
    """Train every party of a job in a thread; return the rounds that each showed, and its phases' steps by title."""
    rounds: dict[str, list[int]] = defaultdict(list)
    phases: dict[str, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))

    def train(name: str) -> None:
        with TrainingBar(name, 2, shown=False) as bar:

            def progress(done, part):
                rounds[name].append(done)
                bar(done, part)

            def phase(title, done, total):
                phases[name][title].append((done, total))

            train_party(job, name, progress, phase=phase)

    threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in job.parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within(200))
    assert not any(thread.is_alive() for thread in threads), "a party hangs"
    return rounds, phases


@pytest.mark.parametrize("expose", ["model", *(pytest.param(x, marks=pytest.mark.slow) for x in ("paper", "nothing"))])
def test_users_and_edge_servers_show_rounds_and_the_search_for_bins(tmp_path, caplog, monkeypatch, expose):
    caplog.set_level("INFO", logger="treaty")
    options, parties = SYSTEMS["fedxgb"]
    chosen = {**options, "expose": expose, "allow_insecure": expose == "paper"}
    monkeypatch.setitem(
        SYSTEMS, "fedxgb", (chosen, {**parties, "paris": "edge", "user6": "", "user7": "", "user8": ""})
    )
    job = write_job(tmp_path, "fedxgb")
    rounds, phases = heard_in(job)
    for name in set(job.parties) - {"notary"}:
        assert rounds[name] == [0, 1, 2], name
        asked = [done for done, _ in phases[name]["searching for bins"]]
        assert asked == sorted(set(asked)) != [], name
        assert f"{name}: 2 of 2 rounds" in caplog.text


@pytest.mark.parametrize("whole_table", [True, False])
def test_all_parties_of_a_regression_show_epochs(tmp_path, whole_table):
    """A node counts them: so a passive party bounds how many epochs a job may have, over all its attempts."""
    job = write_job(tmp_path, "quasi-newton")
    if whole_table:
        job = msgspec.structs.replace(job, common={"max_iter": 2, "tol": 0.0})
    rounds, _ = heard_in(job)
    assert (rounds["a"], rounds["b"]) == ([0, 1, 2], [0, 1, 2])
