"""FederBoost: training again, bytes and seconds by parties, over a slow link, curves, and whose columns are noised.

Tian et al. 2020. What each part has beside it in the paper is in docs/experiments.md. Every part can be run alone, and
writes its own file; AUC, bytes and rounds do not depend on the machine.

`--again` (`federboost_again.csv`): what first and later fits in one folder send, and what they have paid by then.

`--parties` (`_parties.csv`): bytes and rounds by the number of parties, and what these take over lines of 20 Mbit/s and
a round trip of 100 ms (`--link` measures how near that is), of the paper's Fig. 6. The line of who sends most counts,
and computing is left out. SUSY's place has a table of flights, with as many rows and columns.

`--curves` (`_curves.csv` and a figure): AUC by rounds on both credit tables.

`--columns` (`_columns.csv`): AUC at 14 and 16 buckets, and its range over six ways to deal the columns out to two
parties, of which only one has noise.

`--ranks` (`_ranks.csv`): AUC where buckets have equal counts by rank, equal values being parted at random, as one
sentence of the paper has it, without noise; beside buckets that never part equal values, which the protocol uses.

`--speed` (`_speed_by_parties.csv`): seconds by the number of parties, and of 50,000 x 15 (Table III).

`--link` (`_link.csv`): the jobs of `--parties` over lines of that kind, simulated by the channel, in both forms, beside
what rounds, bytes and computing add up to. About 6 minutes.

The last two need a machine that does nothing else. In all about 15 minutes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import numpy as np
import xgboost
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

import figures
from data import (
    Data,
    arguments,
    cpu_of_others,
    default_of_credit_card_clients,
    flat,
    flights,
    give_me_some_credit,
    report,
    seconds,
    splits,
    susy,
    write,
)  # fmt: skip
from federboost_horizontal import RATE, at_random, crossings, slowest_bytes
from treaty import GBDTClassifier
from treaty.messaging.channel import LinkSpeed
from treaty.messaging.transcript import Transcript
from treaty.models.checkpoints import ledger_folder
from treaty.privacy.ledger import per_person, read_ledger
from treaty.runs import threads as simulation
from treaty.runs.threads import RunRecord, play
from treaty.runs.warm_up import compile_kernels

VERTICAL, HORIZONTAL = "federboost-vertical", "federboost-horizontal"
THREADS = 2
DELAY = 0.05  # seconds one way
CLEAR = {"epsilon": math.inf, "mode": "paper"}
PARTS = ("again", "parties", "curves", "columns", "ranks", "speed", "link")


def columns_of(x: NDArray[np.float32], parties: int) -> dict[str, NDArray[np.float32]]:
    return {f"p{k}": part for k, part in enumerate(np.array_split(x, parties, axis=1))}


def auc(y: NDArray[np.int64], scores: NDArray[np.float64]) -> float:
    return float(roc_auc_score(y, scores))


def spread(values: list[float]) -> dict[str, str]:
    return {"AUC": f"{mean(values):.4f}", "sd": f"{stdev(values):.4f}" if len(values) > 1 else ""}


# ---------------------------------------------------------------- training again


def again(quick: bool) -> list[dict[str, object]]:
    """Fit three times in one folder: twice the same, then deeper; return what was sent and paid by then."""
    data = default_of_credit_card_clients() if quick else give_me_some_credit()
    x, y = data.x.astype(np.float32), data.y
    jobs: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("by column, 2 parties, epsilon 4", VERTICAL, columns_of(x, 2), {"max_bin": 16}),
        ("by row, 3 participants", HORIZONTAL, at_random(x, y, 3), {"max_bin": 26}),
        (
            "by row, 3 participants, epsilon_total 4", HORIZONTAL, at_random(x, y, 3),
            {"max_bin": 26, "epsilon_total": 4.0},
        ),
    ]  # fmt: skip
    rows = []
    for title, protocol, tables, own in jobs:
        with tempfile.TemporaryDirectory() as folder:
            for fit, depth in (("first", 3), ("again", 3), ("again, deeper", 4)):
                model = flat(GBDTClassifier, protocol, base_score=0.5, n_jobs=THREADS, max_depth=depth, **own)
                labels = (y,) if protocol == VERTICAL else ()
                model.fit(tables, *labels, checkpoint=Path(folder))
                by_type: dict[str, int] = {}
                for pair in model.communication_.values():
                    for kind, nbytes in pair["by_type"].items():
                        by_type[kind] = by_type.get(kind, 0) + nbytes
                about = ("Buckets",) if protocol == VERTICAL else ("Count", "ProbeRequest", "CommonBins")
                noise = ledger_folder(folder, "p1", "noise")
                rows.append({
                    "data": data.title,
                    "job": title,
                    "fit": fit,
                    "bytes of buckets or bins": sum(by_type.get(kind, 0) for kind in about),
                    "bytes in all": sum(by_type.values()),
                    "epsilon a person in the ledger": (
                        f"{per_person(read_ledger(noise)):.4g}" if noise.exists() else "no noise"
                    ),
                })  # fmt: skip
    return rows


# ---------------------------------------------------------------- parties


def transcripts_of(fit: Callable[[], object], link: LinkSpeed | None = None) -> tuple[Mapping[str, Transcript], float]:
    """Return every party's transcript of a fit in threads, over a link if there is one, and its seconds."""
    kept: list[RunRecord] = []

    def recording(*arguments: Any, **named: Any) -> RunRecord:
        kept.append(play(*arguments, **{**named, "link": link}))
        return kept[-1]

    with patch.object(simulation, "play", recording):
        took = seconds(fit)
    return kept[0].transcripts, took


Job = tuple[str, str, int, Any, GBDTClassifier, tuple[Any, ...], str]


def jobs_by_parties(quick: bool) -> Iterator[Job]:
    """Yield data, form, parties, tables, model, labels, and what the paper has for it over a local line."""
    cut = 20_000 if quick else 290_000
    large = flights()
    sets = [
        ("290,000 x 18 (flights; paper: SUSY)", large.x[:cut].astype(np.float32), large.y[:cut], 60, 4, 24),
        ("150,000 x 10 (Give Me Some Credit)", *_all(give_me_some_credit()), 20, 3, 26),
        ("30,000 x 23 (Default of Credit Card Clients)", *_all(default_of_credit_card_clients()), 20, 3, 24),
    ]
    for k, (title, x, y, trees, depth, bins) in enumerate(sets):
        common = {"base_score": 0.5, "n_estimators": trees, "max_depth": depth, "learning_rate": 0.3, "n_jobs": THREADS}
        for parties in (2, 8) if quick else (2, 4, 6, 8):
            model = flat(GBDTClassifier, VERTICAL, max_bin=16, **common)
            yield title, "columns", parties, columns_of(x, parties), model, (y,), "at most 33 s" if k == 0 else ""
        for parties in (2, 8) if quick else ((2, 4, 8) if k == 0 else (2, 8, 16, 32)):
            mode = {"mode": "paper"} if parties == 2 else {}
            model = flat(GBDTClassifier, HORIZONTAL, max_bin=bins, **common, **mode)
            paper = {(0, 2): "23.75 s", (0, 8): "86 s", (1, 2): "about 10 s", (1, 32): "130 s"}
            yield title, "rows", parties, at_random(x, y, parties), model, (), paper.get((k, parties), "")


def _all(data: Data) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    return data.x.astype(np.float32), data.y


def by_parties(quick: bool) -> list[dict[str, object]]:
    rows = []
    for title, split, parties, tables, model, labels, _ in jobs_by_parties(quick):
        transcripts, _ = transcripts_of(lambda m=model, t=tables, y=labels: m.fit(t, *y))
        crossed, nbytes = crossings(transcripts, acknowledged=False), slowest_bytes(transcripts, "p0")
        rows.append({
            "data": title,
            "split by": split,
            "parties": parties,
            "trees": f"{model.n_estimators} of depth {model.max_depth}",
            "MB in all": sum(pair["bytes"] for pair in model.communication_.values()) / 1e6,
            "rounds": crossed / 2,
            "MB one after the other": nbytes / 1e6,
            "over 20 Mbit/s, 100 ms: s": crossed * DELAY + 8 * nbytes / RATE,
            "published": over_a_slow_line(title, split),
        })  # fmt: skip
    return rows


def over_a_slow_line(title: str, split: str) -> str:
    """Return what the paper has for a job over 20 Mbit/s and 100 ms."""
    paper = {"columns": "at most 691.77 s", "rows": "at most 3103.24 s"}
    return paper[split] if title.startswith("290,000") else ""


def over_links(quick: bool) -> list[dict[str, object]]:
    """Time every job of `jobs_by_parties` over simulated lines, beside its rounds and bytes, and computing alone."""
    rows = []
    for title, split, parties, tables, model, labels, _ in jobs_by_parties(quick):

        def fit(m: GBDTClassifier = model, t: Any = tables, y: tuple[Any, ...] = labels) -> object:
            return m.fit(t, *y)

        transcripts_of(fit)
        transcripts, bare = transcripts_of(fit)
        predicted = crossings(transcripts, acknowledged=False) * DELAY + 8 * slowest_bytes(transcripts, "p0") / RATE
        before = cpu_of_others()
        _, took = transcripts_of(fit, LinkSpeed(RATE, DELAY))
        rows.append({
            "data": title,
            "split by": split,
            "parties": parties,
            "trees": f"{model.n_estimators} of depth {model.max_depth}",
            "MB in all": sum(pair["bytes"] for pair in model.communication_.values()) / 1e6,
            "rounds and bytes s": predicted,
            "without the link s": bare,
            "both s": predicted + bare,
            "s": took,
            "published": over_a_slow_line(title, split),
            "others' cores": round(max(0.0, cpu_of_others() - before) / took, 2),
        })  # fmt: skip
        print(*rows[-1].values(), flush=True)
    return rows


def speed(quick: bool) -> list[dict[str, object]]:
    """Time every job of `jobs_by_parties`, and 50,000 x 15 between three; the best of three fits."""
    large = flights()
    x, y = large.x[:50_000, :15].astype(np.float32), large.y[:50_000]
    jobs = list(jobs_by_parties(quick))
    for trees in (1, 20) if quick else (1, 20, 200):
        common = {"base_score": 0.5, "n_estimators": trees, "max_depth": 4, "learning_rate": 0.3, "n_jobs": THREADS}
        title = f"50,000 x 15 (flights), {trees} trees of depth 4"
        vertical = flat(GBDTClassifier, VERTICAL, max_bin=16, **common)
        jobs.append((title, "columns", 3, columns_of(x, 3), vertical, (y,), ""))
        jobs.append((title, "rows", 3, at_random(x, y, 3), flat(GBDTClassifier, HORIZONTAL, **common), (), ""))
    rows = []
    for title, split, parties, tables, model, labels, published in jobs:
        before, took = cpu_of_others(), []
        for _ in range(1 if quick else 3):
            took.append(seconds(lambda m=model, t=tables, l=labels: m.fit(t, *l)))
        rows.append({
            "data": title,
            "split by": split,
            "parties": parties,
            "s": min(took),
            "MB": sum(pair["bytes"] for pair in model.communication_.values()) / 1e6,
            "published": published,
            "others' cores": round(max(0.0, cpu_of_others() - before) / sum(took), 2),
        })  # fmt: skip
    return rows


# ---------------------------------------------------------------- accuracy

CREDIT = [(give_me_some_credit, 26), (default_of_credit_card_clients, 24)]


def curves(quick: bool) -> list[dict[str, object]]:
    """Return AUC after every round of 50, mean over three fixed splits, by system."""
    trees, rows = 10 if quick else 50, []
    common = {"base_score": 0.5, "n_estimators": trees, "max_depth": 3, "learning_rate": 0.3, "n_jobs": THREADS}
    for load, bins in CREDIT:
        data = load()
        x, y = _all(data)
        found: dict[str, list[list[float]]] = {}
        for seed, (train, test) in enumerate(splits(data, 2 if quick else 3)):
            booster = xgboost.XGBClassifier(tree_method="hist", max_bin=32, **common)
            booster.fit(x[train], y[train])
            scores = [booster.predict_proba(x[test], iteration_range=(0, k + 1))[:, 1] for k in range(trees)]
            found.setdefault("XGBoost, 32 bins", []).append([auc(y[test], one) for one in scores])
            systems: list[tuple[str, Any, Any, tuple[Any, ...], Any]] = [
                (name, flat(GBDTClassifier, VERTICAL, max_bin=16, **common, **own), columns_of(x[train], 2),
                 (y[train],), columns_of(x[test], 2))
                for name, own in (("by column, no noise", CLEAR), ("by column, epsilon 4", {}))
            ]  # fmt: skip
            horizontal = flat(GBDTClassifier, HORIZONTAL, max_bin=bins, **common)
            systems.append((f"by row, {bins} bins", horizontal, at_random(x[train], y[train], 3, seed), (), x[test]))
            for name, model, tables, labels, rest in systems:
                model.fit(tables, *labels)
                stages = model.staged_predict_proba(rest)
                found.setdefault(name, []).append([auc(y[test], one[:, 1]) for one in stages])
        for name, of_splits in found.items():
            for k, of_round in enumerate(zip(*of_splits, strict=True)):
                rows.append({"data": data.title, "system": name, "rounds": k + 1, **spread(list(of_round))})
    return rows


def draw(rows: list[dict[str, object]], quick: bool) -> None:
    titles = list(dict.fromkeys(str(row["data"]) for row in rows))
    figure, panels = figures.panels(titles)
    for panel, title in zip(panels, titles, strict=True):
        own = [row for row in rows if row["data"] == title]
        for system in dict.fromkeys(str(row["system"]) for row in own):
            points = [row for row in own if row["system"] == system]
            panel.plot([row["rounds"] for row in points], [float(str(row["AUC"])) for row in points], label=system)
        panel.set(xlabel="rounds", ylabel="AUC")
        panel.legend(fontsize=8)
    figures.save(figure, "federboost_curves", quick=quick)


PUBLISHED = {
    ("Give Me Some Credit", 16, math.inf): 0.8585,
    ("Give Me Some Credit", 16, 4.0): 0.8570,
    ("Default of Credit Card Clients", 16, math.inf): 0.7765,
    ("Default of Credit Card Clients", 16, 4.0): 0.7727,
    ("SUSY, 11,000 rows", 14, math.inf): 0.8726,
    ("SUSY, 11,000 rows", 16, math.inf): 0.8710,
    ("SUSY, 11,000 rows", 16, 4.0): 0.8669,
}


def scored(data: Data, order: NDArray[np.intp], cut: Any, options: Mapping[str, Any]) -> float:
    """Return the AUC of a fit where the columns, in this order, are halved between two parties."""
    (x, y), (train, test) = _all(data), cut
    model = flat(GBDTClassifier, VERTICAL, n_jobs=THREADS, **options)
    model.fit(columns_of(x[train][:, order], 2), y[train])
    return auc(y[test], model.predict_proba(columns_of(x[test][:, order], 2))[:, 1])


def columns(quick: bool) -> list[dict[str, object]]:
    """Return AUC of halves over five splits, then, as a mean of the first two, its range by which columns are whose."""
    rows = []
    for data, trees, depth in (
        (give_me_some_credit(), 20, 3),
        (default_of_credit_card_clients(), 20, 3),
        (susy(), 60, 4),
    ):
        cuts = splits(data, 2 if quick else 5)
        rng, width = np.random.default_rng(0), data.x.shape[1]
        orders = [np.arange(width), np.roll(np.arange(width), width // 2)]
        orders += [rng.permutation(width) for _ in range(1 if quick else 4)]
        for q in (14, 16):
            for epsilon in (math.inf, 4.0):
                own = CLEAR if epsilon == math.inf else {"epsilon": epsilon}

                common = {
                    "base_score": 0.5,
                    "n_estimators": trees,
                    "max_depth": depth,
                    "learning_rate": 0.3,
                    "max_bin": q,
                    **own,
                }
                halves = [scored(data, orders[0], cut, common) for cut in cuts]
                dealt = orders if q == 16 else []
                others = [mean(scored(data, order, cut, common) for cut in cuts[:2]) for order in dealt]
                rows.append({
                    "data": data.title,
                    "trees": f"{trees} of depth {depth}",
                    "buckets": q,
                    "epsilon a value": "none" if epsilon == math.inf else f"{epsilon:g}",
                    **spread(halves),
                    "published": PUBLISHED.get((data.title, q, epsilon), ""),
                    "ways to deal columns out": len(others) or "",
                    "lowest": f"{min(others):.4f}" if others else "",
                    "highest": f"{max(others):.4f}" if others else "",
                })  # fmt: skip
    return rows


def by_rank(
    train: NDArray[np.float32], test: NDArray[np.float32], q: int, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the numbers of buckets of equal counts, NaN where missing; equal values are parted at random.

    Rows that were not ranked go by the value that their bucket begins with.
    """
    ranked = [np.full(part.shape, np.nan, np.float32) for part in (train, test)]
    for f in range(train.shape[1]):
        column = train[:, f]
        present = np.flatnonzero(~np.isnan(column))
        order = present[np.lexsort((rng.random(len(present)), column[present]))]
        ranked[0][order, f] = np.arange(len(order)) * q // len(order)
        starts = column[order][np.searchsorted(ranked[0][order, f], np.arange(1, q))]
        there = ~np.isnan(test[:, f])
        ranked[1][there, f] = np.searchsorted(starts, test[there, f], side="right")
    return ranked[0], ranked[1]


def ranks(quick: bool) -> list[dict[str, object]]:
    """Return AUC of one table with buckets by rank, and with those that never part equal values."""
    rows = []
    for data, trees, depth in (
        (give_me_some_credit(), 20, 3),
        (default_of_credit_card_clients(), 20, 3),
        (susy(), 60, 4),
    ):
        x, y = _all(data)
        found: dict[str, list[float]] = {"by rank, equal values parted at random": [], "tie-aware": []}
        for seed, (train, test) in enumerate(splits(data, 2 if quick else 5)):
            buckets = by_rank(x[train], x[test], 16, np.random.default_rng(seed))
            for name, (seen, asked) in zip(found, (buckets, (x[train], x[test])), strict=True):
                model = GBDTClassifier(
                    "pooled",
                    base_score=0.5,
                    n_estimators=trees,
                    max_depth=depth,
                    learning_rate=0.3,
                    max_bin=16,
                    n_jobs=THREADS,
                )
                found[name].append(auc(y[test], model.fit(seen, y[train]).predict_proba(asked)[:, 1]))
        published = PUBLISHED.get((data.title, 16, math.inf), "")
        rows += [
            {"data": data.title, "16 buckets": name, **spread(scores), "published": published}
            for name, scores in found.items()
        ]
    return rows


def main() -> None:
    parser = arguments(__doc__)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part alone")
    options = parser.parse_args()
    every = not any(vars(options)[part] for part in PARTS)
    compile_kernels()
    quick = options.quick
    if every or options.again:
        report("federboost_again", again(quick), quick=quick)
    if every or options.parties:
        report("federboost_parties", by_parties(quick), quick=quick)
    if every or options.curves:
        rows = curves(quick)
        write("quick/federboost_curves" if quick else "federboost_curves", rows)
        draw(rows, quick)
    if every or options.columns:
        report("federboost_columns", columns(quick), quick=quick)
    if every or options.ranks:
        report("federboost_ranks", ranks(quick), quick=quick)
    if every or options.speed:
        report("federboost_speed_by_parties", speed(quick), quick=quick)
    if every or options.link:
        report("federboost_link", over_links(quick), quick=quick)


if __name__ == "__main__":
    main()
