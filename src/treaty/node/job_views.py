"""What people see of a job at a node: verdict, states, progress, disclosures and results; and how it is forgotten.

Before a job is approved, `verdict_on` and `learned` say what this node's policies decide and what parties would learn.
To forget an ended job is to remove its files. The audit log records what was removed. Ledgers, in ``stores``, count for
later jobs, too, and are never removed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from treaty.data.reading import check_there
from treaty.errors import ConfigError, TreatyError
from treaty.node.attempts import local_job, tables_of
from treaty.node.cards import Card
from treaty.node.identity import Own
from treaty.node.policy import PolicyVerdict, verdict
from treaty.node.proposals import JobStatus, Proposal, Verb, data_sets, in_words, roles_of
from treaty.node.settings import JobFiles, Settings
from treaty.node.store import FINAL, TRANSITIONS, JobRow, Store
from treaty.runs.job import Job
from treaty.runs.local_checks import CheckFinding, Sizes, check_own
from treaty.runs.report import learned_by


def verdict_on(settings: Settings, trusted: Collection[str], job: Job, verb: Verb) -> PolicyVerdict:
    """Return the joint verdict of the policies of all data sets that a job uses at this node.

    `trusted` are the peers whose cards are trusted. Queries are run and tables are read if rules need it. If this party
    brings no data, a person must approve.
    """
    name = settings.name
    strangers = [party for party in job.parties if party != name and party not in trusted]
    cards = f"no trusted card, or no [peers.NAME], of {', '.join(strangers)}" if strangers else "cards of all parties"
    findings, needs_person = [CheckFinding("keys", not strangers, cards)], False
    named = data_sets(job, name, verb)
    for of in named:
        try:
            data_set = settings.data_set(of)
            if data_set.sql is None:
                check_there(data_set.path, name)
            found = verdict(job, verb, name, data_set)
            main = settings.data_set(named[0])
            # Other data sets are read as the first one is.
            if any(getattr(data_set, each) != getattr(main, each) for each in ("id", "columns", "drop", "categorical")):
                differ = f"{of} needs the id, columns, drop and categorical of {main.name}, as which it is read"
                findings.append(CheckFinding("eval_tables", False, differ))
        except TreatyError as error:
            findings.append(CheckFinding("data", False, f"{of}: {error}"))
            continue
        where = f"{of}: " if len(named) > 1 else ""
        findings += [CheckFinding(finding.what, finding.fine, where + finding.said) for finding in found.findings]
        needs_person |= found.needs_person
    return PolicyVerdict(all(finding.fine for finding in findings), needs_person or not named, findings)


def checked(
    own: Own, cards: Mapping[str, Card], settings: Settings, job: Job, verb: Verb, sizes: Sizes | None = None
) -> list[CheckFinding]:
    """Read this node's tables as the job would, and check folders, keys and the clock; return the findings.

    `sizes` are the table sizes that other parties sent.
    """
    tables = tables_of(job, verb, settings)
    for of in tables:
        settings.data_set(of).fetch()
    # An address at which no process listens, and which none dials.
    nowhere = {own.name: f"unix:{settings.folder}"}
    return check_own(local_job(job, "check", verb, own, cards, settings, tables, nowhere), own.name, sizes)


def learned(job: Job, verb: Verb) -> dict[str, list[str]]:
    """Return what each party, or role, would learn, in sentences."""
    if verb == "train":
        return learned_by(job, roles_of(job, verb))
    rows = "the rows that all have" if verb == "serve" else "its rows"
    lines = {party: [f"which of {rows} are asked for, and when"] for party in job.parties if party != job.active}
    what = "predictions" if verb != "explain" else "predictions, and the total contribution of each party's columns"
    return {job.active: [f"{what}, of the rows that all parties have"], **lines}


@dataclass(frozen=True)
class Progress:
    """How far a job is: `done` of `total` units, and the seconds left, if known."""

    done: int
    total: int
    unit: str = "trees"
    seconds_left: float | None = None

    def __str__(self) -> str:
        done = f"{self.done} of {self.total} {self.unit}"
        if self.seconds_left is None:
            return done
        lengths = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
        # Two of a unit or more, else the next smaller one: 90 minutes rather than 2 hours.
        unit, length = next((each for each in lengths if self.seconds_left >= 2 * each[1]), lengths[-1])
        return f"{done}, about {round(self.seconds_left / length)} {unit} left"


@dataclass(frozen=True)
class JobView:
    """What people see of a job, from its proposal and the statuses of the parties' nodes."""

    # The job in a few words.
    title: str
    # The state at each party's node, including this one.
    states: Mapping[str, str] = field(default_factory=dict)
    # The digest of the proposal, which parties compare.
    hash: str = ""
    progress: Progress | None = None
    # What would be learned, or was learned, as sentences.
    disclosures: Sequence[str] = ()
    # This node's policy: whether each rule allows the job, and the rule in words.
    verdict: Sequence[tuple[bool, str]] = ()
    # Files of the job's results on this node.
    models: Sequence[str] = ()
    # Bytes of messages by peer.
    sent: Mapping[str, int] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """The peers with which messages were exchanged."""
        return sorted({*self.sent, *self.received})


def describe(store: Store, settings: Settings, row: JobRow, verdict: PolicyVerdict | None = None) -> JobView:
    """Return what is shown of a job: the proposal, its state at each party's node, what parties would learn."""
    known = readable(row)
    if known is None:
        return JobView(title=title_of(row), states={settings.name: row.state}, hash=row.id)
    proposal, job = known
    views = {party: msgspec.msgpack.decode(view, type=JobStatus).state for party, view in store.views(row.id).items()}
    states = dict.fromkeys(job.parties, "unknown yet") | views | {settings.name: row.state}
    events = [entry.event for entry in store.audit(job=row.id)] if row.state == "finished" else []
    played: dict[str, Any] = next((event for event in reversed(events) if event["what"] == "played"), {})
    progress = None
    if row.total and row.state in ("queued", "running", "waiting"):
        spent, running = time.time() - row.created, row.rounds and row.state == "running"
        left = spent / row.rounds * (row.total - row.rounds) if running else None
        progress = Progress(row.rounds, row.total, "rounds", left)
    return JobView(
        title=in_words(job, proposal.kind),
        states=states,
        hash=row.id,
        progress=progress,
        disclosures=played.get("learned")
        or [f"{who}: {each}" for who, sentences in learned(job, proposal.verb).items() for each in sentences],
        verdict=[(finding.fine, f"{finding.what}: {finding.said}") for finding in verdict.findings] if verdict else [],
        models=[str(path) for path in results(settings, row, proposal)],
        sent=played.get("sent", {}),
        received=played.get("received", {}),
    )


def title_of(row: JobRow) -> str:
    """Describe a job in one line, even if this version of Treaty cannot read it."""
    known = readable(row)
    return in_words(known[1], known[0].kind) if known else f"{row.verb}: a job of another version of Treaty"


def results(settings: Settings, row: JobRow, proposal: Proposal) -> list[Path]:
    """Return the files that a finished job has left here."""
    if row.state != "finished":
        return []
    folder, name = JobFiles(settings.folder, row.id, proposal.model).results, settings.name
    wanted = f"{name}.{proposal.verb}-{row.id[:16]}.csv" if proposal.model else f"{name}.*"
    files = sorted(path for path in folder.glob(wanted) if "staged" not in path.name)
    return files if proposal.model else [path for path in files if path.suffix != ".csv" or ".weights" in path.name]


def _proposal(row: JobRow) -> Proposal | None:
    """Return a job's proposal; None if another version of Treaty wrote it."""
    try:
        return msgspec.json.decode(row.proposal, type=Proposal)
    except msgspec.MsgspecError:
        return None


def readable(row: JobRow) -> tuple[Proposal, Job] | None:
    """Return a job's proposal, and the job; None if this version of Treaty cannot read them."""
    proposal = _proposal(row)
    try:
        return None if proposal is None else (proposal, proposal.described())
    except TreatyError:
        return None


def kept_for(store: Store, row: JobRow) -> str:
    """Return why a job cannot be forgotten now; "" if it can."""
    if row.state not in FINAL:
        return f"job {row.id[:12]} is {row.state}: only jobs that have ended can be forgotten; treaty cancel ends it"
    for other, proposal in _open(store):
        if row.id in (proposal.model, proposal.from_model):
            return (
                f"job {other.id[:12]}, which is {other.state}, needs the model of job {row.id[:12]} ({proposal.verb}): "
                "wait for its end, or cancel it"
            )
    return ""


def left_of(settings: Settings, store: Store, row: JobRow) -> list[Path]:
    """Return the files, and the folder of checkpoints, that a job has left here.

    Predictions belong to their own job, not to the training. The snapshot of a query belongs to the job unless an open
    job names the same data set.
    """
    proposal = _proposal(row)
    files = JobFiles(settings.folder, row.id, "" if proposal is None else proposal.model)
    if proposal is not None and proposal.model:
        found = [files.results / f"{settings.name}.{proposal.verb}-{row.id[:16]}.csv"]
    else:
        predictions = [f"{settings.name}.{verb}-*.csv" for verb in ("predict", "explain")]
        found = [file for file in sorted(files.results.glob("*")) if not any(map(file.match, predictions))]
    found += [files.checkpoints, files.log]
    named = _queries(settings, row)
    named -= {of for other, _ in _open(store) for of in _queries(settings, other)}
    found += [Path(settings.data[of].path) for of in sorted(named)]
    return [path for path in found if path.exists()]


def forget_job(settings: Settings, store: Store, row: JobRow, by: str) -> list[Path]:
    """Remove what a job has left here, and record what was removed and by whom; return the removed paths.

    Raises ConfigError if the job has not ended, an open job needs its model, or something cannot be removed.
    """
    if why := kept_for(store, row):
        raise ConfigError(why)
    folder, files, left = Path(settings.folder), JobFiles(settings.folder, row.id), left_of(settings, store, row)
    # Recorded first, so that nothing is ever removed without an entry.
    if left:
        removed = [str(path.relative_to(folder)) for path in left]
        store.note({"what": "forgotten", "job": row.id, "by": by, "removed": removed})
    for path in left:
        try:
            if path == files.checkpoints:
                files.remove_checkpoints()
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot remove {path}: {error.strerror}; fix that, and forget the job again") from None
        with suppress(OSError):  # the folder is not empty
            if path.parent.parent == folder / "models":
                path.parent.rmdir()
    return left


def _open(store: Store) -> Iterator[tuple[JobRow, Proposal]]:
    for row in store.jobs(TRANSITIONS.keys() - FINAL):
        proposal = _proposal(row)
        if proposal is not None:
            yield row, proposal


def _queries(settings: Settings, row: JobRow) -> set[str]:
    """Return the data sets of a job here that come from queries."""
    known = readable(row)
    if known is None or settings.name not in known[1].parties:
        return set()
    named = data_sets(known[1], settings.name, known[0].verb)
    return {of for of in named if of in settings.data and settings.data[of].sql is not None}
