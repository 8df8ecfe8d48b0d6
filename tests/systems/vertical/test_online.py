"""Predictions row by row by parties that stay connected, and tell each other their sides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from systems.secureboost.test_shared_prediction import play_online, play_plain
from systems.vertical.trained_models import at, grow, predict, split_table
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array
from treaty.models.trees import used_records
from treaty.systems.vertical.prediction import (
    DecideRequest,
    OnlineRows,
    _open_active,
    online_active,
    online_passive,
)

ROLES = online_active, online_passive
ROWS = [[7], None, [0, 150, 7, 7], [7], list(range(100))]


@pytest.mark.parametrize("parties", [2, 3, 5])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_rows_asked_for_one_by_one_have_the_margins_of_a_batch(task: str, parties: int) -> None:
    frames, y = split_table(task, parties, dirty=True)
    parts, tables = grow(frames, y, task)
    whole = play_plain(parts, tables).results["p0"]
    _, told = play_online(parts, tables, ROWS, ROLES)
    for some, found in zip([of for of in ROWS if of is not None], told, strict=True):
        np.testing.assert_array_equal(found, whole[some])


def test_owners_are_told_once_which_records_are_used_and_others_not_at_all() -> None:
    frames, y = split_table("binary", 4)
    frames["p2"] = frames["p2"].iloc[:, :1] * 0.0
    parts, tables = grow(frames, y, "binary")
    played, told = play_online(parts, tables, [[k] for k in range(20)], ROLES)
    assert len(told) == 20
    sent = [entry.peer for entry in played.transcripts["p0"].entries if entry.step == DecideRequest.__name__]
    used = dict(zip(parts["p0"].grown.sources, used_records(parts["p0"].grown.trees, 4), strict=True))
    assert sorted(sent) == [name for name in ("p1", "p2", "p3") if len(used[name])] == ["p1", "p3"]


@pytest.mark.parametrize(
    ("records", "rows", "expected"),
    [
        ([0, 0], [5], "each record once"),
        ([-1], [5], "records below"),
        ([1 << 20], [5], "records below"),
        ([], [5], "each record once"),
        ([0], [200], "rows below 200"),
        ([0], [-1], "rows below 200"),
    ],
)
def test_what_is_not_there_is_refused(records: list[int], rows: list[int], expected: str) -> None:
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary")
    tables = {name: table.rows(np.arange(table.n_rows) < 200) for name, table in tables.items()}

    def asks(inputs: Any) -> None:
        _open_active(inputs, "rows")
        inputs.party.send("p1", DecideRequest(0, Array.of(np.array(records, np.int32))))
        inputs.party.send("p1", OnlineRows(Array.of(np.array(rows, np.int32))))
        inputs.party.receive("p1", OnlineRows)

    with pytest.raises(PeerProtocolError, match=expected):
        predict(at(asks, parts, tables), at(online_passive, parts, tables), list(tables))
