"""How parties end together: outputs that cannot be written, and parts that cannot be kept at the end."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from marks import all_but_first_slow, slow
from pace import within
from runs.job_files import finish, start
from runs.small_jobs import SYSTEMS, model, played, write_job
from treaty import files
from treaty.errors import ConfigError, PeerLost, TreatyError
from treaty.messaging.channel import memory_channels
from treaty.messaging.party import Party
from treaty.messaging.tls_channel import TlsChannel
from treaty.runs import local_checks
from treaty.runs import party as runs
from treaty.runs.connecting import check_writable, wait_until_all_kept
from treaty.runs.job import Job
from treaty.runs.party import part_file
from treaty.runs.prediction import owners_of_model, predict_party
from treaty.runs.warm_up import compile_kernels

SMALL = ["quasi-newton", *(system for system in SYSTEMS if system != "quasi-newton")]


def with_output(job: Job, folder: Path) -> Job:
    return msgspec.structs.replace(job, output=str(folder))


@pytest.mark.parametrize(
    ("system", "victim"),
    [
        ("quasi-newton", "active"),
        *(slow(system, "active") for system in SMALL[1:]),
        *(slow(system, "other") for system in ("quasi-newton", "secureboost", "federboost-horizontal")),
    ],
)
def test_an_output_that_cannot_be_written_is_known_before_anything_is_read(tmp_path, monkeypatch, system, victim):
    job = write_job(tmp_path, system)
    name = job.active if victim == "active" else owners_of_model(job)[-1]
    (tmp_path / "taken").write_text("a file")
    read, by_column, by_row = [], runs.read_by_column, runs.read_by_row
    monkeypatch.setattr(
        runs, "read_by_column", lambda party, *a, **k: (read.append(party.name), by_column(party, *a, **k))[1]
    )
    monkeypatch.setattr(runs, "read_by_row", lambda job, who, *a: (read.append(who), by_row(job, who, *a))[1])
    jobs = dict.fromkeys(job.parties, job) | {name: with_output(job, tmp_path / "taken" / "model")}
    said = played(jobs)
    assert f"cannot write in {tmp_path / 'taken' / 'model'}" in said[name]
    assert name not in read
    for other in set(job.parties) - {name}:
        assert other not in owners_of_model(job) or name in said[other]
        assert str(tmp_path) not in said.get(other, "")
    assert not list(tmp_path.glob("model/*.part"))


@pytest.mark.parametrize("system", all_but_first_slow(*SMALL))
def test_a_party_that_cannot_keep_its_part_ends_all_with_its_error(tmp_path, monkeypatch, system):
    job = write_job(tmp_path, system)
    compile_kernels(job.system, job.settings()[0])
    owners = owners_of_model(job)
    name, write = owners[-1], files.write_whole
    monkeypatch.setattr(local_checks, "check_ledgers", lambda *_: None)  # it reads earlier models
    (tmp_path / "model").mkdir()
    for owner in owners:
        part_file(job.output, owner).write_text("an earlier model")

    def full(path: Path, *arguments: object, **options: object) -> None:
        if Path(path).stem == name and Path(path).suffix == ".staged":
            raise ConfigError(f"cannot write {path}: No space left on device", public=files._UNWRITTEN)
        write(path, *arguments, **options)

    monkeypatch.setattr(files, "write_whole", full)
    said = played(dict.fromkeys(job.parties, job))
    assert said[name].endswith("No space left on device")
    for other in set(owners) - {name}:
        assert f"{name} stopped the job: its files cannot be written; it has the details" in said[other]
    assert not [file for ending in (".*", "*.staged") for file in (tmp_path / "model").glob(ending)]
    assert [part_file(job.output, owner).read_text() for owner in owners] == ["an earlier model"] * len(owners)
    if len(owners) > 1:  # all may go on from what they have kept, a coordinator too
        kept = {file.stem for file in (tmp_path / "model").glob("*.checkpoint")}
        assert kept >= ({*owners, "notary"} if job.system.common.table == "regression" else {job.active})


@pytest.mark.parametrize("system", all_but_first_slow(*SMALL))
def test_nobody_leaves_before_everybody_has_kept_its_part(tmp_path, monkeypatch, system):
    job = write_job(tmp_path, system)
    compile_kernels(job.system, job.settings()[0])
    owners, close, seen = owners_of_model(job), TlsChannel.close, {}

    def closing(channel: TlsChannel) -> None:
        # "staged" first: a part is renamed from it, and one renamed between the two looks would be seen in neither
        kept = {file.stem for ending in ("staged", "part") for file in (tmp_path / "model").glob(f"*.{ending}")}
        seen[channel.name] = kept.issuperset(owners)
        close(channel)

    monkeypatch.setattr(TlsChannel, "close", closing)
    assert played(dict.fromkeys(job.parties, job)) == {}
    assert all(seen[owner] for owner in owners)
    assert set(model(job)) == set(owners)


@pytest.mark.slow
def test_between_processes_an_output_that_cannot_be_written_is_no_traceback(tmp_path):
    write_job(tmp_path, "sgd")
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "b.toml").write_text('output = "taken"\n' + (tmp_path / "job.toml").read_text())
    processes = {name: start(tmp_path / "job.toml", name) for name in ("a", "notary")}
    processes["b"] = start(tmp_path / "b.toml", "b")
    ended = finish(processes, 60)
    assert [ended[name][0] for name in ("a", "b", "notary")] == [1, 2, 1]
    for _, said in ended.values():
        assert "Traceback" not in said
        assert "b" in said.splitlines()[-1]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    check_writable([tmp_path / "new" / "folder"])
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    with pytest.raises(
        ConfigError, match=r"cannot write in .*file: it, or a folder above it, is a file; move it"
    ) as caught:
        check_writable([tmp_path / "file"])
    assert "file" not in caught.value.public.replace("files", "")


def test_a_party_without_its_part_of_the_model_says_so_before_a_prediction(tmp_path):
    job = write_job(tmp_path, "quasi-newton")
    compile_kernels(job.system, job.settings()[0])
    assert played(dict.fromkeys(job.parties, job)) == {}
    members = {name: msgspec.structs.replace(m, predict_table=m.table) for name, m in job.parties.items()}
    job = msgspec.structs.replace(job, parties=members)
    part_file(job.output, "b").unlink()
    said = {}

    def predict(name: str) -> None:
        try:
            predict_party(job, name)
        except TreatyError as error:
            said[name] = str(error)

    threads = [threading.Thread(target=predict, args=(name,), daemon=True) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within(60))
    assert "b.part" in said["b"]
    assert said["a"] == "b stopped the job: its job file, options or model cannot be used; it has the details"


@pytest.mark.parametrize("came", [True, False])
def test_a_last_message_whose_connection_broke_may_have_come(came):
    """Then the active party has answered and left."""
    channels = memory_channels("ab")
    a, b = (Party(name, "job", "p", channels[name], [peer], timeout=20) for name, peer in ("ab", "ba"))
    roles, kept = SimpleNamespace(active="a", edges={}), []
    send, ended = channels["b"].send, threading.Event()

    def breaking(to, frame, timeout):
        if came:
            send(to, frame, timeout)
        else:
            channels["a"].close()
        ended.wait(20)
        raise PeerLost("a", "a is lost: it has closed its channel")

    def lead():
        if came:
            wait_until_all_kept(a, roles, ["a", "b"], [], 20, lambda: kept.append("a"))
            a.close()
            channels["a"].close()
        ended.set()

    leading = threading.Thread(target=lead)
    leading.start()
    channels["b"].send = breaking
    if came:
        wait_until_all_kept(b, roles, ["a", "b"], [], 20, lambda: kept.append("b"))
        assert kept == ["a", "b"]
    else:
        with pytest.raises(PeerLost):
            wait_until_all_kept(b, roles, ["a", "b"], [], 20, lambda: kept.append("b"))
        assert kept == []
    leading.join()
