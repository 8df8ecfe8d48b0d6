"""Who learns what in a job, before it begins: sentences by party, and the table of messages that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treaty.errors import ConfigError
from treaty.machine.process import trust
from treaty.messaging.messages import Abort, Goodbye, Part
from treaty.runs.job import Align, Job
from treaty.runs.progress import AllKept, PartKept
from treaty.runs.report import learned_by
from treaty.runs.rows import RowOrder
from treaty.systems import Model, find_system
from treaty.systems.alignment.leakage import ROUTES as ALIGNMENT
from treaty.systems.leakage import ANY, STAGES, Route, Routes, routes, sent
from treaty.systems.options import SystemOptions, converted, names_of
from treaty.systems.system import Roles, System, roles_of

OF_RUNS: Routes = routes(
    Route(RowOrder, ("active",), ("passive",)),
    Route(PartKept, ANY, ANY),
    Route(AllKept, ANY, ANY),
    Route(Abort, ANY, ANY),
    Route(Part, ANY, ANY),
    Route(Goodbye, ANY, ANY),
    reference="docs/jobs.md, Connections and exit codes",
)
"""What every job between processes sends besides its system's messages."""

_MOST_OWNERS = 32
_HEADINGS = ("message", "from → to", "the receiver learns", "form", "what lessens it", "reference")


@dataclass(frozen=True, slots=True)
class Disclosures:
    """Who learns what in a job.

    Attributes
    ----------
    system : str
        The system's name.
    learned : mapping of str to sequence of str
        By party, or role, what it learns beyond its own data, in sentences.
    messages : mapping of str to tuple of Route
        The messages that tell it, by what is played: alignment, training, prediction and so on.
    """

    system: str
    learned: Mapping[str, Sequence[str]]
    messages: Mapping[str, Routes]

    def __str__(self) -> str:
        """Return the sentences, one a line."""
        return "\n".join(f"{party}: {sentence}" for party, said in self.learned.items() for sentence in said)

    def markdown(self) -> str:
        """Return sentences and tables as Markdown."""
        return "\n".join(self._markdown())

    def _markdown(self) -> Iterator[str]:
        yield f"# What each party learns: {self.system}"
        for party, said in self.learned.items():
            yield from ("", f"## {party}", "")
            yield from (f"- {_escaped(sentence)}" for sentence in said)
        for what, table in self.messages.items():
            yield from ("", f"## Messages: {what}", "")
            yield table_of(table)


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
    model : {"trees", "logistic"} or None
        What is trained, where `system` is a name that both have ("pooled").
    align : mapping of str to object or None
        The options of an alignment of rows that comes first, of a job's ``[align]``; None: there is none.
    **options : object
        By name, of the system where `system` is a name, and of the estimator (``n_estimators``, ``family``, ...).

    Returns
    -------
    Disclosures

    Raises
    ------
    ConfigError
        When there is no such system or option, options do not go together, or parties are too few.

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
    roles = _cast(record, list(parties) if parties else None, own)
    before = None if align is None else converted(align, Align, "[align]")
    return _of(record, roles, (own, common), before, record.disclosures(roles, own, common, None))


def of_job(job: Job) -> Disclosures:
    """Return who would learn what in the training of a job, and in what is done with its model."""
    roles = job.roles()
    return _of(job.system, roles, job.settings(), job.align, learned_by(job, roles))


def _of(
    system: System, roles: Roles, settings: tuple[Any, Any], align: Any, learned: Mapping[str, Sequence[str]]
) -> Disclosures:
    found: dict[str, Routes] = {}
    if align is not None and system.split == "columns":
        found["alignment"] = sent(ALIGNMENT, align, None)
    found |= {title: sent(system.routes[what], *settings) for what, title in STAGES.items() if what in system.routes}
    if system.service is not None and not system.service.refused(settings[0]):
        found["prediction for others"] = sent(system.service.routes, *settings)
    if system.split != "none":
        found["every job between processes"] = OF_RUNS
    return Disclosures(system.name, learned, {title: table for title, table in found.items() if table})


def _settings(system: System, given: SystemOptions | str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return checked options: the system's own, and the common ones."""
    of_common = {name: value for name, value in options.items() if name in names_of(system.common)}
    of_own = {name: value for name, value in options.items() if name not in of_common}
    if isinstance(given, str):
        own = converted(of_own, system.options, f"[{system.name}]")
    elif of_own:
        raise ConfigError(f"expected the estimator's options beside {type(given).__name__}, got {next(iter(of_own))!r}")
    else:
        own = given
    common = converted(of_common, system.common, f"[{system.common.table}]")
    own = own.settled(common)
    common = common.checked(own)
    own.check(common)
    return own, common


def _cast(system: System, parties: list[str] | None, options: Any) -> Roles:
    if parties is not None:
        return roles_of(system, parties, None, options)
    names = ["party1"]
    while True:
        names.append(f"party{len(names) + 1}")
        try:
            return roles_of(system, names, None, options)
        except ConfigError:  # too few
            if len(names) == _MOST_OWNERS:
                raise


def table_of(table: Routes, *, conditions: bool = False) -> str:
    """Return lines as a Markdown table; with `conditions` also under which options each is sent."""
    headings = (*_HEADINGS, "sent with") if conditions else _HEADINGS
    rows = [headings, ("---",) * len(headings), *(_cells(line, conditions=conditions) for line in table)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(line: Route, *, conditions: bool) -> tuple[str, ...]:
    name, told = f"`{line.message.__name__}`", line.leakage
    cells = (name, line.way, *map(_escaped, (told.tells, told.form, told.guard, line.reference)))
    return (*cells, _escaped(line.when.words if line.when else "")) if conditions else cells


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
