"""Halves of columns with many categories: their shared sums and members are the plain ones, and one alone is opened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from crypto.sealed.test_sealed import opened, play, shared
from treaty.crypto.payload import SumsBounds
from treaty.crypto.transfer import category_sets
from treaty.crypto.transfer.category_sets import half_that_won, halves_of
from treaty.crypto.transfer.comparison import comparison_steps
from treaty.crypto.transfer.sealed_sums import Known, Widths
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers
from treaty.errors import CryptoError

Ends = tuple[Transfers, Transfers]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


def node_sums(rng: np.random.Generator, shape: tuple[int, int], bounds: SumsBounds, *, tied: bool) -> np.ndarray:
    """Draw sums of categories, (nodes, categories, 3), in a node of at most `bounds.n_rows` rows."""
    count = rng.integers(0, bounds.n_rows // shape[1] + 1, shape)
    hess = rng.integers(0, count * bounds.hess_bound + 1)
    grad = rng.integers(-count * bounds.grad_bound, count * bounds.grad_bound + 1)
    if tied:  # all just at the mean, which is 0
        grad[:] = 0
    return np.stack([grad, hess, count], axis=2)


def members_of(sums: np.ndarray, totals: np.ndarray, ridge: int, fewest: int) -> np.ndarray:
    """Return which categories are in each half, bool (nodes, 2, categories), in whole numbers."""
    above = np.array([
        [(int(total[1]) + 2 * ridge) * int(grad) > int(total[0]) * int(hess) for grad, hess, _ in of]
        for of, total in zip(sums, totals, strict=True)
    ])  # fmt: skip
    enough = sums[:, :, 2] >= fewest
    return np.stack([above & enough, ~above & enough], axis=1)


def play_halves(ends: Ends, sums: np.ndarray, totals: np.ndarray, starts: Any, fewest: int, widths: Widths) -> Any:
    nodes, zeros = len(sums), np.zeros((2, len(sums)), np.int64)
    knows = Known(totals, 3, zeros, zeros, 9, fewest_of_category=fewest)
    slots = [of.reshape(*sums.shape, 2) for of in shared([int(x) % (1 << 128) for x in sums.reshape(-1)], 128)]
    given = [knows, Known.nothing(nodes, 0, 0)]
    return play(*(halves_of(ends[k], slots[k], np.array(starts), given[k], widths, k) for k in (0, 1)))


@given(
    seed=st.integers(0, 2**32 - 1),
    starts=st.sampled_from([[0], [0, 1], [0, 3, 8]]),
    bounds=st.sampled_from([SumsBounds(200, 4, 3), SumsBounds(50_000, 1 << 16, 1 << 14), SumsBounds(9, 1 << 20, 1)]),
    tied=st.booleans(),
)
def test_halves_are_those_of_plain_sums(ends: Ends, seed: int, starts: list[int], bounds: SumsBounds, tied: bool):
    rng = np.random.default_rng(seed)
    sums = node_sums(rng, (int(rng.integers(1, 4)), 12), bounds, tied=tied)
    totals, fewest = sums[:, starts[-1] :].sum(axis=1), int(rng.integers(1, 2 + bounds.n_rows // 24))
    widths = Widths.of(bounds, 3)
    found = play_halves(ends, sums, totals, starts, fewest, widths)
    members = members_of(sums, totals, 3, fewest)
    np.testing.assert_array_equal(found[0].members ^ found[1].members, members)
    of_columns = [np.einsum("nhk,nkp->nhp", members[:, :, a:b], sums[:, a:b])
                  for a, b in zip(starts, [*starts[1:], 12], strict=True)]  # fmt: skip
    assert_sums(found, np.stack(of_columns, axis=1), widths)


def assert_sums(found: Any, expected: np.ndarray, widths: Widths) -> None:
    # shares are modulo what V, and a count of rows, need
    for part, bits in enumerate((widths.grad, widths.grad, widths.count)):
        plain = [int(x) % (1 << bits) for x in expected[..., part].reshape(-1)]
        assert opened([end.sums[..., part, :].reshape(-1, 2) for end in found], bits) == plain


def test_widths_of_two_words_are_summed_whole(ends: Ends) -> None:
    bounds = SumsBounds(1 << 20, 1 << 20, 1 << 18)
    widths = Widths.of(bounds, 3)
    assert widths.grad > 64
    sums = np.array([[[1 << 39, 5, 9], [-(1 << 39), 1 << 37, 9], [-7, 1 << 36, 1]]])
    found = play_halves(ends, sums, sums.sum(axis=1), [0], 2, widths)
    np.testing.assert_array_equal(found[0].members ^ found[1].members, [[[1, 0, 0], [0, 1, 0]]])
    assert_sums(found, sums[0, :2], widths)


@pytest.mark.parametrize("starts", [[0], [0, 4], [0, 1, 5]])
def test_the_owner_gets_the_half_that_it_picks_and_the_knower_nothing(ends: Ends, starts: list[int]) -> None:
    rng, categories = np.random.default_rng(1), 150
    picks = np.arange(-1, 2 * len(starts))
    members = rng.integers(0, 2, (2, len(picks), 2, categories), np.uint8)
    mine, found = play(*(half_that_won(ends[k], members[k], np.array(starts), picks, k) for k in (0, 1)))
    assert not mine.any()
    assert not found[0].any()  # no half
    for row, pick in enumerate(picks[1:].tolist(), 1):
        start, stop = starts[pick // 2], [*starts[1:], categories][pick // 2]
        plain = members[0, row, pick % 2, start:stop] ^ members[1, row, pick % 2, start:stop]
        np.testing.assert_array_equal(found[row, : stop - start], plain)
        assert not found[row, stop - start :].any()


def test_halves_take_seven_steps_and_a_half_that_won_two(ends: Ends) -> None:
    """As docs/sealed.md and estimates (`cipher_choice.cost_of_sealing`) have it, where transfers are in stock."""
    for end in ends:
        end.rows.few = 1 << 16
    bounds, zeros, starts = SumsBounds(20_000, 1 << 16, 1 << 14), np.zeros((2, 2), np.int64), np.array([0, 5])
    widths, members = Widths.of(bounds, 3), np.zeros((2, 2, 12), np.uint8)
    known = [Known(np.ones((2, 3), np.int64), 3, zeros, zeros, 9), Known.nothing(2, 0, 0)]

    def counted(steps: Steps[Any]) -> Steps[int]:
        count, came = 0, None
        while True:
            try:
                came = yield next(steps) if came is None else steps.send(came)
            except StopIteration:
                return count
            count += 1

    def played() -> tuple[list[int], list[int]]:
        slots = np.zeros((2, 12, 3, 2), np.uint64)
        halves = play(*(counted(halves_of(ends[k], slots, starts, known[k], widths, k)) for k in (0, 1)))
        return halves, play(*(counted(half_that_won(ends[k], members, starts, zeros[0], k)) for k in (0, 1)))

    played()  # fills the stocks
    assert played() == ((7, 7), (2, 2))
    assert 3 + comparison_steps(widths.grad) == 7


def unlikely(bits: np.ndarray) -> bool:
    """Whether bits are not ones and zeros alike, as one set of uniform ones in a million is not."""
    count = np.bincount(bits.reshape(-1), minlength=2)
    return bool(chi2.sf(((count - count.sum() / 2) ** 2).sum() / (count.sum() / 2), 1) < 1e-6)


def messages_of(ends: Ends, members: np.ndarray, picks: np.ndarray) -> list[list[np.ndarray]]:
    """Return what the knower and the owner send."""
    steps = [half_that_won(ends[k], members[k], np.array([0, 64, 128]), picks, k) for k in (0, 1)]
    sent: list[list[np.ndarray]] = [[], []]
    given: list[Any] = [None, None]
    while True:
        try:
            now = [steps[k].send(given[k]) for k in (0, 1)]
        except StopIteration:
            return sent
        for k in (0, 1):
            sent[k] += now[k]
        given = now[::-1]


def test_offered_halves_are_uniform_to_who_did_not_pick_them_and_picks_to_the_knower(ends: Ends) -> None:
    nodes = 300
    members, found = np.zeros((2, nodes, 2, 192), np.uint8), []
    for pick in (-1, 0, 5):
        by_knower, by_owner = messages_of(ends, members, np.full(nodes, pick))
        (hidden,) = [of for of in by_knower if of.shape == (nodes, 7, 1)]
        assert not unlikely(np.unpackbits(hidden.view(np.uint8)))
        assert len(np.unique(hidden)) == hidden.size  # no pad twice
        flips = np.unpackbits(by_owner[-1].view(np.uint8), bitorder="little")[: 3 * nodes]
        assert not unlikely(flips)
        # without what fills up the stock of transfers, which comes when earlier tests have used it up
        found.append([(of.dtype, of.shape) for of in by_owner if of.ndim == 1])
    assert found[0] == found[1] == found[2]
    (spread,) = [of for of in messages_of(ends, members + 1, np.zeros(nodes, np.int64))[0] if of.ndim == 3]
    assert not unlikely(np.unpackbits(spread.view(np.uint8)))


@pytest.mark.parametrize("what", ["a mask", "a constant bit"])
def test_a_wrong_mask_or_a_constant_bit_shows(monkeypatch: pytest.MonkeyPatch, ends: Ends, what: str) -> None:
    """The tests above would see them."""
    if what == "a mask":
        # one mask for several halves: an owner opens more than it picks
        monkeypatch.setattr(category_sets, "joined", lambda rows, count: rows[::count].copy())
        with pytest.raises(AssertionError):
            test_offered_halves_are_uniform_to_who_did_not_pick_them_and_picks_to_the_knower(ends)
        return
    honest = category_sets.negatives

    def constant(transfers: Transfers, z: Any, bits: int, role: int) -> Any:
        return (yield from honest(transfers, z, bits, role)) & np.uint8(0)

    monkeypatch.setattr(category_sets, "negatives", constant)
    with pytest.raises(AssertionError):
        test_widths_of_two_words_are_summed_whole(ends)


def test_offers_of_another_shape_are_refused(ends: Ends) -> None:
    # so that no step makes transfers, whichever tests were played before
    play(*(end.reserve(1 << 10) for end in ends))
    members = np.zeros((2, 3, 2, 5), np.uint8)
    steps = half_that_won(ends[1], members[1], np.array([0]), np.zeros(3, np.int64), 1)
    other = half_that_won(ends[0], members[0], np.array([0]), np.zeros(3, np.int64), 0)
    sent = [next(other), next(steps)]
    steps.send(sent[0])
    with pytest.raises(CryptoError, match="expected arrays"):
        steps.send([np.zeros((3, 3, 2), np.uint64)])
    other.send(sent[1])
    with pytest.raises(StopIteration):
        other.send([])
