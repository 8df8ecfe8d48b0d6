"""How many of its ids a party shares with all others, said to that party alone, which learns it from the alignment."""

from __future__ import annotations

import logging
from collections.abc import Callable

from treaty.systems.alignment.roles import CAUSES, Alignment

FEWEST = 0.1
"""The share of a party's ids below which it is warned that few are common."""

logger = logging.getLogger(__name__)


def tell_shared(
    name: str, aligned: Alignment, warn: Callable[[str], None], note: Callable[[str], None] = logger.info
) -> None:
    """Note how many of a party's ids all hold, or warn of it where these are few; nothing where it does not learn."""
    common, own = aligned.n_common, aligned.n_ids
    if common is None:
        return
    without = f"; {aligned.n_null} rows without an id" if aligned.n_null else ""
    said = f"{name}: {common} of its {own} ids are common to all parties ({common / own:.1%}){without}"
    if common < FEWEST * own:
        warn(f"{said}. Where that is not expected, {CAUSES}")
    else:
        note(said)
