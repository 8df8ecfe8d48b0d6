"""One party's share of running a job: training, prediction and explanation with its own tables, key and model part."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.compute import cores
from treaty.data.table import Table
from treaty.errors import ConfigError, PeerLost
from treaty.messaging.certificates import load_certificate
from treaty.messaging.grpc_channel import GrpcChannel, Peer
from treaty.messaging.party import Party, run_role
from treaty.messaging.transcript import Transcript
from treaty.models.checkpoints import Keeper, checkpoint_file, load_checkpoint
from treaty.models.interpretation import explain_pooled
from treaty.models.trees import ModelPart, load_part
from treaty.runs.crowd_jobs import check_crowd, crowd_of, train_in_crowd
from treaty.runs.horizontal_jobs import participants, predict_rows, train_on_rows
from treaty.runs.job import Job, id_column
from treaty.runs.report import write_report
from treaty.runs.rows import open_rows, read_rows
from treaty.runs.threads import star
from treaty.runs.vertical_jobs import Phase, order_file, train_on_columns
from treaty.systems.alignment.roles import Progress as Steps
from treaty.systems.disclosures import crowd_disclosures, disclosures, horizontal_disclosures
from treaty.systems.fedxgboost_smm.dealer import dealer as deal
from treaty.systems.pooled.training import Progress
from treaty.systems.secureboost.hidden_prediction import hidden_active, hidden_passive
from treaty.systems.vertical import decisions
from treaty.systems.vertical.contributions import explain_active, explain_passive

Result = TypeVar("Result")
CONNECT_TIMEOUT = 120.0  # seconds the parties wait for each other to start


def train_party(
    job: Job, name: str, progress: Progress | None = None, *, resume: bool = False, phase: Phase | None = None
) -> ModelPart | None:
    """Run one party's role of a training job against the others' addresses, and save its part and report.

    Parameters
    ----------
    resume : bool
        Go on from the checkpoint of an interrupted run, if there is one. The active party decides for all.
    phase : callable or None
        Called before the first round with what is being done, steps done and steps in all.

    Returns
    -------
    ModelPart or None
        None for roles that have no model: a dealer's, and in a crowd all but the server's.

    Raises
    ------
    TreatyError
        Whatever ends the job. What was finished by then is in the checkpoint; a finished model of an earlier run stays
        until this one is finished.
    """
    started = time.perf_counter()
    member, options, threads = job.parties[name], job.tree_options(), cores(job.n_jobs)
    if job.horizontal:
        check_rows(job, name, resume=resume)  # refused before anybody waits for a connection
    elif member.table is None and name != job.dealer:
        raise ConfigError(f"the job names no table of {name}: add parties.{name}.table")
    check_dealer(job)
    if name == job.active and options.early_stopping_rounds is not None and not member.eval_tables:
        raise ConfigError(f"early_stopping_rounds needs rows to watch: name parties.{name}.eval_tables")
    Path(job.output).mkdir(parents=True, exist_ok=True)
    keeper = Keeper(checkpoint_file(job.checkpoints or job.output, name), resume=resume or name != job.active)
    begun: list[float] = []

    def watch(done: int, part: ModelPart) -> None:
        begun.append(time.perf_counter())
        if progress is not None:
            progress(done, part)

    def role(party: Party) -> tuple[ModelPart | None, dict[str, float]]:
        # tables are read once connected, so that the others learn of a bad one
        if job.crowd:
            return train_in_crowd(party, job, threads=threads, progress=watch, keeper=keeper), {}
        if job.horizontal:
            return train_on_rows(party, job, threads=threads, progress=watch, keeper=keeper), {}
        if name == job.dealer:
            deal(party, options, lead=job.active, threads=threads)
            return None, {}
        return train_on_columns(party, job, threads=threads, progress=watch, keeper=keeper, resume=resume, phase=phase)

    try:
        (part, seconds), transcript = connected(job, name, options.protocol, role, dealer=job.dealer)
    except BaseException:
        keeper.write()
        raise
    if part is not None:
        part.save(part_file(job.output, name))
    keeper.done()
    order_file(job, name).unlink(missing_ok=True)  # the next training aligns anew
    ended = time.perf_counter()
    first = begun[0] if begun else ended
    seconds |= {"setup": first - started - sum(seconds.values()), "boosting": ended - first}
    encryption, choice, spent = ("", "", "") if part is None else (part.encryption, part.choice, part.spent)
    learned = _learned(job, encryption, spent)
    write_report(job, name, transcript, learned, seconds, encryption=encryption, choice=choice, spent=spent)
    return part


def _learned(job: Job, encryption: str, spent: str) -> dict[str, list[str]]:
    """Return what each party learns of the others in a training."""
    options = job.tree_options()
    if job.crowd:
        return crowd_disclosures(options, len(crowd_of(job).edges), spent)
    if job.horizontal:
        return horizontal_disclosures(job.active, participants(job), options, spent)
    others = [other for other in job.owners if other != job.active]
    return disclosures(job.active, others, options, encryption, job.dealer or "")


def check_dealer(job: Job) -> None:
    """Refuse a training that needs a dealer and names none.

    Raises
    ------
    ConfigError
    """
    if job.dealer is None and job.tree_options().has_dealer:
        raise ConfigError('backend = "dealer" needs a party without data that deals: add one with role = "dealer"')


def check_rows(job: Job, name: str | None = None, *, resume: bool = False) -> None:
    """Refuse a job on rows whose parties are too few, or lack what they need; `name` is who runs, None for all.

    Raises
    ------
    ConfigError
    """
    if job.crowd:
        check_crowd(job, name or job.active)
        if resume:
            raise ConfigError("cannot resume: users of protocol 'fedxgb' do not come back as they were; begin anew")
    else:
        participants(job)


def predict_party(job: Job, name: str, steps: Steps | None = None) -> tuple[Any, NDArray[np.float64] | None]:
    """Run one party's role of a prediction with its saved part; in a horizontal job that is the whole model.

    Returns
    -------
    ids : pyarrow.ChunkedArray or None
        Of the rows, where they were aligned.
    margins : float64 (n_rows, n_outputs) or None
        At the active party; in a horizontal job at each that has the model, of its own rows.
    """
    check_has_model(job, name)
    if job.horizontal:
        return None, predict_rows(job, name, find_part(job, name), _to_predict(job, name))
    options, threads = job.tree_options(), cores(job.n_jobs)
    bits = options.insecure_test_key_bits

    def role(party: Party, part: ModelPart, table: Table) -> NDArray[np.float64] | None:
        if options.he_inference and part.forest is not None:
            return hidden_active(
                party, part, table,
                key_bits=options.key_bits, insecure_test_key_bits=bits, threads=threads, progress=steps,
            )  # fmt: skip
        if options.he_inference:
            hidden_passive(party, part, table, insecure_test_key_bits=bits, threads=threads)
        elif part.forest is not None:
            return decisions.predict_active(party, part, table, threads)
        else:
            decisions.predict_passive(party, part, table, threads)
        return None

    return _with_rows(job, name, role)


def explain_party(job: Job, name: str) -> dict[str, Any]:
    """Run one party's role of an explanation with its saved part.

    Returns
    -------
    dict of str to array (n_rows,)
        Their ids, where rows were aligned; and what each of its own columns adds to each row's margin (TreeSHAP), at
        the active party the bias and the others' totals as well; with more than two classes, by column and class.
    """
    check_explainable(job)
    check_has_model(job, name)
    threads = cores(job.n_jobs)
    if job.crowd:
        whole = find_part(job, name)
        rows = read_rows(job, name, _to_predict(job, name), whole.schema).features
        values = explain_pooled([whole], [rows], threads)
        return _by_column(dict(zip([*whole.schema.names, "bias"], values.transpose(2, 0, 1), strict=True)))

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
        return _by_column(columns)

    ids, found = _with_rows(job, name, role)
    return found if ids is None else {id_column(job, name): ids, **found}


def check_explainable(job: Job) -> None:
    """Refuse to explain what is no model of trees, and where that would show what the protocol hides.

    Raises
    ------
    ConfigError
    """
    if job.linear:
        raise ConfigError(
            "contributions (TreeSHAP) are those of trees; in a logistic regression a column adds its weight times its "
            "prepared value: see coef of each party's part"
        )
    if job.tree_options().he_inference:
        raise ConfigError("he_inference hides the decisions that contributions are made of; take it out of the job")
    if job.horizontal and not job.crowd:
        raise ConfigError(
            f"contributions need how many rows reached each node, which a {job.options['protocol']} model leaves out: "
            "participants could tell each other's rows from it"
        )


def check_has_model(job: Job, name: str) -> None:
    """Refuse what needs a model at a role that has none.

    Raises
    ------
    ConfigError
    """
    if job.crowd and name != job.active:
        raise ConfigError(f"the model of protocol 'fedxgb' is the server's: expected --as {job.active}, got {name}")
    if name == job.dealer:
        raise ConfigError(f"{name}, the dealer, has no part of the model: expected --as {' or '.join(job.owners)}")


def _by_column(columns: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """Return contributions (n_outputs, n_rows) of each column; where there are several outputs, by column and class."""
    several = len(next(iter(columns.values()), ())) > 1
    return {
        f"{column}, class {k}" if several else column: values
        for column, of_outputs in columns.items()
        for k, values in enumerate(of_outputs)
    }


def _with_rows(job: Job, name: str, role: Callable[[Party, ModelPart, Table], Result]) -> tuple[Any, Result]:
    """Run a role with the party's saved part and its rows to predict; return their ids too, if they were aligned."""
    to_predict, part = _to_predict(job, name), find_part(job, name)

    def with_table(party: Party) -> tuple[Any, Result]:
        rows = open_rows(party, job, to_predict, part.schema, threads=cores(job.n_jobs))
        return rows.ids, role(party, part, rows.features)

    found, _ = connected(job, name, job.tree_options().protocol, with_table)
    return found


def _to_predict(job: Job, name: str) -> str:
    path = job.parties[name].predict_table
    if path is None:
        raise ConfigError(f"the job names no rows of {name} to predict: add parties.{name}.predict_table")
    return path


def connected(
    job: Job,
    name: str,
    protocol: str,
    role: Callable[[Party], Result],
    dealer: str | None = None,
    peers: list[str] | None = None,
) -> tuple[Result, Transcript]:
    """Connect to the peers, the dealer among them if one is named, run the role, leave in order.

    Parameters
    ----------
    peers : list of str, optional
        Default: those of the job's protocol.
    """
    if peers is not None:
        pass
    elif job.crowd:
        peers = crowd_of(job).links(hidden=job.tree_options().hides_model)[name]
    else:
        peers = star(job.active, job.parties if dealer else job.owners, dealer)[name]
    me = job.parties[name]
    # participants check also the keys of whom they do not talk to
    vouched = participants(job) if job.horizontal and not job.crowd else []
    needed = [(who, "address") for who in (name, *peers)] + [(name, "key")]
    needed += [(who, "certificate") for who in dict.fromkeys((name, *peers, *vouched))]
    missing = [f"parties.{who}.{what}" for who, what in needed if getattr(job.parties[who], what) is None]
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
                # half of the timeout, or the others give up first; an edge server or the authority begins without users
                users = crowd_of(job).users if job.crowd and name not in crowd_of(job).users else ()
                channel.connect(timeout=min(CONNECT_TIMEOUT, job.timeout / 2), may_lose=users)
            except PeerLost:
                party.heed()  # a peer that stopped the job said why before it went
                raise
            if dealer in peers:
                party.set_aside(str(dealer))
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
