"""The seam between the vertical tree protocols and a cipher: sums of hidden gradients over a peer's bins.

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

A protocol carries the payloads, lists of arrays that only the two ends of one cipher interpret. Ciphertexts of rows,
and numbers of their nodes, travel in pieces of at most 60 MB, some rows after the others, and are made as they are sent
(those of `triple_sums` at once, 16 bytes a row and node). A `blind` cipher is
given all rows and names none; under the others servers learn the rows of every node. What each side learns is stated by
the implementations (`additive_sums`, `blind_sums`, `lattice_sums`; `triple_sums`, which needs a dealer and so is made
elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.crypto.additive import okamoto_uchiyama, paillier
from treaty.crypto.additive.key_generation import generate_key, generate_paillier_key
from treaty.crypto.additive.packing import Packing
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.payload import Payload, SumsBounds, check_payload
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
    """The active party's end. Calls in the order of the table above; errors are CryptoError."""

    blind: bool  # servers are told neither the rows of a node nor those of the tree's sample
    nodes_at_a_time: int  # most nodes of one query; a level that has more is asked for in several

    def setup(self) -> Payload:
        """Return what every server is built from: the same payload to all, once per job."""

    def accept_hint(self, peer: str, hint: Payload, offsets: NDArray[np.int32]) -> int:
        """Take the next piece of a server's hint; return how many slots are still to come, 0 with the last piece.

        `offsets`, int32 (features + 1,): first slot of each of the server's features, and the number of slots.
        """

    def begin_tree(self, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Iterator[Payload]:
        """Return what is sent to every server once per tree: one piece at least.

        `grad` and `hess`, int64 (m,), are fixed-point derivatives within the job's bounds: of the tree's sampled rows;
        for a blind cipher, of all rows.
        """

    def query(self, positions: NDArray[np.int32], starts: NDArray[np.int32]) -> Iterator[Payload]:
        """Ask for the bin sums of nodes of a level: return what is sent to every server, one piece at least.

        Node k holds the rows positions[starts[k]:starts[k + 1]]; positions, each at most once, index the rows of
        `begin_tree`.
        """

    def open(
        self, peer: str, answer: Payload, totals: NDArray[np.int64], features: NDArray[np.int32] | None = None
    ) -> NDArray[np.int64]:
        """Decrypt a server's answers in the order of the queries: sums of grad, hess and count, (nodes, slots, 3).

        `totals` (nodes, 3) are the same sums over each node, which the caller knows itself; `features` is the tree's
        sample of the server's columns, as in its `begin_tree`.
        """


class SumsServer(Protocol):
    """A passive party's end. Calls in the order of the table above; errors are CryptoError."""

    @property
    def spare(self) -> int:
        """How many nodes of a level's last query may be there without need, as a vector is about several."""

    def hint(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Payload]:
        """Return the answer to the set-up, once per job, in one piece or several.

        `progress` is called with slots done and slots in all while the hint of the lattice map is made.
        """

    def begin_tree(
        self,
        payload: Payload,
        rows: NDArray[np.int32] | None,
        features: NDArray[np.int32] | None = None,
        n_rows: int | None = None,
    ) -> None:
        """Take the first piece of a tree; `rows` (m,) are the table rows it is about, in its order, None for all.

        `features` is the tree's sample of columns, by default all; the sums of others are not computed and mean
        nothing. `n_rows` is how many rows the tree has, if others follow those of this piece.
        """

    def add_rows(self, payload: Payload, rows: NDArray[np.int32] | None = None) -> None:
        """Take the next piece of a tree, about these rows; None where the tree has all."""

    def end_tree(self) -> None:
        """Free the tree's payload before the next one arrives."""

    def add(self, piece: Payload) -> int:
        """Take the next piece of a query; return how many nodes it is about."""

    def answer(self) -> Payload:
        """Answer the query whose pieces were added: all its nodes at once."""

    def close(self) -> None:
        """Settle what outlives the job, when it has ended in order."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Makes ends of each kind: those of this machine, or others that take the same arguments."""

    additive: Callable[..., SumsServer] = AdditiveSumsServer
    blind: Callable[..., SumsServer] = BlindSumsServer
    lattice: Callable[..., SumsServer] = LatticeSumsServer
    lattice_client: Callable[..., SumsClient] = LatticeSumsClient


ALONE = Ends()
"""Ends that do all on this machine."""


def make_client(
    encryption: str,
    bounds: SumsBounds,
    *,
    threads: int,
    key_bits: int | None = None,
    insecure_test_key_bits: int | None = None,
    store: HintStore | None = None,
    blind: bool = False,
    sealed: bool = False,
    nodes: int = 1,
    ends: Ends = ALONE,
) -> SumsClient:
    """Make the active party's end for "lattice", "ou" or "paillier", with a fresh key that serves this job only.

    `key_bits` is 2048, 3072 (default) or 4096; `insecure_test_key_bits` replaces it, such as by the papers' 512, in
    tests and reproductions only. `store` keeps hints of the lattice map, by default for this job. `blind` encrypts all
    rows once per node, so that servers see no rows of nodes; the lattice map always does. With `sealed` the lattice
    map's client opens shares of sums; its vectors are about `nodes` nodes. `ends` are of this machine or not.
    ConfigError for another cipher; CryptoError if the key size is not accepted or the sums do not fit a plaintext.
    """
    if encryption == "lattice":
        return ends.lattice_client(bounds, store or HintStore(None), threads=threads, sealed=sealed, nodes=nodes)
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
    blind: bool = False,
    sealed: bool = False,
    ends: Ends = ALONE,
) -> SumsServer:
    """Make a passive party's end for the client's `setup` and the party's bin codes.

    Code c of feature f, uint8 codes (rows, features) in C order, is slot offsets[f] + c; a feature's last slot is for
    missing values. Keys of `insecure_test_key_bits` or more are accepted in tests and reproductions only. `rerandomise`
    hides from the key's owner which of its ciphertexts an answer is made of; False is the papers' form, in which the
    owner can tell: only for a job in paper mode, which every party has allowed. `names` of the features are for the
    ledger of the lattice map in `store`, which does not leave the party and by default lasts for this job. `blind` and
    `sealed` as in `make_client`; `ends` are of this machine or not. ConfigError for an unknown cipher, CryptoError for
    an unusable key or table.
    """
    if encryption == "lattice":
        check_payload(setup, "the set-up", (np.int64, (4,)))
        *stated_bounds, nodes = (int(x) for x in setup[0])
        bounds = SumsBounds(*stated_bounds)
        names = [str(k) for k in range(codes.shape[1])] if names is None else names
        options = {"threads": threads, "sealed": sealed, "nodes": nodes}
        return ends.lattice(bounds, codes, offsets, names, store or HintStore(None), **options)
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
    kind = ends.blind if blind else ends.additive
    return kind(key, stated, codes, offsets, threads=threads, rerandomise=rerandomise)


def _unknown(encryption: str) -> ConfigError:
    return ConfigError(f'expected encryption "lattice", "ou" or "paillier", got {encryption!r}')
