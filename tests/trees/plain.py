"""Train on integer codes without the data layer: a feature's value is its bin, missing is NaN."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from treaty.trees.boosting import Boosting, BoostingPlan, Forest, TreeSample
from treaty.trees.columns import ColumnSource, grow_trees
from treaty.trees.ensemble import JoinedSplits, SplitTable, Tree, Walk, join_splits
from treaty.trees.objectives import LOSSES, Objective, make_objective
from treaty.trees.splits import SplitRules

RULES = {f.name for f in fields(SplitRules)} - {"grad_unit", "hess_unit"}
OF_LOSSES = {"tweedie_variance_power", "huber_slope", "quantile_alpha"}
PLAN = {f.name for f in fields(BoostingPlan)} - {"n_columns"}


class Codes:
    """Columns of integer codes 0..n_bins-1, -1 for missing, and the owner's lookup table of splits."""

    def __init__(self, values: NDArray, n_bins: Sequence[int], categorical: Sequence[int] = ()) -> None:
        self.n_bins = np.asarray(n_bins, np.int32)
        self.codes = np.where(values < 0, self.n_bins, values).astype(np.uint8)
        self.matrix = np.where(values < 0, np.nan, values).astype(np.float32)
        self.offsets = np.concatenate([[0], np.cumsum(self.n_bins + 1)]).astype(np.int32)
        self.categorical = np.isin(np.arange(len(self.n_bins)), categorical)
        self.splits = SplitTable()

    @property
    def values(self) -> NDArray[np.int64]:
        return np.where(self.codes == self.n_bins, -1, self.codes.astype(np.int64))

    def record(self, feature: int, left_bins: NDArray[np.bool_]) -> int:
        bins = int(self.n_bins[feature])
        missing_left = bool(left_bins[bins])
        if self.categorical[feature]:
            going = left_bins[:bins].astype(np.uint8).tobytes() + bytes([missing_left])
            return self.splits.add(feature, np.nan, missing_left, going)
        below = int(left_bins[:bins].sum())
        return self.splits.add(feature, below if below < bins else np.inf, missing_left)

    def source(self, threads: int = 1) -> ColumnSource:
        return ColumnSource(self.codes, self.offsets, self.categorical, self.record, threads)

    def columns(self, first: int, last: int) -> Codes:
        """Columns ``first..last`` as a table of their own."""
        return Codes(self.values[:, first:last], self.n_bins[first:last], np.flatnonzero(self.categorical[first:last]))

    def cut(self, *edges: int) -> list[Codes]:
        """The table cut before the columns `edges`, one owner each."""
        bounds = [0, *edges, len(self.n_bins)]
        return [self.columns(first, last) for first, last in itertools.pairwise(bounds)]

    def take(self, rows: NDArray) -> Codes:
        """The table of these rows."""
        return Codes(self.values[rows], self.n_bins, np.flatnonzero(self.categorical))


def sampled(
    grad: NDArray[np.int64], hess: NDArray[np.int64], n_columns: int, rows: NDArray[np.int32] | None = None
) -> TreeSample:
    """A tree's sample: all columns, and `rows` (None: all)."""
    return TreeSample(grad, hess, rows, np.arange(n_columns, dtype=np.int32))


@dataclass(frozen=True)
class TrainingOutcome:
    """What training left: the owners' tables, the forest, and the margins (n_rows, n_outputs) of the rows."""

    parts: list[Codes]
    forest: Forest
    rules: SplitRules
    margins: NDArray[np.float64]

    @property
    def objective(self) -> Objective:
        return self.forest.objective

    @property
    def trees(self) -> list[Tree]:
        return self.forest.trees

    @property
    def matrix(self) -> NDArray[np.float32]:
        return np.hstack([part.matrix for part in self.parts])

    def joined(self) -> JoinedSplits:
        return join_splits([part.splits for part in self.parts], [len(part.n_bins) for part in self.parts])

    def start(self, n_rows: int) -> NDArray[np.float64]:
        return np.full((n_rows, self.objective.n_outputs), self.objective.base_margins)

    def walk(self, matrix: NDArray[np.float32], threads: int = 1) -> NDArray[np.float64]:
        margins = self.start(len(matrix))
        Walk(self.trees, self.joined()).add_to(margins, matrix, threads)
        return margins


def train(
    parts: Codes | Sequence[Codes],
    y: NDArray[np.float64],
    weight: NDArray[np.float64] | None = None,
    *,
    objective: str = "logistic",
    n_classes: int = 2,
    base_score: float = 0.5,
    fractional_bits: int = 16,
    threads: int = 1,
    **options,
) -> TrainingOutcome:
    """Boost over the parts as sources of sums; `options`: of losses, `SplitRules`, `BoostingPlan`, `Boosting`."""
    parts = [parts] if isinstance(parts, Codes) else list(parts)
    options = {"max_delta_step": LOSSES[objective].delta_step, **options}
    of_loss = {name: options.pop(name) for name in list(options) if name in OF_LOSSES}
    loss = make_objective(
        objective, y, weight, n_classes=n_classes, base_score=base_score, fractional_bits=fractional_bits,
        max_delta_step=options["max_delta_step"], **of_loss,
    )  # fmt: skip
    of_rules = {name: options.pop(name) for name in list(options) if name in RULES}
    rules = SplitRules(grad_unit=loss.grad_unit, hess_unit=loss.hess_unit, **of_rules)
    forest = Forest(loss, tuple(f"party{i}" for i in range(len(parts))))
    of_plan = {name: options.pop(name) for name in list(options) if name in PLAN}
    plan = BoostingPlan(n_columns=sum(len(part.n_bins) for part in parts), **of_plan)
    boosting = Boosting(y, weight, forest, rules, plan, threads=threads, **options)
    grow_trees(boosting, [part.source(threads) for part in parts])
    return TrainingOutcome(parts, forest, rules, boosting.margins.T)


def leaves_from_values(trees: Sequence[Tree], splits: JoinedSplits, matrix: NDArray[np.float32]) -> NDArray[np.int32]:
    """The leaf of each row in each tree, (n_rows, n_trees): margins of trees in which a node's value is its number."""
    numbers = np.zeros((len(matrix), len(trees)))  # an output for each tree
    numbered = [replace(tree, value=np.arange(len(tree.value), dtype=float)) for tree in trees]
    Walk(numbered, splits).add_to(numbers, matrix)
    return numbers.astype(np.int32)


def random_codes(
    rng: np.random.Generator,
    n_rows: int,
    n_bins: Sequence[int],
    *,
    missing: float = 0.0,
    categorical: Sequence[int] = (),
) -> Codes:
    """Uniform codes, each missing with probability `missing`."""
    values = rng.integers(0, n_bins, (n_rows, len(n_bins)))
    return Codes(np.where(rng.random(values.shape) < missing, -1, values), n_bins, categorical)


def random_labels(rng: np.random.Generator, table: Codes, objective: str, n_classes: int = 2) -> NDArray[np.float64]:
    """Labels that depend on every column (categories in no order, missing values too), with noise."""
    effects = [rng.normal(0, 1, bins + 1) for bins in table.n_bins]
    trend = [np.append(np.linspace(-1, 1, bins), 0.0) * rng.normal() for bins in table.n_bins]
    score = sum(
        (effect if categorical else 0.3 * effect + 1.5 * slope)[codes]
        for effect, slope, categorical, codes in zip(effects, trend, table.categorical, table.codes.T, strict=True)
    )
    score = score + 0.5 * rng.normal(size=len(table.codes))
    if objective in ("squared_error", "huber", "quantile"):
        return score if objective == "huber" else 3.0 * score  # hessians vanish far beyond the slope
    if objective == "poisson":
        return rng.poisson(np.exp(0.5 * score)).astype(float)
    if objective == "tweedie":
        return rng.poisson(np.exp(0.3 * score)) * rng.gamma(2.0, 0.5, len(score))
    if objective == "gamma":
        return np.exp(0.3 * score) * rng.gamma(2.0, 0.5, len(score)) + 1e-3
    edges = np.quantile(score, np.arange(1, n_classes) / n_classes)
    return np.searchsorted(edges, score).astype(np.float64)
