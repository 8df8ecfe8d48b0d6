"""Jobs among users, edge servers, a server that gets the model, and a key authority: each role on its own machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treaty.errors import ConfigError, DataError
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart
from treaty.runs.crowds import Layout
from treaty.runs.horizontal_jobs import pinned_vouching, read_labelled, renumbered, united
from treaty.runs.job import Job
from treaty.systems.fedxgb.authority import authority
from treaty.systems.fedxgb.edge import PATIENCE, edge
from treaty.systems.fedxgb.server import check_edges, server
from treaty.systems.fedxgb.user import user
from treaty.systems.pooled.training import Progress


def crowd_of(job: Job) -> Layout:
    """Return who is who; users for whom the job names no edge server are dealt out in order.

    Raises
    ------
    ConfigError
        When roles, tables or options are not those of a crowd, or edge servers or users too few.
    """
    options, roles = job.tree_options(), _roles(job)
    edges = [name for name, role in roles.items() if role == "edge"]
    authorities = [name for name, role in roles.items() if role == "authority"]
    if len(authorities) != 1:
        raise ConfigError(
            f'expected one key authority, role = "authority", got {", ".join(authorities) or "none"} - among the '
            "parties of the job"
        )
    if options.dropout is not None:
        raise ConfigError("dropout has simulations lose users; leave it out of a job, where users may always vanish")
    if options.edges is not None and options.edges != len(edges):
        raise ConfigError(
            f'expected edges to be {len(edges)}, the parties with role = "edge", or left out, got {options.edges}'
        )
    check_edges(options, len(edges))
    domains: dict[str, list[str]] = {name: [] for name in edges}
    dealt = 0
    for name, role in roles.items():
        at = job.parties[name].edge
        if role != "user":
            if at is not None:
                raise ConfigError(f"expected an edge server of users alone, got parties.{name}.edge of the {role}")
            continue
        if at is None:
            at, dealt = edges[dealt % len(edges)], dealt + 1
        if at not in domains:
            raise ConfigError(
                f'expected parties.{name}.edge to be one with role = "edge" ({", ".join(edges)}), got {at!r}'
            )
        domains[at].append(name)
    layout = Layout(domains, job.active, authorities[0])
    layout.check(options)
    return layout


def check_crowd(job: Job, name: str) -> None:
    """Refuse to begin without what a role needs.

    Raises
    ------
    ConfigError
    """
    layout = crowd_of(job)
    if name == layout.server and not _examples(job):
        raise ConfigError(
            f"the server says which columns and classes there are: expected parties.{name}.table, examples that it "
            f"does not train on, or parties.{name}.eval_tables, got neither"
        )


def train_in_crowd(
    party: Party, job: Job, *, threads: int, progress: Progress | None, keeper: Keeper
) -> ModelPart | None:
    """Read a connected party's tables and play its role; return the whole model, at the server alone."""
    name, layout, options = party.name, crowd_of(job), job.tree_options()
    role = layout.roles.get(name)
    common: dict[str, Any] = {"edges": layout.edges, "authority": layout.authority}
    patience = min(PATIENCE, job.timeout / 10)
    if role is None:
        authority(party, layout.roles, 2 * patience)  # users read their tables first
    elif role == "edge":
        edge(
            party, options, **common, users=layout.domains[name], server=layout.server, threads=threads,
            patience=patience, vouching=pinned_vouching(job, name, layout.edges),
        )  # fmt: skip
    elif role == "user":
        data, classes = read_labelled(job, name, str(job.parties[name].table), training=True)
        (own,) = (e for e, users in layout.domains.items() if name in users)
        user(party, data, options, **common, edge=own, server=layout.server, classes=classes)
    else:
        examples, *others = _examples(job)
        first, found = read_labelled(job, name, examples)
        read = [(first, found), *(read_labelled(job, name, path, like=first) for path in others)]
        classes = united([of_table for _, of_table in read], name)
        if classes is not None and len(classes) < 2:
            raise DataError(f"{name}: expected labels of at least two classes in its tables, got one, {classes[0]!r}")
        watched = read[len(read) - len(job.parties[name].eval_tables) :]
        return server(
            party, options, first.table.schema, **common, classes=classes,
            eval_sets=[
                replace(renumbered(rows, own_classes, classes), name=f"eval_{number}")
                for number, (rows, own_classes) in enumerate(watched)
            ],
            threads=threads, progress=progress, keeper=keeper, vouching=pinned_vouching(job, name, layout.edges),
        )  # fmt: skip
    return None


def _roles(job: Job) -> dict[str, str]:
    """Return everybody's role: the active party is the server, and whoever has a table a user."""
    roles: dict[str, str] = {}
    for name, member in job.parties.items():
        known = "server" if name == job.active else "user" if member.table is not None else None
        role = member.role or known
        if role is None:
            raise ConfigError(
                f'expected parties.{name} to have a table, as users have, or role = "edge" or "authority", got neither'
            )
        if (role == "server") != (name == job.active):
            raise ConfigError(
                f"expected the server, and nobody else, to be the active party {job.active}, got "
                f'parties.{name}.role = "{role}"'
            )
        if (role == "user") != (member.table is not None) and role != "server":
            raise ConfigError(
                f"expected a table of every user and of no other role, got {'none' if role == 'user' else 'one'} - at "
                f"parties.{name} with role = \"{role}\" (everybody's copy of the file names users' tables; only one's "
                "own is read)"
            )
        roles[name] = role
    return roles


def _examples(job: Job) -> list[str]:
    """Return the server's tables; the first says which columns there are."""
    own = job.parties[job.active]
    return [*([] if own.table is None else [own.table]), *own.eval_tables]
