"""Prediction by parties that keep their splits: margins and leaves from plain decisions, and margins on shares.

Claim: on shares, bytes per row grow with trees and their complete leaves, not with splits and parties; plain prediction
costs a bit for each split of a passive party. All parties run on this machine, in threads over the in-memory channel;
rows a second are of all together. The last column says how far the margin can keep decisions from an active party that
tries everything: the (median) number of leaf combinations within its reach, in bits; well below 40 the sum gives the
leaves away. About a minute; `--quick` half.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from data import Data, arguments, give_me_some_credit, report
from treaty.data.table import Table, to_table
from treaty.models.trees import ModelPart, leaves, margins
from treaty.runs.threads import play, traffic_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import objective_for, own_columns
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.shared_prediction import follow, predict_active
from treaty.systems.system import LabelledRows, RoleInput, Roles, star
from treaty.systems.vertical.prediction import collect, predict_passive
from treaty.trees.boosting import Boosting, Forest
from treaty.trees.columns import grow_trees
from treaty.trees.ensemble import SplitTable, Tree

THREADS = 2


def grow(data: Data, parties: int, rounds: int, depth: int) -> tuple[dict[str, ModelPart], dict[str, Table]]:
    """Grow the trees every lossless protocol grows, without encryption; the first party is active."""
    options = BoostingOptions(n_estimators=rounds, max_depth=depth).checked(SecureBoost())
    names = [f"party {number}" for number in range(parties)]
    cut = np.array_split(np.arange(data.x.shape[1]), parties)
    tables = {name: to_table(data.x[:, some], party=name) for name, some in zip(names, cut, strict=True)}
    y = data.y.astype(np.float64)
    objective = objective_for(LabelledRows(tables[names[0]], y), [0, 1], SecureBoost(), options)
    forest, splits = Forest(objective, tuple(names), [0, 1]), {name: SplitTable() for name in names}
    sources = [own_columns(tables[name], options, splits[name], THREADS) for name in names]
    rules = options.rules(objective)
    boosting = Boosting(y, None, forest, rules, options.plan(data.x.shape[1]), threads=THREADS)
    grow_trees(boosting, sources)
    return {
        name: ModelPart(
            model_id="benchmark", party=name, schema=tables[name].schema, splits=splits[name],
            forest=forest if name == names[0] else None,
        )
        for name in names
    }, tables  # fmt: skip


def first_rows(tables: Mapping[str, Table], rows: int) -> dict[str, Table]:
    return {name: Table(t.schema, [column[:rows] for column in t.columns], rows) for name, t in tables.items()}


def roles_of(names: list[str]) -> Roles:
    """Make the first party active."""
    return Roles(names[0], {name: "passive" if name != names[0] else "active" for name in names}, names)


def seated(
    program: Callable[[RoleInput], Any], parts: Mapping[str, ModelPart], tables: Mapping[str, Table]
) -> Callable[[Any], Any]:
    """Return a role: the program at the inputs of whoever plays it."""
    options, roles = SecureBoost(), roles_of(list(parts))
    return lambda party: program(
        RoleInput(
            party=party, options=options, common=BoostingOptions().checked(options), roles=roles, threads=THREADS,
            data=LabelledRows(tables[party.name], np.zeros(0)), part=parts[party.name],
        )
    )  # fmt: skip


def timed(
    active: Callable[[Any], Any], passive: Callable[[Any], Any], names: list[str], runs: int
) -> tuple[float, int]:
    """Return the seconds of the fastest run, and the bytes all parties sent."""
    seconds, nbytes = [], 0
    for _ in range(runs):
        start = time.perf_counter()
        roles = {name: active if name == names[0] else passive for name in names}
        played = play(roles, star(roles_of(names), SecureBoost()), job="benchmark", protocol="secureboost")
        seconds.append(time.perf_counter() - start)
        nbytes = sum(pair["bytes"] for pair in traffic_of(played.transcripts.values()).totals.values())
    return min(seconds), nbytes


def reachable(tree: Tree, sides: np.ndarray) -> np.ndarray:
    """Return how many leaves each row can end in, as far as the active party's own decisions (k, n_rows) tell."""
    counts = np.zeros((len(tree.left), sides.shape[1]))
    for node in range(len(tree.left) - 1, -1, -1):
        left = tree.left[node]
        if left < 0:
            counts[node] = 1
        elif tree.source[node] == 0:
            counts[node] = np.where(sides[tree.record[node]], counts[left], counts[left + 1])
        else:
            counts[node] = counts[left] + counts[left + 1]
    return counts[0]


def compare(data: Data, parties: int, rounds: int, depth: int, rows: int, runs: int) -> dict[str, object]:
    parts, tables = grow(data, parties, rounds, depth)
    names, lead = list(parts), next(iter(parts))
    forest = parts[lead].forest
    assert forest is not None
    few = first_rows(tables, rows)

    plain = seated(predict_passive, parts, tables)
    whole = seated(lambda inputs: margins(collect(inputs), forest.objective, THREADS), parts, tables)
    ends = seated(lambda inputs: leaves(collect(inputs), THREADS), parts, tables)
    whole_seconds, nbytes = timed(whole, plain, names, runs)
    leaf_seconds, _ = timed(ends, plain, names, runs)
    partner = seated(partial(follow, rows="rows to predict"), parts, few)
    shared, shared_bytes = timed(seated(predict_active, parts, few), partner, names, runs)
    sides = np.unpackbits(parts[lead].splits.decide(few[lead].matrix()), axis=1, count=rows)
    combinations = sum(np.log2(reachable(tree, sides)) for tree in forest.trees)
    return {
        "parties": parties,
        "trees": len(forest.trees),
        "depth": depth,
        "passive splits": sum(int((tree.source > 0).sum()) for tree in forest.trees),
        "rows": len(data.y),
        "margins rows/s": len(data.y) / whole_seconds,
        "leaves rows/s": len(data.y) / leaf_seconds,
        "bytes/row": nbytes / len(data.y),
        "shared rows": rows,
        "shared rows/s": rows / shared,
        "shared bytes/row": shared_bytes / rows,
        "combinations, bits": float(np.median(combinations)),
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    data, runs = give_me_some_credit(), 1 if options.quick else 3
    cases = [(2, 5, 3, 4000), (2, 20, 3, 4000), (3, 20, 3, 4000), (2, 100, 6, 1000)]
    cases += [(parties, 50, depth, 1000) for parties in (2, 3) for depth in (3, 6)]
    compare(data, 3, 2, 3, 50, 1)  # compiles
    found = [compare(data, *case[:3], case[3] // (4 if options.quick else 1), runs) for case in cases]
    report("prediction_speed", found, quick=options.quick)


if __name__ == "__main__":
    main()
