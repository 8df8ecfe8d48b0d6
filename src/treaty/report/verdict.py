"""What a report says at its top: a verdict in words on the model and on the partners' data, with the main figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from treaty.report import OWN
from treaty.report.contents import Contents

_HIGHER = ("auc", "r²", "accuracy", "aucpr", "ndcg", "map")
# a smaller part of the error (a loss, or what a metric lacks to 1) is hardly a gain
_HARDLY = 0.02
# by metric: a model below this number hardly does what it is for; what the number is to be compared with
_WEAK = {
    "auc": (0.6, "separates the classes", "0.5 is guessing"),
    "r²": (0.05, "predicts the numbers", "0 is the mean of the labels"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric of rows; if known, also that of a model on own data only, and after the first round."""

    metric: str
    of: str
    value: float
    alone: float | None = None
    first: float | None = None

    def gain(self, other: float) -> float:
        """Return which part of another model's error the model avoids; negative if it is worse."""
        best = 1.0 if _is_higher_better(self.metric) else 0.0
        lacking = abs(best - other)
        return (lacking - abs(best - self.value)) / (lacking or 1.0)


def _is_higher_better(metric: str) -> bool:
    return metric.partition("@")[0].lower() in _HIGHER


def _scores(of: Contents) -> dict[str, float]:
    values = {} if of.scores is None else next(iter(of.scores.values.values()), {})
    return {metric: value for metric, value in values.items() if math.isfinite(value)}


def _measured(of: Contents) -> Measured | None:
    """Return the main metric: of the report's rows, or else of the last eval set, or else of the training rows."""
    if of.scores is not None and (values := _scores(of)):
        metric = next((each for each in values if each.lower() in ("auc", "rmse")), next(iter(values)))
        return Measured(metric, of.scores.of, values[metric], of.scores.values.get(OWN, {}).get(metric))
    own = [curve for curve in of.curves if not curve.pooled and not curve.alone]
    if not own:
        return None
    last = ([curve for curve in own if not curve.at] or own)[-1]
    kept = of.best is not None and not last.at
    value = last.values[min(of.best or 0, len(last.values)) - 1 if kept else -1]
    best = max if _is_higher_better(last.metric) else min
    beside = [each for each in of.curves if (each.name, each.metric) == (f"{last.name}, {OWN}", last.metric)]
    alone = next((best(each.values) if kept else each.values[-1] for each in beside), None)
    return Measured(last.metric, last.name, value, alone, last.values[0] if len(last.values) > 1 else None)


def verdict(of: Contents) -> Iterator[tuple[str, str]]:
    """Yield sentences, each after its state: "good", "wait" or "bad"."""
    measured = _measured(of)
    if measured is None:
        yield "", "This report has no losses and no labels: it cannot say how good the model is."
    for metric, value in _scores(of).items():
        if metric.lower() in _WEAK:
            least, what, compared = _WEAK[metric.lower()]
            state, word = ("good", "") if value >= least else ("bad", "hardly ")
            yield state, f"The model {word}{what}: {metric} is {value:.3g}; {compared}."
    if measured is not None and measured.first is not None:
        what = f"{measured.metric} on {measured.of} is {measured.first:.4g} after the first {of.unit}"
        if measured.gain(measured.first) > 0.0:
            yield "good", f"The model learned: {what} and {measured.value:.4g} at the end."
        else:
            yield "bad", f"The model did not learn: {what} and did not improve."
    if measured is not None and measured.alone is not None:
        gain = measured.gain(measured.alone)
        compared = f"{measured.metric} is {measured.value:.4g} with it and {measured.alone:.4g} without."
        if gain < _HARDLY:
            yield "wait", f"The partners' data adds {'almost ' if gain > 0.0 else ''}nothing: {compared}"
        elif of.scores is not None and of.scores.by_chance:
            yield "wait", f"The partners' data seems to help: {compared} On so few rows, that may be chance."
        else:
            yield "good", f"The partners' data helps: {compared}"
    elif _share(of) == 0.0:
        yield "wait", "The partners' columns add nothing: no split is on one of them."
    elif of.splits == "number" and list(of.importances) == [of.viewer]:
        count = sum(of.importances[of.viewer].values())
        yield "good" if count else "wait", f"{count:.0f} splits of the model are on columns of {of.viewer}."


def figures(of: Contents) -> Iterator[tuple[str, str]]:
    """Yield the main figures, each with what it is."""
    measured, share = _measured(of), _share(of)
    if measured is not None:
        yield f"{measured.value:.4g}", f"{measured.metric} of this model, on {measured.of}"
        if measured.alone is not None:
            yield f"{measured.alone:.4g}", f"{measured.metric} with {OWN}"
    if share is not None:
        what = "of the splits are on" if of.splits == "number" else "of the splits' gain is from"
        yield f"{share:.0%}", f"{what} the partners' columns"
    if of.seconds:
        yield f"{max(sum(phases.values()) for phases in of.seconds.values()):,.1f} s", "training"
    if of.sent:
        size = sum(totals["bytes"] for totals in of.sent.values()) / 1e6
        yield f"{size:,.{2 if size < 100.0 else 0}f} MB", "sent"


def _share(of: Contents) -> float | None:
    """Return the share of other parties' columns in all splits, by gain or number; None if it is not known."""
    sums = {party: sum(columns.values()) for party, columns in of.importances.items()}
    known = of.splits and len(sums) > 1 and sum(sums.values()) > 0.0
    return 1.0 - sums.get(of.viewer, 0.0) / sum(sums.values()) if known else None
