"""What a member gave to a sum, from differences of its masked vectors: where a mask serves twice, it cancels.

Whoever opens sums sees each member's vectors under masks. Tried are the numbers as they came, the differences of each
vector's numbers from its first, and the differences of successive vectors. They are compared with the same of what the
member gave, by rank correlation. Baseline: 0, which is what masks drawn anew for every number and vector leave. FedXGB
as published has one mask for all numbers of a tree.

Not tried are differences of opened sums over cohorts that differ by a member, which no masks hide; FedXGB's users
refuse such cohorts, and `systems.fedxgb.sums.cohorts` says how they know.

References
----------
Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, on masks that serve
once. Liu et al., "Boosting Privately", ICDCS 2020, whose masks do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from scipy.stats import rankdata  # type: ignore[import-untyped]

from treaty.attacks.views import Finding, Truth, View, error_of_best
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.messages import view as array_view
from treaty.systems.fedxgb.paper import InputAndShares
from treaty.systems.horizontal.masked_sums import MaskedInput
from treaty.systems.vertical.exact_sums import content_of

KINDS: dict[str, type[MaskedInput] | type[InputAndShares]] = {
    kind.__name__: kind for kind in (MaskedInput, InputAndShares)
}
MOST = 1_000_000
"""Numbers of a member that are looked at, from the first sum on."""

Vectors = list[Integers]


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Compare what came from each member with what it gave, at whoever opens sums: a leader, edge server or server."""
    for peer, given in truth.given.items():
        seen = masked_from(view, peer)
        plain, seen = paired(given, seen)
        if not seen:
            continue
        found = [correlation(of(plain), of(seen)) for of in TRIED]
        rho, error = max(found, key=lambda of: of[0] / max(of[1], 1e-9))
        yield Finding(
            attack="differences of masked vectors (Bonawitz 2017)", party=view.party, target=f"sums of {peer}",
            measure="rank correlation", score=max(0.0, rho), baseline=0.0, error=error_of_best(error, len(TRIED)),
        )  # fmt: skip


def masked_from(view: View, peer: str) -> Vectors:
    """Return the masked vectors that came from a member, as int64 (n,) modulo 2^64."""
    received = [
        entry for entry in view.recorded.transcript.entries
        if entry.direction == "received" and entry.peer == peer and entry.step in KINDS
    ]  # fmt: skip
    messages = [content_of(entry, KINDS[entry.step]) for entry in received]
    return [array_view(of.values, np.uint64, (None,), peer=peer, what="values").view(np.int64) for of in messages]


def paired(given: Vectors, seen: Vectors) -> tuple[Vectors, Vectors]:
    """Return vectors that were given and what came of them, in order, without those that never came."""
    plain, masked, left = Vectors(), Vectors(), iter(given)
    for vector in seen:
        own = next((one for one in left if len(one) == len(vector)), None)
        if own is None or sum(map(len, masked)) > MOST:
            break
        plain.append(own)
        masked.append(vector)
    return plain, masked


def within(vectors: Vectors) -> Vectors:
    """Return the differences of each vector's other numbers from its first, modulo 2^64."""
    return [vector[1:] - vector[:1] for vector in vectors]


def between(vectors: Vectors) -> Vectors:
    """Return the differences of successive vectors, as far as the shorter one goes, modulo 2^64."""
    lengths = [min(len(before), len(after)) for before, after in pairwise(vectors)]
    return [after[:n] - before[:n] for n, (before, after) in zip(lengths, pairwise(vectors), strict=True)]


TRIED: tuple[Callable[[Vectors], Vectors], ...] = (list, within, between)


def correlation(plain: Vectors, seen: Vectors) -> tuple[float, float]:
    """Return the mean correlation of ranks within vectors, weighted by their lengths, and its standard error by chance.

    Vectors of equal numbers have no ranks and are left out; 0 and 0 where no others are.
    """
    ranks = [
        (standard_ranks(a), standard_ranks(b))
        for a, b in zip(plain, seen, strict=True)
        if np.any(a != a[:1]) and np.any(b != b[:1])
    ]
    count = sum(len(own) for own, _ in ranks)
    if not count:
        return 0.0, 0.0
    total = sum(float(own @ other) for own, other in ranks)
    return total / count, float(np.sqrt(1.5 / count))  # neighbouring differences have a vector in common


def standard_ranks(values: Integers) -> Floats:
    """Return ranks (n,) with a mean of 0 and a standard deviation of 1."""
    ranks = rankdata(values)
    return np.asarray((ranks - ranks.mean()) / ranks.std())
