"""Boosted trees on one plain table, as a system, and what every federated training shares with it.

That is the loss, labels that were randomised once, own columns, and checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import fit_bins
from treaty.data.columns import Category, check_labels, check_targets
from treaty.data.sparse import joined_columns
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import Int32s, copied
from treaty.models.checkpoints import checkpoint_of, fingerprint
from treaty.models.trees import (
    ModelPart,
    RowDecisions,
    keep_records,
    leaves,
    record_split,
    records_used,
    row_decisions,
    walk_tables,
)
from treaty.privacy.ledger import Ledger, LedgerEntry
from treaty.privacy.mechanisms import stored_noisy_target
from treaty.privacy.randomised_response import stored_noisy_labels
from treaty.systems.observers import CheckpointReached
from treaty.systems.options import CommonOptions, SystemOptions, plain
from treaty.systems.pooled.constraints import constraints_of
from treaty.systems.pooled.continuing import after_model
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.system import LabelledRows, RoleInput, Roles, System
from treaty.trees.boosting import Boosting, EvalSet, Forest, RoundState
from treaty.trees.columns import ColumnSource, MakeSums, grow_trees
from treaty.trees.constraints import Constraints
from treaty.trees.ensemble import SplitTable, Tree, Walk, join_splits
from treaty.trees.logistic_pieces import LogisticPieces
from treaty.trees.objectives import Objective, check_metrics, loss_class, make_objective

logger = logging.getLogger(__name__)


def objective_for(
    data: LabelledRows, classes: list[Category] | None, options: SystemOptions, common: BoostingOptions,
    start: Sequence[float] | None = None,
) -> Objective:  # fmt: skip
    """Choose the loss for a party's labels; if other parties hold rows, too, `start` is estimated from all of them."""
    # estimating the base score would spend epsilon where gradients carry noise
    if common.base_score is None and options.adds_noise:
        common = msgspec.structs.replace(common, base_score=0.5)
    n_classes = None if classes is None else len(classes)
    # noisy numbers are right on average as they are
    epsilon = None if options.label_range is not None else options.label_epsilon
    return loss_of(data.y, data.weight, n_classes, epsilon, common, start, data.base_margin)


def loss_of(
    y: NDArray[np.float64], weight: NDArray[np.float64] | None, n_classes: int | None, epsilon: float | None,
    common: BoostingOptions, start: Sequence[float] | None = None, base_margin: NDArray[np.float64] | None = None,
) -> Objective:  # fmt: skip
    """Choose the loss: without classes (None) the objective, logistic (or in pieces) for two, softmax for more.

    `epsilon` is that of labels that were randomised once, None of others.
    """
    if n_classes is not None and common.objective is not None and common.loss_class.takes != "classes":
        raise ConfigError(
            f"objective={common.objective!r} needs numbers, and the labels are classes: use GBDTRegressor, or "
            'task = "regression" in a job file'
        )
    of_classes = common.loss_class.takes == "classes"
    if pieces := issubclass(common.loss_class, LogisticPieces):
        of_two, of_several = "logistic_pieces", "pieces_of_classes"
    else:
        of_two, of_several = "logistic", "softmax"
    if pieces and n_classes is None:
        raise ConfigError(f"objective={common.objective!r} needs classes, and the labels are none: leave objective out")
    named = None if of_classes else common.objective
    loss = make_objective(
        named or ("squared_error" if n_classes is None else of_two if n_classes == 2 else of_several),
        y,
        weight,
        n_classes=n_classes or 0,
        base_score=common.base_score,
        start=start,
        fractional_bits=common.fractional_bits,
        epsilon=epsilon,
        base_margin=base_margin,
        **common.of_loss,
    )
    check_metrics(common.metrics, loss)
    return loss


def check_numbers(y: Any, whose: str, n_rows: int, objective: str | type | None) -> NDArray[np.float64]:
    """Return the target of a regression, float64 (n_rows,); DataError if the objective cannot take it."""
    kind, target = loss_class(plain(objective)), check_targets(y, whose, n_rows)
    if kind.takes == "groups":
        raise ConfigError(
            f'objective={objective!r} ranks rows within groups: use GBDTRanker, or task = "ranking" in a job file'
        )
    if kind.takes == "classes":
        raise ConfigError(
            f'objective={objective!r} needs classes: use GBDTClassifier, or task = "classification" in a job file'
        )
    kind.check_labels(target, whose)
    return target


def check_relevance(
    relevance: Any, group: Any, whose: str, n_rows: int, objective: str | type | None
) -> NDArray[np.float64]:
    """Return the target of a ranking, float64 (n_rows, 2): relevance and group number; DataError if it is none."""
    kind = loss_class(plain(objective))
    if kind.takes != "groups":
        raise ConfigError(f"objective={objective!r} does not rank rows within groups: use 'ndcg' or 'pairwise'")
    try:
        numbers = np.unique(check_labels(group, f"{whose}: groups", n_rows), return_inverse=True)[1]
    except TypeError:  # numbers and text have no order
        raise DataError(f"{whose}: expected groups of one kind, numbers or text, got both") from None
    target = np.column_stack([check_targets(relevance, whose, n_rows), numbers.astype(np.float64)])
    kind.check_labels(target, whose)
    return target


def refuse_margins(system: System, own: SystemOptions, common: BoostingOptions) -> None:
    """Raise ConfigError where rows cannot start from margins of their own."""
    refused = f"expected no base_margin with protocol {own.system!r}: "
    if system.split == "rows":
        raise ConfigError(f"{refused}participants compute gradients of their rows from the model alone")
    if own.adds_noise or own.label_epsilon is not None:
        raise ConfigError(f"{refused}noise hides labels, and not margins, which derivatives would show")
    if common.base_score is not None:
        raise ConfigError("expected base_score or base_margin, got both: rows start from one or the other")
    if common.loss_class.leaf_unit:
        raise ConfigError(
            f"expected no base_margin with objective={common.objective!r}: all its margins are multiples of "
            f"{common.loss_class.leaf_unit:g}"
        )


def check_margins(margins: Any, whose: str, n_rows: int, n_outputs: int) -> NDArray[np.float64]:
    """Return margins that rows start from, float64 (n_rows, n_outputs); those of one output may be (n_rows,)."""
    try:
        found = np.array(margins, np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{whose}: expected numbers as base_margin, got others") from None
    if found.shape == (n_rows,) and n_outputs == 1:
        found = found[:, None]
    if found.shape != (n_rows, n_outputs):
        raise DataError(f"{whose}: expected base_margin of shape ({n_rows}, {n_outputs}), got {found.shape}")
    if odd := int(np.count_nonzero(~np.isfinite(found))):
        raise DataError(f"{whose}: expected finite numbers as base_margin, got {odd} others")
    return found


def noisy_labels(
    path: str | os.PathLike[str], y: NDArray[np.float64], classes: list[Category] | None, options: SystemOptions,
    ledger: Ledger, job: str,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the labels that `label_rr` and `target` train on: those at `path`, or else randomised now and kept there.

    `ledger` belongs to the party with the labels. Training again on the same noisy labels costs nothing more. Raises
    ConfigError if the mechanism is not for such labels, or `path` keeps noisy labels drawn from other labels;
    BudgetSpent, before drawing, if a person would pay more than `epsilon_total`.
    """
    ends, epsilon = options.label_range, options.label_epsilon
    assert epsilon is not None
    if ends is None and classes is None:
        raise ConfigError(
            "mechanism='label_rr' randomises classes, and a regression has none: take mechanism='target' with "
            "target_range=(least, most), the range of labels; choose it without looking at them"
        )
    if ends is not None and classes is not None:
        raise ConfigError(
            "mechanism='target' randomises numbers, and the labels are classes: leave target_range out, and take "
            "mechanism='label_rr'"
        )
    limit: dict[str, Any] = {"most": getattr(options, "epsilon_total", None), "delta": getattr(options, "delta", None)}
    mechanism = "label_rr" if ends is None else "target"
    entry = partial(LedgerEntry, job=job, mechanism=mechanism, what="labels", epsilon=epsilon)
    if not Path(path).exists():
        # before drawing: noisy labels that cannot be paid for must not be kept
        ledger.check([entry("not drawn yet")], **limit)
    noisy: NDArray[Any]
    if ends is None:
        noisy = stored_noisy_labels(path, y, len(classes or ()), epsilon)
    else:
        noisy = stored_noisy_target(path, y, ends, epsilon)
        outside = int(np.count_nonzero((y < ends[0]) | (y > ends[1])))
        if outside:
            logger.warning("%d of %d labels lie outside target_range=%s and were clipped to it", outside, len(y), ends)
    content = msgspec.msgpack.encode([len(classes or ()), epsilon]) + noisy.tobytes()
    draw = hashlib.sha256(b"treaty noisy labels" + ledger.key + hashlib.sha256(content).digest()).hexdigest()
    ledger.spend([entry(draw)], **limit)
    return noisy.astype(np.float64)


def own_columns(
    table: Table, common: BoostingOptions, splits: SplitTable, threads: int, histograms: MakeSums | None = None
) -> ColumnSource:
    """Bin a table, and make it a source of sums that records its splits in `splits`."""
    bins = fit_bins(table, common.most_bins, threads, max_categories=common.most_categories)
    return ColumnSource(
        bins.transform(table, threads),
        bins.offsets,
        table.schema.categorical,
        lambda feature, left_bins: record_split(splits, bins, feature, left_bins),
        threads,
        histograms,
    )


@dataclass(frozen=True, slots=True)
class Training:
    """A new or resumed training, at the party that holds the trees.

    `part` has the trees of the rounds that all parties have kept, and this party's own splits. `records` is the number
    of records of each source that those trees use. `rows` is the `fingerprint` of the training rows, where checkpoints
    are kept. `constraints` are on the columns of all sources.
    """

    part: ModelPart
    records: dict[str, int]
    resume: RoundState | None
    rows: bytes
    constraints: Constraints | None = None

    @property
    def forest(self) -> Forest:
        """The trees so far."""
        return self.part.grown

    def state(
        self, inputs: RoleInput, add_trees: Callable[[Sequence[Tree], NDArray[np.float64]], None]
    ) -> RoundState | None:
        """Return what boosting continues from: a checkpoint, or trees of an earlier model, which ``add_trees`` adds."""
        forest, base = self.forest, inputs.rows.base_margin
        if self.resume is not None or not forest.before:
            return self.resume
        shape = inputs.rows.table.n_rows, forest.objective.n_outputs
        margins = np.full(shape, forest.objective.base_margins if base is None else base)
        add_trees(forest.trees, margins)
        # rows and columns of the new rounds are not drawn as those of the first
        seed = inputs.common.random_state
        rng = np.random.default_rng(None if seed is None else [seed, forest.before])
        return RoundState(forest.before, margins.T, json.dumps(rng.bit_generator.state))

    def earlier(
        self, inputs: RoleInput, decide: Callable[[list[Tree]], RowDecisions]
    ) -> tuple[list[Tree], Int32s] | None:
        """Return the trees whose leaves are to be refreshed, and the leaves of training rows; None if trees grow."""
        if not inputs.common.refreshes:
            return None
        trees = inputs.part.forest.trees
        return trees, leaves(decide(trees), inputs.threads)

    def keep(self, inputs: RoleInput, progressed: RoundState, began: float | None = None) -> None:
        """Report this party's checkpoint, which its runner writes."""
        # a copy: the next rounds change the margins while the checkpoint is being written
        kept = replace(progressed, margins=copied(progressed.margins))
        current = partial(checkpoint_of, self.part, inputs.given, self.rows, kept)
        inputs.observers.event(CheckpointReached(current, began))


def begin(inputs: RoleInput, party: str, sources: tuple[str, ...]) -> Training:
    """Start a training of the role's rows over `sources`, or resume the one that its keeper finds.

    Raises ConfigError if the checkpoint has other options, parties, rows, classes or eval sets.
    """
    data, classes, keeper = inputs.rows, inputs.classes, inputs.keeper
    starts = [] if data.base_margin is None else [of.base_margin for of in (data, *inputs.eval_sets)]
    printed = [(of.table, (of.y, of.weight, *starts)) for of in (data, *inputs.eval_sets)]
    earlier = [] if inputs.part is None else [inputs.part.model_id]
    rows = b"" if keeper is None else fingerprint(printed, [*(classes or ()), *earlier])
    # refreshing takes no longer than reading what is there
    found = None if keeper is None or inputs.common.refreshes else keeper.found()
    if found is None and inputs.part is not None:
        start = inputs.part.forest.objective.start
        objective = objective_for(data, classes, inputs.options, inputs.common, start)
        return Training(*after_model(inputs, party, sources, objective), None, rows)
    if found is None:
        objective = objective_for(data, classes, inputs.options, inputs.common)
        forest = Forest(
            objective, sources, classes, base_margin=data.base_margin is not None,
            parallel=inputs.common.num_parallel_tree,
        )  # fmt: skip
        part = ModelPart(
            model_id=secrets.token_hex(16), party=party, schema=data.table.schema, splits=SplitTable(), forest=forest,
            trees_a_round=forest.objective.n_outputs,
        )  # fmt: skip
        return Training(part, dict.fromkeys(sources, 0), None, rows)
    found.check(inputs.given, inputs.may_change, sources, rows)
    forest = found.part.grown
    resume = found.progressed(forest.objective.n_outputs)
    # the job may ask for fewer rounds than the checkpoint has
    forest.cut(min(resume.rounds, inputs.common.most_rounds))
    records = dict(zip(sources, records_used(forest.trees, len(sources)), strict=True))
    # splits of rounds that were not finished are dropped
    keep_records(found.part.splits, records[party])
    return Training(found.part, records, resume, rows)


def train(inputs: RoleInput) -> ModelPart:
    """Train on the role's rows; return the whole model, as the part of a party called "pooled"."""
    training = begin(inputs, "pooled", ("pooled",))
    part, forest, splits = training.part, training.forest, training.part.splits
    data, common, threads = inputs.rows, inputs.common, inputs.threads
    source = own_columns(data.table, common, splits, threads)

    def on_round(progressed: RoundState) -> None:
        if inputs.keeper is not None and inputs.keeper.due:
            training.keep(inputs, progressed)
        inputs.observers.round_finished(progressed.rounds, part)

    inputs.observers.round_finished(forest.rounds, part)
    rules = common.rules(forest.objective, constraints_of(common, data.table.schema))
    boosting = Boosting(
        data.y, data.weight, forest, rules, common.plan(len(source.categorical)),
        base_margin=data.base_margin, eval_sets=[watched(rows, splits, threads) for rows in inputs.eval_sets],
        on_round=on_round, resume=training.state(inputs, watched(data, splits, threads).add_trees),
        earlier=training.earlier(inputs, lambda _: row_decisions(inputs.part, data.table, threads)), threads=threads,
    )  # fmt: skip
    grow_trees(boosting, [source])
    return part


def watched(rows: LabelledRows, splits: SplitTable, threads: int) -> EvalSet:
    """Return an eval set of rows, at a party that holds all their columns and the whole model."""
    n_columns = len(rows.table.columns)
    return EvalSet(
        rows.name, rows.y, rows.weight,
        # splits are joined for each round, as every round adds some
        lambda trees, margins: walk_tables(
            Walk(trees, join_splits([splits], [n_columns])), [rows.table], margins, threads
        ),
        rows.base_margin,
    )  # fmt: skip


def why_no_split(
    forest: Forest, common: BoostingOptions, rows: Sequence[LabelledRows], tables: Iterable[Table] | None, *,
    noise: bool = False,
) -> str:  # fmt: skip
    """Return a sentence with the first option or column that allows no split; empty if a tree has one.

    `rows` have labels and weights of the training. `tables` have all columns of these rows; None if other parties hold
    some. `noise` says whether gains were hidden by noise.
    """
    if not forest.trees or any(len(tree.value) > 1 for tree in forest.trees):
        return ""
    reason = _reason(forest, common, rows, tables, noise)
    return f"no tree has a split, so that all rows get the same prediction: {reason}"


def _reason(
    forest: Forest, common: BoostingOptions, rows: Sequence[LabelledRows], tables: Iterable[Table] | None, noise: bool
) -> str:
    fewest, n_rows = common.fewest_rows, sum(len(of.y) for of in rows)
    share = common.top_rate + common.other_rate if common.goss else common.subsample
    drawn = round(share * n_rows)
    if drawn < 2 * fewest:
        there = f"there are {drawn}" if share == 1.0 else f"a tree draws {drawn} of {n_rows}"
        return f"two leaves of min_child_samples={fewest} rows need {2 * fewest} rows, and {there}"
    y = np.concatenate([of.y for of in rows])
    if y.ndim == 1 and len(np.unique(y)) == 1:
        return "all labels are equal"
    loss, hessian = forest.objective, 0.0
    for of in rows:
        margins = np.full((len(of.y), loss.n_outputs), loss.base_margins if of.base_margin is None else of.base_margin)
        hessian += float(loss.gradients(margins, of.y, of.weight)[1][0].sum()) * loss.hess_unit
    hessian *= share
    if hessian < 2.0 * common.min_child_weight:
        return (
            f"two leaves of min_child_weight={common.min_child_weight:g} need hessians of twice that, and the "
            f"hessians of all rows add up to {hessian:.3g}"
        )
    if tables is not None:
        counts = [np.unique(column, return_counts=True)[1] for table in tables for column in table.columns]
        if all(len(of_values) == 1 for of_values in counts):
            return "every column is constant"
        # a cut needs this many rows with other values than the most frequent one; a missing value counts as one
        if all(int(of_values.sum() - of_values.max()) < fewest for of_values in counts):
            return f"no column has a cut with min_child_samples={fewest} rows on both sides"
    if common.min_split_loss > 0.0:
        return f"no split gains more than min_split_loss={common.min_split_loss:g}"
    if noise:
        return "no split gains enough under the noise"
    return (
        "no split gains anything under min_child_samples, min_child_weight, reg_lambda and reg_alpha: columns may be "
        "unrelated to the labels"
    )


ALONE = "pooled"
"""Name of the only party."""

DISCLOSED = {ALONE: ["everything: all columns and labels are in one place"]}


def train_alone(tables: Mapping[str, Table], inputs: RoleInput) -> dict[str, ModelPart]:
    """Train on all tables side by side with the role's labels; its eval sets are side by side already."""
    inputs.data = replace(inputs.rows, table=side_by_side(tables))
    return {ALONE: train(inputs)}


def side_by_side(tables: Mapping[str, Table]) -> Table:
    """Put tables side by side; if there are several, the party's name comes before each column's."""
    if len(tables) == 1:
        return next(iter(tables.values()))
    names = tuple(f"{party}.{name}" for party, table in tables.items() for name in table.schema.names)
    if len(set(names)) < len(names):
        raise DataError("two columns have the same name 'party.column': rename a party or a column")
    return Table(
        schema=Schema(
            names,
            tuple(kind for table in tables.values() for kind in table.schema.categories),
            {f"{party}.{name}": of for party, table in tables.items() for name, of in table.schema.origins.items()},
        ),
        columns=joined_columns([table.columns for table in tables.values()]),
        n_rows=next(iter(tables.values())).n_rows,
    )


def pooled_system(
    common: type[CommonOptions], alone: Callable[[Mapping[str, Table], Any], dict[str, Any]],
    cannot: Mapping[str, str] | None = None,
) -> System:  # fmt: skip
    """Return the system that trains in one place, with the fields of `System`."""
    return System(
        name="pooled", options=Pooled, common=common, split="none", train={},
        assign=lambda places, active, options: Roles(active, dict.fromkeys(places, ALONE), list(places)),
        conclusions=lambda roles, options, common, part: DISCLOSED, has_model=frozenset({ALONE}), cannot=cannot or {},
        alone=alone,
    )  # fmt: skip


TREES = pooled_system(BoostingOptions, train_alone)
