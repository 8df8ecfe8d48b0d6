"""Many jobs at two nodes: 50 queued and 10 running at a time, and an hour's soak with the nodes' memory watched.

Both nodes are processes of this machine, on loopback; jobs are small (FederBoost by column, 400 rows, 5 trees, rows not
aligned, for a data set is aligned 20 times a month at most), so that
what is measured is the nodes' own work and the start of a process for each party of each job.

`--load` (`node_load.csv`): 60 jobs with `max_running = 10`, all proposed while the partner's node is down: seconds from
its start until the last has ended, jobs a minute, most jobs at a time and most that waited beside them, and most memory
of each node's own process. About 10 minutes on two cores.

`--soak MINUTES` (`node_soak.csv`): one job after the other for so long, with five seconds between them; each node's
memory, open files and threads a minute. Flat: the last quarter of the time has at most 5 % more memory than the second.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from data import arguments, report, verdict
from node.nodes import Organisation, columns_of, job_file, organisations, wait_for
from treaty.node.store import FINAL, Store

NAMES = ("bank", "shop")
OPTIONS = "[boosting]\nn_estimators = 5\nmax_depth = 3\n"
JOBS, RUNNING = 60, 10
MOST_GROWTH = 1.05
PAUSE = 5.0  # seconds between two looks, and so between two jobs


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def pid_of(node: Organisation) -> int:
    assert node.process is not None
    return node.process.pid


def states(node: Organisation) -> dict[str, str]:
    with Store(node.state, create=False) as store:
        return store.states()


def started(folder: Path, running: int) -> dict[str, Organisation]:
    more = dict.fromkeys(NAMES, f"max_running = {running}")
    nodes = organisations(folder, NAMES, columns_of(NAMES), more=more)
    for node in nodes.values():
        node.start()
    wait_for("peer", lambda: all("peer up" in node.treaty("audit-log", "show", code=None) for node in nodes.values()))
    return nodes


def load(quick: bool) -> list[dict]:
    jobs = 6 if quick else JOBS
    with tempfile.TemporaryDirectory() as folder:
        nodes = started(Path(folder), RUNNING)
        file = job_file(Path(folder) / "job.toml", NAMES, OPTIONS, align=False, protocol='"federboost-vertical"')
        nodes["shop"].stop()  # so that all jobs are there before the first one begins
        for _ in range(jobs):
            nodes["bank"].treaty("submit", str(file))
        nodes["shop"].start()
        began = time.perf_counter()
        most, waited, peak = 0, 0, dict.fromkeys(NAMES, 0.0)
        while True:
            found = states(nodes["bank"])
            running = sum(state == "running" for state in found.values())
            waiting = sum(state not in (*FINAL, "running") for state in found.values())
            most, waited = max(most, running), max(waited, waiting if running else 0)
            peak = {name: max(peak[name], memory_mb(pid_of(node))) for name, node in nodes.items()}
            if len(found) == jobs and all(state in FINAL for state in found.values()):
                break
            time.sleep(0.5)
        took = time.perf_counter() - began
        ended = [state for node in nodes.values() for state in states(node).values()]
        for node in nodes.values():
            node.stop()
    lacking = 2 * jobs - ended.count("finished")
    return [{
        "jobs": jobs, "max_running": RUNNING, "not finished": lacking, "s in all": took,
        "jobs a minute": 60 * jobs / took, "most at a time": most, "most waiting beside": waited,
        **{f"{name} MB": mb for name, mb in peak.items()},
        "all finished": verdict(lacking, 0),
    }]  # fmt: skip


def soak(minutes: float) -> list[dict]:
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        nodes = started(Path(folder), 2)
        file = job_file(Path(folder) / "job.toml", NAMES, OPTIONS, align=False, protocol='"federboost-vertical"')
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            found = states(nodes["bank"])
            if all(state in FINAL for state in found.values()):
                nodes["bank"].treaty("submit", str(file))
            minute = int((time.monotonic() - began) / 60)
            if minute > len(rows) - 1:
                row = {"minute": minute, "jobs": len(found), "failed": sum(s == "failed" for s in found.values())}
                for name, node in nodes.items():
                    pid = pid_of(node)
                    row |= {
                        f"{name} MB": memory_mb(pid),
                        f"{name} files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
                        f"{name} threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
                    }
                rows.append(row)
                print(row, flush=True)
            time.sleep(PAUSE)
        for node in nodes.values():
            node.stop()
    quarter = max(1, len(rows) // 4)
    for name in NAMES:
        before, after = rows[quarter : 2 * quarter], rows[-quarter:]
        mean = [sum(row[f"{name} MB"] for row in part) / len(part) for part in (before or rows, after)]
        for row in rows:
            row[f"{name} flat"] = verdict(mean[1] / mean[0], MOST_GROWTH) if row is rows[-1] else ""
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--load", action="store_true", help="this part alone")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="this part alone, so long")
    options = parser.parse_args(given)
    if options.load or options.soak is None:
        report("node_load", load(options.quick), quick=options.quick)
    if options.soak is not None or not options.load:
        minutes = options.soak or (1.0 if options.quick else 60.0)
        report("node_soak", soak(minutes), quick=options.quick or minutes < 60)


if __name__ == "__main__":
    main()
