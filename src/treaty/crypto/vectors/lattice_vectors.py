"""Products of a party's secret columns with other parties' vectors under the lattice map, as shares.

The *server* holds integer columns of some rows (`crypto.lattice`, "for any secret integer matrix"), a
*client* a vector over some of these rows. The vector is sent at full length, zero elsewhere, so that one hint serves
all batches of these rows and the server cannot tell which are meant. The server adds a mask to every answer, uniform
over the whole ring: what the client opens is uniform, whatever vector it sent, and its upper bits are its share; the
server's share are the mask's, negative.

A long table is cut into blocks of rows, each with its own matrix and hint: a vector need not be longer than the block
of its batch, where everybody may know which block that is.

    entry m_i = low + 2^26 high = v_i,     |v_i| < 2^(vector_bits - 1),     products modulo 2^message_bits

Where the mask's lower bits and the noise carry into the upper ones, shares add up to one too many: of a product with a
probability of at most 2^-64, a unit in its last place. The answers tell the client nothing, so that no ledger counts
them; the queries tell the server nothing under ring-LWE, and shares what they add up to. Assumptions are in
docs/lattice.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.map_client import LinearMapClient
from treaty.crypto.lattice.map_server import LinearMapServer
from treaty.crypto.lattice.matrix import Field, SecretMatrix, check_fields
from treaty.crypto.lattice.packed import pack, packed_words, unpack
from treaty.crypto.lattice.parameters import DIGIT_BITS, Digits, Parameters, choose_masked
from treaty.crypto.lattice.sampling import uniform_digits
from treaty.crypto.payload import Payload, check_payload
from treaty.errors import CryptoError

Integers = NDArray[np.int64]

LOW_BITS = 26
_SPARE = 63  # bits that noise is smaller than half of the bits below a message


def vectors_parameters(n_rows: int, weight_bound: int, vector_bits: int, batch_rows: int) -> Parameters:
    """Return the parameters for products of columns with vectors; CryptoError if the lattice map has none.

    `n_rows` of a block; |entry| of a column <= `weight_bound`; signed entries of `vector_bits`, of which at most
    `batch_rows` are not zero.
    """
    message_bits, fields = (batch_rows * weight_bound).bit_length() + vector_bits + 1, _fields(vector_bits)
    entries = max(weight_bound, sum(field.bound for field in fields))
    parameters = choose_masked(message_bits, n_rows * weight_bound, entries, _SPARE)
    check_fields(fields, parameters)
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
        return [pack(self._parameters, words), pack(self._parameters, own)]

    def open(self, peer: str, block: int, answer: Payload) -> list[int]:
        """Open a server's answer to the last query: its share of each product, modulo 2^message_bits."""
        if self._secrets is None or (peer, block) not in self._hints:
            raise CryptoError(f"expected a hint and a query before an answer of {peer}")
        hint = self._hints[peer, block]
        check_payload(answer, f"the answer of {peer}", (np.uint16, (1, len(hint), self._parameters.digits)))
        opened = self._map.open(hint, np.arange(len(hint)), self._secrets, answer[0])
        return _upper(opened[0], self._parameters)


class VectorServer:
    """The end that holds int64 columns (columns, rows), within the bounds of the parameters."""

    def __init__(self, parameters: Parameters, columns: Integers, seed: bytes, *, threads: int = 1) -> None:
        sizes = np.abs(columns)
        if sizes.sum(axis=1).max(initial=0) > parameters.weight or sizes.max(initial=0) >= min(parameters.primes):
            raise CryptoError("a column exceeds the bound of the parameters - in the lattice map")
        self.parameters, self._threads = parameters, threads
        self._columns = columns.shape
        self._map = LinearMapServer(
            parameters, SecretMatrix.of_integers(columns.astype(np.int32)), seed, threads=threads
        )

    def hint(self) -> Payload:
        """Return the hint, once."""
        made = list(self._map.hint(max(1, self._columns[0])))
        shape = (0, self.parameters.digits, self.parameters.degree)
        return [np.concatenate([np.empty(shape, np.int16), *made])]

    def answer(self, query: Payload) -> tuple[Payload, list[int]]:
        """Answer a query; return also this end's shares, which with the client's add up to the products.

        CryptoError if something is malformed.
        """
        parameters, (columns, length) = self.parameters, self._columns
        sizes = [packed_words(parameters, count) for count in (length, parameters.degree)]
        check_payload(query, "a query", *((np.uint32, (1, size)) for size in sizes))
        words, own = (
            unpack(parameters, packed, count, self._threads)
            for packed, count in zip(query, (length, parameters.degree), strict=True)
        )
        masks = uniform_digits(Keystream().raw, (1, columns, parameters.digits))
        made = self._map.answer(words, own, np.arange(columns, dtype=np.int64), masks)
        return [made], [-mask % (1 << parameters.message_bits) for mask in _upper(masks[0], parameters)]


def _upper(numbers: Digits, parameters: Parameters) -> list[int]:
    """Return the message's bits of numbers of the ring, (n, D)."""
    whole = (sum(digit << DIGIT_BITS * k for k, digit in enumerate(row)) for row in numbers.tolist())
    return [number >> parameters.below for number in whole]


def signed(number: int, bits: int) -> int:
    """Read a number modulo 2^bits as one from -2^(bits - 1)."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
