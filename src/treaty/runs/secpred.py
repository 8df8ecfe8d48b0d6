"""Prediction by a FedXGB model that nobody sees together with the rows (SecPred), every role in a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treaty.compute import cores
from treaty.data.table import Table
from treaty.models.trees import ModelPart
from treaty.runs.threads import Role, play
from treaty.systems.fedxgb.layout import EDGES, SERVER, check_names
from treaty.systems.fedxgb.secpred import roles as secpred


def predict_hidden(
    part: ModelPart,
    tables: Mapping[str, Table],
    *,
    edges: int = EDGES,
    most_rows: int | None = None,
    comparison: Literal["shamir", "additive"] = "shamir",
    n_jobs: int | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the margins of each user's rows, float64 (n_rows, n_outputs), as `secpred.user` does.

    `part` is a FedXGB server's; tables are made with its schema; more than `most_rows` of a user are refused. At most
    (edges - 1) // 2 of the `edges` edge servers may collude. "additive" is several times faster and takes three edge
    servers, of whom the third deals random numbers. `n_jobs` None is all cores.

    Raises ConfigError when edge servers are too few or, for "additive", other than three; when a user is called like
    another role, or the model has no bins or trees; DataError when a table has another schema or too many rows.
    """
    names = [f"edge{k}" for k in range(edges)]
    secpred.check_edges(comparison, edges)
    check_names(tables, [SERVER, *names])
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
