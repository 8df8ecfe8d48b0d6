"""What an attacker has: a peer's keys, raw notes, mutations, and the patience to send them."""

from __future__ import annotations

import importlib
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from treaty import systems
from treaty.machine import process
from treaty.messaging import units
from treaty.messaging.tls import Line, dial, tls_context
from treaty.node.cards import read_card
from treaty.node.door import Door
from treaty.node.exchange import VERSION, _der
from treaty.node.identity import Own, load_own, sign
from treaty.node.proposals import Hello, Note, id_of, statement

JOB: dict[str, Any] = {
    "name": "a job",
    "active": "bank",
    "label": "y",
    "parties": {"bank": {"table": "rows", "predict_table": "rows"}, "shop": {"table": "rows", "predict_table": "rows"}},
    "align": {"on": "id"},
    "boosting": {"n_estimators": 5, "max_depth": 3},
}


def content(job: Any = JOB, **fields: Any) -> bytes:
    """Return a proposal of today; `job` is fields, or JSON as it is."""
    plain = {
        "job": job if isinstance(job, str) else _json(job),
        "verb": "train",
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "nonce": secrets.token_hex(16),
    }
    return msgspec.json.encode({**plain, **fields})


def _json(job: Any) -> str:
    import json  # msgspec writes no whole numbers of more than 64 bits

    return json.dumps(job)


def signed(own: Own, proposal: bytes) -> tuple[bytes, bytes]:
    """Return a proposal, and its signature by the organisation that submits it."""
    return proposal, sign(own, statement("submit", id_of(proposal), own.name))


@contextmanager
def without_side_effects() -> Iterator[list[str]]:
    """Give the names of modules that are imported by name outside the package meanwhile; none is."""
    imported: list[str] = []
    real = importlib.import_module

    def noted(name: str, package: str | None = None) -> Any:
        if not name.startswith("treaty."):
            imported.append(name)
            raise ImportError(name)
        return real(name, package)

    with mock.patch.object(systems, "import_module", noted), mock.patch.object(process, "import_module", noted):
        yield imported


def mutated(data: bytes, seed: int) -> bytes:
    """Change a few bytes, cut, repeat or insert some; the same for the same seed."""
    rng, out = random.Random(seed), bytearray(data)
    pieces = [
        b"\0",
        b"\xff" * 4,
        b'"',
        b"[",
        b"{",
        b"}",
        b"\xdf\xff\xff\xff\xff",
        b"9" * 30,
        b"null",
        b"\n",
        b":",
        b"../",
    ]
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        to = min(len(out), at + rng.choice((1, 2, 8, 40)))
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at:to]
            case 2:
                out[at:at] = out[at:to] * rng.choice((1, 3, 50))
            case 3:
                out[at:at] = rng.choice(pieces)
            case _:
                out[at:to] = rng.randbytes(to - at)
    return bytes(out)


class Peer:
    """An organisation that says whatever it likes to another's node, under its own keys.

    `door` is where the node's door is, ``host:port``; None: `socket` is where its conversations are.
    """

    def __init__(self, keys: Path, name: str, other: Path, folder: Path, door: str | None, at: Path | None = None):
        self.own, self.card = load_own(keys, name), read_card(other)
        folder.mkdir(exist_ok=True)
        self._door = None if door is None else Door(None, folder, {self.card.name: door}, lambda *_: False)
        self._socket = at if self._door is None else self._door.peer_socket(self.card.name)
        self._lines: list[Line] = []
        self._talks: list[Talk] = []

    def close(self) -> None:
        for line in self._lines:
            line.break_off()
        for talk in self._talks:
            talk.end()
            for thread in talk.threads:
                thread.join()
        for line in self._lines:
            line.close()
        if self._door is not None:
            self._door.close()

    def line(self) -> Line:
        """Open a connection, on which nothing is said yet."""
        certificate = self.card.certificate.encode()
        context = tls_context(self.own.identity, [certificate], listens=False)
        self._lines.append(dial(f"unix:{self._socket}", context, _der(certificate), time.monotonic() + 10.0))
        return self._lines[-1]

    def talk(self, hello: Any = None, *, reads: bool = True) -> Talk:
        """Open a conversation; `hello` is a note, or bytes as they are, in place of the one expected."""
        first = hello or Hello(VERSION, self.own.name, "1", secrets.token_bytes(16))
        self._talks.append(Talk(self, first, reads=reads))
        return self._talks[-1]


class Talk:
    """One conversation as an attacker has it: what it says is up to it, what it hears is kept."""

    def __init__(self, peer: Peer, hello: Any, *, reads: bool = True) -> None:
        self.heard: list[Any] = []
        self.error: OSError | None = None
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self._out: deque[bytes | None] = deque()
        self._there = threading.Condition()
        try:
            self.line = peer.line()
            content = _encoded(hello)
            self.line.send(units.header(units.HELLO, len(content)), content)
        except OSError as error:
            self.error = error
            self.over.set()
            return
        for work in [self._write, self._read] if reads else [self._write]:
            self.threads.append(threading.Thread(target=work, daemon=True))
            self.threads[-1].start()

    def say(self, *notes: Any) -> None:
        """Send notes, or bytes as they are."""
        with self._there:
            self._out += [_encoded(note) for note in notes]
            self._there.notify()

    def end(self) -> None:
        with self._there:
            self._out.append(None)
            self._there.notify()

    def wait_over(self, seconds: float) -> None:
        assert self.over.wait(seconds), f"not hung up on in {seconds:g} s"

    def next(self, kind: Any, seconds: float = 10.0) -> Any:
        """Wait for a note of a kind, and take it."""
        deadline = time.monotonic() + seconds
        while True:
            for note in list(self.heard):
                if isinstance(note, kind):
                    self.heard.remove(note)
                    return note
            assert time.monotonic() < deadline, f"no {kind} in {seconds:g} s, but {self.heard}, {self.error}"
            time.sleep(0.02)

    def _write(self) -> None:
        with suppress(OSError):
            while not self.over.is_set():
                with self._there:
                    self._there.wait_for(lambda: self._out, 0.5)
                    data = self._out.popleft() if self._out else b""
                if data is None:
                    return self.line.break_off()
                if data:
                    self.line.send(units.header(units.FRAME, len(data)), data)

    def _read(self) -> None:
        try:
            while True:
                found = self.line.header()
                assert found.kind == units.FRAME, found
                self.heard.append(msgspec.msgpack.decode(self.line.content(found), type=Note))
        except OSError as error:
            self.error = error
        finally:
            self.over.set()


def _encoded(note: Any) -> bytes:
    return note if isinstance(note, bytes) else msgspec.msgpack.encode(note)


def dialled(address: str, first: bytes = b"") -> socket.socket:
    """Open a connection to a door, and send the first bytes."""
    host, _, port = address.rpartition(":")
    opened = socket.create_connection((host, int(port)), 5.0)
    if first:
        opened.sendall(first)
    return opened


def is_hung_up(connection: socket.socket, seconds: float = 10.0) -> bool:
    """Whether the other end closes a connection."""
    connection.settimeout(seconds)
    with suppress(ConnectionError):
        try:
            while connection.recv(65536):
                pass
        except TimeoutError:
            return False
    return True


def rss(pid: int) -> int:
    """Return a process's resident MiB."""
    fields = Path(f"/proc/{pid}/status").read_text().split("\n")
    return int(next(line for line in fields if line.startswith("VmRSS")).split()[1]) >> 10
