"""What training a linear model leaves at each party, and the file it is kept in.

Every party has the weights of its own columns, and what is needed to prepare them; the label holder has the intercept
and the classes as well. A row's margin is the sum over all parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import Category
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError
from treaty.linear.preparation import Preparation, prepare
from treaty.models.trees import read_file, write_file

FORMAT = "treaty-linear-part 1"


class LinearPart(msgspec.Struct, kw_only=True):
    """One party's part of a linear model.

    Attributes
    ----------
    model_id : str
        The same in all parts of a model.
    party : str
    schema : Schema
        The party's own columns.
    preparation : Preparation
    coef : float64 (preparation.n_columns,)
        Weights of the prepared columns.
    intercept : float or None
        At the label holder.
    classes : list of Category or None
        At the label holder: the two labels; margins are log-odds of the second.
    loss : {"taylor", "logistic"}
    losses : list of float
        At the label holder: of every epoch, the mean loss of its batches.
    encryption : str
        The cipher it was trained under; empty for a pooled model.
    alone : dict of str to int
        Of each party, how many rows stand alone in their batch among its columns, so that its gradients tell their
        labels, or the label holder's gradients others' part of their margins; empty where there was no such protocol.
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the part to a file, readable by its owner alone; an old file is replaced only by a whole new one."""
        write_file(path, self, FORMAT)

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


def load_linear_part(path: str | os.PathLike[str]) -> LinearPart:
    """Read a part that `LinearPart.save` wrote.

    Raises
    ------
    ConfigError
        If there is no such file, or it is no part of a linear model.
    """
    part = read_file(path, LinearPart, FORMAT)
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
        raise ValueError("as many weights as the party has no columns")
    if not all(np.all(np.isfinite(numbers)) for numbers in (part.coef, made.median, made.mean, made.scale)):
        raise ValueError("weights that are not finite")


def label_holder(parts: Iterable[LinearPart]) -> LinearPart:
    """Return the part with the intercept, checking that all belong to one model.

    Raises
    ------
    DataError
        If parts of different models are mixed, or there is none or more than one of a label holder.
    """
    parts = list(parts)
    holders = [part for part in parts if part.intercept is not None]
    if len(holders) != 1 or len({part.model_id for part in parts}) != 1:
        raise DataError(f"expected the parts of one model, got {', '.join(part.party for part in parts)}")
    return holders[0]
