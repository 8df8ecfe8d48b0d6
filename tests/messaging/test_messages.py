import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from treaty.errors import LocalProtocolError, PeerProtocolError
from treaty.messaging.messages import (
    DTYPES,
    Array,
    Envelope,
    Message,
    clean,
    decode_body,
    decode_envelope,
    digests_in,
    encode,
    view,
)


class LevelQuery(Message):
    rows: Array
    level: int
    label: str = ""


class OneArray(Message):
    rows: Array


def envelope(body, **changes):
    fields = {
        "job": "breast",
        "protocol": "secureboost",
        "round": 3,
        "step": type(body).__name__,
        "sender": "lab",
        "receiver": "clinic",
        "seq": 7,
    }
    return Envelope(**(fields | changes), body=body)


arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: npst.arrays(
        np.dtype(dtype).newbyteorder("<"), npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    )
)


@given(arrays, st.sampled_from(["C", "F", "strided", "big-endian"]))
def test_array_round_trip_keeps_dtype_shape_and_bytes(values, layout):
    sent = {
        "C": values,
        "F": np.asfortranarray(values),
        "strided": np.repeat(values, 2, axis=-1)[..., ::2] if values.ndim else values,
        "big-endian": values.astype(values.dtype.newbyteorder(">")),
    }[layout]
    sent = sent.reshape(values.shape)  # asfortranarray makes one axis of none
    received = decode_body(encode(OneArray(Array.of(sent))), OneArray, peer="lab").rows
    got = view(received, values.dtype.newbyteorder("="), values.shape, peer="lab", what="OneArray.rows")
    assert got.dtype == values.dtype.newbyteorder("=")
    assert got.shape == values.shape
    assert got.tobytes() == values.tobytes()
    assert not got.flags.writeable
    assert got.flags.aligned


def test_array_of_contiguous_values_shares_their_memory():
    values = np.arange(12, dtype=np.int64).reshape(3, 4)
    assert np.shares_memory(np.frombuffer(Array.of(values).data, np.uint8), values)


def test_view_of_bytes_shares_memory_with_the_frame():
    frame = memoryview(encode(envelope(OneArray(Array.of(np.arange(100, dtype=np.uint8))))))
    body = decode_envelope(frame, peer="lab").body
    rows = view(decode_body(body, OneArray, peer="lab").rows, np.uint8, (100,), peer="lab", what="OneArray.rows")
    assert np.shares_memory(rows, np.frombuffer(frame, np.uint8))


@pytest.mark.parametrize("dtype", ["object", "datetime64[s]", "complex128", "U3", "float16", "V8"])
def test_array_of_other_dtypes_is_refused(dtype):
    with pytest.raises(LocalProtocolError, match="expected an array of bool, float32"):
        Array.of(np.zeros(3, dtype))


@pytest.mark.parametrize(
    ("claimed", "text"),
    [
        (
            Array("int64", (20000,), memoryview(bytes(160000))),
            r"expected uint8 \(20000,\), got int64 \(20000,\) - at LevelQuery.rows from lab",
        ),
        (
            Array("uint8", (19999,), memoryview(bytes(19999))),
            r"expected uint8 \(20000,\), got uint8 \(19999,\) - at",
        ),
        (Array("uint8", (100, 200), memoryview(bytes(20000))), r"got uint8 \(100, 200\)"),
        (Array("uint8", (20000,), memoryview(bytes(19999))), "expected 20000 bytes .*, got 19999"),
        (Array("uint8", (20000,), memoryview(bytes(20001))), "expected 20000 bytes .*, got 20001"),
        (Array("object", (20000,), memoryview(bytes(20000))), r"got object \(20000,\)"),
        (Array("evil\n" * 99, (), memoryview(b"")), r"got evil\?evil\?evil\?ev\.\.\. \(\)"),
    ],
    ids=["dtype", "length", "axes", "short", "long", "object", "hostile name"],
)
def test_view_names_what_differs(claimed, text):
    with pytest.raises(PeerProtocolError, match=text) as caught:
        view(claimed, np.uint8, (20000,), peer="lab", what="LevelQuery.rows")
    assert caught.value.peer == "lab"


@pytest.mark.parametrize("shape", [(2**62, 2**62), (0, 2**80), (2**40, 0), (-1, -8), (-1,)])
def test_view_never_allocates_or_trusts_a_claimed_shape(shape):
    claimed = Array("float64", shape, memoryview(b"12345678"))
    with pytest.raises(PeerProtocolError):
        view(claimed, np.float64, (None,) * len(shape), peer="lab", what="x")


def test_view_of_a_zero_size_claim_beyond_numpy_is_refused():
    with pytest.raises(PeerProtocolError, match=r"expected axes below 2\*\*62"):
        view(Array("float64", (0, 2**63), memoryview(b"")), np.float64, (None, None), peer="lab", what="x")


def test_view_of_bool_refuses_bytes_that_are_no_truth_values():
    with pytest.raises(PeerProtocolError, match="expected bool bytes 0 and 1 - at x from lab"):
        view(Array("bool", (2,), memoryview(b"\x01\x07")), np.bool_, (2,), peer="lab", what="x")


def test_view_accepts_any_length_where_none_is_given():
    rows = Array.of(np.zeros((3, 2), np.float32))
    assert view(rows, np.float32, (None, 2), peer="lab", what="x").shape == (3, 2)
    with pytest.raises(PeerProtocolError, match=r"expected float32 \(any, 3\), got float32 \(3, 2\)"):
        view(rows, np.float32, (None, 3), peer="lab", what="x")


@pytest.mark.parametrize(("length", "refused"), [(0, False), (64, False), (31, True), (96, True)])
def test_digests_of_a_peer_are_whole_and_not_too_many(length, refused):
    content = bytes(range(length))
    if not refused:
        assert digests_in(content, 2, peer="lab", what="Held") == {content[k : k + 32] for k in range(0, length, 32)}
        return
    with pytest.raises(PeerProtocolError, match="expected at most 2 digests of 32 bytes - at Held from lab"):
        digests_in(content, 2, peer="lab", what="Held")


texts = st.text(max_size=20)


@given(texts, st.integers(0, 2**62), st.integers(-(2**63), 2**63 - 1), texts)
def test_envelope_and_message_round_trip(job, round, level, label):
    body = LevelQuery(Array.of(np.arange(4)), level, label)
    decoded = decode_envelope(encode(envelope(body, job=job, round=round)), peer="lab")
    assert (decoded.job, decoded.round, decoded.step, decoded.seq) == (job, round, "LevelQuery", 7)
    message = decode_body(decoded.body, LevelQuery, peer="lab")
    assert (message.level, message.label) == (level, label)


def packed(**changes):
    fields = {"rows": {"dtype": "uint8", "shape": [2], "data": b"ab"}, "level": 1, "label": ""}
    return msgspec.msgpack.encode({key: value for key, value in (fields | changes).items() if value != "drop"})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (packed(planted=1), "Object contains unknown field `planted` - at LevelQuery from lab"),
        (packed(level="x"), r"Expected `int`, got `str` - at `\$.level` of LevelQuery from lab"),
        (packed(level=None), "Expected `int`, got `None`"),
        (packed(level="drop"), "Object missing required field `level`"),
        (packed(rows={"dtype": "uint8", "shape": [-1], "data": b""}), r"Expected `int` >= 0 - at `\$.rows.shape"),
        (packed(rows={"dtype": "uint8", "shape": [], "data": "text"}), r"Expected `bytes`, got `str`"),
        (packed(rows={"dtype": "u", "shape": [], "data": b"", "x": 1}), r"unknown field `x` - at `\$.rows`"),
        (packed() + b"\x00", "trailing characters"),
        (packed()[:-1], "truncated"),
        (b"", "truncated"),
        (b"\x80\x04\x95", "LevelQuery from lab"),
        (packed(label=b"\xff"), "Expected `str`, got `bytes`"),
        (packed().replace(b"\xa5label\xa0", b"\xa5label\xa1\xff"), "Expected UTF-8 text"),
        (b"\x91" * 100_000, "LevelQuery from lab"),
    ],
    ids=[
        "planted field",
        "wrong type",
        "null",
        "missing field",
        "negative shape",
        "text for bytes",
        "planted array field",
        "trailing byte",
        "truncated",
        "empty",
        "pickle",
        "bytes for text",
        "not UTF-8",
        "deep nesting",
    ],
)
def test_malformed_body_is_refused_by_name(body, text):
    with pytest.raises(PeerProtocolError, match=text) as caught:
        decode_body(body, LevelQuery, peer="lab")
    assert caught.value.peer == "lab"
    assert "LevelQuery from lab" in str(caught.value)


def test_deeply_nested_envelope_is_refused():
    frame = b"\x81\xa4body" + b"\x91" * 200_000
    with pytest.raises(PeerProtocolError, match="deeper nesting"):
        decode_envelope(frame, peer="lab")


def test_field_names_of_a_peer_cannot_flood_or_break_a_log_line():
    body = msgspec.msgpack.encode({"a\nb" + "x" * 10_000: 1})
    with pytest.raises(PeerProtocolError) as caught:
        decode_body(body, LevelQuery, peer="lab")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_peer_protocol_errors(data):
    with pytest.raises(PeerProtocolError):
        decode_envelope(data, peer="lab")
    with pytest.raises(PeerProtocolError):
        decode_body(data, LevelQuery, peer="lab")


@given(st.data())
def test_mutated_frames_decode_or_raise_peer_protocol_errors(data):
    frame = bytearray(encode(envelope(LevelQuery(Array.of(np.arange(6).reshape(2, 3)), 1, "x"))))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1))
        frame[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for candidate in (bytes(frame), bytes(frame[:cut])):
        try:
            body = decode_envelope(candidate, peer="lab").body
            message = decode_body(body, LevelQuery, peer="lab")
            rows = view(message.rows, np.int64, (None, None), peer="lab", what="LevelQuery.rows")
        except PeerProtocolError:
            continue
        assert rows.nbytes == message.rows.data.nbytes


@pytest.mark.parametrize("value", [2**70, object(), "\ud800"], ids=["big integer", "object", "lone surrogate"])
def test_message_that_cannot_be_encoded_is_our_own_fault(value):
    with pytest.raises(LocalProtocolError, match="cannot encode LevelQuery"):
        encode(LevelQuery(Array.of(np.arange(2)), value))


def test_clean_keeps_short_printable_text_and_cuts_the_rest():
    assert clean("Größe 3 µm") == "Größe 3 µm"
    assert clean("a\x1b[31m\r\nb") == "a?[31m??b"
    assert clean("x" * 400) == "x" * 297 + "..."


AT_ONCE = """
from __future__ import annotations
import sys, threading
from treaty.messaging.messages import (Array, Message, decode_body, encode)

sys.setswitchinterval(1e-6)
for k in range(300):
    exec(f"class Inner{k}(Message):\\n    a: Array | None\\n    b: list[Array]\\n    c: bytes\\n")
    fields = f"    a: Inner{k} | None\\n    b: list[Inner{k}]\\n    c: dict[str, str]\\n    d: int\\n"
    exec(f"class Outer{k}(Message):\\n{fields}")
kinds = [globals()[f"Outer{k}"] for k in range(300)]
body = encode(kinds[-1](Inner299(None, [], b""), [], {}, 1))
together = threading.Barrier(3)

def decode():
    for kind in kinds[:-1]:
        together.wait()
        assert decode_body(body, kind, peer="p").d

threads = [threading.Thread(target=decode) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("decoded")
"""


@pytest.mark.slow
def test_threads_may_decode_a_kind_for_the_first_time_at_once():
    """Decoding with the library's own cache of types ends such a process with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "decoded\n"), done.stderr


@pytest.mark.parametrize("length", [1, 3], ids=["more axes than numpy has", "more bytes than a number shows"])
def test_errors_of_a_shape_with_thousands_of_axes_are_short(length):
    array = Array("uint8", (length,) * 10_000, memoryview(b"1"))
    for expected in ((None,) * 10_000, (5,)):
        with pytest.raises(PeerProtocolError, match="10000 axes") as caught:
            view(array, np.uint8, expected, peer="lab", what="Rows.rows")
        assert len(str(caught.value)) < 400
