"""Users' rows predicted by a hidden model in a job: `treaty predict` of server, edge servers and users."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import treaty
from flat import flat, option_lines
from pace import within
from runs.job_files import finish, start
from tables import real_table, with_categories, with_gaps
from treaty.cli.main import app
from treaty.errors import ConfigError, TreatyError
from treaty.files import read_json, write_json
from treaty.messaging.channel import memory_channels
from treaty.messaging.party import Party, run_role
from treaty.models.trees import ModelPart
from treaty.node.identity import make_keys
from treaty.runs import prediction
from treaty.runs.job import Job
from treaty.runs.job_files import load_job
from treaty.runs.party import part_file
from treaty.runs.prediction import serve_party, service_roles
from treaty.runs.processes import free_ports
from treaty.runs.report import FORMAT, Report, service_report_file
from treaty.systems.fedxgb import prediction as secpred
from treaty.systems.fedxgb.messages import PredictionTerms
from treaty.systems.fedxgb.pieces import RowShares
from treaty.systems.fedxgb.prediction import QueryRecord, queries_folder

EDGES = ("berlin", "tokyo", "oslo")
ASKING = {"ann": 12, "ben": 7, "cat": 5}  # rows of users to predict; none of them took part in the training
OPTIONS = {"min_child_samples": 2, "max_bin": 8, "n_estimators": 3}


def new_rows() -> dict[str, pd.DataFrame]:
    """Return each user's rows to predict."""
    X, _ = real_table("binary", rows=200)
    new = with_gaps(with_categories(X)).iloc[150:]
    ends = np.cumsum([0, *ASKING.values()])
    return {name: new.iloc[a:b] for name, a, b in zip(ASKING, ends[:-1], ends[1:], strict=True)}


@pytest.fixture(scope="module")
def model() -> treaty.GBDTClassifier:
    """Return a model of users' rows; what users are told of it changes no tree."""
    X, y = real_table("binary", rows=150)
    X, y = with_gaps(with_categories(X)), np.where(y == 1, "well", "ill")
    rows = {f"user{k}": (X.iloc[k::6], y[k::6]) for k in range(6)}
    return flat(treaty.GBDTClassifier, "fedxgb", n_jobs=1, expose="model", edges=2, **OPTIONS).fit(rows)


def servers_part(model: treaty.GBDTClassifier, **changes: Any) -> ModelPart:
    """Return a model as the server of a job has it."""
    part = model.parts_["pooled"]
    forest = part.forest
    whole = type(forest)(forest.objective, ("owner",), forest.classes, forest.trees)
    return msgspec.structs.replace(part, party="owner", forest=whole, **changes)


def write_job(folder: Path, model: treaty.GBDTClassifier, *, apart: bool = False, **options: Any) -> Path:
    """Write the job of a finished training, its model and users' rows to predict; with `apart`, also keys."""
    roles = {"owner": None, **dict.fromkeys(EDGES, "edge"), "notary": "authority", **dict.fromkeys(ASKING)}
    protocol, given = option_lines("fedxgb", **{**OPTIONS, **options})
    lines = ['name = "test"', protocol, 'active = "owner"', 'label = "y"', "timeout = 60", "n_jobs = 1"]
    lines += ["reconnect = 2", *given]
    for (name, role), port in zip(roles.items(), free_ports(len(roles)), strict=True):
        lines += [f"[parties.{name}]"]
        lines += [f'role = "{role}"'] if role else []
        lines += [f'predict_table = "{name}.csv"'] if name in ASKING else []
        if apart:
            make_keys(folder, name)
            lines += [f'address = "127.0.0.1:{port}"', f'certificate = "{name}.cert.pem"', f'key = "{name}.key.pem"']
    for name, table in new_rows().items():
        table.to_csv(folder / f"{name}.csv", index=False)
    (folder / "model").mkdir()
    servers_part(model).save(part_file(folder / "model", "owner"))
    path = folder / "job.toml"
    path.write_text("\n".join(lines))
    return path


def play(
    monkeypatch: pytest.MonkeyPatch,
    jobs: Job | Mapping[str, Job],
    sent: dict[str, set[str]] | None = None,
    **instead: Any,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Serve in threads of this process; return what users got, and what those that failed said.

    `sent` is filled with the kinds of messages that each party sent; `instead` are programs played in place of honest
    roles, which take their party.
    """
    some = jobs if isinstance(jobs, Job) else next(iter(jobs.values()))
    roles = service_roles(some)
    channels, found, said = memory_channels(roles.of), {}, {}

    def connected(job, name, roles, verb, role, *, phase, service):
        peers = service.links(roles, job.settings()[0])[name]
        party = Party(name, job.name, job.system.name, channels[name], peers, timeout=20.0)
        try:
            return run_role(party, lambda: instead.get(name, role)(party))
        finally:
            if sent is not None:
                sent[name] = {entry.step for entry in party.transcript.entries if entry.direction == "sent"}

    def serve(name: str) -> None:
        job = some if isinstance(jobs, Job) else jobs.get(name, some)
        try:
            found[name] = serve_party(job, name, roles)
        except TreatyError as error:
            said[name] = str(error)
        finally:
            channels[name].close()

    with monkeypatch.context() as patch:
        patch.setattr(prediction, "connected", connected)
        threads = [threading.Thread(target=serve, args=(name,)) for name in roles.of]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(within(60))
    assert not any(thread.is_alive() for thread in threads)
    return {name: found[name] for name in ASKING if name in found}, said


def assert_right(model: treaty.GBDTClassifier, found: Mapping[str, Any], names: Any = ASKING) -> None:
    """Compare what users got with the plain model."""
    assert set(found) == set(names)
    for name in names:
        columns, rows = found[name].columns(), new_rows()[name]
        assert np.array_equal(columns["prediction"], model.predict(rows))
        assert np.array_equal(columns["probability_well"], model.predict_proba(rows)[:, 1])


# ---------------------------------------------------------------- right, and who learns what


@pytest.mark.parametrize("comparison", ["shamir", "additive"])
def test_users_get_the_models_predictions_and_everybody_a_report(tmp_path, monkeypatch, model, comparison):
    job = load_job(write_job(tmp_path, model, comparison=comparison))
    found, said = play(monkeypatch, job)
    assert said == {}
    assert_right(model, found)
    reports = {name: read_json(service_report_file(job, name), Report, FORMAT, name) for name in service_roles(job).of}
    assert set(reports) == {"owner", *EDGES, *ASKING}
    holders = EDGES if comparison == "shamir" else EDGES[:2]
    assert all(set(reports[name].sent) == set(holders) for name in ASKING)
    assert set(reports["owner"].sent) == set(EDGES)
    assert set(reports["ann"].learned) == {"server", "edge", "user"}
    assert [report.has_part for report in reports.values()] == [name == "owner" for name in reports]
    assert sorted(file.name for file in (tmp_path / "model").glob("*.queries")) == sorted(
        f"{edge}.queries" for edge in holders
    )


def test_users_of_a_job_are_those_with_rows_to_predict_wherever_they_come_from(tmp_path, model):
    path = write_job(tmp_path, model)
    roles = service_roles(load_job(path))
    assert roles.owners == list(ASKING)
    assert roles.having("edge") == list(EDGES)
    assert "notary" not in roles.of
    text = path.read_text()
    for name in ASKING:
        text = text.replace(f'predict_table = "{name}.csv"', "")
    path.write_text(text)
    assert service_roles(load_job(path)) is None
    path.write_text(text.replace('role = "authority"', 'role = "authority"\npredict_table = "ann.csv"'))
    with pytest.raises(ConfigError, match='predict_table of users and the server alone, got one of notary, role = "a'):
        service_roles(load_job(path))


# ---------------------------------------------------------------- limits over runs


def test_limits_are_counted_over_runs_in_the_store(tmp_path, monkeypatch, model):
    job = load_job(write_job(tmp_path, model, max_queries=20, comparison="shamir"))
    job = msgspec.structs.replace(job, store=str(tmp_path / "kept"))
    assert_right(model, play(monkeypatch, job)[0])
    found, said = play(monkeypatch, job)
    assert set(said) == {"ann"}
    assert "expected at most 8 rows to predict, got 12: 20 rows of a user are predicted by a model" in said["ann"]
    assert_right(model, found, ["ben", "cat"])
    for edge in EDGES:
        record = QueryRecord(queries_folder(tmp_path / "kept", edge))
        assert record.asked(model.parts_["pooled"].model_id) == {"ann": 12, "ben": 14, "cat": 10}


def test_a_lost_count_ends_the_prediction_before_rows_are_shared(tmp_path, monkeypatch, model):
    job = load_job(write_job(tmp_path, model))
    play(monkeypatch, job)
    (tmp_path / "model" / "tokyo.queries" / "queries").unlink()
    sent: dict[str, set[str]] = {}
    found, said = play(monkeypatch, job, sent)
    assert found == {}
    assert "treaty ledger reset" in said["tokyo"]
    assert all("its record of queries cannot be used" in said[name] for name in ("owner", "berlin", "ann"))
    assert not any("RowShares" in sent[name] for name in ASKING)
    done = CliRunner().invoke(app, ["ledger", "reset", str(tmp_path / "model" / "tokyo.queries"), "--yes"])
    assert done.exit_code == 0, done.output
    assert_right(model, play(monkeypatch, job)[0])


# ---------------------------------------------------------------- faults


def without_rows(party: Party) -> None:
    """Die as the predictions begin."""
    party.channel.close()
    raise TreatyError("gone")


def garbage(party: Party) -> None:
    """Send an array of no shape that anybody expects."""
    for edge in party.peers:
        party.send(edge, RowShares(secpred.Array.of(np.zeros((2, 2), np.int8)), 2))
    party.receive("berlin", PredictionTerms)


@pytest.mark.parametrize("wrong", [without_rows, garbage])
def test_a_user_that_dies_or_sends_garbage_ends_nobody_elses_predictions(tmp_path, monkeypatch, model, wrong):
    job = load_job(write_job(tmp_path, model))
    found, said = play(monkeypatch, job, ben=wrong)
    assert set(said) <= {"ben"}
    found.pop("ben", None)
    assert_right(model, found, ["ann", "cat"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.assign(shoe=1.0), "columns unknown from training, to be dropped: 'shoe'"),
        (lambda table: table.assign(**{table.columns[1]: "red"}), "has numbers in 0 rows, but 'red' in line 2"),
    ],
    ids=["a column more", "text for numbers"],
)
def test_a_user_with_wrong_columns_is_told_which_and_others_get_theirs(tmp_path, monkeypatch, model, change, words):
    job = load_job(write_job(tmp_path, model))
    change(new_rows()["ben"]).to_csv(tmp_path / "ben.csv", index=False)
    found, said = play(monkeypatch, job)
    assert set(said) == {"ben"}
    assert words in said["ben"]
    assert_right(model, found, ["ann", "cat"])


def test_a_user_whose_table_is_gone_is_told_so_and_others_get_theirs(tmp_path, monkeypatch, model):
    job = load_job(write_job(tmp_path, model))
    (tmp_path / "ben.csv").unlink()
    found, said = play(monkeypatch, job)
    assert set(said) == {"ben"}
    assert "ben.csv" in said["ben"]
    assert_right(model, found, ["ann", "cat"])


@pytest.mark.parametrize("lost", ["owner", "tokyo"])
def test_a_lost_server_or_edge_server_ends_the_prediction_and_is_named(tmp_path, monkeypatch, model, lost):
    job = load_job(write_job(tmp_path, model))
    found, said = play(monkeypatch, job, **{lost: without_rows})
    assert found == {}
    assert set(said) == set(service_roles(job).of)
    assert all(lost in said[name] for name in (*EDGES, "owner", "ann") if name != lost), said


@pytest.mark.parametrize("of", ["more rounds", "another system", "another party"])
def test_a_model_of_another_job_is_refused_before_rows_are_shared(tmp_path, monkeypatch, model, of):
    job = load_job(write_job(tmp_path, model, **({"n_estimators": 2} if of == "more rounds" else {})))
    if of == "another system":
        servers_part(model, bins=b"").save(part_file(job.output, "owner"))
    if of == "another party":
        part = servers_part(model)
        msgspec.structs.replace(part, party="north").save(part_file(job.output, "owner"))
    sent: dict[str, set[str]] = {}
    found, said = play(monkeypatch, job, sent)
    words = {
        "more rounds": "at most 2 rounds and depth 3, as the options say, got one of 3 rounds",
        "another system": 'expected a model of protocol "fedxgb" with its bins',
        "another party": "expected a model part of owner, got one of north",
    }
    assert found == {}
    assert words[of] in said["owner"]
    assert all("owner stopped the job" in said[edge] for edge in EDGES)
    assert not any("RowShares" in sent[name] for name in ASKING)
    assert set(said) == set(service_roles(job).of)


def note_training(folder: Path, name: str, model_id: str) -> None:
    """Write what a party notes about a training."""
    nothing: dict[str, Any] = {key: {} for key in ("versions", "options", "seconds", "waited", "sent", "learned")}
    report = Report(party=name, job="test", role="", ended="", has_part=False, model=model_id, **nothing)
    write_json(folder / f"{name}.report.json", report, FORMAT, name)


@pytest.mark.parametrize("who", ["tokyo", "ann"])
def test_who_helped_to_train_another_model_refuses_before_rows_are_shared(tmp_path, monkeypatch, model, who):
    job = load_job(write_job(tmp_path, model))
    note_training(tmp_path / "model", who, "b" * 32)
    sent: dict[str, set[str]] = {}
    found, said = play(monkeypatch, job, sent)
    assert f"expected model bbbbbbbb, in whose training {who} took part by its report" in said[who]
    assert "RowShares" not in sent[who]
    assert_right(model, found, [] if who == "tokyo" else ["ben", "cat"])


def test_a_report_of_the_same_model_is_served_and_none_is_warned_of(tmp_path, monkeypatch, model, caplog):
    job = load_job(write_job(tmp_path, model))
    for name in ("tokyo", "ann"):
        note_training(tmp_path / "model", name, model.parts_["pooled"].model_id)
    found, said = play(monkeypatch, job)
    assert said == {}
    assert_right(model, found)
    warned = [line.split()[0] for line in caplog.messages if "has no report of the job's training" in line]
    assert sorted(warned) == ["berlin", "oslo"]


def test_edge_servers_with_other_limits_refuse(tmp_path, monkeypatch, model):
    job = load_job(write_job(tmp_path, model))
    stricter = msgspec.structs.replace(job, own={**job.own, "max_queries": 10})
    found, said = play(monkeypatch, {"owner": job, "tokyo": stricter})
    assert found == {}
    assert "max_queries=10, to which tokyo consents, got 100 of the server" in said["tokyo"]


def test_the_servers_own_rows_are_predicted_before_it_waits_for_others(tmp_path, model):
    path = write_job(tmp_path, model)
    path.write_text(path.read_text().replace("[parties.owner]", '[parties.owner]\npredict_table = "ann.csv"'))
    with pytest.raises(ConfigError, match="to run as owner alone the job must name"):
        CliRunner().invoke(app, ["predict", str(path), "--as", "owner"], catch_exceptions=False)
    predicted = pd.read_csv(tmp_path / "model" / "owner.predictions.csv")["prediction"].to_numpy()
    assert np.array_equal(predicted, model.predict(new_rows()["ann"]))


def test_who_takes_no_part_is_told_who_does(tmp_path, model):
    path = write_job(tmp_path, model)
    with pytest.raises(
        ConfigError, match="notary takes no part in predictions: expected --as to be one of owner, berlin"
    ):
        CliRunner().invoke(app, ["predict", str(path), "--as", "notary"], catch_exceptions=False)


# ---------------------------------------------------------------- between processes


@pytest.mark.slow
def test_processes_of_all_roles_predict_and_count_and_a_killed_user_ends_nothing(tmp_path, model):
    path = write_job(tmp_path, model, apart=True, max_queries=20)
    others = ["owner", *EDGES, "ann", "cat"]
    for edge in EDGES:
        note_training(tmp_path / "model", edge, model.parts_["pooled"].model_id)

    def run(*dies: str) -> dict[str, tuple[int, str]]:
        return finish(
            {
                name: start(path, name, "predict", dies=("RowShares", 2, "") if name in dies else None)
                for name in [*others, "ben"]
            },
            120,
        )

    ended = run("ben")
    assert {name: ended[name] for name in others} == dict.fromkeys(others, (0, "")), ended
    assert ended["ben"][0] == -signal.SIGKILL
    for name in ("ann", "cat"):
        predicted = pd.read_csv(tmp_path / "model" / f"{name}.predictions.csv")
        rows = new_rows()[name]
        assert predicted["prediction"].tolist() == model.predict(rows).tolist()
        np.testing.assert_allclose(predicted["probability_well"], model.predict_proba(rows)[:, 1], rtol=1e-12)
    ended = run()
    assert (ended["ann"][0], ended["ben"], ended["cat"]) == (2, (0, ""), (0, ""))
    assert "ann: expected at most 8 rows to predict, got 12" in ended["ann"][1]
    asked = QueryRecord(queries_folder(tmp_path / "model", "tokyo")).asked(model.parts_["pooled"].model_id)
    assert asked == {"ann": 12, "ben": 7, "cat": 10}  # those of ben that not all edge servers got count nowhere


@pytest.mark.slow
def test_one_command_plays_all_roles_on_this_machine(tmp_path, model):
    path = write_job(tmp_path, model, comparison="additive", max_queries=11)
    done = CliRunner().invoke(app, ["predict", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "ben.predictions.csv" in done.stdout.replace("\n", "")
    assert "ann.predictions.csv" not in done.stdout.replace("\n", "")  # it asked for 12
    assert not (tmp_path / "model" / "ann.predictions.csv").exists()
    predicted = pd.read_csv(tmp_path / "model" / "cat.predictions.csv")
    assert predicted["prediction"].tolist() == model.predict(new_rows()["cat"]).tolist()
