"""Options of FedXGBoost-LDP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.privacy.mechanisms import fitted_lambda
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
    mechanism : {"label_rr", "target", "piecewise", "laplace", "duchi"} or None, default None
        "label_rr" (classes) and "target" (numbers) train on labels that were randomised once, which costs `epsilon` for
        all trees together. The others add noise to every row's gradient, which costs `epsilon` in each tree. None is
        "target" if a `target_range` is given, else "label_rr"; in paper mode "duchi".
    epsilon : float or None, default None
        Privacy parameter of each label, or of each gradient of one tree; None is 1.
    target_range : sequence of two floats or None, default None
        Required by "target": the least and the largest label. Labels outside are clipped. All parties see the range, so
        choose it from general knowledge and not from the labels.
    epsilon_total : float or None, default None
        The most that all releases in the active party's ledger may cost a person. Training ends before a tree that
        would exceed it.
    delta : float or None, default None
        With `epsilon_total`: releases cost what an accountant computes at this delta, if that is less than their sum.
    split_score : {"first_order", "second_order"} or None, default None
        Whether splits are chosen by sums of gradients only, or with hessians. None is "first_order" in paper mode,
        "second_order" in safe mode.
    clip : float or None, default None
        Gradients are clipped to [-clip, clip] before noise. None: the largest possible value, 1 for two classes.
    clip_hess : float or None, default None
        Hessians that carry noise are clipped to [0, clip_hess]. None: the largest possible value, 1/4 for two classes.
    refit : bool or None, default None
        Whether leaf values of the finished model are recomputed from true labels; they are sent to no party. None is
        False: leaf values are computed from what passive parties received.

    See Also
    --------
    FederBoostVertical : Noise on passive columns instead of labels.
    SecureBoost : Encryption instead of noise.

    Examples
    --------
    Labels are randomised once, each with epsilon 3, before any training step:

    >>> import numpy as np, treaty
    >>> tables = {"bank": np.arange(100.0)[:, None], "shop": np.arange(100.0)[::-1, None] % 9}
    >>> y = tables["bank"][:, 0] > 50
    >>> model = treaty.GBDTClassifier(treaty.FedXGBoostLDP(epsilon=3.0), max_depth=2, random_state=0).fit(tables, y)
    >>> bool(model.score(tables, y) > 0.7)
    True
    """

    system: ClassVar[str] = "fedxgboost-ldp"
    limits_categories = True
    default_trees = FEW_TREES
    # limits, which do not change the noise
    may_change: ClassVar[frozenset[str]] = frozenset({"epsilon_total", "delta"})
    mechanism: Literal["label_rr", "target", "laplace", "duchi", "piecewise"] | None = None
    epsilon: Positive | None = None
    target_range: Annotated[Sequence[float], msgspec.Meta(min_length=2, max_length=2)] | None = None
    epsilon_total: Positive | None = None
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    split_score: Literal["first_order", "second_order"] | None = None
    clip: Positive | None = None
    clip_hess: Positive | None = None
    refit: bool | None = None

    @property
    def noise_mechanism(self) -> str:
        """`mechanism`, with its default."""
        once = "label_rr" if self.target_range is None else "target"
        return self.mechanism or ("duchi" if self.mode == "paper" else once)

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
        return None if self.adds_noise else self.noise_epsilon

    @property
    def label_range(self) -> tuple[float, float] | None:
        return None if self.target_range is None else (float(self.target_range[0]), float(self.target_range[1]))

    @property
    def adds_noise(self) -> bool:
        """Whether gradients carry noise: labels that were randomised once need none."""
        return self.noise_mechanism not in ("label_rr", "target")

    @property
    def default_lambda(self) -> float:
        return 1.0 if self.mode == "paper" else fitted_lambda(self.noise_mechanism, self.noise_epsilon)

    def check(self, common: Any) -> None:
        once, paper, mechanism = not self.adds_noise, self.mode == "paper", self.noise_mechanism
        objective, loss = f"objective={common.objective!r}", common.loss_class
        on_gradients = f"mechanism={mechanism!r} randomises labels once: name one of the others, such as 'piecewise'"
        for refused, why in (
            (self.delta is not None and self.epsilon_total is None,
             "delta goes with epsilon_total; give both or leave delta out"),
            (mechanism == "target" and self.target_range is None,
             "mechanism='target' needs target_range=(least, most), between which labels lie"),
            (mechanism != "target" and self.target_range is not None,
             f"target_range is for mechanism='target', got {mechanism!r}: leave one of them out"),
            (self.label_range is not None and not -math.inf < self.label_range[0] < self.label_range[1] < math.inf,
             f"expected target_range of two finite numbers, the lower first, got {self.target_range}"),
            (mechanism == "target" and loss.__struct_config__.tag != "squared_error",
             f"{objective} does not average noise on labels out: use 'squared_error', or noise on gradients "
             "(mechanism='piecewise')"),
            (once and (self.clip is not None or self.clip_hess is not None),
             f"clip and clip_hess are for noise on gradients, and {on_gradients}, or leave them out"),
            (once and self.refit, f"refit uses true labels, and {on_gradients}, or leave refit out"),
            (once and paper,
             f"mode='paper' is the published protocol, noise on gradients next to exact sums; mechanism={mechanism!r} "
             "is none of its mechanisms and sends no exact sum: use mode='safe'"),
            (common.goss,
             "goss draws rows by their true gradients, and so shows which are large: use subsample"),
            (loss.refreshes_leaves,
             f"{objective} computes leaf values from true labels, so the noisy gradients of later trees would reveal "
             'more about them than their epsilon: use "huber", or another system'),
            (loss.takes == "numbers" and loss.leaf_unit > 0.0,
             f"{objective} has steps that follow from true labels: use 'squared_error'"),
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
