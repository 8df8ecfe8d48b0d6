import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sharing.shamir import P, make_shares, open_bytes, open_shares, share_bytes, share_length
from treaty.errors import CryptoError

EDGES = [0, 1, 2, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, P - 1, P - 2, (1 << 126) + 1, P - (1 << 64)]
NUMBERS = st.one_of(st.sampled_from(EDGES), st.integers(0, P - 1))
POINTS = st.lists(st.one_of(st.integers(1, 60), st.sampled_from([e for e in EDGES if e])), min_size=1, max_size=9)


def at_zero(points, values):
    """Lagrange's interpolation at 0 in integers."""
    total = 0
    for i, x in enumerate(points):
        above, below = 1, 1
        for j, other in enumerate(points):
            if i != j:
                above, below = above * -other % P, below * (x - other) % P
        total += values[i] * above * pow(below, -1, P)
    return total % P


@settings(deadline=None)  # kernels may have to be compiled
@given(st.lists(NUMBERS, min_size=1, max_size=5), POINTS, st.data())
def test_any_threshold_of_shares_gives_the_secrets(secrets, points, data):
    points = list(dict.fromkeys(points))
    threshold = data.draw(st.integers(1, len(points)))
    shares = make_shares(to_words(secrets, 2), points, threshold)
    chosen = data.draw(st.permutations(range(len(points))))[: data.draw(st.integers(threshold, len(points)))]
    assert from_words(open_shares([points[i] for i in chosen], shares[list(chosen)])) == secrets
    held = [from_words(share) for share in shares]
    few = list(chosen)[:threshold]
    for j, secret in enumerate(secrets):
        assert at_zero([points[i] for i in few], [held[i][j] for i in few]) == secret


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=4), st.lists(NUMBERS, min_size=4, max_size=4), POINTS)
def test_opening_is_lagrange_at_zero(first, second, points):
    """Also of shares that lie on no polynomial of low degree, so that every product and carry is met."""
    points = list(dict.fromkeys(points))
    rows = [[(a * (i + 1) + second[j]) % P for j, a in enumerate(first)] for i in range(len(points))]
    opened = open_shares(points, np.stack([to_words(row, 2) for row in rows]))
    assert from_words(opened) == [at_zero(points, column) for column in zip(*rows, strict=True)]


def test_fewer_shares_than_the_threshold_are_uniform():
    """Two of three needed shares of a constant secret: top bits by chi-squared, false alarm 1e-9 each."""
    shares = make_shares(np.zeros((40_000, 2), np.uint64), [1, 2, 3], 3)
    tops = (shares[:, :, 1] >> np.uint64(59)).astype(np.int64)
    for counts in [np.bincount(tops[0] * 16 + tops[1], minlength=256), np.bincount(tops[0] * 16 + tops[2])]:
        assert stats.chisquare(counts).pvalue > 1e-9
    below = from_words(open_shares([1, 2], shares[:2])[:100])
    assert not any(value == 0 for value in below)  # the secret, by chance with probability 100 / p


def test_coefficients_are_new_every_time():
    secret = to_words([5], 2)
    assert not np.array_equal(make_shares(secret, [1, 2], 2), make_shares(secret, [1, 2], 2))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=3), st.integers(1, 5))
def test_byte_strings_come_back_from_any_shares(strings, threshold):
    points = [3, 1, 4, 15, 9]
    shares = list(zip(*[share_bytes(string, points, threshold) for string in strings], strict=True))
    assert all(len(share) == share_length(32) == 48 for held in shares for share in held)
    for chosen in itertools.combinations(range(5), threshold):
        assert open_bytes([points[i] for i in chosen], [shares[i] for i in chosen], 32) == strings


@pytest.mark.parametrize("length", [1, 14, 15, 16, 30, 31, 100])
def test_strings_of_any_length_come_back(length):
    string = random.Random(length).randbytes(length)
    for secret in (string, b"\xff" * length):
        shares = share_bytes(secret, [1, 2, 3], 2)
        assert open_bytes([1, 3], [[shares[0]], [shares[2]]], length) == [secret]


def test_shares_that_do_not_belong_together_are_refused():
    one, other = (share_bytes(letter * 600, [1, 2], 2) for letter in (b"a", b"b"))
    with pytest.raises(CryptoError, match="belong together"):  # 40 pieces below 2^120 by chance: 2^-280
        open_bytes([1, 2], [[one[0]], [other[1]]], 600)


BAD = {
    "point zero": lambda s: make_shares(s, [0, 1, 2], 2),
    "point p": lambda s: make_shares(s, [1, P], 2),
    "repeated point": lambda s: make_shares(s, [1, 2, 1], 2),
    "no point": lambda s: make_shares(s, [], 1),
    "threshold zero": lambda s: make_shares(s, [1, 2], 0),
    "threshold above the shares": lambda s: make_shares(s, [1, 2], 3),
    "secret p": lambda s: make_shares(to_words([P], 2), [1, 2], 2),
    "secret of 128 bits": lambda s: make_shares(to_words([1 << 127], 2), [1, 2], 2),
    "signed": lambda s: make_shares(s.astype(np.int64), [1, 2], 2),
    "one word": lambda s: make_shares(s[:, :1], [1, 2], 2),
    "opened at zero": lambda s: open_shares([0, 1], make_shares(s, [1, 2], 2)),
    "opened at a point twice": lambda s: open_shares([1, 1], make_shares(s, [1, 2], 2)),
    "opened with a share missing": lambda s: open_shares([1, 2], make_shares(s, [1, 2], 2)[:1]),
    "opened with a share of p": lambda s: open_shares([1], to_words([P], 2)[None]),
    "short share of a string": lambda s: open_bytes([1], [[bytes(47)]], 32),
}


@pytest.mark.parametrize("fault", BAD)
def test_numbers_out_of_range_are_refused(fault):
    with pytest.raises(CryptoError, match="expected"):
        BAD[fault](to_words([7], 2))
