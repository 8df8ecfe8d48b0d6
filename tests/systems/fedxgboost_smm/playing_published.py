"""Play FedXGBoost-SMM as published on small real tables, with the contents of all messages recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from systems.vertical.playing import role_input, star_of
from tables import cut, real_table
from treaty.data.table import Table, to_table
from treaty.messaging.party import Party
from treaty.runs.threads import RunRecord, play
from treaty.systems.fedxgboost_smm import published as paper
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.system import RoleInput

CONSENT = {"mode": "paper", "allow_insecure": True}
OPTIONS = {**CONSENT, "n_estimators": 2, "max_bin": 8, "min_child_samples": 1}


def tables_and_labels(parties: int = 3, rows: int = 200) -> tuple[dict[str, Table], np.ndarray]:
    X, y = real_table("binary", rows=rows)
    return to_tables(cut(X, parties)), y.astype(float)


def to_tables(frames: dict[str, pd.DataFrame]) -> dict[str, Table]:
    return {name: to_table(part, party=name, allow_no_features=True) for name, part in frames.items()}


def paper_seat(party: Party, tables: dict[str, Table], y: np.ndarray, **fields: Any) -> RoleInput:
    """RoleInput a party of paper mode; options are those of `OPTIONS`, changed by `fields["options"]`."""
    given = {**OPTIONS, **fields.pop("options", {})}
    return role_input(party, tables, y, given, FedXGBoostSMM, **fields)


def play_training(
    tables: dict[str, Table],
    y: np.ndarray,
    *,
    replace: dict[str, Callable[..., Any]] | None = None,
    passive_options: dict[str, Any] | None = None,
    **options: Any,
) -> RunRecord:
    """Train with p0 active; `replace` puts another role in a party's place."""
    theirs = {**options, **(passive_options or {})}
    roles: dict[str, Any] = dict.fromkeys(
        tables, lambda party: paper.passive(paper_seat(party, tables, y, options=theirs))
    )
    roles["p0"] = lambda party: paper.active(paper_seat(party, tables, y, options=options))
    roles |= replace or {}
    with threadpool_limits(1, user_api="blas"):  # parties compute side by side
        return play(
            roles, star_of(tables), job="test", protocol="fedxgboost-smm", timeout=30.0, record_content=True
        )  # fmt: skip
