"""A node, or the process of one of its jobs, with a fault: ``faulty_node.py node NODE.toml``.

The file FOLDER/plan, FOLDER being that of NODE.toml, says in three words what happens once; then it is called `acted`:

- WHO: ``worker`` or ``node``;
- WHEN: of a worker, ``begin``, or the number (from 1) or kind of the message that it is about to send; of a node,
  ``before-STATE`` or ``after-STATE``: a job's new state is not or just on its disk, and others have not been told;
- WHAT: a signal's name, of a worker also ``node-SIGNAL`` for the node; ``full``, from where on no file of this process
  grows; ``tell``, the benchmark does something.

Without a plan a worker's messages are listed in FOLDER/messages. Variables of the environment: FAULTS_VERSION, the
version of nodes' language that it speaks; FAULTS_SKEW, seconds by which its clock is ahead; FAULTS_TWICE, if every note
is sent twice, and the connection breaks after every frame of a job.
"""

from __future__ import annotations

import datetime
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Plan:
    """What is to happen in this process, if anything."""

    def __init__(self, folder: Path, who: str) -> None:
        self.folder, self.who = folder, who

    @property
    def there(self) -> bool:
        return (self.folder / "plan").exists()

    def at(self, moment: str) -> None:
        """Do what is planned for a moment."""
        try:
            who, when, what = (self.folder / "plan").read_text().split()
        except (OSError, ValueError):
            return
        if (who, when) == (self.who, moment):
            (self.folder / "plan").rename(self.folder / "acted")
            self._act(what)

    def _act(self, what: str) -> None:
        if what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        elif what.startswith("node-"):
            os.kill(os.getppid(), signal.Signals[what.removeprefix("node-")])
        elif what != "tell":
            os.kill(os.getpid(), signal.Signals[what])


def ahead(seconds: float) -> None:
    """Set the clock of Treaty's modules in this process; TLS goes by the system's."""
    from treaty.node import proposals

    shown = types.SimpleNamespace(**{**vars(time), "time": lambda: time.time() + seconds})

    class Ahead(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Ahead:
            return cls.fromtimestamp(time.time() + seconds, tz)

    for name, module in list(sys.modules.items()):
        if name.startswith("treaty.") and getattr(module, "time", None) is time:
            module.time = shown  # type: ignore[attr-defined]
    proposals.datetime = Ahead  # type: ignore[misc]


def _twice(send: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
    def doubled(*given: Any) -> Iterator[bytes]:
        for note in send(*given):
            yield note
            yield note

    return doubled


def node(settings: str) -> None:
    """Run a node."""
    from treaty.cli.main import main
    from treaty.node import attempts, exchange
    from treaty.node.store import Store

    plan = Plan(Path(settings).parent, "node")
    ahead(float(os.environ.get("FAULTS_SKEW", "0")))
    exchange.VERSION = int(os.environ.get("FAULTS_VERSION", exchange.VERSION))
    if "FAULTS_TWICE" in os.environ:
        exchange.NodeConversation._to_send = _twice(exchange.NodeConversation._to_send)  # type: ignore[method-assign]

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, words: list[str], **given: Any) -> None:
            faulty = [sys.executable, __file__, "worker", str(plan.folder)]
            super().__init__(faulty if words[-1] == "treaty.node.worker" else words, **given)

    attempts.subprocess = types.SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    change = Store.change

    def changed(store: Store, id: str, **given: Any) -> Any:
        plan.at(f"before-{given.get('state')}")
        row = change(store, id, **given)
        plan.at(f"after-{given.get('state')}")
        return row

    Store.change = changed  # type: ignore[method-assign]
    sys.argv[1:] = ["node", settings]
    main()


def worker(folder: str) -> None:
    """Play a party."""
    from treaty.messaging.party import Party
    from treaty.messaging.tls import Line
    from treaty.messaging.units import FRAME
    from treaty.node.worker import main

    ahead(float(os.environ.get("FAULTS_SKEW", "0")))
    plan, count, lock = Plan(Path(folder), "worker"), [0], threading.Lock()
    write, send = Party._write, Line.send
    listed = None if plan.there else (plan.folder / "messages").open("w", buffering=1)

    def counted(party: Party, talk: Any, message: Any, *given: Any) -> None:
        with lock:
            count[0] += 1
            number = count[0]
        if listed is not None:
            listed.write(f"{type(message).__module__} {type(message).__name__} {party.round}\n")
        plan.at(str(number))
        plan.at(type(message).__name__)
        write(party, talk, message, *given)

    def sent(line: Line, unit: bytes, *given: Any, **named: Any) -> None:
        send(line, unit, *given, **named)
        if unit[0] == FRAME:
            line.break_off()

    Party._write = counted  # type: ignore[method-assign]
    if "FAULTS_TWICE" in os.environ:
        Line.send = sent  # type: ignore[method-assign]
    plan.at("begin")
    main()


if __name__ == "__main__":
    {"node": node, "worker": worker}[sys.argv[1]](sys.argv[2])
