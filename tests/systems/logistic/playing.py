"""Play a logistic regression between parties on a small table, with the contents of all messages recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tables import cut, cut_for_active, real_table
from treaty.data.table import Table, to_table
from treaty.linear.lbfgs import batch_seed
from treaty.linear.training import Optimiser, Solver, train
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper, checkpoint_file
from treaty.models.linear import LinearPart, preparation_of
from treaty.runs.threads import RunRecord, play
from treaty.systems.logistic.options import SGD, FederatedRegression, QuasiNewton, RegressionOptions
from treaty.systems.logistic.quasi_newton import active, coordinator, passive
from treaty.systems.logistic.setup import fixed_columns, solver_of
from treaty.systems.logistic.system import QUASI_NEWTON, assign
from treaty.systems.options import names_of
from treaty.systems.system import LabelledRows, PartySpec, RoleInput, Roles, mesh

LEAD = "coordinator"
PROGRAMS = {"active": active, "passive": passive, LEAD: coordinator}
OPTIONS: dict[str, Any] = {
    "protocol": "quasi-newton", "batch_size": 120, "max_iter": 2, "period": 2, "memory": 3, "random_state": 7,
    "insecure_test_key_bits": 768, "allow_insecure": True, "learning_rate": 0.15, "tol": 0.0,
}  # fmt: skip
PAPER = {"mode": "paper", "allow_insecure": True}


def linear_tables(parties: int = 2, rows: int = 300, *, wide: bool = False) -> tuple[dict[str, Table], np.ndarray]:
    """Return tables; passive parties have few columns, as many as batches of 120 hide labels from, or all but one."""
    X, y = real_table("binary", rows=rows)
    parts = cut(X, parties) if wide else cut_for_active(X, parties)
    return {name: to_table(part, party=name) for name, part in parts.items()}, y.astype(float)


def options_of(**changes: Any) -> tuple[FederatedRegression, RegressionOptions]:
    """Return the system's options and the common ones, checked."""
    given = {**OPTIONS, **changes}
    kind = SGD if given.pop("protocol") == "sgd" else QuasiNewton
    if given.get("encryption") == "lattice":
        given["insecure_test_key_bits"] = None
    options = kind(**{name: value for name, value in given.items() if name in names_of(kind)})
    common = RegressionOptions(**{name: value for name, value in given.items() if name not in names_of(kind)})
    common = common.checked(options)
    options.check(common)
    return options, common


def solver(**changes: Any) -> Solver:
    options, common = options_of(**changes)
    return solver_of(common, type(options))


def roles_of(owners: list[str], options: FederatedRegression) -> Roles:
    """Give p0 the labels, and add a coordinator where the options ask for one."""
    lead = {LEAD: PartySpec(role=LEAD, has_rows=False)} if options.has_coordinator else {}
    return assign({**{name: PartySpec() for name in owners}, **lead}, "p0", options)


def said(owners: list[str], part: LinearPart | None = None, **changes: Any) -> dict[str, list[str]]:
    """Return what parties learned, in words."""
    options, common = options_of(**changes)
    return QUASI_NEWTON.disclosures(roles_of(owners, options), options, common, part)


def role_input(
    party: Party,
    tables: dict[str, Table],
    y: np.ndarray,
    *,
    weight: np.ndarray | None = None,
    store: Any = None,
    checkpoints: Path | None = None,
    evals: tuple[dict[str, Table], np.ndarray] | None = None,
    **changes: Any,
) -> RoleInput:
    """Return a party's inputs of a training."""
    options, common = options_of(**changes)
    data = LabelledRows(tables[party.name], np.empty(0)) if party.name in tables else None
    if party.name == "p0":
        data = LabelledRows(tables[party.name], y, weight)
    watched = []
    if evals is not None and party.name in tables:
        labels = evals[1] if party.name == "p0" else np.empty(0)
        watched = [LabelledRows(evals[0][party.name], labels, None, "eval_0")]
    n_classes = len(np.unique(y)) if common.family == "multiclass" else 2
    return RoleInput(
        party=party, options=options, common=common, roles=roles_of(list(tables), options), data=data,
        classes=list(range(n_classes)) if party.name == "p0" else None, n_classes=n_classes, store=store,
        eval_sets=watched,
        keeper=checkpoints and Keeper(checkpoint_file(checkpoints, party.name), resume=True, party=party.name),
    )  # fmt: skip


def play_logistic(
    tables: dict[str, Table],
    y: np.ndarray,
    *,
    replace: dict[str, Callable[..., Any]] | None = None,
    theirs: dict[str, Any] | None = None,
    timeout: float = 30.0,
    record: bool = True,
    weight: np.ndarray | None = None,
    store: Any = None,
    checkpoints: Path | None = None,
    evals: tuple[dict[str, Table], np.ndarray] | None = None,
    **changes: Any,
) -> RunRecord:
    """Train with p0 as the active party; `theirs` are other options of the others, `replace` other role programs."""
    options, _ = options_of(**changes)
    found = roles_of(list(tables), options)

    def run(party: Party) -> Any:
        own = changes if party.name == "p0" else {**changes, **(theirs or {})}
        return PROGRAMS[found.of[party.name]](
            role_input(party, tables, y, weight=weight, store=store, checkpoints=checkpoints, evals=evals, **own)
        )

    roles = {**dict.fromkeys(found.of, run), **(replace or {})}
    links = mesh(found, options)
    return play(roles, links, job="test", protocol=options.system, timeout=timeout, record_content=record)


def pooled_columns(tables: dict[str, Table]) -> np.ndarray:
    """Return all parties' prepared columns side by side, rounded as the parties round, and a column of ones."""
    columns = [preparation_of(table).matrix(table.columns, table.n_rows) for table in tables.values()]
    ones = np.ones((len(columns[0]), 1))
    return np.hstack([*(fixed_columns(part) * 2.0**-24 for part in columns), ones])


def pooled_weights(
    tables: dict[str, Table], y: np.ndarray, *, weight: np.ndarray | None = None, **changes: Any
) -> tuple[np.ndarray, Any]:
    """Train in one place on the same batches; return also the whole matrix, columns rounded as the parties round."""
    _, common = options_of(**changes)
    settings = solver(**changes)
    X = pooled_columns(tables)
    optimiser = Optimiser(
        memory=settings.memory, period=settings.period, batch_size=common.batch_size,
        learning_rate=settings.learning_rate, decay=settings.decay, max_iter=settings.max_iter, tol=settings.tol,
        seed=batch_seed(common.random_state), l2=settings.l2, hessian_batch_size=settings.hessian_batch_size,
    )  # fmt: skip
    return X, train(X, 2.0 * y - 1.0, optimiser, weight=weight)


def weights_of(played: RunRecord, tables: dict[str, Table]) -> np.ndarray:
    """Return all parties' weights in the order of `pooled_weights`."""
    return np.concatenate([*(played.results[name].coef for name in tables), [played.results["p0"].intercept]])
