"""Prediction of users' rows by a hidden model as runners play it: who takes part, in which role, with whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treaty.errors import ConfigError
from treaty.models.trees import RowPredictions
from treaty.systems.fedxgb.authority import patience_of
from treaty.systems.fedxgb.conversation import PREDICTION
from treaty.systems.fedxgb.kept import QueryRecord, queries_folder
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.prediction import PredictionRules, check_edges, edge, server, user
from treaty.systems.fedxgb.shares import holders_of
from treaty.systems.system import PartySpec, RoleInput, Roles, Service


def roles_of_prediction(places: Mapping[str, PartySpec], active: str, options: FedXGB) -> Roles:
    """Return who takes part: the server, edge servers (under "additive" the first three), and users with rows.

    Users need not be those of the training. Raises ConfigError when edge servers are too few, or others have rows.
    """
    edges = [name for name, place in places.items() if place.role == "edge"]
    edges = edges[:3] if options.compares == "additive" else edges
    check_edges(options.compares, len(edges))
    wrong = [name for name, place in places.items() if place.has_rows and place.role not in (None, "user")]
    wrong = [name for name in wrong if name != active]
    if wrong:
        raise ConfigError(
            f"expected predict_table of users and the server alone, got one of {', '.join(wrong)}, role = "
            f'"{places[wrong[0]].role}"'
        )
    users = [name for name, place in places.items() if place.has_rows and name != active]
    roles = {active: "server", **dict.fromkeys(edges, "edge"), **dict.fromkeys(users, "user")}
    return Roles(active, {name: roles[name] for name in places if name in roles}, users)


def links_of_prediction(roles: Roles, options: FedXGB) -> dict[str, list[str]]:
    """Link the server with all edge servers, these with each other, and users with those that hold shares."""
    edges = roles.having("edge")
    holders = holders_of(options.compares, edges)
    links = {roles.active: edges, **dict.fromkeys(roles.owners, holders)}
    for name in edges:
        others = [other for other in edges if other != name]
        links[name] = [roles.active, *others, *(roles.owners if name in holders else [])]
    return links


def refused(options: FedXGB) -> str:
    """Say why rows of users are not predicted under these options; empty where they are."""
    if options.exposes == "nothing":
        return ""
    return f'expose="{options.exposes}" tells users of the model, which is hidden where rows are predicted on shares'


def conclusions_of_prediction(roles: Roles, options: FedXGB) -> dict[str, list[str]]:
    """Return what the roles "server", "edge" and "user" can work out from a prediction, and from all together."""
    edges = len(roles.having("edge"))
    bound = (edges - 1) // 2
    together = (
        f"at most {bound} of {edges} edge servers combine their shares"
        if options.compares == "shamir"
        else "no two of the first three edge servers, of whom two compute and one deals random numbers, combine what "
        "they have"
    )
    return {
        "server": ["that rows are predicted, and how long it takes; no row, no prediction, and not whose they are"],
        "edge": [
            "which users have rows predicted, how many, and how many over all runs (one that deals random numbers: how "
            "many in all)",
            f"nothing of rows, predictions, splits or leaf values while {together}",
        ],
        "user": [
            f"with up to {options.queries} rows over all runs of a model, also rows made up for that, an imitation of "
            "the model that gets better with every row; several users together have as many rows each",
        ],
    }


def _server(inputs: RoleInput) -> None:
    server(inputs.party, inputs.part, edges=inputs.roles.having("edge"), rules=_rules(inputs))


def _edge(inputs: RoleInput[FedXGB]) -> None:
    """Play an edge server; its count of queries is in the role's `store`."""
    roles, party = inputs.roles, inputs.party
    edges = roles.having("edge")
    counts = party.name in holders_of(inputs.options.compares, edges)
    record = QueryRecord(queries_folder(inputs.store, party.name) if inputs.store is not None and counts else None)
    edge(
        party, server=roles.active, edges=edges, users=roles.owners if counts else [], rules=_rules(inputs),
        record=record,
        patience=patience_of(inputs), threads=inputs.threads,
    )  # fmt: skip


def _user(inputs: RoleInput) -> RowPredictions:
    assert inputs.read is not None
    return user(inputs.party, inputs.read, edges=inputs.roles.having("edge"), rules=_rules(inputs))


def _rules(inputs: RoleInput) -> PredictionRules:
    options: Any = inputs.options
    return PredictionRules(
        comparison=options.compares,
        max_queries=options.queries,
        n_estimators=inputs.common.n_estimators,
        max_depth=inputs.common.max_depth,
        model_id=inputs.model_id,
    )


SERVICE = Service(
    programs={"server": _server, "edge": _edge, "user": _user},
    assign=roles_of_prediction,
    links=links_of_prediction,
    conclusions=conclusions_of_prediction,
    routes=PREDICTION,
    refused=refused,
)
