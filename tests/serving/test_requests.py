"""What a request's body may be, and what is said of one that is none."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.models import GOOD, whole
from treaty.data.table import Schema
from treaty.errors import ConfigError
from treaty.serving.service import Refused, RequestReader

SCHEMA = whole().schema


def refusal(content: Any, reader: RequestReader | None = None) -> Refused:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(Refused) as caught:
        (reader or RequestReader(SCHEMA, max_rows=3)).read(body)
    return caught.value


def read(*rows: dict[str, Any]) -> np.ndarray:
    return RequestReader(SCHEMA, max_rows=10).read(json.dumps({"rows": rows}).encode()).matrix


def test_rows_become_numbers_and_codes_of_categories():
    matrix = read(
        GOOD, {"region": "south", "member": False, "income": None, "age": 1e3}, GOOD | {"region": "west"},
        GOOD | {"region": None, "member": None},
    )  # fmt: skip
    np.testing.assert_array_equal(
        matrix,
        np.array([[41, 1.5, 1, 1], [1000, np.nan, 0, 0], [41, 1.5, 1, 2], [41, 1.5, np.nan, np.nan]], np.float32),
    )
    assert matrix.dtype == np.float32
    assert matrix.flags.c_contiguous


@pytest.mark.parametrize(
    ("changed", "row", "column", "said"),
    [
        ({"age": "41"}, 1, "age", "expected a number, true or false or null, got text"),
        ({"age": [41]}, 1, "age", "got a list"),
        ({"age": {"is": 41}}, 1, "age", "got an object"),
        ({"age": 1e39}, 1, "age", "expected numbers up to 3.4e+38, got a larger one"),
        ({"age": -(10**400)}, 1, "age", "expected numbers up to 3.4e+38, got a larger one"),
        ({"region": 3}, 1, "region", "expected text or null, got a number"),
        ({"region": True}, 1, "region", "expected text or null, got true or false"),
        ({"zip": 8001}, 1, "zip", "the model has no such column; /model lists its columns"),
        ({"a`b - at `$.rows[7].c`": 1}, 1, "a`b - at `$.rows[7].c`", "no such column"),
    ],
)
def test_a_cell_that_does_not_fit_is_named(changed, row, column, said):
    refused = refusal({"rows": [GOOD, GOOD | changed]})
    assert (refused.status, refused.row, refused.column) == (422, row, column)
    assert said in str(refused)
    assert refused.answer()["error"] == f"row {row}, column {column!r}: {refused}"


def test_a_missing_column_is_named():
    refused = refusal({"rows": [{name: value for name, value in GOOD.items() if name != "income"}]})
    assert refused.answer() == {
        "error": "row 0, column 'income': it is missing; give null for an unknown value",
        "row": 0, "column": "income",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "cannot read the request as JSON in UTF-8"),
        (b"age=41", 400, "cannot read the request as JSON in UTF-8"),
        (b'{"rows": [{"age": NaN}]}', 400, "cannot read the request as JSON in UTF-8"),
        (b'{"rows": [{"age": Infinity}]}', 400, "cannot read the request as JSON in UTF-8"),
        (b'\xff\xfe{\x00"\x00', 400, "cannot read the request as JSON in UTF-8"),
        (b'{"rows": [{"region": "\xff"}]}', 400, "cannot read the request as JSON in UTF-8"),
        (json.dumps({"rows": [GOOD]}).encode() + b"x", 400, "cannot read the request as JSON in UTF-8"),
        (b"[" * 200_000, 422, "expected an object, got a list"),
        (b'{"rows":' + b"[" * 200_000, 422, "expected an object, got a list"),
        (b'{"rows":[{"age":' + b'{"a":' * 200_000, 422, "got an object"),
        (b"[]", 422, "expected an object, got a list"),
        (b"{}", 422, 'expected a field "rows"'),
        (b'{"rows": null}', 422, "expected a list, got null"),
        (b'{"rows": [null]}', 422, "expected an object, got null"),
        (b'{"rows": [], "more": 1}', 422, "an unknown field 'more'"),
        (b'{"rows": []}', 422, "expected 1 to 3 rows, got 0"),
        (json.dumps({"rows": [GOOD] * 4}).encode(), 422, "expected 1 to 3 rows, got 4"),
        (json.dumps({"rows": [GOOD], "ids": ["1"]}).encode(), 422, "an unknown field 'ids'"),
    ],
)
def test_a_body_that_is_no_request_is_refused_in_plain_words(body, status, said):
    refused = refusal(body)
    assert refused.status == status
    assert said in str(refused)
    assert "`" not in str(refused)


def test_a_body_as_large_as_it_may_be_with_brackets_alone_is_refused_at_once():
    refused = refusal(b'{"rows":[{"age":1,"income":' + b"[" * (8 << 20))
    assert refused.status == 422


def test_ids_come_with_rows_where_they_are_asked_for():
    reader = RequestReader(SCHEMA, max_rows=3, with_ids=True)
    assert reader.read(json.dumps({"rows": [GOOD, GOOD], "ids": ["7", "a"]}).encode()).ids == ["7", "a"]
    assert 'a field "ids"' in str(refusal({"rows": [GOOD]}, reader))
    assert "an id for each of the 2 rows, got 1" in str(refusal({"rows": [GOOD, GOOD], "ids": ["7"]}, reader))
    refused = refusal({"rows": [GOOD, GOOD], "ids": ["7", 8]}, reader)
    assert (refused.row, str(refused)) == (1, "ids: expected text, got a number")


def test_categories_may_be_numbers_or_truth_values():
    schema = Schema(("code", "flag", "either"), ((10, 20), (False, True), ("x", 5)))
    reader = RequestReader(schema, max_rows=3)
    rows = [{"code": 20, "flag": True, "either": 5}, {"code": 10.0, "flag": None, "either": "y"}]
    matrix = reader.read(json.dumps({"rows": rows}).encode()).matrix
    np.testing.assert_array_equal(matrix, np.array([[1, 1, 1], [0, np.nan, 2]], np.float32))
    assert "expected a number or null, got text" in str(refusal({"rows": [rows[0] | {"code": "10"}]}, reader))
    assert "expected a number or null, got true or false" in str(refusal({"rows": [rows[0] | {"code": True}]}, reader))
    assert "expected true or false or null, got a number" in str(refusal({"rows": [rows[0] | {"flag": 1}]}, reader))


def test_any_name_of_a_column_is_taken_but_those_that_json_escapes():
    schema = Schema(("", "größe, in cm", "class", "c0", "a.b[0]"), (None,) * 5)
    row = dict(zip(schema.names, range(5), strict=True))
    reader = RequestReader(schema, max_rows=3)
    assert reader.read(json.dumps({"rows": [row]}).encode()).matrix.tolist() == [[0, 1, 2, 3, 4]]
    assert refusal({"rows": [row | {"a.b[0]": "x"}]}, reader).column == "a.b[0]"
    for name in ('height 5"', "a\\b", "a\nb"):
        with pytest.raises(ConfigError, match="rename the column and train again"):
            RequestReader(Schema((name,), (None,)), max_rows=3)


def test_a_model_without_columns_takes_rows_without():
    assert RequestReader(Schema((), ()), max_rows=3).read(b'{"rows": [{}, {}]}').matrix.shape == (2, 0)


CELLS = st.none() | st.booleans() | st.floats() | st.integers() | st.text()
KEYS = st.sampled_from(["rows", "age", "region"]) | st.text()


@given(st.recursive(CELLS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)))
def test_whatever_json_comes_is_read_or_refused(value):
    reader = RequestReader(SCHEMA, max_rows=3)
    for body in (value, {"rows": value}, {"rows": [value]}, {"rows": [GOOD | {"age": value}]}):
        with contextlib.suppress(Refused):
            assert reader.read(msgspec.json.encode(body)).matrix.shape[1] == 4


@given(st.binary())
def test_whatever_bytes_come_are_refused(content):
    with pytest.raises(Refused):
        RequestReader(SCHEMA, max_rows=3).read(content)
