"""Play SecureBoost on small real tables with the contents of all messages recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from systems.role_inputs import inputs, split_options
from tables import cut, real_table
from treaty.data.table import Table, to_table
from treaty.messaging.party import Party
from treaty.runs.threads import RunRecord, play
from treaty.systems.options import SystemOptions
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import LabelledRows, RoleInput, Roles, star

OPTIONS = {"insecure_test_key_bits": 512, "allow_insecure": True, "n_estimators": 2, "min_child_samples": 5}


def tables_and_labels(parties: int = 3, rows: int = 240) -> tuple[dict[str, Table], np.ndarray]:
    X, y = real_table("binary", rows=rows)
    return {name: to_table(part, party=name) for name, part in cut(X, parties).items()}, y.astype(float)


def role_input(
    party: Party,
    tables: Mapping[str, Table],
    y: np.ndarray,
    given: Mapping[str, Any],
    kind: type[SystemOptions] = SecureBoost,
    **fields: Any,
) -> RoleInput:
    """RoleInput a party, p0 being active with the labels; options `given` are of all kinds, by name."""
    options, common = split_options(given, kind)
    if party.name in tables:
        labels = {"classes": [0, 1]} if party.name == "p0" else {}
        own = LabelledRows(tables[party.name], y if party.name == "p0" else np.zeros(0))
        fields = {"data": own, **labels, **fields}
    return inputs(party, options, common, active="p0", owners=list(tables), **fields)


def star_of(tables: Mapping[str, Table], *helpers: str) -> dict[str, list[str]]:
    """Link p0 with all others, and helpers without data with everybody."""
    roles = Roles("p0", dict.fromkeys([*tables, *helpers], "passive"), list(tables))
    return star(roles, SecureBoost())


def play_training(
    tables: dict[str, Table],
    y: np.ndarray,
    *,
    replace: dict[str, Callable[..., Any]] | None = None,
    timeout: float = 30.0,
    progress: Callable[[int, Any], None] | None = None,
    passive_options: dict[str, Any] | None = None,
    **options: Any,
) -> RunRecord:
    """Train with p0 active; `replace` puts another role in a party's place."""
    chosen = {**OPTIONS, **options}
    theirs = {**chosen, **(passive_options or {})}
    roles: dict[str, Any] = dict.fromkeys(
        tables, lambda party: secureboost.passive(role_input(party, tables, y, theirs))
    )
    roles["p0"] = lambda party: secureboost.active(role_input(party, tables, y, chosen, progress=progress))
    roles |= replace or {}
    return play(
        roles, star_of(tables), job="test", protocol="secureboost", timeout=timeout, record_content=True
    )  # fmt: skip
