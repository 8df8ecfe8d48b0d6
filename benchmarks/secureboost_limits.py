"""SecureBoost at its stated limits: 5,000 features at one passive party, 10 parties, 255 bins, within stated memory.

Claim: beyond what it holds just before training (its table read), a party's peak is at most one and a half times

* gradients: 3 x rows x 384 bytes (encrypted, as sent or received, and one more while the next tree's are made),
* table: at a passive party 3 bytes a cell (codes, plan, and one more while they are made), at the active one 2,
* products: at a passive party 3 x those made at a time, at most 64 MiB of them (384 bytes each), however many columns,
* answers: 3 x their bytes (384 for every 12 sums or so), at the active party those of all passive parties,
* sums: at the active party 24 bytes a bin, of the nodes asked for, their parents, and as many siblings,
* 64 MiB that no size of the job changes (the cipher's tables, factors kept ready, libraries).

The half on top is what the C library keeps of what threads have freed; it was added after a first run with 5,000
features took 796 MB where the sum above is 623 MB. In one run with 2,000 features and 3,000 rows MALLOC_ARENA_MAX=2
with MALLOC_MMAP_THRESHOLD_=1048576 took 139 MB instead of 216.
Bins are counted as if all were filled; a level asks for at most 2^(depth - 2) nodes.
Default of Credit Card Clients, 20 000 rows, Okamoto-Uchiyama with 3072 bits, depth 3; every party a process of its own
over TLS. Columns beyond the 23 are copies of random ones with noise of a tenth of their deviation, so that they fill
all bins. Linux only: peaks are read from, and reset in, /proc/self. `--setting NAME` measures one and leaves the
others' results as they are. About 15 minutes on two cores; `--quick`: 500 features, 3 parties and 5000 rows.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import dropwhile, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from data import RESULTS, arguments, cpu_of_others, default_of_credit_card_clients, report, verdict
from secureboost_memory import CIPHERTEXT, status
from treaty.runs import party as jobs
from treaty.runs import processes, rows
from treaty.runs.job import Job, Member
from treaty.runs.job_files import load_job
from treaty.runs.warm_up import compile_kernels
from treaty.systems.system import RoleInput

DEPTH, SUM, MIB = 3, 24, 1 << 20
PIECE, FIXED, KEPT = 64 * MIB, 64 * MIB, 1.5
ASKED = 2 ** (DEPTH - 2)  # nodes
Widths = dict[str, int]


@dataclass(frozen=True, slots=True)
class Setting:
    """One limit.

    Attributes
    ----------
    widths : dict of str to int
        Columns of each party, the active one first.
    rows, max_bin, trees, n_jobs : int
    """

    widths: Widths
    rows: int = 20_000
    max_bin: int = 32
    trees: int = 2
    n_jobs: int = 2


SETTINGS = {
    "5000 features": Setting({"active": 11, "passive": 5000}),
    "10 parties": Setting({"active": 3} | {f"p{k}": 3 if k < 3 else 2 for k in range(1, 10)}, trees=3, n_jobs=1),
    "255 bins": Setting({"active": 11, "passive": 12}, max_bin=255, trees=3),
}
QUICK = {
    "5000 features": {"widths": {"active": 11, "passive": 500}},
    "10 parties": {"widths": {"active": 11, "p1": 6, "p2": 6}},
    "255 bins": {},
}


class Measured(msgspec.Struct):
    """What a party's process says of itself.

    Attributes
    ----------
    before, peak : int
        Bytes: when its table had been read, and most from then on.
    setup, boosting, waiting : float
        Seconds; `waiting` are those of boosting in which the party waited for a message.
    sent, largest : int
        Bytes sent per tree, and of the largest message sent or received.
    kind : str
        Of the largest message.
    """

    before: int
    peak: int
    setup: float
    boosting: float
    waiting: float
    sent: int
    largest: int
    kind: str


def play(path: Path, name: str) -> None:
    """Be one party: note the footprint when its table has been read, the peak from then on, and the messages."""
    job = load_job(path)
    compile_kernels()
    measured = Measured(0, 0, 0.0, 0.0, 0.0, 0, 0, "")
    read, write_report = rows.labelled, jobs.write_report

    def read_and_note(*args: object, **kwargs: object) -> object:
        table = read(*args, **kwargs)  # type: ignore[arg-type]
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        measured.before = status("VmRSS")
        return table

    def note_messages(
        path: Path, job: Job, inputs: RoleInput, part: object, own_rows: int | None, seconds: dict[str, float]
    ) -> None:
        transcript = inputs.party.transcript
        measured.setup, measured.boosting = seconds["setup"], seconds["boosting"]
        of_trees = list(dropwhile(lambda entry: entry.step != "TreeStart", transcript.entries))
        measured.waiting = sum(b.seconds - a.seconds for a, b in pairwise(of_trees) if b.direction == "received")
        measured.sent = sum(entry.nbytes for entry in of_trees if entry.direction == "sent")
        largest = max(transcript.entries, key=lambda entry: entry.nbytes)
        measured.largest, measured.kind = largest.nbytes, largest.step
        write_report(path, job, inputs, part, own_rows, seconds)

    rows.labelled, jobs.write_report = read_and_note, note_messages  # type: ignore[assignment]
    jobs.train_party(job, name)
    measured.peak = status("VmHWM")
    print(msgspec.json.encode(measured).decode())


def write_tables(setting: Setting, folder: Path) -> None:
    """Deal the columns out to the parties' files: the real ones first, then noisy copies of random ones."""
    data = default_of_credit_card_clients()
    rng = np.random.default_rng(0)
    kept = rng.permutation(len(data.y))[: setting.rows]
    x, y = data.x[kept], data.y[kept]
    deviation, at = x.std(axis=0), 0
    for name, width in setting.widths.items():
        columns = {"label": pa.array(y)} if at == 0 else {}
        for number in range(at, at + width):
            column = number if number < x.shape[1] else int(rng.integers(x.shape[1]))
            noise = 0.0 if number < x.shape[1] else rng.normal(scale=deviation[column] / 10, size=len(x))
            columns[f"x{number}"] = pa.array((x[:, column] + noise).astype(np.float32))
        parquet.write_table(pa.table(columns), folder / f"{name}.parquet", compression="none")
        at += width


def bar(setting: Setting, name: str) -> float:
    """Return the bytes that theory grants a party beyond its table (see above)."""
    own = setting.widths[name]
    passive = own if name != "active" else sum(setting.widths.values()) - own
    bins = passive * (setting.max_bin + 1)  # of the passive party, or of all of them
    fields = 2 * (setting.rows * (1 << 17)).bit_length() + setting.rows.bit_length()  # 16 fractional bits
    answers = bins * ASKED / ((1024 - 2) // fields) * CIPHERTEXT
    common = 3 * setting.rows * CIPHERTEXT + 3 * answers + FIXED
    if name == "active":
        return KEPT * (common + 2 * setting.rows * own + 3 * ASKED * bins * SUM)
    return KEPT * (common + 3 * setting.rows * own + 3 * min(PIECE, bins * ASKED * CIPHERTEXT))


def run(setting: Setting) -> dict[str, Measured]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tables(setting, folder)
        job = Job(
            name="limits",
            active="active",
            label="label",
            parties={party: Member(table=str(folder / f"{party}.parquet")) for party in setting.widths},
            own={"encryption": "ou", "key_bits": 3072, "allow_exact_sums": True},
            common={"n_estimators": setting.trees, "max_depth": DEPTH, "max_bin": setting.max_bin},
            output=str(folder / "model"),
            n_jobs=setting.n_jobs,
        )
        path = folder / "job.json"
        path.write_bytes(processes._completed(job).encoded())
        compile_kernels()  # once, not in all processes at the same time
        started = {
            party: subprocess.Popen([sys.executable, __file__, "--as", party, str(path)], stdout=subprocess.PIPE)
            for party in setting.widths
        }
        said = {party: process.communicate()[0] for party, process in started.items()}
        return {party: msgspec.json.decode(text, type=Measured) for party, text in said.items()}


def measure(title: str, setting: Setting) -> list[dict[str, object]]:
    before, start = cpu_of_others(), time.perf_counter()
    parties = run(setting)
    others = max(0.0, (cpu_of_others() - before) / (time.perf_counter() - start))
    result = []
    for name, found in parties.items():
        added, granted = found.peak - found.before, bar(setting, name)
        result.append(
            {
                "setting": title,
                "party": name,
                "columns": setting.widths[name],
                "rows": setting.rows,
                "bins": setting.max_bin,
                "trees": setting.trees,
                "before MB": found.before / 1e6,
                "added MB": added / 1e6,
                "bar MB": granted / 1e6,
                "<= bar": verdict(added, granted),
                "set-up s": found.setup,
                "s/tree": found.boosting / setting.trees,
                "waiting s/tree": found.waiting / setting.trees,
                "MB sent/tree": found.sent / setting.trees / 1e6,
                "largest MB": found.largest / 1e6,
                "largest": found.kind,
                "others' cores": round(others, 2),
            }
        )
    return result


def earlier() -> list[dict[str, object]]:
    path = RESULTS / "secureboost_limits.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "machine"} for row in csv.DictReader(file)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--setting", choices=list(SETTINGS))
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    parser.add_argument("job", nargs="?", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name:
        play(options.job, options.name)
        return
    rows: list[dict[str, object]] = []
    for title, setting in SETTINGS.items():
        if options.setting in (None, title):
            if options.quick:
                setting = replace(setting, rows=5000, trees=1, **QUICK[title])
            rows += measure(title, setting)
        else:
            rows += [row for row in earlier() if row["setting"] == title]
    report("secureboost_limits", rows, quick=options.quick)


if __name__ == "__main__":
    main()
