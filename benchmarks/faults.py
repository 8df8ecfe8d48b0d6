"""Every system between real processes, with one fault at a time: does the job end well, and is the model the same?

Each job runs undisturbed first, twice: its model is what every other run has to give, bit for bit. Then each fault of
`FAULTS` happens once to a party that has data and once to the one that leads, at a message of that party's own, or to
the network between all of them, which goes through relays of this script. A cell passes if

- every process ends within `PATIENCE` seconds of the fault,
- none prints a traceback, "internal error", or more than `LONGEST` characters,
- no temporary file and no process is left, and
- the model is that of the undisturbed run: of the run itself where the fault is one to survive, else, where the job
  ended with an error, of the same job started again, with `--resume`, after the fault is gone.

`--trees N` has the boosted jobs grow so many trees, so that connections are reset for minutes; no results are written
then. An hour on two cores; `--quick` plays a few faults of one system, which `make test-rest` does, too; names of
systems and faults as arguments play these alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

from data import replace
from relays import Relays, crowd, outage, resets
from treaty.node.identity import make_keys
from treaty.runs.processes import free_ports

PARTY = Path(__file__).with_name("faulty_party.py")
PATIENCE = 150.0
RECONNECT = 12  # seconds of a job's `reconnect`: a killed party counts as lost after it
TIMEOUT = 60  # of a job: seconds a party waits for a message
LONGEST = 600
WELL = "well"
# fields of a part that two runs do not share: `sides` are counted over all jobs on a table
OF_THE_RUN = ("model_id", "choice", "kept", "sides")
BAD_WORDS = ("Traceback", "internal error", "Fatal Python")
MORE = 100  # MiB that a party may take more than in the undisturbed run
AWAY = 8.0  # seconds a stopped party or a frozen network is away


@dataclass(frozen=True)
class Setup:
    """A system's job: options, who leads, roles of parties without data, and each party's rows."""

    protocol: str
    options: dict[str, dict[str, Any]]
    active: str
    tables: dict[str, pd.DataFrame]
    roles: dict[str, str] = field(default_factory=dict)
    timeout: int = TIMEOUT

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.roles, *self.tables]))


def setups(n_estimators: int = 6) -> dict[str, Setup]:
    """Return every system with tables of the breast cancer data."""
    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    ids = pd.DataFrame({"id": np.arange(len(x))})

    def by_column(count: int, rows: int = 300) -> dict[str, pd.DataFrame]:
        parts = np.array_split(np.arange(12), count)
        tables = {f"p{k}": pd.concat([ids, x.iloc[:, part]], axis=1).head(rows) for k, part in enumerate(parts)}
        return {**tables, "p0": tables["p0"].assign(y=y.head(rows))}

    def by_row(count: int) -> dict[str, pd.DataFrame]:
        whole = pd.concat([ids, x.iloc[:, :8]], axis=1).assign(y=y).head(300)
        return {f"p{k}": whole.iloc[k::count] for k in range(count)}

    trees = {"n_estimators": n_estimators, "max_depth": 3, "min_child_samples": 5}
    short = {"insecure_test_key_bits": 1024, "allow_insecure": True}
    exact = {"allow_exact_sums": True}
    lr = {"max_iter": 6, "batch_size": 280, "tol": 0.0, "random_state": 3}
    edges = {"owner": "server", "edge0": "edge", "edge1": "edge", "notary": "authority"}
    return {
        "secureboost, lattice": _columns("secureboost", {"encryption": "lattice", **exact}, trees, by_column(3)),
        "secureboost, sealed": _columns("secureboost", {}, trees, by_column(2)),
        "secureboost, hidden": _columns(
            "secureboost", {"membership": "hidden"}, {**trees, "objective": "logistic_pieces"}, by_column(2)
        ),
        "secureboost, ou": _columns("secureboost", {"encryption": "ou", **exact, **short}, trees, by_column(3)),
        "fedxgboost-smm": _columns("fedxgboost-smm", exact, trees, by_column(2)),
        "fedxgboost-smm, dealer": _columns(
            "fedxgboost-smm", {"backend": "dealer", **exact}, trees, by_column(2), {"helper": "dealer"}
        ),
        "fedxgboost-ldp": _columns("fedxgboost-ldp", {"epsilon": 4.0, "mechanism": "label_rr"}, trees, by_column(2)),
        "federboost-vertical": _columns("federboost-vertical", {}, trees, by_column(3)),
        "federboost-horizontal": Setup("federboost-horizontal", {"boosting": trees}, "p0", by_row(3)),
        "fedxgb": Setup(
            "fedxgb",
            {"fedxgb": {"expose": "model"}, "boosting": trees},
            "owner",
            {**by_row(8), "owner": by_row(8)["p0"].head(20)},  # the server's examples
            edges,
            timeout=10 * TIMEOUT,  # users have a tenth of it for an answer
        ),
        "quasi-newton, lattice": Setup(
            "quasi-newton", {"quasi-newton": {"coordinator": False}, "regression": lr}, "p0", by_column(2, 569)
        ),
        "quasi-newton, coordinator": Setup(
            "quasi-newton",
            {"quasi-newton": {"encryption": "ou", **short}, "regression": lr},
            "p0",
            by_column(2, 569),
            {"helper": "coordinator"},
        ),
    }


def _columns(
    protocol: str, own: dict[str, Any], trees: dict[str, Any], tables: dict[str, pd.DataFrame], roles: Any = None
) -> Setup:
    return Setup(protocol, {protocol: own, "boosting": trees}, "p0", tables, roles or {})


def write_jobs(setup: Setup, folder: Path, real: dict[str, int], relayed: dict[str, int]) -> None:
    """Write each party's folder: its own copy of the job, where the others are behind relays, its rows and its key."""
    for name in setup.names:
        (folder / name).mkdir(parents=True)
        make_keys(folder / name, name)
        if name in setup.tables:
            setup.tables[name].to_csv(folder / name / "rows.csv", index=False)
    for own in setup.names:
        lines = ['name = "faults"', f'protocol = "{setup.protocol}"', f'active = "{setup.active}"', 'label = "y"']
        lines += [f"timeout = {setup.timeout}", f"reconnect = {RECONNECT}", "n_jobs = 1"]
        for table, options in setup.options.items():
            lines += [f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in options.items())]
        for name in setup.names:
            lines += [f"[parties.{name}]", f'certificate = "../{name}/{name}.cert.pem"']
            lines += [f'address = "127.0.0.1:{(real if name == own else relayed)[name]}"']
            role = setup.roles.get(name)
            lines += [f'role = "{role}"'] if role not in (None, "server") else []
            lines += [f'key = "{name}.key.pem"'] if name == own else []
            lines += ['table = "rows.csv"', 'drop = ["id"]'] if name in setup.tables else []
        (folder / own / "job.toml").write_text("\n".join(lines))


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


@dataclass(frozen=True)
class Fault:
    """What happens to whom and when; `survived` if the job is to go on by itself.

    `throughout`: `act` gets the relays when the job is started, and an event that is set at its end.
    """

    name: str
    victims: str  # "data", "lead" or "both"
    moments: tuple[float, ...]  # shares of the victim's messages; empty: before it starts
    act: str | Callable[..., None]  # a signal, "full", what is done to the network, or to the victim's folder
    survived: bool = False
    reconnect: int = RECONNECT
    timeout: int | None = None  # of the job, where not its system's
    throughout: bool = False


def no_output(folder: Path) -> Callable[[], None]:
    (folder / "model").write_text("a file where the folder should be")
    return lambda: (folder / "model").unlink()


def no_key(folder: Path) -> Callable[[], None]:
    (key,) = folder.glob("*.key.pem")
    key.rename(folder / "elsewhere")
    return lambda: (folder / "elsewhere").rename(key) and None


FAULTS = [
    Fault("killed", "both", (0.1, 0.5, 1.0), "SIGKILL"),
    Fault("terminated", "both", (0.5,), "SIGTERM"),
    Fault("interrupted", "both", (0.5,), "SIGINT"),
    Fault("hung up", "data", (0.5,), "SIGHUP"),
    Fault(f"stopped for {AWAY:.0f} s", "both", (0.5,), "SIGSTOP", survived=True),
    Fault("connections broken for 2 s", "data", (0.2, 0.8), outage(2), survived=True),
    Fault(f"network silent for {AWAY:.0f} s", "data", (0.5,), outage(AWAY, frozen=True), survived=True),
    Fault("network away for 60 s", "data", (0.5,), outage(60), survived=True, reconnect=60, timeout=150),
    Fault("network silent for 60 s", "data", (0.5,), outage(60, frozen=True), survived=True, reconnect=60, timeout=150),
    Fault("connections reset every 2 s", "data", (), resets, survived=True, throughout=True),
    Fault("10,000 idle connections", "data", (), crowd, survived=True, throughout=True),
    Fault("disk full", "both", (0.1, 1.0), "full"),
    Fault("output cannot be written", "both", (), no_output),
    Fault("key missing", "data", (), no_key),
]


@dataclass
class Party:
    """A running party, what it says, and the most memory that it has taken."""

    process: subprocess.Popen[str]
    said: list[str]
    mib: int = 0

    def wait(self, until: float) -> bool:
        """Return whether it ended in time; one that did not is killed."""
        try:
            self.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True


def start(folder: Path, name: str, moment: int, fault: str, *, resume: bool) -> Party:
    """Start a party's process with its fault, if any."""
    command = [sys.executable, str(PARTY), str(moment), fault, str(folder / name / "notes"), "train", "job.toml"]
    process = subprocess.Popen(
        [*command, "--as", name, *(["--resume"] if resume else [])],
        cwd=folder / name,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
    )
    party = Party(process, [])
    threading.Thread(target=lambda: party.said.extend(process.stderr or ()), daemon=True).start()
    return party


def play(
    setup: Setup, folder: Path, *, victim: str = "", moment: int = 0, fault: str = "none", resume: bool = False,
    network: Callable[[], None] | None = None, throughout: Callable[[threading.Event], None] | None = None,
    patience: float = PATIENCE,
) -> tuple[dict[str, Party], list[str]]:  # fmt: skip
    """Play a job to its end; returned are the parties, and complaints about how they ended."""
    notes, over = folder / victim / "notes", threading.Event()
    weather = threading.Thread(target=throughout or (lambda over: None), args=(over,), daemon=True)
    weather.start()
    parties = {
        name: start(
            folder, name, *((moment, fault) if name == victim else (0, "none")), resume=resume and name == setup.active
        )
        for name in setup.names
    }
    until, back = time.monotonic() + patience, 0.0
    while any(party.process.poll() is None for party in parties.values()) and time.monotonic() < until:
        if network is not None and notes.exists():
            network()
            network, until = None, time.monotonic() + patience
        if fault == "SIGSTOP" and _stopped(parties[victim].process.pid):
            back = back or time.monotonic() + AWAY
            if time.monotonic() > back:
                parties[victim].process.send_signal(signal.SIGCONT)
        for party in parties.values():
            party.mib = max(party.mib, peak_mib(party.process.pid))
        time.sleep(0.05)
    over.set()
    weather.join(5.0)
    late = [name for name, party in parties.items() if not party.wait(until)]
    time.sleep(0.1)
    complaints = [f"{name} did not end" for name in late]
    for name, party in parties.items():
        said = "".join(party.said)
        if name != victim or fault != "SIGKILL":
            complaints += [
                f"{name}: {word}" for word in ("Traceback", "internal error", "Fatal Python") if word in said
            ]
        longest = max((len(line) for line in party.said), default=0)
        complaints += [f"{name}: a line of {longest} characters"] if longest > LONGEST else []
    return parties, complaints


def peak_mib(pid: int) -> int:
    """Return the most memory that a process has taken; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) >> 10
    return 0


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def model_of(folder: Path, setup: Setup) -> bytes:
    """Return every party's part of the model, but for its number and what says how the links were.

    Two parts are compared as bytes: a NaN in a part is not equal to itself.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name in setup.names:
        for file in (folder / name / "model").glob(f"{name}.part"):
            fields = msgspec.msgpack.decode(file.read_bytes().partition(b"\n")[2])
            parts[name] = {field: value for field, value in fields.items() if field not in OF_THE_RUN}
            # hashes of rows under a key of the run
            parts[name].pop("trained", None)
            if parts[name].get("randomised"):
                del parts[name]["randomised"]["known"]
    return msgspec.msgpack.encode(parts)


def left_over(folder: Path) -> list[str]:
    """Return temporary files."""
    return [path.name for path in folder.rglob("*") if re.search(r"\.tmp|~$|^tmp|\.part\.\w+$", path.name)]


class Arena:
    """One system's template folder, its undisturbed model and its parties' numbers of messages."""

    def __init__(self, name: str, setup: Setup, folder: Path, *, quick: bool, patience: float = PATIENCE) -> None:
        self.name, self.setup, self.folder, self.patience = name, setup, folder, patience
        # of undisturbed parties, and of those of the last cell
        self.mib: dict[str, int] = {}
        self.took: dict[str, int] = {}
        ports = free_ports(2 * len(setup.names))
        self.real = dict(zip(setup.names, ports, strict=False))
        self.relays = Relays(self.real, relayed := dict(zip(setup.names, ports[len(setup.names) :], strict=True)))
        write_jobs(setup, folder / "template", self.real, relayed)
        self.messages = self._undisturbed("first")
        for party in setup.names:  # the key of a party's noise, and noisy labels, are the same in every run
            for kept in (folder / "first" / party).glob("*.nois*"):
                (shutil.copytree if kept.is_dir() else shutil.copy)(kept, folder / "template" / party / kept.name)
        self.model = model_of(folder / "first", setup)
        if quick:  # a job whose runs differ shows in its cells, as another model
            return
        self._undisturbed("second")
        if model_of(folder / "second", setup) != self.model:
            sys.exit(f"{name}: two undisturbed runs gave different models")

    def _undisturbed(self, name: str) -> dict[str, int]:
        folder = self.copy(name)
        parties, complaints = play(self.setup, folder, patience=self.patience)
        self.mib = {name: max(party.mib, self.mib.get(name, 0)) for name, party in parties.items()}
        failed = {name: "".join(party.said) for name, party in parties.items() if party.process.returncode}
        if failed or complaints:
            sys.exit(f"{self.name}: undisturbed run failed: {failed} {complaints}")
        return {name: int((folder / name / "notes").read_text()) for name in self.setup.names}

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.folder / "template", self.folder / name))

    def play(self, fault: Fault, victim: str, moment: float) -> tuple[str, list[str]]:
        """Play a cell; returned are how the job ended and what is wrong with that."""
        folder = self.copy("cell")
        for job in folder.glob("*/job.toml"):
            text = job.read_text().replace(f"reconnect = {RECONNECT}\n", f"reconnect = {fault.reconnect}\n")
            # users wait for a part of it
            patience = (fault.timeout or TIMEOUT) * self.setup.timeout // TIMEOUT
            job.write_text(text.replace(f"timeout = {self.setup.timeout}\n", f"timeout = {patience}\n"))
        number = max(1, min(round(moment * self.messages[victim]), self.messages[victim] - 1))
        undo: Callable[[], None] = lambda: None  # noqa: E731
        how: dict[str, Any] = {"victim": victim, "moment": number, "patience": self.patience}
        if isinstance(fault.act, str):
            how["fault"] = fault.act
        elif fault.throughout:
            how = {"throughout": partial(fault.act, self.relays), "patience": self.patience}
        elif fault.moments:
            how |= {"fault": "tell", "network": partial(fault.act, self.relays)}
        else:
            undo = fault.act(folder / victim)
        parties, complaints = play(self.setup, folder, **how)
        ended = {name: party.process.returncode for name, party in parties.items()}
        complaints += [f"left {name}" for name in left_over(folder)]
        self.took = {name: party.mib for name, party in parties.items()}
        more = {name: mib for name, mib in self.took.items() if mib > self.mib[name] + MORE}
        complaints += [f"{name} took {mib} MiB of memory, not {self.mib[name]}" for name, mib in more.items()]
        if fault.survived and any(ended.values()):
            said = {name: "".join(parties[name].said)[-300:] for name, code in ended.items() if code}
            complaints.append(f"not survived: {said}")
        outcome = "went on" if not any(ended.values()) else "ended"
        if self.setup.protocol == "fedxgb" and not ended[self.setup.active] and any(ended.values()):
            outcome = "went on without it"
        elif outcome == "ended":
            undo()
            resume = (folder / self.setup.active / "model" / f"{self.setup.active}.checkpoint").exists()
            outcome = "resumed" if resume else "begun anew"
            parties, again = play(self.setup, folder, resume=resume, patience=self.patience)
            failed = {name: "".join(party.said)[-300:] for name, party in parties.items() if party.process.returncode}
            complaints += [*again, *([f"afterwards: {failed}"] if failed else [])]
        if outcome != "went on without it" and model_of(folder, self.setup) != self.model:
            complaints.append("another model")
        shutil.rmtree(folder)
        return outcome, complaints


def cells(arena: Arena, faults: list[Fault], *, quick: bool) -> Iterator[dict[str, str]]:
    """Play every fault, of the party with data at one moment if `quick`, and yield a row for each."""
    setup = arena.setup
    data = next(party for party in setup.tables if party != setup.active)
    for fault in faults:
        victims = {"data": [data], "lead": [setup.active], "both": [data, setup.active]}[fault.victims]
        played = list(itertools.product(victims, fault.moments or (0.0,)))
        for victim, moment in played[-1:] if quick else played:
            begun = time.monotonic()
            outcome, complaints = arena.play(fault, victim, moment)
            print(
                *(f"{party} took {mib} MiB, undisturbed {arena.mib[party]}" for party, mib in arena.took.items()),
                sep="; ",
            )
            yield {
                "system": arena.name,
                "fault": fault.name,
                "party": victim,
                "at this share of its messages": str(moment),
                "the job": outcome,
                "judged": "; ".join(complaints) or WELL,
                "seconds": f"{time.monotonic() - begun:.1f}",
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of systems and faults, or parts of them")
    parser.add_argument("--quick", action="store_true", help="one system, a few faults")
    parser.add_argument("--trees", type=int, default=6, help="of boosted jobs; with more, nothing is written")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # parties would ignore what a shell lets this ignore
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    only = given.only or (["secureboost, lattice", "killed", "broken"] if given.quick else [])
    systems, rows = setups(given.trees), []
    for name in _asked(list(systems), only):
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            patience = PATIENCE + 2.0 * given.trees
            arena = Arena(name, systems[name], Path(folder), quick=given.quick, patience=patience)
            named = _asked([fault.name for fault in FAULTS], only)
            played = []
            for row in cells(arena, [fault for fault in FAULTS if fault.name in named], quick=given.quick):
                print(*row.values(), sep=" | ", flush=True)
                played.append(row)
            if not given.quick and given.trees == 6:
                replace("faults", played, "system", "fault")
            rows += played
    wrong = sum(row["judged"] != WELL for row in rows)
    print(f"{len(rows)} cells, {wrong} not well")
    sys.exit(bool(wrong))


def _asked(names: list[str], only: list[str]) -> list[str]:
    """Return the names that are asked for, whole or in part: all where none of their kind is."""
    return [
        name for name in names if any(name == word or (word not in names and word in name) for word in only)
    ] or names


if __name__ == "__main__":
    main()
