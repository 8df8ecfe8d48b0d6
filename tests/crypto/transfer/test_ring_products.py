"""Products by ring-LWE: exact for all widths and the largest noise, and nothing of numbers in what an end receives."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from crypto.sealed.test_sealed import opened, play, shared
from treaty.crypto.keystream import Keystream
from treaty.crypto.parameters import DEGREE, LIMITS
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.transfer import ring_products, shared_products
from treaty.crypto.transfer.ring_products import (
    KEPT,
    Giver,
    Holder,
    Plan,
    Residues,
    Ring,
    RingKind,
    RingLayout,
    plan_of,
)
from treaty.crypto.transfer.shared_products import _apart, crossed, draw_products, make, products, squares
from treaty.crypto.transfer.stock import Arrays, Steps, Transfers, open_transfers, together
from treaty.errors import CryptoError

Ends = tuple[Transfers, Transfers]
KIND = RingKind(57, 121, 177)
# few kinds, each of which has keys of its own
KINDS = [(1, 1, 1), (2, 3, 5), (30, 31, 57), KIND, (57, 121, 178), (64, 64, 128), (65, 63, 60), (190, 150, 300)]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


@pytest.fixture
def in_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_products, "pays", lambda *_: True)


def numbers(data: Any, count: int, least: int, most: int) -> list[int]:
    near = [x for x in (least, least + 1, -1, 0, 1, most - 1, most) if least <= x <= most]
    return [data.draw(st.sampled_from(near) | st.integers(least, most)) for _ in range(count)]


# ---------------------------------------------------------------- exact


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1), st.data())
def test_shared_products_are_exact(
    ends: Ends, kind: tuple[int, int, int], n: int, values: int, more_words: int, data: Any
) -> None:
    x_bits, y_bits, bits = kind
    words = -(-max(kind) // 64) + more_words
    x = numbers(data, n, 0, (1 << x_bits - 1) - 1)
    y = numbers(data, n * values, 0, (1 << y_bits - 1) - 1)
    xs, ys = shared(x, x_bits, words), [of.reshape(n, values, words) for of in shared(y, y_bits, words)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_products, "pays", lambda *_: True)
        found = play(*(products(ends[k], xs[k], ys[k], x_bits, y_bits, bits) for k in (0, 1)))
    assert opened(found, bits) == [x[k // values] * b % (1 << bits) for k, b in enumerate(y)]
    assert all(value < 1 << bits for of in found for value in from_words(of.reshape(-1, words)))


@pytest.mark.parametrize("u_bits", [3, 62, 65])
def test_squares_are_exact(ends: Ends, in_ring: None, u_bits: int) -> None:
    bits, most = 2 * u_bits - 3, (1 << u_bits - 2) - 1
    u, words = [-most, -1, 0, 1, most], max(1, -(-bits // 64), -(-u_bits // 64))
    us = shared([a % (1 << u_bits) for a in u], u_bits, words)
    assert opened(play(*(squares(ends[k], us[k], u_bits, bits, k) for k in (0, 1))), bits) == [a * a for a in u]


@pytest.mark.parametrize("late", [(0, 1), (1, 0), (0, 0)])
def test_protocols_that_run_together_share_the_keys_of_a_kind(in_ring: None, late: tuple[int, int]) -> None:
    """Whichever makes products first, also if the other begins before these are made."""
    ends, kind, x, y = play(open_transfers(0), open_transfers(1)), (5, 6, 11), [3, 15, 0], [31, 1, 17]
    xs, ys = shared(x, 5), [of[:, None] for of in shared(y, 6)]

    def after(k: int, steps: int) -> Steps[Any]:
        for _ in range(steps):
            yield []
        return (yield from products(ends[k], xs[k], ys[k], *kind))

    found = play(*(together(*(after(k, steps) for steps in late)) for k in (0, 1)))
    for of_both in zip(*found, strict=True):
        assert opened(list(of_both), 11) == [a * b for a, b in zip(x, y, strict=True)]


def one_way(kind: RingKind, seed: bytes = bytes(32)) -> tuple[Plan, list[Holder], list[Giver]]:
    plan = plan_of(kind)
    holders = [Holder(ring, seed) for ring in plan.rings]
    return plan, holders, [Giver(of.ring, seed, of.encrypt(0)) for of in holders]


def through(kind: RingKind, x: int, y: int, mask: int) -> int:
    """Return what a holder opens in a slot where all have these numbers; masks modulo the bound."""
    plan, holders, givers = one_way(kind)

    def in_slots(number: int, bits: int) -> np.ndarray:
        return np.tile(to_words([number], -(-bits // 64)), (DEGREE, 1))

    held = plan.residues(in_slots(x, kind.x_bits), held=True)
    ys, masks = plan.residues(in_slots(y, kind.y_bits), given=True), plan.residues(in_slots(mask % plan.bound, 512))
    answers = [
        giver.answer(1, of.encrypt(1, held[k]), ys[k], masks[k])
        for k, (of, giver) in enumerate(zip(holders, givers, strict=True))
    ]
    found = set(from_words(plan.opened([of.open(answer) for of, answer in zip(holders, answers, strict=True)])))
    (result,) = found
    return result


@pytest.mark.parametrize("kind", [KIND, RingKind(2, 3, 5), RingKind(100, 3, 103)])
@pytest.mark.parametrize("size", [1, -1])
def test_the_largest_noise_spoils_nothing(monkeypatch: pytest.MonkeyPatch, kind: RingKind, size: int) -> None:
    """All errors, secrets and floods are the largest, of one sign or the other, and masks are."""
    monkeypatch.setattr(ring_products, "errors", lambda _, n: np.full(n, 21 * size, np.int8))
    monkeypatch.setattr(ring_products, "ternary", lambda _, n: np.full(n, size, np.int8))
    flood = (lambda bits: (1 << bits) - 1) if size > 0 else lambda _: 0
    monkeypatch.setattr(
        Keystream, "bits", lambda _, bits, rows: np.tile(to_words([flood(bits)], -(-bits // 64)), (rows, 1))
    )
    bound, modulus = plan_of(kind).bound, 1 << 64 * plan_of(kind).words
    for x, y, mask in ((1, 1, 0), ((1 << kind.x_bits) - 1, (1 << kind.y_bits) - 1, bound - 1)):
        assert through(kind, x, y, mask) == (x * y + mask) % modulus


def test_more_noise_than_is_allowed_spoils_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ring_products.flood_bits
    monkeypatch.setattr(ring_products, "flood_bits", lambda *of: honest(*of) + 2)
    with pytest.raises(ValueError, match="too many values"):
        through(RingKind(2, 4, 6), 3, 5, 77)


# ---------------------------------------------------------------- parameters


def test_parameters_keep_128_bits_and_hide() -> None:
    for total in range(2, 400):
        x_bits = total // 2
        plan = Plan(RingKind(x_bits, total - x_bits, total))
        plain = [t for ring in plan.rings for t in ring.plain]
        assert len(set(plain)) == len(plain)
        assert plan.bound >= 1 << total + 69
        assert plan.bound + (1 << total) < 7 * math.prod(plain) // 8
        for ring in plan.rings:
            assert math.prod(ring.primes).bit_length() <= LIMITS[DEGREE]
            t, f = math.prod(ring.plain), ring.flood_bits
            # E |e Y| / 2^F, where e has 21 / 2 as variance and Y^2 7/6 t^2 on average
            assert (DEGREE * 10.5 * 7 / 6) ** 0.5 * t / 2.0**f <= 2.0**-72
            # flood, the largest noise and rounding stay below a half of what a unit is held as
            assert 2 ** (f - 1) + 21 * DEGREE * (2 * t + 2) + ring.scale * 4100 // KEPT < ring.scale // 2


@pytest.mark.parametrize(
    ("plain", "others", "message"),
    [
        ((2147352577, 2147205121), (2147074049, 2146959361, 2146713601, 2146418689), None),
        ((2147352577, 2147205121), (2147074049, 2146959361, 2146713601, 2146418689, 2146041857), "below 128 bits"),
        ((2147352577, 2147205121), (2147352577, 2146959361, 2146713601, 2146418689), "repeated"),
        ((2147352577, 2147205121), (2147074051, 2146959361, 2146713601, 2146418689), "expected primes"),
        ((2147352577, 2147205121), (2147074049, 2146959361, 2146713601), "hides too little"),
    ],
)
def test_unfit_rings_are_refused(plain: tuple[int, int], others: tuple[int, ...], message: str | None) -> None:
    if message is None:
        Ring(plain, others)
        return
    with pytest.raises(CryptoError, match=message):
        Ring(plain, others)


# ---------------------------------------------------------------- what an end receives


def uniform(parts: np.ndarray, bound: int, buckets: int = 16) -> float:
    """Return the probability of numbers below a bound as uneven as these, if all are alike probable."""
    found = np.bincount((parts.reshape(-1).astype(np.uint64) * np.uint64(buckets) // np.uint64(bound)).astype(int))
    expected = parts.size / buckets
    return float(chi2.sf(((np.pad(found, (0, buckets - len(found))) - expected) ** 2).sum() / expected, buckets - 1))


class View:
    """What a holder has of an answer to its own numbers 0: the noise, and c1 less a y, for the giver's true y."""

    def __init__(self, y: int = 3, mask: int = 0) -> None:
        plan, holders, givers = one_way(RingKind(2, 3, 5))
        self.ring, holder, giver = plan.rings[0], holders[0], givers[0]
        ys = plan.residues(np.full((DEGREE, 1), y, np.uint64), given=True)[0]
        masks = plan.residues(np.full((DEGREE, 1), mask, np.uint64))[0]
        self.c = holder.encrypt(1, np.zeros((2, DEGREE), np.uint32))
        self.answer = giver.answer(1, self.c, ys, masks)
        a = ring_products.public_ring_elements(bytes(32), 1, self.ring.primes, DEGREE)
        product = np.zeros_like(a)
        for k, (of, lifted) in enumerate(zip(self.ring.factors, giver._lifted(ys), strict=True)):
            of.back(of.add_product(a[k], lifted, product[k]))
        for left in range(7, 3, -1):
            ring_products._divide(product, self.ring.factors[:left])
        first, third = self.ring.factors[0], self.ring.factors[2]
        self.apart = first.sum_of(np.stack([self.answer[1, 0], product[0]]), [1, -1])
        shares = third.add_product(third.forward(self.answer[1, 2].copy()), holder._secret[2], ring_products._zeros())
        noise = third.sum_of(np.stack([self.answer[0, 2], third.back(shares)]), [1, -third.of_degree]).astype(np.int64)
        self.noise = np.where(noise > KEPT // 2, noise - KEPT, noise)

    def hides_y(self) -> bool:
        """Whether c1 is not about a y."""
        return uniform(self.apart, self.ring.primes[0]) > 1e-6

    def hides_noise(self) -> bool:
        """Whether the noise is as even as the flood is, but for what rounding adds at its edges."""
        width = (KEPT << self.ring.flood_bits) // self.ring.scale
        parts = self.noise + width // 2
        return uniform(np.clip(parts, 0, width - 1), width, 8) > 1e-6

    def is_uniform(self) -> bool:
        rows = [*zip(self.c, self.ring.primes, strict=True)]
        for element in self.answer:
            rows += zip(element, self.ring.primes[:3], strict=True)
        return all(uniform(row, prime) > 1e-6 for row, prime in rows)


@pytest.mark.parametrize(("y", "mask"), [(0, 0), (7, 0), (3, 1)])
def test_an_answer_shows_nothing_but_its_number(y: int, mask: int) -> None:
    view = View(y, mask)
    assert view.hides_y()
    assert view.hides_noise()
    assert view.is_uniform()


def test_an_answer_without_an_encryption_of_zero_shows_y(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ring_products.ternary

    def of_answers_zeros(draw: Callable[[int], bytes], count: int) -> np.ndarray:
        caller = draw.__self__  # type: ignore[attr-defined]
        return np.zeros(count, np.int8) if getattr(caller, "answers", False) else honest(draw, count)

    monkeypatch.setattr(ring_products, "ternary", of_answers_zeros)
    monkeypatch.setattr(Giver, "answer", marked(Giver.answer))
    assert not View().hides_y()


def marked(answer: Callable[..., Residues]) -> Callable[..., Residues]:
    """Mark the stream of an answer, by which its v is drawn."""

    class Marked(Keystream):
        answers = True

    def marking(*given: Any) -> Residues:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ring_products, "Keystream", Marked)
            return answer(*given)

    return marking


def test_an_answer_without_a_flood_shows_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    middle = lambda _, bits, rows: np.tile(to_words([1 << bits - 1], -(-bits // 64)), (rows, 1))  # noqa: E731
    monkeypatch.setattr(Keystream, "bits", middle)
    assert not View().hides_noise()


N = 4096


def received(ends: Ends, kind: RingKind, x: np.ndarray, y: np.ndarray) -> list[Arrays]:
    """Return what each end receives in the step that uses products."""
    came: list[Arrays] = [[], []]

    def using(k: int) -> Steps[Any]:
        of = yield from draw_products(ends[k], kind, len(x))
        (d, _), (e, wrapped) = (_apart(*each) for each in ((x, of.r, kind.x_bits), (y, of.y, kind.y_bits)))
        steps = crossed(of, y, d, e, wrapped, kind)
        came[k] = yield next(steps)
        with pytest.raises(StopIteration):
            steps.send(came[k])

    play(using(0), using(1))
    return came


@pytest.mark.parametrize("ones", [0, 1])
def test_differences_are_uniform_whatever_the_numbers(ends: Ends, ones: int) -> None:
    x, y = (np.full((N, words), ones * ((1 << 64) - 1), np.uint64) for words in (1, 2))
    for d, e in received(ends, RingKind(64, 128, 190), x, y):
        assert (d.shape, e.shape) == ((N, 8), (N, 16))
        # what hides x hides no y
        for each in (d, e, d - e[:, :8], d + e[:, 8:]):
            assert uniform(each, 256) > 1e-6


def test_no_number_and_no_public_element_serves_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert used_once(monkeypatch)


@pytest.mark.parametrize("fault", ["r", "seed", "number"])
def test_what_serves_twice_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "r":
        honest = shared_products.RingProducts
        monkeypatch.setattr(
            shared_products, "RingProducts",
            lambda r, y, *shares: honest(np.concatenate([r[: DEGREE // 2]] * (2 * len(r) // DEGREE)), y, *shares),
        )  # fmt: skip
    elif fault == "seed":
        monkeypatch.setattr(shared_products, "_seed", lambda *_: bytes(32))
    else:
        encrypt = Holder.encrypt
        monkeypatch.setattr(Holder, "encrypt", lambda of, number, plain=None: encrypt(of, min(number, 1), plain))
    assert not used_once(monkeypatch)


def used_once(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make products three times; tell whether no r, no y' and no public element of a holder comes again."""
    elements, kind, honest = list[tuple[bytes, int]](), RingKind(60, 61, 64), ring_products.public_ring_elements

    def noting(seed: bytes, number: int, *given: Any) -> Residues:
        if sys._getframe(1).f_code.co_qualname == "Holder.encrypt":  # givers expand the same
            elements.append((seed, number))
        return honest(seed, number, *given)

    monkeypatch.setattr(ring_products, "public_ring_elements", noting)
    ends = play(open_transfers(0), open_transfers(1))
    for count in (1, 2, 1):
        play(*(make(end, kind, count * DEGREE) for end in ends))
    made = [end.rings[kind].stock.draw(4 * DEGREE) for end in ends]
    drawn = [getattr(part, name) for of in made for part in of for name in ("r", "y")]
    values = np.concatenate([of[:, 0] for of in drawn])
    assert len(elements) == 2 * (1 + 4) * len(plan_of(kind).rings)
    # of 2^16 numbers of 60 bits, two are alike once in 2^29
    return len(set(elements)) == len(elements) and len(np.unique(values)) == len(values)


# ---------------------------------------------------------------- faults of the other end


def with_messages(change: Callable[[int, Arrays], Arrays]) -> None:
    ends = play(open_transfers(0), open_transfers(1))

    def changed(k: int) -> Steps[None]:
        steps = make(ends[k], RingKind(2, 3, 5), DEGREE)
        sent, number = next(steps), 0
        while True:
            came = yield change(number, sent) if k else sent
            number += 1
            try:
                sent = steps.send(came)
            except StopIteration:
                return

    play(changed(0), changed(1))


@pytest.mark.parametrize("step", [0, 1])
def test_residues_beyond_their_primes_are_refused(step: int) -> None:
    full = lambda sent: [np.full_like(each, 2**32 - 1) for each in sent]  # noqa: E731
    with pytest.raises(CryptoError, match="below their primes"):
        with_messages(lambda number, sent: full(sent) if number == step else sent)


@pytest.mark.parametrize("step", [0, 1])
def test_messages_of_another_shape_are_refused(step: int) -> None:
    with pytest.raises(CryptoError, match="expected arrays"):
        with_messages(lambda number, sent: [each[:, :-1] for each in sent] if number == step else sent)


def test_after_too_many_products_transfers_are_taken_again(monkeypatch: pytest.MonkeyPatch, ends: Ends) -> None:
    end = dataclasses.replace(ends[0].rings[KIND], asked=1 << 20)
    monkeypatch.setitem(ends[0].rings, KIND, end)
    assert shared_products.pays(ends[0], KIND, 1)
    end.made = shared_products.MOST
    assert not shared_products.pays(ends[0], KIND, 1)


def test_few_products_are_made_of_transfers() -> None:
    ends = play(open_transfers(0), open_transfers(1))
    assert not shared_products.pays(ends[0], KIND, 1000)
    assert shared_products.pays(ends[0], KIND, 500)


def test_residues_are_packed_by_their_widths() -> None:
    layout = RingLayout((65537, KEPT), [17, 20])
    with pytest.raises(CryptoError, match="expected words"):
        layout.unpacked(np.zeros((1, DEGREE * 37 // 32 - 1), np.uint32))
    assert layout.unpacked(np.zeros((2, DEGREE * 37 // 32), np.uint32)).shape == (2, 2, DEGREE)
