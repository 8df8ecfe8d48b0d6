"""What parties do before sums are hidden: measure links, and make a public seed together.

Links are measured before a cipher is chosen and sums are sealed; the lattice map expands its public elements from the
seed.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Message, MessageLeakage
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

    leakage: ClassVar = MessageLeakage("how much of the lattice map's leakage allowance is left", "control")

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


# ----------------------------------------- A public seed that all parties of a star make together: commit, then reveal
#
# The lattice map expands its public elements from it; whoever chose these alone could plant a trapdoor. The seed is
# uniform if one party at least draws its share honestly, as all commit before any share is told. The active party
# relays messages, and can do no more than refuse to. Where all parties kept hints of an earlier job, its seed is used
# again.
#
# =========================  ==================  ==========================================
# message                    from -> to          content
# =========================  ==================  ==========================================
# `SeedOffer`                active ->           which hint it kept earlier, if any
# `SeedCommitment`           passive ->          commitment to its share; whether it holds
#                                                the hint, for just this table
# `SeedCommitments`          active -> all       everyone's, or that kept hints serve
# `SeedShare`, `SeedShares`  passive ->, then    the shares
#                            active -> all
# =========================  ==================  ==========================================
#
# Shares are random numbers; messages tell nothing but their content.

SHARE_BYTES = 32


class SeedOffer(Message):
    """Digest (`binding`) that names the hint which the active party kept of this party's table; empty for none."""

    leakage: ClassVar = MessageLeakage("which answer to an earlier set-up the active party has kept", "control")

    binding: bytes


class SeedCommitment(Message):
    """Commitment to a share of the seed. Tells whether the party still has the offered hint's table and secrets."""

    leakage: ClassVar = MessageLeakage("whether the sender has an earlier job's table and secrets", "control")

    commitment: bytes
    holds: bool


class SeedCommitments(Message):
    """All commitments, by party, in the job's order; or that the kept hints serve, and nothing is revealed."""

    leakage: ClassVar = MessageLeakage(
        "everybody's commitments, or that all still have an earlier job's answers", "control"
    )

    commitments: list[bytes]
    kept: bool


class SeedShare(Message):
    """The share committed to."""

    leakage: ClassVar = MessageLeakage("a random number", "nothing")

    share: bytes


class SeedShares(Message):
    """All shares, in the order of the commitments."""

    leakage: ClassVar = MessageLeakage("everybody's random numbers", "nothing")

    shares: list[bytes]


def agree_on_seed(party: Party, client: LatticeSumsClient, offsets: Mapping[str, NDArray[np.int32]]) -> bool:
    """Settle the seed as the active party; return whether kept hints are used again.

    `offsets` are the first slots of every passive party's features.
    """
    offered = client.offer(offsets)
    for peer in party.peers:
        party.send(peer, SeedOffer(offered[1][peer] if offered else b""))
    answers = {peer: party.receive(peer, SeedCommitment) for peer in party.peers}
    kept = offered is not None and all(answer.holds for answer in answers.values())
    own = secrets.token_bytes(SHARE_BYTES)
    commitments = [_commit(own), *(answers[peer].commitment for peer in party.peers)]
    for peer in party.peers:
        party.send(peer, SeedCommitments([] if kept else commitments, kept))
    if kept and offered is not None:
        client.settle(*offered)
        return True
    shares = [own, *(party.receive(peer, SeedShare).share for peer in party.peers)]
    for peer, commitment, share in zip(party.peers, commitments[1:], shares[1:], strict=True):
        _check(commitment, share, peer)
    for peer in party.peers:
        party.send(peer, SeedShares(shares))
    client.settle(_seed(commitments, shares))
    return False


def follow_seed(party: Party, server: LatticeSumsServer) -> None:
    """Settle the seed as a passive party."""
    (active,) = party.peers
    offer = party.receive(active, SeedOffer)
    own = secrets.token_bytes(SHARE_BYTES)
    commitment = _commit(own)
    holds = bool(offer.binding) and server.holds(offer.binding)
    party.send(active, SeedCommitment(commitment, holds))
    settled = party.receive(active, SeedCommitments)
    if settled.kept:
        if not holds:
            raise PeerProtocolError(active, f"expected a hint that is kept here - at SeedCommitments from {active}")
        server.settle(b"", kept=offer.binding)
        return
    if settled.commitments.count(commitment) != 1:
        raise PeerProtocolError(active, f"expected this party's commitment once - at SeedCommitments from {active}")
    party.send(active, SeedShare(own))
    shares = party.receive(active, SeedShares).shares
    if len(shares) != len(settled.commitments):
        raise PeerProtocolError(active, f"expected {len(settled.commitments)} shares - at SeedShares from {active}")
    place = settled.commitments.index(commitment)
    if shares[place] != own:
        raise PeerProtocolError(active, f"expected this party's share unchanged - at SeedShares from {active}")
    # all shares are checked: else the active party could choose its own after it saw this party's
    for commitment, share in zip(settled.commitments, shares, strict=True):
        _check(commitment, share, active)
    server.settle(_seed(settled.commitments, shares))


def _commit(share: bytes) -> bytes:
    """Commit to a share; binding, and hiding as the share is random."""
    return hashlib.sha256(b"treaty public seed commitment" + share).digest()


def _check(commitment: bytes, share: bytes, sender: str) -> None:
    if len(share) != SHARE_BYTES or _commit(share) != commitment:
        raise PeerProtocolError(sender, f"expected the share that was committed to - at the seed from {sender}")


def _seed(commitments: list[bytes], shares: list[bytes]) -> bytes:
    return hashlib.sha256(b"treaty public seed" + b"".join([*commitments, *shares])).digest()
