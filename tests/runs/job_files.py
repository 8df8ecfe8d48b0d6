"""Parties of a job as processes: started, waited for, and what they said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pace import within
from treaty.errors import TreatyError
from treaty.messaging.channel import memory_channels
from treaty.messaging.party import Party, run_role
from treaty.models.checkpoints import load_checkpoint
from treaty.runs import party as runs
from treaty.runs.job import Job
from treaty.systems.system import Roles

TREATY = [sys.executable, "-m", "treaty"]
DYING = Path(__file__).with_name("dying_party.py")
EACH_WITHIN = 10.0  # seconds from the fault to the last party's end, on the machine `pace` compares with


def start(
    job: Path,
    name: str,
    verb: str = "train",
    *,
    resume: bool = False,
    dies: tuple[str, int, str] | None = None,
    by: signal.Signals = signal.SIGKILL,
    more: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start a party; `dies` are the kind, number and what comes before, see `dying_party`, of a message it dies at."""
    begin = TREATY if dies is None else [sys.executable, str(DYING), *map(str, dies), str(int(by))]
    return subprocess.Popen(
        [*begin, verb, str(job), "--as", name, *(["--resume"] if resume else []), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},  # see `wait_for_rounds`
    )


def started_to_die(
    monkeypatch: pytest.MonkeyPatch, victim: str, dies: tuple[str, int, str], by: signal.Signals = signal.SIGKILL
) -> None:
    """Have a party that `run_all` starts be killed at a message of its own, see `dying_party`."""
    start_process = subprocess.Popen
    dying = [sys.executable, str(DYING), *map(str, dies), str(int(by))]

    def starting(command: list[str], **named: Any) -> subprocess.Popen[bytes]:
        if command[command.index("--as") + 1] == victim:
            assert command[:3] == TREATY
            command = [*dying, *command[3:]]
        return start_process(command, **named)

    monkeypatch.setattr(subprocess, "Popen", starting)


def train_in_threads(monkeypatch: pytest.MonkeyPatch, jobs: Mapping[str, Job]) -> dict[str, str]:
    """Train every party with its copy of a job in a thread of this process; return what those that failed said."""
    channels, said = memory_channels(jobs), {}

    def connected(job: Job, name: str, roles: Roles, verb: str, role: Callable[[Party], Any], **_: Any) -> Any:
        peers = job.system.links(roles, job.settings()[0])[name]
        party = Party(name, job.name, job.system.name, channels[name], peers, timeout=20.0)
        return run_role(party, lambda: role(party))

    def train(name: str) -> None:
        try:
            runs.train_party(jobs[name], name)
        except TreatyError as error:
            said[name] = str(error)
        finally:
            channels[name].close()

    with monkeypatch.context() as patch:
        patch.setattr(runs, "connected", connected)
        threads = [threading.Thread(target=train, args=(name,)) for name in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(within(60))
    return said


def wait_for_rounds(processes: dict[str, subprocess.Popen[str]], kept: Path, rounds: int) -> None:
    """Wait for that many rounds in a checkpoint; failing, end the processes and show where each stood."""
    deadline = time.monotonic() + within(60)
    while not (kept.exists() and load_checkpoint(kept).rounds >= rounds):
        ended = [name for name, process in processes.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            said = {}
            for name, process in processes.items():
                process.send_signal(signal.SIGABRT)  # prints the stack of every thread
                said[name] = process.communicate()[1]
            raise AssertionError(
                "\n".join([f"ended: {ended}", *(f"--- {name}\n{text}" for name, text in said.items())])
            )
        time.sleep(0.002)


def finish(processes: dict[str, subprocess.Popen[str]], seconds: float) -> dict[str, tuple[int, str]]:
    """Wait for all, so many seconds at the pace of this machine; return exit codes and what went to standard error."""
    deadline = time.monotonic() + within(seconds)
    ended = {}
    try:
        for name, process in processes.items():
            _, said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ended[name] = (process.returncode, said)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return ended


def one_error(said: str) -> str:
    """The line that ends a process, which may have said before that it waits for the others to tell them."""
    *before, last = said.splitlines()
    assert [line for line in before if not line.endswith("waiting for the others, to tell them")] == [], said
    return one_line(last)


def one_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    assert len(lines) == 1, said
    assert lines[0].startswith("treaty: ")
    return lines[0]
