"""Packed residues: what is unpacked is what was packed, in as few bits as the primes have, whole or in pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.lattice.ring import pack, pack_plane, packed_words, unpack, unpack_plane
from treaty.crypto.parameters import DEGREE, SETS, Parameters, narrow_primes
from treaty.errors import CryptoError

MODULI = [SETS[5], SETS[7], narrow_primes(143, 5), narrow_primes(176, 6), narrow_primes(200, 7)]


def drawn(primes, vectors, count, seed):
    rng = np.random.default_rng(seed)
    residues = np.stack([rng.integers(0, prime, (vectors, count), np.uint32) for prime in primes], axis=1)
    residues[:, :, : count // 8] = np.array(primes, np.uint32)[:, np.newaxis] - 1  # the widest
    return residues


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MODULI), st.integers(1, 2), st.one_of(st.integers(1, 70), st.integers(1, 3 * DEGREE)),
    st.integers(1, 2), st.integers(0, 99),
)  # fmt: skip
def test_what_is_unpacked_is_what_was_packed(primes, vectors, count, threads, seed):
    parameters, residues = Parameters(DEGREE, primes, 60, count, 1), drawn(primes, vectors, count, seed)
    packed = pack(parameters, residues, threads)
    assert packed.shape == (vectors, packed_words(parameters, count))
    bits = sum(prime.bit_length() for prime in primes) * count
    assert 0 <= 32 * packed.shape[1] - bits < 32 * len(primes)
    assert np.array_equal(unpack(parameters, packed, count, threads), residues)


@settings(max_examples=200, deadline=None)
@given(st.integers(16, 31), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
def test_a_plane_is_its_numbers_bits_from_the_lowest_on(width, numbers):
    numbers = [number % (1 << width) for number in numbers]
    whole = sum(number << width * k for k, number in enumerate(numbers))
    out = np.empty(-(-len(numbers) * width // 32), np.uint32)
    pack_plane(np.array(numbers, np.uint32), width, out)
    assert int.from_bytes(out.astype("<u4").tobytes(), "little") == whole
    back = np.empty(len(numbers), np.uint32)
    unpack_plane(out, width, back)
    assert back.tolist() == numbers


@pytest.mark.parametrize("count", [DEGREE + 1, 3 * DEGREE, 3 * DEGREE + 77])
def test_pieces_of_whole_blocks_are_the_words_of_all(count):
    parameters = Parameters(DEGREE, MODULI[3], 60, count, 1)
    residues = drawn(parameters.primes, 2, count, 1)
    parts = [pack(parameters, residues[:, :, first : first + DEGREE]) for first in range(0, count, DEGREE)]
    assert np.array_equal(np.concatenate(parts, axis=1), pack(parameters, residues))
    left = count
    for part in parts:
        unpacked = unpack(parameters, part, left)
        assert unpacked.shape[2] == min(DEGREE, left)
        left -= unpacked.shape[2]


@pytest.mark.parametrize("change", [-1, 1, 31])
def test_words_of_no_whole_number_of_blocks_are_refused(change):
    parameters = Parameters(DEGREE, MODULI[3], 60, 100, 1)
    for count in (100, DEGREE):
        given = np.zeros((1, packed_words(parameters, count) + change), np.uint32)
        with pytest.raises(CryptoError, match="expected words of 20000 entries, or of fewer in whole blocks of 8192"):
            unpack(parameters, given, 20000)
    with pytest.raises(CryptoError, match="expected words of 100 entries"):  # more than are left
        unpack(parameters, np.zeros((1, packed_words(parameters, DEGREE)), np.uint32), 100)
