"""Options of FedXGB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.systems.horizontal.option_checks import refuse_goss
from treaty.systems.options import AtLeastOne, SystemOptions


@dataclass(kw_only=True, repr=False)
class FedXGB(SystemOptions):
    """Boosting among hundreds of users, by way of edge servers, for a server that keeps the model (Liu et al. 2020).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" is the published secure aggregation, which hides no user from its edge server; needs `allow_insecure`.
    allow_insecure : bool, default False
        Consent to ``mode="paper"`` or ``expose="paper"``.
    dropout : float or None, default None
        In a `fit` between threads, the share of each domain's users, rounded down, that is lost at every tenth round,
        until the next tenth. None is 0. Between processes users may always vanish.
    edges : int or None, default None
        How many edge servers `fit` plays; users are assigned to them in turn. None is 3.
    max_users : int or None, default None
        Largest number of users of a domain that take part in a round: those that dropped out least. None: all.
    feature_sample : int or None, default None
        How many columns are drawn for each tree, in place of `colsample_bytree`.
    expose : {"nothing", "paper", "model"} or None, default None
        What users learn of the model. "nothing" (None): of their own rows, the slot at each level and the value at the
        end, which edge servers compute on shares. "model": all of it, many times faster. "paper": all but thresholds,
        while edge servers see the way of every row, for comparison; needs `allow_insecure`.
    comparison : {"shamir", "additive"} or None, default None
        With ``expose="nothing"``: how edge servers compute on shares of rows and splits. "shamir" (None): all of them,
        of whom at most (edges - 1) // 2 may collude. "additive": the first two, with random numbers of the third,
        several times faster; no two of these three may collude.
    """

    system: ClassVar[str] = "fedxgb"
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    edges: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_users: Annotated[int, msgspec.Meta(ge=3)] | None = None
    feature_sample: AtLeastOne | None = None
    expose: Literal["nothing", "paper", "model"] | None = None
    comparison: Literal["shamir", "additive"] | None = None

    @property
    def hides_model(self) -> bool:
        """Whether users do not learn the model, or not all of it, and rows follow it on shares."""
        return self.expose != "model"

    @property
    def compares(self) -> Literal["shamir", "additive"]:
        """`comparison`, resolved."""
        return self.comparison or "shamir"

    def column_share(self, n_columns: int, colsample_bytree: float) -> float:
        """Return the share of columns drawn for each tree; refuse a `feature_sample` of more than there are."""
        if self.feature_sample is None:
            return colsample_bytree
        if self.feature_sample > n_columns:
            raise ConfigError(f"expected feature_sample of at most {n_columns} columns, got {self.feature_sample}")
        return self.feature_sample / n_columns

    def check(self, common: Any) -> None:
        """Refuse options that do not go together."""
        refuse_goss(common)
        if self.feature_sample is not None and common.colsample_bytree < 1.0:
            raise ConfigError("feature_sample and colsample_bytree say the same in two ways; give one")
        if self.expose == "paper" and not self.allow_insecure:
            raise ConfigError(
                'expose="paper" shows users the columns and leaf values of all trees, so that thresholds are found by '
                "bisection with rows made up for that, and edge servers every comparison, so the way of everybody's "
                "rows; it needs allow_insecure=True"
            )
        if self.comparison is not None and self.expose not in (None, "nothing"):
            raise ConfigError(
                f'comparison is about rows that follow a hidden model, and expose="{self.expose}" tells users of it; '
                "leave one of them out"
            )
