"""``treaty demo`` by row: hospitals with patients of their own train together, and are compared with training alone."""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from sklearn.model_selection import train_test_split

from treaty.cli.demo_tables import (
    add_scores,
    add_xgboost,
    load_data,
    print_learned,
    print_training,
    score_grid,
)
from treaty.data.table import to_table
from treaty.estimators.trees import GBDTClassifier
from treaty.systems.federboost_horizontal.roles import check_members
from treaty.systems.tree_options import tree_options

_NAMES = ("north", "south", "east", "west", *(f"hospital{i}" for i in range(5, 11)))


def run_rows_demo(
    console: Console,
    *,
    protocol: str,
    parties: int,
    data: str,
    label: str | None,
    transport: Literal["memory", "grpc"],
    trees: int,
) -> None:
    """Train, predict on held-back rows, and print what came of it.

    Raises
    ------
    ConfigError
        If a file is named without its label column, or the hospitals are too few for sums to hide anything.
    """
    names = _NAMES[:parties]
    check_members(tree_options({"protocol": protocol}), names)
    columns, y = load_data(data, label)
    train, test = train_test_split(np.arange(len(y)), test_size=1 / 3, stratify=y, random_state=0)
    cut = dict(zip(names, _cut(columns.take(train), parties), strict=True))
    own = {name: (columns.take(train[index]), y[train[index]]) for name, index in cut.items()}
    for name, (_, labels) in own.items():
        console.print(f"  {name:<12} {len(labels)} rows, {columns.num_columns} columns + the label")
    console.print(f"  (more of those with small {columns.column_names[0]} at {names[0]}: no two see the same people)")
    console.print(f"[bold]{len(train)} rows to train on, {len(test)} held back; {protocol}[/bold]")
    held_back = columns.take(test)
    model = GBDTClassifier(protocol, n_estimators=trees, transport=transport)
    started = time.perf_counter()
    model.fit(own)
    fitted = time.perf_counter()
    ours = model.predict_proba(held_back)
    predicted = time.perf_counter()

    scores = score_grid()
    add_scores(scores, f"Treaty, {protocol}, nothing pooled", y[test], ours)
    for name, (table, labels) in own.items():
        if len(np.unique(labels)) == len(model.classes_):
            alone = GBDTClassifier(n_estimators=trees).fit(table, labels).predict_proba(held_back)
            add_scores(scores, f"Treaty, {name} alone", y[test], alone)
        else:
            scores.add_row(f"Treaty, {name} alone: has not all classes", "-", "-")
    pooled = GBDTClassifier(n_estimators=trees).fit(columns.take(train), y[train]).predict_proba(held_back)
    add_scores(scores, "Treaty, pooled table", y[test], pooled)
    add_xgboost(scores, columns, y, train, test, trees)
    console.print(scores)
    print_training(console, model, fitted - started, predicted - fitted)
    print_learned(console, model.disclosures_)


def _cut(columns: Any, parties: int) -> list[NDArray[np.intp]]:
    """Deal rows out by chance and by the first column, so that parties' rows differ in kind, as organisations' do."""
    ranks = np.argsort(np.argsort(to_table(columns.select([0])).columns[0]))
    chance = np.random.default_rng(0).random(len(ranks))
    return np.array_split(np.argsort(ranks / len(ranks) + chance), parties)
