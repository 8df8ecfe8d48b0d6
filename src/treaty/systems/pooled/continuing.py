"""Checkpoints between rounds, in every system, and trainings that continue a finished model with more rounds.

Margins after the earlier trees are those of a prediction: between parties, owners decide all training rows.
"""

from __future__ import annotations

import copy
import secrets

import msgspec

from treaty.errors import ConfigError
from treaty.messaging.messages import Message, leaks
from treaty.models.trees import ModelPart, check_shown, keep_records, records_used
from treaty.systems.leakage import Route, Routes, routes
from treaty.systems.options import CommonOptions, SystemOptions
from treaty.systems.system import RoleInput, System
from treaty.trees.boosting import Forest
from treaty.trees.objectives import Objective


def check_start(system: System, own: SystemOptions, common: CommonOptions, *, goes_on: bool) -> None:
    """Raise ConfigError where training cannot go on from a finished model, or has none whose leaves to refresh."""
    if not goes_on and getattr(common, "refreshes", False):
        raise ConfigError(
            "process_type='update' refreshes the leaves of a finished model: name it by fit(..., xgb_model=MODEL), or "
            "from_model in a job file"
        )
    why = ""
    if system.common.table != "boosting":
        why = "only models of trees can"
    elif system.split == "rows":
        why = "participants know only the margins of the trees that they grow together"
    elif system.split == "columns" and (not system.lossless or own.adds_noise or own.label_epsilon is not None):
        why = "sides of training rows at earlier splits would be shown without the noise"
    elif own.hides_decisions and not own.hides_rows:
        why = 'inference="shared" hides sides of rows, from which the margins of the earlier model follow'
    elif own.mode == "paper" and system.split == "columns":
        why = "the paper has no such training"
    if goes_on and why:
        raise ConfigError(f"cannot continue a finished model with protocol {own.system!r}: {why}")


def after_model(
    inputs: RoleInput, party: str, sources: tuple[str, ...], objective: Objective
) -> tuple[ModelPart, dict[str, int]]:
    """Return a new part with the trees of an earlier model, and how many records of each source these use."""
    earlier, common, rows = inputs.part.forest, inputs.common, inputs.rows
    names = ("n_outputs", "objective", *common.of_loss)
    ours, theirs = ([type(of), *(getattr(of, name, None) for name in names)] for of in (objective, earlier.objective))
    faults = {
        "other parties": earlier.sources != sources,
        "other classes": earlier.classes != inputs.classes,
        "another loss": ours != theirs,
        "another num_parallel_tree": earlier.parallel != common.num_parallel_tree,
        "another base_score": common.base_score is not None and set(earlier.objective.start) != {common.base_score},
        "base_margin, or without": earlier.base_margin != (rows.base_margin is not None),
    }
    if fault := next((what for what, there in faults.items() if there), None):
        raise ConfigError(f"cannot continue a model with {fault}: train as the earlier model was trained")
    if common.refreshes and common.most_rounds != earlier.rounds:
        raise ConfigError(
            f"expected n_estimators = {earlier.rounds}, all rounds of the earlier model, got {common.most_rounds}"
        )
    if common.most_rounds <= earlier.rounds and not common.refreshes:
        raise ConfigError(
            f"expected n_estimators above {earlier.rounds}, the rounds of the earlier model, got {common.most_rounds}"
        )
    # refreshed trees come one round after another
    kept = [] if common.refreshes else list(earlier.trees)
    forest = Forest(
        objective, sources, inputs.classes, kept, base_margin=earlier.base_margin, parallel=earlier.parallel,
        before=len(kept) // earlier.trees_a_round,
    )  # fmt: skip
    records = dict(zip(sources, records_used(earlier.trees, len(sources)), strict=True))
    part = part_after(inputs, party, secrets.token_hex(16), records[party])
    return msgspec.structs.replace(part, forest=forest), records


def part_after(inputs: RoleInput, party: str, model_id: str, n_records: int) -> ModelPart:
    """Return a new part with the first splits of an earlier one, `inputs.part`; ConfigError for other columns."""
    earlier: ModelPart = inputs.part
    if not inputs.options.hides_rows:
        check_shown(earlier)
    if earlier.is_active and (earlier.leaves is not None) != inputs.options.shares_leaves:
        raise ConfigError('cannot continue a model with leaves="shared" without it, nor another one with it')
    if earlier.schema != inputs.rows.table.schema or len(earlier.splits) < n_records:
        raise ConfigError(
            f"{party}: cannot continue a model of other columns, or with {len(earlier.splits)} of {n_records} splits",
            public="its part of the earlier model is of another table, or incomplete",
        )
    splits = copy.deepcopy(earlier.splits)
    keep_records(splits, n_records)
    return ModelPart(
        model_id=model_id, party=party, schema=earlier.schema, splits=splits, trees_a_round=inputs.n_outputs,
        trained=earlier.trained, leaves=earlier.leaves,
    )  # fmt: skip


# ---------------------------------------------------------------- checkpoints


@leaks("how many rounds are finished", "control")
class CheckpointRequest(Message):
    """A round is finished: write a checkpoint of this many rounds."""

    rounds: int


@leaks("that a checkpoint is written, if one is", "control")
class CheckpointReceipt(Message):
    """The checkpoint is written, if the party keeps any."""


def checkpoints_routes(lead: str, others: tuple[str, ...]) -> Routes:
    """Return the routes of checkpoints, which `lead` requests from the `others` between rounds."""
    return routes(
        Route(CheckpointRequest, (lead,), others),
        Route(CheckpointReceipt, others, (lead,)),
        reference="docs/jobs.md, A party's files",
    )
