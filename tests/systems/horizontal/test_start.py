"""Where a training by row starts: sums of labels in units that fit, once, and only where `base_score` is left out."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from systems.federboost_horizontal.playing import bins_told, dealt, options_of, pooled_on, role_input, train
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array
from treaty.systems.horizontal.members import Collector
from treaty.systems.horizontal.rows import LabelUnits, OwnLabels, TrainingStart
from treaty.trees.losses import TallyUnits


def labels_of(task="regression", **options):
    parts, _, classes = dealt(task, 3)
    party = type("Named", (), {"name": "p1"})()
    return OwnLabels(role_input(party, parts, options_of(**options), classes), parts["p1"], classes, "p0"), parts["p1"]


def start(*scores):
    return TrainingStart(Array.of(np.array(scores)))


FITTING = LabelUnits(2.0**10, 1.0, 40)


@pytest.mark.parametrize(
    "changes",
    [
        {"label": 2.0**4},  # labels reach 346
        {"label": 1500.0},
        {"label": float("nan")},
        {"label": float("inf")},
        {"weight": 0.5},
        {"weight": 3.0},
        {"bits": 58},  # sums of a hundred rows would not fit
    ],
    ids=str,
)
def test_units_that_labels_do_not_fit_are_refused(changes):
    labels, rows = labels_of()
    counted = labels.answer(FITTING)
    np.testing.assert_array_equal(counted, labels.loss.tallies(rows.y, None, TallyUnits(2.0**10, 1.0, 40)))
    with pytest.raises(PeerProtocolError, match=r"expected units that all labels fit.*at LabelUnits from p0"):
        labels.answer(msgspec.structs.replace(FITTING, **changes))


@pytest.mark.parametrize("told", [FITTING, start(150.0)], ids=["units", "start"])
def test_labels_are_not_summed_where_the_start_is_given(told):
    labels, _ = labels_of(base_score=0.5)
    with pytest.raises(PeerProtocolError, match="from p0"):
        labels.answer(told)


@pytest.mark.parametrize(
    ("task", "options", "told"),
    [
        ("binary", {}, start(0.0)),
        ("binary", {}, start(1.5)),
        ("binary", {}, start(0.1, 0.2)),
        ("multiclass", {}, start(0.1)),
        ("multiclass", {}, start(0.1, float("nan"), 0.2)),
        ("regression", {}, start(float("inf"))),
        ("regression", {"objective": "poisson"}, start(-1.0)),
        ("regression", {"objective": "poisson"}, start(0.0)),
    ],
)
def test_a_start_that_no_loss_has_is_refused(task, options, told):
    labels, _ = labels_of(task, **options)
    with pytest.raises(PeerProtocolError, match="TrainingStart"):
        labels.answer(told)


@pytest.mark.parametrize("kind", [LabelUnits, TrainingStart])
def test_labels_are_summed_once_in_a_search(monkeypatch, kind):
    """Sums in other units, or bounds from other starts, would tell more of the labels with each."""
    parts, _, classes = dealt("regression", 3)
    tell = Collector.broadcast

    def twice(self, message):
        tell(self, message)
        if isinstance(message, kind):
            tell(self, message)

    monkeypatch.setattr(Collector, "broadcast", twice)
    with pytest.raises(PeerProtocolError, match=kind.__name__):
        train(parts, options_of(), classes)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e12])
def test_a_party_without_any_label_but_zero_changes_no_unit(scale):
    """Its largest label is no power of two, and must not count as 1."""
    parts, whole, classes = dealt("regression", 3)
    parts = {name: replace(rows, y=(0.0 if name == "p1" else scale) * rows.y) for name, rows in parts.items()}
    whole = replace(whole, y=np.concatenate([rows.y for rows in parts.values()]))
    options = options_of()
    played = train(parts, options, classes, record_content=True)
    bins, _ = bins_told(played, "p1", whole.table.schema)
    forest, _ = pooled_on(bins, whole, options, classes)
    for part in played.results.values():
        assert part.forest.objective == forest.objective
        for one, other in zip(part.forest.trees, forest.trees, strict=True):
            np.testing.assert_array_equal(one.value, other.value)
