"""What the parties of a logistic regression settle before training: terms, sizes, batch-size guard and pair keys.

=====================  ==========================  ============================================================
message                from -> to                  content
=====================  ==========================  ============================================================
`TableSize`            passive -> active party     rows and prepared columns of its table
`TrainingSizes`        active party -> all         those of all parties, and the model's id
`PairKey`              data parties, all pairs     an X25519 key, for masks that cancel
=====================  ==========================  ============================================================

Then the data parties settle the batches, see `treaty.systems.logistic.batches`. The coordinator, who has no data, is
sent `TrainingSizes` alone: it knows how many rows and columns there are, not which rows are in a batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.compute import Floats, Integers
from treaty.crypto import parameters
from treaty.crypto.aggregation.key_agreement import agree_with
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.linear.batches import check_batch_size
from treaty.linear.lbfgs import Coordinator, Slice
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.linear.training import Schedule
from treaty.messaging.agreement import Term
from treaty.messaging.messages import M, Message
from treaty.messaging.party import Party
from treaty.systems.logistic.options import FederatedRegression, RegressionOptions
from treaty.systems.sizes import ColumnSize, RowSize
from treaty.systems.system import Seat

WEIGHT_BITS = COLUMN_FRACTION + 5
"""Bits of a column's signed entries: prepared columns are clipped at 10."""

MARGIN_BITS = 10
"""A party's part of a margin lies below 2^10; a larger one ends training as diverged."""


class TableSize(Message):
    """Size of a passive party's table. Tells how many rows and prepared columns it has."""

    n_rows: RowSize
    n_columns: ColumnSize


class TrainingSizes(Message):
    """The model's id and all tables' sizes; columns by data party, in the job's order, the intercept among them."""

    model_id: str
    n_rows: RowSize
    n_columns: list[ColumnSize]


class PairKey(Message):
    """A public key for this job. Tells nothing."""

    key: bytes


@dataclass(frozen=True, slots=True)
class OwnData:
    """A data party's prepared columns, int64 (n_rows, n_columns) in fixed point.

    Labels are int64 (n_rows,) of -1 and 1 at the active party, whose last column is the intercept's; None elsewhere.
    The columns' names are for the party's own ledger.
    """

    columns: Integers
    labels: Integers | None
    names: list[str]


def diverged(found: str) -> DataError:
    """Return the error for numbers that outgrow their bounds; peers are not told which."""
    return DataError(
        f"training diverged: {found}; lower learning_rate", public="training diverged; lower learning_rate"
    )


@dataclass(frozen=True, slots=True)
class Solver:
    """How weights are found, as all parties agreed; `memory` is 0 for gradient descent."""

    memory: int
    period: int
    l2: float
    learning_rate: float
    tol: float
    max_iter: int

    def coordinator(self) -> Coordinator:
        """Make the coordinator, which decides steps from summed inner products."""
        return Coordinator(memory=self.memory, learning_rate=self.learning_rate)

    def schedule(self) -> Schedule:
        """Make the schedule, which decides after each epoch how training goes on."""
        return Schedule(self.learning_rate, self.tol, self.max_iter)

    def slice(self, n_columns: int, *, intercept: bool) -> Slice:
        """Make the weights of `n_columns` columns, all 0; with `intercept` the last has no l2 penalty."""
        return Slice(n_columns, memory=self.memory, period=self.period, l2=self.l2, intercept=intercept)


def solver_of(common: RegressionOptions, method: type[FederatedRegression]) -> Solver:
    """Resolve the options that depend on the method (`QuasiNewton` or `SGD`)."""
    memory, rate = common.memory if method.keeps_pairs else 0, common.learning_rate or method.first_rate
    return Solver(memory, common.period, common.l2, rate, common.tol, common.max_iter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all parties of a training know.

    `owners` are the parties with data, in the job's order; `coordinator` has none, and there may be no coordinator.
    `n_columns` counts each data party's prepared columns, the active party's with the intercept; `batch_size` is at
    most `n_rows`; `cipher` is "lattice", "ou" or "paillier"; `key_bits` is the modulus's size, unless
    `insecure_test_key_bits` replaces it.
    """

    model_id: str
    active: str
    owners: list[str]
    coordinator: str | None
    n_rows: int
    n_columns: dict[str, int]
    batch_size: int
    fractional_bits: int
    cipher: str
    key_bits: int
    insecure_test_key_bits: int | None
    solver: Solver

    @property
    def passives(self) -> list[str]:
        """Data parties but the active one."""
        return self.others(self.active)

    @property
    def n_batches(self) -> int:
        """Batches of an epoch; rows that do not fill a last one are left out."""
        return self.n_rows // self.batch_size

    @property
    def vector_bits(self) -> int:
        """Bits of the signed entries of a party's hidden vector."""
        return self.fractional_bits + MARGIN_BITS + 2

    @property
    def largest_loss(self) -> int:
        """Bound of a party's own part of an epoch's loss, in units of 2^-(fractional_bits + 2), summed over rows."""
        return 1 << (self.fractional_bits + 2 * MARGIN_BITS + 3 + self.n_rows.bit_length())

    @property
    def loss_bits(self) -> int:
        """Bits of the signed sum of such parts, with their offsets."""
        return self.largest_loss.bit_length() + 2 + len(self.owners).bit_length()

    def others(self, name: str) -> list[str]:
        """Return the data parties but one."""
        return [party for party in self.owners if party != name]

    def fixed(self, margins: Floats) -> Integers:
        """Round parts of margins to fixed point; DataError when one is too large: training has diverged."""
        if not np.all(np.abs(margins) < 1 << MARGIN_BITS):
            raise diverged(f"a margin exceeds {1 << MARGIN_BITS}")
        return np.rint(margins * 2.0**self.fractional_bits).astype(np.int64)

    def mean_over_batch(self, products: Sequence[int]) -> Floats:
        """Turn X^T (4 d) over a batch, in integers, into the mean of d x."""
        unit = 2.0 ** -(self.fractional_bits + COLUMN_FRACTION + 2)
        return np.array([float(product) for product in products], np.float64) * unit / self.batch_size


def terms(seat: Seat) -> dict[str, Term]:
    """Return what all parties must agree on first: the roles, and every option but random_state.

    Of random_state the coordinator need not know; the data parties compare theirs in `agree_on_batches`.
    """
    return {
        **seat.public_terms,
        "active party": seat.cast.active,
        "data parties": list(seat.cast.owners),
        "coordinator's name": seat.cast.holder("coordinator"),
    }


def begin(seat: Seat, shape: tuple[int, int] | None) -> Setting:
    """Tell sizes and learn everybody's; `shape` is that of the own prepared columns, None at the coordinator.

    Raises DataError when row counts differ, ConfigError when batches are too small to hide labels (safe mode).
    """
    party, cast, options, common = seat.party, seat.cast, seat.options, seat.common
    lead, leads = cast.active, party.name == cast.active
    sizes = _tell_sizes(seat, shape) if leads and shape is not None else _receive_sizes(seat, shape)
    cipher = options.cipher(common.fractional_bits)
    default = parameters.PAILLIER_DEFAULT_KEY_BITS if cipher == "paillier" else parameters.OU_DEFAULT_KEY_BITS
    setting = Setting(
        model_id=sizes.model_id,
        active=lead,
        owners=cast.owners,
        coordinator=cast.holder("coordinator"),
        n_rows=sizes.n_rows,
        n_columns=dict(zip(cast.owners, sizes.n_columns, strict=True)),
        batch_size=min(common.batch_size, sizes.n_rows),
        fractional_bits=common.fractional_bits,
        cipher=cipher,
        key_bits=options.key_bits or default,
        insecure_test_key_bits=options.insecure_test_key_bits,
        solver=solver_of(common, type(options)),
    )
    if setting.batch_size < 1:
        raise ConfigError("expected tables with rows, got none")
    if shape is not None and (setting.n_rows, setting.n_columns[party.name]) != shape:
        raise PeerProtocolError(lead, f"expected the sizes of this party's table - at TrainingSizes from {lead}")
    if options.mode == "safe":  # everyone checks: each hides something from the others
        rows, passives = setting.n_rows, setting.passives
        check_batch_size(setting.batch_size, setting.n_columns[lead], lead, n_rows=rows, of_labels=False)
        joined = sum(setting.n_columns[name] for name in passives)  # passive parties may pool what they see
        check_batch_size(setting.batch_size, joined, " and ".join(passives), n_rows=rows, of_labels=True)
    return setting


def _tell_sizes(seat: Seat, shape: tuple[int, int]) -> TrainingSizes:
    """Collect the passive parties' sizes and tell all parties everybody's."""
    party, cast = seat.party, seat.cast
    told = {name: party.receive(name, TableSize) for name in seat.others}
    for name, size in told.items():
        if size.n_rows != shape[0]:
            raise DataError(
                f"expected tables of the same rows, got {shape[0]} rows at {cast.active} and {size.n_rows} at {name}",
                public="the parties' tables do not have the same number of rows; align them",
            )
    columns = [shape[1] if name == cast.active else told[name].n_columns for name in cast.owners]
    sizes = TrainingSizes(secrets.token_hex(16), shape[0], columns)
    for peer in party.peers:
        party.send(peer, sizes)
    return sizes


def _receive_sizes(seat: Seat, shape: tuple[int, int] | None) -> TrainingSizes:
    """Tell the active party the own table's size, unless there is none, and receive everybody's."""
    party, lead, n_owners = seat.party, seat.cast.active, len(seat.cast.owners)
    if shape is not None:
        party.send(lead, TableSize(*shape))
    sizes = party.receive(lead, TrainingSizes)
    if len(sizes.n_columns) != n_owners:
        raise PeerProtocolError(lead, f"expected columns of {n_owners} parties - at TrainingSizes from {lead}")
    return sizes


def exchange(party: Party, others: Sequence[str], own: M) -> dict[str, M]:
    """Send the same message to some parties and receive theirs; return everybody's by name, the own one first."""
    for peer in others:
        party.send(peer, own)
    return {party.name: own, **{peer: party.receive(peer, type(own)) for peer in others}}


def pair_seeds(party: Party, others: Sequence[str]) -> dict[str, bytes]:
    """Agree with each of some parties on a seed that nobody else has."""
    own = X25519PrivateKey.generate()
    told = exchange(party, others, PairKey(own.public_key().public_bytes_raw()))
    return agree_with(own, {peer: told[peer].key for peer in others}, party.job, party.name)
