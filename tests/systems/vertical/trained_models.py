"""Models of several parties, grown without encryption, and prediction with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from systems.role_inputs import inputs
from tables import cut, real_table, with_categories, with_gaps
from treaty.data.table import Table, to_table
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.runs.threads import RunRecord, play
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import objective_for, own_columns
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Boosting, Forest
from treaty.trees.columns import grow_trees
from treaty.trees.ensemble import SplitTable

CLASSES = {"binary": [0, 1], "multiclass": [0, 1, 2], "regression": None}


def split_table(task: str, parties: int, rows: int = 240, dirty: bool = False) -> tuple[dict[str, pd.DataFrame], Any]:
    """Return a real table cut by column; `dirty` with missing values and categories."""
    X, y = real_table(task, rows=rows)
    return cut(with_gaps(with_categories(X)) if dirty else X, parties), y.astype(float)


def grow(
    frames: Mapping[str, pd.DataFrame], y: np.ndarray, task: str, **options: Any
) -> tuple[dict[str, ModelPart], dict[str, Table]]:
    """Grow the trees every lossless protocol grows; p0 is active. Return all parts, and the tables."""
    own = SecureBoost()
    common = BoostingOptions(**{"n_estimators": 5, "min_child_samples": 2, **options}).checked(own)
    tables = {name: to_table(frame, party=name, allow_no_features=True) for name, frame in frames.items()}
    objective = objective_for(LabelledRows(tables["p0"], y), CLASSES[task], own, common)
    forest = Forest(objective, tuple(tables), CLASSES[task])
    splits = {name: SplitTable() for name in tables}
    sources = [own_columns(table, common, splits[name], 1) for name, table in tables.items()]
    rules = common.rules(objective)
    n_columns = sum(len(source.categorical) for source in sources)
    grow_trees(Boosting(y, None, forest, rules, common.plan(n_columns)), sources)
    parts = {
        name: ModelPart(
            model_id="model", party=name, schema=tables[name].schema, splits=splits[name],
            forest=forest if name == "p0" else None, trees_a_round=objective.n_outputs,
        )
        for name in tables
    }  # fmt: skip
    return parts, tables


def take(tables: Mapping[str, Table], rows: slice) -> dict[str, Table]:
    """Return some rows of every table."""
    return {
        name: Table(table.schema, [column[rows] for column in table.columns], len(range(table.n_rows)[rows]))
        for name, table in tables.items()
    }


def at(
    program: Callable[[RoleInput], Any],
    parts: Mapping[str, ModelPart],
    tables: Mapping[str, Table],
    options: SystemOptions | None = None,
    **fields: Any,
) -> Callable[[Party], Any]:
    """Return a role: the program at the inputs of whichever party plays it, with that party's part and rows."""
    lead = next(iter(tables))
    return lambda party: program(
        inputs(
            party, options or SecureBoost(), active=lead, owners=list(tables), part=parts[party.name],
            data=LabelledRows(tables[party.name], np.zeros(0)), **fields,
        )
    )  # fmt: skip


def predict(
    active: Callable[[Party], Any],
    passive: Callable[[Party], Any],
    names: Sequence[str],
    replace: Mapping[str, Callable[[Party], Any]] | None = None,
    timeout: float = 20.0,
) -> RunRecord:
    """Play the roles, the first party being active, with the contents of all messages recorded."""
    lead, *others = names
    roles = dict.fromkeys(names, passive) | {lead: active} | dict(replace or {})
    links = {lead: others, **{name: [lead] for name in others}}
    return play(roles, links, job="test", protocol="secureboost", timeout=timeout, record_content=True)
