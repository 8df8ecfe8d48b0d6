"""Platt's two numbers: unbiased probabilities from margins in any unit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.svm import LinearSVC

from treaty.linear.preparation import fit_calibration, probabilities


def margins_and_labels(seed: int = 0, rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Return margins whose log-odds are 3 u - 2."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal(rows)
    return u, (rng.random(rows) < probabilities(3.0 * u - 2.0)).astype(float)


def test_true_slope_and_offset_are_found_and_the_mean_probability_is_the_rate():
    u, y = margins_and_labels(rows=40_000)
    made = fit_calibration(u, y)
    assert made.slope == pytest.approx(3.0, abs=0.1)
    assert made.offset == pytest.approx(-2.0, abs=0.1)
    assert probabilities(made.log_odds(u)).mean() == pytest.approx(y.mean(), abs=1e-4)
    assert abs(probabilities(u).mean() - y.mean()) > 0.1, "margins were log-odds already: the test proves nothing"


def test_probabilities_are_those_of_scikit_learns_platt_scaling():
    X = np.random.default_rng(1).standard_normal((500, 3))
    y = (X @ [1.0, -2.0, 0.5] + np.random.default_rng(2).standard_normal(500) > 0.7).astype(int)
    machine = LinearSVC().fit(X, y)
    theirs = CalibratedClassifierCV(FrozenEstimator(machine), method="sigmoid", cv=2, ensemble=False).fit(X, y)
    u = machine.decision_function(X)
    ours = probabilities(fit_calibration(u, y.astype(float)).log_odds(u))
    np.testing.assert_allclose(ours, theirs.predict_proba(X)[:, 1], atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(-100.0, 100.0))
def test_the_unit_of_margins_does_not_matter(scale, shift):
    u, y = margins_and_labels(rows=300)
    np.testing.assert_allclose(
        fit_calibration(scale * u + shift, y).log_odds(scale * u + shift), fit_calibration(u, y).log_odds(u), atol=1e-4
    )


def test_separable_classes_get_finite_log_odds():
    u = np.linspace(-1.0, 1.0, 100)
    made = fit_calibration(u, (u > 0.0).astype(float))
    assert 1.0 < made.slope < 1000.0


@pytest.mark.parametrize("rows", [52, 100, 101, 257, 400])
@pytest.mark.parametrize("margin", [0.1, 0.7, -3.3, 0.0])
def test_margins_that_are_all_the_same_get_the_rate(rows, margin):
    """Their deviation is not always 0: a mean of equal numbers is rounded."""
    y = (np.arange(rows) % 4 == 0).astype(float)
    made = fit_calibration(np.full(rows, margin), y)
    assert made.slope == pytest.approx(0.0, abs=1e-6)
    assert probabilities(made.log_odds(np.array([margin])))[0] == pytest.approx(y.mean(), abs=2.0 / rows)


def test_rows_count_by_their_weight():
    u, y = margins_and_labels(rows=400)
    weight = np.where(np.arange(400) < 200, 2.0, 0.0)
    made = fit_calibration(u, y, weight)
    assert np.average(probabilities(made.log_odds(u)), weights=weight) == pytest.approx(y[:200].mean(), abs=5e-3)
    turned = np.where(weight > 0.0, y, 1.0 - y)
    assert fit_calibration(u, turned, weight) == made
    assert fit_calibration(u, turned) != made
