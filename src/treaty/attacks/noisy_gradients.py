"""Labels from noisy gradients that a passive party is sent (FedXGBoost-LDP; Le et al. 2021, section V).

A row's first gradient under a logistic loss is the base score less its label, and later ones keep its sign. Where every
gradient has noise of its own, the mean over the trees that a row was in separates labels better; where the label itself
was randomised once, the first gradients do, for later ones tell what the model makes of the row, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treaty.attacks.views import Finding, Truth, View, label_finding
from treaty.machine.arrays import Floats
from treaty.systems.fedxgboost_ldp.scoring import NoisyTree


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Take rows with high gradients, in the first tree or in the mean, for one class."""
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
