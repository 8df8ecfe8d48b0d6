"""How a job that has ended is forgotten: what it has left in the node's folder is removed, and the audit log says so.

Ledgers, in ``stores``, count for later jobs as well, and are never touched.
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

# ------------------------------- where a job's files are in its node's folder, and who may write those of its attempts

logger = logging.getLogger(__name__)

LOCK_TIMEOUT = 60.0
"""Seconds for an earlier attempt's process to end."""


def checkpoints_of(folder: Path, job: str) -> Path:
    """Return the folder of what serves a job's attempts alone."""
    return folder / "checkpoints" / job


def lock_of(folder: Path, job: str) -> Path:
    """Return the file that a process holds for as long as it may write a job's checkpoints."""
    return checkpoints_of(folder, job) / ".lock"


def results_of(folder: Path, job: str, model: str = "") -> Path:
    """Return the folder of a training's results, and of the results of predictions by its `model`."""
    return folder / "models" / (model or job)


def log_of(folder: Path, job: str) -> Path:
    return folder / "logs" / f"{job}.log"


def report_of(folder: Path, job: str, name: str) -> Path:
    """Return the report of a party's training."""
    return results_of(folder, job) / f"{name}.report.json"


def keeps_part(folder: Path, job: str, name: str) -> bool:
    """Tell whether the newest attempt at a training has put a party's part in its place; each begins without it."""
    return report_of(folder, job, name).exists() and not list(results_of(folder, job).glob(f"{name}.*staged*"))


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process plays a job here: one that was told to end may still write its checkpoint."""
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
    """Remove what served an ended job's attempts alone, once no process holds it: one may outlive a killed node."""
    with suppress(FileNotFoundError), alone(lock_of(folder, job)):
        shutil.rmtree(checkpoints_of(folder, job))


def clear_checkpoints(folder: Path, job: str) -> None:
    """Remove an ended job's checkpoints, or say in the log why they are left."""
    try:
        remove_checkpoints(folder, job)
    except (OSError, LocalProtocolError) as error:
        logger.warning("checkpoints of job %s are left: %s", job[:12], error)


# ---------------------------------------------------------------- forgetting


def is_forgotten(store: Store, job: str) -> bool:
    """Tell whether a job was forgotten here."""
    return any(event.get("what") == "forgotten" for event in store.events_of(job))


def kept_for(store: Store, row: JobRow) -> str:
    """Return why a job cannot be forgotten now, "" where it can."""
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

    Predictions by a training's model are the predictions', and left alone; a query's rows that are kept for its next
    verdict are a job's as long as no open job names the same data set.
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
    """Remove what a job has left here, and note what that was and who has asked for it; return what was removed.

    Raises
    ------
    ConfigError
        If the job has not ended, an open job needs its model, or something cannot be removed.
    """
    why = kept_for(store, row)
    if why:
        raise ConfigError(why)
    folder, left = Path(settings.folder), left_of(settings, store, row)
    if left:  # noted first: nothing is ever gone without an entry
        removed = [str(path.relative_to(folder)) for path in left]
        store.note({"what": "forgotten", "job": row.id, "by": by, "removed": removed})
    for path in left:
        try:
            if path == checkpoints_of(folder, row.id):
                remove_checkpoints(folder, row.id)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot remove {path}: {error.strerror}; mend that, and forget the job again") from None
        with suppress(OSError):  # there is more in it
            if path.parent.parent == folder / "models":
                path.parent.rmdir()
    return left


def _open(store: Store) -> Iterator[tuple[JobRow, Proposal]]:
    for row in store.jobs(TRANSITIONS.keys() - FINAL):
        proposal = _proposal(row)
        if proposal is not None:
            yield row, proposal


def _proposal(row: JobRow) -> Proposal | None:
    """Return a job's proposal; None of one of another version of Treaty."""
    try:
        return msgspec.json.decode(row.proposal, type=Proposal)
    except msgspec.MsgspecError:
        return None


def _queries(settings: Settings, proposal: Proposal | None) -> set[str]:
    """Return the data sets of a job here that are the result of a query."""
    try:
        named = [] if proposal is None else data_sets(proposal.described(), settings.name, proposal.verb)
    except (TreatyError, KeyError):  # of another version of Treaty
        return set()
    return {of for of in named if of in settings.data and settings.data[of].sql is not None}
