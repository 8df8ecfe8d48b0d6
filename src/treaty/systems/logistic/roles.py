"""Logistic regression between parties that hold columns of the same rows, by masked, vector-free quasi-Newton steps.

Yang, Fan, Chen, Shi, Yang, "A Quasi-Newton Method Based Vertical Federated Learning Framework for Logistic
Regression", 2019 (arXiv 1912.00513), corrected and repaired, see docs/logistic.md; on Hardy et al. 2017 (arXiv
1711.10677); L-BFGS on inner products alone after Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NeurIPS 2014.
"sgd" is the same without correction pairs. The protocol as published is in `quasi_newton_paper`.

Roles: a guest (labels, perhaps columns, and the intercept), one host or more (columns), and a coordinator without data,
or none. Output: everybody's weights of its own columns, at itself alone.

=============  ======================  ===================================================  ==========================
message        from -> to              content                                              protection
=============  ======================  ===================================================  ==========================
set-up         see `linear_setup`
products       `hidden_`, `own_key_`, `lattice_products`: of each batch every party gets
               its own slice of the gradient, every L-th its slice of the curvature v
`Products`     data party -> coord.    its parts of the inner products of s, v and g        masks that cancel
`Step`         coord. -> data party    the 2 M + 1 coefficients of the step                 TLS
loss           by products             the epoch's mean loss, to the guest alone            masks
`EpochEnd`     guest -> all            learning rate, whether training is over              TLS
=============  ======================  ===================================================  ==========================

**Without a coordinator** the guest takes its place for the inner products, not for the products: it learns the hosts'
parts of them, of several hosts only their sum. With one, it learns nearly as much from the coefficients, which are
functions of the sums. d is never opened, to nobody.

Adversary: honest but curious. Coordinator and guest must not collude, nor may one organisation be both. What each
learns is in `linear_disclosures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.vectors.cancelling_masks import FRACTION_BITS, CancellingMasks, from_fixed, to_fixed, total
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError, CryptoError, DataError, PeerProtocolError
from treaty.linear.lbfgs import Coordinator, Decision, Slice
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.linear.training import Schedule
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models.linear import LinearPart, preparation_of
from treaty.systems.linear_options import LinearOptions
from treaty.systems.logistic import paper as paper
from treaty.systems.logistic.batches import agree_on_batches, print_of_rows, tell_who_stands_alone
from treaty.systems.logistic.coordinated import CoordinatedProducts, Opener
from treaty.systems.logistic.epochs import EpochEnd, end_epoch, receive_end
from treaty.systems.logistic.lattice import LatticeProducts
from treaty.systems.logistic.setup import Setting, begin, check_roles, pair_seeds, terms
from treaty.systems.logistic.two_party import OwnKeyProducts
from treaty.systems.pooled.training import Labelled

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Epochs = Callable[[list[float]], None]


class Products(Message):
    """Parts of inner products modulo 2^128, uint64 (n, 2). Tell nothing but in the sum over all who mask them."""

    values: Array


class Step(Message):
    """Coefficients float64 (2 m + 1,) of the step in s_1 ... s_m, v_1 ... v_m, g; whether the candidate pair is kept.

    Tells what they are a function of: nearly the summed inner products.
    """

    coefficients: Array
    keep: bool


class HiddenSums(Protocol):
    """Products of own columns with the sum of all parties' hidden vectors."""

    def times(self, rows: Integers, own: Integers, *, counted: bool) -> list[int]:
        """Return the products of a batch's rows; see `CoordinatedProducts.times`."""
        ...

    def loss(self, own: int) -> int | None:
        """Return an epoch's summed loss to the guest; see `CoordinatedProducts.loss`."""
        ...

    def close(self) -> None:
        """Settle what is kept beyond the job."""
        ...


# ---------------------------------------------------------------- data parties


def guest(
    party: Party,
    data: Labelled,
    options: LinearOptions,
    *,
    parties: Sequence[str],
    coordinator: str | None,
    classes: list[Category],
    threads: int = 1,
    progress: Epochs | None = None,
    kept: Path | None = None,
    rows_digest: bytes | None = None,
) -> LinearPart:
    """Train as the label holder.

    Parameters
    ----------
    party : Party
        Connected with all others, the coordinator among them if there is one.
    data : Labelled
        Own columns (perhaps none), labels 0 and 1.
    parties : sequence of str
        All data parties in the job's order.
    coordinator : str or None
    classes : list
        Labels by class number.
    progress : callable or None
        Given the losses of all epochs so far: none when training begins, then after each.
    kept : Path or None
        Folder of what serves later jobs on the same rows: the partition into batches, the ledger of the lattice map.
    rows_digest : bytes or None
        What tells these rows, in this order, from others: of their ids, the same in every job on them. None: rows
        correspond by position.

    Returns
    -------
    LinearPart
        Own weights, intercept and losses.

    Raises
    ------
    ConfigError, DataError
        When options, roles or tables do not fit; weights of rows, which encrypted protocols do not have; one class.
    PeerError, CryptoError
        When a party is lost or sends what the protocol does not allow.
    """
    if data.weight is not None:
        raise ConfigError("encrypted logistic regression has no weights of rows: expected sample_weight=None")
    labels = np.where(data.y > 0.5, 1, -1).astype(np.int64)
    if len(np.unique(labels)) < 2:
        raise DataError(f"{party.name}: expected labels of two classes, got one class in all {len(labels)} rows")
    preparation = preparation_of(data.table)
    ones = np.ones((data.table.n_rows, 1))
    matrix = np.hstack([preparation.matrix(data.table.columns, data.table.n_rows), ones])
    names = [*preparation.names(data.table.schema.names, data.table.schema.categories), "intercept"]
    setting, weights, losses, alone = _train(
        party, fixed_columns(matrix), names, labels, options, party.name, parties, coordinator, threads, progress, kept,
        rows_digest,
    )  # fmt: skip
    return LinearPart(
        model_id=setting.model_id, party=party.name, schema=data.table.schema, preparation=preparation,
        coef=weights[:-1], intercept=float(weights[-1]), classes=classes, losses=losses, encryption=setting.cipher,
        alone=alone,
    )  # fmt: skip


def host(
    party: Party,
    table: Table,
    options: LinearOptions,
    *,
    guest: str,
    parties: Sequence[str],
    coordinator: str | None,
    threads: int = 1,
    kept: Path | None = None,
    rows_digest: bytes | None = None,
) -> LinearPart:
    """Train as a party with columns alone; parameters and errors as of `guest`.

    Returns
    -------
    LinearPart
        Own weights.
    """
    preparation = preparation_of(table)
    columns = fixed_columns(preparation.matrix(table.columns, table.n_rows))
    names = preparation.names(table.schema.names, table.schema.categories)
    setting, weights, _, alone = _train(
        party, columns, names, None, options, guest, parties, coordinator, threads, None, kept, rows_digest
    )
    return LinearPart(
        model_id=setting.model_id, party=party.name, schema=table.schema, preparation=preparation,
        coef=weights, encryption=setting.cipher, alone=alone,
    )  # fmt: skip


def fixed_columns(matrix: Floats) -> Integers:
    """Round prepared columns to the grid that all arithmetic is on."""
    return np.rint(matrix * 2.0**COLUMN_FRACTION).astype(np.int64)


def _train(
    party: Party,
    columns: Integers,
    names: list[str],
    labels: Integers | None,
    options: LinearOptions,
    guest: str,
    parties: Sequence[str],
    coordinator: str | None,
    threads: int,
    progress: Epochs | None,
    kept: Path | None,
    rows_digest: bytes | None,
) -> tuple[Setting, Floats, list[float], dict[str, int]]:
    """Train own weights, as the guest (who has labels) or a host.

    Return also the losses, at the guest, and of each party how many rows stand alone in their batch.
    """
    agree(party, terms(options, guest, parties, coordinator))
    check_roles(options, guest, parties, coordinator)
    setting = begin(party, options, guest, parties, coordinator, columns.shape)
    if options.mode == "paper":
        weights, losses = paper.train_slice(party, setting, columns, labels, options, threads, progress)
        return setting, weights, losses, {}
    batches = agree_on_batches(party, setting, options, rows_digest or print_of_rows(setting, labels), kept)
    alone = tell_who_stands_alone(party, setting, columns, batches)
    seeds = pair_seeds(party, setting)
    masks = CancellingMasks(party.job, party.protocol, party.name, seeds)
    sums: HiddenSums
    if setting.cipher == "lattice":
        sums = LatticeProducts(party, setting, columns, names, labels, batches, masks, kept, threads)
    elif coordinator is not None:
        sums = CoordinatedProducts(party, setting, options, columns, labels, masks, threads)
    else:
        sums = OwnKeyProducts(party, setting, options, columns, labels, masks, threads)
    decider = _Decider(party, setting, options, masks, seeds)
    slice_ = Slice(
        columns.shape[1], memory=options.pairs, period=options.period, l2=options.l2, intercept=labels is not None
    )
    schedule = Schedule(options.first_rate, options.tol, options.max_iter)
    X = columns * 2.0**-COLUMN_FRACTION
    if progress is not None:
        progress([])
    with closing(sums):
        for epoch in count():
            party.round = epoch + 1
            of_epoch = 0
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
                of_epoch += _loss_part(setting, slice_.weights, grad, u, None if labels is None else labels[rows])
                slice_.step(decider.decide(slice_.products(grad, v), paired=v is not None))
            summed = sums.loss(of_epoch)
            if summed is None:
                end = receive_end(party, guest, options, schedule)
            else:
                of_rows = summed / (1 << (setting.fractional_bits + 2)) / batches.size
                end = end_epoch(party, schedule, math.log(2.0) + of_rows, progress)
            slice_.end_epoch(back=end.back)
            decider.end_epoch(end)
            if end.finished:
                return setting, slice_.weights, schedule.losses, alone
    raise AssertionError("an epoch is the last")


def _loss_part(setting: Setting, weights: Floats, grad: Floats, u: Integers, labels: Integers | None) -> int:
    """Return own part of a batch's sum of 2 d u - y u, in units of 2^-fractional_bits; of y u the guest's own."""
    d_u = 2.0 * setting.batch_size * float(weights @ grad)
    if not math.isfinite(d_u):
        raise DataError("training diverged; lower learning_rate", public="training diverged; lower learning_rate")
    return round(d_u * 2.0**setting.fractional_bits) - (0 if labels is None else int(labels @ u))


class _Decider:
    """Gets the step's coefficients: from the coordinator, from the guest, or, at a guest without one, by itself."""

    def __init__(
        self, party: Party, setting: Setting, options: LinearOptions, masks: CancellingMasks, seeds: dict[str, bytes]
    ) -> None:
        self._party, self._setting = party, setting
        self._lead = setting.coordinator or setting.guest
        self._place = 0
        self._coordinator: Coordinator | None = None
        self._masks = masks
        if self._lead == party.name:
            self._coordinator = Coordinator(memory=options.pairs, learning_rate=options.first_rate)
        elif self._lead == setting.guest:  # who gets the sum gives no masks
            among = {peer: seed for peer, seed in seeds.items() if peer != setting.guest}
            self._masks = CancellingMasks(party.job, party.protocol + " hosts", party.name, among)

    def end_epoch(self, end: EpochEnd) -> None:
        """Go on to the next epoch."""
        if self._coordinator is not None:
            self._coordinator.end_epoch(end.learning_rate, back=end.back)

    def decide(self, products: Floats, *, paired: bool) -> Decision:
        """Return the decision on all parties' summed products; `paired` says that a candidate is among the vectors."""
        self._place += 1
        numbers = _checked_fixed(products)
        if self._coordinator is not None:
            return decide_for(self._party, self._setting.hosts, self._coordinator, len(products), own=numbers)
        covered = self._masks.cover(numbers, self._place, "products")
        self._party.send(self._lead, Products(Array.of(covered)))
        answer = self._party.receive(self._lead, Step)
        # of the 2 m + 1 vectors that (2 m + 1) (2 m + 2) / 2 products are of, less the candidate's two
        size = (math.isqrt(8 * len(products) + 1) - 1) // 2 - 2 * paired
        coefficients = view(answer.coefficients, np.float64, (size,), peer=self._lead, what="Step.coefficients")
        if not np.all(np.isfinite(coefficients)):
            raise PeerProtocolError(self._lead, f"expected finite coefficients - at Step from {self._lead}")
        return Decision(coefficients, answer.keep)


def _checked_fixed(products: Floats) -> list[int]:
    try:
        return to_fixed(products)
    except CryptoError:
        raise DataError(
            "training diverged: inner products of steps are too large; lower learning_rate",
            public="training diverged; lower learning_rate",
        ) from None


# ---------------------------------------------------------------- coordinator


def coordinate(
    party: Party,
    options: LinearOptions,
    *,
    guest: str,
    parties: Sequence[str],
    threads: int = 1,
) -> None:
    """Coordinate a training without data: see masked numbers and summed inner products, answer with coefficients.

    Parameters
    ----------
    party : Party
        Connected with all data parties.
    guest, parties
        See `guest`.

    Raises
    ------
    ConfigError, PeerError, CryptoError
        See `guest`.
    """
    agree(party, terms(options, guest, parties, party.name))
    check_roles(options, guest, parties, party.name)
    setting = begin(party, options, guest, parties, party.name, None)
    if options.mode == "paper":
        paper.coordinate(party, setting, options, threads)
        return
    opener = None if setting.cipher == "lattice" else Opener(party, setting, options, threads)
    coordinator = Coordinator(memory=options.pairs, learning_rate=options.first_rate)
    schedule = Schedule(options.first_rate, options.tol, options.max_iter)
    iteration = 0
    for epoch in count(1):
        party.round = epoch
        for _ in range(setting.n_batches):
            iteration += 1
            makes_pair = options.pairs > 0 and iteration % options.period == 0 and iteration >= 2 * options.period
            if opener is not None:
                opener.open()
                if makes_pair:
                    opener.open()
            decide_for(party, setting.parties, coordinator, coordinator.expected[makes_pair])
        if opener is not None:
            opener.loss()
        end = receive_end(party, guest, options, schedule)
        if end.finished:
            return
        coordinator.end_epoch(end.learning_rate, back=end.back)
        iteration = 0 if end.back else iteration


def decide_for(
    party: Party,
    givers: Sequence[str],
    coordinator: Coordinator,
    expected: int,
    own: list[int] | None = None,
) -> Decision:
    """Add up the parties' inner products, decide, and tell them all."""
    parts = []
    for name in givers:
        values = party.receive(name, Products).values
        parts.append(view(values, np.uint64, (expected, 2), peer=name, what="Products.values"))
    summed = total(parts)
    if own is not None:
        summed = [a + b for a, b in zip(summed, own, strict=True)]
    products = from_fixed(summed)
    _check_products(products, len(givers) + 1)
    decision = coordinator.decide(products)
    for name in givers:
        party.send(name, Step(Array.of(decision.coefficients), decision.keep))
    return decision


def _check_products(products: Floats, parts: int) -> None:
    """Refuse what are not the inner products of any vectors, but for the rounding of so many parts.

    Masks hide whatever a party sends: that it was nonsense shows in the sum alone.
    """
    size = (math.isqrt(8 * len(products) + 1) - 1) // 2
    gram = np.zeros((size, size))
    gram[np.triu_indices(size)] = products
    rounding = parts * 2.0**-FRACTION_BITS
    squares = np.diag(gram) + rounding
    if np.any(squares < 0.0) or np.any(np.abs(gram) > np.sqrt(np.outer(squares, squares)) * (1 + 1e-9) + rounding):
        raise CryptoError("the parties' summed inner products are those of no vectors; one of them sent something else")
