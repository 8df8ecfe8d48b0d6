"""The process that runs this organisation's party in one attempt at a job. It ends with its node.

It reads a `WorkerOrder` from standard input, and writes events to standard output, each as one line of JSON. The active
party's process of a service also takes `Requests` of rows.
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
from treaty.node.policy import DataSet
from treaty.node.proposals import Verb
from treaty.node.requests import Requests, id_value
from treaty.node.settings import alone
from treaty.runs.job import Job, id_column
from treaty.runs.job_files import decoded_job
from treaty.runs.party import train_party
from treaty.runs.prediction import explain_party, find_part, predict_party, serve_online
from treaty.runs.processes import line_of_parent
from treaty.runs.progress import TrainingBar
from treaty.runs.report import FORMAT, Report, report_file
from treaty.systems.vertical.prediction import Asked

logger = logging.getLogger("treaty.node.worker")  # it runs as __main__

EVENT_INTERVAL = 0.2  # minimum seconds between two events about rounds


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    # This party's copy of the job, with its tables, key and folders, as `Job.encoded` writes it.
    job: str
    name: str
    verb: Verb
    # At the active party: resume from the checkpoint, if there is one.
    resume: bool
    # Files: the log, which is appended to; and the lock of the one process that may write the job's checkpoints.
    log: str
    lock: str
    # File for predictions or contributions.
    result: str
    # Socket at which a service takes requests.
    online: str
    # Data sets of queries, by the file for their rows.
    fetch: dict[str, DataSet] = {}
    # Rounds of a training in which this party has taken part, over all attempts, and their maximum.
    answered: int = 0
    most_answered: int = 1 << 40


class WorkerEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An event of the process."""

    # The step before the first round that is under way; "" for rounds.
    phase: str = ""
    done: int = 0
    total: int = 0
    # Rounds in which this party has taken part, over all attempts.
    answered: int = 0
    # "" if it runs; "done"; "again" if another party, the network or the system failed, so that another attempt may
    # succeed; "wrong" if this party's own options, tables or ledgers are wrong.
    end: str = ""
    # What went wrong: for this organisation, and for others.
    said: str = ""
    public: str = ""
    # Bytes to, and from, each peer.
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    # What each party learned, in sentences.
    learned: dict[str, list[str]] = {}
    # What this party's noise has cost.
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
        # At once: a thread that still sends to a peer would be waited for.
        os._exit(1)
    success = _success(order, job, transcript)
    sent, received = success.sent, success.received
    traffic = [
        f"; {sent.get(peer, 0):,} bytes sent to {peer}, {received.get(peer, 0):,} received from it"
        for peer in sorted(sent.keys() | received.keys())
    ]
    logger.info("%s: done%s", order.name, "".join(traffic))
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
    result, noted = Path(order.result), list[Transcript]()
    if order.verb == "serve":
        schema = find_part(job, order.name).schema
        normalise = () if job.align is None else job.align.normalise

        def ready(numbers: dict[str, int]) -> Iterator[Asked | None]:
            by_value = {id_value(one): number for one, number in numbers.items()}
            write(WorkerEvent(phase=f"serving {len(by_value)} rows", done=1, total=1))
            return iter(Requests(Path(order.online), by_value, schema, normalise))

        serve_online(job, order.name, ready, write.phase)
        return None
    if order.verb == "explain":
        found = explain_party(job, order.name, write.phase, noted.append)
    else:
        ids, margins = predict_party(job, order.name, write.phase, noted.append)
        columns: dict[str, Any] = {} if ids is None else {id_column(job, order.name): ids}
        predictions = {} if margins is None else find_part(job, order.name).predictions(margins)
        found = {**columns, **predictions} if predictions else {}
    if found:
        write_predictions(result, found)
    return noted[0] if noted else None


def _success(order: WorkerOrder, job: Job, transcript: Transcript | None) -> WorkerEvent:
    """Return the last event: traffic, and for a training what was learned and spent, from its report."""
    if transcript is not None:
        bytes_of = transcript.bytes_by_peer
        return WorkerEvent(end="done", sent=bytes_of("sent"), received=bytes_of("received"))
    file = report_file(job, order.name)
    if order.verb != "train" or not file.exists():
        return WorkerEvent(end="done")
    found = read_json(file, Report, FORMAT, order.name)
    sent = {peer: int(totals["bytes"]) for peer, totals in found.sent.items()}
    return WorkerEvent(end="done", sent=sent, received=found.received, learned=found.learned, spent=found.spent)


def _failure(error: BaseException) -> WorkerEvent:
    """Return the last event of a failed attempt; the job is retried if others may be the reason."""
    # Void rounds are those in which too few members answered in time.
    others = isinstance(error, PeerError | RoundVoid)
    if others or not isinstance(error, TreatyError):
        own = isinstance(error, OSError)
        public = "one of its files, or its system, failed" if own else getattr(error, "public", None)
        said = str(error) or type(error).__name__
        said = "its process was terminated" if isinstance(error, SystemExit | KeyboardInterrupt) else said
        return WorkerEvent(end="again", said=said, public=public or (said if others else ""))
    own_fault = isinstance(error, LocalProtocolError | CryptoError)
    usual = "its program failed" if own_fault else "its own files cannot be used"
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
        self._write_limited(self.so_far)

    def phase(self, title: str, done: int, total: int) -> None:
        self._write_limited(WorkerEvent(phase=re.sub(r" at unix:\S+", "", title), done=done, total=total))

    def _write_limited(self, event: WorkerEvent) -> None:
        now = time.monotonic()
        if event.done >= event.total or now - self._last >= EVENT_INTERVAL:
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
