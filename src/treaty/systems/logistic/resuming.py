"""How an interrupted logistic regression goes on from an epoch that all its parties have kept.

============  ==================  ============================================
message       from -> to          content
============  ==================  ============================================
`KeptEpochs`  others -> active    after which epochs the sender kept its state
`NextEpoch`   active -> all       after which of them training goes on
============  ==================  ============================================

The active party decides whether a training is resumed, and says so with the sizes (`setup.TrainingSizes`). Every party,
a coordinator too, writes its state after every epoch and keeps the last two: no epoch ends without all of them, so what
they have differs by one epoch at most. From there on the training takes the steps it would have taken. Paper mode keeps
nothing.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from treaty.errors import ConfigError, PeerProtocolError
from treaty.linear.lbfgs import EpochState
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.models.checkpoints import LinearCheckpoint, fingerprint
from treaty.systems.logistic.setup import GlmInput, Setting


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
