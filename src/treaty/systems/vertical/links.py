"""Links between an active party and a passive one, measured before a cipher is chosen and sums are sealed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from treaty.errors import PeerProtocolError
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message
from treaty.messaging.party import Party

PROBES = 5
"""Of a link, by which it is measured; no more are answered."""
PROBE_BYTES = 1 << 18
_LEAST_BYTE = 1e-10  # seconds: what is faster than 10 GB/s is not told from it


class LinkProbe(Message):
    """Meaningless bytes, to measure the link. Tells nothing."""

    leakage: ClassVar = MessageLeakage("bytes without meaning, to measure the link", "nothing")

    filler: bytes


class LinkEcho(Message):
    """The probe's bytes. Tells how much the party's answers may still leak (`crypto.lattice.store`); under seal not."""

    leakage: ClassVar = MessageLeakage("how much answers under the lattice map may still leak", "control")

    filler: bytes
    left: float


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of an empty message on its way, and of each byte more."""

    step: float
    byte: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A link, and how much the peer's answers may still leak."""

    link: Link
    left: float


def measure(party: Party, peer: str) -> Measured:
    """Measure the link with a peer, by probes that come back."""
    left = 0.0

    def took(nbytes: int) -> float:
        nonlocal left
        started = time.perf_counter()
        party.send(peer, LinkProbe(bytes(nbytes)))
        echo = party.receive(peer, LinkEcho)
        if len(echo.filler) != nbytes:
            raise PeerProtocolError(peer, f"expected {nbytes} bytes, got {len(echo.filler)} - at LinkEcho from {peer}")
        left = echo.left
        return time.perf_counter() - started

    took(0)  # waits until the peer has finished other work
    empty = min(took(0) for _ in range(2))
    loaded = min(took(PROBE_BYTES) for _ in range(2))
    return Measured(Link(empty / 2, max(_LEAST_BYTE, (loaded - empty) / (2 * PROBE_BYTES))), left)
