"""A system split by column beside the pooled grower, on the same tables: trees and predictions bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from systems.role_inputs import inputs, split_options
from tables import assert_same_trees, real_table
from treaty.data.table import Table, to_table
from treaty.models.trees import ModelPart, predict_pooled
from treaty.runs.threads import play
from treaty.systems.pooled.options import Pooled
from treaty.systems.pooled.system import side_by_side, train
from treaty.systems.system import LabelledRows, Roles, System, star

Frames = Mapping[str, pd.DataFrame]


def train_both(
    system: System,
    frames: Frames,
    y: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    task: str = "binary",
    active: str | None = None,
    watched: Sequence[tuple[Frames, np.ndarray]] = (),
    **given: Any,
) -> tuple[dict[str, ModelPart], ModelPart, dict[str, Table]]:
    """Return the parts of all parties, the pooled model of their tables side by side, and these tables.

    Options `given` are of the system and common ones; the first party is active unless another is named.
    """
    options, common = split_options(given, system.options)
    lead = active or next(iter(frames))
    classes = None if task == "regression" else sorted(set(y.tolist()))
    tables = read(frames)
    evals = [(f"eval_{k}", read(rows, tables), numbered(labels, classes)) for k, (rows, labels) in enumerate(watched)]
    labels = numbered(y, classes)

    def role(party: Any) -> ModelPart:
        name = party.name
        return system.train["active" if name == lead else "passive"](
            inputs(
                party, options, common, active=lead, owners=list(tables),
                data=LabelledRows(tables[name], *((labels, weight) if name == lead else (np.zeros(0),))),
                classes=classes if name == lead else None, n_classes=len(classes or ()),
                eval_sets=[LabelledRows(rows[name], held, None, of) for of, rows, held in evals],
            )
        )  # fmt: skip

    roles = Roles(lead, {name: "active" if name == lead else "passive" for name in tables}, list(tables))
    links = star(roles, options)
    played = play(dict.fromkeys(tables, role), links, job="test", protocol=system.name, timeout=60.0)
    pooled = train(
        inputs(
            None, Pooled(), common, active="pooled", owners=["pooled"], classes=classes,
            data=LabelledRows(side_by_side(tables), labels, weight),
            eval_sets=[LabelledRows(side_by_side(rows), held, None, of) for of, rows, held in evals],
        )
    )  # fmt: skip
    return {name: played.results[name] for name in tables}, pooled, tables


def assert_lossless(parts: dict[str, ModelPart], pooled: ModelPart, tables: Mapping[str, Table]) -> None:
    """Compare trees and predictions of the tables, bit for bit."""
    assert_same_trees(SimpleNamespace(parts_=parts), SimpleNamespace(parts_={"pooled": pooled}))
    margins = predict_pooled(list(parts.values()), list(tables.values()))
    np.testing.assert_array_equal(margins, predict_pooled([pooled], [side_by_side(tables)]))


def read(frames: Frames, like: Mapping[str, Table] | None = None) -> dict[str, Table]:
    """Return tables of frames, with the schemas of others where they are named."""
    return {
        name: to_table(frame, party=name, schema=None if like is None else like[name].schema, allow_no_features=True)
        for name, frame in frames.items()
    }


def numbered(y: np.ndarray, classes: list[Any] | None) -> np.ndarray:
    """Return labels as class numbers, and targets as they are."""
    return y.astype(float) if classes is None else np.searchsorted(classes, y).astype(float)


def unusual_tables() -> dict[str, dict[str, pd.DataFrame]]:
    X, _ = real_table("binary")
    X = X.assign(constant=1.0, nothing=np.nan, half=np.where(np.arange(len(X)) % 2, 1.0, np.nan))
    return {
        "no own features": {"bank": X.iloc[:, :0], "shop": X.iloc[:, :3], "telco": X.iloc[:, 3:6]},
        "one column": {"bank": X.iloc[:, 2:5], "shop": X.iloc[:, :1]},
        "constant and missing": {
            "bank": X[["mean radius", "nothing"]],
            "shop": X[["constant"]],
            "telco": X[["nothing", "mean texture", "half"]],
        },
    }
