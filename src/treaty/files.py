"""Treaty's files: written whole or not at all, for their owner alone, and checked before they are used.

A file begins with a line that states kind and version of its format, its owner, the length of the content, and SHA-256
over all of that. So a flipped bit, a file that was cut off, another party's file or one of another kind is refused.
Files that people read are JSON with the same in their first fields. The digest detects faults of disks and mistakes of
people; those who may write the file may also write its digest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin
from urllib.parse import quote, unquote

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError

logger = logging.getLogger(__name__)

Content = TypeVar("Content", bound=msgspec.Struct)
_HEAD = re.compile(rb"treaty-([a-z-]{1,40}) ([0-9]{1,9}) ([!-~]{0,2000}) ([0-9]{1,15}) ([0-9a-f]{64})\n")
_LONGEST_HEAD = 3000  # bytes
_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"')
_BUILDING = threading.Lock()
_UNWRITTEN = "its files cannot be written; it has the details"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError; `what` is its first words: what cannot be done."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}") from None


@cache
def decoder_of(kind: Hashable, dec_hook: Callable[[Any, Any], Any] | None = None) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of a type."""
    # built one at a time: msgspec crashes when threads first decode a type at the same time
    with _BUILDING:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)


@cache
def json_decoder_of(kind: Hashable) -> msgspec.json.Decoder[Any]:
    """Return a decoder of a type from JSON; see `decoder_of`."""
    with _BUILDING:
        return msgspec.json.Decoder(kind)


class Format(NamedTuple):
    """A kind of file, and the version of its format that this Treaty writes and reads."""

    kind: str  # lower-case words joined by "-"
    version: int


def write_file(path: str | os.PathLike[str], content: Any, form: Format, owner: str, *, replace: bool = True) -> None:
    """Write a struct (of numbers, texts, bytes and arrays of one axis) to a party's file, as `write_whole` does."""
    body = msgspec.msgpack.Encoder(enc_hook=_encode).encode(content)
    line = f"treaty-{form.kind} {form.version} {quote(owner, safe='')} {len(body)}"
    write_whole(path, [f"{line} {_digest(line, body)}\n".encode(), body], replace=replace)


def read_file(path: str | os.PathLike[str], content: type[Content], form: Format, owner: str | None = None) -> Content:
    """Read what `write_file` wrote, of the same format and owner (None: anybody's).

    ConfigError if there is no such file, or it is damaged, no such file of Treaty, another party's, or of another
    version.
    """
    with explained(f"cannot read {path}"):
        with Path(path).open("rb") as file:
            line = file.readline(_LONGEST_HEAD)
            head = _HEAD.fullmatch(line)
            body = file.read() if head else b""
    if head is None:
        got = "a file of another kind" if line else "an empty file"
        raise ConfigError(f"expected a {_words(form)} of Treaty, got {got} - at {path}")
    kind, version, whose, size, digest = (part.decode() for part in head.groups())
    if len(body) < int(size):
        raise ConfigError(f"expected {size} bytes after the first line, got {len(body)}: it was cut off - at {path}")
    if digest != _digest(line[:-66].decode(), body):
        raise ConfigError(f"the file is damaged: its SHA-256 is not the one in its first line - at {path}")
    check_form(path, form, owner, kind, int(version), unquote(whose))
    found: Content = _decoded(path, lambda: decoder_of(content, _decode).decode(body), form)
    return found


def as_path(given: Any, argument: str) -> Path:
    """Return the path of an argument, with ``~`` for the user's folder; raise ConfigError if it is none."""
    if not isinstance(given, str | os.PathLike) or "://" in str(given):
        got = repr(given) if isinstance(given, str) else type(given).__name__
        raise ConfigError(f"expected {argument} to be a path on this machine, got {got}")
    return Path(given).expanduser()


def placed(here: Path, name: str) -> str:
    """Return a path named in a file of the folder `here`; ``~`` is the user's folder."""
    return str(here / Path(name).expanduser())


def without_mark(text: bytes) -> bytes:
    """Return the bytes of a text without the byte order mark of Windows' editors."""
    return text.removeprefix(b"\xef\xbb\xbf")


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return the kind of a file of `write_file`, empty for any other file; raise ConfigError if it cannot be read."""
    with explained(f"cannot read {path}"):
        with Path(path).open("rb") as file:
            head = _HEAD.fullmatch(file.readline(_LONGEST_HEAD))
    return head[1].decode() if head else ""


def read_cached(path: Path, content: type[Content], form: Format, owner: str) -> Content | None:
    """Read a file that can be made again; return None if there is none or, with a warning, if it cannot be used."""
    if not path.exists():
        return None
    try:
        return read_file(path, content, form, owner)
    except ConfigError as error:
        logger.warning("%s: a file of earlier jobs cannot be used, and is made again: %s", owner, error)
        return None


def write_cached(path: Path, content: Any, form: Format, owner: str) -> None:
    """Write a file that can be made again, in a folder for its owner alone; warn if that fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, content, form, owner)
    except (OSError, ConfigError) as error:
        logger.warning("%s: nothing is kept for later jobs: %s - at %s", owner, error, path)


def write_json(path: str | os.PathLike[str], content: Any, form: Format, owner: str) -> None:
    """Write a struct as JSON for people to read, with the same safeguards."""
    head = {"format": f"treaty-{form.kind} {form.version}", "owner": owner, "sha256": "0" * 64}
    whole = msgspec.json.format(msgspec.json.encode(head | msgspec.to_builtins(content))) + b"\n"
    write_whole(path, [whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1)])


def read_json(path: str | os.PathLike[str], content: type[Content], form: Format, owner: str | None = None) -> Content:
    """Read what `write_json` wrote; errors as of `read_file`."""
    with explained(f"cannot read {path}"):
        data = Path(path).read_bytes()
    seal = _SEAL.search(data)
    if seal is None:
        raise ConfigError(f"expected a {_words(form)} of Treaty, got a file of another kind - at {path}")
    # the digest is over the file with zeros in the digest's place
    blank = data[: seal.start(1)] + b"0" * 64 + data[seal.end(1) :]
    if hashlib.sha256(blank).hexdigest().encode() != seal.group(1):
        raise ConfigError(f"the file is damaged or was edited: its SHA-256 is not the one it states - at {path}")
    head = _decoded(path, lambda: json_decoder_of(_JsonHead).decode(data), form)
    kind, _, version = head.format.removeprefix("treaty-").rpartition(" ")
    check_form(path, form, owner, kind, int(version) if version.isdecimal() else 0, head.owner)
    found: Content = _decoded(path, lambda: json_decoder_of(content).decode(data), form)
    return found


def check_form(
    path: str | os.PathLike[str], form: Format, owner: str | None, kind: str, version: int, whose: str
) -> None:
    """Raise ConfigError unless a file that is whole is of the format, and the owner's."""
    if kind != form.kind:
        raise ConfigError(f"expected a {_words(form)}, got a {kind.replace('-', ' ')} - at {path}")
    if version != form.version:
        newer = "a newer Treaty wrote it; update this one" if version > form.version else "an earlier Treaty wrote it"
        raise ConfigError(f"expected a {_words(form)} of version {form.version}, got {version}: {newer} - at {path}")
    if owner is not None and whose != owner:
        raise ConfigError(f"expected a {_words(form)} of {owner}, got one of {whose or 'no party'} - at {path}")


def write_whole(path: str | os.PathLike[str], data: list[bytes], *, mode: int = 0o600, replace: bool = True) -> None:
    """Write a file that is whole and on the disk from its first moment; without `replace` an existing one stays.

    A file that was there stays as it was until the new one is whole. Raises ConfigError when it cannot be written, and
    then leaves nothing behind.
    """
    path = Path(path)
    try:
        # a temporary file of mode 0600 in the same folder, so that the rename is atomic
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            if replace:
                Path(temporary).replace(path)
            else:
                # unlike a rename, a link does not replace
                with suppress(FileExistsError):
                    os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        # the rename itself must survive a power cut
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", public=_UNWRITTEN) from None


@contextmanager
def replacing(path: Path, ending: str = "") -> Iterator[Path]:
    """Yield a new file for its owner alone, which replaces `path` at the end; after an error `path` stays as it was."""
    whole = path.with_name(f".{secrets.token_hex(8)}{ending}")
    try:
        whole.touch(mode=0o600)
        yield whole
        whole.replace(path)
    finally:
        with suppress(OSError):
            whole.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _JsonHead(msgspec.Struct):
    format: str
    owner: str


def _digest(line: str, body: bytes) -> str:
    digest = hashlib.sha256(f"{line}\n".encode())
    digest.update(body)
    return digest.hexdigest()


def _words(form: Format) -> str:
    return form.kind.replace("-", " ")


def _decoded(path: str | os.PathLike[str], decode: Callable[[], Any], form: Format) -> Any:
    try:
        return decode()
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"cannot read the content of the {_words(form)}: {error} - at {path}") from None


def _encode(value: Any) -> bytes:
    # one axis; the element type is that of the field's annotation
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    raise TypeError(f"cannot write {type(value).__name__}")


def _decode(kind: Any, value: Any) -> NDArray[Any]:
    if get_origin(kind) is np.ndarray and isinstance(value, bytes):
        dtype = np.dtype(get_args(get_args(kind)[1])[0])
        return np.frombuffer(value, dtype.newbyteorder("<")).astype(dtype)
    raise ValueError(f"expected the bytes of an array, got {type(value).__name__}")
