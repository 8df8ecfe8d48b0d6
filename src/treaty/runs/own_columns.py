"""What the active party reaches without its partners: the same training on its own columns, for its report."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec

from treaty.errors import TreatyError
from treaty.files import read_json, write_json
from treaty.runs.report import FORMAT, Report, losses_of
from treaty.systems.observers import Observers
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.pooled.system import train
from treaty.systems.system import RoleInput

logger = logging.getLogger(__name__)


def add_own_columns(report: Path, inputs: RoleInput) -> None:
    """Add to the active party's report the metrics of eval sets by round, of trees on its own columns alone.

    Nothing is added for models without trees, eval sets, own columns or exact labels, or that go on from another one.
    """
    common, name = inputs.common, inputs.party.name
    if not isinstance(common, BoostingOptions) or not inputs.eval_sets or inputs.data is None:
        return
    if not inputs.data.table.schema.names or inputs.part is not None or inputs.options.label_epsilon is not None:
        return
    own = msgspec.structs.replace(
        common, monotone_constraints=dict(inputs.directions) or None, interaction_constraints=None
    )
    alone = replace(inputs, options=Pooled(), common=own, keeper=None, observers=Observers())
    try:
        losses = losses_of(train(alone))
    except TreatyError as error:  # the job has ended well all the same
        logger.warning("%s: no model of its own columns alone to compare with: %s", name, error)
        return
    write_json(report, msgspec.structs.replace(read_json(report, Report, FORMAT, name), alone=losses), FORMAT, name)
