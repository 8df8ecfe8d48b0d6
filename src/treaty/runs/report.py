"""What each party learns in a job: stated before the job begins, and noted with times and bytes when a run has ended.

`disclosures` states it with the messages it comes from. A `Report` is what a party notes of its own run, in a file.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from treaty.data.ids import Psi
from treaty.data.table import Schema
from treaty.errors import ConfigError
from treaty.files import Format, read_json, write_json
from treaty.machine.process import trust
from treaty.messaging.messages import Abort, Goodbye, Part
from treaty.messaging.party import Party
from treaty.messaging.transcript import Timeline, timeline_of
from treaty.models.interpretation import own_importances
from treaty.models.linear import LinearPart
from treaty.models.statistics import StatisticsPart
from treaty.models.trees import HeldOut
from treaty.runs.connecting import AllKept, PartKept
from treaty.runs.job import Align, Job, checked_options
from treaty.runs.rows import RowOrder, joined_in
from treaty.runs.table_files import counted
from treaty.runs.threads import fewest_roles, traffic_of
from treaty.systems import Model, find_system
from treaty.systems.alignment import leakage as alignment
from treaty.systems.alignment.alignment import ListSummary
from treaty.systems.alignment.kkrt import OprfOffer
from treaty.systems.leakage import ANY, STAGES, Route, Routes, routes, sent
from treaty.systems.options import SystemOptions, converted, given, names_of
from treaty.systems.system import RoleInput, Roles, System, roles_of
from treaty.version import __version__

FORMAT = Format("report", 2)


# what every job between processes sends besides its system's messages
OF_RUNS: Routes = routes(
    Route(RowOrder, ("active",), ("passive",)),
    Route(PartKept, ANY, ANY),
    Route(AllKept, ANY, ANY),
    Route(Abort, ANY, ANY),
    Route(Part, ANY, ANY),
    Route(Goodbye, ANY, ANY),
    reference="docs/jobs.md, Connections and exit codes",
)

_HEADINGS = ("message", "from → to", "the receiver learns", "form", "reduced by", "reference")


@dataclass(frozen=True, slots=True)
class Disclosures:
    """Who learns what in a job."""

    # the system's name
    system: str
    # by party, or role, what it learns beyond its own data, in sentences
    learned: Mapping[str, Sequence[str]]
    # the messages it comes from, by stage: alignment, training, prediction and so on
    messages: Mapping[str, Routes]

    def __str__(self) -> str:
        """Return the sentences, one a line."""
        return "\n".join(f"{party}: {sentence}" for party, facts in self.learned.items() for sentence in facts)

    def markdown(self) -> str:
        """Return sentences and tables as Markdown."""
        lines = [f"# What each party learns: {self.system}"]
        for party, facts in self.learned.items():
            lines += ["", f"## {party}", "", *(f"- {_escaped(sentence)}" for sentence in facts)]
        for stage, table in self.messages.items():
            lines += ["", f"## Messages: {stage}", "", table_of(table)]
        return "\n".join(lines)


def disclosures(
    system: SystemOptions | str,
    *,
    parties: Sequence[str] | None = None,
    model: Model | None = None,
    align: Mapping[str, Any] | None = None,
    **options: Any,
) -> Disclosures:
    """Return who would learn what, before any training.

    Parameters
    ----------
    system : SystemOptions or str
        A system with its options, as estimators take it, or the name of one.
    parties : sequence of str or None
        The parties with rows, the active one first. None: as few as the system takes, called party1, party2, ...
    model : {"trees", "logistic", "statistics"} or None
        What is trained, if `system` is a name that several have ("pooled").
    align : mapping of str to object or None
        The options of an alignment of rows that comes first, as in a job's ``[align]``; None: there is none.
    **options : object
        By name, of the system if `system` is a name, and of the estimator (``n_estimators``, ``family``, ...).

    Returns
    -------
    Disclosures

    Raises
    ------
    ConfigError
        If there is no such system or option, if options contradict each other, or if parties are too few.

    See Also
    --------
    treaty.attacks.auditing.audit : What attacks find in a training.

    Examples
    --------
    >>> import treaty
    >>> found = treaty.disclosures("secureboost", parties=["bank", "shop"], encryption="lattice")
    >>> list(found.learned)
    ['bank', 'shop']
    """
    named = system if isinstance(system, str) else system.system
    trust([named])
    record = find_system(named, model)
    own, common = _settings(record, system, options)
    roles = roles_of(record, list(parties), None, own) if parties else fewest_roles(record, own)
    before = None if align is None else converted(align, Align, "[align]")
    return _of(record, (own, common), before, record.disclosures(roles, own, common, None))


def of_job(job: Job) -> Disclosures:
    """Return who would learn what in the training of a job, and in predictions by its model."""
    return _of(job.system, job.settings(), job.align, learned_by(job, job.roles()))


def _of(
    system: System, settings: tuple[Any, Any], align: Align | None, learned: Mapping[str, Sequence[str]]
) -> Disclosures:
    found: dict[str, Routes] = {}
    if align is not None and system.split == "columns":
        found["alignment"] = sent(alignment.ROUTES, align, None)
    found |= {title: sent(system.routes[what], *settings) for what, title in STAGES.items() if what in system.routes}
    if system.service is not None and not system.service.refused(settings[0]):
        found["prediction for others"] = sent(system.service.routes, *settings)
    if system.split != "none":
        found["every job between processes"] = OF_RUNS
    return Disclosures(system.name, learned, {title: table for title, table in found.items() if table})


def _settings(system: System, of: SystemOptions | str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return checked options: the system's own, and the common ones."""
    of_common = {name: value for name, value in options.items() if name in names_of(system.common)}
    of_own = {name: value for name, value in options.items() if name not in of_common}
    if of_own and not isinstance(of, str):
        raise ConfigError(
            f"expected only options of the estimator with {type(of).__name__}, got {next(iter(of_own))!r}"
        )
    return checked_options(system, of_own if isinstance(of, str) else of, of_common)


def table_of(table: Routes, *, conditions: bool = False) -> str:
    """Return lines as a Markdown table; with `conditions`, also under which options each message is sent."""
    headings = (*_HEADINGS, "sent with") if conditions else _HEADINGS
    rows: list[Sequence[str]] = [headings, ("---",) * len(headings)]
    for line in table:
        leaks = line.leakage
        texts = [leaks.tells, leaks.form, leaks.guard, line.reference]
        if conditions:
            texts.append(line.when.words if line.when else "")
        rows.append((f"`{line.message.__name__}`", line.way, *map(_escaped, texts)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def learned_by(job: Job, roles: Roles, part: Any = None, psi: Psi | None = None) -> dict[str, list[str]]:
    """Return what each party, or role, learns in a training, in sentences.

    `part` is the part of the model at hand, and `psi` how rows were aligned; None, if that is not known.
    """
    learned = job.system.disclosures(roles, *job.settings(), part)
    if job.from_model is not None:
        sides = (
            "which side each training row takes at every split of the earlier model, as in a prediction (from_model)"
        )
        model = "that training continues an earlier model, and which of its own splits this model uses (from_model)"
        told = {who: [sides if who == job.active else model] for who in roles.owners}
        learned = {who: [*of, *told.get(who, [])] for who, of in learned.items()}
    if job.align is None:
        return learned
    others = [other for other in roles.owners if other != job.active]
    before = alignment.disclosures(
        job.active, others, on_duplicate=job.align.on_duplicate, psi=psi or job.align.psi,
        log=job.align.log is not None,
    )  # fmt: skip
    return {who: before.get(who, []) + learned[who] for who in learned}


class Report(msgspec.Struct, kw_only=True):
    """What a party notes about a finished run, in a file of its own."""

    party: str
    job: str
    role: str
    # date and time, UTC
    ended: str
    versions: dict[str, str]
    # with the system's name as "protocol"
    options: dict[str, Any]
    # by phase
    seconds: dict[str, float]
    # seconds spent waiting for each peer and its messages
    waited: dict[str, float]
    # to each peer: messages, bytes, bytes by message type
    sent: dict[str, dict[str, Any]]
    # bytes from each peer
    received: dict[str, int] = {}
    # by each party, or role, in words
    learned: dict[str, list[str]]
    # the model's id, the same at all parties
    model: str = ""
    # that were trained on here: if they were aligned, those that all parties have
    rows: int | None = None
    # in the party's table, if rows were aligned
    own_rows: int | None = None
    # own columns with their types
    columns: dict[str, str] = {}
    # if they are known: of each eval set by round, of a regression by epoch
    losses: dict[str, list[float]] = {}
    # at the party with the trees: the loss of training rows by number of rounds, at some of them
    train_losses: dict[int, float] = {}
    # at the active party: as `losses`, of trees on its own columns alone
    alone: dict[str, list[float]] = {}
    best_round: int | None = None
    # at a leader: metrics of held-out rows of participants, by group
    held_out: HeldOut | None = None
    # of own columns, by kind: gain and count, or weights
    importances: dict[str, dict[str, float]] = {}
    encryption: str = ""
    # at the active party: why that cipher, or what sealing sums was expected to cost
    choice: str = ""
    # estimated share of each passive party's bins that exact sums revealed
    exact_sums: dict[str, float] = {}
    # share of each passive party's bins that sides of splits revealed, over all jobs
    sides: dict[str, float] = {}
    # what the party's noise cost
    spent: str = ""
    # at the active party of a regression: that training ended before the loss was steady
    unsettled: str = ""
    # own columns of which categories share a bin, in words
    joined: list[str] = []
    # at the party with the trees: that the training loss rose
    diverged: str = ""
    has_part: bool = True
    # bytes to and from each peer over time
    timeline: Timeline | None = None

    def table(self) -> str:
        """Describe in one line what was trained on here."""
        categorical = [name for name, kind in self.columns.items() if kind != "numeric"]
        return counted(self.own_rows or self.rows or 0, len(self.columns) - len(categorical), categorical)


def write_report(
    path: Path, job: Job, inputs: RoleInput, part: Any, own_rows: int | None, seconds: dict[str, float]
) -> None:
    """Write what a party notes about a training; its `part` is None at roles without one.

    `own_rows` are the rows of its table, if rows were aligned.
    """
    party, roles, data = inputs.party, inputs.roles, inputs.data
    noted: dict[str, Any] = {
        field: getattr(part, field, "") for field in ("encryption", "choice", "spent", "unsettled")
    }
    forest = getattr(part, "forest", None)
    report = Report(
        **_of_run(job, party, roles.of[party.name]), **noted, seconds=seconds, has_part=part is not None,
        learned=learned_by(job, roles, part, _psi_used(roles, party)), model=getattr(part, "model_id", inputs.model_id),
        rows=None if data is None else data.table.n_rows, own_rows=own_rows,
        columns={} if data is None else column_types(data.table.schema),
        losses=losses_of(part),
        train_losses={} if forest is None else {at: of for at, of in forest.losses.items() if math.isfinite(of)},
        best_round=None if forest is None else forest.best_watched,
        held_out=getattr(part, "held_out", None),
        importances={} if part is None else importances_of(part),
        exact_sums=getattr(part, "exact_sums", {}), sides=getattr(part, "sides", {}),
        joined=[] if data is None else joined_in(inputs.common, data.table), diverged=getattr(forest, "diverged", ""),
    )  # fmt: skip
    write_json(path, report, FORMAT, party.name)


def _psi_used(roles: Roles, party: Party) -> Psi | None:
    """Return how rows were aligned in this run, as far as a party's messages show it: it sees none of other pairs."""
    steps = {entry.step for entry in party.transcript.entries}
    if OprfOffer.__name__ in steps:
        return "kkrt"
    sees_all = party.name == roles.active or len(roles.owners) == 2
    return "ecdh" if sees_all and ListSummary.__name__ in steps else None


def write_service_report(
    job: Job, party: Party, role: str, learned: dict[str, list[str]], seconds: float, *, has_part: bool
) -> None:
    """Write what a party notes about a prediction for others, or by others."""
    report = Report(**_of_run(job, party, role), seconds={"prediction": seconds}, learned=learned, has_part=has_part)
    write_json(service_report_file(job, party.name), report, FORMAT, party.name)


def _of_run(job: Job, party: Party, role: str) -> dict[str, Any]:
    """Return the fields of a report that every kind of run has."""
    totals, own = traffic_of([party.transcript]).totals, job.parties[party.name].monotone_constraints
    options = given(*job.settings()) | ({"monotone_constraints": own} if own else {})
    return {
        "party": party.name, "job": job.name, "role": role, "versions": versions(),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": {name: "inf" if value == float("inf") else value for name, value in options.items()},
        "waited": {peer: round(seconds, 3) for peer, seconds in party.waited.items()},
        "sent": {pair.partition(" -> ")[2]: of_pair for pair, of_pair in totals.items()},
        "received": party.transcript.bytes_by_peer("received"),
        "timeline": timeline_of([party.transcript], "sent", "received"),
    }  # fmt: skip


def report_file(job: Job, name: str) -> Path:
    """Return the file of a party's report on its training."""
    return Path(job.output) / f"{name}.report.json"


def service_report_file(job: Job, name: str) -> Path:
    """Return the file of a party's report on a prediction for others, or by others."""
    return Path(job.output) / f"{name}.prediction.report.json"


def expendable(job: Job) -> list[str]:
    """Return the parties that a training can continue without."""
    return job.system.may_lose(job.roles(), job.settings()[0])


def load_reports(job: Job) -> dict[str, Report]:
    """Read the reports of a finished job on this machine; parties that the job has lost have none."""
    files = {name: report_file(job, name) for name in job.parties}
    may_lack = expendable(job)
    return {
        name: read_json(path, Report, FORMAT, name)
        for name, path in files.items()
        if path.exists() or name not in may_lack
    }


def trained_model(job: Job, name: str) -> str:
    """Return the id of the model that a party has trained with the others, by its report; "" if it has none."""
    path = report_file(job, name)
    return read_json(path, Report, FORMAT, name).model if path.exists() else ""


def versions() -> dict[str, str]:
    """Return the versions of Treaty, of Python and of the libraries that a model depends on most."""
    libraries = ("numpy", "pyarrow", "cryptography")
    own = {"python": platform.python_version(), "treaty-learn": __version__}
    return own | {name: version(name) for name in libraries}


def column_types(schema: Schema) -> dict[str, str]:
    """Return the type of each column, in words."""
    described = zip(schema.names, schema.kinds, schema.categories, strict=True)
    return {name: f"{len(values)} categories" if values is not None else kind for name, kind, values in described}


def losses_of(part: Any) -> dict[str, list[float]]:
    """Return the losses that a part has: by eval set (and metric, if there are several) and round; or by epoch."""
    if isinstance(part, LinearPart):
        return {"train": part.losses, **part.eval_losses} if part.losses else {}
    forest = getattr(part, "forest", None)
    history = {} if forest is None else forest.history
    return {
        name if len(of) == 1 else f"{name} {metric}": values
        for name, of in history.items()
        for metric, values in of.items()
        # JSON has no number for a metric that is not known in all rounds
        if not any(map(math.isnan, values))
    }


def importances_of(part: Any) -> dict[str, dict[str, float]]:
    """Return the importances of a party's own columns, by kind: for a regression, the weights; what statistics show."""
    if isinstance(part, StatisticsPart):
        return part.importances()
    if not isinstance(part, LinearPart):
        return own_importances(part)
    parts = {"weight": part}
    if part.of_classes:
        labels = part.classes or range(len(part.of_classes))
        parts = {f"weight, {label}": of for label, of in zip(labels, part.of_classes, strict=True)}
    return {kind: dict(zip(of.column_names(), of.coef.tolist(), strict=True)) for kind, of in parts.items()}
