"""Jobs between nodes, with one fault at a time: does every job end well, and is the model the same?

The nodes of a system run as processes, behind relays, the last one without an open port. Its job is played undisturbed
first; then again for each fault of `cells`, at the party and the moment named there. A node that ends is started again
after a second, as a service manager would. A cell passes if

- within `PATIENCE` seconds the job has ended in the same way at all nodes,
- it is finished, and the model bit for bit that of the undisturbed job; or it has failed with a clear error at all,
- no process of it is left, nor a temporary file, nor a checkpoint of a finished job,
- nobody has logged a traceback, and all audit logs verify.

An hour on two cores; `--quick` plays a few cells in three minutes, which `make test-rest` does, too; parts of the names
of systems and faults as arguments play these alone.
"""

from __future__ import annotations

import argparse
import csv
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from data import RESULTS, replace
from faults import WELL, Setup, setups
from namespaces import NotPermitted, network
from node_arena import AWAY, Arena, Cell, cut, during, fill, silent
from relays import crowd, resets

DAY = 86400
RATE = 20e6  # bits a second of bad networks
# seconds one way, share of packets lost, and most seconds more by chance
LOSSY = {
    "5 % of packets lost, 200 ms late": (0.2, 0.05, 0.0),
    "1 % of packets lost, jitter of 200 ms": (0.02, 0.01, 0.2),
}
ALIGNED, SEALED = "secureboost, ou", "secureboost, sealed sums"
BREAKERS = {"process": "", "node": "node-"}  # who is killed, when the process of a job is at a message
QUICK = ("process killed, in tree 2", "node killed, in tree 2", "cut for 1 s", "older version")


def systems() -> dict[str, Setup]:
    """Return the systems of `faults` whose jobs nodes play, FedXGB with fewer users, and sealed sums."""
    all_setups = setups()
    del all_setups["secureboost, sealed"]
    fedxgb = all_setups.pop("fedxgb")
    users = [f"p{k}" for k in range(6)]
    kept = {name: table for name, table in fedxgb.tables.items() if name in [*users, "owner"]}
    all_setups["fedxgb"] = Setup(fedxgb.protocol, fedxgb.options, "owner", kept, fedxgb.roles, fedxgb.timeout)
    one = all_setups["fedxgboost-smm"]
    tables = {name: table.head(200) for name, table in one.tables.items()}
    trees = {"n_estimators": 2, "max_depth": 2, "min_child_samples": 5}
    all_setups[SEALED] = Setup("secureboost", {"secureboost": {}, "boosting": trees}, "p0", tables)
    return all_setups


def cells(name: str, setup: Setup, messages: dict[str, list[str]]) -> Iterator[Cell]:
    """Yield all faults of one system; one has each kind at each moment, others the kills of each role."""
    roles = {setup.roles.get(party, "lead" if party == setup.active else "data"): party for party in setup.names}
    if name != ALIGNED:
        for party in roles.values():
            moments = {"mid-training": _middle(messages[party]), "last message": _last(messages[party])}
            for who, prefix in BREAKERS.items():
                for moment, message in moments.items():
                    yield Cell(f"{who} killed, {moment}", party, f"worker {message} {prefix}SIGKILL")
        return
    lead, data, closed = setup.names
    for party in (lead, data, closed):
        for moment, number in _moments(messages[party]).items():
            for who, prefix in BREAKERS.items():
                yield Cell(f"{who} killed, {moment}", party, f"worker {number} {prefix}SIGKILL")
    for party in (lead, data):
        mid, last = _middle(messages[party]), _last(messages[party])
        for state in ("approved", "queued", "running", "finished"):
            for when in ("before", "after"):
                yield Cell(f"node killed, {when}-{state}", party, f"node {when}-{state} SIGKILL")
        yield Cell(f"process stopped for {AWAY:g} s", party, f"worker {mid} SIGSTOP")
        yield Cell(f"node stopped for {AWAY:g} s", party, f"worker {mid} node-SIGSTOP")
        yield Cell("process's writes fail, mid-training", party, f"worker {mid} full")
        yield Cell("process's writes fail, last message", party, f"worker {last} full")
        yield Cell(f"disk full for {AWAY:g} s, mid-training", party, f"worker {mid} tell", fill)
        yield Cell(f"disk full for {AWAY:g} s, after-queued", party, "node after-queued tell", fill)
        yield Cell("every note twice, a break after every frame", party, environment={"FAULTS_TWICE": "1"})
        yield Cell("clock two hours ahead", party, environment={"FAULTS_SKEW": "7200"})
        yield Cell("older version", party, environment={"FAULTS_VERSION": "0"}, apart="version")
    for seconds, reconnect in ((1, 12), (30, 60), (30, 5)):
        for party in (lead, data):
            moment = f"worker {_middle(messages[party])} tell"
            yield Cell(f"cut for {seconds} s, reconnect {reconnect}", party, moment, cut(seconds), reconnect=reconnect)
    yield Cell("cut for 30 s, after-queued", data, "node after-queued tell", cut(30))
    yield Cell("cut for 30 s, after-finished", lead, "node after-finished tell", cut(30))
    yield Cell("silent for 60 s", data, f"worker {_middle(messages[data])} tell", silent(60), reconnect=90)
    yield Cell("connections reset every 2 s for 30 s", data, "node after-queued tell", during(30, resets), reconnect=60)
    yield Cell("10,000 idle connections for 30 s", data, "node after-queued tell", during(30, crowd), reconnect=60)
    yield Cell("clock two days ahead, other's proposal", data, environment={"FAULTS_SKEW": f"{-2 * DAY}"})
    yield Cell("proposal from in two days", lead, submitted_by=2 * DAY)
    yield Cell("proposal of forty days ago", lead, submitted_by=-40 * DAY)


def on_a_bad_network(name: str, setup: Setup, folder: Path, lossy: str) -> dict[str, object]:
    """Play a system's job between namespaces whose links are slow and lose packets, and compare it with one on none."""
    begun, outcome, complaints = time.monotonic(), "", []
    with Arena(name, setup, folder / "good", aligned=True) as arena:
        arena.undisturbed()
    try:
        with (
            network(setup.names, RATE, *LOSSY[lossy]) as (spaces, by),
            Arena(name, setup, folder / "bad", aligned=True, spaces=spaces) as bad,
        ):
            bad.model = arena.model
            outcome, complaints = bad.play(Cell(lossy, setup.active))
            outcome += f", by {by}"
    except NotPermitted as error:
        outcome = f"not tried: {error}"
    return _row(name, Cell(lossy, "all"), outcome, complaints, begun)


def _row(name: str, cell: Cell, outcome: str, complaints: list[str], begun: float) -> dict[str, object]:
    row = {"system": name, "fault": cell.name, "party": cell.victim, "the job": outcome}
    row |= {"judged": "; ".join(complaints) or WELL, "seconds": f"{time.monotonic() - begun:.1f}"}
    print(*row.values(), sep=" | ", flush=True)
    return row


def _middle(messages: list[str]) -> int:
    return (len(messages) + 1) // 2


def _last(messages: list[str]) -> int | str:
    """Return the kind of the message about parts that are kept, where there is one: its number may be another one."""
    kind = messages[-1].split()[1]
    return kind if kind in ("PartKept", "AllKept") else len(messages)


def _moments(messages: list[str]) -> dict[str, int | str]:
    """Return the messages, from 1, before which a process is killed."""

    def first(*marks: str) -> int:
        return next(k + 1 for k, message in enumerate(messages) if all(mark in message for mark in marks))

    return {
        "at begin": "begin",
        "at connecting": 1,
        "at alignment": first(".alignment."),
        "in tree 1": first("Sums", " 1"),
        "in tree 2": first("Sums", " 2"),
        "mid-training": _middle(messages),
        "last message": _last(messages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of names of systems, and of faults after a slash: ou/killed")
    parser.add_argument("--quick", action="store_true", help="one system, a few faults")
    parser.add_argument("--missing", action="store_true", help="only cells of which there is no good result")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nodes are stopped on the way out
    wanted = given.only or [f"{ALIGNED}/{fault}" for fault in QUICK] if given.quick else given.only or [""]
    rows: list[dict[str, object]] = []
    every = systems()
    for name, setup in every.items():
        asked = (word.partition("/") for word in wanted)
        faults = [part for of, _, part in asked if of == name or (of not in every and of in name)]
        if not faults:
            continue
        with tempfile.TemporaryDirectory(prefix="node-faults-") as folder:
            for lossy in LOSSY:
                if name == ALIGNED and any(part in lossy for part in faults):
                    rows.append(on_a_bad_network(name, setup, Path(folder) / lossy, lossy))
                    replace("node_faults", rows[-1:], "system", "fault", "party")
            if not set(faults) <= LOSSY.keys():
                rows += played(name, setup, Path(folder), faults, quick=given.quick, missing=given.missing)
    wrong = sum(row["judged"] != WELL for row in rows)
    print(f"{len(rows)} cells, {wrong} not well")
    sys.exit(bool(wrong) or not rows)


def played(
    name: str, setup: Setup, folder: Path, faults: list[str], *, quick: bool, missing: bool
) -> list[dict[str, object]]:
    """Play a system's cells whose names have one of these parts."""
    rows: list[dict[str, object]] = []
    with Arena(name, setup, folder, aligned=name == ALIGNED) as arena:
        arena.undisturbed()  # what is made once, and kept, is in the first job alone
        messages = arena.undisturbed()
        chosen = [cell for cell in cells(name, setup, messages) if any(fault in cell.name for fault in faults)]
        if quick:  # at one party
            chosen = list({cell.name: cell for cell in chosen if cell.victim != setup.active}.values())
        if missing:
            chosen = [cell for cell in chosen if (name, cell.name, cell.victim) not in _well()]
        for cell in chosen:
            begun = time.monotonic()
            outcome, complaints = arena.play(cell)
            rows.append(_row(name, cell, outcome, complaints, begun))
            if not quick:
                replace("node_faults", rows[-1:], "system", "fault", "party")
    return rows


def _well() -> set[tuple[str, str, str]]:
    with (RESULTS / "node_faults.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["judged"] == WELL]
    return {(row["system"], row["fault"], row["party"]) for row in rows}


if __name__ == "__main__":
    main()
