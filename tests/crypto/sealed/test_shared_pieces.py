"""A function in linear pieces of shared numbers, against the plain grower's pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.sealed.test_sealed import play
from crypto.sealed.watching import again, assert_refuses_garbage, filled
from treaty.crypto.transfer.shared_pieces import FRACTION, NUMBER_BITS, Pieces, values_of
from treaty.crypto.transfer.stock import Transfers, open_transfers
from treaty.trees.logistic_pieces import LogisticPieces, pieces_of

Ends = tuple[Transfers, Transfers]
ONE, WHOLE = 1 << FRACTION, (1 << NUMBER_BITS) - 1
LEAST, MOST = -128 * ONE, 120 * ONE - 1

# Near each whole number, near carries of digits, and at both ends of what can be shared
STEPS = [-257, -256, -17, -16, -15, -1, 0, 1, 15, 16, 17, 255, 256, 257, 2048]
EDGES = np.unique(np.clip([k * ONE + d for k in range(-128, 121) for d in STEPS], LEAST, MOST))


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


def logistic(fraction: int) -> Pieces:
    """Return p and h in one number."""
    base, slope = ((pieces_of(fraction)[0] << fraction) + pieces_of(fraction)[1]).view(np.uint64)
    return Pieces(base, slope, 2 * fraction + 2)


def plain(numbers: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Return the values modulo 2^bits."""
    x = np.clip(numbers + 8 * ONE, 0, 16 * ONE - 1)
    values = pieces.base[x // ONE] + pieces.slope[x // ONE] * (x % ONE >> 4).astype(np.uint64)
    return values & np.uint64((1 << pieces.bits) - 1)


def values_at(ends: Ends, numbers: np.ndarray, masks: np.ndarray, pieces: Pieces) -> np.ndarray:
    shares = [(masks & WHOLE).astype(np.uint32), ((numbers - masks) & WHOLE).astype(np.uint32)]
    found = play(*(values_of(ends[k], shares[k], pieces, k) for k in (0, 1)))
    assert all(np.all(of >> np.uint64(pieces.bits - 1) <= 1) for of in found)
    return (found[0] + found[1]) & np.uint64((1 << pieces.bits) - 1)


@pytest.mark.parametrize("shares", ["random", "zeros", "ones", "carries"])
def test_values_are_the_plain_ones_at_every_edge(ends: Ends, shares: str) -> None:
    rng = np.random.default_rng(0)
    masks = {
        "random": rng.integers(0, 1 << NUMBER_BITS, len(EDGES)),
        "zeros": np.zeros(len(EDGES), np.int64),
        "ones": np.full(len(EDGES), WHOLE),
        # all digits of both shares add up to 15 or 16
        "carries": (EDGES // 2) ^ rng.choice([0, 0x11111, 0x55555, 0xFFFFF], len(EDGES)),
    }[shares]
    pieces = logistic(16)
    assert np.array_equal(values_at(ends, EDGES, masks, pieces), plain(EDGES, pieces))


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 3, 65, 200]), st.integers(0, 1 << 32), st.integers(5, 64))
def test_values_of_any_pieces_are_the_plain_ones(ends: Ends, n: int, seed: int, bits: int) -> None:
    """Of random ones, too, whose slope beyond the range is 0 as the logistic's is."""
    rng = np.random.default_rng(seed)
    numbers = np.clip(np.rint(rng.normal(0, rng.choice([2, 6, 40]), n) * ONE).astype(np.int64), LEAST, MOST)
    base, slope = rng.integers(0, 1 << 64, (2, 16), dtype=np.uint64)
    slope[[0, -1]] = 0
    pieces = Pieces(base, slope, bits)
    masks = rng.integers(0, 1 << NUMBER_BITS, n)
    assert np.array_equal(values_at(ends, numbers, masks, pieces), plain(numbers, pieces))


def test_the_plain_values_are_those_of_the_plain_grower() -> None:
    grad, hess = np.zeros((2, 1, len(EDGES)), np.int64)
    objective, y = LogisticPieces(fractional_bits=16), np.zeros(len(EDGES))
    objective.write_derivatives(EDGES[:, None] / ONE, y, np.full(len(EDGES), 2.0**16), grad, hess)
    pieces = logistic(16)
    assert np.array_equal(plain(EDGES, pieces), ((grad[0] << 16) + hess[0]).view(np.uint64))


@pytest.mark.slow
def test_values_of_all_numbers(ends: Ends) -> None:
    numbers, pieces = np.arange(LEAST, MOST + 1), logistic(16)
    masks = np.random.default_rng(0).integers(0, 1 << NUMBER_BITS, len(numbers))
    assert np.array_equal(values_at(ends, numbers, masks, pieces), plain(numbers, pieces))


@pytest.mark.parametrize("role", [0, 1])
def test_messages_of_other_types_and_shapes_are_refused(role: int) -> None:
    ends, numbers, pieces = filled(), np.arange(7, dtype=np.uint32), logistic(16)
    assert_refuses_garbage(lambda k: values_of(again(ends[k]), numbers, pieces, k), role)
