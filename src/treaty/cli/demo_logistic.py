"""``treaty demo --model logistic``: organisations with different columns fit one logistic regression together."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from sklearn.linear_model import LogisticRegression as TheirRegression
from sklearn.model_selection import train_test_split

from treaty.cli.demo import align_parties, cut_columns
from treaty.cli.demo_tables import (
    add_scores,
    load_data,
    print_learned,
    print_training,
    score_grid,
)
from treaty.data.table import to_table
from treaty.errors import ConfigError
from treaty.estimators.linear import LogisticRegression
from treaty.linear.batches import fewest_rows
from treaty.models.linear import preparation_of
from treaty.systems.alignment.roles import disclosures

_EPOCHS = 60
LEAST_HELD_BACK = 20


def run_logistic_demo(
    console: Console,
    *,
    protocol: str,
    parties: int,
    data: str,
    label: str | None,
    split: str | None,
    transport: str,
    encryption: str,
) -> None:
    """Train, predict on held-back rows, and print what came of it.

    Raises
    ------
    ConfigError
        If a file is named without its label column, with one of more than two classes, `split` does not fit it, or the
        parties have too few rows in common for a batch.
    """
    columns, y = load_data(data, label)
    if len(np.unique(y)) != 2:
        raise ConfigError(f"logistic regression is of two classes, got {len(np.unique(y))} in {label!r}; leave --model")
    cut = cut_columns(console, columns.column_names, parties, split)
    columns, y = align_parties(console, columns, y, cut)
    least = 0 if protocol == "pooled" else _fewest_rows({party: columns.select(names) for party, names in cut.items()})
    train, test = train_test_split(np.arange(len(y)), test_size=_held_back(len(y), least), stratify=y, random_state=0)

    def rows(index: NDArray[np.intp]) -> dict[str, Any]:
        return {party: columns.select(names).take(index) for party, names in cut.items()}

    own: dict[str, Any] = {"max_iter": _EPOCHS, "random_state": 0, "batch_size": max(least, min(1000, len(train) // 4))}
    played: dict[str, Any] = {"transport": transport} if protocol != "pooled" else {}
    if encryption != "auto":
        played["encryption"] = encryption
    console.print(
        f"[bold]{len(train)} rows to train on, {len(test)} held back; {protocol}, batches of {own['batch_size']}[/bold]"
    )
    model = LogisticRegression(protocol, **own, **played)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rows have a margin beyond 4")  # of so few rows some always have
        started = time.perf_counter()
        model.fit(rows(train), y[train])
        fitted = time.perf_counter()
        ours = model.predict_proba(rows(test))
        predicted = time.perf_counter()
        solver = None if protocol == "pooled" else protocol
        pooled = LogisticRegression("pooled", solver=solver, **own).fit(rows(train), y[train])

    scores = score_grid()
    if protocol != "pooled":
        add_scores(scores, f"Treaty, {protocol}, nothing pooled", y[test], ours)
    apart = max(np.abs(model.parts_[name].coef - pooled.parts_[name].coef).max(initial=0.0) for name in cut)
    same = "" if protocol == "pooled" else f" (weights within {apart:.0e})"
    add_scores(scores, f"Treaty, pooled table{same}", y[test], pooled.predict_proba(rows(test)))
    _add_theirs(scores, columns, y, train, test)
    console.print(scores)
    console.print(f"{model.n_iter_} epochs, mean Taylor loss {model.loss_history_[-1]:.4f} in the last")
    print_training(console, model, fitted - started, predicted - fitted)
    lead, *others = cut
    aligning = disclosures(lead, others)
    print_learned(console, {party: aligning.get(party, []) + facts for party, facts in model.disclosures_.items()})


def _fewest_rows(tables: dict[str, Any]) -> int:
    """Return the fewest rows of a batch that the guard of labels lets pass."""
    of_guest, *of_hosts = (preparation_of(to_table(table)).n_columns for table in tables.values())
    return max(fewest_rows(of_guest + 1, of_labels=False), fewest_rows(sum(of_hosts), of_labels=True))


def _held_back(n_rows: int, least: int) -> int:
    """Return how many rows are not trained on: a third, or what a first batch leaves.

    Raises
    ------
    ConfigError
        If it leaves hardly any.
    """
    third, left = -(-n_rows // 3), n_rows - least
    if left < min(third, LEAST_HELD_BACK):
        raise ConfigError(
            f"expected {least + LEAST_HELD_BACK} rows that all hold, enough for a batch of these columns and some to "
            f"hold back, got {n_rows}: name fewer --parties, or fewer columns in --split"
        )
    return min(third, left)


def _add_theirs(scores: Any, columns: Any, y: NDArray[Any], train: NDArray[Any], test: NDArray[Any]) -> None:
    """Add scikit-learn's, of the same prepared columns in one place, with the exact loss and its own penalty."""
    table = to_table(columns)
    learnt = preparation_of(to_table(columns.take(train)))
    prepared = learnt.matrix(table.columns, table.n_rows)
    theirs = TheirRegression(max_iter=1000).fit(prepared[train], y[train])
    add_scores(scores, "scikit-learn's LogisticRegression, pooled table", y[test], theirs.predict_proba(prepared[test]))
