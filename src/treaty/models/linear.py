"""What training a linear model leaves at each party, and the file it is kept in.

Every party has the weights of its own columns, and what is needed to prepare them; the active party, which has the
labels, has the intercept and the classes as well. A row's margin is the sum over all parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import Category
from treaty.data.table import Schema, Table
from treaty.database import Mark
from treaty.errors import ConfigError, DataError
from treaty.files import Format, read_file, write_file
from treaty.linear.losses import beyond_taylor, probabilities
from treaty.linear.preparation import Preparation, prepare

FORMAT = Format("linear-part", 2)


class LinearPart(msgspec.Struct, kw_only=True):
    """One party's part of a linear model.

    `model_id` is the same in all parts; `coef` (preparation.n_columns,) are the weights of the prepared columns. The
    active party alone has `intercept`, `classes` (two labels; margins are log-odds of the second) and `losses` (of
    every epoch the mean loss of its batches). `loss` is "taylor" or "logistic"; `encryption` the cipher it was trained
    under, empty for a pooled model. `alone` says of each party how many rows stand alone in their batch among its
    columns, so that its gradients reveal their labels (the active party's: the others' part of their margins); it is
    empty after a pooled training and in paper mode. `kept` is as in a part of trees.
    """

    model_id: str
    party: str
    schema: Schema
    preparation: Preparation
    coef: NDArray[np.float64]
    intercept: float | None = None
    classes: list[Category] | None = None
    loss: str = "taylor"
    losses: list[float] = []
    encryption: str = ""
    alone: dict[str, int] = {}
    kept: dict[str, Mark] = {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the part to a file, readable by its owner alone; an old file is replaced only by a whole new one."""
        write_file(path, self, FORMAT, self.party)

    @property
    def is_active(self) -> bool:
        """Whether this is the active party's part, with intercept and classes."""
        return self.intercept is not None

    def summary(self) -> str:
        """Say how many weights there are and, at the active party, how training ended."""
        ended = f", loss {self.losses[-1]:.6f} after {len(self.losses)} epochs" if self.losses else ""
        return f"{len(self.coef)} weights{ended}"

    def predictions(self, margins: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
        """Return the predicted labels and each class's probability, as columns of a file, from all parts' margins."""
        classes, p = self.classes or [], probabilities(margins)
        columns: dict[str, NDArray[Any]] = {"prediction": np.array(classes)[(margins > 0.0).astype(np.intp)]}
        return columns | {f"probability_{name}": of for name, of in zip(classes, (1.0 - p, p), strict=True)}

    def caution(self, margins: NDArray[np.float64]) -> str | None:
        """Say when probabilities of rows with these margins are unreliable; None when they are not."""
        return beyond_taylor(margins) if self.loss == "taylor" else None

    def margins(self, table: Table) -> NDArray[np.float64]:
        """Return what this part adds to rows' margins (n_rows,)."""
        own = self.preparation.matrix(table.columns, table.n_rows) @ self.coef
        return own if self.intercept is None else own + self.intercept

    def column_names(self) -> list[str]:
        """Name what `coef` has a weight for: a column, or "column=category"."""
        return self.preparation.names(self.schema.names, self.schema.categories)


def preparation_of(table: Table) -> Preparation:
    """Learn from a party's training table how to prepare its columns."""
    n_categories = [None if values is None else len(values) for values in table.schema.categories]
    return prepare(table.columns, n_categories, table.n_rows)


def load_linear_part(path: str | os.PathLike[str], party: str | None = None) -> LinearPart:
    """Read a part that `LinearPart.save` wrote, of a party (None: of any); errors as of `load_part` for trees."""
    part = read_file(path, LinearPart, FORMAT, party)
    try:
        check_linear_part(part)
    except ValueError as error:
        raise ConfigError(f"expected a linear model of Treaty, got {error} - at {path}") from None
    return part


def check_linear_part(part: LinearPart) -> None:
    """Raise ValueError for a part whose arrays do not fit each other."""
    made, n_features = part.preparation, len(part.schema.names)
    if len(made.median) != n_features or made.n_categories != tuple(
        None if values is None else len(values) for values in part.schema.categories
    ):
        raise ValueError("a preparation of other columns")
    if not len(part.coef) == len(made.mean) == len(made.scale) == made.n_columns:
        raise ValueError("another number of weights than of columns")
    if not all(np.all(np.isfinite(numbers)) for numbers in (part.coef, made.median, made.mean, made.scale)):
        raise ValueError("weights that are not finite")


def label_holder(parts: Iterable[LinearPart]) -> LinearPart:
    """Return the active party's part; DataError unless the parts are of one model and one has the intercept."""
    parts = list(parts)
    holders = [part for part in parts if part.is_active]
    if len(holders) != 1 or len({part.model_id for part in parts}) != 1:
        raise DataError(f"expected the parts of one model, got {', '.join(part.party for part in parts)}")
    return holders[0]


def pooled_margins(parts: Mapping[str, LinearPart], tables: Mapping[str, Table]) -> NDArray[np.float64]:
    """Return the margins (n_rows,) of all parties' parts and tables: log-odds of the second class."""
    margins: NDArray[np.float64] = np.sum([part.margins(tables[name]) for name, part in parts.items()], axis=0)
    return margins
