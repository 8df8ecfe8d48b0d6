"""Stochastic training on one matrix: what every federated protocol is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from treaty.errors import DataError
from treaty.linear.lbfgs import Coordinator, EpochState, Slice, curvature_rows, partition
from treaty.linear.preparation import TAYLOR, TOO_FEW_ROWS, Loss, determined, mean_over_rows, uncorrelated, with_sums
from treaty.machine.arrays import Floats

LARGEST_RISE = 0.1  # an epoch is undone if its loss is more than a tenth above the last accepted one


def settled(losses: Sequence[float], tol: float) -> bool:
    """Whether the losses of the last two epochs differ by less than `tol`."""
    return len(losses) > 1 and abs(losses[-1] - losses[-2]) < tol


@dataclass(slots=True)
class Schedule:
    """The label holder's decisions after every epoch, from the mean loss of its batches.

    The learning rate is halved after an epoch whose loss has risen by more than a tenth, which is then undone.
    Training ends after `max_iter` epochs, or when the losses of two differ by less than `tol`. `losses` has each
    epoch's mean over batches, each at the weights it was computed with.
    """

    learning_rate: float
    tol: float
    max_iter: int
    losses: list[float] = field(default_factory=list)
    level: float = math.inf
    """The last accepted loss."""

    def resume(self, state: EpochState) -> None:
        """Go on from where a schedule with the same settings was."""
        self.learning_rate, self.losses, self.level = state.learning_rate, list(state.losses), state.level

    @property
    def finished(self) -> bool:
        return settled(self.losses, self.tol) or len(self.losses) >= self.max_iter

    def end_epoch(self, loss: float) -> bool:
        """Take in an epoch's loss (finite, else DataError); return whether to go back, see `Slice.end_epoch`."""
        if not math.isfinite(loss):
            raise DataError(
                f"training diverged: the loss of epoch {len(self.losses) + 1} is {loss}; lower learning_rate"
            )
        rose = bool(self.losses) and loss > (1.0 + LARGEST_RISE) * self.level
        if rose:
            self.learning_rate /= 2.0
        else:
            self.level = loss
        self.losses.append(loss)
        return rose


@dataclass(slots=True)
class EvalLosses:
    """Mean losses of eval sets after every epoch, by set; the last set says which epoch is best, and when to end."""

    losses: dict[str, list[float]]
    patience: int | None
    """Epochs without a lower loss of the last set after which training ends; None: they do not end it."""

    @property
    def best(self) -> bool:
        """Whether the last epoch has the lowest loss so far, where that decides about the end."""
        last = self._deciding
        return bool(last) and last[-1] < min(last[:-1], default=math.inf)

    @property
    def over(self) -> bool:
        last = self._deciding
        return self.patience is not None and bool(last) and len(last) - 1 - int(np.argmin(last)) >= self.patience

    @property
    def _deciding(self) -> list[float]:
        return [] if self.patience is None else list(self.losses.values())[-1]


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """The result of `train`: weights (n_columns,) and the loss of every epoch, see `Schedule`."""

    weights: Floats
    losses: list[float]
    eval_losses: dict[str, list[float]] = field(default_factory=dict)
    ended: bool = False
    """Whether eval rows ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimiser:
    """Settings of `train`.

    `memory` pairs are made every `period` iterations (see `treaty.linear.lbfgs`; no memory is gradient descent);
    `batch_size` and `seed` are of `treaty.linear.lbfgs`, the next three of `Schedule`. A pair's Hessian product is
    over `hessian_batch_size` rows, see `curvature_rows`; None: over the batch. The penalty is l2/2 ||w||^2 over all
    columns but the last where that is the `intercept`.
    """

    memory: int
    period: int
    batch_size: int
    seed: bytes
    learning_rate: float
    tol: float
    max_iter: int
    l2: float = 0.0
    intercept: bool = True
    hessian_batch_size: int | None = None


def train(
    X: Floats,
    y: Floats,
    optimiser: Optimiser,
    *,
    loss: Loss = TAYLOR,
    weight: Floats | None = None,
    on_epoch: Callable[[FittedWeights], None] | None = None,
    watched: Mapping[str, tuple[Floats, Floats]] | None = None,
    patience: int | None = None,
) -> FittedWeights:
    """Train by mini-batches on prepared columns X (n_rows, n_columns), labels y of -1 or +1 and weights of rows.

    Weights (n_rows,) are scaled to mean 1. `on_epoch` gets the state after every epoch; its losses are without the
    penalty. `watched` are prepared columns and labels of eval sets, by name: with `patience` training ends, too, when
    the last set's loss has not fallen for so many epochs, and the weights are those of its lowest. Raises DataError
    when training diverges although the learning rate was lowered.
    """
    memory, period = optimiser.memory, optimiser.period
    batches = partition(len(y), optimiser.batch_size, optimiser.seed)
    scaled = None if weight is None else weight / weight.mean()
    slice_ = Slice(X.shape[1], memory=memory, period=period, l2=optimiser.l2, intercept=optimiser.intercept)
    coordinator = Coordinator(memory=memory, learning_rate=optimiser.learning_rate)
    schedule = Schedule(optimiser.learning_rate, optimiser.tol, optimiser.max_iter)
    evals = EvalLosses({name: [] for name in watched or {}}, patience)
    best = None
    with np.errstate(over="ignore", invalid="ignore"):  # a loss that is not finite ends the training
        while not (schedule.finished or evals.over):
            of_batches = []
            for at, rows in enumerate(batches):
                x, of_rows, own = X[rows], y[rows], 1.0 if scaled is None else scaled[rows]
                u = x @ slice_.weights
                of_batches.append(float(np.mean(own * loss.values(u, of_rows))))
                grad = mean_over_rows(x, own * loss.residuals(u, of_rows))
                s = slice_.candidate()
                v = None
                if s is not None:
                    rows = np.concatenate(curvature_rows(batches, at, optimiser.hessian_batch_size or len(rows)))
                    x, own = X[rows], 1.0 if scaled is None else scaled[rows]
                    v = mean_over_rows(x, own * loss.curvatures(x @ slice_.weights, x @ s))
                slice_.step(coordinator.decide(slice_.products(grad, v)))
            for name, (x, of_rows) in (watched or {}).items():
                evals.losses[name].append(float(np.mean(loss.values(x @ slice_.weights, of_rows))))
            if evals.best:
                best = slice_.weights.copy()
            back = schedule.end_epoch(float(np.mean(of_batches)))
            slice_.end_epoch(back=back)
            coordinator.end_epoch(schedule.learning_rate, back=back)
            if on_epoch is not None:
                on_epoch(FittedWeights(slice_.weights, schedule.losses, evals.losses))
    weights = slice_.weights if best is None else best
    return FittedWeights(weights, schedule.losses, evals.losses, evals.over)


# -------- regression on the whole table in one place: Newton's method to the optimum, and the weights' standard errors
#
# What federated training on the whole table is compared with; it gets there by other steps.

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
