"""Training on one matrix: by mini-batches, or on all rows to the optimum; federated protocols are compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from treaty.errors import DataError
from treaty.linear.lbfgs import Coordinator, EpochState, Slice, curvature_rows, partition
from treaty.linear.preparation import TAYLOR, TOO_FEW_ROWS, Loss, determined, uncorrelated, with_sums
from treaty.machine.arrays import Floats

# An epoch is undone if its loss is more than a tenth above the last accepted one
LARGEST_RISE = 0.1
# Of a step that makes the loss rise
HALVINGS = 30


@dataclass(slots=True)
class Schedule:
    """The label holder's decisions after every epoch, from the mean losses of its batches and of eval sets.

    After k epochs the learning rate is the first one divided by 1 + `decay` k. It is halved after an epoch whose loss
    has risen by more than a tenth, which is then undone. Training ends after `max_iter` epochs, when the losses of two
    differ by less than `tol`, or when the last eval set's loss has not fallen for `patience` epochs. `losses` has each
    epoch's mean over batches, each at the weights it was computed with; `level` is the last accepted one.
    """

    learning_rate: float
    tol: float
    max_iter: int
    eval_losses: dict[str, list[float]] = field(default_factory=dict)
    patience: int | None = None
    decay: float = 0.0
    losses: list[float] = field(default_factory=list)
    level: float = math.inf

    finished: bool = False
    # Whether training ended, or would, before `max_iter`; always if `tol` is 0
    settled: bool = False
    # Whether the last epoch has the lowest loss of the last eval set so far, if that can end training
    best: bool = False

    def end_epoch(self, loss: float) -> bool:
        """Take an epoch's loss (finite, else DataError), once eval sets have theirs; return whether to undo it."""
        if not math.isfinite(loss):
            raise DataError(
                f"training diverged: the loss of epoch {len(self.losses) + 1} is {loss}; lower learning_rate"
            )
        rose = bool(self.losses) and loss > (1.0 + LARGEST_RISE) * self.level
        if rose:
            self.learning_rate /= 2.0
        else:
            self.level = loss
        self.learning_rate *= (1.0 + self.decay * len(self.losses)) / (1.0 + self.decay * (len(self.losses) + 1))
        self.add(loss)
        return rose

    def add(self, loss: float) -> None:
        """Add a loss, and decide from it and the last eval set's losses whether training ends."""
        self.losses.append(loss)
        ends = len(self.losses) > 1 and abs(loss - self.losses[-2]) < self.tol
        if self.patience is not None and self.eval_losses:
            *_, deciding = self.eval_losses.values()
            self.best = deciding[-1] < min(deciding[:-1], default=math.inf)
            ends = ends or len(deciding) - 1 - int(np.argmin(deciding)) >= self.patience
        self.settled = self.tol == 0.0 or ends
        self.finished = ends or len(self.losses) >= self.max_iter

    def resume(self, state: EpochState) -> None:
        self.learning_rate, self.losses, self.level = state.learning_rate, list(state.losses), state.level
        self.eval_losses.update({name: list(losses) for name, losses in state.eval_losses.items()})


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """Weights (n_columns,), the loss of every epoch, and `Schedule.settled`."""

    weights: Floats
    losses: list[float]
    eval_losses: dict[str, list[float]] = field(default_factory=dict)
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """How weights are found.

    `memory` pairs are made every `period` steps (`treaty.linear.lbfgs`); no memory is gradient descent. The next three
    and `decay` are those of `Schedule`. The penalty is l2/2 ||w||^2, without the intercept's weight. A pair's Hessian
    product is over `hessian_batch_size` rows, see `curvature_rows`; None: over the batch.
    """

    memory: int
    period: int
    learning_rate: float
    tol: float
    max_iter: int
    decay: float = 0.0
    l2: float = 0.0
    hessian_batch_size: int | None = None

    def schedule(self, eval_sets: Iterable[str] = (), patience: int | None = None) -> Schedule:
        losses: dict[str, list[float]] = {name: [] for name in eval_sets}
        return Schedule(self.learning_rate, self.tol, self.max_iter, losses, patience, self.decay)

    def slice(self, n_columns: int, *, intercept: bool) -> Slice:
        """Return the weights of `n_columns` columns, all 0; with `intercept` the last has no penalty."""
        return Slice(n_columns, memory=self.memory, period=self.period, l2=self.l2, intercept=intercept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimiser(Solver):
    """How `train` finds weights: in the batches of `partition`, with or without an `intercept` in the last column."""

    batch_size: int
    seed: bytes
    intercept: bool = True


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
    penalty. `watched` are prepared columns and labels of eval sets, by name; with `patience` the weights are those of
    the last set's lowest loss. Raises DataError when training diverges although the learning rate was lowered.
    """
    watched, size = watched or {}, optimiser.hessian_batch_size
    batches = partition(len(y), optimiser.batch_size, optimiser.seed)
    scaled = None if weight is None else weight / weight.mean()
    slice_, schedule = optimiser.slice(X.shape[1], intercept=optimiser.intercept), optimiser.schedule(watched, patience)
    coordinator = Coordinator(memory=optimiser.memory, learning_rate=optimiser.learning_rate)
    best = None
    # a loss that is not finite ends the training
    with np.errstate(over="ignore", invalid="ignore"):
        while not schedule.finished:
            of_batches = []
            for at, rows in enumerate(batches):
                x, of_rows, own = X[rows], y[rows], 1.0 if scaled is None else scaled[rows]
                u = x @ slice_.weights
                of_batches.append(float(np.mean(own * loss.values(u, of_rows))))
                grad = x.T @ (own * loss.residuals(u, of_rows)) / len(x)
                s, v = slice_.candidate(), None
                if s is not None:
                    rows = np.concatenate(curvature_rows(batches, at, size or len(rows)))
                    x, own = X[rows], 1.0 if scaled is None else scaled[rows]
                    v = x.T @ (own * loss.curvatures(x @ slice_.weights, x @ s)) / len(x)
                slice_.step(coordinator.decide(slice_.products(grad, v)))
            for name, (x, of_rows) in watched.items():
                schedule.eval_losses[name].append(float(np.mean(loss.values(x @ slice_.weights, of_rows))))
            back = schedule.end_epoch(float(np.mean(of_batches)))
            if schedule.best:
                best = slice_.weights.copy()
            slice_.end_epoch(back=back)
            coordinator.end_epoch(schedule.learning_rate, back=back)
            if on_epoch is not None:
                on_epoch(FittedWeights(slice_.weights, schedule.losses, schedule.eval_losses))
    weights = slice_.weights if best is None else best
    return FittedWeights(weights, schedule.losses, schedule.eval_losses, schedule.settled)


def minimise(
    X: Floats, y: Floats, loss: Loss, *, l2: float, tol: float, max_iter: int, weight: Floats | None = None,
    watched: Mapping[str, tuple[Floats, Floats]] | None = None, patience: int | None = None,
) -> FittedWeights:  # fmt: skip
    """Minimise the mean loss of columns X (n_rows, n_columns) by Newton's method; the last is the intercept's.

    Weights of rows are scaled to mean 1; l2 leaves the intercept alone. Training ends when the losses of two steps
    differ by less than `tol`; columns that depend on each other linearly get the shortest weights. `watched` and
    `patience` are as for `train`.
    """
    watched, own = watched or {}, np.ones(len(y)) if weight is None else weight / weight.mean()
    penalty = np.append(np.full(X.shape[1] - 1, l2), 0.0)
    schedule = Schedule(1.0, tol, max_iter, {name: [] for name in watched}, patience)
    w = best = np.zeros(X.shape[1])

    def value(w: Floats) -> float:
        return float(np.mean(own * loss.values(X @ w, y)))

    while True:
        for name, (columns, labels) in watched.items():
            schedule.eval_losses[name].append(float(np.mean(loss.values(columns @ w, labels))))
        schedule.add(value(w))
        best = w if schedule.best or patience is None else best
        if schedule.finished:
            return FittedWeights(best, schedule.losses, schedule.eval_losses, schedule.settled)
        u = X @ w
        gradient = X.T @ (own * loss.residuals(u, y)) / len(X) + penalty * w
        local = uncorrelated(_hessian(X, u, own, loss) + np.diag(penalty))
        step = local @ (local.T @ gradient)
        # halved until the penalised loss does not rise
        most = schedule.losses[-1] + 0.5 * penalty @ w**2
        for _ in range(HALVINGS):
            if value(w - step) + 0.5 * penalty @ (w - step) ** 2 <= most:
                break
            step /= 2.0
        w = w - step


def standard_errors(
    X: Floats, y: Floats, weights: Floats, loss: Loss, variance: float = 1.0, sums: Floats | None = None
) -> tuple[Floats, int]:
    """Return the weights' standard errors (n_columns,) and the residuals' degrees of freedom.

    After them come those of weighted `sums` of weights (n_sums, n_columns), if there are such. Of a quadratic loss they
    are those of least squares, with the residuals' variance, else from Fisher's information and `variance`. A column
    that is constant but for the intercept has NaN, and so has one whose weight the optimum does not determine.
    DataError where there are no more rows than independent columns.
    """
    u = X @ weights
    local, known, rank = determined(X, _hessian(X, u, np.ones(len(y)), loss))
    degrees = len(y) - rank
    if degrees < 1:
        raise DataError(TOO_FEW_ROWS.format(rows=len(y), columns=rank))
    if loss.least is not None:
        variance = 2.0 * float(np.mean(loss.values(u, y)) - loss.least) * len(y) / degrees
    if sums is not None:
        local, known = with_sums(local, known, sums)
    # the inverse Hessian is T T^T: its diagonal from the rows of T
    squares = np.einsum("ij,ij->i", local, local) * variance / len(y)
    return np.where(known, np.sqrt(squares), np.nan), degrees


def _hessian(X: Floats, u: Floats, own: Floats, loss: Loss) -> Floats:
    """Return the mean Hessian (n_columns, n_columns) at margins u, of rows that weigh `own`."""
    curvatures = own * loss.curvatures(u, np.ones(len(u)))
    hessian: Floats = X.T @ (X * curvatures[:, np.newaxis]) / len(u)
    return hessian
