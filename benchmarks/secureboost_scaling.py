"""Time of one SecureBoost round against depth, features and rows, with linear fits.

Claim (Cheng et al. 2021, figures of runtime): time grows linearly in each; R^2 of a straight line at least 0.98.
Default of Credit Card Clients, both parties on this machine with all its cores, half of the columns each,
Okamoto-Uchiyama with 2048 bits, 32 bins; set-up (binning, key, plan) apart. Depth 3 to 8 on all 30 000 rows; rows 5 000
to 30 000 at depth 3; features 50 to 5 000 at depth 3 on 20 000 rows. For features beyond the 23, real columns are drawn
at random and their rows shuffled: they have bins as real ones have, but say nothing about the label, so that widths
differ in work and not in the tree. Depths and rows: the mean of five rounds; features: one round. Depth is repeated
under the paper's cipher, one round each: with Paillier keys of 2048 bits, and in paper mode (512 bits, answers not
re-randomised), with the same trees; and under the default cipher, the lattice map. Under that also rows at 100, 500 and
1,000 features: the grid of the two.
All points of a sweep are measured in turn, two (features), three (Paillier) or five times over, and the least time
counts: seconds, and processor seconds of both parties, which say more where other processes are busy. The fit against
inner nodes tells why depth is not linear: every node costs packing and decryption of its sums, however few its rows.
`--sweep NAME ...` measures some, `none` none, and takes the others' results from the CSV; `--passes` is how many
times. About 10 minutes; `--quick`: few points.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np

import figures
from data import RESULTS, arguments, cpu_of_others, default_of_credit_card_clients, flat, machine, report, seconds
from treaty import GBDTClassifier
from treaty.runs import fit as runs

BAR = 0.98
CLOCKS = ("s/round", "processor s/round")
SETTINGS = {"max_bin": 32, "learning_rate": 0.3, "base_score": 0.5, "min_child_samples": 20}
CIPHERS: dict[str, dict[str, object]] = {
    "Okamoto-Uchiyama, 2048": {"encryption": "ou", "key_bits": 2048},
    "Paillier, 2048": {"encryption": "paillier", "key_bits": 2048},
    "Paillier, 512, paper mode": {"mode": "paper", "allow_insecure": True},
    "lattice map": {"encryption": "lattice"},
}
DEPTHS = range(3, 9)
ROWS = range(5000, 30_001, 5000)
GRID = (100, 500, 1000)
FEATURES = (50, 100, 250, 500, 1000, 2000, 3000, 4000, 5000)

Tables = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One figure.

    Attributes
    ----------
    points : sequence of int
        Along the horizontal axis.
    task : callable
        Turns a point into tables, labels and depth.
    rounds, passes : int
        Rounds of a run, and runs per point.
    cipher : str
        One of `CIPHERS`.
    """

    points: Sequence[int]
    task: Callable[[int], tuple[Tables, np.ndarray, int]]
    rounds: int
    passes: int
    cipher: str = "Okamoto-Uchiyama, 2048"


def sweeps(*, quick: bool) -> dict[str, Sweep]:
    data = default_of_credit_card_clients()
    order = np.random.default_rng(0).permutation(len(data.y))
    x, y = data.x[order].astype(np.float32), data.y[order]
    wide = {name: widened(part[:20_000], 250 if quick else max(FEATURES) // 2) for name, part in halves(x).items()}

    def deeper(depth: int) -> tuple[Tables, np.ndarray, int]:
        return halves(x), y, depth

    def longer(rows: int) -> tuple[Tables, np.ndarray, int]:
        return halves(x[:rows]), y[:rows], 3

    def wider(features: int) -> tuple[Tables, np.ndarray, int]:
        return {name: part[:, : features // 2] for name, part in wide.items()}, y[:20_000], 3

    def grid(features: int, rows: int) -> tuple[Tables, np.ndarray, int]:
        return {name: part[:rows, : features // 2] for name, part in wide.items()}, y[:rows], 3

    if quick:
        return {
            "depth": Sweep((3, 5, 7), deeper, 1, 2),
            "depth, lattice": Sweep((3, 5, 7), deeper, 1, 1, "lattice map"),
            "depth, paper": Sweep((3, 5, 7), deeper, 1, 1, "Paillier, 512, paper mode"),
            "rows": Sweep((5000, 15_000, 25_000), longer, 1, 2),
            "features": Sweep((50, 250, 500), wider, 1, 1),
        }
    return {
        "depth": Sweep(DEPTHS, deeper, 5, 5),
        "rows": Sweep(ROWS, longer, 5, 5),
        "features": Sweep(FEATURES, wider, 1, 2),
        "depth, Paillier": Sweep(DEPTHS, deeper, 1, 3, "Paillier, 2048"),
        "depth, paper": Sweep(DEPTHS, deeper, 1, 3, "Paillier, 512, paper mode"),
        "depth, lattice": Sweep(DEPTHS, deeper, 5, 3, "lattice map"),
        **{
            f"rows, {features} features": Sweep((5000, 10_000, 20_000), partial(grid, features), 1, 2, "lattice map")
            for features in GRID
        },
    }


def halves(x: np.ndarray) -> Tables:
    middle = x.shape[1] // 2
    return {"active": x[:, :middle], "passive": x[:, middle:]}


def widened(x: np.ndarray, n_features: int) -> np.ndarray:
    """Add columns drawn from x, each with its rows shuffled (n_rows, n_features)."""
    rng = np.random.default_rng(1)
    drawn = rng.integers(0, x.shape[1], n_features - x.shape[1])
    return np.asfortranarray(np.hstack([x, rng.permuted(x[:, drawn], axis=0)]))


@dataclass(frozen=True, slots=True)
class Run:
    """One point measured once; numbers per round."""

    seconds: float
    processor: float
    others: float
    inner: float
    megabytes: float


def run(task: tuple[Tables, np.ndarray, int], rounds: int, cipher: str) -> Run:
    tables, y, depth = task
    model = flat(GBDTClassifier, "secureboost", n_estimators=rounds, max_depth=depth, **SETTINGS, **CIPHERS[cipher])
    marks: list[float] = []  # processor seconds when training starts, before the first round, after rounds, at the end

    def clock() -> float:
        marks.append(time.process_time())
        return time.perf_counter()

    runs.time = SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]
    before = cpu_of_others()
    whole = seconds(lambda: model.fit(tables, y))
    others = max(0.0, (cpu_of_others() - before) / whole)
    forest = model.parts_["active"].forest
    assert forest is not None
    inner = sum(int((tree.left >= 0).sum()) for tree in forest.trees) / rounds
    back = model.communication_["passive -> active"]["bytes"] / rounds / 1e6
    return Run(model.timings_["boosting"] / rounds, (marks[-1] - marks[1]) / rounds, others, inner, back)


def measure(name: str, sweep: Sweep) -> list[dict[str, object]]:
    found: dict[int, list[Run]] = {point: [] for point in sweep.points}
    for _ in range(sweep.passes):
        for point, made in found.items():
            made.append(run(sweep.task(point), sweep.rounds, sweep.cipher))
    result = []
    for point, made in found.items():
        tables, y, depth = sweep.task(point)
        least = min(made, key=lambda each: each.seconds)
        result.append(
            {
                "sweep": name,
                "rows": len(y),
                "features": sum(table.shape[1] for table in tables.values()),
                "depth": depth,
                "cipher": sweep.cipher,
                "rounds": sweep.rounds,
                "runs": len(made),
                "s/round": least.seconds,
                "median s/round": float(np.median([each.seconds for each in made])),
                "processor s/round": min(each.processor for each in made),
                "inner nodes": least.inner,
                "MB back": least.megabytes,
                "others' cores": round(least.others, 2),
                "measured on": machine(),
            }
        )
    return result


def line(terms: Sequence[np.ndarray], y: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the least-squares coefficients of 1 and of each term, and R^2."""
    x = np.column_stack([np.ones(len(y)), *terms])
    found = np.linalg.lstsq(x, y, rcond=None)[0]
    rest = y - x @ found
    return found, float(1.0 - (rest**2).sum() / ((y - y.mean()) ** 2).sum())


def column(rows: list[dict[str, object]], name: str) -> np.ndarray:
    return np.array([float(str(row[name])) for row in rows])


def fit(against: tuple[str, ...], rows: list[dict[str, object]], clock: str) -> dict[str, object]:
    terms = [column(rows, name) for name in against]
    (at_zero, *slopes), r2 = line(terms, column(rows, clock))
    return {
        "sweep": rows[0]["sweep"],
        "against": " and ".join(against),
        "of": clock,
        "points": len(rows),
        "from": f"{terms[0].min():g}",
        "to": f"{terms[0].max():g}",
        "slope": " and ".join(f"{slope:.4g}" for slope in slopes),
        "at 0": float(at_zero),
        "R^2": f"{r2:.4f}",
        f">= {BAR}": "kept" if r2 >= BAR else "missed",
        "others' cores, most": float(column(rows, "others' cores").max()),
        "measured on": rows[0]["measured on"],
    }


def earlier() -> list[dict[str, object]]:
    path = RESULTS / "secureboost_scaling.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "machine"} for row in csv.DictReader(file)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", nargs="+", choices=[*sweeps(quick=False), "none"])
    parser.add_argument("--passes", type=int, help="runs per point, in place of the sweep's own number")
    options = parser.parse_args()
    chosen = sweeps(quick=options.quick)
    if options.passes:
        chosen = {name: replace(sweep, passes=options.passes) for name, sweep in chosen.items()}
    rows: dict[str, list[dict[str, object]]] = {}
    for name, sweep in chosen.items():
        if name in (options.sweep or chosen):
            run(sweep.task(sweep.points[0]), 1, sweep.cipher)  # compiles
            rows[name] = measure(name, sweep)
        elif kept := [row for row in earlier() if row["sweep"] == name]:
            rows[name] = kept
    report("secureboost_scaling", [row for part in rows.values() for row in part], quick=options.quick)
    deep = [name for name in rows if name.startswith("depth")]
    pairs = [(name.partition(",")[0], rows[name]) for name in rows] + [("inner nodes", rows[name]) for name in deep]
    fits = [fit((against,), part, clock) for against, part in pairs for clock in CLOCKS]
    fits += [fit(("depth", "inner nodes"), rows[name], clock) for name in deep for clock in CLOCKS]
    report("secureboost_scaling_fits", fits, quick=options.quick)
    figure, axes = figures.panels([f"against {against} ({part[0]['cipher']})" for against, part in pairs])
    for panel, (against, part) in zip(axes, pairs, strict=True):
        x = column(part, against)
        for clock, colour in zip(CLOCKS, (figures.COLOURS["SecureBoost"], figures.COLOURS["GBDT"]), strict=True):
            y = column(part, clock)
            (intercept, slope), r2 = line([x], y)
            panel.plot(x, y, "o", color=colour, label=f"{clock}, R² {r2:.3f}")
            panel.plot(x, intercept + slope * x, "--", color=colour, linewidth=1)
        panel.set(xlabel=against, ylabel="seconds", ylim=(0, None))
        panel.legend(fontsize=8)
    figures.save(figure, "secureboost_scaling", quick=options.quick)


if __name__ == "__main__":
    main()
