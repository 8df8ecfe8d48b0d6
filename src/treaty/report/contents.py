"""What a report shows of a finished run, whether of a fitted estimator or of a job; and scores of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treaty.messaging.transcript import Timeline

# points of a ROC curve: more would not be visible
_MOST_POINTS = 200
_MOST_CLASSES = 6
_TENTHS = 10

Section = Literal[
    "scores", "curves", "roc", "calibration", "importances", "shap", "messages", "timeline", "seconds", "learned",
    "noise", "parameters", "versions",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one set of rows after each round or epoch."""

    name: str
    metric: str
    values: Sequence[float]
    # of the same model trained on one table, for comparison
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
    """Scores of predictions for rows with known labels."""

    # the rows, in words
    of: str
    # by model and metric
    values: Mapping[str, Mapping[str, float]]
    # false and true positive rates; with more than two classes, each against the rest; empty for numbers
    roc: Sequence[Points] = ()
    # for rows in tenths by their prediction: mean prediction, and the observed share of the second class. With more
    # than two classes, the share of correct ones by the predicted class's probability; for numbers, the mean label
    calibration: Sequence[Points] = ()
    of_numbers: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles 0.05, 0.25, 0.5, 0.75, 0.95 of what a column adds to rows' margins (TreeSHAP); no single row."""

    name: str
    # absolute contribution
    mean: float
    # of the rows with a value up to, or above, the column's median
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    # of all rows: of categories, and of all columns of a party together
    every: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a report shows."""

    title: str
    # a few words each: rows, columns, date
    facts: Sequence[str]
    # a sentence: whose view of the run this is, and who may see the page
    whose: str
    curves: Sequence[Curve] = ()
    # of the curves: "round" or "epoch"
    unit: str = "round"
    # the round, or epoch, that early stopping kept
    best: int | None = None
    scores: ModelScores | None = None
    # by party and column, or its pseudonym
    importances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # a sentence on what these numbers are
    importance_kind: str = ""
    shap: Sequence[Spread] = ()
    # label of the figure's axis
    shap_of: str = "adds to the margin"
    # by "sender -> receiver": bytes and, if they are known, messages and bytes by message type
    sent: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timeline: Timeline | None = None
    # by party ("" for all together) and phase
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # by party, or role, beyond its own data
    learned: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # sentences on what noise has cost
    noise: Sequence[str] = ()
    # further sentences for the reader
    notes: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    # why sections are empty
    absent: Mapping[Section, str] = field(default_factory=dict)


def scores_of_classes(
    of: str, y: NDArray[np.intp], by_model: Mapping[str, NDArray[np.float64]], classes: Sequence[Any], pooled: str = ""
) -> ModelScores:
    """Return scores of class probabilities, for class numbers `y`.

    `by_model` has each model's probabilities, float64 (n_rows, n_classes); `pooled` is the name of the model that was
    trained on one table, if any. `of` describes the rows.
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
                line = f"{classes[number]} against the rest" if several else _line(name, by_model, pooled)
                false, true, _ = metrics.roc_curve(y == number, p[:, number])
                at = np.unique(np.linspace(0, len(false) - 1, _MOST_POINTS).round().astype(int))
                roc.append(Points(line, false[at].tolist(), true[at].tolist(), is_pooled))
        right, sure = (np.argmax(p, axis=1) == y, p.max(axis=1)) if several else (y == 1, p[:, 1])
        calibration.append(_tenths(_line(name, by_model, pooled), sure, right.astype(float), is_pooled))
    return ModelScores(of=of, values=values, roc=roc, calibration=calibration)


def scores_of_numbers(
    of: str,
    y: NDArray[np.float64],
    by_model: Mapping[str, NDArray[np.float64]],
    pooled: str = "",
    *,
    means: bool = True,
) -> ModelScores:
    """Return scores of predicted numbers, float64 (n_rows,), by model; `means`: whether the models predict means."""
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
        _tenths(_line(name, by_model, pooled), predicted, y, name == pooled) for name, predicted in by_model.items()
    ]
    return ModelScores(of=of, values=values, calibration=calibration if means else (), of_numbers=True)


def _line(name: str, by_model: Mapping[str, Any], pooled: str) -> str:
    """Return a line's name; the pooled model has the name, and so the colour, of the model it is compared with."""
    return next(iter(by_model)) if name == pooled else name


def _tenths(name: str, predicted: NDArray[np.float64], so: NDArray[np.float64], pooled: bool) -> Points:
    """Return mean prediction and mean outcome of rows, in tenths by prediction; equal predictions stay together."""
    edges = np.unique(np.quantile(predicted, np.linspace(0.0, 1.0, _TENTHS + 1)[1:-1]))
    tenth = np.searchsorted(edges, predicted, side="left")
    rows = np.bincount(tenth)
    means = [np.bincount(tenth, of)[rows > 0] / rows[rows > 0] for of in (predicted, so)]
    return Points(name, means[0].tolist(), means[1].tolist(), pooled)
