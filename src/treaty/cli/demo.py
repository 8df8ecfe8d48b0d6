"""``treaty demo``: organisations with different columns train and predict together; pooled XGBoost is the yardstick."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console
from rich.status import Status
from sklearn.model_selection import train_test_split

from treaty.cli.demo_tables import (
    add_scores,
    add_xgboost,
    load_data,
    print_learned,
    print_training,
    score_grid,
)
from treaty.errors import ConfigError
from treaty.estimators.align import align
from treaty.estimators.trees import GBDTClassifier
from treaty.systems.alignment.roles import disclosures
from treaty.systems.tree_options import tree_options

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
        If there is no such protocol or cipher, a file is named without its label column, or `split` does not fit it.
    """
    given: dict[str, Any] = {}
    if encryption != "auto":
        given["backend" if protocol == "fedxgboost-smm" else "encryption"] = encryption
    tree_options({"protocol": protocol, **given})  # refused before anything is printed
    columns, y = load_data(data, label)
    cut = cut_columns(console, columns.column_names, parties, split)
    columns, y = align_parties(console, columns, y, cut)
    played: dict[str, Any] = {"transport": transport} if protocol != "pooled" else {}
    train, test = train_test_split(np.arange(len(y)), test_size=1 / 3, stratify=y, random_state=0)

    def rows(index: NDArray[np.intp]) -> dict[str, Any]:
        return {party: columns.select(names).take(index) for party, names in cut.items()}

    console.print(f"[bold]{len(train)} rows to train on, {len(test)} held back; {protocol}[/bold]")
    model = GBDTClassifier(protocol, n_estimators=trees, max_bin=32, **given, **played)
    started = time.perf_counter()
    model.fit(rows(train), y[train])
    fitted = time.perf_counter()
    ours = model.predict_proba(rows(test))
    predicted = time.perf_counter()

    scores = score_grid()
    ours_is = f"Treaty, {protocol}, nothing pooled" if protocol != "pooled" else "Treaty, pooled"
    add_scores(scores, ours_is, y[test], ours)
    if protocol != "pooled":
        pooled = GBDTClassifier(n_estimators=trees, max_bin=32).fit(rows(train), y[train]).predict_proba(rows(test))
        same = " (bit for bit the same)" if np.array_equal(pooled, ours) else " (DIFFERENT)"
        exact = protocol in ("secureboost", "fedxgboost-smm")
        add_scores(scores, f"Treaty, pooled table{same if exact else ''}", y[test], pooled)
    add_xgboost(scores, columns, y, train, test, trees)
    console.print(scores)
    print_training(console, model, fitted - started, predicted - fitted)
    lead, *others = cut
    for party, part in model.parts_.items():
        if part.encryption and party == lead:
            console.print(f"encryption: {part.encryption}, {part.choice}", soft_wrap=True)
        if part.spent:
            console.print(f"noise of {party}: {part.spent}", soft_wrap=True)
    aligning = disclosures(lead, others)
    print_learned(console, {party: aligning.get(party, []) + facts for party, facts in model.disclosures_.items()})


def align_parties(
    console: Console, columns: Any, y: NDArray[Any], cut: dict[str, list[str]]
) -> tuple[Any, NDArray[Any]]:
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


def cut_columns(console: Console, names: list[str], parties: int, split: str | None) -> dict[str, list[str]]:
    """Say which party holds which columns, and print it.

    Raises
    ------
    ConfigError
        If there are too few columns, or `split` does not fit them.
    """
    cut = _cut(names, parties, split)
    for party, held in cut.items():
        shown = ", ".join(held[:2]) + (f", ... ({len(held)} columns)" if len(held) > 2 else "")
        console.print(f"  {party:<12} {shown}{' + the label' if party == next(iter(cut)) else ''}")
    return cut


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
