"""Who may ask: keys of callers, of which the server keeps names and digests.

A key is drawn at random with 256 bits, so one SHA-256 hides it: there is nothing to guess that salts and slow hashes
would protect. The file has a line for each key, its holder's name and 64 hexadecimal digits; lines that begin with #
are remarks.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from treaty.errors import ConfigError
from treaty.files import write_whole

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Keys:
    """Names of callers, by the digests of their keys."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = dict(digests)

    def __len__(self) -> int:
        return len(self._digests)

    def holder(self, authorization: str) -> str | None:
        """Return whose key an Authorization header has, as a Bearer token or a Basic password; None for nobody's.

        All digests are compared, each in the same time whatever it is.
        """
        given = hashlib.sha256(_key_in(authorization).encode()).digest()
        found = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found


def read_keys(path: Path) -> Keys:
    """Read a file of keys.

    Raises
    ------
    ConfigError
        If there is none, it has no key, a line is malformed or a name comes twice.
    """
    digests: dict[str, bytes] = {}
    for number, line in enumerate(_lines(path), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1]):
            raise ConfigError(
                f"expected a name and the SHA-256 of a key in hexadecimal digits - at line {number} of {path}"
            )
        if words[0] in digests:
            raise ConfigError(f"expected each name once, got {words[0]!r} again - at line {number} of {path}")
        digests[words[0]] = bytes.fromhex(words[1])
    if not digests:
        raise ConfigError(f"expected a key at least, got none; make one with --new-key NAME - at {path}")
    return Keys(digests)


def new_key(name: str) -> tuple[str, str]:
    """Draw a key; return it, and the line that lets its holder in. ConfigError for an unusual name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"expected a name of up to 64 letters, digits, '.', '_' and '-', got {name!r} - at --new-key")
    key = f"treaty_{secrets.token_urlsafe(32)}"
    return key, f"{name} {hashlib.sha256(key.encode()).hexdigest()}"


def add_key(path: Path, name: str) -> str:
    """Draw a key and add its line to a file, which is made where there is none; return the key, which is kept nowhere.

    Raises
    ------
    ConfigError
        If the file cannot be read or written, or has the name already.
    """
    key, line = new_key(name)
    lines = _lines(path) if path.exists() else []
    if any(other.split()[:1] == [name] for other in lines):
        raise ConfigError(f"{name!r} has a key already: take its line out of {path} first, or choose another name")
    write_whole(path, ["".join(f"{each}\n" for each in [*lines, line]).encode()])
    return key


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"expected a file of names and keys' digests, got something else - at {path}") from None


def _key_in(authorization: str) -> str:
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() == "basic":  # what browsers ask for; whatever the name is
        try:
            return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
