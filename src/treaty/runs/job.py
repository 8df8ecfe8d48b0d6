"""The job file: who takes part, with which tables, under which protocol and options.

The same file serves every organisation; each fills in only what is its own business (`table`, `key`) and leaves the
others' out. Paths are relative to the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treaty.data.ids import NORMALISE, Normalisation, OnDuplicate
from treaty.errors import ConfigError
from treaty.systems.linear_options import FEDERATED, LinearOptions, linear_options
from treaty.systems.tree_options import HORIZONTAL, VERTICAL, TreeOptions, tree_options

Address = Annotated[str, msgspec.Meta(pattern=r"^.+:\d{1,5}$")]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]  # stands in a certificate


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One party of a job.

    Attributes
    ----------
    address : str or None
        ``host:port`` where it listens. None: chosen when all parties run on this machine.
    certificate : str or None
        Path of its certificate, which the others pin. None as for `address`.
    key : str or None
        Path of its private key; only its own copy of the job names it.
    id : str or None
        Its column of ids, where it is called otherwise than `align.on`.
    table : str or None
        Path of its training rows, CSV or Parquet; only its own copy names it. In a horizontal job it says who brings
        rows: everybody's copy names one for each participant, and only a party's own is read. That of the server of
        "fedxgb" says which columns and classes there are; without it the first of its `eval_tables` does.
    eval_tables, predict_table : list of str, str or None
        Paths of its rows of the eval sets, and of the rows to predict.
    columns : list of str or None
        The columns to use; None for all but `drop`, label and weight.
    drop : list of str
        Columns to leave out, an id say; `table` must have all of them, other tables may lack some.
    noisy_labels : str or None
        At the active party, with `mechanism = "label_rr"`: the file that keeps the randomised labels, so that no later
        job on the same table draws them again. None: beside the table.
    role : {"server", "edge", "user", "authority", "dealer", "coordinator"} or None
        Under "quasi-newton" and "sgd", "coordinator" at one party, which has no table and no part in prediction.
        Under "fedxgb". None: the active party is the server, whoever has a table a user. Under "fedxgboost-smm" with
        ``backend = "dealer"``, "dealer" at one party, which has no table and takes no part in prediction.
    edge : str or None
        Under "fedxgb": a user's edge server. None: users are dealt out in order.
    """

    address: Address | None = None
    certificate: str | None = None
    key: str | None = None
    id: str | None = None
    table: str | None = None
    eval_tables: list[str] = []
    predict_table: str | None = None
    columns: list[str] | None = None
    drop: list[str] = []
    noisy_labels: str | None = None
    role: Literal["server", "edge", "user", "authority", "dealer", "coordinator"] | None = None
    edge: str | None = None


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
    text : bool
        Whether ids in a CSV file are text even where they look like numbers: 00123 keeps its zeros.
    log : str or None
        Folder of this party's run log; all parties keep one or none does.
    max_runs : int
        Alignments a partner may start within 30 days, by the log.
    """

    on: str = "id"
    normalise: tuple[Normalisation, ...] = NORMALISE
    on_duplicate: OnDuplicate = "error"
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
        The party with the labels; in a horizontal job the leader, which may bring no table.
    label, weight : str, str or None
        Columns of the active party's table; in a horizontal job of every table.
    parties : dict of str to Member
        In the order of the joined table's columns; in a horizontal job the first table's columns are everybody's.
    align : Align or None
        How rows are brought into common order first. None: they are in the same order in all tables.
    options : dict
        See `treaty.options.TreeOptions`, under "quasi-newton" and "sgd" `treaty.linear_options.LinearOptions`;
        `protocol` defaults to "secureboost".
    task : {"classification", "regression"}
    output : str
        Folder for the models and predictions.
    checkpoints : str or None
        Folder for the checkpoints of a running training; None for `output`.
    store : str or None
        Folder in which a party keeps what serves later jobs about the same table: hints of the lattice map, the key of
        noisy buckets, and the ledgers of what both have told so far. One for all jobs about a table. None: beside it.
    timeout : float
        Seconds a party waits for a message.
    n_jobs : int or None
        Threads of each party; None for all cores.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    active: str
    label: str
    parties: dict[Name, Member]
    options: dict[str, Any] = {}
    align: Align | None = None
    task: Literal["classification", "regression"] = "classification"
    weight: str | None = None
    output: str = "model"
    checkpoints: str | None = None
    store: str | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    n_jobs: int | None = None

    def tree_options(self) -> TreeOptions:
        """Return the checked options."""
        options = tree_options({"protocol": "secureboost", **self.options})
        if options.protocol not in (*VERTICAL, *HORIZONTAL):
            known = ", ".join((*VERTICAL, *HORIZONTAL, *FEDERATED))
            raise ConfigError(f"a job runs between parties: expected one of {known}, got {options.protocol!r}")
        return options

    def linear_options(self) -> LinearOptions:
        """Return the checked options of a logistic regression."""
        return linear_options(self.options)

    @property
    def linear(self) -> bool:
        """Whether the model is a logistic regression."""
        return self.options.get("protocol") in FEDERATED

    @property
    def coordinator(self) -> str | None:
        """The party without data that coordinates a logistic regression, where there is one."""
        return next((name for name, member in self.parties.items() if member.role == "coordinator"), None)

    @property
    def horizontal(self) -> bool:
        """Whether parties hold rows of the same columns, each with labels."""
        return self.options.get("protocol") in HORIZONTAL

    @property
    def dealer(self) -> str | None:
        """The party without data that deals random matrices, where there is one."""
        return next((name for name, member in self.parties.items() if member.role == "dealer"), None)

    @property
    def owners(self) -> list[str]:
        """All parties but the dealer, or the coordinator, in the job's order."""
        return [name for name, member in self.parties.items() if member.role not in ("dealer", "coordinator")]

    @property
    def crowd(self) -> bool:
        """Whether parties have the roles of a crowd: users and edge servers, a server, a key authority."""
        return self.options.get("protocol") == "fedxgb"


def load_job(path: str | Path) -> Job:
    """Read a job from a TOML (or JSON) file; its paths become absolute.

    Raises
    ------
    ConfigError
        If the file cannot be read, a field is unknown, missing, of the wrong type, the active party is none of
        the parties, or rows are to be aligned that are of different people.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
        job = decode(data, type=Job)
    except OSError as error:
        raise ConfigError(f"cannot read the job {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{error} - in the job {path}") from None
    if job.active not in job.parties:
        raise ConfigError(f"expected active to be one of {', '.join(job.parties)}, got {job.active!r} - in {path}")
    if len(job.parties) < 2:
        raise ConfigError(f"expected at least two parties, got {', '.join(job.parties)} - in {path}")
    _ = job.linear_options() if job.linear else job.tree_options()
    if job.horizontal and job.align is not None:
        raise ConfigError(
            f"expected no [align] with protocol {job.options['protocol']!r}, whose parties hold different people's "
            f"rows; take it out - in {path}"
        )
    with_roles = [name for name in job.owners if job.parties[name].role or job.parties[name].edge]
    if with_roles and not job.crowd:
        raise ConfigError(
            f"expected role and edge with protocol 'fedxgb' alone, got them at {', '.join(with_roles)} - in {path}"
        )
    _check_dealer(job, path)
    _check_coordinator(job, path)
    if job.linear:
        _check_linear(job, path)
    here = path.resolve().parent

    def absolute(name: str | None) -> str | None:
        return None if name is None else str(here / name)

    parties = {
        name: msgspec.structs.replace(
            member,
            certificate=absolute(member.certificate),
            key=absolute(member.key),
            table=absolute(member.table),
            eval_tables=[str(here / table) for table in member.eval_tables],
            predict_table=absolute(member.predict_table),
            noisy_labels=absolute(member.noisy_labels),
        )
        for name, member in job.parties.items()
    }
    align = job.align and msgspec.structs.replace(job.align, log=absolute(job.align.log))
    return msgspec.structs.replace(
        job,
        parties=parties,
        align=align,
        output=str(here / job.output),
        checkpoints=absolute(job.checkpoints),
        store=absolute(job.store),
    )


def _check_dealer(job: Job, path: Path) -> None:
    """Refuse a dealer where none is asked for, several, and one that has data."""
    dealers = [name for name, member in job.parties.items() if member.role == "dealer"]
    if len(dealers) > (not job.linear and job.tree_options().has_dealer):
        raise ConfigError(
            'expected role = "dealer" at one party, with backend = "dealer" of protocol \'fedxgboost-smm\' alone, got '
            f"it at {', '.join(dealers)} - in {path}"
        )
    for name in dealers:
        if name == job.active or job.parties[name].table is not None or len(job.owners) < 2:
            raise ConfigError(
                f"expected {name}, the dealer, to have no table and to be another than the active party and at least "
                f"one passive party: who has data must not deal - in {path}"
            )


def _check_coordinator(job: Job, path: Path) -> None:
    """Refuse a coordinator where none is asked for, several, one that has data, and other roles beside it."""
    coordinators = [name for name, member in job.parties.items() if member.role == "coordinator"]
    wanted = job.linear and job.linear_options().has_coordinator
    if len(coordinators) > wanted:
        raise ConfigError(
            'expected role = "coordinator" at one party, under protocols "quasi-newton" and "sgd" with coordinator = '
            f"true alone, got it at {', '.join(coordinators)} - in {path}"
        )
    for name in coordinators:
        if name == job.active or job.parties[name].table is not None:
            raise ConfigError(
                f"expected {name}, the coordinator, to have no table and not to be the active party: who has data must "
                f"not coordinate - in {path}"
            )


def _check_linear(job: Job, path: Path) -> None:
    """Refuse what a job of trees may ask for and a logistic regression does not have."""
    asked = ['task = "regression"'] if job.task != "classification" else []
    asked += ["weight"] if job.weight is not None else []
    for name, member in job.parties.items():
        asked += [f"parties.{name}.{what}" for what in ("eval_tables", "noisy_labels") if getattr(member, what)]
    if asked:
        raise ConfigError(
            f"expected none of task, weight, eval_tables and noisy_labels with protocol {job.options['protocol']!r}, "
            f"which classifies rows that all weigh the same, got {', '.join(asked)} - in {path}"
        )


def id_column(job: Job, name: str) -> str:
    """Return what a party's column of ids is called, in an aligned job."""
    assert job.align is not None
    return job.parties[name].id or job.align.on
