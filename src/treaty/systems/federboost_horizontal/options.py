"""Options of FederBoost by row, and the noise that they ask for.

Under noise every member adds its share of discrete Gaussian noise to all sums (Maddock, Cormode, Wang, Maple, Jha,
"Federated Boosted Decision Trees with Differential Privacy", CCS 2022). The budget of a training is divided beforehand
among its releases, which are all vectors that may be opened; those of a search or tree that ends early are paid for all
the same.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from treaty.data.columns import Category
from treaty.data.table import Schema
from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Integers
from treaty.models.checkpoints import noise_folder
from treaty.privacy.discrete_gaussian import (
    MOST_SIGMA,
    NoiseBudget,
    budget,
    level_coordinates,
    noise_for,
    noise_share,
    rho_for,
)
from treaty.privacy.ledger import DEFAULT_DELTA, EpsilonLimits, Ledger, LedgerEntry, cost
from treaty.systems.horizontal.quantiles import SearchNoise, most_probes
from treaty.systems.horizontal.rows import refuse_objectives
from treaty.systems.options import FEW_TREES, Positive, SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import LabelledRows
from treaty.trees.objectives import Objective
from treaty.trees.splits import SplitRules


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
        every row. None: no noise.
    delta : float or None, default None
        See `epsilon_total`; None is 1e-6.
    """

    system: ClassVar[str] = "federboost-horizontal"
    paper_bins: ClassVar[int | None] = 24  # of two of its three data sets; 26 for the third
    dropout: Literal["accept"] | None = None
    bins: Literal["exact", "approximate"] | None = None
    epsilon_total: Positive | None = None
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None

    @property
    def adds_noise(self) -> bool:
        return self.epsilon_total is not None

    @property
    def exact_bins(self) -> bool:
        """`bins`, resolved."""
        return self.bins != "approximate" and not self.adds_noise

    @property
    def default_trees(self) -> tuple[int, int, float]:
        return FEW_TREES if self.adds_noise else super().default_trees

    @property
    def limits_categories(self) -> bool:
        return self.adds_noise

    def check(self, common: Any) -> None:
        refuse_objectives(common)
        common.refuse_outputs("participants grow one tree for each class in a round")
        if self.epsilon_total is not None and common.subsample < 1.0:
            raise ConfigError(
                "epsilon_total needs every row to change its own part of a sum alone, and a sample of fixed size "
                "depends on all rows: leave subsample at 1"
            )
        if self.bins == "exact" and self.adds_noise:
            raise ConfigError(
                "bins='exact' needs the number of rows below each probe, and under epsilon_total counts have noise: "
                "leave bins out, or take 'approximate'"
            )
        if self.delta is not None and self.epsilon_total is None:
            raise ConfigError("delta goes with epsilon_total; give both or leave delta out")


# Of the quantile search under noise: each costs
SEARCH_ROUNDS = 24
# Shares of the budget; the rest is for trees
OF_OPENING, OF_SEARCH = 0.01, 0.09


@dataclass(frozen=True, slots=True)
class SumNoise:
    """A training's noise; none without a `budget`.

    `opening`, `search` and `trees` are standard deviations by phase, in units (`discrete_gaussian`); `honest` is
    how many members' shares noise is made of.
    """

    opening: float = 0.0
    search: float = 0.0
    trees: float = 0.0
    honest: int = 1
    budget: NoiseBudget | None = None

    @property
    def of_search(self) -> SearchNoise | None:
        """The noise on the own part of the opening and of counts below probes."""
        if self.budget is None:
            return None
        return SearchNoise(
            lambda counts: self._on(counts, np.array([self.opening])),
            lambda counts: self._on(counts, np.array([self.search])),
            SEARCH_ROUNDS,
        )

    def on_trees(self, sums: Integers, objective: Objective) -> Integers:
        """Add the own share to sums of (grad, hess, rows), one after the other."""
        return self._on(sums, np.array([objective.grad_bound, objective.hess_bound, 1.0]) * self.trees)

    def rules(self, rules: SplitRules, objective: Objective, max_bin: int) -> SplitRules:
        """Return rules under which splits and leaves do not follow noise.

        Children need a sum of hess of eight standard deviations of the noise in a sum over `max_bin` bins; half of that
        is added to every denominator (chosen on three data sets, `benchmarks/federboost_horizontal.py --noise`).
        """
        if self.budget is None:
            return rules
        # noise of a sum over `max_bin` bins: variances add up
        deviation = self.trees * objective.hess_bound * objective.hess_unit * math.sqrt(max_bin)
        return replace(
            rules,
            min_child_weight=max(rules.min_child_weight, 8.0 * deviation),
            reg_lambda=max(rules.reg_lambda, 4.0 * deviation),
        )

    def _on(self, values: Integers, sigmas: Floats) -> Integers:
        if self.budget is None:
            return values
        # shares of all honest members add up to the planned deviation
        return values + noise_share(np.tile(sigmas, len(values) // len(sigmas)), self.honest)


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
    # the leader knows its own share of noise, so the others' shares must be enough
    delta, n_features, honest = options.delta or DEFAULT_DELTA, len(schema.names), max(1, members - 1)
    # categories are counted in the opening, not searched
    numeric = sum(categories is None for categories in schema.categories)
    n_outputs = len(classes) if classes is not None and len(classes) > 2 else 1
    # zCDP composes by adding up, so parts of rho are parts of the budget
    rho = rho_for(options.epsilon_total, delta)
    opening = noise_for(OF_OPENING * rho, count=1, coordinates=1 + n_features, honest=honest)
    probes = noise_for(
        OF_SEARCH * rho,
        count=SEARCH_ROUNDS,
        # a row below all probes changes every count
        coordinates=max(1, numeric * most_probes(common.most_bins)),
        honest=honest,
    )
    # each of a round's trees is a release of its own: with several classes a row is in every one of them
    trees = noise_for(
        (1.0 - OF_OPENING - OF_SEARCH) * rho,
        count=common.most_rounds * common.depth * n_outputs * common.num_parallel_tree,
        coordinates=level_coordinates(n_features),
        honest=honest,
    )
    if trees.sigma * 2.0**common.fractional_bits > MOST_SIGMA:
        raise ConfigError(
            f"epsilon_total={options.epsilon_total:g} needs more noise than fits at fractional_bits="
            f"{common.fractional_bits}; lower fractional_bits, or raise epsilon_total"
        )
    spent = budget([opening, probes, trees] if search else [trees], delta)
    return SumNoise(opening.sigma, probes.sigma, trees.sigma, honest, spent)


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
    costs = {"sums of trees": trees.rho}
    if search:
        costs["search for bins"] = math.fsum(each.rho for each in search)
    mechanism = "discrete Gaussian"
    ledger.spend([
        LedgerEntry(secrets.token_hex(16), job, mechanism, what, rho=rho, delta=delta) for what, rho in costs.items()
    ])  # fmt: skip
    return f"{paid}. In the ledger: {cost(ledger.entries())}"


def check_noise(options: FederBoostHorizontal, data: LabelledRows, classes: object) -> None:
    """Refuse noise where a gradient's bound depends on the data: in a regression, or with sample weights."""
    if options.epsilon_total is not None and (classes is None or data.weight is not None):
        raise ConfigError(
            "epsilon_total needs gradients whose bound is known beforehand: a classification without sample weights"
        )
