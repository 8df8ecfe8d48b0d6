"""``treaty demo`` among users: many with a few rows each, edge servers, and a server that alone gets the model."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table as Grid
from sklearn.model_selection import train_test_split

from treaty.cli.demo_tables import (
    add_scores,
    add_xgboost,
    load_data,
    print_learned,
    score_grid,
)
from treaty.errors import ConfigError
from treaty.estimators.trees import GBDTClassifier
from treaty.runs.crowds import lay_out
from treaty.systems.tree_options import tree_options

_OF_EACH_EDGE = 4


def run_crowd_demo(
    console: Console,
    *,
    edges: int,
    data: str,
    label: str | None,
    transport: Literal["memory", "grpc"],
    trees: int,
) -> None:
    """Train, predict on held-back rows, and print what came of it.

    Raises
    ------
    ConfigError
        If a file is named without its label column, or there are too few rows or edge servers.
    """
    users = [f"user{k}" for k in range(1, _OF_EACH_EDGE * edges + 1)]
    layout = lay_out(users, tree_options({"protocol": "fedxgb", "edges": edges}))
    columns, y = load_data(data, label)
    train, test = train_test_split(np.arange(len(y)), test_size=1 / 3, stratify=y, random_state=0)
    if len(train) < len(users):
        raise ConfigError(f"expected a row for each of {len(users)} users, got {len(train)} rows to train on")
    own = {
        u: (columns.take(index), y[index]) for u, index in zip(users, np.array_split(train, len(users)), strict=True)
    }
    sizes = [len(labels) for _, labels in own.values()]
    for edge, of_edge in layout.domains.items():
        console.print(f"  {edge:<12} {', '.join(of_edge)}")
    console.print(f"  each user has {min(sizes)} to {max(sizes)} rows, {columns.num_columns} columns + the label")
    console.print(f"[bold]{len(train)} rows to train on, {len(test)} held back; fedxgb[/bold]")
    held_back = columns.take(test)
    model = GBDTClassifier("fedxgb", n_estimators=trees, edges=edges, transport=transport)
    model.fit(own)
    started = time.perf_counter()
    ours = model.predict_proba(held_back)
    predicted = time.perf_counter()

    scores = score_grid()
    add_scores(scores, "Treaty, fedxgb, nothing pooled", y[test], ours)
    pooled = GBDTClassifier(n_estimators=trees).fit(columns.take(train), y[train]).predict_proba(held_back)
    add_scores(scores, "Treaty, pooled table", y[test], pooled)
    add_xgboost(scores, columns, y, train, test, trees)
    console.print(scores)
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in model.timings_.items() if name != "total")
    console.print(
        f"training {model.timings_['total']:.1f} s ({phases}), prediction {predicted - started:.1f} s at the server"
    )
    console.print(_bytes(model, {**layout.roles, layout.authority: "authority"}))
    print_learned(console, model.disclosures_)


def _bytes(model: GBDTClassifier, roles: dict[str, str]) -> Grid:
    """Return what each role sent to each: of all its parties together, and of one on average."""
    members = {role: sum(other == role for other in roles.values()) for role in roles.values()}
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for pair, totals in model.communication_.items():
        sender, _, receiver = pair.partition(" -> ")
        messages, size = sums.get((roles[sender], roles[receiver]), (0, 0))
        sums[roles[sender], roles[receiver]] = messages + totals["messages"], size + totals["bytes"]
    grid = Grid(title="Bytes sent while training", title_justify="left")
    for heading in ("from -> to", "messages", "MB", "MB of each sender"):
        grid.add_column(heading, justify="left" if heading == "from -> to" else "right")
    for (sender, receiver), (messages, size) in sums.items():
        grid.add_row(
            f"{members[sender]} {sender} -> {members[receiver]} {receiver}", str(messages), f"{size / 1e6:.2f}",
            f"{size / members[sender] / 1e6:.2f}",
        )  # fmt: skip
    return grid
