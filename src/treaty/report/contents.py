"""What a report shows of a finished run, of a fitted estimator's or a job's alike."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treaty.messaging.transcript import Timeline

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
class ModelScores:
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


# ----------------------------------------------------------------
# HTML made in Python: whatever is not `Html` is escaped when it is put into a tag, so that a name stays a name.

STYLE = """
:root{color-scheme:light dark;--ink:#1b2330;--dim:#5a6474;--paper:#f6f7f9;--card:#fff;--line:#d9dee6;--link:#1c5fb0;
--good:#1a6e3c;--bad:#a8261f;--busy:#1c5fb0;--wait:#80560a}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e5e9f0;--dim:#a0aabb;--paper:#12161d;--card:#1b212b;
--line:#333c4a;--link:#82b4f5;--good:#6fcf97;--bad:#ff8f87;--busy:#82b4f5;--wait:#e5b85c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:64rem;font:1rem/1.5 system-ui,sans-serif;color:var(--ink);
background:var(--paper);overflow-wrap:anywhere}
header{margin-bottom:1rem}
h1{font-size:1.5rem;line-height:1.3;margin:0}
h2{font-size:1.15rem;margin:2rem 0 .6rem}
h3{font-size:1rem;margin:0;display:flex;flex-wrap:wrap;gap:.2rem .7rem;align-items:baseline}
h4{font-size:.875rem;margin:1rem 0 .2rem}
p{margin:.2rem 0}
a{color:var(--link)}
a:focus-visible{outline:2px solid;outline-offset:2px}
code{font:.875em ui-monospace,monospace}
ul{margin:0;padding:0 0 0 1.2rem}
article,.rows{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem 1rem;
margin:0 0 .8rem}
footer{margin-top:2.5rem;border-top:1px solid var(--line);padding-top:.6rem}
.dim,footer,.none{color:var(--dim);font-size:.875rem}
"""
"""What Treaty's pages look like in common, on a phone as on a desk, light or dark."""


class Html(str):
    """Text that is HTML already."""


def tag(name: str, *inside: str, **attributes: str | None) -> Html:
    """Return an element; what is inside is escaped unless it is `Html`. ``look`` stands for the attribute ``class``."""
    given = {"class" if key == "look" else key: value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{html.escape(value)}"' for key, value in given.items())
    return Html(f"<{name}{words}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Return parts one after another, escaped unless they are `Html`."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))
