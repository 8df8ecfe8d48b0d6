"""The function of each bin against its definition: the receiver knows it at its own input, and there alone."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.transfer import oprf
from treaty.crypto.transfer.oprf import STEP, WIDTH, OprfReceiver, OprfSender
from treaty.errors import CryptoError

KEY = bytes(range(32))


def inputs(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, (count, 2), dtype=np.uint64)


@pytest.fixture(scope="module")
def ends() -> tuple[OprfReceiver, OprfSender]:
    receiver = OprfReceiver()
    sender = OprfSender(receiver.offer)
    receiver.accept(sender.points)
    return receiver, sender


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 2))
def test_values_are_equal_for_equal_inputs_alone(
    ends: tuple[OprfReceiver, OprfSender], seed: int, steps: int, threads: int
) -> None:
    receiver, sender = ends
    first, count = 3 * STEP, steps * STEP
    own = inputs(count, seed)
    message, values = receiver.extend(oprf.codes(KEY, own), first, threads)
    rows = sender.extend(message, threads)
    rng = np.random.default_rng(seed)
    bins = first + rng.integers(0, count, 2000)
    asked = np.where(rng.random(2000)[:, None] < 0.5, own[bins - first], inputs(2000, seed + 1))
    found = sender.values(rows, first, bins, oprf.codes(KEY, asked), threads)
    same = (asked == own[bins - first]).all(axis=1)
    assert 800 < same.sum() < 1200
    assert np.array_equal((found == values[bins - first]).all(axis=1), same)
    assert not np.any((found == values[bins - first])[~same])


def test_value_is_the_hash_of_the_masked_row(ends: tuple[OprfReceiver, OprfSender]) -> None:
    receiver, sender = ends
    own = inputs(STEP, 5)
    code = oprf.codes(KEY, own)
    message, values = receiver.extend(code, 0)
    rows = sender.extend(message)
    masked = rows ^ (code & sender._secret)
    for bin in (0, 7, STEP - 1):
        text = masked[bin].astype("<u8").tobytes() + bin.to_bytes(8, "little")
        assert values[bin].tobytes() == hashlib.blake2b(text, digest_size=24).digest()


def test_same_input_has_other_values_in_other_bins_and_sessions(ends: tuple[OprfReceiver, OprfSender]) -> None:
    receiver, _ = ends
    other = OprfReceiver()
    other.accept(OprfSender(other.offer).points)
    code = oprf.codes(KEY, np.repeat(inputs(1, 6), STEP, axis=0))
    values = np.concatenate([end.extend(code, 0)[1] for end in (receiver, receiver, other)])
    assert len(np.unique(values)) == values.size


def test_all_bits_of_the_secret_are_drawn_for_each_session() -> None:
    offer = OprfReceiver().offer
    drawn = np.stack([OprfSender(offer)._secret for _ in range(6)])
    assert len(np.unique(drawn)) == drawn.size == 6 * WIDTH // 64
    assert np.all(np.abs(np.bitwise_count(drawn).sum(axis=0) / (6 * 64) - 0.5) < 6 * 0.5 / (6 * 64) ** 0.5)


def test_message_hides_the_codes(ends: tuple[OprfReceiver, OprfSender]) -> None:
    receiver, _ = ends
    code = oprf.codes(KEY, inputs(8 * STEP, 7))
    message, _ = receiver.extend(code, 0)
    ones = np.unpackbits((message ^ code).view(np.uint8), axis=1).mean(axis=0)
    assert np.all(np.abs(ones - 0.5) < 6 * 0.5 / math.sqrt(8 * STEP))
    assert abs(np.bitwise_count(message ^ np.roll(code, 1, axis=0)).sum(axis=1).mean() - WIDTH / 2) < 2


def test_code_words_differ_in_enough_places() -> None:
    code = oprf.codes(KEY, inputs(2000, 8))
    distances = np.bitwise_count(code[:1000] ^ code[1000:]).sum(axis=1)
    assert distances.min() >= 180
    assert abs(distances.mean() - WIDTH / 2) < 2
    assert abs(distances.std() / (WIDTH**0.5 / 2) - 1) < 0.15  # as 512 bits have, not a quarter of them four times
    assert len(np.unique(code)) == code.size
    close = sum(math.comb(WIDTH, k) for k in range(128))
    assert math.log2(close) - WIDTH < -102  # what the docstring says
    assert math.log2(3 << 28) + math.log2(close) - WIDTH < -72
    assert not np.any(oprf.codes(KEY, inputs(5, 8)) == oprf.codes(bytes(32), inputs(5, 8)))


def test_points_that_are_none_are_refused() -> None:
    receiver = OprfReceiver()
    with pytest.raises(CryptoError, match="expected points of ristretto255"):
        receiver.accept(np.zeros((WIDTH, 32), np.uint8))
    with pytest.raises(CryptoError, match="expected points of ristretto255"):
        OprfSender(np.zeros(32, np.uint8))
