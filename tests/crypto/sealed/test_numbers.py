"""Products, selections and comparisons of numbers of any width against whole numbers, and what each end receives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from crypto.sealed.test_sealed import opened, play, shared
from treaty.crypto.transfer.arithmetic import _share, both_of, cut, from_bits, selected, times_known
from treaty.crypto.transfer.arithmetic import products as by_transfers
from treaty.crypto.transfer.comparison import _digits, negatives
from treaty.crypto.transfer.correlations import Correlated, _correlate, _hold, narrowed, widened
from treaty.crypto.transfer.extension import joined
from treaty.crypto.transfer.ring_products import RingKind
from treaty.crypto.transfer.sealed_sums import (
    NUMBER,
    Known,
    KnownEntry,
    Widths,
    best_of_shared,
    winner_of,
)
from treaty.crypto.transfer.shared_products import products, squares
from treaty.crypto.transfer.stock import Arrays, Correlation, Drawn, Steps, Transfers, open_transfers

Ends = tuple[Transfers, Transfers]
WIDTHS_OF_NUMBERS = st.sampled_from([1, 2, 3, 63, 64, 65, 66, 121, 128]) | st.integers(1, 190)


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


def numbers(data: Any, count: int, least: int, most: int) -> list[int]:
    near = [x for x in (least, least + 1, -1, 0, 1, most - 1, most) if least <= x <= most]
    return [data.draw(st.sampled_from(near) | st.integers(least, most)) for _ in range(count)]


@settings(deadline=None)
@given(WIDTHS_OF_NUMBERS, WIDTHS_OF_NUMBERS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_products_of_any_widths(
    ends: Ends, x_bits: int, y_bits: int, n: int, values: int, more_words: int, data: Any
) -> None:
    words = -(-max(x_bits, y_bits) // 64) + more_words - 1
    bits = data.draw(st.integers(1, min(x_bits + y_bits, 64 * words)))
    x = numbers(data, n, 0, (1 << x_bits - 1) - 1)
    y = numbers(data, n * values, 0, (1 << y_bits - 1) - 1)
    xs, ys = shared(x, x_bits, words), [of.reshape(n, values, words) for of in shared(y, y_bits, words)]
    found = play(*(products(ends[k], xs[k], ys[k], x_bits, y_bits, bits) for k in (0, 1)))
    assert opened(found, bits) == [x[k // values] * b % (1 << bits) for k, b in enumerate(y)]
    assert all(int.from_bytes(row.tobytes(), "little") < 1 << bits for of in found for row in of.reshape(-1, words))


@settings(deadline=None)
@given(st.integers(3, 100), st.integers(1, 3), st.data())
def test_squares_of_any_width(ends: Ends, u_bits: int, n: int, data: Any) -> None:
    bits, most = 2 * u_bits - 3, (1 << u_bits - 2) - 1
    u, words = numbers(data, n, -most, most), -(-bits // 64)
    us = shared([a % (1 << u_bits) for a in u], u_bits, max(words, -(-u_bits // 64)))
    assert opened(play(*(squares(ends[k], us[k], u_bits, bits, k) for k in (0, 1))), bits) == [
        a * a % (1 << bits) for a in u
    ]


@settings(deadline=None)
@given(WIDTHS_OF_NUMBERS, st.integers(1, 3), st.sampled_from([1, 2, 15, 16, 17, 33]), st.integers(1, 3), st.data())
def test_numbers_that_one_party_knows_times_any(
    ends: Ends, bits: int, n: int, values: int, words: int, data: Any
) -> None:
    known = numbers(data, n, min(0, 1 - (1 << bits - 1)), max(0, (1 << bits - 1) - 1))
    y = numbers(data, n * values, 0, (1 << 64 * words) - 1)
    ys, given_numbers = [of.reshape(n, values, words) for of in shared(y, 64 * words, words)], (known, [0] * n)
    found = play(*(times_known(ends[k], given_numbers[k], bits, ys[k], 64 * words, k) for k in (0, 1)))
    assert opened(found, 64 * words) == [known[k // values] * b % (1 << 64 * words) for k, b in enumerate(y)]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.data())
def test_selections_and_conjunctions_of_any_shape_and_width(
    ends: Ends, n: int, values: int, words: int, data: Any
) -> None:
    bits = np.array(data.draw(st.lists(st.integers(0, 1), min_size=2 * n, max_size=2 * n)), np.uint8).reshape(2, n)
    widths = data.draw(st.lists(st.integers(1, 64 * words), min_size=values, max_size=values))
    y = numbers(data, n * values, 0, (1 << 64 * words) - 1)
    ys = [of.reshape(n, values, words) for of in shared(y, 64 * words, words)]
    found = play(*(selected(ends[k], bits[k], ys[k], widths) for k in (0, 1)))
    both = (bits[0] ^ bits[1]).astype(object)[:, None] * np.array(y, object).reshape(n, values)
    for v, width in enumerate(widths):
        assert opened([of[:, v] for of in found], width) == [number % (1 << width) for number in both[:, v]]
    found = play(*(both_of(ends[k], bits[k], words, widths[0], k) for k in (0, 1)))
    assert opened(found, widths[0]) == (bits[0] & bits[1]).tolist()


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.lists(st.integers(0, 26), min_size=1, max_size=9))
def test_numbers_are_sent_by_the_bytes_that_count(n: int, words: int, sizes: list[int]) -> None:
    sizes = [min(size, 8 * words) for size in sizes]
    whole = np.random.default_rng(n).integers(0, 2**64, (n, len(sizes), words), np.uint64)
    raw = narrowed(whole, sizes)
    assert raw.shape == (n, sum(sizes))
    expected = np.stack([cut(whole[:, k], 8 * size) for k, size in enumerate(sizes)], axis=1)
    assert np.array_equal(widened(raw, sizes, words), expected)


@settings(deadline=None)
@given(st.integers(2, 130), st.integers(1, 5), st.data())
def test_signs_of_numbers_of_any_width(ends: Ends, bits: int, n: int, data: Any) -> None:
    z = numbers(data, n, -(1 << bits - 1), (1 << bits - 1) - 1)
    zs = shared([x % (1 << bits) for x in z], bits, 3)
    one, other = play(*(negatives(ends[k], zs[k], bits, k) for k in (0, 1)))
    assert (one ^ other).tolist() == [int(x < 0) for x in z]


# ---------------------------------------------------------------- winners

SMALL = Widths(count=9, hess=12, node_grad=10)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(0, 2), st.integers(0, 2), st.integers(1, 300), st.data())
def test_only_candidates_that_are_allowed_and_fit_win(
    ends: Ends, nodes: int, candidates: int, before: int, after: int, step: int, data: Any
) -> None:
    """Many equal fractions, nodes where nothing fits, and entries in no group; without entries before, too."""
    seed = data.draw(st.integers(0, 1 << 32))
    rng, ridge = np.random.default_rng(seed), 2
    totals = np.tile([int(rng.integers(-40, 40)), 30, 40], (nodes, 1))
    hess = rng.integers(0, 31, (nodes, candidates))
    # few values, so that fractions are equal; and G_L of V = 0 where there is one
    grad, count = rng.integers(-2, 3, (nodes, candidates)) * hess, rng.integers(0, 41, (nodes, candidates))
    repeated = rng.integers(0, candidates, candidates)
    hess, grad = hess[:, repeated], grad[:, repeated]
    share = data.draw(st.sampled_from([0.0, 0.2, 0.9]))
    entries = before + after
    allowed = np.array(rng.random((nodes, entries + candidates)) < share, np.uint8)
    least = data.draw(st.sampled_from([0, 5, 20]))
    limits = [np.stack([np.full(nodes, least), np.full(nodes, most - least + 1)]) for most in (30, 40)]
    ours = [
        KnownEntry([(int(rng.integers(0, 4)), int(rng.integers(1, 4))) for _ in range(nodes)], [50 + k] * nodes)
        for k in range(entries)
    ]
    known = Known(totals, ridge, *limits, 9, ours[:before], ours[before:])
    expected = []
    for b in range(nodes):
        whole, found = 30 + 2 * ridge, []
        for k, of in enumerate(ours):
            found.append((*of.fractions[b], 0, of.owners[b], bool(allowed[b, k])))
        of_candidates = []
        for j in range(candidates):
            a = int(hess[b, j]) + ridge
            v = whole * int(grad[b, j]) - int(totals[b, 0]) * a
            fits = all(low <= x < high for x, (low, high) in (
                (hess[b, j], limits[0][:, b]), (count[b, j], limits[1][:, b]),
            )) and allowed[b, entries + j]  # fmt: skip
            of_candidates.append((v * v, a * (whole - a), j, 9, bool(fits)))
        best = None
        for entry in (*found[:before], *of_candidates, *found[before:]):
            if entry[4] and (best is None or entry[0] * best[1] > best[0] * entry[1]):
                best = entry
        # 0 / 1 where nothing fits; entries of no numerator are as good as it
        expected.append((0, 1, 0, 0) if best is None else best[:4])
    plain = [int(x) % (1 << 128) for x in np.stack([grad, hess, count], axis=-1).reshape(-1)]
    sums = [of.reshape(nodes, candidates, 3, 2) for of in shared(plain, 128)]
    masks = rng.integers(0, 2, allowed.shape, np.uint8)
    shares, of_ends = (masks, masks ^ allowed), (known, Known.nothing(nodes, before, after))
    found_shares = play(*(best_of_shared(ends[k], sums[k], of_ends[k], SMALL, k, step, shares[k]) for k in (0, 1)))
    for of in found_shares:  # or products with them would be wrong
        for part, bits in enumerate(SMALL.of_entry):
            assert all(int.from_bytes(row.tobytes(), "little") < 1 << bits for row in of[:, part])
    parts = (opened([x[:, part] for x in found_shares], bits) for part, bits in enumerate(SMALL.of_entry))
    entries_found = zip(*parts, strict=True)
    for got, right in zip(entries_found, expected, strict=True):
        assert got == right or (got[0] == right[0] == 0 and got[3] == 0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 30), st.integers(1, 300), st.integers(0, 1 << 32))
def test_the_first_of_equal_entries_wins(ends: Ends, nodes: int, entries: int, step: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tops, below = rng.integers(0, 3, (nodes, entries)), rng.integers(1, 3, (nodes, entries))
    plain = np.stack([tops, below, *np.broadcast_arrays(np.arange(entries), tops)[:1], tops * 0 + 7], axis=-1)
    shares = [np.zeros((nodes, entries, 4, SMALL.words), np.uint64) for _ in range(2)]
    for part, bits in enumerate(SMALL.of_entry):
        for of, given_shares in zip(shares, shared(plain[:, :, part].ravel().tolist(), bits, SMALL.words), strict=True):
            of[:, :, part] = given_shares.reshape(nodes, entries, SMALL.words)
    found = play(*(winner_of(ends[k], shares[k], SMALL, k, step) for k in (0, 1)))
    best = [min(range(entries), key=lambda j, b=b: (-tops[b, j] / below[b, j], j)) for b in range(nodes)]
    assert opened([x[:, NUMBER] for x in found], SMALL.of_entry[NUMBER]) == best


# ---------------------------------------------------------------- what each end receives

N = 4096


def received(make: Callable[[int], Steps[Any]]) -> list[tuple[Arrays, Any]]:
    """Return what each end receives at the last step, and its result; what is drawn was made before."""
    came: list[Arrays] = [[], []]

    def noting(k: int) -> Steps[Any]:
        steps, sent = make(k), None
        while True:
            try:
                sent = steps.send(came[k]) if sent else next(steps)
            except StopIteration as stop:
                return stop.value
            came[k] = yield sent

    return list(zip(came, play(noting(0), noting(1)), strict=True))


def uniform(array: np.ndarray) -> float:
    """Return the probability of half bytes as uneven as these, if all are alike probable (chi-squared)."""
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    found = np.bincount(np.concatenate([raw & 15, raw >> 4]), minlength=16)
    expected = found.sum() / 16
    assert expected > 5
    return float(chi2.sf(((found - expected) ** 2).sum() / expected, 15))


def computation(case: str, end: Transfers, own: np.ndarray, role: int) -> Steps[Any]:
    """Compute on own shares, (N, 2), that are all zeros or all ones."""
    bits = (own[:, 0] & np.uint64(1)).astype(np.uint8)
    match case:
        case "products":
            return by_transfers(end, cut(own, 57), cut(own, 60)[:, None], 57, 60, 64)
        case "products in a ring":  # of widths that are sent without zeros above
            end.rings[RingKind(64, 64, 64)].asked = 1 << 20
            return products(end, cut(own, 64), cut(own, 64)[:, None], 64, 64, 64)
        case "selected":
            return selected(end, bits, own[:, None], [128])
        case "both_of":
            return both_of(end, bits, 2, 128, role)
        case "times_known":
            known = [(1 << 38) * int(bits[0]) if role == 0 else 0] * N
            return times_known(end, known, 40, own[:, None], 128, role)
    raise AssertionError


@pytest.mark.parametrize("mine", [0, 1])
@pytest.mark.parametrize("theirs", [0, 1])
@pytest.mark.parametrize("case", ["products", "products in a ring", "selected", "both_of", "times_known"])
def test_what_an_end_receives_and_its_shares_are_uniform_whatever_the_numbers(
    ends: Ends, case: str, mine: int, theirs: int
) -> None:
    shares = [np.full((N, 2), each * (2**64 - 1), np.uint64) for each in (mine, theirs)]
    for came, result in received(lambda k: computation(case, ends[k], shares[k], k)):
        # but for how many arrays there are of each protocol of two
        arrays = [array.reshape(-1) for array in came if array.size and array.dtype != np.int64]
        assert arrays or case == "times_known"
        for array in arrays:
            assert uniform(array) > 1e-6
        # what hides a number hides no other
        same = [array for array in arrays if array.size == arrays[-1].size and array.dtype == arrays[-1].dtype]
        for one, other in pairwise(same):
            assert uniform(one - other) > 1e-6
            assert uniform(one + other) > 1e-6
        assert uniform(np.asarray(result)[..., 0]) > 1e-6


@pytest.mark.parametrize("digits", [(0, 0), (0, 7), (7, 0), (5, 5)])
def test_tables_of_digits_are_uniform_whatever_the_digits(ends: Ends, digits: tuple[int, int]) -> None:
    bits = [np.tile(np.array([of >> place & 1 for place in range(3)], np.uint8), (N, 1)) for of in digits]
    for came, result in received(lambda k: _digits(ends[k], bits[k], bits[k])):
        flips, sent = came
        table = np.pad(sent, ((0, 0), (1, 0)))  # the first entry's ciphertext is 0
        # differences from random numbers, three bits each
        assert uniform(flips) > 1e-6
        assert uniform(sent) > 1e-6
        # entries of one digit are under pads of their own: no difference of two shows what is in them
        assert all(uniform(table[:, a] ^ table[:, b]) > 1e-6 for a in range(8) for b in range(a))
        for of in result:
            for half in np.split(of, 2):  # as the receiver, and as the sender
                assert uniform(np.packbits(half)) > 1e-6


def test_an_opened_entry_shows_nothing_of_the_digits(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has results for all eight differences, each under a share of its own."""
    drawn, honest = dict[int, Drawn](), Transfers.draw_for

    def noting(end: Transfers, choices: np.ndarray) -> Steps[Drawn]:
        drawn[end.role] = yield from honest(end, choices)
        return drawn[end.role]

    monkeypatch.setattr(Transfers, "draw_for", noting)
    bits = np.zeros((N, 3), np.uint8)
    for k, ((_, sent), _) in enumerate(received(lambda k: _digits(ends[k], bits, bits))):
        table = np.pad(sent, ((0, 0), (1, 0)))
        pads = ends[k].receiver.hash.rows(joined(drawn[k].t, 3), drawn[k].first)[:, 0].astype(np.uint16)
        numbers = drawn[k].random.reshape(-1, 3) @ np.array([1, 2, 4])
        entry = table[np.arange(len(table)), numbers] ^ pads
        assert uniform(entry) > 1e-6
        results = np.stack([entry >> np.uint16(2 * place) & np.uint16(3) for place in range(8)]).astype(np.uint8)
        # two bits of each of two results make a half byte, and those of two entries a byte
        for a, b in combinations(range(8), 2):
            both = results[a] << 2 | results[b]
            assert uniform(both[::2] << 4 | both[1::2]) > 1e-6
        others = np.arange(len(table)), (numbers + 1) % 8
        assert uniform(table[others] ^ entry) > 1e-6


def test_carries_pass_words_that_are_full() -> None:
    """Random pads have such words once in 2^64."""
    rng, (n, bits, values, words) = np.random.default_rng(0), (200, 3, 2, 3)

    def full(*shape: int) -> np.ndarray:
        return rng.choice(np.array([0, 1, 2**64 - 2, 2**64 - 1], np.uint64), shape)

    def ints(array: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(array).reshape(-1, words)
        return np.array([int.from_bytes(row.tobytes(), "little") for row in rows], object)

    y, last, pads, held, other = full(n, values, words), full(n, values, words), *full(3, n * bits, values * words)
    flips = rng.integers(0, 2, n * bits, np.uint8)
    of = Correlated(Correlation(bits, values, words, 64 * words), y, last, pads, held, flips)
    flip = flips.reshape(n, bits, 1).astype(object)
    number = np.stack([ints(y).reshape(n, values)] * (bits - 1) + [ints(last).reshape(n, values)], axis=1)
    weights = np.array([1, 2, 4], object)[None, :, None]
    pad, mine = (ints(array).reshape(n, bits, values) for array in (pads, held))
    expected = (weights * (flip * (number + pad) - (1 - flip) * pad)).sum(axis=1) % (1 << 64 * words)
    of_flips = from_bits(flips.reshape(n, bits))
    assert ints(_share(of, pads, 1 - flips, of_flips, [last, y])).tolist() == expected.ravel().tolist()
    expected = (weights * (1 - 2 * flip) * mine).sum(axis=1) % (1 << 64 * words)
    assert ints(of.added_up(held, flips)).tolist() == expected.ravel().tolist()
    message, own = np.zeros_like(pads), np.zeros_like(pads)
    _correlate(pads, other, y, last, bits, own, message)
    assert np.array_equal(own, pads)
    sent = (number + pad - ints(other).reshape(n, bits, values)) % (1 << 64 * words)
    assert ints(message).tolist() == sent.ravel().tolist()
    _hold(other, flips, message, words, own)
    expected = (ints(other).reshape(n, bits, values) + flip * sent) % (1 << 64 * words)
    assert ints(own).tolist() == expected.ravel().tolist()
