"""Who is who in a job of FedXGB, who computes on whose rows, and who drops out of a simulation, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np

from treaty.errors import ConfigError
from treaty.systems.fedxgb.options import ADDITIVE, GROUP, Comparison, FedXGB
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import PartySpec, Roles

logger = logging.getLogger(__name__)


# Where a user may drop out of a tree: as it begins; before its key is made; before or after its vector is sent; as
# rows go down the tree
Stage = Literal["call", "setup", "shared", "masked", "prediction"]

# ``leaves(tree, stage)``, trees counted from 1: whether a user drops out then, in a simulation or because it must
Leaves = Callable[[int, Stage], bool]

SERVER, AUTHORITY = "server", "authority"
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


def refused(options: FedXGB) -> str:
    """Return why rows of users are not predicted under these options; empty if they are."""
    if options.exposes == "nothing":
        return ""
    return f'expose="{options.exposes}" shows users the model, which is hidden where rows are predicted on shares'


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
        "dropout has simulations in threads lose users; leave it out with transport='tls', and leave it out of a job: "
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

    def leaves(name: str, number: int, stage: Stage) -> bool:
        first = number - number % period
        at = stages.get((name, first))
        return at is not None and (stage == at if number == first else stage == "call")

    return {name: partial(leaves, name) for name, _ in stages}


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
