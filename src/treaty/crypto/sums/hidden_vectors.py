"""Products of a party's matrix with another's hidden vector: under an additive cipher, and under the lattice map.

*Additive cipher.* There are two ways to X^T v:

* *Rows hidden* (`Hider.hide`, `weigh`): every v_i is a ciphertext <v_i>; the owner of X multiplies <v_i>^{x_ij} over i,
  for all columns j at a time (`Modulus.bucket_products`), puts several results into one plaintext and covers them with
  masks. v may be a sum over parties, made by multiplying their ciphertexts.
* *Matrix hidden* (`HiddenMatrix`): the owner of X encrypts its rows once, all columns of a row side by side in few
  plaintexts; the owner of v multiplies <x_i>^{v_i}. Any number of vectors needs no further encryption.

What is returned to the key's owner is multiplied by random n-th powers (`key_proofs`), which hide from it what was
multiplied; fresh ciphertexts for others (`hide`) have w^r with full-length r, which hides from them if the key's owner
drew w as it should. *Assumption*: the security of the cipher; honest-but-curious parties.

*Lattice map.* The server (`VectorServer`) holds integer columns of some rows, a client (`VectorClient`) a vector over
some of these rows, sent at full length, zero elsewhere, so that one hint serves all batches of these rows and the
server cannot tell which are meant. The server adds a mask to every answer, uniform over the whole ring: what the client
opens is uniform, whatever vector it sent, and its upper bits are its share; the server's are the mask's, negative.

    entry m_i = low + 2^26 high = v_i,     |v_i| < 2^(vector_bits - 1),     products modulo 2^message_bits

A long table is cut into blocks of rows, each with its own matrix and hint: a vector need not be longer than the block
of its batch, if all may know which block that is. If the mask's lower bits and the noise carry into the upper ones, the
shares of a product are one too large, with a probability of at most 2^-64. Answers reveal nothing to the client, so no
ledger counts them; queries reveal nothing to the server under ring-LWE, and shares what they add up to. Assumptions are
in docs/lattice.md.

References: Hardy et al., Private Federated Learning on Vertically Partitioned Data via Entity Resolution and Additively
Homomorphic Encryption, arXiv 1711.10677, section 4. Pippenger, On the Evaluation of Powers and Related Problems, FOCS
1976.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.ciphers import OUPublicKey, PrivateKey, PublicKey
from treaty.crypto.additive.key_proofs import KeyRandomness, Randomiser
from treaty.crypto.additive.montgomery import FixedBase, Modulus
from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.linear_map import LinearMapClient, LinearMapServer
from treaty.crypto.lattice.ring import pack, packed_words, uniform_digits, unpack
from treaty.crypto.parameters import (
    DIGIT_BITS,
    STATISTICAL_BITS,
    Digits,
    Field,
    Parameters,
    SecretMatrix,
    check_fields,
    choose_masked,
)
from treaty.crypto.payload import Payload, check_payload, from_words, group_starts, put_field, to_words
from treaty.errors import CryptoError
from treaty.machine.arrays import Integers, Words, pieces
from treaty.machine.process import concurrently

_WINDOW = 6  # bits per table look-up
_CHUNK = 64  # rows a thread encrypts at a time


@dataclass(frozen=True, slots=True)
class Fields:
    """Layout of signed numbers side by side in plaintexts, the first one highest."""

    bits: int
    mask_bits: int
    width: int
    per_plaintext: int

    @classmethod
    def of(cls, bits: int, plaintext_bits: int, *, masks: int = 0, most: int | None = None) -> Fields:
        """Fit as many numbers, at most `most`, into a plaintext less 80 bits as possible; CryptoError if none fits.

        `masks` is how many masks are added to a number, each below 2^(bits + 80).
        """
        # what is opened reveals at most 2^-80 (total variation) of a value below 2^bits under a mask of 80 bits more
        mask_bits = bits + STATISTICAL_BITS if masks else 0
        width = mask_bits + 1 + masks.bit_length() if masks else bits
        # The highest 80 bits of a plaintext stay free: under Okamoto-Uchiyama a message m above p is opened as m mod p,
        # and gcd(m - (m mod p), n) would be p. A sender would have to know p's leading 80 bits to make such a message
        # that the owner does not refuse.
        room = plaintext_bits - 2 - STATISTICAL_BITS
        fitting = room // width
        if fitting < 1:
            raise CryptoError(
                f"a number of {width} bits exceeds the plaintext, of which {room} bits are for numbers - take a "
                "longer key, or smaller batches"
            )
        return cls(bits, mask_bits, width, fitting if most is None else min(fitting, most))

    def masks(self, count: int) -> list[int]:
        """Draw masks of numbers, or zeros where there are none."""
        return [secrets.randbits(self.mask_bits) if self.mask_bits else 0 for _ in range(count)]

    def join(self, numbers: Sequence[int]) -> list[int]:
        """Put numbers, each already within its field, into plaintexts."""
        starts: list[int] = group_starts(len(numbers), self.per_plaintext).tolist()
        joined = []
        for first, stop in pairwise(starts):
            total = 0
            for number in numbers[first:stop]:
                total = (total << self.width) + number
            joined.append(total)
        return joined

    def part(self, plaintexts: Sequence[int], count: int) -> list[int]:
        """Split plaintexts into their fields; CryptoError if they hold more."""
        starts, mask = group_starts(count, self.per_plaintext).tolist(), (1 << self.width) - 1
        if len(plaintexts) != len(starts) - 1:
            raise CryptoError(f"expected {len(starts) - 1} plaintexts of {count} numbers, got {len(plaintexts)}")
        numbers: list[int] = []
        for plaintext, (first, stop) in zip(plaintexts, pairwise(starts), strict=True):
            if plaintext >> (self.width * (stop - first)):
                raise CryptoError("a plaintext holds more than its fields - it was not made as agreed")
            numbers += [plaintext >> (self.width * k) & mask for k in range(stop - first - 1, -1, -1)]
        return numbers

    def signed(self, numbers: Sequence[int], masks: Sequence[int]) -> list[int]:
        """Subtract masks and the offset of signed numbers; CryptoError if the result is out of range."""
        half = 1 << (self.bits - 1)
        found = [number - mask - half for number, mask in zip(numbers, masks, strict=True)]
        if any(not -half <= number < half for number in found):
            raise CryptoError("an opened number exceeds its bound - the other side did not only add and multiply")
        return found


class Hider:
    """Fresh encryptions of messages of at most `message_bits` under a public key, and products with own integers."""

    def __init__(self, key: PublicKey, message_bits: int, threads: int) -> None:
        self.modulus: Modulus = key.modulus
        self.plaintext_bits = key.plaintext_bits
        self._threads, self.limbs = threads, -(-message_bits // 64)
        self._randomiser = Randomiser(key, threads)
        self._key_randomness = KeyRandomness(key)
        # g^m, which takes a table, or 1 + n m, one product: working Montgomery forms without randomness
        self._message: Callable[[Words], Words]
        if isinstance(key, OUPublicKey):
            self._message = FixedBase(key.modulus, key.g, message_bits, _WINDOW).power
        else:
            modulus, n = key.modulus, key.modulus.montgomery([key.n * key.modulus.radix])
            self._message = lambda m: modulus.add(modulus.multiply(modulus.unpack(m), n), modulus.one[None].copy())

    def hide(self, values: Integers, bits: int) -> Words:
        """Encrypt signed numbers (n,) one by one, as x + 2^(bits - 1) so that sums need no sign: (n, words)."""
        shifted = (check_range(values, bits) + (1 << (bits - 1))).astype(np.uint64)
        return self.hide_words(shifted[:, np.newaxis])

    def hide_words(self, messages: Words) -> Words:
        """Encrypt non-negative numbers, little-endian words (n, limbs), for others than the key's owner."""
        return self._with_randomness(messages, self._key_randomness)

    def add_words(self, products: Words, messages: Words) -> Words:
        """Add non-negative numbers, little-endian words (n, limbs), to ciphertexts (n, words) for the key's owner."""
        return self._with_randomness(messages, self._randomiser, products)

    def _with_randomness(
        self, messages: Words, randomness: KeyRandomness | Randomiser, products: Words | None = None
    ) -> Words:
        modulus = self.modulus
        out = np.empty((len(messages), modulus.words), np.uint64)
        exponents = randomness.exponents(len(messages))

        def chunk(rows: slice) -> None:
            made = modulus.multiply(randomness.factors(exponents[rows]), self._message(messages[rows]))
            if products is not None:
                made = modulus.multiply(made, modulus.unpack(products[rows]))
            out[rows] = modulus.pack(made)

        concurrently(chunk, pieces(len(messages), _CHUNK), self._threads)
        return out

    def multiply(self, factors: Sequence[Words]) -> Words:
        """Add up messages: the product, row by row, of several arrays of ciphertexts (n, words)."""
        modulus, stacked = self.modulus, np.concatenate(factors)
        rows, many = len(factors[0]), len(factors)
        # row r of every array, one after the other, is segment r
        index = np.arange(rows, dtype=np.int32)[:, None] + np.arange(many, dtype=np.int32) * np.int32(rows)
        out = np.empty((rows, modulus.words), np.uint64)

        def work(part: slice) -> None:
            starts = np.arange(part.stop - part.start + 1) * many
            modulus.segment_products(stacked, np.ascontiguousarray(index[part]).reshape(-1), starts, out[part])

        concurrently(work, pieces(rows, _CHUNK), self._threads)
        return out

    def product(self, ciphertexts: Words) -> Words:
        """Multiply ciphertexts (n, words) into one, of the sum of their plaintexts (1, words)."""
        product, index = np.empty((1, self.modulus.words), np.uint64), np.arange(len(ciphertexts), dtype=np.int32)
        self.modulus.segment_products(ciphertexts, index, np.array([0, len(index)]), product)
        return product

    def weigh(self, ciphertexts: Words, weights: Integers, bits: int) -> Words:
        """Return ciphertexts (columns, words) of sum_i v_i x_ij, of ciphertexts of v and weights x (rows, columns).

        Weights are from -2^(bits - 1) to 2^(bits - 1) - 1, of at most 62 bits, to which work is proportional. `cover`
        must re-randomise the result before it is sent. Its plaintexts are signed, modulo that of the cipher.
        """
        modulus, columns = self.modulus, weights.shape[1]
        offset = 1 << (bits - 1)
        # exponents must not be negative: x + offset, which adds offset sum v; that is divided out at the end
        shifted = (check_range(weights, bits) + offset).astype(np.uint64)
        pairs = np.stack([np.zeros(columns, np.int64), np.arange(columns)], axis=1)
        bases = modulus.unpack(ciphertexts)[:, np.newaxis]
        products = modulus.bucket_products(bases, shifted, pairs, bits, self._threads)
        inverse = self._inverse(self.product(ciphertexts), offset)
        return modulus.pack(modulus.multiply(products, modulus.montgomery([inverse])))

    def subtract(self, minuend: Words, subtrahend: Words) -> Words:
        """Return the ciphertext of a difference, of one ciphertext (1, words) each."""
        modulus = self.modulus
        inverse = modulus.montgomery([self._inverse(subtrahend, 1)])
        return modulus.pack(modulus.multiply(modulus.unpack(minuend), inverse))

    def _inverse(self, packed: Words, power: int) -> int:
        # out of Montgomery form, inverted, then to the power
        n, radix = self.modulus.value, self.modulus.radix
        value = from_words(packed)[0] * gmpy2.invert(radix, n) % n
        try:
            return int(gmpy2.powmod(gmpy2.invert(value, n), power, n))
        except ZeroDivisionError:
            raise CryptoError("a ciphertext shares a factor with the modulus - at the product of ciphertexts") from None

    def cover(self, ciphertexts: Words, added: Sequence[int], fields: Fields) -> Words:
        """Put ciphertexts (numbers, words) into few, add a number that is not negative to each field, and re-randomise.

        `added` makes each number fit its field, such as a mask. Returns (ceil(numbers / per_plaintext), words).
        """
        modulus, starts = self.modulus, group_starts(len(added), fields.per_plaintext)
        ones = np.repeat(modulus.one[np.newaxis], len(starts) - 1, axis=0)
        # x^{2^width} shifts a plaintext up by one field
        joined = modulus.horner(np.ascontiguousarray(ciphertexts), starts, fields.width, ones)
        return self.add_words(joined, to_words(fields.join(added), self.limbs))

    def check(self, ciphertexts: Words, shape: tuple[int, ...], what: str) -> Words:
        """Return ciphertexts, uint64 (*shape, words); CryptoError if one is no unit, or the shape differs."""
        check_payload([ciphertexts], what, (np.uint64, (*shape, self.modulus.words)))
        if not self.modulus.are_units(ciphertexts.reshape(-1, self.modulus.words), self._threads):
            raise CryptoError(f"a ciphertext is not in range or not prime to n - in {what}")
        return ciphertexts


class HiddenMatrix:
    """Another party's matrix, its rows encrypted once by `hide_rows`, to be multiplied by own vectors.

    `hider` is under the owner's key, `rows` are (n, plaintexts, words), and `fields` have `product_bits` or more.
    """

    def __init__(
        self, hider: Hider, rows: Words, weight_bits: int, vector_bits: int, fields: Fields, threads: int
    ) -> None:
        self._hider, self._rows, self.fields = hider, rows, fields
        self._weight_bits, self._vector_bits, self._threads = weight_bits, vector_bits, threads

    def times(self, index: Integers, vector: Integers, added: Sequence[int]) -> Words:
        """Multiply rows `index` by a vector: re-randomised ciphertexts of sum_i v_i x_ij, fields together.

        Returns (plaintexts, words) for the owner's `opened`. A field holds its sum, shifted by 2^(bits - 1), and the
        number `added` to it, such as a mask.
        """
        modulus, bits = self._hider.modulus, self._vector_bits
        # exponents must not be negative
        shifted = check_range(vector, bits) + (1 << (bits - 1))
        picked = self._rows[index]
        plaintexts = picked.shape[1]
        bases = modulus.unpack(picked.reshape(-1, modulus.words)).reshape(len(index), plaintexts, -1)
        pairs = np.stack([np.arange(plaintexts), np.zeros(plaintexts, np.int64)], axis=1)
        exponents = shifted.astype(np.uint64)[:, np.newaxis]
        products = modulus.pack(modulus.bucket_products(bases, exponents, pairs, bits, self._threads))
        # (x + o)(v + s) = x v + s x + o (v + s): the last term is subtracted here, s times the sum of x by the owner
        offset, half = 1 << (self._weight_bits - 1), 1 << (self.fields.bits - 1)
        less = half - offset * sum(shifted.tolist())
        fields = self.fields.join([less + number for number in added])
        return self._hider.add_words(products, to_words(fields, self._hider.limbs))


def product_bits(rows: int, weight_bits: int, vector_bits: int) -> int:
    """Return the bits of signed sums over so many rows, offsets included, for `Fields.of`."""
    return weight_bits + vector_bits + rows.bit_length() + 2


def hide_rows(key: PrivateKey, matrix: Integers, bits: int, fields: Fields, threads: int) -> Words:
    """Encrypt the rows of a matrix of signed integers (n, columns) under one's own key: (n, plaintexts, words)."""
    shifted = check_range(matrix, bits) + (1 << (bits - 1))
    starts = group_starts(matrix.shape[1], fields.per_plaintext)
    limbs = -(-key.public.plaintext_bits // 64)
    out = np.empty((len(matrix), len(starts) - 1, key.public.modulus.words), np.uint64)
    for number, (first, stop) in enumerate(pairwise(starts.tolist())):
        messages = np.zeros((len(matrix), limbs), np.uint64)
        for column in range(first, stop):
            put_field(messages, fields.width * (stop - 1 - column), shifted[:, column].astype(np.uint64))
        out[:, number] = key.encrypt(messages, threads)
    return out


def opened(key: PrivateKey, ciphertexts: Words, count: int, fields: Fields, threads: int) -> list[int]:
    """Decrypt with one's own key and split into `count` numbers below 2^width; CryptoError if they are malformed."""
    if not key.public.modulus.in_range(ciphertexts):
        raise CryptoError("a ciphertext is not in range - at decryption")
    return fields.part(from_words(key.decrypt(ciphertexts, threads)), count)


def check_range(values: Integers, bits: int) -> Integers:
    """Return signed integers that fit so many bits; CryptoError for others."""
    half = 1 << (bits - 1)
    if values.size and (values.min() < -half or values.max() >= half):
        raise CryptoError(f"expected numbers below 2^{bits - 1} in size - before encryption")
    return values


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
        shape = (columns, self._parameters.digits, self._parameters.degree)
        check_payload(hint, f"the hint of {peer}", (np.int16, shape))
        self._hints[peer, block] = hint[0].copy()

    def query(self, rows: Integers, vector: Integers) -> Payload:
        """Encrypt a vector with these entries at `rows`, under a secret of its own, for all servers alike."""
        check_range(vector, self._bits)
        fields = np.zeros((2, self._n_rows), np.int32)
        # the upper field has the sign
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
    """The end that holds int64 columns (columns, rows), within the bounds of the parameters, or indicators of bins."""

    def __init__(
        self, parameters: Parameters, columns: Integers | SecretMatrix, seed: bytes, *, threads: int = 1
    ) -> None:
        if not isinstance(columns, SecretMatrix):
            sizes = np.abs(columns)
            if sizes.sum(axis=1).max(initial=0) > parameters.weight or sizes.max(initial=0) >= min(parameters.primes):
                raise CryptoError("a column exceeds the bound of the parameters - in the lattice map")
            columns = SecretMatrix.of_integers(columns.astype(np.int32))
        self.parameters, self._threads = parameters, threads
        self._columns, self._features = (columns.rows, columns.length), len(columns.columns)
        self._map = LinearMapServer(parameters, columns, seed, threads=threads)

    def hint(self) -> Payload:
        """Return the hint, once."""
        made = list(self._map.hint(max(1, self._columns[0])))
        shape = (0, self.parameters.digits, self.parameters.degree)
        return [np.concatenate([np.empty(shape, np.int16), *made])]

    def answer(self, query: Payload) -> tuple[Payload, list[int]]:
        """Answer a query; return also this end's shares, which with the client's add up to the products."""
        parameters, (columns, length) = self.parameters, self._columns
        sizes = [packed_words(parameters, count) for count in (length, parameters.degree)]
        check_payload(query, "a query", *((np.uint32, (1, size)) for size in sizes))
        words, own = (
            unpack(parameters, packed, count, self._threads)
            for packed, count in zip(query, (length, parameters.degree), strict=True)
        )
        # uniform over the whole ring, of this answer alone: what the client opens is uniform, whatever it asked
        masks = uniform_digits(Keystream().raw, (1, columns, parameters.digits))
        made = self._map.answer(words, own, np.arange(self._features, dtype=np.int64), masks)
        return [made], [-mask % (1 << parameters.message_bits) for mask in _upper(masks[0], parameters)]


def _upper(numbers: Digits, parameters: Parameters) -> list[int]:
    """Return the message's bits of numbers of the ring, (n, D)."""
    whole = (sum(digit << DIGIT_BITS * k for k, digit in enumerate(row)) for row in numbers.tolist())
    return [number >> parameters.below for number in whole]


def signed(number: int, bits: int) -> int:
    """Read a number modulo 2^bits as one from -2^(bits - 1)."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
