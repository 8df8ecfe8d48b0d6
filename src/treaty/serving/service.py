"""From the body of a request to its answer, independent of HTTP: rows in JSON in, predictions or a refusal out.

The end of the module has the API keys of those who may send requests.

The decoder is built from the model's schema, so that types are checked during parsing, and errors name row and column.
Numbers become float32 as in files (`treaty.data.columns`); whole numbers go through float64. JSON has no NaN, no inf.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import LARGEST, Category
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, LocalProtocolError, TreatyError
from treaty.files import write_whole
from treaty.serving.models import Margins, ServedModel

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A request that cannot be answered: HTTP status, message, and the place in the request.

    `row` is counted from 0; `retry_after` is the number of seconds after which a retry may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        row: int | None = None,
        column: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.row, self.column, self.retry_after = status, row, column, retry_after

    def answer(self) -> dict[str, str | int]:
        """Return the body of the answer: "error", a sentence that names row and column, and both as fields."""
        place = {name: of for name, of in (("row", self.row), ("column", self.column)) if of is not None}
        where = ", ".join(f"{name} {of!r}" for name, of in place.items())
        return {"error": f"{where}: {self}" if where else str(self), **place}


_IN_ROW = re.compile(r"^(?P<what>.*) - at `\$\.(?P<list>rows|ids)\[(?P<row>\d+)\](?:\.(?P<column>.*))?`$", re.DOTALL)
_AT_TOP = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<field>.*)`)?$", re.DOTALL)
_TYPES = re.compile(r"^Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`$")
_FIELD = re.compile(r"^Object (?P<is>missing required|contains unknown) field `(?P<field>.*)`$", re.DOTALL)
_WORDS = {
    "str": "text", "float": "a number", "int": "a number", "bool": "true or false", "null": "null",
    "array": "a list", "object": "an object",
}  # fmt: skip


_TOO_LARGE = f"expected numbers up to {LARGEST:.2g}, got a larger one"


@dataclass(frozen=True, slots=True, eq=False)
class PredictionRequest:
    """Rows to predict (n_rows, n_features) as in a `Table`, and their ids if partners need them."""

    matrix: NDArray[Any]
    ids: list[str] | None


class RequestReader:
    """Reads requests of the form `shape`, with ``"ids"`` if partners need them."""

    def __init__(self, schema: Schema, *, max_rows: int, with_ids: bool = False) -> None:
        """Raise ConfigError for a column name that JSON would escape."""
        self._names, self._max_rows = schema.names, max_rows
        self._codes: dict[int, Mapping[Category, int]] = {
            place: {value: code for code, value in enumerate(values)}
            for place, values in enumerate(schema.categories)
            if values is not None
        }
        self._origins = {schema.names.index(name): origin for name, origin in schema.origins.items()}
        of_cells = [
            (f"c{place}", int | bool | float | None if self._origins.get(place) else _cell(values))
            for place, values in enumerate(schema.categories)
        ]
        renamed = dict(zip((name for name, _ in of_cells), schema.names, strict=True))
        try:
            row = msgspec.defstruct("Row", of_cells, rename=renamed, forbid_unknown_fields=True)
        except ValueError:
            raise ConfigError(
                "the model cannot be served: the name of a column has a quotation mark, a backslash or a control "
                "character; rename the column and train again"
            ) from None
        fields: list[Any] = [("rows", list[row])]  # type: ignore[valid-type]
        if with_ids:
            fields.append(("ids", list[str]))
        body = msgspec.defstruct("Body", fields, forbid_unknown_fields=True)
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(body)
        self._with_ids = with_ids
        ids = ', "ids": ["id", ...]' if with_ids else ""
        self.shape = f'{{"rows": [{{"column": value, ...}}, ...]{ids}}}'

    def read(self, content: bytes) -> PredictionRequest:
        """Return a request's rows; raise `Refused`: 400 if it is no JSON, 422 if it does not fit the model."""
        try:
            body = self._decoder.decode(content)
        except msgspec.ValidationError as error:
            raise _refused(str(error), self.shape) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(400, f"cannot read the request as JSON in UTF-8: {error}") from None
        except RecursionError:
            raise Refused(400, "expected rows of numbers and text, got lists or objects nested too deeply") from None
        n_rows = len(body.rows)
        if not 0 < n_rows <= self._max_rows:
            raise Refused(422, f"expected 1 to {self._max_rows} rows, got {n_rows}; send more rows in several requests")
        if self._with_ids and len(body.ids) != n_rows:
            raise Refused(422, f"expected an id for each of the {n_rows} rows, got {len(body.ids)}")
        return PredictionRequest(self._matrix(body.rows), body.ids if self._with_ids else None)

    def _matrix(self, rows: list[Any]) -> NDArray[Any]:
        cells: list[Any] = list(map(msgspec.structs.astuple, rows))
        if self._codes:
            cells = [self._coded(row) for row in cells]
        # Large whole numbers less their column's origin are exact in a float.
        for place, origin in self._origins.items():
            if origin:
                of_rows = (None if row[place] is None else row[place] - origin for row in cells)
                cells = [(*row[:place], cell, *row[place + 1 :]) for row, cell in zip(cells, of_rows, strict=True)]
        wide = np.array(cells, np.float64).reshape(len(rows), len(self._names))  # None becomes NaN
        with np.errstate(over="ignore"):
            matrix = wide.astype(np.float32)
        if np.isinf(matrix).any():
            row, place = np.argwhere(np.isinf(matrix))[0].tolist()
            raise Refused(422, _TOO_LARGE, row=row, column=self._names[place])
        if not self._origins:
            return matrix
        return np.where([place in self._origins for place in range(len(self._names))], wide, matrix)

    def _coded(self, cells: tuple[Any, ...]) -> list[Any]:
        """Return a row's cells with codes for categories; values unknown in training get the next code."""
        coded = list(cells)
        for place, codes in self._codes.items():
            if coded[place] is not None:
                coded[place] = codes.get(coded[place], len(codes))
        return coded


def _cell(values: tuple[Category, ...] | None) -> UnionType | Any:
    """Return the type of a column's cells: numbers and truth values, or the types of its categories."""
    if values is None:
        return float | bool | None
    kinds: set[type] = {type(value) for value in values} or {str}
    kinds = kinds | {int, float} if kinds & {int, float} else kinds
    return Union[(*sorted(kinds, key=lambda kind: kind.__name__), None)]


def _refused(said: str, shape: str) -> Refused:
    """Translate a decoder's error into plain words; `shape` is the form of a request."""
    found = _IN_ROW.match(said)
    if found is None:
        return _refused_at_top(said, shape)
    row, column = int(found["row"]), found["column"]
    if found["list"] == "ids":
        return Refused(422, f"ids: {_plain(found['what'])}", row=row)
    field = _FIELD.match(found["what"])
    if field is not None and field["is"] == "missing required":
        return Refused(422, "it is missing; give null for an unknown value", row=row, column=field["field"])
    if field is not None:
        return Refused(422, "the model has no such column; /model lists its columns", row=row, column=field["field"])
    return Refused(422, _plain(found["what"]), row=row, column=column)


def _refused_at_top(said: str, shape: str) -> Refused:
    found = _AT_TOP.match(said)
    assert found is not None
    field = _FIELD.match(found["what"])
    if field is not None and field["is"] == "missing required":
        return Refused(422, f'expected a field "{field["field"]}", got none: a request is {shape}')
    if field is not None:
        return Refused(422, f"the request has an unknown field {field['field']!r}: a request is {shape}")
    where = f'"{found["field"]}": ' if found["field"] else ""
    return Refused(422, f"{where}{_plain(found['what'])}: a request is {shape}")


def _plain(what: str) -> str:
    if what == "Number out of range":
        return _TOO_LARGE
    types = _TYPES.match(what)
    if types is None:
        return what
    wanted = list(dict.fromkeys(_WORDS.get(kind, kind) for kind in reversed(types["wanted"].split(" | "))))
    wanted.sort(key=lambda words: words == "null")
    listed = wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} or {wanted[-1]}"
    return f"expected {listed}, got {_WORDS.get(types['got'], types['got'])}"


# Predicts with the other parties: takes ids and own columns, returns margins (n_rows, n_outputs) of the whole model.
#
# It may be called from several threads. It raises a `TreatyError` if it fails.
Partners = Callable[[Sequence[str], Table], Margins]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits: rows and bytes of a request, concurrent requests, and seconds for a request's body to arrive."""

    rows: int = 10_000
    body_bytes: int = 8 << 20
    under_way: int = 64
    body_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class PredictionResponse:
    """The body of an answer in JSON, and what the metrics count."""

    content: bytes
    n_rows: int
    fallback: bool


class PredictionService:
    """Answers requests with a model's predictions.

    `waits` is whether an answer waits for other parties, `falls_back` whether rows are predicted without needed
    partners if they are absent, and `shape` the form of a request, in JSON.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: RequestLimits | None = None,
        *,
        partners: Partners | None = None,
        fallback: bool = False,
        threads: int = 1,
    ) -> None:
        """`fallback`: predict without needed partners if they are absent; ConfigError if the model cannot."""
        self.model, self.limits, self._needed = model, limits or RequestLimits(), ", ".join(model.needs)
        self._partners = partners if model.needs else None
        self._fallback = model.fallback() if fallback and model.needs else None
        self.waits, self.falls_back = self._partners is not None, self._fallback is not None
        self._reader = RequestReader(model.schema, max_rows=self.limits.rows, with_ids=self.waits)
        self.shape = self._reader.shape
        self._encoder, self._threads = msgspec.json.Encoder(), threads

    def described(self) -> dict[str, Any]:
        """Return the answer to ``GET /model``."""
        return self.model.described() | {
            "ids": self.waits, "fallback": self.falls_back, "max_rows": self.limits.rows,
            "max_bytes": self.limits.body_bytes,
        }  # fmt: skip

    def warm_up(self) -> None:
        """Predict one row of missing values, so that decoders and kernels are ready before the first request."""
        nothing = {"rows": [dict.fromkeys(self.model.schema.names)]} | ({"ids": [""]} if self.waits else {})
        request = self._reader.read(self._encoder.encode(nothing))
        compute = self._fallback if self.model.needs else self.model.margins
        if compute is not None:
            self.model.predictions(compute(request.matrix, 1))

    def answer(self, content: bytes) -> PredictionResponse:
        """Return the answer to the body of a request; raise `Refused` if there is none."""
        if self.model.needs and self._partners is None and self._fallback is None:
            raise Refused(
                503,
                f"this model needs {self._needed}, who are not connected here. Predict in a batch with `treaty "
                "predict`, or start the server with --fallback own for less accurate predictions from own columns",
            )
        request = self._reader.read(content)
        margins, fallback = self._margins(request)
        body = {"model": self.model.part.model_id, "fallback": fallback, "predictions": self.model.predictions(margins)}
        caution = self.model.part.caution(margins)
        if caution is not None:
            body["caution"] = caution
        return PredictionResponse(self._encoder.encode(body), len(request.matrix), fallback)

    def _margins(self, request: PredictionRequest) -> tuple[Margins, bool]:
        """Return margins, and whether they were computed without needed partners."""
        matrix = request.matrix
        if not self.model.needs:
            return self.model.margins(matrix, self._threads), False
        if self._partners is not None and request.ids is not None:
            try:
                margins, n_rows = self._partners(request.ids, self.model.table(matrix)), len(matrix)
                if len(margins) != n_rows:
                    raise LocalProtocolError(f"expected margins of {n_rows} rows from partners, got {len(margins)}")
                return margins, False
            except TreatyError as error:
                logger.warning("a prediction with %s failed: %s", self._needed, error)
                if self._fallback is None:
                    why = f"no prediction with {self._needed} was made; the server's log has the reason"
                    raise Refused(503, why, retry_after=10) from None
        assert self._fallback is not None
        return self._fallback(matrix, self._threads), True


# A key has 256 random bits, so one SHA-256 hides it: salts and slow hashes only protect guessable secrets. The file has
# one line for each key, with its holder's name and 64 hexadecimal digits; lines that start with # are comments.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


# Digests of keys, by the names of their holders.
Keys = Mapping[str, bytes]


def holder_of(keys: Keys, authorization: str) -> str | None:
    """Return the holder of the key in an Authorization header (Bearer token or Basic password), or None.

    Time does not depend on which digest matches: all are compared, each in constant time.
    """
    given = hashlib.sha256(_key_in(authorization).encode()).digest()
    found = None
    for name, digest in keys.items():
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
            raise ConfigError(f"expected a name and a SHA-256 in hexadecimal digits - at line {number} of {path}")
        if words[0] in digests:
            raise ConfigError(f"the name {words[0]!r} occurs twice - at line {number} of {path}")
        digests[words[0]] = bytes.fromhex(words[1])
    if not digests:
        raise ConfigError(f"expected at least one key, got none; make one with --new-key NAME - at {path}")
    return digests


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
        raise ConfigError(f"expected a file of names and digests of keys, got another file - at {path}") from None


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
