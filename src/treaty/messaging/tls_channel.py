"""Channels between organisations: TLS 1.3 with pinned certificates.

Every party listens at one address and dials each of its peers twice: one connection carries its frames, the other is
watched. What each part guarantees:

**Identity.** A server admits only the pinned certificates and compares the name a caller claims with the certificate
presented; a client trusts only the certificate pinned for the peer it dials.

**Delivery.** Frames are numbered, and the sender keeps those without a receipt. Receipts ride on frames of the other
direction, or are asked for. When a broken connection is dialled again, the receiver says how many frames it has, and
the sender continues with the next: a frame arrives once, or the peer is lost. (`Party` refuses repeated messages on top
of that, whatever carried them.)

**Death.** Each party watches each peer on a connection of its own, where pings do not queue behind frames. A killed
process breaks it at once; a stopped one or a dead network is noticed after ``keepalive_time + keepalive_timeout``. When
the peer does not answer within ``reconnect`` seconds more, it is lost. Refused, reset and unanswered connections are
all tried again until then, as a killed process looks like a forwarder that restarts. A peer that closes its channel is
lost at once. A thread answers pings: a party that computes answers, unless it holds Python's lock for all that time.

Do not fork a process that has made a channel; start subprocesses afresh.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from treaty.errors import ConfigError, LocalProtocolError, PeerAbsent, PeerError, PeerLost, PeerProtocolError
from treaty.machine.process import concurrently
from treaty.messaging.certificates import Identity, check_certificate, check_identity
from treaty.messaging.channel import INBOX_LIMIT, Arrival, Credit
from treaty.messaging.exchanges import OF_ONE_JOB
from treaty.messaging.messages import clean
from treaty.messaging.tls_link import PeerLink, Pings
from treaty.messaging.tls_server import Server
from treaty.messaging.units import VERSION, Introduction

FRAME_BYTES = 60_000_000
"""Most bytes of a message's content in one frame: after a break of the connection no more is sent again."""
WINDOW = 64 << 20
"""Bytes of frames without a receipt that are kept for all peers together, though always one frame for each."""
REFUSAL_PATIENCE = 4.0
"""Seconds for which a refused connection is tried again, so that both sides see the refusal before one goes."""
LATE_PATIENCE = 5.0
"""Seconds for which `connect`, once one peer has gone, still waits to notify others that are not up yet."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer listens (``host:port``; None when `TlsChannel.connect` is given it), and its certificate, PEM."""

    address: str | None
    certificate: bytes


class TlsChannel(AbstractContextManager["TlsChannel", None]):
    """One party's end; listens from the moment it is made, dials in `connect`. Also a context manager.

    `address` is the ``host:port`` to listen at; with port 0 the system chooses. `key` and `certificate` are PEM; only
    `peers` can connect. `inbox_limit` are the bytes that all peers together may have sent here and the role has not
    read: each has a share (`Credit`), waits while it is full, and is refused a message that is larger, with an error at
    both sides: a frame before it is allocated, a message in parts once the role listens, when its first part has come
    and others up to the share may have. A peer is pinged after `keepalive_time` seconds of silence and has
    `keepalive_timeout` to answer; a broken connection is dialled again for `reconnect` seconds before the peer counts
    as lost. `terms` are what all must agree on, which `connect` compares. `job`, the same at all, is sent by the party
    that dials, where doors of nodes lead connections to jobs. `proxy`, ``http://[user:password@]host:port``, is an HTTP
    proxy through which peers are dialled. ConfigError if a certificate or key does not fit its name, the address cannot
    be listened at, or `inbox_limit` is too little for so many peers.
    """

    waits = True

    def __init__(
        self,
        name: str,
        address: str,
        *,
        key: bytes,
        certificate: bytes,
        peers: Mapping[str, Peer],
        inbox_limit: int = INBOX_LIMIT,
        keepalive_time: float = 10.0,
        keepalive_timeout: float = 8.0,
        reconnect: float = 60.0,
        terms: Mapping[str, str] | None = None,
        job: str = "",
        proxy: str | None = None,
    ) -> None:
        if not peers or name in peers:
            raise ConfigError(f"expected one or more peers other than {name}, got {', '.join(peers) or 'none'}")
        self.name = name
        self.frame_bytes: int | None = FRAME_BYTES
        self._identity = Identity(key, certificate)
        check_identity(self._identity, name)
        self._pinned = {peer: check_certificate(peers[peer].certificate, peer) for peer in peers}
        self._addresses = {peer: peers[peer].address for peer in peers}
        # a tenth more, or an outage of just that time would be over before the attempt under way, and yet end the job
        self._pings = Pings(keepalive_time, keepalive_timeout, 1.1 * reconnect)
        # what peers have sent, and what befell them; None wakes those who wait when the channel is closed
        self._arrivals: queue.SimpleQueue[Arrival | PeerError | None] = queue.SimpleQueue()
        self._closed = False
        self._credit = Credit(name, inbox_limit, peers)
        self._terms, self._job, self._proxy = dict(terms or {}), job, proxy
        self._links: dict[str, PeerLink] = {}
        self._server = Server(
            name, address, self._identity, self._pinned, self._arrivals.put, self._credit, self._receipted,
            self._terms, job,
        )  # fmt: skip
        # where this end listens, with the actual port
        self.address = self._server.address

    def refusal(self, sender: str, nbytes: int, frames: int) -> str | None:
        return self._credit.refusal(sender, nbytes, frames)

    def connect(
        self,
        timeout: float,
        addresses: Mapping[str, str] | None = None,
        may_lose: Collection[str] = (),
        waiting: Callable[[Collection[str]], None] = lambda missing: None,
    ) -> None:
        """Dial all peers and wait up to `timeout` seconds until each has answered and has dialled us.

        `addresses` replace those given as `Peer`; `waiting` is called many times a second with the peers still missing;
        a PeerError of it ends the waiting as a lost peer does. Peers in `may_lose` that do not come in time, or have
        gone again, only count as lost; they share half of the inbox.

        Raises PeerProtocolError if a connection was refused for `REFUSAL_PATIENCE` seconds, in most cases because of a
        certificate that is not the one pinned (the text says which); PeerLost if others were not reachable in time (all
        are named), or have gone meanwhile; ConfigError if an address is unknown, or for all differences of terms;
        LocalProtocolError in a second call.
        """
        if self._links:
            raise LocalProtocolError(f"expected connect to be called once, got a second call - at {self.name}")
        self._credit.divide(may_lose)
        resolved = {peer: (addresses or {}).get(peer, configured) for peer, configured in self._addresses.items()}
        for peer, address in resolved.items():
            if address is None:
                raise ConfigError(f"expected an address of {peer}, got none - at connect of {self.name}")
        self._links = {peer: self._dial(peer, str(address)) for peer, address in resolved.items()}
        for link in self._links.values():
            link.start()
        deadline = time.monotonic() + timeout
        gone: PeerError | None = None
        ending = False
        while missing := self._missing(may_lose):
            now = time.monotonic()
            try:
                waiting(missing.keys())
            except PeerError as error:
                gone = gone or error
            for link in [link for link in self._links.values() if link.peer not in may_lose]:
                gone = gone or link.lost
                if link.refused_since is not None and now - link.refused_since > REFUSAL_PATIENCE:
                    public = f"its connection with {link.peer} was refused; it has the details"
                    raise PeerProtocolError(link.peer, link.trouble, public=public)
            # a peer that is still starting would wait for us in vain: let it connect first, and learn the reason
            if not ending and (gone is not None or self._differences(may_lose)):
                ending, deadline = True, min(deadline, now + LATE_PATIENCE)
            if now > deadline and missing.keys() <= set(may_lose):
                for peer in missing:
                    self._arrivals.put(PeerAbsent(peer, f"{peer} did not come within {timeout:g} s"))
                break
            left = {gone.peer} if gone is not None else set()
            if ending and (now > deadline or all(self._links[peer].lost or peer in left for peer in missing)):
                break
            if now > deadline:
                text = (
                    f"expected all peers within {timeout:g} s, {self.name} is not connected with {', '.join(missing)}"
                )
                todo = f"start {'it' if len(missing) == 1 else 'them'}, or see docs/network.md"
                # peers must not see addresses
                raise PeerLost(next(iter(missing)), f"{text}: {'; '.join(missing.values())}; {todo}", public=text)
            time.sleep(0.02)
        if found := self._differences(may_lose):
            text = clean(f"the jobs differ: {'; '.join(found)}; {OF_ONE_JOB}, and install the same Treaty", 4000)
            raise ConfigError(text, public=text)
        if gone is not None:
            raise gone

    def send(self, to: str, frame: bytes, timeout: float, *, receipt: bool = False) -> None:
        link = self._links.get(to)
        if link is None:
            raise LocalProtocolError(
                f"expected a connected peer of {self.name} ({', '.join(self._links) or 'none'}), got {to!r}"
            )
        link.deliver(frame, timeout, receipt=receipt)

    def receive(self, timeout: float) -> Arrival | None:
        try:
            item = self._arrivals.get(timeout > 0, min(max(0.0, timeout), threading.TIMEOUT_MAX))
        except queue.Empty:
            return None
        if self._closed or item is None:
            self._arrivals.put(None)  # for the next call
            raise LocalProtocolError(f"expected an open channel, got one that {self.name} has closed")
        if isinstance(item, PeerError):
            raise item
        return item

    def mark_read(self, sender: str, nbytes: int) -> None:
        self._credit.give_back(sender, nbytes)

    def is_up(self, peer: str) -> bool:
        return peer in self._links and self._links[peer].up.is_set()

    def close(self) -> None:
        """Leave: up to a second for receipts of the last frames, a few more if peers have stopped."""
        concurrently(PeerLink.close, self._links.values(), len(self._links))
        self._closed = True
        self._arrivals.put(None)
        self._credit.close()
        self._server.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _missing(self, may_lose: Collection[str]) -> dict[str, str]:
        """Return the trouble with each peer not connected in both directions, less those lost that may be."""
        troubles = {peer: link.trouble for peer, link in self._links.items() if not link.connected}
        for peer in self._links:
            if peer not in self._server.callers:
                troubles.setdefault(peer, f"{peer} has not dialled us; it needs our address and certificate")
        gone = {peer for peer in may_lose if peer in self._links and self._links[peer].lost is not None}
        return {peer: trouble for peer, trouble in troubles.items() if peer not in gone}

    def _differences(self, may_lose: Collection[str]) -> list[str]:
        """Return how terms differ from those of peers; peers that may be lost see it too, and leave."""
        return [found for peer, link in self._links.items() if peer not in may_lose for found in link.differences]

    def _dial(self, peer: str, address: str) -> PeerLink:
        return PeerLink(
            Introduction(VERSION, self.name, self._server.incarnation, self._job), peer, address, self._identity,
            self._pinned[peer], self._pings, self._arrivals.put, lambda: self._server.received(peer), self._terms,
            WINDOW // len(self._pinned), self._proxy,
        )  # fmt: skip

    def _receipted(self, peer: str, received: int) -> None:
        if peer in self._links:
            self._links[peer].receipted(received)
