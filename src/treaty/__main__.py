"""``python -m treaty``: the command line."""

import atexit
import os
import sys

ended_well: list[bool] = []


def leave() -> None:
    """End the process where all went well: threads of connections may be amid a call that outlives no interpreter."""
    if ended_well:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    # before all others are, so that it runs after them
    atexit.register(leave)
    from treaty.cli.main import main

    try:
        main()
    except SystemExit as ended:
        ended_well += [True] if ended.code in (None, 0) else []
        raise
