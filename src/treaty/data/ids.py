"""A column of ids, in one form at all parties: typed, normalised, distinct, nulls dropped.

This module alone defines which ids are equal:

* An id has a kind, which is hashed with it, so that the text "12" and the number 12 never match. A column has one kind.
* Numbers of any width are "integer", decimals and floats too where every one is whole; others are refused, for 0.1 is
  not the same number everywhere.
* Dates, and timestamps that are all midnight without time zone, are "date". Times of day are refused.
* Text is normalised as declared: "nfc" (composed and decomposed accents are one), "strip" (white space around),
  "lower" (case; not the default, as many generated ids need it; the two small Greek sigmas are one).
* Characters that this Python's Unicode does not know are refused where "nfc" or "lower" would have to. Of those it
  knows every later Unicode makes the same (https://www.unicode.org/policies/stability_policy.html for "nfc", a test
  for "lower"), so that organisations on different versions of Python and arrow find the same ids.
* Null, NaN and empty text are no ids: their rows are dropped and counted.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import narwhals as nw
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treaty.data.large import IN_MEMORY, group_rows, group_rows_in_files, part_of
from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import Bytes, Integers, forget, pieces

OnDuplicate = Literal["error", "first", "expand"]
Normalisation = Literal["nfc", "strip", "lower"]
Psi = Literal["auto", "ecdh", "kkrt"]
"""How the ids that all parties hold are found (`treaty.systems.alignment`)."""

NORMALISE: tuple[Normalisation, ...] = ("nfc", "strip")
"""How text is normalised by default."""

RULES = 1
"""The version of this module's rules, which parties compare."""

_WHITE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
_WHITE += "\u2028\u2029\u202f\u205f\u3000"
_FINAL_SIGMA, _SIGMA = "\u03c2", "\u03c3"
_TAGS = {"integer": b"i", "text": b"t", "date": b"d", "binary": b"b"}
# larger floats skip integers: two different ids may have become one
_WHOLE = 2.0**53


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """The distinct ids of a column, and the rows that hold them.

    All parties must use the same `normalise` and `on_duplicate`. Of a long column the arrays lie in temporary files
    without names, mapped into memory.
    """

    # "integer", "text", "date" or "binary"
    kind: str
    # id i is data[offsets[i]:offsets[i + 1]]: its kind's letter and its canonical form
    data: Bytes
    offsets: Integers
    # the rows that hold ids, grouped by id, ascending within
    rows: Integers
    # id i is in rows[starts[i]:starts[i + 1]]
    starts: Integers
    # rows of the column, those without an id, and those with one that an earlier row has
    n_rows: int
    n_null: int
    n_repeated: int
    normalise: tuple[Normalisation, ...]
    on_duplicate: OnDuplicate

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def strings(self, start: int, stop: int) -> tuple[Bytes, Integers]:
        """Return copies of `data` and `offsets` of consecutive ids."""
        # copied, so that a file's pages do not stay in memory
        offsets = self.offsets[start : stop + 1]
        data = self.data[offsets[0] : offsets[-1]].copy()
        offsets = offsets - offsets[0]
        forget(self.data)
        forget(self.offsets)
        return data, offsets

    def first_rows(self, start: int, stop: int) -> Integers:
        """Return the first row of each of some consecutive ids, int64 (stop - start,)."""
        rows = self.rows[self.starts[start:stop]]
        forget(self.rows)
        forget(self.starts)
        return rows


def read_ids(
    column: Any,
    *,
    party: str = "the table",
    normalise: Sequence[Normalisation] = NORMALISE,
    on_duplicate: OnDuplicate = "error",
    in_memory: int = IN_MEMORY,
) -> Ids:
    """Read a column of ids, of any library that `to_table` takes.

    `normalise` names the steps for text, in any order. `on_duplicate` refuses an id in several rows ("error"), keeps
    the first row ("first"), or keeps all, to be joined with every row of the other parties that has it ("expand").
    Columns of more than `in_memory` rows are read in pieces, into temporary files (`treaty.data.large`).

    Raises ConfigError for an unknown option, and DataError for anything but one column, a type that is no id, numbers
    with fractions, ids of several types, repeated ids under "error", or no id at all. Messages never show an id.
    """
    unknown = sorted(set(normalise) - set(get_args(Normalisation)))
    if isinstance(normalise, str) or unknown:
        raise ConfigError(f"expected normalise of {', '.join(get_args(Normalisation))}, got {normalise!r}")
    if on_duplicate not in get_args(OnDuplicate):
        raise ConfigError(f"expected on_duplicate of {', '.join(get_args(OnDuplicate))}, got {on_duplicate!r}")
    array, steps = _to_arrow(column, party), frozenset(normalise)
    n_rows = len(array)
    kind = _canonical(_whole_array(array[:0]), steps, party)[0]

    def present_of(part: slice) -> tuple[Integers, Any]:
        """Return the numbers and ids of those rows of a part that have one."""
        texts = _canonical(_whole_array(array[part]), steps, party)[1]
        present = pc.greater(pc.binary_length(texts), 0).fill_null(False)
        return np.flatnonzero(present.to_numpy(zero_copy_only=False)) + part.start, texts.filter(present)

    def refuse(repeated: int) -> None:
        if on_duplicate == "error":
            raise DataError(
                f"{party}: expected every id once, got {repeated} rows with an id of an earlier row; "
                'on_duplicate="first" keeps the first row of each, "expand" joins all of them',
                public="its table holds ids more than once",
            )

    tag, every = _TAGS[kind], on_duplicate == "expand"
    if n_rows <= in_memory:
        found = group_rows(*present_of(slice(0, n_rows)), tag, refuse, every=every)
    else:
        chunks = (present_of(part) for part in pieces(n_rows, part_of(in_memory)))
        found = group_rows_in_files(chunks, tag, n_rows, in_memory, refuse, every=every)
    if found is None:
        raise DataError(
            f"{party}: expected ids, got a column of {n_rows} rows without any", public="its table holds no ids"
        )
    pa.default_memory_pool().release_unused()
    return Ids(
        kind=kind, data=found.data, offsets=found.offsets, rows=found.rows, starts=found.starts, n_rows=n_rows,
        n_null=n_rows - found.n_present, n_repeated=found.n_present - (len(found.offsets) - 1),
        normalise=tuple(step for step in get_args(Normalisation) if step in normalise), on_duplicate=on_duplicate,
    )  # fmt: skip


def by_id(
    column: Any, *, party: str = "the table", normalise: Sequence[Normalisation] = NORMALISE
) -> tuple[Integers, bytes]:
    """Return the stable order of rows by their ids, int64 (n_rows,), and SHA-256 of the sorted ids with their kind.

    Every row has an id. All parties with the same ids get the same digest, whatever the order of their rows.
    """
    kind, texts = _canonical(_whole_array(_to_arrow(column, party)), frozenset(normalise), party)
    order = pc.sort_indices(texts).to_numpy().astype(np.int64)
    _, places, data = texts.take(pa.array(order)).cast(pa.large_binary()).buffers()
    offsets = np.frombuffer(places, np.int64)[: len(order) + 1]
    hashed = hashlib.sha256(_TAGS[kind] + offsets.astype("<i8").tobytes())
    hashed.update(np.frombuffer(data, np.uint8)[: offsets[-1]].data)
    return order, hashed.digest()


def canonical_ids(
    column: Any, *, party: str = "the table", normalise: Sequence[Normalisation] = NORMALISE
) -> list[str]:
    """Return each row's id in canonical form, with its kind in front; every row has an id."""
    kind, texts = _canonical(_whole_array(_to_arrow(column, party)), frozenset(normalise), party)
    return [f"{kind} {value.hex() if isinstance(value, bytes) else value}" for value in texts.to_pylist()]


def kind_of_ids(column: Any, *, party: str = "the table") -> str:
    """Return the kind of a column's ids: ids of two kinds are never equal."""
    return _canonical(_whole_array(_to_arrow(column, party)[:0]), frozenset(), party)[0]


def _to_arrow(column: Any, party: str) -> Any:
    """Return the column as an arrow array, which may be chunked."""
    try:
        native = nw.from_native(column, pass_through=True, allow_series=True)
        if isinstance(native, nw.DataFrame | nw.LazyFrame):
            raise DataError(f"{party}: expected one column of ids, got a dataframe")
        if isinstance(native, nw.Series):
            plain = native.to_native()
            # `to_arrow` would copy all chunks
            array = plain if isinstance(plain, pa.ChunkedArray) else native.to_arrow()
        elif isinstance(native, pa.Array):
            array = native
        else:
            if np.ndim(native) != 1:
                raise DataError(f"{party}: expected one column of ids, got {np.ndim(native)} dimensions")
            array = pa.array(native, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{party}: expected ids of one type (whole numbers below 2^63, text, dates or bytes), got a column that "
            "mixes types or holds others; convert it to text at every party"
        ) from None
    return array


def _whole_array(array: Any) -> Any:
    """Return a column, or a piece of one, as one plain array."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _canonical(array: Any, normalise: frozenset[str], party: str) -> tuple[str, Any]:
    """Return the kind, and every id's canonical form as a string (bytes for "binary")."""
    dtype = array.type
    if pa.types.is_integer(dtype):
        return "integer", array.cast(pa.large_string())
    if pa.types.is_floating(dtype):
        return "integer", _whole(array.cast(pa.float64()), dtype, party).cast(pa.large_string())
    if pa.types.is_decimal(dtype):
        try:
            return "integer", array.cast(pa.decimal128(38, 0)).cast(pa.large_string())
        except pa.ArrowInvalid:
            raise DataError(f"{party}: expected whole numbers as ids, got {dtype} with fractions") from None
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
        return "text", _normalised(array.cast(pa.large_string()), normalise, party)
    if pa.types.is_date(dtype) or pa.types.is_timestamp(dtype):
        return "date", _date(array, party).cast(pa.large_string())
    if pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or pa.types.is_fixed_size_binary(dtype):
        return "binary", array.cast(pa.large_binary())
    if pa.types.is_null(dtype):
        return "text", array.cast(pa.large_string())
    raise DataError(
        f"{party}: expected ids that are whole numbers, text, dates or bytes, got {dtype}; convert to text everywhere"
    )


def _whole(values: Any, dtype: Any, party: str) -> Any:
    """Turn floats into integers and NaN into null; raise DataError where that is not exact."""
    values = pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float64()), values)
    numbers = values.fill_null(0.0).to_numpy(zero_copy_only=False)
    largest = _WHOLE if pa.types.is_float64(dtype) else 2.0**24 if pa.types.is_float32(dtype) else 2.0**11
    odd = int(np.count_nonzero((np.floor(numbers) != numbers) | (np.abs(numbers) > largest)))
    if odd:
        raise DataError(
            f"{party}: expected whole numbers up to {largest:.0f} as ids, got {odd} others in a column of {dtype}; "
            "read the column as text or integers"
        )
    return values.cast(pa.int64())


def _date(values: Any, party: str) -> Any:
    days = values.cast(pa.date32(), safe=False)
    if pa.types.is_timestamp(values.type):
        exact = values.type.tz is None and pc.all(pc.equal(days.cast(values.type), values)).as_py() is not False
        if not exact:
            raise DataError(
                f"{party}: expected dates as ids, got {values.type} with times of day or a time zone; "
                "convert to text at every party"
            )
    return days


def _normalised(texts: Any, normalise: frozenset[str], party: str) -> Any:
    # text other than ASCII by Python's tables, as arrow's differ between its versions
    if "lower" in normalise:
        texts = pc.ascii_lower(texts)
    others = pc.invert(pc.string_is_ascii(texts)).fill_null(False)
    if normalise & {"nfc", "lower"} and pc.any(others).as_py():
        try:
            values = texts.filter(others).to_pylist()
        except UnicodeDecodeError:
            raise DataError(f"{party}: expected ids as text in UTF-8, got other bytes; encode the text again") from None
        _check_known(values, party)
        # which of the two sigmas is a capital's depends on the letters around it
        if "lower" in normalise:
            values = [value.lower().replace(_FINAL_SIGMA, _SIGMA) for value in values]
        # last: lower-case letters may compose where upper-case ones do not
        if "nfc" in normalise:
            values = [unicodedata.normalize("NFC", value) for value in values]
        texts = pc.replace_with_mask(texts, others, pa.array(values, texts.type))
    return pc.utf8_trim(texts, characters=_WHITE) if "strip" in normalise else texts


def _check_known(values: list[str], party: str) -> None:
    """Refuse characters that this Python's Unicode does not know: a later one may give them another form."""
    unknown = {letter for letter in set().union(*values) if unicodedata.category(letter) == "Cn"}
    if unknown:
        count = sum(not unknown.isdisjoint(value) for value in values)
        raise DataError(
            f"{party}: expected ids with characters of Unicode {unicodedata.unidata_version}, got {count} with others; "
            "use a later Python, or leave these rows out",
            public="its ids have characters that its Python does not know",
        )
