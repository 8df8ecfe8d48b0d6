"""Training on one plain table as a system: boosted trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from treaty.data.table import Schema, Table
from treaty.errors import DataError
from treaty.messaging.messages import Message, MessageLeakage
from treaty.models.trees import ModelPart
from treaty.systems.leakage import Route, Routes, routes
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.pooled.training import train
from treaty.systems.system import PartySpec, RoleInput, Roles, System

ALONE = "pooled"
"""Name of the only party."""

DISCLOSED = {ALONE: ["everything: all columns and labels are in one place"]}


def train_alone(tables: Mapping[str, Table], inputs: RoleInput) -> dict[str, ModelPart]:
    """Train on all tables side by side with the role's labels; its eval sets are side by side already."""
    inputs.data = replace(inputs.rows, table=side_by_side(tables))
    return {ALONE: train(inputs)}


def side_by_side(tables: Mapping[str, Table]) -> Table:
    """Put tables side by side, the party's name in front of each column's where there are several."""
    if len(tables) == 1:
        return next(iter(tables.values()))
    names = tuple(f"{party}.{name}" for party, table in tables.items() for name in table.schema.names)
    if len(set(names)) < len(names):
        raise DataError("expected unique names of columns, got two that are the same as 'party.column'; rename a party")
    return Table(
        schema=Schema(
            names,
            tuple(kind for table in tables.values() for kind in table.schema.categories),
            {f"{party}.{name}": of for party, table in tables.items() for name, of in table.schema.origins.items()},
        ),
        columns=[column for table in tables.values() for column in table.columns],
        n_rows=next(iter(tables.values())).n_rows,
    )


def in_one_place(places: Mapping[str, PartySpec], active: str, options: Pooled) -> Roles:
    return Roles(active, dict.fromkeys(places, ALONE), list(places))


TREES = System(
    name="pooled",
    options=Pooled,
    common=BoostingOptions,
    split="none",
    train={},
    assign=in_one_place,
    conclusions=lambda roles, options, common, part: DISCLOSED,
    has_model=frozenset({ALONE}),
    alone=train_alone,
)


# ---------------------- checkpoint messages, which every system's leading party and the others exchange between rounds


class CheckpointRequest(Message):
    """A round is finished: write a checkpoint. Tells how many rounds there are."""

    leakage: ClassVar = MessageLeakage("how many rounds are finished", "control")

    rounds: int


class CheckpointReceipt(Message):
    """The checkpoint is written, if one is."""

    leakage: ClassVar = MessageLeakage("that a checkpoint is written, if one is", "control")


# ----------------------------------- what messages about checkpoints tell, in every system whose parties exchange them


def checkpoints_routes(lead: str, others: tuple[str, ...]) -> Routes:
    """Return the lines of checkpoints, which `lead` asks the `others` for between rounds."""
    return routes(
        Route(CheckpointRequest, (lead,), others),
        Route(CheckpointReceipt, others, (lead,)),
        reference="docs/jobs.md, A party's files",
    )
