import hmac

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.crypto.keystream import length_prefixed
from treaty.crypto.sharing import key_agreement
from treaty.crypto.sharing.key_agreement import Advertisement, EphemeralKeys, agree, seal, unseal, verifies
from treaty.errors import CryptoError

# RFC 7748, 6.1
ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
ALICE_PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
BOB_PUBLIC = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"

# Points of order 1, 2, 4 and 8, and the first of them not reduced: X25519 of them is zero whatever the secret.
SMALL_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


@pytest.fixture
def signing():
    return {name: Ed25519PrivateKey.generate() for name in ["ann", "bob", "cyd"]}


@pytest.fixture
def roster(signing):
    return {name: key.public_key().public_bytes_raw() for name, key in signing.items()}


@pytest.fixture
def keys(signing):
    return {name: EphemeralKeys("job", name, b"scope") for name in signing}


@pytest.fixture
def advertised(signing, keys):
    return {name: keys[name].advertise(signing[name]) for name in signing}


def test_seed_is_hkdf_of_the_shared_secret_of_rfc_7748():
    extracted = hmac.digest(bytes(32), bytes.fromhex(SHARED), "sha256")  # RFC 5869, 2.2, without salt
    expected = hmac.digest(extracted, length_prefixed("job", "alice", "bob") + b"\x01", "sha256")
    for secret, public in [(ALICE, BOB_PUBLIC), (BOB, ALICE_PUBLIC)]:
        key = X25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
        assert agree(key, bytes.fromhex(public), "job", "alice", "bob") == expected


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_all_zero_result_is_refused(point):
    with pytest.raises(CryptoError, match="keys of ann and bob"):
        agree(X25519PrivateKey.generate(), bytes.fromhex(point), "job", "ann", "bob")


def test_key_of_another_length_is_refused():
    with pytest.raises(CryptoError, match="X25519"):
        agree(X25519PrivateKey.generate(), bytes(31), "job", "ann", "bob")


def test_pairs_agree_and_nobody_else_has_their_seeds(keys, advertised, roster):
    seeds = {name: keys[name].agree(advertised, roster) for name in keys}
    found = set()
    for one, other in [("ann", "bob"), ("ann", "cyd"), ("bob", "cyd")]:
        for kind in ("mask", "channel"):
            assert getattr(seeds[one], kind)[other] == getattr(seeds[other], kind)[one]
            found.add(getattr(seeds[one], kind)[other])
    assert len(found) == 6
    assert len({seed.transcript for seed in seeds.values()}) == 1


def test_keys_are_new_every_time(signing):
    first, second = (EphemeralKeys("job", "ann", b"scope").advertise(signing["ann"]) for _ in range(2))
    assert not set(first) & set(second)


def forged(advertised, **changes):
    return advertised | {"bob": advertised["bob"]._replace(**changes)}


FORGERIES = {
    "channel key of the aggregator": lambda a, s: forged(a, channel=a["ann"].channel),
    "mask key of the aggregator": lambda a, s: forged(a, mask=a["ann"].mask),
    "keys exchanged": lambda a, s: forged(a, channel=a["bob"].mask, mask=a["bob"].channel),
    "signature of another": lambda a, s: forged(a, signature=a["ann"].signature),
    "no signature": lambda a, s: forged(a, signature=b""),
    "all of another": lambda a, s: a | {"bob": a["ann"]},
    "made for another scope": lambda a, s: a | {"bob": EphemeralKeys("job", "bob", b"other").advertise(s["bob"])},
    "stranger": lambda a, s: a | {"eve": a["bob"]},
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_keys_their_owner_did_not_sign_for_this_are_refused(forgery, keys, advertised, signing, roster):
    with pytest.raises(CryptoError, match=r"the keys of bob|the advertised keys"):
        keys["ann"].agree(FORGERIES[forgery](advertised, signing), roster)


def test_own_keys_missing_or_older_are_refused(keys, advertised, signing, roster):
    older = EphemeralKeys("job", "ann", b"scope").advertise(signing["ann"])
    for told in ({"bob": advertised["bob"]}, advertised | {"ann": older}):
        with pytest.raises(CryptoError, match="own keys of ann"):
            keys["ann"].agree(told, roster)


def test_key_of_small_order_is_refused_though_signed(keys, advertised, signing, roster):
    bad = bytes.fromhex(SMALL_ORDER[2])
    signature = signing["bob"].sign(length_prefixed("treaty ephemeral keys", b"scope", "bob", bad, bad))
    with pytest.raises(CryptoError, match="keys of ann and bob"):
        keys["ann"].agree(advertised | {"bob": Advertisement(bad, bad, signature)}, roster)


def test_transcripts_differ_with_the_keys_told(keys, advertised, roster):
    whole = keys["ann"].agree(advertised, roster).transcript
    part = keys["ann"].agree({name: advertised[name] for name in ["ann", "bob"]}, roster).transcript
    assert whole != part


def test_secrets_are_not_shown(keys, advertised, roster):
    seeds = keys["ann"].agree(advertised, roster)
    assert repr(seeds.mask_secret) not in repr(seeds)


def test_sealed_box_opens_only_as_it_was_sealed():
    box = seal(b"s" * 32, b"content", b"ann to bob")
    assert unseal(b"s" * 32, box, b"ann to bob") == b"content"
    flipped = bytes([box[0] ^ 1]) + box[1:], box[:-1] + bytes([box[-1] ^ 1]), box[:12] + bytes([box[12] ^ 1]) + box[13:]
    for other in (*flipped, box[:-1], box[:12], box[:3], b""):
        assert unseal(b"s" * 32, other, b"ann to bob") is None
    assert unseal(b"s" * 32, box, b"bob to ann") is None
    assert unseal(b"t" * 32, box, b"ann to bob") is None


def test_signature_is_of_its_key_and_content(signing, roster):
    signature = signing["ann"].sign(b"content")
    assert verifies(roster["ann"], signature, b"content")
    for public, signed, content in [
        (roster["bob"], signature, b"content"), (roster["ann"], signature, b"other"), (b"", signature, b"content"),
        (roster["ann"], b"", b"content"), (roster["ann"], signature[:-1], b"content"),
    ]:  # fmt: skip
        assert not verifies(public, signed, content)


@pytest.mark.parametrize("public", sorted(key_agreement._SMALL_ORDER), ids=bytes.hex)
def test_no_signature_is_valid_under_a_key_of_small_order(public):
    for key in (public, public[:31] + bytes([public[31] | 0x80])):
        for point in ("00" * 32, "01" + "00" * 31):
            signature = bytes.fromhex(point) + bytes(32)
            assert not any(verifies(key, signature, bytes([k])) for k in range(64))


def test_without_the_check_signatures_of_zeros_are_valid_under_a_key_of_zeros(monkeypatch):
    monkeypatch.setattr(key_agreement, "_SMALL_ORDER", frozenset())
    assert any(verifies(bytes(32), bytes(64), bytes([k])) for k in range(64))
