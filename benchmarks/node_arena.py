"""Nodes of one system's job on this machine, each a process that a benchmark can harm: started, watched and judged.

They are behind relays, or in `spaces`: network namespaces that `namespaces` has made.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from data import ROOT
from faults import LONGEST, OF_THE_RUN, Setup, _toml, left_over
from namespaces import address
from relays import Relays, outage
from treaty.node.identity import load_own, sign
from treaty.node.proposals import id_of, proposed, rounds_of, statement
from treaty.node.store import FINAL, JobRow, Store
from treaty.runs.job_files import read_job
from treaty.runs.processes import free_ports

sys.path.insert(0, str(ROOT / "tests"))  # what starts nodes in tests
from node.nodes import Organisation, organisations

LAUNCHER = Path(__file__).with_name("faulty_node.py")
PATIENCE = 150.0  # seconds for a job, from its submission or from when nodes that were kept apart can meet
RESTARTED = 1.0  # seconds after which a node that ended is started again, as a service manager would
AWAY = 20.0  # seconds that a stopped process is stopped
LEAVING = 30.0  # seconds for processes of a job that has ended to be gone
POLICY = """approve = false
most_alignments = 1000
consents = ["allow_exact_sums", "allow_insecure", "show_weights", "dropout"]"""
BAD_WORDS = ("Traceback", "internal error", "Fatal Python", "never retrieved")


@dataclass
class FaultyNode(Organisation):
    """A node that obeys the plans of `faulty_node`."""

    def start(self) -> None:
        assert self.process is None
        with (self.folder / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, str(LAUNCHER), "node", str(self.settings)],
                stderr=log,
                stdout=log,
                env={**os.environ, **self.environment},
            )

    def row(self, job: str) -> JobRow | None:
        with Store(self.state, create=False) as store:
            return store.job(job) if store.has(job) else None

    def workers(self) -> list[int]:
        """Return the processes of its jobs."""
        mark, found = f"worker\0{self.folder}\0".encode(), []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if process.read_bytes().endswith(mark):
                    found.append(int(process.parent.name))
            except OSError:  # it has just ended
                continue
        return found


@dataclass(frozen=True)
class Cell:
    """A fault: a plan of `faulty_node` for the victim, or variables of its environment, or both."""

    name: str
    victim: str
    plan: str = ""
    away: Callable[[Arena, FaultyNode], object] | None = None  # called when the plan says `tell`
    environment: Mapping[str, str] = field(default_factory=dict)
    apart: str = ""  # nodes with this fault do not meet: what both say then
    submitted_by: float = 0.0  # seconds by which the submitter's clock is ahead
    reconnect: int = 12


class Arena:
    """A system's nodes, which run, and the model of its undisturbed job. Use as a context."""

    def __init__(
        self, name: str, setup: Setup, folder: Path, *, aligned: bool = False, spaces: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.setup, self.folder, self.aligned = name, setup, folder, aligned
        self._held = ExitStack()
        names = setup.names
        closed = names[-1] if len(names) > 2 else ""  # a node without an open port
        tables = {party: pa.Table.from_pandas(table, preserve_index=False) for party, table in setup.tables.items()}
        made = organisations(folder, names, tables, listening=[n for n in names if n != closed], policy=POLICY)
        self.nodes = {of.name: FaultyNode(of.name, of.folder, of.port) for of in made.values()}
        real = {party: node.port for party, node in self.nodes.items() if party != closed}
        relayed = dict(zip(real, free_ports(len(real)), strict=True))
        for node in self.nodes.values():
            text = node.settings.read_text()
            node.prefix = ["ip", "netns", "exec", spaces[node.name]] if spaces else []
            for k, (party, port) in enumerate(real.items()):
                if spaces:
                    text = text.replace(f'"127.0.0.1:{port}"', f'"{address(k)}:{port}"')
                else:
                    text = text.replace(f'address = "127.0.0.1:{port}"', f'address = "127.0.0.1:{relayed[party]}"')
            node.settings.write_text(text)
        self.relays = None if spaces else Relays(real, relayed)
        self.model: dict[str, Any] = {}

    def __enter__(self) -> Arena:
        for node in self.nodes.values():
            node.state.mkdir(mode=0o700)
        for party in list(self.nodes)[:2]:  # so that their disks can be full
            self._small_disk(self.nodes[party].state)
        self._held.callback(self._stop)
        for node in self.nodes.values():
            Store(node.state).close()
            node.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.close()

    def _small_disk(self, folder: Path) -> None:
        mounted = ["mount", "-t", "tmpfs", "-o", "size=400m,mode=700", "none", str(folder)]
        if os.geteuid() == 0 and subprocess.run(mounted, check=False, capture_output=True).returncode == 0:
            self._held.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)

    def _stop(self) -> None:
        for node in self.nodes.values():
            if node.process is not None:
                node.process.send_signal(signal.SIGCONT)
        for node in self.nodes.values():
            node.stop()

    def undisturbed(self) -> dict[str, list[str]]:
        """Play the job without a fault, keep its model, and return each party's messages."""
        job = self.submit(Cell("none", ""))
        wrong = self._wait(job, Cell("none", "")) or self._judged(job, "")
        self.model = self.model_of(job)
        states = {name: row and (row.state, row.reason) for name, row in self.rows(job).items()}
        if wrong or not self.model or {row and row[0] for row in states.values()} != {"finished"}:
            raise RuntimeError(f"{self.name}: the undisturbed job did not go well: {wrong} {states}")
        return {name: (node.folder / "messages").read_text().splitlines() for name, node in self.nodes.items()}

    def submit(self, cell: Cell) -> str:
        """Propose the job at the active party's node; return its id."""
        setup, lead = self.setup, self.nodes[self.setup.active]
        lines = ['name = "faults"', f'protocol = "{setup.protocol}"', f'active = "{setup.active}"', 'label = "y"']
        lines += [f"timeout = {setup.timeout}", f"reconnect = {cell.reconnect}"]
        lines += ["[align]", 'on = "id"', "max_runs = 1000"] if self.aligned else []
        for table, options in setup.options.items():
            lines += [f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in options.items())]
        for name in setup.names:
            role = setup.roles.get(name)
            lines += [f"[parties.{name}]", *([f'role = "{role}"'] if role not in (None, "server") else [])]
            lines += ['table = "rows"'] if name in setup.tables else []
        file = self.folder / "job.toml"
        file.write_text("\n".join(lines))
        content = proposed(file, "train")
        if cell.submitted_by:
            fields = msgspec.json.decode(content)
            when = time.gmtime(time.time() + cell.submitted_by)
            content = msgspec.json.encode({**fields, "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", when)})
        job = id_of(content)
        signature = sign(load_own(lead.folder / "keys", lead.name), statement("submit", job, lead.name))
        row = JobRow(job, content, signature, lead.name, "train", total=rounds_of(read_job(file), "train"))
        with Store(lead.state, create=False) as store:
            store.add_job(row, event={"what": "submitted", "by": "benchmark"})
        return job

    def play(self, cell: Cell) -> tuple[str, list[str]]:
        """Play a job with a fault; return how it ended, and what is wrong with that."""
        victim = self.nodes[cell.victim]
        (victim.folder / "acted").unlink(missing_ok=True)
        if cell.plan:
            (victim.folder / "plan").write_text(cell.plan)
        if cell.environment:
            self._restart(victim, cell.environment)
        said = {name: len(node.log()) for name, node in self.nodes.items()}
        job = self.submit(cell)
        wrong: list[str] = []
        if cell.apart:
            wrong += self._kept_apart(cell, victim)
            self._restart(victim, {})
        wrong += self._wait(job, cell)
        wrong += self._judged(job, cell.victim)
        if cell.plan and not (victim.folder / "acted").exists():
            (victim.folder / "plan").unlink()
            wrong.append("the fault did not happen")
        for name, node in self.nodes.items():
            new = node.log()[said[name] :]
            log = node.state / "logs" / f"{job}.log"
            new += log.read_text() if log.exists() else ""
            wrong += [f"{name}: {word}" for word in BAD_WORDS if word in new]
        if cell.environment and not cell.apart:
            self._restart(victim, {})
        return self._outcome(job), wrong

    def _restart(self, node: FaultyNode, environment: Mapping[str, str]) -> None:
        node.stop()
        node.environment = dict(environment)
        node.start()

    def _kept_apart(self, cell: Cell, victim: FaultyNode) -> list[str]:
        """Wait until the victim and another node say why they do not talk."""
        other = self.nodes[self.setup.active if victim.name != self.setup.active else self.setup.names[-1]]
        deadline, said = time.monotonic() + 60.0, {}
        while time.monotonic() < deadline:
            for node, peer in ((victim, other), (other, victim)):
                with Store(node.state, create=False) as store:
                    state = store.peers().get(peer.name)
                said[node.name] = "" if state is None or state.up else state.said
            if all(cell.apart in text for text in said.values()):
                return []
            time.sleep(0.2)
        return [f"expected {cell.apart!r} at both, got {said}"]

    def _wait(self, job: str, cell: Cell) -> list[str]:
        """Do what the plan says, start nodes that have ended, until the job has ended at all."""
        deadline = time.monotonic() + PATIENCE
        ended: dict[str, float] = {}
        acting: threading.Thread | None = None
        while time.monotonic() < deadline:
            for name, node in self.nodes.items():
                if node.process is not None and node.process.poll() is not None:
                    if time.monotonic() > ended.setdefault(name, time.monotonic() + RESTARTED):
                        node.process = None
                        node.start()
                        del ended[name]
            victim = self.nodes.get(cell.victim)
            if acting is None and victim is not None and (victim.folder / "acted").exists():
                act = cell.away if cell.plan.endswith("tell") else _continued if "STOP" in cell.plan else None
                acting = threading.Thread(target=act or (lambda *_: None), args=(self, victim), daemon=True)
                acting.start()
            rows = self.rows(job)
            for name, row in rows.items():  # where no data set's policy approves, a person does
                if row is not None and row.state == "proposed" and name not in self.setup.tables:
                    with Store(self.nodes[name].state, create=False) as store:
                        store.command(job, "approve", b"{}")
            led = rows[self.setup.active]
            refused = led is not None and led.state == "rejected"  # who refuses a proposal does not keep it
            known = [row for row in rows.values() if row is not None or not refused]
            up = all(node.process is not None and node.process.poll() is None for node in self.nodes.values())
            if all(row is not None and row.state in FINAL for row in known) and up:  # one killed just now comes back
                if acting is not None:
                    acting.join(60.0)
                return []
            time.sleep(0.1)
        return [f"after {PATIENCE:g} s: { ({name: row and (row.state, row.reason) for name, row in rows.items()}) }"]

    def rows(self, job: str) -> dict[str, JobRow | None]:
        return {name: node.row(job) for name, node in self.nodes.items()}

    def _outcome(self, job: str) -> str:
        rows = [row for row in self.rows(job).values() if row is not None]
        states = sorted({row.state for row in rows})
        why = next((row.reason for row in rows if row.state != "finished"), "")
        attempts = max(row.attempt for row in rows)
        return f"{', '.join(states)} in attempt {attempts}" + (f": {why}" if why else "")

    def _judged(self, job: str, victim: str) -> list[str]:
        """Return what is wrong once a job has ended.

        Where the protocol goes on without the victim, its rows are missing from later trees: as many are expected, not
        the same.
        """
        rows = self.rows(job)
        states = {row.state if row is not None else "unknown" for row in rows.values()}
        spared = self._spared()
        wrong = []
        if len(states) > 1 and states != {"rejected", "unknown"} and not (states == {"finished", "unknown"} and spared):
            wrong.append(f"it ended in different ways: {states}")
        elif states == {"finished"}:
            found = self.model_of(job)
            parts = [
                {name: part for name, part in model.items() if name not in spared} for model in (found, self.model)
            ]
            if self.model and victim in spared:
                parts = [{name: _count_trees(part) for name, part in model.items()} for model in parts]
            if self.model and parts[0] != parts[1]:
                wrong.append("another model")
        else:
            reasons = {row.reason for row in rows.values() if row is not None}
            wrong += [f"no clear error: {reason!r}" for reason in reasons if not 0 < len(reason) <= LONGEST]
        deadline = time.monotonic() + LEAVING
        while (left := self._left(job)) and time.monotonic() < deadline:
            time.sleep(0.1)
        wrong += left
        for name, node in self.nodes.items():
            with Store(node.state, create=False) as store:
                wrong += [f"{name}: audit log: {fault}" for fault in store.verify_audit()]
        return wrong

    def _left(self, job: str) -> list[str]:
        """Return what is left of a job that has ended and should not be."""
        left = []
        for name, node in self.nodes.items():
            left += [f"{name}: process {worker} is left" for worker in node.workers()]
            left += [f"{name}: left {file}" for file in left_over(node.state)]
            row = node.row(job)
            if row is not None and row.state == "finished" and (node.state / "checkpoints" / job).exists():
                left.append(f"{name}: checkpoints are left")
        return left

    def _spared(self) -> list[str]:
        job = read_job(self.folder / "job.toml")
        return list(job.system.may_lose(job.roles(), job.settings()[0]))

    def model_of(self, job: str) -> dict[str, Any]:
        """Return every party's part of the model, but for what two runs do not share."""
        parts = {}
        for name, node in self.nodes.items():
            for file in (node.state / "models" / job).glob(f"{name}.part"):
                fields = msgspec.msgpack.decode(file.read_bytes().partition(b"\n")[2])
                parts[name] = {of: value for of, value in fields.items() if of not in OF_THE_RUN}
                if parts[name].get("randomised"):
                    del parts[name]["randomised"]["known"]  # hashes under a key of the run
        return parts


def _count_trees(part: Mapping[str, Any]) -> int:
    forest = part.get("forest")
    return 0 if forest is None else len(forest["trees"])


def _continued(arena: Arena, victim: FaultyNode) -> None:
    """Let processes that were stopped go on after a while."""
    time.sleep(AWAY)
    for pid in [*victim.workers(), *([victim.process.pid] if victim.process is not None else [])]:
        os.kill(pid, signal.SIGCONT)


def cut(seconds: float) -> Callable[[Arena, FaultyNode], object]:
    """Return what breaks all connections between nodes, and refuses new ones for so long."""
    return lambda arena, _: arena.relays is not None and outage(seconds)(arena.relays)


def silent(seconds: float) -> Callable[[Arena, FaultyNode], object]:
    """Return what carries nothing between nodes for so long; connections stay."""
    return lambda arena, _: arena.relays is not None and outage(seconds, frozen=True)(arena.relays)


def during(seconds: float, what: Callable[[Relays, threading.Event], None]) -> Callable[[Arena, FaultyNode], object]:
    """Return what goes on for so long."""

    def act(arena: Arena, _: FaultyNode) -> None:
        over = threading.Event()
        threading.Timer(seconds, over.set).start()
        if arena.relays is not None:
            what(arena.relays, over)

    return act


def fill(arena: Arena, victim: FaultyNode) -> None:
    """Leave no room in a node's folder for a while."""
    filler = victim.state / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in itertools.repeat(1 << 20, 1000):
                file.write(bytes(size))
    except OSError:
        pass
    time.sleep(AWAY)
    filler.unlink()
