"""An organisation's card, the file for its partners: name and public keys, signed by itself; and its endorsement.

A card is accepted only exactly as its owner signed it: every part that could be encoded in two ways may be encoded in
one alone, except for spaces and order of JSON. A certificate's dates are checked when a card is used.

An *endorsement* replaces the comparison of fingerprints by telephone. An organisation with an authority's certificate
for its own domain signs the fingerprint of its card with that certificate's key. A partner who knows the domain and
trusts the authority can verify it. The card itself stays pinned: the authority is trusted once, when the card is, and
can neither replace a card later nor take part in a connection.

All functions raise ConfigError for files, keys, cards and endorsements that cannot be used.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from treaty.errors import ConfigError
from treaty.files import explained, without_mark
from treaty.messaging.certificates import RENEW_WITHIN, check_certificate, check_names, fingerprint

# Maximum bytes of a card's file; a card has about 1,200.
LARGEST_CARD = 64 * 1024

_FINGERPRINT = re.compile(r"SHA256:[0-9a-f]{4}(?: [0-9a-f]{4}){15}")
# Prefixes of all texts that a signing key signs: no signature is valid as one of another kind.
_OF_CARD, _OF_SUCCESSOR, OF_CONTENT = b"treaty-card\n", b"treaty-next-card\n", b"treaty-content\n"


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="treaty-card 1"):
    """What an organisation gives to its partners: a JSON file."""

    # The organisation's name, as in job files.
    name: str
    # Its TLS certificate, PEM.
    certificate: str
    # Its public Ed25519 key, 32 bytes in base64.
    signing_key: str
    # By that key, over all other fields, base64.
    signature: str = ""
    # Fingerprint of the replaced card, and a signature by its signing key; None for a first card.
    previous: str | None = None
    previous_signature: str | None = None


def make_card(
    name: str, certificate: bytes, signing: Ed25519PrivateKey, replaced: tuple[Card, Ed25519PrivateKey] | None = None
) -> Card:
    """Make and sign a card; with `replaced`, the previous card and its signing key, also as its successor."""
    card = Card(name, certificate.decode(), _text(signing.public_key().public_bytes_raw()))
    if replaced is not None:
        old, old_key = replaced
        # The successor signature covers the new keys and the old card's fingerprint; the card's own covers both.
        card = msgspec.structs.replace(card, previous=fingerprint_of(old))
        card = msgspec.structs.replace(card, previous_signature=_text(old_key.sign(_successor_content(card))))
    return msgspec.structs.replace(card, signature=_text(signing.sign(_card_content(card))))


def read_card(path: str | Path, *, today: bool = True) -> Card:
    """Read a card and check its signature and certificate, and with `today` that the certificate is valid now."""
    card = decode_card(read_small(path), path)
    if today:
        check_certificate(card.certificate.encode(), card.name)
    return card


def decode_card(data: bytes, where: str | Path) -> Card:
    """Decode a card and check its signature, but not the name and dates of its certificate."""
    try:
        card = msgspec.json.decode(data, type=Card)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"expected a card of an organisation, got another file - at {where} ({error})") from None
    check_names([card.name])
    # Only one encoding of each field is accepted: else two different files could have one fingerprint.
    exact = _exact(card.signing_key, 32) and _exact(card.signature, 64) and _is_pem(card.certificate)
    if card.previous is None or card.previous_signature is None:
        exact = exact and card.previous is None and card.previous_signature is None
    else:
        exact = exact and _FINGERPRINT.fullmatch(card.previous) is not None and _exact(card.previous_signature, 64)
    if not exact or not _signed(card.signing_key, base64.b64decode(card.signature), _card_content(card)):
        raise ConfigError(f"the card is damaged or forged: its signature is not by its own key - at {where}")
    try:
        fingerprint(card.certificate.encode())
    except ConfigError:
        raise ConfigError(f"the card's certificate is not self-signed - at {where}") from None
    return card


def encode_card(card: Card) -> bytes:
    """Return the file of a card, indented for people."""
    return msgspec.json.format(msgspec.json.encode(card)) + b"\n"


def read_small(file: str | Path) -> bytes:
    """Read a file that is at most as large as a card may be."""
    with explained(f"cannot read {file}"), Path(file).open("rb") as stream:
        data = stream.read(LARGEST_CARD + 1)
    if len(data) > LARGEST_CARD:
        raise ConfigError(f"expected a file of at most {LARGEST_CARD} bytes, got a larger one - at {file}")
    return without_mark(data)


def fingerprint_of(card: Card) -> str:
    """Return the fingerprint of a card's name and both public keys: ``SHA256:`` and 64 digits in groups of four."""
    # Each part is prefixed by its length, so that no two cards give the same bytes.
    parts = (card.name.encode(), ssl.PEM_cert_to_DER_cert(card.certificate), base64.b64decode(card.signing_key))
    digest = hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).hexdigest()
    return "SHA256:" + " ".join(digest[i : i + 4] for i in range(0, 64, 4))


def digits(of: str) -> str:
    """Return the 64 digits of a fingerprint; spaces, case and ``SHA256:`` do not matter."""
    return "".join(of.split()).lower().removeprefix("sha256:")


def ends(card: Card) -> datetime.datetime:
    """Return when a card's certificate expires (UTC)."""
    return x509.load_pem_x509_certificate(card.certificate.encode()).not_valid_after_utc


def near_their_end(cards: Iterable[Card]) -> list[str]:
    """Return a warning for each card whose certificate expires soon, or has expired."""
    now = datetime.datetime.now(datetime.UTC)
    return [
        f"the certificate of {card.name} {'expired' if ends(card) < now else 'expires'} on {ends(card):%Y-%m-%d}: it "
        "must make new keys (treaty keys rotate), and its partners must trust the new card"
        for card in cards
        if ends(card) - now < RENEW_WITHIN
    ]


def replaces(card: Card, known: Card) -> bool:
    """Return whether a card replaces another one, whose signing key has signed it."""
    if card.previous != fingerprint_of(known) or card.previous_signature is None:
        return False
    return _signed(known.signing_key, base64.b64decode(card.previous_signature), _successor_content(card))


def verify(card: Card, signature: bytes, content: bytes) -> bool:
    """Return whether the signing key of a card signed `content` (which is not a card)."""
    return _signed(card.signing_key, signature, OF_CONTENT + content)


def _card_content(card: Card) -> bytes:
    return _OF_CARD + msgspec.json.encode(msgspec.structs.replace(card, signature=""))


def _successor_content(card: Card) -> bytes:
    return _OF_SUCCESSOR + msgspec.json.encode(msgspec.structs.replace(card, signature="", previous_signature=None))


def _signed(key: str, signature: bytes, content: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(base64.b64decode(key)).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _exact(text: str, size: int) -> bool:
    """Return whether a text is the canonical base64 of so many bytes."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return len(data) == size and _text(data) == text


def _is_pem(text: str) -> bool:
    """Return whether a text is one PEM certificate and nothing else, not even another line break."""
    try:
        return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(text)) == text
    except ValueError:
        return False


class Endorsement(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="treaty-endorsement 1"
):
    """A JSON file: certificates (PEM, the organisation's own first), and a signature by its key (base64)."""

    certificates: str
    signature: str


def endorse(card: Card, certificates: bytes, key: bytes) -> bytes:
    """Sign a card's fingerprint with the key of a certificate that an authority issued; return the endorsement's file.

    `certificates` are PEM: the organisation's certificate, then intermediate ones, if any. `key` is the private key of
    the first one, unencrypted PEM, RSA or elliptic curve.
    """
    leaf, *_ = _parse(certificates, "the certificate")
    try:
        private: Any = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError("cannot read the private key of the certificate: expected unencrypted PEM") from error
    if private.public_key() != leaf.public_key():
        raise ConfigError("the private key does not belong to the first certificate")
    signature = private.sign(_endorsed(card), *_scheme(leaf, "the certificate"))
    made = Endorsement(certificates.decode(), _text(signature))
    return msgspec.json.format(msgspec.json.encode(made)) + b"\n"


def check_endorsement(file: str | Path, card: Card, authority: str | Path, domain: str) -> None:
    """Check that the owner of a domain, certified by an authority today, has signed a card, in the endorsement `file`.

    `authority` has the certificate of the authority, or of several, PEM. `domain` is that of the endorsement's
    certificate, such as "bank.example.org".
    """
    try:
        found = msgspec.json.decode(read_small(file), type=Endorsement)
        signature = base64.b64decode(found.signature, validate=True)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"expected an endorsement, got another kind of file - at {file} ({error})") from None
    leaf, *between = _parse(found.certificates.encode(), str(file))
    roots = _parse(read_small(authority), str(authority))
    try:
        policy = PolicyBuilder().store(Store(roots)).time(datetime.datetime.now(datetime.UTC).replace(tzinfo=None))
        policy.build_server_verifier(x509.DNSName(domain)).verify(leaf, between)
    except (VerificationError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"the certificate of the endorsement is not valid today for {domain} by the authority in {authority} "
            f"({str(error) or type(error).__name__}); the card is not trusted"
        ) from None
    key: Any = leaf.public_key()
    try:
        key.verify(signature, _endorsed(card), *_scheme(leaf, str(file)))
    except InvalidSignature:
        raise ConfigError(f"the endorsement is not for {card.name}'s card, or signed by another key") from None


def _endorsed(card: Card) -> bytes:
    return b"treaty-endorsement\n" + fingerprint_of(card).encode()


def _scheme(certificate: x509.Certificate, where: str) -> tuple[Any, ...]:
    """Return the arguments with which a certificate's key signs, and verifies."""
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        return (ec.ECDSA(hashes.SHA256()),)
    if isinstance(key, rsa.RSAPublicKey):
        return padding.PSS(padding.MGF1(hashes.SHA256()), 32), hashes.SHA256()
    raise ConfigError(f"the certificate needs an RSA or elliptic-curve key - at {where}")


def _parse(pem: bytes, where: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(f"cannot read PEM certificates - at {where}") from error
