"""Both ends of the search for where a horizontal job's trees start, and for its bins.

`horizontal.start` and `horizontal.quantiles` say what is summed, and what that shows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from treaty.data.binning import Bins
from treaty.data.columns import Category
from treaty.data.quantile_search import sorted_keys
from treaty.errors import PeerProtocolError
from treaty.files import Format, read_cached, write_cached
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import decode_body, digests_in, encode_body
from treaty.models.checkpoints import checkpoint_file, fingerprint
from treaty.systems.federboost_horizontal.noise import SEARCH_ROUNDS, SumNoise
from treaty.systems.horizontal.members import Collector, Membership
from treaty.systems.horizontal.quantiles import (
    CommonBins,
    Count,
    LabelUnits,
    Opening,
    OwnLabels,
    ProbeRequest,
    TrainingStart,
    agreed_start,
    answer_probes,
    choose_bins,
    most_rounds,
    told_by_search,
)
from treaty.systems.horizontal.rows import ModelBegin
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.losses.custom import Custom
from treaty.trees.objectives import Objective


@dataclass(frozen=True, slots=True)
class FoundBins:
    """What a search ends with: bins, and the loss with bounds that hold for the gradients of all of so many rows.

    `spent` says in words how small the groups were that the search parted, or what all noise of the training costs.
    """

    bins: Bins
    objective: Objective
    all_rows: int
    spent: str


def agree_on_bins(
    inputs: RoleInput, collector: Collector, rows: LabelledRows, classes: list[Category] | None, noise: SumNoise
) -> FoundBins:
    """As the leader, with own `rows`: open the number of rows, the start and bounds, then search for bins."""
    common, has_rows, schema = inputs.common, inputs.data is not None, rows.table.schema
    labels = OwnLabels(inputs, rows, classes, inputs.party.name)
    opening = Opening(schema, bounds=labels.n_bounds if noise.budget is None else 0)
    own = opening.of(rows.table, labels.bounds)
    while True:
        collector.tell_all(Count())
        opened = collector.total(opening.length, noise.on_opening(own) if has_rows else None)
        cohort = collector.summed
        objective = agreed_start(
            labels, opening, opened, lambda own, length: collector.total(length, own), collector.tell_all,
            has_rows=has_rows,
        )  # fmt: skip
        all_rows = opening.rows(opened)
        objective.check_sums(all_rows)
        bins, smallest = choose_bins(
            lambda own, length: collector.total(length, own if own is None else noise.on_search(own)),
            collector.tell_all, opening, opened, schema, common.most_bins, own=rows.table if has_rows else None,
            least_rows=common.fewest_rows, most_rounds=_search_rounds(noise, schema.origins), threads=inputs.threads,
        )  # fmt: skip
        if collector.summed == cohort:  # sums with and without a lost member do not fit together
            break
    if noise.budget is not None:
        return FoundBins(bins, objective, all_rows, str(noise.budget))
    fewest = int(smallest[smallest > 0].min(initial=all_rows))
    spent = told_by_search(fewest)
    return FoundBins(bins, objective, all_rows, spent)


def answer_search(
    inputs: RoleInput,
    sums: Membership,
    order: MessageOrder,
    rows: LabelledRows,
    labels: OwnLabels,
    noise: SumNoise,
) -> CommonBins:
    """Take part in the search for a start and for bins, until the leader tells them.

    Raises PeerProtocolError when the leader restarts although nobody was lost, or asks for more than a search takes.
    """
    leader, max_bin, threads = inputs.roles.active, inputs.common.most_bins, inputs.threads
    opening = Opening(rows.table.schema, bounds=labels.n_bounds if noise.budget is None else 0)
    ordered = sorted_keys([rows.table.columns[f] for f in opening.numeric], threads)
    rounds, cohort = 0, frozenset[str]()
    while True:
        match sums.next(order):
            case Count():
                if sums.member.there == cohort:
                    raise PeerProtocolError(leader, f"expected one search for bins - at Count from {leader}")
                rounds, cohort = _search_rounds(noise, rows.table.schema.origins), sums.member.there
                sums.give(noise.on_opening(opening.of(rows.table, labels.bounds)))
            case LabelUnits() | TrainingStart() as told:  # never under noise
                sums.give(labels.answer(told))
            case ProbeRequest() as asked:
                if rounds == 0:
                    raise PeerProtocolError(leader, f"expected no more probes - at ProbeRequest from {leader}")
                rounds -= 1
                sums.give(noise.on_search(answer_probes(asked, ordered, max_bin, leader, threads)))
            case CommonBins() as bins:
                return bins


def _search_rounds(noise: SumNoise, origins: Mapping[str, int]) -> int:
    """Return how many rounds the search for quantiles may take."""
    return most_rounds(origins) if noise.budget is None else SEARCH_ROUNDS


# ----------------------------------------------------------------
# Common bins of earlier trainings, which each party keeps, so that a later one on the same rows needs no search.
#
# Bins depend on everybody's rows, columns and classes, and on some options, but not on the trees that are grown on
# them. So each party keeps, in `NAME.bins` beside ledgers, the bins as all were told them, with digests of its own rows
# and of all else that they depend on. A participant's description names, by SHA-256, the bins that it keeps for its
# very rows and were found with the same participants, leader and options; of other trainings it says nothing. If all
# name one, and columns and classes are the same, the training begins with it: no probe, no count and no cut is sent.
# Under noise the search was paid for when it was made, and is not paid again.
#
# Where a file is lost or damaged, or anybody's rows have changed, bins are searched for anew, and paid for anew.

logger = logging.getLogger(__name__)

MOST_KEPT = 16
"""Bins that a party keeps, of as many numbers of bins, say. The oldest go first."""

FORMAT = Format("common-bins", 4)

FREE_OF_BINS = frozenset({
    "n_estimators", "max_depth", "learning_rate", "reg_lambda", "reg_alpha", "min_split_loss", "min_child_weight",
    "max_delta_step", "max_cat_to_onehot", "subsample", "colsample_bytree", "goss", "top_rate", "other_rate",
    "fractional_bits", "early_stopping_rounds", "eval_metric", "allow_insecure",
})  # fmt: skip
"""Options that bins do not depend on; every other one counts, also those that are added later."""


class KeptBins(msgspec.Struct):
    """Bins that a training has found.

    `rows` are a digest of the own rows; `setting` of options, participants and leader, which are known before anybody
    describes its rows; `terms` of all that bins depend on but rows. `bins` is an encoded `CommonBins`.
    At the leader `all_rows` says how many rows all had, and `spent`, in words, what the search showed.
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

    def told(self, name: str) -> CommonBins:
        """Return the bins as they were told; `name` is the party that keeps them."""
        return decode_body(self.bins, CommonBins, peer=name)


class _File(msgspec.Struct):
    """The oldest first."""

    entries: list[KeptBins]


def kept_file(store: Path, party: str) -> Path:
    """Return where a party keeps bins."""
    return checkpoint_file(store, party).with_suffix(".bins")


def bins_for_rows(inputs: RoleInput) -> dict[bytes, KeptBins]:
    """Return by digest the role's kept bins of its very rows, participants, leader and options; the oldest first.

    Bins of trainings with others are left out, so that what is offered tells nothing of these.
    """
    setting = _setting_of(inputs)
    found = [entry for entry in _read(inputs) if entry.setting == setting]
    rows = _rows_of(inputs) if found else b""
    return {entry.digest: entry for entry in found if entry.rows == rows}


def offered(found: Mapping[bytes, KeptBins]) -> bytes:
    """Return what a participant's description says of bins that it has kept."""
    return b"".join(found)


def chosen_bins(
    inputs: RoleInput, found: Mapping[bytes, KeptBins], offers: Mapping[str, bytes], begin: ModelBegin
) -> KeptBins | None:
    """Return the newest bins that fit the training which `begin` describes, if all participants have offered them."""
    common = set(found)
    for name, digests in offers.items():
        common &= digests_in(digests, MOST_KEPT, peer=name, what="RowsDescription.bins")
    terms = _terms_of(inputs, begin)
    fitting = [entry for digest, entry in found.items() if digest in common and entry.terms == terms]
    return fitting[-1] if fitting else None


def agreed_bins(inputs: RoleInput, found: Mapping[bytes, KeptBins], begin: ModelBegin) -> KeptBins:
    """Return the bins that the leader names; PeerProtocolError where they were not offered, or are of other terms."""
    kept = found.get(begin.bins)
    if kept is None or kept.terms != _terms_of(inputs, begin):
        leader = inputs.roles.active
        raise PeerProtocolError(leader, f"expected bins that were offered and fit - at ModelBegin.bins from {leader}")
    return kept


def keep_bins(inputs: RoleInput, begin: ModelBegin, told: CommonBins, *, all_rows: int = 0, spent: str = "") -> None:
    """Keep bins that a search has found, in place of earlier ones on the same terms; without a store, nothing.

    Nothing, too, of a loss of one's own: next time its class may be another one under its name, with other bounds.
    """
    if inputs.store is None or inputs.common.loss_class is Custom:
        return
    new = KeptBins(_rows_of(inputs), _setting_of(inputs), _terms_of(inputs, begin), encode_body(told), all_rows, spent)
    entries = [entry for entry in _read(inputs) if (entry.rows, entry.terms) != (new.rows, new.terms)]
    name = inputs.party.name
    write_cached(kept_file(inputs.store, name), _File([*entries, new][-MOST_KEPT:]), FORMAT, name)


def _read(inputs: RoleInput) -> list[KeptBins]:
    if inputs.store is None:
        return []
    name = inputs.party.name
    kept = read_cached(kept_file(inputs.store, name), _File, FORMAT, name)
    return [] if kept is None else kept.entries[-MOST_KEPT:]


def _rows_of(inputs: RoleInput) -> bytes:
    """Digest own rows, labels and weights, which bound gradients; of a leader without rows, nothing.

    Labels count as the classes that own rows are of: in threads those of all parties are known, a file has its own.
    """
    data = inputs.data
    if data is None:
        return b""
    y, classes = data.y, inputs.classes or ()
    if classes:
        present, number = np.unique(y, return_inverse=True)
        y, classes = number.astype(np.float64), [classes[int(k)] for k in present]
    return fingerprint([(data.table, (y, data.weight))], classes)


def _setting_of(inputs: RoleInput) -> bytes:
    """Digest what bins depend on and all know beforehand: options, participants and leader."""
    options = {name: value for name, value in inputs.public_terms.items() if name not in FREE_OF_BINS}
    return _digest([options, inputs.roles.active, inputs.roles.owners])


def _terms_of(inputs: RoleInput, begin: ModelBegin) -> bytes:
    """Digest what bins depend on besides rows: the setting, and everybody's columns and classes."""
    return _digest([_setting_of(inputs).hex(), begin.names, begin.categories, begin.classes, begin.origins])


def _digest(content: object) -> bytes:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).digest()
