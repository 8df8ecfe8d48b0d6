"""The noise of a training by row: what a job declares of labels, how its budget is divided, and who pays.

Under noise splits are drawn at random, and members add their shares of discrete Gaussian noise to the sums of leaves
(`random_trees`). The budget of a training is divided beforehand among its releases, which are all vectors that may be
opened; those of a search or training that ends early are paid for all the same. Counts of held-out rows are
no part of it: a row is trained on or kept back, by a draw that looks at no data, so that its cost is the larger of
both, and counts may cost what the trees do.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from treaty.data.columns import Category
from treaty.data.noisy_quantiles import ROUNDS, SearchNoise
from treaty.data.table import Schema
from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Integers
from treaty.models.checkpoints import ledger_folder
from treaty.privacy.discrete_gaussian import MOST_SIGMA, NoiseBudget, budget, noise_for, noise_share, rho_for
from treaty.privacy.ledger import DEFAULT_DELTA, EpsilonLimits, Ledger, LedgerEntry, cost
from treaty.systems.horizontal.random_trees import MOST_DEPTH, NOISY_PARALLEL, NOISY_TREES, LeafNoise, row_norm
from treaty.systems.options import Positive, SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import loss_of
from treaty.systems.system import LabelledRows
from treaty.trees.losses import to_float32

logger = logging.getLogger(__name__)

# Shares of the budget; the rest is for trees
OF_OPENING, OF_SEARCH = 0.01, 0.09
# rounds after which held-out rows are counted: with every other one, the noise on all counts grows
_LOOKS = 5
# Of the powers of two that bound gradients: leaf values stay far below overflow
EXPONENTS = range(-128, 96)


@dataclass(frozen=True, slots=True)
class SumNoise:
    """A training's noise; none without a `budget`.

    `opening`, `search` and `scores` are standard deviations of counts, the last one of held-out rows, of which each
    row is `unit`; `honest` is how many members' shares noise is made of, and `leaves` is the noise on sums of leaves.
    """

    opening: float = 0.0
    search: float = 0.0
    honest: int = 1
    leaves: LeafNoise | None = None
    budget: NoiseBudget | None = None
    scores: float = 0.0
    unit: int = 1

    @property
    def of_search(self) -> SearchNoise | None:
        """The noise on the own part of the opening and of counts between probes."""
        if self.budget is None:
            return None
        return SearchNoise(
            lambda counts: self._on(counts, self.opening), lambda counts: self._on(counts, self.search), self.search
        )

    def on_scores(self, counts: Integers) -> Integers:
        """Return counts of own held-out rows, with the own share of noise, if the job has any."""
        return self._on(counts, self.scores) if self.scores else counts

    def _on(self, values: Integers, sigma: float) -> Integers:
        # shares of all honest members add up to the planned deviation
        return values + noise_share(np.full(len(values), sigma), self.honest)


def looks(options: Any, common: BoostingOptions) -> Collection[int]:
    """Return the rounds after which held-out rows are counted."""
    last = common.most_rounds
    return {1 + k * (last - 1) // (_LOOKS - 1) for k in range(_LOOKS)} if options.adds_noise else range(1, last + 1)


def plan_noise(
    options: Any,
    common: BoostingOptions,
    schema: Schema,
    classes: Sequence[Category] | None,
    *,
    honest: int,
    search: bool = True,
    unit: int = 1,
    rows: int | None = None,
) -> SumNoise:
    """Divide a training's budget among what it opens; ConfigError when `epsilon_total` and `delta` are out of reach.

    `honest` is `noise_share`'s. Counts are multiplied by `unit`. A whole user changes a sum by what `rows` rows do at
    most; None where rows are protected.
    Without a `search` for bins, which an earlier training has paid for, the trees have their part of the budget alone,
    so that search and trees together cost `epsilon_total` in either case.
    """
    if options.epsilon_total is None:
        return SumNoise()
    delta, n_features = options.delta or DEFAULT_DELTA, len(schema.names)
    # categories are counted in the opening, not searched
    numeric = sum(categories is None for categories in schema.categories)
    ends, weight, common = declared(options, common)
    objective = loss_of(ends, weight, None if classes is None else len(classes), None, common)
    if any(math.log2(bound) not in EXPONENTS for bound in (*objective.clips, objective.weight_bound)):
        raise ConfigError("expected target_range and weight_bound between 2^-128 and 2^95: scale them")
    half = float(np.ptp(ends)) / 2.0 if classes is None and len(ends) else None
    leaves = LeafNoise(0.0, honest, common.most_rounds, common.num_parallel_tree, common.rate, half)
    units = leaves.units(objective)
    # zCDP composes by adding up, so parts of rho are parts of the budget
    rho = rho_for(options.epsilon_total, delta)
    # a row is counted once in each column, also between neighbouring probes
    most = rows or 1
    opening, counts = (
        noise_for(
            part * rho, count=count, coordinates=most * changed, honest=honest, norm=unit * most * math.sqrt(changed)
        )
        for part, count, changed in ((OF_OPENING, 1, 1 + n_features), (OF_SEARCH, ROUNDS, max(1, numeric)))
    )
    norm = row_norm(objective.n_outputs, classes=classes is not None, fractional_bits=common.fractional_bits)
    steps, of_trees = float(units.min()), (1.0 - OF_OPENING - OF_SEARCH) * rho
    trees = leaves.releases(of_trees, objective.n_outputs, norm, steps, rows)
    leaves = replace(leaves, sigma=trees.sigma / steps)
    if leaves.sigma * units.max() > MOST_SIGMA:
        raise ConfigError(
            f"epsilon_total={options.epsilon_total:g} needs more noise than fits at fractional_bits="
            f"{common.fractional_bits}; lower fractional_bits, or raise epsilon_total"
        )
    spent = budget([opening, counts, trees] if search else [trees], delta)
    scores = 0.0
    if options.holds_out_rows:
        # of a held-out row, which is in no other sum
        scores = noise_for(
            trees.rho, count=len(looks(options, common)), coordinates=1, honest=honest, norm=float(unit)
        ).sigma
    return SumNoise(opening.sigma, counts.sigma, honest, leaves, spent, scores, unit)


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
    if noise.scores:
        paid += "; held-out rows cost no more, with noise of a standard deviation of "
        paid += f"{noise.scores / noise.unit:.3g} on counts"
    if store is None:
        return paid
    # entered before anything is opened: an aborted training has cost the same
    ledger, delta = Ledger(ledger_folder(store, name, "noise"), limits), noise.budget.delta
    costs = {"sums of leaves": trees.rho}
    if search:
        costs["search for bins"] = math.fsum(each.rho for each in search)
    mechanism = "discrete Gaussian"
    ledger.spend([
        LedgerEntry(secrets.token_hex(16), job, mechanism, what, rho=rho, delta=delta) for what, rho in costs.items()
    ])  # fmt: skip
    return f"{paid}. In the ledger: {cost(ledger.entries())}"


# ---------------------------------------------------------------- what a job with noise declares of labels


def declared(options: Any, common: BoostingOptions) -> tuple[Floats, Floats | None, BoostingOptions]:
    """Return targets and weights with the bounds that a job declares, and options with the start of its training."""
    ends = np.array(options.target_range or [])
    weight = None if options.weight_bound is None else np.array([options.weight_bound])
    if common.base_score is None:
        start = to_float32(float(ends.mean())) if len(ends) else 0.5
        common = msgspec.structs.replace(common, base_score=start)
    return ends, weight, common


def within_declared(options: Any, data: LabelledRows, classes: object, party: str) -> LabelledRows:
    """Return rows whose targets and weights are within the declared bounds; ConfigError if these are missing."""
    if not options.adds_noise:
        return data
    y, weight, bound = data.y, data.weight, options.weight_bound
    if classes is None:
        if options.target_range is None:
            raise ConfigError(
                "epsilon_total needs a regression's targets within bounds that do not come from the data: give "
                "target_range=[least, largest]"
            )
        y = np.clip(y, *options.target_range)
    if weight is not None and bound is None:
        raise ConfigError(
            "epsilon_total needs sample weights within a bound that does not come from the data: give weight_bound, or "
            "leave weights out"
        )
    # rows without weights weigh 1, which may be beyond the bound, too
    if weight is not None or (bound or 1.0) < 1.0:
        weight = np.minimum(np.ones(len(y)) if weight is None else weight, bound)
    outside = np.count_nonzero(y != data.y) + (0 if weight is None else np.count_nonzero(weight != data.weight))
    if outside:
        logger.warning("%s: %d targets or weights are outside the declared bounds, and count as these", party, outside)
    return replace(data, y=y, weight=weight)


# ---------------------------------------------------------------- options


@dataclass(kw_only=True, repr=False)
class RowOptions(SystemOptions):
    """What systems split by row have in common: bins, noise, and held-out rows; each documents them itself.

    `of_noise` names further options that need `epsilon_total`.
    """

    of_noise: ClassVar[tuple[str, ...]] = ()
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
    def holds_out_rows(self) -> bool:
        return self.validation_fraction is not None

    @property
    def default_trees(self) -> tuple[int, int, float]:
        return NOISY_TREES if self.adds_noise else super().default_trees

    @property
    def default_parallel(self) -> int:
        return NOISY_PARALLEL if self.adds_noise else 1

    def check(self, common: Any) -> None:
        # what needs gradients, bounds or leaf values that owners of rows cannot know
        if common.goss:
            raise ConfigError("goss ranks rows by gradient, which participants cannot do together; use subsample")
        if common.loss_class.takes == "groups":
            raise ConfigError(
                f"objective={common.objective!r} ranks rows within groups, and rows of a group may be with several "
                "participants: take a system split by column"
            )
        if common.loss_class.refreshes_leaves:
            raise ConfigError(
                f"objective={common.objective!r} has leaf values that are quantiles of the residuals of all "
                'participants\' rows, which sums of gradients do not contain: take "huber", or a system split by column'
            )
        common.refuse_outputs("owners of rows grow one tree for each class in a round")
        if self.validation_group is not None and self.validation_fraction is None:
            raise ConfigError("validation_group goes with validation_fraction; give both or leave the group out")
        for name in ("delta", "target_range", "weight_bound", *self.of_noise):
            if not self.adds_noise and getattr(self, name) is not None:
                raise ConfigError(f"{name} goes with epsilon_total; give both or leave {name} out")
        if not self.adds_noise:
            return
        # bounds that are none, and what noisy sums cannot do
        ends = self.target_range
        if ends is not None and (len(ends) != 2 or not np.all(np.isfinite(ends)) or not ends[0] < ends[1]):
            raise ConfigError(f"expected target_range as two numbers, the least and the largest target, got {ends}")
        if common.objective not in (None, "squared_error", "logistic", "softmax"):
            raise ConfigError(f"epsilon_total needs the squared error, or classes, got objective={common.objective!r}")
        patience, apart = common.early_stopping_rounds, max(np.diff(sorted(looks(self, common))), default=0)
        if self.holds_out_rows and patience is not None and patience < apart:
            raise ConfigError(
                "under epsilon_total held-out rows are counted after a few rounds: expected early_stopping_rounds of "
                f"at least {apart}, the rounds from one count to the next, got {patience}"
            )
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
