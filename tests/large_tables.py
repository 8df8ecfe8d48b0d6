"""Random tables with all that a column may be, in files of several row groups, and tables made to lie on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from treaty.data import reading

WRITTEN = ("t.parquet", "t.arrow", "folder", "t.csv")


@pytest.fixture
def all_large(monkeypatch):
    """Take every table for one that is too large for memory."""
    monkeypatch.setattr(reading, "ON_DISK", 0)


def random_table(rows: int = 700, seed: int = 0) -> pa.Table:
    """Return numbers of several kinds, categories, gaps, and columns of one value and of none."""
    rng = np.random.default_rng(seed)

    def gaps(values: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
        return pa.array(values, kind, mask=rng.random(rows) < 0.2)

    towns = np.array(["Rome", "Oslo", "Bern", "Lima", "Kyiv"], object)
    return pa.table(
        {
            "plain": rng.normal(size=rows),
            "narrow": pa.array(rng.normal(size=rows).astype(np.float32)),
            "gaps": gaps(rng.normal(size=rows)),
            "whole": pa.array(rng.integers(-9, 9, rows)),
            "large.whole": gaps(rng.integers(-(1 << 60), 1 << 60, rows)),
            "large": pa.array(np.where(rng.random(rows) < 0.3, np.nan, rng.integers(0, 3, rows))),
            "truth": gaps(rng.random(rows) < 0.4),
            "town": gaps(towns[rng.integers(0, 5, rows)]),
            "of one value": np.full(rows, 7.5),
            "of none": pa.nulls(rows, pa.float64()),
            "town.2": gaps(np.where(np.arange(rows) < rows // 2, "late", "early").astype(object)),
        }
    )


def write(table: pa.Table, path: Path) -> Path:
    """Write a table as the path's name says, in several row groups, batches or files."""
    third = -(-table.num_rows // 3)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=third)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=third)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        path.mkdir()
        for k in range(3):
            pq.write_table(table.slice(k * third, third), path / f"{k}.parquet", row_group_size=50)
    return path
