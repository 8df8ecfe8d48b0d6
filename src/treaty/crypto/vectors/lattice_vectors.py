"""Products of a party's secret columns with other parties' vectors under the lattice map, as shares.

The *server* holds integer columns of some rows (`crypto.lattice`, "for any secret integer matrix"), a
*client* a vector over some of these rows. The vector is sent at full length, zero elsewhere, so that one hint serves
all batches of these rows and the server cannot tell which are meant. The server adds a mask, uniform modulo
2^message_bits, to every product: what the client opens is uniform, and its share; the server's share is the mask.

A long table is cut into blocks of rows, each with its own matrix and hint: a vector need not be longer than the block
of its batch, where everybody may know which block that is.

    entry m_i = low + 2^26 high = v_i,     |v_i| < 2^(vector_bits - 1),     products modulo 2^message_bits

Assumptions are in docs/lattice.md: the answers tell the client at most the leak bound of each sum beside the sum, which
here is uniform; the queries tell the server nothing under ring-LWE. The leak bound of a column is that of its 2-norm,
which only its owner knows and enters into its ledger.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.lattice.map_client import LinearMapClient
from treaty.crypto.lattice.map_server import LinearMapServer
from treaty.crypto.lattice.matrix import Field, SecretMatrix, check_fields
from treaty.crypto.lattice.parameters import DIGIT_BITS, Parameters, choose
from treaty.crypto.lattice.store import HintStore, Reservation
from treaty.crypto.payload import Payload, check_payload
from treaty.crypto.wide import from_ints
from treaty.errors import CryptoError

Integers = NDArray[np.int64]

LOW_BITS = 26
_RESERVED_AT_A_TIME = 256  # vectors whose leak is entered in the ledger before the first of them is answered


def vectors_parameters(n_rows: int, weight_bound: int, vector_bits: int, batch_rows: int) -> Parameters:
    """Return the parameters for products of columns with vectors; CryptoError if the lattice map has none.

    `n_rows` of a block; |entry| of a column <= `weight_bound`; signed entries of `vector_bits`, of which at most
    `batch_rows` are not zero.
    """
    weight = n_rows * weight_bound
    message_bits = (batch_rows * weight_bound).bit_length() + vector_bits + 1
    slack = weight * ((1 << LOW_BITS) + (1 << max(0, vector_bits - 1 - LOW_BITS))) // 2 + 2
    parameters = choose(message_bits, weight=weight, slack=slack, squares=n_rows * weight_bound**2)
    check_fields(_fields(vector_bits), parameters)
    return parameters


def _fields(vector_bits: int) -> list[Field]:
    return [Field(0, 1 << LOW_BITS), Field(LOW_BITS, 1 << max(0, vector_bits - 1 - LOW_BITS), signed=True)]


class VectorClient:
    """The end that holds vectors of `n_rows` entries; the 32-byte seed is public, of all parties."""

    def __init__(self, parameters: Parameters, vector_bits: int, seed: bytes, n_rows: int, *, threads: int = 1) -> None:
        self._parameters, self._bits, self._n_rows = parameters, vector_bits, n_rows
        self._map = LinearMapClient(parameters, _fields(vector_bits), seed, n_rows, threads=threads)
        self._hints: dict[tuple[str, int], NDArray[np.int16]] = {}
        self._secrets: NDArray[np.int8] | None = None

    def accept_hint(self, peer: str, block: int, hint: Payload, columns: int) -> None:
        """Take a server's hint of a block of rows."""
        shape = (columns, self._parameters.digits, self._parameters.degree)
        check_payload(hint, f"the hint of {peer}", (np.int16, shape))
        self._hints[peer, block] = hint[0].copy()

    def query(self, rows: Integers, vector: Integers) -> Payload:
        """Encrypt a vector with these entries at `rows`, under a secret of its own, for all servers alike."""
        half = 1 << (self._bits - 1)
        if len(vector) and (vector.min() < -half or vector.max() >= half):
            raise CryptoError(f"expected numbers below 2^{self._bits - 1} in size - before encryption")
        fields = np.zeros((2, self._n_rows), np.int32)
        fields[0, rows] = vector & ((1 << LOW_BITS) - 1)
        fields[1, rows] = vector >> LOW_BITS
        self._secrets, words, own = self._map.encrypt([fields])
        return [words, own]

    def open(self, peer: str, block: int, answer: Payload) -> list[int]:
        """Open a server's answer to the last query: its share of each product, modulo 2^message_bits."""
        if self._secrets is None or (peer, block) not in self._hints:
            raise CryptoError(f"expected a hint and a query before an answer of {peer}")
        hint, digits, bits = self._hints[peer, block], self._parameters.digits, self._parameters.message_bits
        check_payload(answer, f"the answer of {peer}", (np.uint16, (1, len(hint), digits)))
        words = self._map.open(hint, np.arange(len(hint)), self._secrets, answer[0])[0]
        found = [sum(int(word) << DIGIT_BITS * k for k, word in enumerate(row)) for row in words.tolist()]
        return [x & (1 << bits) - 1 for x in found]


class VectorServer:
    """The end that holds int64 columns (columns, rows), within the bound of the parameters.

    Under the columns' names the store's ledger keeps what answers may have leaked, added up where names are equal.
    """

    def __init__(
        self,
        parameters: Parameters,
        columns: Integers,
        names: Sequence[str],
        seed: bytes,
        store: HintStore,
        *,
        threads: int = 1,
    ) -> None:
        if np.abs(columns).sum(axis=1).max(initial=0) > parameters.weight:
            raise CryptoError("a column exceeds the bound of the parameters - in the lattice map")
        self.parameters = parameters
        self._columns = columns.shape
        self._map = LinearMapServer(
            parameters, SecretMatrix.of_integers(columns.astype(np.int32)), seed, threads=threads
        )
        squares = (columns.astype(np.float64) ** 2).sum(axis=1)
        leaks = dict.fromkeys(names, 0.0)
        for name, square in zip(names, squares.tolist(), strict=True):
            leaks[name] += parameters.leak(square)
        self._reservation = Reservation(store, leaks, _RESERVED_AT_A_TIME)
        self._seen: set[bytes] = set()

    def hint(self) -> Payload:
        """Return the hint, once."""
        made = list(self._map.hint(max(1, self._columns[0])))
        shape = (0, self.parameters.digits, self.parameters.degree)
        return [np.concatenate([np.empty(shape, np.int16), *made])]

    def answer(self, query: Payload) -> tuple[Payload, list[int]]:
        """Answer a query; return also this end's shares, which with the client's add up to the products.

        CryptoError if something is malformed, or the query is a repetition: a second flood on one query would average
        out.
        """
        parameters = self.parameters
        primes, degree, bits = len(parameters.primes), parameters.degree, parameters.message_bits
        shapes = [(np.uint32, (1, primes, self._columns[1])), (np.uint32, (1, primes, degree))]
        check_payload(query, "a query", *shapes)
        digest = hashlib.sha256(query[0].data)
        digest.update(query[1].data)
        if digest.digest() in self._seen:
            raise CryptoError("expected a new query, got one that was answered - in a query")
        self._seen.add(digest.digest())
        self._reservation.use(1)
        masks = [secrets.randbits(bits) for _ in range(self._columns[0])]
        features = np.arange(self._columns[0], dtype=np.int64)
        made = self._map.answer(query[0], query[1], features, from_ints(masks, -(-bits // 64))[None])
        return [made], [-mask % (1 << bits) for mask in masks]

    def close(self) -> None:
        """Give back what was reserved and not used."""
        self._reservation.close()


def signed(number: int, bits: int) -> int:
    """Read a number modulo 2^bits as one from -2^(bits - 1)."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
