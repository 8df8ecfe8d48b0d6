"""Who a party is on the network: a private key and a self-signed certificate that its peers pin.

Certificates are ECDSA P-256, with the party's name as the only subject alternative
name. There is no authority: organisations exchange certificates and compare fingerprints.

All functions raise ConfigError for files, names, keys or certificates that cannot be used.
"""

import datetime
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from treaty.errors import ConfigError
from treaty.files import without_mark

VALIDITY = datetime.timedelta(days=730)
"""How long a new certificate is valid: a key that was lost or copied unnoticed is out of use after two years."""

RENEW_WITHIN = datetime.timedelta(days=60)
"""How long before its end a warning is logged: partners have to pin the next certificate meanwhile."""

logger = logging.getLogger(__name__)

# one DNS label, plus the underscore
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")


class Identity(NamedTuple):
    """A party's private key (PKCS #8, not encrypted) and certificate, both PEM."""

    key: bytes
    certificate: bytes


def make_identity(name: str) -> Identity:
    """Make a new key and its self-signed certificate, valid from yesterday (clocks differ) for `VALIDITY`.

    The name has at most 63 letters, digits, ``-`` and ``_``, with a letter or digit at both ends.
    """
    check_names([name])
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(yesterday)
        .not_valid_after(yesterday + VALIDITY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Identity(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.public_bytes(serialization.Encoding.PEM),
    )


def check_names(names: Iterable[str]) -> None:
    """Refuse names that a certificate cannot hold; those it can hold are also safe in file names."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"expected a name of 1 to 63 letters, digits, '-' and '_', with a letter or digit at both ends, got "
                f"{name!r}"
            )


def load_identity(key_file: str | Path, certificate_file: str | Path, name: str) -> Identity:
    """Read a party's key and certificate from PEM files, as ``treaty keys new`` writes them, or given as the PEM.

    Refuses a key file that is another user's or open to others, a key that is not the certificate's, and a certificate
    not valid for `name`; warns of one that ends soon (`RENEW_WITHIN`).
    """
    key = _given(key_file) or read_secret(Path(key_file))
    identity = Identity(key, load_certificate(certificate_file))
    check_identity(identity, name)
    last = _parse(identity.certificate, name).not_valid_after_utc
    if last - datetime.datetime.now(datetime.UTC) < RENEW_WITHIN:
        logger.warning(
            "the certificate of %s ends on %s: make the next one (treaty keys) and give it to your partners", name,
            f"{last:%Y-%m-%d}",
        )  # fmt: skip
    return identity


def load_certificate(file: str | Path) -> bytes:
    """Read a peer's certificate, PEM, from a file that holds exactly one; `file` may be the PEM itself."""
    given = _given(file)
    try:
        pem = given or without_mark(Path(file).read_bytes())
    except OSError as error:
        raise _unreadable(Path(file), error) from error
    _parse(pem, "the job" if given else str(file))
    return pem


def read_secret(file: Path) -> bytes:
    """Read a file that only this user may read."""
    try:
        with file.open("rb") as stream:
            # of the open file, not of its name, which may be another file by now
            found = os.fstat(stream.fileno())
            if found.st_uid != os.geteuid():
                raise ConfigError(
                    f"expected a key file of this user, got one of another: {file}; take a copy of your own and run "
                    "chmod 600 on it"
                )
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(f"expected a key file only its owner can read, got {file}; run chmod 600 on it")
            return stream.read()
    except OSError as error:
        raise _unreadable(file, error) from error


def fingerprint(certificate: bytes) -> str:
    """Return ``SHA256:`` and 64 hexadecimal digits in groups of four, to be compared by telephone."""
    digest = _parse(certificate, "fingerprint").fingerprint(hashes.SHA256()).hex()
    return "SHA256:" + " ".join(digest[i : i + 4] for i in range(0, 64, 4))


def check_identity(identity: Identity, name: str) -> None:
    """Check that a party can use this key and certificate under this name."""
    # the certificate's key, the file's public half and the one computed from the private half must be the same
    public = check_certificate(identity.certificate, name).public_key()
    try:
        key = serialization.load_pem_private_key(identity.key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"cannot read the private key of {name}: expected PEM without a password") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not public == key.public_key() == _derived(key):
        raise ConfigError(f"the private key is not that of {name}'s certificate")


def _derived(key: ec.EllipticCurvePrivateKey) -> ec.EllipticCurvePublicKey | None:
    """Compute the public key from the private half: cryptography 43 does not check the file's copy of it."""
    try:
        return ec.derive_private_key(key.private_numbers().private_value, key.curve).public_key()
    except ValueError:
        return None


def check_certificate(certificate: bytes, name: str) -> x509.Certificate:
    """Check that a certificate can be pinned for a party: one ECDSA P-256 certificate for `name`, valid today."""
    parsed = _parse(certificate, name)
    key = parsed.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError(f"expected an ECDSA P-256 certificate for {name}, got another kind of key")
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        bears = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        bears = []
    # TLS compares this name with that of the peer dialled
    if bears != [name]:
        raise ConfigError(f"expected a certificate for {name}, got one for {', '.join(bears) or 'no name'}")
    first, last = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    if not first <= datetime.datetime.now(datetime.UTC) <= last:
        raise ConfigError(
            f"expected a certificate of {name} valid today, got one valid {first:%Y-%m-%d} to {last:%Y-%m-%d}"
        )
    return parsed


def vouch(identity: Identity, content: bytes) -> bytes:
    """Sign with the key of a certificate: ECDSA P-256 with SHA-256, DER."""
    key = serialization.load_pem_private_key(identity.key, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.sign(content, ec.ECDSA(hashes.SHA256()))


def vouches(certificate: bytes, signature: bytes, content: bytes) -> bool:
    """Tell whether the key of a certificate signed `content`."""
    key = _parse(certificate, "a pinned certificate").public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _parse(pem: bytes, what: str) -> x509.Certificate:
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(f"cannot read the certificate - at {what}; expected one certificate in PEM") from error
    if len(certificates) != 1:
        raise ConfigError(f"expected one PEM certificate, got {len(certificates)} - at {what}")
    # there is no authority: a certificate is signed by its own key, and trusted because it is pinned
    try:
        certificates[0].verify_directly_issued_by(certificates[0])
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise ConfigError(
            f"expected a certificate signed by its own key, got a damaged one, or another's - at {what}"
        ) from None
    return certificates[0]


def _given(file: str | Path) -> bytes | None:
    """Return a PEM that was given instead of a file's name; None for a name."""
    return str(file).encode() if str(file).startswith("-----BEGIN ") else None


def _unreadable(file: Path, error: OSError) -> ConfigError:
    remedy = "; `treaty keys new NAME` makes a party's own, a partner sends its certificate"
    return ConfigError(f"cannot read {file}: {error.strerror}{remedy if isinstance(error, FileNotFoundError) else ''}")


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs with the party's own key, and checks signatures against the pinned certificates of all members."""

    # the party's own; None between threads of one process
    identity: Identity | None = None
    # every member's certificate, PEM
    pinned: Mapping[str, bytes] | None = None

    def vouch(self, content: bytes) -> bytes:
        """Sign with the key of the own certificate; empty without one."""
        return b"" if self.identity is None else vouch(self.identity, content)

    def check(self, name: str, vouched: bytes, content: bytes) -> bool:
        """Tell whether `vouched` is member `name`'s signature of `content`; always True where nothing is pinned."""
        return self.pinned is None or (name in self.pinned and vouches(self.pinned[name], vouched, content))
