"""Statistics of columns as a system: in one place, and between parties."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from itertools import combinations, permutations

import numpy as np

from treaty.crypto.sums.hidden_vectors import vectors_parameters
from treaty.crypto.sums.lattice_sums import vector_bytes
from treaty.data.table import Table
from treaty.messaging.exchanges import JointSeedCommitment, JointSeedShare
from treaty.models.statistics import StatisticsPart
from treaty.statistics import correlations, standardised, with_stability, woe_bins
from treaty.systems.expected import Expected, Shape
from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, When, between, routes
from treaty.systems.pooled.options import Pooled
from treaty.systems.pooled.system import pooled_system
from treaty.systems.statistics import products, statistics
from treaty.systems.statistics.options import ColumnOptions, Statistics
from treaty.systems.statistics.statistics import class_totals, part_of, run
from treaty.systems.system import RoleInput, Roles, System, mesh
from treaty.systems.vertical.exact_sums import ROWS_PER_VECTOR
from treaty.systems.vertical.training import roles_by_column

CANNOT = {
    "resume": "statistics take one pass over the rows and keep no checkpoint",
    "explain": "statistics have no predictions whose contributions could be computed",
}


def compute_pooled(tables: Mapping[str, Table], inputs: RoleInput[Pooled, ColumnOptions]) -> dict[str, StatisticsPart]:
    """Compute the statistics of all parties' columns in one place; return parts as those between parties.

    Eval sets in `inputs` have all parties' columns side by side.
    """
    common, y, active = inputs.common, inputs.rows.y, inputs.roles.active
    class_totals(inputs)
    made = woe_bins(tables, y, max_bin=common.max_bin, min_bin_rows=common.min_bin_rows, monotone=common.monotone)
    first, found = 0, {}
    for name, table in tables.items():
        last = first + len(table.columns)
        evals = [Table(table.schema, of.table.columns[first:last], of.table.n_rows) for of in inputs.eval_sets]
        found[name], first = [with_stability(of, table, evals) for of in made[name]], last
    order = [active, *(name for name in tables if name != active)]
    bins = {name: found[name] for name in order}
    numbers = np.vstack([standardised(tables[name], common.correlation)[1] for name in order])
    correlation = None if common.correlation == "none" else correlations(numbers, numbers)
    model_id = secrets.token_hex(16)
    own = {name: {name: found[name]} for name in order[1:]}
    return {
        name: part_of(inputs, model_id, table.schema, own.get(name, bins), None if name in own else correlation)
        for name, table in tables.items()
    }


# ---------------------------------------------------------------- what each party can work out


def conclusions(
    roles: Roles, options: Statistics, common: ColumnOptions, part: StatisticsPart | None
) -> dict[str, list[str]]:
    counts = (
        f"for each bin of {common.min_bin_rows} rows or more of the others' columns, how many rows of each label it "
        "has; if all rows of a label are in one bin of a column, that these rows are in it"
    )
    rates = (
        f"for each bin of {common.min_bin_rows} rows or more of its own columns, how many rows of each label it has, "
        "and how many there are in all; if all rows of a bin have one label, the labels of these rows; if two bins of "
        "different columns differ in one row, its label. There is at most one bin for "
        f"{ROWS_PER_VECTOR} rows over all jobs, unless allow_exact_sums is set"
    )
    active, passive = ([counts], []) if options.reveal == "active" else ([], [rates])
    if common.correlation != "none":
        active.append(
            "one linear equation about a column of another party for each of its own numeric columns: the rows' values "
            "follow from as many equations as there are rows, of which a party answers at most one in "
            f"{ROWS_PER_VECTOR} over all jobs, unless allow_exact_sums is set"
        )
    active.append("nothing else about single rows of the others, nor their bins' limits or categories")
    passive.append("nothing about the others' columns")
    return {roles.active: active} | {name: passive for name in roles.having("passive")}


# ---------------------------------------------------------------- what statistics are expected to take


def expected(roles: Roles, options: Statistics, common: ColumnOptions, shape: Shape) -> Expected:
    """Return traffic, memory and time if all columns are numbers with as many bins as there may be."""
    found, order, n = Expected(), [roles.active, *(name for name in roles.owners if name != roles.active)], shape.rows
    found.agree(permutations(order, 2))
    columns = shape.columns
    # of each pair that multiplies: who asks, who has the columns, and how many rows of these
    labels, bins = vectors_parameters(n, 1, 2, n), common.max_bin + 1
    asked = [(order[0], peer, columns[peer] * bins, labels, 1) for peer in order[1:]]
    if common.correlation != "none":
        numbers = vectors_parameters(n, 1 << statistics.ENTRY_BITS, statistics.ENTRY_BITS + 2, n)
        asked += [(one, other, columns[other], numbers, columns[one]) for one, other in combinations(order, 2)]
    for asker, owner, rows, parameters, vectors in asked:
        primes, digits, degree = len(parameters.primes), parameters.digits, parameters.degree
        hint = 2.0 * rows * digits * degree
        found.send(owner, asker, hint + vectors * 2.0 * rows * digits)
        found.send(asker, owner, vectors * vector_bytes(parameters, n))
        found.hold(2 * hint + 4.0 * primes * n, asker, owner)
        hiding = rows * (primes * (-(-n // degree) + 2) * 30e-6 + 0.4e-3)
        found.seconds += (hiding + vectors * primes * (n * rows * 1e-9 + (n + degree) * 2e-8)) / shape.threads
    return found


# ---------------------------------------------------------------- systems

_ALL = (*ACTIVE, *PASSIVE)
_OPEN = When('reveal="active"', lambda options, common: options.reveal == "active")
_OWN = When('reveal="passive"', lambda options, common: options.reveal == "passive")
_CORRELATED = When('correlation other than "none"', lambda options, common: common.correlation != "none")

SYSTEM = System(
    name="statistics",
    options=Statistics,
    common=ColumnOptions,
    split="columns",
    train={"active": run, "passive": run},
    assign=roles_by_column,
    conclusions=conclusions,
    routes={
        "train": routes(
            AGREEMENT,
            between(_ALL, _ALL, statistics.StatisticsSizes, JointSeedCommitment, JointSeedShare),
            Route(statistics.SharedColumns, PASSIVE, ACTIVE),
            Route(products.StatisticsHint, PASSIVE, _ALL),
            Route(products.HiddenVector, _ALL, PASSIVE),
            Route(products.MaskedAnswer, PASSIVE, _ALL),
            Route(statistics.CountShares, PASSIVE, ACTIVE, "to_active", when=_OPEN),
            Route(statistics.InformationValues, ACTIVE, PASSIVE, when=_OPEN),
            Route(statistics.CountShares, ACTIVE, PASSIVE, "to_passive", when=_OWN),
            Route(statistics.InformationValues, PASSIVE, ACTIVE, when=_OWN),
            Route(statistics.CorrelationShares, PASSIVE, ACTIVE, when=_CORRELATED),
            reference="docs/statistics.md, Who learns what",
        )
    },
    has_model=frozenset({"active", "passive"}),
    links=mesh,
    orders_by_id=True,
    cannot=CANNOT,
    expected=expected,
    warm_up=lambda options: [Statistics()],
)

POOLED = pooled_system(ColumnOptions, compute_pooled, CANNOT)
