"""How much the time of an answer under the lattice map tells of how a column's rows are spread over its bins.

Claim: the slowest of five ways to spread rows over bins takes at most 1.3 times as long as the fastest, in additions
and in whole answers, for 20 000 and 1 000 000 rows in 32, 33 and 256 bins.

Twelve columns alike, one vector, one thread. `ns/addition` is the histogram's alone, `answer ms` all that a passive
party does for a node. Ways are timed in turn, round after round; medians over the third of the rounds in which other
processes used the processor least. `times fastest` are ratios of these medians. About a minute; `--quick` less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from numpy.typing import NDArray

from data import arguments, cpu_of_others, report, seconds, verdict
from treaty.crypto.lattice import kernels
from treaty.crypto.lattice.linear_map import LinearMapServer, zeros_on_lines
from treaty.crypto.lattice.ring import WORDS
from treaty.crypto.parameters import SecretMatrix
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.lattice_sums import sums_parameters

COLUMNS, BAR = 12, 1.3
SIZES = [(rows, bins) for rows in (20_000, 1_000_000) for bins in (32, 33, 256)]


def ways(rows: int, bins: int, rng: np.random.Generator) -> dict[str, NDArray[np.uint8]]:
    """Return the bins of a column's rows, uint8 (rows,), by what they are like."""
    uniform = rng.integers(0, bins, rows).astype(np.uint8)
    return {
        "uniform": uniform,
        "95 % in one bin": np.where(rng.random(rows) < 0.95, 0, uniform).astype(np.uint8),
        "all in one bin": np.zeros(rows, np.uint8),
        "sorted": np.sort(uniform),
        "two in turn": (np.arange(rows) % 2).astype(np.uint8),
    }


def quiet_medians(work: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, float], float]:
    """Return the seconds of each piece of work, and the cores that other processes used meanwhile."""
    timed: list[tuple[float, dict[str, float]]] = []
    names = list(work)
    for k in range(rounds + 1):
        before, start = cpu_of_others(), time.perf_counter()
        taken = {name: seconds(work[name]) for name in names[k % len(names) :] + names[: k % len(names)]}
        timed.append(((cpu_of_others() - before) / (time.perf_counter() - start), taken))
    quiet = sorted(timed[1:], key=lambda one: one[0])[: -(-rounds // 3)]  # the first round compiles
    return {name: median(taken[name] for _, taken in quiet) for name in names}, median(others for others, _ in quiet)


def of_size(rows: int, bins: int, rounds: int) -> list[dict[str, object]]:
    """Time all ways for one size of table."""
    rng = np.random.default_rng(0)
    tables = {way: np.tile(codes, (COLUMNS, 1)) for way, codes in ways(rows, bins, rng).items()}
    offsets, features = np.arange(COLUMNS + 1, dtype=np.int64) * bins, np.arange(COLUMNS, dtype=np.int64)

    words = zeros_on_lines((rows, WORDS), np.uint32)
    words[:] = rng.integers(0, 1 << 31, words.shape)
    sums = zeros_on_lines((COLUMNS * bins, kernels.COPIES, WORDS), np.uint64).reshape(-1)

    def add(codes: NDArray[np.uint8]) -> None:
        kernels.bin_sums(words.reshape(-1), codes, 0, offsets, features, 0, COLUMNS, sums)

    parameters = sums_parameters(SumsBounds(rows, 1 << 16, 1 << 14))
    query = rng.integers(0, min(parameters.primes), (1, len(parameters.primes), rows), np.uint32)
    own = rng.integers(0, min(parameters.primes), (1, len(parameters.primes), parameters.degree), np.uint32)
    random = rng.integers(-1, 2, (COLUMNS * bins, parameters.degree), np.int16)
    servers = {
        way: LinearMapServer(parameters, SecretMatrix.of_bins(codes, offsets), bytes(32), random=random)
        for way, codes in tables.items()
    }
    additions, others = quiet_medians({way: lambda codes=codes: add(codes) for way, codes in tables.items()}, rounds)
    answers, more = quiet_medians(
        {way: lambda server=server: server.answer(query, own, features) for way, server in servers.items()}, rounds
    )
    worst = [max(taken.values()) / min(taken.values()) for taken in (additions, answers)]
    return [
        {
            "rows": rows,
            "bins": bins,
            "bins are": way,
            "ns/addition": 1e9 * additions[way] / (rows * COLUMNS),
            "times fastest": additions[way] / min(additions.values()),
            "answer ms": 1e3 * answers[way],
            "answer times fastest": answers[way] / min(answers.values()),
            "worst": worst[0],
            "worst answer": worst[1],
            "bar": f"<= {BAR:g}: {verdict(max(worst), BAR)}",
            "cores others used": max(others, more, 0.0),
        }
        for way in tables
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    found: list[dict[str, object]] = []
    for rows, bins in SIZES[:3] if options.quick else SIZES:
        rounds = (15 if options.quick else 120) if rows < 100_000 else 45
        found += of_size(rows, bins, rounds)
    report("lattice_skew", found, quick=options.quick)


if __name__ == "__main__":
    main()
