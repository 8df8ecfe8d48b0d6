"""Speed and traffic of routing rows down a hidden tree on shares, Shamir's or additive ones (FedXGB's SecPred).

Claim: products of 50,000 rows of 200 columns with a level's 4 splits take a server below a second on one core. Measured
for each level of a tree of depth 3 and per 1,000 rows: seconds of one core for one server (the mean over all of them,
which run one after the other; messages are handed over in memory), rounds, and bytes that all servers send together.
Offline is `prepare`, whose random numbers need no row; online is the rest. "additive" has two servers and a dealer:
offline is what the dealer does and sends, online what one of the servers does and both send. Features are numeric, of
32 bins, and may be missing, two columns each. Every row's path and value is checked against the plain walk.
Half a minute; `--quick`: a tenth of the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from data import arguments, report, verdict
from treaty.crypto.sharing import additive_routing as additive
from treaty.crypto.sharing import shamir as field
from treaty.crypto.sharing.shamir_routing import (
    Program,
    ServerSetting,
    leaf_values,
    open_bits,
    open_integers,
    prepare,
    route_level,
    share_integers,
)
from treaty.systems.fedxgb.pieces import Layout

BINS, DEPTH = 32, 3


def play(programs: Sequence[Program]) -> tuple[list, dict[str, float]]:
    """Run the servers; return their results, rounds, bytes sent by all, and seconds of one of them."""
    start, rounds, nbytes = time.process_time(), 0, 0
    outgoing, results = [next(program) for program in programs], []
    while outgoing:
        sent, outgoing = outgoing, []
        rounds += 1
        nbytes += sum(array.nbytes for messages in sent for array in messages.values())
        for i, program in enumerate(programs):
            try:
                outgoing.append(program.send({j: messages[i] for j, messages in enumerate(sent) if j != i}))
            except StopIteration as end:
                results.append(end.value)
    seconds = (time.process_time() - start) / len(programs)
    return results, {"rounds": rounds, "bytes": nbytes, "seconds": seconds}


def random_tree(layout: Layout, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Features and bins that go left of each level's nodes, one in eight a dummy."""
    tree = []
    for level in range(DEPTH):
        nodes = 1 << level
        features = np.where(rng.random(nodes) < 1 / 8, -1, rng.integers(0, len(layout.n_bins), nodes))
        left = np.arange(256) < rng.integers(0, BINS + 1, nodes)[:, None]
        left[:, BINS] = rng.random(nodes) < 1 / 2
        tree.append((features, left))
    return tree


Cost = dict[str, float]
NOTHING: Cost = {"rounds": 0, "bytes": 0, "seconds": 0.0}


def line(comparison: str, servers: int, columns: int, rows: int, part: str, offline: Cost, online: Cost) -> dict:
    """One line of results."""
    found: dict[str, object] = {"comparison": comparison, "servers": servers, "columns": columns, "rows": rows}
    found |= {"part": part}
    for name, spent in (("offline", offline), ("online", online)):
        found[f"{name}_rounds"] = int(spent["rounds"])
        found[f"{name}_bytes_per_row"] = round(spent["bytes"] / rows)
        found[f"{name}_seconds_per_1000_rows"] = spent["seconds"] / rows * 1000
    return found


def made_up(columns: int, rows: int) -> tuple[np.random.Generator, Layout, np.ndarray]:
    """Random codes of rows, columns being two of each feature."""
    rng, features = np.random.default_rng(0), columns // 2
    layout = Layout(n_bins=[BINS] * features, categorical=[False] * features, may_miss=[True] * features)
    return rng, layout, rng.integers(0, BINS + 1, (rows, features)).astype(np.uint8)


def routed(servers: int, columns: int, rows: int) -> list[dict[str, object]]:
    """Route rows down one tree on Shamir shares; return a line of results for each level and one for the leaves."""
    rng, layout, codes = made_up(columns, rows)
    setting = ServerSetting(servers=servers, degree=(servers - 1) // 2, bits=layout.bits)
    each, node, paths, lines = range(servers), np.zeros(rows, int), [None] * servers, []
    shared = share_integers(setting, layout.encode_rows(codes))
    told = "shamir", servers, columns, rows
    for level, (chosen, left_bins) in enumerate(random_tree(layout, rng)):
        splits = [layout.encode_split(f, left) for f, left in zip(chosen.tolist(), left_bins, strict=True)]
        weights, thresholds = (share_integers(setting, np.array(part)) for part in zip(*splits, strict=True))
        prepared, offline = play([prepare(setting, i, rows) for i in each])
        programs = [route_level(setting, i, shared[i], weights[i], thresholds[i], paths[i], prepared[i]) for i in each]
        results, online = play(programs)
        left, paths = zip(*results, strict=True)
        goes_left = (chosen >= 0)[node] & left_bins[node, codes[np.arange(rows), chosen[node]]]
        assert np.array_equal(open_bits(setting, np.stack(left)), goes_left)
        node = 2 * node + 1 - goes_left
        lines.append(line(*told, f"level {level}", offline, online))
    values = rng.integers(-(2**40), 2**40, 1 << DEPTH)
    leaves = share_integers(setting, values)
    results, online = play([leaf_values(setting, i, paths[i], leaves[i]) for i in each])
    assert np.array_equal(open_integers(setting, np.stack(results)), values[node])
    lines.append(line(*told, "leaves", NOTHING, online))
    return lines


def routed_additively(columns: int, rows: int) -> list[dict[str, object]]:
    """Do the same on additive shares of two servers with a dealer, and open the rows' masks before."""
    rng, layout, codes = made_up(columns, rows)
    node, paths, lines = np.zeros(rows, int), [None for _ in range(2)], []
    shared = additive.share_integers(layout.encode_rows(codes))
    told = "additive", 2, columns, rows
    none = np.empty(0, np.uint64)

    def dealt(deal: Callable[..., Any], *of: object) -> tuple[Any, Cost]:
        start = time.process_time()
        what, keys, corrections = deal(*of)
        spent = time.process_time() - start
        return (what, list(zip(keys, (none, corrections), strict=True))), {
            "rounds": 1, "bytes": 64 + corrections.nbytes, "seconds": spent
        }  # fmt: skip

    (mask, masks), offline = dealt(lambda: (*additive.deal_mask(rows, columns), none))
    held, online = play([additive.mask_rows(i, shared[i], masks[i][0]) for i in range(2)])
    lines.append(line(*told, "masks", offline, online))
    for level, (chosen, left_bins) in enumerate(random_tree(layout, rng)):
        splits = [layout.encode_split(f, left) for f, left in zip(chosen.tolist(), left_bins, strict=True)]
        weights, thresholds = (additive.share_integers(np.array([part])) for part in zip(*splits, strict=True))
        (_, given), offline = dealt(lambda k=1 << level: (None, *additive.deal_level(mask, 1, k, layout.bits)))
        results, online = play(
            [
                additive.route_level(i, held[i][0], weights[i], thresholds[i], paths[i], layout.bits, *given[i])
                for i in range(2)
            ]
        )
        left, paths = zip(*results, strict=True)
        goes_left = (chosen >= 0)[node] & left_bins[node, codes[np.arange(rows), chosen[node]]]
        assert np.array_equal(additive.open_bits(np.stack(left))[0], goes_left)
        node = 2 * node + 1 - goes_left
        lines.append(line(*told, f"level {level}", offline, online))
    values = rng.integers(-(2**40), 2**40, (1, 1 << DEPTH))
    leaves = additive.share_integers(values)
    (_, given), offline = dealt(lambda: (None, *additive.deal_leaves(rows, 1, 1 << DEPTH)))
    results, online = play([additive.leaf_values(i, paths[i], leaves[i], *given[i]) for i in range(2)])
    assert np.array_equal(additive.open_integers(np.stack(results))[0], values[0, node])
    lines.append(line(*told, "leaves", offline, online))
    return lines


def products(rows: int) -> None:
    """Time the products of a level on one thread."""
    shares, weights = field.random_numbers(rows, 200), field.random_numbers(4, 200)
    start = time.process_time()
    field.inner_products(shares, weights)
    spent = (time.process_time() - start) / rows * 50_000
    print(f"products of 50,000 rows of 200 columns with 4 splits: {spent:.2f} s, bar 1 s: {verdict(spent, 1)}")


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    routed(3, 100, 300)  # kernels compiled
    routed_additively(100, 300)
    rows = 1000 if quick else 10_000
    products(5 * rows)
    lines = []
    for columns in (100, 200):
        for servers in (3, 5, 10):
            lines += routed(servers, columns, rows)
        lines += routed_additively(columns, rows)
    report("secure_routing", lines, quick=quick)


if __name__ == "__main__":
    main()
