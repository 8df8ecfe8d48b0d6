"""Options that boosting has in every system, and those of training on one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.systems.options import AtLeastOne, NotNegative, Positive, Seed, Share, SystemOptions
from treaty.trees.boosting import BoostingPlan, OneSide
from treaty.trees.objectives import Objective, loss_class
from treaty.trees.splits import SplitRules

_OF_OBJECTIVES = {  # options of one objective alone: which, and the value that None stands for
    "tweedie_variance_power": ("tweedie", 1.5),
    "huber_slope": ("huber", 1.0),
    "quantile_alpha": ("quantile", 0.5),
}


class BoostingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that boosting has in every system, with the same defaults.

    Attributes
    ----------
    n_estimators : int
        Boosting rounds; one tree each, one per class for more than two classes.
    max_depth : int
        Levels of splits, 1 to 24.
    learning_rate : float
        Factor on every leaf weight.
    reg_lambda : float
        L2 penalty on leaf weights, as in XGBoost.
    reg_alpha : float
        L1 penalty on leaf weights, as in XGBoost.
    min_split_loss : float
        Least gain of a split, as in XGBoost.
    min_child_weight : float
        Least sum of hessians in a leaf, as in XGBoost.
    min_child_samples : int or None
        Fewest training rows in a leaf, a privacy rule: None is 20 in safe mode, 1 in paper mode.
    subsample : float
        Share of rows drawn for each tree.
    colsample_bytree : float
        Share of columns drawn for each tree.
    goss : bool
        Whether rows of a tree are drawn by gradient-based one-side sampling (Ke et al., LightGBM, 2017) in place of
        `subsample`.
    top_rate : float
        With `goss`: the share of rows, those with the largest gradients, that are all taken.
    other_rate : float
        With `goss`: the share of all rows drawn from the rest; their gradients count (1 - top_rate) / other_rate times.
    objective : str or None
        Loss of a numeric target: "squared_error", which None is too, "poisson", "tweedie", "huber" or "quantile", or a
        class of the active party's as ``package.module:CLASS``; of a ranking "ndcg" or "pairwise" (docs/objectives.md).
        Classifiers have the log-loss of their classes.
    max_delta_step : float or None
        Most that a leaf weight may be, before the learning rate, as in XGBoost; 0: no limit. None is 0.7 for
        ``objective="poisson"``, else 0.
    tweedie_variance_power : float or None
        With ``objective="tweedie"``: the variance is the mean to this power, above 1 and below 2; None is 1.5.
    huber_slope : float or None
        With ``objective="huber"``: the size of residuals from which on the loss is linear; None is 1.
    quantile_alpha : float or None
        With ``objective="quantile"``: the quantile that is predicted, above 0 and below 1; None is 0.5.
    base_score : float
        Prediction that training starts from: a probability for two classes, a margin for more, else a mean or quantile.
    fractional_bits : int
        Gradients are rounded once to multiples of 2^-fractional_bits; at most 20 under the lattice map.
    max_bin : int or None
        Most bins per feature, 2 to 255: None is 32, in paper mode what the paper has, where it says.
    early_stopping_rounds : int or None
        Stop when the last eval set's metric has not improved for so many rounds.
    random_state : int or None
        Seed of row and column sampling.
    """

    n_estimators: AtLeastOne = 20
    max_depth: Annotated[int, msgspec.Meta(ge=1, le=24)] = 3
    learning_rate: Positive = 0.3
    reg_lambda: NotNegative = 1.0
    reg_alpha: NotNegative = 0.0
    min_split_loss: NotNegative = 0.0
    min_child_weight: NotNegative = 1.0
    min_child_samples: AtLeastOne | None = None
    subsample: Share = 1.0
    colsample_bytree: Share = 1.0
    goss: bool = False
    top_rate: Share = 0.2
    other_rate: Share = 0.1
    objective: str | None = None
    max_delta_step: Annotated[float, msgspec.Meta(ge=0, le=20)] | None = None
    tweedie_variance_power: Annotated[float, msgspec.Meta(gt=1, lt=2)] | None = None
    huber_slope: Positive | None = None
    quantile_alpha: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    base_score: float = 0.5
    fractional_bits: Annotated[int, msgspec.Meta(ge=4, le=40)] = 16
    max_bin: Annotated[int, msgspec.Meta(ge=2, le=255)] | None = None
    early_stopping_rounds: AtLeastOne | None = None
    random_state: Seed | None = None

    table: ClassVar[str] = "boosting"
    """The table of a job file that has these options."""

    may_change: ClassVar[frozenset[str]] = frozenset({"n_estimators"})
    """Options that may differ between a training and its resumption."""

    @property
    def most_rounds(self) -> int:
        """Rounds of a training that does not stop early."""
        return self.n_estimators

    def checked(self, own: SystemOptions) -> BoostingOptions:
        """Return these options with what the system's mode decides resolved; refuse a contradiction."""
        for name, (objective, _) in _OF_OBJECTIVES.items():
            if getattr(self, name) is not None and self.objective != objective:
                raise ConfigError(f"{name} goes with objective={objective!r}, got objective={self.objective!r}")
        loss_class(self.objective)  # refuses an unknown one
        if self.goss and self.subsample < 1.0:
            raise ConfigError("goss draws the rows of each tree itself; leave subsample at 1")
        if self.goss and self.top_rate + self.other_rate > 1.0:
            raise ConfigError(f"expected top_rate + other_rate of at most 1, got {self.top_rate} + {self.other_rate}")
        paper = own.mode == "paper"
        fewest = self.min_child_samples or (1 if paper else 20)
        bins = self.max_bin or (own.paper_bins if paper else None) or 32
        return msgspec.structs.replace(self, min_child_samples=fewest, max_bin=bins)

    @property
    def loss_class(self) -> type[Objective]:
        """The class of the loss of a numeric target."""
        return loss_class(self.objective)

    @property
    def delta_step(self) -> float:
        """`max_delta_step`, resolved."""
        return self.loss_class.delta_step if self.max_delta_step is None else self.max_delta_step

    @property
    def of_loss(self) -> dict[str, float]:
        """Options of single objectives, resolved, by the names of their fields."""
        given = {name: getattr(self, name) for name in _OF_OBJECTIVES}
        own = {name: _OF_OBJECTIVES[name][1] if value is None else value for name, value in given.items()}
        return {**own, "max_delta_step": self.delta_step}

    @property
    def fewest_rows(self) -> int:
        """`min_child_samples`, resolved."""
        assert self.min_child_samples is not None
        return self.min_child_samples

    @property
    def most_bins(self) -> int:
        """`max_bin`, resolved."""
        assert self.max_bin is not None
        return self.max_bin

    @property
    def one_side(self) -> OneSide | None:
        """`goss` with its rates."""
        return OneSide(self.top_rate, self.other_rate) if self.goss else None

    def plan(self, n_columns: int) -> BoostingPlan:
        """Return the boosting loop's rounds, shares, seed and early stopping, for columns of all parties together."""
        return BoostingPlan(
            n_columns=n_columns,
            n_estimators=self.n_estimators,
            subsample=self.subsample,
            colsample_bytree=self.colsample_bytree,
            one_side=self.one_side,
            random_state=self.random_state,
            early_stopping_rounds=self.early_stopping_rounds,
        )

    def rules(self, objective: Objective) -> SplitRules:
        """Return the split rules for this objective's fixed point."""
        return self.rules_of(objective.grad_unit, objective.hess_unit)

    def rules_of(self, grad_unit: float, hess_unit: float) -> SplitRules:
        """Return the split rules for a fixed point, given what one step of a gradient and of a hessian is worth."""
        return SplitRules(
            grad_unit=grad_unit,
            hess_unit=hess_unit,
            reg_lambda=self.reg_lambda,
            reg_alpha=self.reg_alpha,
            min_split_loss=self.min_split_loss,
            min_child_weight=self.min_child_weight,
            max_delta_step=self.delta_step,
            min_child_samples=self.fewest_rows,
            max_depth=self.max_depth,
            learning_rate=self.learning_rate,
        )


@dataclass(kw_only=True, repr=False)
class Pooled(SystemOptions):
    """Train on one plain table, or on all parties' tables side by side: what every system is compared with.

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        Of boosted trees: "paper" lets leaves hold single rows, as it does in the other systems.
    allow_insecure : bool, default False
        Without effect: nothing is sent.
    solver : {"quasi-newton", "sgd"} or None, default None
        Of `LogisticRegression` of two classes: how weights are found; None is "quasi-newton".
    loss : {"taylor", "logistic"} or None, default None
        Of `LogisticRegression`: None is "taylor", the second-order form that all encrypted systems have.
    """

    system: ClassVar[str] = "pooled"
    solver: Literal["quasi-newton", "sgd"] | None = None
    loss: Literal["taylor", "logistic"] | None = None

    def check(self, common: Any) -> None:
        """Refuse options of a regression for boosting, and of boosting for a regression."""
        if isinstance(common, BoostingOptions):
            named = [name for name in ("solver", "loss") if getattr(self, name) is not None]
            if named:
                raise ConfigError(
                    f"Pooled({named[0]}=...) is about LogisticRegression; boosted trees have no {named[0]}"
                )
        elif common.whole_table and common.family != "multiclass" and self.solver is not None:
            raise ConfigError(
                f"Pooled(solver={self.solver!r}) is about training by batches; a regression of numbers, and one with "
                "standard errors, is solved on the whole table: leave solver out"
            )
        elif not common.classifies and self.loss is not None:
            raise ConfigError(f"Pooled(loss={self.loss!r}) is about LogisticRegression: leave loss out")
        elif self.mode == "paper":
            raise ConfigError("mode='paper' is about what parties send each other; system 'pooled' has no such mode")
