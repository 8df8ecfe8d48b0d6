"""Where a job's files are in its node's folder, and who may write those of its attempts."""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treaty.errors import LocalProtocolError

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
