"""The job file: who takes part, with which tables, under which system and options.

The same file serves every organisation; each fills in only what is its own business (`table`, `key`) and leaves the
others' out. Paths are relative to the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treaty.data.ids import NORMALISE, Normalisation, OnDuplicate, Psi
from treaty.errors import ConfigError
from treaty.messaging.channel import INBOX_LIMIT
from treaty.privacy.ledger import EpsilonLimits
from treaty.systems import SYSTEMS, find_system
from treaty.systems.options import advice, converted, names_of
from treaty.systems.system import PartySpec, Roles, System

# most seconds that a user has for an answer, if its connection may not be away longer
PATIENCE = 60.0
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
Address = Annotated[str, msgspec.Meta(pattern=r"^(.+:\d{1,5}|unix:/.+)$")]
Name = Annotated[str, msgspec.Meta(pattern=NAME)]  # stands in a certificate


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
        job on the same table draws them again. None: in the table's folder.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRules:
    """What a job says of one party's tables: which of their columns are used, and for what.

    Attributes
    ----------
    party, active : str
        The party itself, and the one with the labels.
    by_row : bool
        Whether tables are split by row, so that every party has labels.
    label, weight, group, task
        As of `Job`.
    labels : list of str
        The party's columns of labels, weights and groups, which are no features.
    objective : str or None
        The loss, which some labels do not suit.
    id : str or None
        The column of ids; None: rows are not aligned.
    id_as_text, normalise, on_duplicate
        How ids are read, as of `Align`.
    columns, drop, categorical
        As of `Member`.
    own_tables : list of str
        Paths of the training table and the eval sets; the first one must have all columns that the job names.
    scratch : Path or None
        Folder for a table that is too large for memory; None: the machine's own.
    """

    party: str
    active: str
    by_row: bool
    label: str
    weight: str | None
    group: str | None
    task: str
    labels: list[str]
    objective: str | None
    id: str | None
    id_as_text: bool
    normalise: tuple[Normalisation, ...]
    on_duplicate: OnDuplicate
    columns: list[str] | None
    drop: list[str]
    categorical: list[str]
    own_tables: list[str]
    scratch: Path | None


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
        noisy buckets, the ledgers of what both have released so far, and the count of alignments without a log. One for
        all jobs about a table. None: the table's folder.
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
        return between_parties(self.protocol)

    @property
    def by_row(self) -> bool:
        """Whether parties hold rows of the same columns, each with labels."""
        return self.system.split == "rows"

    @property
    def apart(self) -> bool:
        """Whether organisations play their own parties: a job with all private keys is played by one of them."""
        return any(member.key is None for member in self.parties.values())

    @property
    def patience(self) -> float:
        """Seconds after which a silent user, of many, counts as lost."""
        return min(max(PATIENCE, 1.5 * self.reconnect), self.timeout / 10)

    def settings(self) -> tuple[Any, Any]:
        """Return the checked options: the system's own, and the common ones."""
        system = self.system
        check_names(f"[{system.name}]", self.own, system.options, system)
        check_names(f"[{system.common.table}]", self.common, system.common, system)
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

    def table_rules(self, name: str) -> TableRules:
        """Return what the job says of a party's tables."""
        member, align = self.parties[name], self.align or Align()
        labelled = name == self.active or self.by_row
        return TableRules(
            party=name, active=self.active, by_row=self.by_row, label=self.label, weight=self.weight, group=self.group,
            task=self.task, labels=[of for of in (self.label, self.weight, self.group) if of] if labelled else [],
            objective=self.common.get("objective"), id=None if self.align is None else member.id or align.on,
            id_as_text=align.text, normalise=align.normalise, on_duplicate=align.on_duplicate,
            columns=member.columns, drop=member.drop, categorical=member.categorical,
            own_tables=[*([] if member.table is None else [member.table]), *member.eval_tables],
            scratch=None if self.store is None else Path(self.store) / "scratch",
        )  # fmt: skip

    def encoded(self) -> bytes:
        """Return the job as a file's JSON, which has no infinity."""
        plain = msgspec.to_builtins(self)
        for field, table in (("own", self.system.name), ("common", self.system.common.table)):
            plain[table] = {name: "inf" if value == math.inf else value for name, value in plain.pop(field).items()}
        return msgspec.json.encode(plain)


def between_parties(protocol: str) -> System:
    """Return the record of a system, which must be one between parties."""
    system = find_system(protocol)
    if system.split == "none":
        known = ", ".join(name for systems in SYSTEMS.values() for name in systems if name != system.name)
        raise ConfigError(f"a job runs between parties: expected protocol to be one of {known}, got {system.name!r}")
    return system


def check_names(table: str, given: Any, kind: Any, system: System) -> None:
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


def store_of(job: Job, name: str) -> Path | None:
    """Return the folder of what serves later jobs about a party's table; None for a party without one."""
    table = job.parties[name].table
    return Path(job.store) if job.store else None if table is None else Path(table).parent


def id_column(job: Job, name: str) -> str:
    """Return what a party's column of ids is called, in an aligned job."""
    assert job.align is not None
    return job.parties[name].id or job.align.on
