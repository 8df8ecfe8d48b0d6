"""Horizontal trainings for tests: rows dealt out, roles played in threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from systems.role_inputs import inputs
from tables import real_table
from treaty.data.binning import Bins
from treaty.data.table import Table, to_table
from treaty.messaging.messages import decode_body
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import record_split
from treaty.runs.threads import RunRecord, play
from treaty.systems.federboost_horizontal.federboost_horizontal import leader as leader_program
from treaty.systems.federboost_horizontal.federboost_horizontal import member as member_program
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.horizontal.quantiles import CommonBins, unpack_bins
from treaty.systems.options import names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import objective_for
from treaty.systems.system import LabelledRows, RoleInput, Roles, star
from treaty.trees.boosting import Boosting, Forest
from treaty.trees.columns import ColumnSource, grow_trees
from treaty.trees.ensemble import SplitTable

PROTOCOL = "federboost-horizontal"


class Options(NamedTuple):
    """A system's own options, and the common ones."""

    own: FederBoostHorizontal
    common: BoostingOptions


def options_of(**chosen: Any) -> Options:
    """Options by name, whosever they are, for a short training."""
    given = {"n_estimators": 3, "min_child_samples": 3, **chosen}
    own = FederBoostHorizontal(**{name: given.pop(name) for name in names_of(FederBoostHorizontal) if name in given})
    common = BoostingOptions(**given).checked(own)
    own.check(common)
    return Options(own, common)


def dealt(
    task: str, n_parts: int, rows: int = 400, seed: int = 0
) -> tuple[dict[str, LabelledRows], LabelledRows, list | None]:
    """Deal a real table's rows out at random; return participants' rows, all of them in that order, and classes."""
    X, y = real_table(task, rows=rows)
    table = to_table(X)
    classes = None if task == "regression" else sorted(set(y.tolist()))
    y = np.asarray(y, np.float64) if classes is None else np.searchsorted(classes, y).astype(np.float64)
    who = np.random.default_rng(seed).integers(0, n_parts, len(y))
    parts = {
        f"p{k}": LabelledRows(
            Table(table.schema, [c[who == k] for c in table.columns], int((who == k).sum())), y[who == k]
        )
        for k in range(n_parts)
    }
    order = np.argsort(who, kind="stable")
    return parts, LabelledRows(Table(table.schema, [c[order] for c in table.columns], len(y)), y[order]), classes


def roles_of(parts: Mapping[str, LabelledRows], leader: str = "p0") -> Roles:
    """Everybody's role."""
    roles = {name: "leader" if name == leader else "member" for name in (*parts, leader)}
    return Roles(leader, roles, list(parts))


def role_input(
    party: Party,
    parts: Mapping[str, LabelledRows],
    options: Options,
    classes: list | None,
    leader: str = "p0",
    **fields: Any,
) -> RoleInput:
    """A participant's inputs."""
    given = {"data": parts.get(party.name), "classes": classes, "alone": False, **fields}
    roles = roles_of(parts, leader).of
    return inputs(party, options.own, options.common, active=leader, owners=list(parts), roles=roles, **given)


def member(
    party: Party,
    parts: Mapping[str, LabelledRows],
    options: Options,
    classes: list | None,
    leader: str = "p0",
    **fields: Any,
):
    """Play a participant other than the leader."""
    return member_program(role_input(party, parts, options, classes, leader, **fields))


def train(
    parts: Mapping[str, LabelledRows],
    options: Options,
    classes: list | None,
    *,
    leader: str = "p0",
    roles: Mapping[str, Callable[[Party], object]] | None = None,
    record_content: bool = False,
    timeout: float = 30.0,
    keepers: Mapping[str, Keeper] | None = None,
    **fields: Any,
) -> RunRecord:
    """Train in threads; `roles` replaces some participants' programs, `fields` are the leader's role's."""
    kept = keepers or {}
    programs: dict[str, Callable[[Party], object]] = {
        name: lambda party: member(party, parts, options, classes, leader, keeper=kept.get(party.name))
        for name in parts
    }
    leads = {"keeper": kept.get(leader), **fields}
    programs[leader] = lambda party: leader_program(role_input(party, parts, options, classes, leader, **leads))
    programs |= roles or {}
    links = star(roles_of(parts, leader), options.own)
    return play(programs, links, job="job", protocol=PROTOCOL, record_content=record_content, timeout=timeout)


def bins_told(played: RunRecord, name: str, schema) -> tuple[Bins, CommonBins]:
    """Return the bins that a participant was told."""
    (entry,) = [e for e in played.transcripts[name].entries if e.step == "CommonBins" and e.direction == "received"]
    told = decode_body(entry.content, CommonBins, peer="p0")
    return unpack_bins(told, schema, (255, 255), "p0"), told


def pooled_on(bins: Bins, rows: LabelledRows, options: Options, classes: list | None, objective=None):
    """Grow the plain grower's trees on all rows and the same bins; return forest and splits."""
    objective = objective or objective_for(rows, classes, options.own, options.common)
    splits, forest = SplitTable(), Forest(objective, ("pooled",), classes)
    categorical = bins.schema.categorical
    source = ColumnSource(
        bins.transform(rows.table, 1), bins.offsets, categorical, lambda f, left: record_split(splits, bins, f, left)
    )
    rules = options.common.rules(objective)
    plan = options.common.plan(len(categorical))
    grow_trees(Boosting(rows.y, rows.weight, forest, rules, plan), [source])
    return forest, splits
