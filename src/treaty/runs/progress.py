"""Progress of long work: bars, which are silent when the output is not a terminal, and lines for a log."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from treaty.errors import ConfigError
from treaty.messaging.messages import Message, MessageLeakage
from treaty.messaging.party import Party
from treaty.runs.job import Job
from treaty.systems.observers import Observer
from treaty.systems.system import Roles

if TYPE_CHECKING:
    from treaty.systems.system import Phase


logger = logging.getLogger(__name__)

# seconds, at least, between two lines of the log about the steps of one phase
LINES_APART = 10.0


class _Phases:
    """A bar of the phase under way, and log lines when one begins and ends and now and then between."""

    def __init__(self, bar: Progress, whose: str) -> None:
        self._bar, self._whose = bar, whose
        self._task: TaskID | None = None
        self._shown = ""
        # by phase: when the next line is due
        self._next: dict[str, float] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Tell how many steps of a phase are done."""
        if done >= total or time.monotonic() >= self._next.get(phase, 0.0):
            self._next[phase] = time.monotonic() + LINES_APART
            logger.info("%s: %s, %d of %d", self._whose, phase, done, total)
        if phase != self._shown:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._shown, self._task = phase, self._bar.add_task(phase, total=total, loss="")
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)


@contextmanager
def phases_bar(whose: str, *, shown: bool = True) -> Iterator[Phase]:
    """Yield a function to call with a phase, steps done and steps in all; the log names `whose` work it is."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with _progress(*columns, TimeRemainingColumn(), shown=shown) as bar:
        yield _Phases(bar, whose)


@contextmanager
def steps_bar(title: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with steps done and steps in all; the bar appears with its first call."""
    with phases_bar("treaty", shown=shown) as phase:
        yield partial(phase, title)


def _progress(*columns: ProgressColumn, shown: bool) -> Progress:
    console = Console(stderr=True)
    # rich before 14.3 ends a bar that is disabled by an empty line
    console.quiet = not (shown and console.is_terminal)
    return Progress(*columns, console=console, disable=console.quiet, transient=True)


class TrainingBar:
    """Context manager showing rounds done, time left and eval sets' losses on standard error, and a log line of each.

    Call it with the number of finished rounds and the part so far, if there is one, as roles do with their `progress`
    argument.
    """

    def __init__(self, title: str, rounds: int, *, shown: bool = True) -> None:
        self._progress = _progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), shown=shown,
        )  # fmt: skip
        self._title, self._rounds = title, rounds
        self._task = self._progress.add_task(title, total=rounds, loss="")
        # to be called with what is done before the first round
        self.phase = _Phases(self._progress, title)

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, done: int, part: Any) -> None:
        """Show the state after `done` rounds, or epochs: `part` is a `ModelPart`, None, or epochs' losses by set."""
        loss, of_epochs = "", isinstance(part, dict)
        if of_epochs:
            shown = {"loss" if name == "train" else f"{name} loss": of for name, of in part.items() if of}
            loss = "  ".join(f"{name} {of[-1]:.5f}" for name, of in shown.items())
        elif part is not None and part.forest is not None:
            loss = "  ".join(
                f"{name} {metric} {values[-1]:.5f}"
                for name, of in part.forest.history.items()
                for metric, values in of.items()
                if values
            )
        self._progress.update(self._task, completed=done, loss=loss)
        unit = "epochs" if of_epochs else "rounds"
        logger.info("%s: %d of %d %s%s", self._title, done, self._rounds, unit, loss and f", {loss}")


class TrainingClock(Observer):
    """Times the phases of a training, from the moment the clock is made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None

    def round_finished(self, rounds: int, state: Any) -> None:
        """Note the end of set-up: the first call comes when boosting, or the first epoch, begins."""
        if self._first is None:
            self._first = time.perf_counter()

    def seconds(self, training: str, before: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of each phase: those `before` set-up, set-up, and `training`, the name of the last."""
        ended = time.perf_counter()
        first = self._first or ended
        return {**before, "setup": first - self._started - sum(before.values()), training: ended - first}


# ----------------------------------------------------------------
# Output files: check that they can be written, and commit them at all parties or at none.
#
# What a training leaves is staged under other names until all have theirs, and replaces nothing: what an earlier
# training left is kept under its date.

LAST_ROUND = 1 << 40
"""The round of the two messages below: after those of any training."""


class PartKept(Message):
    """The sender has written its part of the model and its report."""

    leakage: ClassVar = MessageLeakage("that the sender has written its part of the model", "control")


class AllKept(Message):
    """Everybody with a part of the model has written it."""

    leakage: ClassVar = MessageLeakage("that everybody has written theirs", "control")


def output_folders(job: Job, name: str) -> list[Path]:
    """Return the folders that a party's training writes to, as far as the job names them.

    A table's own folder, where what serves later jobs is kept by default, need not be writable: few systems use it.
    """
    member = job.parties[name]
    named = [job.output, job.checkpoints, job.store if member.table else None, member.keep_for_audit, member.record]
    named.append(None if job.align is None else job.align.log)
    named.append(None if member.noisy_labels is None else str(Path(member.noisy_labels).parent))
    return [Path(folder) for folder in dict.fromkeys(named) if folder]


def check_writable(folders: Iterable[Path]) -> None:
    """Make folders that do not exist, and try to write in all.

    Raises
    ------
    ConfigError
        It names the folder; other parties only learn that files cannot be written.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".treaty-") as trial:
                trial.write(bytes(1 << 12))
                trial.flush()
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"cannot write in {folder}: a file has that name, or that of a folder above; move it, or name "
                "another folder",
                public="its files cannot be written; it has the details",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot write in {folder}: {error.strerror}; make room, change its permissions or name another folder",
                public="its files cannot be written; it has the details",
            ) from None


def wait_until_all_kept(
    party: Party,
    roles: Roles,
    owners: list[str],
    may_lose: Iterable[str],
    patience: float | None = None,
    *,
    keep: Callable[[], None],
) -> None:
    """Return once every party with a part of the model has written it; call it when this one has written its own.

    `keep` puts this party's part in its place. The active party waits for all, keeps its own, and then notifies all: no
    party is notified of a model that the active party may yet lose. Edge servers notify their users. One that could not
    write its part has stopped the job instead, as it does for any error, and so all end with that error. Only a
    connection lost between the two messages can still leave a party in doubt: it ends with an error although all have
    their parts.

    Parameters
    ----------
    owners : list of str
        The parties with a part, or with files that are kept until then.
    may_lose : iterable of str
        Those that the active party does not insist on.
    patience : float or None
        Seconds that a user of an edge server has to take the message.
    """
    if party.name not in owners:
        keep()
        return
    party.round = LAST_ROUND
    if party.name in roles.edges:
        party.receive(roles.edges[party.name], AllKept)
        keep()
        return
    if party.name != roles.active:
        party.send(roles.active, PartKept())
        party.receive(roles.active, AllKept)
        keep()
        users = [user for user in party.peers if roles.edges.get(user) == party.name]
        party.send_each({user: AllKept() for user in users if user in owners}, timeout=patience)
        return
    others = [peer for peer in owners if peer in party.peers]
    expendable = set(may_lose)
    for peer in others:
        if peer not in expendable:
            party.receive(peer, PartKept)
    optional = [peer for peer in others if peer in expendable]
    reached = party.gather(optional, PartKept) if optional else {}
    keep()
    party.send_each({peer: AllKept() for peer in others if peer in reached or peer not in expendable})


def staged_file(path: Path) -> Path:
    """Return where a file of a finished training is until all parties have theirs."""
    return path.with_suffix(".staged" if path.suffix == ".part" else f".staged{path.suffix}")


def put_in_place(name: str, files: Iterable[Path]) -> None:
    """Give a party's staged files their names; those of an earlier training get the date it ended in theirs.

    `bank.part` becomes `bank.2026-11-23T210538Z.part`, and so do its other files.
    """
    files = list(files)
    staged = [path for path in files if staged_file(path).exists()]
    earlier = [path for path in files if path.exists()] if staged else []
    if earlier:
        ended = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime(earlier[0].stat().st_mtime))
        kept = [path.with_name(f"{name}.{ended}{path.name.removeprefix(name)}") for path in earlier]
        for path, dated in zip(earlier, kept, strict=True):
            _keep(path, dated, moved=path not in staged)
        logger.warning("%s: an earlier training's files are kept: %s", name, ", ".join(map(str, kept)))
    for path in staged:
        staged_file(path).replace(path)


def _keep(path: Path, dated: Path, *, moved: bool) -> None:
    """Give a file a second name, so that one that is to be replaced is there at any moment; or another name."""
    try:
        if moved or dated.exists():
            path.replace(dated)
        else:
            os.link(path, dated)
    except OSError:  # a file system without links
        path.replace(dated)
