"""Attempts at a job: how nodes agree to start one, what follows when it ends, and this party's process in it.

The active party's node leads. It asks for attempt k. Every other node with a free slot that reaches its peers answers
that it is ready, and reserves the slot. Then the active party's node runs k, and the others follow. If a process ends
early, its node reports that, and the others end theirs. The active party's node then asks for k + 1, after a pause that
doubles while attempts make no progress. Each process resumes from the last tree that all have (`--resume`).

The decisions are pure: they do no I/O. The proposal names data sets; the process gets a copy of the job (`local_job`)
with files, keys, addresses and folders.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from treaty.machine.process import cores
from treaty.models.checkpoints import checkpoint_file
from treaty.node.cards import Card
from treaty.node.identity import Own
from treaty.node.proposals import JobStatus, Proposal, Verb, data_sets, name_of
from treaty.node.settings import JobFiles, Settings, serving_socket
from treaty.node.store import FINAL, JobRow
from treaty.node.worker import WorkerEvent, WorkerOrder
from treaty.runs.job import Job
from treaty.systems.system import Roles

# Seconds for which the processes of an attempt wait for each other.
CONNECT_WAIT = 60.0
# Seconds for a process that was asked to end to notify its peers and write its checkpoint.
LAST_WORDS = 20.0
# Seconds for the others to answer that they are ready.
ASKED_FOR = 30.0
# Attempts in a row without a new round, after which the job fails at each node that took part.
MOST_TRIES = 8
# Maximum seconds between two attempts.
LONGEST_PAUSE = 60.0


@dataclass
class OpenJob:
    """A job that has not ended at this node: what is stored (`row`), and the state of the node's process.

    `name` is this party's. `asks`, `ready`, `runs` and `ended` are numbers of attempts, as in `JobStatus`. `approver`
    approved the job here before the policy's verdict was known. Times are monotonic seconds.
    """

    name: str
    row: JobRow
    proposal: Proposal
    job: Job
    roles: Roles
    asks: int = 0
    ready: int = 0
    runs: int = 0
    ended: int = 0
    approvals: dict[str, bytes] = field(default_factory=dict)
    views: dict[str, JobStatus] = field(default_factory=dict)
    process: Any = None
    ending: bool = False  # its process was asked to end
    approver: str = ""
    asked_at: float = 0.0
    not_before: float = 0.0

    def __post_init__(self) -> None:
        system, options = self.job.system, self.job.settings()[0]
        self.leads = self.name == self.job.active
        # A service runs until it is cancelled, and takes no slot.
        self.lasts = self.proposal.verb == "serve"
        self.others = [party for party in self.job.parties if party != self.name]
        # The other parties that an attempt needs to start.
        absent = system.may_be_absent(self.roles, options)
        self.needed = [party for party in self.others if party in self.roles.of and party not in absent]
        # The parties with which this one exchanges messages; none if it takes no part. It needs the linked ones.
        self.peers = system.links(self.roles, options).get(self.name, [])
        self.linked = [peer for peer in self.peers if peer in self.needed]
        # The parties whose loss does not end an attempt.
        self.spared = system.may_lose(self.roles, options)


Decision = Literal["", "ask", "give up asking", "be ready", "not ready", "run", "stop", "left out", "finished"]


def decide(at: OpenJob, up: Collection[str], *, place: bool, now: float) -> Decision:
    """Return what the node does next about a job that all have approved and that has not ended.

    `up` are the connected peers, `place` is whether this node may start another job, `now` is monotonic.
    """
    # While this node's process runs, the only decision is whether to end it.
    if at.process is not None:
        return "stop" if not at.ending and _others_stopped(at) else ""
    if not at.leads:
        return _follow(at, up, place=place)
    if at.row.done:
        return "finished"
    kept = at.row.kept
    # The process, or the node, ended after all others had written their parts.
    if kept and kept == at.row.attempt:
        of_others = [at.views.get(party) for party in at.needed if party not in at.spared]
        if all(view is not None and view.kept == kept for view in of_others):
            return "finished"
        if any(view is None or view.runs == kept for view in of_others):
            # A party that still runs stores its part once it hears the others, or loses them.
            return ""
    # Asked for an attempt: run it once all needed parties are ready, or give up after a while.
    if at.asks:
        if not _lacking(at):
            return "run"
        return "give up asking" if now - at.asked_at > ASKED_FOR else ""
    reached = all(party in up for party in at.needed)
    return "ask" if now >= at.not_before and place and reached else ""


def follow_up(at: OpenJob, decision: Decision, now: float) -> dict[str, Any]:
    """Apply a decision to the attempt's numbers; return what changes in the database."""
    match decision:
        case "ask":
            at.asks, at.asked_at = at.row.attempt + 1, now
            return {"attempt": at.asks, "state": "queued"}
        case "give up asking":
            lacking, at.ended, at.asks = _lacking(at), at.asks, 0
            # A random pause, so that two jobs do not block each other again and again.
            at.not_before = now + random.uniform(1.0, 5.0)  # noqa: S311
            return {"reason": f"waiting for {', '.join(lacking)} to have a free slot"}
        case "be ready":
            at.ready = at.views[at.job.active].asks
            return {"attempt": at.ready, "state": "queued"}
        case "not ready":
            at.ended, at.ready = at.ready, 0
            return {"state": "queued"}
        case "run":
            at.runs, at.asks, at.ready, at.ending = at.row.attempt, 0, 0, False
            counts = {"tries": at.row.tries + 1, "answered": at.row.answered + 1}
            return {"state": "running", "reason": "", **counts}
    return {}


def over(at: OpenJob, *, done: bool, kept: bool) -> dict[str, Any]:
    """Record that this node's process of an attempt has ended; return what changes in the database."""
    at.process, at.ended, at.runs = None, at.runs, 0
    return {"kept": at.ended if kept else 0, "done": at.ended if done else 0}


def _lacking(at: OpenJob) -> list[str]:
    """Return the needed parties that are not ready for the attempt that this node asks for."""
    return [party for party in at.needed if (view := at.views.get(party)) is None or view.ready != at.asks]


def _follow(at: OpenJob, up: Collection[str], *, place: bool) -> Decision:
    lead = at.views.get(at.job.active)
    if lead is None:
        return ""
    if lead.state == "finished" and at.row.state in ("queued", "running", "waiting"):
        return "finished" if at.row.kept else "left out"
    # A slot is reserved: follow the lead once it runs, or free the slot if it asks for another attempt.
    if at.ready:
        if lead.runs == at.ready:
            return "run"
        return "not ready" if lead.asks != at.ready else ""
    # Helpers of a training take no part in a prediction.
    plays = at.name in at.roles.of
    if plays and lead.asks > max(at.ended, at.row.attempt) and place and all(peer in up for peer in at.linked):
        return "be ready"
    return ""


def _others_stopped(at: OpenJob) -> bool:
    """Return whether the attempt that runs here has ended early at another party, so that it cannot succeed."""
    # A process that ended early at the lead ends all others. At the lead, any needed party counts.
    if not at.leads:
        lead = at.views.get(at.job.active)
        if lead is None or lead.state == "finished":
            return False
        return lead.runs != at.runs and at.runs > max(lead.kept, lead.done)
    views = [at.views.get(party) for party in at.needed if party not in at.spared]
    return any(view is not None and view.ended >= at.runs > max(view.kept, view.done) for view in views)


def counted(at: OpenJob, done: int, answered: int) -> dict[str, int]:
    """Return what changes in the database when an attempt has finished, and this party answered, so many rounds."""
    changes = {"answered": answered} if answered > at.row.answered else {}
    return changes | ({"rounds": done, "tries": 1} if done > at.row.rounds else {})


def most_answered(total: int) -> int:
    """Return the maximum rounds, over all attempts, of a job of `total` rounds: some rounds have to be repeated."""
    return total + max(MOST_TRIES, total // 4)


def worn_out(at: OpenJob) -> str:
    """Return why this node takes part in no further attempt; "" if it does."""
    row, most = at.row, most_answered(at.row.total)
    if row.tries >= MOST_TRIES and not at.lasts:
        return f"no progress in {row.tries} attempts"
    repeated = row.total > 0 and row.answered >= most
    return f"its attempts have taken {most} rounds, but the job has {row.total}" if repeated else ""


def pause_after(at: OpenJob) -> float:
    """Return the seconds to wait after an attempt that ended early."""
    return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(at.row.tries, 10)) * random.uniform(0.8, 1.2)  # noqa: S311 - no secret


def stopped_by(at: OpenJob) -> tuple[str, str] | None:
    """Return the final state that another party's node has reported, and why; None if there is none."""
    for party in at.others:
        view = at.views.get(party)
        if view is None or view.state not in FINAL or view.state == "finished" or party in at.spared:
            continue
        # A party that rejects a job that already runs cancels it.
        state = "cancelled" if view.state == "rejected" and at.row.state == "running" else view.state
        return state, view.reason if view.reason.startswith(f"{party}: ") else f"{party}: {view.reason}"
    return None


def tables_of(job: Job, verb: Verb, settings: Settings, snapshots: Path | None = None) -> dict[str, str]:
    """Return the files of the data sets that a job reads at this node, by the names of the data sets.

    The rows of a query are kept in `snapshots`, so that later attempts have the same rows; None: the newest snapshot.
    Raises ConfigError if the job names an unknown data set.
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
    """Return the job as this organisation's process runs it: with files, keys, addresses and folders.

    `cards` are those of all other parties, `tables` comes from `tables_of`, and `addresses` is where this party
    listens, and where it dials each peer.
    """
    name, folder, trains, own_options = own.name, Path(settings.folder), verb == "train", job.settings()[0]
    certificates = {party: card.certificate for party, card in cards.items()} | {name: own.card.certificate}
    parties = {
        party: msgspec.structs.replace(member, address=addresses.get(party), certificate=certificates[party])
        for party, member in job.parties.items()
    }
    given = job.parties[name]
    named = given.table if trains else given.predict_table
    main = None if named is None else settings.data_set(named)
    mine = parties[name] if main is None else main.member(parties[name], aligned=job.align is not None)
    changes: dict[str, Any] = {"table": None, "eval_tables": [], "predict_table": None}
    changes["table" if trains else "predict_table"] = None if named is None else tables[named]
    if trains:
        changes["eval_tables"] = [tables[of] for of in given.eval_tables]
    if main is not None and trains:
        changes["most_recoverable"] = main.policy.most_recoverable
        if job.roles().of[name] in job.system.on_clusters(own_options):
            changes |= {"cluster": main.cluster, "cluster_workers": main.cluster_workers}
    store = None if main is None else main.store
    if name == job.active and store is not None and own_options.label_epsilon is not None:
        # Labels are randomised once and kept with the ledger: a second draw would cost epsilon again.
        changes["noisy_labels"] = str(Path(store) / f"{name}.noisy_labels")
    parties[name] = msgspec.structs.replace(mine, key=own.identity.key.decode(), **changes)
    return msgspec.structs.replace(
        job, name=name_of(job, job_id), parties=parties, output=str(folder / "models"),
        checkpoints=str(folder / "checkpoints"), store=store,
    )  # fmt: skip


def order_of(
    at: OpenJob, own: Own, cards: Mapping[str, Card], settings: Settings, addresses: Mapping[str, str], sockets: Path
) -> WorkerOrder:
    """Return the order for the process of an attempt; arguments as in `local_job`, `sockets` is the door's folder."""
    job, job_id, verb, name = at.job, at.row.id, at.proposal.verb, own.name
    files = JobFiles(settings.folder, job_id, at.proposal.model)
    for made in (files.checkpoints, files.results, files.log.parent):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    if verb == "train":
        # A report that exists later is then of this attempt, as `has_part` assumes.
        files.report(name).unlink(missing_ok=True)
    tables = tables_of(job, verb, settings, files.checkpoints)
    local = msgspec.structs.replace(
        local_job(job, job_id, verb, own, cards, settings, tables, addresses), output=str(files.results),
        checkpoints=str(files.checkpoints),
        from_model=str(JobFiles(settings.folder, job.from_model).results) if job.from_model else None,
        wait=CONNECT_WAIT, n_jobs=max(1, cores() // settings.max_running),
    )  # fmt: skip
    resumes = verb == "train" and "resume" not in job.system.cannot and at.leads
    return WorkerOrder(
        job=local.encoded().decode(), name=name, verb=verb,
        resume=resumes and checkpoint_file(files.checkpoints, name).exists(), log=str(files.log), lock=str(files.lock),
        result=str(files.results / f"{name}.{verb}-{job_id[:16]}.csv"), online=str(serving_socket(sockets, job_id)),
        fetch={path: settings.data[of] for of, path in tables.items() if settings.data[of].sql is not None},
        answered=at.row.answered, most_answered=most_answered(at.row.total),
    )  # fmt: skip


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
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, name="treaty-worker", daemon=True)
        self._reader.start()

    def end(self) -> None:
        """Ask the process to end, and kill it after `LAST_WORDS` seconds; returns at once."""
        if self._process.poll() is None:
            self._process.terminate()
            killing = threading.Timer(LAST_WORDS, self._process.kill)
            killing.daemon = True
            killing.start()

    def wait(self, timeout: float) -> None:
        """Wait until the last event was handled; kill the process after `timeout` seconds."""
        self._reader.join(timeout)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join(5.0)

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
