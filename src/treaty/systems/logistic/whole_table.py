"""Training on the whole table: regressions of numbers, of several classes, and those whose weights get standard errors.

Every step is on all rows, in coordinates in which each party's own columns are uncorrelated (`linear.coordinates`), by
L-BFGS on inner products as in `roles`. The pair (s, v) of a step is made of the last two weights and gradients, so that
a step needs one product of columns with a hidden vector: every party gets its own slice of the gradient, and no more.
Both losses are quadratic: the squared one, and the Taylor form of the logistic one. With residuals d = c (u - t), where
t is the target in the loss's own units, the mean loss at w is

    loss(w) = loss(0) + w^T (g(w) + g(0)) / 2,

of which each party knows its own part. So no product with labels is needed.

===================  =============================  ==============================================  ===================
message              from -> to                     content                                         protection
===================  =============================  ==============================================  ===================
set-up, products, steps and `EpochEnd`: as in `roles`, of one batch, the whole table
`LossShare`          passive -> active party        its part of the mean loss                       masks that cancel
`TargetUnit`         active -> passive parties      linear: the target's standard deviation         TLS
standard errors      see `inference`
===================  =============================  ==============================================  ===================

A linear regression's target is centred and divided by its standard deviation at the active party. With one passive
party, its part of the loss goes unmasked: it follows from the loss. With more than two classes one model after the
other is trained, of a class against the rest, with the same products. What each party learns is in `disclosures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from treaty.crypto.keystream import CancellingMasks, from_fixed, to_fixed, total
from treaty.errors import ConfigError, DataError
from treaty.linear.preparation import COLUMN_FRACTION, Target, fit_calibration, target_of, uncorrelated
from treaty.linear.training import settled
from treaty.machine.arrays import Flags, Floats
from treaty.messaging.conversation import agree
from treaty.messaging.messages import Array, Message, MessageLeakage, view
from treaty.messaging.party import Party
from treaty.models.linear import LinearPart, one_against_rest
from treaty.systems.logistic.batches import tell_lone_rows, tell_weights
from treaty.systems.logistic.coordinated import Opener
from treaty.systems.logistic.inference import invert_for, open_for_inference, standard_errors
from treaty.systems.logistic.poisson import RateGradients, RateProducts, check_pairs
from treaty.systems.logistic.prediction import collect_margins, give_margins
from treaty.systems.logistic.products import blocks_of_rows
from treaty.systems.logistic.setup import (
    GlmInput,
    OwnData,
    Setting,
    begin,
    diverged,
    fixed_columns,
    pair_seeds,
    prepared,
    terms,
)
from treaty.systems.logistic.steps import (
    Decider,
    EpochEnd,
    EvalSets,
    Products,
    decide_for,
    end_epoch,
    products_of,
    receive_end,
)

CERTAIN = 16.0
"""How many times larger than its precision the residuals' variance must be: standard errors are then within 3 %."""


class LossShare(Message):
    """A part of the mean loss, uint64 (1, 2), modulo 2^128; of several passive parties it tells nothing but the sum."""

    leakage: ClassVar = MessageLeakage(
        "the sender's part of the mean loss; of several passive parties their sum", "aggregated"
    )

    part: Array


class TargetUnit(Message):
    """The target's standard deviation, in units of which weights were trained."""

    leakage: ClassVar = MessageLeakage("the target's standard deviation", "aggregated")

    unit: Annotated[float, msgspec.Meta(gt=0)]


def train(inputs: GlmInput) -> LinearPart:
    """Train on the whole table, as the active or a passive party connected with all others.

    Raises ConfigError or DataError when options or tables do not fit, or the target is no number that varies; PeerError
    or CryptoError when a party is lost or sends what the protocol does not allow.
    """
    party, data, table = inputs.party, inputs.rows, inputs.rows.table
    is_active = party.name == inputs.roles.active
    if data.weight is not None and not inputs.common.has_batches:
        raise ConfigError("a regression on the whole table between parties has no weights of rows: leave them out")
    if inputs.common.family == "poisson" and len(inputs.roles.owners) > 2:
        raise ConfigError(
            f"a Poisson regression is between two parties with data, got {', '.join(inputs.roles.owners)}: rates are "
            "products, which more than two could not make without showing them to one"
        )
    targets: list[Target | None] = [None] * _n_targets(inputs)
    if is_active:
        targets = list(_targets(inputs))
    preparation = prepared(table, inputs.common, party.name)
    matrix = preparation.matrix(table.columns, table.n_rows)
    if is_active:
        matrix = np.hstack([matrix, np.ones((table.n_rows, 1))])
    own = OwnData(fixed_columns(matrix), None, None if data.weight is None else data.weight / data.weight.mean())
    agree(party, terms(inputs))
    setting = begin(inputs, own.columns.shape, None)
    all_rows = np.arange(setting.n_rows)[np.newaxis]
    own = tell_weights(party, setting, own, all_rows)
    if setting.family == "poisson" and inputs.common.standard_errors:
        check_pairs(setting)
    X = own.columns.astype(np.float64) * 2.0**-COLUMN_FRACTION
    alone = tell_lone_rows(party, setting, _shown(inputs, own, X), all_rows)
    evals = EvalSets.of(inputs, setting, preparation)
    parts = []
    products = _products(inputs, setting, own)
    family = "logistic" if setting.family == "multiclass" else setting.family
    for number, target in enumerate(targets):
        part = LinearPart(
            model_id=setting.model_id, party=party.name, schema=table.schema, preparation=preparation,
            coef=np.zeros(0), encryption=setting.cipher, family=family, alone=alone,
        )  # fmt: skip
        _fit(inputs, setting, X, target, products, part, own.weight, evals)
        if target is not None and part.family == "logistic":
            part.classes = inputs.classes if len(targets) == 1 else None
        if part.family == "logistic" and inputs.common.calibrate:
            _calibrate(inputs, setting, part, data.y == number if len(targets) > 1 else data.y > 0.5)
        parts.append(part)
    return parts[0] if len(parts) == 1 else one_against_rest(parts, inputs.classes if is_active else None)


def _shown(inputs: GlmInput, own: OwnData, X: Floats) -> OwnData:
    """Return the columns by which sums over rows are shown to their owner: with products of two, see `final_block`."""
    if inputs.common.family != "poisson" or not inputs.common.standard_errors:
        return own
    left, right = np.triu_indices(X.shape[1])
    return replace(own, columns=np.hstack([own.columns, fixed_columns(X[:, left] * X[:, right])]))


def _n_targets(inputs: GlmInput) -> int:
    """Return how many models are trained: one for each class where there are more than two."""
    return inputs.n_classes if inputs.common.family == "multiclass" else 1


def _targets(inputs: GlmInput) -> list[Target]:
    """Prepare what the active party regresses on; DataError for labels that are not of all classes."""
    y, name, family = inputs.rows.y, inputs.party.name, inputs.common.family
    if family != "multiclass":
        return [target_of(y, family, name)]
    found = len(np.unique(y))
    if found != inputs.n_classes or len(inputs.classes or ()) != found:
        raise DataError(f"{name}: expected labels of {inputs.n_classes} classes, got {found} in {len(y)} rows")
    return [target_of((y == number).astype(np.float64), "logistic", name) for number in range(found)]


def _fit(
    inputs: GlmInput, setting: Setting, X: Floats, target: Target | None, products: Products | RateProducts,
    part: LinearPart, weight: Floats | None, evals: EvalSets,
) -> None:  # fmt: skip
    """Train one model, and put its weights, and standard errors if they are asked for, into the own part of it."""
    party = inputs.party
    party.round = 0
    seeds = pair_seeds(party, setting.others(party.name))  # of each model anew: masks serve once
    hidden: HiddenGradients
    if isinstance(products, RateProducts):
        hidden = RateGradients(products, setting, X, target)
    else:
        hidden = QuadraticGradients(setting, X, target, products, weight)
    l2 = np.full(X.shape[1], setting.solver.l2)
    if target is not None:
        l2[-1] = 0.0
    local = uncorrelated(hidden.block() + np.diag(l2))
    weights, losses = _minimise(inputs, setting, hidden, local, l2, target, seeds, evals)
    if isinstance(hidden, RateGradients):
        hidden.check(weights)
    unit = _tell_unit(party, setting, target)
    if inputs.common.standard_errors:
        at_zero = np.zeros((0, X.shape[1])) if target is None else np.append(part.preparation.at_zero, 1.0)[np.newaxis]
        steps = partial(inputs.observers.set_up, "multiplying for standard errors")
        variance = _variance(setting, target, losses)
        found = standard_errors(party, setting, hidden, X, weights, variance, at_zero, steps)
        part.errors, part.degrees = unit * found.errors[: X.shape[1]], found.degrees
        part.error_at_zero = unit * float(found.errors[-1]) if target is not None else math.nan
    part.coef = unit * weights
    if target is not None:
        part.coef, part.intercept = part.coef[:-1], float(part.coef[-1]) + target.shift
        part.losses, part.loss, part.eval_losses = losses, target.loss.name, evals.found.losses
        part.settled = setting.solver.tol == 0.0 or evals.found.over or settled(losses, setting.solver.tol)


def _calibrate(inputs: GlmInput, setting: Setting, part: LinearPart, positive: Flags) -> None:
    """Give the active party margins of the training rows, with which it calibrates; `positive` are its labels."""
    margins = part.margins(inputs.rows.table)
    if inputs.party.name == setting.active:
        margins = collect_margins(inputs.party, setting.passives, margins)
        part.calibration = fit_calibration(margins, positive.astype(np.float64), inputs.rows.weight)
    else:
        give_margins(inputs.party, setting.active, setting.passives, margins)


def _products(inputs: GlmInput, setting: Setting, own: OwnData) -> Products | RateProducts:
    """Return a party's end of the products that gradients are made with."""
    party = inputs.party
    if setting.family == "poisson":
        return RateProducts(party, setting, inputs.threads)
    seeds = pair_seeds(party, setting.others(party.name))
    masks = CancellingMasks(party.job, party.protocol, party.name, seeds)
    return products_of(inputs, setting, own, blocks_of_rows(setting.n_rows), masks)


class QuadraticGradients:
    """A party's end under a quadratic loss: its slice of the gradient is made of the sum of all parties' margins."""

    def __init__(
        self, setting: Setting, X: Floats, target: Target | None, sums: Products, weight: Floats | None
    ) -> None:
        self._setting, self._X, self._sums, self._rows = setting, X, sums, np.arange(len(X))
        self._weight = np.ones(len(X)) if weight is None else weight
        self._pull = None if target is None else setting.fixed(self._weight * target.hidden)
        self._start: Floats | None = None

    def block(self) -> Floats:
        """Return the own block of the mean Hessian."""
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

    def final_block(self, weights: Floats) -> Floats:
        """Return the own block of the mean Hessian at the optimum."""
        return self.block()

    def times(self, owner: str, vector: Floats | None) -> Floats | None:
        """Multiply with the Hessian's block beside: the own columns with a party's vector, given by its owner."""
        of_rows = np.zeros(len(self._X)) if vector is None else vector
        products = self._sums.times(self._rows, self._setting.fixed(of_rows), counted=False)
        return None if vector is not None else self._setting.mean_over(len(self._X), products)


HiddenGradients = QuadraticGradients | RateGradients


def _minimise(
    inputs: GlmInput,
    setting: Setting,
    hidden: HiddenGradients,
    local: Floats,
    l2: Floats,
    target: Target | None,
    seeds: dict[str, bytes],
    evals: EvalSets,
) -> tuple[Floats, list[float]]:
    """Take steps until the loss is steady; return own weights, in the target's unit, and the losses."""
    party, solver = inputs.party, setting.solver
    masks = CancellingMasks(party.job, f"{party.protocol} whole table", party.name, seeds)
    decider = Decider(party, setting, masks, seeds)
    slice_ = replace(solver, l2=0.0).slice(local.shape[1], intercept=False)  # the penalty is on w, not on z
    schedule, loss = solver.schedule(), _Loss(party, setting, seeds, target)
    before = np.zeros(0)
    inputs.observers.round_finished(0, dict(evals.found.losses))
    while True:
        party.round += 1
        weights = local @ slice_.weights
        grad = hidden.gradient(weights)
        along = local.T @ (grad + l2 * weights)
        s = slice_.candidate()
        v = None if s is None else along - before
        before = along
        slice_.step(decider.decide(slice_.products(along, v), paired=v is not None))
        mean = loss.mean(hidden.own_loss(weights, grad))
        after = local @ slice_.weights
        evals.look(after, seeds)
        if mean is None:
            end = receive_end(inputs, schedule)
        else:
            end = end_epoch(inputs, schedule, mean, evals.found)
        evals.keep(end, after)
        slice_.end_epoch(back=end.back)
        decider.end_epoch(end)
        if end.finished:
            return evals.chosen(local @ slice_.weights), schedule.losses


def _variance(setting: Setting, target: Target | None, losses: list[float]) -> Callable[[int], float] | None:
    """Return the variance that covariances are times, by the residuals' degrees of freedom; None at a passive party.

    DataError where what is left of the loss is no more than it may be wrong by.
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
            "standard errors to tell: leave them out, or lower tol and raise fractional_bits",
            public="columns explain the target to the precision of training: weights have no standard errors",
        )
    return lambda degrees: 2.0 * left * setting.n_rows / degrees


class _Loss:
    """Adds up the parties' parts of the mean loss, at the active party."""

    def __init__(self, party: Party, setting: Setting, seeds: Mapping[str, bytes], target: Target | None) -> None:
        self._party, self._setting, self._target = party, setting, target
        among = {peer: seed for peer, seed in seeds.items() if setting.active not in (peer, party.name)}
        self._masks = CancellingMasks(party.job, f"{party.protocol} loss", party.name, among)

    def mean(self, own: float) -> float | None:
        """Return the mean loss, at the active party alone."""
        party, place = self._party, self._party.round
        if not math.isfinite(own):
            raise diverged("the gradient is not finite")
        if self._target is None:
            part = self._masks.cover(to_fixed(np.array([own])), place, "loss")
            party.send(self._setting.active, LossShare(Array.of(part)))
            return None
        parts = [
            view(party.receive(peer, LossShare).part, np.uint64, (1, 2), peer=peer, what="LossShare.part")
            for peer in self._setting.passives
        ]
        return self._target.start + own + float(from_fixed(total(parts))[0])


def _tell_unit(party: Party, setting: Setting, target: Target | None) -> float:
    """Tell, or learn, what own weights are to be multiplied with."""
    if setting.family != "linear":
        return 1.0
    if target is None:
        return party.receive(setting.active, TargetUnit).unit
    for peer in setting.passives:
        party.send(peer, TargetUnit(target.unit))
    return target.unit


# ---------------------------------------------------------------- coordinator


def coordinate(inputs: GlmInput, setting: Setting) -> None:
    """Coordinate without data: decrypt masked numbers, decide steps, and invert what standard errors need."""
    party = inputs.party
    keyless = setting.cipher == "lattice" or setting.family == "poisson"
    opener = None if keyless else Opener(party, setting, inputs.threads)
    for _ in range(_n_targets(inputs)):
        party.round = 0
        _coordinate_one(inputs, setting, opener)
    if inputs.common.standard_errors:
        open_for_inference(setting, opener)
        invert_for(party, setting)


def _coordinate_one(inputs: GlmInput, setting: Setting, opener: Opener | None) -> None:
    """Decide the steps of one model."""
    party, solver = inputs.party, setting.solver
    decider, schedule = setting.decider(), solver.schedule()
    iteration = 0
    while True:
        party.round += 1
        iteration += 1
        if opener is not None:
            opener.open()
        decide_for(party, setting.owners, decider, decider.expected[solver.memory > 0 and iteration > 1])
        end: EpochEnd = receive_end(inputs, schedule)
        if end.finished:
            return
        decider.end_epoch(end.learning_rate, back=end.back)
        iteration = 0 if end.back else iteration
