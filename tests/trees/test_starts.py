"""Where training starts if nobody says: XGBoost's own estimate, and what holds of it for any labels and weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from treaty.trees.losses import TallyUnits, bound_of_weights
from treaty.trees.objectives import make_objective

xgboost = pytest.importorskip("xgboost", minversion="3.1")  # before, classes had one start between them

OBJECTIVES = {
    "squared_error": {"objective": "reg:squarederror"},
    "poisson": {"objective": "count:poisson"},
    "tweedie": {"objective": "reg:tweedie"},
    "gamma": {"objective": "reg:gamma"},
    "quantile": {"objective": "reg:quantileerror", "quantile_alpha": 0.8},
    "median": {"objective": "reg:absoluteerror"},
    "logistic": {"objective": "binary:logistic"},
    "softmax": {"objective": "multi:softprob", "num_class": 4},
    "ndcg": {"objective": "rank:ndcg"},
    "pairwise": {"objective": "rank:pairwise"},
}
SUMMED = ("logistic", "softmax", "squared_error", "poisson", "huber")
RNG = np.random.default_rng(0)
N_ROWS = 400
LABELS = {
    "plain": {"numbers": RNG.gamma(2.0, 3.0, N_ROWS), "classes": RNG.integers(0, 4, N_ROWS)},
    "huge": {"numbers": 1e8 * RNG.gamma(2.0, 3.0, N_ROWS), "classes": RNG.choice(4, N_ROWS, p=[0.9, 0.05, 0.04, 0.01])},
    "small": {"numbers": 1e-4 * RNG.gamma(2.0, 3.0, N_ROWS), "classes": (np.arange(N_ROWS) == 7).astype(int)},
    "mostly-zero": {"numbers": np.where(np.arange(N_ROWS) == 7, 3.0, 0.0), "classes": np.full(N_ROWS, 2)},
}
WEIGHTS = {
    "no-weights": None,
    "random": RNG.uniform(0.1, 3.0, N_ROWS),
    "extreme": 10.0 ** RNG.uniform(-6.0, 4.0, N_ROWS),
    "zeros": RNG.integers(0, 2, N_ROWS).astype(np.float64),
}


def xgboosts_start(parameters, y, weight=None, groups=None):
    rows = xgboost.DMatrix(np.arange(len(y))[:, None], y, weight=weight, group=groups)
    booster = xgboost.train({**parameters, "nthread": 1, "max_depth": 1}, rows, num_boost_round=1)
    kept = json.loads(booster.save_config())["learner"]["learner_model_param"]["base_score"]
    return np.atleast_1d(json.loads(kept))


def start(name, y, weight=None, **options):
    own = {"quantile_alpha": 0.8} if name == "quantile" else {}
    name = "quantile" if name == "median" else name
    loss = make_objective(name, y, weight, n_classes=4, base_score=None, fractional_bits=40, **own, **options)
    return np.array(loss.start)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_start_is_xgboosts(objective, labels, weights):
    y = LABELS[labels]["numbers"].astype(np.float32).astype(np.float64)  # XGBoost has float32
    weight = None if WEIGHTS[weights] is None else WEIGHTS[weights].astype(np.float32).astype(np.float64)
    if objective == "gamma":
        y = np.where(y > 0.0, y, np.float32(0.1)).astype(np.float64)
    groups, target = None, y
    if objective in ("logistic", "softmax", "ndcg", "pairwise"):
        y = target = LABELS[labels]["classes"].astype(np.float64)
        if objective == "logistic":
            y = target = (y > 0).astype(np.float64)
    if objective in ("ndcg", "pairwise"):
        groups, target = [N_ROWS // 2] * 2, np.column_stack([y, np.repeat([0.0, 1.0], N_ROWS // 2)])
        ours, weight = start(objective, target, None if weight is None else np.repeat([2.0, 3.0], N_ROWS // 2)), None
    else:
        ours = start(objective, target, weight)
    theirs = xgboosts_start(OBJECTIVES[objective], y, weight, groups)
    if objective in ("squared_error", "poisson", "tweedie", "gamma", "quantile", "median"):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9 * y.max())
    else:
        np.testing.assert_allclose(ours, theirs, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("scale", [0.1, 5.0, 300.0])
def test_a_weight_of_the_second_class_is_one_of_its_rows_and_starts_nearer_the_optimum_than_xgboosts_step(scale):
    """XGBoost takes one Newton step from 0.5 where it is given `scale_pos_weight`, but the share where rows have it."""
    y = (np.arange(N_ROWS) % 29 == 0).astype(np.float64)
    weight = np.where(y == 1.0, scale, 1.0)
    (ours,) = start("logistic", y, weight)
    (theirs,) = xgboosts_start({"objective": "binary:logistic"}, y, weight)
    (step,) = xgboosts_start({"objective": "binary:logistic", "scale_pos_weight": scale}, y)
    assert ours == pytest.approx(theirs, abs=1e-6)
    share = np.average(y, weights=weight)
    assert step == pytest.approx(1.0 / (1.0 + np.exp(2.0 - 4.0 * share)), abs=1e-6)

    def loss(p):
        return -np.average(np.where(y == 1.0, np.log(p), np.log1p(-p)), weights=weight)

    assert loss(ours) < loss(step)


def test_xgboosts_step_for_huber_leaves_the_labels_and_ours_stays_among_them():
    y = 1000.0 + RNG.gamma(2.0, 3.0, N_ROWS)
    assert not y.min() <= xgboosts_start({"objective": "reg:pseudohubererror"}, y)[0] <= y.max()
    np.testing.assert_allclose(start("huber", y), xgboosts_start({"objective": "reg:absoluteerror"}, y), rtol=1e-6)


@pytest.mark.parametrize("name", ["poisson", "tweedie"])
def test_counts_that_are_all_zero_start_where_there_is_a_logarithm_and_xgboost_has_none(name):
    assert xgboosts_start(OBJECTIVES[name], np.zeros(9))[0] == 0.0
    assert start(name, np.zeros(9))[0] == 0.5


SIZES = st.sampled_from([1e-4, 1.0, 1e8])
ROWS = st.integers(1, 60)


@st.composite
def labelled(draw):
    """Return an objective's name, labels that it takes, weights or None, and a cut of the rows in two."""
    name, n_rows = draw(st.sampled_from(SUMMED)), draw(ROWS)
    if name in ("logistic", "softmax"):
        y = draw(arrays(np.float64, n_rows, elements=st.sampled_from([0.0, 1.0] if name == "logistic" else range(4))))
    else:
        y = draw(SIZES) * draw(arrays(np.float64, n_rows, elements=st.floats(0.0, 1.0)))
        y = y if name == "poisson" else y * draw(st.sampled_from([-1.0, 1.0]))
    weight = draw(st.none() | arrays(np.float64, n_rows, elements=st.floats(1e-3, 1e3)))
    return name, y, weight, draw(st.integers(0, n_rows))


def tallied(name, y, weight, units):
    return make_objective(name, np.empty(0), None, n_classes=4).tallies(y, weight, units)


@given(labelled())
def test_sums_are_the_same_whoever_holds_which_rows(drawn):
    name, y, weight, cut = drawn
    loss = make_objective(name, np.empty(0), None, n_classes=4)
    units = TallyUnits.of(len(y), loss.label_bound(y), bound_of_weights(weight))
    parts = [
        tallied(name, y[of], None if weight is None else weight[of], units) for of in (slice(cut), slice(cut, None))
    ]
    np.testing.assert_array_equal(parts[0] + parts[1], tallied(name, y, weight, units))
    assert np.all(np.abs(parts[0]) <= cut * 2**units.bits)


@given(labelled())
def test_an_estimate_is_the_weighted_mean_or_share_within_the_labels(drawn):
    name, y, weight, _ = drawn
    if name == "huber":
        return  # a median where one party has all labels
    found = start(name, y, weight)
    if name == "softmax":
        shares = np.array([np.average(y == k, weights=weight) for k in range(4)])
        expected = np.log(shares + 1e-6)
        np.testing.assert_allclose(found, expected - expected.mean(), rtol=1e-6, atol=1e-5)
    elif name == "logistic":
        assert found[0] == pytest.approx(np.clip(np.average(y, weights=weight), 1e-6, 1.0 - 1e-6), abs=1e-7)
    elif name == "poisson" and not np.any(y):
        assert found[0] == 0.5
    else:
        largest = np.abs(y).max()
        assert found[0] == pytest.approx(np.average(y, weights=weight), rel=1e-6, abs=1e-9 * largest)
        assert y.min() - 1e-6 * largest <= found[0] <= y.max() + 1e-6 * largest


@given(labelled(), st.integers(-30, 30))
def test_an_estimate_does_not_depend_on_the_unit_of_weights(drawn, power):
    name, y, weight, _ = drawn
    if weight is not None:
        np.testing.assert_array_equal(start(name, y, weight), start(name, y, weight * 2.0**power))


def test_ten_million_rows_fit_the_sums():
    units = TallyUnits.of(10**7, 1.0, 1.0)
    assert 10**7 * 2**units.bits < 2**62
    assert units.bits >= 37
