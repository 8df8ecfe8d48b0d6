"""What a message costs between two processes: round trips of frames through `TlsChannel`, and processor time.

``python benchmarks/wire.py`` measures on the loopback; the same round trip on a bare TLS socket stands beside.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from treaty.messaging import tls
from treaty.messaging.certificates import Identity, make_identity
from treaty.messaging.tls_channel import Peer, TlsChannel

SIZES = {200: 5000, 20_000: 3000, 250_000: 400, 60_000_000: 5}


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def bounced(
    first: bool, send: Callable[[bytes], None], receive: Callable[[int], object]
) -> dict[int, tuple[float, float]]:
    """Play round trips of each size; return microseconds of each, and of processor time."""
    found = {}
    for size, count in SIZES.items():
        frame = bytes(size)
        for _ in range(max(1, count // 10)):
            play(first, frame, send, receive)
        began, used = time.perf_counter(), processor_seconds()
        for _ in range(count):
            play(first, frame, send, receive)
        spent = time.perf_counter() - began
        found[size] = 1e6 * spent / count, 1e6 * (processor_seconds() - used) / count
    return found


def play(first: bool, frame: bytes, send: Callable[[bytes], None], receive: Callable[[int], object]) -> None:
    if first:
        send(frame)
        receive(len(frame))
    else:
        receive(len(frame))
        send(frame)


def channel_end(name: str, peer: str, identities: dict[str, Identity], parent: Connection) -> None:
    own = identities[name]
    peers = {peer: Peer(None, identities[peer].certificate)}
    with TlsChannel(name, "127.0.0.1:0", key=own.key, certificate=own.certificate, peers=peers) as channel:
        parent.send(channel.address)
        channel.connect(20, {peer: parent.recv()})

        def receive(size: int) -> None:
            arrival = channel.receive(60)
            assert arrival is not None
            channel.mark_read(peer, size)

        parent.send(bounced(name == "a", lambda frame: channel.send(peer, frame, 60), receive))


def bare_end(name: str, peer: str, identities: dict[str, Identity], parent: Connection) -> None:
    """The same round trips on one TLS socket."""
    context = tls.tls_context(identities[name], [identities[peer].certificate], listens=name == "b")
    if name == "b":
        with socket.create_server(("127.0.0.1", 0)) as listening:
            parent.send(f"127.0.0.1:{listening.getsockname()[1]}")
            parent.recv()
            raw, _ = listening.accept()
    else:
        parent.send("")
        host, port = parent.recv().split(":")
        raw = socket.create_connection((host, int(port)))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(raw, server_side=name == "b") as connection:

        def receive(size: int) -> None:
            whole, filled = memoryview(bytearray(size)), 0
            while filled < size:
                filled += connection.recv_into(whole[filled:])

        parent.send(bounced(name == "a", connection.sendall, receive))


def measured(end: Callable[..., None]) -> dict[int, tuple[float, float, float]]:
    """Run both ends; return microseconds of a round trip, and of processor time at each end, by size."""
    identities = {name: make_identity(name) for name in "ab"}
    spawned = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, peer in ("ab", "ba"):
        pipes[name], other = spawned.Pipe()
        processes.append(spawned.Process(target=end, args=(name, peer, identities, other)))
        processes[-1].start()
    addresses = {name: pipe.recv() for name, pipe in pipes.items()}
    pipes["a"].send(addresses["b"])
    pipes["b"].send(addresses["a"])
    a, b = (pipes[name].recv() for name in "ab")
    for process in processes:
        process.join()
    return {size: (a[size][0], a[size][1], b[size][1]) for size in SIZES}


def main() -> None:
    bare, channel = measured(bare_end), measured(channel_end)
    print(f"{'bytes':>10}  {'TLS socket, us (processor)':>30}  {'channel, us (processor)':>30}  ratio")
    for size in SIZES:
        cells = ["{:,.0f} ({:,.0f} + {:,.0f})".format(*of[size]) for of in (bare, channel)]
        print(f"{size:>10,}  {cells[0]:>30}  {cells[1]:>30}  {channel[size][0] / bare[size][0]:.2f}")


if __name__ == "__main__":
    main()
    assert threading.active_count() == 1, sys.exit("threads are left")
