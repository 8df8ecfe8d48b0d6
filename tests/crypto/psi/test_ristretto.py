"""ristretto255 against the vectors of RFC 9496, RFC 9497 (which exercises RFC 9380) and its group laws."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.transfer import sodium
from treaty.crypto.transfer.sodium import ORDER, from_uniform, multiply, random_scalar, validate
from treaty.errors import CryptoError

# RFC 9496, appendix A.1: encodings of 1 to 15 times the generator.
MULTIPLES = """
e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76
6a493210f7499cd17fecb510ae0cea23a110e8d5b901f8acadd3095c73a3b919
94741f5d5d52755ece4f23f044ee27d5d1ea1e2bd196b462166b16152a9d0259
da80862773358b466ffadfe0b3293ab3d9fd53c5ea6c955358f568322daf6a57
e882b131016b52c1d3337080187cf768423efccbb517bb495ab812c4160ff44e
f64746d3c92b13050ed8d80236a7f0007c3b3f962f5ba793d19a601ebb1df403
44f53520926ec81fbd5a387845beb7df85a96a24ece18738bdcfa6a7822a176d
903293d8f2287ebe10e2374dc1a53e0bc887e592699f02d077d5263cdd55601c
02622ace8f7303a31cafc63f8fc48fdc16e1c8c8d234b2f0d6685282a9076031
20706fd788b2720a1ed2a5dad4952b01f413bcf0e7564de8cdc816689e2db95f
bce83f8ba5dd2fa572864c24ba1810f9522bc6004afe95877ac73241cafdab42
e4549ee16b9aa03099ca208c67adafcafa4c3f3e4e5303de6026e3ca8ff84460
aa52e000df2e16f55fb1032fc33bc42742dad6bd5a8fc0be0167436c5948501f
46376b80f409b29dc2b5f6f0c52591990896e5716f41477cd30085ab7f10301e
e0c418f7c8d9c4cdd7395b93ea124f3ad99021bb681dfc3302a9d99a2e53e64e
""".split()

# Appendix A.2: what must not decode, by reason, and the identity, which decodes but is refused.
BAD = {
    "identity": "00" * 32,
    "not canonical": "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "high bit": "00ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "negative": "01" + "00" * 31,
    "no square": "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",
    "negative xy": "3eb858e78f5a7254d8c9731174a94f76755fd3941c0ac93735c07ba14579630e",
    "s = -1": "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
}

# Appendix A.3: the one-way map of SHA-512 of each text.
MAPPED = {
    "Ristretto is traditionally a short shot of espresso coffee": (
        "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46"
    ),
    "made with the normal amount of ground coffee but extracted with": (
        "f26e5b6f7d362d2d2a94c5d0e7602cb4773c95a2e5c31a64f133189fa76ed61b"
    ),
    "about half the amount of water in the same amount of time": (
        "006ccd2a9e6867e6a2c5cea83d3302cc9de128dd2a9a57dd8ee7b9d7ffe02826"
    ),
    "by using a finer grind.": "f8f0c87cf237953c5890aec3998169005dae3eca1fbb04548c635953c817f92a",
    "This produces a concentrated shot of coffee per volume.": (
        "ae81e7dedf20a497e10c304a765c1767a42d6e06029758d2d7e8ef7cc4c41179"
    ),
    "Just pulling a normal shot short will produce a weaker shot": (
        "e2705652ff9f5e44d3e841bf1c251cf7dddb77d140870d1ab2ed64f1a9ce8628"
    ),
    "and is not a Ristretto as some believe.": "80bd07262511cdde4863f8a7434cef696750681cb9510eea557088f76d9e5065",
}


def rows(*texts: str) -> np.ndarray:
    return np.stack([np.frombuffer(bytes.fromhex(text), np.uint8) for text in texts])


def scalar(number: int) -> np.ndarray:
    return np.frombuffer((number % ORDER).to_bytes(32, "little"), np.uint8)


def strings(*texts: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = np.frombuffer(b"".join(texts), np.uint8).copy()
    return data, np.cumsum([0, *map(len, texts)]), np.arange(len(texts))


def test_multiples_of_the_generator_are_those_of_the_rfc() -> None:
    generator = rows(MULTIPLES[0])
    for number, expected in enumerate(MULTIPLES, 1):
        assert multiply(generator, scalar(number)).tobytes().hex() == expected


def test_map_of_uniform_bytes_is_that_of_the_rfc() -> None:
    uniform = rows(*(hashlib.sha512(text.encode()).hexdigest() for text in MAPPED))
    assert np.array_equal(from_uniform(uniform), rows(*MAPPED.values()))


def test_hash_to_group_is_that_of_rfc_9497() -> None:
    # A.1.1: blinded and evaluated elements of the OPRF, inputs 00 and 5a...5a; its hash is that of RFC 9380.
    texts = strings(b"\x00", b"\x5a" * 17)
    hashed = from_uniform(sodium.expand(*texts, b"HashToGroup-OPRFV1-\x00-ristretto255-SHA512"))
    blind = rows("64d37aed22a27f5191de1c1d69fadb899d8862b58eb4220029e036ec4c1f6706")[0]
    key = rows("5ebcea5ee37023ccb9fc2d2019f9d7737be85591ae8652ffa9ef0f4d37063b0e")[0]
    blinded = multiply(hashed, blind)
    assert np.array_equal(
        blinded,
        rows(
            "609a0ae68c15a3cf6903766461307e5c8bb2f95e7e6550e1ffa2dc99e412803c",
            "da27ef466870f5f15296299850aa088629945a17d1f5b7f5ff043f76b3c06418",
        ),
    )
    assert np.array_equal(
        multiply(blinded, key),
        rows(
            "7ec6578ae5120958eb2db1745758ff379e77cb64fe77b0b2d8cc917ea0869c7e",
            "b4cbf5a4f1eeda5a63ce7b77c7d23f461db3fcab0dd28e4e17cecb5c90d02c25",
        ),
    )


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_points_off_the_group_and_the_identity_are_refused(bad: str) -> None:
    points = rows(MULTIPLES[3], bad, MULTIPLES[7], bad)
    for use in (validate, lambda given: multiply(given, random_scalar())):
        with pytest.raises(CryptoError, match="got 2 others of 4"):
            use(points)


@pytest.mark.parametrize(
    "points", [np.zeros((2, 31), np.uint8), np.zeros((2, 32), np.int8), np.zeros(32, np.uint8)], ids=repr
)
def test_arrays_of_another_shape_are_refused(points: np.ndarray) -> None:
    with pytest.raises(CryptoError, match="expected uint8"):
        multiply(points, random_scalar())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, ORDER - 1), st.integers(1, ORDER - 1))
def test_multiplication_commutes_and_composes(a: int, b: int) -> None:
    points = rows(*MULTIPLES)
    twice = multiply(multiply(points, scalar(a)), scalar(b))
    assert np.array_equal(twice, multiply(multiply(points, scalar(b)), scalar(a)))
    assert np.array_equal(twice, multiply(points, scalar(a * b)))


def test_threads_and_rows_do_not_change_results() -> None:
    uniform = np.random.default_rng(0).integers(0, 256, (300, 64), np.uint8)
    points, key = from_uniform(uniform, 3), random_scalar()
    assert np.array_equal(points[::-1], from_uniform(uniform[::-1]))
    assert np.array_equal(multiply(points, key, 3)[::2], multiply(points[::2], key))
    validate(points, 3)
    assert len(multiply(points[:0], key, 3)) == 0


def test_scalars_are_drawn_from_the_whole_range() -> None:
    drawn = [int.from_bytes(random_scalar().tobytes(), "little") for _ in range(64)]
    assert len(set(drawn)) == 64
    assert all(0 < number < ORDER for number in drawn)
    assert max(drawn) > ORDER // 2  # fails once in 2^64
    assert sodium.POINT == 32
