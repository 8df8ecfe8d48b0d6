"""What each party of a job notes about a finished run: with what and whom, how long it took, and what was learned."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from treaty.data.ids import Psi
from treaty.data.table import Schema
from treaty.files import Format, read_json, write_json
from treaty.messaging.party import Party
from treaty.messaging.transcript import Timeline, Transcript, timeline_of
from treaty.models.interpretation import own_importances
from treaty.models.linear import LinearPart
from treaty.runs.job import Job
from treaty.runs.rows import TrainingTables, joined_in
from treaty.runs.table_files import counted
from treaty.runs.threads import traffic_of
from treaty.systems.alignment.alignment import ListSummary
from treaty.systems.alignment.kkrt import OprfOffer
from treaty.systems.alignment.leakage import disclosures
from treaty.systems.options import given
from treaty.systems.system import Roles

FORMAT = Format("report", 2)


class Report(msgspec.Struct, kw_only=True):
    """What a party notes about a finished run, in a file of its own."""

    party: str
    job: str
    role: str
    ended: str  # date and time, UTC
    versions: dict[str, str]
    # with the system's name as "protocol"
    options: dict[str, Any]
    seconds: dict[str, float]  # per phase
    # seconds for each peer: to come, and for its messages
    waited: dict[str, float]
    # to each peer: messages, bytes, bytes by message type
    sent: dict[str, dict[str, Any]]
    received: dict[str, int] = {}  # bytes from each peer
    # by each party, or role, in words
    learned: dict[str, list[str]]
    # the model's id, the same at all parties
    model: str = ""
    # trained on here: where they were aligned, those that all parties have
    rows: int | None = None
    # of the party's table, where rows were aligned
    own_rows: int | None = None
    columns: dict[str, str] = {}  # own ones, with their types
    # where they are known: of each eval set by round, of a regression by epoch
    losses: dict[str, list[float]] = {}
    best_round: int | None = None
    # of own columns, by kind: gain and count, or weights
    importances: dict[str, dict[str, float]] = {}
    encryption: str = ""
    # at the active party, why that cipher, or what sealing sums was to take
    choice: str = ""
    # estimated share of each passive party's bins that exact sums showed
    exact_sums: dict[str, float] = {}
    # share of each passive party's bins that sides of splits revealed, over all jobs
    sides: dict[str, float] = {}
    spent: str = ""  # what the party's noise cost
    # at the active party of a regression, that training ended before the loss was steady
    unsettled: str = ""
    # own columns of which categories share a bin, in words
    joined: list[str] = []
    # at the party with the trees, that the training loss rose
    diverged: str = ""
    has_part: bool = True
    # when how many bytes went to and came from each peer
    timeline: Timeline | None = None

    def table(self) -> str:
        """Say what was trained on here, in one line."""
        categorical = [name for name, kind in self.columns.items() if kind != "numeric"]
        return counted(self.own_rows or self.rows or 0, len(self.columns) - len(categorical), categorical)


def write_report(
    path: Path, job: Job, roles: Roles, party: Party, part: Any, tables: TrainingTables, seconds: dict[str, float],
    model_id: str = "",
) -> None:  # fmt: skip
    """Write what a party notes about a training; its `part` is None at roles without one.

    `model_id` is the model's, as far as such a role knows it.
    """
    learned = learned_by(job, roles, part, _psi_used(job, roles, party))
    noted: dict[str, Any] = {
        field: getattr(part, field, "") for field in ("encryption", "choice", "spent", "unsettled")
    }
    data, forest = tables.data, getattr(part, "forest", None)
    report = Report(
        **_of_run(job, party, roles.of[party.name]), seconds=seconds, learned=learned, has_part=part is not None,
        model=getattr(part, "model_id", model_id), rows=None if data is None else data.table.n_rows,
        own_rows=tables.n_rows,
        columns={} if data is None else column_types(data.table.schema),
        losses=losses_of(part), best_round=None if forest is None else forest.best_round,
        importances={} if part is None else importances_of(part),
        exact_sums=getattr(part, "exact_sums", {}), sides=getattr(part, "sides", {}),
        joined=[] if data is None else joined_in(job, data.table), diverged=getattr(forest, "diverged", ""), **noted,
    )  # fmt: skip
    write_json(path, report, FORMAT, party.name)


def learned_by(job: Job, roles: Roles, part: Any = None, psi: Psi | None = None) -> dict[str, list[str]]:
    """Return what each party, or role, learns in a training, in words.

    `part` is what is there of the model, `psi` how rows were aligned, None where that is not known.
    """
    learned = job.system.disclosures(roles, *job.settings(), part)
    if job.align is None:
        return learned
    others = [other for other in roles.owners if other != job.active]
    before = disclosures(
        job.active, others, on_duplicate=job.align.on_duplicate, psi=psi or job.align.psi,
        log=job.align.log is not None,
    )  # fmt: skip
    return {who: before.get(who, []) + learned[who] for who in learned}


def _psi_used(job: Job, roles: Roles, party: Party) -> Psi | None:
    """Return how rows were aligned in this run, as far as a party's messages show it: of others' it sees none."""
    steps = party.transcript.by_type()
    if OprfOffer.__name__ in steps:
        return "kkrt"
    sees_all = party.name == job.active or len(roles.owners) == 2
    return "ecdh" if sees_all and ListSummary.__name__ in steps else None


def _of_run(job: Job, party: Party, role: str) -> dict[str, Any]:
    """Return the fields of a report that every kind of run has."""
    return {
        "party": party.name,
        "job": job.name,
        "role": role,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "options": {name: "inf" if value == float("inf") else value for name, value in given(*job.settings()).items()},
        "waited": {peer: round(seconds, 3) for peer, seconds in party.waited.items()},
        "sent": _sent(party.transcript),
        "received": received_by(party.transcript),
        "timeline": timeline_of([party.transcript], "sent", "received"),
    }


def versions() -> dict[str, str]:
    """Return the versions of Treaty, of Python and of the libraries that a model hangs on most."""
    libraries = ("treaty-learn", "numpy", "pyarrow", "grpcio", "cryptography")
    return {"python": platform.python_version()} | {name: version(name) for name in libraries}


def column_types(schema: Schema) -> dict[str, str]:
    """Return the type of each column, in words."""
    described = zip(schema.names, schema.kinds, schema.categories, strict=True)
    return {name: f"{len(values)} categories" if values is not None else kind for name, kind, values in described}


def losses_of(part: Any) -> dict[str, list[float]]:
    """Return the losses that a part knows: of each eval set by round, with the metric's name where there are several.

    Of a regression, by epoch.
    """
    if isinstance(part, LinearPart):
        return {"train": part.losses, **part.eval_losses} if part.losses else {}
    forest = getattr(part, "forest", None)
    history = {} if forest is None else forest.history
    return {
        name if len(of) == 1 else f"{name} {metric}": values
        for name, of in history.items()
        for metric, values in of.items()
    }


def importances_of(part: Any) -> dict[str, dict[str, float]]:
    """Return the importances of a party's own columns, by kind; of a regression the weights."""
    if not isinstance(part, LinearPart):
        return own_importances(part)
    if part.of_classes:
        labels = part.classes or range(len(part.of_classes))
        return {f"weight, {label}": _weights(of) for label, of in zip(labels, part.of_classes, strict=True)}
    return {"weight": _weights(part)}


def _weights(part: LinearPart) -> dict[str, float]:
    return dict(zip(part.column_names(), part.coef.tolist(), strict=True))


def write_service_report(
    job: Job, party: Party, role: str, learned: dict[str, list[str]], seconds: float, *, has_part: bool
) -> None:
    """Write what a party notes about a prediction for others, or by others."""
    report = Report(**_of_run(job, party, role), seconds={"prediction": seconds}, learned=learned, has_part=has_part)
    write_json(service_report_file(job, party.name), report, FORMAT, party.name)


def service_report_file(job: Job, name: str) -> Path:
    """Return the file of a party's report on a prediction for others, or by others."""
    return Path(job.output) / f"{name}.prediction.report.json"


def received_by(transcript: Transcript) -> dict[str, int]:
    """Return the bytes that a party received, by peer."""
    return {pair.sender: total.nbytes for pair, total in transcript.by_pair("received").items()}


def _sent(transcript: Transcript) -> dict[str, dict[str, Any]]:
    """Return what a party sent, by peer."""
    return {pair.partition(" -> ")[2]: totals for pair, totals in traffic_of([transcript]).totals.items()}


def expendable(job: Job) -> list[str]:
    """Return the parties that a training can continue without."""
    return job.system.may_lose(job.roles(), job.settings()[0])


def load_reports(job: Job) -> dict[str, Report]:
    """Read the reports of a finished job on this machine; parties that were lost, and not needed, have none."""
    files = {name: report_file(job, name) for name in job.parties}
    may_lack = expendable(job)
    return {
        name: read_json(path, Report, FORMAT, name)
        for name, path in files.items()
        if path.exists() or name not in may_lack
    }


def trained_model(job: Job, name: str) -> str:
    """Return the id of the model in whose training a party took part, by its report; empty where it has none."""
    path = report_file(job, name)
    return read_json(path, Report, FORMAT, name).model if path.exists() else ""


def report_file(job: Job, name: str) -> Path:
    """Return the file of a party's report on its training."""
    return Path(job.output) / f"{name}.report.json"
