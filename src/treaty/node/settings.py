"""NODE.toml: a node's name, address and peers, and the tables that jobs may use, under which rules.

Paths are relative to the file. Unknown names are refused: a misspelt rule would allow what it is meant to forbid.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treaty.cluster.ray_shards import Cluster
from treaty.data.reading import ending_of
from treaty.data.sql import check_query, check_source, database_uri, fetch
from treaty.errors import ConfigError, DataError
from treaty.files import placed, without_mark
from treaty.machine.process import is_code, trust
from treaty.messaging.certificates import check_names
from treaty.node.proposals import Verb
from treaty.runs.job import Member
from treaty.runs.job_files import Places, fault_of, struct_of
from treaty.systems import SYSTEMS, find_system

logger = logging.getLogger(__name__)

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names of this machine. A local page answers to these alone: other names may lead here by DNS rebinding."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def asks_for(header: str, hosts: Collection[str] | None) -> bool:
    """Return whether a request's header ``Host`` names one of these hosts (lower case; None: any)."""
    name = header if header.endswith("]") else header.rpartition(":")[0] or header
    return hosts is None or name.lower() in hosts


Sums = Literal["open", "sealed"]
Consent = Literal["paper", "allow_insecure", "allow_exact_sums", "show_weights", "show_eval_margins", "dropout"]
HostPort = Annotated[str, msgspec.Meta(pattern=r"^(\w+://)?[^/\s]+:\d{1,5}$")]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Web(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The read-only page and metrics.

    Attributes
    ----------
    listen : str
        ``host:port`` that only this machine can reach, such as 127.0.0.1:8080.
    open : bool
        Allow another host: the page has no login, so everyone who can reach it sees it.
    """

    listen: HostPort
    open: bool = False


class PeerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Another organisation's node.

    Attributes
    ----------
    address : str or None
        ``host:port`` at which this node dials the peer. None: the peer dials this node.
    """

    address: HostPort | None = None


class NodeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of what a node accepts.

    Attributes
    ----------
    job_hours : float
        A job fails if it has not ended this many hours after its proposal.
    max_queued : int
        Maximum jobs of one peer that have not ended.
    max_daily : int
        Maximum jobs of one peer within a day.
    max_checks : int
        Maximum trials of one peer within a day; for each, this node reads and checks its tables.
    """

    job_hours: Positive = 168.0
    max_queued: AtLeastOne = 100
    max_daily: AtLeastOne = 1000
    max_checks: AtLeastOne = 20


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a data set may be used for (see `treaty.node.policy`). None: the rule allows everything.

    Attributes
    ----------
    peers : list of str
        All other parties of a job must be in this list. Empty: nobody.
    systems : list of str or None
        Allowed systems. None: all built-in ones; custom ones, ``package.module:NAME``, must be listed.
    losses : list of str
        Allowed custom losses, ``package.module:CLASS``.
    verbs : list of {"train", "predict", "explain", "serve"} or None
    sums : list of {"open", "sealed"} or None
        How a training may reveal sums of bins.
    columns : list of str or None
        The only columns that may be used, also as label, weight or group. The id column need not be listed if the data
        set names it.
    labels : bool
        Whether a training may take labels from it.
    consents : list of str
        Options by which a job may make this party consent to broken or more revealing protocols: "allow_insecure",
        "allow_exact_sums", "show_weights", "show_eval_margins", "paper" (mode="paper") and "dropout"
        (dropout="accept"). Only listed ones are allowed.
    most_alignments : int
        Maximum alignments that a job lets one partner start within 30 days.
    least_rows : int or None
        Minimum rows of the table.
    least_min_child_samples : int or None
        Minimum rows of a leaf that a training may allow.
    most_recoverable : float or None
        Maximum share of the table's bins that the active party may recover from open sums or sides of splits
        (estimated).
    most_epsilon, most_epsilon_total : float or None
        Maximum cost of noisy releases for a person of this table: of one job, and of all jobs in the ledger.
    approve : bool
        Whether a person must approve a job that passes. False: it is approved automatically.
    """

    peers: list[str] = []
    systems: list[str] | None = None
    losses: list[str] = []
    verbs: list[Verb] | None = None
    sums: list[Sums] | None = None
    columns: list[str] | None = None
    labels: bool = True
    consents: list[Consent] = []
    most_alignments: AtLeastOne = 20
    least_rows: AtLeastOne | None = None
    least_min_child_samples: AtLeastOne | None = None
    most_recoverable: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    most_epsilon: NotNegative | None = None
    most_epsilon_total: NotNegative | None = None
    approve: bool = True


class DataSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table that jobs may name: a file, a folder of Parquet files, or the result of an SQL query.

    Attributes
    ----------
    table : str or None
        Path of a .csv, .csv.gz, .parquet or .arrow file, or of a folder of Parquet files.
    sql : str or None
        Instead, a query: one SELECT, with ORDER BY if there is no `id`.
    database : str or None
        Where to read the URI of the PostgreSQL database: "env:NAME", an environment variable of the node, or
        "file:PATH", a file that only the node's user can read.
    sql_seconds : float
        Timeout of the query.
    id : str or None
        Its id column.
    columns : list of str or None
        Columns to use; None: all except `drop`.
    drop, categorical : list of str
        Columns to leave out, and categorical columns whose cells may look like numbers.
    cluster, cluster_workers : str or None, int or None
        The cluster that adds up its rows in trainings, as in a job file; ignored by protocols that cannot use one.
    policy : Policy
    name, folder, ledgers : str
        Not in the file: its name, the node's folder, and the data set of the same table whose store it shares.
    """

    table: str | None = None
    sql: str | None = None
    database: str | None = None
    sql_seconds: Positive = 3600.0
    id: str | None = None
    columns: list[str] | None = None
    drop: list[str] = []
    categorical: list[str] = []
    cluster: str | None = None
    cluster_workers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    policy: Policy = Policy()
    name: str = ""
    folder: str = ""
    ledgers: str = ""

    def __post_init__(self) -> None:
        if self.cluster is not None:
            Cluster(self.cluster, self.cluster_workers)

    @property
    def path(self) -> str:
        """The file that a job reads: the table, or the snapshot that `fetch` makes of a query."""
        return self.table or str(Path(self.folder) / "snapshots" / f"{self.name}.parquet")

    @property
    def store(self) -> str:
        """Folder of what later jobs need: ledgers, hints, counts of alignments."""
        return str(Path(self.folder) / "stores" / (self.ledgers or self.name))

    @property
    def source(self) -> object:
        """The file or query, which is equal for two data sets of one table."""
        try:
            found = None if self.table is None else Path(self.table).stat()
        except OSError:  # it is not there yet
            return str(Path(str(self.table)).resolve())
        return (self.database, self.sql) if found is None else (found.st_dev, found.st_ino)

    def member(self, given: Member, *, aligned: bool) -> Member:
        """Return a party's fields of a proposed job, completed by this data set; ids are no features."""
        unused = [] if aligned or self.id is None else [self.id]
        drop = [*self.drop, *unused, *given.drop]
        return msgspec.structs.replace(
            given,
            table=self.path,
            id=self.id or given.id,
            columns=self.columns if given.columns is None else given.columns,
            drop=list(dict.fromkeys(drop)),
            categorical=list(dict.fromkeys([*self.categorical, *given.categorical])),
            most_epsilon=self.policy.most_epsilon,
            most_epsilon_total=self.policy.most_epsilon_total,
        )

    def fetch(self, to: str | Path | None = None) -> Path:
        """Run the query and store its rows as a snapshot, at `path` or `to`; return the path. A table stays in place.

        Raises ConfigError or DataError; neither shows the URI.
        """
        if self.sql is None:
            return Path(self.path)
        place, source = Path(to or self.path), str(self.database)
        as_text = [*([] if self.id is None else [self.id]), *self.categorical]
        fetch(database_uri(source), self.sql, place, text=as_text, seconds=self.sql_seconds, what=f"data.{self.name}")
        return place


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node's settings.

    Attributes
    ----------
    name : str
        The organisation's name, as in jobs and in its card.
    listen : str or None
        ``host:port`` of the node's only port. None: no port is opened, and this node dials its peers.
    folder, keys : str
        Where the node stores its jobs, models and ledgers; and its keys and its peers' cards.
    max_running : int
        Maximum jobs that run at the same time.
    web : Web or None
    limits : Limits
    peers : dict of str to Peer
    data : dict of str to DataSet
    """

    name: str
    listen: HostPort | None = None
    folder: str = "state"
    keys: str = "keys"
    max_running: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 2
    web: Web | None = None
    limits: NodeLimits = NodeLimits()
    peers: dict[str, PeerSettings] = {}
    data: dict[str, DataSet] = {}

    @property
    def dialled(self) -> dict[str, str]:
        """The peers that this node dials, with their addresses."""
        return {name: peer.address for name, peer in self.peers.items() if peer.address is not None}

    @property
    def code(self) -> set[str]:
        """Custom systems and losses that policies allow."""
        policies = [data_set.policy for data_set in self.data.values()]
        return {name for policy in policies for name in (*(policy.systems or ()), *policy.losses) if is_code(name)}

    def data_set(self, name: str) -> DataSet:
        """Return a data set by its name; ConfigError, whose public text hides the other names, if there is none."""
        if name not in self.data:
            raise ConfigError(
                f"expected a data set of {self.name}, got {name!r}; it has {_listed(self.data)}",
                public=f"{self.name} has no data set {name!r}",
            )
        return self.data[name]


def load_settings(path: str | Path) -> Settings:
    """Read a node's settings from a TOML file; its paths become absolute.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a name is unknown, missing, of the wrong type or contradicts another.
    """
    path = Path(path)
    try:
        raw = msgspec.toml.decode(without_mark(path.read_bytes()))
        settings = _absolute(_converted(raw), path.resolve().parent)
        trust(settings.code)
        _check(settings)
    except OSError as error:
        raise ConfigError(f"cannot read the node's settings {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError, DataError) as error:
        raise ConfigError(f"{error} - in the node's settings {path}") from None
    return settings


# Fields of a data set that are not in the file.
_FILLED_IN = ("name", "folder", "ledgers")
_PLACES: Places = {
    "at the top": (Settings, Settings.__struct_fields__),
    "in [web]": (Web, Web.__struct_fields__),
    "in [limits]": (NodeLimits, NodeLimits.__struct_fields__),
    "in [peers.NAME]": (PeerSettings, PeerSettings.__struct_fields__),
    "in [data.NAME]": (DataSet, [name for name in DataSet.__struct_fields__ if name not in _FILLED_IN]),
    "in [data.NAME.policy]": (Policy, Policy.__struct_fields__),
}


def _converted(raw: dict[str, Any]) -> Settings:
    """Convert the file's tables one by one, so that errors name table and field."""
    kinds: dict[str, Any] = {"web": Web, "limits": NodeLimits}
    ready: dict[str, Any] = {
        name: struct_of(f"[{name}]", raw[name], kind, _PLACES, {}) for name, kind in kinds.items() if name in raw
    }
    kinds = {"peers": PeerSettings, "data": DataSet}
    for name, kind in kinds.items():
        tables = raw.get(name, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"expected tables [{name}.NAME], got {name} = {tables!r}")
        ready[name] = {}
        for of, table in tables.items():
            where, inner = f"{name}.{of}", {}
            try:
                check_names([of])
            except ConfigError as error:
                raise ConfigError(f"[{where}] {error}") from None
            if kind is DataSet and isinstance(table, dict) and "policy" in table:
                inner["policy"] = struct_of(f"[{where}.policy]", table["policy"], Policy, _PLACES, {})
            ready[name][of] = struct_of(f"[{where}]", table, kind, _PLACES, inner)
    settings: Settings = struct_of("", raw, Settings, _PLACES, ready)
    return settings


def _absolute(settings: Settings, here: Path) -> Settings:
    """Return the settings with absolute paths; data sets get their name and the node's folder."""
    folder = placed(here, settings.folder)

    def of_data(name: str, data_set: DataSet) -> DataSet:
        table, database = data_set.table, data_set.database
        if database is not None and database.startswith("file:"):
            database = f"file:{placed(here, database.removeprefix('file:'))}"
        table = None if table is None else placed(here, table)
        return msgspec.structs.replace(data_set, table=table, database=database, name=name, folder=folder)

    data = _sharing({name: of_data(name, data_set) for name, data_set in settings.data.items()})
    return msgspec.structs.replace(settings, folder=folder, keys=placed(here, settings.keys), data=data)


def _sharing(data: Mapping[str, DataSet]) -> dict[str, DataSet]:
    """Let data sets of one table share one store: with separate ledgers, people would pay every budget again."""
    over: dict[object, list[DataSet]] = {}
    for data_set in data.values():
        over.setdefault(data_set.source, []).append(data_set)
    of_name = {}
    for alike in over.values():
        begun = [data_set.name for data_set in alike if Path(data_set.store).exists()]
        # Written by an earlier version, or before they had the same table.
        if len(begun) > 1:
            logger.warning(
                "data sets %s have the same table but separate ledgers: its people pay the budgets of all",
                _listed(begun),
            )
        first = begun[0] if begun else alike[0].name
        for data_set in alike:
            own = "" if data_set.name in (first, *begun) else first
            of_name[data_set.name] = msgspec.structs.replace(data_set, ledgers=own)
    return {name: of_name[name] for name in data}


def _check(settings: Settings) -> None:
    """Refuse values that have the right type but make no sense."""
    check_names([settings.name])
    _check_ports(settings)
    web = settings.web
    if web is not None and not web.open and not is_loopback(web.listen.rpartition(":")[0].strip("[]")):
        raise ConfigError(
            f"[web] listen = {web.listen!r} can be reached from other machines, and the page has no login: use "
            "127.0.0.1, or set open = true if everyone who can reach it may see jobs, models and peers"
        )
    if settings.name in settings.peers:
        raise ConfigError(f"[peers.{settings.name}] is this node itself: remove it")
    for name, peer in settings.peers.items():
        if peer.address is None and settings.listen is None:
            raise ConfigError(
                f"[peers.{name}] has no address, and this node has no `listen`: neither can dial the other; add one"
            )
    for data_set in settings.data.values():
        _check_data(data_set)
        _check_policy(data_set, settings)


def _check_ports(settings: Settings) -> None:
    own = {"listen": settings.listen, "[web] listen": None if settings.web is None else settings.web.listen}
    ports = {where: listen for where, listen in own.items() if listen is not None}
    if len(ports) == 2 and len(set(ports.values())) == 1 and not str(settings.listen).endswith(":0"):
        raise ConfigError(f"expected `listen` and [web] listen to differ, got {settings.listen!r} twice")
    ports |= {f"[peers.{name}] address": address for name, address in settings.dialled.items()}
    for where, address in ports.items():
        # Listening at port 0 takes any free port.
        least = 1 if where.endswith("address") else 0
        if fault := fault_of(address, least):
            raise ConfigError(f"{where} = {address!r}: {fault}")


def _check_data(data_set: DataSet) -> None:
    where = f"[data.{data_set.name}]"
    if (data_set.table is None) == (data_set.sql is None):
        got = "neither" if data_set.table is None else "both"
        raise ConfigError(f"{where} expected a table or a query (sql), got {got}")
    if (data_set.sql is None) != (data_set.database is None):
        raise ConfigError(f'{where} expected sql and database ("env:NAME" or "file:PATH") together, got one of them')
    both = set(data_set.columns or ()) & set(data_set.drop)
    if both:
        raise ConfigError(f"{where} expected columns to use or to drop, got {_listed(sorted(both))} in both")
    try:
        if data_set.table is not None and not Path(data_set.table).is_dir():
            ending_of(Path(data_set.table), "table")
        if data_set.sql is not None and data_set.database is not None:
            check_source(data_set.database)
            check_query(data_set.sql, ordered=data_set.id is None)
    except (ConfigError, DataError) as error:
        raise ConfigError(f"{where} {error}") from None


def _check_policy(data_set: DataSet, settings: Settings) -> None:
    """Refuse misspelt names in a policy."""
    where, policy = f"[data.{data_set.name}.policy]", data_set.policy
    for name in policy.peers:
        if name not in settings.peers and name != settings.name:
            near = get_close_matches(name, list(settings.peers), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"declare [peers.{name}]"
            raise ConfigError(f"{where} peers names {name!r}, which is no peer of this node; {hint}")
    known = [name for systems in SYSTEMS.values() for name in systems if name != "pooled"]
    for name in policy.systems or ():
        if name not in known and not is_code(name):
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{where} systems names {name!r}, which is no system between parties; {hint}")
        if is_code(name):
            find_system(name)
    allowed = set(policy.columns or ())
    stray = sorted(set(data_set.columns or ()) - allowed) if policy.columns is not None else []
    if stray:
        raise ConfigError(f"{where} columns lacks {_listed(stray)} of the columns that the data set itself uses")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
