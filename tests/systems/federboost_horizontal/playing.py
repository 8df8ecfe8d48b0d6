"""Horizontal trainings for tests: rows dealt out, roles played in threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from treaty.systems.tree_options import TreeOptions, tree_options

from tables import real_table
from treaty.data.binning import Bins
from treaty.data.table import Table, to_table
from treaty.messaging.messages import decode_body
from treaty.messaging.party import Party
from treaty.models.trees import record_split
from treaty.runs.threads import Played, play, star
from treaty.systems.federboost_horizontal.roles import lead, participate
from treaty.systems.horizontal.members import Vouching
from treaty.systems.horizontal.quantiles import Agreed, unpack_bins
from treaty.systems.pooled.training import Labelled, objective_for
from treaty.trees.boosting import Forest, boost
from treaty.trees.columns import ColumnSource, SumsFinder
from treaty.trees.ensemble import SplitTable

PROTOCOL = "federboost-horizontal"


def options_of(**chosen: object) -> TreeOptions:
    return tree_options({"protocol": PROTOCOL, "n_estimators": 3, "min_child_samples": 3, **chosen})


def dealt(task: str, n_parts: int, rows: int = 400, seed: int = 0) -> tuple[dict[str, Labelled], Labelled, list | None]:
    """Deal a real table's rows out at random; return participants' rows, all of them in that order, and classes."""
    X, y = real_table(task, rows=rows)
    table = to_table(X)
    classes = None if task == "regression" else sorted(set(y.tolist()))
    y = np.asarray(y, np.float64) if classes is None else np.searchsorted(classes, y).astype(np.float64)
    who = np.random.default_rng(seed).integers(0, n_parts, len(y))
    parts = {
        f"p{k}": Labelled(Table(table.schema, [c[who == k] for c in table.columns], int((who == k).sum())), y[who == k])
        for k in range(n_parts)
    }
    order = np.argsort(who, kind="stable")
    return parts, Labelled(Table(table.schema, [c[order] for c in table.columns], len(y)), y[order]), classes


def train(
    parts: Mapping[str, Labelled],
    options: TreeOptions,
    classes: list | None,
    *,
    leader: str = "p0",
    roles: Mapping[str, Callable[[Party], object]] | None = None,
    record_content: bool = False,
    timeout: float = 30.0,
    **chosen: object,
) -> Played:
    """Train in threads; `roles` replaces some participants' programs."""
    names = [*parts, *([] if leader in parts else [leader])]
    members: Sequence[str] = list(parts)
    programs: dict[str, Callable[[Party], object]] = {
        name: lambda party, name=name: participate(
            party, parts[name], options, members=members, classes=classes, vouching=Vouching()
        )
        for name in parts
    }
    programs[leader] = lambda party: lead(
        party, parts.get(leader), options, members=members, classes=classes, vouching=Vouching(), **chosen
    )
    programs |= roles or {}
    return play(
        programs, star(leader, names), job="job", protocol=PROTOCOL, record_content=record_content, timeout=timeout
    )


def bins_told(played: Played, name: str, schema) -> tuple[Bins, Agreed]:
    """Return the bins that a participant was told."""
    (entry,) = [e for e in played.transcripts[name].entries if e.step == "Agreed" and e.direction == "received"]
    agreed = decode_body(entry.content, Agreed, peer="p0")
    return unpack_bins(agreed, schema, 255, "p0"), agreed


def pooled_on(bins: Bins, rows: Labelled, options: TreeOptions, classes: list | None, objective=None):
    """Grow the plain grower's trees on all rows and the same bins; return forest and splits."""
    objective = objective or objective_for(rows, classes, options)
    splits, forest = SplitTable(), Forest(objective, ("pooled",), classes)
    categorical = bins.schema.categorical
    source = ColumnSource(
        bins.transform(rows.table, 1), bins.offsets, categorical, lambda f, left: record_split(splits, bins, f, left)
    )
    rules = options.rules(objective)
    boost(
        SumsFinder([source], rows.table.n_rows, rules), rows.y, rows.weight, forest, rules,
        options.plan(len(categorical)),
    )  # fmt: skip
    return forest, splits
