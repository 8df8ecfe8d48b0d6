"""``treaty demo``: organisations on this machine train and predict together; the pooled XGBoost is the yardstick."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console
from rich.status import Status
from rich.table import Table as Grid
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import train_test_split

from treaty.aligning import align
from treaty.data.labels import check_labels
from treaty.data.sources import read_table
from treaty.errors import ConfigError
from treaty.estimators import GBDTClassifier
from treaty.protocols.alignment import disclosures

MOST_CLASSES = 50
_ID, _LABEL = "treaty demo id", "treaty demo label"
_NAMES = ("clinic", "laboratory", "imaging", *(f"partner{i}" for i in range(4, 11)))


def run_demo(
    console: Console,
    *,
    protocol: str,
    parties: int,
    data: str,
    label: str | None,
    split: str | None,
    transport: str,
    trees: int,
    encryption: str,
) -> None:
    """Train, predict on held-back rows, and print what came of it.

    Raises
    ------
    ConfigError
        If a file is named without its label column, or `split` does not fit it.
    """
    columns, y = _load(data, label)
    cut = _cut(columns.column_names, parties, split)
    for party, names in cut.items():
        shown = ", ".join(names[:2]) + (f", ... ({len(names)} columns)" if len(names) > 2 else "")
        console.print(f"  {party:<12} {shown}{' + the label' if party == next(iter(cut)) else ''}")
    columns, y = _aligned(console, columns, y, cut)
    own: dict[str, Any] = {"transport": transport} if protocol != "pooled" else {}
    if encryption != "auto":
        own["encryption"] = encryption
    train, test = train_test_split(np.arange(len(y)), test_size=1 / 3, stratify=y, random_state=0)

    def rows(index: NDArray[np.intp]) -> dict[str, Any]:
        return {party: columns.select(names).take(index) for party, names in cut.items()}

    console.print(f"[bold]{len(train)} rows to train on, {len(test)} held back; {protocol}[/bold]")
    model = GBDTClassifier(protocol, n_estimators=trees, max_bin=32, **own)
    started = time.perf_counter()
    model.fit(rows(train), y[train])
    fitted = time.perf_counter()
    ours = model.predict_proba(rows(test))
    predicted = time.perf_counter()

    scores = Grid(title="On the held-back rows", title_justify="left")
    for heading in ("", "AUC", "log-loss"):
        scores.add_column(heading, justify="left" if not heading else "right")
    _add_scores(
        scores, f"Treaty, {protocol}, nothing pooled" if protocol != "pooled" else "Treaty, pooled", y[test], ours
    )
    if protocol != "pooled":
        pooled = GBDTClassifier(n_estimators=trees, max_bin=32).fit(rows(train), y[train]).predict_proba(rows(test))
        same = "bit for bit the same" if np.array_equal(pooled, ours) else "DIFFERENT"
        _add_scores(scores, f"Treaty, pooled table ({same})", y[test], pooled)
    theirs = _xgboost(columns, y, train, test, trees)
    if theirs is not None:
        _add_scores(scores, "XGBoost, pooled table (no least leaf size)", y[test], theirs)
    console.print(scores)
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in model.timings_.items() if name != "total")
    console.print(f"training {fitted - started:.1f} s ({phases}), prediction {predicted - fitted:.1f} s")
    _print_traffic(console, model)
    lead, *others = cut
    if protocol != "pooled":
        part = model.parts_[lead]
        console.print(f"encryption: {part.encryption}, {part.choice}", soft_wrap=True)
    console.print("\n[bold]What each party learned[/bold]")
    aligning = disclosures(lead, others)
    for party, facts in model.disclosures_.items():
        for fact in [*aligning.get(party, []), *facts]:
            console.print(f"  {party:<12} {fact}", soft_wrap=True)


def _load(data: str, label: str | None) -> tuple[Any, NDArray[Any]]:
    """Return the columns as an arrow table, and the labels."""
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


def _aligned(console: Console, columns: Any, y: NDArray[Any], cut: dict[str, list[str]]) -> tuple[Any, NDArray[Any]]:
    """Give the rows ids, each party some of them in an order of its own, and find the common rows again.

    Returns
    -------
    columns, y
        Of the rows all parties hold, in the common order.
    """
    ids = np.array([f"person-{number:07d}" for number in range(len(y))])
    rng = np.random.default_rng(0)
    tables = {}
    for party, names in cut.items():
        held = rng.permutation(len(y))[: -(-len(y) * 19 // 20)]
        tables[party] = columns.select(names).take(held).append_column(_ID, pa.array(ids[held]))
        if party == next(iter(cut)):
            tables[party] = tables[party].append_column(_LABEL, pa.array(y[held]))
    started = time.perf_counter()
    with Status("finding the rows all parties hold", console=console):
        found = align(tables, on=_ID)
    seconds = time.perf_counter() - started
    sizes = ", ".join(f"{party} {table.num_rows}" for party, table in tables.items())
    whole = pa.table({name: found[party][name] for party, names in cut.items() for name in names})
    y = found[next(iter(cut))][_LABEL].to_numpy()
    console.print(
        f"[bold]private set intersection: {len(y)} rows that all hold, of {sizes}; {seconds:.1f} s[/bold]",
        soft_wrap=True,
    )
    return whole, y


def _check_cut(groups: list[list[str]], names: list[str]) -> None:
    used = [name for group in groups for name in group]
    unknown = [name for name in used if name not in names]
    if unknown:
        raise ConfigError(f"expected --split 'a,b/c,d' over columns of the file, got unknown {', '.join(unknown)}")
    if len(set(used)) < len(used):
        raise ConfigError("expected --split to name every column once")
    if not 2 <= len(groups) <= len(_NAMES) or not all(groups[1:]):
        raise ConfigError(f"expected --split to name the columns of 2 to {len(_NAMES)} parties, got {len(groups)}")


def _cut(names: list[str], parties: int, split: str | None) -> dict[str, list[str]]:
    """Say which party holds which columns."""
    if split is None:
        if len(names) < parties:
            raise ConfigError(f"expected at least a column for each of {parties} parties, got {len(names)} columns")
        edges = [len(names) * k // parties for k in range(parties + 1)]
        return {_NAMES[k]: names[edges[k] : edges[k + 1]] for k in range(parties)}
    groups = [[name.strip() for name in group.split(",") if name.strip()] for group in split.split("/")]
    _check_cut(groups, names)
    return dict(zip(_NAMES, groups, strict=False))


def _add_scores(grid: Grid, title: str, y: NDArray[Any], probabilities: NDArray[np.float64]) -> None:
    if probabilities.shape[1] == 2:
        auc = roc_auc_score(y, probabilities[:, 1])
    else:
        auc = roc_auc_score(y, probabilities, multi_class="ovr")
    grid.add_row(title, f"{auc:.4f}", f"{log_loss(y, probabilities):.4f}")


def _xgboost(columns: Any, y: NDArray[Any], train: Any, test: Any, trees: int) -> NDArray[np.float64] | None:
    """Train XGBoost on the pooled table with the same settings, where it is installed."""
    try:
        from xgboost import XGBClassifier
    except ImportError:
        return None
    frame = columns.rename_columns([f"f{k}" for k in range(columns.num_columns)]).to_pandas()
    classes, codes = np.unique(y, return_inverse=True)
    booster = XGBClassifier(
        n_estimators=trees, max_depth=3, learning_rate=0.3, max_bin=32, tree_method="hist", enable_categorical=True,
        base_score=0.5 if len(classes) == 2 else None,
    )  # fmt: skip
    booster.fit(frame.iloc[train], codes[train])
    p = np.asarray(booster.predict_proba(frame.iloc[test]), np.float64)
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def _print_traffic(console: Console, model: GBDTClassifier) -> None:
    if not model.communication_:
        return
    grid = Grid(title="Bytes sent while training", title_justify="left")
    for heading in ("from -> to", "messages", "MB", "mostly"):
        grid.add_column(heading, justify="right" if heading in ("messages", "MB") else "left")
    for pair, totals in model.communication_.items():
        largest = max(totals["by_type"], key=totals["by_type"].get)
        grid.add_row(pair, str(totals["messages"]), f"{totals['bytes'] / 1e6:.2f}", largest)
    console.print(grid)
