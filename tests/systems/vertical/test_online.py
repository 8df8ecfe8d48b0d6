"""Predictions row by row by parties that stay connected, and tell each other their sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from systems.federboost_vertical.test_attack import predicted_in_threads
from systems.secureboost.test_shared_prediction import ONLINE, play_online, play_plain
from systems.vertical.trained_models import at, grow, predict, split_table
from treaty.errors import DataError, PeerProtocolError
from treaty.messaging.messages import Array
from treaty.models.trees import used_records
from treaty.runs import prediction as running
from treaty.runs.job import Align, Job, Member
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


@pytest.mark.parametrize("roles", [ROLES, ONLINE], ids=["plain", "shared"])
def test_a_service_that_is_never_idle_keeps_no_messages(roles: Any) -> None:
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary")
    few, many = (play_online(parts, tables, [[7]] * count, roles)[0].transcripts for count in (2, 60))
    for name in ("p0", "p1"):
        assert len(many[name].entries) < 3 * len(few[name].entries)


def test_owners_are_told_once_which_records_are_used_and_others_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treaty.messaging.transcript.Transcript.clear", lambda self: None)
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


def test_a_service_needs_one_row_for_each_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    frames, y = split_table("binary", 2)
    parts, _ = grow(frames, y, "binary")
    members = {}
    for name, frame in frames.items():
        rows = frame.assign(id=[f"person {k // 2 if name == 'p1' and k < 10 else k}" for k in range(len(frame))])
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
        members[name] = Member(predict_table=str(tmp_path / f"{name}.csv"))
    align = Align(on="id", on_duplicate="expand")
    job = Job(name="t", active="p0", label="y", parties=members, align=align, output=str(tmp_path), n_jobs=1)

    def ready(numbers: dict[str, int]) -> Iterator[None]:
        raise AssertionError("it must not offer rows")

    def serving(job: Job, name: str) -> Any:
        return running.serve_online(job, name, ready)

    monkeypatch.setattr(running, "find_part", lambda job, name: parts[name])
    monkeypatch.setattr(running, "predict_party", serving)
    with pytest.raises(DataError, match=r"p0: a service names rows by their ids.* at 5 of 240 common rows"):
        predicted_in_threads(monkeypatch, job)
