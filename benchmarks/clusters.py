"""A party's own cluster beside threads on the same cores: the same models, and what workers in processes cost.

Claim: none; on one machine workers can only cost. Two parties on this machine, both with two local workers,
against both with as many threads as cores; random numbers, 1,000,000 rows, 20 columns at the passive party and
two at the active one, two trees of depth 3, 32 bins. Seconds are of the training without the start of Ray, which is
beside it. About 8 minutes; `--quick`: 100,000 rows.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import ray

from data import arguments, cpu_of_others, report
from large_tables import BY_ROW, OPTIONS, written, written_by_row
from treaty.cluster import shards as own_cluster
from treaty.runs import party as jobs
from treaty.runs.job import Job
from treaty.runs.job_files import decoded_job
from treaty.runs.prediction import find_part, owners_of_model
from treaty.runs.warm_up import compile_kernels

OPEN = {"allow_exact_sums": True, "sums": "open"}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "lattice": ("secureboost", {"encryption": "lattice", **OPEN}),
    "Okamoto-Uchiyama, 2048 bits": ("secureboost", {"encryption": "ou", "key_bits": 2048, **OPEN}),
    "federboost-vertical": ("federboost-vertical", {"epsilon": 8.0}),
    "federboost-horizontal": ("federboost-horizontal", {}),
}


def trained(job: Job) -> tuple[float, dict[str, str]]:
    """Train all parties in threads of this process; return seconds and models."""
    began = time.perf_counter()
    threads = [threading.Thread(target=jobs.train_party, args=(job, name)) for name in job.parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    parts = {name: find_part(job, name) for name in owners_of_model(job)}
    return took, {name: repr((part.splits, part.forest and part.forest.trees)) for name, part in parts.items()}


def measure(rows: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    waited = [0.0]
    opened = own_cluster.opened

    @contextmanager
    def timed(cluster: Any) -> Any:
        began = time.perf_counter()
        with opened(cluster) as shards:
            waited[0] = max(waited[0], time.perf_counter() - began)
            yield shards

    jobs.opened = timed  # type: ignore[attr-defined]
    for name, (system, own) in JOBS.items():
        models: dict[str, str] | None = None
        alone = 0.0
        for workers in (0, 2):
            with tempfile.TemporaryDirectory() as path:
                folder = Path(path)
                by_row = system == "federboost-horizontal"
                (written_by_row if by_row else written)(folder, rows * (len(BY_ROW) if by_row else 1), 2)
                job = decoded_job((folder / "job.json").read_bytes())
                members = {
                    party: msgspec.structs.replace(member, cluster="ray", cluster_workers=workers)
                    if workers and (party == job.active or system != "federboost-vertical")
                    else member
                    for party, member in job.parties.items()
                }
                store = str(Path(tempfile.gettempdir()) / f"noise-{os.getpid()}") if "vertical" in system else job.store
                job = msgspec.structs.replace(
                    job, protocol=system, own=own, common=OPTIONS, parties=members, store=store
                )
                waited[0], before, began = 0.0, cpu_of_others(), time.perf_counter()
                took, made = trained(job)
                others = (cpu_of_others() - before) / (time.perf_counter() - began)
            assert models in (None, made), "a cluster made another model"
            models, took = made, took - waited[0]
            alone = alone or took
            found.append(
                {
                    "job": name, "rows": rows, "workers a party": workers or "threads", "seconds": took,
                    "times threads": took / alone, "start of workers s": waited[0],
                    "others' cores": round(max(0.0, others), 2),
                }
            )  # fmt: skip
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    compile_kernels()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    report("clusters", measure(100_000 if options.quick else 1_000_000), quick=options.quick)
    ray.shutdown()


if __name__ == "__main__":
    main()
