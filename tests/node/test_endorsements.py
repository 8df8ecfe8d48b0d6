"""Cards that a certificate authority's customer signs: what is believed, and what is refused."""

import datetime

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from typer.testing import CliRunner

from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.node.cards import check_endorsement, endorse, read_card
from treaty.node.identity import make_keys, trusted

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
DOMAIN = "bank.example.org"


def named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class Authority:
    """A root that issues certificates."""

    def __init__(self, name="root", issuer=None):
        self.name, self.key = named(name), ec.generate_private_key(ec.SECP256R1())
        by = issuer or self
        self.certificate = self._signed(by, self.name, self.key.public_key(), authority=True)
        self.chain = [self.certificate, *issuer.chain] if issuer else []

    def _signed(self, by, subject, public, *, authority=False, domain=None, until=NOW + 30 * DAY):
        made = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(by.name).public_key(public)
            .serial_number(x509.random_serial_number()).not_valid_before(NOW - 60 * DAY).not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )  # fmt: skip
        if authority:
            usage = dict.fromkeys(
                ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
                False,
            )
            usage |= {"key_cert_sign": True, "crl_sign": True, "encipher_only": False, "decipher_only": False}
            made = made.add_extension(x509.KeyUsage(**usage), critical=True)
        if domain:
            made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(domain)]), critical=False)
            made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        return made.sign(by.key, hashes.SHA256())

    def issue(self, domain=DOMAIN, key=None, **given):
        """Return the chain and the key of a certificate for a domain, PEM."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        leaf = self._signed(self, named(domain), key.public_key(), domain=domain, **given)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return b"".join(each.public_bytes(Encoding.PEM) for each in [leaf, *self.chain]), secret

    def write(self, file):
        file.write_bytes(self.certificate.public_bytes(Encoding.PEM))
        return file


@pytest.fixture
def card(tmp_path):
    return make_keys(tmp_path / "bank", "bank")


@pytest.fixture
def root(tmp_path):
    made = Authority()
    made.file = made.write(tmp_path / "ca.pem")
    return made


def check(tmp_path, endorsement, card, root, domain=DOMAIN):
    (tmp_path / "bank.endorsement").write_bytes(endorsement)
    check_endorsement(tmp_path / "bank.endorsement", card, root.file, domain)


@pytest.mark.parametrize("kind", ["curve", "rsa"])
def test_the_owner_of_a_domain_is_believed_about_its_card(tmp_path, card, root, kind):
    key = rsa.generate_private_key(65537, 2048) if kind == "rsa" else None
    check(tmp_path, endorse(card, *root.issue(key=key)), card, root)


def test_certificates_between_its_own_and_the_authority_s_are_sent_with_it(tmp_path, card, root):
    between = Authority("between", root)
    chain, key = between.issue()
    check(tmp_path, endorse(card, chain, key), card, root)
    alone = chain[: chain.index(b"-----END CERTIFICATE-----\n") + len(b"-----END CERTIFICATE-----\n")]
    with pytest.raises(ConfigError, match="is not valid today for"):
        check(tmp_path, endorse(card, alone, key), card, root)


def test_another_card_domain_authority_or_date_is_refused(tmp_path, card, root):
    good = endorse(card, *root.issue())
    other = make_keys(tmp_path / "thief", "bank")
    with pytest.raises(ConfigError, match="is not for bank's card"):
        check(tmp_path, good, other, root)
    with pytest.raises(ConfigError, match=r"not valid today for shop\.example\.org"):
        check(tmp_path, good, card, root, "shop.example.org")
    with pytest.raises(ConfigError, match="is not valid today for"):
        check(tmp_path, endorse(card, *Authority().issue()), card, root)
    with pytest.raises(ConfigError, match="valid today"):
        check(tmp_path, endorse(card, *root.issue(until=NOW - DAY)), card, root)


def test_a_signature_by_another_key_than_the_certificate_s_is_refused(tmp_path, card, root):
    chain, key = root.issue()
    ours, theirs = (msgspec.json.decode(endorse(card, *of)) for of in ((chain, key), Authority().issue()))
    with pytest.raises(ConfigError, match="by another key"):
        check(tmp_path, msgspec.json.encode(ours | {"signature": theirs["signature"]}), card, root)
    with pytest.raises(ConfigError, match="does not belong to the first certificate"):
        endorse(card, chain, Authority().issue()[1])


def test_what_is_no_key_certificate_or_endorsement_is_said(tmp_path, card, root):
    chain, key = root.issue()
    with pytest.raises(ConfigError, match="cannot read PEM certificates"):
        endorse(card, b"nothing", key)
    with pytest.raises(ConfigError, match="expected unencrypted PEM"):
        endorse(card, chain, b"nothing")
    with pytest.raises(ConfigError, match="elliptic-curve"):
        endorse(card, *root.issue(key=ed25519.Ed25519PrivateKey.generate()))
    with pytest.raises(ConfigError, match="expected an endorsement"):
        check(tmp_path, b"{}", card, root)


def test_commands_trust_by_endorsement_and_pin_the_card(tmp_path, card, root, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_keys("keys", "shop")
    chain, key = root.issue()
    (tmp_path / "chain.pem").write_bytes(chain)
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "key.pem").chmod(0o600)

    def keys(*words):
        return CliRunner().invoke(app, ["keys", *words])

    done = keys("endorse", "chain.pem", "key.pem", "--folder", "bank")
    assert done.exit_code == 0, done.output
    by = ["--endorsement", "bank/bank.endorsement", "--ca", "ca.pem"]
    assert "together" in str(keys("trust", "bank/bank.card", *by).exception)
    assert "not valid today for" in str(keys("trust", "bank/bank.card", *by, "--domain", "example.org").exception)
    assert trusted("keys") == {}
    done = keys("trust", "bank/bank.card", *by, "--domain", DOMAIN)
    assert done.exit_code == 0, done.output
    assert trusted("keys") == {"bank": read_card("bank/bank.card")}
    thief = make_keys("thief", "bank")
    (tmp_path / "thief/bank.endorsement").write_bytes(endorse(thief, chain, key))
    refused = keys(
        "trust", "thief/bank.card", "--endorsement", "thief/bank.endorsement", "--ca", "ca.pem", "--domain", DOMAIN
    )
    assert "another card of bank is trusted" in str(refused.exception)
