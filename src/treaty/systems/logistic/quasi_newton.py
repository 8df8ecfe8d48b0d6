"""Logistic regression between parties that hold columns of the same rows, by masked, vector-free quasi-Newton steps.

Yang, Fan, Chen, Shi, Yang, "A Quasi-Newton Method Based Vertical Federated Learning Framework for Logistic
Regression", 2019 (arXiv 1912.00513), corrected and repaired, see docs/logistic.md; on Hardy et al. 2017 (arXiv
1711.10677); L-BFGS on inner products alone after Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NeurIPS 2014.
"sgd" is the same without correction pairs. The protocol as published is in `paper`; other regressions, and those with
standard errors, are trained on the whole table at every step, see `glm`.

Roles: an active party (labels, perhaps columns, and the intercept; FATE's guest), at least one passive party (columns;
FATE's host), and a coordinator without data, or none. Output: each party gets the weights of its own columns alone.

==================  ==========================  ==================================================  ================
message             from -> to                  content                                             protection
==================  ==========================  ==================================================  ================
set-up              see `setup`, `batches`, `resuming` and `row_weights`
products            `coordinated`, `products`, `lattice`: of each batch every party gets its own
                    slice of the gradient, in every L-th its slice of the curvature v
step                see `steps`: inner products of s, v and g to the coordinator, coefficients back
loss                by the products             the epoch's mean loss, to the active party alone    masks
`EpochEnd`          active party -> all         learning rate, whether training is over             TLS
`MarginPart`        passive -> active party     with `calibrate`, its parts of the training rows'   masks that cancel
                                                margins, once at the end, see `prediction`
==================  ==========================  ==================================================  ================

**Without a coordinator** the active party takes its place for the inner products, not for the products with columns: it
learns the passive parties' parts of them, of several passive parties only the sum. With one, it learns nearly as much
from the coefficients, which are functions of the sums. d is never revealed to anybody.

Adversary: honest but curious. Coordinator and active party must not collude, nor may one organisation be both. What
each party learns is in `disclosures`.
"""

from __future__ import annotations

import math

import numpy as np

from treaty.crypto.keystream import CancellingMasks
from treaty.errors import DataError
from treaty.linear.lbfgs import EpochState
from treaty.linear.preparation import COLUMN_FRACTION, fit_calibration
from treaty.linear.training import settled
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.conversation import agree
from treaty.models.linear import LinearPart
from treaty.systems.logistic import paper, whole_table
from treaty.systems.logistic.batches import agree_on_batches, check_shown, rows_digest_of, tell_lone_rows, tell_weights
from treaty.systems.logistic.coordinated import Opener
from treaty.systems.logistic.prediction import collect_margins, give_margins
from treaty.systems.logistic.products import blocks_of
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
    Checkpoints,
    Decider,
    EvalSets,
    decide_for,
    end_epoch,
    products_of,
    receive_end,
    restore,
)

# ---------------------------------------------------------------- data parties


def active(inputs: GlmInput) -> LinearPart:
    """Train as the label holder.

    The inputs is connected with all other parties; its `data` has labels 0 and 1 (or the target of another regression),
    and perhaps no column. Returns own weights, intercept and losses.

    Raises ConfigError or DataError when options or tables do not fit, rows have weights that parties do not agree to
    show, or labels are not of two classes; PeerError or CryptoError when a party is lost or sends what the protocol
    does not allow.
    """
    data, table, name = inputs.rows, inputs.rows.table, inputs.party.name
    if inputs.eval_sets:
        inputs.common.check_eval_sets(inputs.options)
    whole = inputs.common.on(table.n_rows).whole_table
    if whole:
        Checkpoints(inputs)  # it would be deleted in the end: one of an interrupted training by batches is refused
    if inputs.common.family != "logistic":
        return whole_table.train(inputs)
    n_classes = len(inputs.classes or ())
    if n_classes == 2:
        n_classes = len(np.unique(data.y))
    if n_classes != 2:
        raise DataError(f"{name}: expected labels of two classes, got {n_classes} in {table.n_rows} rows")
    if data.weight is not None:
        check_shown(inputs, data.y, data.weight)
    if whole:
        return whole_table.train(inputs)
    return _train(inputs, np.where(data.y > 0.5, 1, -1).astype(np.int64))


def passive(inputs: GlmInput) -> LinearPart:
    """Train as a party with columns alone, connected with all others; return its weights. Errors as of `active`."""
    if inputs.eval_sets:
        inputs.common.check_eval_sets(inputs.options)
    whole = inputs.common.on(inputs.rows.table.n_rows).whole_table
    return whole_table.train(inputs) if whole else _train(inputs, None)


def _train(inputs: GlmInput, labels: Integers | None) -> LinearPart:
    """Prepare own columns, train their weights in either mode, and make them a part of the model."""
    party, table = inputs.party, inputs.rows.table
    preparation = prepared(table, inputs.common, party.name)
    matrix = preparation.matrix(table.columns, table.n_rows)
    if labels is not None:
        matrix = np.hstack([matrix, np.ones((table.n_rows, 1))])
    weight = inputs.rows.weight
    own = OwnData(fixed_columns(matrix), labels, None if weight is None else weight / weight.mean())
    agree(party, terms(inputs))
    kept = Checkpoints(inputs)
    setting = begin(inputs, own.columns.shape, kept.model_id)
    resumed = kept.resume(party, setting)
    alone: dict[str, int] = {}
    evals = EvalSets.of(inputs, setting, preparation)
    if inputs.options.mode == "paper":
        weights, losses = paper.train_slice(inputs, setting, own)
    else:
        digest = inputs.rows.digest or rows_digest_of(setting.n_rows, own.labels)
        batches = agree_on_batches(party, setting, inputs.common.random_state, digest, inputs.store)
        own = tell_weights(party, setting, own, batches)
        alone = tell_lone_rows(party, setting, own, batches)
        weights, losses = _train_slice(inputs, setting, own, batches, evals, kept, resumed)
    part = LinearPart(
        model_id=setting.model_id,
        party=party.name,
        schema=table.schema,
        preparation=preparation,
        coef=weights,
        encryption=setting.cipher,
        alone=alone,
        batch_size=setting.batch_size,
    )
    if labels is not None:
        part.coef, part.intercept = weights[:-1], float(weights[-1])
        part.classes, part.losses, part.eval_losses = inputs.classes, losses, evals.found.losses
        part.settled = setting.solver.tol == 0.0 or evals.found.over or settled(losses, setting.solver.tol)
    if inputs.common.calibrate and labels is None:
        give_margins(party, setting.active, setting.passives, part.margins(table))
    elif inputs.common.calibrate:
        margins = collect_margins(party, setting.passives, part.margins(table))
        part.calibration = fit_calibration(margins, inputs.rows.y, weight)
    return part


def _train_slice(
    inputs: GlmInput, setting: Setting, own: OwnData, batches: Integers, evals: EvalSets, kept: Checkpoints,
    resumed: EpochState | None,
) -> tuple[Floats, list[float]]:  # fmt: skip
    """Train the own weights (n_columns,), as the active or a passive party; return also the losses, at the former.

    Training continues from the state `resumed`, if there is one; `evals` then has the losses of eval sets.
    """
    party, columns, labels = inputs.party, own.columns, own.labels
    seeds = pair_seeds(party, setting.others(party.name))
    masks = CancellingMasks(party.job, party.protocol, party.name, seeds)
    sums = products_of(inputs, setting, own, blocks_of(batches), masks)  # step 0 of the paper: keys
    decider = Decider(party, setting, masks, seeds)
    slice_ = setting.solver.slice(columns.shape[1], intercept=labels is not None)
    schedule = setting.solver.schedule()
    restore(resumed, schedule, slice_, decider, evals)
    inputs.observers.round_finished(party.round, {"train": schedule.losses, **evals.found.losses})
    X = columns * 2.0**-COLUMN_FRACTION
    pull = own.pull_of_labels(setting)
    mean_weight = 1.0 if own.weight is None else float(own.weight[batches].mean())
    while True:
        party.round += 1
        epoch_loss = 0
        for at, rows in enumerate(batches):
            # [Alg. 1, step 1] the own part u of every row's margin, times the row's weight, in fixed point
            u = setting.fixed(own.weighed(rows, X[rows] @ slice_.weights))
            # [Alg. 1, step 2] 4 d = u_A + u_B - 2 y is the sum of parts that never leave their owners
            d = u if pull is None else u - pull[rows]
            # [Alg. 1, step 3] g = mean of d x: the own slice of it, from products with hidden parts
            grad = setting.mean_over(len(rows), sums.times(rows, d, counted=True))
            s, v = slice_.candidate(), None
            if s is not None:
                # [Alg. 1, step 4] every L iterations v = mean of x (x^T s) / 4, the Hessian's product (3*, 4*)
                pieces = setting.curvature_rows(batches, at)
                products = [sums.times(of, setting.fixed(own.weighed(of, X[of] @ s)), counted=False) for of in pieces]
                v = setting.mean_over(sum(map(len, pieces)), [sum(of) for of in zip(*products, strict=True)])
            # loss = log 2 + mean(d u) / 2 - mean(y u) / 4, where the mean of d u is w^T g; all weighted
            epoch_loss += _loss_part(setting, slice_.weights, grad, u, None if labels is None else labels[rows])
            # [Alg. 1, step 5] coefficients of the step in s, v and g, from summed inner products; each its own slice
            slice_.step(decider.decide(slice_.products(grad, v), paired=v is not None))
        summed = sums.loss(epoch_loss)
        evals.look(slice_.weights, seeds)
        if summed is None:
            end = receive_end(inputs, schedule)
        else:
            mean = summed / (1 << (setting.fractional_bits + 2)) / batches.size
            end = end_epoch(inputs, schedule, math.log(2.0) * mean_weight + mean, evals.found)
        evals.keep(end, slice_.weights)
        slice_.end_epoch(back=end.back)
        decider.end_epoch(end)
        if end.finished:
            return evals.chosen(slice_.weights), schedule.losses
        kept.keep(
            EpochState(
                epochs=party.round, learning_rate=schedule.learning_rate, slice=slice_.state(),
                coordinator=decider.state(), losses=list(schedule.losses), level=schedule.level,
                eval_losses={name: list(losses) for name, losses in evals.found.losses.items()}, best=evals.best,
            )
        )  # fmt: skip


def _loss_part(setting: Setting, weights: Floats, grad: Floats, u: Integers, labels: Integers | None) -> int:
    """Return the own part of a batch's sum of 2 d u - y u, in units of 2^-fractional_bits; y u at the active party."""
    d_u = 2.0 * setting.batch_size * float(weights @ grad)
    if not math.isfinite(d_u):
        raise diverged("the gradient is not finite")
    return round(d_u * 2.0**setting.fractional_bits) - (0 if labels is None else int(labels @ u))


# ---------------------------------------------------------------- coordinator


def coordinator(inputs: GlmInput) -> None:
    """Coordinate a training without data: receive masked numbers and summed inner products, answer with coefficients.

    Connected with all data parties; errors as of `active`.
    """
    party = inputs.party
    agree(party, terms(inputs))
    kept = Checkpoints(inputs)
    setting = begin(inputs, None, None)
    resumed = kept.resume(party, setting)
    if inputs.options.mode == "paper":
        paper.coordinate(inputs, setting)
        return
    if setting.whole:
        whole_table.coordinate(inputs, setting)
        return
    solver = setting.solver
    opener = None if setting.cipher == "lattice" else Opener(party, setting, inputs.threads)
    decider, schedule = setting.decider(), solver.schedule()
    restore(resumed, schedule, decider)
    iteration = 0 if resumed is None else resumed.iterations
    while True:
        party.round += 1
        for _ in range(setting.n_batches):
            iteration += 1
            makes_pair = solver.memory > 0 and iteration % solver.period == 0 and iteration >= 2 * solver.period
            if opener is not None:
                for _ in range(1 + makes_pair * setting.hessian_pieces):
                    opener.open()
            decide_for(party, setting.owners, decider, decider.expected[makes_pair])
        if opener is not None:
            opener.loss()
        end = receive_end(inputs, schedule)
        if end.finished:
            return
        decider.end_epoch(end.learning_rate, back=end.back)
        iteration = 0 if end.back else iteration
        kept.keep(
            EpochState(
                epochs=party.round, iterations=iteration, learning_rate=schedule.learning_rate,
                coordinator=decider.state(),
            )
        )  # fmt: skip
