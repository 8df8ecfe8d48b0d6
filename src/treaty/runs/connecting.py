"""One party's connections to the peers that a system's links name."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from typing import TypeVar

from treaty.errors import ConfigError, PeerLost
from treaty.messaging.certificates import load_certificate, load_identity
from treaty.messaging.grpc_channel import GrpcChannel, Peer
from treaty.messaging.party import Party, run_role
from treaty.runs.job import Align, Job
from treaty.systems.options import public_terms
from treaty.systems.system import Phase, Roles, Service

# ---------------------------------------------------------------- what parties compare when they meet

# characters; of a longer one a digest is compared
LONGEST_TERM = 4000


def shared_terms(job: Job, name: str, roles: Roles, verb: str) -> dict[str, str]:
    """Return what a party's copy of a job must have in common with all others, by name, in words.

    `verb` is what it was started to do. Only what two parties both name is compared: where columns are split, eval
    tables are the owners' business alone.
    """
    members = [f"{who}{_place(member.role, member.edge)}" for who, member in job.parties.items()]
    align = job.align
    terms = {
        "version of Treaty": version("treaty-learn"),
        "command": f"treaty {verb}",
        "name": repr(job.name),
        "protocol": repr(job.protocol),
        "active": repr(job.active),
        "parties": ", ".join(members),
        "task": repr(job.task),
        "classes": str(job.classes),
        "weight": "named" if job.weight else "not named",
        "align": "none" if align is None else _rules(align),
        "align.psi": "none" if align is None else repr(align.psi),
        "align.log": "none" if align is None or align.log is None else "kept",
    }
    if job.by_row:
        terms["label"] = repr(job.label)
    elif name in roles.owners and verb == "train":
        terms["eval_tables"] = str(len(job.parties[name].eval_tables))
    terms |= {option: repr(value) for option, value in public_terms(*job.settings()).items() if option != "protocol"}
    return {term: _short(value) for term, value in terms.items()}


def _rules(align: Align) -> str:
    return f"on_duplicate {align.on_duplicate!r}, normalise {list(align.normalise)}, text {str(align.text).lower()}"


def _place(role: str | None, edge: str | None) -> str:
    words = " of ".join(word for word in (role, edge) if word)
    return f" ({words})" if words else ""


def _short(value: str) -> str:
    if len(value) <= LONGEST_TERM:
        return value
    return f"{value[:100]}... {len(value)} characters, SHA-256 {hashlib.sha256(value.encode()).hexdigest()}"


# ---------------------------------------------------------------- for whom a party waits until all are connected


class Waiting:
    """Notes for whom a party waits until all are connected, and says so now and then."""

    def __init__(self, job: Job, party: Party, phase: Phase | None) -> None:
        self._job, self._party, self._phase = job, party, phase
        self._last = time.monotonic()

    def __call__(self, missing: Collection[str]) -> None:
        """Note who is missing just now; none, once all are connected."""
        now = time.monotonic()
        for peer in missing:
            self._party.waited[peer] += now - self._last
        self._last = now
        if self._phase is None:
            return
        first = [f"{peer} at {self._job.parties[peer].address}" for peer in list(missing)[:3]]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        title = f"waiting for {', '.join(first)}{more}" if missing else "connected"
        total = len(self._party.peers)
        self._phase(title, total - len(missing), total)


# ---------------------------------------------------------------- connecting


Result = TypeVar("Result")
# seconds the parties wait for each other to start
CONNECT_TIMEOUT = 120.0


def connected(
    job: Job,
    name: str,
    roles: Roles,
    verb: str,
    role: Callable[[Party], Result],
    *,
    phase: Phase | None = None,
    service: Service | None = None,
) -> Result:
    """Connect to the peers that the links of the system, or of its service, name; run the role; leave in order.

    Parameters
    ----------
    verb : {"train", "predict", "explain"}
        What all parties must have been started to do.
    phase : callable or None
        Told who is being waited for.
    """
    played = job.system if service is None else service
    own = job.settings()[0]
    peers = played.links(roles, own)[name]
    vouched = job.system.vouched(roles, own, name) if verb == "train" else []
    channel = _channel(job, name, peers, vouched, shared_terms(job, name, roles, verb))
    may_be_absent = [peer for peer in played.may_be_absent(roles, own) if name != peer]
    try:
        # who is connected waits for messages while others may still wait for connections
        party = Party(
            name, job.name, job.system.name, channel, peers, timeout=max(job.timeout, 2.0 * (job.wait or 0.0))
        )
        waited = Waiting(job, party, phase)

        # a peer that cannot be reached is the others' business, too
        def connect_and_play() -> Result:
            try:
                channel.connect(timeout=wait_of(job), may_lose=may_be_absent, waiting=waited)
            except PeerLost:
                # a peer that stopped the job said why before it went
                party.heed()
                raise
            waited(())
            return role(party)

        return run_role(party, connect_and_play)
    finally:
        channel.close()


def wait_of(job: Job) -> float:
    """Return the seconds for which parties wait for each other to start."""
    # half of the timeout, or the others give up first
    return job.wait or min(CONNECT_TIMEOUT, job.timeout / 2)


def listening(job: Job, name: str) -> GrpcChannel:
    """Return a party's end as in a training, which listens and dials nobody."""
    roles = job.roles()
    own = job.settings()[0]
    return _channel(job, name, job.system.links(roles, own)[name], job.system.vouched(roles, own, name), {})


def _channel(
    job: Job, name: str, peers: Sequence[str], vouched: Sequence[str], terms: Mapping[str, str]
) -> GrpcChannel:
    """Return the party's end, which listens; ConfigError where the job lacks an address, key or certificate."""
    me = job.parties[name]
    needed = [(who, "address") for who in (name, *peers)] + [(name, "key")]
    needed += [(who, "certificate") for who in dict.fromkeys((name, *peers, *vouched))]
    missing = [f"parties.{who}.{what}" for who, what in needed if getattr(job.parties[who], what) is None]
    if missing or me.key is None or me.certificate is None or me.address is None:
        raise ConfigError(f"to run as {name} alone the job must name {', '.join(missing)}")
    pinned = {
        peer: Peer(str(job.parties[peer].address), load_certificate(str(job.parties[peer].certificate)))
        for peer in peers
    }
    identity = load_identity(me.key, me.certificate, name)
    return GrpcChannel(
        name, me.listen or me.address, key=identity.key, certificate=identity.certificate, peers=pinned,
        reconnect=job.reconnect, inbox_limit=job.inbox_limit << 20, terms=terms,
        job=job.name if me.address.startswith("unix:") else "",  # of a node, whose jobs' names have their ids in them
    )  # fmt: skip
