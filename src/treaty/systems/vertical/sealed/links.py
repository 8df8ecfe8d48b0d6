"""Links between an active party and a passive one under sealed sums: how fast they are, and what trees will take."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from treaty.crypto.sealed.best import rounds_of, steps_of
from treaty.crypto.sealed.steps import Steps, take
from treaty.crypto.sealed.sums import Widths
from treaty.messaging.party import Party
from treaty.systems.vertical.cipher_choice import Estimate
from treaty.systems.vertical.encrypted_columns import pack, unpack
from treaty.systems.vertical.sealed.level import MOST_STEP, End, SealedStep

LONG = 60.0
"""Estimated seconds from which an active party is warned of what sealed sums take."""

ECHOES = np.array([0] * 4 + [1 << 17] * 4)
"""Bytes of the steps by which the active party measures a link."""

_TO_MAKE_A_STEP, _TO_MAKE_A_BYTE = 0.25e-3, 9e-9
"""Seconds of computing: of a step, however little it compares, and for each byte sent."""
_OF_PRODUCTS = 1.5  # bytes of a comparison by those of its products
_STEPS_BEFORE, _BYTES_BEFORE = 10, 1.0
"""Of a level: its steps before the tournament, and the bytes of a candidate then by those of a comparison."""


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of an empty step, and of each byte more, sent both ways at once."""

    step: float
    byte: float

    @classmethod
    def of(cls, seconds: list[float]) -> Link:
        """Return the link whose `ECHOES` took these seconds.

        Where one end is ahead of the other, one step is short and the next one long.
        """
        took = np.array(seconds)
        took = (took[1:] + took[:-1]) / 2
        empty, loaded = (took[(ECHOES[1:] == n) & (ECHOES[:-1] == n)].min() for n in (0, ECHOES.max()))
        return cls(float(empty), max(0.0, float(loaded - empty) / int(ECHOES.max())))


def echoes() -> Steps[None]:
    """Take the steps by which the active party measures a link."""
    for nbytes in ECHOES.tolist():
        take((yield [np.zeros(nbytes, np.uint8)]), (np.uint8, (nbytes,)))


def measure(party: Party, peer: str) -> Link:
    """Measure the link with a peer, which takes the same steps."""
    steps, took = echoes(), list[float]()
    sent = next(steps)
    while True:
        started = time.perf_counter()
        party.send(peer, SealedStep(pack(sent)))
        came = unpack(party.receive(peer, SealedStep).payload, peer, "SealedStep")
        took.append(time.perf_counter() - started)
        try:
            sent = steps.send(came)
        except StopIteration:
            return Link.of(took)


def comparisons_of_a_step(link: Link, widths: Widths) -> int:
    """Return how many comparisons take as long as a step.

    What a comparison takes besides its steps is to compute and to move its bytes, most of them those of two products.
    """
    of_one = _bytes_of_a_comparison(widths) * (link.byte + _TO_MAKE_A_BYTE)
    return int(np.clip((link.step + _TO_MAKE_A_STEP) / of_one, 1, MOST_STEP))


def estimate(
    links: Mapping[str, Link], candidates: Mapping[str, float], end: End, trees: int, max_depth: int, most_nodes: int
) -> Estimate:
    """Return what trees will take beyond what they take under open sums, by each peer's link and its candidates.

    Trees are complete, but for levels of more than `most_nodes` nodes; `end` is that of any peer.
    """
    seconds, nbytes = 0.0, 0.0
    bits, slowest = end.widths.difference, max((link.step for link in links.values()), default=0.0) + _TO_MAKE_A_STEP
    for level in range(max_depth):
        nodes, steps, computing, moving = min(1 << level, most_nodes), 0, 0.0, 0.0
        for peer, link in links.items():
            rounds = rounds_of(1 + round(candidates[peer]), nodes, bits, end.step)
            pairs = sum(groups * size * (size - 1) // 2 for size, groups in rounds)
            sent = (pairs + _BYTES_BEFORE * candidates[peer]) * nodes * _bytes_of_a_comparison(end.widths)
            steps = max(steps, _STEPS_BEFORE + sum(steps_of(size, bits) for size, _ in rounds))
            computing, moving = computing + sent * _TO_MAKE_A_BYTE, moving + sent * link.byte
            nbytes += 2 * sent
        seconds += steps * slowest + computing + moving
    return Estimate(trees * seconds, trees * nbytes)


def _bytes_of_a_comparison(widths: Widths) -> float:
    return _OF_PRODUCTS * 2 * 8 * widths.below * widths.words
