"""Many jobs at once through the doors of two nodes: how fast, how fair, and how much memory.

``python benchmarks/door.py [JOBS]`` (default 100): each job is a pair of `TlsChannel`s, one at each node, which play
round trips of 20 kB through both doors at the same time; then each sends 20 MB. One process a node. Printed are round
trips in a second (of all jobs, of the slowest and the fastest), MB in a second, and each process's memory.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from treaty.messaging.certificates import Identity, make_identity
from treaty.messaging.tls_channel import Peer, TlsChannel
from treaty.node.door import Door

SECONDS, ROUND_TRIP, LARGE = 5.0, 20_000, 20_000_000


def node(name: str, peer: str, jobs: int, identities: dict[str, Identity], parent: Connection) -> None:
    own = identities[name]
    addresses: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="door") as folder:
        addresses[peer] = "127.0.0.1:1"
        door = Door("127.0.0.1:0", Path(folder), addresses, lambda *_: False)
        parent.send(door.address)
        addresses[peer] = parent.recv()

        def play(number: int) -> tuple[int, float]:
            job = f"{number:064x}"[::-1]
            sockets = door.open_job(job, [peer])
            channel = TlsChannel(
                name, f"unix:{door.job_socket(job)}", key=own.key, certificate=own.certificate, job=job,
                peers={peer: Peer(f"unix:{sockets[peer]}", identities[peer].certificate)},
            )  # fmt: skip
            with channel:
                channel.connect(120)
                count, until = 0, time.monotonic() + SECONDS
                while name == "a" and time.monotonic() < until:
                    channel.send(peer, bytes(ROUND_TRIP), 60)
                    taken(channel, peer)
                    count += 1
                if name == "a":
                    channel.send(peer, b"", 60)
                else:
                    while frame := taken(channel, peer):
                        channel.send(peer, frame, 60)
                began = time.monotonic()
                channel.send(peer, bytes(LARGE), 120)
                taken(channel, peer)
                spent = time.monotonic() - began
                channel.send(peer, b"end", 60, receipt=True)
                taken(channel, peer)
            return count, spent

        with ThreadPoolExecutor(jobs) as pool:
            parent.send(list(pool.map(play, range(jobs))))
        parent.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
        door.close()


def taken(channel: TlsChannel, peer: str) -> bytes:
    arrival = channel.receive(120)
    assert arrival is not None
    channel.mark_read(peer, len(arrival.frame))
    return bytes(arrival.frame)


def main(jobs: int) -> None:
    identities = {name: make_identity(name) for name in "ab"}
    spawned = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, peer in ("ab", "ba"):
        pipes[name], other = spawned.Pipe()
        processes.append(spawned.Process(target=node, args=(name, peer, jobs, identities, other)))
        processes[-1].start()
    addresses = {name: pipe.recv() for name, pipe in pipes.items()}
    pipes["a"].send(addresses["b"])
    pipes["b"].send(addresses["a"])
    played = {name: pipes[name].recv() for name in "ab"}["a"]
    memory = [pipes[name].recv() for name in "ab"]
    for process in processes:
        process.join()
    rates = sorted(count / SECONDS for count, _ in played)
    slowest = max(spent for _, spent in played)
    print(f"{jobs} jobs: {sum(rates):,.0f} round trips of 20 kB a second, each {rates[0]:.1f} to {rates[-1]:.1f}")
    print(f"20 MB each way at once: {2 * jobs * LARGE / slowest / 1e6:,.0f} MB a second; MB of memory: {memory}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
