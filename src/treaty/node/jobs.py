"""A node's jobs: proposals, approvals, and the state of each job here and at the other nodes. It runs none of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from treaty.errors import BudgetSpent, ConfigError, TreatyError
from treaty.messaging.messages import clean
from treaty.node import proposals
from treaty.node.attempts import OpenJob, stopped_by
from treaty.node.cards import Card, verify
from treaty.node.exchange import NodeConversation
from treaty.node.identity import Own, sign, trusted
from treaty.node.job_views import checked, verdict_on
from treaty.node.policy import PolicyVerdict, over_budget
from treaty.node.settings import JobFiles, Settings
from treaty.node.store import FINAL, JobRow, Store
from treaty.runs.job import Job

logger = logging.getLogger(__name__)

LONGEST_REASON = 1500  # characters of a reason sent to others
# States of a job that all have approved and that has not ended.
STAGES = ("queued", "waiting", "running")
# Refused proposals of a peer that the audit log keeps in an hour; further ones are only in the node's log.
MOST_REFUSALS = 100
# Verdicts that are computed at the same time.
AT_ONCE = 4
# Verdicts on jobs of one submitter that are started and not finished, so that it cannot block the others.
OF_ONE = 2


class Jobs:
    """The jobs of a node that have not ended; hold `lock` to change them.

    ``send_status(party, job)`` sends the status of a job to a party's node. ``over(job)`` is called when a job has
    ended, to end its process, and ``wake()`` when there is something to do.
    """

    def __init__(
        self,
        settings: Settings,
        own: Own,
        store: Store,
        send_status: Callable[[str, str], None],
        over: Callable[[OpenJob], None],
        wake: Callable[[], None],
    ) -> None:
        self.settings, self.own, self.store, self.name = settings, own, store, own.name
        self.standings: dict[str, OpenJob] = {}
        self.verdicts = Verdicts(wake)
        self.lock = threading.RLock()
        self._send_status, self._over = send_status, over
        self._sent = 0  # number of statuses sent
        # Proposals refused in this hour, by peer.
        self._hour, self._refusals = 0, Counter[str]()
        # By job and peer: the peer's process, and the count of its last status.
        self._newest: dict[tuple[str, str], tuple[bytes, int]] = {}
        self._cards: tuple[float, dict[str, Card]] = (-1e9, {})

    def trusted(self) -> dict[str, Card]:
        """Return the trusted cards of peers, read at most a second ago."""
        with self.lock:
            read, cards = self._cards
            if time.monotonic() - read > 1.0:
                try:
                    known = trusted(self.settings.keys)
                except OSError as error:
                    # Such as too many open files: keep trusting the cards read before.
                    logger.warning("cannot read the cards of peers now: %s", error)
                    return cards
                cards = {peer: card for peer, card in known.items() if peer in self.settings.peers}
                self._cards = time.monotonic(), cards
            return cards

    def view(self, job: str) -> proposals.JobStatus:
        """Return the status of a job here, for other nodes."""
        with self.lock:
            self._sent += 1
            at = self.standings.get(job)
            row = self.store.job(job) if at is None else at.row
            reason = row.reason if row.state in FINAL or (at is not None and at.proposal.trial) else ""
            of_open: dict[str, Any] = {"ended": row.attempt}
            if at is not None:
                of_open = {name: getattr(at, name) for name in ("asks", "ready", "runs", "ended")}
                of_open |= {"rounds": row.rounds, "total": row.total, "signed": dict(at.approvals)}
            return proposals.JobStatus(
                job=job, state=row.state, reason=reason, kept=row.kept, done=row.done, count=self._sent, **of_open
            )

    def load(self, *, all_states: bool) -> None:
        """Load jobs from the database: all at the start, later the proposed ones that commands have added."""
        for row in self.store.jobs() if all_states else self.store.jobs(["proposed"]):
            if row.state not in FINAL and row.id not in self.standings:
                self._load(row)

    def _load(self, row: JobRow) -> None:
        try:
            proposal = msgspec.json.decode(row.proposal, type=proposals.Proposal)
            job = proposal.described()
            roles = proposals.roles_of(job, proposal.verb)
        except (TreatyError, msgspec.MsgspecError) as error:
            # Proposed under another version of Treaty.
            self.end(row.id, "failed", f"this version of Treaty cannot run it: {error}")
            return
        if row.state in ("running", "queued"):
            event = {"what": "interrupted", "attempt": row.attempt}
            kept = row.kept
            # The last event of its process may be lost.
            if row.state == "running":
                kept = row.attempt if JobFiles(self.settings.folder, row.id).has_part(self.name) else 0
            row = self.store.change(row.id, state="waiting", kept=kept, reason="its node was restarted", event=event)
        at = OpenJob(self.name, row, proposal, job, roles, ended=row.attempt)
        for encoded in self.store.views(row.id).values():
            with suppress(msgspec.MsgspecError):
                self._approvals(at, msgspec.msgpack.decode(encoded, type=proposals.JobStatus).signed)
        self.standings[row.id] = at
        if row.state != "proposed" and self.name not in at.approvals:  # the keys were rotated
            self._sign(at)
            self.change(at, event={"what": "approval signed again", "why": "this organisation's keys are new"})

    def proposed(self, peer: str, conversation: NodeConversation, note: proposals.Proposed) -> None:
        """Accept a proposal, or send the peer the reason for refusing it."""
        job_id = proposals.id_of(note.proposal)
        if job_id in self.standings:
            return
        try:
            at = self._accepted(job_id, peer, note)
        except TreatyError as error:
            why, hour = clean(str(error), 500), int(time.time() / 3600.0)
            logger.warning("a proposal of %s was refused: %s", peer, why)
            if hour != self._hour:
                self._hour, self._refusals = hour, Counter()
            self._refusals[peer] += 1
            if self._refusals[peer] <= MOST_REFUSALS:
                self.store.note({"what": "refused", "who": peer, "job": job_id, "why": why})
            reason = f"{self.name} refuses it: {clean(error.public or str(error), 500)}"
            conversation.send(proposals.JobStatus(job=job_id, state="rejected", reason=reason))
            return
        if at is not None:
            self.standings[job_id] = at
            self._send_status_to_all(at)

    def _accepted(self, job_id: str, peer: str, note: proposals.Proposed) -> OpenJob | None:
        """Check and store a proposal of a peer; None if it is known already."""
        card = self.trusted().get(peer)
        if card is None or not verify(card, note.signature, proposals.statement("submit", job_id, peer)):
            raise _refused(f"the proposal is not signed by {peer}")
        proposal = proposals.read_proposal(note.proposal, self.settings.code)
        job = proposal.described()
        roles = proposals.roles_of(job, proposal.verb)
        if peer != job.active:
            raise _refused(f"{peer} may only propose jobs whose active party it is, got one of {clean(job.active, 63)}")
        if self.name not in job.parties:
            raise _refused(f"{self.name} takes no part in the job")
        if earlier := proposal.model or proposal.from_model:
            proposals.check_same(job, trained(self.store, earlier))
        limits, waiting = self.settings.limits, [at for at in self.standings.values() if at.row.submitter == peer]
        if len(waiting) >= limits.max_queued:
            raise _refused(f"{peer} has {len(waiting)} jobs at {self.name} that have not ended: no more are accepted")
        received = self.store.received(peer, time.time() - 86400.0)
        if received.total() >= limits.max_daily:
            raise _refused(f"{peer} has proposed {limits.max_daily} jobs to {self.name} within a day")
        if proposal.trial and received["check"] >= limits.max_checks:
            raise _refused(f"{self.name} has checked its tables {limits.max_checks} times for {peer} within a day")
        row = JobRow(
            job_id, note.proposal, note.signature, peer, proposal.kind, total=proposals.rounds_of(job, proposal.kind)
        )
        event = {"what": "received", "who": peer, "name": job.name, "verb": proposal.kind}
        if not self.store.add_job(row, event=event):
            return None
        return OpenJob(self.name, self.store.job(job_id), proposal, job, roles)

    def wanted(self, peer: str, conversation: NodeConversation, job: str) -> None:
        """Send a proposal to a party that asks for it. Only the active party does: from others it would be refused."""
        at = self.standings.get(job)
        if at is not None and at.leads and peer in at.job.parties:
            signature = sign(self.own, proposals.statement("submit", job, self.name))  # with the present keys
            conversation.send(proposals.Proposed(at.row.proposal, signature))
            conversation.send_status(job)

    def seen(self, peer: str, conversation: NodeConversation, view: proposals.JobStatus) -> None:
        """Process a peer's status of a job."""
        at = self.standings.get(view.job)
        if at is None:
            self._seen_later(peer, conversation, view)
            return
        incarnation, count = self._newest.get((view.job, peer), (b"", -1))
        if peer not in at.job.parties or (incarnation == conversation.incarnation and view.count <= count):
            return
        # Two conversations of a peer may overlap: an older status must not replace a newer one.
        self._newest[view.job, peer] = conversation.incarnation, view.count
        before, at.views[peer] = at.views.get(peer), view
        self._approvals(at, view.signed)
        if before is None or (before.state, before.signed) != (view.state, view.signed):
            self.store.put_view(view.job, peer, msgspec.msgpack.encode(view))

    def _seen_later(self, peer: str, conversation: NodeConversation, view: proposals.JobStatus) -> None:
        """Process a peer's status of a job that has ended here, or is unknown here."""
        if not self.store.has(view.job):
            if view.state not in FINAL:
                conversation.send(proposals.Wanted(view.job))
            return
        proposal = msgspec.json.decode(self.store.job(view.job).proposal, type=proposals.Proposal)
        if peer not in msgspec.json.decode(proposal.job)["parties"]:
            return
        if view.state in FINAL:
            self.store.put_view(view.job, peer, msgspec.msgpack.encode(view))
        else:
            # The peer does not know yet how the job ended.
            conversation.send_status(view.job)

    def _approvals(self, at: OpenJob, signed: Mapping[str, bytes]) -> None:
        """Keep valid approvals; a party signs again after it has rotated its keys."""
        for who, signature in signed.items():
            if at.approvals.get(who) == signature or who not in at.job.parties:
                continue
            card = self.own.card if who == self.name else self.trusted().get(who)
            if card is not None and verify(card, signature, proposals.statement("approve", at.row.id, who)):
                at.approvals[who] = signature

    def obey(self, job: str, command: str, given: Mapping[str, str]) -> None:
        """Execute a command of this node's user."""
        at, by, reason = self.standings.get(job), given.get("by", ""), given.get("reason", "")
        if at is None:
            return
        if command == "approve" and at.row.state == "proposed":
            at.approver = by or "a person"
        elif command == "reject" and at.row.state in ("proposed", "approved"):
            self.end(job, "rejected", reason or "rejected by a person", by=by)
        elif command in ("reject", "cancel"):
            # A rejected job that has started meanwhile is cancelled.
            self.end(job, "cancelled", reason or "cancelled by a person", by=by)

    def bring_on(self, at: OpenJob) -> bool:
        """Advance a job as far as possible without running it; return whether it may run."""
        hours, stopped, lead = self.settings.limits.job_hours, stopped_by(at), at.views.get(at.job.active)
        all_approved = at.approvals.keys() >= at.job.parties.keys()
        finished = lead is not None and lead.state == "finished"
        if stopped is not None:
            self.end(at.row.id, *stopped)
        elif time.time() - at.row.created > 3600.0 * hours and not (at.lasts and at.row.state in STAGES):
            self.end(at.row.id, "failed", f"{self.name}: it has not ended in {hours:g} hours")
        elif at.row.state == "proposed":
            self._judge(at)
        elif at.proposal.trial:
            # A trial ends once all nodes have passed it.
            if all_approved if at.leads else finished:
                self.end(at.row.id, "finished", at.row.reason)
            return False
        elif at.row.state == "approved":
            if all_approved:
                self.change(at, state="queued")
            elif finished:
                self.end(at.row.id, "finished", "the job finished without this party")
        return at.row.state in STAGES

    def _judge(self, at: OpenJob) -> None:
        """Once the policy's verdict is there, approve or reject the job unless a person must decide."""
        try:
            found = self.verdicts.ask(at.row.id, at.row.submitter, partial(self._found, at, self.trusted()))
        except Exception as error:
            logger.exception("no verdict on job %s", at.row.id[:12])
            self.end(at.row.id, "rejected", f"{self.name}: its policy could not be evaluated", detail=repr(error))
            return
        if found is None:
            return
        if not found.allowed:
            rules = ", ".join(finding.what for finding in found.findings if not finding.fine)
            why = f"by its policy: {rules}" if rules else "its tables cannot be used"
            reason = f"{self.name}: {'would' if at.proposal.trial else 'does'} not take part: {why}"
            wrong = [finding for finding in [*found.findings, *found.own] if not finding.fine]
            details = "; ".join(f"{finding.what}: {finding.said}" for finding in wrong)
            self.end(at.row.id, "rejected", reason, by="policy", detail=details)
        elif at.proposal.trial:
            person = "; a person must approve it" if found.needs_person else ""
            takes = "".join(f"; {finding.public}" for finding in found.own if finding.public)
            self._approve(at, "policy", reason=f"could take part{person}{takes}")
        elif at.approver or at.row.submitter == self.name:
            self._approve(at, at.approver or "its submitter")
        elif not found.needs_person:
            self._approve(at, "policy")

    def _found(self, at: OpenJob, cards: dict[str, Card]) -> PolicyVerdict:
        """Return the policy's verdict; for a trial, also check tables, folders and keys."""
        found = verdict_on(self.settings, cards, at.job, at.proposal.verb)
        if not at.proposal.trial or not found.allowed:
            return found
        own = checked(self.own, cards, self.settings, at.job, at.proposal.verb)
        return replace(found, allowed=all(finding.fine for finding in own), own=own)

    def _approve(self, at: OpenJob, by: str, reason: str = "") -> None:
        self._sign(at)
        self.change(at, state="approved", reason=reason, event={"what": "approved", "by": by})

    def _sign(self, at: OpenJob) -> None:
        """Sign this party's approval of a job, and store the signature."""
        signature = sign(self.own, proposals.statement("approve", at.row.id, self.name))
        at.approvals[self.name] = signature
        view = proposals.JobStatus(job=at.row.id, state="approved", signed={self.name: signature})
        self.store.put_view(at.row.id, self.name, msgspec.msgpack.encode(view))

    def share_budget(self, at: OpenJob, playing: Iterable[OpenJob]) -> bool:
        """Return whether a job may spend the same privacy budget as a running one; they run one after the other."""
        own = self._budgets(at)
        return bool(own) and any(own & self._budgets(other) for other in playing if other is not at)

    def check_budgets(self, at: OpenJob) -> None:
        """Raise BudgetSpent for an attempt that would exceed the budget that other jobs and attempts have left."""
        job, verb, in_ledger = at.job, at.proposal.verb, proposals.name_of(at.job, at.row.id)
        for of in proposals.data_sets(job, self.name, verb):
            if over := over_budget(job, verb, self.name, self.settings.data_set(of), in_ledger):
                raise BudgetSpent(f"{of}: {over}")

    def _budgets(self, at: OpenJob) -> set[str]:
        """Return the stores of a job's data sets whose noisy releases have a budget for all jobs together."""
        named = proposals.data_sets(at.job, self.name, at.proposal.verb)
        known = (self.settings.data.get(of) for of in named)
        return {of.store for of in known if of is not None and of.policy.most_epsilon_total is not None}

    def change(self, at: OpenJob, **changes: Any) -> None:
        """Change a job in the database, and send its status to all its parties."""
        at.row = self.store.change(at.row.id, **changes)
        self._send_status_to_all(at)

    def end(self, job_id: str, state: str, reason: str = "", *, by: str = "", detail: str = "") -> None:
        """Set a final state: `reason` is sent to the other parties, `detail` is only in the audit log."""
        reason = clean(reason, LONGEST_REASON)
        why = {"why": clean(detail or reason, 2 * LONGEST_REASON), "by": by}
        event = {"what": state} | {name: text for name, text in why.items() if text}
        changed = self.store.change(job_id, state=state, reason=reason, event=event)
        self.verdicts.drop(job_id)
        logger.info("job %s is %s%s", job_id[:12], state, f": {reason}" if reason else "")
        at = self.standings.pop(job_id, None)
        for key in [key for key in self._newest if key[0] == job_id]:
            del self._newest[key]
        if at is not None:
            at.row = changed
            self._send_status_to_all(at)
            self._over(at)

    def _send_status_to_all(self, at: OpenJob) -> None:
        for party in at.others:
            self._send_status(party, at.row.id)


def trained(store: Store, model: str) -> Job:
    """Return the job of a training that has finished here; ConfigError if there is none of that id."""
    row = store.job(model) if store.has(model) else None
    if row is None or row.verb != "train" or row.state != "finished":
        raise _refused(f"expected the id of a finished training, got {model[:12]}")
    if any(entry.event.get("what") == "forgotten" for entry in store.audit(job=model)):
        raise _refused(f"the model of job {model[:12]} was forgotten (treaty forget): train another")
    return msgspec.json.decode(row.proposal, type=proposals.Proposal).described()


def _refused(why: str) -> ConfigError:
    """Return the error for a refused proposal, whose sender may see all of the message."""
    return ConfigError(why, public=why)


class Verdicts:
    """Computes verdicts on jobs that wait for approval, each once, in a few threads; `wake` is called after each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._found: dict[str, Future[PolicyVerdict]] = {}
        # With submitters; includes jobs that have ended.
        self._under_way: list[tuple[str, Future[PolicyVerdict]]] = []
        self._readers = ThreadPoolExecutor(AT_ONCE, "treaty-verdict")

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    def ask(self, job: str, submitter: str, find: Callable[[], PolicyVerdict]) -> PolicyVerdict | None:
        """Return or raise the result of `find` for a job; None if it is not finished.

        Call again until it is: it starts when there is a free thread.
        """
        if job not in self._found:
            self._under_way = [each for each in self._under_way if not each[1].done()]
            # A slow query of one submitter must not block the verdicts on others' jobs.
            if sum(of == submitter for of, _ in self._under_way) >= OF_ONE:
                return None
            self._found[job] = begun = self._readers.submit(find)
            self._under_way.append((submitter, begun))
            begun.add_done_callback(lambda _: self._wake())
        return self._found[job].result() if self._found[job].done() else None

    def there(self, job: str) -> PolicyVerdict | None:
        """Return the verdict on a job; None if there is none yet, or no longer."""
        found = self._found.get(job)
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def drop(self, job: str) -> None:
        """Forget a job that has ended; a verdict that has started runs to its end."""
        found = self._found.pop(job, None)
        if found is not None:
            found.cancel()
