"""Sides looked up by transfer: each row's own alone, every pad under its own Delta and tweak."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crypto.sealed.test_sealed import play
from treaty.crypto.transfer.extension import Sender
from treaty.crypto.transfer.stock import Paths, Transfers, open_transfers

N = 1003


@pytest.fixture
def ends() -> tuple[Transfers, Transfers]:
    return play(open_transfers(0), open_transfers(1))


def read_level(paths: tuple[Paths, Paths], nodes: np.ndarray, sides: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the table of a level, bool (nodes, rows), the receiver's own pads, and the level's first tweak."""
    tweaks = [end.next_level() for end in paths]
    assert tweaks[0] == tweaks[1]
    table = paths[1].hide(np.packbits(sides, axis=1), nodes, tweaks[1], slice(0, N))
    return np.unpackbits(table, axis=1, count=N), paths[0].own_pads(tweaks[0]), tweaks[0]


def grow(paths: tuple[Paths, Paths], bits: np.ndarray) -> None:
    for of in (slice(0, 600), slice(600, N)):
        paths[1].accept(*paths[0].choose(bits[of], of), of)
    for end in paths:
        end.levels += 1


def test_each_row_reads_the_side_at_its_own_node_and_no_other(ends: tuple[Transfers, Transfers]) -> None:
    rng = np.random.default_rng(0)
    paths = Paths(ends[0], N), Paths(ends[1], N)
    chosen = np.zeros((N, 0), np.uint8)
    for depth in range(9):
        nodes = np.unpackbits(np.arange(1 << depth, dtype=">u2").view(np.uint8).reshape(-1, 2), axis=1)[:, 16 - depth :]
        nodes = nodes[rng.permutation(len(nodes))[: max(1, len(nodes) * 3 // 4)]]
        sides = rng.integers(0, 2, (len(nodes), N), dtype=np.uint8)
        table, own, _ = read_level(paths, nodes, sides)
        mine = (nodes[:, None] == chosen[None]).all(axis=2)
        read = table ^ own
        assert np.array_equal(read[mine], sides[mine])
        if depth > 1:
            right = (read == sides)[~mine].mean()
            assert abs(right - 0.5) < 5 / np.sqrt(4 * (~mine).sum())
        bits = rng.integers(0, 2, N, dtype=np.uint8)
        grow(paths, bits)
        chosen = np.column_stack([chosen, bits])


def test_tables_tell_nothing_of_nodes_where_no_row_is(ends: tuple[Transfers, Transfers]) -> None:
    """Two tables of the same level and rows, with all sides left and all right, are alike but for a row's own bit."""
    paths = Paths(ends[0], N), Paths(ends[1], N)
    for _ in range(2):
        grow(paths, np.zeros(N, np.uint8))
    for side in (0, 1):
        table, _, _ = read_level(paths, np.array([[0, 1], [1, 0], [1, 1]], np.uint8), np.full((3, N), side, np.uint8))
        assert np.all(np.abs(table.mean(axis=1) - 0.5) < 5 / np.sqrt(4 * N))
        assert np.all(np.abs((table[1:] ^ table[:-1]).mean(axis=1) - 0.5) < 5 / np.sqrt(4 * N))


def tweaks_used(ends: tuple[Transfers, Transfers]) -> list[range]:
    """Return the tweaks of transfers drawn before, of two levels' pads, and of transfers drawn after."""
    paths, used = (Paths(ends[0], N), Paths(ends[1], N)), []

    def draw() -> None:
        one, other = play(*(end.draw_for(np.zeros(700, np.uint8)) for end in ends))
        assert one.first == other.first
        used.append(range(one.first, one.first + 700))

    draw()
    for _ in range(2):
        grow(paths, np.zeros(N, np.uint8))
        first = read_level(paths, np.zeros((1, paths[0].levels), np.uint8), np.zeros((1, N), np.uint8))[2]
        used.append(range(first, first + N))
    draw()
    return used


def all_apart(used: list[range]) -> bool:
    return len(set().union(*used)) == sum(map(len, used))


def test_no_tweak_is_used_twice(ends: tuple[Transfers, Transfers], monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_apart(tweaks_used(ends))
    # the fault: the counter stands still
    monkeypatch.setattr(Paths, "next_level", lambda paths: paths._transfers.used)
    assert not all_apart(tweaks_used(ends))


def deltas(count: int) -> set[bytes]:
    return {end.sender.delta.tobytes() for _ in range(count) for end in play(open_transfers(0), open_transfers(1))}


def test_every_end_has_a_delta_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(deltas(2)) == 4
    honest = Sender.__init__

    def constant(sender: Sender, *given: Any) -> None:
        monkeypatch.setattr("treaty.crypto.transfer.extension.secrets.token_bytes", lambda count: bytes(count))
        honest(sender, *given)
        monkeypatch.undo()
        monkeypatch.setattr(Sender, "__init__", constant)

    monkeypatch.setattr(Sender, "__init__", constant)  # the fault
    assert len(deltas(2)) == 1


def test_transfers_of_one_direction_leave_those_of_both_in_step(ends: tuple[Transfers, Transfers]) -> None:
    grow((Paths(ends[0], N), Paths(ends[1], N)), np.ones(N, np.uint8))
    one, other = play(*(end.draw_for(np.zeros(40_000, np.uint8)) for end in ends))
    for sender, receiver in ((one, other), (other, one)):
        difference = sender.q ^ receiver.t
        assert np.array_equal(difference, receiver.random[:, None].astype(np.uint64) * sender.sender.delta)
