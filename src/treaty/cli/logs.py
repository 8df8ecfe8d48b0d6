"""What a command prints and logs: results on standard output, progress (`-v`) on standard error and in `--log-file`."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treaty.errors import NOTED, ConfigError, TreatyError
from treaty.machine.process import trust

Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Log each step on standard error, with its time (UTC).")]
LogFile = Annotated[Path | None, typer.Option("--log-file", help="Append the same lines to this file.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        callback=lambda names: trust(names or ()), metavar="MODULE:NAME",
        help="A custom system or loss that the file may name; may be repeated.",
    ),
]  # fmt: skip
NodeFile = Annotated[Path, typer.Option("--node", envvar="TREATY_NODE", help="The node's settings.")]
NODE_FILE = Path("node.toml")

# marks a log record that the command prints itself, so that the terminal does not show it twice
PRINTED = {"printed": True}
# what happened, by the exit code after SIGHUP, SIGINT and SIGTERM
BY_SIGNAL = {129: "terminated", 130: "interrupted", 143: "terminated"}

# level of a handler that takes no record
_NEVER = logging.CRITICAL + 1
# seconds between two looks at a log that is followed
_FOLLOW_INTERVAL = 0.2

console = Console(markup=False)


def say(text: str) -> None:
    """Print a line as it is: no wrapping, no colours."""
    console.print(text, soft_wrap=True, highlight=False)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"treaty: {text}", file=sys.stderr)


def say_learned(learned: Mapping[str, Sequence[str]]) -> None:
    """Print what each party, or role, learns: one sentence a line."""
    say("What each party learns:")
    for who, sentences in learned.items():
        for sentence in sentences:
            say(f"  {who}: {sentence}")


class Ended(SystemExit):
    """A signal has ended the command, whose last line is `message`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code)
        self.message = message


def last_line(error: BaseException) -> str:
    """Return the line that a command prints when an error ends it."""
    if isinstance(error, Ended):
        return f"treaty: {error.message}"
    if isinstance(error, TreatyError):
        return f"treaty: {error}"
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"treaty: a file or the system failed: {error.strerror or error}{where}"
    return f"{type(error).__name__}: {error}"


@contextmanager
def logged(
    verbose: bool, file: Path | None, party: str = "", resume_hint: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Log the steps of a command with their times; if an error ends it, the file has its last line, too.

    `resume_hint` returns how to resume after a signal, "" if the training cannot be resumed. Without `verbose`, the
    terminal shows warnings, and records of level `NOTED` as plain text. Raises ConfigError if the file cannot be
    written.
    """
    shown, kept = _shown(logging.INFO if verbose else logging.WARNING), None if file is None else _opened(file)
    if verbose:
        shown.setFormatter(_timed())
    handlers = [shown, None if verbose else _Noted(NOTED), kept]
    with _handled_by(handler for handler in handlers if handler is not None), _log_end(kept, party, resume_hint):
        yield


@contextmanager
def _handled_by(handlers: Iterable[logging.Handler]) -> Iterator[None]:
    """Give handlers the records of Treaty alone, as libraries log on their own; close them at the end."""
    package = logging.getLogger("treaty")
    package.setLevel(logging.INFO)
    with ExitStack() as held:
        for handler in handlers:
            package.addHandler(handler)
            held.callback(handler.close)
            held.callback(package.removeHandler, handler)
        yield


@contextmanager
def _log_end(kept: logging.Handler | None, party: str, resume_hint: Callable[[], str]) -> Iterator[None]:
    """Log the error that ends a command; after a signal, raise `Ended` with the hint how to resume."""
    try:
        yield
    except BaseException as error:
        ended: BaseException = error
        code = 130 if isinstance(error, KeyboardInterrupt) else error.code if isinstance(error, SystemExit) else None
        if code in BY_SIGNAL and not isinstance(error, Ended):
            ended = Ended(int(code), f"{BY_SIGNAL[int(code)]}{f' at {party}' if party else ''}{resume_hint()}")
        if kept is not None and not isinstance(ended, typer.Exit):
            kept.handle(logging.makeLogRecord({"msg": last_line(ended)}))
        if ended is error:
            raise
        raise ended from None


def _shown(level: int) -> logging.Handler:
    """Make a handler that writes records from `level` on to standard error, but for those printed already."""
    shown = logging.StreamHandler()
    shown.setLevel(level)
    shown.addFilter(lambda record: not hasattr(record, "printed"))
    return shown


class _Noted(logging.Handler):
    """Prints records of the level `NOTED` above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == NOTED:
            Console().print(record.getMessage(), soft_wrap=True, highlight=False, markup=False)


def _timed() -> logging.Formatter:
    timed = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    timed.converter = time.gmtime
    return timed


class _LogFile(logging.FileHandler):
    """A log file that is given up, with one warning, if it cannot be written any more: the job continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        if self.level < _NEVER:
            self.setLevel(_NEVER)
            error = sys.exc_info()[1]
            warn(f"cannot write the log {self.baseFilename} any more: {error}")

    def close(self) -> None:
        # lines that could not be written are lost
        with suppress(OSError):
            super().close()


def _opened(file: Path) -> logging.Handler:
    try:
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # of an existing file, too: errors may show cells of a table
        os.fchmod(handle, 0o600)
        os.close(handle)
        kept = _LogFile(file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the log {file}: {error.strerror}") from None
    kept.setFormatter(_timed())
    return kept


@contextmanager
def log_of_all(verbose: bool, file: Path | None, resume_hint: Callable[[], str] = lambda: "") -> Iterator[list[str]]:
    """Yield the arguments that make all parties' processes write one log; with `verbose`, it is shown here.

    The command's own last line comes last. `resume_hint` as in `logged`.
    """
    with ExitStack() as held:
        held.enter_context(_handled_by((_shown(logging.WARNING), _Noted(NOTED))))
        if verbose and file is None:
            file = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="treaty-"))) / "log"
        kept = None if file is None else _opened(file)
        if kept is not None:
            held.callback(kept.close)
        held.enter_context(_log_end(kept, "", resume_hint))
        if file is None:
            yield []
            return
        # the processes append to the file; this one shows what they append
        if verbose:
            log = held.enter_context(file.open(encoding="utf-8"))
            log.seek(0, os.SEEK_END)
            ended = threading.Event()

            def follow() -> None:
                last = False
                while not last:
                    last = ended.wait(_FOLLOW_INTERVAL)
                    sys.stderr.write(log.read())

            following = threading.Thread(target=follow, name="treaty-log", daemon=True)
            following.start()
            held.callback(following.join)
            held.callback(ended.set)
        yield ["--log-file", str(file.resolve())]
