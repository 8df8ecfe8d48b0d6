"""What each party of a job notes about a finished training: its times, messages, and what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from treaty.files import Format, read_json, write_json
from treaty.messaging.transcript import Transcript
from treaty.runs.job import Job
from treaty.runs.threads import traffic_of
from treaty.systems.alignment.roles import disclosures
from treaty.systems.system import Cast

FORMAT = Format("report", 1)


class Report(msgspec.Struct, kw_only=True):
    """What a party notes about a finished run, beside its part of the model."""

    party: str
    seconds: dict[str, float]  # per phase
    sent: dict[str, dict[str, Any]]  # to each peer: messages, bytes, bytes by message type
    learned: dict[str, list[str]]  # by each party, or role, in words
    encryption: str = ""
    choice: str = ""  # at the active party, why that cipher
    exact_sums: dict[str, float] = {}  # estimated share of each passive party's bins that exact sums showed
    spent: str = ""  # what the party's noise cost
    unsettled: str = ""  # at the active party of a regression, that training ended before the loss was steady
    has_part: bool = True


def write_report(job: Job, name: str, cast: Cast, transcript: Transcript, seconds: dict[str, float], part: Any) -> None:
    """Write what a party notes about a training beside its part, which is None at roles without one."""
    own, common = job.settings()
    learned = job.system.disclosures(cast, own, common, part)
    if job.align is not None:
        others = [other for other in cast.owners if other != job.active]
        before = disclosures(job.active, others, on_duplicate=job.align.on_duplicate)
        learned = {party: before.get(party, []) + learned[party] for party in learned}
    noted = {field: getattr(part, field, "") for field in ("encryption", "choice", "spent", "unsettled")}
    report = Report(
        party=name, seconds=seconds, sent=_sent(transcript), learned=learned, has_part=part is not None,
        exact_sums=getattr(part, "exact_sums", {}), **noted,
    )  # fmt: skip
    write_json(_file(job, name), report, FORMAT, name)


def write_service_report(
    job: Job, name: str, learned: dict[str, list[str]], transcript: Transcript, seconds: float, *, has_part: bool
) -> None:
    """Write what a party notes about a prediction for others, or by others."""
    report = Report(
        party=name, seconds={"prediction": seconds}, sent=_sent(transcript), learned=learned, has_part=has_part
    )
    write_json(service_report_file(job, name), report, FORMAT, name)


def service_report_file(job: Job, name: str) -> Path:
    """Return where a party notes what a prediction for others, or by others, took and told."""
    return Path(job.output) / f"{name}.prediction.report.json"


def _sent(transcript: Transcript) -> dict[str, dict[str, Any]]:
    """Return what a party sent, by peer."""
    return {pair.partition(" -> ")[2]: totals for pair, totals in traffic_of([transcript]).totals.items()}


def expendable(job: Job) -> list[str]:
    """Return whom a training goes on without."""
    return job.system.may_lose(job.cast(), job.settings()[0])


def load_reports(job: Job) -> dict[str, Report]:
    """Read what all parties of a finished job on this machine noted, but for those lost that it could go on without."""
    files = {name: _file(job, name) for name in job.parties}
    may_lack = expendable(job)
    return {
        name: read_json(path, Report, FORMAT, name)
        for name, path in files.items()
        if path.exists() or name not in may_lack
    }


def _file(job: Job, name: str) -> Path:
    return Path(job.output) / f"{name}.report.json"
