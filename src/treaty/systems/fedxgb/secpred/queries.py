"""How many rows of each user an edge server has had predicted by each model, over all runs.

What a user learns of a hidden model grows with every row that it has predicted. So every edge server that has shares
counts rows before it computes, and refuses more than agreed; one refusal is enough that a user gets nothing. Rows count
even if the prediction then fails, and again each time they are asked for, since nobody sees that they are the same.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from treaty.files import Format
from treaty.machine.database import Database

_FORM = Format("query-record", 1)
_TABLE = """CREATE TABLE asked (model TEXT NOT NULL, user TEXT NOT NULL,
    rows INTEGER NOT NULL CHECK (typeof(rows) = 'integer' AND rows >= 0), PRIMARY KEY (model, user))"""


def queries_folder(store: Path, party: str) -> Path:
    """Return where an edge server keeps its count."""
    return store / f"{party}.queries"


class QueryRecord:
    """An edge server's count, kept in `folder`, readable by the owner alone (None: in memory, for this object).

    Constructor and methods raise ConfigError when the files cannot be used, and where one is missing, damaged or an
    older copy (`machine.database`).
    """

    def __init__(self, folder: Path | None) -> None:
        self._db = Database(
            folder, "queries", _FORM, {"asked": _TABLE}, ("asked",), what="record of queries",
            lost="how many rows users have had predicted: they may then ask for as many once more",
        )  # fmt: skip

    def asked(self, model_id: str) -> dict[str, int]:
        """Return how many rows users have had predicted by a model."""
        with self._db.transaction() as db:
            return _asked(db, model_id)

    def count(self, model_id: str, rows: Mapping[str, int], most: int) -> list[str]:
        """Count users' rows before anything is computed for them; return whose are counted.

        Those of others would be more than `most` with what they have had predicted, also by runs at the same time.
        """
        with self._db.transaction() as db:
            before = _asked(db, model_id)
            total = {user: before.get(user, 0) + more for user, more in rows.items()}
            fit = {user: asked for user, asked in total.items() if asked <= most}
            _write(db, model_id, fit)
        return list(fit)

    def add(self, model_id: str, rows: Mapping[str, int]) -> None:
        """Add rows that were counted elsewhere, or (negative) take back rows that were counted and not predicted."""
        with self._db.transaction() as db:
            before = _asked(db, model_id)
            _write(db, model_id, {user: max(0, before.get(user, 0) + more) for user, more in rows.items()})
            db.execute("DELETE FROM asked WHERE rows = 0")


def _write(db: sqlite3.Connection, model_id: str, rows: Mapping[str, int]) -> None:
    db.executemany(
        "INSERT INTO asked VALUES (?, ?, ?) ON CONFLICT (model, user) DO UPDATE SET rows = excluded.rows",
        [(model_id, user, asked) for user, asked in rows.items()],
    )


def _asked(db: sqlite3.Connection, model_id: str) -> dict[str, int]:
    return dict(db.execute("SELECT user, rows FROM asked WHERE model = ?", (model_id,)).fetchall())
