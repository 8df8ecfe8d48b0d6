"""An organisation's own keys, and the partners whose cards it trusts.

An organisation has two private keys: ECDSA P-256 for TLS (`treaty.messaging.certificates`), and Ed25519 for signatures.
Its *card* has both public keys and its name; it is the only file that partners need. There is no authority: people
compare a card's fingerprint once, over another channel; a later card is signed by the signing key of the previous one.

A folder of keys holds ``NAME.key.pem`` and ``NAME.sign.pem`` (private), ``NAME.cert.pem`` and ``NAME.card``; ``old/``
has replaced files, ``peers/`` trusted cards, and ``peers/revoked/`` cards, by fingerprint, never trusted again.

All functions raise ConfigError for files, names, keys or cards that cannot be used.
"""

from __future__ import annotations

import base64
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from treaty.errors import ConfigError
from treaty.files import explained, sync_folder, write_whole
from treaty.messaging import certificates
from treaty.node.cards import (
    OF_CONTENT,
    Card,
    digits,
    encode_card,
    fingerprint_of,
    make_card,
    read_card,
    read_small,
    replaces,
    verify,
)

_PRIVATE = ("key.pem", "sign.pem")  # mode 0600
_PUBLIC = ("cert.pem", "card")  # mode 0644


class Own(NamedTuple):
    """An organisation's own keys and card."""

    name: str
    identity: certificates.Identity
    signing: Ed25519PrivateKey
    card: Card


class PeerCard(NamedTuple):
    """A card in ``peers/``: its name, since when it is trusted, and why it cannot be used now ("" if it can)."""

    name: str
    card: Card | None  # None: it is damaged or revoked
    since: datetime
    wrong: str


def make_keys(folder: str | Path, name: str) -> Card:
    """Make an organisation's keys and card. Existing files are never replaced."""
    certificates.check_names([name])
    folder = Path(folder)
    with explained(f"cannot write the identity of {name} to {folder}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(folder):
            for file in (folder / f"{name}.{end}" for end in (*_PRIVATE, *_PUBLIC)):
                if file.exists():
                    raise ConfigError(
                        f"expected no file yet, got an existing {file}; to replace keys run treaty keys rotate, or "
                        "make them in another folder"
                    )
            return _install(folder, name)


def load_own(folder: str | Path, name: str) -> Own:
    """Read an organisation's own keys and card; warn of a certificate that expires soon.

    Refuses private files that others own or can read, and files that do not belong together.
    """
    certificates.check_names([name])
    folder = Path(folder)
    with _alone(folder):
        identity = certificates.load_identity(folder / f"{name}.key.pem", folder / f"{name}.cert.pem", name)
        signing, card = _signing_key(folder, name), _own_card(folder, name)
    if card.certificate.encode() != identity.certificate:
        raise ConfigError(f"the card of {name} has another certificate than {name}.cert.pem - at {folder / name}.card")
    return Own(name, identity, signing, card)


def own_cards(folder: str | Path) -> dict[str, Card]:
    """Return the cards of the organisations (usually one) whose keys are in a folder, by name."""
    with _alone(Path(folder)):
        names = sorted(file.name.removesuffix(".sign.pem") for file in Path(folder).glob("*.sign.pem"))
        return {name: _own_card(Path(folder), name) for name in names}


def rotate(folder: str | Path, name: str) -> Card:
    """Replace an organisation's keys; return the new card, which the old signing key signs, too.

    This also works after the certificate has expired. Old files move to ``old/``. All new files are on disk before the
    first old one is replaced. If an earlier call was interrupted after that, this call only completes it.
    """
    certificates.check_names([name])
    folder = Path(folder)
    with explained(f"cannot write the identity of {name} to {folder}"), _alone(folder) as finished:
        if name in finished:
            return _own_card(folder, name)
        signing, card = _signing_key(folder, name), _own_card(folder, name)
        old = folder / "old"
        old.mkdir(mode=0o700, exist_ok=True)
        label = f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.{digits(fingerprint_of(card))[:8]}"
        for end in (*_PRIVATE, *_PUBLIC):
            file = folder / f"{name}.{end}"
            data = certificates.read_secret(file) if end in _PRIVATE else read_small(file)
            write_whole(old / f"{name}.{label}.{end}", [data])
        return _install(folder, name, (card, signing))


def must_compare(folder: str | Path, card: Card) -> bool:
    """Return whether people must compare a card's fingerprint before it is trusted; raise ConfigError to refuse it.

    No comparison is needed if the card is trusted already, or if it replaces a trusted one whose key signed it.
    """
    folder = Path(folder)
    certificates.check_certificate(card.certificate.encode(), card.name)
    found = fingerprint_of(card)
    if (folder / f"{card.name}.key.pem").exists():
        raise ConfigError(f"expected a partner's card, but the keys of {card.name} itself are in {folder}")
    if _revoked(folder, found).exists():
        raise ConfigError(
            f"the card of {card.name} was revoked or replaced here, and is never trusted again ({found}); it must "
            "make another one (treaty keys rotate)"
        )
    known = _known(folder, card.name)
    if known is None:
        return True
    if found == fingerprint_of(known) or replaces(card, known):
        return False
    raise ConfigError(
        f"another card of {card.name} is trusted, and its key has not signed this one (trusted "
        f"{fingerprint_of(known)}, got {found}). If {card.name} has lost its keys, revoke them (treaty keys revoke "
        f"{card.name}) and compare the fingerprint of the new card"
    )


def trust(folder: str | Path, card: Card, confirmed: str | None = None) -> None:
    """Trust a partner's card, from `read_card`, instead of an earlier one; `must_compare` refuses some cards.

    `confirmed` is the fingerprint as the partner read it over another channel; needed if `must_compare` is true.
    """
    folder = Path(folder)
    with _alone(folder):
        if must_compare(folder, card) and confirmed is None:
            raise ConfigError(f"the fingerprint of {card.name}'s card must be compared with {card.name} first")
        if confirmed is not None and digits(confirmed) != digits(fingerprint_of(card)):
            got = fingerprint_of(card)
            raise ConfigError(f"the card of {card.name} has another fingerprint, {got}: it is not trusted")
        known = _known(folder, card.name)
        if known is not None and fingerprint_of(known) == fingerprint_of(card):
            return
        _make_folder(folder / "peers" / "revoked")
        write_whole(_trusted_file(folder, card.name), [encode_card(card)])
        if known is not None:
            write_whole(_revoked(folder, fingerprint_of(known)), [encode_card(known)])


def peers(folder: str | Path) -> list[PeerCard]:
    """Return all cards in ``peers/``, by name, with what is wrong with each."""
    found = []
    for file in sorted((Path(folder) / "peers").glob("*.card")):
        card, wrong = None, ""
        try:
            since = file.stat().st_mtime
        except FileNotFoundError:  # revoked a moment ago
            continue
        try:
            card = _known(Path(folder), file.stem)
            if card is None:
                wrong = f"the card of {file.stem} was revoked"
            else:
                certificates.check_certificate(card.certificate.encode(), card.name)
        except ConfigError as error:
            wrong = str(error)
        found.append(PeerCard(file.stem, card, datetime.fromtimestamp(since, UTC), wrong))
    return found


def trusted(folder: str | Path) -> dict[str, Card]:
    """Return the partners' cards that are valid now, by name; `peers` has what is wrong with the others."""
    return {peer.name: peer.card for peer in peers(folder) if peer.card is not None and not peer.wrong}


def revoke(folder: str | Path, name: str) -> None:
    """Stop trusting a partner; its present card is never trusted again."""
    certificates.check_names([name])
    folder = Path(folder)
    file = _trusted_file(folder, name)
    with _alone(folder):
        if not file.exists():
            raise ConfigError(f"expected a trusted partner, got {name!r}: there is no {file}")
        try:
            target = _revoked(folder, fingerprint_of(read_card(file, today=False)))
        except ConfigError:
            # Unreadable, so its fingerprint is unknown.
            target = folder / "peers" / "revoked" / f"{name}.{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.damaged"
        _make_folder(target.parent)
        file.replace(target)
        sync_folder(target.parent)
        sync_folder(file.parent)


def sign(own: Own, content: bytes) -> bytes:
    """Sign with an organisation's signing key."""
    return own.signing.sign(OF_CONTENT + content)


def has_signed(folder: str | Path, name: str, signature: bytes, content: bytes) -> bool:
    """Return whether an organisation whose keys are in a folder has signed `content`, with present or old keys."""
    old = Path(folder, "old").glob(f"{name}.*.card")
    cards = [own_cards(folder).get(name), *(read_card(file, today=False) for file in old)]
    return any(verify(card, signature, content) for card in cards if card is not None and card.name == name)


def _install(folder: Path, name: str, replaced: tuple[Card, Ed25519PrivateKey] | None = None) -> Card:
    """Write new files to another folder first, then put them in place."""
    identity, signing = certificates.make_identity(name), Ed25519PrivateKey.generate()
    card = make_card(name, identity.certificate, signing, replaced)
    secret = signing.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    making = folder / f".{name}.making"
    # Left by a killed process.
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(mode=0o700)
    for end, data in zip(
        (*_PRIVATE, *_PUBLIC), (identity.key, secret, identity.certificate, encode_card(card)), strict=True
    ):
        write_whole(making / f"{name}.{end}", [data], mode=0o600 if end in _PRIVATE else 0o644)
    # The rename is the commit: a ".next" folder is complete, and any later call finishes it (`_finish`).
    making.rename(folder / f".{name}.next")
    sync_folder(folder)
    _finish(folder)
    return card


def _finish(folder: Path) -> list[str]:
    """Put complete sets of new files in place, also those of an interrupted call; return whose they are."""
    sets = list(folder.glob(".*.next"))
    for ready in sets:
        for file in ready.iterdir():
            file.replace(folder / file.name)
        sync_folder(folder)
        ready.rmdir()
    return [ready.name.removeprefix(".").removesuffix(".next") for ready in sets]


@contextmanager
def _alone(folder: Path) -> Iterator[list[str]]:
    """Lock a folder of keys against other processes; yield the names whose interrupted change was completed."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        why = f"{error.strerror}; treaty keys new NAME makes one"
        raise ConfigError(f"cannot read the folder of keys {folder}: {why}") from error
    try:
        # Released when the process ends, too.
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield _finish(folder)
    finally:
        os.close(handle)


def _card_in(file: Path, name: str) -> Card:
    card = read_card(file, today=False)
    if card.name != name:
        raise ConfigError(f"expected the card of {name}, got one of {card.name} - at {file}")
    return card


def _own_card(folder: Path, name: str) -> Card:
    file = folder / f"{name}.card"
    card = _card_in(file, name)
    if base64.b64decode(card.signing_key) != _signing_key(folder, name).public_key().public_bytes_raw():
        raise ConfigError(f"the card of {name} has another signing key than {name}.sign.pem - at {file}")
    return card


def _signing_key(folder: Path, name: str) -> Ed25519PrivateKey:
    file = folder / f"{name}.sign.pem"
    pem = certificates.read_secret(file)
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"cannot read the private key: expected unencrypted PEM - at {file}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"expected an Ed25519 private key, got another kind of key - at {file}")
    return key


def _known(folder: Path, name: str) -> Card | None:
    """Return the trusted card of a name; None if there is none, or it was revoked."""
    file = _trusted_file(folder, name)
    if not file.exists():
        return None
    card = _card_in(file, name)
    return None if _revoked(folder, fingerprint_of(card)).exists() else card


def _trusted_file(folder: Path, name: str) -> Path:
    return folder / "peers" / f"{name}.card"


def _revoked(folder: Path, of: str) -> Path:
    return folder / "peers" / "revoked" / f"{digits(of)}.card"


def _make_folder(folder: Path) -> None:
    with explained(f"cannot make the folder {folder}"):
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
