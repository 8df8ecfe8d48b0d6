"""Cards, trust, rotation and revocation: what is refused, and what a crash leaves."""

from __future__ import annotations

import base64
import datetime
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treaty.errors import ConfigError
from treaty.messaging import certificates
from treaty.messaging.certificates import load_identity, make_identity
from treaty.node.cards import (
    LARGEST_CARD,
    Card,
    decode_card,
    encode_card,
    ends,
    fingerprint_of,
    make_card,
    read_card,
    replaces,
    verify,
)
from treaty.node.identity import (
    Own,
    load_own,
    make_keys,
    must_compare,
    own_cards,
    peers,
    revoke,
    rotate,
    sign,
    trust,
    trusted,
)

LATER = datetime.timedelta(days=800)


@pytest.fixture
def bank(tmp_path) -> Path:
    """A bank's folder of keys, which trusts nobody."""
    make_keys(tmp_path / "bank", "bank")
    return tmp_path / "bank"


@pytest.fixture
def clinic(tmp_path) -> Path:
    make_keys(tmp_path / "clinic", "clinic")
    return tmp_path / "clinic"


def card_of(folder: Path) -> Card:
    return read_card(folder / f"{folder.name}.card")


def trust_clinic(bank: Path, clinic: Path) -> Card:
    card = card_of(clinic)
    trust(bank, card, fingerprint_of(card))
    return card


def modes(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


def test_keys_are_made_and_read_again(tmp_path):
    card = make_keys(tmp_path / "bank", "bank")
    own = load_own(tmp_path / "bank", "bank")
    assert own.card == card == read_card(tmp_path / "bank" / "bank.card")
    assert own_cards(tmp_path / "bank") == {"bank": card}
    assert card.certificate.encode() == own.identity.certificate
    assert verify(card, sign(own, b"a job"), b"a job")
    assert not verify(card, sign(own, b"a job"), b"another job")
    assert not verify(card, b"short", b"a job")
    # job files without nodes use the same key and certificate
    assert (
        load_identity(tmp_path / "bank" / "bank.key.pem", tmp_path / "bank" / "bank.cert.pem", "bank") == own.identity
    )
    assert stat.S_IMODE((tmp_path / "bank").stat().st_mode) == 0o700
    assert modes(tmp_path / "bank") == {
        "bank.key.pem": 0o600,
        "bank.sign.pem": 0o600,
        "bank.cert.pem": 0o644,
        "bank.card": 0o644,
    }


def test_a_card_signature_is_none_of_a_content(bank):
    own = load_own(bank, "bank")
    content = msgspec.json.encode(msgspec.structs.replace(own.card, signature=""))
    assert not verify(own.card, base64.b64decode(own.card.signature), content)


@pytest.mark.parametrize("end", ["key.pem", "cert.pem", "sign.pem", "card"])
def test_no_file_is_ever_replaced(tmp_path, end):
    (tmp_path / f"bank.{end}").write_text("mine")
    with pytest.raises(ConfigError, match=f"existing .*bank.{end}"):
        make_keys(tmp_path, "bank")
    assert [file.name for file in tmp_path.iterdir()] == [f"bank.{end}"]


def test_names_unfit_for_files_are_refused(tmp_path, bank):
    for name in ("", "../bank", "a b", "-a", "a" * 64):
        for call in (make_keys, load_own, rotate, revoke):
            with pytest.raises(ConfigError, match="expected a name"):
                call(bank, name)


@pytest.mark.parametrize("end", ["key.pem", "sign.pem"])
def test_private_files_open_to_others_are_refused(bank, end):
    (bank / f"bank.{end}").chmod(0o640)
    with pytest.raises(ConfigError, match=f"bank.{end}; run chmod 600"):
        load_own(bank, "bank")
    with pytest.raises(ConfigError, match=f"bank.{end}; run chmod 600"):
        rotate(bank, "bank")


@pytest.mark.parametrize("end", ["key.pem", "sign.pem"])
def test_private_files_of_another_user_are_refused(bank, monkeypatch, end):
    uid = os.geteuid()
    other = bank / f"bank.{end}"
    real = os.fstat

    def of_another(handle: int) -> os.stat_result:
        found = real(handle)
        if found.st_ino != other.stat().st_ino:
            return found
        return os.stat_result((*found[:4], uid + 1, *found[5:]))

    monkeypatch.setattr(certificates.os, "fstat", of_another)
    with pytest.raises(ConfigError, match=f"one of another: .*bank.{end}"):
        load_own(bank, "bank")


def test_files_that_do_not_belong_together_are_refused(tmp_path, bank):
    make_keys(tmp_path / "other", "bank")
    for ends_with, words in {
        ("card",): "signing key",
        ("sign.pem",): "signing key",
        ("card", "sign.pem"): "the card of bank has another certificate",
        ("key.pem",): "private key is not that of bank's certificate",
    }.items():
        before = {end: (bank / f"bank.{end}").read_bytes() for end in ends_with}
        for end in ends_with:
            (bank / f"bank.{end}").write_bytes((tmp_path / "other" / f"bank.{end}").read_bytes())
        with pytest.raises(ConfigError, match=words):
            load_own(bank, "bank")
        for end, data in before.items():
            (bank / f"bank.{end}").write_bytes(data)
    (bank / "bank.sign.pem").write_bytes((bank / "bank.key.pem").read_bytes())
    with pytest.raises(ConfigError, match="expected an Ed25519 private key"):
        load_own(bank, "bank")
    (bank / "bank.sign.pem").write_bytes(b"none")
    with pytest.raises(ConfigError, match="expected unencrypted PEM"):
        load_own(bank, "bank")


def test_fingerprints_tell_name_certificate_and_signing_key_apart(tmp_path):
    made, signing = make_identity("bank").certificate, Ed25519PrivateKey.generate()
    cards = [
        make_card("bank", made, signing),
        make_card("clinic", made, signing),
        make_card("bank", make_identity("bank").certificate, signing),
        make_card("bank", made, Ed25519PrivateKey.generate()),
    ]
    assert len({fingerprint_of(card) for card in cards}) == 4
    assert fingerprint_of(cards[0]) == fingerprint_of(make_card("bank", made, signing, (cards[3], signing)))


def test_a_card_is_trusted_once_its_fingerprint_was_said(bank, clinic):
    card = card_of(clinic)
    assert must_compare(bank, card)
    with pytest.raises(ConfigError, match="the fingerprint of clinic's card must be compared"):
        trust(bank, card)
    with pytest.raises(ConfigError, match="has another fingerprint"):
        trust(bank, card, fingerprint_of(card_of(bank)))
    with pytest.raises(ConfigError, match="has another fingerprint"):
        trust(bank, card, fingerprint_of(card)[-4:])
    assert trusted(bank) == {}
    trust(bank, card, fingerprint_of(card).upper().replace(" ", ""))
    assert trusted(bank) == {"clinic": card}
    trust(bank, card)
    with pytest.raises(ConfigError, match="has another fingerprint"):
        trust(bank, card, fingerprint_of(card_of(bank)))
    (peer,) = peers(bank)
    assert (peer.name, peer.card, peer.wrong) == ("clinic", card, "")
    assert abs(peer.since - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(hours=1)
    assert modes(bank)["peers"] == 0o700
    assert modes(bank / "peers") == {"clinic.card": 0o600, "revoked": 0o700}


def test_another_card_under_a_trusted_name_is_refused(tmp_path, bank, clinic):
    card = trust_clinic(bank, clinic)
    other = make_keys(tmp_path / "other", "clinic")
    with pytest.raises(ConfigError, match="another card of clinic is trusted"):
        trust(bank, other, fingerprint_of(other))
    assert trusted(bank) == {"clinic": card}


def test_a_rotated_card_needs_the_signature_of_the_trusted_one(tmp_path, bank, clinic):
    card, own = trust_clinic(bank, clinic), load_own(clinic, "clinic")
    signing, certificate = Ed25519PrivateKey.generate(), make_identity("clinic").certificate
    forged = [
        make_card("clinic", certificate, signing, (card, signing)),  # says so, but the old key did not sign
        make_card("clinic", certificate, signing, (make_keys(tmp_path / "other", "clinic"), own.signing)),
    ]
    # the old key's signature of another new card
    real = make_card("clinic", certificate, signing, (card, own.signing))
    moved = make_card("clinic", make_identity("clinic").certificate, signing)
    moved = msgspec.structs.replace(moved, previous=real.previous, previous_signature=real.previous_signature)
    content = b"treaty-card\n" + msgspec.json.encode(msgspec.structs.replace(moved, signature=""))
    forged.append(msgspec.structs.replace(moved, signature=base64.b64encode(signing.sign(content)).decode()))
    for wrong in forged:
        assert decode_card(encode_card(wrong), "the test") == wrong
        with pytest.raises(ConfigError, match="another card of clinic is trusted"):
            trust(bank, wrong, fingerprint_of(wrong))
    trust(bank, real)
    assert trusted(bank) == {"clinic": real}


def test_rotation_carries_trust_over_and_the_old_card_is_trusted_no_more(bank, clinic):
    first = trust_clinic(bank, clinic)
    files = {file.name: file.read_bytes() for file in clinic.iterdir()}
    second = rotate(clinic, "clinic")
    own = load_own(clinic, "clinic")
    assert own.card == second
    assert second.previous == fingerprint_of(first) != fingerprint_of(second)
    assert verify(second, sign(own, b"x"), b"x")
    assert not verify(first, sign(own, b"x"), b"x")
    kept = {file.name.split(".")[0] + "." + file.name.split(".", 3)[3]: file for file in (clinic / "old").iterdir()}
    assert {name: file.read_bytes() for name, file in kept.items()} == files
    assert set(modes(clinic / "old").values()) == {0o600}
    assert modes(clinic)["old"] == 0o700
    assert all(file.name.startswith(f"clinic.{datetime.datetime.now(datetime.UTC):%Y-}") for file in kept.values())

    assert not must_compare(bank, second)
    trust(bank, second)
    assert trusted(bank) == {"clinic": second}
    with pytest.raises(ConfigError, match="revoked or replaced"):
        trust(bank, first, fingerprint_of(first))
    third, fourth = rotate(clinic, "clinic"), rotate(clinic, "clinic")
    assert len(list((clinic / "old").iterdir())) == 12
    with pytest.raises(ConfigError, match="another card of clinic is trusted"):
        trust(bank, fourth)
    trust(bank, third)
    trust(bank, fourth)
    assert trusted(bank) == {"clinic": fourth}


def test_revoked_cards_are_never_trusted_again(bank, clinic):
    first = trust_clinic(bank, clinic)
    second = rotate(clinic, "clinic")
    trust(bank, second)
    revoke(bank, "clinic")
    assert trusted(bank) == {}
    assert peers(bank) == []
    for card in (first, second):
        with pytest.raises(ConfigError, match="revoked or replaced"):
            trust(bank, card, fingerprint_of(card))
    with pytest.raises(ConfigError, match="expected a trusted partner"):
        revoke(bank, "clinic")
    third = rotate(clinic, "clinic")  # signed by a key that is revoked: compared anew
    assert must_compare(bank, third)
    trust(bank, third, fingerprint_of(third))
    assert trusted(bank) == {"clinic": third}


def test_a_card_that_is_both_trusted_and_revoked_is_not_trusted(bank, clinic):
    card = trust_clinic(bank, clinic)
    file = bank / "peers" / "clinic.card"
    data = file.read_bytes()
    revoke(bank, "clinic")
    file.write_bytes(data)  # brought back from a back-up
    assert trusted(bank) == {}
    assert [peer.wrong for peer in peers(bank)] == ["the card of clinic was revoked"]
    successor = make_card("clinic", make_identity("clinic").certificate, load_own(clinic, "clinic").signing)
    assert must_compare(bank, successor)
    assert must_compare(bank, rotate(clinic, "clinic"))
    with pytest.raises(ConfigError, match="revoked or replaced"):
        trust(bank, card, fingerprint_of(card))


def test_own_cards_are_not_trusted(tmp_path, bank):
    own = card_of(bank)
    with pytest.raises(ConfigError, match="but the keys of bank itself are in"):
        trust(bank, own, fingerprint_of(own))
    other = make_keys(tmp_path / "other", "bank")
    with pytest.raises(ConfigError, match="but the keys of bank itself are in"):
        trust(bank, other, fingerprint_of(other))


@pytest.mark.parametrize("moved", [LATER, -LATER], ids=["ended", "not yet"])
def test_cards_count_only_while_their_certificate_is_valid(tmp_path, bank, clinic, monkeypatch, moved):
    card = trust_clinic(bank, clinic)

    class Moved(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) + moved

    clock = type("datetime", (), dict(vars(datetime)) | {"datetime": Moved})
    monkeypatch.setattr(certificates, "datetime", clock)
    assert trusted(bank) == {}
    (peer,) = peers(bank)
    assert "expected a certificate of clinic valid today" in peer.wrong
    assert peer.card == card
    with pytest.raises(ConfigError, match="valid today"):
        read_card(clinic / "clinic.card")
    assert read_card(clinic / "clinic.card", today=False) == card
    with pytest.raises(ConfigError, match="valid today"):
        trust(bank, card, fingerprint_of(card))
    with pytest.raises(ConfigError, match="valid today"):
        load_own(clinic, "clinic")
    # the way out: a new card, signed by the key that was trusted, though its certificate has ended
    new = rotate(clinic, "clinic")
    trust(bank, new)
    assert trusted(bank) == {"clinic": new}
    assert ends(new) - ends(card) > moved - datetime.timedelta(days=1)


def test_cards_for_another_name_than_their_certificate_are_refused(tmp_path):
    card = make_card("clinic", make_identity("bank").certificate, Ed25519PrivateKey.generate())
    (tmp_path / "clinic.card").write_bytes(encode_card(card))
    with pytest.raises(ConfigError, match="expected a certificate for clinic, got one for bank"):
        read_card(tmp_path / "clinic.card")
    with pytest.raises(ConfigError, match="expected a certificate for clinic, got one for bank"):
        trust(tmp_path, card, fingerprint_of(card))


def test_files_that_are_no_cards_are_refused(tmp_path, bank):
    data = (bank / "bank.card").read_bytes()
    fields = msgspec.json.decode(data)
    wrong = {
        "empty": b"",
        "cut": data[:-20],
        "text": b"hello",
        "certificate": (bank / "bank.cert.pem").read_bytes(),
        "more": msgspec.json.encode(fields | {"more": 1}),
        "version": data.replace(b"treaty-card 1", b"treaty-card 2"),
        "name": msgspec.json.encode(fields | {"name": "../bank"}),
        "half": msgspec.json.encode(fields | {"previous": fingerprint_of(card_of(bank))}),
        "junk": make_and_encode(fields["certificate"] + "more"),
        "lines": make_and_encode("\n" + fields["certificate"]),
        "no certificate": make_and_encode(
            "-----BEGIN CERTIFICATE-----\n" + base64.b64encode(b"none").decode() + "\n-----END CERTIFICATE-----\n"
        ),
    }
    for content in wrong.values():
        (tmp_path / "a.card").write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.card|expected a name"):
            read_card(tmp_path / "a.card", today=False)
    (tmp_path / "a.card").write_bytes(data + b" " * (LARGEST_CARD - len(data)))
    read_card(tmp_path / "a.card")
    (tmp_path / "a.card").write_bytes(data + b" " * (LARGEST_CARD - len(data) + 1))
    with pytest.raises(ConfigError, match="expected a file of at most 65536 bytes"):
        read_card(tmp_path / "a.card")
    with pytest.raises(ConfigError, match=r"cannot read .*none\.card: No such file"):
        read_card(tmp_path / "none.card")


def make_and_encode(certificate: str) -> bytes:
    """A card that is signed as it should be, whatever its certificate."""
    return encode_card(make_card("bank", certificate.encode(), Ed25519PrivateKey.generate()))


@pytest.fixture(scope="module")
def rotated(tmp_path_factory) -> Card:
    folder = tmp_path_factory.mktemp("rotated")
    make_keys(folder, "bank")
    return rotate(folder, "bank")


@given(st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_card_with_any_changed_byte_is_refused_or_the_same(rotated, data):
    whole = encode_card(rotated)
    where = data.draw(st.integers(0, len(whole) - 1))
    piece = data.draw(st.binary(max_size=2) | st.sampled_from([b" ", b"\n", b"A", b"=", b"\\n", b'"']))
    changed = whole[:where] + piece + whole[where + data.draw(st.integers(0, 1)) :]
    try:
        assert decode_card(changed, "the test") == rotated
    except ConfigError:
        pass


def test_a_card_with_any_other_bit_is_refused_or_the_same(rotated):
    whole = encode_card(rotated)
    for where in range(len(whole)):
        changed = bytearray(whole)
        changed[where] ^= 1
        try:
            assert decode_card(bytes(changed), "the test") == rotated
        except ConfigError:
            pass


def test_a_damaged_card_of_a_partner_counts_for_nobody_and_can_be_revoked(tmp_path, bank, clinic):
    card = trust_clinic(bank, clinic)
    make_keys(tmp_path / "shop", "shop")
    shop = card_of(tmp_path / "shop")
    trust(bank, shop, fingerprint_of(shop))
    file = bank / "peers" / "clinic.card"
    for content in (b"x" * (LARGEST_CARD + 1), (bank / "peers" / "shop.card").read_bytes()):
        file.write_bytes(content)
        assert trusted(bank) == {"shop": shop}
        with pytest.raises(ConfigError, match=r"clinic\.card"):
            trust(bank, card, fingerprint_of(card))
    file.write_bytes(b"x" * (LARGEST_CARD + 1))
    assert "at most 65536 bytes" in peers(bank)[0].wrong
    revoke(bank, "clinic")
    trust(bank, card, fingerprint_of(card))
    assert trusted(bank) == {"clinic": card, "shop": shop}


def test_older_keys_without_a_card_are_named(tmp_path):
    make_keys(tmp_path, "bank")
    for end in ("sign.pem", "card"):
        (tmp_path / f"bank.{end}").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*bank\.sign\.pem"):
        load_own(tmp_path, "bank")
    with pytest.raises(ConfigError, match=r"cannot read the folder of keys .*none: No such file"):
        load_own(tmp_path / "none", "bank")


KILLED = """
import os, shutil, signal, sys
from treaty.node.identity import rotate

def kill_at(step):
    def count(event, arguments):
        nonlocal step
        step -= event in ("os.rename", "os.mkdir", "os.rmdir", "os.link", "os.remove")
        if step < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

for step in range(100):
    folder = shutil.copytree(sys.argv[1], f"{sys.argv[2]}/{step}")
    child = os.fork()
    if not child:
        kill_at(step)
        rotate(folder, "clinic")
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_a_rotation_killed_at_any_step_leaves_usable_keys(tmp_path, clinic):
    """Whenever it is killed, the keys are the old or the new ones, whole, and partners can follow."""
    before = card_of(clinic)
    subprocess.run([sys.executable, "-c", KILLED, str(clinic), str(tmp_path / "killed")], check=True)
    *killed, done = sorted((tmp_path / "killed").iterdir(), key=lambda folder: int(folder.name))
    assert replaces(load_own(done, "clinic").card, before)
    news = 0
    for folder in killed:
        again = Path(shutil.copytree(folder, tmp_path / "again" / folder.name))
        own = load_own(folder, "clinic").card
        assert own == before or replaces(own, before)
        news += own != before
        card = rotate(again, "clinic")  # whoever runs it again gets one new card, not two
        assert load_own(again, "clinic").card == card
        assert replaces(card, before)
        assert not list(again.glob(".*"))
    assert 3 <= news <= len(killed) - 10


def test_many_at_once_leave_whole_keys(bank, clinic):
    found, wrong = [], []

    def work(call) -> None:
        try:
            for _ in range(5):
                found.append(call(clinic, "clinic"))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in (rotate, load_own, rotate, load_own)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    cards = {fingerprint_of(card): card for card in found if isinstance(card, Card)}
    assert len(cards) == 10
    assert len({card.previous for card in cards.values()}) == 10  # one chain
    assert isinstance(load_own(clinic, "clinic"), Own)
