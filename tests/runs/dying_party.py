"""A party of a job that gets a signal as it is to send a message: ``dying_party.py KIND NTH AFTER SIGNAL train JOB``.

To kill it from outside once so many rounds are kept is a race with a training that may be over by then.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from treaty.cli.main import main
from treaty.messaging.party import Party


def die_at(kind: str, nth: int, after: str, by: int) -> None:
    """Have this process killed, or stopped, at its n-th message of a kind, counted from its first one of `after`."""
    send, left, begun = Party.send, [nth], [not after]

    def counted(party: Party, to: str, message: Any) -> None:
        said = type(message).__name__
        if begun[0] and (said == kind or not kind):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), by)
        begun[0] = begun[0] or said == after
        send(party, to, message)

    Party.send = counted  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    _, kind, nth, after, by, *arguments = sys.argv
    sys.argv[1:] = arguments
    die_at(kind, int(nth), after, int(by))
    main()
