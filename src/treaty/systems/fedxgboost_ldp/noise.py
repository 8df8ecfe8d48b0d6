"""Noise on a tree's gradients, at the active party of FedXGBoost-LDP: drawn once, paid for before it is used."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import BudgetSpent, ConfigError
from treaty.machine.arrays import Flags, Int32s, Integers, pieces
from treaty.machine.kernels import kernel
from treaty.machine.shared_work import share
from treaty.privacy.ledger import Entry, Ledger, cost, model_job
from treaty.privacy.mechanisms import ON_GRID, STEPS, clip_to_steps, keystream, largest, to_sent
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.systems.vertical.encrypted_columns import Int32, Int64
from treaty.trees.columns import SumsFinder
from treaty.trees.growth import NoMoreTrees
from treaty.trees.objectives import Objective
from treaty.trees.splits import SplitRules

# ----------------------------------------------------------------
# Splits chosen by scores: each owner of columns reports its best gain per node, and only the winner reveals its
# split.
#
# `ScoresFinder` is a split finder whose three steps are apart: scores of a level, decisions at the chosen splits,
# division of the rows. Each party runs it over its own columns, between messages; the one that grows the tree also has
# the others' scores.


@dataclass(frozen=True, slots=True)
class TreeGradients:
    """What a tree is grown on: `grad` and `hess` for scores, the counted ones for nodes' totals and so leaf weights.

    All are int64 (n_rows,).
    """

    grad: Integers
    hess: Integers
    counted_grad: Integers
    counted_hess: Integers

    def totals(self, rows: Int32s | None) -> Integers:
        """Return the root's totals (3,) over sampled rows (None: all)."""
        counted = slice(None) if rows is None else rows
        n_rows = len(self.grad) if rows is None else len(rows)
        return np.array([self.counted_grad[counted].sum(), self.counted_hess[counted].sum(), n_rows])


class ScoresFinder(SumsFinder):
    """A split finder in steps; `rules` are those of scores (`noise.scoring_rules`).

    The first-order score of Le et al. 2021, -G_L G_R / reg_lambda, is half the gain under a `hess_unit` of 0.
    """

    def start(self, gradients: TreeGradients, rows: Int32s | None, columns: Int32s) -> None:
        """Begin a tree on sampled rows (None: all) and columns."""
        self.begin_tree(gradients.grad, gradients.hess, rows, columns)
        self._counted = gradients.counted_grad, gradients.counted_hess

    def n_rows_of(self, nodes: Int32s) -> int:
        """Return the number of the table's rows in these nodes together."""
        return len(self._rows.rows(nodes, sampled=False)[0])

    def count_left(self, nodes: Int32s, left: Flags) -> Integers:
        """Return the number of sampled rows of each node that go left; `left` is as in `left_totals`."""
        starts = self._rows.rows(nodes, sampled=False)[1][:-1]
        stops = starts + np.diff(self._rows.rows(nodes, sampled=True)[1])
        return np.array([np.count_nonzero(left[a:b]) for a, b in zip(starts, stops, strict=True)], np.int64)

    def left_totals(self, nodes: Int32s, left: Flags, wanted: NDArray[np.intp]) -> Integers:
        """Return totals int64 (n_wanted, 3) of left children of ``nodes[wanted]``; `left` is that of all `nodes`."""
        rows, starts = self._rows.rows(nodes, sampled=False)
        sampled = np.diff(self._rows.rows(nodes, sampled=True)[1])
        totals = np.zeros((len(wanted), 3), np.int64)
        _add_left(*self._counted, rows, starts, sampled, left, wanted, totals)
        return totals

    def apply(self, nodes: Int32s, children: Int32s, left: Flags) -> None:
        """Divide the rows of nodes, as `RowPartition.divide` does."""
        self._rows.divide(nodes, children, left)


@kernel
def _add_left(grad: Any, hess: Any, rows: Any, starts: Any, sampled: Any, left: Any, wanted: Any, totals: Any) -> None:
    """Sum up the rows going left of the first ``sampled[k]`` of ``rows[starts[k]:starts[k + 1]]`` of wanted nodes k."""
    for position in range(wanted.shape[0]):
        node = wanted[position]
        total_grad, total_hess, count = np.int64(0), np.int64(0), np.int64(0)
        for i in range(np.uint64(starts[node]), np.uint64(starts[node] + sampled[node])):
            row, goes = np.uint64(rows[i]), np.int64(left[i])  # no branch: half would be mispredicted
            total_grad += grad[row] * goes
            total_hess += hess[row] * goes
            count += goes
        totals[position, 0], totals[position, 1], totals[position, 2] = total_grad, total_hess, count


# ---------------------------------------------------------------- noise


MOST_SUM = 2**62
SENT_STEPS = 1 << 12
"""Steps from 0 to 1 of what is sent: far below the noise, and histograms sum more rows of short numbers at a time."""
_BLOCK = 1 << 14  # rows that get noise at a time; another size changes the noise, see `SAMPLER`
SAMPLER = 2  # version of the noise that a key gives; raise it with every change, so that a new release is paid for


class NoisyGradients:
    """Puts noise on the gradients of one tree after another, and pays for it in the ledger.

    Noise is computed from the ledger's key: the same gradients of the same tree of a model get the same noise in a
    resumed training as in the interrupted one, and are paid for once. With mechanism "label_rr" nothing is done, for
    labels have their noise already; weights are refused then, for they would be sent as they are, as factors of
    gradients and hessians, and where they balance classes they are the labels.

    Hessians p (1 - p) of margins that are made of noisy gradients alone depend on no label: they stay exact, and all of
    epsilon goes to the gradients. That does not hold with weights, with losses whose hessians have labels in them, nor
    with leaf values made of true gradients (paper mode, where scores of the first order send no hessians): there
    gradients and hessians get half of epsilon each (`noisy_hess`).

    `spent` are the releases of this model, one for each tree, those before a resumption included; `stopped` says why
    there may be no further tree, and is empty as long as there may. Raises ConfigError when sums of so much noise do
    not fit 62 bits, an epsilon is too small, or rows with noisy labels have weights.
    """

    def __init__(
        self,
        ledger: Ledger,
        options: FedXGBoostLDP,
        objective: Objective,
        n_rows: int,
        *,
        weighted: bool,
        model_id: str,
        job: str,
        first_tree: int = 0,
        threads: int = 1,
    ) -> None:
        self.stopped, self._threads = "", threads
        self._ledger, self._options, self._objective = ledger, options, objective
        self._model_id, self._job, self._tree = model_id, model_job(job, model_id), first_tree
        self.mechanism, self.epsilon = options.noise_mechanism, options.noise_epsilon
        self._paper = options.mode == "paper"
        self._sent = STEPS if self._paper else SENT_STEPS  # exact sums are of the same unit there
        self.spent = [self._entry(f"tree {k} of {model_id}", k) for k in range(first_tree)]
        if weighted and not self._on_gradients:
            raise ConfigError(
                "mechanism='label_rr' sends gradients whose labels alone carry noise, so sample weights as they are: "
                "leave weights out, or take a mechanism that puts noise on gradients (piecewise, for example)"
            )
        told = weighted or objective.hess_tells_labels
        self.noisy_hess = self._on_gradients and (not options.first_order if self._paper else told)
        largest_grad, largest_hess = objective.grad_bound, objective.hess_bound
        if self._on_gradients:
            most = largest(self.mechanism, self._each)
            largest_grad = round(most * self._sent)
            largest_hess = round((most + 1.0) * self._sent) if self.noisy_hess else largest_hess
        if n_rows * max(largest_grad, largest_hess) >= MOST_SUM:
            raise ConfigError(
                f"sums of {n_rows} gradients under the noise of epsilon={self.epsilon:g} do not fit 62 bits; raise it"
            )

    @property
    def _on_gradients(self) -> bool:
        return self.mechanism != "label_rr"

    @property
    def _each(self) -> float:
        """Epsilon of gradients, and of hessians where they have noise."""
        return self.epsilon / 2.0 if self.noisy_hess else self.epsilon

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """C_g and C_h, what gradients and hessians are clipped to."""
        objective, options = self._objective, self._options
        grad = options.clip or objective.grad_bound * objective.grad_unit
        return grad, options.clip_hess or objective.hess_bound * objective.hess_unit

    @cached_property
    def units(self) -> tuple[float, float]:
        """What one integer step of a gradient and of a hessian is worth, as they are sent."""
        grad, hess = self._objective.grad_unit, self._objective.hess_unit
        if self._on_gradients:
            grad = self.bounds[0] / self._sent
        return grad, self.bounds[1] / (2 * self._sent) if self.noisy_hess else hess

    def of(self, grad: Int64, hess: Int64, rows: Int32 | None) -> TreeGradients:
        """Return the gradients of the next tree; rows outside its sample get no noise, and 0.

        `grad` and `hess` (n_rows,) are in the objective's fixed point, `rows` are the tree's sample (None: all). Raises
        `NoMoreTrees`, before anything is drawn, when this tree, or all trees of its round together, would cost a person
        more than `epsilon_total`.
        """
        n_outputs = self._objective.n_outputs
        if self._on_gradients and n_outputs > 1 and self._tree % n_outputs == 0:
            self._check_round(n_outputs)
        exact_grad, exact_hess = grad, hess
        if self._on_gradients:
            exact, noisy = self._draw(grad, hess) if rows is None else self._draw(grad[rows], hess[rows], rows)
            if self._paper:
                exact_grad = _spread(exact[0], rows, grad)
            grad = _spread(noisy[0], rows, grad)
            if self.noisy_hess:
                exact_hess = _spread(exact[1], rows, hess)
                hess = _spread(noisy[1], rows, hess)
        self._tree += 1
        if self._paper:
            return TreeGradients(grad, hess, exact_grad, exact_hess)
        return TreeGradients(grad, hess, grad, hess)

    def _draw(self, grad: Int64, hess: Int64, rows: Int32 | None = None) -> tuple[Int64, Int64]:
        """Round gradients, and hessians that get noise, to the grid; pay; return them without and with noise.

        Block by block, so that a block stays in the cache; each has its own stream under the noise's key.
        """
        most_grad, most_hess = self.bounds
        kinds = [(grad, self._objective.grad_unit / most_grad, 0.0)]
        if self.noisy_hess:
            kinds.append((hess, 2.0 * self._objective.hess_unit / most_hess, -1.0))
        release_on_grid = ON_GRID[self.mechanism]
        exact, noisy = np.empty((len(kinds), len(grad)), np.int32), np.empty((len(kinds), len(grad)), np.int64)
        blocks = pieces(len(grad), _BLOCK)
        digests = [b""] * len(blocks)

        def prepare(first: int, last: int) -> None:
            for k in range(first, last):
                block = blocks[k]
                for steps, (values, factor, shift) in zip(exact, kinds, strict=True):
                    clip_to_steps(values[block], factor, shift, steps[block])
                digests[k] = hashlib.sha256(exact[:, block].astype("<i4", copy=False).tobytes()).digest()

        def release(first: int, last: int) -> None:
            for k in range(first, last):
                draw, block = keystream(key, k), blocks[k]
                for steps, out in zip(exact, noisy, strict=True):
                    to_sent(release_on_grid(steps[block], self._each, draw), self._sent, out[block])

        share(prepare, len(blocks), self._threads, least=2)
        of_rows = b"" if rows is None else hashlib.sha256(rows.astype("<i4").tobytes()).digest()
        key = self._pay(of_rows + b"".join(digests))
        share(release, len(blocks), self._threads, least=2)
        for values, one in ((exact, STEPS), (noisy, self._sent)):
            values[1:] += one  # hessians begin at 0, not at -1
        return exact.astype(np.int64) if self._paper else noisy, noisy

    def _pay(self, digests: bytes) -> bytes:
        """Enter a release in the ledger; return the key of its noise, which depends on rows, values, tree and terms."""
        terms = [SAMPLER, self._model_id, self._tree, self.mechanism, self.epsilon, *self.units, self.noisy_hess]
        content = hashlib.sha256(msgspec.msgpack.encode(terms) + digests)
        draw = hashlib.sha256(b"treaty noisy gradients, name" + self._ledger.key + content.digest()).hexdigest()
        entry = self._entry(draw, self._tree)
        with self._limited():
            self._ledger.spend([entry], most=self._options.epsilon_total, delta=self._options.delta)
        self.spent.append(entry)
        return hashlib.sha256(b"treaty noisy gradients, key" + self._ledger.key + content.digest()).digest()

    def _check_round(self, n_outputs: int) -> None:
        """Refuse a round of which not all trees can be paid: it would be paid in part, and add nothing to the model.

        Trees that an interrupted training has paid for, known by their names in the ledger, cost nothing again.
        """
        trees = range(self._tree, self._tree + n_outputs)
        paid = {entry.what for entry in self._ledger.entries() if entry.job == self._job}
        unpaid = [entry for k in trees if (entry := self._entry(f"tree {k}", k)).what not in paid]
        with self._limited():
            self._ledger.check(unpaid, most=self._options.epsilon_total, delta=self._options.delta)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """End the training where the budget is spent: note why in `stopped`, and raise `NoMoreTrees`."""
        try:
            yield
        except BudgetSpent as spent:
            self.stopped = str(spent)
            raise NoMoreTrees from None

    def _entry(self, draw: str, tree: int) -> Entry:
        epsilon = math.inf if self._paper else self.epsilon  # exact sums go beside the noise
        return Entry(draw, self._job, self.mechanism, f"gradients of tree {tree + 1}", epsilon)

    def told(self, rounds: int) -> str:
        """Say what was paid, in this training and with everything in the ledger, and whether that ended it."""
        delta = self._options.delta
        everything = self._ledger.entries()
        here = (
            cost(self.spent, delta)
            if self._on_gradients
            else f"epsilon {self.epsilon:g} per label and per person, once"
        )
        ended = f"; training ended after {rounds} rounds: {self.stopped}" if self.stopped else ""
        kept = f". In the ledger: {cost(everything, delta)}" if everything else ""
        return f"{here}{kept}{ended}"


def scoring_rules(rules: SplitRules, *, first_order: bool, noisy_hess: bool) -> SplitRules:
    """Return the split rules of scores: where hess is left out, or noisy, no divisor is below reg_lambda / 2."""
    if first_order:
        return replace(rules, hess_unit=0.0, hess_floor=rules.reg_lambda / 2.0, min_child_weight=0.0)
    return replace(rules, hess_floor=rules.reg_lambda / 2.0 if noisy_hess else 0.0)


def _spread(values: Int64, kept: Int32 | None, like: Int64) -> Int64:
    """Return an array like `like` with values at the kept rows, 0 at others."""
    if kept is None:
        return values
    spread = np.zeros_like(like)
    spread[kept] = values
    return spread
