"""What ended jobs have left is removed when somebody asks for it, and nothing that counts for others."""

import getpass
import time

import pytest
from typer.testing import CliRunner

from node.hostile import JOB, content
from node.nodes import columns_of, job_file, organisations
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.node.proposals import id_of
from treaty.node.store import FINAL, TRANSITIONS, JobRow, Store

BOTH = ("bank", "shop")
PREDICTING = {**JOB, "parties": {name: {"predict_table": "rows"} for name in BOTH}}
OPEN = sorted(TRANSITIONS.keys() - FINAL)


class Node:
    """A node's folder in which jobs have left files; the node does not run."""

    def __init__(self, folder):
        self.bank = organisations(folder, BOTH, columns_of(BOTH, 60))["bank"]
        self.state = self.bank.state
        Store(self.state).close()
        self.put("stores/rows/bank.noise/ledger", "counted")

    def put(self, place, text="x"):
        file = self.state / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def job(self, state="finished", days=0.0, job=JOB, verb="train", **fields):
        proposal = content(job, verb=verb, **fields)
        row = JobRow(
            id_of(proposal), proposal, bytes(64), "bank", verb, state, created=1.0, changed=time.time() - 86400 * days
        )
        with Store(self.state) as store:
            store.add_job(row)
        return row.id

    def training(self, **fields):
        """Add a training, and what it leaves; return its id."""
        job = self.job(**fields)
        for name in ("bank.part", "bank.report.json", "bank.2026-01-01T000000Z.part"):
            self.put(f"models/{job}/{name}")
        self.put(f"checkpoints/{job}/bank.checkpoint")
        self.put(f"logs/{job}.log")
        return job

    def prediction(self, model, state="finished", verb="predict", **fields):
        job = self.job(state, job=PREDICTING, verb=verb, model=model, **fields)
        if state == "finished":
            self.put(f"models/{model}/bank.{verb}-{job[:16]}.csv")
            self.put(f"logs/{job}.log")
        return job

    def end(self, job, state):
        with Store(self.state) as store:
            store.change(job, state=state)

    def files(self):
        return {str(file.relative_to(self.state)) for file in self.state.rglob("*") if file.is_file()} - {
            "node.db", "node.db-wal", "node.db-shm"
        }  # fmt: skip

    def forgotten(self):
        with Store(self.state) as store:
            assert store.verify_audit() == []
            return [entry.event for entry in store.audit() if entry.event["what"] == "forgotten"]

    def run(self, *words, answer=""):
        return CliRunner().invoke(app, [*words, "--node", str(self.bank.settings)], input=answer)

    def forget(self, *words):
        done = self.run("forget", *words, "--yes")
        assert done.exit_code == 0, done.output + repr(done.exception)
        return done.output

    def refused(self, *words):
        done = self.run("forget", *words, "--yes")
        assert isinstance(done.exception, ConfigError), done.output
        return str(done.exception)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.mark.parametrize("state", sorted(FINAL))
def test_all_that_a_training_has_left_goes_and_nothing_else(node, state):
    other = node.training()
    before = node.files()
    job = node.training(state=state)
    left = node.files() - before
    assert len(left) == 5
    node.forget(job[:10])
    assert node.files() == before
    assert not (node.state / "models" / job).exists()
    assert not (node.state / "checkpoints" / job).exists()
    assert (node.state / "stores/rows/bank.noise/ledger").read_text() == "counted"
    (event,) = node.forgotten()
    assert (event["job"], event["by"]) == (job, getpass.getuser())
    assert set(event["removed"]) == {path for path in left if "checkpoints" not in path} | {f"checkpoints/{job}"}
    assert "nothing is left to remove" in node.forget(job)
    assert len(node.forgotten()) == 1
    assert other in {row.id for row in node.bank.jobs()}


@pytest.mark.parametrize("verb", ["predict", "explain"])
def test_a_prediction_and_its_model_are_forgotten_apart(node, verb):
    model = node.training()
    one, other = node.prediction(model, verb=verb), node.prediction(model, verb=verb)
    file = f"models/{model}/bank.{verb}-{{}}.csv"
    node.forget(one)
    assert file.format(one[:16]) not in node.files()
    assert {file.format(other[:16]), f"models/{model}/bank.part"} <= node.files()
    node.forget(model)
    assert {path for path in node.files() if path.startswith("models")} == {file.format(other[:16])}
    node.forget(other)
    assert not (node.state / "models" / model).exists()


@pytest.mark.parametrize("state", OPEN)
def test_a_job_that_has_not_ended_is_not_forgotten(node, state):
    job = node.training(state=state)
    before = node.files()
    assert f"is {state}: only jobs that have ended" in node.refused(job)
    node.forget("--older", "0")
    assert (node.files(), node.forgotten()) == (before, [])


@pytest.mark.parametrize("verb", ["predict", "serve"])
@pytest.mark.parametrize("state", OPEN)
def test_a_model_that_is_needed_is_kept(node, state, verb):
    model = node.training(days=5)
    user = node.prediction(model, state, verb)
    before = node.files()
    said = node.refused(model)
    assert f"job {user[:12]}, which is {state}, needs the model" in said
    assert f"kept: job {user[:12]}" in node.forget("--older", "1")
    assert (node.files(), node.forgotten()) == (before, [])
    node.end(user, "cancelled" if "cancelled" in TRANSITIONS[state] else "failed")
    node.forget(model)
    assert f"models/{model}/bank.part" not in node.files()


def test_jobs_of_some_age_are_forgotten_together(node):
    old, older, young = (node.training(days=days) for days in (31, 400, 29))
    assert node.forget("--older", "30").count("is forgotten") == 2
    assert {event["job"] for event in node.forgotten()} == {old, older}
    assert {path.split("/")[1] for path in node.files() if path.startswith("models")} == {young}


def test_a_person_is_asked(node):
    job = node.training()
    before = node.files()
    asked = node.run("forget", job, answer="n\n")
    assert asked.exit_code == 1
    assert f"models/{job}/bank.part" in asked.output
    assert (node.files(), node.forgotten()) == (before, [])
    assert node.run("forget", job, answer="y\n").exit_code == 0
    assert node.files() < before


def test_a_job_or_an_age_is_named_and_not_both(node):
    assert "got neither" in node.refused()
    assert "got both" in node.refused("ab", "--older", "3")


def test_a_forgotten_model_is_not_predicted_with(node, tmp_path):
    model = node.training()
    node.forget(model)
    job = job_file(tmp_path / "job.toml", BOTH)
    done = node.run("submit", str(job), "--predict", model)
    assert "was forgotten" in str(done.exception)


def test_a_peer_that_asks_for_a_forgotten_model_is_told(shop):
    training = shop.proposed()
    for state in ("approved", "queued"):
        shop.jobs.change(shop.jobs.standings[training], state=state)
    shop.jobs.end(training, "finished")
    shop.store.note({"what": "forgotten", "job": training, "by": "ann", "removed": []})
    shop.proposed(PREDICTING, verb="predict", model=training)
    assert "was forgotten" in shop.refusal()


@pytest.mark.parametrize("needed", [True, False])
def test_rows_of_a_query_go_with_the_last_job_that_names_it(node, needed):
    text = node.bank.settings.read_text()
    text += '[data.late]\nsql = "SELECT 1"\ndatabase = "env:DB"\nid = "id"\n'
    node.bank.settings.write_text(text)
    late = {**JOB, "parties": {**JOB["parties"], "bank": {"table": "late"}}}
    job = node.training(job=late)
    node.put("snapshots/late.parquet")
    node.put("snapshots/other.parquet")
    if needed:
        node.job("proposed", job=late)
    node.forget(job)
    assert ("snapshots/late.parquet" in node.files()) is needed
    assert "snapshots/other.parquet" in node.files()


def test_a_job_of_another_version_is_forgotten(node):
    row = JobRow("c" * 64, b'{"from": "a later version"}', bytes(64), "bank", "train", "failed")
    with Store(node.state) as store:
        store.add_job(row)
    node.put(f"logs/{row.id}.log")
    node.forget(row.id)
    assert f"logs/{row.id}.log" not in node.files()


def test_what_cannot_be_removed_is_said_and_was_noted(node, monkeypatch):
    job = node.training()

    def unlink(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", unlink)
        assert "cannot remove" in node.refused(job)
    assert f"models/{job}/bank.part" in node.forgotten()[0]["removed"]
    node.forget(job)
    assert not (node.state / "models" / job).exists()
