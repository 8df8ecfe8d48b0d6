"""Both ends of the linear map: `LinearMapClient` (queries, opening) and `LinearMapServer` (hint, answers).

Steps are numbered as in `treaty.crypto.lattice`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.montgomery import aligned
from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice import kernels, ring
from treaty.crypto.lattice.kernels import reduced
from treaty.crypto.parameters import DIGIT_BITS, Digits, Field, Parameters, SecretMatrix, check_fields
from treaty.errors import CryptoError
from treaty.machine.arrays import Int32s, Integers, pieces
from treaty.machine.shared_work import share

_KEPT_BYTES = 64 << 20  # of public elements; more are expanded from the seed again where they are needed


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
            of_seed = ring.public_transforms(parameters, seed, numbers, threads)
            # the transform of a is that of a~ read backwards
            self._public = np.ascontiguousarray(of_seed[:, :, ::-1])
        bits = parameters.message_bits
        # q 2^shift / 2^bits, rounded, by which each field's numbers are multiplied
        self.scales = [(q << field.shift) + (1 << bits - 1) >> bits for field in fields]
        pairs = zip(self.scales, fields, strict=True)
        # how far rounded scales exceed q 2^shift / 2^bits, in units of 2^-32
        excess = [(scale << bits) - (q << field.shift) << 32 >> bits for scale, field in pairs]
        self._excess = np.array(excess, np.int64)[:, np.newaxis]
        # times 2^32, which Montgomery's reduction in the kernel divides by, and with its constant -1 / p at the end
        self._scales = np.array(
            [[(x << 32) % p for x in self.scales] + [-pow(p, -1, 1 << 32) % (1 << 32)] for p in parameters.primes],
            np.uint64,
        )
        self._tables = [ring.tables(prime, parameters.degree) for prime in parameters.primes]

    def encrypt(self, vectors: Sequence[Int32s]) -> tuple[NDArray[np.int8], ring.Residues, ring.Residues]:
        """Encrypt vectors, int32 (fields, n) each within the fields' bounds, each under a secret of its own.

        Return the secrets, int8 (vectors, N), which open the answer and must never be used or sent again; the residues
        of b_1, b_2, ..., uint32 (vectors, primes, n); and those of b_0, uint32 (vectors, primes, N).
        """
        query = self.begin(len(vectors))
        return query.secrets, query.encrypt(vectors), query.own

    def begin(self, vectors: int) -> EncryptedQuery:
        """Draw secrets for so many vectors, at least one, whose entries are encrypted piece by piece."""
        if vectors < 1:
            raise CryptoError("expected at least one vector - in the lattice map")
        # a stream for these vectors alone: no fork or restored snapshot has it, too
        keystream = Keystream()
        secrets = ring.ternary(keystream.raw, vectors * self.parameters.degree).reshape(vectors, -1)
        return self.query_of(secrets, keystream.raw(32))

    def query_of(self, secrets: NDArray[np.int8], key: bytes | None) -> EncryptedQuery:
        """Return a query under these secrets, with errors made of `key`; a cluster's client has its own."""
        return EncryptedQuery(self, secrets, key)

    def masks(self, secrets: NDArray[np.int8]) -> tuple[ring.Residues, ring.Residues]:
        """Return the masks a_j s of b_1, b_2, ... and that of b_0, shaped as in `encrypt`."""
        query = EncryptedQuery(self, secrets, None)
        return query.encrypt([np.zeros((len(self.scales), self.length), np.int32)] * len(secrets)), query.own

    def block(
        self, j: int, secret: list[tuple[ring.Residues, ring.Residues]], error: NDArray[np.int8], fields: Int32s,
        out: ring.Residues,
    ) -> None:  # fmt: skip
        """Write a_j s, an error and numbers, int32 (fields, m), to `out`, (primes, m), of a block of m <= N entries."""
        if self._public is not None:
            public = self._public[:, j]
        else:
            parameters = self.parameters
            of_seed = ring.public_ring_elements(self._seed, j, parameters.primes, parameters.degree)
            public = np.ascontiguousarray(of_seed[:, ::-1])
        added = error.astype(np.int32)
        if self.parameters.masked:
            # each entry is rounded as a whole, or noise would contain what rounded scales add up to
            added -= (fields * self._excess).sum(axis=0) + (1 << 31) >> 32
        for p, (table, transformed) in enumerate(zip(self._tables, secret, strict=True)):
            kernels.encrypt_block(public[p], transformed, added, fields, self._scales[p], table, out[p])

    def transform_secret(self, secret: NDArray[np.int8]) -> list[tuple[ring.Residues, ring.Residues]]:
        """Return the transform of s / N and its Shoup quotients, for each prime."""
        degree, out = self.parameters.degree, []
        for prime, table in zip(self.parameters.primes, self._tables, strict=True):
            # over N, as the inverse transform leaves a factor N
            t = (secret.astype(np.int64) * pow(degree, -1, prime) % prime).astype(np.uint32)
            kernels.forward_transform(t, 0, degree, table.forward, table.forward_shoup, table.prime)
            out.append((t, ring.shoup_quotients(t, prime)))
        return out

    def open(self, hint: NDArray[np.int16], rows: Integers, secrets: NDArray[np.int8], answers: Digits) -> Digits:
        """Open answers, (vectors, rows, D), to `rows` of the hint, (all rows, D, N), with the secrets, (vectors, N).

        Return the products of rows and vectors modulo 2^message_bits, uint16 (vectors, rows, words), little-endian; of
        masked answers all digits, (vectors, rows, D): below product plus mask, noise that is not negative.
        """
        digits, below = self.parameters.digits, self.parameters.below
        index = (rows[:, np.newaxis] * digits + np.arange(digits)).ravel()
        flat, factors = hint.reshape(-1, hint.shape[-1]), secrets.astype(np.int16)
        products = np.empty((len(index), len(secrets)), np.int32)
        share(lambda a, b: kernels.dots(flat, index, factors, a, b, products), len(index), self.threads)
        # y_S - <h_S, s>, digit by digit; half a unit below the message rounds it
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
    uint32 (vectors, primes, N). `key` are 32 secret bytes of this query, of which errors are made; without a key there
    are none.
    """

    def __init__(self, client: LinearMapClient, secrets: NDArray[np.int8], key: bytes | None) -> None:
        self.secrets, self._client, self._key, self._done = secrets, client, key, 0
        self._transformed = [client.transform_secret(secret) for secret in secrets]
        degree, primes = client.parameters.degree, len(client.parameters.primes)
        self.own = np.zeros((len(secrets), primes, degree), np.uint32)

    def encrypt(self, vectors: Sequence[Int32s]) -> ring.Residues:
        """Encrypt the next entries of every vector, int32 (fields, m) each: residues uint32 (vectors, primes, m).

        m is a multiple of N, except for the last entries. The first call sets `own`, too.
        """
        before = self._done
        self._done += vectors[0].shape[1]
        return self.encrypt_from(before, vectors)

    def encrypt_from(self, before: int, vectors: Sequence[Int32s]) -> ring.Residues:
        """Encrypt entries of every vector as `encrypt` does, from entry `before` on, a multiple of N."""
        client, count = self._client, vectors[0].shape[1]
        degree = client.parameters.degree
        if before % degree or before + count > client.length or len(vectors) != len(self.secrets):
            raise CryptoError(f"expected entries of {client.length} in whole blocks of {degree} - in the lattice map")
        # block 0 is b_0
        first = 1 + before // degree if before else 0
        blocks = range(first, 1 + (before + count + degree - 1) // degree)
        words = np.empty((len(vectors), len(client.parameters.primes), count), np.uint32)
        nothing = np.zeros((len(client.scales), degree), np.int32)
        # not by threads, which would take longer
        drawn = [[self._error(v, j) for j in blocks] for v in range(len(vectors))]

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
        # Errors follow from the key and the place of their block, so that the same numbers give the same bytes. Other
        # numbers under the same secret, key and place would show their difference: each block is encrypted once.
        return ring.errors(Keystream(self._key, vector << 32 | block).raw, count)


_FOR_HINTS = 256 << 20  # bytes of public elements while hints are made, each of which needs all
_NOT_EXPANDED: tuple[Sequence[int], list[kernels.Factors]] = (), []


def zeros_on_lines(shape: tuple[int, ...], dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """Return zeros whose rows of eight words never straddle two of the processor's cache lines."""
    count = math.prod(shape)
    words = aligned(-(-count * np.dtype(dtype).itemsize // 8), zeroed=True)
    return words.view(dtype)[:count].reshape(shape)


class LinearMapServer:
    """The server; the matrix's row norms must be within the parameters.

    `random`, int16 (rows, N), are the r_S of a hint made earlier; by default `hint` draws them.
    """

    def __init__(
        self, parameters: Parameters, matrix: SecretMatrix, seed: bytes, *, threads: int = 1,
        random: NDArray[np.int16] | None = None,
    ) -> None:  # fmt: skip
        self.parameters, self.matrix, self.seed, self._threads = parameters, matrix, seed, threads
        self.random = np.empty((matrix.rows, parameters.degree), np.int16) if random is None else random
        self._expanded = _NOT_EXPANDED
        self.primes = np.array(parameters.primes, np.uint32)
        q, digits = parameters.modulus, parameters.digits
        # 2^(16 D + guard) / p in words, so exact that a scaled number is off by less than 0.51
        words = -(-(DIGIT_BITS * digits + 40) // 32)
        self._guard = 32 * words - DIGIT_BITS * digits
        self._inverses = np.array([pow(q // p, -1, p) for p in parameters.primes], np.uint64)
        scales = [((1 << 32 * words) + p // 2) // p for p in parameters.primes]
        self._to_digits = np.array([[y >> 32 * x & 0xFFFFFFFF for x in range(words)] for y in scales], np.uint64)

    def hint(self, at_a_time: int) -> Iterator[NDArray[np.int16]]:
        """Make a new hint, with new r_S, in pieces of at most `at_a_time` rows: int16 (rows, D, N)."""
        for part in pieces(self.matrix.rows, at_a_time):
            yield self._hint_of(part.start, part.stop)

    def _hint_of(self, start: int, stop: int) -> NDArray[np.int16]:
        parameters, count, degree = self.parameters, stop - start, self.parameters.degree
        keystream = Keystream()
        random = ring.ternary(keystream.raw, count * degree).reshape(count, degree)
        error = ring.errors(keystream.raw, count * degree).reshape(count, degree)
        self.random[start:stop] = random
        residues = self.partial_hints(start, stop)
        nothing = np.empty((1, 0), self.matrix.columns.dtype)
        self._add_hints(residues, nothing, np.zeros(count, np.int64), start, self._expand([0]), (random, error))
        out = np.empty((count, parameters.digits, degree), np.int16)

        def scale(first: int, last: int) -> None:
            for s in range(first, last):
                self._rescale(residues[:, s], True, out[s])

        share(scale, count, self._threads)
        return out

    def partial_hints(self, start: int, stop: int, numbers: Sequence[int] | None = None) -> ring.Residues:
        """Return sums over j of u_j a~_j for some rows of the matrix, uint32 (primes, stop - start, N).

        `numbers` are those of the entries' blocks in the vectors, from 1; by default all.
        """
        parameters, matrix = self.parameters, self.matrix
        degree, length = parameters.degree, matrix.length
        numbers = range(1, 1 + -(-length // degree)) if numbers is None else numbers
        needed, columns = np.unique(matrix.column_of_row[start:stop], return_inverse=True)
        count = stop - start
        total = np.zeros((len(self.primes), count, degree), np.uint32)
        nothing = np.empty((0, degree), np.int8)
        for part in pieces(len(numbers), max(1, _FOR_HINTS // (8 * len(self.primes) * degree))):
            entries = matrix.columns[needed, part.start * degree : part.stop * degree]
            # the same elements serve all rows: kept until the last rows are made
            if self._expanded[0] != numbers[part]:
                self._expanded = numbers[part], self._expand(numbers[part])
            self._add_hints(total, entries, columns.astype(np.int64), start, self._expanded[1], (nothing, nothing))
        if stop == matrix.rows:
            self._expanded = _NOT_EXPANDED
        return total

    def _expand(self, numbers: Sequence[int]) -> list[kernels.Factors]:
        public = ring.public_transforms(self.parameters, self.seed, numbers, self._threads)
        found = []
        # transforms of a~_j / N and their Shoup quotients: the inverse transform leaves a factor N
        for of, prime in zip(public, self.parameters.primes, strict=True):
            scaled = (of * np.uint64(pow(self.parameters.degree, -1, prime)) % np.uint64(prime)).astype(np.uint32)
            found.append((scaled, ring.shoup_quotients(scaled, prime)))
        return found

    def _add_hints(
        self, total: ring.Residues, columns: NDArray[Any], column_of_row: Integers, start: int,
        public: list[kernels.Factors], own: tuple[NDArray[np.int8], NDArray[np.int8]],
    ) -> None:  # fmt: skip
        """Add sums over j of u_j a~_j of rows of the matrix from `start` on, in these columns, plus r a~_0 + e'.

        `own` are r and e', and `public` has a~_0 last; or `own` are arrays of no rows.
        """
        random, error = own
        arrays = columns, column_of_row, self.matrix.code_of_row[start : start + total.shape[1]]

        def work(first: int, last: int) -> None:
            for p, prime in enumerate(self.parameters.primes):
                table = ring.tables(prime, self.parameters.degree)
                kernels.add_hints(
                    arrays, first, public[p], (random[first:last], error[first:last]), table, total[p, first:last]
                )

        share(work, total.shape[1], self._threads)

    def _rescale(self, residues: ring.Residues, balanced: bool, out: NDArray[np.int16]) -> None:
        # in C order always, or the kernel would be compiled for two kinds of arrays
        given, primes = np.ascontiguousarray(residues), self.primes.astype(np.uint64)
        kernels.rescale(given, self._inverses, primes, self._to_digits, self._guard, balanced, out)

    def answer(
        self, words: ring.Residues, own: ring.Residues, features: Integers, masks: Digits | None = None
    ) -> Digits:
        """Multiply vectors, as `LinearMapClient.encrypt` returns them, by the matrix's rows of some columns, ascending.

        Return uint16 (vectors, rows of these columns, D); `masks` and errors as of `PartialSums`.
        """
        sums = self.begin(own, features)
        sums.add(words)
        return sums.answer(masks)

    def begin(self, own: ring.Residues, features: Integers) -> PartialSums:
        """Start to multiply vectors, with b_0 in `own`, by the matrix's rows of some columns, ascending."""
        if (own >= self.primes[:, np.newaxis]).any():
            raise CryptoError("a word is not below its prime - in a query")
        return PartialSums(self, own, features)

    def masks(self, own: ring.Residues, rows: Integers) -> Integers:
        """Return <r_S, b_0> of some rows of the matrix, int64 (vectors, rows, primes), not reduced modulo primes."""
        # products with balanced 16-bit digits, the lower from -2^15 on, whose sums fit 32 bits
        low = own.astype(np.int32).astype(np.int16)
        high = ((own.astype(np.int64) - low) >> DIGIT_BITS).astype(np.int16)
        count, primes = len(own), len(self.primes)
        halves = np.concatenate([low, high], axis=1).reshape(2 * primes * count, -1)
        dots = np.empty((len(rows), len(halves)), np.int32)
        share(lambda a, b: kernels.dots(self.random, rows, halves, a, b, dots), len(rows), self._threads)
        parts = dots.astype(np.int64).reshape(len(rows), count, 2, primes).transpose(1, 2, 0, 3)
        masks: Integers = parts[:, 0] + (parts[:, 1] << DIGIT_BITS)
        return masks

    def scaled(self, sums: Integers) -> Digits:
        """Scale one vector's answers, by their residues, int64 (rows, primes), down to q': uint16 (rows, D)."""
        digits = np.empty((self.parameters.digits, len(sums)), np.int16)
        modulus = self.primes.astype(np.int64)
        self._rescale((sums % modulus).astype(np.uint32).T, False, digits)
        return digits.view(np.uint16).T

    def all_products(self, words: ring.Residues, first: int, features: Integers, rows: Integers) -> Integers:
        """Return `products` of words (vectors, primes, m), int64 (vectors, rows, primes); a cluster has its own."""
        return np.stack([self.products(planes, first, features, rows) for planes in words])

    def products(self, planes: ring.Residues, first: int, features: Integers, rows: Integers) -> Integers:
        """Return what entries from `first` on, (primes, m), add to <u_S, b> modulo each prime, int64 (rows, primes)."""
        matrix, modulus, count = self.matrix, self.primes.astype(np.int64), planes.shape[1]
        if not matrix.is_bins:
            if (planes >= self.primes[:, np.newaxis]).any():
                raise CryptoError("a word is not below its prime - in a query")
            dense = np.empty((len(rows), len(modulus)), np.int64)
            columns = matrix.column_of_row[rows]
            values = matrix.columns if count == matrix.length else matrix.columns[:, first : first + count].copy()

            def multiply(start: int, stop: int) -> None:
                kernels.dense_sums(planes, values, columns[start:stop], self.primes, dense[start:stop])

            share(multiply, len(rows), self._threads)
            return dense
        parts = pieces(len(modulus), ring.WORDS)  # of the primes
        return np.concatenate([self._bin_products(planes[p], self.primes[p], first, features, rows) for p in parts], 1)

    def _bin_products(
        self, planes: ring.Residues, primes: NDArray[np.uint32], first: int, features: Integers, rows: Integers
    ) -> Integers:
        """Return `products` modulo at most `WORDS` primes, where rows are indicators of bins."""
        matrix, count = self.matrix, planes.shape[1]
        # the residues of a number side by side
        words = zeros_on_lines((count, ring.WORDS), np.uint32)
        fine: list[bool] = []
        share(lambda a, b: fine.append(kernels.interleave(planes, primes, a, b, words)), count, self._threads, 1 << 14)
        if not all(fine):
            raise CryptoError("a word is not below its prime - in a query")
        copies = zeros_on_lines((matrix.rows, kernels.COPIES, ring.WORDS), np.uint64)
        # every feature has a first bin
        offsets, flat = np.flatnonzero(matrix.code_of_row == 0), copies.reshape(-1)

        def add_up(start: int, stop: int) -> None:
            kernels.bin_sums(words.ravel(), matrix.columns, first, offsets, features, start, stop, flat)

        share(add_up, len(features), self._threads)
        sums: NDArray[np.uint64] = copies.sum(axis=1)[rows, : len(primes)] % primes.astype(np.uint64)
        return sums.astype(np.int64)


class PartialSums:
    """Products of vectors with a matrix's rows, added up from the vectors' first entries to their last."""

    def __init__(self, server: LinearMapServer, own: ring.Residues, features: Integers) -> None:
        self._server, self._features, self._done = server, features, 0
        # a copy, as a view would keep the whole first piece in memory
        self._own = own.copy()
        self._rows = np.flatnonzero(np.isin(server.matrix.column_of_row, features))
        self.vectors = len(own)
        self._sums = np.zeros((self.vectors, len(self._rows), len(server.primes)), np.int64)

    def add(self, words: ring.Residues) -> None:
        """Take the next entries of all vectors, uint32 (vectors, primes, m): whole blocks, but at the end."""
        length, degree = self._server.matrix.length, self._server.parameters.degree
        there = self._done + words.shape[2]
        # no empty piece: each costs work, whatever its length
        if words.shape[2] == 0 or there > length or (there < length and there % degree):
            raise CryptoError(
                f"expected vectors of {length} entries in whole blocks of {degree}, got {there} - in a query"
            )
        self._sums += self._server.all_products(words, self._done, self._features, self._rows)
        self._done = there

    def answer(self, masks: Digits | None = None) -> Digits:
        """Return the products, uint16 (vectors, rows, D), once all entries have come: flooded, or under masks.

        `masks`, as many digits, must be uniform, each for one answer alone. CryptoError if entries are missing.
        """
        server, length = self._server, self._server.matrix.length
        parameters = server.parameters
        if self._done != length:
            raise CryptoError(f"expected vectors of {length} entries, got {self._done} - in a query")
        if (masks is not None) != parameters.masked:
            raise CryptoError("expected answers to be masked, or flooded, as the parameters are for")
        keystream = Keystream()
        out = np.empty((len(self._sums), len(self._rows), parameters.digits), np.uint16)
        # the flood, or the mask, hides the noise, which depends on the table
        for v, sums in enumerate(self._sums + server.masks(self._own, self._rows)):
            if masks is None:
                sums += ring.flood(keystream.raw, parameters.flood_bits, parameters.primes, len(sums))
            out[v] = server.scaled(sums)
        return out if masks is None else reduced(out.astype(np.int64) + masks)
