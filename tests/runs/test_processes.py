"""Whole jobs between processes over mutual TLS, from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest

import treaty
from flat import flat, option_lines
from pace import within
from runs.job_files import (
    EACH_WITHIN,
    TREATY,
    finish,
    one_error,
    one_line,
    start,
    started_to_die,
    wait_for_rounds,
)
from tables import FAST_KEY, assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.errors import PeerLost
from treaty.models.checkpoints import load_checkpoint
from treaty.models.trees import load_part
from treaty.node.identity import make_keys
from treaty.runs import processes
from treaty.runs.job_files import load_job
from treaty.runs.party import train_party
from treaty.runs.prediction import find_part
from treaty.runs.processes import PORTS, free_ports
from treaty.runs.warm_up import compile_kernels


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels()


def write_job(folder: Path, *, rows: int = 300, trees: int = 3, alone: bool = False, **options: object) -> Path:
    """Write tables and a job of a clinic and two others; with `alone`, keys and addresses as well."""
    X, y = real_table("binary", rows=rows)
    tables = {"clinic": X.iloc[:, :4].assign(y=y), "lab": X.iloc[:, 4:8], "imaging": X.iloc[:, 8:]}
    chosen = {
        "n_estimators": trees,
        "insecure_test_key_bits": 512,
        "allow_insecure": True,
        "min_child_samples": 5,
        **options,
    }
    protocol, tables_of_options = option_lines(**chosen)
    lines = [
        'name = "test"',
        protocol,
        'active = "clinic"',
        'label = "y"',
        "timeout = 60",
        "reconnect = 2",
        "n_jobs = 1",
    ]
    ports = free_ports(len(tables))
    for (name, table), port in zip(tables.items(), ports, strict=True):
        table.assign(id=np.arange(len(table))).to_csv(folder / f"{name}.csv", index=False)
        lines += [f"[parties.{name}]", f'table = "{name}.csv"', f'predict_table = "{name}.csv"', 'drop = ["id"]']
        if alone:
            make_keys(folder, name)
            lines += [
                f'address = "127.0.0.1:{port}"',
                f'certificate = "{name}.cert.pem"',
                f'key = "{name}.key.pem"',
            ]
    (folder / "job.toml").write_text("\n".join([*lines, *tables_of_options]))
    return folder / "job.toml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the job of a finished training of three processes, and what the command printed."""
    job = write_job(tmp_path_factory.mktemp("trained"))
    return job, subprocess.run([*TREATY, "train", str(job)], capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def pooled() -> tuple[treaty.GBDTClassifier, dict[str, pd.DataFrame]]:
    """Return what `trained` must give, by training on one table, and the columns of each party."""
    X, y = real_table("binary", rows=300)
    tables = {"clinic": X.iloc[:, :4], "lab": X.iloc[:, 4:8], "imaging": X.iloc[:, 8:]}
    return treaty.GBDTClassifier(n_estimators=3, min_child_samples=5, max_bin=64).fit(tables, y), tables


@pytest.mark.always
def test_three_processes_train_and_say_what_they_sent_and_learned(trained):
    job, done = trained
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for what in ("rows, ", "MB sent"):
        assert [line.partition(":")[0] for line in lines if what in line] == ["clinic", "lab", "imaging"]
    report = json.loads((job.parent / "model" / "lab.report.json").read_text())
    assert report["sent"]["clinic"]["bytes"] > 0
    assert set(report["learned"]) == {"clinic", "lab", "imaging"}
    assert all("which is for tests alone: 512 bits" in " ".join(facts) for facts in report["learned"].values())
    written = [job.parent / "model" / f"{name}.report.json" for name in report["learned"]]
    assert {stat.S_IMODE(file.stat().st_mode) for file in written} == {0o600}


@pytest.mark.slow
def test_three_processes_predict_what_pooled_training_gives(trained, pooled):
    job, (model, tables) = trained[0], pooled
    out = job.parent / "out.parquet"
    subprocess.run([*TREATY, "predict", str(job), "--output", str(out)], check=True, capture_output=True)
    predicted = pd.read_parquet(out)
    np.testing.assert_array_equal(predicted["probability_1"], model.predict_proba(tables)[:, 1])
    np.testing.assert_array_equal(predicted["prediction"], model.predict(tables))


@pytest.mark.slow
def test_three_processes_explain_what_pooled_training_gives(trained, pooled):
    job, (model, tables) = trained[0], pooled
    subprocess.run([*TREATY, "explain", str(job), "--ending", "parquet"], check=True, capture_output=True)
    found = {name: pd.read_parquet(job.parent / "model" / f"{name}.contributions.parquet") for name in tables}
    for name in ("lab", "imaging"):
        assert list(found[name].columns) == list(tables[name].columns)
        np.testing.assert_allclose(found["clinic"][f"all of {name}"], found[name].sum(axis=1), atol=1e-9)
    np.testing.assert_allclose(found["clinic"].sum(axis=1), model.decision_function(tables), atol=1e-9)


@pytest.mark.slow
def test_an_estimator_over_tls_equals_the_pooled_one():
    """One of numbers: `test_processes_give_the_pooled_trees` in `test_objectives`."""
    X, y = real_table("multiclass", rows=150)
    X = with_gaps(with_categories(X))
    tables = cut(X, 2)
    weight = np.random.default_rng(0).random(len(y)) + 0.5
    options = {"n_estimators": 2, "min_child_samples": 3, "max_bin": 32}
    watched = [(tables, y)]
    pooled = treaty.GBDTClassifier(**options).fit(tables, y, sample_weight=weight, eval_set=watched)
    federated = flat(treaty.GBDTClassifier, transport="tls", **options, **FAST_KEY).fit(
        tables, y, sample_weight=weight, eval_set=watched
    )
    assert_same_trees(federated, pooled)
    assert federated.evals_result_ == pooled.evals_result_
    unseen = {
        k: t.assign(**{t.columns[0]: pd.Categorical(["new"] * len(t))}) if k == "p0" else t for k, t in tables.items()
    }
    np.testing.assert_array_equal(federated.predict(tables), pooled.predict(tables))
    with pytest.warns(UserWarning, match="have categories that training did not have, 'new'"):
        np.testing.assert_array_equal(federated.predict(unseen), pooled.predict(unseen))
    assert federated.communication_["p0 -> p1"]["bytes"] > 0


def test_parties_listen_at_ports_that_no_outgoing_connection_is_lent():
    ports = free_ports(40)
    assert len(set(ports)) == 40
    assert all(port in PORTS for port in ports)
    lent = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if lent.exists():
        first, last = map(int, lent.read_text().split())
        assert not set(PORTS) & set(range(first, last + 1))


@pytest.mark.slow
def test_a_killed_passive_party_ends_the_others_within_seconds_and_trees_stay(tmp_path):
    job = write_job(tmp_path, trees=2000, alone=True, rows=500)
    processes = {name: start(job, name) for name in ("imaging", "lab", "clinic")}
    kept = tmp_path / "model" / "clinic.checkpoint"
    wait_for_rounds(processes, kept, 3)
    os.kill(processes["lab"].pid, signal.SIGKILL)
    killed = time.monotonic()
    ended = finish(processes, EACH_WITHIN)
    assert time.monotonic() - killed < within(EACH_WITHIN)
    for name in ("clinic", "imaging"):
        code, said = ended[name]
        assert code == 1
        assert "lab" in one_line(said)
    trees = find_part(load_job(job), "clinic").forest.trees
    assert 3 <= len(trees) < 2000
    done = subprocess.run([*TREATY, "predict", str(job)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # rounds whose splits the killed party had not saved are left out
    predicted = pd.read_csv(tmp_path / "model" / "predictions.csv")
    _, y = real_table("binary", rows=500)
    assert np.mean(predicted["prediction"] == y) > 0.9


@pytest.mark.slow
def test_a_wrong_certificate_is_one_error_at_every_party(tmp_path):
    job = write_job(tmp_path, alone=True)
    (tmp_path / "stranger").mkdir()
    make_keys(tmp_path / "stranger", "lab")
    text = (
        job.read_text()
        .replace('"lab.cert.pem"', '"stranger/lab.cert.pem"')
        .replace('"lab.key.pem"', '"stranger/lab.key.pem"')
    )
    (tmp_path / "lab.toml").write_text(text)  # lab presents another certificate than the others pinned
    started = time.monotonic()
    processes = {name: start(job, name) for name in ("clinic", "imaging")}
    processes["lab"] = start(tmp_path / "lab.toml", "lab")
    ended = finish(processes, EACH_WITHIN + 5)  # starting the processes takes some of it
    assert time.monotonic() - started < within(EACH_WITHIN + 5)
    for name, (code, said) in ended.items():
        assert code == 1, (name, said)
        line = one_line(said)
        assert ("clinic" if name == "lab" else "lab") in line
    assert any("certificate" in said or "fingerprint" in said for _, said in ended.values())


@pytest.mark.slow
def test_one_class_of_labels_is_one_error_at_every_party(tmp_path):
    job = write_job(tmp_path, alone=True)
    clinic = pd.read_csv(tmp_path / "clinic.csv").assign(y=1)
    clinic.to_csv(tmp_path / "clinic.csv", index=False)
    ended = finish({name: start(job, name) for name in ("imaging", "lab", "clinic")}, EACH_WITHIN + 5)
    for name, (code, said) in ended.items():
        assert code == (2 if name == "clinic" else 1)
        assert ("class" if name == "clinic" else "clinic") in one_error(said)  # nobody else learns what is wrong
        assert name == "clinic" or "clinic" in said


@pytest.mark.slow
def test_differing_job_files_are_one_error_at_every_party(tmp_path):
    job = write_job(tmp_path, alone=True)
    (tmp_path / "other.toml").write_text(job.read_text().replace("n_estimators = 3", "n_estimators = 4"))
    processes = {name: start(job, name) for name in ("clinic", "imaging")}
    processes["lab"] = start(tmp_path / "other.toml", "lab")
    for name, (code, said) in finish(processes, EACH_WITHIN + 5).items():
        assert code == (1 if name == "imaging" else 2)  # whose file is that of its only peer
        assert "n_estimators = 3 at clinic, 4 at lab" in one_line(said)


@pytest.mark.slow
def test_a_failing_party_fails_the_whole_command_with_its_words(tmp_path):
    job = write_job(tmp_path)
    (tmp_path / "lab.csv").unlink()
    done = subprocess.run([*TREATY, "train", str(job)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    first = done.stderr.splitlines()[0]
    assert first.startswith("treaty: lab: expected a file at ")  # the party once, and before those who heard of it
    assert "lab.csv" in first
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_message_beyond_the_jobs_inbox_limit_is_named_at_every_party(tmp_path):
    job = write_job(tmp_path, encryption="lattice")
    job.write_text("inbox_limit = 1\n" + job.read_text())
    ended = subprocess.run([*TREATY, "train", str(job)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    for name in ("clinic", "lab", "imaging"):
        assert re.search(rf"{name}: .*expected at most 522240 bytes.*in the inbox_limit of clinic", ended.stderr)


@pytest.mark.slow
def test_a_party_that_says_much_does_not_stand_still(tmp_path, monkeypatch, caplog):
    """A pipe takes 64 KiB, then whoever writes to it waits for a reader."""
    job, start_process = load_job(write_job(tmp_path)), subprocess.Popen
    talk = [sys.executable, "-c", "import sys; sys.stderr.write('treaty: many words\\n' * 20_000)"]
    monkeypatch.setattr(processes.subprocess, "Popen", lambda _, **named: start_process(talk, **named))
    running = threading.Thread(target=processes.run_all, args=(job, "train"), daemon=True)
    running.start()
    running.join(within(EACH_WITHIN))
    assert not running.is_alive()
    assert "lab: many words" in caplog.text


def started_by(process: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see the processes started")
@pytest.mark.parametrize("by", [signal.SIGHUP, signal.SIGKILL])  # SIGTERM is taken as SIGHUP is
def test_ending_the_command_ends_the_parties_it_started_and_leaves_no_key(tmp_path, monkeypatch, by):
    job = write_job(tmp_path, trees=4000)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    process = subprocess.Popen([*TREATY, "train", str(job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_rounds({"all": process}, tmp_path / "model" / "clinic.checkpoint", 1)
    begun = started_by(process)
    assert len(begun) == 3
    process.send_signal(by)
    assert process.wait(within(EACH_WITHIN)) == (-by if by == signal.SIGKILL else 128 + by)
    process.communicate()
    deadline = time.monotonic() + within(EACH_WITHIN)
    while any(Path(f"/proc/{pid}/exe").exists() for pid in begun):
        assert time.monotonic() < deadline, "a party goes on without the command that started it"
        time.sleep(0.05)
    assert not list((tmp_path / "temporary").iterdir())
    assert load_checkpoint(tmp_path / "model" / "clinic.checkpoint").rounds >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "words"),
    [
        (signal.SIGINT, "lab stopped the job: it was interrupted by its user"),
        (signal.SIGTERM, "lab stopped the job: its process was asked to end"),
    ],
)
def test_a_party_that_is_ended_by_a_signal_says_farewell(tmp_path, by, words):
    job = write_job(tmp_path, trees=200, alone=True)
    dies = {"lab": ("", 6, "CheckpointReceipt")}
    processes = {name: start(job, name, dies=dies.get(name), by=by) for name in ("imaging", "lab", "clinic")}
    ended = finish(processes, 60)
    assert ended["lab"][0] == 128 + by
    assert "Traceback" not in ended["lab"][1]
    assert words in one_line(ended["clinic"][1])
    assert words in one_line(ended["imaging"][1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("active = ", "activ = "), ["activ"]),
        (('active = "clinic"', 'active = "nobody"'), ["nobody", "clinic"]),
        (("n_estimators = 3", 'n_estimators = "many"'), ["n_estimators", "many"]),
        (("n_estimators = 3", "n_trees = 3"), ["n_trees"]),
        (('name = "test"', "name = "), ["job.toml"]),
    ],
    ids=["unknown field", "unknown party", "wrong type", "unknown option", "no TOML"],
)
def test_a_wrong_job_file_says_what_is_wrong(tmp_path, change, words):
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace(*change))
    with pytest.raises(treaty.ConfigError) as caught:
        load_job(job)
    assert all(word in str(caught.value) for word in words)
    assert len(str(caught.value).splitlines()) == 1


def test_a_wrong_job_file_is_one_line_of_the_command(tmp_path):
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("n_estimators = 3", "n_trees = 3"))
    done = subprocess.run([*TREATY, "train", str(job)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "n_trees" in one_line(done.stderr)


def test_a_party_refuses_its_key_file_if_others_can_read_it(tmp_path):
    job = load_job(write_job(tmp_path, alone=True))
    (tmp_path / "lab.key.pem").chmod(0o644)
    with pytest.raises(treaty.ConfigError, match=r"lab\.key\.pem; run chmod 600 on it"):
        train_party(job, "lab")


def test_a_cluster_begins_before_the_party_connects_and_ends_when_that_fails(tmp_path, monkeypatch):
    """Among the threads of connections Ray's processes would be forked, and abort now and then."""
    job, seen = load_job(write_job(tmp_path, alone=True)), []

    @contextmanager
    def opened(_):
        seen.append("begun")
        try:
            yield None
        finally:
            seen.append("ended")

    def connected(*_, **__):
        seen.append("connected")
        raise PeerLost("clinic", "gone")

    monkeypatch.setattr("treaty.runs.party.opened", opened)
    monkeypatch.setattr("treaty.runs.party.connected", connected)
    with pytest.raises(PeerLost):
        train_party(job, "lab")
    assert seen == ["begun", "connected", "ended"]


@pytest.mark.slow
def test_keys_are_made_once_and_shown_by_fingerprint(tmp_path):
    command = [*TREATY, "keys", "new", "bank", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"SHA256:", done.stdout)
    assert (tmp_path / "bank.key.pem").stat().st_mode & 0o077 == 0
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "bank.key.pem" in one_line(again.stderr)


@pytest.mark.slow
def test_help_names_every_command():
    done = subprocess.run([*TREATY, "--help"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in ("demo", "train", "predict", "keys"))


def test_job_files_hold_plain_data_only(tmp_path):
    job = load_job(write_job(tmp_path))
    assert msgspec.json.decode(msgspec.json.encode(job), type=type(job)) == job


@pytest.mark.slow
def test_a_failing_rerun_leaves_the_finished_model(trained, tmp_path):
    shutil.copytree(trained[0].parent, tmp_path, dirs_exist_ok=True)
    job = tmp_path / "job.toml"
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").glob("*.part")}
    assert len(before) == 3
    (tmp_path / "lab.csv").write_text("id,a,b\n1,1,2\n")  # another number of rows
    done = subprocess.run([*TREATY, "train", str(job)], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "training rows" in done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").glob("*.part*")} == before


@pytest.mark.slow
def test_other_parties_are_not_told_a_bad_tables_columns_or_files(tmp_path):
    job = write_job(tmp_path, alone=True)
    lab = pd.read_csv(tmp_path / "lab.csv").assign(SECRET_COLUMN=pd.Timestamp("2026-01-01"))
    lab.to_parquet(tmp_path / "lab.parquet")
    job.write_text(job.read_text().replace('"lab.csv"', '"lab.parquet"'))
    ended = finish({name: start(job, name) for name in ("imaging", "lab", "clinic")}, 30)
    assert "SECRET_COLUMN" in one_error(ended["lab"][1])
    for name in ("clinic", "imaging"):
        assert "lab" in one_line(ended[name][1])
        assert "SECRET_COLUMN" not in ended[name][1]
        assert "parquet" not in ended[name][1]


@pytest.mark.slow
def test_finished_trees_survive_a_killed_process_of_fit(monkeypatch):
    X, y = real_table("binary")
    tables = cut(X, 2)
    started_to_die(monkeypatch, "p1", ("", 6, "CheckpointReceipt"))
    model = flat(treaty.GBDTClassifier, transport="tls", n_estimators=5000, **FAST_KEY)
    with pytest.raises(treaty.TreatyError, match=r"p1: killed by signal 9|p1 is lost"):
        model.fit(tables, y)
    assert 1 <= len(model.parts_["p0"].forest.trees) < 5000
    assert np.mean(model.predict(tables) == y) > 0.85


@pytest.mark.slow
def test_a_party_that_crashes_says_where(monkeypatch):
    X, y = real_table("binary")
    started_to_die(monkeypatch, "p1", ("", 2, ""), by=signal.SIGSEGV)
    with pytest.raises(treaty.TreatyError, match=r"p1: killed by signal 11, after\n(.*\n)*.*dying_party\.py"):
        flat(treaty.GBDTClassifier, transport="tls", n_estimators=2, **FAST_KEY).fit(cut(X, 2), y)


@pytest.mark.slow
def test_an_interrupt_ends_a_fit_in_threads_within_seconds(tmp_path):
    script = tmp_path / "fit.py"
    script.write_text(
        "import numpy as np, treaty\n"
        "rng = np.random.default_rng(0); X = rng.normal(size=(2000, 4)); y = (X[:, 0] > 0).astype(int)\n"
        "print('begun', flush=True)\n"
        "protocol = treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True)\n"
        "treaty.GBDTClassifier(protocol, n_estimators=100000).fit({'a': X[:, :2], 'b': X[:, 2:]}, y)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=within(EACH_WITHIN))
    assert "KeyboardInterrupt" in said


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [False, True])
def test_a_killed_training_resumes_to_the_identical_model(tmp_path, cluster):
    victim = "lab"
    options = {
        "trees": 16,
        "rows": 500,
        "subsample": 0.8,
        "random_state": 3,
        "insecure_test_key_bits": 1536,
        "allow_insecure": True,
    }
    job = write_job(tmp_path, alone=True, **options)
    if cluster:
        pytest.importorskip("ray", reason="Ray is not installed: it has no wheel for this Python yet")
        job.write_text(job.read_text().replace("[parties.lab]", '[parties.lab]\ncluster = "ray"'))
    dies = {victim: ("", 8, "CheckpointReceipt")}
    processes = {name: start(job, name, dies=dies.get(name)) for name in ("imaging", "lab", "clinic")}
    kept = tmp_path / "model" / "clinic.checkpoint"
    assert processes[victim].wait(within(60)) == -signal.SIGKILL
    codes = {name: code for name, (code, _) in finish(processes, EACH_WITHIN).items()}
    assert codes[victim] == -signal.SIGKILL
    assert 1 <= load_checkpoint(kept).rounds < 16
    begun = load_checkpoint(kept).part.model_id
    processes = {name: start(job, name) for name in ("imaging", "lab")}
    processes["clinic"] = start(job, "clinic", resume=True)
    for name, (code, said) in finish(processes, 60).items():
        assert (code, said) == (0, ""), (name, said)
    parts = {name: load_part(tmp_path / "model" / f"{name}.part") for name in processes}
    assert {part.model_id for part in parts.values()} == {begun}
    assert not kept.exists()
    (tmp_path / "whole").mkdir()
    whole = write_job(tmp_path / "whole", **options)
    subprocess.run([*TREATY, "train", str(whole)], check=True, capture_output=True)
    for name, part in parts.items():
        expected = load_part(tmp_path / "whole" / "model" / f"{name}.part")
        assert repr(part.splits) == repr(expected.splits)
        assert part.forest is None or part.forest.trees == expected.forest.trees


def write_unaligned(folder: Path, *, trees: int = 3, alone: bool = False, **options: object) -> tuple[Path, dict]:
    """Write tables that hold different rows in different orders, told apart by ids; return the job and the tables."""
    job = write_job(folder, trees=trees, alone=alone, rows=400, **options)
    rng = np.random.default_rng(8)
    tables = {}
    for name, column in (("clinic", "patient"), ("lab", "patient"), ("imaging", "case")):
        rows = rng.permutation(400)[:370]
        table = pd.read_csv(folder / f"{name}.csv").drop(columns="id").iloc[rows]
        tables[name] = table.assign(**{column: [f"patient-{row:04d}" for row in rows]})
        tables[name].to_csv(folder / f"{name}.csv", index=False)
    text = job.read_text().replace('drop = ["id"]\n', "").replace("[parties.imaging]", '[parties.imaging]\nid = "case"')
    job.write_text(f'{text}\n[align]\non = "patient"\nlog = "runs"\n')
    return job, {name: table.set_index(table.columns[-1]) for name, table in tables.items()}


@pytest.mark.slow
def test_a_job_with_ids_aligns_trains_and_predicts_like_the_joined_table(tmp_path):
    job, tables = write_unaligned(tmp_path)
    subprocess.run([*TREATY, "train", str(job)], capture_output=True, check=True)
    subprocess.run([*TREATY, "predict", str(job)], check=True, capture_output=True)
    subprocess.run([*TREATY, "explain", str(job)], check=True, capture_output=True)
    predicted = pd.read_csv(tmp_path / "model" / "predictions.csv")
    assert list(predicted.columns) == ["patient", "prediction", "probability_0", "probability_1"]
    joined = pd.concat(list(tables.values()), axis=1, join="inner")
    assert set(predicted["patient"]) == set(joined.index)
    joined = joined.loc[predicted["patient"]]
    pooled = treaty.GBDTClassifier(n_estimators=3, min_child_samples=5, max_bin=64).fit(
        joined.drop(columns="y"), joined["y"]
    )
    np.testing.assert_array_equal(predicted["probability_1"], pooled.predict_proba(joined.drop(columns="y"))[:, 1])
    lab = pd.read_csv(tmp_path / "model" / "lab.contributions.csv")
    assert list(lab.columns) == ["patient", *tables["lab"].columns]
    report = json.loads((tmp_path / "model" / "lab.report.json").read_text())
    assert "alignment" in report["seconds"]
    assert (report["rows"], report["own_rows"]) == (len(joined), 370)
    assert any("all parties hold" in fact for fact in report["learned"]["lab"])
    assert (tmp_path / "runs" / "lab.runs").exists()
    assert not list((tmp_path / "model").glob("*.rows"))  # the next training aligns anew


@pytest.mark.slow
def test_a_resumed_job_keeps_its_alignment(tmp_path):
    options = {"trees": 16, "insecure_test_key_bits": 1536, "allow_insecure": True}
    job, _ = write_unaligned(tmp_path, alone=True, **options)
    dies = {"imaging": ("", 6, "CheckpointReceipt")}
    processes = {name: start(job, name, dies=dies.get(name)) for name in ("imaging", "lab", "clinic")}
    kept = tmp_path / "model" / "clinic.checkpoint"
    assert processes["imaging"].wait(within(60)) == -signal.SIGKILL
    finish(processes, EACH_WITHIN)
    begun = load_checkpoint(kept)
    processes = {name: start(job, name) for name in ("imaging", "lab")}
    processes["clinic"] = start(job, "clinic", resume=True)
    for name, (code, said) in finish(processes, 60).items():
        assert (code, said) == (0, ""), (name, said)
    forest = load_part(tmp_path / "model" / "clinic.part").forest
    assert forest.trees[: begun.rounds] == begun.part.forest.trees[: begun.rounds]
    assert len(forest.trees) == 16


@pytest.mark.slow
def test_a_table_without_the_id_column_is_named_at_its_party_alone(tmp_path):
    job, _ = write_unaligned(tmp_path, alone=True)
    job.write_text(job.read_text().replace('id = "case"', 'id = "case_number"'))
    ended = finish({name: start(job, name) for name in ("imaging", "lab", "clinic")}, 30)
    assert "expected a column 'case_number' of ids" in one_error(ended["imaging"][1])
    for name in ("clinic", "lab"):
        assert "imaging" in one_line(ended[name][1])
        assert "case_number" not in ended[name][1]


@pytest.mark.slow
def test_an_interrupted_alignment_is_not_put_on_other_ids(tmp_path):
    job, _ = write_unaligned(tmp_path, alone=True, trees=2000)
    processes = {name: start(job, name) for name in ("imaging", "lab", "clinic")}
    kept = tmp_path / "model" / "clinic.checkpoint"
    wait_for_rounds(processes, kept, 0)
    os.kill(processes["clinic"].pid, signal.SIGKILL)
    finish(processes, EACH_WITHIN)
    lab = pd.read_csv(tmp_path / "lab.csv")
    lab.sort_values("patient").to_csv(tmp_path / "lab.csv", index=False)
    processes = {name: start(job, name) for name in ("imaging", "lab")}
    processes["clinic"] = start(job, "clinic", resume=True)
    ended = finish(processes, 60)
    assert "restore the table, or start again without --resume" in one_line(ended["lab"][1])
    for name in ("clinic", "imaging"):
        assert "its ids have changed" in one_line(ended[name][1])
