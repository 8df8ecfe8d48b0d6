"""What a job is expected to take, by formulas from its options and the sizes of its tables.

Bytes follow from the messages of each protocol, with trees complete as far as rows allow, so that they are bounds from
above, but for small ones that are left out. Seconds and memory come from costs measured on one machine
(`benchmarks/estimates.py` compares all three with trainings).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from treaty.errors import ConfigError
from treaty.systems.pooled.options import BoostingOptions

ENVELOPE = 110
"""Bytes of a message besides its content."""
KEY_BYTES = 18.5
"""Bytes of a public key, with what it takes to hide under it, by its bits."""
AGREEMENT = 1000
"""Bytes that a party sends each other one to compare options."""
ROUND_TRIP = 3e-3
"""Seconds from a message to its answer between processes of one machine, whatever is computed."""
# numbers, and the time to sort them where costs were measured
_SORTED, _SORT_SECONDS = 1 << 18, 0.046


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a job's tables.

    `rows` are those of each owner: of all the same where tables are split by column. `columns`, and `slots` in their
    histograms (bins, and one for missing values), are by owner; so are the columns that are split by halves of their
    categories, and these, `halved` (absent: none). `classes` are those that the job names, `threads` this party's.
    `watched` are the rows of all eval sets, if these count; `weighted` says whether rows have weights.
    """

    rows: int
    columns: Mapping[str, int]
    slots: Mapping[str, int]
    classes: int = 2
    threads: int = 1
    rarer: float = 0.5
    halved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    watched: int = 0
    weighted: bool = False


@dataclass(slots=True)
class Expected:
    """What a training is expected to take, at most.

    `seconds` on machines like that where costs were measured, each party on its own, without their start and what the
    network takes. `sent` bytes by sender and receiver; `memory` bytes by party, besides its process and table; `kept`
    bytes by party, in its folder `store`.
    """

    seconds: float = 0.0
    sent: dict[tuple[str, str], float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)

    def send(self, sender: str, receiver: str, nbytes: float, messages: float = 0.0) -> None:
        """Count bytes, and the envelopes of messages."""
        pair = sender, receiver
        self.sent[pair] = self.sent.get(pair, 0.0) + float(nbytes) + ENVELOPE * messages

    def hold(self, nbytes: float, *parties: str) -> None:
        """Count memory of each of these parties."""
        for name in parties:
            self.memory[name] = self.memory.get(name, 0.0) + nbytes

    def agree(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Count what parties send each other, both ways, to compare options."""
        for a, b in pairs:
            self.send(a, b, AGREEMENT)
            self.send(b, a, AGREEMENT)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What noise is expected to cost: the `epsilon` of a person at each party, and what the model learns less.

    `lost` is the share of what a model without noise gains over guessing: of AUC above 1/2, or of explained variance.
    `between` is its range, see docs/jobs.md, which says how far trainings on other tables were from it.
    """

    epsilon: dict[str, float]
    lost: float
    between: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Trees:
    """How many trees a training has at most, the nodes of each tree by level, its splits, and levels of all rows.

    By best gain, a "level" has the children of one leaf.
    """

    count: int
    nodes: list[int]
    splits: int
    depth: int

    @classmethod
    def of(cls, common: BoostingOptions, shape: Shape, rows: int, alone: int = 0) -> Trees:
        """Return the trees on so many rows; the first `alone` rounds are left out."""
        outputs = shape.classes if shape.classes > 2 else 1
        of_round = outputs * common.num_parallel_tree
        # multi-output trees have sums for each output, and splits once for all of them
        sharing = outputs if common.multi_output else 1
        leaves = max(1, rows // common.fewest_rows)
        # leaves of an earlier model are refreshed without any tree that grows
        count = 0 if common.refreshes else max(0, common.most_rounds - alone) * of_round
        if common.max_leaves:
            most = min(common.max_leaves, leaves)
            levels = [1] + [min(2, leaves)] * (most - 2)
            return cls(count, levels, -(-(most - 1) // sharing), common.rules_of(1.0, 1.0).full_depth)
        nodes = [min(1 << level, leaves) for level in range(common.depth)]
        return cls(count, nodes, -(-sum(nodes) // sharing), len(nodes))

    @property
    def asked_of_levels(self) -> list[int]:
        """Nodes that are summed, by level: of two siblings one."""
        return [1, *(-(-count // 2) for count in self.nodes[1:])]

    @property
    def asked(self) -> int:
        """Nodes of a tree that are summed."""
        return sum(self.asked_of_levels)

    @property
    def rounds(self) -> int:
        """Levels that parties exchange messages about."""
        return len(self.nodes)

    def growing(self, rows: int, columns: int) -> float:
        """Return the seconds of one core in which sums of plain histograms grow all of them."""
        return self.count * (rows * (self.depth * columns * 1.2e-9 + 60e-9) + self.splits * columns * 2e-6)


def slowness() -> float:
    """Return how many times slower this machine is, now, than the one where costs were measured, by a sort."""
    numbers = np.random.default_rng(0).random(_SORTED)

    def seconds() -> float:
        started = time.perf_counter()
        np.sort(numbers, kind="stable")
        return time.perf_counter() - started

    return min(seconds() for _ in range(3)) / _SORT_SECONDS


def not_expected(what: str) -> ConfigError:
    """Return the error for options without a formula."""
    return ConfigError(f"no formula says what {what} takes; try it on a part of the rows")
