"""Columns of the two parties of a training on shared rows: own ones, and the layout of the other party's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from treaty.data.binning import MOST_BINS, MOST_CATEGORIES
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Flags, Int32s
from treaty.messaging.messages import MOST_COLUMNS, MOST_SLOTS, Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.systems.secureboost.hidden_tree import HiddenEnd
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import bin_own_columns
from treaty.systems.vertical.sealed_candidates import Candidates


@leaks("how many bins each of its columns has, which hold categories, and which have missing values", "control")
class HiddenColumns(Message):
    """The sender's columns: first slots int32 (n_features + 1,), and bool (n_features,) twice."""

    offsets: Array
    categorical: Array
    missing: Array


@dataclass(frozen=True, slots=True)
class Layout:
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
        self.own = Layout(self.bins.offsets, categorical, missing)

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
        self.other = Layout(offsets.copy(), categorical.copy(), missing.copy())
        if not len(own.categorical) + count:
            raise ConfigError("expected columns at one of the parties, got none")

    def of_tree(self, end: HiddenEnd, columns: tuple[Int32s, Int32s]) -> HiddenEnd:
        """Return the end for a tree on some columns, the active party's and the passive one's."""
        both = [self.own.candidates(columns[end.role]), self.other.candidates(columns[1 - end.role])]
        return replace(end, candidates=both if end.place == 0 else both[::-1])
