"""Speed and traffic of secure comparison: comparisons per second, bytes per comparison, rounds.

All servers run one after the other in one thread, and messages are handed over in memory: comparisons per second are
per second of one core that computes for all of them, without any network. Traffic is that of all servers together.
Every answer is checked, also of equal, neighbouring and extreme pairs. A million pairs of bin codes for three servers
and of 63-bit numbers for two, a tenth as many for the others: about three minutes on an idle core, most of them for
random bits (offline). ``--rows 100000`` takes a tenth of that.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from treaty.crypto.sharing import shamir as field
from treaty.crypto.sharing.additive_routing import deal, sign_bit
from treaty.crypto.sharing.shamir import make_shares, open_shares
from treaty.crypto.sharing.shamir_routing import Program, ServerSetting, is_negative, prepare
from treaty.machine.arrays import pieces

RESULTS = Path(__file__).parent / "results" / "comparison_speed.csv"
BATCH = 10_000
CODE_BITS = 9  # differences of 8-bit bin codes
VALUE_BITS = 20  # the longest that ten servers compare


def play(programs: Sequence[Program]) -> tuple[list, int, int, float]:
    """Run the servers; return their results, rounds, bytes sent by all, and seconds."""
    start, rounds, nbytes = time.process_time(), 0, 0
    outgoing, results = [next(program) for program in programs], []
    while outgoing:
        sent, outgoing, results = outgoing, [], []
        rounds += 1
        nbytes += sum(array.nbytes for messages in sent for array in messages.values())
        for i, program in enumerate(programs):
            try:
                outgoing.append(program.send({j: messages[i] for j, messages in enumerate(sent) if j != i}))
            except StopIteration as end:
                results.append(end.value)
    return results, rounds, nbytes, time.process_time() - start


def pairs(rows: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Random pairs whose difference has `bits` bits with its sign; a third are equal or next to each other."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 1 << (bits - 1), (2, rows))
    near = slice(0, rows // 3)
    y[near] = np.clip(x[near] + rng.integers(-1, 2, rows // 3), 0, (1 << (bits - 1)) - 1)
    x[-2:], y[-2:] = [0, (1 << (bits - 1)) - 1], [(1 << (bits - 1)) - 1, 0]
    return x, y


def shamir(servers: int, bits: int, rows: int) -> dict[str, object]:
    setting = ServerSetting(servers=servers, degree=(servers - 1) // 2, bits=bits)
    x, y = pairs(rows, bits)
    offline, online, each = np.zeros(3), np.zeros(3), range(servers)
    for part in pieces(rows, BATCH):
        xs, ys = (make_shares(field.from_signed(v[part]), setting.points, setting.degree + 1) for v in (x, y))
        prepared, *spent = play([prepare(setting, i, len(x[part])) for i in each])
        offline += [0, *spent[1:]]
        offline[0] = spent[0]
        shares, *spent = play([is_negative(setting, i, field.subtract(xs[i], ys[i]), prepared[i]) for i in each])
        online += [0, *spent[1:]]
        online[0] = spent[0]
        few = setting.degree + 1
        answers = open_shares(setting.points[:few], np.stack(shares[:few]))
        assert np.array_equal(answers[:, 0], x[part] < y[part])
        assert not answers[:, 1].any()
    return line(f"shamir, degree {setting.degree}", servers, bits, rows, offline, online)


def additive(rows: int) -> dict[str, object]:
    x, y = pairs(rows, 63)
    first = np.random.default_rng(1).integers(0, 2**64, rows, dtype=np.uint64)
    shares = first, (x - y).astype(np.uint64) - first
    offline, online = np.zeros(3), np.zeros(3)
    for part in pieces(rows, BATCH * 10):
        start = time.process_time()
        dealt = deal(len(x[part]))
        offline += [0, sum(len(one.key) + one.corrections.nbytes for one in dealt), time.process_time() - start]
        bits, *spent = play([sign_bit(i, shares[i][part], dealt[i]) for i in range(2)])
        online += [0, *spent[1:]]
        online[0] = spent[0]
        assert np.array_equal(bits[0] ^ bits[1], x[part] < y[part])
    offline[0] = 1
    return line("additive, dealer", 2, 64, rows, offline, online)


def line(kind: str, servers: int, bits: int, rows: int, offline: np.ndarray, online: np.ndarray) -> dict[str, object]:
    found: dict[str, object] = {"shares": kind, "servers": servers, "bits": bits, "comparisons": rows}
    for name, (rounds, nbytes, seconds) in (("offline", offline), ("online", online)):
        found[f"{name}_rounds"] = int(rounds)
        found[f"{name}_bytes"] = round(nbytes / rows)
        found[f"{name}_per_second"] = round(rows / seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    shamir(3, CODE_BITS, BATCH)  # kernels compiled
    cases = [(servers, bits) for bits in (CODE_BITS, VALUE_BITS) for servers in (3, 5, 10)]
    runs = [partial(shamir, servers, bits, rows // 10) for servers, bits in cases[1:]]
    runs = [partial(shamir, *cases[0], rows), *runs, partial(additive, rows)]
    lines = []
    for run in runs:
        lines.append(run())
        print(", ".join(f"{name} {value}" for name, value in lines[-1].items()), flush=True)
    with RESULTS.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
