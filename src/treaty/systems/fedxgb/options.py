"""Options of FedXGB; who is who in a job; who drops out of a simulation, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from treaty.errors import ConfigError
from treaty.systems.horizontal.sum_noise import RowOptions
from treaty.systems.options import AtLeastOne
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import PartySpec, Roles

logger = logging.getLogger(__name__)

Comparison = Literal["shamir", "additive"]

# Rows of each user that a hidden model predicts over all runs, by default
MAX_QUERIES = 100

# Fewest users of a domain whose sum is opened, by default
GROUP = 3

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
        `dropout_period`-th round, until others are lost. None is 0. Between processes users may always vanish.
    dropout_period : int or None, default None
        With `dropout`: how many rounds there are from one loss to the next. None is 10.
    edges : int or None, default None
        How many edge servers `fit` plays; users are assigned to them in turn. None is 3.
    max_users : int or None, default None
        Largest number of users of a domain that take part in a round: those that dropped out least. None: all.
    group_size : int or None, default None
        Sums are over whole groups of so many users of a domain, or a few more, dealt at the beginning: `group_size` - 2
        users in collusion with the server find no other user's sums, however long the job. None: groups of three, and
        sums over other cohorts, too, as long as no combination of them is of one user or two. A lost user then costs
        fewer others their place; two users in collusion with the server may find another one's sums.
    feature_sample : int or None, default None
        How many columns are drawn for each tree, in place of `colsample_bytree`.
    bins : {"exact", "approximate"} or None, default None
        As in `FederBoostHorizontal`, but None is "approximate": an exact search takes three times as many sums of all
        users before the first tree, and shows the server values of single users.
    expose : {"nothing", "paper", "model"} or None, default None
        What users learn of the model. "nothing", which None is in safe mode: of their own rows, the slot at each level
        and the value at the end, which edge servers compute on shares. "model": all of it, many times faster. "paper",
        which None is in paper mode: all but thresholds, while edge servers see the way of every row, for comparison;
        needs `allow_insecure`.
    comparison : {"shamir", "additive"} or None, default None
        With ``expose="nothing"``: how a committee of edge servers computes on shares of rows and splits. "additive"
        (None): two of three, with random numbers of the third; no two of the three may collude. "shamir": all of a
        committee, of whom at most (`committee` - 1) // 2 may collude; several times slower.
    committee : int or None, default None
        With ``expose="nothing"``: how many edge servers compute together on a user's rows: the user's own and the next
        ones, in the job's order. So an edge server's work falls with the number of edge servers. None: 3 under
        "additive", which takes no other number, and all edge servers under "shamir".
    epsilon_total : float or None, default None
        Noise on all sums, so that the whole training is (epsilon_total, delta) differentially private for every row, or
        for every user (`user_rows`). As in `FederBoostHorizontal`, splits are drawn at random, and the sums of leaves
        alone are opened. Each user adds noise for the case that a third of its domain is lost; what is too much is
        removed again. Users learn the model, which is private. Sums may then differ by one user: lost users come back
        at once, and users may join late. None: no noise.
    delta : float or None, default None
        See `epsilon_total`; None is 1e-6.
    user_rows : int or None, default None
        With `epsilon_total`: protect whole users, whose part of a sum is limited to what so many rows can add. Users
        with more rows count some that are drawn at random, and scale their sums of leaves down. None: protect rows.
    target_range : sequence of two floats or None, default None
        With `epsilon_total`, for a regression: the least and the largest target that users may have.
    weight_bound : float or None, default None
        With `epsilon_total`, for rows with weights: the largest weight that users may give a row.
    max_queries : int or None, default None
        With ``expose="nothing"``: how many rows of each user the finished model predicts on shares, over all runs, as
        edge servers count them. None is 100.
    validation_fraction : float or None, default None
        Share of its rows, more than 0 and less than 1, that each user keeps out of training, as in
        `FederBoostHorizontal`: the server watches metrics of their counts by score and label. Not in paper mode, and
        not with `user_rows`.
    validation_group : str or None, default None
        Column of categories by which rows kept back are counted, too. Needs `validation_fraction`.
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


# Where a user may drop out of a tree: as it begins; before its key is made; before or after its vector is sent; as
# rows go down the tree
Stage = Literal["call", "setup", "shared", "masked", "prediction"]

# ``leaves(tree, stage)``, trees counted from 1: whether a user drops out then, in a simulation or because it must
Leaves = Callable[[int, Stage], bool]

SERVER, AUTHORITY = "server", "authority"
ADDITIVE = 3  # edge servers of a committee: two that compute, and a dealer
EDGES = 3
PERIOD = 10  # rounds between dropouts
_DROPS: tuple[Stage, ...] = get_args(Stage)[1:]


def helpers(owners: Iterable[str], options: FedXGB) -> dict[str, PartySpec]:
    """Return the server, the authority and the edge servers; raise ConfigError when a user has the name of one."""
    edges = [f"edge{k}" for k in range(options.edges or EDGES)]
    roles = {SERVER: "server", AUTHORITY: "authority", **dict.fromkeys(edges, "edge")}
    taken = roles.keys() & set(owners)
    if taken:
        raise ConfigError(
            "expected users with other names than the server, the authority and the edge servers, got "
            f"{', '.join(sorted(taken))}"
        )
    return {name: PartySpec(role, has_rows=False) for name, role in roles.items()}


def roles_of(places: Mapping[str, PartySpec], active: str, options: FedXGB) -> Roles:
    """Give every party a role; users for whom the job names no edge server are assigned in turn.

    Raises ConfigError when roles, tables or options do not fit, or edge servers, or users of a domain, are too few.
    """
    role_of = {name: _role_of(name, place, active) for name, place in places.items()}
    roles = Roles(active, role_of, [name for name, role in role_of.items() if role == "user"])
    authorities, edges = roles.having("authority"), roles.having("edge")
    if len(authorities) != 1:
        raise ConfigError(
            f'expected one key authority, role = "authority", got {", ".join(authorities) or "none"} - among the '
            "parties of the job"
        )
    if options.edges is not None and options.edges != len(edges):
        raise ConfigError(
            f'expected edges to be {len(edges)}, the parties with role = "edge", or left out, got {options.edges}'
        )
    check_edges(options, len(edges))
    # users without an edge server in the job are dealt out in turn
    dealt = 0
    for name, role in role_of.items():
        edge = places[name].edge
        if role != "user":
            if edge is not None:
                raise ConfigError(f"expected an edge server of users alone, got parties.{name}.edge of the {role}")
            continue
        if edge is None:
            edge, dealt = edges[dealt % len(edges)], dealt + 1
        if edge not in edges:
            raise ConfigError(
                f'expected parties.{name}.edge to be one with role = "edge" ({", ".join(edges)}), got {edge!r}'
            )
        roles.edges[name] = edge
    _check_sizes(roles, options.group)
    return roles


def _role_of(name: str, place: PartySpec, active: str) -> str:
    """Return a party's role: the active party is the server, and a party with a table a user."""
    role = place.role or ("server" if name == active else "user" if place.has_rows else None)
    if role is None:
        raise ConfigError(
            f'expected parties.{name} to have a table, as users have, or role = "edge" or "authority", got neither'
        )
    if role not in ("server", "edge", "user", "authority"):
        raise ConfigError(f'expected parties.{name}.role to be server, edge, user or authority, got "{role}"')
    if (role == "server") != (name == active):
        raise ConfigError(
            f"expected the server, and no other role, to be the active party {active}, got parties.{name}.role = "
            f'"{role}"'
        )
    if (role == "user") != place.has_rows and role != "server":
        raise ConfigError(
            f"expected a table of every user and of no other role, got {'none' if role == 'user' else 'one'} - at "
            f"parties.{name} with role = \"{role}\" (each party's copy of the file names users' tables; only its own "
            "is read)"
        )
    return role


def check_edges(options: FedXGB, edges: int) -> None:
    """Raise ConfigError when edge servers are too few."""
    least, why = 2, "one would see its domain's sums as the server does"
    if options.hides_model:
        least, why = options.committee or 3, "a hidden model is shared among them"
    if edges < least:
        raise ConfigError(f"expected {least} edge servers or more, got {edges}: {why}")


def _check_sizes(roles: Roles, least: int) -> None:
    """Raise ConfigError when a domain has fewer users than a group."""
    sizes = {edge: len(users) for edge, users in domains(roles).items()}
    small = [f"{size} at {edge}" for edge, size in sizes.items() if size < least]
    if len(roles.owners) == 1:
        raise ConfigError(
            f"expected {least * len(sizes)} users or more, got {roles.owners[0]} alone: one user's table is trained on "
            "under protocol 'pooled'"
        )
    if small:
        raise ConfigError(
            f"expected {least * len(sizes)} users or more, {least} in the domain of each of {len(sizes)} edge servers, "
            f"got {', '.join(small)}: of a sum over fewer, members see each other's part; have fewer edge servers, or "
            "more users" + ("" if least == GROUP else ", or a smaller group_size")
        )


def domains(roles: Roles) -> dict[str, list[str]]:
    """Return every edge server's users."""
    return {edge: [u for u in roles.owners if roles.edges[u] == edge] for edge in roles.having("edge")}


def links(roles: Roles, options: FedXGB) -> dict[str, list[str]]:
    """Return who talks to whom; users to all edge servers where the model is hidden."""
    users_of = domains(roles)
    edges, users = list(users_of), [user for of in users_of.values() for user in of]
    authority = roles.having("authority")
    found = {roles.active: [*authority, *edges], **{name: [roles.active, *edges, *users] for name in authority}}
    reached = {edge: edges if options.hides_model else [edge] for edge in edges}
    if options.exposes == "nothing":
        reached = {edge: holders_of(options.compares, committee_of(options, edges, edge).edges) for edge in edges}
    for edge, own in users_of.items():
        others = [other for other in edges if other != edge]
        here = [user for domain, of in users_of.items() if edge in reached[domain] for user in of]
        found[edge] = [*authority, roles.active, *others, *here]
        found |= {user: [*authority, *reached[edge]] for user in own}
    return found


class Committee(NamedTuple):
    """Edge servers that compute together on shares, and the domains whose users' rows these are."""

    edges: list[str]
    domains: list[str]


def committees_of(options: FedXGB, edges: Sequence[str]) -> list[Committee]:
    """Return who computes with whom, in the order in which all parties play: one after the other.

    An edge server is in as many committees as a committee has members, each with the rows of one domain; all edge
    servers together are one committee, with all rows.
    """
    size = options.committee_size(len(edges))
    if size == len(edges) and options.compares == "shamir":
        return [Committee(list(edges), list(edges))]
    around = [*edges, *edges]
    # committees that share no edge server come first: they compute at the same time
    order = [place for first in range(size) for place in range(first, len(edges), size)]
    return [Committee(around[place : place + size], [edges[place]]) for place in order]


def committee_of(options: FedXGB, edges: Sequence[str], domain: str) -> Committee:
    """Return the committee that has the rows of a domain's users."""
    return next(of for of in committees_of(options, edges) if domain in of.domains)


def holders_of(comparison: Comparison, edges: Sequence[str]) -> list[str]:
    """Return the edge servers of a committee that have shares, in order."""
    return list(edges[:2] if comparison == "additive" else edges)


def check_holders(comparison: Comparison, edges: int) -> None:
    """Raise ConfigError if edge servers are too few, or some would have nothing to do."""
    if edges < 3:
        raise ConfigError(f"expected 3 edge servers or more, got {edges}: a hidden model is shared among them")
    if comparison == "additive" and edges != ADDITIVE:
        raise ConfigError(
            f'expected 3 edge servers under comparison="additive", two that compare and a dealer, got {edges}; more '
            'hide more under "shamir" alone'
        )


def roles_of_prediction(places: Mapping[str, PartySpec], active: str, options: FedXGB) -> Roles:
    """Return who takes part: the server, the first edge servers, as many as a committee has, and users with rows.

    Users need not be those of the training. Raises ConfigError when edge servers are too few, or others have rows.
    """
    edges = [name for name, place in places.items() if place.role == "edge"]
    edges = edges[: options.committee_size(len(edges))]
    check_holders(options.compares, len(edges))
    with_rows = [name for name, place in places.items() if place.has_rows and name != active]
    wrong = [name for name in with_rows if places[name].role not in (None, "user")]
    if wrong:
        raise ConfigError(
            f"expected predict_table of users and the server alone, got one of {', '.join(wrong)}, role = "
            f'"{places[wrong[0]].role}"'
        )
    roles = {active: "server", **dict.fromkeys(edges, "edge"), **dict.fromkeys(with_rows, "user")}
    return Roles(active, {name: roles[name] for name in places if name in roles}, with_rows)


def links_of_prediction(roles: Roles, options: FedXGB) -> dict[str, list[str]]:
    """Link the server with all edge servers, these with each other, and users with those that hold shares."""
    edges = roles.having("edge")
    holders = holders_of(options.compares, edges)
    found = {roles.active: edges, **dict.fromkeys(roles.owners, holders)}
    for name in edges:
        others = [other for other in edges if other != name]
        found[name] = [roles.active, *others, *(roles.owners if name in holders else [])]
    return found


def only_simulated(options: FedXGB) -> str:
    """Return why these options are for runs between threads alone; empty if they are not."""
    if options.dropout is None:
        return ""
    return (
        "dropout has simulations in threads lose users; leave it out with transport='grpc', and leave it out of a job: "
        "there users may always vanish"
    )


def dropouts(roles: Roles, options: FedXGB, common: BoostingOptions) -> dict[str, Leaves]:
    """Draw which users drop out at every `dropout_period`-th round, and at what stage; they stay away until others do.

    Raises ConfigError when no domain is large enough to lose a user, or to continue without those it loses.
    """
    # rounds between dropouts, as in the paper
    share, period = options.dropout, options.dropout_period or PERIOD
    if not share:
        return {}
    users_of = domains(roles)
    # the same share of every domain, rounded down
    lost = {edge: int(share * len(users)) for edge, users in users_of.items()}
    _check_losses(share, {edge: len(users) for edge, users in users_of.items()}, lost, options.group)
    if common.most_rounds < period:
        logger.warning("dropout begins with round %d: none of %d rounds", period, common.most_rounds)
    rng = np.random.default_rng(common.random_state)
    stages: dict[tuple[str, int], Stage] = {}
    for first in range(period, common.most_rounds + 1, period):
        for edge, users in users_of.items():
            drawn = rng.choice(len(users), lost[edge], replace=False)
            # at a random stage of the tree, so that all ways to vanish are played
            stages |= {(users[k], first): _DROPS[rng.integers(len(_DROPS))] for k in drawn.tolist()}

    def leaves_of(name: str) -> Leaves:
        def leaves(number: int, stage: Stage) -> bool:
            first = number - number % period
            at = stages.get((name, first))
            return at is not None and (stage == at if number == first else stage == "call")

        return leaves

    return {name: leaves_of(name) for name in {user for user, _ in stages}}


def _check_losses(share: float, sizes: Mapping[str, int], lost: Mapping[str, int], least: int) -> None:
    """Raise ConfigError when the share rounds down to no user in all domains, or leaves too few; warn of others."""
    whole = {edge: size for edge, size in sizes.items() if lost[edge] == 0}
    if len(whole) == len(sizes):
        raise ConfigError(
            f"expected dropout to lose a user, got {share:g} of domains of {max(whole.values())} users or fewer, "
            "which rounds down to none; have more users or fewer edge servers, raise dropout, or leave it out"
        )
    if all(sizes[edge] - lost[edge] < least for edge in sizes):
        raise ConfigError(
            f"expected domains that can lose {share:g} of their users, got {max(sizes.values())} in the largest: sums "
            f"are over {least} users of a domain or more; have more users or fewer edge servers, or lower dropout"
        )
    if whole:
        of = ", ".join(f"{size} at {edge}" for edge, size in whole.items())
        logger.warning("dropout=%g loses none of the users of small domains: %s", share, of)
