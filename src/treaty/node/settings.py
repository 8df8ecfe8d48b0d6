"""NODE.toml: a node's name, address and peers, and the tables that jobs may use, under which rules.

Paths are relative to the file. Unknown names are refused: a misspelt rule would allow what it is meant to forbid. The
functions at the end say where a job's files are in the node's folder.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import msgspec

from treaty.data.reading import ending_of
from treaty.data.sql import check_query, check_source
from treaty.errors import ConfigError, DataError, LocalProtocolError, TreatyError
from treaty.files import placed, without_mark
from treaty.machine.process import is_code, trust
from treaty.messaging.certificates import check_names
from treaty.node.policy import AtLeastOne, DataSet, Policy, Positive
from treaty.runs.job import ProxyAddress
from treaty.runs.job_files import Places, fault_of, struct_of
from treaty.systems import SYSTEMS, find_system

logger = logging.getLogger(__name__)

# Seconds to wait for the process of an earlier attempt to end.
LOCK_TIMEOUT = 60.0
# Names of this machine. A local page answers to these alone: other names may lead here by DNS rebinding.
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


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


HostPort = Annotated[str, msgspec.Meta(pattern=r"^(\w+://)?[^/\s]+:\d{1,5}$")]


class Web(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The read-only page and metrics."""

    # ``host:port`` that only this machine can reach, such as 127.0.0.1:8080.
    listen: HostPort
    # Allow another host: the page has no login, so everyone who can reach it sees it.
    open: bool = False


class PeerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Another organisation's node."""

    # ``host:port`` at which this node dials the peer. None: the peer dials this node.
    address: HostPort | None = None


class NodeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of what a node accepts."""

    # A job fails if it has not ended this many hours after its proposal.
    job_hours: Positive = 168.0
    # Maximum jobs of one peer that have not ended.
    max_queued: AtLeastOne = 100
    # Maximum jobs of one peer within a day.
    max_daily: AtLeastOne = 1000
    # Maximum trials of one peer within a day; for each, this node reads and checks its tables.
    max_checks: AtLeastOne = 20


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node's settings."""

    # The organisation's name, as in jobs and in its card.
    name: str
    # ``host:port`` of the node's only port. None: no port is opened, and this node dials its peers.
    listen: HostPort | None = None
    # ``http://[user:password@]host:port`` of an HTTP proxy through which the node dials its peers (CONNECT).
    proxy: ProxyAddress | None = None
    # Where the node stores its jobs, models and ledgers; and its keys and its peers' cards.
    folder: str = "state"
    keys: str = "keys"
    # Maximum jobs that run at the same time.
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

    Raises ConfigError if the file cannot be read, or a name is unknown, missing, of the wrong type or contradicts
    another.
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
    of_table: dict[object, list[DataSet]] = {}
    for data_set in data.values():
        of_table.setdefault(_source(data_set), []).append(data_set)
    of_name = {}
    for alike in of_table.values():
        begun = [data_set.name for data_set in alike if Path(data_set.store).exists()]
        # Written by an earlier version, or before they had the same table.
        if len(begun) > 1:
            why = "have the same table but separate ledgers: its people pay the budgets of all"
            logger.warning("data sets %s %s", _listed(begun), why)
        first = begun[0] if begun else alike[0].name
        for data_set in alike:
            own = "" if data_set.name in (first, *begun) else first
            of_name[data_set.name] = msgspec.structs.replace(data_set, ledgers=own)
    return {name: of_name[name] for name in data}


def _source(data_set: DataSet) -> object:
    """Return the file or query, which is equal for two data sets of one table."""
    if data_set.table is None:
        return data_set.database, data_set.sql
    try:
        found = Path(data_set.table).stat()
    except OSError:  # it is not there yet
        return str(Path(data_set.table).resolve())
    return found.st_dev, found.st_ino


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
            raise ConfigError(f"[peers.{name}] needs an address, or this node `listen`: neither can dial the other")
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


class JobFiles:
    """Where a job's files are in the node's folder; a prediction's results are with those of the training `model`."""

    def __init__(self, folder: str | Path, job: str, model: str = "") -> None:
        # What only attempts need, and the lock of the process that may write it.
        self.checkpoints = Path(folder, "checkpoints", job)
        self.lock = self.checkpoints / ".lock"
        self.results = Path(folder, "models", model or job)
        self.log = Path(folder, "logs", f"{job}.log")

    def report(self, name: str) -> Path:
        """Return the report of a party's training."""
        return self.results / f"{name}.report.json"

    def has_part(self, name: str) -> bool:
        """Return whether the newest attempt at a training has stored the party's part; each starts without it."""
        return self.report(name).exists() and not list(self.results.glob(f"{name}.*staged*"))

    def remove_checkpoints(self) -> None:
        """Remove an ended job's checkpoints once no process holds them; a process may outlive a killed node."""
        with suppress(FileNotFoundError), alone(self.lock):
            shutil.rmtree(self.checkpoints)


@contextmanager
def alone(lock: Path, busy: TreatyError | None = None) -> Iterator[None]:
    """Lock a file against other processes; raise `busy` if one has locked it.

    By default wait: the process of a job that was asked to end may still write its checkpoint.
    """
    with lock.open("w") as held:
        deadline = time.monotonic() + (LOCK_TIMEOUT if busy is None else 0.0)
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    late = LocalProtocolError(f"an earlier process of this job has not ended - at {lock}")
                    raise busy or late from None
                time.sleep(0.05)
        yield


def clear_checkpoints(folder: Path, job: str) -> None:
    """Remove an ended job's checkpoints, or log why they are left."""
    try:
        JobFiles(folder, job).remove_checkpoints()
    except (OSError, LocalProtocolError) as error:
        logger.warning("checkpoints of job %s are left: %s", job[:12], error)


def serving_socket(folder: Path, job: str) -> Path:
    """Return the socket of a service's process; `folder` has the sockets of the node."""
    return folder / job[:16] / "online"


def find_socket(state: Path, job: str) -> Path | None:
    """Return the socket of a service of the node whose folder is `state`; None if it does not run now."""
    try:
        folder = Path((state / "sockets").read_text())
    except OSError as error:
        raise ConfigError(f"cannot read where the node's sockets are: {error.strerror}; has it been started?") from None
    path = serving_socket(folder, job)
    return path if path.exists() else None
