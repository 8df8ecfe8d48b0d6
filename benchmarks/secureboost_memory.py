"""Memory that SecureBoost training adds to each party's process, between separate processes over TLS.

Claim: from just before training (tables read, kernels compiled) a party's peak grows by at most three times the
encrypted gradients (rows x 384 bytes at 3072 bits) plus its binned table (rows x columns bytes).
Give Me Some Credit, 100 000 training rows, five columns each, OU-3072, depth 3, 32 bins. Linux only: peaks are read
from, and reset in, /proc/self. About 15 seconds; `--quick`: 20 000 rows and two trees.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from data import arguments, give_me_some_credit, report, verdict
from treaty.runs import party as jobs
from treaty.runs import processes, rows
from treaty.runs.job import Job, Member
from treaty.runs.job_files import decoded_job
from treaty.runs.warm_up import compile_kernels

CIPHERTEXT, TIMES = 384, 3


def status(field: str) -> int:
    """Bytes of one line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def play(path: Path, name: str) -> None:
    """Be one party: note the footprint when its table has been read, and the peak from then on."""
    job = decoded_job(path.read_bytes())
    compile_kernels()
    before = 0
    read = rows.labelled

    def read_and_note(*args: object, **kwargs: object) -> object:
        nonlocal before
        table = read(*args, **kwargs)  # type: ignore[arg-type]
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status("VmRSS")
        return table

    rows.labelled = read_and_note  # type: ignore[assignment]
    jobs.train_party(job, name)
    print(before, status("VmHWM"))


def measure(rows: int, trees: int) -> list[dict[str, object]]:
    data = give_me_some_credit()
    x, y = data.x[:rows].astype(np.float32), data.y[:rows]
    half = x.shape[1] // 2
    with tempfile.TemporaryDirectory() as folder:
        tables = {"active": x[:, :half], "passive": x[:, half:]}
        for name, table in tables.items():
            columns = {f"{name}{k}": pa.array(np.ascontiguousarray(table[:, k])) for k in range(table.shape[1])}
            extra = {"label": pa.array(y)} if name == "active" else {}
            parquet.write_table(pa.table(columns | extra), Path(folder) / f"{name}.parquet")
        job = Job(
            name="memory",
            active="active",
            label="label",
            parties={name: Member(table=str(Path(folder) / f"{name}.parquet")) for name in tables},
            own={"key_bits": 3072, "allow_exact_sums": True},
            common={"n_estimators": trees, "max_depth": 3, "max_bin": 32},
            output=str(Path(folder) / "model"),
            n_jobs=1,
        )
        path = Path(folder) / "job.json"
        path.write_bytes(processes._completed(job).encoded())
        compile_kernels()  # once, not in both processes at the same time
        started = {
            name: subprocess.Popen([sys.executable, __file__, "--as", name, str(path)], stdout=subprocess.PIPE)
            for name in tables
        }
        said = {name: process.communicate()[0] for name, process in started.items()}
    result = []
    for name, table in tables.items():
        before, peak = map(int, said[name].split())
        bar = TIMES * rows * CIPHERTEXT + table.size
        result.append(
            {
                "party": name,
                "rows": rows,
                "trees": trees,
                "before MB": before / 1e6,
                "peak MB": peak / 1e6,
                "added MB": (peak - before) / 1e6,
                "bar MB": bar / 1e6,
                "in encrypted gradients": (peak - before - table.size) / (rows * CIPHERTEXT),
                f"<= {TIMES}": verdict(peak - before, bar),
            }
        )
    return result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    parser.add_argument("job", nargs="?", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name:
        play(options.job, options.name)
        return
    rows = measure(20_000, 2) if options.quick else measure(100_000, 5)
    report("secureboost_memory", rows, quick=options.quick)


if __name__ == "__main__":
    main()
