"""SecureBoost: lossless vertical boosting on encrypted gradients.

Cheng, Fan, Jin, Liu, Chen, Papadopoulos, Yang, "SecureBoost: A Lossless Federated Learning Framework", IEEE
Intelligent Systems 2021 (arXiv 1901.08755); packing after Chen et al., SecureBoost+ (arXiv 2110.10927).

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned.
Output: the active party gets the trees and all leaf weights, every party its own splits. The trees are, bit for bit,
those of the plain grower on the joined table.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`Layout`              passive ->     bins per feature, which are categorical             TLS
`Setup`               active ->      model id, public key and field widths               TLS
`Hint`                passive ->     the cipher's own set-up answer                      TLS
`TreeStart`           active ->      sampled rows and columns, encrypted gradients       cipher
`SumsRequest`         active ->      which rows are in each node of the level            TLS: the passive party
                                                                                         learns them
`Sums`                passive ->     encrypted bin sums of all nodes asked               cipher, re-randomised
`SplitRequest`        active ->      of each node the owner won: feature, bins going     TLS
                                     left, the node's rows
`SplitAnswer`         passive ->     record numbers, which rows go left                  TLS
`TreeEnd`             active ->      the tree is grown                                   TLS
`DecideRequest`       active ->      record numbers (eval rows, prediction)              TLS
`Decisions`           passive ->     which rows go left at each record                   TLS
`Finish`              active ->      training is over                                    TLS
====================  =============  ==================================================  ========================

All nodes of a level travel in one message each way, of each pair of siblings only the smaller is asked for.

Adversary: honest but curious, no party colluding with the active one. What each learns is in `disclosures`.
Deviations from the paper: candidates are not shuffled (nested sums sort themselves); the active party computes leaf
weights from its own gradients. Prediction, and the eval sets watched in training, are in `decisions`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.encrypted_sums import SumsBounds, SumsClient, make_client, make_server
from treaty.data.binning import Bins, fit_bins
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import PeerProtocolError
from treaty.messaging.agreement import agree
from treaty.messaging.messages import DTYPES, Array, Message, view
from treaty.messaging.party import Party
from treaty.models import ModelPart, record_split
from treaty.options import TreeOptions
from treaty.protocols.decisions import DecideRequest, Finish, decide, decided_by_all
from treaty.protocols.pooled import Labelled, Progress, objective_for, own_columns
from treaty.trees.boosting import EvalSet, Forest, boost
from treaty.trees.columns import SumsFinder
from treaty.trees.ensemble import SplitTable
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level


class Layout(Message):
    """A passive party's bins: int32 first slot of each feature, bool kind. Tells how many columns and bins it has."""

    offsets: Array
    categorical: Array


class Setup(Message):
    """The model's id and the cipher's public set-up. Tells nothing but key and field widths."""

    model_id: str
    payload: list[Array]


class Hint(Message):
    """The cipher's answer to the set-up. Tells what the cipher's page says (OU: which bin of a feature is fullest)."""

    payload: list[Array]


class TreeStart(Message):
    """Encrypted gradients of a tree. Tells a passive party the tree's sample of rows (int32; none: all) and columns."""

    rows: Array | None
    columns: Array
    payload: list[Array]


class TreeEnd(Message):
    """The tree is grown. Tells nothing new; the passive party lets go of its gradients."""


class SumsRequest(Message):
    """The nodes of a level. Tells a passive party which rows are in each."""

    payload: list[Array]


class Sums(Message):
    """Encrypted bin sums. Tell the active party sum of grad, hess and count of every bin of every node asked."""

    payload: list[Array]


class SplitRequest(Message):
    """Nodes the owner won: int32 features (k,), packed bits of bins left (k, 32), int32 node (or -1) per row."""

    features: Array
    left_bins: Array
    node_of_row: Array


class SplitAnswer(Message):
    """Record numbers int32 (k,) and packed bits, node after node and its rows ascending. Tells which rows go left."""

    records: Array
    left: Array


# ---------------------------------------------------------------- active party


def active(
    party: Party,
    data: Labelled,
    options: TreeOptions,
    *,
    parties: Sequence[str],
    classes: list[Category] | None,
    eval_sets: Sequence[Labelled] = (),
    threads: int = 1,
    progress: Progress | None = None,
) -> ModelPart:
    """Train as the active party.

    Parameters
    ----------
    party : Party
        Connected with every passive party, `party.peers`.
    parties : sequence of str
        All parties in the job's order, which is that of the joined table's columns and of ties.
    data : Labelled
        Own columns (perhaps none), labels, weights.
    classes : list or None
        Labels by class number; None for regression.
    eval_sets : sequence of Labelled
        Rows every party holds as well, in the same order.

    Returns
    -------
    ModelPart
        Own splits, all trees and leaf weights.

    Raises
    ------
    ConfigError, PeerProtocolError
        When parties disagree on parameters or rows, or one sends what the protocol does not allow.
    """
    agree(party, terms(options, data.table.n_rows, [e.table.n_rows for e in eval_sets]))
    objective = objective_for(data, classes, options)
    objective.check_sums(data.table.n_rows)
    splits = SplitTable()
    own = own_columns(data.table, options, splits, threads)
    part = ModelPart(
        model_id=secrets.token_hex(16),
        party=party.name,
        schema=data.table.schema,
        splits=splits,
        forest=Forest(objective, tuple(parties), classes),
    )
    bounds = SumsBounds(data.table.n_rows, objective.grad_bound, objective.hess_bound)
    client = make_client(
        options.cipher,
        bounds,
        threads=threads,
        insecure_test_key_bits=options.insecure_test_key_bits,
        key_bits=options.key_bits or 3072,
    )
    gradients = EncryptedGradients(party, client, data.table.n_rows)
    setup = Setup(part.model_id, pack(client.setup()))
    for peer in party.peers:
        party.send(peer, setup)
    sources = [
        own if name == party.name else PassiveColumns(party, name, gradients, data.table.n_rows) for name in parties
    ]

    rules = options.rules(objective)
    assert part.forest is not None
    if progress is not None:
        progress(0, part)
    boost(
        SumsFinder(sources, data.table.n_rows, rules, threads),
        data.y,
        data.weight,
        part.forest,
        rules,
        n_columns=sum(len(source.categorical) for source in sources),
        eval_sets=[
            EvalSet(rows.name, rows.y, rows.weight, decided_by_all(party, part, rows.table, number, threads))
            for number, rows in enumerate(eval_sets)
        ],
        on_round=None if progress is None else lambda done: progress(done, part),
        threads=threads,
        **options.sampling(),
    )
    for peer in party.peers:
        party.send(peer, Finish())
    return part


class EncryptedGradients:
    """What all passive parties are sent alike: encrypted once per tree, queried once per level."""

    def __init__(self, party: Party, client: SumsClient, n_rows: int) -> None:
        self.client = client
        self._party = party
        self._told = 0
        self._n_rows = n_rows
        self._tree: NDArray[np.int64] | None = None
        self._level: Level | None = None

    def start_tree(
        self, grad: NDArray[np.int64], hess: NDArray[np.int64], rows: NDArray[np.int32] | None
    ) -> list[Array]:
        """Return the encrypted gradients of the sampled rows."""
        if self._tree is not grad:
            self._tree, self._level = grad, None
            self._ciphertexts: list[Array] = []  # the last tree's are given back before this one's are made
            self._position = None
            if rows is not None:
                self._position = np.full(self._n_rows, -1, np.int32)
                self._position[rows] = np.arange(len(rows), dtype=np.int32)
                grad, hess = grad[rows], hess[rows]
            self._ciphertexts = pack(self.client.begin_tree(grad, hess))
        return self._ciphertexts

    def told(self) -> None:
        """Note that one more peer has the tree's gradients; with the last of them the tree's round begins."""
        self._told += 1
        if self._told == len(self._party.peers):
            self._told = 0
            self._party.round += 1

    def query(self, level: Level, partition: RowPartition) -> SumsRequest:
        """Return the level's query."""
        if self._level is not level:
            self._level = level
            members, starts = partition.rows(level.asked, sampled=True)
            positions = members if self._position is None else self._position[members]
            self._query = SumsRequest(pack(self.client.query(positions, starts.astype(np.int32))))
        return self._query


class PassiveColumns:
    """The columns of a passive party, as the active party sees them: a source of sums (`trees.columns.SumsSource`)."""

    def __init__(self, party: Party, peer: str, gradients: EncryptedGradients, n_rows: int) -> None:
        self.peer = peer
        self._party = party
        self._gradients = gradients
        self._n_rows = n_rows
        layout = party.receive(peer, Layout)
        self.categorical = view(layout.categorical, np.bool_, (None,), peer=peer, what="Layout.categorical")
        n_features = len(self.categorical)
        self.offsets = view(layout.offsets, np.int32, (n_features + 1,), peer=peer, what="Layout.offsets")
        sizes = np.diff(self.offsets)
        if self.offsets[0] != 0 or np.any(sizes < 1) or np.any(sizes > 256):
            raise PeerProtocolError(peer, f"expected 1 to 256 slots per feature - at Layout.offsets from {peer}")
        hint = party.receive(peer, Hint)
        gradients.client.accept_hint(peer, unpack(hint.payload, peer, "Hint"), self.offsets)

    def start_tree(
        self,
        grad: NDArray[np.int64],
        hess: NDArray[np.int64],
        rows: NDArray[np.int32] | None,
        columns: NDArray[np.int32],
    ) -> None:
        """See `SumsSource`."""
        sample = None if rows is None else Array.of(rows)
        self._party.send(self.peer, TreeStart(sample, Array.of(columns), self._gradients.start_tree(grad, hess, rows)))
        self._gradients.told()

    def end_tree(self) -> None:
        """See `SumsSource`."""
        self._party.send(self.peer, TreeEnd())

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        """See `SumsSource`."""
        self._totals = level.asked_totals
        self._party.send(self.peer, self._gradients.query(level, rows))

    def sums(self) -> NDArray[np.int64]:
        """See `SumsSource`: decrypt the answer."""
        answer = self._party.receive(self.peer, Sums)
        return self._gradients.client.open(self.peer, unpack(answer.payload, self.peer, "Sums"), self._totals)

    def ask_left(
        self,
        features: NDArray[np.int32],
        left_bins: NDArray[np.bool_],
        rows: NDArray[np.int32],
        starts: NDArray[np.int64],
    ) -> None:
        """See `SumsSource`."""
        node_of_row = np.full(self._n_rows, -1, np.int32)
        node_of_row[rows] = np.repeat(np.arange(len(features), dtype=np.int32), np.diff(starts))
        self._asked = rows, starts
        packed = np.packbits(left_bins, axis=1)
        self._party.send(self.peer, SplitRequest(Array.of(features), Array.of(packed), Array.of(node_of_row)))

    def left(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """See `SumsSource`."""
        rows, starts = self._asked
        answer = self._party.receive(self.peer, SplitAnswer)
        records = view(answer.records, np.int32, (len(starts) - 1,), peer=self.peer, what="SplitAnswer.records")
        if np.any(records < 0):
            raise PeerProtocolError(self.peer, f"expected record numbers from 0 - at SplitAnswer from {self.peer}")
        packed = view(answer.left, np.uint8, (-(-len(rows) // 8),), peer=self.peer, what="SplitAnswer.left")
        bits = np.unpackbits(packed, count=len(rows)).astype(np.bool_)
        left = np.empty(len(rows), np.bool_)  # the answer is in ascending order of rows, the partition need not be
        for first, last in pairwise(starts):
            left[first + np.argsort(rows[first:last], kind="stable")] = bits[first:last]
        return records, left


# ---------------------------------------------------------------- passive party


def passive(
    party: Party,
    table: Table,
    options: TreeOptions,
    *,
    eval_tables: Sequence[Table] = (),
    threads: int = 1,
    progress: Progress | None = None,
) -> ModelPart:
    """Train as a passive party: answer the active one, `party.peers[0]`, until it is done.

    Parameters
    ----------
    table : Table
        Own columns of the aligned training rows.
    eval_tables : sequence of Table
        Own columns of the eval sets, in the active party's order.

    Returns
    -------
    ModelPart
        Own splits.
    """
    (lead,) = party.peers
    agree(party, terms(options, table.n_rows, [t.n_rows for t in eval_tables]))
    bins = fit_bins(table, options.max_bin, threads)
    codes = bins.transform(table, threads)
    categorical = np.array([c is not None for c in table.schema.categories], np.bool_)
    party.send(lead, Layout(Array.of(bins.offsets), Array.of(categorical)))
    setup = party.receive(lead, Setup)
    server = make_server(
        options.cipher,
        unpack(setup.payload, lead, "Setup"),
        codes,
        bins.offsets,
        threads=threads,
        insecure_test_key_bits=options.insecure_test_key_bits,
    )
    party.send(lead, Hint(pack(server.hint())))
    part = ModelPart(model_id=setup.model_id, party=party.name, schema=table.schema, splits=SplitTable(), forest=None)
    matrices = [t.matrix() for t in eval_tables]
    trees = 0
    while True:
        match party.receive(lead, TreeStart, TreeEnd, SumsRequest, SplitRequest, DecideRequest, Finish):
            case TreeStart() as start:
                if progress is not None:
                    progress(trees, part)
                trees += 1
                party.round = trees
                sample, columns = _checked_sample(start, lead, table.n_rows, len(categorical))
                server.begin_tree(unpack(start.payload, lead, "TreeStart"), sample, columns)
                del start  # or it would keep the ciphertexts until the next tree's are here
            case TreeEnd():
                server.end_tree()
            case SumsRequest() as request:
                party.send(lead, Sums(pack(server.answer(unpack(request.payload, lead, "SumsRequest")))))
            case SplitRequest() as request:
                party.send(lead, _divide(request, lead, codes, bins, part.splits))
            case DecideRequest() as request:
                party.send(lead, decide(request, lead, matrices, part.splits, threads))
            case Finish():
                if progress is not None:
                    progress(trees, part)
                return part


def _checked_sample(
    start: TreeStart, lead: str, n_rows: int, n_features: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    if start.rows is None:
        rows = np.arange(n_rows, dtype=np.int32)
    else:
        rows = view(start.rows, np.int32, (None,), peer=lead, what="TreeStart.rows")
    columns = view(start.columns, np.int32, (None,), peer=lead, what="TreeStart.columns")
    for name, values, limit in (("rows", rows, n_rows), ("columns", columns, n_features)):
        if len(values) and (values[0] < 0 or values[-1] >= limit or np.any(np.diff(values) <= 0)):
            raise PeerProtocolError(lead, f"expected ascending numbers below {limit} - at TreeStart.{name} from {lead}")
    return rows, columns


def _divide(request: SplitRequest, lead: str, codes: NDArray[np.uint8], bins: Bins, splits: SplitTable) -> SplitAnswer:
    """Look up each node's split, write its record, decide its rows (paper, Algorithm 2)."""
    features = view(request.features, np.int32, (None,), peer=lead, what="SplitRequest.features")
    k = len(features)
    packed = view(request.left_bins, np.uint8, (k, 32), peer=lead, what="SplitRequest.left_bins")
    node_of_row = view(request.node_of_row, np.int32, (len(codes),), peer=lead, what="SplitRequest.node_of_row")
    if np.any(features < 0) or np.any(features >= codes.shape[1]):
        raise PeerProtocolError(lead, f"expected features below {codes.shape[1]} - at SplitRequest from {lead}")
    if np.any(node_of_row < -1) or np.any(node_of_row >= k):
        raise PeerProtocolError(lead, f"expected nodes below {k} - at SplitRequest.node_of_row from {lead}")
    left_bins = np.unpackbits(packed, axis=1).astype(np.bool_)
    for feature, going in zip(features, left_bins, strict=True):
        present = going[: bins.n_bins[feature]]
        threshold = bins.cuts[feature] is not None
        if not present.any() or (threshold and not present[: np.count_nonzero(present)].all()):
            raise PeerProtocolError(
                lead, f"expected the lowest bins to go left - at SplitRequest.left_bins from {lead}"
            )
    rows = np.argsort(node_of_row, kind="stable")[np.count_nonzero(node_of_row < 0) :]
    node = node_of_row[rows]
    left = left_bins[node, codes[rows, features[node]]]
    records = [record_split(splits, bins, int(f), going) for f, going in zip(features, left_bins, strict=True)]
    return SplitAnswer(Array.of(np.array(records, np.int32)), Array.of(np.packbits(left)))


# ---------------------------------------------------------------- both


def terms(options: TreeOptions, n_rows: int, eval_rows: Sequence[int]) -> Mapping[str, str | int | float | bool | None]:
    """Return what all parties must agree on before anything is sent: every option but the sampling seed, and rows."""
    public = {name: getattr(options, name) for name in options.__struct_fields__ if name != "random_state"}
    return {**public, "training rows": n_rows, "eval rows": ", ".join(map(str, eval_rows))}


def pack(payload: Sequence[NDArray]) -> list[Array]:  # type: ignore[type-arg]
    """Wrap a cipher's arrays for sending."""
    return [Array.of(values) for values in payload]


def unpack(payload: Sequence[Array], peer: str, what: str) -> list[NDArray]:  # type: ignore[type-arg]
    """View a cipher's arrays, whose shapes and values the cipher itself checks."""
    for k, array in enumerate(payload):
        if array.dtype not in DTYPES:
            raise PeerProtocolError(
                peer, f"expected an element type of {sorted(DTYPES)} - at {what}.payload[{k}] from {peer}"
            )
    return [
        view(array, np.dtype(array.dtype), (None,) * len(array.shape), peer=peer, what=f"{what}.payload[{k}]")
        for k, array in enumerate(payload)
    ]


def disclosures(lead: str, others: Sequence[str]) -> dict[str, list[str]]:
    """Say in words what each party of a training learned beyond its own data and its own splits."""
    learned = {
        lead: [
            "of every column of the others (by number, not name): how many bins it has, which of them is fullest, and "
            "at every node the sum of gradients, sum of hessians and number of rows in each bin",
            "of every split another party won: which of the node's training rows go left; for eval sets and at "
            "prediction, each row's side at every such split",
            "the shape of all trees and all leaf weights",
        ]
    }
    for name in others:
        learned[name] = [
            f"which training rows are together in each node {lead} asked it about, and so in part which rows have "
            "similar labels (gradients and labels themselves stay encrypted)",
            "which of its own columns and bins were chosen, at how many nodes",
            "the number of trees and levels, and each tree's sample of rows and of its own columns",
        ]
    return learned
