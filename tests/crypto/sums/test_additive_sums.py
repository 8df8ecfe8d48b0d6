import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.asking import answered, asked, begun
from treaty.crypto.payload import SumsBounds, to_words
from treaty.crypto.sums import additive_sums, bin_products
from treaty.crypto.sums.encrypted_sums import make_client, make_server
from treaty.errors import CryptoError

KEY_BITS = 256
CIPHERS = pytest.mark.parametrize("cipher", ["ou", "paillier"])


class Pair:
    """A client and one server over a table, by small keys unless `key_bits` says otherwise."""

    def __init__(
        self, codes, offsets, bounds=None, threads=1, key_bits=None, cipher="ou", test_bits=KEY_BITS, **server
    ):
        self.codes, self.offsets = codes, np.asarray(offsets, np.int32)
        bounds = bounds or SumsBounds(max(len(codes), 1), 1 << 10, 1 << 8)
        small = {} if key_bits else {"insecure_test_key_bits": test_bits}
        size = {"key_bits": key_bits} if key_bits else {}
        self.client = make_client(cipher, bounds, threads=threads, **size, **small)
        self.setup = self.client.setup()
        self.server = make_server(cipher, self.setup, codes, self.offsets, threads=threads, **small, **server)
        self.client.accept_hint("peer", next(self.server.hint()), self.offsets)

    def begin(self, grad, hess, rows):
        self.grad, self.hess, self.rows = grad, hess, np.asarray(rows, np.int32)
        self.ciphertexts = begun(self.client, grad, hess)
        self.server.begin_tree(self.ciphertexts, self.rows)

    def totals(self, positions, starts):
        nodes = [positions[a:b] for a, b in itertools.pairwise(starts)]
        return np.array([[self.grad[p].sum(), self.hess[p].sum(), len(p)] for p in nodes], np.int64).reshape(-1, 3)

    def plain(self, positions, starts):
        """The histogram in the clear."""
        sums = np.zeros((len(starts) - 1, self.offsets[-1], 3), np.int64)
        for node, (first, stop) in enumerate(itertools.pairwise(starts)):
            for p in positions[first:stop]:
                for f in range(self.codes.shape[1]):
                    slot = self.offsets[f] + self.codes[self.rows[p], f]
                    sums[node, slot] += (self.grad[p], self.hess[p], 1)
        return sums

    def opened(self, positions, starts):
        answer = answered(self.server, asked(self.client, positions, starts))
        return self.client.open("peer", answer, self.totals(positions, starts))


def level_of(node, nodes):
    """Positions and starts of a level from the node of each sampled row, `nodes` meaning none."""
    positions = np.argsort(node, kind="stable").astype(np.int32)
    counts = np.bincount(node, minlength=nodes + 1)[:nodes]
    return positions[: counts.sum()], np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def gradients(rng, rows, bounds=(1 << 10, 1 << 8)):
    return rng.integers(-bounds[0], bounds[0] + 1, rows), rng.integers(0, bounds[1] + 1, rows)


@CIPHERS
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 120), st.integers(0, 5), st.sampled_from([1, 2, 7]), st.integers(1, 3))
def test_opened_sums_equal_the_plain_histogram(cipher, seed, table_rows, columns, nodes, threads):
    rng = np.random.default_rng(seed)
    bins = rng.integers(1, 8, columns)
    codes = np.floor(rng.random((table_rows, columns)) ** rng.integers(1, 5) * bins).astype(np.uint8)
    if columns > 2:
        codes[:, 1] = np.minimum(codes[:, 0], bins[1] - 1)
    pair = Pair(codes, np.concatenate([[0], np.cumsum(bins)]), threads=threads, cipher=cipher)
    for _ in range(2):  # two trees
        sampled = rng.integers(1, table_rows + 1)
        pair.begin(*gradients(rng, sampled), rng.choice(table_rows, sampled, replace=False))
        for _ in range(2):  # two levels
            positions, starts = level_of(rng.integers(0, nodes + 1, sampled), nodes)
            assert np.array_equal(pair.opened(positions, starts), pair.plain(positions, starts))


TABLES = {
    "one row": (np.array([[1, 0]], np.uint8), [0, 3, 5]),
    "no columns": (np.zeros((30, 0), np.uint8), [0]),
    "one column": (np.arange(30, dtype=np.uint8)[:, None] % 4, [0, 5]),
    "constant columns": (np.zeros((30, 3), np.uint8), [0, 2, 3, 9]),
    "all missing": (np.full((30, 2), 3, np.uint8), [0, 4, 8]),
    "255 bins": (np.arange(30, dtype=np.uint8)[:, None] * 8 + 6, [0, 256]),
    "skewed": ((np.arange(30)[:, None] % [29, 28, 3] == 0).astype(np.uint8), [0, 3, 6, 9]),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("nodes", [1, 3])
def test_edge_tables_give_the_plain_histogram(name, nodes):
    codes, offsets = TABLES[name]
    rng = np.random.default_rng(0)
    pair = Pair(codes, offsets)
    pair.begin(*gradients(rng, len(codes)), np.arange(len(codes)))
    positions, starts = level_of(np.zeros(len(codes), int) + nodes - 1, nodes)  # all but the last node are empty
    assert np.array_equal(pair.opened(positions, starts), pair.plain(positions, starts))


@pytest.mark.parametrize(("nodes", "dtype"), [(254, np.uint8), (255, np.uint16), (700, np.uint16)])
def test_many_nodes_take_wider_slots(nodes, dtype):
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 4, (900, 3)).astype(np.uint8)
    pair = Pair(codes, [0, 5, 10, 15])
    pair.begin(*gradients(rng, 900), rng.permutation(900))
    positions, starts = level_of(rng.integers(0, nodes + 1, 900), nodes)
    assert asked(pair.client, positions, starts)[0].dtype == dtype
    assert np.array_equal(pair.opened(positions, starts), pair.plain(positions, starts))


@pytest.mark.parametrize("sign", [1, -1])
def test_largest_gradients_do_not_overflow(sign):
    codes = (np.arange(64)[:, None] % [2, 3]).astype(np.uint8)
    pair = Pair(codes, [0, 3, 7], SumsBounds(64, 1 << 18, 1 << 18))
    pair.begin(np.full(64, sign << 18), np.full(64, 1 << 18), np.arange(64))
    positions, starts = level_of(np.zeros(64, int), 1)
    sums = pair.opened(positions, starts)
    assert np.array_equal(sums, pair.plain(positions, starts))
    assert sums[0, 0].tolist() == [sign * 32 << 18, 32 << 18, 32]


@pytest.mark.slow
@CIPHERS
@pytest.mark.parametrize(("key_bits", "threads"), [(2048, 1), (3072, 2)])
def test_real_keys_give_the_plain_histogram(cipher, key_bits, threads):
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 9, (600, 4)).astype(np.uint8)
    pair = Pair(codes, [0, 10, 20, 30, 40], SumsBounds(600, 1 << 16, 1 << 14), threads, key_bits, cipher)
    pair.begin(*gradients(rng, 500, (1 << 16, 1 << 14)), rng.permutation(600)[:500])
    positions, starts = level_of(rng.integers(0, 3, 500), 2)
    assert np.array_equal(pair.opened(positions, starts), pair.plain(positions, starts))


def test_several_peers_are_opened_from_one_query():
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 3, (40, 2)).astype(np.uint8)
    pair = Pair(codes, [0, 4, 8])
    offsets = np.array([0, 6], np.int32)
    other = make_server("ou", pair.setup, codes[:, :1], offsets, threads=1, insecure_test_key_bits=KEY_BITS)
    pair.client.accept_hint("other", next(other.hint()), offsets)
    pair.begin(*gradients(rng, 40), np.arange(40))
    other.begin_tree(pair.ciphertexts, pair.rows)
    positions, starts = level_of(np.zeros(40, int), 1)
    query, totals = asked(pair.client, positions, starts), pair.totals(positions, starts)
    first = pair.client.open("peer", answered(pair.server, query), totals)
    second = pair.client.open("other", answered(other, query), totals)
    assert np.array_equal(first[0, :3], second[0, :3])


def test_answer_leaves_out_the_fullest_slot_and_empty_bins():
    codes = np.array([[0], [0], [0], [2]], np.uint8)
    pair = Pair(codes, [0, 4])
    pair.begin(np.array([1, 2, 3, 4]), np.array([1, 1, 1, 1]), np.arange(4))
    assert next(pair.server.hint())[0].tolist() == [0]
    answer = answered(pair.server, asked(pair.client, np.arange(4, dtype=np.int32), np.array([0, 4], np.int32)))
    assert answer[0].tolist() == [[0b100]]
    assert len(answer[1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 40, 100, 250])
@CIPHERS
def test_answers_made_in_pieces_give_the_plain_histogram(monkeypatch, cipher, most):
    """Pieces smaller than a block, a node and a level; the groups of k sums run across them."""
    rng = np.random.default_rng(11)
    monkeypatch.setattr(bin_products, "_BLOCK_COLUMNS", 3)
    monkeypatch.setattr(additive_sums, "_OPENED_AT_A_TIME", 5)
    codes = rng.integers(0, 9, (150, 8)).astype(np.uint8)
    pair = Pair(codes, np.arange(9) * 10, cipher=cipher, threads=2)
    monkeypatch.setattr(additive_sums, "PRODUCT_BYTES", most * 8 * pair.server._modulus.words)
    made = []
    products = additive_sums.bin_products
    monkeypatch.setattr(additive_sums, "bin_products", lambda *args: (made.append(products(*args)), made[-1])[1])
    pair.begin(*gradients(rng, 150), rng.permutation(150))
    positions, starts = level_of(rng.integers(0, 5, 150), 4)
    assert np.array_equal(pair.opened(positions, starts), pair.plain(positions, starts))
    assert max(len(places) for places, _ in made) <= max(most, 3 * 10)
    assert len(made) > 1


@pytest.mark.slow
def test_memory_of_an_answer_does_not_grow_with_the_columns(monkeypatch):
    """Products are made by 600; all at once they would take three times their size."""
    rng = np.random.default_rng(12)
    codes = rng.integers(0, 15, (400, 300)).astype(np.uint8)
    pair = Pair(codes, np.arange(301) * 16, key_bits=2048)
    pair.begin(*gradients(rng, 400), np.arange(400))
    positions, starts = level_of(rng.integers(0, 4, 400), 4)
    query, size = asked(pair.client, positions, starts), 8 * pair.server._modulus.words
    monkeypatch.setattr(additive_sums, "PRODUCT_BYTES", 600 * size)
    answered(pair.server, query)  # loads the kernels
    tracemalloc.start()
    answer = answered(pair.server, query)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    products = int(np.unpackbits(answer[0]).sum())
    assert products > 15 * 600
    assert peak < 0.4 * products * size
    assert np.array_equal(
        pair.client.open("peer", answer, pair.totals(positions, starts)), pair.plain(positions, starts)
    )


@pytest.mark.slow
def test_server_keeps_received_ciphertexts_without_copying():
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 16, (3000, 6)).astype(np.uint8)
    pair = Pair(codes, np.arange(7) * 17, SumsBounds(3000, 1 << 16, 1 << 14), 1, 2048)
    grad, hess = gradients(rng, 3000, (1 << 16, 1 << 14))
    payload = begun(pair.client, grad, hess)
    message = b"header!" + payload[0].tobytes()  # a read-only, unaligned view of a received message
    view = np.frombuffer(message, np.uint8)[7:].reshape(payload[0].shape)
    positions, starts = level_of(np.zeros(3000, int), 1)
    query = asked(pair.client, positions, starts)
    pair.server.begin_tree([view], np.arange(3000, dtype=np.int32))
    answered(pair.server, query)  # loads the kernels
    tracemalloc.start()
    pair.server.begin_tree([view], np.arange(3000, dtype=np.int32))
    answer = answered(pair.server, query)
    server_peak = tracemalloc.get_traced_memory()[1]
    pair.grad, pair.hess, pair.rows = grad, hess, np.arange(3000)
    sums = pair.client.open("peer", answer, pair.totals(positions, starts))
    assert np.array_equal(sums, pair.plain(positions, starts))
    tracemalloc.reset_peak()
    begun(pair.client, grad, hess)
    client_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert server_peak < 1.0 * view.nbytes
    assert client_peak < 2.5 * view.nbytes  # what it returns is one; a chunk's arrays weigh most of another here


@pytest.fixture(params=["ou", "paillier"])
def ready(request):
    codes = (np.arange(12)[:, None] % [3, 4]).astype(np.uint8)
    pair = Pair(codes, [0, 4, 9], cipher=request.param)
    pair.cipher = request.param
    pair.begin(*gradients(np.random.default_rng(10), 12), np.arange(12))
    pair.positions, pair.starts = level_of(np.arange(12) % 2, 2)
    return pair


BAD_SETUPS = {
    "missing array": lambda s: s[:1],
    "float key": lambda s: [s[0].astype(float), s[1]],
    "a number short": lambda s: [s[0][:-1], s[1]],
    "two bounds": lambda s: [s[0], s[1][:2]],
    "one statement more": lambda s: [s[0], np.concatenate([s[1], s[1][:1]])],
    "negative bound": lambda s: [s[0], changed(s[1], -1, 1)],
    "bounds beyond 62 bits": lambda s: [s[0], np.array([1 << 20, 1 << 45, 1 << 45, *s[1][3:]])],
    "even modulus": lambda s: [s[0] & ~np.uint64(1), s[1]],
}


@pytest.mark.parametrize("fault", BAD_SETUPS)
def test_malformed_setup_is_refused(ready, fault):
    setup = BAD_SETUPS[fault](ready.client.setup())
    with pytest.raises(CryptoError):
        make_server(ready.cipher, setup, ready.codes, ready.offsets, threads=1, insecure_test_key_bits=KEY_BITS)


BAD_TABLES = {
    "wrong type": lambda c, o: (c.astype(np.int32), o),
    "one dimension": lambda c, o: (c[:, 0], o),
    "offsets of another table": lambda c, o: (c, o[:-1]),
    "feature without slot": lambda c, o: (c, np.array([0, 0, 9], np.int32)),
    "code beyond its slots": lambda c, o: (c + np.uint8(2), o),
}


@pytest.mark.parametrize("fault", BAD_TABLES)
def test_malformed_table_is_refused(ready, fault):
    with pytest.raises(CryptoError, match="code"):
        make_server(
            ready.cipher,
            ready.setup,
            *BAD_TABLES[fault](ready.codes, ready.offsets),
            threads=1,
            insecure_test_key_bits=KEY_BITS,
        )


@pytest.mark.parametrize(
    "hint",
    [[], [np.array([0, 4, 4], np.int32)], [np.array([0, 4], np.int64)], [np.array([4, 4], np.int32)],
     [np.array([0, 9], np.int32)], [np.array([-1, 4], np.int32)]],
    ids=["empty", "length", "dtype", "other feature", "beyond", "negative"],
)  # fmt: skip
def test_malformed_hint_is_refused(ready, hint):
    with pytest.raises(CryptoError, match="hint of shop"):
        ready.client.accept_hint("shop", hint, ready.offsets)


def changed(array, value, at=0):
    out = array.copy()
    out[at] = value
    return out


BAD_TREES = {
    "two arrays": lambda p: [p[0], p[0]],
    "signed": lambda p: [p[0].astype(np.int64)],
    "too wide": lambda p: [np.concatenate([p[0], p[0]], axis=1)],
    "strided": lambda p: [np.repeat(p[0], 2, axis=1)[:, ::2]],
    "not below n": lambda p: [changed(p[0], np.uint64(2**64 - 1), 3)],
    "zero": lambda p: [changed(p[0], np.uint64(0), 11)],
}


@pytest.mark.parametrize("fault", BAD_TREES)
def test_malformed_ciphertexts_are_refused(ready, fault):
    with pytest.raises(CryptoError, match="tree"):
        ready.server.begin_tree(BAD_TREES[fault](ready.ciphertexts), ready.rows)


def test_pieces_of_few_rows_are_refused_for_each_costs_something(ready, monkeypatch):
    query, (whole,) = asked(ready.client, ready.positions, ready.starts), ready.ciphertexts
    monkeypatch.setattr(additive_sums, "LEAST_ROWS", 6)
    with pytest.raises(CryptoError, match="ciphertexts of 12 rows, got 5"):
        ready.server.begin_tree([whole[:5]], ready.rows[:5], None, 12)
    ready.server.begin_tree([whole[:6]], ready.rows[:6], None, 12)
    ready.server.add_rows([whole[6:]], ready.rows[6:])
    with pytest.raises(CryptoError, match="nodes of 12 rows, got 5"):
        ready.server.add([query[0][:5], query[1]])


def test_a_tree_s_ciphertexts_may_come_in_pieces_and_all_must_be_there(ready, monkeypatch):
    monkeypatch.setattr(additive_sums, "LEAST_ROWS", 1)
    query, (whole,) = asked(ready.client, ready.positions, ready.starts), ready.ciphertexts
    count = len(whole)
    ready.server.begin_tree([whole[:5]], ready.rows[:5], None, count)
    ready.server.add_rows([whole[5:-1]], ready.rows[5:-1])
    ready.server.add(query)
    with pytest.raises(CryptoError, match=f"ciphertexts of {len(whole)} rows, got {len(whole) - 1}"):
        ready.server.answer()
    ready.server.begin_tree([whole[:5]], ready.rows[:5], None, count)
    for rows in (None, ready.rows[5:-1]):
        with pytest.raises(CryptoError, match="the row of each ciphertext"):
            ready.server.add_rows([whole[5:]], rows)
    ready.server.add_rows([whole[5:]], ready.rows[5:])
    for more in (slice(0, 1), slice(0, 0)):
        with pytest.raises(CryptoError, match=f"ciphertexts of {len(whole)} rows, got"):
            ready.server.add_rows([whole[more]], ready.rows[more])
    totals = ready.totals(ready.positions, ready.starts)
    found = ready.client.open("peer", answered(ready.server, query), totals)
    np.testing.assert_array_equal(found, ready.plain(ready.positions, ready.starts))


def test_a_query_may_come_in_pieces_and_all_must_be_there(ready, monkeypatch):
    monkeypatch.setattr(additive_sums, "LEAST_ROWS", 1)
    query, totals = asked(ready.client, ready.positions, ready.starts), ready.totals(ready.positions, ready.starts)
    ready.server.add([query[0][:3], query[1]])
    with pytest.raises(CryptoError, match=r"the nodes of 12 rows, got 3 "):
        ready.server.answer()
    ready.server.add([query[0][:3], query[1]])
    for wrong in ([query[0], query[1]], [query[0][:0], query[1]], [query[0][3:], query[1] + 1]):
        with pytest.raises(CryptoError, match="the nodes of 12 rows"):
            ready.server.add(wrong)
    ready.server.add([query[0][3:], query[1]])
    found = ready.client.open("peer", ready.server.answer(), totals)
    np.testing.assert_array_equal(found, ready.plain(ready.positions, ready.starts))


@pytest.mark.parametrize("row", [-1, 12])
def test_rows_beyond_the_table_are_refused(ready, row):
    with pytest.raises(CryptoError, match="beyond the table"):
        ready.server.begin_tree(ready.ciphertexts, changed(ready.rows, row))


BAD_QUERIES = {
    "no count": lambda q: q[:1],
    "dtype": lambda q: [q[0].astype(np.int8), q[1]],
    "too short": lambda q: [q[0][:-1], q[1]],
    "unknown node": lambda q: [changed(q[0], 2), q[1]],
    "negative count": lambda q: [q[0], -q[1]],
    "count beyond the type": lambda q: [q[0], q[1] + 253],
}


@pytest.mark.parametrize("fault", BAD_QUERIES)
def test_malformed_query_is_refused(ready, fault):
    query = BAD_QUERIES[fault](asked(ready.client, ready.positions, ready.starts))
    with pytest.raises(CryptoError, match="query"):
        answered(ready.server, query)


BAD_ANSWERS = {
    "one array": lambda a: a[:1],
    "map of another level": lambda a: [a[0][:1], a[1]],
    "left-out slot sent": lambda a: [a[0] | np.uint8(1), a[1]],
    "slot beyond the last": lambda a: [a[0] | np.array([0, 128], np.uint8), a[1]],
    "too few ciphertexts": lambda a: [a[0], a[1][:-1]],
    "too many ciphertexts": lambda a: [a[0], np.concatenate([a[1], a[1][:1]])],
    "not below n": lambda a: [a[0], changed(a[1], np.uint64(2**64 - 1))],
    "zero": lambda a: [a[0], changed(a[1], np.uint64(0))],
    "no ciphertext": lambda a: [a[0], changed(a[1], to_words([12345], a[1].shape[1])[0])],
}


@pytest.mark.parametrize("fault", BAD_ANSWERS)
def test_malformed_answer_is_refused(ready, fault):
    answer = answered(ready.server, asked(ready.client, ready.positions, ready.starts))
    with pytest.raises(CryptoError):
        ready.client.open("peer", BAD_ANSWERS[fault](answer), ready.totals(ready.positions, ready.starts))


def test_bins_with_more_rows_than_their_node_are_refused(ready):
    answer = answered(ready.server, asked(ready.client, ready.positions, ready.starts))
    with pytest.raises(CryptoError, match="more rows than their node"):
        ready.client.open("peer", answer, np.zeros((2, 3), np.int64))


def test_client_refuses_what_it_cannot_ask(ready):
    fresh = make_client("ou", SumsBounds(4, 1, 1), threads=1, insecure_test_key_bits=KEY_BITS)
    with pytest.raises(CryptoError, match="before query"):
        asked(fresh, ready.positions, ready.starts)
    with pytest.raises(CryptoError, match="before an answer"):
        ready.client.open("stranger", [], np.zeros((2, 3), np.int64))
    with pytest.raises(CryptoError, match="not sampled"):
        asked(ready.client, changed(ready.positions, 12), ready.starts)
    with pytest.raises(CryptoError, match="at most 65534 nodes"):
        asked(ready.client, ready.positions, np.zeros(65_536, np.int32))
    with pytest.raises(CryptoError, match="int64 of one length"):
        begun(ready.client, np.zeros(3), np.zeros(3))
    asked(ready.client, ready.positions, ready.starts)
    with pytest.raises(CryptoError, match="totals"):
        ready.client.open("peer", [], np.zeros((1, 3), np.int64))


def test_server_refuses_a_query_before_its_tree(ready):
    server = make_server(
        ready.cipher, ready.setup, ready.codes, ready.offsets, threads=1, insecure_test_key_bits=KEY_BITS
    )
    with pytest.raises(CryptoError, match="before a query"):
        answered(server, asked(ready.client, ready.positions, ready.starts))


def test_more_rows_than_declared_are_refused():
    codes = np.zeros((5, 1), np.uint8)
    pair = Pair(codes, [0, 2], SumsBounds(4, 10, 10))
    with pytest.raises(CryptoError, match="at most 4 rows"):
        begun(pair.client, np.zeros(5, np.int64), np.zeros(5, np.int64))
    ciphertexts = begun(pair.client, np.zeros(4, np.int64), np.zeros(4, np.int64))[0]
    with pytest.raises(CryptoError, match="at most 4 rows"):
        pair.server.begin_tree([np.concatenate([ciphertexts, ciphertexts[:1]])], np.arange(5, dtype=np.int32))


def test_bounds_beyond_the_plaintext_are_refused_by_the_server():
    setup = make_client("ou", SumsBounds(4, 1, 1), threads=1, insecure_test_key_bits=KEY_BITS).setup()
    setup[1][:3] = 1 << 17, 1 << 42, 1 << 42
    with pytest.raises(CryptoError, match="exceeds the plaintext"):
        make_server(
            "ou", setup, np.zeros((1, 1), np.uint8), np.array([0, 2]), threads=1, insecure_test_key_bits=KEY_BITS
        )


def test_sums_that_cannot_fit_are_refused_before_a_key_is_made():
    with pytest.raises(CryptoError, match="lower fractional_bits"):
        make_client("ou", SumsBounds(1 << 20, 1 << 40, 1 << 40), threads=1, insecure_test_key_bits=KEY_BITS)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_sums_of_sampled_columns_are_right_whatever_columns_are_left_out(seed):
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 5, (60, 1))
    codes = np.hstack([base, base // 2, rng.integers(0, 3, (60, 1)), (base + 1) % 5]).astype(np.uint8)
    offsets = np.array([0, 5, 8, 11, 16], np.int32)
    chosen = np.flatnonzero(rng.random(4) < 0.5).astype(np.int32)
    pair = Pair(codes, offsets)
    pair.begin(*gradients(rng, 60), np.arange(60))
    pair.server.begin_tree(pair.ciphertexts, np.arange(60, dtype=np.int32), chosen)
    positions, starts = level_of(rng.integers(0, 3, 60), 2)
    got, expected = pair.opened(positions, starts), pair.plain(positions, starts)
    for feature in chosen:
        slots = slice(offsets[feature], offsets[feature + 1])
        assert np.array_equal(got[:, slots], expected[:, slots])
