"""Relays before the ports of parties on this machine, which refuse, break or hold up connections when told to."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from treaty.messaging.tls import raise_descriptors

CROWD = 10_000  # idle connections


class Relays:
    """What stands before each party's port: forwards, or does not, as told."""

    def __init__(self, real: dict[str, int], relayed: dict[str, int]) -> None:
        self.real, self._relayed = real, relayed
        self._frozen, self._listening, self._connections = False, [], []
        self._lock = threading.Lock()
        self.refuse(False)

    def _listen(self, port: int, to: int) -> None:
        listening = socket.create_server(("127.0.0.1", port), reuse_port=True)
        self._listening.append(listening)

        def accept() -> None:
            while True:
                try:
                    taken, _ = listening.accept()
                    onward = socket.create_connection(("127.0.0.1", to), timeout=2)
                except ConnectionRefusedError:
                    taken.close()
                    continue
                except OSError:
                    return
                with self._lock:
                    self._connections += [taken, onward]
                threading.Thread(target=self._forward, args=(taken, onward), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while True:
                if self._frozen:
                    time.sleep(0.05)
                    continue
                for ready in select.select([one, other], [], [], 0.1)[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    (other if ready is one else one).sendall(data)
        except (OSError, ValueError):
            pass
        finally:
            one.close()
            other.close()

    def freeze(self, frozen: bool) -> None:
        """Carry nothing in either direction; connections stay."""
        self._frozen = frozen

    def reset(self) -> None:
        """Break all connections with RST."""
        with self._lock:
            for connection in self._connections:
                try:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            self._connections.clear()

    def refuse(self, refused: bool) -> None:
        """Refuse new connections, or take them again."""
        if refused:
            for listening in self._listening:
                listening.shutdown(socket.SHUT_RDWR)
                listening.close()
            self._listening.clear()
        else:
            for name, port in self._relayed.items():
                self._listen(port, self.real[name])


def outage(seconds: float, *, frozen: bool = False) -> Callable[[Relays], None]:
    """Return what takes the network away for so long: by refusing and breaking connections, or by silence."""

    def away(relays: Relays) -> None:
        relays.freeze(frozen)
        if not frozen:
            relays.refuse(True)
            relays.reset()
        time.sleep(seconds)
        relays.freeze(False)
        if not frozen:
            relays.refuse(False)

    return away


def resets(relays: Relays, over: threading.Event) -> None:
    """Break all connections every two seconds."""
    while not over.wait(2.0):
        relays.reset()


def crowd(relays: Relays, over: threading.Event) -> None:
    """Hold `CROWD` idle connections to the first party's port: always new ones, and the oldest are closed."""
    raise_descriptors()
    port, held, opened = next(iter(relays.real.values())), deque[socket.socket](), 0
    while not over.wait(0.05):
        for _ in range(200):
            # from many addresses, none of them a party's
            source = f"127.1.{len(held) // 200}.1", 0
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 1.0, source_address=source))
                opened += 1
        while len(held) > CROWD:
            held.popleft().close()
    print(f"{opened:,} connections were opened, {len(held):,} held at the end")
    for connection in held:
        connection.close()
