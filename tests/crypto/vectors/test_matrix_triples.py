"""Matrix triples over Z_2^64, and bin sums made of them: exact, masked once, and refused where anything is amiss."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crypto.asking import answered, asked, begun
from treaty.crypto.lattice import store
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums import triple_sums
from treaty.crypto.sums.triple_sums import (
    TripleDealer,
    TripleSumsClient,
    TripleSumsServer,
    count_bits,
    masked_product,
    pack_rows,
    product_mask,
    selected_sums,
    subtract_matrix_mask,
    unpack_sums,
    vector_mask,
)
from treaty.errors import CryptoError

GRAD, HESS = 1 << 16, 1 << 14
NEVER = 1e-9  # false alarms of a test of uniformity


def table_of(rng, rows, sizes):
    draw = rng.random((rows, len(sizes))) ** 3
    return (draw * np.array(sizes)).astype(np.uint8), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def histogram(codes, offsets, grad, hess, rows):
    sums = np.zeros((offsets[-1], 3), np.int64)
    for f, (first, last) in enumerate(pairwise(offsets)):
        for k, values in enumerate((grad[rows], hess[rows], np.ones(len(rows), np.int64))):
            np.add.at(sums[first:last, k], codes[rows, f], values)
    return sums


class Job:
    """A client, its servers over tables (codes, offsets) and their dealer, set up."""

    def __init__(self, tables, bounds=None):
        self.tables, self.rows = tables, len(next(iter(tables.values()))[0])
        bounds = bounds or SumsBounds(self.rows, GRAD, HESS)
        self.dealer = TripleDealer(self.rows, {peer: int(offsets[-1]) for peer, (_, offsets) in tables.items()})
        self.dealt = {}
        self.client = TripleSumsClient(bounds, self.dealer.asker_seed, self.deal)
        self.servers = {
            peer: TripleSumsServer(
                bounds, codes, offsets, self.dealer.holder_seeds[peer], lambda first, count, peer=peer: self.dealt[peer]
            )
            for peer, (codes, offsets) in tables.items()
        }
        self.pieces = {peer: [piece[0] for piece in server.hint()] for peer, server in self.servers.items()}
        for peer, pieces in self.pieces.items():
            left = [self.client.accept_hint(peer, [piece], tables[peer][1]) for piece in pieces]
            assert left[-1] == 0
            assert all(left[:-1])

    def deal(self, first, count):
        self.dealt = self.dealer.deal(first, count)

    def start(self, grad, hess, features=None):
        self.grad, self.hess = grad, hess
        payload = begun(self.client, grad, hess)
        for server in self.servers.values():
            server.begin_tree(payload, None, features)

    def ask(self, nodes):
        starts = np.cumsum([0, *map(len, nodes)]).astype(np.int32)
        query = asked(self.client, np.concatenate(nodes).astype(np.int32), starts)
        totals = np.array([[self.grad[node].sum(), self.hess[node].sum(), len(node)] for node in nodes])
        return query, totals

    def sums(self, nodes, features=None):
        query, totals = self.ask(nodes)
        answers = {peer: answered(server, query) for peer, server in self.servers.items()}
        return {peer: self.client.open(peer, answer, totals, features) for peer, answer in answers.items()}


def gradients(rng, rows):
    grad, hess = rng.integers(-GRAD, GRAD + 1, rows), rng.integers(0, HESS + 1, rows)
    grad[::2] = np.where(rng.random(len(grad[::2])) < 0.5, -GRAD, GRAD)
    hess[::4] = HESS
    return grad, hess


def uniform(words):
    """Whether bytes look uniform: a chi-squared test that a uniform source fails once in 1/NEVER times."""
    counts = np.bincount(np.ascontiguousarray(words).view(np.uint8).ravel(), minlength=256)
    return stats.chisquare(counts).pvalue > NEVER


WORD = st.integers(0, 2**64 - 1)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 30), st.integers(1, 3))
def test_products_are_those_of_integers_modulo_2_64(data, slots, rows, vectors):
    def draw(*shape):
        values = data.draw(st.lists(WORD, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return np.array(values, np.uint64).reshape(shape)

    matrix, factors = draw(slots, rows), draw(vectors, rows)
    chosen = np.array(data.draw(st.lists(st.integers(0, slots - 1), max_size=4)), np.int64)
    expected = [[sum(map(int.__mul__, matrix[s].tolist(), v.tolist())) % 2**64 for s in chosen] for v in factors]
    got = masked_product(matrix, chosen, factors, threads=2)
    np.testing.assert_array_equal(got, np.array(expected, np.uint64).reshape(vectors, len(chosen)))


def test_threads_share_the_slots(monkeypatch):
    monkeypatch.setattr("treaty.crypto.sums.triple_sums._SMALL", 0)
    rng = np.random.default_rng(8)
    matrix, vectors = rng.integers(0, 2**64, (7, 30), np.uint64), rng.integers(0, 2**64, (2, 30), np.uint64)
    np.testing.assert_array_equal(masked_product(matrix, np.arange(7), vectors, threads=3), vectors @ matrix.T)
    codes, places = rng.integers(0, 4, (5, 30)).astype(np.uint8), 4 * np.arange(5)
    both = [selected_sums(codes, np.arange(5), places, 20, vectors, threads) for threads in (1, 3)]
    np.testing.assert_array_equal(*both)


def test_products_of_long_rows_are_summed_over_all_tiles():
    rng = np.random.default_rng(1)
    matrix = rng.integers(0, 2**64, (3, 5000), np.uint64)
    np.testing.assert_array_equal(
        masked_product(matrix, np.arange(3), matrix[:2]), [[(a * b).sum() for a in matrix] for b in matrix[:2]]
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_sums_of_selected_words_are_products_with_the_0_1_matrix(seed, rows, sizes):
    rng = np.random.default_rng(seed)
    codes, offsets = table_of(rng, rows, sizes)
    one_hot = np.concatenate([codes[:, f] == np.arange(size)[:, None] for f, size in enumerate(sizes)])
    words = rng.integers(0, 2**64, (4, rows), np.uint64)
    features, places = np.arange(len(sizes)), offsets[:-1].astype(np.int64)
    got = selected_sums(np.ascontiguousarray(codes.T), features, places, int(offsets[-1]), words, threads=2)
    np.testing.assert_array_equal(got, [[word[row].sum() for row in one_hot] for word in words])


def test_masks_undo_each_other_word_by_word():
    rng = np.random.default_rng(2)
    one_hot = (rng.random((6, 40)) < 0.3).astype(np.uint64)
    vector = pack_rows(*gradients(rng, 40), bits=7)
    seed, own = bytes(32), bytes([1]) * 32
    F = one_hot.copy()
    subtract_matrix_mask(F, seed, 0)
    B, A, C = one_hot - F, vector_mask(own, 3, 40), product_mask(own, "shop", 3, 6)
    every = np.arange(6)
    D = masked_product(B, every, A) - C  # as in the listing
    S = masked_product(one_hot, every, vector - A) + D
    np.testing.assert_array_equal(S + masked_product(F, every, A) + C, masked_product(one_hot, every, vector))
    assert int(C.min()) > 2**40  # all this wrapped around
    tail = one_hot[4:].copy()
    subtract_matrix_mask(tail, seed, 4, threads=2)
    np.testing.assert_array_equal(tail, F[4:])  # slots have masks of their own, in whatever pieces they are made


def test_rows_and_sums_are_packed_as_specified():
    bounds = SumsBounds(1000, GRAD, HESS)
    assert count_bits(bounds) == 11
    words = pack_rows(np.array([-3, 5]), np.array([2, 7]), 11)
    assert words.tolist() == [[2**64 - 3, 5], [2 * 2**11 + 1, 7 * 2**11 + 1]]
    assert unpack_sums(words.sum(axis=1)[None, :, None], 11).tolist() == [[[2, 9, 2]]]


@pytest.mark.parametrize("bounds", [SumsBounds(1 << 20, 1, 1 << 22), SumsBounds(1 << 30, 1, 4)])
def test_sums_beyond_63_bits_are_refused(bounds):
    with pytest.raises(CryptoError, match="exceed 63 bits"):
        TripleSumsClient(bounds, bytes(32), lambda first, count: None)
    with pytest.raises(CryptoError, match="exceed 63 bits"):
        count_bits(bounds)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 90), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 6)
)
def test_sums_are_exact_whatever_is_asked(seed, rows, sizes, nodes):
    rng = np.random.default_rng(seed)
    tables = {"shop": table_of(rng, rows, sizes), "telco": table_of(rng, rows, sizes[::-1])}
    job = Job(tables)
    for _ in range(2):  # two trees
        grad, hess = gradients(rng, rows)
        features = np.flatnonzero(rng.random(len(sizes)) < 0.6).astype(np.int32)
        job.start(grad, hess, features)
        of_rows = rng.integers(0, nodes + 1, rows)
        asked = [np.flatnonzero(of_rows == k) for k in range(nodes)]  # some of them empty, some rows in none
        found = job.sums(asked, features)
        for peer, (codes, offsets) in tables.items():
            for node, sums in zip(asked, found[peer], strict=True):
                for f, (first, last) in enumerate(pairwise(offsets)):
                    expected = histogram(codes, offsets, grad, hess, node)[first:last]
                    np.testing.assert_array_equal(sums[first:last], expected if f in features else 0 * expected)


def test_sums_at_the_bounds_are_exact():
    rows = 1000
    bounds = SumsBounds(rows, (1 << 61) // rows - 1, (1 << 41) // rows)
    job = Job({"shop": (np.zeros((rows, 1), np.uint8), np.array([0, 2], np.int32))}, bounds)
    for sign in (1, -1):
        job.start(np.full(rows, sign * bounds.grad_bound), np.full(rows, bounds.hess_bound))
        found = job.sums([np.arange(rows)])["shop"][0, 0]
        assert found.tolist() == [sign * rows * bounds.grad_bound, rows * bounds.hess_bound, rows]


def test_a_dealer_who_deals_ahead_gives_everybody_what_belongs_together():
    rng = np.random.default_rng(3)
    job = Job({"shop": table_of(rng, 50, [4, 3])})
    job.dealer.prepare()
    job.start(*gradients(rng, 50))
    for nodes in (1, 7, 20, 3):  # within the stock, up to its end and beyond
        asked = np.array_split(rng.permutation(50), nodes)
        found = job.sums(asked)["shop"]
        np.testing.assert_array_equal(
            found, [histogram(*job.tables["shop"], job.grad, job.hess, node) for node in asked]
        )


def test_a_party_without_columns_takes_part():
    rng = np.random.default_rng(4)
    job = Job({"shop": table_of(rng, 20, [3]), "empty": (np.empty((20, 0), np.uint8), np.zeros(1, np.int32))})
    job.start(*gradients(rng, 20))
    assert job.sums([np.arange(20)])["empty"].shape == (1, 0, 3)


def test_masked_bins_may_come_in_pieces_and_lie_in_a_file(monkeypatch):
    monkeypatch.setattr(triple_sums, "_HINT_BYTES", 8 * 30 * 2)
    monkeypatch.setattr(store, "IN_MEMORY", 0)
    rng = np.random.default_rng(5)
    job = Job({"shop": table_of(rng, 30, [4, 3])})
    assert [len(piece) for piece in job.pieces["shop"]] == [2, 2, 2, 1]
    job.start(*gradients(rng, 30))
    found = job.sums([np.arange(30)])["shop"][0]
    np.testing.assert_array_equal(found, histogram(*job.tables["shop"], job.grad, job.hess, np.arange(30)))


# ---------------------------------------------------------------- masks serve once


def small_job(seed=6):
    rng = np.random.default_rng(seed)
    job = Job({"shop": table_of(rng, 200, [6, 5])})
    job.start(*gradients(rng, 200))
    return job


def test_a_mask_that_was_used_aborts_the_asker():
    job = small_job()
    job.sums([np.arange(100)])
    job.client._next = 0  # as if state had been restored from an older copy
    with pytest.raises(CryptoError, match="expected a new nonce"):
        asked(job.client, np.arange(200, dtype=np.int32), np.array([0, 200], np.int32))


def test_a_server_answers_no_vector_twice_and_skips_none():
    job = small_job()
    query, _ = job.ask([np.arange(100), np.arange(100, 200)])
    later, _ = job.ask([np.arange(50)])
    with pytest.raises(CryptoError, match="expected vector 0, got 2: a mask may be used only once"):
        answered(job.servers["shop"], later)
    job.dealt = {"shop": np.zeros((2, 2, 11), np.uint64)}
    answered(job.servers["shop"], query)
    with pytest.raises(CryptoError, match="expected vector 2, got 0: a mask may be used only once"):
        answered(job.servers["shop"], query)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 1), (2, 0)])
def test_a_dealer_deals_for_the_next_vectors_alone(first, count):
    dealer = TripleDealer(10, {"shop": 3})
    dealer.deal(0, 2)
    with pytest.raises(CryptoError, match=f"deal for vector 2, and one at least, got {first} and {count}"):
        dealer.deal(first, count)


def test_two_vectors_under_one_mask_would_show_their_difference():
    """Why all three refuse: what a server would see if they did not."""
    job = small_job()
    first, _ = job.ask([np.arange(100)])
    job.client._next, job.client._used, job.dealer._next = 0, type(job.client._used)(), 0
    second, _ = job.ask([np.arange(50)])
    lost = (first[0] - second[0])[0, 1] != 0
    assert np.flatnonzero(lost).tolist() == list(range(50, 100))


def test_equal_nodes_look_different_and_keys_differ_between_jobs():
    job, other = small_job(), small_job()
    (one, _), (two, _) = job.ask([np.arange(100)]), job.ask([np.arange(100)])
    assert not (one[0] == two[0]).any()
    assert not (job.pieces["shop"][0] == other.pieces["shop"][0]).any()
    assert len({job.dealer.asker_seed, job.dealer.holder_seeds["shop"], other.dealer.asker_seed}) == 3


# ---------------------------------------------------------------- what each side sees


def test_all_that_travels_is_uniform():
    rng = np.random.default_rng(7)
    job = Job({"shop": table_of(rng, 2000, [6, 5])})
    job.start(np.zeros(2000, np.int64), np.zeros(2000, np.int64))
    query, _ = job.ask([np.arange(2000), np.arange(0)])
    assert uniform(job.pieces["shop"][0])  # to the active party
    assert uniform(query[0][0])  # to the passive party, of all rows and of none
    assert uniform(query[0][1])
    answers, shares = [], []
    for _ in range(150):
        query, _ = job.ask([np.arange(1000)])
        job.servers["shop"]._next = int(query[1][0])
        answers.append(answered(job.servers["shop"], query)[0])
        shares.append(job.dealt["shop"])
    assert uniform(np.stack(shares))  # to the passive party
    assert uniform(np.stack(answers))  # to the active party, who alone can open them


def test_shares_tell_nothing_of_the_products_that_they_are_shares_of():
    """A holder knows B: with B A itself it would have as many equations about A as it has bins."""
    dealer = TripleDealer(400, {"shop": 50, "telco": 50})
    dealt = dealer.deal(0, 6)
    vectors = np.concatenate([vector_mask(dealer.asker_seed, k, 400) for k in range(6)])
    hidden = {}
    for holder, shares in dealt.items():
        minus_b = np.zeros((50, 400), np.uint64)
        subtract_matrix_mask(minus_b, dealer.holder_seeds[holder], 0)
        hidden[holder] = shares.reshape(12, 50) + masked_product(minus_b, np.arange(50), vectors)  # D - B A = -C
        assert uniform(hidden[holder])
    assert uniform(hidden["shop"] - hidden["telco"])


@pytest.mark.parametrize("node", [np.arange(200), np.array([17]), np.arange(0)], ids=["all", "one row", "none"])
def test_a_query_has_the_same_shape_whatever_the_node(node):
    job = small_job()
    query, _ = job.ask([node])
    assert [(array.dtype.name, array.shape) for array in query] == [("uint64", (1, 2, 200)), ("int64", (1,))]
    assert [array.shape for array in answered(job.servers["shop"], query)] == [(1, 2, 11)]


# ---------------------------------------------------------------- faults


def test_an_answer_from_wrong_seeds_ends_the_job():
    job = small_job()
    query, totals = job.ask([np.arange(100)])
    job.dealt = {"shop": job.dealt["shop"] + np.uint64(1)}
    with pytest.raises(CryptoError, match="do not add up to their node"):
        job.client.open("shop", answered(job.servers["shop"], query), totals)


@pytest.mark.parametrize("word", range(22))
def test_an_answer_with_one_wrong_word_ends_the_job(word):
    job = small_job()
    query, totals = job.ask([np.arange(100)])
    (answer,) = answered(job.servers["shop"], query)
    answer.reshape(-1)[word] += np.uint64(1)
    with pytest.raises(CryptoError, match="the job cannot continue"):
        job.client.open("shop", [answer], totals)


def test_numbers_that_no_rows_can_have_end_the_job():
    job = small_job()
    query, totals = job.ask([np.arange(100)])
    (answer,) = answered(job.servers["shop"], query)
    answer[0, 0, 0] += np.uint64(1 << 40)  # the sums still add up
    answer[0, 0, 1] -= np.uint64(1 << 40)
    answer[0, 0, 6] += np.uint64(1 << 40)
    answer[0, 0, 7] -= np.uint64(1 << 40)
    with pytest.raises(CryptoError, match="the job cannot continue"):
        job.client.open("shop", [answer], totals)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: [a[:, :1]], r"expected uint64 \(1, 2, 11\)"),
        (lambda a: [a.astype(np.int64)], "expected uint64"),
        (lambda a: [a, a], "expected 1 arrays, got 2"),
        (lambda a: [], "expected 1 arrays, got 0"),
    ],
    ids=["shape", "type", "too many", "too few"],
)
def test_a_malformed_answer_is_refused(change, match):
    job = small_job()
    query, totals = job.ask([np.arange(100)])
    with pytest.raises(CryptoError, match=match):
        job.client.open("shop", change(answered(job.servers["shop"], query)[0]), totals)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q: [q[0][:, :, :-1].copy(), q[1]], r"expected uint64 \(None, 2, 200\)"),
        (lambda q: [q[0][:0], q[1]], "expected one node at least"),
        (lambda q: [q[0]], "expected 2 arrays, got 1"),
        (lambda q: [q[0], np.zeros(2, np.int64)], "expected int64"),
    ],
    ids=["short", "no node", "no number", "two numbers"],
)
def test_a_malformed_query_is_refused(change, match):
    job = small_job()
    query, _ = job.ask([np.arange(100)])
    with pytest.raises(CryptoError, match=match):
        answered(job.servers["shop"], change(query))


@pytest.mark.parametrize(
    ("hint", "match"),
    [
        (np.zeros((4, 10), np.uint64), "expected at most 3 slots more"),
        (np.zeros((0, 10), np.uint64), "and one at least, got 0"),
        (np.zeros((3, 9), np.uint64), r"expected uint64 \(None, 10\)"),
        (np.zeros((3, 10), np.float64), "expected uint64"),
    ],
)
def test_malformed_masked_bins_are_refused(hint, match):
    client = TripleSumsClient(SumsBounds(10, GRAD, HESS), bytes(32), lambda first, count: None)
    with pytest.raises(CryptoError, match=match):
        client.accept_hint("shop", [hint], np.array([0, 3], np.int32))


def test_calls_out_of_order_are_refused():
    job = small_job()
    job.servers["shop"].end_tree()
    query, totals = job.ask([np.arange(100)])
    with pytest.raises(CryptoError, match="expected begin_tree before a query"):
        answered(job.servers["shop"], query)
    with pytest.raises(CryptoError, match="expected the masked bins and a query before an answer of telco"):
        job.client.open("telco", [], totals)
    with pytest.raises(CryptoError, match=r"expected totals of shape \(1, 3\)"):
        job.client.open("shop", [], totals[:0])
    fresh = TripleSumsClient(SumsBounds(10, GRAD, HESS), bytes(32), job.deal)
    with pytest.raises(CryptoError, match="expected begin_tree before query"):
        asked(fresh, np.arange(3, dtype=np.int32), np.array([0, 3], np.int32))


@pytest.mark.parametrize(
    ("grad", "hess", "match"),
    [
        (np.full(200, GRAD + 1), np.zeros(200, np.int64), "a gradient exceeds"),
        (np.zeros(200, np.int64), np.full(200, -1), "a hessian is negative"),
        (np.zeros(199, np.int64), np.zeros(199, np.int64), "the derivatives of 200 rows, got 199"),
    ],
)
def test_derivatives_beyond_their_bounds_are_refused(grad, hess, match):
    with pytest.raises(CryptoError, match=match):
        small_job().client.begin_tree(grad, hess)


def test_a_server_refuses_tables_that_do_not_fit():
    bounds, offsets = SumsBounds(4, GRAD, HESS), np.array([0, 2], np.int32)
    with pytest.raises(CryptoError, match="expected 4 rows, got 3"):
        TripleSumsServer(bounds, np.zeros((3, 1), np.uint8), offsets, bytes(32), lambda first, count: None)
    with pytest.raises(CryptoError, match="beyond its feature's slots"):
        TripleSumsServer(bounds, np.full((4, 1), 2, np.uint8), offsets, bytes(32), lambda first, count: None)
    with pytest.raises(CryptoError, match="expected unsigned codes"):
        TripleSumsServer(bounds, np.zeros((4, 2), np.uint8), offsets, bytes(32), lambda first, count: None)
