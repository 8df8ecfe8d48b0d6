"""Logistic and other regressions as systems: on one table, and between parties by quasi-Newton steps or descent."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.parameters import DEGREE, OU_DEFAULT_KEY_BITS, PAILLIER_DEFAULT_KEY_BITS
from treaty.crypto.sums.hidden_vectors import Fields, product_bits, vectors_parameters
from treaty.crypto.sums.lattice_sums import vector_bytes
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.linear.lbfgs import batch_seed
from treaty.linear.preparation import LOGISTIC, TAYLOR, Preparation, fit_calibration, target_of, warn_beyond_taylor
from treaty.linear.training import Optimiser, minimise, standard_errors, train
from treaty.machine.arrays import Floats
from treaty.models.linear import LinearPart, one_against_rest
from treaty.models.scorecard import as_woe
from treaty.statistics import ColumnBins
from treaty.systems.expected import KEY_BYTES, ROUND_TRIP, Expected, Shape, not_expected
from treaty.systems.logistic import setup
from treaty.systems.logistic.leakage import ROUTES, conclusions
from treaty.systems.logistic.options import SGD as SGDOptions
from treaty.systems.logistic.options import FederatedRegression, QuasiNewton, RegressionOptions
from treaty.systems.logistic.prediction import online_active, online_passive, predict_active, predict_passive
from treaty.systems.logistic.products import WEIGHT_BOUND
from treaty.systems.logistic.quasi_newton import active, coordinator, passive
from treaty.systems.logistic.scorecard import UNCALIBRATED, cut, labelled, put_card
from treaty.systems.logistic.setup import MARGIN_BITS, WEIGHT_BITS, solver_of
from treaty.systems.pooled.options import Pooled
from treaty.systems.pooled.system import ALONE, pooled_system
from treaty.systems.system import PartySpec, RoleInput, Roles, System, mesh
from treaty.systems.vertical.cipher_choice import MODULAR


def train_pooled(tables: Mapping[str, Table], inputs: RoleInput[Pooled, RegressionOptions]) -> dict[str, LinearPart]:
    """Train on all parties' columns in one place; return every party's part, as a federated training does.

    `tables` are all parties', rows in common order; `inputs` has the active party's rows, labels 0 and 1, and weights.
    On the same seed of batches the weights are those of a federated training up to the rounding of encrypted numbers,
    which epochs long after the loss has settled may amplify, see docs/logistic.md. Raises DataError when training
    diverges although the learning rate was lowered.
    """
    data, common, active = inputs.rows, inputs.common, inputs.roles.active
    if inputs.eval_sets:
        common.check_eval_sets(inputs.options)
    given, bins = tables, dict[str, list[ColumnBins]]()
    if common.pdo is not None:
        bins = {name: labelled(cut(of, name, common), of, data.y, common) for name, of in tables.items()}
        tables = {name: as_woe(bins[name], of) for name, of in tables.items()}
    # parties prepare their own columns, without weights
    weight = data.weight if ALONE in tables else None
    prepared = {
        name: setup.prepared(table, common, "the table" if name == ALONE else name, weight)
        for name, table in tables.items()
    }
    X = _side_by_side([column for table in tables.values() for column in table.columns], data.table.n_rows, prepared)
    if common.standard_errors and data.weight is not None:
        raise ConfigError("standard errors are of rows that all weigh the same: expected sample_weight=None")
    n_classes = len(inputs.classes or ())
    several = common.family == "multiclass"
    labels = [(data.y == k).astype(np.float64) for k in range(n_classes)] if several else [data.y]
    model_id = secrets.token_hex(16)
    models = [_fitted(tables, prepared, X, y, inputs, model_id) for y in labels]
    if not several:
        models[0][active].classes = inputs.classes
        calibration = models[0][active].calibration or UNCALIBRATED
        for name, own in bins.items():
            put_card(models[0][name], given[name].schema, own, calibration, common)
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
    watched = {
        rows.name: (
            _side_by_side(rows.table.columns, rows.table.n_rows, prepared), np.where(rows.y > 0.5, 1.0, -1.0),
        )
        for rows in inputs.eval_sets
    }  # fmt: skip
    if common.whole_table:
        fitted = minimise(
            X, target.labels, loss, l2=common.l2, tol=common.tol**2, max_iter=common.most_rounds, weight=data.weight,
            watched=watched, patience=common.early_stopping_rounds,
        )  # fmt: skip
        report(len(fitted.losses), {"train": fitted.losses, **fitted.eval_losses})
    else:
        solver = solver_of(common, SGDOptions if options.solver == "sgd" else QuasiNewton)
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
        # the active party has the intercept, the last column's weight
        of = np.append(of, len(weights) - 1) if name == active else of
        parts[name] = LinearPart(
            model_id=model_id, party=name, schema=tables[name].schema, preparation=made, coef=weights[of],
            family=family, loss=loss.name, errors=None if errors is None else errors[of], degrees=degrees,
        )  # fmt: skip
    holder = parts[active]
    holder.coef, holder.intercept = holder.coef[:-1], float(holder.coef[-1])
    holder.error_at_zero = math.nan if errors is None else float(errors[-1])
    holder.losses, holder.eval_losses, holder.batch_size = fitted.losses, fitted.eval_losses, batch_size
    holder.settled = fitted.settled
    if common.calibrate and loss is TAYLOR:
        holder.calibration = fit_calibration(margins, y, data.weight)
    return parts


def _side_by_side(features: Sequence[NDArray[Any]], n_rows: int, prepared: Mapping[str, Preparation]) -> Floats:
    """Return all parties' prepared columns (n_rows, n_columns), then one of ones; `features` are in their order."""
    columns, first = [], 0
    for made in prepared.values():
        end = first + len(made.n_categories)
        columns.append(made.matrix(features[first:end], n_rows))
        first = end
    return np.hstack([*columns, np.ones((n_rows, 1))])


# Times the time of Okamoto-Uchiyama, both with default keys
_PAILLIER = 3.5


def expected(roles: Roles, options: FederatedRegression, common: RegressionOptions, shape: Shape) -> Expected:
    """Return traffic, memory and time of as many epochs as there may be; ConfigError where a formula is missing.

    `shape.columns` are prepared ones, the active party's without its intercept.
    """
    if options.mode == "paper":
        raise not_expected("the published form")
    if not common.has_batches or common.pdo is not None:
        raise not_expected("this regression" if common.pdo is None else "a scorecard")
    found, active, common = Expected(), roles.active, common.on(shape.rows)
    batch = common.rows_of_batch(shape.rows)
    batches = shape.rows // batch
    columns = {name: shape.columns[name] + (name == active) for name in roles.owners}
    solver = solver_of(common, type(options), len(roles.owners))
    steps = solver.max_iter * batches
    if common.whole_table and options.keeps_pairs:
        # one step in each direction, or not many more
        steps = min(steps, sum(columns.values()) + 2)
    pairs = max(0, steps // solver.period - 1) if options.keeps_pairs and not common.whole_table else 0
    rows = steps * batch + pairs * (solver.hessian_batch_size or batch)
    products = steps + pairs * max(1, (solver.hessian_batch_size or batch) // batch)
    found.agree(permutations(roles.of, 2))
    _steps(found, roles, steps, solver.memory, solver.period)
    cipher = options.cipher(common.fractional_bits, common.family)
    bits = common.fractional_bits + MARGIN_BITS + 2  # of a vector's entries
    if cipher == "lattice":
        seconds = _lattice(found, roles, columns, batch, batches, products, bits)
    else:
        key = options.key_bits or options.insecure_test_key_bits
        key = key or (OU_DEFAULT_KEY_BITS if cipher == "ou" else PAILLIER_DEFAULT_KEY_BITS)
        ciphertext, plaintext = (key / 8, key // 3) if cipher == "ou" else (key / 4, key)
        hide = _coordinated if options.has_coordinator else _two_party
        size = _Size(shape.rows, rows, products, batch, KEY_BYTES * key, ciphertext, plaintext, bits)
        seconds = hide(found, roles, columns, size) * (1.0 if cipher == "ou" else _PAILLIER)
    for name in roles.owners:
        found.hold(24.0 * shape.rows * columns[name], name)
        if common.calibrate and name != active:
            found.send(name, active, 8.0 * shape.rows, 1)
    found.seconds = seconds / shape.threads + products * 3 * ROUND_TRIP
    return found


class _Size(NamedTuple):
    """Rows of the table, of all products, of a batch; bytes of a key and a ciphertext; bits of numbers."""

    table: int
    rows: int
    products: int
    batch: int
    key: float
    ciphertext: float
    plaintext: int
    bits: int


def _steps(found: Expected, roles: Roles, steps: int, memory: int, period: int) -> None:
    """Count inner products to the coordinator, or the active party in its place, and coefficients back."""
    decider = roles.holder("coordinator") or roles.active
    # correction pairs that each step has
    pairs = np.clip(np.arange(1, steps + 1) // period - 1, 0, memory)
    products, coefficients = 16.0 * ((2 * pairs + 1) * (pairs + 1)).sum(), 8.0 * (2 * pairs + 1).sum()
    for name in roles.owners:
        if name != decider:
            found.send(name, decider, products, steps)
            found.send(decider, name, coefficients, steps)


def _lattice(
    found: Expected, roles: Roles, columns: Mapping[str, int], batch: int, batches: int, products: int, bits: int
) -> float:
    """Count vectors, hints and products between all owners; return seconds of one core of one of them."""
    of_block = max(1, DEGREE // batch)
    blocks, length = -(-batches // of_block), batch * min(of_block, batches)
    parameters = vectors_parameters(length, WEIGHT_BOUND, bits + len(roles.owners).bit_length(), batch)
    primes, digits, seconds = len(parameters.primes), parameters.digits, 0.0
    for one, other in permutations(roles.owners, 2):
        own, theirs = (columns[name] + (name == roles.active) for name in (one, other))
        hint = 2.0 * digits * DEGREE * own * blocks
        found.send(one, other, products * float(vector_bytes(parameters, length)), products)
        found.send(one, other, hint + products * (2.0 * digits * own + 16.0 * theirs), 2 * products)
        found.hold(2 * hint, one, other)
        found.kept[one] = hint
        each = primes * (length + DEGREE) * 20e-9 + own * primes * DEGREE * 2e-9
        seconds = max(seconds, own * blocks * 15e-3 + products * each * 2 * (len(roles.owners) - 1))
    return seconds


def _coordinated(found: Expected, roles: Roles, columns: Mapping[str, int], size: _Size) -> float:
    """Count what a coordinator with a key takes; return seconds of one core, under Okamoto-Uchiyama."""
    coordinator, senders = str(roles.holder("coordinator")), len(roles.owners).bit_length()
    fields = Fields.of(product_bits(size.batch, WEIGHT_BITS, size.bits) + senders, size.plaintext, masks=1)
    for name in roles.owners:
        plaintexts = -(-columns[name] // fields.per_plaintext)
        found.send(name, coordinator, size.products * plaintexts * size.ciphertext, size.products)
        found.send(coordinator, name, size.key + size.products * columns[name] * fields.width / 8, size.products)
        found.hold(4.0 * size.batch * size.ciphertext, name)
        if name != roles.active:
            for one, other in ((name, roles.active), (roles.active, name)):
                found.send(one, other, size.rows * size.ciphertext, size.products)
    most = max(columns.values())
    return 3.0 + size.rows * (0.35e-3 + most * 6e-6) * MODULAR


def _two_party(found: Expected, roles: Roles, columns: Mapping[str, int], size: _Size) -> float:
    """Count what keys of all owners take; return seconds of one core, under Okamoto-Uchiyama."""
    senders = len(roles.owners) - 1
    bits = product_bits(size.batch, WEIGHT_BITS, size.bits) + senders.bit_length()
    fields = Fields.of(bits, size.plaintext, masks=senders if senders > 1 else 0)
    plaintexts = {name: -(-columns[name] // fields.per_plaintext) for name in roles.owners}
    for one, other in permutations(roles.owners, 2):
        rows = size.table * (plaintexts[one] + (one == roles.active)) * size.ciphertext
        found.send(one, other, size.key + rows + size.products * plaintexts[other] * size.ciphertext, size.products)
        found.hold(2 * rows, one, other)
    most = max(plaintexts.values())
    of_all = size.table * (most + 1) * 30e-6 + senders * most * (size.rows * 6e-6 + size.products * 2e-3)
    return 3.0 + of_all * MODULAR


COORDINATOR = "coordinator"

CANNOT = {
    "explain": "contributions (TreeSHAP) exist for trees only; in a logistic regression a column adds its weight times "
    "its prepared value: see coef of each party's part"
}


def assign(places: Mapping[str, PartySpec], active: str, options: FederatedRegression) -> Roles:
    """Give every party its role: "active", "passive", or "coordinator" to the party that the job names.

    Raises ConfigError when roles and options do not go together.
    """
    others = [
        f'role = "{place.role}" at {name}' if place.role else f"edge at {name}"
        for name, place in places.items()
        if place.role not in (None, COORDINATOR) or place.edge
    ]
    if others:
        raise ConfigError(
            f'expected no role but "coordinator", and no edge, under protocol {options.system!r}, got '
            + ", ".join(others)
        )
    coordinators = [name for name, place in places.items() if place.role == COORDINATOR]
    if len(coordinators) > options.has_coordinator:
        raise ConfigError(
            'expected role = "coordinator" at one party, and only with coordinator = true, got it at '
            + ", ".join(coordinators)
        )
    for name in coordinators:
        if name == active or places[name].has_rows:
            raise ConfigError(
                f"expected {name}, the coordinator, to have no table and not to be the active party: a party with data "
                "must not coordinate"
            )
    if options.has_coordinator and not coordinators:
        raise ConfigError(
            'expected a coordinator, a party without data with role = "coordinator"; or take coordinator = false'
        )
    owners = [name for name in places if name not in coordinators]
    if active not in owners or len(owners) < 2:
        raise ConfigError(
            f"expected at least two parties with data, the label holder among them, got {', '.join(owners)}: one "
            "party's table is trained on under protocol 'pooled'"
        )
    # paper mode needs consent, and only the published form has it
    if options.mode == "paper" and not options.allow_insecure:
        raise ConfigError(
            "mode='paper' shows the coordinator every gradient, step and loss, and lets passive parties solve for "
            "labels; it needs allow_insecure=True of every party"
        )
    if options.mode == "paper" and (not options.has_coordinator or options.encryption == "lattice"):
        raise ConfigError("mode='paper' needs a coordinator, and encryption 'paillier' or 'ou'")
    found = {name: COORDINATOR if name in coordinators else "passive" for name in places}
    return Roles(active, {**found, active: "active"}, owners)


def helpers(owners: Iterable[str], options: FederatedRegression) -> dict[str, PartySpec]:
    """Return the coordinator that `fit` plays, if there is one, under a name that no party with data has."""
    if not options.has_coordinator:
        return {}
    taken = set(owners)
    names = (COORDINATOR, *(f"{COORDINATOR}-{number}" for number in range(2, len(taken) + 2)))
    name = next(name for name in names if name not in taken)
    return {name: PartySpec(role=COORDINATOR, has_rows=False)}


def warm_up(kind: type[FederatedRegression], options: FederatedRegression | None) -> list[Any]:
    """Return options of small trainings: under the lattice map and a short key, or those of the training to come."""
    keyed: dict[str, Any] = {"encryption": "ou", "insecure_test_key_bits": 768, "allow_insecure": True}
    if options is None:
        return [kind(), kind(**keyed)]
    fractional_bits = RegressionOptions().fractional_bits
    short = None if options.cipher(fractional_bits) == "lattice" else 768
    return [replace(options, key_bits=None, insecure_test_key_bits=short, allow_insecure=True)]


def _federated(kind: type[FederatedRegression]) -> System:
    # a cluster adds up rows of parties with data, under the lattice map
    clusters = frozenset({"active", "passive"} if kind is QuasiNewton else ())
    return System(
        name=kind.system,
        options=kind,
        common=RegressionOptions,
        split="columns",
        train={"active": active, "passive": passive, COORDINATOR: coordinator},
        assign=assign,
        conclusions=conclusions,
        routes=ROUTES,
        expected=expected,
        named_roles=frozenset({COORDINATOR}),
        on_clusters=lambda options: clusters if options.encryption in (None, "auto", "lattice") else frozenset(),
        has_model=frozenset({"active", "passive"}),
        # no training can be resumed without its checkpoint
        until_kept=frozenset({COORDINATOR}),
        helpers=helpers,
        links=mesh,
        predict={"active": predict_active, "passive": predict_passive},
        online={"active": online_active, "passive": online_passive},
        apart=frozenset({COORDINATOR}),
        orders_by_id=True,
        cannot=CANNOT,
        warm_up=partial(warm_up, kind),
    )


POOLED = pooled_system(
    RegressionOptions, train_pooled, CANNOT | {"resume": "a logistic regression on one table keeps no checkpoint"}
)
QUASI_NEWTON = _federated(QuasiNewton)
SGD = _federated(SGDOptions)
