"""A progress bar for long work; silent when the output is not a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from treaty.models import ModelPart


class TrainingBar:
    """Context manager showing rounds done, time left and the last eval set's loss on standard error.

    Call it with the number of finished rounds and the part so far, as roles do with their `progress` argument.
    """

    def __init__(self, title: str, rounds: int, *, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(), TimeRemainingColumn(),
            console=Console(stderr=True), disable=not (shown and Console(stderr=True).is_terminal), transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=rounds, loss="")

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, done: int, part: ModelPart) -> None:
        """Show the state after `done` rounds."""
        loss = ""
        if part.forest is not None:
            loss = "  ".join(
                f"{name} {part.forest.objective.metric} {losses[-1]:.5f}"
                for name, losses in part.forest.history.items()
                if losses
            )
        self._progress.update(self._task, completed=done, loss=loss)
