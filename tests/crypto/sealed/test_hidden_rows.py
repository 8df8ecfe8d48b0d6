"""Nodes of rows that neither party knows, against plain ones: routing, multiplexing, and weights of leaves."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.sealed.test_sealed import opened, play, shared
from crypto.sealed.watching import again, assert_refuses_garbage, filled
from treaty.crypto.transfer import hidden_rows
from treaty.crypto.transfer.extension import chosen, joined, packed
from treaty.crypto.transfer.hidden_rows import MOST_LEVELS, SharedNodes, bit_patterns
from treaty.crypto.transfer.stock import Transfers, open_transfers

Ends = tuple[Transfers, Transfers]
WIDTHS = st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 88, 96, 120, 127, 128]) | st.integers(1, 128)


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


class Tree:
    """Both ends' rows, and the plain node of each."""

    def __init__(self, ends: Ends, n: int, rng: np.random.Generator) -> None:
        self.both, self.node, self.rng = [SharedNodes(end, n) for end in ends], np.zeros(n, np.int64), rng

    def tables(self) -> tuple[list[np.ndarray], list[tuple[bool, bool]], np.ndarray]:
        """Draw owners and sides: return both ends' tables, who owns a split, and the plain sides of rows."""
        n, levels, rng = len(self.node), self.both[0].levels, self.rng
        owner = rng.integers(0, 3, 1 << levels)
        if rng.random() < 0.3:  # a level of one owner
            owner[owner > 0] = rng.integers(1, 3)
        sides, bits = np.zeros((2, n), np.uint32), np.zeros(n, np.uint8)
        for node in np.flatnonzero(owner):
            right = rng.integers(0, 2, n)
            sides[owner[node] - 1] |= (right << node).astype(np.uint32)
            bits[self.node == node] = right[self.node == node]
        owns = bool((owner == 1).any()), bool((owner == 2).any())
        return list(sides), [owns, owns[::-1]], bits

    def route(self) -> tuple[tuple[np.ndarray, np.ndarray], list[tuple[bool, bool]]]:
        """Check and return shares of the next sides, and whose may be 1."""
        sides, owns, plain = self.tables()
        bits = play(*(rows.side_of_rows(sides[k], owns[k]) for k, rows in enumerate(self.both)))
        assert all(of.dtype == np.uint8 and of.max(initial=0) <= 1 for of in bits)
        assert np.array_equal(bits[0] ^ bits[1], plain)
        return bits, owns if self.both[0].levels == 0 else [(True, True)] * 2

    def grow(self, width: int, values: int | None) -> None:
        """Check a level: shares of values where rows go right, and the rows' nodes."""
        n, (bits, chooses) = len(self.node), self.route()
        plain = [int(x) << 100 | int(y) << 50 | int(z) for x, y, z in self.rng.integers(
            0, 1 << 50, (n * (values or 0), 3))]  # fmt: skip
        near = [0, 1, (1 << width) - 1, 1 << width - 1]
        plain = [near[k % 4] if self.rng.random() < 0.1 else x % (1 << width) for k, x in enumerate(plain)]
        given = [None, None] if values is None else [of.reshape(n, values, 2) for of in shared(plain, width)]
        found = play(*(
            rows.multiplied(bits[k], given[k], width, chooses[k]) for k, rows in enumerate(self.both)
        ))  # fmt: skip
        side = bits[0] ^ bits[1]
        if values is not None:
            assert opened(found, width) == [x * int(side[k // values]) for k, x in enumerate(plain)]
        self.node = 2 * self.node + side
        self.check()

    def check(self) -> None:
        one, other = self.both
        assert np.array_equal(one.share ^ other.share, self.node)
        for sender, receiver in ((one, other), (other, one)):  # the sender has the row of each share
            patterns = bit_patterns(sender.transfers.sender.delta, sender.levels)
            assert np.array_equal(sender._sent ^ patterns[receiver.share], receiver._got)

    def look_up(self) -> None:
        """Check weights of one tree, or of several with as many rows each, in shares of 3 to 8 bytes."""
        n, knows, nbytes = len(self.node), int(self.rng.integers(2)), int(self.rng.integers(3, 9))
        whole, most = np.uint64((1 << 8 * nbytes) - 1), 1 << 8 * nbytes - 2
        trees = int(self.rng.choice([k for k in range(1, n + 1) if n % k == 0]))
        weights = self.rng.integers(-most, most, (trees, 1 << self.both[0].levels))
        given = (weights, None) if knows == 0 else (None, weights)
        found = play(*(rows.weight_of_rows(of, nbytes) for rows, of in zip(self.both, given, strict=True)))
        assert {of.dtype for of in found} == {np.dtype(np.uint32 if nbytes <= 4 else np.uint64)}
        assert all(of.max(initial=0) <= whole for of in found)
        of_rows = weights[np.arange(n) // (n // trees), self.node].astype(np.uint64)
        assert np.array_equal((found[0].astype(np.uint64) + found[1]) & whole, of_rows & whole)


@settings(max_examples=25)
@given(
    st.integers(1, 300), st.integers(1, MOST_LEVELS), WIDTHS, st.sampled_from([None, 0, 1, 2, 3]),
    st.sampled_from([1, 64, 100, 1 << 17]), st.integers(0, 1 << 32),
)  # fmt: skip
def test_nodes_values_and_weights_are_the_plain_ones_at_every_level(
    ends: Ends, n: int, levels: int, width: int, values: int | None, at_once: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_rows, "_ROWS_AT_ONCE", max(at_once, n // 5, 1))  # rows in several pieces
        tree = Tree(ends, n, np.random.default_rng(seed))
        for _ in range(levels):
            tree.grow(width, values)
            tree.look_up()


def test_the_deepest_tree_has_all_nodes(ends: Ends) -> None:
    tree = Tree(ends, 5000, np.random.default_rng(1))
    for level in range(MOST_LEVELS):
        tree.grow(88, min(1 << level, 4))
    tree.look_up()
    assert len(np.unique(tree.node)) > 20
    # all numbers but the root's bit, which its owner alone has a share of
    assert all(len(np.unique(rows.share & 31)) == 32 for rows in tree.both)


@pytest.mark.parametrize("width", [1, 8, 64, 65, 128])
@pytest.mark.parametrize("role", [0, 1])
def test_only_the_bits_of_the_party_that_chooses_count(ends: Ends, width: int, role: int) -> None:
    n, both = 200, [SharedNodes(end, 200) for end in ends]
    plain = [(k * 0x9E3779B97F4A7C15F39CC0605CEDC835) % (1 << width) for k in range(n)]
    given = [of.reshape(n, 1, 2) for of in shared(plain, width)]
    bits = [np.zeros(n, np.uint8), np.zeros(n, np.uint8)]
    bits[role] = np.arange(n, dtype=np.uint8) & 1
    chooses = [(role == k, role != k) for k in (0, 1)]
    found = play(*(rows.multiplied(bits[k], given[k], width, chooses[k]) for k, rows in enumerate(both)))
    assert opened(found, width) == [x * (k & 1) for k, x in enumerate(plain)]


@pytest.mark.parametrize("levels", range(1, MOST_LEVELS + 1))
def test_pads_of_numbers_are_rows_of_joined_bits(ends: Ends, levels: int) -> None:
    """The joined rows of an index are those of `extension.joined`, whose first bit is the lowest, in any order."""
    n, rng = 100, np.random.default_rng(levels)
    both, drawn = [SharedNodes(end, n) for end in ends], []
    for rows in both:
        draw = rows.transfers.draw_for

        def noting(choices: np.ndarray, draw: Any = draw) -> Any:
            drawn.append((yield from draw(choices)))
            return drawn[-1]

        rows.transfers.draw_for = noting
    try:
        bits = rng.integers(0, 2, (levels, 2, n), dtype=np.uint8)
        for of in bits:
            play(*(rows.multiplied(of[k], None, 1, (True, True)) for k, rows in enumerate(both)))
    finally:
        for rows in both:
            del rows.transfers.draw_for
    for k, rows in enumerate(both):
        of_level = drawn[k::2]
        newest_first = np.stack([of.t for of in reversed(of_level)], axis=1).reshape(-1, 2)
        assert np.array_equal(rows._got, joined(newest_first, levels))
        choices = [packed(of.flips) for of in drawn[1 - k :: 2]]
        sent = [chosen(of.q, of.sender.delta, flips) for of, flips in zip(of_level, choices, strict=True)]
        assert np.array_equal(rows._sent, joined(np.stack(sent[::-1], axis=1).reshape(-1, 2), levels))


@pytest.mark.parametrize("role", [0, 1])
def test_messages_of_other_types_and_shapes_are_refused(role: int) -> None:
    n, rng = 20, np.random.default_rng(0)
    tree = Tree(filled(), n, rng)
    tree.grow(20, 2)
    tree.grow(20, 2)

    def rows(k: int) -> SharedNodes:
        out = copy(tree.both[k])
        out.transfers, out._sent, out._got = again(out.transfers), out._sent.copy(), out._got.copy()
        return out

    sides, weights = rng.integers(0, 16, (2, n)).astype(np.uint32), np.arange(4)[None]
    assert_refuses_garbage(lambda k: rows(k).side_of_rows(sides[k], (True, True)), role)
    # a party that owns no split of the level sends nothing
    assert_refuses_garbage(lambda k: rows(k).side_of_rows(sides[k], (k == role, k != role)), role)
    for nbytes in (3, 8):
        assert_refuses_garbage(lambda k, of=nbytes: rows(k).weight_of_rows(weights if k == 0 else None, of), role)
    given = [of.reshape(n, 2, 2) for of in shared(list(range(2 * n)), 20)]
    bits = rng.integers(0, 2, (2, n), dtype=np.uint8)
    for chooses in ((True, True), (True, False)):
        assert_refuses_garbage(
            lambda k, of=chooses: rows(k).multiplied(bits[k], given[k], 20, of if k == 0 else of[::-1]), role
        )
