"""FedXGBoost-SMM as published (``mode="paper"``): split sums by matrix products with null vectors. Insecure.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021
(arXiv 2106.10662), on the matrix product of Karr et al. (`node_products`).

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned. For a
node with n rows, the active party holds V = [g h] (n, 2). A passive party holds M (n, l), a column of 0 and 1 for each
split candidate; the left sums of all its candidates are M^T V. In version 1 the active party sends null vectors of V
and gets the sums. In version 2 each passive party sends null vectors of M, mixed with random columns, gets the sums of
its candidates, and sends its best gain; each of its columns has an M of its own. Output: the active party gets the
trees and all leaf weights, every party its own splits. The trees are those of the plain grower, bit for bit, except
where nodes have too few rows for the product.

The functions stand in the order of the paper's steps, those of both parties side by side. Options set the number of
columns of U, M' and Y (`null_vectors`, `bit_columns`, `normal_columns`). The numbers shrink where a node has few rows;
where even one of each does not fit, the party offers no split.

The protocol is secure against no adversary. The receiver of W distinguishes Z from U (u is in Z when u^T W = 0) and
rounds W to 0 and 1, or to the two values of a first tree's gradients. The root's M, the same in all trees, and a row's
g and h, the same at all levels, follow exactly by linear algebra (`treaty.attacks.hidden_values`,
docs/explanation/fedxgboost_published.md). So paper mode needs ``allow_insecure=True`` of every party.

Deviations from the paper: all nodes of a level travel in one round, and none is obtained by subtraction. In version 1
the active party gets the number of rows of each bin, for missing values, categories and `min_child_samples`. Version 2
has a product for each column: one of all candidates needs more rows than deep nodes have. Candidates come from
tie-aware bins, not from quantiles. Sums are rounded to whole numbers, so that splits equal the plain grower's. H^L is
not overwritten where H^R is meant (an error in both listings). Version 2 checks the winner's rows against the gain it
sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from treaty.crypto.keystream import Keystream
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import Array, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.systems.fedxgboost_smm.node_products import (
    BestGains,
    CandidateGains,
    CandidateSums,
    CandidateVectors,
    MaskedCandidates,
    MaskedGradients,
    Matrix,
    NodeCandidates,
    NodeRows,
    NullVectors,
    OwnColumns,
    PaperSetup,
    PaperTree,
    Rows,
    WonNodes,
    check_gains,
    chosen,
    empty_rows,
    every_column,
    every_node,
    hidden_among,
    named_rows,
    null_vectors,
    own_splits,
    response,
    send_matrices,
    single_entries,
    take_matrices,
    take_vectors,
)
from treaty.systems.fedxgboost_smm.options import PAPER_LEAKS, FedXGBoostSMM, Sizes, check_consent
from treaty.systems.pooled.system import own_columns
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import SplitOwner, ascending, bin_own_columns, show_layout, tree_table
from treaty.systems.vertical.messages import SplitAnswer, SplitRequest, TreeEnd, send_nodes, take_nodes
from treaty.systems.vertical.training import Follower, TreeLimits, boosting_of, finish, open_training, start_of
from treaty.trees.columns import SplitSearch
from treaty.trees.growth import Growth, RowPartition
from treaty.trees.histograms import bin_sums, undivided, whole_numbers
from treaty.trees.splits import Splits, best_of, scan

logger = logging.getLogger(__name__)

MOST_SUM_BITS = 46
"""The most bits of sums in float64, which has 53: rounding errors stay far below 1."""

# ---------------------------------------------------------------- version 1: the active party gets the sums


def _hide_gradients(party: Party, gradients: Matrix, rows: Sequence[Rows], sizes: Sizes) -> tuple[list[Matrix], Flags]:
    """Send all passive parties null vectors of each node's gradients; return V by node, and which nodes have any."""
    of_nodes, random = [gradients[members] for members in rows], Keystream()
    counts = np.array([max(0, min(sizes.null_vectors, len(matrix) - matrix.shape[1])) for matrix in of_nodes], np.int32)
    if not counts.all():
        logger.info("%d nodes have too few rows for null vectors; others offer no split there", sum(counts == 0))
    # [SMM 1, step 1] U: r orthonormal vectors with V^T U = 0, the same to all
    vectors = [null_vectors(of, int(count), random) for of, count in zip(of_nodes, counts, strict=True) if count]
    widths = Array.of(counts)
    send_matrices(party, party.peers, vectors, lambda values: NullVectors(widths, values))
    return of_nodes, counts > 0


def _mask_candidates(
    party: Party, rows: Sequence[Rows], columns: OwnColumns, features: Int32s, most_vectors: int
) -> None:
    """Receive null vectors of each node; send the active party the masked candidates."""
    (active,) = party.peers
    vectors = take_vectors(party, active, party.receive(active, NullVectors), rows, most_vectors)
    counts, masked, random = np.zeros((len(rows), int(columns.offsets[-1])), np.int32), [], Keystream()
    for node, (members, of_node) in enumerate(zip(rows, vectors, strict=True)):
        if of_node.shape[1]:
            # of the node's rows alone: cuts between values that no row has would be the same column twice
            candidates = columns.candidates(members, features)
            counts[node] = candidates.counts
            # [SMM 1, step 2] Z: some of U's vectors, at random; W = M - Z (Z^T M)
            masked.append(response(candidates.matrix, chosen(of_node, random)))
    of_slots = Array.of(counts)
    send_matrices(party, [active], masked, lambda values: MaskedCandidates(of_slots, values))  # [SMM 1, step 3] W


# ---------------------------------------------------------------- version 2: passive parties get the sums


def _name_rows(party: Party, partition: RowPartition, nodes: Int32s, n_rows: int) -> list[Rows]:
    """Send all peers, in both versions, which rows are in each node of a level; return them, ascending."""
    rows, starts = partition.rows(nodes, sampled=True)
    for peer in party.peers:  # [SMM 2, step 1] the rows of each node
        party.send(peer, NodeRows(len(nodes)))
        send_nodes(party, peer, rows, starts, n_rows)
    return [np.sort(rows[first:last]).astype(np.intp) for first, last in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class _HiddenNode:
    """A column of a node whose sums a passive party gets: candidates, the matrix that has them, places in it."""

    candidates: NodeCandidates
    mixed: Matrix
    places: NDArray[np.intp]
    vectors: Matrix


def _hide_candidates(
    party: Party, rows: Sequence[Rows], columns: OwnColumns, features: Int32s, sizes: Sizes
) -> list[_HiddenNode | None]:
    """Send null vectors of the candidates of each product, mixed with random columns; None: it has too few rows."""
    random, nodes, short = Keystream(), list[_HiddenNode | None](), 0
    for k, members in enumerate(rows):
        candidates = columns.candidates(members, features[k % max(1, len(features)) :][:1])
        fitting = sizes.of_disguised(*candidates.matrix.shape)
        if fitting is None or not len(candidates.slots):
            short += fitting is None
            nodes.append(None)
            continue
        # [SMM 2, step 2] M* = [M M' Y], columns shuffled; U: r null vectors of M*
        hidden = hidden_among(candidates.matrix, fitting, random)
        short += hidden is None
        nodes.append(None if hidden is None else _HiddenNode(candidates, *hidden))
    if short:
        logger.info("%d columns of nodes have too many candidates for their rows, and get no split here", short)
    sent = [node.vectors for node in nodes if node is not None]
    widths = Array.of(np.array([0 if node is None else node.vectors.shape[1] for node in nodes], np.int32))
    send_matrices(party, party.peers, sent, lambda values: CandidateVectors(widths, values))  # [SMM 2, step 3] U
    return nodes


def _mask_gradients(party: Party, peer: str, rows: Sequence[Rows], gradients: Integers, most_vectors: int) -> None:
    """Receive a passive party's null vectors of each node; send it the masked gradients."""
    random, what = Keystream(), f"CandidateVectors.vectors from {peer}"
    vectors = take_vectors(party, peer, party.receive(peer, CandidateVectors), rows, most_vectors)
    totals, masked, shown = np.zeros((len(rows), 2), np.int64), [], 0
    for node, (members, of_node) in enumerate(zip(rows, vectors, strict=True)):
        if of_node.shape[1]:
            # [SMM 2, step 4] refuse a row of U U^T with a single non-zero; W = V - Z (Z^T V)
            if single_entries(of_node).any():
                raise PeerProtocolError(peer, f"expected no row of U U^T with a single non-zero - at {what}")
            shown += int(empty_rows(of_node).sum())
            totals[node] = gradients[members].sum(axis=0)
            masked.append(response(gradients[members].astype(np.float64), chosen(of_node, random)))
    if shown:
        logger.info("%s receives the gradients of %d rows unmasked: its candidates single them out", peer, shown)
    of_nodes = Array.of(totals)
    # [SMM 2, step 5] W, and G and H of the node
    send_matrices(party, [peer], masked, lambda values: MaskedGradients(of_nodes, values))


def _own_sums(
    party: Party, nodes: Sequence[_HiddenNode | None], rows: Sequence[Rows], columns: OwnColumns, features: Int32s
) -> tuple[Integers, Integers]:
    """Receive masked gradients; return bin sums int64 (nodes, slots, 3), rounded to whole numbers, and totals."""
    (active,) = party.peers
    answer, sums, each = party.receive(active, MaskedGradients), list[Integers](), max(1, len(features))
    totals = np.zeros((len(rows), 3), np.int64)
    totals[:, :2] = view(answer.totals, np.int64, (len(rows), 2), peer=active, what="MaskedGradients.totals")
    totals[:, 2] = [len(members) for members in rows]
    masked = take_matrices(party, active, answer, "masked", rows, [0 if node is None else 2 for node in nodes])
    for k, (node, of_node, total) in enumerate(zip(nodes, masked, totals, strict=True)):
        feature = features[k % each :][:1]
        if node is None:
            sums.append(undivided(total, feature, columns.offsets))
            continue
        try:
            # [SMM 2, step 6] M*^T W = M*^T V, of which M's columns are kept; then gains, and the best
            found = whole_numbers((node.mixed.T @ of_node)[node.places])
        except ValueError as error:
            raise PeerProtocolError(active, str(error), at="MaskedGradients.masked") from None
        slots, counts = node.candidates.slots, node.candidates.counts
        sums.append(bin_sums(found.T, slots, counts, total, feature, columns.offsets, columns.categorical))
    # each product has sums of its own column alone
    return np.stack(sums).reshape(-1, each, *sums[0].shape).sum(axis=1), totals[::each]


# ---------------------------------------------------------------- both versions


def active(inputs: RoleInput[FedXGBoostSMM]) -> ModelPart:
    """Train as the active party, in the options' version."""
    check_consent(inputs.options)
    logger.warning("insecure, with consent: %s", PAPER_LEAKS)
    party, common, threads, sizes = inputs.party, inputs.common, inputs.threads, inputs.options.sizes
    training, n_rows, second = open_training(inputs), inputs.rows.table.n_rows, inputs.options.version == 2
    part, objective = training.part, training.forest.objective
    objective.check_sums(n_rows)
    # goss multiplies gradients of the rows that it draws
    factor = 1.0 if common.one_side is None else max(1.0, common.one_side.factor)
    bits = (int(n_rows * factor * max(objective.grad_bound, objective.hess_bound)) - 1).bit_length()
    if bits > MOST_SUM_BITS:
        raise ConfigError(
            f"sums of {n_rows} gradients at fractional_bits={common.fractional_bits} have {bits} bits, and matrix "
            f"products in float64 are exact up to {MOST_SUM_BITS}; lower fractional_bits"
        )
    own = own_columns(inputs.rows.table, common, part.splits, threads)
    others = {peer: (CandidateGains if second else CandidateSums)(party, peer, n_rows) for peer in party.peers}
    for peer in party.peers:
        party.send(peer, PaperSetup(*start_of(training, peer), objective.grad_unit, objective.hess_unit))
    sources = [others.get(name, own) for name in inputs.roles.owners]
    rules = common.rules(objective, training.constraints)
    # parties in one process multiply at the same time; this one sets the process's limit for all of them
    with nullcontext() if inputs.alone else threadpool_limits(1, user_api="blas"):
        for a_round in boosting_of(inputs, training, sources):
            for sample in a_round.trees():
                rows, growth = sample.partition(threads), Growth(sample.totals, rules)
                values = np.stack([sample.grad, sample.hess], axis=1)
                search = SplitSearch(sources, sample, rules, threads)
                party.round += 1
                while growth.level is not None:
                    level = every_node(growth.level)
                    members = _name_rows(party, rows, level.nodes, n_rows)
                    if second:
                        search.ask(level, rows)  # own columns; the others answer with gains
                        for peer, columns in others.items():
                            products = every_column(members, columns.features)
                            _mask_gradients(party, peer, products, values, sizes.null_vectors)
                        best = best_of([
                            source.best(len(level.nodes), k) if isinstance(source, CandidateGains)
                            else search.scan(k, level)
                            for k, source in enumerate(sources)
                        ])  # fmt: skip
                    else:
                        matrices = _hide_gradients(party, values.astype(np.float64), members, sizes)
                        for columns in others.values():
                            columns.level = members, *matrices
                        search.ask(level, rows)
                        best = search.choose(level)  # [SMM 1, step 4] V^T W = V^T M; gains, and the best of all
                    won = np.flatnonzero(best.feature >= 0)
                    nodes, splits = level.nodes[won], best.take(won)
                    # [SMM 1, step 5] [SMM 2, step 7] its owner records the best split and sends which rows go left
                    records, left = search.decide(nodes, splits, rows)
                    if second:
                        # owners named a gain alone: the rows that they send must give it
                        totals = rows.left_totals(sample.grad, sample.hess, nodes, left, np.arange(len(nodes)))
                        check_gains(sources, level.totals[won], totals, splits, rules)
                        best.left_totals[won] = totals
                    divided = growth.take(best)
                    if divided is not None:
                        rows.divide(*divided[:2], left)
                        growth.divided(records)
                search.end()
                a_round.add(growth.tree(), rows)
    finish(party)
    return part


def passive(inputs: RoleInput[FedXGBoostSMM]) -> ModelPart:
    """Train as a passive party, in the options' version."""
    check_consent(inputs.options)
    logger.warning("insecure, with consent: %s", PAPER_LEAKS)
    party, common, sizes, second = inputs.party, inputs.common, inputs.options.sizes, inputs.options.version == 2
    (active,) = party.peers
    bins, codes = bin_own_columns(inputs)
    show_layout(inputs, bins)
    columns = OwnColumns(codes, bins.offsets, inputs.rows.table.schema.categorical)
    setup = party.receive(active, PaperSetup)
    follower = Follower(inputs, setup)
    owner = SplitOwner(active, codes, bins, follower.part.splits)
    rules = common.rules_of(setup.grad_unit, setup.hess_unit)
    limits = TreeLimits(active, rules)
    features, best = np.empty(0, np.int32), Splits.none(0)

    def start_tree(tree: PaperTree) -> None:
        nonlocal features
        follower.limits.tree()
        follower.next_tree()
        features = ascending(tree.columns, codes.shape[1], active, "PaperTree.columns")
        limits.start(features)

    def answer(asked: NodeRows) -> BestGains | None:
        nonlocal best
        limits.sums(asked.nodes, last=True)
        rows = named_rows(party, active, asked, len(codes))
        if not second:
            _mask_candidates(party, rows, columns, features, sizes.null_vectors)
            return None
        products = every_column(rows, features)
        hidden = _hide_candidates(party, products, columns, features, sizes)
        sums, totals = _own_sums(party, hidden, products, columns, features)
        best = scan(sums, totals, features, bins.offsets, columns.categorical, rules, threads=inputs.threads)
        return BestGains(Array.of(best.gain))

    def divide(request: SplitRequest) -> Iterator[SplitAnswer]:
        limits.split(request)
        named = take_nodes(party, active, request.features.shape[0], len(codes))
        return owner.divide_nodes(request, named, limits.node_sizes)

    order = tree_table(PaperTree, NodeRows, WonNodes if second else SplitRequest)
    return follower.follow(
        MessageOrder(order, "between trees"),
        {
            PaperTree: start_tree,
            TreeEnd: lambda _: None,
            NodeRows: answer,
            SplitRequest: divide,
            WonNodes: lambda won: divide(own_splits(won, best, active)),
        },
    )
