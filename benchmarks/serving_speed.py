"""`treaty serve` under a load of single rows, and what predictions are worth that leave partners out.

Claim: on two cores, with the load generator on the same machine, a model of the active party's own splits answers 1,000
requests a second of one row each, 99 in 100 within 50 ms. Requests arrive at equal distances, whatever the server does,
on keep-alive connections of HTTP/1.1; a latency counts from when the request should have been sent, so that waiting
counts, too. Server and generator are processes of their own. About 2 minutes, more where other processes disturb;
`--quick` one.

With `--federated` partners are asked: nodes of two or three organisations on this machine, `treaty serve` at the first,
trees, also of hidden rows, or a linear model of three columns each, aligned rows. No claim: the latencies are reported.
About 8 minutes.

With `--fallback` it compares, on breast cancer data in five folds, predictions of both parties with those of
`treaty serve --fallback own` and with a model of the active party's columns alone. Claim: the last is better than the
fallback. About 2 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold

import treaty
from data import QUIET, arguments, cpu_of_others, report
from node.nodes import columns_of, job_file, organisations, wait_until
from treaty.data.table import to_table
from treaty.serving.models import ServedModel

CASES = [
    (100, 4, 250),
    (100, 4, 500),
    (100, 4, 1000),
    (100, 4, 1500),
    (1000, 6, 1000),
]  # trees, depth, requests a second
TREES = "[boosting]\nn_estimators = 50\nmax_depth = 4\n"
# The rows were trained on.
HIDDEN = 'objective = "logistic_pieces"\n[secureboost]\nmembership = "hidden"\ntraining_rows = "rounded"\n'
EPOCHS = "[regression]\nmax_iter = 5\nbatch_size = 240\n[quasi-newton]\ncoordinator = false\n"
CONNECTIONS = 32
WARM = 2.0  # seconds that are not counted


async def load(port: int, bodies: list[bytes], rate: float, seconds: float) -> dict[str, float]:
    """Send requests at a rate; return latencies in milliseconds and what was achieved."""
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    requests = [head.format(len(body)).encode() + body for body in bodies]
    idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    latencies, failed, ended = [], 0, 0.0
    start = time.perf_counter() + 0.1

    async def ask(number: int, due: float) -> None:
        nonlocal failed, ended
        reader, writer = await idle.get()
        writer.write(requests[number % len(requests)])
        said = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in said.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        ended = time.perf_counter()
        idle.put_nowait((reader, writer))
        failed += not said.startswith(b"HTTP/1.1 200")
        if due >= start + WARM:
            latencies.append(1000.0 * (ended - due))

    # a thread of its own: asyncio wakes up to 1 ms late, which would count as the server's
    loop, asked, count = asyncio.get_running_loop(), [], int(rate * (seconds + WARM))
    all_sent = asyncio.Event()

    def clock() -> None:
        for number in range(count):
            due = start + number / rate
            if (wait := due - time.perf_counter()) > 0.0:
                time.sleep(wait)
            loop.call_soon_threadsafe(lambda number=number, due=due: asked.append(loop.create_task(ask(number, due))))
        loop.call_soon_threadsafe(all_sent.set)

    threading.Thread(target=clock, daemon=True).start()
    await all_sent.wait()
    await asyncio.gather(*asked)
    p50, p95, p99 = np.percentile(latencies, [50, 95, 99]).tolist()
    achieved = len(latencies) / (ended - start - WARM)
    return {
        "achieved/s": achieved,
        "p50 ms": p50,
        "p95 ms": p95,
        "p99 ms": p99,
        "most ms": max(latencies),
        "failed": failed,
    }


def fallback_scores(columns: str, own: list[int], quick: bool) -> list[dict[str, object]]:
    """Return means over folds of accuracy, area under the curve and log loss; `own` are the active party's columns."""
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    others = [place for place in range(X.shape[1]) if place not in own]
    boosting: dict[str, Any] = {"n_estimators": 50, "max_depth": 3, "learning_rate": 0.3}
    kinds: dict[str, tuple[Any, Any]] = {
        "trees": (
            treaty.GBDTClassifier(treaty.SecureBoost(allow_exact_sums=True), **boosting),
            treaty.GBDTClassifier("pooled", **boosting),
        ),
        "logistic": (treaty.LogisticRegression("quasi-newton"), treaty.LogisticRegression("pooled")),
    }
    scores: dict[tuple[str, str], list[list[float]]] = {}
    folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(X, y))
    for train, test in folds[:1] if quick else folds:
        tables = [{"clinic": X.iloc[rows, own], "laboratory": X.iloc[rows, others]} for rows in (train, test)]
        for kind, (both, alone) in kinds.items():
            fitted = both.fit(tables[0], y.iloc[train])
            served = ServedModel(fitted.parts_["clinic"])
            matrix = to_table(tables[1]["clinic"], schema=served.schema).matrix()
            found = {
                "both parties": fitted.predict_proba(tables[1])[:, 1],
                "fallback": served.part.predictions(served.fallback()(matrix, 1))["probability_1"],
                "own columns alone": alone.fit(X.iloc[train, own], y.iloc[train]).predict_proba(X.iloc[test, own])[
                    :, 1
                ],
                "rate of the labels": np.full(len(test), y.iloc[train].mean()),
            }
            for way, p in found.items():
                of_fold = [
                    accuracy_score(y.iloc[test], p > 0.5),
                    roc_auc_score(y.iloc[test], p),
                    log_loss(y.iloc[test], p),
                ]
                scores.setdefault((kind, way), []).append(of_fold)
    means = {case: np.mean(of_folds, axis=0).tolist() for case, of_folds in scores.items()}
    return [
        {"active party's columns": columns, "model": kind, "prediction": way}
        | dict(zip(("accuracy", "AUC", "log loss"), of, strict=True))
        for (kind, way), of in means.items()
    ]


def cpu_of(process: int) -> float:
    """Return the processor seconds that a process has used, or NaN where the system does not say."""
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():
        return float("nan")
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, trees: int, depth: int, rate: int, seconds: float) -> dict[str, object]:
    """Load the server of a model, and return what was found."""
    return {"trees": trees, "depth": depth, **loaded(str(folder / f"{trees}"), folder / "rows.json", rate, seconds)}


def loaded(model: str, bodies: Path, rate: int, seconds: float) -> dict[str, object]:
    """Start a server, load it, and return what was found."""
    serve = [sys.executable, "-m", "treaty", "serve", model, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        port = first.partition("127.0.0.1:")[2].split()[0]
        before, others, started = cpu_of(server.pid), cpu_of_others(), time.perf_counter()
        generator = [sys.executable, __file__, "--load", port, str(bodies), str(rate), str(seconds)]
        found = json.loads(subprocess.run(generator, stdout=subprocess.PIPE, check=True).stdout)
        took, used = time.perf_counter() - started, cpu_of(server.pid) - before
        strangers = cpu_of_others() - others - used
        server.send_signal(signal.SIGTERM)
    of_requests = 1e3 * used / (rate * (seconds + WARM))
    others_cores = max(0.0, strangers / took)
    return {"rate/s": rate, **found, "server ms/request": of_requests, "other cores": others_cores}


def federated(names: tuple[str, ...], kind: str, rates: dict[int, int], seconds: float) -> list[dict[str, object]]:
    """Train between nodes, serve with all partners connected, and load the server; `rates` by rows of a request."""
    of_kind = {
        "trees": ({}, TREES),
        "hidden rows": ({}, TREES + HIDDEN),
        "linear": ({"protocol": '"quasi-newton"'}, EPOCHS),
    }
    fields, options = of_kind[kind]
    tables, result = columns_of(names), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nodes = organisations(folder, names, tables)
        lead = nodes[names[0]]
        for node in nodes.values():
            node.start()
        try:
            job = job_file(folder / "job.toml", names, options, **fields)
            trained = lead.treaty("submit", str(job)).split()[1]
            wait_until(lead, trained, "finished")
            service = lead.treaty("submit", str(job), "--serve", trained).split()[1]
            wait_until(lead, service, "running")
            own = tables[names[0]].drop_columns("y").to_pandas().astype({"id": str}).to_dict("records")
            os.environ["TREATY_NODE"] = str(lead.settings)
            for n_rows, rate in rates.items():
                parts = [own[k : k + n_rows] for k in range(0, len(own) - n_rows + 1, n_rows)]
                asked = [
                    {
                        "ids": [row["id"] for row in part],
                        "rows": [{k: v for k, v in row.items() if k != "id"} for row in part],
                    }
                    for part in parts
                ]
                (folder / "bodies.json").write_text(json.dumps(asked))
                found = loaded(service, folder / "bodies.json", rate, seconds)
                result.append({"model": kind, "partners": len(names) - 1, "rows": n_rows, **found})
        finally:
            for node in nodes.values():
                node.stop()
    return result


def undisturbed(folder: Path, case: tuple[int, int, int], seconds: float, tries: int) -> dict[str, object]:
    """Measure until other processes of the machine leave the cores alone; return the least disturbed of all tries."""
    found: list[dict[str, Any]] = []
    while len(found) < tries and not (found and found[-1]["other cores"] < QUIET):
        found.append(measure(folder, *case, seconds))
    return min(found, key=lambda row: row["other cores"])


def generate() -> None:
    """Be the load generator: port, file of rows, rate and seconds are the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", nargs=4)
    port, rows, rate, seconds = parser.parse_args().load
    bodies = [json.dumps(body).encode() for body in json.loads(Path(rows).read_text())]
    print(json.dumps(asyncio.run(load(int(port), bodies, float(rate), float(seconds)))))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--fallback", action="store_true", help="compare predictions, not speed")
    parser.add_argument("--federated", action="store_true", help="partners are asked for each row")
    options = parser.parse_args()
    if options.federated:
        seconds = 5.0 if options.quick else 15.0
        found = [
            row
            for names in (("bank", "shop"), ("bank", "shop", "lab"))
            for kind in ("trees", "hidden rows", "linear")
            if kind != "hidden rows" or len(names) == 2
            for row in federated(names, kind, {1: 50, 100: 10}, seconds)
        ]
        report("serving_federated", found, quick=options.quick)
        return
    if options.fallback:
        cases = {"10 means": range(10), "10 errors": range(10, 20), "5 means": range(5)}
        found = [row for name, own in cases.items() for row in fallback_scores(name, [*own], options.quick)]
        report("serving_fallback", found, quick=options.quick)
        return
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.json").write_text(json.dumps([{"rows": [row]} for row in X.to_dict("records")]))
        for trees, depth in {case[:2] for case in CASES}:
            model = treaty.GBDTClassifier("pooled", n_estimators=trees, max_depth=depth, min_child_samples=2)
            model.fit(X, y).save(folder / f"{trees}")
        seconds, tries = (5.0, 1) if options.quick else (15.0, 4)
        report("serving_speed", [undisturbed(folder, case, seconds, tries) for case in CASES], quick=options.quick)


if __name__ == "__main__":
    generate() if "--load" in sys.argv else main()
