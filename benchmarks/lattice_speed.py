"""The lattice map beside the other ciphers and the plain grower: a tree of encrypted sums, and whole trainings.

Claims: (1) on Default of Credit Card Clients (20 000 rows, 12 columns at the passive party, 32 bins) a depth-3 tree
takes at most 50 ms of both parties on two cores, the hint apart; (2) a training of 20 trees there takes at most 2.5 s
in all, hint included; (3) the sums of a depth-6 tree on a million rows take at most 4 s at the active party.

`lattice_speed.csv` holds, by size and depth, one tree of made-up codes through the seam that the protocol uses: every
node split into random halves, of each pair of siblings one asked for. Sums of the first and last column are checked.
The lattice map's vectors are about one node, and about two.
Beside is what a whole tree of the pooled grower takes on the same table.
`lattice_training.csv` holds whole trainings. Two threads; about 15 minutes, most of them
Paillier's on a million rows; `--quick` one.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from statistics import median

import numpy as np
import xgboost
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from data import arguments, default_of_credit_card_clients, flat, report, seconds, verdict
from treaty import GBDTClassifier
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client, make_server
from treaty.runs.warm_up import compile_kernels

THREADS, FRACTION = 2, 1 << 16
SIZES = [(20_000, 12, 32), (100_000, 20, 64), (1_000_000, 20, 32)]
DEPTHS = (3, 6, 8)
CIPHERS = [("lattice", None), (TWO := "lattice of two nodes", None), ("ou", 3072), ("ou", 2048), ("paillier", 2048)]
TREE_BAR, TRAINING_BAR, ACTIVE_BAR = 0.050, 2.5, 4.0


def nodes_of(rows: int, depth: int, rng: np.random.Generator) -> list[list[NDArray[np.int32]]]:
    """Return the asked nodes of each level, their rows: the root, then the smaller half of each node above."""
    levels, nodes = [[np.arange(rows, dtype=np.int32)]], [rng.permutation(rows).astype(np.int32)]
    for _ in range(depth - 1):
        halves = [np.array_split(node, 2) for node in nodes]
        levels.append([np.sort(pair[1]) for pair in halves])
        nodes = [half for pair in halves for half in pair]
    return levels


def one_tree(rows: int, columns: int, bins: int, depth: int, cipher: str, bits: int | None) -> dict[str, object]:
    """Measure in this process, so that the peak of memory is this case's."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, bins, (rows, columns)).astype(np.uint8)
    offsets = (np.arange(columns + 1) * (bins + 1)).astype(np.int32)
    probability = rng.random(rows)
    grad = np.rint((probability - (rng.random(rows) < 0.3)) * FRACTION).astype(np.int64)
    hess = np.rint(probability * (1 - probability) * FRACTION).astype(np.int64)
    compile_kernels()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kind, bounds = cipher.split()[0], SumsBounds(rows, FRACTION, FRACTION // 4)
    client = make_client(kind, bounds, threads=THREADS, key_bits=bits, nodes=2 if cipher == TWO else 1)
    server = make_server(kind, client.setup(), codes, offsets, threads=THREADS)
    started = time.perf_counter()
    if kind == "lattice":
        client.settle(bytes(32))
        server.settle(bytes(32))
    hint_bytes = 0
    for piece in server.hint():
        hint_bytes += sum(part.nbytes for part in piece)
        client.accept_hint("passive", piece, offsets)
    hint = time.perf_counter() - started

    levels = nodes_of(rows, depth, rng)
    repeats = 3 if rows * columns * 2**depth < 1e7 else 1
    active, passive, sent, back = [], [], 0, 0
    for _ in range(repeats):
        clock, work = [0.0, 0.0], [0, 0]
        start = time.perf_counter()
        begun = list(client.begin_tree(grad, hess))
        clock[0] += time.perf_counter() - start
        work[0] += sum(part.nbytes for payload in begun for part in payload)
        start = time.perf_counter()
        server.begin_tree(begun[0], None)
        for payload in begun[1:]:
            server.add_rows(payload)
        clock[1] += time.perf_counter() - start
        for level in levels:
            for first in range(0, len(level), client.nodes_at_a_time):
                nodes = level[first : first + client.nodes_at_a_time]
                positions, starts = np.concatenate(nodes), np.cumsum([0, *map(len, nodes)])
                weights = [(f, w) for f in (0, columns - 1) for w in (grad, hess)]
                sums = np.stack(
                    [[np.bincount(codes[of, f], w[of], minlength=bins + 1) for f, w in weights] for of in nodes]
                )
                totals = np.array([[grad[node].sum(), hess[node].sum(), len(node)] for node in nodes])
                start = time.perf_counter()
                query = list(client.query(positions, starts.astype(np.int32)))
                asked = time.perf_counter()
                for piece in query:
                    server.add(piece)
                answer = server.answer()
                answered = time.perf_counter()
                found = client.open("passive", answer, totals)
                clock[0] += asked - start + time.perf_counter() - answered
                clock[1] += answered - asked
                work[0] += sum(part.nbytes for piece in query for part in piece)
                work[1] += sum(part.nbytes for part in answer)
                for k, f in enumerate((0, columns - 1)):
                    assert np.array_equal(found[:, offsets[f] : offsets[f + 1], 0], sums[:, 2 * k])
                    assert np.array_equal(found[:, offsets[f] : offsets[f + 1], 1], sums[:, 2 * k + 1])
        server.end_tree()
        active.append(clock[0])
        passive.append(clock[1])
        sent, back = work
    vectors = sum(map(len, levels))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    pooled = GBDTClassifier(
        "pooled", base_score=0.5, n_estimators=5, max_depth=depth, learning_rate=0.3, max_bin=bins, n_jobs=THREADS
    )
    plain = pooled.fit(codes.astype(np.float32), grad < 0).timings_["boosting"] / 5
    tree = median(a + p for a, p in zip(active, passive, strict=True))
    return {
        "rows": rows,
        "columns": columns,
        "bins": bins,
        "depth": depth,
        "cipher": cipher if bits is None else f"{cipher}-{bits}",
        "s/tree": tree,
        "ms/node": 1e3 * tree / vectors,
        "active s": median(active),
        "passive s": median(passive),
        "hint s": hint,
        "hint MB": hint_bytes / 1e6,
        "MB/tree sent": sent / 1e6,
        "MB/tree back": back / 1e6,
        "peak MB": peak,
        "plain s/tree": plain,
        "times plain": tree / plain,
    }


def training(trees: int) -> list[dict[str, object]]:
    """Train on Default of Credit Card Clients with every cipher, and with XGBoost on the pooled table."""
    data = default_of_credit_card_clients()
    order = np.random.default_rng(0).permutation(len(data.y))
    train, test = order[:20_000], order[20_000:]
    x, y = data.x.astype(np.float32), data.y
    settings = {"n_estimators": trees, "max_depth": 3, "max_bin": 32, "learning_rate": 0.3, "base_score": 0.5}
    theirs, auc = float("inf"), 0.0
    for threads in (1, THREADS):  # few rows: one thread may be faster
        central = xgboost.XGBClassifier(tree_method="hist", n_jobs=threads, **settings).fit(x[train], y[train])
        theirs = min(theirs, *(seconds(lambda c=central: c.fit(x[train], y[train])) for _ in range(9)))
        auc = roc_auc_score(y[test], central.predict_proba(x[test])[:, 1])

    def tables(rows: NDArray[np.intp]) -> dict[str, NDArray[np.float32]]:
        return {"active": x[rows, :11], "passive": x[rows, 11:]}

    out = []
    for name, own in [
        ("pooled", {"protocol": "pooled"}),
        ("lattice, column", {"encryption": "lattice"}),
        ("lattice, node", {"encryption": "lattice", "reveal": "node"}),
        ("ou-3072", {"encryption": "ou"}),
        ("paillier-2048", {"encryption": "paillier", "key_bits": 2048}),
    ]:
        model = flat(GBDTClassifier, **{"protocol": "secureboost", "n_jobs": THREADS, **settings, **own})
        repeats = 3 if "lattice" in name or name == "pooled" else 1
        whole = min(seconds(lambda model=model: model.fit(tables(train), y[train])) for _ in range(repeats))
        traffic = sum(pair["bytes"] for pair in model.communication_.values())
        bar = TRAINING_BAR if name == "lattice, column" and trees == 20 else None
        each = model.timings_["boosting"] / trees
        out.append({
            "training": name,
            "trees": trees,
            "s in all": whole,
            "<= s": "" if bar is None else f"{bar:g}: {verdict(whole, bar)}",
            "set-up s": model.timings_["setup"],
            "ms/tree": 1e3 * each,
            "<= ms": "" if bar is None else f"{1e3 * TREE_BAR:g}: {verdict(each, TREE_BAR)}",
            "MB in all": traffic / 1e6,
            "XGBoost s": theirs,
            "times XGBoost": whole / theirs,
            "AUC": f"{roc_auc_score(y[test], model.predict_proba(tables(test))[:, 1]):.4f}",
            "XGBoost AUC": f"{auc:.4f}",
        })  # fmt: skip
    return out


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--training", action="store_true", help="whole trainings alone")
    parser.add_argument("--case", help="one tree: rows,columns,bins,depth,cipher,key bits (0 for none)")
    options = parser.parse_args()
    if options.case is not None:
        rows, columns, bins, depth, cipher, bits = options.case.split(",")
        print(json.dumps(one_tree(int(rows), int(columns), int(bins), int(depth), cipher, int(bits) or None)))
        return
    if options.training:
        compile_kernels()
        report("lattice_training", training(5 if options.quick else 20), quick=options.quick)
        return
    trees = []
    for size in SIZES[:1] if options.quick else SIZES:
        for depth in DEPTHS:
            for cipher, bits in CIPHERS:
                case = [*size, depth, cipher, bits or 0]
                command = [sys.executable, __file__, "--case", ",".join(map(str, case))]
                said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
                trees.append(json.loads(said.splitlines()[-1]))
                print({key: trees[-1][key] for key in ("rows", "depth", "cipher", "s/tree")}, flush=True)
    fastest = {(row["rows"], row["depth"]): row["s/tree"] for row in trees if row["cipher"] == "lattice"}
    for row in trees:
        row["times lattice"] = row["s/tree"] / fastest[row["rows"], row["depth"]]
        bars = {(20_000, 3): ("s/tree", TREE_BAR), (1_000_000, 6): ("active s", ACTIVE_BAR)}
        what, bar = bars.get((row["rows"], row["depth"]), ("", 0.0)) if row["cipher"] == "lattice" else ("", 0.0)
        row["bar"] = f"{what} <= {bar:g}: {verdict(row[what], bar)}" if what else ""
    report("lattice_speed", trees, quick=options.quick)
    compile_kernels()
    report("lattice_training", training(5 if options.quick else 20), quick=options.quick)


if __name__ == "__main__":
    main()
