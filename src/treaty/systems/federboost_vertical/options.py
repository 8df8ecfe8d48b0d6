"""Options of FederBoost by column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from treaty.errors import ConfigError
from treaty.systems.options import FEW_TREES, Positive, SystemOptions


@dataclass(kw_only=True, repr=False)
class FederBoostVertical(SystemOptions):
    """Vertical boosting on buckets that were randomised once (FederBoost, Tian et al. 2020, arXiv 2011.02796).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" permits buckets in the clear (``epsilon=inf``). Between organisations it also permits eval sets and rows
        to predict that have the values of training rows but no ids. Buckets are tie-aware in both modes.
    allow_insecure : bool, default False
        Without effect: in this system only `mode` needs consent.
    epsilon : float or None, default None
        Privacy parameter per value of each passive column. None is 4; infinite is no noise, in paper mode only. The
        epsilons of a person's values in all columns add up.
    epsilon_person : float or None, default None
        Privacy parameter per person, shared evenly by a party's columns; replaces `epsilon`.
    unbiased : bool or None, default None
        Whether splits on columns that no tree has used yet are chosen on sums corrected for the noise. None is False,
        because no benefit was measured.
    """

    system: ClassVar[str] = "federboost-vertical"
    limits_categories = True
    default_trees = FEW_TREES
    paper_bins: ClassVar[int | None] = 16
    may_be_infinite: ClassVar[frozenset[str]] = frozenset({"epsilon"})
    epsilon: Positive | None = None
    epsilon_person: Positive | None = None
    unbiased: bool | None = None

    @property
    def value_epsilon(self) -> float:
        """`epsilon`, with its default."""
        return 4.0 if self.epsilon is None else self.epsilon

    def epsilons(self, names: Sequence[str]) -> dict[str, float]:
        """Return the epsilon of a value in each of a party's columns: `epsilon`, or a share of `epsilon_person`."""
        share = self.value_epsilon if self.epsilon_person is None else self.epsilon_person / max(1, len(names))
        return dict.fromkeys(names, share)

    def check(self, common: Any) -> None:
        common.refuse_outputs("its splits, of noisy buckets, were measured with one tree for each class alone")
        if self.epsilon is not None and self.epsilon_person is not None:
            raise ConfigError("expected epsilon (per value) or epsilon_person (per person, over columns), got both")
        if self.epsilon == math.inf and self.mode != "paper":
            raise ConfigError(
                'epsilon=inf sends buckets in the clear, and so the order of all values: it needs mode="paper"'
            )
