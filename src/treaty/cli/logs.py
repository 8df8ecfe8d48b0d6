"""What a command says while it works: lines with their time, on standard error (`-v`) and in a file (`--log-file`)."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treaty.errors import NOTED, ConfigError, TreatyError
from treaty.machine.process import trust

Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Say what is done on standard error, in lines with their time (UTC).")
]
LogFile = Annotated[Path | None, typer.Option("--log-file", help="Add the same lines to this file.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        callback=lambda names: trust(names or ()), metavar="MODULE:NAME",
        help="Code of a system or a loss that the file may name; may be given several times.",
    ),
]  # fmt: skip

_NEVER = logging.CRITICAL + 1
_FOLLOWED_EVERY = 0.2  # seconds


PRINTED = {"printed": True}
"""Marks a line of the log that the command prints by itself: the terminal does not get it twice."""

BY_SIGNAL = {129: "told to end", 130: "interrupted", 143: "told to end"}  # exit codes after SIGHUP, SIGINT and SIGTERM


class Ended(SystemExit):
    """A signal has ended the command; `said` is its last line."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(code)
        self.said = said


def last_line(error: BaseException) -> str:
    """Return what a command says last when an error ends it."""
    if isinstance(error, Ended):
        return f"treaty: {error.said}"
    if isinstance(error, TreatyError):
        return f"treaty: {error}"
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"treaty: a file or the system failed: {error.strerror or error}{where}"
    return f"{type(error).__name__}: {error}"


@contextmanager
def logged(
    verbose: bool, file: Path | None, party: str = "", to_go_on: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Write what is done as lines with their time; the last line of a command that fails is in the file, too.

    `to_go_on` says how a party that a signal has ended goes on later, "" where it does not.
    Without `verbose` what is `NOTED` is printed as it is. Raises ConfigError where the file cannot be written.
    """
    timed = _timed()
    shown = logging.StreamHandler()
    shown.setLevel(logging.INFO if verbose else logging.WARNING)
    shown.addFilter(lambda record: not hasattr(record, "printed"))
    if verbose:
        shown.setFormatter(timed)
    kept = None if file is None else _opened(file)
    noted = None if verbose else _Noted(NOTED)
    package = logging.getLogger("treaty")
    package.setLevel(logging.INFO)
    handlers = [handler for handler in (shown, noted, kept) if handler is not None]
    for handler in handlers:
        package.addHandler(handler)
    if kept is not None:
        kept.setFormatter(timed)
    try:
        with _ending(kept, party, to_go_on):
            yield
    finally:
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()


@contextmanager
def _ending(kept: logging.Handler | None, party: str, to_go_on: Callable[[], str]) -> Iterator[None]:
    """Have an error that ends a command say so in its log, too; a signal's with how to go on."""
    try:
        yield
    except BaseException as error:
        ended = _by_signal(error, party, to_go_on)
        if kept is not None and not isinstance(ended, typer.Exit):
            kept.handle(logging.makeLogRecord({"msg": last_line(ended)}))
        if ended is error:
            raise
        raise ended from None


def _by_signal(error: BaseException, party: str, to_go_on: Callable[[], str]) -> BaseException:
    """Return an error, or in place of that which a signal has raised one that says how to go on."""
    code = 130 if isinstance(error, KeyboardInterrupt) else error.code if isinstance(error, SystemExit) else None
    if isinstance(error, Ended) or code not in BY_SIGNAL:
        return error
    return Ended(int(code), f"{BY_SIGNAL[int(code)]}{f' at {party}' if party else ''}{to_go_on()}")


class _Noted(logging.Handler):
    """Prints what is of the level `NOTED`, beside the bars of progress."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record's message."""
        if record.levelno == NOTED:
            Console().print(record.getMessage(), soft_wrap=True, highlight=False, markup=False)


def _timed() -> logging.Formatter:
    timed = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    timed.converter = time.gmtime
    return timed


class _LogFile(logging.FileHandler):
    """A log that is given up, and said to be, when it cannot be written: the job goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say on standard error why nothing more is written; called while the error is handled."""
        if self.level < _NEVER:
            self.setLevel(_NEVER)
            error = sys.exc_info()[1]
            print(f"treaty: cannot write the log {self.baseFilename} any more: {error}", file=sys.stderr)

    def close(self) -> None:
        """Close the file; what could not be written is lost."""
        with suppress(OSError):
            super().close()


def _opened(file: Path) -> logging.Handler:
    try:
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.fchmod(handle, 0o600)  # also of a file that was there: errors may show cells of a table
        os.close(handle)
        return _LogFile(file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the log {file}: {error.strerror}") from None


@contextmanager
def log_of_all(verbose: bool, file: Path | None, to_go_on: Callable[[], str] = lambda: "") -> Iterator[list[str]]:
    """Yield the arguments by which parties' processes write one log, whose lines are shown here with `verbose`.

    The command's own last line comes last; `to_go_on` as of `logged`.
    """
    noted, package = _Noted(NOTED), logging.getLogger("treaty")
    package.setLevel(logging.INFO)
    package.addHandler(noted)
    with ExitStack() as held:
        held.callback(package.removeHandler, noted)
        if verbose and file is None:
            file = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="treaty-"))) / "log"
        kept = None if file is None else _opened(file)
        if kept is not None:
            kept.setFormatter(_timed())
            held.callback(kept.close)
        held.enter_context(_ending(kept, "", to_go_on))
        if file is None:
            yield []
            return
        if verbose:
            log = held.enter_context(file.open(encoding="utf-8"))
            log.seek(0, os.SEEK_END)
            ended = threading.Event()

            def follow() -> None:
                last = False
                while not last:
                    last = ended.wait(_FOLLOWED_EVERY)
                    sys.stderr.write(log.read())

            following = threading.Thread(target=follow, name="treaty-log", daemon=True)
            following.start()
            held.callback(following.join)
            held.callback(ended.set)
        yield ["--log-file", str(file.resolve())]
