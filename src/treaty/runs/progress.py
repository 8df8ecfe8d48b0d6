"""Progress bars for long work; silent when the output is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

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

from treaty.models.trees import ModelPart


@contextmanager
def steps_bar(title: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with steps done and steps in all; the bar appears with its first call."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with _progress(*columns, TimeRemainingColumn(), shown=shown) as bar:
        tasks: list[TaskID] = []

        def step(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.add_task(title, total=total))
            bar.update(tasks[0], completed=done, total=total)

        yield step


def _progress(*columns: ProgressColumn, shown: bool) -> Progress:
    console = Console(stderr=True)
    console.quiet = not (shown and console.is_terminal)  # rich before 14.3 ends a bar that is disabled by an empty line
    return Progress(*columns, console=console, disable=console.quiet, transient=True)


class TrainingBar:
    """Context manager showing rounds done, time left and the last eval set's loss on standard error.

    Call it with the number of finished rounds and the part so far, as roles do with their `progress` argument.
    """

    def __init__(self, title: str, rounds: int, *, shown: bool = True) -> None:
        self._progress = _progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), shown=shown,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=rounds, loss="")
        self._phases: dict[str, TaskID] = {}

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, done: int, part: Any) -> None:
        """Show the state after `done` rounds, or epochs: `part` is a model part, or the list of all epochs' losses."""
        loss = ""
        if not isinstance(part, ModelPart):
            loss = f"loss {part[-1]:.5f}" if part else ""
        elif part.forest is not None:
            loss = "  ".join(
                f"{name} {part.forest.objective.metric} {losses[-1]:.5f}"
                for name, losses in part.forest.history.items()
                if losses
            )
        self._progress.update(self._task, completed=done, loss=loss)

    def phase(self, title: str, done: int, total: int) -> None:
        """Show what is done before the first round, in steps."""
        if title not in self._phases:
            self._phases[title] = self._progress.add_task(title, total=total, loss="")
        self._progress.update(self._phases[title], completed=done, total=total)
