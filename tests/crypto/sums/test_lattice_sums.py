"""Bin sums under the lattice map, at the seam: right whatever is asked, once and afresh, and within the leak budget."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.asking import answered, asked, begun
from pace import within
from treaty.crypto.lattice import store as store_module
from treaty.crypto.lattice.linear_map import PartialSums
from treaty.crypto.lattice.ring import pack, unpack
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.parameters import LEAK_PER_SUM, LIMITS
from treaty.crypto.payload import SumsBounds, slots_of
from treaty.crypto.sums.encrypted_sums import make_client, make_server
from treaty.crypto.sums.lattice_sums import BINDING_BYTES, sums_parameters
from treaty.errors import CryptoError

GRAD, HESS = 1 << 16, 1 << 14
NAMES = ["shop 0", "shop 1"]


def table_of(rng, rows, sizes):
    """Draw codes of columns of so many slots, skewed, so that some bins are crowded and some empty."""
    draw = rng.random((rows, len(sizes))) ** 3
    return (draw * np.array(sizes)).astype(np.uint8), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def gradients(rng, rows):
    """Draw derivatives, every other one at its bounds."""
    grad, hess = rng.integers(-GRAD, GRAD + 1, rows), rng.integers(0, HESS + 1, rows)
    grad[::2] = np.where(rng.random(len(grad[::2])) < 0.5, -GRAD, GRAD)
    hess[::4] = HESS
    return grad, hess


def histogram(codes, offsets, grad, hess, rows):
    """Sum in the clear: int64 (slots, 3)."""
    sums = np.zeros((offsets[-1], 3), np.int64)
    for f, (first, last) in enumerate(pairwise(offsets)):
        for k, values in enumerate((grad[rows], hess[rows], np.ones(len(rows), np.int64))):
            np.add.at(sums[first:last, k], codes[rows, f], values)
    return sums


class Job:
    """A client and its servers over tables (codes, offsets), set up; hints that all kept serve again."""

    def __init__(self, tables, bounds=None, stores=None, threads=1, seed=bytes(range(32)), nodes=1):
        self.tables, self.rows = tables, len(next(iter(tables.values()))[0])
        stores = stores or {}
        self.client = make_client(
            "lattice", bounds or SumsBounds(self.rows, GRAD, HESS), threads=threads, store=stores.get("client"),
            nodes=nodes,
        )  # fmt: skip
        self.servers = {
            peer: make_server(
                "lattice", self.client.setup(), codes, offsets, threads=threads,
                names=[f"{peer} {f}" for f in range(len(offsets) - 1)], store=stores.get(peer),
            )
            for peer, (codes, offsets) in tables.items()
        }  # fmt: skip
        offered = self.client.offer({peer: offsets for peer, (_, offsets) in tables.items()})
        if offered and all(self.servers[peer].holds(offered[1][peer]) for peer in tables):
            self.client.settle(*offered)
            for peer, server in self.servers.items():
                server.settle(b"", kept=offered[1][peer])
        else:
            self.client.settle(seed)
            for server in self.servers.values():
                server.settle(seed)
        self.pieces = {peer: list(server.hint()) for peer, server in self.servers.items()}
        for peer, pieces in self.pieces.items():
            left = [self.client.accept_hint(peer, piece, tables[peer][1]) for piece in pieces]
            assert left[-1] == 0 < min(left[:-1], default=1)

    def begin(self, grad, hess, features=None):
        self.grad, self.hess = grad, hess
        start = begun(self.client, grad, hess)
        for server in self.servers.values():
            server.begin_tree(start, None, features)
        return self

    def query(self, nodes):
        starts = np.cumsum([0, *map(len, nodes)]).astype(np.int32)
        return asked(self.client, np.concatenate([np.empty(0, np.int32), *nodes]).astype(np.int32), starts)

    def totals(self, nodes):
        return np.array([[self.grad[rows].sum(), self.hess[rows].sum(), len(rows)] for rows in nodes], np.int64)

    def plain(self, peer, nodes):
        return np.stack([histogram(*self.tables[peer], self.grad, self.hess, rows) for rows in nodes])


def small_job(**stores):
    """Return a job of 60 rows and two columns of 3 and 4 slots, in a tree, and two nodes."""
    rng = np.random.default_rng(1)
    job = Job({"shop": table_of(rng, 60, [3, 4])}, stores=stores).begin(*gradients(rng, 60))
    return job, [np.arange(25), np.arange(30, 60)]


@pytest.mark.parametrize("of_a_vector", [1, 2])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_opened_sums_equal_the_plain_histogram(of_a_vector, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = data.draw(st.integers(1, 3000))
    sizes = data.draw(st.lists(st.integers(1, 20), max_size=5))
    if sizes and data.draw(st.booleans()):
        sizes[0] = 256
    job = Job({"shop": table_of(rng, rows, sizes)}, threads=data.draw(st.integers(1, 2)), nodes=of_a_vector)
    for _ in range(2):
        job.begin(*gradients(rng, rows))
        node = rng.integers(0, data.draw(st.integers(1, 4)) + 1, rows)
        nodes = [np.flatnonzero(node == k) for k in range(1, node.max() + 1)] + [np.empty(0, np.intp)]
        opened = job.client.open("shop", answered(job.servers["shop"], job.query(nodes)), job.totals(nodes))
        np.testing.assert_array_equal(opened, job.plain("shop", nodes))


@pytest.mark.parametrize("of_a_vector", [1, 2])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_sums_of_nodes_of_several_trees_equal_the_plain_histograms(of_a_vector, data):
    """A row is in a node of each tree, and no vector holds nodes of two trees."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, trees = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 4))
    job = Job({"shop": table_of(rng, rows, [4, 3])}, nodes=of_a_vector)
    job.client.nodes_at_a_time = of_a_vector * data.draw(st.integers(1, 3))
    of_trees = [gradients(rng, rows) for _ in range(trees)]
    job.begin(*map(np.stack, zip(*of_trees, strict=True)))
    counts = [data.draw(st.integers(0, 5)) for _ in range(trees - 1)] + [data.draw(st.integers(1, 5))]
    tree_of, nodes = np.repeat(np.arange(trees, dtype=np.int32), counts), []
    for count in counts:
        node = rng.integers(0, count + 1, rows)
        nodes += [np.flatnonzero(node == k).astype(np.int32) for k in range(count)]
    parts, vectors = job.client.parts(tree_of), 0
    assert np.concatenate([np.arange(len(nodes))[part] for part in parts]).tolist() == list(range(len(nodes)))
    for part in parts:
        of, starts = nodes[part], np.cumsum([0, *map(len, nodes[part])]).astype(np.int32)
        (query,) = job.client.query(np.concatenate(of), starts, tree_of[part])
        vectors += len(query[0])
        assert len(query[0]) * of_a_vector <= job.client.nodes_at_a_time
        own = [of_trees[tree] for tree in tree_of[part].tolist()]
        sums = [histogram(*job.tables["shop"], *of_tree, node) for of_tree, node in zip(own, of, strict=True)]
        totals = np.stack([of_node[:4].sum(axis=0) for of_node in sums])
        opened = job.client.open("shop", answered(job.servers["shop"], query), totals)
        np.testing.assert_array_equal(opened, np.stack(sums))
    # as many as the trees take one after another, however the nodes are cut into queries
    assert vectors == sum(-(-count // of_a_vector) for count in counts)


@pytest.mark.parametrize("of_a_vector", [1, 2])
def test_a_table_of_many_blocks_gives_the_plain_histogram(of_a_vector):
    rng = np.random.default_rng(2)
    job = Job({"shop": table_of(rng, 40_000, [5, 2])}, nodes=of_a_vector).begin(*gradients(rng, 40_000))
    node = rng.integers(0, 4, 40_000)
    nodes = [np.flatnonzero(node == k) for k in range(3)]
    opened = job.client.open("shop", answered(job.servers["shop"], job.query(nodes)), job.totals(nodes))
    np.testing.assert_array_equal(opened, job.plain("shop", nodes))


@pytest.mark.parametrize(
    "bounds",
    [SumsBounds(1000, GRAD, HESS), SumsBounds(1000, 0, 0), SumsBounds(1000, 2146336768, 2146336768)],
    ids=["usual", "least", "largest"],
)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("of_a_vector", [1, 2])
def test_sums_at_their_bounds_are_right(bounds, sign, of_a_vector):
    codes, offsets = np.zeros((1000, 1), np.uint8), np.array([0, 1], np.int32)
    if of_a_vector == 2 and bounds.grad_bound > 1 << 30:  # primes of the larger degree begin lower
        bounds = SumsBounds(1000, 1 << 30, 1 << 30)
    grad, hess = sign * bounds.grad_bound, bounds.hess_bound
    job = Job({"shop": (codes, offsets)}, bounds, nodes=of_a_vector)
    job.begin(np.full(1000, grad), np.full(1000, hess))
    for nodes in ([np.arange(1000)], [np.arange(0), np.arange(1000)], [np.arange(999), np.arange(999, 1000)]):
        opened = job.client.open("shop", answered(job.servers["shop"], job.query(nodes)), job.totals(nodes))
        assert opened.tolist() == [[[grad * len(node), hess * len(node), len(node)]] for node in nodes]


def test_two_nodes_share_a_vector_and_its_leak():
    rng, store = np.random.default_rng(11), HintStore(None)
    job = Job({"shop": table_of(rng, 60, [3, 4])}, stores={"shop": store}, nodes=2).begin(*gradients(rng, 60))
    for asked_of, vectors in ((1, 1), (2, 1), (3, 2)):
        words, own = job.query(np.array_split(np.arange(60), asked_of))
        assert len(words) == len(own) == vectors
        server = job.servers["shop"]
        assert server.add([words, own]) == 2 * vectors
        assert len(server.answer()[1]) == vectors
    server.close()
    leak = sums_parameters(job.client._bounds, nodes=2).leak(20) * 7
    assert 0 < store.spent(NAMES) < 1.2 * 4 * leak


def test_a_vector_of_two_nodes_takes_less_than_two_of_one():
    for rows in (1000, 10**6, 10**8, 2**31 - 1):
        one, two = (sums_parameters(SumsBounds(rows, GRAD, HESS), nodes=nodes) for nodes in (1, 2))
        assert sum(two.widths) < 1.65 * sum(one.widths)
        assert two.leak(rows) <= LEAK_PER_SUM
        assert two.modulus.bit_length() <= LIMITS[two.degree]


def test_several_peers_and_outstanding_queries_are_opened_in_order():
    rng = np.random.default_rng(3)
    job = Job({"shop": table_of(rng, 80, [3, 9]), "telco": table_of(rng, 80, [4])}).begin(*gradients(rng, 80))
    first, second = [np.arange(10), np.arange(20, 60)], [np.arange(60, 80)]
    queries = [job.query(first), job.query(second)]
    answers = {peer: [answered(server, query) for query in queries] for peer, server in job.servers.items()}
    for peer in ("telco", "shop"):
        for nodes, answer in zip((first, second), answers[peer], strict=True):
            opened = job.client.open(peer, answer, job.totals(nodes))
            np.testing.assert_array_equal(opened, job.plain(peer, nodes))


def test_an_answer_out_of_order_does_not_open():
    job, (one, other) = small_job()
    answers = [answered(job.servers["shop"], job.query([rows])) for rows in (one, other)]
    with pytest.raises(CryptoError, match="do not add up"):
        job.client.open("shop", answers[1], job.totals([one]))


def test_a_sample_of_columns_gives_their_sums_alone():
    rng = np.random.default_rng(4)
    job = Job({"shop": table_of(rng, 90, [3, 4, 5])})
    for chosen in ([0, 2], [1], []):
        features = np.array(chosen, np.int32)
        job.begin(*gradients(rng, 90), features)
        query, nodes = job.query([np.arange(50)]), [np.arange(50)]
        answer = answered(job.servers["shop"], query)
        assert answer[1].shape[1] == sum([3, 4, 5][f] for f in chosen)
        opened = job.client.open("shop", answer, job.totals(nodes), features)
        slots = slots_of(job.tables["shop"][1], features.astype(np.int64))
        np.testing.assert_array_equal(opened[:, slots], job.plain("shop", nodes)[:, slots])


# ---------------------------------------------------------------- what is refused


def changed(payload, number, array):
    return [array if k == number else part for k, part in enumerate(payload)]


def with_residue(payload, number, value):
    """Change a residue of 60 rows (0), or of a b_0 (1)."""
    parameters = sums_parameters(SumsBounds(60, GRAD, HESS))
    residues = unpack(parameters, payload[number], (60, parameters.degree)[number])
    residues[0, 2, 5] = value(parameters.primes[2])
    return changed(payload, number, pack(parameters, residues))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda q: q[:1], "expected 2 arrays, got 1"),
        (lambda q: changed(q, 0, q[0].astype(np.uint64)), "expected uint32"),
        (
            lambda q: changed(q, 0, q[0][:, 1:].copy()),
            "expected words of 60 entries, or of fewer in whole blocks of 8192, got",
        ),
        (lambda q: changed(q, 0, q[0][0].copy()), "expected uint32"),
        (lambda q: changed(q, 1, q[1][:, :-1].copy()), "expected uint32"),
        (lambda q: changed(q, 1, q[1][:1]), "as many b as b_0"),
        (
            lambda q: changed(q, 0, q[0][:, :0].copy()),
            "expected vectors of 60 entries in whole blocks of 8192, got 0",
        ),
        (lambda q: with_residue(q, 0, lambda prime: prime), "not below its prime"),
        (lambda q: with_residue(q, 0, lambda prime: (1 << prime.bit_length()) - 1), "not below its prime"),
        (lambda q: with_residue(q, 1, lambda prime: prime), "not below its prime"),
    ],
)
def test_malformed_queries_are_refused(change, expected):
    job, nodes = small_job()
    with pytest.raises(CryptoError, match=f"{expected}.* query"):
        answered(job.servers["shop"], change(job.query(nodes)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda a: a[:1], "expected 2 arrays, got 1"),
        (lambda a: changed(a, 1, a[1].astype(np.int32)), "expected uint16"),
        (lambda a: changed(a, 1, a[1][:, :-1].copy()), "expected uint16"),
        (lambda a: changed(a, 1, a[1][:1].copy()), "expected uint16"),
        (lambda a: changed(a, 1, a[1][..., 1:].copy()), "expected uint16"),
        (lambda a: changed(a, 0, a[0][1:]), "expected uint8"),
        (lambda a: changed(a, 0, a[0] ^ 1), "belongs to another table or hint"),
    ],
)
def test_malformed_answers_are_refused_naming_the_peer(change, expected):
    job, nodes = small_job()
    answer = answered(job.servers["shop"], job.query(nodes))
    with pytest.raises(CryptoError, match=f"{expected}.* answer of shop"):
        job.client.open("shop", change(answer), job.totals(nodes))


def test_an_answer_under_another_hint_is_refused():
    job, nodes = small_job()
    other, _ = small_job()
    with pytest.raises(CryptoError, match="belongs to another table or hint"):
        job.client.open("shop", answered(other.servers["shop"], job.query(nodes)), job.totals(nodes))


def test_a_corrupted_answer_is_caught_by_an_error_that_names_no_bin():
    told = set()
    for node in range(2):
        for slot in range(7):
            job, nodes = small_job()
            answer = answered(job.servers["shop"], job.query(nodes))
            corrupted = answer[1].copy()
            corrupted[node, slot, -1] ^= 1 << (5 + slot)
            with pytest.raises(CryptoError) as caught:
                job.client.open("shop", [answer[0], corrupted], job.totals(nodes))
            told.add(str(caught.value))
    assert told == {
        "the bins of a feature do not add up to their node, the job cannot continue - in the answer of shop"
    }


@pytest.mark.parametrize("column", [0, 1, 2], ids=["grad", "hess", "count"])
def test_wrong_totals_do_not_open(column):
    job, nodes = small_job()
    answer, totals = answered(job.servers["shop"], job.query(nodes)), job.totals(nodes)
    totals[1, column] += 1
    with pytest.raises(CryptoError, match="do not add up to their node"):
        job.client.open("shop", answer, totals)


def test_totals_of_another_shape_are_refused():
    job, nodes = small_job()
    answer = answered(job.servers["shop"], job.query(nodes))
    with pytest.raises(CryptoError, match=re.escape("expected totals of shape (2, 3), got (1, 3)")):
        job.client.open("shop", answer, job.totals(nodes[:1]))


def unfinished():
    """Return a client that awaits the hint of a table, and the hint."""
    rng = np.random.default_rng(5)
    codes, offsets = table_of(rng, 30, [3, 4])
    client = make_client("lattice", SumsBounds(30, GRAD, HESS), threads=1)
    server = make_server("lattice", client.setup(), codes, offsets, threads=1)
    for end in (client, server):
        end.settle(bytes(32))
    binding, digits = server.hint()
    return client, offsets, binding, digits


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda digits: [*digits, *digits], "expected 1 arrays, got 2"),
        (lambda digits: [digits[0].astype(np.int32)], "expected int16"),
        (lambda digits: [digits[0][:, 1:].copy()], "expected int16"),
        (lambda digits: [digits[0][..., 1:].copy()], "expected int16"),
        (lambda digits: [digits[0][:0]], "expected at most 7 rows more, and one at least, got 0"),
        (
            lambda digits: [np.concatenate([digits[0], digits[0]])],
            "expected at most 7 rows more, and one at least, got 14",
        ),
    ],
)
def test_malformed_hints_are_refused_naming_the_peer(change, expected):
    client, offsets, binding, digits = unfinished()
    assert client.accept_hint("shop", binding, offsets) == 7
    with pytest.raises(CryptoError, match=f"{expected}.* hint of shop"):
        client.accept_hint("shop", change(digits), offsets)


def test_hint_pieces_beyond_the_table_are_refused():
    client, offsets, binding, (digits,) = unfinished()
    assert client.accept_hint("shop", binding, offsets) == 7
    assert client.accept_hint("shop", [digits[:5]], offsets) == 2
    with pytest.raises(CryptoError, match="expected at most 2 rows more, and one at least, got 3"):
        client.accept_hint("shop", [digits[4:]], offsets)


def test_a_binding_of_another_length_is_refused():
    client, offsets, binding, _ = unfinished()
    with pytest.raises(CryptoError, match=r"expected uint8.* hint of shop"):
        client.accept_hint("shop", [binding[0][1:]], offsets)


def test_calls_out_of_order_are_refused():
    rng = np.random.default_rng(6)
    codes, offsets = table_of(rng, 20, [3])
    job = Job({"shop": (codes, offsets)})
    none = np.zeros((1, 3), np.int64)
    with pytest.raises(CryptoError, match="expected begin_tree before query"):
        job.query([np.arange(3)])
    job.begin(*gradients(rng, 20))
    with pytest.raises(CryptoError, match="expected a hint and a query before an answer of shop"):
        job.client.open("shop", [], none)
    query = job.query([np.arange(3)])
    with pytest.raises(CryptoError, match="expected a hint and a query before an answer of telco"):
        job.client.open("telco", [], none)
    job.servers["shop"].end_tree()
    with pytest.raises(CryptoError, match="expected begin_tree before a query"):
        answered(job.servers["shop"], query)


def test_a_tree_over_too_few_rows_is_refused_at_both_ends():
    job, _ = small_job()
    with pytest.raises(CryptoError, match="expected all 60 rows, got 59"):
        job.servers["shop"].begin_tree([], np.arange(59, dtype=np.int32))
    with pytest.raises(CryptoError, match="expected 0 arrays, got 1 - in the start of a tree"):
        job.servers["shop"].begin_tree([np.zeros(3)], None)
    with pytest.raises(CryptoError, match="expected the derivatives of 60 rows, got 59"):
        begun(job.client, *gradients(np.random.default_rng(0), 59))


@pytest.mark.parametrize(
    ("grad", "hess", "expected"),
    [
        (GRAD + 1, 0, "a gradient exceeds"),
        (-GRAD - 1, 0, "a gradient exceeds"),
        (0, HESS + 1, "a hessian is negative or exceeds"),
        (0, -1, "a hessian is negative or exceeds"),
    ],
)
def test_derivatives_beyond_their_bounds_are_refused(grad, hess, expected):
    job, _ = small_job()
    grads, hesses = np.zeros(60, np.int64), np.zeros(60, np.int64)
    grads[7], hesses[9] = grad, hess
    with pytest.raises(CryptoError, match=expected):
        begun(job.client, grads, hesses)


SETUP = [np.array([4, GRAD, HESS, 1], np.int64)]
HUGE = [np.array([1 << 20, (1 << 41) - 1, (1 << 42) - 1, 1], np.int64)]
CODES, OFFSETS = np.array([[0], [1], [1], [0]], np.uint8), np.array([0, 2], np.int32)


@pytest.mark.parametrize(
    ("setup", "codes", "offsets", "expected"),
    [
        (SETUP, CODES[:3], OFFSETS, "expected 4 rows, got 3 - in the set-up"),
        (SETUP, CODES + 1, OFFSETS, "a bin code is beyond its feature's slots"),
        (SETUP, CODES.astype(np.int32), OFFSETS, "expected unsigned codes"),
        (SETUP, CODES[:, 0], OFFSETS, "expected unsigned codes"),
        (SETUP, CODES, np.array([0, 2, 4], np.int32), "expected unsigned codes"),
        (SETUP, CODES[:, [0, 0]], np.array([0, 2, 2], np.int32), "a slot for every feature"),
        ([SETUP[0][:2]], CODES, OFFSETS, "expected int64 (4,), got int64 (2,)"),
        ([], CODES, OFFSETS, "expected 1 arrays, got 0 - in the set-up"),
        ([np.array([4, GRAD, HESS, 3], np.int64)], CODES, OFFSETS, "expected vectors of one node, or of two"),
        ([np.array([4, -1, 0, 1], np.int64)], CODES, OFFSETS, "expected n_rows >= 1 and bounds >= 0"),
        (HUGE, np.zeros((1 << 20, 1), np.uint8), OFFSETS, "too large for the lattice map - lower fractional_bits"),
    ],
)  # fmt: skip
def test_a_set_up_that_does_not_fit_the_table_is_refused(setup, codes, offsets, expected):
    with pytest.raises(CryptoError, match=re.escape(expected)):
        make_server("lattice", setup, codes, offsets, threads=1, names=NAMES)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (SumsBounds(*map(int, HUGE[0][:3])), "too large for the lattice map - lower fractional_bits"),
        (SumsBounds(100, 1 << 16, 1 << 31), "vectors of such large numbers do not fit the lattice map"),
        (SumsBounds(100, 1 << 31, 1), "expected numbers below the primes in a vector"),
    ],
)
def test_bounds_that_are_too_large_are_refused(bounds, expected):
    with pytest.raises(CryptoError, match=re.escape(expected)):
        make_client("lattice", bounds, threads=1).settle(bytes(32))


# ---------------------------------------------------------------- the leak budget


def leak_of_a_vector(bounds, sizes):
    """Bound what a vector's answers leak, by the formula: B sqrt(10.5 (n / B + 4 N / 3)) / 2^k for B bins of n rows."""
    parameters = sums_parameters(bounds)
    width = 2.0**parameters.flood_bits
    return sum(b * math.sqrt(10.5 * (bounds.n_rows / b + 4 * parameters.degree / 3)) / width for b in sizes)


ONE = leak_of_a_vector(SumsBounds(60, GRAD, HESS), [3, 4])


def test_leaks_are_entered_before_an_answer_is_made_and_the_rest_is_given_back(monkeypatch):
    store, entered = HintStore(None), []
    job, nodes = small_job(shop=store)
    answer = PartialSums.answer

    def watching(*arguments):
        entered.append(store.spent(NAMES))
        return answer(*arguments)

    monkeypatch.setattr(PartialSums, "answer", watching)
    assert store.spent(NAMES) == 0
    for vectors in (2, 3, 5):
        answered(job.servers["shop"], job.query([nodes[0], *[np.empty(0, np.intp)] * (vectors - 1)]))
    assert [spent / ONE >= vectors for spent, vectors in zip(entered, (2, 5, 10), strict=True)] == [True] * 3
    job.servers["shop"].close()
    assert store.spent(NAMES) == pytest.approx(10 * ONE, rel=1e-6, abs=0)
    job.servers["shop"].close()
    assert store.spent(NAMES) == pytest.approx(10 * ONE, rel=1e-6, abs=0)


def test_leaks_add_up_over_jobs_and_hints():
    store = HintStore(None)
    for number in range(1, 4):
        job, nodes = small_job(shop=store)
        answered(job.servers["shop"], job.query(nodes))
        job.servers["shop"].close()
        assert store.spent(NAMES) == pytest.approx(2 * number * ONE, rel=1e-6, abs=0)


def test_no_answer_is_made_beyond_the_limit(monkeypatch):
    store = HintStore(None)
    monkeypatch.setattr(store_module, "LEAK_LIMIT", 5.5 * ONE)
    job, nodes = small_job(shop=store)
    server = job.servers["shop"]
    answers = [answered(server, job.query(nodes)) for _ in range(2)]  # fewer than are reserved at a time otherwise
    monkeypatch.setattr(PartialSums, "answer", lambda *_: pytest.fail("an answer was made"))
    with pytest.raises(CryptoError, match="limit of what they may leak"):
        answered(server, job.query(nodes))
    assert store.spent(NAMES) <= 5.5 * ONE
    for answer in answers:
        np.testing.assert_array_equal(job.client.open("shop", answer, job.totals(nodes)), job.plain("shop", nodes))
    later, _ = small_job(shop=store)  # under another hint
    with pytest.raises(CryptoError, match="limit of what they may leak"):
        answered(later.servers["shop"], later.query(nodes))


# ---------------------------------------------------------------- once and afresh


def test_a_repeated_query_gets_another_flood_and_the_ledger_counts_both():
    store = HintStore(None)
    job, nodes = small_job(shop=store)
    query = job.query(nodes)
    first, again = (answered(job.servers["shop"], [part.copy() for part in query]) for _ in range(2))
    assert (again[1] != first[1]).any()
    job.servers["shop"].close()
    assert store.spent(NAMES) == pytest.approx(2 * len(query[0]) * ONE, rel=1e-6, abs=0)


def test_what_an_answer_leaks_is_written_before_it_is_given(tmp_path, monkeypatch):
    job, nodes = small_job(shop=HintStore(tmp_path))

    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialSums, "answer", cut_off)
    with pytest.raises(KeyboardInterrupt):
        answered(job.servers["shop"], job.query(nodes))
    assert HintStore(tmp_path).spent(NAMES) >= len(nodes) * ONE


@pytest.mark.parametrize("folder", [False, True], ids=["memory", "disk"])
def test_a_kept_hint_is_not_sent_again_and_gives_the_same_sums(tmp_path, folder):
    rng = np.random.default_rng(7)
    tables = {"shop": table_of(rng, 70, [3, 5]), "telco": table_of(rng, 70, [2])}
    stores = {name: HintStore(tmp_path / name if folder else None) for name in ("client", *tables)}
    nodes, seeds = [np.arange(40), np.arange(40, 70)], (bytes(32), bytes(range(32)))
    for number, seed in enumerate(seeds):
        job = Job(tables, stores=stores, seed=seed).begin(*gradients(rng, 70))
        assert [len(pieces) for pieces in job.pieces.values()] == ([2, 2] if number == 0 else [1, 1])
        query = job.query(nodes)
        for peer, server in job.servers.items():
            opened = job.client.open(peer, answered(server, query), job.totals(nodes))
            np.testing.assert_array_equal(opened, job.plain(peer, nodes))
        if folder:
            stores = {name: HintStore(tmp_path / name) for name in stores}


def test_a_kept_hint_serves_the_very_table_it_was_made_of():
    rng, store = np.random.default_rng(8), HintStore(None)
    codes, offsets = table_of(rng, 50, [3, 5])
    binding = Job({"shop": (codes, offsets)}, stores={"shop": store}).servers["shop"].binding

    def server(codes, offsets, bounds=(GRAD, HESS)):
        setup = [np.array([len(codes), *bounds, 1], np.int64)]
        return make_server("lattice", setup, codes, offsets, threads=1, names=NAMES, store=store)

    one_code = codes.copy()
    one_code[17, 1] ^= 1
    others = {
        "one code": server(one_code, offsets),
        "rows": server(codes[np.r_[1, 0, 2:50]], offsets),
        "columns": server(np.ascontiguousarray(codes[:, ::-1]), np.array([0, 5, 8], np.int32)),
        "bins": server(codes, np.array([0, 3, 9], np.int32)),
        "bounds": server(codes, offsets, (GRAD, HESS - 1)),
        "fewer rows": server(codes[1:], offsets),
    }
    assert codes[0].tolist() != codes[1].tolist()
    assert server(codes, offsets).holds(binding)
    assert {name for name, other in others.items() if other.holds(binding)} == set()
    assert not server(codes, offsets).holds(bytes(BINDING_BYTES))
    for other in others.values():
        with pytest.raises(CryptoError, match="the hint that was offered is not of this table"):
            other.settle(b"", kept=binding)


def test_a_party_that_answers_a_kept_hint_with_another_is_refused():
    rng, stores = np.random.default_rng(9), {"client": HintStore(None), "shop": HintStore(None)}
    tables = {"shop": table_of(rng, 30, [3])}
    Job(tables, stores=stores)
    client = make_client("lattice", SumsBounds(30, GRAD, HESS), threads=1, store=stores["client"])
    client.settle(*client.offer({"shop": tables["shop"][1]}))
    with pytest.raises(CryptoError, match="the hint is not the one that was kept - in the hint of shop"):
        client.accept_hint("shop", [np.zeros(BINDING_BYTES, np.uint8)], tables["shop"][1])


def test_hints_of_two_seeds_are_not_offered_together():
    rng, store = np.random.default_rng(10), HintStore(None)
    shop, telco = table_of(rng, 30, [3]), table_of(rng, 30, [4])
    Job({"shop": shop}, stores={"client": store})
    Job({"telco": telco}, stores={"client": store}, seed=bytes(32))
    client = make_client("lattice", SumsBounds(30, GRAD, HESS), threads=1, store=store)
    assert client.offer({"shop": shop[1]})
    assert client.offer({"telco": telco[1]})
    assert client.offer({"shop": shop[1], "telco": telco[1]}) is None


def test_two_queries_of_the_same_node_share_no_words():
    """False alarm: 2 x 41 260 words alike by chance with probability below 2^-31 each, 4e-5 in all."""
    job, nodes = small_job()
    words, own = (np.concatenate([part[0], part[1]]) for part in job.query([nodes[0], nodes[1]]))
    again = job.query([nodes[0], nodes[1]])
    for one, other in ((words, np.concatenate([again[0][0], again[0][1]])), (own, np.concatenate([*again[1]]))):
        half = len(one) // 2
        assert not (one == other).any()
        assert not (one[:half] == one[half:]).any()  # two vectors of one query


FORKED = """
import hashlib, os, sys
import numpy as np
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client
client = make_client("lattice", SumsBounds(50, 1 << 16, 1 << 14), threads=1)
client.settle(bytes(32))
client.begin_tree(np.ones(50, np.int64), np.ones(50, np.int64))
rows, starts = np.arange(50, dtype=np.int32), np.array([0, 50], np.int32)
list(client.query(rows, starts))
reader, writer = os.pipe()
child = os.fork()
((words, own),) = client.query(rows, starts)
digest = hashlib.sha256(words.tobytes() + own.tobytes()).hexdigest()
if child == 0:
    os.write(writer, digest.encode())
    os._exit(0)
os.waitpid(child, 0)
print(digest, os.read(reader, 100).decode())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_encrypts_under_other_secrets():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=within(100), check=True
    )
    parent, child = done.stdout.split()
    assert len(parent) == len(child) == 64
    assert parent != child


def test_a_hint_that_gave_wrong_sums_is_not_used_again():
    job, nodes = small_job()
    answer = answered(job.servers["shop"], job.query(nodes))
    layouts = dict(job.client._offsets)
    assert job.client.offer(layouts) is not None
    with pytest.raises(CryptoError, match="do not add up"):
        job.client.open("shop", [answer[0], answer[1] ^ np.uint16(1 << 15)], job.totals(nodes))
    assert job.client.offer(layouts) is None


def test_bins_whose_sums_their_rows_cannot_have_are_refused_though_they_add_up():
    job, nodes = small_job()
    answer = answered(job.servers["shop"], job.query(nodes))
    totals, opened = job.totals(nodes), job.plain("shop", nodes)
    assert np.array_equal(np.add.reduceat(opened, job.client._offsets["shop"][:-1], axis=1)[0, 0], totals[0])
    parameters, (_, hess, grad) = job.client._parameters, job.client._fields
    much = 16 * parameters.digits - parameters.message_bits + grad.shift - 2  # a fourth of what a hessian's field holds
    assert hess.bound < 1 << grad.shift - hess.shift - 2
    moved = answer[1].copy().astype(np.int64)
    whole = sum(moved[0, :2, d].astype(object) << (16 * d) for d in range(moved.shape[2]))
    for slot, change in ((0, -(1 << much)), (1, 1 << much)):  # from one bin to the next
        value = (int(whole[slot]) + change) % (1 << 16 * moved.shape[2])
        moved[0, slot] = [value >> 16 * d & 0xFFFF for d in range(moved.shape[2])]
    with pytest.raises(CryptoError, match="do not add up"):
        job.client.open("shop", [answer[0], moved.astype(np.uint16)], totals)
