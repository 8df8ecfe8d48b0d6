"""The boosting loop: draw rows and columns, compute gradients, grow a tree, add it (Chen & Guestrin 2016)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treaty.trees.ensemble import Tree
from treaty.trees.growth import SplitFinder, grow_tree
from treaty.trees.objectives import Objective
from treaty.trees.splits import SplitRules


@dataclass(slots=True)
class EvalSet:
    """Labelled rows watched during training.

    Attributes
    ----------
    name : str
    y : float64 (n,)
    weight : float64 (n,) or None
    add_trees : callable
        ``add_trees(trees, margins)`` walks the rows down the new trees and adds to margins (n, n_outputs).
    """

    name: str
    y: NDArray[np.float64]
    weight: NDArray[np.float64] | None
    add_trees: Callable[[Sequence[Tree], NDArray[np.float64]], None]


@dataclass(slots=True)
class Forest:
    """A boosted ensemble, filled as training goes on.

    Attributes
    ----------
    objective : Objective
    sources : tuple of str
        Names of the owners of splits: source s of a tree is ``sources[s]``.
    classes : list or None
        Labels by class number, for classifiers.
    trees : list of Tree
        Tree i adds to output ``i % objective.n_outputs``.
    history : dict
        Loss of each eval set after each round.
    best_round : int or None
        Rounds kept by early stopping.
    clipped_rows : int
        Most rows of one round whose gradient was clipped (squared error).
    """

    objective: Objective
    sources: tuple[str, ...]
    classes: list[str | int | float | bool] | None = None
    trees: list[Tree] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)
    best_round: int | None = None
    clipped_rows: int = 0


def boost(
    finder: SplitFinder,
    y: NDArray[np.float64],
    weight: NDArray[np.float64] | None,
    forest: Forest,
    rules: SplitRules,
    *,
    n_columns: int,
    n_estimators: int = 20,
    subsample: float = 1.0,
    colsample_bytree: float = 1.0,
    random_state: int | None = None,
    eval_sets: Sequence[EvalSet] = (),
    early_stopping_rounds: int | None = None,
    on_round: Callable[[int], None] | None = None,
    threads: int = 1,
) -> None:
    """Train `n_estimators` rounds into `forest`; what is finished survives an error.

    Parameters
    ----------
    finder : SplitFinder
    y, weight : float64 (n_rows,)
        `weight` may be None.
    forest : Forest
        Without trees.
    rules : SplitRules
    n_columns : int
        Columns of all parties together; column sampling draws among them, the same in every transport.
    eval_sets, early_stopping_rounds
        Training stops when the last set's loss has not fallen for so many rounds; trees after the best are dropped.
    on_round : callable or None
        ``on_round(rounds_done)`` after each round.
    """
    objective, n_rows, n_outputs = forest.objective, len(y), forest.objective.n_outputs
    objective.check_sums(n_rows)
    rng = np.random.default_rng(random_state)
    margins = np.full((n_outputs, n_rows), objective.base_margin)
    eval_margins = [np.full((len(e.y), n_outputs), objective.base_margin) for e in eval_sets]
    forest.history = {e.name: [] for e in eval_sets}
    for done in range(1, n_estimators + 1):
        grad, hess, clipped = objective.gradients(margins.T, y, weight, threads)
        forest.clipped_rows = max(forest.clipped_rows, clipped)
        new: list[Tree] = []
        for output in range(n_outputs):
            rows = None if subsample >= 1.0 else _draw(rng, n_rows, subsample)
            columns = (
                np.arange(n_columns, dtype=np.int32)
                if colsample_bytree >= 1.0
                else _draw(rng, n_columns, colsample_bytree)
            )
            new.append(
                grow_tree(finder, grad[output], hess[output], margins[output], rules, rows=rows, columns=columns)
            )
        forest.trees.extend(new)
        for e, e_margins in zip(eval_sets, eval_margins, strict=True):
            e.add_trees(new, e_margins)
            forest.history[e.name].append(objective.loss(e_margins, e.y, e.weight))
        if on_round is not None:
            on_round(done)
        if early_stopping_rounds is not None and eval_sets:
            losses = forest.history[eval_sets[-1].name]
            forest.best_round = int(np.argmin(losses)) + 1
            if done - forest.best_round >= early_stopping_rounds:
                break
    if forest.best_round is not None:
        del forest.trees[forest.best_round * n_outputs :]


def _draw(rng: np.random.Generator, total: int, share: float) -> NDArray[np.int32]:
    size = max(1, round(share * total)) if total else 0
    return np.sort(rng.choice(total, size, replace=False)).astype(np.int32)
