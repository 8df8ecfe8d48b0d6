"""What each party of a job notes about a finished training: its times, messages, and what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from treaty.messaging.transcript import Transcript
from treaty.runs.crowd_jobs import crowd_of
from treaty.runs.job import Job
from treaty.runs.threads import traffic_of
from treaty.systems.alignment.roles import disclosures


class Report(msgspec.Struct, kw_only=True):
    """What a party notes about a finished run, beside its part of the model.

    Attributes
    ----------
    party : str
    seconds : dict
        Per phase.
    sent : dict
        Of each peer: messages, bytes, bytes by message type.
    learned : dict
        Of each party, or in a crowd of each role, in words.
    encryption, choice : str
        The cipher, and at the active party why it was chosen.
    spent : str
        What the party's noise cost.
    """

    party: str
    seconds: dict[str, float]
    sent: dict[str, dict[str, Any]]
    learned: dict[str, list[str]]
    encryption: str = ""
    choice: str = ""
    spent: str = ""


def write_report(
    job: Job,
    name: str,
    transcript: Transcript,
    learned: dict[str, list[str]],
    seconds: dict[str, float],
    *,
    encryption: str = "",
    choice: str = "",
    spent: str = "",
) -> None:
    """Write what a party notes about a training beside its part; `learned` is what was learned after aligning."""
    sent = {pair.partition(" -> ")[2]: totals for pair, totals in traffic_of([transcript]).totals.items()}
    if job.align is not None:
        others = [other for other in job.owners if other != job.active]
        before = disclosures(job.active, others, on_duplicate=job.align.on_duplicate)
        learned = {party: before.get(party, []) + learned[party] for party in learned}
    report = Report(
        party=name, seconds=seconds, sent=sent, learned=learned, encryption=encryption, choice=choice, spent=spent
    )
    _file(job, name).write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def expendable(job: Job) -> list[str]:
    """Return whom a training goes on without: users of a crowd, and with dropout="accept" participants with rows."""
    if job.crowd:
        return crowd_of(job).users
    if job.horizontal and job.tree_options().dropout == "accept":
        return [name for name in job.parties if name != job.active]
    return []


def load_reports(job: Job) -> dict[str, Report]:
    """Read what all parties of a finished job on this machine noted, but for those lost that it could go on without."""
    files = {name: _file(job, name) for name in job.parties}
    may_lack = expendable(job)
    return {
        name: msgspec.json.decode(path.read_bytes(), type=Report)
        for name, path in files.items()
        if path.exists() or name not in may_lack
    }


def _file(job: Job, name: str) -> Path:
    return Path(job.output) / f"{name}.report.json"
