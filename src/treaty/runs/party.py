"""One party's share of running a job: training, prediction and explanation with its own tables, key and model part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.ray_shards import opened
from treaty.cluster.shards import Shards
from treaty.data.reading import write_predictions
from treaty.errors import ConfigError, DataError, PeerAborted, PeerLost, PeerTimeout
from treaty.machine.process import cores
from treaty.messaging.certificates import Signer, check_certificate, load_certificate, load_identity
from treaty.messaging.party import Party
from treaty.messaging.transcript import Transcript
from treaty.models.checkpoints import Keeper, checkpoint_file, load_checkpoint, marked
from treaty.models.interpretation import explain_pooled
from treaty.models.linear import LinearPart, load_linear_part
from treaty.models.trees import load_part, predict_pooled
from treaty.runs.connecting import connected
from treaty.runs.job import Job, id_column, store_of
from treaty.runs.local_checks import check_cheaply, check_file, check_training, cluster_of
from treaty.runs.progress import TrainingClock, put_in_place, staged_file, wait_until_all_kept
from treaty.runs.records import begin_record, write_record
from treaty.runs.report import report_file, write_report
from treaty.runs.rows import (
    TrainingTables,
    alignment_of,
    among_owners,
    joined_in,
    open_rows,
    order_file,
    read_by_column,
    read_by_row,
)
from treaty.runs.table_files import FileRead, read_ahead, read_rows, read_to_predict
from treaty.runs.threads import RunTerms, predicting_roles
from treaty.systems.observers import play_role
from treaty.systems.pooled.system import why_no_split
from treaty.systems.system import AuditFolder, LabelledRows, PartySpec, Phase, Progress, RoleInput, Roles
from treaty.systems.vertical.audit_record import keep_for_audit

logger = logging.getLogger(__name__)
R = TypeVar("R")
Noted = Callable[[Transcript], None]


def train_party(
    job: Job, name: str, progress: Progress | None = None, *, resume: bool = False, phase: Phase | None = None
) -> Any:
    """Run one party's role of a training job against the others' addresses, and save its part and report.

    Parameters
    ----------
    resume : bool
        Go on from the checkpoint of an interrupted run, if there is one. The active party decides for all.
    phase : callable or None
        Called before the first round with what is being done, steps done and steps in all.

    Returns
    -------
    ModelPart, LinearPart or None
        None for roles that have no model.

    Raises
    ------
    TreatyError
        Whatever ends the job. What was finished by then is in the checkpoint; a finished model of an earlier run stays
        until this one is finished.
    """
    clock = TrainingClock()
    # refused before anybody waits for a connection
    roles = check_training(job, name, resume=resume)
    kept, store = checkpoint_file(job.checkpoints or job.output, name), store_of(job, name)

    ahead, unready = _attempted(name, lambda: _read_ahead(job, name, roles))
    keeper = Keeper(kept, resume=resume or name != job.active, party=name, store=store)
    shards: Shards | None = None

    def role(party: Party) -> Any:
        nonlocal ahead
        # raised once connected, so that the others learn of it
        if unready is not None:
            raise unready
        # rows that are still to be aligned
        if isinstance(ahead, FileRead):
            tables = read_by_column(party, job, roles, ahead, threads=cores(job.n_jobs), resume=resume, phase=phase)
        else:
            tables = ahead or TrainingTables()
        ahead = None
        for joined in [] if tables.data is None else joined_in(job, tables.data.table):
            logger.warning("%s: %s", name, joined)
        inputs = _training_inputs(party, job, roles, tables, keeper, progress, phase)
        inputs.observers.add(clock)
        inputs.shards, recording = shards, begin_record(job, party)
        if recording is not None:
            inputs.observers.add(recording)
        result = play_role(job.system.train[roles.of[name]], inputs)
        write_record(job, inputs, recording, getattr(result, "model_id", inputs.model_id))
        return _keep_result(job, roles, inputs, result, tables, clock)

    cluster = ExitStack()
    # before there are connections, whose threads do not bear that a cluster's processes are forked
    if unready is None:
        shards, unready = _attempted(name, lambda: cluster.enter_context(opened(cluster_of(job.parties[name]))))
    try:
        with cluster:
            part = connected(job, name, roles, "train", role, phase=phase)
    except BaseException as error:
        with suppress(OSError):  # its folder may be what failed
            for path in _files_of_training(job, name):
                staged_file(path).unlink(missing_ok=True)
        try:
            keeper.write()
        except (ConfigError, DataError) as unkept:
            logger.info("%s: its checkpoint could not be written either: %s", name, unkept)
        if isinstance(error, PeerLost | PeerTimeout | PeerAborted):
            # no other party came, whose error this one would be
            if unready is not None:
                raise unready from None
            error.args = (f"{error}{how_to_resume(job, name)}",)
        raise
    keeper.done()
    # the next training aligns its rows again
    order_file(job, name).unlink(missing_ok=True)
    return part


def _keep_result(
    job: Job, roles: Roles, inputs: RoleInput, result: Any, tables: TrainingTables, clock: TrainingClock
) -> Any:
    """Write what a finished training leaves here, once all parties can keep theirs; return the part of the model."""
    party, system = inputs.party, job.system
    name = party.name
    part = result if roles.of[name] in system.has_model else None
    _warn_of_trees(job, name, part, tables)
    _stage(job, roles, party, part, tables, clock, inputs.model_id)
    keep = partial(put_in_place, name, _files_of_training(job, name))
    try:
        waiting = roles.having(*system.has_model, *system.until_kept)
        may_lose = system.may_lose(roles, job.settings()[0])
        wait_until_all_kept(party, roles, waiting, may_lose, job.patience, keep=keep)
    except (PeerLost, PeerTimeout):
        # the others may have ended well
        if name != job.active:
            keep()
        raise
    return part


def how_to_resume(job: Job, name: str) -> str:
    """Return how to resume a training that has ended early; "" if the party has no checkpoint."""
    checkpoint = checkpoint_file(job.checkpoints or job.output, name)
    if "resume" in job.system.cannot or not checkpoint.exists():
        return ""
    return f"; {checkpoint} has what was finished: start all parties again, {job.active} with --resume, to go on"


def _read_ahead(job: Job, name: str, roles: Roles) -> FileRead | TrainingTables:
    """Check files and folders, and read tables as far as possible before the parties connect."""
    check_cheaply(job, name)
    if job.by_row:
        return read_by_row(job, name, roles)
    return read_ahead(job.table_rules(name), str(job.parties[name].table)) if name in roles.owners else TrainingTables()


def _training_inputs(
    party: Party,
    job: Job,
    roles: Roles,
    tables: TrainingTables,
    keeper: Keeper,
    progress: Progress | None,
    phase: Phase | None,
) -> RoleInput:
    """Return what a role's training program is given."""
    name, own, member = party.name, job.settings()[0], job.parties[party.name]
    folder, most = member.keep_for_audit, member.audit_gigabytes
    keeping = AuditFolder(Path(folder), int(most * 1e9)) if folder else None
    vouched = [*([roles.active, name] if keeping else []), *job.system.vouched(roles, own, name)]
    inputs = replace(
        terms_of(job, roles).inputs(party, cores(job.n_jobs), progress=progress, phase=phase), data=tables.data,
        classes=tables.classes, n_classes=job.classes, varied=job.task != "classification" or job.weight is not None,
        eval_sets=tables.eval_sets, keeper=keeper, store=store_of(job, name), epsilon_limits=member.epsilon_limits,
        vouching=_signer(job, name, vouched) if vouched else Signer(), patience=job.patience,
        most_recoverable=member.most_recoverable, apart=job.apart,
    )  # fmt: skip
    if keeping is not None:
        keep_for_audit(inputs, keeping)
    return inputs


def _signer(job: Job, name: str, members: list[str]) -> Signer:
    """Return the pinned certificates of these parties, and what a party vouches for its own keys with."""
    own = job.parties[name]
    pinned = {who: load_certificate(str(job.parties[who].certificate)) for who in members}
    for who, certificate in pinned.items():
        check_certificate(certificate, who)
    if own.key is None or own.certificate is None:
        raise ConfigError(f"to run as {name} the job must name parties.{name}.key and parties.{name}.certificate")
    return Signer(load_identity(own.key, own.certificate, name), pinned)


def _warn_of_trees(job: Job, name: str, part: Any, tables: TrainingTables) -> None:
    """Warn the party that has the trees when none has a split, with the reason, or when the training loss rose."""
    forest, (own, common) = getattr(part, "forest", None), job.settings()
    # by row, others' rows count as well
    if forest is not None and tables.data is not None and not job.by_row:
        reason = why_no_split(forest, common, [tables.data], None, noise=own.adds_noise)
        for warning in filter(None, (reason, forest.diverged)):
            logger.warning("%s: %s", name, warning)


def _stage(
    job: Job, roles: Roles, party: Party, part: Any, tables: TrainingTables, clock: TrainingClock, model_id: str
) -> None:
    """Write what a party has of a finished training, which an earlier one's files outlast until all have theirs."""
    own, report, weights = map(staged_file, _files_of_training(job, party.name))
    if part is not None:
        marked(part, store_of(job, party.name), party.name).save(own)
        if isinstance(part, LinearPart) and part.errors is not None:
            write_predictions(weights, part.table())
    training = "training" if job.system.common.table == "regression" else "boosting"
    write_report(report, job, roles, party, part, tables, clock.seconds(training, tables.seconds), model_id)


def _files_of_training(job: Job, name: str) -> tuple[Path, Path, Path]:
    """Return where a party's part, its report and, of a regression with standard errors, its weights are kept."""
    part = part_file(job.output, name)
    return part, report_file(job, name), part.with_suffix(".weights.csv")


def written_files(job: Job, name: str, part: Any) -> list[Path]:
    """Return the files that a finished training of a party has written, `part` being what it returned."""
    own, report, weights = _files_of_training(job, name)
    has_weights = isinstance(part, LinearPart) and part.errors is not None
    return [*([own] if part is not None else []), report, *([weights] if has_weights else [])]


def _attempted(name: str, attempt: Callable[[], R]) -> tuple[R | None, ConfigError | DataError | None]:
    """Return what is ready before a party connects, or the error, with which it connects to tell the others."""
    try:
        return attempt(), None
    except (ConfigError, DataError) as error:
        logger.warning("%s: %s; waiting for the others, to tell them", name, str(error).removeprefix(f"{name}: "))
        return None, error


def predict_party(
    job: Job, name: str, phase: Phase | None = None, noted: Noted | None = None
) -> tuple[Any, NDArray[np.float64] | None]:
    """Run one party's role of a prediction with its saved part; where rows are split that is the whole model.

    `noted` is called with the transcript of what was sent and received, if anything was.

    Returns
    -------
    ids : pyarrow.ChunkedArray or None
        Of the rows, where they were aligned.
    margins : float64 (n_rows, n_outputs), or (n_rows,) of a logistic regression, or None
        At the active party; where rows are split at each that has the model, of its own rows.
    """
    check_has_model(job, name)
    if job.by_row:
        part = find_part(job, name)
        rows = read_rows(job.table_rules(name), to_predict(job, name), part.schema).features
        return None, predict_pooled([part], [rows], cores(job.n_jobs))
    return _with_rows(job, name, "predict", phase, noted)


def explain_party(job: Job, name: str, phase: Phase | None = None, noted: Noted | None = None) -> dict[str, Any]:
    """Run one party's role of an explanation with its saved part; `noted` as of `predict_party`.

    Returns
    -------
    dict of str to array (n_rows,)
        Their ids, where rows were aligned; and what each of its own columns adds to each row's margin (TreeSHAP), at
        the active party the bias and the others' totals as well; with more than two classes, by column and class.
    """
    check_explainable(job)
    check_has_model(job, name)
    if job.by_row:
        whole = find_part(job, name)
        rows = read_rows(job.table_rules(name), to_predict(job, name), whole.schema).features
        values = explain_pooled([whole], [rows], cores(job.n_jobs))
        return _by_column(dict(zip([*whole.schema.names, "bias"], values.transpose(2, 0, 1), strict=True)))
    ids, found = _with_rows(job, name, "explain", phase, noted)
    names = find_part(job, name).schema.names
    if name != job.active:
        columns = dict(zip(names, found.transpose(2, 0, 1), strict=True))
    else:
        columns = dict(zip(names, found.own.transpose(2, 0, 1), strict=True))
        columns |= {f"all of {peer}": found.totals[peer] for peer in found.others}
        columns["bias"] = np.repeat(found.bias[:, None], found.own.shape[1], axis=1)
    by_column = _by_column(columns)
    return by_column if ids is None else {id_column(job, name): ids, **by_column}


def check_explainable(job: Job) -> None:
    """Refuse to explain what is no model of trees, and where that would show what the system hides.

    Raises
    ------
    ConfigError
    """
    if "explain" in job.system.cannot:
        raise ConfigError(job.system.cannot["explain"])
    if job.settings()[0].hides_decisions:
        raise ConfigError("he_inference hides the decisions that contributions are made of; take it out of the job")


def check_has_model(job: Job, name: str) -> None:
    """Refuse what needs a model at a role that has none.

    Raises
    ------
    ConfigError
    """
    if name not in owners_of_model(job):
        role = job.parties[name].role
        what = f"{name}, the {role}, has no part of the model" if role else f"{name} has no part of the model"
        served = job.system.service is not None and not job.system.service.refused(job.settings()[0])
        hint = f"; or, to have rows of it predicted, parties.{name}.predict_table" if served and not role else ""
        raise ConfigError(f"{what}: expected --as {' or '.join(owners_of_model(job))}{hint}")


def owners_of_model(job: Job) -> list[str]:
    """Return the parties with a part of the model, or with the model, in the job's order."""
    if job.by_row and job.system.has_model.issuperset(job.system.train):
        # whose training tables a file for prediction need not name
        return list(job.parties)
    service, own = job.system.service, job.settings()[0]
    # whose users need no training table
    if service is not None and not service.refused(own):
        roles = service.assign(places_to_predict(job), job.active, own)
    else:
        roles = job.roles() if job.by_row else predicting(job)
    return roles.having(*job.system.has_model)


def places_to_predict(job: Job) -> dict[str, PartySpec]:
    """Return what a job says of parties for a prediction: role, edge server, whether they have rows to predict."""
    return {
        name: PartySpec(member.role, member.edge, member.predict_table is not None)
        for name, member in job.parties.items()
    }


def predicting(job: Job) -> Roles:
    """Return who plays which role in a prediction by columns: helpers of the training take no part."""
    named = job.system.named_roles
    wrong = [name for name, member in job.parties.items() if member.edge or member.role not in (None, *named)]
    if wrong:
        known = f"no role but {' and '.join(sorted(named))}" if named else "no role"
        raise ConfigError(
            f"expected {known} and no edge with protocol {job.protocol!r}, got them at {', '.join(wrong)}"
        )
    return predicting_roles(job.active, [name for name, member in job.parties.items() if member.role is None])


def _by_column(columns: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    several = len(next(iter(columns.values()), ())) > 1
    return {
        f"{column}, class {k}" if several else column: values
        for column, of_outputs in columns.items()
        for k, values in enumerate(of_outputs)
    }


def _with_rows(job: Job, name: str, verb: str, phase: Phase | None, noted: Noted | None) -> tuple[Any, Any]:
    """Run a role with the party's saved part and its rows to predict; return their ids too, if they were aligned."""
    roles, threads, path = predicting(job), cores(job.n_jobs), to_predict(job, name)
    programs = job.system.predict if verb == "predict" else job.system.explain

    def read() -> tuple[Any, FileRead]:
        part = find_part(job, name)
        check_file(name, path)
        return part, read_to_predict(job.table_rules(name), path, part.schema)

    ahead, unready = _attempted(name, read)

    def role(party: Party) -> tuple[Any, Any]:
        nonlocal ahead
        if unready is not None or ahead is None:
            raise unready or AssertionError("rows are read, or there is an error")
        (part, of_file), ahead = ahead, None
        with among_owners(party, roles):
            alignment = alignment_of(job, name, path, threads=threads)
            rows = open_rows(party, job.table_rules(name), path, part.schema, alignment, phase=phase, read=of_file)
        data = LabelledRows(rows.features, np.zeros(0), ids=rows.canonical)
        inputs = terms_of(job, roles).inputs(party, threads, phase=phase)
        inputs = replace(inputs, part=part, data=data, apart=job.apart)
        found = play_role(programs[roles.of[name]], inputs)
        if noted is not None:
            noted(party.transcript)
        return rows.ids, found

    try:
        return connected(job, name, roles, verb, role, phase=phase)
    except (PeerLost, PeerTimeout, PeerAborted):
        # no other party came, whose error this one would be
        if unready is not None:
            raise unready from None
        raise


def terms_of(job: Job, roles: Roles) -> RunTerms:
    """Return what all parties of a job have in common when they play these roles."""
    return RunTerms(job.system, *job.settings(), roles)


def to_predict(job: Job, name: str) -> str:
    """Return the path of a party's rows to predict; ConfigError where the job names none."""
    path = job.parties[name].predict_table
    if path is None:
        raise ConfigError(f"the job names no rows of {name} to predict: add parties.{name}.predict_table")
    return path


def part_file(folder: str | Path, name: str) -> Path:
    """Return where a party's part is kept."""
    return Path(folder) / f"{name}.part"


def find_part(job: Job, name: str) -> Any:
    """Read a party's part: that of the last finished training, else what an unfinished one left."""
    finished, unfinished = part_file(job.output, name), checkpoint_file(job.checkpoints or job.output, name)
    if job.system.common.table == "regression":
        return load_linear_part(finished, name)
    if unfinished.exists() and not finished.exists():
        return load_checkpoint(unfinished, name).part
    return load_part(finished, name)
