"""The files that a party keeps: which vouch for each other, and that none is read as something else when damaged."""

from __future__ import annotations

import re
import shutil
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from flips import damaged, flipped
from runs.job_files import train_in_threads
from tables import real_table
from treaty import files
from treaty.errors import ConfigError
from treaty.machine.database import kept_file, set_aside
from treaty.models.checkpoints import Keeper, ledger_folder, load_checkpoint
from treaty.models.linear import load_linear_part
from treaty.models.trees import load_part
from treaty.privacy import randomised_response
from treaty.privacy.ledger import per_person, read_ledger
from treaty.runs.job import Align, Job, Member
from treaty.runs.report import FORMAT as REPORT
from treaty.runs.report import Report
from treaty.runs.rows import FORMAT as ROWS
from treaty.runs.rows import KeptRows
from treaty.systems.logistic import batches


def job_of(folder: Path, *, output: str = "model", store: str = "store", **given) -> Job:
    """Return a job of two trees, each of which costs epsilon 10 of the 25 that a person may pay."""
    parties = {name: Member(table=str(folder / f"{name}.csv")) for name in ("bank", "shop")}
    settings = {
        "protocol": "fedxgboost-ldp",
        "own": {"mechanism": "duchi", "epsilon": 10.0, "epsilon_total": 25.0},
    } | given
    return Job(
        name="test", active="bank", label="y", parties=parties,
        common={"n_estimators": 2, "max_depth": 2, "max_bin": 8, "min_child_samples": 5},
        output=str(folder / output), store=str(folder / store), n_jobs=1, **settings,
    )  # fmt: skip


def run(job: Job, monkeypatch) -> dict[str, str]:
    return train_in_threads(monkeypatch, dict.fromkeys(job.parties, job))


@pytest.fixture
def folder(tmp_path):
    X, y = real_table("binary", rows=120)
    X.iloc[:, :5].assign(y=y).to_csv(tmp_path / "bank.csv", index=False)
    X.iloc[:, 5:].to_csv(tmp_path / "shop.csv", index=False)
    return tmp_path


@pytest.fixture
def spent(folder, monkeypatch):
    """Return the folder of a job that has spent epsilon 20 of 25."""
    assert run(job_of(folder), monkeypatch) == {}
    assert per_person(read_ledger(ledger_folder(folder / "store", "bank", "noise"))) == 20.0
    return folder


def test_a_model_says_how_far_its_ledger_was(spent):
    noise = ledger_folder(spent / "store", "bank", "noise")
    assert [(folder, mark.changes) for folder, mark in load_part(spent / "model" / "bank.part").kept.items()] == [
        (str(noise), 2)
    ]
    assert load_part(spent / "model" / "shop.part").kept == {}


@pytest.mark.parametrize(
    ("lost", "output", "text"),
    [
        (["ledger"], "elsewhere", "ledger is missing or empty"),
        (["key"], "elsewhere", "the key of the noise, key, is missing"),
        (["kept"], "elsewhere", r"bank\.noise\.kept is missing"),
        (["ledger", "key"], "elsewhere", "ledger is missing or empty"),
        (["kept", "ledger", "key"], "model", r"bank\.part was trained with the ledger .*bank\.noise, and that is gone"),
    ],
    ids=["ledger", "key", "file-beside", "ledger-and-key", "all-but-the-model"],
)
def test_a_lost_ledger_is_not_begun_anew_in_silence(spent, monkeypatch, lost, output, text):
    noise = ledger_folder(spent / "store", "bank", "noise")
    for name in lost:
        (kept_file(noise) if name == "kept" else noise / name).unlink()
    before = sorted(path for path in spent.rglob("*") if "store" in path.parts)
    monkeypatch.setattr("treaty.runs.connecting.CONNECT_TIMEOUT", 1.0)
    said = run(job_of(spent, output=output), monkeypatch)["bank"]
    assert re.search(text, said)
    assert "bring back the newest copy" in said
    assert "A reset would forget what people have paid" in said
    assert sorted(path for path in spent.rglob("*") if "store" in path.parts) == before
    assert not (spent / "elsewhere" / "bank.part").exists()


def test_an_older_copy_of_the_whole_store_is_known_by_the_model(folder, monkeypatch):
    assert run(job_of(folder, own={"mechanism": "duchi", "epsilon": 1.0, "epsilon_total": 25.0}), monkeypatch) == {}
    shutil.copytree(folder / "store", folder / "copy")
    assert run(job_of(folder), monkeypatch) == {}
    shutil.rmtree(folder / "store")
    shutil.copytree(folder / "copy", folder / "store")
    said = run(job_of(folder), monkeypatch)["bank"]
    assert "bank.part was trained with the ledger" in said
    assert "and that is an older copy; bring back the newest copy" in said


@pytest.mark.parametrize("limit", ["most_epsilon", "most_epsilon_total"])
@pytest.mark.parametrize("own", [{"mechanism": "duchi", "epsilon": 10.0}, {"epsilon": 15.0}])
def test_a_partys_own_limits_hold_in_a_job_without_a_node(folder, monkeypatch, limit, own):
    """However often it is begun, and whatever limit the job has that all parties share."""
    job = job_of(folder, own=own)
    job = msgspec.structs.replace(
        job, parties=job.parties | {"bank": msgspec.structs.replace(job.parties["bank"], **{limit: 20.0})}
    )
    assert run(job, monkeypatch) == {}
    for path in (folder / "model").iterdir():
        path.unlink()
    for path in folder.glob("*.noisy_labels"):
        path.unlink()
    said = run(job, monkeypatch)
    assert "a person may pay epsilon 20" in said["bank"]
    assert limit in said["bank"]
    assert per_person(read_ledger(ledger_folder(folder / "store", "bank", "noise"))) <= 20.0


def test_another_store_has_a_ledger_of_its_own(spent, monkeypatch):
    assert run(job_of(spent, store="other"), monkeypatch) == {}  # over the same model, whose ledger is another one
    assert per_person(read_ledger(ledger_folder(spent / "other", "bank", "noise"))) == 20.0
    assert "may pay epsilon 25, has paid 20 and would pay 30" in run(job_of(spent), monkeypatch)["bank"]


def test_a_ledger_is_begun_anew_where_somebody_says_so(spent, monkeypatch):
    set_aside(ledger_folder(spent / "store", "bank", "noise"))
    assert "bank.part was trained with the ledger" in run(job_of(spent), monkeypatch)["bank"]
    (spent / "model" / "bank.part").unlink()  # as the error has it
    assert run(job_of(spent), monkeypatch) == {}
    assert per_person(read_ledger(ledger_folder(spent / "store", "bank", "noise"))) == 20.0


# ---------------------------------------------------------------- damage


def encoded(content) -> bytes:
    return msgspec.msgpack.Encoder(enc_hook=files._encode).encode(content)


def read_labels(path: Path) -> bytes:
    kept = files.read_file(path, randomised_response._NoisyLabels, randomised_response.FORMAT)
    return encoded(kept)


READERS = {
    "model/bank.part": lambda path: encoded(load_part(path, "bank")),
    "model/shop.part": lambda path: encoded(load_part(path, "shop")),
    "model/bank.checkpoint": lambda path: encoded(load_checkpoint(path, "bank")),
    "model/shop.checkpoint": lambda path: encoded(load_checkpoint(path, "shop")),
    "model/bank.rows": lambda path: encoded(files.read_file(path, KeptRows, ROWS, "bank")),
    "model/bank.report.json": lambda path: encoded(files.read_json(path, Report, REPORT, "bank")),
    "store/bank.batches": lambda path: encoded(files.read_file(path, batches._Kept, batches.FORMAT, "bank")),
    "linear/shop.part": lambda path: encoded(load_linear_part(path, "shop")),
    "labels": read_labels,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with what three jobs have left, and would have left when interrupted."""
    folder = tmp_path_factory.mktemp("jobs")
    X, y = real_table("binary", rows=120)
    X = X.assign(id=range(len(X)))
    X[[*X.columns[:5], "id"]].assign(y=y).to_csv(folder / "bank.csv", index=False)
    X[X.columns[5:]].to_csv(folder / "shop.csv", index=False)
    align = Align(on="id")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keeper, "done", lambda _: None)
        patch.setattr("treaty.runs.party.order_file", lambda job, name: folder / "none")
        assert run(job_of(folder, align=align), patch) == {}
        parties = {"bank": Member(table=str(folder / "bank.csv"), noisy_labels=str(folder / "labels"))}
        job = job_of(folder, output="randomised", own={"mechanism": "label_rr", "epsilon": 1.0}, align=align)
        job = msgspec.structs.replace(job, parties=job.parties | parties)
        assert run(job, patch) == {}
        job = job_of(folder, output="linear", protocol="quasi-newton", own={"coordinator": False}, align=align)
        shop = {"shop": Member(table=str(folder / "shop.csv"), columns=[X.columns[5]])}
        common = {"max_iter": 1, "batch_size": 60}
        job = msgspec.structs.replace(job, common=common, parties=job.parties | shop)
        assert run(job, patch) == {}
    return folder


@pytest.mark.parametrize("flips", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_no_flipped_bit_of_a_jobs_file_is_read_as_something_else(written, name, flips):
    """The ledger, its key, the run log, hints and identities have tests of their own beside their modules."""
    read, path = READERS[name], written / name
    assert read(path)
    for what in chain(flipped(path, flips), damaged(path)):
        with pytest.raises(ConfigError, match=str(path)):
            pytest.fail(f"{what}: {read(path)!r}")
    assert read(path)


def test_files_of_other_parties_and_kinds_are_refused(written):
    with pytest.raises(ConfigError, match=r"expected a model part of bank, got one of shop - at .*shop\.part"):
        load_part(written / "model" / "shop.part", "bank")
    with pytest.raises(ConfigError, match=r"expected a model part, got a checkpoint - at .*bank\.checkpoint"):
        load_part(written / "model" / "bank.checkpoint", "bank")
    with pytest.raises(ConfigError, match=r"expected a checkpoint, got a model part - at .*bank\.part"):
        load_checkpoint(written / "model" / "bank.part", "bank")
    with pytest.raises(ConfigError, match=r"expected a model part, got a linear part - at .*shop\.part"):
        load_part(written / "linear" / "shop.part", "shop")


def test_files_are_for_their_owner_alone_and_no_temporary_one_is_left(written):
    made = [path for path in written.rglob("*") if path.is_file() and path.suffix != ".csv"]
    assert {path.name for path in made} >= {
        "ledger",
        "key",
        "bank.noise.kept",
        "bank.part",
        "runs",
        "bank.runs.kept",
    }
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    assert [path for path in made if path.name.startswith(".")] == []
