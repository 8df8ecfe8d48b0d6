"""Connections of units over mutual TLS 1.3 with pinned certificates: one end of one, dialling, listening.

The standard library's `ssl` encrypts in memory, under a lock, and sockets carry many records of TLS at once: with a
socket of `ssl`, each record of 16 kB takes a system call at one end and two at the other.
"""

from __future__ import annotations

import math
import os
import resource
import select
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from treaty.errors import ConfigError
from treaty.messaging.certificates import Identity
from treaty.messaging.messages import clean
from treaty.messaging.units import ECHO, HELLO, LOAD, LOAD_BYTES, REFUSED, Header, UnitReader, header

HANDSHAKE_TIMEOUT = 10.0
"""Seconds in which a connection must show a pinned certificate and introduce itself."""
MOST_YOUNG = 64
"""Connections that may be without a pinned certificate at a time, besides two for each peer; the oldest is closed."""
# loads that a caller may send to measure a connection, and those it sends until one takes so many seconds
_MOST_LOADS, _LOADS, _LONG = 16, (0, 0, 0, 1 << 14, 1 << 16, 1 << 18, *[LOAD_BYTES] * 3), 1.0
# seconds for which a refused connection is read, so that the reason is not lost by a reset
_LINGER = 1.0
# bytes read at once, and the most that are put together with a unit's header; bytes sent at once; of a record of TLS
_READ, _WRITE, _RECORD = 1 << 16, 1 << 18, 1 << 14
# open files that a process asks for, if the system allows it as many
_DESCRIPTORS = 1 << 16


class LineRefused(ConnectionError):
    """The other end refuses the connection, in its own words."""


def tls_context(identity: Identity, pinned: Iterable[bytes], *, listens: bool) -> ssl.SSLContext:
    """Return a TLS 1.3 context with this identity, which admits the pinned certificates (PEM) alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # certificates are pinned, and `Line.certificate` is compared: a host's name plays no part
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=b"".join(pinned).decode())
    if listens:
        context.num_tickets = 0  # type: ignore[attr-defined, unused-ignore]
    # `load_cert_chain` reads files alone; a pipe is one that leaves no key on a disk
    ends = [_pipe_with(identity.certificate), _pipe_with(identity.key)]
    try:
        context.load_cert_chain(*(f"/dev/fd/{end}" for end in ends))
    finally:
        for end in ends:
            os.close(end)
    return context


def _pipe_with(content: bytes) -> int:
    end, start = os.pipe()
    with os.fdopen(start, "wb") as stream:
        stream.write(content)
    return end


class Line:
    """One end of a connection: one thread reads units, any thread sends them.

    `certificate` is the one that the other end has presented, DER. Reading and sending raise OSError once the
    connection is broken, and TimeoutError, of which it is the base, when the monotonic time `deadline` is over: a unit
    half sent leaves the connection of no use, while reading may go on. The TLS handshake is over when it is made; if it
    fails, OSError, and the socket is closed.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, deadline: float, *, listens: bool) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._units = UnitReader()
        # what has come and what is to leave, encrypted
        self._came, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._leaving, server_side=listens)
        self._buffer = memoryview(bytearray(_READ))
        # OpenSSL's state of the connection: one call at a time
        self._calling = threading.Lock()
        # units of several threads do not mix
        self._sending = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        try:
            self._shake_hands(deadline)
        except BaseException:
            connection.close()
            raise
        self.certificate = self._tls.getpeercert(binary_form=True) or b""

    def send(self, unit: bytes, content: bytes | memoryview = b"", deadline: float | None = None) -> None:
        """Send a unit: its header and its content."""
        with self._sending:
            first = len(content) if len(content) <= _READ else _RECORD - len(unit)
            self._encrypt(b"".join((unit, content[:first])))
            # without a copy, in whole records
            for start in range(first, len(content), _WRITE):
                self._transmit(deadline)
                self._encrypt(memoryview(content)[start : start + _WRITE])
            self._transmit(deadline)

    def header(self, deadline: float | None = None) -> Header:
        """Wait for the next unit, and return its header; `LineRefused` if the other end refuses the connection."""
        while (found := self._units.header()) is None:
            self._read(deadline)
        if found.kind == REFUSED:
            raise LineRefused(clean(bytes(self.content(found, deadline)).decode(errors="replace"), 600))
        return found

    def content(self, of: Header, deadline: float | None = None) -> memoryview:
        """Return the content of a unit, read-only; after a TimeoutError, another call goes on."""
        while (content := self._units.content(of)) is None:
            self._read(deadline)
        return content

    def refuse(self, text: str) -> None:
        """Say why the connection ends, as the last unit."""
        with suppress(OSError):
            content = text.encode()[: 4 << 10]
            self.send(header(REFUSED, len(content)), content, time.monotonic() + _LINGER)
            self._linger()

    def break_off(self) -> None:
        """End the connection; other threads that read or send get an OSError."""
        with self._calling:
            _shut(self._socket)

    def close(self) -> None:
        """End the connection, and free it: called by the thread that reads."""
        self.break_off()
        # a number of a file that is in use elsewhere would soon be another's
        with self._sending, self._calling:
            self._socket.close()

    def _shake_hands(self, deadline: float) -> None:
        while True:
            try:
                self._tls.do_handshake()
                return self._transmit(deadline)
            except ssl.SSLWantReadError:
                self._transmit(deadline)
                self._fill(deadline)
            except ssl.SSLError:
                # an alert says why
                self._transmit(deadline)
                self._linger()
                raise

    def _read(self, deadline: float | None) -> None:
        room = self._units.room()
        while True:
            try:
                with self._calling:
                    # a call without anything to read costs more than asking
                    if self._came.pending or self._tls.pending():
                        # with a buffer it returns how much it has put there
                        if not (nbytes := cast("int", self._tls.read(len(room), room))):
                            raise ConnectionError("the other end hung up")
                        return self._units.came(nbytes)
            except ssl.SSLWantReadError:
                pass  # part of a record
            self._fill(deadline)

    def _fill(self, deadline: float | None) -> None:
        """Wait for the next bytes."""
        _wait(self._readable, deadline)
        if not (came := self._socket.recv_into(self._buffer)):
            raise ConnectionError("the other end hung up")
        with self._calling:
            self._came.write(self._buffer[:came])

    def _encrypt(self, content: bytes | memoryview) -> None:
        with self._calling:
            self._tls.write(content)

    def _transmit(self, deadline: float | None) -> None:
        left = memoryview(self._leaving.read())
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                _wait(self._writable, deadline)

    def _linger(self) -> None:
        """Read what still comes until the other end hangs up: a reset would overtake our last words."""
        deadline = time.monotonic() + _LINGER
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline:
                _wait(self._readable, deadline)
                if not self._socket.recv_into(self._buffer):
                    return


def reason_of(error: OSError) -> str:
    """Return why the other end was not reached: "Connection refused", say."""
    return clean((error.strerror or str(error) or type(error).__name__).removesuffix("."))


def _wait(polled: select.poll, deadline: float | None) -> None:
    """Wait until a socket is ready, or broken; raise TimeoutError at the deadline."""
    left = None if deadline is None else 1000.0 * min(1e6, max(0.0, deadline - time.monotonic()))
    if not polled.poll(left):
        raise TimeoutError("no answer in time")


def measured(line: Line, deadline: float) -> tuple[float, float]:
    """Return the seconds of a way there and back, and those of each byte one way, on a connection just dialled.

    Loads grow until one takes a second, as a connection sends little at once when it is new. ConnectionError if the
    other end sends anything else than echoes.
    """
    empty, byte = math.inf, math.inf
    for nbytes in _LOADS:
        started = time.perf_counter()
        line.send(header(LOAD, nbytes), bytes(nbytes), deadline)
        found = line.header(deadline)
        if found.kind != ECHO or found.size != nbytes:
            raise ConnectionError(f"expected an echo of {nbytes} bytes, got unit {found.kind} of {found.size}")
        line.content(found, deadline)
        took = time.perf_counter() - started
        if not nbytes:
            empty = min(empty, took)
            continue
        byte = min(byte, max(0.0, took - empty) / (2 * nbytes))
        if took > _LONG:
            break
    return empty, byte


def dial(
    address: str, context: ssl.SSLContext, certificate: bytes, deadline: float, proxy: str | None = None,
    first: bytes = b"",
) -> Line:  # fmt: skip
    """Open a connection to ``host:port`` or ``unix:path``, where this certificate, DER, must be presented.

    `first` is sent in clear before the handshake. OSError if the connection cannot be opened in time, or its other end
    is another; see `connected`.
    """
    connection = connected(address, max(0.1, deadline - time.monotonic()), proxy)
    try:
        connection.sendall(first)
    except OSError:
        connection.close()
        raise
    line = Line(connection, context, deadline, listens=False)
    if line.certificate != certificate:
        line.close()
        raise ssl.SSLCertVerificationError(1, "the certificate presented is not the one pinned")
    return line


def connected(address: str, timeout: float, proxy: str | None = None) -> socket.socket:
    """Connect to ``host:port`` or ``unix:path``; OSError if it fails.

    `proxy`, ``http://[user:password@]host:port``, is asked for the connection by HTTP CONNECT.
    """
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        try:
            connection.connect(address.removeprefix("unix:"))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    if proxy is None:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout)
        except UnicodeError as error:
            raise ConnectionError(f"no host has such a name: {clean(str(error))}") from error
    else:
        through = urlsplit(proxy)
        where = through.netloc.rpartition("@")[2]
        tunnel = HTTPConnection(where, timeout=timeout)
        user = f"{unquote(through.username or '')}:{unquote(through.password or '')}".encode()
        basic = {"Proxy-Authorization": f"Basic {b64encode(user).decode()}"} if through.username else {}
        try:
            tunnel.set_tunnel(host, int(port), basic)
            tunnel.connect()
        except (OSError, HTTPException, UnicodeError) as error:
            tunnel.close()
            raise ConnectionError(f"the proxy {where}: {clean(str(error))}") from error
        connection = tunnel.sock
    _tune(connection)
    return connection


def _tune(connection: socket.socket) -> None:
    """Send small units at once, and have the system notice a peer whose machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # TCP_KEEPALIVE is what macOS calls TCP_KEEPIDLE
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Listener:
    """Accepts connections, and calls ``serve(line, introduction)`` in a thread of each; closes them when it returns.

    `address` is ``host:port`` (port 0: the system chooses) or ``unix:path``; `listener.address` has the actual port.
    `peers` is how many may call.
    `context` returns the TLS context of each new connection. A connection has `HANDSHAKE_TIMEOUT` for the handshake and
    the unit `HELLO`, whose content `serve` gets. ConfigError if the address cannot be listened at.
    """

    def __init__(
        self,
        name: str,
        address: str,
        context: Callable[[], ssl.SSLContext],
        serve: Callable[[Line, memoryview], None],
        peers: int = 0,
    ) -> None:
        self._peers, self._context, self._serve = peers, context, serve
        self._lock = threading.Lock()
        # connections without an introduction, oldest first
        self._young: dict[socket.socket, None] = {}
        self._closed = False
        raise_descriptors()
        try:
            if address.startswith("unix:"):
                Path(address.removeprefix("unix:")).unlink(missing_ok=True)
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.bind(address.removeprefix("unix:"))
                self._socket.listen(128)
                self.address = address
            else:
                host, _, port = address.rpartition(":")
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._socket = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=128)
                self.address = f"{host}:{self._socket.getsockname()[1]}"
        except OSError as error:
            raise ConfigError(
                f"{name} cannot listen at {address}: in use by another process, or no address of this machine; where "
                f'others reach it at another address, name its own as well: parties.{name}.listen = "0.0.0.0:7000", say'
            ) from error
        self._thread = threading.Thread(target=self._accept, name=f"treaty-listen-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections that were introduced stay open."""
        with self._lock:
            self._closed = True
            young = list(self._young)
        for connection in (self._socket, *young):
            _shut(connection)
        self._thread.join(_LINGER)
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)

    def _accept(self) -> None:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        with self._socket:
            while not self._closed:
                try:
                    # not for ever: on macOS the end of a socket that listens wakes nobody
                    if not waiting.poll(500) or self._closed:
                        continue
                    connection, _ = self._socket.accept()
                except OSError:
                    # the caller has gone, or no more files may be opened just now
                    time.sleep(0.01)
                    continue
                self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        try:
            if connection.family != socket.AF_UNIX:
                _tune(connection)
            with self._lock:
                self._young[connection] = None
                if len(self._young) > MOST_YOUNG + 2 * self._peers:
                    oldest = next(iter(self._young))
                    del self._young[oldest]
                    _shut(oldest)
            threading.Thread(target=self._greet, args=(connection,), name="treaty-caller", daemon=True).start()
        except (OSError, RuntimeError):
            # it has gone, or the system grants no thread
            with self._lock:
                self._young.pop(connection, None)
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Do the handshake, read the introduction, and serve the connection until it ends."""
        deadline, line, hello = time.monotonic() + HANDSHAKE_TIMEOUT, None, None
        # a stranger, or a connection that broke: the end that dialled knows
        with suppress(OSError):
            line = Line(connection, self._context(), deadline, listens=True)
            first = line.header(deadline)
            for _ in range(_MOST_LOADS):
                if first.kind == LOAD:
                    line.send(header(ECHO, first.size), line.content(first, deadline), deadline)
                    first = line.header(deadline)
            # of another unit, a frame of any size, no content is read
            hello = line.content(first, deadline) if first.kind == HELLO else None
        with self._lock:
            self._young.pop(connection, None)
        with closing(line or connection), suppress(OSError):
            if line is not None and hello is not None:
                self._serve(line, hello)


def _shut(connection: socket.socket) -> None:
    """End a connection; threads that wait for it wake up."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def raise_descriptors() -> None:
    """Raise this process's limit of open files to what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # no limit is a number below zero, or a very large one; macOS grants less than its hard limit
    with suppress(ValueError, OSError):
        if 0 <= soft < _DESCRIPTORS:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _DESCRIPTORS) if hard >= 0 else _DESCRIPTORS, hard))
