"""Set-up of a training by row: terms, columns, classes, noise, kept bins, checkpoints.

**Kept bins.** Bins depend on all parties' rows, columns and classes, and on some options, but not on the trees that are
grown on them. Each party keeps them in `NAME.bins` next to ledgers, with digests of its own rows and of all else that
they depend on. A participant's description names, by SHA-256, the bins that it keeps for these very rows, found with
the same participants, leader and options. If all name the same bins, and columns and classes are the same, training
begins with them: no probe, no count and no cut is sent. Under noise the search was paid for when it was made, and is
not paid again. If a file is lost or damaged, or rows have changed, bins are searched and paid for again.

**Checkpoints.** All parties keep their own after the same rounds; the leader's decides which one training resumes from.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from treaty.data.binning import Bins
from treaty.data.columns import Category
from treaty.data.table import Schema
from treaty.errors import ConfigError, PeerProtocolError
from treaty.files import Format, read_cached, write_cached
from treaty.machine.process import stay_on_one_core
from treaty.messaging.exchanges import Term, agree
from treaty.messaging.messages import decode_body, digests_in, encode
from treaty.models.checkpoints import ANEW, Checkpoint, Keeper, checkpoint_file, fingerprint
from treaty.models.trees import keep_records, records_used
from treaty.privacy.ledger import model_job
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal, honest_members
from treaty.systems.federboost_horizontal.trees import StepSender
from treaty.systems.horizontal.held_out import divided
from treaty.systems.horizontal.members import Collector, SumRules
from treaty.systems.horizontal.noisy_rounds import LeafSender
from treaty.systems.horizontal.own_rows import Draws, OwnRows, new_part
from treaty.systems.horizontal.quantiles import CommonBins, agreed_objective, unpack_bins
from treaty.systems.horizontal.rows import (
    ModelBegin,
    OwnLabels,
    RowsDescription,
    all_classes,
    all_columns,
    checkpoint_with,
    common_rows,
    describe,
    no_rows,
    printed_rows,
    schema_of,
)
from treaty.systems.horizontal.sum_noise import SumNoise, pay, plan_noise, within_declared
from treaty.systems.observers import CheckpointReached
from treaty.systems.pooled.continuing import CheckpointReceipt, CheckpointRequest
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import RoundState
from treaty.trees.custom_losses import Custom
from treaty.trees.objectives import Objective

logger = logging.getLogger(__name__)

# Of a participant's table: summing them takes less time than the messages about it
_FEW_CELLS = 1 << 20


# ---------------------------------------------------------------- terms, columns, classes, noise


def sum_rules(options: FederBoostHorizontal) -> SumRules:
    """Return how sums are opened; of two participants each can find the other's histograms from the sum."""
    allow_two = options.mode == "paper" or options.epsilon_total is not None
    return SumRules(recover=options.dropout == "accept", allow_two=allow_two)


def check_members(options: FederBoostHorizontal, members: Sequence[str]) -> None:
    """Refuse too few participants: a sum would show what one of them has, or none could be lost."""
    least = 2 if sum_rules(options).allow_two else 3
    if len(members) < least:
        raise ConfigError(
            f"expected {least} participants with data or more, got {len(members)}: "
            + (
                "of a sum of two each sees the other's part; add noise (epsilon_total), or allow it (mode='paper')"
                if len(members) > 1
                else "one participant's table is trained on under protocol 'pooled'"
            )
        )
    if options.dropout == "accept" and len(members) < 4:
        raise ConfigError(
            f'dropout="accept" continues without a lost participant: expected 4 participants or more, '
            f"got {len(members)}"
        )


def compare_terms(inputs: RoleInput[FederBoostHorizontal]) -> None:
    """Compare options with all others, and bring own rows within the bounds that a job with noise declares."""
    # small tables: threads would cost more than they save
    cells = 0 if inputs.data is None else inputs.data.table.n_rows * len(inputs.data.table.columns)
    if not inputs.alone and cells < _FEW_CELLS:
        stay_on_one_core()
    agree(inputs.party, _terms(inputs))
    check_members(inputs.options, inputs.roles.owners)
    if inputs.data is not None:
        inputs.data = within_declared(inputs.options, inputs.data, inputs.classes, inputs.party.name)


def _terms(inputs: RoleInput) -> dict[str, Term]:
    return {**inputs.public_terms, "participants": list(inputs.roles.owners)}


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Settled before any sum: the leader's message, all parties' columns, the noise, and in words what it cost."""

    message: ModelBegin
    schema: Schema
    noise: SumNoise
    paid: str

    @classmethod
    def of(cls, inputs: RoleInput[FederBoostHorizontal], message: ModelBegin) -> ModelSetup:
        """Plan the training's noise and enter it in the own ledger, before any sum is opened."""
        schema = schema_of(message.names, message.categories, message.origins)
        search = not message.bins
        honest = honest_members(inputs.options, len(inputs.roles.owners))
        noise = plan_noise(inputs.options, inputs.common, schema, message.classes, honest=honest, search=search)
        store, job = None if inputs.data is None else inputs.store, model_job(inputs.party.job, message.model_id)
        return cls(message, schema, noise, pay(noise, store, inputs.party.name, job, inputs.epsilon_limits))

    def first_message(self, inputs: RoleInput) -> bytes:
        """Encode terms and message: masks cancel only between parties that received the same ones."""
        return msgspec.json.encode(_terms(inputs), order="sorted") + encode(self.message)


def agree_on_model(inputs: RoleInput[FederBoostHorizontal]) -> tuple[ModelSetup, Checkpoint | None, KeptBins | None]:
    """As the leader, receive the descriptions, pay for noise, and send all which model begins or is resumed.

    Returns the checkpoint to resume from, and the kept bins that a fresh training uses, if any.
    """
    party, members, data = inputs.party, inputs.roles.owners, inputs.data
    described = {name: party.receive(name, RowsDescription) for name in members if name != party.name}
    own_bins = bins_for_rows(inputs)
    if data is not None:
        described[party.name] = describe(data, inputs.classes, b"".join(own_bins))
    labels = all_classes(described)
    names, categories, origins = all_columns([described[name] for name in members])
    # the leader's checkpoint decides; members bring their own of the same rounds
    found = _leaders_checkpoint(inputs.keeper, noisy=inputs.options.epsilon_total is not None)
    model_id = secrets.token_hex(16) if found is None else found.part.model_id
    rounds = None if found is None else min(found.rounds, inputs.common.most_rounds)
    message = ModelBegin(model_id, names, categories, labels, rounds, origins=origins)
    offers = {n: d.bins for n, d in described.items()}
    kept = None if found is not None else _chosen_bins(inputs, own_bins, offers, message)
    # noise is paid for before any party contributes to a sum
    setup = ModelSetup.of(inputs, message if kept is None else msgspec.structs.replace(message, bins=kept.digest))
    for peer in party.peers:
        party.send(peer, setup.message)
    return setup, found, kept


def leaders_rows(
    inputs: RoleInput[FederBoostHorizontal], setup: ModelSetup
) -> tuple[LabelledRows, LabelledRows | None, list[LabelledRows]]:
    """Return own rows, perhaps none, held-out ones, and eval sets, in the columns and classes of all."""
    name, schema, classes = inputs.party.name, setup.schema, setup.message.classes
    own = None if inputs.data is None else common_rows(inputs.data, schema, inputs.classes, classes, name)
    evals = [common_rows(of, schema, inputs.classes, classes, name) for of in inputs.eval_sets]
    noisy, share = inputs.options.adds_noise, inputs.options.validation_fraction
    return *divided(own or no_rows(schema), share, name, noisy=noisy), evals


def join_model(
    inputs: RoleInput[FederBoostHorizontal],
) -> tuple[LabelledRows, LabelledRows | None, ModelSetup, KeptBins | None]:
    """As a member, describe own rows, bring them to the columns and classes of all, and pay for noise.

    Returns the rows to train on, held-out ones, and the kept bins that the training uses, if any.
    """
    party, lead, data = inputs.party, inputs.roles.active, inputs.rows
    own_bins = bins_for_rows(inputs)
    party.send(lead, describe(data, inputs.classes, b"".join(own_bins)))
    message = party.receive(lead, ModelBegin)
    schema = schema_of(message.names, message.categories, message.origins)
    rows = common_rows(data, schema, inputs.classes, message.classes, party.name)
    if message.rounds is not None and inputs.options.epsilon_total is not None:
        raise ConfigError(
            "cannot resume with epsilon_total: sums would be opened again, at a further cost; start a fresh training"
        )
    kept = None
    if message.bins and message.rounds is None:
        kept = own_bins.get(message.bins)
        if kept is None or kept.terms != _terms_of_bins(inputs, message):
            raise PeerProtocolError(lead, "expected bins that were offered and fit", at="ModelBegin.bins")
    rows, held_out = divided(rows, inputs.options.validation_fraction, party.name, noisy=inputs.options.adds_noise)
    return rows, held_out, ModelSetup.of(inputs, message), kept


def fresh(
    inputs: RoleInput, setup: ModelSetup, rows: LabelledRows, bins: Bins, objective: Objective, spent: str
) -> OwnRows:
    """Return a training without trees."""
    part = new_part(inputs, setup.message.model_id, setup.schema, setup.message.classes, objective, spent)
    return OwnRows.of(inputs, rows, part, bins, Draws.fresh(inputs))


# ---------------------------------------------------------------- kept bins

# Bins that a party keeps; the oldest go first
MOST_KEPT = 16

FORMAT = Format("common-bins", 4)

# Options that bins do not depend on; every other one counts, also those that are added later
FREE_OF_BINS = frozenset({
    "n_estimators", "max_depth", "max_leaves", "num_parallel_tree", "learning_rate", "reg_lambda", "reg_alpha",
    "min_split_loss", "min_child_weight", "max_delta_step", "max_cat_to_onehot", "category_sets", "subsample",
    "colsample_bytree", "goss", "top_rate", "other_rate", "fractional_bits", "early_stopping_rounds",
    "early_stopping_min_delta", "eval_metric", "allow_insecure", "monotone_constraints", "interaction_constraints",
    "multi_strategy", "process_type", "validation_group",
})  # fmt: skip


class KeptBins(msgspec.Struct):
    """Bins that a training has found.

    `rows` are a digest of the own rows; `setting` of options, participants and leader, which are known before any party
    describes its rows; `terms` of all that bins depend on but rows. `bins` is an encoded `CommonBins`. At the leader
    `all_rows` is the number of all rows, and `spent`, in words, what the search showed.
    """

    rows: bytes
    setting: bytes
    terms: bytes
    bins: bytes
    all_rows: int = 0
    spent: str = ""

    @property
    def digest(self) -> bytes:
        """SHA-256 by which parties name them."""
        return hashlib.sha256(b"treaty common bins" + self.terms + self.bins).digest()


class _File(msgspec.Struct):
    entries: list[KeptBins]  # the oldest first


def kept_file(store: Path, party: str) -> Path:
    return checkpoint_file(store, party).with_suffix(".bins")


def bins_for_rows(inputs: RoleInput) -> dict[bytes, KeptBins]:
    """Return by digest the role's kept bins of its very rows, participants, leader and options; the oldest first."""
    # an offer of bins found with other parties would reveal that training
    setting = _setting_of(inputs)
    found = [entry for entry in _read(inputs) if entry.setting == setting]
    rows = _rows_of(inputs) if found else b""
    return {entry.digest: entry for entry in found if entry.rows == rows}


def _chosen_bins(
    inputs: RoleInput, found: Mapping[bytes, KeptBins], offers: Mapping[str, bytes], begin: ModelBegin
) -> KeptBins | None:
    """Return the newest bins that fit the training which `begin` describes, if all participants have offered them."""
    # only bins that every participant has offered
    common = set(found)
    for name, digests in offers.items():
        common &= digests_in(digests, MOST_KEPT, peer=name, what="RowsDescription.bins")
    terms = _terms_of_bins(inputs, begin)
    # terms compare the columns and classes of this very training
    fitting = [entry for digest, entry in found.items() if digest in common and entry.terms == terms]
    return fitting[-1] if fitting else None


def keep_bins(inputs: RoleInput, begin: ModelBegin, bins: CommonBins, *, all_rows: int = 0, spent: str = "") -> None:
    """Keep bins that a search has found, in place of earlier ones on the same terms; without a store, nothing."""
    # bins of a user's own loss are not kept: next time another class, with other bounds, may have its name
    if inputs.store is None or inputs.common.loss_class is Custom:
        return
    terms = _terms_of_bins(inputs, begin)
    new = KeptBins(_rows_of(inputs), _setting_of(inputs), terms, encode(bins), all_rows, spent)
    entries = [entry for entry in _read(inputs) if (entry.rows, entry.terms) != (new.rows, new.terms)]
    name = inputs.party.name
    write_cached(kept_file(inputs.store, name), _File([*entries, new][-MOST_KEPT:]), FORMAT, name)


def on_kept_bins(
    inputs: RoleInput, setup: ModelSetup, rows: LabelledRows, kept: KeptBins
) -> tuple[OwnRows, CommonBins]:
    """Return a training without trees on bins of an earlier one, and the message that it sent."""
    name = inputs.party.name
    message = decode_body(kept.bins, CommonBins, peer=name)
    own = OwnLabels(inputs, rows, setup.message.classes, name).starting(message.start, "CommonBins")
    objective = agreed_objective(message, own, noise=setup.noise.budget is not None, peer=name)
    # sums over all rows must fit into 64 bits with these gradients, too
    objective.check_sums(kept.all_rows)
    bins = unpack_bins(message, setup.schema, inputs.common.bin_limits, name)
    logger.info("%s: bins of an earlier training are used", name)
    return fresh(inputs, setup, rows, bins, objective, setup.paid or kept.spent), message


def _read(inputs: RoleInput) -> list[KeptBins]:
    if inputs.store is None:
        return []
    name = inputs.party.name
    kept = read_cached(kept_file(inputs.store, name), _File, FORMAT, name)
    return [] if kept is None else kept.entries[-MOST_KEPT:]


def _rows_of(inputs: RoleInput) -> bytes:
    """Digest own rows, labels and weights, which bound gradients; of a leader without rows, nothing."""
    data = inputs.data
    if data is None:
        return b""
    y, classes = data.y, inputs.classes or ()
    if classes:
        present, number = np.unique(y, return_inverse=True)
        # the same rows have one digest, whatever other classes the job has: in threads those of all parties are known
        y, classes = number.astype(np.float64), [classes[int(k)] for k in present]
    return fingerprint([(data.table, (y, data.weight))], classes)


def _setting_of(inputs: RoleInput) -> bytes:
    """Digest the options, participants and leader that bins depend on."""
    options = {name: value for name, value in inputs.public_terms.items() if name not in FREE_OF_BINS}
    return _digest([options, inputs.roles.active, inputs.roles.owners])


def _terms_of_bins(inputs: RoleInput, begin: ModelBegin) -> bytes:
    """Digest all that bins depend on but rows: the setting, and the columns and classes of all."""
    return _digest([_setting_of(inputs).hex(), begin.names, begin.categories, begin.classes, begin.origins])


def _digest(content: object) -> bytes:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).digest()


# ---------------------------------------------------------------- checkpoints


class SharedCheckpoints:
    """When all parties write a checkpoint; `printed` is the fingerprint of this party's rows and eval sets."""

    def __init__(self, inputs: RoleInput, rows: Sequence[LabelledRows], classes: list[Category] | None) -> None:
        self._inputs = inputs
        self.printed = b"" if inputs.keeper is None else printed_rows(rows, classes)

    def request(
        self, collector: Collector, steps: StepSender | LeafSender, own: OwnRows, bins: CommonBins, rounds: int
    ) -> None:
        """As the leader, have all parties write a checkpoint if one is due."""
        if self._inputs.keeper is not None and self._inputs.keeper.due:
            began = time.perf_counter()
            # members keep the round that the checkpoint is of, so they must have it
            steps.flush()
            collector.broadcast(CheckpointRequest(rounds))
            collector.receive_all(CheckpointReceipt)
            self._write(own, bins, rounds, began)

    def answer(self, own: OwnRows, bins: CommonBins, due: CheckpointRequest) -> None:
        """As a member, write the checkpoint that the leader asks for."""
        lead, rounds = self._inputs.roles.active, own.forest.rounds
        if due.rounds != rounds:
            raise PeerProtocolError(lead, f"expected {rounds} rounds, got {due.rounds}", at="CheckpointRequest")
        self._write(own, bins, rounds)
        self._inputs.party.send(lead, CheckpointReceipt())

    def _write(self, own: OwnRows, bins: CommonBins, rounds: int, began: float | None = None) -> None:
        state, given = RoundState(rounds, own.shard.margins.copy(), own.draws.state), self._inputs.given
        event = CheckpointReached(lambda: checkpoint_with(own.part, given, self.printed, state, bins), began)
        self._inputs.observers.event(event)


def _leaders_checkpoint(keeper: Keeper | None, *, noisy: bool) -> Checkpoint | None:
    """Return the leader's checkpoint, if it has one; refuse one of a member, and any under noise."""
    found = None if keeper is None else keeper.found()
    if found is None:
        return None
    if Draws.kept(found.random_state or "[null, 0]").rng is None:
        raise ConfigError(
            f"{found.part.party}: cannot resume as the leader: its checkpoint is of a training that another party led; "
            f"set active back to that party, or {ANEW}",
            public="it cannot resume as the leader: another party led the training of its checkpoint",
        )
    if noisy:
        raise ConfigError(
            "cannot resume with epsilon_total: sums opened since the checkpoint would be opened again, at a further "
            "cost; start a fresh training without these checkpoints, which costs a whole epsilon_total again"
        )
    return found


def resumed(
    inputs: RoleInput,
    found: Checkpoint,
    rounds: int,
    rows: LabelledRows,
    printed: bytes,
    bins: CommonBins | None = None,
) -> OwnRows:
    """Resume a training after `rounds` rounds; the checkpoint's later trees are dropped.

    Raises ConfigError if the checkpoint is of other options, parties or rows (`printed` is their `fingerprint`), and
    PeerProtocolError if the leader sent other `bins`.
    """
    name, part, leader = inputs.party.name, found.part, inputs.roles.active
    found.check(inputs.given, inputs.may_change, (name,), printed)
    # rounds that another party did not keep are grown again
    part.grown.cut(rounds)
    keep_records(part.splits, records_used(part.grown.trees, 1)[0])
    kept = unpack_bins(decode_body(found.bins, CommonBins, peer=name), part.schema, inputs.common.bin_limits, name)
    own = OwnRows.of(inputs, rows, part, kept, Draws.kept(found.random_state or ""))
    if bins is not None and found.bins != encode(bins):
        raise PeerProtocolError(leader, "bins differ from the checkpoint's", at="CommonBins")
    return own
