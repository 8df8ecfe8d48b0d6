import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crypto.sharing.servers import FALSE_ALARM, MALFORMED, Play, opened, prepared_for, rounds_of, share
from treaty.crypto.payload import from_words
from treaty.crypto.sharing import shamir as field
from treaty.crypto.sharing.additive_routing import deal, sign_bit
from treaty.crypto.sharing.shamir import P, make_shares, open_shares
from treaty.crypto.sharing.shamir_routing import (
    RandomNumbers,
    ServerSetting,
    is_negative,
    multiply,
    prepare,
    reduce_degree,
)
from treaty.errors import CryptoError
from treaty.systems.fedxgb.pieces import Layout

THREE = ServerSetting(servers=3, degree=1, bits=9)


def negative(setting, shares, prepared=None, tamper=lambda number, sent: None):
    prepared = prepared or prepared_for(setting, shares.shape[1])
    return Play([is_negative(setting, i, shares[i], prepared[i]) for i in range(setting.servers)], tamper)


# ---------------------------------------------------------------- right


@pytest.mark.slow
def test_every_pair_of_bin_codes_is_compared_rightly():
    """All 65,536 pairs of 8-bit codes, as predictions compare them."""
    x, y = (codes.reshape(-1) for codes in np.meshgrid(np.arange(256), np.arange(256)))
    prepared = prepared_for(THREE, len(x))
    xs, ys = share(THREE, x), share(THREE, y)
    play = Play([is_negative(THREE, i, field.subtract(xs[i], ys[i]), prepared[i]) for i in range(3)])
    assert np.array_equal(opened(THREE, play.results), x < y)


@pytest.mark.parametrize("setting", [(3, 1, 22), (5, 2, 16), (4, 1, 20), (10, 4, 12)], ids=str)
def test_random_and_boundary_numbers_are_compared_rightly(setting):
    setting = ServerSetting(servers=setting[0], degree=setting[1], bits=setting[2])
    rows = 200_000 // (setting.servers * setting.bits)
    bound = 1 << (setting.bits - 1)
    edges = [0, 1, -1, 2, -2, bound - 1, 1 - bound, bound // 2, -bound // 2, bound // 2 - 1]
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.integers(1 - bound, bound, rows), rng.integers(-3, 4, 100), edges])
    assert np.array_equal(opened(setting, negative(setting, share(setting, values)).results), values < 0)


@pytest.mark.parametrize("bits", [2, 3, 21, 22])
def test_numbers_of_any_length_are_compared_rightly(bits):
    """The longest and shortest there are."""
    setting = ServerSetting(servers=3, degree=1, bits=bits)
    bound = 1 << (bits - 1)
    values = [0, 1, -1, bound - 1, 1 - bound, bound // 3, -bound // 3] * 20
    found = opened(setting, negative(setting, share(setting, values)).results)
    assert found.tolist() == [value < 0 for value in values]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(3, 1), (4, 1), (5, 2), (7, 3)]), st.lists(st.tuples(*[st.integers(0, P - 1)] * 2), min_size=1))
def test_products_have_the_value_and_the_degree(servers, pairs):
    setting = ServerSetting(servers=servers[0], degree=servers[1], bits=8)
    a, b = (share(setting, column) for column in zip(*pairs, strict=True))
    play = Play([multiply(setting, i, a[i], b[i]) for i in range(setting.servers)])
    few = setting.degree + 1
    for chosen in itertools.combinations(range(setting.servers), few):
        found = open_shares([i + 1 for i in chosen], np.stack([play.results[i] for i in chosen]))
        assert from_words(found) == [x * y % P for x, y in pairs]


def test_sums_of_products_take_one_reduction():
    setting = ServerSetting(servers=5, degree=2, bits=8)
    a, b = share(setting, range(6)), share(setting, range(10, 16))
    ones = np.tile(field.constant(1), (1, 6, 1))
    sums = [field.combine(field.multiply(a[i], b[i])[:, None], ones)[0] for i in range(5)]
    play = Play([reduce_degree(setting, i, sums[i]) for i in range(5)])
    assert opened(setting, play.results).tolist() == [sum(i * (10 + i) for i in range(6))]
    assert len(play.rounds) == 1


def test_prepared_numbers_are_what_comparisons_need():
    """Bits are bits, half of them one; signs are signs; low and mask are made of them; zeros are zero."""
    setting = ServerSetting(servers=5, degree=2, bits=7)
    rows = 4000
    taken = [prepared.take(rows) for prepared in prepared_for(setting, rows)]
    bits, low, mask, signs, blinds = (
        np.array(from_words(open_shares([1, 3, 5], np.stack([taken[i][k].reshape(-1, 2) for i in (0, 2, 4)]))))
        for k in range(5)
    )
    assert set(bits.tolist()) == {0, 1}
    assert set(signs.tolist()) == {1, P - 1}
    assert stats.binomtest(int(bits.sum()), 7 * rows).pvalue > FALSE_ALARM
    assert stats.binomtest(int((signs == 1).sum()), rows).pvalue > FALSE_ALARM
    bits = bits.reshape(7, rows)
    assert all(low == sum(bits[i] << i for i in range(7)))
    high = [(m - r) >> 7 for m, r in zip(mask.tolist(), low.tolist(), strict=True)]
    assert all((m - r) % 128 == 0 for m, r in zip(mask.tolist(), low.tolist(), strict=True))
    assert max(high) < 5 << 100
    assert max(high) > 3 << 100  # below it all 4000 sums of five by chance: less than 1e-150
    assert len(set(blinds.tolist())) == rows
    zeros = np.stack([numbers[5] for numbers in taken])
    assert field.is_zero(open_shares(setting.points, zeros)).all()
    assert not field.is_zero(open_shares([1, 2, 3], zeros[:3])).any()  # of degree 4, not lower


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize(("servers", "degree", "bits"), [(3, 1, 6), (3, 1, 7), (5, 2, 16), (10, 4, 14)])
def test_rounds_and_bytes_are_those_of_the_text(servers, degree, bits):
    setting = ServerSetting(servers=servers, degree=degree, bits=bits)
    rows, pairs = 6 * 7 * 10, servers * (servers - 1)  # a multiple of all servers - degree
    offline = Play([prepare(setting, i, rows) for i in range(servers)])
    assert len(offline.rounds) == 2
    assert offline.nbytes == 16 * pairs * rows * (2 * (bits + 2) / (servers - degree) + 1 + bits + 1)
    online = negative(setting, share(setting, np.arange(rows) % 7), offline.results)
    assert len(online.rounds) == rounds_of(setting)
    assert online.nbytes == 16 * pairs * rows * (2 + bits)
    everybody = {(i, j) for i in range(servers) for j in range(servers) if i != j}
    assert all(sent.keys() == everybody for sent in offline.rounds + online.rounds)


# ---------------------------------------------------------------- what it tells


def test_what_is_opened_tells_nothing_of_the_number():
    """By enumeration: c mod 2^l and whether the product is zero occur equally often, whatever the number is."""
    length = 4
    r, s, a = (grid.reshape(-1) for grid in np.meshgrid(np.arange(16), [-1, 1], np.arange(-7, 8)))
    c = (a + r) % 16
    bits = field.from_signed((r >> np.arange(length)[:, None]) & 1)
    factors = field.comparison_factors(bits, field.from_signed(s), field.from_signed(c))
    zero = field.is_zero(factors)
    assert zero.sum(axis=0).max() == 1
    seen = np.stack([np.bincount(2 * c[a == x] + zero.any(axis=0)[a == x], minlength=32) for x in range(-7, 8)])
    assert (seen == 1).all()


def view(number, colluding, setting, rows):
    """What some servers see while a number is compared many times, as cells of numbers that should be uniform.

    The number's shares are all the number itself, so that only the protocol's own randomness hides it.
    """
    shares = np.broadcast_to(field.constant(number), (setting.servers, rows, 2))
    play = negative(setting, shares)
    every = np.arange(setting.servers)
    honest = next(int(i) for i in every if i not in colluding)

    def all_shares(sent):
        return np.stack([sent[i, honest if i != honest else colluding[0]] for i in every])

    c = open_shares(setting.points, all_shares(play.rounds[0]))
    test = open_shares(setting.points, all_shares(play.rounds[-1]))
    zero = field.is_zero(test).astype(np.int64)
    low = (c[:, 0] & np.uint64(15)).astype(np.int64)

    def tops(arrays, bits):
        cell = np.zeros(rows, np.int64)
        for array in arrays:
            cell = cell << bits | (array[:rows, 1] >> np.uint64(63 - bits)).astype(np.int64)
        return cell

    c_high = (c[:, 1] >> np.uint64(20)).astype(np.int64)  # tops of r'
    return {
        "c and zero test": low * 2 + zero,
        "c and own share of c": low << 4 | tops([play.rounds[0][colluding[0], honest]], 4),
        "test unless zero": tops([test], 4)[zero == 0],
        "shares of products": tops([play.rounds[1][honest, i].reshape(-1, 2) for i in colluding], 3) * 2 + zero,
        "output": tops([play.results[i] for i in colluding], 3) * 2 + zero,
        "output and c": tops([play.results[colluding[0]]], 3) << 4 | low,
    }, c_high


CELLS = {"c and zero test": 32, "c and own share of c": 256, "test unless zero": 16, "output and c": 128}


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "colluding"), [(3, (0,)), (3, (2,)), (5, (0, 1)), (5, (1, 4))], ids=str)
def test_views_of_any_colluding_servers_are_the_same_for_two_numbers(servers, colluding):
    """Uniform each (chi-squared) and equal to each other (contingency), a false alarm in 1e-9 of 13 tests each."""
    setting = ServerSetting(servers=servers, degree=len(colluding), bits=4)
    (one, one_high), (other, other_high) = (view(x, colluding, setting, 20_000) for x in (-7, 6))
    for what in one:
        cells = CELLS.get(what, 2 * 8 ** len(colluding))
        counts = [np.bincount(seen[what], minlength=cells) for seen in (one, other)]
        assert all(len(count) == cells for count in counts)
        assert all(stats.chisquare(count).pvalue > FALSE_ALARM for count in counts), what
        assert stats.chi2_contingency(np.stack(counts)).pvalue > FALSE_ALARM, what
    edges = np.quantile(one_high, np.arange(1, 16) / 16)
    counts = [np.bincount(np.searchsorted(edges, high), minlength=16) for high in (one_high, other_high)]
    assert stats.chi2_contingency(np.stack(counts)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("colluding", [(0, 1), (1, 4)], ids=str)
def test_shares_of_products_are_uniform_whatever_the_shares_of_factors(colluding):
    """Of constant shares, so that only resharing makes them random; 256 cells, false alarm 1e-9."""
    setting, rows = ServerSetting(servers=5, degree=2, bits=8), 20_000
    three = np.broadcast_to(field.constant(3), (rows, 2))
    play = Play([multiply(setting, i, three, three) for i in range(5)])
    first, second = ((play.results[i][:, 1] >> np.uint64(59)).astype(np.int64) for i in colluding)
    assert stats.chisquare(np.bincount(16 * first + second, minlength=256)).pvalue > FALSE_ALARM


def test_opened_products_do_not_show_their_factors():
    """Of all polynomials of degree 2 half split into linear ones; the product of two shared numbers always would."""
    rows, half = 2000, pow(2, -1, P)
    offline = Play([prepare(THREE, i, rows) for i in range(3)])
    online = negative(THREE, share(THREE, np.full(rows, -3)), offline.results)
    through = [[3, -3, 1], [-5 * half, 4, -3 * half], [half, -1, half]]  # values at 1, 2, 3 to coefficients
    through = np.stack([np.stack([field.constant(weight) for weight in row]) for row in through])
    for sent in (offline.rounds[1], online.rounds[-1]):
        c, b, a = field.combine(np.stack([sent[0, 1], sent[1, 0], sent[2, 0]]), through)
        c, b, a = (numbers[~field.is_zero(c)] for numbers in (c, b, a))  # a product of zero is divisible by x
        discriminant = field.subtract(field.multiply(b, b), field.multiply(field.constant(4), field.multiply(a, c)))
        splits = (field.power(discriminant, (P - 1) // 2) == field.constant(1)).all(axis=1)
        assert stats.binomtest(int(splits.sum()), len(splits)).pvalue > FALSE_ALARM


def test_an_offline_view_tells_nothing_of_the_bits():
    """Squares opened for bits, against the bits: an eighth each of (bit, tops of the square), false alarm 1e-9."""
    setting = ServerSetting(servers=3, degree=1, bits=7)
    rows = 5000
    play = Play([prepare(setting, i, rows) for i in range(3)])
    squares = open_shares([1, 2, 3], np.stack([play.rounds[1][0, 1], play.rounds[1][1, 0], play.rounds[1][2, 0]]))
    taken = [prepared.take(rows)[0].reshape(-1, 2) for prepared in play.results]
    bits = open_shares([1, 2], np.stack(taken[:2]))[:, 0].astype(np.int64)
    own = (taken[2][:, 1] >> np.uint64(61)).astype(np.int64)
    square = (squares[: 7 * rows, 1] >> np.uint64(61)).astype(np.int64)
    for seen in (bits * 4 + own, bits * 4 + square):
        assert stats.chisquare(np.bincount(seen, minlength=8)).pvalue > FALSE_ALARM


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "wrong",
    [
        {"servers": 2},
        {"degree": 0},
        {"degree": 2},
        {"servers": 4, "degree": 2},
        {"bits": 1},
        {"bits": 23},
        {"bits": 22, "servers": 5},
    ],
    ids=str,
)
def test_settings_that_break_a_bound_are_refused(wrong):
    with pytest.raises(CryptoError, match="expected"):
        ServerSetting(**{"servers": 3, "degree": 1, "bits": 8, **wrong})


def test_settings_at_the_bound_are_accepted():
    assert ServerSetting(servers=3, degree=1, bits=22).bits == 22
    assert ServerSetting(servers=5, degree=2, bits=21).degree == 2


@pytest.mark.parametrize("servers", [3, 5, 10, 1000])
def test_every_split_is_compared_under_masks_of_100_bits_that_the_field_has_room_for(servers):
    """The largest c there is, of the longest numbers that layouts have, is below p: nothing wraps around."""
    layout = Layout(n_bins=[255], categorical=[False], may_miss=[True])
    for bits in (layout.bits, layout.shown_bits):
        setting = ServerSetting(servers=servers, degree=1, bits=bits)
        largest_mask = servers * ((1 << 100) - 1)
        assert (1 << (setting.bits - 1)) + (1 << setting.bits) + (1 << setting.bits) * (1 + largest_mask) < P


def test_a_mask_of_k_bits_tells_at_most_2_to_the_minus_k_of_a_number():
    """By enumeration of all c, of numbers of 4 bits under 6: the statistical distance of every two numbers."""
    r, high = (grid.reshape(-1) for grid in np.meshgrid(np.arange(16), np.arange(64)))
    seen = np.stack([np.bincount(a + 16 + r + 16 * high, minlength=16 * 67) for a in range(-7, 8)]) / len(r)
    distances = np.abs(seen[:, None] - seen).sum(axis=2) / 2
    assert distances.max() <= 2.0**-6
    assert distances.max() > 2.0**-7


@pytest.mark.parametrize(("servers", "degree", "wrong"), [(3, 1, 2), (5, 2, 3), (5, 2, 4), (5, 1, 2), (10, 4, 5)])
def test_inputs_of_a_wrong_degree_are_caught(servers, degree, wrong):
    setting = ServerSetting(servers=servers, degree=degree, bits=8)
    shares = make_shares(field.from_signed(np.arange(-3, 4)), setting.points, wrong + 1)
    with pytest.raises(CryptoError, match="belong together"):
        negative(setting, shares)


def test_a_product_compared_before_its_degree_is_reduced_is_caught():
    shares = share(THREE, np.arange(5))
    with pytest.raises(CryptoError, match="degree 1"):
        negative(THREE, field.multiply(shares, shares))


def test_a_server_that_opens_another_share_is_caught():
    def tamper(number, sent):
        if number == 0:
            sent[2, 0] = field.add(sent[2, 0], field.constant(1))

    with pytest.raises(CryptoError, match="belong together"):
        negative(THREE, share(THREE, np.arange(5)), tamper=tamper)


def test_servers_that_are_out_of_step_are_caught():
    prepared = prepared_for(THREE, 10)
    prepared[1].take(3)
    with pytest.raises(CryptoError, match="belong together"):
        negative(THREE, share(THREE, np.arange(5)), prepared)


def test_prepared_numbers_serve_once():
    prepared = prepared_for(THREE, 10)
    first = prepared[0].take(4)
    assert prepared[0].left == 6
    second = prepared[0].take(6)
    together = {number for taken in (first, second) for number in from_words(taken[2])}
    assert len(together) == 10
    with pytest.raises(CryptoError, match="prepare more"):
        prepared[0].take(1)


def test_preparing_nothing_is_fine():
    (prepared, *_) = prepared_for(THREE, 0)
    assert isinstance(prepared, RandomNumbers)
    assert prepared.left == 0


@pytest.mark.parametrize("fault", MALFORMED)
@pytest.mark.parametrize("number", [0, 1, 4])
def test_malformed_messages_are_refused(fault, number):
    def tamper(at, sent):
        if at == number:
            array = MALFORMED[fault](sent.pop((1, 0)))
            if array is not None:
                sent[1, 0] = array

    with pytest.raises(CryptoError, match="expected"):
        negative(THREE, share(THREE, np.arange(5)), tamper=tamper)


# ---------------------------------------------------------------- an independent implementation

REFERENCE = """
import json, sys
x, y = json.load(sys.stdin)
sys.argv = ["reference", "--no-log"]  # one party, no sockets
from mpyc.runtime import mpc
number = mpc.SecInt(33)
mpc.run(mpc.start())
answers = mpc.run(mpc.output([number(a) < number(b) for a, b in zip(x, y)]))
json.dump([int(answer) for answer in answers], sys.stdout)
"""


def test_answers_are_those_of_mpyc():
    """MPyC's runtime is one object per process: hence a process of its own."""
    rng = np.random.default_rng(2)
    x, y = rng.integers(-(2**20), 2**20, (2, 300))
    y[:100] = x[:100] + rng.integers(-1, 2, 100)
    x[:4], y[:4] = [-(2**20), 2**20 - 1, 0, -1], [2**20 - 1, -(2**20), 0, 0]
    run = subprocess.run(
        [sys.executable, "-c", REFERENCE], input=json.dumps([x.tolist(), y.tolist()]), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    theirs = json.loads(run.stdout)
    setting = ServerSetting(servers=3, degree=1, bits=22)
    assert opened(setting, negative(setting, share(setting, x - y)).results).tolist() == theirs
    first, dealt = rng.integers(0, 2**64, 300, dtype=np.uint64), deal(300)
    by_two = Play([sign_bit(0, first, dealt[0]), sign_bit(1, (x - y).astype(np.uint64) - first, dealt[1])]).results
    assert (by_two[0] ^ by_two[1]).tolist() == theirs
