"""The logistic loss in pieces: the whole numbers that its definition gives, near the true ones, within its bounds."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.trees.logistic_pieces import LogisticPieces, loss_pieces, loss_shift
from treaty.trees.objectives import make_objective
from treaty.trees.splits import WHOLE_LIMIT, SplitRules, whole_weights

UNIT = 2.0**-12
LIMIT = 8 << 12
NEAR = sorted({8 * side * 4096 + by for side in (-1, 1) for by in (-1, 0, 1)} | {-1, 0, 1, -15, -16, 15, 16, 17})
KNOTS = [knot * 4096 + by for knot in range(-7, 8) for by in (-1, 0, 1)]
FAR = [sign * far for sign in (-1, 1) for far in (9 << 12, 10**6, 2**40)]


@cache
def curve(steps: int) -> tuple[Decimal, Decimal]:
    """Return p and p (1 - p) at a margin in units of 2^-9."""
    p = 1 / (1 + (Decimal(-steps) / 512).exp())
    return p, p * (1 - p)


@cache
def table(bits: int) -> list[list[tuple[int, int]]]:
    """Return (offset, slope) of the 16 pieces of p, and of those of h, from decimal numbers."""
    found = []
    for which in (0, 1):
        at = [curve(512 * knot)[which] * 2**bits for knot in range(-8, 9)]
        pieces = [(round(at[0]), 0)]
        for piece in range(1, 15):
            slope = round((at[piece + 1] - at[piece]) / 256)
            places = [curve(512 * (piece - 8) + 2 * low + 1)[which] * 2**bits - slope * low for low in range(256)]
            pieces.append((round((max(places) + min(places)) / 2), slope))
        found.append([*pieces, (round(at[-1]), 0)])
    return found


def plainly(x: int, bits: int) -> list[int]:
    """Return p and h of a margin in units of 2^-12."""
    piece, low = min(max(x // 4096 + 8, 0), 15), x % 4096 // 16
    return [offset + slope * low for offset, slope in (of[piece] for of in table(bits))]


def derivatives(x, y, bits=16, weight=None):
    margins = np.array(x, float)[:, None] * UNIT
    loss = make_objective("logistic_pieces", np.array(y, float), weight, fractional_bits=bits)
    grad, hess, clipped = loss.gradients(margins, np.array(y, float), weight)
    assert clipped == 0
    return loss, grad[0], hess[0]


@pytest.mark.parametrize("bits", [4, 10, 16, 20])
def test_derivatives_at_the_ends_of_pieces_are_those_of_the_definition(bits):
    margins = [*NEAR, *KNOTS, *FAR]
    for y in (0, 1):
        _, grad, hess = derivatives(margins, [y] * len(margins), bits)
        assert grad.tolist() == [plainly(x, bits)[0] - (y << bits) for x in margins]
        assert hess.tolist() == [plainly(x, bits)[1] for x in margins]


@given(
    rows=st.lists(st.tuples(st.integers(-(2**17), 2**17), st.integers(0, 1)), min_size=1, max_size=40),
    bits=st.integers(4, 24),
)
def test_derivatives_are_those_of_the_definition(rows, bits):
    x, y = zip(*rows, strict=True)
    _, grad, hess = derivatives(x, y, bits)
    assert grad.tolist() == [plainly(m, bits)[0] - (label << bits) for m, label in rows]
    assert hess.tolist() == [plainly(m, bits)[1] for m, _ in rows]


def test_a_piece_has_its_margins_from_its_lower_end_on_and_the_ends_go_on():
    steps = np.arange(-LIMIT - 5000, LIMIT + 5000)
    _, p, h = derivatives(steps, np.zeros(len(steps)))
    inside = (steps >= -LIMIT) & (steps < LIMIT)
    assert set(p[steps < -LIMIT]) == set(p[steps == -LIMIT]) == {p[inside][0]}
    assert set(p[steps >= LIMIT]) == set(p[steps == LIMIT - 1]) == {p[inside][-1]}
    # the lowest four bits of a margin do not count
    for of in (p, h):
        assert np.all(np.ptp(of[inside].reshape(-1, 16), axis=1) == 0)


def test_pieces_are_near_the_logistic_function_and_its_slope():
    margins = np.arange(-12.0, 12.0, UNIT)
    _, p, h = derivatives(margins / UNIT, np.zeros(len(margins)))
    true = 1.0 / (1.0 + np.exp(-margins))
    assert np.abs(p / 65536 - true).max() <= 0.0065
    assert np.abs(h / 65536 - true * (1.0 - true)).max() <= 0.0063


@pytest.mark.parametrize("bits", range(1, 41))
def test_derivatives_stay_within_the_public_bounds(bits):
    steps = np.arange(-LIMIT - 16, LIMIT + 17, 16)
    loss, p, h = derivatives(steps, np.zeros(len(steps)), bits)
    assert 0 <= p.min() <= p.max() <= 1 << bits == loss.grad_bound
    assert 0 <= h.min() <= h.max() <= loss.hess_bound


def test_whole_weights_multiply_whole_derivatives_and_others_are_rounded():
    x, y = [*NEAR, *KNOTS], np.arange(len(NEAR) + len(KNOTS)) % 2
    _, grad, hess = derivatives(x, y)
    _, heavy, heavy_hess = derivatives(x, y, weight=np.full(len(x), 3.0))
    np.testing.assert_array_equal(heavy, 3 * grad)
    np.testing.assert_array_equal(heavy_hess, 3 * hess)
    loss, light, light_hess = derivatives(x, y, weight=np.full(len(x), 0.3))
    assert loss.weight_unit == 0.5
    np.testing.assert_array_equal(light, np.rint(grad * 0.6))
    np.testing.assert_array_equal(light_hess, np.rint(hess * 0.6))


def test_the_start_and_leaf_values_are_multiples_of_a_unit():
    for base_score in (0.5, 0.123, 0.999):
        start = LogisticPieces(base_score=base_score).base_margins
        assert np.array_equal(start, np.rint(start / UNIT) * UNIT)
        assert start == pytest.approx(np.log(base_score / (1.0 - base_score)), abs=UNIT / 2)
    totals = np.random.default_rng(0).integers(-(10**6), 10**6, (500, 3)) * [1, 0, 0] + [0, 10**6, 30]
    # the learning rate is a multiple, too
    rules = {"grad_unit": 2.0**-16, "hess_unit": 2.0**-16, "learning_rate": 410 * UNIT}
    values = SplitRules(**rules, leaf_unit=UNIT).leaf_value(totals)
    assert np.array_equal(values, np.rint(values / UNIT) * UNIT)
    np.testing.assert_allclose(values, SplitRules(**rules).leaf_value(totals), rtol=0, atol=UNIT / 2)
    assert SplitRules(**rules | {"learning_rate": 0.1}, leaf_unit=UNIT).leaf_value(totals).tolist() == values.tolist()


@given(
    st.integers(-(1 << 36), 1 << 36), st.integers(0, 1 << 34), st.integers(1, 1 << 12), st.integers(1, 1 << 20)
)  # fmt: skip
def test_whole_weights_are_rounded_quotients_within_their_limits(grad, hess, rate, ridge):
    (weight,) = whole_weights(np.array([[grad, hess, 1]]), rate, ridge)
    exact = math.floor(Fraction(-grad * rate, hess + ridge) + Fraction(1, 2))
    assert weight == min(max(exact, -WHOLE_LIMIT), WHOLE_LIMIT - 1)


@pytest.mark.parametrize(
    ("given", "whole"), [(0.0, 0), (1e-6, 0), (7.6e-6, 0), (7.7e-6, 1), (0.1, 6554), (2.0, 131072)]
)
def test_the_least_gain_is_a_whole_number(given, whole):
    """In units of squared grad over hess, so that a protocol on shares compares it exactly."""
    rules = SplitRules(grad_unit=2.0**-16, hess_unit=2.0**-16, leaf_unit=UNIT, min_gain=0.0, min_split_loss=given)
    assert rules.threshold_in_units == whole


def test_several_classes_are_each_against_the_rest():
    """Each has the derivatives, and the start, of two classes."""
    rng = np.random.default_rng(3)
    x, y, weight = rng.integers(-LIMIT, LIMIT, (50, 3)), rng.integers(0, 3, 50), rng.integers(1, 9, 50).astype(float)
    loss = make_objective("pieces_of_classes", y.astype(float), weight, n_classes=3, base_score=None)
    grad, hess, _ = loss.gradients(x * UNIT, y.astype(float), weight)
    for k in range(3):
        of_two, own_grad, own_hess = derivatives(x[:, k], y == k, weight=weight)
        assert (grad[k].tolist(), hess[k].tolist()) == (own_grad.tolist(), own_hess.tolist())
        assert (loss.grad_bound, loss.hess_bound) == (of_two.grad_bound, of_two.hess_bound)
        start = make_objective("logistic_pieces", (y == k).astype(float), weight, base_score=None).base_margins
        assert loss.base_margins[k] == start[0] != 0.0


def test_probabilities_of_several_classes_are_finite_at_any_margin():
    loss = make_objective("pieces_of_classes", np.array([0.0, 1.0, 2.0]), None, n_classes=3)
    margins = np.array([[-1e4, -1e4, -1e4], [1e4, 0.0, -1e4], [-1e4, -1e4, 3.0]])
    p = loss.predictions(margins)
    np.testing.assert_allclose(p, [[1 / 3] * 3, [2 / 3, 1 / 3, 0], [0, 0, 1]], atol=1e-12)
    assert np.isfinite(loss.loss(margins, np.array([0.0, 2.0, 0.0]), None))


def test_the_loss_is_linear_in_pieces_near_the_true_one_and_limited():
    loss, margins = LogisticPieces(), np.arange(-9.0, 9.0, UNIT)[:, None]
    for label, sign in ((0.0, 1.0), (1.0, -1.0)):
        found, true = loss.row_losses(margins, np.full(len(margins), label)), np.logaddexp(0.0, sign * margins[:, 0])
        assert np.abs(found - true)[np.abs(margins[:, 0]) <= 7.0].max() < 0.016
        assert found.max() == found[np.argmax(true)] == pytest.approx(7.0, abs=0.001)
        # what falls as the margin gets better, but for jumps between pieces
        assert np.all(np.diff(found) * sign > -0.02)
    pieces = loss_pieces(16)
    for x in (-40000, -4096, -1, 0, 5, 12345, 28671, 28672, 10**6):
        piece, low = min(max(x // 4096 + 8, 0), 15), x % 4096 // 16
        expected = (pieces[0, piece] + pieces[1, piece] * low) / 65536
        assert loss.row_losses(np.array([[x * UNIT]]), np.zeros(1)) == expected


@pytest.mark.parametrize(("n", "unit"), [(1, 1.0), (100, 1.0), (4095, 1.0), (8191, 1.0), (8192, 2.0), (20_000, 4.0)])
@pytest.mark.parametrize("bits", [10, 16])
def test_the_loss_of_all_rows_is_rounded_down_to_15_bits(n, unit, bits):
    rng = np.random.default_rng(n)
    margins, y = np.rint(rng.normal(0, 2, (n, 1)) * 4096) * UNIT, rng.integers(0, 2, n).astype(float)
    loss = LogisticPieces(fractional_bits=bits)
    assert loss.loss(margins, y, None) == loss.row_losses(margins, y).sum() // unit * unit / n
    assert 2.0 ** (loss_shift(n, bits) - bits) == unit
    assert 8 * n / unit <= 1 << 16
    weighted = loss.loss(margins, y, np.ones(n))
    assert weighted == pytest.approx(loss.row_losses(margins, y).mean())
