import json
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from crypto.sharing.hidden_trees import LAYOUT, Tree, random_codes
from crypto.sharing.servers import FALSE_ALARM, Play, prepared_for, rounds_of
from treaty.crypto.sharing import shamir as field
from treaty.crypto.sharing.shamir import make_shares
from treaty.crypto.sharing.shamir_routing import (
    ServerSetting,
    leaf_values,
    open_bits,
    open_integers,
    route_level,
    route_shown,
    share_integers,
)
from treaty.errors import CryptoError
from treaty.systems.fedxgb.pieces import Layout


def setting_of(servers, degree, layout=LAYOUT):
    return ServerSetting(servers=servers, degree=degree, bits=layout.bits)


def play_level(setting, rows, weights, thresholds, paths=None, tamper=lambda number, sent: None, threads=1):
    """Share a level's splits and play it; return shares of sides and of paths, and the play."""
    prepared = prepared_for(setting, rows.shape[1] * int(np.prod(weights.shape[:-2])))
    weights, thresholds = share_integers(setting, weights), share_integers(setting, thresholds)
    programs = [
        route_level(
            setting,
            i,
            rows[i],
            weights[i],
            thresholds[i],
            None if paths is None else paths[i],
            prepared[i],
            threads,
        )
        for i in range(setting.servers)
    ]
    play = Play(programs, tamper)
    return *(np.stack(parts) for parts in zip(*play.results, strict=True)), play


def predicted(setting, paths, values):
    values = share_integers(setting, values)
    return np.stack(Play([leaf_values(setting, i, paths[i], values[i]) for i in range(setting.servers)]).results)


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("rows", [0, 1, 60])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("servers", [(3, 1), (5, 2), (5, 1), (10, 4)], ids=str)
def test_rows_go_where_the_plain_walk_sends_them(servers, depth, rows):
    setting, rng = setting_of(*servers), np.random.default_rng([*servers, depth, rows])
    tree, codes = Tree(depth, rng), random_codes(rows, rng)
    sides, leaves = tree.walk(codes)
    shared, paths = share_integers(setting, LAYOUT.encode_rows(codes)), None
    for level in range(depth):
        left, paths, _ = play_level(setting, shared, *tree.encoded(level), paths)
        assert np.array_equal(open_bits(setting, left), sides[level])
    assert np.array_equal(open_bits(setting, paths), np.arange(1 << depth)[:, None] == leaves)
    assert np.array_equal(open_integers(setting, predicted(setting, paths, tree.values)), tree.values[leaves])


def test_every_kind_of_split_and_value_was_walked():
    """The random trees above have numeric, categorical and dummy splits and rows missing what they split on."""
    seen = set()
    for servers in ([3, 1], [5, 2], [5, 1], [10, 4]):
        rng = np.random.default_rng([*servers, 3, 60])
        tree, codes = Tree(3, rng), random_codes(60, rng)
        for feature in np.concatenate(tree.features):
            kind = "dummy" if feature < 0 else "categorical" if LAYOUT.categorical[feature] else "numeric"
            seen |= {kind} | (
                {"missing"} if feature >= 0 and (codes[:, feature] == LAYOUT.n_bins[feature]).any() else set()
            )
    assert seen == {"dummy", "categorical", "numeric", "missing"}


def test_many_trees_go_in_the_rounds_of_one_and_only_their_sum_is_opened():
    setting, rng = setting_of(3, 1), np.random.default_rng(5)
    trees, codes = [Tree(3, rng) for _ in range(4)], random_codes(50, rng)
    walked = [tree.walk(codes) for tree in trees]
    shared, paths = share_integers(setting, LAYOUT.encode_rows(codes)), None
    for level in range(3):
        weights, thresholds = (np.stack(parts) for parts in zip(*(t.encoded(level) for t in trees), strict=True))
        left, paths, play = play_level(setting, shared, weights, thresholds, paths, threads=2)
        assert left.shape == (3, 4, 50, 2)
        assert np.array_equal(open_bits(setting, left), [sides[level] for sides, _ in walked])
        assert len(play.rounds) == (3 if level else 1) + rounds_of(setting)
    values = np.concatenate([tree.values for tree in trees])
    found = open_integers(setting, predicted(setting, paths.reshape(3, -1, 50, 2), values))
    assert np.array_equal(found, sum(t.values[leaves] for t, (_, leaves) in zip(trees, walked, strict=True)))


def test_rows_go_right_where_only_thresholds_are_hidden():
    layout = Layout(n_bins=[8, 3, 255], categorical=[False] * 3, may_miss=[True, False, True])
    setting, rng = ServerSetting(servers=3, degree=1, bits=layout.shown_bits), np.random.default_rng(3)
    tree, codes = Tree(3, rng, layout), random_codes(200, rng, layout)
    sides, node = tree.walk(codes)[0], np.zeros(200, int)
    for level in range(3):
        features, bins = tree.features[level], tree.left_bins[level]
        missing_left = bins[np.arange(1 << level), np.array(layout.n_bins)[features]]
        values = layout.encode_shown(codes, np.maximum(features, 0)[node], missing_left[node] & (features >= 0)[node])
        values = share_integers(setting, values)
        thresholds = [layout.shown_threshold(f, left) for f, left in zip(features, bins, strict=True)]
        thresholds, prepared = share_integers(setting, np.array(thresholds)), prepared_for(setting, 200)
        play = Play([route_shown(setting, i, values[i], thresholds[i], node, prepared[i]) for i in range(3)])
        assert all(np.array_equal(found, sides[level]) for found in play.results)
        assert len(play.rounds) == rounds_of(setting) + 1
        node = 2 * node + 1 - sides[level]


REFERENCE = """
import json, sys
rows, weights, thresholds, values = json.load(sys.stdin)
sys.argv = ["reference", "--no-log"]  # one party, no sockets
from mpyc.runtime import mpc
number = mpc.SecInt(48)
mpc.run(mpc.start())
weights = [[number(w) for w in split] for split in weights]
found = []
for row in rows:
    row = [number(x) for x in row]
    paths = [number(1)]
    while len(paths) < len(values):
        first = len(paths) - 1
        left = [mpc.in_prod(row, weights[first + k]) < thresholds[first + k] for k in range(len(paths))]
        paths = [child for p, b in zip(paths, left) for child in (p * b, p - p * b)]
    found.append(mpc.in_prod(paths, [number(value) for value in values]))
json.dump([int(value) for value in mpc.run(mpc.output(found))], sys.stdout)
"""


def test_values_are_those_of_mpyc():
    """Another implementation, comparing in every node."""
    rng, setting = np.random.default_rng(8), setting_of(3, 1)
    tree, codes = Tree(2, rng), random_codes(20, rng)
    z = LAYOUT.encode_rows(codes)
    shared, paths = share_integers(setting, z), None
    for level in range(2):
        _, paths, _ = play_level(setting, shared, *tree.encoded(level), paths)
    found = open_integers(setting, predicted(setting, paths, tree.values))
    weights, thresholds = (np.concatenate(parts) for parts in zip(tree.encoded(0), tree.encoded(1), strict=True))
    inputs = json.dumps([array.tolist() for array in (z, weights, thresholds, tree.values)])
    run = subprocess.run([sys.executable, "-c", REFERENCE], input=inputs, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == found.tolist()
    assert len(set(found.tolist())) > 1


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize(("servers", "degree", "level"), [(3, 1, 0), (3, 1, 1), (5, 2, 2)])
def test_rounds_and_bytes_are_those_of_the_text(servers, degree, level):
    setting, rng, rows, nodes = setting_of(servers, degree), np.random.default_rng(0), 7, 1 << level
    shared = share_integers(setting, LAYOUT.encode_rows(random_codes(rows, rng)))
    assert shared.nbytes == servers * rows * LAYOUT.columns * 16
    at_first = np.arange(nodes)[:, None] == np.zeros(rows)
    paths = share_integers(setting, at_first.astype(np.int64)) if level else None
    _, paths, play = play_level(setting, shared, *Tree(level + 1, rng).encoded(level), paths)
    numbers = setting.bits + 2 + (2 * nodes if level else 1)
    assert play.nbytes == 16 * servers * (servers - 1) * rows * numbers
    assert len(play.rounds) == (3 if level else 1) + rounds_of(setting)
    everybody = {(i, j) for i in range(servers) for j in range(servers) if i != j}
    assert all(sent.keys() == everybody for sent in play.rounds)


# ---------------------------------------------------------------- what it tells


def cells(arrays, bits):
    """Number the combinations of some arrays' lowest bits."""
    return sum(
        (a[..., 0].reshape(-1) & np.uint64((1 << bits) - 1)).astype(np.int64) << bits * k for k, a in enumerate(arrays)
    )


def seen_by(colluding, setting, code, paths_too, rows=20_000):
    """What some servers see of many rows with one value, as cells that should be uniform; everything at their hands."""
    layout = Layout(n_bins=[8], categorical=[False], may_miss=[True])
    z = layout.encode_rows(np.full((rows, 1), code, np.uint8))
    shared = share_integers(setting, z)
    splits = [layout.encode_split(0, np.arange(256) < below) for below in (3, 5)]
    weights, thresholds = (np.stack(parts) for parts in zip(*splits, strict=True))
    in_second = np.repeat([[0], [1]], rows, axis=1)
    paths = share_integers(setting, in_second) if paths_too else None
    if not paths_too:
        weights, thresholds = weights[:1], thresholds[:1]
    left, children, play = play_level(setting, shared, weights, thresholds, paths)
    honest = next(i for i in range(setting.servers) if i not in colluding)

    def received(number):
        return [play.rounds[number][honest, i][:rows] for i in colluding]

    seen = {
        "rows": [shared[i, :, 0] for i in colluding],
        "missing": [shared[i, :, 1] for i in colluding],
        "reduced values": received(0),
        "sides": [left[i] for i in colluding],
        "left children": [children[i, 0] for i in colluding],
        "right children": [children[i, -1] for i in colluding],
    }
    if paths_too:
        seen |= {"paths": [paths[i, 1] for i in colluding], "chosen values": received(1), "products": received(-1)}
    return {what: cells(arrays, 3) for what, arrays in seen.items()}


@pytest.mark.slow
@pytest.mark.parametrize("paths_too", [False, True], ids=["root", "below"])
@pytest.mark.parametrize(("servers", "colluding"), [(3, (1,)), (5, (0, 3))], ids=str)
def test_views_of_colluding_servers_are_the_same_for_two_rows(servers, colluding, paths_too):
    """Of rows that go different ways: uniform each and equal to each other, a false alarm in 1e-9 of each test."""
    setting = ServerSetting(servers=servers, degree=len(colluding), bits=4)
    one, other = (seen_by(colluding, setting, code, paths_too) for code in (2, 8))
    for what in one:
        counts = [np.bincount(seen[what], minlength=8 ** len(colluding)) for seen in (one, other)]
        assert all(stats.chisquare(count).pvalue > FALSE_ALARM for count in counts), what
        assert stats.chi2_contingency(np.stack(counts)).pvalue > FALSE_ALARM, what


def test_what_a_user_opens_has_the_degree_of_fresh_shares():
    """Products are reduced before they are sent: 2 t + 1 shares would show more than the sum."""
    setting, rng = setting_of(5, 1), np.random.default_rng(4)
    tree, codes = Tree(1, rng), random_codes(30, rng)
    left, paths, _ = play_level(setting, share_integers(setting, LAYOUT.encode_rows(codes)), *tree.encoded(0))
    for shares in (left, *np.moveaxis(paths, 1, 0), predicted(setting, paths, tree.values)):
        through = field.combine(shares[[0, 1]], field.lagrange_weights([1, 2], at=5)[None])[0]
        assert np.array_equal(through, shares[4])


# ---------------------------------------------------------------- refused


def started(**changes):
    """The first messages of server 0 at the root for five rows, with changed arguments."""
    setting, rng = setting_of(3, 1), np.random.default_rng(1)
    tree = Tree(1, rng)
    weights, thresholds = (share_integers(setting, array) for array in tree.encoded(0))
    shared = share_integers(setting, LAYOUT.encode_rows(random_codes(5, rng)))
    own = {"rows": shared[0], "weights": weights[0], "thresholds": thresholds[0], "paths": None, **changes}
    return next(route_level(setting, 0, **own, prepared=prepared_for(setting, 5)[0]))


def test_the_level_that_is_changed_next_is_right_as_it_is():
    assert started().keys() == {1, 2}


OVER = np.full((5, LAYOUT.columns, 2), 2**64 - 1, np.uint64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": OVER}, "rows below"),
        ({"rows": OVER[:, 1:] >> np.uint64(2)}, "rows of shape"),
        ({"rows": OVER.astype(np.int64)}, "rows"),
        ({"weights": OVER[:1]}, "weights of splits below"),
        ({"weights": OVER[:2] >> np.uint64(2)}, "thresholds of splits of shape"),
        ({"weights": OVER[0] >> np.uint64(2)}, "weights"),
        ({"thresholds": OVER[0, :2] >> np.uint64(2)}, "thresholds of splits of shape"),
        ({"thresholds": OVER[0, :1]}, "thresholds of splits below"),
        ({"paths": OVER[None, :4, 0] >> np.uint64(2)}, "paths of shape"),
        ({"paths": OVER[None, :, 0]}, "paths below"),
    ],
)
def test_malformed_shares_are_refused(changes, message):
    with pytest.raises(CryptoError, match=message):
        started(**changes)


def test_paths_are_required_below_the_root():
    weights, thresholds = np.zeros((2, LAYOUT.columns, 2), np.uint64), np.zeros((2, 2), np.uint64)
    with pytest.raises(CryptoError, match="paths of rows to 2 nodes"):
        started(weights=weights, thresholds=thresholds)


def test_malformed_shares_of_leaves_and_of_shown_values_are_refused():
    setting, small = setting_of(3, 1), OVER >> np.uint64(2)
    with pytest.raises(CryptoError, match="paths of shape"):
        next(leaf_values(setting, 0, small[:2], small[0, :3]))
    with pytest.raises(CryptoError, match="leaf values below"):
        next(leaf_values(setting, 0, small[:2], OVER[0, :2]))
    prepared = prepared_for(setting, 5)[0]
    with pytest.raises(CryptoError, match="values of shape"):
        next(route_shown(setting, 0, small[0, :4], small[0, :2], np.zeros(5, int), prepared))
    with pytest.raises(CryptoError, match="thresholds below"):
        next(route_shown(setting, 0, small[:, 0], OVER[0, :2], np.zeros(5, int), prepared))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_share_is_noticed_by_the_user(wrong):
    setting = setting_of(3, 1)
    shares = share_integers(setting, np.arange(6).reshape(2, 3))
    assert open_integers(setting, shares).tolist() == [[0, 1, 2], [3, 4, 5]]
    shares[wrong, 1, 1] = field.add(shares[wrong, 1, 1], field.constant(1))
    with pytest.raises(CryptoError, match="belong together"):
        open_integers(setting, shares)


@pytest.mark.parametrize("wrong", [[0], [3, 4], [0, 1]], ids=str)
def test_as_many_wrong_shares_as_may_collude_are_noticed_by_the_user(wrong):
    setting = setting_of(5, 2)
    shares = share_integers(setting, np.arange(6))
    shares[wrong] = field.random_numbers(len(wrong), 6)
    with pytest.raises(CryptoError, match="belong together"):
        open_integers(setting, shares)


EXTREMES = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**62)])


def test_integers_of_64_bits_are_opened_and_others_refused():
    setting = setting_of(3, 1)
    assert np.array_equal(open_integers(setting, share_integers(setting, EXTREMES)), EXTREMES)
    for value in (2**63, -(2**63) - 1, 2**64, field.P // 2):
        with pytest.raises(CryptoError, match="63 bits"):
            open_integers(setting, make_shares(field.constant(value)[None], setting.points, 2))
    with pytest.raises(CryptoError, match="3 servers"):
        open_integers(setting, share_integers(setting, EXTREMES)[:2])


def test_malformed_shares_are_not_opened():
    setting = setting_of(3, 1)
    shares = share_integers(setting, EXTREMES)
    for malformed in (shares.astype(np.int64), shares[..., 0], np.full_like(shares, 2**64 - 1)):
        with pytest.raises(CryptoError, match="shares to open"):
            open_integers(setting, malformed)


@pytest.mark.parametrize("value", [2, -1, 2**40])
def test_bits_that_are_none_are_refused(value):
    setting = setting_of(3, 1)
    with pytest.raises(CryptoError, match="0 or 1"):
        open_bits(setting, share_integers(setting, np.array([0, 1, value])))
    with pytest.raises(CryptoError, match="0 or 1"):
        open_bits(setting, make_shares(field.constant(2**64 + value % 2)[None], setting.points, 2))


def test_a_level_on_wrong_numbers_opens_no_bits_in_paper_mode():
    """A number beyond what the setting allows gives an answer that is no bit."""
    setting = setting_of(3, 1)
    values = share_integers(setting, np.full(20, 1 << (setting.bits + 3)))
    thresholds, prepared = share_integers(setting, np.zeros(1, np.int64)), prepared_for(setting, 20)
    with pytest.raises(CryptoError, match="0 or 1"):
        Play([route_shown(setting, i, values[i], thresholds[i], np.zeros(20, int), prepared[i]) for i in range(3)])
