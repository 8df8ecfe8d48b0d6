"""A TCP proxy between two parties that can fail in the ways networks and forwarders do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time


class Proxy:
    """Carries TCP connections to a target, ``host:port``, until told to cut, hold, refuse or hang up on them."""

    def __init__(self, target: str, address: str = "127.0.0.1:0") -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        host, _, port = address.rpartition(":")
        self.listener = socket.create_server((host, int(port)))
        self.port = self.listener.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self.flowing = threading.Event()
        self.flowing.set()
        self.open: list[socket.socket] = []
        self.carried = 0
        self.cut_after: int | None = None
        self.bytes_per_second: float | None = None
        self.hangs_up = False
        self.swallowed: set[socket.socket] = set()
        self.stalled: set[socket.socket] = set()
        threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken = listener.accept()[0]
                if self.hangs_up:
                    taken.close()
                    continue
                try:
                    ends = taken, socket.create_connection(self.target)
                except OSError:
                    taken.close()
                    continue
                self.open.extend(ends)
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self.carry, args=(one, other), daemon=True).start()

    def carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self.flowing.wait()
                if self.bytes_per_second is not None:
                    time.sleep(len(data) / self.bytes_per_second)
                while one in self.stalled:
                    time.sleep(0.01)
                self.carried += len(data)
                if one in self.swallowed:
                    continue
                if self.cut_after is not None and self.carried > self.cut_after:
                    self.cut_after = None
                    self.cut()
                other.sendall(data)
        self.hang_up([one, other])

    def fail(self, how: str, seconds: float) -> None:
        """Fail for some seconds, then carry connections as before.

        refuse: connections are cut, new ones refused, as by a forwarder that restarts; reset: cut by RST, new ones
        refused; hang up: cut, and new ones accepted and closed at once, as by a forwarder whose target is away; freeze:
        nothing goes through, and no connection ends; drain: new ones are refused, those open go on.
        """
        if how == "freeze":
            self.flowing.clear()
            time.sleep(seconds)
            self.flowing.set()
        elif how == "hang up":
            self.hangs_up = True
            self.cut()
            time.sleep(seconds)
            self.hangs_up = False
        else:
            self.refuse()
            if how != "drain":
                self.cut(reset=how == "reset")
            time.sleep(seconds)
            self.take_again()

    def ends(self, port: int) -> list[socket.socket]:
        """Return both ends of the connection that a caller has from a port."""
        at = next(k for k, end in enumerate(self.open) if k % 2 == 0 and end.getpeername()[1] == port)
        return self.open[at : at + 2]

    def refuse(self) -> None:
        self.hang_up([self.listener])

    def take_again(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()

    def cut(self, *, reset: bool = False) -> None:
        if reset:
            for connection in self.open:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    # else the thread that reads it would keep it open
                    connection.shutdown(socket.SHUT_RD)
                connection.close()
        self.hang_up(self.open)
        self.open = []

    def close(self) -> None:
        self.hang_up([self.listener, *self.open])
        self.flowing.set()

    @staticmethod
    def hang_up(connections: list[socket.socket]) -> None:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class HttpProxy(Proxy):
    """An HTTP proxy: opens a connection to the address that CONNECT names, for callers with the password, if any."""

    def __init__(self, authorisation: str | None = None) -> None:
        self.authorisation = authorisation
        self.asked: list[str] = []
        super().__init__("127.0.0.1:0")

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self.answer, args=(listener.accept()[0],), daemon=True).start()

    def answer(self, taken: socket.socket) -> None:
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += taken.recv(1)
        first, *headers = request.decode().split("\r\n")
        if self.authorisation is not None and f"Proxy-Authorization: {self.authorisation}" not in headers:
            taken.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            taken.close()
            return
        address = first.split(" ")[1]
        self.asked.append(address)
        host, _, port = address.rpartition(":")
        other = socket.create_connection((host.strip("[]"), int(port)))
        taken.sendall(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 proxy\r\n\r\n")
        self.open.extend((taken, other))
        for one, to in ((taken, other), (other, taken)):
            threading.Thread(target=self.carry, args=(one, to), daemon=True).start()
