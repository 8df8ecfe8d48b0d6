"""What a command says while it works: lines with their time, on standard error (`-v`) and in a file (`--log-file`)."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from treaty.errors import ConfigError

Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Say what is done on standard error, in lines with their time (UTC).")
]
LogFile = Annotated[Path | None, typer.Option("--log-file", help="Add the same lines to this file.")]

_NEVER = logging.CRITICAL + 1
_FOLLOWED_EVERY = 0.2  # seconds


@contextmanager
def logged(verbose: bool, file: Path | None) -> Iterator[None]:
    """Write what is done as lines with their time; an error that ends the command is in the file, too.

    Raises ConfigError where the file cannot be written.
    """
    if not verbose and file is None:
        yield
        return
    timed = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    timed.converter = time.gmtime
    shown = logging.StreamHandler()
    shown.setLevel(logging.INFO if verbose else logging.WARNING)
    if verbose:
        shown.setFormatter(timed)
    kept = None if file is None else _opened(file)
    package = logging.getLogger("treaty")
    package.setLevel(logging.INFO)
    handlers = [handler for handler in (shown, kept) if handler is not None]
    for handler in handlers:
        package.addHandler(handler)
    if kept is not None:
        kept.setFormatter(timed)
    try:
        yield
    except BaseException as error:
        if kept is not None and not isinstance(error, (SystemExit, typer.Exit)):
            kept.handle(logging.makeLogRecord({"msg": f"ended: {error or type(error).__name__}"}))
        raise
    finally:
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()


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
def log_of_all(verbose: bool, file: Path | None) -> Iterator[list[str]]:
    """Yield the arguments by which parties' processes write one log, whose lines are shown here with `verbose`."""
    with ExitStack() as held:
        if verbose and file is None:
            file = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="treaty-"))) / "log"
        if file is None:
            yield []
            return
        _opened(file).close()
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
