"""The purity guard: which tree nodes would reveal labels to a passive party."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treaty.compute import Flags, Floats, Int32s, Integers


def mixed_nodes(y: Floats, n_classes: int, limit: float) -> Callable[[Int32s, Integers], Flags]:
    """Return ``mixed(rows, starts)``, which marks nodes whose classes are mixed about as in the whole table.

    `y` are class numbers below `n_classes`; `limit` is the largest allowed difference of a class's share in the node
    from its share in the table, 0 to 1. Node k is ``rows[starts[k]:starts[k + 1]]``; an empty node counts as mixed.
    Kang et al. 2024 (arXiv 2404.04490), section 5, propose a purity threshold; measured here against the prior.
    """
    classes = y.astype(np.int64)
    prior = np.bincount(classes, minlength=n_classes) / max(len(classes), 1)

    def mixed(rows: Int32s, starts: Integers) -> Flags:
        sizes = np.diff(starts)
        node = np.repeat(np.arange(len(sizes)), sizes)
        counts = np.bincount(node * n_classes + classes[rows], minlength=len(sizes) * n_classes)
        shares = counts.reshape(-1, n_classes) / np.maximum(sizes, 1)[:, None]
        return np.asarray((np.abs(shares - prior).max(axis=1) <= limit) | (sizes == 0))

    return mixed
