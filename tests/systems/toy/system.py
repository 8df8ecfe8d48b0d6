"""A system as somebody else would add it: boosting on other parties' bins in the clear.

Everything a system needs is in this file: a class of options, a program for each role, what each role learns and each
message tells, and the record that names them. Predictions ask owners for the side of rows at their splits, as those of
other systems do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import fit_bins
from treaty.errors import ConfigError
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, record_split
from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, routes
from treaty.systems.options import AtLeastOne, SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import begin, own_columns
from treaty.systems.system import PartySpec, RoleInput, Roles, System
from treaty.systems.vertical.leakage import PREDICT
from treaty.systems.vertical.prediction import predict_active, predict_passive
from treaty.trees.boosting import Boosting
from treaty.trees.columns import ColumnSource, grow_trees
from treaty.trees.ensemble import SplitTable


@dataclass(kw_only=True, repr=False)
class Toy(SystemOptions):
    """Boosting on bins in the clear.

    Parameters
    ----------
    most_columns : int or None, default None
        Passive parties send this many columns, the first ones; None: all.
    """

    system: ClassVar[str] = "systems.toy.system:SYSTEM"
    most_columns: AtLeastOne | None = None

    def check(self, common: Any) -> None:
        """Refuse options that do not go together."""
        if common.goss:
            raise ConfigError("the toy has no goss")


@leaks("every row's bin of every column", "exact", guard="most_columns")
class ToyBins(Message):
    """Codes uint8 (n_rows, n_columns), int32 number of bins and bool kind of each column."""

    codes: Array
    n_bins: Array
    categorical: Array


@leaks("which of its own columns and bins were chosen", "exact")
class ToySplits(Message):
    """Columns int32 (k,) of the splits that trees use, and bool (k, 256) which bins go left."""

    model_id: str
    features: Array
    left_bins: Array


def active(inputs: RoleInput) -> ModelPart:
    """Train on own columns and the bins that the others send."""
    party, data, common = inputs.party, inputs.rows, inputs.common
    agree(party, {**inputs.public_terms, "training rows": data.table.n_rows})
    training = begin(inputs, party.name, tuple(inputs.roles.owners))
    forest = training.forest
    chosen: dict[str, list[tuple[int, NDArray[np.bool_]]]] = {name: [] for name in inputs.others}
    sources = [
        own_columns(data.table, common, training.part.splits, inputs.threads)
        if name == party.name
        else _their_columns(party, name, data.table.n_rows, chosen[name])
        for name in inputs.roles.owners
    ]
    rules = common.rules(forest.objective)
    plan = common.plan(sum(len(source.categorical) for source in sources))
    boosting = Boosting(
        data.y, data.weight, forest, rules, plan, threads=inputs.threads,
        on_round=lambda state: inputs.observers.round_finished(state.rounds, training.part),
    )  # fmt: skip
    grow_trees(boosting, sources)
    for name, splits in chosen.items():
        features = np.array([feature for feature, _ in splits], np.int32)
        left = np.array([left for _, left in splits], np.bool_).reshape(-1, 256)
        party.send(name, ToySplits(training.part.model_id, Array.of(features), Array.of(left)))
    return training.part


def _their_columns(party: Party, peer: str, n_rows: int, chosen: list[tuple[int, NDArray[np.bool_]]]) -> ColumnSource:
    """Make a peer's bins a source of sums that notes which of its splits are chosen."""
    message = party.receive(peer, ToyBins)
    n_bins = view(message.n_bins, np.int32, (None,), peer=peer, what="ToyBins.n_bins")
    codes = view(message.codes, np.uint8, (n_rows, len(n_bins)), peer=peer, what="ToyBins.codes")
    categorical = view(message.categorical, np.bool_, (len(n_bins),), peer=peer, what="ToyBins.categorical")

    def record(feature: int, left_bins: NDArray[np.bool_]) -> int:
        chosen.append((feature, left_bins.copy()))
        return len(chosen) - 1

    offsets = np.concatenate([[0], np.cumsum(n_bins + 1)]).astype(np.int32)
    return ColumnSource(codes, offsets, categorical, record, 1)


def passive(inputs: RoleInput) -> ModelPart:
    """Send bins, then record the splits that were chosen."""
    party, table, lead = inputs.party, inputs.rows.table, inputs.roles.active
    agree(party, {**inputs.public_terms, "training rows": table.n_rows})
    bins = fit_bins(table, inputs.common.max_bin, inputs.threads)
    sent = slice(inputs.options.most_columns)
    codes = np.ascontiguousarray(bins.transform(table, inputs.threads)[:, sent])
    categorical = np.array(table.schema.categorical, np.bool_)[sent]
    party.send(lead, ToyBins(Array.of(codes), Array.of(np.diff(bins.offsets)[sent] - 1), Array.of(categorical)))
    told = party.receive(lead, ToySplits)
    part = ModelPart(model_id=told.model_id, party=party.name, schema=table.schema, splits=SplitTable())
    features = view(told.features, np.int32, (None,), peer=lead, what="ToySplits.features")
    left_bins = view(told.left_bins, np.bool_, (len(features), 256), peer=lead, what="ToySplits.left_bins")
    for feature, left in zip(features, left_bins, strict=True):
        record_split(part.splits, bins, int(feature), left)
    inputs.observers.round_finished(inputs.common.n_estimators, part)
    return part


def roles(places: Mapping[str, PartySpec], active: str, options: Toy) -> Roles:
    """Give the party with labels its role, and all others theirs."""
    other = [name for name, place in places.items() if place.role or not place.has_rows]
    if other or len(places) < 2:
        raise ConfigError(f"the toy has parties with rows alone, two or more, got {', '.join(other) or len(places)}")
    return Roles(active, {name: "active" if name == active else "passive" for name in places}, list(places))


def conclusions(roles: Roles, options: Toy, common: BoostingOptions, part: Any) -> dict[str, list[str]]:
    """Return what each party can work out besides what messages tell it."""
    return {roles.active: ["the order of all rows in every column"]}


BINS_AND_SPLITS = routes(
    Route(ToyBins, PASSIVE, ACTIVE),
    Route(ToySplits, ACTIVE, PASSIVE),
)

SYSTEM = System(
    name="toy",
    options=Toy,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive},
    assign=roles,
    conclusions=conclusions,
    routes={
        "train": routes(AGREEMENT, BINS_AND_SPLITS, reference="docs/jobs.md, A system of your own"),
        "predict": PREDICT,
    },
    has_model=frozenset({"active", "passive"}),
    predict={"active": predict_active, "passive": predict_passive},
)
