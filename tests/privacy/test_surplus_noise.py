import itertools

import numpy as np
import pytest

from crypto.aggregation.summing import make_round
from treaty.errors import ConfigError
from treaty.privacy.discrete_gaussian import LEAST_SHARE, discrete_gaussian
from treaty.privacy.surplus_noise import MOST_PARTS, draw_noise, least_share, removable_noise

COUNTS = (4, 6, 7, 10)
LENGTH = 40_000
# of a variance of so many numbers, six standard errors
FAR = 6 * np.sqrt(2 / LENGTH)


def stays(sigma, counts, known, survivors):
    """Return one contributor's noise that stays in a sum of so many survivors."""
    noise, secret = draw_noise(np.full(LENGTH, sigma), counts, known)
    removed = np.searchsorted(counts, survivors, side="right") - 1
    return noise - (
        removable_noise(np.full(LENGTH, sigma), counts, known, removed, secret[removed - 1]) if removed else 0
    )


@pytest.mark.parametrize("known", [0, 1])
@pytest.mark.parametrize(("survivors", "of"), [(4, 4), (5, 4), (6, 6), (7, 7), (9, 7), (10, 10)])
def test_survivors_noise_adds_up_to_sigma_whoever_is_lost(known, survivors, of):
    variance = stays(300.0, COUNTS, known, survivors).var() * (survivors - known) / 300.0**2
    # more by what the last step of counts leaves, and never less
    assert variance == pytest.approx((survivors - known) / (of - known), rel=FAR)
    assert variance > 1 - FAR


@pytest.mark.parametrize("counts", [(3,), (3, 4), (6, 7, 8, 9)])
def test_without_steps_there_is_nothing_to_remove(counts):
    noise, secret = draw_noise(np.full(LENGTH, 100.0), counts, 1)
    assert len(secret) == len(counts) - 1
    assert noise.var() == pytest.approx(100.0**2 / (counts[0] - 1), rel=FAR)


def test_a_parts_secret_gives_it_and_those_before_and_none_after():
    sigma = np.full(LENGTH, 200.0)
    noise, secret = draw_noise(sigma, COUNTS, 1)
    parts = [removable_noise(sigma, COUNTS, 1, k, secret[k - 1]) for k in (1, 2, 3)]
    later = [parts[0], parts[1] - parts[0], parts[2] - parts[1], noise - parts[2]]
    shares = [1 / 3 - 1 / 5, 1 / 5 - 1 / 6, 1 / 6 - 1 / 9, 1 / 9]
    for own, share in zip(later, shares, strict=True):
        assert own.var() == pytest.approx(200.0**2 * share, rel=FAR)
    # independent: what is known of some says nothing of the others
    correlations = np.corrcoef(later)
    assert np.abs(correlations - np.eye(4)).max() < 6 / np.sqrt(LENGTH)
    assert len(set(secret)) == 3
    again = draw_noise(sigma, COUNTS, 1)[1]
    assert not set(secret) & set(again)


def test_no_part_is_finer_than_is_accounted_for():
    for members in range(3, 80):
        this = make_counts(members)
        assert len(this) <= MOST_PARTS + 1
        assert this[-1] == members
        for known in (0, 1):
            parts = [
                1 / (this[-1] - known),
                *(1 / (a - known) - 1 / (b - known) for a, b in itertools.pairwise(this)),
            ]
            assert min(parts) >= 1 / least_share(members)
            assert members * len(parts) <= least_share(members)


def make_counts(members):
    least = max(3, -(-2 * members // 3))
    steps = min(MOST_PARTS, members - least)
    return tuple(least + (members - least) * k // max(steps, 1) for k in range(steps + 1))


@pytest.mark.parametrize("members", [3, 4, 9, 12])
def test_rounds_of_sums_have_these_steps(members):
    assert make_round(members, surplus_parts=MOST_PARTS).counts == make_counts(members)
    assert len(make_round(members).counts) == 1


def test_noise_too_fine_to_be_drawn_is_refused():
    assert LEAST_SHARE == 1.0
    with pytest.raises(ConfigError, match="standard deviation of 1 or more"):
        draw_noise(np.full(3, 5.0), COUNTS, 1)


def test_a_seed_stretches_to_the_same_numbers_everywhere():
    # an edge server removes what users have added
    drawn = discrete_gaussian(np.full(6, 50.0), bytes(range(32)))
    assert drawn.tolist() == discrete_gaussian(np.full(6, 50.0), bytes(range(32))).tolist()
    assert drawn.tolist() != discrete_gaussian(np.full(6, 50.0), bytes(32)).tolist()
