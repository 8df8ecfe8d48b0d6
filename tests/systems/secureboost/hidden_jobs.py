"""Both ends of a tree on shared rows, played in one thread, and the plain grower's tree on the same job."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from crypto.sealed.test_sealed import play
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.shared_sums import ServedColumns, SharedSums
from treaty.crypto.transfer.hidden_best import WEIGHT_BITS, SplitTerms
from treaty.crypto.transfer.shared_pieces import NUMBER_BITS
from treaty.crypto.transfer.stock import Steps, Transfers
from treaty.messaging.messages import Array, unpack
from treaty.systems.secureboost.hidden_further import Answers, FurtherTree, Padded, Relaying, _FurtherTrees
from treaty.systems.secureboost.hidden_setup import losses_of
from treaty.systems.secureboost.hidden_tree import HiddenEnd, HiddenLevel, add_weights, grow_together
from treaty.systems.vertical.messages import OpenedStep, SealedStep
from treaty.systems.vertical.sealed_candidates import Candidates
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import ColumnSource, SplitSearch, grow_tree
from treaty.trees.ensemble import Tree
from treaty.trees.objectives import make_objective
from treaty.trees.splits import SplitRules

FRACTION, UNIT = 16, 2.0**-12
WHOLE = (1 << NUMBER_BITS) - 1


@dataclass
class Columns:
    """A party's columns: codes uint8 (n, features), whose number of bins is a missing value."""

    codes: np.ndarray
    offsets: np.ndarray
    categorical: np.ndarray
    missing: np.ndarray

    @classmethod
    def draw(cls, n: int, features: int, bins: int, rng: np.random.Generator) -> Columns:
        sizes = rng.integers(1, bins + 1, features)
        gaps = rng.random(features) < 0.4
        codes = np.zeros((n, features), np.uint8)
        for k, (size, gap) in enumerate(zip(sizes, gaps, strict=True)):
            codes[:, k] = rng.integers(0, size + gap, n)
        missing = (codes == sizes).any(axis=0)
        offsets = np.concatenate([[0], np.cumsum(sizes + 1)]).astype(np.int32)
        return cls(codes, offsets, rng.random(features) < 0.3, missing)

    def candidates(self, columns: np.ndarray) -> Candidates:
        return Candidates(self.offsets, self.categorical, self.missing, columns, 1000)


class Seeds:
    """What the partner and further parties know of pads; `drawn` are the names of streams, by who drew them."""

    def __init__(self) -> None:
        self.drawn = defaultdict[str, list[str]](list)

    def of(self, name: str) -> Any:
        def stream(other: str, what: str) -> Keystream:
            self.drawn[f"{name} {other}"].append(what)
            return Keystream(hashlib.sha256(" ".join([*sorted([name, other]), what]).encode()).digest())

        return SimpleNamespace(stream=stream)


class Links:
    """The active party's links with further parties, who answer at once; `sent` are all messages, with both names."""

    def __init__(self, job: Job, seeds: Seeds) -> None:
        inputs = [
            SimpleNamespace(
                party=SimpleNamespace(name=name, peers=("A",)), others=["B", *job.further], eval_sets=[], threads=1,
                common=SimpleNamespace(depth=job.depth),
                rows=SimpleNamespace(table=SimpleNamespace(n_rows=job.n)),
            )
            for name in job.further
        ]  # fmt: skip
        self.trees: dict[str, Any] = {
            name: _FurtherTrees(
                of,
                SimpleNamespace(codes=own.codes, own=own, bins=None, note_splits=lambda *given: None),
                table,
                seeds.of(name),
            )
            for name, of, own, table in zip(job.further, inputs, job.own[2:], job.tables, strict=True)
        }
        self.sent: list[tuple[str, str, list[np.ndarray]]] = []
        self._answers = defaultdict[str, deque[Any]](deque)

    def send(self, name: str, message: Any) -> None:
        self.sent.append(("A", name, [] if isinstance(message, FurtherTree) else unpack(message.payload, "", "")))
        of = self.trees[name]
        kind = {FurtherTree: of.begin, SealedStep: of.answer, OpenedStep: of.win}[type(message)]
        if (answer := kind(message)) is not None:
            self._answers[name].append(answer)

    def receive(self, name: str, kind: type) -> Any:
        message = self._answers[name].popleft()
        self.sent.append((name, "A", unpack(message.payload, "", "")))
        assert type(message) is kind
        return message


class Job:
    """A job of one active party (role 0), a passive one, and perhaps further ones; labels are 0 and 1.

    `own` are each one's columns, in this order; the active party's, the partner's and further parties' `places` among
    owners are the same by default, and with `swapped` the partner is first. Trees have the `columns` of each, by
    default all, and the rows that are `sampled`.
    """

    def __init__(
        self, ends: tuple[Transfers, Transfers], own: list[Columns], labels: np.ndarray, *, swapped: bool = False,
        places: list[int] | None = None, step: int = 1, columns: list[np.ndarray] | None = None,
        sampled: np.ndarray | None = None, weights: np.ndarray | None = None, objective: str = "logistic_pieces",
        **rules: Any,
    ) -> None:  # fmt: skip
        given = {"learning_rate": 0.3, "max_depth": 3, "min_child_samples": 1, "min_child_weight": 1.0, **rules}
        self.loss = make_objective(objective, labels.astype(float), weights, fractional_bits=FRACTION)
        self.rules = SplitRules(
            grad_unit=self.loss.grad_unit, hess_unit=self.loss.hess_unit, min_gain=0.0, onehot_below=1000,
            leaf_unit=self.loss.leaf_unit * self.loss.grad_clip, **given,
        )  # fmt: skip
        self.own, self.labels, self.n = own, labels, len(labels)
        self.places = places or [int(swapped), 1 - swapped, *range(2, len(own))]
        self.order = np.argsort(self.places).tolist()
        self.further = [f"C{k}" for k in range(len(own) - 2)]
        self.depth = self.rules.max_depth
        self.weights = weights
        self.bounds = SumsBounds(self.n, self.loss.grad_bound, self.loss.hess_bound)
        terms = SplitTerms(
            self.rules.ridge, self.rules.least_hess, self.rules.min_child_samples, int(self.rules.threshold_in_units)
        )  # fmt: skip
        everything = [np.arange(len(of.categorical), dtype=np.int32) for of in own]
        self.columns, self.sampled = everything if columns is None else columns, sampled
        candidates = [of.candidates(some) for of, some in zip(own, self.columns, strict=True)]
        ordered = [candidates[k] for k in self.order]
        self.ends = []
        for role, transfers in enumerate(ends):
            others = [int(of.offsets[-1]) for of in (own[1 - role], *own[2:])]
            sums = SharedSums(self.bounds, own[role].codes, own[role].offsets, others, bytes(32))
            (loss,) = losses_of(self.loss, *(() if role else (labels, weights)))
            self.ends.append(HiddenEnd(
                role, transfers, sums, self.bounds, loss, own[role].codes, ordered, self.places, terms,
                self.rules.whole_rate, self.depth, step,
            ))  # fmt: skip
        play(*(end.sums.exchange_hints() for end in self.ends))
        self.tables = [ServedColumns(self.bounds, of.codes, of.offsets, bytes(32), 1, further=True) for of in own[2:]]
        pieces = ([piece] for table in self.tables for piece in table.hint())
        play(self.ends[0].sums.pass_hints(pieces), self.ends[1].sums.pass_hints(None))
        self.seeds, self.trees = Seeds(), 0
        self.links = Links(self, self.seeds)

    @classmethod
    def draw(cls, ends: tuple[Transfers, Transfers], rng: np.random.Generator, further: int = 0, **rules: Any) -> Job:
        """Draw a small job: columns of either party or of both, of one bin and more, categories, and missing values.

        So many `further` parties have one column and more.
        """
        n, bins = int(rng.integers(1, 200)), int(rng.integers(1, 8))
        features = (*[(0, 2), (3, 0), (1, 1), (2, 3)][rng.integers(4)], *rng.integers(1, 4, further).tolist())
        own = [Columns.draw(n, count, bins, rng) for count in features]
        signal = sum((of.codes.sum(axis=1) for of in own), np.zeros(n)) + rng.normal(0, bins, n)
        given = {
            "max_depth": int(rng.integers(1, 7)), "learning_rate": float(rng.choice([0.05, 0.3, 1.0])),
            "min_child_samples": int(rng.choice([1, 1, 5, 40, 1000])), "reg_lambda": float(rng.choice([0.01, 1.0, 20])),
            "min_child_weight": float(rng.choice([1e-3, 1.0, 5.0])),
            "min_split_loss": float(rng.choice([0.0, 0.0, 0.1, 1.0, 3.0, 1e6])),
        }  # fmt: skip
        labels = (signal > np.median(signal)).astype(np.int64)
        if rules.get("objective") == "squared_error_steps":
            labels = np.rint(37.0 * signal).astype(np.int64)
        columns = sampled = None
        if rng.random() < 0.5:
            kept = rng.integers(0, 2, sum(features)).astype(np.bool_)
            kept[rng.integers(len(kept))] = True
            columns = [np.flatnonzero(of).astype(np.int32) for of in np.split(kept, np.cumsum(features)[:-1])]
            sampled = rng.random(n) < 0.7
            sampled[rng.integers(n)] = True
        weights = rng.integers(1, 1 + rng.choice([2, 5, 255]), n) if rng.random() < 0.3 else None
        places = rng.permutation(len(own)).tolist()
        return cls(
            ends, own, labels, places=places, step=int(rng.integers(1, 300)), columns=columns,
            sampled=sampled, weights=weights, **given | rules,
        )  # fmt: skip

    def share(self, margins: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        masks = rng.integers(0, 1 << NUMBER_BITS, self.n)
        return [masks.astype(np.uint32), ((margins - masks) & WHOLE).astype(np.uint32)]

    def tree(self, role: int, margins: list[np.ndarray]) -> Steps[Any]:
        (found,) = yield from trees_of([self], role, [margins])
        return found

    def grown(self, margins: list[np.ndarray]) -> Grown:
        (found,) = grown_together([self], [margins])
        return found

    def with_labels(self, labels: np.ndarray) -> Job:
        """Return the job on other labels, with the same ends."""
        out = copy(self)
        out.labels, (first, last) = labels, self.ends
        out.ends = [replace(first, loss=replace(first.loss, labels=labels << FRACTION)), last]
        return out

    def derivatives(self, margins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the plain grad and hess of margins, whole numbers of 2^-12."""
        weights = None if self.weights is None else self.weights.astype(float)
        whole = margins[:, None] * self.rules.leaf_unit + self.loss.base_margins
        grad, hess, clipped = self.loss.gradients(whole, self.labels.astype(float), weights)
        assert clipped == 0
        return grad[0], hess[0]

    def plain(self, margins: np.ndarray) -> tuple[Tree, list[list[tuple[int, np.ndarray]]], np.ndarray]:
        """Return the plain tree, each owner's splits as (column, bins that go left), and the rows' leaves."""
        recorded: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.own]

        def record(place: int) -> Any:
            return lambda feature, left: recorded[place].append((feature, left.copy())) or len(recorded[place]) - 1

        ordered = [self.own[k] for k in self.order]
        sources = [ColumnSource(of.codes, of.offsets, of.categorical, record(k)) for k, of in enumerate(ordered)]
        starts = np.cumsum([0, *(len(of.categorical) for of in ordered)])
        columns = np.concatenate([self.columns[k] + at for k, at in zip(self.order, starts, strict=False)])
        rows = None if self.sampled is None else np.flatnonzero(self.sampled).astype(np.int32)
        sample = TreeSample(*self.derivatives(margins), rows, columns.astype(np.int32))
        tree, nodes = grow_tree(SplitSearch(sources, sample, self.rules), sample, self.rules)
        leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
        members, starts = nodes.rows(leaves, sampled=False)
        leaf = np.empty(self.n, np.int64)
        leaf[members] = np.repeat(leaves, np.diff(starts))
        return tree, recorded, leaf


def trees_of(jobs: list[Job], role: int, margins: list[list[np.ndarray]], numbers: Sequence[int] = ()) -> Steps[Any]:
    """Grow a tree of each job at an end; with further parties, the trees have these numbers there."""
    shares = np.stack([of[role] for of in margins])
    ends, answers = [job.ends[role] for job in jobs], Answers(jobs[0].links, numbers)
    for k, (job, number) in enumerate(zip(jobs, numbers, strict=False)):
        candidates = [len(of.candidates(some)) for of, some in zip(job.own[2:], job.columns[2:], strict=True)]
        dealings: Any = Relaying(answers, job.further, number, [job.n], candidates)
        if role:
            dealings = Padded(job.seeds.of("B"), job.further, number, [job.n], candidates)
        ends[k] = replace(ends[k], further=dealings if job.further else None)
    return grow_together(ends, shares, [job.sampled for job in jobs])


def begun(jobs: list[Job]) -> list[int]:
    """Begin a tree of each job at further parties, which all jobs have in common; return their numbers."""
    first = jobs[0].trees
    for job in jobs:
        jobs[0].trees += 1
        for name, columns in zip(job.further, job.columns[2:], strict=True):
            job.links.send(name, FurtherTree(Array.of(columns)))
    return list(range(first + 1, first + 1 + len(jobs)))


def grown_together(jobs: list[Job], margins: list[list[np.ndarray]]) -> list[Grown]:
    """Grow a tree of each job, all at once."""
    numbers = begun(jobs)
    found = play(*(trees_of(jobs, role, margins, numbers) for role in (0, 1)))
    pairs = zip(jobs, numbers, strict=True)
    won = [[job.links.trees[name]._trees[number].won for name in job.further] for job, number in pairs]
    weights = [
        (one[2] + other[2]).view(np.int64) - (1 << WEIGHT_BITS - 1) for one, other in zip(*found, strict=True)
    ]  # fmt: skip
    shares = [np.stack([of[role] for of in margins]) for role in (0, 1)]
    after = play(*(add_weights(found[k], shares[k], weights if k == 0 else None) for k in (0, 1)))
    nodes = [(one[1].share ^ other[1].share).astype(np.int64) for one, other in zip(*found, strict=True)]
    return [
        Grown([of[k][0] for of in found], nodes[k], weights[k], [of[k] for of in after], won[k])
        for k in range(len(jobs))
    ]  # fmt: skip


@dataclass
class Grown:
    """A tree of shared rows, opened: both ends' levels, the rows' nodes, leaf weights, and shares of new margins.

    `won` are the columns and cuts of each further party's splits, in the order of levels and nodes.
    """

    levels: list[list[HiddenLevel]]
    node: np.ndarray
    weights: np.ndarray
    margins: list[np.ndarray]
    won: list[list[tuple[int, np.ndarray]]]

    @property
    def opened(self) -> np.ndarray:
        found = ((self.margins[0] + self.margins[1]) & WHOLE).astype(np.int64)
        return np.where(found >> NUMBER_BITS - 1, found - (1 << NUMBER_BITS), found)


def assert_equal(job: Job, margins: np.ndarray, grown: Grown) -> Tree:
    """Fail unless owners, columns, cuts, rows of leaves, weights and margins are the plain grower's."""
    tree, recorded, leaf = job.plain(margins)
    splits: list[list[list[Any]]] = [[] for _ in job.own]
    for role, of in enumerate(grown.levels):
        splits[job.places[role]] = [list(zip(level.columns.tolist(), level.left_bins, strict=True)) for level in of]
    for place, won in zip(job.places[2:], grown.won, strict=True):
        rest = list(won)
        counts = [np.count_nonzero(level.owner == place) for level in grown.levels[0]]
        splits[place] = [[rest.pop(0) for _ in range(count)] for count in counts]
        assert not rest

    def compare(node: int, level: int, number: int) -> None:
        owner = {int(of[level].owner[number]) for of in grown.levels} if level < job.depth else {-1}
        if tree.left[node] < 0:
            assert owner == {-1}
            last = number << job.depth - level
            assert np.array_equal(grown.node == last, leaf == node)
            assert grown.weights[last] * job.rules.leaf_unit == tree.value[node]
            return
        (place,) = owner
        assert place == tree.source[node]
        column, left = splits[place][level].pop(0)
        plain_column, plain_left = recorded[place][tree.record[node]]
        assert column == plain_column
        assert np.array_equal(left[: len(plain_left)], plain_left[: len(left)])
        waiting.append((int(tree.left[node]), level + 1, 2 * number))
        waiting.append((int(tree.left[node]) + 1, level + 1, 2 * number + 1))

    waiting = [(0, 0, 0)]
    for at in waiting:
        compare(*at)
    assert not any(any(levels) for levels in splits)  # no further splits
    assert np.array_equal(grown.opened, margins + grown.weights[grown.node])
    return tree
