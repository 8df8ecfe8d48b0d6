"""Which users of a domain take part in a tree, whose vectors are left out of a sum, and what is kept of it on disk.

**Selection.** Of the users who answer the call, those of the running cohort are taken first, then those whom the edge
server has lost at the smallest share of its calls; ties are broken at random.

**What may be opened.** Two opened sums whose cohorts differ by a few users give away those few users' sum. Many sums
of numbers that stay the same from tree to tree, such as rows by bin at the root, give away all their linear
combinations. Gradients change, but late in a job only a little. So one rule holds for all sums of a job: no linear
combination of a domain's cohorts isolates one user or two (`permitted`). A user that gives the server its own vectors
thus finds no other user's with them. Two may find the third of their group or, with other sums, a user of another one.

Under that rule a domain of n users has at most n - 2 independent cohorts in a job. Each cohort whose sum does not
follow from earlier ones uses one up. Users may nevertheless be lost any number of times, because the domain is dealt
into **groups** of three users or more. All groups count as opened from the beginning: sums over whole groups show no
more than the groups' own sums, and use nothing up.

* A tree begins with all users there, while that is permitted with the groups and leaves room for another deal;
  afterwards with the whole groups among them.
* If users are lost as a tree grows, it continues with the whole groups among those left.
* If no whole group is there, or whole groups had less than half of the users there for `_POOR_TREES` trees, the domain
  is dealt again, and users who are away get groups of their own: another **epoch**, if its groups are permitted after
  all that was opened. That works once or twice in a job. Groups whose sums were never opened cost nothing.

With `Rules.whole` all sums are over whole groups, which are dealt once. Of groups of g users, g - 2 in collusion with
the server then find no other user's sums, however long a job.

**On disk.** A second run must learn no more than the first. An edge server keeps the cohorts of its domain, written
before a sum is opened: sums of an interrupted run count when the training resumes. If it holds shares of rows, it keeps
a digest of each user's, and a user a digest of its rows and the seed of their shares. Sums and hidden trees are thus of
the first run's rows alone: numbers are packed for as many rows as there were then, and new rows would go down all
finished trees.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.files import Format, read_file, write_file
from treaty.models.checkpoints import Keeper

LEAST = 3  # users whose sum may be opened, by default
_DRAWS = 10  # random choices tried
_POOR_TREES = 10
_ZERO = 1e-7  # sines, and squares of sines, below it are rounding errors


@dataclass(slots=True)
class UserStanding:
    """For how many trees an edge server called or lost a user."""

    called: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """How a domain's cohort is chosen."""

    most: int | None = None  # users of a cohort, if it has more than one group; None: no limit
    least_change: int = 3  # users by which cohorts differ, if they do; and of a group
    whole: bool = False  # sums are over whole groups alone


def select(standings: Mapping[str, UserStanding], running: Collection[str], rng: np.random.Generator) -> list[str]:
    """Return users in the order in which they are taken; `running` is the last cohort."""
    lost = {name: of.lost / max(1, of.called) for name, of in standings.items()}
    # ties are broken at random: names must not decide who takes part
    lots = dict(zip(standings, rng.random(len(standings)).tolist(), strict=True))
    return sorted(standings, key=lambda name: (name not in running, lost[name], lots[name]))


def permitted(cohort: Collection[str], earlier: Iterable[frozenset[str]], least_change: int) -> bool:
    """Return whether the sum of a cohort may be opened after those of earlier cohorts."""
    there, before = frozenset(cohort), set(earlier)
    if there in before:
        return True
    if len(there) < least_change or any(len(there ^ past) < least_change for past in before):
        return False
    return not isolates_few([*before, there])


def isolates_few(cohorts: Collection[frozenset[str]]) -> bool:
    """Return whether a linear combination of cohorts is of one user or two."""
    directions, names = _directions(cohorts)
    users = len(names)
    unknown = np.eye(users) - directions.T @ directions  # projection on the complement of the cohorts' span
    # a 1x1 or 2x2 principal minor is zero iff some combination of cohorts isolates user i, or i and j
    diagonal = np.diag(unknown)
    # the identity keeps the diagonal, where i and j are one user, out of the comparison
    minors = np.outer(diagonal, diagonal) - unknown**2 + np.eye(users)
    return bool(np.any(diagonal <= _ZERO) or np.any(minors <= _ZERO))


class Opened:
    """Cohorts whose sums were opened, or may have been.

    All others' sums follow from those of `independent`, in which there are fewer cohorts than users however long a job.
    """

    def __init__(self, least_change: int = 3) -> None:
        self.independent: list[frozenset[str]] = []
        self._seen: set[frozenset[str]] = set()
        self._least_change = least_change

    def permits(self, cohort: Collection[str], groups: Sequence[frozenset[str]] = ()) -> bool:
        """Return whether a cohort may be opened after these, and after `groups` if they were opened, too."""
        return frozenset(cohort) in self._seen or permitted(cohort, [*self.independent, *groups], self._least_change)

    def largest(self, users: Collection[str]) -> list[str]:
        """Return the largest of these cohorts among some users, empty if there is none."""
        among = frozenset(users)
        return list(max((cohort for cohort in self._seen if cohort <= among), key=len, default=()))

    def add(self, cohort: Collection[str]) -> bool:
        """Note that a cohort's sum is opened; return whether it is independent of the earlier ones."""
        there = frozenset(cohort)
        if there in self._seen:
            return False
        self._seen.add(there)
        if len(_directions([*self.independent, there])[0]) == len(self.independent):
            return False
        self.independent.append(there)
        return True


def _directions(cohorts: Collection[frozenset[str]]) -> tuple[NDArray[np.float64], list[str]]:
    """Return an orthonormal basis of the cohorts' span, float64 (rank, users), and the users."""
    users = sorted(frozenset[str]().union(*cohorts))
    rows = np.array([[name in past for name in users] for past in cohorts], np.float64)
    # right singular vectors of singular values above rounding errors span the cohorts
    _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
    return directions[sizes > _ZERO * sizes[0]], users


class Cohorts:
    """A domain's cohorts over a job, as its edge server chooses them.

    Only `users`, whose rows are in the first sum, take part later, since that sum bounds all others. They are dealt
    into `groups` as it is opened; `epochs` counts later deals.
    """

    def __init__(self, rules: Rules, rng: np.random.Generator) -> None:
        self.opened = Opened(rules.least_change)
        self.groups: list[frozenset[str]] = []
        self.epochs = 0
        self.users: frozenset[str] | None = None
        self._rules, self._rng = rules, rng
        self._known: tuple[tuple[int, int], tuple[NDArray[np.float64], list[str]]] | None = None
        self.running = frozenset[str]()  # the tree's cohort as it began
        self._poor = 0  # trees in a row that had whole groups of less than half of the users there

    def begin(self, ordered: Sequence[str], away: Collection[str] = ()) -> list[str] | None:
        """Return the cohort of a new tree, sorted; None if none is permitted.

        `ordered` are the users there, in the order of `select`; `away` the others that may come back.
        """
        cohort = self._begin(ordered, away)
        self.running = frozenset(cohort)
        return sorted(cohort) or None

    def _begin(self, ordered: Sequence[str], away: Collection[str]) -> list[str]:
        most = len(ordered) if self._rules.most is None else min(self._rules.most, len(ordered))
        taken, spare = list(ordered[:most]), list(ordered[most:])
        if len(taken) < self._rules.least_change:
            return []
        if not self.groups:
            return taken
        whole = self._whole(ordered, most)
        # one poor tree is chance; many in a row are worth another deal
        self._poor = self._poor + 1 if 2 * len(whole) < most else 0
        room = self._room()
        for cohort in self._candidates(taken, spare) if room else (taken,):
            if len(cohort) < len(whole) + self._rules.least_change:
                break
            if self.opened.permits(cohort, self.groups) if room else self._follows(cohort):
                return cohort
        if (not whole or self._poor >= _POOR_TREES) and self._deal_again(ordered, away):
            whole = self._whole(ordered, most)
        return max(whole, self.opened.largest(taken), key=len)

    def keep(self, came: Collection[str]) -> list[str] | None:
        """Return the largest subset of `came` whose sum may be opened, sorted; None if there is none."""
        if len(came) >= self._rules.least_change and (
            not self.groups or frozenset(came) == self.running or self._follows(came)
        ):
            return sorted(came)
        largest = max(self._whole(list(came), len(came)), self.opened.largest(came), key=len)
        return sorted(largest) or None

    def open(self, cohort: Collection[str]) -> bool:
        """Note that the sum of a cohort, which `keep` permitted, is opened; return whether it shows anything new."""
        if not self.groups:
            self._deal(sorted(cohort), ())
        return self.opened.add(cohort)

    def may_come(self, there: Collection[str]) -> frozenset[str]:
        """Return who may take part in the next tree."""
        return frozenset(there if self.users is None else self.users)

    def _span(self) -> tuple[NDArray[np.float64], list[str]]:
        """Return a basis of the span of groups and earlier cohorts, and its users."""
        state = self.epochs, len(self.opened.independent)
        if self._known is None or self._known[0] != state:
            self._known = state, _directions([*self.opened.independent, *self.groups])
        return self._known[1]

    def _follows(self, cohort: Collection[str]) -> bool:
        """Return whether the sum of a cohort follows from sums of groups and what was opened before."""
        directions, users = self._span()
        if not frozenset(users) >= frozenset(cohort):
            return False
        there = frozenset(cohort)
        # a cohort follows from what is known if nothing of it is left outside the span
        row = np.array([name in there for name in users], np.float64)
        return bool(np.linalg.norm(row - directions.T @ (directions @ row)) <= _ZERO * np.sqrt(len(users)))

    def _whole(self, ordered: Sequence[str], most: int) -> list[str]:
        """Return the users of whole groups, the first in order first: `most` of them, or those of one group."""
        place = {name: k for k, name in enumerate(ordered)}
        whole = sorted(
            (group for group in self.groups if group <= place.keys()),
            key=lambda group: max(place[name] for name in group),
        )
        taken: list[str] = []
        for group in whole:
            if not taken or len(taken) + len(group) <= most:
                taken += group
        return taken

    def _candidates(self, taken: list[str], spare: list[str]) -> Iterator[list[str]]:
        """Yield cohorts for a tree: all taken; some of the last exchanged for spare ones; without one or two by lot."""
        yield taken
        for count in range(1, min(len(spare), len(taken), 2 * self._rules.least_change) + 1):
            yield taken[:-count] + spare[:count]
        for count in range(1, self._rules.least_change):
            for _ in range(_DRAWS):
                out = set(self._rng.choice(len(taken), min(count, len(taken)), replace=False).tolist())
                yield [name for k, name in enumerate(taken) if k not in out]

    def _room(self) -> bool:
        """Return whether one more independent cohort besides the groups leaves enough to deal the domain again."""
        if self._rules.whole:
            return False
        directions, users = self._span()
        # n - 2 independent cohorts in all; a new deal has a group for every `least_change` users
        return len(users) - 2 - (len(directions) + 1) >= len(users) // self._rules.least_change

    def _deal_again(self, there: Sequence[str], away: Collection[str]) -> bool:
        """Deal the domain again if a permitted deal is found after all that was opened; return whether it was."""
        if self._rules.whole:
            return False
        before, self._poor = self.groups, 0
        for _ in range(_DRAWS):
            self._deal(there, away)
            if not isolates_few([*self.opened.independent, *self.groups]):
                self.epochs += 1
                return True
        self.groups = before
        return False

    def _deal(self, there: Sequence[str], away: Collection[str]) -> None:
        """Deal users into groups by lot, those away after all others."""
        # users who are away get groups of their own, so that others' groups can be whole
        dealt = [*self._rng.permutation(list(there)).tolist(), *self._rng.permutation(list(away)).tolist()]
        parts = np.array_split(np.arange(len(dealt)), max(1, len(dealt) // self._rules.least_change))
        self.groups = [frozenset(dealt[k] for k in part) for part in parts]


class AnyCohorts(Cohorts):
    """A domain's cohorts where sums have noise: any that are large enough, whatever was opened before."""

    def _begin(self, ordered: Sequence[str], away: Collection[str]) -> list[str]:
        taken = list(ordered[: self._rules.most])
        return taken if len(taken) >= self._rules.least_change else []

    def keep(self, came: Collection[str]) -> list[str] | None:
        return sorted(came) if len(came) >= self._rules.least_change else None

    def open(self, cohort: Collection[str]) -> bool:
        return False

    def may_come(self, there: Collection[str]) -> frozenset[str]:
        return frozenset(there)


_DOMAIN, _ROWS = Format("cohorts", 3), Format("row-digest", 1)
_ROUNDS = 2  # rounds begun by when the server has kept one, so that files of earlier models are of no more use


def drop_earlier_files(keeper: Keeper | None, model_id: str, rounds: int) -> None:
    """Drop files of earlier models as a round begins, once the server must have kept one of this model."""
    if keeper is not None and rounds == _ROUNDS:
        keeper.keep_only(model_id)


class _KeptDomain(msgspec.Struct):
    """The users of the first sum, independent cohorts, groups, the last cohort, users' calls and losses, digests."""

    model_id: str
    users: list[str]
    opened: list[list[str]]
    groups: list[list[str]]
    running: list[str]
    called: dict[str, tuple[int, int]]
    shares: dict[str, bytes]


class DomainFile:
    """An edge server's file about its domain; without a `keeper` nothing is kept.

    `standings` are read as the file is written. `shares` has the digest of each user's shares of its rows.
    """

    def __init__(self, keeper: Keeper | None, owner: str, model_id: str, standings: Mapping[str, UserStanding]) -> None:
        self.shares: dict[str, bytes] = {}
        self._path = None if keeper is None else keeper.beside(model_id, "cohorts")
        self._owner, self._model_id, self._standings = owner, model_id, standings

    def write(self, cohorts: Cohorts) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = _KeptDomain(
            self._model_id,
            sorted(cohorts.users or ()),
            [sorted(cohort) for cohort in cohorts.opened.independent],
            [sorted(group) for group in cohorts.groups],
            sorted(cohorts.running),
            {name: (standing.called, standing.lost) for name, standing in self._standings.items()},
            self.shares,
        )
        write_file(self._path, kept, _DOMAIN, self._owner)

    def read(self, rules: Rules, rng: np.random.Generator) -> Cohorts:
        """Return the cohorts of the training that resumes, and set standings; ConfigError if they are not known."""
        path = self._path
        kept = read_file(path, _KeptDomain, _DOMAIN, self._owner) if path is not None and path.exists() else None
        if kept is None or kept.model_id != self._model_id:
            got = "none" if kept is None else f"cohorts of model {kept.model_id[:8]}"
            raise ConfigError(
                f"cannot resume: expected the cohorts whose sums were opened for model {self._model_id[:8]}, got {got} "
                f"- at {path or self._owner}; bring the file back. A fresh training, without --resume or the server's "
                "checkpoint, opens sums of the same rows over other cohorts: with the earlier sums, the server "
                "may find sums of single users",
                public="it does not know whose sums were opened before",
            )
        self.shares = kept.shares
        for name, (called, lost) in kept.called.items():
            if name in self._standings:
                self._standings[name].called, self._standings[name].lost = called, lost
        cohorts = Cohorts(rules, rng)
        cohorts.users, cohorts.running = frozenset(kept.users), frozenset(kept.running)
        cohorts.groups = [frozenset(group) for group in kept.groups]
        for cohort in kept.opened:
            cohorts.opened.add(cohort)
        return cohorts


class _KeptRows(msgspec.Struct):
    """A user's seed, and HMAC-SHA256 of its rows under it."""

    model_id: str
    seed: bytes
    rows: bytes


def seed_of_rows(keeper: Keeper | None, owner: str, model_id: str, rows: bytes, *, resumed: bool) -> bytes:
    """Return the secret seed, 32 bytes, of the shares of a user's rows, given their fingerprint.

    Raises ConfigError if the training is `resumed`, and had other rows of this user or none.
    """
    path = None if keeper is None else keeper.beside(model_id, "digest")
    if resumed:
        kept = read_file(path, _KeptRows, _ROWS, owner) if path is not None and path.exists() else None
        if kept is None or kept.model_id != model_id:
            raise ConfigError(
                f"{owner}: cannot resume: it has no record of its rows of the first run, because it took no part or "
                f"the file is gone - at {path or owner}; it can take part in a fresh training",
                public="it cannot resume: it has no record of its rows of the first run",
            )
        if not hmac.compare_digest(kept.rows, hmac.digest(kept.seed, rows, "sha256")):
            raise ConfigError(
                f"{owner}: cannot resume: the training rows, labels or weights differ from the first run's, for "
                f"which sums were laid out; bring them back - at {path}",
                public="it cannot resume: its training rows have changed",
            )
        return kept.seed
    # drawn once per training: shares made again when it resumes are the same, and so are their digests
    seed = secrets.token_bytes(32)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, _KeptRows(model_id, seed, hmac.digest(seed, rows, "sha256")), _ROWS, owner)
    return seed
