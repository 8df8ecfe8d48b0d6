"""Records that parties keep of what they see of a training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from runs.job_files import train_in_threads
from tables import real_table
from treaty.attacks.auditing import findings, findings_of_records
from treaty.attacks.views import View
from treaty.errors import ConfigError
from treaty.runs.job import Job, Member
from treaty.runs.processes import run_all
from treaty.runs.records import read_record

OU = {"encryption": "ou", "insecure_test_key_bits": 512, "allow_insecure": True, "allow_exact_sums": True}


def job_of(tmp_path: Path, own: dict[str, Any], protocol: str = "secureboost") -> Job:
    """A job of a bank and a shop about a small table."""
    X, y = real_table("binary")
    for name, table in {"bank": X.iloc[:, :6].assign(y=y), "shop": X.iloc[:, 6:]}.items():
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    members = {name: Member(table=str(tmp_path / f"{name}.csv")) for name in ("bank", "shop")}
    return Job(
        name="small", protocol=protocol, active="bank", label="y", parties=members, output=str(tmp_path / "model"),
        n_jobs=1, own=own, common={"n_estimators": 4, "random_state": 0},
    )  # fmt: skip


def by_row(tmp_path: Path) -> Job:
    """A job of three hospitals with rows of their own."""
    X, y = real_table("binary")
    names = ("north", "south", "east")
    for k, name in enumerate(names):
        X.iloc[k::3].assign(y=y[k::3]).to_csv(tmp_path / f"{name}.csv", index=False)
    members = {name: Member(table=str(tmp_path / f"{name}.csv"), record=str(tmp_path / "seen")) for name in names}
    return Job(
        name="rows", protocol="federboost-horizontal", active="north", label="y", parties=members,
        output=str(tmp_path / "model"), n_jobs=1, common={"n_estimators": 4, "random_state": 0},
    )  # fmt: skip


def recorded(
    monkeypatch: pytest.MonkeyPatch, job: Job, tmp_path: Path, names: Iterable[str], **fields: Any
) -> list[Path]:
    """Train with some parties recording; return the files that there are."""
    parties = {
        name: msgspec.structs.replace(member, record=str(tmp_path / "seen") if name in set(names) else None, **fields)
        for name, member in job.parties.items()
    }
    copies = dict.fromkeys(parties, msgspec.structs.replace(job, parties=parties))
    assert train_in_threads(monkeypatch, copies) == {}
    return sorted((tmp_path / "seen").glob("*"))


def test_a_record_has_what_its_party_has_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = recorded(monkeypatch, job_of(tmp_path, OU), tmp_path, ["bank", "shop"])
    assert [file.name for file in files] == ["bank.record", "shop.record"]
    bank, shop = (View(*read_record(file)) for file in files)
    X, y = real_table("binary")
    np.testing.assert_array_equal(bank.inputs.data.table.matrix(), X.iloc[:, :6].to_numpy(np.float32))
    np.testing.assert_array_equal(bank.inputs.data.y, y)
    assert shop.inputs.data.table.schema.names == tuple(X.columns[6:])
    assert not len(shop.inputs.data.y)  # its record has no more than it knows
    assert {"TreeStart", "SumsRequest", "SplitRequest"} <= {entry.step for entry in shop.transcript.entries}
    sent = [entry.content for entry in bank.transcript.entries if entry.step == "TreeStart"]
    came = [entry.content for entry in shop.transcript.entries if entry.step == "TreeStart"]
    assert sent == came
    nodes = bank.recording.nodes["shop"]
    assert sum(len(node.rows) == len(y) for node in nodes) == 4  # a root a tree
    assert all(node.sums[:, 2].sum() == len(node.rows) * 6 for node in nodes)
    assert not shop.recording.nodes


def test_records_are_attacked_as_the_training_in_one_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, in_clear, unscored = findings_of_records(
        recorded(monkeypatch, job_of(tmp_path, OU), tmp_path, ["bank", "shop"])
    )
    assert not unscored  # nor is there a message that no statement covers
    assert in_clear.keys() == {"bank", "shop"}
    assert in_clear["bank"]
    assert any(one.attack == "exact sums" and one.finds for one in found)
    views = {path.stem: View(*read_record(path)) for path in (tmp_path / "seen").iterdir()}
    again = findings(dict(sorted(views.items())), by_row=False)
    assert [(one.attack, one.score) for one in found] == [(one.attack, one.score) for one in again]


def test_processes_record_too_and_those_of_rows_the_histograms(tmp_path: Path) -> None:
    run_all(by_row(tmp_path), "train")
    files = sorted((tmp_path / "seen").iterdir())
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 3
    found, _, _ = findings_of_records([files[0].parent])  # a folder stands for its records
    (inversion,) = [one for one in found if one.attack == "histogram inversion"]
    assert inversion.party == "north"
    masked = [one for one in found if one.target.startswith("sums of ")]  # scored by what the others noted of their own
    assert {(one.party, one.target) for one in masked} == {("north", "sums of south"), ("north", "sums of east")}
    with pytest.raises(ConfigError, match="nothing can be scored without the record of south"):
        findings_of_records([file for file in files if file.stem != "south"])


def test_what_cannot_be_scored_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, shop = recorded(monkeypatch, job_of(tmp_path, OU), tmp_path, ["bank", "shop"])
    found, _, unscored = findings_of_records([bank])
    assert unscored == ["shop: what others found of its columns cannot be scored without its record"]
    assert not any("shop" in one.target for one in found)
    with pytest.raises(ConfigError, match="nothing can be scored without the record of bank"):
        findings_of_records([shop])


def test_a_record_that_grows_too_large_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = recorded(monkeypatch, job_of(tmp_path, OU), tmp_path, ["bank", "shop"], record_megabytes=0.02)
    assert not files
    assert (
        "shop: its record is not written: messages, or opened sums, took more than record_megabytes, 0.02 MB"
        in caplog.text
    )
    assert (tmp_path / "model").is_dir()  # the training ended well


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = recorded(monkeypatch, job_of(tmp_path, OU), tmp_path, ["bank"])
    assert [file.name for file in files] == ["bank.record"]


def test_records_of_two_trainings_or_damaged_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, shop = recorded(monkeypatch, job_of(tmp_path, OU), tmp_path, ["bank", "shop"])
    before = shop.rename(tmp_path / "before.record")
    _, shop = recorded(monkeypatch, job_of(tmp_path, OU), tmp_path, ["bank", "shop"])
    with pytest.raises(ConfigError, match="expected records of one training, got records of 2"):
        findings_of_records([bank, before])
    with pytest.raises(ConfigError, match="expected one record of each party, got another of shop"):
        findings_of_records([bank, shop, before])
    content = bytearray(shop.read_bytes())
    content[-1] ^= 1
    shop.write_bytes(content)
    with pytest.raises(ConfigError, match=r"shop\.record"):
        findings_of_records([bank, shop])
    with pytest.raises(ConfigError, match=r"found no file \*\.record"):
        findings_of_records([tmp_path / "model"])
