"""A report in which everything is there, under names that others chose to do harm."""

from __future__ import annotations

from treaty.messaging.transcript import Timeline
from treaty.report.contents import Contents, Curve, ModelScores, Points, Spread

HOSTILE = (
    "<script>console.error(1)</script>\"'><img src=http://127.0.0.1:9/x onerror=alert(2)>&amp; $\\frac{$ ]]> \x00\n病"
)


def hostile() -> Contents:
    """Return contents with all sections."""
    pair = f"{HOSTILE} -> b"
    line = Points(HOSTILE, [0.0, 0.5, 1.0], [0.0, 0.8, 1.0])
    return Contents(
        title=HOSTILE,
        facts=[HOSTILE],
        whose=HOSTILE,
        curves=[Curve(HOSTILE, HOSTILE, [0.5, 0.4]), Curve(HOSTILE, HOSTILE, [0.5, 0.3], pooled=True)],
        best=2,
        scores=ModelScores(of=HOSTILE, values={HOSTILE: {HOSTILE: 0.5}}, roc=[line], calibration=[line]),
        importances={HOSTILE: {HOSTILE: 2.0, "x" * 500: -1.0}, "b": {"c": 1.0}},
        importance_kind=HOSTILE,
        shap=[
            Spread(HOSTILE, 1.0, [-2, -1, 0, 1, 2], [0, 1, 2, 3, 4]),
            Spread("all of b", 0.5, every=[-1, 0, 0, 0, 1]),
        ],
        sent={pair: {"messages": 3, "bytes": 5, "by_type": {HOSTILE: 5}}, "b -> a": {"bytes": 7}},
        timeline=Timeline(0.0, 0.5, {pair: [1, 2], "b -> a": [3]}),
        seconds={HOSTILE: {HOSTILE: 1.0}, "b": {"set-up": 2.0}},
        learned={HOSTILE: [HOSTILE], "b": []},
        noise=[HOSTILE],
        notes=[HOSTILE],
        parameters={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
    )
