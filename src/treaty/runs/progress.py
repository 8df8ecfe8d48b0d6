"""Progress of long work: bars, which are silent when the output is not a terminal, and lines for a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:  # commands show bars before they import what trains
    from treaty.systems.system import Phase

logger = logging.getLogger(__name__)

LINES_APART = 10.0  # seconds, at least, between two lines of the log about the steps of one phase


class _Phases:
    """A bar of the phase under way, and log lines when one begins and ends and now and then between."""

    def __init__(self, bar: Progress, whose: str) -> None:
        self._bar, self._whose = bar, whose
        self._task: TaskID | None = None
        self._shown = ""
        self._next: dict[str, float] = {}  # by phase: when the next line is due

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
    console.quiet = not (shown and console.is_terminal)  # rich before 14.3 ends a bar that is disabled by an empty line
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
        self.phase = _Phases(self._progress, title)  # to be called with what is done before the first round

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
