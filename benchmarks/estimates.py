"""What `treaty check` expects of a job beside what the job takes: bytes, seconds, and memory of a process.

Every system and cipher on made-up tables, each party a process of its own, over TLS, `n_jobs=1`, on the cores of this
machine; where columns are split, two parties with 10 columns each whose rows are aligned by ids. Claims: bytes within
30 % of all that is sent, seconds within a factor of 3 of the processor seconds of the busiest party, as if each had a
machine of its own, and memory within a factor of 2. `estimates.csv` has a line for each job and kind of party; what all
took together on one machine, and beside what other work, is in it, too. Linux only. About 10 minutes on an idle
machine; `--quick`: the small tables alone; `--only TITLE`: those whose title contains this.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from data import arguments, cpu_of_others, report
from treaty.data.table import Table
from treaty.runs import processes
from treaty.runs.job import Align, Job, Member
from treaty.runs.job_files import decoded_job
from treaty.runs.local_checks import expect
from treaty.runs.party import train_party
from treaty.runs.report import load_reports
from treaty.runs.table_files import read_alone
from treaty.runs.warm_up import compile_kernels

BYTES, SECONDS, MEMORY = 1.3, 3.0, 2.0
COLUMNS = 10
OPEN = {"allow_exact_sums": True}

COLUMN_SPLIT: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "secureboost, lattice": ("secureboost", {"encryption": "lattice", **OPEN}, {"n_estimators": 10}, (5_000, 100_000)),
    "secureboost, lattice, long": (
        "secureboost", {"encryption": "lattice", **OPEN}, {"n_estimators": 40, "max_depth": 5}, (100_000,)
    ),
    "secureboost, sealed, long": ("secureboost", {}, {"n_estimators": 20}, (30_000,)),
    "secureboost, ou, long": ("secureboost", {"encryption": "ou", **OPEN}, {"n_estimators": 15}, (40_000,)),
    "fedxgboost-smm, dealer, long": (
        "fedxgboost-smm", {"backend": "dealer", **OPEN}, {"n_estimators": 60}, (30_000,)
    ),
    "quasi-newton, lattice, long": ("quasi-newton", {}, {"max_iter": 25, "tol": 0.0}, (30_000,)),
    "secureboost, sealed": ("secureboost", {}, {"n_estimators": 3}, (5_000, 30_000)),
    "secureboost, hidden rows": (
        "secureboost", {"membership": "hidden"}, {"n_estimators": 6, "objective": "logistic_pieces"}, (5_000, 30_000)
    ),
    "secureboost, ou": ("secureboost", {"encryption": "ou", **OPEN}, {"n_estimators": 3}, (5_000, 20_000)),
    "secureboost, paillier": ("secureboost", {"encryption": "paillier", **OPEN}, {"n_estimators": 1}, (2_000, 5_000)),
    "fedxgboost-smm, dealer": ("fedxgboost-smm", {"backend": "dealer", **OPEN}, {"n_estimators": 10}, (5_000, 30_000)),
    "fedxgboost-smm, ou": ("fedxgboost-smm", {"backend": "ou", **OPEN}, {"n_estimators": 1}, (2_000, 5_000)),
    "fedxgboost-ldp": ("fedxgboost-ldp", {"epsilon": 4.0}, {"n_estimators": 20}, (5_000, 200_000)),
    "federboost-vertical": ("federboost-vertical", {"epsilon": 4.0}, {"n_estimators": 20}, (5_000, 200_000)),
    "quasi-newton, lattice": ("quasi-newton", {}, {"max_iter": 5, "tol": 0.0}, (5_000, 30_000)),
    "quasi-newton, ou": ("quasi-newton", {"encryption": "ou"}, {"max_iter": 2, "tol": 0.0}, (2_000, 5_000)),
    "sgd, without a coordinator": ("sgd", {"coordinator": False}, {"max_iter": 2, "tol": 0.0}, (2_000, 5_000)),
}  # fmt: skip
ROW_SPLIT: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "federboost-horizontal": ("federboost-horizontal", {}, {"n_estimators": 20}, (5_000, 100_000)),
    "fedxgb, model": ("fedxgb", {"expose": "model"}, {"n_estimators": 5}, (500,)),
    "fedxgb, additive": ("fedxgb", {"comparison": "additive"}, {"n_estimators": 3}, (500,)),
    "fedxgb, shamir": ("fedxgb", {}, {"n_estimators": 2}, (500,)),
}


def play(path: Path, name: str) -> None:
    """Be one party; print its processor seconds and its peak of memory."""
    train_party(decoded_job(path.read_bytes()), name)
    lines = Path("/proc/self/status").read_text().splitlines()
    print(time.process_time(), next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))


def drawn(rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] * x[:, -1] + rng.standard_normal(rows) > 0).astype(np.int64)


def write(folder: Path, name: str, x: np.ndarray, first: int = 0, **more: np.ndarray) -> str:
    columns = {f"c{first + k}": pa.array(np.ascontiguousarray(x[:, k])) for k in range(x.shape[1])}
    path = folder / f"{name}.parquet"
    parquet.write_table(pa.table(columns | {of: pa.array(values) for of, values in more.items()}), path)
    return str(path)


def by_column(system: str, own: dict[str, Any], rows: int, folder: Path) -> tuple[str, dict[str, Member], dict]:
    x, y = drawn(rows, 2 * COLUMNS, 0)
    ids = np.arange(rows)
    parties = {
        "active": Member(table=write(folder, "active", x[:, :COLUMNS], label=y, id=ids)),
        "passive": Member(table=write(folder, "passive", x[:, COLUMNS:], COLUMNS, id=ids[::-1])),
    }
    if own.get("backend") == "dealer":
        parties["helper"] = Member(role="dealer")
    if system in ("quasi-newton", "sgd") and own.get("coordinator") is not False:
        parties["helper"] = Member(role="coordinator")
    return "active", parties, {"align": Align(on="id")}


def by_row(system: str, own: dict[str, Any], rows: int, folder: Path) -> tuple[str, dict[str, Member], dict]:
    crowd = system == "fedxgb"
    parties = {}
    for k in range(9 if crowd else 3):
        x, y = drawn(rows, COLUMNS, k)
        parties[f"owner{k}"] = Member(table=write(folder, f"owner{k}", x, label=y))
    if not crowd:
        return "owner0", parties, {}
    x, y = drawn(100, COLUMNS, 99)
    parties = {
        "server": Member(table=write(folder, "server", x, label=y)),
        "notary": Member(role="authority"),
        **parties,
    }
    return "server", parties | {f"edge{k}": Member(role="edge") for k in range(3)}, {}


def job_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--only`, and with what `played` starts a party's process with."""
    parser = arguments(description)
    parser.add_argument("--only", default="", help="jobs whose titles contain this")
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    parser.add_argument("what", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("job", nargs="?", type=Path, help=argparse.SUPPRESS)
    return parser


def played(script: str, job: Job, folder: Path) -> tuple[Job, dict[str, str], float, float]:
    """Play a job, each party a process of the script.

    Return the job with addresses and keys, the last line of each party, seconds, and the cores that other work took.
    """
    job = processes._completed(job)
    path = folder / "job.json"
    path.write_bytes(job.encoded())
    before, began = cpu_of_others(), time.perf_counter()
    command = [sys.executable, script, "job", str(path), "--as"]
    parties = {of: subprocess.Popen([*command, of], stdout=subprocess.PIPE, text=True) for of in job.parties}
    printed = {of: process.communicate()[0].splitlines()[-1] for of, process in parties.items()}
    took = time.perf_counter() - began
    return job, printed, took, (cpu_of_others() - before) / took


def table_of(job: Job, name: str) -> Table:
    """Return a party's training table as its check reads it."""
    return read_alone(job.table_rules(name), str(job.parties[name].table), training=True)[0].features


def measure(title: str, rows: int, case: tuple[str, dict[str, Any], dict[str, Any], Any]) -> list[dict[str, object]]:
    """Play one job; return a line for each of the parties whose sizes differ most."""
    system, own, common, _ = case
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        active, parties, more = (by_row if title in ROW_SPLIT else by_column)(system, own, rows, folder)
        # linear models have no trees
        depth = {} if "max_iter" in common else {"max_depth": 3}
        job = Job(
            name="estimates", active=active, label="label", parties=parties, protocol=system, own=own,
            common=depth | common, output=str(folder / "model"), store=str(folder / "store"), n_jobs=1,
            **more,
        )  # fmt: skip
        job, printed, took, others = played(__file__, job, folder)
        busy, peaks = ({of: float(said.split()[at]) for of, said in printed.items()} for at in (0, 1))
        lines, reports = [], load_reports(job)
        sent = {of: sum(total["bytes"] for total in noted.sent.values()) for of, noted in reports.items()}
        shown = [active, next(of for of in parties if of != active and parties[of].table)]
        shown += [of for of in parties if of == "edge0"]
        for of in shown:
            has_rows = job.parties[of].table is not None and of in job.roles().owners
            table = table_of(job, of) if has_rows else None
            if table is None and title in ROW_SPLIT:  # an estimate for as many rows as users have
                table = table_of(job, "owner0")
            found = expect(job, job.roles(), of, table)
            received = sum(reports[of].received.values())
            lines.append({
                "job": title, "rows": rows, "party": of,
                "MB": (sent[of] + received) / 1e6, "expected MB": (found.sent + found.received) / 1e6,
                "all MB": sum(sent.values()) / 1e6, "expected all MB": found.in_all / 1e6,
                "s": took, "busiest's s": max(busy.values()),
                "all s": sum(busy.values()), "expected s": found.seconds, "others' cores": others,
                "peak MB": peaks[of] / 1e6, "expected peak MB": found.memory / 1e6,
                "bytes": near(found.in_all, sum(sent.values()), BYTES),
                "seconds": near(found.seconds, max(busy.values()), SECONDS),
                "memory": near(found.memory, peaks[of], MEMORY),
            })  # fmt: skip
            print(lines[-1], flush=True)
    return lines


def near(expected: float, found: float, factor: float) -> str:
    return "kept" if found / factor <= expected <= found * factor else "missed"


def main() -> None:
    options = job_arguments(__doc__).parse_args()
    if options.name:
        play(options.job, options.name)
        return
    compile_kernels()
    rows = []
    for title, case in (COLUMN_SPLIT | ROW_SPLIT).items():
        if options.only in title:
            for size in case[3][:1] if options.quick else case[3]:
                rows += measure(title, size, case)
    report("estimates", rows, quick=options.quick, keys=("job", "rows", "party"))


if __name__ == "__main__":
    main()
