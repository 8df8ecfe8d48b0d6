"""`treaty check`: what is wrong with a party's own files, and who answers."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replaced
from typer.testing import CliRunner, Result

from pace import within
from runs.small_jobs import SYSTEMS, write_job
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.messaging.certificates import load_certificate, load_identity
from treaty.messaging.tls import Line, tls_context
from treaty.messaging.units import ECHO, WELCOME, header
from treaty.node.identity import make_keys
from treaty.runs import link_checks, local_checks
from treaty.runs.connecting import listening
from treaty.runs.job import Job
from treaty.runs.job_files import load_job
from treaty.runs.link_checks import over_links, probe
from treaty.runs.local_checks import check_cheaply, check_own
from treaty.runs.party import train_party
from treaty.runs.table_files import read_alone
from treaty.systems.vertical.cipher_choice import Link


def check(folder: Path, name: str = "a", *more: str) -> Result:
    return CliRunner().invoke(app, ["check", str(folder / "job.toml"), "--as", name, *more])


def wrong(job: Job, name: str = "a") -> dict[str, str]:
    return {finding.what: finding.said for finding in check_own(job, name) if not finding.fine}


@pytest.fixture
def job(tmp_path) -> Job:
    return write_job(tmp_path, "federboost-vertical")


def changed(folder: Path, old: str, new: str) -> Job:
    text = (folder / "job.toml").read_text()
    assert old in text
    (folder / "job.toml").write_text(text.replace(old, new))
    return load_job(folder / "job.toml")


def test_all_is_well_where_everybody_listens(job, tmp_path):
    with listening(job, "b"), listening(job, "c"):
        done = check(tmp_path)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    said = lines.index("What each party learns:")
    told = [line for line in lines[said:] if line.startswith("  ")]
    assert {line.split(":")[0].strip() for line in told} == {"a", "b", "c"}
    assert all(line.startswith("ok ") for line in lines[:said] + lines[said + 1 + len(told) :])
    for what in ("job", "table", "folders", "disk space", "ledgers", "key", "certificate of b", "clock", "listening"):
        assert any(line.startswith(f"ok     {what}: ") for line in lines), what
    assert any("180 rows; numbers: " in line for line in lines)
    assert f"ok     b at {job.parties['b'].address}: answers" in done.stdout


def test_who_does_not_answer_is_named_and_the_exit_code_says_it_is_not_us(job, tmp_path):
    with listening(job, "b"):
        done = check(tmp_path)
    assert done.exit_code == 1, done.output
    assert f"WRONG  c at {job.parties['c'].address}: no answer" in done.stdout
    assert "docs/network.md" in done.stdout


def test_another_certificate_is_told_at_both_sides(job, tmp_path):
    (tmp_path / "other").mkdir()
    make_keys(tmp_path / "other", "b")
    text = (tmp_path / "job.toml").read_text().replace('"b.cert', '"other/b.cert').replace('"b.key', '"other/b.key')
    (tmp_path / "b.toml").write_text(text)
    theirs = load_job(tmp_path / "b.toml")  # b has another key than a pins
    with listening(theirs, "b"), listening(job, "a"):
        said, _ = probe(job.parties, "a", "b")
        back, _ = probe(theirs.parties, "b", "a")
    assert not said.fine
    assert "another certificate than" in said.said
    assert not back.fine
    assert "pins another certificate of b" in back.said


def test_another_program_at_the_port_is_told(job):
    host, _, port = job.parties["b"].address.rpartition(":")
    with socket.create_server((host, int(port))) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        said, _ = probe(job.parties, "a", "b")
    assert not said.fine
    assert "TLS failed" in said.said


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (header(ECHO, 5) + b"12345", "does not answer as a party does (expected an echo of 0 bytes, got unit 10 of 5)"),
        (header(WELCOME), "does not answer as a party does (expected an echo"),
        (header(ECHO, 1 << 40), "does not answer as a party does (expected at most 1048576 bytes"),
        (b"\xff" * 25, "does not answer as a party does (expected a unit, got one of kind 255)"),
        (b"", "no answer"),
    ],
    ids=["size", "kind", "terabyte", "noise", "silence"],
)
def test_a_peer_that_answers_otherwise_than_a_party_is_told(job, answer, words, monkeypatch):
    monkeypatch.setattr(link_checks, "HANDSHAKE_TIMEOUT", 10.0 if answer else 0.2)
    a, b = (job.parties[name] for name in "ab")
    host, _, port = b.address.rpartition(":")
    pinned = [load_certificate(a.certificate)]
    context = tls_context(load_identity(b.key, b.certificate, "b"), pinned, listens=True)
    with socket.create_server((host, int(port))) as server:

        def lie() -> None:
            taken, _ = server.accept()
            with closing(Line(taken, context, time.monotonic() + within(10), listens=True)) as line, suppress(OSError):
                line.header()
                line.send(answer)
                line.header()  # until the other end hangs up

        liar = threading.Thread(target=lie, daemon=True)
        liar.start()
        said, link = probe(job.parties, "a", "b")
        liar.join(within(10))
    assert not said.fine
    assert link is None
    assert said.said.startswith(words)


def over(job: Job, link: Link, name: str = "a", **options) -> dict[str, str]:
    job = replaced(job, common=job.common | options)
    peers = [peer for peer in job.parties if peer != name]
    return {of.what: of.said for of in over_links(job, check_own(job, name), dict.fromkeys(peers, link))}


def seconds_of(said: dict[str, str]) -> dict[str, float]:
    found = re.findall(
        r"(open sums|sealed sums|hidden rows|Okamoto-Uchiyama)(?: \(this job\))? ([\d.e+-]+)",
        said["expected seconds a tree"],
    )
    return {kind: float(seconds) for kind, seconds in found}


def test_what_a_tree_takes_over_the_links_is_said_and_what_takes_less(tmp_path):
    job = replaced(write_job(tmp_path, "secureboost"), own={})
    near, far, thin = (over(job, link) for link in (Link(1e-5, 1e-10), Link(0.05, 1e-10), Link(1e-5, 1e-5)))
    assert seconds_of(near).keys() == {"open sums", "sealed sums", "Okamoto-Uchiyama"}
    # three levels: five ways there and back
    assert 0.5 <= seconds_of(far)["open sums"] <= 1.0
    assert seconds_of(far)["sealed sums"] > 3 * seconds_of(far)["open sums"]
    assert seconds_of(thin)["sealed sums"] > 10 * seconds_of(near)["sealed sums"]
    assert "sealed sums (this job)" in near["expected seconds a tree"]
    assert "waiting for messages. A nearer site" in far["expected advice"]
    assert "sending. A faster line" in thin["expected advice"]
    for said in (near, far, thin):
        assert "open sums show a the sums of every bin in every node" in said["expected advice"]
    assert over(job, Link(0.05, 1e-10), "b").keys() == far.keys()


def test_links_that_are_not_measured_are_taken_to_be_as_slow_as_the_slowest(tmp_path, monkeypatch):
    monkeypatch.setattr(link_checks, "slowness", lambda: 1.0)
    job, links = replaced(write_job(tmp_path, "secureboost"), own={}), {"a": Link(0.05, 1e-8), "c": Link(1e-5, 1e-6)}
    own = check_own(job, "b")
    said = [
        over_links(job, own, of) for of in (links, {**links, "b": Link(0.05, 1e-6)}, {**links, "b": Link(0.0, 0.0)})
    ]
    assert str(said[0]) == str(said[1]) != str(said[2])


def test_a_slow_processor_computes_for_longer(tmp_path, monkeypatch):
    job, said = replaced(write_job(tmp_path, "secureboost"), own={}), []
    for slowness in (1.0, 100.0):
        monkeypatch.setattr(link_checks, "slowness", lambda slowness=slowness: slowness)
        said.append(over(job, Link(1e-6, 1e-10)))
    assert seconds_of(said[1])["open sums"] > 50 * seconds_of(said[0])["open sums"]
    assert "computing. Fewer columns" in said[1]["expected advice"]


@pytest.mark.parametrize(
    ("byte", "counted", "words"),
    [(8e-9, 8e-9, "20 ms there and back, 1,000 Mbit/s"), (0.0, 1e-10, "20 ms there and back, 80,000 Mbit/s")],
)
def test_a_probe_says_how_fast_a_link_is_and_none_is_infinitely_fast(job, monkeypatch, byte, counted, words):
    monkeypatch.setattr(link_checks, "measured", lambda line, deadline: (0.02, byte))
    with listening(job, "b"):
        said, link = probe(job.parties, "a", "b")
    assert link == Link(0.01, counted)
    assert said.said.endswith(words)


def test_sums_that_the_options_do_not_allow_are_left_out(tmp_path):
    job = write_job(tmp_path, "secureboost")
    assert seconds_of(over(job, Link(1e-3, 1e-8), reg_alpha=1.0)).keys() == {"open sums", "Okamoto-Uchiyama"}
    assert seconds_of(over(job, Link(1e-3, 1e-8), max_depth=2)) != seconds_of(over(job, Link(1e-3, 1e-8)))


@pytest.mark.parametrize("membership", ["hidden", None])
def test_hidden_rows_are_said_where_two_parties_may_share_them(tmp_path, membership):
    given = {"objective": "logistic_pieces", "n_estimators": 2}, {"a": "", "b": ""}
    job = replaced(
        write_job(tmp_path, "secureboost", given), own={} if membership is None else {"membership": membership}
    )
    near, far = (over(job, link) for link in (Link(1e-5, 1e-10), Link(0.05, 1e-10)))
    assert seconds_of(near).keys() == {"open sums", "sealed sums", "hidden rows", "Okamoto-Uchiyama"}
    assert ("hidden rows (this job)" in near["expected seconds a tree"]) == (membership is not None)
    assert "hidden rows show nobody which rows are in a node" in near["expected advice"]
    # at depth 3 some 150 steps wait for the other party
    assert 5 < seconds_of(far)["hidden rows"] - seconds_of(near)["hidden rows"] < 15
    assert over(job, Link(0.05, 1e-10), "b").keys() == far.keys()
    if membership is None:
        assert "hidden rows" not in seconds_of(over(job, Link(1e-3, 1e-8), max_depth=7))
    said = {finding.what: finding.said for finding in check_own(job, "b")}
    assert ("expected sides" in said) == (membership is None)
    watched = changed(tmp_path, 'table = "a.csv"', 'table = "a.csv"\neval_tables = ["a.csv"]')
    for more in (replaced(watched, own=job.own), replaced(job, weight="y")):
        assert "job" not in wrong(more)


def test_paillier_is_not_advised_upon(tmp_path):
    job = replaced(write_job(tmp_path, "secureboost"), own={"encryption": "paillier", "allow_exact_sums": True})
    said = over(job, Link(1e-3, 1e-8))
    assert "this job" not in said["expected seconds a tree"] + said["expected advice"]
    assert said["expected advice"].startswith("In training, open sums show a")


def test_of_other_systems_and_unknown_links_nothing_more_is_said(job, tmp_path):
    assert over(job, Link(1e-3, 1e-8)) == {}
    (tmp_path / "trees").mkdir()
    trees = write_job(tmp_path / "trees", "secureboost")
    assert over_links(trees, check_own(trees, "a"), {}) == []


def test_the_links_are_in_the_output(tmp_path):
    job = write_job(tmp_path, "secureboost")
    with listening(job, "b"), listening(job, "c"):
        done = check(tmp_path)
    assert done.exit_code == 0, done.output
    assert len(re.findall(r" pinned; [\d.]+ ms there and back, [\d.,]+ Mbit/s", done.stdout)) == 2
    assert "expected seconds a tree: open sums" in done.stdout


def test_a_check_disturbs_no_party_that_waits_to_train(job):
    failed = []

    def train(name: str) -> None:
        try:
            train_party(job, name)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(name,)) for name in ("b", "c")]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not all(probe(job.parties, "a", peer)[0].fine for peer in "bc"):
        assert time.monotonic() < deadline
    train("a")
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.parametrize(
    ("old", "new", "what", "words"),
    [
        ('table = "a.csv"', 'table = "no.csv"', "table", "expected a file at"),
        ('label = "y"', 'label = "z"', "table", "'z'"),
        ('table = "a.csv"', 'table = "a.csv"\ncolumns = ["nothing"]', "table", "'nothing'"),
        ('key = "a.key.pem"', 'key = "b.key.pem"', "key", "the private key is not that of a's certificate"),
        ('certificate = "b.cert.pem"', 'certificate = "c.cert.pem"', "certificate of b", "for b, got one for c"),
        ('[parties.a]', '[align]\n[parties.a]', "table", "of ids"),
    ],
    ids=["file", "label", "columns", "key", "certificate", "ids"],
)  # fmt: skip
def test_what_is_wrong_with_own_files_is_said(job, tmp_path, old, new, what, words):
    found = wrong(changed(tmp_path, old, new))
    assert words in found.pop(what)
    assert found == {}
    assert check(tmp_path).exit_code == 2


def test_missing_labels_and_ids_that_repeat_are_found(job, tmp_path):
    lines = (tmp_path / "a.csv").read_text().splitlines()
    (tmp_path / "a.csv").write_text("\n".join([lines[0], lines[1].rpartition(",")[0] + ",", *lines[2:]]))
    assert "expected a label in every row, got 1 of 180 rows without" in wrong(job)["table"]
    (tmp_path / "a.csv").write_text("\n".join([f"id,{lines[0]}", *(f"1,{line}" for line in lines[1:])]))
    said = wrong(changed(tmp_path, "[parties.a]", '[align]\non = "id"\n[parties.a]'))["table"]
    assert "expected every id once, got 179 rows with an id of an earlier row" in said


def test_a_full_disk_and_a_clock_of_yesterday_are_found(job, tmp_path, monkeypatch):
    monkeypatch.setattr(local_checks, "ROOM", 1 << 60)
    assert "GB free in" in wrong(job)["disk space"]
    with pytest.raises(ConfigError, match="make room or name another folder"):
        check_cheaply(job, "a")
    monkeypatch.setattr(local_checks, "ROOM", 0)
    tomorrow = time.time() + 86400
    os.utime(tmp_path / "a.csv", (tomorrow, tomorrow))
    assert "in the future: set this machine's clock" in wrong(job)["clock"]


def test_a_party_that_is_none_is_an_error(job, tmp_path):
    assert "expected --as to be one of a, b, c" in str(check(tmp_path, "d").exception)


def test_without_as_and_without_a_node_the_parties_are_named(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "job.toml"])
    assert isinstance(done.exception, ConfigError)
    assert "expected --as with the party to check as, one of a, b, c" in str(done.exception)


def test_what_a_job_is_expected_to_take_is_said(tmp_path):
    job = write_job(tmp_path, "secureboost")
    said = {finding.what: finding for finding in check_own(job, "b")}
    assert said["expected"].said == "180 rows and 3 columns here; assumed for each other party: 10 columns of numbers"
    assert "within a factor of 3" in said["expected time"].said
    assert said["expected bytes"].said.count(" MB") == 3
    assert "from" not in said["expected bytes"].said  # others' columns change nothing of what goes to and from here
    assert said["expected memory"].said.startswith("about 0.")
    assert "kept for later jobs in" in said["expected store"].said
    assert said["expected sides"].said.startswith("sides of splits will show a about 0.")
    lead = {finding.what: finding.said for finding in check_own(job, "a")}
    assert "expected sides" not in lead
    ranged = re.search(
        r"([\d,.]+) MB in all; from ([\d,.]+) (.)B, where .* 3 columns of 16 bins, to ([\d,.]+) MB for 30 ",
        lead["expected bytes"],
    )
    assert ranged is not None


def test_what_others_say_of_their_columns_is_what_a_job_is_expected_to_take(tmp_path):
    job = write_job(tmp_path, "secureboost")
    taken = {finding.what: finding for finding in check_own(job, "a")}
    told = {}
    for name in ("b", "c"):
        public = next(finding.public for finding in check_own(job, name) if finding.what == "expected")
        assert re.search(r"for about 3 columns in \d+0? bins$", public)  # not of how many rows
        told[name] = local_checks.stated_sizes(public)
    said = {finding.what: finding for finding in check_own(job, "a", told)}
    assert f"as c says, about 3 columns in {told['c'][1]} bins there" in said["expected"].said
    assert "taken for" not in said["expected"].said
    assert "from" not in said["expected bytes"].said

    def in_all(found):
        return float(re.search(r"([\d,.]+) MB in all", found["expected bytes"].said)[1].replace(",", ""))

    assert in_all(said) < in_all(taken) / 2  # 10 columns were taken
    assert local_checks.stated_sizes("could take part") is None


def test_what_others_say_of_their_categories_counts_under_seal(tmp_path):
    job = write_job(tmp_path, "secureboost")
    lines = [f"k{row % 50},l{row % 50},m{row % 50}" for row in range(180)]
    (tmp_path / "b.csv").write_text("\n".join(["one,two,three", *lines]))

    def public(**own):
        return next(of.public for of in check_own(replaced(job, own=own), "b") if of.what == "expected")

    def megabytes(size):
        said = {of.what: of.said for of in check_own(replaced(job, own={}), "a", {"b": size, "c": size})}
        return float(re.search(r"([\d,.]+) MB in all", said["expected bytes"])[1].replace(",", ""))

    told = local_checks.stated_sizes(public())
    assert told == (3, 150, 3, 150)
    assert public().endswith("3 columns in 150 bins (3 columns of 150 categories)")
    assert public(allow_exact_sums=True).endswith("3 columns in 150 bins")
    assert megabytes(told) < megabytes((*told[:2], 0, 0)) / 1.5


def test_hidden_rows_take_no_column_of_many_categories(tmp_path):
    given = {"objective": "logistic_pieces", "n_estimators": 2, "max_cat_to_onehot": 10}, {"a": "", "b": ""}
    job = replaced(write_job(tmp_path, "secureboost", given), own={"membership": "hidden"})
    assert not wrong(job, "b")
    lines = [f"{row},l{row % 50},m{row % 9}" for row in range(180)]
    (tmp_path / "b.csv").write_text("\n".join(["one,two,three", *lines]))
    expected = "b has 1 column(s) of 10 or more: raise max_cat_to_onehot"
    assert expected in wrong(job, "b")["expected"]
    # as the other party says
    said = {of.what: of for of in check_own(job, "a", {"b": (3, 200, 1, 50)})}
    assert not said["expected"].fine
    assert expected in said["expected"].said


def test_a_party_without_a_table_is_told_for_what_sizes(tmp_path):
    job = write_job(tmp_path, "fedxgboost-smm")
    said = {finding.what: finding.said for finding in check_own(job, "c")}
    assert said["expected"] == "assumed for each party with a table: 10,000 rows, 10 columns"


def test_owners_of_rows_take_others_to_have_as_many(tmp_path):
    job = write_job(tmp_path, "federboost-horizontal")
    said = {finding.what: finding.said for finding in check_own(job, "b")}
    assert said["expected"] == "60 rows and 12 columns here; assumed for each other party: as many rows"
    assert "columns more" not in said["expected bytes"]


def test_too_little_memory_is_wrong_and_says_what_to_do(job, tmp_path, monkeypatch):
    monkeypatch.setattr(local_checks, "free_memory", lambda: 1e8)
    assert "0.1 GB are free: end other programs" in wrong(job)["expected memory"]
    assert check(tmp_path).exit_code == 2
    monkeypatch.setattr(local_checks, "free_memory", lambda: None)  # a system that does not tell
    assert wrong(job) == {}


def test_too_little_room_in_the_store_is_wrong(job, tmp_path):
    table = read_alone(job.table_rules("a"), str(job.parties["a"].table), training=True)[0].features
    expected = local_checks.expect(job, job.roles(), "a", table)
    assert "kept for later jobs" in local_checks.check_store(job, "a", expected)
    with pytest.raises(ConfigError, match="make room, or name another folder as store"):
        local_checks.check_store(job, "a", replace(expected, kept=1e18))


def test_options_without_a_formula_are_not_wrong(tmp_path):
    job = write_job(tmp_path, "sgd", ({"mode": "paper", "allow_insecure": True, "max_iter": 2}, SYSTEMS["sgd"][1]))
    said = {finding.what: finding for finding in check_own(job, "a")}
    assert said["expected"].fine
    assert said["expected"].said.startswith("no formula says what the published form takes")


def test_free_memory_is_that_of_the_machine():
    assert local_checks.free_memory() is None or 1e7 < local_checks.free_memory() < 1e15
