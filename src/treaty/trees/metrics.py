"""Metrics of eval sets by XGBoost's names, beside a loss's own; scikit-learn computes them, where labels are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treaty.compute import Floats
from treaty.errors import ConfigError, DataError
from treaty.trees.objectives import Objective

_OF_TWO = ("logloss", "auc", "aucpr", "error")
_OF_SEVERAL = ("mlogloss", "merror", "auc")
_OF_NUMBERS = ("rmse", "mae", "mape", "rmsle")
_HIGHER_IS_BETTER = ("auc", "aucpr")
NAMES = tuple(dict.fromkeys((*_OF_TWO, *_OF_SEVERAL, *_OF_NUMBERS)))


def metric_names(given: str | None) -> list[str]:
    """Return the names in ``"logloss,auc"``; none for None."""
    return [] if given is None else [name.strip() for name in given.split(",")]


def check_metrics(names: Sequence[str], objective: Objective) -> None:
    """Raise ConfigError for a metric that labels of this loss do not have."""
    fitting = {"classes": _OF_TWO if objective.n_outputs == 1 else _OF_SEVERAL, "numbers": _OF_NUMBERS, "groups": ()}
    known = list(dict.fromkeys((objective.metric, *fitting[objective.takes])))
    for name in names:
        if name not in known:
            raise ConfigError(f"expected eval_metric of {', '.join(known)} for these labels, got {name!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"expected every eval_metric once, got {', '.join(names)}")


def higher_is_better(name: str, objective: Objective) -> bool:
    """Whether larger values of a metric are better."""
    return objective.higher_is_better if name == objective.metric else name in _HIGHER_IS_BETTER


def evaluate(name: str, objective: Objective, margins: Floats, y: Floats, weight: Floats | None) -> float:
    """Return a metric of rows, given their margins (n_rows, n_outputs) and labels; `name` has been checked.

    "aucpr" is the average precision, "auc" of several classes the mean of each against the rest, by their share.
    """
    if name == objective.metric:
        return objective.loss(margins, y, weight)
    from sklearn import metrics  # imported late: a party's process does without it

    predicted = objective.predictions(margins)
    if objective.n_outputs == 1:
        predicted = predicted[:, 0]
    by_weight: dict[str, Any] = {"sample_weight": weight}
    if name in _HIGHER_IS_BETTER and len(np.unique(y)) < max(2, objective.n_outputs):
        raise DataError(f"eval_metric={name!r} needs rows of every class in the eval set, got {len(np.unique(y))}")
    if name == "auc" and objective.n_outputs > 1:
        by_weight |= {"multi_class": "ovr", "average": "weighted"}
    if name in ("error", "merror"):
        chosen = predicted > 0.5 if name == "error" else np.argmax(predicted, axis=1)
        return 1.0 - float(metrics.accuracy_score(y, chosen.astype(np.float64), **by_weight))
    functions = {
        "auc": metrics.roc_auc_score,
        "aucpr": metrics.average_precision_score,
        "rmse": metrics.root_mean_squared_error,
        "mae": metrics.mean_absolute_error,
        "mape": metrics.mean_absolute_percentage_error,
        "rmsle": metrics.root_mean_squared_log_error,
    }
    return float(functions[name](y, predicted, **by_weight))
