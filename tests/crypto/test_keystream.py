import numpy as np
import pytest

from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import from_words


def test_keystream_is_aes_256_in_counter_mode():
    block = Keystream(bytes(32)).bits(128, 1)
    assert block.astype("<u8").tobytes().hex() == "dc95c078a2408989ad48a21492842087"  # AES-256, key 0, block 0


@pytest.mark.parametrize("bits", [1, 7, 64, 65, 256, 592])
def test_bits_fill_exactly_the_asked_length(bits):
    values = from_words(Keystream().bits(bits, 300))
    assert max(values).bit_length() == bits  # fails by chance with probability 2^-300


@pytest.mark.parametrize("bound", [1, 2, 5, 2**64 - 1, 2**64 + 1, 3 << 126])
def test_below_stays_below_the_bound(bound):
    assert max(from_words(Keystream().below(bound, 500))) < bound


def test_below_is_uniform():
    counts = np.bincount(Keystream(b"k" * 32).below(97, 97 * 200)[:, 0].astype(int), minlength=97)
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 96 + 6 * np.sqrt(2 * 96)  # fixed key: no false alarm


def test_streams_differ_from_each_other():
    assert not np.array_equal(Keystream().bits(256, 4), Keystream().bits(256, 4))
