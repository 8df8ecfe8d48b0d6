"""For whom a party waits until all are connected."""

from __future__ import annotations

import time
from collections.abc import Collection

from treaty.messaging.party import Party
from treaty.runs.job import Job
from treaty.systems.system import Phase


class Waiting:
    """Notes for whom a party waits until all are connected, and says so now and then."""

    def __init__(self, job: Job, party: Party, phase: Phase | None) -> None:
        self._job, self._party, self._phase = job, party, phase
        self._last = time.monotonic()

    def __call__(self, missing: Collection[str]) -> None:
        """Note who is missing just now; nobody, once all are connected."""
        now = time.monotonic()
        for peer in missing:
            self._party.waited[peer] += now - self._last
        self._last = now
        if self._phase is None:
            return
        first = [f"{peer} at {self._job.parties[peer].address}" for peer in list(missing)[:3]]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        title = f"waiting for {', '.join(first)}{more}" if missing else "connected"
        total = len(self._party.peers)
        self._phase(title, total - len(missing), total)
