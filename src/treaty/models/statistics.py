"""What a party has left of statistics with others, and the file of it."""

from __future__ import annotations

import math
import os
from typing import Any

import msgspec
import numpy as np

from treaty.data.columns import Category
from treaty.data.table import Schema
from treaty.files import Format, read_file, write_file
from treaty.machine.arrays import Floats
from treaty.machine.database import Mark
from treaty.statistics import ColumnBins, bins_as_columns

FORMAT = Format("statistics-part", 1)


class StatisticsPart(msgspec.Struct, kw_only=True):
    """A party's part of the statistics of several parties.

    A passive party knows its own columns alone, the active party something of all: `bins` are by party. At the active
    party `classes` are both labels, the second one "bad", and `correlations` (k * k,) are those of the numeric columns
    in `bins`, row by row in their order, or empty. `kept` is as in a part of trees.
    """

    model_id: str
    party: str
    schema: Schema
    bins: dict[str, list[ColumnBins]]
    classes: list[Category] | None = None
    correlations: Floats = msgspec.field(default_factory=lambda: np.zeros(0))
    kept: dict[str, Mark] = {}

    def __repr__(self) -> str:
        """Return a line without values of rows."""
        return f"<StatisticsPart of {self.party}: {self.summary()}>"

    @property
    def is_active(self) -> bool:
        """Whether this is the active party's part."""
        return self.classes is not None

    @property
    def correlation(self) -> Floats:
        """The correlations as a matrix (k, k)."""
        k = math.isqrt(len(self.correlations))
        return self.correlations.reshape(k, k)

    def summary(self) -> str:
        """Describe how many columns there are and, at the active party, which label is bad."""
        columns = ", ".join(f"{len(of)} columns of {party}" for party, of in self.bins.items())
        return f"statistics of {columns}{f'; bad is label {self.classes[1]!r}' if self.classes else ''}"

    def tables(self) -> list[dict[str, list[Any]]]:
        """Return bins whose labels are known here and, at the active party, correlations, as columns of files."""
        bins = bins_as_columns(self.bins)
        if not len(self.correlations):
            return [bins]
        names = [f"{of.party}.{of.column}" for columns in self.bins.values() for of in columns if of.kind == "numeric"]
        return [bins, {"column": names, **dict(zip(names, self.correlation.tolist(), strict=True))}]

    def importances(self) -> dict[str, dict[str, float]]:
        """Return what is known of columns, as far as it is, by kind; those of others are called "party.column"."""
        every = [of for columns in self.bins.values() for of in columns]
        names = [of.column if of.party == self.party else f"{of.party}.{of.column}" for of in every]
        shown = {kind: [float(getattr(of, kind)) for of in every] for kind in ("iv", "n_missing", "n_distinct", "vif")}
        known = {kind: {of: v for of, v in zip(names, values, strict=True) if v == v} for kind, values in shown.items()}
        return {kind: of for kind, of in known.items() if of}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the part to a file, readable by its owner alone."""
        write_file(path, self, FORMAT, self.party)


def load_statistics_part(path: str | os.PathLike[str], party: str | None = None) -> StatisticsPart:
    """Read a part that `StatisticsPart.save` wrote, of a party (None: of any); ConfigError for another file."""
    return read_file(path, StatisticsPart, FORMAT, party)
