"""Logistic regression between parties that hold columns of the same rows, by masked, vector-free quasi-Newton steps.

Yang, Fan, Chen, Shi, Yang, "A Quasi-Newton Method Based Vertical Federated Learning Framework for Logistic
Regression", 2019 (arXiv 1912.00513), corrected and repaired, see docs/logistic.md; on Hardy et al. 2017 (arXiv
1711.10677); L-BFGS on inner products alone after Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NeurIPS 2014.
"sgd" is the same without correction pairs. The protocol as published is in `paper`.

Roles: an active party (labels, perhaps columns, and the intercept; FATE's guest), at least one passive party (columns;
FATE's host), and a coordinator without data, or none. Output: each party gets the weights of its own columns alone.

==================  ==========================  ==================================================  ================
message             from -> to                  content                                             protection
==================  ==========================  ==================================================  ================
set-up              see `setup` and `batches`
products            `coordinated`, `two_party`, `lattice`: of each batch every party gets its own
                    slice of the gradient, in every L-th its slice of the curvature v
`InnerProducts`     data party -> coordinator   its parts of the inner products of s, v and g       masks that cancel
`StepCoefficients`  coordinator -> data party   the 2 M + 1 coefficients of the step                TLS
loss                by the products             the epoch's mean loss, to the active party alone    masks
`EpochEnd`          active party -> all         learning rate, whether training is over             TLS
==================  ==========================  ==================================================  ================

**Without a coordinator** the active party takes its place for the inner products, not for the products with columns: it
learns the passive parties' parts of them, of several passive parties only the sum. With one, it learns nearly as much
from the coefficients, which are functions of the sums. d is never revealed to anybody.

Adversary: honest but curious. Coordinator and active party must not collude, nor may one organisation be both. What
each party learns is in `disclosures`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from treaty.compute import Floats, Integers
from treaty.crypto.vectors.cancelling_masks import FRACTION_BITS, CancellingMasks, from_fixed, to_fixed, total
from treaty.errors import ConfigError, CryptoError, DataError, PeerProtocolError
from treaty.linear.lbfgs import Coordinator, Decision
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models.linear import LinearPart, preparation_of
from treaty.systems.logistic import paper
from treaty.systems.logistic.batches import agree_on_batches, rows_digest_of, tell_lone_rows
from treaty.systems.logistic.coordinated import CoordinatedProducts, Opener
from treaty.systems.logistic.epochs import EpochEnd, end_epoch, receive_end
from treaty.systems.logistic.lattice import LatticeProducts
from treaty.systems.logistic.setup import OwnData, Setting, begin, diverged, pair_seeds, terms
from treaty.systems.logistic.two_party import OwnKeyProducts
from treaty.systems.system import Seat


class InnerProducts(Message):
    """Parts of inner products modulo 2^128, uint64 (n, 2). Tell nothing but their sum over all who mask them."""

    values: Array


class StepCoefficients(Message):
    """Coefficients float64 (2 m + 1,) of the step in s_1 ... s_m, v_1 ... v_m, g; whether the candidate pair is kept.

    Tells what they are a function of: nearly the summed inner products.
    """

    coefficients: Array
    keep: bool


# ---------------------------------------------------------------- data parties


def active(seat: Seat) -> LinearPart:
    """Train as the label holder.

    The seat is connected with all other parties; its `data` has labels 0 and 1, and perhaps no column. Returns own
    weights, intercept and losses.

    Raises ConfigError or DataError when options or tables do not fit, rows have weights (which encrypted systems lack),
    or labels are not of two classes; PeerError or CryptoError when a party is lost or sends what the protocol does not
    allow.
    """
    data, table, name = seat.rows, seat.rows.table, seat.party.name
    if data.weight is not None:
        raise ConfigError("encrypted logistic regression has no weights of rows: expected sample_weight=None")
    n_classes = len(seat.classes or ())
    if n_classes == 2:
        n_classes = len(np.unique(data.y))
    if n_classes != 2:
        raise DataError(f"{name}: expected labels of two classes, got {n_classes} in {table.n_rows} rows")
    return _train(seat, np.where(data.y > 0.5, 1, -1).astype(np.int64))


def passive(seat: Seat) -> LinearPart:
    """Train as a party with columns alone, connected with all others; return its weights. Errors as of `active`."""
    return _train(seat, None)


def fixed_columns(matrix: Floats) -> Integers:
    """Round prepared columns to the grid that all arithmetic is on."""
    return np.rint(matrix * 2.0**COLUMN_FRACTION).astype(np.int64)


def _train(seat: Seat, labels: Integers | None) -> LinearPart:
    """Prepare own columns, train their weights in either mode, and make them a part of the model."""
    party, table = seat.party, seat.rows.table
    preparation = preparation_of(table)
    matrix = preparation.matrix(table.columns, table.n_rows)
    names = preparation.names(table.schema.names, table.schema.categories)
    if labels is not None:
        matrix, names = np.hstack([matrix, np.ones((table.n_rows, 1))]), [*names, "intercept"]
    own = OwnData(fixed_columns(matrix), labels, names)
    agree(party, terms(seat))
    setting = begin(seat, own.columns.shape)
    alone: dict[str, int] = {}
    if seat.options.mode == "paper":
        weights, losses = paper.train_slice(seat, setting, own)
    else:
        digest = seat.rows_digest or rows_digest_of(setting.n_rows, own.labels)
        batches = agree_on_batches(party, setting, seat.common.random_state, digest, seat.store)
        alone = tell_lone_rows(party, setting, own.columns, batches)
        weights, losses = _train_slice(seat, setting, own, batches)
    part = LinearPart(
        model_id=setting.model_id,
        party=party.name,
        schema=table.schema,
        preparation=preparation,
        coef=weights,
        encryption=setting.cipher,
        alone=alone,
    )
    if labels is not None:
        part.coef, part.intercept = weights[:-1], float(weights[-1])
        part.classes, part.losses = seat.classes, losses
    return part


def _train_slice(seat: Seat, setting: Setting, own: OwnData, batches: Integers) -> tuple[Floats, list[float]]:
    """Train the own weights (n_columns,), as the active or a passive party; return also the losses, at the former."""
    party, columns, labels = seat.party, own.columns, own.labels
    seeds = pair_seeds(party, setting.others(party.name))
    masks = CancellingMasks(party.job, party.protocol, party.name, seeds)
    sums: LatticeProducts | CoordinatedProducts | OwnKeyProducts
    at_end = ExitStack()
    if setting.cipher == "lattice":
        sums = LatticeProducts(seat, setting, own, batches, masks)
        at_end.callback(sums.close)
    elif setting.coordinator is not None:
        sums = CoordinatedProducts(party, setting, own, masks, seat.threads)
    else:
        sums = OwnKeyProducts(party, setting, own, masks, seat.threads)
    decider = _Decider(party, setting, masks, seeds)
    slice_ = setting.solver.slice(columns.shape[1], intercept=labels is not None)
    schedule = setting.solver.schedule()
    X = columns * 2.0**-COLUMN_FRACTION
    if seat.progress is not None:
        seat.progress(0, [])
    with at_end:
        while True:
            party.round += 1
            epoch_loss = 0
            for rows in batches:
                # 4 d = u - 2 y: every party's part of it, in fixed point
                u = setting.fixed(X[rows] @ slice_.weights)
                d = u if labels is None else u - (labels[rows] << (setting.fractional_bits + 1))
                grad = setting.mean_over_batch(sums.times(rows, d, counted=True))
                s = slice_.candidate()
                v = None
                if s is not None:  # the Hessian's product: v = mean of x (x^T s) / 4, on the same batch
                    v = setting.mean_over_batch(sums.times(rows, setting.fixed(X[rows] @ s), counted=False))
                # loss = log 2 + mean(d u) / 2 - mean(y u) / 4, where the mean of d u is w^T g
                epoch_loss += _loss_part(setting, slice_.weights, grad, u, None if labels is None else labels[rows])
                slice_.step(decider.decide(slice_.products(grad, v), paired=v is not None))
            summed = sums.loss(epoch_loss)
            if summed is None:
                end = receive_end(party, setting.active, schedule)
            else:
                mean = summed / (1 << (setting.fractional_bits + 2)) / batches.size
                end = end_epoch(party, schedule, math.log(2.0) + mean, seat.progress)
            slice_.end_epoch(back=end.back)
            decider.end_epoch(end)
            if end.finished:
                return slice_.weights, schedule.losses


def _loss_part(setting: Setting, weights: Floats, grad: Floats, u: Integers, labels: Integers | None) -> int:
    """Return the own part of a batch's sum of 2 d u - y u, in units of 2^-fractional_bits; y u at the active party."""
    d_u = 2.0 * setting.batch_size * float(weights @ grad)
    if not math.isfinite(d_u):
        raise diverged("the gradient is not finite")
    return round(d_u * 2.0**setting.fractional_bits) - (0 if labels is None else int(labels @ u))


class _Decider:
    """Asks the coordinator for each step's coefficients; without one, the active party computes them for all."""

    def __init__(self, party: Party, setting: Setting, masks: CancellingMasks, seeds: dict[str, bytes]) -> None:
        self._party, self._setting = party, setting
        self._lead = setting.coordinator or setting.active
        self._place = 0
        self._coordinator: Coordinator | None = None
        self._masks = masks
        if self._lead == party.name:
            self._coordinator = setting.solver.coordinator()
        elif self._lead == setting.active:  # the party that gets the sum adds no masks
            among = {peer: seed for peer, seed in seeds.items() if peer != setting.active}
            self._masks = CancellingMasks(party.job, f"{party.protocol} passive parties", party.name, among)

    def end_epoch(self, end: EpochEnd) -> None:
        """Tell the coordinator, if it is here, how training goes on."""
        if self._coordinator is not None:
            self._coordinator.end_epoch(end.learning_rate, back=end.back)

    def decide(self, products: Floats, *, paired: bool) -> Decision:
        """Return the decision on all parties' summed products; `paired`: a candidate pair is among the vectors."""
        self._place += 1
        numbers = _checked_fixed(products)
        if self._coordinator is not None:
            return decide_for(self._party, self._setting.passives, self._coordinator, len(products), own=numbers)
        covered = self._masks.cover(numbers, self._place, "products")
        self._party.send(self._lead, InnerProducts(Array.of(covered)))
        answer = self._party.receive(self._lead, StepCoefficients)
        # of the 2 m + 1 vectors that (2 m + 1) (2 m + 2) / 2 products are of, less the candidate's two
        size = (math.isqrt(8 * len(products) + 1) - 1) // 2 - 2 * paired
        what = "StepCoefficients.coefficients"
        coefficients = view(answer.coefficients, np.float64, (size,), peer=self._lead, what=what)
        if not np.all(np.isfinite(coefficients)):
            raise PeerProtocolError(self._lead, f"expected finite coefficients - at StepCoefficients from {self._lead}")
        return Decision(coefficients, answer.keep)


def _checked_fixed(products: Floats) -> list[int]:
    try:
        return to_fixed(products)
    except CryptoError:
        raise diverged("inner products of steps are too large") from None


# ---------------------------------------------------------------- coordinator


def coordinator(seat: Seat) -> None:
    """Coordinate a training without data: receive masked numbers and summed inner products, answer with coefficients.

    Connected with all data parties; errors as of `active`.
    """
    party = seat.party
    agree(party, terms(seat))
    setting = begin(seat, None)
    if seat.options.mode == "paper":
        paper.coordinate(party, setting, seat.threads)
        return
    solver = setting.solver
    opener = None if setting.cipher == "lattice" else Opener(party, setting, seat.threads)
    decider, schedule = solver.coordinator(), solver.schedule()
    iteration = 0
    while True:
        party.round += 1
        for _ in range(setting.n_batches):
            iteration += 1
            makes_pair = solver.memory > 0 and iteration % solver.period == 0 and iteration >= 2 * solver.period
            if opener is not None:
                opener.open()
                if makes_pair:
                    opener.open()
            decide_for(party, setting.owners, decider, decider.expected[makes_pair])
        if opener is not None:
            opener.loss()
        end = receive_end(party, setting.active, schedule)
        if end.finished:
            return
        decider.end_epoch(end.learning_rate, back=end.back)
        iteration = 0 if end.back else iteration


def decide_for(
    party: Party, givers: Sequence[str], decider: Coordinator, expected: int, own: list[int] | None = None
) -> Decision:
    """Sum the `givers`' inner products, `expected` of each, and the own ones if any; decide, and tell the givers."""
    parts = []
    for name in givers:
        values = party.receive(name, InnerProducts).values
        parts.append(view(values, np.uint64, (expected, 2), peer=name, what="InnerProducts.values"))
    summed = total(parts)
    if own is not None:
        summed = [a + b for a, b in zip(summed, own, strict=True)]
    products = from_fixed(summed)
    _check_products(products, len(givers) + 1)
    decision = decider.decide(products)
    for name in givers:
        party.send(name, StepCoefficients(Array.of(decision.coefficients), decision.keep))
    return decision


def _check_products(products: Floats, parts: int) -> None:
    """Refuse a Gram matrix that violates Cauchy-Schwarz, beyond the rounding of its `parts` summands.

    Masks hide whatever a party sends; only the sum shows that a contribution was malformed.
    """
    size = (math.isqrt(8 * len(products) + 1) - 1) // 2
    gram = np.zeros((size, size))
    gram[np.triu_indices(size)] = products
    rounding = parts * 2.0**-FRACTION_BITS
    squares = np.diag(gram) + rounding
    if np.any(squares < 0.0) or np.any(np.abs(gram) > np.sqrt(np.outer(squares, squares)) * (1 + 1e-9) + rounding):
        raise CryptoError("the Gram matrix of summed inner products violates Cauchy-Schwarz: malformed contribution")
