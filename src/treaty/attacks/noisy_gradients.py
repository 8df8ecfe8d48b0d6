"""Labels from noisy gradients that a passive party is sent (FedXGBoost-LDP; Le et al. 2021, section V).

A row's first gradient under a logistic loss is the base score less its label, and later ones keep its sign: their mean
over the trees a row was in separates labels as far as noise lets it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treaty.attacks.views import Finding, Truth, View, label_finding
from treaty.systems.fedxgboost_ldp.scoring import NoisyTree


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Take rows with high mean gradients for one class."""
    if view.is_active or not view.steps(NoisyTree):
        return
    total, times = np.zeros(len(truth.labels)), np.zeros(len(truth.labels))
    for entry in view.recorded.transcript.entries:
        if entry.step != NoisyTree.__name__:
            continue
        tree = entry.message(NoisyTree)
        assert tree is not None, "contents are recorded"
        grad = np.frombuffer(tree.grad.data, tree.grad.dtype)
        rows = slice(None) if tree.rows is None else np.frombuffer(tree.rows.data, np.int32)
        total[rows] += grad
        times[rows] += 1
    scores = total / np.maximum(times, 1)
    yield label_finding("mean of noisy gradients", view, truth, scores)
