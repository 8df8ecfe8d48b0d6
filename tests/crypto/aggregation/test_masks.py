import hashlib
import hmac
import tracemalloc

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from treaty.crypto import keystream
from treaty.crypto.keystream import PairStreams, UsedNonces, add_masks, length_prefixed, mask_key, mask_nonce, pair_keys
from treaty.errors import CryptoError

PARTS = st.lists(st.one_of(st.binary(max_size=20), st.text(max_size=10)), max_size=5)


def encrypted(key, block):
    """Encrypt one block on its own."""
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)


def mask(key, length):
    values = np.zeros(length, np.uint64)
    add_masks(values, [key], [])
    return values


def test_hkdf_gives_the_vector_of_rfc_5869():
    derived = HKDF(SHA256(), 42, salt=bytes(range(13)), info=bytes(range(0xF0, 0xFA))).derive(b"\x0b" * 22)
    assert derived.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_mask_key_is_hkdf_expand():
    seed, nonce = bytes(range(32)), bytes(range(32, 64))
    assert mask_key(seed, nonce) == hmac.digest(seed, nonce + b"\x01", "sha256")  # RFC 5869, 2.3: T(1)


def test_mask_is_aes_256_in_counter_mode_from_zero():
    block = mask(bytes(32), 2).astype("<u8").tobytes()
    assert block.hex() == "dc95c078a2408989ad48a21492842087"  # AES-256, key 0, block 0


def test_nonce_is_the_hash_of_its_length_prefixed_parts():
    written = b"".join(len(part).to_bytes(8, "big") + part for part in [b"job", b"sum", b"3", b"0", b"grad"])
    assert mask_nonce("job", "sum", 3, 0, "grad") == hashlib.sha256(written).digest()


@settings(deadline=None)
@given(PARTS, PARTS)
def test_length_prefixed_parts_cannot_be_taken_for_others(left, right):
    def raw(parts):
        return [part if isinstance(part, bytes) else part.encode() for part in parts]

    assert (length_prefixed(*left) == length_prefixed(*right)) == (raw(left) == raw(right))


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(0, 70), st.integers(0, 100), st.integers(1, 40), st.integers(1, 9))
def test_masks_are_the_same_however_they_are_cut(plus, minus, length, chunk, streams):
    added, subtracted = ([bytes([sign, i]) * 16 for i in range(n)] for sign, n in enumerate([plus, minus]))
    whole = np.zeros(length, np.uint64)
    for key in added:
        whole += mask(key, length)
    for key in subtracted:
        whole -= mask(key, length)
    values = np.zeros(length, np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keystream, "_CHUNK", 2 * chunk)  # whole blocks of the cipher
        patch.setattr(keystream, "_OPEN", streams)
        add_masks(values, added, subtracted)
    assert np.array_equal(values, whole)


def test_masks_take_little_memory_beside_the_vector():
    values, keys = np.zeros(1_000_000, np.uint64), [bytes([i]) * 32 for i in range(4)]
    tracemalloc.start()
    add_masks(values, keys, keys[:1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes // 8


def test_masks_of_a_pair_cancel():
    seeds = {"ann": {"bob": b"s" * 32}, "bob": {"ann": b"s" * 32}}
    values = np.zeros(100, np.uint64)
    for name in seeds:
        add_masks(values, *pair_keys(name, seeds[name], seeds[name], b"n" * 32))
        assert values.any() == (name == "ann")


def test_names_in_order_decide_who_adds():
    seeds = {name: name.encode() * 16 for name in ["al", "cy", "di"]}
    added, subtracted = pair_keys("bo", seeds, seeds, b"n")
    assert added == [mask_key(seeds["cy"], b"n"), mask_key(seeds["di"], b"n")]
    assert subtracted == [mask_key(seeds["al"], b"n")]


def stream(name, seeds, nonce, length=100):
    values = np.zeros(length, np.uint64)
    PairStreams(name, seeds).add(values, nonce)
    return values


def test_stream_of_a_pair_is_aes_256_in_counter_mode_from_the_nonce():
    key, start = hmac.digest(b"s" * 32, b"treaty stream of a pair\x01", "sha256"), bytes(range(240, 256)) * 2
    blocks = b"".join(
        encrypted(key, ((int.from_bytes(start[:16], "big") + i) % 2**128).to_bytes(16, "big")) for i in range(50)
    )
    assert stream("ann", {"bob": b"s" * 32}, start).astype("<u8").tobytes() == blocks


def test_streams_of_pairs_cancel_and_differ_by_nonce_and_pair():
    names = ["ann", "bob", "cy"]
    seeds = {u: {v: "".join(sorted(u + v)).encode() * 5 for v in names if v != u} for u in names}
    one, other = ({u: stream(u, seeds[u], nonce) for u in names} for nonce in (b"n" * 32, b"m" * 32))
    for vectors in (one, other):
        assert not np.any(sum(vectors.values()))
    together = np.concatenate([*one.values(), *other.values()])
    assert len(np.unique(together)) == len(together)


def test_streams_start_anew_with_each_nonce_and_may_be_cut():
    streams = PairStreams("ann", {"bob": b"s" * 32, "al": b"t" * 32})
    values = np.zeros(100, np.uint64)
    streams.add(values, b"m" * 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keystream, "_CHUNK", 6)  # whole blocks of the cipher
        values = np.zeros(100, np.uint64)
        streams.add(values, b"n" * 32)
    assert np.array_equal(values, stream("ann", {"bob": b"s" * 32, "al": b"t" * 32}, b"n" * 32))


def test_peer_without_seed_is_refused():
    with pytest.raises(CryptoError, match="got 1 others"):
        pair_keys("bo", {"al": b"s" * 32}, ["al", "cy"], b"n")


def test_nonce_serves_once():
    used = UsedNonces()
    used.use(mask_nonce("job", "sum", 0, 0, ""))
    used.use(mask_nonce("job", "sum", 0, 1, ""))
    with pytest.raises(CryptoError, match="new nonce"):
        used.use(mask_nonce("job", "sum", 0, 0, ""))


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "bare"])
def test_masked_vector_looks_uniform(masked):
    values = np.arange(100_000, dtype=np.uint64)
    if masked:
        add_masks(values, [b"k" * 32], [b"l" * 32])
    counts = np.bincount(values.view(np.uint8), minlength=256)
    expected = values.nbytes / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Fixed keys, so no false alarm; of random keys one in 10^9 would fail.
    assert (chi_square < stats.chi2.isf(1e-9, 255)) == masked
