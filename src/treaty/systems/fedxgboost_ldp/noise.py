"""Noise on a tree's gradients, at the active party of FedXGBoost-LDP: drawn once for each tree, and paid for first."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import msgspec
import numpy as np

from treaty.errors import BudgetSpent, ConfigError
from treaty.machine.arrays import Floats, Int32s, Integers, pieces
from treaty.machine.shared_work import share
from treaty.privacy.discrete_gaussian import keystream
from treaty.privacy.ledger import Ledger, LedgerEntry, cost, model_job
from treaty.privacy.mechanisms import MECHANISMS, STEPS, clip_to_steps, largest, to_sent
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.trees.boosting import TreeSample
from treaty.trees.objectives import Objective
from treaty.trees.splits import SplitRules

MOST_SUM = 2**62
"""Sums of all rows stay below this in int64, with a factor of two to spare."""

SENT_STEPS = 1 << 12
"""Steps from 0 to 1 of what is sent: far finer than the noise; histograms sum more rows of short numbers at a time."""

SAMPLER = 3
"""Version of the noise that a key gives: raise it with every change, so that the new release is paid for."""

# rows that get noise at a time; another size is a change of the noise
_BLOCK = 1 << 14


class NoisyGradients:
    """Adds noise to the gradients of one tree after another, and pays for it in the ledger.

    Each is clipped to the range that it may have, and noise is in proportion to that: epsilon then is what it costs.
    Margins are made of noisy gradients alone, so the range follows from what passive parties know, whatever the label:
    of classes p - 1 to p (`FixedPointLoss.ranges`). In paper mode margins are exact, and the range is [-clip, clip].

    Noise is computed from the ledger's key. A resumed training therefore adds the same noise to the same gradients of
    the same tree as the interrupted one did, and pays once. With mechanism "label_rr" or "target" gradients stay as
    they are, because the labels carry the noise.

    Hessians p (1 - p) of margins that are made of noisy gradients alone depend on no label. They stay exact, and all of
    epsilon goes to the gradients. This does not hold with weights, with losses whose hessians depend on labels, or with
    leaf values made of true gradients (paper mode, where first-order scores need no hessians). Gradients and hessians
    then get half of epsilon each (`noisy_hess`).

    `model_id` and `job` name the releases in the ledger; `first_tree` is the number of trees that a resumed training
    starts with. `spent` has the releases of this model, one for each tree, including those before a resumption.
    `stopped` says why no further tree may be released; it is empty as long as one may.

    Raises ConfigError if sums of so much noise do not fit 62 bits, epsilon is too small, or rows with noisy labels have
    weights.
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
        self._on_gradients, self._paper, self._weighted = options.adds_noise, options.mode == "paper", weighted
        # in paper mode exact sums have the same unit as the noisy gradients
        self._sent = STEPS if self._paper else SENT_STEPS
        self.spent = [self._entry(f"tree {k} of {model_id}", k) for k in range(first_tree)]
        # weights are factors of gradients, and weights that balance classes are the labels
        if weighted and not self._on_gradients:
            raise ConfigError(
                f"mechanism={self.mechanism!r} adds noise to labels alone, so sample weights would be sent without "
                "noise: leave weights out, or use a mechanism that adds noise to gradients (piecewise, for example)"
            )
        from_labels = weighted or objective.hess_tells_labels
        self.noisy_hess = self._on_gradients and (not options.first_order if self._paper else from_labels)
        # epsilon of gradients, and of hessians where they carry noise
        self._each = self.epsilon / 2.0 if self.noisy_hess else self.epsilon
        largest_grad, largest_hess = objective.grad_bound, objective.hess_bound
        if self._on_gradients:
            most = largest(self.mechanism, self._each)
            largest_grad = round(most * self._sent)
            largest_hess = round((most + 1.0) * self._sent) if self.noisy_hess else largest_hess
        if n_rows * max(largest_grad, largest_hess) >= MOST_SUM:
            raise ConfigError(
                f"sums of {n_rows} gradients under the noise of epsilon={self.epsilon:g} do not fit 62 bits: raise it"
            )
        # C_g and C_h, to which gradients and hessians are clipped
        self.bounds = (
            options.clip or objective.grad_bound * objective.grad_unit,
            options.clip_hess or objective.hess_bound * objective.hess_unit,
        )
        # the value of one integer step of a gradient and of a hessian, as they are sent
        self.units = (
            self.bounds[0] / self._sent if self._on_gradients else objective.grad_unit,
            self.bounds[1] / (2 * self._sent) if self.noisy_hess else objective.hess_unit,
        )

    def of(self, sample: TreeSample, margins: Floats) -> tuple[TreeSample, TreeSample] | None:
        """Return the next tree's gradients as they are sent, and those for nodes' totals and leaf values.

        Both are the same object outside paper mode. Rows outside the sample are 0. `margins` (n_outputs, n_rows) are
        the current ones; those before the first tree of a round count, as for gradients. Returns None, before anything
        is drawn, if this tree, or all trees of its round together, would cost a person more than `epsilon_total`;
        `stopped` then says why.
        """
        n_outputs, rows = self._objective.n_outputs, sample.rows
        sent = counted = sample
        if self._on_gradients:
            if self._tree % n_outputs == 0:
                self._ranges = self._ranges_at(margins)
            of_sample = (sample.grad, sample.hess) if rows is None else (sample.grad[rows], sample.hess[rows])
            try:
                # part of a round adds nothing to the model: all its trees must be affordable
                if n_outputs > 1 and self._tree % n_outputs == 0:
                    self._check_round(n_outputs)
                exact, noisy = self._draw(*of_sample, rows)
            except BudgetSpent as spent:
                self.stopped = str(spent)
                return None
            sent = counted = _with(sample, noisy)
            # the published form has exact sums next to the noise
            if self._paper:
                counted = _with(sample, exact)
        self._tree += 1
        return sent, counted

    def _ranges_at(self, margins: Floats) -> tuple[Integers, Integers]:
        """Return the ends of what grad and hess may be, int64 (2, n_outputs, n_rows) both, within the bounds."""
        objective, ends = self._objective, np.ones((2, *margins.shape), np.int64)
        most_grad, most_hess = (
            max(1, round(bound / unit))
            for bound, unit in zip(self.bounds, (objective.grad_unit, objective.hess_unit), strict=True)
        )
        ends[0] = -1
        if self._paper:
            return ends * most_grad, np.maximum(ends, 0) * most_hess
        grad, hess = objective.ranges(margins.T, self._weighted, self._threads)
        return np.clip(grad, -most_grad, most_grad), np.minimum(hess, most_hess)

    def _draw(self, grad: Integers, hess: Integers, rows: Int32s | None) -> tuple[Integers, Integers]:
        """Round gradients, and hessians that get noise, to the grid; pay; return them without and with noise."""
        # block by block, so that a block stays in the cache; each has its own stream under the noise's key
        of_rows, output = slice(None) if rows is None else rows, self._tree % self._objective.n_outputs
        own_units = self._objective.grad_unit, self._objective.hess_unit
        kinds = [
            (values, low[output][of_rows], high[output][of_rows], unit / sent_unit)
            for values, (low, high), unit, sent_unit in zip(
                (grad, hess), self._ranges, own_units, self.units, strict=True
            )
        ][: 1 + self.noisy_hess]
        release_on_grid = MECHANISMS[self.mechanism]
        places, noisy = np.empty((len(kinds), len(grad)), np.int32), np.empty((len(kinds), len(grad)), np.int64)
        blocks = pieces(len(grad), _BLOCK)
        digests = [b""] * len(blocks)

        def prepare(first: int, last: int) -> None:
            for k in range(first, last):
                block = blocks[k]
                for steps, (values, low, high, _) in zip(places, kinds, strict=True):
                    clip_to_steps(values[block], low[block], high[block], steps[block])
                digests[k] = hashlib.sha256(places[:, block].astype("<i4", copy=False).tobytes()).digest()

        def release(first: int, last: int) -> None:
            for k in range(first, last):
                draw, block = keystream(key, k), blocks[k]
                for steps, out, (_, low, high, scale) in zip(places, noisy, kinds, strict=True):
                    drawn = release_on_grid(steps[block], self._each, draw)
                    to_sent(drawn, low[block], high[block], scale, out[block])

        # the noise's key depends on all rounded values, so it is known only once every block is rounded
        share(prepare, len(blocks), self._threads, least=2)
        sampled = b"" if rows is None else hashlib.sha256(rows.astype("<i4").tobytes()).digest()
        key = self._pay(sampled + b"".join(digests))
        share(release, len(blocks), self._threads, least=2)
        if not self._paper:
            return noisy, noisy
        exact = np.empty_like(noisy)
        for steps, out, (_, low, high, scale) in zip(places, exact, kinds, strict=True):
            to_sent(steps / STEPS, low, high, scale, out)
        return exact, noisy

    def _pay(self, digests: bytes) -> bytes:
        """Enter a release in the ledger; return the key of its noise."""
        # rows, values, tree and terms are all that the noise hides or depends on: a change of any is another release
        terms = [SAMPLER, self._model_id, self._tree, self.mechanism, self.epsilon, *self.units, self.noisy_hess]
        content = hashlib.sha256(msgspec.msgpack.encode(terms) + digests)
        # two values under different names: the draw's name is written to the ledger, the noise's key is secret
        draw = hashlib.sha256(b"treaty noisy gradients, name" + self._ledger.key + content.digest()).hexdigest()
        entry = self._entry(draw, self._tree)
        self._ledger.spend([entry], most=self._options.epsilon_total, delta=self._options.delta)
        self.spent.append(entry)
        return hashlib.sha256(b"treaty noisy gradients, key" + self._ledger.key + content.digest()).digest()

    def _check_round(self, n_outputs: int) -> None:
        """Raise BudgetSpent if not all trees of a round can be paid."""
        # trees that an interrupted training has paid for, known by their names in the ledger, cost nothing again
        trees = range(self._tree, self._tree + n_outputs)
        paid = {entry.what for entry in self._ledger.entries() if entry.job == self._job}
        unpaid = [entry for k in trees if (entry := self._entry(f"tree {k}", k)).what not in paid]
        self._ledger.check(unpaid, most=self._options.epsilon_total, delta=self._options.delta)

    def _entry(self, draw: str, tree: int) -> LedgerEntry:
        # paper mode sends exact sums, too
        epsilon = math.inf if self._paper else self.epsilon
        return LedgerEntry(draw, self._job, self.mechanism, f"gradients of tree {tree + 1}", epsilon)

    def report(self, rounds: int) -> str:
        """Return a sentence on the cost of this training and of the whole ledger, and whether that ended it."""
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
    """Return the split rules of scores: without hessians, or with noisy ones, no divisor is below reg_lambda / 2."""
    # the first-order score of Le et al. 2021, -G_L G_R / reg_lambda, is half the gain under a `hess_unit` of 0
    if first_order:
        return replace(rules, hess_unit=0.0, hess_floor=rules.reg_lambda / 2.0, min_child_weight=0.0)
    return replace(rules, hess_floor=rules.reg_lambda / 2.0 if noisy_hess else 0.0)


def _with(sample: TreeSample, values: Integers) -> TreeSample:
    """Return a sample with other gradients, and hessians if `values` has two rows; 0 outside the sampled rows."""
    if sample.rows is not None:
        of_rows, values = values, np.zeros((len(values), len(sample.grad)), np.int64)
        values[:, sample.rows] = of_rows
    return replace(sample, grad=values[0], hess=values[1] if len(values) > 1 else sample.hess)
