"""FedXGBoost-SMM, published and secure, beside SecureBoost, the plain grower and XGBoost: seconds, bytes and memory.

Le et al. 2021 publish no number for the matrix product ("future work"). flights, 18 numeric columns, half of them at
each of two parties, depth 3, learning rate 0.3, leaves of 20 rows at least in every method, so that all but XGBoost
give the same model, which is checked; SMM-2, a product for each column, does while nodes have rows enough for null
vectors of a column's candidates. Set-up (bins, keys,
hints, masked bins) is told apart from trees. Both parties and the dealer are threads of one process on all cores; bytes
are those of all parties, peaks what the whole process takes beyond what it had before. Ciphers have 3072 bits, the
lattice map its 128-bit parameters, null vectors are 32.

Sweeps, each into the same file, three with a panel of the figure: rows at 32 bins; candidates, by `max_bin`, at 20,000
rows; null vectors r of the published form at 5,000 rows; and, for SMM-2 alone, few rows (1,000 at 32 bins, 2,000 at the
20 of paper mode). `--method` plays one method beside the plain grower, and takes the others' results from the file.

Of several passes over a sweep each point's least time and largest peak count. About 10 minutes; `--quick`: a few small
points.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

import figures
from data import RESULTS, Data, arguments, cpu_of_others, flights, report, seconds
from published import read_rows
from treaty import GBDTClassifier
from treaty.runs.warm_up import compile_kernels
from treaty.systems import find_system
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import Pooled
from treaty.systems.secureboost.options import SecureBoost

PAPER = {"mode": "paper", "allow_insecure": True}
METHODS: dict[str, SystemOptions] = {
    "plain, pooled": Pooled(),
    "SMM-1, published": FedXGBoostSMM(version=1, **PAPER),
    "SMM-2, published": FedXGBoostSMM(version=2, **PAPER),
    "smm_secure, dealer": FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    "smm_secure, lattice": FedXGBoostSMM(backend="lattice", allow_exact_sums=True),
    "smm_secure, OU": FedXGBoostSMM(backend="ou", allow_exact_sums=True),
    "SecureBoost, lattice": SecureBoost(encryption="lattice", allow_exact_sums=True),
    "SecureBoost, OU": SecureBoost(encryption="ou", allow_exact_sums=True),
}
DRAWN = ("rows", "max_bin", "r", "s/tree", "MB/tree")
ONE_TABLE = ("XGBoost, pooled", "plain, pooled")
COMMON = {"base_score": 0.5, "max_depth": 3, "learning_rate": 0.3, "min_child_samples": 20}
OF_TREES = ("TreeStart", "PaperTree", "TreeEnd", "SumsRequest", "Sums", "NullVectors", "MaskedCandidates", "NodeRows",
            "CandidateVectors", "MaskedGradients", "BestGains", "SplitRequest", "WonNodes", "NamedRows", "SplitAnswer",
            "SplitColumns", "DealRequest", "DealtShares")  # fmt: skip
COLOURS = {
    "XGBoost, pooled": "#7a7a7a",
    "plain, pooled": "#000000",
    "SMM-1, published": "#c1440e",
    "SMM-2, published": "#e39a7b",
    "smm_secure, dealer": "#2a8c4a",
    "smm_secure, lattice": "#0b5fa5",
    "smm_secure, OU": "#8a63b0",
    "SecureBoost, lattice": "#7fb2dd",
    "SecureBoost, OU": "#d9a400",
}

Row = dict[str, Any]
Point = tuple[str, str, int, int, int]  # sweep, method, rows, max_bin, null vectors


def points(*, quick: bool) -> list[Point]:
    """Return what is measured, sweep by sweep."""
    rows = (500, 2_000) if quick else (1_000, 5_000, 20_000, 100_000)
    bins, at = ((8, 16), 1_000) if quick else ((8, 16, 32, 64), 20_000)
    vectors, of = ((8, 32), 500) if quick else ((8, 32, 128, 512), 5_000)
    every = ["XGBoost, pooled", *METHODS]
    found = [("rows", method, n, 32, 32) for n in rows for method in every]
    found += [("candidates", method, at, q, 32) for q in bins for method in every]
    found += [
        ("few rows", method, n, q, 32)
        for n, q in ((1_000, 32), (2_000, 20))
        for method in ("plain, pooled", "SMM-2, published")
    ]
    return found + [("null vectors", method, of, 32, r) for r in vectors for method in METHODS if "published" in method]


def peak(work: Callable[[], object]) -> float:
    """Return the bytes by which the process's peak exceeds what it takes before; NaN elsewhere than on Linux."""
    if not Path("/proc/self/clear_refs").exists():
        work()
        return float("nan")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier points have left would be taken again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    work()
    return float(status("VmHWM") - before)


def status(field: str) -> int:
    """Return the bytes of one line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def with_xgboost(x: np.ndarray, y: np.ndarray, max_bin: int, trees: int) -> Row:
    """Train XGBoost on the whole table."""
    made: list[xgboost.QuantileDMatrix] = []
    binned = seconds(lambda: made.append(xgboost.QuantileDMatrix(x, y, max_bin=max_bin)))
    (matrix,) = made
    settings: dict[str, Any] = {
        "max_depth": 3,
        "eta": 0.3,
        "max_bin": max_bin,
        "tree_method": "hist",
        "base_score": 0.5,
    }
    settings["objective"] = "binary:logistic"
    took = seconds(lambda: xgboost.train(settings, matrix, trees))
    return {"s set-up": binned, "s/tree": took / trees, "MB set-up": 0.0, "MB/tree": 0.0, "peak MB": float("nan")}


def with_treaty(
    method: str, x: np.ndarray, y: np.ndarray, max_bin: int, vectors: int, trees: int
) -> tuple[Row, np.ndarray]:
    """Train one of ours; return what it took, and its predictions of the training rows."""
    half = x.shape[1] // 2
    tables = {"active": x[:, :half], "passive": x[:, half:]}
    options = METHODS[method]
    if "published" in method:
        options = replace(options, null_vectors=vectors)
    model = GBDTClassifier(options, **COMMON, n_estimators=trees, max_bin=max_bin)
    added = peak(lambda: model.fit(tables, y))
    sent = [of_type for pair in model.communication_.values() for of_type in pair["by_type"].items()]
    of_trees = sum(nbytes for step, nbytes in sent if step in OF_TREES)
    return {
        "s set-up": model.timings_["setup"],
        "s/tree": model.timings_["boosting"] / trees,
        "MB set-up": (sum(nbytes for _, nbytes in sent) - of_trees) / 1e6,
        "MB/tree": of_trees / trees / 1e6,
        "peak MB": added / 1e6,
    }, model.predict_proba(tables)[:, 1]


def measure(data: Data, only: str | None, of: str | None, *, quick: bool) -> list[Row]:
    """Return a row per point, perhaps of `only` one method and `of` one sweep: the pass with the least time of each."""
    order = np.random.default_rng(0).permutation(len(data.y))
    x, y = data.x[order].astype(np.float32), data.y[order]
    trees, passes = (1, 1) if quick else (3, 3)
    best: dict[Point, Row] = {}
    peaks: dict[Point, float] = {}
    expected: dict[tuple[int, int], np.ndarray] = {}
    for _ in range(passes):
        for point in points(quick=quick):
            sweep, method, n, max_bin, vectors = point
            if method not in (only or method, "plain, pooled") or sweep != (of or sweep):
                continue
            before, started = cpu_of_others(), time.perf_counter()
            if method in METHODS:
                row, predicted = with_treaty(method, x[:n], y[:n], max_bin, vectors, trees)
            else:
                row, predicted = with_xgboost(x[:n], y[:n], max_bin, trees), None
            others = max(0.0, (cpu_of_others() - before) / (time.perf_counter() - started))
            if method == "plain, pooled" and predicted is not None:
                expected[n, max_bin] = predicted
            same = "" if predicted is None or (n, max_bin) not in expected else verdict(predicted, expected[n, max_bin])
            head = {"sweep": sweep, "method": method, "rows": n, "max_bin": max_bin, "r": vectors}
            row = {**head, **row, "same model": same, "cores others used": others}
            peaks[point] = max(row["peak MB"], peaks.get(point, row["peak MB"]))
            if point not in best or row["s/tree"] < best[point]["s/tree"]:
                best[point] = row
    return [{**row, "peak MB": peaks[point]} for point, row in best.items() if only in (None, point[1])]


def verdict(predicted: np.ndarray, expected: np.ndarray) -> str:
    return "yes" if np.array_equal(predicted, expected) else "NO"


def draw(rows: list[Row], *, quick: bool) -> None:
    """Draw seconds and bytes a tree against rows, seconds against candidates and against null vectors."""
    figure, (of_rows, sent, of_bins, of_vectors) = figures.panels(
        ["seconds per tree, by rows", "MB per tree, by rows", "seconds per tree, by max_bin (20,000 rows)",
         "seconds per tree, by null vectors r (5,000 rows)"]
    )  # fmt: skip
    for panel, sweep, along, what in (
        (of_rows, "rows", "rows", "s/tree"),
        (sent, "rows", "rows", "MB/tree"),
        (of_bins, "candidates", "max_bin", "s/tree"),
        (of_vectors, "null vectors", "r", "s/tree"),
    ):
        for method, line in by_method(row for row in rows if row["sweep"] == sweep):
            if what == "MB/tree" and method in ONE_TABLE:
                continue
            panel.plot(
                [row[along] for row in line],
                [row[what] for row in line],
                "o-",
                ms=3,
                label=method,
                color=COLOURS[method],
            )
        panel.set(xscale="log", yscale="log", xlabel=along)
    of_rows.legend(fontsize=6)
    figures.save(figure, "smm", quick=quick)


def by_method(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows, in the methods' order."""
    kept = list(rows)
    lines = [(method, [row for row in kept if row["method"] == method]) for method in COLOURS]
    return [
        (method, sorted(line, key=lambda row: (row["rows"], row["max_bin"], row["r"])))
        for method, line in lines
        if line
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--method", choices=METHODS, help="this one alone; the others' results are taken from the CSV")
    parser.add_argument("--sweep", choices=("rows", "candidates", "few rows", "null vectors"), help="likewise")
    options = parser.parse_args()
    logging.getLogger("treaty").setLevel(logging.ERROR)  # paper mode warns at every fit
    compile_kernels(find_system("fedxgboost-smm"))
    rows = measure(flights(), options.method, options.sweep, quick=options.quick)
    partly = options.method or options.sweep
    keys = ("sweep", "method", "rows", "max_bin", "r") if partly else ()
    report("smm", rows, quick=options.quick, keys=keys)
    if partly and not options.quick:
        rows = [{**row, **{name: float(row[name]) for name in DRAWN}} for row in read_rows(RESULTS / "smm.csv")]
    draw(rows, quick=options.quick)


if __name__ == "__main__":
    main()
