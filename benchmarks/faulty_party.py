"""A party of a job that has a fault at one of its messages: ``faulty_party.py MOMENT FAULT NOTES train JOB --as NAME``.

MOMENT is the number of the message, from 1; 0 counts messages and leaves their number in the file NOTES. Faults:

- a signal's name: this process gets it; SIGSTOP is followed by SIGCONT from outside,
- ``tell``: the file NOTES is written, upon which the benchmark does something to the network,
- ``full``: from here on no file of this process may grow beyond what it has, as on a full disk.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treaty.cli.main import main
from treaty.messaging.party import Party


def at_message(moment: int, act: Callable[[], None]) -> list[int]:
    """Call `act` before this process sends its message of that number; returned is the running count."""
    send, count = Party.send, [0]

    def counted(party: Party, to: str, message: Any) -> None:
        count[0] += 1
        if count[0] == moment:
            act()
        send(party, to, message)

    Party.send = counted  # type: ignore[method-assign, assignment]
    return count


def fill_the_disk() -> None:
    """Have every later write of this process to a file fail, as on a full disk (its error stream is a pipe)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def run() -> None:
    _, moment, fault, notes, *arguments = sys.argv
    sys.argv[1:] = arguments
    if fault == "tell":
        count = at_message(int(moment), lambda: Path(notes).touch())
    elif fault == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # here, for only the main thread may
        count = at_message(int(moment), fill_the_disk)
    elif fault == "none":
        count = at_message(0, lambda: None)
        atexit.register(lambda: Path(notes).write_text(str(count[0])))
    else:
        count = at_message(int(moment), lambda: os.kill(os.getpid(), signal.Signals[fault]))
    main()


if __name__ == "__main__":
    run()
