"""What masked vectors have to look like."""

from __future__ import annotations

import numpy as np


def looks_uniform(vectors) -> bool:
    """Chi-squared on the bytes of all vectors, false alarms once in a million."""
    counts = np.bincount(np.concatenate(vectors).view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(abs(statistic - 255) < 4.9 * np.sqrt(2 * 255))
