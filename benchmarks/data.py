"""What the benchmarks share: finding the data, describing the machine, timing side by side, writing results.

The data sets are looked for in $TREATY_DATA, then in ../shared/data beside the repository; a benchmark whose data is
missing says so and ends.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import inspect
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from numpy.typing import NDArray
from sklearn.datasets import load_svmlight_file
from sklearn.model_selection import train_test_split

from treaty.systems import OPTIONS, option_class
from treaty.systems.options import names_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
QUIET = 0.1  # cores that others may use while something is timed

FLIGHTS = (
    "month day weekday sched_dep_min dep_delay flight distance temp dewp humid wind_dir wind_speed wind_gust precip "
    "pressure visib plane_year plane_seats"
).split()


@dataclass(frozen=True, slots=True)
class Data:
    """One data set.

    Attributes
    ----------
    title : str
    x : float64 (n_rows, n_features)
        NaN where missing.
    y : int64 (n_rows,)
        Classes from 0.
    names : list of str
    """

    title: str
    x: NDArray[np.float64]
    y: NDArray[np.int64]
    names: list[str]


def find(file: str) -> Path | None:
    """Return where a data file lies, or None."""
    for folder in (os.environ.get("TREATY_DATA"), ROOT.parent / "shared" / "data"):
        if folder and (path := Path(folder) / file).exists():
            return path
    return None


def _needed(file: str) -> Path:
    """Return where a data file lies; end the benchmark when it does not."""
    path = find(file)
    if path is None:
        sys.exit(f"skipped: no {file} in $TREATY_DATA or ../shared/data")
    return path


def _load(title: str, file: str, label: str, names: Sequence[str] | None = None, drop: Sequence[str] = ()) -> Data:
    table = parquet.read_table(_needed(file))
    names = list(names or [name for name in table.column_names if name not in (label, *drop)])
    x = np.column_stack([table[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in names])
    return Data(title, x, table[label].to_numpy().astype(np.int64), names)


def give_me_some_credit() -> Data:
    """150 000 rows, 10 features, some missing (Kaggle 2011)."""
    return _load("Give Me Some Credit", "credit1.parquet", "SeriousDlqin2yrs", drop=["id"])


def default_of_credit_card_clients() -> Data:
    """30 000 rows, 23 features of whole numbers (UCI 350)."""
    return _load("Default of Credit Card Clients", "credit2.parquet", "default.payment.next.month", drop=["ID"])


def flights() -> Data:
    """327 346 rows, 18 numeric features, some missing: late arrivals (nycflights13 with weather and planes)."""
    return _load("flights", "flights.parquet", "arr_late15", names=FLIGHTS)


def susy() -> Data:
    """11 000 rows of SUSY, 8 low-level features (UCI 279)."""
    return _load("SUSY, 11,000 rows", "susy_11k_8feat.parquet", "label", drop=["split"])


def higgs() -> Data:
    """15 000 rows of HIGGS, 28 features (UCI 280)."""
    return _load("HIGGS, 15,000 rows", "higgs_15k.parquet", "label", drop=["split"])


def adult() -> Data:
    """48 842 rows, 123 columns of 0 and 1 (UCI 2 as LIBSVM's a9a, its training rows first)."""
    parts = [load_svmlight_file(str(_needed(file)), n_features=123) for file in ("a9a.gz", "a9a.t.gz")]
    x, y = np.concatenate([x.toarray() for x, _ in parts]), np.concatenate([y for _, y in parts])
    return Data("Adult", x, (y > 0).astype(np.int64), [f"a{k}" for k in range(1, 124)])


def mnist() -> Data:
    """70 000 images of 28 x 28 points, 10 classes, the 60 000 training images first (LeCun, Cortes, Burges)."""
    x, y = [], []
    for part in ("train", "t10k"):
        images = gzip.decompress(_needed(f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress(_needed(f"{part}-labels-idx1-ubyte.gz").read_bytes())
        x.append(np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28 * 28))
        y.append(np.frombuffer(labels, np.uint8, offset=8))
    names = [f"r{row}c{column}" for row in range(28) for column in range(28)]
    return Data("MNIST", np.concatenate(x).astype(np.float64), np.concatenate(y).astype(np.int64), names)


def splits(data: Data, count: int, test_size: float = 1 / 3) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Return rows to train on (by default two thirds, stratified) and to test on, of the first `count` of ten splits.

    They are kept with the results, a bit per row, 1 for training: results/splits_<title>.npy, uint8
    (10, ceil(n_rows / 8)), or splits_<title>_80.npy where 80 % train. Split k was drawn by scikit-learn's
    `train_test_split` with seed k.
    """
    share = "" if test_size == 1 / 3 else f"_{1 - test_size:.0%}".rstrip("%")
    path = RESULTS / f"splits_{data.title.lower().replace(',', '').replace(' ', '_')}{share}.npy"
    if not path.exists():
        drawn = np.zeros((10, len(data.y)), bool)
        for seed, trained in enumerate(drawn):
            train, _ = train_test_split(np.arange(len(data.y)), test_size=test_size, stratify=data.y, random_state=seed)
            trained[train] = True
        RESULTS.mkdir(exist_ok=True)
        np.save(path, np.packbits(drawn, axis=1))
    kept = np.unpackbits(np.load(path), axis=1, count=len(data.y)).astype(bool)
    return [(np.flatnonzero(trained), np.flatnonzero(~trained)) for trained in kept[:count]]


def machine() -> str:
    """Describe the processor in words that name no host."""
    model, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        fields = {name.strip(): value.strip() for name, value in lines.items()}
        model = fields.get("model name", model)
        has = fields.get("flags", "").split()
        flags = ", AVX-512 with IFMA" if "avx512ifma" in has else ", AVX2" if "avx2" in has else ""
    return f"{os.cpu_count()} cores {model}{flags}"


def seconds(work: Callable[[], object]) -> float:
    """Return the wall-clock time of one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Timing:
    """Two things timed in turn, as medians over the pairs.

    Attributes
    ----------
    ours, theirs : float
        Seconds.
    ratio : float
        Of the pairs' ratios ours / theirs.
    others : float
        Cores that other processes of the machine kept busy meanwhile; above 0.1 the figures are worth little.
    """

    ours: float
    theirs: float
    ratio: float
    others: float


def side_by_side(ours: Callable[[], object], theirs: Callable[[], object], pairs: int, tries: int = 4) -> Timing:
    """Time two things in turn, A B B A A B and so on; both must have been run once before.

    Of at most `tries` times `pairs` pairs the first `pairs` undisturbed ones count; if there are fewer, the least
    disturbed ones do.
    """
    timed: list[tuple[float, float, float]] = []  # cores others used, ours, theirs
    for k in range(pairs * tries):
        before, start = cpu_of_others(), time.perf_counter()
        if k % 2 == 0:
            a = seconds(ours)
            b = seconds(theirs)
        else:
            b = seconds(theirs)
            a = seconds(ours)
        timed.append(((cpu_of_others() - before) / (time.perf_counter() - start), a, b))
        if sum(others < QUIET for others, _, _ in timed) >= pairs:
            break
    best = sorted(timed)[:pairs]
    return Timing(
        median(a for _, a, _ in best),
        median(b for _, _, b in best),
        median(a / b for _, a, b in best),
        max(0.0, median(others for others, _, _ in best)),
    )


def cpu_of_others() -> float:
    """Return the processor seconds that processes other than this one and its (ended) children have used so far."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, soft, *_ = map(int, stat.read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run: fewer repetitions, rows or trees")
    return parser


def report(name: str, rows: Sequence[dict[str, object]], *, quick: bool, keys: Sequence[str] = ()) -> None:
    """Print the rows as a table and write them to results/<name>.csv; of a quick run to results/quick/<name>.csv.

    With `keys`, which a full run may make in parts, they take the place of those with the same values of these columns.
    """
    rows = [{key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    heads = list(rows[0])
    widths = {head: max(len(head), *(len(str(row[head])) for row in rows)) for head in heads}
    for row in [dict(zip(heads, heads, strict=True)), *rows]:
        print("  ".join(str(row[head]).ljust(widths[head]) for head in heads).rstrip())
    print(f"machine: {machine()}")
    if quick:
        write(f"quick/{name}", [{**row, "quick": "yes"} for row in rows])
    elif keys:
        replace(name, rows, *keys)
    else:
        write(name, rows)


def write(name: str, rows: Sequence[dict[str, object]]) -> None:
    """Write rows to results/<name>.csv, for tables too long to print."""
    path = RESULTS / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "machine"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "machine": machine()} for row in rows)
    print(f"written to benchmarks/results/{name}.csv")


def replace(name: str, rows: Sequence[dict[str, object]], *keys: str) -> None:
    """Write rows to results/<name>.csv in place of those with the same values of `keys`: it can be made in parts."""

    def key(row: dict[str, object]) -> tuple[str, ...]:
        return tuple(str(row[one]) for one in keys)

    path, new = RESULTS / f"{name}.csv", set(map(key, rows))
    kept: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [{**row} for row in csv.DictReader(file) if key({**row}) not in new]
    all_rows = [*kept, *({**row, "machine": machine()} for row in rows)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "machine"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(all_rows, key=key))


def verdict(value: float, bar: float) -> str:
    """Say whether a number keeps its bar (smaller is better)."""
    return "kept" if value <= bar else "missed"


def flat(estimator: Any, protocol: str = "pooled", **options: Any) -> Any:
    """Make an estimator from one list of options: a system's own ones are given to its class."""
    kinds = {kind.system: kind for kind in map(option_class, OPTIONS)}
    own = {name: value for name, value in options.items() if name not in inspect.signature(estimator).parameters}
    common = {name: value for name, value in options.items() if name not in own}
    kind = kinds[protocol]
    if "allow_exact_sums" in names_of(kind):
        own = {"allow_exact_sums": True, **own}  # public tables
    return estimator(kind(**own) if own else protocol, **common)
