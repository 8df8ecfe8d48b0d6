import numpy as np
import pytest
from scipy import stats

from crypto.sharing.hidden_trees import LAYOUT, Tree, random_codes
from crypto.sharing.servers import FALSE_ALARM, MALFORMED, Play
from treaty.crypto.sharing.additive_routing import (
    MaskedRows,
    deal_leaves,
    deal_level,
    deal_mask,
    leaf_values,
    mask_rows,
    numbers_of_level,
    open_bits,
    open_integers,
    route_level,
    share_integers,
)
from treaty.errors import CryptoError

NONE = np.empty(0, np.uint64)
BITS = LAYOUT.bits


class TwoServers:
    """Two servers and their dealer, and all that went between the servers."""

    def __init__(self, codes, bits=BITS):
        self.bits = bits
        shared = share_integers(LAYOUT.encode_rows(codes))
        self.mask, keys = deal_mask(*shared.shape[1:])
        self.rounds = []
        self.rows = [rows for rows, _ in self.play([mask_rows(i, shared[i], keys[i]) for i in range(2)])]

    def play(self, programs):
        play = Play(programs)
        self.rounds += play.rounds
        return play.results

    def level(self, weights, thresholds, paths):
        """Shares of sides and of paths; weights (trees, K, D)."""
        weights, thresholds = share_integers(weights), share_integers(thresholds)
        keys, corrections = deal_level(self.mask, *weights.shape[1:3], self.bits)
        assert corrections.shape == (numbers_of_level(len(self.mask), *weights.shape[1:3], self.bits),)
        dealt = zip(keys, (NONE, corrections), strict=True)
        programs = [
            route_level(i, self.rows[i], weights[i], thresholds[i], paths[i], self.bits, *of)
            for i, of in enumerate(dealt)
        ]
        return tuple(np.stack(parts) for parts in zip(*self.play(programs), strict=True))

    def values(self, paths, values):
        values = share_integers(values)
        keys, corrections = deal_leaves(paths.shape[-1], *values.shape[1:])
        programs = [leaf_values(i, paths[i], values[i], keys[i], (NONE, corrections)[i]) for i in range(2)]
        return np.stack(self.play(programs))


def routed(trees, codes, bits=BITS):
    """All trees go down together; return the servers, shares of sides by level, and of paths."""
    servers, paths = TwoServers(codes, bits), (None, None)
    sides = []
    for level in range(trees[0].depth):
        weights, thresholds = (np.stack(part) for part in zip(*(tree.encoded(level) for tree in trees), strict=True))
        left, paths = servers.level(weights, thresholds, paths)
        sides.append(left)
    return servers, sides, paths


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("rows", [0, 1, 64, 150])
@pytest.mark.parametrize("trees", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_rows_go_where_the_plain_walk_sends_them(depth, trees, rows):
    rng = np.random.default_rng([depth, trees, rows])
    grown, codes = [Tree(depth, rng) for _ in range(trees)], random_codes(rows, rng)
    servers, sides, paths = routed(grown, codes)
    walked = [tree.walk(codes) for tree in grown]
    for level, left in enumerate(sides):
        assert np.array_equal(open_bits(left), np.stack([of[level] for of, _ in walked]))
    leaves = np.stack([leaf for _, leaf in walked])
    assert np.array_equal(open_integers(paths), np.arange(1 << depth)[:, None] == leaves[:, None])
    values = np.stack([tree.values for tree in grown])
    opened = open_integers(servers.values(paths, values))
    assert np.array_equal(opened, np.take_along_axis(values, leaves, axis=1))
    together = servers.values(
        paths.reshape(2, 1, trees << depth, rows), values.reshape(1, -1)
    )  # leaves of all as those of one
    assert np.array_equal(open_integers(together)[0], opened.sum(axis=0))


@pytest.mark.parametrize("bits", [9, 15, 64])
def test_longer_comparisons_give_the_same(bits):
    rng = np.random.default_rng(bits)
    tree, codes = Tree(2, rng), random_codes(70, rng)
    _, sides, _ = routed([tree], codes, bits)
    assert np.array_equal([open_bits(left)[0] for left in sides], tree.walk(codes)[0])


def test_integers_of_63_bits_and_sign_are_opened():
    values = np.array([0, -1, 2**63 - 1, -(2**63), 5], np.int64)
    assert np.array_equal(open_integers(share_integers(values)), values)


def test_rounds_and_bytes_are_those_of_the_text():
    rows, columns, nodes = 640, LAYOUT.columns, 4
    rng = np.random.default_rng(1)
    servers, _, paths = routed([Tree(2, rng)], random_codes(rows, rng))
    before = len(servers.rounds)
    servers.level(np.zeros((1, nodes, columns), np.int64), np.zeros((1, nodes), np.int64), paths)
    sent = servers.rounds[before:]
    assert len(sent) == 3 + 3  # three bits below the sign: their products, and 2 joinings
    compared = 3 + 2 + 2
    each = sum(messages[0, 1].nbytes for messages in sent)
    assert each == rows * (2 * (nodes - 1) * 8) + nodes * columns * 8 + (compared + 1) * rows // 8
    assert numbers_of_level(rows, 1, nodes, BITS) == rows * (2 * nodes + 1) + (3 + 1 + 1) * rows // 64


# ---------------------------------------------------------------- hidden


@pytest.mark.parametrize("server", [0, 1])
def test_what_a_server_sees_is_uniform_for_any_rows_and_splits(server):
    """Bytes of all messages between servers, of its shares and of what it is dealt, for two tables and trees."""
    tables = []
    for seed, code in ((1, 0), (2, 2)):
        rng = np.random.default_rng(seed)
        tree, codes = Tree(3, rng), np.full((6400, len(LAYOUT.n_bins)), 0, np.uint8)
        codes[:, [0, 1, 4]] = code
        servers, sides, paths = routed([tree], codes)
        servers.values(paths, tree.values[None])
        seen = np.concatenate([sent[1 - server, server].reshape(-1) for sent in servers.rounds])
        tables.append(np.bincount(seen.view(np.uint8), minlength=256))
        assert stats.chisquare(tables[-1]).pvalue > FALSE_ALARM
        for message in (sent[1 - server, server] for sent in servers.rounds):  # none of a fixed size stands out
            assert stats.binomtest(int(np.bitwise_count(message).sum()), 64 * message.size).pvalue > FALSE_ALARM
        own = np.bincount(np.ascontiguousarray(paths[server]).view(np.uint8).reshape(-1), minlength=256)
        assert stats.chisquare(own).pvalue > FALSE_ALARM
        for left in sides:
            assert stats.binomtest(int(left[server].sum()), left[server].size).pvalue > FALSE_ALARM
    assert stats.chi2_contingency(np.stack(tables)).pvalue > FALSE_ALARM


def test_what_servers_open_to_each_other_is_uniform():
    """A server sees what it has sent, too: both messages of a round together are numbers and bits under fresh masks."""
    rng = np.random.default_rng(3)
    tree, codes = Tree(3, rng), np.zeros((6400, len(LAYOUT.n_bins)), np.uint8)
    servers, _, paths = routed([tree], codes)
    servers.values(paths, tree.values[None])
    assert len(servers.rounds) == 1 + 5 + 6 + 6 + 1
    for sent in servers.rounds:
        for together in (sent[0, 1] + sent[1, 0], sent[0, 1] ^ sent[1, 0]):
            counts = np.bincount(np.ascontiguousarray(together).view(np.uint8).reshape(-1), minlength=256)
            assert stats.chisquare(counts).pvalue > FALSE_ALARM


@pytest.mark.parametrize("value", [0, 5, -1])
def test_either_share_of_a_number_is_uniform(value):
    for shares in share_integers(np.full(20_000, value)):
        assert stats.chisquare(np.bincount(shares.view(np.uint8), minlength=256)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("nodes", [1, 4])
def test_what_server_1_is_dealt_is_uniform(nodes):
    mask, keys = deal_mask(6400, LAYOUT.columns)
    _, corrections = deal_level(mask, 1, nodes, BITS)
    _, of_leaves = deal_leaves(6400, 1, nodes)
    for numbers in (corrections, of_leaves):
        assert stats.chisquare(np.bincount(numbers.view(np.uint8), minlength=256)).pvalue > FALSE_ALARM
    assert keys[0] != keys[1]


def test_two_dealings_have_nothing_in_common():
    mask, _ = deal_mask(50, LAYOUT.columns)
    first, second = deal_level(mask, 1, 2, BITS), deal_level(mask, 1, 2, BITS)
    assert len({*first[0], *second[0]}) == 4
    assert not np.intersect1d(first[1], second[1]).size


# ---------------------------------------------------------------- refused


def level_of(own=0, **other):
    mask, keys = deal_mask(5, LAYOUT.columns)
    keys, corrections = deal_level(mask, 2, 2, BITS)
    given = {
        "rows": MaskedRows(np.zeros_like(mask), mask),
        "weights": np.zeros((2, 2, LAYOUT.columns), np.uint64),
        "thresholds": np.zeros((2, 2), np.uint64),
        "paths": np.zeros((2, 2, 5), np.uint64),
        "corrections": corrections if own else NONE,
    } | other
    return route_level(
        own, given["rows"], given["weights"], given["thresholds"], given["paths"], BITS, keys[own], given["corrections"]
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"weights": np.zeros((2, LAYOUT.columns), np.uint64)}, r"weights of splits \(trees, K, D\)"),
        ({"weights": np.zeros((2, 2, 3), np.uint64)}, r"expected rows uint64 \(5, 3\)"),
        ({"thresholds": np.zeros((2, 3), np.uint64)}, "thresholds"),
        ({"thresholds": np.zeros((2, 2))}, "thresholds.*float64"),
        ({"paths": np.zeros((2, 2, 4), np.uint64)}, "paths"),
        ({"paths": np.zeros((2, 1, 5), np.uint64)}, "paths"),
        ({"corrections": np.zeros(7, np.uint64)}, "the dealer's numbers"),
    ],
    ids=["flat weights", "few columns", "thresholds", "float", "rows of paths", "nodes of paths", "dealt"],
)
@pytest.mark.parametrize("own", [0, 1])
def test_shapes_that_do_not_belong_together_are_refused(own, other, words):
    with pytest.raises(CryptoError, match=words):
        next(level_of(own, **other))


@pytest.mark.parametrize("fault", ["no message", "one row less", "signed", "bytes"])
@pytest.mark.parametrize("round_", range(6))
def test_malformed_messages_in_any_round_are_refused(round_, fault):
    program = level_of()
    mine = next(program)[1]
    for _ in range(round_):
        mine = program.send({1: np.zeros_like(mine)})[1]
    array = MALFORMED[fault](mine)
    with pytest.raises(CryptoError, match="expected"):
        program.send({} if array is None else {1: array})


def test_leaf_values_of_other_leaves_are_refused():
    keys, corrections = deal_leaves(5, 1, 4)
    paths, values = np.zeros((1, 4, 5), np.uint64), np.zeros((1, 4), np.uint64)
    with pytest.raises(CryptoError, match="leaf values"):
        next(leaf_values(1, paths, values[:, :3], keys[1], corrections))
    with pytest.raises(CryptoError, match="the dealer's numbers"):
        next(leaf_values(1, paths, values, keys[1], corrections[:4]))


def test_shares_that_are_no_bits_are_refused():
    with pytest.raises(CryptoError, match="shares of bits"):
        open_bits(np.array([[0, 1], [2, 1]], np.uint8))
