"""Quasi-Newton logistic regression as published: for comparison alone, since its coordinator sees nearly everything.

Yang et al. 2019 (arXiv 1912.00513), with the corrected formulas of docs/logistic.md; roles as in `quasi_newton`. One
number per ciphertext, no masks. It starts only with mode="paper" and allow_insecure=True of every party.

====  ================  =======================  =====================================================================
step  message           from -> to               content
====  ================  =======================  =====================================================================
0     `SharedKey`       coordinator -> all       public key
1     `Margins`         host -> guest            <u_A>, <u_A^2> of the batch (of several hosts <u> alone)
2     `Vector`          guest -> host            <4 d>, re-randomised
3     `Gradient`        all -> coordinator       <X^T 4 d>; the guest also <loss>
3*    `Margins`,        host -> guest,           every L iterations: <X s>, and back <4 h>
      `Vector`          guest -> host
4*    `Gradient`        all -> coordinator       <v>
5     `StepPart`        coordinator -> all       each party's part of the step
--    `EpochLoss`       coordinator -> guest     an epoch's mean loss
--    `EpochEnd`        guest -> all             learning rate, whether training is over
====  ================  =======================  =====================================================================

What is wrong with it: the coordinator learns every gradient, v, loss and step, hence all weights, and with the columns'
marginals the class-conditional means. With |S| no more than its columns, or with batches drawn afresh, a host solves
for d and reads the labels; this form refuses neither. With the coordinator the guest has all u_A, and from enough of
them X_A. The coordinator cannot tell the losses of several hosts' cross terms from their ciphertexts; it has w and g,
though, and w^T g is the mean of d u, so that <sum of y u> is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.montgomery import to_words
from treaty.crypto.vectors.encrypted_vectors import Fields, Hider, opened
from treaty.errors import PeerProtocolError
from treaty.linear.lbfgs import Coordinator, Decision, Slice
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.linear.training import Schedule
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.systems.linear_options import LinearOptions
from treaty.systems.logistic.batches import agree_on_batches
from treaty.systems.logistic.coordinated import (
    SharedKey,
    Vector,
    ciphertexts,
    make_key,
    read_key,
    sum_fields,
)
from treaty.systems.logistic.epochs import end_epoch, receive_end
from treaty.systems.logistic.setup import WEIGHT_BITS, Setting
from treaty.systems.vertical.encrypted_columns import pack

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
Epochs = Callable[[list[float]], None]


class Margins(Message):
    """<u> and perhaps <u^2>, uint64 (batch_size, words). With the coordinator's help they tell u, and X in time."""

    rows: Array
    squares: Array | None


class Gradient(Message):
    """<X^T 4 d>, uint64 (n_columns, words), and perhaps <loss>. Tell the coordinator gradients and losses."""

    products: Array
    loss: Array | None


class StepPart(Message):
    """The receiver's part of the step, float64 (n_columns,). Tells the step of its own weights."""

    step: Array


class EpochLoss(Message):
    """The mean loss of an epoch's batches."""

    loss: float


def loss_fields(setting: Setting, plaintext_bits: int) -> Fields:
    """How <loss> lies in a plaintext: sums over rows of u^2 - 4 y u, in units of 2^-(2 fractional_bits)."""
    bits = 2 * setting.vector_bits + setting.batch_size.bit_length() + 6
    return Fields.of(bits, plaintext_bits, most=1)


# ---------------------------------------------------------------- data parties


def train_slice(
    party: Party,
    setting: Setting,
    columns: Integers,
    labels: Integers | None,
    options: LinearOptions,
    threads: int,
    progress: Epochs | None,
) -> tuple[Floats, list[float]]:
    """Train own weights as the guest (who has labels) or a host; see `quasi_newton.guest`."""
    lead = setting.coordinator
    assert lead is not None
    batches = agree_on_batches(party, setting, options, b"", None)
    key = read_key(party.receive(lead, SharedKey).payload, setting.cipher, options, lead, "SharedKey")
    batch = _Batch(party, setting, Hider(key, key.plaintext_bits - 2, threads), columns, labels)
    own = Slice(columns.shape[1], memory=options.pairs, period=options.period)  # the penalty is the coordinator's
    X = columns * 2.0**-COLUMN_FRACTION
    schedule = Schedule(options.first_rate, options.tol, options.max_iter)
    if progress is not None:
        progress([])
    for epoch in count():
        party.round = epoch + 1
        for rows in batches:
            batch.gradient(rows, setting.fixed(X[rows] @ own.weights))  # steps 1 to 3
            s = own.candidate()
            if s is not None:
                batch.curvature(rows, setting.fixed(X[rows] @ s))  # steps 3* and 4*
            answer = party.receive(lead, StepPart).step
            step = view(answer, np.float64, own.weights.shape, peer=lead, what="StepPart.step")
            if not np.all(np.isfinite(step)):
                raise PeerProtocolError(lead, f"expected finite numbers - at StepPart from {lead}")
            # noted as a slice's step along one vector, the step itself
            own.products(step, None if s is None else np.zeros_like(step))
            own.step(Decision(np.ones(1), keep=False))
        if labels is None:
            end = receive_end(party, setting.guest, options, schedule)
        else:
            end = end_epoch(party, schedule, party.receive(lead, EpochLoss).loss, progress)
        own.end_epoch(back=end.back)
        if end.finished:
            return own.weights, schedule.losses
    raise AssertionError("an epoch is the last")


class _Batch:
    """A data party's part in the products of a batch."""

    def __init__(
        self, party: Party, setting: Setting, hider: Hider, columns: Integers, labels: Integers | None
    ) -> None:
        self._party, self._setting, self._hider = party, setting, hider
        self._columns, self._labels = columns, labels
        self._fields = sum_fields(setting, hider.plaintext_bits, masked=False)
        self._of_loss = loss_fields(setting, hider.plaintext_bits)
        self._alone = len(setting.hosts) == 1

    def gradient(self, rows: Integers, u: Integers) -> None:
        """Let the coordinator have <X^T 4 d> and, of the guest, <loss>."""
        party, setting = self._party, self._setting
        if self._labels is None:
            squares = None
            if self._alone:
                words = -(-2 * setting.vector_bits // 64)
                squares = Array.of(self._hider.hide_words(to_words([int(x) ** 2 for x in u], words)))
            party.send(setting.guest, Margins(Array.of(self._hider.hide(u, setting.vector_bits)), squares))
            self._send(rows, self._theirs(len(rows)), None)
            return
        y = self._labels[rows]
        told = {host: party.receive(host, Margins) for host in setting.hosts}
        of_hosts = self._add([self._check(told[host].rows, len(rows), host) for host in told])
        d = self._share(of_hosts, u - (y << (setting.fractional_bits + 1)))
        squared = next(iter(told.values())).squares if self._alone else None
        if self._alone and squared is None:
            raise PeerProtocolError(setting.hosts[0], f"expected squares - at Margins from {setting.hosts[0]}")
        hidden = None if squared is None else self._check(squared, len(rows), setting.hosts[0])
        self._send(rows, d, self._loss(u, y, of_hosts, hidden))

    def curvature(self, rows: Integers, x_s: Integers) -> None:
        """Let the coordinator have <v>."""
        party, setting = self._party, self._setting
        hidden = self._hider.hide(x_s, setting.vector_bits)
        if self._labels is None:
            party.send(setting.guest, Margins(Array.of(hidden), None))
            self._send(rows, self._theirs(len(rows)), None)
            return
        of_hosts = self._add(
            [self._check(party.receive(host, Margins).rows, len(rows), host) for host in setting.hosts]
        )
        self._send(rows, self._share(of_hosts, x_s), None)

    def _share(self, of_hosts: Words, own: Integers) -> Words:
        """Add the own vector, freshly encrypted, and send the sum to all hosts."""
        whole = self._add([of_hosts, self._hider.hide(own, self._setting.vector_bits)])
        for host in self._setting.hosts:
            self._party.send(host, Vector(Array.of(whole)))
        return whole

    def _theirs(self, n_rows: int) -> Words:
        return self._check(self._party.receive(self._setting.guest, Vector).rows, n_rows, self._setting.guest)

    def _check(self, array: Array, n_rows: int, peer: str) -> Words:
        return ciphertexts(array, self._hider, (n_rows,), peer, "a vector")

    def _add(self, vectors: list[Words]) -> Words:
        return vectors[0] if len(vectors) == 1 else self._hider.multiply(vectors)

    def _send(self, rows: Integers, hidden: Words, loss: Words | None) -> None:
        """Send <X^T v>, one number per ciphertext, less the offset that v has."""
        setting, half = self._setting, 1 << (self._fields.bits - 1)
        products = self._hider.weigh(hidden, self._columns[rows], WEIGHT_BITS)
        offset = len(setting.parties) << (setting.vector_bits - 1)
        added = [half - offset * of_column for of_column in self._columns[rows].sum(axis=0).tolist()]
        covered = self._hider.cover(products, added, self._fields)
        told = None if loss is None else Array.of(loss)
        self._party.send(str(setting.coordinator), Gradient(Array.of(covered), told))

    def _loss(self, u: Integers, y: Integers, of_hosts: Words, squares: Words | None) -> Words:
        """Return <sum of u^2 - 4 y u> of all parties' u, or, without squares, <sum of -4 y u> at the same scale."""
        setting, shift = self._setting, self._setting.fractional_bits
        own = u.astype(object)
        signs = -(y << 2).astype(object) << shift
        factors = 2 * own + signs if squares is not None else signs
        constant = int((own * own + signs * own).sum()) if squares is not None else int((signs * own).sum())
        weights = np.array(factors, np.int64)[:, np.newaxis]
        sums = self._hider.weigh(of_hosts, weights, setting.vector_bits + 2)
        if squares is not None:
            whole = np.empty_like(sums)
            ends = np.array([0, len(squares)])
            self._hider.modulus.segment_products(squares, np.arange(len(squares), dtype=np.int32), ends, whole)
            sums = self._hider.multiply([sums, whole])
        offset = len(setting.hosts) << (setting.vector_bits - 1)
        added = (1 << (self._of_loss.bits - 1)) + constant - offset * int(sum(factors))
        return self._hider.cover(sums, [added], self._of_loss)


# ---------------------------------------------------------------- coordinator


def coordinate(party: Party, setting: Setting, options: LinearOptions, threads: int) -> None:
    """Decrypt gradients, and send everybody its part of the step."""
    key = make_key(setting.cipher, options)
    for name in setting.parties:
        party.send(name, SharedKey(pack(key.public.to_payload())))
    schedule = Schedule(options.first_rate, options.tol, options.max_iter)
    order = [*setting.hosts, setting.guest]  # the intercept comes last
    whole = Slice(
        sum(setting.n_columns.values()), memory=options.pairs, period=options.period, l2=options.l2, intercept=True
    )
    coordinator = Coordinator(memory=options.pairs, learning_rate=options.first_rate)
    fields = sum_fields(setting, key.public.plaintext_bits, masked=False)
    of_loss = loss_fields(setting, key.public.plaintext_bits)
    words = key.public.modulus.words
    ends = np.cumsum([setting.n_columns[name] for name in order])

    def gradient(*, with_loss: bool) -> tuple[Floats, float]:
        slices, loss = [], 0.0
        for name in order:
            n_columns = setting.n_columns[name]
            told = party.receive(name, Gradient)
            hidden = view(told.products, np.uint64, (n_columns, words), peer=name, what="Gradient.products")
            numbers = fields.signed(opened(key, hidden, n_columns, fields, threads), [0] * n_columns)
            slices.append(setting.mean_over_batch(numbers))
            if name != setting.guest or not with_loss:
                continue
            if told.loss is None:
                raise PeerProtocolError(name, f"expected a loss - at Gradient from {name}")
            cipher = view(told.loss, np.uint64, (1, words), peer=name, what="Gradient.loss")
            (summed,) = of_loss.signed(opened(key, cipher, 1, of_loss, threads), [0])
            loss = summed / (1 << 2 * setting.fractional_bits) / setting.batch_size
        return np.concatenate(slices), loss

    for epoch in count(1):
        party.round, losses = epoch, []
        for _ in range(setting.n_batches):
            grad, u2_yu = gradient(with_loss=True)
            if len(setting.hosts) == 1:
                losses.append(math.log(2.0) + u2_yu / 8.0)
            else:  # u^2 = 4 d u + 2 y u, and the mean of d u is w^T g
                losses.append(math.log(2.0) + 0.5 * float(whole.weights @ grad) + u2_yu / 16.0)
            v = None if whole.candidate() is None else gradient(with_loss=False)[0]
            before = whole.weights
            whole.step(coordinator.decide(whole.products(grad, v)))
            for name, part in zip(order, np.split(before - whole.weights, ends[:-1]), strict=True):
                party.send(name, StepPart(Array.of(np.ascontiguousarray(part))))
        party.send(setting.guest, EpochLoss(float(np.mean(losses))))
        end = receive_end(party, setting.guest, options, schedule)
        if end.finished:
            return
        whole.end_epoch(back=end.back)
        coordinator.end_epoch(end.learning_rate, back=end.back)
