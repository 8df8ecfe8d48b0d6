"""Options of FedXGB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.systems.horizontal.rows import refuse_goss, refuse_objectives
from treaty.systems.options import AtLeastOne, SystemOptions

MAX_QUERIES = 100
"""Rows of each user that a hidden model predicts over all runs, by default."""

GROUP = 3
"""Fewest users of a domain whose sum is opened, by default."""

PAPER_LEAKS = (
    'mode="paper" of "fedxgb" is the published secure aggregation, which is broken: every edge server can read the '
    "histograms of each of its users, hence labels and values of users with few rows, and the server sees each "
    "domain's sums"
)


@dataclass(kw_only=True, repr=False)
class FedXGB(SystemOptions):
    """Boosting among hundreds of users, by way of edge servers, for a server that keeps the model (Liu et al. 2020).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" is the published secure aggregation, which hides no user from its edge server, and prediction, which
        shows all but thresholds (`expose`); needs `allow_insecure`.
    allow_insecure : bool, default False
        Consent to ``mode="paper"`` or ``expose="paper"``.
    dropout : float or None, default None
        In a `fit` between threads, the share of each domain's users, rounded down, that is lost at every
        `dropout_period`-th round, until others are lost. None is 0. Between processes users may always vanish.
    dropout_period : int or None, default None
        With `dropout`: how many rounds there are from one loss to the next. None is 10.
    edges : int or None, default None
        How many edge servers `fit` plays; users are assigned to them in turn. None is 3.
    max_users : int or None, default None
        Largest number of users of a domain that take part in a round: those that dropped out least. None: all.
    group_size : int or None, default None
        Sums are over whole groups of so many users of a domain, or a few more, dealt at the beginning: `group_size` - 2
        users in collusion with the server find sums of nobody else, however long the job. None: groups of three, and
        sums over other cohorts, too, as long as no combination of them is of one user or two. A lost user then costs
        fewer others their place; two users in collusion with the server may find another one's sums.
    feature_sample : int or None, default None
        How many columns are drawn for each tree, in place of `colsample_bytree`.
    expose : {"nothing", "paper", "model"} or None, default None
        What users learn of the model. "nothing", which None is in safe mode: of their own rows, the slot at each level
        and the value at the end, which edge servers compute on shares. "model": all of it, many times faster. "paper",
        which None is in paper mode: all but thresholds, while edge servers see the way of every row, for comparison;
        needs `allow_insecure`.
    comparison : {"shamir", "additive"} or None, default None
        With ``expose="nothing"``: how edge servers compute on shares of rows and splits. "shamir" (None): all of them,
        of whom at most (edges - 1) // 2 may collude. "additive": the first two, with random numbers of the third,
        several times faster; no two of these three may collude.
    max_queries : int or None, default None
        With ``expose="nothing"``: how many rows of each user the finished model predicts on shares, over all runs, as
        edge servers count them. None is 100.
    """

    system: ClassVar[str] = "fedxgb"
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    dropout_period: AtLeastOne | None = None
    edges: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_users: Annotated[int, msgspec.Meta(ge=3)] | None = None
    group_size: Annotated[int, msgspec.Meta(ge=3, le=1000)] | None = None
    feature_sample: AtLeastOne | None = None
    expose: Literal["nothing", "paper", "model"] | None = None
    comparison: Literal["shamir", "additive"] | None = None
    max_queries: AtLeastOne | None = None

    @property
    def exposes(self) -> Literal["nothing", "paper", "model"]:
        """`expose`, resolved."""
        return self.expose or ("paper" if self.mode == "paper" else "nothing")

    @property
    def hides_model(self) -> bool:
        """Whether users do not learn the model, or not all of it, and rows follow it on shares."""
        return self.exposes != "model"

    @property
    def compares(self) -> Literal["shamir", "additive"]:
        """`comparison`, resolved."""
        return self.comparison or "shamir"

    @property
    def queries(self) -> int:
        """`max_queries`, resolved."""
        return self.max_queries or MAX_QUERIES

    @property
    def group(self) -> int:
        """Fewest users of a domain whose sum is opened."""
        return self.group_size or GROUP

    def column_share(self, n_columns: int, colsample_bytree: float) -> float:
        """Return the share of columns drawn for each tree; refuse a `feature_sample` of more than there are."""
        if self.feature_sample is None:
            return colsample_bytree
        if self.feature_sample > n_columns:
            raise ConfigError(f"expected feature_sample of at most {n_columns} columns, got {self.feature_sample}")
        return self.feature_sample / n_columns

    def check(self, common: Any) -> None:
        refuse_goss(common)
        refuse_objectives(common)
        check_consent(self)
        if self.dropout_period is not None and self.dropout is None:
            raise ConfigError("dropout_period says how often dropout loses users; give dropout, or leave it out")
        if self.feature_sample is not None and common.colsample_bytree < 1.0:
            raise ConfigError("feature_sample and colsample_bytree say the same in two ways; give one")
        if self.group_size is not None and self.mode == "paper":
            raise ConfigError('the published aggregation, mode="paper", has no groups; leave group_size out')
        if self.exposes == "paper" and not self.allow_insecure:
            raise ConfigError(
                'expose="paper" shows users the columns and leaf values of all trees, so that thresholds are found by '
                "bisection with rows made up for that, and edge servers every comparison, so the way of everybody's "
                "rows; it needs allow_insecure=True"
            )
        named = [name for name in ("comparison", "max_queries") if getattr(self, name) is not None]
        if named and self.exposes != "nothing":
            raise ConfigError(
                f'{named[0]} is about rows that follow a hidden model, and expose="{self.exposes}" tells users of it; '
                "leave one of them out"
            )


def check_consent(options: FedXGB) -> None:
    """Refuse the published secure aggregation unless these options consent to it."""
    if options.mode == "paper" and not options.allow_insecure:
        raise ConfigError(f'{PAPER_LEAKS}; set allow_insecure=True for comparison on public data, or mode="safe"')
