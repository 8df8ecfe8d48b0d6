"""A column of ids, in one form at all parties: typed, normalised, distinct, nulls dropped.

What equal ids are is settled here and nowhere else:

* An id has a kind, which is hashed with it, so that the text "12" and the number 12 never meet. A column has one kind.
* Numbers of any width are "integer", decimals and floats too where every one is whole; others are refused, for 0.1 is
  not the same number everywhere.
* Dates, and timestamps that are all midnight without time zone, are "date". Times of day are refused.
* Text is normalised as declared: "nfc" (composed and decomposed accents are one), "strip" (white space around),
  "lower" (case; not the default, as many generated ids need it).
* Null, NaN and empty text are no ids: their rows are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import narwhals as nw
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treaty.errors import ConfigError, DataError

OnDuplicate = Literal["error", "first", "expand"]
Normalisation = Literal["nfc", "strip", "lower"]
NORMALISE: tuple[Normalisation, ...] = ("nfc", "strip")
"""How text is normalised by default."""

_TAGS = {"integer": b"i", "text": b"t", "date": b"d", "binary": b"b"}
_WHOLE = 2.0**53  # floats beyond skip numbers, so that two different ids may have become one


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """The distinct ids of a column, and which rows hold them.

    Parameters
    ----------
    kind : str
        "integer", "text", "date" or "binary".
    data, offsets : uint8 (n_bytes,), int64 (n + 1,)
        Id i is ``data[offsets[i]:offsets[i + 1]]``: its kind's letter and its canonical form.
    rows : int64 (n_used,)
        The rows that hold ids, grouped by id, ascending within.
    starts : int64 (n + 1,)
        Id i is in ``rows[starts[i]:starts[i + 1]]``.
    n_rows, n_null, n_repeated : int
        Rows of the column; without an id; with one that an earlier row has.
    normalise, on_duplicate
        As read; all parties must have the same.
    """

    kind: str
    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    n_rows: int
    n_null: int
    n_repeated: int
    normalise: tuple[Normalisation, ...]
    on_duplicate: OnDuplicate

    def __len__(self) -> int:
        return len(self.offsets) - 1


def read_ids(
    column: Any,
    *,
    party: str = "the table",
    normalise: Sequence[Normalisation] = NORMALISE,
    on_duplicate: OnDuplicate = "error",
) -> Ids:
    """Read a column of ids.

    Parameters
    ----------
    column : series, array or list
        Shape (n_rows,), of any library that `to_table` takes.
    party : str, default "the table"
        Whose column, for messages.
    normalise : sequence of {"nfc", "strip", "lower"}, default ("nfc", "strip")
        What is done to text; order does not matter.
    on_duplicate : {"error", "first", "expand"}, default "error"
        Of an id in several rows: refuse, keep the first row, or keep all of them, to be joined with every row of the
        other parties that has it (as a plain join does).

    Returns
    -------
    Ids

    Raises
    ------
    ConfigError
        An unknown option.
    DataError
        Not one column; a type that is no id; numbers with fractions; ids of several types; repeated ids under
        "error"; no id at all. Messages count, and never show an id.
    """
    unknown = sorted(set(normalise) - set(get_args(Normalisation)))
    if isinstance(normalise, str) or unknown:
        raise ConfigError(f"expected normalise of {', '.join(get_args(Normalisation))}, got {normalise!r}")
    if on_duplicate not in get_args(OnDuplicate):
        raise ConfigError(f"expected on_duplicate of {', '.join(get_args(OnDuplicate))}, got {on_duplicate!r}")
    array = _to_arrow(column, party)
    kind, texts = _canonical(array, frozenset(normalise), party)
    texts = pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, texts.type), texts)
    present = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
    if len(present) == 0:
        raise DataError(
            f"{party}: expected ids, got a column of {len(array)} rows without any", public="its table holds no ids"
        )
    n_rows = len(array)
    del array  # at ten million ids each copy counts
    encoded = pc.drop_null(texts).dictionary_encode()
    del texts
    rows, starts = _group(present, encoded.indices.to_numpy(), len(encoded.dictionary), on_duplicate, party)
    distinct = encoded.dictionary
    del encoded
    data, offsets = _buffers(distinct, _TAGS[kind])
    del distinct
    pa.default_memory_pool().release_unused()
    return Ids(
        kind=kind,
        data=data,
        offsets=offsets,
        rows=rows,
        starts=starts,
        n_rows=n_rows,
        n_null=n_rows - len(present),
        n_repeated=len(present) - (len(offsets) - 1),
        normalise=tuple(step for step in get_args(Normalisation) if step in normalise),
        on_duplicate=on_duplicate,
    )


def _to_arrow(column: Any, party: str) -> Any:
    """Return the column as one arrow array."""
    try:
        native = nw.from_native(column, pass_through=True, allow_series=True)
        if isinstance(native, nw.DataFrame | nw.LazyFrame):
            raise DataError(f"{party}: expected one column of ids, got a dataframe")
        if isinstance(native, nw.Series):
            array = native.to_arrow()
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
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array


def _canonical(array: Any, normalise: frozenset[str], party: str) -> tuple[str, Any]:
    """Return the kind, and every id's canonical form as a string (bytes for "binary") without the kind's letter."""
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
        return "text", _normalised(array.cast(pa.large_string()), normalise)
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
    """Turn floats into integers where that is exact, NaN into null."""
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


def _normalised(texts: Any, normalise: frozenset[str]) -> Any:
    if "lower" in normalise:
        texts = pc.utf8_lower(texts)
    if "nfc" in normalise:  # last, as small letters may compose where large ones do not
        texts = pc.utf8_normalize(texts, form="NFC")
    return pc.utf8_trim_whitespace(texts) if "strip" in normalise else texts


def _group(
    present: NDArray[np.int64], number: NDArray[np.int32], n_ids: int, on_duplicate: OnDuplicate, party: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows grouped by id, and where each group starts."""
    repeated = len(present) - n_ids
    if repeated and on_duplicate == "error":
        raise DataError(
            f'{party}: expected every id once, got {repeated} rows with an id seen before; on_duplicate="first" keeps '
            'the first row of each, "expand" joins all of them',
            public="its table holds ids more than once",
        )
    if repeated and on_duplicate == "expand":
        counts = np.bincount(number, minlength=n_ids)
        return present[np.argsort(number, kind="stable")], np.concatenate([[0], np.cumsum(counts)])
    if repeated:  # numbers are given in order of first appearance
        _, first = np.unique(number, return_index=True)
        present = present[first]
    return present, np.arange(n_ids + 1, dtype=np.int64)


def _buffers(distinct: Any, tag: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Put the kind's letter before each string and return bytes and offsets."""
    texts = distinct.cast(pa.large_binary())
    letter = pa.scalar(tag, pa.large_binary())
    tagged = pc.binary_join_element_wise(letter, texts, pa.scalar(b"", pa.large_binary()))
    _, offsets, data = tagged.buffers()
    return (
        np.frombuffer(data, np.uint8).copy(),
        np.frombuffer(offsets, np.int64)[tagged.offset : tagged.offset + len(tagged) + 1].copy(),
    )
