"""Scenarios of ``treaty demo``: a table split among fictitious parties, by column or row, and the models to train."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.status import Status
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from treaty.cli.logs import console
from treaty.data.arrow_tables import with_categories
from treaty.data.columns import check_labels
from treaty.data.reading import read_table, refuse_strays
from treaty.data.table import to_table
from treaty.errors import ConfigError
from treaty.estimators.files import align
from treaty.estimators.linear import LogisticRegression
from treaty.estimators.trees import GBDTClassifier, GBDTRegressor
from treaty.linear.lbfgs import fewest_rows
from treaty.models.linear import preparation_of
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.system import System, roles_of

LEAST_HELD_BACK = 20
# a label with more different numbers is a numeric target
MOST_CLASSES = 50
OWNERS = ("clinic", "laboratory", "imaging", *(f"partner{i}" for i in range(4, 11)))
_ID, _LABEL = "treaty demo id", "treaty demo label"
_USERS_PER_EDGE = 4
DEMO_TREES: dict[str, Any] = {"max_depth": 3, "learning_rate": 0.3}  # small, so that a demonstration takes seconds
_EPOCHS = 60
ORGANISATIONS = ("north", "south", "east", "west", *(f"hospital{i}" for i in range(5, 11)))


# the columns, an arrow table, and the labels
Data = tuple[Any, NDArray[Any]]


def load_data(data: str, label: str | None, ids: str | None) -> Data:
    """Return the columns (an arrow table) and the labels of "breast", scikit-learn's data set, or of a file.

    The file's columns `ids`, separated by commas, are left out. A label with more than `MOST_CLASSES` numbers, or with
    a fraction, is a numeric target (float64); other labels are classes. Raises ConfigError if the label is not named or
    cannot be predicted, or if the file lacks a column.
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
    # a column's own name may have a comma
    split = [] if ids is None else [ids] if ids in table.column_names else ids.split(",")
    left_out = list(dict.fromkeys(name.strip() for name in split if name.strip()))
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


def cut_columns(names: list[str], parties: int, split: str | None) -> dict[str, list[str]]:
    """Return and print which party holds which columns; ConfigError if `split`, the command's option, does not fit."""
    if split is None:
        if len(names) < parties:
            raise ConfigError(f"expected at least a column for each of {parties} parties, got {len(names)} columns")
        edges = [len(names) * k // parties for k in range(parties + 1)]
        cut = {OWNERS[k]: names[edges[k] : edges[k + 1]] for k in range(parties)}
    else:
        groups = [[name.strip() for name in group.split(",") if name.strip()] for group in split.split("/")]
        used = [name for group in groups for name in group]
        if unknown := [name for name in used if name not in names]:
            raise ConfigError(f"expected --split 'a,b/c,d' over columns of the file, got unknown {', '.join(unknown)}")
        if len(set(used)) < len(used):
            raise ConfigError("expected --split to name every column once")
        if not 2 <= len(groups) <= len(OWNERS) or not all(groups[1:]):
            raise ConfigError(f"expected --split to name the columns of 2 to {len(OWNERS)} parties, got {len(groups)}")
        cut = dict(zip(OWNERS, groups, strict=False))
    for party, held in cut.items():
        shown = ", ".join(held[:2]) + (f", ... ({len(held)} columns)" if len(held) > 2 else "")
        console.print(f"  {party:<12} {shown}{' + the label' if party == next(iter(cut)) else ''}")
    return cut


def rows_apart(columns: Any, parties: int) -> list[NDArray[np.intp]]:
    """Assign rows at random, biased by the first column: organisations' rows differ in distribution, too."""
    # a random order in which rows with small values tend to come first, cut into equal pieces
    ranks = np.argsort(np.argsort(to_table(columns.select([0])).columns[0]))
    chance = np.random.default_rng(0).random(len(ranks))
    return np.array_split(np.argsort(ranks / len(ranks) + chance), parties)


def is_target(y: NDArray[Any]) -> bool:
    """Return whether labels of `load_data` are numbers to predict, not classes."""
    return bool(y.dtype.kind == "f")


# returns the parties' tables of some rows
Rows = Callable[[NDArray[np.intp]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a demo trains, and what it is compared with."""

    # a GBDTClassifier, GBDTRegressor or LogisticRegression, and the same model for one table
    model: Any
    pooled: Any
    # all rows, a pyarrow.Table, and their labels
    columns: Any
    y: NDArray[Any]
    # numbers of the rows to train on, and of the held-back rows
    train: NDArray[np.intp]
    test: NDArray[np.intp]
    # arguments of `fit`: ``(tables, labels)``, or the participants' own rows
    given: tuple[Any, ...]
    # returns the parties' tables of some rows, as `predict` takes them
    rows_of: Rows
    # parties whose model from their own columns, or rows, alone is shown, too
    alone: Mapping[str, tuple[Any, NDArray[Any]]]
    # parties that aligned their rows first, the active one in front
    aligned: list[str]

    def model_alone(self, party: str) -> Any | None:
        """Return the model trained on a party's own data; None if that lacks a class."""
        table, labels = self.alone[party]
        fits = is_target(self.y) or len(np.unique(labels)) == len(np.unique(self.y))
        return clone(self.pooled).fit(table, labels) if fits else None


def _models(options: SystemOptions, y: NDArray[Any], trees: int, played: dict[str, Any]) -> dict[str, Any]:
    """Return the model for these labels, and one for the pooled table with as many bins."""
    kind = GBDTRegressor if is_target(y) else GBDTClassifier
    bins = BoostingOptions().checked(options).most_bins
    return {
        "model": kind(options, **DEMO_TREES, n_estimators=trees, **played),
        "pooled": kind(**DEMO_TREES, n_estimators=trees, max_bin=bins),
    }


def _split(y: NDArray[Any], held_back: float = 1 / 3) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows to train on and the held-back rows, stratified by class."""
    classes = None if is_target(y) else y
    train, test = train_test_split(np.arange(len(y)), test_size=held_back, stratify=classes, random_state=0)
    return train, test


def by_column(
    options: SystemOptions, parties: int, data: Data, split: str | None, trees: int, played: dict[str, Any]
) -> Scenario:
    """Organisations with different columns of the same rows; each lacks some rows."""
    cut = cut_columns(data[0].column_names, parties, split)
    columns, y = _aligned(*data, cut)
    train, test = _split(y)
    rows_of = _tables_of(columns, cut)
    return Scenario(
        **_models(options, y, trees, played), columns=columns, y=y, train=train, test=test,
        given=(rows_of(train), y[train]), rows_of=rows_of, alone=_of_lead(options, cut, rows_of(train), y[train]),
        aligned=list(cut),
    )  # fmt: skip


def by_row(
    system: System, options: SystemOptions, parties: int, data: Data, trees: int, played: dict[str, Any]
) -> Scenario:
    """Hospitals with different patients, or users with a few rows each, at edge servers."""
    columns, y = data
    among_users = "user" in system.train
    names = [f"user{k + 1}" for k in range(_USERS_PER_EDGE * parties)] if among_users else ORGANISATIONS[:parties]
    # raises before anything is printed
    roles = roles_of(system, list(names), None, options)
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
            f"  (more rows with small {columns.column_names[0]} at {names[0]}; no patient is at two hospitals)"
        )
    return Scenario(
        **_models(options, y, trees, played), columns=columns, y=y, train=train, test=test, given=(own,),
        rows_of=lambda index: columns.take(index),
        alone={} if among_users else own, aligned=[],
    )  # fmt: skip


def regression(options: SystemOptions, parties: int, data: Data, split: str | None, played: dict[str, Any]) -> Scenario:
    """Organisations with different columns fit one logistic regression."""
    classes = np.unique(data[1])
    if len(classes) != 2:
        got = "numbers" if is_target(data[1]) else len(classes)
        raise ConfigError(f"logistic regression needs two classes, got {got}; leave --model out")
    cut = cut_columns(data[0].column_names, parties, split)
    columns, y = _aligned(*data, cut)
    alone = isinstance(options, Pooled)
    least = 0 if alone else _fewest_rows({party: columns.select(names) for party, names in cut.items()})
    # a third is held back, or what the first batch leaves
    third, left = -(-len(y) // 3), len(y) - least
    if left < min(third, LEAST_HELD_BACK):
        raise ConfigError(
            f"expected {least + LEAST_HELD_BACK} rows that all hold, enough for a batch of these columns and some to "
            f"hold back, got {len(y)}: use fewer --parties, or fewer columns in --split"
        )
    train, test = _split(y, min(third, left))
    common: dict[str, Any] = {
        "max_iter": _EPOCHS, "random_state": 0, "batch_size": max(least, min(1000, len(train) // 4))
    }  # fmt: skip
    rows_of = _tables_of(columns, cut)
    # the pooled baseline uses the solver of the system
    solver: Any = None if alone else type(options).system
    return Scenario(
        model=LogisticRegression(options, **common, **played),
        pooled=LogisticRegression(Pooled(solver=solver), **common),
        columns=columns, y=y, train=train, test=test, given=(rows_of(train), y[train]), rows_of=rows_of,
        alone=_of_lead(options, cut, rows_of(train), y[train]), aligned=list(cut),
    )  # fmt: skip


def _of_lead(options: SystemOptions, cut: Mapping[str, list[str]], rows: Any, y: NDArray[Any]) -> dict[str, Any]:
    """Return the own columns, if any, and the labels of the party with the labels."""
    lead = next(iter(cut))
    return {} if isinstance(options, Pooled) or not cut[lead] else {lead: (rows[lead], y)}


def _tables_of(columns: Any, cut: Mapping[str, list[str]]) -> Rows:
    return lambda index: {party: columns.select(names).take(index) for party, names in cut.items()}


def _aligned(columns: Any, y: NDArray[Any], cut: dict[str, list[str]]) -> Data:
    """Give each party a random 95 % of the rows, with ids, in random order; return the rows that all hold."""
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
    found_rows = f"private set intersection: {len(y)} rows that all hold, of {sizes}; {seconds:.1f} s"
    console.print(found_rows, style="bold", soft_wrap=True)
    return whole, y


def _fewest_rows(tables: dict[str, Any]) -> int:
    """Return the smallest batch that the label guard accepts."""
    of_active, *of_passive = (preparation_of(to_table(table)).n_columns for table in tables.values())
    return max(fewest_rows(of_active + 1, of_labels=False), fewest_rows(sum(of_passive), of_labels=True))
