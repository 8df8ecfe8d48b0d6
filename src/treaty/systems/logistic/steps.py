"""How a regression's steps and epochs are decided, and how a training is resumed from an epoch that all parties kept.

**Steps.** Data parties send the coordinator their parts of the inner products of s, v and g under masks that cancel.
They get the coefficients of the step back. Without a coordinator the active party takes its place.

**Epochs.** The active party decides from an epoch's loss, and from those of eval sets, how training continues.

**Checkpoints.** The active party decides whether a training is resumed (`setup.TrainingSizes`). Every party, also a
coordinator, writes its state after every epoch and keeps the last two. No epoch ends without all parties, so that what
they have differs by one epoch at most. Paper mode keeps nothing, and neither does training on the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from treaty.crypto.keystream import FRACTION_BITS, CancellingMasks, from_fixed, to_fixed, total
from treaty.errors import ConfigError, CryptoError, PeerProtocolError
from treaty.linear.lbfgs import Coordinator, Decision, EpochState, Slice
from treaty.linear.preparation import TAYLOR
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.messages import Array, Message, leaks, leaks_by, view
from treaty.messaging.party import Party
from treaty.models.checkpoints import LinearCheckpoint, fingerprint
from treaty.systems.logistic.coordinated import CoordinatedProducts
from treaty.systems.logistic.prediction import collect_margins, send_margins
from treaty.systems.logistic.products import LatticeProducts, OwnKeyProducts
from treaty.systems.logistic.setup import GlmInput, OwnData, Setting, diverged


@leaks_by(
    to_coordinator=(
        "inner products of steps and gradients, summed over all parties that mask their parts",
        "aggregated",
    ),
    to_active=(
        "inner products of steps and gradients: of several passive parties their sum, of one its part",
        "aggregated",
    ),
)
class InnerProducts(Message):
    """Parts of inner products modulo 2^128, uint64 (n, 2), under masks."""

    values: Array


@leaks("the step's coefficients, from which nearly all summed inner products follow", "aggregated")
class StepCoefficients(Message):
    """Coefficients float64 (2 m + 1,) of the step in s_1 ... s_m, v_1 ... v_m, g; if the pair is kept."""

    coefficients: Array
    keep: bool


Products = LatticeProducts | CoordinatedProducts | OwnKeyProducts


def products_of(
    inputs: GlmInput, setting: Setting, own: OwnData, masks: CancellingMasks, batches: Integers | None = None
) -> Products:
    """Return a data party's end of the products, by cipher and coordinator.

    `batches` are row numbers (n_batches, batch_size), None where products are over all rows.
    """
    if setting.cipher == "lattice":
        return LatticeProducts(inputs, setting, own, masks, batches)
    if setting.coordinator is not None:
        return CoordinatedProducts(inputs.party, setting, own, masks, inputs.threads)
    return OwnKeyProducts(inputs.party, setting, own, masks, inputs.threads)


class Decider:
    """Has each step decided by the coordinator, or without one by the active party; `coordinator` is at that party.

    `masks` and `seeds` are those shared with the other data parties, which a coordinator without data has not.
    """

    def __init__(
        self, party: Party, setting: Setting, masks: CancellingMasks | None = None,
        seeds: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        self._party, self._masks, self._place = party, masks, 0
        self._lead = setting.coordinator or setting.active
        self._givers = [name for name in setting.owners if name != self._lead]
        self.coordinator = setting.decider() if self._lead == party.name else None
        if self.coordinator is None and self._lead == setting.active:
            # the party that gets the sum adds no masks
            among = {peer: seed for peer, seed in (seeds or {}).items() if peer != setting.active}
            self._masks = CancellingMasks(party.job, f"{party.protocol} passive parties", party.name, among)

    def decide(self, products: Floats | None, *, paired: bool) -> Decision:
        """Return the decision on all parties' summed products; `paired`: a candidate pair is among the vectors.

        `products` are the own ones; None at a coordinator without data.
        """
        self._place += 1
        try:
            own = None if products is None else to_fixed(products)
        except CryptoError:
            raise diverged("inner products of steps are too large") from None
        if self.coordinator is not None:
            return self._decide_for_all(self.coordinator, own, paired=paired)
        assert own is not None
        assert self._masks is not None
        self._party.send(self._lead, InnerProducts(Array.of(self._masks.cover(own, self._place, "products"))))
        answer = self._party.receive(self._lead, StepCoefficients)
        # k vectors have k (k + 1) / 2 inner products; the step is not along the candidate's two
        size = (math.isqrt(8 * len(own) + 1) - 1) // 2 - 2 * paired
        what = "StepCoefficients.coefficients"
        coefficients = view(answer.coefficients, np.float64, (size,), peer=self._lead, what=what)
        if not np.all(np.isfinite(coefficients)):
            raise PeerProtocolError(self._lead, "expected finite coefficients", at="StepCoefficients")
        return Decision(coefficients, answer.keep)

    def _decide_for_all(self, coordinator: Coordinator, own: list[int] | None, *, paired: bool) -> Decision:
        parts = []
        for name in self._givers:
            values, shape = self._party.receive(name, InnerProducts).values, (coordinator.expected[paired], 2)
            parts.append(view(values, np.uint64, shape, peer=name, what="InnerProducts.values"))
        summed = total(parts)
        if own is not None:
            summed = [a + b for a, b in zip(summed, own, strict=True)]
        products = from_fixed(summed)
        _check_products(products, len(self._givers) + 1)
        decision = coordinator.decide(products)
        for name in self._givers:
            self._party.send(name, StepCoefficients(Array.of(decision.coefficients), decision.keep))
        return decision


def _check_products(products: Floats, parts: int) -> None:
    """Refuse a Gram matrix that violates Cauchy-Schwarz, beyond the rounding of its `parts` summands."""
    # masks hide what each party sends: only the sum shows that a contribution was malformed
    size = (math.isqrt(8 * len(products) + 1) - 1) // 2
    gram = np.zeros((size, size))
    gram[np.triu_indices(size)] = products
    rounding = parts * 2.0**-FRACTION_BITS
    squares = np.diag(gram) + rounding
    if np.any(squares < 0.0) or np.any(np.abs(gram) > np.sqrt(np.outer(squares, squares)) * (1 + 1e-9) + rounding):
        raise CryptoError("the Gram matrix of summed inner products violates Cauchy-Schwarz: malformed contribution")


@leaks(
    "the next learning rate: whether the loss rose by a tenth, and whether the loss of eval rows is the lowest so far",
    "aggregated",
)
class EpochEnd(Message):
    """The learning rate of the next epoch, or that there is none; whether the last is undone, or best by eval rows."""

    learning_rate: Annotated[float, msgspec.Meta(gt=0)]
    back: bool
    finished: bool
    best: bool


class Epochs:
    """A party's epochs: their schedule, the own slice of weights, and the coordinator of steps where it is here.

    `evals` are the own columns of eval sets and, at the active party, labels; `best` the own weights after the epoch
    that was best by eval rows: training ends with them, if there are such. Losses are the active party's alone.
    """

    def __init__(
        self, inputs: GlmInput, setting: Setting, own: Slice | None, coordinator: Coordinator | None,
        evals: Mapping[str, tuple[Floats, Floats]] | None = None,
    ) -> None:  # fmt: skip
        self.slice, self.coordinator = own, coordinator
        self.best: Floats | None = None
        self._inputs, self._party, self._setting, self._evals = inputs, inputs.party, setting, evals or {}
        self.schedule = setting.solver.schedule(self._evals, inputs.common.early_stopping_rounds)

    def report(self) -> None:
        """Report the losses of the epochs that there are, also before the first."""
        losses = {"train": self.schedule.losses, **self.schedule.eval_losses}
        self._inputs.observers.round_finished(self._party.round, losses)

    def end(
        self, loss: float | None, weights: Floats | None = None, seeds: Mapping[str, bytes] | None = None
    ) -> EpochEnd:
        """End an epoch, as the active party with its mean `loss`; return how training continues.

        Owners of columns give their `weights` after it, and the seeds shared with every other one.
        """
        if weights is not None:
            self._look(weights, seeds or {})
        end = self._receive() if loss is None else self._decide(loss)
        # an epoch that is best by eval rows may be undone: keep its weights first
        if end.best and weights is not None:
            self.best = weights.copy()
        if self.slice is not None:
            self.slice.end_epoch(back=end.back)
        if self.coordinator is not None:
            self.coordinator.end_epoch(end.learning_rate, back=end.back)
        return end

    def _look(self, weights: Floats, seeds: Mapping[str, bytes]) -> None:
        """Have the active party compute the losses of eval sets from all parties' own weights (n_columns,)."""
        party, setting = self._party, self._setting
        others = {peer: seed for peer, seed in seeds.items() if peer != setting.active}
        for name, (matrix, labels) in self._evals.items():
            if party.name == setting.active:
                margins = collect_margins(party, setting.passives, matrix @ weights)
                self.schedule.eval_losses[name].append(float(np.mean(TAYLOR.values(margins, labels))))
            else:
                send_margins(party, setting.active, matrix @ weights, others, party.round, f"margins of {name}")

    def _decide(self, loss: float) -> EpochEnd:
        schedule = self.schedule
        back = schedule.end_epoch(loss)
        end = EpochEnd(schedule.learning_rate, back, schedule.finished, schedule.best)
        for peer in self._party.peers:
            self._party.send(peer, end)
        self.report()
        return end

    def _receive(self) -> EpochEnd:
        """Receive how training continues.

        Raises PeerProtocolError for more epochs than `max_iter`, or a higher rate than before: both would give others
        more equations about own rows than agreed. No party may choose the epoch whose weights a model has.
        """
        schedule, active = self.schedule, self._setting.active
        end, rate = self._party.receive(active, EpochEnd), schedule.learning_rate
        wrong = None
        if self._party.round >= schedule.max_iter and not end.finished:
            wrong = f"training to end after max_iter={schedule.max_iter} epochs"
        elif end.learning_rate > rate:
            wrong = f"a learning rate of at most {rate}, got {end.learning_rate}"
        elif end.best and self.slice is not None and (schedule.patience is None or not self._evals):
            wrong = "no epoch to be best by eval rows"
        if wrong is not None:
            raise PeerProtocolError(active, f"expected {wrong}", at="EpochEnd")
        schedule.learning_rate = end.learning_rate
        self._inputs.observers.round_finished(self._party.round, None)
        return end


@leaks("after which epochs the sender kept its state", "control")
class KeptEpochs(Message):
    """How many epochs each of the sender's kept states comes after."""

    epochs: list[int]


@leaks("after which epoch training continues", "control")
class NextEpoch(Message):
    """After how many epochs training continues; 0: from the beginning."""

    after: int


class Checkpoints:
    """A party's states after epochs, written where its inputs keep checkpoints.

    `model_id` is that of the training to resume, at the active party; None for a fresh one.
    """

    def __init__(self, inputs: GlmInput) -> None:
        data, keeper = inputs.data, inputs.keeper if inputs.options.mode == "safe" else None
        rows = [] if data is None else [(of.table, (of.y, of.weight)) for of in (data, *inputs.eval_sets)]
        self._table = fingerprint(rows, inputs.classes or ()) if keeper is not None and rows else b""
        self._inputs, self._keeper, self._states = inputs, keeper, list[EpochState]()
        self._found = None if keeper is None else keeper.found_linear()
        self.model_id = None
        if self._found is not None and inputs.party.name == inputs.roles.active:
            self._found.check(inputs.given, inputs.may_change, self._table)
            self.model_id = self._found.model_id

    def resume(self, setting: Setting) -> None:
        """If training is resumed, agree on the epoch, and set the party's round to it.

        Raises ConfigError when this party did not keep the training that the active party resumes.
        """
        self._setting = setting
        if not setting.resumes:
            return
        found, party = self._found, self._inputs.party
        if found is None or found.model_id != setting.model_id:
            got = "none" if found is None else "one of another"
            raise ConfigError(
                f"{party.name}: cannot resume: expected a checkpoint of the interrupted training "
                f"{setting.model_id[:8]}, got {got}; bring it back, or run the job without --resume",
                public="it cannot resume: it has no checkpoint of this training",
            )
        found.check(self._inputs.given, self._inputs.may_change, self._table)
        own = [state.epochs for state in found.states]
        if party.name == setting.active:
            common = set(own).intersection(*(party.receive(peer, KeptEpochs).epochs for peer in party.peers))
            after = max(common, default=0)
            if after >= setting.solver.max_iter:
                raise ConfigError(
                    f"{party.name}: cannot resume with max_iter={setting.solver.max_iter}: {after} epochs are "
                    "trained already; give a larger max_iter, or run the job without --resume",
                    public=f"it cannot resume: its max_iter is not above the {after} epochs trained already",
                )
            for peer in party.peers:
                party.send(peer, NextEpoch(after))
        else:
            party.send(setting.active, KeptEpochs(own))
            after = party.receive(setting.active, NextEpoch).after
        if after and after not in own:
            raise PeerProtocolError(setting.active, "expected an epoch that this party kept", at="NextEpoch")
        if after:
            party.round, self._states = after, [found.states[own.index(after)]]

    def restore(self, epochs: Epochs) -> int:
        """Set a resumed training to its state; return its steps so far, at a coordinator without data."""
        if not self._states:
            return 0
        (state,) = self._states
        epochs.schedule.resume(state)
        epochs.best = state.best
        if epochs.slice is not None:
            epochs.slice.resume(state)
        if epochs.coordinator is not None and state.coordinator is not None:
            epochs.coordinator.resume(state)
        return state.iterations

    def keep(self, epochs: Epochs, iterations: int = 0) -> None:
        """Write the state after an epoch, along with the one before."""
        inputs, schedule = self._inputs, epochs.schedule
        if self._keeper is None or self._setting.whole:
            return
        state = EpochState(
            epochs=inputs.party.round, learning_rate=schedule.learning_rate,
            slice=None if epochs.slice is None else epochs.slice.state(),
            coordinator=None if epochs.coordinator is None else epochs.coordinator.state(), iterations=iterations,
            losses=list(schedule.losses), level=schedule.level,
            eval_losses={name: list(losses) for name, losses in schedule.eval_losses.items()}, best=epochs.best,
        )  # fmt: skip
        self._states = [*self._states, state][-2:]
        checkpoint = LinearCheckpoint(
            party=inputs.party.name, model_id=self._setting.model_id, options=inputs.given, table=self._table,
            states=self._states,
        )  # fmt: skip
        self._keeper.keep(lambda: checkpoint)
