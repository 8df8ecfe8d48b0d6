"""How many rows of each user an edge server has had predicted by each model, over all runs.

What a user learns of a hidden model grows with every row that it has predicted, so edge servers count rows before they
compute, answered or not, and refuse more than agreed. Each that has shares keeps a count of its own: a user gets
nothing of which one of them refuses. A row that is asked for again counts again, for nobody sees that it is the same.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from treaty.database import Database
from treaty.errors import ConfigError
from treaty.files import Format

_FORM = Format("query-record", 1)
_TABLE = """CREATE TABLE asked (model TEXT NOT NULL, user TEXT NOT NULL,
    rows INTEGER NOT NULL CHECK (typeof(rows) = 'integer' AND rows >= 0), PRIMARY KEY (model, user))"""


def queries_folder(store: Path, party: str) -> Path:
    """Return where an edge server keeps its count."""
    return store / f"{party}.queries"


class QueryRecord:
    """An edge server's count, kept in `folder`, readable by the owner alone (None: in memory, for this object).

    Constructor and methods raise ConfigError when the files cannot be used, and where one is missing, damaged or an
    older copy (`treaty.database`).
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

    def count(self, model_id: str, rows: Mapping[str, int], most: int) -> None:
        """Add users' rows to the count before anything is computed for them: of all users, or of none.

        Raises ConfigError when a user would have had more than `most` rows predicted.
        """
        with self._db.transaction() as db:
            before = _asked(db, model_id)
            total = {user: before.get(user, 0) + more for user, more in rows.items()}
            over = [user for user, asked in total.items() if asked > most]
            if over:
                raise ConfigError(
                    f"expected at most {most} rows of each user over all runs, got {total[over[0]]} of {over[0]}: "
                    f"another run has counted rows of it meanwhile - at {self._db.where}"
                )
            db.executemany(
                "INSERT INTO asked VALUES (?, ?, ?) ON CONFLICT (model, user) DO UPDATE SET rows = excluded.rows",
                [(model_id, user, asked) for user, asked in total.items()],
            )


def _asked(db: sqlite3.Connection, model_id: str) -> dict[str, int]:
    return dict(db.execute("SELECT user, rows FROM asked WHERE model = ?", (model_id,)).fetchall())
