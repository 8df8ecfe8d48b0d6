"""Stocks made ahead while steps are on their way: both ends draw the same, nothing twice, and faults are refused."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crypto.sealed.test_sealed import opened, play, shared
from crypto.sealed.used import Used, use_all
from treaty.crypto.parameters import DEGREE
from treaty.crypto.transfer import ahead as ahead_module
from treaty.crypto.transfer import arithmetic, correlations, shared_products
from treaty.crypto.transfer.ahead import Ahead
from treaty.crypto.transfer.arithmetic import both_of, selected, times_known
from treaty.crypto.transfer.category_sets import half_that_won
from treaty.crypto.transfer.comparison import negatives
from treaty.crypto.transfer.correlations import draw, make
from treaty.crypto.transfer.ring_products import RingKind, plan_of
from treaty.crypto.transfer.shared_products import products, squares
from treaty.crypto.transfer.stock import Correlation, Paths, Steps, Transfers, open_transfers, together
from treaty.errors import CryptoError
from treaty.systems.vertical.sealed import take_rest, take_steps


class Wire:
    """What parties send to each other, in order, by sender and receiver."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], Queue[Any]] = defaultdict(Queue)

    def party(self, name: str) -> FakeParty:
        return FakeParty(self, name)


class FakeParty:
    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self.name = wire, name

    def send(self, to: str, message: Any) -> None:
        self._wire.queues[self.name, to].put(message)

    def receive(self, peer: str, kind: type) -> Any:
        message = self._wire.queues[peer, self.name].get(timeout=60)
        assert isinstance(message, kind)
        return message


def at_once(*roles: Callable[[], Any]) -> list[Any]:
    """Run functions in threads of their own; return their results, or raise the first one's error."""
    results: list[Any] = [None] * len(roles)
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            results[k] = roles[k]()
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(k,)) for k in range(len(roles))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Pair:
    """The ends of an active party and one passive party, `name`, on a wire, with stocks made ahead."""

    def __init__(self, wire: Wire, name: str) -> None:
        self.name, self.parties = name, (wire.party("active"), wire.party(name))
        self.ends: tuple[Transfers, Transfers] = play(open_transfers(0), open_transfers(1))
        self.ahead = [Ahead(end) for end in self.ends]

    def both(self, make: Callable[[int, Transfers], Steps[Any]], *, rest: bool = True) -> list[Any]:
        """Take the steps of both ends as parties do."""

        def one(k: int) -> Any:
            party, peer = self.parties[k], (self.name, "active")[k]
            found = take_steps(party, {peer: make(k, self.ends[k])}, {peer: self.ahead[k]})[peer]
            if rest:
                take_rest(party, {peer: self.ahead[k]})
            return found

        return at_once(lambda: one(0), lambda: one(1))

    def begin_tree(self, nbytes: int) -> None:
        for each in self.ahead:
            each.nbytes = nbytes
            each.begin_tree()


def multiply(pair: Pair, n: int) -> None:
    x, y = ([random.randrange(1 << bits) for _ in range(n)] for bits in (56, 64))
    xs, ys = shared(x, 57), shared(y, 65)
    found = pair.both(lambda k, end: products(end, xs[k], ys[k][:, None], 57, 65, 121))
    assert opened(found, 121) == [a * b % (1 << 121) for a, b in zip(x, y, strict=True)]


IN_RING = RingKind(57, 65, 121)


def multiply_in_ring(pair: Pair, n: int) -> None:
    for end in pair.ends:
        end.rings[IN_RING].asked = 1 << 20
    multiply(pair, n)
    assert pair.ends[0].rings[IN_RING].made == pair.ends[1].rings[IN_RING].made


def square(pair: Pair, n: int) -> None:
    u = [random.randrange(1 - (1 << 32), 1 << 32) for _ in range(n)]
    us = shared([a % (1 << 34) for a in u], 34)
    assert opened(pair.both(lambda k, end: squares(end, us[k], 34, 65, k)), 65) == [a * a for a in u]


def compare(pair: Pair, n: int) -> None:
    z = [random.randrange(-(1 << 70), 1 << 70) for _ in range(n)]
    zs = shared([x % (1 << 71) for x in z], 71)
    one, other = pair.both(lambda k, end: negatives(end, zs[k], 71, k))
    assert (one ^ other).tolist() == [int(x < 0) for x in z]


def select(pair: Pair, n: int) -> None:
    values, bits = [random.randrange(1 << 128) for _ in range(n)], np.random.default_rng().integers(0, 2, (2, n))
    vs, bits = shared(values, 128), bits.astype(np.uint8)
    found = pair.both(lambda k, end: selected(end, bits[k], vs[k][:, None], [128]))
    assert opened(found, 128) == [v * int(b) for v, b in zip(values, bits[0] ^ bits[1], strict=True)]


def compare_and_multiply(pair: Pair, n: int) -> None:
    """Draw on the same stocks in two protocols that run together."""
    bits, known = np.random.default_rng().integers(0, 2, (2, n), np.uint8), [random.randrange(-99, 99)] * n
    y = [random.randrange(1 << 128) for _ in range(n)]
    ys, given = shared(y, 128), (known, [0] * n)

    def each(k: int, end: Transfers) -> Steps[list[Any]]:
        parts = (both_of(end, bits[k], 2, 128, k) for _ in range(2))
        return (yield from together(*parts, times_known(end, given[k], 8, ys[k][:, None], 128, k)))

    found = pair.both(each)
    for part in (0, 1):
        assert opened([of[part] for of in found], 128) == (bits[0] & bits[1]).tolist()
    assert opened([of[2] for of in found], 128) == [known[0] * a % (1 << 128) for a in y]


def open_half(pair: Pair, n: int) -> None:
    members, starts = np.random.default_rng().integers(0, 2, (2, n, 2, 5), np.uint8), np.array([0, 3])
    picks = np.arange(n) % 5 - 1
    found = pair.both(lambda k, end: half_that_won(end, members[k], starts, picks * k - (1 - k), k))[1]
    of = members[0] ^ members[1]
    halves = [np.zeros(3), of[:, 0, :3], of[:, 1, :3], of[:, 0, 3:], of[:, 1, 3:]]
    for node, pick in enumerate(picks):
        expected = np.zeros(3) if pick < 0 else np.pad(halves[pick + 1][node], (0, 3))[:3]
        assert found[node].tolist() == expected.tolist()


def choose_paths(pair: Pair, n: int) -> None:
    """Read a level's sides, without a step, between those of other computations."""
    turns, paths = np.random.default_rng().integers(0, 2, n, np.uint8), [Paths(end, n) for end in pair.ends]
    paths[1].accept(*paths[0].choose(turns, slice(0, n)), slice(0, n))
    firsts = []
    for path in paths:
        path.levels += 1
        firsts.append(path.next_level())
    assert firsts[0] == firsts[1]
    sides = np.random.default_rng().integers(0, 2, (2, n), np.uint8)
    packed = paths[1].hide(np.packbits(sides, axis=1), np.array([[0], [1]], np.uint8), firsts[1], slice(0, n))
    read = np.unpackbits(packed, axis=1, count=n)[turns, np.arange(n)] ^ paths[0].own_pads(firsts[0])
    assert read.tolist() == sides[turns, np.arange(n)].tolist()


COMPUTATIONS = [multiply, square, compare, select, compare_and_multiply, open_half, choose_paths, multiply_in_ring]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    return Used(monkeypatch)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(COMPUTATIONS), st.integers(1, 40), st.booleans()), max_size=5),
        min_size=2,
        max_size=4,
    ),
    st.sampled_from([0, 100, 3000, 1 << 22]),
    st.sampled_from([1, 1 << 15]),
)
def test_any_sequence_gives_right_results_and_uses_nothing_twice(
    used: Used, trees: list[list[tuple[Any, int, bool]]], nbytes: int, few: int
) -> None:
    """Trees alike, unlike and empty ones; stocks that last, that end in the middle of a tree, or at each step."""
    used.clear()
    pair = Pair(Wire(), "p1")
    for end in pair.ends:
        end.rows.few = end.rows.many = few
    for tree in trees:
        pair.begin_tree(nbytes)
        for computation, n, stop in tree:
            computation(pair, n)
            if stop:
                for each in pair.ahead:
                    each.nbytes = nbytes - each.nbytes
    assert pair.ends[0].used == pair.ends[1].used
    for end in pair.ends:
        use_all(end)
    used.assert_nothing_twice()
    for queue in pair.parties[0]._wire.queues.values():
        assert queue.empty()


def test_what_is_made_ahead_does_not_disturb_steps_that_fill_stocks() -> None:
    """Messages for later steps are taken after the next step, whatever that needs."""
    pair = Pair(Wire(), "p1")
    for end in pair.ends:
        end.rows.few = end.rows.many = 1
    for _ in range(3):
        pair.begin_tree(2000)
        for n in (5, 300, 20):
            multiply(pair, n)
            compare(pair, n)


def test_a_stock_is_filled_with_twice_as_many_each_time_or_with_what_is_missing() -> None:
    ends, made = play(open_transfers(0), open_transfers(1)), []
    for end in ends:
        end.rows.few, end.rows.many = 512, 1024
    for wanted in (0, 0, 0, 9):
        for end in ends:
            end.rows.wanted = wanted
        play(*(end.reserve(2) for end in ends))
        made.append(ends[0].rows.left)
        for end in ends:
            end.rows.drop(end.rows.left - 1)
    assert made == [512, 1 + 1024, 1 + 1024, 1 + 512]


def test_without_bytes_to_send_ahead_stocks_are_filled_as_at_first() -> None:
    pair = Pair(Wire(), "p1")
    for _ in range(2):
        pair.begin_tree(0)
        multiply(pair, 5)
        assert {stock.wanted for each in pair.ahead for stock, *_ in each._stocks()} == {0}


@pytest.mark.parametrize("rows", [1, 200])
def test_products_made_in_pieces_use_no_tweak_twice(monkeypatch: pytest.MonkeyPatch, used: Used, rows: int) -> None:
    monkeypatch.setattr(correlations, "_AT_ONCE", rows)
    pair = Pair(Wire(), "p1")
    for _ in range(3):
        pair.begin_tree(1 << 22)
        multiply(pair, 12)
        compare_and_multiply(pair, 40)
    used.assert_nothing_twice()


def test_a_tree_like_the_last_one_takes_no_step_to_fill_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, sent = Pair(Wire(), "p1"), [0, 0]
    honest = FakeParty.send

    def counting(party: FakeParty, to: str, message: Any) -> None:
        sent[party.name == "p1"] += sum(len(array.data) for array in message.payload)
        honest(party, to, message)

    monkeypatch.setattr(FakeParty, "send", counting)
    steps = []
    for _ in range(4):
        pair.begin_tree(1 << 22)
        for _ in range(4):
            for computation in COMPUTATIONS[:4]:
                computation(pair, 30)
        steps.append(pair.ahead[0]._steps)
        assert pair.ahead[0]._steps == pair.ahead[1]._steps
    # the first trees fill the stocks
    assert steps[3] == 4 * (1 + 1 + (1 + 3) + 1) <= steps[1] < steps[0]
    assert sent[0] == sent[1]


def test_trees_alike_draw_what_was_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a far link: each step sends its part of what a tree takes."""
    monkeypatch.setattr(shared_products, "pays", lambda *_: False)
    pair, wanted, begun = Pair(Wire(), "p1"), list[list[int]](), list[int]()

    def noting(*given: Any) -> Steps[Any]:
        of = yield from draw(*given)
        begun[-1] += of.begun is not None
        return of

    end, message = pair.ahead[0], pair.ahead[0].message

    def watched() -> Any:
        before = sum(stock.coming * nbytes for stock, nbytes, _ in end._stocks())
        made = message()
        ahead[-1].append(sum(stock.coming * nbytes for stock, nbytes, _ in end._stocks()) - before)
        of_products = pair.ends[0].products.values()
        assert len(ahead) < 4 or all(stock.left + stock.coming <= stock.wanted for stock in of_products)
        return made

    monkeypatch.setattr(arithmetic, "draw", noting)
    end.message, ahead = watched, list[list[int]]()  # type: ignore[method-assign]
    for _ in range(6):
        begun.append(0)
        ahead.append([])
        pair.begin_tree(1)
        for each in pair.ahead:
            each.nbytes = each.evenly
        if len(ahead) > 1:
            assert end.nbytes == -(-end._total // len(ahead[-2]))  # by the last tree's steps
        wanted.append([stock.wanted for stock, *_ in pair.ahead[0]._stocks()][1:])
        for _ in range(4):
            for computation in COMPUTATIONS[:4]:
                computation(pair, 30)
        # each message is full, or there is none, but for the rest at the beginning
        assert all(nbytes == 0 or nbytes >= end.nbytes for nbytes in ahead[-1][1:])
        assert max(ahead[-1]) <= end.nbytes + max(nbytes for _, nbytes, _ in end._stocks())
    assert begun[0] == 16 > 2 * max(begun[3:])
    messages = [sum(nbytes > 0 for nbytes in of_tree) for of_tree in ahead[1:]]
    assert min(messages) > 0
    assert any(count < len(of_tree) for count, of_tree in zip(messages, ahead[1:], strict=True))
    # a sign takes 9 quads; multiplications and squares take products of their own
    assert wanted[2:] == [[4 * 30 * 9, *[4 * 30] * 2]] * 4


def test_what_a_tree_does_not_draw_is_kept_for_others() -> None:
    pair = Pair(Wire(), "p1")
    for _ in range(2):
        pair.begin_tree(1 << 22)
        multiply(pair, 5)
        compare(pair, 5)
    kept = [[stock.left for stock in end.products.values()] for end in pair.ends]
    assert sum(kept[0]) > 0
    for _ in range(2):
        pair.begin_tree(1 << 22)
    assert [[stock.left for stock in end.products.values()] for end in pair.ends] == kept


def test_what_is_made_takes_the_bytes_that_are_expected() -> None:
    pair, count = Pair(Wire(), "p1"), 4096
    for kind in (Correlation(57, 1, 2, 121), Correlation(2, 3, 2, 128), Correlation(40, 16, 2, 128, one_way=True)):
        assert all(not end.products[kind].left for end in pair.ends)
    for (_, expected, make_one), (_, _, make_other) in zip(*(each._stocks() for each in pair.ahead), strict=True):
        sent = 0
        for end in pair.ends:
            end.rows.drop(end.rows.left)
            end.rows.few = 1  # or more are made than quads need

        def counted(steps: Steps[None]) -> Steps[None]:
            nonlocal sent
            arrays = next(steps)
            while True:
                sent += sum(array.nbytes for array in arrays)
                try:
                    arrays = steps.send((yield arrays))
                except StopIteration:
                    return

        play(make_one(count), counted(make_other(count)))
        assert 0.9 * expected < sent / count < 1.1 * expected


def test_products_are_begun_only_where_the_stock_has_fewer() -> None:
    kind, ends = Correlation(3, 1, 1, 64), play(open_transfers(0), open_transfers(1))
    play(*(make(end, kind, 5) for end in ends))
    assert all(of.begun is None and len(of) == 5 for of in play(*(draw(end, kind, 5) for end in ends)))
    play(*(make(end, kind, 4) for end in ends))
    assert all(of.begun is not None and len(of) == 5 for of in play(*(draw(end, kind, 5) for end in ends)))
    assert [end.products[kind].left for end in ends] == [4, 4]
    # begun ones count, so that more are made ahead, of transfers that the stock does not need
    assert [(end.products[kind].drawn, end.rows.drawn) for end in ends] == [(10, 0)] * 2


def test_of_numbers_that_one_party_knows_the_other_alone_sends_products() -> None:
    kind, ends = Correlation(3, 2, 1, 64, one_way=True), play(open_transfers(0), open_transfers(1))
    knower, other = play(*(draw(end, kind, 5) for end in ends))
    assert knower.begun.message.size == knower.numbers.any() == 0
    assert other.begun.message.shape == (15, 2)
    assert other.begun.sent.shape == knower.begun.expected == (5, 48)
    assert other.begun.expected == (0, 48)
    sent = [0, 0]
    steps = [make(end, kind, 5) for end in ends]
    first = [next(of) for of in steps]
    for k, of in enumerate(steps):
        sent[k] = sum(array.nbytes for array in of.send(first[1 - k]))
    assert sent == [0, 5 * 2 * 24]
    play(*(make(end, kind, 5) for end in ends))
    assert [end.products[kind].left for end in ends] == [5, 5]


@pytest.mark.parametrize("nbytes", [1, 500, 40_000])
def test_a_step_sends_about_as_many_bytes_ahead_as_asked_for(nbytes: int) -> None:
    pair, made = Pair(Wire(), "p1"), []
    pair.begin_tree(nbytes)
    multiply(pair, 300)
    compare(pair, 500)
    pair.begin_tree(nbytes)
    ends = pair.ahead
    for _ in range(8):
        sent = [end.message() for end in ends]
        assert (sent[0] is None) == (sent[1] is None)
        if sent[0] is None or sent[1] is None:
            break
        made += [sum(array.nbytes for array in of) for of in sent]
        for end, came in zip(ends, reversed(sent), strict=True):
            end.take(came)
    # a step begins so much, which makes as many messages again at the steps that follow; transfers are of 512
    assert max(made) < 3 * nbytes + 30_000


def test_products_in_a_ring_are_made_ahead_a_ciphertext_at_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the last tree took; what follows is made once these steps' room is used up."""
    pair, nbytes = Pair(Wire(), "p1"), 50_000
    pair.begin_tree(nbytes)
    multiply_in_ring(pair, 5000)
    pair.begin_tree(nbytes)
    ends, sizes = pair.ahead, []
    left = [end.rings[IN_RING].stock.left for end in pair.ends]
    assert left == [DEGREE - 5000] * 2
    for _ in range(80):
        sent = [end.message() for end in ends]
        assert (sent[0] is None) == (sent[1] is None)
        sizes.append(sum(array.nbytes for array in sent[0] or ()))
        for end, came in zip(ends, reversed(sent), strict=True):
            if came is not None:
                end.take(came)
    assert [end.rings[IN_RING].stock.left for end in pair.ends] == [2 * DEGREE - 5000] * 2
    assert max(sizes) < 350_000
    # a step sends one ring's ciphertext at most, besides
    assert sum(sizes) > DEGREE * plan_of(IN_RING).nbytes
    made = pair.ends[0].rings[IN_RING].made
    multiply_in_ring(pair, 5000)
    multiply_in_ring(pair, 5000)
    in_ring = pair.ends[0].rings[IN_RING]
    # neither waited for more; later steps have begun some
    assert in_ring.made - in_ring.stock.coming == made


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "_MOST", 50_000)
    pair = Pair(Wire(), "p1")
    pair.begin_tree(1)
    for _ in range(5):
        multiply(pair, 300)
    pair.begin_tree(1 << 22)
    assert 40_000 < pair.ahead[0]._total <= 50_000
    wanted = [stock.wanted for stock, *_ in pair.ahead[0]._stocks()]
    assert wanted == [stock.wanted for stock, *_ in pair.ahead[1]._stocks()]
    multiply(pair, 300)


def test_what_no_tree_draws_any_more_is_not_kept_forever(monkeypatch: pytest.MonkeyPatch, used: Used) -> None:
    """Trees of samples of columns multiply numbers in groups of other sizes, each a kind of its own."""
    monkeypatch.setattr(ahead_module, "_MOST", 100_000)
    monkeypatch.setattr(shared_products, "pays", lambda *_: False)
    pair, values = Pair(Wire(), "p1"), np.zeros((30, 12, 2), np.uint64)
    for tree in range(12):
        pair.begin_tree(1 << 22)
        for _ in range(4):
            of_tree = values[:, : tree + 1]
            pair.both(lambda k, end, of_tree=of_tree: products(end, values[:, 0], of_tree, 9, 9, 18))
            multiply(pair, 5)
        kept = [sum(nbytes * stock.left for stock, nbytes, _ in each._stocks()) for each in pair.ahead]
        assert kept[0] == kept[1] < 400_000
    kinds = [stock.left for stock in pair.ends[0].products.values()]
    assert kinds == [stock.left for stock in pair.ends[1].products.values()]
    used.assert_nothing_twice()


def test_transfers_left_over_are_not_kept_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few products leave more transfers than they take, as these are made 512 at a time."""
    monkeypatch.setattr(ahead_module, "_MOST", 6_000)
    pair = Pair(Wire(), "p1")
    for _ in range(6):
        play(*(end.fresh(1) for end in pair.ends))
    for end in pair.ends:
        assert end.rows.left == 6 * 511
        end.rows.few = 700  # as many are made at once
    pair.begin_tree(1)
    # what is dropped is not drawn, or trees to come would have more made
    assert [(end.rows.left, end.rows.drawn) for end in pair.ends] == [(700, 0)] * 2
    compare(pair, 5)


def test_two_messages_are_under_way_at_most() -> None:
    pair, most = Pair(Wire(), "p1"), []
    for _ in range(2):
        pair.begin_tree(2000)
        honest = pair.ahead[0].message

        def watched(honest: Callable[[], Any] = honest) -> Any:
            sent = honest()
            most.append(pair.ahead[0].under_way)
            return sent

        pair.ahead[0].message = watched  # type: ignore[method-assign]
        compare(pair, 100)
        multiply(pair, 40)
        assert pair.ahead[0].under_way == pair.ahead[1].under_way == 0
    assert max(most) == 2


def test_three_parties_and_a_chain_use_nothing_twice(used: Used) -> None:
    """The active party computes with both at once, then with one, as the winner so far passes on."""
    wire = Wire()
    pairs = [Pair(wire, name) for name in ("p1", "p2")]
    rng = np.random.default_rng(4)

    def take(party: FakeParty, ends: dict[str, Steps[Any]], makes: dict[str, Ahead]) -> dict[str, Any]:
        found = take_steps(party, ends, makes)
        take_rest(party, makes)
        return found

    def active(bits: np.ndarray) -> list[dict[str, Any]]:
        makes, party = {p.name: p.ahead[0] for p in pairs}, pairs[0].parties[0]
        both = {p.name: both_of(p.ends[0], bits[k], 2, 128, 0) for k, p in enumerate(pairs)}
        found = take(party, both, makes)
        return [found, take(party, {"p2": both_of(pairs[1].ends[0], bits[0], 2, 128, 0)}, makes)]

    def passive(pair: Pair, *own: np.ndarray) -> list[np.ndarray]:
        makes, end = {"active": pair.ahead[1]}, pair.ends[1]
        return [take(pair.parties[1], {"active": both_of(end, bits, 2, 128, 1)}, makes)["active"] for bits in own]

    def level(n: int) -> None:
        bits = rng.integers(0, 2, (2, 2, n), np.uint8)
        (both, last), first, second = at_once(
            lambda: active(bits[0]),
            lambda: passive(pairs[0], bits[1, 0]),
            lambda: passive(pairs[1], bits[1, 1], bits[1, 0]),
        )
        for k, theirs in enumerate((first, second)):
            assert opened((both[f"p{k + 1}"], theirs[0]), 128) == (bits[0, k] & bits[1, k]).tolist()
        assert opened((last["p2"], second[1]), 128) == (bits[0, 0] & bits[1, 0]).tolist()

    for nbytes in (0, 5000, 300):
        for pair in pairs:
            pair.begin_tree(nbytes)
        for n in (20, 50, 80):
            level(n)
    used.assert_nothing_twice()
    assert all(queue.empty() for queue in wire.queues.values())


# ---------------------------------------------------------------- another end that is wrong


def beginning() -> tuple[list[Ahead], list[list[np.ndarray]]]:
    pair = Pair(Wire(), "p1")
    pair.begin_tree(1)
    multiply(pair, 5)
    compare(pair, 5)
    pair.begin_tree(1 << 20)
    sent = [end.message() for end in pair.ahead]
    assert sent[0] is not None
    assert sent[1] is not None
    return pair.ahead, sent


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: [],
        lambda sent: sent[1:],
        lambda sent: sent[:-1],
        lambda sent: [*sent, sent[-1]],
        lambda sent: [sent[0][::-1] * 0, *sent[1:]],
        lambda sent: [sent[0] * 2, *sent[1:], *sent[1:]],
        lambda sent: [np.concatenate([sent[0], [0]]), *sent[1:]],
        lambda sent: [np.array([-1] * len(sent[0])), *sent[1:]],
        lambda sent: [np.array([1 << 62, *[0] * (len(sent[0]) - 1)]), *sent[1:]],
        lambda sent: [sent[0], *(array[..., :-1] for array in sent[1:])],
        lambda sent: [sent[0], *(array.astype(np.float64) for array in sent[1:])],
        lambda sent: [sent[0], *(np.concatenate([array, array]) for array in sent[1:])],
    ],
)
def test_messages_of_another_form_are_refused(change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> None:
    ends, sent = beginning()
    with pytest.raises(CryptoError, match="expected"):
        ends[0].take(change(sent[1]))


@pytest.mark.parametrize("nbytes", [0, 700])
def test_an_end_that_makes_something_else_ahead_ends_the_job(nbytes: int) -> None:
    """The active party says `ahead`, and does otherwise: no results, and no waiting for one another."""
    pair = Pair(Wire(), "p1")
    for of_one in (1 << 22, nbytes):
        pair.begin_tree(1 << 22)
        pair.ahead[0].nbytes = of_one
        if of_one == 1 << 22:
            compare(pair, 200)
    z = np.zeros((200, 2), np.uint64)
    wire = pair.parties[0]._wire

    def end(k: int) -> None:
        try:
            party, peer = pair.parties[k], ("p1", "active")[k]
            take_steps(party, {peer: negatives(pair.ends[k], z, 71, k)}, {peer: pair.ahead[k]})
            take_rest(party, {peer: pair.ahead[k]})
        except CryptoError:
            wire.queues[pair.parties[k].name, ("p1", "active")[k]].put(None)  # the job ends at the other party, too
            raise

    with pytest.raises((CryptoError, AssertionError)):
        at_once(lambda: end(0), lambda: end(1))
