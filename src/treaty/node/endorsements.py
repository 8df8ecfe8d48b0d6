"""How a certificate authority that both organisations believe takes the place of a telephone call.

An organisation that has a certificate of such an authority, for a domain of its own, signs its card's fingerprint with
that certificate's key: its *endorsement*, a file beside the card. A partner who knows the domain and the authority can
check it and need not compare fingerprints. What is pinned is the card, as ever: the authority is believed once, when a
card is trusted, and can neither replace a card later nor take part in a connection.

All functions raise ConfigError for files, keys and endorsements that cannot be used.
"""

from __future__ import annotations

import base64
import datetime
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from treaty.errors import ConfigError
from treaty.node.cards import Card, fingerprint_of, read_small

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
