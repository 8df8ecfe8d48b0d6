"""The format of a connection, without sockets: bytes in, units out, whatever the pieces they come in."""

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.messaging import units
from treaty.messaging.units import (
    FRAME,
    HELLO,
    PING,
    WELCOME,
    Introduction,
    UnitReader,
    Welcome,
    decode,
    encode,
    header,
)

INTRODUCTION = Introduction(1, "clinic", bytes(16))


def read(stream, pieces=()):
    """Return the units in a stream that comes in pieces of the lengths given, and then as fast as it is taken."""
    reader, found, of = UnitReader(), [], None
    stream, pieces = memoryview(stream), iter(pieces)
    while True:
        while True:
            of = of or reader.header()
            content = None if of is None else reader.content(of)
            if content is None:
                break
            found.append((of, bytes(content)))
            of = None
        if not stream:
            return found
        room = reader.room()
        nbytes = min(len(room), len(stream), next(pieces, len(stream)))
        assert nbytes, "no room"
        room[:nbytes] = stream[:nbytes]
        reader.came(nbytes)
        stream = stream[nbytes:]


unit = st.one_of(
    st.binary(max_size=300).map(lambda content: (FRAME, content)),
    st.sampled_from([1 << 16, (1 << 16) - units._HEADER.size, 70_000]).map(lambda size: (FRAME, bytes(size))),
    st.just((PING, b"")),
    st.binary(max_size=100).map(lambda content: (HELLO, content)),
)


@settings(max_examples=100)
@given(st.lists(st.tuples(unit, st.integers(0, 2**64 - 1)), max_size=5), st.lists(st.integers(1, 100_000), max_size=20))
def test_units_come_out_as_they_went_in_whatever_the_pieces(sent, pieces):
    stream = b"".join(header(kind, len(content), number, 7) + content for (kind, content), number in sent)
    expected = [((kind, len(content), number, 7), content) for (kind, content), number in sent]
    assert read(stream, pieces) == expected


@settings(max_examples=50)
@given(st.binary(max_size=600), st.integers(0, 500), st.binary(min_size=1, max_size=8))
def test_a_stream_that_was_changed_gives_units_or_an_error(content, at, change):
    stream = bytearray(header(FRAME, len(content)) + content + header(PING))
    stream[at : at + len(change)] = change
    tracemalloc.start()
    try:
        for found, whole in read(bytes(stream)):
            assert len(whole) == found.size
    except ConnectionError as error:
        assert "expected" in str(error)  # noqa: PT017 - either is right
    except MemoryError:  # what a receiver's credit refuses before
        pass
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_hundred_thousand_changed_streams_give_units_or_an_error():
    """Of the right sizes, in order, whatever the pieces; no content is asked for that a receiver would refuse."""
    random, errors = np.random.default_rng(0), 0
    sizes = [0, 1, 24, 25, 26, 200]
    for _ in range(100_000):
        kinds = random.choice([FRAME, FRAME, PING, HELLO, WELCOME, 5], 4)
        contents = [random.bytes(random.choice(sizes)) if kind in (FRAME, HELLO, WELCOME) else b"" for kind in kinds]
        sent = [
            header(int(kind), len(content), k) + content
            for k, (kind, content) in enumerate(zip(kinds, contents, strict=True))
        ]
        stream = bytearray(b"".join(sent))
        first = random.integers(len(stream))
        for at in (first, *random.integers(first, len(stream), random.integers(3))):
            stream[at] ^= random.integers(1, 256)
        cut = random.integers(first, len(stream) + 1)
        reader, found, at = UnitReader(), [], 0
        try:
            while True:
                while (of := reader.header()) is not None:
                    if of.size > 4096:
                        raise ConnectionError("expected less")
                    while (content := reader.content(of)) is None and at < cut:
                        at = fed(reader, stream[at:cut], at, random)
                    if content is None:
                        break
                    assert len(content) == of.size
                    found.append(of)
                if at >= cut:
                    break
                at = fed(reader, stream[at:cut], at, random)
        except ConnectionError:
            errors += 1
        before = np.searchsorted(np.cumsum([len(unit) for unit in sent]), first, "right")
        assert [of.number for of in found[:before]] == list(range(before)), "those before the change are lost"
    assert 10_000 < errors < 90_000


def fed(reader, stream, at, random):
    """Give the reader some of the bytes that are left; return how far they have been given."""
    room = reader.room()
    nbytes = min(len(room), len(stream), int(random.integers(1, 120)))
    room[:nbytes] = stream[:nbytes]
    reader.came(nbytes)
    return at + nbytes


def test_no_memory_is_taken_for_a_content_before_it_is_asked_for():
    reader = UnitReader()
    unit = header(FRAME, 1 << 40)
    reader.room()[: len(unit)] = unit
    reader.came(len(unit))
    tracemalloc.start()
    assert reader.header().size == 1 << 40
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        (header(units.ECHO + 1), "expected a unit, got one of kind 11"),
        (header(255), "got one of kind 255"),
        (header(HELLO, (4 << 10) + 1), "expected at most 4096 bytes, got 4097 announced"),
        (header(WELCOME, 1 << 60), "expected at most 2097152 bytes"),
        (header(PING, 1), "expected at most 0 bytes, got 1"),
        (b"GET / HTTP/1.1\r\nHost: clinic\r\n\r\n", "got one of kind 71"),
    ],
)
def test_a_header_that_no_peer_may_send_is_an_error(unit, text):
    with pytest.raises(ConnectionError, match=text):
        read(unit)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1001, 70_000])
def test_content_is_read_only_and_ends_at_a_multiple_of_8_bytes(size):
    reader, stream = UnitReader(), header(FRAME, size) + bytes(min(size, 60_000))
    reader.room()[: len(stream)] = stream
    reader.came(len(stream))
    of = reader.header()
    while (content := reader.content(of)) is None:
        reader.came(len(reader.room()))
    assert content.readonly
    assert len(content) == size
    assert (np.frombuffer(content, np.uint8).ctypes.data + size) % 8 == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 100_000,
        encode(INTRODUCTION) + b"x",
        encode(Introduction(1, "c" * 300, bytes(16))),
        encode(Introduction(1, "clinic", b"short")),
        encode(INTRODUCTION).replace(b"frames", b"notice"),
    ],
    ids=["empty", "nested", "trailing", "long name", "short incarnation", "another purpose"],
)
def test_malformed_introductions_are_a_value_error(data):
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own texts
        decode(data, Introduction)


@pytest.mark.parametrize(
    "terms",
    [{"n" * 101: "1"}, {"n": "1" * 4001}, {str(k): "" for k in range(301)}, {"n": 1}, [1], {"n": {}}],
    ids=["a long name", "a long value", "many", "a number", "a list", "nested"],
)
def test_a_welcome_with_terms_beyond_bounds_is_malformed(terms):
    welcome = {"incarnation": bytes(16), "terms": terms}
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own texts
        decode(msgspec.msgpack.encode(welcome), Welcome)
    assert decode(msgspec.msgpack.encode(welcome | {"terms": {"n": "1"}}), Welcome).terms == {"n": "1"}


def test_the_largest_welcome_fits_its_bound():
    terms = {f"{k:0100}": "x" * 4000 for k in range(300)}
    assert len(encode(Welcome(bytes(16), terms))) < units._MOST[WELCOME]
