"""The same job by every system and cipher, pooled, by XGBoost and by LightGBM: the league table.

Default of Credit Card Clients and Give Me Some Credit, two thirds of the rows to train on (split 0 of the kept ones):
20 trees of depth 3, rate 0.3, 32 bins, else each system's defaults. By column two parties, the first half of the
columns at the party with the labels; by row three participants, and under FedXGB 30 users with three edge servers.
Linear models have their own defaults. All parties are threads of one process and share the machine's cores.

A job is a process of its own. It plays a small job first, so that nothing is compiled while it is measured, then the
job twice, short ones up to seven times, and once what takes a minute: "s" is the quickest fit, set-up and keys
included, "slowest s" the slowest; of XGBoost and LightGBM, the quicker with one thread or two. "added MB" is by how
much the process's memory grew at its peak, all parties' together; "MB" is what all parties sent, "rounds" how many
round trips wait for one another. A job that takes too long on all rows has "train rows" fewer. "others' cores" is how
busy other processes kept the machine meanwhile: seconds are worth less there.

`results/league.csv` has the rows, `docs/league.svg` the picture, `docs/results.md` (`bench.py table`) both tables:
`peers.csv`, which is kept by hand with its sources, has what other projects' programs took in other settings. Jobs may
be named (`league.py sealed dealer`: parts of their names): their rows take the place of earlier ones. `--draw`: the
picture alone. About 40 minutes; `--quick`: Default of Credit Card Clients, 2,000 rows and two trees, two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import datetime
import gc
import importlib.util
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

import treaty
from data import (
    RESULTS,
    ROOT,
    Data,
    arguments,
    cpu_of_others,
    default_of_credit_card_clients,
    give_me_some_credit,
    report,
    splits,
)
from treaty import (
    SGD,
    FederBoostHorizontal,
    FederBoostVertical,
    FedXGB,
    FedXGBoostLDP,
    FedXGBoostSMM,
    GBDTClassifier,
    LogisticRegression,
    Pooled,
    QuasiNewton,
    SecureBoost,
)
from treaty.systems.options import SystemOptions

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]

LONG, SHORT = 60, 5  # seconds: of a fit that is played once; of all fits together, below which there are up to seven
LIMIT = 600  # seconds of a job's process
TREES: dict[str, Any] = {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3, "max_bin": 32}
DATA = {"default": default_of_credit_card_clients, "credit": give_me_some_credit}
NOTHING_HID = "everything is in one place"
OPEN = "active: exact sums of every bin at every node"
BLIND = f"{OPEN}; passive: no rows of nodes, nor of labels but by how its columns were chosen"
SHOWS_ROWS = f"{OPEN}; passive: the rows of every node, and from these much about labels"
NOISY = "active: the others' best gains and the rows their splits send left"
ROWS = "leader: sums over all rows, in every bin at every node; others: the model"
CROWD = "server: sums over users in every bin at every node, and the model"
LINEAR = "active: the others' part of margins; passive: its gradients, and labels of rows alone in a batch with it"


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the table.

    Attributes
    ----------
    system : SystemOptions or str
        A system's options, or the name of another library.
    split : {"columns", "rows", "users", "none"}
    learned : str
        What each party learns of the others' tables, beside the model.
    most_rows : int or None
        Rows to train on at most, where all would take too long.
    """

    system: SystemOptions | str
    split: str
    learned: str
    most_rows: int | None = None


JOBS = {
    "XGBoost": Job("xgboost", "none", NOTHING_HID),
    "LightGBM": Job("lightgbm", "none", NOTHING_HID),
    "pooled": Job(Pooled(), "none", NOTHING_HID),
    "SecureBoost, sealed": Job(
        SecureBoost(sums="sealed"),
        "columns",
        "active: the best splits and the rows they send left, no sums; passive: no rows of nodes, nor of labels but by "
        "how its columns were chosen",
    ),
    "SecureBoost, lattice": Job(
        SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True), "columns", BLIND
    ),
    "SecureBoost, Okamoto-Uchiyama": Job(SecureBoost(encryption="ou", allow_exact_sums=True), "columns", SHOWS_ROWS),
    "SecureBoost, Paillier": Job(
        SecureBoost(encryption="paillier", allow_exact_sums=True), "columns", SHOWS_ROWS, most_rows=20_000
    ),
    "FedXGBoost-SMM, lattice": Job(FedXGBoostSMM(allow_exact_sums=True), "columns", BLIND),
    "FedXGBoost-SMM, dealer": Job(
        FedXGBoostSMM(backend="dealer", allow_exact_sums=True), "columns", f"{BLIND}; dealer: counts, must not collude"
    ),
    "FedXGBoost-SMM, Okamoto-Uchiyama": Job(
        FedXGBoostSMM(backend="ou", allow_exact_sums=True), "columns", BLIND, 20_000
    ),
    "FedXGBoost-SMM, version 1 as published": Job(
        FedXGBoostSMM(mode="paper", allow_insecure=True, version=1),
        "columns",
        "broken: active: the bin of every row of the others; passive: the rows of every node, "
        "and after some trees the labels",
    ),
    "FedXGBoost-SMM, version 2 as published": Job(
        FedXGBoostSMM(mode="paper", allow_insecure=True, version=2),
        "columns",
        "broken: passive: every row's gradient, and so every label; active: which rows small nodes' bins hold",
        most_rows=5_000,
    ),
    "FedXGBoost-LDP, epsilon 1 a tree": Job(
        FedXGBoostLDP(mechanism="piecewise"),
        "columns",
        f"{NOISY}; passive: gradients under noise, epsilon 1 for every tree, and which rows go left at every split",
    ),
    "FedXGBoost-LDP, labels, epsilon 1": Job(
        FedXGBoostLDP(mechanism="label_rr", epsilon=1.0),
        "columns",
        f"{NOISY}; passive: labels randomised once, epsilon 1, and which rows go left at every split",
    ),
    "FederBoost by column, epsilon 4": Job(
        FederBoostVertical(epsilon=4.0),
        "columns",
        "active: the others' values as randomised buckets, epsilon 4 a value; passive: no rows of nodes, nor of labels "
        "but by how its columns were chosen",
    ),
    "FederBoost by row": Job(FederBoostHorizontal(), "rows", ROWS),
    "FederBoost by row, epsilon 4": Job(
        FederBoostHorizontal(epsilon_total=4.0), "rows", f"{ROWS}; all of it under noise, epsilon 4 (delta 1e-6) a row"
    ),
    "FedXGB, model hidden": Job(
        FedXGB(edges=3), "users", f"{CROWD}; users: their own predictions; two edge servers together: all rows' bins"
    ),
    "FedXGB, model shown": Job(FedXGB(edges=3, expose="model"), "users", f"{CROWD}; edge servers, users: the model"),
    "logistic, pooled": Job(Pooled(), "none", NOTHING_HID),
    "logistic, quasi-Newton, lattice": Job(
        QuasiNewton(), "columns", f"{LINEAR}; coordinator: lengths, angles of steps"
    ),
    "logistic, quasi-Newton, no coordinator": Job(QuasiNewton(coordinator=False), "columns", LINEAR),
    "logistic, quasi-Newton, Paillier": Job(
        QuasiNewton(encryption="paillier"),
        "columns",
        f"{LINEAR}; coordinator: lengths, angles of steps, and with the active party's help margins",
        most_rows=2_000,
    ),
    "logistic, SGD, lattice": Job(SGD(), "columns", f"{LINEAR}; coordinator: lengths, angles of steps"),
}


def estimator(name: str, trees: int, threads: int = 2) -> Any:
    """Return an unfitted model of a line; the number of threads is for other libraries alone."""
    system, settings = JOBS[name].system, {**TREES, "n_estimators": trees}
    if system == "xgboost":
        import xgboost

        return xgboost.XGBClassifier(tree_method="hist", n_jobs=threads, **settings)
    if system == "lightgbm":
        import lightgbm

        del settings["max_bin"]
        like = {"num_leaves": 2 ** TREES["max_depth"], "min_sum_hessian_in_leaf": 1.0, "reg_lambda": 1.0}
        return lightgbm.LGBMClassifier(**settings, **like, max_bin=TREES["max_bin"] - 1, n_jobs=threads, verbose=-1)
    return LogisticRegression(system) if name.startswith("logistic") else GBDTClassifier(system, **settings)


def fit_arguments(split: str, x: Floats, y: Labels) -> tuple[Any, ...]:
    """Deal a table out as the line's system has it."""
    if split == "none":
        return x, y
    if split == "columns":
        return sides(x), y
    parties = 3 if split == "rows" else 30
    owner = np.random.default_rng(0).permutation(len(y)) % parties
    return ({f"p{k:02d}": (x[owner == k], y[owner == k]) for k in range(parties)},)


def sides(x: Floats) -> dict[str, Floats]:
    middle = x.shape[1] // 2
    return {"active": x[:, :middle], "passive": x[:, middle:]}


def status(field: str) -> float:
    """Return the MB of one line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")) / 1e6


def added(work: Callable[[], object]) -> float:
    """Return by how many MB the process exceeds at its peak what it takes before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def one_job(name: str, data: Data, *, quick: bool) -> dict[str, object]:
    """Play a line in this process."""
    from federboost_tables import crossings, transcripts_of

    job, trees = JOBS[name], 2 if quick else TREES["n_estimators"]
    train, test = splits(data, 1)[0]
    most = min(job.most_rows or len(train), 2_000 if quick else len(train))
    train = np.random.default_rng(0).permutation(train)[:most]
    x, y = data.x.astype(np.float32), data.y
    parts = fit_arguments(job.split, x[train], y[train])
    few = train[:1_500]
    estimator(name, 2).fit(*fit_arguments(job.split, x[few], y[few]))

    took, models, grown, transcripts = [], [], [], {}
    before, begun = cpu_of_others(), time.perf_counter()
    fewest, most = (1, 1) if quick else (2, 7)
    while len(took) < fewest or (len(took) < most and sum(took) < SHORT):
        if took and took[0] > LONG:
            break
        model = estimator(name, trees, threads=1 + len(took) % 2)  # on a busy machine one is quicker

        def fit(model: Any = model) -> None:
            start = time.perf_counter()
            model.fit(*parts)
            took.append(time.perf_counter() - start)

        if isinstance(job.system, str) or job.split == "none":
            grown.append(added(fit))
        else:
            grown.append(added(lambda fit=fit: transcripts.update(transcripts_of(fit)[0])))
        models.append(model)
    others = (cpu_of_others() - before) / (time.perf_counter() - begun)
    model = models[int(np.argmin(took))]
    probability = model.predict_proba(sides(x[test]) if job.split == "columns" else x[test])[:, 1]
    sent = getattr(model, "communication_", {})
    return {
        "data": data.title,
        "system": name,
        "split by": job.split,
        "train rows": len(train),
        "of": len(splits(data, 1)[0][0]),
        "AUC": f"{roc_auc_score(y[test], probability):.4f}",
        "log loss": f"{log_loss(y[test], probability):.4f}",
        "s": min(took),
        "slowest s": max(took) if len(took) > 1 else "",
        "added MB": min(grown),
        "MB": sum(pair["bytes"] for pair in sent.values()) / 1e6,
        "rounds": crossings(transcripts, acknowledged=False) / 2 if transcripts else 0,
        "others' cores": round(max(0.0, others), 2),
        "what each party learns": job.learned,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
    }


def versions() -> str:
    """Return what the figures were made with: an installed package's name and version each."""
    found = {"treaty": treaty.__version__}
    for package in ("numpy", "scikit-learn", "xgboost", "xgboost-cpu", "lightgbm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return ", ".join(f"{package} {version}" for package, version in found.items())


GREY, GUARDED = "#76808b", {"none": "#76808b", "columns": "#3b82c4", "rows": "#2f9e63", "users": "#c7793b"}


def draw() -> None:
    """Draw seconds of every job, and AUC beside XGBoost's, from the kept rows: readable on light and dark pages."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "league", "font.size": 9, "text.color": GREY, "axes.edgecolor": GREY,
        "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "font.family": "sans-serif",
    })  # fmt: skip
    from matplotlib import pyplot

    with (RESULTS / "league.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train rows"] == row["of"]]
    marks = dict(zip(dict.fromkeys(row["data"] for row in rows), "os", strict=False))
    names = [name for name in JOBS if any(row["system"] == name for row in rows)][::-1]
    plain = {row["data"]: float(row["AUC"]) for row in rows if row["system"] == "XGBoost"}
    figure, (left, right) = pyplot.subplots(1, 2, sharey=True, figsize=(9.2, 6.2), layout="constrained")
    for row in rows:
        place, colour = names.index(row["system"]), GUARDED[row["split by"]]
        filled = {"marker": marks[row["data"]], "color": colour, "s": 30, "zorder": 3}
        filled |= {} if row["data"].startswith("Default") else {"facecolors": "none", "linewidths": 1.4}
        left.scatter(float(row["s"]), place, **filled)
        right.scatter(100 * (float(row["AUC"]) - plain[row["data"]]), place, **filled)
    left.set(xscale="log", xlabel="seconds of a training, all parties on two cores")
    left.xaxis.set_major_formatter("{x:g}")
    left.set_yticks(range(len(names)), names)
    right.xaxis.set_major_locator(pyplot.MultipleLocator(5))
    right.set_xlabel("AUC less XGBoost's, in hundredths")
    for panel in (left, right):
        panel.grid(alpha=0.25, color=GREY)
        panel.spines[["top", "right"]].set_visible(False)
        panel.patch.set_alpha(0)
    labels = {"none": "one table", "columns": "split by column", "rows": "split by row", "users": "among 30 users"}
    keys = [pyplot.Line2D([], [], marker="o", ls="", color=GUARDED[split], label=labels[split]) for split in labels]
    for data, mark in marks.items():
        face = GREY if data.startswith("Default") else "none"
        keys.append(pyplot.Line2D([], [], marker=mark, ls="", color=GREY, markerfacecolor=face, label=data))
    figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(ROOT / "docs" / "league.svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    print("drawn: docs/league.svg")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("only", nargs="*", help="parts of the names of jobs")
    parser.add_argument("--draw", action="store_true", help="the picture alone")
    parser.add_argument("--data", choices=DATA, nargs="*", default=list(DATA))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.one:
        print(json.dumps(one_job(options.one, DATA[options.data[0]](), quick=options.quick)))
        return
    if options.draw:
        draw()
        return
    rows = []
    for data in options.data[:1] if options.quick else options.data:
        for name in JOBS:
            if options.only and not any(part in name for part in options.only):
                continue
            if name == "LightGBM" and importlib.util.find_spec("lightgbm") is None:
                print("skipped: LightGBM is not installed (pip install lightgbm)")
                continue
            command = [sys.executable, __file__, "--one", name, "--data", data, *(["--quick"] if options.quick else [])]
            try:
                said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=LIMIT).stdout
            except subprocess.SubprocessError as error:
                print(f"failed: {name}: {error}", flush=True)
                continue
            rows.append(json.loads(said.splitlines()[-1]))
            print(*rows[-1].values(), sep="  ", flush=True)
            if not options.quick:
                report("league", rows[-1:], quick=False, keys=("data", "system"))
    if options.quick:
        report("league", rows, quick=True)
    else:
        draw()


if __name__ == "__main__":
    main()
