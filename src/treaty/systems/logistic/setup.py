"""What the parties of a regression settle before training: terms, sizes, the guard on batches, and keys of pairs.

The data parties then agree on batches (`batches`). A coordinator, which has no data, receives `TrainingSizes` alone: it
knows how many rows and columns there are, not which rows are in a batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.crypto import parameters
from treaty.crypto.keystream import CancellingMasks
from treaty.crypto.sharing.key_agreement import agree_with
from treaty.data.table import Table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.linear.lbfgs import Coordinator, check_batch_size, check_hessian_batch_size
from treaty.linear.preparation import COLUMN_FRACTION, Preparation
from treaty.linear.training import Solver
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.exchanges import Term, exchange
from treaty.messaging.messages import ColumnSize, Message, ModelId, RowSize, leaks
from treaty.messaging.party import Party
from treaty.models.linear import preparation_of
from treaty.systems.logistic.options import FederatedRegression, RegressionOptions
from treaty.systems.system import RoleInput

# Bits of a column's signed entries: prepared columns of training rows are at most 10 in size
WEIGHT_BITS = COLUMN_FRACTION + 5
# A party's part of a margin, times the row's weight, lies below 2^10; a larger one ends training as diverged
MARGIN_BITS = 10
# Of a row, where the mean is 1: with its label and margin it fits the bits of `Setting.vector_bits`
LARGEST_WEIGHT = 256

GlmInput = RoleInput[FederatedRegression, RegressionOptions]


@leaks("how many rows and prepared columns the sender has; rows of eval sets", "control")
class TableSize(Message):
    """Size of a passive party's table."""

    n_rows: RowSize
    n_columns: ColumnSize
    eval_rows: Annotated[list[RowSize], msgspec.Meta(max_length=1000)]


@leaks("all parties' numbers of columns and rows, whether rows have weights, whether training is resumed", "control")
class TrainingSizes(Message):
    """All tables' sizes; columns by data party, in the job's order, the intercept among them."""

    model_id: ModelId
    n_rows: RowSize
    n_columns: list[ColumnSize]
    weighted: bool
    resumes: bool


@leaks("a public key of this job", "control")
class PairKey(Message):
    """A public X25519 key for this job, from which two data parties derive masks that cancel."""

    key: bytes


@dataclass(frozen=True, slots=True)
class OwnData:
    """A data party's prepared columns, int64 (n_rows, n_columns) in fixed point.

    Labels are int64 (n_rows,) of -1 and 1 at the active party, whose last column is the intercept's; None elsewhere.
    Weights of rows, float64 (n_rows,) with mean 1, are the same at all data parties; None: all rows weigh the same.
    """

    columns: Integers
    labels: Integers | None
    weight: Floats | None = None

    def weighed(self, rows: Integers, of_rows: Floats) -> Floats:
        """Multiply these rows' parts of margins (n_rows,) by their weights."""
        return of_rows if self.weight is None else self.weight[rows] * of_rows


def fixed_columns(matrix: Floats) -> Integers:
    """Round prepared columns to the grid that all arithmetic is on."""
    return np.rint(matrix * 2.0**COLUMN_FRACTION).astype(np.int64)


def prepared(table: Table, common: RegressionOptions, name: str, weight: Floats | None = None) -> Preparation:
    """Learn how to prepare a party's columns; DataError for rows with missing values where these are refused."""
    refused = common.missing != "median" and bool(common.missing or common.standard_errors)
    gaps = np.vstack([np.zeros((0, table.n_rows), bool), *(np.isnan(values) for values in table.columns if refused)])
    rows, counts = int(gaps.any(axis=0).sum()), gaps.sum(axis=1)
    if rows:
        raise DataError(
            f"{name}: {rows} of {table.n_rows} rows have missing values, {counts.max()} in column "
            f"{table.schema.names[counts.argmax()]!r}: leave these rows out (fit does with missing='drop', parties of "
            "a job do before they align), fill them in, or replace them by the median with missing='median'",
            public="it has rows with missing values, which the job refuses",
        )
    return preparation_of(table, weight, reference=common.reference is not None, centred=common.pdo is None)


def own_data(inputs: GlmInput, labels: Integers | None) -> tuple[Preparation, OwnData]:
    """Prepare the own columns, as the active party with one of ones, the intercept's; return also how."""
    table, weight = inputs.rows.table, inputs.rows.weight
    preparation = prepared(table, inputs.common, inputs.party.name)
    matrix = preparation.matrix(table.columns, table.n_rows)
    if inputs.party.name == inputs.roles.active:
        matrix = np.hstack([matrix, np.ones((table.n_rows, 1))])
    return preparation, OwnData(fixed_columns(matrix), labels, None if weight is None else weight / weight.mean())


def eval_data(inputs: GlmInput, preparation: Preparation) -> dict[str, tuple[Floats, Floats]]:
    """Return each eval set's own prepared columns, likewise, and labels of -1 and 1, which the active party has."""
    found = {}
    for rows in inputs.eval_sets:
        n_rows, intercept = rows.table.n_rows, int(inputs.party.name == inputs.roles.active)
        matrix = np.hstack([preparation.matrix(rows.table.columns, n_rows), np.ones((n_rows, intercept))])
        found[rows.name] = (matrix, np.where(rows.y > 0.5, 1.0, -1.0))
    return found


def diverged(found: str) -> DataError:
    """Return the error for numbers that outgrow their bounds; peers do not learn which."""
    return DataError(
        f"training diverged: {found}; lower learning_rate", public="training diverged; lower learning_rate"
    )


def solver_of(common: RegressionOptions, method: type[FederatedRegression], n_owners: int = 2) -> Solver:
    """Resolve the options that depend on the method (`QuasiNewton` or `SGD`) and on how many parties have columns.

    On the whole table all pairs are kept.
    """
    rate = common.learning_rate or method.first_rate
    memory, period, tol = common.memory, common.period, common.tol
    if common.whole_table:
        # in uncorrelated coordinates no curvature exceeds the number of parties: at this rate the loss of a quadratic
        # cannot rise
        rate = common.learning_rate or 1.0 / (n_owners - 1)
        memory, period, tol = common.most_rounds, 1, common.tol**2
    return Solver(
        memory=memory if method.keeps_pairs else 0, period=period, learning_rate=rate, tol=tol,
        max_iter=common.most_rounds, l2=common.l2, decay=0.0 if common.whole_table else method.decay,
        hessian_batch_size=None if common.whole_table else common.hessian_batch_size,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all parties of a training know.

    `owners` are the parties with data, in the job's order. `n_columns` counts each one's prepared columns, the active
    party's with the intercept. `cipher` is "lattice", "ou" or "paillier". With `whole` the only batch is the table.
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
    weighted: bool
    resumes: bool
    solver: Solver
    family: str
    whole: bool

    @property
    def curvature(self) -> float:
        """Second derivative of a quadratic loss: with residuals d, encrypted vectors add up to d / curvature."""
        return 0.25 if self.family in ("logistic", "multiclass") else 1.0

    def decider(self) -> Coordinator:
        solver, quadratic = self.solver, self.family != "poisson"
        return Coordinator(
            memory=solver.memory, learning_rate=solver.learning_rate, whole_table=self.whole, quadratic=quadratic
        )

    @property
    def passives(self) -> list[str]:
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

    def others(self, name: str) -> list[str]:
        return [party for party in self.owners if party != name]

    def fixed(self, margins: Floats) -> Integers:
        """Round parts of margins to fixed point; DataError when one is too large: training has diverged."""
        if not np.all(np.abs(margins) < 1 << MARGIN_BITS):
            raise diverged(f"a margin exceeds {1 << MARGIN_BITS}")
        return np.rint(margins * 2.0**self.fractional_bits).astype(np.int64)

    def mean_over(self, n_rows: int, products: Sequence[int]) -> Floats:
        """Turn X^T (d / curvature) over so many rows, in integers, into the mean of d x."""
        unit = 2.0 ** -(self.fractional_bits + COLUMN_FRACTION) * self.curvature
        return np.array([float(product) for product in products], np.float64) * unit / n_rows

    @property
    def hessian_batch_size(self) -> int:
        """Rows of a Hessian's product, if the table has as many."""
        return self.solver.hessian_batch_size or self.batch_size

    @property
    def hessian_pieces(self) -> int:
        """Pieces of at most a batch that these rows are taken in, see `curvature_rows`."""
        return max(1, min(self.hessian_batch_size // self.batch_size, self.n_batches))


def terms(inputs: GlmInput) -> dict[str, Term]:
    """Return what all parties must agree on first: the roles, and every option but random_state.

    The coordinator need not know random_state; the data parties compare theirs in `agree_on_batches`.
    """
    return {
        **inputs.public_terms,
        "active party": inputs.roles.active,
        "data parties": list(inputs.roles.owners),
        "coordinator's name": inputs.roles.holder("coordinator"),
        "classes": max(2, inputs.n_classes),
    }


def begin(inputs: GlmInput, shape: tuple[int, int] | None, resumed: str | None) -> Setting:
    """Exchange sizes; `shape` is that of the own prepared columns, None at the coordinator.

    `resumed` is the id of the model whose training the active party resumes, None for a fresh one. Raises DataError
    when row counts differ, ConfigError when batches are too small to hide labels (safe mode).
    """
    party, roles, options = inputs.party, inputs.roles, inputs.options
    lead, leads = roles.active, party.name == roles.active
    sizes = _collect_sizes(inputs, shape, resumed) if leads and shape is not None else _send_size(inputs, shape)
    common = inputs.common.on(sizes.n_rows)
    cipher = options.cipher(common.fractional_bits, common.family)
    default = parameters.PAILLIER_DEFAULT_KEY_BITS if cipher == "paillier" else parameters.OU_DEFAULT_KEY_BITS
    setting = Setting(
        model_id=sizes.model_id,
        active=lead,
        owners=roles.owners,
        coordinator=roles.holder("coordinator"),
        n_rows=sizes.n_rows,
        n_columns=dict(zip(roles.owners, sizes.n_columns, strict=True)),
        batch_size=common.rows_of_batch(sizes.n_rows),
        fractional_bits=common.fractional_bits,
        cipher=cipher,
        key_bits=options.key_bits or default,
        insecure_test_key_bits=options.insecure_test_key_bits,
        weighted=sizes.weighted,
        resumes=sizes.resumes,
        solver=solver_of(common, type(options), len(roles.owners)),
        family=common.family,
        whole=common.whole_table,
    )
    if setting.batch_size < 1:
        raise ConfigError("expected tables with rows, got none")
    if shape is not None and (setting.n_rows, setting.n_columns[party.name]) != shape:
        raise PeerProtocolError(lead, "expected the sizes of this party's table", at="TrainingSizes")
    if options.mode == "safe":
        check_guards(setting, setting.batch_size)
    return setting


def check_guards(setting: Setting, batch_rows: int) -> None:
    """Raise ConfigError where gradients of `batch_rows` rows hide too little. Every party checks: each hides rows."""
    rows, passives, lead = setting.n_rows, setting.passives, setting.active
    check_batch_size(batch_rows, setting.n_columns[lead], lead, n_rows=rows, of_labels=False)
    # passive parties may pool what they see
    joined = sum(setting.n_columns[name] for name in passives)
    check_batch_size(batch_rows, joined, " and ".join(passives), n_rows=rows, of_labels=True)
    if setting.solver.memory:
        least = min(batch_rows, setting.hessian_batch_size)
        check_hessian_batch_size(least, max(setting.n_columns[lead], joined))


def _collect_sizes(inputs: GlmInput, shape: tuple[int, int], resumed: str | None) -> TrainingSizes:
    """Collect the passive parties' sizes and send all of them to all parties."""
    party, roles = inputs.party, inputs.roles
    received = {name: party.receive(name, TableSize) for name in inputs.others}
    watched = [rows.table.n_rows for rows in inputs.eval_sets]
    for name, size in received.items():
        if size.eval_rows != watched:
            raise DataError(
                f"expected eval sets of the same rows, got {watched} rows at {roles.active} and {size.eval_rows} at "
                f"{name}",
                public="the parties' eval sets do not have the same numbers of rows",
            )
        if size.n_rows != shape[0]:
            raise DataError(
                f"expected tables of the same rows, got {shape[0]} rows at {roles.active} and {size.n_rows} at {name}",
                public="the parties' tables do not have the same number of rows; align them",
            )
    columns = [shape[1] if name == roles.active else received[name].n_columns for name in roles.owners]
    model_id, weighted = resumed or secrets.token_hex(16), inputs.rows.weight is not None
    sizes = TrainingSizes(model_id, shape[0], columns, weighted, resumed is not None)
    for peer in party.peers:
        party.send(peer, sizes)
    return sizes


def _send_size(inputs: GlmInput, shape: tuple[int, int] | None) -> TrainingSizes:
    """Send the active party the own table's size, if there is one, and receive all sizes."""
    party, lead, n_owners = inputs.party, inputs.roles.active, len(inputs.roles.owners)
    if shape is not None:
        party.send(lead, TableSize(*shape, [rows.table.n_rows for rows in inputs.eval_sets]))
    sizes = party.receive(lead, TrainingSizes)
    if len(sizes.n_columns) != n_owners:
        raise PeerProtocolError(lead, f"expected columns of {n_owners} parties", at="TrainingSizes")
    return sizes


def pair_seeds(party: Party, others: Sequence[str]) -> dict[str, bytes]:
    """Agree with each of some parties on a seed that no other party has."""
    own = X25519PrivateKey.generate()
    keys = exchange(party, others, PairKey(own.public_key().public_bytes_raw()))
    return agree_with(own, {peer: keys[peer].key for peer in others}, party.job, party.name)


def masks_of(party: Party, setting: Setting, purpose: str = "") -> CancellingMasks:
    """Return fresh masks that cancel in sums over all data parties."""
    seeds = pair_seeds(party, setting.others(party.name))
    return CancellingMasks(party.job, f"{party.protocol} {purpose}".rstrip(), party.name, seeds)
