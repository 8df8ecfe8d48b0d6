from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.payload import from_words
from treaty.crypto.sums import bin_products as module
from treaty.crypto.sums.bin_products import Block, Items, bin_products, level_pieces, plan_blocks

MODULUS = Modulus((1 << 127) - 1)


def products_by_hand(codes, left_out, offsets, numbers, rows, node_starts):
    """Product of every wanted bin in every node, by place."""
    found, slots = {}, offsets[-1]
    for node in range(len(node_starts) - 1):
        for position in range(node_starts[node], node_starts[node + 1]):
            for f in range(codes.shape[1]):
                if codes[rows[position], f] != left_out[f]:
                    place = node * slots + offsets[f] + codes[rows[position], f]
                    found[int(place)] = found.get(int(place), 1) * numbers[position] % MODULUS.value
    return found


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 5), st.integers(0, 70), st.integers(1, 9), st.sampled_from([1, 2, 5]))
def test_products_equal_products_of_integers(seed, columns, items, nodes, threads):
    rng = np.random.default_rng(seed)
    bins = rng.integers(1, 7, columns)
    codes = np.floor(rng.random((80, columns)) ** rng.integers(1, 4) * bins).astype(np.uint8)
    if columns > 2:
        codes[:, 2] = np.minimum(codes[:, 0], bins[2] - 1)
    offsets = np.concatenate([[0], np.cumsum(bins)]).astype(np.int64)
    left_out = np.array([np.argmax(np.bincount(codes[:, f])) for f in range(columns)], np.int64)
    rows = rng.choice(80, items, replace=False).astype(np.int32)
    node_starts = np.concatenate([[0], np.sort(rng.integers(0, items + 1, nodes - 1)), [items]]).astype(np.int64)
    numbers = [int(x) for x in rng.integers(1, 1 << 62, items)]
    source = MODULUS.pack(MODULUS.montgomery(numbers)) if items else np.empty((0, MODULUS.words), np.uint64)
    level = Items(source, np.arange(items, dtype=np.int32), rows, node_starts, np.arange(nodes))
    groups = [group for block in plan_blocks(codes, left_out, bins.astype(np.int64), 1) for group in block.groups]
    places, products = bin_products(MODULUS, groups, offsets, level, threads)
    plain = from_words(MODULUS.pack(MODULUS.multiply(MODULUS.unpack(products), MODULUS.working([1]))))
    wanted = products_by_hand(codes, left_out, offsets, numbers, rows, node_starts)
    assert dict(zip(places.tolist(), plain, strict=True)) == wanted
    assert (np.diff(places) > 0).all()


def test_each_node_takes_the_cheaper_way(monkeypatch):
    """A large node goes through joint cells, a node of few rows does not; together they cost the least of both."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 8, (4000, 2)).astype(np.uint8)
    (block,) = plan_blocks(codes, np.zeros(2, np.int64), np.full(2, 8, np.int64), 1)
    groups = block.groups
    assert len(groups) == 1
    spent = []
    multiply = MODULUS.segment_products
    monkeypatch.setattr(
        MODULUS, "segment_products", lambda s, i, starts, out: (spent.append(np.diff(starts).sum() - len(out)),
                                                                multiply(s, i, starts, out)))  # fmt: skip
    source = MODULUS.pack(MODULUS.montgomery([3] * 4000))

    def cost(*sizes):
        spent.clear()
        starts = np.cumsum([0, *sizes]).astype(np.int64)
        rows = np.arange(starts[-1], dtype=np.int32)
        bin_products(MODULUS, groups, np.array([0, 8, 16]), Items(source, rows, rows, starts, np.arange(len(sizes))), 1)
        return sum(spent)

    direct_small = sum((codes[3900:3912, f] > 0).sum() - len(set(codes[3900:3912, f]) - {0}) for f in range(2))
    large, both = cost(3900), cost(3900, 12)
    assert both - large == direct_small
    assert large < 0.6 * sum((codes[:3900, f] > 0).sum() for f in range(2))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_shares_of_threads_cover_all_cells(threads):
    starts = np.array([0, 1, 2, 50, 51, 60], np.int64)
    items = Items(MODULUS.pack(MODULUS.montgomery([2] * 60)), np.arange(60, dtype=np.int32), None, None, None)
    cells = module.SortedCells(np.arange(60, dtype=np.int32), starts, np.arange(5, dtype=np.int32), np.array([0, 5]))
    products = module._products(MODULUS, items, cells, threads)
    plain = from_words(MODULUS.pack(MODULUS.multiply(MODULUS.unpack(products), MODULUS.working([1]))))
    assert plain == [pow(2, int(k), MODULUS.value) for k in np.diff(starts)]


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=5),
    st.lists(st.integers(0, 30), max_size=8),
    st.integers(1, 120),
)
def test_pieces_cover_a_level_once_in_order_and_within_the_limit(block_bins, sizes, most):
    bins, ends = np.array([b for block in block_bins for b in block], np.int64), np.cumsum([0, *map(len, block_bins)])
    blocks = [Block(slice(a, b), []) for a, b in pairwise(ends)]
    pieces = level_pieces(blocks, bins, np.array(sizes, np.int64), most)
    covered = [
        (node, k) for p in pieces for node in range(p.first, p.stop) for k in range(*p.blocks.indices(len(blocks)))
    ]
    assert covered == [(node, k) for node in range(len(sizes)) for k in range(len(blocks))]

    def products(node, k):
        return sum(min(b, sizes[node]) for b in block_bins[k])

    for p in pieces:
        held = [products(node, k) for node in range(p.first, p.stop) for k in range(*p.blocks.indices(len(blocks)))]
        assert sum(held) <= most or len(held) == 1


def test_narrow_level_is_one_piece():
    blocks, bins = [Block(slice(0, 12), [])], np.full(12, 33, np.int64)
    (piece,) = level_pieces(blocks, bins, np.array([20_000, 9_000, 400, 8]), 100_000)
    assert (piece.first, piece.stop, piece.blocks) == (0, 4, slice(0, 1))
