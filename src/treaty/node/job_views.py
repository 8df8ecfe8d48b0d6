"""A job as people see it, on a terminal and on the node's page: title, states, progress, disclosures, results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from treaty.errors import TreatyError
from treaty.node.policy import PolicyVerdict
from treaty.node.proposals import JobStatus, Proposal, in_words
from treaty.node.settings import Settings
from treaty.node.store import JobRow, Store
from treaty.node.verdicts import learned


@dataclass(frozen=True)
class Progress:
    """How far a job is: `done` of `total` units, and the seconds left, if known."""

    done: int
    total: int
    unit: str = "trees"
    seconds_left: float | None = None

    def __str__(self) -> str:
        done = f"{self.done} of {self.total} {self.unit}"
        return done if self.seconds_left is None else f"{done}, about {_duration(self.seconds_left)} left"


@dataclass(frozen=True)
class JobView:
    """What people see of a job, from its proposal and the statuses of the parties' nodes.

    Attributes
    ----------
    title : str
        The job in a few words.
    states : mapping
        The state at each party's node, including this one.
    hash : str
        The digest of the proposal, which parties compare.
    progress : Progress or None
    disclosures : sequence of str
        What would be learned, or was learned, as sentences.
    verdict : sequence of (bool, str)
        This node's policy: whether each rule allows the job, and the rule in words.
    models : sequence of str
        Files of the job's results on this node.
    sent, received : mapping
        Bytes of messages by peer.
    """

    title: str
    states: Mapping[str, str] = field(default_factory=dict)
    hash: str = ""
    progress: Progress | None = None
    disclosures: Sequence[str] = ()
    verdict: Sequence[tuple[bool, str]] = ()
    models: Sequence[str] = ()
    sent: Mapping[str, int] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """The peers with which messages were exchanged."""
        return sorted({*self.sent, *self.received})


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{round(seconds / length)} {unit}"
    return f"{round(seconds)} seconds"


def describe(store: Store, settings: Settings, row: JobRow, verdict: PolicyVerdict | None = None) -> JobView:
    """Return what is shown of a job: the proposal, its state at each party's node, what parties would learn."""
    try:
        proposal = msgspec.json.decode(row.proposal, type=Proposal)
        job = proposal.described()
    except (TreatyError, msgspec.MsgspecError):
        # Proposed under another version of Treaty.
        return JobView(title=title_of(row), states={settings.name: row.state}, hash=row.id)
    states = {party: "unknown yet" for party in job.parties} | {settings.name: row.state}
    for party, view in store.views(row.id).items():
        if party != settings.name:
            states[party] = msgspec.msgpack.decode(view, type=JobStatus).state
    events = store.events_of(row.id) if row.state == "finished" else []
    played: dict[str, Any] = next((event for event in reversed(events) if event["what"] == "played"), {})
    disclosures = played.get("learned") or [
        f"{who}: {sentence}" for who, sentences in learned(job, proposal.verb).items() for sentence in sentences
    ]
    return JobView(
        title=in_words(job, proposal.kind),
        states=states,
        hash=row.id,
        progress=_progress_of(row),
        disclosures=disclosures,
        verdict=[(finding.fine, f"{finding.what}: {finding.said}") for finding in verdict.findings] if verdict else [],
        models=[str(path) for path in results(settings, row, proposal)],
        sent=played.get("sent", {}),
        received=played.get("received", {}),
    )


def title_of(row: JobRow) -> str:
    """Describe a job in one line, even if this version of Treaty cannot read it."""
    try:
        proposal = msgspec.json.decode(row.proposal, type=Proposal)
        return in_words(proposal.described(), proposal.kind)
    except (TreatyError, msgspec.MsgspecError):
        return f"{row.verb}: a job of another version of Treaty"


def results(settings: Settings, row: JobRow, proposal: Proposal) -> list[Path]:
    """Return the files that a finished job has left here."""
    if row.state != "finished":
        return []
    folder = Path(settings.folder) / "models" / (proposal.model or row.id)
    name = settings.name
    wanted = f"{name}.{proposal.verb}-{row.id[:16]}.csv" if proposal.model else f"{name}.*"
    files = sorted(path for path in folder.glob(wanted) if "staged" not in path.name)
    return files if proposal.model else [path for path in files if path.suffix != ".csv" or ".weights" in path.name]


def _progress_of(row: JobRow) -> Progress | None:
    if not row.total or row.state not in ("queued", "running", "waiting"):
        return None
    spent = time.time() - row.created
    left = spent / row.rounds * (row.total - row.rounds) if row.rounds and row.state == "running" else None
    return Progress(row.rounds, row.total, "rounds", left)
