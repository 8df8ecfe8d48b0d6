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

References: Byrd, Hansen, Nocedal, Singer, "A Stochastic Quasi-Newton Method for Large-Scale Optimization", SIAM J.
Optim. 26(2), 2016; Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NeurIPS 2014, on the two loops in inner
products; Yang et al. 2019 (arXiv 1912.00513), corrected, see docs/logistic.md.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import Floats, Integers

# Of v^T s, per ||s||^2: a pair with less is left out
LEAST_CURVATURE = 1e-8
# The same in `subspace_step` where the function is not quadratic, so that pairs of different steps disagree
LEAST_AGREED = 1e-2
# Of s and v, with themselves and each other: parties' sums are multiples of 2^-64
LEAST_PRODUCT = 2.0**-52
# Times the median of the steps before
LONGEST_STEP = 10.0
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
    """An owner's state between two epochs: its slices, oldest first, float64 (n_columns,) each."""

    iteration: int
    weights: Floats
    starts: list[Floats]
    steps: list[Floats]
    s: list[Floats]
    v: list[Floats]


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """A coordinator's state between two epochs."""

    learning_rate: float
    pairs: int
    norms: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """A party's state after so many epochs, from which it can resume.

    Owners of columns have a slice, the party that decides steps a coordinator, the label holder losses and their level.
    """

    epochs: int
    learning_rate: float
    slice: SliceState | None = None
    coordinator: CoordinatorState | None = None
    # At a coordinator without data: steps since training began, or was set back to its beginning
    iterations: int = 0
    losses: list[float] = field(default_factory=list)
    level: float = math.inf
    eval_losses: dict[str, list[float]] = field(default_factory=dict)
    # Own weights (n_columns,) after the epoch that was best on eval rows, if these can end training
    best: Floats | None = None


class Slice:
    """The state of the owner of some columns: its slices of weights, pairs and steps.

    At most `memory` pairs (M) are kept, made every `period` (L) iterations. The penalty l2/2 ||w||^2 is added here, to
    gradients and Hessian products, but not of the `intercept`, the last column. `weights` (n_columns,) start at 0.
    """

    def __init__(self, n_columns: int, *, memory: int, period: int, l2: float = 0.0, intercept: bool = False) -> None:
        self.weights = np.zeros(n_columns)
        self._memory, self._period = memory, period
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

        `grad` is the batch's mean gradient, `curvature` the Hessian's product with the candidate, if there is one; m
        counts its pair as well. Both are without l2.
        """
        s = self.candidate()
        assert (s is None) == (curvature is None), "a curvature goes with a candidate"
        self._candidate = None if s is None or curvature is None else (s, curvature + self._l2 * s)
        gradient = grad + self._l2 * self.weights
        pairs = list(zip(self._s, self._v, strict=True))
        # the step is along the kept vectors alone: a candidate counts from the next one on
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
        """Begin the next epoch; with `back`, from where the one before the last began, and without pairs."""
        # the steps made the loss rise, and the pairs may have led to them
        if back:
            self.weights = self._starts[0]
            self._starts.clear()
            self._iteration = 1
            for kept in (self._steps, self._s, self._v):
                kept.clear()
        self._starts.append(self.weights)

    def state(self) -> SliceState:
        kept = (list(of) for of in (self._starts, self._steps, self._s, self._v))
        return SliceState(self._iteration, self.weights, *kept)

    def resume(self, after: EpochState) -> None:
        """Restore the state of a slice with the same settings."""
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

    With `whole_table` all pairs are of one function, see `subspace_step`, which may be `quadratic`.
    """

    def __init__(self, *, memory: int, learning_rate: float, whole_table: bool = False, quadratic: bool = True) -> None:
        self._memory, self._learning_rate, self._whole_table = memory, learning_rate, whole_table
        self._least = LEAST_CURVATURE if quadratic else LEAST_AGREED
        self._pairs = 0
        self._norms: deque[float] = deque(maxlen=STEPS_REMEMBERED)

    @property
    def expected(self) -> tuple[int, int]:
        """How many products `decide` takes, without and with a candidate pair."""
        sizes = (2 * self._pairs + 1, 2 * self._pairs + 3)
        return sizes[0] * (sizes[0] + 1) // 2, sizes[1] * (sizes[1] + 1) // 2

    def decide(self, products: Floats) -> Decision:
        """Return the step for the inner products of `Slice.products`, summed over all slices.

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
        # this step is taken without the candidate's rows and columns
        if paired:
            s, v = m, 2 * m + 1
            curved = gram[s, v] >= LEAST_CURVATURE * gram[s, s]
            keep = bool(curved and min(gram[s, s], gram[s, v], gram[v, v]) >= LEAST_PRODUCT)
            kept = np.delete(np.arange(size), (s, v))
            gram = gram[np.ix_(kept, kept)]
        rate = self._learning_rate
        coefficients = subspace_step(gram, rate, self._least) if self._whole_table else rate * two_loops(gram)
        # the step's length follows from the Gram matrix; one much longer than before is cut
        norm = math.sqrt(max(float(coefficients @ gram @ coefficients), 0.0))
        longest = LONGEST_STEP * float(np.median(self._norms)) if self._norms else 0.0
        if 0.0 < longest < norm:
            coefficients *= longest / norm
            norm = longest
        self._norms.append(norm)
        self._pairs = min(m + keep, self._memory)
        return Decision(coefficients, keep)

    def end_epoch(self, learning_rate: float, *, back: bool) -> None:
        """Begin the next epoch with this learning rate; `back` as in `Slice.end_epoch`."""
        self._learning_rate = learning_rate
        if back:
            self._pairs = 0
            self._norms.clear()

    def state(self) -> CoordinatorState:
        return CoordinatorState(self._learning_rate, self._pairs, list(self._norms))

    def resume(self, after: EpochState) -> None:
        """Restore the state of a coordinator with the same settings."""
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
    # down from the newest pair, scaled by its curvature, and up from the oldest
    for i in reversed(range(m)):
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
    S^T V a = S^T g. The gradient left there, g - V a, gives a new direction, as in conjugate gradients. `gram` is as
    for `two_loops`. Directions whose curvature is below `least`, with unit curvature along each s, are left out.
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


SEED_BYTES = 32
# With fewer rows of a batch per column, a party comes near the residuals by linear algebra
ROWS_PER_COLUMN = 10
# With fewer rows per column, labels (-1 or 1, in exact sums) are found as a short vector of a lattice
ROWS_PER_COLUMN_OF_SMALL_BATCHES = 40
# Leverage above which a row counts as dominating the gradient of its batch; see `rows_alone`
ALONE = 1.0 / 3.0
# Known reduction algorithms fail on a lattice of this many dimensions, one for each row
MANY_ROWS = 300


def batch_seed(random_state: int | None) -> bytes:
    """Return a seed (32 bytes) for batches: from this number, or from the system's generator for None."""
    if random_state is None:
        return secrets.token_bytes(SEED_BYTES)
    return hashlib.sha256(b"treaty batches" + random_state.to_bytes(16, "little")).digest()


def partition(n_rows: int, batch_size: int, seed: bytes) -> Integers:
    """Cut rows into batches, int64 (n_batches, batch_size), once per training; an incomplete last one is dropped.

    Rows and batches have the same order in all epochs: fresh batches would give a party new equations about the same
    labels, and chance in an epoch's loss could exceed the tolerance that ends training.
    """
    batch_size = min(batch_size, n_rows)
    n_batches = n_rows // batch_size
    # SHAKE-256, so that all parties draw the same on any machine
    numbers = np.frombuffer(hashlib.shake_256(seed + b"rows").digest(8 * n_rows), "<u8")
    drawn = np.argsort(numbers, kind="stable").astype(np.int64)
    return drawn[: n_batches * batch_size].reshape(n_batches, batch_size)


def curvature_rows(batches: Integers, at: int, size: int) -> list[Integers]:
    """Return the rows of a Hessian's product in pieces of at most a batch, int64 (n_rows,) each.

    They are the first `size` rows of batch number `at`; if `size` is several batches, also the batches that follow.
    """
    n_batches, batch_size = batches.shape
    if size <= batch_size:
        return [batches[at, :size]]
    return [batches[(at + k) % n_batches] for k in range(min(size // batch_size, n_batches))]


def fewest_rows(n_columns: int, *, of_labels: bool) -> int:
    """Return the rows a batch must have so that the gradients of `n_columns` columns hide the rows they are sums of.

    The columns, one per category, belong to all parties who may combine their gradients. A batch needs 10 rows for each
    column; if these parties have no labels (`of_labels`), also 40 for each column, or 300 if that is less.

    In the first batch w is 0, and a party has the exact integers X^T y. If y is -1 or 1 and X has 24 fractional bits,
    y is a very short vector of a lattice with one dimension per row. Reduction (LLL, then BKZ) found all labels of 40
    rows and 4 columns at once, of 60 and 6 in a second, of 100 and 10 in minutes, and nothing in a minute at 20 to 30
    rows for each column. Reduction weakens with the dimension; from 300 rows on, ten rows for each column are assumed
    to suffice. This is a heuristic from these trials, not a proof.
    """
    if not of_labels:
        return ROWS_PER_COLUMN * n_columns
    return max(ROWS_PER_COLUMN * n_columns, min(ROWS_PER_COLUMN_OF_SMALL_BATCHES * n_columns, MANY_ROWS))


def check_batch_size(batch_size: int, n_columns: int, whose: str, *, n_rows: int, of_labels: bool) -> None:
    """Raise ConfigError for batches so small that gradients can be solved for rows' residuals; see `fewest_rows`.

    If gradients are of labels, none of the columns is the intercept, else one is. `whose` names the columns' owners.
    After Tan et al., "Residue-based Label Protection Mechanisms in Vertical Logistic Regression", 2022 (arXiv
    2205.04166).
    """
    least = fewest_rows(n_columns, of_labels=of_labels)
    if batch_size < least:
        own = n_columns if of_labels else n_columns - 1
        columns = f"the column of {whose}" if own == 1 else f"the {own} columns of {whose} (one per category)"
        if not of_labels:
            columns = f"{columns} and the intercept" if own else f"the intercept of {whose}"
        remedy = "raise batch_size" if least <= n_rows else f"the table has only {n_rows} rows: bring more"
        raise ConfigError(
            f"expected batches of at least {least} rows for {columns}, got {batch_size}: from smaller ones "
            f"{'labels' if of_labels else 'margins'} can be solved for; {remedy}{' or fewer columns' if own else ''}"
        )


def check_hessian_batch_size(size: int, n_columns: int) -> None:
    """Raise ConfigError for Hessian products over so few rows that the steps' part of margins can be solved for.

    `n_columns` are the columns of all parties who may combine their products.
    """
    least = ROWS_PER_COLUMN * n_columns
    if size < least:
        raise ConfigError(
            f"expected hessian_batch_size of at least {least} rows for {n_columns} columns, got {size}: from products "
            "over fewer the rows' part of a step can be solved for; raise hessian_batch_size or leave it out"
        )


def rows_alone(X: Floats) -> int:
    """Count the rows of a batch that dominate its gradient; X (rows, n_columns) is one party's prepared columns.

    These are the rows whose leverage, the diagonal of A (A^T A)^+ A^T for A = [X, 1], exceeds a third.
    """
    # from the gradient follows A (A^T A)^+ A^T d, in which d_i of such a row has this weight and all others together
    # hardly more
    A = np.hstack([X, np.ones((len(X), 1))])
    values, vectors = np.linalg.eigh(A.T @ A)
    # constant columns and complete sets of categories add no dimension
    spanned = values > 1e-9 * values[-1]
    half = A @ (vectors[:, spanned] / np.sqrt(values[spanned]))
    return int(np.count_nonzero(np.einsum("ij,ij->i", half, half) > ALONE))
