"""Tables as users hand them to an estimator: a mapping of party to dataframe, checked and put in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from treaty.data.table import Schema, Table, to_table
from treaty.errors import DataError


def training_tables(X: Mapping[str, Any], active: str) -> dict[str, Table]:
    """Convert the parties' tables of a training; the active one's may have no column.

    Raises
    ------
    DataError
        For a table that cannot be used, or when no party has columns.
    """
    tables = {name: to_table(table, party=name) for name, table in X.items() if not (name == active and _empty(table))}
    if not tables:
        raise DataError(f"expected a party with columns, got none among {', '.join(X)}")
    if active not in tables:  # labels, but no features of its own
        tables[active] = Table(Schema((), ()), [], next(iter(tables.values())).n_rows)
    return {name: tables[name] for name in X}


def known_tables(X: Mapping[str, Any], schemas: Mapping[str, Schema], needed: Collection[str]) -> dict[str, Table]:
    """Convert the tables of parties that have trained, in their order.

    Parameters
    ----------
    needed : collection of str
        Parties that own a split in use. Others may be absent; a table of missing values stands in for theirs.

    Raises
    ------
    DataError
        For other parties or columns.
    """
    absent = [name for name in schemas if name not in X]
    missed = [name for name in absent if name in needed]
    if not set(X) <= set(schemas) or missed or len(absent) == len(schemas):
        raise DataError(
            f"expected tables of the parties {', '.join(schemas)}, got {', '.join(map(str, X))}"
            + (f"; without {', '.join(missed)} nobody can decide rows at its splits" if missed else "")
        )
    tables = {
        name: to_table(X[name], party=name, schema=schema)
        for name, schema in schemas.items()
        if schema.names and name in X
    }
    n_rows = next(iter(tables.values())).n_rows
    missing = np.full(n_rows, np.nan, np.float32)
    return {
        name: tables.get(name, Table(schema, [missing] * len(schema.names), n_rows)) for name, schema in schemas.items()
    }


def _empty(table: Any) -> bool:
    """Whether an active party brings no features: None, or a table without columns."""
    shape = getattr(table, "shape", None)
    return table is None or (isinstance(shape, tuple) and len(shape) == 2 and shape[1] == 0)
