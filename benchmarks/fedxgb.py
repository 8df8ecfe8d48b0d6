"""FedXGB: accuracy beside XGBoost's while users drop out, what a user, an edge server and the server spend, one tree.

Liu et al. 2020, who publish that accuracy stays within 1 % of XGBoost's on Adult and MNIST while 0 to 30 % of 300 users
of 10 edge servers drop out at every tenth round (learning rate 0.3, gamma 0.1, lambda 1, depth 3), and seconds of each
role by stage at 50,000 rows of 100 columns. Everybody is a thread of this machine and runs the real protocol in safe
mode, with leaves of single rows as published (`min_child_samples=1`). That users know the model (expose="model") makes
no difference to it, nor does how rows are dealt where nobody drops out: both are checked first, bit for bit, on 9
users. Each part can be run alone, and writes its own files:

`--accuracy` (`fedxgb_accuracy.csv`, and of each data set `fedxgb_curves_mnist.csv` or `_adult.csv` with a figure of
accuracy and log loss of the test rows by round, as the paper's Fig. 3; `--data` plays one alone): 20 rounds. Adult
(a9a, 123 columns) on 3 of its fixed splits, once with the default of 20 rows in a leaf; MNIST (10 trees a round, each
on 78 of 784 columns, drawn alike for the pooled model) on its own test images and one seed. Rows are dealt at random,
and, for 30 % lost, once by label too, so that a user has hardly more than one class. Bar: at most 0.01 less than
XGBoost and than the pooled model, whose bins the secure search finds but for 0.2 % of a column's rows. 19 trainings,
on each core another: about 45 minutes, and twice as long without AVX-512.

`--costs` (`_costs.csv`, `_users.csv`, `_edges.csv`, and a figure): processor seconds of each role's thread by stage, of
one tree of a hidden model, all on one core, where threads disturb each other least; messages are handed over in memory.
At 50,000 x 100 beside the published seconds, which do not say of how many trees; then by users (100 to 1,000 of 10 edge
servers, 50 rows each), and by edge servers (3 to 20 of 300 users, committees of three). Selection: keys, certificates,
choice of users. Set-up: all sums until the bins are known; the paper's is its masks, made once where we make them anew
for every sum. Boosting: the tree's sums and splits. Prediction: rows go down the tree on shares.
Bars: a user's seconds and bytes grow with at most the first power of the size of its domain, an edge server's below the
second; an edge server's fall with the number of edge servers, as in the paper's Fig. 4 (g) and (h). About 25 minutes.

`--tree` (`_tree.csv`): a tree of depth 3 of 32 bins at 50,000 x 100, 300 users, 10 edge servers, on all cores; the
least disturbed of three; the model known to users, hidden on additive shares in committees of three, and hidden on
Shamir shares at all edge servers. Bars: 10 s for all 312
together without prediction on shares, and 1 s for the server's own thread. About 11 minutes.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.queues import Queue
from statistics import mean, stdev
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import xgboost
from numpy.typing import NDArray

import figures
from data import Data, adult, arguments, mnist, report, splits, verdict, write
from federboost_horizontal import one_core, undisturbed
from treaty.data.table import to_table
from treaty.messaging.messages import Message
from treaty.models.trees import ModelPart
from treaty.runs.fit import no_rows
from treaty.runs.threads import Run, RunRecord, train_in_threads
from treaty.runs.warm_up import compile_kernels
from treaty.systems.fedxgb import domain
from treaty.systems.fedxgb.messages import RoundStart
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.roles import SERVER
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, UserSums
from treaty.systems.fedxgb.secpred import HiddenModel, HolderRows, SharedRows
from treaty.systems.fedxgb.shares import Dealer
from treaty.systems.fedxgb.system import SYSTEM
from treaty.systems.horizontal.members import TranscriptDigest
from treaty.systems.horizontal.quantiles import Count
from treaty.systems.options import names_of
from treaty.systems.pooled import system as pooled
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.system import LabelledRows, RoleInput, Roles, roles_of

THREADS = 2
NEAR = 0.01
ROUNDS = 20
ADULT_SEEDS = 3
COMMON = {"base_score": 0.5, "max_depth": 3, "learning_rate": 0.3, "reg_lambda": 1.0, "max_bin": 32}
GAMMA = 0.1
LOST = (0.0, 0.1, 0.2, 0.3)
AT_RANDOM, BY_LABEL = "at random", "by label"
STAGES = ("selection", "set-up", "boosting", "prediction")
ROLES = ("user", "edge", "server")
PUBLISHED = {  # seconds of a user, an edge server, the server: the paper's Table III
    "selection": (0.285, 1.112, 3.288),
    "set-up": (1.333, 1.458, ""),
    "boosting": (18.802, 23.308, 26.863),
    "prediction": (5.182, 5.987, 6.961),
    "total": (25.602, 31.865, 37.112),
}
PARTS = ("accuracy", "costs", "tree")

Rows = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Size:
    """How many users and edge servers there are, and rows."""

    users: int
    edges: int
    rows: int


@dataclass(slots=True)
class TrainingOutcome:
    """A training.

    Attributes
    ----------
    part : ModelPart
        The model.
    played : Played
    marks : list of (float, float)
        As the bins are known, then after each round: seconds since the start, processor seconds of the server's thread.
    seconds : float
        From the start to the end.
    users : list of int
        Whose vectors are in each sum.
    """

    part: ModelPart
    played: RunRecord
    marks: list[tuple[float, float]]
    seconds: float
    users: list[int]


class Options(NamedTuple):
    """The system's own options, and common ones."""

    own: FedXGB
    common: BoostingOptions


def fedxgb(edges: int, **chosen: Any) -> Options:
    """Return the published settings with what is chosen besides."""
    values = {"min_split_loss": GAMMA, "min_child_samples": 1, "expose": "model", "random_state": 0, **COMMON, **chosen}
    own = FedXGB(edges=edges, **{name: values.pop(name) for name in names_of(FedXGB) if name in values})
    return Options(own, BoostingOptions(**values).checked(own))


def train(x: Rows, y: Labels, who: NDArray[np.int64], options: Options, threads: int = 1) -> TrainingOutcome:
    """Train in threads: user ``who[i]`` has row i."""
    shards = {
        f"user{k}": LabelledRows(to_table(x[who == k]), y[who == k].astype(np.float64))
        for k in range(int(who.max()) + 1)
    }
    marks: list[tuple[float, float]] = []
    users: list[int] = []
    total = Crowd.total

    def counted(crowd: Crowd, *given: Any) -> NDArray[np.int64]:
        opened = total(crowd, *given)
        users.append(len(crowd.cohort))
        return opened

    def mark(_: int, part: ModelPart | None) -> None:
        if part is None:  # of a user or an edge server
            return
        marks.append((time.perf_counter() - start, time.thread_time()))

    classes = np.unique(y).tolist()
    columns = {SERVER: no_rows(to_table(x[:1]).schema, len(classes))}
    run = Run(
        system=SYSTEM, options=options.own, common=options.common,
        roles=roles_of(SYSTEM, list(shards), None, options.own), data={**shards, **columns}, classes=classes,
        n_jobs=threads, progress=mark,
    )  # fmt: skip
    start = time.perf_counter()
    with patch.object(Crowd, "total", counted):
        played = train_in_threads(run, {})
    took = time.perf_counter() - start
    return TrainingOutcome(played.results[SERVER], played, marks, took, users)


# ---------------------------------------------------------------- accuracy


def deal(y: Labels, users: int, how: str, seed: int) -> NDArray[np.int64]:
    """Return which user gets each row, all of them as many rows: at random, or a run of rows sorted by label."""
    place = np.random.default_rng(seed).permutation(len(y))
    if how == BY_LABEL:
        place = np.argsort(np.lexsort((place, y)))
    return place * users // len(y)


def staged(part: ModelPart, x: Rows) -> Iterator[NDArray[np.float64]]:
    """Yield margins (n_rows, n_outputs) after each round."""
    forest = part.forest
    assert forest is not None
    n_outputs = forest.objective.n_outputs
    watched = pooled.watched(LabelledRows(to_table(x), np.zeros(len(x))), part.splits, THREADS)
    margins = np.full((len(x), n_outputs), forest.objective.base_margins)
    for first in range(0, len(forest.trees), n_outputs):
        watched.add_trees(forest.trees[first : first + n_outputs], margins)
        yield margins


def curve(part: ModelPart, x: Rows, y: Labels) -> list[float]:
    """Return the accuracy after each round."""
    return [float(np.mean((m[:, 0] > 0.0 if m.shape[1] == 1 else m.argmax(axis=1)) == y)) for m in staged(part, x)]


def log_losses(part: ModelPart, x: Rows, y: Labels) -> list[float]:
    """Return the mean log loss after each round."""
    return [mean_log_loss(m if m.shape[1] > 1 else np.hstack([np.zeros_like(m), m]), y) for m in staged(part, x)]


def mean_log_loss(margins: NDArray[np.float64], y: Labels) -> float:
    """Return the mean of -log p of each row's class; margins are of each class."""
    return float(np.mean(np.logaddexp.reduce(margins, axis=1) - margins[np.arange(len(y)), y]))


def apart(one: ModelPart, other: ModelPart, x: Rows) -> float:
    """Return the largest difference of two models' margins after any round."""
    return max(float(np.abs(a - b).max()) for a, b in zip(staged(one, x), staged(other, x), strict=True))


def check_small() -> None:
    """Check that 9 users get the same model hidden or not, however rows are dealt.

    Raises
    ------
    AssertionError
        When they do not.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 8)).astype(np.float32)
    y = np.digitize(x[:, 0] + x[:, 1] * x[:, 2], [-0.5, 0.5])
    models = {}
    for how, expose in ((AT_RANDOM, "model"), (AT_RANDOM, "nothing"), (BY_LABEL, "model")):
        options = fedxgb(3, n_estimators=4, expose=expose, feature_sample=5)
        models[how, expose] = train(x, y, deal(y, 9, how, 0), options).part
    for key in ((AT_RANDOM, "nothing"), (BY_LABEL, "model")):
        assert apart(models[AT_RANDOM, "model"], models[key], x) == 0.0, f"expected the same model, got another: {key}"
    print("9 users: the hidden model is the known one bit for bit, and so is that of rows dealt by label")


def reference(x: Rows, y: Labels, options: Options) -> ModelPart:
    """Train on all rows pooled, with the same settings."""
    given = options.common
    plain = BoostingOptions(
        n_estimators=given.n_estimators, min_split_loss=GAMMA, min_child_samples=given.fewest_rows,
        colsample_bytree=options.own.column_share(x.shape[1], given.colsample_bytree),
        random_state=given.random_state, **COMMON,
    )  # fmt: skip
    rows = LabelledRows(to_table(x), y.astype(np.float64))
    alone: Any = None  # no other party
    return pooled.train(
        RoleInput(
            party=alone, options=Pooled(), common=plain.checked(Pooled()), roles=Roles("pooled", {}, []), data=rows,
            classes=np.unique(y).tolist(), threads=THREADS,
        )
    )  # fmt: skip


def xgboost_curves(x: Rows, y: Labels, test: tuple[Rows, Labels], options: Options) -> tuple[list[float], list[float]]:
    """Return accuracy and mean log loss of XGBoost after each round."""
    given = options.common
    booster = xgboost.XGBClassifier(
        tree_method="hist", n_estimators=given.n_estimators, gamma=GAMMA, n_jobs=THREADS,
        colsample_bytree=options.own.column_share(x.shape[1], given.colsample_bytree),
        random_state=given.random_state, **COMMON,
    ).fit(x, y)  # fmt: skip
    rounds = [
        np.log(booster.predict_proba(test[0], iteration_range=(0, done + 1))) for done in range(given.n_estimators)
    ]
    accuracies = [float(np.mean(logs.argmax(axis=1) == test[1])) for logs in rounds]
    return accuracies, [mean_log_loss(logs, test[1]) for logs in rounds]


@dataclass(frozen=True, slots=True)
class Setting:
    """A data set, split for each seed, and the columns drawn for a tree."""

    data: Data
    split: list[tuple[NDArray[np.intp], NDArray[np.intp]]]
    feature_sample: int | None


@functools.cache
def setting_of(name: str) -> Setting:
    """Return "adult" or "mnist"."""
    if name == "adult":
        data = adult()
        return Setting(data, splits(data, ADULT_SEEDS), None)
    return Setting(mnist(), [(np.arange(60_000), np.arange(60_000, 70_000))], 78)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of results: what is trained, and what of it is left out in a quick run."""

    name: str
    lost: float
    how: str = AT_RANDOM
    leaf: int = 1
    seeds: int = 1
    quick: bool = False


def all_lines(quick: bool) -> list[Line]:
    """Return the lines of both data sets; the longest come first."""
    of_mnist = [Line("mnist", lost, quick=quick) for lost in LOST]
    of_mnist.append(Line("mnist", LOST[-1], BY_LABEL, quick=quick))
    of_adult = [Line("adult", lost, seeds=1 if quick else ADULT_SEEDS, quick=quick) for lost in LOST]
    of_adult += [Line("adult", LOST[-1], BY_LABEL, quick=quick), Line("adult", 0.0, leaf=20, quick=quick)]
    return of_mnist + of_adult


@dataclass(slots=True)
class Curves:
    """Accuracy after each round (seeds, rounds) of a line of results and of the two it is compared with, and losses."""

    ours: list[list[float]] = field(default_factory=list)
    pooled: list[list[float]] = field(default_factory=list)
    xgboost: list[list[float]] = field(default_factory=list)
    our_losses: list[list[float]] = field(default_factory=list)
    xgboost_losses: list[list[float]] = field(default_factory=list)


def accuracy(line: Line) -> tuple[dict, Curves]:
    """Train a line of results, and those it is compared with."""
    setting, curves, trained, gaps = setting_of(line.name), Curves(), [], []
    users, edges, rounds = (30, 3, 11) if line.quick else (300, 10, ROUNDS)
    for seed, (train_rows, test_rows) in enumerate(setting.split[: line.seeds]):
        used = train_rows[:3_000] if line.quick else train_rows
        x, y = setting.data.x[used].astype(np.float32), setting.data.y[used]
        test = setting.data.x[test_rows].astype(np.float32), setting.data.y[test_rows]
        options = fedxgb(
            edges, n_estimators=rounds, min_child_samples=line.leaf, dropout=line.lost, random_state=seed,
            feature_sample=setting.feature_sample,
        )  # fmt: skip
        # who drops out says so: nobody else is to be lost, on a busy machine either
        with patch.object(domain, "PATIENCE", PATIENT):
            trained.append(train(x, y, deal(y, users, line.how, seed), options, THREADS))
        plain = reference(x, y, options)
        gaps.append(apart(trained[-1].part, plain, test[0]))
        curves.ours.append(curve(trained[-1].part, *test))
        curves.our_losses.append(log_losses(trained[-1].part, *test))
        curves.pooled.append(curve(plain, *test))
        theirs_by_round, their_losses = xgboost_curves(x, y, test, options)
        curves.xgboost.append(theirs_by_round)
        curves.xgboost_losses.append(their_losses)
    ours, plain, theirs = ([each[-1] for each in of] for of in (curves.ours, curves.pooled, curves.xgboost))
    less = [mean(b - a for a, b in zip(ours, of, strict=True)) for of in (plain, theirs)]
    return {
        "data": setting.data.title,
        "users": users,
        "edges": edges,
        "rows dealt": line.how,
        "fewest rows of a leaf": line.leaf,
        "lost at every tenth round": line.lost,
        "seeds": len(ours),
        "accuracy": f"{mean(ours):.4f}",
        "sd": f"{stdev(ours):.4f}" if len(ours) > 1 else "",
        "pooled": f"{mean(plain):.4f}",
        "XGBoost": f"{mean(theirs):.4f}",
        "less than pooled": f"{less[0]:+.4f}",
        "less than XGBoost": f"{less[1]:+.4f}",
        f"both <= {NEAR}": verdict(max(less), NEAR),
        "margins from pooled": max(gaps),
        "fewest users in a sum": min(min(each.users) for each in trained),
        "sums": max(len(each.users) for each in trained),
        "s": mean(each.seconds for each in trained),
    }, curves  # fmt: skip


def draw_curves(title: str, by_lost: Mapping[float, Curves], quick: bool) -> None:
    """Draw test accuracy and log loss of a data set by round and share lost, and write them."""
    figure, panels = figures.panels([f"{title}: accuracy", f"{title}: log loss"])
    first, lines = by_lost[0.0], []
    shown = [("XGBoost", first.xgboost, first.xgboost_losses, figures.COLOURS["XGBoost"])]
    for (lost, curves), shade in zip(by_lost.items(), figures.SHADES, strict=True):
        shown.append((f"FedXGB, {100 * lost:.0f} % lost", curves.ours, curves.our_losses, shade))
    for label, *made, colour in shown:
        of_label = []
        for panel, seeds in zip(panels, map(np.array, made), strict=True):
            middle, sd = seeds.mean(axis=0), seeds.std(axis=0)
            figures.band(panel, np.arange(1, len(middle) + 1), middle, sd, label, color=colour)
            of_label += [middle, sd]
        lines += [
            {
                "data": title, "of": label, "round": k + 1, "accuracy": f"{a:.4f}", "sd": f"{b:.4f}",
                "log loss": f"{c:.4f}", "sd of log loss": f"{d:.4f}",
            }
            for k, (a, b, c, d) in enumerate(zip(*of_label, strict=True))
        ]  # fmt: skip
    for panel, unit in zip(panels, ("accuracy", "log loss"), strict=True):
        panel.set(xlabel="rounds", ylabel=unit)
        panel.legend(fontsize=8)
    name = f"fedxgb_curves_{title.lower()}"
    figures.save(figure, name, quick=quick)
    if not quick:
        write(name, lines)


def on_a_core(cores: Queue[int]) -> None:
    """Keep this process to a core of its own, and make it ready."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})
    compile_kernels()


def accuracy_part(quick: bool, of: str | None) -> None:
    """Measure accuracy on both data sets, or `of` one, a line at a time on each core: a crowd's threads share one."""
    spawn, n_cores = multiprocessing.get_context("spawn"), os.cpu_count() or 1
    cores, rows, drawn = spawn.Queue(), [], defaultdict(dict)
    for core in range(n_cores):
        cores.put(core)
    setting_of("adult")  # splits are drawn once
    lines = [line for line in all_lines(quick) if of in (None, line.name)]
    with ProcessPoolExecutor(min(n_cores, THREADS), spawn, on_a_core, (cores,)) as pool:
        for line, (row, curves) in zip(lines, pool.map(accuracy, lines), strict=True):
            rows.append(row)
            print(row, flush=True)
            if line.how == AT_RANDOM and line.leaf == 1:
                drawn[row["data"]][line.lost] = curves
    write_accuracy(rows, drawn, quick)


def write_accuracy(rows: Sequence[dict], drawn: Mapping[str, Mapping[float, Curves]], quick: bool) -> None:
    """Write lines in place of those of the same settings, and draw the curves of their data sets."""
    keys = ("data", "rows dealt", "fewest rows of a leaf", "lost at every tenth round")
    report("fedxgb_accuracy", rows, quick=quick, keys=keys)
    for title, by_lost in drawn.items():
        draw_curves(title, by_lost, quick)


# ---------------------------------------------------------------- costs


INSIDE: tuple[tuple[type, tuple[str, ...], str], ...] = (
    (UserSums, ("meet", "join"), "selection"),
    (DomainSums, ("choose",), "selection"),
    (SharedRows, ("__init__", "left", "values"), "prediction"),
    (HolderRows, ("take", "keep", "route", "value"), "prediction"),
    (HiddenModel, ("row_owners", "split", "finish"), "prediction"),
    (Dealer, ("serve",), "prediction"),
)
PATIENT = 3600.0  # seconds: of a thousand users on one busy core none is to count as lost
HEARD: dict[type[Message], str] = {Count: "set-up", RoundStart: "boosting"}


class Clock:
    """Splits the processor time of each role's thread among stages.

    Everybody hears `Count` as the search for bins begins and `RoundStart` as a tree does; what `INSIDE` names belongs
    to its stage whenever it is called.
    """

    def __init__(self) -> None:
        self.spent: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(STAGES, 0.0))
        self._own = threading.local()

    def turn(self, stage: str) -> str:
        """Begin a stage in this thread; return the one before."""
        own, now = self._own, time.thread_time()
        before: str = own.stage
        self.spent[own.name][before] += now - own.since
        own.stage, own.since = stage, now
        return before

    def role(self, play: Callable[[RoleInput], Any]) -> Callable[[RoleInput], Any]:
        """Wrap a role, which waits long for silent users."""

        def timed(inputs: RoleInput) -> Any:
            inputs.patience = PATIENT
            self._own.name, self._own.stage, self._own.since = inputs.party.name, "selection", time.thread_time()
            try:
                return play(inputs)
            finally:
                self.turn("selection")

        return timed

    def inside(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what belongs to a stage."""

        @functools.wraps(work)
        def timed(*arguments: Any, **named: Any) -> Any:
            before = self.turn(stage)
            try:
                return work(*arguments, **named)
            finally:
                self.turn(before)

        return timed

    def hearing(self, hear: Callable[[TranscriptDigest, Message], None]) -> Callable[[TranscriptDigest, Message], None]:
        """Wrap what everybody does with what the server told all."""

        def heard(own: TranscriptDigest, message: Message) -> None:
            if type(message) in HEARD:
                self.turn(HEARD[type(message)])
            hear(own, message)

        return heard

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time roles that begin meanwhile."""
        with ExitStack() as patches:
            timed = {name: self.role(SYSTEM.train[name]) for name in ROLES}
            patches.enter_context(patch.dict(cast(dict[str, Any], SYSTEM.train), timed))
            for owner, names, stage in INSIDE:
                for name in names:
                    patches.enter_context(patch.object(owner, name, self.inside(stage, getattr(owner, name))))
            patches.enter_context(patch.object(TranscriptDigest, "update", self.hearing(TranscriptDigest.update)))
            yield


@contextmanager
def few_switches() -> Iterator[None]:
    """Have threads that wait for the interpreter lock look for it seldom.

    They do so every 5 ms, and the time counts as theirs: of 500 users in threads of one process it was a fifth, which
    users on machines of their own do not spend.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.25)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def made_up(rows: int, columns: int) -> tuple[Rows, Labels]:
    """Return normal numbers, whose bins are as many as permitted, and labels that follow from them and from chance."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] * x[:, 2] + rng.normal(size=rows) > 0.0).astype(np.int64)


def role_of(name: str) -> str:
    return "server" if name == SERVER else "edge" if name.startswith("edge") else "user"


def sent(played: RunRecord, name: str, direction: str) -> float:
    """Return MB that a party sent or received."""
    return sum(e.nbytes for e in played.transcripts[name].entries if e.direction == direction) / 1e6


def costs(size: Size, columns: int) -> list[dict]:
    """Return a row per role of a tree of a hidden model, on one core."""
    x, y = made_up(size.rows, columns)
    clock, options = Clock(), fedxgb(size.edges, n_estimators=1, expose="nothing")
    with one_core(), few_switches(), clock.running():
        trained = train(x, y, deal(y, size.users, AT_RANDOM, 0), options)
    result = []
    for role in ROLES:
        names = [name for name in clock.spent if role_of(name) == role]
        totals = [sum(clock.spent[name].values()) for name in names]
        result.append({
            "users": size.users,
            "edges": size.edges,
            "users of a domain": size.users / size.edges,
            "rows": size.rows,
            "columns": columns,
            "role": role,
            **{f"{stage} s": mean(clock.spent[name][stage] for name in names) for stage in STAGES},
            "total s": mean(totals),
            "total s, most": max(totals),
            "MB sent": mean(sent(trained.played, name, "sent") for name in names),
            "MB received": mean(sent(trained.played, name, "received") for name in names),
            "sums": len(trained.users),
            "fewest users in a sum": min(trained.users),
            "s on one core": trained.seconds,
        })  # fmt: skip
    return result


def table_three(rows: Sequence[dict]) -> list[dict]:
    """Put the stages of the three roles beside the published seconds."""
    by_role = {row["role"]: row for row in rows}
    return [
        {
            "stage": stage,
            **{f"{role} s": by_role[role][f"{stage} s"] for role in ROLES},
            **{f"{role}, published s": value for role, value in zip(ROLES, published, strict=True)},
        }
        for stage, published in PUBLISHED.items()
    ]


def with_growth(rows: Sequence[dict], by: str) -> list[dict]:
    """Add, for each role, the powers of `by` with which seconds and bytes grew since the row before; and verdicts."""
    result = []
    for role, bar in (("user", 1.0), ("edge", 2.0 if by == "users" else 0.0), ("server", math.inf)):
        of_role = sorted((row for row in rows if row["role"] == role), key=lambda row: row[by])
        result.append({**of_role[0], "power s": "", "power MB": "", "bar": ""})
        for before, row in pairwise(of_role):
            ratio = math.log(row[by] / before[by])
            power_s = math.log(row["total s"] / before["total s"]) / ratio
            power_mb = math.log(megabytes(row) / megabytes(before)) / ratio
            kept = "" if bar == math.inf else verdict(max(power_s, power_mb), bar)
            result.append({**row, "power s": power_s, "power MB": power_mb, "bar": kept})
    return result


def megabytes(row: dict) -> float:
    return row["MB sent"] + row["MB received"]


def draw_costs(by_users: Sequence[dict], by_edges: Sequence[dict], quick: bool) -> None:
    figure, panels = figures.panels(
        ["seconds by users", "MB sent and received by users", "seconds by edge servers", "MB by edge servers"]
    )
    colours = dict(zip(ROLES, figures.SHADES, strict=False))
    for k, panel in enumerate(panels):
        rows, by = (by_users, "users") if k < 2 else (by_edges, "edges")
        for role in ROLES:
            shown = [row for row in rows if row["role"] == role]
            values = [megabytes(row) if k % 2 else row["total s"] for row in shown]
            panel.plot([row[by] for row in shown], values, "o-", color=colours[role], label=f"each {role}")
        panel.set(xlabel=by, ylabel="MB" if k % 2 else "own seconds", yscale="log")
        panel.legend(fontsize=8)
    figures.save(figure, "fedxgb_costs", quick=quick)


def costs_part(quick: bool) -> None:
    """Measure the paper's table, and growth by users and by edge servers."""
    columns = 10 if quick else 100
    whole = Size(30, 3, 1_500) if quick else Size(300, 10, 50_000)
    report("fedxgb_costs", table_three(costs(whole, columns)), quick=quick)
    each, base = (50, Size(36, 3, 0)) if quick else (50, Size(300, 10, 0))
    of_users = (36, 72) if quick else (100, 200, 300, 500, 1000)
    of_edges = (3, 6) if quick else (3, 5, 7, 10, 15, 20)
    by_users = [row for n in of_users for row in costs(Size(n, base.edges, n * each), columns)]
    by_users = with_growth(by_users, "users")
    report("fedxgb_users", by_users, quick=quick)
    by_edges = [row for n in of_edges for row in costs(Size(base.users, n, base.users * each), columns)]
    by_edges = with_growth(by_edges, "edges")
    report("fedxgb_edges", by_edges, quick=quick)
    draw_costs(by_users, by_edges, quick)


# ---------------------------------------------------------------- a tree


def one_tree(size: Size, columns: int, **chosen: str) -> dict[str, float]:
    """Train a tree on all cores; return seconds, and processor seconds of the server's and the busiest edge's."""
    x, y = made_up(size.rows, columns)
    clock, options = Clock(), fedxgb(size.edges, n_estimators=1, **chosen)
    with clock.running():
        trained = train(x, y, deal(y, size.users, AT_RANDOM, 0), options)
    (bins, server_bins), (grown, server_grown) = trained.marks
    edges = [clock.spent[name]["prediction"] for name in clock.spent if role_of(name) == "edge"]
    return {
        "keys and bins s": bins,
        "sums": len(trained.users),
        "tree s": trained.seconds - bins,
        "until the server has it s": grown - bins,
        "server's own s, keys and bins": server_bins,
        "server's own s, tree": server_grown - server_bins,
        "an edge's own s on shares": max(edges),
        "fewest users in a sum": min(trained.users),
    }


def tree_part(quick: bool) -> list[dict]:
    """Time a tree with and without prediction on shares, which is what the hidden one takes longer."""
    size, columns = (Size(30, 3, 1_500), 10) if quick else (Size(300, 10, 50_000), 100)
    tries = 1 if quick else 3
    known, hidden, shamir = (
        undisturbed(functools.partial(one_tree, size, columns, **chosen), tries)
        for chosen in ({"expose": "model"}, {"expose": "nothing"}, {"expose": "nothing", "comparison": "shamir"})
    )
    common = {"users": size.users, "edges": size.edges, "rows": size.rows, "columns": columns}
    return [
        {
            **common, "model": "known to users", **known, "prediction on shares s": "",
            "tree <= 10 s": verdict(known["tree s"], 10.0),
            "server's own <= 1 s": verdict(known["server's own s, tree"], 1.0),
        },
        *(
            {
                **common, "model": name, **found, "prediction on shares s": found["tree s"] - known["tree s"],
                "tree <= 10 s": "", "server's own <= 1 s": verdict(found["server's own s, tree"], 1.0),
            }
            for name, found in (("hidden", hidden), ("hidden, Shamir shares at all", shamir))
        ),
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part alone")
    parser.add_argument("--data", choices=("adult", "mnist"), help="of --accuracy: this data set alone")
    options = parser.parse_args()
    every = not any(vars(options)[part] for part in PARTS)
    compile_kernels()
    check_small()
    if every or options.tree:
        report("fedxgb_tree", tree_part(options.quick), quick=options.quick)
    if every or options.costs:
        costs_part(options.quick)
    if every or options.accuracy:
        accuracy_part(options.quick, options.data)


if __name__ == "__main__":
    main()
