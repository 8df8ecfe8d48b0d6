"""The audit of gradients after jobs between real processes, from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from runs.job_files import TREATY, finish, start
from runs.test_processes import write_job
from treaty.messaging.certificates import fingerprint, load_certificate
from treaty.runs.warm_up import compile_kernels
from treaty.systems.system import AuditFolder
from treaty.systems.vertical.audit_record import PassiveHeader, RecordFile, read_parts
from treaty.systems.vertical.messages import SumsRequest

CHEATING = Path(__file__).with_name("cheating_party.py")
LATTICE = {"encryption": "lattice", "insecure_test_key_bits": None, "allow_insecure": None}
NAMES = ("imaging", "lab", "clinic")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels()


def keeping_job(folder: Path, *, keepers: tuple[str, ...] = NAMES, **options: object) -> Path:
    """Write a job of three parties that keep records in folders of their own."""
    job = write_job(folder, alone=True, **options)
    text = "\n".join(line for line in job.read_text().splitlines() if not line.endswith("= null"))
    for name in keepers:
        text = text.replace(f"[parties.{name}]", f'[parties.{name}]\nkeep_for_audit = "kept-{name}"')
    job.write_text(text)
    return job


def train(job: Path, *, cheats: bool = False) -> None:
    processes = {name: start(job, name) for name in ("imaging", "lab")}
    command = [sys.executable, str(CHEATING)] if cheats else TREATY
    processes["clinic"] = subprocess.Popen(
        [*command, "train", str(job), "--as", "clinic"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ended = finish(processes, 120)
    assert {name: code for name, (code, _) in ended.items()} == dict.fromkeys(processes, 0), ended


def audited(folder: Path, passive: str = "lab", *arguments: str) -> tuple[int, str, str]:
    command = [*TREATY, "audit-gradients", str(folder / "kept-clinic"), str(folder / f"kept-{passive}"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_an_honest_job_passes_and_damage_is_an_error(tmp_path):
    """Under Okamoto-Uchiyama; between threads, each cipher's honest and false records: `test_audit`."""
    train(keeping_job(tmp_path))
    certificate = fingerprint(load_certificate(tmp_path / "clinic.cert.pem"))
    for passive in ("lab", "imaging"):
        code, said, _ = audited(tmp_path, passive)
        assert code == 0, said
        assert f"clinic -> {passive}, job 'test'" in said
        assert "3 trees compared" in said
        assert "all hold the gradients that the labels imply" in said
        assert f"signed under the certificate {certificate}" in said
    (record,) = (tmp_path / "kept-lab").iterdir()
    whole = record.read_bytes()
    record.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    code, _, said = audited(tmp_path)
    assert code == 2
    assert said.startswith("treaty: the record is damaged: part ")
    record.write_bytes(whole)
    change_what_was_received(record)
    code, said, _ = audited(tmp_path)
    assert code == 1
    assert "clinic did not sign what lab's record has: the record was changed after the training" in said


def change_what_was_received(record: Path) -> None:
    """Write the record anew with another request, as a passive party would that accuses an honest one."""
    header, *parts = read_parts(record)
    assert isinstance(header, PassiveHeader)
    record.unlink()
    forged = RecordFile(AuditFolder(record.parent, 1 << 30), header.party, header.number, header)
    for part in parts:
        forged.add(msgspec.structs.replace(part, last=not part.last) if isinstance(part, SumsRequest) else part)
    forged.close()


@pytest.mark.slow
def test_a_job_whose_active_party_altered_one_gradient_is_found(tmp_path):
    train(keeping_job(tmp_path, keepers=("lab", "clinic"), **LATTICE), cheats=True)
    code, said, _ = audited(tmp_path)
    assert code == 1
    assert "tree 0" not in said
    assert ": tree 1: 1 of 300 rows" in said, said
    assert ": tree 2: " in said  # of more rows, perhaps, for its gradients follow from the first lie
    assert "3 trees compared" in said
    assert "differences" in said


@pytest.mark.slow
def test_a_resumed_job_is_audited_run_by_run(tmp_path):
    job = keeping_job(tmp_path, trees=8, rows=500, subsample=0.8)
    processes = {name: start(job, name, dies=("", 8, "CheckpointReceipt") if name == "lab" else None) for name in NAMES}
    finish(processes, 60)
    ended = finish({name: start(job, name, resume=name == "clinic") for name in NAMES}, 60)
    assert {code for code, _ in ended.values()} == {0}, ended
    assert audited(tmp_path)[0] == 2  # the killed party's first record breaks off
    code, said, _ = audited(tmp_path, "lab", "--unfinished")
    assert code == 0, said
    code, said, _ = audited(tmp_path, "imaging", "--unfinished")
    assert code == 0, said
    assert "all hold the gradients that the labels imply" in said


@pytest.mark.slow
def test_records_that_could_not_be_opened_are_refused(tmp_path):
    job = keeping_job(tmp_path, keepers=("lab",))
    ended = finish({name: start(job, name) for name in NAMES}, 60)
    assert ended["lab"][0] == 2
    assert "lab is to keep a record for an audit, but clinic keeps none" in ended["lab"][1]
    text = job.read_text()
    job.write_text(
        text.replace('protocol = "secureboost"', 'protocol = "federboost-vertical"').partition("[secureboost]")[0]
    )
    done = subprocess.run([*TREATY, "train", str(job), "--as", "lab"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        "expected no keep_for_audit with protocol 'federboost-vertical' and these options, got it at lab" in done.stderr
    )
