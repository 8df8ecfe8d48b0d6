"""Why a model has no split, as far as a party can tell that sees some of the training rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import LabelledRows
from treaty.trees.boosting import Forest


def why_no_split(
    forest: Forest,
    common: BoostingOptions,
    rows: Sequence[LabelledRows],
    table: Table | None,
    *,
    noise: bool = False,
) -> str:
    """Return a sentence with the first option or column that allows no split; empty where a tree has one.

    `rows` have labels and weights of the training. `table` has all columns of these rows; None where others hold some.
    `noise` says whether gains were hidden by noise.
    """
    if not forest.trees or any(len(tree.value) > 1 for tree in forest.trees):
        return ""
    return (
        f"no tree has a split, so that all rows get the same prediction: {_reason(forest, common, rows, table, noise)}"
    )


def _reason(
    forest: Forest, common: BoostingOptions, rows: Sequence[LabelledRows], table: Table | None, noise: bool
) -> str:
    fewest, n_rows = common.fewest_rows, sum(len(of.y) for of in rows)
    share = common.top_rate + common.other_rate if common.goss else common.subsample
    drawn = round(share * n_rows)
    if drawn < 2 * fewest:
        of = "are" if share == 1.0 else f"of {n_rows} are drawn for a tree"
        return f"two leaves of min_child_samples={fewest} rows take {2 * fewest} rows, and {drawn} {of}"
    y = np.concatenate([of.y for of in rows])
    if y.ndim == 1 and len(np.unique(y)) == 1:
        return "all labels are equal"
    hessian = share * sum(_first_hessian(forest, of) for of in rows)
    if hessian < 2.0 * common.min_child_weight:
        return (
            f"two leaves of min_child_weight={common.min_child_weight:g} take hessians of twice that, and those of all "
            f"rows add up to {hessian:.3g}"
        )
    if table is not None:
        if all(len(np.unique(column)) == 1 for column in table.columns):
            return "every column is constant"
        if not any(_can_be_cut(column, fewest) for column in table.columns):
            return f"no column has a cut with min_child_samples={fewest} rows on both sides"
    if common.min_split_loss > 0.0:
        return f"no split gains more than min_split_loss={common.min_split_loss:g}"
    if noise:
        return "no split gains enough under the noise"
    return (
        "no split gains anything under min_child_samples, min_child_weight, reg_lambda and reg_alpha: columns may say "
        "nothing of the labels"
    )


def _first_hessian(forest: Forest, rows: LabelledRows) -> float:
    loss = forest.objective
    margins = np.full((len(rows.y), loss.n_outputs), loss.base_margins)
    return float(loss.gradients(margins, rows.y, rows.weight)[1][0].sum()) * loss.hess_unit


def _can_be_cut(column: NDArray[np.float32], fewest: int) -> bool:
    """Whether so many rows have other values than the most frequent one, a missing value being one."""
    return len(column) - int(np.unique(column, return_counts=True)[1].max()) >= fewest
