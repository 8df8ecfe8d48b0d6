"""The job file: who takes part, with which tables, under which system and options.

Every organisation uses the same file, and fills in only its own `table` and `key`. Paths are relative to the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treaty.data.ids import NORMALISE, Normalisation, OnDuplicate, Psi
from treaty.errors import ConfigError
from treaty.messaging.channel import INBOX_LIMIT
from treaty.systems import SYSTEMS, find_system
from treaty.systems.options import advice, converted, names_of
from treaty.systems.system import PartySpec, Roles, System

# seconds within which a user must answer; more if its connection may be broken for longer
PATIENCE = 60.0
# the label column of a job that is a fit of an estimator
FITTED = "__label__"
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
Address = Annotated[str, msgspec.Meta(pattern=r"^(.+:\d{1,5}|unix:/.+)$")]
ProxyAddress = Annotated[str, msgspec.Meta(pattern=r"^http://([^@/\s]+@)?[^@/:\s]+:\d{1,5}$")]
# stands in a certificate
Name = Annotated[str, msgspec.Meta(pattern=NAME)]


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One party of a job."""

    # ``host:port`` where the others reach it, and where it listens unless `listen` is given. None: chosen when all
    # parties run on this machine
    address: Address | None = None
    # ``host:port`` of its own machine where it listens, if that is not `address`: behind a firewall or forwarder. Only
    # the party's own copy is read
    listen: Address | None = None
    # ``http://[user:password@]host:port`` of an HTTP proxy through which it dials the others (CONNECT). Only the
    # party's own copy is read
    proxy: ProxyAddress | None = None
    # path of its certificate, which the others pin. None: as for `address`
    certificate: str | None = None
    # path of its private key; only its own copy of the job names it
    key: str | None = None
    # its column of ids, if the name differs from `align.on`
    id: str | None = None
    # path of its training rows, CSV or Parquet; only its own copy names it. If tables are split by row, every copy
    # names a table for each party that brings rows, and a party reads only its own. The table of the server of "fedxgb"
    # defines the columns and classes; without it, the first of its `eval_tables` does
    table: str | None = None
    # paths of its rows of the eval sets, and of the rows to predict. Under "fedxgb", every copy names the
    # `predict_table` of each user whose rows a hidden model predicts; a party reads only its own
    eval_tables: list[str] = []
    predict_table: str | None = None
    # the columns to use; None for all but `drop`, label and weight
    columns: list[str] | None = None
    # columns to leave out, such as an id. `table` must have all of them; other tables may lack some
    drop: list[str] = []
    # columns whose cells are categories although they may look like numbers, such as postal codes
    categorical: list[str] = []
    # directions of its own columns, as in the estimators' option: ``{ income = 1, debt = -1 }``. Only its own copy need
    # name them; the job says ``monotone_constraints = true`` in ``[boosting]``. Not if tables are split by row
    monotone_constraints: dict[str, Annotated[int, msgspec.Meta(ge=-1, le=1)]] = {}
    # at the active party, with `mechanism = "label_rr"`: the file that keeps the randomised labels, so that later jobs
    # on the same table use the same ones. None: in the table's folder
    noisy_labels: str | None = None
    # limits of what noisy releases may cost each person in its table: in this job over all its attempts, and in total
    # by the ledger in `store`. A release that would exceed one is refused. None: no limit of its own
    most_epsilon: Annotated[float, msgspec.Meta(ge=0)] | None = None
    most_epsilon_total: Annotated[float, msgspec.Meta(ge=0)] | None = None
    # folder for a record for an audit of gradients, see docs/jobs.md. If a passive party keeps one, the active party
    # must keep one, too. None: no record
    keep_for_audit: str | None = None
    # maximum size of that record; a training that may exceed it is refused before it begins
    audit_gigabytes: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    # folder for a record of all that the party sees in a training, for `treaty audit`: its own rows, messages with
    # their contents, and the sums it opens. None: no record
    record: str | None = None
    # maximum size of the recorded messages, and of the recorded sums, which stay in memory until the end. If a training
    # exceeds it, no record is written
    record_megabytes: Annotated[float, msgspec.Meta(gt=0)] = 1000.0
    # maximum share of this party's bins that the sides of its splits may reveal for certain, over all jobs on its
    # table. At the limit, the training ends. None: no limit
    most_recoverable: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    # the party's own cluster, which adds up its rows in a training: "ray" starts workers on this machine;
    # "ray://host:port" is the head of a Ray cluster that this machine is part of, see docs/clusters.md. The other
    # parties do not notice it. None: this machine alone
    cluster: str | None = None
    # number of workers. None: one for each node of the cluster, two on this machine
    cluster_workers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    # only in systems with special roles. "fedxgb": "edge" or "authority"; the active party is the server, and parties
    # with a table are users. "fedxgboost-smm" with ``backend = "dealer"``: "dealer" at one party, which has no table
    # and takes no part in predictions. "quasi-newton" and "sgd": likewise "coordinator"
    role: str | None = None
    # under "fedxgb": a user's edge server. None: users are assigned in order
    edge: str | None = None


class Align(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How rows are aligned; docs/alignment.md explains it."""

    # the column of ids, in all tables
    on: str = "id"
    # how ids that are text are normalised before they are compared
    normalise: tuple[Normalisation, ...] = NORMALISE
    # if several rows have the same id: refuse, keep the first row, or keep every combination of the parties' rows
    on_duplicate: OnDuplicate = "error"
    # how common ids are found; the same at all parties. "auto": KKRT for long lists, ECDH for others
    psi: Psi = "auto"
    # whether whole numbers count as text. Ids in a CSV file are always text if numbers would change one of them, such
    # as 00123; with this option, ids in other files are text as well
    text: bool = False
    # folder of this party's run log; either all parties keep one or none does. None: runs are counted in `store`
    log: str | None = None
    # how many alignments a partner may start within 30 days, by the log or that count
    max_runs: Annotated[int, msgspec.Meta(ge=1)] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRules:
    """Which columns of a party's tables a job uses, and for what; `member` and `align` are the job's for the party."""

    party: str
    job: Job
    member: Member
    align: Align
    # columns of margins; none at a party without labels
    base_margin: list[str]
    # own columns of labels, weights and groups, which are no features
    labels: list[str]
    # the loss: some labels do not fit it
    objective: str | None
    # the column of ids; None: rows are not aligned
    id: str | None
    # training table, then eval sets; the first must have all columns that the job names
    own_tables: list[str]


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job file."""

    # part of every message; the same at all parties
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    # the party with the labels; if tables are split by row, the leader or server, which may have no rows
    active: str
    # `label` and `weight`: columns of the active party's table; if tables are split by row, of every table
    label: str
    # in the order of the joined table's columns; if tables are split by row, all have the first table's columns
    parties: dict[Name, Member]
    # the system, by its name in `treaty.systems.SYSTEMS`, or as ``package.module:NAME`` of a `System` record
    protocol: str = "secureboost"
    # the system's own options and the common ones: in a file, a table named after the system, and ``[boosting]`` or
    # ``[regression]``
    own: dict[str, Any] = {}
    common: dict[str, Any] = {}
    # how rows are aligned first. None: all tables have the same rows in the same order
    align: Align | None = None
    task: Literal["classification", "regression", "ranking"] = "classification"
    # how many classes the labels have, if tables are split by column. With more than two, a round has one tree for
    # each, and parties without labels must know how many
    classes: Annotated[int, msgspec.Meta(ge=2)] = 2
    weight: str | None = None
    # column of weights in every eval table of the active party. None: rows of eval sets all weigh the same
    eval_weight: str | None = None
    # column of margins from which rows start, in the active party's table, eval tables and rows to predict; with more
    # than two classes one column for each. None: all rows start from one `base_score`
    base_margin: str | list[str] | None = None
    # with ``task = "ranking"``: the column of the active party's table that says which rows are ranked together
    group: str | None = None
    # folder with the parts of a finished model, NAME.part for each party: training goes on from it. `n_estimators` is
    # then the number of all rounds, those of that model included
    from_model: str | None = None
    # folder for the models and predictions
    output: str = "model"
    # folder for the checkpoints of a running training; None for `output`
    checkpoints: str | None = None
    # folder for files that later jobs on the same table need: hints of the lattice map, the key of noisy buckets, the
    # ledgers of what both have released so far, and the count of alignments without a log. Use one folder for all jobs
    # on a table. None: the table's folder
    store: str | None = None
    # how long parties wait for each other to start, in seconds or as ``"1h"``. None: two minutes, or half of `timeout`
    # if that is less. A party waits for messages as long as `timeout`, or twice this if that is more
    wait: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # how long a party waits for a message, in seconds
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    # how long a party tries to restore a broken connection before the peer counts as lost, in seconds; `timeout`
    # continues meanwhile
    reconnect: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    # MiB of unread messages that a party accepts from all its peers together, at least 1. Each peer has a share; its
    # largest message must fit into that
    inbox_limit: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = INBOX_LIMIT >> 20
    # threads of each party; None for all cores
    n_jobs: int | None = None

    @property
    def system(self) -> System:
        """The job's system."""
        return between_parties(self.protocol)

    @property
    def by_row(self) -> bool:
        """Whether parties hold rows of the same columns, each with labels."""
        return self.system.split == "rows"

    @property
    def varied(self) -> bool:
        """Whether all rows have different gradients from the first tree on."""
        return self.task != "classification" or self.weight is not None or self.base_margin is not None

    @property
    def apart(self) -> bool:
        """Whether other organisations run the other parties: if one file has all private keys, one runs them all."""
        return any(member.key is None for member in self.parties.values())

    @property
    def patience(self) -> float:
        """Seconds after which a user that does not answer counts as lost."""
        return min(max(PATIENCE, 1.5 * self.reconnect), self.timeout / 10)

    def settings(self) -> tuple[Any, Any]:
        """Return the checked options: the system's own, and the common ones."""
        system = self.system
        check_names(f"[{system.name}]", self.own, system.options, system)
        check_names(f"[{system.common.table}]", self.common, system.common, system)
        given = self.common
        if system.common.table == "regression" and self.classes > 2 and given.get("family", "logistic") == "logistic":
            given = {**given, "family": "multiclass"}
        return checked_options(system, self.own, given)

    def roles(self) -> Roles:
        """Assign roles; raise ConfigError for wrong roles, or for so few parties that nothing would be hidden."""
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
        """Return how a party's tables are read."""
        member, align = self.parties[name], self.align or Align()
        labelled = name == self.active or self.by_row
        margins = [self.base_margin] if isinstance(self.base_margin, str) else self.base_margin or []
        labels = dict.fromkeys(of for of in (self.label, self.weight, self.eval_weight, self.group, *margins) if of)
        return TableRules(
            party=name, job=self, member=member, align=align, base_margin=margins if labelled else [],
            labels=list(labels) if labelled else [], objective=self.common.get("objective"),
            id=None if self.align is None else member.id or align.on,
            own_tables=[*([] if member.table is None else [member.table]), *member.eval_tables],
        )  # fmt: skip

    def encoded(self) -> bytes:
        """Return the job as the JSON of a job file; "inf" stands for infinity, which JSON lacks."""
        plain = msgspec.to_builtins(self)
        for field, table in (("own", self.system.name), ("common", self.system.common.table)):
            plain[table] = {name: "inf" if value == math.inf else value for name, value in plain.pop(field).items()}
        return msgspec.json.encode(plain)


def checked_options(system: System, own: Any, common: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the checked options of a system, its own (given as such, or by name), and the common ones."""
    own = converted(own, system.options, f"[{system.name}]") if isinstance(own, Mapping) else own
    options = converted(common, system.common, f"[{system.common.table}]")
    own = own.settled(options)
    options = options.checked(own)
    own.check(options)
    return own, options


def between_parties(protocol: str) -> System:
    """Return a system that is played between parties."""
    system = find_system(protocol)
    if system.split == "none":
        known = ", ".join(name for systems in SYSTEMS.values() for name in systems if name != system.name)
        raise ConfigError(f"a job runs between parties: expected protocol to be one of {known}, got {system.name!r}")
    return system


def check_names(table: str, given: Any, kind: Any, system: System) -> None:
    """Refuse an unknown name in a table of the file; the error suggests where it belongs, or another name."""
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
    """Return the folder of files that later jobs on a party's table need; None for a party without a table."""
    table = job.parties[name].table
    return Path(job.store) if job.store else None if table is None else Path(table).parent


def id_column(job: Job, name: str) -> str:
    """Return the name of a party's column of ids, in an aligned job."""
    assert job.align is not None
    return job.parties[name].id or job.align.on
