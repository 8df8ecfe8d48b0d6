"""The purity guard: which tree nodes would tell a passive party labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def mixed_nodes(
    y: NDArray[np.float64], n_classes: int, limit: float
) -> Callable[[NDArray[np.int32], NDArray[np.int64]], NDArray[np.bool_]]:
    """Return a function that tells nodes whose classes are mixed about as in the whole table.

    Parameters
    ----------
    y : float64 (n_rows,)
        Class numbers 0 to ``n_classes - 1``.
    limit : float
        Largest difference of a class's share in the node from its share in the table, 0 to 1.

    Returns
    -------
    callable
        ``mixed(rows, starts)`` gives bool (n_nodes,) for the nodes ``rows[starts[k]:starts[k + 1]]``; an empty node is
        mixed.

    References
    ----------
    Kang et al., 2024, arXiv 2404.04490, section 5, propose a purity threshold; measured here against the prior.
    """
    classes = y.astype(np.int64)
    prior = np.bincount(classes, minlength=n_classes) / max(len(classes), 1)

    def mixed(rows: NDArray[np.int32], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        sizes = np.diff(starts)
        node = np.repeat(np.arange(len(sizes)), sizes)
        counts = np.bincount(node * n_classes + classes[rows], minlength=len(sizes) * n_classes)
        shares = counts.reshape(-1, n_classes) / np.maximum(sizes, 1)[:, None]
        return np.asarray((np.abs(shares - prior).max(axis=1) <= limit) | (sizes == 0))

    return mixed
