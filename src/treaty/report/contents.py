"""What a report shows of a finished run, whether it comes from a fitted estimator or from a job.

The classes below hold the values of each section; `scores_of_classes` and `scores_of_numbers` compute metrics, ROC and
calibration of predictions with known labels, by scikit-learn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treaty.messaging.transcript import Timeline

# Points of a ROC curve: more would not be visible.
_MOST_POINTS = 200
_MOST_CLASSES = 6
_TENTHS = 10

Section = Literal[
    "scores", "curves", "roc", "calibration", "importances", "shap", "messages", "timeline", "seconds", "learned",
    "noise", "parameters", "versions",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one set of rows after each round or epoch.

    `pooled`: of the same model trained on one table, for comparison.
    """

    name: str
    metric: str
    values: Sequence[float]
    pooled: bool = False


@dataclass(frozen=True, slots=True)
class Points:
    """A line through points (x, y); `pooled` as in `Curve`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    pooled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScores:
    """Scores of predictions for rows with known labels.

    Attributes
    ----------
    of : str
        The rows, in words.
    values : mapping of str to (mapping of str to float)
        By model and metric.
    roc : sequence of Points
        False and true positive rates; with more than two classes, each against the rest. Empty for numbers.
    calibration : sequence of Points
        For rows in tenths by their prediction: mean prediction, and the observed share of the second class. With more
        than two classes, the share of correct ones by the predicted class's probability; for numbers, the mean label.
    of_numbers : bool
    """

    of: str
    values: Mapping[str, Mapping[str, float]]
    roc: Sequence[Points] = ()
    calibration: Sequence[Points] = ()
    of_numbers: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles 0.05, 0.25, 0.5, 0.75, 0.95 of what a column adds to rows' margins (TreeSHAP); no single row.

    `low` and `high` are of the rows with a value up to, or above, the column's median. Categories, and all columns of a
    party together, only have `every`, of all rows. `mean` is the mean absolute contribution.
    """

    name: str
    mean: float
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    every: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a report shows; `absent` has the reasons for empty sections.

    Attributes
    ----------
    title : str
    facts : sequence of str
        A few words each: rows, columns, date.
    whose : str
        A sentence: whose view of the run this is, and who may see the page.
    shap_of : str
        Label of the axis of the SHAP figure.
    unit : str
        Unit of the curves: "round" or "epoch".
    best : int or None
        The round, or epoch, that early stopping kept.
    importances : mapping of str to (mapping of str to float)
        By party and column, or its pseudonym.
    importance_kind : str
        A sentence on what these numbers are.
    sent : mapping of str to mapping
        By "sender -> receiver": messages (where known), bytes, and bytes by message type (where known).
    seconds : mapping of str to (mapping of str to float)
        By party ("" for all together), by phase.
    learned : mapping of str to sequence of str
        What each party, or role, learned beyond its own data.
    noise : sequence of str
        What noise has cost, as sentences.
    notes : sequence of str
        Further notes for the reader.
    """

    title: str
    facts: Sequence[str]
    whose: str
    curves: Sequence[Curve] = ()
    unit: str = "round"
    best: int | None = None
    scores: ModelScores | None = None
    importances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    importance_kind: str = ""
    shap: Sequence[Spread] = ()
    shap_of: str = "adds to the margin"
    sent: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timeline: Timeline | None = None
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    learned: Mapping[str, Sequence[str]] = field(default_factory=dict)
    noise: Sequence[str] = ()
    notes: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[Section, str] = field(default_factory=dict)


def scores_of_classes(
    of: str, y: NDArray[np.intp], by_model: Mapping[str, NDArray[np.float64]], classes: Sequence[Any], pooled: str = ""
) -> ModelScores:
    """Return scores of class probabilities.

    Parameters
    ----------
    of : str
        The rows, in words.
    y : int (n_rows,)
        Class numbers.
    by_model : mapping of str to float64 (n_rows, n_classes)
        Each model's probabilities, by its name.
    classes : sequence
        Labels by class number.
    pooled : str
        The name of the model that was trained on one table, if any.
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
    return ModelScores(of=of, values=values, roc=roc, calibration=calibration)


def scores_of_numbers(
    of: str,
    y: NDArray[np.float64],
    by_model: Mapping[str, NDArray[np.float64]],
    pooled: str = "",
    *,
    means: bool = True,
) -> ModelScores:
    """Return scores of predicted numbers, float64 (n_rows,), by model; `means`: whether they estimate means."""
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
    return ModelScores(of=of, values=values, calibration=calibration if means else (), of_numbers=True)


def _plain(name: str, by_model: Mapping[str, Any], pooled: str) -> str:
    """Return the name of a line; the pooled model shares the name, and so the colour, of the compared model."""
    return next(iter(by_model)) if name == pooled else name


def _roc(name: str, is_class: NDArray[np.bool_], p: NDArray[np.float64], pooled: bool) -> Points:
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(is_class, p)
    at = np.unique(np.linspace(0, len(false) - 1, _MOST_POINTS).round().astype(int))
    return Points(name, false[at].tolist(), true[at].tolist(), pooled)


def _tenths(name: str, predicted: NDArray[np.float64], so: NDArray[np.float64], pooled: bool) -> Points:
    """Return mean prediction and mean outcome of rows, in tenths by prediction; equal predictions stay together."""
    edges = np.unique(np.quantile(predicted, np.linspace(0.0, 1.0, _TENTHS + 1)[1:-1]))
    tenth = np.searchsorted(edges, predicted, side="left")
    rows = np.bincount(tenth)
    means = [np.bincount(tenth, of)[rows > 0] / rows[rows > 0] for of in (predicted, so)]
    return Points(name, means[0].tolist(), means[1].tolist(), pooled)
