"""A node: it exchanges notes with its peers, and runs its organisation's party in jobs that all have approved."""

from __future__ import annotations

import datetime
import logging
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

import treaty
from treaty.errors import ConfigError, TreatyError
from treaty.files import write_whole
from treaty.messaging.messages import clean
from treaty.node import attempts
from treaty.node.cards import near_their_end, verify
from treaty.node.door import Door
from treaty.node.exchange import Exchange, NodeConversation
from treaty.node.identity import load_own, sign
from treaty.node.jobs import Jobs
from treaty.node.proposals import Back, HeadNote, Hello, JobStatus, Note, Proposed, Wanted
from treaty.node.settings import JobFiles, Settings, alone, clear_checkpoints
from treaty.node.store import FINAL, AuditHead, Store, head_statement
from treaty.node.worker import WorkerEvent

logger = logging.getLogger(__name__)

# Maximum seconds between two checks of all jobs.
TICK = 0.5
# Minimum seconds between two updates of a job's finished rounds.
ROUNDS_EVERY = 1.0
# Minimum seconds between two audit log entries of one kind about a peer.
NOTED_EVERY = 3600.0
# Notes of peers and events of processes that may wait to be processed; senders of more are blocked.
INBOX_SIZE = 1000


class Node:
    """An organisation's node; `run` works until `stop` is called.

    Raises ConfigError if another node uses the folder, if keys or the database cannot be used, or if the node cannot
    listen at its address.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.name, self.folder = settings, settings.name, Path(settings.folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = load_own(settings.keys, settings.name)
        self._inbox: queue.Queue[tuple[Any, ...]] = queue.Queue(INBOX_SIZE)
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._unexpected = ("", "")
        self._warned_on: datetime.date | None = None
        # By peer and kind of event: the time of the last entry in the audit log, and the number left out since.
        self._of_peers: dict[tuple[str, str], tuple[float, int]] = {}
        # By job: when its rounds were last stored.
        self._noted: dict[str, float] = {}
        with ExitStack() as held:
            busy = ConfigError(f"another node's process uses the folder {self.folder}: stop it first")
            held.enter_context(alone(self.folder / ".lock", busy))
            self.store = held.enter_context(Store(self.folder))
            self.jobs = Jobs(
                settings, own, self.store, lambda peer, job: self.exchange.send_status(peer, job), self._over,
                self._wake.set,
            )  # fmt: skip
            held.callback(self.jobs.verdicts.close)
            sockets = held.enter_context(_sockets(self.folder))
            self.door = Door(
                settings.listen, sockets, settings.dialled,
                lambda peer, token, job: bool(job) and self.exchange.send(peer, Back(token, job)), settings.proxy,
            )  # fmt: skip
            self.door.jobs = self.jobs.standings
            held.callback(self.door.close)
            dialled = {peer: self.door.peer_socket(peer) for peer in settings.dialled}
            self.exchange = Exchange(
                own, self.jobs.trusted, self._put, self.jobs.view, self.head, self.door.node_socket, dialled,
                treaty.__version__,
            )  # fmt: skip
            # closed when the node stops, the last one first: what uses the database comes after it
            self.held = held.pop_all()

    def head(self) -> HeadNote:
        """Return the newest entry of the audit log, signed."""
        newest = self.store.head()
        signature = sign(self.jobs.own, head_statement(self.name, newest.seq, newest.digest))
        return HeadNote(newest.seq, newest.digest, signature)

    def run(self) -> None:
        """Work until `stop` is called."""
        self.store.note({"what": "node started", "version": treaty.__version__})
        for peer in self.settings.peers:
            self.store.set_peer(peer, False, "it has not connected since this node was started")
        with self.jobs.lock:
            self.jobs.load(all_states=True)
        # Remove checkpoints of jobs that had just ended when the node was killed.
        for kept in (self.folder / "checkpoints").glob("*"):
            if self.store.has(kept.name) and self.store.job(kept.name).state in FINAL:
                self._clear(kept.name)
        self.exchange.start()
        logger.info("%s is up%s", self.name, f", at {self.door.address}" if self.door.address else "; no port is open")
        try:
            while not self._stopping.is_set():
                self._wake.wait(TICK)
                self._wake.clear()
                with self.jobs.lock, self._catching("a check of all jobs"):
                    self._look()
        finally:
            self._shut()

    def stop(self) -> None:
        """Make `run` return after the processes have written their checkpoints."""
        self._stopping.set()
        self._wake.set()

    def _shut(self) -> None:
        with self.jobs.lock:
            playing = [at for at in self.jobs.standings.values() if at.process is not None]
            for at in playing:
                at.ending = True
                at.process.end()
        for at in playing:
            at.process.wait(attempts.LAST_WORDS + 5.0)
        # Closes everything, even if the database cannot be written any more.
        with self.held:
            with self.jobs.lock:
                self._read_inbox()
            self.exchange.close()
            for peer in self.settings.peers:
                self.store.set_peer(peer, False, "this node has stopped")
            self.store.note({"what": "node stopped"})

    def _put(self, *item: Any) -> None:
        """Queue an event for the node's own thread; conversations and processes call this from theirs."""
        self._inbox.put(item)
        self._wake.set()

    def _look(self) -> None:
        """Process the inbox and commands, then advance each job."""
        self._warn_of_ends()
        self._read_inbox()
        if self.store.changed():
            # Before the commands, which may be about a new job.
            self.jobs.load(all_states=False)
        for command in self.store.take_commands():
            try:
                self.jobs.obey(command.job, command.command, msgspec.json.decode(command.argument or b"{}"))
            except (TreatyError, msgspec.MsgspecError) as error:
                logger.warning("cannot %s %s: %s", command.command, command.job[:12], error)
        up = {peer for peer in self.settings.peers if self.exchange.is_up(peer)}
        for at in list(self.jobs.standings.values()):
            with self._catching(f"job {at.row.id[:12]}"):
                if self.jobs.bring_on(at):
                    self._act(at, up)

    def _warn_of_ends(self) -> None:
        """Warn once a day of certificates that end soon: a node may run longer than they are valid."""
        today = datetime.datetime.now(datetime.UTC).date()
        if self._warned_on != today:
            self._warned_on = today
            for why in near_their_end([self.jobs.own.card, *self.jobs.trusted().values()]):
                logger.warning(why)

    @contextmanager
    def _catching(self, what: str) -> Iterator[None]:
        """Record an unexpected error, instead of ending the node and all its jobs."""
        try:
            yield
        except Exception as error:
            logger.exception("unexpected error - at %s", what)
            why = clean(f"{type(error).__name__}: {error}", 500)
            # A repeated error is only in the node's log.
            if (what, why) != self._unexpected:
                self._unexpected = what, why
                with suppress(TreatyError):
                    self.store.note({"what": "unexpected error", "at": what, "why": why})

    def _read_inbox(self) -> None:
        while True:
            try:
                kind, *what = self._inbox.get_nowait()
            except queue.Empty:
                return
            act: Any = {
                "connected": self._connected, "note": self._handle, "lost": self._lost, "event": self._happened
            }[kind]  # fmt: skip
            with self._catching(kind):
                act(*what)

    def _connected(self, peer: str, conversation: NodeConversation, hello: Hello) -> None:
        version = clean(hello.treaty, 40)
        if self.store.set_peer(peer, True, f"Treaty {version}"):
            self._note_of(peer, {"what": "peer up", "version": version})
            logger.info("%s is connected", peer)
        for job, at in self.jobs.standings.items():
            if peer in at.job.parties:
                conversation.send_status(job)

    def _lost(self, peer: str, why: str) -> None:
        if self.store.set_peer(peer, False, why):
            self._note_of(peer, {"what": "peer down", "why": why})
            logger.info("%s is away: %s", peer, why)

    def _handle(self, peer: str, conversation: NodeConversation, note: Note) -> None:
        match note:
            case JobStatus():
                self.jobs.seen(peer, conversation, note)
            case Wanted(job=job):
                self.jobs.wanted(peer, conversation, job)
            case Proposed():
                self.jobs.proposed(peer, conversation, note)
            case Back(token=token, job=job):
                at = self.jobs.standings.get(job)
                if at is not None and peer in at.job.parties:
                    self.door.dial_back(peer, token, job)
            case HeadNote(entry=entry, digest=digest, signature=signature):
                card = self.jobs.trusted().get(peer)
                if card is None or not verify(card, signature, head_statement(peer, entry, digest)):
                    fault, signature = f"{peer} sent a head of its audit log that its key has not signed", b""
                else:
                    fault = self.store.note_head(peer, entry, digest, signature)
                evidence = {"head": str(AuditHead(entry, digest, signature))}
                if fault and self._note_of(peer, {"what": "audit log of a peer", "why": fault, **evidence}):
                    logger.warning("%s", fault)

    def _note_of(self, peer: str, event: dict[str, Any]) -> bool:
        """Record an event that a peer can cause at will: at most once an hour, with the number of times.

        Returns whether it is recorded now.
        """
        key, now = (peer, str(event["what"])), time.monotonic()
        since, left_out = self._of_peers.get(key, (-NOTED_EVERY, 0))
        if now - since < NOTED_EVERY:
            self._of_peers[key] = since, left_out + 1
            return False
        self._of_peers[key] = now, 0
        self.store.note({**event, "who": peer, **({"times": left_out + 1} if left_out else {})})
        return True

    # running jobs

    def _act(self, at: attempts.OpenJob, up: set[str]) -> None:
        """Do the next step of a job that all have approved."""
        jobs = self.jobs.standings.values()
        playing = [of for of in jobs if not of.lasts and (of.asks or of.ready or of.process is not None)]
        place = at.lasts or (len(playing) < self.settings.max_running and not self.jobs.share_budget(at, playing))
        now = time.monotonic()
        if at.process is not None and not at.ending and set(at.linked) - self.jobs.trusted().keys():
            # A card was revoked or has expired: send nothing more.
            at.ending = True
            at.process.end()
        decision = attempts.decide(at, up, place=place, now=now)
        if decision in ("ask", "be ready") and (why := attempts.worn_out(at)):
            self.jobs.end(at.row.id, "failed", f"{self.name}: {why}")
            return
        match decision:
            case "ask" | "give up asking" | "be ready" | "not ready":
                self.jobs.change(at, **attempts.follow_up(at, decision, now))
            case "run":
                self._begin(at, attempts.follow_up(at, decision, now))
            case "stop":
                at.ending = True
                at.process.end()
            case "finished":
                self.jobs.end(at.row.id, "finished")
            case "left out":
                self.jobs.end(at.row.id, "finished", "the job finished without this party")

    def _begin(self, at: attempts.OpenJob, changes: dict[str, Any]) -> None:
        job_id, attempt = at.row.id, at.runs
        # The attempt counts before it can send anything.
        self.jobs.change(at, **changes)
        try:
            self.jobs.check_budgets(at)
            addresses = {peer: f"unix:{path}" for peer, path in self.door.open_job(job_id, at.peers).items()}
            addresses[self.name] = f"unix:{self.door.job_socket(job_id)}"
            order = attempts.order_of(
                at, self.jobs.own, self.jobs.trusted(), self.settings, addresses, self.door.folder
            )
            log = JobFiles(self.folder, job_id).log
            at.process = attempts.Process(order, log, lambda event: self._put("event", job_id, attempt, event))
        except (OSError, KeyError, TreatyError) as error:
            # KeyError: a card was revoked just now.
            end = "wrong" if isinstance(error, TreatyError) else "again"
            public = getattr(error, "public", None) or "its process could not start"
            self._happened(job_id, attempt, WorkerEvent(end=end, said=str(error), public=public))
            return
        event = {"what": "started", "attempt": attempt, "process": at.process.pid}
        self.jobs.change(at, event=event)

    def _happened(self, job_id: str, attempt: int, event: WorkerEvent) -> None:
        at = self.jobs.standings.get(job_id)
        if at is None or at.runs != attempt:
            return
        if not event.end:
            now, changes = time.monotonic(), {} if event.phase else attempts.counted(at, event.done, event.answered)
            if changes and (now - self._noted.get(job_id, 0.0) >= ROUNDS_EVERY or event.done >= event.total):
                self._noted[job_id] = now
                self.jobs.change(at, **changes)
            return
        self.door.close_job(job_id)
        done, trains = event.end == "done", at.proposal.verb == "train"
        files = JobFiles(self.folder, job_id)
        numbers = attempts.over(at, done=done, kept=files.has_part(self.name) if trains else done)
        lead, helps = at.views.get(at.job.active), self.name not in at.roles.owners
        # A helper's process reports no rounds: take those of the active party.
        of_lead = min(lead.rounds, at.row.total) if lead is not None and helps else 0
        numbers |= attempts.counted(at, max(event.done, of_lead), event.answered)
        if done:
            entry: dict[str, Any] = {"what": "played", "attempt": attempt}
            entry |= {"sent": event.sent, "received": event.received} if event.sent or event.received else {}
            entry |= {"learned": [f"{who}: {each}" for who, facts in event.learned.items() for each in facts]}
            entry |= {"spent": event.spent} if event.spent else {}
            self.jobs.change(
                at, **numbers, state="waiting", reason=f"done; waiting for {at.job.active} to finish", event=entry
            )
        elif event.end == "wrong":
            self.jobs.end(job_id, "failed", f"{self.name}: {event.public}", detail=event.said)
        else:
            self._again(at, event, numbers)

    def _again(self, at: attempts.OpenJob, event: WorkerEvent, numbers: dict[str, int]) -> None:
        """Wait for another attempt, or give up if attempts make no progress."""
        stopped = {"what": "stopped", "attempt": at.ended, "why": event.said}
        self.jobs.change(at, **numbers, state="waiting", reason=event.said, event=stopped)
        at.not_before = time.monotonic() + attempts.pause_after(at)
        if at.leads and not at.row.kept and (why := attempts.worn_out(at)):
            last = event.public or "its process ended; the details are in its log"
            self.jobs.end(at.row.id, "failed", f"{self.name}: {why}; the last one: {last}", detail=event.said)

    def _over(self, at: attempts.OpenJob) -> None:
        """End the process of a job that has ended, and remove what only its attempts needed."""
        self._noted.pop(at.row.id, None)
        for party in at.others:
            # Evidence of what this node's audit log says of the job.
            self.exchange.send(party, self.head())
        if at.process is not None:
            at.process.end()
            self.door.close_job(at.row.id)
        self._clear(at.row.id)

    def _clear(self, job: str) -> None:
        """Remove an ended job's checkpoints in another thread, as its process may still hold them."""
        threading.Thread(target=clear_checkpoints, args=(self.folder, job), name="treaty-clear", daemon=True).start()


@contextmanager
def _sockets(folder: Path) -> Iterator[Path]:
    """Make a folder for sockets in the system's temporary folder: paths of sockets must be short."""
    noted = folder / "sockets"
    # A killed node has left its sockets.
    if noted.exists():
        left = Path(noted.read_text())
        if left.parent == Path(tempfile.gettempdir()) and left.name.startswith("treaty-"):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="treaty-") as made:
        write_whole(noted, [made.encode()])
        yield Path(made)
