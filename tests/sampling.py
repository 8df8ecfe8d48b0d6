"""Which tests `make test` plays: of every file as many, by turns, as a little processor time is enough for.

`costs.txt` has the seconds of processor time that tests take, by name; `pytest --measure` writes it anew.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

COSTS = Path(__file__).with_name("costs.txt")
OF_A_FILE = 0.3  # seconds for each file, about
LISTED = 0.1  # from which seconds on a test is in `costs.txt`
QUICK = 0.02  # what others take, on average
Costs = Mapping[str, float]


def sample(items: Sequence[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return the tests of a sample: none that is marked as slow, all that are marked ``always``."""
    files: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            files[item.path].append(item)
    costs, chosen = read(), set()
    for tests in files.values():
        chosen |= {tests[k] for k in turns([costs.get(name(test), QUICK) for test in tests], seed)}
        chosen |= {test for test in tests if test.get_closest_marker("always")}
    return chosen


def turns(costs: Sequence[float], seed: int) -> list[int]:
    """Return which of a file's tests are played: from one on that the seed chooses, until the file's time is spent.

    A test that takes longer than that is passed over but once in so many seeds as it takes times as long.
    """
    chosen: list[int] = []
    spent = 0.0
    for k in range(len(costs)):
        at = (k + seed) % len(costs)
        if costs[at] > OF_A_FILE and (at + seed // len(costs)) % math.ceil(costs[at] / OF_A_FILE):
            continue
        if chosen and spent + costs[at] > OF_A_FILE:
            break
        chosen.append(at)
        spent += costs[at]
    return chosen


def name(item: pytest.Item) -> str:
    """Return a test's name without its parameters: files are renamed and merged, and few names occur twice."""
    return getattr(item, "originalname", item.name)


def read() -> Costs:
    return {test: float(seconds) for seconds, test in map(str.split, COSTS.read_text().splitlines())}


def write(measured: Iterable[tuple[str, float]]) -> None:
    """Write what tests took: the mean over a test's cases, in tenths of a second."""
    cases: defaultdict[str, list[float]] = defaultdict(list)
    for test, seconds in measured:
        cases[test].append(seconds)
    means = {test: sum(took) / len(took) for test, took in cases.items()}
    lines = (f"{mean:.1f} {test}\n" for test, mean in sorted(means.items()) if mean >= LISTED)
    COSTS.write_text("".join(lines))
