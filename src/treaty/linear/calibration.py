"""Platt scaling: margins that a loss other than the logistic one has trained become log-odds.

The Taylor loss is a least-squares loss. Its margins rank rows well, but the probabilities 1 / (1 + exp(-u)) are
biased: too near 1/2, so that their mean is not the rate of the labels. Two numbers, fitted to margins and labels of the
training rows by the exact logistic loss, put that right.

References
----------
Platt, "Probabilistic Outputs for Support Vector Machines", 1999; its smoothed targets, (n + 1) / (n + 2) for n rows of
a class, keep the two numbers finite where the classes are separable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from treaty.compute import Floats

SAME = 1e-9
"""Margins whose deviation is a smaller share of their size differ by rounding alone: all get the labels' rate."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The log-odds of a row with margin u are `slope` u + `offset`."""

    slope: float
    offset: float

    def log_odds(self, margins: Floats) -> Floats:
        """Return log-odds of the second class, of the margins' shape."""
        return self.slope * margins + self.offset


def fit_calibration(margins: Floats, y: Floats, weight: Floats | None = None) -> Calibration:
    """Fit Platt's two numbers to margins (n_rows,), labels y of 0 or 1, and weights of rows.

    Whole weights count rows, others are scaled to mean 1.
    """
    from sklearn.linear_model import LogisticRegression  # late: only a party with labels needs it, once

    weight = np.ones(len(y)) if weight is None else weight
    if np.any(weight != np.rint(weight)):
        weight = weight / weight.mean()
    positive, negative = float(weight @ y), float(weight @ (1.0 - y))
    targets = np.where(y > 0.5, (positive + 1.0) / (positive + 2.0), 1.0 / (negative + 2.0))
    centre = float(np.average(margins, weights=weight))
    spread = math.sqrt(float(np.average((margins - centre) ** 2, weights=weight)))
    if spread <= SAME * max(1.0, abs(centre)):
        margins, spread = np.full_like(margins, centre), 1.0
    scores = ((margins - centre) / spread)[:, np.newaxis]
    # a row of either class for every row, weighted by its target
    fitted = LogisticRegression(C=np.inf, tol=1e-9, max_iter=1000).fit(
        np.vstack([scores, scores]),
        np.repeat([1, 0], len(y)),
        sample_weight=np.concatenate([weight * targets, weight * (1.0 - targets)]),
    )
    slope = float(fitted.coef_[0, 0]) / spread
    return Calibration(slope, float(fitted.intercept_[0]) - slope * centre)
