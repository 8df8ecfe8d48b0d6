"""Speed of the ciphers and of one SecureBoost tree's encrypted sums, per cipher, key size and threads.

Run `python benchmarks/cipher_speed.py`. The tree is of depth 3 on 20 000 rows of credit2 (UCI 350), one half of the
columns active and the other passive; the data is looked for in $TREATY_DATA, then in ../shared/data. Claims, for 12
passive columns and both parties on one core: Paillier-2048 takes at most 15 s and 11.7 MB per tree (SecretFlow's SGB:
25 s, 11.7 MB).

`--wide`: a tree on 20 000 rows x 5 000 made-up columns under OU-3072, with the memory that each step adds to the
process (Linux only). Claim: an answer adds at most 300 MB beside itself, and so does opening it. About two minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from data import find
from treaty.crypto.additive.ciphers import OUPublicKey, PaillierPublicKey, generate_key, generate_paillier_key
from treaty.crypto.additive.key_proofs import Randomiser
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.keystream import Keystream
from treaty.crypto.sums.bin_products import Items, bin_products, plan_blocks
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client, make_server
from treaty.machine.arrays import pieces
from treaty.machine.process import concurrently

ROWS, BINS, FRACTION = 20_000, 32, 1 << 16
GENERATE = {"ou": generate_key, "paillier": generate_paillier_key}
CASES = [
    ("ou", 2048, 1),
    ("ou", 2048, 2),
    ("ou", 3072, 1),
    ("ou", 3072, 2),
    ("paillier", 2048, 1),
    ("paillier", 3072, 1),
]


def seconds(work: Callable[[], object], repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> float:
    """Best time of a few runs, by default of the clock on the wall."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
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


def primitives(cipher: str, bits: int, threads: int) -> None:
    key = GENERATE[cipher](bits)
    randomiser = Randomiser(key.public, threads)
    rows = 8192 if cipher == "ou" else 2048
    messages = Keystream().bits(79, rows)
    ciphertexts = key.encrypt(messages, threads)
    exponents = randomiser.exponents(1024)

    randomise = lambda: concurrently(lambda p: randomiser.factors(exponents[p]), pieces(1024, 64), threads)  # noqa: E731
    rates = [
        rows / seconds(lambda: key.encrypt(messages, threads)),
        products_per_second(key.public.modulus, ciphertexts, threads),
        512 / seconds(lambda: key.decrypt(ciphertexts[:512], threads)),
        1024 / seconds(randomise),
    ]
    encrypted, multiplied, decrypted, randomised = (f"{rate:,.0f}" for rate in rates)
    print(
        f"{cipher:>8} {bits:>5} {threads:>7} | {encrypted:>9} rows encrypted/s {multiplied:>11} products/s"
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


def setting_up(cipher: str, bits: int) -> None:
    """Processor time of what a job does once (make a key, check it, make bases of factors), and of single pieces."""
    kind, clock = OUPublicKey if cipher == "ou" else PaillierPublicKey, time.process_time
    key = GENERATE[cipher](bits)
    payload, randomiser = key.public.to_payload(), Randomiser(key.public, 1)
    exponents, ciphertexts = randomiser.exponents(64), key.encrypt(Keystream().bits(79, 64), 1)
    made, read, bases, factors, decrypted = (
        seconds(work, 3, clock)
        for work in (
            lambda: GENERATE[cipher](bits),
            lambda: kind.from_payload(payload),
            lambda: Randomiser(key.public, 1),
            lambda: randomiser.factors(exponents),
            lambda: key.decrypt(ciphertexts, 1),
        )
    )
    print(
        f"{cipher:>8} {bits:>5}       1 | processor time: key made in {made:.2f} s, checked in {read:.2f} s; bases of"
        f" factors {bases:.2f} s; a factor {factors / 64 * 1e3:.3f} ms, a decryption {decrypted / 64 * 1e3:.3f} ms"
    )


def tree(name: str, active: np.ndarray, passive: np.ndarray, cipher: str, bits: int, threads: int) -> None:
    codes, offsets = quantile_codes(passive)
    rng = np.random.default_rng(0)
    grad, hess = rng.integers(-FRACTION, FRACTION + 1, ROWS), rng.integers(0, FRACTION // 4 + 1, ROWS)
    asked, rows = levels(active), np.arange(ROWS, dtype=np.int32)
    client = make_client(cipher, SumsBounds(ROWS, FRACTION, FRACTION // 4), threads=threads, key_bits=bits)
    start = time.perf_counter()
    server = make_server(cipher, client.setup(), codes, offsets, threads=threads)
    client.accept_hint("passive", next(server.hint()), offsets)
    planned = time.perf_counter() - start

    def grow() -> list[float]:
        clock = [time.perf_counter()]
        (payload,) = client.begin_tree(grad, hess)
        server.begin_tree(payload, rows)
        spent = [time.perf_counter() - clock[0], 0.0, 0.0, payload[0].nbytes]
        for positions, starts in asked:
            totals = np.array([[grad[p].sum(), hess[p].sum(), len(p)] for p in _nodes(positions, starts)])
            (query,) = client.query(positions, starts)
            clock = [time.perf_counter()]
            server.add(query)
            answer = server.answer()
            clock.append(time.perf_counter())
            sums = client.open("passive", answer, totals)
            clock.append(time.perf_counter())
            spent[1] += clock[1] - clock[0]
            spent[2] += clock[2] - clock[1]
            spent[3] += sum(array.nbytes for array in [*query, *answer])
            for node, chosen in enumerate(_nodes(positions, starts)):  # the sums must be right, too
                counts = np.bincount(codes[chosen, 0], weights=grad[chosen], minlength=offsets[1])
                assert np.array_equal(sums[node, : offsets[1], 0], counts.astype(np.int64))
        return spent

    grow()
    encrypt, answer, opened, traffic = min((grow() for _ in range(3)), key=lambda spent: sum(spent[:3]))
    print(
        f"{cipher:>8} {bits:>5} {threads:>7} | {name}: tree {encrypt + answer + opened:.3f} s = encrypt {encrypt:.3f}"
        f" + answer {answer:.3f} + open {opened:.3f}; {traffic / 1e6:.2f} MB;"
        f" set-up {planned:.3f} s"
    )


def joint_gain(name: str, active: np.ndarray, passive: np.ndarray) -> None:
    """Time of the bin products of a tree with and without joint cells."""
    codes, offsets = quantile_codes(passive)
    key = generate_key(2048)
    ciphertexts = key.encrypt(Keystream().bits(79, ROWS), 1)
    counts = [np.bincount(codes[:, f]) for f in range(codes.shape[1])]
    left_out = np.array([int(np.argmax(count)) for count in counts])
    bins = np.diff(offsets).astype(np.int64)
    (block,) = plan_blocks(codes, left_out, bins, 1)
    single = [plan_blocks(codes[:, [f]], left_out[[f]], bins[[f]], 1)[0].groups[0] for f in range(len(left_out))]
    single = [type(g)(g.cells, g.labels, f, ()) for f, g in enumerate(single)]

    def run(which: list, modulus: Modulus) -> None:
        for positions, starts in levels(active):
            items = Items(ciphertexts, positions, positions, starts.astype(np.int64), np.arange(len(starts) - 1))
            bin_products(modulus, which, offsets.astype(np.int64), items, 1)

    direct, joint = (seconds(lambda which=which: run(which, key.public.modulus)) for which in (single, block.groups))
    print(
        f"      ou  2048       1 | {name}: bin products {direct:.3f} s column by column, {joint:.3f} s jointly:"
        f" {direct / joint:.2f}x"
    )


def _nodes(positions: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    return [positions[a:b] for a, b in pairwise(starts)]


def memory(field: str) -> float:
    """One line of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024e-6 for line in lines if line.startswith(field + ":"))


def wide(columns: int, threads: int) -> None:
    """Time and memory of every step of a tree on a table of many columns."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, BINS, (ROWS, columns), dtype=np.uint8)
    offsets = np.arange(columns + 1, dtype=np.int32) * (BINS + 1)
    grad, hess = rng.integers(-FRACTION, FRACTION + 1, ROWS), rng.integers(0, FRACTION // 4 + 1, ROWS)

    def step(name: str, work: Callable[[], object]) -> object:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, start = memory("VmRSS"), time.perf_counter()
        result = work()
        took = time.perf_counter() - start
        added, kept = memory("VmHWM") - before, memory("VmRSS") - before
        print(f"{name:>22}: {took:7.2f} s, at most {added:6.0f} MB more, of which {kept:6.0f} MB stay", flush=True)
        return result

    client = make_client("ou", SumsBounds(ROWS, FRACTION, FRACTION // 4), threads=threads)
    server = step("set-up", lambda: make_server("ou", client.setup(), codes, offsets, threads=threads))
    client.accept_hint("passive", next(server.hint()), offsets)
    (payload,) = step("encrypt", lambda: list(client.begin_tree(grad, hess)))
    step("begin tree", lambda: server.begin_tree(payload, np.arange(ROWS, dtype=np.int32)))
    for number, (positions, starts) in enumerate(levels(rng.random((ROWS, 2)))):
        totals = np.array([[grad[p].sum(), hess[p].sum(), len(p)] for p in _nodes(positions, starts)])
        (query,) = client.query(positions, starts)
        server.add(query)
        answer = step(f"answer level {number}", server.answer)
        print(f"{'':>24}an answer of {sum(array.nbytes for array in answer) / 1e6:.1f} MB")
        sums = step(
            f"open level {number}",
            lambda answer=answer, totals=totals: client.open("passive", answer, totals),
        )
        for node, chosen in enumerate(_nodes(positions, starts)):
            for f in (0, columns // 2, columns - 1):
                expected = np.bincount(codes[chosen, f], weights=grad[chosen], minlength=BINS + 1)
                assert np.array_equal(sums[node, offsets[f] : offsets[f + 1], 0], expected.astype(np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--set-up", action="store_true", help="only what a job does once, in processor time")
    parser.add_argument("--columns", type=int, default=5_000, help="of the wide table")
    parser.add_argument("--threads", type=int, default=1, help="for the wide table")
    options = parser.parse_args()
    if options.wide:
        wide(options.columns, options.threads)
        return
    print("  cipher  bits threads")
    for cipher, bits in dict.fromkeys((cipher, bits) for cipher, bits, _ in CASES):
        setting_up(cipher, bits)
    if options.set_up:
        return
    for cipher, bits, threads in CASES:
        primitives(cipher, bits, threads)
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
        for case in CASES:
            tree(name, active, passive, *case)


if __name__ == "__main__":
    main()
