"""Options of FedXGBoost-LDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.systems.options import FEW_TREES, Positive, SystemOptions
from treaty.systems.pooled.constraints import refuse_constraints


@dataclass(kw_only=True, repr=False)
class FedXGBoostLDP(SystemOptions):
    """Vertical boosting on gradients that carry noise once a tree (FedXGBoost-LDP, Le et al. 2021, arXiv 2106.10662).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" sends exact sums next to the noise, so that no epsilon holds; it needs `allow_insecure`. Its mechanism
        and score are the paper's.
    allow_insecure : bool, default False
        Consent to paper mode; every party must give its own.
    mechanism : {"piecewise", "laplace", "duchi", "hybrid", "label_rr"} or None, default None
        Noise on every row's gradient, which costs `epsilon` in each tree; None is "piecewise", in paper mode "duchi".
        "label_rr" trains on labels that were randomised once instead, which costs `epsilon` for all trees together.
    epsilon : float or None, default None
        Privacy parameter of each gradient of one tree; None is 1. Under "label_rr", that of each label, and required.
    epsilon_total : float or None, default None
        The most that all releases in the active party's ledger may cost a person. Training ends before a tree that
        would exceed it.
    delta : float or None, default None
        With `epsilon_total`: releases cost what an accountant computes at this delta, if that is less than their sum.
    split_score : {"first_order", "second_order"} or None, default None
        Whether splits are chosen by sums of gradients alone or with hessians. None is "first_order" in paper mode,
        "second_order" in safe mode.
    clip : float or None, default None
        Gradients are clipped to [-clip, clip] before noise. None: the largest there can be, for two classes 1.
    clip_hess : float or None, default None
        Hessians that carry noise are clipped to [0, clip_hess]. None: the largest there can be, for two classes 1/4.
    refit : bool or None, default None
        Whether leaf values of the finished model are recomputed from true labels; they are sent to no party. None is
        False: leaf values are computed from what passive parties received.
    """

    system: ClassVar[str] = "fedxgboost-ldp"
    limits_categories = True
    default_trees = FEW_TREES
    # limits, which do not change the noise
    may_change: ClassVar[frozenset[str]] = frozenset({"epsilon_total", "delta"})
    mechanism: Literal["label_rr", "laplace", "duchi", "piecewise", "hybrid"] | None = None
    epsilon: Positive | None = None
    epsilon_total: Positive | None = None
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    split_score: Literal["first_order", "second_order"] | None = None
    clip: Positive | None = None
    clip_hess: Positive | None = None
    refit: bool | None = None

    @property
    def noise_mechanism(self) -> str:
        """`mechanism`, with its default."""
        return self.mechanism or ("duchi" if self.mode == "paper" else "piecewise")

    @property
    def noise_epsilon(self) -> float:
        """`epsilon`, with its default."""
        return 1.0 if self.epsilon is None else self.epsilon

    @property
    def first_order(self) -> bool:
        """Whether splits are scored by gradients alone; hessians are not sent then."""
        return self.mode == "paper" if self.split_score is None else self.split_score == "first_order"

    @property
    def label_epsilon(self) -> float | None:
        return self.epsilon if self.mechanism == "label_rr" else None

    @property
    def adds_noise(self) -> bool:
        """Whether gradients carry noise: labels that were randomised once need none."""
        return self.mechanism != "label_rr"

    def check(self, common: Any) -> None:
        labels, paper = self.mechanism == "label_rr", self.mode == "paper"
        objective, loss = f"objective={common.objective!r}", common.loss_class
        for refused, why in (
            (self.delta is not None and self.epsilon_total is None,
             "delta goes with epsilon_total; give both or leave delta out"),
            (labels and self.epsilon is None,
             "mechanism='label_rr' needs the epsilon that labels may cost: epsilon=1.0 for example"),
            (labels and (self.clip is not None or self.clip_hess is not None),
             "clip and clip_hess are for noise on gradients, which mechanism='label_rr' does not add: leave them out"),
            (labels and self.refit,
             "refit uses true labels, and mechanism='label_rr' randomises them once: leave one out"),
            (labels and paper,
             "mode='paper' is the published protocol, noise on gradients next to exact sums; mechanism='label_rr' "
             "is none of its mechanisms and sends no exact sum: use mode='safe'"),
            (common.goss,
             "goss draws rows by their true gradients, and so shows which are large: use subsample"),
            (loss.refreshes_leaves,
             f"{objective} computes leaf values from true labels, so the noisy gradients of later trees would reveal "
             'more about them than their epsilon: use "huber", or another system'),
            (loss.takes == "groups",
             f"{objective} computes gradients from the labels of all rows of a group, so a label would cost the "
             "epsilon of each: use another system"),
            (common.reg_lambda == 0.0, "expected reg_lambda above 0: sums of noise are divided by it"),
        ):  # fmt: skip
            if refused:
                raise ConfigError(why)
        common.refuse_forests("every tree of a round would cost its own noise; take as many n_estimators instead")
        common.refuse_leaves("the order of noisy gains would cost further noise")
        common.refuse_outputs("the noise of every class would be in every gain")
        refuse_constraints(
            common,
            "passive parties choose splits themselves, and know neither leaf weights nor the columns of other parties' "
            "splits: use SecureBoost(allow_exact_sums=True) or FederBoostVertical()",
        )
        # last: consent mends none of the errors above
        if paper:
            check_consent(self)
            if self.epsilon_total is not None:
                raise ConfigError("mode='paper' has no epsilon that epsilon_total could limit: leave it out")


def check_consent(options: FedXGBoostLDP) -> None:
    """Refuse the published protocol unless this party's own options consent to it."""
    if options.mode == "paper" and not options.allow_insecure:
        raise ConfigError(
            "mode='paper' sends the exact sum of gradients of every node next to the noisy ones, and no epsilon holds; "
            "it needs allow_insecure=True of every party",
            public="it does not consent to what fedxgboost-ldp shows as published (allow_insecure)",
        )
