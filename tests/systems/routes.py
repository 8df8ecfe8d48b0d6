"""Which messages go from which role to which: small jobs of a system played in threads, and their transcripts.

For the tests of what messages tell (`System.routes`): a message on a way that no line tells of fails them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np

from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.messaging.party import Party
from treaty.messaging.transcript import Transcript
from treaty.models.checkpoints import Keeper, checkpoint_file
from treaty.runs.threads import Run, RunRecord, Watched, play, predicting_roles, train_in_threads
from treaty.systems.options import names_of
from treaty.systems.system import LabelledRows, Program, RoleInput, Roles, System, roles_of
from treaty.systems.vertical.prediction import Asked

SMALL: dict[str, dict[str, Any]] = {
    "boosting": {"n_estimators": 2, "max_depth": 2, "max_bin": 4, "min_child_samples": 1},
    "regression": {"max_iter": 2, "period": 1, "batch_size": 90, "tol": 0.0, "memory": 1, "calibrate": False},
    "columns": {},
}
N_ROWS = 100


class Way(NamedTuple):
    """A message's class, by name, and the roles of its sender and its receiver."""

    step: str
    sender: str
    receiver: str


@dataclass(frozen=True)
class Played:
    """One small job: its options by name, how many owners it has (0: the fewest), and what else it does."""

    given: Mapping[str, Any] = field(default_factory=dict)
    owners: int = 0
    resumes: bool = False
    weighted: bool = False
    evals: bool = True
    predicts: bool = True


def settings(system: System, played: Played) -> tuple[Any, Any]:
    """Return the system's options and the common ones, checked."""
    of_common = {name: value for name, value in played.given.items() if name in names_of(system.common)}
    own = system.options(**{name: value for name, value in played.given.items() if name not in of_common})
    common = msgspec.convert({**SMALL[system.common.table], **of_common}, system.common).checked(own)
    own.check(common)
    return own.settled(common), common


def routes(system: System, played: Played, folder: Path) -> dict[str, set[Way]]:
    """Play a training of the system, then all that can be done with its model; return the routes of each."""
    options, common = settings(system, played)
    roles = _cast(system, options, played.owners)
    tables, y = _rows(system, roles, common)
    train = partial(_train, system, (options, common), roles, tables, y, played, folder)
    records = [train({})]
    if played.resumes:
        keepers = {name: Keeper(checkpoint_file(folder, name), resume=True, party=name) for name in roles.of}
        records += [train(keepers), train(keepers)]
    found = {"train": routes_of(records, roles.of)}
    if system.split != "columns" or not played.predicts:
        return found
    parts = {name: records[-1].results[name] for name in roles.owners}
    for phase, programs in (("predict", system.predict), ("explain", system.explain), ("online", system.online)):
        if programs and not (phase == "explain" and getattr(options, "hides_decisions", False)):
            roles_after = predicting_roles(roles.active, roles.owners)
            record = _predict(system, programs, (options, common), roles_after, parts, tables)
            found[phase] = routes_of([record], roles_after.of)
    return found


def _cast(system: System, options: Any, owners: int) -> Roles:
    names = [f"party{number}" for number in range(owners or 2)]
    while True:
        try:
            return roles_of(system, names, None, options)
        except ConfigError:  # too few
            if owners or len(names) > 32:
                raise
            names.append(f"party{len(names)}")


def _rows(system: System, roles: Roles, common: Any) -> tuple[dict[str, Table], np.ndarray]:
    """Return a table of every party that shows columns, and labels that hang on them."""
    rng = np.random.default_rng(0)
    names = ("x",) if system.common.table == "regression" else ("a", "b")
    who = {*roles.owners, *roles.having(*system.shows_columns)}
    tables = {
        name: Table(
            Schema(names, (None,) * len(names)), [rng.normal(size=N_ROWS).astype(np.float32) for _ in names], N_ROWS
        )
        for name in sorted(who)
    }
    total = sum(tables[name].columns[0] for name in roles.owners)
    if getattr(common, "family", "") == "multiclass":
        return tables, np.digitize(total, [-0.5, 0.5]).astype(np.float64)
    return tables, (total > 0).astype(np.float64)


def _train(
    system: System, settings: tuple[Any, Any], roles: Roles, tables: dict[str, Table], y: np.ndarray, played: Played,
    folder: Path, keepers: dict[str, Keeper],
) -> RunRecord:  # fmt: skip
    none, weight = np.zeros(0), np.linspace(0.5, 1.5, N_ROWS) if played.weighted else None
    labelled = roles.owners if system.split == "rows" else [roles.active]
    data = {
        name: LabelledRows(table, y if name in labelled else none, weight if name in labelled else None)
        for name, table in tables.items()
    }
    watching = roles.owners if system.split == "columns" else [roles.active]
    watched = {name: tables[name] for name in watching if name in tables}
    number = system.common.table == "regression" and settings[1].family in ("linear", "poisson")
    run = Run(
        system=system, options=settings[0], common=settings[1], roles=roles, data=data,
        classes=None if number else sorted(set(y.tolist())), eval_sets=[Watched(watched, y)] if played.evals else [],
        n_jobs=1, store=folder if played.resumes else None,
    )  # fmt: skip
    return train_in_threads(run, keepers)


def _predict(
    system: System, programs: Mapping[str, Program], settings: tuple[Any, Any], roles: Roles, parts: Mapping[str, Any],
    tables: Mapping[str, Table],
) -> RunRecord:  # fmt: skip
    def asked() -> Iterator[Asked | None]:
        table = tables[roles.active]
        yield Asked(np.arange(2, dtype=np.int32), Table(table.schema, [c[:2] for c in table.columns], 2), list)

    def program(party: Party) -> Any:
        inputs = RoleInput(
            party=party, options=settings[0], common=settings[1], roles=roles, part=parts[party.name], threads=1,
            data=LabelledRows(tables[party.name], np.zeros(0)), alone=False,
            requests=asked() if party.name == roles.active else None,
        )  # fmt: skip
        return programs[roles.of[party.name]](inputs)

    links = system.links(roles, settings[0])
    with patch.object(Transcript, "clear"):  # parties that predict row by row forget what they sent
        return play(dict.fromkeys(roles.of, program), links, job="predict", protocol=system.name, timeout=20.0)


def routes_of(records: list[RunRecord], roles: Mapping[str, str]) -> set[Way]:
    """Return all routes that messages took."""
    return {
        Way(entry.step, roles[name], roles[entry.peer])
        for record in records
        for name, transcript in record.transcripts.items()
        for entry in transcript.entries
        if entry.direction == "sent"
    }
