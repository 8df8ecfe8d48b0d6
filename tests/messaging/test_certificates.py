import datetime
import os
from itertools import chain

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from flips import damaged, flipped
from treaty.errors import ConfigError
from treaty.files import write_whole
from treaty.messaging import certificates
from treaty.messaging.certificates import (
    Identity,
    check_certificate,
    check_identity,
    fingerprint,
    load_certificate,
    load_identity,
    make_identity,
)


def files(folder):
    return folder / "clinic.key.pem", folder / "clinic.cert.pem"


def write_identity(folder, name):
    identity = make_identity(name)
    write_whole(folder / f"{name}.key.pem", [identity.key])
    write_whole(folder / f"{name}.cert.pem", [identity.certificate], mode=0o644)
    return identity


def test_written_identity_loads_again(tmp_path):
    written = write_identity(tmp_path, "clinic")
    assert load_identity(*files(tmp_path), "clinic") == written
    assert load_certificate(tmp_path / "clinic.cert.pem") == written.certificate


def test_key_file_open_to_others_is_refused(tmp_path):
    write_identity(tmp_path, "clinic")
    (tmp_path / "clinic.key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match="run chmod 600"):
        load_identity(*files(tmp_path), "clinic")


def test_key_file_of_another_user_is_refused(tmp_path, monkeypatch):
    write_identity(tmp_path, "clinic")
    monkeypatch.setattr(certificates.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"a key file of this user, got one of another.*chmod 600"):
        load_identity(*files(tmp_path), "clinic")


def test_certificates_last_two_years_and_are_warned_of_two_months_before(tmp_path, monkeypatch, caplog):
    made = x509.load_pem_x509_certificate(make_identity("clinic").certificate)
    assert made.not_valid_after_utc - made.not_valid_before_utc == datetime.timedelta(days=730)
    write_identity(tmp_path, "clinic")
    load_identity(*files(tmp_path), "clinic")
    assert not caplog.records
    monkeypatch.setattr(certificates, "VALIDITY", datetime.timedelta(days=30))
    write_identity(tmp_path, "clinic")
    load_identity(*files(tmp_path), "clinic")
    assert "the certificate of clinic ends on" in caplog.text


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*clinic.key.pem: No such file .*; `treaty keys new"):
        load_identity(*files(tmp_path), "clinic")


@pytest.mark.parametrize("name", ["", "a b", "-a", "a.b", "*", "ä", "x" * 64, "../x", "a\n"])
def test_names_that_cannot_stand_in_a_certificate_are_refused(name):
    with pytest.raises(ConfigError, match="letters, digits"):
        make_identity(name)


def test_fingerprint_is_that_of_the_der_form():
    certificate = make_identity("clinic").certificate
    expected = x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()
    assert fingerprint(certificate).removeprefix("SHA256:").replace(" ", "") == expected
    assert fingerprint(certificate) != fingerprint(make_identity("clinic").certificate)


@pytest.mark.parametrize("count", [0, 2])
def test_other_than_one_certificate_is_refused(tmp_path, count):
    file = tmp_path / "lab.cert.pem"
    file.write_bytes(make_identity("lab").certificate * count)
    with pytest.raises(ConfigError, match=r"expected one .*certificate|cannot read the certificate"):
        load_certificate(file)


def test_key_of_another_certificate_is_refused():
    one, other = make_identity("clinic"), make_identity("clinic")
    with pytest.raises(ConfigError, match="the private key is not that of clinic's certificate"):
        check_identity(Identity(one.key, other.certificate), "clinic")


def test_malformed_key_is_refused_without_showing_it():
    with pytest.raises(ConfigError, match="cannot read the private key of clinic: expected PEM") as caught:
        check_identity(Identity(b"secret", make_identity("clinic").certificate), "clinic")
    assert "secret" not in str(caught.value)


def test_certificate_of_another_party_is_refused():
    with pytest.raises(ConfigError, match="expected a certificate for lab, got one for clinic"):
        check_certificate(make_identity("clinic").certificate, "lab")


def test_certificate_out_of_date_is_refused(monkeypatch):
    monkeypatch.setattr(certificates, "VALIDITY", datetime.timedelta(hours=1))
    with pytest.raises(ConfigError, match="expected a certificate of lab valid today"):
        check_certificate(make_identity("lab").certificate, "lab")


def test_certificate_with_an_ed25519_key_is_refused():
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .sign(key, None)
        .public_bytes(serialization.Encoding.PEM)
    )
    with pytest.raises(ConfigError, match="expected an ECDSA P-256 certificate for lab"):
        check_certificate(certificate, "lab")


@pytest.mark.filterwarnings("ignore")  # of numbers that a certificate should not have
@pytest.mark.parametrize("flips", [80, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "certificate"])
def test_no_flipped_bit_makes_another_identity(tmp_path, which, flips):
    written, file = write_identity(tmp_path, "clinic"), files(tmp_path)[which]

    def meant(identity):
        numbers = serialization.load_pem_private_key(identity.key, None).private_numbers()
        key = numbers.private_value, numbers.public_numbers
        return key, x509.load_pem_x509_certificate(identity.certificate).public_bytes(serialization.Encoding.DER)

    refused = 0
    for what in chain(flipped(file, flips), damaged(file)):
        try:  # what PEM does not read, as the last bits of its last letter, changes nothing
            assert meant(load_identity(*files(tmp_path), "clinic")) == meant(written), what
        except ConfigError:
            refused += 1
    assert refused > 0.9 * flips
