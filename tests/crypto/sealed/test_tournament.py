"""The rounds of a tournament on shares: how many steps they take, and that they are the cheapest."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from treaty.crypto.payload import SumsBounds
from treaty.crypto.transfer import shared_products
from treaty.crypto.transfer.ahead import Ahead
from treaty.crypto.transfer.comparison import comparison_steps, draw_quads, negatives
from treaty.crypto.transfer.sealed_sums import NUMBER, Widths, opened, rounds_of, steps_of, winner_of
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers
from treaty.systems.vertical.cipher_choice import Link, comparisons_of_a_step

WIDTHS = Widths(count=16, hess=36, node_grad=36)


def play(one: Steps, other: Steps) -> tuple[list, int]:
    """Return both ends' results and the number of steps."""
    sent = [next(one), next(other)]
    for steps in count(1):
        results = []
        for end, came in zip((one, other), reversed(sent), strict=True):
            try:
                results.append(end.send(came))
            except StopIteration as stop:
                results.append(stop)
        if isinstance(results[0], StopIteration):
            return [stop.value for stop in results], steps
        sent = results
    raise AssertionError


@pytest.fixture(scope="module")
def ends() -> list[Transfers]:
    found, _ = play(open_transfers(0), open_transfers(1))
    for end in found:
        end.quads.few = 1 << 17
    play(*(draw_quads(end, 1) for end in found))
    play(*(end.reserve(1 << 19) for end in found))  # both stocks are full: no step goes to filling them
    return found


def make_ahead(both: list[Ahead], nbytes: int = 1 << 30) -> None:
    """Make all that was drawn since stocks were last made ahead."""
    for end in both:
        end.nbytes = nbytes
        end.begin_tree()
    while (sent := [end.message() for end in both]) != [None, None]:
        for end, came in zip(both, reversed(sent), strict=True):
            end.take(came)


def cost(rounds: list[tuple[int, int]], nodes: int, bits: int, step: int) -> int:
    return sum(step * steps_of(size, bits) + nodes * groups * size * (size - 1) // 2 for size, groups in rounds)


def tournaments(entries: int) -> list[list[tuple[int, int]]]:
    """Return every way to reduce entries to one in rounds of groups of one size."""
    if entries == 1:
        return [[]]
    found = []
    for size in range(2, entries + 1):
        groups, rest = divmod(entries, size)
        groups, rest = (groups + 1, 0) if rest > 1 else (groups, rest)
        found += [[(size, groups), *more] for more in tournaments(groups + rest)]
    return found


@pytest.mark.parametrize("step", [1, 5, 30, 1000])
@pytest.mark.parametrize("entries", range(1, 14))
def test_rounds_are_the_cheapest_of_all(entries: int, step: int) -> None:
    for nodes in (1, 4):
        cheapest = min(cost(rounds, nodes, 209, step) for rounds in tournaments(entries))
        assert cost(rounds_of(entries, nodes, 209, step), nodes, 209, step) == cheapest


def test_dear_steps_are_saved_by_comparing_more_at_once() -> None:
    steps, comparisons = [], []
    for step in (1, 10, 100, 1000):
        rounds = rounds_of(400, 2, 209, step)
        steps.append(sum(steps_of(size, 209) for size, _ in rounds))
        comparisons.append(cost(rounds, 2, 209, 0))
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] / 2
    assert comparisons == sorted(comparisons)
    assert comparisons[0] == 2 * 399  # each but the winner loses once


@pytest.mark.parametrize("bits", [3, 5, 6, 17, 18, 64, 65, 66, 209])
def test_a_comparison_takes_as_many_steps_as_said(ends: list[Transfers], bits: int) -> None:
    z = np.zeros((3, 4), np.uint64)
    _, steps = play(*(negatives(ends[role], z, bits, role) for role in (0, 1)))
    assert steps == comparison_steps(bits)


@pytest.mark.parametrize("entries", [2, 3, 5, 9, 20, 33])
@pytest.mark.parametrize("step", [1, 40, 10_000])
def test_a_tournament_takes_as_many_steps_as_planned_and_finds_the_largest(
    ends: list[Transfers], monkeypatch: pytest.MonkeyPatch, entries: int, step: int
) -> None:
    monkeypatch.setattr(shared_products, "pays", lambda *_: True)
    rng = np.random.default_rng(entries)
    numbers = rng.integers(1, 1 << 30, (3, entries, 2))
    values = [np.zeros((3, entries, 4, WIDTHS.words), np.uint64) for _ in range(2)]
    values[0][:, :, :2, 0], values[0][:, :, 2, 0] = numbers, np.arange(entries)

    def found() -> tuple[list[np.ndarray], int]:
        return play(*(winner_of(ends[role], values[role], WIDTHS, role, step) for role in (0, 1)))

    found()
    make_ahead([Ahead(end) for end in ends])
    shares, steps = found()
    best = opened(*(share[:, NUMBER, 0] for share in shares), NUMBER)
    assert best.tolist() == np.argmax(numbers[:, :, 0] / numbers[:, :, 1], axis=1).tolist()
    bits = WIDTHS.difference
    assert steps == sum(steps_of(size, bits) for size, _ in rounds_of(entries, 3, bits, step))


@pytest.mark.parametrize(("round_trip", "expected"), [(0.02, 84), (0.1, 66)])
def test_a_tree_takes_fewer_steps_than_shuffling_would(round_trip: float, expected: int) -> None:
    """As docs/explanation/decisions.md has it: 12 columns of 32 bins, depth 3, 20,000 rows, at 100 Mbit/s."""
    widths = Widths.of(SumsBounds(20_000, 1 << 16, 1 << 14), 1 << 16)
    step, steps = comparisons_of_a_step(Link(round_trip / 2, 8e-8), widths), 0
    for nodes in (1, 2, 4):
        rounds = rounds_of(12 * 31 + 2, nodes, widths.difference, step)
        steps += sum(steps_of(size, widths.difference) for size, _ in rounds)
    assert steps == expected < 102
