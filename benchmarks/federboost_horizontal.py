"""FederBoost on rows: AUC by buckets and by noise, time beside XGBoost's and by participants, and a slow link.

Tian et al. 2020, who publish AUC 86.25 with 26 buckets on Give Me Some Credit, 78.25 with 24 on Default of Credit Card
Clients, 87.22 with 24 on 290,000 rows of all 18 columns of SUSY, of which only a small sample of 8 columns is at hand;
21.59 s for 200 trees of depth 4 on 8,192 x 11 between three; on SUSY 23.75 s between two to 86 s between eight, and
3103 s over links of 20 Mbit/s and 100 ms. Each part can be run alone, and writes its own files:

`--accuracy` (`federboost_horizontal.csv`): mean and standard deviation over 5 fixed splits, beside the plain grower and
XGBoost with as many bins; the differences to both are to be at most 0.003 in the mean. Rows are dealt out to three at
random; that eight who hold ranges of the first column get the very same model is checked. About 2 minutes.

`--noise` (`_noise.csv`, `_numbers.csv`): AUC by `epsilon_total`, with delta 1e-6 and default options, between three, on
tables that defaults were chosen on and on three that were kept back; errors of a regression. About 15 minutes.

`--speed` (`_speed.csv`, `_scaling.csv`, `_fits.csv`, and a figure): 200 trees of depth 4 on 8,192 x 11 (HIGGS) between
three, in threads (bar 2.5 s) and between processes over TLS (bar 6 s; set-up and the start of processes apart); 60
trees of depth 4 on 300,000 x 18 (flights) between 2 (mode="paper") to 32, and whether time and bytes grow at most
linearly. All participants share this machine: every pair of them adds masks, so the work of all together grows with the
square, that of each is linear, which is measured by the processor time of each party's thread, also where all have as
many rows. As threads of one process they share an interpreter lock too; with two cores and many participants handing
it from one to the other costs as much as the work, so every job is timed on one core as well. About 8 minutes.

`--link` (`_link.csv`): lines of 20 Mbit/s and a round trip of 100 ms (and of 200, should the paper mean one way),
simulated by the channel, beside what rounds and bytes predict. About 3 minutes.

`--namespaces` (`_namespaces.csv`): the same between processes over TLS, each in a network namespace of its own; root
on Linux, else it says what is missing. About a minute.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as parquet
import xgboost
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

import figures
from data import (
    Data,
    adult,
    arguments,
    cpu_of_others,
    default_of_credit_card_clients,
    find,
    flat,
    flights,
    give_me_some_credit,
    report,
    seconds,
    side_by_side,
    splits,
    susy,
    verdict,
)  # fmt: skip
from data import higgs as higgs_data
from namespaces import NotPermitted, train_in_namespaces
from treaty import GBDTClassifier, GBDTRegressor
from treaty.data.quantile_search import QuantileSearch
from treaty.messaging.channel import LinkSpeed
from treaty.messaging.party import Party
from treaty.messaging.transcript import Transcript
from treaty.runs import threads as simulation
from treaty.runs.threads import Role, RunRecord, play
from treaty.runs.warm_up import compile_kernels
from treaty.systems.horizontal import quantiles as horizontal_bins

PROTOCOL = "federboost-horizontal"
THREADS = 2
NEAR = 0.003
DELTA = 1e-6
RATE = 20e6  # bits per second
COUNTS = (3, 8, 16, 32)  # participants
TOGETHER, EACH = "as many together", "as many each"
OWN = ("own s of the leader", "own s of another", "own s of another, most")
PARTS = ("accuracy", "noise", "speed", "link", "namespaces")

Rows = dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]]


def dealt(x: NDArray[np.float32], y: NDArray[np.int64], who: NDArray[np.int64]) -> Rows:
    """Deal rows out: participant ``who[i]`` gets row i."""
    return {f"p{k}": (x[who == k], y[who == k]) for k in range(int(who.max()) + 1)}


def at_random(x: NDArray[np.float32], y: NDArray[np.int64], participants: int, seed: int = 0) -> Rows:
    return dealt(x, y, np.random.default_rng(seed).integers(0, participants, len(y)))


def by_first_column(x: NDArray[np.float32], y: NDArray[np.int64], participants: int) -> Rows:
    """Give each a range of the first column: rows that are as unlike as they can be."""
    return dealt(x, y, np.argsort(np.argsort(x[:, 0], kind="stable")) * participants // len(y))


# ---------------------------------------------------------------- accuracy


class Counted(QuantileSearch):
    """Counts the rounds of the last search."""

    rounds = 0

    def present(self, counts: NDArray[np.int64]) -> None:
        Counted.rounds = 0
        super().present(counts)

    def take(self, counts: NDArray[np.int64]) -> None:
        Counted.rounds += 1
        super().take(counts)


def auc(model: Any, x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
    return float(roc_auc_score(y, model.predict_proba(x)[:, 1]))


def spread(values: list[float]) -> tuple[str, str]:
    return f"{mean(values):.4f}", f"{stdev(values):.4f}"


def accuracy(data: Data, trees: int, depth: int, paper: tuple[int, float], seeds: int, quick: bool) -> list[dict]:
    """Return a row per number of buckets."""
    x, y, rows = data.x.astype(np.float32), data.y, []
    published, value = paper
    for q in [published] if quick else sorted({4, 8, 16, 32, 64, published}):
        common = {
            "base_score": 0.5,
            "n_estimators": trees,
            "max_depth": depth,
            "learning_rate": 0.3,
            "max_bin": q,
            "n_jobs": THREADS,
        }
        ours, pooled, theirs, rounds, parted, same = [], [], [], [], [], []
        for seed, (train, test) in enumerate(splits(data, seeds)):
            model = GBDTClassifier(PROTOCOL, **common)
            with patch.object(horizontal_bins, "QuantileSearch", Counted):
                model.fit(at_random(x[train], y[train], 3, seed))
            ours.append(auc(model, x[test], y[test]))
            rounds.append(Counted.rounds)
            found = re.search(r"(\d+) rows", model.parts_["pooled"].spent)
            parted.append(int(found[1]) if found else 0)
            pooled.append(auc(GBDTClassifier("pooled", **common).fit(x[train], y[train]), x[test], y[test]))
            booster = xgboost.XGBClassifier(tree_method="hist", **common)
            theirs.append(auc(booster.fit(x[train], y[train]), x[test], y[test]))
            if q == published:
                eight = GBDTClassifier(PROTOCOL, **common).fit(by_first_column(x[train], y[train], 8))
                same.append(np.array_equal(eight.predict_proba(x[test]), model.predict_proba(x[test])))
        to_pooled = [a - b for a, b in zip(ours, pooled, strict=True)]
        to_theirs = [a - b for a, b in zip(ours, theirs, strict=True)]
        rows.append({
            "data": data.title,
            "trees": f"{trees} of depth {depth}",
            "buckets": q,
            "AUC": spread(ours)[0],
            "sd": spread(ours)[1],
            "published": value if q == published else "",
            "pooled": spread(pooled)[0],
            "more than pooled": f"{mean(to_pooled):+.4f}",
            "sd of that": spread(to_pooled)[1],
            "XGBoost": spread(theirs)[0],
            "more than XGBoost": f"{mean(to_theirs):+.4f}",
            "sd of this": spread(to_theirs)[1],
            f"|differences| <= {NEAR}": verdict(max(abs(mean(to_pooled)), abs(mean(to_theirs))), NEAR),
            "8 participants": "" if not same else "the same model" if all(same) else "another model",
            "search rounds": f"{min(rounds)} to {max(rounds)}",
            "fewest rows parted": min(parted),
        })  # fmt: skip
    return rows


def noise(data: Data, kept_back: bool, seeds: int, quick: bool) -> list[dict]:
    """Return a row per `epsilon_total`, all other options by default, between three; and one without noise."""
    x, y, rows = data.x.astype(np.float32), data.y, []
    for epsilon in (1.0, math.inf) if quick else (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf):
        bare = epsilon == math.inf
        chosen = {} if bare else {"epsilon_total": epsilon, "delta": DELTA}
        took, found, depths, largest, spent = 0.0, [], [], [], ""
        for seed, (train, test) in enumerate(splits(data, seeds)):
            shards = at_random(x[train], y[train], 3, seed)
            model = flat(GBDTClassifier, PROTOCOL, n_jobs=THREADS, **chosen)
            took += seconds(lambda m=model, r=shards: m.fit(r)) / seeds
            found.append(auc(model, x[test], y[test]))
            part = model.parts_["pooled"]
            largest.append(max(float(abs(tree.value).max()) for tree in part.forest.trees))
            depths.append(max(math.floor(math.log2(len(tree.left) + 1)) - 1 for tree in part.forest.trees))
            spent = part.spent
        rows.append({
            "data": data.title,
            "rows": len(train),
            "columns": x.shape[1],
            "kept back": "yes" if kept_back else "",
            "epsilon_total": "none" if bare else f"{epsilon:g}",
            "delta": "" if bare else f"{DELTA:g}",
            "AUC": spread(found)[0],
            "sd": spread(found)[1],
            "depth": "" if bare else max(depths),
            "largest leaf": mean(largest),
            "s": took,
            "spent": "" if bare else spent,
        })  # fmt: skip
    return rows


def noise_on_numbers(seeds: int, quick: bool) -> list[dict]:
    """Return errors of arrival delays by `epsilon_total`: of all flights, and of as many as Abalone has rows."""
    table = parquet.read_table(find("flights.parquet"))
    delay = table["arr_delay"].to_numpy(zero_copy_only=False).astype(np.float64)
    x = flights().x.astype(np.float32)
    x, delay = x[np.isfinite(delay)], delay[np.isfinite(delay)]
    jobs = {"flights": (len(delay), x.shape[1]), "flights, 4,177 rows, 8 columns": (4177, 8)}
    rows = []
    for title, (n_rows, n_columns) in jobs.items():
        for epsilon in (1.0, math.inf) if quick else (0.1, 0.5, 1.0, 4.0, math.inf):
            chosen = {} if epsilon == math.inf else {"epsilon_total": epsilon, "target_range": [-60.0, 180.0]}
            errors, base = [], []
            for seed in range(seeds):
                order = np.random.default_rng(seed).permutation(len(delay))[:n_rows]
                train, test = np.split(order, [2 * n_rows // 3])
                given = dealt(x[train][:, :n_columns], delay[train], np.arange(len(train)) % 3)
                model = flat(GBDTRegressor, PROTOCOL, n_jobs=THREADS, **chosen).fit(given)
                errors.append(float(np.sqrt(np.mean((model.predict(x[test][:, :n_columns]) - delay[test]) ** 2))))
                base.append(float(delay[test].std()))
            rows.append({
                "data": title,
                "epsilon_total": "none" if epsilon == math.inf else f"{epsilon:g}",
                "RMSE": spread(errors)[0],
                "sd": spread(errors)[1],
                "RMSE of the mean": mean(base),
            })  # fmt: skip
    return rows


# ---------------------------------------------------------------- speed


def higgs(n_rows: int, n_columns: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the first rows of HIGGS (UCI 280) and its first columns of many values: bins are as many as permitted."""
    path = find("higgs_15k.parquet")
    if path is None:
        raise SystemExit("skipped: no higgs_15k.parquet in $TREATY_DATA or ../shared/data")
    table = parquet.read_table(path)
    names = [name for name in table.column_names if name not in ("label", "split") and "btag" not in name]
    x = np.column_stack([table[name].to_numpy()[:n_rows] for name in names[:n_columns]])
    return x.astype(np.float32), table["label"].to_numpy()[:n_rows].astype(np.int64)


def undisturbed(run: Callable[[], dict[str, float]], tries: int) -> dict[str, float]:
    """Return what the run reports with which others of the machine interfered least."""
    made = []
    for _ in range(tries):
        before, start = cpu_of_others(), time.perf_counter()
        found = run()
        others = max(0.0, (cpu_of_others() - before) / (time.perf_counter() - start))
        made.append({**found, "others' cores": round(others, 2)})
    return min(made, key=lambda each: each["others' cores"])


def megabytes(model: GBDTClassifier) -> float:
    return sum(pair["bytes"] for pair in model.communication_.values()) / 1e6


def small_jobs(quick: bool) -> list[dict]:
    """Time 200 trees of depth 4 on 8,192 x 11 between three: by columns, by rows, by rows between processes."""
    x, y = higgs(8192, 11)
    common = {
        "base_score": 0.5,
        "n_estimators": 200,
        "max_depth": 4,
        "learning_rate": 0.3,
        "max_bin": 32,
        "n_jobs": THREADS,
    }
    booster = xgboost.XGBClassifier(tree_method="hist", **common)
    booster.fit(x, y)
    columns = {f"p{k}": part for k, part in enumerate(np.array_split(x, 3, axis=1))}
    rows = at_random(x, y, 3)
    vertical = GBDTClassifier("federboost-vertical", **common)
    horizontal = GBDTClassifier(PROTOCOL, **common)
    processes = GBDTClassifier(PROTOCOL, transport="tls", **common)
    found = []
    jobs = [
        ("federboost-vertical, threads", vertical, lambda: vertical.fit(columns, y), None),
        (f"{PROTOCOL}, threads", horizontal, lambda: horizontal.fit(rows), 2.5),
    ]
    for title, model, fit, bar in jobs:
        fit()
        timing = side_by_side(fit, lambda: booster.fit(x, y), 2 if quick else 5, tries=2)
        bar = 1.5 * timing.theirs + 0.2 if bar is None else bar
        found.append({
            "job": title,
            "s": timing.ours,
            "start of processes s": "",
            "set-up s": model.timings_["setup"],
            "boosting s": model.timings_["boosting"],
            "bar s": bar,
            "without start": verdict(timing.ours, bar),
            "with start": "",
            "XGBoost s": timing.theirs,
            "MB": megabytes(model),
            "messages": sum(pair["messages"] for pair in model.communication_.values()),
            "others' cores": round(timing.others, 2),
        })  # fmt: skip

    def between_processes() -> dict[str, float]:
        processes.fit(rows)
        return dict(processes.timings_)

    took = undisturbed(between_processes, 1 if quick else 4)
    inside = took["setup"] + took["boosting"]
    found.append({
        "job": f"{PROTOCOL}, processes",
        "s": took["total"],
        "start of processes s": took["total"] - inside,
        "set-up s": took["setup"],
        "boosting s": took["boosting"],
        "bar s": 6.0,
        "without start": verdict(inside, 6.0),
        "with start": verdict(took["total"], 6.0),
        "XGBoost s": found[-1]["XGBoost s"],
        "MB": megabytes(processes),
        "messages": sum(pair["messages"] for pair in processes.communication_.values()),
        "others' cores": took["others' cores"],
    })  # fmt: skip
    return found


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those it starts, to one core where the system can: its lock is handed over at no cost."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def own_times(fit: Callable[[], object]) -> dict[str, float]:
    """Train in threads; return each party's processor seconds, taken in its thread.

    All of a party's work is done there: it has one thread to itself, and messages are put into inboxes by their sender.
    """
    spent: dict[str, float] = {}

    def timed(name: str, role: Role) -> Role:
        def run(party: Party) -> Any:
            start = time.thread_time()
            try:
                return role(party)
            finally:
                spent[name] = time.thread_time() - start

        return run

    def measured(roles: Mapping[str, Role], *arguments: Any, **named: Any) -> RunRecord:
        return play({name: timed(name, role) for name, role in roles.items()}, *arguments, **named)

    with patch.object(simulation, "play", measured):
        fit()
    return spent


def timed_job(model: GBDTClassifier, rows: Rows) -> dict[str, float]:
    """Train on all cores; return seconds."""
    busy = time.process_time()
    took = seconds(lambda: model.fit(rows))
    return {"s": took, "processor s": time.process_time() - busy, "set-up s": model.timings_["setup"]}


def timed_on_one_core(model: GBDTClassifier, rows: Rows) -> dict[str, float]:
    """Train on one core; return seconds, and processor seconds by role."""
    with one_core():
        start = time.perf_counter()
        spent = own_times(lambda: model.fit(rows))
        took = time.perf_counter() - start
    others = [spent[name] for name in spent if name != "p0"]
    return {
        "s on one core": took,
        "own s of the leader": spent["p0"],
        "own s of another": mean(others),
        "own s of another, most": max(others),
    }


def scaling(quick: bool) -> list[dict]:
    """Time 60 trees of depth 4 on 18 columns by participants; all points in turn, the least disturbed runs count.

    Rows are 300,000 together, then a 32nd of that each, on one core alone: a party's own part does not shrink there.
    """
    data = flights()
    n = 30_000 if quick else 300_000
    x, y = data.x[:n].astype(np.float32), data.y[:n]
    common = {
        "base_score": 0.5,
        "n_estimators": 60,
        "max_depth": 4,
        "learning_rate": 0.3,
        "max_bin": 32,
        "n_jobs": THREADS,
    }
    booster = xgboost.XGBClassifier(tree_method="hist", **common)
    theirs = undisturbed(lambda: {"s": seconds(lambda: booster.fit(x, y))}, 5)["s"]
    jobs = [(TOGETHER, count, n) for count in (2, *COUNTS)] + [(EACH, count, n * count // 32) for count in COUNTS]
    rows_of = {job: at_random(x[: job[2]], y[: job[2]], job[1]) for job in jobs}
    runs: dict[tuple[str, int, int], list[dict[str, float]]] = {job: [] for job in jobs}
    alone: dict[tuple[str, int, int], list[dict[str, float]]] = {job: [] for job in jobs}
    models = {job: flat(GBDTClassifier, PROTOCOL, mode="paper" if job[1] == 2 else "safe", **common) for job in jobs}
    for _ in range(1 if quick else 3):
        for job, model in models.items():
            if job[0] == TOGETHER:
                runs[job].append(undisturbed(partial(timed_job, model, rows_of[job]), 1))
            alone[job].append(undisturbed(partial(timed_on_one_core, model, rows_of[job]), 1))
    result = []
    for job, model in models.items():
        setting, count, n_rows = job
        by_sender: dict[str, int] = defaultdict(int)
        for pair, totals in model.communication_.items():
            by_sender[pair.partition(" -> ")[0]] += totals["bytes"]
        best, one = (min(made[job], key=lambda each: each["others' cores"], default={}) for made in (runs, alone))
        result.append({
            "rows": setting,
            "rows in all": n_rows,
            "participants": count,
            "mode": "paper" if count == 2 else "safe",
            **{key: best.get(key, "") for key in ("s", "set-up s", "processor s")},
            **{key: one[key] for key in ("s on one core", *OWN)},
            "XGBoost s": theirs if setting == TOGETHER else "",
            "MB": sum(by_sender.values()) / 1e6,
            "MB of the leader": by_sender["p0"] / 1e6,
            "MB of another": by_sender["p1"] / 1e6,
            "messages": sum(pair["messages"] for pair in model.communication_.values()),
            "others' cores": max(made["others' cores"] for made in (best, one) if made),
        })  # fmt: skip
    return result


def fits(rows: list[dict]) -> list[dict]:
    """Fit lines in the number of participants; only those in safe mode count.

    "At most linear": from 3 to 8 and from 8 to 32, k times as many take no more than k times as much; or a participant
    more costs no more from 16 on than before. Masks of all pairs, made on one machine, are quadratic: they are what a
    participant more costs more from 16 on.
    """
    result = []
    lines = [(TOGETHER, of) for of in ("s", "processor s", "s on one core", *OWN, "MB", "messages")]
    for setting, of in [*lines, *((EACH, of) for of in OWN)]:
        chosen = [row for row in rows if row["mode"] == "safe" and row["rows"] == setting]
        count = np.array([row["participants"] for row in chosen], np.float64)
        y = np.array([row[of] for row in chosen], np.float64)
        slope, intercept = np.polyfit(count, y, 1)
        rest = y - slope * count - intercept
        in_proportion = bool(np.all(np.diff((y / count)[[0, 1, 3]]) <= 0.0))
        early, late = (y[2] - y[0]) / (count[2] - count[0]), (y[3] - y[2]) / (count[3] - count[2])
        result.append({
            "rows": setting,
            "of": of,
            "a participant more": float(slope),
            "at 0": float(intercept),
            "R^2": f"{1.0 - (rest**2).sum() / ((y - y.mean()) ** 2).sum():.4f}",
            "8 over 3": float(y[1] / y[0]),
            "32 over 8": float(y[3] / y[1]),
            "32 over 3": float(y[3] / y[0]),
            "a participant more, 3 to 16": float(early),
            "16 to 32": float(late),
            "at most in proportion": "yes" if in_proportion else "no",
            "at most linear": "yes" if in_proportion or late <= max(1.05 * early, 0.0) else "no",
            "others' cores, most": max(row["others' cores"] for row in chosen),
        })  # fmt: skip
    return result


def draw(rows: list[dict], quick: bool) -> None:
    together, each = ([row for row in rows if row["rows"] == setting] for setting in (TOGETHER, EACH))
    titles = ["time, 300,000 x 18 together", "own processor time, rows as many each", "bytes sent"]
    figure, (left, middle, right) = figures.panels(titles)
    lines = [
        (left, together, "s", "on two cores", "SecureBoost"),
        (left, together, "s on one core", "on one core", "GBDT"),
        (middle, each, "own s of the leader", "leader", "RL-SecureBoost"),
        (middle, each, "own s of another", "another participant", "GBDT"),
        (right, together, "MB", "by all", "SecureBoost"),
        (right, together, "MB of the leader", "by the leader", "RL-SecureBoost"),
        (right, together, "MB of another", "by another participant", "GBDT"),
    ]
    for panel, drawn, key, label, colour in lines:
        count = [row["participants"] for row in drawn]
        panel.plot(count, [row[key] for row in drawn], "o-", color=figures.COLOURS[colour], label=label)
    left.axhline(together[0]["XGBoost s"], color=figures.COLOURS["XGBoost"], label="XGBoost, pooled, two threads")
    for panel, unit in ((left, "seconds"), (middle, "seconds"), (right, "MB")):
        panel.set(xlabel="participants", ylabel=unit, ylim=(0, None))
        panel.legend(fontsize=8)
    figures.save(figure, "federboost_horizontal_scaling", quick=quick)


# ---------------------------------------------------------------- a slow link


def played(rows: Rows, options: Mapping[str, Any], link: LinkSpeed | None) -> tuple[float, RunRecord]:
    """Train in threads over a link; return seconds and transcripts too."""
    kept: list[RunRecord] = []

    def over_link(*arguments: Any, **named: Any) -> RunRecord:
        kept.append(play(*arguments, **named, link=link))
        return kept[-1]

    model = flat(GBDTClassifier, PROTOCOL, n_jobs=THREADS, **options)
    with patch.object(simulation, "play", over_link):
        took = seconds(lambda: model.fit(rows))
    return took, kept[0]


def crossings(transcripts: Mapping[str, Transcript], *, acknowledged: bool) -> int:
    """Return how many times the line is crossed one after the other, by messages that wait for earlier ones.

    Parameters
    ----------
    acknowledged : bool
        Whether a sender waits for the acknowledgment, which crosses too, before it goes on; one kind of message leaves
        to several peers at once.
    """
    clock = dict.fromkeys(transcripts, 0)
    leaving: dict[str, tuple[str, set[str], int]] = {name: ("", set(), 0) for name in transcripts}
    under_way: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    waiting = {name: deque(transcript.entries) for name, transcript in transcripts.items()}
    while any(waiting.values()):
        before = sum(map(len, waiting.values()))
        for name, entries in waiting.items():
            while entries and (entries[0].direction == "sent" or under_way[entries[0].peer, name]):
                entry = entries.popleft()
                if entry.direction == "received":
                    clock[name] = max(clock[name], under_way[entry.peer, name].popleft())
                    continue
                step, told, _ = leaving[name]
                if step != entry.step or entry.peer in told:
                    leaving[name] = entry.step, set(), clock[name]
                    clock[name] += 2 * acknowledged
                _, told, left = leaving[name]
                told.add(entry.peer)
                under_way[name, entry.peer].append(left + 1)
        assert sum(map(len, waiting.values())) < before, "expected every message received to have been sent"
    return max(clock.values())


def slowest_bytes(transcripts: Mapping[str, Transcript], leader: str) -> int:
    """Return the bytes that leave one after the other: the leader's, and those of whichever other sends most."""
    sent = {name: sum(e.nbytes for e in t.entries if e.direction == "sent") for name, t in transcripts.items()}
    return sent[leader] + max(sent[name] for name in sent if name != leader)


LINK_JOBS = [("20 trees of depth 3", 20, 3, ""), ("60 trees of depth 4", 60, 4, 3103.24)]


def over_links(quick: bool) -> list[dict]:
    data = flights()
    rows = at_random(data.x[:290_000].astype(np.float32), data.y[:290_000], 3)
    result = []
    for title, trees, depth, published in LINK_JOBS[:1] if quick else LINK_JOBS:
        options = {"base_score": 0.5, "n_estimators": trees, "max_depth": depth, "learning_rate": 0.3, "max_bin": 24}
        played(rows, options, None)
        bare, found = played(rows, options, None)
        crossed = crossings(found.transcripts, acknowledged=False)
        nbytes = slowest_bytes(found.transcripts, "p0")
        for delay in (0.05,) if quick else (0.05, 0.1):
            before, start = cpu_of_others(), time.perf_counter()
            took, _ = played(rows, options, LinkSpeed(RATE, delay))
            others = (cpu_of_others() - before) / (time.perf_counter() - start)
            predicted = crossed * delay + 8 * nbytes / RATE
            result.append({
                "job": f"290,000 x 18 (flights), 3 participants, {title}",
                "Mbit/s": RATE / 1e6,
                "round trip ms": 2000 * delay,
                "rounds": crossed / 2,
                "MB one after the other": nbytes / 1e6,
                "rounds and bytes s": predicted,
                "without the link s": bare,
                "both s": predicted + bare,
                "s": took,
                "published s (SUSY)": published,
                "others' cores": round(max(0.0, others), 2),
            })  # fmt: skip
    return result


def in_namespaces(quick: bool) -> list[dict]:
    """Time the job of `over_links` between processes, with and without the link, beside what can be predicted."""
    data, (title, trees, depth, _), delay = flights(), LINK_JOBS[0], 0.05
    x, y = data.x[:290_000].astype(np.float32), data.y[:290_000]
    options = {
        "base_score": 0.5,
        "n_estimators": 5 if quick else trees,
        "max_depth": depth,
        "learning_rate": 0.3,
        "max_bin": 24,
    }
    result = []
    for participants in (3,) if quick else (3, 5):
        rows = at_random(x, y, participants)
        _, found = played(rows, options, None)
        nbytes = slowest_bytes(found.transcripts, "p0")
        quiet = train_in_namespaces(rows, PROTOCOL, options, None, 0.0)
        slow = train_in_namespaces(rows, PROTOCOL, options, RATE, delay)
        result.append({
            "job": f"290,000 x 18 (flights), {participants} participants, {title}",
            "link by": slow.by,
            "Mbit/s": RATE / 1e6,
            "round trip ms": 2000 * delay,
            "rounds": crossings(found.transcripts, acknowledged=False) / 2,
            "rounds, sends acknowledged": crossings(found.transcripts, acknowledged=True) / 2,
            "acknowledged rounds and bytes s": crossings(found.transcripts, acknowledged=True) * delay
            + 8 * nbytes / RATE,
            "without the link, set-up s": quiet.setup,
            "boosting without s": quiet.boosting,
            "set-up s": slow.setup,
            "boosting s": slow.boosting,
            "others' cores": slow.others,
        })  # fmt: skip
    return result


def main() -> None:
    parser = arguments(__doc__)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part alone")
    options = parser.parse_args()
    every = not any(vars(options)[part] for part in PARTS)
    quick = options.quick
    compile_kernels()
    seeds = 2 if quick else 5
    if every or options.accuracy:
        settings = [
            (give_me_some_credit(), 20, 3, (26, 0.8625)),
            (default_of_credit_card_clients(), 20, 3, (24, 0.7825)),
            (susy(), 60, 4, (24, "0.8722 (290,000 rows, 18 columns)")),
        ]
        rows = [row for setting in settings for row in accuracy(*setting, seeds, quick)]
        report("federboost_horizontal", rows, quick=quick)
    if every or options.noise:
        seen = (default_of_credit_card_clients(), susy(), give_me_some_credit())
        sets = [*((data, False) for data in seen), *((data, True) for data in (higgs_data(), adult(), flights()))]
        rows = [row for data, kept_back in sets for row in noise(data, kept_back, seeds, quick)]
        report("federboost_horizontal_noise", rows, quick=quick)
        report("federboost_horizontal_numbers", noise_on_numbers(seeds, quick), quick=quick)
    if every or options.speed:
        report("federboost_horizontal_speed", small_jobs(quick), quick=quick)
        rows = scaling(quick)
        report("federboost_horizontal_scaling", rows, quick=quick)
        report("federboost_horizontal_fits", fits(rows), quick=quick)
        draw(rows, quick)
    if every or options.link:
        report("federboost_horizontal_link", over_links(quick), quick=quick)
    if every or options.namespaces:
        try:
            report("federboost_horizontal_namespaces", in_namespaces(quick), quick=quick)
        except NotPermitted as error:
            print(f"skipped: {error}")


if __name__ == "__main__":
    main()
