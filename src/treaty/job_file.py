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
from treaty.options import HORIZONTAL, VERTICAL, TreeOptions, tree_options

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
        Columns to leave out, an id say.
    noisy_labels : str or None
        At the active party, with `mechanism = "label_rr"`: the file that keeps the randomised labels, so that no later
        job on the same table draws them again. None: beside the table.
    role : {"server", "edge", "user", "authority"} or None
        Under "fedxgb". None: the active party is the server, whoever has a table a user.
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
    role: Literal["server", "edge", "user", "authority"] | None = None
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
        See `treaty.options.TreeOptions`; `protocol` defaults to "secureboost".
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
            known = ", ".join((*VERTICAL, *HORIZONTAL))
            raise ConfigError(f"a job runs between parties: expected one of {known}, got {options.protocol!r}")
        return options

    @property
    def horizontal(self) -> bool:
        """Whether parties hold rows of the same columns, each with labels."""
        return self.options.get("protocol") in HORIZONTAL

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
    job.tree_options()
    if job.horizontal and job.align is not None:
        raise ConfigError(
            f"expected no [align] with protocol {job.options['protocol']!r}, whose parties hold different people's "
            f"rows; take it out - in {path}"
        )
    with_roles = [name for name, member in job.parties.items() if member.role or member.edge]
    if with_roles and not job.crowd:
        raise ConfigError(
            f"expected role and edge with protocol 'fedxgb' alone, got them at {', '.join(with_roles)} - in {path}"
        )
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


def id_column(job: Job, name: str) -> str:
    """Return what a party's column of ids is called, in an aligned job."""
    assert job.align is not None
    return job.parties[name].id or job.align.on
