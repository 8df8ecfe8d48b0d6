"""What a report says at its top: a verdict in words on the model and on the partners' data, with the main figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from treaty.report.contents import OWN, POOLED, Contents, Curve

_HIGHER = ("auc", "r²", "accuracy", "aucpr", "ndcg", "map")
# a smaller part of the error (a loss, or what a metric lacks to 1) is hardly a gain
_HARDLY = 0.02
# by metric: a model below this number hardly does what it is for; what the number is to be compared with
_WEAK = {
    "auc": (0.6, "separates the classes", "0.5 is guessing"),
    "r²": (0.05, "predicts the numbers", "0 is the mean of the labels"),
}
_STATES = ("bad", "wait", "good")


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric of the model, of one trained on the own columns alone, and of one on the pooled table, if known."""

    metric: str
    # on which rows
    of: str
    value: float
    alone: float | None = None
    pooled: float | None = None
    # after the first round, if there are several
    first: float | None = None

    def gain(self, other: float) -> float:
        """Return which part of another model's error the model avoids; negative if it is worse."""
        best = 1.0 if _is_higher_better(self.metric) else 0.0
        lacking, less = abs(best - other), abs(best - other) - abs(best - self.value)
        return less / lacking if lacking else less


@dataclass(frozen=True, slots=True)
class Verdict:
    """How it went, in sentences; the figures are values with what they are."""

    # "good", "wait", "bad", or "" without sentences
    state: str
    sentences: list[str]
    figures: list[tuple[str, str]]


def verdict_of(of: Contents) -> Verdict:
    """Return the verdict on a run."""
    measured, share = _measured(of), _share(of)
    found = [*_on_quality(of, measured), *_on_partners(of, measured, share)]
    state = min((state for state, _ in found), key=_STATES.index, default="")
    return Verdict(state, [sentence for _, sentence in found], list(_figures(of, measured, share)))


def _measured(of: Contents) -> Measured | None:
    """Return the main metric: of the report's rows, or else of the last eval set, or else of the training rows."""
    if values := _scores(of):
        metric = next((each for each in values if each.lower() in ("auc", "rmse")), next(iter(values)))
        assert of.scores is not None
        others = [of.scores.values.get(other, {}).get(metric) for other in (OWN, POOLED)]
        return Measured(metric, of.scores.of, values[metric], *others)
    own = [curve for curve in of.curves if not curve.pooled and not curve.alone and len(curve.values)]
    # training rows, which have few points, say least
    own = [curve for curve in own if not curve.at] or own
    if not own:
        return None
    last = own[-1]
    alone = next((each for each in of.curves if each.alone and each.is_beside(last)), None)
    at = None if of.best is None or last.at else of.best - 1
    reached = None if alone is None else _chosen(alone, None if at is None else _best(alone))
    first = last.values[0] if len(last.values) > 1 else None
    return Measured(last.metric, last.name, _chosen(last, at), reached, first=first)


def _scores(of: Contents) -> dict[str, float]:
    """Return the model's own scores that are numbers."""
    values = {} if of.scores is None else next(iter(of.scores.values.values()), {})
    return {metric: value for metric, value in values.items() if math.isfinite(value)}


def _chosen(curve: Curve, at: int | None) -> float:
    return curve.values[-1 if at is None or at >= len(curve.values) else at]


def _best(curve: Curve) -> int:
    sign = -1.0 if _is_higher_better(curve.metric) else 1.0
    return min(range(len(curve.values)), key=lambda at: sign * curve.values[at])


def _share(of: Contents) -> float | None:
    """Return the share of other parties' columns in all splits, by gain or number; None if it is not known."""
    sums = {party: sum(columns.values()) for party, columns in of.importances.items()}
    total = sum(sums.values())
    if not of.splits or len(sums) < 2 or total <= 0.0:
        return None
    return 1.0 - sums.get(of.viewer, 0.0) / total


def _on_quality(of: Contents, measured: Measured | None) -> Iterator[tuple[str, str]]:
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


def _on_partners(of: Contents, measured: Measured | None, share: float | None) -> Iterator[tuple[str, str]]:
    theirs = f"The partners' {of.partners}"
    if measured is not None and measured.alone is not None:
        gain = measured.gain(measured.alone)
        compared = f"{measured.metric} is {measured.value:.4g} with them and {measured.alone:.4g} without"
        if gain <= 0.0:
            yield "wait", f"{theirs} add nothing: {compared}."
        elif gain < _HARDLY:
            yield "wait", f"{theirs} add almost nothing: {compared}."
        elif of.scores is not None and of.scores.by_chance:
            yield "wait", f"{theirs} seem to help: {compared}. On so few rows, the difference may be chance."
        else:
            yield "good", f"{theirs} help: {compared}."
    elif share == 0.0:
        yield "wait", f"{theirs} add nothing: no split is on one of them."
    elif of.splits == "number" and list(of.importances) == [of.viewer]:
        count = sum(of.importances[of.viewer].values())
        yield "good" if count else "wait", f"{count:.0f} splits of the model are on columns of {of.viewer}."
    if measured is not None and measured.pooled is not None:
        pooled = measured.pooled
        if math.isclose(measured.value, pooled, rel_tol=1e-6, abs_tol=1e-9):
            yield "good", "The model is as good as one trained on the pooled table."
        else:
            word = "worse" if measured.gain(pooled) < 0.0 else "better"
            yield "good", f"A model on the pooled table has {measured.metric} {pooled:.4g}: this model is {word}."


def _figures(of: Contents, measured: Measured | None, share: float | None) -> Iterator[tuple[str, str]]:
    if measured is not None:
        yield f"{measured.value:.4g}", f"{measured.metric} of this model, on {measured.of}"
        if measured.alone is not None:
            yield f"{measured.alone:.4g}", f"{measured.metric} with {OWN}"
            yield f"{measured.value - measured.alone:+.3g}", "difference"
    if share is not None:
        yield f"{share:.0%}", f"of the {of.splits} of all splits is the partners'"
    if of.seconds:
        yield f"{max(sum(phases.values()) for phases in of.seconds.values()):,.1f} s", "training"
    if of.sent:
        yield f"{sum(totals['bytes'] for totals in of.sent.values()) / 1e6:,.2f} MB", "sent"


def _is_higher_better(metric: str) -> bool:
    return metric.partition("@")[0].lower() in _HIGHER
