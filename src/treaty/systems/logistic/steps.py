"""How steps are decided: inner products, masked, to whoever coordinates, and back the coefficients of the step.

==================  ==========================  ==================================================  ================
message             from -> to                  content                                             protection
==================  ==========================  ==================================================  ================
`InnerProducts`     data party -> coordinator   its parts of the inner products of s, v and g       masks that cancel
`StepCoefficients`  coordinator -> data party   the 2 M + 1 coefficients of the step                TLS
==================  ==========================  ==================================================  ================

Without a coordinator the active party takes its place. Here, too, is what both ways of training choose alike: the
products of columns with hidden vectors, by cipher and coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

import msgspec
import numpy as np

from treaty.crypto.keystream import FRACTION_BITS, CancellingMasks, from_fixed, to_fixed, total
from treaty.errors import ConfigError, CryptoError, PeerProtocolError
from treaty.linear.lbfgs import Coordinator, CoordinatorState, Decision, EpochState
from treaty.linear.preparation import TAYLOR, Preparation
from treaty.linear.training import EvalLosses, Schedule
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.messages import Array, Message, MessageLeakage, view
from treaty.messaging.party import Party
from treaty.models.checkpoints import LinearCheckpoint, fingerprint
from treaty.systems.logistic.coordinated import CoordinatedProducts
from treaty.systems.logistic.prediction import collect_margins, send_margins
from treaty.systems.logistic.products import LatticeProducts, OwnKeyProducts
from treaty.systems.logistic.setup import GlmInput, OwnData, Setting, diverged
from treaty.systems.system import LabelledRows

# ----------------------------------------------------------------
# What parties tell at the end of an epoch of logistic regression: margins of eval sets, and how training goes on.
#
# ============ ======================= ==================================================  =================
# message      from -> to              content
# ============ ======================= ==================================================  =================
# `MarginPart` passive -> active party its parts of the margins of an eval set's rows      masks that cancel
# `EpochEnd`   active party -> all     learning rate, whether training is over             TLS
# ============ ======================= ==================================================  =================
#
# There are eval sets only if every party consents (`show_eval_margins`).


class EpochEnd(Message):
    """The learning rate of the next epoch, or that there is none; whether the last is undone, or best by eval rows.

    Tells whether the loss rose by a tenth, and whether that of eval rows is the lowest so far.
    """

    leakage: ClassVar = MessageLeakage(
        "the next learning rate: whether the loss rose by a tenth, and whether that of eval rows is the lowest so far",
        "aggregated",
    )

    learning_rate: Annotated[float, msgspec.Meta(gt=0)]
    back: bool
    finished: bool
    best: bool


def prepared(rows: LabelledRows, preparation: Preparation, *, intercept: bool) -> tuple[Floats, Floats]:
    """Return an eval set's prepared columns, with one of ones for an intercept, and its labels as -1 and 1."""
    n_rows = rows.table.n_rows
    matrix = preparation.matrix(rows.table.columns, n_rows)
    return np.hstack([matrix, np.ones((n_rows, int(intercept)))]), np.where(rows.y > 0.5, 1.0, -1.0)


@dataclass(slots=True)
class EvalSets:
    """A data party's columns of eval sets; the losses, which the active party alone has; the best weights so far."""

    party: Party
    setting: Setting
    sets: dict[str, tuple[Floats, Floats]]
    found: EvalLosses
    best: Floats | None = None

    @classmethod
    def of(cls, inputs: GlmInput, setting: Setting, preparation: Preparation) -> EvalSets:
        leads = inputs.party.name == setting.active
        sets = {rows.name: prepared(rows, preparation, intercept=leads) for rows in inputs.eval_sets}
        return cls(
            inputs.party, setting, sets, EvalLosses({name: [] for name in sets}, inputs.common.early_stopping_rounds)
        )

    def resume(self, state: EpochState) -> None:
        """Go on from the state after an epoch."""
        self.best = state.best
        for name, losses in state.eval_losses.items():
            self.found.losses[name] = list(losses)

    def look(self, weights: Floats, seeds: Mapping[str, bytes]) -> None:
        """Have the active party compute the losses after an epoch, from all parties' own weights (n_columns,).

        `seeds` are those shared with every other party with data.
        """
        party, setting = self.party, self.setting
        others = {peer: seed for peer, seed in seeds.items() if peer != setting.active}
        for name, (matrix, labels) in self.sets.items():
            own = matrix @ weights
            if party.name == setting.active:
                margins = collect_margins(party, setting.passives, own)
                self.found.losses[name].append(float(np.mean(TAYLOR.values(margins, labels))))
            else:
                send_margins(party, setting.active, own, others, party.round, f"margins of {name}")

    def keep(self, end: EpochEnd, weights: Floats) -> None:
        """Keep the weights after the epoch that has ended, if it was the best by eval rows, and these decide.

        Raises PeerProtocolError where they do not: no party may choose the epoch whose weights a model has.
        """
        if end.best and (self.found.patience is None or not self.sets):
            active = self.setting.active
            raise PeerProtocolError(active, f"expected no epoch to be best by eval rows - at EpochEnd from {active}")
        if end.best:
            self.best = weights.copy()

    def chosen(self, weights: Floats) -> Floats:
        """Return the weights that training ends with: the best by eval rows where these decide, else the last."""
        return weights if self.best is None else self.best


def end_epoch(inputs: GlmInput, schedule: Schedule, loss: float, evals: EvalLosses | None = None) -> EpochEnd:
    """Decide at the active party, from the epoch's mean loss and eval sets, how training goes on, and tell all."""
    evals = evals or EvalLosses({}, None)
    back = schedule.end_epoch(loss)
    end = EpochEnd(schedule.learning_rate, back, schedule.finished or evals.over, evals.best)
    for peer in inputs.party.peers:
        inputs.party.send(peer, end)
    inputs.observers.round_finished(len(schedule.losses), {"train": schedule.losses, **evals.losses})
    return end


def receive_end(inputs: GlmInput, schedule: Schedule) -> EpochEnd:
    """Receive how training goes on, and update the schedule's rate.

    Raises PeerProtocolError for more epochs than `max_iter`, or a higher rate than before: both would give others more
    equations about own rows than agreed.
    """
    party, active, rate = inputs.party, inputs.roles.active, schedule.learning_rate
    end = party.receive(active, EpochEnd)
    if party.round >= schedule.max_iter and not end.finished:
        raise PeerProtocolError(
            active, f"expected training to end after max_iter={schedule.max_iter} epochs - at EpochEnd from {active}"
        )
    if end.learning_rate > rate:
        raise PeerProtocolError(
            active, f"expected a learning rate of at most {rate}, got {end.learning_rate} - at EpochEnd from {active}"
        )
    schedule.learning_rate = end.learning_rate
    inputs.observers.round_finished(party.round, None)
    return end


# ---------------------------------------------------------------- steps


class InnerProducts(Message):
    """Parts of inner products modulo 2^128, uint64 (n, 2). Tell nothing but their sum over all who mask them."""

    leakage: ClassVar = {
        "to_coordinator": MessageLeakage(
            "inner products of steps and gradients, summed over all parties that mask their parts",
            "aggregated",
        ),
        "to_active": MessageLeakage(
            "inner products of steps and gradients: of several passive parties their sum, of one its part",
            "aggregated",
        ),
    }

    values: Array


class StepCoefficients(Message):
    """Coefficients float64 (2 m + 1,) of the step in s_1 ... s_m, v_1 ... v_m, g; whether the candidate pair is kept.

    Tells what they are a function of: nearly the summed inner products.
    """

    leakage: ClassVar = MessageLeakage(
        "the step's coefficients, from which nearly all summed inner products follow", "aggregated"
    )

    coefficients: Array
    keep: bool


Products = LatticeProducts | CoordinatedProducts | OwnKeyProducts


def products_of(
    inputs: GlmInput, setting: Setting, own: OwnData, blocks: Sequence[Integers], masks: CancellingMasks
) -> Products:
    """Return a data party's end of the products, by cipher and coordinator.

    Every product is over rows of one of the `blocks` (each of row numbers), or of several.
    """
    if setting.cipher == "lattice":
        return LatticeProducts(inputs, setting, own, blocks, masks)
    if setting.coordinator is not None:
        return CoordinatedProducts(inputs.party, setting, own, masks, inputs.threads)
    return OwnKeyProducts(inputs.party, setting, own, masks, inputs.threads)


class Decider:
    """Asks the coordinator for each step's coefficients; without one, the active party computes them for all."""

    def __init__(self, party: Party, setting: Setting, masks: CancellingMasks, seeds: dict[str, bytes]) -> None:
        self._party, self._setting = party, setting
        self._lead = setting.coordinator or setting.active
        self._place = 0
        self._coordinator: Coordinator | None = None
        self._masks = masks
        if self._lead == party.name:
            self._coordinator = setting.decider()
        elif self._lead == setting.active:  # the party that gets the sum adds no masks
            among = {peer: seed for peer, seed in seeds.items() if peer != setting.active}
            self._masks = CancellingMasks(party.job, f"{party.protocol} passive parties", party.name, among)

    def end_epoch(self, end: EpochEnd) -> None:
        """Tell the coordinator, if it is here, how training goes on."""
        if self._coordinator is not None:
            self._coordinator.end_epoch(end.learning_rate, back=end.back)

    def state(self) -> CoordinatorState | None:
        """Return the coordinator's state, if it is here."""
        return None if self._coordinator is None else self._coordinator.state()

    def resume(self, state: EpochState) -> None:
        if self._coordinator is not None and state.coordinator is not None:
            self._coordinator.resume(state)

    def decide(self, products: Floats, *, paired: bool) -> Decision:
        """Return the decision on all parties' summed products; `paired`: a candidate pair is among the vectors."""
        self._place += 1
        numbers = _checked_fixed(products)
        if self._coordinator is not None:
            return decide_for(self._party, self._setting.passives, self._coordinator, len(products), own=numbers)
        covered = self._masks.cover(numbers, self._place, "products")
        self._party.send(self._lead, InnerProducts(Array.of(covered)))
        answer = self._party.receive(self._lead, StepCoefficients)
        # of the 2 m + 1 vectors that (2 m + 1) (2 m + 2) / 2 products are of, less the candidate's two
        size = (math.isqrt(8 * len(products) + 1) - 1) // 2 - 2 * paired
        what = "StepCoefficients.coefficients"
        coefficients = view(answer.coefficients, np.float64, (size,), peer=self._lead, what=what)
        if not np.all(np.isfinite(coefficients)):
            raise PeerProtocolError(self._lead, f"expected finite coefficients - at StepCoefficients from {self._lead}")
        return Decision(coefficients, answer.keep)


def _checked_fixed(products: Floats) -> list[int]:
    try:
        return to_fixed(products)
    except CryptoError:
        raise diverged("inner products of steps are too large") from None


def decide_for(
    party: Party, givers: Sequence[str], decider: Coordinator, expected: int, own: list[int] | None = None
) -> Decision:
    """Sum the `givers`' inner products, `expected` of each, and the own ones if any; decide, and tell the givers."""
    parts = []
    for name in givers:
        values = party.receive(name, InnerProducts).values
        parts.append(view(values, np.uint64, (expected, 2), peer=name, what="InnerProducts.values"))
    summed = total(parts)
    if own is not None:
        summed = [a + b for a, b in zip(summed, own, strict=True)]
    products = from_fixed(summed)
    _check_products(products, len(givers) + 1)
    decision = decider.decide(products)
    for name in givers:
        party.send(name, StepCoefficients(Array.of(decision.coefficients), decision.keep))
    return decision


def _check_products(products: Floats, parts: int) -> None:
    """Refuse a Gram matrix that violates Cauchy-Schwarz, beyond the rounding of its `parts` summands.

    Masks hide whatever a party sends; only the sum shows that a contribution was malformed.
    """
    size = (math.isqrt(8 * len(products) + 1) - 1) // 2
    gram = np.zeros((size, size))
    gram[np.triu_indices(size)] = products
    rounding = parts * 2.0**-FRACTION_BITS
    squares = np.diag(gram) + rounding
    if np.any(squares < 0.0) or np.any(np.abs(gram) > np.sqrt(np.outer(squares, squares)) * (1 + 1e-9) + rounding):
        raise CryptoError("the Gram matrix of summed inner products violates Cauchy-Schwarz: malformed contribution")


# ------------------------- how an interrupted logistic regression goes on from an epoch that all its parties have kept
#
# ============  ==================  ============================================
# message       from -> to          content
# ============  ==================  ============================================
# `KeptEpochs`  others -> active    after which epochs the sender kept its state
# `NextEpoch`   active -> all       after which of them training goes on
# ============  ==================  ============================================
#
# The active party decides whether a training is resumed, and says so with the sizes (`setup.TrainingSizes`). Every
# party, a coordinator too, writes its state after every epoch and keeps the last two: no epoch ends without all of
# them, so what they have differs by one epoch at most. From there on the training takes the steps it would have taken.
# Paper mode keeps nothing.


class KeptEpochs(Message):
    """How many epochs each of the sender's kept states comes after."""

    leakage: ClassVar = MessageLeakage("after which epochs the sender kept its state", "control")

    epochs: list[int]


class NextEpoch(Message):
    """After how many epochs training goes on; 0: from the beginning."""

    leakage: ClassVar = MessageLeakage("after which epoch training goes on", "control")

    after: int


class Resumable(Protocol):
    """What continues from the state after an epoch."""

    def resume(self, state: EpochState) -> None: ...


def restore(state: EpochState | None, *parts: Resumable) -> None:
    """Set all parts of a training to the state after an epoch; None: it begins."""
    if state is not None:
        for part in parts:
            part.resume(state)


class Checkpoints:
    """A party's states after epochs, written where its inputs keeps checkpoints.

    `model_id` is at the active party that of the training to go on with, None to begin anew.
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

    def resume(self, party: Party, setting: Setting) -> EpochState | None:
        """Return the state to go on from, and set the party's round to its epoch; None to begin anew.

        Raises ConfigError when this party did not keep the training that the active party goes on with.
        """
        self._setting = setting
        if not setting.resumes:
            return None
        found = self._found
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
        if after == 0:
            return None
        if after not in own:
            raise PeerProtocolError(
                setting.active, f"expected an epoch that this party kept - at NextEpoch from {setting.active}"
            )
        state = found.states[own.index(after)]
        party.round, self._states = after, [state]
        return state

    def keep(self, state: EpochState) -> None:
        """Write the state after an epoch, beside the one before."""
        inputs = self._inputs
        if self._keeper is None:
            return
        self._states = [*self._states, state][-2:]
        checkpoint = LinearCheckpoint(
            party=inputs.party.name, model_id=self._setting.model_id, options=inputs.given, table=self._table,
            states=self._states,
        )  # fmt: skip
        self._keeper.keep(lambda: checkpoint)
