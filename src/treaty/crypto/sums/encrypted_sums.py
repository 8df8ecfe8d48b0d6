"""The interface between the vertical tree protocols and a cipher: sums of hidden gradients over a peer's bins.

The *client* (active party, one per job) holds gradients and the secret key; a *server* (each passive party, one per
job) holds binned columns. Level by level the client asks for the sums of gradient, hessian and count over every bin of
every column, in the nodes it names, and alone reads the answer:

=================  ==================  ================  ==============================  ===========================
call at client     call at server      once per          carries (Okamoto-Uchiyama,      carries (lattice)
                                                         Paillier)
=================  ==================  ================  ==============================  ===========================
setup              constructor         job               public key, bounds              bounds
accept_hint        hint                job and server    the bin each column leaves out  the hint, in pieces
begin_tree         begin_tree,         tree              a ciphertext per sampled row    nothing
                   add_rows
query              add, answer         level             node of each row; back:         a vector per node; back:
                                                         encrypted bin sums              flooded bin sums
open               --                  level and server  nothing: decrypts               nothing: opens
=================  ==================  ================  ==============================  ===========================

Ciphertexts of rows, and numbers of their nodes, are sent in pieces of at most 60 MB, some rows after the others, and
made as they are sent (those of `triple_sums` at once, 16 bytes a row and node). A `blind` cipher takes all rows and
names none; under the others servers learn the rows of every node. The implementations (`additive_sums`, `lattice_sums`;
`triple_sums`, which needs a dealer and so is made elsewhere) state what each side learns.

*Disclosure.* An auditor opens recorded messages once their maker has shown its key or secrets (`DisclosedKey`,
`DisclosedLattice`): each entry is compared with the gradient and hessian that it should hold. The auditor learns all
gradients and the rows of all nodes, and so labels. False secrets are detected: a key has to be the factors of the
public one; under the lattice map b_j - a_j s must be an error of at most 21, the largest that the protocol draws, plus
the number expected, so an entry that passes holds this very number. For another secret s' a maker would need
a_0 (s - s') as small as errors are, a short solution of ring-SIS for an a_0 that comes from a seed of all parties; of
the at most 5^N differences each invertible one gives a uniform product, small with probability (85 / q)^N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.crypto.additive import ciphers
from treaty.crypto.lattice.linear_map import LinearMapClient
from treaty.crypto.lattice.ring import Residues, packed_words, unpack
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.parameters import ERROR_BITS
from treaty.crypto.payload import Packing, Payload, SumsBounds, check_payload
from treaty.crypto.sums.additive_sums import AdditiveSumsClient, AdditiveSumsServer, BlindSumsClient, BlindSumsServer
from treaty.crypto.sums.lattice_sums import (
    LatticeSumsClient,
    LatticeSumsServer,
    lattice_fields,
    sums_parameters,
    vector_bytes,
)
from treaty.errors import ConfigError, CryptoError
from treaty.machine.arrays import Codes, Flags, Int32s, Integers, pieces


class SumsClient(Protocol):
    """The active party's end. Calls in the order of the table above; errors are CryptoError."""

    blind: bool  # servers learn neither the rows of a node nor those of the tree's sample
    nodes_at_a_time: int  # most nodes of one query; a level that has more is asked for in several

    def setup(self) -> Payload:
        """Return what every server is built from: the same payload to all, once per job."""

    def accept_hint(self, peer: str, hint: Payload, offsets: Int32s) -> int:
        """Take the next piece of a server's hint; return how many slots are still to come, 0 with the last piece.

        `offsets`, int32 (features + 1,): first slot of each of the server's features, and the number of slots.
        """

    def begin_tree(self, grad: Integers, hess: Integers) -> Iterator[Payload]:
        """Return what is sent to every server once per tree: one piece at least.

        `grad` and `hess`, int64 (m,), are fixed-point derivatives within the job's bounds: of the tree's sampled rows;
        for a blind cipher, of all rows.
        """

    def query(self, positions: Int32s, starts: Int32s) -> Iterator[Payload]:
        """Ask for the bin sums of nodes of a level: return what is sent to every server, one piece at least.

        Node k holds the rows positions[starts[k]:starts[k + 1]]; positions, each at most once, index the rows of
        `begin_tree`.
        """

    def open(self, peer: str, answer: Payload, totals: Integers, features: Int32s | None = None) -> Integers:
        """Decrypt a server's answers in the order of the queries: sums of grad, hess and count, (nodes, slots, 3).

        `totals` (nodes, 3) are the same sums over each node, which the caller knows itself; `features` is the tree's
        sample of the server's columns, as in its `begin_tree`.
        """


class SumsServer(Protocol):
    """A passive party's end. Calls in the order of the table above; errors are CryptoError."""

    spare: int  # nodes that a level of a tree may have beyond those asked about, as a vector is about several

    def hint(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Payload]:
        """Return the answer to the set-up, once per job, in one piece or several.

        `progress` is called with slots done and slots in all while a hint of the lattice map is made.
        """

    def begin_tree(
        self, payload: Payload, rows: Int32s | None, features: Int32s | None = None, n_rows: int | None = None
    ) -> None:
        """Take the first piece of a tree; `rows` (m,) are the table rows it is about, in its order, None for all.

        `features` is the tree's sample of columns, by default all; the sums of others are not computed and mean
        nothing. `n_rows` is how many rows the tree has, if others follow those of this piece.
        """

    def add_rows(self, payload: Payload, rows: Int32s | None = None) -> None:
        """Take the next piece of a tree, about these rows; None where the tree has all."""

    def end_tree(self) -> None:
        """Free the tree's payload before the next one arrives."""

    def add(self, piece: Payload) -> int:
        """Take the next piece of a query; return how many nodes it is about."""

    def answer(self) -> Payload:
        """Answer the query whose pieces were added, for all its nodes."""

    def close(self) -> None:
        """Settle what outlives the job, after it has ended in order."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Classes of each kind of end: those of this machine, or a cluster's, with the same arguments."""

    additive: Callable[..., SumsServer] = AdditiveSumsServer
    blind: Callable[..., SumsServer] = BlindSumsServer
    lattice: Callable[..., SumsServer] = LatticeSumsServer
    lattice_client: Callable[..., SumsClient] = LatticeSumsClient


_UNKNOWN = 'expected encryption "lattice", "ou" or "paillier", got {!r}'

ALONE = Ends()  # all on this machine


def make_client(
    encryption: str, bounds: SumsBounds, *, threads: int, key_bits: int | None = None,
    insecure_test_key_bits: int | None = None, store: HintStore | None = None, blind: bool = False,
    sealed: bool = False, nodes: int = 1, ends: Ends = ALONE,
) -> SumsClient:  # fmt: skip
    """Make the active party's end for "lattice", "ou" or "paillier", with a fresh key that serves this job only.

    `key_bits` is 2048, 3072 (default) or 4096; `insecure_test_key_bits` replaces it, for tests and reproductions.
    `store` keeps hints of the lattice map, by default for this job. `blind` encrypts all rows once per node, so that
    servers see no rows of nodes; the lattice map always does. With `sealed` the lattice map's client opens shares of
    sums; its vectors are about `nodes` nodes. ConfigError for another cipher; CryptoError if the key size is not
    accepted or the sums do not fit a plaintext.
    """
    if encryption == "lattice":
        return ends.lattice_client(bounds, store or HintStore(None), threads=threads, sealed=sealed, nodes=nodes)
    make: Callable[..., ciphers.PrivateKey]
    if encryption == "ou":
        make, bits, share = ciphers.generate_key, key_bits or parameters.OU_DEFAULT_KEY_BITS, 3
    elif encryption == "paillier":
        make, bits, share = ciphers.generate_paillier_key, key_bits or parameters.PAILLIER_DEFAULT_KEY_BITS, 1
    else:
        raise ConfigError(_UNKNOWN.format(encryption))
    # raises before a key is made if the sums do not fit
    Packing(bounds, (insecure_test_key_bits or bits) // share)
    key = make(bits, insecure_test_key_bits=insecure_test_key_bits)
    return (BlindSumsClient if blind else AdditiveSumsClient)(key, bounds, threads=threads)


def make_server(
    encryption: str, setup: Payload, codes: Codes, offsets: Int32s, *, threads: int,
    insecure_test_key_bits: int | None = None, rerandomise: bool = True, names: Sequence[str] | None = None,
    store: HintStore | None = None, blind: bool = False, sealed: bool = False, ends: Ends = ALONE,
) -> SumsServer:  # fmt: skip
    """Make a passive party's end for the client's `setup` and the party's bin codes.

    Code c of feature f, uint8 codes (rows, features) in C order, is slot offsets[f] + c; a feature's last slot is for
    missing values. Keys of `insecure_test_key_bits` or more are accepted in tests and reproductions only. `rerandomise`
    hides from the key's owner which of its ciphertexts an answer is made of; False is the papers' form, for jobs in
    paper mode. `names` of the features are for the ledger of the lattice map in `store`, which stays at the party.
    ConfigError for an unknown cipher, CryptoError for an unusable key or table.
    """
    if encryption == "lattice":
        # bounds come from the client: parameters follow from them, alike at both ends
        check_payload(setup, "the set-up", (np.int64, (4,)))
        *stated_bounds, nodes = (int(x) for x in setup[0])
        bounds = SumsBounds(*stated_bounds)
        names = [str(k) for k in range(codes.shape[1])] if names is None else names
        options = {"threads": threads, "sealed": sealed, "nodes": nodes}
        return ends.lattice(bounds, codes, offsets, names, store or HintStore(None), **options)
    if encryption not in ("ou", "paillier"):
        raise ConfigError(_UNKNOWN.format(encryption))
    check_payload(setup, "the set-up", (np.uint64, (None, None)), (np.int64, (None,)))
    if len(setup[1]) < 3:
        raise CryptoError(f"expected three bounds, got {len(setup[1])} - in the set-up")
    # the key's statements follow the bounds
    stated, sent = SumsBounds(*(int(x) for x in setup[1][:3])), [setup[0], setup[1][3:]]
    of_key = ciphers.OUPublicKey if encryption == "ou" else ciphers.PaillierPublicKey
    key, kind = of_key.from_payload(sent, insecure_test_key_bits), ends.blind if blind else ends.additive
    return kind(key, stated, codes, offsets, threads=threads, rerandomise=rerandomise)


class DisclosedQuery:
    """One vector of a query, words (primes, n) and own (primes, N), whose secret, int8 (N,), is shown.

    `fits` says whether the secret is ternary and the one that the query was made with.
    """

    def __init__(self, client: LinearMapClient, secret: NDArray[np.int8], words: Residues, own: Residues) -> None:
        self._primes = _column(client)
        self._left = np.zeros(words.shape, np.int64)
        # for the right secret, a word less its mask is the number plus an error; b_0 holds no number, so an error alone
        self.fits = bool((np.abs(secret) <= 1).all() and (words < self._primes).all() and (own < self._primes).all())
        if self.fits:
            masks, masks_of_own = client.masks(secret[np.newaxis])
            self._left = (words.astype(np.int64) - masks[0]) % self._primes
            self.fits = bool(self._small((own.astype(np.int64) - masks_of_own[0]) % self._primes).all())

    def holds(self, encoded: Integers) -> Flags:
        """Return which entries are encryptions of the numbers that `encode` made these residues of, bool (n,)."""
        return self._small((self._left - encoded) % self._primes)

    def _small(self, residues: Integers) -> Flags:
        """Return which numbers, by their residues (primes, n), are errors."""
        # an error is the same number modulo each prime, and at most 21 in size
        centred = np.where(residues > self._primes // 2, residues - self._primes, residues)
        small: Flags = (centred == centred[0]).all(axis=0) & (np.abs(centred[0]) <= ERROR_BITS)
        return small


def encode(client: LinearMapClient, fields: Int32s) -> Integers:
    """Return residues, int64 (primes, n), of what stands for entries' numbers, int32 (fields, n), without an error."""
    encoded = np.zeros((len(client.parameters.primes), fields.shape[1]), np.int64)
    for values, scale in zip(fields.astype(np.int64), client.scales, strict=True):
        for k, prime in enumerate(client.parameters.primes):
            # numbers below 2^31 times residues below 2^31 fit 62 bits
            encoded[k] += values * (scale % prime) % prime
    return encoded % _column(client)


def _column(client: LinearMapClient) -> Integers:
    return np.array(client.parameters.primes, np.int64)[:, np.newaxis]


_OPENED_AT_A_TIME = 4096  # ciphertexts


@dataclass(frozen=True, slots=True)
class OpenedEntries:
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

    def open(self, query: Payload, secrets: NDArray[np.int8] | None) -> OpenedEntries:
        """Open a recorded query with its secrets, int8 (vectors, N); None where none are shown."""
        parameters = self._client.parameters
        n, degree = self._bounds.n_rows, parameters.degree
        check_payload(query, "a recorded query", (np.uint32, (None, packed_words(parameters, n))),
                      (np.uint32, (None, packed_words(parameters, degree))))  # fmt: skip
        vectors = len(query[0])
        held, empty = np.zeros((2, vectors, n), np.bool_)
        if secrets is None or secrets.shape != (vectors, degree) or len(query[1]) != vectors:
            return OpenedEntries(held, ~empty, [f"no secrets are shown for {vectors} vectors"])
        without = 0
        for v in range(vectors):
            words, own = unpack(parameters, query[0][[v]], n)[0], unpack(parameters, query[1][[v]], degree)[0]
            query_v = DisclosedQuery(self._client, secrets[v], words, own)
            without += not query_v.fits
            held[v], empty[v] = query_v.holds(self._expected), query_v.holds(self._nothing)
        # an entry holds either its row's numbers, if the row is in the node, or zeros
        faults = [f"the secrets shown do not belong to {without} of {vectors} vectors"] if without else []
        return OpenedEntries(held, ~(held | empty), faults)


class DisclosedKey:
    """Ciphertexts under an additive cipher."""

    def __init__(self, key: ciphers.PrivateKey, bounds: SumsBounds, threads: int = 1) -> None:
        self._key, self._threads = key, threads
        self._packing = Packing(bounds, key.public.plaintext_bits)

    def begin_tree(self, grad: Integers, hess: Integers) -> None:
        """Take the gradients and hessians that a tree's ciphertexts should hold, of the rows in their order."""
        self._expected = self._packing.pack_rows(grad, hess)

    def open(self, query: Payload, secrets: NDArray[np.int8] | None = None) -> OpenedEntries:
        """Open recorded ciphertexts, uint8 (rows, bytes) or (vectors, rows, bytes); the key is all they need."""
        modulus, rows, expected = self._key.public.modulus, len(self._expected), self._expected
        flat = query[0].reshape(-1, query[0].shape[-1])
        check_payload([flat], "recorded ciphertexts", (np.uint8, (None, 8 * modulus.words)))
        words = np.ascontiguousarray(flat).view(np.uint64)
        vectors = len(words) // rows if rows else 0
        if len(words) != vectors * rows or not modulus.in_range(words):
            raise CryptoError(f"expected ciphertexts of {rows} rows, all in range - in a recorded message")
        held, empty = np.empty(len(words), np.bool_), np.empty(len(words), np.bool_)
        for part in pieces(len(words), _OPENED_AT_A_TIME):
            found = self._key.decrypt(words[part], self._threads)
            limbs = expected.shape[1]
            beyond = found[:, limbs:].any(axis=1)
            # vectors of a blind cipher hold all rows once for each node
            should = expected[np.arange(part.start, part.stop) % rows]
            held[part] = (found[:, :limbs] == should).all(axis=1) & ~beyond
            empty[part] = ~found.any(axis=1)
        shape = (vectors, rows)
        return OpenedEntries(held.reshape(shape), ~(held | empty).reshape(shape))


def bounds_of(cipher: str, setup: Payload) -> SumsBounds:
    """Return the bounds that a recorded set-up states; CryptoError where it has none, or vectors of several nodes."""
    stated = setup[0] if cipher == "lattice" else setup[1][:3] if len(setup) > 1 else np.empty(0, np.int64)
    if cipher == "lattice" and stated.shape == (4,) and stated[3] == 1:
        stated = stated[:3]
    if stated.shape != (3,) or stated.dtype != np.int64:
        raise CryptoError("expected three bounds - in the recorded set-up")
    return SumsBounds(*(int(x) for x in stated))


def message_bytes(cipher: str, setup: Payload) -> int:
    """Return how many bytes a message has for all rows, or those of one node under a blind cipher."""
    bounds = bounds_of(cipher, setup)
    if cipher == "lattice":
        return vector_bytes(sums_parameters(bounds), bounds.n_rows)
    words = int(setup[0].shape[1])  # of n; under Paillier ciphertexts are modulo its square
    return 8 * bounds.n_rows * (2 * words if cipher == "paillier" else words)


def disclosed_key(cipher: str, setup: Payload, secrets: Sequence[int], test_key_bits: int | None) -> ciphers.PrivateKey:
    """Return the private key of `secret_numbers`; CryptoError if it is not that of the recorded public key."""
    check_payload(setup, "the recorded set-up", (np.uint64, (None, None)), (np.int64, (None,)))
    sent = [setup[0], setup[1][3:]]
    prime = [gmpy2.is_prime(number, parameters.PRIMALITY_ROUNDS) for number in secrets[:2]]
    if cipher == "paillier" and len(secrets) == 2:
        p, q = secrets
        public = ciphers.PaillierPublicKey.from_payload(sent, test_key_bits)
        if p * q == public.n and all(prime):
            return ciphers.PaillierPrivateKey(p, q, public)
    if cipher == "ou" and len(secrets) == 5:
        p, q, u, v, a = secrets
        key = ciphers.OUPublicKey.from_payload(sent, test_key_bits)
        # u and v must be below p and q, or tables, whose size grows with them, could fill the memory
        fits = p * p * q == key.n and all(prime) and 0 < u < p and 0 < v < q
        if fits and gmpy2.powmod(key.g, p - 1, p * p) == (1 + a * (p - 1) * p) % (p * p):
            return ciphers.OUPrivateKey(p, q, u, v, a, key)
    raise CryptoError(
        "the numbers shown are not the private key of the public key that was sent - in the active record"
    )
