"""What predictions of rows with known labels are worth: metrics, ROC and calibration, computed by scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.report.contents import Points, Scores

_MOST_POINTS = 200  # of a ROC curve: more are not seen
_MOST_CLASSES = 6
_TENTHS = 10


def scores_of_classes(
    of: str, y: NDArray[np.intp], by_model: Mapping[str, NDArray[np.float64]], classes: Sequence[Any], pooled: str = ""
) -> Scores:
    """Return scores of class probabilities.

    Parameters
    ----------
    of : str
        Which rows these are.
    y : int (n_rows,)
        Class numbers.
    by_model : mapping of str to float64 (n_rows, n_classes)
        Each model's probabilities, by its name.
    classes : sequence
        Labels by class number.
    pooled : str
        The model that was trained on one table, if there is one.
    """
    from sklearn import metrics

    values, roc, calibration = {}, [], []
    several, numbers = len(classes) > 2, list(range(len(classes)))
    for name, p in by_model.items():
        found = {"log-loss": float(metrics.log_loss(y, p, labels=numbers))}
        if len(np.unique(y)) == len(classes):
            of_second = p if several else p[:, 1]
            found |= {"AUC": float(metrics.roc_auc_score(y, of_second, **({"multi_class": "ovr"} if several else {})))}
        found["accuracy"] = float(metrics.accuracy_score(y, np.argmax(p, axis=1)))
        if not several:
            found["Brier score"] = float(metrics.brier_score_loss(y, p[:, 1]))
        values[name] = found
        is_pooled = name == pooled
        for number in numbers[:_MOST_CLASSES] if several else [1]:
            if 0 < np.count_nonzero(y == number) < len(y):
                line = f"{classes[number]} against the rest" if several else _plain(name, by_model, pooled)
                roc.append(_roc(line, y == number, p[:, number], is_pooled))
        right, sure = (np.argmax(p, axis=1) == y, p.max(axis=1)) if several else (y == 1, p[:, 1])
        calibration.append(_tenths(_plain(name, by_model, pooled), sure, right.astype(float), is_pooled))
    return Scores(of=of, values=values, roc=roc, calibration=calibration)


def scores_of_numbers(
    of: str,
    y: NDArray[np.float64],
    by_model: Mapping[str, NDArray[np.float64]],
    pooled: str = "",
    *,
    means: bool = True,
) -> Scores:
    """Return scores of predicted numbers, float64 (n_rows,), by model; `means`: whether they are to be means."""
    from sklearn import metrics

    values = {
        name: {
            "RMSE": float(metrics.root_mean_squared_error(y, predicted)),
            "mean absolute error": float(metrics.mean_absolute_error(y, predicted)),
            "R²": float(metrics.r2_score(y, predicted)) if len(y) > 1 else float("nan"),
        }
        for name, predicted in by_model.items()
    }
    calibration = [
        _tenths(_plain(name, by_model, pooled), predicted, y, name == pooled) for name, predicted in by_model.items()
    ]
    return Scores(of=of, values=values, calibration=calibration if means else (), of_numbers=True)


def _plain(name: str, by_model: Mapping[str, Any], pooled: str) -> str:
    """Return the name of a line: the pooled model's is that of the model it is compared with, whose colour it has."""
    return next(iter(by_model)) if name == pooled else name


def _roc(name: str, is_class: NDArray[np.bool_], p: NDArray[np.float64], pooled: bool) -> Points:
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(is_class, p)
    at = np.unique(np.linspace(0, len(false) - 1, _MOST_POINTS).round().astype(int))
    return Points(name, false[at].tolist(), true[at].tolist(), pooled)


def _tenths(name: str, predicted: NDArray[np.float64], so: NDArray[np.float64], pooled: bool) -> Points:
    """Return mean prediction and mean of what was so, of rows in tenths by their prediction, equal ones together."""
    edges = np.unique(np.quantile(predicted, np.linspace(0.0, 1.0, _TENTHS + 1)[1:-1]))
    tenth = np.searchsorted(edges, predicted, side="left")
    rows = np.bincount(tenth)
    means = [np.bincount(tenth, of)[rows > 0] / rows[rows > 0] for of in (predicted, so)]
    return Points(name, means[0].tolist(), means[1].tolist(), pooled)
