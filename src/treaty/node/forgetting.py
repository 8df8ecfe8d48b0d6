"""Where a job's files are in the node's folder, and how they are removed when an ended job is forgotten.

The audit log records what was removed. Ledgers, in ``stores``, count for later jobs, too, and are never removed.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from treaty.errors import ConfigError, LocalProtocolError, TreatyError
from treaty.node.proposals import Proposal, data_sets
from treaty.node.settings import Settings
from treaty.node.store import FINAL, TRANSITIONS, JobRow, Store

logger = logging.getLogger(__name__)

LOCK_TIMEOUT = 60.0
"""Seconds to wait for the process of an earlier attempt to end."""


def checkpoints_of(folder: Path, job: str) -> Path:
    """Return the folder of what only the attempts of a job need."""
    return folder / "checkpoints" / job


def lock_of(folder: Path, job: str) -> Path:
    """Return the lock file of the process that may write a job's checkpoints."""
    return checkpoints_of(folder, job) / ".lock"


def results_of(folder: Path, job: str, model: str = "") -> Path:
    """Return the folder of a training's results, and of predictions by its `model`."""
    return folder / "models" / (model or job)


def log_of(folder: Path, job: str) -> Path:
    return folder / "logs" / f"{job}.log"


def report_of(folder: Path, job: str, name: str) -> Path:
    """Return the report of a party's training."""
    return results_of(folder, job) / f"{name}.report.json"


def keeps_part(folder: Path, job: str, name: str) -> bool:
    """Return whether the newest attempt at a training has stored the party's part; each attempt starts without it."""
    return report_of(folder, job, name).exists() and not list(results_of(folder, job).glob(f"{name}.*staged*"))


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process runs the job here: one that was asked to end may still write its checkpoint."""
    with lock.open("w") as held:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LocalProtocolError(f"an earlier process of this job has not ended - at {lock}") from None
                time.sleep(0.05)
        yield


def remove_checkpoints(folder: Path, job: str) -> None:
    """Remove an ended job's checkpoints once no process holds them; a process may outlive a killed node."""
    with suppress(FileNotFoundError), alone(lock_of(folder, job)):
        shutil.rmtree(checkpoints_of(folder, job))


def clear_checkpoints(folder: Path, job: str) -> None:
    """Remove an ended job's checkpoints, or log why they are left."""
    try:
        remove_checkpoints(folder, job)
    except (OSError, LocalProtocolError) as error:
        logger.warning("checkpoints of job %s are left: %s", job[:12], error)


def is_forgotten(store: Store, job: str) -> bool:
    """Return whether a job was forgotten here."""
    return any(event.get("what") == "forgotten" for event in store.events_of(job))


def kept_for(store: Store, row: JobRow) -> str:
    """Return why a job cannot be forgotten now; "" if it can."""
    if row.state not in FINAL:
        return f"job {row.id[:12]} is {row.state}: only jobs that have ended can be forgotten; treaty cancel ends it"
    for other, proposal in _open(store):
        if proposal.model == row.id:
            return (
                f"job {other.id[:12]}, which is {other.state}, needs the model of job {row.id[:12]} ({proposal.verb}): "
                "wait for its end, or cancel it"
            )
    return ""


def left_of(settings: Settings, store: Store, row: JobRow) -> list[Path]:
    """Return the files, and the folder of checkpoints, that a job has left here.

    Predictions belong to their own job, not to the training. The snapshot of a query belongs to the job unless an open
    job names the same data set.
    """
    folder, proposal = Path(settings.folder), _proposal(row)
    of_model = results_of(folder, row.id, "" if proposal is None else proposal.model)
    if proposal is not None and proposal.model:
        found = [of_model / f"{settings.name}.{proposal.verb}-{row.id[:16]}.csv"]
    else:
        predictions = [f"{settings.name}.{verb}-*.csv" for verb in ("predict", "explain")]
        found = [file for file in sorted(of_model.glob("*")) if not any(map(file.match, predictions))]
    found += [checkpoints_of(folder, row.id), log_of(folder, row.id)]
    named = _queries(settings, proposal)
    named -= {of for _, other in _open(store) for of in _queries(settings, other)}
    found += [Path(settings.data[of].path) for of in sorted(named)]
    return [path for path in found if path.exists()]


def forget(settings: Settings, store: Store, row: JobRow, by: str) -> list[Path]:
    """Remove what a job has left here, and record what was removed and by whom; return the removed paths.

    Raises
    ------
    ConfigError
        If the job has not ended, an open job needs its model, or something cannot be removed.
    """
    why = kept_for(store, row)
    if why:
        raise ConfigError(why)
    folder, left = Path(settings.folder), left_of(settings, store, row)
    # Recorded first, so that nothing is ever removed without an entry.
    if left:
        removed = [str(path.relative_to(folder)) for path in left]
        store.note({"what": "forgotten", "job": row.id, "by": by, "removed": removed})
    for path in left:
        try:
            if path == checkpoints_of(folder, row.id):
                remove_checkpoints(folder, row.id)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot remove {path}: {error.strerror}; fix that, and forget the job again") from None
        with suppress(OSError):  # the folder is not empty
            if path.parent.parent == folder / "models":
                path.parent.rmdir()
    return left


def _open(store: Store) -> Iterator[tuple[JobRow, Proposal]]:
    for row in store.jobs(TRANSITIONS.keys() - FINAL):
        proposal = _proposal(row)
        if proposal is not None:
            yield row, proposal


def _proposal(row: JobRow) -> Proposal | None:
    """Return a job's proposal; None if another version of Treaty wrote it."""
    try:
        return msgspec.json.decode(row.proposal, type=Proposal)
    except msgspec.MsgspecError:
        return None


def _queries(settings: Settings, proposal: Proposal | None) -> set[str]:
    """Return the data sets of a job here that come from queries."""
    try:
        named = [] if proposal is None else data_sets(proposal.described(), settings.name, proposal.verb)
    except (TreatyError, KeyError):
        # Of another version of Treaty.
        return set()
    return {of for of in named if of in settings.data and settings.data[of].sql is not None}
