"""What a node's page shows of the node itself: how to approve a job, disk space, and privacy budgets by partner."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from treaty.errors import ConfigError
from treaty.models.checkpoints import ledger_folder
from treaty.node.job_views import readable
from treaty.node.settings import Settings
from treaty.node.store import Store
from treaty.privacy.ledger import FILE, LedgerEntry, job_of, per_person, read_ledger

_FOLDERS = ("models", "checkpoints", "stores", "snapshots", "logs")


@dataclass(frozen=True, slots=True)
class Budget:
    """What a person of a table has paid by noisy releases."""

    data: str
    # epsilon in all, and the most that the policy allows; None: no limit
    paid: float
    most: float | None
    # by partner: epsilon of the jobs that it took part in
    by_peer: Mapping[str, float]
    # why the ledger cannot be read
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Disk space in bytes, and budgets."""

    free: int = 0
    folders: Mapping[str, int] = field(default_factory=dict)
    budgets: Sequence[Budget] = ()


def usage_of(settings: Settings, store: Store) -> Usage:
    """Return the disk space that the node uses, and the budgets of its tables."""
    state = Path(settings.folder)
    folders = {name: _size(state / name) for name in _FOLDERS if (state / name).is_dir()}
    return Usage(shutil.disk_usage(state).free, folders, _budgets(settings, store))


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):  # a job has just removed it
                total += Path(place, name).lstat().st_size
    return total


def _budgets(settings: Settings, store: Store) -> list[Budget]:
    found = {}
    for data_set in settings.data.values():
        ledger = ledger_folder(data_set.store, settings.name, "noise") / FILE
        if data_set.store in found or not ledger.exists():
            continue
        most = data_set.policy.most_epsilon_total
        try:
            entries = _entries(ledger, ledger.stat().st_mtime_ns)
            by_peer = _by_peer(settings, store, entries)
            paid = {peer: per_person(of) for peer, of in sorted(by_peer.items())}
            found[data_set.store] = Budget(data_set.name, per_person(entries), most, paid)
        except ConfigError as error:
            found[data_set.store] = Budget(data_set.name, 0.0, most, {}, str(error))
    return list(found.values())


@lru_cache(64)
def _entries(ledger: Path, changed: int) -> list[LedgerEntry]:
    # the page is refreshed every few seconds, and jobs lock their ledger
    return read_ledger(ledger.parent)


def _by_peer(settings: Settings, store: Store, entries: Sequence[LedgerEntry]) -> dict[str, list[LedgerEntry]]:
    known = [(row.id[:16], readable(row)) for row in store.jobs()] if entries else []
    peers = {id: [party for party in of[1].parties if party != settings.name] for id, of in known if of is not None}
    found: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        # the name of a job in ledgers ends with the first letters of its id
        for peer in peers.get(job_of(entry).rpartition(" ")[2], ["others"]):
            found.setdefault(peer, []).append(entry)
    return found
