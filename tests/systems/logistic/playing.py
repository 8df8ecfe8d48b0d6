"""Play a logistic regression between parties on a small table, with the contents of all messages recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tables import cut, cut_for_guest, real_table
from treaty.data.table import Table, to_table
from treaty.linear.batches import batch_seed
from treaty.linear.training import FittedWeights, Optimiser, train
from treaty.models.linear import preparation_of
from treaty.runs.threads import Played, play
from treaty.systems.linear_options import LinearOptions
from treaty.systems.logistic import roles as quasi_newton
from treaty.systems.logistic.roles import fixed_columns
from treaty.systems.pooled.training import Labelled

LEAD = "coordinator"
OPTIONS: dict[str, Any] = {
    "protocol": "quasi-newton", "batch_size": 120, "max_iter": 2, "period": 2, "memory": 3, "random_state": 7,
    "insecure_test_key_bits": 768, "learning_rate": 0.15, "tol": 0.0,
}  # fmt: skip
PAPER = {"mode": "paper", "allow_insecure": True}


def linear_tables(parties: int = 2, rows: int = 300, *, wide_host: bool = False) -> tuple[dict[str, Table], np.ndarray]:
    """Return tables of which hosts have few columns, as many as batches of 120 hide labels from, or all but one."""
    X, y = real_table("binary", rows=rows)
    parts = cut(X, parties) if wide_host else cut_for_guest(X, parties)
    return {name: to_table(part, party=name) for name, part in parts.items()}, y.astype(float)


def options_of(**changes: Any) -> LinearOptions:
    given = {**OPTIONS, **changes}
    if given.get("encryption") == "lattice":
        given["insecure_test_key_bits"] = None
    return LinearOptions(**given)


def play_logistic(
    tables: dict[str, Table],
    y: np.ndarray,
    *,
    replace: dict[str, Callable[..., Any]] | None = None,
    theirs: dict[str, Any] | None = None,
    timeout: float = 30.0,
    record: bool = True,
    progress: Any = None,
    kept: Any = None,
    **changes: Any,
) -> Played:
    """Train with p0 as the guest; `theirs` are other options of the others, `replace` puts another role in a place."""
    options, others = options_of(**changes), options_of(**{**changes, **(theirs or {})})
    parties, lead = list(tables), LEAD if options.has_coordinator else None
    roles: dict[str, Any] = {
        name: lambda party, name=name: quasi_newton.host(
            party, tables[name], others, guest="p0", parties=parties, coordinator=lead, kept=kept
        )
        for name in parties
    }
    roles["p0"] = lambda party: quasi_newton.guest(
        party, Labelled(tables["p0"], y), options, parties=parties, coordinator=lead, classes=[0, 1],
        progress=progress, kept=kept,
    )  # fmt: skip
    if lead is not None:
        roles[lead] = lambda party: quasi_newton.coordinate(party, others, guest="p0", parties=parties)
    roles |= replace or {}
    links = {name: [other for other in roles if other != name] for name in roles}
    return play(roles, links, job="test", protocol=options.protocol, timeout=timeout, record_content=record)


def pooled_weights(tables: dict[str, Table], y: np.ndarray, **changes: Any) -> tuple[np.ndarray, FittedWeights]:
    """Train in one place on the same batches; return also the whole matrix, columns rounded as the parties round."""
    options = options_of(**changes)
    columns = [preparation_of(table).matrix(table.columns, table.n_rows) for table in tables.values()]
    X = np.hstack([*(fixed_columns(part) * 2.0**-24 for part in columns), np.ones((len(y), 1))])
    optimiser = Optimiser(
        memory=options.pairs, period=options.period, batch_size=options.batch_size,
        learning_rate=options.first_rate, max_iter=options.max_iter, tol=options.tol,
        seed=batch_seed(options.random_state), l2=options.l2,
    )  # fmt: skip
    return X, train(X, 2.0 * y - 1.0, optimiser)


def weights_of(played: Played, tables: dict[str, Table]) -> np.ndarray:
    """Return all parties' weights in the order of `pooled_weights`."""
    return np.concatenate([*(played.results[name].coef for name in tables), [played.results["p0"].intercept]])
