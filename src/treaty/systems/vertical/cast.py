"""Roles in systems split by column: the active party has the labels, all others with rows are passive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treaty.errors import ConfigError
from treaty.systems.options import SystemOptions
from treaty.systems.system import Cast, Place


def cast_by_column(
    places: Mapping[str, Place], active: str, options: SystemOptions, *, helper: str | None = None
) -> Cast:
    """Give every party its role; a `helper` without rows keeps the role that the job names for it.

    Raises ConfigError where the job names a role or edge server for any other party, where fewer than two parties have
    rows, and where a party other than the helper has none.
    """
    owners = [name for name in places if name != helper]
    wishing = [name for name in owners if places[name].role or places[name].edge]
    missing = [name for name in owners if not places[name].has_rows]
    if wishing:
        raise ConfigError(
            f"expected no role and edge with protocol {options.system!r}, got them at {', '.join(wishing)}"
        )
    if active not in owners:
        raise ConfigError(f"expected active to be one of {', '.join(owners)}, got {active!r}")
    if len(owners) < 2:
        raise ConfigError(
            f"expected at least two parties with rows, got {', '.join(owners)}: one party's table is trained on under "
            "protocol 'pooled'"
        )
    if missing:
        raise ConfigError(f"expected rows at every party, got none at {', '.join(missing)}: name their tables")
    roles = {name: "active" if name == active else "passive" for name in owners}
    return Cast(active, {name: roles.get(name) or str(places[name].role) for name in places}, owners)


def fellow_owners(cast: Cast, options: Any, name: str) -> list[str]:
    """Return the passive parties of sealed sums, to each of them: their keys pass through the active party's hands."""
    passive = [owner for owner in cast.owners if owner != cast.active]
    return passive if options.ciphers.sealed and name in passive and len(passive) > 1 else []
