"""Attacks on values hidden by null vectors or by noise: labels, gradients, bins and buckets.

Null vectors are those of FedXGBoost-SMM as published, which make its paper mode insecure. A party that sent null
vectors U (n, r) of its own matrix gets W = D - Z (Z^T D) for the other party's matrix D (n, c), where Z is some of U's
columns. In version 1, D is a passive party's candidates (0 and 1): the active party attacks W, the passive party U. In
version 2, D is the gradients, and the passive party attacks W.

References: Le et al., "FedXGBoost", 2021 (arXiv 2106.10662); Karr et al., Journal of Official Statistics 25(1), 2009.
Zadik, Song, Wein, Bruna, "Lattice-Based Methods Surpass Sum-of-Squares in Clustering", COLT 2022, on vectors of two
values in subspaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.attacks.views import Finding, Truth, View, label_finding
from treaty.machine.arrays import Flags, Floats
from treaty.messaging.messages import Array, row_pieces
from treaty.messaging.messages import view as array_view
from treaty.messaging.transcript import Transcript
from treaty.privacy.randomised_response import chances
from treaty.systems.federboost_vertical.buckets import Buckets, unpack_buckets, widths_of
from treaty.systems.fedxgboost_ldp.scoring import NoisyTree
from treaty.systems.fedxgboost_smm import node_products
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.vertical.exact_sums import NamedNodes, array_of, content_of
from treaty.systems.vertical.messages import BinLayout, NamedRows
from treaty.trees.histograms import candidate_columns, candidate_slots

MOST_SOLVED = 2000
"""The most rows of a system of equations: solving takes their cube."""

MOST_LEFT = 3
"""The most columns that null vectors may leave, in square roots of rows: among more, two values do not stand out."""

STEPS = 5
"""Steps of iterative decoding."""

# a product with W that counts as zero, relative to W
_ZERO = 1e-9
# error with which a row counts as found
_KNOWN = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class NodeExchange:
    """One node's exchange, as seen by the party that sent null vectors."""

    # the node's rows; int (n,)
    rows: NDArray[np.intp]
    # all null vectors that were sent, U; float64 (n, r)
    vectors: Floats
    # the answer, W; float64 (n, c)
    masked: Floats

    @property
    def used(self) -> Floats:
        """Z, the vectors that the answer was made with, float64 (n, r'): according to the paper, secret."""
        # those orthogonal to W
        seen = np.abs(self.vectors.T @ self.masked).max(axis=1, initial=0.0)
        return self.vectors[:, seen <= _ZERO * np.abs(self.masked).max(initial=0.0) * np.sqrt(len(self.masked))]


def rounded(answered: NodeExchange, values: tuple[float, float] = (0.0, 1.0), steps: int = 1) -> Floats:
    """Guess a matrix of two known values by rounding W, float64 (n, c).

    `values` are 0 and 1 for candidates, and the two gradients for a first tree. With 0 `steps`, W alone is rounded.
    """
    (low, high), used = values, answered.used
    middle = (low + high) / 2
    guess = np.where(answered.masked > middle, high, low)
    # W lacks the matrix's projection on Z: each step adds that of the rounded matrix, and rounds again
    for _ in range(steps):
        guess = np.where(answered.masked + used @ (used.T @ guess) > middle, high, low)
    return guess


def solved(answers: Sequence[NodeExchange], n_rows: int) -> tuple[Floats, Flags]:
    """Solve for a matrix that is the same in several answers: candidates over trees, gradients over levels.

    Each answer states (I - Z Z^T) D = W for its rows. The sum of the equations has n_rows unknowns; with random Z of a
    share s of the rows, 1 / (1 - s) answers determine them. Returns float64 (n_rows, c) and which rows are determined.
    """
    # normal equations: I - Z Z^T is a projection, so its sum over answers is positive once every direction was seen
    left, right = np.zeros((n_rows, n_rows)), np.zeros((n_rows, answers[0].masked.shape[1]))
    for answered in answers:
        used = answered.used
        left[np.ix_(answered.rows, answered.rows)] -= used @ used.T
        left[answered.rows, answered.rows] += 1.0
        right[answered.rows] += answered.masked
    # a known column among the right-hand sides: it is found again exactly where a row is determined
    probe = np.random.default_rng(0).normal(size=(n_rows, 1))
    both = np.concatenate([right, left @ probe], axis=1)
    left[np.diag_indices(n_rows)] += 1e-13
    found = np.linalg.solve(left, both)
    return found[:, :-1], np.abs(found[:, -1] - probe[:, 0]) <= _KNOWN


def left_over(vectors: Floats, seed: int = 0) -> Floats:
    """Return an orthonormal basis of the columns that null vectors are orthogonal to, float64 (n, n - r)."""
    rng, (n_rows, sent) = np.random.default_rng(seed), vectors.shape
    basis: Floats = rng.normal(size=(n_rows, n_rows - sent))
    # twice: one pass loses half the digits if there are many vectors
    for _ in range(2):
        basis = np.linalg.qr(basis - vectors @ (vectors.T @ basis)).Q
    return basis


def two_valued(basis: Floats, tries: int = 60, steps: int = 200, seed: int = 0) -> Floats:
    """Find a column of two values, float64 (n,) up to its sign, in the span of an orthonormal `basis` (n, dimensions).

    In the first tree gradients have two values, one per class, and are orthogonal to the null vectors that a passive
    party gets. If few other columns are (`left_over`), two-valued ones are among those whose skewness or kurtosis is
    furthest from a normal number's. Fixed-point iterations from `tries` random starts find these.
    """
    rng, n_rows = np.random.default_rng(seed), len(basis)
    # leaves out the constant column, which the first hessians are
    of_constant = np.linalg.qr(basis.sum(axis=0)[:, None], mode="complete")[0]
    basis = basis @ of_constant[:, 1:] * np.sqrt(n_rows)
    # if one row in five has the other value, there is skewness but no kurtosis; if half of them have it, the reverse
    found = np.concatenate(
        [basis @ _turned(basis, rng.normal(size=(basis.shape[1], tries)), power, steps) for power in (2, 3)], axis=1
    )
    # two-valued columns alone have a kurtosis of 1 plus the square of skewness
    more = (found**4).mean(axis=0) - (found**3).mean(axis=0) ** 2
    return found[:, np.argmin(more)]


def _turned(basis: Floats, directions: Floats, power: int, steps: int) -> Floats:
    """Turn directions, a column each, towards skewness (power 2) or kurtosis (3) by fixed-point iteration."""
    for _ in range(steps):
        directions = directions / np.linalg.norm(directions, axis=0)
        columns = basis @ directions
        moved = basis.T @ (columns * columns if power == 2 else columns * columns * columns) / len(basis)
        directions = moved if power == 2 else moved - 3.0 * directions
    turned: Floats = directions / np.linalg.norm(directions, axis=0)
    return turned


@dataclass(frozen=True, slots=True, eq=False)
class SmmNode:
    """What both ends know of a node's product."""

    answered: NodeExchange
    # version 1: the slot of each column of the answer; int (columns,)
    slots: NDArray[np.int32]
    # version 2: sums of grad and of hess, sent with the answer; float64 (2,)
    totals: Floats


def products_from_transcript(transcript: Transcript, peer: str, n_rows: int) -> list[list[list[SmmNode]]]:
    """Return the products between the transcript's party and a peer, by tree, level and node (version 2: and column).

    Nodes without a product are left out. The transcript may be either end's; ConfigError if it has no contents.
    """
    trees: list[list[list[SmmNode]]] = []
    offsets = features = np.empty(0, np.int32)
    rows, vectors, pending = list[node_products.Rows](), list[Floats](), np.empty(0)
    named, count = NamedNodes(n_rows, 0), 0

    def whole(step: str, more: Array, widths: Sequence[int]) -> list[Floats] | None:
        """Add a message's numbers; return the level's matrices once the last one is there."""
        nonlocal pending
        pending = np.append(pending, array_view(more, np.float64, (None,), peer=peer, what=step))
        if len(pending) != node_products.ends_of_matrices(rows, widths)[-1]:
            return None
        found, pending = node_products.cut_matrices(pending, rows, widths, peer, step), pending[:0]
        return found

    def add(masked: list[Floats] | None, slots: list[NDArray[np.int32]], totals: NDArray[np.int64]) -> None:
        if masked is not None:
            nodes = [k for k in range(len(rows)) if vectors[k].shape[1]]
            trees[-1].append([
                SmmNode(NodeExchange(rows[k], vectors[k], masked[k]), slots[k], totals[k].astype(np.float64))
                for k in nodes
            ])  # fmt: skip

    for entry in transcript.entries:
        if entry.peer != peer:
            continue
        match entry.step:
            case "BinLayout":
                offsets = array_of(entry, content_of(entry, BinLayout).offsets, "offsets", None)
            case "PaperTree":
                features = array_of(entry, content_of(entry, node_products.PaperTree).columns, "columns", None)
                trees.append([])
            case "NodeRows":
                count = content_of(entry, node_products.NodeRows).nodes
                named, rows = NamedNodes(n_rows, count), []
            case "NamedRows" if not rows:
                named.add(content_of(entry, NamedRows), peer)
            case "NullVectors" | "CandidateVectors":
                sent = content_of(entry, getattr(node_products, entry.step))
                rows = rows or node_products.rows_of_nodes(named.rows, named.nodes, count)
                if entry.step == "CandidateVectors" and len(rows) == count:
                    rows = node_products.every_column(rows, features)
                widths = node_products.widths_of_nodes(sent.widths, rows, n_rows, peer, entry.step).tolist()
                vectors = whole(entry.step, sent.vectors, widths) or vectors
            case "MaskedCandidates":
                answer, shape = content_of(entry, node_products.MaskedCandidates), (len(rows), int(offsets[-1]))
                counts = array_view(answer.counts, np.int32, shape, peer=peer, what="MaskedCandidates.counts")
                slots = [candidate_slots(of_node, features, offsets) for of_node in counts]
                masked = whole(entry.step, answer.masked, [len(of_node) for of_node in slots])
                add(masked, slots, np.zeros((len(rows), 2), np.int64))
            case "MaskedGradients":
                gradients = content_of(entry, node_products.MaskedGradients)
                totals = array_view(
                    gradients.totals, np.int64, (len(rows), 2), peer=peer, what="MaskedGradients.totals"
                )
                masked = whole(entry.step, gradients.masked, [2 * (of_node.shape[1] > 0) for of_node in vectors])
                add(masked, [np.empty(0, np.int32)] * len(rows), totals)
    return trees


Trees = list[list[list[SmmNode]]]


def matrix_products(view: View, truth: Truth) -> Iterator[Finding]:
    """Find labels at passive parties, and passive parties' bins at the active one, from FedXGBoost-SMM's products.

    A party that sent null vectors of its own matrix gets the other's matrix without its projection on some of them. In
    version 2 that matrix is the gradients: a passive party rounds them to the two values of a first tree, and solves
    for them where levels of the tree give enough equations. In version 1 it is a passive party's candidates, zeros and
    ones: the active party rounds them, and solves for them over trees. If there are many null vectors, the columns that
    they leave show the passive party the first tree's gradients by their shape. Safe mode has no such product.

    References: Le et al., "FedXGBoost", 2021 (arXiv 2106.10662). The attacks are ours; more of them are in
    docs/explanation/fedxgboost_published.md.
    """
    n_rows, active = len(truth.labels), view.inputs.roles.active
    if not isinstance(view.inputs.options, FedXGBoostSMM) or view.party not in {active, *truth.owners}:
        return
    if view.is_active:
        for owner in [name for name in truth.owners if name != active]:
            yield bins_finding(view, truth, owner, products_from_transcript(view.transcript, owner, n_rows))
    else:
        trees = products_from_transcript(view.transcript, active, n_rows)
        yield label_finding("matrix products (Le 2021)", view, truth, label_scores(trees, n_rows))


def label_scores(trees: Trees, n_rows: int) -> Floats:
    """Score labels by a passive party's products in a first tree, float64 (n_rows,); 0: nothing is known."""
    scores = np.zeros(n_rows)
    nodes = [node for level in trees[0] for node in level] if trees else []
    if not nodes:
        return scores
    root = nodes[0].answered
    # version 2: the answer is gradients
    if not len(nodes[0].slots):
        scores[root.rows] = -root.masked[:, 0]
        if n_rows <= MOST_SOLVED:
            found, known = solved([node.answered for node in nodes], n_rows)
            scores[known] = -found[known, 0]
    else:
        n_left = len(root.rows) - root.vectors.shape[1]
        if len(root.rows) <= MOST_SOLVED and 1 < n_left <= MOST_LEFT * np.sqrt(len(root.rows)):
            scores[root.rows] = two_valued(left_over(root.vectors))
    return scores


def bins_finding(view: View, truth: Truth, owner: str, trees: Trees) -> Finding:
    """Score how many of a passive party's bins, of all rows of a first tree, the products show."""
    codes, offsets = truth.codes(owner)
    sizes = [np.bincount(column).max() for column in codes.T]
    baseline = score = float(np.sum(sizes) / max(1, codes.size))
    roots = [levels[0][0] for levels in trees if levels and levels[0] and len(levels[0][0].slots)]
    if roots:
        entries = [entry for entry in view.transcript.entries if entry.peer == owner]
        layout = next(content_of(entry, BinLayout) for entry in entries if entry.step == BinLayout.__name__)
        categorical = array_view(layout.categorical, np.bool_, (None,), peer=owner, what="BinLayout.categorical")
        true = candidate_columns(codes[roots[0].answered.rows], roots[0].slots, offsets, categorical)
        # a row's bin is right if all its column's candidates are
        wrong = candidates(roots, len(codes))[roots[0].answered.rows] != (true > 0)
        column = np.searchsorted(offsets, roots[0].slots, side="right") - 1
        score = float(np.mean([~wrong[:, column == k].any(axis=1) for k in np.unique(column)]))
    error = float(0.5 / np.sqrt(max(1, len(codes))))
    return view.finding("matrix products (Le 2021)", f"bins of {owner}", "share right", score, baseline, error)


def candidates(roots: Sequence[SmmNode], n_rows: int) -> Flags:
    """Return a passive party's candidates, bool (n_rows, candidates), as the roots of trees show them."""
    first = roots[0].answered
    guess = np.zeros((n_rows, first.masked.shape[1]), np.bool_)
    guess[first.rows] = rounded(first, steps=STEPS) > 0.5
    alike = [root.answered for root in roots if np.array_equal(root.slots, roots[0].slots)]
    if n_rows <= MOST_SOLVED and len(alike) > 1:
        found, known = solved(alike, n_rows)
        guess[known] = found[known] > 0.5
    return guess


def noisy_gradients(view: View, truth: Truth) -> Iterator[Finding]:
    """Find labels in the noisy gradients that a passive party gets: rows with high ones are taken for one class.

    A row's first gradient under a logistic loss is the base score less its label, and later ones keep its sign. If
    every gradient has fresh noise, the mean over a row's trees separates labels better. If the label itself was
    randomised once, the first gradients do, because later ones also depend on the model's prediction for the row.

    References: Le et al., "FedXGBoost", 2021 (arXiv 2106.10662), section V (FedXGBoost-LDP).
    """
    if view.is_active or not view.steps(NoisyTree):
        return
    total, times = np.zeros(len(truth.labels)), np.zeros(len(truth.labels))
    first: Floats | None = None
    for entry in view.transcript.entries:
        if entry.step != NoisyTree.__name__:
            continue
        tree = content_of(entry, NoisyTree)
        grad = np.frombuffer(tree.grad.data, tree.grad.dtype)
        rows = slice(None) if tree.rows is None else np.frombuffer(tree.rows.data, np.int32)
        total[rows] += grad
        times[rows] += 1
        first = total.copy() if first is None else first
    if first is not None:
        yield label_finding("first noisy gradients", view, truth, first)
    yield label_finding("mean of noisy gradients", view, truth, total / np.maximum(times, 1))


def likeliest_buckets(view: View, truth: Truth) -> Iterator[Finding]:
    """Find a partner's buckets from the randomised ones of FederBoost by column: take each row's likeliest bucket.

    The best guess weighs the chance of the noise against how common a bucket is; the noisy buckets of all rows give an
    unbiased estimate of that. If noise is weak it is the noisy bucket itself, if it is strong the commonest one.

    References: Tian et al., "FederBoost", 2020 (arXiv 2011.02796), section IV-B.
    """
    # each peer's buckets of the rows so far: long tables come in several messages
    before: dict[str, list[NDArray[np.uint8]]] = {}
    own: Any = view.inputs.options
    for entry in view.transcript.entries:
        if entry.step != Buckets.__name__ or entry.direction != "received":
            continue
        sent = content_of(entry, Buckets)
        epsilons = np.frombuffer(sent.epsilon.data, np.float64)
        codes, offsets = truth.codes(entry.peer, list(map(own.most_buckets, epsilons.tolist())))
        present, missing = (np.frombuffer(of.data, of.dtype) for of in (sent.present, sent.missing))
        # the sender has other buckets than those of its whole table
        if not codes.size or not np.array_equal(present, np.diff(offsets) - 1):
            continue
        sizes = np.maximum(present + missing, 1).astype(np.int32)
        came = before.setdefault(entry.peer, [])
        left = row_pieces(len(codes), sum(widths_of(sizes)))[len(came) :]
        came.append(unpack_buckets(sent.packed, sizes, left[0].stop - left[0].start, entry.peer))
        if len(left) > 1:
            continue
        noisy = np.concatenate(before.pop(entry.peer))
        guessed = [likeliest(of[0], int(of[1]), float(of[2])) for of in zip(noisy.T, sizes, epsilons, strict=True)]
        common = [np.bincount(column).max() for column in codes.T]
        score, baseline = float((np.stack(guessed, axis=1) == codes).mean()), float(np.sum(common) / codes.size)
        error = float(0.5 / np.sqrt(len(codes)))
        yield view.finding("likeliest buckets", f"buckets of {entry.peer}", "share right", score, baseline, error)


def likeliest(noisy: NDArray[np.uint8], size: int, epsilon: float) -> NDArray[np.intp]:
    """Return each row's likeliest true bucket (n_rows,), given the noise and how common buckets are by its estimate."""
    other, excess = chances(size, epsilon)
    share = np.maximum((np.bincount(noisy, minlength=size) / len(noisy) - other) / excess, 0.0)
    # the chance of each noisy bucket (columns), given the true one (rows)
    reported = np.full((size, size), other) + excess * np.eye(size)
    guess: NDArray[np.intp] = np.argmax(reported * share[:, np.newaxis], axis=0)
    return guess[noisy]
