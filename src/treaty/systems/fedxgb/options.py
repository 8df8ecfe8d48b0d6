"""Options of FedXGB."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.systems.horizontal.sum_noise import RowOptions
from treaty.systems.options import AtLeastOne

logger = logging.getLogger(__name__)

Comparison = Literal["shamir", "additive"]

# Rows of each user that a hidden model predicts over all runs, by default
MAX_QUERIES = 100

# Fewest users of a domain whose sum is opened, by default
GROUP = 3

ADDITIVE = 3  # edge servers of a committee: two that compute, and a dealer

PAPER_LEAKS = (
    'mode="paper" of "fedxgb" is the published secure aggregation, which is broken: every edge server can read the '
    "histograms of each of its users, hence labels and values of users with few rows, and the server sees each "
    "domain's sums"
)


@dataclass(kw_only=True, repr=False)
class FedXGB(RowOptions):
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
        `dropout_period`-th round, until others are lost. None is 0. Between processes, users may always vanish.
    dropout_period : int or None, default None
        With `dropout`: the number of rounds from one loss to the next. None is 10.
    edges : int or None, default None
        How many edge servers `fit` plays; users are assigned to them in turn. None is 3.
    max_users : int or None, default None
        Largest number of users of a domain that take part in a round: those that dropped out least. None: all.
    group_size : int or None, default None
        Sums are over whole groups of `group_size` users of a domain, or a few more, formed at the start. Up to
        `group_size` - 2 users that collude with the server find no other user's sums, however long the job. None:
        groups of three, and also sums over other cohorts, if no combination of them is of one user or two. Then a lost
        user excludes fewer others; but two users that collude with the server may find another user's sums.
    feature_sample : int or None, default None
        How many columns are drawn for each tree, in place of `colsample_bytree`.
    bins : {"exact", "approximate"} or None, default None
        As in `FederBoostHorizontal`, but None is "approximate": an exact search takes three times as many sums of all
        users before the first tree, and shows the server values of single users.
    expose : {"nothing", "paper", "model"} or None, default None
        What users learn about the model. "nothing": for their own rows, the slot at each level and the value at the
        end, which edge servers compute on shares. "model": the whole model; many times faster. "paper": everything
        except thresholds, and edge servers see the path of every row; for comparison only, needs `allow_insecure`. None
        is "nothing" in safe mode and "paper" in paper mode.
    comparison : {"shamir", "additive"} or None, default None
        With ``expose="nothing"``: how a committee of edge servers computes on shares of rows and splits. "additive"
        (None): two compute, and a third deals random numbers; no two of the three may collude. "shamir": all of a
        committee compute, and at most (`committee` - 1) // 2 may collude; several times slower.
    committee : int or None, default None
        With ``expose="nothing"``: how many edge servers compute together on a user's rows: the user's own and the next
        ones, in the job's order. With more edge servers, each has less work. None: 3 under "additive", which allows no
        other number, and all edge servers under "shamir".
    epsilon_total : float or None, default None
        Noise on all sums, so that the whole training is (epsilon_total, delta) differentially private for every row, or
        for every user (`user_rows`). As in `FederBoostHorizontal`, splits are drawn at random, and only the sums of
        leaves are opened. Each user adds enough noise for the loss of a third of its domain; the excess is removed
        again. Users learn the model, which is private. Sums may then differ by one user: lost users return at once, and
        users may join late. None: no noise.
    delta : float or None, default None
        See `epsilon_total`; None is 1e-6.
    user_rows : int or None, default None
        With `epsilon_total`: protect whole users, and limit a user's part of a sum to what `user_rows` rows can add.
        Users with more rows count a random sample, and scale their sums of leaves down. None: protect rows.
    target_range : sequence of two floats or None, default None
        With `epsilon_total`, for a regression: the least and the largest target that users may have.
    weight_bound : float or None, default None
        With `epsilon_total`, for rows with weights: the largest weight that users may give a row.
    max_queries : int or None, default None
        With ``expose="nothing"``: how many rows of each user the finished model predicts on shares, over all runs; edge
        servers count them. None is 100.
    validation_fraction : float or None, default None
        Share of its rows, more than 0 and less than 1, that each user keeps out of training, as in
        `FederBoostHorizontal`: the server watches metrics of their counts by score and label. Not in paper mode, and
        not with `user_rows`.
    validation_group : str or None, default None
        Column of categories by which the held-out rows are also counted. Needs `validation_fraction`.

    See Also
    --------
    FederBoostHorizontal : A few organisations with many rows each.

    Examples
    --------
    Twelve users have ten rows each. The server, which has no rows, gets the model; here users may see it, too:

    >>> import numpy as np, treaty
    >>> X = np.arange(120.0)[:, None] % 50
    >>> users = {f"user{k}": (X[k::12], X[k::12, 0] > 20) for k in range(12)}
    >>> model = treaty.GBDTClassifier(treaty.FedXGB(expose="model"), n_estimators=3, max_depth=2).fit(users)
    >>> model.predict([[10.0], [30.0]])
    array([False,  True])
    """

    system: ClassVar[str] = "fedxgb"
    of_noise: ClassVar[tuple[str, ...]] = ("user_rows",)
    limits_categories = True
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    dropout_period: AtLeastOne | None = None
    edges: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_users: Annotated[int, msgspec.Meta(ge=3)] | None = None
    group_size: Annotated[int, msgspec.Meta(ge=3, le=1000)] | None = None
    feature_sample: AtLeastOne | None = None
    expose: Literal["nothing", "paper", "model"] | None = None
    comparison: Comparison | None = None
    committee: Annotated[int, msgspec.Meta(ge=3)] | None = None
    max_queries: AtLeastOne | None = None
    user_rows: AtLeastOne | None = None

    def most_rows(self, trained: int) -> int:
        """Return how many rows a user may have, if all users train on so many."""
        # which rows a user keeps back is drawn: it may be more than its share
        return trained if self.validation_fraction is None else 100 + int(2 * trained / (1 - self.validation_fraction))

    @property
    def exposes(self) -> Literal["nothing", "paper", "model"]:
        """`expose`, resolved."""
        return self.expose or ("paper" if self.mode == "paper" else "model" if self.adds_noise else "nothing")

    @property
    def hides_model(self) -> bool:
        """Whether users do not learn the model, or not all of it, and rows follow it on shares."""
        return self.exposes != "model"

    @property
    def exact_bins(self) -> bool:
        """`bins`, resolved."""
        return self.bins == "exact"

    @property
    def compares(self) -> Comparison:
        """`comparison`, resolved."""
        return self.comparison or "additive"

    def committee_size(self, edges: int) -> int:
        """Return how many of the edge servers compute together on a user's rows."""
        return self.committee or (ADDITIVE if self.compares == "additive" else edges)

    def may_collude(self, edges: int) -> int:
        """Return how many edge servers of a committee learn nothing together."""
        return 1 if self.compares == "additive" else (self.committee_size(edges) - 1) // 2

    @property
    def queries(self) -> int:
        """`max_queries`, resolved."""
        return self.max_queries or MAX_QUERIES

    @property
    def group(self) -> int:
        """Fewest users of a domain whose sum is opened."""
        return self.group_size or GROUP

    def check(self, common: Any) -> None:
        super().check(common)
        if self.adds_noise:
            self._check_noisy()
        else:
            common.refuse_forests("without epsilon_total FedXGB's users grow one tree for each class in a round")
        common.refuse_leaves("users add up the sums of all slots of a level")
        check_consent(self)
        if self.holds_out_rows and self.mode == "paper":
            raise ConfigError('the published form, mode="paper", keeps no rows back; leave validation_fraction out')
        if self.dropout_period is not None and self.dropout is None:
            raise ConfigError("dropout_period says how often dropout loses users; give dropout, or leave it out")
        if self.feature_sample is not None and common.colsample_bytree < 1.0:
            raise ConfigError("feature_sample and colsample_bytree say the same in two ways; give one")
        if self.group_size is not None and self.mode == "paper":
            raise ConfigError('the published aggregation, mode="paper", has no groups; leave group_size out')
        if self.exposes == "paper" and not self.allow_insecure:
            raise ConfigError(
                'expose="paper" shows users the columns and leaf values of all trees, so that thresholds are found by '
                "bisection with rows made up for that, and edge servers every comparison, so the way of all "
                "rows; it needs allow_insecure=True"
            )
        if self.compares == "additive" and self.committee not in (None, ADDITIVE):
            raise ConfigError(
                f'comparison="additive" is between two edge servers and a dealer, got committee={self.committee}: '
                'leave it out, or take comparison="shamir"'
            )
        named = [name for name in ("comparison", "committee", "max_queries") if getattr(self, name) is not None]
        if named and self.exposes != "nothing":
            raise ConfigError(
                f'{named[0]} is about rows that follow a hidden model, and expose="{self.exposes}" shows it to users; '
                "leave one of them out"
            )

    def _check_noisy(self) -> None:
        if self.exposes != "model":
            raise ConfigError(
                f'epsilon_total makes the model private, and all users get it: leave expose="{self.exposes}" out'
                if self.mode == "safe"
                else 'the published aggregation, mode="paper", has no noise; leave epsilon_total out'
            )
        if self.holds_out_rows and self.user_rows is not None:
            raise ConfigError(
                "a user's rows are trained on and counted, so that epsilon_total would not hold for whole users: leave "
                "out user_rows, or validation_fraction"
            )
        if self.group_size is not None:
            raise ConfigError(
                "under epsilon_total sums may differ by one user, and there are no groups: leave out either"
            )


def check_consent(options: FedXGB) -> None:
    """Refuse the published secure aggregation unless these options consent to it."""
    if options.mode == "paper" and not options.allow_insecure:
        raise ConfigError(f'{PAPER_LEAKS}; set allow_insecure=True for comparison on public data, or mode="safe"')
