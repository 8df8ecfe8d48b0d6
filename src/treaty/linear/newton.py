"""Regression on the whole table in one place: Newton's method to the optimum, and the weights' standard errors.

What federated training on the whole table is compared with; it gets there by other steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treaty.compute import Floats
from treaty.errors import DataError
from treaty.linear.coordinates import TOO_FEW_ROWS, determined, uncorrelated, with_sums
from treaty.linear.losses import Loss, mean_over_rows
from treaty.linear.training import EvalLosses, FittedWeights, settled

HALVINGS = 30  # of a step that makes the loss rise


def minimise(
    X: Floats, y: Floats, loss: Loss, *, l2: float, tol: float, max_iter: int, weight: Floats | None = None,
    watched: Mapping[str, tuple[Floats, Floats]] | None = None, patience: int | None = None,
) -> FittedWeights:  # fmt: skip
    """Minimise the mean loss of columns X (n_rows, n_columns), the last of them the intercept's, which l2 leaves alone.

    Weights of rows are scaled to mean 1. It ends when the losses of two steps differ by less than `tol`; columns that
    depend on each other linearly get the shortest weights. `watched` and `patience` are as for `training.train`.
    """
    own = np.ones(len(y)) if weight is None else weight / weight.mean()
    penalty = np.append(np.full(X.shape[1] - 1, l2), 0.0)

    def value(w: Floats) -> float:
        return float(np.mean(own * loss.values(X @ w, y)))

    w = np.zeros(X.shape[1])
    evals, best = EvalLosses({name: [] for name in watched or {}}, patience), w

    def look() -> Floats:
        for name, (columns, labels) in (watched or {}).items():
            evals.losses[name].append(float(np.mean(loss.values(columns @ w, labels))))
        return w if evals.best or patience is None else best

    losses, best = [value(w)], look()
    while not (len(losses) >= max_iter or settled(losses, tol) or evals.over):
        u = X @ w
        gradient = mean_over_rows(X, own * loss.residuals(u, y)) + penalty * w
        local = uncorrelated(_hessian(X, u, own, loss) + np.diag(penalty))
        step = local @ (local.T @ gradient)
        most = losses[-1] + 0.5 * penalty @ w**2
        for _ in range(HALVINGS):
            if value(w - step) + 0.5 * penalty @ (w - step) ** 2 <= most:
                break
            step /= 2.0
        w = w - step
        losses.append(value(w))
        best = look()
    return FittedWeights(best, losses, evals.losses, evals.over)


def standard_errors(
    X: Floats, y: Floats, weights: Floats, loss: Loss, variance: float = 1.0, sums: Floats | None = None
) -> tuple[Floats, int]:
    """Return the weights' standard errors (n_columns,) and the residuals' degrees of freedom.

    After them come those of weighted `sums` of weights (n_sums, n_columns), if there are such.

    Of a quadratic loss they are those of least squares, with the residuals' variance, else from Fisher's information
    and `variance`. A column that is constant but for the intercept has NaN, and one whose weight the optimum does not
    determine. DataError where there are no more rows than independent columns.
    """
    u = X @ weights
    local, known, rank = determined(X, _hessian(X, u, np.ones(len(y)), loss))
    degrees = len(y) - rank
    if degrees < 1:
        raise DataError(TOO_FEW_ROWS.format(rows=len(y), columns=rank))
    if loss.least is not None:
        variance = 2.0 * float(np.mean(loss.values(u, y)) - loss.least) * len(y) / degrees
    if sums is not None:
        local, known = np.vstack([local, sums @ local]), with_sums(known, sums)
    squares = np.einsum("ij,ij->i", local, local) * variance / len(y)
    return np.where(known, np.sqrt(squares), np.nan), degrees


def _hessian(X: Floats, u: Floats, own: Floats, loss: Loss) -> Floats:
    curvatures = own * loss.curvatures(u, np.ones(len(u)))
    hessian: Floats = X.T @ (X * curvatures[:, np.newaxis]) / len(u)
    return hessian
