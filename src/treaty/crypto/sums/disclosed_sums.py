"""What an auditor finds in recorded gradients, or vectors of nodes, once their maker has shown its key or secrets.

Each entry is compared with the gradient and hessian that it should hold. Under the lattice map and other blind ciphers
there is an entry for every row and node, which holds nothing where the row is not in the node.

* *Assumption*: the key or secrets shown are those used. A false one is found: it has to be the factors of the public
  key, or to leave small errors everywhere (`crypto.lattice.disclosed`).
* *Who learns what*: the auditor gets all gradients and the rows of all nodes, and so labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.crypto.additive import okamoto_uchiyama, paillier
from treaty.crypto.additive.packing import Packing
from treaty.crypto.lattice.map_client import LinearMapClient
from treaty.crypto.lattice.packed import packed_words, unpack
from treaty.crypto.lattice.store import DisclosedQuery, encode
from treaty.crypto.payload import Payload, SumsBounds, check_payload
from treaty.crypto.sums import lattice_sums
from treaty.crypto.sums.lattice_sums import lattice_fields, sums_parameters
from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Integers, pieces

AdditiveKey = okamoto_uchiyama.PrivateKey | paillier.PrivateKey
_OPENED_AT_A_TIME = 4096  # ciphertexts


@dataclass(frozen=True, slots=True)
class Opened:
    """What is in entries (vectors, rows): `held`, the numbers expected; `wrong`, neither these nor nothing.

    `faults` are sentences about secrets that do not open them.
    """

    held: Flags
    wrong: Flags
    faults: list[str] = field(default_factory=list)


class DisclosedLattice:
    """Queries of the lattice map, under a public seed of all parties."""

    def __init__(self, bounds: SumsBounds, seed: bytes, threads: int = 1) -> None:
        self._bounds = bounds
        self._client = LinearMapClient(
            sums_parameters(bounds), lattice_fields(bounds)[0], seed, bounds.n_rows, threads=threads
        )

    def begin_tree(self, grad: Integers, hess: Integers) -> None:
        """Take the gradients and hessians that a tree's queries should hold, of all rows."""
        expected = np.stack([np.ones(len(grad), np.int64), hess, grad]).astype(np.int32)
        self._expected, self._nothing = encode(self._client, expected), encode(self._client, 0 * expected)

    def open(self, query: Payload, secrets: NDArray[np.int8] | None) -> Opened:
        """Open a recorded query with its secrets, int8 (vectors, N); None where none are shown."""
        parameters = self._client.parameters
        n, degree = self._bounds.n_rows, parameters.degree
        check_payload(query, "a recorded query", (np.uint32, (None, packed_words(parameters, n))),
                      (np.uint32, (None, packed_words(parameters, degree))))  # fmt: skip
        vectors = len(query[0])
        held, empty = np.zeros((2, vectors, n), np.bool_)
        if secrets is None or secrets.shape != (vectors, degree) or len(query[1]) != vectors:
            return Opened(held, ~empty, [f"no secrets are shown for {vectors} vectors"])
        without = 0
        for v in range(vectors):
            words, own = unpack(parameters, query[0][[v]], n)[0], unpack(parameters, query[1][[v]], degree)[0]
            query_v = DisclosedQuery(self._client, secrets[v], words, own)
            without += not query_v.fits
            held[v], empty[v] = query_v.holds(self._expected), query_v.holds(self._nothing)
        faults = [f"the secrets shown are not those of {without} of {vectors} vectors"] if without else []
        return Opened(held, ~(held | empty), faults)


class DisclosedKey:
    """Ciphertexts under an additive cipher, whose randomness tells their maker nothing, as answers have other."""

    def __init__(self, key: AdditiveKey, bounds: SumsBounds, threads: int = 1) -> None:
        self._key, self._threads = key, threads
        self._packing = Packing(bounds, key.public.plaintext_bits)

    def begin_tree(self, grad: Integers, hess: Integers) -> None:
        """Take the gradients and hessians that a tree's ciphertexts should hold, of the rows in their order."""
        self._expected = self._packing.pack_rows(grad, hess)

    def open(self, query: Payload, secrets: NDArray[np.int8] | None = None) -> Opened:
        """Open recorded ciphertexts, uint8 (rows, bytes) or (vectors, rows, bytes); the key is all they need."""
        modulus, rows, expected = self._key.public.modulus, len(self._expected), self._expected
        flat = query[0].reshape(-1, query[0].shape[-1])
        check_payload([flat], "recorded ciphertexts", (np.uint8, (None, 8 * modulus.words)))
        words = np.ascontiguousarray(flat).view(np.uint64)
        vectors = len(words) // rows if rows else 0
        if len(words) != vectors * rows or not modulus.in_range(words):
            raise CryptoError(f"expected ciphertexts of {rows} rows, got others - in a recorded message")
        held, empty = np.empty(len(words), np.bool_), np.empty(len(words), np.bool_)
        for part in pieces(len(words), _OPENED_AT_A_TIME):
            found = self._key.decrypt(words[part], self._threads)
            limbs = expected.shape[1]
            beyond = found[:, limbs:].any(axis=1)
            should = expected[np.arange(part.start, part.stop) % rows]
            held[part] = (found[:, :limbs] == should).all(axis=1) & ~beyond
            empty[part] = ~found.any(axis=1)
        shape = (vectors, rows)
        return Opened(held.reshape(shape), ~(held | empty).reshape(shape))


def bounds_of(cipher: str, setup: Payload) -> SumsBounds:
    """Return the bounds that a recorded set-up states; CryptoError where it has none, or vectors of several nodes."""
    stated = setup[0] if cipher == "lattice" else setup[1][:3] if len(setup) > 1 else np.empty(0, np.int64)
    if cipher == "lattice" and stated.shape == (4,) and stated[3] == 1:
        stated = stated[:3]
    if stated.shape != (3,) or stated.dtype != np.int64:
        raise CryptoError("expected three bounds - in the recorded set-up")
    return SumsBounds(*(int(x) for x in stated))


def vector_bytes(cipher: str, setup: Payload) -> int:
    """Return how many bytes a message has for all rows, or those of one node under a blind cipher."""
    bounds = bounds_of(cipher, setup)
    if cipher == "lattice":
        return lattice_sums.vector_bytes(sums_parameters(bounds), bounds.n_rows)
    words = int(setup[0].shape[1])  # of n; under Paillier ciphertexts are modulo its square
    return 8 * bounds.n_rows * (2 * words if cipher == "paillier" else words)


def disclosed_key(cipher: str, setup: Payload, secrets: Sequence[int], test_key_bits: int | None) -> AdditiveKey:
    """Return the private key, of `secret_numbers`, that belongs to the public one of a recorded set-up.

    CryptoError where it does not.
    """
    check_payload(setup, "the recorded set-up", (np.uint64, (None, None)), (np.int64, (None,)))
    sent = [setup[0], setup[1][3:]]
    if cipher == "paillier" and len(secrets) == 2:
        p, q = secrets
        public = paillier.PublicKey.from_payload(sent, test_key_bits)
        if p * q == public.n and _primes(p, q):
            return paillier.PrivateKey(p, q, public)
    if cipher == "ou" and len(secrets) == 5:
        p, q, u, v, a = secrets
        key = okamoto_uchiyama.PublicKey.from_payload(sent, test_key_bits)
        fits = p * p * q == key.n and _primes(p, q) and 0 < u < p and 0 < v < q  # tables grow with u and v
        if fits and gmpy2.powmod(key.g, p - 1, p * p) == (1 + a * (p - 1) * p) % (p * p):
            return okamoto_uchiyama.PrivateKey(p, q, u, v, a, key)
    raise CryptoError("expected the private key of the public one that was sent, got another - in the active record")


def _primes(*numbers: int) -> bool:
    return all(gmpy2.is_prime(number, parameters.PRIMALITY_ROUNDS) for number in numbers)
