"""Roles in systems split by column: the active party has the labels, all others with rows are passive."""

from __future__ import annotations

from collections.abc import Mapping

from treaty.errors import ConfigError
from treaty.systems.options import SystemOptions
from treaty.systems.system import Cast, Place


def cast_by_column(places: Mapping[str, Place], active: str, options: SystemOptions) -> Cast:
    """Give every party its role, where a system has no other roles than "active" and "passive"."""
    named = [name for name, place in places.items() if place.role or place.edge]
    if named:
        raise ConfigError(f"protocol {options.system!r} has no role or edge to choose, got them at {', '.join(named)}")
    return cast_with_helper(places, active, None)


def cast_with_helper(places: Mapping[str, Place], active: str, helper: str | None) -> Cast:
    """Give every party its role, where a `helper` without rows keeps the one it wishes for."""
    owners = [name for name in places if name != helper]
    missing = [name for name in owners if not places[name].has_rows]
    if active not in owners:
        raise ConfigError(f"expected active to be one of {', '.join(owners)}, got {active!r}")
    if missing:
        raise ConfigError(f"expected rows at every party, got none of {', '.join(missing)}: add a table")
    if len(owners) < 2:
        raise ConfigError(f"expected at least two parties with rows, got {', '.join(owners)}")
    roles = {name: "active" if name == active else "passive" for name in owners}
    return Cast(active, {name: roles.get(name) or str(places[name].role) for name in places}, owners)
