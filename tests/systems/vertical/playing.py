"""Play SecureBoost on small real tables with the contents of all messages recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tables import cut, real_table
from treaty.data.table import Table, to_table
from treaty.runs.threads import Played, play
from treaty.systems.pooled.training import Labelled
from treaty.systems.secureboost import roles as secureboost
from treaty.systems.tree_options import TreeOptions

OPTIONS = {"protocol": "secureboost", "insecure_test_key_bits": 512, "n_estimators": 2, "min_child_samples": 5}


def tables_and_labels(parties: int = 3, rows: int = 240) -> tuple[dict[str, Table], np.ndarray]:
    X, y = real_table("binary", rows=rows)
    return {name: to_table(part, party=name) for name, part in cut(X, parties).items()}, y.astype(float)


def play_training(
    tables: dict[str, Table],
    y: np.ndarray,
    *,
    replace: dict[str, Callable[..., Any]] | None = None,
    timeout: float = 30.0,
    progress: Callable[[int, Any], None] | None = None,
    passive_options: dict[str, Any] | None = None,
    **options: Any,
) -> Played:
    """Train with p0 active; `replace` puts another role in a party's place."""
    chosen = TreeOptions(**{**OPTIONS, **options})
    theirs = TreeOptions(**{**OPTIONS, **options, **(passive_options or {})})
    roles: dict[str, Any] = {
        name: lambda party, name=name: secureboost.passive(party, tables[name], theirs) for name in tables
    }
    roles["p0"] = lambda party: secureboost.active(
        party, Labelled(tables["p0"], y), chosen, parties=list(tables), classes=[0, 1], progress=progress
    )
    roles |= replace or {}
    others = [name for name in tables if name != "p0"]
    return play(
        roles, {"p0": others, **{name: ["p0"] for name in others}},
        job="test", protocol="secureboost", timeout=timeout, record_content=True,
    )  # fmt: skip
