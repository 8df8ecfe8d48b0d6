"""The node's page as HTML: jobs, approvals waiting, models, peers. No script, one style sheet, nothing loaded."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from treaty.errors import TreatyError
from treaty.node.audit_log import AuditHead
from treaty.node.notes import JobStatus
from treaty.node.policy import PolicyVerdict
from treaty.node.proposals import Proposal, in_words
from treaty.node.settings import Settings
from treaty.node.store import FINAL, JobRow, PeerState, Store
from treaty.node.verdicts import learned
from treaty.report.contents import STYLE as BASE
from treaty.report.contents import Html, joined, tag

REFRESH = 5  # seconds


@dataclass(frozen=True)
class Progress:
    """How far a job is: `done` of `total` in `unit`, and how many seconds are left, where that is known."""

    done: int
    total: int
    unit: str = "trees"
    seconds_left: float | None = None


@dataclass(frozen=True)
class JobView:
    """What the page shows of a job, read from its proposal and from what the parties' nodes said.

    Attributes
    ----------
    title : str
        What the job is, in a few words.
    states : mapping
        By party, the state that its node has told; all parties of the job, this node's own among them.
    hash : str
        The digest of the proposal, which parties compare.
    progress : Progress or None
    disclosures : sequence of str
        What would be learned, or was, a sentence each.
    verdict : sequence of (bool, str)
        What this node's policy finds: whether a rule allows it, and the rule in words.
    models : sequence of str
        Names of the parts of models that this node has kept of it.
    sent, received : mapping
        Bytes of messages by peer, in this job so far.
    """

    title: str
    states: Mapping[str, str] = field(default_factory=dict)
    hash: str = ""
    progress: Progress | None = None
    disclosures: Sequence[str] = ()
    verdict: Sequence[tuple[bool, str]] = ()
    models: Sequence[str] = ()
    sent: Mapping[str, int] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)


Shown = tuple[JobRow, JobView]

STYLE = (
    BASE
    + """
.rows{list-style:none}
.rows li{padding:.45rem 0;border-top:1px solid var(--line);display:flex;flex-wrap:wrap;gap:0 .7rem;align-items:baseline}
.rows li:first-child{border:0;padding-top:0}
.rows li:last-child{padding-bottom:0}
.state{font-weight:600;font-size:.875rem;white-space:nowrap}
.state::before{content:"\\25CF\\00A0"}
.good{color:var(--good)}.bad{color:var(--bad)}.busy{color:var(--busy)}.wait{color:var(--wait)}
.parties{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;margin-top:.5rem}
.verdict{list-style:none;padding:0}
.verdict li{display:grid;grid-template-columns:4.5rem 1fr;align-items:baseline}
.verdict .state::before{content:none}
progress{width:100%;height:.7rem;margin-top:.6rem;accent-color:var(--busy)}
"""
)
STYLE_HASH = "sha256-" + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()

_LOOKS = {
    "proposed": "wait", "approved": "busy", "queued": "busy", "running": "busy", "waiting": "wait",
    "finished": "good", "failed": "bad", "rejected": "bad", "cancelled": "dim",
}  # fmt: skip


def overview(
    name: str, open_jobs: Sequence[Shown], ended: Sequence[Shown], peers: Mapping[str, PeerState], head: AuditHead,
    *, refresh: bool, now: float,
) -> str:  # fmt: skip
    """Return the node's page: jobs that have not ended, the newest of those that have, and peers."""
    asked = [shown for shown in open_jobs if shown[0].state == "proposed"]
    going = [shown for shown in open_jobs if shown[0].state != "proposed"]
    models = [tag("li", tag("code", model), _of(job)) for job, view in ended for model in view.models]
    up = sum(peer.up for peer in peers.values())
    facts = f"{up} of {len(peers)} peers connected", f"{len(going)} jobs under way", f"{len(asked)} to approve"
    content = joined([
        tag("header", tag("h1", f"Node of {name}"), tag("p", " · ".join(facts), look="dim")),
        tag("main",
            _section("To approve", [_card(*shown, whole=True) for shown in asked], "No job waits for an approval."),
            _section("Under way", [_card(*shown) for shown in going], "No job is under way."),
            _section("Ended", _rows(_ended_row(*shown) for shown in ended), "No job has ended yet."),
            _section("Models", _rows(models), "No job that is shown here has left a model."),
            _section("Peers", _rows(_peer_row(*peer) for peer in peers.items()), "This node has no peers."),
        ),
    ])  # fmt: skip
    return _document(f"{name}: node", content, head, refresh=refresh, now=now)


def job_page(name: str, job: JobRow, view: JobView, head: AuditHead, *, refresh: bool, now: float) -> str:
    """Return the page of one job, with all that is known of it."""
    head_line = tag("header", tag("p", tag("a", f"Node of {name}", href="/")), tag("h1", view.title))
    refresh = refresh and job.state not in FINAL
    content = joined(
        [head_line, tag("main", tag("article", tag("p", _state(job.state)), *_facts(job, view), *_details(job, view)))]
    )
    return _document(f"{view.title}: {name}", content, head, refresh=refresh, now=now)


def _document(title: str, content: Html, head: AuditHead, *, refresh: bool, now: float) -> str:
    again = Html(f'<meta http-equiv="refresh" content="{REFRESH}">') if refresh else Html("")
    turn = tag("a", "keep it as it is", href="?still") if refresh else tag("a", "show it anew", href="?")
    every = f"Shown anew every {REFRESH} seconds: " if refresh else "Not shown anew by itself: "
    log = f" · audit log: {head.seq} entries, head {head.digest.hex()[:16]} · "
    foot = tag("footer", "As of ", _time(now), log, every, turn)
    meta = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">')
    style = Html(f"<style>{STYLE}</style>")
    whole = tag("html", tag("head", meta, again, tag("title", title), style), tag("body", content, foot), lang="en")
    return f"<!doctype html>{whole}"


def _section(title: str, inside: Sequence[Html], none: str) -> Html:
    anchor = title.lower().replace(" ", "-")
    return tag(
        "section",
        tag("h2", title, id=anchor),
        *(inside or [tag("p", none, look="none")]),
        **{"aria-labelledby": anchor},
    )


def _rows(rows: Iterable[Html]) -> list[Html]:
    every = list(rows)
    return [tag("ul", *every, look="rows")] if every else []


def _card(job: JobRow, view: JobView, *, whole: bool = False) -> Html:
    line = tag("h3", tag("a", view.title, href=_path(job)), _state(job.state))
    return tag("article", line, *_facts(job, view), *(_details(job, view) if whole else ()))


def _facts(job: JobRow, view: JobView) -> Iterator[Html]:
    id = tag("code", job.id[:12])
    yield tag("p", f"{job.verb} · job ", id, f" · proposed by {job.submitter}, ", _time(job.created), look="dim")
    if job.reason:
        yield tag("p", job.reason)
    if view.progress is not None and job.state not in FINAL:
        yield from _progress(view.progress)
    if view.states:
        states = [tag("li", f"{party} ", _state(state)) for party, state in view.states.items()]
        yield tag("ul", *states, look="parties")
    if job.state == "proposed":
        yield tag("p", "It is approved or rejected by this node's command line, with a signature.", look="dim")


def _details(job: JobRow, view: JobView) -> Iterator[Html]:
    if view.disclosures:
        yield tag("h4", "What would be learned" if job.state == "proposed" else "What is learned")
        yield tag("ul", *(tag("li", sentence) for sentence in view.disclosures))
    if view.verdict:
        yield tag("h4", "This node's policy")
        yield tag("ul", *(tag("li", _mark(found[0]), tag("span", found[1])) for found in view.verdict), look="verdict")
    if view.models:
        yield tag("h4", "Models")
        yield tag("ul", *(tag("li", tag("code", model)) for model in view.models))
    traffic = [
        tag("li", f"{peer}: {_size(view.sent.get(peer, 0))} sent, {_size(view.received.get(peer, 0))} received")
        for peer in sorted({*view.sent, *view.received})
    ]
    if traffic:
        yield tag("h4", "Messages")
        yield tag("ul", *traffic)
    if view.hash:
        yield tag("h4", "Digest of the proposal")
        yield tag("p", tag("code", view.hash))


def _mark(fine: bool) -> Html:
    return tag("span", "fine" if fine else "refused", look=f"state {'good' if fine else 'bad'}")


def _progress(progress: Progress) -> list[Html]:
    total = max(progress.total, 1)
    left = "" if progress.seconds_left is None else f", about {_duration(progress.seconds_left)} left"
    said = f"{progress.done} of {progress.total} {progress.unit}{left}"
    bar = tag("progress", value=str(min(progress.done, total)), max=str(total), **{"aria-label": said})
    return [bar, tag("p", said)]


def _ended_row(job: JobRow, view: JobView) -> Html:
    reason = [tag("span", job.reason)] if job.reason else []
    title = tag("a", view.title, href=_path(job))
    return tag("li", title, _state(job.state), tag("span", _time(job.changed), look="dim"), *reason)


def _peer_row(party: str, peer: PeerState) -> Html:
    state = tag("span", "connected" if peer.up else "not connected", look=f"state {'good' if peer.up else 'bad'}")
    said = [tag("span", peer.said)] if peer.said else []
    return tag("li", tag("strong", party), state, tag("span", "since ", _time(peer.since), look="dim"), *said)


def _of(job: JobRow) -> Html:
    return tag("span", "of job ", tag("code", job.id[:12]), look="dim")


def _path(job: JobRow) -> str:
    return f"/jobs/{quote(job.id, safe='')}"


def _state(state: str) -> Html:
    return tag("span", state, look=f"state {_LOOKS.get(state, 'dim')}")


def _time(seconds: float) -> Html:
    when = time.gmtime(seconds)
    return tag("time", time.strftime("%Y-%m-%d %H:%M UTC", when), datetime=time.strftime("%Y-%m-%dT%H:%M:%SZ", when))


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{round(seconds / length)} {unit}"
    return f"{round(seconds)} seconds"


def _size(count: float) -> str:
    if count < 1000:
        return f"{count} bytes"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


# --------------------------------------------------- A job in words, for people: on a terminal, and on the node's page


def describe(store: Store, settings: Settings, row: JobRow, verdict: PolicyVerdict | None = None) -> JobView:
    """Return what is shown of a job: what is proposed, how it stands at each party's node, what would be learned."""
    try:
        proposal = msgspec.json.decode(row.proposal, type=Proposal)
        job = proposal.described()
    except (TreatyError, msgspec.MsgspecError):  # proposed under another version of Treaty
        return JobView(title=title_of(row), states={settings.name: row.state}, hash=row.id)
    states = {party: "not heard of yet" for party in job.parties} | {settings.name: row.state}
    for party, view in store.views(row.id).items():
        if party != settings.name:
            states[party] = msgspec.msgpack.decode(view, type=JobStatus).state
    events = store.events_of(row.id) if row.state == "finished" else []
    played: dict[str, Any] = next((event for event in reversed(events) if event["what"] == "played"), {})
    told = played.get("learned") or [
        f"{who}: {sentence}" for who, sentences in learned(job, proposal.verb).items() for sentence in sentences
    ]
    return JobView(
        title=in_words(job, proposal.kind),
        states=states,
        hash=row.id,
        progress=_progress_of(row),
        disclosures=told,
        verdict=[(finding.fine, f"{finding.what}: {finding.said}") for finding in verdict.findings] if verdict else [],
        models=[str(path) for path in results(settings, row, proposal)],
        sent=played.get("sent", {}),
        received=played.get("received", {}),
    )


def title_of(row: JobRow) -> str:
    """Describe a job in one line, also one that this version of Treaty cannot read."""
    try:
        proposal = msgspec.json.decode(row.proposal, type=Proposal)
        return in_words(proposal.described(), proposal.kind)
    except (TreatyError, msgspec.MsgspecError):
        return f"{row.verb}: a job of another version of Treaty"


def results(settings: Settings, row: JobRow, proposal: Proposal) -> list[Path]:
    """Return the files that a finished job has left here."""
    if row.state != "finished":
        return []
    folder = Path(settings.folder) / "models" / (proposal.model or row.id)
    name = settings.name
    wanted = f"{name}.{proposal.verb}-{row.id[:16]}.csv" if proposal.model else f"{name}.*"
    files = sorted(path for path in folder.glob(wanted) if "staged" not in path.name)
    return files if proposal.model else [path for path in files if path.suffix != ".csv" or ".weights" in path.name]


def _progress_of(row: JobRow) -> Progress | None:
    if not row.total or row.state not in ("queued", "running", "waiting"):
        return None
    spent = time.time() - row.created
    left = spent / row.rounds * (row.total - row.rounds) if row.rounds and row.state == "running" else None
    return Progress(row.rounds, row.total, "rounds", left)
