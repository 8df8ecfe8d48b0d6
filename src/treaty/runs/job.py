"""The job file: who takes part, with which tables, under which system and options.

The same file serves every organisation; each fills in only what is its own business (`table`, `key`) and leaves the
others' out. Paths are relative to the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treaty.data.ids import NORMALISE, Normalisation, OnDuplicate, Psi
from treaty.errors import ConfigError
from treaty.files import placed, without_mark
from treaty.machine.process import check_trusted, is_code, trust
from treaty.messaging.conversation import INBOX_LIMIT
from treaty.privacy.ledger import EpsilonLimits
from treaty.runs.toml_tables import in_words
from treaty.systems import SYSTEMS, find_system
from treaty.systems.options import advice, converted, names_of
from treaty.systems.system import PartySpec, Roles, System

_ADDRESS, _NAME = r"^(.+:\d{1,5}|unix:/.+)$", r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
Address = Annotated[str, msgspec.Meta(pattern=_ADDRESS)]
Name = Annotated[str, msgspec.Meta(pattern=_NAME)]  # stands in a certificate


DURATIONS = ("wait", "timeout", "reconnect")  # fields of a job in seconds, or in words


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One party of a job.

    Attributes
    ----------
    address : str or None
        ``host:port`` where the others reach it, and where it listens unless `listen` is named. None: chosen when all
        parties run on this machine.
    listen : str or None
        ``host:port`` of its own machine where it listens, where that is not `address`: behind a firewall or forwarder.
        Only its own counts.
    certificate : str or None
        Path of its certificate, which the others pin. None as for `address`.
    key : str or None
        Path of its private key; only its own copy of the job names it.
    id : str or None
        Its column of ids, where it is called otherwise than `align.on`.
    table : str or None
        Path of its training rows, CSV or Parquet; only its own copy names it. Where tables are split by row it says who
        brings rows: everybody's copy names one for each participant, and only a party's own is read. That of the server
        of "fedxgb" says which columns and classes there are; without it the first of its `eval_tables` does.
    eval_tables, predict_table : list of str, str or None
        Paths of its rows of the eval sets, and of the rows to predict. Under "fedxgb" everybody's copy names a user's
        `predict_table` where a hidden model is to predict its rows; only its own is read.
    columns : list of str or None
        The columns to use; None for all but `drop`, label and weight.
    drop : list of str
        Columns to leave out, an id say; `table` must have all of them, other tables may lack some.
    categorical : list of str
        Columns of categories, whose cells are taken as text although they may look like numbers: postal codes, say.
    noisy_labels : str or None
        At the active party, with `mechanism = "label_rr"`: the file that keeps the randomised labels, so that no later
        job on the same table draws them again. None: beside the table.
    most_epsilon, most_epsilon_total : float or None
        The most that noise may cost a person of its table: in one job of this name, however often it is begun, and with
        all that the ledger in `store` has. What would cost more is not released. None: no limit of its own.
    keep_for_audit : str or None
        Folder in which it keeps a record for an audit of gradients, see docs/jobs.md; passive parties need the active
        one to keep one, too. None: it keeps none.
    audit_gigabytes : float
        Most that such a record may take; a training that may take more is refused before it begins.
    record : str or None
        Folder for a record of all that the party sees of a training, for `treaty audit`: its own rows, messages with
        their contents, and what it opens. None: it records nothing.
    most_recoverable : float or None
        Largest share of this party's bins that sides of its splits may tell for certain, over all jobs on its table: at
        the limit the training ends. None: no limit.
    record_megabytes : float
        Most that its messages may take, and as much again that opened sums may, all kept in memory until the end;
        where a training takes more, no record is written.
    cluster : str or None
        The party's own cluster, which adds up its rows in a training: "ray" starts workers on this machine,
        "ray://host:port" names the head of a Ray cluster that this machine is part of, see docs/clusters.md. Others see
        nothing of it. None: this machine alone.
    cluster_workers : int or None
        Number of workers. None: one for each node of the cluster, two on this machine.
    role : str or None
        Only where a system has special roles. "fedxgb": "edge" or "authority"; the active party is the server, and who
        has a table is a user. "fedxgboost-smm" with ``backend = "dealer"``: "dealer" at one party, which has no table
        and takes no part in prediction. "quasi-newton" and "sgd": "coordinator" likewise.
    edge : str or None
        Under "fedxgb": a user's edge server. None: users are dealt out in order.
    """

    address: Address | None = None
    listen: Address | None = None
    certificate: str | None = None
    key: str | None = None
    id: str | None = None
    table: str | None = None
    eval_tables: list[str] = []
    predict_table: str | None = None
    columns: list[str] | None = None
    drop: list[str] = []
    categorical: list[str] = []
    noisy_labels: str | None = None
    most_epsilon: Annotated[float, msgspec.Meta(ge=0)] | None = None
    most_epsilon_total: Annotated[float, msgspec.Meta(ge=0)] | None = None
    keep_for_audit: str | None = None
    audit_gigabytes: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    record: str | None = None
    record_megabytes: Annotated[float, msgspec.Meta(gt=0)] = 1000.0
    most_recoverable: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    cluster: str | None = None
    cluster_workers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    role: str | None = None
    edge: str | None = None

    @property
    def epsilon_limits(self) -> EpsilonLimits:
        """The most epsilon that releases of its table may cost."""
        return EpsilonLimits(self.most_epsilon, self.most_epsilon_total)


class Align(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How rows are aligned, see docs/alignment.md.

    Attributes
    ----------
    on : str
        The column of ids, in all tables.
    normalise : tuple of {"nfc", "strip", "lower"}
        What is done to ids that are text before they are compared.
    on_duplicate : {"error", "first", "expand"}
        Of an id in several rows: refuse, keep the first, or every combination of the parties' rows.
    psi : {"auto", "ecdh", "kkrt"}
        How common ids are found; the same at all parties. "auto" takes KKRT for long lists, ECDH for others.
    text : bool
        Whether whole numbers count as text. Ids of a CSV file are text anyway where a number would lose something of
        one of them, the zeros of 00123 say; with this those of other files are text as well.
    log : str or None
        Folder of this party's run log; all parties keep one or none does. None: runs are counted in `store` alone.
    max_runs : int
        Alignments a partner may start within 30 days, by the log or that count.
    """

    on: str = "id"
    normalise: tuple[Normalisation, ...] = NORMALISE
    on_duplicate: OnDuplicate = "error"
    psi: Psi = "auto"
    text: bool = False
    log: str | None = None
    max_runs: Annotated[int, msgspec.Meta(ge=1)] = 20


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job file.

    Attributes
    ----------
    name : str
        Put on every message; the same at all parties.
    active : str
        The party with the labels; where tables are split by row the leader or server, which may bring no rows.
    label, weight : str, str or None
        Columns of the active party's table; where tables are split by row of every table.
    group : str or None
        With ``task = "ranking"``: the column of the active party's table that says which rows are ranked together.
    parties : dict of str to Member
        In the order of the joined table's columns; where tables are split by row the first table's columns are
        everybody's.
    protocol : str
        The system, by its name in `treaty.systems.SYSTEMS`, or as ``package.module:NAME`` of a `System` record.
    own, common : dict
        Its own options and the common ones: in a file a table called like the system, and ``[boosting]`` or
        ``[regression]``.
    align : Align or None
        How rows are brought into common order first. None: they are in the same order in all tables.
    task : {"classification", "regression", "ranking"}
    classes : int
        How many classes the labels have, where tables are split by column: a round has a tree for each where there are
        more than two, and parties without labels count trees.
    output : str
        Folder for the models and predictions.
    checkpoints : str or None
        Folder for the checkpoints of a running training; None for `output`.
    store : str or None
        Folder in which a party keeps what serves later jobs about the same table: hints of the lattice map, the key of
        noisy buckets, the ledgers of what both have told so far, and the count of alignments without a log. One for all
        jobs about a table. None: beside it.
    wait : float or None
        Seconds for which parties wait for each other to start, ``"1h"`` say. None: two minutes, or half of `timeout`
        where that is less. Of `timeout` and twice this, the larger counts.
    timeout : float
        Seconds a party waits for a message.
    reconnect : float
        Seconds for which a broken connection is dialled again before the party behind it counts as lost; `timeout` goes
        on meanwhile.
    inbox_limit : int
        MiB that all peers of a party together may have sent it and it has not read, from 1; each has a share, which the
        largest message it may send must fit.
    n_jobs : int or None
        Threads of each party; None for all cores.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    active: str
    label: str
    parties: dict[Name, Member]
    protocol: str = "secureboost"
    own: dict[str, Any] = {}
    common: dict[str, Any] = {}
    align: Align | None = None
    task: Literal["classification", "regression", "ranking"] = "classification"
    classes: Annotated[int, msgspec.Meta(ge=2)] = 2
    weight: str | None = None
    group: str | None = None
    output: str = "model"
    checkpoints: str | None = None
    store: str | None = None
    wait: Annotated[float, msgspec.Meta(gt=0)] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    reconnect: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    inbox_limit: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = INBOX_LIMIT >> 20
    n_jobs: int | None = None

    @property
    def system(self) -> System:
        """The record of the job's system."""
        return _between_parties(self.protocol)

    @property
    def by_row(self) -> bool:
        """Whether parties hold rows of the same columns, each with labels."""
        return self.system.split == "rows"

    def settings(self) -> tuple[Any, Any]:
        """Return the checked options: the system's own, and the common ones."""
        system = self.system
        _check_names(f"[{system.name}]", self.own, system.options, system)
        _check_names(f"[{system.common.table}]", self.common, system.common, system)
        own = converted(self.own, system.options, f"[{system.name}]")
        given = self.common
        if system.common.table == "regression" and self.classes > 2 and given.get("family", "logistic") == "logistic":
            given = {**given, "family": "multiclass"}
        common = converted(given, system.common, f"[{system.common.table}]")
        own = own.settled(common)
        common = common.checked(own)
        own.check(common)
        return own, common

    def roles(self) -> Roles:
        """Return who plays which role; ConfigError for wrong roles, or parties so few that nothing would be hidden."""
        system = self.system
        places = {
            # a copy of the file names only its own party's table, where tables are split by column
            name: PartySpec(
                member.role, member.edge, member.table is not None or (not self.by_row and member.role is None)
            )
            for name, member in self.parties.items()
        }
        return system.assign(places, self.active, self.settings()[0])

    def encoded(self) -> bytes:
        """Return the job as a file's JSON, which has no infinity."""
        plain = msgspec.to_builtins(self)
        for field, table in (("own", self.system.name), ("common", self.system.common.table)):
            plain[table] = {name: "inf" if value == math.inf else value for name, value in plain.pop(field).items()}
        return msgspec.json.encode(plain)


def load_job(path: str | Path) -> Job:
    """Read a job from a TOML (or JSON) file; its paths become absolute. Raises as `read_job`."""
    return _absolute(read_job(path), Path(path).resolve().parent)


def read_job(path: str | Path) -> Job:
    """Read a job from a TOML (or JSON) file, and check it.

    Raises
    ------
    ConfigError
        If the file cannot be read, a field is unknown, missing, or of the wrong type, options or roles do not fit the
        system, or rows are to be aligned that are of different people.
    """
    path = Path(path)
    try:
        data = without_mark(path.read_bytes())
        decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
        job = _job_of(_named_tables(decode(data)))
        job.settings()
    except OSError as error:
        raise ConfigError(f"cannot read the job {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{str(error).replace('| null`', '| None`')} - in the job {path}") from None
    check_whole(job, str(path))
    return job


def check_whole(job: Job, where: str) -> None:
    """Refuse a job whose fields contradict each other; `where` it is from, for the error.

    Raises
    ------
    ConfigError
    """
    if job.active not in job.parties:
        raise ConfigError(f"expected active to be one of {', '.join(job.parties)}, got {job.active!r} - in {where}")
    if len(job.parties) < 2:
        raise ConfigError(f"expected at least two parties, got {', '.join(job.parties)} - in {where}")
    used: dict[str, str] = {}
    for name, member in job.parties.items():
        for field, address in (("address", member.address), ("listen", member.listen)):
            if address is not None and (fault := fault_of(address, int(field == "address"))):
                raise ConfigError(f"parties.{name}.{field} = {address!r}: {fault} - in {where}")
        if member.address is not None and used.setdefault(member.address, name) != name:
            raise ConfigError(
                f"parties {used[member.address]} and {name} have the same address, {member.address}: expected one of "
                f"its own for each - in {where}"
            )
    if job.by_row and job.align is not None:
        raise ConfigError(
            f"expected no [align] with protocol {job.protocol!r}, whose parties hold different people's rows; take it "
            f"out - in {where}"
        )
    if job.task != "classification" and job.classes > 2:
        raise ConfigError(f'expected no classes with task = "{job.task}", got {job.classes} - in {where}')
    if (job.task == "ranking") != (job.group is not None):
        raise ConfigError(
            f'expected group, a column, with task = "ranking" and with no other, got task = "{job.task}" and '
            f"{'no group' if job.group is None else f'group = {job.group!r}'} - in {where}"
        )
    _check_classifies(job, where)


def fault_of(address: str, least: int) -> str:
    """Return what is wrong with an address of the form host:port, whose port is `least` or more; "" if nothing is."""
    scheme, _, rest = address.partition("://")
    if rest:
        return f"expected host:port without {scheme}://"
    host, _, port = address.rpartition(":")
    if set(host) & set(" /@") and not address.startswith("unix:"):
        return "expected host:port, the name or number of a machine alone"
    if port.isdecimal() and not least <= int(port) <= 65535:
        return f"expected a port from {least} to 65535"
    if ":" in host and not address.startswith("unix:") and not (host.startswith("[") and host.endswith("]")):
        return "expected an IPv6 address in brackets, [::1]:7000 say"
    return ""


def _job_of(fields: Any) -> Job:
    """Convert a file's fields; the error names the party, the field and what it should be."""
    parties = fields.get("parties") if isinstance(fields, dict) else None
    if isinstance(parties, dict):
        try:
            msgspec.convert(list(parties), list[Name])
        except msgspec.ValidationError:
            wrong = ", ".join(repr(name) for name in parties if not re.fullmatch(_NAME, name))
            raise ConfigError(
                f"expected parties' names of letters, digits, - and _, at most 63 of them, got {wrong}"
            ) from None
        for name, member in parties.items():
            try:
                msgspec.convert(member, Member)
            except msgspec.ValidationError as error:
                raise ConfigError(f"[parties.{name}] {in_words(str(error), member, Member)}") from None
    try:
        return msgspec.convert(fields, Job)
    except msgspec.ValidationError as error:
        said = in_words(str(error), fields, Job, align=Align)
        raise ConfigError(f"the job {said}" if said.startswith("lacks") else said) from None


def decoded_job(data: bytes, *, trusted: bool = False) -> Job:
    """Return the job that `Job.encoded` encoded; `trusted`: by the process that has started this one."""
    raw = msgspec.json.decode(data)
    if trusted:
        trust(names_of_code(raw).values())
    return msgspec.convert(_named_tables(raw), Job)


def names_of_code(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of code in a job's fields, by what they name; nothing of the job is looked up for that."""
    boosting = raw.get("boosting")
    named = {
        "the system": raw.get("protocol"),
        "the loss": boosting.get("objective") if isinstance(boosting, dict) else None,
    }
    return {what: str(name) for what, name in named.items() if is_code(name)}


def _named_tables(raw: Any) -> Any:
    """Put a file's tables of options, named by the system, into the fields `own` and `common`."""
    if not isinstance(raw, dict):
        return raw
    protocol = raw.get("protocol", "secureboost")
    if not isinstance(protocol, str):
        raise ConfigError(f"expected protocol to be a system's name, got {protocol!r}")
    for what, name in names_of_code(raw).items():
        check_trusted(name, what)
    system = _between_parties(protocol)
    tables = {"own": system.name, "common": system.common.table}
    others = {"options", "boosting", "regression", *(name for systems in SYSTEMS.values() for name in systems)}
    for name in raw:
        if name in others and name not in tables.values():
            raise ConfigError(
                f"expected options in [{system.name}] and [{system.common.table}], got a table [{name}]: the job's "
                f"protocol is {system.name!r}"
            )
        if name in tables.values() and not isinstance(raw[name], dict):
            raise ConfigError(f"expected [{name}] to be a table of options, got {raw[name]!r}")
    fields = {name: value for name, value in raw.items() if name not in tables.values()}
    fields |= {name: seconds_of(name, fields[name]) for name in DURATIONS if isinstance(fields.get(name), str)}
    _check_names("the job", fields, Job, system)
    _check_names("[align]", raw.get("align"), Align, system)
    parties = raw.get("parties")
    for name, member in parties.items() if isinstance(parties, dict) else ():
        _check_names(f"[parties.{name}]", member, Member, system)
    return fields | {field: raw.get(table, {}) for field, table in tables.items()}


def seconds_of(name: str, text: str) -> float:
    """Return the seconds of a duration in words: "90s", "2m", "1h30m"."""
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.replace(" ", ""))
    if found is None or not any(found.groups()):
        raise ConfigError(f'expected {name} to be seconds, or "90s", "2m", "1h30m" or "2d", got {text!r}')
    return float(sum(int(n or 0) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True)))


def _between_parties(protocol: str) -> System:
    """Return the record of a system, which must be one between parties."""
    system = find_system(protocol)
    if system.split == "none":
        known = ", ".join(name for systems in SYSTEMS.values() for name in systems if name != system.name)
        raise ConfigError(f"a job runs between parties: expected protocol to be one of {known}, got {system.name!r}")
    return system


def _check_names(table: str, given: Any, kind: Any, system: System) -> None:
    """Refuse a name that a table of the file does not have; the error says where it belongs, or what is meant."""
    places = {f"in [{system.name}]": system.options, f"in [{system.common.table}]": system.common}
    places |= {"at the top of the job": Job, "in [parties.NAME]": Member, "in [align]": Align}
    known = {where: [name for name in names_of(of) if name not in ("own", "common")] for where, of in places.items()}
    here = next(names for where, names in known.items() if places[where] is kind)
    of_files = [system.name, system.common.table] if kind is Job else []
    for name in given if isinstance(given, dict) else ():
        if name not in here:
            where = next((where for where, names in known.items() if name in names), None)
            what = "option" if kind in (system.options, system.common) else "field"
            near = get_close_matches(name, [*here, *of_files], 1, 0.65) if kind in (Job, Member, Align) else []
            nearest = f"did you mean {near[0]!r}?" if near else advice(name, here, kind)
            hint = f"it belongs {where}" if where else nearest
            raise ConfigError(f"{table} has no {what} {name!r}; {hint}")


def _check_classifies(job: Job, where: str) -> None:
    """Refuse what a job of trees may ask for and a linear model does not have, or not in this family."""
    if job.system.common.table != "regression":
        return
    common = job.settings()[1]
    family, expected = common.family, "classification" if common.classifies else "regression"
    if job.task != expected:
        raise ConfigError(
            f'expected task = "{expected}" with family = "{family}", got task = "{job.task}" - in {where}'
        )
    if family == "multiclass" and job.classes == 2:
        raise ConfigError(f'expected the number of classes with family = "multiclass", classes = 5 say - in {where}')
    asked = ["group"] if job.group is not None else []
    asked += [f"parties.{name}.noisy_labels" for name, member in job.parties.items() if member.noisy_labels]
    if asked:
        raise ConfigError(
            f"expected no group and no noisy_labels with protocol {job.protocol!r}, got {', '.join(asked)} - in {where}"
        )
    if any(member.eval_tables for member in job.parties.values()):
        common.check_eval_sets(job.settings()[0])


def _absolute(job: Job, here: Path) -> Job:
    def absolute(name: str | None) -> str | None:
        return None if name is None else placed(here, name)

    parties = {
        name: msgspec.structs.replace(
            member,
            certificate=absolute(member.certificate),
            key=absolute(member.key),
            table=absolute(member.table),
            eval_tables=[placed(here, table) for table in member.eval_tables],
            predict_table=absolute(member.predict_table),
            noisy_labels=absolute(member.noisy_labels),
            keep_for_audit=absolute(member.keep_for_audit),
            record=absolute(member.record),
        )
        for name, member in job.parties.items()
    }
    align = job.align and msgspec.structs.replace(job.align, log=absolute(job.align.log))
    return msgspec.structs.replace(
        job,
        parties=parties,
        align=align,
        output=placed(here, job.output),
        checkpoints=absolute(job.checkpoints),
        store=absolute(job.store),
    )


def store_of(job: Job, name: str) -> Path | None:
    """Return the folder of what serves later jobs about a party's table; None for a party without one."""
    table = job.parties[name].table
    return Path(job.store) if job.store else None if table is None else Path(table).parent


def id_column(job: Job, name: str) -> str:
    """Return what a party's column of ids is called, in an aligned job."""
    assert job.align is not None
    return job.parties[name].id or job.align.on
