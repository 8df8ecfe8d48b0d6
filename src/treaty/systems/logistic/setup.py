"""What the parties of a logistic regression settle before training: terms, sizes, guards and pair keys.

=====================  ========================  ==============================================================
message                from -> to                content
=====================  ========================  ==============================================================
`Described`            host -> guest             rows and prepared columns of its table
`Begin`                guest -> all              those of all, model id
`PairKey`              data parties, all pairs   an X25519 key, for masks that cancel
=====================  ========================  ==============================================================

Then data parties settle the batches, see `linear_batches`. The coordinator, who brings no data, is sent `Begin` alone:
it knows how many rows and columns there are, not which rows are in a batch. All data parties talk to each other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import agree as agree_on_pair
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.linear.batches import check_batch_size
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.messaging.agreement import Term
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.systems.linear_options import LinearOptions

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

WEIGHT_BITS = COLUMN_FRACTION + 5
"""Of a column's signed entries, which are clipped at 10."""

MARGIN_BITS = 10
"""A party's part of a margin lies below 2^10, or training is given up: it has diverged."""

LATTICE_FRACTION = 40
"""Most fractional_bits under the lattice map."""

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class Described(Message):
    """A host's table. Tells how many rows and prepared columns it has."""

    n_rows: _Size
    n_columns: _Size


class Begin(Message):
    """The model's id and all tables' sizes; columns by data party, in the job's order, the intercept among them."""

    model_id: str
    n_rows: _Size
    n_columns: list[_Size]


class PairKey(Message):
    """A public key for this job. Tells nothing."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """What all parties know of a training.

    Parameters
    ----------
    model_id : str
    guest : str
        The label holder.
    parties : tuple of str
        Those with data, in the job's order.
    coordinator : str or None
    n_rows : int
    n_columns : dict of str to int
        Prepared columns of each data party, the guest's with the intercept.
    batch_size : int
        Rows in a batch, not more than there are.
    fractional_bits : int
    cipher : {"lattice", "ou", "paillier"}
    """

    model_id: str
    guest: str
    parties: tuple[str, ...]
    coordinator: str | None
    n_rows: int
    n_columns: dict[str, int]
    batch_size: int
    fractional_bits: int
    cipher: str

    @property
    def hosts(self) -> list[str]:
        """Data parties but the guest."""
        return [name for name in self.parties if name != self.guest]

    @property
    def n_batches(self) -> int:
        """Batches of an epoch; rows that do not fill a last one are left out."""
        return self.n_rows // self.batch_size

    @property
    def vector_bits(self) -> int:
        """Of the signed entries of a party's hidden vector."""
        return self.fractional_bits + MARGIN_BITS + 2

    @property
    def largest_loss(self) -> int:
        """Bound of a party's own part of an epoch's loss, in units of 2^-(fractional_bits + 2), summed over rows."""
        return 1 << (self.fractional_bits + 2 * MARGIN_BITS + 3 + self.n_rows.bit_length())

    @property
    def loss_bits(self) -> int:
        """Of the signed sum of such parts, with their offsets."""
        return self.largest_loss.bit_length() + 2 + len(self.parties).bit_length()

    def others(self, name: str) -> list[str]:
        """Return the data parties but one."""
        return [party for party in self.parties if party != name]

    def fixed(self, margins: Floats) -> Integers:
        """Parts of margins as integers.

        Raises
        ------
        DataError
            When one is too large: training has diverged.
        """
        if not np.all(np.abs(margins) < 1 << MARGIN_BITS):
            raise DataError(
                f"training diverged: a margin exceeds {1 << MARGIN_BITS}; lower learning_rate",
                public="training diverged; lower learning_rate",
            )
        return np.rint(margins * 2.0**self.fractional_bits).astype(np.int64)

    def mean_over_batch(self, products: Sequence[int]) -> Floats:
        """X^T (4 d) in integers, over a batch, as the mean of d x."""
        unit = 2.0 ** -(self.fractional_bits + COLUMN_FRACTION + 2)
        return np.array([float(product) for product in products], np.float64) * unit / self.batch_size


def terms(options: LinearOptions, guest: str, parties: Sequence[str], coordinator: str | None) -> dict[str, Term]:
    """Return what all must agree on before anything is sent: the roles, and every option but random_state.

    Of that the coordinator need not know; data parties compare theirs in `agree_on_batches`.
    """
    public = {name: getattr(options, name) for name in options.__struct_fields__ if name != "random_state"}
    return {**public, "guest": guest, "data parties": list(parties), "coordinator's name": coordinator}


def check_roles(options: LinearOptions, guest: str, parties: Sequence[str], coordinator: str | None) -> None:
    """Refuse roles and options that do not go together.

    Raises
    ------
    ConfigError
    """
    if options.mode == "paper" and not options.allow_insecure:
        raise ConfigError(
            "mode='paper' shows the coordinator every gradient, step and loss, and lets hosts solve for labels; it "
            "needs allow_insecure=True of every party"
        )
    if options.mode == "paper" and (not options.has_coordinator or cipher_of(options) == "lattice"):
        raise ConfigError("mode='paper' is a coordinator's, with encryption 'paillier' or 'ou'")
    if (coordinator is None) == options.has_coordinator:
        raise ConfigError(
            "expected a coordinator, a party without data, with coordinator=True, and none with coordinator=False"
        )
    if guest not in parties or len(set(parties)) != len(parties) or len(parties) < 2:
        raise ConfigError(f"expected two data parties or more, the label holder among them, got {', '.join(parties)}")
    if coordinator in parties:
        raise ConfigError(f"expected a coordinator that brings no data, got {coordinator}, which does")
    if cipher_of(options) == "lattice" and options.fractional_bits > LATTICE_FRACTION:
        raise ConfigError(
            f"expected fractional_bits of at most {LATTICE_FRACTION} under the lattice map, got "
            f'{options.fractional_bits}; take encryption="ou"'
        )


def cipher_of(options: LinearOptions) -> str:
    """Return the cipher that the options mean.

    Left open, it is the paper's in paper mode; the lattice map, which leaves the coordinator without a key, where there
    is one; and without, or where a key is named, Okamoto-Uchiyama, whose columns are sent once, and hardly anything
    after that.
    """
    if options.encryption not in (None, "auto"):
        return options.encryption
    if options.mode == "paper":
        return "paillier"
    keyed = options.key_bits or options.insecure_test_key_bits or options.fractional_bits > LATTICE_FRACTION
    return "ou" if keyed or not options.has_coordinator else "lattice"


def begin(
    party: Party,
    options: LinearOptions,
    guest: str,
    parties: Sequence[str],
    coordinator: str | None,
    shape: tuple[int, int] | None,
) -> Setting:
    """Tell sizes and learn everybody's; `shape` is that of the own prepared columns, None at the coordinator.

    Raises
    ------
    ConfigError
        When row counts differ, or batches are too small to hide labels (safe mode).
    """
    if party.name == guest and shape is not None:
        told = {name: party.receive(name, Described) for name in parties if name != guest}
        columns = {name: shape[1] if name == guest else told[name].n_columns for name in parties}
        other = {name: described.n_rows for name, described in told.items() if described.n_rows != shape[0]}
        if other:
            name, rows = next(iter(other.items()))
            raise DataError(
                f"expected tables of the same rows, got {shape[0]} rows at {guest} and {rows} at {name}",
                public="the parties' tables do not have the same number of rows; align them",
            )
        begun = Begin(secrets.token_hex(16), shape[0], list(columns.values()))
        for peer in party.peers:
            party.send(peer, begun)
    else:
        if shape is not None:
            party.send(guest, Described(*shape))
        begun = party.receive(guest, Begin)
        if len(begun.n_columns) != len(parties):
            raise PeerProtocolError(guest, f"expected columns of {len(parties)} parties - at Begin from {guest}")
    setting = Setting(
        model_id=begun.model_id,
        guest=guest,
        parties=tuple(parties),
        coordinator=coordinator,
        n_rows=begun.n_rows,
        n_columns=dict(zip(parties, begun.n_columns, strict=True)),
        batch_size=min(options.batch_size, begun.n_rows),
        fractional_bits=options.fractional_bits,
        cipher=cipher_of(options),
    )
    if setting.batch_size < 1:
        raise ConfigError("expected tables with rows, got none")
    if shape is not None and (setting.n_rows, setting.n_columns[party.name]) != shape:
        raise PeerProtocolError(guest, f"expected the sizes of this party's table - at Begin from {guest}")
    if options.mode == "safe":  # everyone checks: each hides something from the others
        rows = setting.n_rows
        check_batch_size(setting.batch_size, setting.n_columns[guest], guest, n_rows=rows, of_labels=False)
        of_hosts = sum(setting.n_columns[host] for host in setting.hosts)  # they may put what they see together
        check_batch_size(setting.batch_size, of_hosts, " and ".join(setting.hosts), n_rows=rows, of_labels=True)
    return setting


def pair_seeds(party: Party, setting: Setting) -> dict[str, bytes]:
    """Agree with every other data party on a seed that nobody else has, the coordinator neither."""
    own = X25519PrivateKey.generate()
    others = setting.others(party.name)
    for peer in others:
        party.send(peer, PairKey(own.public_key().public_bytes_raw()))
    return {
        peer: agree_on_pair(own, party.receive(peer, PairKey).key, party.job, *sorted((party.name, peer)))
        for peer in others
    }
