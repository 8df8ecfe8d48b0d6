"""Options of FederBoost by row, and the noise that they ask for.

Under noise splits are drawn at random, and every member adds its share of discrete Gaussian noise to the sums of the
leaves (`horizontal.random_trees`). The budget of a training is divided beforehand among its releases, which are all
vectors that may be opened; those of a search or training that ends early are paid for all the same.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from treaty.data.columns import Category
from treaty.data.noisy_quantiles import ROUNDS, SearchNoise
from treaty.data.table import Schema
from treaty.errors import ConfigError
from treaty.machine.arrays import Integers
from treaty.models.checkpoints import noise_folder
from treaty.privacy.discrete_gaussian import MOST_SIGMA, NoiseBudget, budget, noise_for, noise_share, rho_for
from treaty.privacy.ledger import DEFAULT_DELTA, EpsilonLimits, Ledger, LedgerEntry, cost
from treaty.systems.horizontal.random_trees import (
    MOST_DEPTH,
    NOISY_PARALLEL,
    NOISY_TREES,
    LeafNoise,
    check_declared,
    row_norm,
)
from treaty.systems.horizontal.rows import refuse_objectives
from treaty.systems.options import Positive, SystemOptions
from treaty.systems.pooled.options import BoostingOptions


@dataclass(kw_only=True, repr=False)
class FederBoostHorizontal(SystemOptions):
    """Boosting between holders of rows, on securely summed histograms (FederBoost, Tian et al. 2020, arXiv 2011.02796).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" permits two participants, each of whom sees the other's part of a sum. The search for quantiles is the
        same in both modes.
    allow_insecure : bool, default False
        Without effect: nothing in this system needs consent.
    dropout : {"accept"} or None, default None
        What a lost participant means. None: training stops, and resumes from checkpoints when all are back.
        "accept": training continues without it, and the leader may find the lost one's histograms.
    bins : {"exact", "approximate"} or None, default None
        "exact": the bins of one table with all rows, so that trees are those of `Pooled` with the same `max_bin`; the
        leader learns the values on both sides of every cut. "approximate": cuts that part about as many rows, found in
        half as many rounds; no probe parts fewer than `min_child_samples` rows. None is "exact", and under
        `epsilon_total`, which pays for noisy counts, "approximate".
    epsilon_total : float or None, default None
        Noise on all that is opened, so that the whole training is (epsilon_total, delta) differentially private for
        every row. Splits are then drawn at random, and the sums of leaves alone are opened. None: no noise.
    delta : float or None, default None
        See `epsilon_total`; None is 1e-6.
    target_range : sequence of two floats or None, default None
        With `epsilon_total`, for a regression: the least and the largest target, which must not come from the data.
        Targets outside count as the nearer end.
    weight_bound : float or None, default None
        With `epsilon_total`, for rows with weights: the largest weight, which must not come from the data. Larger
        weights count as this one. Noise grows with it, rounded up to a power of two.
    validation_fraction : float or None, default None
        Share of its rows, more than 0 and less than 1, that each participant keeps out of training, the same rows each
        time. After each round they are counted by score and label; the counts of all are added up under masks, and the
        leader watches the metrics: "validation" in `evals_result_`, and `held_out_`. Early stopping goes by them
        unless there is an eval set. None: all rows are trained on. Not with `epsilon_total`.
    validation_group : str or None, default None
        Column of categories, such as sex or region, by which rows kept back are counted, so that `held_out_` has
        metrics of each group. Needs `validation_fraction`.
    """

    system: ClassVar[str] = "federboost-horizontal"
    paper_bins: ClassVar[int | None] = 24  # of two of its three data sets; 26 for the third
    dropout: Literal["accept"] | None = None
    bins: Literal["exact", "approximate"] | None = None
    epsilon_total: Positive | None = None
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    target_range: Annotated[Sequence[float], msgspec.Meta(min_length=2, max_length=2)] | None = None
    weight_bound: Positive | None = None
    validation_fraction: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    validation_group: str | None = None

    @property
    def adds_noise(self) -> bool:
        return self.epsilon_total is not None

    @property
    def exact_bins(self) -> bool:
        """`bins`, resolved."""
        return self.bins != "approximate" and not self.adds_noise

    @property
    def holds_out_rows(self) -> bool:
        return self.validation_fraction is not None

    @property
    def default_trees(self) -> tuple[int, int, float]:
        return NOISY_TREES if self.adds_noise else super().default_trees

    @property
    def default_parallel(self) -> int:
        return NOISY_PARALLEL if self.adds_noise else 1

    @property
    def limits_categories(self) -> bool:
        return self.adds_noise

    def check(self, common: Any) -> None:
        refuse_objectives(common)
        common.refuse_outputs("participants grow one tree for each class in a round")
        check_declared(self, common)
        if self.validation_group is not None and self.validation_fraction is None:
            raise ConfigError("validation_group goes with validation_fraction; give both or leave the group out")
        if self.validation_fraction is not None and self.epsilon_total is not None:
            raise ConfigError(
                "counts of rows kept back have no noise, so epsilon_total would not hold for them: leave out either"
            )
        if self.epsilon_total is None:
            if self.delta is not None:
                raise ConfigError("delta goes with epsilon_total; give both or leave delta out")
            return
        if common.subsample < 1.0:
            raise ConfigError(
                "epsilon_total needs every row to change its own part of a sum alone, and a sample of fixed size "
                "depends on all rows: leave subsample at 1"
            )
        if self.bins == "exact":
            raise ConfigError(
                "bins='exact' needs the number of rows below each probe, and under epsilon_total counts have noise: "
                "leave bins out, or take 'approximate'"
            )
        common.refuse_leaves("under epsilon_total all leaves of a tree are summed at once")
        if common.max_depth > MOST_DEPTH:
            raise ConfigError(
                f"epsilon_total sums 2^max_depth leaves of each tree: expected max_depth of at most {MOST_DEPTH}, "
                f"got {common.max_depth}"
            )


# Shares of the budget; the rest is for trees
OF_OPENING, OF_SEARCH = 0.01, 0.09


@dataclass(frozen=True, slots=True)
class SumNoise:
    """A training's noise; none without a `budget`.

    `opening` and `search` are standard deviations of counts, `honest` is how many members' shares noise is made of, and
    `leaves` is the noise on sums of leaves.
    """

    opening: float = 0.0
    search: float = 0.0
    honest: int = 1
    leaves: LeafNoise | None = None
    budget: NoiseBudget | None = None

    @property
    def of_search(self) -> SearchNoise | None:
        """The noise on the own part of the opening and of counts between probes."""
        if self.budget is None:
            return None
        return SearchNoise(
            lambda counts: self._on(counts, self.opening), lambda counts: self._on(counts, self.search), self.search
        )

    def _on(self, values: Integers, sigma: float) -> Integers:
        # shares of all honest members add up to the planned deviation
        return values + noise_share(np.full(len(values), sigma), self.honest)


def plan_noise(
    options: FederBoostHorizontal,
    common: BoostingOptions,
    schema: Schema,
    classes: Sequence[Category] | None,
    members: int,
    *,
    search: bool = True,
) -> SumNoise:
    """Divide a training's budget among what it opens; ConfigError when `epsilon_total` and `delta` are out of reach.

    Without a `search` for bins, which an earlier training has paid for, the trees have their part of the budget alone,
    so that search and trees together cost `epsilon_total` in either case.
    """
    if options.epsilon_total is None:
        return SumNoise()
    # the leader knows its own share of noise, so the others' shares must be enough; of those that a sum needs at least
    present = members if options.dropout is None else max(3, -(-2 * members // 3))
    delta, n_features, honest = options.delta or DEFAULT_DELTA, len(schema.names), max(1, present - 1)
    # categories are counted in the opening, not searched
    numeric = sum(categories is None for categories in schema.categories)
    n_outputs = len(classes) if classes is not None and len(classes) > 2 else 1
    # zCDP composes by adding up, so parts of rho are parts of the budget
    rho = rho_for(options.epsilon_total, delta)
    opening = noise_for(OF_OPENING * rho, count=1, coordinates=1 + n_features, honest=honest)
    # a row is between two neighbouring probes of each column
    counts = noise_for(OF_SEARCH * rho, count=ROUNDS, coordinates=max(1, numeric), honest=honest)
    norm = row_norm(n_outputs, classes=classes is not None, fractional_bits=common.fractional_bits)
    trees = LeafNoise.releases((1.0 - OF_OPENING - OF_SEARCH) * rho, common, n_outputs, norm, honest)
    sigma = trees.sigma / LeafNoise.steps(common.fractional_bits)
    # units are larger than steps of the fixed point by the bound of weights, too, and by at most 2.5 for hess
    if 4.0 * sigma * (options.weight_bound or 1.0) * 2.0**common.fractional_bits > MOST_SIGMA:
        raise ConfigError(
            f"epsilon_total={options.epsilon_total:g} needs more noise than fits at fractional_bits="
            f"{common.fractional_bits}; lower fractional_bits, or raise epsilon_total"
        )
    spent = budget([opening, counts, trees] if search else [trees], delta)
    half = None
    if classes is None and options.target_range is not None:
        half = (options.target_range[1] - options.target_range[0]) / 2.0
    leaves = LeafNoise(sigma, honest, common.most_rounds, common.num_parallel_tree, common.rate, half)
    return SumNoise(opening.sigma, counts.sigma, honest, leaves, spent)


def pay(noise: SumNoise, store: Path | None, name: str, job: str, limits: EpsilonLimits | None) -> str:
    """Enter a training's noise in a participant's ledger before anything is opened; return in words what was paid.

    `store` is the ledger's folder, None where none is kept, and for a leader without rows. Every attempt draws its
    noise again, and pays again; BudgetSpent if the participant's `limits` do not allow it.
    """
    if noise.budget is None:
        return ""
    # without a search there is one release, that of the trees
    *search, trees = noise.budget.releases
    paid = f"{noise.budget}" + ("" if search else ", with bins of an earlier training, which paid for them")
    if store is None:
        return paid
    # entered before anything is opened: an aborted training has cost the same
    ledger, delta = Ledger(noise_folder(store, name), limits), noise.budget.delta
    costs = {"sums of leaves": trees.rho}
    if search:
        costs["search for bins"] = math.fsum(each.rho for each in search)
    mechanism = "discrete Gaussian"
    ledger.spend([
        LedgerEntry(secrets.token_hex(16), job, mechanism, what, rho=rho, delta=delta) for what, rho in costs.items()
    ])  # fmt: skip
    return f"{paid}. In the ledger: {cost(ledger.entries())}"
