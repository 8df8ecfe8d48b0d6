"""Wide tables: time, bytes and memory of a SecureBoost tree, open and sealed, and what `treaty check` expected of it.

Drawn numbers, 32 bins, the lattice map. Each party is a process of its own over TLS with two threads, on the cores of
this machine together. A tree is the mean of those after the first; set-up is all before the first, hints included. CPU
seconds are those of both parties. Memory is the peak of a process: what is no file's, and with mapped files. Expected
figures are the active party's, once it knows the passive one's size, and as if each party had its own machine.

`--only TITLE` plays the jobs whose title contains this; a job takes up to two minutes on an idle machine, all about 15.
`--quick`: a tenth of the rows. `--sampling` is about accuracy: MNIST, 0 to 4 against 5 to 9, 64 trees of depth 3 on
10,000 images, with `colsample_bytree` of 1 to 0.05, pooled (the trees are those between parties); and which places the
columns that win below the root have there by their best gains: a rule that kept the first ones alone would lose the
others. Claims: 2 s a tree open, 8 s sealed at 100,000 x (30 + 300), depth 3.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import xgboost
from sklearn.metrics import roc_auc_score

from data import mnist, report, seconds
from estimates import drawn, job_arguments, near, played, table_of, write
from large_tables import Peak
from treaty import GBDTClassifier
from treaty.runs.job import Job, Member
from treaty.runs.job_files import decoded_job
from treaty.runs.local_checks import expect
from treaty.runs.party import train_party
from treaty.runs.warm_up import compile_kernels
from treaty.systems.observers import Observer, observing

SIZES = {  # rows, columns of the active and of the passive party, depth
    "100,000 x (30 + 300), depth 3": (100_000, 30, 300, 3),
    "100,000 x (30 + 300), depth 5": (100_000, 30, 300, 5),
    "20,000 x (100 + 1,500), depth 3": (20_000, 100, 1_500, 3),
}
WAYS = {  # sums, trees after the first, share of the columns in a tree
    "open": ("open", 4, 1.0),
    "sealed": ("sealed", 2, 1.0),
    "sealed, 0.2 of the columns": ("sealed", 2, 0.2),
}


class Rounds(Observer):
    """Notes time and bytes when the first tree begins, when it is grown, and when the last one is."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, float, float]] = []

    def started(self, inputs: object) -> None:
        self._party = inputs.party  # type: ignore[attr-defined]

    def round_finished(self, rounds: int, state: object) -> None:
        sent = sum(entry.nbytes for entry in self._party.transcript.entries)
        self.noted.append((time.perf_counter(), time.process_time(), sent / 1e6))


def play(path: Path, name: str) -> None:
    """Be one party; print what it took."""
    compile_kernels()
    rounds, began, busy = Rounds(), time.perf_counter(), time.process_time()
    with Peak() as peak, observing(lambda inputs: [rounds]):
        train_party(decoded_job(path.read_bytes()), name)
    lines = Path("/proc/self/status").read_text().splitlines()
    whole = next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))
    found = {"MB of memory": peak.most / 1e6, "with files": whole, "CPU s": time.process_time() - busy}
    if len(rounds.noted) > 2:
        (start, _, sent), *between, (end, later, last) = rounds.noted
        (first, earlier, before), trees = between[0], len(between)
        found |= {"set-up s": start - began, "set-up MB": sent, "first tree s": first - start}
        found |= {"s a tree": (end - first) / trees, "MB a tree": (last - before) / trees}
        found["CPU s a tree"] = (later - earlier) / trees
    print(json.dumps(found | {"whole s": time.perf_counter() - began}))


def measure(title: str, way: str, quick: bool) -> dict[str, object]:
    (rows, own, others, depth), (sums, trees, share) = SIZES[title], WAYS[way]
    rows = rows // 10 if quick else rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x, y = drawn(rows, own + others, 0)
        members = {
            "active": Member(table=write(folder, "active", x[:, :own], label=y)),
            "passive": Member(table=write(folder, "passive", x[:, own:], own)),
        }
        common = {"n_estimators": 1 + trees, "max_depth": depth, "max_bin": 32, "colsample_bytree": share}
        job = Job(
            name="wide", active="active", label="label", parties=members, protocol="secureboost",
            own={"encryption": "lattice", "sums": sums, "allow_exact_sums": sums == "open"}, common=common,
            output=str(folder / "model"), store=str(folder / "store"), n_jobs=2, timeout=3600.0,
        )  # fmt: skip
        job, printed, _, others_cores = played(__file__, job, folder)
        found = {of: json.loads(line) for of, line in printed.items()}
        expected = expect(job, job.roles(), "active", table_of(job, "active"), {"passive": (others, 33 * others, 0, 0)})
    active, passive = found["active"], found["passive"]
    moved = active["set-up MB"] + active["MB a tree"] * (1 + trees)
    busiest = max(of["CPU s"] for of in found.values())
    return {
        "job": title, "sums": way, "rows": rows,
        **{what: active[what] for what in ("set-up s", "set-up MB", "first tree s", "s a tree", "MB a tree")},
        **{f"{of}: CPU s a tree": found[of].get("CPU s a tree", "") for of in found},
        "CPU s of both": active["CPU s"] + passive["CPU s"],
        **{f"{of}: {what}": found[of][what] for of in found for what in ("MB of memory", "with files")},
        "MB": moved, "expected MB": expected.in_all / 1e6, "bytes": near(expected.in_all / 1e6, moved, 1.3),
        "busiest's s": busiest, "expected s": expected.seconds, "seconds": near(expected.seconds, busiest, 3.0),
        "expected peak MB": expected.memory / 1e6,
        "memory": near(expected.memory / 1e6, active["MB of memory"], 2.0),
        "XGBoost s a tree": one_table(x, y, depth), "others' cores": round(max(0.0, others_cores), 2),
    }  # fmt: skip


def one_table(x: np.ndarray, y: np.ndarray, depth: int) -> float:
    """Return XGBoost's seconds for a tree on all columns, by two threads."""
    model = xgboost.XGBClassifier(n_estimators=10, max_depth=depth, max_bin=32, tree_method="hist", n_jobs=2)
    return seconds(lambda: model.fit(x, y)) / 10


def sampling(quick: bool) -> list[dict[str, object]]:
    """Return the accuracy of models whose trees see a share of the columns."""
    data = mnist()
    train, test = slice(0, 2_000 if quick else 10_000), slice(60_000, 70_000)
    x, y = data.x.astype(np.float32), (data.y > 4).astype(np.int64)
    rows = []
    for share in (1.0, 0.5, 0.2, 0.1, 0.05):
        model = GBDTClassifier(
            n_estimators=8 if quick else 64, max_depth=3, max_bin=32, learning_rate=0.3, colsample_bytree=share,
            random_state=0,
        ).fit(x[train], y[train])  # fmt: skip
        p = model.predict_proba(x[test])[:, 1]
        rows.append(
            {"colsample_bytree": share, "accuracy": np.mean((p > 0.5) == y[test]), "AUC": roc_auc_score(y[test], p)}
        )
    return rows


def ranks(quick: bool) -> list[dict[str, object]]:
    """Return the places that columns which won at nodes below the root had at the root, by their best gains there."""
    data, n_rows, trees = mnist(), 2_000 if quick else 10_000, 4 if quick else 16
    x, y = data.x[:n_rows], (data.y[:n_rows] > 4).astype(np.float64)
    x = x[:, x.max(axis=0) > 0]
    codes = np.stack([np.searchsorted(np.unique(np.quantile(of, np.arange(1, 32) / 32)), of, "right") for of in x.T])
    places, margin = [], np.zeros(n_rows)

    def best(rows: np.ndarray, grad: np.ndarray, hess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each column's best gain in a node, and the cut that has it."""
        at = (codes[:, rows] + 32 * np.arange(len(codes))[:, None]).ravel()
        sums = [np.bincount(at, np.tile(of[rows], len(codes)), 32 * len(codes)) for of in (grad, hess)]
        left_g, left_h = (of.reshape(-1, 32).cumsum(axis=1)[:, :-1] for of in sums)
        g, h = grad[rows].sum(), hess[rows].sum()
        gains = left_g**2 / (left_h + 1) + (g - left_g) ** 2 / (h - left_h + 1) - g**2 / (h + 1)
        gains[(left_h < 1) | (h - left_h < 1)] = 0.0
        return gains.max(axis=1), gains.argmax(axis=1)

    for _ in range(trees):
        p = 1 / (1 + np.exp(-margin))
        grad, hess, nodes = p - y, p * (1 - p), [np.arange(n_rows)]
        order = np.argsort(-best(nodes[0], grad, hess)[0])
        for depth in range(3):
            children = []
            for rows in nodes:
                gains, cuts = best(rows, grad, hess)
                column = int(gains.argmax())
                if depth:
                    places.append(int(np.flatnonzero(order == column)[0]) + 1)
                left = codes[column, rows] <= cuts[column]
                children += [rows[left], rows[~left]]
            nodes = [rows for rows in children if len(rows)]
        for rows in nodes:
            margin[rows] -= 0.3 * grad[rows].sum() / (hess[rows].sum() + 1)
    kept = {
        f"in the first {share:.0%}": float(np.mean(np.array(places) <= share * len(codes)))
        for share in (0.05, 0.2, 0.5)
    }
    return [{"columns": len(codes), "nodes": len(places), **kept, "last place of a winner": max(places)}]


def main() -> None:
    parser = job_arguments(__doc__)
    parser.add_argument("--sampling", action="store_true", help="accuracy under feature sampling, and nothing else")
    options = parser.parse_args()
    if options.name:
        play(options.job, options.name)
        return
    compile_kernels()
    if options.sampling:
        report("wide_sampling", sampling(options.quick), quick=options.quick)
        report("wide_ranks", ranks(options.quick), quick=options.quick)
        return
    rows = []
    for title in SIZES:
        for way in WAYS:
            if options.only in f"{title}, {way}":
                rows.append(measure(title, way, options.quick))
                print(rows[-1], flush=True)
    report("wide_tables", rows, quick=options.quick, keys=("job", "sums"))


if __name__ == "__main__":
    main()
