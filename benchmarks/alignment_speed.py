"""Speed and memory of private alignment, by points of a curve (ecdh) and by oblivious transfer (kkrt).

Claims under KKRT: 100 000 ids with 100 000 in at most 2 s, both sides on one core; 1 000 000 with 1 000 000 in at most
8 s on two cores, each process below 500 MB; 10 000 000 with 10 000 000 in at most 100 s, each below 1 GB. Under ECDH:
100 000 in at most 30 s on one core; 1 000 000 in at most 3 minutes, below 500 MB. Between two processes over
mutual TLS; half of the ids are common; reading the ids counts, and so does loading kernels, but not what numba loads
before its first one, which jobs do while parties wait for each other. Linux only: memory is the peak of the whole
process, libraries included. About five minutes; what is measured takes the place of its rows in the results, others
stay. `--psi` measures one of the two, `--ids N` one size, under KKRT unless `--psi` says otherwise, with as many cores
as there are: `--psi ecdh --ids 10000000` takes about half an hour. `--quick`: 20 000 ids, or N.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treaty.data.ids import Psi, read_ids
from treaty.machine.arrays import pieces
from treaty.messaging.certificates import load_certificate
from treaty.messaging.party import Party, run_role
from treaty.messaging.tls_channel import Peer, TlsChannel
from treaty.node.identity import make_keys
from treaty.systems.alignment.alignment import AlignmentOptions, align_active, align_passive

SIDES = ("active", "passive")


def play(name: str, folder: Path, count: int, threads: int, ports: list[int], psi: Psi) -> None:
    """Be one side; print seconds, peak before and in all (bytes), processor seconds, and the common ids found."""
    first = 0 if name == "active" else count // 2
    peer = SIDES[1 - SIDES.index(name)]
    own_port, peer_port = ports if name == "active" else ports[::-1]
    channel = TlsChannel(
        name,
        f"127.0.0.1:{own_port}",
        key=(folder / f"{name}.key.pem").read_bytes(),
        certificate=load_certificate(str(folder / f"{name}.cert.pem")),
        peers={peer: Peer(f"127.0.0.1:{peer_port}", load_certificate(str(folder / f"{peer}.cert.pem")))},
    )
    gc.freeze()  # as the command does
    channel.connect(timeout=60)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    numbers = np.random.default_rng(SIDES.index(name)).permutation(np.arange(first, first + count, dtype=np.int32))
    ids = read_ids(column_of(numbers), party=name)
    role = align_active if name == "active" else align_passive
    party = Party(name, "bench", "alignment", channel, [peer])
    rows = run_role(party, lambda: role(party, ids, AlignmentOptions(psi=psi, threads=threads))).rows
    spent = time.perf_counter() - started
    found = numbers[rows]
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(spent, before * 1024, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime, len(found), hash_of(found))
    channel.close()


def column_of(numbers: np.ndarray) -> pa.ChunkedArray:
    """Make ids of numbers, piece by piece: at once, that would take more memory than what is measured."""
    return pa.chunked_array(
        pc.binary_join_element_wise("customer-", pa.array(numbers[part]).cast(pa.string()), "")
        for part in pieces(len(numbers), 1 << 18)
    )


def hash_of(numbers: np.ndarray) -> int:
    """Tell orders apart."""
    total = 0
    for part in pieces(len(numbers), 1 << 18):
        weights = np.arange(part.start + 1, part.stop + 1, dtype=np.uint64)
        total += int((numbers[part].astype(np.uint64) * weights).sum())
    return total % (1 << 64)


def measure(psi: Psi, count: int, cores: int, bar: float, bar_mb: float) -> list[dict[str, object]]:
    from data import cpu_of_others, verdict
    from treaty.runs.processes import free_ports

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side in SIDES:
            make_keys(folder, side)
        ports = free_ports(2)
        available = sorted(os.sched_getaffinity(0))[:cores]
        started = {
            side: subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--as",
                    side,
                    "--folder",
                    name,
                    "--ids",
                    str(count),
                    "--psi",
                    psi,
                    "--ports",
                    *map(str, ports),
                ],
                stdout=subprocess.PIPE,
                preexec_fn=lambda: os.sched_setaffinity(0, available),
            )
            for side in SIDES
        }
        before, begun = cpu_of_others(), time.perf_counter()
        said = {side: process.communicate()[0].split() for side, process in started.items()}
    others = max(0.0, (cpu_of_others() - before) / (time.perf_counter() - begun))
    assert said["active"][4:] == said["passive"][4:], "the two sides differ"
    assert int(said["active"][4]) == count - count // 2
    return [
        {
            "psi": psi,
            "side": side,
            "ids": count,
            "cores for both": cores,
            "seconds": float(said[side][0]),
            "bar s": bar,
            "seconds <= bar": "" if math.isinf(bar) else verdict(float(said[side][0]), bar),
            "cpu s": float(said[side][3]),
            "others' cores": others,
            "peak MB": int(said[side][2]) / 1e6,
            "bar MB": bar_mb,
            "peak <= bar": "" if math.isinf(bar_mb) else verdict(int(said[side][2]), bar_mb * 1e6),
            "before MB": int(said[side][1]) / 1e6,
            "bytes per id": (int(said[side][2]) - int(said[side][1])) / count,
        }
        for side in SIDES
    ]


def main() -> None:
    if "--as" in sys.argv:
        side()
    else:
        compare()


def side() -> None:
    """Be one of the two processes, whose memory is measured: without the other benchmarks' libraries."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--as", dest="name", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ids", type=int, required=True)
    parser.add_argument("--psi", choices=("ecdh", "kkrt"), required=True)
    parser.add_argument("--ports", type=int, nargs=2, required=True)
    options = parser.parse_args()
    play(options.name, options.folder, options.ids, len(os.sched_getaffinity(0)), options.ports, options.psi)


def compare() -> None:
    from data import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--ids", type=int)
    parser.add_argument("--psi", choices=("ecdh", "kkrt"))
    options = parser.parse_args()
    sizes: list[tuple[Psi, int, int, float, float]] = [
        ("kkrt", 100_000, 1, 2.0, 500.0),
        ("kkrt", 1_000_000, 2, 8.0, 500.0),
        ("kkrt", 10_000_000, 2, 100.0, 1000.0),
        ("ecdh", 100_000, 1, 30.0, 500.0),
        ("ecdh", 1_000_000, 2, 180.0, 500.0),
        ("ecdh", 10_000_000, 2, math.inf, 1000.0),
    ]
    if options.ids:
        psi: Psi = options.psi or "kkrt"
        known = [case for case in sizes if case[:2] == (psi, options.ids)]
        sizes = known or [(psi, options.ids, os.cpu_count() or 1, math.inf, math.inf)]
    elif options.quick:
        sizes = [("kkrt", 20_000, 1, 2.0, 500.0), ("ecdh", 20_000, 1, 30.0, 500.0)]
    else:
        sizes = [case for case in sizes if case[:2] != ("ecdh", 10_000_000)]
    rows = [row for case in sizes if options.psi in (None, case[0]) for row in measure(*case)]
    report("alignment_speed", rows, quick=options.quick, keys=("psi", "ids", "side"))


if __name__ == "__main__":
    main()
