import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from treaty.crypto.additive.multiplier import load_word, multiply_add, unpack_digits

WORD = st.integers(0, 2**64 - 1)


@njit
def run_multiply_add(a, b, c, d):
    return multiply_add(a, b, c, d)


@njit
def run_load_word(raw, offset):
    return load_word(raw, offset)


@njit
def run_unpack_digits(raw, offset, out):
    unpack_digits(raw, offset, out, 0)


@settings(deadline=None)
@given(WORD, WORD, WORD, WORD)
def test_multiply_add_gives_both_words_of_the_sum(a, b, c, d):
    low, high = run_multiply_add(*(np.uint64(x) for x in (a, b, c, d)))
    assert int(low) + (int(high) << 64) == a * b + c + d


def test_multiply_add_of_largest_words_does_not_overflow():
    largest = np.uint64(2**64 - 1)
    assert run_multiply_add(largest, largest, largest, largest) == (2**64 - 1, 2**64 - 1)


@settings(deadline=None)
@given(st.binary(min_size=24, max_size=24), st.integers(0, 16))
def test_load_word_reads_any_offset(raw, offset):
    word = run_load_word(np.frombuffer(raw, np.uint8), offset)
    assert int(word) == int.from_bytes(raw[offset : offset + 8], "little")


@settings(deadline=None)
@given(st.binary(min_size=113, max_size=113), st.integers(0, 1))
def test_unpack_digits_cuts_thirteen_words_into_sixteen_digits(raw, offset):
    out = np.zeros(16, np.uint64)
    run_unpack_digits(np.frombuffer(raw, np.uint8), offset, out)
    assert sum(int(x) << (52 * i) for i, x in enumerate(out)) == int.from_bytes(raw[offset : offset + 104], "little")
    assert (out < 2**52).all()
