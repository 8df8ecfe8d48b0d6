"""Computing on shares against plain whole numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.lattice_sums import sealed_places, split_fields
from treaty.crypto.transfer import comparison
from treaty.crypto.transfer.arithmetic import (
    add,
    both_of,
    from_ints,
    prefix_sums,
    selected,
    times_known,
)
from treaty.crypto.transfer.comparison import carries, negatives
from treaty.crypto.transfer.sealed_sums import Known, KnownEntry, Widths, best_of_shared, integer_shares
from treaty.crypto.transfer.shared_products import products, squares
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers, together
from treaty.errors import CryptoError
from treaty.systems.vertical.sealed import places_of


def play(one: Steps[Any], other: Steps[Any]) -> tuple[Any, Any]:
    """Take the steps of both ends; return their results."""
    results: list[Any] = [None, None]
    given: list[Any] = [None, None]
    while True:
        sent = []
        for k, end in enumerate((one, other)):
            try:
                sent.append(end.send(given[k]))
            except StopIteration as stop:
                results[k] = stop.value
        if not sent:
            return results[0], results[1]
        assert len(sent) == 2
        given = sent[::-1]


@pytest.fixture(scope="module")
def ends() -> tuple[Transfers, Transfers]:
    return play(open_transfers(0), open_transfers(1))


@pytest.mark.parametrize(("short", "bits"), [(False, 21), (True, 15)])
def test_transfers_made_ahead_take_few_bits_each(short: bool, bits: int) -> None:
    sent = next(play(open_transfers(0, short=short), open_transfers(1))[0].reserve(1))
    assert sum(array.nbytes for array in sent) * 8 == bits * (1 << 15)


def shared(numbers: list[int], bits: int, words: int = 2) -> tuple[np.ndarray, np.ndarray]:
    masks = [random.randrange(1 << bits) for _ in numbers]
    return from_ints([(x - m) % (1 << bits) for x, m in zip(numbers, masks, strict=True)], words), from_ints(
        masks, words
    )


def opened(shares: tuple[np.ndarray, np.ndarray], bits: int) -> list[int]:
    ints = [[int.from_bytes(row.tobytes(), "little") for row in s.reshape(-1, s.shape[-1])] for s in shares]
    return [(x + y) % (1 << bits) for x, y in zip(*ints, strict=True)]


def test_products_and_squares(ends: tuple[Transfers, Transfers]) -> None:
    x = [0, (1 << 56) - 1, 1, *(random.randrange(1 << 56) for _ in range(60))]
    y = [(1 << 64) - 1, (1 << 64) - 1, 0, *(random.randrange(1 << 64) for _ in range(60))]
    xs, ys = shared(x, 57), shared(y, 65)
    found = play(*(products(ends[k], xs[k], ys[k][:, None], 57, 65, 121) for k in (0, 1)))
    assert opened(found, 121) == [a * b % (1 << 121) for a, b in zip(x, y, strict=True)]
    u = [0, -1, (1 << 32) - 1, 1 - (1 << 32), *(random.randrange(1 - (1 << 32), 1 << 32) for _ in range(60))]
    us = shared([a % (1 << 34) for a in u], 34)
    assert opened(play(*(squares(ends[k], us[k], 34, 65, k) for k in (0, 1))), 65) == [a * a for a in u]


@pytest.mark.parametrize("bits", [2, 5, 17, 64, 121])
def test_negatives(ends: tuple[Transfers, Transfers], bits: int) -> None:
    z = [0, -1, 1, *(random.randrange(-(1 << bits - 1), 1 << bits - 1) for _ in range(40))]
    z = [max(-(1 << bits - 1), min(x, (1 << bits - 1) - 1)) for x in z]
    zs = shared([x % (1 << bits) for x in z], bits)
    one, other = play(*(negatives(ends[k], zs[k], bits, k) for k in (0, 1)))
    assert (one ^ other).tolist() == [int(x < 0) for x in z]


def test_quads_are_shares_of_bits_and_of_their_products(ends: tuple[Transfers, Transfers]) -> None:
    one, other = play(*(comparison.draw_quads(ends[k], 5000) for k in (0, 1)))
    word = one ^ other
    bits = [word >> (1 + place) & 1 for place in range(7)]
    for place, factors in enumerate(comparison._PRODUCTS[1:], 1):
        assert np.array_equal(word >> place & 1, np.bitwise_and.reduce([bits[factor] for factor in factors]))
    counts = np.array([[np.count_nonzero(of >> place & 1) for place in range(1, 30)] for of in (one, other)])
    assert np.all(np.abs(counts - 2500) < 6 * np.sqrt(1250))  # each party's shares alone are even
    assert np.all(np.abs(np.array([np.count_nonzero(bit) for bit in bits]) - 2500) < 6 * np.sqrt(1250))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 45])
def test_digits_are_joined_to_whether_a_number_is_greater(ends: tuple[Transfers, Transfers], count: int) -> None:
    rng = np.random.default_rng(count)
    digits = rng.integers(0, 2, (2, count, 300))
    digits[1] = np.where(rng.random((count, 300)) < 0.7, digits[0], digits[1])
    numbers = [sum(int(d) << place for place, d in enumerate(digits[k, :, j])) for k in (0, 1) for j in range(300)]
    plain = [(digits[0] > digits[1]).astype(np.uint8), (digits[0] == digits[1]).astype(np.uint8)]
    masks = rng.integers(0, 2, (2, count, 300), dtype=np.uint8)
    shares = [masks, np.stack(plain) ^ masks]
    one, other = play(*(comparison.join(ends[k], *shares[k], k) for k in (0, 1)))
    both = list(zip(numbers[:300], numbers[300:], strict=True))
    assert (one[0] ^ other[0]).tolist() == [int(x > y) for x, y in both]
    assert (one[1] ^ other[1]).tolist() == [int(x == y) for x, y in both]


def test_selection_and_conjunction(ends: tuple[Transfers, Transfers]) -> None:
    values = [random.randrange(1 << 100) for _ in range(30)]
    vs, bits = shared(values, 128), np.random.default_rng(0).integers(0, 2, (2, 30), dtype=np.uint8)
    found = play(*(selected(ends[k], bits[k], vs[k][:, None], [128]) for k in (0, 1)))
    assert opened(found, 128) == [v * int(b) for v, b in zip(values, bits[0] ^ bits[1], strict=True)]
    found = play(*(both_of(ends[k], bits[k, :29], 2, 128, k) for k in (0, 1)))
    assert opened(found, 128) == (bits[0] & bits[1])[:29].tolist()


@pytest.mark.parametrize("words", [1, 2])
def test_products_with_numbers_that_one_party_knows(ends: tuple[Transfers, Transfers], words: int) -> None:
    known = [0, 1, -1, (1 << 39) - 1, 1 - (1 << 39), *(random.randrange(1 - (1 << 39), 1 << 39) for _ in range(9))]
    y = [[random.randrange(1 << 64 * words) for _ in range(3)] for _ in known]
    ys = [share.reshape(len(known), 3, words) for share in shared([a for row in y for a in row], 64 * words, words)]
    given = [known, [0] * len(known)]
    found = play(*(times_known(ends[k], given[k], 40, ys[k], 64 * words, k) for k in (0, 1)))
    assert opened(found, 64 * words) == [
        x * a % (1 << 64 * words) for x, row in zip(known, y, strict=True) for a in row
    ]


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 18), st.integers(0, 1 << 18), st.data())
def test_shares_of_fields_are_those_of_whole_numbers(
    ends: tuple[Transfers, Transfers], n: int, grad_bound: int, hess_bound: int, data: Any
) -> None:
    bounds = SumsBounds(n, grad_bound, hess_bound)
    places = sealed_places(bounds)
    below, length = places[1], places[-1]
    near = [0, 1, n - 1, n]
    count = [data.draw(st.sampled_from(near) | st.integers(0, n)) for _ in range(6)]
    hess = [data.draw(st.sampled_from([0, c * hess_bound]) | st.integers(0, c * hess_bound)) for c in count]
    grad = [data.draw(st.integers(-c * grad_bound, c * grad_bound)) for c in count]
    most = (1 << below - 2) - 1  # of noise, on either side
    noise = [data.draw(st.sampled_from([-most, -1, 0, most]) | st.integers(-most, most)) for _ in count]
    sums = [
        e + (c << below) + (h << places[2]) + (g << places[3])
        for e, c, h, g in zip(noise, count, hess, grad, strict=True)
    ]
    # masks at random, and such that lower fields just wrap around, or just do not
    masks = [
        data.draw(st.sampled_from([0, m, m + 1, m - 1, -m, -m - (1 << below - 2)]) | st.integers(0, 1 << length))
        for m in sums
    ]
    added = (1 << below) + (1 << places[2]) + (1 << length - 2)
    parts = [
        split_fields(from_ints([x % (1 << length) for x in side], 3).view(np.uint16), places)
        for side in (
            [m + r + (1 << below - 2) for m, r in zip(sums, masks, strict=True)],
            [added - r for r in masks],
        )
    ]
    found = play(*(integer_shares(ends[k], parts[k], places_of(bounds), k) for k in (0, 1)))
    expected = [x % (1 << 128) for row in zip(grad, hess, count, strict=True) for x in row]
    assert opened(found, 128) == expected


def test_sums_of_wide_numbers_carry_whatever_the_layout() -> None:
    numbers = [random.randrange(1 << 128) for _ in range(12)] + [(1 << 128) - 1, (1 << 64) - 1, 1, 0]
    wide, one = from_ints(numbers, 2).reshape(4, 4, 2), from_ints([1], 2)
    for a, b in ((wide, one), (one, wide), (wide.swapaxes(0, 1), one), (wide, wide.swapaxes(0, 1)), (wide[:1], wide)):
        rows = np.broadcast_arrays(a, b)
        ints = [[int.from_bytes(x.tobytes(), "little") for x in row.reshape(-1, 2)] for row in rows]
        expected = [(x + y) % (1 << 128) for x, y in zip(*ints, strict=True)]
        assert add(a, b).reshape(-1, 2).tolist() == from_ints(expected, 2).tolist()


def test_prefix_sums_carry_from_word_to_word() -> None:
    numbers = [random.randrange(1 << 128) for _ in range(40)]
    found = prefix_sums(from_ints(numbers, 2).reshape(2, 20, 2))
    expected = [sum(row[: k + 1]) % (1 << 128) for row in (numbers[:20], numbers[20:]) for k in range(20)]
    assert found.reshape(-1, 2).tolist() == from_ints(expected, 2).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_best_is_that_of_plain_fractions(ends: tuple[Transfers, Transfers], seed: int) -> None:
    rng, ridge = np.random.default_rng(seed), 3
    nodes, candidates = int(rng.integers(1, 5)), int(rng.integers(1, 20))
    tied, last, step = bool(seed % 2), bool(seed // 2 % 2), int(rng.integers(1, 60))
    bounds = SumsBounds(100, 4, 3) if tied else SumsBounds(50_000, 1 << 16, 1 << 14)
    n = bounds.n_rows
    count = rng.integers(0, n + 1, (nodes, candidates))
    hess = rng.integers(0, count * bounds.hess_bound + 1)
    grad = rng.integers(-count * bounds.grad_bound, count * bounds.grad_bound + 1)
    rest = rng.integers(0, n - count.max(axis=1) + 1)
    totals = np.stack([
        [rng.integers(-bounds.grad_bound * n, bounds.grad_bound * n + 1) for _ in range(nodes)],
        hess.max(axis=1) + rng.integers(0, rest * bounds.hess_bound + 1),
        count.max(axis=1) + rest,
    ], axis=1)  # fmt: skip
    least = np.full(nodes, 2), np.full(nodes, 20)
    limits = [np.stack([low, np.maximum(totals[:, k] - low + 1, low)]) for k, low in zip((1, 2), least, strict=True)]
    first = KnownEntry([(int(rng.integers(0, 9)), int(rng.integers(1, 9))) for _ in range(nodes)], [5] * nodes)
    own = KnownEntry([(int(rng.integers(0, 1 << 20)), 7) for _ in range(nodes)], [6] * nodes)
    known = Known(totals, ridge, *limits, 9, [first], [own] if last else [])
    directions = rng.integers(0, 2, (2, candidates), np.uint8) if seed % 3 else None
    expected = []
    for b in range(nodes):
        whole = int(totals[b, 1]) + 2 * ridge
        best, top, below = (0, 5), *first.fractions[b]
        for j in range(candidates):
            fits = all(limits[k][0, b] <= x[b, j] < limits[k][1, b] for k, x in ((0, hess), (1, count)))
            a = int(hess[b, j]) + ridge
            v = whole * int(grad[b, j]) - int(totals[b, 0]) * a
            new = v**2, a * (whole - a)
            if directions is not None and directions[0, j]:
                fits &= v <= 0 if directions[1, j] else v >= 0  # a weight falls with the sum of gradients
            if fits and new[0] * below > top * new[1]:
                best, (top, below) = (j, 9), new
        if last and own.fractions[b][0] * below > top * own.fractions[b][1]:
            best, (top, below) = (0, 6), own.fractions[b]
        expected.append((top, below, *best))
    plain = [int(x) % (1 << 128) for x in np.stack([grad, hess, count], axis=-1).reshape(-1)]
    sums = [share.reshape(nodes, candidates, 3, 2) for share in shared(plain, 128)]
    widths = Widths.of(bounds, ridge)
    given = [known, Known.nothing(nodes, 1, int(last))]
    of_ends = (directions if directions is None else directions * k for k in (0, 1))
    found = play(
        *(best_of_shared(ends[k], sums[k], given[k], widths, k, step, None, of) for k, of in enumerate(of_ends))
    )
    entries = zip(*(opened([x[:, part] for x in found], bits) for part, bits in enumerate(
        widths.of_entry)), strict=True)  # fmt: skip
    assert list(entries) == expected


def test_a_bound_beyond_all_numbers_is_passed_by_none(ends: tuple[Transfers, Transfers]) -> None:
    bounds, ridge = SumsBounds(50_000, 1 << 16, 1 << 14), 1
    n, grad, hess = bounds.n_rows, -bounds.grad_bound * bounds.n_rows, bounds.hess_bound * bounds.n_rows
    totals = np.array([[grad, hess, n]])
    wide = np.array([[0], [n + 1]]), np.array([[0], [hess + 1]])
    first = KnownEntry([(1 << 250, hess + ridge)], [5])
    known = Known(totals, ridge, wide[1], wide[0], 9, [first])
    plain = [x % (1 << 128) for x in (grad, 0, n - 1)]  # the largest V there can be
    sums = [share.reshape(1, 1, 3, 2) for share in shared(plain, 128)]
    widths, given = Widths.of(bounds, ridge), [known, Known.nothing(1, 1, 0)]
    found = play(*(best_of_shared(ends[k], sums[k], given[k], widths, k, 2) for k in (0, 1)))
    assert opened([x[:, 3] for x in found], widths.of_entry[3]) == [5]


def test_protocols_that_step_together_do_not_take_each_others_transfers(ends: tuple[Transfers, Transfers]) -> None:
    many = ends[0].rows.left + (1 << 19)  # as many more are made as these lack

    def both(end: Transfers) -> Steps[Any]:
        return (yield from together(end.choose(np.zeros(many, np.uint8)), end.choose(np.ones(100, np.uint8))))

    (first, second), _ = play(*(both(end) for end in ends))
    assert (len(first[1]), len(second[1])) == (many, 100)
    assert first[0] + many <= second[0] or second[0] + 100 <= first[0]


@pytest.mark.parametrize(
    "sizes", [np.ones((1, 2), np.int64), np.array(1), np.array([1.0, 1.0]), np.array([-1, 3]), np.ones(3, int)]
)
def test_sizes_of_a_step_that_are_none_are_refused(sizes: np.ndarray) -> None:
    def one() -> Steps[None]:
        yield [np.zeros(1)]

    steps = together(one(), one())
    next(steps)
    with pytest.raises(CryptoError, match="as many protocols"):
        steps.send([sizes, np.zeros(1), np.zeros(1)])


def test_no_transfer_is_drawn_twice() -> None:
    """Neither of a piece of the stock that is drawn in parts nor of the next piece."""
    ends = play(open_transfers(0), open_transfers(1))
    parts = [play(*(end.draw_for(np.zeros(count, np.uint8)) for end in ends)) for count in (700, 700, 40_000, 300)]
    for end in (0, 1):
        for rows in ([part[end].q for part in parts], [part[end].t for part in parts]):
            assert len(np.unique(np.concatenate(rows), axis=0)) == sum(map(len, rows))


def test_no_quad_is_drawn_twice() -> None:
    ends = play(open_transfers(0), open_transfers(1))
    parts = [play(*(comparison.draw_quads(end, count) for end in ends)) for count in (700, 700, 5000, 300)]
    for end in (0, 1):
        blocks = np.concatenate([part[end] for part in parts]).reshape(-1, 50)
        assert len(np.unique(blocks, axis=0)) == len(blocks)


@pytest.mark.parametrize("role", [0, 1])
def test_shares_of_compared_digits_are_even(ends: tuple[Transfers, Transfers], role: int) -> None:
    """Whatever the digits are. Of one alone: joining several draws on quads, which would hide what the shares open."""
    n = 6000
    for mine in (0, 15):
        low = np.tile(np.array([mine >> place & 1 for place in range(4)], np.uint8), (n, 1))
        found = play(*(carries(ends[k], low if k == role else 1 - low, k) for k in (0, 1)))
        assert not np.any(found[0] ^ found[1])
        for share in found:
            assert np.all(np.abs(np.array([part.mean() for part in np.split(share, 2)]) - 0.5) < 6 / np.sqrt(2 * n))
