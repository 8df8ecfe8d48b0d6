"""API keys: the server keeps the names and digests of those who may send requests.

A key has 256 random bits, so one SHA-256 hides it: salts and slow hashes only protect guessable secrets. The file has
one line for each key, with its holder's name and 64 hexadecimal digits; lines that start with # are comments.
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
        """Return the holder of the key in an Authorization header (Bearer token or Basic password), or None.

        Time does not depend on which digest matches: all are compared, each in constant time.
        """
        given = hashlib.sha256(_key_in(authorization).encode()).digest()
        found = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found


def read_keys(path: Path) -> Keys:
    """Read a file of keys.

    Raises ConfigError if there is no file or no key in it, if a line is malformed, or if a name occurs twice.
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
            raise ConfigError(f"the name {words[0]!r} occurs twice - at line {number} of {path}")
        digests[words[0]] = bytes.fromhex(words[1])
    if not digests:
        raise ConfigError(f"expected at least one key, got none; make one with --new-key NAME - at {path}")
    return Keys(digests)


def new_key(name: str) -> tuple[str, str]:
    """Generate a key; return it, and its line for the file. ConfigError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"expected a name of up to 64 letters, digits, '.', '_' and '-', got {name!r} - at --new-key")
    key = f"treaty_{secrets.token_urlsafe(32)}"
    return key, f"{name} {hashlib.sha256(key.encode()).hexdigest()}"


def add_key(path: Path, name: str) -> str:
    """Generate a key and add its line to a file, new or existing; return the key, which is not stored.

    Raises ConfigError if the file cannot be read or written, or has the name already.
    """
    key, line = new_key(name)
    lines = _lines(path) if path.exists() else []
    if any(other.split()[:1] == [name] for other in lines):
        raise ConfigError(f"{name!r} has a key already: remove its line from {path} first, or choose another name")
    write_whole(path, ["".join(f"{each}\n" for each in [*lines, line]).encode()])
    return key


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"expected a file of names and digests of keys, got another kind of file - at {path}"
        ) from None


def _key_in(authorization: str) -> str:
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    # Browsers prompt for this; the user name is ignored.
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
