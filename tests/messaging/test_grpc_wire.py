import os
import subprocess
import sys

import msgspec
import pytest

from treaty.messaging.grpc_wire import CHUNK, Announcement, Introduction, Notice, Parcel, chunks, decode, encode

INTRODUCTION = Introduction(1, "clinic", bytes(16))


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1])
def test_chunks_are_the_announcement_and_the_frame_in_pieces(size):
    announcement = Announcement(INTRODUCTION, 3, size)
    first, *rest = chunks(announcement, b"x" * size)
    assert decode(first, Announcement) == announcement
    assert b"".join(rest) == b"x" * size
    assert all(len(piece) <= CHUNK for piece in rest)


@pytest.mark.parametrize("size", [0, 1, CHUNK])
def test_parcel_is_the_announcement_and_the_frame(size):
    announcement = Announcement(Introduction(1, "\U0001d54f" * 200, bytes(16)), (1 << 64) - 1, size)
    data = encode(Parcel(announcement, memoryview(b"x" * size)))
    assert len(data) < 2 * CHUNK  # the most that an end takes in one piece
    parcel = decode(data, Parcel)
    assert (parcel.announcement, bytes(parcel.frame)) == (announcement, b"x" * size)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 100_000,
        encode(INTRODUCTION) + b"x",
        encode(Introduction(1, "c" * 300, bytes(16))),
        encode(Introduction(1, "clinic", b"short")),
    ],
    ids=["empty", "nested", "trailing", "long name", "short incarnation"],
)
def test_malformed_talk_is_a_value_error(data):
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own texts
        decode(data, Introduction)


@pytest.mark.parametrize(
    "terms",
    [{"n" * 101: "1"}, {"n": "1" * 4001}, {str(k): "" for k in range(301)}, {"n": 1}, [1], {"n": {}}],
    ids=["a long name", "a long value", "many", "a number", "a list", "nested"],
)
def test_a_notice_with_terms_beyond_bounds_is_malformed(terms):
    notice = {"incarnation": bytes(16), "closing": False, "terms": terms}
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own texts
        decode(msgspec.msgpack.encode(notice), Notice)
    assert decode(msgspec.msgpack.encode(notice | {"terms": {"n": "1"}}), Notice).terms == {"n": "1"}


@pytest.mark.parametrize(("given", "kept"), [(None, "NONE"), ("DEBUG", "DEBUG")])
def test_grpc_is_silent_unless_the_user_asks(given, kept):
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    # the C library reads the variable when it is loaded
    code = (
        "import os, sys\nclass Noting:\n    def find_spec(name, *_):\n"
        "        if name == 'grpc': print(os.environ.get('GRPC_VERBOSITY'))\n"
        "sys.meta_path.insert(0, Noting)\nimport treaty.messaging.grpc_wire"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | ({"GRPC_VERBOSITY": given} if given else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == kept
