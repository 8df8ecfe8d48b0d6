"""What a node's page shows of the node itself: disk space, and privacy budgets by partner."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from treaty.errors import ConfigError
from treaty.models.checkpoints import ledger_folder
from treaty.node.job_views import readable
from treaty.node.settings import Settings
from treaty.node.store import Store
from treaty.privacy.ledger import FILE, LedgerEntry, job_of, per_person, read_ledger


def usage_of(settings: Settings, store: Store) -> dict[str, dict[str, str]]:
    """Return by title: the budget of each table from which noise was released, and the disk space of each folder."""
    state, budgets = Path(settings.folder), {}
    for data_set in settings.data.values():
        ledger = ledger_folder(data_set.store, settings.name, "noise") / FILE
        if ledger.exists():
            most = data_set.policy.most_epsilon_total
            limit = "" if most is None else f" of at most {most:.4g}"
            try:
                budgets[data_set.name] = _paid(settings, store, ledger, limit)
            except ConfigError as error:
                budgets[data_set.name] = str(error)
    sizes = {folder.name: _size(folder) for folder in sorted(state.iterdir()) if folder.is_dir()}
    sizes["free"] = shutil.disk_usage(state).free
    return {"Privacy budget": budgets, "Disk": {name: f"{size / 1e6:,.1f} MB" for name, size in sizes.items()}}


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):  # a job has just removed it
                total += Path(place, name).lstat().st_size
    return total


def _paid(settings: Settings, store: Store, ledger: Path, limit: str) -> str:
    """Describe the epsilon spent per person of a table in all, and in the jobs of each partner."""
    entries = read_ledger(ledger.parent)
    # the name of a job in ledgers ends with the first letters of its id
    peers = {row.id[:16]: known[1].parties for row in store.jobs() if (known := readable(row)) is not None}
    shares: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        for peer in peers.get(job_of(entry).rpartition(" ")[2], ["others"]):
            shares.setdefault(peer, []).append(entry)
    each = [f"with {peer} {per_person(of):.4g}" for peer, of in sorted(shares.items()) if peer != settings.name]
    return "; ".join([f"epsilon {per_person(entries):.4g}{limit} spent per person", *each])
