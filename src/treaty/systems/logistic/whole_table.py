"""Training on the whole table: regressions of numbers, of several classes, and those whose weights get standard errors.

Every step is on all rows, in coordinates in which each party's own columns are uncorrelated, by L-BFGS on inner
products as in `quasi_newton`. The pair (s, v) of a step is made of the last two weights and gradients, so that a step
needs one product of columns with a hidden vector: every party gets its own slice of the gradient, and no more. Two
losses are quadratic: the squared one, and the Taylor form of the logistic one. With residuals d = c (u - t), where t is
the target in the loss's own units, the mean loss at w is

    loss(w) = loss(0) + w^T (g(w) + g(0)) / 2,

of which each party knows its own part. So no product with labels is needed.

A linear regression's target is centred and divided by its standard deviation at the active party. With one passive
party, its part of the loss is unmasked: it follows from the loss. With more than two classes one model after the other
is trained, of a class against the rest, with the same products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from treaty.crypto.keystream import CancellingMasks, from_fixed, to_fixed, total
from treaty.errors import ConfigError, DataError
from treaty.linear.preparation import COLUMN_FRACTION, TAYLOR, Target, target_of, uncorrelated
from treaty.linear.training import Schedule
from treaty.machine.arrays import Floats
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.models.linear import LinearPart, one_against_rest
from treaty.statistics import ColumnBins
from treaty.systems.logistic import setup
from treaty.systems.logistic.batches import count_lone_rows, share_weights
from treaty.systems.logistic.inference import standard_errors
from treaty.systems.logistic.poisson import RateGradients, RateProducts, check_pairs
from treaty.systems.logistic.prediction import calibrate
from treaty.systems.logistic.scorecard import give_points, on_bins
from treaty.systems.logistic.steps import Decider, Epochs, Products, products_of

# How many times larger than its precision the residuals' variance must be: standard errors are then within 3 %
CERTAIN = 16.0


@leaks("the sender's part of the mean loss; of several passive parties their sum", "aggregated")
class LossShare(Message):
    """A part of the mean loss, uint64 (1, 2), modulo 2^128, under masks if there are several."""

    part: Array


@leaks("the target's standard deviation", "aggregated")
class TargetUnit(Message):
    """The target's standard deviation, in units of which weights were trained."""

    unit: Annotated[float, msgspec.Meta(gt=0)]


def train(inputs: setup.GlmInput) -> LinearPart:
    """Train as a party with data, the active or a passive one; return the own part of the model.

    Raises ConfigError or DataError when options or tables do not fit, or the target is no number that varies; PeerError
    or CryptoError when a party is lost or sends what the protocol does not allow.
    """
    party, data, table, common = inputs.party, inputs.rows, inputs.rows.table, inputs.common
    is_active = party.name == inputs.roles.active
    if data.weight is not None and not common.has_batches:
        raise ConfigError("a regression on the whole table between parties has no weights of rows: leave them out")
    if common.family == "poisson" and len(inputs.roles.owners) > 2:
        raise ConfigError(
            f"a Poisson regression is between two parties with data, got {', '.join(inputs.roles.owners)}: rates are "
            "products, which more than two could not make without showing them to one"
        )
    targets = _targets(inputs) if is_active else [None] * n_models(inputs)
    agree(party, setup.terms(inputs))
    bins: list[ColumnBins] = []
    if common.pdo is not None:
        inputs, bins = on_bins(inputs)
    preparation, own = setup.own_data(inputs, None)
    setting = setup.begin(inputs, own.columns.shape, None)
    all_rows = np.arange(setting.n_rows)[np.newaxis]
    own = share_weights(party, setting, own, all_rows)
    X, shown = own.columns.astype(np.float64) * 2.0**-COLUMN_FRACTION, own
    if common.family == "poisson" and common.standard_errors:
        check_pairs(setting)
        # sums over rows are shown of products of two columns as well, see `RateGradients.block`
        left, right = np.triu_indices(X.shape[1])
        shown = replace(own, columns=np.hstack([own.columns, setup.fixed_columns(X[:, left] * X[:, right])]))
    alone = count_lone_rows(party, setting, shown, all_rows)
    products: Products | RateProducts
    if common.family == "poisson":
        products = RateProducts(party, setting, inputs.threads)
    else:
        products = products_of(inputs, setting, own, setup.masks_of(party, setting))
    parts = []
    for number, target in enumerate(targets):
        part = LinearPart(
            model_id=setting.model_id, party=party.name, schema=inputs.rows.table.schema, preparation=preparation,
            coef=np.zeros(0), encryption=setting.cipher, family=setting.family, alone=alone,
        )  # fmt: skip
        _fit(inputs, setting, X, target, products, part, own.weight)
        if common.classifies:
            part.family = "logistic"
            part.classes = inputs.classes if is_active and len(targets) == 1 else None
        if common.classifies and common.calibrate:
            calibrate(inputs, part, data.y == number if len(targets) > 1 else data.y > 0.5)
        if common.pdo is not None:
            give_points(inputs, part, table.schema, bins)
        parts.append(part)
    return parts[0] if len(parts) == 1 else one_against_rest(parts, inputs.classes if is_active else None)


def n_models(inputs: setup.GlmInput) -> int:
    """Return how many models are trained: one for each class where there are more than two."""
    return inputs.n_classes if inputs.common.family == "multiclass" else 1


def _targets(inputs: setup.GlmInput) -> list[Target | None]:
    """Prepare what the active party regresses on; DataError for labels that are not of all classes."""
    y, name, family = inputs.rows.y, inputs.party.name, inputs.common.family
    if family != "multiclass":
        return [target_of(y, family, name)]
    found = len(np.unique(y))
    if found != inputs.n_classes or len(inputs.classes or ()) != found:
        raise DataError(f"{name}: expected labels of {inputs.n_classes} classes, got {found} in {len(y)} rows")
    return [target_of((y == number).astype(np.float64), "logistic", name) for number in range(found)]


def _fit(
    inputs: setup.GlmInput, setting: setup.Setting, X: Floats, target: Target | None, products: Products | RateProducts,
    part: LinearPart, weight: Floats | None,
) -> None:  # fmt: skip
    """Train one model, and put its weights, and standard errors if they are asked for, into the own part of it."""
    party = inputs.party
    party.round = 0
    # fresh ones for each model: masks serve once
    seeds = setup.pair_seeds(party, setting.others(party.name))
    hidden: HiddenGradients
    if isinstance(products, RateProducts):
        hidden = RateGradients(products, setting, X, target)
    else:
        hidden = QuadraticGradients(setting, X, target, products, weight)
    l2 = np.full(X.shape[1], setting.solver.l2)
    if target is not None:
        l2[-1] = 0.0
    local = uncorrelated(hidden.block(None) + np.diag(l2))
    weights, schedule = _minimise(inputs, setting, hidden, local, l2, target, seeds, part)
    if isinstance(hidden, RateGradients):
        hidden.check(weights)
    # the active party's unit is what all weights are multiplied by
    unit = 1.0 if target is None else target.unit
    if setting.family == "linear" and target is None:
        unit = party.receive(setting.active, TargetUnit).unit
    elif setting.family == "linear":
        for peer in setting.passives:
            party.send(peer, TargetUnit(unit))
    if inputs.common.standard_errors:
        at_zero = np.zeros((0, X.shape[1])) if target is None else np.append(part.preparation.at_zero, 1.0)[np.newaxis]
        variance = _variance(setting, target, schedule.losses)
        steps = partial(inputs.observers.set_up, "multiplying for standard errors")
        block = hidden.block(weights)
        errors, part.degrees = standard_errors(party, setting, X, block, hidden.times, variance, at_zero, steps)
        part.errors = unit * errors[: X.shape[1]]
        part.error_at_zero = unit * float(errors[-1]) if target is not None else math.nan
    part.coef = unit * weights
    if target is not None:
        part.coef, part.intercept, part.loss = part.coef[:-1], float(part.coef[-1]) + target.shift, target.loss.name
        part.losses, part.eval_losses, part.settled = schedule.losses, schedule.eval_losses, schedule.settled


class QuadraticGradients:
    """A party's end under a quadratic loss: its slice of the gradient is made of the sum of all parties' margins."""

    def __init__(
        self, setting: setup.Setting, X: Floats, target: Target | None, sums: Products, weight: Floats | None
    ) -> None:
        self._setting, self._X, self._sums, self._rows = setting, X, sums, np.arange(len(X))
        self._weight = np.ones(len(X)) if weight is None else weight
        self._pull = None
        if target is not None:
            # what margins come near to: residuals are the curvature times the difference
            hidden = 2.0 * target.labels if target.loss is TAYLOR else target.labels
            self._pull = setting.fixed(self._weight * hidden)
        self._start: Floats | None = None

    def block(self, weights: Floats | None) -> Floats:
        """Return the own block of the mean Hessian, the same at all weights."""
        block: Floats = self._setting.curvature / len(self._X) * (self._X.T @ (self._weight[:, np.newaxis] * self._X))
        return block

    def gradient(self, weights: Floats) -> Floats:
        """Return the own slice of the gradient at all parties' weights; the first is at 0."""
        u = self._setting.fixed(self._weight * (self._X @ weights))
        products = self._sums.times(self._rows, u if self._pull is None else u - self._pull, counted=False)
        found = self._setting.mean_over(len(self._X), products)
        self._start = found if self._start is None else self._start
        return found

    def own_loss(self, weights: Floats, gradient: Floats) -> float:
        """Return the own part of the mean loss less that at 0."""
        assert self._start is not None
        return 0.5 * float(weights @ (gradient + self._start))

    def times(self, owner: str, vector: Floats | None) -> Floats | None:
        """Multiply the own columns with a party's vector, which its owner gives, under the Hessian."""
        of_rows = np.zeros(len(self._X)) if vector is None else vector
        products = self._sums.times(self._rows, self._setting.fixed(of_rows), counted=False)
        return None if vector is not None else self._setting.mean_over(len(self._X), products)


HiddenGradients = QuadraticGradients | RateGradients


def _minimise(
    inputs: setup.GlmInput, setting: setup.Setting, hidden: HiddenGradients, local: Floats, l2: Floats,
    target: Target | None, seeds: dict[str, bytes], part: LinearPart,
) -> tuple[Floats, Schedule]:  # fmt: skip
    """Take steps until the loss is steady; return own weights, in the target's unit, and the schedule with the losses.

    `local` are the coordinates in which the own columns are uncorrelated; weights are `local` times the slice's.
    """
    party = inputs.party
    masks = CancellingMasks(party.job, f"{party.protocol} whole table", party.name, seeds)
    among = {peer: seed for peer, seed in seeds.items() if setting.active not in (peer, party.name)}
    of_loss = CancellingMasks(party.job, f"{party.protocol} loss", party.name, among)
    decider = Decider(party, setting, masks, seeds)
    # the penalty is on w, not on z
    slice_ = replace(setting.solver, l2=0.0).slice(local.shape[1], intercept=False)
    epochs = Epochs(inputs, setting, slice_, decider.coordinator, setup.eval_data(inputs, part.preparation))
    epochs.report()
    before = np.zeros(0)
    while True:
        party.round += 1
        weights = local @ slice_.weights
        grad = hidden.gradient(weights)
        along = local.T @ (grad + l2 * weights)
        # the difference of two gradients stands for the Hessian's product with the step
        s = slice_.candidate()
        v = None if s is None else along - before
        before = along
        slice_.step(decider.decide(slice_.products(along, v), paired=v is not None))
        loss = _mean_loss(party, setting, of_loss, target, hidden.own_loss(weights, grad))
        end = epochs.end(loss, local @ slice_.weights, seeds)
        if end.finished:
            weights = local @ slice_.weights if epochs.best is None else epochs.best
            return weights, epochs.schedule


def _mean_loss(
    party: Party, setting: setup.Setting, masks: CancellingMasks, target: Target | None, own: float
) -> float | None:
    """Add up the parties' parts of the mean loss, less that at 0; return the loss, at the active party alone."""
    if not math.isfinite(own):
        raise setup.diverged("the gradient is not finite")
    if target is None:
        part = masks.cover(to_fixed(np.array([own])), party.round, "loss")
        party.send(setting.active, LossShare(Array.of(part)))
        return None
    parts = [
        view(party.receive(peer, LossShare).part, np.uint64, (1, 2), peer=peer, what="LossShare.part")
        for peer in setting.passives
    ]
    at_zero = float(np.mean(target.loss.values(np.zeros(len(target.labels)), target.labels)))
    return at_zero + own + float(from_fixed(total(parts))[0])


def _variance(setting: setup.Setting, target: Target | None, losses: list[float]) -> Callable[[int], float] | None:
    """Return the factor of covariances, by the residuals' degrees of freedom; None at a passive party.

    DataError where the residuals' loss is no larger than its own precision.
    """
    if target is None:
        return None
    least, known = target.loss.least, target.variance
    if least is None:
        return lambda degrees: known
    left, precision = losses[-1] - least, max(setting.solver.tol**2, 2.0**-setting.fractional_bits)
    if left < CERTAIN * precision:
        raise DataError(
            f"{setting.active}: columns explain the target to the precision of training: half the mean squared "
            f"residual is {max(left, 0.0):.1g} of the target's variance, and known to {precision:.1g}; there are no "
            "standard errors: leave them out, or lower tol and raise fractional_bits",
            public="columns explain the target to the precision of training: weights have no standard errors",
        )
    return lambda degrees: 2.0 * left * setting.n_rows / degrees
