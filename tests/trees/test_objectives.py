from __future__ import annotations

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sklearn.metrics import mean_gamma_deviance, mean_pinball_loss, mean_poisson_deviance, mean_tweedie_deviance

from treaty.errors import ConfigError, DataError
from treaty.trees.losses import BLOCK, Logistic
from treaty.trees.number_losses import Quantile, SquaredError
from treaty.trees.objectives import LOSSES, by_xgboost_name, loss_class, make_objective
from treaty.trees.splits import SplitRules

KINDS = [name for name, kind in LOSSES.items() if kind.takes != "groups" and name != "custom"]
SMOOTH = [
    name for name in KINDS if name not in ("quantile", "logistic_pieces", "pieces_of_classes", "squared_error_steps")
]
SEVERAL = ("softmax", "pieces_of_classes")
METRICS = {
    "logistic": "logloss", "softmax": "mlogloss", "squared_error": "rmse", "poisson": "poisson-deviance",
    "tweedie": "tweedie-deviance", "gamma": "gamma-deviance", "huber": "mphe", "quantile": "quantile",
    "logistic_pieces": "logloss", "pieces_of_classes": "ovr-logloss", "squared_error_steps": "rmse",
}  # fmt: skip


def _case(name, n_rows, seed, *, scale=3.0, bits=40, weighted=False):
    rng = np.random.default_rng(seed)
    n_outputs = 4 if name in SEVERAL else 1
    margins = rng.normal(0, scale, (n_rows, n_outputs))
    y = {
        "logistic": rng.integers(0, 2, n_rows).astype(float),
        "logistic_pieces": rng.integers(0, 2, n_rows).astype(float),
        "softmax": rng.integers(0, 4, n_rows).astype(float),
        "pieces_of_classes": rng.integers(0, 4, n_rows).astype(float),
        "squared_error": rng.normal(0, scale, n_rows),
        "squared_error_steps": rng.normal(0, scale, n_rows),
        "poisson": rng.poisson(scale, n_rows).astype(float),
        "tweedie": rng.poisson(1.0, n_rows) * rng.gamma(2.0, scale, n_rows),
        "gamma": rng.gamma(2.0, scale, n_rows) + 1e-9,
        "huber": rng.normal(0, scale, n_rows),
        "quantile": rng.normal(0, scale, n_rows),
    }[name]
    weight = rng.gamma(1.0, 2.0, n_rows) if weighted else None
    base_score = max(scale, 1.0) if name in ("poisson", "tweedie", "gamma") else 0.5
    own = {"huber_slope": 1.5, "quantile_alpha": 0.3, "tweedie_variance_power": 1.3}
    made = make_objective(name, y, weight, n_classes=4, base_score=base_score, fractional_bits=40, **own)
    return replace(made, fractional_bits=bits), margins, y, weight


def _decode(objective, grad, hess):
    return grad.T * objective.grad_unit, hess.T * objective.hess_unit


def _sum_of_losses(objective, margins, y):
    """The loss whose derivatives train: half the squared error or deviance, or the metric itself."""
    if isinstance(objective, SquaredError):
        return 0.5 * np.sum((margins[:, 0] - y) ** 2)
    return objective.loss(margins, y, None) * len(y) * (0.5 if "deviance" in objective.metric else 1.0)


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_equal_numerical_differentiation_of_the_loss(name):
    objective, margins, y, _ = _case(name, 12, 0, scale=1.0)
    grad, hess = _decode(objective, *objective.gradients(margins, y, None)[:2])
    step = 1e-4
    for row in range(len(y)):
        for output in range(objective.n_outputs):
            moved = []
            for by in (-step, 0.0, step):
                m = margins[row : row + 1].copy()
                m[0, output] += by
                moved.append(_sum_of_losses(objective, m, y[row : row + 1]))
            assert grad[row, output] == pytest.approx((moved[2] - moved[0]) / (2 * step), abs=1e-6)
            curvature = (moved[2] - 2 * moved[1] + moved[0]) / step**2
            factor = {"softmax": 2.0, "poisson": np.exp(0.7)}.get(name, 1.0)  # XGBoost's upper bounds of hessians
            assert hess[row, output] == pytest.approx(factor * curvature, abs=1e-5)


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("name", [*SMOOTH, "quantile"])
def test_gradients_are_the_derivatives_rounded_once(name, weighted):
    objective, margins, y, weight = _case(name, 500, 1, bits=16, weighted=weighted)
    grad, hess, _ = objective.gradients(margins, y, weight)
    s = np.ones((500, 1)) if weight is None else weight[:, None]
    if name == "logistic":
        p = 1 / (1 + np.exp(-margins))
        g, h = p - y[:, None], p * (1 - p)
    elif name == "softmax":
        p = np.exp(margins) / np.exp(margins).sum(1, keepdims=True)
        g, h = p - np.eye(4)[y.astype(int)], 2 * p * (1 - p)
    elif name == "poisson":
        mean = np.minimum(np.exp(margins), objective.grad_clip)
        g, h = mean - y[:, None], mean * np.exp(0.7)
    elif name == "tweedie":
        terms = y[:, None] * np.exp(-0.3 * margins), np.exp(0.7 * margins)
        a, b = (np.minimum(term, objective.grad_clip) for term in terms)
        g, h = b - a, 0.7 * b + 0.3 * a
    elif name == "gamma":
        a = np.minimum(y[:, None] * np.exp(-margins), objective.grad_clip)
        g, h = np.minimum(1.0, objective.grad_clip) - a, a
    elif name == "huber":
        z = margins - y[:, None]
        root = np.sqrt(1 + (z / 1.5) ** 2)
        g, h = z / root, 1.5**2 / (1.5**2 + z**2) / root
    elif name == "quantile":
        g, h = np.where(margins >= y[:, None], 0.7, -0.3), np.ones_like(margins)
    else:
        g, h = margins - y[:, None], np.ones_like(margins)
        g = np.clip(g, -objective.grad_clip, objective.grad_clip)
    decoded_g, decoded_h = _decode(objective, grad, hess)
    assert grad.dtype == hess.dtype == np.int64
    np.testing.assert_allclose(decoded_g, s * g, rtol=0, atol=objective.grad_unit * 0.5000001)
    np.testing.assert_allclose(decoded_h, s * h, rtol=0, atol=objective.hess_unit * 0.5000001)


def test_gradients_round_half_to_even():
    objective = SquaredError(fractional_bits=1)
    grad, _, _ = objective.gradients(np.array([[0.25], [0.75], [-0.25], [-0.75]]), np.zeros(4), None)
    assert grad.tolist() == [[0, 2, 0, -2]]


@settings(deadline=None, max_examples=100)
@given(
    name=st.sampled_from(KINDS),
    scale=st.sampled_from([0.1, 3.0, 100.0, 1e4]),
    bits=st.sampled_from([1, 8, 16, 24, 40]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_gradients_stay_within_the_public_bounds(name, scale, bits, weighted, seed):
    objective, margins, y, weight = _case(name, 50, seed, scale=scale, bits=bits, weighted=weighted)
    grad, hess, _ = objective.gradients(margins, y, weight)
    assert np.abs(grad).max() <= objective.grad_bound
    assert 0 <= hess.min()
    assert hess.max() <= objective.hess_bound


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_extreme_margins_are_finite(name):
    margins = np.array([[800.0], [-800.0], [1e308], [-1e308]]) * np.ones((1, 3 if name in SEVERAL else 1))
    margins[:, 0] *= 0.5
    y = np.array([0.0, 1.0, 1.0, 0.0]) + (0.5 if name == "gamma" else 0.0)
    objective = make_objective(name, y, None, n_classes=3)
    with np.errstate(over="ignore"):
        grad, hess, _ = objective.gradients(margins, y, None)
    assert np.abs(grad).max() <= objective.grad_bound
    assert hess.min() >= 0


@pytest.mark.parametrize("wrong", [[1.0, 0.0], [-1.0, 2.0]])
def test_a_gamma_loss_takes_labels_above_zero_alone(wrong):
    with pytest.raises(DataError, match="y: expected labels above 0 for objective='gamma', got 1 of 2"):
        LOSSES["gamma"].check_labels(np.array(wrong), "y")
    LOSSES["gamma"].check_labels(np.array([1e-9, 2.0]), "y")


def test_clipped_rows_are_counted_and_clipped():
    y = np.array([0.0, 1.0, 3.0, -3.0])
    objective = make_objective("squared_error", y, None)
    assert objective.grad_clip == 8.0  # a power of two, at least twice the farthest label
    margins = np.array([[8.0], [9.5], [12.0], [0.0]])
    grad, _, clipped = objective.gradients(margins, y, None)
    assert clipped == 2
    np.testing.assert_array_equal(grad[0] * objective.grad_unit, [8.0, 8.0, 8.0, 3.0])


def test_clipped_rows_are_counted_by_any_number_of_threads():
    n_rows = 40 * BLOCK
    objective = SquaredError(grad_clip=1.0)
    margins, y = np.full((n_rows, 1), 2.0), np.zeros(n_rows)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            assert objective.gradients(margins, y, None, threads=8)[2] == n_rows
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_the_same_with_any_number_of_threads(name):
    objective, margins, y, weight = _case(name, 12 * BLOCK + 5, 2, bits=16, weighted=True)
    one, three = objective.gradients(margins, y, weight), objective.gradients(margins, y, weight, threads=3)
    np.testing.assert_array_equal(one[0], three[0])
    np.testing.assert_array_equal(one[1], three[1])
    assert one[2] == three[2]


def test_whole_weights_count_rows_as_often():
    objective, margins, y, _ = _case("logistic", 20, 3, bits=20)
    weight = np.full(20, 3.0)
    once, thrice = objective.gradients(margins, y, None), objective.gradients(margins, y, weight)
    assert np.abs(thrice[0] - 3 * once[0]).max() <= 2
    assert np.abs(thrice[1] - 3 * once[1]).max() <= 2


@pytest.mark.parametrize(
    ("largest", "bound"), [(1.0, 1.0), (0.3, 0.5), (3.0, 4.0), (4.0, 4.0), (4.1, 8.0)], ids=lambda v: str(v)
)
def test_weight_bound_is_the_next_power_of_two(largest, bound):
    weight = np.array([0.1, largest])
    assert make_objective("logistic", np.zeros(2), weight).weight_bound == bound


@pytest.mark.parametrize(
    ("y", "base_score", "clip"),
    [([1.0, 2.0], 0.0, 4.0), ([1.0, 2.1], 0.0, 8.0), ([5.0, 5.0], 5.0, 1.0), ([0.0, 0.1], 0.0, 0.25)],
    ids=["exact-power", "rounded-up", "no-spread", "below-one"],
)
def test_grad_clip_is_the_power_of_two_above_twice_the_spread(y, base_score, clip):
    assert make_objective("squared_error", np.array(y), None, base_score=base_score).grad_clip == clip


@pytest.mark.parametrize("bits", [10, 16])
@pytest.mark.parametrize("base_score", [0.0, 1234.567])
def test_the_squared_error_in_steps_is_of_whole_numbers(bits, base_score):
    """Near the squared error's, clipped much later, and of margins on the grid exact."""
    rng = np.random.default_rng(bits)
    y = base_score + rng.normal(0, 20, 300)
    steps, plain = (
        make_objective(name, y, None, base_score=base_score, fractional_bits=bits)
        for name in ("squared_error_steps", "squared_error")
    )
    assert steps.grad_clip == plain.grad_clip == steps.margin_unit * 4096
    assert steps.base_margins[0] == pytest.approx(base_score, abs=steps.margin_unit / 2)
    whole = rng.integers(-16 << 12, 16 << 12, 300)
    margins = (steps.base_margins + whole * steps.margin_unit)[:, None]
    grad, hess, clipped = steps.gradients(margins, y, None)
    expected = np.rint(whole * 2.0 ** (bits - 12)) - np.rint((y - steps.base_margins) / steps.grad_clip * 2.0**bits)
    assert clipped == (np.abs(expected) > 16 << bits).sum()
    assert grad[0].tolist() == np.clip(expected, -16 << bits, 16 << bits).tolist()
    assert set(hess[0].tolist()) == {1 << bits}
    assert np.abs(grad).max() <= steps.grad_bound == 16 * plain.grad_bound
    assert steps.hess_bound == plain.hess_bound
    # leaf values are those of the squared error, in whole steps
    totals = np.column_stack([grad[0], hess[0], np.ones(300, np.int64)])
    units = {"grad_unit": steps.grad_unit, "hess_unit": steps.hess_unit, "learning_rate": 0.25, "min_child_weight": 0.5}
    near = np.abs(grad[0]) < 30 << bits
    found = SplitRules(**units, leaf_unit=steps.margin_unit).leaf_value(totals)[near]
    np.testing.assert_allclose(found, SplitRules(**units).leaf_value(totals)[near], rtol=0, atol=steps.margin_unit / 2)
    assert np.array_equal(found, np.rint(found / steps.margin_unit) * steps.margin_unit)


@pytest.mark.parametrize("name", KINDS)
def test_sums_that_could_overflow_are_refused(name):
    objective = LOSSES[name](fractional_bits=40, weight_bound=4.0)
    fits = -(-(2**62) // max(objective.grad_bound, objective.hess_bound))
    objective.check_sums(fits - 1)
    with pytest.raises(ConfigError, match="do not fit 62 bits"):
        objective.check_sums(fits)


@pytest.mark.parametrize(
    ("name", "base_score", "margin"),
    [
        ("logistic", 0.5, 0.0), ("logistic", 0.2, np.log(0.25)), ("softmax", 0.5, 0.5), ("squared_error", -3.0, -3.0),
        ("poisson", 2.0, np.log(2.0)), ("tweedie", 0.2, np.log(0.2)), ("gamma", 0.2, np.log(0.2)),
        ("huber", -3.0, -3.0), ("quantile", -3.0, -3.0),
    ],
    ids=str,
)  # fmt: skip
def test_base_margin_follows_base_score(name, base_score, margin):
    objective = make_objective(name, np.array([0.0, 1.0]), None, base_score=base_score)
    assert objective.base_margins == pytest.approx(margin, abs=1e-15)


@pytest.mark.parametrize("base_score", [0.0, 1.0, -0.5, 2.0])
def test_base_score_of_a_classifier_must_be_a_probability(base_score):
    with pytest.raises(ConfigError, match="base_score"):
        make_objective("logistic", np.array([0.0, 1.0]), None, base_score=base_score)


@pytest.mark.parametrize("name", KINDS)
def test_predictions_are_the_means_of_the_margins(name):
    objective, margins, _, _ = _case(name, 30, 4)
    p = objective.predictions(margins)
    assert p.shape == margins.shape
    if name in ("squared_error", "squared_error_steps", "huber", "quantile"):
        np.testing.assert_array_equal(p, margins)
    elif name in ("poisson", "tweedie", "gamma"):
        np.testing.assert_allclose(np.log(p), margins, rtol=1e-9)
    elif name in ("logistic", "logistic_pieces"):
        np.testing.assert_allclose(np.log(p / (1 - p)), margins, rtol=1e-9)
    elif name == "pieces_of_classes":
        own = 1 / (1 + np.exp(-margins))
        np.testing.assert_allclose(p, own / own.sum(axis=1, keepdims=True), rtol=1e-9)
    else:
        np.testing.assert_allclose(p.sum(axis=1), 1.0)
        np.testing.assert_allclose(np.log(p[:, 1:] / p[:, :1]), margins[:, 1:] - margins[:, :1], rtol=1e-9)


@pytest.mark.parametrize(("name", "metric"), METRICS.items())
def test_loss_is_the_weighted_metric(name, metric):
    objective, margins, y, weight = _case(name, 40, 5, weighted=True)
    p = objective.predictions(margins)
    if name.startswith("squared_error"):
        expected = np.sqrt(np.average((p[:, 0] - y) ** 2, weights=weight))
    elif name == "poisson":
        expected = mean_poisson_deviance(y, p[:, 0], sample_weight=weight)
    elif name == "tweedie":
        expected = mean_tweedie_deviance(y, p[:, 0], sample_weight=weight, power=1.3)
    elif name == "gamma":
        expected = mean_gamma_deviance(y, p[:, 0], sample_weight=weight)
    elif name == "quantile":
        expected = mean_pinball_loss(y, p[:, 0], sample_weight=weight, alpha=0.3)
    elif name == "huber":
        expected = np.average(1.5**2 * (np.sqrt(1 + ((p[:, 0] - y) / 1.5) ** 2) - 1), weights=weight)
    elif name == "pieces_of_classes":
        signs = np.where(y[:, None] == np.arange(margins.shape[1]), -1.0, 1.0)
        expected = np.average(np.logaddexp(0.0, signs * margins).sum(axis=1), weights=weight)
    else:
        of_label = p[np.arange(40), y.astype(int)] if name in SEVERAL else np.where(y == 1, p[:, 0], 1 - p[:, 0])
        expected = np.average(-np.log(of_label), weights=weight)
    assert objective.metric == metric
    # in pieces
    pieces = {"logistic_pieces": 1, "pieces_of_classes": margins.shape[1]}
    near = {"abs": 0.016 * pieces[name]} if name in pieces else {"rel": 1e-9}
    assert objective.loss(margins, y, weight) == pytest.approx(expected, **near)


# ---------------------------------------------------------------- labels after randomised response


def _channel(n_classes, epsilon):
    """Return what a label of each class (row) becomes with which chance (column)."""
    total = np.exp(epsilon) + n_classes - 1
    return np.full((n_classes, n_classes), 1 / total) + np.eye(n_classes) * (np.exp(epsilon) - 1) / total


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("name", ["logistic", "logistic_pieces", "softmax", "pieces_of_classes"])
def test_gradients_of_noisy_labels_are_those_of_the_true_ones_on_average(name, epsilon):
    plain, margins, y, weight = _case(name, 40, 6, bits=30, weighted=True)
    noisy = make_objective(name, y, weight, n_classes=4, fractional_bits=30, epsilon=epsilon)
    true_grad, true_hess, _ = plain.gradients(margins, y, weight)
    n_classes = 4 if name in SEVERAL else 2
    chance = _channel(n_classes, epsilon)[y.astype(int)]
    mean = np.zeros(true_grad.shape)
    for k in range(n_classes):
        grad, hess, _ = noisy.gradients(margins, np.full(40, float(k)), weight)
        np.testing.assert_array_equal(hess, true_hess)
        mean += chance[:, k] * grad
    np.testing.assert_allclose(mean, true_grad, rtol=0, atol=1.0 + 1e-9)  # two roundings of half a unit


def test_binary_debiasing_is_the_papers():
    y, epsilon = np.array([0.0, 1.0]), 1.3
    objective = make_objective("logistic", y, None, fractional_bits=40, epsilon=epsilon)
    grad, _, _ = objective.gradients(np.zeros((2, 1)), y, None)
    debiased = (y * (np.exp(epsilon) + 1) - 1) / (np.exp(epsilon) - 1)
    np.testing.assert_allclose(grad[0] * objective.grad_unit, 0.5 - debiased, rtol=1e-11)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_grad_bound_of_noisy_labels_is_tight(n_classes, epsilon):
    name = "logistic" if n_classes == 2 else "softmax"
    y = np.arange(n_classes, dtype=float)
    objective = make_objective(name, y, None, n_classes=n_classes, epsilon=epsilon)
    bound = (np.exp(epsilon) + max(n_classes - 2, 0)) / (np.exp(epsilon) - 1) * 2**16
    assert objective.grad_bound == pytest.approx(bound, abs=1.001)
    margins = np.full((n_classes, objective.n_outputs), -800.0)  # sure that it is none of the labels
    if name == "softmax":
        margins[np.arange(n_classes), (np.arange(n_classes) + 1) % n_classes] = 0.0
    assert np.abs(objective.gradients(margins, y, None)[0]).max() >= objective.grad_bound - 1


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    n_classes=st.integers(2, 5),
    epsilon=st.floats(2.0**-20, 50.0),
    bits=st.sampled_from([1, 16, 30]),
    largest=st.floats(0.01, 1000.0),
    seed=st.integers(0, 2**32),
)
def test_gradients_of_noisy_labels_stay_within_the_public_bounds(n_classes, epsilon, bits, largest, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, n_classes, 50).astype(float)
    weight = rng.uniform(0.1, 1.0, 50) * largest
    name = "logistic" if n_classes == 2 else "softmax"
    objective = make_objective(name, y, weight, n_classes=n_classes, fractional_bits=bits, epsilon=epsilon)
    margins = rng.normal(0, 1000.0, (50, objective.n_outputs))
    grad, hess, _ = objective.gradients(margins, y, weight)
    assert np.abs(grad).max() <= objective.grad_bound
    assert 0 <= hess.min()
    assert hess.max() <= objective.hess_bound


def test_noise_of_a_very_large_epsilon_is_none():
    plain, margins, y, weight = _case("softmax", 100, 7, bits=16, weighted=True)
    noisy = make_objective("softmax", y, weight, n_classes=4, epsilon=60.0)
    assert noisy.grad_bound == plain.grad_bound
    np.testing.assert_array_equal(noisy.gradients(margins, y, weight)[0], plain.gradients(margins, y, weight)[0])


def test_loss_is_that_of_the_labels_given_whatever_epsilon():
    plain, margins, y, weight = _case("logistic", 30, 8)
    noisy = make_objective("logistic", y, weight, epsilon=0.5)
    assert noisy.loss(margins, y, weight) == plain.loss(margins, y, weight)


def test_sums_of_debiased_labels_that_could_overflow_are_refused():
    Logistic(fractional_bits=40).check_sums(1000)
    with pytest.raises(ConfigError, match=r"debiased at epsilon=0\.0001"):
        Logistic(fractional_bits=40, epsilon=1e-4).check_sums(1000)


@pytest.mark.parametrize("name", [name for name in KINDS if LOSSES[name].takes != "classes"])
def test_label_noise_of_a_regression_is_refused(name):
    with pytest.raises(ConfigError, match="label_rr"):
        make_objective(name, np.array([0.0, 1.0]), None, epsilon=1.0)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e-9, np.inf, np.nan])
def test_epsilon_out_of_range_is_refused(epsilon):
    with pytest.raises(ConfigError, match="epsilon"):
        make_objective("logistic", np.array([0.0, 1.0]), None, epsilon=epsilon)


# ---------------------------------------------------------------- losses of numbers


@pytest.mark.parametrize("name", ["poisson", "tweedie"])
def test_a_mean_needs_labels_and_a_base_score_above_zero(name):
    with pytest.raises(DataError, match=f"bank: expected no label below 0 for objective='{name}', got 2 of 3"):
        LOSSES[name].check_labels(np.array([-1.0, 0.0, -0.5]), "bank")
    LOSSES[name].check_labels(np.array([0.0, 3.5]), "bank")
    for base_score in (0.0, -1.0):
        with pytest.raises(ConfigError, match="base_score above 0"):
            make_objective(name, np.array([0.0, 1.0]), None, base_score=base_score)


@pytest.mark.parametrize("name", ["poisson", "tweedie"])
def test_labels_far_above_the_base_score_need_more_bits(name):
    y = np.array([0.0, 1.0, 2e5])
    with pytest.raises(ConfigError, match=r"base_score=0\.5 .* or fractional_bits to at least \d+") as caught:
        make_objective(name, y, None)
    least = int(str(caught.value).rsplit(" ", 1)[1])
    make_objective(name, y, None, fractional_bits=least)
    with pytest.raises(ConfigError, match="too coarse"):
        make_objective(name, y, None, fractional_bits=least - 1)
    make_objective(name, y, None, base_score=1e5)


@pytest.mark.parametrize("step", [0.7, 3.5, 5.0, 20.0])
def test_a_hessian_at_the_base_score_needs_sixteen_steps_whatever_max_delta_step_is(step):
    make_objective("poisson", np.array([1.0, 2.0]), None, base_score=1.5, max_delta_step=step)
    y = np.array([0.0, 2e9])  # grad_clip is 2^32, and a hessian at 0.5 is 2^-33 e^step of it
    least = math.ceil(4 + 33 - step / math.log(2))
    make_objective("poisson", y, None, max_delta_step=step, fractional_bits=least)
    with pytest.raises(ConfigError, match=f"fractional_bits to at least {least}$"):
        make_objective("poisson", y, None, max_delta_step=step, fractional_bits=least - 1)


@pytest.mark.parametrize("name", ["squared_error", "poisson"])
def test_labels_whose_double_has_no_power_of_two_above_it_are_refused(name):
    with pytest.raises(ConfigError, match="scale the labels down"):
        make_objective(name, np.array([6e307, 0.0]), None)


@pytest.mark.parametrize("name", ["poisson", "tweedie"])
def test_means_beyond_their_bound_are_clipped_and_counted(name):
    objective = make_objective(name, np.array([0.0, 3.0]), None, fractional_bits=30)
    margins = np.array([[-1.0], [0.0], [1.0], [30.0], [800.0]])
    with np.errstate(over="ignore"):
        grad, hess, clipped = objective.gradients(margins, np.array([1.0, 2.0, 3.0, 0.0, 3.0]), None)
    assert clipped == 2
    assert grad[0, 3] == 2**30
    assert hess[0, 3] > 0


def test_the_bound_of_a_pseudo_huber_gradient_is_its_slope_whatever_the_labels():
    for y in (np.zeros(3), np.array([1e9, -1e9, 0.0])):
        objective = make_objective("huber", y, None, huber_slope=3.0)
        assert objective.grad_clip == 4.0
        grad, hess, _ = objective.gradients(np.array([[1e12], [-1e12], [0.0]]), np.zeros(3), None)
        np.testing.assert_allclose(grad[0] * objective.grad_unit, [3.0, -3.0, 0.0])
        assert hess[0].tolist() == [0, 0, 2**16]


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), alpha=st.floats(0.001, 0.999), seed=st.integers(0, 99)
)
def test_leaf_values_are_quantiles_of_residuals(sizes, alpha, seed):
    rng = np.random.default_rng(seed)
    residuals, starts = rng.integers(-9, 9, sum(sizes)) / 4, np.cumsum([0, *sizes])
    weight = rng.integers(1, 5, sum(sizes)).astype(float)
    loss = Quantile(quantile_alpha=alpha)
    plain, weighted = (loss.leaf_values(residuals, of, starts) for of in (None, weight))
    for k, (first, last) in enumerate(pairwise(starts)):
        of_leaf, weights = residuals[first:last], weight[first:last]
        assert plain[k] == pytest.approx(np.quantile(of_leaf, alpha, method="weibull"), abs=1e-9)
        assert weights[of_leaf <= weighted[k]].sum() >= alpha * weights.sum() - 1e-9
        assert weights[of_leaf < weighted[k]].sum() <= alpha * weights.sum() + 1e-9


def test_an_unknown_objective_is_named():
    with pytest.raises(ConfigError, match=r"expected objective to be one of squared_error, poisson, .* got 'poison'"):
        loss_class("poison")
    for name in ("custom", "reg:gama"):
        with pytest.raises(ConfigError, match="for classes leave it out"):
            loss_class(name)


def test_two_losses_cannot_share_an_xgboost_name_or_a_tag():
    class SameName(SquaredError, frozen=True, tag="same_name"):
        pass

    class SameTag(SquaredError, frozen=True, tag="squared_error"):
        xgboost_name = "reg:sametag"

    for second in (SameName, SameTag):
        with pytest.raises(ValueError, match=f"{second.__name__}: another loss has the tag .* or the xgboost_name"):
            by_xgboost_name([SquaredError, second])
    assert by_xgboost_name([SquaredError, Logistic])["binary:logistic"] == "logistic"
