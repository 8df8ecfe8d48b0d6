"""Which side rows take in their nodes, by transfer: one party knows each row's node, the other the sides at all nodes.

A node's path has a bit for each level above it. Of each row the first party, the receiver, gets one correlated transfer
for each bit, q = t xor bit Delta. Rows of transfers are joined level by level, as x r + new in GF(2^128), so that the
sender's joined row less the receiver's is the path, as an element of the field, times Delta. The sender has the pad
H(q + p Delta) of every path p, the receiver that of its row's own path alone, H(t): at a row a side is read at one node
at most, whatever the receiver chose, and the sender does not learn at which. Joined rows serve all levels of a tree,
each level under tweaks that nothing else has.

A table has a bit for each row and each node that the sender splits, however long the paths are: no more than whole
columns of these splits would take, at any depth.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sealed.transfers import Bits, Transfers, Words
from treaty.crypto.transfer.extension import joined
from treaty.machine.arrays import pieces

_AT_ONCE = 32  # nodes whose pads are made in one pass over the rows


class Paths:
    """One end's transfers on the paths of `n_rows` rows in a tree, of which `levels` bits were transferred so far."""

    def __init__(self, transfers: Transfers, n_rows: int) -> None:
        self._transfers, self._rows, self.levels = transfers, np.zeros((n_rows, 2), np.uint64), 0

    def choose(self, bits: Bits, of: slice) -> tuple[Words, Words]:
        """Transfer the next bits of some rows as the receiver: return the message, and its choices under a mask."""
        message, flips, rows = self._transfers.choose_alone(bits)
        self._join(rows, of)
        return message, flips

    def accept(self, message: Words, flips: Words, of: slice) -> None:
        """Take what the receiver's `choose` has returned; CryptoError for a message of another shape."""
        self._join(self._transfers.accept_alone(message, flips, of.stop - of.start), of)

    def next_level(self) -> int:
        """Return the first tweak of a level's pads, one for each row: at both ends, once a level with a table."""
        return self._transfers.numbers(len(self._rows))

    def hide(self, sides: NDArray[np.uint8], paths: Bits, first: int, of: slice) -> NDArray[np.uint8]:
        """Return some rows' sides, packed bits uint8 (nodes, bytes), under the pads of nodes' `paths`, (nodes, levels).

        A path has its oldest bit first. All rows are in a node without one, the root, whose sides go as they are.
        """
        if not self.levels:
            return sides
        hidden, sender = np.empty_like(sides), self._transfers.sender
        offsets = joined((paths[:, ::-1, None].astype(np.uint64) * sender.delta).reshape(-1, 2), self.levels)
        for part in pieces(len(paths), _AT_ONCE):
            pads = sender.hash.low_bits(self._rows[of], first + of.start, offsets[part], 1)
            for number in range(part.start, part.stop):
                hidden[number] = sides[number] ^ np.packbits(
                    (pads >> np.uint32(number - part.start)).astype(np.uint8) & 1
                )
        return hidden

    def own_pads(self, first: int) -> Bits:
        """Return the pad of each row's own path at the receiver, uint8 (n_rows,)."""
        if not self.levels:
            return np.zeros(len(self._rows), np.uint8)
        own = self._transfers.receiver.hash
        return own.low_bits(self._rows, first, np.zeros((1, 2), np.uint64), 1).astype(np.uint8)

    def _join(self, rows: Words, of: slice) -> None:
        self._rows[of] = joined(np.stack([rows, self._rows[of]], axis=1).reshape(-1, 2), 2)
