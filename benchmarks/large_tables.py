"""Memory of a party whose table lies on disk, beside one that keeps it in memory; the models are the same.

Claim: a table on disk saves at least 12 bytes of memory a value, in pooled training and at a passive party of
SecureBoost. Random numbers in Parquet, 2,000,000 rows, 20 columns at the passive party and two at the active one,
lattice map, open sums, two trees of depth 3, 32 bins, one thread a party; and pooled training on the 20 columns. Memory
is what the system calls anonymous, beyond what the process has before it reads anything: pages of files, which the
system takes back when others need memory, are not counted. Linux only. About 4 minutes; `--quick`: 200,000 rows.

`--rows N ...` plays the same job, tables on disk and as many threads as cores, with so many rows: seconds, memory, what
is sent and the largest message. Claim: no message has more than 64 MB, no party needs 8 GB. 10,000,000 rows take about
5 minutes. `--rows N ... --by-row`: federboost-horizontal, the rows divided among three parties of 20 columns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from data import arguments, cpu_of_others, report, verdict
from treaty import GBDTClassifier
from treaty.data import reading
from treaty.messaging.tls_channel import TlsChannel
from treaty.runs import party as jobs
from treaty.runs import processes
from treaty.runs.job import Job, Member
from treaty.runs.job_files import decoded_job
from treaty.runs.warm_up import compile_kernels

COLUMNS, BAR = 20, 12.0
OPTIONS = {"n_estimators": 2, "max_depth": 3, "max_bin": 32, "base_score": 0.5}


def anonymous() -> int:
    """Bytes of memory of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Peak:
    """Watches the memory of this process while something is done."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous()
        self._ended = threading.Event()
        self._began = time.perf_counter()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.seconds = time.perf_counter() - self._began


def play(folder: Path, name: str, limit: int) -> None:
    """Be one party, or (pooled) train alone, and print what memory that took beyond what there was before."""
    reading.ON_DISK = limit
    compile_kernels()
    if name == "pooled":
        y = parquet.read_table(folder / "active.parquet", columns=["label"])["label"].to_numpy()
        with Peak() as peak:
            model = GBDTClassifier("pooled", n_jobs=1, **OPTIONS).fit(folder / "passive.parquet", y)
        trees = [tree.value.tolist() for tree in model.parts_["pooled"].forest.trees]
    else:
        job = decoded_job((folder / "job.json").read_bytes())
        sent, send = [0], TlsChannel.send

        def noted(channel: TlsChannel, to: str, frame: bytes, timeout: float, *, receipt: bool = False) -> None:
            sent.append(len(frame))
            send(channel, to, frame, timeout, receipt=receipt)

        TlsChannel.send = noted  # type: ignore[method-assign]
        with Peak() as peak:
            part = jobs.train_party(job, name)
        trees = repr(part.splits)
        print(peak.most - peak.before, peak.seconds, hash(str(trees)), sum(sent), max(sent))
        return
    print(peak.most - peak.before, peak.seconds, hash(str(trees)))


BY_ROW = ("first", "second", "third")


def written_by_row(folder: Path, rows: int, threads: int) -> None:
    """Write a table of each of `BY_ROW`, and their job."""
    rng = np.random.default_rng(0)
    for name in BY_ROW:
        file = None
        for first in range(0, rows // len(BY_ROW), 1 << 20):
            x = rng.normal(size=(min(1 << 20, rows // len(BY_ROW) - first), COLUMNS))
            y = (x[:, 0] + x[:, 3] - x[:, 5] * x[:, 4] + rng.normal(size=len(x)) > 0).astype(np.int8)
            table = pa.table({f"c{k}": np.ascontiguousarray(x[:, k]) for k in range(COLUMNS)} | {"label": y})
            file = file or parquet.ParquetWriter(folder / f"{name}.parquet", table.schema)
            file.write_table(table, row_group_size=1 << 18)
        assert file is not None
        file.close()
    write_job(folder, "federboost-horizontal", BY_ROW, {}, threads)


def written(folder: Path, rows: int, threads: int = 1) -> None:
    """Write tables, some rows after the others, and job."""
    rng, tables, files = np.random.default_rng(0), ("active", "passive"), {}
    for first in range(0, rows, 1 << 20):
        count = min(1 << 20, rows - first)
        x = rng.normal(size=(count, COLUMNS + 2)).astype(np.float32)
        y = (x[:, 0] + x[:, 3] - x[:, 5] * x[:, 4] + rng.normal(size=count) > 0).astype(np.int8)
        columns = {
            "active": {"a0": x[:, 0], "a1": x[:, 1], "label": y},
            "passive": {f"p{k}": x[:, 2 + k].astype(np.float64) for k in range(COLUMNS)},
        }
        for name in tables:
            table = pa.table({of: pa.array(np.ascontiguousarray(values)) for of, values in columns[name].items()})
            if name not in files:
                files[name] = parquet.ParquetWriter(folder / f"{name}.parquet", table.schema)
            files[name].write_table(table, row_group_size=1 << 18)
    for file in files.values():
        file.close()
    write_job(folder, "secureboost", tables, {"encryption": "lattice", "allow_exact_sums": True}, threads)


def write_job(folder: Path, system: str, names: tuple[str, ...], own: dict[str, object], threads: int) -> None:
    """Write a job of these parties, the first of which is the active one."""
    job = Job(
        name="large",
        protocol=system,
        active=names[0],
        label="label",
        parties={name: Member(table=str(folder / f"{name}.parquet")) for name in names},
        own=own,
        common=OPTIONS,
        output=str(folder / "model"),
        store=str(folder / "store"),
        n_jobs=threads,
        timeout=3600.0,
    )
    (folder / "job.json").write_bytes(processes._completed(job).encoded())


def measure(rows: int) -> list[dict[str, object]]:
    """Train with tables in memory and on disk."""
    found, models, took = [], set(), dict[str, float]()
    for names in (["pooled"], ["active", "passive"]):
        for where, limit in (("in memory", 1 << 60), ("on disk", 0)):
            with tempfile.TemporaryDirectory() as path:
                folder = Path(path)
                written(folder, rows)
                command = [sys.executable, __file__, "--limit", str(limit), "--folder", path, "--as"]
                started = {
                    name: subprocess.Popen(
                        [*command, name], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": "0"}
                    )
                    for name in names
                }
                said = {name: process.communicate()[0].split() for name, process in started.items()}
            for name in names:
                nbytes, seconds, model = float(said[name][0]), float(said[name][1]), said[name][2]
                models.add((name, model))
                row: dict[str, object] = {
                    "party": name, "table": where, "rows": rows, "columns": 2 if name == "active" else COLUMNS,
                    "MB": nbytes / 1e6, "bytes a row": nbytes / rows, "seconds": seconds,
                }  # fmt: skip
                saved = (took[name] - nbytes) / (rows * COLUMNS) if name in took else 0.0
                took[name] = nbytes
                counts = name != "active" and where == "on disk"
                row["saved a value"] = saved if counts else ""
                row[f">= {BAR:.0f}"] = verdict(-saved, -BAR) if counts else ""
                found.append(row)
    assert len(models) == 3, "tables on disk made another model"
    return found


def sizes(rows: int, threads: int, *, by_row: bool) -> list[dict[str, object]]:
    """Train with tables on disk; return what each party took."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (written_by_row if by_row else written)(folder, rows, threads)
        names = BY_ROW if by_row else ("active", "passive")
        command = [sys.executable, __file__, "--limit", "0", "--folder", path, "--as"]
        before, began = cpu_of_others(), time.perf_counter()
        started = {name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in names}
        said = {name: [float(x) for x in process.communicate()[0].split()] for name, process in started.items()}
        others = (cpu_of_others() - before) / (time.perf_counter() - began)
    return [
        {
            "party": name, "rows": rows, "columns": 2 if name == "active" else COLUMNS, "threads": threads,
            "seconds": found[1], "MB": found[0] / 1e6, "bytes a row": found[0] / rows,
            "<= 8 GB": verdict(found[0] / 1e9, 8.0), "MB sent": found[3] / 1e6,
            "largest message MB": found[4] / 1e6, "<= 64 MB": verdict(found[4] / 1e6, 64.0),
            "others' cores": round(max(0.0, others), 2),
        }
        for name, found in said.items()
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, nargs="+", help="play the job with so many rows")
    parser.add_argument("--by-row", action="store_true", help="with --rows: tables split by row")
    options = parser.parse_args()
    if options.rows:
        cores = len(os.sched_getaffinity(0))
        found = [row for rows in options.rows for row in sizes(rows, cores, by_row=options.by_row)]
        report("rows_by_row" if options.by_row else "rows", found, quick=options.quick)
        return
    if options.name:
        play(options.folder, options.name, options.limit)
        return
    report("large_tables", measure(200_000 if options.quick else 2_000_000), quick=options.quick)


if __name__ == "__main__":
    main()
