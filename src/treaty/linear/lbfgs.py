"""Stochastic L-BFGS on inner products alone, so that no one needs to hold whole vectors.

Weights, gradients, steps and correction pairs are cut into slices of columns. The owner of a slice keeps a `Slice`; a
`Coordinator` sees nothing but inner products summed over all slices, and answers with the coefficients of the step in
the vectors that all owners have slices of. Trained in one place, one slice and one coordinator do the same. In each
iteration k = 1, 2, ... every owner does::

    s = slice_.candidate()                    # None except every `period` iterations
    products = slice_.products(grad, v)       # v: own slice of the Hessian's product with s, see `curvature_rows`
    decision = coordinator.decide(products)   # of the sum over owners
    slice_.step(decision)

and after every epoch, when the label holder's `treaty.linear.training.Schedule` has taken in its loss::

    slice_.end_epoch(back=back)
    coordinator.end_epoch(learning_rate, back=back)

`memory=0` is plain stochastic gradient descent, with the same cap on steps.

With the vectors in the order s_1 ... s_m, v_1 ... v_m, g (pairs oldest first), `products` are the upper triangle of
their Gram matrix, row by row, and there is one coefficient for each vector; a candidate pair comes after the m kept.

References
----------
Byrd, Hansen, Nocedal, Singer, "A Stochastic Quasi-Newton Method for Large-Scale Optimization", SIAM J. Optim. 26(2),
2016; Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NeurIPS 2014, on the two loops in inner products; Yang et
al. 2019 (arXiv 1912.00513), corrected, see docs/logistic.md.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from treaty.errors import DataError
from treaty.machine.arrays import Floats

LEAST_CURVATURE = 1e-8  # of v^T s, per ||s||^2: a pair with less is left out
LEAST_AGREED = 1e-2  # as `subspace_step` takes it where no function is quadratic: less is told apart by its bend alone
LEAST_PRODUCT = 2.0**-52  # of s and v, with themselves and each other: parties' sums are multiples of 2^-64
LONGEST_STEP = 10.0  # times the median of the steps before
STEPS_REMEMBERED = 20


@dataclass(frozen=True, slots=True)
class Decision:
    """A coordinator's answer.

    The step is p = sum of coefficient times vector, float64 (2 m + 1,), and weights become w - p. `keep` says whether
    to keep the candidate pair, if there was one; it counts from the next iteration on.
    """

    coefficients: Floats
    keep: bool


@dataclass(frozen=True, slots=True)
class SliceState:
    """What an owner of columns goes on from between two epochs: its slices, oldest first, float64 (n_columns,) each."""

    iteration: int
    weights: Floats
    starts: list[Floats]
    steps: list[Floats]
    s: list[Floats]
    v: list[Floats]


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """What a coordinator goes on from between two epochs."""

    learning_rate: float
    pairs: int
    norms: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """What a party of a training continues from after so many epochs.

    Owners of columns have a slice, who decides steps a coordinator, the label holder the losses and their level.
    """

    epochs: int
    learning_rate: float
    slice: SliceState | None = None
    coordinator: CoordinatorState | None = None
    iterations: int = 0
    """At a coordinator apart: steps since training began, or was set back to its beginning."""
    losses: list[float] = field(default_factory=list)
    level: float = math.inf
    eval_losses: dict[str, list[float]] = field(default_factory=dict)
    best: Floats | None = None
    """Own weights (n_columns,) after the epoch that was best by eval rows, where that decides about the end."""


class Slice:
    """The state of the owner of some columns: its slices of weights, pairs and steps.

    At most `memory` pairs (M) are kept, made every `period` (L) iterations. l2/2 ||w||^2 is added here, to gradients
    and Hessian products, except for the last column where that is the `intercept`. `weights` (n_columns,) start at 0;
    a column whose gradient is 0 keeps weight 0.
    """

    def __init__(self, n_columns: int, *, memory: int, period: int, l2: float = 0.0, intercept: bool = False) -> None:
        self.weights = np.zeros(n_columns)
        self._period = period
        self._memory = memory
        self._l2 = np.full(n_columns, l2)
        if intercept:
            self._l2[-1] = 0.0
        self._starts: deque[Floats] = deque([self.weights], maxlen=2)
        self._iteration = 1
        self._steps: deque[Floats] = deque(maxlen=2 * period - 1)
        self._s: deque[Floats] = deque(maxlen=memory)
        self._v: deque[Floats] = deque(maxlen=memory)
        self._vectors: list[Floats] = []
        self._candidate: tuple[Floats, Floats] | None = None

    def candidate(self) -> Floats | None:
        """Return the s of this iteration's pair (n_columns,), or None when it makes no pair.

        At k = 2L, 3L, ... it is the mean of the last L iterates less the mean of the L before, made of steps alone:
        s = -(1/L) sum over j = k-2L+1 ... k-1 of (L - |j - (k-L)|) p_j.
        """
        length = self._period
        if self._memory == 0 or self._iteration % length or self._iteration < 2 * length:
            return None
        factors = length - np.abs(np.arange(1 - length, length))
        s: Floats = -(factors / length) @ np.array(self._steps)
        return s

    def products(self, grad: Floats, curvature: Floats | None = None) -> Floats:
        """Return this slice's part of all inner products, ((2m + 1) (2m + 2) / 2,), to be summed over owners.

        `grad` is the batch's mean gradient, `curvature` the Hessian's product with the candidate, where there is one,
        both without l2. With a candidate, m counts its pair too.
        """
        s = self.candidate()
        assert (s is None) == (curvature is None), "a curvature goes with a candidate"
        self._candidate = None if s is None or curvature is None else (s, curvature + self._l2 * s)
        gradient = grad + self._l2 * self.weights
        pairs = list(zip(self._s, self._v, strict=True))
        self._vectors = [*self._s, *self._v, gradient]
        if self._candidate is not None:
            pairs.append(self._candidate)
        whole = np.array([*(s for s, _ in pairs), *(v for _, v in pairs), gradient])
        gram: Floats = whole @ whole.T
        return gram[np.triu_indices(len(gram))]

    def step(self, decision: Decision) -> None:
        """Take the step decided on, and keep or drop the candidate."""
        step = decision.coefficients @ np.array(self._vectors)
        self.weights = self.weights - step
        self._steps.append(step)
        if decision.keep and self._candidate is not None:
            self._s.append(self._candidate[0])
            self._v.append(self._candidate[1])
        self._iteration += 1

    def end_epoch(self, *, back: bool) -> None:
        """Go on to the next epoch; with `back`, from where the one before the last began, and without pairs.

        Steps that made the loss rise are forgotten, and so are the pairs that may have led to them.
        """
        if back:
            self.weights = self._starts[0]
            self._starts.clear()
            self._iteration = 1
            for kept in (self._steps, self._s, self._v):
                kept.clear()
        self._starts.append(self.weights)

    def state(self) -> SliceState:
        """Return what to go on from after this epoch; later steps do not change it."""
        kept = (list(of) for of in (self._starts, self._steps, self._s, self._v))
        return SliceState(self._iteration, self.weights, *kept)

    def resume(self, after: EpochState) -> None:
        """Continue from where a slice with the same settings was."""
        state = after.slice
        assert state is not None
        self._iteration, self.weights = state.iteration, state.weights
        for kept, found in (
            (self._starts, state.starts), (self._steps, state.steps), (self._s, state.s), (self._v, state.v)
        ):  # fmt: skip
            kept.clear()
            kept.extend(found)


class Coordinator:
    """Decides steps from summed inner products; `memory` as in the slices.

    With `whole_table` pairs are of one function alone, not of batches, see `subspace_step`; `quadratic` if that is so.
    """

    def __init__(self, *, memory: int, learning_rate: float, whole_table: bool = False, quadratic: bool = True) -> None:
        self._learning_rate = learning_rate
        self._whole_table = whole_table
        self._least = LEAST_CURVATURE if quadratic else LEAST_AGREED
        self._memory = memory
        self._pairs = 0
        self._norms: deque[float] = deque(maxlen=STEPS_REMEMBERED)

    @property
    def expected(self) -> tuple[int, int]:
        """How many products `decide` takes, without and with a candidate pair."""
        sizes = (2 * self._pairs + 1, 2 * self._pairs + 3)
        return sizes[0] * (sizes[0] + 1) // 2, sizes[1] * (sizes[1] + 1) // 2

    def decide(self, products: Floats) -> Decision:
        """Return the step for these inner products, summed over all slices; see `Slice.products`.

        Raises DataError when they are not finite: training has diverged.
        """
        if not np.all(np.isfinite(products)):
            raise DataError("training diverged: inner products of steps are not finite; lower learning_rate")
        m = self._pairs
        assert len(products) in self.expected
        paired = len(products) == self.expected[1]
        size = 2 * (m + paired) + 1
        gram = np.zeros((size, size))
        gram[np.triu_indices(size)] = products
        gram += np.triu(gram, 1).T
        keep = False
        if paired:
            s, v = m, 2 * m + 1
            curved = gram[s, v] >= LEAST_CURVATURE * gram[s, s]
            keep = bool(curved and min(gram[s, s], gram[s, v], gram[v, v]) >= LEAST_PRODUCT)
            kept = np.delete(np.arange(size), (s, v))
            gram = gram[np.ix_(kept, kept)]
        rate = self._learning_rate
        coefficients = subspace_step(gram, rate, self._least) if self._whole_table else rate * two_loops(gram)
        norm = math.sqrt(max(float(coefficients @ gram @ coefficients), 0.0))
        longest = LONGEST_STEP * float(np.median(self._norms)) if self._norms else 0.0
        if 0.0 < longest < norm:
            coefficients *= longest / norm
            norm = longest
        self._norms.append(norm)
        self._pairs = min(m + keep, self._memory)
        return Decision(coefficients, keep)

    def end_epoch(self, learning_rate: float, *, back: bool) -> None:
        """Go on to the next epoch with this learning rate; `back` as in `Slice.end_epoch`."""
        self._learning_rate = learning_rate
        if back:
            self._pairs = 0
            self._norms.clear()

    def state(self) -> CoordinatorState:
        """Return what to go on from after this epoch."""
        return CoordinatorState(self._learning_rate, self._pairs, list(self._norms))

    def resume(self, after: EpochState) -> None:
        """Continue from where a coordinator with the same settings was."""
        state = after.coordinator
        assert state is not None
        self._learning_rate, self._pairs = state.learning_rate, state.pairs
        self._norms = deque(state.norms, maxlen=STEPS_REMEMBERED)


def two_loops(gram: Floats) -> Floats:
    """Return the coefficients of H g (2 m + 1,), H being the L-BFGS matrix of the pairs.

    `gram` has the inner products of s_1 ... s_m, v_1 ... v_m, g; every s_i^T v_i is above 0.
    """
    m = len(gram) // 2
    rho = [1.0 / gram[i, m + i] for i in range(m)]
    coefficients = np.zeros(len(gram))
    coefficients[-1] = 1.0
    alpha = np.zeros(m)
    for i in reversed(range(m)):  # newest first
        alpha[i] = rho[i] * (gram[i] @ coefficients)
        coefficients[m + i] -= alpha[i]
    if m:
        coefficients *= gram[m - 1, 2 * m - 1] / gram[2 * m - 1, 2 * m - 1]
    for i in range(m):
        beta = rho[i] * (gram[m + i] @ coefficients)
        coefficients[i] += alpha[i] - beta
    return coefficients


def subspace_step(gram: Floats, learning_rate: float, least: float) -> Floats:
    """Return the coefficients (2 m + 1,) of a step to the optimum along s_1 ... s_m, and of descent across these.

    Along the steps so far, of which v_i = F s_i is known, a quadratic function's optimum is at -S a with
    S^T V a = S^T g. What is left of the gradient there, g - V a, gives a new direction. So all directions that matter
    are found one by one, as by conjugate gradients, and none is searched along. `gram` is as for `two_loops`.
    Directions whose curvature, of unit curvature along each s, is below `least` are left out.
    """
    m = len(gram) // 2
    coefficients = np.zeros(len(gram))
    coefficients[-1] = learning_rate
    if m:
        scale = 1.0 / np.sqrt(np.diag(gram[:m, m : 2 * m]))
        curvatures = gram[:m, m : 2 * m] * np.outer(scale, scale)
        values, vectors = np.linalg.eigh((curvatures + curvatures.T) / 2.0)
        known = values > least
        a = scale * ((vectors[:, known] / values[known]) @ (vectors[:, known].T @ (scale * gram[:m, -1])))
        # no further than the newest pair's curvature allows
        coefficients[-1] = min(learning_rate, gram[m - 1, 2 * m - 1] / gram[2 * m - 1, 2 * m - 1])
        coefficients[:m] = a
        coefficients[m : 2 * m] = -coefficients[-1] * a
    return coefficients
