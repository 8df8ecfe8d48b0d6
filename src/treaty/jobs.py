"""A job: who takes part, with which table, under which protocol and options; and one party's share of running it.

The same file serves every organisation; each fills in only what is its own business (`table`, `key`) and leaves the
others' out. Paths are relative to the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.checkpoints import Keeper, checkpoint_file, load_checkpoint
from treaty.compute import cores
from treaty.data.labels import check_labels, check_targets, check_weights
from treaty.data.sources import checked_columns, read_table
from treaty.data.table import Schema, Table, to_table
from treaty.errors import ConfigError, DataError, PeerLost
from treaty.messaging.certificates import load_certificate
from treaty.messaging.grpc_channel import GrpcChannel, Peer
from treaty.messaging.party import Party, run_role
from treaty.messaging.transcript import Transcript
from treaty.models import ModelPart, load_part
from treaty.options import VERTICAL, TreeOptions, tree_options
from treaty.protocols import decisions, secureboost
from treaty.protocols.contributions import explain_active, explain_passive
from treaty.protocols.hidden_inference import hidden_active, hidden_passive
from treaty.protocols.pooled import Labelled, Progress, noisy_labels
from treaty.simulation import traffic_of

Result = TypeVar("Result")
CONNECT_TIMEOUT = 120.0  # seconds the parties wait for each other to start
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
    table : str or None
        Path of its training rows, CSV or Parquet; only its own copy names it.
    eval_tables, predict_table : list of str, str or None
        Paths of its rows of the eval sets, and of the rows to predict.
    columns : list of str or None
        The columns to use; None for all but `drop`, label and weight.
    drop : list of str
        Columns to leave out, an id say.
    noisy_labels : str or None
        At the active party, with `mechanism = "label_rr"`: the file that keeps the randomised labels, so that no later
        job on the same table draws them again. None: beside the table.
    """

    address: Address | None = None
    certificate: str | None = None
    key: str | None = None
    table: str | None = None
    eval_tables: list[str] = []
    predict_table: str | None = None
    columns: list[str] | None = None
    drop: list[str] = []
    noisy_labels: str | None = None


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job file.

    Attributes
    ----------
    name : str
        Put on every message; the same at all parties.
    active : str
        The party with the labels.
    label, weight : str, str or None
        Columns of the active party's table.
    parties : dict of str to Member
        In the order of the joined table's columns.
    options : dict
        See `treaty.options.TreeOptions`; `protocol` defaults to "secureboost".
    task : {"classification", "regression"}
    output : str
        Folder for the models and predictions.
    checkpoints : str or None
        Folder for the checkpoints of a running training; None for `output`.
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
    task: Literal["classification", "regression"] = "classification"
    weight: str | None = None
    output: str = "model"
    checkpoints: str | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    n_jobs: int | None = None

    def tree_options(self) -> TreeOptions:
        """Return the checked options."""
        options = tree_options({"protocol": "secureboost", **self.options})
        if options.protocol not in VERTICAL:
            raise ConfigError(
                f"a job runs between parties: expected one of {', '.join(VERTICAL)}, got {options.protocol!r}"
            )
        return options


def load_job(path: str | Path) -> Job:
    """Read a job from a TOML (or JSON) file; its paths become absolute.

    Raises
    ------
    ConfigError
        If the file cannot be read, a field is unknown, missing, of the wrong type, or the active party is none of
        the parties.
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
    return msgspec.structs.replace(
        job, parties=parties, output=str(here / job.output), checkpoints=absolute(job.checkpoints)
    )


class Report(msgspec.Struct, kw_only=True):
    """What a party notes about a finished run, beside its part of the model.

    Attributes
    ----------
    party : str
    seconds : dict
        Per phase.
    sent : dict
        Of each peer: messages, bytes, bytes by message type.
    learned : dict
        Of each party, in words.
    """

    party: str
    seconds: dict[str, float]
    sent: dict[str, dict[str, Any]]
    learned: dict[str, list[str]]


def train_party(job: Job, name: str, progress: Progress | None = None, *, resume: bool = False) -> ModelPart:
    """Run one party's role of a training job against the others' addresses, and save its part and report.

    Parameters
    ----------
    resume : bool
        Go on from the checkpoint of an interrupted run, if there is one. The active party decides for all.

    Raises
    ------
    TreatyError
        Whatever ends the job. What was finished by then is in the checkpoint; a finished model of an earlier run stays
        until this one is finished.
    """
    started = time.perf_counter()
    member, options, threads = job.parties[name], job.tree_options(), cores(job.n_jobs)
    if member.table is None:
        raise ConfigError(f"the job names no table of {name}: add parties.{name}.table")
    Path(job.output).mkdir(parents=True, exist_ok=True)
    keeper = Keeper(checkpoint_file(job.checkpoints or job.output, name), resume=resume or name != job.active)
    begun: list[float] = []

    def watch(done: int, part: ModelPart) -> None:
        begun.append(time.perf_counter())
        if progress is not None:
            progress(done, part)

    training = member.table

    def role(party: Party) -> ModelPart:  # tables are read once connected, so that the others learn of a bad one
        data, classes = _read(job, name, training, None, None)
        if name == job.active and options.mechanism == "label_rr":
            kept = member.noisy_labels or f"{training}.noisy_labels"
            data = replace(data, y=noisy_labels(kept, data.y, classes, options))
        evals = []
        for number, path in enumerate(member.eval_tables):
            rows, _ = _read(job, name, path, data.table.schema, classes)
            evals.append(Labelled(rows.table, rows.y, rows.weight, f"eval_{number}"))
        if name == job.active:
            return secureboost.active(
                party, data, options, parties=list(job.parties), classes=classes, eval_sets=evals,
                threads=threads, progress=watch, keeper=keeper,
            )  # fmt: skip
        return secureboost.passive(
            party, data.table, options, eval_tables=[e.table for e in evals],
            threads=threads, progress=watch, keeper=keeper,
        )  # fmt: skip

    try:
        part, transcript = _connected(job, name, options.protocol, role)
    except BaseException:
        keeper.write()
        raise
    part.save(part_file(job.output, name))
    keeper.done()
    ended = time.perf_counter()
    first = begun[0] if begun else ended
    _write_report(job, name, {"setup": first - started, "boosting": ended - first}, transcript)
    return part


def predict_party(job: Job, name: str) -> NDArray[np.float64] | None:
    """Run one party's role of a prediction with its saved part; the active party gets the margins."""
    options, threads = job.tree_options(), cores(job.n_jobs)
    bits = options.insecure_test_key_bits

    def role(party: Party, part: ModelPart, table: Table) -> NDArray[np.float64] | None:
        if options.he_inference and part.forest is not None:
            return hidden_active(
                party, part, table, key_bits=options.key_bits, insecure_test_key_bits=bits, threads=threads
            )
        if options.he_inference:
            hidden_passive(party, part, table, insecure_test_key_bits=bits, threads=threads)
        elif part.forest is not None:
            return decisions.predict_active(party, part, table, threads)
        else:
            decisions.predict_passive(party, part, table, threads)
        return None

    return _with_rows(job, name, role)


def explain_party(job: Job, name: str) -> dict[str, NDArray[np.float64]]:
    """Run one party's role of an explanation with its saved part.

    Returns
    -------
    dict of str to float64 (n_rows,)
        What each of its own columns adds to each row's margin (TreeSHAP), at the active party the bias and the others'
        totals as well; with more than two classes, by column and class.
    """
    threads = cores(job.n_jobs)
    if job.tree_options().he_inference:
        raise ConfigError("he_inference hides the decisions that contributions are made of; take it out of the job")

    def role(party: Party, part: ModelPart, table: Table) -> dict[str, NDArray[np.float64]]:
        names = part.schema.names
        if part.forest is None:
            own = explain_passive(party, part, table, threads=threads)
            columns = dict(zip(names, own.transpose(2, 0, 1), strict=True))
        else:
            found = explain_active(party, part, table, threads=threads)
            columns = dict(zip(names, found.own.transpose(2, 0, 1), strict=True))
            columns |= {f"all of {peer}": found.totals[peer] for peer in found.others}
            columns["bias"] = np.repeat(found.bias[:, None], table.n_rows, axis=1)
        several = len(next(iter(columns.values()), ())) > 1
        return {
            f"{column}, class {k}" if several else column: values
            for column, of_outputs in columns.items()
            for k, values in enumerate(of_outputs)
        }

    return _with_rows(job, name, role)


def _with_rows(job: Job, name: str, role: Callable[[Party, ModelPart, Table], Result]) -> Result:
    """Run a role with the party's saved part and its rows to predict."""
    to_predict = job.parties[name].predict_table
    if to_predict is None:
        raise ConfigError(f"the job names no rows of {name} to predict: add parties.{name}.predict_table")
    part = find_part(job, name)

    def with_table(party: Party) -> Result:
        labels = [job.label, *([job.weight] if job.weight else [])] if name == job.active else []
        _, table = _open(job, name, to_predict, part.schema, labels)
        return role(party, part, table)

    found, _ = _connected(job, name, job.tree_options().protocol, with_table)
    return found


def _connected(job: Job, name: str, protocol: str, role: Callable[[Party], Result]) -> tuple[Result, Transcript]:
    """Connect to the peers, run the role, leave in order."""
    peers = [other for other in job.parties if other != name] if name == job.active else [job.active]
    me = job.parties[name]
    missing = [
        f"parties.{who}.{what}"
        for who in (name, *peers)
        for what in ("address", "certificate", *(("key",) if who == name else ()))
        if getattr(job.parties[who], what) is None
    ]
    if missing or me.key is None or me.certificate is None or me.address is None:
        raise ConfigError(f"to run as {name} alone the job must name {', '.join(missing)}")
    pinned = {
        peer: Peer(str(job.parties[peer].address), load_certificate(str(job.parties[peer].certificate)))
        for peer in peers
    }
    channel = GrpcChannel(
        name, me.address, key=Path(me.key).read_bytes(), certificate=load_certificate(me.certificate), peers=pinned
    )
    try:
        party = Party(name, job.name, protocol, channel, peers, timeout=job.timeout)

        def connect_and_play() -> Result:  # a peer that cannot be reached is the others' business, too
            try:
                channel.connect(timeout=CONNECT_TIMEOUT)
            except PeerLost:
                party.heed()  # a peer that stopped the job said why before it went
                raise
            return role(party)

        return run_role(party, connect_and_play), party.transcript
    finally:
        channel.close()


def part_file(folder: str | Path, name: str) -> Path:
    """Return where a party's part is kept."""
    return Path(folder) / f"{name}.part"


def find_part(job: Job, name: str) -> ModelPart:
    """Read a party's part: that of the last finished training, else what an unfinished one left."""
    finished, unfinished = part_file(job.output, name), checkpoint_file(job.checkpoints or job.output, name)
    if unfinished.exists() and not finished.exists():
        return load_checkpoint(unfinished).part
    return load_part(finished)


def _read(
    job: Job, name: str, path: str, schema: Schema | None, classes: list[Any] | None
) -> tuple[Labelled, list[Any] | None]:
    """Read a party's training or eval rows; at the active party, labels and (for training) weights too."""
    extra = [job.label, *([job.weight] if job.weight else [])] if name == job.active else []
    arrow, table = _open(job, name, path, schema, extra)
    if name != job.active:
        return Labelled(table, np.zeros(0)), None
    weighted = job.weight is not None and schema is None  # eval rows all weigh the same
    for column in [job.label, *([job.weight] if weighted else [])]:
        if column not in arrow.column_names:
            raise DataError(f"{name}: expected a column {column!r}, got a file without it - at {path}")
    weight = check_weights(arrow[job.weight], table.n_rows, name) if weighted else None
    if job.task == "regression":
        return Labelled(table, check_targets(arrow[job.label], name, table.n_rows), weight), None
    y = check_labels(arrow[job.label].to_numpy(zero_copy_only=False), name, table.n_rows)
    if classes is None:
        classes = np.unique(y).tolist()
        if len(classes) < 2:
            raise DataError(
                f"{name}: expected labels of at least two classes, got one class in all {len(y)} rows",
                public="its labels are all of one class",
            )
    unseen = set(np.unique(y).tolist()) - set(classes)
    if unseen:
        raise DataError(f"{name}: expected the labels seen in training, got {len(unseen)} others - at {path}")
    return Labelled(table, np.searchsorted(np.array(classes), y).astype(np.float64), weight), classes


def _open(job: Job, name: str, path: str, schema: Schema | None, extra: Sequence[str]) -> tuple[Any, Table]:
    """Read a file once; return all of it, and its columns other than `extra` as features."""
    member = job.parties[name]
    known = {} if schema is None else dict(zip(schema.names, schema.kinds, strict=True))
    text = [column for column, kind in known.items() if kind == "categorical"]
    arrow = read_table(path, drop=member.drop, text=text, party=name)
    checked = checked_columns(arrow)
    if checked is not None:
        return arrow, checked
    wanted = [column for column in member.columns or arrow.column_names if column not in extra]
    absent = [column for column in wanted if column not in arrow.column_names]
    if absent:
        raise DataError(f"{name}: expected columns {', '.join(absent)}, got a file without them - at {path}")
    features = arrow.select(wanted)
    return arrow, to_table(
        features, party=name, schema=schema, text_as_categories=True, allow_no_features=name == job.active
    )


def _write_report(job: Job, name: str, seconds: dict[str, float], transcript: Transcript) -> None:
    sent = {pair.partition(" -> ")[2]: totals for pair, totals in traffic_of([transcript]).totals.items()}
    others = [other for other in job.parties if other != job.active]
    learned = secureboost.disclosures(job.active, others, job.tree_options())
    report = Report(party=name, seconds=seconds, sent=sent, learned=learned)
    (Path(job.output) / f"{name}.report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def load_reports(job: Job) -> dict[str, Report]:
    """Read what all parties of a finished job on this machine noted."""
    return {
        name: msgspec.json.decode((Path(job.output) / f"{name}.report.json").read_bytes(), type=Report)
        for name in job.parties
    }
