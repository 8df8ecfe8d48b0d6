"""Regressions between parties that hold columns of the same rows, by masked, vector-free quasi-Newton steps.

Yang, Fan, Chen, Shi, Yang, "A Quasi-Newton Method Based Vertical Federated Learning Framework for Logistic
Regression", 2019 (arXiv 1912.00513), corrected and repaired, see docs/logistic.md; on Hardy et al. 2017 (arXiv
1711.10677); L-BFGS on inner products alone after Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NeurIPS 2014.
"sgd" is the same without correction pairs. The protocol as published is in `paper`; other regressions, and those with
standard errors, take every step on the whole table (`whole_table`).

Roles: an active party (labels, perhaps columns, and the intercept; FATE's guest), at least one passive party (columns;
FATE's host), and a coordinator without data, or none. Output: each party gets the weights of its own columns alone.

**Without a coordinator** the active party takes its place for the inner products, not for the products with columns: it
learns the passive parties' parts of them, of several passive parties only the sum. With one, it learns nearly as much
from the coefficients, which are functions of the sums. The residuals d are revealed to no party.

Adversary: honest but curious. Coordinator and active party must not collude, nor may one organisation be both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from treaty.crypto.keystream import CancellingMasks
from treaty.errors import DataError
from treaty.linear.lbfgs import curvature_rows
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.linear.training import Schedule
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.exchanges import agree
from treaty.models.linear import LinearPart
from treaty.systems.logistic import paper, setup, whole_table
from treaty.systems.logistic.batches import (
    agree_on_batches,
    check_shown,
    count_lone_rows,
    rows_digest_of,
    share_weights,
)
from treaty.systems.logistic.coordinated import Opener
from treaty.systems.logistic.inference import invert_blocks
from treaty.systems.logistic.prediction import calibrate
from treaty.systems.logistic.steps import Checkpoints, Decider, Epochs, products_of

# ---------------------------------------------------------------- data parties


def active(inputs: setup.GlmInput) -> LinearPart:
    """Train as the label holder.

    The input is connected with all other parties; its rows have labels 0 and 1 (or the target of another regression),
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
        # refuse a checkpoint of an interrupted training by batches: it would be deleted in the end
        Checkpoints(inputs)
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


def passive(inputs: setup.GlmInput) -> LinearPart:
    """Train as a party with columns alone, connected with all others; return its weights. Errors as of `active`."""
    if inputs.eval_sets:
        inputs.common.check_eval_sets(inputs.options)
    whole = inputs.common.on(inputs.rows.table.n_rows).whole_table
    return whole_table.train(inputs) if whole else _train(inputs, None)


def _train(inputs: setup.GlmInput, labels: Integers | None) -> LinearPart:
    """Prepare own columns, train their weights in either mode, and make them a part of the model."""
    party, table = inputs.party, inputs.rows.table
    preparation, own = setup.own_data(inputs, labels)
    agree(party, setup.terms(inputs))
    kept = Checkpoints(inputs)
    setting = setup.begin(inputs, own.columns.shape, kept.model_id)
    kept.resume(setting)
    alone: dict[str, int] = {}
    if inputs.options.mode == "paper":
        weights, schedule = paper.train_slice(inputs, setting, own)
    else:
        digest = inputs.rows.digest or rows_digest_of(setting.n_rows, labels)
        batches = agree_on_batches(party, setting, inputs.common.random_state, digest, inputs.store)
        own = share_weights(party, setting, own, batches)
        alone = count_lone_rows(party, setting, own, batches)
        weights, schedule = _train_slice(inputs, setting, own, batches, kept, setup.eval_data(inputs, preparation))
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
        part.coef, part.intercept, part.classes = weights[:-1], float(weights[-1]), inputs.classes
        part.losses, part.eval_losses, part.settled = schedule.losses, schedule.eval_losses, schedule.settled
    if inputs.common.calibrate:
        calibrate(inputs, part, inputs.rows.y > 0.5)
    return part


def _train_slice(
    inputs: setup.GlmInput, setting: setup.Setting, own: setup.OwnData, batches: Integers, kept: Checkpoints,
    evals: Mapping[str, tuple[Floats, Floats]],
) -> tuple[Floats, Schedule]:  # fmt: skip
    """Train the own weights (n_columns,), as the active or a passive party, perhaps from a kept state; eval sets watch.

    Returns the schedule as well, which at the active party has the losses.
    """
    party, columns, labels = inputs.party, own.columns, own.labels
    seeds = setup.pair_seeds(party, setting.others(party.name))
    masks = CancellingMasks(party.job, party.protocol, party.name, seeds)
    # step 0 of the paper: keys
    sums = products_of(inputs, setting, own, masks, batches)
    decider = Decider(party, setting, masks, seeds)
    slice_ = setting.solver.slice(columns.shape[1], intercept=labels is not None)
    epochs = Epochs(inputs, setting, slice_, decider.coordinator, evals)
    kept.restore(epochs)
    epochs.report()
    X = columns * 2.0**-COLUMN_FRACTION
    # 2 y of every row, times its weight
    pull = None
    if labels is not None:
        pull = setting.fixed(own.weighed(np.arange(setting.n_rows), 2.0 * labels.astype(np.float64)))
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
                pieces = curvature_rows(batches, at, setting.hessian_batch_size)
                products = [sums.times(of, setting.fixed(own.weighed(of, X[of] @ s)), counted=False) for of in pieces]
                v = setting.mean_over(sum(map(len, pieces)), [sum(of) for of in zip(*products, strict=True)])
            # loss = log 2 + mean(d u) / 2 - mean(y u) / 4, where the mean of d u is w^T g, all weighted: the own part
            # of the sum of 2 d u - y u, in units of 2^-fractional_bits
            d_u = 2.0 * setting.batch_size * float(slice_.weights @ grad)
            if not math.isfinite(d_u):
                raise setup.diverged("the gradient is not finite")
            epoch_loss += round(d_u * 2.0**setting.fractional_bits) - (0 if labels is None else int(labels[rows] @ u))
            # [Alg. 1, step 5] coefficients of the step in s, v and g, from summed inner products; each its own slice
            slice_.step(decider.decide(slice_.products(grad, v), paired=v is not None))
        summed, loss = sums.loss(epoch_loss), None
        if summed is not None:
            loss = math.log(2.0) * mean_weight + summed / (1 << (setting.fractional_bits + 2)) / batches.size
        end = epochs.end(loss, slice_.weights, seeds)
        if end.finished:
            return slice_.weights if epochs.best is None else epochs.best, epochs.schedule
        kept.keep(epochs)


# ---------------------------------------------------------------- coordinator


def coordinator(inputs: setup.GlmInput) -> None:
    """Coordinate a training without data: receive masked numbers and summed inner products, answer with coefficients.

    Connected with all data parties; errors as of `active`.
    """
    agree(inputs.party, setup.terms(inputs))
    kept = Checkpoints(inputs)
    if inputs.common.pdo is not None:
        # the coordinator's part in `scorecard.on_bins`: it opens the masked counts, where it has the key
        setting = setup.begin(inputs, None, None)
        if setting.cipher != "lattice":
            Opener(inputs.party, setting, inputs.threads).open()
    setting = setup.begin(inputs, None, None)
    kept.resume(setting)
    if inputs.options.mode == "paper":
        paper.coordinate(inputs, setting)
        return
    keyless = setting.cipher == "lattice" or setting.family == "poisson"
    opener = None if keyless else Opener(inputs.party, setting, inputs.threads)
    for number in range(whole_table.n_models(inputs)):
        if number:
            inputs.party.round = 0
        _coordinate_model(inputs, setting, opener, kept)
    if inputs.common.standard_errors:
        invert_blocks(inputs.party, setting, opener)


def _coordinate_model(inputs: setup.GlmInput, setting: setup.Setting, opener: Opener | None, kept: Checkpoints) -> None:
    """Decide the steps of one model, and decrypt masked products where the coordinator has a key."""
    party, solver = inputs.party, setting.solver
    decider = Decider(party, setting)
    epochs = Epochs(inputs, setting, None, decider.coordinator)
    step = kept.restore(epochs)
    while True:
        party.round += 1
        for _ in range(setting.n_batches):
            step += 1
            makes_pair = solver.memory > 0 and step % solver.period == 0 and step >= 2 * solver.period
            if opener is not None:
                # on the whole table a pair is made of two gradients, without a product of its own
                for _ in range(1 + (makes_pair and not setting.whole) * setting.hessian_pieces):
                    opener.open()
            decider.decide(None, paired=makes_pair)
        if opener is not None and not setting.whole:
            opener.loss()
        end = epochs.end(None)
        if end.finished:
            return
        step = 0 if end.back else step
        kept.keep(epochs, step)
