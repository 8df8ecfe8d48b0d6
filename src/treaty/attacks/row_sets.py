"""Labels from which rows were together in nodes (instance clustering).

References
----------
Kang et al., "Hyperparameter Optimization for SecureBoost via Constrained Multi-Objective Federated Learning", 2024
(arXiv 2404.04490).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treaty.attacks.views import Finding, Truth, View, label_finding
from treaty.privacy.clustering import cluster_scores
from treaty.systems.vertical.encrypted_columns import SplitColumns, TreeStart
from treaty.systems.vertical.exact_sums import node_sets_from_transcript

Partitions = list[list[np.ndarray[tuple[int], np.dtype[np.int32]]]]


def seen_sets(view: View, n_rows: int) -> Partitions:
    """Return what a passive party knows of which rows are together, as partitions (n_rows,) by tree.

    Where nodes are hidden that is how its own columns were divided: one partition for each split of its own.
    """
    sets = node_sets_from_transcript(view.recorded.transcript, n_rows)
    told = [
        entry.message(SplitColumns)
        for entry in view.recorded.transcript.entries
        if entry.step == SplitColumns.__name__ and entry.direction == "sent"
    ]
    for answer in told:
        assert answer is not None, "contents are recorded"
        bits = np.frombuffer(answer.new.data, np.uint8).reshape(answer.new.shape)
        sets += [[column.astype(np.int32)] for column in np.unpackbits(bits, axis=1, count=n_rows)]
    own = view.recorded.recording.sides.get(view.party, [])  # of transferred sides, which no message shows
    different = {left.tobytes(): left.astype(np.int32) for rows, left in own if len(rows) == n_rows}
    return sets + [[left] for left in different.values()]


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Separate rows by the nodes they shared, at a passive party of encrypted sums."""
    if view.is_active or not view.steps(TreeStart):
        return
    n_rows = len(truth.labels)
    scores = cluster_scores(seen_sets(view, n_rows), n_rows)
    yield label_finding("rows that were together (Kang 2024)", view, truth, scores)
