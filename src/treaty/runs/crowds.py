"""Play a crowd on this machine: who is who, who drops out when, every role in a thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from treaty.compute import cores
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.messaging.memory import Link
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart
from treaty.runs.threads import Played, Role, play
from treaty.systems.fedxgb.authority import CrowdRole, authority
from treaty.systems.fedxgb.cohorts import Rules
from treaty.systems.fedxgb.edge import edge
from treaty.systems.fedxgb.edge_sums import LEAST
from treaty.systems.fedxgb.secpred import roles as secpred
from treaty.systems.fedxgb.server import check_edges, server
from treaty.systems.fedxgb.user import user
from treaty.systems.fedxgb.user_sums import Leaves, Stage
from treaty.systems.horizontal.members import Vouching
from treaty.systems.pooled.training import Labelled, Progress
from treaty.systems.tree_options import TreeOptions

logger = logging.getLogger(__name__)

SERVER, AUTHORITY = "server", "authority"
EDGES = 3
_TENTH = 10  # rounds between dropouts
_DROPS: tuple[Stage, ...] = get_args(Stage)[1:]


@dataclass(frozen=True, slots=True)
class Layout:
    """Who is who.

    Attributes
    ----------
    domains : dict of str to list of str
        Users by edge server.
    server, authority : str
    """

    domains: dict[str, list[str]]
    server: str = SERVER
    authority: str = AUTHORITY

    @property
    def edges(self) -> list[str]:
        """All edge servers, in order."""
        return list(self.domains)

    @property
    def users(self) -> list[str]:
        """All users, domain by domain."""
        return [user for users in self.domains.values() for user in users]

    @property
    def roles(self) -> dict[str, CrowdRole]:
        """Everybody's role, but the authority's."""
        roles: dict[str, CrowdRole] = {self.server: "server", **dict.fromkeys(self.edges, "edge")}
        return {**roles, **dict.fromkeys(self.users, "user")}

    def links(self, *, hidden: bool) -> dict[str, list[str]]:
        """Return who talks to whom; users to all edge servers where the model is hidden."""
        edges, everybody = self.edges, self.users
        links = {self.server: [self.authority, *edges], self.authority: list(self.roles)}
        for name, users in self.domains.items():
            others = [e for e in edges if e != name]
            links[name] = [self.authority, self.server, *others, *(everybody if hidden else users)]
            links |= {u: [self.authority, *(edges if hidden else [name])] for u in users}
        return links

    def check(self, options: TreeOptions) -> None:
        """Refuse too few edge servers, or domains too small for their sums to hide anything.

        Raises
        ------
        ConfigError
        """
        check_edges(options, len(self.domains))
        small = [f"{len(users)} at {name}" for name, users in self.domains.items() if len(users) < LEAST]
        if small:
            raise ConfigError(
                f"expected {LEAST * len(self.domains)} users or more, {LEAST} in the domain of each of "
                f"{len(self.domains)} edge servers, got {', '.join(small)}: of a sum over fewer, members see each "
                "other's part; have fewer edge servers, or more users"
            )


def lay_out(users: Sequence[str], options: TreeOptions) -> Layout:
    """Deal users out among edge servers, as many as `edges` says.

    Raises
    ------
    ConfigError
        When a user is called like another role, edge servers are too few, or domains too small.
    """
    edges = [f"edge{k}" for k in range(options.edges or EDGES)]
    _check_names(users, [SERVER, AUTHORITY, *edges])
    layout = Layout({name: list(users[k :: len(edges)]) for k, name in enumerate(edges)})
    layout.check(options)
    return layout


def dropouts(layout: Layout, options: TreeOptions) -> dict[str, Leaves]:
    """Draw who drops out at every tenth round, and at what stage; it is away until the next tenth.

    Raises
    ------
    ConfigError
        When no domain has so many users that one is lost, or enough to go on without those.
    """
    if not isinstance(options.dropout, float) or options.dropout == 0.0:
        return {}
    least = Rules().least_change
    _check_loses(options, layout)
    sizes = {len(users) for users in layout.domains.values()}
    if all(_lost(options.dropout, n) and n - max(_lost(options.dropout, n), least) < -(-2 * n // 3) for n in sizes):
        raise ConfigError(
            f"expected domains that can lose {options.dropout:g} of their users, got {max(sizes)} in the largest: "
            f"sums go on with two thirds of a domain, and differ by {least} users or more, so that 9 users are the "
            "fewest that may lose one; have more users or fewer edge servers, or lower dropout"
        )
    rng = np.random.default_rng(options.random_state)
    stages: dict[tuple[str, int], Stage] = {}
    for first in range(_TENTH, options.n_estimators + 1, _TENTH):
        for users in layout.domains.values():
            lost = rng.choice(len(users), _lost(options.dropout, len(users)), replace=False)
            stages |= {(users[k], first): _DROPS[rng.integers(len(_DROPS))] for k in lost.tolist()}

    def leaves_of(name: str) -> Leaves:
        def leaves(number: int, stage: Stage) -> bool:
            first = number - number % _TENTH
            at = stages.get((name, first))
            return at is not None and (stage == at if number == first else stage == "call")

        return leaves

    return {name: leaves_of(name) for name in {user for user, _ in stages}}


def _lost(share: float, users: int) -> int:
    """Return how many of a domain's users are lost, in whole users, rounded down."""
    return int(share * users)


def _check_loses(options: TreeOptions, layout: Layout) -> None:
    """Refuse a share too small to lose anybody; say where it loses nobody."""
    assert isinstance(options.dropout, float)
    whole = {name: len(users) for name, users in layout.domains.items() if _lost(options.dropout, len(users)) == 0}
    if len(whole) == len(layout.domains):
        raise ConfigError(
            f"expected dropout to lose somebody, got {options.dropout:g} of domains of {max(whole.values())} users or "
            "fewer, which rounds down to none; have more users or fewer edge servers, raise dropout, or leave it out"
        )
    if whole:
        of = ", ".join(f"{count} at {name}" for name, count in whole.items())
        logger.warning("dropout=%g loses none of the users of small domains: %s", options.dropout, of)
    if options.n_estimators < _TENTH:
        logger.warning("dropout begins with round %d: none of %d rounds", _TENTH, options.n_estimators)


def train_crowd_in_threads(
    shards: Mapping[str, Labelled],
    evals: Sequence[Labelled],
    classes: list[Any] | None,
    schema: Schema,
    options: TreeOptions,
    n_jobs: int | None = None,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    *,
    layout: Layout | None = None,
    leaves: Mapping[str, Leaves] | None = None,
    link: Link | None = None,
    record_content: bool = False,
) -> Played:
    """Train with everybody in a thread of its own.

    Parameters
    ----------
    shards : mapping of str to Labelled
        Every user's rows; labels are numbers of `classes`.
    evals : sequence of Labelled
        Watched by the server.
    schema : Schema
        Of all users' columns.
    layout : Layout, optional
        Who is who; users dealt out by default.
    leaves : mapping of str to Leaves, optional
        When users drop out; by default as `dropout` has it.

    Returns
    -------
    Played
        The server's result is the model, users' are the margins of their rows.
    """
    layout = lay_out(list(shards), options) if layout is None else layout
    leaves = dropouts(layout, options) if leaves is None else leaves
    common: dict[str, Any] = {"edges": layout.edges, "authority": layout.authority}
    roles: dict[str, Role] = {
        layout.authority: lambda party: authority(party, layout.roles),
        layout.server: lambda party: server(
            party, options, schema, **common, classes=classes, eval_sets=evals, threads=cores(n_jobs),
            progress=progress, keeper=keeper, vouching=Vouching(),
        ),
    }  # fmt: skip
    for name, users in layout.domains.items():
        roles[name] = lambda party, users=users: edge(  # type: ignore[misc]
            party, options, **common, users=users, server=layout.server, vouching=Vouching()
        )
        roles |= {
            u: lambda party, u=u, name=name: user(  # type: ignore[misc]
                party,
                shards[u],
                options,
                **common,
                edge=name,
                server=layout.server,
                classes=classes,
                leaves=leaves.get(u),
            )
            for u in users
        }
    links = layout.links(hidden=options.hides_model)
    one_core = [name for name in roles if name not in layout.edges or not options.hides_model]  # edges route rows
    return play(
        roles, links, job="fit", protocol=options.protocol, link=link, record_content=record_content, one_core=one_core
    )


def predict_hidden(
    part: ModelPart,
    tables: Mapping[str, Table],
    *,
    edges: int = EDGES,
    most_rows: int | None = None,
    comparison: Literal["shamir", "additive"] = "shamir",
    n_jobs: int | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Predict users' rows with nobody seeing rows and model together, every role in a thread of its own.

    Parameters
    ----------
    part : ModelPart
        A FedXGB model, as its server has it.
    tables : mapping of str to Table
        Every user's rows, made with the model's schema.
    edges : int, default 3
        How many edge servers there are; at most (edges - 1) // 2 of them may collude.
    most_rows : int or None
        More rows of one user are refused.
    comparison : {"shamir", "additive"}, default "shamir"
        "additive" is several times faster and takes three edge servers, of whom the third deals random numbers.
    n_jobs : int or None
        Threads; None for all cores.

    Returns
    -------
    dict of str to float64 (n_rows, n_outputs)
        Margins, as `secpred.user` returns them.

    Raises
    ------
    ConfigError
        When edge servers are too few or, for "additive", other than three; when a user is called like another role,
        or the model has no bins or trees.
    DataError
        When a table has another schema or too many rows.
    """
    names = [f"edge{k}" for k in range(edges)]
    secpred.check_edges(comparison, edges)
    _check_names(tables, [SERVER, *names])
    each = max(1, cores(n_jobs) // edges)
    roles: dict[str, Role] = {
        SERVER: lambda party: secpred.server(party, part, edges=names, most_rows=most_rows, comparison=comparison)
    }
    links = {SERVER: names}
    for name in names:
        roles[name] = lambda party: secpred.edge(
            party, server=SERVER, edges=names, users=list(tables), threads=each, comparison=comparison
        )
        links[name] = [SERVER, *(e for e in names if e != name), *tables]
    for name, table in tables.items():
        roles[name] = lambda party, table=table: secpred.user(  # type: ignore[misc]
            party, table, edges=names, comparison=comparison
        )
        links[name] = names
    played = play(roles, links, job="predict", protocol="fedxgb")
    return {name: played.results[name] for name in tables}


def _check_names(users: Iterable[str], roles: Iterable[str]) -> None:
    taken = set(roles) & set(users)
    if taken:
        raise ConfigError(f"expected users called other than the roles of a crowd, got {', '.join(sorted(taken))}")


def margins_of(played: Played, users: Sequence[str]) -> NDArray[np.float64]:
    """Return the margins that users have of their rows, one user after the other, (n_rows, n_outputs)."""
    return np.concatenate([played.results[name].T for name in users])
