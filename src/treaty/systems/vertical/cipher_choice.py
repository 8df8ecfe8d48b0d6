"""The choice of a job's cipher, by estimates of both ciphers' time from its size and the speed of its links.

With n rows, peers of F columns and S bins each, T trees of depth d, V = 2^(d-1) vectors a tree (the root, then one of
each pair of siblings) on c threads, the lattice map (degree N, J = n / N blocks, P primes, D digits) takes

    seconds = (S (P (J + 2) 30 us + 0.4 ms) [hint, unless kept] + T (V (P (n + N) 14 ns + n (F 1.5 ns + P 1 ns)
              + 2 S P N 0.04 ns) + d S D N 0.15 ns)) / c
    bytes   = 2 S D N [hint, unless kept] + T (V 4 P (n + N) + V 2 S D + (2^d - 1) n / 8)

and Okamoto-Uchiyama with keys of b = 3072 bits (five times as long where the processor has no AVX-512 IFMA):

    seconds = T (n 23 us + n F (d + 1) / 2 * 0.55 us + V S / k * 1.9 ms) / c,   k sums to a ciphertext
    bytes   = T (n b / 8 + V S / k * b / 8 + d n)

in processor seconds as measured on one machine with AVX-512, plus bytes over the speed of each link in turn. The
lattice map hides rows of nodes from passive parties, so it is chosen unless it takes more than `PREFERENCE` times as
long, its hints exceed `MOST_HINT_BYTES`, or sums exceed what it holds or may leak.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.multiplier import HAS_IFMA
from treaty.crypto.additive.packing import Packing
from treaty.crypto.lattice.parameters import LEAK_LIMIT, Parameters
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.parameters import OU_DEFAULT_KEY_BITS
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, leak_of, sums_parameters
from treaty.errors import CryptoError
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.systems.vertical.cipher_options import MOST_LATTICE_FRACTION

MOST_HINT_BYTES = 4 << 30
PREFERENCE = 2.0
_PROBE_BYTES = 1 << 20
PROBES = 5
"""Of a link, by which it is measured; no more are answered."""
_WITHOUT_IFMA = 5.0  # times the time of Okamoto-Uchiyama


class LinkProbe(Message):
    """Meaningless bytes, to measure the link. Tells nothing."""

    filler: bytes


class LinkEcho(Message):
    """The probe has arrived. Tells how much the party's answers may still leak (`crypto.lattice.store`)."""

    left: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A cipher's cost of a job: seconds of computing and sending, and bytes sent both ways."""

    seconds: float
    nbytes: float

    def __str__(self) -> str:
        return f"about {in_words(self.seconds)} and {rounded(self.nbytes / 1e6)} MB"


def in_words(seconds: float) -> str:
    """Return a time as one says it: 0.4 seconds, 3 minutes, 5.2 hours."""
    if seconds < 90:
        return f"{rounded(seconds)} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{rounded(seconds / 3600)} hours"


def rounded(value: float) -> str:
    """Return a number with a digit after the point where it is below 10, and none above."""
    return f"{value:,.{1 if value < 10 else 0}f}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The cipher of a job, and why."""

    cipher: str
    why: str


def choose_cipher(
    party: Party,
    cipher: str,
    bounds: SumsBounds,
    offsets: Mapping[str, NDArray[np.int32]],
    *,
    trees: int,
    max_depth: int,
    fractional_bits: int,
    store: HintStore,
    threads: int,
) -> Choice:
    """Take the `cipher` the job names; under "auto" measure the links and go by the estimates.

    `offsets` are the first slots of every passive party's features; `trees` are still to grow.
    """
    if cipher != "auto":
        return Choice(cipher, "as the job says")
    if fractional_bits > MOST_LATTICE_FRACTION:
        return Choice("ou", f"fractional_bits is above the {MOST_LATTICE_FRACTION} that the lattice map takes")
    if unfit := beyond_lattice(bounds, offsets, trees, max_depth):
        return Choice("ou", unfit)
    parameters, vectors, speeds = sums_parameters(bounds), trees * 2 ** (max_depth - 1), {}
    for peer, of_peer in offsets.items():
        speeds[peer], left = _measure(party, peer)
        if vectors * leak_of(parameters, bounds, np.diff(of_peer)).sum() > left:
            return Choice("ou", f"{peer}'s answers have told nearly all that the lattice map may tell of its table")
    kept = LatticeSumsClient(bounds, store).offer(offsets) is not None
    lattice = _total([
        _lattice(parameters, bounds.n_rows, len(of_peer) - 1, int(of_peer[-1]), max_depth, trees, threads, kept)
        for of_peer in offsets.values()
    ], speeds)  # fmt: skip
    ou = _total([
        _ou(bounds, len(of_peer) - 1, int(of_peer[-1]), max_depth, trees, threads)
        for of_peer in offsets.values()
    ], speeds)  # fmt: skip
    chosen = lattice.seconds <= PREFERENCE * ou.seconds
    best, other = (("lattice", lattice), ("ou", ou)) if chosen else (("ou", ou), ("lattice", lattice))
    times, link = other[1].seconds / best[1].seconds, min(speeds.values(), default=0.0)
    what = f"{rounded(times)} times as long" if times >= 1 else "less, but shows passive parties the rows of nodes"
    return Choice(
        best[0],
        f"estimated {best[1]} for {trees} trees; {other[0]} would take {other[1]}, {what}"
        f" (link of {rounded(link / 1e6)} MB/s{', hints kept earlier' if kept else ''})",
    )


def beyond_lattice(
    bounds: SumsBounds, offsets: Mapping[str, NDArray[np.int32]], trees: int, max_depth: int, *, sealed: bool = False
) -> str:
    """Return why the lattice map does not hold a job, as far as its size tells; nothing where it does."""
    try:
        parameters = sums_parameters(bounds, sealed)
    except CryptoError as error:
        return str(error)
    hints = sum(_hint_bytes(parameters, int(of_peer[-1])) for of_peer in offsets.values())
    if hints > MOST_HINT_BYTES and not sealed:  # there is a choice
        return f"hints of the lattice map would exceed {MOST_HINT_BYTES >> 30} GiB"
    vectors = trees * 2 ** (max_depth - 1)
    if any(vectors * leak_of(parameters, bounds, np.diff(of_peer)).sum() > LEAK_LIMIT for of_peer in offsets.values()):
        return "so many sums about so many columns would pass the limit of what the lattice map may leak"
    return ""


def _measure(party: Party, peer: str) -> tuple[float, float]:
    """Return a link's bytes per second, without its latency, and how much the peer's answers may still leak."""
    left = []

    def sent(nbytes: int) -> float:
        started = time.perf_counter()
        party.send(peer, LinkProbe(bytes(nbytes)))
        left.append(party.receive(peer, LinkEcho).left)
        return time.perf_counter() - started

    sent(0)  # waits until the peer has finished other work
    empty = min(sent(0) for _ in range(2))
    return _PROBE_BYTES / max(min(sent(_PROBE_BYTES) for _ in range(2)) - empty, 1e-4), left[0]


def _total(of_peers: list[Estimate], speeds: Mapping[str, float]) -> Estimate:
    """Return the total: peers compute at the same time, but the active party sends to one after another."""
    sending = sum(of.nbytes / speed for of, speed in zip(of_peers, speeds.values(), strict=True))
    return Estimate(max((of.seconds for of in of_peers), default=0.0) + sending, sum(of.nbytes for of in of_peers))


def _hint_bytes(parameters: Parameters, slots: int) -> int:
    return 2 * slots * parameters.digits * parameters.degree


def _lattice(
    parameters: Parameters, n: int, features: int, slots: int, depth: int, trees: int, threads: int, kept: bool
) -> Estimate:
    degree, primes, digits = parameters.degree, len(parameters.primes), parameters.digits
    vectors = 2 ** (depth - 1)
    hint = 0.0 if kept else slots * (primes * (-(-n // degree) + 2) * 30e-6 + 0.4e-3)
    vector = (
        primes * (n + degree) * 14e-9 + n * (features * 1.5e-9 + primes * 1e-9) + 2 * slots * primes * degree * 4e-11
    )
    tree = vectors * vector + depth * slots * digits * degree * 1.5e-10
    nbytes = vectors * (4 * primes * (n + degree) + 2 * slots * digits) + (2**depth - 1) * n / 8
    return Estimate((hint + trees * tree) / threads, (0 if kept else _hint_bytes(parameters, slots)) + trees * nbytes)


def _ou(bounds: SumsBounds, features: int, slots: int, depth: int, trees: int, threads: int) -> Estimate:
    n, bits = bounds.n_rows, OU_DEFAULT_KEY_BITS
    answers = 2 ** (depth - 1) * slots / Packing(bounds, bits // 3).per_plaintext
    tree = n * 23e-6 + n * features * (depth + 1) / 2 * 0.55e-6 + answers * 1.9e-3
    nbytes = (n + answers) * bits / 8 + depth * n
    return Estimate(trees * tree * (1.0 if HAS_IFMA else _WITHOUT_IFMA) / threads, trees * nbytes)
