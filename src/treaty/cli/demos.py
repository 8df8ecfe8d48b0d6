"""``treaty demo``: one scenario per way of cutting a table, played by `run_demo` and compared with pooled training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console
from rich.status import Status
from rich.table import Table as Grid
from sklearn.linear_model import LogisticRegression as TheirRegression
from sklearn.model_selection import train_test_split

from treaty.cli.demo_data import ORGANISATIONS, add_scores, cut_columns, is_target, load_data, rows_apart, score_grid
from treaty.data.table import to_table
from treaty.errors import ConfigError
from treaty.estimators.align import align
from treaty.estimators.linear import LogisticRegression
from treaty.estimators.trees import GBDTClassifier, GBDTRegressor
from treaty.linear.batches import fewest_rows
from treaty.machine.process import trust
from treaty.models.linear import label_holder, preparation_of
from treaty.runs.warm_up import compile_kernels, compile_walks
from treaty.systems import SYSTEMS, Model, find_system
from treaty.systems.alignment.leakage import disclosures
from treaty.systems.options import SystemOptions, converted, names_of
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.system import System, roles_of

_ID, _LABEL = "treaty demo id", "treaty demo label"
_USERS_OF_EDGE = 4
_EPOCHS = 60
LEAST_HELD_BACK = 20

Rows = Callable[[NDArray[np.intp]], Any]
"""Returns the parties' tables of some rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a demo trains and compares.

    Attributes
    ----------
    model : GBDTClassifier, GBDTRegressor or LogisticRegression
    pooled : same as `model`
        The same on one table.
    columns : pyarrow.Table
    y : ndarray (n_rows,)
    train, test : int64
        Numbers of the rows to train on, and of those held back.
    given : tuple
        What the model is fitted to: ``(tables, labels)``, or the participants' own rows.
    rows_of : callable
        Returns tables as the model predicts them.
    alone : mapping of str to (table, labels)
        Participants who are also shown with what they would have had alone.
    aligned : list of str
        Parties that aligned their rows first, the active one in front.
    """

    model: Any
    pooled: Any
    columns: Any
    y: NDArray[Any]
    train: NDArray[np.intp]
    test: NDArray[np.intp]
    given: tuple[Any, ...]
    rows_of: Rows
    alone: Mapping[str, tuple[Any, NDArray[Any]]]
    aligned: list[str]


def run_demo(
    console: Console,
    *,
    model: Model,
    protocol: str | None,
    parties: int | None,
    data: str,
    label: str | None,
    ids: str | None,
    split: str | None,
    transport: str | None,
    trees: int | None,
    encryption: str,
    first_time: bool,
    report: Path | None = None,
) -> None:
    """Train between made-up organisations, predict on held-back rows, and print what came of it.

    With `report`, write it to this HTML file, too.
    """
    if protocol not in SYSTEMS[model] and any(protocol in known for known in SYSTEMS.values()):
        hint = "add --model logistic" if model == "trees" else "leave --model out"
        raise ConfigError(f"expected --protocol to be one of {', '.join(SYSTEMS[model])}, got {protocol!r}: {hint}")
    trust([protocol])
    system = find_system(protocol or ("secureboost" if model == "trees" else "quasi-newton"), model)
    cipher = next((name for name in ("encryption", "backend") if name in names_of(system.options)), None)
    named = encryption != "auto"
    unused = {
        "--model logistic has no trees: leave --trees out": trees is not None and model == "logistic",
        f"protocol {system.name!r} sends nothing: leave --transport out": transport and system.split == "none",
        f"protocol {system.name!r} splits rows: use --parties in place of --split": split and system.split == "rows",
        "--split says how many parties there are: leave --parties out": split and parties,
        f"protocol {system.name!r} has no cipher to choose: leave --encryption out": named and not cipher,
    }
    refused = [words for words, given in unused.items() if given]
    if refused:
        raise ConfigError(refused[0])
    options = _options(system, {cipher: encryption} if cipher and named else {}, parties)
    loaded = load_data(data, label, ids)
    rounds = 20 if trees is None else trees
    played = {} if system.split == "none" else {"transport": transport or "memory"}
    if model == "logistic":
        scenario = _regression(console, options, parties or 2, loaded, split, played)
    elif system.split == "rows":
        scenario = _by_row(console, system, options, parties or 3, loaded, rounds, played)
    else:
        scenario = _by_column(console, options, parties or 3, loaded, split, rounds, played)
    if first_time:  # after the alignment, which compiles what it needs, and on the other core is compiled meanwhile
        with Status("the first time: compiling for this processor, for 5 to 20 seconds", console=console):
            if model == "trees":
                compile_walks()
            compile_kernels(system, options, aligns=None)
    _play(console, scenario, system)
    if report is not None:
        _write_report(report, scenario, system)
        console.print(f"wrote {report}", soft_wrap=True, highlight=False)


def _options(system: System, given: dict[str, Any], parties: int | None) -> SystemOptions:
    """Return the system's options, checked; the parties of one with edge servers are these.

    What exact sums give away is accepted, so that they are not sealed, which takes longer: the organisations are made
    up, and all on this machine.
    """
    made_up = {"edges": parties or 3, "allow_exact_sums": True}
    own = converted(
        given | {name: value for name, value in made_up.items() if name in names_of(system.options)},
        system.options,
        system.name,
    )
    own.check(system.common().checked(own))
    return own


# ---------------------------------------------------------------- scenarios


def _models(options: SystemOptions, y: NDArray[Any], trees: int, played: dict[str, Any]) -> dict[str, Any]:
    """Return the model of these labels, and that of one table to compare with: in as many bins as the system's."""
    kind = GBDTRegressor if is_target(y) else GBDTClassifier
    bins = BoostingOptions().checked(options).most_bins
    return {
        "model": kind(options, n_estimators=trees, **played), "pooled": kind(n_estimators=trees, max_bin=bins),
    }  # fmt: skip


def _split(y: NDArray[Any], held_back: float = 1 / 3) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows to train on and those held back, classes in the same shares."""
    classes = None if is_target(y) else y
    train, test = train_test_split(np.arange(len(y)), test_size=held_back, stratify=classes, random_state=0)
    return train, test


def _predicted(model: Any, tables: Any) -> NDArray[np.float64]:
    """Return probabilities (n_rows, n_classes), or predictions (n_rows,) of a target."""
    found = model.predict(tables) if isinstance(model, GBDTRegressor) else model.predict_proba(tables)
    return np.asarray(found, np.float64)


def _by_column(
    console: Console,
    options: SystemOptions,
    parties: int,
    data: tuple[Any, NDArray[Any]],
    split: str | None,
    trees: int,
    played: dict[str, Any],
) -> Scenario:
    """Organisations with different columns of the same rows, some of which each lacks."""
    cut = cut_columns(console, data[0].column_names, parties, split)
    columns, y = _aligned(console, *data, cut)
    train, test = _split(y)
    rows_of = _tables_of(columns, cut)
    return Scenario(
        **_models(options, y, trees, played), columns=columns, y=y, train=train, test=test,
        given=(rows_of(train), y[train]), rows_of=rows_of, alone={},
        aligned=list(cut),
    )  # fmt: skip


def _by_row(
    console: Console,
    system: System,
    options: SystemOptions,
    parties: int,
    data: tuple[Any, NDArray[Any]],
    trees: int,
    played: dict[str, Any],
) -> Scenario:
    """Hospitals with patients of their own, or users with a few rows each at edge servers."""
    columns, y = data
    among_users = "user" in system.train
    names = [f"user{k + 1}" for k in range(_USERS_OF_EDGE * parties)] if among_users else ORGANISATIONS[:parties]
    roles = roles_of(system, list(names), None, options)  # refused before anything is printed
    train, test = _split(y)
    if len(train) < len(names):
        raise ConfigError(f"expected a row for each of {len(names)} users, got {len(train)} rows to train on")
    dealt = (
        np.array_split(np.arange(len(train)), len(names)) if among_users else rows_apart(columns.take(train), parties)
    )
    own = {name: (columns.take(train[index]), y[train[index]]) for name, index in zip(names, dealt, strict=True)}
    if among_users:
        for edge in roles.having("edge"):
            console.print(f"  {edge:<12} {', '.join(user for user in names if roles.edges[user] == edge)}")
        sizes = [len(labels) for _, labels in own.values()]
        console.print(f"  each user has {min(sizes)} to {max(sizes)} rows, {columns.num_columns} columns + the label")
    else:
        for name, (_, labels) in own.items():
            console.print(f"  {name:<12} {len(labels)} rows, {columns.num_columns} columns + the label")
        console.print(
            f"  (more of those with small {columns.column_names[0]} at {names[0]}: no two have the same people)"
        )
    return Scenario(
        **_models(options, y, trees, played), columns=columns, y=y, train=train, test=test, given=(own,),
        rows_of=lambda index: columns.take(index),
        alone={} if among_users else own, aligned=[],
    )  # fmt: skip


def _regression(
    console: Console,
    options: SystemOptions,
    parties: int,
    data: tuple[Any, NDArray[Any]],
    split: str | None,
    played: dict[str, Any],
) -> Scenario:
    """Organisations with different columns fit one logistic regression."""
    classes = np.unique(data[1])
    if len(classes) != 2:
        got = "numbers" if is_target(data[1]) else len(classes)
        raise ConfigError(f"logistic regression is of two classes, got {got}; leave --model out")
    cut = cut_columns(console, data[0].column_names, parties, split)
    columns, y = _aligned(console, *data, cut)
    alone = isinstance(options, Pooled)
    least = 0 if alone else _fewest_rows({party: columns.select(names) for party, names in cut.items()})
    train, test = _split(y, _held_back(len(y), least))
    common: dict[str, Any] = {
        "max_iter": _EPOCHS, "random_state": 0, "batch_size": max(least, min(1000, len(train) // 4))
    }  # fmt: skip
    rows_of = _tables_of(columns, cut)
    solver: Any = None if alone else type(options).system  # finds the weights on one table as the system does
    return Scenario(
        model=LogisticRegression(options, **common, **played),
        pooled=LogisticRegression(Pooled(solver=solver), **common),
        columns=columns, y=y, train=train, test=test, given=(rows_of(train), y[train]), rows_of=rows_of, alone={},
        aligned=list(cut),
    )  # fmt: skip


def _tables_of(columns: Any, cut: Mapping[str, list[str]]) -> Rows:
    return lambda index: {party: columns.select(names).take(index) for party, names in cut.items()}


def _aligned(console: Console, columns: Any, y: NDArray[Any], cut: dict[str, list[str]]) -> tuple[Any, NDArray[Any]]:
    """Give the rows ids, each party some of them in an order of its own, and find the common rows again."""
    ids = np.array([f"person-{number:07d}" for number in range(len(y))])
    rng = np.random.default_rng(0)
    lead = next(iter(cut))
    tables = {}
    for party, names in cut.items():
        held = rng.permutation(len(y))[: -(-len(y) * 19 // 20)]
        tables[party] = columns.select(names).take(held).append_column(_ID, pa.array(ids[held]))
        if party == lead:
            tables[party] = tables[party].append_column(_LABEL, pa.array(y[held]))
    started = time.perf_counter()
    with Status("finding the rows all parties hold", console=console):
        found = align(tables, on=_ID)
    seconds = time.perf_counter() - started
    sizes = ", ".join(f"{party} {table.num_rows}" for party, table in tables.items())
    whole = pa.table({name: found[party][name] for party, names in cut.items() for name in names})
    y = found[lead][_LABEL].to_numpy()
    console.print(
        f"private set intersection: {len(y)} rows that all hold, of {sizes}; {seconds:.1f} s",
        style="bold",
        soft_wrap=True,
    )
    return whole, y


def _fewest_rows(tables: dict[str, Any]) -> int:
    """Return the fewest rows of a batch that the guard of labels lets pass."""
    of_active, *of_passive = (preparation_of(to_table(table)).n_columns for table in tables.values())
    return max(fewest_rows(of_active + 1, of_labels=False), fewest_rows(sum(of_passive), of_labels=True))


def _held_back(n_rows: int, least: int) -> int:
    """Return how many rows are not trained on: a third, or what a first batch leaves."""
    third, left = -(-n_rows // 3), n_rows - least
    if left < min(third, LEAST_HELD_BACK):
        raise ConfigError(
            f"expected {least + LEAST_HELD_BACK} rows that all hold, enough for a batch of these columns and some to "
            f"hold back, got {n_rows}: name fewer --parties, or fewer columns in --split"
        )
    return min(third, left)


# ---------------------------------------------------------------- the play


def _play(console: Console, scenario: Scenario, system: System) -> None:
    """Train, predict and print scores, costs and what each party learned."""
    model, train, test = scenario.model, scenario.train, scenario.test
    regression = isinstance(model, LogisticRegression)
    batches = f", batches of {model.batch_size}" if regression else ""
    console.print(f"{len(train)} rows to train on, {len(test)} held back; {system.name}{batches}", style="bold")
    if system.split != "none" and model.transport == "memory":
        console.print("all parties are threads of this process; --transport grpc: a process each, connected by TLS")
    if getattr(model.protocol, "allow_exact_sums", False):
        console.print(
            "allow_exact_sums: exact sums give away bins of so few rows; parties of a real job have to accept that"
            + (", or sums are sealed" if hasattr(model.protocol, "sums") else "")
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rows have a margin beyond 4")  # of so few rows some always have
        warnings.filterwarnings("ignore", message="training ended after max_iter")  # said below
        warnings.filterwarnings("ignore", message="protocol 'pooled' puts")  # meant, to compare with
        started = time.perf_counter()
        model.fit(*scenario.given)
        fitted = time.perf_counter()
        ours = _predicted(model, scenario.rows_of(test))
        predicted = time.perf_counter()
        grid = _scores(scenario, system, ours)
    console.print(grid)
    if regression:
        cut = ", before it was steady" if label_holder(model.parts_.values()).unsettled else ""
        console.print(f"{model.n_iter_} epochs, mean Taylor loss {model.loss_history_[-1]:.4f} in the last{cut}")
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in model.timings_.items() if name != "total")
    console.print(f"training {fitted - started:.1f} s ({phases}), prediction {predicted - fitted:.1f} s")
    if model.communication_:
        console.print(_bytes_by_role(scenario, system) if "user" in system.train else _bytes_by_pair(model))
    for party, part in model.parts_.items():
        if getattr(part, "choice", ""):
            console.print(f"encryption: {part.encryption}, {part.choice}", soft_wrap=True)
        if getattr(part, "spent", ""):
            console.print(f"noise of {party}: {part.spent}", soft_wrap=True)
    console.print("\nWhat each party learned", style="bold")
    for party, facts in _learned(scenario).items():
        for fact in facts:
            console.print(f"  {party:<12} {fact}", soft_wrap=True)


def _write_report(path: Path, scenario: Scenario, system: System) -> None:
    """Write a report with the held-back rows, beside the model of the pooled table, which `_scores` has trained."""
    from treaty.estimators.reporting import contents_of
    from treaty.report.page import write_page

    model, test = scenario.model, scenario.test
    pooled = None if system.split == "none" else scenario.pooled
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rows have a margin beyond 4")
        contents = contents_of(model, scenario.rows_of(test), scenario.y[test], pooled, (), None)
    write_page(path, replace(contents, learned=_learned(scenario)))


def _learned(scenario: Scenario) -> dict[str, list[str]]:
    """Return what each party, or role, learned, by aligning rows and by training."""
    aligning = disclosures(scenario.aligned[0], scenario.aligned[1:]) if scenario.aligned else {}
    return {party: [*aligning.get(party, []), *facts] for party, facts in scenario.model.disclosures_.items()}


def _scores(scenario: Scenario, system: System, ours: NDArray[np.float64]) -> Grid:
    """Return the table of scores: ours, each participant's alone, the pooled table's, and another library's."""
    grid, y, train, test = score_grid(scenario.y), scenario.y, scenario.train, scenario.test
    alone = system.split == "none"
    add_scores(grid, "Treaty, pooled" if alone else f"Treaty, {system.name}, nothing pooled", y[test], ours)
    for name, (table, labels) in scenario.alone.items():
        if is_target(y) or len(np.unique(labels)) == len(scenario.model.classes_):
            own = _predicted(scenario.pooled.fit(table, labels), scenario.rows_of(test))
            add_scores(grid, f"Treaty, {name} alone", y[test], own)
        else:
            grid.add_row(f"Treaty, {name} alone: has not all classes", "-", "-")
    if not alone:
        _add_pooled(grid, scenario, system, ours)
    if isinstance(scenario.model, LogisticRegression):
        _add_theirs(grid, scenario.columns, y, train, test)
    else:
        _add_xgboost(grid, scenario)
    return grid


def _add_pooled(grid: Grid, scenario: Scenario, system: System, ours: NDArray[np.float64]) -> None:
    """Add the same model on the pooled table, and how near ours is to it where it is meant to be the same."""
    y, train, test, pooled = scenario.y, scenario.train, scenario.test, scenario.pooled
    tables = scenario.rows_of(train)
    theirs = _predicted(pooled.fit(tables, y[train]), scenario.rows_of(test))
    note = ""
    if isinstance(pooled, LogisticRegression):
        pairs = ((scenario.model.parts_[name].coef, pooled.parts_[name].coef) for name in tables)
        note = f" (weights within {max(np.abs(a - b).max(initial=0.0) for a, b in pairs):.0e})"
    elif system.lossless:
        note = " (bit for bit the same)" if np.array_equal(theirs, ours) else " (DIFFERENT)"
    add_scores(grid, f"Treaty, pooled table{note}", y[test], theirs)


def _add_xgboost(grid: Grid, scenario: Scenario) -> None:
    """Add XGBoost trained on the pooled table with the same settings, or that it is not installed."""
    try:
        from xgboost import XGBClassifier, XGBRegressor
    except ImportError:
        grid.add_row("XGBoost, not installed: pip install 'treaty-learn[xgboost]'", "-", "-")
        return
    y, train, test = scenario.y, scenario.train, scenario.test
    table = to_table(scenario.columns)
    matrix = table.matrix()
    codes = y if is_target(y) else np.unique(y, return_inverse=True)[1]
    booster = (XGBRegressor if is_target(y) else XGBClassifier)(
        n_estimators=scenario.model.n_estimators, max_depth=3, learning_rate=0.3,
        max_bin=scenario.pooled.max_bin, tree_method="hist",
        enable_categorical=True, feature_types=["float" if of is None else "c" for of in table.schema.categories],
    )  # fmt: skip
    booster.fit(matrix[train], codes[train])
    p = np.asarray((booster.predict if is_target(y) else booster.predict_proba)(matrix[test]), np.float64)
    theirs = p if is_target(y) else p / p.sum(axis=1, keepdims=True)
    add_scores(grid, "XGBoost, pooled table (no least leaf size)", y[test], theirs)


def _add_theirs(grid: Grid, columns: Any, y: NDArray[Any], train: NDArray[Any], test: NDArray[Any]) -> None:
    """Add scikit-learn's, of the same prepared columns in one place, with the exact loss and its own penalty."""
    table = to_table(columns)
    learnt = preparation_of(to_table(columns.take(train)))
    prepared = learnt.matrix(table.columns, table.n_rows)
    theirs = TheirRegression(max_iter=1000).fit(prepared[train], y[train])
    add_scores(grid, "scikit-learn's LogisticRegression, pooled table", y[test], theirs.predict_proba(prepared[test]))


def _byte_grid(headings: tuple[str, ...]) -> Grid:
    grid = Grid(title="Bytes sent while training", title_justify="left")
    for heading in headings:
        grid.add_column(heading, justify="left" if heading in ("from -> to", "mostly") else "right")
    return grid


def _bytes_by_pair(model: Any) -> Grid:
    grid = _byte_grid(("from -> to", "messages", "MB", "mostly"))
    for pair, totals in model.communication_.items():
        largest = max(totals["by_type"], key=totals["by_type"].get)
        grid.add_row(pair, str(totals["messages"]), f"{totals['bytes'] / 1e6:.2f}", largest)
    return grid


def _bytes_by_role(scenario: Scenario, system: System) -> Grid:
    """Return what each role sent to each: of all its parties together, and of one on average."""
    roles = roles_of(system, list(scenario.given[0]), None, scenario.model.protocol).of
    members = {role: sum(other == role for other in roles.values()) for role in roles.values()}
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for pair, totals in scenario.model.communication_.items():
        sender, _, receiver = pair.partition(" -> ")
        messages, size = sums.get((roles[sender], roles[receiver]), (0, 0))
        sums[roles[sender], roles[receiver]] = messages + totals["messages"], size + totals["bytes"]
    grid = _byte_grid(("from -> to", "messages", "MB", "MB of each sender"))
    for (sender, receiver), (messages, size) in sums.items():
        grid.add_row(
            f"{members[sender]} {sender} -> {members[receiver]} {receiver}", str(messages), f"{size / 1e6:.2f}",
            f"{size / members[sender] / 1e6:.2f}",
        )  # fmt: skip
    return grid
