"""Speed of the Okamoto-Uchiyama cipher and of one SecureBoost tree's encrypted sums, per key size and threads.

Run `python benchmarks/cipher_speed.py`. The tree is of depth 3 on 20 000 rows of credit2 (UCI 350), one half of the
columns active and the other passive; the data is looked for in $TREATY_DATA, then in ../shared/data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from data import find
from treaty.compute import concurrently, pieces
from treaty.crypto.bin_products import Items, bin_products
from treaty.crypto.encrypted_sums import SumsBounds, make_client, make_server
from treaty.crypto.joint_sums import plan_groups
from treaty.crypto.key_generation import generate_key
from treaty.crypto.keystream import Keystream
from treaty.crypto.montgomery import Modulus
from treaty.crypto.okamoto_uchiyama import Randomiser

ROWS, BINS, FRACTION = 20_000, 32, 1 << 16


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Best wall-clock time of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def products_per_second(modulus: Modulus, ciphertexts: np.ndarray, threads: int) -> float:
    """Modular products per second where ciphertexts are gathered at random, as a bin gathers its rows."""
    index = np.random.default_rng(0).integers(0, len(ciphertexts), 1 << 16).astype(np.int32)
    shares = pieces(512, -(-512 // threads))
    starts = np.linspace(0, len(index), 513).astype(np.int64)
    out = np.empty((512, modulus.words), np.uint64)

    def products() -> None:
        def share(part: slice) -> None:
            modulus.segment_products(ciphertexts, index, starts[part.start : part.stop + 1], out[part])

        concurrently(share, shares, threads)

    return (len(index) - 512) / seconds(products)


def primitives(bits: int, threads: int) -> None:
    key = generate_key(bits)
    randomiser = Randomiser(key.public)
    messages = Keystream().bits(79, 8192)
    ciphertexts = key.encrypt(messages, threads)
    exponents = randomiser.exponents(1024)

    randomise = lambda: concurrently(lambda p: randomiser.factors(exponents[p]), pieces(1024, 64), threads)  # noqa: E731
    rates = [
        8192 / seconds(lambda: key.encrypt(messages, threads)),
        products_per_second(key.public.modulus, ciphertexts, threads),
        1024 / seconds(lambda: key.decrypt(ciphertexts[:1024], threads)),
        1024 / seconds(randomise),
    ]
    encrypted, multiplied, decrypted, randomised = (f"{rate:,.0f}" for rate in rates)
    print(
        f"{bits:>5} {threads:>7} | {encrypted:>9} rows encrypted/s {multiplied:>11} products/s"
        f" {decrypted:>8} decrypted/s {randomised:>8} re-randomised/s"
    )


def quantile_codes(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most 32 quantile bins per column and one empty slot for missing values."""
    codes, offsets = np.empty(table.shape, np.uint8), [0]
    for f, column in enumerate(table.T):
        cuts = np.unique(np.quantile(column, np.arange(1, BINS) / BINS, method="higher"))
        codes[:, f] = np.searchsorted(cuts, column, side="right")
        offsets.append(offsets[-1] + len(cuts) + 2)
    return codes, np.array(offsets, np.int32)


def levels(splitter: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows asked per level of a depth-3 tree: the root, then the smaller child of each pair."""
    nodes, asked = [np.arange(len(splitter), dtype=np.int32)], []
    asked.append(nodes)
    for level in range(2):
        smaller, following = [], []
        for rows in nodes:
            column = splitter[rows, level]
            left = column < np.quantile(column, 0.4)
            children = sorted([rows[left], rows[~left]], key=len)
            smaller.append(children[0])
            following += children
        nodes = following
        asked.append(smaller)
    return [
        (np.concatenate(part), np.concatenate([[0], np.cumsum([len(rows) for rows in part])]).astype(np.int32))
        for part in asked
    ]


def tree(name: str, active: np.ndarray, passive: np.ndarray, bits: int, threads: int) -> None:
    codes, offsets = quantile_codes(passive)
    rng = np.random.default_rng(0)
    grad, hess = rng.integers(-FRACTION, FRACTION + 1, ROWS), rng.integers(0, FRACTION // 4 + 1, ROWS)
    asked, rows = levels(active), np.arange(ROWS, dtype=np.int32)
    client = make_client("ou", SumsBounds(ROWS, FRACTION, FRACTION // 4), threads=threads, key_bits=bits)
    start = time.perf_counter()
    server = make_server("ou", client.setup(), codes, offsets, threads=threads)
    client.accept_hint("passive", server.hint(), offsets)
    planned = time.perf_counter() - start

    def grow() -> list[float]:
        clock = [time.perf_counter()]
        spent = [0.0, 0.0, 0.0]
        server.begin_tree(client.begin_tree(grad, hess), rows)
        spent[0] = time.perf_counter() - clock[0]
        for positions, starts in asked:
            totals = np.array([[grad[p].sum(), hess[p].sum(), len(p)] for p in _nodes(positions, starts)])
            query = client.query(positions, starts)
            clock = [time.perf_counter()]
            answer = server.answer(query)
            clock.append(time.perf_counter())
            sums = client.open("passive", answer, totals)
            clock.append(time.perf_counter())
            spent[1] += clock[1] - clock[0]
            spent[2] += clock[2] - clock[1]
            for node, chosen in enumerate(_nodes(positions, starts)):  # the sums must be right, too
                counts = np.bincount(codes[chosen, 0], weights=grad[chosen], minlength=offsets[1])
                assert np.array_equal(sums[node, : offsets[1], 0], counts.astype(np.int64))
        return spent

    grow()
    encrypt, answer, opened = min((grow() for _ in range(3)), key=sum)
    print(
        f"{bits:>5} {threads:>7} | {name}: tree {encrypt + answer + opened:.3f} s = encrypt {encrypt:.3f}"
        f" + answer {answer:.3f} + open {opened:.3f}; set-up {planned:.3f} s"
    )


def joint_gain(name: str, active: np.ndarray, passive: np.ndarray) -> None:
    """Time of the bin products of a tree with and without joint cells."""
    codes, offsets = quantile_codes(passive)
    key = generate_key(2048)
    ciphertexts = key.encrypt(Keystream().bits(79, ROWS), 1)
    counts = [np.bincount(codes[:, f]) for f in range(codes.shape[1])]
    left_out = np.array([int(np.argmax(count)) for count in counts])
    groups = plan_groups(codes, left_out, np.diff(offsets).astype(np.int64))
    single = [plan_groups(codes[:, [f]], left_out[[f]], np.diff(offsets)[[f]])[0] for f in range(len(left_out))]
    single = [type(g)(g.cells, g.labels, f, ()) for f, g in enumerate(single)]

    def run(which: list, modulus: Modulus) -> None:
        for positions, starts in levels(active):
            items = Items(ciphertexts, positions, positions, starts.astype(np.int64), np.arange(len(starts) - 1))
            bin_products(modulus, which, offsets.astype(np.int64), items, 1)

    direct, joint = (seconds(lambda which=which: run(which, key.public.modulus)) for which in (single, groups))
    print(
        f" 2048       1 | {name}: bin products {direct:.3f} s column by column, {joint:.3f} s jointly:"
        f" {direct / joint:.2f}x"
    )


def _nodes(positions: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    return [positions[a:b] for a, b in pairwise(starts)]


def main() -> None:
    print(" bits threads")
    for bits in (2048, 3072):
        for threads in (1, 2):
            primitives(bits, threads)
    path = find("credit2.parquet")
    if path is None:
        print("trees skipped: no credit2.parquet in $TREATY_DATA or ../shared/data")
        return
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    columns = np.column_stack([table.column(c).to_numpy() for c in table.column_names[1:-1]])[:ROWS].astype(float)
    first, last = columns[:, :11], columns[:, 11:]
    for name, active, passive in (("12 passive columns", first, last), ("11 passive columns", last, first)):
        joint_gain(name, active, passive)
        for bits in (2048, 3072):
            for threads in (1, 2):
                tree(name, active, passive, bits, threads)


if __name__ == "__main__":
    main()
