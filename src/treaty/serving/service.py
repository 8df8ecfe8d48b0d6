"""What is answered to a request, whatever carries it: rows in, predictions out, or a refusal that says why."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import LARGEST, Category
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, LocalProtocolError, TreatyError
from treaty.serving.models import Margins, ServedModel

# ---------- A request's rows, from JSON to numbers: every cell checked, and what is wrong said with its row and column
#
# The decoder is made from the model's schema, so that types are checked while the text is read. Numbers become float32
# as those of a file do (`treaty.data.columns`): a whole number goes through float64. JSON has no NaN and no infinity.

# ---------------------------------------------------------------- why a request is not answered


class Refused(Exception):
    """A request cannot be answered: an HTTP status, what is wrong in plain words, and where in the request.

    Attributes
    ----------
    status : int
    row : int or None
        Counted from 0.
    column : str or None
    retry_after : int or None
        Seconds after which asking again may help.
    """

    def __init__(
        self,
        status: int,
        said: str,
        *,
        row: int | None = None,
        column: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(said)
        self.status, self.row, self.column, self.retry_after = status, row, column, retry_after

    def answer(self) -> dict[str, str | int]:
        """Return what the caller is told: "error" in a sentence that names row and column, and these once more."""
        at_row = [] if self.row is None else [f"row {self.row}"]
        at_column = [] if self.column is None else [f"column {self.column!r}"]
        where = ", ".join([*at_row, *at_column])
        told: dict[str, str | int] = {"error": f"{where}: {self}" if where else str(self)}
        if self.row is not None:
            told["row"] = self.row
        if self.column is not None:
            told["column"] = self.column
        return told


# ---------------------------------------------------------------- requests


_IN_ROW = re.compile(r"^(?P<what>.*) - at `\$\.(?P<list>rows|ids)\[(?P<row>\d+)\](?:\.(?P<column>.*))?`$", re.DOTALL)
_AT_TOP = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<field>.*)`)?$", re.DOTALL)
_TYPES = re.compile(r"^Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`$")
_FIELD = re.compile(r"^Object (?P<is>missing required|contains unknown) field `(?P<field>.*)`$", re.DOTALL)
_WORDS = {
    "str": "text", "float": "a number", "int": "a number", "bool": "true or false", "null": "null",
    "array": "a list", "object": "an object",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PredictionRequest:
    """Rows to predict (n_rows, n_features) as a `Table` has them; and their ids, if they are asked for."""

    matrix: NDArray[Any]
    ids: list[str] | None


class RequestReader:
    """Reads requests: of the form `shape`, with ``"ids"`` where partners need them."""

    def __init__(self, schema: Schema, *, max_rows: int, with_ids: bool = False) -> None:
        """Raise ConfigError for a name of a column that JSON writes in another way than it is."""
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
                "character; rename it and train anew"
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
        """Return a request's rows; raise `Refused`, 400 for what is no JSON and 422 for what does not fit the model."""
        try:
            body = self._decoder.decode(content)
        except msgspec.ValidationError as error:
            raise _refused(str(error), self.shape) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(400, f"expected JSON in UTF-8, got something else: {error}") from None
        except RecursionError:
            raise Refused(400, "expected rows of numbers and text, got lists or objects nested too deeply") from None
        n_rows = len(body.rows)
        if not 0 < n_rows <= self._max_rows:
            raise Refused(
                422, f"expected 1 to {self._max_rows} rows, got {n_rows}; send more of them in several requests"
            )
        if self._with_ids and len(body.ids) != n_rows:
            raise Refused(422, f"expected an id of each of the {n_rows} rows, got {len(body.ids)}")
        return PredictionRequest(self._matrix(body.rows), body.ids if self._with_ids else None)

    def _matrix(self, rows: list[Any]) -> NDArray[Any]:
        cells: list[Any] = list(map(msgspec.structs.astuple, rows))
        if self._codes:
            cells = [self._coded(row) for row in cells]
        for place in [place for place, origin in self._origins.items() if origin]:  # whole numbers are exact so
            cells = [(*row[:place], _less(row[place], self._origins[place]), *row[place + 1 :]) for row in cells]
        wide = np.array(cells, np.float64).reshape(len(rows), len(self._names))  # None becomes NaN
        with np.errstate(over="ignore"):
            matrix = wide.astype(np.float32)
        if np.isinf(matrix).any():
            row, place = np.argwhere(np.isinf(matrix))[0].tolist()
            raise Refused(
                422, f"expected numbers up to {LARGEST:.2g}, got a larger one", row=row, column=self._names[place]
            )
        if not self._origins:
            return matrix
        return np.where([place in self._origins for place in range(len(self._names))], wide, matrix)

    def _coded(self, cells: tuple[Any, ...]) -> list[Any]:
        """Return a row's cells with codes for categories; values that training did not have get the next code."""
        coded = list(cells)
        for place, codes in self._codes.items():
            if coded[place] is not None:
                coded[place] = codes.get(coded[place], len(codes))
        return coded


def _less(number: float | None, origin: int) -> float | None:
    return None if number is None else number - origin


def _cell(values: tuple[Category, ...] | None) -> UnionType | Any:
    """Return the type of a column's cells: numbers and truth values, or what the categories are."""
    if values is None:
        return float | bool | None
    kinds: set[type] = {type(value) for value in values} or {str}
    kinds = kinds | {int, float} if kinds & {int, float} else kinds
    return Union[(*sorted(kinds, key=lambda kind: kind.__name__), None)]


def _refused(said: str, shape: str) -> Refused:
    """Say in plain words what a decoder has found; `shape` is a request's."""
    found = _IN_ROW.match(said)
    if found is None:
        return _refused_at_top(said, shape)
    row, column = int(found["row"]), found["column"]
    if found["list"] == "ids":
        return Refused(422, f"ids: {_plain(found['what'])}", row=row)
    field = _FIELD.match(found["what"])
    if field is not None and field["is"] == "missing required":
        return Refused(422, "it is missing; give null where a value is not known", row=row, column=field["field"])
    if field is not None:
        return Refused(422, "the model has no such column; /model lists those it has", row=row, column=field["field"])
    return Refused(422, _plain(found["what"]), row=row, column=column)


def _refused_at_top(said: str, shape: str) -> Refused:
    found = _AT_TOP.match(said)
    assert found is not None
    field = _FIELD.match(found["what"])
    if field is not None and field["is"] == "missing required":
        return Refused(422, f'expected a field "{field["field"]}", got none: a request is {shape}')
    if field is not None:
        return Refused(
            422, f"the request has a field {field['field']!r}, which is not known here: a request is {shape}"
        )
    where = f'"{found["field"]}": ' if found["field"] else ""
    return Refused(422, f"{where}{_plain(found['what'])}: a request is {shape}")


def _plain(what: str) -> str:
    if what == "Number out of range":
        return f"expected numbers up to {LARGEST:.2g}, got a larger one"
    types = _TYPES.match(what)
    if types is None:
        return what
    wanted = list(dict.fromkeys(_WORDS.get(kind, kind) for kind in reversed(types["wanted"].split(" | "))))
    wanted.sort(key=lambda words: words == "null")
    listed = wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} or {wanted[-1]}"
    return f"expected {listed}, got {_WORDS.get(types['got'], types['got'])}"


# ---------------------------------------------------------------- service


logger = logging.getLogger(__name__)

Partners = Callable[[Sequence[str], Table], Margins]
"""Predicts with the other parties: ids of rows and own columns in, margins (n_rows, n_outputs) of the whole model out.

It may be called from several threads at once. It raises a `TreatyError` where it cannot.
"""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much is taken: rows and bytes of one request, requests under way, seconds for a request's body to arrive."""

    rows: int = 10_000
    body_bytes: int = 8 << 20
    under_way: int = 64
    body_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class PredictionResponse:
    """The body of an answer in JSON, and what is counted of it."""

    content: bytes
    n_rows: int
    fallback: bool


class PredictionService:
    """Answers requests with a model's predictions.

    Attributes
    ----------
    waits : bool
        Whether an answer waits for other parties.
    shape : str
        The form of a request, in JSON.
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
        """`fallback`: predict without partners that are needed and absent; ConfigError where that is not possible."""
        self.model, self.limits = model, limits or RequestLimits()
        self._partners = partners if model.needs else None
        self.waits = self._partners is not None
        self._fallback = model.fallback() if fallback and model.needs else None
        self._reader = RequestReader(model.schema, max_rows=self.limits.rows, with_ids=self.waits)
        self.shape = self._reader.shape
        self._encoder, self._threads = msgspec.json.Encoder(), threads

    @property
    def falls_back(self) -> bool:
        """Whether rows are predicted without partners where these are needed and absent."""
        return self._fallback is not None

    def described(self) -> dict[str, Any]:
        """Return what `GET /model` says."""
        return self.model.described() | {
            "ids": self.waits, "fallback": self.falls_back, "max_rows": self.limits.rows,
            "max_bytes": self.limits.body_bytes,
        }  # fmt: skip

    def warm_up(self) -> None:
        """Predict a row of missing values, so that decoders and kernels are made before anybody waits for them."""
        nothing = {"rows": [dict.fromkeys(self.model.schema.names)]} | ({"ids": [""]} if self.waits else {})
        request = self._reader.read(self._encoder.encode(nothing))
        compute = self._fallback if self.model.needs else self.model.margins
        if compute is not None:
            self.model.predictions(compute(request.matrix, 1))

    def answer(self, content: bytes) -> PredictionResponse:
        """Answer the body of a request; raise `Refused` where that is not possible."""
        if self.model.needs and self._partners is None and self._fallback is None:
            raise Refused(503, self._without_partners())
        request = self._reader.read(content)
        margins, fallback = self._margins(request)
        told = {"model": self.model.part.model_id, "fallback": fallback, "predictions": self.model.predictions(margins)}
        caution = self.model.part.caution(margins)
        if caution is not None:
            told["caution"] = caution
        return PredictionResponse(self._encoder.encode(told), len(request.matrix), fallback)

    def _margins(self, request: PredictionRequest) -> tuple[Margins, bool]:
        """Return margins, and whether they were made without partners who are needed."""
        matrix = request.matrix
        if not self.model.needs:
            return self.model.margins(matrix, self._threads), False
        if self._partners is not None and request.ids is not None:
            try:
                return self._with_partners(self._partners, request.ids, matrix), False
            except TreatyError as error:
                logger.warning("a prediction with %s failed: %s", self._named(), error)
                if self._fallback is None:
                    said = f"no prediction with {self._named()} was made; this server's log says why"
                    raise Refused(503, said, retry_after=10) from None
        assert self._fallback is not None
        return self._fallback(matrix, self._threads), True

    def _with_partners(self, partners: Partners, ids: Sequence[str], matrix: NDArray[Any]) -> Margins:
        margins = partners(ids, self.model.table(matrix))
        if len(margins) != len(matrix):
            raise LocalProtocolError(f"expected margins of {len(matrix)} rows, got {len(margins)} - from the partners")
        return margins

    def _named(self) -> str:
        return ", ".join(self.model.needs)

    def _without_partners(self) -> str:
        return (
            f"this model predicts with {self._named()}, and they are not connected here: a part of it alone cannot "
            "predict. Predict in a batch with `treaty predict`, or, for worse predictions from own columns alone, "
            "start the server with --fallback own"
        )
