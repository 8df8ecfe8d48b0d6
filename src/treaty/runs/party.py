"""One party's share of a training: its role is played against the others, then all keep what it left, or none does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from treaty.cluster.shards import Shards, opened
from treaty.data.reading import write_predictions
from treaty.errors import ConfigError, DataError, PeerAborted, PeerLost, PeerTimeout, TreatyError
from treaty.files import read_json, write_json
from treaty.machine.process import cores
from treaty.messaging.certificates import Signer, check_certificate, load_certificate, load_identity
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper, checkpoint_file, marked
from treaty.models.linear import LinearPart
from treaty.models.statistics import StatisticsPart
from treaty.privacy.ledger import EpsilonLimits
from treaty.runs.connecting import connected, put_in_place, staged_file, wait_until_all_kept
from treaty.runs.job import FITTED, Job, store_of
from treaty.runs.job_files import check_training, cluster_of
from treaty.runs.local_checks import check_cheaply
from treaty.runs.records import begin_record, write_record
from treaty.runs.report import FORMAT, Report, losses_of, report_file, write_report
from treaty.runs.rows import TrainingTables, earlier_part, joined_in, order_file, read_by_column, read_by_row
from treaty.runs.table_files import FileRead, read_ahead, read_to_predict
from treaty.runs.threads import RunTerms
from treaty.systems.observers import Observer, Observers, play_role
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.pooled.system import train, why_no_split
from treaty.systems.system import AuditFolder, Phase, Progress, RoleInput, System
from treaty.systems.vertical.audit_record import keep_for_audit

logger = logging.getLogger(__name__)
R = TypeVar("R")


class TrainingClock(Observer):
    """Times the phases of a training, from the moment the clock is made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None

    def round_finished(self, rounds: int, state: Any) -> None:
        """Note the end of set-up: the first call comes when boosting, or the first epoch, begins."""
        if self._first is None:
            self._first = time.perf_counter()

    def seconds(self, system: System, before: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the seconds of each phase of a system's training: those `before` set-up, set-up, and training."""
        ended, earlier = time.perf_counter(), before or {}
        first = self._first or ended
        training = "boosting" if system.common.table == "boosting" else "training"
        return {**earlier, "setup": first - self._started - sum(earlier.values()), training: ended - first}


def train_party(
    job: Job, name: str, progress: Progress | None = None, *, resume: bool = False, phase: Phase | None = None
) -> Any:
    """Run one party's role of a training job against the others' addresses, and save its part and report.

    With `resume`, resume from the checkpoint of an interrupted run, if there is one; the active party decides for all.
    `phase` is called before the first round with what is being done, its finished steps, and all its steps. Return the
    party's part, or None for roles that have no model. If the training fails, raise TreatyError: the checkpoint has all
    finished rounds, and the finished model of an earlier run stays until this one is finished.
    """
    clock = TrainingClock()
    # errors of the job file end this party before another one waits for it
    roles = check_training(job, name, resume=resume)
    checkpoint, store = checkpoint_file(job.checkpoints or job.output, name), store_of(job, name)

    def read() -> FileRead | TrainingTables:
        check_cheaply(job, name)
        if job.by_row:
            return read_by_row(job, name, roles)
        if name not in roles.owners:
            return TrainingTables()
        rules, path = job.table_rules(name), str(job.parties[name].table)
        earlier = earlier_part(job, name)
        return read_ahead(rules, path) if earlier is None else read_to_predict(rules, path, earlier.schema)

    ahead, unready = attempted(name, read)
    keeper = Keeper(checkpoint, resume=resume or name != job.active, party=name, store=store)
    shards: Shards | None = None

    def role(party: Party) -> Any:
        nonlocal ahead
        # raised only now, once connected, so that the others learn of it
        if unready is not None:
            raise unready
        # a file alone: its rows are still to be aligned
        if isinstance(ahead, FileRead):
            tables = read_by_column(party, job, roles, ahead, resume=resume, phase=phase)
        else:
            tables = ahead or TrainingTables()
        # large, and not needed any more
        ahead = None
        terms = RunTerms(job.system, *job.settings(), roles)
        inputs = terms.inputs(party, cores(job.n_jobs), progress=progress, phase=phase)
        inputs = _training_inputs(inputs, job, tables, keeper)
        inputs.observers.add(clock)
        inputs.shards, recording = shards, begin_record(job, party)
        if recording is not None:
            inputs.observers.add(recording)
        for joined in () if tables.data is None else joined_in(inputs.common, tables.data.table):
            logger.warning("%s: %s", name, joined)
        result = play_role(job.system.train[roles.of[name]], inputs)
        write_record(job, inputs, recording, getattr(result, "model_id", inputs.model_id))
        return _keep_result(job, inputs, result, tables, clock)

    cluster = ExitStack()
    # before connecting: a cluster's processes are forked, which must not happen among the threads of connections
    if unready is None:
        shards, unready = attempted(name, lambda: cluster.enter_context(opened(cluster_of(job.parties[name]))))
    try:
        with cluster:
            part = connected(job, name, roles, "train", role, phase=phase)
    except BaseException as error:
        # the folder may be what failed
        with suppress(OSError):
            for path in files_of_training(job, name):
                staged_file(path).unlink(missing_ok=True)
        try:
            keeper.write()
        except (ConfigError, DataError) as unkept:
            logger.info("%s: its checkpoint could not be written either: %s", name, unkept)
        if isinstance(error, PeerLost | PeerTimeout | PeerAborted):
            # this party's own error, which no other party was there to receive
            if unready is not None:
                raise unready from None
            error.args = (f"{error}{how_to_resume(job, name)}",)
        raise
    keeper.done()
    # the next training aligns its rows again
    order_file(job, name).unlink(missing_ok=True)
    return part


def attempted(name: str, attempt: Callable[[], R]) -> tuple[R | None, ConfigError | DataError | None]:
    """Return a result that a party needs before it connects, or the error, which it raises once it is connected."""
    try:
        return attempt(), None
    except (ConfigError, DataError) as error:
        logger.warning("%s: %s; waiting for the others, to tell them", name, str(error).removeprefix(f"{name}: "))
        return None, error


def _training_inputs(inputs: RoleInput, job: Job, tables: TrainingTables, keeper: Keeper) -> RoleInput:
    """Add to a role's input what a party's job and tables say."""
    name, roles, member = inputs.party.name, inputs.roles, job.parties[inputs.party.name]
    keeps = bool(member.keep_for_audit)
    vouched = [*([roles.active, name] if keeps else []), *job.system.vouched(roles, inputs.options, name)]
    inputs = replace(
        inputs, data=tables.data, classes=tables.classes, n_classes=job.classes, varied=job.varied,
        eval_sets=tables.eval_sets, keeper=keeper, store=store_of(job, name),
        epsilon_limits=EpsilonLimits(member.most_epsilon, member.most_epsilon_total),
        vouching=signer(job, name, vouched), patience=job.patience,
        most_recoverable=member.most_recoverable, apart=job.apart, directions=member.monotone_constraints,
        part=earlier_part(job, name) if name in roles.owners else None,
    )  # fmt: skip
    if keeps:
        keep_for_audit(inputs, AuditFolder(Path(str(member.keep_for_audit)), int(member.audit_gigabytes * 1e9)))
    return inputs


def signer(job: Job, name: str, members: list[str]) -> Signer:
    """Return the pinned certificates of these parties, and the keys with which a party vouches for its own keys."""
    if not members:
        return Signer()
    own = job.parties[name]
    pinned = {who: load_certificate(str(job.parties[who].certificate)) for who in members}
    for who, certificate in pinned.items():
        check_certificate(certificate, who)
    if own.key is None or own.certificate is None:
        raise ConfigError(f"to run as {name} the job must name parties.{name}.key and parties.{name}.certificate")
    return Signer(load_identity(own.key, own.certificate, name), pinned)


def _keep_result(job: Job, inputs: RoleInput, result: Any, tables: TrainingTables, clock: TrainingClock) -> Any:
    """Write a finished training's files, and give them their names once all parties have theirs; return the part."""
    party, roles, system = inputs.party, inputs.roles, job.system
    name, files = party.name, files_of_training(job, party.name)
    part = result if roles.of[name] in system.has_model else None
    forest = getattr(part, "forest", None)
    # if tables are split by row, the reason for a tree without splits may lie in others' rows
    if forest is not None and inputs.data is not None and not job.by_row:
        reason = why_no_split(forest, inputs.common, [inputs.data], None, noise=inputs.options.adds_noise)
        for warning in filter(None, (reason, forest.diverged)):
            logger.warning("%s: %s", name, warning)

    own, report, *tables_at = map(staged_file, files)
    if part is not None:
        marked(part, inputs.store, name).save(own)
    for path, columns in zip(tables_at, _tables_of(part), strict=False):
        write_predictions(path, columns)
    write_report(report, job, inputs, part, tables.n_rows, clock.seconds(system, tables.seconds))

    def keep() -> None:
        put_in_place(name, files)

    try:
        waiting = roles.having(*system.has_model, *system.until_kept)
        wait_until_all_kept(party, roles, waiting, system.may_lose(roles, inputs.options), job.patience, keep)
    except (PeerLost, PeerTimeout):
        # the others may have ended well
        if name != job.active:
            keep()
        raise
    # nobody waits any more; an estimator has no use for the report
    if name == job.active and not job.by_row and job.label != FITTED:
        _add_own_columns(report_file(job, name), inputs)
    return part


def _add_own_columns(report: Path, inputs: RoleInput) -> None:
    """Add to a report the metrics of eval sets by round of trees on own columns alone, if those can be trained."""
    common, name = inputs.common, inputs.party.name
    goes_on, noisy = inputs.part is not None, inputs.options.label_epsilon is not None
    if goes_on or noisy or not (isinstance(common, BoostingOptions) and inputs.eval_sets and inputs.rows.table.columns):
        return
    own = {"monotone_constraints": dict(inputs.directions) or None, "interaction_constraints": None}
    alone = replace(
        inputs, options=Pooled(), common=msgspec.structs.replace(common, **own), keeper=None, observers=Observers()
    )
    try:
        losses = losses_of(train(alone))
    except TreatyError as error:  # the job has ended well all the same
        logger.warning("%s: no model of its own columns alone to compare with: %s", name, error)
        return
    write_json(report, msgspec.structs.replace(read_json(report, Report, FORMAT, name), alone=losses), FORMAT, name)


def how_to_resume(job: Job, name: str) -> str:
    """Return how to resume an interrupted training; "" if the party has no checkpoint."""
    checkpoint = checkpoint_file(job.checkpoints or job.output, name)
    if "resume" in job.system.cannot or not checkpoint.exists():
        return ""
    return f"; {checkpoint} has all finished rounds: to resume, restart all parties, {job.active} with --resume"


def part_file(folder: str | Path, name: str) -> Path:
    """Return the file of a party's part of the model."""
    return Path(folder) / f"{name}.part"


def files_of_training(job: Job, name: str) -> list[Path]:
    """Return the files of a party's part, its report, and tables, if it has some: see `_tables_of`."""
    part = part_file(job.output, name)
    tables = (".bins.csv", ".correlations.csv") if job.system.common.table == "columns" else (".weights.csv",)
    return [part, report_file(job, name), *map(part.with_suffix, tables)]


def _tables_of(part: Any) -> list[dict[str, Any]]:
    """Return what is written of a part as tables: weights with standard errors, or statistics."""
    if isinstance(part, StatisticsPart):
        return part.tables()
    return [part.table()] if isinstance(part, LinearPart) and part.errors is not None else []


def written_files(job: Job, name: str, part: Any) -> list[Path]:
    """Return the files that a party's finished training has written; `part` is what it returned."""
    own, report, *tables = files_of_training(job, name)
    return [*([own] if part is not None else []), report, *tables[: len(_tables_of(part))]]
