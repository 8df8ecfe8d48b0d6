"""The seam between the vertical tree protocols and a cipher: sums of hidden gradients over a peer's bins.

The *client* (active party, one per job) holds gradients and the secret key; a *server* (each passive party, one
per job) holds binned columns. Level by level the client asks for the sums of gradient, hessian and count over
every bin of every column, in the nodes it names, and alone reads the answer:

=================  ==================  =====================  ==========================================
call at client     call at server      once per               carries (Okamoto-Uchiyama)
=================  ==================  =====================  ==========================================
setup              constructor         job                    public key, bounds
accept_hint        hint                job and server         the bin each column leaves out
begin_tree         begin_tree          tree                   one ciphertext per sampled row
query              answer              level                  node of each row; back: encrypted bin sums
open               --                  level and server       nothing: decrypts
=================  ==================  =====================  ==========================================

A protocol carries the payloads, lists of arrays whose meaning only the two ends of one cipher know, and needs
no change for another cipher. What each side learns is stated by the implementation (`ou_sums`).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.ou_sums import OUSumsClient, OUSumsServer
from treaty.crypto.packing import SumsBounds
from treaty.crypto.payload import Payload
from treaty.errors import ConfigError

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
    encryption: str, bounds: SumsBounds, *, threads: int, insecure_test_key_bits: int | None = None, **options: Any
) -> SumsClient:
    """Make the active party's end.

    Parameters
    ----------
    encryption : {"ou"}
        The cipher.
    bounds : SumsBounds
        Public bounds of the job.
    threads : int
        Threads to use.
    insecure_test_key_bits : int, optional
        Make and accept a key of this size. Tests only.
    **options
        For "ou": `key_bits`, 2048, 3072 (default) or 4096.

    Raises
    ------
    ConfigError
        When there is no such cipher.
    """
    if encryption == "ou":
        return OUSumsClient(bounds, threads=threads, insecure_test_key_bits=insecure_test_key_bits, **options)
    raise ConfigError(f'expected encryption "ou", got {encryption!r}')


def make_server(
    encryption: str,
    setup: Payload,
    codes: NDArray[np.uint8],
    offsets: NDArray[np.int32],
    *,
    threads: int,
    insecure_test_key_bits: int | None = None,
) -> SumsServer:
    """Make a passive party's end.

    Parameters
    ----------
    encryption : {"ou"}
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
        Accept keys of at least this size. Tests only.

    Raises
    ------
    ConfigError
        When there is no such cipher.
    CryptoError
        When the key or the table cannot be used.
    """
    if encryption == "ou":
        return OUSumsServer(setup, codes, offsets, threads=threads, insecure_test_key_bits=insecure_test_key_bits)
    raise ConfigError(f'expected encryption "ou", got {encryption!r}')
