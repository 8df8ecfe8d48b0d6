"""Jobs between holders of rows: apart with their own files, killed and resumed, wrong files, local prediction."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import treaty
from flat import flat, option_lines
from pace import within
from runs.job_files import (
    EACH_WITHIN,
    TREATY,
    finish,
    one_line,
    start,
    started_to_die,
    train_in_threads,
)
from tables import real_table, with_gaps
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.messaging.certificates import make_identity
from treaty.models.checkpoints import load_checkpoint
from treaty.models.trees import load_part
from treaty.node.identity import make_keys
from treaty.runs.job_files import load_job
from treaty.runs.processes import free_ports
from treaty.runs.report import load_reports
from treaty.runs.warm_up import compile_kernels
from treaty.systems import find_system

MEMBERS = ("north", "south", "east")
OPTIONS = {"min_child_samples": 5, "max_bin": 16}
LACKS = "east: column 'mean area' is missing in all rows, for the table lacks it\n"
"""What east is warned of."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels(find_system("federboost-horizontal"))


def rows_of_each() -> dict[str, pd.DataFrame]:
    """Deal a table out by row; the east has rows of one class alone, and lacks a column."""
    X, y = real_table("binary", rows=300)
    X = with_gaps(X).assign(y=y)
    east = X[(X.index % 3 == 2) & (X["y"] == 1)].drop(columns=X.columns[3])
    return {"north": X[X.index % 3 == 0], "south": X[X.index % 3 == 1], "east": east}


def fitted(lead: str = "north", **options: object) -> treaty.GBDTClassifier:
    rows = {name: (table.drop(columns="y"), table["y"]) for name, table in rows_of_each().items()}
    model = flat(treaty.GBDTClassifier, "federboost-horizontal", active=lead, n_jobs=1, **OPTIONS, **options)
    return model.fit(rows)


def write_jobs(folder: Path, *, lead: str = "north", trees: int = 3, **options: object) -> dict[str, Path]:
    """Write everybody's folder: own copy of the job, own rows and key, all certificates."""
    names = list(dict.fromkeys([*MEMBERS, lead]))
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    for name in names:
        make_keys(folder / name, name)
    found = {}
    for name in names:
        protocol, given = option_lines("federboost-horizontal", **{"n_estimators": trees, **OPTIONS, **options})
        lines = [
            'name = "test"',
            protocol,
            f'active = "{lead}"',
            'label = "y"',
            "timeout = 60",
            "reconnect = 2",
            "n_jobs = 1",
            *given,
        ]
        for other in names:
            lines += [
                f"[parties.{other}]",
                f'address = "127.0.0.1:{ports[other]}"',
                f'certificate = "{other}.cert.pem"',
            ]
            lines += ['table = "rows.csv"'] if other in MEMBERS else []
            lines += [f'key = "{name}.key.pem"', 'predict_table = "rows.csv"'] if other == name else []
            certificate = (folder / other / f"{other}.cert.pem").read_bytes()
            (folder / name / f"{other}.cert.pem").write_bytes(certificate)
        rows = rows_of_each().get(name)
        if rows is not None:
            rows.to_csv(folder / name / "rows.csv", index=False)
        found[name] = folder / name / "job.toml"
        found[name].write_text("\n".join(lines))
    return found


def assert_whole_model(jobs: dict[str, Path], expected: treaty.GBDTClassifier) -> None:
    """Compare every party's part with the model the estimator has."""
    model = expected.parts_["pooled"]
    assert any(len(tree.left) > 1 for tree in model.forest.trees)
    for name, job in jobs.items():
        part = load_part(job.parent / "model" / f"{name}.part")
        assert part.forest.trees == model.forest.trees, name
        assert repr(part.splits) == repr(model.splits), name
        assert part.forest.classes == model.forest.classes == [0, 1]


# ---------------------------------------------------------------- between processes


@pytest.mark.slow
def test_parties_apart_have_the_estimators_model_with_a_leader_without_data(tmp_path):
    of_each = write_jobs(tmp_path, lead="server")
    text = of_each["server"].read_text().replace('predict_table = "rows.csv"', 'eval_tables = ["eval.csv"]')
    of_each["server"].write_text(text)
    rows_of_each()["south"].to_csv(tmp_path / "server" / "eval.csv", index=False)
    for name, (code, said) in finish({name: start(job, name) for name, job in of_each.items()}, 60).items():
        assert (code, said) == (0, LACKS if name == "east" else ""), (name, said)
    expected = fitted("server", n_estimators=3)
    assert_whole_model(of_each, expected)
    assert len(load_part(tmp_path / "server" / "model" / "server.part").forest.history["eval_0"]["logloss"]) == 3
    report = json.loads((tmp_path / "south" / "model" / "south.report.json").read_text())
    assert report["sent"]["server"]["by_type"]["MaskedInput"] > 0
    assert set(report["learned"]) == {"server", *MEMBERS}


@pytest.mark.slow
def test_a_killed_participant_ends_the_others_and_the_resumed_model_is_the_same(tmp_path):
    victim, sent = "east", random.randint(2, 40)  # after the one that says its first round is kept
    options = {"trees": 40, "subsample": 0.8, "colsample_bytree": 0.7, "random_state": 3}
    of_each = write_jobs(tmp_path, **options)
    dies = {victim: ("", sent, "CheckpointReceipt")}
    processes = {name: start(job, name, dies=dies.get(name)) for name, job in of_each.items()}
    kept = tmp_path / "north" / "model" / "north.checkpoint"
    assert processes[victim].wait(within(60)) == -signal.SIGKILL
    killed = time.monotonic()
    ended = finish(processes, EACH_WITHIN)
    assert time.monotonic() - killed < within(EACH_WITHIN)
    for name in ("north", "south"):
        assert ended[name][0] == 1, (sent, ended)
        assert victim in one_line(ended[name][1])
    begun = load_checkpoint(kept)
    assert 1 <= begun.rounds < 40
    processes = {name: start(job, name, resume=name == "north") for name, job in of_each.items()}
    for name, (code, said) in finish(processes, 60).items():
        assert (code, said) == (0, LACKS if name == "east" else ""), (sent, name, said)
    assert load_part(tmp_path / "south" / "model" / "south.part").model_id == begun.part.model_id
    assert not kept.exists()
    options["n_estimators"] = options.pop("trees")
    assert_whole_model(of_each, fitted(**options))


@pytest.mark.slow
def test_a_participant_refuses_the_key_of_one_whose_certificate_is_another(tmp_path):
    of_each = write_jobs(tmp_path)
    (tmp_path / "south" / "east.cert.pem").write_bytes(make_identity("east").certificate)  # no link, so no TLS, to it
    ended = finish({name: start(job, name) for name, job in of_each.items()}, EACH_WITHIN + 15)
    assert "signed by east with the key of its certificate, got no such signature" in one_line(ended["south"][1])
    for name in ("north", "east"):
        assert ended[name][0] == 1
        assert "south" in one_line(ended[name][1].removeprefix(LACKS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the job of a finished training of three processes that one command started, and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    for name, rows in rows_of_each().items():
        rows.to_csv(folder / f"{name}.csv", index=False)
    protocol, given = option_lines("federboost-horizontal", n_estimators=3, **OPTIONS)
    lines = ['name = "test"', protocol, 'active = "north"', 'label = "y"', "n_jobs = 1", *given]
    for name in MEMBERS:
        lines += [f"[parties.{name}]", f'table = "{name}.csv"', f'predict_table = "{name}.csv"']
    job = folder / "job.toml"
    job.write_text("\n".join(lines))
    return job, subprocess.run([*TREATY, "train", str(job)], capture_output=True, text=True, check=True)


def command(*words: object) -> None:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0


@pytest.mark.slow
def test_one_command_trains_and_prints_what_was_learned_and_warned_of(trained):
    job, done = trained
    assert "the search for bin edges separated" in done.stdout
    assert LACKS in done.stderr  # what a process warns of, though all ended well
    assert load_reports(load_job(job))["north"].spent


@pytest.mark.slow
def test_each_predicts_its_own_rows_the_same_together_and_alone(trained, tmp_path):
    job, _ = trained
    command("predict", job, "--output", tmp_path / "out.parquet")
    command("predict", job, "--as", "south")
    expected = fitted(n_estimators=3)
    for name, table in rows_of_each().items():
        p = expected.predict_proba(table.drop(columns="y").reindex(columns=expected.feature_names_in_))
        predicted = pd.read_parquet(tmp_path / f"{name}.out.parquet")
        np.testing.assert_array_equal(predicted["probability_1"], p[:, 1])
        if name == "south":
            alone = pd.read_csv(job.parent / "model" / "south.predictions.csv")
            np.testing.assert_array_equal(alone["probability_1"], p[:, 1])


@pytest.mark.slow
def test_contributions_of_a_model_that_all_have_are_refused(trained):
    with pytest.raises(ConfigError, match="which a federboost-horizontal model does not have"):
        command("explain", trained[0])


@pytest.mark.slow
def test_an_estimator_over_tls_equals_the_one_in_threads():
    X, y = real_table("multiclass", rows=120)
    weight = np.random.default_rng(0).random(len(y)) + 0.5
    parts = np.array_split(np.arange(len(y)), 3)
    rows = {name: (X.iloc[index], y[index] + 7, weight[index]) for name, index in zip(MEMBERS, parts, strict=True)}
    options = {"n_estimators": 2, "n_jobs": 1, **OPTIONS}
    threads, processes = (
        treaty.GBDTClassifier("federboost-horizontal", transport=transport, **options).fit(rows, eval_set=(X, y + 7))
        for transport in ("memory", "tls")
    )
    ours, theirs = threads.parts_["pooled"], processes.parts_["pooled"]
    assert any(len(tree.left) > 1 for tree in ours.forest.trees)
    assert theirs.forest.trees == ours.forest.trees
    assert processes.evals_result_ == threads.evals_result_
    np.testing.assert_array_equal(processes.predict(X), threads.predict(X))
    assert processes.communication_["south -> north"]["by_type"]["MaskedInput"] > 0


@pytest.mark.slow
def test_a_training_in_processes_goes_on_without_one_that_is_killed(monkeypatch, caplog):
    X, y = real_table("binary")
    parts = np.array_split(np.arange(len(y)), 4)
    rows = {f"p{k}": (X.iloc[index], y[index]) for k, index in enumerate(parts)}
    started_to_die(monkeypatch, "p2", ("MaskedInput", 30, ""))
    model = treaty.GBDTClassifier(
        treaty.FederBoostHorizontal(dropout="accept"), transport="tls", n_estimators=3, n_jobs=1, **OPTIONS
    ).fit(rows)
    assert model.n_iter_ == 3
    assert np.mean(model.predict(X) == y) > 0.9
    assert "continued without 1 parties\np2: killed by signal 9" in caplog.text


# ---------------------------------------------------------------- between threads


def train_all(of_each: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return train_in_threads(monkeypatch, {name: load_job(path) for name, path in of_each.items()})


def change_rows(path: Path, **columns: object) -> None:
    rows = path.parent / "rows.csv"
    table = pd.read_csv(rows).assign(**columns)
    table.drop(columns=[name for name, value in columns.items() if value is None]).to_csv(rows, index=False)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"SECRET": 1.0}, "'SECRET' as well"),
        ({"mean radius": "much"}, "column 'mean radius': expected numbers"),
        ({"y": None}, "a column 'y'"),
        ({"y": "ill"}, "different kinds"),
    ],
    ids=["unknown column", "another kind", "no label", "labels of another kind"],
)
def test_a_wrong_table_is_named_at_its_party_alone(tmp_path, monkeypatch, columns, words):
    of_each = write_jobs(tmp_path)
    change_rows(of_each["south"], **columns)
    said = train_all(of_each, monkeypatch)
    assert said.keys() == set(MEMBERS)
    assert words in said["south"]
    for name in ("north", "east"):
        assert not set(columns) & set(said[name].replace("'", " ").split())
        assert "rows.csv" not in said[name]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"many": [[1, 2]]}, "south: column 'many': list<"),
        ({"y": [[1]]}, "south: column 'y': expected labels of numbers, booleans or text, got list"),
        ({"y": [b"ill"]}, "south: column 'y': expected labels of numbers, booleans or text, got bytes; decode them"),
    ],
    ids=["list", "list labels", "bytes labels"],
)
def test_cells_no_table_may_have_are_one_error_at_their_party(tmp_path, monkeypatch, columns, words):
    of_each = write_jobs(tmp_path)
    table = pd.read_csv(tmp_path / "south" / "rows.csv")
    table.assign(**{name: cell * len(table) for name, cell in columns.items()}).to_parquet(
        tmp_path / "south" / "rows.parquet"
    )
    text = of_each["south"].read_text()
    of_each["south"].write_text(text.replace('table = "rows.csv"', 'table = "rows.parquet"'))
    said = train_all(of_each, monkeypatch)
    assert said.keys() == set(MEMBERS)
    assert said["south"].startswith(words)
    assert "\n" not in said["south"]


def test_differing_job_files_are_one_error_at_every_party(tmp_path, monkeypatch):
    of_each = write_jobs(tmp_path)
    of_each["east"].write_text(of_each["east"].read_text().replace("max_bin = 16", "max_bin = 8"))
    said = train_all(of_each, monkeypatch)
    assert said.keys() == set(MEMBERS)
    assert all(word in text for word in ("max_bin", "8", "16", "north", "east") for text in said.values())


def test_the_leader_may_watch_labels_it_has_no_rows_of(tmp_path, monkeypatch):
    of_each = write_jobs(tmp_path, lead="east")
    text = of_each["east"].read_text()
    of_each["east"].write_text(text.replace('predict_table = "rows.csv"', 'eval_tables = ["one.csv", "both.csv"]'))
    north = rows_of_each()["north"]
    watched = {"one": north[north["y"] == 1], "both": north}
    for name, rows in watched.items():
        rows.to_csv(tmp_path / "east" / f"{name}.csv", index=False)
    assert train_all(of_each, monkeypatch) == {}
    expected = fitted("east", n_estimators=3)
    assert_whole_model(of_each, expected)
    history = load_part(tmp_path / "east" / "model" / "east.part").forest.history
    for rows, losses in zip(watched.values(), history.values(), strict=True):
        p = expected.predict_proba(rows.drop(columns="y"))[:, 1]
        assert losses["logloss"][-1] == pytest.approx(-np.mean(np.log(np.where(rows["y"] == 1, p, 1 - p))))


# ---------------------------------------------------------------- refused before anything starts


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('table = "rows.csv"\n[parties.east]', "[parties.east]", "none of south"),
        ("[boosting]", '[align]\non = "id"\n[boosting]', "no \\[align\\]"),
        ('"federboost-horizontal"', '"nobody\'s"', "expected protocol to be one of pooled, secureboost"),
    ],
    ids=["no table", "aligned", "no protocol of jobs"],
)
def test_a_job_that_cannot_be_is_refused_in_one_line(tmp_path, old, new, words):
    job = write_jobs(tmp_path)["north"]
    assert old in job.read_text()
    job.write_text(job.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["train", str(job), "--as", "north"], catch_exceptions=False)
