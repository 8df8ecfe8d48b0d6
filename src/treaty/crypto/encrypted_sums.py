"""The seam between the vertical tree protocols and a cipher: sums of hidden gradients over a peer's bins.

The *client* (active party, one per job) holds gradients and the secret key; a *server* (each passive party, one
per job) holds binned columns. Level by level the client asks for the sums of gradient, hessian and count over
every bin of every column, in the nodes it names, and alone reads the answer:

=================  ==================  =====================  ==========================================
call at client     call at server      once per               carries (Okamoto-Uchiyama, Paillier)
=================  ==================  =====================  ==========================================
setup              constructor         job                    public key, bounds
accept_hint        hint                job and server         the bin each column leaves out
begin_tree         begin_tree          tree                   one ciphertext per sampled row
query              answer              level                  node of each row; back: encrypted bin sums
open               --                  level and server       nothing: decrypts
=================  ==================  =====================  ==========================================

A protocol carries the payloads, lists of arrays whose meaning only the two ends of one cipher know, and needs
no change for another cipher. What each side learns is stated by the implementation (`additive_sums`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import okamoto_uchiyama, paillier, parameters
from treaty.crypto.additive_sums import AdditivePrivateKey, AdditivePublicKey, AdditiveSumsClient, AdditiveSumsServer
from treaty.crypto.key_generation import generate_key, generate_paillier_key
from treaty.crypto.packing import Packing, SumsBounds
from treaty.crypto.payload import Payload, check_payload
from treaty.errors import ConfigError, CryptoError

__all__ = ["Payload", "SumsBounds", "SumsClient", "SumsServer", "make_client", "make_server"]


class SumsClient(Protocol):
    """The active party's end. Calls in the order of the table above; errors are CryptoError."""

    def setup(self) -> Payload:
        """Return what every server is built from: the same payload to all, once per job."""
        ...

    def accept_hint(self, peer: str, hint: Payload, offsets: NDArray[np.int32]) -> None:
        """Take a server's answer to the set-up.

        Parameters
        ----------
        peer : str
            Name of the server.
        hint : Payload
            What its `hint` returned.
        offsets : ndarray of int32, shape (features + 1,)
            First slot of each of its features, and the number of slots.
        """
        ...

    def begin_tree(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Payload:
        """Start a tree: return what is sent to every server once per tree.

        Parameters
        ----------
        grad, hess : ndarray of int64, shape (m,)
            Fixed-point derivatives of the tree's sampled rows, within the job's bounds.
        """
        ...

    def decrypt_rows(self, payload: Payload) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Decrypt what `begin_tree` returned: what an auditor who is shown the key compares with g, h committed to.

        Parameters
        ----------
        payload : Payload
            A tree's, of this client's key.

        Returns
        -------
        grad, hess : ndarray of int64, shape (m,)
            Fixed-point derivatives, row by row.

        Raises
        ------
        CryptoError
            When something is not a row within the job's bounds, or its randomness, or the key's base of randomness,
            is such that re-randomisation does not hide it: then it was not made by `begin_tree`. Says how many rows.
        """
        ...

    def query(self, positions: NDArray[np.int32], starts: NDArray[np.int32]) -> Payload:
        """Ask for the bin sums of all nodes of a level: return what is sent to every server.

        Parameters
        ----------
        positions : ndarray of int32
            Sampled rows, 0..m - 1, each at most once.
        starts : ndarray of int32, shape (nodes + 1,)
            Node k holds the rows positions[starts[k]:starts[k + 1]].
        """
        ...

    def open(self, peer: str, answer: Payload, totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Decrypt a server's answer to the last query.

        Parameters
        ----------
        peer : str
            Name of the server.
        answer : Payload
            What its `answer` returned.
        totals : ndarray of int64, shape (nodes, 3)
            Sums of gradient, hessian and count over each asked node, which the caller knows itself.

        Returns
        -------
        ndarray of int64, shape (nodes, slots, 3)
            Sums of gradient, hessian and count.
        """
        ...


class SumsServer(Protocol):
    """A passive party's end. Calls in the order of the table above; errors are CryptoError."""

    def hint(self) -> Payload:
        """Return the answer to the set-up, once per job."""
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

    def answer(self, query: Payload) -> Payload:
        """Answer a query: all nodes of a level at once."""
        ...


def make_client(
    encryption: str,
    bounds: SumsBounds,
    *,
    threads: int,
    key_bits: int | None = None,
    insecure_test_key_bits: int | None = None,
) -> SumsClient:
    """Make the active party's end, with a fresh key that serves this job only.

    Parameters
    ----------
    encryption : {"ou", "paillier"}
        The cipher: Okamoto-Uchiyama, or the papers' one.
    bounds : SumsBounds
        Public bounds of the job.
    threads : int
        Threads to use.
    key_bits : int, optional
        Size of the modulus: 2048, 3072 (default) or 4096.
    insecure_test_key_bits : int, optional
        Make a key of this size instead, such as the papers' 512. Tests and reproductions only.

    Raises
    ------
    ConfigError
        When there is no such cipher.
    CryptoError
        When the key size is not accepted or the sums do not fit a plaintext.
    """
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
    return AdditiveSumsClient(key, bounds, threads=threads)


def make_server(
    encryption: str,
    setup: Payload,
    codes: NDArray[np.uint8],
    offsets: NDArray[np.int32],
    *,
    threads: int,
    insecure_test_key_bits: int | None = None,
    rerandomise: bool = True,
) -> SumsServer:
    """Make a passive party's end.

    Parameters
    ----------
    encryption : {"ou", "paillier"}
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

    Raises
    ------
    ConfigError
        When there is no such cipher.
    CryptoError
        When the key or the table cannot be used.
    """
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
    return AdditiveSumsServer(key, stated, codes, offsets, threads=threads, rerandomise=rerandomise)


def _unknown(encryption: str) -> ConfigError:
    return ConfigError(f'expected encryption "ou" or "paillier", got {encryption!r}')
