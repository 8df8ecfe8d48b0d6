import hashlib
import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crypto.lattice.oracle import FALSE_ALARM, lift
from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.ring import errors, flood, public_ring_elements, ternary, uniform
from treaty.crypto.parameters import DEGREE, LEAST_PRIME, SETS


class Fixed:
    """A stream of given bytes; zeros once they are used up."""

    def __init__(self, data):
        self.data, self.used = data, 0

    def draw(self, count):
        taken = self.data[self.used : self.used + count]
        self.used += count
        return taken + bytes(count - len(taken))


def words(*values):
    return b"".join(value.to_bytes(4, "little") for value in values)


def assert_distributed(counts, probabilities):
    """Chi-squared; cells expecting fewer than ten are taken together."""
    counts, expected = np.asarray(counts, float), np.asarray(probabilities) * np.sum(counts)
    rare = expected < 10
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    if not rare.any():
        counts, expected = counts[:-1], expected[:-1]
    assert expected.sum() == pytest.approx(counts.sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < stats.chi2.isf(FALSE_ALARM, len(counts) - 1)


def integers(residues, primes):
    """The integers behind residues of a flood, those above half the modulus being negative."""
    modulus = math.prod(primes)
    lifted = lift(residues.T.tolist(), primes)
    return [x - modulus if x > modulus // 2 else x for x in lifted]


# ---------------------------------------------------------------- known answers


def test_uniform_takes_the_bounds_bits_of_each_word_and_leaves_out_what_is_not_below():
    stream = Fixed(words(99, 100, 1 << 31, 0xFFFFFFFF, (1 << 31) + 7, 98, 101))
    assert uniform(stream.draw, 100, 5).tolist() == [99, 0, 7, 98, 0]
    # five words; then as many as were left out: first two, of which 98 stays, then one more beyond the given bytes
    assert stream.used == 4 * (5 + 2 + 1)


@pytest.mark.parametrize("bound", [33177601, 67043329, SETS[5][0]])
def test_uniform_draws_at_most_about_two_words_a_number(bound):
    stream, drawn = Keystream(), []
    uniform(lambda count: drawn.append(count) or stream.raw(count), bound, 10_000)
    assert sum(drawn) < 2.1 * 4 * 10_000


@pytest.mark.parametrize("bound", [1, 2, SETS[5][0], LEAST_PRIME, 1 << 31])
def test_uniform_keeps_the_largest_number_and_no_larger_one(bound):
    stream = Fixed(words(bound - 1, *([bound] if bound < 1 << 31 else [])))
    assert uniform(stream.draw, bound, 2).tolist() == [bound - 1, 0]


def test_ternary_reads_five_to_a_byte_and_leaves_out_bytes_from_243():
    data = bytes([242, 243, 0, 255, 1, 1 + 3 * 2 + 81 * 1, 250])
    digits = [byte // 3**k % 3 - 1 for byte in data if byte < 243 for k in range(5)]
    assert digits[:15] == [1] * 5 + [-1] * 5 + [0, -1, -1, -1, -1]
    for count in range(1, 21):
        assert ternary(Fixed(data).draw, count).tolist() == digits[:count]


def test_ternary_draws_again_when_too_many_bytes_were_left_out():
    assert ternary(Fixed(b"\xff" * 500 + bytes([121] * 3)).draw, 15).tolist() == [0] * 15


def test_errors_are_differences_of_counts_of_21_bits():
    full = (1 << 21) - 1
    first, second = [full, 0, full, 0xFFE00000, 5], [0, full, full, 0, 2 | 1 << 21]
    assert errors(Fixed(words(*first, *second)).draw, 5).tolist() == [21, -21, 0, 0, 1]


@settings(deadline=None)
@given(st.binary(min_size=8, max_size=400))
def test_errors_equal_their_definition(data):
    count = len(data) // 8
    values = [int.from_bytes(data[4 * i : 4 * i + 4], "little") % (1 << 21) for i in range(2 * count)]
    expected = [values[i].bit_count() - values[count + i].bit_count() for i in range(count)]
    assert errors(Fixed(data).draw, count).tolist() == expected


@settings(deadline=None)
@given(st.integers(1, 150), st.binary(min_size=20, max_size=200), st.integers(5, 7))
def test_flood_is_residues_of_the_integer_that_the_bytes_are(bits, data, primes):
    size = 4 * -(-bits // 32)
    count = max(1, len(data) // size)
    data = data.ljust(count * size, b"\0")
    expected = [
        int.from_bytes(data[size * i : size * (i + 1)], "little") % (1 << bits) - (1 << bits - 1) for i in range(count)
    ]
    residues = flood(Fixed(data).draw, bits, SETS[primes], count)
    assert residues.tolist() == [[x % p for p in SETS[primes]] for x in expected]
    assert integers(residues, SETS[primes]) == expected


@pytest.mark.parametrize("bits", [1, 2, 5, 10])
def test_flood_takes_every_value_of_its_range_equally_often(bits):
    stream = Fixed(words(*range(1 << bits)))
    assert integers(flood(stream.draw, bits, SETS[5], 1 << bits), SETS[5]) == [*range(-(1 << bits - 1), 1 << bits - 1)]


@pytest.mark.parametrize("bits", [31, 32, 33, 64, 73, 89, 96, 128])
def test_flood_reaches_both_ends_of_its_range_and_not_beyond(bits):
    size = 4 * -(-bits // 32)
    stream = Fixed(bytes(size) + b"\xff" * size)
    assert integers(flood(stream.draw, bits, SETS[5], 2), SETS[5]) == [-(1 << bits - 1), (1 << bits - 1) - 1]


def plainly_expanded(seed, number, prime, degree):
    label = b"treaty lattice public element" + number.to_bytes(8, "little") + prime.to_bytes(8, "little")
    key = hashlib.sha256(label + seed).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    out = []
    while len(out) < degree:
        word = int.from_bytes(stream.update(bytes(4)), "little") % (1 << 31)
        if word < prime:
            out.append(word)
    return out


def test_public_elements_follow_their_format():
    seed = bytes(range(32))
    for number in (0, 1, 300):
        out = public_ring_elements(seed, number, SETS[7], 128)
        assert out.tolist() == [plainly_expanded(seed, number, prime, 128) for prime in SETS[7]]


def test_public_elements_stay_the_same_between_versions():
    joined = b"".join(public_ring_elements(bytes(32), j, SETS[6], DEGREE).astype("<u4").tobytes() for j in range(3))
    assert hashlib.sha256(joined).hexdigest() == "9baaebead37d611b98188c612c1a6d94c4bcee4a62ebf01cbc743cf088365b30"


def test_public_elements_differ_by_seed_number_and_prime():
    base = public_ring_elements(bytes(32), 0, SETS[5][:2], 256)
    other = public_ring_elements(bytes(31) + b"\1", 0, SETS[5][:2], 256)
    following = public_ring_elements(bytes(32), 1, SETS[5][:2], 256)
    rows = [*base, *other, *following]
    for i, row in enumerate(rows):  # two of 256 words below 2^31 agree in more than three places once in 2^80
        assert all(np.count_nonzero(row == another) <= 3 for another in rows[:i])


# ---------------------------------------------------------------- distributions, seeded by the operating system


@pytest.mark.parametrize("bound", [(1 << 30) + 1, 3 << 29, SETS[5][0]])
def test_uniform_is_uniform(bound):
    drawn = uniform(Keystream().raw, bound, 200_000).astype(np.int64)
    assert drawn.max() < bound
    cells = np.bincount(drawn * 64 // bound, minlength=64)
    edges = [-(-bound * k // 64) for k in range(65)]
    assert_distributed(cells, np.diff(edges) / bound)
    assert_distributed(np.bincount(drawn % 256, minlength=256), np.full(256, 1 / 256))


def test_ternary_is_uniform_also_in_fives():
    drawn = ternary(Keystream().raw, 500_000).astype(np.int64)
    assert_distributed(np.bincount(drawn + 1, minlength=3), np.full(3, 1 / 3))
    fives = (drawn.reshape(-1, 5) + 1) @ 3 ** np.arange(5)
    assert_distributed(np.bincount(fives, minlength=243), np.full(243, 1 / 243))
    across = (drawn[4:-1].reshape(-1, 5)[:, :2] + 1) @ [1, 3]  # the last of a byte and the first of the next
    assert_distributed(np.bincount(across, minlength=9), np.full(9, 1 / 9))


def test_errors_are_centred_binomial_with_variance_10_5():
    count = 500_000
    drawn = errors(Keystream().raw, count).astype(np.int64)
    assert np.abs(drawn).max() <= 21
    assert_distributed(np.bincount(drawn + 21, minlength=43), stats.binom.pmf(np.arange(43), 42, 0.5))
    z = stats.norm.isf(FALSE_ALARM / 2)
    assert abs(drawn.mean()) < z * math.sqrt(10.5 / count)
    fourth = 3 * 10.5**2 - 10.5 / 2  # of a sum of 42 signs of half a unit: 3 v^2 - 42 / 8
    assert abs((drawn**2).mean() - 10.5) < z * math.sqrt((fourth - 10.5**2) / count)
    pairs = drawn[::2] * drawn[1::2]
    assert abs(pairs.mean()) < z * 10.5 / math.sqrt(len(pairs))


@pytest.mark.parametrize("bits", [73, 89, 96])
def test_flood_is_uniform_at_both_ends(bits):
    drawn = integers(flood(Keystream().raw, bits, SETS[5], 50_000), SETS[5])
    above = [x + (1 << bits - 1) for x in drawn]
    assert max(above).bit_length() <= bits
    assert min(above) >= 0
    for shift in (0, 29, bits - 8):  # 29: across words
        cells = np.bincount([x >> shift & 255 for x in above], minlength=256)
        assert_distributed(cells, np.full(256, 1 / 256))
