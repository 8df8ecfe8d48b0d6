"""Who is who among users, edge servers, the server and the key authority; who drops out of a simulation, and when."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import get_args

import numpy as np

from treaty.errors import ConfigError
from treaty.systems.fedxgb.options import GROUP, FedXGB
from treaty.systems.fedxgb.sums.user import Leaves, Stage
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import PartySpec, Roles

logger = logging.getLogger(__name__)

SERVER, AUTHORITY = "server", "authority"
EDGES = 3
PERIOD = 10  # rounds between dropouts
_DROPS: tuple[Stage, ...] = get_args(Stage)[1:]


def helpers(owners: Iterable[str], options: FedXGB) -> dict[str, PartySpec]:
    """Return the server, the authority and the edge servers; raise ConfigError when a user has the name of one."""
    edges = [f"edge{k}" for k in range(options.edges or EDGES)]
    check_names(owners, [SERVER, AUTHORITY, *edges])
    roles = {SERVER: "server", AUTHORITY: "authority", **dict.fromkeys(edges, "edge")}
    return {name: PartySpec(role, has_rows=False) for name, role in roles.items()}


def check_names(users: Iterable[str], roles: Iterable[str]) -> None:
    """Raise ConfigError when a user is called like one of the other roles."""
    taken = set(roles) & set(users)
    if taken:
        raise ConfigError(
            "expected users with other names than the server, the authority and the edge servers, got "
            f"{', '.join(sorted(taken))}"
        )


def roles_of(places: Mapping[str, PartySpec], active: str, options: FedXGB) -> Roles:
    """Give everybody a role; users for whom the job names no edge server are assigned in turn.

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
    """Return a party's role: the active party is the server, and whoever has a table a user."""
    role = place.role or ("server" if name == active else "user" if place.has_rows else None)
    if role is None:
        raise ConfigError(
            f'expected parties.{name} to have a table, as users have, or role = "edge" or "authority", got neither'
        )
    if role not in ("server", "edge", "user", "authority"):
        raise ConfigError(f'expected parties.{name}.role to be server, edge, user or authority, got "{role}"')
    if (role == "server") != (name == active):
        raise ConfigError(
            f'expected the server, and nobody else, to be the active party {active}, got parties.{name}.role = "{role}"'
        )
    if (role == "user") != place.has_rows and role != "server":
        raise ConfigError(
            f"expected a table of every user and of no other role, got {'none' if role == 'user' else 'one'} - at "
            f"parties.{name} with role = \"{role}\" (everybody's copy of the file names users' tables; only one's own "
            "is read)"
        )
    return role


def check_edges(options: FedXGB, edges: int) -> None:
    """Raise ConfigError when edge servers are too few."""
    least = 3 if options.hides_model else 2
    if edges < least:
        why = (
            "a hidden model is shared among them"
            if least == 3
            else "one would see its domain's sums as the server does"
        )
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
    for edge, own in users_of.items():
        others = [other for other in edges if other != edge]
        found[edge] = [*authority, roles.active, *others, *(users if options.hides_model else own)]
        found |= {user: [*authority, *(edges if options.hides_model else [edge])] for user in own}
    return found


# ---------------------------------------------------------------- dropouts


def only_simulated(options: FedXGB) -> str:
    """Say why these options are for runs between threads alone; empty where they are not."""
    if options.dropout is None:
        return ""
    return (
        "dropout has simulations in threads lose users; leave it out with transport='grpc', and leave it out of a job: "
        "there users may always vanish"
    )


def dropouts(roles: Roles, options: FedXGB, common: BoostingOptions) -> dict[str, Leaves]:
    """Draw who drops out at every `dropout_period`-th round, and at what stage; it is away until others drop out.

    Raises ConfigError when no domain is large enough to lose a user, or to go on without those it loses.
    """
    share, period = options.dropout, options.dropout_period or PERIOD
    if not share:
        return {}
    users_of = domains(roles)
    lost = {edge: int(share * len(users)) for edge, users in users_of.items()}
    _check_losses(share, {edge: len(users) for edge, users in users_of.items()}, lost, options.group)
    if common.n_estimators < period:
        logger.warning("dropout begins with round %d: none of %d rounds", period, common.n_estimators)
    rng = np.random.default_rng(common.random_state)
    stages: dict[tuple[str, int], Stage] = {}
    for first in range(period, common.n_estimators + 1, period):
        for edge, users in users_of.items():
            drawn = rng.choice(len(users), lost[edge], replace=False)
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
            f"expected dropout to lose somebody, got {share:g} of domains of {max(whole.values())} users or fewer, "
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
