"""Processes that run this organisation's party: how they are started, watched and ended.

The proposal names data sets; the process gets a copy of the job (`local_job`) with files, keys, addresses and folders.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from treaty.machine.process import cores
from treaty.models.checkpoints import checkpoint_file
from treaty.node.cards import Card
from treaty.node.forgetting import checkpoints_of, lock_of, log_of, report_of, results_of
from treaty.node.identity import Own
from treaty.node.online import serving_socket
from treaty.node.proposals import Verb, data_sets, name_of
from treaty.node.settings import Settings
from treaty.node.worker import WorkerEvent, WorkerOrder
from treaty.runs.job import Job

LAST_WORDS = 20.0
"""Seconds for a process that was asked to end to notify its peers and write its checkpoint."""


def tables_of(job: Job, verb: Verb, settings: Settings, snapshots: Path | None = None) -> dict[str, str]:
    """Return the files of the data sets that a job reads at this node, by the names of the data sets.

    The rows of a query are kept in `snapshots`, so that later attempts have the same rows; None: the newest snapshot.

    Raises
    ------
    ConfigError
        If the job names an unknown data set.
    """
    named = {of: settings.data_set(of) for of in data_sets(job, settings.name, verb)}
    return {
        of: data_set.path if data_set.sql is None or snapshots is None else str(snapshots / f"{of}.parquet")
        for of, data_set in named.items()
    }


def local_job(
    job: Job,
    job_id: str,
    verb: Verb,
    own: Own,
    cards: Mapping[str, Card],
    settings: Settings,
    tables: Mapping[str, str],
    addresses: Mapping[str, str],
) -> Job:
    """Return the job as this organisation's process runs it.

    Parameters
    ----------
    cards : mapping of str to Card
        The cards of all other parties.
    tables : mapping of str to str
        The files by data set, from `tables_of`.
    addresses : mapping of str to str
        Where this party listens, and where it dials each peer.
    """
    name = own.name
    certificates = {party: card.certificate for party, card in cards.items()} | {name: own.card.certificate}
    parties = {
        party: msgspec.structs.replace(member, address=addresses.get(party), certificate=certificates[party])
        for party, member in job.parties.items()
    }
    given = job.parties[name]
    named = given.table if verb == "train" else given.predict_table
    main = None if named is None else settings.data_set(named)
    mine = parties[name] if main is None else main.member(parties[name], aligned=job.align is not None)
    mine = msgspec.structs.replace(
        mine,
        key=own.identity.key.decode(),
        table=tables[given.table] if verb == "train" and given.table is not None else None,
        eval_tables=[tables[of] for of in given.eval_tables] if verb == "train" else [],
        predict_table=tables[given.predict_table] if verb != "train" and given.predict_table is not None else None,
    )
    if main is not None and verb == "train":
        mine = msgspec.structs.replace(mine, most_recoverable=main.policy.most_recoverable)
    able = job.system.on_clusters(job.settings()[0])
    if main is not None and verb == "train" and job.roles().of[name] in able:
        mine = msgspec.structs.replace(mine, cluster=main.cluster, cluster_workers=main.cluster_workers)
    store = None if main is None else main.store
    if name == job.active and store is not None and getattr(job.settings()[0], "mechanism", None) == "label_rr":
        # Labels are randomised once and kept with the ledger: a second draw would cost epsilon again.
        mine = msgspec.structs.replace(mine, noisy_labels=str(Path(store) / f"{name}.noisy_labels"))
    folder = Path(settings.folder)
    return msgspec.structs.replace(
        job,
        name=name_of(job, job_id),
        parties={**parties, name: mine},
        output=str(folder / "models"),
        checkpoints=str(folder / "checkpoints"),
        store=store,
    )


class Process:
    """The process of one attempt at a job.

    `on_event` is called with each event, from a thread; the last event has an `end`, even if the process was killed.
    """

    def __init__(self, order: WorkerOrder, errors: Path, on_event: Callable[[WorkerEvent], None]) -> None:
        self._on_event = on_event
        with os.fdopen(os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "treaty.node.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
                # Ctrl-C at the node's terminal goes to the node alone.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, name="treaty-worker", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """Ask the process to end, and kill it after `LAST_WORDS` seconds; returns at once."""
        if self._process.poll() is None:
            self._process.terminate()
            killing = threading.Timer(LAST_WORDS, self._kill)
            killing.daemon = True
            killing.start()

    def wait(self, timeout: float) -> None:
        """Wait until the last event was handled; kill the process after `timeout` seconds."""
        self._reader.join(timeout)
        if self._reader.is_alive():
            self._kill()
            self._reader.join(5.0)

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def _read(self) -> None:
        decoder, ended = msgspec.json.Decoder(WorkerEvent), False
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        for line in self._process.stdout:
            try:
                event = decoder.decode(line)
            except msgspec.MsgspecError:  # printed by a library
                continue
            ended = ended or bool(event.end)
            self._on_event(event)
        code = self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        if not ended:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._on_event(WorkerEvent(end="again", said=f"its process {how}", public=f"its process {how}"))


def order_of(
    job: Job,
    job_id: str,
    verb: Verb,
    model: str,
    own: Own,
    cards: Mapping[str, Card],
    settings: Settings,
    addresses: Mapping[str, str],
    sockets: Path,
    wait: float,
) -> WorkerOrder:
    """Return the order for a process; arguments as in `local_job`.

    `sockets` is the folder of the node's sockets, `wait` the seconds to wait for the others to start.

    Raises
    ------
    ConfigError
        If the job names an unknown data set.
    """
    name, folder = own.name, Path(settings.folder)
    checkpoints, output, log = checkpoints_of(folder, job_id), results_of(folder, job_id, model), log_of(folder, job_id)
    for made in (checkpoints, output, log.parent):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    if verb == "train":
        # A report that exists later is then of this attempt, see `keeps_part`.
        report_of(folder, job_id, name).unlink(missing_ok=True)
    tables = tables_of(job, verb, settings, checkpoints)
    local = msgspec.structs.replace(
        local_job(job, job_id, verb, own, cards, settings, tables, addresses),
        output=str(output),
        checkpoints=str(checkpoints),
        wait=wait,
        n_jobs=max(1, cores() // settings.max_running),
    )
    resumes = verb == "train" and "resume" not in job.system.cannot and name == job.active
    return WorkerOrder(
        job=local.encoded().decode(),
        name=name,
        verb=verb,
        resume=resumes and checkpoint_file(checkpoints, name).exists(),
        log=str(log),
        lock=str(lock_of(folder, job_id)),
        result=str(output / f"{name}.{verb}-{job_id[:16]}.csv"),
        online=str(serving_socket(sockets, job_id)),
        fetch={path: settings.data[of] for of, path in tables.items() if settings.data[of].sql is not None},
    )
