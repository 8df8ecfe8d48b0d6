"""What parties compare when they meet, how long they wait for each other, and where they listen."""

from __future__ import annotations

import threading

import msgspec
import pytest

import treaty
from pace import within
from runs.small_jobs import played, write_job
from treaty.errors import ConfigError, TreatyError
from treaty.messaging import tls_channel
from treaty.runs import connecting as compared
from treaty.runs.job import Align
from treaty.runs.job_files import load_job
from treaty.runs.party import train_party


def differing(folder, *changes: tuple[str, str], system: str = "federboost-vertical"):
    """Return the copies of a job's parties, of which b's has some lines replaced."""
    job = write_job(folder, system)
    text = (folder / "job.toml").read_text()
    for old, new in changes:
        assert old in text, text
        text = text.replace(old, new)
    (folder / "other.toml").write_text(text)
    return dict.fromkeys(job.parties, job) | {"b": load_job(folder / "other.toml")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [('protocol = "federboost-vertical"', 'protocol = "secureboost"'),
             ("[federboost-vertical]\nepsilon = 50.0\n", "")],
            ["protocol = 'federboost-vertical' at a, 'secureboost' at b"],
        ),
        ([('name = "test"', 'name = "other"')], ["name = 'test' at a, 'other' at b"]),
        ([('active = "a"', 'active = "b"')], ["active = 'a' at a, 'b' at b"]),
        (
            [("n_estimators = 2", "n_estimators = 3"), ('label = "y"', 'label = "y"\ntask = "regression"'),
             ("[parties.b]", '[align]\nlog = "log"\n[parties.b]\neval_tables = ["b.csv"]')],
            [
                "n_estimators = 2 at a, 3 at b", "task = 'classification' at a, 'regression' at b",
                "align = none at a, on_duplicate 'error'", "align.log = none at a, kept at b",
                "eval_tables = 0 at a, 1 at b",
            ],
        ),
    ],
    ids=["protocol", "name", "active", "several"],
)  # fmt: skip
def test_all_differences_of_job_files_are_told_at_once(tmp_path, changes, words):
    said = played(differing(tmp_path, *changes))
    assert set(said) == {"a", "b", "c"}
    for name in "ab":
        assert "the jobs differ: " in said[name]
        assert all(word in said[name] for word in words), said[name]
        assert "give all parties the same job file" in said[name]
    if words[0].startswith("n_estimators"):  # c, which has no link with b, hears of it from a
        assert words[0] in said["c"]


def test_a_party_that_dials_one_that_has_ended_learns_why(tmp_path, monkeypatch):
    """c has a's reason in its mailbox: it need not wait for a connection with a, which has ended."""
    ended, connect, close = threading.Event(), tls_channel.TlsChannel.connect, tls_channel.TlsChannel.close

    def dialling_late(channel, *args, **options):
        assert channel.name != "c" or ended.wait(within(60))
        connect(channel, *args, **options)

    def closing(channel):
        close(channel)
        if channel.name == "a":
            ended.set()

    monkeypatch.setattr(tls_channel.TlsChannel, "connect", dialling_late)
    monkeypatch.setattr(tls_channel.TlsChannel, "close", closing)
    monkeypatch.setattr(tls_channel, "LATE_PATIENCE", 0.5)
    jobs = differing(tmp_path, ("n_estimators = 2", "n_estimators = 3"))
    said = played({name: msgspec.structs.replace(job, wait=10_000) for name, job in jobs.items()})
    assert "n_estimators = 2 at a, 3 at b" in said["c"]


def test_another_release_is_a_plain_sentence(tmp_path, monkeypatch):
    jobs = differing(tmp_path)
    terms = compared.shared_terms

    def of_another(job, name, roles, verb):
        return terms(job, name, roles, verb) | ({"version of Treaty": "9.9"} if name == "b" else {})

    monkeypatch.setattr("treaty.runs.connecting.shared_terms", of_another)
    said = played(jobs)
    assert f"version of Treaty = {treaty.__version__} at a, 9.9 at b" in said["a"]
    assert "install the same Treaty" in said["a"]


def test_who_predicts_while_another_trains_is_told(tmp_path):
    job = write_job(tmp_path, "federboost-vertical")
    roles = job.roles()
    trains, predicts = (compared.shared_terms(job, "a", roles, verb) for verb in ("train", "predict"))
    assert {name for name in trains if trains[name] != predicts.get(name, trains[name])} == {"command"}


def test_terms_of_many_parties_stay_within_bounds(tmp_path):
    job = write_job(tmp_path, "fedxgb")
    members = {f"user{k:05}": job.parties["user0"] for k in range(2000)}
    many = msgspec.structs.replace(job, parties=job.parties | members)
    terms = compared.shared_terms(many, "a", many.roles(), "train")
    assert max(map(len, terms.values())) <= compared.LONGEST_TERM
    fewer = msgspec.structs.replace(job, parties=dict(list(many.parties.items())[:-1]))
    assert compared.shared_terms(fewer, "a", fewer.roles(), "train")["parties"] != terms["parties"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90", 90), ('"90s"', 90), ('"2m"', 120), ('"1h"', 3600), ('"1h 30m"', 5400), ('"1d"', 86400)],
)
def test_durations_may_be_words(tmp_path, given, seconds):
    write_job(tmp_path, "secureboost")
    text = (tmp_path / "job.toml").read_text()
    (tmp_path / "job.toml").write_text(f"wait = {given}\n" + text.replace("timeout = 1200", f"timeout = {given}"))
    job = load_job(tmp_path / "job.toml")
    assert job.wait == job.timeout == seconds


@pytest.mark.parametrize("given", ['"an hour"', '""', '"5"', '"1.5h"', "0", '"0s"'])
def test_what_is_no_duration_is_refused(tmp_path, given):
    write_job(tmp_path, "secureboost")
    (tmp_path / "job.toml").write_text(f"wait = {given}\n" + (tmp_path / "job.toml").read_text())
    with pytest.raises(ConfigError, match="wait"):
        load_job(tmp_path / "job.toml")


def test_a_party_says_whom_it_waits_for_and_counts_it(tmp_path):
    job = msgspec.structs.replace(write_job(tmp_path, "federboost-vertical"), wait=0.5)
    said = []
    with pytest.raises(TreatyError, match=r"expected all peers within 0\.5 s, b is not connected with a"):
        train_party(job, "b", phase=lambda *at: said.append(at))
    assert said[0] == (f"waiting for a at {job.parties['a'].address}", 0, 1)


def test_a_party_listens_elsewhere_than_the_others_reach_it(tmp_path):
    job = write_job(tmp_path, "federboost-vertical")
    inner = job.parties["b"].address  # stands for what a forwarder passes on to
    forwarded = msgspec.structs.replace(job.parties["b"], address="b.example.org:1", listen=inner)
    jobs = dict.fromkeys(job.parties, job) | {"b": msgspec.structs.replace(job, parties=job.parties | {"b": forwarded})}
    assert played(jobs) == {}


def test_whether_ids_are_text_is_compared(tmp_path):
    job = write_job(tmp_path, "federboost-vertical")
    jobs = [msgspec.structs.replace(job, align=Align(text=text)) for text in (False, True)]
    first, second = (compared.shared_terms(of, "a", of.roles(), "train") for of in jobs)
    assert [name for name in first if first[name] != second[name]] == ["align"]
    assert second["align"].endswith("text true")
