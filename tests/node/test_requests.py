"""Requests to a service's process: which ids they may have, and how many may wait."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from treaty.data.ids import canonical_ids
from treaty.data.table import to_table
from treaty.node import requests as requests_module
from treaty.node.requests import OnlineRequest, Requests, id_value

IDS = ["ann", "bob", "zoë", "42"]


@pytest.fixture
def requests(tmp_path: Path) -> Iterator[Requests]:
    """Rows of `IDS`, whose letters may be upper or lower case."""
    schema = to_table(pa.table({"age": pa.array([1.0, 2.0])})).schema
    normalise = ("nfc", "lower", "strip")
    canonical = canonical_ids(pa.array(IDS, pa.string()), normalise=normalise)
    made = Requests(tmp_path / "in", {id_value(one): k for k, one in enumerate(canonical)}, schema, normalise)
    yield made
    made._socket.close()


def asked(ids: list[str]) -> OnlineRequest:
    return OnlineRequest(ids, np.zeros(len(ids), np.float32).tobytes())


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (["bob"], [1]),
        (["42", "ann", "bob"], [3, 0, 1]),
        ([" Bob", "ann"], [1, 0]),
        (["ZOE\u0308", "zoë", "zoe\u0308"], [2, 2, 2]),
        (["ann", "BOB", "42 "], [0, 1, 3]),
    ],
)
def test_ids_name_the_same_rows_as_they_were_aligned_or_otherwise_written(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, ids: list[str], rows: list[int]
) -> None:
    monkeypatch.setattr(requests_module, "ANSWER_TIMEOUT", 0.01)
    assert "not answered within" in requests._answer(asked(ids)).wrong
    waiting = next(iter(requests))
    assert waiting is not None
    assert waiting.rows.tolist() == rows


def test_unknown_ids_are_named_as_they_were_sent(requests: Requests) -> None:
    assert requests._answer(asked(["ann", "Eve", "042"])).unknown == ["Eve", "042"]


def test_ids_with_characters_that_no_aligned_id_may_have_are_unknown(requests: Requests) -> None:
    assert requests._answer(asked(["ann", "\U000e0fff", " Bob"])).unknown == ["\U000e0fff"]


def test_more_requests_than_may_wait_are_refused(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "ANSWER_TIMEOUT", 0.01)
    monkeypatch.setattr(requests_module, "_WAITING", 2)
    said = [requests._answer(asked(["ann"])).wrong for _ in range(3)]
    assert ["too many requests" in of for of in said] == [False, False, True]
    next(iter(requests))
    assert "too many requests" not in requests._answer(asked(["ann"])).wrong


def test_requests_for_no_rows_or_for_more_than_partners_allow_do_not_reach_them(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "MOST_ROWS", requests_module.TOGETHER + 2)
    monkeypatch.setattr(requests_module, "ANSWER_TIMEOUT", 0.01)
    for ids in ([], ["ann"] * 3):
        assert requests._answer(asked(ids)).wrong == f"expected 1 to 2 rows, got {len(ids)}"
    assert "not answered within" in requests._answer(asked(["ann"] * 2)).wrong
    waiting = next(iter(requests))
    assert waiting is not None
    assert len(waiting.rows) == 2


def test_the_rest_of_too_long_a_request_is_not_answered_as_another(
    requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "MOST_BYTES", 100)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5.0)
        client.connect(str(tmp_path / "in"))
        for ids in (["nobody"], ["nobody"] * 30):
            client.sendall(msgspec.json.encode(asked(ids)) + b"\n")
        answers = b""
        with suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                answers += piece
    assert answers.count(b"\n") <= 1
