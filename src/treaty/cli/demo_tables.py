"""What demos share: data to cut among parties, the yardstick, and what is printed of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Grid
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss, roc_auc_score

from treaty.data.labels import check_labels
from treaty.data.sources import read_table
from treaty.errors import ConfigError
from treaty.estimators.linear import LogisticRegression
from treaty.estimators.trees import GBDTClassifier

MOST_CLASSES = 50


def load_data(data: str, label: str | None) -> tuple[Any, NDArray[Any]]:
    """Return the columns as an arrow table, and the labels.

    Parameters
    ----------
    data : str
        "breast", scikit-learn's, or a file.
    label : str or None
        The file's label column.

    Raises
    ------
    ConfigError
        If a file is named without its label column, or with one that cannot be predicted.
    """
    if data == "breast":
        if label is not None:
            raise ConfigError("the built-in data has its own label; leave out --label, or name a file with --data")
        bunch = load_breast_cancer()
        names = [str(name) for name in bunch.feature_names]
        return pa.table({name: bunch.data[:, k] for k, name in enumerate(names)}), bunch.target
    if label is None:
        raise ConfigError(f"which column of {data} is the label? Add --label NAME")
    table = read_table(Path(data), party=data)
    if label not in table.column_names:
        raise ConfigError(f"expected the label to be one of {', '.join(table.column_names)}, got {label!r}")
    columns = table.drop_columns([label])
    for k, field in enumerate(columns.schema):  # a file's text columns become categories
        if str(field.type) in ("string", "large_string"):
            columns = columns.set_column(k, field.name, columns.column(k).combine_chunks().dictionary_encode())
    y = check_labels(table[label].to_numpy(), data)
    classes, counts = np.unique(y, return_counts=True)
    if len(classes) < 2 or len(classes) > MOST_CLASSES or counts.min() < 3:
        raise ConfigError(
            f"expected a label of 2 to {MOST_CLASSES} classes of at least 3 rows, got {len(classes)} classes, the "
            f"smallest of {counts.min()} rows - in column {label!r} of {data}"
        )
    return columns, y


def score_grid() -> Grid:
    """Return the empty table of scores."""
    grid = Grid(title="On the held-back rows", title_justify="left")
    for heading in ("", "AUC", "log-loss"):
        grid.add_column(heading, justify="left" if not heading else "right")
    return grid


def add_scores(grid: Grid, title: str, y: NDArray[Any], probabilities: NDArray[np.float64]) -> None:
    """Add what a model's probabilities (n_rows, n_classes) are worth."""
    if probabilities.shape[1] == 2:
        auc = roc_auc_score(y, probabilities[:, 1])
    else:
        auc = roc_auc_score(y, probabilities, multi_class="ovr")
    grid.add_row(title, f"{auc:.4f}", f"{log_loss(y, probabilities):.4f}")


def add_xgboost(grid: Grid, columns: Any, y: NDArray[Any], train: Any, test: Any, trees: int) -> None:
    """Add XGBoost trained on the pooled table with the same settings, where it is installed."""
    try:
        from xgboost import XGBClassifier
    except ImportError:
        return
    frame = columns.rename_columns([f"f{k}" for k in range(columns.num_columns)]).to_pandas()
    classes, codes = np.unique(y, return_inverse=True)
    booster = XGBClassifier(
        n_estimators=trees, max_depth=3, learning_rate=0.3, max_bin=32, tree_method="hist", enable_categorical=True,
        base_score=0.5 if len(classes) == 2 else None,
    )  # fmt: skip
    booster.fit(frame.iloc[train], codes[train])
    p = np.asarray(booster.predict_proba(frame.iloc[test]), np.float64)
    add_scores(
        grid, "XGBoost, pooled table (no least leaf size)", y[test], np.asarray(p / p.sum(axis=1, keepdims=True))
    )


def print_training(
    console: Console, model: GBDTClassifier | LogisticRegression, training: float, prediction: float
) -> None:
    """Print seconds, of training and prediction and per phase, and bytes per pair of parties."""
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in model.timings_.items() if name != "total")
    console.print(f"training {training:.1f} s ({phases}), prediction {prediction:.1f} s")
    if not model.communication_:
        return
    grid = Grid(title="Bytes sent while training", title_justify="left")
    for heading in ("from -> to", "messages", "MB", "mostly"):
        grid.add_column(heading, justify="right" if heading in ("messages", "MB") else "left")
    for pair, totals in model.communication_.items():
        largest = max(totals["by_type"], key=totals["by_type"].get)
        grid.add_row(pair, str(totals["messages"]), f"{totals['bytes'] / 1e6:.2f}", largest)
    console.print(grid)


def print_learned(console: Console, learned: dict[str, list[str]]) -> None:
    """Print in words what each party learned."""
    console.print("\n[bold]What each party learned[/bold]")
    for party, facts in learned.items():
        for fact in facts:
            console.print(f"  {party:<12} {fact}", soft_wrap=True)
