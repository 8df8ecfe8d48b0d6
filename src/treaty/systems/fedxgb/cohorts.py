"""Which users of a domain take part in a tree, and whose vectors are left out of a sum.

**Selection.** Users who answer the call qualify if their activity and stability are at least what the edge server asks.
`most` of them are taken: those of the running cohort first, then the steadiest (stability times activity, times the
share of calls at which the edge server itself did not lose them); ties are broken at random.

**Changes.** Two opened sums whose cohorts differ by a few users give away those few users' sum. Of numbers that stay
the same from tree to tree, such as rows by bin, many sums give away all their linear combinations. So the cohort of
every sum is an earlier one of the domain, or differs from each of them by `least_change` users or more, and no
combination of all cohorts isolates one user or two. Further users, drawn at random, are left out until that holds. A
domain of n users has at most n - 3 different cohorts in a job; after that, only earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 40  # random choices tried for each number of users left out
_ZERO = 1e-7  # sines, and squares of sines, below it are rounding errors


@dataclass(slots=True)
class Standing:
    """What an edge server knows of a user: what it says of itself, and for how many trees it was called or lost."""

    activity: float = 1.0  # from 0 to 1: how much of the time it is in use
    stability: float = 1.0  # from 0 to 1: how much of the time it is connected without a break
    called: int = 0
    lost: int = 0

    @property
    def rank(self) -> float:
        """Higher is taken first."""
        return self.activity * self.stability * (1.0 - self.lost / max(1, self.called))


@dataclass(frozen=True, slots=True)
class Rules:
    """How a domain's cohort is chosen."""

    most: int | None = None  # users of a cohort; None: no limit
    min_activity: float = 0.0
    min_stability: float = 0.0
    least_change: int = 3  # users by which cohorts differ, if they do


def select(
    standings: Mapping[str, Standing], running: Collection[str], rules: Rules, rng: np.random.Generator
) -> list[str]:
    """Return those of the users who qualify, in the order in which they are taken; `running` is the last cohort."""
    qualified = [
        name
        for name, standing in standings.items()
        if standing.activity >= rules.min_activity and standing.stability >= rules.min_stability
    ]
    lots = dict(zip(qualified, rng.random(len(qualified)).tolist(), strict=True))
    return sorted(qualified, key=lambda name: (name not in running, -standings[name].rank, lots[name]))


def permitted(cohort: Collection[str], earlier: Iterable[frozenset[str]], least_change: int) -> bool:
    """Tell whether the sum of a cohort may be opened after those of earlier cohorts."""
    there, before = frozenset(cohort), set(earlier)
    if there in before:
        return True
    if len(there) < least_change or any(len(there ^ past) < least_change for past in before):
        return False
    users = sorted(there.union(*before))
    rows = np.array([[name in past for name in users] for past in (*before, there)], np.float64)
    _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
    known = directions[sizes > _ZERO * sizes[0]]
    unknown = np.eye(len(users)) - known.T @ known  # projection on the complement of the cohorts' span
    # a 1x1 or 2x2 principal minor is zero iff some combination of cohorts isolates user i, or i and j
    diagonal = np.diag(unknown)
    minors = np.outer(diagonal, diagonal) - unknown**2 + np.eye(len(users))
    return bool(np.all(diagonal > _ZERO) and np.all(minors > _ZERO))


def cohort_of(
    ordered: Sequence[str], earlier: Iterable[frozenset[str]], least: int, rules: Rules, rng: np.random.Generator
) -> list[str] | None:
    """Return the cohort of a new tree, sorted, of `least` users or more; None if none is permitted.

    `ordered` is in the order of `select`.
    """
    most = len(ordered) if rules.most is None else min(rules.most, len(ordered))
    taken, spare = list(ordered[:most]), list(ordered[most:])
    if spare and not permitted(taken, earlier, rules.least_change):  # exchange some of the last taken
        for count in range(1, min(len(spare), len(taken), 2 * rules.least_change) + 1):
            exchanged = taken[: most - count] + spare[:count]
            if permitted(exchanged, earlier, rules.least_change):
                return sorted(exchanged)
    return without_some(taken, earlier, least, rules.least_change, rng)


def without_some(
    came: Sequence[str], earlier: Iterable[frozenset[str]], least: int, least_change: int, rng: np.random.Generator
) -> list[str] | None:
    """Return the largest permitted cohort found among those who came, sorted; None if there is none."""
    known = [past for past in earlier if past <= frozenset(came) and len(past) >= least]
    largest = max(known, key=len, default=frozenset[str]())
    for count in range(len(came) - max(least, len(largest)) + 1):
        for _ in range(1 if count == 0 else _DRAWS):
            out = set(rng.choice(len(came), count, replace=False).tolist())
            left = [name for k, name in enumerate(came) if k not in out]
            if permitted(left, earlier, least_change):
                return sorted(left)
    return sorted(largest) or None
