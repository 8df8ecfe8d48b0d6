"""An organisation's card: its name and public keys, signed by itself, as the file that its partners get.

A card is either exactly what its owner signed or refused: every part of the file that can be written in two ways may be
written in one alone, but for the spaces and order of JSON. A certificate's dates are checked where a card is used.
All functions raise ConfigError for files and cards that cannot be used.
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
from treaty.files import without_mark
from treaty.messaging.certificates import RENEW_WITHIN, check_certificate, check_names, fingerprint

LARGEST_CARD = 64 * 1024
"""How many bytes a card's file may have; a card has about 1,200."""

_FINGERPRINT = re.compile(r"SHA256:[0-9a-f]{4}(?: [0-9a-f]{4}){15}")
# What begins each text that a signing key signs, so that no signature counts as one of another kind.
_OF_CARD, _OF_SUCCESSOR, _OF_CONTENT = b"treaty-card\n", b"treaty-next-card\n", b"treaty-content\n"


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="treaty-card 1"):
    """What an organisation gives to its partners, a JSON file.

    Attributes
    ----------
    name : str
        The organisation's name, as in job files.
    certificate : str
        Its TLS certificate, PEM.
    signing_key : str
        Its public Ed25519 key, 32 bytes in base64.
    signature : str
        By that key, over all other fields, base64.
    previous, previous_signature : str or None
        Fingerprint of the card that this one replaces, and a signature by its signing key; None for a first card.
    """

    name: str
    certificate: str
    signing_key: str
    signature: str = ""
    previous: str | None = None
    previous_signature: str | None = None


def make_card(
    name: str, certificate: bytes, signing: Ed25519PrivateKey, replaced: tuple[Card, Ed25519PrivateKey] | None = None
) -> Card:
    """Make and sign a card; with `replaced`, the card before and its signing key, also as that one's successor."""
    card = Card(name, certificate.decode(), _text(signing.public_key().public_bytes_raw()))
    if replaced is not None:
        old, old_key = replaced
        card = msgspec.structs.replace(card, previous=fingerprint_of(old))
        card = msgspec.structs.replace(card, previous_signature=_text(old_key.sign(_successor_content(card))))
    return msgspec.structs.replace(card, signature=_text(signing.sign(_card_content(card))))


def read_card(path: str | Path, *, today: bool = True) -> Card:
    """Read a card and check its signature and certificate; with `today` also that the certificate is valid today."""
    card = decode_card(read_small(path), path)
    if today:
        check_certificate(card.certificate.encode(), card.name)
    return card


def decode_card(data: bytes, where: str | Path) -> Card:
    """Decode a card and check its signature, but not its certificate's name and dates."""
    try:
        card = msgspec.json.decode(data, type=Card)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"expected a card of an organisation, got something else - at {where} ({error})") from None
    check_names([card.name])
    exact = _exact(card.signing_key, 32) and _exact(card.signature, 64) and _is_pem(card.certificate)
    if card.previous is None or card.previous_signature is None:
        exact = exact and card.previous is None and card.previous_signature is None
    else:
        exact = exact and _FINGERPRINT.fullmatch(card.previous) is not None and _exact(card.previous_signature, 64)
    if not exact or not _signed(card.signing_key, base64.b64decode(card.signature), _card_content(card)):
        raise ConfigError(f"the card is damaged or forged: its signature is not by the key that it states - at {where}")
    try:
        fingerprint(card.certificate.encode())
    except ConfigError:
        raise ConfigError(
            f"expected a card with a certificate signed by its own key, got another - at {where}"
        ) from None
    return card


def encode_card(card: Card) -> bytes:
    """Return the file of a card, for people to read."""
    return msgspec.json.format(msgspec.json.encode(card)) + b"\n"


def read_small(file: str | Path) -> bytes:
    """Read a file of the size of a card."""
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(LARGEST_CARD + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if len(data) > LARGEST_CARD:
        raise ConfigError(f"expected a file of at most {LARGEST_CARD} bytes, got a larger one - at {file}")
    return without_mark(data)


def fingerprint_of(card: Card) -> str:
    """Return ``SHA256:`` and 64 hexadecimal digits in groups of four, of a card's name and both public keys."""
    parts = (card.name.encode(), ssl.PEM_cert_to_DER_cert(card.certificate), base64.b64decode(card.signing_key))
    digest = hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).hexdigest()
    return "SHA256:" + " ".join(digest[i : i + 4] for i in range(0, 64, 4))


def digits(of: str) -> str:
    """Return the 64 digits of a fingerprint as somebody wrote it: spaces, case and ``SHA256:`` do not matter."""
    return "".join(of.split()).lower().removeprefix("sha256:")


def ends(card: Card) -> datetime.datetime:
    """Return when a card's certificate ends (UTC)."""
    return x509.load_pem_x509_certificate(card.certificate.encode()).not_valid_after_utc


def near_their_end(cards: Iterable[Card]) -> list[str]:
    """Say of which cards the certificate ends soon, or has ended."""
    now = datetime.datetime.now(datetime.UTC)
    return [
        f"the certificate of {card.name} {'ended' if ends(card) < now else 'ends'} on {ends(card):%Y-%m-%d}: it has to "
        "make new keys (treaty keys rotate), and its partners to trust the new card"
        for card in cards
        if ends(card) - now < RENEW_WITHIN
    ]


def replaces(card: Card, known: Card) -> bool:
    """Tell whether a card names another as the one before it, and that one's signing key signed it."""
    if card.previous != fingerprint_of(known) or card.previous_signature is None:
        return False
    return _signed(known.signing_key, base64.b64decode(card.previous_signature), _successor_content(card))


def states_key(card: Card, signing: Ed25519PrivateKey) -> bool:
    """Tell whether a card is that of a signing key."""
    return card.signing_key == _text(signing.public_key().public_bytes_raw())


def sign_content(signing: Ed25519PrivateKey, content: bytes) -> bytes:
    """Sign what is no card."""
    return signing.sign(_OF_CONTENT + content)


def verify(card: Card, signature: bytes, content: bytes) -> bool:
    """Tell whether the signing key of a card signed `content`, which is no card."""
    return _signed(card.signing_key, signature, _OF_CONTENT + content)


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
    """Tell whether a text is what `_text` makes of so many bytes."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return len(data) == size and _text(data) == text


def _is_pem(text: str) -> bool:
    """Tell whether a text is one PEM certificate and nothing else, not even another line break."""
    try:
        return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(text)) == text
    except ValueError:
        return False


# --------------------- how a certificate authority that both organisations believe takes the place of a telephone call
#
# An organisation that has a certificate of such an authority, for a domain of its own, signs its card's fingerprint
# with that certificate's key: its *endorsement*, a file beside the card. A partner who knows the domain and the
# authority can check it and need not compare fingerprints. What is pinned is the card, as ever: the authority is
# believed once, when a card is trusted, and can neither replace a card later nor take part in a connection.
#
# All functions raise ConfigError for files, keys and endorsements that cannot be used.

_PADDING = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
_KINDS = "an RSA key or one of an elliptic curve"


class Endorsement(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="treaty-endorsement 1"
):
    """A JSON file: certificates as PEM, the organisation's own first, and its key's signature in base64."""

    certificates: str
    signature: str


def endorse(card: Card, certificates: bytes, key: bytes) -> bytes:
    """Sign a card with the key of a certificate that an authority issued; return the file of the endorsement.

    Parameters
    ----------
    card : Card
        Whose fingerprint is signed.
    certificates : bytes
        PEM: the organisation's certificate, then those between it and the authority's, if any.
    key : bytes
        PEM: the first certificate's private key, RSA or of an elliptic curve, not encrypted.
    """
    leaf, *_ = _parse(certificates, "the certificate")
    try:
        private: Any = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError("expected an unencrypted PEM private key of the certificate, got something else") from error
    if private.public_key() != leaf.public_key():
        raise ConfigError("expected the private key of the first certificate, got another key")
    if isinstance(private, ec.EllipticCurvePrivateKey):
        signature = private.sign(_content(card), ec.ECDSA(hashes.SHA256()))
    elif isinstance(private, rsa.RSAPrivateKey):
        signature = private.sign(_content(card), _PADDING, hashes.SHA256())
    else:
        raise ConfigError(f"expected a certificate of {_KINDS}, got another kind of key")
    made = Endorsement(certificates.decode(), base64.b64encode(signature).decode())
    return msgspec.json.format(msgspec.json.encode(made)) + b"\n"


def check_endorsement(file: str | Path, card: Card, authority: str | Path, domain: str) -> None:
    """Check that who owns a domain, by a certificate that leads to an authority's today, has signed a card.

    Parameters
    ----------
    file : str or Path
        The endorsement.
    card : Card
    authority : str or Path
        PEM: the authority's certificate, or those of several.
    domain : str
        The domain that the certificate has to be for, such as "bank.example.org".
    """
    try:
        found = msgspec.json.decode(read_small(file), type=Endorsement)
        signature = base64.b64decode(found.signature, validate=True)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"expected the endorsement of a card, got something else - at {file} ({error})") from None
    leaf, *between = _parse(found.certificates.encode(), str(file))
    roots = _parse(read_small(authority), str(authority))
    try:
        policy = PolicyBuilder().store(Store(roots)).time(datetime.datetime.now(datetime.UTC).replace(tzinfo=None))
        policy.build_server_verifier(x509.DNSName(domain)).verify(leaf, between)
    except (VerificationError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"the certificate of the endorsement is not one for {domain} of the authority in {authority} that is valid "
            f"today ({str(error) or type(error).__name__}); the card is not trusted"
        ) from None
    key: Any = leaf.public_key()
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, _content(card), ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, _content(card), _PADDING, hashes.SHA256())
        else:
            raise ConfigError(f"expected a certificate of {_KINDS}, got another kind of key - at {file}")
    except InvalidSignature:
        raise ConfigError(
            f"the endorsement is of another card than {card.name}'s, or by another key; the card is not trusted"
        ) from None


def _content(card: Card) -> bytes:
    return b"treaty-endorsement\n" + fingerprint_of(card).encode()


def _parse(pem: bytes, where: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(f"expected certificates in PEM, got something else - at {where}") from error
