"""Ledgers whose key a test names, so that their noise is the same in every run."""

from __future__ import annotations

from pathlib import Path

from treaty.files import write_file
from treaty.machine.database import owner_of
from treaty.privacy import ledger


def keep_key(folder: Path, key: bytes) -> None:
    """Begin a ledger in a folder, with this key of 32 bytes."""
    name = ledger.Ledger(folder)._db.name
    write_file(folder / ledger.KEY_FILE, ledger.Key(name, key), ledger._KEY_FORM, owner_of(folder))
