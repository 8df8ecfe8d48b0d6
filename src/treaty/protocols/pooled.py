"""The plain grower on one table: what every federated protocol is compared with."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from treaty.checkpoints import Keeper, checkpoint_of, fingerprint
from treaty.data.binning import fit_bins
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.models import ModelPart, keep_records, record_split, records_used
from treaty.options import TreeOptions
from treaty.privacy.label_rr import stored_noisy_labels
from treaty.protocols.decisions import Decided
from treaty.trees.boosting import EvalSet, Forest, Progressed, boost
from treaty.trees.columns import ColumnSource, SumsFinder
from treaty.trees.ensemble import SplitTable, Tree, join_splits, margins_from_values
from treaty.trees.objectives import Objective, make_objective


@dataclass(frozen=True, slots=True)
class Labelled:
    """A party's rows with their labels.

    Attributes
    ----------
    table : Table
        The party's own columns; perhaps none.
    y : float64 (n_rows,)
        0/1, class numbers, or the regression target.
    weight : float64 (n_rows,) or None
    name : str
        Of an eval set.
    """

    table: Table
    y: NDArray[np.float64]
    weight: NDArray[np.float64] | None = None
    name: str = "train"


Progress = Callable[[int, ModelPart], None]
"""Called with the number of finished rounds and the part so far: at the start, then after every round."""


def objective_for(data: Labelled, classes: list[Category] | None, options: TreeOptions) -> Objective:
    """Choose the loss: squared error without classes, logistic for two, softmax for more."""
    name = "squared_error" if classes is None else "logistic" if len(classes) == 2 else "softmax"
    return make_objective(
        name,
        data.y,
        data.weight,
        n_classes=len(classes or ()),
        base_score=options.base_score,
        fractional_bits=options.fractional_bits,
        epsilon=options.epsilon,
    )


def noisy_labels(
    path: str | os.PathLike[str], y: NDArray[np.float64], classes: list[Category] | None, options: TreeOptions
) -> NDArray[np.float64]:
    """Return what `label_rr` trains on: labels randomised once, drawn when `path` does not keep them yet.

    Raises
    ------
    ConfigError
        For a regression, or when the file keeps those of other labels.
    """
    if classes is None or options.epsilon is None:
        raise ConfigError("mechanism='label_rr' randomises classes; a regression has none: leave it out (None)")
    return stored_noisy_labels(path, y, len(classes), options.epsilon).astype(np.float64)


def own_columns(table: Table, options: TreeOptions, splits: SplitTable, threads: int) -> ColumnSource:
    """Bin a table and make it a source of sums that records its splits in `splits`."""
    bins = fit_bins(table, options.max_bin, threads)
    categorical = np.array([c is not None for c in table.schema.categories], np.bool_)
    return ColumnSource(
        bins.transform(table, threads),
        bins.offsets,
        categorical,
        lambda feature, left_bins: record_split(splits, bins, feature, left_bins),
        threads,
    )


def train(
    data: Labelled,
    options: TreeOptions,
    *,
    classes: list[Category] | None,
    eval_sets: Sequence[Labelled] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
) -> ModelPart:
    """Train on one table.

    Parameters
    ----------
    classes : list or None
        Labels by class number; None for regression.
    keeper : Keeper or None
        Where checkpoints go, and come from.

    Returns
    -------
    ModelPart
        The whole model.
    """
    objective = objective_for(data, classes, options)
    resume: Progressed | None = None
    table = b"" if keeper is None else fingerprint(data.table, data.y, data.weight)
    found = None if keeper is None else keeper.found()
    if found is not None:
        found.check(options, ("pooled",), table)
        part, resume = found.part, found.progressed(objective.n_outputs)
    else:
        part = ModelPart(
            model_id=secrets.token_hex(16),
            party="pooled",
            schema=data.table.schema,
            splits=SplitTable(),
            forest=Forest(objective, ("pooled",), classes),
        )
    forest, splits = part.forest, part.splits
    assert forest is not None
    forest.cut(0 if resume is None else resume.rounds)
    keep_records(splits, records_used(forest.trees, 1)[0])
    source = own_columns(data.table, options, splits, threads)

    def watch(rows: Labelled) -> EvalSet:
        matrix = rows.table.matrix()

        def add_trees(trees: Sequence[Tree], margins: NDArray[np.float64]) -> None:
            margins_from_values(trees, join_splits([splits], [matrix.shape[1]]), matrix, margins, threads)

        return EvalSet(rows.name, rows.y, rows.weight, add_trees)

    def on_round(progressed: Progressed) -> None:
        if keeper is not None and keeper.due:
            kept = replace(progressed, margins=progressed.margins.copy())
            keeper.keep(lambda: checkpoint_of(part, options, table, kept))
        if progress is not None:
            progress(progressed.rounds, part)

    if progress is not None:
        progress(forest.rounds, part)
    rules = options.rules(objective)
    boost(
        SumsFinder([source], data.table.n_rows, rules, threads),
        data.y,
        data.weight,
        forest,
        rules,
        n_columns=len(source.categorical),
        eval_sets=[watch(rows) for rows in eval_sets],
        on_round=on_round,
        resume=resume,
        threads=threads,
        **options.sampling(),
    )
    return part


def decided(part: ModelPart, table: Table, threads: int = 1) -> Decided:
    """Decide rows at all splits of a pooled model, for leaves and margins of every stage."""
    assert part.forest is not None
    return Decided(
        trees=part.forest.trees,
        base=np.array([0, len(part.splits)]),
        packed=part.splits.decide(table.matrix(), threads=threads),
        used=[np.arange(len(part.splits), dtype=np.int32)],
        n_rows=table.n_rows,
    )
