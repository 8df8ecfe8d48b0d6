"""The plain grower on one table: what every federated protocol is compared with."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import fit_bins
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.models.checkpoints import Keeper, checkpoint_of, fingerprint
from treaty.models.trees import ModelPart, keep_records, record_split, records_used
from treaty.privacy.label_rr import stored_noisy_labels
from treaty.privacy.ledger import Entry, Ledger
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical.decisions import Decided
from treaty.trees.boosting import EvalSet, Forest, RoundState, boost
from treaty.trees.columns import ColumnSource, SumsFinder
from treaty.trees.ensemble import SplitTable, Tree, join_splits, margins_from_values
from treaty.trees.objectives import Objective, make_objective

TRAIN = "train"  # the name of rows that are no eval set


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
    name: str = TRAIN


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
        epsilon=options.epsilon if options.mechanism == "label_rr" else None,
    )


def noisy_labels(
    path: str | os.PathLike[str],
    y: NDArray[np.float64],
    classes: list[Category] | None,
    options: TreeOptions,
    ledger: Ledger,
    job: str,
) -> NDArray[np.float64]:
    """Return what `label_rr` trains on: labels randomised once, drawn when `path` does not keep them yet.

    Parameters
    ----------
    ledger : Ledger
        Of the party with the labels; the same noisy labels cost once.
    job : str
        For the ledger.

    Raises
    ------
    ConfigError
        For a regression, or when the file keeps those of other labels.
    BudgetSpent
        When a person would pay more than `epsilon_total`; nothing is drawn then.
    """
    if classes is None or options.epsilon is None:
        raise ConfigError("mechanism='label_rr' randomises classes; a regression has none: leave it out (None)")
    limit: dict[str, Any] = {"most": options.epsilon_total, "delta": options.delta}
    entry = partial(Entry, job=job, mechanism="label_rr", what="labels", epsilon=options.epsilon)
    if not Path(path).exists():
        ledger.check([entry("not drawn yet")], **limit)  # refused here, labels would be kept that nobody may use
    noisy = stored_noisy_labels(path, y, len(classes), options.epsilon)
    content = msgspec.msgpack.encode([len(classes), options.epsilon]) + noisy.tobytes()
    draw = hashlib.sha256(b"treaty noisy labels" + ledger.key + hashlib.sha256(content).digest()).hexdigest()
    ledger.spend([entry(draw)], **limit)
    return noisy.astype(np.float64)


def own_columns(table: Table, options: TreeOptions, splits: SplitTable, threads: int) -> ColumnSource:
    """Bin a table and make it a source of sums that records its splits in `splits`."""
    bins = fit_bins(table, options.max_bin, threads)
    return ColumnSource(
        bins.transform(table, threads),
        bins.offsets,
        table.schema.categorical,
        lambda feature, left_bins: record_split(splits, bins, feature, left_bins),
        threads,
    )


@dataclass(frozen=True, slots=True)
class Begun:
    """A training of a party that holds the trees: new, or to be gone on with.

    Attributes
    ----------
    part : ModelPart
        With the trees of the rounds all parties have kept, and own records.
    records : dict of str to int
        Of each source, how many records those trees use.
    resume : RoundState or None
    rows : bytes
        `fingerprint` of the training rows, where checkpoints are kept.
    """

    part: ModelPart
    records: dict[str, int]
    resume: RoundState | None
    rows: bytes

    @property
    def forest(self) -> Forest:
        """The trees so far."""
        assert self.part.forest is not None
        return self.part.forest

    def keep(self, keeper: Keeper, options: TreeOptions, progressed: RoundState, began: float | None = None) -> None:
        """Write a checkpoint; see `Keeper.keep`."""
        kept = replace(progressed, margins=progressed.margins.copy())  # the rounds that follow change the margins
        keeper.keep(lambda: checkpoint_of(self.part, options, self.rows, kept), began)


def begin(
    data: Labelled,
    options: TreeOptions,
    party: str,
    sources: tuple[str, ...],
    classes: list[Category] | None,
    eval_sets: Sequence[Labelled],
    keeper: Keeper | None,
) -> Begun:
    """Begin a training, or take up the one the keeper finds.

    Raises
    ------
    ConfigError
        When the checkpoint is of other options, parties, rows, classes or eval sets.
    """
    printed = [(of.table, (of.y, of.weight)) for of in (data, *eval_sets)]
    rows = b"" if keeper is None else fingerprint(printed, classes or ())
    found = None if keeper is None else keeper.found()
    if found is None:
        forest = Forest(objective_for(data, classes, options), sources, classes)
        part = ModelPart(
            model_id=secrets.token_hex(16), party=party, schema=data.table.schema, splits=SplitTable(), forest=forest
        )
        return Begun(part, dict.fromkeys(sources, 0), None, rows)
    found.check(options, sources, rows)
    assert found.part.forest is not None
    resume = found.progressed(found.part.forest.objective.n_outputs)
    found.part.forest.cut(min(resume.rounds, options.n_estimators))  # fewer may be asked for than there are
    records = dict(zip(sources, records_used(found.part.forest.trees, len(sources)), strict=True))
    keep_records(found.part.splits, records[party])
    return Begun(found.part, records, resume, rows)


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
    begun = begin(data, options, "pooled", ("pooled",), classes, eval_sets, keeper)
    part, forest, splits = begun.part, begun.forest, begun.part.splits
    source = own_columns(data.table, options, splits, threads)

    def on_round(progressed: RoundState) -> None:
        if keeper is not None and keeper.due:
            begun.keep(keeper, options, progressed)
        if progress is not None:
            progress(progressed.rounds, part)

    if progress is not None:
        progress(forest.rounds, part)
    rules = options.rules(forest.objective)
    boost(
        SumsFinder([source], data.table.n_rows, rules, threads),
        data.y,
        data.weight,
        forest,
        rules,
        options.plan(len(source.categorical)),
        eval_sets=[watched(rows, splits, threads) for rows in eval_sets],
        on_round=on_round,
        resume=begun.resume,
        threads=threads,
    )
    return part


def watched(rows: Labelled, splits: SplitTable, threads: int) -> EvalSet:
    """Watch rows that a party holds with all the splits of the trees."""
    matrix = rows.table.matrix()

    def add_trees(trees: Sequence[Tree], margins: NDArray[np.float64]) -> None:
        margins_from_values(trees, join_splits([splits], [matrix.shape[1]]), matrix, margins, threads)

    return EvalSet(rows.name, rows.y, rows.weight, add_trees)


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
