"""Hashes of many strings against Python's, and what a commitment to a set shows."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.transfer.sodium import NODES, commit, digests, expand
from treaty.errors import CryptoError

KEY = bytes(range(32))
TEXTS = st.lists(st.binary(max_size=300), min_size=1, max_size=20)


def packed(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(b"".join(texts), np.uint8).copy(), np.cumsum([0, *map(len, texts)])


def commitment(texts: list[bytes], key: bytes = KEY) -> np.ndarray:
    return commit(digests(*packed(texts), np.arange(len(texts)), key), key)


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.binary(min_size=1, max_size=255))
def test_expand_is_expand_message_xmd(texts: list[bytes], domain: bytes) -> None:
    prime = domain + bytes([len(domain)])
    expected = []
    for text in texts:  # RFC 9380, 5.3.1, with one block
        first = hashlib.sha512(bytes(128) + text + b"\x00\x40\x00" + prime).digest()
        expected.append(hashlib.sha512(first + b"\x01" + prime).digest())
    assert expand(*packed(texts), np.arange(len(texts)), domain).tobytes() == b"".join(expected)


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.data())
def test_digests_are_keyed_blake2b_of_the_chosen_rows(texts: list[bytes], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=30))
    out = digests(*packed(texts), np.array(chosen, np.int64), KEY, 2)
    expected = [hashlib.blake2b(texts[row], key=KEY, digest_size=16).digest() for row in chosen]
    assert out.astype("<u8").tobytes() == b"".join(expected)


def test_threads_do_not_change_hashes() -> None:
    texts = [b"%d" % number for number in range(5000)]
    rows = np.arange(5000)
    assert np.array_equal(digests(*packed(texts), rows, KEY, 3), digests(*packed(texts), rows, KEY))


@pytest.mark.parametrize("domain", [b"", bytes(256)], ids=["empty", "long"])
def test_domain_of_the_wrong_length_is_refused(domain: bytes) -> None:
    with pytest.raises(CryptoError, match="1 to 255 bytes"):
        expand(*packed([b"a"]), np.array([0]), domain)


def test_key_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(CryptoError, match="32 bytes"):
        digests(*packed([b"a"]), np.array([0]), b"short")


def test_commitment_depends_on_the_set_and_the_key_alone() -> None:
    texts = [b"%d" % number for number in range(1000)]
    assert np.array_equal(commitment(texts), commitment(texts[::-1]))
    assert (commitment(texts) != commitment(texts, bytes(32))).any(axis=1).all()


def test_commitment_shows_every_changed_id() -> None:
    texts = [b"%d" % number for number in range(1000)]
    before = commitment(texts)
    for changed in ([*texts, b"new"], texts[:-1]):
        assert (commitment(changed) != before).any(axis=1).sum() == 1
    swapped = (commitment([*texts[:-1], b"new"]) != before).any(axis=1).sum()
    assert 1 <= swapped <= 2


def test_commitment_of_few_ids_does_not_show_which_nodes_are_empty() -> None:
    nodes = commitment([b"only"])
    assert len(np.unique(nodes, axis=0)) == NODES
