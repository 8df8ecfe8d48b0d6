"""Each party's columns times the sum of all parties' vectors, under the lattice map between every pair of parties.

As in `coordinated`, party k gets X_k^T (sum of all v_j). Under the lattice map of `crypto.sums.hidden_vectors` j
asks k for X_k^T v_j, opens it under a mask that k has added, over the whole ring, and returns its share, which is
uniform:

=================  =================  ======================================================  =======================
message            from -> to         content                                                 protection
=================  =================  ======================================================  =======================
`ColumnsHint`      each -> each       the hints of its columns, block by block of rows        lattice
`VectorQuery`      j -> all others    v_j over a block of rows, zero outside the batch        lattice
`HiddenProducts`   k -> j             X_k^T v_j + R_kj                                        mask
`ProductShares`    j -> k             the opened numbers, + masks that cancel over all j      masks
=================  =================  ======================================================  =======================

There is no key and no third party; a coordinator, if there is one, has no part in it. The active party has its negated
labels among its columns: of their products passive parties keep shares until an epoch's end, and return the sum with
their own part of the loss (see `coordinated`), so that the active party learns that sum alone.

Rows are taken in the order of the batches, in blocks of as many whole batches as the ring has coefficients for, so that
a batch costs the same in a table of any length. Data parties know the batches. A product over rows of several blocks is
the sum of those over each, of which nobody is shown one alone. *Assumptions*: as docs/lattice.md has them;
honest-but-curious parties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from treaty.cluster.sums import ClusterVectorServer
from treaty.crypto.keystream import CancellingMasks
from treaty.crypto.lattice.parameters import DEGREE
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums.hidden_vectors import VectorClient, VectorServer, signed, vectors_parameters
from treaty.linear.preparation import COLUMN_FRACTION, LARGEST
from treaty.machine.arrays import Integers, pieces
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Arrays, Message, pack, unpack, view
from treaty.systems.logistic.batches import joint_seed
from treaty.systems.logistic.coordinated import exact_products
from treaty.systems.logistic.setup import GlmInput, OwnData, Setting

WEIGHT_BOUND = int(LARGEST) << COLUMN_FRACTION


class ColumnsHint(Message):
    """A party's hint of its columns in a block of rows, one message after the other. Tells nothing."""

    leakage: ClassVar = MessageLeakage("the sender's columns, under the lattice map", "encrypted")

    payload: Arrays


class VectorQuery(Message):
    """An encrypted vector over a block of rows. Tells nothing."""

    leakage: ClassVar = MessageLeakage("the sender's part of residuals, under the lattice map", "encrypted")

    payload: Arrays


class HiddenProducts(Message):
    """Masked products, which the receiver opens to uniform numbers. Tells nothing."""

    leakage: ClassVar = MessageLeakage("uniform numbers: products under masks", "masked")

    payload: Arrays


class ProductShares(Message):
    """Opened numbers, uint64 (n, limbs). Tell the party that masked them the products, summed over all senders."""

    leakage: ClassVar = MessageLeakage(
        "its own gradient: the products of its columns with the hidden vector, summed over all parties",
        "aggregated",
        guard="batch_size",
    )

    numbers: Array


def blocks_of(batches: Integers) -> list[Integers]:
    """Cut batches of row numbers (n_batches, batch_size) into blocks, each the rows of some whole batches."""
    return [batches[part].reshape(-1) for part in pieces(len(batches), max(1, DEGREE // batches.shape[1]))]


def blocks_of_rows(n_rows: int) -> list[Integers]:
    """Cut a whole table into blocks of row numbers."""
    return [np.arange(part.start, part.stop) for part in pieces(n_rows, DEGREE)]


class LatticeProducts:
    """A data party's end; `blocks` are of row numbers, `masks` cancel in sums over data parties."""

    def __init__(
        self, inputs: GlmInput, setting: Setting, own: OwnData, blocks: Sequence[Integers], masks: CancellingMasks
    ) -> None:
        party, threads = inputs.party, inputs.threads
        self._party, self._setting, self._columns, self._masks = party, setting, own.columns, masks
        self._others = others = setting.others(party.name)
        seed = joint_seed(party, others, "lattice")
        length, sum_bits = max(map(len, blocks)), setting.vector_bits + len(setting.owners).bit_length()
        self._parameters = vectors_parameters(length, WEIGHT_BOUND, sum_bits, setting.batch_size)
        self._bits = self._parameters.message_bits
        matrix = own.columns.T if own.labels is None else np.vstack([own.columns.T, -own.labels])
        self._block, self._position = (np.full(setting.n_rows, -1, np.int64) for _ in range(2))
        self._servers = []
        for number, rows in enumerate(blocks):
            self._block[rows], self._position[rows] = number, np.arange(len(rows))
            block = np.zeros((len(matrix), length), np.int64)  # the last one may be shorter
            block[:, : len(rows)] = matrix[:, rows]
            given = self._parameters, block, seed
            shards = inputs.shards
            self._servers.append(
                VectorServer(*given, threads=threads)
                if shards is None
                else ClusterVectorServer(shards, number, *given, threads=threads)
            )
        self._client = VectorClient(self._parameters, setting.vector_bits, seed, length, threads=threads)
        for number, server in enumerate(self._servers):  # in turn: nobody has many of them unread
            hint = ColumnsHint(pack(server.hint()))
            for peer in others:
                party.send(peer, hint)
            for peer in others:
                told = unpack(party.receive(peer, ColumnsHint).payload, peer, "ColumnsHint")
                self._client.accept_hint(peer, number, told, self._count(peer))
        self._loss_shares = 0
        self._place = 0

    def _count(self, name: str) -> int:
        """Return how many columns of a party are under the map, the active party's labels among them."""
        return self._setting.n_columns[name] + self._labelled(name)

    def _labelled(self, name: str) -> bool:
        return name == self._setting.active and not self._setting.whole

    def times(self, rows: Integers, own: Integers, *, counted: bool) -> list[int]:
        """Return the own columns' products with the sum of all vectors; see `CoordinatedProducts.times`."""
        party, bits = self._party, self._bits
        self._place += 1
        sums = [0] * self._count(party.name)
        opened = {peer: [0] * self._count(peer) for peer in self._others}
        of_rows = self._block[rows]
        for block in np.unique(of_rows).tolist():
            sums = _added(sums, self._in_block(block, rows[of_rows == block], own[of_rows == block], opened))
        for peer, shares in opened.items():
            if self._labelled(peer):
                self._loss_shares += shares.pop() * counted
            self._return(peer, shares, f"to {peer}")
        n_columns = self._columns.shape[1]
        if self._labelled(party.name):
            self._loss_shares += sums.pop() * counted
        for peer in self._others:
            sums = _added(sums, self._share(peer, n_columns))
        products = exact_products(self._columns[rows], own)
        return [signed(theirs, bits) + mine for theirs, mine in zip(sums, products, strict=True)]

    def _in_block(self, block: int, rows: Integers, own: Integers, opened: dict[str, list[int]]) -> list[int]:
        """Ask and answer about rows of one block; add to what is opened, and return the own shares of products."""
        party = self._party
        query = VectorQuery(pack(self._client.query(self._position[rows], own)))
        for peer in self._others:
            party.send(peer, query)
        sums = [0] * self._count(party.name)
        for peer in self._others:
            asked = unpack(party.receive(peer, VectorQuery).payload, peer, "VectorQuery")
            answer, shares = self._servers[block].answer(asked)
            party.send(peer, HiddenProducts(pack(answer)))
            sums = _added(sums, shares)
        for peer in self._others:
            hidden = unpack(party.receive(peer, HiddenProducts).payload, peer, "HiddenProducts")
            opened[peer] = _added(opened[peer], self._client.open(peer, block, hidden))
        return sums

    def _return(self, peer: str, shares: list[int], purpose: str) -> None:
        """Send an owner the opened numbers of its columns, under masks that cancel over all senders."""
        beside = [other for other in self._others if other != peer]
        masks = self._masks.draw(len(shares), self._bits, self._place, purpose, beside)
        numbers = [(share + mask) % (1 << self._bits) for share, mask in zip(shares, masks, strict=True)]
        self._party.send(peer, ProductShares(Array.of(to_words(numbers, -(-self._bits // 64)))))

    def _share(self, peer: str, count: int) -> list[int]:
        answer, shape = self._party.receive(peer, ProductShares).numbers, (count, -(-self._bits // 64))
        return from_words(view(answer, np.uint64, shape, peer=peer, what="ProductShares.numbers"))

    def loss(self, own: int) -> int | None:
        """Add up an epoch's loss; see `CoordinatedProducts.loss`."""
        shares, self._loss_shares = self._loss_shares, 0
        if self._party.name != self._setting.active:
            self._return(self._setting.active, [shares + own], "loss")
            return None
        theirs = sum(self._share(peer, 1)[0] for peer in self._others)
        return signed(own + shares + theirs, self._bits)


def _added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]
