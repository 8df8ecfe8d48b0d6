"""Labels from the purity of the sets of rows that a passive party sees.

The better a tree, the nearer its leaves are to one class: whoever sees which rows are in a leaf, and learns the labels
of some, knows those of nearly all. The score is an upper bound of that, the share of rows whose label is the
commonest of the other rows of their finest set, in the tree where it is highest. Baseline: what the party could do with
others' labels without being shown any set, by a tree of as many leaves on its own columns, or by the commonest label.

References
----------
Cheng et al., "SecureBoost", IEEE Intelligent Systems 2021 (arXiv 1901.08755), section 6, which counts a row's own label
as well; without it a set of one row tells nothing (`privacy.purity.held_out_purity`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.tree import DecisionTreeClassifier

from treaty.attacks.row_sets import seen_sets
from treaty.attacks.views import Finding, Truth, View, error_of_best
from treaty.privacy.purity import held_out_purity
from treaty.systems.vertical.encrypted_columns import TreeStart


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Guess each row's label by the others in its finest set, at a passive party of encrypted sums."""
    if view.is_active or not view.steps(TreeStart):
        return
    labels = truth.labels.astype(np.int64)
    majority = float(max(labels.mean(), 1.0 - labels.mean()))
    score = baseline = majority
    finest = [tree[-1] + 1 for tree in seen_sets(view, len(labels)) if tree]  # 0: rows of which nothing is known
    if finest:
        purity = held_out_purity(np.stack(finest, axis=1), labels, 2)
        score = float(purity.max())
        leaves = len(np.unique(finest[int(purity.argmax())]))
        baseline = max(majority, purity_of_own_columns(truth.codes(view.party)[0], labels, leaves))
    error = float(np.sqrt(baseline * (1.0 - baseline) / max(1, len(labels))))
    yield Finding(
        attack="purity of the finest row sets (Cheng 2021)", party=view.party, target="labels", measure="share right",
        score=score, baseline=baseline, error=error_of_best(error, len(finest)),
    )  # fmt: skip


def purity_of_own_columns(codes: NDArray[np.uint8], labels: NDArray[np.int64], leaves: int) -> float:
    """Return the share of rows that trees of own columns (n_rows, n_columns) get right, grown on four fifths of all."""
    if not codes.shape[1] or leaves < 2 or len(labels) < 10:
        return 0.0
    tree = DecisionTreeClassifier(max_leaf_nodes=leaves, random_state=0)
    guess = cross_val_predict(tree, codes, labels, cv=KFold(5, shuffle=True, random_state=0))
    return float(np.mean(guess == labels))
