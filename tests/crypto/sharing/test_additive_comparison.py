import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crypto.sharing.servers import FALSE_ALARM, MALFORMED, Play
from treaty.crypto.sharing.additive_routing import deal, sign_bit, triples_of
from treaty.errors import CryptoError

WORDS = st.one_of(st.sampled_from([0, 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))


def additive(values, seed=0):
    first = np.random.default_rng(seed).integers(0, 2**64, len(values), dtype=np.uint64)
    return first, values.astype(np.uint64) - first


def signs(first, second, bits=64):
    dealt = deal(len(first), bits)
    return Play([sign_bit(i, values, dealt[i]) for i, values in enumerate((first, second))])


@pytest.mark.slow
def test_a_million_pairs_are_compared_rightly_by_two_servers():
    rng = np.random.default_rng(1)
    x, y = rng.integers(-(2**62), 2**62, (2, 1_000_000))
    y[:300_000] = x[:300_000] + rng.integers(-2, 3, 300_000)
    play = signs(*additive(x - y))
    assert np.array_equal(play.results[0] ^ play.results[1], x < y)


@settings(deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=130))
def test_the_sign_is_that_of_the_sum_of_any_shares(pairs):
    first, second = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    results = signs(first, second).results
    assert (results[0] ^ results[1]).tolist() == [(a + b) % 2**64 >> 63 for a, b in pairs]


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 9, 17, 63])
def test_the_sign_modulo_a_power_of_two_is_that_of_the_sum_of_the_lowest_bits(bits):
    rng = np.random.default_rng(bits)
    first, second = rng.integers(0, 2**64, (2, 500), dtype=np.uint64)
    lowest = np.uint64(2**bits - 1)
    second[:200] = (second[:200] & ~lowest) | (np.arange(-100, 100).astype(np.uint64) - first[:200] & lowest)
    play = signs(first, second, bits)
    assert np.array_equal(play.results[0] ^ play.results[1], (first + second & lowest) >> np.uint64(bits - 1))
    assert len(play.rounds) == 1 + int(np.ceil(np.log2(bits - 1)))
    assert play.nbytes < 2 * 4 * bits * 8 * 8
    assert triples_of(bits) < 3 * bits


def test_carries_run_through_any_number_of_bits():
    """2^k - 1 and 1, and their neighbours, for every k."""
    ones = np.array([(1 << k) - 1 for k in range(65)], np.uint64)
    first, second = np.repeat(ones, 3), np.tile(np.array([0, 1, 2], np.uint64), 65)
    results = signs(first, second).results
    assert np.array_equal(results[0] ^ results[1], (first + second) >> np.uint64(63))


def test_rounds_and_bytes_of_two_servers_are_those_of_the_text():
    dealt = deal(6400)
    assert [d.corrections.nbytes for d in dealt] == [0, 181 * 100 * 8]
    play = Play([sign_bit(i, np.zeros(6400, np.uint64), dealt[i]) for i in range(2)])
    assert len(play.rounds) == 7
    assert play.nbytes == 2 * 243 * 6400 // 8


@pytest.mark.parametrize("server", [0, 1])
def test_what_a_server_sees_is_uniform_for_any_shares(server):
    """Every slice of every message, half ones; bytes of all; output bits: false alarm 1e-9 each."""
    rows, tables = 64 * 400, []
    for mine, value in ((5, -3), (2**63 + 9, 12)):
        own = np.full(rows, mine, np.uint64)
        other = np.full(rows, value, np.int64).astype(np.uint64) - own
        play = signs(own, other) if server == 0 else signs(other, own)
        seen = np.concatenate([sent[1 - server, server] for sent in play.rounds])
        ones = np.bitwise_count(seen).sum(axis=1, dtype=np.int64)
        assert (np.abs(ones - rows / 2) < 7.5 * np.sqrt(rows) / 2).all()  # 6e-14 each of 243
        tables.append(np.bincount(seen.view(np.uint8).reshape(-1), minlength=256))
        assert stats.chisquare(tables[-1]).pvalue > FALSE_ALARM
        assert stats.binomtest(int(play.results[server].sum()), rows).pvalue > FALSE_ALARM
    assert stats.chi2_contingency(np.stack(tables)).pvalue > FALSE_ALARM


def test_triples_serve_one_batch_of_their_size():
    first, second = additive(np.arange(-5, 5))
    dealt = deal(10)
    with pytest.raises(CryptoError, match="for 9 comparisons"):
        next(sign_bit(0, first[1:], dealt[0]))
    Play([sign_bit(0, first, dealt[0]), sign_bit(1, second, dealt[1])])
    with pytest.raises(CryptoError, match="used"):
        next(sign_bit(0, first, dealt[0]))


@pytest.mark.parametrize("fault", ["no message", "one row less", "signed", "bytes"])
def test_malformed_messages_between_two_servers_are_refused(fault):
    program = sign_bit(0, np.zeros(3, np.uint64), deal(3)[0])
    array = MALFORMED[fault](next(program)[1])
    with pytest.raises(CryptoError, match="expected"):
        program.send({} if array is None else {1: array})
