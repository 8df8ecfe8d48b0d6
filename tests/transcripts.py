"""Messages and bytes of a transcript, added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treaty.messaging.transcript import Transcript, TranscriptEntry


def by_pair(transcript: Transcript, direction: str | None = None) -> dict[tuple[str, str], tuple[int, int]]:
    """Return messages and bytes per ordered pair of parties, sent, received or both (None)."""
    own = transcript.party
    return _totals(
        transcript, direction, lambda entry: (own, entry.peer) if entry.direction == "sent" else (entry.peer, own)
    )


def by_type(transcript: Transcript, direction: str | None = None) -> dict[str, tuple[int, int]]:
    """Return messages and bytes per message class name; `direction` as in `by_pair`."""
    return _totals(transcript, direction, lambda entry: entry.step)


def _totals(transcript: Transcript, direction: str | None, key: Callable[[TranscriptEntry], Any]) -> dict[Any, Any]:
    totals: dict[Any, tuple[int, int]] = {}
    for entry in transcript.entries:
        if direction in (None, entry.direction):
            messages, nbytes = totals.get(key(entry), (0, 0))
            totals[key(entry)] = (messages + 1, nbytes + entry.nbytes)
    return totals
