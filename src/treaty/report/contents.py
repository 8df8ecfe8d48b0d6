"""What a report shows of a finished run, of a fitted estimator's or a job's alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treaty.messaging.timeline import Timeline

Section = Literal[
    "scores", "curves", "roc", "calibration", "importances", "shap", "messages", "timeline", "seconds", "learned",
    "noise", "parameters", "versions",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric after each round, or epoch, of one set of rows.

    `pooled` says that it is of the same model trained on one table, which the run is compared with.
    """

    name: str
    metric: str
    values: Sequence[float]
    pooled: bool = False


@dataclass(frozen=True, slots=True)
class Points:
    """A line through points (x, y); `pooled` as of `Curve`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    pooled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What predictions of rows with known labels are worth.

    Attributes
    ----------
    of : str
        Which rows these are, in words.
    values : mapping of str to (mapping of str to float)
        By model, by the metric's name.
    roc : sequence of Points
        False positive rate and true positive rate; of more than two classes each against the rest. Empty for numbers.
    calibration : sequence of Points
        Of rows in tenths by their prediction: mean prediction, and what was so: the share of the second class, of more
        than two classes the share of right ones by the probability of the class predicted, of numbers the mean label.
    of_numbers : bool
    """

    of: str
    values: Mapping[str, Mapping[str, float]]
    roc: Sequence[Points] = ()
    calibration: Sequence[Points] = ()
    of_numbers: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """What a column adds to rows' margins (TreeSHAP), without any row: quantiles 0.05, 0.25, 0.5, 0.75, 0.95.

    `low` and `high` are of the rows whose value is at most, or above, the column's median; of a category, or of all
    columns of a party together, there is `every` alone, of all rows. `mean` is the mean absolute contribution.
    """

    name: str
    mean: float
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    every: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a report shows; what is empty is said to be absent, with the reason in `absent`.

    Attributes
    ----------
    title : str
    facts : sequence of str
        A few words each: rows, columns, date.
    whose : str
        Whose view of the run this is, and who may see the page, in a sentence.
    shap_of : str
        What the spreads are of: the axis of their figure.
    unit : str
        What curves are by: "round" or "epoch".
    best : int or None
        The round, or epoch, that early stopping kept.
    importances : mapping of str to (mapping of str to float)
        By party, by column, or its pseudonym.
    importance_kind : str
        What these numbers are, in a sentence.
    sent : mapping of str to mapping
        By "sender -> receiver": messages (where known), bytes, and bytes by message type (where known).
    seconds : mapping of str to (mapping of str to float)
        By party ("" for all together), by phase.
    learned : mapping of str to sequence of str
        What each party, or role, learned beyond its own data.
    noise : sequence of str
        What noise has cost, a sentence each.
    notes : sequence of str
        What a reader should know besides.
    """

    title: str
    facts: Sequence[str]
    whose: str
    curves: Sequence[Curve] = ()
    unit: str = "round"
    best: int | None = None
    scores: Scores | None = None
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
