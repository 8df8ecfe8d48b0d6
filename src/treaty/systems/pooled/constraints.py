"""The options `monotone_constraints` and `interaction_constraints`: which columns they name.

On one table, or where parties hold rows, columns go by name or position. Between owners of columns every party states
directions of its own columns alone, and groups name columns of all parties as "party.column".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from treaty.data.table import Schema
from treaty.errors import ConfigError
from treaty.machine.arrays import Flags
from treaty.trees.constraints import Constraints, Directions

if TYPE_CHECKING:
    from treaty.systems.pooled.options import BoostingOptions

MONOTONE, INTERACTION = "monotone_constraints", "interaction_constraints"


def checked_constraints(common: BoostingOptions) -> BoostingOptions:
    """Return options with constraints in one form, None for none; ConfigError for directions and groups that are none.

    Directions by name are sorted, so that two parties' files may have them in any order.
    """
    given, groups = common.monotone_constraints, common.interaction_constraints
    each = list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else []
    wrong = [direction for direction in each if direction not in (-1, 0, 1)]
    if wrong:
        raise ConfigError(f"{MONOTONE}: expected -1 (falling), 0 (free) or 1 (rising) of each column, got {wrong[0]}")
    if given is True or any(each):
        loss = common.loss_class
        if loss.refreshes_leaves:
            raise ConfigError(
                f"{MONOTONE} bounds leaf values as gradients give them, and objective={common.objective!r} takes them "
                'from residuals: use objective="huber" or "squared_error", or leave the constraints out'
            )
    else:
        given = None
    if any(not group for group in groups or []):
        raise ConfigError(f"{INTERACTION}: expected columns in every group, got an empty group: leave it out")
    return msgspec.structs.replace(
        common,
        monotone_constraints=dict(sorted(given.items())) if isinstance(given, dict) else given,
        interaction_constraints=groups or None,
    )


def refuse_constraints(common: Any, why: str, names: Sequence[str] = (MONOTONE, INTERACTION)) -> None:
    """Refuse constraints in a system that cannot have them; `why` says so, and what to do instead."""
    for name in names:
        if getattr(common, name):
            raise ConfigError(f"{name}: {why}, or leave {name} out")


def constraints_of(common: BoostingOptions, schema: Schema) -> Constraints | None:
    """Return the constraints on the columns of one table, by names or positions; None if there are none."""
    names, given = list(schema.names), common.monotone_constraints
    if given is True:
        raise ConfigError(f"{MONOTONE}=True is for parties that hold columns: name the columns and their directions")
    if isinstance(given, list):
        _check_length(given, len(names))
        given = dict(zip(names, given, strict=True))
    directions = _directions(given or {}, schema, "")
    groups = np.zeros((len(common.interaction_constraints or ()), len(names)), np.bool_)
    for group, columns in zip(groups, common.interaction_constraints or (), strict=True):
        group[[_position(column, names, INTERACTION) for column in columns]] = True
    return Constraints.over([(directions, groups)])


def own_constraints(
    common: BoostingOptions, given: Mapping[str, int], schema: Schema, party: str, owners: Sequence[str]
) -> tuple[Directions, Flags]:
    """Return what is asked of the columns of one of their `owners`: directions (n,) and groups, bool (n_groups, n).

    `given` are the directions that the party states of its own columns. A name "party.column" belongs to the owner with
    the longest name that fits.
    """
    directions, names = _directions(given, schema, f"{party}: "), list(schema.names)
    groups = np.zeros((len(common.interaction_constraints or ()), len(names)), np.bool_)
    for group, columns in zip(groups, common.interaction_constraints or (), strict=True):
        for column in columns:
            owner = max((of for of in owners if str(column).startswith(f"{of}.")), key=len, default=None)
            if owner is None:
                raise ConfigError(
                    f"{INTERACTION} names {column!r}: expected party.column, with one of the parties "
                    f"{', '.join(owners)}"
                )
            if owner == party:
                group[_position(str(column)[len(party) + 1 :], names, f"{party}: {INTERACTION}")] = True
    return directions, groups


def by_owner(
    common: BoostingOptions, schemas: Mapping[str, Schema], positions: Mapping[str, Sequence[int]], n_columns: int
) -> tuple[BoostingOptions, dict[str, dict[str, int]]]:
    """Return options that name columns as the joined table does, and the directions of each owner's columns by name.

    Columns are given by position among `n_columns`, as "party.column", or by their own name where one party alone has
    it. `positions` are those of each owner's columns in a table that was cut; empty where tables are one after another.
    """
    if common.monotone_constraints is True:
        raise ConfigError(f"{MONOTONE}=True is for job files: name the columns and their directions")
    columns = [(party, name) for party, schema in schemas.items() for name in schema.names]
    label = {(party, name): name if len(schemas) == 1 else f"{party}.{name}" for party, name in columns}
    places = [k for party in schemas for k in positions.get(party, ())] or range(len(columns))
    known: dict[str | int, tuple[str, str]] = dict(zip(places, columns, strict=True))
    plain = [name for _, name in columns]
    known |= {name: (party, name) for party, name in columns if plain.count(name) == 1}
    known |= {label[column]: column for column in columns}

    def found(column: str | int, option: str) -> tuple[str, str]:
        if column not in known:
            raise _unknown(column, list(label.values()), n_columns, option)
        return known[column]

    given = common.monotone_constraints
    if isinstance(given, list):
        _check_length(given, n_columns)
    items = enumerate(given) if isinstance(given, list) else (given or {}).items()
    directions: dict[str, dict[str, int]] = {party: {} for party in schemas}
    for column, direction in items:
        if direction or not isinstance(given, list):
            party, name = found(column, MONOTONE)
            directions[party][name] = direction
    groups = [[label[found(column, INTERACTION)] for column in of] for of in common.interaction_constraints or ()]
    named = {label[party, name]: direction for party, of in directions.items() for name, direction in of.items()}
    return checked_constraints(
        msgspec.structs.replace(common, monotone_constraints=named, interaction_constraints=groups)
    ), directions


def _position(column: str | int, names: list[str], option: str) -> int:
    """Return a column's position, by its name or position."""
    if column in names:
        return names.index(str(column))
    if isinstance(column, int) and 0 <= column < len(names):
        return column
    raise _unknown(column, names, len(names), option)


def _unknown(column: str | int, names: Sequence[str], n_columns: int, option: str) -> ConfigError:
    if isinstance(column, int):
        return ConfigError(f"{option}: expected positions of columns from 0 to {n_columns - 1}, got {column}")
    near = [name for name in names if name.endswith(f".{column}")] or get_close_matches(column, names, 1)
    listed = f"there are {', '.join(names[:5])}{' ...' if names[5:] else ''}"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else listed
    return ConfigError(f"{option} names {column!r}, and there is no such column; {hint}")


def _check_length(given: Sequence[int], n_columns: int) -> None:
    if len(given) != n_columns:
        raise ConfigError(f"{MONOTONE}: expected a direction of each of {n_columns} columns, got {len(given)}")


def _directions(given: Mapping[str, int], schema: Schema, whose: str) -> Directions:
    directions, names = np.zeros(len(schema.names), np.int8), list(schema.names)
    for column, asked in given.items():
        directions[_position(column, names, f"{whose}{MONOTONE}")] = asked
    for name, direction, categories in zip(schema.names, directions, schema.categories, strict=True):
        if direction and categories is not None:
            raise ConfigError(
                f"{whose}{MONOTONE}: column {name!r} has categories, which have no order: leave it out, or give it as "
                "numbers"
            )
    return directions
