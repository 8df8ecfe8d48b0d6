"""The boosting loop: draw rows and columns, compute gradients, grow a tree, add it (Chen & Guestrin 2016)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np

from treaty.machine.arrays import Floats, Int32s, Integers
from treaty.trees.ensemble import LeafRows, Tree, refreshed
from treaty.trees.growth import RowPartition
from treaty.trees.objectives import Objective, check_watched, evaluate, higher_is_better
from treaty.trees.outputs import trees_of_outputs
from treaty.trees.splits import SplitRules

# share by which the loss of training rows may rise before the user is warned
_RISE = 0.05


class NoMoreTrees(Exception):
    """Ends a training after a round, for example by a user's callback."""


class WatchedRows(Protocol):
    """Rows whose metrics are computed after each round of a training: an `EvalSet`, for example."""

    name: str

    def begin(self, forest: Forest, metrics: Sequence[str]) -> Sequence[str]:
        """Begin with the trees so far; return the metrics of each round, `metrics` if there are any."""

    def measure(self, forest: Forest, new: Sequence[Tree]) -> Mapping[str, float]:
        """Return the metrics after a round, whose trees are the last of `forest`."""


@dataclass(slots=True)
class EvalSet:
    """Labelled rows watched during training.

    ``add_trees(trees, margins)`` walks the rows down the new trees and adds to margins (n_rows, n_outputs), which begin
    with `base_margin` where rows have margins of their own.
    """

    name: str
    y: Floats
    weight: Floats | None
    add_trees: Callable[[Sequence[Tree], Floats], None]
    base_margin: Floats | None = None
    _margins: Floats = field(init=False, repr=False)

    def begin(self, forest: Forest, metrics: Sequence[str]) -> Sequence[str]:
        """See `WatchedRows`; without `metrics`, the loss's own."""
        objective, names = forest.objective, metrics or [forest.objective.metric]
        start = objective.base_margins if self.base_margin is None else self.base_margin
        self._margins = np.full((len(self.y), objective.n_outputs), start)
        check_watched(names, self.y, max(2, objective.n_outputs))
        if self.weight is not None:
            objective.check_weights(self.y, self.weight)
        if forest.trees:
            self.add_trees(forest.trees, self._margins)
        return names

    def measure(self, forest: Forest, new: Sequence[Tree]) -> Mapping[str, float]:
        """See `WatchedRows`."""
        self.add_trees(new, self._margins)
        names = forest.history[self.name]
        return {name: evaluate(name, forest.objective, self._margins, self.y, self.weight) for name in names}


@dataclass(slots=True)
class Forest:
    """A boosted ensemble, filled during training.

    Tree i adds to output ``i % objective.n_outputs``; its source s is the party ``sources[s]``. A round has `parallel`
    trees of each output. `classes` are the labels by class number (None: regression), `history` each eval set's metrics
    after each round, `best_round` the rounds kept by early stopping, `clipped_rows` the most rows of one round whose
    gradient was clipped, `losses` the loss of training rows after some numbers of rounds, `diverged` a warning if it
    rose. With `base_margin`, rows start from margins of their own, which have to be added to those of the trees. The
    first `before` rounds are of an earlier model; `history` begins after them.
    """

    objective: Objective
    sources: tuple[str, ...]
    classes: list[str | int | float | bool] | None = None
    trees: list[Tree] = field(default_factory=list)
    history: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    best_round: int | None = None
    clipped_rows: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    diverged: str = ""
    base_margin: bool = False
    parallel: int = 1
    before: int = 0

    @property
    def trees_a_round(self) -> int:
        """Trees of all outputs that a round adds."""
        return self.objective.n_outputs * self.parallel

    @property
    def rounds(self) -> int:
        """Finished rounds."""
        return len(self.trees) // self.trees_a_round

    @property
    def covered(self) -> bool:
        """Whether nodes have covers; they have none if rows of nodes are hidden, or several participants'."""
        return all(tree.count[0] > 0 or tree.cover[0] > 0.0 for tree in self.trees)

    @property
    def has_gains(self) -> bool:
        """Whether splits have gains; under hidden rows nobody knows them."""
        # under noise, single splits may gain nothing
        return any(tree.gain.any() for tree in self.trees) or not any(tree.left[0] >= 0 for tree in self.trees)

    def best_of(self, name: str, min_delta: float = 0.0) -> int:
        """Return the number of rounds that is best by an eval set's last metric; of equally good ones the fewest.

        A later round is better only if it improves the metric by more than `min_delta`.
        """
        metric, values = list(self.history[name].items())[-1]
        sign = -1.0 if higher_is_better(metric, self.objective) else 1.0
        best = 0
        for at, value in enumerate(values):
            # held-out rows may be unknown in the first rounds
            if math.isnan(values[best]) or sign * values[best] - min_delta > sign * value:
                best = at
        return self.before + best + 1

    @property
    def best_watched(self) -> int | None:
        """`best_round`, counted from the first round in `history`."""
        return None if self.best_round is None else self.best_round - self.before

    def cut(self, rounds: int) -> None:
        """Drop all rounds but the first `rounds`."""
        del self.trees[rounds * self.trees_a_round :]
        self.history = {
            name: {metric: values[: max(0, rounds - self.before)] for metric, values in of.items()}
            for name, of in self.history.items()
        }
        self.losses = {after: loss for after, loss in self.losses.items() if after <= rounds}


@dataclass(frozen=True, slots=True)
class RoundState:
    """What boosting needs besides the trees to continue after a round as if it had never stopped.

    `rounds` are finished. `margins`, float64 (n_outputs, n_rows), are those of the training rows, which boosting
    continues to change: copy them to keep them. `random_state` is the sampling generator's state as JSON.
    """

    rounds: int
    margins: Floats
    random_state: str


@dataclass(frozen=True, slots=True)
class OneSide:
    """Gradient-based one-side sampling (Ke et al., LightGBM, NeurIPS 2017, Algorithm 2).

    The `top_rate` share of rows with the largest gradients is kept; `other_rate` of all rows is drawn from the others,
    whose gradients count ``(1 - top_rate) / other_rate`` times.
    """

    top_rate: float
    other_rate: float

    @property
    def factor(self) -> float:
        """The multiplier of the drawn rows' gradients."""
        return (1.0 - self.top_rate) / self.other_rate

    def draw(self, rng: np.random.Generator, grad: Integers, hess: Integers) -> tuple[Int32s, Integers, Integers]:
        """Return the sampled rows, ascending, and all rows' grad and hess, multiplied and rounded at the drawn ones."""
        n_rows = len(grad)
        order = np.argsort(-np.abs(grad), kind="stable")
        n_top = round(self.top_rate * n_rows)
        n_others = min(max(1, round(self.other_rate * n_rows)), n_rows - n_top)
        others = rng.choice(order[n_top:], n_others, replace=False)
        grad, hess = grad.copy(), hess.copy()
        grad[others] = np.rint(grad[others] * self.factor)
        hess[others] = np.rint(hess[others] * self.factor)
        return np.sort(np.concatenate([order[:n_top], others])).astype(np.int32), grad, hess


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostingPlan:
    """How many rounds there are, and which rows and columns each tree is grown on.

    `n_columns` are those of all parties; column sampling draws among them, the same in every transport. Rows are drawn
    by `subsample` or by `one_side`. With `early_stopping_rounds`, training stops when the last eval set's last metric
    has not improved by more than `early_stopping_min_delta` for so many rounds, and trees after the best round are
    dropped. `metrics` are those of eval sets, by default the loss's own. With `multi_output` one structure is grown for
    all outputs of a round (`trees.outputs`).
    """

    n_columns: int
    n_estimators: int = 20
    subsample: float = 1.0
    colsample_bytree: float = 1.0
    one_side: OneSide | None = None
    random_state: int | None = None
    early_stopping_rounds: int | None = None
    early_stopping_min_delta: float = 0.0
    metrics: Sequence[str] = ()
    multi_output: bool = False


@dataclass(frozen=True, slots=True)
class TreeSample:
    """One tree's gradients, int64 (n_rows,) or (K, n_rows), sampled rows (None: all) and columns, both ascending."""

    grad: Integers
    hess: Integers
    rows: Int32s | None
    columns: Int32s

    @property
    def totals(self) -> Integers:
        """The root's sum of grad, sum of hess, of each output in turn, and number of sampled rows."""
        among = slice(None) if self.rows is None else self.rows
        sums = np.stack([of[..., among].sum(axis=-1) for of in (self.grad, self.hess)], axis=-1).ravel()
        return np.append(sums, self.grad.shape[-1] if self.rows is None else len(self.rows))

    def partition(self, threads: int = 1) -> RowPartition:
        """Return all rows of the table in the root."""
        return RowPartition(self.grad.shape[-1], self.rows, threads)


class RowsOfLeaves(Protocol):
    """Which rows are in which leaf of a finished tree: a `RowPartition`, for example."""

    def rows(self, nodes: Int32s, *, sampled: bool) -> tuple[Int32s, Integers]: ...
    def add_to(self, margins: Floats, leaves: Int32s, values: Floats) -> None: ...


class Rounds:
    """The rounds of a training whose margins are elsewhere: eval sets, metrics, early stopping.

    Iterate over it: each item is an empty list, to which the body of the loop adds the round's trees, one per output,
    and again as often as the forest is `parallel`. The round is finished when the next one is requested.
    ``after_round(rounds)`` gets the number of finished rounds, and may raise `NoMoreTrees`. Finished rounds are in
    `forest` even after an error; otherwise leave the loop by `stop`.

    Examples
    --------
    ::

        rounds = Rounds(forest, n_estimators=20)
        for trees in rounds:
            if budget_is_spent():
                rounds.stop()
                continue
            trees += grow_a_round()
    """

    def __init__(
        self, forest: Forest, n_estimators: int, *, eval_sets: Sequence[WatchedRows] = (),
        early_stopping_rounds: int | None = None, early_stopping_min_delta: float = 0.0, metrics: Sequence[str] = (),
        after_round: Callable[[int], None] = lambda rounds: None,
    ) -> None:  # fmt: skip
        self.forest, self.n_estimators, self._eval_sets = forest, n_estimators, eval_sets
        self._patience, self._min_delta = early_stopping_rounds if eval_sets else None, early_stopping_min_delta
        self._metrics, self._after_round = metrics, after_round
        self._stopped = False

    def stop(self) -> None:
        """End the training with the rounds finished so far; the trees of the current round are dropped."""
        self._stopped = True

    def __iter__(self) -> Iterator[list[Tree]]:
        forest = self.forest
        for e in self._eval_sets:
            forest.history.setdefault(e.name, {name: [] for name in e.begin(forest, self._metrics)})
        for done in range(forest.rounds + 1, self.n_estimators + 1):
            if self._patience is not None and done > forest.before + 1:
                forest.best_round = forest.best_of(self._eval_sets[-1].name, self._min_delta)
                if done - 1 - forest.best_round >= self._patience:
                    break
            new: list[Tree] = []
            yield new
            if self._stopped:
                break
            forest.trees.extend(new)
            for e in self._eval_sets:
                found = e.measure(forest, new)
                for name, values in forest.history[e.name].items():
                    values.append(found[name])
            try:
                self._after_round(done)
            except NoMoreTrees:
                break
        if self._patience is not None:
            forest.best_round = forest.best_of(self._eval_sets[-1].name, self._min_delta)
            del forest.trees[forest.best_round * forest.trees_a_round :]


class BoostingRound:
    """One round of a `Boosting`: for each of its `trees` the caller grows a tree and adds it."""

    def __init__(self, boosting: Boosting, number: int, new: list[Tree]) -> None:
        # of finished rounds before this one
        self.number = number
        self._boosting, self._new = boosting, new

    def trees(self) -> Iterator[TreeSample]:
        """Compute gradients, then yield what each tree is grown on; `add` must be called before the next."""
        of, n_rows = self._boosting, len(self._boosting.y)
        grad, hess, clipped = of.forest.objective.gradients(of.margins.T, of.y, of.weight, of.threads)
        of.forest.clipped_rows = max(of.forest.clipped_rows, clipped)
        # leaf values by residuals are those before the round, for all trees of it
        refreshed = of.forest.parallel > 1 and of.forest.objective.refreshes_leaves
        self._before = of.margins.copy() if refreshed else of.margins
        together = of.plan.multi_output and len(grad) > 1
        for number in range(of.forest.parallel if together else of.forest.trees_a_round):
            output, rows = slice(None) if together else number % len(grad), None
            # sources tell trees by their arrays
            g, h = grad[output].view(), hess[output].view()
            if of.plan.one_side is not None:
                rows, g, h = of.plan.one_side.draw(of.rng, g, h)
            elif of.plan.subsample < 1.0:
                rows = draw(of.rng, n_rows, of.plan.subsample)
            yield TreeSample(g, h, rows, draw(of.rng, of.plan.n_columns, of.plan.colsample_bytree))

    def batches(self, most: int) -> Iterator[list[TreeSample]]:
        """Yield what the trees are grown on, `most` trees at a time; `add` must be called for all before the next."""
        samples, count = self.trees(), self._boosting.forest.trees_a_round
        # as few as needed, of about the same size
        size = -(-count // -(-count // most))
        while of := list(islice(samples, size)):
            yield of

    def add(self, tree: Tree, leaves: RowsOfLeaves) -> None:
        """Add a grown tree, of many outputs one for each, to the round, and its leaf values to the margins of rows."""
        for of_output in trees_of_outputs(tree):
            self._add(of_output, leaves)

    def refresh(self, trees: Sequence[Tree], leaves: Int32s) -> None:
        """Add finished trees with new leaf weights; `leaves`, (n_rows, n_trees), say which leaves rows are in."""
        for tree, leaf, sample in zip(trees, leaves.T, self.trees(), strict=True):
            rows = LeafRows(tree.left, leaf)
            self._add(refreshed(tree, rows, sample.grad, sample.hess, self._boosting.rules), rows)

    def _add(self, tree: Tree, leaves: RowsOfLeaves) -> None:
        of, output = self._boosting, len(self._new) % len(self._boosting.margins)
        numbers = np.flatnonzero(tree.left < 0).astype(np.int32)
        # by the residuals of the leaf's rows, such as their median
        if of.forest.objective.refreshes_leaves:
            rows, starts = leaves.rows(numbers, sampled=False)
            weight = None if of.weight is None else of.weight[rows]
            # rows of a finished tree may have come to none of a leaf
            filled = np.flatnonzero(np.diff(starts))
            starts = starts[np.append(filled, len(numbers))]
            values = of.forest.objective.leaf_values(of.y[rows] - self._before[output][rows], weight, starts)
            tree.value[numbers[filled]] = of.rules.learning_rate * values
        leaves.add_to(of.margins[output], numbers, tree.value[numbers])
        self._new.append(tree)


class Boosting:
    """A training that holds the margins of the training rows: samples, gradients, leaf values, loss, early stopping.

    Iterate over it for the rounds, as over `Rounds`. Labels `y` are float64 (n_rows,), of a ranking (n_rows, 2). Rows
    start from `base_margin` (n_rows, n_outputs), if they have any, else from the loss's start. New trees go into
    `forest`, which has those of the rounds before `resume`. ``on_round(state)`` is called after every round, and may
    raise `NoMoreTrees`. With `earlier`, trees of a finished model and the leaf of each row in each tree, nothing
    grows: every round refreshes the leaves of one of that model. `trees.columns.grow_trees` is the simplest use.
    """

    def __init__(
        self,
        y: Floats,
        weight: Floats | None,
        forest: Forest,
        rules: SplitRules,
        plan: BoostingPlan,
        *,
        base_margin: Floats | None = None,
        eval_sets: Sequence[EvalSet] = (),
        on_round: Callable[[RoundState], None] | None = None,
        resume: RoundState | None = None,
        earlier: tuple[Sequence[Tree], Int32s] | None = None,
        threads: int = 1,
    ) -> None:
        forest.objective.check_sums(len(y))
        self.y, self.weight, self.forest, self.rules, self.plan, self.threads = y, weight, forest, rules, plan, threads
        self.rng = np.random.default_rng(plan.random_state)
        starts = forest.objective.base_margins[:, None] if base_margin is None else base_margin.T
        self.margins = np.full((forest.objective.n_outputs, len(y)), starts)
        if resume is not None:
            self.margins[:] = resume.margins
            self.rng.bit_generator.state = json.loads(resume.random_state)
        draws = plan.one_side is not None or plan.subsample < 1.0 or plan.colsample_bytree < 1.0
        self._constant_state = None if draws else json.dumps(self.rng.bit_generator.state)
        self._on_round, self._earlier = on_round, earlier
        self._rounds = Rounds(
            forest, plan.n_estimators, eval_sets=eval_sets, early_stopping_rounds=plan.early_stopping_rounds,
            early_stopping_min_delta=plan.early_stopping_min_delta, metrics=plan.metrics,
            after_round=self._after_round,
        )  # fmt: skip

    @property
    def state(self) -> RoundState:
        """The state besides the trees to continue from here; it holds the margins that boosting changes."""
        state = self._constant_state or json.dumps(self.rng.bit_generator.state)
        return RoundState(self.forest.rounds, self.margins, state)

    def stop(self) -> None:
        """See `Rounds.stop`."""
        self._rounds.stop()

    def __iter__(self) -> Iterator[BoostingRound]:
        for new in self._rounds:
            a_round = BoostingRound(self, self.forest.rounds, new)
            if self._earlier is None:
                yield a_round
            else:
                trees, leaves = self._earlier
                of = slice(len(self.forest.trees), len(self.forest.trees) + self.forest.trees_a_round)
                a_round.refresh(trees[of], leaves[:, of])

    def _after_round(self, done: int) -> None:
        objective = self.forest.objective
        judges_loss = objective.epsilon is None and not objective.higher_is_better  # not by randomised labels
        # at rounds that are powers of two and at the last: a loss takes about as long as the gradients of a round
        if judges_loss and (done & (done - 1) == 0 or done == self.plan.n_estimators):
            loss, losses = objective.loss(self.margins.T, self.y, self.weight), self.forest.losses
            when, least = min(losses.items(), key=lambda item: item[1], default=(0, np.inf))
            if loss > (1 + _RISE) * least:
                self.forest.diverged = (
                    f"the training loss rose from {least:.4g} after round {when} to {loss:.4g} after round {done}: "
                    "lower learning_rate, or raise min_child_weight or reg_lambda"
                )
            losses[done] = loss
        if self._on_round is not None:
            self._on_round(self.state)


def draw(rng: np.random.Generator, total: int, share: float) -> Int32s:
    """Draw a share of `total` rows or columns, at least one; ascending. All of them take nothing of `rng`."""
    if share >= 1.0:
        return np.arange(total, dtype=np.int32)
    size = max(1, round(share * total)) if total else 0
    return np.sort(rng.choice(total, size, replace=False)).astype(np.int32)
