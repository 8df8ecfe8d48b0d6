"""The only port of a node: it forwards connections to the node itself or to the process of a running job.

A connection starts with a line, `TREATY/1 node`, `TREATY/1 job ID` or `TREATY/1 back TOKEN`. All further bytes are TLS
between the two nodes, or two parties of a job, which have pinned each other's certificates. The door reads none of them
and holds no key: without a pinned key, a caller gets no further than a TLS handshake.

Processes of a job dial their peers through local sockets, one for each peer, which the door connects with the peer's
door. If the peer has no address, for example behind a firewall, the door asks it in their conversation (`exchange`) to
dial back, with a random token that is valid for one connection and ten seconds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from treaty.files import explained
from treaty.messaging.tls import HANDSHAKE_TIMEOUT, connected

logger = logging.getLogger(__name__)

# Maximum bytes of the first line of a connection.
FIRST_LINE = 200
# Seconds for a caller to send its first line.
PATIENCE = 5.0
# Seconds to reach a peer, or to be dialled back by it.
DIAL_TIMEOUT = 10.0
# Maximum simultaneous connections at the open port; further ones are closed.
MOST_CONNECTIONS = 2000
# Likewise from one network address. A job has two connections in each direction with each peer.
MOST_OF_A_HOST = 400
# Maximum connections without a completed handshake; beyond, the oldest from the busiest address is closed.
MOST_YOUNG = 200
# Seconds after which a connection is trusted: without a pinned certificate it has been closed by then.
YOUTH = PATIENCE + HANDSHAKE_TIMEOUT + 1.0
# Seconds after which an idle connection is closed, at most twice as many; both ends ping each other every ten.
IDLE = 120.0
# Maximum simultaneous requests of a peer to be dialled back; further ones are ignored.
MOST_BACKS = 16
_HELD = 1 << 20  # bytes buffered in each direction before the sender has to wait

# ``ask_back(peer, token, job)``: ask a connected peer to dial back; False if it is not connected.
AskBack = Callable[[str, str, str], bool]


class Door:
    """Listens at `listen` (None: no open port), and in `folder` for this machine's processes.

    `addresses` has the peers' addresses, if they have one. The door runs in its own thread until `close`. `jobs` may be
    set to the ids of open jobs: a peer that dials the process of one before it listens is refused without a warning,
    as it will retry. `proxy`, ``http://[user:password@]host:port``, is an HTTP proxy through which peers are dialled.
    Raises ConfigError if it cannot listen at the address.
    """

    def __init__(
        self,
        listen: str | None,
        folder: Path,
        addresses: Mapping[str, str],
        ask_back: AskBack,
        proxy: str | None = None,
    ) -> None:
        self.address: str | None = None
        self.jobs: Container[str] = ()
        self._listen, self.folder, self._addresses, self._ask_back = listen, folder, addresses, ask_back
        self._proxy = proxy
        # The socket at which the node itself listens for conversations.
        self.node_socket = folder / "node"
        self._loop = asyncio.new_event_loop()
        # Peers that do not answer keep a thread each; with few, others would not be dialled.
        self._loop.set_default_executor(ThreadPoolExecutor(100, "treaty-dial"))
        # By token: the connection that comes back.
        self._awaited: dict[str, asyncio.Future[_End]] = {}
        # Of the open port, and for conversations with peers; and by job, one for each peer.
        self._servers: list[asyncio.Server] = []
        self._inner: dict[str, list[asyncio.Server]] = {}
        self._ends: set[_End] = set()
        # Connections by address, those without a completed handshake (oldest first), and dial-backs by peer.
        self._hosts: Counter[str] = Counter()
        self._young: dict[_End, str] = {}
        self._backs: Counter[str] = Counter()
        # Time of the last warning about refused callers, and the number since.
        self._warned_at, self._refused = 0.0, 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="treaty-door", daemon=True)
        self._thread.start()
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise

    def job_socket(self, job: str) -> Path:
        """Return the socket at which the process of a job listens for its peers."""
        return self.folder / job[:16] / "in"

    def peer_socket(self, peer: str) -> Path:
        """Return the socket through which this node dials a peer's node."""
        return self.folder / f"peer-{sorted(self._addresses).index(peer)}"

    def open_job(self, job: str, peers: list[str]) -> dict[str, Path]:
        """Make the sockets through which a job's process dials its peers; return them by peer."""
        folder = self.job_socket(job).parent
        sockets = {peer: folder / str(number) for number, peer in enumerate(peers)}
        self._run(self._open_job(job, sockets))
        return sockets

    def close_job(self, job: str) -> None:
        """Remove a job's sockets and their folder; open connections end with their processes."""
        self._run(self._close_job(job))

    def dial_back(self, peer: str, token: str, job: str) -> None:
        """Dial a peer that asked for it, and connect it with the job's process; returns at once."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._dial_back(peer, token, job)))

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        if self._listen is not None:
            host, _, port = self._listen.rpartition(":")
            at = host.strip("[]") or None, int(port)
            with explained(f"the node cannot listen at {self._listen}"):
                server = await self._loop.create_server(lambda: _End(self._ends, self._arrived), *at)
            self._servers.append(server)
            self.address = f"{host}:{server.sockets[0].getsockname()[1]}"
        self._spawn(self._close_idle())
        for peer in self._addresses:
            self._servers.append(await self._loop.create_unix_server(self._local(peer, ""), self.peer_socket(peer)))

    async def _open_job(self, job: str, sockets: Mapping[str, Path]) -> None:
        await self._close_job(job)
        self.job_socket(job).parent.mkdir(mode=0o700, exist_ok=True)
        self._inner[job] = [
            await self._loop.create_unix_server(self._local(peer, job), path) for peer, path in sockets.items()
        ]

    async def _close_job(self, job: str) -> None:
        for server in self._inner.pop(job, []):
            self._close_server(server)
        # Includes the process's own sockets.
        shutil.rmtree(self.job_socket(job).parent, ignore_errors=True)

    def _close_server(self, server: asyncio.Server) -> None:
        names = [socket.getsockname() for socket in server.sockets]
        server.close()
        for name in names:
            if isinstance(name, str):  # a local socket
                Path(name).unlink(missing_ok=True)

    async def _shut(self) -> None:
        for server in self._servers:
            self._close_server(server)
        for job in list(self._inner):
            await self._close_job(job)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in list(self._ends):
            end.transport.abort()
        await asyncio.sleep(0)

    def _arrived(self, end: _End) -> None:
        """Accept a connection at the open port, within the limits."""
        host = str((end.transport.get_extra_info("peername") or ("?",))[0])
        self._hosts[host] += 1
        self._young[end] = host
        aged = self._loop.call_later(YOUTH, self._young.pop, end, None)
        end.at_end += [lambda: self._left(end, host), aged.cancel]
        # Drop the oldest of the busiest address, so that a flood from one address cannot lock out the others.
        if len(self._young) > MOST_YOUNG:
            most, _ = Counter(self._young.values()).most_common(1)[0]
            self._hang_up(next(young for young, of in self._young.items() if of == most), most)
        if self._hosts.total() > MOST_CONNECTIONS or self._hosts[host] > MOST_OF_A_HOST:
            self._hang_up(end, host)
            return
        self._spawn(self._answer(end, host))

    def _hang_up(self, end: _End, host: str, why: str = "there are too many connections") -> None:
        """Close a connection; of many in a second, one is logged and the others are counted."""
        self._young.pop(end, None)
        end.transport.abort()
        self._refused += 1
        now = self._loop.time()
        if now - self._warned_at >= 1.0:
            logger.warning(
                "closed a connection from %s: %s; %d refused since the last such message", host, why, self._refused
            )
            self._warned_at, self._refused = now, 0

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE)
            # No data came at either end since the last check.
            idle = [end for end in self._ends if not (end.stirred or (end.other and end.other.stirred))]
            for end in self._ends:
                end.stirred = False
            for end in idle:
                end.transport.abort()

    def _left(self, end: _End, host: str) -> None:
        self._young.pop(end, None)
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]

    async def _answer(self, end: _End, host: str) -> None:
        """Read a caller's first line, and connect it as requested."""
        try:
            line = await asyncio.wait_for(end.first_line(), PATIENCE)
        except TimeoutError:
            line = b""
        match line.decode("ascii", "replace").split(" "):
            case ["TREATY/1", "node"]:
                path: Path | None = self.node_socket
            case ["TREATY/1", "job", job] if job in self._inner:
                path = self.job_socket(job)
            case ["TREATY/1", "back", token] if token in self._awaited and not self._awaited[token].done():
                self._awaited.pop(token).set_result(end)
                return
            case _:
                path = None
        if not end.lost and (path is None or not await self._connect(end, path)):
            if line.startswith(b"TREATY/1 job ") and line[13:].decode("ascii", "replace") in self.jobs:
                logger.debug("%s is early: the process of its job does not listen yet", host)
                end.transport.abort()
            else:
                self._hang_up(end, host, "its first line names nothing here")

    async def _connect(self, end: _End, path: Path) -> bool:
        """Connect a caller with a local socket; return whether a process listens there."""
        try:
            _, inner = await self._loop.create_unix_connection(lambda: _End(self._ends), str(path))
        except OSError:
            return False
        join(end, inner)
        return True

    def _local(self, peer: str, job: str) -> Callable[[], asyncio.BaseProtocol]:
        """Return the protocol factory for local connections to a peer."""
        return lambda: _End(self._ends, lambda end: self._spawn(self._reach(end, peer, job)))

    async def _reach(self, end: _End, peer: str, job: str) -> None:
        """Connect a local process with a peer's: dial its door, or ask it to dial back."""
        try:
            if peer in self._addresses:
                outer = await self._dial(peer, f"job {job}" if job else "node")
            else:
                outer = await self._called_back(peer, job)
        except (OSError, TimeoutError) as error:
            logger.debug("%s was not reached: %s", peer, error)
            end.transport.abort()
            return
        join(end, outer)

    async def _dial(self, peer: str, wanted: str) -> _End:
        to = self._addresses[peer], DIAL_TIMEOUT, self._proxy
        connection = await self._loop.run_in_executor(None, connected, *to)
        _, outer = await self._loop.create_connection(lambda: _End(self._ends), sock=connection)
        outer.transport.write(f"TREATY/1 {wanted}\n".encode())
        return outer

    async def _called_back(self, peer: str, job: str) -> _End:
        # The token links the connection that comes back to this request; it is unguessable and used once.
        token = secrets.token_hex(32)
        awaited = self._awaited[token] = self._loop.create_future()
        try:
            if not self._ask_back(peer, token, job):
                raise OSError(f"{peer} is not connected, and has no address here")
            return await asyncio.wait_for(awaited, DIAL_TIMEOUT)
        finally:
            self._awaited.pop(token, None)

    async def _dial_back(self, peer: str, token: str, job: str) -> None:
        if peer not in self._addresses or job not in self._inner or self._backs[peer] >= MOST_BACKS:
            return
        self._backs[peer] += 1
        try:
            outer = await self._dial(peer, f"back {token}")
        except (OSError, TimeoutError) as error:
            logger.info("%s asked to be dialled back and was not reached: %s", peer, error)
            return
        finally:
            self._backs[peer] -= 1
        if not await self._connect(outer, self.job_socket(job)):
            outer.transport.abort()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _End(asyncio.Protocol):
    """One end of a forwarded connection: data received here is written to the other end.

    Until it is joined with `other`, it reads only the first line. It is in `ends` while it is open, and `stirred` if
    data came since the last check.
    """

    transport: asyncio.Transport

    def __init__(self, ends: set[_End], arrived: Callable[[_End], None] | None = None) -> None:
        self._ends = ends
        self.at_end: list[Callable[[], None]] = []
        self._arrived = arrived
        self.other: _End | None = None
        self._held = bytearray()
        self._line: asyncio.Future[bytes] | None = None
        self.lost, self.stirred = False, True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._ends.add(self)
        transport.set_write_buffer_limits(high=_HELD)
        transport.pause_reading()
        if self._arrived is not None:
            self._arrived(self)

    async def first_line(self) -> bytes:
        """Read the first line; empty if none comes."""
        self._line = asyncio.get_running_loop().create_future()
        self.transport.resume_reading()
        return await self._line

    def join(self, other: _End) -> None:
        """Forward all data from now on, and what was read after the first line."""
        self.other = other
        if other.lost or self.lost:
            self.transport.close()
            return
        if self._held:
            other.transport.write(bytes(self._held))
            self._held.clear()
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self.stirred = True
        if self.other is not None:
            self.other.transport.write(data)
            return
        self._held += data
        line, found, rest = self._held.partition(b"\n")
        if (found or len(self._held) > FIRST_LINE) and self._line is not None and not self._line.done():
            self.transport.pause_reading()
            self._held = bytearray(rest)
            self._line.set_result(bytes(line) if found and len(line) <= FIRST_LINE else b"")

    def pause_writing(self) -> None:
        # Back-pressure: while this end's buffer is full, stop reading at the other end.
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._ends.discard(self)
        if self._line is not None and not self._line.done():
            self._line.set_result(b"")
        if self.other is not None:
            self.other.transport.close()
        for call in self.at_end:
            call()


def join(one: _End, other: _End) -> None:
    """Forward data in both directions."""
    one.join(other)
    other.join(one)
