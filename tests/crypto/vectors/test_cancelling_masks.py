"""Pairwise masks that cancel, and numbers in fixed point."""

from __future__ import annotations

import secrets
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.crypto.keystream import CancellingMasks, from_fixed, to_fixed, total
from treaty.errors import CryptoError


def givers(*names):
    seeds = {frozenset((a, b)): secrets.token_bytes(32) for a in names for b in names if a < b}
    return {a: CancellingMasks("job", "test", a, {b: seeds[frozenset((a, b))] for b in names if b != a}) for a in names}


@pytest.mark.parametrize("names", [["a"], ["b", "a"], ["a", "c", "b", "d"]], ids=len)
def test_masks_cancel_in_the_sum_alone(names):
    numbers = {name: [3 * k - 5, -(1 << 100), k] for k, name in enumerate(names)}
    masked = {name: giver.cover(numbers[name], 0, "test") for name, giver in givers(*names).items()}
    assert total(list(masked.values())) == [sum(column) for column in zip(*numbers.values(), strict=True)]
    if len(names) > 2:
        assert total(list(masked.values())[1:]) != [sum(c) for c in zip(*list(numbers.values())[1:], strict=True)]


def test_masked_numbers_are_uniform():
    of = givers("a", "b")
    top = [int(of["a"].cover([7], place, "test")[0, 1] >> np.uint64(61)) for place in range(400)]
    counts = np.bincount(top, minlength=8)
    assert ((counts - 50) ** 2 / 50).sum() < 33.7  # chi-squared, 7 degrees: false alarm 2e-5


def test_a_sum_is_masked_once():
    of = givers("a", "b")["a"]
    of.cover([1], 4, "test")
    of.cover([1], 5, "test")
    with pytest.raises(CryptoError, match="new nonce"):
        of.cover([1], 4, "test")


def test_masks_among_some_givers_cancel_among_these():
    of = givers("a", "b", "c")
    drawn = [of[name].draw(3, 90, 0, "to b", [other]) for name, other in (("a", "c"), ("c", "a"))]
    assert [sum(column) for column in zip(*drawn, strict=True)] == [0, 0, 0]
    assert drawn[0] != [0, 0, 0]


@given(st.lists(st.floats(-1e18, 1e18, allow_subnormal=True), max_size=5))
def test_fixed_point_rounds_to_the_nearest_2_to_the_minus_64(values):
    fixed = to_fixed(np.array(values))
    assert all(abs(Fraction(v) * 2**64 - f) <= Fraction(1, 2) for v, f in zip(values, fixed, strict=True))
    np.testing.assert_allclose(from_fixed(fixed), values, rtol=1e-15, atol=2.0**-65)


def test_unusable_numbers_are_refused():
    for wrong in (np.nan, np.inf, 1e19):
        with pytest.raises(CryptoError, match="diverged"):
            to_fixed(np.array([1.0, wrong]))
    with pytest.raises(CryptoError, match="masked numbers"):
        total([np.zeros((2, 2), np.uint64), np.zeros((3, 2), np.uint64)])
