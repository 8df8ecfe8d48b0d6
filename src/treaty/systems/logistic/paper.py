"""Quasi-Newton logistic regression as published: for comparison alone, since its coordinator sees nearly everything.

Yang et al. 2019 (arXiv 1912.00513), with the corrected formulas of docs/logistic.md; roles as in `quasi_newton`. One
number per ciphertext, no masks. It starts only with mode="paper" and allow_insecure=True of every party.

Its flaws: the coordinator learns every gradient, v, loss and step, hence all weights, and with the columns' marginals
the class-conditional means. With |S| no more than its columns, or with fresh batches, a passive party solves for
d and reads the labels; this form refuses neither. With the coordinator's help the active party has all u_A, and from
enough of them X_A. The coordinator cannot derive the losses of several passive parties' cross terms from their
ciphertexts; it has w and g, though, and w^T g is the mean of d u, so that <sum of y u> is enough.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from treaty.crypto.additive.ciphers import PrivateKey
from treaty.crypto.payload import to_words
from treaty.crypto.sums.hidden_vectors import Fields, Hider
from treaty.errors import PeerProtocolError
from treaty.linear.lbfgs import Decision, curvature_rows
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.linear.training import Schedule
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.messages import Array, Message, leaks, pack, view
from treaty.messaging.party import Party
from treaty.systems.logistic import coordinated
from treaty.systems.logistic.batches import agree_on_batches
from treaty.systems.logistic.setup import WEIGHT_BITS, GlmInput, OwnData, Setting
from treaty.systems.logistic.steps import Epochs


@leaks(
    "the sender's part of margins under the coordinator's key; with its help they show the sender's columns",
    "encrypted",
)
class Margins(Message):
    """<u> and, of a single passive party, <u^2>, uint64 (batch_size, words)."""

    rows: Array
    squares: Array | None


@leaks("gradients and losses of every batch, so all weights", "aggregated")
class Gradient(Message):
    """<X^T 4 d>, uint64 (n_columns, words), and, of the active party, <loss>."""

    products: Array
    loss: Array | None


@leaks("the step of its own weights, so about its gradient: labels", "aggregated")
class StepPart(Message):
    """The receiver's part of the step, float64 (n_columns,)."""

    step: Array


@leaks("the mean loss of an epoch", "aggregated")
class EpochLoss(Message):
    """The mean loss of an epoch's batches."""

    loss: float


def loss_fields(setting: Setting, plaintext_bits: int) -> Fields:
    """Return how <loss> lies in a plaintext: sums over rows of u^2 - 4 y u, in units of 2^-(2 fractional_bits)."""
    bits = 2 * setting.vector_bits + setting.batch_size.bit_length() + 6
    return Fields.of(bits, plaintext_bits, most=1)


# ---------------------------------------------------------------- data parties


def train_slice(inputs: GlmInput, setting: Setting, own: OwnData) -> tuple[Floats, Schedule]:
    """Train the own weights, as the active or a passive party; return also the schedule, which has the losses."""
    party, lead, columns = inputs.party, setting.coordinator, own.columns
    assert lead is not None
    batches = agree_on_batches(party, setting, inputs.common.random_state, b"", None)
    key = coordinated.read_key(party.receive(lead, coordinated.SharedKey).payload, setting, lead, "SharedKey")
    batch = _Batch(party, setting, Hider(key, key.plaintext_bits - 2, inputs.threads), own)
    # the coordinator adds l2
    slice_ = replace(setting.solver, l2=0.0).slice(columns.shape[1], intercept=False)
    epochs = Epochs(inputs, setting, slice_, None)
    epochs.report()
    X = columns * 2.0**-COLUMN_FRACTION
    while True:
        party.round += 1
        for at, rows in enumerate(batches):
            # steps 1 to 3, and every L iterations 3* and 4*
            batch.gradient(rows, setting.fixed(X[rows] @ slice_.weights))
            s = slice_.candidate()
            if s is not None:
                for of in curvature_rows(batches, at, setting.hessian_batch_size):
                    batch.curvature(of, setting.fixed(X[of] @ s))
            # step 5
            answer = party.receive(lead, StepPart).step
            step = view(answer, np.float64, slice_.weights.shape, peer=lead, what="StepPart.step")
            if not np.all(np.isfinite(step)):
                raise PeerProtocolError(lead, "expected finite numbers", at="StepPart")
            # to the slice, a step of coefficient 1 along one vector
            slice_.products(step, None if s is None else np.zeros_like(step))
            slice_.step(Decision(np.ones(1), keep=False))
        end = epochs.end(None if own.labels is None else party.receive(lead, EpochLoss).loss)
        if end.finished:
            return slice_.weights, epochs.schedule


class _Batch:
    """A data party's part in the products of a batch."""

    def __init__(self, party: Party, setting: Setting, hider: Hider, own: OwnData) -> None:
        self._party, self._setting, self._hider = party, setting, hider
        self._columns, self._labels = own.columns, own.labels
        self._fields = coordinated.sum_fields(setting, hider.plaintext_bits, masked=False)
        self._loss_fields = loss_fields(setting, hider.plaintext_bits)
        self._alone = len(setting.passives) == 1

    def gradient(self, rows: Integers, u: Integers) -> None:
        """Send the coordinator <X^T 4 d> and, as the active party, <loss>."""
        if self._labels is None:
            self._contribute(rows, u, squared=self._alone)
            return
        y = self._labels[rows]
        of_passives, squares = self._collect(len(rows), squared=self._alone)
        d = self._share(of_passives, u - (y << (self._setting.fractional_bits + 1)))
        self._send(rows, d, self._loss(u, y, of_passives, squares))

    def curvature(self, rows: Integers, x_s: Integers) -> None:
        if self._labels is None:
            self._contribute(rows, x_s, squared=False)
            return
        of_passives, _ = self._collect(len(rows), squared=False)
        self._send(rows, self._share(of_passives, x_s), None)

    def _contribute(self, rows: Integers, own: Integers, *, squared: bool) -> None:
        """As a passive party, send the own vector, perhaps with squares; then products with the sum of all."""
        party, setting, squares = self._party, self._setting, None
        if squared:
            words = -(-2 * setting.vector_bits // 64)
            squares = Array.of(self._hider.hide_words(to_words([int(x) ** 2 for x in own], words)))
        party.send(setting.active, Margins(Array.of(self._hider.hide(own, setting.vector_bits)), squares))
        self._send(rows, coordinated.take_vectors(party, [setting.active], len(rows), self._hider), None)

    def _collect(self, n_rows: int, *, squared: bool) -> tuple[coordinated.Words, coordinated.Words | None]:
        """As the active party, add up passive parties' vectors; return also the squares, if there is one such party."""
        received = {peer: self._party.receive(peer, Margins) for peer in self._setting.passives}
        vectors = [
            coordinated.ciphertexts(margins.rows, self._hider, (n_rows,), peer, "Margins.rows")
            for peer, margins in received.items()
        ]
        of_passives = vectors[0] if len(vectors) == 1 else self._hider.multiply(vectors)
        if not squared:
            return of_passives, None
        ((peer, margins),) = received.items()
        if margins.squares is None:
            raise PeerProtocolError(peer, "expected squares", at="Margins")
        return of_passives, coordinated.ciphertexts(margins.squares, self._hider, (n_rows,), peer, "Margins.squares")

    def _share(self, of_passives: coordinated.Words, own: Integers) -> coordinated.Words:
        """Add the own vector, freshly encrypted, and send the sum to all passive parties."""
        whole = self._hider.multiply([of_passives, self._hider.hide(own, self._setting.vector_bits)])
        for peer in self._setting.passives:
            coordinated.send_vector(self._party, peer, whole)
        return whole

    def _send(self, rows: Integers, hidden: coordinated.Words, loss: coordinated.Words | None) -> None:
        """Send <X^T v>, one number per ciphertext, less the offset that v has."""
        setting, half = self._setting, 1 << (self._fields.bits - 1)
        products = self._hider.weigh(hidden, self._columns[rows], WEIGHT_BITS)
        offset = len(setting.owners) << (setting.vector_bits - 1)
        added = [half - offset * of_column for of_column in self._columns[rows].sum(axis=0).tolist()]
        covered = self._hider.cover(products, added, self._fields)
        message = Gradient(Array.of(covered), None if loss is None else Array.of(loss))
        self._party.send(str(setting.coordinator), message)

    def _loss(
        self, u: Integers, y: Integers, of_passives: coordinated.Words, squares: coordinated.Words | None
    ) -> coordinated.Words:
        """Return <sum of u^2 - 4 y u> of all parties' u, or, without squares, <sum of -4 y u> at the same scale."""
        setting, shift = self._setting, self._setting.fractional_bits
        # with u = own + theirs: own^2 - 4 y own, plus (2 own - 4 y) times theirs, plus theirs^2; in Python's integers
        own = u.astype(object)
        signs = -(y << 2).astype(object) << shift
        factors = 2 * own + signs if squares is not None else signs
        constant = int((own * own + signs * own).sum()) if squares is not None else int((signs * own).sum())
        weights = np.array(factors, np.int64)[:, np.newaxis]
        sums = self._hider.weigh(of_passives, weights, setting.vector_bits + 2)
        if squares is not None:
            sums = self._hider.multiply([sums, self._hider.product(squares)])
        offset = len(setting.passives) << (setting.vector_bits - 1)
        added = (1 << (self._loss_fields.bits - 1)) + constant - offset * int(sum(factors))
        return self._hider.cover(sums, [added], self._loss_fields)


# ---------------------------------------------------------------- coordinator


def coordinate(inputs: GlmInput, setting: Setting) -> None:
    """Decrypt gradients, and send all parties their parts of the step."""
    party, key = inputs.party, coordinated.make_key(setting)
    for name in setting.owners:
        party.send(name, coordinated.SharedKey(pack(key.public.to_payload())))
    decider = setting.decider()
    # the intercept comes last
    order = [*setting.passives, setting.active]
    ends = np.cumsum([setting.n_columns[name] for name in order])
    whole = setting.solver.slice(int(ends[-1]), intercept=True)
    epochs = Epochs(inputs, setting, whole, decider)
    while True:
        party.round, losses = party.round + 1, []
        for _ in range(setting.n_batches):
            grad, u2_yu = _opened_gradient(inputs, setting, key, setting.batch_size, with_loss=True)
            if len(setting.passives) == 1:
                losses.append(math.log(2.0) + u2_yu / 8.0)
            else:
                # u^2 = 4 d u + 2 y u, and the mean of d u is w^T g
                losses.append(math.log(2.0) + 0.5 * float(whole.weights @ grad) + u2_yu / 16.0)
            v = None
            if whole.candidate() is not None:
                rows = min(setting.hessian_batch_size, setting.batch_size)
                pieces = range(setting.hessian_pieces)
                found = [_opened_gradient(inputs, setting, key, rows, with_loss=False)[0] for _ in pieces]
                v = np.mean(found, axis=0)
            before = whole.weights
            whole.step(decider.decide(whole.products(grad, v)))
            for name, part in zip(order, np.split(before - whole.weights, ends[:-1]), strict=True):
                party.send(name, StepPart(Array.of(np.ascontiguousarray(part))))
        party.send(setting.active, EpochLoss(float(np.mean(losses))))
        if epochs.end(None).finished:
            return


def _opened_gradient(
    inputs: GlmInput, setting: Setting, key: PrivateKey, n_rows: int, *, with_loss: bool
) -> tuple[Floats, float]:
    """Decrypt the parties' slices of a gradient over so many rows, (n_columns,), and their loss sums' mean."""
    slices, loss, plaintext_bits = [], 0.0, key.public.plaintext_bits
    for name in (*setting.passives, setting.active):
        message, n_columns = inputs.party.receive(name, Gradient), setting.n_columns[name]
        fields, what = coordinated.sum_fields(setting, plaintext_bits, masked=False), "Gradient.products"
        products = coordinated.open_fields(key, message.products, n_columns, fields, inputs.threads, name, what)
        slices.append(setting.mean_over(n_rows, fields.signed(products, [0] * n_columns)))
        if name != setting.active or not with_loss:
            continue
        if message.loss is None:
            raise PeerProtocolError(name, "expected a loss", at="Gradient")
        fields = loss_fields(setting, plaintext_bits)
        hidden = coordinated.open_fields(key, message.loss, 1, fields, inputs.threads, name, "Gradient.loss")
        loss = fields.signed(hidden, [0])[0] / (1 << 2 * setting.fractional_bits) / n_rows
    return np.concatenate(slices), loss
