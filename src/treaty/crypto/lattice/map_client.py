"""The client's end of the linear map: queries and the opening of answers, steps 2 and 4 in `treaty.crypto.lattice`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice import kernels
from treaty.crypto.lattice.kernels import reduced
from treaty.crypto.lattice.matrix import Field, check_fields
from treaty.crypto.lattice.parameters import DIGIT_BITS, Digits, Parameters
from treaty.crypto.lattice.sampling import errors, public_ring_elements, public_transforms, ternary
from treaty.crypto.lattice.transform import Residues, shoup_quotients, tables
from treaty.errors import CryptoError
from treaty.machine.shared_work import share

_KEPT_BYTES = 64 << 20  # of public elements; more are made from the seed again where they are needed


class LinearMapClient:
    """The client, with vectors of n = `length` entries, each three fields of one node at most; `seed` has 32 bytes.

    CryptoError if fields are too wide for the arithmetic.
    """

    def __init__(
        self, parameters: Parameters, fields: Sequence[Field], seed: bytes, length: int, *, threads: int = 1
    ) -> None:
        self.parameters, self.length, self.threads = parameters, length, threads
        check_fields(fields, parameters)
        q = parameters.modulus
        self._seed, self._public = seed, None
        if 4 * len(parameters.primes) * length <= _KEPT_BYTES:
            numbers = range(1 + -(-length // parameters.degree))
            of_seed = public_transforms(parameters, seed, numbers, threads)
            self._public = np.ascontiguousarray(of_seed[:, :, ::-1])  # a from a~
        self.scales = [  # what each field's numbers are multiplied by
            (q << field.shift) + (1 << parameters.message_bits - 1) >> parameters.message_bits for field in fields
        ]
        bits, pairs = parameters.message_bits, zip(self.scales, fields, strict=True)
        # how far rounded scales exceed q 2^shift / 2^bits, in units of 2^-32
        excess = [(scale << bits) - (q << field.shift) << 32 >> bits for scale, field in pairs]
        self._excess = np.array(excess, np.int64)[:, np.newaxis]
        self._scales = np.array(
            [[(x << 32) % p for x in self.scales] + [-pow(p, -1, 1 << 32) % (1 << 32)] for p in parameters.primes],
            np.uint64,
        )
        self._tables = [tables(prime, parameters.degree) for prime in parameters.primes]

    def encrypt(self, vectors: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int8], Residues, Residues]:
        """Encrypt vectors, int32 (fields, n) each within the fields' bounds, each under a secret of its own.

        Returned are the secrets, int8 (vectors, N), which open the answer and must never be used or sent again; the
        residues of b_1, b_2, ..., uint32 (vectors, primes, n); and those of b_0, uint32 (vectors, primes, N).
        """
        query = self.begin(len(vectors))
        return query.secrets, query.encrypt(vectors), query.own

    def begin(self, vectors: int) -> EncryptedQuery:
        """Draw secrets for so many vectors, at least one, whose entries are encrypted piece by piece."""
        if vectors < 1:
            raise CryptoError("expected at least one vector - in the lattice map")
        keystream = Keystream()  # made for these vectors alone: no fork or restored snapshot has it too
        secrets = ternary(keystream.raw, vectors * self.parameters.degree).reshape(vectors, -1)
        return self.query_of(secrets, keystream.raw(32))

    def query_of(self, secrets: NDArray[np.int8], key: bytes | None) -> EncryptedQuery:
        """Return a query under these secrets; `key` makes its errors."""
        return EncryptedQuery(self, secrets, key)

    def masks(self, secrets: NDArray[np.int8]) -> tuple[Residues, Residues]:
        """Return what secrets hide entries with: the a_j s of b_1, b_2, ... and that of b_0, shaped as in `encrypt`."""
        query = EncryptedQuery(self, secrets, None)
        return query.encrypt([np.zeros((len(self.scales), self.length), np.int32)] * len(secrets)), query.own

    def block(
        self, j: int, secret: list[tuple[Residues, Residues]], error: NDArray[np.int8], fields: NDArray[np.int32],
        out: Residues,
    ) -> None:  # fmt: skip
        """Write a_j s, an error and numbers, int32 (fields, m), to `out`, (primes, m), of a block of m <= N entries."""
        if self._public is not None:
            public = self._public[:, j]
        else:
            parameters = self.parameters
            of_seed = public_ring_elements(self._seed, j, parameters.primes, parameters.degree)
            public = np.ascontiguousarray(of_seed[:, ::-1])
        added = error.astype(np.int32)
        if self.parameters.masked:  # or noise would have what rounded scales add up to
            added -= (fields * self._excess).sum(axis=0) + (1 << 31) >> 32
        for p, (table, transformed) in enumerate(zip(self._tables, secret, strict=True)):
            kernels.encrypt_block(public[p], transformed, added, fields, self._scales[p], table, out[p])

    def transform_secret(self, secret: NDArray[np.int8]) -> list[tuple[Residues, Residues]]:
        """Return the transform of s / N and its Shoup quotients, for each prime."""
        degree, out = self.parameters.degree, []
        for prime, table in zip(self.parameters.primes, self._tables, strict=True):
            t = (secret.astype(np.int64) * pow(degree, -1, prime) % prime).astype(np.uint32)
            kernels.forward_transform(t, 0, degree, table.forward, table.forward_shoup, table.prime)
            out.append((t, shoup_quotients(t, prime)))
        return out

    def open(
        self, hint: NDArray[np.int16], rows: NDArray[np.int64], secrets: NDArray[np.int8], answers: Digits
    ) -> Digits:
        """Open answers, (vectors, rows, D), to `rows` of the hint, (all rows, D, N), with the secrets, (vectors, N).

        Returns the products of rows and vectors modulo 2^message_bits: uint16 (vectors, rows, words), little-endian. Of
        masked answers it is all digits, (vectors, rows, D): below product plus mask, noise that is not negative.
        """
        digits, below = self.parameters.digits, self.parameters.below
        index = (rows[:, np.newaxis] * digits + np.arange(digits)).ravel()
        flat, factors = hint.reshape(-1, hint.shape[-1]), secrets.astype(np.int16)
        products = np.empty((len(index), len(secrets)), np.int32)
        share(lambda a, b: kernels.dots(flat, index, factors, a, b, products), len(index), self.threads)
        total = answers.astype(np.int64) - products.reshape(len(rows), digits, -1).transpose(2, 0, 1)
        digit, bit = divmod(self.parameters.noise_bits if self.parameters.masked else below - 1, DIGIT_BITS)
        total[..., digit] += 1 << bit
        opened = reduced(total)
        if self.parameters.masked:
            return opened
        first, shift = divmod(below, DIGIT_BITS)
        words: Digits = opened[..., first:] >> np.uint16(shift)
        words[..., :-1] |= opened[..., first + 1 :] << np.uint16(DIGIT_BITS - shift)
        return words


class EncryptedQuery:
    """Vectors that are encrypted from their first entry to their last, each under a secret of its own.

    `secrets`, int8 (vectors, N), open the answer and must never be used or sent again; `own` are the residues of b_0,
    uint32 (vectors, primes, N). Errors are made of `key`, 32 secret bytes of this query, and the place of their block,
    so that the same numbers give the same bytes. Other numbers under the same secret, key and place would show their
    difference: each block is encrypted once. Without a key there are no errors.
    """

    def __init__(self, client: LinearMapClient, secrets: NDArray[np.int8], key: bytes | None) -> None:
        self.secrets, self._client, self._key, self._done = secrets, client, key, 0
        self._transformed = [client.transform_secret(secret) for secret in secrets]
        degree, primes = client.parameters.degree, len(client.parameters.primes)
        self.own = np.zeros((len(secrets), primes, degree), np.uint32)

    def encrypt(self, vectors: Sequence[NDArray[np.int32]]) -> Residues:
        """Encrypt the next entries of every vector, int32 (fields, m) each: residues uint32 (vectors, primes, m).

        m is a multiple of N, but with the last entries. The first ones make `own`, too.
        """
        before = self._done
        self._done += vectors[0].shape[1]
        return self.encrypt_from(before, vectors)

    def encrypt_from(self, before: int, vectors: Sequence[NDArray[np.int32]]) -> Residues:
        """Encrypt entries of every vector as `encrypt` does, from entry `before` on, a multiple of N."""
        client, count = self._client, vectors[0].shape[1]
        degree = client.parameters.degree
        if before % degree or before + count > client.length or len(vectors) != len(self.secrets):
            raise CryptoError(f"expected entries of {client.length} in whole blocks of {degree} - in the lattice map")
        first = 1 + before // degree if before else 0  # block 0 is b_0
        blocks = range(first, 1 + (before + count + degree - 1) // degree)
        words = np.empty((len(vectors), len(client.parameters.primes), count), np.uint32)
        nothing = np.zeros((len(client.scales), degree), np.int32)
        drawn = [[self._error(v, j) for j in blocks] for v in range(len(vectors))]  # by threads it would take longer

        def work(start: int, stop: int) -> None:
            for task in range(start, stop):
                v, place = divmod(task, len(blocks))
                j = blocks[place]
                at = slice((j - 1) * degree - before, min(j * degree - before, count))
                numbers, out = (vectors[v][:, at], words[v, :, at]) if j else (nothing, self.own[v])
                client.block(j, self._transformed[v], drawn[v][place], numbers, out)

        share(work, len(vectors) * len(blocks), client.threads)
        return words

    def _error(self, vector: int, block: int) -> NDArray[np.int8]:
        degree = self._client.parameters.degree
        count = degree if block == 0 else min(degree, self._client.length - (block - 1) * degree)
        if self._key is None:
            return np.zeros(count, np.int8)
        return errors(Keystream(self._key, vector << 32 | block).raw, count)
