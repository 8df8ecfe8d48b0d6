"""The one port of a node: tells connections for the node from those for a running job, and passes bytes on.

A connection begins with one line, `TREATY/1 node`, `TREATY/1 job ID` or `TREATY/1 back TOKEN`; all that follows is TLS
between the two nodes, or between two parties of a job, which have pinned each other's certificates. The door reads
none of it, and holds no key: whoever gets past it without a pinned key gets no further than a TLS handshake.

Processes of a job dial their peers through sockets of this machine, one for each peer, which the door connects with
the peer's door. Where the peer has no address, since its firewall lets nobody in, the door asks it over the
conversation that it has begun (`exchange`) to dial back: with a random token, good for one connection and ten seconds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Mapping
from pathlib import Path
from typing import Any

from treaty.errors import ConfigError
from treaty.messaging.grpc_wire import HANDSHAKE_TIMEOUT

logger = logging.getLogger(__name__)

FIRST_LINE = 200
"""Bytes, at most, of the line with which a connection begins."""
PATIENCE = 5.0
"""Seconds that a caller has to say what it wants."""
DIAL_TIMEOUT = 10.0
"""Seconds to reach a peer, or to be dialled back by it."""
MOST_CONNECTIONS = 2000
"""Connections at once at the open port; whoever is beyond is hung up on."""
MOST_OF_A_HOST = 400
"""Likewise from one network address. A job has two connections each way with each peer."""
MOST_YOUNG = 200
"""Connections that may still turn out to be strangers'; beyond, the oldest of the address with most of them goes."""
YOUTH = PATIENCE + HANDSHAKE_TIMEOUT + 1.0
"""Seconds after which a connection is no stranger's: whoever shows no pinned certificate is hung up on by then."""
IDLE = 120.0
"""Seconds after which a connection through which nothing has gone is closed, twice as many at most; gRPC's two ends ask
each other every ten whether they are there."""
MOST_BACKS = 16
"""Peers' wishes to be dialled back that are being met, of each; further ones are not."""
_HELD = 1 << 20  # bytes under way in each direction before the sender is made to wait

AskBack = Callable[[str, str, str], bool]
"""``ask_back(peer, token, job)``: ask a connected peer to dial back; False where it is not connected. "" is no job."""


class Door:
    """Listens at `listen` (None: no open port), and in `folder` for this machine's own processes.

    `addresses` says where peers' doors are, as far as they have one. Runs in a thread of its own from `start` to
    `close`. `jobs` may be set to the ids of the node's open jobs: a peer that dials the process of one before it
    listens is refused without a warning, since it dials again. Raises ConfigError where the address cannot be
    listened at.
    """

    def __init__(self, listen: str | None, folder: Path, addresses: Mapping[str, str], ask_back: AskBack) -> None:
        self.address: str | None = None
        self.jobs: Container[str] = ()
        self._listen, self.folder, self._addresses, self._ask_back = listen, folder, addresses, ask_back
        self._loop = asyncio.new_event_loop()
        self._awaited: dict[str, asyncio.Future[_End]] = {}  # by token: the connection that is to come back
        self._servers: list[asyncio.Server] = []  # of the open port, and for conversations with peers
        self._inner: dict[str, list[asyncio.Server]] = {}  # by job: its sockets, one for each peer
        self._ends: set[_End] = set()
        self._hosts: Counter[str] = Counter()
        self._young: dict[_End, str] = {}  # with the address of each, oldest first
        self._backs: Counter[str] = Counter()
        self._said, self._refused = 0.0, 0  # when it was last said that callers are refused, and how many since
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="treaty-door", daemon=True)
        self._thread.start()
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise

    @property
    def node_socket(self) -> Path:
        """Where the node itself listens for conversations with other nodes."""
        return self.folder / "node"

    def job_socket(self, job: str) -> Path:
        """Where the process of a job listens for its peers."""
        return self.folder / job[:16] / "in"

    def peer_socket(self, peer: str) -> Path:
        """Where this node dials a peer's."""
        return self.folder / f"peer-{sorted(self._addresses).index(peer)}"

    def open_job(self, job: str, peers: list[str]) -> dict[str, Path]:
        """Make the sockets through which a job's process dials its peers; return them by peer."""
        folder = self.job_socket(job).parent
        sockets = {peer: folder / str(number) for number, peer in enumerate(peers)}
        self._run(self._open_job(job, sockets))
        return sockets

    def close_job(self, job: str) -> None:
        """Remove a job's sockets and their folder; connections that stand end with their processes."""
        self._run(self._close_job(job))

    def dial_back(self, peer: str, token: str, job: str) -> None:
        """Dial a peer that has asked for it, and connect it with the job's process; returns at once."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._dial_back(peer, token, job)))

    def close(self) -> None:
        """Stop listening, and break all connections."""
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        if self._listen is not None:
            host, _, port = self._listen.rpartition(":")
            try:
                server = await self._loop.create_server(
                    lambda: _End(self._ends, self._arrived), host.strip("[]") or None, int(port)
                )
            except OSError as error:
                raise ConfigError(f"the node cannot listen at {self._listen}: {error.strerror or error}") from None
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
        shutil.rmtree(self.job_socket(job).parent, ignore_errors=True)  # with the process's own sockets

    def _close_server(self, server: asyncio.Server) -> None:
        names = [socket.getsockname() for socket in server.sockets]
        server.close()
        for name in names:
            if isinstance(name, str):  # of a socket of this machine
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
        """Take a connection at the open port."""
        host = str((end.transport.get_extra_info("peername") or ("?",))[0])
        self._hosts[host] += 1
        self._young[end] = host
        aged = self._loop.call_later(YOUTH, self._young.pop, end, None)
        end.at_end += [lambda: self._left(end, host), aged.cancel]
        if len(self._young) > MOST_YOUNG:
            most, _ = Counter(self._young.values()).most_common(1)[0]
            self._hang_up(next(young for young, of in self._young.items() if of == most), most)
        if self._hosts.total() > MOST_CONNECTIONS or self._hosts[host] > MOST_OF_A_HOST:
            self._hang_up(end, host)
            return
        self._spawn(self._answer(end, host))

    def _hang_up(self, end: _End, host: str, why: str = "there are too many connections") -> None:
        """Refuse a connection; of many refused in a second one is named, and the others are counted."""
        self._young.pop(end, None)
        end.transport.abort()
        self._refused += 1
        now = self._loop.time()
        if now - self._said >= 1.0:
            logger.warning("hung up on %s: %s; %d refused since this was said last", host, why, self._refused)
            self._said, self._refused = now, 0

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE)
            idle = [end for end in self._ends if end.is_idle]
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
        """Read a caller's first line, and connect it with what it asks for."""
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
                self._hang_up(end, host, "it asked for nothing that is here")

    async def _connect(self, end: _End, path: Path) -> bool:
        """Connect a caller with a socket of this machine; return whether somebody listens there."""
        try:
            _, inner = await self._loop.create_unix_connection(lambda: _End(self._ends), str(path))
        except OSError:
            return False
        join(end, inner)
        return True

    def _local(self, peer: str, job: str) -> Callable[[], asyncio.BaseProtocol]:
        """Return what takes connections of this machine's processes that are for a peer."""
        return lambda: _End(self._ends, lambda end: self._spawn(self._reach(end, peer, job)))

    async def _reach(self, end: _End, peer: str, job: str) -> None:
        """Connect a process of this machine with a peer's: by dialling its door, or by having it dial ours."""
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
        host, _, port = self._addresses[peer].rpartition(":")
        opened = self._loop.create_connection(lambda: _End(self._ends), host.strip("[]"), int(port))
        _, outer = await asyncio.wait_for(opened, DIAL_TIMEOUT)
        outer.transport.write(f"TREATY/1 {wanted}\n".encode())
        return outer

    async def _called_back(self, peer: str, job: str) -> _End:
        token = secrets.token_hex(32)
        awaited = self._awaited[token] = self._loop.create_future()
        try:
            if not self._ask_back(peer, token, job):
                raise OSError(f"{peer} has not connected, and has no address here")
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
    """One end of a connection that is passed on: what comes in goes out at the `other` end.

    Until there is one, nothing but a first line is read. It is among `ends` for as long as it is open, and has
    `stirred` where something came.
    """

    transport: asyncio.Transport

    def __init__(self, ends: set[_End], arrived: Callable[[_End], None] | None = None) -> None:
        self._ends = ends
        self.at_end: list[Callable[[], None]] = []
        self._arrived = arrived
        self._other: _End | None = None
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
        """Read up to the first line's end; empty where none comes."""
        self._line = asyncio.get_running_loop().create_future()
        self.transport.resume_reading()
        return await self._line

    def join(self, other: _End) -> None:
        """Pass on what comes from now on, and what was read beyond the first line."""
        self._other = other
        if other.lost or self.lost:
            self.transport.close()
            return
        if self._held:
            other.transport.write(bytes(self._held))
            self._held.clear()
        self.transport.resume_reading()

    @property
    def is_idle(self) -> bool:
        """Whether neither end of the connection has `stirred`."""
        return not self.stirred and (self._other is None or not self._other.stirred)

    def data_received(self, data: bytes) -> None:
        self.stirred = True
        if self._other is not None:
            self._other.transport.write(data)
            return
        self._held += data
        line, found, rest = self._held.partition(b"\n")
        if (found or len(self._held) > FIRST_LINE) and self._line is not None and not self._line.done():
            self.transport.pause_reading()
            self._held = bytearray(rest)
            self._line.set_result(bytes(line) if found and len(line) <= FIRST_LINE else b"")

    def pause_writing(self) -> None:
        if self._other is not None and not self._other.transport.is_closing():
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.transport.is_closing():
            self._other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._ends.discard(self)
        if self._line is not None and not self._line.done():
            self._line.set_result(b"")
        if self._other is not None:
            self._other.transport.close()
        for call in self.at_end:
            call()


def join(one: _End, other: _End) -> None:
    """Pass on in both directions."""
    one.join(other)
    other.join(one)
