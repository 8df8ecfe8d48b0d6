"""Each party's columns times the sum of all parties' vectors, without a third party: by own keys or the lattice map.

As in `coordinated`, party k gets X_k^T (sum of all v_j). Masks hide, where there are several senders, which of them
sent what.

**Own keys.** Every data party gives the others its columns, encrypted under its own key, once. A party with a vector
multiplies these by it and returns the product to the owner of the columns, which alone can decrypt it: no row of any
vector is ever sent. No two parties that hide something from a third may collude.

**Lattice map** (`crypto.sums.hidden_vectors`), between every pair of parties. Party j asks k for X_k^T v_j, opens it
under a mask that k has added, over the whole ring, and returns its share, which is uniform. There is no key; a
coordinator, if there is one, has no part in it. The active party has its negated labels among its columns: of their
products passive parties keep shares until an epoch's end, and return the sum with their own part of the loss, so that
the active party learns that sum alone. Rows are taken in the order of the batches, in blocks of as many whole batches
as the ring has coefficients for, so that a batch costs the same in a table of any length. A product over rows of
several blocks is the sum of those over each, of which no party learns one alone.

*Assumptions*: honest-but-curious parties; the cipher, or those of docs/lattice.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from treaty.cluster.sums import ClusterVectorServer
from treaty.crypto.keystream import CancellingMasks
from treaty.crypto.parameters import DEGREE
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums.hidden_vectors import (
    Fields,
    HiddenMatrix,
    Hider,
    VectorClient,
    VectorServer,
    hide_rows,
    product_bits,
    signed,
    vectors_parameters,
)
from treaty.linear.preparation import COLUMN_FRACTION, LARGEST
from treaty.machine.arrays import Integers, pieces
from treaty.messaging.exchanges import joint_seed, take_rows
from treaty.messaging.messages import Array, Arrays, Message, leaks, pack, put_together, row_pieces, unpack, view
from treaty.messaging.party import Party
from treaty.systems.logistic import coordinated
from treaty.systems.logistic.setup import WEIGHT_BITS, GlmInput, OwnData, Setting, diverged


@leaks("the sender's columns, and labels, under its own key", "encrypted")
class HiddenRows(Message):
    """A party's public key and its columns, uint64 (rows, plaintexts, words), of many rows the next ones.

    `labels` are the active party's, uint64 (rows, 1, words), where these are needed.
    """

    key: Arrays
    rows: Array
    labels: Array | None


@leaks(coordinated.OWN_GRADIENT, "aggregated", guard="batch_size")
class EncryptedProducts(Message):
    """Products uint64 (plaintexts, words) under the receiver's key, with masks that cancel over all senders."""

    values: Array


class OwnKeyProducts:
    """A data party's part, under its own key; `masks` cancel in sums over all data parties."""

    def __init__(self, party: Party, setting: Setting, own: OwnData, masks: CancellingMasks, threads: int) -> None:
        self._party, self._setting, self._columns, self._labels = party, setting, own.columns, own.labels
        self._masks, self._threads = masks, threads
        self._key = coordinated.make_key(setting)
        self._senders, passives = len(setting.owners) - 1, len(setting.passives)
        self._loss_masks = passives if passives > 1 else 0
        self._fields = self._matrix_fields(self._key.public.plaintext_bits)
        self._theirs: dict[str, HiddenMatrix] = {}
        # a piece of each in turn, so that no party has many of them unread
        for _ in zip_longest(self._hide(own), *map(self._read, setting.others(party.name))):
            pass
        # an epoch's rows and margins, at a passive party; the sum of its labels, at the active one
        self._seen: list[tuple[Integers, Integers]] = []
        self._label_sum = 0
        self._place = 0

    def _matrix_fields(self, plaintext_bits: int) -> Fields:
        bits = product_bits(self._setting.batch_size, WEIGHT_BITS, self._setting.vector_bits)
        # what a single sender adds need not be hidden from the owner
        masks = self._senders if self._senders > 1 else 0
        return Fields.of(bits + self._senders.bit_length(), plaintext_bits, masks=masks)

    def _hide(self, own: OwnData) -> Iterator[None]:
        """Send the others the own columns and labels, encrypted, yielding after each piece."""
        setting, public, key = self._setting, self._key.public, pack(self._key.public.to_payload())
        of_loss = coordinated.loss_fields(setting, public.plaintext_bits, self._loss_masks)
        plaintexts = -(-own.columns.shape[1] // self._fields.per_plaintext) + (own.labels is not None)
        for of in row_pieces(setting.n_rows, 64 * public.modulus.words * plaintexts):
            rows, labels = hide_rows(self._key, own.columns[of], WEIGHT_BITS, self._fields, self._threads), None
            if own.labels is not None:
                labels = Array.of(hide_rows(self._key, -own.labels[of, np.newaxis], 2, of_loss, self._threads))
            hidden = HiddenRows(key, Array.of(rows), labels)
            for peer in setting.others(self._party.name):
                self._party.send(peer, hidden)
            yield

    def _read(self, peer: str) -> Iterator[None]:
        """Receive a party's columns, and the active party's labels, yielding after each piece."""
        setting, first = self._setting, self._party.receive(peer, HiddenRows)
        key = coordinated.read_key(first.key, setting, peer, "HiddenRows.key")
        hider = Hider(key, key.plaintext_bits - 2, self._threads)
        fields, words = self._matrix_fields(key.plaintext_bits), key.modulus.words
        plaintexts = -(-setting.n_columns[peer] // fields.per_plaintext)
        with_labels = peer == setting.active and not setting.whole
        rows, labels = list[coordinated.Words](), list[coordinated.Words]()
        bits = 64 * words * (plaintexts + with_labels)
        for of, piece in take_rows(self._party, peer, setting.n_rows, bits, HiddenRows, first):
            count = of.stop - of.start
            rows.append(coordinated.ciphertexts(piece.rows, hider, (count, plaintexts), peer, "HiddenRows.rows"))
            if with_labels:
                of_rows = piece.labels or Array.of(np.empty(0, np.uint64))
                labels.append(coordinated.ciphertexts(of_rows, hider, (count, 1), peer, "HiddenRows.labels"))
            yield
        if with_labels:
            self._loss_fields = of_loss = coordinated.loss_fields(setting, key.plaintext_bits, self._loss_masks)
            of_labels = put_together(labels)
            self._hidden_labels = HiddenMatrix(hider, of_labels, 2, setting.vector_bits, of_loss, self._threads)
        whole = put_together(rows)
        self._theirs[peer] = HiddenMatrix(hider, whole, WEIGHT_BITS, setting.vector_bits, fields, self._threads)

    def times(self, rows: Integers, own: Integers, *, counted: bool) -> list[int]:
        """Return the own columns' products with the sum of all parties' vectors; see `CoordinatedProducts.times`."""
        party, setting = self._party, self._setting
        others = setting.others(party.name)
        self._place += 1
        for peer in others:
            fields, count = self._theirs[peer].fields, setting.n_columns[peer]
            senders = [other for other in others if other != peer]
            added = self._masks_of(count, fields, f"to {peer}", self._place, senders)
            party.send(peer, EncryptedProducts(Array.of(self._theirs[peer].times(rows, own, added))))
        sums = [0] * self._columns.shape[1]
        for peer in others:
            for k, number in enumerate(self._opened(peer, len(sums), self._fields)):
                sums[k] += number
        if counted and self._labels is None:
            self._seen.append((rows, own))
        elif counted and self._labels is not None:
            self._label_sum += int(self._labels[rows].sum())
        found = self._unmasked(sums, self._fields, self._senders)
        mine = self._columns[rows]
        # every entry of each sender's vector was shifted to be positive
        offset = self._senders << (setting.vector_bits - 1)
        products = coordinated.exact_products(mine, own)
        return [
            theirs - offset * of_column + product
            for theirs, of_column, product in zip(found, mine.sum(axis=0).tolist(), products, strict=True)
        ]

    def loss(self, own: int) -> int | None:
        """Add up an epoch's loss; see `CoordinatedProducts.loss`."""
        party, setting, place = self._party, self._setting, self._party.round
        if self._labels is None:
            if abs(own) > setting.largest_loss:
                raise diverged("the loss is too large")
            rows, margins = (np.concatenate(seen) for seen in zip(*self._seen, strict=True))
            self._seen = []
            fields = self._loss_fields
            senders = [peer for peer in setting.passives if peer != party.name]
            added = self._masks_of(1, fields, "loss", place, senders)
            values = self._hidden_labels.times(rows, margins, [added[0] + own + setting.largest_loss])
            party.send(setting.active, EncryptedProducts(Array.of(values)))
            return None
        fields = coordinated.loss_fields(setting, self._key.public.plaintext_bits, self._loss_masks)
        passives = len(setting.passives)
        sums = sum(self._opened(peer, 1, fields)[0] for peer in setting.passives)
        found = self._unmasked([sums], fields, passives)[0]
        offset, self._label_sum = -self._label_sum << (setting.vector_bits - 1), 0
        return own + found - passives * (offset + setting.largest_loss)

    def _masks_of(self, count: int, fields: Fields, purpose: str, place: int, others: Sequence[str]) -> list[int]:
        """Draw masks of 0 or more; with those of the other senders they add up to a constant."""
        if not others:
            return [0] * count
        drawn = self._masks.draw(count, fields.mask_bits, place, purpose, others)
        return [number + (len(others) << fields.mask_bits) for number in drawn]

    def _opened(self, peer: str, count: int, fields: Fields) -> list[int]:
        values, what = self._party.receive(peer, EncryptedProducts).values, "EncryptedProducts.values"
        return coordinated.open_fields(self._key, values, count, fields, self._threads, peer, what)

    def _unmasked(self, sums: Sequence[int], fields: Fields, senders: int) -> list[int]:
        """Subtract all senders' masks and offsets from the sums of their numbers."""
        half = 1 << (fields.bits - 1)
        constant = (senders - 1) * senders << fields.mask_bits if senders > 1 else 0
        return fields.signed([number - (senders - 1) * half for number in sums], [constant] * len(sums))


WEIGHT_BOUND = int(LARGEST) << COLUMN_FRACTION


@leaks("the sender's columns, under the lattice map", "encrypted")
class ColumnsHint(Message):
    """A party's hint of its columns in a block of rows, one message after the other."""

    payload: Arrays


@leaks("the sender's part of residuals, under the lattice map", "encrypted")
class VectorQuery(Message):
    """An encrypted vector over a block of rows, zero outside the batch."""

    payload: Arrays


@leaks("uniform numbers: products under masks", "masked")
class HiddenProducts(Message):
    """Masked products, which the receiver opens to uniform numbers."""

    payload: Arrays


@leaks(coordinated.OWN_GRADIENT, "aggregated", guard="batch_size")
class ProductShares(Message):
    """Opened numbers, uint64 (n, limbs), with masks that cancel over all senders, for the party that masked them."""

    numbers: Array


class LatticeProducts:
    """A data party's part; `masks` cancel in sums over data parties, `batches` as of `steps.products_of`."""

    def __init__(
        self, inputs: GlmInput, setting: Setting, own: OwnData, masks: CancellingMasks, batches: Integers | None
    ) -> None:
        party, threads = inputs.party, inputs.threads
        # the ring has room for a part of the table: a block is some whole batches, or rows where there are none
        batches = np.arange(setting.n_rows)[:, np.newaxis] if batches is None else batches
        parts = pieces(len(batches), max(1, DEGREE // batches.shape[1]))
        blocks = [batches[part].reshape(-1) for part in parts]
        self._party, self._setting, self._columns, self._masks = party, setting, own.columns, masks
        # whose labels are among its columns: on the whole table the loss needs none
        self._labelled = None if setting.whole else setting.active
        self._others = others = setting.others(party.name)
        seed = joint_seed(party, others, "lattice")
        length, sum_bits = max(map(len, blocks)), setting.vector_bits + len(setting.owners).bit_length()
        self._parameters = vectors_parameters(length, WEIGHT_BOUND, sum_bits, setting.batch_size)
        self._bits = self._parameters.message_bits
        matrix = own.columns.T if own.labels is None else np.vstack([own.columns.T, -own.labels])
        self._block, self._position = (np.full(setting.n_rows, -1, np.int64) for _ in range(2))
        self._servers = []
        # a map of the columns for each block
        for number, rows in enumerate(blocks):
            self._block[rows], self._position[rows] = number, np.arange(len(rows))
            # the last block may be shorter
            block = np.zeros((len(matrix), length), np.int64)
            block[:, : len(rows)] = matrix[:, rows]
            given = self._parameters, block, seed
            shards = inputs.shards
            self._servers.append(
                VectorServer(*given, threads=threads)
                if shards is None
                else ClusterVectorServer(shards, number, *given, threads=threads)
            )
        self._client = VectorClient(self._parameters, setting.vector_bits, seed, length, threads=threads)
        # in turn, so that no party has many of them unread
        for number, server in enumerate(self._servers):
            hint = ColumnsHint(pack(server.hint()))
            for peer in others:
                party.send(peer, hint)
            for peer in others:
                theirs = unpack(party.receive(peer, ColumnsHint).payload, peer, "ColumnsHint")
                self._client.accept_hint(peer, number, theirs, self._count(peer))
        self._loss_shares = 0
        self._place = 0

    def _count(self, name: str) -> int:
        """Return how many columns of a party are under the map, the active party's labels among them."""
        return self._setting.n_columns[name] + (name == self._labelled)

    def times(self, rows: Integers, own: Integers, *, counted: bool) -> list[int]:
        """Return the own columns' products with the sum of all vectors; see `CoordinatedProducts.times`."""
        party, bits = self._party, self._bits
        self._place += 1
        # shares of the own products stay here; what is opened of the others' goes back to them
        sums = [0] * self._count(party.name)
        opened = {peer: [0] * self._count(peer) for peer in self._others}
        of_rows = self._block[rows]
        for block in np.unique(of_rows).tolist():
            sums = _added(sums, self._in_block(block, rows[of_rows == block], own[of_rows == block], opened))
        for peer, shares in opened.items():
            if peer == self._labelled:
                self._loss_shares += shares.pop() * counted
            self._return(peer, shares, f"to {peer}")
        n_columns = self._columns.shape[1]
        if party.name == self._labelled:
            self._loss_shares += sums.pop() * counted
        for peer in self._others:
            sums = _added(sums, self._share(peer, n_columns))
        products = coordinated.exact_products(self._columns[rows], own)
        return [signed(theirs, bits) + mine for theirs, mine in zip(sums, products, strict=True)]

    def _in_block(self, block: int, rows: Integers, own: Integers, opened: dict[str, list[int]]) -> list[int]:
        """Multiply rows of one block with the others; add to what is `opened`, and return the own shares."""
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
        # one sender's number alone would show the owner that sender's part of its gradient
        senders = [other for other in self._others if other != peer]
        masks = self._masks.draw(len(shares), self._bits, self._place, purpose, senders)
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
