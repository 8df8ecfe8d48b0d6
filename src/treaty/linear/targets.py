"""What a regression on the whole table regresses on: labels or numbers, in units in which all losses are alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from treaty.compute import Floats
from treaty.errors import DataError
from treaty.linear.losses import POISSON, SQUARED, TAYLOR, Loss

LARGEST_TARGET = 512.0
"""In standard deviations; a target with rows further out has a larger unit."""

LEAST_SPREAD = 1e-12


@dataclass(frozen=True, slots=True)
class Target:
    """Labels for a loss, in a unit of their own: a margin for labels as they came is `shift` + `unit` times one here.

    The covariance of weights is `variance` times the inverse Hessian, unless that is estimated from the residuals.
    """

    loss: Loss
    labels: Floats
    shift: float = 0.0
    unit: float = 1.0
    variance: float = 1.0

    @property
    def hidden(self) -> Floats:
        """What margins come near to under a quadratic loss, whose residuals are its curvature times the difference."""
        return 2.0 * self.labels if self.loss is TAYLOR else self.labels

    @property
    def start(self) -> float:
        """Mean loss of margins of 0."""
        return float(np.mean(self.loss.values(np.zeros(len(self.labels)), self.labels)))


def target_of(y: Floats, family: str, party: str, weight: Floats | None = None) -> Target:
    """Prepare 0 and 1 of a logistic regression, counts, or any numbers; DataError for others, or all the same."""
    if family == "logistic":
        return Target(TAYLOR, 2.0 * y - 1.0)
    if family == "poisson":
        negative, rate = int(np.count_nonzero(y < 0.0)), float(np.average(y, weights=weight))
        if negative or not rate > 0.0:
            got = f"{negative} negative ones" if negative else "only zeros" + ("" if weight is None else " with weight")
            raise DataError(f"{party}: expected counts, 0 or more and not all 0, got {got} in {len(y)} rows")
        return Target(POISSON, y / rate, math.log(rate), variance=1.0 / rate)
    with np.errstate(over="ignore", invalid="ignore"):
        shift = float(np.average(y, weights=weight))
        far = float(np.abs(y - shift).max(initial=0.0))
        unit = max(math.sqrt(np.average((y - shift) ** 2, weights=weight)), far / LARGEST_TARGET)
    if not math.isfinite(unit):
        raise DataError(f"{party}: expected a target of numbers below 1e150 in size, got {np.abs(y).max():.3g}")
    if unit <= LEAST_SPREAD * abs(shift):
        got = "one sample" if len(y) == 1 else f"a deviation of {unit:.1g} around {shift:.6g} in {len(y)} rows"
        raise DataError(f"{party}: expected a target that varies by more than {LEAST_SPREAD:g} of its mean, got {got}")
    return Target(SQUARED, (y - shift) / unit, shift, unit)
