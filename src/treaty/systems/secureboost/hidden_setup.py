"""What both parties of a training on shared rows have before the first tree: columns, a seed, hints and transfers."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.shared_sums import SharedSums, shared_parameters
from treaty.crypto.transfer.hidden_best import SplitTerms, quotient_bits
from treaty.crypto.transfer.sealed_sums import Widths
from treaty.crypto.transfer.stock import Steps, open_transfers, take
from treaty.data.binning import MOST_BINS, MOST_CATEGORIES
from treaty.errors import ConfigError, CryptoError, PeerProtocolError
from treaty.machine.arrays import Flags, Int32s
from treaty.messaging.messages import MOST_COLUMNS, MOST_SLOTS, Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.systems.secureboost.hidden_tree import HiddenEnd, LossShares
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import bin_own_columns
from treaty.systems.vertical.sealed import compute
from treaty.systems.vertical.sealed_candidates import Candidates
from treaty.trees.logistic_pieces import LogisticPieces, pieces_of
from treaty.trees.number_losses import SquaredErrorSteps
from treaty.trees.splits import SplitRules

HiddenLoss = LogisticPieces | SquaredErrorSteps
"""Losses whose derivatives are computed on shares."""


@leaks("how many bins each column of the sender has, and which columns have categories or missing values", "control")
class HiddenColumns(Message):
    """The sender's columns: first slots int32 (n_features + 1,), and bool (n_features,) twice."""

    offsets: Array
    categorical: Array
    missing: Array


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One party's columns: `offsets` are the features' first slots."""

    offsets: Int32s
    categorical: Flags
    missing: Flags

    def candidates(self, columns: Int32s | None = None) -> Candidates:
        """Return the candidates of some columns, by default all."""
        columns = np.arange(len(self.categorical), dtype=np.int32) if columns is None else columns
        # a category alone against the rest
        return Candidates(self.offsets, self.categorical, self.missing, columns, MOST_CATEGORIES + 2)


class Columns:
    """Own columns, and the layout of the other party's."""

    def __init__(self, inputs: RoleInput) -> None:
        self.bins, self.codes = bin_own_columns(inputs)
        categorical = inputs.rows.table.schema.categorical
        missing = (self.codes == self.bins.n_bins).any(axis=0)
        most = inputs.common.onehot_below
        if many := [name for name, of, bins in zip(
            inputs.rows.table.schema.names, categorical, self.bins.n_bins, strict=True) if of and bins >= most
        ]:  # fmt: skip
            raise ConfigError(
                f'membership="hidden" splits categories one against the rest, and {many[0]} has {most} or more: raise '
                "max_cat_to_onehot"
            )
        self.own = SlotLayout(self.bins.offsets, categorical, missing)

    def exchange(self, party: Party) -> None:
        """Send the other party the layout of own columns, and take its."""
        (peer,), own = party.peers, self.own
        party.send(peer, HiddenColumns(*map(Array.of, (own.offsets, own.categorical, own.missing))))
        came, what = party.receive(peer, HiddenColumns), "HiddenColumns"
        categorical = view(came.categorical, np.bool_, (None,), peer=peer, what=f"{what}.categorical")
        count = len(categorical)
        offsets = view(came.offsets, np.int32, (count + 1,), peer=peer, what=f"{what}.offsets")
        sizes = np.diff(offsets.astype(np.int64))
        most = np.where(categorical, MOST_CATEGORIES, MOST_BINS) + 1
        fits = count <= MOST_COLUMNS and offsets[0] == 0 and offsets[-1] <= MOST_SLOTS
        if not fits or np.any(sizes < 1) or np.any(sizes > most):
            raise PeerProtocolError(peer, "expected the slots of columns", at=f"{what}.offsets")
        missing = view(came.missing, np.bool_, (count,), peer=peer, what=f"{what}.missing")
        self.other = SlotLayout(offsets.copy(), categorical.copy(), missing.copy())
        if not len(own.categorical) + count:
            raise ConfigError("expected columns at one of the parties, got none")

    def of_tree(self, end: HiddenEnd, columns: tuple[Int32s, Int32s]) -> HiddenEnd:
        """Return the end for a tree on some columns, the active party's and the passive one's."""
        both = [self.own.candidates(columns[end.role]), self.other.candidates(columns[1 - end.role])]
        return replace(end, candidates=both if end.place == 0 else both[::-1])


def losses_of(
    objective: HiddenLoss, y: NDArray[np.float64] | None = None, weight: NDArray[np.float64] | None = None
) -> list[LossShares]:
    """Return each output's loss of rows of which the active party knows labels and weights."""
    fraction, heaviest = objective.fractional_bits, int(objective.weight_bound)
    weights = None if weight is None else weight.astype(np.int64)
    if isinstance(objective, SquaredErrorSteps):
        labels = None if y is None else objective.in_steps(y).astype(np.int64)
        return [LossShares(None, fraction, heaviest, labels, weights)]
    classes = [1] if objective.n_outputs == 1 else range(objective.n_outputs)
    known = [None if y is None else (y == k).astype(np.int64) << fraction for k in classes]
    return [LossShares.logistic(pieces_of(fraction), fraction, heaviest, of, weights) for of in known]


def make_ends(
    inputs: RoleInput, columns: Columns, bounds: SumsBounds, rules: SplitRules, step: int, losses: list[LossShares],
    *, short: bool = False,
) -> list[HiddenEnd]:  # fmt: skip
    """Draw a seed with the other party, exchange hints and make transfers; return an end for each class.

    Transfers are `short` if the active party says so.
    """
    party, role = inputs.party, int(inputs.party.name != inputs.roles.active)
    try:
        quotient_bits(Widths.of(bounds, rules.ridge), rules.whole_rate)
        shared_parameters(bounds)
    except CryptoError as error:
        raise ConfigError(f'membership="hidden" cannot hold these sums: {error}') from None
    seed, others = compute(party, joint_seed()), int(columns.other.offsets[-1])
    sums = SharedSums(bounds, columns.codes, columns.own.offsets, others, seed, inputs.threads)
    compute(party, sums.exchange_hints(partial(inputs.observers.set_up, "hints")))
    place = inputs.roles.owners.index(party.name)
    both = [columns.own.candidates(), columns.other.candidates()]
    end = HiddenEnd(
        role, compute(party, open_transfers(role, short=short)), sums, bounds, losses[0], columns.codes,
        both if place == 0 else both[::-1], place,
        SplitTerms(rules.ridge, rules.least_hess, rules.min_child_samples, int(rules.threshold_in_units)),
        rules.whole_rate, rules.max_depth, step,
    )  # fmt: skip
    return [replace(end, loss=loss) for loss in losses]


def joint_seed() -> Steps[bytes]:
    """Draw a public seed of 32 bytes that is uniform if one of the parties draws its share honestly."""
    own = secrets.token_bytes(32)
    sent = np.frombuffer(hashlib.sha256(b"treaty hidden seed\0" + own).digest(), np.uint8)
    (committed,) = take((yield [sent]), (np.uint8, (32,)))
    committed = committed.copy()
    (came,) = take((yield [np.frombuffer(own, np.uint8)]), (np.uint8, (32,)))
    if hashlib.sha256(b"treaty hidden seed\0" + came.tobytes()).digest() != committed.tobytes():
        raise CryptoError("expected the share that was committed to")
    if came.tobytes() == own:
        raise CryptoError("expected another share than the own one")
    # in an order that both know
    return hashlib.sha256(b"treaty hidden seed\0" + b"".join(sorted([own, came.tobytes()]))).digest()
