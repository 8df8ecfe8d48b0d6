"""Hidden models for tests: small ones, and predictions of theirs with every role in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from systems.federboost_horizontal.playing import pooled_on
from systems.fedxgb.playing import options_of, role_input
from tables import real_table, with_categories, with_gaps
from treaty.data.binning import fit_bins
from treaty.data.table import Table, to_table
from treaty.messaging.messages import encode
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, RowPredictions, predict_pooled
from treaty.runs.prediction import predict_hidden
from treaty.runs.threads import RunRecord, play
from treaty.systems.fedxgb import prediction as secpred
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.pieces import Layout
from treaty.systems.fedxgb.prediction import QueryRecord
from treaty.systems.fedxgb.secpred import layout_of
from treaty.systems.horizontal.quantiles import pack_bins
from treaty.systems.system import LabelledRows, RoleInput, Roles
from treaty.trees.slots import VALUE_BITS

USERS = ["ann", "ben", "cat"]


@cache
def trained(task: str, n_estimators: int = 3, max_depth: int = 3) -> tuple[ModelPart, pd.DataFrame]:
    """Return a model with rounded leaf values, as a crowd's server has it, and rows that it has not seen."""
    X, y = real_table(task, rows=170)
    X = with_categories(X)
    X.iloc[:, [1, 4]] = with_gaps(X.iloc[:, [1, 4]])
    rows, new = X.iloc[:110], X.iloc[110:].copy()
    new = with_gaps(new, 0.1, seed=5)
    new.iloc[::7, 0] = "z"  # a category that no row of the training has
    table = to_table(rows)
    classes = None if task == "regression" else sorted(set(y.tolist()))
    labels = y[:110].astype(np.float64) if classes is None else np.searchsorted(classes, y[:110]).astype(np.float64)
    options = options_of(n_estimators=n_estimators, max_depth=max_depth, min_child_samples=2, max_bin=8)
    bins = fit_bins(table, 8, 1)
    forest, splits = pooled_on(bins, LabelledRows(table, labels), options, classes)
    for tree in forest.trees:
        tree.value[:] = np.rint(tree.value * 2.0**VALUE_BITS) / 2.0**VALUE_BITS
    told = encode(pack_bins(bins, forest.objective))
    part = ModelPart(model_id="m", party="pooled", schema=table.schema, splits=splits, forest=forest, bins=told)
    return part, new


def shards(part: ModelPart, new: pd.DataFrame) -> dict[str, Table]:
    """Deal new rows out unevenly."""
    ends = [0, 9, 10, len(new)]
    return {
        name: to_table(new.iloc[a:b], schema=part.schema) for name, a, b in zip(USERS, ends[:-1], ends[1:], strict=True)
    }


def role_of(
    party: Party, *, edges: int = 3, users: Iterable[str] = USERS, patience: float = 10.0,
    part: ModelPart | None = None, rows: Table | None = None, **options: Any,
) -> RoleInput[FedXGB]:  # fmt: skip
    """Return what a role is given in a prediction by models as `trained` makes them; `rows` are a user's."""
    chosen = {"comparison": "shamir", "max_queries": 1000, "n_estimators": 20, "max_depth": 4, **options}
    roles = {"server": "server", **{f"edge{k}": "edge" for k in range(edges)}, **dict.fromkeys(users, "user")}
    who = Roles("server", roles, list(users))
    return role_input(party, options_of(**chosen), who, patience=patience, part=part, read=lambda schema: rows)


def play_prediction(
    part: ModelPart,
    tables: Mapping[str, Table],
    *,
    edges: int = 3,
    roles: Mapping[str, Callable[[Party], object]] | None = None,
    record_content: bool = False,
    patience: float = 10.0,
    records: Mapping[str, QueryRecord] | None = None,
    **agreed: Any,
) -> RunRecord:
    """Play a prediction; `roles` play in place of the honest ones, `agreed` are options besides those of `role_of`."""
    names, given = [f"edge{k}" for k in range(edges)], {"edges": edges, "users": tables, "patience": patience, **agreed}
    programs: dict[str, Callable[[Party], object]] = {
        "server": lambda party: secpred.server(role_of(party, part=part, **given))
    }
    programs |= {
        name: lambda party: secpred.edge(role_of(party, **given), (records or {}).get(party.name) or QueryRecord(None))
        for name in names
    }
    programs |= {name: lambda party: secpred.user(role_of(party, rows=tables[party.name], **given)) for name in tables}
    links = {"server": names, **dict.fromkeys(tables, names)}
    links |= {name: ["server", *(e for e in names if e != name), *tables] for name in names}
    return play(
        programs | dict(roles or {}), links, job="job", protocol="fedxgb", timeout=20.0, record_content=record_content
    )


def predict(part: ModelPart, tables: Mapping[str, Table], *, store: Path | None = None, **own: Any) -> Any:
    """Return users' margins as `predict_hidden` does, under these options of FedXGB."""
    return predict_hidden(part, tables, FedXGB(**own), store=store, n_jobs=1)


def assert_plain(
    part: ModelPart, tables: Mapping[str, Table], found: Mapping[str, np.ndarray | RowPredictions]
) -> None:
    for name, table in tables.items():
        margins = found[name].margins if isinstance(found[name], RowPredictions) else found[name]
        assert np.array_equal(margins, predict_pooled([part], [table])), name


def layout(part: ModelPart) -> Layout:
    bins = secpred.unpack_bins(
        secpred.decode_body(part.bins, secpred.CommonBins, peer="x"), part.schema, (255, 255), "x"
    )
    return layout_of(bins, np.ones(len(bins.n_bins), np.bool_))
