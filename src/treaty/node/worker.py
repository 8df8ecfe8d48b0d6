"""The process that runs this organisation's party in one attempt at a job. It ends with its node.

It reads a `WorkerOrder` from standard input, and writes events to standard output, each as one line of JSON.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.data.reading import write_predictions
from treaty.errors import ConfigError, CryptoError, LocalProtocolError, PeerError, TreatyError
from treaty.files import read_json
from treaty.machine.process import ended_by_signals
from treaty.messaging.transcript import Transcript
from treaty.node.forgetting import alone
from treaty.node.online import Requests, id_value
from treaty.node.proposals import Verb
from treaty.node.settings import DataSet
from treaty.runs.job import Job, id_column
from treaty.runs.job_files import decoded_job
from treaty.runs.party import explain_party, find_part, predict_party, train_party
from treaty.runs.processes import line_of_parent
from treaty.runs.progress import TrainingBar
from treaty.runs.report import FORMAT, Report, received_by, report_file
from treaty.runs.serving import serve_online
from treaty.systems.vertical.prediction import Asked

logger = logging.getLogger("treaty.node.worker")  # it runs as __main__

EVENT_INTERVAL = 0.2  # minimum seconds between two events about rounds


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes
    ----------
    job : str
        This party's copy of the job, with its tables, key and folders, as `Job.encoded` writes it.
    name : str
    verb : {"train", "predict", "explain", "serve"}
    resume : bool
        At the active party: resume from the checkpoint, if there is one.
    log, lock : str
        Files: the log, which is appended to; and the lock of the one process that may write the job's checkpoints.
    result : str
        File for predictions or contributions.
    online : str
        Socket at which a service takes requests.
    fetch : dict of str to DataSet
        Data sets of queries, by the file for their rows.
    answered, most_answered : int
        Rounds of a training in which this party has taken part, over all attempts, and their maximum.
    """

    job: str
    name: str
    verb: Verb
    resume: bool
    log: str
    lock: str
    result: str
    online: str
    fetch: dict[str, DataSet] = {}
    answered: int = 0
    most_answered: int = 1 << 40


class WorkerEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An event of the process.

    Attributes
    ----------
    phase : str
        The step before the first round that is under way; "" for rounds.
    done, total : int
    answered : int
        Rounds in which this party has taken part, over all attempts.
    end : str
        "" if it runs; "done"; "again" if another party, the network or the system failed, so that another attempt may
        succeed; "wrong" if this party's own options, tables or ledgers are wrong.
    said, public : str
        What went wrong: for this organisation, and for others.
    sent, received : dict of str to int
        Bytes to, and from, each peer.
    learned : dict of str to list of str
        What each party learned, in sentences.
    spent : str
        What this party's noise has cost.
    """

    phase: str = ""
    done: int = 0
    total: int = 0
    answered: int = 0
    end: str = ""
    said: str = ""
    public: str = ""
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    learned: dict[str, list[str]] = {}
    spent: str = ""


def main() -> None:
    """Run the order on standard input; the exit code is 0 on success."""
    order = msgspec.json.decode(line_of_parent(), type=WorkerOrder)
    job, write = decoded_job(order.job.encode(), trusted=True), _EventWriter(order.answered)
    gc.freeze()
    _log_to(Path(order.log))
    try:
        with ended_by_signals(), alone(Path(order.lock)):
            transcript = _play(order, job, write)
    except BaseException as error:
        failure = replace(_failure(error), done=write.so_far.done, answered=write.so_far.answered)
        logger.warning("%s: ended before it was done: %s", order.name, failure.said)
        with suppress(BrokenPipeError):  # the node was killed
            write(failure)
            sys.stdout.flush()
        # A gRPC call that was interrupted can keep the interpreter from ending.
        os._exit(1)
    success = _success(order, job, transcript)
    logger.info("%s: done%s", order.name, "".join(_traffic(success)))
    with suppress(BrokenPipeError):
        write(success)


def _play(order: WorkerOrder, job: Job, write: _EventWriter) -> Transcript | None:
    """Run the job; return the transcript of a prediction or explanation, which has no report."""
    for file, data_set in order.fetch.items():
        if not Path(file).exists():
            write.phase("running a query", 0, 1)
            data_set.fetch(file)
    if order.verb == "train":
        total = job.settings()[1].most_rounds
        log = TrainingBar(order.name, total, shown=False)

        def progress(done: int, part: Any) -> None:
            log(done, part)
            write.rounds(done, total)
            if done < total and write.so_far.answered >= order.most_answered:
                why = f"its attempts have taken {order.most_answered} rounds, but the job has {total}"
                raise ConfigError(f"{order.name}: {why}; submit the job again", public=why)

        train_party(job, order.name, progress, resume=order.resume, phase=write.phase)
        return None
    if order.verb == "serve":
        _serve(order, job, write)
        return None
    result, noted = Path(order.result), list[Transcript]()
    if order.verb == "explain":
        found = explain_party(job, order.name, write.phase, noted.append)
        if found:
            write_predictions(result, found)
        return noted[0] if noted else None
    ids, margins = predict_party(job, order.name, write.phase, noted.append)
    if margins is not None:
        columns: dict[str, Any] = {} if ids is None else {id_column(job, order.name): ids}
        write_predictions(result, {**columns, **find_part(job, order.name).predictions(margins)})
    return noted[0] if noted else None


def _serve(order: WorkerOrder, job: Job, write: _EventWriter) -> None:
    """Take part in a service; the active party takes requests at a socket."""
    schema, normalise = find_part(job, order.name).schema, () if job.align is None else job.align.normalise

    def ready(numbers: dict[str, int]) -> Iterator[Asked | None]:
        by_value = {id_value(one): number for one, number in numbers.items()}
        write(WorkerEvent(phase=f"serving {len(by_value)} rows", done=1, total=1))
        return iter(Requests(Path(order.online), by_value, schema, normalise))

    serve_online(job, order.name, ready, write.phase)


def _success(order: WorkerOrder, job: Job, transcript: Transcript | None) -> WorkerEvent:
    """Return the last event: traffic, and for a training what was learned and spent, from its report."""
    if transcript is not None:
        sent = {pair.receiver: total.nbytes for pair, total in transcript.by_pair("sent").items()}
        return WorkerEvent(end="done", sent=sent, received=received_by(transcript))
    if order.verb != "train" or not report_file(job, order.name).exists():
        return WorkerEvent(end="done")
    report = read_json(report_file(job, order.name), Report, FORMAT, order.name)
    sent = {peer: int(totals["bytes"]) for peer, totals in report.sent.items()}
    return WorkerEvent(end="done", sent=sent, received=report.received, learned=report.learned, spent=report.spent)


def _traffic(event: WorkerEvent) -> Iterator[str]:
    """Yield the bytes sent to and received from each peer, in words."""
    for peer in sorted(event.sent.keys() | event.received.keys()):
        yield f"; {event.sent.get(peer, 0):,} bytes sent to {peer}, {event.received.get(peer, 0):,} received from it"


def _failure(error: BaseException) -> WorkerEvent:
    """Return the last event of a failed attempt; the job is retried if others may be the reason."""
    # Too few members answered in time.
    if isinstance(error, RoundVoid):
        return WorkerEvent(end="again", said=str(error), public=error.public or str(error))
    if isinstance(error, PeerError) or not isinstance(error, TreatyError):
        own = isinstance(error, OSError)
        public = "one of its files, or its system, failed" if own else getattr(error, "public", None)
        said = str(error) or type(error).__name__
        said = "its process was terminated" if isinstance(error, SystemExit | KeyboardInterrupt) else said
        return WorkerEvent(end="again", said=said, public=public or (said if isinstance(error, PeerError) else ""))
    usual = (
        "its program failed" if isinstance(error, LocalProtocolError | CryptoError) else "its own files cannot be used"
    )
    return WorkerEvent(end="wrong", said=str(error), public=error.public or usual)


class _EventWriter:
    """Writes events; those of rounds and steps at most every `EVENT_INTERVAL`. `so_far` counts all rounds."""

    def __init__(self, answered: int = 0) -> None:
        self._lock = threading.Lock()
        self._last = 0.0
        # Rounds finished before this attempt.
        self._answered, self._first = answered, -1
        self.so_far = WorkerEvent(answered=answered)

    def __call__(self, event: WorkerEvent) -> None:
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
            sys.stdout.buffer.flush()

    def rounds(self, done: int, total: int) -> None:
        self._first = done if self._first < 0 else self._first
        # Each class's model restarts at 0.
        answered = max(self.so_far.answered, self._answered + done - self._first)
        self.so_far = WorkerEvent(done=done, total=total, answered=answered)
        self._write_limited(self.so_far, last=done >= total)

    def phase(self, title: str, done: int, total: int) -> None:
        self._write_limited(
            WorkerEvent(phase=re.sub(r" at unix:\S+", "", title), done=done, total=total), last=done >= total
        )

    def _write_limited(self, event: WorkerEvent, *, last: bool) -> None:
        now = time.monotonic()
        if last or now - self._last >= EVENT_INTERVAL:
            self._last = now
            self(event)


def _log_to(file: Path) -> None:
    """Append to the job's log, which only its owner may read: errors may show cells of a table."""
    os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    handler = logging.FileHandler(file, encoding="utf-8")
    formatter = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    package = logging.getLogger("treaty")
    package.setLevel(logging.INFO)
    package.addHandler(handler)


if __name__ == "__main__":
    main()
