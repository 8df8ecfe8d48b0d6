"""Jobs of users, edge servers, server and authority: apart over TLS, some of them killed, wrong files, prediction."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import treaty
from flat import flat, option_lines
from pace import within
from runs.job_files import start
from tables import real_table, with_categories, with_gaps
from treaty import files
from treaty.cli import jobs as cli
from treaty.cli.main import app
from treaty.errors import ConfigError, TreatyError
from treaty.messaging import party
from treaty.models.checkpoints import load_checkpoint
from treaty.node.identity import make_keys
from treaty.runs import processes
from treaty.runs.job_files import load_job
from treaty.runs.party import train_party
from treaty.runs.prediction import find_part
from treaty.runs.processes import free_ports
from treaty.runs.report import load_reports
from treaty.runs.warm_up import compile_kernels
from treaty.systems import find_system
from treaty.systems.fedxgb import noisy

EDGES = ("berlin", "tokyo")
USERS = [f"user{k}" for k in range(6)]
OPTIONS = {"min_child_samples": 2, "max_bin": 8, "expose": "model"}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels(find_system("fedxgb"))


def rows() -> pd.DataFrame:
    """Return rows with text in some columns, gaps and a label that is text."""
    X, y = real_table("binary", rows=150)
    return with_gaps(with_categories(X)).assign(y=np.where(y == 1, "well", "ill"))


def rows_of_each(users: list[str] = USERS) -> dict[str, pd.DataFrame]:
    table = rows()
    return {name: table[table.index % len(users) == k] for k, name in enumerate(users)}


def write_job(
    folder: Path,
    *,
    edges: tuple[str, ...] = EDGES,
    users: list[str] = USERS,
    trees: int = 3,
    timeout: int = 60,
    **options: object,
) -> Path:
    """Write one job file that serves all parties of this machine, their rows, keys and certificates."""
    roles = {"owner": "server", **dict.fromkeys(edges, "edge"), "notary": "authority"}
    names = [*roles, *users]
    protocol, given = option_lines("fedxgb", **{"n_estimators": trees, **OPTIONS, **options})
    lines = [
        'name = "test"',
        protocol,
        'active = "owner"',
        'label = "y"',
        f"timeout = {timeout}",
        "reconnect = 2",
        "n_jobs = 1",
        *given,
    ]
    for name, port in zip(names, free_ports(len(names)), strict=True):
        make_keys(folder, name)
        lines += [f"[parties.{name}]", f'address = "127.0.0.1:{port}"']
        lines += [f'certificate = "{name}.cert.pem"', f'key = "{name}.key.pem"']
        lines += [f'table = "{name}.csv"'] if name in users else []
        lines += [f'role = "{roles[name]}"'] if roles.get(name) in ("edge", "authority") else []
        lines += ['eval_tables = ["owner.csv"]', 'predict_table = "new.csv"'] if name == "owner" else []
    for name, table in rows_of_each(users).items():
        table.to_csv(folder / f"{name}.csv", index=False)
    rows().to_csv(folder / "owner.csv", index=False)
    rows().drop(columns="y").to_csv(folder / "new.csv", index=False)
    path = folder / "job.toml"
    path.write_text("\n".join(lines))
    return path


@functools.cache
def fitted(**options: object) -> treaty.GBDTClassifier:
    """Return the estimator's model of the same rows."""
    given = {name: (table.drop(columns="y"), table["y"]) for name, table in rows_of_each().items()}
    return flat(treaty.GBDTClassifier, "fedxgb", n_jobs=1, **OPTIONS, **options).fit(given)


def play(
    path: Path, *, without: Collection[str] = (), resume: bool = False
) -> tuple[list[threading.Thread], dict[str, str]]:
    """Start every party, but some, in a thread of this process, over TLS; return threads, and what failed ones say."""
    job, said = load_job(path), {}

    def train(name: str) -> None:
        try:
            train_party(job, name, resume=resume and name == job.active)
        except TreatyError as error:
            said[name] = str(error)

    threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in job.parties if name not in without]
    for thread in threads:
        thread.start()
    return threads, said


def play_and_kill(path: Path, victim: str, kind: str, nth: int) -> dict[str, str]:
    """Play, one party being a process of its own, killed at a message; return what others said at their end."""
    process = start(path, victim, dies=(kind, nth, ""))
    threads, said = play(path, without=[victim])
    try:
        assert process.wait(within(60)) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    for thread in threads:
        thread.join(within(60))
    assert not any(thread.is_alive() for thread in threads)
    return said


# ---------------------------------------------------------------- trained apart


@pytest.mark.slow
def test_parties_apart_have_the_estimators_model(tmp_path):
    path = write_job(tmp_path, trees=2)
    threads, said = play(path)
    for thread in threads:
        thread.join(within(60))
    assert said == {}
    expected = fitted(n_estimators=2, edges=2).parts_["pooled"].forest.trees
    assert any(len(tree.left) > 1 for tree in expected)
    assert find_part(load_job(path), "owner").forest.trees == expected
    assert "MaskedInput" in load_reports(load_job(path))["user1"].sent["tokyo"]["by_type"]


@pytest.mark.slow
def test_an_estimator_over_tls_equals_the_one_in_threads():
    X, y = real_table("multiclass", rows=120)
    weight = np.random.default_rng(0).random(len(y)) + 0.5
    given = {f"user{k}": (X.iloc[k::6], y[k::6] + 7, weight[k::6]) for k in range(6)}
    options = {"n_estimators": 2, "n_jobs": 1, "edges": 2, **OPTIONS}
    threads, apart = (
        flat(treaty.GBDTClassifier, "fedxgb", transport=transport, **options).fit(given, eval_set=(X, y + 7))
        for transport in ("memory", "tls")
    )
    ours, theirs = threads.parts_["pooled"], apart.parts_["pooled"]
    assert any(len(tree.left) > 1 for tree in ours.forest.trees)
    assert theirs.forest.trees == ours.forest.trees
    assert apart.evals_result_ == threads.evals_result_
    np.testing.assert_array_equal(apart.predict(X), threads.predict(X))
    assert apart.communication_.keys() == threads.communication_.keys()
    assert apart.communication_["user3 -> edge1"]["by_type"]["MaskedInput"] > 0
    assert apart.disclosures_ == threads.disclosures_


@pytest.mark.slow
def test_committees_of_edge_servers_apart_give_the_same_model(tmp_path):
    users = [f"user{k}" for k in range(9)]
    path = write_job(tmp_path, edges=(*EDGES, "oslo"), users=users, trees=1, expose="nothing")
    threads, said = play(path)
    for thread in threads:
        thread.join(within(60))
    assert said == {}
    job = load_job(path)
    assert find_part(job, "owner").forest.trees == fitted(n_estimators=1, edges=2).parts_["pooled"].forest.trees
    reports = load_reports(job)
    sent = {name: {who: set(kinds["by_type"]) for who, kinds in of.sent.items()} for name, of in reports.items()}
    around = [*EDGES, "oslo"]
    for k, name in enumerate(users):
        holders = {around[k % 3], around[(k + 1) % 3]}
        assert {edge for edge in around if "RowShares" in sent[name].get(edge, ())} == holders
    assert all("DealtCorrections" in sent[one][other] for one in around for other in around if one != other)
    assert any("1 of the 3 edge servers of a committee" in fact for fact in reports["user3"].learned["edge"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return the job of a finished training of nine users whose model is hidden from them."""
    users = [f"user{k}" for k in range(9)]
    path = write_job(tmp_path_factory.mktemp("trained"), edges=(*EDGES, "oslo"), users=users, expose="nothing")
    threads, said = play(path)
    for thread in threads:
        thread.join(within(60))
    assert said == {}
    return path


@pytest.mark.slow
def test_a_hidden_model_of_parties_apart_is_the_estimators_at_the_server_alone(trained):
    expected = fitted(n_estimators=3, edges=2)
    job = load_job(trained)
    part = find_part(job, "owner")
    assert part.forest.trees == expected.parts_["pooled"].forest.trees
    assert any(len(tree.left) > 1 for tree in part.forest.trees)
    assert part.forest.classes == ["ill", "well"]
    assert len(part.forest.history["eval_0"]["logloss"]) == 3
    assert [file.name for file in (trained.parent / "model").glob("*.part")] == ["owner.part"]
    assert not list((trained.parent / "model").glob("*.checkpoint"))
    reports = load_reports(job)
    assert set(reports) == set(job.parties)
    # the third edge server deals random numbers, and has no shares of rows
    assert set(reports["user3"].sent) == {*EDGES, "notary"}
    assert "MaskedInput" in reports["user3"].sent["berlin"]["by_type"]
    assert "MaskedInput" not in reports["user3"].sent["tokyo"]["by_type"]
    assert set(reports["user3"].learned) == {"server", "edge", "user", "authority"}


@pytest.mark.slow
def test_commands_on_a_hidden_model_are_the_servers_alone(trained, monkeypatch):
    path, folder = trained, trained.parent
    expected = fitted(n_estimators=3, edges=2)
    monkeypatch.setattr(cli, "run_all", lambda *arguments, **options: None)  # it has run
    done = CliRunner().invoke(app, ["train", str(path)], catch_exceptions=False)
    assert "owner.part" in done.stdout
    assert "user3: took part" in done.stdout
    done = CliRunner().invoke(app, ["predict", str(path)], catch_exceptions=False)
    assert "owner.predictions.csv" in done.stdout.replace("\n", "")
    predicted = pd.read_csv(folder / "model" / "owner.predictions.csv")
    p = expected.predict_proba(rows().drop(columns="y"))
    np.testing.assert_allclose(predicted["probability_well"], p[:, 1], rtol=1e-12)
    assert CliRunner().invoke(app, ["explain", str(path)], catch_exceptions=False).exit_code == 0
    explained = pd.read_csv(folder / "model" / "owner.contributions.csv")
    np.testing.assert_allclose(np.log(p[:, 1] / p[:, 0]), explained.sum(axis=1), atol=1e-9)
    for verb in ("predict", "explain"):
        with pytest.raises(ConfigError, match="user1 has no part of the model: expected --as owner"):
            CliRunner().invoke(app, [verb, str(path), "--as", "user1"], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "words"), [({"shoe": 1.0}, "'shoe' as well"), (None, "got none")])
def test_a_user_with_a_wrong_table_is_left_out_and_says_why(tmp_path, columns, words):
    users = [f"user{k}" for k in range(7)]
    path = write_job(tmp_path, users=users)
    table = tmp_path / "user0.csv"
    if columns is None:
        table.unlink()
    else:
        pd.read_csv(table).assign(**columns).to_csv(table, index=False)
    threads, said = play(path)
    for thread in threads:
        thread.join(within(60))
    assert set(said) == {"user0"}, said
    assert words in said["user0"].lower()
    rest = 150 - len(rows_of_each(users)["user0"])
    assert [tree.count[0] for tree in find_part(load_job(path), "owner").forest.trees] == [rest] * 3


@pytest.mark.slow
def test_a_user_that_is_started_after_training_has_begun_takes_part(tmp_path, monkeypatch):
    users, options = [f"user{k}" for k in range(8)], {"epsilon_total": 8.0, "num_parallel_tree": 3}
    path = write_job(tmp_path, users=users, trees=60, **options)
    path.write_text(path.read_text().replace("reconnect", "wait = 2\nreconnect", 1))
    grow, cohorts = noisy.random_round, []

    def noted(inputs, crowd, *given):
        if len(cohorts) > 2:  # else it would be over before the user is there
            time.sleep(0.3)
        trees = grow(inputs, crowd, *given)
        cohorts.append(list(crowd.cohort))
        return trees

    monkeypatch.setattr(noisy, "random_round", noted)
    threads, said = play(path, without=["user3"])
    until = time.monotonic() + within(60)
    while len(cohorts) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    late, of_late = play(path, without=set(load_job(path).parties) - {"user3"})
    for thread in [*threads, *late]:
        thread.join(within(60))
    assert (said, of_late) == ({}, {})
    assert len(cohorts) == 60
    assert "user3" not in cohorts[1]
    assert "user3" in cohorts[-1]


# ---------------------------------------------------------------- killed


@pytest.mark.slow
def test_a_killed_user_ends_nothing(tmp_path):
    path = write_job(tmp_path, trees=25)
    assert play_and_kill(path, "user2", "Attendance", 5) == {}
    trees = find_part(load_job(path), "owner").forest.trees
    assert len(trees) == 25
    everybodys, tokyos = 150, sum(len(rows_of_each()[name]) for name in USERS[1::2])
    assert trees[1].count[0] == everybodys
    assert trees[-1].count[0] == tokyos  # two users of Berlin are too few to sum
    assert "user2" not in load_reports(load_job(path))


@pytest.mark.slow
def test_a_stopped_user_whose_connection_is_alive_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(party, "ABORT_NOTICE_TIMEOUT", 1.0)
    path = write_job(tmp_path, trees=12, timeout=15)  # it counts as gone after 20 s
    process = start(path, "user2", dies=("Attendance", 3, ""), by=signal.SIGSTOP)
    try:
        threads, said = play(path, without=["user2"])
        for thread in threads:
            thread.join(within(60))
        assert said == {}
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    trees = find_part(load_job(path), "owner").forest.trees
    assert trees[1].count[0] == 150
    assert [tree.count[0] for tree in trees[2:]] == [sum(len(rows_of_each()[name]) for name in USERS[1::2])] * 10


@pytest.mark.slow
def test_a_killed_edge_server_ends_the_job_and_leaves_a_model(tmp_path):
    path = write_job(tmp_path, trees=200)
    said = play_and_kill(path, "tokyo", "SurvivorReport", 110)  # after the search for exact bins
    assert set(said) == {"owner", "berlin", *USERS}  # the authority has gone by then
    assert "tokyo" in said["owner"]
    assert "tokyo" in said["user1"]
    kept = load_checkpoint(tmp_path / "model" / "owner.checkpoint")
    part = find_part(load_job(path), "owner")
    assert 2 <= kept.rounds <= part.forest.rounds < 200
    assert CliRunner().invoke(app, ["predict", str(path)], catch_exceptions=False).exit_code == 0
    predicted = pd.read_csv(tmp_path / "model" / "owner.predictions.csv")
    assert np.mean(predicted["prediction"].to_numpy() == rows()["y"].to_numpy()) > 0.85


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "kind"), [("tokyo", "SurvivorReport"), ("owner", "KnownSplits")])
def test_a_job_goes_on_to_the_same_model_after_an_edge_server_or_the_server_was_killed(victim, kind, tmp_path):
    path = write_job(tmp_path, trees=20)
    # the search for exact bins has some eighty sums
    assert play_and_kill(path, victim, kind, 110 if kind == "SurvivorReport" else 60)
    assert 1 <= load_checkpoint(tmp_path / "model" / "owner.checkpoint").rounds < 20
    kept = {path.name.rpartition("-")[0] for path in (tmp_path / "model").iterdir()}
    assert kept >= {"berlin", "tokyo", *USERS}
    threads, said = play(path, resume=True)
    for thread in threads:
        thread.join(within(60))
    assert said == {}
    trees = find_part(load_job(path), "owner").forest.trees
    assert trees == fitted(n_estimators=20, edges=2).parts_["pooled"].forest.trees
    assert not list((tmp_path / "model").glob("*.checkpoint"))
    assert not [*(tmp_path / "model").glob("*.cohorts"), *(tmp_path / "model").glob("*.digest")]


@pytest.mark.slow
def test_a_killed_user_takes_part_again_when_the_job_goes_on(tmp_path):
    path = write_job(tmp_path, trees=14)
    user = start(path, "user2", dies=("Attendance", 5, ""))
    server = start(path, "owner", dies=("RoundStart", 20, ""))  # to two edge servers: in its tenth tree
    threads, said = play(path, without=("user2", "owner"))
    try:
        assert [process.wait(within(60)) for process in (user, server)] == [-signal.SIGKILL] * 2
    finally:
        for process in (user, server):
            process.kill()
            process.communicate()
    for thread in threads:
        thread.join(within(60))
    assert "owner" in said["user1"]
    finished = load_checkpoint(tmp_path / "model" / "owner.checkpoint").rounds
    assert 6 <= finished < 14
    threads, said = play(path, resume=True)
    for thread in threads:
        thread.join(within(60))
    assert said == {}
    counts = [tree.count[0] for tree in find_part(load_job(path), "owner").forest.trees]
    tokyos = sum(len(rows_of_each()[name]) for name in USERS[1::2])
    assert counts[finished - 1] == tokyos  # two users of Berlin are too few to sum
    assert counts[finished:] == [150] * (14 - finished)


@pytest.mark.slow
def test_a_model_that_could_not_be_saved_ends_the_job_for_all_and_everybody_can_go_on(tmp_path, monkeypatch):
    """After all have been told that training is over."""
    path, write = write_job(tmp_path), files.write_whole

    def full(to: Path, *arguments: object, **options: object) -> None:
        if Path(to).suffix == ".staged":
            raise ConfigError(f"cannot write {to}: No space left on device")
        write(to, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_whole", full)
        threads, said = play(path)
        for thread in threads:
            thread.join(within(60))
    assert set(said) == {"owner", *EDGES, *USERS}
    threads, said = play(path, resume=True)
    for thread in threads:
        thread.join(within(60))
    assert said == {}
    part, reports = find_part(load_job(path), "owner"), load_reports(load_job(path))
    assert part.forest.rounds == 3
    assert {reports[name].model for name in ("owner", *EDGES, *USERS)} == {part.model_id}
    assert not [*(tmp_path / "model").glob("*.cohorts"), *(tmp_path / "model").glob("*.digest")]


@pytest.mark.slow
def test_failed_users_do_not_end_the_others_processes(monkeypatch):
    ends = {"user0": 0, "user1": 3, "owner": 0}

    def waited(code: int, seconds: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds}); exit({code})"])

    monkeypatch.setattr(processes, "GRACE", 0.2)
    started = {name: waited(code, 1.0 if name == "owner" else 0.0) for name, code in ends.items()}
    assert processes._wait(started, ["user0", "user1"]) == ["user1"]
    assert started["owner"].poll() == 0
    started = {"user1": waited(0, 20.0), "owner": waited(3, 0.0)}
    begun = time.monotonic()
    assert processes._wait(started, ["user1"]) == ["owner"]
    started["owner"] = waited(0, 0.0)
    assert processes._wait(started, ["user1"]) == ["user1"]  # hangs, and the job has ended without it
    assert time.monotonic() - begun < within(10.0)
    started["user1"].kill()
    started["user1"].wait()


# ---------------------------------------------------------------- who is who


def test_users_without_an_edge_server_are_dealt_out(tmp_path):
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace('table = "user0.csv"', 'table = "user0.csv"\nedge = "tokyo"'))
    roles = load_job(path).roles()
    assert [roles.edges[name] for name in USERS] == ["tokyo", "berlin"] * 3
    assert (roles.active, roles.holder("authority"), roles.having("edge")) == ("owner", "notary", list(EDGES))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('role = "authority"', 'role = "edge"', "expected one key authority, .* got none"),
        ('role = "edge"', 'role = "authority"', "expected one key authority, .* got berlin, tokyo, notary"),
        ('role = "edge"', "", 'expected parties.berlin to have a table, .* or role = "edge"'),
        ('role = "edge"', 'role = "server"', 'to be the active party owner, got parties.berlin.role = "server"'),
        ('active = "owner"', 'active = "user1"', "parties.owner to have a table"),
        ('role = "edge"', 'role = "edge"\ntable = "user1.csv"', "of no other role, got one - at parties.berlin"),
        ('table = "user1.csv"', 'role = "user"', "a table of every user .* got none - at parties.user1"),
        ('table = "user1.csv"', 'table = "user1.csv"\nedge = "oslo"', r"\(berlin, tokyo\), got 'oslo'"),
        ('role = "edge"', 'role = "edge"\nedge = "tokyo"', "of users alone, got parties.berlin.edge of the edge"),
        ('table = "user1.csv"', 'table = "user1.csv"\nedge = "berlin"', "got 2 at tokyo: of a sum over fewer"),
        ('eval_tables = ["owner.csv"]', "", "expected parties.owner.table, with example rows"),
        ('expose = "model"', "", "expected 3 edge servers or more, got 2"),
        ('expose = "model"', 'expose = "model"\nedges = 3', "expected edges to be 2"),
        ('expose = "model"', 'expose = "model"\ndropout = 0.1', "leave it out of a job"),
        ('"fedxgb"', '"federboost-horizontal"', "expected no role and edge with protocol 'federboost-horizontal'"),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_one_line(tmp_path, old, new, words):
    path = write_job(tmp_path)
    text = path.read_text()
    assert old in text
    text = text.replace(old, new) if "notary" in words else text.replace(old, new, 1)
    if "federboost" in new:
        text = text.replace('expose = "model"', 'dropout = "accept"')
        text = text.replace("[fedxgb]", "[federboost-horizontal]")
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["train", str(path), "--as", "owner"], catch_exceptions=False)
