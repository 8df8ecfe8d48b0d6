"""Data for demos: a table, cut among parties by column or by row, and the scores that are printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Grid
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss, r2_score, roc_auc_score

from treaty.data.labels import check_labels
from treaty.data.sources import read_table, refuse_strays, with_categories
from treaty.data.table import to_table
from treaty.errors import ConfigError

MOST_CLASSES = 50
OWNERS = ("clinic", "laboratory", "imaging", *(f"partner{i}" for i in range(4, 11)))
ORGANISATIONS = ("north", "south", "east", "west", *(f"hospital{i}" for i in range(5, 11)))


def load_data(data: str, label: str | None, ids: str | None) -> tuple[Any, NDArray[Any]]:
    """Return the columns as an arrow table, and the labels: of "breast", scikit-learn's, or of a file.

    A file's columns `ids`, with commas between, are left out. Its label is a target, float64, where it has more numbers
    than `MOST_CLASSES`, or any that is not whole; otherwise labels are classes.

    Raises
    ------
    ConfigError
        If a file is named without its label column, or with one that cannot be predicted, or if it lacks a column.
    """
    if data == "breast":
        if label is not None or ids is not None:
            raise ConfigError("the built-in data has its label and no ids; leave --label and --id out, or name --data")
        bunch = load_breast_cancer()
        names = [str(name) for name in bunch.feature_names]
        return pa.table({name: bunch.data[:, k] for k, name in enumerate(names)}), bunch.target
    if label is None:
        raise ConfigError(f"which column of {data} is the label? Add --label NAME")
    table = read_table(Path(data), party=data)
    if label not in table.column_names:
        raise ConfigError(f"expected the label to be one of {', '.join(table.column_names)}, got {label!r}")
    left_out = [] if ids is None else [ids] if ids in table.column_names else _names(ids)
    unknown = [name for name in left_out if name not in table.column_names or name == label]
    if unknown:
        raise ConfigError(f"expected --id to name columns of {data} besides the label, got {', '.join(unknown)}")
    columns = table.drop_columns([label, *left_out])
    refuse_strays(columns, data, "the demo", features=columns.column_names, remedy="put a letter before each")
    columns = with_categories(columns)
    y = check_labels(table[label].to_numpy(), data)
    if y.dtype.kind in "iuf":
        numbers = y.astype(np.float64)
        if len(np.unique(numbers)) > MOST_CLASSES or (numbers != np.floor(numbers)).any():
            return columns, numbers
        y = numbers.astype(np.int64)
    classes, counts = np.unique(y, return_counts=True)
    if len(classes) < 2 or len(classes) > MOST_CLASSES or counts.min() < 3:
        raise ConfigError(
            f"expected a label of 2 to {MOST_CLASSES} classes of at least 3 rows, got {len(classes)} classes, the "
            f"smallest of {counts.min()} rows - in column {label!r} of {data}"
        )
    return columns, y


def _names(listed: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))


def cut_columns(console: Console, names: list[str], parties: int, split: str | None) -> dict[str, list[str]]:
    """Say which party holds which columns, and print it; `split` is the command's option.

    Raises
    ------
    ConfigError
        If there are too few columns, or `split` does not fit them.
    """
    if split is None:
        if len(names) < parties:
            raise ConfigError(f"expected at least a column for each of {parties} parties, got {len(names)} columns")
        edges = [len(names) * k // parties for k in range(parties + 1)]
        cut = {OWNERS[k]: names[edges[k] : edges[k + 1]] for k in range(parties)}
    else:
        groups = [[name.strip() for name in group.split(",") if name.strip()] for group in split.split("/")]
        _check_cut(groups, names)
        cut = dict(zip(OWNERS, groups, strict=False))
    for party, held in cut.items():
        shown = ", ".join(held[:2]) + (f", ... ({len(held)} columns)" if len(held) > 2 else "")
        console.print(f"  {party:<12} {shown}{' + the label' if party == next(iter(cut)) else ''}")
    return cut


def _check_cut(groups: list[list[str]], names: list[str]) -> None:
    used = [name for group in groups for name in group]
    unknown = [name for name in used if name not in names]
    if unknown:
        raise ConfigError(f"expected --split 'a,b/c,d' over columns of the file, got unknown {', '.join(unknown)}")
    if len(set(used)) < len(used):
        raise ConfigError("expected --split to name every column once")
    if not 2 <= len(groups) <= len(OWNERS) or not all(groups[1:]):
        raise ConfigError(f"expected --split to name the columns of 2 to {len(OWNERS)} parties, got {len(groups)}")


def rows_apart(columns: Any, parties: int) -> list[NDArray[np.intp]]:
    """Deal rows out by chance and by the first column, so that parties' rows differ in kind, as organisations' do."""
    ranks = np.argsort(np.argsort(to_table(columns.select([0])).columns[0]))
    chance = np.random.default_rng(0).random(len(ranks))
    return np.array_split(np.argsort(ranks / len(ranks) + chance), parties)


def is_target(y: NDArray[Any]) -> bool:
    """Tell whether labels of `load_data` are numbers to predict, not classes."""
    return bool(y.dtype.kind == "f")


def score_grid(y: NDArray[Any]) -> Grid:
    """Return the empty table of scores of these labels."""
    grid = Grid(title="On the held-back rows", title_justify="left")
    for heading in ("", *(("R2", "RMSE") if is_target(y) else ("AUC", "log-loss"))):
        grid.add_column(heading, justify="left" if not heading else "right")
    return grid


def add_scores(grid: Grid, title: str, y: NDArray[Any], probabilities: NDArray[np.float64]) -> None:
    """Add what a model's probabilities (n_rows, n_classes) are worth, or its predictions (n_rows,) of a target."""
    if is_target(y):
        error = np.sqrt(np.mean((y - probabilities) ** 2))
        grid.add_row(title, f"{r2_score(y, probabilities):.4f}", f"{error:.4g}")
        return
    if probabilities.shape[1] == 2:
        auc = roc_auc_score(y, probabilities[:, 1])
    else:
        auc = roc_auc_score(y, probabilities, multi_class="ovr")
    grid.add_row(title, f"{auc:.4f}", f"{log_loss(y, probabilities):.4f}")
