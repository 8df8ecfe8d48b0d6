"""How commands end where something is in the way: one line and the code of docs/jobs.md, and no traceback."""

from __future__ import annotations

import errno
import logging
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest

from pace import within
from runs.small_jobs import write_job
from treaty.cli import jobs, main
from treaty.cli.logs import logged
from treaty.data import reading
from treaty.errors import ConfigError, DataError, PeerAborted, PeerLost, PeerTimeout, TreatyError
from treaty.models.checkpoints import checkpoint_file
from treaty.node.identity import make_keys
from treaty.runs import party as runs
from treaty.runs import prediction


def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run a command in this process; return its exit code and the one line that it said on standard error."""
    monkeypatch.setattr(sys, "argv", ["treaty", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main.main()
    said = capsys.readouterr().err.strip()
    assert said.startswith("treaty: ")
    assert "\n" not in said
    return int(left.value.code or 0), said


def test_what_is_in_the_way_of_a_file_is_named_with_exit_code_2(tmp_path, monkeypatch, capsys):
    write_job(tmp_path, "federboost-horizontal")
    job = (tmp_path / "job.toml").read_text()
    (tmp_path / "file").write_text("")
    rows = 'table = "a.csv"\npredict_table = "a.csv"'
    job = job.replace("n_jobs = 1", 'n_jobs = 1\noutput = "file"').replace('table = "a.csv"', rows)
    (tmp_path / "output.toml").write_text(job)
    make_keys(tmp_path, "foo")
    cases = {
        ("keys", "new", "foo", "--folder", tmp_path): "expected no file yet, got an existing .*foo.key.pem",
        ("keys", "new", "foo", "--folder", tmp_path / "file"): "cannot write the identity of foo to .*file",
        ("train", tmp_path / "none.toml"): "cannot read the job .*none.toml: No such file",
        ("train", tmp_path / "job.toml", "--as", "nobody"): "expected --as to be one of a, b, c, got 'nobody'",
        ("predict", tmp_path / "output.toml", "--as", "a"): "cannot read .*file",
        ("ledger", tmp_path / "none"): "expected a ledger, got no such file",
    }
    for arguments, words in cases.items():
        code, said = ended(monkeypatch, capsys, *arguments)
        assert code == 2, said
        assert re.search(words, said), said


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_is_interrupted_says_so_in_one_line_as_does_its_log(tmp_path, by):
    write_job(tmp_path, "secureboost")
    log = tmp_path / "log"
    waiting = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "treaty",
            "train",
            str(tmp_path / "job.toml"),
            "--as",
            "b",
            "-v",
            "--log-file",
            str(log),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(by, signal.SIG_DFL),
    )  # under nohup, say, it would ignore the signal
    deadline = time.monotonic() + within(60)
    while not (log.exists() and "waiting for a at" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    waiting.send_signal(by)
    said = waiting.communicate(timeout=within(30))[1].strip().splitlines()
    assert waiting.returncode == 128 + by
    assert said[-1] == f"treaty: {'interrupted' if by == signal.SIGINT else 'terminated'} at b"
    assert "Traceback" not in "\n".join(said)
    assert log.read_text().splitlines()[-1].endswith(f"Z {said[-1]}")


@pytest.mark.parametrize(("code", "word"), [(129, "terminated"), (130, "interrupted"), (143, "terminated")])
@pytest.mark.parametrize("name", ["a", "b", None], ids=["active", "passive", "all here"])
def test_who_is_interrupted_is_told_how_to_go_on(tmp_path, monkeypatch, capsys, code, word, name):
    write_job(tmp_path, "secureboost")
    (tmp_path / "model").mkdir()

    def interrupted(*arguments, **options):
        for party in "ab":
            (tmp_path / "model" / f"{party}.checkpoint").write_bytes(b"what was finished")
        raise KeyboardInterrupt if code == 130 else SystemExit(code)

    monkeypatch.setattr(jobs, "train_party", interrupted)
    monkeypatch.setattr(jobs, "run_all", interrupted)
    monkeypatch.setattr(main.os, "_exit", sys.exit)
    file, log = tmp_path / "job.toml", tmp_path / "log"
    given = [] if name is None else ["--as", name]
    left, said = ended(monkeypatch, capsys, "train", file, *given, "--log-file", log)
    assert left == code
    assert said.startswith(f"treaty: {word}{f' at {name}' if name else ''}; ")
    flags = "".join(f" {flag}" for flag in [*given, *([] if name == "b" else ["--resume"])])
    assert said.endswith(f": treaty train {file}{flags}")
    if name is not None:
        assert f"{name}.checkpoint has all finished rounds: to resume, restart all parties, a with --resume" in said
    assert log.read_text().splitlines()[-1].endswith(f"Z {said}")


def test_an_error_of_a_peer_ends_with_exit_code_1_and_the_log_with_its_line(tmp_path, monkeypatch, capsys):
    write_job(tmp_path, "secureboost")

    def lost(*arguments, **options):
        raise PeerLost("c", "c is lost: its process has ended")

    monkeypatch.setattr(jobs, "train_party", lost)
    log = tmp_path / "log"
    code, said = ended(monkeypatch, capsys, "train", tmp_path / "job.toml", "--as", "a", "--log-file", log)
    assert (code, said) == (1, "treaty: c is lost: its process has ended")
    assert log.read_text().splitlines()[-1].endswith(f"Z {said}")


def rewritten(folder: Path, old: str, new: str, count: int = -1) -> None:
    """Change the text of a party's table."""
    (folder / "b.csv").write_text((folder / "b.csv").read_text().replace(old, new, count))


@pytest.mark.parametrize(
    ("verb", "in_the_way", "words"),
    [
        ("train", lambda folder: (folder / "model").write_text(""), "cannot write in .*model: it, or a folder"),
        ("train", lambda folder: [(folder / "b.csv").unlink(), (folder / "b.csv").mkdir()], "b.csv, got a folder"),
        ("train", lambda folder: rewritten(folder, ",", ";"), "expected commas between the columns"),
        ("train", lambda folder: rewritten(folder, "\n", "\nunknown", count=1), "line 2"),
        ("train by row", lambda folder: rewritten(folder, ",y", ",Y"), "expected a column 'y'"),
        ("predict", lambda folder: (folder / "model").mkdir(), r"b\.part"),
    ],
    ids=["file for folder", "folder for table", "semicolons", "stray cell", "no label", "no model"],
)  # fmt: skip
def test_what_is_in_the_way_is_named_before_connecting(tmp_path, monkeypatch, caplog, verb, in_the_way, words):
    job = write_job(tmp_path, "federboost-horizontal" if verb == "train by row" else "federboost-vertical")
    job.parties["b"] = msgspec.structs.replace(job.parties["b"], predict_table=job.parties["b"].table)
    in_the_way(tmp_path)

    def connected(*arguments, **options):
        assert re.search(f"b: .*{words}.*; waiting for the others, to tell them", caplog.text)
        raise PeerLost("a", "nobody came")

    monkeypatch.setattr(runs, "connected", connected)
    monkeypatch.setattr(prediction, "connected", connected)
    with pytest.raises(
        (ConfigError, DataError), match=words
    ):  # what its user can do something about, not that nobody came
        prediction.predict_party(job, "b") if verb == "predict" else runs.train_party(job, "b")


@pytest.mark.parametrize("error", [PeerLost, PeerTimeout, PeerAborted], ids=lambda kind: kind.__name__)
def test_who_loses_a_peer_is_told_how_to_go_on(tmp_path, monkeypatch, error):
    job = write_job(tmp_path, "secureboost")
    kept = checkpoint_file(job.output, "b")

    def lost(*arguments, **options):
        raise error("c", "c is lost: its process has ended")

    def lost_late(*arguments, **options):
        kept.write_bytes(b"what was finished")
        lost()

    monkeypatch.setattr(runs, "connected", lost)
    with pytest.raises(error, match=r"its process has ended$"):
        runs.train_party(job, "b")  # there is nothing to go on from
    monkeypatch.setattr(runs, "connected", lost_late)
    with pytest.raises(error, match=r"b\.checkpoint has all .* restart all parties, a with --resume$"):
        runs.train_party(job, "b")


def test_predictions_that_cannot_be_written_are_one_error(tmp_path, monkeypatch):
    (tmp_path / "p.csv").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*p\.csv: Is a directory; make room, or name another file"):
        reading.write_predictions(tmp_path / "p.csv", {"p": [0.5]})

    def full(_: object, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyarrow.csv.write_csv", full)
    with pytest.raises(TreatyError, match=r"cannot write .*q\.csv: No space left on device"):
        reading.write_predictions(tmp_path / "q.csv", {"p": [0.5]})
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_log_on_a_full_disk_is_given_up_in_one_line(capsys):
    with logged(False, Path("/dev/full")):
        for number in range(3):
            logging.getLogger("treaty.runs").info("line %d", number)
    said = capsys.readouterr().err.strip()
    assert said == "treaty: cannot write the log /dev/full any more: [Errno 28] No space left on device"
