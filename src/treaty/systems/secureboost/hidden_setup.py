"""What parties of a training on shared rows have before the first tree: columns, a seed, hints and transfers."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.shared_sums import SharedSums, shared_parameters
from treaty.crypto.transfer.hidden_best import SplitTerms, quotient_bits
from treaty.crypto.transfer.sealed_sums import Widths
from treaty.crypto.transfer.stock import Arrays, Steps, open_transfers, take
from treaty.data.binning import MOST_BINS, MOST_CATEGORIES
from treaty.errors import ConfigError, CryptoError, PeerProtocolError
from treaty.machine.arrays import Flags, Int32s
from treaty.messaging.messages import MOST_COLUMNS, MOST_SLOTS, Array, Message, leaks, pack, view
from treaty.messaging.party import Party
from treaty.models.trees import DROPPED, DROPPED_OF_NUMBERS, ModelPart
from treaty.privacy.randomised_response import KnownRows
from treaty.systems.observers import SidesLearned
from treaty.systems.pooled.system import Training
from treaty.systems.secureboost.hidden_tree import HiddenEnd, LossShares
from treaty.systems.system import RoleInput
from treaty.systems.vertical.cipher_choice import PROBES
from treaty.systems.vertical.column_owner import bin_own_columns
from treaty.systems.vertical.encrypted_columns import sums_bounds
from treaty.systems.vertical.hidden_cost import MOST_WEIGHT
from treaty.systems.vertical.messages import MOST_STEP, LinkEcho, LinkProbe, SealedStep, SignedKey, Start
from treaty.systems.vertical.sealed import MovingKey, compute
from treaty.systems.vertical.sealed_candidates import Candidates
from treaty.trees.boosting import draw
from treaty.trees.logistic_pieces import LogisticPieces, pieces_of
from treaty.trees.number_losses import SquaredErrorSteps
from treaty.trees.splits import SplitRules

HiddenLoss = LogisticPieces | SquaredErrorSteps
"""Losses whose derivatives are computed on shares."""


@leaks(
    "how many bins each column of a party has, and which columns have categories or missing values; a public key",
    "control",
)
class HiddenColumns(Message):
    """A party's columns: first slots int32 (n_features + 1,), and bool (n_features,) twice.

    The active party passes those of further parties on to the partner. The `key` is a passive party's, signed, where
    there are further parties.
    """

    offsets: Array
    categorical: Array
    missing: Array
    key: SignedKey | None = None


@leaks(
    "the model's number; how many of its splits kept rounds use; how long a step takes; a power of two that no row's "
    "weight exceeds, and of numbers one that no label's distance from the start exceeds; a public key",
    "control",
)
class HiddenStart(Start):
    """The model's id, how many comparisons take as long as a step, what no weight exceeds, and the `grad_clip`.

    Further parties are given the partner's `key`.
    """

    step: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEP)]
    heaviest: Annotated[int, msgspec.Meta(ge=1, le=1 << MOST_WEIGHT.bit_length())]
    clip: Annotated[float, msgspec.Meta(gt=0.0)]
    key: SignedKey | None = None


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One party's columns: `offsets` are the features' first slots."""

    offsets: Int32s
    categorical: Flags
    missing: Flags

    def candidates(self, columns: Int32s | None = None) -> Candidates:
        """Return the candidates of some columns, by default all."""
        columns = np.arange(len(self.categorical), dtype=np.int32) if columns is None else columns
        # a category alone against the rest
        return Candidates(self.offsets, self.categorical, self.missing, columns, MOST_CATEGORIES + 2)


class Columns:
    """Own columns, and those of all who compute on shares or answer: their `layouts`, in the job's order."""

    def __init__(self, inputs: RoleInput) -> None:
        self.bins, self.codes = bin_own_columns(inputs)
        categorical = inputs.rows.table.schema.categorical
        missing = (self.codes == self.bins.n_bins).any(axis=0)
        most = inputs.common.onehot_below
        if many := [name for name, of, bins in zip(
            inputs.rows.table.schema.names, categorical, self.bins.n_bins, strict=True) if of and bins >= most
        ]:  # fmt: skip
            raise ConfigError(
                f'membership="hidden" splits categories one against the rest, and {many[0]} has {most} or more: raise '
                "max_cat_to_onehot"
            )
        self.own = SlotLayout(self.bins.offsets, categorical, missing)
        self.layouts: list[SlotLayout] = []

    def exchange(self, inputs: RoleInput, key: MovingKey | None) -> dict[str, SignedKey]:
        """Show own columns, and take all others' where shares are computed on; return passive parties' keys."""
        party, active, (partner, *further) = inputs.party, inputs.roles.active, inputs.others
        offsets, categorical, missing = map(Array.of, (self.own.offsets, self.own.categorical, self.own.missing))
        own = HiddenColumns(offsets, categorical, missing, None if key is None else key.signed())
        if party.name == active:
            came = {peer: party.receive(peer, HiddenColumns) for peer in inputs.others}
            for message in (own, *(came[name] for name in further)):
                party.send(partner, message)
        else:
            party.send(active, own)
            passed_on = [active, *further] if party.name == partner else []
            came = {name: party.receive(active, HiddenColumns) for name in passed_on}
        senders = {name: name if party.name == active else active for name in came}
        layouts = {name: _layout(of, senders[name]) for name, of in came.items()}
        if came:
            layouts[party.name] = self.own
            self.layouts = [layouts[name] for name in inputs.roles.owners]
            if not any(len(of.categorical) for of in self.layouts):
                raise ConfigError("expected columns at one of the parties, got none")
        keys = {name: of.key for name, of in came.items() if of.key is not None}
        if further and (without := came.keys() - keys.keys() - {active}):
            name = min(without)
            raise PeerProtocolError(senders[name], f"expected a key of {name}", at="HiddenColumns")
        return keys

    def note_splits(self, inputs: RoleInput, splits: Iterable[tuple[int, Flags]]) -> None:
        """Tell observers which of all rows go left at own splits, given as columns and the bins that go left."""
        rows = np.arange(len(self.codes), dtype=np.int32)
        for column, left in splits:
            inputs.observers.event(SidesLearned(inputs.party.name, rows, left[self.codes[:, column]]))

    def of_tree(self, end: HiddenEnd, columns: Sequence[Int32s]) -> HiddenEnd:
        """Return the end for a tree on some columns of each owner, in the job's order."""
        pairs = zip(self.layouts, columns, strict=True)
        return replace(end, candidates=[layout.candidates(some) for layout, some in pairs])


def _layout(came: HiddenColumns, peer: str) -> SlotLayout:
    what = "HiddenColumns"
    categorical = view(came.categorical, np.bool_, (None,), peer=peer, what=f"{what}.categorical")
    count = len(categorical)
    offsets = view(came.offsets, np.int32, (count + 1,), peer=peer, what=f"{what}.offsets")
    sizes = np.diff(offsets.astype(np.int64))
    most = np.where(categorical, MOST_CATEGORIES, MOST_BINS) + 1
    fits = count <= MOST_COLUMNS and offsets[0] == 0 and offsets[-1] <= MOST_SLOTS
    if not fits or np.any(sizes < 1) or np.any(sizes > most):
        raise PeerProtocolError(peer, "expected the slots of columns", at=f"{what}.offsets")
    missing = view(came.missing, np.bool_, (count,), peer=peer, what=f"{what}.missing")
    return SlotLayout(offsets.copy(), categorical.copy(), missing.copy())


def note_rows(inputs: RoleInput, part: ModelPart) -> None:
    """Have a part know its training rows, and those of an earlier model, by which predictions recognise them."""
    rows = inputs.rows
    known = rows.table.matrix(), rows.ids and rows.ids(), rows.ids_of
    part.encryption, part.hides_rows = "lattice", True
    part.dropped = DROPPED_OF_NUMBERS if inputs.common.loss_class.takes == "numbers" else DROPPED
    part.trained = KnownRows.of(*known) if part.trained is None else part.trained.joined(*known)


def terms_of(inputs: RoleInput, start: HiddenStart) -> tuple[HiddenLoss, SumsBounds, SplitRules]:
    """Return a passive party's objective, bounds of sums, and rules of splits."""
    objective = inputs.common.loss_class(
        n_outputs=inputs.n_outputs, fractional_bits=inputs.common.fractional_bits, grad_clip=start.clip,
        weight_bound=float(start.heaviest),
    )  # fmt: skip
    assert isinstance(objective, HiddenLoss), "the options' check has refused others"
    return objective, sums_bounds(inputs.rows.table.n_rows, objective, inputs.common), inputs.common.rules(objective)


class TreeSamples:
    """The rows and columns of each tree, drawn as `trees.boosting` draws them."""

    def __init__(self, inputs: RoleInput, training: Training, columns: Columns) -> None:
        self._common, self._n_rows = inputs.common, inputs.rows.table.n_rows
        self._counts = [len(of.categorical) for of in columns.layouts]
        seed, before = inputs.common.random_state, training.forest.before
        self._rng = np.random.default_rng([seed, before] if before and seed is not None else seed)
        if training.resume is not None:
            self._rng.bit_generator.state = json.loads(training.resume.random_state)

    @property
    def state(self) -> str:
        return json.dumps(self._rng.bit_generator.state)

    def draw(self) -> tuple[Flags | None, list[Int32s]]:
        """Return the rows, bool (n_rows,), None for all, and each owner's columns, in the job's order."""
        sampled = None
        if self._common.subsample < 1.0:
            sampled = np.zeros(self._n_rows, np.bool_)
            sampled[draw(self._rng, self._n_rows, self._common.subsample)] = True
        columns, first = draw(self._rng, sum(self._counts), self._common.colsample_bytree), np.cumsum(self._counts)
        of_owners = np.split(columns, np.searchsorted(columns, first[:-1]))
        return sampled, [(of - at).astype(np.int32) for of, at in zip(of_owners, first - self._counts, strict=True)]


def losses_of(
    objective: HiddenLoss, y: NDArray[np.float64] | None = None, weight: NDArray[np.float64] | None = None
) -> list[LossShares]:
    """Return each output's loss of rows of which the active party knows labels and weights."""
    fraction, heaviest = objective.fractional_bits, int(objective.weight_bound)
    weights = None if weight is None else weight.astype(np.int64)
    if isinstance(objective, SquaredErrorSteps):
        labels = None if y is None else objective.in_steps(y).astype(np.int64)
        return [LossShares(None, fraction, heaviest, labels, weights)]
    classes = [1] if objective.n_outputs == 1 else range(objective.n_outputs)
    known = [None if y is None else (y == k).astype(np.int64) << fraction for k in classes]
    return [LossShares.logistic(pieces_of(fraction), fraction, heaviest, of, weights) for of in known]


def make_ends(
    inputs: RoleInput, columns: Columns, bounds: SumsBounds, rules: SplitRules, step: int, losses: list[LossShares],
    *, short: bool = False, hints: Iterator[Arrays] | None = None,
) -> list[HiddenEnd]:  # fmt: skip
    """Draw a seed with the other end, exchange hints and make transfers; return an end for each class.

    Transfers are `short` if the active party says so. It passes the seed, and the partner further parties' hints.
    """
    party, role, owners = inputs.party, int(inputs.party.name != inputs.roles.active), inputs.roles.owners
    places = [owners.index(name) for name in (inputs.roles.active, *inputs.others)]
    further = inputs.others[1:]
    try:
        quotient_bits(Widths.of(bounds, rules.ridge), rules.whole_rate)
        shared_parameters(bounds, bool(further))
    except CryptoError as error:
        raise ConfigError(f'membership="hidden" cannot hold these sums: {error}') from None
    seed = compute(party, joint_seed())
    for name in further if role == 0 else ():
        party.send(name, SealedStep(pack([np.frombuffer(seed, np.uint8)])))
    others = [int(columns.layouts[place].offsets[-1]) for place in (places[1 - role], *places[2:])]
    sums = SharedSums(bounds, columns.codes, columns.own.offsets, others, seed, inputs.threads)
    compute(party, sums.exchange_hints(partial(inputs.observers.set_up, "hints")))
    compute(party, sums.pass_hints(hints))
    end = HiddenEnd(
        role, compute(party, open_transfers(role, short=short)), sums, bounds, losses[0], columns.codes,
        [of.candidates() for of in columns.layouts], places,
        SplitTerms(rules.ridge, rules.least_hess, rules.min_child_samples, int(rules.threshold_in_units)),
        rules.whole_rate, rules.max_depth, step,
    )  # fmt: skip
    return [replace(end, loss=loss) for loss in losses]


def joint_seed() -> Steps[bytes]:
    """Draw a public seed of 32 bytes that is uniform if one of the parties draws its share honestly."""
    own = secrets.token_bytes(32)
    sent = np.frombuffer(hashlib.sha256(b"treaty hidden seed\0" + own).digest(), np.uint8)
    (committed,) = take((yield [sent]), (np.uint8, (32,)))
    committed = committed.copy()
    (came,) = take((yield [np.frombuffer(own, np.uint8)]), (np.uint8, (32,)))
    if hashlib.sha256(b"treaty hidden seed\0" + came.tobytes()).digest() != committed.tobytes():
        raise CryptoError("expected the share that was committed to")
    if came.tobytes() == own:
        raise CryptoError("expected another share than the own one")
    # in an order that both know
    return hashlib.sha256(b"treaty hidden seed\0" + b"".join(sorted([own, came.tobytes()]))).digest()


def take_start(party: Party, active: str) -> HiddenStart:
    """Let the active party measure the link, then take its start."""
    for _ in range(PROBES + 1):
        if isinstance(message := party.receive(active, LinkProbe, HiddenStart), HiddenStart):
            return message
        assert isinstance(message, LinkProbe)
        party.send(active, LinkEcho(message.filler, 0.0))
    raise PeerProtocolError(active, f"expected HiddenStart, got a probe of the link too many - from {active}")
