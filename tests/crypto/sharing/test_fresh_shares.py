"""What the dealer of additive shares and a user learn together from shares as computed, and from those made anew."""

import numpy as np
import pytest
from scipy import stats

from crypto.sharing.dealer_attacks import BITS, CODES, NONE, Root, leaf_values_found, splits_left
from crypto.sharing.servers import FALSE_ALARM, Play
from treaty.crypto.keystream import FreshShares
from treaty.crypto.sharing.additive_routing import (
    deal_leaves,
    deal_level,
    deal_mask,
    leaf_values,
    mask_rows,
    open_bits,
    open_integers,
    route_level,
    share_integers,
)
from treaty.errors import CryptoError


def as_computed(own, seed):
    """What servers would send without `FreshShares`."""
    del own, seed
    return lambda shares: shares


def numbers_anew(own, seed):
    fresh = FreshShares(own, seed)
    return lambda shares: fresh.numbers(0, shares)


def bits_anew(own, seed):
    fresh = FreshShares(own, seed)
    return lambda shares: fresh.bits(0, shares)


# ---------------------------------------------------------------- leaf values


def leaf_shares(leaves, rows, visited, rng, send):
    """Play one tree's leaf values; return its values, each row's leaf, what the dealer has and what users are sent."""
    values = rng.integers(-(2**40), 2**40, (1, leaves))
    leaf = rng.permutation(np.arange(rows) % visited)
    paths = share_integers((np.arange(leaves)[:, None] == leaf)[None].astype(np.int64))
    keys, corrections = deal_leaves(rows, 1, leaves)
    shares, given = share_integers(values), (NONE, corrections)
    found = Play([leaf_values(i, paths[i], shares[i], keys[i], given[i]) for i in range(2)]).results
    told = np.stack([send(i, b"s" * 32)(found[i]) for i in range(2)])
    assert np.array_equal(open_integers(told)[0], values[0, leaf])
    return values[0], leaf, (keys, corrections), told[:, 0]


@pytest.mark.parametrize(("leaves", "own", "visited"), [(8, 48, 2), (8, 48, 1), (32, 72, 3)])
def test_dealer_and_a_user_find_leaf_values_in_shares_as_computed_alone(leaves, own, visited):
    """Of all leaves, though the user's rows are in few; 2^-40 of its equations are too few."""
    rng, rows = np.random.default_rng(leaves), 100
    for send, found_out in ((as_computed, True), (numbers_anew, False)):
        values, leaf, dealt, told = leaf_shares(leaves, rows, visited, rng, send)
        found = leaf_values_found(slice(own), leaf[:own], dealt, told[:, :own], leaves, rows)
        assert found is not None
        assert np.array_equal(found, values) == found_out
        assert np.any(found == values) == found_out


# ---------------------------------------------------------------- splits


def at_a_root(columns, n, rng, send):
    column, threshold = int(rng.integers(columns)), int(rng.integers(4, CODES - 4))
    rows = np.tile(rng.integers(0, CODES, columns), (n, 1))  # the user's are all alike
    weights, thresholds = np.zeros((1, 1, columns), np.int64), np.array([[threshold]])
    weights[..., column] = 1
    shared, weights, thresholds = share_integers(rows), share_integers(weights), share_integers(thresholds)
    mask, masks = deal_mask(n, columns)
    held = Play([mask_rows(i, shared[i], masks[i]) for i in range(2)]).results
    assert held[0][1] == held[1][1]
    keys, corrections = deal_level(mask, 1, 1, BITS)
    left = Play([
        route_level(
            i, held[i][0], weights[i], thresholds[i], None, BITS, keys[i], corrections if i else NONE
        )
        for i in range(2)
    ]).results  # fmt: skip
    told = np.stack([send(i, held[i][1])(left[i][0]) for i in range(2)])[:, 0]
    assert np.array_equal(open_bits(told), rows[:, column] < threshold)
    return Root(column, threshold, rows, masks, (keys, corrections), told)


@pytest.mark.slow
def test_dealer_and_a_user_find_splits_in_shares_as_computed_alone():
    rng = np.random.default_rng(5)
    agree, left = 0, 0
    for _ in range(4):
        root = at_a_root(8, 60, rng, as_computed)
        of_sides, of_shares = splits_left(root)
        assert (root.column, root.threshold) in of_shares
        agree, left = agree + len(of_sides), left + len(of_shares)
    assert left < agree / 8
    for _ in range(4):
        root = at_a_root(8, 60, rng, bits_anew)
        of_sides, of_shares = splits_left(root)
        assert (root.column, root.threshold) in of_sides
        assert not of_shares  # every split is as wrong as the true one; by chance one fits in 10^13


# ---------------------------------------------------------------- shares made anew


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 70), (2, 5, 8)])
def test_what_is_opened_stays(shape):
    rng = np.random.default_rng(len(shape))
    servers = [FreshShares(i, b"k" * 32) for i in range(2)]
    shares = rng.integers(0, 2**64, (2, *shape), np.uint64)
    bits = rng.integers(0, 2, (2, *shape)).astype(np.uint8)
    numbers = np.stack([servers[i].numbers(0, shares[i]) for i in range(2)])
    sides = np.stack([servers[i].bits(1, bits[i]) for i in range(2)])
    assert np.array_equal(open_integers(numbers), open_integers(shares))
    assert np.array_equal(open_bits(sides), open_bits(bits))


def test_shares_made_anew_are_uniform_in_every_message():
    fresh, none = FreshShares(1, b"q" * 32), np.zeros(4096, np.uint64)
    messages = np.stack([fresh.numbers(message, none) for message in (0, 1, 2, 9)])
    assert len(np.unique(messages)) == messages.size
    assert stats.chisquare(np.bincount(messages.view(np.uint8).reshape(-1), minlength=256)).pvalue > FALSE_ALARM
    bits = np.stack([fresh.bits(message, np.zeros(4096, np.uint8)) for message in (10, 11)])
    for count in (bits[0].sum(), bits[1].sum(), (bits[0] ^ bits[1]).sum()):
        assert stats.binomtest(int(count), 4096).pvalue > FALSE_ALARM


@pytest.mark.parametrize("first", ["numbers", "bits"])
@pytest.mark.parametrize("again", ["numbers", "bits"])
def test_a_keystream_that_may_be_used_is_refused(first, again):
    shares = {"numbers": np.zeros(5, np.uint64), "bits": np.zeros(5, np.uint8)}
    for message in (4, 3, 0, -1):
        fresh = FreshShares(0, b"k" * 32)
        getattr(fresh, first)(4, shares[first])
        with pytest.raises(CryptoError, match=f"a message after number 4, got {message}"):
            getattr(fresh, again)(message, shares[again])
        getattr(fresh, again)(5, shares[again])
    with pytest.raises(CryptoError, match="after number -1, got -1"):
        FreshShares(0, b"k" * 32).bits(-1, shares["bits"])


def test_a_seed_of_another_length_is_refused():
    with pytest.raises(CryptoError, match="32 bytes, got 16"):
        FreshShares(0, b"k" * 16)


def test_each_server_gives_to_the_seed_and_no_two_are_alike():
    """Both have it, after the one round there is; not even one server's part is what the dealer has dealt."""
    seeds = set()
    for _ in range(3):
        shared, (_, keys) = share_integers(np.zeros((4, 3), np.int64)), deal_mask(4, 3)
        play = Play([mask_rows(i, shared[i], keys[i]) for i in range(2)])
        assert len(play.rounds) == 1
        parts = [play.rounds[0][i, 1 - i][-4:] for i in range(2)]
        (_, first), (_, second) = play.results
        assert first == second == (parts[0] + parts[1]).astype("<u8").tobytes()
        seeds |= {first, *(part.astype("<u8").tobytes() for part in parts), *keys}
    assert len(seeds) == 3 * 5
