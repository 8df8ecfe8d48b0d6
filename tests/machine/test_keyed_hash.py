"""The keyed hash of many strings against the paper's algorithm in plain Python, and the reference's vectors."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.machine.keyed_hash import hashes

WORD = (1 << 64) - 1


def plain(text: bytes, key: bytes) -> bytes:
    v = [
        int.from_bytes(key[8 * (k % 2) : 8 * (k % 2) + 8], "little") ^ constant
        for k, constant in enumerate((0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573))
    ]
    v[1] ^= 0xEE

    def turned(word: int, bits: int) -> int:
        return (word << bits | word >> 64 - bits) & WORD

    def rounds(count: int) -> None:
        for _ in range(count):
            for a, b, c, d, first, second in ((0, 1, 2, 3, 13, 16), (2, 1, 0, 3, 17, 21)):
                v[a] = (v[a] + v[b]) & WORD
                v[b] = turned(v[b], first) ^ v[a]
                v[a] = turned(v[a], 32)
                v[c] = (v[c] + v[d]) & WORD
                v[d] = turned(v[d], second) ^ v[c]

    padded = text + bytes(7 - len(text) % 8) + bytes([len(text) % 256])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    out = b""
    for byte, change in ((2, 0xEE), (1, 0xDD)):
        v[byte] ^= change
        rounds(4)
        out += (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")
    return out


def hashed(texts: list[bytes], key: bytes) -> list[bytes]:
    offsets = np.append(0, np.cumsum([len(text) for text in texts])).astype(np.int64)
    found = hashes(np.frombuffer(b"".join(texts), np.uint8), offsets, key)
    return [row.astype("<u8").tobytes() for row in found]


def test_vectors_of_the_reference_implementation() -> None:
    assert [value.hex() for value in hashed([b"", b"\0"], bytes(range(16)))] == [
        "a3817f04ba25a8e66df67214c7550293", "da87c1d86b99af44347659119b22fc45",
    ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20), st.binary(min_size=16, max_size=16))
def test_hashes_are_those_of_the_paper(texts: list[bytes], key: bytes) -> None:
    assert hashed(texts, key) == [plain(text, key) for text in texts]


def test_lengths_beyond_a_byte_are_counted_modulo_256() -> None:
    texts = [bytes(length) for length in (255, 256, 257, 600)]
    assert hashed(texts, bytes(16)) == [plain(text, bytes(16)) for text in texts]
