"""Attacks on values under noise, masks or null vectors: labels, buckets, bins and summands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata  # type: ignore[import-untyped]

from treaty.attacks.views import Finding, Truth, View, error_of_best, label_finding
from treaty.machine.arrays import Flags, Floats, Integers
from treaty.messaging.messages import row_pieces
from treaty.messaging.messages import view as array_view
from treaty.privacy.randomised_response import chances
from treaty.systems.federboost_vertical.buckets import Buckets, bits_of_row, unpack_buckets
from treaty.systems.fedxgb.paper import InputAndShares
from treaty.systems.fedxgboost_ldp.scoring import NoisyTree
from treaty.systems.fedxgboost_smm.attacks import (
    SmmNode,
    left_over,
    products_from_transcript,
    rounded,
    solved,
    two_valued,
)
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.horizontal.masked_sums import MaskedInput
from treaty.systems.vertical.exact_sums import content_of
from treaty.systems.vertical.messages import BinLayout
from treaty.trees.splits import candidate_columns

KINDS: dict[str, type[MaskedInput] | type[InputAndShares]] = {
    kind.__name__: kind for kind in (MaskedInput, InputAndShares)
}
MOST = 1_000_000
"""Numbers of a member that are looked at, from the first sum on."""

Vectors = list[Integers]


def repeated_masks(view: View, truth: Truth) -> Iterator[Finding]:
    """Compare what came from each member with what it gave, at the party that opens sums.

    What a member gave to a sum, from differences of its masked vectors: where a mask serves twice, it cancels.

    Whoever opens sums sees each member's vectors under masks. Tried are the numbers as they came, the differences of
    each vector's numbers from its first, and the differences of successive vectors. They are compared with the same of
    what the member gave, by rank correlation. Baseline: 0, which is what fresh masks for every number and vector
    leave. FedXGB as published has one mask for all numbers of a tree.

    Not tried are differences of opened sums over cohorts that differ by a member, which no masks hide; FedXGB's users
    refuse such cohorts, and `systems.fedxgb.sums.cohorts` says how they know.

    References
    ----------
    Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, on masks that
    serve once. Liu et al., "Boosting Privately", ICDCS 2020, whose masks do not.
    """
    for peer, given in truth.given.items():
        seen = masked_from(view, peer)
        plain, seen = paired(given, seen)
        if not seen:
            continue
        found = [correlation(of(plain), of(seen)) for of in TRIED]
        rho, error = max(found, key=lambda of: of[0] / max(of[1], 1e-9))
        yield Finding(
            attack="differences of masked vectors (Bonawitz 2017)", party=view.party, target=f"sums of {peer}",
            measure="rank correlation", score=max(0.0, rho), baseline=0.0, error=error_of_best(error, len(TRIED)),
        )  # fmt: skip


def masked_from(view: View, peer: str) -> Vectors:
    """Return the masked vectors that came from a member, as int64 (n,) modulo 2^64."""
    received = [
        entry for entry in view.recorded.transcript.entries
        if entry.direction == "received" and entry.peer == peer and entry.step in KINDS
    ]  # fmt: skip
    messages = [content_of(entry, KINDS[entry.step]) for entry in received]
    return [array_view(of.values, np.uint64, (None,), peer=peer, what="values").view(np.int64) for of in messages]


def paired(given: Vectors, seen: Vectors) -> tuple[Vectors, Vectors]:
    """Return vectors that were given and what came of them, in order, without those that never came."""
    plain, masked, left = Vectors(), Vectors(), iter(given)
    for vector in seen:
        own = next((one for one in left if len(one) == len(vector)), None)
        if own is None or sum(map(len, masked)) > MOST:
            break
        plain.append(own)
        masked.append(vector)
    return plain, masked


def within(vectors: Vectors) -> Vectors:
    """Return the differences of each vector's other numbers from its first, modulo 2^64."""
    return [vector[1:] - vector[:1] for vector in vectors]


def between(vectors: Vectors) -> Vectors:
    """Return the differences of successive vectors, as far as the shorter one goes, modulo 2^64."""
    lengths = [min(len(before), len(after)) for before, after in pairwise(vectors)]
    return [after[:n] - before[:n] for n, (before, after) in zip(lengths, pairwise(vectors), strict=True)]


TRIED: tuple[Callable[[Vectors], Vectors], ...] = (list, within, between)


def correlation(plain: Vectors, seen: Vectors) -> tuple[float, float]:
    """Return the mean correlation of ranks within vectors, weighted by their lengths, and its standard error by chance.

    Vectors of equal numbers have no ranks and are left out; 0 and 0 where no others are.
    """
    ranks = [
        (standard_ranks(a), standard_ranks(b))
        for a, b in zip(plain, seen, strict=True)
        if np.any(a != a[:1]) and np.any(b != b[:1])
    ]
    count = sum(len(own) for own, _ in ranks)
    if not count:
        return 0.0, 0.0
    total = sum(float(own @ other) for own, other in ranks)
    # neighbouring differences have a vector in common
    return total / count, float(np.sqrt(1.5 / count))


def standard_ranks(values: Integers) -> Floats:
    """Return ranks (n,) with a mean of 0 and a standard deviation of 1."""
    ranks = rankdata(values)
    return np.asarray((ranks - ranks.mean()) / ranks.std())


MOST_SOLVED = 2000
"""Rows of a system of equations that is solved, which takes their cube."""

MOST_LEFT = 3
"""Columns that null vectors may leave over, in square roots of rows: among more, two values do not stand out."""

STEPS = 5  # of iterative decoding

Trees = list[list[list[SmmNode]]]


def matrix_products(view: View, truth: Truth) -> Iterator[Finding]:
    """Find labels at passive parties, and passive parties' bins at the active one.

    What the published matrix product of FedXGBoost-SMM gives away by linear algebra, at either end.

    A party that sent null vectors of its own matrix gets the other's matrix without its projection on some of them. In
    version 2 that matrix is the gradients, which a passive party rounds to the two values of a first tree, and solves
    for where levels of the tree add up to enough equations. In version 1 it is the candidates of a passive party, zeros
    and ones, which the active party rounds and solves for over trees; and where null vectors are many, what they leave
    over shows the passive party the first tree's gradients by their shape. In safe mode no party gets such a product.

    References
    ----------
    Le et al., "FedXGBoost", 2021 (arXiv 2106.10662). The attacks are ours, with sources in
    `systems.fedxgboost_smm.attacks`; docs/fedxgboost.md has more of them.
    """
    if not isinstance(view.inputs.options, FedXGBoostSMM) or view.party not in {
        view.inputs.roles.active,
        *truth.owners,
    }:
        return
    n_rows, active = len(truth.labels), view.inputs.roles.active
    if view.is_active:
        for owner in [name for name in truth.owners if name != active]:
            yield bins_finding(view, truth, owner, products_from_transcript(view.recorded.transcript, owner, n_rows))
    else:
        trees = products_from_transcript(view.recorded.transcript, active, n_rows)
        yield label_finding("matrix products (Le 2021)", view, truth, label_scores(trees, n_rows))


def label_scores(trees: Trees, n_rows: int) -> Floats:
    """Return what a passive party's products in a first tree tell of labels, float64 (n_rows,); 0 where nothing."""
    scores = np.zeros(n_rows)
    nodes = [node for level in trees[0] for node in level] if trees else []
    if not nodes:
        return scores
    root = nodes[0].answered
    # version 2: gradients came back
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
    """Return how many of a passive party's bins, of all rows of a first tree, the products show."""
    codes, offsets = truth.codes(owner)
    sizes = [np.bincount(column).max() for column in codes.T]
    baseline = score = float(np.sum(sizes) / max(1, codes.size))
    roots = [levels[0][0] for levels in trees if levels and levels[0] and len(levels[0][0].slots)]
    if roots:
        entries = [entry for entry in view.recorded.transcript.entries if entry.peer == owner]
        layout = next(content_of(entry, BinLayout) for entry in entries if entry.step == BinLayout.__name__)
        categorical = array_view(layout.categorical, np.bool_, (None,), peer=owner, what="BinLayout.categorical")
        true = candidate_columns(codes[roots[0].answered.rows], roots[0].slots, offsets, categorical)
        wrong = candidates(roots, len(codes))[roots[0].answered.rows] != (true > 0)
        column = np.searchsorted(offsets, roots[0].slots, side="right") - 1
        score = float(np.mean([~wrong[:, column == k].any(axis=1) for k in np.unique(column)]))
    return Finding(
        attack="matrix products (Le 2021)", party=view.party, target=f"bins of {owner}", measure="share right",
        score=score, baseline=baseline, error=float(0.5 / np.sqrt(max(1, len(codes)))),
    )  # fmt: skip


def candidates(roots: Sequence[SmmNode], n_rows: int) -> Flags:
    """Return a passive party's candidates, bool (n_rows, candidates), as far as roots of trees show them."""
    first = roots[0].answered
    guess = np.zeros((n_rows, first.masked.shape[1]), np.bool_)
    guess[first.rows] = rounded(first, steps=STEPS) > 0.5
    alike = [root.answered for root in roots if np.array_equal(root.slots, roots[0].slots)]
    if n_rows <= MOST_SOLVED and len(alike) > 1:
        found, known = solved(alike, n_rows)
        guess[known] = found[known] > 0.5
    return guess


def noisy_gradients(view: View, truth: Truth) -> Iterator[Finding]:
    """Take rows with high gradients, in the first tree or in the mean, for one class.

    Labels from noisy gradients that a passive party is sent (FedXGBoost-LDP; Le et al. 2021, section V).

    A row's first gradient under a logistic loss is the base score less its label, and later ones keep its sign. Where
    every gradient has noise of its own, the mean over the trees that a row was in separates labels better; where the
    label itself was randomised once, the first gradients do, for later ones tell what the model makes of the row, too.
    """
    if view.is_active or not view.steps(NoisyTree):
        return
    total, times = np.zeros(len(truth.labels)), np.zeros(len(truth.labels))
    first: Floats | None = None
    for entry in view.recorded.transcript.entries:
        if entry.step != NoisyTree.__name__:
            continue
        tree = entry.message(NoisyTree)
        assert tree is not None, "contents are recorded"
        grad = np.frombuffer(tree.grad.data, tree.grad.dtype)
        rows = slice(None) if tree.rows is None else np.frombuffer(tree.rows.data, np.int32)
        total[rows] += grad
        times[rows] += 1
        first = total.copy() if first is None else first
    if first is not None:
        yield label_finding("first noisy gradients", view, truth, first)
    yield label_finding("mean of noisy gradients", view, truth, total / np.maximum(times, 1))


def likeliest_buckets(view: View, truth: Truth) -> Iterator[Finding]:
    """Take each row's noisy bucket for its true one.

    A partner's buckets from randomised ones (FederBoost by column; Tian et al. 2020, section IV-B).

    The best guess weighs the chance of the noise against how common a bucket is, which the noisy buckets of all rows
    tell without bias: where noise is weak it is the noisy bucket itself, where it is strong the commonest one.
    """
    # of each peer the buckets of the rows so far
    before: dict[str, list[NDArray[np.uint8]]] = {}
    for entry in view.recorded.transcript.entries:
        if entry.step != Buckets.__name__ or entry.direction != "received":
            continue
        sent = entry.message(Buckets)
        assert sent is not None, "contents are recorded"
        codes, offsets = truth.codes(entry.peer)
        present, missing = (np.frombuffer(of.data, of.dtype) for of in (sent.present, sent.missing))
        # other buckets than the true table's
        if not codes.size or not np.array_equal(present, np.diff(offsets) - 1):
            continue
        sizes = np.maximum(present + missing, 1).astype(np.int32)
        came = before.setdefault(entry.peer, [])
        left = row_pieces(len(codes), bits_of_row(sizes))[len(came) :]
        came.append(unpack_buckets(sent.packed, sizes, left[0].stop - left[0].start, entry.peer))
        if len(left) > 1:
            continue
        noisy = np.concatenate(before.pop(entry.peer))
        epsilons = np.frombuffer(sent.epsilon.data, np.float64)
        guessed = [likeliest(of[0], int(of[1]), float(of[2])) for of in zip(noisy.T, sizes, epsilons, strict=True)]
        common = [np.bincount(column).max() for column in codes.T]
        yield Finding(
            attack="likeliest buckets", party=view.party, target=f"buckets of {entry.peer}", measure="share right",
            score=float((np.stack(guessed, axis=1) == codes).mean()), baseline=float(np.sum(common) / codes.size),
            error=float(0.5 / np.sqrt(len(codes))),
        )  # fmt: skip


def likeliest(noisy: NDArray[np.uint8], size: int, epsilon: float) -> NDArray[np.intp]:
    """Return each row's likeliest true bucket (n_rows,), given the noise and how common buckets are by its estimate."""
    other, excess = chances(size, epsilon)
    share = np.maximum((np.bincount(noisy, minlength=size) / len(noisy) - other) / excess, 0.0)
    # of a true bucket the chance of a noisy one
    reported = np.full((size, size), other) + excess * np.eye(size)
    guess: NDArray[np.intp] = np.argmax(reported * share[:, np.newaxis], axis=0)
    return guess[noisy]
