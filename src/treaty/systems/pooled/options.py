"""Options that boosting has in every system, and those of training on one table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.data.binning import MOST_BINS, MOST_CATEGORIES
from treaty.errors import ConfigError
from treaty.systems.options import AtLeastOne, CommonOptions, NotNegative, Positive, Seed, Share, SystemOptions
from treaty.systems.pooled.constraints import checked_constraints
from treaty.trees.boosting import BoostingPlan, OneSide
from treaty.trees.constraints import Constraints
from treaty.trees.objectives import ABSOLUTE, Objective, check_names, loss_class, loss_name
from treaty.trees.splits import SplitRules

ONEHOT_BELOW = 32
"""`max_cat_to_onehot` unless it is given (docs/growth.md)."""

# options of one objective: its name, and the value that None stands for
_OF_OBJECTIVES = {
    "tweedie_variance_power": ("tweedie", 1.5),
    "huber_slope": ("huber", 1.0),
    "quantile_alpha": ("quantile", 0.5),
}


class BoostingOptions(CommonOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that boosting has in every system, with the same defaults.

    `treaty.GBDTClassifier` says what each of them means; docs/options.md has them in a table.
    """

    n_estimators: AtLeastOne | None = None
    max_depth: Annotated[int, msgspec.Meta(ge=0, le=24)] | None = None
    max_leaves: Annotated[int, msgspec.Meta(ge=2, le=4096)] | None = None
    num_parallel_tree: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    multi_strategy: Literal["one_output_per_tree", "multi_output_tree"] = "one_output_per_tree"
    process_type: Literal["default", "update"] = "default"
    learning_rate: Positive | None = None
    reg_lambda: NotNegative | None = None
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
    max_cat_to_onehot: AtLeastOne | None = None
    category_sets: Literal["halves", "sorted"] = "halves"
    max_categories: Annotated[int, msgspec.Meta(ge=2, le=MOST_CATEGORIES)] | None = None
    tweedie_variance_power: Annotated[float, msgspec.Meta(gt=1, lt=2)] | None = None
    huber_slope: Positive | None = None
    quantile_alpha: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    base_score: float | None = None
    monotone_constraints: dict[str, int] | list[int] | bool | None = None
    interaction_constraints: list[list[str | int]] | None = None
    fractional_bits: Annotated[int, msgspec.Meta(ge=4, le=40)] = 16
    max_bin: Annotated[int, msgspec.Meta(ge=2, le=255)] | None = None
    eval_metric: str | None = None
    early_stopping_rounds: AtLeastOne | None = None
    early_stopping_min_delta: NotNegative = 0.0
    random_state: Seed | None = None

    table: ClassVar[str] = "boosting"
    may_change: ClassVar[frozenset[str]] = frozenset({"n_estimators"})

    @property
    def most_rounds(self) -> int:
        assert self.n_estimators is not None
        return self.n_estimators

    def checked(self, own: SystemOptions) -> BoostingOptions:
        """Return these options with those that depend on the system's mode resolved; refuse contradictions."""
        for name, (objective, _) in _OF_OBJECTIVES.items():
            fits = loss_name(self.objective) == objective and self.objective not in ABSOLUTE
            if getattr(self, name) is not None and not fits:
                raise ConfigError(f"{name} needs objective={objective!r}, got objective={self.objective!r}")
        # refuses an unknown objective
        loss_class(self.objective)
        check_names(self.metrics)
        if self.goss and self.subsample < 1.0:
            raise ConfigError("goss draws the rows of each tree: leave subsample at 1")
        if self.goss and self.top_rate + self.other_rate > 1.0:
            raise ConfigError(f"expected top_rate + other_rate of at most 1, got {self.top_rate} + {self.other_rate}")
        if self.goss:
            self.refuse_outputs("goss draws the rows of a tree by the gradients of one class")
        if self.category_sets == "sorted":
            self.refuse_outputs("category_sets='sorted' sorts categories by the gradients of one class")
        if self.monotone_constraints:
            self.refuse_outputs("monotone_constraints bound leaves of one weight")
        # what refreshing the leaves of a finished model does without
        if self.refreshes and (self.goss or self.subsample < 1.0):
            raise ConfigError("process_type='update' takes all rows for every leaf: leave subsample at 1, and goss out")
        if self.refreshes and self.monotone_constraints:
            raise ConfigError(
                "process_type='update' keeps the splits of the finished model, which need not be monotone on other "
                "rows: leave monotone_constraints out, or train a new model"
            )
        paper = own.mode == "paper"
        rounds, usual, rate = own.default_trees
        depth = (0 if self.max_leaves else usual) if self.max_depth is None else self.max_depth
        # 1 stands for the default, unless rounds are counted
        parallel = self.num_parallel_tree if self.n_estimators else max(self.num_parallel_tree, own.default_parallel)
        if depth == 0 and self.max_leaves is None:
            raise ConfigError("max_depth=0 sets no limit: name max_leaves, the most leaves of a tree, or a depth")
        if depth and self.max_leaves and self.max_leaves > 1 << depth:
            raise ConfigError(
                f"max_leaves={self.max_leaves} is more than the {1 << depth} leaves that max_depth={depth} allows: "
                "raise max_depth, or leave it out for no limit"
            )
        # paper mode lets leaves hold single rows
        fewest = self.min_child_samples or (1 if paper else 20)
        bins = self.max_bin or (own.paper_bins if paper else None) or own.default_bins
        limited = own.limits_categories
        if limited and (self.max_categories or 0) > MOST_BINS:
            raise ConfigError(
                f"expected max_categories of at most {MOST_BINS} under {own.system!r}, whose noise or cost grows with "
                f"the categories of a column, got {self.max_categories}"
            )
        return checked_constraints(msgspec.structs.replace(
            self, objective=loss_name(self.objective), min_child_samples=fewest, max_bin=bins,
            max_categories=self.max_categories or (bins if limited else MOST_CATEGORIES),
            max_cat_to_onehot=self.max_cat_to_onehot or (MOST_CATEGORIES + 1 if limited else ONEHOT_BELOW),
            n_estimators=self.n_estimators or rounds, num_parallel_tree=parallel, max_depth=depth,
            learning_rate=self.learning_rate or rate,
            reg_lambda=own.default_lambda if self.reg_lambda is None else self.reg_lambda,
        ))  # fmt: skip

    def refuse_forests(self, why: str) -> None:
        """Refuse rounds of several trees for an output, with the reason."""
        if self.num_parallel_tree > 1:
            raise ConfigError(f"num_parallel_tree={self.num_parallel_tree}: {why}; leave it out")

    def refuse_outputs(self, why: str) -> None:
        """Refuse multi-output trees, with the reason."""
        if self.multi_output:
            raise ConfigError(f"multi_strategy='multi_output_tree': {why}; leave multi_strategy out")

    def refuse_leaves(self, why: str) -> None:
        """Refuse growth by best gain, with the reason."""
        if self.max_leaves is not None:
            raise ConfigError(f"max_leaves grows trees by best gain, and {why}: leave it out and set max_depth")

    @property
    def depth(self) -> int:
        """The most levels of splits: `max_depth`, or what `max_leaves` allows."""
        most = 24 if self.max_leaves is None else self.max_leaves - 1
        return min(self.max_depth or most, most)

    @property
    def multi_output(self) -> bool:
        """Whether a round grows one structure for all classes."""
        return self.multi_strategy == "multi_output_tree"

    @property
    def refreshes(self) -> bool:
        """Whether nothing grows, and a finished model's leaves get new weights."""
        return self.process_type == "update"

    @property
    def constrained(self) -> bool:
        """Whether there are constraints on columns."""
        return bool(self.monotone_constraints or self.interaction_constraints)

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
        given = {name: (getattr(self, name), default) for name, (_, default) in _OF_OBJECTIVES.items()}
        own = {name: default if value is None else value for name, (value, default) in given.items()}
        return {**own, "max_delta_step": self.delta_step}

    @property
    def metrics(self) -> list[str]:
        """The names in `eval_metric`; empty: the loss's own metric."""
        return [] if self.eval_metric is None else [name.strip() for name in self.eval_metric.split(",")]

    @property
    def rate(self) -> float:
        """`learning_rate`, resolved."""
        assert self.learning_rate is not None
        return self.learning_rate

    @property
    def penalty(self) -> float:
        """`reg_lambda`, resolved."""
        assert self.reg_lambda is not None
        return self.reg_lambda

    @property
    def fewest_rows(self) -> int:
        """`min_child_samples`, resolved."""
        assert self.min_child_samples is not None
        return self.min_child_samples

    @property
    def onehot_below(self) -> int:
        """`max_cat_to_onehot`, resolved."""
        return self.max_cat_to_onehot or ONEHOT_BELOW

    @property
    def most_bins(self) -> int:
        """`max_bin`, resolved."""
        assert self.max_bin is not None
        return self.max_bin

    @property
    def most_categories(self) -> int:
        """`max_categories`, resolved."""
        assert self.max_categories is not None
        return self.max_categories

    @property
    def bin_limits(self) -> tuple[int, int]:
        """The most bins of a number and of a categorical column."""
        return self.most_bins, self.most_categories

    @property
    def one_side(self) -> OneSide | None:
        """`goss` with its rates."""
        return OneSide(self.top_rate, self.other_rate) if self.goss else None

    def plan(self, n_columns: int) -> BoostingPlan:
        """Return the plan of the boosting loop, for the columns of all parties together."""
        return BoostingPlan(
            n_columns=n_columns, n_estimators=self.most_rounds, subsample=self.subsample,
            colsample_bytree=self.colsample_bytree, one_side=self.one_side, random_state=self.random_state,
            early_stopping_rounds=self.early_stopping_rounds,
            early_stopping_min_delta=self.early_stopping_min_delta, metrics=self.metrics,
            multi_output=self.multi_output and not self.refreshes,
        )  # fmt: skip

    def rules(self, objective: Objective, constraints: Constraints | None = None) -> SplitRules:
        """Return the split rules for an objective's fixed point; small labels have a smaller least gain."""
        rules = self.rules_of(objective.grad_unit, objective.hess_unit)
        # a gain is a squared gradient divided by a hessian
        scale = objective.grad_clip * objective.grad_clip / objective.hess_clip
        # whole units of leaves are of a protocol that compares gains exactly: any above 0 will do
        least = 0.0 if objective.leaf_unit else rules.min_gain * min(1.0, scale)
        return replace(
            rules, min_gain=least, leaf_limit=objective.leaf_limit,
            leaf_unit=objective.leaf_unit * objective.grad_clip, constraints=constraints,
        )  # fmt: skip

    def rules_of(self, grad_unit: float, hess_unit: float) -> SplitRules:
        """Return the split rules for a fixed point, given the value of one step of a gradient and of a hessian."""
        return SplitRules(
            grad_unit=grad_unit, hess_unit=hess_unit, reg_lambda=self.penalty, reg_alpha=self.reg_alpha,
            min_split_loss=self.min_split_loss, min_child_weight=self.min_child_weight,
            max_delta_step=self.delta_step, min_child_samples=self.fewest_rows, max_depth=self.depth,
            max_leaves=self.max_leaves or 0, onehot_below=self.onehot_below, halves=self.category_sets == "halves",
            leaf_unit=self.loss_class.leaf_unit,
            # the trees of a round are averaged
            learning_rate=self.rate / self.num_parallel_tree,
        )  # fmt: skip


@dataclass(kw_only=True, repr=False)
class Pooled(SystemOptions):
    """Train on one plain table, or on all parties' tables side by side: the reference for every other system.

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        For boosted trees: "paper" lets leaves hold single rows, as in the other systems.
    allow_insecure : bool, default False
        Without effect: nothing is sent.
    solver : {"quasi-newton", "sgd"} or None, default None
        For `LogisticRegression` of two classes: how weights are found; None is "quasi-newton".
    loss : {"taylor", "logistic"} or None, default None
        For `LogisticRegression`; None is "taylor", the second-order form that all encrypted systems use.

    See Also
    --------
    SecureBoost : The usual system for parties with different columns.
    FederBoostHorizontal : The usual system for participants with different rows.

    Examples
    --------
    >>> import numpy as np, treaty
    >>> X = np.arange(100.0)[:, None]
    >>> model = treaty.LogisticRegression(treaty.Pooled(loss="logistic"), l2=0.01).fit(X, X[:, 0] > 50)
    >>> model.predict([[10.0], [90.0]])
    array([False,  True])
    """

    system: ClassVar[str] = "pooled"
    default_bins: ClassVar[int] = MOST_BINS  # without messages, bins cost little
    solver: Literal["quasi-newton", "sgd"] | None = None
    loss: Literal["taylor", "logistic"] | None = None

    def check(self, common: Any) -> None:
        if common.table != "regression":
            named = [name for name in ("solver", "loss") if getattr(self, name) is not None]
            if named:
                what = "boosted trees" if isinstance(common, BoostingOptions) else "statistics"
                raise ConfigError(f"Pooled({named[0]}=...) is for LogisticRegression: {what} have no {named[0]}")
        elif not common.has_batches and common.family != "multiclass" and self.solver is not None:
            raise ConfigError(
                f"Pooled(solver={self.solver!r}) is for training by batches; a regression of numbers, and one with "
                "standard errors, is solved on the whole table: leave solver out"
            )
        elif not common.classifies and self.loss is not None:
            raise ConfigError(f"Pooled(loss={self.loss!r}) is for LogisticRegression: leave loss out")
        elif self.mode == "paper":
            raise ConfigError("mode='paper' changes what parties send: a pooled regression has no such mode")
