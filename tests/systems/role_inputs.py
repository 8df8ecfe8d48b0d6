"""Inputs of role programs, as runners make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from treaty.messaging.party import Party
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.observers import CheckpointWriter, Observers, ProgressCalls
from treaty.systems.options import SystemOptions, names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import RoleInput, Roles


def inputs(
    party: Party,
    options: SystemOptions,
    common: Mapping[str, Any] | BoostingOptions | None = None,
    *,
    active: str,
    owners: Sequence[str],
    roles: Mapping[str, str] | None = None,
    **fields: Any,
) -> RoleInput:
    """Return a party's inputs; without `roles`, owners are active or passive. `fields` are the role's own.

    Among them may be `numbers` and `digest` of its rows.
    """
    if of_rows := {name: fields.pop(name) for name in ("numbers", "digest") if name in fields}:
        fields["data"] = replace(fields["data"], **of_rows)
    if not isinstance(common, BoostingOptions):
        common = BoostingOptions(**(common or {}))
    # of the others, tests settle what they are about
    options = options.settled(common) if isinstance(options, FederBoostVertical) else options
    given = {name: "active" if name == active else "passive" for name in owners} if roles is None else dict(roles)
    roles = Roles(active, given, list(owners))
    fields.setdefault("observers", Observers([ProgressCalls(fields.pop("progress", None), fields.pop("phase", None))]))
    if fields.get("keeper") is not None:
        fields["observers"].add(CheckpointWriter(fields["keeper"]))
    return RoleInput(party=party, options=options, common=common.checked(options), roles=roles, **fields)


def split_options(given: Mapping[str, Any], kind: type[SystemOptions]) -> tuple[Any, dict[str, Any]]:
    """Split options by name into a system's own, and the others: common ones, or an estimator's."""
    own = {name: value for name, value in given.items() if name in names_of(kind)}
    return kind(**own), {name: value for name, value in given.items() if name not in own}
