"""Which values of a metric are better: those of predictions nearer to the labels."""

from __future__ import annotations

import numpy as np
import pytest

from treaty.trees.objectives import evaluate, higher_is_better, make_objective

OF_GROUPS = np.column_stack([[0.0, 0.0, 1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]])
CASES = {
    "logistic": (np.array([0.0, 0.0, 1.0, 1.0]), ["logloss", "auc", "aucpr", "error", "error@0.3"]),
    "softmax": (np.array([0.0, 1.0, 2.0, 1.0]), ["mlogloss", "merror", "auc"]),
    "squared_error": (np.array([1.0, 2.0, 3.0, 4.0]), ["rmse", "mae", "mape", "rmsle"]),
    "ndcg": (OF_GROUPS, ["ndcg", "ndcg@2", "map", "map@2"]),
}


@pytest.mark.parametrize(("loss", "metric"), [(loss, metric) for loss, (_, names) in CASES.items() for metric in names])
def test_the_better_value_is_that_of_predictions_nearer_to_the_labels(loss: str, metric: str) -> None:
    y, _ = CASES[loss]
    labels = y[:, 0] if y.ndim == 2 else y
    near = np.eye(3)[labels.astype(int)] if loss == "softmax" else labels[:, None]
    far = near[::-1].copy() if loss != "softmax" else np.roll(near, 1, axis=1)
    if loss == "logistic":
        near, far = 4 * near - 2, 2 - 4 * near
    objective = make_objective(loss, y, None, n_classes=3 if loss == "softmax" else 2)
    better, worse = (evaluate(metric, objective, margins, y, None) for margins in (near, far))
    assert better != worse
    assert (better > worse) == higher_is_better(metric, objective)
