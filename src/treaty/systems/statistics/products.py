"""Products of a party's hidden vectors with another's columns, whose results both parties hold as shares.

The party that asks encrypts its vectors under the lattice map (`crypto.sums.hidden_vectors`), the other one multiplies
them with its columns and masks each result: what the first opens is uniform, and with the mask adds up to the product
modulo 2^bits. Nothing is known until one of both sends its shares to somebody. Shares of counts are sent whole, shares
of correlations without their lower bits, so that the sum is the product rounded to one unit or two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.lattice.ring import packed_words
from treaty.crypto.parameters import SecretMatrix
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums.hidden_vectors import VectorClient, VectorServer, signed, vectors_parameters
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.exchanges import send_rows, take_rows
from treaty.messaging.messages import Array, Arrays, Message, leaks, pack, row_pieces, unpack, view
from treaty.messaging.party import Party


@leaks("the sender's columns, under the lattice map", "encrypted")
class StatisticsHint(Message):
    """What a party's columns, or the indicators of their bins, are multiplied with once."""

    columns: Array


@leaks("the sender's labels or a column of it, under the lattice map", "encrypted")
class HiddenVector(Message):
    """An encrypted vector over all rows, or a piece of it: the labels, or a standardised column."""

    words: Array


@leaks("uniform numbers: products under masks", "masked")
class MaskedAnswer(Message):
    """A vector's products with all columns, masked, which the receiver opens to uniform numbers."""

    payload: Arrays


class Products:
    """A party's end of products over `n_rows` rows, of vectors of `vector_bits` with entries of at most `bound`."""

    def __init__(self, party: Party, seed: bytes, n_rows: int, vector_bits: int, bound: int, threads: int) -> None:
        self._party, self._seed, self._n_rows, self._threads = party, seed, n_rows, threads
        self._vector_bits = vector_bits
        self._parameters = vectors_parameters(n_rows, bound, vector_bits, n_rows)
        self._server: VectorServer | None = None
        self._hint: NDArray[np.int16] | None = None
        self.bits = self._parameters.message_bits
        # of a query, the vector's and the secret's part; of a hint, each column's
        self._sizes = [packed_words(self._parameters, count) for count in (n_rows, self._parameters.degree)]
        self._of_column = self._parameters.digits, self._parameters.degree

    def ask(self, columns: Mapping[str, int], vectors: Integers) -> dict[str, list[int]]:
        """Multiply own vectors (k, n_rows) with others' columns, so many of each; return shares of each, row by row."""
        party, shares = self._party, {peer: list[int]() for peer in columns}
        client = VectorClient(self._parameters, self._vector_bits, self._seed, self._n_rows, threads=self._threads)
        for peer, count in columns.items():
            hint = [
                view(
                    message.columns, np.int16, (of.stop - of.start, *self._of_column), peer=peer, what="StatisticsHint"
                )
                for of, message in take_rows(party, peer, count, 16 * math.prod(self._of_column), StatisticsHint)
            ]
            client.accept_hint(peer, 0, [np.concatenate(hint)], count)
        for vector in vectors:
            words = np.concatenate(client.query(np.arange(self._n_rows), vector), axis=1)[0]
            for part in row_pieces(len(words), 32):
                query = HiddenVector(Array.of(words[part]))
                for peer in columns:
                    party.send(peer, query)
            for peer, own in shares.items():
                answer = party.receive(peer, MaskedAnswer)
                own += client.open(peer, 0, unpack(answer.payload, peer, "MaskedAnswer"))
        return shares

    def answer(self, peer: str, columns: Integers | SecretMatrix, n_vectors: int) -> list[int]:
        """Multiply so many of a peer's vectors with own columns (m, n_rows), the same at each call."""
        if self._server is None:
            self._server = VectorServer(self._parameters, columns, self._seed, threads=self._threads)
            (self._hint,) = self._server.hint()
        party, hint = self._party, self._hint
        assert hint is not None
        bits = 16 * math.prod(self._of_column)
        send_rows(party, peer, len(hint), bits, lambda part: StatisticsHint(Array.of(hint[part])))
        shares: list[int] = []
        for _ in range(n_vectors):
            words = [
                view(message.words, np.uint32, (of.stop - of.start,), peer=peer, what="HiddenVector")
                for of, message in take_rows(party, peer, sum(self._sizes), 32, HiddenVector)
            ]
            asked = np.split(np.concatenate(words)[np.newaxis], self._sizes[:1], axis=1)
            answer, own = self._server.answer(asked)
            party.send(peer, MaskedAnswer(pack(answer)))
            shares += own
        return shares

    def words(self, shares: Sequence[int], less: int = 0) -> Array:
        """Return shares without `less` lower bits, for sending."""
        return Array.of(to_words([share >> less for share in shares], self._limbs(less)))

    def read(self, peer: str, sent: Array, count: int, what: str, less: int = 0) -> list[int]:
        """Return a peer's shares, as `words` made them; PeerProtocolError for others."""
        theirs = from_words(view(sent, np.uint64, (count, self._limbs(less)), peer=peer, what=what))
        if any(share >> (self.bits - less) for share in theirs):
            raise PeerProtocolError(peer, f"expected shares below 2^{self.bits - less}", at=what)
        return theirs

    def add(self, shares: Sequence[int], theirs: Sequence[int], less: int = 0) -> Integers:
        """Add the shares of two parties, without `less` lower bits, to signed products."""
        return np.array([signed(a + b, self.bits - less) for a, b in zip(shares, theirs, strict=True)], np.int64)

    def _limbs(self, less: int) -> int:
        return -(-(self.bits - less) // 64)
