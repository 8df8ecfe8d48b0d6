"""Seats for role programs, with options checked as a runner checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treaty.messaging.party import Party
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast, Seat


def seat(
    party: Party,
    options: SystemOptions,
    common: Mapping[str, Any] | None = None,
    *,
    active: str,
    owners: Sequence[str],
    roles: Mapping[str, str] | None = None,
    **fields: Any,
) -> Seat:
    """Seat a party; `roles` are those of parties without rows, and of others than active and passive ones."""
    checked = BoostingOptions(**(common or {})).checked(options)
    options.check(checked)
    given = {name: "active" if name == active else "passive" for name in owners} | dict(roles or {})
    cast = Cast(active, given, list(owners))
    return Seat(party=party, options=options, common=checked, cast=cast, **fields)


def split_options(given: Mapping[str, Any], kind: type[SystemOptions]) -> tuple[SystemOptions, dict[str, Any]]:
    """Split options by name into a system's own and the common ones."""
    common = {name: value for name, value in given.items() if name in BoostingOptions.__struct_fields__}
    return kind(**{name: value for name, value in given.items() if name not in common}), common
