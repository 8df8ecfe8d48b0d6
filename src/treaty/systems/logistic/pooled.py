"""Logistic regression on one table, or on all parties' tables side by side: what federated systems are compared with.

A federated training leaves what this leaves: of each party a `LinearPart` with the schema and preparation of its own
table and the weights of its own prepared columns; at the active party intercept, classes, calibration and losses, too.
On the same seed of batches its weights are the same up to the rounding of encrypted numbers (which epochs long after
the loss has settled may amplify, see docs/logistic.md). Both have in common: `preparation_of` each party's own table;
labels -1 and +1; the active party's matrix is its prepared columns, then a column of ones.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.linear.lbfgs import batch_seed
from treaty.linear.losses import LOGISTIC, TAYLOR, fit_calibration, target_of, warn_beyond_taylor
from treaty.linear.preparation import Preparation
from treaty.linear.training import Optimiser, minimise, settled, standard_errors, train
from treaty.machine.arrays import Floats
from treaty.models.linear import LinearPart, one_against_rest
from treaty.systems.logistic.options import SGD, QuasiNewton, RegressionOptions
from treaty.systems.logistic.setup import prepared as learned
from treaty.systems.logistic.setup import solver_of
from treaty.systems.pooled.options import Pooled
from treaty.systems.pooled.system import ALONE
from treaty.systems.system import LabelledRows, RoleInput


def train_pooled(tables: Mapping[str, Table], inputs: RoleInput[Pooled, RegressionOptions]) -> dict[str, LinearPart]:
    """Train on all parties' columns in one place; return every party's part.

    `tables` are everybody's, rows in common order; `inputs` has the active party's rows, labels 0 and 1, and weights.
    Raises DataError when training diverges although the learning rate was lowered.
    """
    data, common, active = inputs.rows, inputs.common, inputs.roles.active
    if inputs.eval_sets:
        common.check_eval_sets(inputs.options)
    weight = data.weight if ALONE in tables else None  # parties prepare their columns by themselves, without weights
    called = {name: "the table" if name == ALONE else name for name in tables}
    prepared = {name: learned(table, common, called[name], weight) for name, table in tables.items()}
    columns = [made.matrix(tables[name].columns, data.table.n_rows) for name, made in prepared.items()]
    X = np.hstack([*columns, np.ones((data.table.n_rows, 1))])
    if common.standard_errors and data.weight is not None:
        raise ConfigError("standard errors are of rows that all weigh the same: expected sample_weight=None")
    n_classes = len(inputs.classes or ())
    several = common.family == "multiclass"
    labels = [(data.y == k).astype(np.float64) for k in range(n_classes)] if several else [data.y]
    model_id = secrets.token_hex(16)
    models = [_fitted(tables, prepared, X, y, inputs, model_id) for y in labels]
    if not several:
        models[0][active].classes = inputs.classes
        return models[0]
    return {
        name: one_against_rest([model[name] for model in models], inputs.classes if name == active else None)
        for name in tables
    }


def _fitted(
    tables: Mapping[str, Table],
    prepared: Mapping[str, Preparation],
    X: Floats,
    y: Floats,
    inputs: RoleInput[Pooled, RegressionOptions],
    model_id: str,
) -> dict[str, LinearPart]:
    """Train on labels of 0 and 1, or numbers; return every party's part."""
    data, options, active = inputs.rows, inputs.options, inputs.roles.active
    common, batch_size = inputs.common.on(data.table.n_rows), None
    family = "logistic" if common.family == "multiclass" else common.family
    target = target_of(y, family, active, data.weight)
    loss = LOGISTIC if options.loss == "logistic" else target.loss
    report = inputs.observers.round_finished
    report(0, {})
    watched = {rows.name: _prepared(rows, tables, prepared) for rows in inputs.eval_sets}
    if common.whole_table:
        fitted = minimise(
            X, target.labels, loss, l2=common.l2, tol=common.tol**2, max_iter=common.most_rounds, weight=data.weight,
            watched=watched, patience=common.early_stopping_rounds,
        )  # fmt: skip
        report(len(fitted.losses), {"train": fitted.losses, **fitted.eval_losses})
    else:
        solver = solver_of(common, SGD if options.solver == "sgd" else QuasiNewton)
        seed, batch_size = batch_seed(common.random_state), common.rows_of_batch(len(y))
        fitted = train(
            X,
            target.labels,
            Optimiser(batch_size=batch_size, seed=seed, **asdict(solver)),
            loss=loss,
            weight=data.weight,
            on_epoch=lambda so_far: report(len(so_far.losses), {"train": so_far.losses, **so_far.eval_losses}),
            watched=watched,
            patience=common.early_stopping_rounds,
        )
    margins = X @ fitted.weights
    if loss is TAYLOR:
        warn_beyond_taylor(margins)
    weights, errors, degrees = target.unit * fitted.weights, None, None
    weights[-1] += target.shift
    if common.standard_errors:
        zeros = [made.at_zero if name == active else np.zeros(made.n_columns) for name, made in prepared.items()]
        at_zero = np.concatenate([*zeros, [1.0]])[np.newaxis]
        errors, degrees = standard_errors(X, target.labels, fitted.weights, loss, target.variance, at_zero)
        errors = target.unit * errors
    ends = np.cumsum([made.n_columns for made in prepared.values()])
    parts = {}
    for (name, made), of in zip(prepared.items(), np.split(np.arange(len(weights)), ends)[:-1], strict=True):
        of = np.append(of, len(weights) - 1) if name == active else of  # the intercept
        parts[name] = LinearPart(
            model_id=model_id, party=name, schema=tables[name].schema, preparation=made, coef=weights[of],
            family=family, loss=loss.name, errors=None if errors is None else errors[of], degrees=degrees,
        )  # fmt: skip
    holder = parts[active]
    holder.coef, holder.intercept = holder.coef[:-1], float(holder.coef[-1])
    holder.error_at_zero = math.nan if errors is None else float(errors[-1])
    holder.losses, holder.eval_losses, holder.batch_size = fitted.losses, fitted.eval_losses, batch_size
    tol = common.tol**2 if common.whole_table else common.tol
    holder.settled = tol == 0.0 or fitted.ended or settled(fitted.losses, tol)
    if common.calibrate and loss is TAYLOR:
        holder.calibration = fit_calibration(margins, y, data.weight)
    return parts


def _prepared(
    rows: LabelledRows, tables: Mapping[str, Table], prepared: Mapping[str, Preparation]
) -> tuple[Floats, Floats]:
    """Return an eval set's prepared columns, those of all parties and of ones, and its labels as -1 and 1."""
    n_rows, columns, first = rows.table.n_rows, [], 0
    for name, made in prepared.items():
        end = first + len(tables[name].schema.names)
        columns.append(made.matrix(rows.table.columns[first:end], n_rows))
        first = end
    return np.hstack([*columns, np.ones((n_rows, 1))]), np.where(rows.y > 0.5, 1.0, -1.0)
