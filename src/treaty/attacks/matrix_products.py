"""What the published matrix product of FedXGBoost-SMM gives away by linear algebra, at either end.

A party that sent null vectors of its own matrix gets the other's matrix without its projection on some of them. In
version 2 that matrix is the gradients, which a passive party rounds to the two values of a first tree, and solves for
where levels of the tree add up to enough equations. In version 1 it is the candidates of a passive party, zeros and
ones, which the active party rounds and solves for over trees; and where null vectors are many, what they leave over
shows the passive party the first tree's gradients by their shape. In safe mode nobody gets such a product.

References
----------
Le et al., "FedXGBoost", 2021 (arXiv 2106.10662). The attacks are ours, with sources in
`systems.fedxgboost_smm.paper.attacks`; docs/fedxgboost.md has more of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from treaty.attacks.views import Finding, Truth, View, label_finding
from treaty.machine.arrays import Flags, Floats
from treaty.messaging.messages import view as array_view
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.fedxgboost_smm.paper.attacks import left_over, rounded, solved, two_valued
from treaty.systems.fedxgboost_smm.paper.transcripts import SmmNode, products_from_transcript
from treaty.systems.vertical.encrypted_columns import BinLayout
from treaty.systems.vertical.exact_sums import content_of
from treaty.trees.splits import candidate_columns

MOST_SOLVED = 2000
"""Rows of a system of equations that is solved, which takes their cube."""

MOST_LEFT = 3
"""Columns that null vectors may leave over, in square roots of rows: among more, two values do not stand out."""

STEPS = 5  # of iterative decoding

Trees = list[list[list[SmmNode]]]


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Find labels at passive parties, and passive parties' bins at the active one."""
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
    if not len(nodes[0].slots):  # version 2: gradients came back
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
