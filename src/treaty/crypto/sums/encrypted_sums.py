"""The seam between the vertical tree protocols and a cipher: sums of hidden gradients over a peer's bins.

The *client* (active party, one per job) holds gradients and the secret key; a *server* (each passive party, one
per job) holds binned columns. Level by level the client asks for the sums of gradient, hessian and count over
every bin of every column, in the nodes it names, and alone reads the answer:

=================  ==================  ================  ==============================  ===========================
call at client     call at server      once per          carries (Okamoto-Uchiyama,      carries (lattice)
                                                         Paillier)
=================  ==================  ================  ==============================  ===========================
setup              constructor         job               public key, bounds              bounds
accept_hint        hint                job and server    the bin each column leaves out  the hint, in pieces
begin_tree         begin_tree          tree              a ciphertext per sampled row    nothing
query              answer              level             node of each row; back:         a vector per node; back:
                                                         encrypted bin sums              flooded bin sums
open               --                  level and server  nothing: decrypts               nothing: opens
=================  ==================  ================  ==============================  ===========================

A protocol carries the payloads, lists of arrays whose meaning only the two ends of one cipher know. A `blind` cipher
is given all rows and names none; under the others servers learn the rows of every node. What each side learns is
stated by the implementations (`additive_sums`, `blind_sums`, `lattice_sums`; `triple_sums`, which has a dealer and so
is made elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.crypto.additive import okamoto_uchiyama, paillier
from treaty.crypto.additive.key_generation import generate_key, generate_paillier_key
from treaty.crypto.additive.packing import Packing, SumsBounds
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.payload import Payload, check_payload
from treaty.crypto.sums.additive_sums import (
    AdditivePrivateKey,
    AdditivePublicKey,
    AdditiveSumsClient,
    AdditiveSumsServer,
)
from treaty.crypto.sums.blind_sums import BlindSumsClient, BlindSumsServer
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.errors import ConfigError, CryptoError

__all__ = ["Payload", "SumsBounds", "SumsClient", "SumsServer", "make_client", "make_server"]


class SumsClient(Protocol):
    """The active party's end. Calls in the order of the table above; errors are CryptoError.

    Attributes
    ----------
    blind : bool
        Servers are not told which rows are in a node, nor which are in a tree's sample.
    nodes_at_a_time : int
        Most nodes of one query; those of a level that has more are asked for in several.
    """

    blind: bool
    nodes_at_a_time: int

    def setup(self) -> Payload:
        """Return what every server is built from: the same payload to all, once per job."""
        ...

    def accept_hint(self, peer: str, hint: Payload, offsets: NDArray[np.int32]) -> int:
        """Take a piece of a server's answer to the set-up.

        Parameters
        ----------
        peer : str
            Name of the server.
        hint : Payload
            The next piece of what its `hint` yields.
        offsets : ndarray of int32, shape (features + 1,)
            First slot of each of its features, and the number of slots.

        Returns
        -------
        int
            Slots that pieces still to come are about; 0 with the last.
        """
        ...

    def begin_tree(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Payload:
        """Start a tree: return what is sent to every server once per tree.

        Parameters
        ----------
        grad, hess : ndarray of int64, shape (m,)
            Fixed-point derivatives within the job's bounds: of the tree's sampled rows; of a blind cipher, of all.
        """
        ...

    def query(self, positions: NDArray[np.int32], starts: NDArray[np.int32]) -> Payload:
        """Ask for the bin sums of nodes of a level: return what is sent to every server.

        Parameters
        ----------
        positions : ndarray of int32
            Places among the rows that `begin_tree` was given, each at most once.
        starts : ndarray of int32, shape (nodes + 1,)
            Node k holds the rows positions[starts[k]:starts[k + 1]].
        """
        ...

    def open(
        self, peer: str, answer: Payload, totals: NDArray[np.int64], features: NDArray[np.int32] | None = None
    ) -> NDArray[np.int64]:
        """Decrypt a server's answers, in the order of the queries.

        Parameters
        ----------
        peer : str
            Name of the server.
        answer : Payload
            What its `answer` returned.
        totals : ndarray of int64, shape (nodes, 3)
            Sums of gradient, hessian and count over each asked node, which the caller knows itself.
        features : ndarray of int32, optional
            The tree's sample of the server's columns, as its `begin_tree` was told. Default all.

        Returns
        -------
        ndarray of int64, shape (nodes, slots, 3)
            Sums of gradient, hessian and count.
        """
        ...


class SumsServer(Protocol):
    """A passive party's end. Calls in the order of the table above; errors are CryptoError."""

    def hint(self) -> Iterator[Payload]:
        """Return the answer to the set-up, once per job, in one piece or several."""
        ...

    def begin_tree(self, payload: Payload, rows: NDArray[np.int32], features: NDArray[np.int32] | None = None) -> None:
        """Take the payload of a tree.

        Parameters
        ----------
        payload : Payload
            What the client's `begin_tree` returned.
        rows : ndarray of int32, shape (m,)
            The table rows it speaks of, in its order.
        features : ndarray of int32, optional
            The tree's sample of columns; the sums of others are not computed and mean nothing. Default all.
        """
        ...

    def end_tree(self) -> None:
        """Let go of the tree's payload, so that it and the next one need not be held at one time."""
        ...

    def nodes_of(self, query: Payload) -> int:
        """Return how many nodes a query is about."""
        ...

    def answer(self, query: Payload) -> Payload:
        """Answer a query: all its nodes at once."""
        ...

    def close(self) -> None:
        """Settle what is kept beyond the job, when it has ended in order."""
        ...


def make_client(
    encryption: str,
    bounds: SumsBounds,
    *,
    threads: int,
    key_bits: int | None = None,
    insecure_test_key_bits: int | None = None,
    store: HintStore | None = None,
    blind: bool = False,
) -> SumsClient:
    """Make the active party's end, with a fresh key that serves this job only.

    Parameters
    ----------
    encryption : {"lattice", "ou", "paillier"}
        The cipher: the lattice map, Okamoto-Uchiyama, or the papers' one.
    bounds : SumsBounds
        Public bounds of the job.
    threads : int
        Threads to use.
    key_bits : int, optional
        Size of the modulus: 2048, 3072 (default) or 4096.
    insecure_test_key_bits : int, optional
        Make a key of this size instead, such as the papers' 512. Tests and reproductions only.
    store : HintStore, optional
        Of the lattice map, keeps hints for later jobs. Default: for this one.
    blind : bool
        Encrypt all rows once per node, so that servers see no rows of nodes. The lattice map is blind in any case.

    Raises
    ------
    ConfigError
        When there is no such cipher.
    CryptoError
        When the key size is not accepted or the sums do not fit a plaintext.
    """
    if encryption == "lattice":
        return LatticeSumsClient(bounds, store or HintStore(None), threads=threads)
    key: AdditivePrivateKey
    if encryption == "ou":
        bits = key_bits or parameters.OU_DEFAULT_KEY_BITS
        Packing(bounds, (insecure_test_key_bits or bits) // 3)  # refuses before a key is made
        key = generate_key(bits, insecure_test_key_bits=insecure_test_key_bits)
    elif encryption == "paillier":
        bits = key_bits or parameters.PAILLIER_DEFAULT_KEY_BITS
        Packing(bounds, insecure_test_key_bits or bits)
        key = generate_paillier_key(bits, insecure_test_key_bits=insecure_test_key_bits)
    else:
        raise _unknown(encryption)
    return (BlindSumsClient if blind else AdditiveSumsClient)(key, bounds, threads=threads)


def make_server(
    encryption: str,
    setup: Payload,
    codes: NDArray[np.uint8],
    offsets: NDArray[np.int32],
    *,
    threads: int,
    insecure_test_key_bits: int | None = None,
    rerandomise: bool = True,
    names: Sequence[str] | None = None,
    store: HintStore | None = None,
    progress: Callable[[int, int], None] | None = None,
    blind: bool = False,
) -> SumsServer:
    """Make a passive party's end.

    Parameters
    ----------
    encryption : {"lattice", "ou", "paillier"}
        The cipher.
    setup : Payload
        What the client's `setup` returned.
    codes : ndarray of uint8, shape (rows, features), C order
        Code c of feature f is slot offsets[f] + c; a feature's last slot is for missing values.
    offsets : ndarray of int32, shape (features + 1,)
        First slot of each feature, and the number of slots.
    threads : int
        Threads to use.
    insecure_test_key_bits : int, optional
        Accept keys of at least this size. Tests and reproductions only.
    rerandomise : bool, default True
        Hide from the key's owner which of its ciphertexts an answer is made of. False is the papers' form, in which
        the owner can tell: it may come here from a job in paper mode only, which every party has allowed.
    names : sequence of str, optional
        Of the features, for the ledger of the lattice map, which does not leave the party. Default: their numbers.
    store : HintStore, optional
        Of the lattice map: keeps hints and the ledger for later jobs. Default: for this one.
    progress : callable, optional
        Called with steps done and steps in all while a hint is made.
    blind : bool
        As `make_client` has it.

    Raises
    ------
    ConfigError
        When there is no such cipher.
    CryptoError
        When the key or the table cannot be used.
    """
    if encryption == "lattice":
        check_payload(setup, "the set-up", (np.int64, (3,)))
        bounds = SumsBounds(*(int(x) for x in setup[0]))
        names = [str(k) for k in range(codes.shape[1])] if names is None else names
        kept = store or HintStore(None)
        return LatticeSumsServer(bounds, codes, offsets, names, kept, threads=threads, progress=progress)
    if encryption not in ("ou", "paillier"):
        raise _unknown(encryption)
    check_payload(setup, "the set-up", (np.uint64, (None, None)), (np.int64, (None,)))
    if len(setup[1]) < 3:
        raise CryptoError(f"expected three bounds, got {len(setup[1])} - in the set-up")
    stated, sent = SumsBounds(*(int(x) for x in setup[1][:3])), [setup[0], setup[1][3:]]
    key: AdditivePublicKey
    if encryption == "ou":
        key = okamoto_uchiyama.PublicKey.from_payload(sent, insecure_test_key_bits)
    else:
        key = paillier.PublicKey.from_payload(sent, insecure_test_key_bits)
    kind = BlindSumsServer if blind else AdditiveSumsServer
    return kind(key, stated, codes, offsets, threads=threads, rerandomise=rerandomise)


def _unknown(encryption: str) -> ConfigError:
    return ConfigError(f'expected encryption "lattice", "ou" or "paillier", got {encryption!r}')
