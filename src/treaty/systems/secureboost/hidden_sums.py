"""A passive party's work on the ciphertexts of a hidden prediction: keep or replace, multiply, blind, seal."""

from __future__ import annotations

import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from treaty.crypto.additive.okamoto_uchiyama import PublicKey
from treaty.crypto.additive.randomiser import KeyRandomness, Randomiser
from treaty.errors import CryptoError
from treaty.parallel import concurrently, pieces
from treaty.systems.secureboost.hidden_terms import FIELD_BITS, NO_GAIN

Words = NDArray[np.uint64]

EXCHANGE_BYTES = 32
_NONCE_BYTES = 12
_ROWS, _FACTORS = 64, 32  # how many a thread takes at a time


class Adder:
    """Sums of encrypted terms under the active party's key.

    `words` are those of a ciphertext, `fields` how many outputs' sums a plaintext holds.
    """

    def __init__(self, key: PublicKey, threads: int) -> None:
        self._key, self.threads = key, threads
        self.words, self.fields = key.modulus.words, fields_of(key)
        self._randomiser, self._key_randomness = Randomiser(key, threads), KeyRandomness(key)

    def one(self, n_rows: int) -> Words:
        """Return the empty product, an encryption of 0, for each row, uint64 (n_rows, 1, words)."""
        return np.repeat(self._packed(1)[None], n_rows, axis=0)

    def valid(self, ciphertexts: Words) -> bool:
        """Whether all of them, uint64 (..., words), are in [1, n) and prime to n."""
        return self._key.modulus.are_units(ciphertexts.reshape(-1, self.words), self.threads)

    def select(
        self, sums: Words, terms: Words, kept: NDArray[np.bool_], onwards: NDArray[np.bool_], n_outputs: int
    ) -> tuple[Words, Words]:
        """Replace the terms that rows do not keep by "no gain", and add those that go no further to the sums.

        `sums` are uint64 (n_rows, 1, words), `terms` uint64 (n_rows, n_terms, words), `kept` bool (n_terms, n_rows),
        `onwards` bool (n_terms,). Return the sums (n_rows, words) and the terms that go on (n_rows, n_onwards, words);
        neither is blinded yet.
        """
        n_rows, n_terms = terms.shape[:2]
        stacked = np.empty((1 + n_rows * (1 + n_terms), self.words), np.uint64)
        no_gain = sum(NO_GAIN << FIELD_BITS * output for output in range(n_outputs))
        stacked[:1] = self._packed(pow(self._key.g, no_gain, self._key.n))
        by_row = stacked[1:].reshape(n_rows, 1 + n_terms, self.words)
        by_row[:, :1], by_row[:, 1:] = sums, terms
        first = 1 + np.arange(n_rows, dtype=np.int32)[:, None] * np.int32(1 + n_terms)
        chosen = np.where(kept.T, first + np.arange(1, 1 + n_terms, dtype=np.int32), np.int32(0))
        added = np.concatenate([first, chosen[:, ~onwards]], axis=1)
        products = np.empty((n_rows, self.words), np.uint64)

        def multiply(rows: slice) -> None:
            index = np.ascontiguousarray(added[rows])
            starts = np.arange(len(index) + 1) * index.shape[1]
            self._key.modulus.segment_products(stacked, index.reshape(-1), starts, products[rows])

        concurrently(multiply, pieces(n_rows, _ROWS), self.threads)
        return products, stacked[chosen[:, onwards]]

    def blind(self, ciphertexts: Words, together: int, bits: int) -> Words:
        """Merge every `together` ciphertexts into one for the key's owner, each times a random n-th power.

        Takes uint64 (n, words), returns uint64 (ceil(n / together), words); the merged plaintexts lie `bits` apart, the
        first highest.
        """
        return self._with_randomness(ciphertexts, together, bits, self._randomiser)

    def freshen(self, ciphertexts: Words) -> Words:
        """Re-randomise ciphertexts, uint64 (n, words), for others without the key: by full h^r, if h is drawn well."""
        return self._with_randomness(ciphertexts, 1, 1, self._key_randomness)

    def _with_randomness(
        self, ciphertexts: Words, together: int, bits: int, randomness: KeyRandomness | Randomiser
    ) -> Words:
        starts = np.minimum(np.arange(-(-len(ciphertexts) // together) + 1) * together, len(ciphertexts))
        exponents = randomness.exponents(len(starts) - 1)

        def some(part: slice) -> Words:
            factors = randomness.factors(exponents[part])
            return self._key.modulus.horner(ciphertexts, starts[part.start : part.stop + 1], bits, factors)

        made = concurrently(some, pieces(len(exponents), _FACTORS), self.threads)
        return np.concatenate([np.empty((0, self.words), np.uint64), *made])

    def _packed(self, residue: int) -> Words:
        modulus = self._key.modulus
        return modulus.pack(modulus.montgomery([residue]))


def fields_of(key: PublicKey) -> int:
    """Return how many outputs' sums a plaintext holds; raise CryptoError when not even one fits."""
    fields = (key.plaintext_bits - 2) // FIELD_BITS
    if fields < 1:
        raise CryptoError(f"expected a key with plaintexts of {FIELD_BITS + 2} bits, got {key.plaintext_bits}")
    return fields


class Box:
    """Encrypts what one party sends another by way of a third (ephemeral X25519, HKDF-SHA256, AES-256-GCM).

    Each direction has its own key: `sending` says whether this end seals or opens. Raises CryptoError when `other`, the
    other end's 32 bytes, is no usable public key.
    """

    def __init__(self, own: X25519PrivateKey, other: bytes, *, sending: bool) -> None:
        mine = own.public_key().public_bytes_raw()
        try:
            secret = own.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise CryptoError("expected an X25519 key, got something else") from None
        ends = mine + other if sending else other + mine
        info = b"treaty hidden inference 1" + ends
        self._aes = AESGCM(HKDF(SHA256(), 32, salt=None, info=info).derive(secret))

    def seal(self, content: bytes, place: str) -> bytes:
        """Encrypt content with `place` as associated data, so that no box can take another's place."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._aes.encrypt(nonce, content, place.encode())

    def open(self, box: bytes, place: str) -> bytes:
        """Decrypt a box; raise CryptoError when it is not what the other end sealed for this place."""
        if len(box) < _NONCE_BYTES:
            raise CryptoError("expected a sealed box, got too few bytes")
        try:
            return self._aes.decrypt(box[:_NONCE_BYTES], box[_NONCE_BYTES:], place.encode())
        except InvalidTag:
            raise CryptoError("expected what the party before sealed, got something else") from None
