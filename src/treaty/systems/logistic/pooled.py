"""Logistic regression on one table, or on all parties' tables side by side: what federated systems are compared with.

A federated training leaves what this leaves: of each party a `LinearPart` with the schema and preparation of its own
table and the weights of its own prepared columns; at the active party intercept, classes and losses, too. On the same
seed of batches its weights are the same up to the rounding of encrypted numbers (which epochs long after the loss has
settled may amplify, see docs/logistic.md). Both have in common: `preparation_of` each party's own table; labels -1 and
+1; the active party's matrix is its prepared columns, then a column of ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from treaty.data.table import Table
from treaty.linear.batches import batch_seed
from treaty.linear.losses import LOSSES, warn_beyond_taylor
from treaty.linear.training import Optimiser, train
from treaty.models.linear import LinearPart, preparation_of
from treaty.systems.logistic.options import SGD, QuasiNewton
from treaty.systems.logistic.setup import solver_of
from treaty.systems.system import Seat


def train_pooled(tables: Mapping[str, Table], seat: Seat) -> dict[str, LinearPart]:
    """Train on all parties' columns in one place; return every party's part.

    `tables` are everybody's, rows in common order; `seat` has the active party's rows, labels 0 and 1, and weights.
    Raises DataError when training diverges although the learning rate was lowered.
    """
    data, options, common, active = seat.rows, seat.options, seat.common, seat.cast.active
    loss = options.loss or "taylor"
    prepared = {name: preparation_of(table) for name, table in tables.items()}
    columns = [made.matrix(tables[name].columns, data.table.n_rows) for name, made in prepared.items()]
    X = np.hstack([*columns, np.ones((data.table.n_rows, 1))])
    solver = solver_of(common, SGD if options.solver == "sgd" else QuasiNewton)

    progress = seat.progress or (lambda done, losses: None)
    progress(0, [])
    fitted = train(
        X,
        2.0 * data.y - 1.0,
        Optimiser(batch_size=common.batch_size, seed=batch_seed(common.random_state), **asdict(solver)),
        loss=LOSSES[loss],
        weight=data.weight,
        on_epoch=lambda so_far: progress(len(so_far.losses), so_far.losses),
    )
    if loss == "taylor":
        warn_beyond_taylor(X @ fitted.weights)
    model_id = secrets.token_hex(16)
    ends = np.cumsum([made.n_columns for made in prepared.values()])
    parts = {
        name: LinearPart(
            model_id=model_id, party=name, schema=tables[name].schema, preparation=made, coef=coef, loss=loss
        )
        for (name, made), coef in zip(prepared.items(), np.split(fitted.weights[:-1], ends[:-1]), strict=True)
    }
    holder = parts[active]
    holder.intercept, holder.classes, holder.losses = float(fitted.weights[-1]), seat.classes, fitted.losses
    return parts
