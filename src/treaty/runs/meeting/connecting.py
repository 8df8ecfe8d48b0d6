"""One party's connections to the peers that a system's links name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from treaty.errors import ConfigError, PeerLost
from treaty.messaging.certificates import load_certificate, load_identity
from treaty.messaging.grpc_channel import GrpcChannel, Peer
from treaty.messaging.party import Party, run_role
from treaty.runs.job import Job
from treaty.runs.meeting.terms import shared_terms
from treaty.runs.meeting.waiting import Waiting
from treaty.systems.system import Cast, Phase, Service

Result = TypeVar("Result")
CONNECT_TIMEOUT = 120.0  # seconds the parties wait for each other to start


def connected(
    job: Job,
    name: str,
    cast: Cast,
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
    peers = played.links(cast, own)[name]
    vouched = job.system.vouched(cast, own, name) if verb == "train" else []
    channel = _channel(job, name, peers, vouched, shared_terms(job, name, cast, verb))
    may_be_absent = [peer for peer in played.may_be_absent(cast, own) if name != peer]
    try:
        # who is connected waits for messages while others may still wait for connections
        party = Party(
            name, job.name, job.system.name, channel, peers, timeout=max(job.timeout, 2.0 * (job.wait or 0.0))
        )
        waited = Waiting(job, party, phase)

        def connect_and_play() -> Result:  # a peer that cannot be reached is the others' business, too
            try:
                channel.connect(timeout=wait_of(job), may_lose=may_be_absent, waiting=waited)
            except PeerLost:
                party.heed()  # a peer that stopped the job said why before it went
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
    cast = job.cast()
    own = job.settings()[0]
    return _channel(job, name, job.system.links(cast, own)[name], job.system.vouched(cast, own, name), {})


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
