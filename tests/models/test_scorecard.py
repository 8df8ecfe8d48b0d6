"""The arithmetic of points, and of points lost."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.data.table import to_table
from treaty.models.scorecard import ScorecardPart, as_woe, reasons_of
from treaty.statistics import bins_of_columns, with_labels

FRAME = pd.DataFrame(np.random.default_rng(1).normal(size=(400, 3)).round(1), columns=["a", "b", "c"])
numbers = st.floats(-4.0, 4.0)


def bins_and_table():
    rng = np.random.default_rng(0)
    table = to_table(FRAME)
    y = rng.integers(0, 2, 400)
    totals = int((y == 0).sum()), int((y == 1).sum())
    return [
        with_labels(of, np.bincount(of.assign(table)[y == 1], minlength=len(of.n_rows)), totals, "none")
        for of in bins_of_columns(table, "bank", max_bin=4)
    ], table


BINS, TABLE = bins_and_table()
OWN, THEIRS = to_table(FRAME[["a"]]), to_table(FRAME[["b", "c"]])


@given(
    betas=st.lists(numbers, min_size=3, max_size=3), alpha=numbers, pdo=st.floats(0.5, 100.0),
    base_odds=st.floats(0.1, 1000.0), rounded=st.booleans(),
)  # fmt: skip
def test_scores_are_a_line_of_the_log_odds_to_within_rounding(betas, alpha, pdo, base_odds, rounded):
    given = {"pdo": pdo, "base_score": 600.0, "base_odds": base_odds, "rounded": rounded, "made": "", "n_rows": 400}
    active, passive = ScorecardPart(**given, bins=BINS[:1]), ScorecardPart(**given, bins=BINS[1:])
    active.assign(np.array(betas[:1]), alpha)
    passive.assign(np.array(betas[1:]), None)
    score = active.score(active.log_odds(OWN) + passive.log_odds(THEIRS))
    z = alpha + np.column_stack(as_woe(BINS, TABLE).columns) @ np.array(betas)
    exact = 600.0 - pdo / np.log(2.0) * (z + np.log(base_odds))
    inexact = active.inexact + passive.inexact
    assert np.abs(score - exact).max() <= inexact + 1e-6
    assert inexact <= (2.0 if rounded else 0.0)
    if rounded:
        assert np.all(score == np.rint(score))


@given(
    losses=st.lists(st.lists(st.integers(-3, 9), min_size=4, max_size=4), min_size=1, max_size=6), k=st.integers(1, 6)
)
def test_reasons_are_the_largest_losses_in_order(losses, k):
    found = reasons_of(np.array(losses, float), "abcd", k)
    assert list(found) == [f"{what}_{place}" for place in range(1, min(k, 4) + 1) for what in ("reason", "lost")]
    for number, row in enumerate(losses):
        expected = sorted((loss for loss in row if loss > 0), reverse=True)[:k]
        lost = [found[name][number] for name in found if name.startswith("lost")]
        named = [found[name][number] for name in found if name.startswith("reason")]
        assert lost == [*expected, *[0.0] * (len(lost) - len(expected))]
        assert [row["abcd".index(name)] for name in named if name] == expected
        assert len({name for name in named if name}) == len(expected)


def test_neutral_points_are_those_of_no_evidence():
    card = ScorecardPart(pdo=20.0, base_score=600.0, base_odds=50.0, rounded=False, made="", n_rows=400, bins=BINS[:1])
    card.assign(np.array([-1.0]), 0.0)
    assert card.losses(OWN, "neutral")[:, 0] == pytest.approx(-card.factor * BINS[0].transform(TABLE))
    assert card.losses(OWN, "best").min() == 0.0
