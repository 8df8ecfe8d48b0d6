"""Nodes for tests: organisations in folders of their own, each node a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from treaty.node.cards import fingerprint_of
from treaty.node.identity import make_keys, trust
from treaty.node.requests import Partners
from treaty.node.settings import find_socket
from treaty.node.store import FINAL, JobRow, Store
from treaty.runs.processes import free_ports

PATIENCE = 120.0


@dataclass
class Organisation:
    """One organisation: its folder, and its node's process while it runs."""

    name: str
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)

    @property
    def settings(self) -> Path:
        return self.folder / "node.toml"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def start(self) -> None:
        """Start the node."""
        assert self.process is None
        with (self.folder / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "treaty", "node", str(self.settings)],
                stderr=log,
                stdout=log,
                env={**os.environ, **self.environment},
            )

    def kill(self) -> None:
        """End the node as a power cut would; its processes end with it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        """End the node in order."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process = None
        return code

    def treaty(self, *arguments: str, code: int | None = 0) -> str:
        """Run a command of this organisation's users; return what it said."""
        done = subprocess.run(
            [sys.executable, "-m", "treaty", *arguments],
            env={**os.environ, **self.environment, "TREATY_NODE": str(self.settings), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        said = done.stdout + done.stderr
        assert code is None or done.returncode == code, said
        return said

    def jobs(self) -> list[JobRow]:
        with Store(self.state, create=False) as store:
            return store.jobs()

    def job(self, job: str) -> JobRow | None:
        if not (self.state / "node.db").exists():
            return None
        with Store(self.state, create=False) as store:
            return next((row for row in store.jobs() if row.id.startswith(job)), None)

    def log(self) -> str:
        return (self.folder / "node.log").read_text()


def organisations(
    folder: Path,
    names: Iterable[str],
    tables: Mapping[str, pa.Table],
    *,
    listening: Collection[str] | None = None,
    policy: str = "approve = false",
    more: Mapping[str, str] = {},
    dialled: Mapping[str, str] | None = None,
) -> dict[str, Organisation]:
    """Make organisations that trust each other, with a data set "rows" each.

    `listening` have an open port (None: all); `policy` is that of the data sets; `more` is added to a settings file.
    """
    names = list(names)
    open_to = set(names if listening is None else listening)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    made = {}
    for name in names:
        home = folder / name
        home.mkdir(parents=True)
        make_keys(home / "keys", name)
        made[name] = Organisation(name, home, ports[name])
    for name, organisation in made.items():
        home = organisation.folder
        others = [other for other in names if other != name]
        lines = [f'name = "{name}"']
        lines += [f'listen = "127.0.0.1:{ports[name]}"'] if name in open_to else []
        lines += ["[limits]", "job_hours = 1"] if False else []
        lines += [more[name]] if name in more else []
        for other in others:
            trust_each_other(home, folder / other, other)
            lines.append(f"[peers.{other}]")
            if other in open_to:
                lines.append(f'address = "{(dialled or {}).get(other, f"127.0.0.1:{ports[other]}")}"')
        if name in tables:
            pyarrow.csv.write_csv(tables[name], home / "rows.csv")
            lines += ["[data.rows]", 'table = "rows.csv"', 'id = "id"', "[data.rows.policy]"]
            lines += [f"peers = {others!r}".replace("'", '"'), policy]
        organisation.settings.write_text("\n".join(lines) + "\n")
    return made


def trust_each_other(home: Path, other_home: Path, other: str) -> None:
    from treaty.node.cards import read_card

    card = read_card(other_home / "keys" / f"{other}.card")
    trust(home / "keys", card, confirmed=fingerprint_of(card))


def columns_of(names: Iterable[str], rows: int = 400, seed: int = 0) -> dict[str, pa.Table]:
    """Return a table for each organisation, with ids; the first has labels."""
    rng = np.random.default_rng(seed)
    names = list(names)
    x = rng.standard_normal((rows, 3 * len(names)))
    y = (x[:, 0] + x[:, 3] * x[:, 1] - x[:, -1] + 0.5 * rng.standard_normal(rows) > 0).astype(int)
    tables = {}
    for k, name in enumerate(names):
        own: dict[str, Any] = {"id": np.arange(rows)}
        own |= {f"{name}_{i}": x[:, 3 * k + i] for i in range(3)}
        if k == 0:
            own["y"] = y
        order = rng.permutation(rows)
        tables[name] = pa.table({column: values[order] for column, values in own.items()})
    return tables


def job_file(path: Path, names: Iterable[str], text: str = "", align: bool = True, **fields: str) -> Path:
    """Write a job for nodes; the first party is the active one."""
    names = list(names)
    lines = ['name = "a job"', f'active = "{names[0]}"', 'label = "y"']
    lines += [f"{name} = {value}" for name, value in fields.items()]
    lines += ["[align]", 'on = "id"'] if align else []
    lines += [text]
    for name in names:
        lines += [f"[parties.{name}]", 'table = "rows"', 'predict_table = "rows"']
    path.write_text("\n".join(lines) + "\n")
    return path


def partners_of(node: Organisation, service: str, names: Iterable[str]) -> Partners:
    """Return what asks the partners of a service that runs at an organisation's node."""
    return Partners(lambda: find_socket(node.state, service), list(names))


def wait_for(what: str, there: Any, patience: float = PATIENCE) -> Any:
    """Wait until a call returns something true."""
    deadline = time.monotonic() + patience
    while not (found := there()):
        assert time.monotonic() < deadline, f"no {what} in {patience:g} s"
        time.sleep(0.1)
    return found


def wait_until(organisation: Organisation, job: str, *states: str, patience: float = PATIENCE) -> JobRow:
    """Wait until a job is in one of the states at an organisation's node."""

    def there() -> JobRow | None:
        row = organisation.job(job)
        if row is not None and row.state in FINAL and row.state not in states:
            raise AssertionError(f"expected job {' or '.join(states)} at {organisation.name}")
        return row if row is not None and row.state in states else None

    try:
        return wait_for(f"job {' or '.join(states)} at {organisation.name}", there, patience)
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {organisation.job(job)}\n{organisation.log()[-3000:]}") from None
