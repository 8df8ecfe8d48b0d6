"""Progress of long work: bars on a terminal, and lines for a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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

if TYPE_CHECKING:
    from treaty.systems.system import Phase

logger = logging.getLogger(__name__)

# minimum seconds between two log lines about one phase
LINES_APART = 10.0


class _Phases:
    """A bar for the current phase, and log lines when a phase begins and ends, and at intervals between."""

    def __init__(self, bar: Progress, whose: str) -> None:
        self._bar, self._whose = bar, whose
        self._task: TaskID | None = None
        self._shown = ""
        # by phase: when the next line is due
        self._next: dict[str, float] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show how many steps of a phase are done."""
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
    """Yield a function to call with a phase, its finished steps and all its steps; `whose` work it is, for the log."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with _progress(*columns, TimeRemainingColumn(), shown=shown) as bar:
        yield _Phases(bar, whose)


@contextmanager
def steps_bar(title: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the finished steps and all steps; the bar appears at the first call."""
    with phases_bar("treaty", shown=shown) as phase:
        yield partial(phase, title)


def _progress(*columns: ProgressColumn, shown: bool) -> Progress:
    console = Console(stderr=True)
    # rich before 14.3 prints an empty line at the end of a disabled bar
    console.quiet = not (shown and console.is_terminal)
    return Progress(*columns, console=console, disable=console.quiet, transient=True)


class TrainingBar:
    """Context manager that shows finished rounds, time left and eval sets' losses, and logs a line for each round.

    Call it as a `Progress`: with the number of finished rounds, and the part so far if there is one. The bar is on
    standard error, and only on a terminal.
    """

    def __init__(self, title: str, rounds: int, *, shown: bool = True) -> None:
        self._progress = _progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), shown=shown,
        )  # fmt: skip
        self._title, self._rounds = title, rounds
        self._task = self._progress.add_task(title, total=rounds, loss="")
        # for what is done before the first round
        self.phase = _Phases(self._progress, title)

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
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
